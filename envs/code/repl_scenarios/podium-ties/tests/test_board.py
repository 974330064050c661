import pytest

from podium import Board, ranks
from podium.entry import Entry


@pytest.fixture
def board():
    made = Board()
    made.add("Ada", 30, 5.0)
    made.add("Bo", 40, 9.0)
    made.add("Cy", 30, 2.0)
    return made


def test_most_points_first(board):
    assert board.top(1) == ["Bo"]


def test_earlier_wins_a_tie(board):
    assert board.top(3) == ["Bo", "Cy", "Ada"]


def test_names_decide_in_the_end():
    board = Board()
    for name in ("Zoe", "Ann"):
        board.add(name, 10, 1.0)
    assert board.top(2) == ["Ann", "Zoe"]


def test_only_the_best_result_counts(board):
    board.add("Ada", 20, 20.0)
    assert board.best["Ada"].points == 30
    board.add("Ada", 50, 30.0)
    assert board.top(1) == ["Ada"]


def test_the_same_points_later_change_nothing(board):
    board.add("Cy", 30, 99.0)
    assert board.best["Cy"].time == 2.0


def test_ranks():
    assert ranks([Entry("a", 5, 0), Entry("b", 5, 0), Entry("c", 1, 0)]) == [1, 1, 3]


def test_medals(board):
    board.add("Di", 1, 1.0)
    assert board.medals() == {"gold": ["Bo"], "silver": ["Cy", "Ada"], "bronze": []}


def test_show(board):
    assert board.show() == "1. Bo 40\n2. Cy 30\n2. Ada 30"


def test_empty():
    assert Board().top(3) == [] and Board().show() == ""
