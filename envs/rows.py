r"""Your own rows: a question, an answer and a way to compare a reply with it; or your own reward functions.

    env = envs.make("rows", data="train.jsonl", prompt="question", answer="answer", check="number")
    env.start(env.task("train", 0), seed=1).step("So 6 x 7 is 42.").info["correct"]

Files are .jsonl, .json, .parquet or .csv, or a folder of them, or a data set of the hub. Columns have the
names that the options give, "reward_model.ground_truth" one that is nested, so that files made for verl, TRL
or open-instruct do as they are. What in a reply is its answer: the last <answer>...</answer>, else the last
\boxed{...}, else what follows the last ####, else what the check looks for (the last number, say).

Reward functions have TRL's form, f(prompts, completions, **columns) -> one number or None for each, and see
the replies to a prompt together; each is logged by its name. docs/environments.md has the commands.
"""

from __future__ import annotations

import ast
import asyncio
import csv
import dataclasses
import inspect
import json
import math
import os
import re
import warnings
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Literal

import envs
from envs import BadInput, Env, Episode, Message, Step, Task, check_option, final_part, first_line, hint
from envs.code import sandbox, testing
from envs.workers import shared_pool

FILES = (".jsonl", ".json", ".parquet", ".csv")
TEST_SHARE = 10  # where no test rows are given, one prompt in so many is held out
MATH_SECONDS = 2.0  # that sympy may take for a reply [s]
REGEX_SECONDS = 0.2  # that a search may take [s]
MOST_DIGITS = 100  # of a number; also its largest exponent
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""
    """file (.jsonl, .json, .parquet, .csv), folder of such files, or hub id: the rows to train on"""
    split: str = "train"
    """of a folder or hub id: the split to train on"""
    test: str = ""
    """held-out rows: a file, or a split of the folder or hub id; default: its split test, else a tenth"""
    prompt: str = "prompt"
    """column of the question: a text, or messages; a.b is column b of the struct a"""
    system: str = ""
    """system message before each prompt: a text, or the name of a file with it"""
    answer: str = "answer"
    """column of the right answer, or of several with one to be met; of the tests for check=python"""
    check: Literal["", "exact", "number", "choice", "math", "contains", "regex", "python"] = ""
    """how a reply's answer is compared (docs/environments.md); may be left out where there are rewards"""
    extract: Literal["auto", "last_number", "boxed", "answer_tag", "whole"] = "auto"
    """what in the reply is its answer; auto: a tag, a box, what follows ####, or what the check looks for"""
    rewards: str = ""
    """reward functions of TRL's form, path/to/file.py:name, with commas"""
    weights: str = ""
    """of the rewards, numbers with commas; default: 1 each"""
    id: str = ""
    """column of a row's name, different in all; default: its number"""
    source: str = ""
    """column whose values have metrics of their own; default: all are rows"""
    timeout: float = 10.0
    """check=python: limit of the tests of a reply [s]"""


# Reading rows


def rows_of(name: str, split: str) -> tuple[dict[str, list], str]:
    """Rows of a file, folder or hub id. -> {split: [(number, row)]}, the split to train on"""
    where = f"environment rows: data {name}"
    path = Path(name)
    if path.suffix == ".csv":
        return {split: _csv_rows(path, where)}, split
    if path.suffix in FILES:
        return {split: [*envs.read_rows(name, where)]}, split
    import datasets  # slow to import

    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(name)
        elif path.is_dir() or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:.+)?", name):
            repository, _, config = name.partition(":") if not path.is_dir() else (name, "", "")
            data = datasets.load_dataset(repository, config or None)
        else:
            raise ValueError(f"expected a file ({', '.join(FILES)}), a folder or a hub id, owner/name")
    except Exception as error:  # the library raises what it likes
        raise BadInput(f"{where}: cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if isinstance(data, datasets.Dataset):
        data = {split: data}
    if split not in data:
        raise BadInput(f"{where}: no split {split!r}{hint(split, data)}; it has {', '.join(data)}")
    found = {}
    for part, rows in data.items():
        found[part] = [*enumerate(({k: envs.without_nulls(v) for k, v in row.items()} for row in rows), 1)]
    return found, split


def _csv_rows(path, where):
    """All values are texts: "007" stays what it is."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [*enumerate(csv.DictReader(file, restkey="", strict=True), 1)]
    except (OSError, ValueError, csv.Error) as error:
        raise BadInput(f"{where}: cannot be read ({type(error).__name__}: {first_line(error)})") from error
    for number, row in rows:
        if "" in row or None in row.values():
            names = ", ".join(filter(None, row))
            raise BadInput(f"{where}, row {number}: expected a value for each column of {names}")
    return rows


def lookup(row: dict, name: str):
    """The value of a column; "a.b" is b of a struct, or of a text that holds one as JSON. None: not there."""
    if name in row:
        return row[name]
    value = row
    for key in name.split("."):
        if isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except ValueError:
                return None
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def messages_of(value, column: str) -> list[Message]:
    """A prompt as messages, of which the last is not the assistant's. ValueError: what is wrong with it"""
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {column}: expected a text or messages, got {value!r:.80}")
    for message in value:
        fine = isinstance(message, dict) and message.get("role") in ROLES
        if not fine or not isinstance(message.get("content", ""), str):
            raise ValueError(f"column {column}: expected messages with role and content, got {message!r:.80}")
    if value[-1]["role"] == "assistant":
        raise ValueError(f"column {column}: its last message is the assistant's; expected a question")
    return value


def answers_of(value, column: str) -> list:
    """The right answers, one of which is to be met. ValueError: there is none"""
    answers = value if isinstance(value, list) else [value]
    if not answers or any(not isinstance(answer, (str, int, float)) or answer == "" for answer in answers):
        raise ValueError(f"column {column}: expected an answer, got {value!r:.80}")
    return answers


class Table:
    """The rows that can be used, and what is wrong with the others."""

    def __init__(self, config: Config, checks: bool):
        self.config, self.checks = config, checks
        self.rows = {}  # of each split: {name: Task}
        self.bad = []  # one line for each row that cannot be used

    def add(self, split: str, file: str, rows) -> None:
        tasks = self.rows.setdefault(split, {})
        for number, row in rows:
            try:
                task = self.task(row, f"{split}-{number}")
                if task.id in tasks:
                    raise ValueError(f"column {self.config.id}: {task.id!r} a second time")
                tasks[task.id] = task
            except ValueError as error:
                self.bad.append(f"{file}, row {number}: {error}")

    def task(self, row, name: str) -> Task:
        """ValueError: why a row cannot be used."""
        config = self.config
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {row!r:.80}")

        def column(name):
            value = lookup(row, name)
            if value is None:
                raise ValueError(f"no column {name}{hint(name, row)}; it has {', '.join(map(str, row))}")
            return value

        messages = messages_of(column(config.prompt), config.prompt)
        data = {"text": isinstance(column(config.prompt), str), "row": row}
        if config.system:
            messages = [{"role": "system", "content": config.system}, *messages]
        if self.checks:
            data["answers"] = answers_of(column(config.answer), config.answer)
            CHECKS[config.check].check_answers(data["answers"], row)
        if config.check == "python":
            data["entry_point"] = str(row.get("entry_point", ""))
        if config.id:
            name = str(column(config.id))
        source = "rows"
        if config.source:
            source = re.sub(r"[^\w./-]", "_", str(column(config.source))) or "rows"
        return Task(name, source, messages, data)


# Comparing answers

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+\u2212]?)\s?[$\u20ac\xa3\xa5]?\s?(?:(?P<whole>\d+)\s)?(?P<number>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})\b)?(?:\s?/\s?(?P<denominator>\d+))?\s?(?P<percent>%)?")
_LETTER = re.compile(r"(?i:answer|option|choice)\W*(?i:is|:)?\W*\(?([A-Z])\b(?!['\u2019])")
_MARKED = re.compile(r"\(([A-Z])\)|\*\*([A-Z])\b|(?m:^)[^\w\n]*([A-Z])(?=[.):]|\s*$)")
_CODE = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def tagged(text: str) -> str | None:
    """The inside of the last <answer>...</answer>."""
    tags = [*_TAG.finditer(text)]
    for opening, closing in zip(tags[-2::-1], tags[:0:-1], strict=True):
        if closing[1] and not opening[1]:
            return text[opening.end():closing.start()]
    return None


def boxed(text: str) -> str | None:
    r"""The inside of the last \boxed{...}, whose braces are balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[begin + 1:place]
    return None


def extracted(text: str, how: str) -> str | None:
    """What in a reply is its answer; None: it is not marked in this way (auto: in any)."""
    found = None
    if how in ("auto", "answer_tag"):
        found = tagged(text)
    if how in ("auto", "boxed") and found is None:
        found = boxed(text)
    if how == "auto" and found is None and "####" in text:
        found = (text.rpartition("####")[2].strip().splitlines() or [""])[0]
    if how == "last_number":
        found = last_number(text)
    if how == "whole":
        found = text
    return None if found is None else found.strip()


def last_number(text: str) -> str | None:
    found = [match[0] for match in _NUMBER.finditer(_plain_latex(text))]
    return found[-1] if found else None


def _plain_latex(text: str) -> str:
    r"""1{,}234, \$5, 40\% and \frac{1}{2} as 1,234, $5, 40% and 1/2."""
    text = re.sub(r"\\[dt]?frac\s?\{\s?(-?\d+)\s?\}\s?\{\s?(\d+)\s?\}", r" \1/\2", text)
    return re.sub(r"\\[!,;]|\\(?=[$%])", "", text.replace("{,}", ","))


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The last number of a text, and whether it is a percentage. None: there is none, or none so long."""
    matches = [*_NUMBER.finditer(_plain_latex(text))]
    if not matches or len(matches[-1][0]) > MOST_DIGITS:
        return None
    match = matches[-1]
    value = Fraction(match["number"].replace(",", ""))
    denominator = int(match["denominator"] or 1)
    if not denominator or abs(int(match["exponent"] or 0)) > MOST_DIGITS:
        return None
    value = value * Fraction(10) ** int(match["exponent"] or 0) / denominator
    if match["whole"] and match["denominator"] and value < 1:  # 2 1/2
        value += int(match["whole"])
    return (-value if match["sign"] in ("-", "\u2212") else value), bool(match["percent"])


def gold_of(answer) -> str:
    """A right answer as a text; of GSM8K's worked solutions what follows ####."""
    return str(answer).rpartition("####")[2].strip()


class Check:
    """Compares replies with answers. The methods are total on replies."""

    def check_answers(self, answers: list, row: dict) -> None:
        """ValueError where an answer cannot be compared with anything."""

    def marked(self, text: str, how: str) -> str | None:
        """What in a reply is its answer; None: nothing is."""
        found = extracted(text, how)
        return text.strip() or None if found is None and how == "auto" else found

    def equal(self, found: str, answer, data: dict) -> bool:
        raise NotImplementedError


class Exact(Check):
    """The same text, spaces aside."""

    def equal(self, found, answer, data):
        return found.split() == gold_of(answer).split()


class Number(Check):
    """Equal as numbers: 1,234 is 1234, $5 is 5, 3/4 is 0.75, and 45% is both 45 and 0.45."""

    def check_answers(self, answers, row):
        for answer in answers:
            if number_of(gold_of(answer)) is None:
                raise ValueError(f"answer {answer!r:.80}: expected a number")

    def marked(self, text, how):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        return last_number(text if found is None else found)

    def equal(self, found, answer, data):
        read = number_of(found)
        if read is None:
            return False
        (value, is_percent), (gold, gold_is_percent) = read, number_of(gold_of(answer))
        same = {value}
        if is_percent and not gold_is_percent:
            same.add(value / 100)
        if gold_is_percent and not is_percent:
            same.add(value * 100)
        return any(abs(one - gold) <= abs(gold) / 10**6 for one in same)


class Choice(Check):
    """The letter of an option; an answer may be its number from 0."""

    @staticmethod
    def letter(answer):
        if isinstance(answer, int) or str(answer).isdigit():
            return chr(ord("A") + int(answer)) if int(answer) < 26 else ""
        match = re.match(r"\(?([A-Za-z])\)?(?![A-Za-z])", gold_of(answer))
        return match[1].upper() if match else ""

    def check_answers(self, answers, row):
        for answer in answers:
            if not self.letter(answer):
                raise ValueError(f"answer {answer!r:.80}: expected a letter, or a number from 0")

    def marked(self, text, how):
        found = extracted(text, how)
        if found is None and how != "auto":
            return None
        text = (text if found is None else found).strip()
        if match := re.fullmatch(r"\W*(?:\\text\{)?([A-Za-z])\W*", text):
            return match[1].upper()
        for pattern in (_LETTER, _MARKED):
            if letters := [max(match.groups(default="")) for match in pattern.finditer(text)]:
                return letters[-1]
        return None

    def equal(self, found, answer, data):
        return found == self.letter(answer)


class Math(Check):
    """Equal as mathematics (math-verify): intervals, sets, matrices and formulas too."""

    def marked(self, text, how):
        found = extracted(text, how)
        return text.strip() or None if found is None and how == "auto" else found and f"\\boxed{{{found}}}"

    def equal(self, found, answer, data):
        pool = shared_pool(min(os.cpu_count() or 1, 16), "math_verify", "sympy")
        try:
            return pool.submit(math_equal, found, gold_of(answer), seconds=MATH_SECONDS).result()
        except RuntimeError:  # it took too long, or too much memory
            return False


class Contains(Check):
    """The answer occurs in the reply as a word or words, in upper or lower case."""

    def equal(self, found, answer, data):
        reply, wanted = " ".join(found.casefold().split()), " ".join(gold_of(answer).casefold().split())
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", reply) is not None


class Regex(Check):
    """The answer is a regular expression that is found in the reply."""

    def check_answers(self, answers, row):
        import regex  # searches within a time limit; transformers needs it too

        for answer in answers:
            try:
                regex.compile(str(answer))
            except regex.error as error:
                raise ValueError(f"answer {answer!r:.80}: expected a regular expression ({error})") from error

    def equal(self, found, answer, data):
        import regex

        try:
            return regex.search(str(answer), found, timeout=REGEX_SECONDS) is not None
        except TimeoutError:
            return False


class Python(Check):
    """Tests run without an error after the reply's code: the answer is their text, or a list of texts."""

    def check_answers(self, answers, row):
        try:
            module_of(answers, str(row.get("entry_point", "")))
        except SyntaxError as error:
            raise ValueError(f"tests that are not Python ({error})") from error

    def marked(self, text, how):
        blocks = _CODE.findall(text)
        return (blocks[-1] if blocks else text).strip() or None

    def passes(self, found, data, timeout) -> bool:
        module = module_of(data["answers"], data["entry_point"])
        results = testing.run_tests({"solution.py": found.encode(errors="replace")},
                                    {"test_row.py": module.encode()}, plain=True, timeout=timeout)
        return results == {"test_row.py::test_row": "PASSED"}


CHECKS = {"exact": Exact(), "number": Number(), "choice": Choice(), "math": Math(), "contains": Contains(),
          "regex": Regex(), "python": Python()}


def module_of(tests: list, entry_point: str) -> str:
    """A test module: what the tests say is one function. HumanEval's `check(candidate)` is called."""
    body = ast.parse("\n".join(map(str, tests))).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    calls = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    if names == ["check"] and not calls and entry_point:
        body += ast.parse(f"check({entry_point})").body
    stars = [node for node in body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    function = ast.parse("def test_row(): pass").body[0]
    function.body = [node for node in body if node not in stars] or function.body
    module = ast.Module([*ast.parse("from solution import *").body, *stars, function], [])
    return ast.unparse(ast.fix_missing_locations(module))


def math_equal(reply: str, gold: str) -> bool:
    """Whether a reply is equal to an answer; called in a process of its own, since sympy may not end."""
    from math_verify import parse, verify

    if "\\boxed" not in gold:
        gold = f"${gold.replace(chr(92) + '$', '').replace('$', '')}$"
    return bool(verify(parse(gold, parsing_timeout=None), parse(reply, parsing_timeout=None),
                       timeout_seconds=None))


# The environment


class Rows(Env):
    """One reply per row. A check says whether it is right; reward functions may say what it is worth."""

    Config = Config
    scores_itself = False  # a kind of Env in which neither a check nor reward functions are needed

    def __init__(self, config: Config):
        if config.system and Path(config.system).suffix and Path(config.system).is_file():
            config = dataclasses.replace(config, system=Path(config.system).read_text(encoding="utf-8"))
        super().__init__(config)
        check_option("rows", config, config.data, "data", f"a file ({', '.join(FILES)}), folder or hub id")
        check_option("rows", config, config.check or config.rewards or self.scores_itself, "check",
                     f"one of {', '.join(CHECKS)}, where no rewards are given")
        check_option("rows", config, config.timeout > 0, "timeout", "more than 0")
        self.functions = load_rewards(config)
        self.check = CHECKS.get(config.check)
        if config.check == "math":
            import_math_verify()
        if config.check == "python":
            sandbox.check()
        self.blocking = config.check in ("math", "python")
        self.tasks = self._read(config)

    def _read(self, config):
        table = Table(config, self.check is not None)
        splits, split = rows_of(config.data, config.split)
        table.add("train", config.data, splits[split])
        if config.test and config.test not in splits:
            if Path(config.test).suffix not in FILES:
                known = ", ".join(part for part in splits if part != split) or "none besides"
                raise BadInput(f"environment rows: option test: expected a file ({', '.join(FILES)}) or a "
                               f"split of {config.data} ({known}), got {config.test!r}")
            table.add("test", config.test, rows_of(config.test, "test")[0]["test"])
        elif config.test or "test" in splits and split != "test":
            table.add("test", config.data, splits[config.test or "test"])
        train = table.rows["train"]
        key = {name: json.dumps(task.messages, default=str) for name, task in train.items()}
        if "test" in table.rows:
            held_out = {json.dumps(task.messages, default=str) for task in table.rows["test"].values()}
            tasks = {"train": [task for name, task in train.items() if key[name] not in held_out],
                     "test": [*table.rows["test"].values()]}
            in_both = len(train) - len(tasks["train"])
        else:
            # By the prompt, so that rows with the same one are on the same side.
            first = {}  # prompt -> the first row with it
            for name in train:
                first.setdefault(key[name], name)
            side = envs.hold_out([*first.values()],
                                 lambda name: zlib.crc32(key[name].encode()) % TEST_SHARE == 0,
                                 f"environment rows: {config.data}: row")
            tasks = {part: [] for part in side}
            held_out = set(side["test"])
            for name, task in train.items():
                tasks["test" if first[key[name]] in held_out else "train"].append(task)
            in_both = 0
        self.about = (f"rows: {len(tasks['train'])} to train on, {len(tasks['test'])} held out; left out: "
                      f"{len(table.bad)} that cannot be used, {in_both} that are held out too")
        if table.bad and not (tasks["train"] and 2 * len(table.bad) < len(splits[split])):
            raise BadInput(f"environment rows: {table.bad[0]} ({len(table.bad)} such rows)")
        if not tasks["train"]:
            raise BadInput(f"environment rows: data {config.data}: no rows to train on")
        for line in table.bad[:5]:
            warnings.warn(f"environment rows: left out: {line}", stacklevel=2)
        return tasks

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return len(self.tasks[split])

    def task(self, split: str, index: int) -> Task:
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(f"rows: {split} task {index} of {self.num_tasks(split)}")
        return self.tasks[split][index]

    def start(self, task: Task, seed: int) -> Episode:
        return Attempt(task, self.check, self.config)

    def score_group(self, task: Task, conversations: list[list[Message]], steps: list[Step]) -> list[Step]:
        """The steps with the rewards of the functions, called once for all replies to a task."""
        if not self.functions:
            return steps
        start = len(task.messages)
        prompts = [task.messages] * len(steps)
        completions = [messages[start:] for messages in conversations]
        if task.data["text"]:
            prompts = [task.messages[-1]["content"]] * len(steps)
            completions = [messages[-1]["content"] for messages in completions]
        columns = {name: [value] * len(steps) for name, value in task.data["row"].items()}
        columns |= dict(prompts=prompts, completions=completions, completion_ids=[None] * len(steps),
                        trainer_state=None, log_extra=lambda *_: None, log_metric=lambda *_: None)
        totals = [0.0] * len(steps)
        infos = [dict(step.info) for step in steps]
        for place, (name, function, weight) in enumerate(self.functions):
            for k, reward in enumerate(self._call(name, function, columns, task)):
                if reward is not None:
                    totals[k] += weight * reward
                    infos[k][name] = float(reward)
                if not self.check and not self.scores_itself and not place:  # the first says what is right
                    infos[k]["correct"] = float(reward is not None and reward >= 1)
        totals = [total + step.reward for total, step in zip(totals, steps, strict=True)]
        return [dataclasses.replace(step, reward=total, info=info)
                for step, total, info in zip(steps, totals, infos, strict=True)]

    def _call(self, name, function, columns, task) -> list:
        """The rewards that a function gives; whatever it raises is one line, which ends the run."""
        parameters = inspect.signature(function).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            columns = {p.name: columns[p.name] for p in parameters if p.name in columns}
        where = f"environment rows: reward {name}, row {task.id}"
        try:
            rewards = function(**columns)
            if inspect.isawaitable(rewards):
                rewards = asyncio.run(awaited(rewards))
            rewards = [*rewards]
        except Exception as error:  # it is anybody's code
            raise BadInput(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        count = len(columns.get("completions") or rewards)
        fine = all(r is None or envs.is_number(r) and math.isfinite(r) for r in rewards)
        if len(rewards) != count or not fine:
            raise BadInput(f"{where}: expected {count} numbers, or None, got {rewards!r:.80}")
        return [None if reward is None else float(reward) for reward in rewards]

    def solution(self, task: Task) -> str | None:
        """The answer, marked as `extract` has it; None where that is no reply, as with tests."""
        if not self.check or self.config.check in ("regex", "python"):
            return None
        answer = task.data["answers"][0]
        if self.config.check == "choice":
            answer = self.check.letter(answer)
        marks = {"boxed": "\\boxed{%s}", "answer_tag": "<answer>%s</answer>", "auto": "\\boxed{%s}"}
        if self.config.extract == "auto" and "####" in str(answer):
            return str(answer)  # GSM8K's worked solution
        return marks.get(self.config.extract, "%s").replace("%s", gold_of(answer))


async def awaited(value):
    return await value


class Attempt(Episode):
    def __init__(self, task: Task, check: Check | None, config: Config):
        self.task, self.check, self.config = task, check, config

    def step(self, reply: str) -> Step:
        info = {"correct": 0.0}
        if self.check:
            found = self.check.marked(final_part(reply), self.config.extract)
            info["format"] = float(found is not None)
            if found is not None:
                info["correct"] = float(self.is_right(found))
        return Step([], info["correct"], True, False, info)

    def is_right(self, found: str) -> bool:
        data = self.task.data
        if self.config.check == "python":
            return self.check.passes(found, data, self.config.timeout)
        return any(self.check.equal(found, answer, data) for answer in data["answers"])


def load_rewards(config: Config) -> list[tuple]:
    """[(name, function, weight)]"""
    specs = [spec.strip() for spec in config.rewards.split(",") if spec.strip()]
    weights = [1.0] * len(specs)
    if config.weights:
        try:
            weights = [float(weight) for weight in config.weights.split(",")]
        except ValueError:
            weights = []
    check_option("rows", config, len(weights) == len(specs) and all(map(math.isfinite, weights)), "weights",
                 f"{len(specs)} numbers with commas, one for each reward")
    functions = [envs.load_object(spec, "environment rows: option rewards") for spec in specs]
    for spec, function in zip(specs, functions, strict=True):
        if not callable(function):
            raise BadInput(f"environment rows: option rewards: {spec}: expected a function")
    names = [spec.rpartition(":")[2] for spec in specs]
    taken = {"correct", "format"} if config.check else {"correct"}
    for number, name in enumerate(names):
        if names.count(name) > 1 or config.check and name in taken:
            names[number] = f"{Path(specs[number].rpartition(':')[0]).stem}_{name}"
    return [*zip(names, functions, weights, strict=True)]


def import_math_verify() -> None:
    """BadInput unless the package is there; this process does not need it."""
    from importlib.util import find_spec

    if not find_spec("math_verify"):
        raise BadInput("environment rows: check=math needs the package math-verify: "
                       "pip install -r requirements-envs.txt")
