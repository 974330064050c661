import pytest

from matrix import Matrix, determinant, solve


def test_determinant():
    assert determinant(Matrix([[2, 1], [1, 3]])) == 5


def test_determinant_with_a_swap():
    assert determinant(Matrix([[0, 1], [1, 0]])) == -1


def test_singular():
    assert determinant(Matrix([[1, 2], [2, 4]])) == 0


def test_determinant_leaves_the_matrix_alone():
    matrix = Matrix([[2, 1], [1, 3]])
    determinant(matrix)
    assert matrix == Matrix([[2, 1], [1, 3]])


def test_determinant_of_a_product():
    a, b = Matrix([[2, 1], [1, 3]]), Matrix([[1, 4], [2, 2]])
    assert determinant(a) * determinant(b) == determinant(a @ b)


def test_identity():
    assert determinant(Matrix.identity(4)) == 1


def test_solve():
    assert solve(Matrix([[2, 1], [1, 3]]), [3, 5]) == [pytest.approx(0.8), pytest.approx(1.4)]


def test_solve_singular():
    with pytest.raises(ValueError):
        solve(Matrix([[1, 1], [1, 1]]), [1, 2])
