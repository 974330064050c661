from podium import Board
from podium.entry import Entry
from podium.ranks import ranks


def board(*rows):
    made = Board()
    for row in rows:
        made.add(*row)
    return made


def test_points_decide():
    assert board(("Lu", 3, 9.0), ("Mo", 8, 9.5), ("Ny", 5, 1.0)).top(3) == ["Mo", "Ny", "Lu"]


def test_of_equal_points_the_earlier():
    assert board(("Lu", 12, 7.5), ("Mo", 12, 3.5), ("Ny", 12, 5.0)).top(3) == ["Mo", "Ny", "Lu"]


def test_of_equal_times_the_name():
    assert board(("Zoe", 4, 2.0), ("Abe", 4, 2.0), ("Kim", 4, 2.0)).top(2) == ["Abe", "Kim"]


def test_points_before_time():
    assert board(("Lu", 6, 1.0), ("Mo", 7, 8.0)).top(1) == ["Mo"]


def test_only_the_best_counts():
    made = board(("Lu", 6, 1.0), ("Lu", 2, 2.0), ("Lu", 9, 3.0))
    assert made.best["Lu"] == Entry("Lu", 9, 3.0) and len(made.standings()) == 1


def test_as_good_later():
    assert board(("Lu", 6, 1.0), ("Lu", 6, 2.0)).best["Lu"].time == 1.0


def test_shared_ranks():
    assert ranks([Entry("a", 9, 0), Entry("b", 7, 0), Entry("c", 7, 1), Entry("d", 2, 0)]) == [1, 2, 2, 4]


def test_who_gets_what():
    made = board(("Lu", 9, 4.0), ("Mo", 9, 2.0), ("Ny", 1, 1.0))
    assert made.medals() == {"gold": ["Mo", "Lu"], "silver": [], "bronze": ["Ny"]}


def test_shown():
    made = board(("Lu", 9, 4.0), ("Mo", 9, 2.0), ("Ny", 1, 1.0))
    assert made.show() == "1. Mo 9\n1. Lu 9\n3. Ny 1"


def test_nobody():
    assert Board().standings() == [] and Board().medals()["gold"] == []
