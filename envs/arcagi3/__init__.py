"""ARC-AGI-3 games as a multi-turn environment: live over HTTP, in process, or replayed from a file.

    envs.make("arcagi3", game_ids="maze")                       our own games (games.py), no sockets
    envs.make("arcagi3", live=True)                             https://three.arcprize.org, key in ARC_API_KEY
    envs.make("arcagi3", root_url="http://127.0.0.1:8001")      tools/arc_server.py, or another server
    envs.make("arcagi3", session="envs/arcagi3/session.json")    a recording

A screen is a grid of up to 64x64 cells of 0..15, shown as hex digits; a reply is one action, as
`{"action": "ACTION6", "x": 1, "y": 2}` or `ACTION6 x=1 y=2`. The score is the number of levels completed.

From the top: options, tasks, the episode, screens as text, the reply's grammar, the client of the API
(https://docs.arcprize.org), and its transports: functions (method, path, payload) -> JSON value that raise
ClientError. Nothing is sent before an episode's first reply. docs/arcagi3.md has the rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import socket
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from dotenv import load_dotenv

from envs import (
    BadInput,
    Env,
    Episode,
    Message,
    Step,
    Task,
    check_option,
    final_part,
    hold_out,
    play,
    read_text,
)
from envs.arcagi3 import games

DEFAULT_ROOT = "https://three.arcprize.org"
ROOT = Path(__file__).resolve().parents[2]
SIZE = 64  # cells of a grid's side, at most
MAX_GRIDS = 1_000  # grids in one reply
MAX_COUNT = 254  # of levels
MAX_BODY = 64 * 2**20  # bytes of a reply's body
MAX_REPLY = 8_000  # characters at the end of a model's reply that are read at all
MAX_BRACES = 200  # opening braces, the last ones, at which a JSON object is looked for
MAX_REASONING = 2_000  # characters of `reasoning` that are sent on
MAX_CHANGES = 32  # changed cells that a screen lists
TEST_SHARE = 10  # one of our own games in so many belongs to the test split
TEST_SHARE_BY_ID = 4  # and one of a list of other games
STATES = {"NOT_STARTED": "NOT_STARTED", "NOT_PLAYED": "NOT_STARTED",  # as older servers say
          "NOT_FINISHED": "NOT_FINISHED", "WIN": "WIN", "GAME_OVER": "GAME_OVER"}
ACTIONS = ("RESET", *(f"ACTION{number}" for number in range(1, 8)))
COLOURS = frozenset(range(16))
OVER = ("WIN", "GAME_OVER")
URL = re.compile(r"https?://[^/\s]+(/[^\s?#]*)?")

SYSTEM = """You play a game on a screen of up to 64x64 cells. A cell has one of 16 colours, written as a hex \
digit. Nobody tells you the rules: act, watch what changes, and find out how to raise the score.

By custom ACTION1 is up, ACTION2 down, ACTION3 left, ACTION4 right, ACTION5 interacts, ACTION6 clicks on a \
cell and ACTION7 undoes; a game knows some of them, and may give them another meaning. RESET begins the \
level again, or the whole game if nothing was done in the level yet.

Answer each screen with one action, in one of these two forms:
{"action": NAME, "reasoning": TEXT}, and for a click {"action": "ACTION6", "x": COLUMN, "y": ROW}
or, in a line of its own, NAME, and for a click ACTION6 x=COLUMN y=ROW
COLUMN and ROW are whole numbers from 0 to 63; column 0, row 0 is the cell at the top left."""
NOT_BEGUN = "The game has not begun. Your first reply begins it, whatever it says: answer RESET."


@dataclasses.dataclass(frozen=True)
class Config:
    # Which games
    game_ids: str = ""
    """games, with commas; empty: all there are. Of our own, which are played in this process, names (maze,
    lights, collect) stand for games with ever new levels, and maze-17 for one"""
    live: bool = False
    """play the games of a server; so does a root_url"""
    session: str = ""
    """file with a recorded game to replay in place of a server (.json, or .jsonl of tools/run_arc_eval.py)"""
    root_url: str = ""
    """the server; empty: with `live` the variable ARC_ROOT_URL, or else https://three.arcprize.org, which
    wants a key in ARC_API_KEY"""
    test_ids: str = ""
    """held-out games of a list, with commas (none: no game); empty: one in four by a hash of the id, of our
    own one in ten by a hash of the first screen"""
    train_tasks: int = 100_000
    """train tasks of our own games with ever new levels"""
    test_tasks: int = 256
    """their test tasks"""
    levels: int = games.MAX_LEVELS
    """levels of our own games"""
    # What the model reads
    style: Literal["chat", "short"] = "chat"
    """chat explains and names things; short is a line and the bare grid, for small word-level models"""
    downsample: int = 1
    """so many by so many cells are shown as one, by majority (of equals the lower colour); our own games take
    1, 2, 3, 4 or 8 [cells]"""
    changes: bool = False
    """chat only: each screen also lists the cells that changed"""
    first_screen: bool = True
    """the prompt holds the first screen, where no server has to be asked for it; false: the first reply opens
    the game, as with a server"""
    history: int = 0
    """each screen repeats the last so many actions [actions]"""
    # How a game goes
    max_actions: int = 80
    """replies that an episode may take, invalid ones included [replies]"""
    reward_mode: Literal["delta_score", "score", "binary"] = "delta_score"
    """of a reply: the score now less the score before; the score now; 1 for the one that wins, else 0"""
    reward_scale: float = 1.0
    """the reward is multiplied by this"""
    max_errors: int = 3
    """failures of the server that end the episode [failures]"""
    # The server
    timeout: float = 30.0
    """longest wait for a connection, and between two parts of an answer [s]"""
    retries: int = 5
    """tries again at most, after 0.5, 1, 2, ... s or what the server asks for"""
    deadline: float = 120.0
    """a request with all its tries takes no longer [s]"""

    def __post_init__(self):
        check = functools.partial(check_option, "arcagi3", self)
        check(not (self.session and (self.live or self.root_url)), "session",
              "none together with live or root_url")
        check(not self.root_url or URL.fullmatch(self.root_url), "root_url", "the form http://host:port")
        for name in split_ids(self.game_ids) if self.offline else ():
            check(name in games.GAMES or games.parse_id(name), "game_ids",
                  f"some of {', '.join(games.GAMES)}, or ids such as maze-17 (live=true: the server's)")
        names = {name in games.GAMES for name in split_ids(self.game_ids)}
        check(not self.offline or len(names) < 2, "game_ids", "either names or ids with a number, not both")
        generated = self.offline and names != {False}
        check(not (generated and self.test_ids), "test_ids", "none where levels are ever new")
        check(1 <= self.levels <= games.MAX_LEVELS, "levels", f"1 to {games.MAX_LEVELS}")
        check(self.offline or self.levels == games.MAX_LEVELS, "levels",
              f"{games.MAX_LEVELS} for games that are not ours")
        check(1 <= self.downsample <= 32, "downsample", "1 to 32")
        # Blocks across the tiles' edges, or larger than a tile, make test games look like train games.
        check(not self.offline or games.TILE % self.downsample == 0 or self.downsample == 3, "downsample",
              "1, 2, 3, 4 or 8 with our own games, which others blur")
        check(not (self.changes and self.style == "short"), "changes", "false with style=short")
        check(0 <= self.history <= MAX_COUNT, "history", f"0 to {MAX_COUNT}")
        check(1 <= self.max_actions <= 100_000, "max_actions", "1 to 100000")
        check(abs(self.reward_scale) < float("inf"), "reward_scale", "a finite number")
        check(1 <= self.max_errors <= 1_000, "max_errors", "1 to 1000")
        check(0 <= self.retries <= 100, "retries", "0 to 100")
        for option in ("timeout", "deadline"):
            check(0 < getattr(self, option) < float("inf"), option, "more than 0")
        for option in ("train_tasks", "test_tasks"):
            check(getattr(self, option) >= 1, option, "1 or more")

    @property
    def offline(self) -> bool:
        """Our own games, in this process."""
        return not (self.live or self.root_url or self.session)


def split_ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class ArcAgi3(Env):
    """Play a game, one action a reply. Correct is WIN."""

    Config = Config
    multi_turn = True

    def __init__(self, config: Config, transport: Callable[[], Callable] | None = None):
        """transport: makes a transport for an episode, in place of the one that the options name."""
        super().__init__(config)
        self._lock = threading.Lock()
        self._split_of_lists = None
        self._session = load_session(config.session) if config.session else None
        ids = split_ids(config.game_ids)
        self._generated = []  # names of our own games with ever new levels
        if config.offline and all(name in games.GAMES for name in ids):
            self._generated = ids or list(games.GAMES)
        elif self._session:
            recorded = self._session["reset"]["game_id"]
            if ids not in ([], [recorded]):
                raise BadInput(f"environment arcagi3: option game_ids: expected {recorded}, the recorded "
                               f"game, or none, got {config.game_ids!r}")
            ids = [recorded]
        self._ids = ids
        if config.live:
            load_dotenv(".env")  # in the working directory; variables that are set already win
        self.root_url = (config.root_url or os.environ.get("ARC_ROOT_URL") or DEFAULT_ROOT).rstrip("/")
        if not URL.fullmatch(self.root_url):
            raise BadInput(f"ARC_ROOT_URL={self.root_url}: expected the form http://host:port")
        key = os.environ.get("ARC_API_KEY", "")
        if config.live and self.root_url == DEFAULT_ROOT and not key and not transport:
            raise BadInput(f"environment arcagi3: option live: {DEFAULT_ROOT} wants a key: expected one in "
                           "the variable ARC_API_KEY, which may stand in a file .env")
        self.make_transport = transport or self._transport
        self.blocking = bool(transport) or not (config.offline or self._session)

    def _transport(self):
        config = self.config
        if config.offline:
            return LocalTransport(games.Arcade(num_levels=config.levels))
        if self._session:
            return StaticTransport(self._session)
        return HttpTransport(self.root_url, os.environ.get("ARC_API_KEY", ""), config.timeout, config.retries,
                             config.deadline)

    @property
    def vocabulary(self) -> list[str] | None:
        """Words for a word-level tokenizer (None unless style is short)."""
        if self.config.style != "short":
            return None
        return [*map(str, range(MAX_COUNT + 1)), *"abcdef", *ACTIONS,
                *"start score actions after bad error :".split()]  # the colon: before a reply

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        if self._generated:
            return {"train": self.config.train_tasks, "test": self.config.test_tasks}[split]
        ids = self._games()[split]
        if split == "train" and not ids:
            raise BadInput("environment arcagi3: option game_ids: every game of the list is held out for "
                           "the test split; name more, or choose with test_ids (test_ids=none: all train)")
        if split == "test" and not ids and not self.config.test_ids:
            only = self._games()["train"][0]
            raise BadInput(f"environment arcagi3: {only}, the only game, is for training, which leaves none "
                           "to be held out; name more in game_ids, or say that none is to be (test_ids=none)")
        return len(ids)

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        game_id = self._draw(split, index) if self._generated else self._games()[split][index]
        return self.task_of(game_id, f"arcagi3-{split}-{index}")

    def task_of(self, game_id: str, task_id: str = "") -> Task:
        """The task to play one game. Its prompt holds the first screen where no server has to be asked."""
        frame = None
        if self.config.first_screen and self.config.offline:
            game = games.new_game(game_id, self.config.levels)
            frame = Frame(game_id, "", (game.frame(),), game.state, 0, game.num_levels, game.actions)
        elif self.config.first_screen and self._session:
            frame = read_frame(self._session["reset"])
        messages = View(self.config).prompt(game_id, frame)
        return Task(task_id or f"arcagi3-{game_id}", f"arcagi3/{game_id.partition('-')[0]}", messages,
                    {"game_id": game_id, "begun": frame is not None})

    def start(self, task: Task, seed: int) -> Play:
        return Play(self.config, task, self.make_transport, self.root_url)

    def replies(self, task: Task) -> list[str] | None:
        """The replies of a shortest way to WIN, after the opening one if the prompt asks for that. None for
        games that are not ours. (`solution` is one reply, and no one reply wins a game: it is None.)
        """
        if games.parse_id(task.data["game_id"]) is None:
            return None
        view, game = View(self.config), games.new_game(task.data["game_id"], self.config.levels)
        return [view.reply(*step) for step in game.solution()]

    def demonstration(self, task: Task) -> list[Message] | None:
        """Our own games played by their solver."""
        replies = self.replies(task)
        if replies is None:
            return None
        ahead = iter(([] if task.data["begun"] else ["RESET"]) + replies)
        return play(self.start(task, 0), task, lambda: next(ahead))

    def _draw(self, split, index) -> str:
        """A game with levels of its own whose first screen belongs to the split."""
        name = self._generated[index % len(self._generated)]
        rng = random.Random(f"{name}-{split}-{index}")
        while True:
            game_id = f"{name}-{rng.randrange(games.MAX_SEED + 1)}"
            if split_of_game(game_id) == split:
                return game_id

    def _games(self) -> dict[str, list[str]]:
        """{split: game ids} of a list of games; the server's, asked for once, where the options name none."""
        with self._lock:
            if self._split_of_lists is None:
                ids = list(dict.fromkeys(self._ids or self._listed()))
                if self.config.test_ids:
                    held_out = set(split_ids(self.config.test_ids)) - {"none"}
                    if not held_out <= set(ids):
                        raise BadInput("environment arcagi3: option test_ids: expected games of the list, "
                                       f"got {', '.join(sorted(held_out - set(ids)))}")
                    self._split_of_lists = {"train": [name for name in ids if name not in held_out],
                                            "test": [name for name in ids if name in held_out]}
                else:
                    self._split_of_lists = hold_out(ids, lambda name: split_of_game(name) == "test",
                                                    "environment arcagi3: game")
            return self._split_of_lists

    def _listed(self):
        client = Client(self.make_transport())
        try:
            return [game["game_id"] for game in client.games()]
        except ClientError as error:
            raise BadInput(f"environment arcagi3: {self.root_url}: the list of games cannot be fetched "
                           f"({error})") from error
        finally:
            client.disconnect()


@functools.lru_cache(4096)
def split_of_game(game_id: str) -> str:
    """Ours by what is seen first, so that no test game begins like a train one; others by their id."""
    if games.parse_id(game_id) is None:
        return "test" if zlib.crc32(game_id.encode()) % TEST_SHARE_BY_ID == 0 else "train"
    first = bytes(cell for row in games.new_game(game_id).frame() for cell in row)
    return "test" if zlib.crc32(first) % TEST_SHARE == 0 else "train"


# The episode

class Play(Episode):
    """One play of a game. A reply that is no action, or that the server fails on, counts as a turn too."""

    def __init__(self, config, task: Task, make_transport, root_url: str):
        self.config, self.view = config, View(config)
        self.game_id, self.begun = task.data["game_id"], task.data["begun"]
        self.root_url, self.make_transport = root_url, make_transport
        self.client = None
        self.card_id, self.frame, self.shown = "", None, None
        self.scorecard: dict | None = None  # what close() fetched
        self.turns = self.actions_taken = self.invalid = self.errors = 0
        self.done: list[str] = []  # actions, for the history
        self.state = "playing"  # then over (the game's or a limit's end) or error

    def step(self, reply: str) -> Step:
        if self.state != "playing":
            return self._end(0.0)
        try:
            if self.frame is None:
                self._begin()
                # The model has seen nothing yet: its first reply opens the game. Or it was over already.
                if not self.begun or self.frame.state in OVER:
                    return self._answer(0.0, turn=False)
            return self._act(reply)
        except ClientError as error:
            return self._failed(error)

    def _begin(self):
        if self.client is None:
            self.client = Client(self.make_transport())
        if not self.card_id:
            self.card_id = self.client.open_scorecard(tags=("plainrl",))
        self.frame = self.shown = self.client.reset(self.game_id, self.card_id)

    def _act(self, reply) -> Step:
        action = parse_reply(reply, self.view.limit)
        available = self.frame.actions
        if isinstance(action, Action) and action.name != "RESET" and available and (
                int(action.name[-1]) not in available):
            action = f"{action.name} is not available in this game"
        if isinstance(action, str):
            self.invalid += 1
            return self._answer(0.0, "bad", f"That was no valid action: {action}. {self.view.expected()}")
        before = self.frame.score
        x, y = self.view.to_cells(action)
        if action.name == "RESET":
            frame = self.client.reset(self.game_id, self.card_id, self.frame.guid)
        else:
            frame = self.client.act(self.game_id, self.frame.guid, action.name, x, y, action.reasoning)
        self.actions_taken += 1
        self.done.append(self.view.action_text(action))
        self.frame = frame
        now, won = frame.score, frame.state == "WIN"
        reward = {"delta_score": now - before, "score": now, "binary": won}[self.config.reward_mode]
        return self._answer(float(reward) * self.config.reward_scale)

    def _failed(self, error) -> Step:
        """An action is never sent again here: it may have been carried out. The next frame will tell."""
        self.errors += 1
        if self.errors >= self.config.max_errors or error.status in (401, 403, 404):
            self.state = "error"
        if self.frame is None:
            return self._answer(0.0, "error", f"The server failed: {error}. The game has not begun.")
        carried = ("may have been carried out or not: the next screen will tell" if error.unknown
                   else "was not carried out")
        return self._answer(0.0, "error", f"The server failed: {error}. Your action {carried}. This is the "
                            "last screen that is known.")

    def _answer(self, reward, word="", note="", turn=True) -> Step:
        self.turns += turn
        if self.state == "playing" and (self.turns >= self.config.max_actions
                                        or self.frame is not None and self.frame.state in OVER):
            self.state = "over"
        if self.state != "playing":
            return self._end(reward)
        text = self.view.screen(self.frame, self.shown, self.turns, self.done, word, note)
        self.shown = self.frame
        return Step([{"role": "user", "content": text}], reward, False, False, self.info())

    def _end(self, reward) -> Step:
        """Closes the scorecard already here, in the thread that steps: `close` is called one by one."""
        self.close()
        over = self.frame is not None and self.frame.state in OVER and self.state != "error"
        return Step([], reward, over, not over, self.info())

    def info(self) -> dict:
        """Named parts; progress is the share of levels completed, error 1 where the server ended it."""
        frame = self.frame
        score, guid = (frame.score, frame.guid) if frame else (0, "")
        won = float(frame is not None and frame.state == "WIN")
        url = "" if self.config.offline or not guid else (
            f"{self.root_url}/replay/{quoted(self.game_id)}/{quoted(guid)}")
        return {"correct": won, "score": float(score),
                "progress": min(1.0, score / frame.win_score) if frame and frame.win_score else won,
                "actions_taken": float(self.actions_taken), "invalid": float(self.invalid),
                "errors": float(self.errors), "error": float(self.state == "error"),
                "state": frame.state if frame else "NOT_STARTED", "game_id": self.game_id,
                "card_id": self.card_id, "guid": guid, "replay_url": url}

    def close(self) -> None:
        """Fetch the scorecard and close it, best effort: quickly, and whatever happens."""
        if self.state == "playing":
            self.state = "over"
        client, self.client = self.client, None
        if client is None:
            return
        if self.card_id:
            client.hurry()
            for ask in (client.scorecard, client.close_scorecard):
                try:
                    self.scorecard = ask(self.card_id) or self.scorecard
                except ClientError:
                    pass
        client.disconnect()


# Screens as text

class View:
    """What the model reads and writes, by the options style, downsample, changes and history."""

    def __init__(self, config):
        self.config, self.short, self.scale = config, config.style == "short", config.downsample
        # In short, x and y count what is shown; in chat they are the API's cells.
        self.limit = -(-SIZE // self.scale) - 1 if self.short else SIZE - 1

    def prompt(self, game_id, frame) -> list[dict]:
        if self.short:
            text = self.screen(frame, frame, 0, []) if frame else "start"
            return [{"role": "user", "content": text}]
        begin = self.screen(frame, frame, 0, []) if frame else NOT_BEGUN
        return [{"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"Game {game_id}.\n\n{begin}"}]

    def screen(self, frame, shown, turns, done, word="", note="") -> str:
        """A frame; shown is the one that the model saw last, for the changes. None: nothing is known yet."""
        past = done[-self.config.history:] if self.config.history else []
        if frame is None:
            return (word or "start") if self.short else f"{note}\n\n{NOT_BEGUN}".strip()
        grid = self.shrink(frame.grids[-1])
        if self.short:
            actions = " ".join(map(str, frame.actions))
            lines = [f"{word} score {frame.score} actions {actions}".strip()]
            lines += ["after " + " ".join(past)] if past else []
            return "\n".join(lines + [" ".join(digits(row)) for row in grid])
        names = " ".join(f"ACTION{number}" for number in frame.actions)
        lines = [note, ""] if note else []
        lines += [f"state: {frame.state}", f"score: {frame.score} of {frame.win_score}",
                  f"step: {turns} of {self.config.max_actions}", f"actions: {names}"]
        lines += ["history: " + ", ".join(past)] if past else []
        if len(frame.grids) > 1:
            lines.append(f"animation: {len(frame.grids)} screens, of which this is the last")
        if self.config.changes:
            lines.append(self.changed(shown.grids[-1], frame.grids[-1]))
        size = f"{len(grid[0])}x{len(grid)}"
        if self.scale > 1:
            size += f", a digit stands for {self.scale}x{self.scale} cells"
        lines += [f"screen ({size}):", *map(digits, grid)]
        return "\n".join(lines)

    def changed(self, before, now) -> str:
        """What is shown and has changed, by the cell in its middle: the one to click on."""
        if np.shape(before) != np.shape(now):
            return "changed: the size"
        width, height = len(now[0]), len(now)
        before, now = self.shrink(before), self.shrink(now)

        def middle(k, size):
            return min(k * self.scale + self.scale // 2, size - 1)

        cells = [f"({middle(x, width)}, {middle(y, height)}) {before[y][x]:x} to {cell:x}"
                 for y, row in enumerate(now) for x, cell in enumerate(row) if cell != before[y][x]]
        more = f"; and {len(cells) - MAX_CHANGES} more" if len(cells) > MAX_CHANGES else ""
        return f"changed (x, y): {'; '.join(cells[:MAX_CHANGES]) or 'nothing'}{more}"

    def shrink(self, grid) -> list[list[int]]:
        """The majority of each block of cells; blocks at the right and bottom edge may be smaller."""
        if self.scale == 1:
            return grid
        cells = np.frombuffer(b"".join(map(bytes, grid)), np.uint8).reshape(len(grid), -1)  # (H, W)
        y, x = (np.arange(side) // self.scale for side in cells.shape)
        height, width = y[-1] + 1, x[-1] + 1
        counts = np.bincount(((y[:, None] * width + x) * 16 + cells).ravel(), minlength=height * width * 16)
        return counts.reshape(height, width, 16).argmax(-1).tolist()  # the first of equals: the lower colour

    def to_cells(self, action) -> tuple[int | None, int | None]:
        """The API's coordinates: of a shown block its middle."""
        if action.x is None or not self.short:
            return action.x, action.y
        return tuple(min(SIZE - 1, value * self.scale + self.scale // 2) for value in (action.x, action.y))

    def action_text(self, action) -> str:
        if action.x is None:
            return action.name
        form = "{} {} {}" if self.short else "{} x={} y={}"
        return form.format(action.name, action.x, action.y)

    def reply(self, number, x, y) -> str:
        """A reply in the style's form, from an action's number and its place in cells."""
        if self.short:
            place = (x // self.scale, y // self.scale) if number == 6 else (None, None)
            return self.action_text(Action(f"ACTION{number}", *place))
        place = {"x": x, "y": y} if number == 6 else {}
        return json.dumps({"action": f"ACTION{number}", **place})

    def expected(self) -> str:
        return ('Expected {"action": NAME}, for a click {"action": "ACTION6", "x": COLUMN, "y": ROW}, or in '
                "a line of its own NAME or ACTION6 x=COLUMN y=ROW, with NAME one of the actions below or "
                f"RESET, and whole numbers from 0 to {self.limit}.")


def digits(row) -> str:
    """A hex digit for each cell of 0..15."""
    return bytes(row).hex()[1::2]


# Replies

@dataclasses.dataclass(frozen=True)
class Action:
    name: str  # RESET, ACTION1, ..., ACTION7
    x: int | None = None  # of ACTION6 alone
    y: int | None = None
    reasoning: str = ""


LINE = re.compile(r"""
    [ \t`*]* (RESET|ACTION[0-9]{1,3})
    (?: [ \t,]+ (?:x[ \t]*=?[ \t]*)? (-?[0-9]{1,6}) [ \t,]+ (?:y[ \t]*=?[ \t]*)? (-?[0-9]{1,6}) )?
    [ \t`*.]*""", re.ASCII | re.IGNORECASE | re.VERBOSE)


def parse_reply(reply: str, limit: int = SIZE - 1) -> Action | str:
    """The action that a reply names, or in words why it names none. Total: any text, in bounded time.

    What stands after the last </think> counts (nothing while a <think> is open), and of that the last 8,000
    characters: the last JSON object with the key "action", or else the last line that is nothing but an
    action. Coordinates are integers from 0 to limit: not true, 1.0 or "1".
    """
    text = final_part(reply)[-MAX_REPLY:]
    found = last_object(text)
    if found is not None:
        name, x, y = found["action"], found.get("x"), found.get("y")
        name = name.strip().upper() if isinstance(name, str) and name.isascii() else name
        reasoning = found.get("reasoning", "")
        reasoning = reasoning if isinstance(reasoning, str) else shown(reasoning, MAX_REASONING)
    else:
        for line in reversed(text.splitlines()):
            if match := LINE.fullmatch(line):
                break
        else:
            return "no action was found"
        name, reasoning = match[1].upper(), ""
        x, y = (None if value is None else int(value) for value in match.group(2, 3))
    if name not in ACTIONS:
        return f"{shown(name)} is not the name of an action"
    if name != "ACTION6":
        return Action(name, reasoning=reasoning)
    for axis, value in (("x", x), ("y", y)):
        if type(value) is not int or not 0 <= value <= limit:
            got = "is missing" if value is None else f"is {shown(value)}"
            return f"{axis} {got}, expected a whole number from 0 to {limit}"
    return Action(name, x, y, reasoning)


def last_object(text: str) -> dict | None:
    """The last JSON object with a key "action" that lies within no other one."""
    decode, found = json.JSONDecoder(strict=False).raw_decode, None
    starts = [match.start() for match in re.finditer(r"\{", text)][-MAX_BRACES:]
    end = 0
    for start in starts:
        if start >= end:
            try:
                value, end = decode(text, start)
            except (ValueError, RecursionError):
                continue
            found = value if "action" in value else found
    return found


def shown(value, most: int = 40) -> str:
    """A value in an answer: in so many characters at most, and plain text whatever it holds."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer too long to write, or lists within lists
        text = type(value).__name__
    return text if len(text) <= most else text[:most - 3] + "..."


# The client

class ClientError(Exception):
    """A request that failed: an error in the reply, no JSON, or not of the schema."""

    status: int | None = None  # of HTTP

    def __init__(self, message, unknown=False):
        super().__init__(message)
        self.unknown = unknown  # whether the server may have carried the command out all the same


class TransportError(ClientError):
    """The network, or an HTTP status."""

    def __init__(self, message, status=None, unknown=False, retry_after=None):
        super().__init__(message, unknown)
        self.status, self.retry_after = status, retry_after


@dataclasses.dataclass(frozen=True)
class Frame:
    """What the server answers to a command, by the newer names."""

    game_id: str
    guid: str
    grids: tuple  # 1..N grids, lists of rows, of 1..64 x 1..64 cells 0..15; the last is what there is now
    state: str  # NOT_STARTED, NOT_FINISHED, WIN, GAME_OVER
    score: int  # levels completed
    win_score: int  # levels there are
    actions: tuple[int, ...]  # available ones; () where the server does not say


def read_frame(reply) -> Frame:
    """A reply as a Frame. ClientError where it is not of the schema, by its newer or older names."""
    def check(fine, field, expected):
        if not fine:
            got = shown(reply.get(field))
            raise ClientError(f"field {field} of the reply: expected {expected}, got {got}")

    if not isinstance(reply, dict):
        raise ClientError(f"the reply is {type(reply).__name__}, not an object")
    refuse_error(reply)
    for field in ("game_id", "guid"):
        check(isinstance(reply.get(field), str) and 0 < len(reply[field]) <= 200, field, "a text")
    grids = reply.get("frame")
    check(isinstance(grids, list) and 1 <= len(grids) <= MAX_GRIDS, "frame", f"1 to {MAX_GRIDS} grids")
    for grid in grids:
        check(isinstance(grid, list) and 1 <= len(grid) <= SIZE and isinstance(grid[0], list)
              and 1 <= len(grid[0]) <= SIZE, "frame", "grids of up to 64x64 cells")
        check(all(isinstance(row, list) and len(row) == len(grid[0]) for row in grid), "frame",
              "rows of one length")
        cells = list(itertools.chain.from_iterable(grid))
        check(set(map(type, cells)) == {int} and COLOURS.issuperset(cells), "frame",
              "cells that are integers from 0 to 15")
    check(isinstance(reply.get("state"), str) and reply["state"] in STATES, "state", " | ".join(STATES))
    counts = []
    for new, old in (("levels_completed", "score"), ("win_levels", "win_score")):
        field = new if new in reply else old
        optional = new == "win_levels" and field not in reply  # the oldest servers had none
        check(optional or type(reply.get(field)) is int and 0 <= reply[field] <= MAX_COUNT, field,
              f"an integer from 0 to {MAX_COUNT}")
        counts.append(reply.get(field, 0))
    actions = reply.get("available_actions")
    actions = [] if actions is None else actions
    check(isinstance(actions, list), "available_actions", "a list")
    numbers = [ACTIONS.index(name) if isinstance(name, str) and name in ACTIONS else name for name in actions]
    check(all(type(number) is int and 0 <= number <= 7 for number in numbers), "available_actions",
          "numbers from 0 to 7 or names")
    check(isinstance(reply.get("full_reset", False), (bool, type(None))), "full_reset", "true or false")
    check(isinstance(reply.get("action_input"), (dict, type(None))), "action_input", "an object")
    return Frame(reply["game_id"], reply["guid"], tuple(grids), STATES[reply["state"]], *counts,
                 tuple(sorted(set(numbers) - {0})))


def refuse_error(reply):
    if isinstance(reply, dict) and reply.get("error"):
        raise ClientError(f"{shown(reply['error'])}: {shown(reply.get('message'))}")


def quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="", errors="replace")


class Client:
    """The API's commands over a transport. Whatever goes wrong is a ClientError."""

    def __init__(self, transport: Callable):
        self.transport = transport

    def ask(self, method, path, payload=None):
        try:
            reply = self.transport(method, path, payload)
        except ClientError:
            raise
        except Exception as error:  # an injected transport may raise anything
            raise TransportError(f"{method} {path}: {type(error).__name__}", unknown=True) from error
        refuse_error(reply)
        return reply

    def games(self) -> list[dict]:
        """[{game_id, title}]"""
        games = self.ask("GET", "/api/games")
        if not isinstance(games, list) or not all(
                isinstance(game, dict) and isinstance(game.get("game_id"), str) for game in games):
            raise ClientError(f"the list of games: expected [{{game_id, title}}], got {shown(games)}")
        return games

    def open_scorecard(self, tags=()) -> str:
        """-> card_id"""
        reply = self.ask("POST", "/api/scorecard/open", {"tags": list(tags)})
        card_id = reply.get("card_id") if isinstance(reply, dict) else None
        if not isinstance(card_id, str) or not 0 < len(card_id) <= 200:
            raise ClientError(f"field card_id of the reply: expected a text, got {shown(card_id)}")
        return card_id

    def scorecard(self, card_id: str, game_id: str = "") -> dict:
        path = "/".join(["/api/scorecard", *(quoted(part) for part in (card_id, game_id) if part)])
        return self._object(self.ask("GET", path))

    def close_scorecard(self, card_id: str) -> dict:
        return self._object(self.ask("POST", "/api/scorecard/close", {"card_id": card_id}))

    def reset(self, game_id: str, card_id: str, guid: str | None = None) -> Frame:
        """A new play of a game; with guid, that play's level begins again."""
        payload = {"game_id": game_id, "card_id": card_id} | ({"guid": guid} if guid else {})
        return self._frame("RESET", payload)

    def act(self, game_id, guid, action, x=None, y=None, reasoning="") -> Frame:
        """ACTION1..ACTION7; ACTION6 at x, y in cells. A place outside the grid is not sent."""
        if action not in ACTIONS[1:]:
            raise ClientError(f"{shown(action)} is not an action")
        payload = {"game_id": game_id, "guid": guid}
        if action == "ACTION6":
            if not all(type(value) is int and 0 <= value < SIZE for value in (x, y)):
                raise ClientError(f"x={shown(x)} y={shown(y)}: expected integers from 0 to {SIZE - 1}")
            payload |= {"x": x, "y": y}
        if reasoning:
            clean = reasoning[:MAX_REASONING].encode("utf-8", "replace").decode()
            payload |= {"reasoning": clean}
        return self._frame(action, payload)

    def hurry(self):
        """Let no further request be tried twice or take long."""
        getattr(self.transport, "hurry", lambda: None)()

    def disconnect(self):
        getattr(self.transport, "close", lambda: None)()

    def _frame(self, command, payload) -> Frame:
        reply = self.ask("POST", f"/api/cmd/{command}", payload)
        try:
            return read_frame(reply)
        except ClientError as error:  # the server tells of no error
            raise ClientError(str(error), unknown=True) from error

    def _object(self, reply) -> dict:
        if not isinstance(reply, dict):
            raise ClientError(f"the scorecard: expected an object, got {shown(reply)}")
        return reply


# Transports

class LocalTransport:
    """Our own games in this process: an arcade to itself."""

    def __init__(self, arcade: games.Arcade | None = None):
        self.arcade = arcade or games.Arcade()

    def __call__(self, method, path, payload=None):
        status, reply = self.arcade.handle(method, path, payload)
        if status >= 400:
            raise TransportError(f"{method} {path}: {status} {reply['error']}: {reply['message']}", status)
        return reply


class HttpTransport:
    """The API over HTTP; for one episode, whose cookies it keeps (plays stick to a server by their cookie).

    Tried again, at most `retries` times within `deadline` seconds, after 0.5, 1, 2, ... s (a little less, at
    random, so that many do not come back at once) or the Retry-After that the server asks for:

        429, 500, 503       always: the server says that it did not carry the request out
        no connection       always: nothing was sent
        other 5xx, a connection lost after the request was sent, a timeout
                            only where twice does no harm: GET, opening and closing a scorecard, a new play.
                            Not an action, nor RESET of a play: whether they were carried out is `unknown`,
                            and a second one would be another move
    """

    def __init__(self, root_url: str, api_key: str = "", timeout: float = 30.0, retries: int = 5,
                 deadline: float = 120.0, sleep=time.sleep):
        import requests  # takes a while, and only a server needs it

        self.requests, self.session = requests, requests.Session()
        self.session.headers.update({"X-API-Key": api_key, "Accept": "application/json"})
        self.root_url, self.sleep = root_url.rstrip("/"), sleep
        self.timeout, self.retries, self.deadline = timeout, retries, deadline
        self.socket, self.late = None, False  # of the request now; whether it was cut off
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, watched(self))

    def __call__(self, method, path, payload=None):
        end = time.monotonic() + self.deadline
        harmless = method == "GET" or not path.startswith("/api/cmd/") or (
            path.endswith("/RESET") and not (payload or {}).get("guid"))
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, payload, end)
            except TransportError as error:
                refused = error.status is None or error.status == 429 or error.status >= 500
                wait = error.retry_after
                if wait is None:
                    wait = 0.5 * 2**attempt * random.uniform(0.5, 1)
                if not refused or error.unknown and not harmless or attempt == self.retries or (
                        time.monotonic() + wait >= end):
                    raise
            self.sleep(wait)

    def _once(self, method, path, payload, end):
        errors, where = self.requests.exceptions, f"{method} {path}"
        broken = self.requests.packages.urllib3.exceptions.HTTPError  # of reading from raw
        left = max(end - time.monotonic(), 0.001)
        self.socket, self.late = None, False
        watchdog = threading.Timer(left, self._cut_off)  # `timeout` is for each byte, and a head may drip
        watchdog.daemon = True
        watchdog.start()
        try:
            # A redirect would carry the key to another host, and turn a POST into a GET.
            with self.session.request(method, self.root_url + path, json=payload, stream=True,
                                      timeout=min(self.timeout, left), allow_redirects=False) as response:
                status, headers = response.status_code, response.headers
                body = bytearray()
                # Not iter_content: it would wait for a whole block, however slowly that comes.
                while part := response.raw.read1(2**16, decode_content=True):
                    body += part
                    if len(body) > MAX_BODY:
                        raise TransportError(f"{where}: the answer is too long", status, True)
        except (errors.RequestException, broken, OSError) as error:  # its text holds addresses of objects
            unsent = self.socket is None and (
                isinstance(error, (errors.ConnectTimeout, errors.SSLError, errors.ProxyError))
                or "NewConnectionError" in repr(error) or "NameResolutionError" in repr(error))
            late = self.late or time.monotonic() >= end
            what = "the answer is too slow" if late and not unsent else type(error).__name__
            raise TransportError(f"{where}: {what}", unknown=not unsent) from error
        finally:
            watchdog.cancel()
        if self.late:
            raise TransportError(f"{where}: the answer is too slow", unknown=True)
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError) as error:
            if status < 300:
                carried = path.startswith("/api/cmd/")
                raise ClientError(f"{where}: the answer is not JSON", unknown=carried) from error
            reply = None
        if not 200 <= status < 300:
            said = ""
            if isinstance(reply, dict):
                said = f" {shown(reply.get('error'))}: {shown(reply.get('message'))}"
            raise TransportError(f"{where}: HTTP {status}{said}", status,
                                 status >= 500 and status not in (500, 503),
                                 seconds(headers.get("Retry-After")))
        return reply

    def _cut_off(self):
        self.late = True
        if self.socket:
            with contextlib.suppress(OSError):  # not the method of a TLS socket, which another thread reads
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def hurry(self):
        self.retries, self.deadline, self.timeout = 0, min(self.deadline, 10), min(self.timeout, 5)

    def close(self):
        self.session.close()


def watched(transport: HttpTransport):
    """An adapter of requests that tells the transport on which socket an answer is awaited."""
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *args, **options):
            pool = super().get_connection_with_tls_context(*args, **options)
            if "ConnectionCls" not in vars(pool):
                class Connection(pool.ConnectionCls):
                    def getresponse(self):
                        transport.socket = self.sock
                        if transport.late:  # there was no socket yet to be cut off
                            raise TimeoutError
                        return super().getresponse()

                pool.ConnectionCls = Connection
            return pool
    return Adapter()


def seconds(text: str | None) -> float | None:
    """Retry-After where it is a number of seconds (it may also be a date, which is then not waited for)."""
    return float(text) if text and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) else None


# Recordings

class StaticTransport:
    """Replays a recorded session: {"reset": frame, "steps": [{"action", "payload", "response"}, ...],
    "scorecard": {...}}. What differs from the recording is a ClientError: another action or payload, one more
    action, a path that is not the API's. RESET rewinds it (unless the next step recorded is a RESET of the
    play). A payload is the same if it says what the recorded one says and nothing else, game_id, guid,
    card_id and reasoning aside, which are compared only where they are recorded.

    A request that failed fails again: a step has "error", "unknown" and "status" in place of the response,
    and "failures" are such of the scorecard and of RESET before the play began.
    """

    def __init__(self, session: dict):
        self.session, self.place = session, 0
        self.failures = list(session.get("failures", ()))

    def __call__(self, method, path, payload=None):
        session, payload = self.session, payload or {}
        card = {"card_id": "recorded"} | session.get("scorecard", {})
        if method == "GET" and path == "/api/games":
            return [{"game_id": session["reset"]["game_id"], "title": session["reset"]["game_id"]}]
        if method == "POST" and path == "/api/scorecard/open":
            return {"card_id": card["card_id"]}
        if (method, path) == ("POST", "/api/scorecard/close") or method == "GET" and (
                path.split("/")[:4] == ["", "api", "scorecard", quoted(card["card_id"])]
                and path.count("/") in (3, 4)):
            return card
        command = path.removeprefix("/api/cmd/")
        if method != "POST" or command == path or command not in ACTIONS:
            raise TransportError(f"{method} {path}: not in the recording", 404)
        steps = session["steps"]
        step = steps[self.place] if self.place < len(steps) else None
        again = command == "RESET" and payload.get("guid") and step and step["action"] == "RESET"
        if command == "RESET" and not again:
            if self.failures:
                raise failed_again(self.failures.pop(0))
            self.place = 0
            return session["reset"]
        if step is None or step["action"] != command or not same_payload(payload, step["payload"]):
            # Not what it holds: the message is read by the model.
            raise ClientError(f"{command} is not what the recording holds at its step {self.place + 1}")
        self.place += 1
        if "error" in step:
            raise failed_again(step)
        return step["response"]


def failed_again(failure: dict) -> TransportError:
    return TransportError(failure["error"], failure.get("status"), bool(failure.get("unknown")))


def is_failure(value) -> bool:
    return isinstance(value, dict) and isinstance(value.get("error"), str)


def same_payload(sent: dict, recorded: dict) -> bool:
    extra = set(sent) - set(recorded) - {"game_id", "guid", "card_id", "reasoning"}
    return not extra and all(key in sent and type(sent[key]) is type(value) and sent[key] == value
                             for key, value in recorded.items())


def load_session(name: str) -> dict:
    """A session from its file: one JSON object, or lines {"reset": ...}, steps, {"scorecard": ...}.

    Lines may be {"failures": ...} too. A byte order mark before it all is skipped.
    """
    where = f"environment arcagi3: option session={name}"
    path = next((path for path in (Path(name), ROOT / name) if path.is_file()), None)
    if path is None:
        raise BadInput(f"{where}: no such file")
    try:
        text = read_text(path)
        try:
            session = json.loads(text)
        except ValueError:
            session = None
        if not isinstance(session, dict) or "action" in session:
            lines = [json.loads(line) for line in text.split("\n") if line.strip()]
            session = {"steps": [line for line in lines if "action" in line]}
            for line in lines:
                session |= {key: line[key] for key in ("reset", "scorecard", "failures") if key in line}
        session = {"steps": [], "scorecard": {}, "failures": []} | session
        read_frame(session["reset"])
        for number, step in enumerate(session["steps"], 1):
            whole = step["action"] in ACTIONS and isinstance(step["payload"], dict)
            if not whole or not ("response" in step or is_failure(step)):
                raise BadInput(f"{where}: step {number}: expected action, payload and response or error")
        if not isinstance(session["failures"], list) or not all(map(is_failure, session["failures"])):
            raise BadInput(f"{where}: failures: expected a list of such with an error")
        card_id = session["scorecard"].get("card_id", "recorded")
        if not isinstance(card_id, str):
            raise BadInput(f"{where}: field card_id of the scorecard: expected a text, got {shown(card_id)}")
    except BadInput:
        raise
    except ClientError as error:
        raise BadInput(f"{where}: reset: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{where}: cannot be read ({type(error).__name__}: {str(error)[:80]})") from error
    return session


class Recorder:
    """A transport that notes what passes through another one, in the form that StaticTransport replays."""

    def __init__(self, transport):
        self.transport = transport
        self.session = {"reset": None, "steps": [], "scorecard": {}, "failures": []}

    def __call__(self, method, path, payload=None):
        command = path.removeprefix("/api/cmd/")
        opens = command == "RESET" and not (payload or {}).get("guid")
        try:
            reply = self.transport(method, path, payload)
        except ClientError as error:
            failure = {"error": str(error), "unknown": error.unknown, "status": error.status}
            if opens or path == "/api/scorecard/open":
                self.session["failures"].append(failure)
            elif command != path:
                self._step(command, payload, failure)
            raise
        if opens:
            self.session |= {"reset": reply, "steps": []}
        elif command != path:
            self._step(command, payload, {"response": reply})
        elif path.startswith("/api/scorecard/") and isinstance(reply, dict):
            self.session["scorecard"] |= reply
        return reply

    def _step(self, command, payload, outcome):
        step = {"action": command, "payload": {axis: payload[axis] for axis in "xy" if axis in payload}}
        reasoning = {"reasoning": payload["reasoning"]} if payload.get("reasoning") else {}
        self.session["steps"].append(step | outcome | reasoning)

    def lines(self) -> list[str]:
        """The recording as the lines of a JSONL file."""
        session = self.session
        parts = [{"reset": session["reset"]}, *session["steps"], {"scorecard": session["scorecard"]}]
        parts += [{"failures": session["failures"]}] if session["failures"] else []
        return [json.dumps(part) + "\n" for part in parts]

    def __getattr__(self, name):  # hurry and close, where the other one has them
        return getattr(self.transport, name)
