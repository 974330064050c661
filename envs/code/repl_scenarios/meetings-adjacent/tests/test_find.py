from meetings.find import first_common_slot
from meetings.room import Room


def rooms(*days):
    found = []
    for number, day in enumerate(days):
        room = Room(f"room {number}")
        for text in day:
            room.book(text, "x")
        found.append(room)
    return found


def test_empty_rooms():
    assert first_common_slot(rooms([], []), 60) == 480


def test_earliest():
    assert first_common_slot(rooms(["08:00-09:30"], ["09:00-10:00"]), 60) == 600


def test_a_gap_that_just_fits():
    assert first_common_slot(rooms(["08:00-09:00", "10:00-18:00"], []), 60) == 540


def test_none():
    assert first_common_slot(rooms(["08:00-13:00"], ["12:00-18:00"]), 30) is None
