"""Games of a running OpenEnv server, each episode in a session of its own: docs/openenv.md."""

import contextlib
import dataclasses

from envs import Env, Episode, Task, as_bad_input, check_option
from envs.adapters.openenv_client import Game, describe

TEST_SEEDS = 256  # seeds of the test split where a server lists no tasks; those behind are the train split's


@dataclasses.dataclass(frozen=True)
class Config:
    url: str
    """the server, such as http://127.0.0.1:8000"""
    action: str = ""
    """the action's field that gets the reply; json: the reply holds the fields; empty: the only text field"""
    observation: str = ""
    """the observation's field that the model reads; empty: all of them, as JSON"""
    splits: str = "train,test"
    """which of the server's splits are for training and for evaluation, where it lists its tasks"""
    seeds: int = 10_000
    """training tasks of a server that lists none: `reset` gets a seed"""
    max_turns: int = 20
    """replies to a task, at most"""
    solved_at: float = 1.0
    """sum of rewards that is correct, where the server says neither `correct` nor `success`"""
    timeout: float = 60.0
    """longest wait for an answer of the server [s]"""

    def __post_init__(self):
        check_option("openenv", self, self.url.startswith(("http://", "https://")), "url", "http://host:port")
        for option in ("seeds", "max_turns", "timeout"):
            check_option("openenv", self, 0 < getattr(self, option) < float("inf"), option, "more than 0")
        check_option("openenv", self, len({*self.splits.split(",")}) == 2, "splits", "two different names")


class OpenEnv(Env):
    """A reply is an action, until the server says that the game is over."""

    Config = Config
    blocking = multi_turn = True

    def __init__(self, config: Config):
        super().__init__(config)
        with as_bad_input(f"environment openenv: option url={config.url}"):
            self.server = describe(config)
        names = zip(self.splits, config.splits.split(","), strict=True)
        self.theirs = dict(names) if self.server.tasks else {}
        self.sizes = {"train": config.seeds, "test": TEST_SEEDS}
        if self.theirs:
            self.sizes = {split: self.server.tasks[name] for split, name in self.theirs.items()}

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return self.sizes[split]

    def task(self, split: str, index: int) -> Task:
        """The server is asked for the first observation, which is the prompt."""
        self.check_index(split, index)
        begin = {"seed": index if split == "test" else TEST_SEEDS + index}
        if self.theirs:
            begin = {"split": self.theirs[split], "index": index}
        task = Task(f"openenv-{split}-{index}", f"openenv/{self.server.name}", [], begin)
        with as_bad_input(f"environment openenv: option url={self.config.url}: reset of {begin}"):
            with contextlib.closing(self.start(task, 0)) as game:
                return dataclasses.replace(task, messages=[game.begin()])

    def start(self, task: Task, seed: int) -> Episode:
        return Game(self.config, self.server, task)
