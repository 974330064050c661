"""What holds for every text environment at once: train and test never meet, what is partly right is not
correct, and the reward of a reply is that reply's.

A new environment joins by its name in envs.ENVS: a test fails until it has options here. Adapters are run on
stand-ins for their packages (stand_ins.py); on the packages themselves in slow tests.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
from collections.abc import Callable

import pytest

import envs
from envs.answers import CHECKS
from envs.mixture import Mixture
from tests import stand_ins
from tests.run_folders import package, write_jsonl
from tests.test_answers import ADD, TESTS, needs_sandbox

SEED = 3  # of episodes
LAST = 5  # tasks at the end of a split that are looked at
pytestmark = pytest.mark.filterwarnings("ignore")  # few rows, games of few states


def prompt_of(task):
    return json.dumps(task.messages)


@dataclasses.dataclass
class Case:
    """An environment with options, and what replies to its tasks are worth."""

    options: Callable  # of a folder with the files below
    # of the environment and a task: [(replies, correct, reward or None)]; a reply is a text, or (text, calls)
    attempts: Callable
    key: Callable = prompt_of  # what a task is, for the splits
    tasks: int = 100  # of each split, from the first on, that are compared
    name: str = ""  # for envs.make; empty: as in envs.ENVS
    sizes: tuple = ()  # of train and test, where the options say so
    solved: bool = True  # the environment's own solution is correct; False: it has none of one reply


def given(**options):
    return lambda folder: options


# ---- Files: each question stands there several times, and some in both files

QUESTIONS = 60
WORDS = ["abcd", "efgh", "bcda", "hgfe"]


def rows(first=0, last=QUESTIONS, answer=lambda n: WORDS[n % 4]):
    """A third of the questions is there again, with another answer. `hint` is a column of their own."""
    numbers = [*range(first, last), *range(first, last, 3)]
    found = []
    for place, n in enumerate(numbers):
        again = place >= last - first
        found.append(dict(prompt=f"Question {n}?", answer=answer(n + again), hint=f"h{place}"))
    return found


FUNCTIONS = '''
import asyncio
def told(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def share(completions, answer, **columns):
    """Of the answer's letters those that the reply has."""
    return [sum(letter in told(c) for letter in a) / len(a) for c, a in zip(completions, answer, strict=True)]

async def polite(prompts, completions):
    await asyncio.sleep(0)
    return [None if not told(c) else float("please" in told(c)) for c in completions]

def same(completions, **columns):
    return [1.0 for _ in completions]

class Box:
    """What is put into it is to be the answer."""
    def reset(self, **row):
        import random
        self.answer, self.found = row["answer"], ""
        return f" ({row['hint']}, {random.randrange(10**6)})"

    def put(self, letter: str) -> str:
        """
        Put a letter into it.

        Args:
            letter: A letter.
        """
        self.found += letter
        return self.found

    def get_reward(self):
        return sum(letter in self.found for letter in self.answer) / len(self.answer)

class NoTools:
    def reset(self, **row):
        pass

def asks_twice(task, base_url, api_key):
    """Of the answer's letters those that one of two replies has."""
    from tests.agent_client import Client
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        messages += [Client(base_url, api_key)(messages), {"role": "user", "content": "And?"}]
        if not messages[1]["content"]:
            return 0
    return sum(letter in messages[1]["content"] + messages[3]["content"]
               for letter in task["answer"]) / len(task["answer"])
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that options name."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "functions.py").write_text(FUNCTIONS)
    write_jsonl(folder / "words.jsonl", rows())
    messages = [row | dict(prompt=[dict(role="user", content=row["prompt"])]) for row in rows()]
    write_jsonl(folder / "messages.jsonl", messages)
    write_jsonl(folder / "more.jsonl", rows(40, 80))
    write_jsonl(folder / "held.jsonl", rows(20, 50))
    for name, (answer, *_) in CHECKED.items():
        write_jsonl(folder / f"{name}.jsonl", rows(answer=lambda n, answer=answer: answer))
    problems = [dict(nums=[a, b, c], target=a + b + c) for a, b, c in itertools.permutations(range(1, 7), 3)]
    write_jsonl(folder / "problems.jsonl", problems)
    return folder


# What a check takes for right, and what is right in part alone.
CHECKED = {
    "exact": (["New York", "NYC"], ["New York", "\\boxed{NYC}"], ["New", "New York City", "\\boxed{York}"]),
    "number": ("42", ["It is 42.", "\\boxed{42.0}"], ["It is 4.", "\\boxed{420}", "42 or 43", "43"]),
    "choice": ("B", ["(B)", "\\boxed{B}"], ["\\boxed{A}", "A or B"]),
    "contains": (["Paris", "Lutetia"], ["It is Paris.", "Lutetia"], ["Par", "It is in France."]),
    "regex": ("a+b", ["aab"], ["aa", "ba"]),
    "math": ("\\frac{1}{2}", ["\\boxed{0.5}"], ["\\boxed{1}", "\\boxed{\\frac{1}{3}}"]),
    "python": (TESTS, [f"```python\n{ADD}\n```"], ["```python\ndef add(a, b): return 3\n```"]),
}

def checked(name, env, task):
    _, right, partly = CHECKED[name]
    attempts = [([reply], 1, 1.0) for reply in right] + [([reply], 0, 0.0) for reply in partly]
    attempts += [([f"<think>{partly[0]}</think>\n{reply}"], 1, 1.0) for reply in right]
    thought = f"<think>{right[0]}"
    return attempts + [([f"{thought}</think>\n{partly[0]}"], 0, 0.0), ([thought], 0, 0.0)]


def share(answer, reply):
    return sum(letter in reply for letter in answer) / len(answer)


def replies_of_letters(task):
    answer = task.data["row"]["answer"]
    return [answer, answer[:2], answer[:3] + " please", "", "please", answer + " please", answer[::-1][:3]]


def rewarded(env, task):
    """share, twice as much, and polite, a half: half of the letters earn as much as being right would."""
    answer = task.data["row"]["answer"]
    return [([reply], int(share(answer, reply) == 1), 2 * share(answer, reply) + 0.5 * ("please" in reply))
            for reply in replies_of_letters(task)]


def checked_and_rewarded(env, task):
    """The check says what is correct, whatever functions add."""
    answer = task.data["row"]["answer"]
    return [([reply], int(reply == answer), (reply == answer) + share(answer, reply) + 1)
            for reply in replies_of_letters(task)]


def put(letters):
    return "", [dict(name="put", arguments=dict(letter=letter)) for letter in letters]


def boxed(bound, functions, check, env, task):
    """get_reward is the share of the letters in the box."""
    answer, attempts = task.data["row"]["answer"], []
    for letters, reply in itertools.product(("", answer[:2], answer[:3], answer), (answer, "please")):
        earned = share(answer, letters)
        reward = earned + functions * (share(answer, reply) + (reply == "please"))
        correct = earned >= bound
        if check:
            reward, correct = reward + (reply == answer), reply == answer
        replies = [put(letters[:1] or "-"), put(letters[1:] or "-"), (reply, [])]
        attempts.append((replies, int(correct), reward))
    return attempts


def asked_twice(bound, env, task):
    """Halves of a reply, in its two turns."""
    answer = task.data["row"]["answer"]
    return [([reply[:2], reply[2:]], int(share(answer, reply) >= bound), share(answer, reply))
            for reply in replies_of_letters(task) if reply]


def asked_once_and_checked(env, task):
    return [([reply], int(reply == answer), float(reply == answer)) for answer in [task.data["row"]["answer"]]
            for reply in replies_of_letters(task)]


# ---- Replies of the environments that come with this


def nearly(env, task):
    return [(["abc"], 0, 0.0)]


def shortened(env, task):
    """Without its last letter a solution is none."""
    solution = env.solution(task)
    last = max(place for place, letter in enumerate(solution) if letter not in "}> ")
    return [([solution[:last] + solution[last + 1:]], 0, 0.0)]


def without_last_step(env, task):
    """A format that is right earns nothing by itself."""
    a, b, *_ = task.data["nums"]
    if env.config.style == "compact":
        return [([f"{a} + {b} = {a + b}"], 0, 0.0), ([f"{a} + {b} = {a}"], 0, 0.0)]
    solution = env.solution(task)
    return [([solution.replace("<answer>", "<answer>1 * ")], 0, 0.0),
            ([f"{solution} <answer>{a} + {b}</answer>"], 0, 0.0)]


def moves_of(messages):
    listed = messages[-1]["content"].rpartition("Legal moves (")[2]
    return listed.partition(": ")[2].splitlines()[0].split("; ")


def each_move(env, task):
    """`correct` is better than the mean of all moves, whatever it is worth."""
    case, state, player = env.load(task)
    scores = env.scores(case, state, player, task.id)
    mean, same = sum(scores.values()) / len(scores), max(scores.values()) == min(scores.values())
    attempts = [(["<answer>none</answer>"], 0, 0.0)]
    for action, score in scores.items():
        reply = f"<answer>{state.action_to_string(player, action)}</answer>"
        attempts.append(([reply], int(score > mean + 1e-9 or same), score))
    return attempts


def some_games(env, task):
    """Games of random moves: a draw is half of the scale, and not won."""
    attempts = [(["<answer>none</answer>"], 0, 0.0)]
    for seed in range(6):
        rng, replies, messages = random.Random(f"{task.id} {seed}"), [], task.messages
        episode, step = env.start(task, SEED), None
        while step is None or not step.terminated:
            replies.append(f"<answer>{rng.choice(moves_of(messages))}</answer>")
            step = episode.step(replies[-1])
            messages = step.messages
        attempts.append((replies, int(step.reward == 1), {0: 0, 0.5: 0.5, 1: 1}[step.reward]))
    return attempts


def parts_of_a_game(env, task):
    """The first level, and all: the reward is five for each."""
    replies, scale = env.replies(task), env.config.reward_scale
    episode = env.start(task, SEED)
    first = next(count for count, reply in enumerate(replies, 1) if episode.step(reply).reward > 0)
    episode.close()
    levels = env.config.levels
    assert f"score: 0 of {levels}" in task.messages[-1]["content"]
    return [(replies, 1, levels * scale), (replies[:first], 0, scale), (replies[:first - 1], 0, 0.0),
            ([*replies[:first], "nothing"], 0, scale)]


def of_its_part(env, task):
    """Of a mixture: what the environment knows of the task without the name before its id."""
    name, _, own = task.id.partition(":")
    case = {"countdown": CASES["countdown"][""], "rows": CASES["rows"]["functions"]}[name]
    return case.attempts(env.envs[name], dataclasses.replace(task, id=own))


def one_of_many_diffs(env, task):
    """The reference, and a diff that applies and mends nothing (the tests run in a sandbox)."""
    part = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,1 @@\n+x = 1\n"
    return [([f"```diff\n{part}```"], 0, 0.0), (["no diff"], 0, 0.0)]


def given_up(env, task):
    return [(["```python\nfinish()\n```"], 0, 0.0)]


def tiny_blocks(env, task):
    fixed = env.demonstration(task)[-1]["content"]
    return [([fixed], 1, 1.0), (["finish ( )"], 0, 0.0)]


# ---- Replies of the adapters' stand-ins


def sums(env, task):
    a, b = map(int, re.findall(r"\d+", task.messages[-1]["content"]))
    binary = env.config.reward_mode == "binary"
    return [([str(a + b)], 1, 1.0), ([str(a + b + 1)], 0, 0.0 if binary else 0.5),
            (["99"], 0, 0.0 if binary else 0.01), ([f"<think>{a + b}</think>99"], 0, 0.0 if binary else 0.01),
            (["many"], 0, 0.0)]


def letters(env, task):
    """`exact` says what is correct where it is asked, else the sum of both, of which one alone is 1."""
    word = task.messages[-1]["content"].split()[5].rstrip("?")
    right = word.count("a")
    alone = not env.config.correct  # a close reply earns 1 as well
    thought = f"<think>{right}"
    assert task.messages[0] == dict(role="system", content="You count.")
    return [([str(right)], 1, 2.0), ([str(right + 1)], int(alone), 1.0), ([f"so {right}"], int(alone), 1.0),
            ([thought], 0, 0.0), (["raise"], 0, 0.0), ([f"{thought}</think>{right + 9}"], 0, 0.5)]


def race(env, task):
    """All pairs of moves, whatever the other seats do: one is correct exactly if no other came as far."""
    attempts = []
    values = {"<think>[2]</think>[1]": 1, "so [3]": 3}
    for replies in itertools.product(values, repeat=2):
        episode = env.start(task, SEED)
        steps = [episode.step(reply) for reply in replies]
        game = episode.game
        best = max(game.sums)
        assert game.sums[task.data["seat"]] == sum(values[reply] for reply in replies)
        won = game.sums[task.data["seat"]] == best and game.sums.count(best) == 1
        if env.seats[task.data["game"]] == 1:
            won = best == 2 * game.largest
        attempts.append(([*replies], int(won), game.rewards()[task.data["seat"]]))
        assert steps[-1].terminated and (steps[-1].reward == 1) == won
    return attempts


def sum_on_a_server(env, task):
    """Of a server that says what is correct that counts, of another the sum of all rewards."""
    right = sum(stand_ins.sum_of(task.data))
    if env.theirs:
        bound = env.config.solved_at
        games = [([str(right)], 0.6), (["hint", str(right)], 0.9), (["hint", "hint", str(right + 1)], 1.1),
                 (["hint", "hint", str(right)], 1.2), (["hint"] * 4, 1.2)]
        return [(replies, int(earned >= bound - 1e-6), earned) for replies, earned in games]
    return [([str(right)], 1, 0.6), ([str(right + 1)], 0, 0.5), (["hint", "hint", str(right + 1)], 0, 1.1),
            (["hint", f"<think>7</think>{right}"], 1, 0.9), (["many"], 0, 0.0)]


def question_of(task):
    return task.messages[-1]["content"]


def row_of(task):
    return task.data["row"]["prompt"]


def problem_of(task):
    return sorted(task.data["nums"]), task.data["target"]


def screen_of(task):
    return task.messages[-1]["content"].partition("screen (")[2]


def box(folder, **options):
    return dict(file=f"{folder}/functions.py:Box", data=f"{folder}/words.jsonl") | options


def functions(folder, *names):
    return ",".join(f"{folder}/functions.py:{name}" for name in names)


def agent(folder, program="functions.py:asks_twice", **options):
    program = f"{folder}/{program}" if ".py:" in program else program
    return dict(data=f"{folder}/words.jsonl", program=program, prompt="prompt") | options


def two_functions(name, folder, **options):
    """The first one says what is correct."""
    return options | dict(data=f"{folder}/{name}.jsonl", weights="2,0.5",
                          rewards=functions(folder, "share", "polite"))


def rows_and_countdown(folder):
    rows = {f"rows.{name}": value for name, value in two_functions("words", folder).items()}
    return rows | {"countdown.test_tasks": 60}


def three_files(folder):
    """Two to train on: what is held out of one is in the other."""
    first = {"rows.data": f"{folder}/words.jsonl", "rows.check": "exact"}
    return first | {"Rows.data": f"{folder}/more.jsonl", "Rows.test": f"{folder}/held.jsonl",
                    "Rows.check": "exact", "Rows.system": "Think."}


def rows_and_trl(folder):
    """One built on the other, whose files have questions in common, too."""
    return {"rows.data": f"{folder}/words.jsonl", "rows.check": "exact", "trl.check": "exact",
            "trl.data": f"{folder}/more.jsonl", "trl.test": f"{folder}/held.jsonl",
            "trl.file": f"{folder}/functions.py:NoTools"}


sandboxed = pytest.mark.slow
# name in envs.ENVS -> what it is called here -> Case. Names of one class are one environment.
CASES = {
    "agent": {
        "": Case(agent, functools.partial(asked_twice, 1), solved=False),
        "low": Case(functools.partial(agent, solved_at=0.7), functools.partial(asked_twice, 0.7),
                    solved=False),
        "check": Case(functools.partial(agent, program="tests.agent_client:run", check="exact"),
                      asked_once_and_checked, solved=False)},
    "countdown": {
        "": Case(given(test_tasks=100), without_last_step, problem_of, 200),
        "all-operators": Case(given(style="r1", operators="+-*/", max_operands=4, test_tasks=60),
                              without_last_step, problem_of, 60),
        "parts": Case(given(held_out="parts", test_tasks=60), without_last_step, problem_of, 100),
        "search": Case(given(style="plain", trace="search", test_tasks=60), without_last_step,
                       problem_of, 60),
        "few": Case(given(max_number=3, max_target=6, test_tasks=60), without_last_step, problem_of, 60),
        "data": Case(lambda folder: dict(data=f"{folder}/problems.jsonl"), without_last_step, problem_of)},
    "logic": {
        "": Case(given(cryptarithm_max_letters=5), shortened, tasks=9),
        "words": Case(given(style="words", types="0,2,4,5,6,8", operation_max_value=999), shortened,
                      tasks=36),
        "few": Case(given(types="6", boolean_max_statements=2, boolean_min_statements=2, boolean_min_depth=0,
                          boolean_max_depth=0, boolean_max_number=3), shortened, tasks=150)},
    "openspiel": {
        "": Case(given(cases="breakthrough(rows=5,columns=4);leduc_poker", num_tasks_per_case=40, playouts=2,
                       workers=0), each_move, tasks=60),
        "few": Case(given(cases="tic_tac_toe", max_random_steps=3, workers=0, playouts=2), each_move),
        "game": Case(given(cases="tic_tac_toe", mode="game"), some_games, solved=False)},
    "arcagi3": {
        "": Case(given(levels=2, reward_scale=5.0), parts_of_a_game, screen_of, 24, solved=False),
        "list": Case(given(game_ids=",".join(f"maze-{k}" for k in range(9)), levels=2), parts_of_a_game,
                     screen_of, solved=False),
        "chosen": Case(given(game_ids="maze-1,lights-2,maze-3", test_ids="lights-2,maze-1", levels=2,
                             reward_scale=0.1), parts_of_a_game, screen_of, solved=False)},
    "repl": {"": Case(given(), given_up),
             "tiny": Case(given(scenarios="tiny", prompt="short", test_tasks=60), tiny_blocks, tasks=60)},
    "swe": {"": Case(given(guessable=True), one_of_many_diffs),  # to see what can be guessed takes a sandbox
            "half": Case(given(test_share=0.5, guessable=True), one_of_many_diffs)},
    "rows": {
        **{check: Case(lambda folder, check=check: dict(data=f"{folder}/{check}.jsonl", check=check,
                                                        guessable=True),
                       functools.partial(checked, check), solved=check not in ("regex", "python"))
           for check in CHECKED},
        "functions": Case(functools.partial(two_functions, "words"), rewarded, solved=False),
        "messages": Case(functools.partial(two_functions, "messages", system="Think."), rewarded,
                         solved=False),
        "both": Case(lambda folder: dict(data=f"{folder}/words.jsonl", check="exact",
                                         rewards=functions(folder, "share", "same")), checked_and_rewarded),
        "files": Case(lambda folder: dict(data=f"{folder}/words.jsonl", test=f"{folder}/more.jsonl",
                                          check="exact"), nearly)},
    "trl": {
        "": Case(box, functools.partial(boxed, 1, 0, False), row_of, solved=False),
        "low": Case(functools.partial(box, solved_at=0.7), functools.partial(boxed, 0.7, 0, False), row_of,
                    solved=False),
        "check": Case(functools.partial(box, check="exact"), functools.partial(boxed, 1, 0, True), row_of,
                      solved=False),
        "functions": Case(lambda folder: box(folder, rewards=functions(folder, "share", "polite")),
                          functools.partial(boxed, 1, 1, False), row_of, solved=False)},
    "reasoning-gym": {
        "": Case(given(task="sums", train_tasks=200, test_tasks=70), sums, sizes=(200, 70)),
        "binary": Case(given(task="sums", reward_mode="binary"), sums, sizes=(10_000, 500)),
        "two": Case(given(task="sums,sums_in_words", most=9), sums)},
    "verifiers": {"": Case(given(taskset="letters"), letters, sizes=(81, 9), solved=False),
                  "exact": Case(given(taskset="letters", correct="exact", tasks=110), letters, sizes=(49, 6),
                                solved=False)},
    "textarena": {"": Case(given(game="Race-v0"), race, sizes=(100_000, 256), solved=False),
                  "three": Case(given(game="Trio-v0,Race-v0"), race, solved=False),
                  "alone": Case(given(game="Alone-v0"), race, solved=False)},
    "openenv": {"": Case(given(seeds=90, observation="text"), sum_on_a_server, tasks=30, sizes=(90, 256),
                        solved=False),
                "listed": Case(given(splits="train,held", observation="text", solved_at=1.2, max_turns=4),
                               sum_on_a_server, tasks=30, sizes=(90, 40), solved=False)},
    "mixture": {"": Case(rows_and_countdown, of_its_part, name="rows,countdown", solved=False),
                "files": Case(three_files, nearly, question_of, name="rows,envs/rows.py:Rows"),
                "kinds": Case(rows_and_trl, nearly, question_of, name="rows,trl")},
}
SANDBOXED = ("repl", "swe", "rows-math", "rows-python")  # where episodes need what is not on every machine
CLASSES = {envs.ENVS[name] for name in CASES if name in envs.ENVS}
MISSING = {name: {"": None} for name, place in envs.ENVS.items() if place not in CLASSES}


def cases(*marks_of_sandboxed):  # those of tests that play
    """All of them, as parameters of a test."""
    found = []
    for name, some in (CASES | MISSING).items():
        for variant in some:
            label = "-".join(filter(None, (name, variant)))
            marks = marks_of_sandboxed if name in SANDBOXED or label in SANDBOXED else ()
            marks = sandboxed if label == "rows-math" else marks  # a package, even to begin
            found.append(pytest.param(name, variant, id=label, marks=marks))
    return pytest.mark.parametrize("name, variant", found)


@pytest.fixture(scope="module")
def servers():
    with stand_ins.serving(listed=False) as one, stand_ins.serving(listed=True) as two:
        yield one, two


@pytest.fixture
def case(name, variant, folder, request, monkeypatch):
    """-> the Case and the environment"""
    case = (CASES | MISSING)[name][variant]
    assert case, f"envs.ENVS has {name!r}, but CASES in tests/test_env_properties.py has no options for it"
    options = case.options(folder)
    if request.node.get_closest_marker("slow"):
        needs_sandbox()
    if (name, variant) == ("rows", "math"):
        package("math_verify")
    if name == "openenv":
        options["url"] = request.getfixturevalue("servers")[variant == "listed"]
    stand_ins.install(monkeypatch)
    return case, envs.make(case.name or name, **options)


def tasks_of(env, most):
    """{split: tasks}, the first ones and some at the end"""
    found = {}
    for split in env.splits:
        size = env.num_tasks(split)
        places = {*range(min(most, size)), *range(max(0, size - LAST), size)}
        found[split] = [env.task(split, k) for k in sorted(places)]
    return found


# ---- Train and test


def check_splits(case, env):
    """By what a task asks, whatever its name is; and each task is JSON, has a name of its own and stays."""
    tasks = tasks_of(env, case.tasks)
    keys = {split: {json.dumps(case.key(task)) for task in some} for split, some in tasks.items()}
    assert keys["train"] and keys["test"]
    sizes = tuple(env.num_tasks(split) for split in env.splits)
    assert sizes == (case.sizes or sizes)
    both = keys["train"] & keys["test"]
    assert not both, f"held out, and trained on: {sorted(both)[:3]}"
    everything = tasks["train"] + tasks["test"]
    names = {(split, task.id) for split, some in tasks.items() for task in some}
    different = {json.dumps(dataclasses.asdict(task)) for task in everything}
    repeats = isinstance(env, Mixture)  # the smaller ones
    assert len(names) == (len(different) if repeats else len(everything))
    for split, some in tasks.items():
        assert env.task(split, env.num_tasks(split) - 1) == some[-1]
        for task in some[:9]:
            assert json.loads(json.dumps(dataclasses.asdict(task))) == dataclasses.asdict(task)
            assert task.messages[-1]["role"] == "user"
    # Those that training draws are the train split's, each once in an epoch.
    size = env.num_tasks("train")
    drawn = [env.training_task(cursor, seed=1) for cursor in range(min(size, case.tasks // 2))]
    assert not {json.dumps(case.key(task)) for task in drawn} & keys["test"]
    assert repeats or len({task.id for task in drawn}) == len(drawn)


@cases()
def test_no_held_out_task_is_trained_on(case):
    check_splits(*case)


@pytest.mark.parametrize("name, variant", [("countdown", ""), ("countdown", "parts"), ("openspiel", "")])
def test_another_seed_makes_other_tasks_of_the_same_splits(case, folder, name, variant):
    case, env = case
    others = envs.make(name, **case.options(folder), seed=1)
    one, two = ({split: [json.dumps(case.key(task)) for task in some]
                 for split, some in tasks_of(each, 40).items()} for each in (env, others))
    for split, other in (("train", "test"), ("test", "train")):
        assert one[split] != two[split]
        assert not {*one[split]} & {*two[other]}


# ---- What is correct


def played(env, jobs, rng=None):
    """Play [(task, replies)], all at once, in turns that rng mixes.

    -> [(reward of the whole episode, correct, numbers of the last step's info)]
    """
    episodes = [env.start(task, SEED) for task, _ in jobs]
    talks, left = [[*task.messages] for task, _ in jobs], [[*replies] for _, replies in jobs]
    steps, totals = [None] * len(jobs), [0.0] * len(jobs)
    while waiting := [k for k, replies in enumerate(left) if replies]:
        if rng:
            rng.shuffle(waiting)
        for k in waiting:
            reply = left[k].pop(0)
            text, calls = reply if isinstance(reply, tuple) else (reply, None)
            steps[k] = episodes[k].step(text) if calls is None else episodes[k].step(text, calls)
            assert not left[k] or not steps[k].terminated, f"it ends before {left[k]}"
            totals[k] += steps[k].reward
            talks[k] += [dict(role="assistant", content=text), *steps[k].messages]
    for episode in episodes:
        episode.close()
    names = [task.id for task, _ in jobs]
    for name in dict.fromkeys(names):  # the replies to a task are scored together
        group = [k for k, other in enumerate(names) if other == name]
        scored = env.score_group(jobs[group[0]][0], [talks[k] for k in group], [steps[k] for k in group])
        for k, step in zip(group, scored, strict=True):
            totals[k] += step.reward - steps[k].reward
            steps[k] = step
    return [(pytest.approx(total, abs=1e-9), step.info["correct"],
             {part: value for part, value in step.info.items() if envs.is_number(value)})
            for total, step in zip(totals, steps, strict=True)]


def jobs_of(case, env, split, count):
    """[(task, replies, correct, reward)] of some tasks of a split"""
    found = []
    for index in range(min(count, env.num_tasks(split))):
        task = env.task(split, index)
        if case.solved:
            solution, talk = env.solution(task), env.demonstration(task)
            assert solution is not None, f"{task.id} has no solution"
            assert talk[:len(task.messages)] == task.messages
            assert talk[-1] == dict(role="assistant", content=solution)
            found.append((task, [solution], 1, None))
        found += [(task, *attempt) for attempt in case.attempts(env, task)]
    return found


def check_correct(case, env):
    verdicts = set()
    ((_, verdict, parts),) = played(env, [(env.task("test", 0), [""])])
    assert verdict == 0 and not parts.get("format")  # to say nothing is no answer in any form
    for split in env.splits:
        for task, replies, correct, reward in jobs_of(case, env, split, 3):
            ((earned, verdict, _),) = played(env, [(task, replies)])
            assert verdict == correct, f"{task.messages[-1]['content'][-200:]}: {replies}"
            assert reward is None or reward == earned, f"{task.id}: {replies}"
            verdicts.add(verdict)
    assert verdicts == {0, 1}


@cases(sandboxed)
def test_what_is_right_is_correct_and_what_is_partly_right_is_not(case):
    check_correct(*case)


def check_own_rewards(case, env):
    """Alone, beside others to the same task in any order, in turns with those to other tasks."""
    jobs = [job[:2] for job in jobs_of(case, env, "train", 2)]
    alone = [played(env, [job])[0] for job in jobs]
    assert played(env, jobs) == alone
    rng = random.Random(1)
    for _ in range(2):
        order = rng.sample(range(len(jobs)), len(jobs))
        order += order[:3]  # equal replies
        assert played(env, [jobs[k] for k in order], rng) == [alone[k] for k in order]
    assert len({str(result) for result in alone}) > 1


@cases(sandboxed)
def test_the_reward_of_a_reply_is_its_own(case):
    check_own_rewards(*case)


# What changes nothing, where a task ends after so many replies.
IDLE = {"max_actions": "RESET", "max_turns": "hint"}


@pytest.mark.parametrize("name, variant", [("arcagi3", "list"), ("openenv", ""), ("openenv", "listed"),
                                           ("trl", "")])
def test_the_last_reply_that_a_limit_allows_is_cut_off_and_has_not_ended(case, name):
    _, env = case
    (option,) = IDLE.keys() & {field.name for field in dataclasses.fields(env.config)}
    for limit in (1, 3):
        env.config = dataclasses.replace(env.config, **{option: limit})
        episode = env.start(env.task("train", 1), SEED)
        for turn in range(1, limit + 1):
            step = episode.step(*(put("-") if name == "trl" else [IDLE[option]]))
            assert (step.truncated, step.terminated) == (turn == limit, False)
            assert bool(step.messages) == (turn < limit)
        assert step.info["correct"] == 0
        episode.close()


# ---- The packages themselves


def of_words(env, task):
    solution = env.solution(task)
    return [([f"{solution}x"], 0, None), ([solution[::-1] + "y"], 0, None)]


def of_letters(env, task):
    words = task.messages[-1]["content"].split()
    right = words[7].rstrip("0123456789?").count(words[5])
    return [([str(right)], 1, 2.5), ([str(right + 1)], 0, 0.5), (["many"], 0, 0.0), (["raise"], 0, 0.0)]


def tic_tac_toe(env, task):
    attempts = []
    for seed in range(8):
        rng, replies, messages, step = random.Random(seed), [], task.messages, None
        episode = env.start(task, SEED)
        while step is None or not step.terminated:
            shown = messages[-1]["content"].rpartition("Available Moves: ")[2].split(", ")
            replies.append(rng.choice(shown))
            step = episode.step(replies[-1])
            messages = step.messages
        attempts.append((replies, int(step.reward == 1), step.reward))
    return attempts


def of_a_server(env, task):
    first, _, second = task.messages[0]["content"].split()[:3]
    return [([str(int(first) + int(second))], 1, 1.0), (["-1"], 0, 0.5)]


PACKAGES = {
    "reasoning_gym": Case(given(task="spell_backward,caesar_cipher"), of_words),
    "verifiers": Case(given(taskset="tests/letters_taskset.py:Letters", tasks=400, correct="exact"),
                      of_letters, solved=False),
    "textarena": Case(given(game="TicTacToe-v0"), tic_tac_toe, lambda task: task.data["seed"], solved=False),
    "openenv": Case(given(observation="text", seeds=90), of_a_server, solved=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_packages_keep_the_promises_that_their_stand_ins_keep(name, folder):
    case, options = PACKAGES[name], PACKAGES[name].options(folder)
    with contextlib.ExitStack() as stack:
        if name == "openenv":
            from tests.test_openenv import running  # which imports a trainer

            options["url"], _ = stack.enter_context(running("sum", sessions=32))
        else:
            package(name)
        env = envs.make(name.replace("_", "-"), **options)
        check_splits(case, env)
        check_correct(case, env)
        check_own_rewards(case, env)


def test_each_check_of_rows_is_tried():
    """A new one joins by its name, too."""
    assert CHECKED.keys() == CHECKS.keys() - {""}
