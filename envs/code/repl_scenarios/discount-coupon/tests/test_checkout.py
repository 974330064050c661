import pytest

from checkout import Cart, discount
from checkout.customer import Customer
from checkout.rules import shipping

GUEST, MEMBER = Customer("guest"), Customer("ann", member=True)
SAVER, HALF = Customer("bob", coupons=("save10",)), Customer("cat", coupons=("HALF",))


def test_guest_pays_all():
    assert discount(GUEST, 90000) == 0


def test_member_from_the_minimum_on():
    assert discount(MEMBER, 5000) == 10


def test_member_below_the_minimum():
    assert discount(MEMBER, 4999) == 0


def test_coupon():
    assert discount(SAVER, 5000) == 10 and discount(SAVER, 4999) == 0


def test_half():
    assert discount(HALF, 100) == 50


def test_shipping_of_a_guest():
    assert [shipping(GUEST, total) for total in (100, 4999, 5000)] == [490, 490, 0]


def test_members_ship_for_free():
    assert shipping(MEMBER, 100) == 0


def test_heavy_goods():
    assert shipping(GUEST, 100, heavy=True) == 1290
    assert shipping(MEMBER, 100, heavy=True) == 1290


def test_heavy_and_expensive():
    assert shipping(GUEST, 9000, heavy=True) == 1290


def test_small_cart_of_a_member():
    assert Cart(MEMBER).add("pen", 250, 2).total() == 500


def test_large_cart_of_a_member():
    assert Cart(MEMBER).add("lamp", 6000).total() == 5400


def test_heavy_cart():
    assert Cart(GUEST).add("anvil", 8000, heavy=True).total() == 9290


def test_empty_cart():
    assert Cart(GUEST).total() == 0


def test_count():
    with pytest.raises(ValueError):
        Cart(GUEST).add("pen", 250, 0)
