import pytest

from meetings.interval import Span
from meetings.room import Conflict, Room


@pytest.fixture
def room():
    return Room("Oak")


def test_a_taken_room(room):
    room.book("09:00-10:00", "standup")
    with pytest.raises(Conflict, match="standup"):
        room.book("09:30-10:30", "review")


def test_one_meeting_after_another(room):
    room.book("09:00-10:00", "standup")
    room.book("10:00-11:00", "review")
    room.book("08:30-09:00", "coffee")
    assert len(room.booked) == 3


def test_a_meeting_within_another(room):
    room.book("09:00-12:00", "workshop")
    with pytest.raises(Conflict):
        room.book("10:00-10:15", "call")


def test_closed(room):
    with pytest.raises(Conflict, match="closed"):
        room.book("07:00-08:30", "early")


def test_whole_day(room):
    room.book("08:00-18:00", "fair")
    assert room.free() == []


def test_gaps(room):
    room.book("09:00-10:00", "a")
    room.book("12:00-12:30", "b")
    assert room.free() == [Span(480, 540), Span(600, 720), Span(750, 1080)]


def test_gaps_of_exactly_the_length(room):
    room.book("08:30-17:30", "a")
    assert room.free(30) == [Span(480, 510), Span(1050, 1080)]
    assert room.free(31) == []
