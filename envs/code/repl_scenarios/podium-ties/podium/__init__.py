from podium.board import Board
from podium.ranks import ranks

__all__ = ["Board", "ranks"]
