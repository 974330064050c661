"""What tests expect is taken out of them: nothing that is expected is left, and it is compared as it was."""

import datetime
import decimal
import fractions
import json
import math
import re

import numpy as np
import pytest

from envs.code import expectations, testing_worker
from envs.code.expectations import taken_out
from tests.run_folders import quick

HONEST = '''
import decimal
import pytest, unittest
WANTED = {"a": 61, "b": [62, (63.5, "x64")]}
def test_number(): assert 65 == sum([60, 5])
def test_of_two_sides(): assert sum([60, 6]) == 66 and "x67" == "x6" + str(7)
def test_is(): assert (1 < 2) is True and print is not None
def test_less(): assert len("abc") < 68 and 69 > len("abc")
def test_true(): assert len("abc") and not len("")
def test_in(): assert len("abc") in (3, 70, 71)
def test_constant(): assert dict(a=60 + 1, b=[60 + 2, (60 + 3.5, "x6" + "4"[:1])]) == WANTED
def test_local():
    expected = "x72"
    assert "x7" + str(2) == expected, f"not {expected}"
def test_table():
    for text, number in [("a", 73), ("bb", 74)]:
        assert 72 + len(text) == number
def test_loop():
    for _ in range(2):
        assert 70 + len("abcde") == 75
def test_block():
    with open("/dev/null"):
        assert 70 + len("abcdef") == 76
    try:
        assert 70 + len("abcdefg") == 77
    finally:
        pass
def test_within():
    def check(value):
        assert value == 78
    check(70 + 8)
def test_raises():
    with pytest.raises(ZeroDivisionError, match="zero"):
        1 / 0
def test_decimal(): assert sum([decimal.Decimal("78.5"), decimal.Decimal("0.7")]) == decimal.Decimal("79.2")
def test_close(): assert sum([80, 0.1]) == pytest.approx(80.1 + 1e-9)
def test_empty(): assert sorted("") == [] and {*""} == set()
class TestU(unittest.TestCase):
    def test_u(self):
        self.assertEqual(sum([80, 1]), 81)
        self.assertAlmostEqual(sum([82, 0.125]), 82.12500001)
        self.assertIsNone(print())
        self.assertIn(len("ab"), [2, 83])
        self.assertTrue(len("a"))
        self.assertFalse(len(""))
'''
HIDDEN = [str(number) for number in range(61, 84)]


def reported(source, change=lambda value: value):
    """{test: reports} of the tests of a module that runs without what it expects."""
    telling, found = testing_worker.Telling(), {}
    test = ""
    module = {"__name__": "tests"}

    def send(_, phase, said):
        found.setdefault(test, []).append(expectations.read(said))

    telling.send, telling.test = send, ""
    module["__told__"] = lambda number, value, row=None: telling.told(number, change(value), row)
    module["__raises__"] = telling.raises
    exec(compile(source, "tests", "exec"), module)
    for test, function in [item for item in module.items() if item[0].startswith("test")]:
        found.setdefault(test, [])
        function()
    test = "TestU::test_u"
    if "TestU" in module:
        module["TestU"]("test_u").test_u()
    return found


def test_nothing_is_left_of_what_is_expected_and_honest_code_passes():
    taken = taken_out(HONEST)
    source = re.sub(r"(?<=__)\(\d+", "", taken.source)  # numbers of checks
    left = [number for number in HIDDEN if number in source]
    assert left == ["70", "72", "78", "80", "82"]  # in what is computed
    found = reported(taken.source)
    assert {*found} == {*taken.needed} and not taken.known
    for test, reports in found.items():
        assert taken.needed[test] and taken.wrong(test, reports) == (set(), set()), test


@pytest.mark.parametrize("other", [
    lambda value: value + 1 if isinstance(value, int | float | decimal.Decimal) else [value],
    lambda value: object(), lambda value: None if value is not None else 0, lambda value: (value,)])
def test_no_test_passes_with_another_value(other):
    taken = taken_out(HONEST)
    for test, reports in reported(taken.source, other).items():
        exact = {number for number, *_ in reports if taken.checks[number].holds in ("Eq", "Is")}
        wrong, missing = taken.wrong(test, reports)
        assert exact <= wrong and not missing, test


def test_what_is_left_out_or_said_of_others_is_noticed():
    taken = taken_out(HONEST)
    for test, reports in reported(taken.source).items():
        for at in range(len(reports)):
            fewer = reports[:at] + reports[at + 1:]
            number, row, _ = reports[at]
            again = (number, row) in {report[:2] for report in fewer}
            assert again or taken.wrong(test, fewer)[1] == {number}
        assert taken.wrong(test, [*reports, (1, None, 1)])[0] == {1}
        assert taken.wrong(test, [*reports, (reports[0][0], 99, reports[0][2])])[0] == {reports[0][0]}


@pytest.mark.parametrize("kind, message, passes", [
    (ZeroDivisionError, "by zero", True), (ArithmeticError, "by zero", False), (KeyError, "zero", False),
    (ZeroDivisionError, "nothing", False), (None, "", False)])
def test_exceptions_by_their_classes_and_what_they_say(kind, message, passes):
    taken = taken_out("def test_a():\n    with pytest.raises((OSError, x.ZeroDivisionError), match='z.ro'):\n"
                      "        run()")
    def run():
        if kind:
            raise kind(message)
    telling, reports = testing_worker.Telling(), []
    telling.send, telling.test = lambda *said: reports.append(expectations.read(said[2])), ""
    module = dict(__raises__=telling.raises, run=run)
    exec(taken.source, module)
    module["test_a"]()
    assert "ZeroDivisionError" not in taken.source
    assert (taken.wrong("test_a", reports) == (set(), set())) == passes


@pytest.mark.parametrize("source", [
    "def test_a():\n    assert f(1) == f(2)", "def test_a(x):\n    assert f(x) == x",
    "def test_a():\n    try:\n        assert f() == 1\n    except Exception:\n        pass",
    "def test_a():\n    with suppress(KeyError):\n        assert f() == 1",
    "def test_a():\n    if f():\n        assert f() == 1", "def test_a():\n    assert 1 < f() < 3",
    "def test_a():\n    assert 'x' in f()", "def test_a():\n    assert f() == 1 or f() == 2",
    "def helper(x):\n    assert x\ndef test_a():\n    helper(f())\n    assert f() == 1",
    "@pytest.mark.xfail\ndef test_a():\n    assert f() == 1",
    "pytestmark = pytest.mark.xfail\ndef test_a():\n    assert f() == 1",
    "XF = pytest.mark.xfail\n@XF\ndef test_a():\n    assert f() == 1",
    "def test_a():\n    yield\n    assert f() == 1", "def test_a():\n    check_all(f)\n    assert f() == 1",
    "def test_a():\n    for x in f():\n        assert x == 1",
    "def test_a():\n    if f():\n        return\n    assert f() == 1",
    "def test_a():\n    assert all(f(x) == 1 for x in y) == True or True"])
def test_what_is_compared_beside_the_code_under_test_is_known(source):
    taken = taken_out(source)
    assert taken.known == {"test_a"} and taken.bits(["test_a"]) == 0


@pytest.mark.parametrize("value", [
    "'x' * 10**5 * 10**5 * 10**5", "bytes(10**12)", "[0] * 10**9", "10**10**10", "((9**99)**99)**99",
    "10**5 * 'x'", "Decimal('1e999999999') * Decimal('1e999999999')", "Fraction(1, 0)", "-" * 90 + "[]",
    "dict(**{})", "{[]: 1}"])
def test_a_value_that_is_too_large_or_none_is_not_written_down(value):
    with quick(value):
        assert taken_out(f"def test_a():\n    assert f() == {value}").known == {"test_a"}


def test_a_value_that_is_used_for_something_else_stays():
    source = ("def test_a():\n    want = [1, 2]\n    f(want)\n    assert f(3) == want\n"
              "    for x, y in [(1, 5), (2, 6)]:\n        assert f(x) == y\n        f(y)")
    taken = taken_out(source)
    assert taken.known == {"test_a"} and "want = [1, 2]" in taken.source and "(2, 6)" in taken.source


def test_checks_that_are_kept_are_made_as_they_were():
    source = "def test_a():\n    want = 5\n    assert f(1) == want\n    assert f(2) == 6"
    first, second = sorted(taken_out(source).checks)
    kept = taken_out(source, {first})
    assert "assert f(1) == want" in kept.source and "want = 5" in kept.source
    assert {*kept.checks} == {second} and kept.known == {"test_a"}
    assert taken_out(source, None) == expectations.Taken(source, {}, {}, frozenset())


def test_classes_have_the_tests_of_others():
    taken = taken_out("class TestA:\n def test_c(self): assert f() == 1\nclass TestB(TestA):\n"
                      " def test_d(self): assert f() == 2\nclass TestC(TestB):\n test_d = None")
    assert taken.needed["TestB::test_c"] == taken.needed["TestC::test_c"] == taken.needed["TestA::test_c"]


@pytest.mark.parametrize("value", [
    None, True, 0, -7, 2**70, 1.5, math.inf, "", "\ud800x", b"\xff", 1 + 2j, [], [1, [2]], (), (1, "a"),
    {1, 2}, frozenset([(1,)]), {"a": [1], (1, 2): {3: None}}, decimal.Decimal("1.50"),
    fractions.Fraction(1, 3),
    datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3), datetime.time(1, 2),
    datetime.timedelta(1, 2, 3)], ids=repr)
def test_values_come_back_as_they_were(value):
    told = []
    telling = testing_worker.Telling()
    telling.send, telling.test = lambda *said: told.append(said), "t"
    telling.told(5, value, 2)
    (test, phase, said), = told
    assert (test, phase) == ("t", "told") and expectations.read(said) == (5, 2, value)
    kind = {set: frozenset}.get(type(value), type(value))
    assert type(expectations.read(said)[2]) is kind


def test_numbers_of_numpy_are_numbers():
    for value in (np.float32(0.5), np.int64(7), np.bool_(True), np.str_("x")):
        assert expectations.rebuilt(testing_worker.closed(value)) == value.item()
    assert testing_worker.closed(np.ones(2)) == ["?"]


@pytest.mark.parametrize("said", [
    "", "[]", "[1]", "[1, 2]", '["1", null, "1"]', '[1, "2", "1"]', '[1, null, "["]', '[1, null, "[5]"]',
    '[1, null, "[\\"no\\", 1]"]', '[1, null, "[\\"Fraction\\", [1, 0]]"]', '[1, null, 5]',
    '[1, null, "[\\"dict\\", [[[\\"list\\", []], 1]]]"]', "[" * 10**5, json.dumps([1, None, "[" * 10**5]),
    '[1, null, "[\\"Decimal\\", \\"x\\"]"]'])
def test_what_is_no_value_equals_nothing(said):
    number, row, value = expectations.read(said)
    assert number in (-1, 1) and row is None and value is expectations.UNKNOWN
    for wanted in (0, "", None, [], False):
        assert not expectations.Check("Eq", (wanted,), "").passes(None, value)


@pytest.mark.parametrize("tests, bits", [
    ("assert f() == 'abcdef'", 10), ("assert f() == 'abcdef'\n    assert f() == 'abcdef'", 10),
    ("assert f() == 'abcdef'\n    assert f() == 'ghijkl'", 20), ("assert f() is True", 1),
    ("assert f() is True\n    assert f() is True", 1), ("assert f() == 0", 2), ("assert f() > 0", 0),
    ("assert f() is True\n    assert f() is False", 2), ("assert f()", 0), ("assert not f()", 0),
    ("f('abcdef')\n    assert f() == 'abcdef'", 4)])
def test_what_is_left_to_guess(tests, bits):
    """In bits: equal values are guessed once, and different ones may be arranged."""
    assert taken_out(f"def test_a():\n    {tests}").bits() == pytest.approx(bits)


def test_of_tests_that_fail_the_easiest_check_may_be_the_one():
    source = ("def test_a():\n    assert f() == 'abcdef'\n    assert g() is None\n"
              "def test_b():\n    assert f() == 'ghijkl'\ndef test_c():\n    assert f(1) == 'mnopqr'")
    taken = taken_out(source)
    assert taken.bits(["test_a"]) == 1 and taken.bits(["test_b"]) == taken.bits(["test_b[x]"]) == 10
    assert taken.bits(["test_a", "test_b", "test_d"]) == 11
    assert taken.bits(["test_b", "test_c"], "expected:\n  f( 1 ) == 'mnopqr'") == 10
    assert taken.bits(["test_b", "test_c"], "the answer is ghijkl") == 10
    small = taken_out("def test_a():\n    assert f(1) == 5\n    assert f(2) == 6")
    assert 0 < small.bits(shown="f(1) == 5") < small.bits(shown="5") == small.bits()
