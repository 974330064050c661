from fractions import Fraction

from matrix.core import Matrix


def eliminate(matrix):
    """Gaussian elimination in place, without rounding. -> 1 or -1 for the sign of the row swaps, 0: singular."""
    rows, sign = matrix.rows, 1
    for column in range(len(rows)):
        pivot = next((i for i in range(column, len(rows)) if rows[i][column]), None)
        if pivot is None:
            return 0
        if pivot != column:
            rows[pivot], rows[column] = rows[column], rows[pivot]
            sign = -sign
        for i in range(column + 1, len(rows)):
            factor = Fraction(rows[i][column]) / rows[column][column]
            for j in range(column, len(rows[i])):
                rows[i][j] -= factor * rows[column][j]
    return sign


def determinant(matrix):
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError("not square")
    work = matrix.copy()
    result = eliminate(work)
    for i in range(matrix.shape[0]):
        result *= work.rows[i][i]
    return result


def solve(matrix, right):
    """x with matrix @ x = right (a list). ValueError where there is not exactly one."""
    work = Matrix([[*row, value] for row, value in zip(matrix.rows, right, strict=True)])
    if eliminate(work) == 0:
        raise ValueError("singular")
    size = len(right)
    x = [0] * size
    for i in reversed(range(size)):
        known = sum(work.rows[i][j] * x[j] for j in range(i + 1, size))
        x[i] = Fraction(work.rows[i][size] - known) / work.rows[i][i]
    return x
