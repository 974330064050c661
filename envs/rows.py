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
import csv
import dataclasses
import inspect
import json
import math
import re
import warnings
import zlib
from pathlib import Path
from typing import Literal

import envs
from envs import BadInput, Env, Episode, Message, Step, Task, check_option, final_part, first_line, hint
from envs.answers import CHECKS, Check, gold_of
from envs.code import sandbox

FILES = (".jsonl", ".json", ".parquet", ".csv")
TEST_SHARE = 10  # where no test rows are given, one prompt in so many is held out
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

    def settle(self) -> None:
        """What answers mean where only all rows together tell it."""
        if self.checks:
            try:
                CHECKS[self.config.check].settle([task.data for tasks in self.rows.values()
                                                  for task in tasks.values()])
            except ValueError as error:
                raise BadInput(f"environment rows: data {self.config.data}: column {self.config.answer}: "
                               f"{error}") from error

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
        data = {"text": isinstance(column(config.prompt), str), "row": row,
                "question": messages[-1].get("content", "")}
        if config.system:
            messages = [{"role": "system", "content": config.system}, *messages]
        if self.checks:
            data["answers"] = answers_of(column(config.answer), config.answer)
            CHECKS[config.check].check_answers(data["answers"], row)
        if config.check == "python":
            data |= dict(entry_point=str(row.get("entry_point") or ""), timeout=config.timeout)
        if config.id:
            name = str(column(config.id))
        source = "rows"
        if config.source:
            source = re.sub(r"[^\w./-]", "_", str(column(config.source))) or "rows"
        return Task(name, source, messages, data)


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
        table.settle()
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
            found = self.check.marked(final_part(reply), self.config.extract, self.task.data)
            info["format"] = float(found is not None)
            if found is not None:
                info["correct"] = float(self.check.right(found, self.task.data))
        return Step([], info["correct"], True, False, info)


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
