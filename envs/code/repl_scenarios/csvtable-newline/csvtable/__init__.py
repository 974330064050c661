from csvtable.reader import read
from csvtable.writer import write

__all__ = ["read", "write"]
