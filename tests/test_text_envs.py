"""What every text environment promises: the same tasks everywhere, and a verdict on any text whatever."""

import functools
import hashlib
import random
import sys
import warnings

import pytest

import envs
from tests.run_folders import quick

GAMES = "breakthrough(rows=5,columns=4);hex(board_size=4);leduc_poker;goofspiel(num_cards=4)"
ENVS = {  # name, options, how many tasks of a split are looked at
    "countdown": ("countdown", dict(test_tasks=200), 300),
    "countdown-mixed": ("countdown", dict(skill="mixed", test_tasks=100), 100),
    "countdown-search": ("countdown", dict(trace="search", test_tasks=100), 100),
    "countdown-r1": ("countdown", dict(style="r1", operators="+-*/", max_operands=4, test_tasks=100), 100),
    "countdown-plain": ("countdown", dict(style="plain", operators="+-*", test_tasks=50), 50),
    "logic": ("logic", dict(cryptarithm_max_letters=5), 18),
    "logic-words": ("logic", dict(style="words", operation_max_value=999, cryptarithm_max_letters=5), 18),
    "openspiel": ("openspiel", dict(cases=GAMES, num_tasks_per_case=30, playouts=3), 40),
    "openspiel-legal": ("openspiel", dict(cases=GAMES, style="short", reward_mode="legal"), 40),
    "openspiel-game": ("openspiel", dict(cases="hex(board_size=4)", mode="game"), 20),
    "arcagi3": ("arcagi3", {}, 20),
    "arcagi3-short": ("arcagi3", dict(style="short", downsample=8), 30),
    "mixture": ("countdown=3,logic", {"logic.types": "0,8"}, 60),
}
ALL = pytest.mark.parametrize("case", ENVS)


@functools.cache
def shared(case):
    name, options, count = ENVS[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # games of few states say so
        env = envs.make(name, **options)
    return env, [(split, k) for split in env.splits for k in range(min(count, env.num_tasks(split)))]


def digest(case, seed=0):
    """Of the first tasks of each split and their solutions, made in an order of the seed's."""
    env, places = shared(case)
    places = [place for place in places if place[1] < 9]
    order = random.Random(seed).sample(places, len(places)) if seed else places
    made = {place: (task := env.task(*place), env.solution(task)) for place in order}
    text = repr([made[place] for place in places]).replace(", tools=None, seat=0)",
                                                           ")")  # a field that came later
    return hashlib.sha256(text.encode()).hexdigest()[:16]


PINNED = {
    "countdown": "180c8c4df155e2c0", "countdown-mixed": "3841378162d86794",
    "countdown-search": "8dd9114e0a019d1b", "countdown-r1": "b483eae4a4ac78b4",
    "countdown-plain": "9572d6d03d384348", "logic": "ce61234e02295ef8",
    "logic-words": "1d004de151a08e08", "openspiel": "d29a694cce699545",
    "openspiel-legal": "7cd7a5244354e229", "openspiel-game": "cd227ad3990374f0",
    "arcagi3": "bc556ac8a96f43c9", "arcagi3-short": "e45ced30f3a923b9", "mixture": "9d7dca3e508f657e",
}


@ALL
def test_tasks_and_solutions_are_the_same_in_every_process_and_in_any_order(case):
    """A published run names its tasks by index: a change here changes what old results were measured on."""
    assert digest(case, seed=1) == PINNED[case]  # Python hashes texts differently in each process


MEGABYTES = [
    "", "\0", "\ud800", "\n" * 10**6, "(" * 10**6, "9" * 10**6, "9**9**9**9", "<think>" * 10**5,
    "</think>" * 10**5, "<answer>" * 10**5, "<answer>" + " " * 10**6 + "</answer>", "</answer" * 10**5,
    "\\boxed{" * 10**5, "```" * 10**5, "```\n" + "(" * 10**5 + "\n```", '{"action":' * 10**5, "[" * 10**6,
    '{"' * 10**5, "ACTION6 x=" + "1" * 10**6, "ACTION1 " * 10**5, "|" * 10**6, "7 + 3 = 10;" * 10**5,
    "\\boxed{" + "9" * 10**6 + "}", "\\boxed{1e999999999}", "<answer>1/0</answer>", "\x85\u2028" * 10**5,
    "__import__('os').system('true')", "１２ ٣ ² + 1", "<answer>9**9**9</answer>"]
PARTS = [*MEGABYTES[:3], "<answer>", "</answer>", "<think>", "</think>", "(", ")", "{", "}", "[", '"', "```",
         "\\boxed{", "ACTION6", "x=", "|", ";", "=", " ", "\n", "\\", "'", "é", "٣", "\u202e", "7", "10"]


def mutated(reply, rng):
    if rng.random() < 0.3:
        return "".join(rng.choices(PARTS, k=rng.randrange(30)))
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(reply))
        reply = reply[:place] + rng.choice([*PARTS, "", reply[:9]]) + reply[place + rng.randrange(3):]
    return reply


@ALL
def test_any_text_gets_a_verdict_at_once_and_always_the_same(case):
    env, places = shared(case)
    rng, right = random.Random(1), 0
    tasks = [env.task(*place) for place in places[::max(1, len(places) // 9)]]
    texts = [(task, text) for task in tasks[:3] for text in MEGABYTES]
    texts += [(task, "".join(message["content"] for message in task.messages)) for task in tasks]
    hopeless = len(texts)  # an echo of the problem, too
    for k in range(60):
        task = tasks[k % len(tasks)]
        texts.append((task, mutated(env.solution(task) or '{"action": "ACTION6", "x": 1, "y": 2}', rng)))
    for number, (task, text) in enumerate(texts):
        with quick(text[:60], most=5):
            episode = env.start(task, 7)
            step = episode.step(text)
            episode.close()
        assert step.info["correct"] in (0, 1) and -1 <= step.reward <= 1 and bool(step.messages) != (
            step.terminated or step.truncated)
        right += step.info["correct"]
        if number < hopeless:
            assert step.info["correct"] == 0 and step.reward <= 0, text[:60]
        elif number % 5 == 0:
            again = env.start(task, 7).step(text)
            assert (again.reward, again.info["correct"]) == (step.reward, step.info["correct"])
    assert right < 45


@pytest.mark.parametrize("name, package", [
    ("reasoning-gym", "reasoning_gym"), ("textarena", "textarena"), ("verifiers", "verifiers")])
def test_a_package_that_is_missing_is_one_line_that_says_what_to_install(name, package, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    options = dict(taskset="tests/letters_taskset.py") if name == "verifiers" else {}
    with pytest.raises(envs.BadInput, match=f"^environment {name} needs the package {package}: pip install "
                                            r"-r requirements-envs\.txt \(.*\)$"):
        envs.make(name, **options)


@ALL
def test_names_of_splits_indices_and_options_that_are_not_are_named(case):
    env, _ = shared(case)
    for ask in (env.num_tasks, lambda split: env.task(split, 0)):
        with pytest.raises(envs.BadInput, match="'val'"):
            ask("val")
    for index in (-1, env.num_tasks("test")):
        with pytest.raises(IndexError):
            env.task("test", index)
    name = ENVS[case][0]
    if "," not in name:
        with pytest.raises(envs.BadInput, match="unknown option 'nothing'.*known: ") as told:
            envs.make(name, nothing=1)
        assert "\n" not in str(told.value)
