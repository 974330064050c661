"""Copy what the four scripts share to the letter from the first script that has it to the others.

    python tools/copy_shared.py     # after a change to a shared function of grpo_llm.py

The scripts import nothing of each other, so that each tells a whole algorithm; tests/test_docs.py holds that
what two of them define under one name is the same. Prints the names that were replaced.
"""

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo_llm.py", "ppo_llm.py", "sft.py", "a2c_vecenv.py")
# Names that two scripts may define differently, because the algorithms differ there.
DIFFER = {"Args", "REAL_MODEL", "REAL_LORA", "TIMES", "SHOWN", "PER_TOKEN", "main", "evaluate", "rollout",
          "update", "learning_rate", "gae", "Segment", "episode_reward", "token_logprobs", "microbatches",
          "if __name__ == '__main__'"}


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """name -> lines [first, last) of each function, class, constant and `if` of a module's top level."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node.lineno - 1, node.end_lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = first - 1, node.end_lineno
        elif isinstance(node, ast.If):
            found[f"if {ast.unparse(node.test)}"] = node.lineno - 1, node.end_lineno
    return found


def code(lines: list[str]) -> list[str]:
    """Without what a script says of a constant on its line."""
    return [lines[0].partition("  # ")[0]] if len(lines) == 1 else lines


def copy_shared(texts: dict[str, str]) -> dict[str, list[str]]:
    """texts: script -> source, changed in place.  -> script -> names that were replaced"""
    shared, replaced = {}, {}
    for script in texts:
        lines = texts[script].splitlines()
        names = []
        # From the end, so that the lines above stay where they are.
        for name, (first, last) in reversed(definitions(texts[script]).items()):
            own = lines[first:last]
            if name not in DIFFER and code(shared.setdefault(name, own)) != code(own):
                lines[first:last] = shared[name]
                names.append(name)
        texts[script] = "\n".join(lines) + "\n"
        replaced[script] = names[::-1]
    return replaced


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    texts = {script: (ROOT / script).read_text("utf-8") for script in SCRIPTS}
    for script, names in copy_shared(texts).items():
        if names:
            (ROOT / script).write_text(texts[script], "utf-8")
            print(f"{script}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
