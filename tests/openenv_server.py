"""Two games on a server of OpenEnv's own classes:  python tests/openenv_server.py GAME PORT [SESSIONS]

sum: one reply, the server says `correct`, tasks by seeds. guess: several replies find a number, listed tasks.
tools, pair, fickle: what the adapter refuses.
"""

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

SIZES = {"train": 30, "validation": 5, "extra": 2}


class Answer(Action):
    answer: str = Field(max_length=30_000)


class Guess(Action):
    guess: str = Field(pattern=r"^[0-9]+$")


class Pair(Action):
    first: str
    second: str


class Question(Observation):
    text: str = ""
    turns: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0

    def __init__(self):
        super().__init__()
        Game.open += 1
        self.turns = 0

    def close(self):
        Game.open -= 1

    @property
    def state(self):
        return State(step_count=Game.open)


class Sum(Game):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.numbers = seed, 7 * seed % 100
        metadata = {"secret": sum(self.numbers)}
        return Question(text="{} + {} = ?".format(*self.numbers), metadata=metadata)

    def step(self, action, timeout_s=None, **kwargs):
        if action.answer == "sleep":
            time.sleep(30)
        if action.answer == "die":
            os._exit(1)
        if action.answer == "crash":
            raise ValueError("crashed")
        right = action.answer.strip() == str(sum(self.numbers))
        return Question(done=True, reward=0.5 + 0.5 * right, metadata={"correct": right})


class Number(Game):
    def reset(self, seed=None, episode_id=None, split="train", index=0, **kwargs):
        self.number, self.turns = 100 * list(SIZES).index(split) + index, 0
        return Question(text=f"A number of {split}?")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        guess = int(action.guess[:9])
        if guess == self.number:
            return Question(text="yes", done=True, reward=1.0 - 0.1 * self.turns, turns=self.turns)
        return Question(text="less" if guess > self.number else "more", reward=0.1, turns=self.turns)

    def list_splits(self):
        return list(SIZES)

    def num_tasks(self, split):
        return SIZES[split]

    def get_task(self, split, index):
        return {"id": f"{split}-{index}"}


class Fickle(Sum):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.numbers = 0, 0
        return Question(text=str(time.time_ns()))


GAMES = {"sum": (Sum, Answer), "guess": (Number, Guess), "tools": (Sum, Action), "pair": (Sum, Pair),
         "fickle": (Fickle, Answer)}

if __name__ == "__main__":
    game, port, sessions = (*sys.argv[1:], "4")[:3]
    app = create_fastapi_app(*GAMES[game], Question, max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
