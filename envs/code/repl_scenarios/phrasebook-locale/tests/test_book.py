import pytest

from phrasebook import Phrasebook

TEXTS = {
    "en": {"hello": "Hello", "bye": "Bye", "files": {"one": "{n} file", "many": "{n} files"}},
    "de": {"hello": "Hallo", "files": {"one": "{n} Datei", "many": "{n} Dateien"}},
    "pl": {"files": {"one": "{n} plik", "few": "{n} pliki", "many": "{n} plik\u00f3w"}},
}


@pytest.fixture
def book():
    return Phrasebook(TEXTS)


def test_text(book):
    assert book.text("hello", "de") == "Hallo"


def test_fallback(book):
    assert book.text("bye", "de") == "Bye"


def test_unknown(book):
    with pytest.raises(KeyError):
        book.text("missing", "en")


def test_two_locales_one_after_the_other(book):
    assert [book.text("hello", locale) for locale in ("en", "de", "en")] == ["Hello", "Hallo", "Hello"]


def test_counted(book):
    assert book.counted("files", 1, "en") == "1 file"
    assert book.counted("files", 5, "en") == "5 files"


def test_polish_forms(book):
    assert [book.counted("files", n, "pl").split()[1] for n in (1, 3, 5, 12, 22)] == [
        "plik", "pliki", "plik\u00f3w", "plik\u00f3w", "pliki"]


def test_counted_in_two_locales(book):
    assert book.counted("files", 2, "en") == "2 files"
    assert book.counted("files", 2, "de") == "2 Dateien"


def test_fallback_counts_like_the_fallback(book):
    assert book.counted("files", 1, "ja") == "1 file"


def test_the_cache_is_used(book):
    book.text("hello", "en")
    book.text("hello", "en")
    assert (book.cache.hits, book.cache.misses) == (1, 1)
