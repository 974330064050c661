import pytest

from ledger import Book


def test_balance():
    book = Book()
    book.move("cash", "rent", "512.50")
    book.move("salary", "cash", "2,000")
    assert book.balance("cash") == 148750
    assert book.balance("rent") == 51250


def test_small_amounts_add_up():
    book = Book()
    for _ in range(10):
        book.move("cash", "tea", "0.57")
    assert book.balance("tea") == 570


def test_statement():
    book = Book()
    book.move("cash", "tea", "2.25")
    assert book.statement() == "cash               -2.25\ntea                 2.25"


def test_only_positive_amounts():
    with pytest.raises(ValueError):
        Book().move("a", "b", "0")
