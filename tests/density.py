"""How much a reader has to unpack in a Python file: what several tests hold files to.

    density(ROOT / "grpo_llm.py")["pairs"]  # tuples assigned to tuples, per 1,000 lines of code
"""

import ast

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Per 1,000 lines of code, at most; lengths and widths are each file's own. nanochat, CleanRL,
# tinker-cookbook, open-instruct and TRL have 0 to 8 pairs, 8 to 37 comprehensions and 1 to 26 conditionals.
MOST = {"pairs": 15, "unpacked": 0, "comprehensions": 50, "nested comprehensions": 3, "conditionals": 25,
        "nested conditionals": 0, "products": 0}


def density(path):
    """-> {figure: number}; after four sizes, counts per 1,000 lines of code: neither blank nor a comment.

    lines: of the file
    longest: columns of its longest line
    width: columns of a line of code, on average
    function: lines of its longest function, `main` aside
    pairs: `a, b = x, y`
    unpacked: `a, b =` a generator or a conditional
    comprehensions: generators included
    nested comprehensions: those that hold another, or a second `for`
    conditionals: `x if c else y`
    nested conditionals: those with another for one of their values
    products: a text multiplied, or a list that has not exactly one element
    """
    text = path.read_text(encoding="utf-8")
    nodes = [*ast.walk(ast.parse(text))]
    lines = text.splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    to_tuples = [node.value for node in nodes
                 if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    counts = {
        "pairs": sum(isinstance(value, ast.Tuple) for value in to_tuples),
        "unpacked": sum(isinstance(value, (ast.GeneratorExp, ast.IfExp)) for value in to_tuples),
        "comprehensions": len(comprehensions),
        "nested comprehensions": sum(map(is_nested, comprehensions)),
        "conditionals": len(conditionals),
        "nested conditionals": sum(isinstance(value, ast.IfExp) for node in conditionals
                                   for value in (node.body, node.orelse)),
        "products": sum(map(is_product, nodes)),
    }
    sizes = {
        "lines": len(lines),
        "longest": max(map(len, lines)),
        "width": sum(map(len, code)) / len(code),
        "function": max(node.end_lineno - node.lineno + 1 for node in functions if node.name != "main"),
    }
    return sizes | {name: 1000 * count / len(code) for name, count in counts.items()}


def is_nested(node):
    inside = [other for other in ast.walk(node) if isinstance(other, COMPREHENSIONS)]
    return len(node.generators) > 1 or len(inside) > 1


def is_product(node):
    """A text or a list times something."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    texts = any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
                for side in sides)
    return texts or any(isinstance(side, ast.List) and len(side.elts) != 1 for side in sides)
