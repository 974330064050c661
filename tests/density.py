"""How dense a Python file is: what makes a reader stop, counted by its syntax tree."""

import ast
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Per 1,000 lines of code, at most. nanochat, CleanRL, tinker-cookbook, open-instruct and TRL have 0 to
# 8 pairs, 8 to 37 comprehensions and 1 to 26 conditionals.
MOST = {"pairs": 15, "unpacked": 0, "comprehensions": 50, "nested comprehensions": 3, "conditionals": 25,
        "nested conditionals": 0, "repeated texts": 0}


def density(path) -> dict[str, float]:
    """Counts per 1,000 lines of code, comments and blank lines aside; and "width", characters a line of code.

    pairs: `a, b = x, y`; unpacked: a tuple taken apart from a generator or a conditional; conditionals:
    `x if c else y`; repeated texts: a text, or a list that has not just one element, times a number.
    """
    source = Path(path).read_text()
    lines = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    count = dict.fromkeys(MOST, 0)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            count["pairs"] += isinstance(node.value, ast.Tuple)
            count["unpacked"] += isinstance(node.value, ast.GeneratorExp | ast.IfExp)
        elif isinstance(node, COMPREHENSIONS):
            within = [other for other in ast.walk(node) if isinstance(other, COMPREHENSIONS)]
            count["comprehensions"] += 1
            count["nested comprehensions"] += len(within) > 1 or len(node.generators) > 1
        elif isinstance(node, ast.IfExp):
            count["conditionals"] += 1
            count["nested conditionals"] += any(isinstance(x, ast.IfExp) for x in (node.body, node.orelse))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                is_text = isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
                count["repeated texts"] += is_text or isinstance(side, ast.List) and len(side.elts) != 1
    per_thousand = {name: 1000 * number / len(lines) for name, number in count.items()}
    return per_thousand | {"width": sum(map(len, lines)) / len(lines)}
