from fractions import Fraction

import pytest

from matrix import Matrix, determinant, solve


def test_values():
    assert determinant(Matrix([[3, 7], [2, 5]])) == 1
    assert determinant(Matrix([[2, 0, 1], [1, 3, 2], [1, 1, 4]])) == 18


def test_values_with_swaps():
    assert determinant(Matrix([[0, 2, 0], [3, 0, 0], [0, 0, 4]])) == -24


def test_singular():
    assert determinant(Matrix([[3, 6], [1, 2]])) == 0


def test_not_square():
    with pytest.raises(ValueError):
        determinant(Matrix([[1, 2, 3], [4, 5, 6]]))


def test_the_matrix_is_as_before():
    matrix = Matrix([[4, 3, 2], [1, 5, 7], [6, 1, 1]])
    determinant(matrix)
    assert [sum(row) for row in matrix.rows] == [9, 13, 8]


def test_the_matrix_is_as_before_a_swap():
    matrix = Matrix([[0, 3], [5, 1]])
    assert determinant(matrix) == -15 and matrix == Matrix([[0, 3], [5, 1]])


def test_copies_share_no_rows():
    matrix = Matrix([[7, 8, 9]])
    other = matrix.copy()
    other.rows[0][2] = 0
    assert matrix.rows == [[7, 8, 9]] and other.rows == [[7, 8, 0]] and other.shape == (1, 3)


def test_copies_are_equal():
    matrix = Matrix([[1, 0], [2, 6]])
    assert matrix.copy() == matrix


def test_products():
    assert Matrix([[2, 0], [1, 1]]) @ Matrix([[5], [7]]) == Matrix([[10], [12]])
    with pytest.raises(ValueError):
        Matrix([[2, 0]]) @ Matrix([[5]])


def test_transposed():
    assert Matrix([[1, 2], [3, 4], [5, 6]]).transpose() == Matrix([[1, 3, 5], [2, 4, 6]])


def test_solutions():
    assert solve(Matrix([[1, 2], [3, 5]]), [4, 11]) == [2, 1]
    assert solve(Matrix([[0, 4], [2, 0]]), [2, 3]) == [Fraction(3, 2), Fraction(1, 2)]


def test_no_solution():
    with pytest.raises(ValueError):
        solve(Matrix([[2, 4], [1, 2]]), [1, 1])
