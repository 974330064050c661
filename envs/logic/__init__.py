"""Eight families of generated logic tasks, each with a verifier and a reference solution.

    0 dyck_language        close what is open            5 (the same family, other tasks)
    1 game_of_24           reach a target, or "None"     6 boolean_expressions  which statements are true
    2 operation            newly defined operators       7 sudoku               fill the grid
    3 cryptarithm          letters for digits            8 dyck_language_reasoning_errors
    4 dyck_language2       open what is closed             name the wrong lines of a stack trace

A task is a number: `task_id = type * 100_000_000 + seed`, and all that is random in it, wording included,
comes from `random.Random(seed)`. Seeds below 90,000,000 are train, the others test. A hash of the problem
says besides which of the two it belongs to, and a seed draws until it meets a problem of its split, so that
no problem and no prompt is in both. Prompts and replies have two styles: `chat`, for language models, and
`words`, short and with a space between any two symbols, for small models that read a token per word.

A reply is what follows its last `</think>`, and is read by strict grammars within fixed lengths: no text is
ever executed, and any text gets a score of 0 or 1 at once. docs/logic.md has the rules.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from typing import Literal

from envs import BadInput, Env, Episode, Step, Task, check_option, final_part
from envs.logic.boolean_expressions import LABELS, Boolean
from envs.logic.common import Unreadable
from envs.logic.cryptarithm import Cryptarithm
from envs.logic.dyck import Dyck, Dyck2
from envs.logic.game_of_24 import Game24
from envs.logic.operation import Operation
from envs.logic.reasoning_errors import Errors
from envs.logic.sudoku import Sudoku

DYCK2 = Dyck2()
TYPES = (Dyck(), Game24(), Operation(), Cryptarithm(), DYCK2, DYCK2, Boolean(), Sudoku(), Errors())

SEEDS = 100_000_000  # of a type; a task's number is type * SEEDS + seed
TEST_SEEDS = 90_000_000  # from here on a seed is a test task
TEST_SHARE = 10  # one problem in so many belongs to the test split
DRAWS = 10_000_000  # in search of a problem that fits the options and the split
CHECKED, CHECK_DRAWS = 4, 40_000  # tasks of a split that `make` tries, and the draws that each may take

# (option, option, lowest, highest): the first is at most the second, and both lie between the others.
BOUNDS = (
    ("dyck_min_length", "dyck_max_length", 2, 200), ("dyck2_min_length", "dyck2_max_length", 2, 200),
    ("errors_min_length", "errors_max_length", 2, 200), ("dyck_pairs", "dyck_pairs", 1, 8),
    ("dyck2_min_pairs", "dyck2_max_pairs", 1, 8), ("errors_min_pairs", "errors_max_pairs", 2, 8),
    ("game_min_numbers", "game_max_numbers", 2, 6),
    ("operation_max_symbols", "operation_max_symbols", 1, 3),
    ("operation_min_operands", "operation_max_operands", 2, 6),
    ("operation_max_number", "operation_max_number", 1, 99),
    ("operation_max_value", "operation_max_value", 9, 99_999),
    ("cryptarithm_min_letters", "cryptarithm_max_letters", 3, 8),
    ("cryptarithm_max_operators", "cryptarithm_max_operators", 1, 3),
    ("boolean_min_statements", "boolean_max_statements", 2, len(LABELS)),
    ("boolean_min_depth", "boolean_max_depth", 0, 6), ("boolean_max_number", "boolean_max_number", 1, 99),
    ("sudoku_min_givens", "sudoku_max_givens", 22, 80), ("errors_min_errors", "errors_max_errors", 0, 20),
    ("train_tasks", "train_tasks", 1, TEST_SEEDS), ("test_tasks", "test_tasks", 1, SEEDS - TEST_SEEDS),
)


@dataclasses.dataclass(frozen=True)
class Config:
    types: str = "all"
    """families, names or numbers with commas; dyck_language2 is both 4 and 5"""
    style: Literal["chat", "words"] = "chat"
    """prompts in English; or short ones, every symbol a word, for small models"""
    train_tasks: int = 1_000_000
    """tasks of the train split, the types in turn"""
    test_tasks: int = 512
    """tasks of the test split"""
    dyck_pairs: int = 3
    """dyck_language: pair types of a task, of the eight there are"""
    dyck_min_length: int = 40
    """dyck_language: shortest complete sequence [brackets]; lengths are even"""
    dyck_max_length: int = 60
    """dyck_language: longest complete sequence [brackets]"""
    game_min_numbers: int = 4
    """game_of_24: fewest numbers"""
    game_max_numbers: int = 6
    """game_of_24: most numbers"""
    operation_max_symbols: int = 3
    """operation: most newly defined symbols"""
    operation_conditions: bool = True
    """operation: half of the definitions have a condition"""
    operation_min_operands: int = 3
    """operation: fewest operands of the expression"""
    operation_max_operands: int = 6
    """operation: most operands"""
    operation_max_number: int = 20
    """operation: largest operand"""
    operation_max_value: int = 99_999
    """operation: largest absolute value, on the way too; in style=words at most 999, a word for each"""
    cryptarithm_min_letters: int = 4
    """cryptarithm: fewest different letters"""
    cryptarithm_max_letters: int = 8
    """cryptarithm: most different letters"""
    cryptarithm_max_operators: int = 3
    """cryptarithm: most operators; one of three is a *"""
    dyck2_min_pairs: int = 3
    """dyck_language2: fewest pair types"""
    dyck2_max_pairs: int = 8
    """dyck_language2: most pair types"""
    dyck2_min_length: int = 6
    """dyck_language2: shortest complete sequence [brackets]; lengths are even"""
    dyck2_max_length: int = 60
    """dyck_language2: longest complete sequence [brackets]"""
    boolean_min_statements: int = 3
    """boolean_expressions: fewest statements"""
    boolean_max_statements: int = 8
    """boolean_expressions: most statements"""
    boolean_min_depth: int = 2
    """boolean_expressions: least nesting of not, and, or"""
    boolean_max_depth: int = 6
    """boolean_expressions: deepest nesting"""
    boolean_max_number: int = 99
    """boolean_expressions: largest number in a comparison"""
    sudoku_min_givens: int = 22
    """sudoku: fewest givens"""
    sudoku_max_givens: int = 45
    """sudoku: most givens, at least 26 (few grids can be dug further)"""
    errors_min_pairs: int = 2
    """dyck_language_reasoning_errors: fewest pair types"""
    errors_max_pairs: int = 4
    """dyck_language_reasoning_errors: most pair types"""
    errors_min_length: int = 10
    """dyck_language_reasoning_errors: shortest sequence [brackets], a line of the trace each"""
    errors_max_length: int = 30
    """dyck_language_reasoning_errors: longest sequence [brackets]"""
    errors_min_errors: int = 2
    """dyck_language_reasoning_errors: fewest corrupted lines"""
    errors_max_errors: int = 5
    """dyck_language_reasoning_errors: most corrupted lines"""

    def __post_init__(self):
        check = functools.partial(check_option, "logic", self)
        for least, most, low, high in BOUNDS:
            check(low <= getattr(self, most) <= high, most, f"{low} to {high}")
            check(low <= getattr(self, least) <= getattr(self, most), least,
                  f"{low} to {most} ({getattr(self, most)})")
        for name in ("dyck", "dyck2"):
            low, high = getattr(self, f"{name}_min_length"), getattr(self, f"{name}_max_length")
            check(low < high or low % 2 == 0, f"{name}_min_length", f"an even number up to {name}_max_length")
        check(self.sudoku_max_givens >= 26, "sudoku_max_givens", "26 to 80")
        check(self.errors_max_errors <= self.errors_min_length, "errors_max_errors",
              f"at most errors_min_length ({self.errors_min_length})")
        worded = "operation" in [TYPES[number].name for number in self.numbers] and self.style == "words"
        check(not worded or self.operation_max_value <= 999, "operation_max_value",
              "9 to 999 in style=words (a word for each)")

    @property
    def numbers(self) -> list[int]:
        """The selected types, by number."""
        everything = list(range(len(TYPES)))
        if self.types == "all":
            return everything
        found = []
        for word in map(str.strip, self.types.split(",")):
            chosen = [n for n in everything if word in (str(n), TYPES[n].name)]
            if not chosen or set(chosen) & set(found):
                known = ", ".join(f"{n} {family.name}" for n, family in enumerate(TYPES))
                raise BadInput("environment logic: option types: expected all, or different ones of "
                               f"{known}, with commas, got {self.types!r}")
            found += chosen
        return found


class Logic(Env):
    """One reply per task; reward 1 if it is correct, else 0."""

    Config = Config

    def __init__(self, config: Config):
        super().__init__(config)
        for number in config.numbers:
            check_type(number, config)

    @property
    def vocabulary(self) -> list[str] | None:
        """Words for a word-level tokenizer (None unless style is words)."""
        if self.config.style != "words":
            return None
        texts = [TYPES[number].vocabulary(self.config) for number in self.config.numbers]
        return list(dict.fromkeys(" ".join(texts).split()))

    def num_tasks(self, split: str) -> int:
        self.check_split(split)
        return self.config.train_tasks if split == "train" else self.config.test_tasks

    def task(self, split: str, index: int) -> Task:
        """The types in turn: index k is of the selected type k mod their number."""
        self.check_index(split, index)
        seed, which = divmod(index, len(self.config.numbers))
        seed += TEST_SEEDS if split == "test" else 0
        return self.by_id(encode(self.config.numbers[which], seed))

    def by_id(self, task_id: int) -> Task:
        """The task of a number, of any type, with the options of this environment."""
        number, seed = decode(task_id)
        check_type(number, self.config)
        data, prompt = make_problem(number, seed, self.config)
        message = {"role": "user", "content": prompt}
        return Task(str(task_id), f"logic/{TYPES[number].name}", [message], {"type": number, **data})

    def start(self, task: Task, seed: int) -> Episode:
        return Attempt(TYPES[task.data["type"]], task.data, self.config.style)

    def solution(self, task: Task) -> str:
        return TYPES[task.data["type"]].reference(task.data, self.config.style)


class Attempt(Episode):
    def __init__(self, family, data, style):
        self.family, self.data, self.style = family, data, style

    def step(self, reply: str) -> Step:
        try:
            correct = self.family.judge(final_part(reply), self.data, self.style)
        except Unreadable:
            correct = False
        return Step([], float(correct), True, False, {"correct": float(correct)})


def encode(number: int, seed: int) -> int:
    """The number of a task: its type times 100,000,000 plus its seed."""
    if not 0 <= number < len(TYPES):
        raise BadInput(f"environment logic: type {number}: expected 0 to {len(TYPES) - 1}")
    if not 0 <= seed < SEEDS:
        raise BadInput(f"environment logic: seed {seed}: expected 0 to {SEEDS - 1}")
    return number * SEEDS + seed


def decode(task_id: int) -> tuple[int, int]:
    """(type, seed) of a task's number."""
    number, seed = divmod(task_id, SEEDS)
    if not 0 <= number < len(TYPES):
        raise BadInput(f"environment logic: task {task_id}: type {number} is unknown, expected 0 to "
                       f"{len(TYPES) - 1}")
    return number, seed


def is_test(family: str, key) -> bool:
    """Whether a problem belongs to the test split: a property of the problem, not of its wording."""
    return zlib.crc32(repr((family, key)).encode()) % TEST_SHARE == 0


@functools.lru_cache(maxsize=1024)  # half a second for all types
def check_type(number, config):
    """Options that admit no problem, or hardly any, fail here and not amid training.

    Tasks later may take many more draws than these few may, so that none of a million finds nothing.
    """
    for first in (0, TEST_SEEDS):
        for seed in range(first, first + CHECKED):
            make_problem(number, seed, config, CHECK_DRAWS)


def make_problem(number: int, seed: int, config: Config, draws: int = DRAWS) -> tuple[dict, str]:
    """(data, prompt) of a task: the first draw that is of the seed's split and can be completed."""
    family, rng = TYPES[number], random.Random(seed)
    if number == 5:
        rng.random()  # else the tasks of types 4 and 5, which are one family, would be the same
    for _ in range(draws):
        data = family.draw(rng, config)
        if data is not None and is_test(family.name, family.key(data)) == (seed >= TEST_SEEDS):
            data = family.complete(data, rng, config)
            if data is not None:
                if config.style == "words":
                    return data, family.words(data)
                return data, rng.choice(family.wordings).format(**family.fields(data))
    split = "test" if seed >= TEST_SEEDS else "train"
    raise BadInput(f"environment logic: the options of {family.name}: expected a {split} problem among "
                   f"{draws} draws, found none; they leave too few")
