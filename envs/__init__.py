"""Text environments: what the training scripts share, and all that they share.

An environment hands out tasks and scores replies. It knows nothing of tokens, models or command lines:

    env = envs.make("countdown", max_operands=4)
    task = env.task("train", 0)                  # messages for the model, data for the verifier
    episode = env.start(task, seed=1)
    step = episode.step("18 + 14 = 32; 32 + 6 = 38")
    step.reward, step.info["correct"], step.terminated

To add one: subclass `Env` in a file of its own and name it in `ENVS`, or pass `--env path/to/file.py:Class`.
"""

from __future__ import annotations

import ast
import asyncio
import codecs
import concurrent.futures
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import threading
import typing
import warnings
import zlib
from pathlib import Path

# Where a script cannot run it ends here, in one line, before it imports what is not there.
if sys.platform == "win32":  # no fcntl, no fork, no process groups
    sys.exit("error: Windows is not supported: use its Linux (WSL 2)")
if sys.platform == "linux" and not Path("/proc/self/stat").exists():  # psutil reads it
    sys.exit("error: /proc is not mounted, which tells the memory of a process: mount -t proc proc /proc")

# OpenAI's chat form: {"role": "system" | "user" | "assistant" | "tool", "content": str}. One of role "tool"
# has the "name" of the function that answers; an assistant's may have "tool_calls":
# [{"type": "function", "function": {"name": str, "arguments": dict}}].
Message = dict

ENVS = {
    "agent": "envs.adapters.agent:Agent",
    "arcagi3": "envs.arcagi3:ArcAgi3",
    "countdown": "envs.countdown:Countdown",
    "logic": "envs.logic:Logic",
    "openenv": "envs.adapters.openenv:OpenEnv",
    "openspiel": "envs.openspiel:OpenSpiel",
    "reasoning-gym": "envs.adapters.reasoning_gym:ReasoningGym",
    "repl": "envs.code.repl:Repl",
    "rows": "envs.rows:Rows",
    "swe": "envs.code.swe:Swe",
    "swe-synth": "envs.code.swe:Swe",
    "swesynth": "envs.code.swe:Swe",
    "textarena": "envs.adapters.textarena:TextArena",
    "trl": "envs.adapters.trl:Trl",
    "verifiers": "envs.adapters.verifiers:Verifiers",
}
MIXTURE = "envs.mixture:Mixture"  # of several of them

MAX_REPLY = 20_000  # characters that `final_part` keeps: bounds the time of a verifier
# How models write thoughts before an answer: what opens one, and behind what the answer begins.
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>",
            "<|channel|>analysis": "<|channel|>final<|message|>"}


class BadInput(ValueError):
    """A flag, file, row or option that cannot be used. Its message is the one line that a person reads."""


def first_line(error: BaseException) -> str:
    """What an error says, for the one line of a BadInput."""
    lines = [line for line in str(error).splitlines() if re.search(r"\w", line)]  # none of **** alone
    first, *others = [*map(str.strip, lines)] or [type(error).__name__]
    if "validation error" in first:  # pydantic's first line only counts them
        first = " ".join([first, *map(str.strip, others)])
    return first[:300]


@contextlib.contextmanager
def as_bad_input(what: str):
    """Whatever a library raises within is a BadInput: `what`, and the first line of the error."""
    try:
        yield
    except BadInput:  # it is one line already
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{what} ({first_line(error)})") from error


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem. JSON-serialisable; `data` is for the verifier and never reaches a prompt."""

    id: str  # unique within the environment
    source: str  # names the metric: val/<source>/pass@1
    messages: list[Message]
    data: dict
    # Functions that the model may call, for its chat template: schemas in OpenAI's form, {"type": "function",
    # "function": {"name", "description", "parameters"}}. Where there are some, Episode.step gets the calls.
    tools: list[dict] | None = None
    seat: int = 0  # of the replies to it, where the policy plays several in one game, as its sub-agents


@dataclasses.dataclass(slots=True)
class Step:
    """The environment's answer to one reply."""

    messages: list[Message]  # what the model reads next; empty when the episode is over
    reward: float
    terminated: bool  # the task is over: solved, failed or given up
    truncated: bool  # a limit of the environment ended it (turns, time)
    # Named parts; `correct` (0 or 1) at least once the episode is over; `error` is 1 where the environment
    # failed, so that there is no verdict. Numbers are averaged in evaluations.
    info: dict
    # (Task, Episode) of sub-agents to be played first; the Step of Episode.resume then takes the place of it.
    children: tuple = ()
    # Of a last step: what each seat earned, where sub-agents were the policy in other seats. All are trained.
    seat_rewards: tuple = ()

    def __post_init__(self):
        for number in (self.reward, self.info.get("correct", 0.0), self.info.get("suspicious", 0.0)):
            float(0 + number)  # what is none fails here, and with it this episode alone


class Episode:
    """One attempt at one task."""

    own_task: Task | None = None  # the task with the episode's own prompt, which is known since its start

    def step(self, reply: str, calls: list[dict] | None = None) -> Step:
        """Score a reply. Total: any text returns in bounded time, and none raises or is executed here.

        calls: given if the task has tools, and only then, so that others need not take it: what the caller
        found in the reply (the whole text that was sampled), as {"name": str, "arguments": dict}; [] for
        none. The model wrote them, so any name, keys and values may come, and get an answer as any text does.
        It is of role "tool", with the function's name.
        """
        raise NotImplementedError

    def resume(self, replies: list[str]) -> Step:
        """After the children of a step: the last reply of each, '' where there is none. Ends the step."""
        raise NotImplementedError

    def end(self, reason: str) -> Step | None:
        """A limit of the caller ends the episode: a last step for what there is (None: worth nothing)."""
        return None

    def close(self) -> None:
        """Release what the episode holds (processes, folders, connections).

        Called once, from any thread, even while another is within a step, which should then end soon.
        """


class Env:
    """A family of tasks with a verifier."""

    Config: type  # a dataclass: the options that `make` takes
    splits = ("train", "test")  # disjoint by construction
    multi_turn = False  # True: a step may answer with messages and go on
    blocking = False  # True: a step waits for a process or a server, so that callers run it in a thread
    threads = 8  # such steps at once
    at_once = 0  # episodes at once, unless --max-concurrent says it; 0: all
    # Words of all prompts and solutions, for a tokenizer with a token per word, which sft.py makes where a
    # model is made too (None: one of bytes).
    vocabulary: list[str] | None = None
    about = ""  # lines for the start of a run, such as how many rows were read
    identity = ""  # text of files that options name, such as a prompt; another text is another run

    def __init__(self, config):
        self.config = config

    @classmethod
    def configure(cls, name: str, options: dict):
        """Options, whose values may be strings, as a Config. BadInput names what is known."""
        return make_config(cls.Config, name, options)

    def num_tasks(self, split: str) -> int:
        """BadInput where a split is empty and no option says that it shall be; it names one that helps."""
        raise NotImplementedError

    def check_split(self, split: str) -> None:
        """Raises BadInput where there is no such split."""
        if split not in self.splits:
            raise BadInput(f"environment {type(self).__name__.lower()}: split: expected one of "
                           f"{', '.join(self.splits)}, got {split!r}")

    def check_index(self, split: str, index: int) -> None:
        """Raises IndexError where the split has no such task."""
        number = self.num_tasks(split)
        if not 0 <= index < number:
            raise IndexError(f"{type(self).__name__.lower()}: {split} task {index} of {number}")

    def task(self, split: str, index: int) -> Task:
        """The same index gives the same task, on every machine and in any order."""
        raise NotImplementedError

    def training_task(self, cursor: int, seed: int) -> Task:
        """The cursor-th task of training: a new permutation of all tasks in each epoch."""
        if not (size := self.num_tasks("train")):
            raise BadInput(f"environment {type(self).__name__.lower()}: no training tasks")
        return self.task("train", shuffled(cursor, seed, size))

    def start(self, task: Task, seed: int) -> Episode:
        """A new attempt. Its randomness comes from (seed, task.id): a reply scored twice scores the same."""
        raise NotImplementedError

    def score_group(self, task: Task, conversations: list[list[Message]], steps: list[Step]) -> list[Step]:
        """For rewards that look at all replies to a task at once: called with its finished episodes and their
        last steps.  -> the steps to take in place of these"""
        return steps

    def solution(self, task: Task) -> str | None:
        """A reference reply that scores full marks (None: there is none at hand, or it is not a text alone,
        as where tools are called)."""
        return None

    def demonstration(self, task: Task) -> list[Message] | None:
        """A whole reference conversation to learn from, the task's messages first (None: none is at hand)."""
        reply = self.solution(task)
        return None if reply is None else [*task.messages, {"role": "assistant", "content": reply}]


def play(episode: Episode, task: Task, reply: typing.Callable[[], str | Message]) -> list[Message]:
    """The conversation of an episode in which reply() is each time the model's next reply: its text, or an
    assistant's message, whose tool_calls go to the episode if the task has tools."""
    messages, step = list(task.messages), None
    try:
        while step is None or not (step.terminated or step.truncated):
            said = reply()
            if isinstance(said, str):
                said = {"role": "assistant", "content": said}
            messages.append(said)
            if task.tools is None:
                step = episode.step(said["content"])
            else:
                calls = [call["function"] for call in said.get("tool_calls") or ()]
                step = episode.step(said.get("content") or "", calls)
            messages += step.messages
    finally:
        episode.close()
    return messages


def close(episode: Episode) -> None:
    """Close an episode, whatever comes of it."""
    try:
        episode.close()
    except (Exception, SystemExit):
        pass


def run(coroutine):
    """asyncio.run, which raises what failed first in a TaskGroup, or in those within it, by itself."""
    try:
        return asyncio.run(coroutine)
    except BaseExceptionGroup as group:
        error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def in_thread(function: typing.Callable, *given):
    """Await a call, of a blocking environment, say, in a thread of its own that does not hold up the end of
    the process. Where nobody waits for the result any more when it comes, the episodes in it are closed.
    """
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on only who waits for it can be cancelled

    def work():
        try:
            future.set_result(function(*given))
        except (OSError, RuntimeError, ValueError) as error:
            future.set_exception(error)
        except BaseException as error:  # a StopIteration or a SystemExit has a meaning of its own to a loop
            future.set_exception(RuntimeError(repr(error)))

    def close_late(future):
        if future.exception() is None:
            result = future.result()
            for late in (result, *(episode for _, episode in getattr(result, "children", ()))):
                if isinstance(late, Episode):
                    threading.Thread(target=close, args=(late,), daemon=True).start()

    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(close_late)
        raise


class Calls:
    """Awaits what an environment does: in threads, some at a time, where it is `blocking`."""

    def __init__(self, env: Env, longest_close: float = 10.0):
        """longest_close: how long the closing of an episode is waited for [s]."""
        self.blocking, self.longest_close = env.blocking, longest_close
        self.free = asyncio.Semaphore(env.threads)

    async def __call__(self, method: typing.Callable, *given):
        if not self.blocking:
            return method(*given)
        async with self.free:
            return await in_thread(method, *given)

    async def close(self, episode: Episode) -> None:
        """What an episode leaves behind must not end the run, nor hold it up."""
        if self.blocking:
            await asyncio.wait([asyncio.create_task(in_thread(close, episode))], timeout=self.longest_close)
        else:
            close(episode)


def shuffled(cursor: int, seed: int, size: int) -> int:
    """The cursor-th number of training, of range(size): a new permutation of all in each epoch."""
    epoch, offset = divmod(cursor, size)
    return int(_permutation(seed * 1_000_003 + epoch, size)[offset])


@functools.lru_cache(2)
def _permutation(seed: int, size: int):
    import numpy as np  # here: sandboxes and tools import this module where there is nothing but Python

    return np.random.default_rng(seed).permutation(size)


def final_part(reply: str) -> str:
    """What follows the last thought, at most MAX_REPLY characters from its end; nothing while one thinks."""
    for opening, closing in THOUGHTS.items():
        reply = reply.rpartition(closing)[2]  # all of it, where none is closed
        if opening in reply:
            return ""
    return reply[-MAX_REPLY:]


def hold_out(names: list[str], is_test: typing.Callable[[str], bool], what: str) -> dict[str, list[str]]:
    """{split: names}. Where several names leave the test split empty, it gets one of them, which a line says.

    Which one is a matter of the names alone. what: begins the line, such as "environment swe: instance".
    """
    split = {"train": [name for name in names if not is_test(name)], "test": list(filter(is_test, names))}
    if len(names) > 1 and not split["test"]:
        split["test"] = [min(names, key=lambda name: zlib.crc32(name.encode()))]
        split["train"].remove(split["test"][0])
        warnings.warn(f"{what} {split['test'][0]} is held out: of these {len(names)}, no other is in the "
                      "test split", stacklevel=2)
    return split


def make(name: str, /, **options) -> Env:
    """Build an environment. Option values may be strings, as flags give them; the field's type decides.

    Several names with commas, each with a weight if one likes ("countdown=3,logic"), make an envs.mixture.
    Raises BadInput for an unknown name, an unknown option or a value of the wrong type, naming what is known.
    """
    if "," in name or "=" in name:
        return load_object(MIXTURE, "--env")(name, options, make)
    if ":" not in name and name not in ENVS:
        raise BadInput(f"unknown environment {name!r}{hint(name, ENVS)}; known: {', '.join(sorted(ENVS))}, "
                       "path/to/file.py:Class, or several of them with commas")
    cls = load_object(ENVS.get(name, name), "--env")
    if not (isinstance(cls, type) and issubclass(cls, Env) and hasattr(cls, "Config")):
        raise BadInput(f"--env {name}: expected a class derived from envs.Env, with a Config")
    return cls(cls.configure(name, options))


def make_config(config: type, name: str, options: dict):
    """The dataclass `config` of environment `name`, from options whose values may be strings."""
    hints = typing.get_type_hints(config)
    for key in options:
        if key not in hints:
            raise BadInput(f"environment {name}: unknown option {key!r}{hint(key, hints)}; "
                           f"known: {', '.join(hints)}")
        options[key] = _convert(options[key], hints[key], f"environment {name}: option {key}")
    try:
        return config(**options)
    except BadInput:
        raise
    except (TypeError, ValueError) as error:  # one without a default, or what its own checks say
        raise BadInput(f"environment {name}: {first_line(error)}") from error


def check_option(name: str, config, fine, option: str, expected: str) -> None:
    """BadInput unless an option of environment `name` is `fine`."""
    if not fine:
        raise BadInput(f"environment {name}: option {option}: expected {expected}, "
                       f"got {getattr(config, option)!r}")


def parse_options(pairs: typing.Iterable[str]) -> dict[str, str]:
    """("key=value", ...) -> {"key": "value"}."""
    options = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise BadInput(f"environment option {pair!r}: expected key=value")
        options[key] = value
    return options


def json_options(pairs: typing.Iterable[str]) -> dict[str, typing.Any]:
    """("key=value", ...) -> {"key": value}, where value is what its text is as JSON, or else the text."""
    options = parse_options(pairs)
    for key, text in options.items():
        with contextlib.suppress(ValueError):
            options[key] = json.loads(text)
    return options


def load_object(spec: str, flag: str):
    """The object that `path/to/file.py:name` or `package.module:name` names; `flag` is named in errors."""
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            # A name of its own: random.py must not take the place of the standard library's module.
            module_spec = importlib.util.spec_from_file_location(f"file_{Path(place).stem}", place)
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = module  # dataclasses look their own module up
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, name)
    except (Exception, SystemExit) as error:  # a file of one's own may do anything when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{flag} {spec}: expected path/to/file.py:name ({reason})") from error


def source_of(obj) -> str:
    """Qualified name and source text of a function or class, for hashing."""
    try:
        return f"{obj.__module__}.{obj.__qualname__}\n{inspect.getsource(obj)}"
    except (AttributeError, TypeError, OSError) as error:
        expected = "expected a function or class with readable source"
        raise BadInput(f"--reward-fn {obj!r:.100}: {expected}") from error


def rewards_of(function, rollouts: list, name: str, of_turns: bool = False) -> list:
    """What a reward function gives to episodes of one task, in their order.

    One whose first parameter is named `rollouts` gets all of them and returns a list, a tuple or an array;
    any other gets one at a time. A reward is a number or, with of_turns, it may be a list with one for each
    turn. name: that of --reward-fn, for errors; empty for the script's own function.
    """
    if not rollouts:
        return []
    where, task = f"--reward-fn {name or 'episode_reward'}", rollouts[0].task.id
    parameters = [*inspect.signature(function).parameters]
    sees_all = parameters[:1] == ["rollouts"]
    try:
        rewards = function(rollouts) if sees_all else [function(r) for r in rollouts]
    except Exception as error:  # the user's own: with its traceback, below which this stands
        error.add_note(f"{where} has failed for task {task}")
        raise
    if hasattr(rewards, "tolist"):  # NumPy's and PyTorch's
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != len(rollouts):
        count = f"{len(rewards)}: " if isinstance(rewards, list | tuple) else ""
        raise BadInput(f"{where}: expected {len(rollouts)} numbers in a list for task {task}, one for each "
                       f"episode, got {count}{shown(rewards)}")
    for reward in rewards:
        numbers = reward if of_turns and isinstance(reward, list | tuple) else [reward]
        if not all(map(is_number, numbers)):
            expected = f"a number for task {task}" + (", or one for each turn" if of_turns else "")
            raise BadInput(f"{where}: expected {expected}, got {shown(reward)}")
    return rewards


def read_rows(name: str, where: str, split: str = "train", columns: typing.Collection[str] = (),
              streaming: bool = False, optional: typing.Collection[str] = ()) -> typing.Iterator[tuple]:
    """(number from 1, row) of a .jsonl, .json or .parquet file, or of a data set of the hub, owner/name or
    owner/name:config. Of .jsonl, .parquet and what is streamed, a few rows are in memory at a time.

    where: what errors (BadInput) begin with. columns: those to read; none: all. optional: more of them, where
    they exist. streaming: leave no copy of the data set on the disk. Blank lines of JSONL are left out and
    counted.
    """
    path, number = Path(name), 0
    try:
        if path.suffix.lower() == ".parquet":
            rows = _parquet_rows(path, columns, optional)
        elif path.suffix.lower() in (".json", ".jsonl"):
            rows = _json_rows(path)
        elif not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:.+)?", name) or path.is_file():
            raise ValueError("expected a .jsonl, .json or .parquet file, or a hub id, owner/name")
        else:
            import datasets  # slow to import, and only a hub id needs it

            repository, _, config = name.partition(":")
            data = datasets.load_dataset(repository, config or None, split=split, streaming=streaming)
            names = columns and data.column_names or ()
            if columns and set(columns) <= set(names):
                data = data.select_columns([*columns, *(name for name in optional if name in names)])
            rows = map(_without_nulls, data if streaming else data.to_list())
        for number, row in enumerate(rows, 1):
            if not isinstance(row, bytes):
                yield number, row
            elif not row.isspace():
                yield number, from_json(row)
    except Exception as error:  # the readers raise what they like: connection, permission, format
        row = f" at row {number}" if number else ""
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise BadInput(f"{where}: cannot be read{row} ({reason})") from error


def _json_rows(path):
    with path.open("rb") as file:
        start = file.read(2**16)
        check_utf8(start)
        file.seek(0)
        first = start.removeprefix(codecs.BOM_UTF8).lstrip().split(b"\n")[0].rstrip()
        is_json = path.suffix.lower() == ".json"
        if is_json and first == b"{":
            raise ValueError("expected a list of rows, or a row on each line, got an object of several lines")
        yield from from_json(file.read()) if is_json and first.startswith(b"[") else file


def from_json(text: str | bytes):
    """json.loads; ValueError where an object has a key twice."""
    return json.loads(text, object_pairs_hook=_with_keys_once)


def _with_keys_once(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice in {dict(pairs[:names.index(twice) + 1])!r:.100}")
    return found


def parsed(text: str):
    """The value that a text holds as JSON, or as Python prints it. ValueError: none"""
    try:
        return from_json(text)
    except (json.JSONDecodeError, RecursionError) as error:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(first_line(error)) from error


def parsed_prompt(value):
    """Messages, where a prompt is a text that holds them: as JSON, or as pandas writes lists into CSV files.
    Else what is given. ValueError: it begins as messages do, but cannot be read"""
    if not isinstance(value, str) or not _SEEMS_MESSAGES.match(value):
        return value
    try:
        found = parsed(value)
    except ValueError as error:
        raise ValueError(f"expected a text, or messages as JSON ({error})") from error
    return found if isinstance(found, list) else [found]


_SEEMS_MESSAGES = re.compile(r"""\s*+\[?\s*+\{\s*(["'])(role|content)\1\s*:""")


def check_utf8(start: bytes) -> None:
    """ValueError where a text file begins as one in another encoding does."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:4]:
        raise ValueError("expected UTF-8, got UTF-16 or UTF-32")


def read_text(path: str | Path, newline: str | None = None) -> str:
    """A text file that a person made, without its byte order mark. ValueError: it is not UTF-8"""
    with open(path, "rb") as file:
        check_utf8(file.read(4))
    with open(path, encoding="utf-8-sig", newline=newline) as file:
        return file.read()


def _parquet_rows(path, columns, optional):
    import pyarrow.parquet  # with `datasets`

    file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, buffer_size=2**16,
                                       pre_buffer=False)
    number, names = 0, file.schema_arrow.names
    if missing := set(columns).difference(names):
        raise ValueError(f"no column {', '.join(missing)}; it has {', '.join(names)}")
    check_names_once([*file.schema_arrow])
    chosen = [*columns, *(name for name in optional if name in names)] if columns else None
    for table in file.iter_batches(batch_size=64, columns=chosen):
        yield from arrow_rows(table)
        number += table.num_rows
    if number != file.metadata.num_rows:  # a torn page header: its page was passed over
        raise OSError(f"it should have {file.metadata.num_rows} rows")


def check_names_once(fields: list, within: str = "") -> None:
    """ValueError where two columns, or two fields of a struct, have one name."""
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            raise ValueError(f"column {within}{field.name} stands twice")
        parts = [field.type.field(number) for number in range(field.type.num_fields)]
        check_names_once(parts, f"{within}{field.name}.")


def arrow_rows(table) -> typing.Iterator[dict]:
    """The rows of a table or batch of Arrow's."""
    special = {field.name: field.type for field in table.schema if _SPECIAL.search(str(field.type))}
    for row in table.to_pylist():
        row |= {name: from_arrow(row[name], kind) for name, kind in special.items()}
        yield _without_nulls(row)


_SPECIAL = re.compile(r"arrow\.json|\b(half)?float\b")


def from_arrow(value, kind):
    """A value of an Arrow type as Python's. Where types are mixed, datasets keeps each as JSON; and 0.1 in 32
    bits is 0.1, not 0.10000000149011612."""
    name = str(kind)
    if value is None or not _SPECIAL.search(name) or name.startswith("map"):
        return value
    if isinstance(value, dict):
        return {name: from_arrow(item, kind.field(name).type) for name, item in value.items()}
    if isinstance(value, list):
        return [from_arrow(item, kind.value_type) for item in value]
    if name in ("float", "halffloat"):
        import numpy as np

        return float(str(np.float32(value) if name == "float" else np.float16(value)))
    return json.loads(value)


def _without_nulls(row: dict) -> dict:
    """A row keeps its columns."""
    return {name: without_nulls(value) for name, value in row.items()}


def without_nulls(value):
    """Arrow gives every struct the keys of all others in its column, as null: without them, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def is_number(value) -> bool:
    """Python's, NumPy's or PyTorch's, within what a float can hold (10**400 is not)."""
    if not hasattr(value, "__float__") or isinstance(value, str) or getattr(value, "ndim", 0):
        return False
    try:
        float(value)
    except Exception:  # OverflowError; others' numbers raise what they like
        return False
    return True


def shown(value) -> str:
    """What a value looks like, for the one line of a BadInput."""
    try:
        return f"{value!r:.80}"
    except Exception:  # 10**5000, and whatever has a __repr__ of its own
        return f"{type(value).__name__} that cannot be printed"


def means(infos: list[dict]) -> dict:
    """The mean of each part of Steps' info that is a number; one that lacks it counts as 0.

    Of infinities it is infinite, or NaN, and nothing is warned of: an environment may tell what it likes.
    """
    numbers = [{name: float(value) for name, value in info.items() if is_number(value)} for info in infos]
    parts = sorted(set().union(*numbers), key=str)
    return {part: sum(found.get(part, 0.0) for found in numbers) / len(numbers) for part in parts}


def to_json(value) -> bytes:
    """Of what environments tell: null for NaN and infinity, and for what JSON has no form for its text."""
    text = json.dumps(value, default=lambda value: float(value) if is_number(value) else str(value),
                      skipkeys=True)
    return json.dumps(json.loads(text, parse_constant=lambda name: None)).encode()


def hint(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _convert(value, hint, where: str):
    """`value`, or the text of one, as the type `hint`: int, float, bool, str, a Literal of strings, or any
    that Pydantic knows, as JSON."""
    if typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint):
            return value
        known = ", ".join(map(str, typing.get_args(hint)))
        raise BadInput(f"{where}: expected one of {known}, got {value!r}")
    if hint is bool and isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    if hint in (int, float) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = hint(value)
            if not isinstance(value, float) or number == value:
                return number
        except (ValueError, OverflowError):
            pass
    elif hint in (bool, str) and isinstance(value, hint):
        return value
    elif hint not in (int, float, bool, str):
        return _convert_json(value, hint, where)
    raise BadInput(f"{where}: expected {getattr(hint, '__name__', hint)}, got {value!r}")


def _convert_json(value, hint, where: str):
    import pydantic  # here: sandboxes import this module where there is nothing but Python

    kind = pydantic.TypeAdapter(hint)
    for read in (json.loads, lambda value: value, str):
        try:
            return kind.validate_python(read(value))
        except (TypeError, ValueError):  # pydantic's is one
            pass
    raise BadInput(f"{where}: expected {str(hint).replace('typing.', '')}, as JSON, got {value!r}")
