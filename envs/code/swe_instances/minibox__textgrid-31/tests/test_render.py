from textgrid import from_records, render


def test_columns_are_in_line():
    assert render(["a", "b"], [["long", "x"], ["y", "z"]]) == "a    | b\nlong | x\ny    | z"


def test_numbers_to_the_right():
    assert render(["n"], [[5], [123]], align="r") == "  n\n  5\n123"


def test_a_table_without_rows():
    assert render(["name", "n"], []) == "name | n"


def test_records():
    assert from_records([{"a": "1"}, {"b": "2"}]) == "a | b\n1 |\n  | 2"
