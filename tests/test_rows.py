"""envs/rows.py: people's own rows. Files, columns, comparisons, code, reward functions, bad rows."""

import collections
import csv
import functools
import json
import random
import tempfile
import typing
import warnings
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import envs
from envs.rows import FILES, Config

# Of a few rows, one is held out, which a line says.
pytestmark = pytest.mark.filterwarnings("ignore:environment rows")


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count=40):
    return [dict(question=f"What is {n} + {n}?", answer=str(2 * n)) for n in range(1, count + 1)]


def make(data, **options):
    return envs.make("rows", data=str(data), **options)


# Files


QUESTIONS = [f"What is {n} + {n}?" for n in range(100)]
AGAIN = [*QUESTIONS, *QUESTIONS[::3]]  # with another answer


def in_messages(question):
    return [dict(role="system", content="Add."), dict(role="user", content=question)]


# What stands in a row for a question.
FORMS = {"text": lambda question: question, "messages": in_messages,
         "JSON": lambda question: json.dumps(in_messages(question)),
         "nested": lambda question: dict(question=question)}


def asked(env):
    """{split: how often each question is there}"""
    tasks = {split: [env.task(split, k) for k in range(env.num_tasks(split))] for split in env.splits}
    return {split: collections.Counter(task.messages[-1]["content"] for task in some)
            for split, some in tasks.items()}


@functools.cache
def held_out(form):
    """The questions that are held out of a file in which they stand once, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [dict(prompt=FORMS[form](question), answer=0) for question in QUESTIONS]
        env = make(write(Path(folder, "a.jsonl"), rows), check="exact")
        return asked(env)["test"].keys()


@pytest.mark.parametrize("suffix, form", [(suffix, form) for suffix in FILES for form in FORMS
                                          if form != "messages" or suffix not in (".csv", ".tsv")])
def test_a_question_is_on_one_side_in_files_of_every_form(tmp_path, suffix, form):
    """However often and where it stands; and whatever is not held out is trained on."""
    def saved(name, questions):
        rows = []
        for place, question in enumerate(questions):
            prompt = FORMS[form](question)
            if form == "nested" and suffix in (".csv", ".tsv"):
                prompt = json.dumps(prompt)
            rows.append(dict(prompt=prompt, answer=place))
        return write(tmp_path / f"{name}{suffix}", rows)

    options = dict(prompt="prompt.question" if form == "nested" else "prompt", check="exact")
    shuffled = random.Random(1).sample(AGAIN, len(AGAIN))
    env = make(saved("one", shuffled), **options)
    sides = asked(env)
    assert not sides["train"].keys() & sides["test"].keys()
    assert sides["train"] + sides["test"] == collections.Counter(AGAIN)
    same = {"nested": "text", "JSON": "messages"}.get(form, form)
    assert sides["test"].keys() == held_out(same)
    assert 0.05 < len(sides["test"]) / len(QUESTIONS) < 0.15  # a tenth
    counts = {split: env.num_tasks(split) for split in env.splits}
    assert f"one{suffix}: {counts['train']} to train on, {counts['test']} held out;" in env.about

    test = [*QUESTIONS[10:40], *QUESTIONS[20:25], "What is 1 + 2?"]
    env = make(saved("train", shuffled), test=saved("test", test), **options)
    sides = asked(env)
    assert sides["test"] == collections.Counter(test)
    assert sides["train"] == collections.Counter(question for question in AGAIN if question not in test)
    left_out = len(AGAIN) - env.num_tasks("train")
    assert f"{env.num_tasks('train')} to train on; left out: {left_out} that are held out too;" in env.about
    for split in env.splits:
        task = env.task(split, 0)
        right, wrong = task.data["answers"][0], "-1"
        assert env.start(task, 1).step(right).info == {"correct": 1.0, "format": 1.0}
        assert env.start(task, 1).step(wrong).info == {"correct": 0.0, "format": 1.0}


def test_a_csv_keeps_texts_as_they_are(tmp_path):
    rows = [dict(prompt=f"code {n}?", answer="007") for n in range(3)]
    env = make(write(tmp_path / "a.csv", rows), check="exact")
    episode = env.start(env.task("train", 0), 1)
    assert episode.step("007").reward == 1 and episode.step("7").reward == 0
    (tmp_path / "short.csv").write_text("prompt,answer\na,b\nc\n")
    with pytest.raises(envs.BadInput,
                       match=r"short.csv: cannot be read .row 2: expected a value for each column of prompt"):
        make(tmp_path / "short.csv", check="exact")


@pytest.mark.parametrize("kind", ["files", "saved"])
def test_a_folder_has_splits(tmp_path, kind, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = {"train": sums(30), "validation": sums(60)[35:], "test": sums(40)[25:]}
    if kind == "files":
        for name, rows in parts.items():
            write(folder / f"{name}.jsonl", rows)
    else:
        splits = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
        datasets.DatasetDict(splits).save_to_disk(folder)
    file = write(tmp_path / "file.csv", sums(6))
    for options, train, test in [  # the numbers that are asked for
            ({}, range(1, 26), range(26, 41)), (dict(test="validation"), range(1, 31), range(36, 61)),
            (dict(split="validation"), range(41, 61), range(26, 41)),
            (dict(split="test", test="train"), range(31, 41), range(1, 31)),
            (dict(split="validation", test=file), range(36, 61), range(1, 7))]:
        sides = asked(make(folder, prompt="question", check="number", **options))
        expected = {"train": train, "test": test}
        assert sides == {split: collections.Counter(f"What is {n} + {n}?" for n in numbers)
                         for split, numbers in expected.items()}, options
    sides = asked(make(folder, prompt="question", check="number", split="test"))  # a part of it is held out
    assert sum(sides["train"].values()) + sum(sides["test"].values()) == 15 and sides["test"]
    with pytest.raises(envs.BadInput, match="no split 'trian' .did you mean 'train'.*it has train, "):
        make(folder, prompt="question", check="number", split="trian")
    with pytest.raises(envs.BadInput, match="option test: expected a file .* or a split of .* "
                                            r"\((validation, test|test, validation)\), got 'val'"):
        make(folder, prompt="question", check="number", test="val")


# Other projects' files, with the columns that they have


def test_a_file_of_verl(tmp_path):
    rows = [dict(data_source="openai/gsm8k",
                 prompt=[dict(role="user", content=f"Add {n} and 2. After \"####\".")],
                 ability="math", reward_model=dict(style="rule", ground_truth=str(n + 2)),
                 extra_info=dict(split="train", index=n, answer="...", question="...")) for n in range(20)]
    env = make(write(tmp_path / "train.parquet", rows), answer="reward_model.ground_truth", check="number",
               source="data_source", id="extra_info.index")
    task = env.task("train", 0)
    assert task.source == "openai/gsm8k" and task.messages[0]["role"] == "user"
    assert task.id == str(int(task.messages[0]["content"].split()[1]))
    assert env.start(task, 1).step(f"So:\n#### {int(task.id) + 2}").reward == 1
    assert env.start(task, 1).step(f"{int(task.id) + 2}, no:\n#### 0").reward == 0


def test_a_file_of_trl(tmp_path):
    rows = [dict(prompt=[dict(role="system", content="Think."),
                         dict(role="user", content=f"Half of {2 * n}?")],
                 solution=f"$\\boxed{{{n}}}$") for n in range(20)]
    env = make(write(tmp_path / "train.jsonl", rows), answer="solution", check="number", extract="boxed")
    task = env.task("train", 0)
    half = int(task.messages[1]["content"][8:-1]) // 2
    assert [m["role"] for m in task.messages] == ["system", "user"]
    assert env.start(task, 1).step(f"It is \\boxed{{{half}}}.").reward == 1
    assert env.start(task, 1).step(f"It is {half}.").info == {"correct": 0.0, "format": 0.0}


def test_a_file_of_open_instruct(tmp_path):
    rows = [dict(messages=[dict(role="user", content=f"How many letters has {'a' * n}?")],
                 ground_truth=[str(n), f"{n} letters"], dataset=["gsm8k"]) for n in range(1, 20)]
    env = make(write(tmp_path / "train.parquet", rows), prompt="messages", answer="ground_truth",
               check="contains", system="Answer briefly.")
    task = env.task("train", 0)
    count = len(task.messages[1]["content"].split()[-1]) - 1
    assert task.messages[0] == dict(role="system", content="Answer briefly.")
    assert env.start(task, 1).step(f"It has {count}.").reward == 1
    assert env.start(task, 1).step(f"It has {count}0.").reward == 0


# Rewards of one's own

REWARDS = '''
import asyncio
CALLS = []
def correct(prompts, completions, answer, **columns):
    CALLS.append((prompts, completions, answer, sorted(columns)))
    return [float(c.strip() == a) for c, a in zip(completions, answer)]
def short(completions, **kwargs):
    longest = max(map(len, completions))
    return [None if not c else len(c) / longest for c in completions]
async def later(prompts, completions):
    await asyncio.sleep(0)
    return [0.5] * len(prompts)
def few(completions, **kwargs):
    return [1.0]
def text(completions, **kwargs):
    return ["good"] * len(completions)
def fails(completions, **kwargs):
    return [float(c) for c in completions]
def endless(completions, **kwargs):
    return [float("inf"), float("nan")]
def chat(prompts, completions, **kwargs):
    return [float(p[-1]["content"].startswith("What") and c[0]["content"] == "yes") for p, c in
            zip(prompts, completions)]
'''


def score(env, replies):
    task = env.task("train", 0)
    steps = [env.start(task, 1).step(reply) for reply in replies]
    conversations = [[*task.messages, dict(role="assistant", content=reply)] for reply in replies]
    return task, env.score_group(task, conversations, steps)


def test_reward_functions_see_a_group(tmp_path):
    (tmp_path / "my.py").write_text(REWARDS)
    data = write(tmp_path / "train.jsonl", sums())
    names = ",".join(f"{tmp_path}/my.py:{name}" for name in ("correct", "short", "later"))
    env = make(data, prompt="question", rewards=names, weights="1,0.2,-1")
    answer = env.task("train", 0).data["row"]["answer"]
    task, steps = score(env, [answer, "xxxx", ""])
    short = len(answer) / 4
    assert [step.reward for step in steps] == pytest.approx([1 + 0.2 * short - 0.5, 0.2 - 0.5, -0.5])
    assert steps[0].info == {"correct": 1.0, "short": short, "later": 0.5}
    assert steps[2].info == {"correct": 0.0, "later": 0.5}  # None does not count
    ((prompts, completions, answers, columns),) = env.functions[0][1].__globals__["CALLS"]
    assert prompts == [task.messages[0]["content"]] * 3 and completions == [answer, "xxxx", ""]
    assert answers == [answer] * 3
    assert columns == ["completion_ids", "log_extra", "log_metric", "question", "trainer_state"]
    # With a check too, its verdict is what is right, and is added.
    env = make(data, prompt="question", check="number", rewards=f"{tmp_path}/my.py:correct", weights="0.5")
    answer = env.task("train", 0).data["row"]["answer"]
    _, steps = score(env, [f"It is {answer}", answer])
    assert [step.reward for step in steps] == [1.0, 1.5]
    assert steps[0].info == {"correct": 1.0, "format": 1.0, "my_correct": 0.0}


@pytest.mark.parametrize("form", ["text", "messages"])
def test_functions_get_each_reply_beside_the_columns_of_its_row(tmp_path, form):
    """Lists in the order of the replies; a column named as something that TRL gives does not hide it."""
    (tmp_path / "my.py").write_text("CALLS = []\n\ndef noted(completions, **columns):\n"
                                    "    CALLS.append((completions, columns))\n"
                                    "    return [len(CALLS) + k / 10 for k in range(len(completions))]\n")
    rows = [dict(prompt=FORMS[form](f"q{n}"), hint=f"h{n}", completions="c", prompts="p", label=[n, None])
            for n in range(8)]
    env = make(write(tmp_path / "a.jsonl", rows), system="Be brief.", rewards=f"{tmp_path}/my.py:noted")
    calls = env.functions[0][1].__globals__["CALLS"]
    replies = ["a", "b", "a", "", "c"]
    for number in range(1, 4):
        task = env.task("train", number)
        row = task.data["row"]
        given = [dict(role="assistant", content=reply) for reply in replies]
        steps = env.score_group(task, [[*task.messages, message] for message in given],
                                [env.start(task, 1).step(reply) for reply in replies])
        assert [step.reward for step in steps] == [number + k / 10 for k in range(5)]
        completions, columns = calls[-1]
        prompt = row["prompt"] if form == "text" else task.messages
        assert completions == (replies if form == "text" else [[message] for message in given])
        assert columns["prompts"] == [prompt] * 5 and columns["prompt"] == [row["prompt"]] * 5
        assert columns["hint"] == [row["hint"]] * 5 and columns["label"] == [row["label"]] * 5
        assert "completion" not in columns and columns["completion_ids"] == [None] * 5
    assert len(calls) == 3


def test_functions_of_one_name_are_two_and_none_takes_the_place_of_the_verdict(tmp_path, monkeypatch):
    for name, earned in (("one", 0.25), ("two", 0.5)):
        (tmp_path / f"{name}.py").write_text(f"def good(completions, **_):\n    return [{earned}]\n")
    env = make(write(tmp_path / "a.jsonl", sums(9)), prompt="question", check="number",
               rewards=f"{tmp_path}/one.py:good, {tmp_path}/two.py:good")
    _, (step,) = score(env, ["none"])
    assert step.reward == 0.75
    assert step.info == {"correct": 0.0, "format": 0.0, "one_good": 0.25, "two_good": 0.5}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.py").write_text("def good(completions, **_):\n    return [0.125]\n")
    monkeypatch.syspath_prepend(tmp_path)
    one, two, own = (f"{tmp_path}/{file}.py:good" for file in ("mine/../one", "two", "mine/one"))
    for names, labels in (([own, two, one], ["mine_one_good", "two_good", f"{tmp_path.name}_one_good"]),
                          (["mine.one:good", two], ["one_good", "two_good"])):  # a file, or a module
        _, (step,) = score(make(tmp_path / "a.jsonl", prompt="question", rewards=",".join(names)), ["none"])
        assert step.info == {"correct": 0.0} | dict(zip(labels, [0.125, 0.5, 0.25], strict=False))
    (tmp_path / "my.py").write_text("def correct(completions, **_):\n    return [0.5]\n")
    good, correct = f"{tmp_path}/one.py:good", f"{tmp_path}/my.py:correct"
    for names, parts in ([good, correct], dict(my_correct=0.5)), ([correct, good], {}):
        env = make(tmp_path / "a.jsonl", prompt="question", rewards=",".join(names))
        _, (step,) = score(env, ["none"])
        assert step.reward == 0.75 and step.info == {"correct": 0.0, "good": 0.25} | parts


@pytest.mark.parametrize("name, message", [
    ("few", r"reward few, row train-\d+: expected 2 numbers, or None, got \[1.0\]"),
    ("endless", r"reward endless, row train-\d+: expected 2 numbers, or None, got \[inf, nan\]"),
    ("text", r"reward text, row train-\d+: expected 2 numbers, or None, got \['good', 'good'\]"),
    ("fails", r"reward fails, row train-\d+: ValueError: could not convert string to float: 'a'")])
def test_a_reward_function_that_errs_is_one_line(tmp_path, name, message):
    (tmp_path / "my.py").write_text(REWARDS)
    env = make(write(tmp_path / "train.jsonl", sums()), prompt="question", rewards=f"{tmp_path}/my.py:{name}")
    with pytest.raises(envs.BadInput, match=message):
        score(env, ["a", "b"])


NUMBERS = {  # what two replies may be worth, and what that is
    "[True, None]": [1, None], "[1, Fraction(1, 2)]": [1, 0.5], "(Decimal('0.5'), 10**300)": [0.5, 1e300],
    "np.array([0.5, 1])": [0.5, 1], "[np.float32(0.5), np.bool_(True)]": [0.5, 1],
    "iter([np.array(0.5), -0.0])": [0.5, 0]}
NO_NUMBERS = [
    "[10**400, 1]", "[1, -10**5000]", "[Fraction(10**400), 1]", "[Decimal('1e999'), 1]",
    "[Decimal('sNaN'), 1]", "[np.float64('nan'), 1]", "[np.longdouble('inf'), 1]", "[np.array([1.0]), 1]",
    "np.ones((2, 1))", "[[1], [2]]", "[1j, 1]", "['1', '2']", "[object(), 1]", "[Odd(), 1]", "'12'", "b'12'",
    "{1: 0, 2: 0}", "{1.0, 2.0}", "[]", "[1] * 3", "itertools.count()"]
RAISES = {
    "None": "TypeError", "1.0": "TypeError", "sys.exit(0)": "SystemExit: 0", "later(0)": "RecursionError",
    "bytearray(1 << 62)": "MemoryError", "[1 for _ in itertools.repeat(1) if stop()]": "GeneratorExit",
    "asyncio.run(gone())": "CancelledError", "exec('1 +')": "SyntaxError", "int('9' * 5000)": "ValueError"}


def scored(tmp_path, expression, **options):
    """The numbers of two replies, of a function that returns what an expression says."""
    (tmp_path / "my.py").write_text(f'''
import asyncio, itertools, sys
from decimal import Decimal
from fractions import Fraction
import numpy as np
class Odd:
    def __float__(self): raise KeyError
    def __repr__(self): raise KeyError
def stop(): raise GeneratorExit
def later(n): return later(n + 1)
async def gone(): raise asyncio.CancelledError
def f(completions, **_): return {expression}
def big(completions, **_): return [-1.5e308, 1.5e308]
''')
    options = dict(rewards=f"{tmp_path}/my.py:f") | options
    _, steps = score(make(write(tmp_path / "a.jsonl", sums(4)), prompt="question", **options), ["a", "b"])
    return [step.info.get("f") for step in steps]


@pytest.mark.parametrize("expression", NUMBERS)
def test_what_is_a_number_is_a_reward(tmp_path, expression):
    assert scored(tmp_path, expression) == NUMBERS[expression]


@pytest.mark.parametrize("expression", NO_NUMBERS)
def test_what_is_no_number_is_one_line_that_names_the_function(tmp_path, expression):
    expected = r"reward f, row train-\d: expected 2 numbers, or None, got "
    with pytest.raises(envs.BadInput, match=expected) as found:
        scored(tmp_path, expression)
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


@pytest.mark.parametrize("expression", RAISES)
def test_whatever_a_function_raises_is_one_line_that_names_it(tmp_path, expression):
    with pytest.raises(envs.BadInput, match=r"reward f, row train-\d: " + RAISES[expression]) as found:
        scored(tmp_path, expression)
    assert "\n" not in str(found.value)


def test_an_interrupt_within_a_function_stays_one_and_rewards_have_a_finite_sum(tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"reward f, row train-\d"):
        scored(tmp_path, "exec('raise KeyboardInterrupt')")
    expected = r"row train-\d: expected sums of rewards that are finite, got \[-inf"
    with pytest.raises(envs.BadInput, match=expected):
        scored(tmp_path, "[0, 0]", rewards=f"{tmp_path}/my.py:big,{tmp_path}/my.py:f", weights="9,1")


# Checks


@pytest.mark.parametrize("extract", typing.get_args(typing.get_type_hints(Config)["extract"]))
@pytest.mark.parametrize("check, answer", [("number", 42), ("exact", "New York"), ("choice", "B")])
def test_a_solution_is_marked_as_extract_has_it(tmp_path, check, answer, extract):
    """What is read of a reply is what the option says, for other replies, too."""
    if (check, extract) == ("exact", "last_number") or (check, extract) == ("choice", "last_number"):
        return
    rows = [dict(prompt=f"q{n}", answer=answer) for n in range(4)]
    env = make(write(tmp_path / "a.jsonl", rows), check=check, extract=extract)
    task = env.task("train", 0)
    assert env.start(task, 1).step(env.solution(task)).info == {"correct": 1.0, "format": 1.0}
    marked = {"boxed": f"\\boxed{{{answer}}}", "answer_tag": f"<answer>{answer}</answer>"}
    for name, reply in (marked | {"last_number": f"{answer}", "whole": f"{answer}"}).items():
        reads = extract in (name, "auto") or name in ("last_number", "whole") and extract not in marked
        if extract in marked or reads:
            assert env.start(task, 1).step(reply).reward == reads, reply


def test_a_check_asks_what_the_user_asks(tmp_path):
    """A number of a question about percentages may have the sign or not."""
    for asked, right in (("What percentage is it?", 1), ("What is it?", 0)):
        prompt = [dict(role="system", content="Answer."), dict(role="user", content=asked)]
        env = make(write(tmp_path / "a.jsonl", [dict(prompt=prompt, answer="50")] * 3
                         + [dict(prompt="Another?", answer="50")] * 3), check="number")
        task = next(task for split in env.splits for k in range(env.num_tasks(split))
                    if (task := env.task(split, k)).messages == prompt)
        assert env.start(task, 1).step("It is 50 %.").reward == right


def test_code_has_the_time_that_is_given_and_is_waited_for(tmp_path):
    rows = [dict(prompt=f"q{n}", answer="assert f() == 1") for n in range(4)]
    env = make(write(tmp_path / "a.jsonl", rows), check="python", timeout="2.5",
               guessable=True)
    assert env.task("train", 0).data["timeout"] == 2.5
    assert env.blocking and not make(tmp_path / "a.jsonl", check="exact").blocking


# Bad input


@pytest.mark.parametrize("options, message", [
    (dict(data=""), "option data: expected a file"),
    (dict(check=""),
     "option check: expected one of exact, number, choice, math, contains, regex, python, where"),
    (dict(check="nunber"), "option check: expected one of , exact, number"),
    (dict(prompt="qestion"),
     r"row 1: no column qestion \(did you mean 'question'\?\); it has question, answer \(40"),
    (dict(answer="reward.truth"), "row 1: no column reward.truth"),
    (dict(data="no.jsonl"), r"data no.jsonl: cannot be read \(FileNotFoundError"),
    (dict(data="data.txt"),
     r"data data.txt: cannot be read .*expected a file \(.jsonl, .json, .parquet, .csv, "),
    (dict(rewards="my.py:f", weights="1,2"), "option weights: expected 1 numbers with commas"),
    (dict(rewards="my.py:f"), "option rewards my.py:f: expected path/to/file.py:name"),
    (dict(timeout="0"), "option timeout: expected more than 0"),
    (dict(colum="x"), "unknown option 'colum'.*known: data, split, test, prompt")])
def test_bad_options_are_one_line(tmp_path, options, message):
    given = dict(data=write(tmp_path / "train.jsonl", sums()), prompt="question", check="number") | options
    with pytest.raises(envs.BadInput, match=message) as found:
        envs.make("rows", **given)
    assert "\n" not in str(found.value)


def test_bad_rows_are_named_and_left_out(tmp_path):
    bad = [dict(question="no answer"), dict(question="empty", answer=""),
           dict(question="word", answer="many"),
           dict(question="", answer="1"), dict(question=[dict(role="user")] * 0, answer="1"), 5,
           dict(question=[dict(role="robot", content="x")], answer="1"), dict(question="list", answer=[]),
           dict(question=[dict(role="user", content="x"), dict(role="assistant", content="y")], answer="1")]
    data = write(tmp_path / "train.jsonl", sums(20) + bad)
    env = make(data, prompt="question", check="number")
    assert env.num_tasks("train") + env.num_tasks("test") == 20
    assert "left out: 9 that cannot be used (row 21: no column answer; it has question; " in env.about
    with pytest.raises(envs.BadInput, match=r"row 3: no column answer; it has question \(9 such rows\)"):
        make(write(tmp_path / "most.jsonl", sums(2) + bad), prompt="question", check="number")
    twice = [dict(row, name=n % 30) for n, row in enumerate(sums(40))]
    env = make(write(tmp_path / "twice.jsonl", twice), prompt="question", check="number", id="name")
    assert "10 that cannot be used (10 like row 31: column name: '0' a second time)" in env.about


def test_a_row_of_its_own_kind_of_source(tmp_path):
    rows = [dict(row, kind=["easy", "very hard!"][n % 2]) for n, row in enumerate(sums(10))]
    env = make(write(tmp_path / "a.jsonl", rows), prompt="question", check="number", source="kind")
    sources = {env.task("train", k).source for k in range(env.num_tasks("train"))}
    assert sources == {"easy", "very_hard_"}


def test_in_a_mixture(tmp_path):
    (tmp_path / "my.py").write_text(REWARDS)
    data = write(tmp_path / "train.jsonl", sums())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = envs.make("rows,countdown", **{"rows.data": data, "rows.prompt": "question",
                                             "rows.rewards": f"{tmp_path}/my.py:chat,{tmp_path}/my.py:later"})
    assert "held out" in env.about
    with pytest.raises(envs.BadInput, match="reward chat, row train-"):
        score(env, ["yes", "no"])
