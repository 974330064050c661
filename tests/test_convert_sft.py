"""tools/convert_sft.py: what becomes of each shape of row, the promises of the split, and what it refuses."""

import functools
import json
import os
import random
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sft
from tests.run_folders import TINY, full_disk, records, told, train, write_jsonl
from tools import convert_sft
from tools.convert_sft import BadRow, held_out, to_example
from tools.validate_train_log import validate


def say(role, content, **more):
    return {"role": role, "content": content} | more


def chat(*messages, instance="i", patch=None, run="r"):
    return {"instance_id": instance, "messages": list(messages), "model_patch": patch, "run_name": run}


def simple(number, instance=None):
    return chat(say("user", f"{number} 1 -> {number + 1}"),
                say("assistant", f"{number} + 1 = {number + 1}"), instance=instance or f"task-{number}")


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def convert(tmp_path, capsys, *flags, data=("rows.jsonl",), name="x"):
    """-> what the tool says, its counts compared with what it wrote"""
    data = [item if "/" in item else tmp_path / item for item in data]
    report = told(capsys, convert_sft.main, "--data", *data, "--name", name, "--output-dir", tmp_path / "out",
                  *flags)
    if "error" not in report:
        sides = [len(read(tmp_path / "out", side, name)) for side in ("train", "val")]
        assert sides == [report["train"], report["val"]]
        assert report["rows"] == sum(sides) + sum(report["dropped"].values()) + report["bad_rows"]
    return report


def read(folder, side="train", name="x"):
    return pq.read_table(folder / f"{name}_{side}.parquet").to_pylist()


def files(tmp_path):
    return {path.name: path.read_bytes() for path in sorted((tmp_path / "out").iterdir())}


def refused(tmp_path, capsys, says, flags=(), **options):
    """One line that says so, and no output, not even a half of it."""
    error = convert(tmp_path, capsys, *flags, **options)["error"]
    assert says in error and not list((tmp_path / "out").glob("*")) and not list(tmp_path.rglob("*.writing"))


USER, ANSWER = say("user", " Fix it.\n"), say("assistant", "Done.")
SHELL = {"type": "tool_use", "name": "bash", "input": {"command": "ls", "at": {"x": None}, "more": None}}
SHAPES = {  # the row, its prompt, its response
    "blocks": (chat(say("system", None), say("user", [{"type": "text", "text": "a"}, "b", {
        "type": "text", "text": None}, {"type": "image_url", "image_url": {}}]),
                    say("assistant", [{"type": "thinking", "thinking": "hm"}, "c"])),
               "a\nb", "c"),
    "later-turns": (chat(USER, ANSWER, say("tool", "ok"), say("user", "Thanks"), say("assistant", " \n")),
                    " Fix it.\n", "Done."),
    "tools": (chat(USER, say("assistant", [{"type": "text", "text": "I look."}, SHELL]),
                   say("user", [{"type": "tool_result", "content": [{"type": "text", "text": "a.py"}]}]),
                   ANSWER),
              '[user]\n Fix it.\n\n\n[assistant]\nI look.\n[tool_use bash] {"command": "ls", "at": {}}\n\n'
              "[user]\n[tool_result]\na.py", "Done."),
    "tool-calls": (chat(USER, say("assistant", None, tool_calls=[
        {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]),
        say("tool", "a.py"), say("assistant", "Now.", tool_calls=[{"name": "end", "arguments": {}}])),
        '[user]\n Fix it.\n\n\n[assistant]\n[tool_use bash] {"command": "ls"}\n\n[tool]\na.py',
        "Now.\n[tool_use end] {}"),
    "patch": (chat(say("system", "Be brief."), USER, say("assistant", [SHELL]), say("tool", "a.py"), ANSWER,
                   patch="diff --git a b"), "[system]\nBe brief.\n\n[user]\n Fix it.\n", "diff --git a b"),
    "no-answer": (chat(USER, say("assistant", None), patch=" \n"), " Fix it.\n", ""),
    "not-to-learn": (chat(USER, ANSWER, say("user", "Sure?"), say("assistant", "No!", train=False)),
                     " Fix it.\n", "Done."),
    "unicode": (chat(say("user", "naïve \U0001f600 \ud800\0"), say("assistant", "\udfff é")),
                "naïve \U0001f600 \ufffd\0", "\ufffd é"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_of_rows(case):
    row, prompt, response = SHAPES[case]
    before = json.dumps(row)
    example, _ = to_example(row)
    assert example == dict(prompt=prompt, response=response, instance_id="i", run_name="r")
    assert json.dumps(row) == before


PATCH = "diff --git a b"


@pytest.mark.parametrize("flag, responses", [
    ("auto", [PATCH, "Done."]), ("model_patch", [PATCH]), ("last-assistant", ["Done.", "Done."])])
def test_the_response_is_the_patch_where_there_is_one_or_what_is_asked_for(flag, responses, tmp_path, capsys):
    rows = [chat(USER, say("assistant", "I look."), ANSWER, patch=PATCH), chat(USER, ANSWER)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    convert(tmp_path, capsys, "--response", flag, "--val-ratio", 0)
    found = read(tmp_path / "out")
    assert [row["response"] for row in found] == responses
    assert ("I look." in found[0]["prompt"]) is (responses[0] == "Done.")


BAD = {  # the row, what is said of it
    "no-object": ([1], "expected an object"),
    "no-messages": ({"instance_id": "i"}, "column messages: missing"),
    "id": (chat() | {"instance_id": 7}, "column instance_id: expected a text, got 7"),
    "text": (chat() | {"messages": "Hello"}, "column messages: expected a list of messages or its JSON (Exp"),
    "deep-json": (chat() | {"messages": "[" * 100_000}, "column messages: expected a list"),
    "message": (chat(USER, "Hello"), "message 2: expected a role and a content, got 'Hello'"),
    "role": (chat(say(3, "x")), "message 1: expected a text as role, got 3"),
    "mark": (chat(say("assistant", "x", weight=2)), "message 1: the weight of a message: expected 0 or 1"),
    "block-text": (chat(say("user", [{"type": "text", "text": 3}])), "expected a block with a type"),
    "long": (chat() | {"messages": {"x": "y" * 10**6}}, "expected a list of messages, got {'x': 'yyy"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_rows(case):
    row, says = BAD[case]
    with pytest.raises(BadRow) as error:
        to_example(row)
    assert says in str(error.value) and len(str(error.value)) < 300


def test_a_malformed_row_stops_it_or_is_counted(tmp_path, capsys):
    texts = [simple(1), b"", b"{torn", b'{"messages": "\\ud800"}', chat() | {"messages": "["}, simple(2)]
    write_jsonl(tmp_path / "rows.jsonl", texts)
    refused(tmp_path, capsys, "rows.jsonl, row 3, expected a line of JSON (Expecting property name")
    report = convert(tmp_path, capsys, "--on-bad-row", "skip")
    assert (report["rows"], report["bad_rows"], report["train"], report["val"]) == (5, 3, 1, 1)
    assert [text.partition("rows.jsonl, ")[2][:30] for text in report["first_bad_rows"]] == [
        "row 3, expected a line of JSON", "row 4, column instance_id: mis", "row 5, column messages: expect"]


def test_all_sources_give_the_same_rows(tmp_path, capsys):
    rows = [simple(number) for number in range(5)] + [chat(*SHAPES["tools"][0]["messages"], instance="t")]
    texts = [row | {"messages": json.dumps(row["messages"])} for row in rows]
    mixed = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    mixed.save_to_disk(tmp_path / "saved")
    mixed.to_parquet(tmp_path / "mixed.parquet")  # content is kept as JSON there
    datasets.DatasetDict(train=mixed, other=mixed.select([0])).save_to_disk(tmp_path / "dict")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    write_parquet(tmp_path / "texts.parquet", texts)
    write_parquet(tmp_path / "plain.parquet", rows[:5])
    write_jsonl(tmp_path / "last.jsonl", texts[5:])

    found = [(convert(tmp_path, capsys, "--overwrite", data=data)["rows"],
              read(tmp_path / "out"), read(tmp_path / "out", "val")) for data in (
        ["rows.jsonl"], ["texts.parquet"], ["mixed.parquet"], ["saved"], ["dict"],
        ["plain.parquet", "last.jsonl"])]
    assert found[0][0] == 6 and [one for one in found if one != found[0]] == []
    assert convert(tmp_path, capsys, "--overwrite", "--split", "other", data=["dict"])["rows"] == 1
    error = convert(tmp_path, capsys, "--overwrite", "--split", "test", data=["dict"])["error"]
    assert "--split test" in error and "train, other" in error


def corrupt_folder(path):
    datasets.Dataset.from_list([simple(1)]).save_to_disk(path)
    for file in path.glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-20])


BROKEN = {  # name, what is done to it, what is said
    "suffix": ("rows.csv", lambda path: path.write_text("a,b"), "rows.csv: expected an existing .parquet"),
    "damaged": ("rows.parquet", lambda path: path.write_bytes(b"PAR1\xff" + path.read_bytes()[5:]),
                "rows.parquet: cannot be read"),
    "columns": ("rows.parquet", lambda path: write_parquet(path, [{"text": "x"}]),
                "rows.parquet, row 1, column instance_id: missing"),
    "latin": ("rows.parquet", lambda path: path.write_bytes(path.read_bytes().replace(b"user", b"\xffser")),
              "rows.parquet, row 1, expected UTF-8 text"),
    "folder": ("rows", Path.mkdir, "rows: expected a folder made by save_to_disk"),
    "torn-folder": ("rows", corrupt_folder, "/rows: "),
    "silent": ("rows.jsonl", lambda path: write_jsonl(path, [chat(USER), chat(ANSWER)]),
               'no row is left to train on, {"rows": 2, "dropped": {"empty_prompt": 1, "empty_response": 1}'),
    "ratio": ("rows.parquet", Path.exists, "--val-ratio 1.0: expected 0 or more, and less than 1",
              "--val-ratio", "1"),
    "samples": ("rows.parquet", Path.exists, "--max-samples -1: expected 0 or more", "--max-samples", "-1"),
    "name": ("rows.parquet", Path.exists, "--name a/b: expected the start of a file name", "--name", "a/b"),
    "long-name": ("rows.parquet", Path.exists, "File name too long", "--name", "x" * 300),
    "no-folder": ("rows.parquet", Path.exists, "rows.parquet is no folder that can be written to",
                  "--output-dir", "{d}/rows.parquet/out"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_input_and_flags_that_cannot_be_are_one_clear_line(case, tmp_path, capsys):
    name, spoil, says, *flags = BROKEN[case]
    if name.endswith(".parquet"):
        write_parquet(tmp_path / name, [simple(number) for number in range(50)])
    spoil(tmp_path / name)
    refused(tmp_path, capsys, says, [flag.replace("{d}", str(tmp_path)) for flag in flags], data=[name])


def test_a_hub_id_is_loaded_when_it_is_named(tmp_path, capsys, monkeypatch):
    sets = {("some/set", "train"): datasets.Dataset.from_list([simple(1)])}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: sets[name, split])
    assert convert(tmp_path, capsys, data=["some/set"])["train"] == 1


def test_whole_groups_are_held_out_and_never_all():
    rng = random.Random(1)
    for _ in range(300):
        groups = [f"g{rng.randrange(rng.choice([1, 3, 40]))}" for _ in range(rng.randrange(1, 60))]
        ratio, sizes = rng.choice([0, 1e-9, 0.1, 0.5, 0.999]), Counter(groups)
        val = held_out(groups, ratio, 1)
        assert val < sizes.keys() and bool(val) is (ratio > 0 and len(sizes) > 1)
        assert len(val) < 2 or sum(sizes[group] for group in val) <= max(1, round(ratio * len(groups)))


def test_the_split_is_that_of_the_rows_not_of_the_files(tmp_path, capsys):
    rows = [simple(number, instance=f"task-{number // 3}") for number in range(90)]
    write_jsonl(tmp_path / "a.jsonl", rows[:40])
    write_parquet(tmp_path / "b.parquet", rows[40:])

    def sides(*flags, data=("a.jsonl", "b.parquet")):
        convert(tmp_path, capsys, "--overwrite", *flags, data=data)
        return [read(tmp_path / "out", side) for side in ("train", "val")]

    def unordered(*flags, **options):
        return [sorted(map(str, side)) for side in sides(*flags, **options)]

    (train, val), before = sides(), files(tmp_path)
    held = {row["instance_id"] for row in val}
    assert len(val) == 9 and [row["prompt"] for row in train] == [
        row["messages"][0]["content"] for row in rows if row["instance_id"] not in held]
    turned, few = dict(data=["b.parquet", "a.jsonl"]), ["--max-samples", 30]
    assert unordered(**turned) == unordered() != unordered("--seed", 1)
    assert sides() == [train, val] and files(tmp_path) == before

    assert sum(map(len, sides(*few))) == 30
    assert unordered(*few, **turned) == unordered(*few) != unordered(*few, "--seed", 5)
    assert sides("--max-samples", 1)[1] == [] and sides("--max-samples", 99) == [train, val]
    assert [len(side) for side in sides("--val-ratio", 0)] == [90, 0]


def test_what_is_dropped_or_cut_is_counted(tmp_path, capsys):
    same = simple(1)
    rows = [same, same, chat(USER, say("assistant", "\n")), chat(ANSWER),
            chat(say("user", 17 * "x" + "end"), ANSWER), chat(USER, say("assistant", "begin" + 15 * "é")),
            chat(say("user", 19 * "x"), say("assistant", 19 * "é"))]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = ["--max-chars-prompt", 19, "--max-chars-response", 19, "--overwrite", "--val-ratio", 0]
    dropped = {"empty_prompt": 1, "empty_response": 1}
    report = convert(tmp_path, capsys, *flags)
    assert report["dropped"] == dropped | {"prompt_too_long": 1, "response_too_long": 1}

    report = convert(tmp_path, capsys, *flags, "--on-long", "cut")
    assert report["dropped"] == dropped and report["cut"] == dict(prompt=1, response=1)
    assert [(row["prompt"], row["response"]) for row in read(tmp_path / "out")][2:4] == [
        (16 * "x" + "end", "Done."), (" Fix it.\n", "begin" + 14 * "é")]
    report = convert(tmp_path, capsys, "--max-samples", 2, "--overwrite")
    assert report["dropped"] == dropped | {"max_samples": 3}


def test_files_are_replaced_only_when_asked(tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", [simple(1), simple(2)])
    convert(tmp_path, capsys)
    (tmp_path / "out" / "x_train.parquet").unlink()
    assert "x_val.parquet exists; --overwrite replaces it" in convert(tmp_path, capsys)["error"]
    told(capsys, convert_sft.main, "--data", tmp_path / "rows.jsonl", "--output-dir", tmp_path / "out")
    write_jsonl(tmp_path / "rows.jsonl", [simple(3)])
    convert(tmp_path, capsys, "--overwrite")
    assert [row["instance_id"] for row in read(tmp_path / "out")] == ["task-3"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "rows_train.parquet", "rows_val.parquet", "x_train.parquet", "x_val.parquet"]


def test_a_full_disk_is_one_clear_line_and_what_was_there_stays(tmp_path, capsys):
    text = random.Random(1).randbytes(100_000).hex()
    write_jsonl(tmp_path / "rows.jsonl", [chat(say("user", text), ANSWER)])
    with full_disk(4096):
        refused(tmp_path, capsys, "/out: cannot be written")
    convert(tmp_path, capsys)
    old = files(tmp_path)
    with full_disk(4096):
        assert "/out: cannot be written" in convert(tmp_path, capsys, "--overwrite", "--seed", 3)["error"]
    assert files(tmp_path) == old


@pytest.mark.parametrize("after", [[simple(1)], [simple(1), chat(USER)], None])
def test_data_that_nest_too_deeply_or_change_between_the_two_passes(after, tmp_path, capsys, monkeypatch):
    write_jsonl(tmp_path / "rows.jsonl", [])
    deep = functools.reduce(lambda inner, _: [{"type": "tool_result", "content": inner}], range(5000), "x")
    passes = iter([[simple(1), simple(2)], after] if after else [[chat(say("user", deep))]])
    monkeypatch.setattr(convert_sft, "jsonl_rows", lambda path: iter(next(passes)))
    says = ": changed while it was read" if after else ", row 1, column messages: nested too deeply"
    refused(tmp_path, capsys, f"rows.jsonl{says}")


def test_an_interruption_between_the_two_files_leaves_no_mixture(tmp_path, capsys, monkeypatch):
    """And the next run goes on as if nothing had been."""
    def interrupted(path, target):
        os.rename(path, target)
        raise KeyboardInterrupt

    write_jsonl(tmp_path / "rows.jsonl", [simple(1), simple(2)])
    convert(tmp_path, capsys)
    old = files(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [simple(3), simple(4)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        convert(tmp_path, capsys, "--overwrite")

    assert list(files(tmp_path)) == ["x_val.parquet"] and files(tmp_path)["x_val.parquet"] not in old.values()
    convert(tmp_path, capsys, "--overwrite")
    assert set(files(tmp_path)) == set(old)


def test_sft_trains_on_what_it_writes(tmp_path, capsys):
    rows = [simple(number) for number in range(1, 9)]
    rows.append(chat(say("system", "Add \0\ud800."), say("user", "1 2"), say("assistant", "3")))
    write_jsonl(tmp_path / "rows.jsonl", rows)
    report = convert(tmp_path, capsys)
    assert report["train"] == 8 and report["val"] == 1  # and of the eight sft.py holds one out itself
    flags = dict(train_files=(report["files"][0],), model=TINY, steps=2, batch_size=4)
    folder = train(sft, tmp_path / "run", **flags)
    assert validate(folder)["ok"] and records(folder)[-1]["train/epoch"] == pytest.approx(2 * 4 / 7)
