import pytest

from timesheet import Shift, by_day, by_week
from timesheet.zone import zone


def test_one_day():
    assert by_day([Shift.parse("2024-03-01T09:00", "2024-03-01T17:30")]) == {"2024-03-01": 8.5}


def test_over_midnight():
    shift = Shift.parse("2024-03-01T22:00", "2024-03-02T06:00")
    assert by_day([shift]) == {"2024-03-01": 2.0, "2024-03-02": 6.0}


def test_late_evening_in_utc_is_the_next_day_in_the_east():
    shift = Shift.parse("2024-03-01T22:30", "2024-03-01T23:30")
    assert by_day([shift], "+02:00") == {"2024-03-02": 1.0}


def test_midnight_is_the_zones():
    shift = Shift.parse("2024-03-01T20:00", "2024-03-02T02:00")
    assert by_day([shift], "+02:00") == {"2024-03-01": 2.0, "2024-03-02": 4.0}


def test_west():
    shift = Shift.parse("2024-03-02T03:00", "2024-03-02T04:00")
    assert by_day([shift], "-05:00") == {"2024-03-01": 1.0}


def test_half_hours():
    shift = Shift.parse("2024-03-01T18:00", "2024-03-01T19:00")
    assert by_day([shift], "+05:30") == {"2024-03-01": 0.5, "2024-03-02": 0.5}


def test_two_shifts_of_a_day():
    shifts = [Shift.parse("2024-03-01T08:00", "2024-03-01T12:00"), Shift.parse("2024-03-01T13:00", "2024-03-01T15:15")]
    assert by_day(shifts) == {"2024-03-01": 6.25}


def test_days_are_in_order():
    shifts = [Shift.parse(f"2024-03-{day:02d}T08:00", f"2024-03-{day:02d}T09:00") for day in (5, 1, 3)]
    assert list(by_day(shifts)) == ["2024-03-01", "2024-03-03", "2024-03-05"]


def test_weeks():
    shift = Shift.parse("2024-03-03T20:00", "2024-03-04T04:00")
    assert by_week([shift]) == {(2024, 9): 4.0, (2024, 10): 4.0}


def test_weeks_in_a_zone():
    shift = Shift.parse("2024-03-03T20:00", "2024-03-04T04:00")
    assert by_week([shift], "+04:00") == {(2024, 10): 8.0}


def test_zone():
    assert zone("-03:30").utcoffset(None).total_seconds() == -12600


def test_end_before_start():
    with pytest.raises(ValueError):
        Shift.parse("2024-03-01T09:00", "2024-03-01T09:00")
