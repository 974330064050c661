"""envs/rows.py, csv_files.py, census.py: what is read of people's files, left out, refused, and said of them.

What is compared with what is in test_rows.py.
"""

import datetime
import decimal
import json
import resource
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

import envs
from envs import answers
from envs import rows as rows_module
from envs.answers import CHECKS
from envs.rows import answer_text
from tests.run_folders import package, quick
from tests.test_answers import ADD, TESTS, needs_sandbox
from tests.test_rows import make, sums, write

pytestmark = pytest.mark.filterwarnings("ignore:environment rows")


def tasks_of(env):
    return [env.task(split, k) for split in env.splits for k in range(env.num_tasks(split))]


def answers_of(env):
    """{prompt's text: right answers}"""
    return {task.messages[-1]["content"]: task.data["answers"] for task in tasks_of(env)}


def first_task(path, answer="a", **row):
    """The task of a row, in a file that has others too."""
    rows = [dict(row, answer=answer), *(dict(prompt=f"q{n}", answer=answer) for n in range(3))]
    env = make(write(path, rows), check="exact" if answer == "a" else "python", system="S", guessable=True)
    return next(task for task in tasks_of(env) if task.id == "train-1")


def judge(env, reply, index=0):
    return env.start(env.task("train", index), 1).step(reply).reward


# Texts that are too large, or nested too deeply


TOO_LARGE = {  # check -> answers, each of which leaves its row out
    "number": ["1e999999999", "9" * 10**6, "9" * 5000, "10**10**10", "-" * 10**5 + "1", "[" * 10**5, "1e400"],
    "exact": ["9" * 10**6, "{" * 10**5, "\\text{" * 10**4],
    "contains": ["9" * 10**6, "a b " * 10**5, "(" * 10**5],
    "choice": ["A" * 10**6, "9" * 5000, "(" * 10**5],
    "regex": ["(a{65535}){65535}", "ab" * 5000, "(?:x" * 900 + ")?" * 900, "[" * 10**5],
    "python": ["assert " + "-" * 10**5 + "1", "assert f() == " + "[" * 10**5, "not " * 50_000 + "1",
               "assert f() == " + "+".join("1" * 5000), "assert f" + ".a" * 20_000, "lambda:" * 3000 + "1",
               "assert f() == " + "9" * 5000, "assert f()\n" * 10**5]}


@pytest.mark.parametrize("check, answer", ids=lambda value: value[:20], argvalues=[
    (check, answer) for check in TOO_LARGE for answer in TOO_LARGE[check]])
def test_an_answer_that_is_too_large_leaves_its_row_out_in_bounded_time_and_memory(
        tmp_path, check, answer, monkeypatch):
    monkeypatch.setattr(rows_module.sandbox, "check", lambda: None)
    good = dict(python="assert f() == 1", choice="A").get(check, "7")
    rows = [dict(prompt=f"q{n}", answer=good) for n in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with quick(answer[:20]):  # here; a pattern is tried in another process
        env = make(write(tmp_path / "a.jsonl", [*rows, dict(prompt="x", answer=answer)]), check=check,
                   guessable=True)
    assert set(answers_of(env)) == {f"q{n}" for n in range(4)}
    assert "; left out: 1 that cannot be used (row 5: " in env.about and "\n" not in env.about
    assert len(env.about) < 800 and ("took over" in env.about) == ("took over 1.0 s" in env.about)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_pattern_of_repetitions_is_compared_and_a_slow_one_is_ended(tmp_path, monkeypatch):
    rows = [dict(prompt="q", answer=r"^(ab?){2,50}c{1,4000000000}$")] * 4
    env = make(write(tmp_path / "a.jsonl", rows), check="regex")
    assert env.blocking and judge(env, "abac") == 1 and judge(env, "ac") == 0
    with pytest.raises(RuntimeError, match="^a worker process took over 0.3 s$"):  # its tables take minutes
        answers.in_worker("regex", 0.3, answers.regex_found, "a" * 8000, ["a" * 9000])
    monkeypatch.setattr(answers, "WORKER_SECONDS", 0.3)
    assert CHECKS["regex"].right("a" * 9000, dict(answers=["a" * 8000])) is False
    monkeypatch.undo()
    assert judge(env, "aac") == 1  # by another process


@pytest.mark.parametrize("prompt", [
    " " * 50_000 + "x", "\n\t" * 25_000 + "[", "\u3000" * 50_000 + ".", "[" + " " * 10**6, "{ " * 10**6,
    "```\n" * 10**5])
def test_a_long_prompt_is_read_in_bounded_time(tmp_path, prompt):
    rows = [dict(prompt=f"{prompt}{n}", answer="a") for n in range(4)]
    with quick(prompt[:20], most=10):
        env = make(write(tmp_path / "a.jsonl", rows), check="exact")
        assert len(tasks_of(env)) == 4 and judge(env, "a") == 1


DEEP = "[" * 300 + "]" * 300
TOO_DEEP = "row 5: lists and objects that are nested more than 100 deep"


@pytest.mark.parametrize("row, says", [
    (f'{{"prompt": "x", "answer": "a", "more": {DEEP}}}', TOO_DEEP),
    (f'{{"prompt": "x", "answer": {DEEP}}}', TOO_DEEP),
    (json.dumps(dict(prompt=f'[{{"role": "user", "content": "x", "more": {DEEP}}}]', answer="a")), TOO_DEEP),
    (json.dumps(dict(prompt='[{"role": "user", "content": ' + "[" * 10**5, answer="a")),
     "row 5: column prompt: expected a text, or messages as JSON (maximum recursion depth exceeded"),
    ('{"prompt": "x", "answer": 1e999999999}', "row 5: column answer: expected a text, a number, true"),
    ('{"prompt": "x", "answer": "a", "more": ' + "[" * 10**5 + "]" * 10**5 + "}", "row 5 (RecursionError: "),
    ('{"prompt": "x", "answer": ' + "9" * 10**6 + "}", "row 5 (ValueError: Exceeds the limit (4300 digits)")])
def test_a_row_that_is_nested_too_deeply_or_has_too_large_a_number_is_named(tmp_path, row, says):
    file = Path(write(tmp_path / "a.jsonl", [dict(prompt=f"q{n}", answer="a") for n in range(4)]))
    with file.open("a") as lines:
        lines.write(row + "\n")
    try:
        said = make(file, check="exact").about
    except envs.BadInput as error:
        said = str(error)
    assert says in said and "\n" not in said


# Answers that are not texts


@pytest.mark.parametrize("value, text", [
    ("007", "007"), (" as is ", " as is "), (8, "8"), (10**30, "1" + "0" * 30), (8.0, "8"), (-8.0, "-8"),
    (-0.0, "0"),
    (7.5, "7.5"), (1e-05, "0.00001"), (0.1 + 0.2, "0.3"), (2 / 3, "0.6666666666666666"),
    (2.718281828459045, "2.718281828459045"), (1e16, "10000000000000000"), (1e300, "1e300"),
    (1e-300, "1e-300"),
    (decimal.Decimal("8.00"), "8"), (decimal.Decimal("8.50"), "8.5"), (decimal.Decimal("1E+3"), "1000"),
    (True, "true"), (False, "false"), (None, ""), (float("nan"), ""), ("nan", ""), ("<NA>", ""),
    ("Nan", "Nan"),
    (datetime.date(2020, 1, 31), "2020-01-31"), (datetime.datetime(2020, 1, 31), "2020-01-31"),
    (pandas.Timestamp("2020-01-31 10:30"), "2020-01-31 10:30:00"), (datetime.time(10, 30), "10:30:00"),
    (b"caf\xc3\xa9", "caf\u00e9"), (np.int64(3), "3"), (np.float32(0.1), "0.1"), (np.bool_(True), "true")])
def test_an_answer_is_what_a_person_writes(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize(
    "value", [b"\xff", float("inf"), ["a"], {}, datetime.timedelta(1), 123456789012345678.0])
def test_an_answer_without_a_plain_form_is_refused_with_its_value(value):
    with pytest.raises(ValueError, match=r"inf|\['a'\]|\{\}|timedelta|0xff|1.2345678901234568e\+17"):
        answer_text(value)


GAPS = pandas.DataFrame(dict(prompt=[f"q{n}" for n in range(8)], answer=[8, 8, None, *[8] * 5]))


@pytest.mark.parametrize("name, save", [
    ("a.parquet", GAPS.to_parquet), ("a.csv", GAPS.to_csv),
    ("b.csv", lambda path: GAPS.to_csv(path, index=False)),
    ("a.jsonl", lambda path: GAPS.to_json(path, orient="records", lines=True)),
    ("a.json", lambda path: GAPS.to_json(path, orient="records")),
    ("saved", lambda path: saved(GAPS, path))])
def test_whole_numbers_of_a_column_with_a_gap_are_whole_and_the_gap_is_said(tmp_path, name, save):
    save(tmp_path / name)
    env = make(tmp_path / name, check="exact")
    assert answers_of(env) == {f"q{n}": ["8"] for n in range(8) if n != 2}
    assert judge(env, "8") == 1 and judge(env, "8.0") == 0
    assert "left out: 1 that cannot be used (row 3: column answer: expected a" in env.about


def saved(frame, path):
    import datasets

    datasets.Dataset.from_pandas(frame).save_to_disk(path)


def test_answers_of_other_types_of_arrow_are_plain_texts(tmp_path):
    columns = dict(single=pyarrow.array([0.1] * 4, pyarrow.float32()),
                   price=pyarrow.array([decimal.Decimal("2.50")] * 4),
                   day=pyarrow.array([datetime.date(2020, 1, 31)] * 4),
                   structs=pyarrow.array([[dict(a="0.1", b=None)]] * 4,
                                         pyarrow.list_(pyarrow.struct([("a", "string"), ("b", "string")]))),
                   many=pyarrow.array([[0.1, None]] * 4, pyarrow.list_(pyarrow.float32())),
                   right=pyarrow.array([dict(it=True)] * 4), prompt=[f"q{n}" for n in range(4)])
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    env = make(tmp_path / "a.parquet", answer="single", check="exact")
    assert env.task("train", 0).data["row"]["structs"] == [{"a": "0.1"}]  # keys of other rows are not there
    found = {name: answers_of(make(tmp_path / "a.parquet", answer=name, check="exact"))["q1"]
             for name in ("single", "price", "day", "many", "right.it")}
    assert found == {"single": ["0.1"], "price": ["2.5"], "day": ["2020-01-31"], "many": ["0.1"],
                     "right.it": ["true"]}


def test_missing_answers_leave_their_rows_out_and_are_counted_by_kind(tmp_path):
    missing = [None, float("nan"), "", " ", "nan", [], [None], {"a": 1}, "\ud800"]
    rows = sums(20) + [dict(question=f"m{n}", answer=answer) for n, answer in enumerate(missing)]
    rows += [dict(question="half", answer=["", "7"]), dict(question="\ud800", answer="7")]
    env = make(write(tmp_path / "a.jsonl", rows), prompt="question", check="exact")
    assert len(tasks_of(env)) == 21 and answers_of(env)["half"] == ["7"]
    (line,) = env.about.splitlines()
    assert "left out: 10 that cannot be used (row 21: column answer: expected a value, got none; " in line
    assert "; 6 like row 22: column answer: expected an answer, got nan; " in line and "\ud800" not in line
    rows = sums(20) + [dict(row, answer=float("nan")) for row in sums(20)]
    with pytest.raises(envs.BadInput, match=r"row 21: column answer: expected an answer, got nan .20 such"):
        make(write(tmp_path / "a.jsonl", rows), prompt="question", check="exact")


# Columns, keys and texts


def duplicate_csv(path):
    path.write_text("prompt,answer, answer\nq1,a,b\nq2,a,b\n")


def duplicate_parquet(path):
    table = pyarrow.table([["q1", "q2"], ["a", "a"], ["b", "b"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, path)


def duplicate_field(path):
    struct = pyarrow.StructArray.from_arrays([pyarrow.array(["a", "b"])] * 2, names=["x", "x"])
    nested = pyarrow.ListArray.from_arrays([0, 1, 2], struct)
    pyarrow.parquet.write_table(pyarrow.table([["q1", "q2"], nested], names=["prompt", "answer"]), path)


@pytest.mark.parametrize("name, save, message", [
    ("a.csv", duplicate_csv, "column answer stands twice"),
    ("a.parquet", duplicate_parquet, "column answer stands twice"),
    ("b.parquet", duplicate_field, "column answer.*x stands twice"),
    ("a.jsonl", lambda path: path.write_text('{"prompt": "q"}\n{"prompt": "q", "answer": 1, "answer": 2}'),
     "at row 2 .*key 'answer' stands twice in {'prompt': 'q', 'answer': 1}"),
    ("b.jsonl", lambda path: path.write_text('{"prompt": "q", "x": [{"answer": "a", "answer": "b"}]}'),
     "at row 1 .*key 'answer' stands twice"),
    ("a.json", lambda path: path.write_text('[{"prompt": "q", "answer": "a", "answer": "b"}]'),
     "key 'answer' stands twice in {'prompt': 'q', 'answer': 'a'}")])
def test_a_name_that_stands_twice_is_refused(tmp_path, name, save, message):
    save(tmp_path / name)
    with pytest.raises(envs.BadInput, match=f"{name}: cannot be read.*{message}"):
        make(tmp_path / name, check="exact")
    if not name.endswith(".csv"):  # sft.py and others read the same
        with pytest.raises(envs.BadInput, match=message):
            list(envs.read_rows(str(tmp_path / name), "rows"))


@pytest.mark.parametrize("struct, message", [
    (json.dumps, None), (str, None), (lambda struct: f"{{'x': array({struct['x']})}}", "expected JSON, got "),
    (lambda struct: json.dumps({"y": 1}), "expected a value, got none")])
def test_a_column_within_a_text(tmp_path, struct, message):
    text = struct({"x": ["a", 8.0]})
    data = write(tmp_path / "a.csv", [dict(prompt=f"q{n}", answer=text) for n in range(3)])
    if message is None:
        assert answers_of(make(data, answer="answer.x", check="exact"))["q1"] == ["a", "8"]
        return
    with pytest.raises(envs.BadInput, match=f"row 1: column answer.x: {message}"):
        make(data, answer="answer.x", check="exact")


def test_a_key_that_stands_twice_in_a_columns_json_leaves_the_row_out(tmp_path):
    rows = [dict(prompt=f"q{n}", answer='{"x": "a"}') for n in range(5)]
    rows += [dict(prompt='[{"role": "user", "content": "a", "content": "b"}]', answer='{"x": "a"}'),
             dict(prompt="q", answer='{"x": "a", "x": "b"}')]
    env = make(write(tmp_path / "a.jsonl", rows), answer="answer.x", check="exact")
    assert "2 that cannot be used (row 6: column prompt: " in env.about
    assert "row 7: column answer.x: expected JSON, got " in env.about


MESSAGES = [dict(role="system", content="Be brief."), dict(role="user", content="It's \u00e9?\n")]


@pytest.mark.parametrize("prompt", [
    MESSAGES, json.dumps(MESSAGES), " " + json.dumps(MESSAGES, indent=1), str(MESSAGES),
    json.dumps(MESSAGES[::-1][:1])])
def test_messages_in_a_text_are_messages(tmp_path, prompt):
    task = first_task(tmp_path / "a.jsonl", prompt=prompt)
    expected = MESSAGES[-1:] if "system" not in str(prompt) else MESSAGES
    assert task.messages == [dict(role="system", content="S"), *expected]
    assert task.data["text"] is False  # reward functions get messages too


@pytest.mark.parametrize("prompt, message", [
    ('[{"role": "user", "content": "a"}', "expected a text, or messages as JSON .Expecting"),
    ("[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'user'}]", "expected a text, or messages"),
    ('[{"role": "robot", "content": "a"}]', "expected messages with role and content"),
    ('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]',
     "its last message is the assistant's")])
def test_messages_in_a_text_that_cannot_be_read_are_refused(tmp_path, prompt, message):
    with pytest.raises(envs.BadInput, match=f"row 1: column prompt: {message}"):
        make(write(tmp_path / "a.jsonl", [dict(prompt=prompt, answer="a")]), check="exact")


@pytest.mark.parametrize("prompt", ["[1, 2] is a list", '{"a": 1}', "[{a", '["role"]', '"role": 5'])
def test_other_texts_stay_texts(tmp_path, prompt):
    task = first_task(tmp_path / "a.jsonl", prompt=prompt)
    assert task.messages[1:] == [dict(role="user", content=prompt)] and task.data["text"] is True


def test_tests_in_a_text_are_tests_and_a_value_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.code.sandbox.check", lambda: None)
    for tests in (TESTS, json.dumps(TESTS), str(TESTS)):
        assert first_task(tmp_path / "a.jsonl", prompt="a", answer=tests).data["answers"] == TESTS
    for value in ('{"inputs": ["1"], "outputs": ["2"]}', "[1]", "7", "'a text'"):  # any code would pass them
        with pytest.raises(envs.BadInput, match="row 1: column answer: expected tests, or a list of them"):
            make(write(tmp_path / "a.jsonl", [dict(prompt="a", answer=value)]), check="python")


# CSV as it is written


@pytest.mark.parametrize("text", [
    "prompt,answer\nq1,a\nq2,b\n", "prompt;answer\nq1;a\nq2;b", "prompt\tanswer\nq1\ta\nq2\tb\n",
    "prompt|answer\nq1|a\nq2|b\n", "prompt, answer\nq1, a\n\"q2\", \"b\"\n", " prompt ,answer \nq1,a\nq2,b\n",
    "\ufeffprompt,answer\r\nq1,a\r\nq2,b\r\n", "\nprompt,answer\n\n\nq1,a\n  \nq2,b\n\n",
    "prompt,answer\rq1,a\rq2,b",
    "prompt,answer,,\nq1,a,,\nq2,b,,\n", "prompt,answer\nq1,a,\nq2,b,,\n", "prompt,,answer\nq1,,a\nq2,,b\n",
    ",prompt,answer\n0,q1,a\n1,q2,b\n", ",,prompt,answer\nx,0,q1,a\nx,1,q2,b\n",
    '"prompt";"answer"\n"q1";"a"\n"q2";"b"\n', "id;prompt, please;prompt;answer\n1;x;q1;a\n2;y;q2;b\n"])
@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.tsv"])
def test_a_csv_is_read_as_it_is_meant(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    env = make(tmp_path / name, check="exact")
    assert answers_of(env) == {"q1": ["a"], "q2": ["b"]}
    assert ("its first column has no name" in env.about) == text.startswith(",")


def test_cells_may_be_long_and_have_lines_and_quotes(tmp_path):
    cell = 'one\r\n"two"; three\n,' + "x" * 500_000
    env = make(write(tmp_path / "a.csv", [dict(prompt=cell, answer=" a;b ")] * 3), check="exact")
    assert answers_of(env) == {cell: [" a;b "]}


@pytest.mark.parametrize("text, message", [
    (b"", "an empty file"), (b"\n\n", "an empty file"), (b",,\n1,2,3\n", "the names of columns"),
    (b"prompt,,answer\nq1,x,a\nq2,,b\n", "column 2 has no name"),
    (b"prompt,answer\nq1,a\nq2\n", "row 2: expected a value for each column of prompt, answer, got 1"),
    (b"prompt,answer\nHello, you,a\n", "row 1: expected a value for each column of prompt, answer, got 3"),
    (b'prompt,answer\n"q1,a\n', "line 2: unexpected end of data"),
    (b"prompt,answer\ncaf\xe9,a\n", "'utf-8' codec can't decode byte 0xe9"),
    ("prompt,answer\nq,a\n".encode("utf-16"), "expected UTF-8, got UTF-16"),
    ("prompt,answer\nq,a\n".encode("utf-16-le"), "expected UTF-8, got UTF-16"),
    ("prompt,answer\nq,a\n".encode("utf-32"), "expected UTF-8, got UTF-16 or UTF-32")])
def test_a_csv_that_cannot_be_read_is_one_true_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(envs.BadInput, match="a.csv: cannot be read .*" + message) as error:
        make(tmp_path / "a.csv", check="exact")
    assert "\n" not in str(error.value)


def test_whole_numbers_stay_as_they_are_where_nothing_is_missing(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nq1,8.0\nq2,7.0\n")
    assert answers_of(make(tmp_path / "a.csv", check="exact")) == {"q1": ["8.0"], "q2": ["7.0"]}
    (tmp_path / "a.csv").write_text("prompt,answer\nq1,8.0\nq2,7.5\nq3,\n")
    assert answers_of(make(tmp_path / "a.csv", check="exact")) == {"q1": ["8.0"], "q2": ["7.5"]}


def test_each_column_with_a_gap_is_read_as_whole_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,other\nq1,8.0,1.0\nq2,7.0,\nq3,,2.0\nq4,6.0,3.0\n")
    env = make(tmp_path / "a.csv", check="exact")
    assert answers_of(env) == {"q1": ["8"], "q2": ["7"], "q4": ["6"]}
    assert {task.data["row"]["other"] for task in tasks_of(env)} == {"1", "", "3"}
    assert all(f"column {name} has gaps and whole" in env.about for name in ("answer", "other"))


def test_reasons_of_many_kinds_are_told_in_part(tmp_path):
    bad = [5, dict(answer="a"), dict(prompt="q"), dict(prompt="", answer="a"), dict(prompt="q", answer=""),
           dict(prompt=[dict(role="robot", content="x")], answer="a"), dict(prompt="q", answer={"a": 1}),
           dict(prompt="q", answer=[])]
    rows = [dict(prompt=f"q{n}", answer="a") for n in range(20)]
    env = make(write(tmp_path / "a.jsonl", rows + bad + bad[:1]), check="exact")
    assert "left out: 9 that cannot be used (2 like row 21: expected an object" in env.about
    assert "; row 22: no column prompt; it has answer; row 23: no column answer; it has prompt; " in env.about
    assert "; and rows of 2 more kinds)" in env.about


# Other files


@pytest.mark.parametrize("name, text, message", [
    ("a.jsonl", '{"prompt": "q"}\n'.encode("utf-16"), "expected UTF-8, got UTF-16"),
    ("a.json", b'{\n "a": {"prompt": "q"}\n}', "expected a list of rows, or a row on each line"),
    ("a.csv.gz", b"\x1f\x8b", r"expected a file \(.jsonl, .json, .parquet, .csv, .tsv\)")])
def test_a_file_of_another_form_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(envs.BadInput, match=f"{name}: cannot be read .*{message}"):
        make(tmp_path / name, check="exact")


@pytest.mark.parametrize("name, text", [
    ("a.JSONL", '\ufeff{ "prompt": "q", "answer": "a"}\n\n{ "prompt": "r", "answer": "a"}'),
    ("a.Json", '\ufeff [\n{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "a"}]'),
    ("b.json", '{ "prompt": "q", "answer": "a"}\n{"prompt": "r", "answer": "a"}')])
def test_json_with_marks_spaces_and_capitals(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert answers_of(make(tmp_path / name, check="exact")) == {"q": ["a"], "r": ["a"]}


def test_rows_of_a_folder_have_names_of_their_own_whatever_its_files_leave_out(tmp_path, monkeypatch):
    """A row's number counts lines, blank ones too; a file goes on from the last row of the one before."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [json.dumps(row) for row in sums(6)]
    for number, text in enumerate(["\n\n".join(lines[:2]), "\n".join(lines[2:4]), "\n\n\n".join(lines[4:])]):
        (tmp_path / f"train-{number}.jsonl").write_text(text)
    names = [task.id for task in tasks_of(make(tmp_path, prompt="question", check="number"))]
    assert sorted(names) == [f"train-{number}" for number in (1, 3, 4, 5, 6, 9)]


def test_a_folder_of_files_is_read_as_the_files_are(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train-0.csv").write_text(",prompt,answer\n0,q1,007\n1,q2,2020-01-31\n")
    (folder / "train-1.csv").write_text("prompt;answer\nq3;NA\nq4;8\nq5;\n")
    (folder / "test.csv").write_text("prompt,answer\nq6,true\n")
    env = make(folder, check="exact")
    assert answers_of(env) == {"q1": ["007"], "q2": ["2020-01-31"], "q3": ["NA"], "q4": ["8"], "q6": ["true"]}
    assert [task.id for task in tasks_of(env)] == ["train-1", "train-2", "train-3", "train-4", "test-1"]
    train, test = env.about.splitlines()
    assert "folder: 4 to train on; left out: 1 that cannot be used (train-1.csv, row 3: column ans" in train
    assert "folder, split test: 1 held out" in test
    for part in ("one", "two"):  # of two files of one name, no row takes the place of the other's
        (folder / part).mkdir()
        write(folder / part / "train.csv", [dict(prompt=f"{part} {n}", answer="1") for n in range(3)])
    env = make(folder, check="exact")
    assert len(answers_of(env)) == 11 and "(train-1.csv, row 3" in env.about and " all 10 gold" in env.about
    (folder / "train-1.csv").write_text("prompt,answer,answer\nq3,a,b\n")
    with pytest.raises(envs.BadInput, match=r"train-1.csv: cannot be read \(column answer stands twice"):
        make(folder, check="exact")


@pytest.mark.parametrize("system, expected", [
    ("\ufeffBe brief.\r\n".encode(), "Be brief.\n"), ("Be brief.".encode("utf-16"), None),
    (b"caf\xe9", None)])
def test_a_file_with_the_system_message(tmp_path, system, expected):
    (tmp_path / "system.txt").write_bytes(system)
    data = write(tmp_path / "a.jsonl", sums())
    if expected is None:
        with pytest.raises(envs.BadInput, match="option system=.*txt: cannot be read .*(UTF-16|utf-8)"):
            make(data, prompt="question", check="number", system=str(tmp_path / "system.txt"))
        return
    env = make(data, prompt="question", check="number", system=str(tmp_path / "system.txt"))
    assert env.task("train", 0).messages[0] == dict(role="system", content=expected)


def test_a_long_system_message_is_no_file(tmp_path):
    text = "Think first. " * 100
    env = make(write(tmp_path / "a.jsonl", sums()), prompt="question", check="number", system=text)
    assert env.task("train", 0).messages[0]["content"] == text


# The census


def test_each_file_has_a_line_and_the_lines_of_a_mixture_are_those_of_its_parts(tmp_path):
    train = write(tmp_path / "train.jsonl", sums(20) + sums(3) + [dict(question="none", answer="none")])
    test = write(tmp_path / "test.csv", sums(5))
    options = dict(data=train, test=test, prompt="question", check="number")
    expected = [f"rows: {train}: 15 to train on; left out: 1 that cannot be used (row 24: answer 'none': "
                "expected a number), 8 that are held out too; the check judges all 23 gold answers right",
                f"rows: {test}: 5 held out; the check judges all 5 gold answers right"]
    assert envs.make("rows", **options).about.splitlines() == expected
    mixture = envs.make("rows,countdown", **{f"rows.{name}": value for name, value in options.items()})
    assert mixture.about.splitlines() == expected


@pytest.mark.parametrize("check, answer, extract", [
    ("exact", "New York", "auto"), ("exact", ["New York", "NYC"], "whole"), ("exact", True, "auto"),
    ("number", 7.5, "auto"), ("number", "so\n#### 1,234", "auto"), ("number", r"$\boxed{5}$", "boxed"),
    ("number", "5", "answer_tag"), ("number", "5", "last_number"), ("number", "5", "whole"),
    ("choice", "c", "auto"),
    ("choice", "B) Paris", "auto"), ("choice", "B", "whole"), ("contains", "Paris", "auto")])
def test_a_check_judges_its_own_answers_right(tmp_path, check, answer, extract):
    rows = [dict(prompt=f"q{n}", answer=answer) for n in range(4)]
    env = make(write(tmp_path / "a.jsonl", rows), check=check, extract=extract)
    count = 4 * (len(answer) if isinstance(answer, list) else 1)
    assert env.about.endswith(f"; the check judges all {count} gold answers right")


def test_an_answer_that_the_check_judges_wrong_is_named_with_what_was_read(tmp_path):
    rows = [dict(prompt=f"q{n}", answer="a}b" if n in (6, 9) else "ab") for n in range(40)]
    env = make(write(tmp_path / "a.jsonl", rows), check="exact")
    assert env.about.endswith("; the check judges 38 of 40 gold answers right (95 %): row 7, box: "
                              r"'\\boxed{a}b}' is read as 'a'; its answer is 'a}b'")
    env = make(write(tmp_path / "a.jsonl", rows[6:9]), check="exact")
    assert "judges 2 of 3 gold answers right (66.6 %): row 1, box: " in env.about  # not more than there are
    env = make(write(tmp_path / "a.jsonl", rows), rewards=f"{__file__}:nothing")
    assert "gold" not in env.about
    env = make(write(tmp_path / "a.jsonl", rows), check="regex")
    assert env.about.endswith("there are no gold answers to try the check on")


def nothing(completions, **columns):
    return [None for _ in completions]


def test_the_census_of_many_rows_is_quick_and_of_a_spread_sample(tmp_path):
    rows = [dict(prompt=f"q{n}", answer="a}b" if n == 9990 else "ab") for n in range(10_000)]
    env = make(write(tmp_path / "a.jsonl", rows), check="exact")
    with quick("a census", most=5):
        about = env.about
    assert "judges 999 of 1,000 gold answers right (99.9 %) (in 1,000 of 10,000 rows): row 9991" in about


@pytest.mark.parametrize("test, kept", [
    ("assert f() == 'hidden'", True), ("assert f(1) == 17\nassert f(2) == 23\nassert f(3) == 31", True),
    ("assert f() == 17", False), ("\n".join(f"assert f({n}) is True" for n in range(30)), False),
    ("assert f() == g()", False), ("assert f() == 'shown'", False),  # which the prompt shows
    ("def check(candidate):\n    assert candidate(5) == 'hidden'", True)])
def test_rows_whose_tests_can_be_guessed_are_not_trained_on(tmp_path, monkeypatch, test, kept):
    monkeypatch.setattr("envs.code.sandbox.check", lambda: None)
    rows = [dict(prompt=f"{n}: write f, which gives 'shown'", answer=test, entry_point="f") for n in range(9)]
    held_out = [dict(prompt="h", answer=test, entry_point="f")]
    options = dict(check="python", test=write(tmp_path / "h.jsonl", held_out))
    strong = dict(prompt="s", answer="assert f() == 'another'")
    env = make(write(tmp_path / "a.jsonl", [*rows, strong]), **options)
    assert env.num_tasks("train") == (10 if kept else 1) and env.num_tasks("test") == 1
    said = "left out: 9 whose tests can be passed by guessing (guessable=true keeps them)"
    assert (said in env.about.split("\n")[0]) == (not kept)
    found = env.task("test", 0).data["guessable"]
    assert (found <= 1e-3) == kept or "shown" in test
    every = make(write(tmp_path / "a.jsonl", [*rows, strong]), guessable=True, **options)
    assert every.num_tasks("train") == 10
    if not kept:
        with pytest.raises(envs.BadInput, match="all 9 can be passed by guessing .*guessable=true"):
            make(write(tmp_path / "b.jsonl", rows), **options)


@pytest.mark.slow
def test_solutions_of_code_are_judged(tmp_path):
    needs_sandbox()
    rows = [dict(prompt=f"add {n}", answer=TESTS, code=ADD) for n in range(20)]
    env = make(write(tmp_path / "a.jsonl", rows), check="python", guessable=True)
    assert env.about.endswith("the check judges all 8 gold answers right (in 8 of 20 rows)")
    begun, body = ADD.split("\n")
    rows = [dict(prompt=f"{begun}\n", test="def check(candidate):\n    assert candidate(1, 2) == 3",
                 entry_point="add",
                 canonical_solution=f"{body}{' + 1' * (n == 1)}\n", n=n) for n in range(3)]
    env = make(write(tmp_path / "a.jsonl", rows), answer="test", check="python", guessable=True)
    assert "judges 2 of 3 gold answers right (66.6 %): row 2, code: '```python\\ndef add(a, b):" in env.about


@pytest.mark.slow
def test_answers_of_mathematics_are_judged(tmp_path):
    package("math_verify")
    answers = [r"\frac{1}{2}", r"$x^2$", r"\$18.90", "(1, 2]", r"\boxed{7}", r"\text{even}"]
    rows = [dict(prompt=f"q{n}", answer=answer) for n, answer in enumerate(answers)]
    env = make(write(tmp_path / "a.jsonl", rows), check="math")
    assert env.about.endswith("the check judges all 6 gold answers right")
