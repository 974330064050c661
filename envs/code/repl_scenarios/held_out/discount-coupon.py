import pytest

from checkout import Cart, discount
from checkout.customer import Customer
from checkout.rules import shipping

NOBODY, MEMBER = Customer("nobody"), Customer("dora", member=True)
BOTH = Customer("eve", member=True, coupons=("SAVE10",))


def test_no_discount_without_a_reason():
    assert [discount(NOBODY, total) for total in (10, 5000, 123456)] == [0, 0, 0]


def test_small_totals_of_members():
    assert [discount(MEMBER, total) for total in (1, 2500, 4990)] == [0, 0, 0]


def test_large_totals_of_members():
    assert [discount(MEMBER, total) for total in (5000, 5001, 70000)] == [10, 10, 10]


def test_members_with_a_coupon():
    assert discount(BOTH, 3000) == 0 and discount(BOTH, 6000) == 10


def test_coupon_in_any_case():
    assert discount(Customer("f", coupons=("Save10",)), 5100) == 10


def test_half_is_for_anything():
    assert [discount(Customer("g", coupons=("half",)), total) for total in (40, 8000)] == [50, 50]


def test_light_goods():
    assert [shipping(NOBODY, 4200), shipping(NOBODY, 5200), shipping(MEMBER, 4200)] == [490, 0, 0]


def test_heavy_goods_that_cost_little():
    assert shipping(NOBODY, 700, heavy=True) == shipping(MEMBER, 700, heavy=True) == 1290


def test_heavy_goods_that_cost_much():
    assert shipping(NOBODY, 7700, heavy=True) == shipping(MEMBER, 7700, heavy=True) == 1290


def test_cart_of_small_things():
    assert Cart(MEMBER).add("cup", 900, 3).total() == 2700


def test_cart_with_something_heavy():
    assert Cart(MEMBER).add("safe", 20000, heavy=True).add("key", 1000).total() == 20190


def test_cart_of_nothing_and_of_less():
    assert Cart(MEMBER).total() == 0
    with pytest.raises(ValueError):
        Cart(MEMBER).add("cup", 900, -1)
