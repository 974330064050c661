"""Countdown: combine the given integers, each exactly once, into the target with + - * /.

    nums [6, 18, 14], target 38:   18 + 14 = 32; 32 + 6 = 38      or      18 + 14 + 6

A problem is made by playing a random legal game on random numbers and taking its result as the target, so it
has a solution. Three styles of prompt and reply:

    compact   `6 18 14 -> 38`, answered by the steps with their results; for small word-level models
    r1        a chat that asks to think, then to give the expression in <answer> </answer>
    plain     the same as plain text, for base models without a chat template

Whether a problem belongs to train or test is a hash of the problem itself, so no options, seeds or machines
bring a test problem into training. A reply is read by a strict grammar and computed exactly; no text is ever
executed. docs/countdown.md has the options and the rules of the verifier.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import random
import re
import warnings
import zlib
from fractions import Fraction
from typing import Literal, NamedTuple

from envs import BadInput, Env, Episode, Step, Task, check_option, read_rows

MAX_OPERANDS = 6  # the exact solver's time grows about tenfold with each further number
MAX_VALUE = 1_000_000  # of a number or target
MAX_ANSWER = 1_000  # characters of an answer that are read at all: bounds parsing and the size of integers
MAX_DEPTH = 100  # nesting of an answer's expression; six numbers need five levels and some minus signs
TEST_SHARE = 10  # one problem in so many belongs to the test split
GAMES = 20_000  # random games played in search of a problem that fits the options
DATA_TEST_ROWS = 1_024  # the first rows of a data file are the test split
DATA_TRIED = 64  # rows of it that are solved at the start

SYSTEM = "You are a careful puzzle solver. You reason before you answer, and you check your arithmetic."
PUZZLE = """Numbers: {numbers}
Target: {target}

Write an arithmetic expression whose value is exactly the target. Use every number above exactly once. \
Allowed: {operators} and parentheses.
"""
R1_PROMPT = PUZZLE + """
Think inside <think> </think>. Then write the expression, and nothing else, inside <answer> </answer>: \
the answer to the numbers 3 4 5 with the target 4 would be <answer>5 - (4 - 3)</answer>."""
PLAIN_PROMPT = """A puzzle, and a careful solution. The solver first thinks inside <think> </think>, then \
writes the expression, and nothing else, inside <answer> </answer>: the answer to the numbers 3 4 5 with the \
target 4 would be <answer>5 - (4 - 3)</answer>.

Puzzle
""" + PUZZLE + """
Solution
<think>"""
OPERATOR_NAMES = {"+": "addition +", "-": "subtraction -", "*": "multiplication *", "/": "division /"}


@dataclasses.dataclass(frozen=True)
class Config:
    """The options."""

    min_operands: int = 3
    """fewest numbers of a problem, from 2"""
    max_operands: int = 3
    """most numbers of a problem, to 6"""
    max_number: int = 20
    """numbers are 1 to this"""
    min_target: int = 1
    """smallest target"""
    max_target: int = 60
    """largest target"""
    max_intermediate: int = 99
    """compact: results of steps are integers from 0 to this"""
    operators: str = "+-"
    """the operators that a reply may use"""
    style: Literal["compact", "r1", "plain"] = "compact"
    """form of prompt and reply: for small word-level models, for chat models, for base models"""
    draw: Literal["game", "uniform"] = "game"
    """game: the target is the result of random play; uniform: it is drawn first, then up to four numbers"""
    held_out: Literal["problems", "parts"] = "problems"
    """what test tasks have that training tasks do not: problems; or parts, targets and sets of numbers"""
    trace: Literal["solution", "search", "tries"] = "solution"
    """what reference replies hold before the answer: its steps, or a search for it"""
    max_trace_steps: int = 64
    """steps of a search trace that may lie in dead ends"""
    good_tries: float = 0.0
    """tries: share that is drawn from those that succeed"""
    skill: Literal["solver", "mixed"] = "solver"
    """whose replies the reference replies are; mixed: novices' too, for SFT"""
    novice_share: float = 0.7
    """mixed: share of replies that are a novice's"""
    difficulty: bool = False
    """name the source after the operand count: countdown/3, countdown/4, ..."""
    data: str = ""
    """problems of a .parquet or .jsonl file or a hub data set, in place of generated ones"""
    seed: int = 0
    """other problems, same splits"""
    train_tasks: int = 1_000_000
    """tasks of the train split"""
    test_tasks: int = 512
    """tasks of the test split; fewer where there are not so many problems"""

    def __post_init__(self):
        check = functools.partial(check_option, "countdown", self)
        check(2 <= self.min_operands <= MAX_OPERANDS, "min_operands", f"2 to {MAX_OPERANDS}")
        check(self.min_operands <= self.max_operands <= MAX_OPERANDS, "max_operands",
              f"min_operands ({self.min_operands}) to {MAX_OPERANDS}")
        top, why = MAX_VALUE, ""
        if self.style == "compact":
            check(1 <= self.max_intermediate <= 9_999, "max_intermediate", "1 to 9999 (a word for each)")
            top, why = self.max_intermediate, " (max_intermediate, in style=compact)"
        check(1 <= self.max_number <= top, "max_number", f"1 to {top}{why}")
        check(1 <= self.max_target <= top, "max_target", f"1 to {top}{why}")
        check(1 <= self.min_target <= self.max_target, "min_target", f"1 to max_target ({self.max_target})")
        check(self.draw == "game" or self.max_operands <= 4, "draw",
              "game, where max_operands is over 4 (it takes long to see that numbers do not make a target)")
        check(self.operators and set(self.operators) <= set("+-*/")
              and len(set(self.operators)) == len(self.operators), "operators", "distinct ones of + - * /")
        check(0 <= self.max_trace_steps <= 10_000, "max_trace_steps", "0 to 10000")
        check(0 <= self.novice_share <= 1, "novice_share", "0 to 1")
        check(0 <= self.good_tries <= 1, "good_tries", "0 to 1")
        four = self.min_operands == self.max_operands == 4
        check(self.trace != "tries" or four and self.style == "compact", "trace",
              "tries only together with style=compact min_operands=4 max_operands=4")
        check(self.train_tasks >= 1, "train_tasks", "1 or more")
        check(self.test_tasks >= 1, "test_tasks", "1 or more")


def vocabulary(max_intermediate: int) -> list[str]:
    """The words of compact prompts and replies, `=` and `;` aside: a tokenizer can leave these two out, since
    ` = ` belongs between `op INT` and INT, and `; ` between any other two adjacent integers."""
    return [str(n) for n in range(max_intermediate + 1)] + "+ - * / -> : | x".split()  # x: a dead end


class Countdown(Env):
    """One reply per task; reward 1 if it is correct, else 0."""

    Config = Config
    _test = {}  # (class, Config) -> test problems, drawn when first asked for

    def __init__(self, config: Config):
        super().__init__(config)
        compact = config.style == "compact"
        limit = config.max_intermediate if compact else math.inf
        # Games and search traces stay within whole numbers in every style; the solver only in compact.
        self._game_rules = Rules(config.operators, limit, True)
        self._rules = Rules(config.operators, limit, compact)
        self._rows = load_rows(config) if config.data else None
        if self._rows:
            self._check_solvable()
        self.task("train", 0)  # options that admit no problem fail here

    @property
    def vocabulary(self) -> list[str] | None:
        """Words for a word-level tokenizer (None unless style is compact)."""
        return vocabulary(self.config.max_intermediate) if self.config.style == "compact" else None

    def num_tasks(self, split: str) -> int:
        """Tasks in the split; fewer than test_tasks where there are not so many distinct problems."""
        self.check_split(split)
        if self._rows:
            return len(self._rows[split])
        return self.config.train_tasks if split == "train" else len(self._test_problems())

    def task(self, split: str, index: int) -> Task:
        self.check_index(split, index)
        if self._rows:
            nums, target = self._rows[split][index]
        elif split == "test":
            nums, target = self._test_problems()[index]
        else:
            nums, target = self._train_problem(index)
        source = f"countdown/{len(nums)}" if self.config.difficulty else "countdown"
        if split == "test" and self.config.held_out == "parts" and not self._rows:
            source += "/new_target" if is_test([], target) else "/new_numbers"
        return Task(f"countdown-{split}-{index}", source, self._prompt(nums, target),
                    {"nums": list(nums), "target": target})

    def start(self, task: Task, seed: int) -> Episode:
        return Attempt(self.config, task.data["nums"], task.data["target"])

    def solution(self, task: Task) -> str | None:
        """A reply in the style's form (None: the problem has no solution within the options).

        Full marks, except for the novices' rows of skill=mixed. The same task gives the same text.
        """
        nums, target = task.data["nums"], task.data["target"]
        if self.config.skill == "mixed":
            rng = random.Random(f"{self.config.seed} mixed {task.id}").random
            steps = None
            if rng() < self.config.novice_share:
                steps = random_game(nums, self._game_rules, rng)
            elif self.config.trace == "solution":
                steps = random_solution(nums, target, self._game_rules, rng)
            if steps:  # else the game got stuck, the search took too long, or its trace is to be seen
                return self._reply(nums, steps)
        best = solve(nums, target, self._rules)
        if best is None or self.config.trace == "solution":
            return best and self._reply(nums, steps_of(best), best)
        if self.config.trace == "tries" and len(nums) == 4:  # rows of data may have others
            rng = random.Random(f"{self.config.seed} tries {task.id}").random
            tries, steps = search_by_tries(nums, target, self._game_rules, self.config.good_tries, rng)
            return f"{compact_tries(tries)} | {compact_steps(steps)}"
        if self.config.trace == "tries":
            return self._reply(nums, steps_of(best))
        rng, room = random.Random(f"{self.config.seed} trace {task.id}").random, self.config.max_trace_steps
        stream, steps = search_stream(nums, target, steps_of(best), self._game_rules, room, rng)
        return self._reply(nums, steps, stream=stream)

    def _check_solvable(self):
        """Rows of the data without a solution under the options: told, and refused where they are many."""
        rows = [row for split in self.splits for row in self._rows[split]]
        tried = rows[::math.ceil(len(rows) / DATA_TRIED)]
        without = sum(solve(nums, target, self._rules) is None for nums, target in tried)
        config = self.config
        limit = f" max_intermediate={config.max_intermediate}" if config.style == "compact" else ""
        says = (f"environment countdown: option data={config.data}: {without} of {len(tried)} rows that were "
                f"tried have no solution with operators={config.operators} style={config.style}{limit}")
        if without > len(tried) / 2:
            raise BadInput(f"{says}; expected one for half of them at least")
        if without:
            warnings.warn(says, stacklevel=4)

    def _random_problem(self, rng) -> tuple[list[int], int] | None:
        """A random game on random numbers, whose result is the target (None: not admitted by the options)."""
        config = self.config
        if config.draw == "uniform":
            return self._uniform_problem(rng)
        count = config.min_operands + int(rng() * (config.max_operands - config.min_operands + 1))
        nums = [1 + int(rng() * config.max_number) for _ in range(count)]
        steps = random_game(nums, self._game_rules, rng)
        admitted = steps and config.min_target <= steps[-1][3] <= config.max_target
        return (nums, steps[-1][3]) if admitted else None

    def _uniform_problem(self, rng) -> tuple[list[int], int] | None:
        """A random target, and random numbers, drawn again until they make it in whole numbers of any size.

        None if they do not within max_intermediate: the problems within it are drawn, each as often as the
        others.
        """
        config, unlimited = self.config, self._game_rules._replace(limit=math.inf)
        count = config.min_operands + int(rng() * (config.max_operands - config.min_operands + 1))
        target = config.min_target + int(rng() * (config.max_target - config.min_target + 1))
        for _ in range(GAMES):
            nums = [1 + int(rng() * config.max_number) for _ in range(count)]
            if makes(nums, target, unlimited):
                return (nums, target) if makes(nums, target, self._game_rules) else None
        return None

    def _train_problem(self, index) -> tuple[list[int], int]:
        rng = random.Random(f"{self.config.seed} train {index}").random
        for _ in range(GAMES):
            problem = self._random_problem(rng)
            if problem and not self._is_test(*problem):
                return problem
        raise self._no_problem("train", GAMES)

    def _test_problems(self) -> list[tuple[list[int], int]]:
        """Distinct problems of the test split, as many as asked for or as there are."""
        if (key := (type(self), self.config)) not in self._test:
            rng = random.Random(f"{self.config.seed} test").random
            games = GAMES + 20 * TEST_SHARE * self.config.test_tasks
            found = {}  # (*sorted numbers, target) -> problem
            for _ in range(games):
                problem = self._random_problem(rng)
                if problem and self._is_test(*problem):
                    found.setdefault((*sorted(problem[0]), problem[1]), problem)
                    if len(found) == self.config.test_tasks:
                        break
            if not found:
                raise self._no_problem("test", games)
            self._test[key] = list(found.values())
        return self._test[key]

    def _is_test(self, nums, target):
        if self.config.held_out == "problems":
            return is_test(nums, target)
        return is_test([], target) or is_test(nums, "")

    def _no_problem(self, split, games):
        names = ("min_operands", "max_operands", "max_number", "min_target", "max_target", "operators",
                 "style")
        options = " ".join(f"{name}={getattr(self.config, name)}" for name in names)
        return BadInput(f"environment countdown: options {options}: expected a {split} problem among {games} "
                        "random games, found none")

    def _prompt(self, nums, target):
        numbers = " ".join(map(str, nums))
        if self.config.style == "compact":
            return [{"role": "user", "content": f"{numbers} -> {target}"}]
        operators = ", ".join(OPERATOR_NAMES[op] for op in self.config.operators)
        if self.config.style == "plain":
            text = PLAIN_PROMPT.format(numbers=numbers, target=target, operators=operators)
            return [{"role": "user", "content": text}]
        text = R1_PROMPT.format(numbers=numbers, target=target, operators=operators)
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    def _reply(self, nums, steps, node=None, stream=None) -> str:
        """The steps, after the search that found them if there is one, in the style's form."""
        if self.config.style == "compact":
            return (compact_stream(stream) + " | " if stream else "") + compact_steps(steps)
        opening = "" if self.config.style == "plain" else "<think>"  # a plain prompt ends in it
        thoughts = chat_stream(stream, steps[-1][3]) if stream else compact_steps(steps)
        return f"{opening}\n{thoughts}\n</think>\n<answer>{expression(node or tree(nums, steps))}</answer>"


# ---- Splits

def is_test(nums, target) -> bool:
    """Whether the problem belongs to the test split: a property of the problem, the numbers in any order.

    With [] for the numbers, or "" for the target, whether problems with such a target or such numbers do.
    """
    return zlib.crc32(f"{','.join(map(str, sorted(nums)))}->{target}".encode()) % TEST_SHARE == 0


# ---- Games: a step is (a, operator, b, result); a game is n - 1 steps

class Rules(NamedTuple):
    operators: str
    limit: float  # results are 0..limit
    whole: bool  # results are integers: only exact divisions


def results(a, b, rules) -> list[tuple]:
    """The legal steps on two numbers, the larger first where that makes no difference.

    Numbers are never negative: where + and - are both allowed and the target is not negative, that loses no
    solution.
    """
    if a < b:
        a, b = b, a
    operators, limit, whole = rules
    found = []
    if "+" in operators and a + b <= limit:
        found.append((a, "+", b, a + b))
    if "-" in operators:
        found.append((a, "-", b, a - b))
    if "*" in operators and a * b <= limit:
        found.append((a, "*", b, a * b))
    if "/" in operators:
        for x, y in ((a, b), (b, a)) if a != b else ((a, b),):
            if y and x % y == 0:
                found.append((x, "/", y, x // y))
            elif y and not whole:
                found.append((x, "/", y, Fraction(x) / y))
    return found


def either_order(steps) -> list[tuple]:
    """The steps, and those of + and * with their operands exchanged: all that a player may write.

    Random play draws from these. Drawing one of `results` first and its order after would write each sum half
    as often as a difference, and the likeliest game of a model trained on that is to subtract.
    """
    return steps + [(b, op, a, result) for a, op, b, result in steps if op in "+*" and a != b]


def random_game(nums, rules, rng) -> list[tuple] | None:
    """Random pairs, random legal steps on them, until one number is left (None: no legal step)."""
    pool, steps = list(nums), []
    while len(pool) > 1:
        a = pool.pop(int(rng() * len(pool)))
        b = pool.pop(int(rng() * len(pool)))
        legal = either_order(results(a, b, rules))
        if not legal:
            return None
        step = legal[int(rng() * len(legal))]
        steps.append(step)
        pool.append(step[3])
    return steps


def moves(pool, rules, forms=lambda steps: steps) -> list[tuple]:
    """All (step, pool after it)."""
    found = []
    for i, j in pairs(len(pool)):
        rest = [n for k, n in enumerate(pool) if k != i and k != j]
        found += [(step, rest + [step[3]]) for step in forms(results(pool[i], pool[j], rules))]
    return found


@functools.cache
def pairs(n) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(n), 2))


def in_random_order(items, rng):
    """Yields the items in random order, at a cost only for those that are asked for."""
    while items:
        k = int(rng() * len(items))
        items[k], items[-1] = items[-1], items[k]
        yield items.pop()


def random_solution(nums, target, rules, rng, room=20_000) -> list[tuple] | None:
    """The first solution that a depth-first search in random order meets (None: not within `room` states)."""
    def search(pool):
        nonlocal room
        if len(pool) == 2:
            reached = [step for step in either_order(results(*pool, rules)) if step[3] == target]
            return [reached[int(rng() * len(reached))]] if reached else None
        for step, after in in_random_order(moves(pool, rules, either_order), rng):
            room -= 1
            if room < 0:
                return None
            if rest := search(after):
                return [step, *rest]
        return None

    return search(list(nums))


# ---- The exact solver

ATOM, PRODUCT, SUM = range(3)  # how tightly an expression binds


class Node(NamedTuple):
    """A way to a value: the shortest known of its kind."""

    cost: int  # characters
    kind: int
    value: int | Fraction
    op: str = ""
    left: Node | None = None
    right: Node | None = None


def brackets(op, left_kind, right_kind) -> tuple[bool, bool]:
    """Which sides of `left op right` need parentheses. a * (b / c) does not: a * b / c is the same number."""
    if op in "+-":
        return False, op == "-" and right_kind == SUM
    return left_kind == SUM, right_kind == SUM or (op == "/" and right_kind == PRODUCT)


def leaf(n) -> Node:
    return Node(len(str(n)), ATOM, n)


def join(value, op, left, right) -> Node:
    """`left op right` as an expression."""
    cost = left.cost + right.cost + 3 + 2 * sum(brackets(op, left.kind, right.kind))
    return Node(cost, SUM if op in "+-" else PRODUCT, value, op, left, right)


def join_step(value, op, left, right) -> Node:
    """`left op right` as a step: only the digits of its result make a difference, and all are of one kind."""
    return Node(left.cost + right.cost + len(str(value)), ATOM, value, op, left, right)


def solve(nums, target, rules) -> Node | None:
    """A shortest solution (None: there is none). Deterministic.

    Dynamic programming over subsets of the numbers: value -> shortest way to it, for each kind of expression,
    so that parentheses are counted as they are needed. The last one or two levels are not tabulated but
    searched backwards from the target, which keeps six numbers well under a second.
    """
    if not (2 <= len(nums) <= MAX_OPERANDS and 0 <= target <= rules.limit):
        return None
    solver = Solver(nums, rules)
    return min(solver.lookup((1 << len(nums)) - 1, target), default=None, key=lambda node: node.cost)


def steps_of(node) -> list[tuple]:
    if not node.op:
        return []
    step = (node.left.value, node.op, node.right.value, node.value)
    return [*steps_of(node.left), *steps_of(node.right), step]


class Solver:
    """Tables of all values of subsets of up to four numbers, and a search for one value of larger ones."""

    def __init__(self, nums, rules):
        self.rules = rules
        self.join = join_step if rules.whole else join
        self.tables = {}  # subset as a bit mask -> value -> nodes, one per kind
        self.found = {}  # (subset, value) -> nodes, of subsets without a table
        for k, n in enumerate(nums):
            self.tables[1 << k] = {n: [leaf(n)]}
        for mask, halves in splits(len(nums)):
            if mask.bit_count() <= min(len(nums) - 1, 4):
                self.tables[mask] = self.tabulate(halves)
        self.halves = dict(splits(len(nums)))

    def tabulate(self, halves):
        table = {}
        for one, two in halves:
            for x, lefts in self.tables[one].items():
                for y, rights in self.tables[two].items():
                    for a, op, _, value in results(x, y, self.rules):
                        sides = (lefts, rights) if a == x else (rights, lefts)
                        self.keep(table.setdefault(value, []), value, op, *sides)
        return table

    def keep(self, nodes, value, op, lefts, rights):
        """Add `lefts op rights` to the nodes of the value where it is shorter than what is there."""
        for left in lefts:
            for right in rights:
                node = self.join(value, op, left, right)
                for k, known in enumerate(nodes):
                    if known.kind == node.kind:
                        if node.cost < known.cost:
                            nodes[k] = node
                        break
                else:
                    nodes.append(node)

    def lookup(self, mask, value) -> list[Node]:
        if mask in self.tables:
            return self.tables[mask].get(value, [])
        if value > self.rules.limit:
            return []
        if (mask, value) not in self.found:
            self.found[mask, value] = self.backwards(mask, value)
        return self.found[mask, value]

    def backwards(self, mask, goal) -> list[Node]:
        """For each split and each value of the smaller half, look up what the other half would have to be."""
        nodes = []
        for one, two in self.halves[mask]:
            if one.bit_count() > two.bit_count():
                one, two = two, one
            for y, ys in self.tables[one].items():
                for x, op, first in self.wanted(goal, y):
                    if xs := self.lookup(two, x):
                        self.keep(nodes, goal, op, *((xs, ys) if first else (ys, xs)))
        return nodes

    def wanted(self, goal, y) -> list[tuple]:
        """(x, operator, whether x stands first) such that x and y give the goal."""
        operators, _, whole = self.rules
        found = []
        if "+" in operators and goal >= y:
            found.append((goal - y, "+", True))
        if "-" in operators:
            found.append((goal + y, "-", True))
            if y >= goal:
                found.append((y - goal, "-", False))
        if "*" in operators and y and not (whole and goal % y):
            found.append((divide(goal, y), "*", True))
        if "/" in operators:
            if y:
                found.append((goal * y, "/", True))
            if goal and y and not (whole and y % goal):
                found.append((divide(y, goal), "/", False))
        # Not 0 * x and 0 / x, where any x would do: the zero can take in the numbers of x one by one.
        return found


def divide(a, b):
    """a / b exactly, as an int where it is one."""
    return a // b if a % b == 0 else Fraction(a) / b


@functools.cache
def splits(n) -> list[tuple[int, list]]:
    """(subset, [its splits into two halves]) of two or more of n numbers as bit masks, small ones first."""
    found = []
    for mask in sorted(range(1, 1 << n), key=lambda mask: (mask.bit_count(), mask)):
        halves = [(one, mask ^ one) for one in range(1, mask) if one & mask == one and one < mask ^ one]
        if halves:
            found.append((mask, halves))
    return found


# ---- Search traces

def search_stream(nums, target, steps, rules, room, rng) -> tuple[list, list]:
    """A depth-first search that reaches the target: (stream, the steps of the solution it found).

    The stream holds (step, pool after it), and None where the last open step is given up. The search knows a
    solution (`steps`): it enters other branches, in random order, only where they can be searched to their
    end within what is left of `room` steps. So the trace is bounded, and each dead end in it is a real one.
    """
    stream, pool, path = [], list(nums), []
    for known in steps:
        for step, after in in_random_order(moves(pool, rules), rng):
            if {step[0], step[2]} == {known[0], known[2]} and step[1] == known[1]:
                break
            branch = exhaust(step, after, target, rules, room, rng)
            if branch is None:
                continue
            part, found = branch
            if found:
                return stream + part, path + found
            room -= tried(part)
            stream += part
        pool.remove(known[0])
        pool.remove(known[2])
        pool.append(known[3])
        path.append(known)
        stream.append((known, list(pool)))
    return stream, path


def exhaust(step, pool, target, rules, room, rng) -> tuple[list, list] | None:
    """The stream of a whole branch and its solution, [] if it has none (None: it takes over `room` steps)."""
    if room < 1:
        return None
    stream = [(step, pool)]
    if pool == [target]:
        return stream, [step]
    for next_step, after in in_random_order(moves(pool, rules), rng):
        branch = exhaust(next_step, after, target, rules, room - tried(stream), rng)
        if branch is None:
            return None
        stream += branch[0]
        if branch[1]:
            return stream, [step, *branch[1]]
    return stream + [None], []


def tried(stream) -> int:
    return sum(item is not None for item in stream)


# ---- Tries: a first step, and all that the three numbers after it give

def gives(x, y, target, operators) -> bool:
    """Whether one step on two numbers gives the target."""
    return ("+" in operators and x + y == target or "-" in operators and abs(x - y) == target
            or "*" in operators and x * y == target
            or "/" in operators and (y > 0 and x == y * target or x > 0 and y == x * target))


def makes(nums, target, rules) -> bool:
    """Whether the numbers, two or more, make the target with no step outside the rules."""
    if len(nums) == 2:
        return gives(*nums, target, rules.operators)
    for i, j in pairs(len(nums)):
        rest = [n for k, n in enumerate(nums) if k != i and k != j]
        for step in results(nums[i], nums[j], rules):
            if makes([*rest, step[3]], target, rules):
                return True
    return False


def needed(aside, target, rules) -> list[int]:
    """The numbers that make the target in one step with the number left aside."""
    numbers = [abs(target - aside), target + aside, target * aside]
    numbers += [x // y for x, y in ((target, aside), (aside, target)) if y and x % y == 0]
    return [n for n in dict.fromkeys(numbers)
            if n <= rules.limit and any(step[3] == target for step in results(n, aside, rules))]


def attempt(first, pool, target, rules) -> tuple[list, list | None]:
    """(table, steps) of a first step and the three numbers after it.

    The table has a row for each number left aside: the number, what would make the target with it, and the
    results of the steps on the other two. It ends at the first result that is among what is needed; the steps
    are that solution.
    """
    table = []
    for k, aside in enumerate(pool):
        table.append(row := [aside, *needed(aside, target, rules), ":"])
        for second in results(*pool[:k], *pool[k + 1:], rules):
            row.append(second[3])
            for last in results(second[3], aside, rules):
                if last[3] == target:
                    return table, [first, second, last]
    return table, None


def search_by_tries(nums, target, rules, good, rng) -> tuple[list, list]:
    """Tries in random order until one succeeds: ([(first step, table), ...], the steps of the solution).

    A share `good` of the tries is drawn from those that will succeed. With 0 the search is blind: nothing in
    it is known beforehand.
    """
    found = {first: attempt(first, pool, target, rules) for first, pool in moves(nums, rules)}
    left, winners = list(found), [first for first, (_, steps) in found.items() if steps]
    tries = []
    while True:
        among = winners if rng() < good else left
        first = among[int(rng() * len(among))]
        left.remove(first)
        table, steps = found[first]
        tries.append((first, table))
        if steps:
            return tries, steps


# ---- Steps as text

def compact_step(step) -> str:
    a, op, b, result = step
    return f"{a} {op} {b} = {result}"


def compact_steps(steps) -> str:
    return "; ".join(map(compact_step, steps))


def compact_stream(stream) -> str:
    """Steps tried; an x closes the last open step, so two in a row give up the step before it as well."""
    text = ""
    for before, item in zip([None, *stream], stream, strict=False):
        text += ("; " if before and item else " ") + (compact_step(item[0]) if item else "x")
    return text.lstrip()


def compact_tries(tries) -> str:
    """A first step, then the rows of its table one after the other."""
    return "; ".join(" ".join(map(str, [compact_step(first), *itertools.chain(*table)]))
                     for first, table in tries)


def chat_stream(stream, target) -> str:
    """The same in words, a line for each step and each branch given up."""
    lines, open_pools = [], []
    for item in stream:
        if item:
            step, pool = item
            open_pools.append(pool)
            if len(pool) > 1:
                ending = f"leaves {' '.join(map(str, pool))}"
            else:
                ending = "the target" if pool == [target] else f"not {target}"
            lines.append(f"{compact_step(step)}, {ending}")
        elif len(open_pools.pop()) > 1:
            lines.append("Dead end, back.")
    return "\n".join(lines)


def expression(node) -> str:
    """The expression with no more parentheses than needed."""
    if not node.op:
        return str(node.value)
    left, right = expression(node.left), expression(node.right)
    on_left, on_right = brackets(node.op, node.left.kind, node.right.kind)
    return f"{f'({left})' if on_left else left} {node.op} {f'({right})' if on_right else right}"


def tree(nums, steps) -> Node:
    """The steps as one node."""
    pool = [leaf(n) for n in nums]

    def take(value):
        return pool.pop(next(k for k, node in enumerate(pool) if node.value == value))

    for a, op, b, result in steps:
        pool.append(join(result, op, take(a), take(b)))
    return pool[0]


# ---- The verifier

class Attempt(Episode):
    def __init__(self, config, nums, target):
        self.config, self.nums, self.target = config, tuple(nums), target

    def step(self, reply: str) -> Step:
        config = self.config
        if config.style == "compact":
            steps = reply[reply.rfind("|") + 1:]  # what stands before the last | is a search
            well_formed, correct = judge_steps(steps if len(steps) <= MAX_ANSWER else "", self.nums,
                                               self.target, config.operators, config.max_intermediate)
        else:
            well_formed, correct = judge_expression(reply, self.nums, self.target, config.operators)
        info = {"correct": float(correct), "format": float(well_formed),
                "score": 1.0 if correct else 0.1 if well_formed else 0.0}
        return Step([], float(correct), True, False, info)


INTEGER = "(0|[1-9][0-9]*)"
STEP = re.compile(rf"[ \t\r\n]*{INTEGER}[ \t]*([-+*/])[ \t]*{INTEGER}[ \t]*=[ \t]*{INTEGER}[ \t\r\n]*")


@functools.lru_cache(4096)  # many replies to a problem are the same
def judge_steps(text, nums, target, operators, limit) -> tuple[bool, bool]:
    """(format, correct) of `a op b = c; ...`."""
    found = [STEP.fullmatch(part) for part in text.split(";")]
    if not all(found):
        return False, False
    steps = [(int(a), op, int(b), int(c)) for a, op, b, c in (match.groups() for match in found)]
    if any(op == "/" and b == 0 for _, op, b, _ in steps):
        return False, False
    pool = list(nums)
    for a, op, b, result in steps:
        for n in (a, b):
            if n not in pool:
                return True, False
            pool.remove(n)
        right = {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": a == result * b}[op]
        if not right or op not in operators or result > limit:
            return True, False
        pool.append(result)
    return True, pool == [target]


# What else these characters can spell (`//`, `**`, `()`, `1 2`, `3(4)`) falls to the parser or to the node
# types that `evaluate` knows. Two linear patterns: one for both would try every way to cut a long number.
CHARACTERS = re.compile(r"[-0-9+*/() ]+")
LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")


class Unreadable(Exception):
    """Not an expression of the task's grammar, or one without a value."""


def judge_expression(reply, nums, target, operators) -> tuple[bool, bool]:
    """(format, correct) of the expression in the last complete <answer> </answer>."""
    start = reply.rfind("<answer>", 0, max(reply.rfind("</answer>"), 0))
    end = reply.find("</answer>", start)
    start += len("<answer>")
    if start < len("<answer>") or end - start > MAX_ANSWER:
        return False, False
    text = re.sub(r"[ \t\r\n]+", " ", reply[start:end]).strip(" ")
    if not CHARACTERS.fullmatch(text) or LEADING_ZERO.search(text):
        return False, False
    used, signs = [], set()
    try:
        value = evaluate(ast.parse(text, mode="eval").body, used, signs, MAX_DEPTH)
    except (Unreadable, SyntaxError, ValueError, MemoryError, RecursionError):  # the parser has many
        return False, False
    return True, sorted(used) == sorted(nums) and signs <= set(operators) and value == target


OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def evaluate(node, used, operators, depth) -> Fraction:
    """The exact value. Adds the numbers to `used` and the signs to `operators` (a unary minus is a -)."""
    if depth == 0:
        raise Unreadable
    sign = 1
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):  # however many: they nest nothing
        operators.add("-")
        node, sign = node.operand, -sign
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(sign * node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise Unreadable
    op = OPERATORS[type(node.op)]
    operators.add(op)
    a = evaluate(node.left, used, operators, depth - 1)
    b = evaluate(node.right, used, operators, depth - 1)
    if op == "/":
        if b == 0:
            raise Unreadable
        return sign * a / b
    return sign * (a + b if op == "+" else a - b if op == "-" else a * b)


# ---- Data files

def load_rows(config) -> dict[str, list]:
    """{split: [(nums, target), ...]} of the file or data set.

    The first 1,024 rows are the test split (of a file of fewer than 2,048 rows, its first half); the others
    are train, less those whose problem is in test too.
    """
    where = f"environment countdown: option data={config.data}"
    top = config.max_intermediate if config.style == "compact" else MAX_VALUE
    rows = [check_row(row, f"{where}: row {k}", top) for k, row in read_rows(config.data, where)]
    if len(rows) < 2:
        raise BadInput(f"{where}: expected at least 2 rows, one for each split, got {len(rows)}")
    cut = min(DATA_TEST_ROWS, len(rows) // 2)
    held_out = {(*sorted(nums), target) for nums, target in rows[:cut]}
    train = [row for row in rows[cut:] if (*sorted(row[0]), row[1]) not in held_out]
    if not train:
        raise BadInput(f"{where}: every problem after the test split's {cut} rows is in the test split too; "
                       "expected some that is not, for training")
    return {"test": rows[:cut], "train": train}


def check_row(row, where, top) -> tuple[list[int], int]:
    def check(fine, expected, got):
        if not fine:
            raise BadInput(f"{where}: {expected}, got {shown(got)}")

    check(isinstance(row, dict), "expected an object with the fields nums and target", row)
    for field in ("nums", "target"):
        check(field in row, f"field {field} is missing: expected the fields nums and target", list(row))
    nums, target = row["nums"], row["target"]
    integers = f"expected a list of 2 to {MAX_OPERANDS} integers from 1 to {top}"
    check(isinstance(nums, list) and 2 <= len(nums) <= MAX_OPERANDS, f"field nums: {integers}", nums)
    check(all(type(n) is int and 1 <= n <= top for n in nums), f"field nums: {integers}", nums)
    expected = f"field target: expected an integer from 0 to {top}"
    check(type(target) is int and 0 <= target <= top, expected, target)
    return nums, target


def shown(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
