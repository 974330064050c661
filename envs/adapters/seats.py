"""Games of several seats: the policy has one; the others are played, or are the policy as well.

An environment derives its Config, its Env and its episodes from those here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import typing

import envs
from envs import BadInput, Message, Step, Task
from envs.adapters import seeded

SIZES = {"train": 100_000, "test": 256}
MOST = 1_000  # characters of a reply, from its end, that a game reads: bounds the time of its expressions
PROBES, PROBE_MOVES = 3, 40  # games at first, of so many moves, that tell whether random seats find moves


@dataclasses.dataclass(frozen=True)
class Config:
    """A subclass has a field more, `game`: names with commas."""

    num_players: int = 0
    """seats; 0: two, or what the game takes"""
    opponent: str = "random"
    """who has the other seats: random, or path/to/file.py:function, f(observation, rng) -> reply"""
    self_play: bool = False
    """the policy has all seats, its own being the first to move; else it has one, by turns"""
    max_turns: int = 200
    """moves of a game, of all seats, after which it is cut"""


class Games(envs.Env):
    multi_turn = True
    Game: type  # of its episodes, derived from the one below

    def __init__(self, config):
        super().__init__(config)
        self.name = type(self).__name__.lower()
        envs.check_option(self.name, config, config.max_turns >= 1, "max_turns", "1 or more")
        self.function, self.seats = None, {}  # seats: the number of them in each game, by its name
        if config.opponent != "random":
            self.function = envs.load_object(config.opponent, f"environment {self.name}: option opponent")
        self.blocking = getattr(self.function, "blocking", False)
        for game in map(str.strip, config.game.split(",")):
            where = f"environment {self.name}: game {game}"
            with envs.as_bad_input(f"{where} cannot be played"), seeded(game):
                self.seats[game] = self.load(game)
            if self.seats[game] > 1 and not self.function and not config.self_play:
                self.probe(game)

    def load(self, game: str) -> int:
        """Look whether a game can be played; it may raise whatever it likes.  -> the number of its seats"""
        raise NotImplementedError

    def check_name(self, game: str, known, shown: list[str]) -> None:
        """BadInput that shows some of the names, unless the name is known."""
        if game not in known:
            raise BadInput(f"environment {self.name}: unknown game {game!r}{envs.hint(game, known)}; "
                           f"known are {', '.join(shown)}")

    def count_seats(self, reset: typing.Callable[[int], None]) -> int:
        """The number that is asked for, or the first that a game does not refuse with an AssertionError."""
        counts = [self.config.num_players] if self.config.num_players else [2, 1, 3, 4, 5, 6]
        for count in counts:
            with contextlib.suppress(AssertionError if count != counts[-1] else ()):
                reset(count)
                return count

    def probe(self, game: str) -> None:
        """BadInput where random seats do not know what to do."""
        for seed in range(PROBES):
            task = Task(f"{game} {seed}", "", [], {"game": game, "seed": seed, "seat": -1})
            if "error" in self.Game(self, task, "").over.info:
                raise BadInput(f"environment {self.name}: game {game}: a random seat finds no legal move in "
                               "what it is told; expected opponent=path/to/file.py:function, self_play=true "
                               "or, where it is an option, moves")

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return SIZES[split]

    def task(self, split: str, index: int) -> Task:
        """Seeds of the splits are apart; games take turns, and so does the policy's seat in each."""
        self.check_index(split, index)
        turn, which = divmod(index, len(self.seats))
        game = list(self.seats)[which]
        data = {"game": game, "seed": 2 * index + (split == "test"), "seat": turn % self.seats[game]}
        task = Task(f"{self.name}-{split}-{index}", f"{self.name}/{game}", [], data)
        return dataclasses.replace(task, messages=self.Game(self, task, "").prompt())

    def start(self, task: Task, seed: int) -> Game:
        return self.Game(self, task, f"{seed} {task.id}")


class Game(envs.Episode):
    """Seats are numbered by the game; Task.seat and Step.seat_rewards count from the policy's `own`.

    With self_play, where another seat is to move, a step has that seat's conversation as its child, and the
    child's reply is the move. The conversations are apart: each holds what its seat was told and has said.
    A subclass knows the game: reset, turn, news, move, random_reply and rewards.
    """

    def __init__(self, env: Games, task: Task, key: str):
        """Until the policy's first turn all comes from the task, from then on from `key`."""
        self.env, self.task, self.key = env, task, task.id
        self.seats, self.moves, self.invalid = env.seats[task.data["game"]], 0, 0
        self.talk: list[list[Message]] = [[] for _ in range(self.seats)]
        self.over: Step | None = None
        self.reset(task.data["game"], task.data["seed"])
        self.own = self.turn() if env.config.self_play else task.data["seat"]
        self.advance()
        self.key = key

    def reset(self, game: str, seed: int) -> None:
        raise NotImplementedError

    def turn(self) -> int | None:
        """The seat that moves next; None: the game is over."""
        raise NotImplementedError

    def news(self, seat: int) -> str:
        """What the seat was told since it was asked last, without its own words."""
        raise NotImplementedError

    def move(self, seat: int, text: str) -> bool:
        """Make a move.  -> whether it is valid. A seat with whose text the game fails has lost."""
        raise NotImplementedError

    def random_reply(self, seat: int, rng: random.Random) -> str | None:
        """A legal move; None: it knows of none, and the game ends without a verdict."""
        raise NotImplementedError

    def rewards(self) -> dict[int, float]:
        """Of the seats, as far as there are some. What is no number is -1: a reason in the wrong place."""
        raise NotImplementedError

    def prompt(self) -> list[Message]:
        """What the policy's seat reads first."""
        return self.talk[self.own] or self.hear(self.own)

    def step(self, reply: str) -> Step:
        return self.over or self.say(self.own, reply) or self.advance()

    def resume(self, replies: list[str]) -> Step:
        return self.over or self.say(self.turn(), "".join(replies[:1])) or self.advance()

    def end(self, reason: str) -> Step:
        """A reply without an end loses the game; for another limit of the caller nobody is to blame."""
        return self.over or self.finish(self.lost_by(self.own) if reason == "length" else {}, truncated=True)

    def close(self) -> None:
        self.over = self.over or self.finish({}, truncated=True)

    def advance(self) -> Step:
        """The other seats move, until it is the policy's turn."""
        config = self.env.config
        most = PROBE_MOVES if self.own < 0 else config.max_turns
        while (seat := self.turn()) is not None and self.moves < most:
            news = self.hear(seat)
            if seat == self.own:
                return Step(news, 0.0, False, False, self.info(0.0))
            if config.self_play:
                child = Task(f"{self.task.id}-{self.moves}", self.task.source, [*self.talk[seat]], {},
                             seat=(seat - self.own) % self.seats)
                return Step([], 0.0, False, False, self.info(0.0), children=((child, Reply()),))
            rng = random.Random(f"{self.key} {self.moves}")
            if self.env.function:
                said = "\n".join(message["content"] for message in self.talk[seat])
                reply = self.env.function(said, rng)
            else:
                reply = self.random_reply(seat, rng)
            if reply is None:
                return self.finish({}, truncated=True, error=1.0)
            if over := self.say(seat, reply):
                return over
        return self.finish(self.rewards(), truncated=seat is not None)

    def hear(self, seat: int) -> list[Message]:
        self.talk[seat].append({"role": "user", "content": self.news(seat) or "It is your turn."})
        return self.talk[seat][-1:]

    def say(self, seat: int, reply: str) -> Step | None:
        """Make a move.  -> the last step, where the game fails with it"""
        self.talk[seat].append({"role": "assistant", "content": reply})
        text = re.sub(r"(\s)\s+", r"\1", envs.final_part(reply)[-MOST:])
        try:
            valid = self.move(seat, text.encode(errors="replace").decode())
        except Exception:  # the game's programmers had not thought of such a text
            return self.finish(self.lost_by(seat))
        self.moves += 1
        self.invalid += seat == self.own and not valid
        return None

    def lost_by(self, seat: int) -> dict[int, float]:
        return {other: -1.0 if other == seat else 1.0 for other in range(self.seats)}

    def info(self, correct: float) -> dict:
        return {"correct": float(correct), "moves": float(self.moves), "invalid_moves": float(self.invalid)}

    def finish(self, rewards: dict[int, float], truncated: bool = False, **more) -> Step:
        """A win is the best reward of all seats, above 0; of a game for one, all that there is: 1."""
        earned = [rewards.get((self.own + k) % self.seats, 0.0) for k in range(self.seats)]
        earned = tuple(float(reward) if envs.is_number(reward) else -1.0 for reward in earned)
        won = earned[0] >= 1 if self.seats == 1 else earned[0] > 0 and earned[0] == max(earned)
        self.over = Step([], earned[0], not truncated, truncated, {**self.info(won), **more},
                         seat_rewards=earned if self.env.config.self_play else ())
        return self.over


class Reply(envs.Episode):
    """Another seat's, which goes to Game.resume."""

    def step(self, reply: str) -> Step:
        return Step([], 0.0, True, False, {"correct": 0.0})
