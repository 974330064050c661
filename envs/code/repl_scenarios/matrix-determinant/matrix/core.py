class Matrix:
    """Rows of numbers, all of one length."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        if not self.rows or len({len(row) for row in self.rows}) != 1:
            raise ValueError("expected rows of one length")

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0])

    @classmethod
    def identity(cls, size):
        return cls([[int(i == j) for j in range(size)] for i in range(size)])

    def copy(self):
        new = Matrix.__new__(Matrix)
        new.rows = self.rows[:]
        return new

    def transpose(self):
        return Matrix(zip(*self.rows))

    def __matmul__(self, other):
        if self.shape[1] != other.shape[0]:
            raise ValueError(f"shapes {self.shape} and {other.shape}")
        columns = list(zip(*other.rows))
        return Matrix([[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows])

    def __eq__(self, other):
        return isinstance(other, Matrix) and self.rows == other.rows

    def __repr__(self):
        return f"Matrix({self.rows})"
