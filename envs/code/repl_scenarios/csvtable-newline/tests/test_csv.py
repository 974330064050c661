import pytest

from csvtable import read, write
from csvtable.reader import CsvError
from csvtable.table import from_csv, to_csv


def test_plain():
    assert write([["a", "b"], [1, 2]]) == "a,b\r\n1,2\r\n"


def test_comma_is_quoted():
    assert write([["a,b", "c"]]) == '"a,b",c\r\n'


def test_quotes_are_doubled():
    assert write([['the "best"']]) == '"the ""best"""\r\n'


def test_newline_is_quoted():
    assert write([["two\nlines", "x"]]) == '"two\nlines",x\r\n'


def test_none():
    assert write([[None, "x"]]) == ",x\r\n"


def test_semicolons():
    assert write([["a;b", "c,d"]], comma=";") == '"a;b";c,d\r\n'


def test_read():
    assert read('a,"b,c"\r\nd,"e ""f"""\n') == [["a", "b,c"], ["d", 'e "f"']]


def test_read_lines_in_a_field():
    assert read('"x\ny",z\r\n') == [["x\ny", "z"]]


def test_open_quote():
    with pytest.raises(CsvError):
        read('a,"b')


@pytest.mark.parametrize("value", ["plain", "a,b", 'a"b', "a\nb", "a\r\nb", "a\rb", " a", "a ", "a\n"])
def test_there_and_back(value):
    assert read(write([[value, "end"]])) == [[value, "end"]]


def test_records():
    records = [{"name": "Ada", "note": "first\nsecond"}, {"name": "Bo", "note": ""}]
    assert from_csv(to_csv(records)) == records
