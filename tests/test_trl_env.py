"""Environment classes and reward functions of TRL's form, against what TRL makes of the same files."""

import asyncio
import json

import pytest

import envs
from tests.run_folders import package

SHOP = '''
import random

class Counter:
    """A number is to be found by asking."""

    def reset(self, **row):
        self.secret, self.named, self.closed = random.randint(1, 10), None, False
        return f" Between 1 and 10 ({row['hint']})."

    def is_larger(self, than: int) -> str:
        """
        Whether the secret is larger.

        Args:
            than: The number to compare with.
        """
        return "yes" if self.secret > than else "no"

    async def guess(self, number: int) -> str:
        """
        Name the secret.

        Args:
            number: What it is.
        """
        self.named = number
        return "noted"

    def get_reward(self):
        return float(self.named == self.secret)

    def close(self):
        self.closed = True

    def _private(self):
        raise SystemExit

class Plain:
    def reset(self, **row):
        return None

class Unhinted(Plain):
    def tool(self, x):
        return x

class Restless(Plain):
    calls = 0
    def reset(self, **row):
        Restless.calls += 1
        return str(Restless.calls)
    def get_reward(self):
        return 1.0

class Wordy(Restless):
    def reset(self, **row):
        return 5

class Leaving(Restless):
    def reset(self, **row):
        raise SystemExit("closed")

class Vast(Restless):
    def reset(self, **row):
        self.row = row
    def get_reward(self):
        return 10**400 if int(self.row["hint"]) % 2 else float("nan")

class Late(Restless):
    def reset(self, **row):
        return None
    async def get_reward(self):
        return "good"

def polite(prompts, completions, hint, **columns):
    return [0.5 if completion[-1]["content"].startswith("so") else None for completion in completions]

TOLD = []

def told(prompts, completions, hint, **columns):
    TOLD.append((prompts, completions, hint))
    return [1.0] * len(completions)
'''


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    rows = [dict(prompt=[dict(role="user", content=f"Game {n}.")], hint=str(n),
                 answer=str(n), code=f"assert f() == {n}") for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name="Counter", **options):
        return envs.make("trl", file=f"{tmp_path}/shop.py:{name}", data=str(tmp_path / "train.jsonl"),
                         **options)
    make.folder, make.rows = tmp_path, rows
    return make


def call(name, **arguments):
    return dict(name=name, arguments=arguments)


def test_an_episode_calls_tools(shop):
    env = shop()
    task = env.task("train", 3)
    assert task == env.task("train", 3) and env.multi_turn and not env.blocking
    assert task.messages[0]["content"].startswith("Game ") and task.messages[0]["content"].endswith(").")
    assert [tool["function"]["name"] for tool in task.tools] == ["guess", "is_larger"]
    assert task.tools[1]["function"]["parameters"]["properties"]["than"]["type"] == "integer"
    episode, other = env.start(task, 1), env.start(task, 2)
    secret = episode.made.secret
    assert other.made.secret == secret and other.made is not episode.made
    assert len({env.start(env.task("train", k), 1).made.secret for k in range(9)}) > 1  # another row, another
    step = episode.step("hm", [call("is_larger", than=0), call("nope"), call("reset"), call("_private"),
                               call("is_larger", size=3), call(7)])
    assert not step.terminated and [m["role"] for m in step.messages] == ["tool"] * 6
    said = [m["content"] for m in step.messages]
    assert said[0] == "yes" and said[1] == "error: ValueError: there is no 'nope', but guess, is_larger"
    assert said[4].startswith("error: TypeError:") and step.messages[5]["name"] == "7"
    (noted,) = episode.step("", [call("guess", number=secret)]).messages
    assert noted == dict(role="tool", name="guess", content="noted")
    last = episode.step("so be it", [])
    assert last.terminated and last.reward == 1.0
    assert last.info == dict(correct=1.0, get_reward=1.0, failed_calls=5.0)
    assert other.step("I give up", []).reward == 0.0
    episode.close()
    assert episode.made.closed


def test_too_many_turns_are_cut_off_and_scored(shop):
    env = shop(max_turns=2)
    episode = env.start(env.task("train", 0), 1)
    assert not episode.step("", [call("is_larger", than=3)]).truncated
    step = episode.step("", [call("guess", number=episode.made.secret)])
    assert step.truncated and not step.terminated and step.reward == 1.0
    episode = env.start(env.task("train", 0), 1)
    episode.step("", [call("guess", number=episode.made.secret)])
    assert episode.end("length").reward == 1.0


def test_reward_functions_and_checks_are_added(shop):
    env = shop(rewards=f"{shop.folder}/shop.py:polite", weights="2")
    task = env.task("train", 0)
    conversations, steps = [], []
    for reply in ("so it is", "no"):
        episode = env.start(task, 1)
        episode.step("", [call("guess", number=episode.made.secret)])
        steps.append(episode.step(reply, []))
        conversations.append([*task.messages, dict(role="assistant", content=reply)])
    first, second = env.score_group(task, conversations, steps)
    assert (first.reward, second.reward) == (2.0, 1.0) and first.terminated
    assert first.info == dict(correct=1.0, get_reward=1.0, failed_calls=0.0, polite=0.5)
    assert shop("Plain", check="python", answer="code", guessable=True).blocking  # as --env rows
    assert shop(blocking=True, check="number").blocking and not shop(check="number").blocking
    env = shop("Plain", check="number")
    task = env.task("train", 0)
    assert task.tools is None and not env.multi_turn
    assert env.start(task, 1).step(task.data["answers"][0]).reward == 1.0
    env = shop(check="number")
    task = env.task("train", 0)
    for reply, earned in ((task.data["answers"][0], 1.0), ("-1", 0.0)):
        episode = env.start(task, 1)
        episode.step("", [call("guess", number=episode.made.secret)])
        step = episode.step(str(reply), [])
        assert (step.reward, step.info["correct"]) == (earned + 1.0, earned)  # 1 is get_reward's


def test_functions_are_given_all_that_was_said_after_the_prompt(shop):
    env = shop(rewards=f"{shop.folder}/shop.py:told")
    task = env.task("train", 1)
    conversations, steps = [], []
    for number in (3, 4):
        episode, talk = env.start(task, 1), [*task.messages]
        for reply, calls in (("a", [call("guess", number=number)]), ("b", [])):
            step = episode.step(reply, calls)
            talk += [dict(role="assistant", content=reply), *step.messages]
        conversations.append(talk)
        steps.append(step)
    env.score_group(task, conversations, steps)
    ((prompts, completions, hints),) = env.functions[0][1].__globals__["TOLD"]
    assert prompts == [task.messages] * 2 and hints == [task.data["row"]["hint"]] * 2
    assert [[message["role"] for message in talk] for talk in completions] == [
        ["assistant", "tool", "assistant"]] * 2


@pytest.mark.parametrize("options, message", [
    (dict(name="Nobody"), "option file .*shop.py:Nobody: expected path/to/file.py:name"),
    (dict(name="polite"), "expected a class with a method reset"),
    (dict(name="Unhinted", check="exact"), "expected tools with type hints and docstrings"),
    (dict(name="Plain"), "option check: expected one of exact"),
    (dict(max_turns="0"), "option max_turns: expected at least 1"),
    (dict(rewards="no.py:f"), "option rewards no.py:f: expected path"),
    (dict(maxturns="1"), "unknown option 'maxturns' .did you mean 'max_turns'")])
def test_bad_options_are_one_line(shop, options, message):
    with pytest.raises(envs.BadInput, match=message) as found:
        shop(**options)
    assert "\n" not in str(found.value)


def test_classes_that_break_their_word_are_named(shop):
    env = shop("Restless")
    task = env.task("train", 0)
    with pytest.raises(envs.BadInput,
                       match="says something else each time; expected it to draw from `random` or np"):
        env.start(task, 1)
    with pytest.raises(envs.BadInput, match="reset, row train-.*: expected a text or None, got 5"):
        shop("Wordy").task("train", 0)
    with pytest.raises(envs.BadInput, match=r"reset, row train-\d+ \(closed\)$"):
        shop("Leaving").task("train", 0)
    for name, says in (("Late", "'good'"), ("Vast", "(10000|nan)")):
        env = shop(name)
        for number in range(4):
            with pytest.raises(envs.BadInput, match=f"get_reward: expected a number, got {says}"):
                env.start(env.task("train", number), 1).step("x")


@pytest.mark.slow
def test_trl_gives_the_same_rewards(shop, monkeypatch):
    package("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import datasets
    import trl
    from transformers import AutoTokenizer
    from trl import chat_template_utils

    from tests.run_folders import TINY

    kind = envs.load_object(f"{shop.folder}/shop.py:Counter", "test")
    polite = envs.load_object(f"{shop.folder}/shop.py:polite", "test")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template  # it knows some
    config = trl.GRPOConfig(output_dir=str(shop.folder / "out"), per_device_train_batch_size=2,
                            num_generations=2,
                            report_to=[], use_cpu=True)
    trainer = trl.GRPOTrainer(TINY, [polite], config, datasets.Dataset.from_list(shop.rows),
                              environment_factory=kind, processing_class=tokenizer)
    assert {tool.__name__ for tool in trainer.tools} - {"close"} == {"guess", "is_larger"}
    env = shop(rewards=f"{shop.folder}/shop.py:polite", weights="2")
    task = env.task("train", 0)
    theirs, conversations, steps = [], [], []
    for reply, right in (("so it is", True), ("no", True), ("so", False), ("", False)):
        episode, game = env.start(task, 1), kind()
        game.reset(**task.data["row"])
        number = episode.made.secret if right else 0
        episode.step("", [call("guess", number=number)])
        game.secret = episode.made.secret
        asyncio.run(game.guess(number))
        steps.append(episode.step(reply, []))
        conversations.append([*task.messages, dict(role="assistant", content=reply)])
        theirs.append(game)
    trainer.environments = theirs
    prompts = [task.messages] * 4
    completions = [[messages[-1]] for messages in conversations]
    rewards = trainer._calculate_rewards([task.data["row"]] * 4, prompts, completions, [[0]] * 4)
    names = trainer.reward_func_names
    ours = env.score_group(task, conversations, steps)
    for row, step in zip(rewards.tolist(), ours, strict=True):
        found = dict(zip(names, row, strict=True))
        assert found["polite"] == pytest.approx(step.info.get("polite", float("nan")), nan_ok=True)
        assert found["Counter"] == step.info["get_reward"]
        assert step.reward == 2 * step.info.get("polite", 0.0) + step.info["get_reward"]
