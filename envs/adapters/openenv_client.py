"""Episodes on an OpenEnv server, by its protocol: JSON over HTTP and, for each session, over a WebSocket.

The package's own client speaks the same, but cannot be installed beside vLLM or verifiers (docs/openenv.md).
From the top: an episode, what a server offers, its sessions. Calls are for threads and end in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import threading
import warnings

from tornado import httpclient, websocket

from envs import Episode, Message, Step, Task, final_part, first_line

MCP = ("Action", "CallToolAction", "ListToolsAction")  # titles of the actions where tools are called
OTHER = ("metadata", "reward", "done")  # what each action or observation may have
ROUNDING = 1e-9  # of a sum of rewards
MAX_MESSAGE = 16 * 2**20  # bytes of an answer
RETRY = 0.2  # after which a server that had no session left is asked again [s]
LONGEST_CLOSE = 3.0  # a server that does not say goodbye is left [s]


class Game(Episode):
    """One session, from the first reply on. A reply that is no action takes a turn, too."""

    def __init__(self, config, server: Server, task: Task):
        self.config, self.server, self.task = config, server, task
        self.session = Session(config.url, config.timeout)
        self.close = self.session.close
        self.turns, self.invalid, self.total = 0, 0, 0.0

    def begin(self) -> Message:
        """The prompt: what the server says to a reset."""
        text = self.text(self.session.ask("reset", self.task.data))
        if self.server.action == "json":
            text += f"\n\nReply with a JSON object. Its fields: {json.dumps(self.server.schema)}"
        return {"role": "user", "content": text}

    def text(self, result: Result) -> str:
        field, fields = self.config.observation, result.observation
        text = fields[field] if field else fields
        return text if isinstance(text, str) else json.dumps(text)

    def step(self, reply: str) -> Step:
        self.turns += 1
        try:
            if self.turns == 1 and [self.begin()] != self.task.messages:
                raise ValueError("the same reset has another first observation than before")
            try:
                result = self.session.ask("step", action_of(final_part(reply), self.server.action))
                text = self.text(result)
            except BadAction as error:
                self.invalid += 1
                result, text = Result({}, 0.0, False, None), f"This is no action: {error}"
        except Exception as error:
            self.close()
            warnings.warn(f"environment openenv: task {self.task.id}: {type(error).__name__}: "
                          f"{first_line(error)}", stacklevel=2)
            return Step([], 0.0, False, True, {"correct": 0.0, "invalid": self.invalid, "error": 1.0})
        self.total += result.reward
        solved = self.total >= self.config.solved_at - ROUNDING
        if result.correct is not None:
            solved = result.correct >= 1
        info = {"correct": float(solved), "invalid": self.invalid, "error": 0.0}
        if result.done or self.turns == self.config.max_turns:
            self.close()
            return Step([], result.reward, result.done, not result.done, info)
        return Step([{"role": "user", "content": text}], result.reward, False, False, info)


class BadAction(Exception):
    """A reply is no action."""


def action_of(text: str, field: str) -> dict:
    """A reply as an action: in its text field, or as a JSON object that holds all fields."""
    if field != "json":
        return {field: text}
    try:
        action = json.loads(text[text.find("{"):text.rfind("}") + 1])
        json.dumps(action, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise BadAction("expected a JSON object") from error
    return action


@dataclasses.dataclass
class Server:
    """What a server offers."""

    name: str
    action: str  # the field that gets the reply, or json
    schema: dict  # of the action's fields
    tasks: dict[str, int]  # {split: how many}, where it lists some


def describe(config) -> Server:
    """Asks a server what it offers. Raises ValueError where that does not fit the options."""
    def get(path, payload=None, optional=False):
        return fetch(config.url.rstrip("/") + path, config.timeout, payload, optional)

    schema, about = get("/schema"), get("/metadata")
    try:
        name, title = about["name"], schema["action"].get("title")
        fields, seen = own_fields(schema["action"]), own_fields(schema["observation"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("its /schema and /metadata are not those of an OpenEnv server") from error
    if title in MCP:
        raise ValueError("its actions are calls of MCP tools: not supported")
    texts = [field for field, kind in fields.items() if kind.get("type") == "string"]
    action = config.action or (texts[0] if len(texts) == 1 else "")
    if action not in (*texts, "json"):
        raise ValueError(f"option action: expected one of {', '.join([*texts, 'json'])}, got {action!r}")
    if config.observation not in ("", *seen):
        raise ValueError(f"option observation: expected one of {', '.join(seen)}, got {config.observation!r}")
    path = "/" + (get("/list_environments", optional=True) or [name])[0]
    listed = [split["name"] for split in get(f"{path}/splits", optional=True) or ()]
    wanted = config.splits.split(",") if listed else []
    if not {*wanted} <= {*listed}:
        raise ValueError(f"option splits: expected two of {', '.join(listed)}, got {config.splits!r}")
    tasks = {split: get(f"{path}/num_tasks", {"split": split})["num_tasks"] for split in wanted}
    return Server(name, action, fields, tasks)


def own_fields(schema: dict) -> dict:
    """Those that are not in each action or observation."""
    return {name: kind for name, kind in schema["properties"].items() if name not in OTHER}


def fetch(url: str, timeout: float, payload: dict | None = None, optional: bool = False):
    """The JSON that a URL answers, to a POST where there is a payload. None: an optional one is unknown."""
    async def ask():
        client = httpclient.AsyncHTTPClient(force_instance=True, max_body_size=MAX_MESSAGE)
        options = dict(connect_timeout=2 * timeout, request_timeout=2 * timeout)  # `submit` is first
        if payload:
            options |= dict(method="POST", body=json.dumps(payload))
        try:
            answer = await client.fetch(url, headers={"Content-Type": "application/json"}, **options)
            return json.loads(answer.body)
        except httpclient.HTTPClientError as error:
            if optional and error.code in (404, 405, 501):
                return None
            raise OSError(f"{url}: {error}") from error
        finally:
            client.close()

    return submit(ask(), timeout).result()


@functools.cache
def network_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def submit(coroutine, timeout: float):
    """Its Future, whose result is a TimeoutError after so many seconds."""
    async def limited():
        try:
            return await asyncio.wait_for(coroutine, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {timeout:g} s") from error

    return asyncio.run_coroutine_threadsafe(limited(), network_loop())


@dataclasses.dataclass
class Result:
    """An answer to reset or step."""

    observation: dict
    reward: float
    done: bool
    correct: float | None  # None: the server does not say

    @classmethod
    def of(cls, data: dict) -> Result:
        reward = float(data.get("reward") or 0)
        if not math.isfinite(reward):
            raise ValueError(f"reward: expected a finite number, got {reward}")
        observation = dict(data["observation"])
        said = (data.get("metadata") or {}) | (observation.pop("metadata", None) or {}) | observation
        verdicts = [float(said[name]) for name in ("correct", "success") if said.get(name) is not None]
        return cls(observation, reward, bool(data.get("done")), verdicts[0] if verdicts else None)


class Session:
    """A session of its own on a server, from the first `ask` to `close`."""

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = f"ws{url.rstrip('/').removeprefix('http')}/ws", timeout
        self.socket = self.asked = None
        self.closed = False

    def ask(self, kind: str, data: dict) -> Result:
        """kind: reset, with its arguments, or step, with the fields of an action.

        Raises BadAction where they do not fit the server's schema, TimeoutError, OSError and others.
        """
        self.asked = submit(self._ask(kind, data), self.timeout)
        try:
            return Result.of(self.asked.result())
        finally:
            if self.closed:  # meanwhile, perhaps before `asked` was there to be cancelled
                self.close()

    async def _ask(self, kind, data):
        # Half of a pair of surrogates, which a reply may hold, is no text for others.
        text = json.dumps({"type": kind, "data": data}, ensure_ascii=False).encode(errors="replace").decode()
        while not self.closed:
            if self.socket is None:
                self.socket = await websocket.websocket_connect(
                    self.url, connect_timeout=self.timeout, max_message_size=MAX_MESSAGE)
            with contextlib.suppress(websocket.WebSocketClosedError):  # it may have said why
                await self.socket.write_message(text)
            answer = await self.socket.read_message()
            if answer is None:
                break
            answer = json.loads(answer)
            if answer["type"] != "error":
                return answer["data"]
            code, said = answer["data"].get("code"), answer["data"].get("message")
            if code == "VALIDATION_ERROR" and kind == "step":
                wrong = [f"{one['loc']}: {one['msg']}" for one in answer["data"]["errors"]]
                raise BadAction("; ".join(wrong)[:500])
            if code != "CAPACITY_REACHED":
                raise RuntimeError(f"{code}: {said}")
            self.socket.close()
            self.socket = None
            await asyncio.sleep(RETRY)
        raise ConnectionError("the session was closed")

    def close(self) -> None:
        """What is asked ends. Waits a while for the server, so that the session's place is free then."""
        self.closed = True
        if self.asked:
            self.asked.cancel()
            with contextlib.suppress(Exception):
                submit(self._leave(), LONGEST_CLOSE).result()

    async def _leave(self):
        socket, self.socket = self.socket, None
        if socket is None:
            return
        try:
            await socket.write_message('{"type": "close"}')
            while await socket.read_message() is not None:
                pass
        finally:
            socket.close()
