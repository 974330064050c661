import pytest

from csvtable import read, write
from csvtable.reader import CsvError
from csvtable.table import from_csv, to_csv


def test_plain_rows():
    assert write([["x", 3, "y z"], [4.5, "", "q"]]) == "x,3,y z\r\n4.5,,q\r\n"


def test_commas_and_quotes():
    assert write([["1,5", 'say "no"', None]]) == '"1,5","say ""no""",\r\n'


def test_a_line_feed_within():
    assert write([["k", "up\ndown"]]) == 'k,"up\ndown"\r\n'


def test_a_carriage_return_within():
    assert write([["up\rdown", "k"]]) == '"up\rdown",k\r\n'


def test_both_within():
    assert write([["up\r\ndown"]]) == '"up\r\ndown"\r\n'


def test_pipes():
    assert write([["a|b", "c,d", "e\nf"]], comma="|") == '"a|b"|c,d|"e\nf"\r\n'


def test_blanks_at_the_ends():
    assert write([[" a", "b\t"]]) == '" a","b\t"\r\n'


def test_reading():
    assert read('1,"2,3"\n"four ""4""","5\n6"\n') == [["1", "2,3"], ['four "4"', "5\n6"]]


def test_a_quote_without_end():
    with pytest.raises(CsvError):
        read('"never\nending')


def test_rows_come_back():
    rows = [["a\nb\nc", "d"], ["\r", "e,f"], ['"', "\n"]]
    assert read(write(rows)) == rows


def test_records_come_back():
    records = [{"k": "1", "text": "left\rright"}, {"k": "2\n", "text": "plain"}]
    assert from_csv(to_csv(records)) == records and to_csv([]) == ""
