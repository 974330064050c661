"""An agent that you have, as it is: a program that asks a chat endpoint and knows at its end how well it did.

    env = envs.make("agent", program="my_agent.py:run", data="tasks.jsonl")

For each episode run(task, base_url, api_key) is called, where task is a row of the data. It asks base_url,
where the policy answers, with any client of OpenAI's chat completions, and returns a reward, or a dict with
reward, correct and other numbers. What it asks first is the episode's prompt. A request whose messages go on
from what the model has seen extends these tokens. Any other (a rewritten history, another conversation) has
a conversation of its own, which is played as a sub-agent. docs/agent.md has examples, limits and faults.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import math
import os
import resource
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from typing import Literal

import envs
from envs import BadInput, Episode, Message, Step, Task, check_option, first_line, load_object, rows
from envs.adapters.endpoint import Refusal, Request, endpoint, fingerprint
from envs.calls import FORMS
from envs.chat import read_reply, without_marks

QUIET = 0.02  # so long no further request comes, before the new ones are played together [s]
LATE = 0.1  # so long a conversation may go on while others of its run wait for the policy [s]
MAX_WAITING = 64  # requests of an episode that wait at once
MAX_OUTPUT = 2**16  # of a command, from its end [bytes]
OVER = "the episode is over"
OPEN_FILES = 2**16
LIMITS = {"length": "--max-response-tokens", "context": "--max-context-tokens", "turns": "--max-turns"}
# Starts a command that ends with the trainer, however that ends.
STARTER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Config(rows.Config):
    program: str = ""
    """the agent: path/to/file.py:function, called as function(task, base_url, api_key); may be async"""
    command: str = ""
    """or a command: the task is on its standard input, OPENAI_BASE_URL and OPENAI_API_KEY are set, and the
    last line that it prints is the reward"""
    prompt: str = ""
    """column of a question, by which rows are told apart and held out; default: the whole row"""
    train: Literal["all", "first"] = "all"
    """conversations of an episode that are trained: all, with its reward, or the first alone"""
    max_requests: int = 200
    """requests of an episode, after which it is cut off"""
    patience: float = 600.0
    """longest wait for an agent's next request, or its end [s]"""
    solved_at: float = 1.0
    """reward from which a task is solved, where neither the agent nor a check says it"""


class Agent(rows.Rows):
    """Each episode is one run of the agent."""

    Config = Config
    source = "agent"
    scores_itself = True
    whole_rows = True
    multi_turn = True
    threads = 100_000  # a call waits for the agent, which may take long
    at_once = 256  # each has a thread and a connection, of which a client may have 1,000 at most

    def __init__(self, config: Config):
        check_option("agent", config, bool(config.program) != bool(config.command), "program",
                     "a function, path/to/file.py:name, or a command in its place")
        check_option("agent", config, config.max_requests > 0, "max_requests", "at least 1")
        check_option("agent", config, config.patience > 0, "patience", "more than 0")
        check_option("agent", config, not config.rewards, "rewards", "none, as the agent returns its reward")
        super().__init__(config)
        self.blocking = True
        if config.program:
            self.program = load_object(config.program, "environment agent: option program")
            if not callable(self.program):
                raise BadInput(f"environment agent: option program={config.program}: expected a function")
            file = config.program.rpartition(":")[0]
            self.identity = envs.read_text(file) if file.endswith(".py") else file
        else:
            self.at_once = 32  # processes
            with envs.as_bad_input(f"environment agent: option command={config.command}"):
                program, *_ = shlex.split(config.command)
                if not shutil.which(program):
                    raise ValueError(f"no program {program}")
        self.endpoint = endpoint()
        self.told = set()  # settings that are ignored, which a line has named
        prepare_process()

    def task(self, split: str, index: int) -> Task:
        """What its messages say is not the prompt, which an episode has once the agent has asked."""
        task = super().task(split, index)
        if self.config.prompt:
            return task
        return dataclasses.replace(task, messages=[{"role": "user", "content": task.data["question"][:200]}])

    def start(self, task: Task, seed: int) -> Episode:
        return Play(self, task)

    def solution(self, task: Task) -> str | None:
        return None

    def tell_ignored(self, names: list[str]) -> None:
        new = [name for name in names if name not in self.told]
        if new:
            self.told.update(new)
            warnings.warn(f"environment agent: ignored in the agent's requests: {', '.join(new)}; the policy "
                          "is sampled as it is trained (--temperature, --max-response-tokens)", stacklevel=2)

    def verdict(self, task: Task, returned, last_reply: str) -> Step:
        """What a run was worth. BadInput: the agent returned something else than was expected."""
        info = {}
        where = f"environment agent: row {task.id}"
        if self.config.command and not self.check:
            try:
                returned = json.loads(returned)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{where}: its last line: expected a number, or an object with reward, got "
                               f"{returned!r:.80}") from error
        if isinstance(returned, dict):
            info = {str(name): float(value) for name, value in returned.items() if envs.is_number(value)}
        if self.check:
            answer = returned.get("answer") if isinstance(returned, dict) else returned
            if not isinstance(answer, str | None):
                raise BadInput(f"{where}: expected the text to be judged, or None for the model's last reply"
                               f", got {envs.shown(returned)}")
            step = rows.Attempt(self, task).step(last_reply if answer is None else answer)
            return Step([], step.reward, True, False, info | step.info)
        reward = info.get("reward") if isinstance(returned, dict) else returned
        if not envs.is_number(reward) or not math.isfinite(reward):
            raise BadInput(f"{where}: expected a number, or a dict with reward, got {envs.shown(returned)}")
        info.pop("reward", None)
        info.setdefault("correct", float(reward >= self.config.solved_at))
        return Step([], float(reward), True, False, info)


def prepare_process() -> None:
    """Loopback needs no proxy, and of each connection of an agent's this process holds both ends."""
    for variable in ("no_proxy", "NO_PROXY"):
        known = os.environ.get(variable, "")
        if "127.0.0.1" not in known:
            os.environ[variable] = f"{known},127.0.0.1".lstrip(",")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end_of(file) -> str:
    """The last line that says something, of at most MAX_OUTPUT from the end of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT))
    lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def kill(group: int) -> None:
    """A process and those that it has started."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# An episode


class Conversation:
    """Messages of which each request of an agent's has had more. Guarded by its run's lock."""

    def __init__(self, request: Request):
        self.request = request  # that the model is to answer; None: the agent has its answer
        self.history, self.tools = request.history, request.tools
        self.live = True  # else what goes on from it is another conversation

    def answer(self, reply: str, calls: list[dict] | None, finish_reason: str = "") -> None:
        """Give the client a reply, the text that was sampled, with the calls that were found in it."""
        message = message_of(reply, calls or [], self.tools, len(self.history))
        said = {"role": "assistant", "content": message["content"] or ""}
        if calls:
            said["tool_calls"] = [{"function": call} for call in calls]
        self.history = [*self.request.history, fingerprint(said)]
        self.request.answer(message, finish_reason or ("tool_calls" if calls else "stop"))
        self.request = None

    def refuse(self, refusal: Refusal) -> None:
        if self.request:
            self.request.refuse(refusal)
        self.request = None
        self.live = False

    def is_extended_by(self, request: Request) -> bool:
        known = len(self.history)
        return (self.live and self.request is None and request.tools == self.tools
                and len(request.history) > known and request.history[:known] == self.history)

    def extend(self, request: Request) -> Step:
        new = request.messages[len(self.history):]
        self.request, self.history = request, request.history
        return Step(new, 0.0, False, False, {})


def message_of(reply: str, calls: list[dict], tools: list[dict] | None, number: int) -> Message:
    """A reply as OpenAI's servers write it: thoughts and calls have fields of their own."""
    for form in FORMS if calls else ():
        thought, text, found, _ = read_reply(reply, "", (form,), tools)
        if [(call["name"], call["arguments"]) for call in found] == [(call["name"], call["arguments"])
                                                                     for call in calls]:
            break
    else:
        thought, text, _, _ = read_reply(reply, "", (), tools)
    message = {"role": "assistant", "content": text.strip() if calls else text, "refusal": None}
    if thought:
        message["reasoning_content"] = without_marks(thought)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": f"call_{number}_{place}", "type": "function",
             "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for place, call in enumerate(calls)]
    return message


class Run:
    """One run of the agent, in a thread of its own: what it asks, and how it ends.

    The first request begins the root, the episode's conversation. While the agent waits for nothing that the
    root's next request could be, new conversations are played, all that are there at once; they are over when
    a request comes that goes on from none of them.
    """

    def __init__(self, env: Agent, task: Task):
        self.env, self.task = env, task
        self.changed = threading.Condition()
        self.waiting: list[Request] = []
        self.root: Conversation | None = None
        self.branches: list[Conversation] = []  # the live ones, while the root waits for them
        self.num_requests = self.num_branches = 0
        self.over = False  # the agent has ended, or is to end
        self.returned, self.failure = None, ""
        self.cut = ""  # why no further request is answered
        self.last_reply = ""
        self.cancel = lambda: None
        self.key = f"sk-{secrets.token_hex(16)}"
        env.endpoint.sessions[self.key] = self
        threading.Thread(target=self.work, daemon=True).start()

    # In the agent's thread

    def work(self) -> None:
        failure, returned = "", None
        try:
            row = copy.deepcopy(self.task.data["row"])
            if self.env.config.command:
                returned = self.run_command(row)
            else:
                returned = self.env.program(row, self.env.endpoint.url, self.key)
            if inspect.isawaitable(returned):
                returned = asyncio.run(self.awaited(returned))
        except BaseException as error:  # it is anybody's code, and SystemExit is how programs end
            failure = f"{type(error).__name__}: {first_line(error)}"
        with self.changed:
            if not self.over:
                self.returned, self.failure = returned, failure
                self.end()

    async def awaited(self, returned):
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel():
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # it has just ended by itself
                pass

        self.cancel = cancel
        if self.over:
            raise RuntimeError(OVER)
        return await returned

    def run_command(self, task: dict) -> str:
        """The last line that the command prints. RuntimeError: it ended with another exit code than 0."""
        command = [sys.executable, "-ISc", STARTER, str(os.getpid()), *shlex.split(self.env.config.command)]
        keys = {"OPENAI_BASE_URL": self.env.endpoint.url, "OPENAI_API_KEY": self.key}
        files = [tempfile.TemporaryFile() for _ in range(3)]
        with files[0] as given, files[1] as out, files[2] as err:
            given.write(envs.to_json(task) + b"\n")
            given.seek(0)
            process = subprocess.Popen(command, env=os.environ | keys, stdin=given, stdout=out, stderr=err,
                                       start_new_session=True)
            self.cancel = lambda: kill(process.pid)
            if self.over:
                self.cancel()
            code = process.wait()
            self.cancel()  # what it has left behind
            self.cancel = lambda: None
            if code:
                raise RuntimeError(f"exit code {code}: {end_of(err) or end_of(out)}")
            return end_of(out)

    # In the server's thread

    def take(self, request: Request) -> None:
        """Raises Refusal."""
        with self.changed:
            self.env.tell_ignored(request.ignored)
            self.num_requests += 1
            if self.num_requests > self.env.config.max_requests:
                self.cut = self.cut or f"more than max_requests={self.env.config.max_requests} requests"
            if self.cut:
                raise self.refusal()
            self.waiting = [other for other in self.waiting if not other.gone]
            if len(self.waiting) >= MAX_WAITING:
                raise Refusal(429, f"more than {MAX_WAITING} requests wait", "rate_limit_exceeded")
            self.waiting.append(request)
            self.changed.notify_all()

    # In threads of the trainer's, which hold the lock

    def end(self) -> None:
        """Nothing is answered any more."""
        self.over = True
        self.env.endpoint.sessions.pop(self.key, None)
        refusal = Refusal(400, OVER, "invalid_api_key")
        for conversation in (self.root, *self.branches):
            if conversation:
                conversation.refuse(refusal)
        for request in self.waiting:
            request.refuse(refusal)
        self.waiting = []
        self.changed.notify_all()

    def refusal(self) -> Refusal:
        return Refusal(400, f"the episode is cut off: {self.cut}", "context_length_exceeded")

    def wait(self, is_there) -> None:
        """Until is_there() or the agent's end, which comes where it takes too long."""
        limit = self.env.config.patience
        if not self.changed.wait_for(lambda: self.over or is_there(), limit):
            self.failure = f"it neither asked nor returned within patience={limit:g} s"
            self.end()

    def begin(self) -> Conversation:
        """Wait for the first request. RuntimeError: there is none."""
        with self.changed:
            self.wait(lambda: self.waiting)
            if not self.over:
                self.root = Conversation(self.waiting.pop(0))
                return self.root
        raise RuntimeError(f"the agent {self.failure or 'returned without a request'}")

    def next_of_root(self) -> Step:
        """What the root's model reads next, or conversations to be played first, or the end."""
        self.branches = []
        while True:
            self.wait(lambda: self.waiting)
            if self.over:
                return self.last_step()
            for request in self.waiting:
                if self.root.is_extended_by(request):
                    self.waiting.remove(request)
                    return self.root.extend(request)
            if not self.more_come():
                break
        self.branches = [Conversation(request) for request in self.waiting]
        self.waiting = []
        children = []
        for branch in self.branches:
            name = f"{self.task.id}-{self.num_branches}"
            self.num_branches += 1
            task = Task(name, self.task.source, branch.request.messages, {}, branch.request.tools)
            children.append((task, Branch(self, branch)))
        return Step([], 0.0, False, False, {}, children=tuple(children))

    def next_of_branch(self, branch: Conversation) -> Step:
        """What its model reads next; or its end, where a request goes on from none of the branches.

        Others may be answered only once this one asks too, or is over: then it does not wait long.
        """
        while not self.over and not self.concerns(branch):
            if not self.others_ask(branch):
                self.wait(lambda: self.concerns(branch) or self.others_ask(branch))
            elif not self.changed.wait_for(lambda: self.over or self.concerns(branch), LATE):
                break
        self.changed.notify_all()
        for request in self.waiting:
            if branch.is_extended_by(request):
                self.waiting.remove(request)
                return branch.extend(request)
        branch.live = False
        return Step([], 0.0, True, False, {})

    def concerns(self, branch: Conversation) -> bool:
        """Whether a branch must go on or end: a request waits that goes on from no other."""
        others = [other for other in self.branches if other is not branch]
        for request in self.waiting:
            if not any(other.is_extended_by(request) for other in others):
                return True
        return not branch.live

    def others_ask(self, branch: Conversation) -> bool:
        return any(other.request for other in self.branches if other is not branch)

    def more_come(self) -> bool:
        """Whether the agent asks more, or ends, before it has been QUIET."""
        number = len(self.waiting)
        return self.changed.wait_for(lambda: self.over or len(self.waiting) != number, QUIET)

    def last_step(self) -> Step:
        """RuntimeError: the agent has failed."""
        if self.failure and not self.cut:
            raise RuntimeError(f"the agent {self.failure}")
        if self.failure:  # by a request that was refused, for which the policy is to blame
            step = Step([], 0.0, False, True, {"correct": 0.0})
        else:
            step = self.env.verdict(self.task, self.returned, self.last_reply)
        step.info |= {"requests": float(self.num_requests), "conversations": 1.0 + self.num_branches}
        step.terminated, step.truncated = not self.cut, bool(self.cut)
        if self.num_branches and self.env.config.train == "all":
            step.seat_rewards = (step.reward,)  # all conversations are of one seat
        return step


class Play(Episode):
    """The root of a run."""

    def __init__(self, env: Agent, task: Task):
        self.run = Run(env, task)
        try:
            self.root = self.run.begin()
        except BaseException:
            self.close()
            raise
        first = self.root.request
        self.own_task = dataclasses.replace(task, messages=first.messages, tools=first.tools)

    def step(self, reply: str, calls: list[dict] | None = None) -> Step:
        with self.run.changed:
            if not self.run.over:
                self.run.last_reply = reply
                self.root.answer(reply, calls)
            return self.run.next_of_root()

    def resume(self, replies: list[str]) -> Step:
        with self.run.changed:
            return self.run.next_of_root()

    def end(self, reason: str) -> Step:
        """The agent may still return what the episode is worth, but no request is answered."""
        with self.run.changed:
            self.run.cut = LIMITS[reason]
            cut_off(self.root, reason)
            for request in self.run.waiting:
                request.refuse(self.run.refusal())
            self.run.waiting = []
            self.run.wait(lambda: False)
            return self.run.last_step()

    def close(self) -> None:
        with self.run.changed:
            if not self.run.over:
                self.run.failure = OVER
                self.run.end()
        self.run.cancel()


class Branch(Episode):
    """Another conversation of a run, played as a sub-agent of the root."""

    def __init__(self, run: Run, conversation: Conversation):
        self.run, self.conversation = run, conversation

    def step(self, reply: str, calls: list[dict] | None = None) -> Step:
        with self.run.changed:
            if self.conversation.request:
                self.run.last_reply = reply
                self.conversation.answer(reply, calls)
            return self.run.next_of_branch(self.conversation)

    def end(self, reason: str) -> None:
        with self.run.changed:
            cut_off(self.conversation, reason)

    def close(self) -> None:
        with self.run.changed:
            cut_off(self.conversation, "context")
            self.run.changed.notify_all()


def cut_off(conversation: Conversation, reason: str) -> None:
    """Of a reply that had no end, the client gets nothing but the reason: only a whole one is a step."""
    if reason == "length" and conversation.request:
        conversation.answer("", None, "length")
    conversation.refuse(Refusal(400, f"the conversation is cut off: {LIMITS[reason]}",
                                "context_length_exceeded"))
