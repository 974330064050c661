"""Write the tables of flags and metrics in the docs from the code, so that nothing is typed twice.

    python tools/docs_tables.py             # rewrites README.md and docs/*.md, names those that changed
    python tools/docs_tables.py --check     # changes nothing; exits 1 and names the pages that are stale

A page asks for a table with two HTML comments, each on a line of its own; what stands between is replaced:

    <!-- flags: SCRIPT.py -->               one row for each field of the script's class Args, with its
                                            default, and the one that REAL_MODEL has for it
    <!-- metrics: SCRIPT.py -->             one row for each of its METRICS in tools/validate_train_log.py
    <!-- flags: A.py, but those of B.py --> without the rows that the same table of B.py has
    <!-- options: envs/FILE.py:CLASS -->    one row for each field of an environment's options
    <!-- lines -->                          the four scripts and how long they are, to the nearest ten
    <!-- end -->

A link such as [`gae`](../ppo_llm.py) names what the script must define; it holds no line, which would move.

Scripts are parsed, never imported, so that the tables need none of the scripts' requirements.

--check also names the figures that show what the code does no longer (tools/figure_age.py). For one of
README.md the exit status is 1; the others are warnings. `python benchmarks/refresh.py` makes them again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import shlex
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refresh
from tools.figure_age import CannotTell
from tools.validate_train_log import METRICS

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"grpo_llm.py": "grpo", "ppo_llm.py": "ppo", "sft.py": "sft", "a2c_vecenv.py": "a2c"}
BLOCK = re.compile(r"^<!-- (?:(flags|metrics|options): (\S+?)(?:, but those of (\S+))?|lines) -->\n"
                   r"(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
PYDANTIC = {"PositiveInt": "Annotated[int, Field(ge=1)]", "NonNegativeInt": "Annotated[int, Field(ge=0)]",
            "PositiveFloat": "Annotated[float, Field(gt=0)]",
            "NonNegativeFloat": "Annotated[float, Field(ge=0)]"}  # pydantic's names
LINK = re.compile(r"\[`(\w+)`\]\(((?:\.\./)*(\w+\.py))(?:#L\d+)?\)")
OPENING = re.compile(r"^<!-- (?:flags|metrics|options|lines)\b.*-->$", re.MULTILINE)


class DocsError(ValueError):
    """A page or script that no table can be made from. Its message is the one line that a person reads."""


@dataclass(frozen=True)
class Flag:
    name: str  # of the field
    type: str
    default: str | None  # None: the flag must be given
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def parse_script(script: Path) -> ast.Module:
    try:
        return ast.parse(script.read_text(encoding="utf-8"), filename=str(script))
    except OSError as error:
        raise DocsError(f"{script.name}: cannot be read ({type(error).__name__})") from error
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the source
        raise DocsError(f"{script.name}: not Python ({error})") from error


def flags(script: Path, name: str = "Args") -> list[Flag]:
    """The fields of a class of a script in order. A field without a help text is a DocsError."""
    module, comments = parse_script(script).body, comments_of(script)
    body = next((node.body for node in module if isinstance(node, ast.ClassDef) and node.name == name), None)
    if body is None:
        raise DocsError(f"{script.name}: no class {name}")
    aliases = {name: ast.parse(text, mode="eval").body for name, text in PYDANTIC.items()} | {
        node.targets[0].id: node.value for node in module
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    result = []
    for node, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        text = help_text(node, below, comments)
        if not text:
            where = f"{script.name}:{node.lineno}: {name}.{node.target.id}"
            raise DocsError(f"{where} has no docstring or comment")
        default = None if node.value is None else shown(node.value)
        result.append(Flag(node.target.id, shown_type(node.annotation, aliases), default, text))
    return result


def comments_of(script: Path) -> dict[int, tuple[bool, str]]:
    """line -> (whether the comment has it for itself, its text)."""
    with script.open("rb") as file:
        return {token.start[0]: (token.line.lstrip().startswith("#"), token.string.lstrip("# "))
                for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}


def help_text(node: ast.AnnAssign, below: ast.stmt | None, comments: dict[int, tuple[bool, str]]) -> str:
    """As tyro has it: the docstring under a field, or the comment behind it, or those right above it."""
    literal = getattr(below.value, "value", None) if isinstance(below, ast.Expr) else None
    if isinstance(literal, str):
        return " ".join(literal.split())
    if node.end_lineno in comments:
        return comments[node.end_lineno][1]
    above, line = [], node.lineno - 1
    while comments.get(line, (False,))[0]:
        above, line = [comments[line][1], *above], line - 1
    return " ".join(above)


def shown_type(node: ast.expr, aliases: dict[str, ast.expr]) -> str:
    """An annotation without its Annotated and with the range that this says; of a Literal its choices.

    aliases: what a name such as PositiveInt stands for, as Annotated[int, Field(ge=1)]: "int, 1 or more".
    """
    limits = []

    class Bare(ast.NodeTransformer):
        def visit_Name(self, node):
            is_type = isinstance(aliases.get(node.id), (ast.Subscript, ast.Name))
            return self.visit(aliases[node.id]) if is_type else node

        def visit_Subscript(self, node):
            kind = ast.unparse(node.value).rpartition(".")[2]
            if kind == "Literal":
                return ast.Name(ast.unparse(node.slice).strip("()").replace("'", ""))
            if kind == "Annotated":
                base, *marks = node.slice.elts
                limits.extend(filter(None, map(limit, marks)))
                return self.visit(base)
            return self.generic_visit(node)

    return ", ".join([ast.unparse(Bare().visit(copy.deepcopy(node))), *limits])


def limit(mark: ast.expr | None) -> str:
    """Field(gt=0, le=1) as "more than 0, at most 1"; nothing where a mark tells no range."""
    bounds = {word.arg: ast.unparse(word.value) for word in getattr(mark, "keywords", [])}
    if {"ge", "le"} <= set(bounds):
        return f"{bounds['ge']} to {bounds['le']}"
    says = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    return ", ".join(text.format(bounds[name]) for name, text in says.items() if name in bounds)


def shown(node: ast.expr) -> str:
    """A default as one would type it after the flag: a b for ("a", "b")."""
    if isinstance(node, ast.Constant):
        text = isinstance(node.value, str) and node.value != ""
        return node.value if text else ast.unparse(node).replace("'", '"')
    if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
        return " ".join(map(shown, node.elts))
    return ast.unparse(node)


def real_model(script: Path) -> dict[str, str]:
    """The defaults that a script has in its REAL_MODEL = dict(...); none where it has no such thing."""
    for node in parse_script(script).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REAL_MODEL":
            return {keyword.arg: shown(keyword.value) for keyword in node.value.keywords}
    return {}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def prose(text: str) -> str:
    """A meaning as Markdown text: what looks like a tag or emphasis stays what it is."""
    return re.sub(r"([<*])", r"\\\1", text)


def metrics_table(script: str) -> str:
    """Of a family, the name is that before its parts: critic/score for critic/score/{mean,max,min}."""
    if script not in SCRIPTS:
        raise DocsError(f"{script}: tools/validate_train_log.py has no metrics of it")
    rows = [(f"`{name}`", kind.split()[0].replace("?", ", optional"), prose(text))
            for name, (kind, text) in METRICS[SCRIPTS[script]].items()]
    return markdown(("metric", "type", "meaning"), rows)


def lines_table(root: Path) -> str:
    counts = {name: len((root / name).read_bytes().splitlines()) for name in SCRIPTS}
    lengths = [(f"`{name}`", f"{round(count, -1):,}") for name, count in counts.items()]
    return markdown(("script", "lines"), lengths)


def flags_table(kind: str, script: Path, name: str) -> str:
    rows, others = [], {} if name else real_model(script)
    for flag in flags(script, name or "Args"):
        default = "required" if flag.default is None else f"`{flag.default}`"
        if flag.name in others:
            default += f", with `--model` `{others[flag.name]}`"
        word = flag.name if kind == "options" else flag.option
        rows.append((f"`{word}`", f"`{flag.type}`", default, prose(flag.help)))
    return markdown((kind.removesuffix("s"), "type", "default", "meaning"), rows)


def rendered(text: str, name: str, root: Path = ROOT) -> str:
    """The text of a page with every table made anew; `name` is the page's, for errors."""
    if len(OPENING.findall(text)) != len(BLOCK.findall(text)):
        raise DocsError(f"{name}: a marker of a table is malformed or has no line <!-- end --> after it")

    def block(match: re.Match) -> str:
        kind, place, other, between = match.groups(default="")
        script, _, symbol = place.partition(":")
        if OPENING.search(between):
            raise DocsError(f"{name}: the table of {place} has no line <!-- end --> before the next marker")
        if not kind:
            return f"<!-- lines -->\n{lines_table(root)}<!-- end -->"
        if not (root / script).is_file():
            raise DocsError(f"{name}: there is no {script}")
        opening, *_ = match[0].splitlines()
        table = table_of(kind, script, symbol)
        if other:
            known = table_of(kind, other, symbol).splitlines()[2:]
            table = "".join(row for row in table.splitlines(keepends=True) if row.strip() not in known)
        return f"{opening}\n{table}<!-- end -->"

    def table_of(kind: str, script: str, symbol: str) -> str:
        return metrics_table(script) if kind == "metrics" else flags_table(kind, root / script, symbol)

    def link(match: re.Match) -> str:
        symbol, target, script = match.groups()
        beside = (root / name).parent / target  # docs/reading/ has scripts of its own
        path = beside if beside.is_file() else root / script
        defined = re.compile(rf"^\s*((def|class) {symbol}\b|{symbol}\b\s*[:=])", re.MULTILINE)
        if not defined.search(path.read_text(encoding="utf-8")):
            raise DocsError(f"{name}: {script} defines no {symbol}")
        return f"[`{symbol}`]({target})"

    return LINK.sub(link, BLOCK.sub(block, text))


def pages(root: Path = ROOT) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def stale_pages(root: Path = ROOT) -> list[tuple[Path, str]]:
    """The pages whose tables are not what the code says, each with its text made anew."""
    stale = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        new = rendered(text, str(page.relative_to(root)), root)
        if new != text:
            stale.append((page, new))
    return stale


def stale_figures(root: Path = ROOT) -> bool:
    """Print a line for each stale figure.  -> whether one of them is in README.md"""
    commits, unknown, in_readme = refresh.read_commits(root), [], False
    for figure in refresh.FIGURES:
        try:
            why = refresh.state(figure, commits, root)
        except CannotTell as error:
            unknown.append(str(error))
            continue
        if why and refresh.is_in_readme(figure, root):
            print(f"{figure.name}, a figure of README.md, is stale: {why}; "
                  "run python benchmarks/refresh.py --readme")
            in_readme = True
        elif why:
            print(f"warning: {figure.name} is a stale figure: {why}")
    if unknown:
        print(f"cannot tell whether {len(unknown)} figures are stale: {unknown[0]}")
    return in_readme


def code_lines(text: str) -> Iterator[str]:
    """The lines of the code blocks of a Markdown text, fenced or indented, with their backslashes joined.

    They have the indentation that they have within their block.
    """
    fence, pending, indent = "", "", 0
    for line in text.splitlines():
        bare = line.strip()
        if not fence and (opening := re.match(r"(`{3,}|~{3,})", bare)):
            fence, indent = opening[0], len(line) - len(line.lstrip())
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence, pending = "", ""
        elif not fence and not line.startswith("    "):
            pending = ""
        elif bare.endswith("\\"):
            pending += bare[:-1] + " "
        else:
            yield pending + line[indent if fence else 4:].rstrip()
            pending = ""


def readme_commands(text: str) -> Iterator[str]:
    """The commands `python SCRIPT.py ...` in the code blocks of a Markdown text.

    Backslash continuations are joined; && | ; and comments end a command; what stands before `python` is
    dropped. A script started by torchrun is given as `python SCRIPT.py ...` too.
    """
    for line in code_lines(text):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe in the output of a command
            words = line.split()
        command = []
        for word in [*words, ";"]:
            if set(word) <= set(";|&"):
                yield from script_command(command)
                command = []
            else:
                command.append(word)


def script_command(words: list[str]) -> Iterator[str]:
    """`python SCRIPT.py ...`, where the words are or hold a start of a script."""
    names = [word.rpartition("/")[2] for word in words]
    found = [i for i, name in enumerate(names) if re.fullmatch("python[0-9.]*|torchrun", name)]
    start = found[0] if found else len(words)
    rest = words[start + 1:]
    while rest and names[start] == "torchrun" and not rest[0].endswith(".py"):
        rest = rest[1:]  # torchrun's own flags
    if rest and rest[0].endswith(".py"):
        yield shlex.join(["python", *rest])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the docs' tables from the code.")
    parser.add_argument("--check", action="store_true",
                        help="only name what is stale; exit 1 if a page is, or a figure of README.md")
    args = parser.parse_args(argv)
    try:
        stale = stale_pages()
    except DocsError as error:
        print(error, file=sys.stderr)
        return 1
    for page, text in stale:
        print(f"{page.relative_to(ROOT)}: {'stale, run tools/docs_tables.py' if args.check else 'written'}")
        if not args.check:
            page.write_text(text, encoding="utf-8")
    if args.check and stale_figures(ROOT):
        return 1
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
