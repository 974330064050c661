import pytest

from ledger import Book, format_cents, parse_amount, split


def test_whole_numbers():
    assert [parse_amount(text) for text in ("0", "12", " 3,000 ")] == [0, 1200, 300000]


def test_amounts_that_binary_numbers_miss():
    assert [parse_amount(text) for text in ("0.58", "2.30", "8.20", "1.10")] == [58, 230, 820, 110]


def test_large_amounts():
    assert parse_amount("1,234,567.89") == 123456789 and parse_amount("4,503.77") == 450377


def test_negative_amounts_with_cents():
    assert parse_amount("-0.29") == -29 and parse_amount("-16.08") == -1608


def test_what_cannot_be_read():
    for text in (" ", "1..2", "x5", "NaN", "-inf"):
        with pytest.raises(ValueError):
            parse_amount(text)


def test_all_cents_come_back():
    assert [cents for cents in range(-700, 9000, 3) if parse_amount(format_cents(cents)) != cents] == []


def test_written_amounts():
    assert [format_cents(cents) for cents in (7, -1234567, 100)] == ["0.07", "-12,345.67", "1.00"]


def test_shares():
    assert split(11, 4) == [3, 3, 3, 2] and split(0, 2) == [0, 0]


def test_book():
    book = Book()
    for _ in range(7):
        book.move("till", "bread", "2.29")
    assert book.balance("bread") == 1603 and book.balance("till") == -1603


def test_accounts_and_statement():
    book = Book()
    book.move("b", "a", "1.13")
    assert book.accounts() == ["a", "b"]
    assert book.statement() == "a                   1.13\nb                  -1.13"


def test_nothing_moves_backwards():
    with pytest.raises(ValueError):
        Book().move("a", "b", "-0.01")
