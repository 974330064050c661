import pytest

from meetings.find import first_common_slot
from meetings.interval import Span
from meetings.room import Conflict, Room


def booked(*texts, **hours):
    room = Room("Elm", **hours)
    for text in texts:
        room.book(text, f"at {text}")
    return room


def test_three_in_a_row():
    assert len(booked("13:00-14:00", "15:15-16:00", "14:00-15:15").booked) == 3


def test_spans_that_touch():
    assert not Span(60, 90).overlaps(Span(90, 95)) and not Span(90, 95).overlaps(Span(60, 90))


def test_spans_that_overlap():
    assert Span(60, 90).overlaps(Span(89, 95)) and Span(60, 90).overlaps(Span(70, 80))


def test_the_same_time_twice():
    with pytest.raises(Conflict, match="at 11:00-11:30"):
        booked("11:00-11:30").book("11:00-11:30", "x")


def test_a_minute_too_long():
    with pytest.raises(Conflict):
        booked("11:00-11:30").book("10:30-11:01", "x")


def test_outside_the_hours():
    with pytest.raises(Conflict, match="closed"):
        booked(opens="10:00").book("09:30-10:30", "x")


def test_gaps_that_just_fit():
    room = booked("08:45-12:00", "12:45-18:00")
    assert room.free(45) == [Span(480, 525), Span(720, 765)] and room.free(46) == []


def test_a_gap_at_the_end_that_just_fits():
    assert booked("08:00-17:40").free(20) == [Span(1060, 1080)]


def test_all_gaps():
    assert booked("10:00-10:30", closes="12:00").free() == [Span(480, 600), Span(630, 720)]


def test_no_gap():
    assert booked("08:00-12:00", "13:00-18:00").free(61) == []


def test_a_common_slot_that_just_fits():
    assert first_common_slot([booked("08:00-11:15", "11:45-18:00"), booked("08:00-09:00")], 30) == 675


def test_common_slots():
    assert first_common_slot([booked("08:00-10:00"), booked("08:30-11:00")], 90) == 660
    assert first_common_slot([booked("08:00-14:00"), booked("13:50-18:00")], 10) is None
