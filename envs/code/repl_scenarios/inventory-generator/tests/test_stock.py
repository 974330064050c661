import pytest

from inventory import OutOfStock, Stock
from inventory.order import parse_lines, total


@pytest.fixture
def stock():
    return Stock(bolt=10, nut=20)


def test_parse():
    assert list(parse_lines("2 x bolt, 10 x nut")) == [("bolt", 2), ("nut", 10)]


def test_total():
    assert total([("bolt", 2), ("nut", 1), ("bolt", 3)]) == {"bolt": 5, "nut": 1}


def test_reserve_a_list(stock):
    stock.reserve([("bolt", 4)])
    assert stock.available("bolt") == 6


def test_reserve_a_parsed_order(stock):
    stock.reserve(parse_lines("4 x bolt, 20 x nut"))
    assert (stock.available("bolt"), stock.available("nut")) == (6, 0)


def test_reserve_too_much(stock):
    with pytest.raises(OutOfStock):
        stock.reserve(parse_lines("1 x nut, 11 x bolt"))
    assert stock.available("nut") == 20


def test_reserve_twice(stock):
    stock.reserve(parse_lines("6 x bolt"))
    with pytest.raises(OutOfStock):
        stock.reserve(parse_lines("6 x bolt"))


def test_a_thing_named_twice(stock):
    with pytest.raises(OutOfStock):
        stock.reserve([("bolt", 6), ("bolt", 6)])


def test_ship_a_list(stock):
    stock.reserve([("nut", 5)])
    stock.ship([("nut", 5)])
    assert stock.shelf["nut"] == 15 and stock.available("nut") == 15


def test_ship_a_parsed_order(stock):
    stock.reserve([("nut", 5), ("bolt", 1)])
    stock.ship(parse_lines("5 x nut, 1 x bolt"))
    assert stock.shelf == {"bolt": 9, "nut": 15}


def test_ship_what_is_not_reserved(stock):
    with pytest.raises(ValueError):
        stock.ship(parse_lines("1 x bolt"))


def test_receive(stock):
    stock.receive(parse_lines("5 x washer, 1 x nut"))
    assert stock.available("washer") == 5 and stock.available("nut") == 21
