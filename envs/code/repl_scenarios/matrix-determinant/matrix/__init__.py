from matrix.core import Matrix
from matrix.solve import determinant, solve

__all__ = ["Matrix", "determinant", "solve"]
