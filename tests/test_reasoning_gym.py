"""The adapter of reasoning-gym, against the package: questions, scores, splits, options, hostile replies."""

import random
import re
import time

import pytest

import envs
from envs.adapters.reasoning_gym import SECONDS
from tests import stand_ins
from tests.run_folders import package

DATA_SETS = ["ab", "base_conversion", "binary_alternation", "caesar_cipher", "calendar_arithmetic",
             "chain_sum",
             "coin_flip", "count_bits", "decimal_arithmetic", "fraction_simplification", "gcd",
             "leg_counting",
             "letter_counting", "list_functions", "number_filtering", "number_sorting", "prime_factorization",
             "products", "spell_backward", "word_sorting", "countdown", "string_insertion"]
HOSTILE = ["", "\x00\ud800", "9" * 20_000, "(" * 5000, "[" * 5000, "1e999999999", "1/0", "9**9**9**9",
           "__import__('os').abort()", "().__class__", "word", "{}", "null", "a" * 1_000_000, "<think>",
           "1 " * 9999,
           "\\boxed{__import__('os').abort()}", "x.y", "exp" * 3000, "lambda: 0", "['a', 'b']"]


@pytest.fixture(scope="module")
def gym():
    return package("reasoning_gym")


def make(**options):
    return envs.make("reasoning-gym", **options)


def test_options_go_to_all_data_sets_that_have_them_or_to_one(monkeypatch):
    stand_ins.install(monkeypatch)
    env = make(task="sums,sums_in_words", most="9", system="Be brief.",
               **{"sums_in_words.most": 6, "sums_in_words.sign": "to"})
    tasks = [env.task("train", k) for k in range(60)]
    assert [task.source for task in tasks[:2]] == ["reasoning-gym/sums", "reasoning-gym/sums_in_words"]
    assert all(task.messages[0] == dict(role="system", content="Be brief.") for task in tasks)
    largest = [max(int(number) for task in tasks[k::2]
                   for number in re.findall(r"\d+", task.messages[1]["content"])) for k in (0, 1)]
    assert largest == [9, 6] and " to " in tasks[1].messages[1]["content"]
    env = make(task="sums,sums_in_words", most=5)
    texts = " ".join(env.task("train", k).messages[0]["content"] for k in range(40))
    assert {int(number) for number in re.findall(r"\d+", texts)} == {*range(6)}
    for option in ("sign", "sums.sign", "sums_in_words.sign"):
        with pytest.raises(envs.BadInput, match=f"unknown option '{option}'"):
            make(task="sums", **{option: "x"})


def test_no_question_comes_again_before_all_tasks_have_come(monkeypatch):
    """Entries are made a thousand at a time; one of the other split's gives way to a later one."""
    stand_ins.install(monkeypatch)
    env = make(task="sums", most=10**9, train_tasks=2100, test_tasks=1100)
    texts = [env.task(split, k).messages[0]["content"] for split in env.splits
             for start in (0, 950, 1950) for k in range(start, min(start + 100, env.num_tasks(split)))]
    assert (len(texts), len(texts) - len({*texts})) == (500, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DATA_SETS if name != "countdown"])  # half a minute
def test_no_test_question_is_trained_on(gym, name):
    env = make(task=name)
    train, test = [{env.task(split, k).messages[0]["content"] for k in range(count)}
                   for split, count in (("train", 300), ("test", 60))]
    assert train and test and not train & test
    for split in env.splits:
        for k in (0, 7):
            task = env.task(split, k)
            assert make(task=name).task(split, k) == task  # of another object, too
            solved = env.start(task, 1).step(env.solution(task))
            assert solved.terminated and solved.reward == solved.info["correct"] == solved.info["score"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA_SETS)
def test_scores_are_the_packages_own(gym, name):
    env = make(task=name)
    data = gym.create_dataset(name, size=1000, seed=1)
    entries = {entry["question"]: entry for entry in (data[k] for k in range(12))}
    rng, found = random.Random(name), 0
    for k in range(12):
        task = env.task("train", k)
        entry = entries.get(task.messages[0]["content"])
        if entry is None:
            continue  # its question was of the test split
        found += 1
        answer = entry["answer"]
        for reply in (answer, answer + "0", answer[:-1], "".join(rng.sample(answer, len(answer)))):
            reply = reply.strip()
            try:
                expected = data.score_answer(reply, entry) if reply else 0.0
            except Exception:
                expected = 0.0
            info = env.start(task, 1).step(reply).info
            assert info["score"] == pytest.approx(float(expected)) or name in env.apart and not info["score"]
            assert info["correct"] == (info["score"] == 1)
    assert found >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "string_insertion", "prime_factorization",
                                  "coin_flip", "boxnet", "game_of_life", "propositional_logic", "n_queens"])
def test_any_reply_gets_a_score_in_time_and_is_not_run(gym, name, tmp_path):
    env = make(task=name)
    task = env.task("train", 0)
    for reply in [*HOSTILE, f"open({str(tmp_path / 'made')!r}, 'w')"]:
        start = time.perf_counter()
        step = env.start(task, 1).step(reply)
        assert step.terminated and 0 <= step.reward < 1 and time.perf_counter() - start < 15 * SECONDS
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_options_are_the_data_sets_own(gym):
    env = make(task="chain_sum, spell_backward", min_terms="2", max_terms="3",
               **{"spell_backward.max_word_len": "4"},
               reward_mode="binary", extract="answer_tag", system="Be brief.", test_tasks="6")
    tasks = [env.task("train", k) for k in range(40)]
    assert [task.source for task in tasks[:2]] == ["reasoning-gym/chain_sum", "reasoning-gym/spell_backward"]
    assert all(task.messages[0] == dict(role="system", content="Be brief.") for task in tasks)
    sums = [task.messages[1]["content"] for task in tasks[::2]]
    assert {text.count(" + ") + text.count(" - ") for text in sums} == {1, 2}
    assert max(len(env.solution(task)) for task in tasks[1::2]) == len("<answer></answer>") + 4
    word = tasks[1]
    right = env.solution(word)
    assert env.start(word, 1).step(right).reward == 1
    almost = env.start(word, 1).step(right.replace("</answer>", "x</answer>"))
    assert almost.reward == 0 < almost.info["score"]
    assert env.start(word, 1).step(right[8:-9]).info["format"] == 0
    assert env.num_tasks("test") == 6 and len(env.task("test", 5).messages) == 2
    env = make(task="game_of_life", grid_size_x="4", grid_size_y=4)
    assert env.config.own["game_of_life"] == dict(grid_size_x=4, grid_size_y=4)


@pytest.mark.slow
@pytest.mark.parametrize("options, message", [
    (dict(task="chain_sums"),
     "option task: expected different ones of ab, .*got 'chain_sums' .did you mean 'chain_s"),
    (dict(task="gcd,gcd"), "option task: expected different ones"),
    (dict(max_term="3"),
     "unknown option 'max_term' .did you mean 'max_terms'.*; known: allow_negation, extract"),
    (dict(max_terms="x"), "chain_sum: option max_terms: expected int, got 'x'"),
    ({"gcd.max_terms": "3"}, "unknown option 'gcd.max_terms'"),
    (dict(min_terms="9"), "chain_sum with {.min_terms.: 9} .max_terms must be >= min_terms"),
    (dict(extract="box"), "option extract: expected one of auto, last_number"),
    (dict(task="count_bits", min_n="1", max_n="1"), "count_bits has too few different questions")])
def test_bad_options_are_one_line(gym, options, message):
    with pytest.raises(envs.BadInput, match=message) as found:
        make(**options)
    assert "\n" not in str(found.value)
