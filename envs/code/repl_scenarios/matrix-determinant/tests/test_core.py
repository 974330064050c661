import pytest

from matrix import Matrix


def test_shape():
    assert Matrix([[1, 2, 3], [4, 5, 6]]).shape == (2, 3)


def test_ragged():
    with pytest.raises(ValueError):
        Matrix([[1], [2, 3]])


def test_product():
    assert Matrix([[1, 2], [3, 4]]) @ Matrix([[0, 1], [1, 0]]) == Matrix([[2, 1], [4, 3]])


def test_product_of_wrong_shapes():
    with pytest.raises(ValueError):
        Matrix([[1, 2]]) @ Matrix([[1, 2]])


def test_transpose():
    assert Matrix([[1, 2, 3]]).transpose() == Matrix([[1], [2], [3]])


def test_a_copy_is_independent():
    first = Matrix([[1, 2], [3, 4]])
    second = first.copy()
    second.rows[0][0] = 9
    second.rows.append([5, 6])
    assert first == Matrix([[1, 2], [3, 4]])
