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

import asyncio
import dataclasses
import datetime
import decimal
import functools
import inspect
import itertools
import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Literal

import envs
from envs import (
    BadInput,
    Env,
    Episode,
    Message,
    Step,
    Task,
    census,
    check_option,
    csv_files,
    final_part,
    first_line,
    hint,
)
from envs.answers import CHECKS, gold_of, programs
from envs.code import sandbox, testing

FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
TEST_SHARE = 10  # where no test rows are given, one prompt in so many is held out
MOST_ZEROS = 20  # that a number is written with: 1e300 stays what it is
MOST_DEPTH = 100  # of lists and objects in a row
# What a row may cause, each of which leaves it out: values that are wrong, too large or nested too deeply.
ROW_ERRORS = (ValueError, ArithmeticError, RecursionError, MemoryError)
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""
    """file (.jsonl, .json, .parquet, .csv, .tsv), folder of such, or hub id: the rows to train on"""
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
    """how a reply's answer is compared (docs/rows.md); may be left out where there are rewards"""
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
    guessable: bool = False
    """check=python: train on rows, too, whose tests code that computes nothing passes oftener than once in
    1,000"""


# Reading rows


def rows_of(name: str, split: str) -> tuple[dict[str, list], str, str]:
    """Rows of a file, folder or hub id.

    -> {split: [(file, [(number, row)])]}, the split to train on, and a remark for the start of a run
    """
    where = f"environment rows: data {name}"
    path = Path(name)
    if path.suffix.lower() in FILES and not path.is_dir():
        rows, remark = rows_of_file(name, where)
        return {split: [(name, rows)]}, split, remark
    import datasets  # slow to import

    remark = ""
    with envs.as_bad_input(f"{where}: cannot be read"):  # the library raises what it likes
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(name)
        elif path.is_dir() and (files := files_of_folder(name)):
            read = {part: [(file, *rows_of_file(file, f"environment rows: data {file}")) for file in some]
                    for part, some in files.items()}
            data = {part: [(file, rows) for file, rows, _ in some] for part, some in read.items()}
            remark = next((said for some in read.values() for *_, said in some if said), "")
        elif path.is_dir() or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:.+)?", name) and not path.is_file():
            repository, _, config = name.partition(":") if not path.is_dir() else (name, "", "")
            data = datasets.load_dataset(repository, config or None)
        else:
            raise ValueError(f"expected a file ({', '.join(FILES)}), a folder or a hub id, owner/name")
        if isinstance(data, datasets.Dataset):
            data = {split: data}
        if split not in data:
            raise BadInput(f"{where}: no split {split!r}{hint(split, data)}; it has {', '.join(data)}")
        for part, rows in data.items():
            if isinstance(rows, datasets.Dataset):
                tables = rows.with_format("arrow").iter(64)
                rows = [row for table in tables for row in envs.arrow_rows(table)]
                data[part] = [(name, [*enumerate(rows, 1)])]
    return dict(data), split, remark


def rows_of_file(name: str, where: str) -> tuple[list, str]:
    """-> [(number, row)], and a remark for the start of a run"""
    if Path(name).suffix.lower() not in (".csv", ".tsv"):
        return [*envs.read_rows(name, where)], ""
    with envs.as_bad_input(f"{where}: cannot be read"):
        return csv_files.read(name)


def files_of_folder(name: str) -> dict[str, list[str]]:
    """{split: its files}, where all are of a kind that is read here. `datasets` has rules for their names,
    but would read "007" and "2020-01-31" as a number and a time."""
    import datasets

    files = datasets.load_dataset_builder(name).config.data_files or {}
    known = all(Path(file).suffix.lower() in FILES for some in files.values() for file in some)
    return {str(part): [*map(str, some)] for part, some in files.items()} if known else {}


def lookup(row: dict, name: str):
    """The value of a column; "a.b" is b of a struct, or of a text that holds one as JSON. None: not there.

    ValueError: a text that seems to hold one, but cannot be read
    """
    if name in row:
        return row[name]
    value = row
    for key in name.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = envs.parsed(value)
            except ValueError as error:
                raise ValueError(f"column {name}: expected JSON, got {value!r:.80} ({error})") from error
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def check_depth(value) -> None:
    """ValueError where lists and objects are nested so deeply that what goes through them might fail."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise ValueError(f"lists and objects that are nested more than {MOST_DEPTH} deep")


def parsed_tests(value, column: str):
    """A list of tests, where a text holds one. ValueError: a text that is a value, and so tests nothing"""
    if not isinstance(value, str):
        return value
    try:
        found = envs.parsed(value)
    except ValueError:
        return value  # code
    if isinstance(found, list) and all(isinstance(test, str) for test in found):
        return found
    raise ValueError(f"column {column}: expected tests, or a list of them, got {value!r:.80}")


def messages_of(value, column: str) -> list[Message]:
    """A prompt as messages, of which the last is not the assistant's. ValueError: what is wrong with it"""
    if isinstance(value, str) and value.strip():
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {column}: expected a text or messages, got {value!r:.80}")
    for message in value:
        fine = isinstance(message, dict) and message.get("role") in ROLES
        if not fine or not isinstance(message.get("content", ""), str):
            raise ValueError(f"column {column}: expected messages with role and content, got {message!r:.80}")
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"column {column}: half of a character ({error.reason})") from error
    if value[-1]["role"] == "assistant":
        raise ValueError(f"column {column}: its last message is the assistant's; expected a question")
    return value


def answers_of(value, column: str) -> list[str]:
    """The right answers as texts, one of which is to be met. ValueError: there is none"""
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's
    answers = []
    for answer in value if isinstance(value, list) else [value]:
        try:
            text = answer_text(answer)
            text.encode()  # its error is a ValueError, as where half of a character is in it
        except ValueError as error:
            raise ValueError(f"column {column}: {error}") from error
        if text.strip():
            answers.append(text)
    if not answers:
        raise ValueError(f"column {column}: expected an answer, got {value!r:.80}")
    return answers


def answer_text(value) -> str:
    """An answer as a person writes it; "" where it is missing. ValueError: a kind that has no such form

    A text stays as it is. true and false; numbers in decimals, without needless zeros or the noise of binary
    ones: 8 for 8.0, 0.3 for 0.1 + 0.2, 0.00001 for 1e-05; days as 2020-01-31, times of a day as
    2020-01-31 10:30:00. Missing are None, NaN and what pandas writes for them.
    """
    if hasattr(value, "item"):  # NumPy's, of which 32 bits of 0.1 are 0.1
        value = float(str(value)) if value.dtype.kind == "f" else value.item()
    if value is None or value != value or value in ("nan", "NaN", "NaT", "<NA>"):
        return ""
    if isinstance(value, bytes):
        value = value.decode()  # its error is a ValueError
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, decimal.Decimal)) and math.isfinite(value):
        return number_text(value)
    if isinstance(value, datetime.datetime):
        is_day = value.time() == datetime.time() and value.tzinfo is None
        return value.date().isoformat() if is_day else value.isoformat(" ")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise ValueError(f"expected a text, a number, true, false or a date, got {value!r:.80} "
                     f"({type(value).__name__})")


def number_text(value: int | float | decimal.Decimal) -> str:
    text = str(value).lower().replace("e+", "e")
    if isinstance(value, float):
        rounded = f"{value:.15g}"  # any decimal of 15 digits comes back as it was
        if len(rounded) < len(text) - 4:  # 0.30000000000000004
            text = rounded
        elif abs(value) > 2**53 and float(rounded) != value:
            raise ValueError(f"expected a number that is exact, got {value!r}, which floats round")
    exact = decimal.Decimal(text)
    if abs(exact.adjusted()) <= MOST_ZEROS:
        text = f"{exact:f}"
    if "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclasses.dataclass
class Part:
    """What became of the rows of a file, or of a split of several."""

    name: str  # in the first lines of a run
    remark: str
    rows: dict = dataclasses.field(default_factory=dict)  # "row 7" -> the Task
    bad: list = dataclasses.field(default_factory=list)  # ("row 7", why it cannot be used)
    counts: dict = dataclasses.field(default_factory=dict)  # "to train on", "held out": how many
    in_both: int = 0  # that are held out, too, and so not trained on
    guessed: int = 0  # whose tests can be passed by guessing, and which are not trained on either


class Table:
    """The rows that can be used, and what is wrong with the others."""

    def __init__(self, config: Config, checks: bool, source: str):
        self.config, self.checks, self.source = config, checks, source
        self.parts = {}  # of each split

    def add(self, split: str, name: str, files: list, remark: str) -> None:
        """BadInput where less than half of the rows can be used. files: [(file, [(number, row)])]"""
        part = self.parts[split] = Part(name, remark)
        known, before = set(), 0  # names of tasks; rows of the files before
        for file, rows in files:
            for number, row in rows:
                place = f"row {number}" if len(files) == 1 else f"{os.path.relpath(file, name)}, row {number}"
                try:
                    task = self.task(row, f"{split}-{before + number}")
                    if task.id in known:
                        raise ValueError(f"column {self.config.id}: {task.id!r} a second time")
                    known.add(task.id)
                    part.rows[place] = task
                except ROW_ERRORS as error:
                    reason = f"too large, or nested too deeply ({type(error).__name__})"
                    if isinstance(error, ValueError):
                        reason = str(error)
                    part.bad.append((place, census.printable(reason)))
            before += rows[-1][0] if rows else 0
        if part.bad and len(part.bad) >= len(part.rows):
            place, reason = part.bad[0]
            raise BadInput(f"environment rows: {name}, {place}: {reason} ({len(part.bad)} such rows)")
        if not part.rows:
            raise BadInput(f"environment rows: {name}: no rows")

    def settle(self) -> None:
        """What answers mean where only all rows together tell it."""
        if self.checks:
            data = [task.data for part in self.parts.values() for task in part.rows.values()]
            try:
                remark = CHECKS[self.config.check].settle(data)
            except ValueError as error:
                raise BadInput(f"environment rows: data {self.config.data}: column {self.config.answer}: "
                               f"{error}") from error
            for part in self.parts.values():
                part.remark = "; ".join(filter(None, [part.remark, remark]))

    def task(self, row, name: str) -> Task:
        """One of ROW_ERRORS: why a row cannot be used."""
        config = self.config
        check_depth(row)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {row!r:.80}")

        def column(name):
            value = lookup(row, name)
            if value is None and name.partition(".")[0] in row:
                raise ValueError(f"column {name}: expected a value, got none")
            if value is None:
                raise ValueError(f"no column {name}{hint(name, row)}; it has {', '.join(map(str, row))}")
            return value

        if config.prompt:
            prompt = column(config.prompt)
        else:
            prompt = json.dumps(row, default=str, ensure_ascii=False)
        try:
            prompt = envs.parsed_prompt(prompt)
        except ValueError as error:
            raise ValueError(f"column {config.prompt}: {error}, got {prompt!r:.80}") from error
        check_depth(prompt)
        messages = messages_of(prompt, config.prompt)
        data = {"text": isinstance(prompt, str), "row": row, "question": messages[-1].get("content", "")}
        if config.system:
            messages = [{"role": "system", "content": config.system}, *messages]
        if self.checks:
            answer = column(config.answer)
            if config.check == "python":
                answer = parsed_tests(answer, config.answer)
            data["answers"] = answers_of(answer, config.answer)
            check = CHECKS[config.check]
            size = check.size(data["answers"])
            if size > check.most:
                raise ValueError(f"column {config.answer}: expected {check.most:,} characters at most, got "
                                 f"{size:,}")
            check.check_answers(data["answers"], row)
        if config.check == "python":
            data |= dict(entry_point=str(row.get("entry_point") or ""), timeout=config.timeout)
            data["guessable"] = programs.guess(data["answers"], row, data["question"])
        if config.id:
            name = str(column(config.id))
        source = self.source
        if config.source:
            source = re.sub(r"[^\w./-]", "_", str(column(config.source))) or self.source
        return Task(name, source, messages, data)


def split_tasks(table: Table, config: Config) -> dict[str, list[Task]]:
    """{split: tasks}. Rows with one prompt are on the same side: what is held out is not trained on."""
    train = table.parts["train"]
    key = {place: json.dumps(task.messages, default=str) for place, task in train.rows.items()}
    if "test" in table.parts:
        held_out = [*table.parts["test"].rows.values()]
        keys = {json.dumps(task.messages, default=str) for task in held_out}
        tasks = {"train": [task for place, task in train.rows.items() if key[place] not in keys],
                 "test": held_out}
        train.counts = {"to train on": len(tasks["train"])}
        train.in_both = len(train.rows) - len(tasks["train"])
        table.parts["test"].counts = {"held out": len(held_out)}
        return tasks
    first = {}  # prompt -> the first row with it
    for place, task in train.rows.items():
        first.setdefault(key[place], task.id)
    key_of = {name: prompt for prompt, name in first.items()}
    side = envs.hold_out([*key_of], lambda name: zlib.crc32(key_of[name].encode()) % TEST_SHARE == 0,
                         f"environment rows: {config.data}: row")
    held_out = set(side["test"])
    tasks = {part: [] for part in side}
    for place, task in train.rows.items():
        tasks["test" if first[key[place]] in held_out else "train"].append(task)
    train.counts = {"to train on": len(tasks["train"]), "held out": len(tasks["test"])}
    return tasks


def leave_out_guessable(part, tasks: list[Task]):
    """Leave out tasks whose tests can be passed by guessing."""
    kept = [task for task in tasks if task.data.get("guessable", 0.0) <= testing.MOST_GUESSED]
    part.guessed = len(tasks) - len(kept)
    if tasks and not kept:
        raise BadInput(f"environment rows: {part.name}: no rows to train on: the tests of all {len(tasks):,} "
                       "can be passed by guessing oftener than once in 1,000 (guessable=true keeps them)")
    part.counts["to train on"] = len(kept)
    tasks[:] = kept


# The environment


class Rows(Env):
    """One reply per row. A check says whether it is right; reward functions may say what it is worth."""

    Config = Config
    source = "rows"
    scores_itself = False  # a kind of Env in which neither a check nor reward functions are needed
    whole_rows = False  # one in which a row needs no column of a prompt, and is told from others by all of it

    def __init__(self, config: Config):
        if Path(config.system).suffix and os.path.isfile(config.system):  # a text may be too long for Path's
            with envs.as_bad_input(f"environment rows: option system={config.system}: cannot be read"):
                config = dataclasses.replace(config, system=envs.read_text(config.system))
        super().__init__(config)
        check_option("rows", config, config.data, "data", f"a file ({', '.join(FILES)}), folder or hub id")
        check_option("rows", config, config.prompt or self.whole_rows, "prompt", "a column")
        check_option("rows", config, config.check or config.rewards or self.scores_itself, "check",
                     f"one of {', '.join(CHECKS)}, where no rewards are given")
        check_option("rows", config, config.timeout > 0, "timeout", "more than 0")
        self.first_decides = not config.check and not self.scores_itself
        self.functions = load_rewards(config, self.first_decides)
        self.check = CHECKS.get(config.check)
        if config.check == "math":
            import_math_verify()
        if config.check == "python":
            sandbox.check()
        self.blocking = config.check in ("math", "python", "regex")
        table = self._read(config)
        self.tasks = split_tasks(table, config)
        if not config.guessable:
            leave_out_guessable(table.parts["train"], self.tasks["train"])
        if not self.tasks["train"]:
            raise BadInput(f"environment rows: data {config.data}: no rows to train on, as all are held out")
        self.parts = [*table.parts.values()]

    @functools.cached_property
    def about(self) -> str:
        """A line for each file: what is read, left out, and whether the check knows its own answers."""
        return "\n".join(census.look(self, part)[0] for part in self.parts)

    def _read(self, config) -> Table:
        table = Table(config, self.check is not None, self.source)
        splits, split, remark = rows_of(config.data, config.split)
        table.add("train", config.data, splits[split], remark)
        if config.test and config.test not in splits:
            if Path(config.test).suffix.lower() not in FILES:
                known = ", ".join(part for part in splits if part != split) or "none besides"
                raise BadInput(f"environment rows: option test: expected a file ({', '.join(FILES)}) or a "
                               f"split of {config.data} ({known}), got {config.test!r}")
            found, _, remark = rows_of(config.test, "test")
            table.add("test", config.test, found["test"], remark)
        elif config.test or "test" in splits and split != "test":
            held_out = config.test or "test"
            table.add("test", f"{config.data}, split {held_out}", splits[held_out], remark)
        table.settle()
        return table

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return len(self.tasks[split])

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        return self.tasks[split][index]

    def start(self, task: Task, seed: int) -> Episode:
        return Attempt(self, task)

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
                if self.first_decides and place == 0:
                    infos[k]["correct"] = float(reward is not None and reward >= 1)
        totals = [total + step.reward for total, step in zip(totals, steps, strict=True)]
        if not all(map(math.isfinite, totals)):
            raise BadInput(f"environment rows: row {task.id}: expected sums of rewards that are finite, got "
                           f"{totals!r:.80}")
        return [dataclasses.replace(step, reward=total, info=info)
                for step, total, info in zip(steps, totals, infos, strict=True)]

    def _call(self, name, function, columns, task) -> list:
        """The rewards that a function gives; whatever it raises is one line, which ends the run."""
        where = f"environment rows: reward {name}, row {task.id}"
        count = len(columns["completions"])
        try:
            parameters = inspect.signature(function).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                columns = {p.name: columns[p.name] for p in parameters if p.name in columns}
            rewards = function(**columns)
            if inspect.isawaitable(rewards):
                rewards = asyncio.run(awaited(rewards))
            if not isinstance(rewards, (str, bytes, dict, set)):  # which have no order, or are no numbers
                rewards = [*itertools.islice(rewards, count + 1)]  # a generator may have no end
        except KeyboardInterrupt as error:  # Ctrl-C, or it says so
            raise KeyboardInterrupt(where) from error
        except BaseException as error:  # it is anybody's code: SystemExit, CancelledError
            raise BadInput(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        is_fine = isinstance(rewards, list) and len(rewards) == count and all(map(is_reward, rewards))
        if not is_fine:
            raise BadInput(f"{where}: expected {count} numbers, or None, got {envs.shown(rewards)}")
        return [None if reward is None else float(reward) for reward in rewards]

    def judge(self, task: Task, reply: str) -> tuple[str | None, bool]:
        """What is read out of a reply, and whether that is right."""
        found = self.check.marked(final_part(reply), self.config.extract, task.data)
        return found, found is not None and self.check.right(found, task.data)

    def gold(self, task: Task) -> list[str]:
        """The right answers in their plainest form: an option's letter, what follows ####."""
        return [gold_of(answer) for answer in task.data["answers"]]

    def solution(self, task: Task) -> str | None:
        """The answer, marked as `extract` has it; None where that is no reply, as with tests."""
        if not self.check or self.config.check in ("regex", "python"):
            return None
        answer = task.data["answers"][0]
        if self.config.extract == "auto" and "####" in answer:
            return answer  # GSM8K's worked solution
        marks = {"boxed": "\\boxed{%s}", "answer_tag": "<answer>%s</answer>", "auto": "\\boxed{%s}"}
        return marks.get(self.config.extract, "%s").replace("%s", self.gold(task)[0])


async def awaited(value):
    return await value


def is_reward(value) -> bool:
    return value is None or envs.is_number(value) and math.isfinite(value)


class Attempt(Episode):
    def __init__(self, env: Rows, task: Task):
        self.env, self.task = env, task

    def step(self, reply: str) -> Step:
        info = {"correct": 0.0}
        if self.env.check:
            found, right = self.env.judge(self.task, reply)
            info |= {"correct": float(right), "format": float(found is not None)}
        if "guessable" in self.task.data:
            info["guessable"] = self.task.data["guessable"]
        return Step([], info["correct"], True, False, info)


def load_rewards(config: Config, first_decides: bool) -> list[tuple]:
    """[(name, function, weight)]. first_decides: of the functions the first says what is correct."""
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
    taken = {"correct", "format"} if config.check else {"correct"}
    labels = reward_labels(specs, taken, first_decides)
    return [*zip(labels, functions, weights, strict=True)]


def reward_labels(specs: list[str], taken: set[str], first_decides: bool) -> list[str]:
    """What each reward is logged as: its function's name; where another has that, with its file's in front,
    and where that is not enough, with its folders'.

    taken: names of something else, which the first function may have where it decides.
    """
    paths = []  # the parts of each name, the last ones first
    for spec in specs:
        place, _, name = spec.rpartition(":")
        parts = Path(place).resolve().with_suffix("").parts[1:] if place.endswith(".py") else place.split(".")
        paths.append([name, *reversed(parts)])
    sizes = [1] * len(paths)  # how many of them are used
    while True:
        labels = ["_".join(path[:size][::-1]) for path, size in zip(paths, sizes, strict=True)]
        clashing = []
        for number, label in enumerate(labels):
            is_verdict = first_decides and number == 0  # what it says is `correct`
            is_taken = labels.count(label) > 1 or label in taken and not is_verdict
            if is_taken and sizes[number] < len(paths[number]):
                clashing.append(number)
        if not clashing:
            return labels
        for number in clashing:
            sizes[number] += 1


def import_math_verify() -> None:
    """BadInput unless the package is there; this process does not need it."""
    from importlib.util import find_spec

    if not find_spec("math_verify"):
        raise BadInput("environment rows: check=math needs the package math-verify: "
                       "pip install -r requirements-envs.txt")
