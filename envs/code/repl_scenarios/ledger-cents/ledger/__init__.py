from ledger.book import Book
from ledger.money import format_cents, parse_amount, split

__all__ = ["Book", "format_cents", "parse_amount", "split"]
