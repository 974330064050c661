from confmerge import lookup, merge, merge_all


def test_other_values_are_replaced():
    assert merge({"a": [1], "b": 2}, {"a": [3]}) == {"a": [3], "b": 2}


def test_dictionaries_are_merged():
    assert merge({"log": {"level": "info", "file": "x"}}, {"log": {"level": "debug"}}) == {
        "log": {"level": "debug", "file": "x"}}


def test_a_dictionary_replaces_what_is_none():
    assert merge({"log": 1}, {"log": {"level": "debug"}}) == {"log": {"level": "debug"}}


def test_layers():
    assert merge_all({"a": 1}, {"b": 2}, {"a": 3}) == {"a": 3, "b": 2}


def test_lookup():
    assert lookup({"log": {"level": "info"}}, "log.level") == "info"
    assert lookup({"log": 1}, "log.level", "none") == "none"
