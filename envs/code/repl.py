"""Fix a bug in a repository through a Python REPL in a sandbox: several turns, one block of code each.

    env = envs.make("repl")                          # small repositories that come with it, real bugs
    task = env.task("train", 0)                      # the bug report, and what can be called
    episode = env.start(task, seed=1)
    step = episode.step("```python\nprint(read('ledger/money.py'))\n```")
    step.messages[-1]["content"]                     # what the block printed

The code of each reply runs in one interpreter of the sandbox (sandbox.py), where `ls`, `read`, `grep`,
`apply_patch`, `bash`, `run_tests`, `llm_query` and `finish` can be called. At the end the tests as they were
(not as the model left them) run on the files as the model left them, in a sandbox of their own. With
tools=true the code comes in calls of a function `run_python`, of which a reply may have several, and `finish`
is a function, too. A sub-agent works in the same way.
docs/repl.md has the formats of scenarios, the prompts and what is scored.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import re
import selectors
import shlex
import textwrap
import threading
import time
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
    as_bad_input,
    final_part,
    first_line,
    from_json,
    hold_out,
    read_rows,
    read_text,
)
from envs.code import sandbox, testing, trees
from envs.code.executor import HttpExecutor, check_trust, marks, warning
from envs.code.swe import apply
from envs.code.testing import LAUNCHER, decides, run_tests, shadows

WORKER = Path(__file__).with_name("repl_worker.py").read_text(encoding="utf-8")
BUNDLED = Path(__file__).with_name("repl_scenarios")
TEST_SHARE = 5  # one scenario in so many belongs to the test split
# What the worker in the sandbox may say, which is not to be trusted; more ends the episode.
MOST_FILES = 20_000  # of a tree
MOST_BYTES = 32 * sandbox.MIB  # in them
MOST_TEXT = 20_000  # characters of a question, or of a sub-agent's answer
MOST_NOTE = 200  # characters of what is said about a block
MOST_CALLS = 16  # of a reply that are answered
GRACE = 10.0  # for its messages, beyond the time of a block [s]
TREE_TIME = 20.0  # to hand over the files at the end [s]
NOTHING = dict(correct=0.0, partial=0.0, modified=0.0, suspicious=0.0, guessable=0.0)
OUTCOMES = ("PASSED", "FAILED", "ERROR")
# It ends with a fence at the beginning or the end of a line: within one it is the code's.
BLOCK = re.compile(r"```(?:python|repl|py)[ \t]*\r?\n(.*?)(?:\n[ \t]*```|```[ \t]*(?=\r?\n|\Z)|\Z)",
                   re.DOTALL)

HELPERS = """
    ls(path)                 the entries of a folder
    read(path, start, end)   a file's text, or some of its lines
    grep(pattern, path)      lines that a regular expression matches
    apply_patch(diff)        apply a unified diff; or apply_patch(path, old, new): a text that occurs once
    bash(command)            run a shell command (no network)
    run_tests(paths...)      run the tests"""
TOOLS = f"""Every reply holds one block of Python code, fenced by ```python and ```. It runs in an interpreter
that keeps its variables, in the repository's folder; the next message shows what it printed. Call there:\
{HELPERS}
    finish()                 the bug is fixed: the last call"""
QUERIES = """
    llm_query(prompt), llm_query_batched(prompts)   ask sub-agents, which can read the repository too"""
RESTORED = "Tests are restored before the result is judged, so changing them is of no use."
PROMPTS = {
    "default": f"""You fix bugs in a Python repository.

{{tools}}\
Find the cause, change the source files and run the tests. {RESTORED} You have {{turns}} replies.""",
    "minimal": "Fix the bug described below.\n\n{tools}{turns} replies.",
    "cot": f"""You fix bugs in a Python repository.

{{tools}}\
Before each {{block}}, think aloud: what do you know, what could be the cause, which one look or test would \
tell?
Reproduce the bug before you change anything, change as little as possible, and run the tests before you call
finish(). {RESTORED} You have {{turns}} replies.""",
}
SUB_AGENT = """You help an engineer who works on a Python repository. Answer the question below as briefly
as it allows.{tools}"""
SUB_TOOLS = """

A reply may hold one block of Python code, fenced by ```python and ```, which runs in a copy of the
repository: ls, read, grep, bash and run_tests can be called there. A reply without a block is your
answer, and so is finish(answer). You have {turns} replies."""
SUB_CALLS = """

You may run code in a copy of the repository before. A reply without a call is your answer, and so is what you
give to finish. You have {turns} replies."""
NUDGES = (
    "No code block was found. Put Python code between ```python and ```.",
    """There is still no code block. Only code between ```python and ``` is run, and nothing is judged but the
files. If the bug is fixed, reply with:
```python
finish()
```""")
CALL_NUDGES = (
    "No call was found. Call run_python, or finish if the bug is fixed.",
    """There is still no call. Only the code that is given to run_python is run, and nothing is judged but the
files. If the bug is fixed, call finish.""")


@dataclasses.dataclass(frozen=True)
class Config:
    scenarios: Literal["bundled", "tiny"] = "bundled"
    """small repositories with real bugs, or functions of one line for small models"""
    cache_dir: str = ""
    """folder with index.json and a repository for each instance, in place of those"""
    dataset: str = ""
    """rows that describe them: a .jsonl or .parquet file, or a hub data set such as R2E-Gym/R2E-Gym-Lite"""
    dataset_split: str = "train"
    """split of a hub data set"""
    instance_ids: str = ""
    """only these instances, with commas"""
    first: int = 0
    """only so many of the instances, the first ones: the size of the data set; 0: all"""
    train_tasks: int = 100_000
    """train tasks of tiny scenarios"""
    test_tasks: int = 256
    """their test tasks"""
    prompt: Literal["default", "minimal", "cot", "short"] = "default"
    """how the task is put; short is for tiny scenarios and word-level models, without fences"""
    system: str = ""
    """file with a system prompt in place of the one of `prompt`; {tools} and {turns} in it are filled in"""
    tools: bool = False
    """code and the end come in calls of functions, as the model's chat template has them, not in blocks"""
    max_turns: int = 15
    """replies of an episode, and of a sub-agent"""
    max_output_chars: int = 3000
    """of what a block printed, half from its end [characters]"""
    max_sub_agent_depth: int = 2
    """sub-agents may ask sub-agents, so deep; the deepest answer without code. 0: there are none"""
    max_queries: int = 8
    """questions to sub-agents of one block of code"""
    max_sub_agents: int = 64
    """sub-agents of an episode, with those of its sub-agents"""
    reward_mode: Literal["correct", "partial"] = "correct"
    """1 if every test ends as expected, or the share of those that do, beyond what changing nothing gives"""
    turn_timeout: float = 60.0
    """longest run of a block, or of all calls of a reply [s]"""
    guessable: bool = False
    """train on instances, too, whose tests code that computes nothing passes oftener than once in 1,000; such
    are all without held-out tests"""
    test_timeout: float = 120.0
    """longest run of the tests [s]"""
    memory: int = 1024
    """address space of a process in the sandbox [MiB]"""
    processes: int = 64
    """processes and threads in it"""
    executor_url: str = ""
    """service that runs the final tests in the instance's container image, in place of the sandbox"""
    trust_executor: bool = False
    """train on its rewards, which the code that is tested can forge"""

    def __post_init__(self):
        check = functools.partial(envs.check_option, "repl", self)
        for name in ("max_turns", "max_output_chars", "max_queries", "max_sub_agents", "train_tasks",
                     "test_tasks", "memory", "processes"):
            check(getattr(self, name) >= 1, name, "1 or more")
        for name in ("turn_timeout", "test_timeout"):
            check(0 < getattr(self, name) < 1e6, name, "seconds above 0")
        check(0 <= self.max_sub_agent_depth <= 8, "max_sub_agent_depth", "0 to 8")
        tiny = self.scenarios == "tiny" and not self.cache_dir
        check(self.first >= 0, "first", "0 or more")
        check(not (self.first and tiny), "first", "0 with scenarios=tiny, whose size is train_tasks")
        check(not (self.system and self.prompt == "short"), "system", "no file with prompt=short")
        if (self.prompt == "short") != (self.scenarios == "tiny" and not self.cache_dir):
            raise BadInput(f"environment repl: option prompt: {self.prompt} with scenarios={self.scenarios}; "
                           "short and tiny go together, and without cache_dir")
        check(not self.tools or self.prompt != "short", "tools", "false with prompt=short")
        if self.dataset and not self.cache_dir:
            raise BadInput("environment repl: option dataset: needs cache_dir, where its repositories lie")
        if self.executor_url and not self.cache_dir:
            raise BadInput("environment repl: option executor_url: needs cache_dir, with a docker_image in "
                           "each row; the instances that come with this have none")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A repository with a bug, and what its tests say once it is fixed."""

    instance_id: str
    files: dict[str, bytes]
    problem_statement: str
    expected: dict[str, str]  # test -> PASSED | FAILED | ERROR
    test_command: str = "python -m pytest -q"
    tests: tuple[str, ...] = ("tests",)  # files and folders that are restored before the tests run
    patch: str = ""  # a fix, as a unified diff
    docker_image: str = ""
    plain: bool = False  # tests are plain functions, run without pytest
    held_out: str = ""  # a module of tests that nobody sees, and which alone judges; else those of `expected`
    fail_to_pass: tuple[str, ...] = ()  # tests of it that fail until the bug is fixed; none: not known yet

    @property
    def held_out_path(self) -> str:
        folder = next((place for place in self.tests if not place.endswith(".py")), "")
        return f"{folder}/test_held_out.py".lstrip("/")

    @functools.cached_property
    def judged(self) -> dict[str, str]:
        """What has to come of the tests that decide."""
        if not self.held_out:
            return self.expected
        return {f"{self.held_out_path}::{name}": "PASSED" for name in test_names(self.held_out)}

    @functools.cached_property
    def solved(self) -> dict[str, bytes] | None:
        """The files with the fix, where it is needed to see what the tests compare; None: it is not known."""
        if self.held_out or not self.patch:
            return None
        changed = apply(self.files, self.patch)
        return changed and {path: text for path, text in (self.files | changed).items() if text is not None}

    def is_test(self, path: str) -> bool:
        """Whether it is taken from here, not from what the model left: tests and what configures them."""
        return decides(path) or any(path == place or path.startswith(f"{place}/") for place in self.tests)


class Repl(Env):
    Config = Config
    multi_turn = True
    blocking = True

    def __init__(self, config):
        super().__init__(config)
        sandbox.check()
        self._guesses = {}  # instance_id -> how often its tests are passed by guessing
        self._matched = {}  # instance_id -> how many tests end as expected where nothing was changed
        self.executor = HttpExecutor(config.executor_url) if config.executor_url else None
        if self.executor:
            self.executor.check()
        if config.system:
            with as_bad_input(f"environment repl: option system={config.system}: expected a file of text"):
                self.identity = read_text(config.system)
        if config.scenarios == "tiny" and not config.cache_dir:
            self._ids = None
            return
        self._rows = load_rows(Path(config.cache_dir or BUNDLED), config)
        if config.instance_ids:
            wanted = [name.strip() for name in config.instance_ids.split(",")]
            if unknown := [name for name in wanted if name not in self._rows]:
                raise BadInput(f"environment repl: option instance_ids: unknown {unknown[0]!r}; known: "
                               f"{', '.join(list(self._rows)[:10])}")
            self._rows = {name: self._rows[name] for name in wanted}
        if config.first:
            self._rows = dict(itertools.islice(self._rows.items(), config.first))
        self._ids = hold_out(list(self._rows), lambda name: split_of(name) == "test",
                             "environment repl: instance")
        self._load = functools.lru_cache(32)(lambda name: load_scenario(self._rows[name]))

    @property
    def about(self) -> str:
        """What cannot be told from right code, and which instances are left out."""
        lines = [warning("repl", self.config), testing.about_guessed("repl", self.guessed)]
        return "\n".join(line for line in lines if line)

    @functools.cached_property
    def guessed(self) -> list[str]:
        """The instances that are not trained on."""
        if self.config.guessable or self._ids is None or self.executor:
            return []
        return [name for name in self._ids["train"] if not held_out_of(self._rows[name]["folder"])
                or self.guess(self._load(name)) > testing.MOST_GUESSED]

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """{split: its instances}"""
        left_out = {*self.guessed}
        return dict(self._ids, train=[name for name in self._ids["train"] if name not in left_out])

    @property
    def vocabulary(self) -> list[str] | None:
        """Words for a word-level tokenizer (None unless prompt is short)."""
        if self.config.prompt != "short":
            return None
        words = "f a b ( ) , + - * // % max min ' 'm.py' is should be : def return and read apply_patch"
        return [*map(str, range(-8, 82)), *words.split(), *"finish run_tests passed True error".split()]

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        if self._ids is None:
            return {"train": self.config.train_tasks, "test": self.config.test_tasks}[split]
        if split == "train" and self.guessed and not self.names["train"]:
            raise BadInput(f"{testing.about_guessed('repl', self.guessed)}; none is left")
        if split == "test" and not self._ids[split]:
            raise BadInput("environment repl: the one instance is for training, which leaves none to be held "
                           "out; expected at least two")
        return len(self.names[split])

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        check_trust("repl", self.config, split)
        if self._ids is None:
            name, seed = f"repl-tiny-{split}-{index}", tiny_parts(split, index)
            scenario = tiny_scenario(seed)
            messages = [{"role": "user", "content": scenario.problem_statement}]
            return Task(name, "repl/tiny", messages, dict(tiny=list(seed)))
        row = self._rows[self.names[split][index]]
        queries = QUERIES if self.config.max_sub_agent_depth else ""
        if self.config.tools:  # the chat template shows them
            text, block, tools = "", "call", functions_of_fixing(queries)
        else:
            text, block, tools = f"{TOOLS}{queries}\n\n", "block", None
        system = PROMPTS[self.config.prompt].format(tools=text, block=block, turns=self.config.max_turns)
        if self.config.system:  # other braces in it stay
            system = self.identity.replace("{tools}", text).replace("{turns}", str(self.config.max_turns))
        messages = [{"role": "system", "content": system}, user(row["problem_statement"])]
        data = dict(instance_id=row["instance_id"])
        return Task(f"repl-{row['instance_id']}", "repl", messages, data, tools)

    def scenario(self, task: Task) -> Scenario:
        """The repository and the tests of a task."""
        if "tiny" in task.data:
            return tiny_scenario(tuple(task.data["tiny"]))
        return self._load(task.data["instance_id"])

    def start(self, task: Task, seed: int) -> ReplEpisode:
        return ReplEpisode(self, task, self.scenario(task), self.scenario(task).files, depth=0)

    def solution(self, task: Task) -> str | None:
        """A block that makes the fix and finishes (None: the fix is not known, or tools are called)."""
        if "tiny" in task.data:
            return tiny_fix(tuple(task.data["tiny"]))
        patch = self.scenario(task).patch
        return f"```python\n{patching(patch)}\nfinish()\n```" if patch and task.tools is None else None

    def demonstration(self, task: Task) -> list[Message] | None:
        """Read the file, then fix it; the answer in between is what the sandbox would print."""
        if task.tools is not None:
            return self._demonstration_of_calls(task)
        if "tiny" not in task.data:
            return super().demonstration(task)
        return [*task.messages, {"role": "assistant", "content": "read ( 'm.py' )"},
                {"role": "user", "content": self.scenario(task).files["m.py"].decode().strip()},
                {"role": "assistant", "content": self.solution(task)}]

    def _demonstration_of_calls(self, task: Task) -> list[Message] | None:
        """Read what the fix changes, apply it, finish: as much of it as max_turns and the output allow."""
        scenario = self.scenario(task)
        if not scenario.patch:
            return None
        messages = [call_message("run_python", code=patching(scenario.patch))]
        if self.config.max_turns == 1:  # after which the files are judged
            return [*task.messages, *messages]
        messages += [answer_to("run_python", "True"), call_message("finish")]
        paths = re.findall(r"^--- a/(.+?)[\t\n]", scenario.patch, re.MULTILINE)
        shown = ""
        for path in paths:  # with the ends of lines that the sandbox's read() gives
            file = io.TextIOWrapper(io.BytesIO(scenario.files.get(path, b"")), "utf-8", errors="replace")
            shown += file.read() + "\n"
        fits = self.config.max_turns >= 3 and len(shown) <= self.config.max_output_chars
        if fits and (shown := shown.strip("\n")):  # a fix may be of new files alone
            code = "\n".join(f"print(read({path!r}))" for path in paths)
            messages = [call_message("run_python", code=code), answer_to("run_python", shown), *messages]
        return [*task.messages, *messages]

    def score(self, scenario: Scenario, files: dict[str, bytes]) -> dict[str, float]:
        """Named parts for the files that an episode left. Raises SandboxError where nothing could be run."""
        original = {path: text for path, text in scenario.files.items() if not scenario.is_test(path)}
        left = {path: text for path, text in files.items() if not scenario.is_test(path)
                and (path in scenario.files or not shadows(path))}
        if left == original:
            return NOTHING | dict(guessable=self.guess(scenario))
        results, forged = self._results(scenario, left)
        matched, number = matching(results, scenario.judged), len(scenario.judged)
        partial = len(matched) / number
        if 0 < partial < 1:  # beyond what changing nothing would give
            untouched = self._untouched(scenario, original)
            partial = max(0, len(matched) - untouched) / max(1, number - untouched)
        return dict(correct=float(len(matched) == number), partial=partial, modified=1.0,
                    suspicious=float(forged), guessable=self.guess(scenario))

    def guess(self, scenario: Scenario) -> float:
        """How often code that computes nothing passes the tests, at most."""
        if not scenario.held_out or self.executor:  # what the tests expect can be read
            return 1.0
        if scenario.instance_id not in self._guesses:
            failing = scenario.fail_to_pass
            if not failing:
                original = {path: text for path, text in scenario.files.items() if not scenario.is_test(path)}
                results, _ = self._results(scenario, original)
                failing = [name for name in scenario.judged if results.get(name) != "PASSED"]
            names = [f"{scenario.held_out_path}::{name.rpartition('::')[2]}" for name in failing]
            shown = [text.decode(errors="replace") for text in scenario.files.values()]
            self._guesses[scenario.instance_id] = testing.guess(
                {scenario.held_out_path: scenario.held_out.encode()}, names,
                "\n".join([scenario.problem_statement, *shown]))
        return self._guesses[scenario.instance_id]

    def _untouched(self, scenario: Scenario, original: dict[str, bytes]) -> int:
        """How many tests end as expected where nothing was changed."""
        name = scenario.instance_id
        if name not in self._matched:
            self._matched[name] = len(matching(self._results(scenario, original)[0], scenario.judged))
        return self._matched[name]

    def _results(self, scenario: Scenario, left: dict[str, bytes]) -> tuple[dict[str, str], bool]:
        """{test: outcome} of the tests that judge a tree, and whether they were forged."""
        tests = {path: text for path, text in scenario.files.items() if scenario.is_test(path)}
        if scenario.held_out:
            tests[scenario.held_out_path] = scenario.held_out.encode()
        if self.executor:
            return self._remote_results(scenario, left, tests), False
        names = sorted(scenario.judged) if all("::" in name for name in scenario.judged) else None
        results = run_tests(left, tests, names, plain=scenario.plain, timeout=self.config.test_timeout,
                            memory=self.config.memory, hide=bool(scenario.held_out or scenario.solved),
                            solved=scenario.solved)
        forged = results.forged or results.skipped
        return {short_name(name): outcome for name, outcome in results.items()} | results, forged

    def _remote_results(self, scenario, left, tests):
        """What a container of the instance says, with changed files and the original tests laid over it."""
        original = {path: text for path, text in scenario.files.items() if not scenario.is_test(path)}
        changed = {path: text for path, text in left.items() if original.get(path) != text}
        fitting = trees.laid_over(changed, scenario.files)  # where a file was, the image can hold no folder
        changed = {path: text for path, text in changed.items() if path in fitting}
        removed = " ".join(f"'{path}'" for path in original.keys() - left.keys() if "'" not in path)
        command = launched(scenario.test_command)
        if "pytest" in command and " -rA" not in command:
            command += " -rA"  # say what comes of each test
        if scenario.held_out:
            command += f" {shlex.quote(scenario.held_out_path)}"
        command = f"rm -f -- {removed}; {command}" if removed else command
        result = self.executor.test(scenario.docker_image, trees.laid_over(changed, tests), command,
                                    self.config.test_timeout)
        return outcomes_in(result.output)


def matching(results: dict[str, str], expected: dict[str, str]) -> set[str]:
    return {name for name, outcome in expected.items() if results.get(name) == outcome}


def launched(command: str) -> str:
    """A test command whose pytest is imported before anything in the folder can be."""
    found = re.search(r"\b(python[0-9.]*) -m pytest\b", command)
    if not found or command[:found.start()].count("'") % 2:  # within quotes
        return command
    return f"{command[:found.start()]}{found[1]} -c {shlex.quote(LAUNCHER)}{command[found.end():]}"


class Budget:
    """The sub-agents that are left to an episode and its sub-agents, which take from it at the same time."""

    def __init__(self, left: int):
        self.left, self.lock = left, threading.Lock()

    def take(self, number: int) -> bool:
        with self.lock:
            enough = number <= self.left
            self.left -= number if enough else 0
        return enough


class ReplEpisode(Episode):
    """A conversation with an interpreter in a sandbox. Depth 0 fixes the bug; below it answer questions."""

    def __init__(self, env: Repl, task: Task, scenario: Scenario, files: dict[str, bytes], depth: int,
                 budget: Budget | None = None):
        self.env, self.task, self.scenario, self.files, self.depth = env, task, scenario, files, depth
        self.config = env.config
        self.budget = budget or Budget(self.config.max_sub_agents)
        self.deadline, self.heard = 0.0, bytearray()  # of this step; what the worker said and nobody read
        self.turns = self.without_block = self.queries = self.asked = 0
        self.box, self.answer, self.closed, self.children = None, None, False, []
        self.calls = []  # of this reply, those that are still to be done
        self.answers = []  # to those that are done
        self.left = 0.0  # time for the others [s]
        self.lock = threading.Lock()  # of box and closed: close() may come from another thread

    def step(self, reply: str, calls: list[dict] | None = None) -> Step:
        self.turns += 1
        if self.task.tools is not None:
            return self._step_of_calls(reply, calls or [])
        code = reply if self.config.prompt == "short" and not self.depth else find_block(reply)
        if code is None or self.depth and self.depth >= self.config.max_sub_agent_depth:
            if self.depth:  # a sub-agent's answer
                self.answer = final_part(reply)
                return self._end()
            self.without_block += 1
            return self._go_on([user(NUDGES[self.without_block > 2])])
        return self._run(code, self.config.turn_timeout)

    def _step_of_calls(self, reply: str, calls: list) -> Step:
        if not calls and self.depth:  # a sub-agent's answer
            self.answer = final_part(reply)
            return self._end()
        self.calls = [checked(call, self.task.tools) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            name, _, _ = checked(calls[MOST_CALLS], self.task.tools)
            self.calls.append((name, {}, f"a reply may have {MOST_CALLS} calls, got {len(calls)}"))
        if not calls or any(wrong for _, _, wrong in self.calls):
            self.without_block += 1
        if not calls:
            return self._go_on([user(CALL_NUDGES[self.without_block > 2])])
        self.answers, self.left = [], self.config.turn_timeout
        return self._do_calls()

    def _do_calls(self) -> Step:
        """Do the calls that are left, up to one that runs code: when it is done, it comes here again."""
        while self.calls:
            name, arguments, wrong = self.calls.pop(0)
            if wrong:
                self.answers.append(answer_to(name, f"Not called: {wrong}."))
            elif name == "finish":
                self.answer = cleaned(arguments.get("answer", ""), MOST_TEXT)
                return self._end()
            elif self.left > 0:
                return self._run(arguments["code"], self.left)
            else:
                limit = f"the calls of a reply have {self.config.turn_timeout:g} s in all"
                self.answers.append(answer_to(name, f"Not called: {limit}."))
        return self._go_on(self.answers)

    def _run(self, code: str, timeout: float) -> Step:
        self.asked = 0
        try:
            if self.box is None:
                self._open()
            self.deadline = time.monotonic() + timeout + GRACE
            self._send(dict(op="run", code=code[:100_000], timeout=timeout))
        except WorkerGone:
            return self._gone()
        return self._continue()

    def resume(self, replies: list[str]) -> Step:
        texts = [reply if child.answer is None else child.answer
                 for child, reply in zip(self.children, replies, strict=True)]
        self.children = []
        self.deadline += time.monotonic() - self.paused  # the sub-agents' time is not this block's
        try:
            self._send(dict(op="answer", texts=[sandbox.clip(text, MOST_TEXT) for text in texts]))
        except WorkerGone:
            return self._gone()
        return self._continue()

    def end(self, reason: str) -> Step:
        """The conversation is cut off: what it is worth so far."""
        return self._end(truncated=True)

    def close(self) -> None:
        with self.lock:
            self.closed, box = True, self.box
        if box is not None:
            box.close()

    def _continue(self) -> Step:
        """Wait until the block is done, or asks something."""
        try:
            while (message := self._receive())["op"] == "query":
                prompts = [cleaned(prompt, MOST_TEXT) for prompt in message["prompts"]]
                if not prompts or self.depth >= self.config.max_sub_agent_depth:
                    raise WorkerGone  # it does not ask so itself
                if self.asked + len(prompts) > self.config.max_queries:
                    limit = f"{self.config.max_queries} questions to sub-agents in one block"
                elif not self.budget.take(len(prompts)):
                    limit = f"{self.config.max_sub_agents} sub-agents in an episode"
                else:
                    self.asked += len(prompts)
                    return self._ask(prompts)
                self._send(dict(op="answer", error=f"no more than {limit}"))
            output = cleaned(message["output"], self.config.max_output_chars + 100).strip("\n")
            note, finished = cleaned(message["note"], MOST_NOTE), message.get("finished") is True
            answer = cleaned(message["answer"], MOST_TEXT) if finished else None
        except (WorkerGone, KeyError, TypeError):
            return self._gone()
        if finished:
            self.answer = answer
            return self._end()
        if self.config.prompt == "short":
            return self._go_on([user("error" if note or "Traceback" in output else output)])
        parts = [part for part in (output, note and f"({note})") if part]
        text = "\n".join(parts) or "(no output)"
        if self.task.tools is None:
            return self._go_on([user(text)])
        self.answers.append(answer_to("run_python", text))
        self.left = round(self.deadline - GRACE - time.monotonic(), 1)
        return self._do_calls()

    def _ask(self, prompts) -> Step:
        self.queries += len(prompts)
        self.children = [None] * len(prompts)
        files, depth = None, self.depth + 1
        pairs = []
        for number, prompt in enumerate(prompts):
            with_code = depth < self.config.max_sub_agent_depth
            text, tools = "", None
            if with_code:
                text = SUB_TOOLS if self.task.tools is None else SUB_CALLS
                tools = None if self.task.tools is None else functions_of_answering()
            system = SUB_AGENT.format(tools=text.format(turns=self.config.max_turns))
            messages = [{"role": "system", "content": system}, user(prompt)]
            task = Task(f"{self.task.id}/{self.turns}.{self.queries - len(prompts) + number}",
                        f"{self.task.source}/sub", messages, {}, tools)
            files = (self._tree() or self.files) if with_code and files is None else files
            child = ReplEpisode(self.env, task, self.scenario, files or {}, depth, self.budget)
            self.children[number] = child
            pairs.append((task, child))
        self.paused = time.monotonic()
        return Step([], 0.0, False, False, {}, children=tuple(pairs))

    def _go_on(self, messages: list[Message]) -> Step:
        if self.turns >= self.config.max_turns:
            return self._end(truncated=True)
        return Step(messages, 0.0, False, False, dict(correct=0.0))

    def _end(self, truncated=False) -> Step:
        if self.depth:
            return Step([], 0.0, not truncated, truncated, dict(correct=0.0))
        self.deadline = time.monotonic() + TREE_TIME
        files = self._tree() if self.box is not None else self.files
        parts = NOTHING if files is None else self.env.score(self.scenario, files)
        reward = parts["partial" if self.config.reward_mode == "partial" else "correct"]
        info = {**parts, "repl_turns": float(self.turns), "no_block": float(self.without_block),
                "sub_queries": float(self.queries), **marks(self.config)}
        return Step([], reward, not truncated, truncated, info)

    def _gone(self) -> Step:
        """The code has ended even the process that keeps its files: there is nothing to judge."""
        if self.closed:
            raise sandbox.SandboxError(f"task {self.task.id}: the episode was closed")
        return Step([], 0.0, False, True, NOTHING | marks(self.config) | dict(repl_turns=float(self.turns)))

    # The worker in the sandbox

    def _open(self) -> None:
        config, depth = self.config, self.depth
        options = dict(test_command=self.scenario.test_command, timeout=config.test_timeout,
                       output=config.max_output_chars, turn=config.turn_timeout,
                       queries=config.max_queries if depth < config.max_sub_agent_depth else 0)
        python = ["python3", "-I", *(["-S"] if self.scenario.plain else [])]
        limits = sandbox.Limits(memory=config.memory, processes=config.processes, cpu=10**6)
        argv = [*python, "-c", WORKER, json.dumps(options)]
        try:
            box = sandbox.Sandbox(argv, self.files, limits)
        except sandbox.SandboxError as error:
            if depth and sandbox.works():  # then it is the files, which a model's code has left
                raise WorkerGone from error
            raise
        with self.lock:
            if not self.closed:
                self.box = box
        if self.box is None:  # close() came before there was anything to close
            box.close()
            raise WorkerGone

    def _send(self, message: dict) -> None:
        """Hand the worker a line. WorkerGone where it does not take it: the code may have stopped it."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        pipe = self.box.process.stdin
        try:
            os.set_blocking(pipe.fileno(), False)
            while data:
                self._wait(pipe, selectors.EVENT_WRITE)
                data = data[pipe.write(data) or 0:]
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            raise WorkerGone from error

    def _wait(self, pipe, event: int) -> None:
        """Until the pipe is ready. WorkerGone when the step's time is over, or the episode closed."""
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, event)
            while not self.closed and time.monotonic() < self.deadline:  # it is not told that it was closed
                if ready.select(0.2):
                    return
        raise WorkerGone

    def _hear(self) -> None:
        """Add to `heard`. WorkerGone at its end."""
        pipe = self.box.process.stdout
        try:
            self._wait(pipe, selectors.EVENT_READ)
            data = pipe.read(2**16)
        except (OSError, ValueError) as error:
            raise WorkerGone from error
        if not data:
            raise WorkerGone
        self.heard += data

    def _receive(self) -> dict:
        """The worker's next line. WorkerGone for anything but an object of JSON that is not too long."""
        # At most twelve bytes for a character, and 300 for a file's name.
        most = 12 * (self.config.max_queries * MOST_TEXT + self.config.max_output_chars) + 300 * MOST_FILES
        while b"\n" not in self.heard:
            if len(self.heard) > most:
                raise WorkerGone
            self._hear()
        line, _, self.heard = self.heard.partition(b"\n")
        try:
            message = json.loads(line)
            message["op"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WorkerGone from error
        return message

    def _tree(self) -> dict[str, bytes] | None:
        """The files as the model's code left them (None: the worker does not say)."""
        try:
            self._send(dict(op="tree"))
            files = dict(self._receive()["files"])
            sizes = list(files.values())
            if not all(isinstance(size, int) and 0 <= size <= MOST_BYTES for size in sizes):
                return None
            if len(files) > MOST_FILES or sum(sizes) > MOST_BYTES:
                return None
            while len(self.heard) < sum(sizes):
                self._hear()
            ends = list(itertools.accumulate(sizes))
            parts = [bytes(self.heard[end - size:end]) for size, end in zip(sizes, ends, strict=True)]
            del self.heard[:sum(sizes)]
            return {str(trees.inside(path)): part for path, part in zip(files, parts, strict=True)}
        except (WorkerGone, KeyError, TypeError, ValueError):
            return None


class WorkerGone(Exception):
    """The process in the sandbox that talks to us has ended, or says what it should not."""


def cleaned(text, characters: int) -> str:
    """A text from outside, cut, without halves of surrogate pairs. TypeError for what is none."""
    if not isinstance(text, str):
        raise TypeError("expected a text")
    return text[:characters].encode(errors="replace").decode()


def find_block(reply: str) -> str | None:
    """The first block of Python code after the last </think>, without the indent that it has in a list."""
    match = BLOCK.search(final_part(reply))
    code = match and match[1]
    return textwrap.dedent(code) if code and code[0] in " \t" else code


def patching(patch: str) -> str:
    """Code that applies a unified diff."""
    quoted = patch.replace("\\", "\\\\").replace("\r", "\\r")
    quoted = re.sub('"{3,}', lambda run: '\\"' * len(run[0]), quoted)
    quoted = quoted.replace("```", r"\x60\x60\x60")  # three would end the block
    return f'apply_patch("""\n{quoted}""")'


def user(text: str) -> Message:
    return {"role": "user", "content": text}


# Functions that a model calls, with tools=true


def schema(name: str, description: str, **parameters: str) -> dict:
    """A function whose parameters, name=meaning, are texts, all of them needed. In OpenAI's form."""
    properties = {parameter: dict(type="string", description=meaning)
                  for parameter, meaning in parameters.items()}
    return dict(type="function", function=dict(
        name=name, description=description,
        parameters=dict(type="object", properties=properties, required=list(parameters))))


def functions_of_fixing(queries: str) -> list[dict]:
    run = f"""Run Python code in an interpreter that keeps its variables, in the repository's folder.
The answer is what it printed. The code can call:{HELPERS}{queries}"""
    return [schema("run_python", run, code="Python code"),
            schema("finish", "The bug is fixed: the last call.")]


def functions_of_answering() -> list[dict]:
    run = """Run Python code in an interpreter that keeps its variables, in a copy of the repository.
The answer is what it printed. The code can call ls, read, grep, bash and run_tests."""
    return [schema("run_python", run, code="Python code"),
            schema("finish", "Answer the question: the last call.", answer="The answer")]


def checked(call, tools: list[dict]) -> tuple[str, dict, str]:
    """Name and arguments of a call, whatever a model made of it, and what is wrong with it ('': nothing)."""
    functions = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in functions:
        known = " or ".join(f"{name}({', '.join(needed)})" for name, needed in functions.items())
        legible = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", name)
        name = name if legible else "unknown"  # it stands in the answer
        return name, {}, f"there is no function {name}; expected {known}"
    needed, given = functions[name], call.get("arguments")
    if not isinstance(given, dict) or given.keys() != {*needed}:
        return name, {}, f"expected as arguments of {name}: {', '.join(needed) or 'none'}"
    for parameter, value in given.items():
        if not isinstance(value, str):
            return name, {}, f"{parameter}: expected a text, got {type(value).__name__}"
        if len(value) > envs.MAX_REPLY:
            return name, {}, f"{parameter}: {len(value)} characters, expected at most {envs.MAX_REPLY}"
    return name, given, ""


def call_message(name: str, **arguments: str) -> Message:
    """An assistant's message of one call."""
    return {"role": "assistant", "content": "",
            "tool_calls": [dict(type="function", function=dict(name=name, arguments=arguments))]}


def answer_to(name: str, text: str) -> Message:
    return {"role": "tool", "name": name, "content": text}


def outcomes_in(text: str) -> dict[str, str]:
    """The outcomes in a log of `pytest -rA`, under the tests' names and their short forms (Class.test)."""
    results = {}
    line = r"^(PASSED|FAILED|ERROR) (\S[^[\n]*?(?:\[.*?\])?)(?: - .*)?$"  # " - " may stand in parameters
    for outcome, name in re.findall(line, text, re.MULTILINE):
        results[name] = results[short_name(name)] = outcome
    return results


def short_name(name: str) -> str:
    """tests/test_x.py::TestA::test_b -> TestA.test_b, as R2E-Gym writes it."""
    return ".".join(name.split("::")[1:])


def test_names(source: str) -> list[str]:
    """The functions test_* of a module."""
    return [node.name for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def split_of(instance_id: str) -> str:
    return "test" if zlib.crc32(instance_id.encode()) % TEST_SHARE == 0 else "train"


# Scenarios on disk


def load_rows(folder: Path, config: Config) -> dict[str, dict]:
    """index.json of a folder, instance_id -> row, with what a data set's rows add. Errors name the field."""
    index = folder / "index.json"
    added = {row["instance_id"]: row for row in data_rows(config)} if config.dataset else None
    try:
        if added is not None and not index.exists():  # the rows say all, so what is cached will do
            known = {name: {} for name in added if (folder / name).is_dir()}
        else:
            known = from_json(read_text(index))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{index}: expected a JSON object of instance_id -> row "
                       f"({first_line(error)})") from error
    if not isinstance(known, dict):
        raise BadInput(f"{index}: expected a JSON object of instance_id -> row, got {type(known).__name__}")
    rows = {}
    for name, row in known.items():
        if added is not None and name not in added:
            continue
        if not isinstance(row, dict):
            raise BadInput(f"{index}: {name}: expected a JSON object, got {type(row).__name__}")
        where = f"{index}: {name}" if added is None else f"{config.dataset}: {name}"
        rows[name] = check_row(dict(row) | (added or {}).get(name, {}) | dict(instance_id=name), where)
        if config.executor_url and not rows[name].get("docker_image"):
            raise BadInput(f"{where}: docker_image: expected the image in which executor_url runs the tests, "
                           "got none")
        rows[name]["folder"] = folder / name
        if not name or Path(name).name != name or not rows[name]["folder"].is_dir():
            raise BadInput(f"{index}: {name}: expected its repository in {folder / name}")
    if not rows:
        raise BadInput(f"{index}: no instance" + (f" that is also in {config.dataset}" if added else ""))
    return rows


def data_rows(config: Config):
    """Rows of a file or a hub data set in R2E-Gym's form, each with an instance_id."""
    name = config.dataset
    for number, row in read_rows(name, f"environment repl: option dataset={name}", config.dataset_split):
        row = row if isinstance(row, dict) else {}
        if not isinstance(row.get("instance_id") or None, str):
            parts = row.get("repo_name"), row.get("commit_hash")
            if not all(isinstance(part, str) and part for part in parts):
                raise BadInput(f"{name}: row {number}: expected instance_id, or repo_name and commit_hash")
            row["instance_id"] = f"{parts[0]}__{parts[1][:12]}"
        yield {key: row[key] for key in ("instance_id", *FIELDS) if row.get(key) is not None}


FIELDS = ("problem_statement", "expected_output_json", "test_command", "tests", "patch", "docker_image",
          "plain", "fail_to_pass")


def check_row(row: dict, where: str) -> dict:
    """A row with the types that it should have; BadInput names the field that has not."""
    if not isinstance(row.get("problem_statement"), str) or not row["problem_statement"].strip():
        raise BadInput(f"{where}: problem_statement: expected a text, got {row.get('problem_statement')!r}")
    expected = row.get("expected_output_json")
    try:
        expected = json.loads(expected) if isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        pass
    if (not isinstance(expected, dict) or not expected
            or not all(outcome in OUTCOMES for outcome in expected.values())):
        raise BadInput(f"{where}: expected_output_json: expected a JSON object of test -> "
                       f"{' | '.join(OUTCOMES)}, got {str(row.get('expected_output_json'))[:80]!r}")
    for key, kind in dict(test_command=str, patch=str, docker_image=str, tests=list, plain=bool,
                          fail_to_pass=list).items():
        if not isinstance(row.get(key, kind()), kind):
            raise BadInput(f"{where}: {key}: expected {kind.__name__}, got {row[key]!r}")
    return row | dict(expected=expected)


def load_scenario(row: dict) -> Scenario:
    files = trees.read(row["folder"])
    tests = row.get("tests") or [name for name in ("tests", "test", "r2e_tests")
                                 if (row["folder"] / name).is_dir()]
    if not any(path == place or path.startswith(f"{place}/") for path in files for place in tests):
        raise BadInput(f"{row['folder']}: no tests: expected a folder tests, or the row's field tests")
    return Scenario(row["instance_id"], files, row["problem_statement"], row["expected"],
                    row.get("test_command", Scenario.test_command), tuple(tests), row.get("patch", ""),
                    row.get("docker_image", ""), row.get("plain", False), held_out_of(row["folder"]),
                    tuple(row.get("fail_to_pass", ())))


def held_out_of(folder: Path) -> str:
    """The tests held_out/<instance_id>.py beside an instance's folder (none: '')."""
    path = folder.parent / "held_out" / f"{folder.name}.py"
    if not path.is_file():
        return ""
    try:
        source = read_text(path)
        names = test_names(source)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadInput(f"{path}: expected a module of tests ({first_line(error)})") from error
    if not names:
        raise BadInput(f"{path}: expected functions test_*, got none")
    return source


# Tiny scenarios: one function of one line, the wrong expression in it, and one call that shows it


EXPRESSIONS = ("a + b", "a - b", "b - a", "a * b", "a // b", "a % b", "max ( a , b )", "min ( a , b )")
VALUES = range(2, 10)
HELD_OUT_CALLS = ((47, 92), (713, 24), (66, 66), (38, 517), (984, 87))  # those that decide; also such
CALLS = ((2, 7), (9, 4), (5, 5), (8, 3), (3, 8))  # the tests': no two expressions agree on all of them


def value(expression: str, a: int, b: int) -> int:
    return eval(expression, {"a": a, "b": b, "max": max, "min": min})  # of EXPRESSIONS alone


def tiny_parts(split: str, index: int) -> tuple[int, int, int, int]:
    """(a, b, wrong expression, right one), of the split, such that the right one alone explains the call."""
    rng = random.Random(f"{split} {index}")
    while True:
        a, b = rng.choice(VALUES), rng.choice(VALUES)
        wrong, right = rng.sample(range(len(EXPRESSIONS)), 2)
        results = [value(expression, a, b) for expression in EXPRESSIONS]
        held_out = zlib.crc32(f"{a} {b} {wrong} {right}".encode()) % TEST_SHARE == 0
        if results.count(results[right]) == 1 and held_out == (split == "test"):
            return a, b, wrong, right


@functools.lru_cache(4096)
def tiny_scenario(parts: tuple[int, int, int, int]) -> Scenario:
    a, b, wrong, right = parts
    expression = EXPRESSIONS[right]
    def module(calls):
        return "from m import f\n" + "".join(
            f"\n\ndef test_{number}():\n    assert f({x}, {y}) == {value(expression, x, y)}\n"
            for number, (x, y) in enumerate(calls, 1))

    return Scenario(
        "-".join(map(str, parts)), {"m.py": f"def f ( a , b ) : return ( {EXPRESSIONS[wrong]} )\n".encode(),
                                    "tests/test_m.py": module(CALLS).encode()},
        f"f ( {a} , {b} ) is {value(EXPRESSIONS[wrong], a, b)} should be {value(expression, a, b)}",
        {f"tests/test_m.py::test_{number}": "PASSED" for number in range(1, len(CALLS) + 1)}, plain=True,
        test_command="""python3 -c 'import sys; sys.path.insert(0, str())
import tests.test_m as t
for name, test in list(vars(t).items()):
    if name.startswith("test_"): test()
print("passed")'""", held_out=module(HELD_OUT_CALLS),
        fail_to_pass=tuple(f"test_{number}" for number, (x, y) in enumerate(HELD_OUT_CALLS, 1)
                           if value(expression, x, y) != value(EXPRESSIONS[wrong], x, y)))


def tiny_fix(parts: tuple[int, int, int, int]) -> str:
    _, _, wrong, right = parts
    return f"apply_patch ( 'm.py' , ' {EXPRESSIONS[wrong]} ' , ' {EXPRESSIONS[right]} ' ) and finish ( )"
