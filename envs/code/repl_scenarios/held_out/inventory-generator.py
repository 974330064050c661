import pytest

from inventory import OutOfStock, Stock
from inventory.order import parse_lines, total


def shelf():
    return Stock(screw=30, hook=7, rail=2)


def test_parsing():
    assert list(parse_lines("3 x hook,1 x rail")) == [("hook", 3), ("rail", 1)]


def test_sums():
    assert total(iter([("rail", 1), ("rail", 1), ("hook", 2)])) == {"rail": 2, "hook": 2}


def test_reserving_a_text():
    stock = shelf()
    stock.reserve(parse_lines("11 x screw, 7 x hook"))
    assert [stock.available(sku) for sku in ("screw", "hook", "rail")] == [19, 0, 2]


def test_reserving_an_iterator():
    stock = shelf()
    stock.reserve(iter([("rail", 2)]))
    assert stock.available("rail") == 0


def test_reserving_a_tuple():
    stock = shelf()
    stock.reserve((("screw", 12), ("screw", 3)))
    assert stock.available("screw") == 15


def test_nothing_is_reserved_if_not_all_is():
    stock = shelf()
    with pytest.raises(OutOfStock):
        stock.reserve(parse_lines("5 x screw, 3 x rail"))
    assert stock.available("screw") == 30


def test_what_is_promised_is_gone():
    stock = shelf()
    stock.reserve(parse_lines("20 x screw"))
    with pytest.raises(OutOfStock):
        stock.reserve(parse_lines("11 x screw"))


def test_shipping_a_text():
    stock = shelf()
    stock.reserve([("hook", 6), ("rail", 1)])
    stock.ship(parse_lines("4 x hook, 1 x rail"))
    assert stock.shelf == {"screw": 30, "hook": 3, "rail": 1} and stock.reserved["hook"] == 2


def test_shipping_a_list():
    stock = shelf()
    stock.reserve([("hook", 2)])
    stock.ship([("hook", 2)])
    assert stock.shelf["hook"] == stock.available("hook") == 5


def test_shipping_more_than_was_reserved():
    stock = shelf()
    stock.reserve([("hook", 2)])
    with pytest.raises(ValueError):
        stock.ship(parse_lines("3 x hook"))
    assert stock.shelf["hook"] == 7


def test_receiving():
    stock = shelf()
    stock.receive(parse_lines("8 x rail, 2 x latch"))
    assert stock.available("rail") == 10 and stock.available("latch") == 2
