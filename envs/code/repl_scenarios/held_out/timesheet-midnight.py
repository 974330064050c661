import pytest

from timesheet import Shift, by_day, by_week
from timesheet.zone import zone


def days(start, end, where="+00:00"):
    return by_day([Shift.parse(start, end)], where)


def test_within_a_day():
    assert days("2023-07-05T06:15", "2023-07-05T10:00") == {"2023-07-05": 3.75}


def test_two_nights():
    assert days("2023-07-05T18:00", "2023-07-07T06:00") == {
        "2023-07-05": 6.0, "2023-07-06": 24.0, "2023-07-07": 6.0}


def test_over_midnight_in_the_east():
    assert days("2023-07-05T19:00", "2023-07-05T23:00", "+03:00") == {"2023-07-05": 2.0, "2023-07-06": 2.0}


def test_over_midnight_there_and_not_here():
    assert days("2023-07-05T13:00", "2023-07-05T17:00", "+09:00") == {"2023-07-05": 2.0, "2023-07-06": 2.0}


def test_over_midnight_here_and_not_there():
    assert days("2023-07-05T23:00", "2023-07-06T01:00", "-06:00") == {"2023-07-05": 2.0}


def test_in_the_west():
    assert days("2023-07-05T03:30", "2023-07-05T05:00", "-04:30") == {"2023-07-04": 1.0, "2023-07-05": 0.5}


def test_all_on_the_next_day():
    assert days("2023-12-31T22:00", "2023-12-31T23:30", "+02:00") == {"2024-01-01": 1.5}


def test_sums_of_a_day():
    shifts = [Shift.parse("2023-07-05T08:00", "2023-07-05T09:20"), Shift.parse("2023-07-05T10:00", "2023-07-05T10:40")]
    assert by_day(shifts) == {"2023-07-05": 2.0}


def test_order():
    shifts = [Shift.parse(f"2023-07-{day}T08:00", f"2023-07-{day}T09:00") for day in (12, 10, 11)]
    assert [*by_day(shifts)] == ["2023-07-10", "2023-07-11", "2023-07-12"]


def test_week_of_a_night():
    shift = Shift.parse("2023-07-09T21:00", "2023-07-10T02:00")
    assert by_week([shift]) == {(2023, 27): 3.0, (2023, 28): 2.0}


def test_week_elsewhere():
    shift = Shift.parse("2023-07-09T21:00", "2023-07-10T02:00")
    assert by_week([shift], "-03:00") == {(2023, 27): 5.0}
    assert by_week([shift], "+01:00") == {(2023, 27): 2.0, (2023, 28): 3.0}


def test_zones_and_order_of_times():
    assert zone("+05:45").utcoffset(None).total_seconds() == 20700
    with pytest.raises(ValueError):
        Shift.parse("2023-07-05T09:00", "2023-07-05T08:59")
