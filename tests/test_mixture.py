"""envs/mixture.py: the proportions, the turns, whose task it is, and training on it."""

import collections

import pytest

import envs
import grpo_llm
import ppo_llm
import sft
from envs import BadInput, mixture
from tests.run_folders import records, slow_but, train
from tools.validate_train_log import validate


class Few(envs.Env):
    """An environment of a given number of tasks, which it counts."""

    def __init__(self, name, sizes, words=("a",)):
        self.name, self.sizes, self.vocabulary = name, sizes, list(words)

    def num_tasks(self, split):
        return self.sizes[split]

    def task(self, split, index):
        assert 0 <= index < self.sizes[split]
        messages = [dict(role="user", content=f"{self.name} {index}")]
        return envs.Task(f"{split}-{index}", self.name, messages, {})

    def start(self, task, seed):
        episode = envs.Episode()
        episode.of = (self.name, task.id, seed)
        return episode

    def solution(self, task):
        return f"{self.name} solves {task.id}"


def mixed(name, **sizes):
    few = {short: Few(short, dict(train=n, test=m), short) for short, (n, m) in sizes.items()}
    return mixture.Mixture(name, {}, lambda place, **options: few[place])


def test_training_tasks_come_by_weight_each_once_before_any_repeats_but_of_the_smaller_ones():
    env = mixed("a=3,b,c=2", a=(30, 1), b=(7, 1), c=(2, 1))
    tasks = [env.task("train", index) for index in range(env.num_tasks("train"))]
    assert len(tasks) == 6 * 10  # a's 30 tasks, three a round
    assert collections.Counter(task.source for task in tasks) == dict(a=30, b=10, c=20)
    assert {task.id for task in tasks if task.source == "a"} == {f"a:train-{k}" for k in range(30)}
    assert [task.id for task in tasks if task.source == "b"] == [f"b:train-{k % 7}" for k in range(10)]
    assert collections.Counter(task.id for task in tasks if task.source == "c") == {
        "c:train-0": 10, "c:train-1": 10}
    for start in range(0, 60, 6):  # in every round, so in any stretch of the log
        assert sorted(task.source for task in tasks[start:start + 6]) == list("aaabcc")
    with pytest.raises(BadInput, match="mixture: b: no training tasks"):
        mixed("a,b", a=(30, 1), b=(0, 1)).training_task(0, 1)


@pytest.mark.parametrize("sizes", [(1, 2, 5), (5, 1, 2), (2, 5, 5), (1, 1, 1)])
def test_test_tasks_take_turns_until_all_have_come_once(sizes):
    env = mixed("a,b=4,c", **{name: (3, size) for name, size in zip("abc", sizes, strict=True)})
    tasks = [env.task("test", index) for index in range(env.num_tasks("test"))]
    left = {name: [f"{name}:test-{k}" for k in range(size)] for name, size in zip("abc", sizes, strict=True)}
    expected = []
    while any(left.values()):
        expected += [ids.pop(0) for ids in left.values() if ids]
    assert [task.id for task in tasks] == expected
    with pytest.raises(IndexError):
        env.task("test", len(tasks))


def test_a_task_is_its_environments_own():
    env = mixed("a,b", a=(3, 3), b=(3, 3))
    task = env.task("train", 3)
    assert (task.id, task.source, task.messages[0]["content"]) == ("b:train-1", "b", "b 1")
    assert env.start(task, 7).of == ("b", "train-1", 7)  # a reply scores as it would there
    assert env.solution(task) == "b solves train-1"
    assert env.demonstration(task)[-1]["content"] == "b solves train-1"


@pytest.mark.parametrize("name", ["multi_turn", "blocking"])
def test_one_that_waits_or_has_several_turns_is_enough(name):
    few = dict(a=Few("a", {}), b=Few("b", {}))
    assert getattr(mixture.Mixture("a,b", {}, lambda place: few[place]), name) is False
    setattr(few["b"], name, True)
    assert getattr(mixture.Mixture("a,b", {}, lambda place: few[place]), name) is True
    few["a"].identity, few["b"].identity = "one", "two"
    assert mixture.Mixture("a,b", {}, lambda place: few[place]).identity == "onetwo"


def test_words_are_known_where_all_know_theirs():
    few = dict(a=Few("a", {}, "ab"), b=Few("b", {}, "bc"), c=Few("c", {}))
    assert mixture.Mixture("a,b", {}, lambda place: few[place]).vocabulary == ["a", "b", "c"]
    few["c"].vocabulary = None
    assert mixture.Mixture("a,c", {}, lambda place: few[place]).vocabulary is None


@pytest.mark.parametrize(("name", "options", "says"), [
    ("countdown = 2 , nothing", {}, "unknown environment 'nothing'"),
    ("countdown,countdown", {}, "different names"),
    ("countdown=0,tests/two_turn.py:TwoTurn", {}, "weight of countdown.*got '0'"),
    ("countdown=²,tests/two_turn.py:TwoTurn", {}, "got '²'"),
    ("countdown=99999999999999999999,tests/two_turn.py:TwoTurn", {}, "weight of countdown"),
    ("countdown=00099999,tests/two_turn.py:TwoTurn", {}, "weight of countdown.*got '00099999'"),
    ("countdown,tests/two_turn.py:TwoTurn", {"max_operands": "4"}, "NAME.OPTION.*countdown, TwoTurn"),
    ("countdown,tests/two_turn.py:TwoTurn", {"countdown.max_operand": "4"}, "did you mean 'max_operands'"),
])
def test_what_cannot_be_mixed_is_one_line(name, options, says):
    with pytest.raises(BadInput, match=says) as caught:
        envs.make(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script", slow_but((grpo_llm,), [sft, grpo_llm, ppo_llm]))
def test_each_source_is_trained_and_evaluated_on_its_own(script, tmp_path):
    folder = train(script, tmp_path / "run", env="countdown=2,envs/countdown.py:Countdown",
                   env_kwargs=("countdown.difficulty=1", "countdown.test_tasks=9", "Countdown.test_tasks=9"),
                   **{"steps" if script is sft else "iterations": 2})
    assert validate(folder, strict=True)["ok"]
    for record in (records(folder)[0], records(folder)[-1]):
        measured = {name for name in record if name.startswith("val/") and name.endswith("greedy")}
        assert measured == {"val/countdown/3/greedy", "val/countdown/greedy"}
