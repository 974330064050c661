"""sudoku: fill a grid that has exactly one solution."""

from __future__ import annotations

from envs.logic.common import Family, Unreadable

ROW, COLUMN = [cell // 9 for cell in range(81)], [cell % 9 for cell in range(81)]
BOX = [cell // 27 * 3 + cell % 9 // 3 for cell in range(81)]
UNITS = [[cell for cell in range(81) if of[cell] == k] for of in (ROW, COLUMN, BOX) for k in range(9)]


class Sudoku(Family):
    name = "sudoku"
    wordings = (
        "Solve this sudoku; a dot is an empty cell.\n\n{grid}\n\nEvery row, every column and each of the "
        "nine 3x3 boxes holds the digits 1 to 9. End with the full grid: nine lines of nine digits.",
        "Fill in the empty cells (dots) with digits from 1 to 9 so that no digit occurs twice in a row, in a "
        "column or in a 3x3 box:\n\n{grid}\n\nWrite the complete grid at the end, a line for each row.",
    )

    def draw(self, rng, config):
        counts = range(config.sudoku_min_givens, config.sudoku_max_givens + 1)
        # 30 % easy (36 and more), 40 % medium (28 to 35), 30 % hard (22 to 27), by default
        weights = [0.3 / 10 if n >= 36 else 0.4 / 8 if n >= 28 else 0.3 / 6 for n in counts]
        return {"givens": rng.choices(counts, weights)[0], "grid": complete_grid([0] * 81, rng)}

    def key(self, data):
        return data["grid"]

    def complete(self, data, rng, config):
        """Dig cells out in random order while the solution stays the only one.

        A hard grid may get stuck before its count; it will do where it still is hard.
        """
        grid, puzzle, left = data["grid"], list(data["grid"]), 81
        for cell in rng.sample(range(81), 81):
            if left > data["givens"]:
                puzzle[cell] = 0
                if other_solution(puzzle, cell, grid[cell]):
                    puzzle[cell] = grid[cell]
                else:
                    left -= 1
        if left > (min(27, config.sudoku_max_givens) if data["givens"] <= 27 else data["givens"]):
            return None
        texts = ["".join(map(str, cells)) for cells in (puzzle, grid)]
        return {"puzzle": texts[0].replace("0", "."), "answer": texts[1]}

    def fields(self, data):
        return {"grid": "\n".join(" ".join(data["puzzle"][k:k + 9]) for k in range(0, 81, 9))}

    def words(self, data):
        return " ".join(data["puzzle"])

    def vocabulary(self, config):
        return ". 1 2 3 4 5 6 7 8 9"

    def reference(self, data, style):
        if style == "words":
            return " ".join(data["answer"])
        return "\n".join(" ".join(data["answer"][k:k + 9]) for k in range(0, 81, 9))

    def judge(self, text, data, style):
        grid = last_grid(text)
        if not all(given in (".", digit) for given, digit in zip(data["puzzle"], grid, strict=True)):
            return False
        return all(len({grid[cell] for cell in unit}) == 9 for unit in UNITS)


def complete_grid(grid, rng=None) -> list[int] | None:
    """A solution of a grid, 0 for empty (None: there is none). The cell with fewest digits is tried first."""
    grid, used = list(grid), [[0] * 9 for _ in range(3)]
    for cell, digit in enumerate(grid):
        if digit:
            for bits, of in zip(used, (ROW, COLUMN, BOX), strict=True):
                bits[of[cell]] |= 1 << digit
    rows, columns, boxes = used
    empty = [(cell, ROW[cell], COLUMN[cell], BOX[cell]) for cell in range(81) if not grid[cell]]

    def search() -> bool:
        if not empty:
            return True
        fewest = 10
        for k, (_, r, c, b) in enumerate(empty):
            fit = 0x3FE & ~(rows[r] | columns[c] | boxes[b])
            if (count := fit.bit_count()) < fewest:
                fewest, best, place = count, fit, k
                if count < 2:
                    break
        if fewest == 0:
            return False
        cell, r, c, b = empty[place]
        empty[place] = empty[-1]
        empty.pop()
        digits = [digit for digit in range(1, 10) if best >> digit & 1]
        if rng:
            rng.shuffle(digits)
        for digit in digits:
            bit = 1 << digit
            rows[r] |= bit
            columns[c] |= bit
            boxes[b] |= bit
            grid[cell] = digit
            if search():
                return True
            rows[r] ^= bit
            columns[c] ^= bit
            boxes[b] ^= bit
        empty.append((cell, r, c, b))
        empty[place], empty[-1] = empty[-1], empty[place]
        return False

    return grid if search() else None


def other_solution(puzzle, cell, digit) -> bool:
    """Whether there is a solution with another digit in the cell, where the one with `digit` is known."""
    seen = {puzzle[k] for unit in UNITS if cell in unit for k in unit}
    return any(complete_grid([*puzzle[:cell], other, *puzzle[cell + 1:]])
               for other in range(1, 10) if other != digit and other not in seen)


def last_grid(text: str) -> str:
    """The 81 digits of the last complete grid: nine lines of nine digits below each other, or all in one.

    Between digits may stand space and what draws or lists grids; empty lines and rules are skipped.
    """
    rows, found = [], ""
    for line in text.splitlines():
        bare = line.translate(GRID_MARKS)
        if not bare:
            continue
        if not (bare.isascii() and bare.isdigit() and "0" not in bare):
            rows = []
        elif len(bare) == 81:
            rows, found = [], bare
        else:
            rows = [*rows[-8:], bare] if len(bare) == 9 else []
            if len(rows) == 9:
                found = "".join(rows)
    if not found:
        raise Unreadable
    return found


GRID_MARKS = dict.fromkeys([*map(ord, " \t\r,;|+-=:[]\"'"), *range(0x2500, 0x2580)])  # lines that draw boxes
