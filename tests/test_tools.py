"""The tools that read train_log.jsonl: the validator on every kind of broken log, the plotter on all."""

import copy
import csv
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from envs import BadInput
from tests.run_folders import ROOT, slow_but, write_jsonl
from tools import compare_runs, plot_train_log, runs, track_run
from tools import validate_train_log as contract
from tools.validate_train_log import name_of, validate

DATA = ROOT / "tests" / "data"
ALGOS = ("sft", "ppo", "grpo", "a2c")


def sample_log(algo: str, seed: int = 1) -> list[dict]:
    """The lines of tests/data/<algo>.jsonl; of another seed the run learns a little less."""
    lines = [json.loads(line) for line in (DATA / f"{algo}.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("train/reward", "train/loss", "reward_mean", "val/countdown/pass@1"):
            if key in line:
                line[key] *= 1.1 - seed / 10
    return lines


def rewritten(lines: list[dict], number: int, **changes) -> list[dict]:
    """A copy of a log whose line `number` (from 1) is changed; the value DROP takes the key out."""
    lines = copy.deepcopy(lines)
    line = lines[number - 1]
    target = line.get("meta", line.get("resume", line))
    target |= changes
    for key in [key for key in target if target[key] is DROP]:
        del target[key]
    return lines


def complaints(path: Path, **options) -> list[tuple]:
    """(line, field) of every anomaly; each says what is wrong."""
    verdict = validate(path, **options)
    json.dumps(verdict, allow_nan=False)
    assert verdict["ok"] is (not verdict["anomalies"])
    assert all(entry["wrong"] for entry in verdict["anomalies"])
    return [(entry["line"], entry["field"]) for entry in verdict["anomalies"]]


DROP = object()
META_LINE, RECORD, ERROR_LINE, RESUME_LINE = 1, 5, 9, 10  # line numbers in a sample


@pytest.mark.parametrize("algo", ALGOS)
def test_sound_logs_pass(algo, tmp_path):
    made = write_jsonl(tmp_path / "train_log.jsonl", sample_log(algo, seed=3))
    for path in (made, tmp_path, DATA / f"{algo}.jsonl"):
        verdict = validate(path, strict=True)
        assert verdict["anomalies"] == [] and verdict["warnings"] == [] and verdict["ok"] is True
        counts = (verdict["records"], verdict["resumes"], verdict["errors"])
        assert counts == (12 if algo == "a2c" else 13, 1, 1)
        assert verdict["first"]["iteration"] == (1 if algo == "a2c" else 0)
        assert verdict["last"]["iteration"] == 12 and verdict["last"]["opt_steps"] == 12


def test_what_a_sound_log_may_also_hold(tmp_path):
    """Extra keys, no known commit, evaluation alone, a fall back to an older checkpoint, no last newline."""
    lines = sample_log("grpo")
    path = tmp_path / "log.jsonl"
    lines[META_LINE - 1]["meta"] |= {"git_sha": None, "git_dirty": None, "note": "text", "env": None}
    lines[RECORD - 1] |= {"note": "text", "list": [1, {"a": None}], "val/loss": -1}
    later = copy.deepcopy(lines[RESUME_LINE - 1])
    later["resume"] |= {"iteration": 9, "opt_steps": 9, "env_steps": 10**6}
    later["resume"]["trace_id"] = later["resume"]["run_id"] + ":9"
    lines.insert(RESUME_LINE - 1, later)  # its own records were cut off by the resume that follows
    assert complaints(write_jsonl(path, lines[:2])) == []
    assert complaints(write_jsonl(path, lines)) == []
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert complaints(path, strict=True) == [] and validate(path)["warnings"] == []
    assert complaints(write_jsonl(path, rewritten(sample_log("a2c"), 1, **ROM))) == []


@pytest.mark.parametrize("algo", ALGOS)
def test_every_required_key_is_missed_and_has_a_type(algo, tmp_path):
    """Without a key the log fails and the key is named: each key of the meta line, a record and a resume."""
    lines = sample_log(algo)
    resume = next(index for index, line in enumerate(lines, start=1) if "resume" in line)
    del lines[RECORD:resume - 1], lines[RECORD + 3:]  # the others are alike, and take their time
    resume = RECORD + 1
    of_meta = contract.META | (contract.META_A2C if algo == "a2c" else contract.META_LLM)
    cases = [(1, key, f"meta.{key}") for key in of_meta]
    cases += [(RECORD, key, key) for key in contract.COMMON | contract.REQUIRED[algo]]
    cases += [(resume, key, f"resume.{key}") for key in contract.RESUME]
    for line, key, field in cases:
        path = write_jsonl(tmp_path / "log.jsonl", rewritten(lines, line, **{key: DROP}))
        assert (line, field) in complaints(path), key
    for family, pattern in contract.FAMILIES[algo].items():
        gone = {key: DROP for key in lines[RECORD - 1] if re.fullmatch(pattern, key)}
        path = write_jsonl(tmp_path / "log.jsonl", rewritten(lines, RECORD, **gone))
        assert (RECORD, family) in complaints(path)

    # true, text, a list, an object and null are no numbers; NaN and infinity are not finite.
    keys = [key for key, kind in (contract.COMMON | contract.REQUIRED[algo]).items() if kind != "text"]
    for value in (True, "1", [1.5], {}, None, math.nan, math.inf, -math.inf):
        path = write_jsonl(tmp_path / "log.jsonl", rewritten(lines, RECORD, **dict.fromkeys(keys, value)))
        assert set(keys) <= {field for line, field in complaints(path) if line == RECORD}, value
    path = write_jsonl(tmp_path / "log.jsonl", rewritten(lines, RECORD, run_id=1, trace_id=None))
    assert complaints(path) == [(RECORD, "run_id"), (RECORD, "trace_id")]


ROM = {"rom_path": "x.gb", "rom_sha256": "c" * 64, "state_path": None, "state_sha256": None,
       "release_after_frames": 8}
BROKEN = [  # algorithm, line, changes, the field that is named
    *(("grpo", RECORD, {key: value}, key) for value in (-0.01, 1.01)
      for key in ("train/clipfrac", "rollout/termination/eos", "val/countdown/pass@16")),
    *(("a2c", RECORD, {"action_hist": [1] * 7 + last}, "action_hist") for last in ([], [-1], [math.nan])),
    ("a2c", RECORD, {"dist_p10": 0.3, "dist_p50": 0.2, "dist_p90": 0.1}, "dist_p10"),
    ("a2c", RECORD, {"dist_p10": 0.9}, "dist_p10"),
    ("a2c", RECORD, {"reward_p10": 0.3, "reward_p50": 0.2, "reward_p90": 0.3}, "reward_p10"),
    ("sft", 1, {"script_sha256": 5}, "meta.script_sha256"),

    *((algo, 5, {key: 0}, key) for algo in ALGOS for key in contract.COUNTERS),
    ("grpo", 5, {"wall_time_s": 0.01}, "wall_time_s"),
    *(("grpo", RECORD, {key: -1}, key) for key in (*contract.COUNTERS, "wall_time_s", "sps")),
    *(("grpo", RECORD, {key: 5.5}, key) for key in contract.COUNTERS),
    ("grpo", RECORD, {"run_id": "another"}, "run_id"),
    ("grpo", RECORD, {"opt_steps": 5}, "trace_id"),
    ("grpo", RECORD, {"note": {"deep": [1, {"er": math.nan}]}}, "note.deep.er"),
    ("grpo", RECORD, {"train/reward": 10**400}, "train/reward"),
    ("grpo", RECORD, {"rollout/termination/length": 0.5}, "rollout/termination/<reason>"),
    ("grpo", RECORD, {"val/countdown/pass@16": 0.01}, "val/countdown/pass@16"),
    ("sft", RECORD, {"val/loss": "low"}, "val/loss"),

    *(("sft", 1, {key: value}, f"meta.{key}") for key, values in dict(
        schema_version=(2, "1", True), algo=("dpo", 1), seed=("1", 1.0), args=([],), argv=("sft.py", [1]),
        git_dirty=("no",), started_at=("yesterday", "2026-11-21T04:15:00+01:00", None), model=(None,),
    ).items() for value in values),
    ("sft", 1, {"versions": {"python": "3.11", "torch": "2.13.0"}}, "meta.versions.numpy"),
    ("a2c", 1, {"num_actions": 0.5}, "meta.num_actions"),
    ("a2c", 1, {"goal_sha256": ""}, "meta.goal_sha256"),
    *(("a2c", 1, {"env": "pyboy"}, f"meta.{key}") for key in ROM),
    ("a2c", 1, {"rom_path": "x.gb"}, "meta.rom_sha256"),
    ("a2c", 1, ROM | {"rom_sha256": None}, "meta.rom_sha256"),

    *(("grpo", RESUME_LINE, {key: 1}, f"resume.{key}") for key in contract.COUNTERS),
    ("grpo", RESUME_LINE, {"run_id": "another"}, "resume.run_id"),
    ("grpo", RESUME_LINE, {"at": "later"}, "resume.at"),
    ("grpo", RESUME_LINE, {"git_dirty": "no"}, "resume.git_dirty"),
    ("grpo", ERROR_LINE, {"trace_id": "no number"}, "trace_id"),
    ("grpo", ERROR_LINE, {"error": "text"}, "error"),
    ("grpo", ERROR_LINE, {"error": {"type": "OSError", "message": "full"}}, "error.receipt"),
]


SAMPLE = sample_log("grpo")


def put(number, line, over=1):
    """The sample with a line in place of that of the number, or before it."""
    return [*SAMPLE[:number - 1], line, *SAMPLE[number - 1 + over:]]


BROKEN_FILES = {
    "no meta": (SAMPLE[1:], 1, "meta"),
    "meta twice": (put(4, SAMPLE[0], over=0), 4, "meta"),
    "no record": (SAMPLE[:1], 1, "record"),
    "a resume too late": (rewritten(SAMPLE, RESUME_LINE, iteration=8), RESUME_LINE + 1, "iteration"),
    "empty": ([], None, "file"),
    "invalid JSON": (put(5, b'{"run_id": }'), 5, "line"),
    "empty line": (put(5, b"", over=0), 5, "line"),
    "not UTF-8": (put(5, b'{"run_id": "\xff"}'), 5, "line"),
    "a list": (put(5, b"[1, 2]"), 5, "line"),
    "nested too deeply": (put(5, b'{"a":' * 100_000 + b"1" + b"}" * 100_000), 5, "line"),
    "an integer of 5,000 digits": (put(5, b'{"iteration": ' + b"9" * 5000 + b"}"), 5, "line"),
    "1e999": (put(5, json.dumps(SAMPLE[4]).encode()[:-1] + b', "x": 1e999}'), 5, "x"),
    "a key twice": (put(5, json.dumps(SAMPLE[4]).encode()[:-1] + b', "sps": 1}'), 5, "sps"),
    "half a surrogate pair": (put(5, b'{"run_id": "\\ud800", "\\udfff": NaN}'), 5, "run_id"),
}


@pytest.mark.parametrize("lines, line, field", [*BROKEN_FILES.values(), *(
    (rewritten(sample_log(algo), line, **changes), line, field) for algo, line, changes, field in BROKEN)])
def test_broken_logs_fail_and_name_the_place(lines, line, field, tmp_path):
    assert (line, field) in complaints(write_jsonl(tmp_path / "log.jsonl", lines))


def test_what_is_no_file_fails(tmp_path):
    (tmp_path / "a" / "train_log.jsonl").mkdir(parents=True)
    for path in (tmp_path / "missing.jsonl", tmp_path, tmp_path / "a", "/dev/null", "a\0b", ""):
        assert complaints(path) == [(None, "file")], path


def test_a_cut_off_last_line_fails_when_strict(tmp_path):
    """Wherever the last line is cut it is a warning, but a line that is whole and wrong is not cut off."""
    whole = Path(write_jsonl(tmp_path / "whole.jsonl", sample_log("grpo")[:5])).read_bytes()
    last = json.dumps({"run_id": 'é "} \\', "trace_id": {"a": [{}]}}, ensure_ascii=False).encode()
    path = tmp_path / "log.jsonl"
    for cut in range(1, len(last)):
        path.write_bytes(whole + last[:cut])
        verdict = validate(path)
        assert verdict["ok"] and verdict["anomalies"] == [], last[:cut]
        assert [(entry["line"], entry["field"]) for entry in verdict["warnings"]] == [(6, "line")]
        assert "cut off" in verdict["warnings"][0]["wrong"]
        assert complaints(path, strict=True) == [(6, "line")]
    path.write_bytes(whole + b"not cut off, but not JSON")
    assert complaints(path) == [(6, "line")]
    path.write_bytes(whole + b'{"a" 1}')
    assert complaints(path) == [(6, "line")]


def test_nothing_that_a_file_holds_raises(tmp_path):
    """Each log of which random bytes are others gets a verdict, which is JSON."""
    rng, path, failed = random.Random(0), tmp_path / "log.jsonl", 0
    parts = [*rb'{ } [ " , NaN 1e999 null \u0000 \ud800 - true'.split(), b"\n", b"\xff", b""]
    for number in range(120):
        raw = bytearray(b"\n".join(json.dumps(line).encode() for line in sample_log(ALGOS[number % 4])[:6]))
        for _ in range(rng.choice([1, 3, 30])):
            at = rng.randrange(len(raw))
            raw[at:at + rng.choice([0, 1, 40])] = rng.choice(parts)
        path.write_bytes(raw)
        failed += bool(complaints(path, strict=bool(number % 2)))
    assert failed > 90
    path.write_bytes(rng.randbytes(100_000))
    assert complaints(path)


def test_the_docs_name_every_key():
    """docs/train_log.md is written by hand, but for the tables of metrics, which are made from METRICS."""
    names = set(re.findall(r"[\w/@<>]+", (ROOT / "docs" / "train_log.md").read_text("utf-8")))
    keys = {*contract.META, *contract.META_A2C, *contract.META_LLM, *contract.META_ROM, *contract.RESUME,
            *contract.ERROR, *contract.COMMON, *contract.FAMILIES["grpo"]}
    assert keys - names == set()


@pytest.mark.parametrize("algo, key, name", [
    ("grpo", "critic/score/max", "critic/score"), ("grpo", "critic/score/median", None),
    ("grpo", "critic/score", None), ("ppo", "rollout/termination/eos", "rollout/termination"),
    ("ppo", "val/a/pass@16", "val/<source>/pass@<n>"), ("grpo", "val/a/format", "val/<source>/<part>"),
    ("a2c", "critic/score/max", None)])
def test_a_name_in_metrics_stands_for_keys(algo, key, name):
    assert name_of(algo, key) == name


def test_the_command_prints_json_and_exits_0_or_1(tmp_path):
    cut = tmp_path / "log.jsonl"
    cut.write_bytes((DATA / "grpo.jsonl").read_bytes()[:-40])
    command = [sys.executable, "tools/validate_train_log.py"]
    for words, code in (([cut], 0), ([cut, "--strict"], 1), ([tmp_path / "none"], 1)):
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, "")
        assert json.loads(done.stdout)["ok"] is (code == 0)

    reader, writer = os.pipe()
    os.close(reader)  # who reads the verdict may stop before its end, as `| head -2` does
    done = subprocess.run([*command, DATA / "grpo.jsonl"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE,
                          timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("text", "says"), [
    ("{}\n", "expected a run folder, with a meta line"), ("[1]\n", "line 1: expected a JSON object"),
    ('{"meta": 5}\n', "expected a run folder, with a meta line"),
    ('{"meta": null}\n', "expected a run folder, with a meta line"),
    ('{"meta": {"run_id": "a", "args": {}}}\n', "pip install wandb")])
def test_a_run_that_cannot_be_mirrored_is_one_line(text, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    (tmp_path / "train_log.jsonl").write_text(text)
    assert track_run.main([str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


ODD = "a\0b\x1b[31m\ud800 token-123 \u6f22\n\tz"  # which becomes:
CLEAN = "ab[31m\ufffd [redacted] \u6f22\n\tz"


def episode(number, *messages, **more):
    return dict(number=number, source="countdown", reward=1.0, correct=1.0, info={"token-9": ODD},
                termination="done", messages=messages, turns=[{}]) | more


@pytest.fixture
def episodes_run(tmp_path):
    """A run folder with episodes, of which two are of training, and a checkpoint that is the best."""
    lines = sample_log("grpo")
    lines[0]["meta"] |= dict(argv=["--key", "token-1"])
    write_jsonl(tmp_path / "train_log.jsonl", lines)
    (tmp_path / "episodes").mkdir()
    task = dict(role="user", content=ODD)
    many = [episode(n % 2, task, dict(role="assistant", content=str(n))) for n in range(30)]
    shot = [dict(role="user", content="1+1"), dict(role="assistant", content="2"), task,
            dict(role="assistant", content="3", tool_calls=[{"function": {"name": "f"}}])]
    first = episode(0, *shot, correct=0.0, reward=None)
    write_jsonl(tmp_path / "episodes" / "val_step_000000.jsonl", [first, *many, dict(summary={})])
    for step in (4, 5):
        write_jsonl(tmp_path / "episodes" / f"train_step_{step:06d}.jsonl", many[:2])
    (tmp_path / "checkpoints" / "step_000012").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000012" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "checkpoints" / "state.json").write_text('{"last": "step_000012"}')
    return tmp_path


class FakeWandb:
    """What track_run.py needs of it; what it is given is kept."""

    Settings = dict

    def __init__(self):
        self.id, self.starting_step, self.begun, self.logged, self.artifacts = "run", 0, {}, {}, []

    def init(self, **options):
        self.begun = options
        return self

    def Table(self, columns, data):
        return [columns, *data]

    def Artifact(self, name, **options):
        self.name = name
        return self

    def add_dir(self, folder):
        self.folder = folder

    def log(self, numbers, step):
        self.logged[step] = numbers

    def log_artifact(self, artifact, aliases):
        self.artifacts.append((artifact.name, artifact.folder, aliases))

    def finish(self):
        pass


REDACT = ("--redact", r"token-\d+")
GROUP = f"grpo-{runs.experiment_hash(sample_log('grpo', seed=2)[0]['meta'])}"


def test_episodes_become_tables_without_what_must_not_leave(episodes_run, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    run, words = str(episodes_run), ["--once", "--train-table-every", "4", "--artifacts", "last"]
    assert track_run.main([run, *words, *REDACT]) == 0
    assert sorted(step for step, numbers in fake.logged.items() if "val/sample_table" in numbers) == [0]
    assert sorted(step for step, numbers in fake.logged.items() if "train/sample_table" in numbers) == [4]
    columns, first, second, *others = fake.logged[0]["val/sample_table"]
    assert columns == ["prompt", "response", "reward", "is_correct", "data_source", "metrics_json"]
    assert first[:5] == [f"user: 1+1\n\nassistant: 2\n\nuser: {CLEAN}",
                         '3\n[{"function": {"name": "f"}}]', None, False, "countdown"]
    assert second[:5] == [CLEAN, "0", 1.0, True, "countdown"] and len(others) == 8
    assert json.loads(second[5]) == {"[redacted]": CLEAN, "termination": "done"}
    assert all(int(row[1]) % 2 == 0 for row in others)  # each task's first attempt before a second one
    begun = fake.begun
    assert begun["name"] == "20261121_041501__grpo__countdown__s1" and begun["group"] == GROUP
    assert begun["config"]["argv"] == ["--key", "[redacted]"] and begun["settings"]["x_disable_meta"]
    folder = str(episodes_run / "checkpoints" / "step_000012")
    assert fake.artifacts == [("run-last", folder, ["latest", "step_000012"])]

    monkeypatch.setenv("WANDB_NAME", "its name")
    for more, name, rows in (([], "its name", 10), (["--name", "mine", "--table-samples", "3"], "mine", 3),
                             (["--table-samples", "0"], "its name", 0)):
        track_run.main([run, "--once", *more])
        assert fake.begun["name"] == name and fake.begun["settings"] is None
        assert len(fake.logged[0].get("val/sample_table", [columns])) == rows + 1


HIDDEN = ("\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u202e\u2066\u061c\u180e\ufe0f\u034f\u3164\u2800"
          "\ufffd\U000e0101\U000e0041")
SECRET = "k\u00e9y-AB12"
WIDE = "\uff4b\u00e9\uff59\uff0d\uff21\uff22\uff11\uff12"
TWINS = {  # how it may be written
    "as it is": SECRET, "decomposed": "ke\u0301y-AB12", "full width": WIDE,
    "bold": "k\u00e9y-\U0001d400\U0001d4011\U0001d7d0", "in circles": "k\u00e9y-\u24b6\u24b7\u2460\u2461",
    "struck out": "\u0336".join(SECRET), "half of a letter": "k\u00e9y-\ud800AB12",
    "control": "k\u00e9y\x07-AB\x0012", "all": "\u200b\u0336".join(WIDE)}
TWINS |= {f"between all letters {ord(letter):x}": letter.join(SECRET) for letter in HIDDEN}
TWINS |= {f"several {ord(letter):x}": f"k\u00e9y{letter * 3}-AB1{letter}2" for letter in HIDDEN}


@pytest.mark.parametrize("name", TWINS)
def test_what_reads_as_a_secret_is_redacted_and_what_is_beside_it_stays(name):
    patterns = [track_run.regular_expression(r"(?<![a-z])k[e\u00e9]y-[A-Z]{2}\d+")]
    beside = [("", ""), ("\uff58 e\u0301\u200b: ", "\u200d \uff11.\n"), ("z\u0336\u2060, ", "!\u00ad")]
    for before, behind in beside:
        text, expected = f"{before}{TWINS[name]}{behind}", f"{before}[redacted]{behind}"
        assert track_run.safe([text + text, {text: "a"}], patterns) == [expected + expected, {expected: "a"}]
    for harmless in ("ke\u0301y AB12 \uff11\u200b", "k\u00e9y\u200b\n-AB12", WIDE[:5]):
        assert track_run.safe(harmless, patterns) == harmless


@pytest.mark.parametrize("pattern, written", [
    ("k\u00e9\u00e8", "ke\u0301\u200be\u0300"), ("\uac00\\d", "\u1100\u1161\uff11"),
    ("f\u0438\u0439", "f\u0438\u00ad\u0438\u0306")])
def test_a_secret_of_letters_with_marks_is_redacted_with_its_marks(pattern, written):
    patterns = [track_run.regular_expression(pattern)]
    assert track_run.safe(f"a {written} e\u0301", patterns) == "a [redacted] e\u0301"


def test_a_secret_in_a_call_and_patterns_that_overlap_are_redacted_once(episodes_run):
    calls = [{"function": {"name": "f", "arguments": {"a": 'to\0ken-"\\7', "token-1": "b"}}}]
    first, second = map(track_run.regular_expression, (r'token-"\\\d', r"n-\d|b"))
    told = track_run.row(episode(0, dict(role="user", content="token-12b"), dict(
        role="assistant", content="", tool_calls=calls)), [first, second, track_run.regular_expression("x*")])
    assert told[0] == "toke[redacted]2[redacted]"
    (called,) = json.loads(told[1])
    assert called["function"]["arguments"] == {"a": "[redacted]", "toke[redacted]": "[redacted]"}


@pytest.mark.parametrize("words, says", [
    (["--redact", "("], "--redact: (: expected a regular expression"),
    (["--artifacts", "best"], "--artifacts best: grpo keeps none, as sft does"),
    (["--table-samples", "-1"], "-1: expected 0 or more")])
def test_what_track_run_cannot_do_is_one_line(words, says, episodes_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    assert track_run.main([str(episodes_run), "--once", *words]) == 2
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


def wandb_records(folder):
    """The protocol buffers of an offline run's file, which has LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    raw, place, parts = path.read_bytes(), 7, []  # behind a header of its own
    while place + 7 <= len(raw):
        left = 32768 - place % 32768  # in this block
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(raw[place + 4:place + 6], "little"), raw[place + 6]
        parts.append(raw[place + 7:place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # a whole one, or the last part
            yield Record.FromString(b"".join(parts))
            parts = []


@pytest.mark.slow
def test_wandb_gets_tables_names_groups_and_checkpoints(episodes_run):
    pytest.importorskip("wandb")
    (episodes_run / ".env").write_text("WANDB_PROJECT=from-file\nWANDB_MODE=offline\nWANDB_NAME=unused\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    words = ["--once", "--name", "mine", "--train-table-every", 4, "--artifacts", "last", *REDACT]
    done = subprocess.run([sys.executable, track_run.__file__, episodes_run, *map(str, words)],
                          cwd=episodes_run, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [*wandb_records(episodes_run)]
    (run,) = [record.run for record in found if record.HasField("run")][:1]
    assert (run.project, run.display_name, run.run_group) == ("from-file", "mine", GROUP)
    tables = {}
    for path in episodes_run.glob("wandb/offline-run-*/files/media/table/**/*.table.json"):
        tables[path.parent.name] = json.loads(path.read_text())
    assert {name: len(table["data"]) for name, table in tables.items()} == {"val": 10, "train": 2}
    assert tables["val"]["columns"] == track_run.COLUMNS and tables["val"]["data"][1][0] == CLEAN
    artifacts = [record.artifact for record in found if record.HasField("artifact")]
    models = [artifact for artifact in artifacts if artifact.type == "model"]
    assert [entry.path for artifact in models for entry in artifact.manifest.contents] == [
        "model.safetensors"]
    assert [sorted(artifact.aliases) for artifact in models] == [["latest", "step_000012"]]
    sent = b"".join(path.read_bytes() for path in episodes_run.glob("wandb/offline-run-*/**/*")
                    if path.is_file() and path.suffix in (".wandb", ".json"))
    assert not re.search(rb"token-\d", sent)


@pytest.mark.slow
def test_wandb_mirrors_a_log_while_it_is_written_and_resumed(tmp_path):
    pytest.importorskip("wandb")
    log, text = tmp_path / "train_log.jsonl", (DATA / "grpo.jsonl").read_text()
    lines = text.replace("__countdown__", "__countdown,my:own__").splitlines(keepends=True)  # a mixture's id
    log.write_text("".join(lines[:7]) + lines[7][:40])  # a line is being written
    tool = subprocess.Popen([sys.executable, track_run.__file__, tmp_path, "--every", "0.1"],
                            env=os.environ | dict(WANDB_MODE="offline", WANDB_PROJECT="elsewhere"))
    while not list(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        assert tool.poll() is None
        time.sleep(0.1)
    # A resume cuts the log at its checkpoint; without one it begins anew.
    for written in (lines[:8], lines[:5], "", lines[0][:40]):
        log.write_text("".join(written))
        time.sleep(1)
        assert tool.poll() is None
    log.write_text("".join(lines))
    tool.send_signal(signal.SIGINT)  # what was written before it is sent
    assert tool.wait(60) == 0
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")  # its records are protocol buffers
    found = [int(number) for number in re.findall(rb"\x12\titeration\x82\x01.(\d+)", path.read_bytes())]
    assert found == sorted(found) and {*found} == {*range(13)}
    assert all(name in path.read_bytes() for name in (b"elsewhere", b"val/countdown/pass@1", b"mismatch/kl"))


@pytest.fixture
def plot(capsys):
    """Runs the command. -> exit status, the JSON on standard output, the JSON lines on standard error"""
    def run(*words):
        status = plot_train_log.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, [json.loads(line) for line in err.splitlines()]
    return run


def assert_drawn(path: Path, panels: int) -> None:
    """A picture of a plausible size with something in each of its panels."""
    image = matplotlib.image.imread(path)[..., :3]
    height, width = image.shape[:2]
    assert 300 < height < 3000 and 500 < width < 3000
    colored = np.ptp(image, axis=2) > 0.2  # text, axes and grid are grey
    columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}.get(panels, 4)
    rows = math.ceil(panels / columns)
    for panel in range(panels):
        row, column = divmod(panel, columns)
        part = colored[row * height // rows:(row + 1) * height // rows,
                       column * width // columns:(column + 1) * width // columns]
        assert 0.0005 < part.mean() < 0.3, (path, panel)


FEW = ("train/reward", "train/entropy", "train/loss", "val/countdown/pass@1", "val/countdown/greedy")


def logs(folder, algo, few=True):
    """Paths of three seeds, the second a run folder. few: the keys of three panels alone, sooner drawn."""
    found = []
    for seed in (1, 2, 3):
        lines = [{key: line[key] for key in line if not few or "/" not in key or key in FEW}
                 for line in sample_log(algo, seed)]
        (folder / f"{algo}{seed}").mkdir()
        found.append(Path(write_jsonl(folder / f"{algo}{seed}" / "train_log.jsonl", lines)))
    found[1] = found[1].parent
    return found


PANELS = dict(sft=4, grpo=6, ppo=8, a2c=6)


@pytest.mark.parametrize("algo", slow_but(("sft",), PANELS))
def test_each_algorithm_gets_its_panels(algo, tmp_path, plot):
    out = tmp_path / "new" / "a.png"
    words = [*logs(tmp_path, algo, few=False), "--x", "wall_time_s", "--smoothing", 5]
    status, report, warnings = plot("--log", *words, "--out", out)
    assert (status, warnings, len(report["panels"])) == (0, [], PANELS[algo])
    assert_drawn(out, PANELS[algo])


def read_rows(path: Path, metric: str) -> np.ndarray:
    """x, mean, low, high, n of a metric in a CSV of the plotter."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["metric"], row["group"]) == (metric, "")]
    x = next(iter(rows[0]))
    return np.array([[float(row[name]) for name in (x, "mean", "low", "high", "n")] for row in rows])


def two_runs(tmp_path, *values, x=None):
    """A grpo log for each list of rewards; the x of its records are 10, 20, ... or those in x."""
    for run, rewards in enumerate(values):
        lines = sample_log("grpo", run + 1)[:1]
        for index, reward in enumerate(rewards):
            at = x[run][index] if x else 10 * (index + 1)
            lines.append({"env_steps": at, "iteration": index, "wall_time_s": at, "train/reward": reward})
        yield write_jsonl(tmp_path / f"run{run}.jsonl", lines)


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of numbers and warnings: the figure is not rendered, which takes most of the time."""
    monkeypatch.setattr(plot_train_log.plt.Figure, "savefig", lambda *_, **__: None)


def test_the_band_reaches_over_the_seeds_and_is_interpolated_where_all_have_data(undrawn, tmp_path, plot):
    table = tmp_path / "a.csv"
    words = ["--out", tmp_path / "a.png", "--csv", table, "--log"]
    status, report, _ = plot(*words, *two_runs(tmp_path, [0.0, 1.0, 4.0], [2.0, 3.0, 0.0]))
    assert status == 0 and report["panels"] == ["reward"] and report["runs"] == [2]
    assert read_rows(table, "train/reward").tolist() == [[10, 1, 0, 2, 2], [20, 2, 1, 3, 2], [30, 2, 0, 4, 2]]

    for values, x, cut in (([5.0, 6.0, 7.0], [50, 75, 102], False), ([5.0, 6.0], [0, 50], True)):
        status, _, warnings = plot(*words, *two_runs(tmp_path, [0.0, 10.0], values, x=[[0, 100], x]))
        assert status == 0 and any("different length" in entry["warning"] for entry in warnings) is cut
        if not cut:
            rows = read_rows(table, "train/reward")
            np.testing.assert_allclose(rows[:, 0], [50, 100])
            np.testing.assert_allclose(rows[0], [50, 5, 5, 5, 2])
            np.testing.assert_allclose(rows[1, 2:4], [6 + 25 / 27, 10], rtol=1e-6)


def test_smoothing_spares_validation(undrawn, tmp_path, plot):
    lines = [line | {"eval/success_rate": n % 2} for n, line in enumerate(sample_log("a2c"))]
    a2c, grpo, table = write_jsonl(tmp_path / "a2c.jsonl", lines), DATA / "grpo.jsonl", tmp_path / "a.csv"
    for log, metrics in {grpo: ("val/countdown/pass@1", "train/reward"), a2c: ("eval/success_rate",)}.items():
        rows = []
        for window in (1, 9):
            plot("--log", log, "--smoothing", window, "--csv", table, "--out", tmp_path / "a.png")
            rows.append([read_rows(table, metric) for metric in metrics])
        for metric, *found in zip(metrics, *rows, strict=True):
            assert np.array_equal(*found) is (metric != "train/reward")


@pytest.mark.slow
def test_a_figure_with_a_control_or_some_of_its_panels_is_drawn_again_from_its_csv(tmp_path, plot):
    words = ["--log", *logs(tmp_path, "grpo"), "--control", *logs(tmp_path, "sft"), "--x", "wall_time_s"]
    tables = [tmp_path / "a.csv", tmp_path / "b.csv"]
    plot(*words, "--csv", tables[0], "--out", tmp_path / "a.png")
    words = ["--from-csv", tables[0], "--csv", tables[1], "--out", tmp_path / "b.png"]
    status, report, _ = plot(*words)
    assert (status, report["runs"], len(report["panels"])) == (0, [3, 3], 3)
    assert tables[0].read_text() == tables[1].read_text()
    assert_drawn(tmp_path / "b.png", 3)

    status, report, _ = plot(*words, "--panel", "held out")
    assert status == 0 and all("held out" in panel for panel in report["panels"]) and report["panels"]
    assert_drawn(tmp_path / "b.png", len(report["panels"]))
    status, _, errors = plot(*words, "--panel", "no such panel")
    assert status == 1 and "no such panel" in errors[-1]["error"]


def test_any_logged_number_is_drawn_by_its_key(tmp_path, plot):
    """Also the parts of a reward, which the validator knows."""
    lines = sample_log("grpo")
    for number, line in enumerate(lines):
        if "train/reward" in line:
            line |= {"train/a/b/format": number / 20, "train/a/b/correct": 0.5}
    log = write_jsonl(tmp_path / "train_log.jsonl", lines)
    assert complaints(log, strict=True) == []
    words = ["--out", tmp_path / "a.png", "--csv", tmp_path / "a.csv"]
    status, report, _ = plot("--log", log, "--key", "train/a/*", "opt_steps", *words)
    assert (status, report["panels"]) == (0, ["train/a/b/correct", "train/a/b/format", "opt_steps"])
    assert_drawn(tmp_path / "a.png", 3)
    words = ["--from-csv", tmp_path / "a.csv", "--out", tmp_path / "a.png"]
    status, report, _ = plot(*words, "--key", "*/format")
    assert (status, report["panels"]) == (0, ["train/a/b/format"])
    status, _, errors = plot("--log", log, "--key", "train/a/b/fromat")
    assert status == 1 and errors[-1]["error"].startswith(
        "--key train/a/b/fromat: no record has it; the closest are train/a/b/format")
    lines[RECORD - 1]["train/a/b/format"] = "1"
    assert complaints(write_jsonl(Path(log), lines)) == [(RECORD, "train/a/b/format")]


def experiment(folder, number, seed, **flags):
    """A log with these flags."""
    lines = sample_log("grpo", seed)
    lines[0]["meta"]["args"] |= flags | dict(seed=seed, run_dir=f"{number}{seed}")
    lines = [{key: line[key] for key in line if "/" not in key or key in FEW} for line in lines]
    for line in lines:
        if "val/countdown/pass@1" in line:
            line["val/countdown/pass@1"] *= 1 - number / 10
    (folder / f"run{number}{seed}").mkdir()
    return Path(write_jsonl(folder / f"run{number}{seed}" / "train_log.jsonl", lines)).parent


def test_each_group_has_its_curve_and_band(tmp_path, plot):
    runs = [[experiment(tmp_path, n, seed, learning_rate=0.1 * n) for seed in (1, 2)] for n in range(8)]
    words = [word for group in runs for word in ("--log", *group)]
    out = ["--key", "train/reward", "--out", tmp_path / "a.png", "--csv", tmp_path / "a.csv"]
    status, report, warnings = plot(*words, *out)
    assert (status, report["runs"], warnings) == (0, [2] * 8, [])
    assert_drawn(tmp_path / "a.png", 1)
    with (tmp_path / "a.csv").open() as file:
        groups = {row["group"]: row for row in csv.DictReader(file)}
    assert list(groups) == [f"--learning-rate {0.1 * n}" for n in range(8)]
    assert all(float(row["low"]) < float(row["high"]) for row in groups.values())
    plot("--from-csv", tmp_path / "a.csv", "--out", tmp_path / "b.png", "--csv", tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()

    svg = tmp_path / "c.svg"
    status, report, _ = plot("--log", *runs[0], "--log", *runs[1], "--label", "slow", "fast", "--out", svg)
    text = svg.read_text("utf-8")
    assert (status, report["runs"]) == (0, [2, 2]) and "countdown, held out" in report["panels"]
    for name in ("slow, pass@1", "fast, greedy", "runs: slow (2), fast (2)"):
        assert name in text
    with pytest.raises(SystemExit):
        plot_train_log.main(["--log", "a", "--label", "x", "y"])


def test_a_group_of_different_experiments_is_told_with_the_flags_that_differ(undrawn, tmp_path, plot):
    one, same = (experiment(tmp_path, 1, seed, learning_rate=0.1) for seed in (1, 2))
    other = experiment(tmp_path, 2, 1, learning_rate=0.2)
    out = ["--out", tmp_path / "a.png"]
    assert not any("experiments" in entry["warning"] for entry in plot("--log", one, same, *out)[2])
    (line,) = [entry for entry in plot("--log", one, other, *out)[2] if "experiments" in entry["warning"]]
    assert line["differ"] == {"--learning-rate": [0.1, 0.2]}


def test_what_is_read_of_a_run_folder(tmp_path):
    """A line that is still being written does not count; one that is damaged is named, or left out."""
    log = Path(write_jsonl(tmp_path / "train_log.jsonl", sample_log("grpo")))
    found = runs.read(tmp_path)
    assert [len(lines) for lines in (found.records, found.resumes, found.errors)] == [13, 1, 1]
    log.write_bytes(log.read_bytes()[:-9])
    assert runs.read(log).records == found.records[:-1]
    log.write_bytes(log.read_bytes() + b"\n")
    with pytest.raises(BadInput, match=r"train_log.jsonl, line 16: expected a JSON object"):
        runs.read(log)
    damaged = []
    assert runs.read(log, damaged).records == found.records[:-1] and len(damaged) == 1
    for name in ("step_000002", "step_1000000", "step_999999", ".step_3.writing", "step_copy"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name[5:] for path in runs.checkpoints(tmp_path)] == ["000002", "999999", "1000000"]
    for name in ("val_step_1000000", "val_step_000010", "train_step_000010", "val_step_x"):
        (tmp_path / "episodes").mkdir(exist_ok=True)
        (tmp_path / "episodes" / f"{name}.jsonl").touch()
    files = [(iteration, kind) for iteration, kind, _ in runs.episode_files(tmp_path)]
    assert files == [(10, "train"), (10, "val"), (1000000, "val")]


def test_an_experiment_is_its_flags_and_files_but_for_the_seed_and_the_code():
    """Also in logs of before, whose meta line had another hash under this name."""
    meta = dict(sample_log("grpo")[0]["meta"], model="m", script_sha256="a", experiment_hash="b")
    meta["args"] = dict(meta["args"], model="m", seed=1, iterations=5, final_learning_rate=0.1)
    one = runs.experiment_hash(meta)
    for changes in (dict(seed=2), dict(script_sha256="c"), dict(git_sha="d"), dict(run_id="e")):
        assert runs.experiment_hash(meta | changes) == one
    assert runs.experiment_hash(meta | {"model_sha256": "g"}) != one
    assert runs.experiment_hash(meta | {"reward_and_template_sha256": "g"}) != one

    def with_flags(**flags):
        return runs.experiment_hash(meta | {"args": meta["args"] | flags})

    assert with_flags(seed=2, run_dir="x", vllm_url=["y"]) == one
    assert with_flags(iterations=6) != one and with_flags(temperature=0.9) != one
    assert with_flags(iterations=6, final_learning_rate=1) == with_flags(iterations=5, final_learning_rate=1)


def test_runs_are_compared_by_flags_that_differ_and_by_held_out_figures(tmp_path, capsys):
    runs = [experiment(tmp_path, number, 1, learning_rate=0.1 * (number + 1)) for number in (0, 1)]
    lines = [json.loads(line) for line in (runs[1] / "train_log.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "val/countdown/pass@1" in line]
    for number, line in enumerate(evaluated):
        line["val/countdown/pass@1"] = 0.899 - number / 1000  # the best is the first one
        line["val/countdown/greedy"] = 0.5 + 0.1 * (number == 1)
        line["val/loss"] = 2.0 - 0.1 * (number == 1)
    write_jsonl(runs[1] / "train_log.jsonl", [*lines, b'{"half a'])
    assert compare_runs.main([*map(str, runs), "--form", "csv"]) == 0
    one, other = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (one["run"], other["--learning-rate"]) == ("run01", "0.2")
    assert len(one["experiment_hash"]) == 12 and one["experiment_hash"] != other["experiment_hash"]
    assert "--seed" not in one and "--run-dir" not in one
    key = "val/countdown/pass@1"
    assert float(other[f"{key} best"]) == 0.899 and other[f"{key} best at"] == "0"
    assert float(other[f"{key} final"]) < 0.899
    assert other["iterations"] == str(lines[-1]["iteration"])
    for name, final, best in (("val/countdown/greedy", "0.5", "0.6"), ("val/loss", "2.0", "1.9")):
        assert (other[f"{name} final"], other[f"{name} best"]) == (final, best)
        assert other[f"{name} best at"] == str(evaluated[1]["iteration"])
    assert float(one[f"{key} final"]) == lines_of(runs[0])[-1][key]

    for form in ("text", "markdown"):
        assert compare_runs.main([*map(str, runs), "--form", form]) == 0
        said = capsys.readouterr().out
        (row,) = [line for line in said.splitlines() if "--learning-rate" in line]
        assert re.findall(r"[\d.]+", row) == ["0.1", "0.2"] and "\033" not in said
        best = max(line[key] for line in lines_of(runs[0]))
        assert (f"**{best:.4g}** | 0.899 |" in said) is (form == "markdown") and best > 0.899
    for words, says in (([tmp_path], "train_log.jsonl"), ([], "RUN"), ([runs[0], "--form", "x"], "'x'")):
        assert compare_runs.main([*map(str, words)]) == 2
        line = capsys.readouterr().err
        assert says in line and line.count("\n") == 1


def write_run(folder, meta, *records):
    """A log of records (iteration, {key: value}).  -> its folder"""
    folder.mkdir(parents=True)
    head = sample_log("grpo")[0]["meta"]
    lines = [dict(meta=head | meta | dict(args=head["args"] | meta.get("args", {})))]
    lines += [dict(sample_log("grpo")[1], iteration=number) | numbers for number, numbers in records]
    write_jsonl(folder / "train_log.jsonl", lines)
    return folder


def compared(capsys, form, *folders):
    """{name of a row: its cells} of a table in markdown; of CSV its rows by column."""
    assert compare_runs.main([*map(str, folders), "--form", form]) == 0
    said = capsys.readouterr().out
    if form == "csv":
        header, *rows = csv.reader(said.splitlines())
        return dict(zip(header, zip(*rows, strict=True), strict=True))
    cells = [re.split(r" (?<!\\)\| ", row.removeprefix("| ").removesuffix(" |")) for row in said.splitlines()]
    assert {len(row) for row in cells} == {1 + len(folders)}
    return {name.strip("`"): tuple(values) for name, *values in cells[2:]}


def test_runs_are_compared_with_their_ties_zeros_losses_and_flags_that_one_of_them_has(tmp_path, capsys):
    key, loss, odd, bar = "val/own/pass@1", "val/loss", "eval/greedy_return", "val/a|b/greedy"
    one = write_run(tmp_path / "x" / "run", dict(git_sha="a" * 40, model_sha256="m1", env="c|d"),
                    (0, {key: 0.0, loss: 2.0}), (5, {key: 0.5, loss: 1.0, odd: 3.0}),
                    (9, {key: 0.5, loss: 1.5, odd: 3.0}))
    other = write_run(tmp_path / "y | z" / "run", dict(git_sha="b" * 40, model_sha256="m2", args=dict(
        pool=0, system="a\nb | c")), (0, {key: 0.25, loss: 1.0}),
        (9, {key: 0.25, loss: 0.5, odd: 3.0, bar: 0.5}))
    table = compared(capsys, "csv", one, other)
    assert table["run"] == (str(one), str(other))  # both are called `run`
    assert table[f"{key} final"] == ("0.5", "0.25")
    assert table[f"{key} best at"] == ("5", "0")  # the first of equal ones
    assert table[f"{loss} best"] == ("1.0", "0.5") and table[f"{loss} best at"] == ("5", "9")
    assert table["--pool"] == ("", "0") and "model_sha256" not in table and "--run-dir" not in table
    assert table["git_sha"] == ("a" * 40, "b" * 40) and table["iterations"] == ("9", "9")

    shown = compared(capsys, "markdown", one, other)
    assert shown[f"{loss} final"] == ("1.5", "**0.5**")  # the least loss, the most of all else
    assert shown[f"{key} final"] == ("**0.5**", "0.25")
    assert shown[f"{odd} best"] == ("3", "3") and shown[f"{loss} best at"] == ("5", "9")  # none is better
    assert shown["env"] == ("c\\|d", "countdown") and shown["--pool"] == ("-", "0")
    assert shown["--system"] == ("-", "a b \\| c") and shown["val/a\\|b/greedy best"] == ("-", "0.5")
    assert shown["git_sha"] == ("aaaaaaaa", "bbbbbbbb")

    same = write_run(tmp_path / "same", dict(git_sha="b" * 40, model_sha256="m2"), (0, {key: 0.25}))
    assert compared(capsys, "csv", one, same)["model_sha256"] == ("m1", "m2")  # where no flag differs
    assert compared(capsys, "csv", one, same)[f"{loss} best"] == ("1.0", "")


def test_a_run_is_mirrored_once_with_its_best_checkpoint_and_conversations_from_their_first_reply(
        tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = write_run(tmp_path / "run", dict(algo="sft"), (0, {}), (5, {"own": 1.0}), (5, {"own": 2.0}),
                       (9, {}))
    turns = [dict(role=role, content=text) for role, text in (
        ("user", "task"), ("assistant", "one"), ("user", "no"), ("assistant", "x" * 30_000))]
    (folder / "episodes").mkdir()
    write_jsonl(folder / "episodes" / "val_step_000005.jsonl",
                [episode(number, *turns, correct=0.5, turns=[{}, {}]) for number in (2, 0, 1)])
    for step in ("step_000005", "step_000009"):
        (folder / "checkpoints" / step).mkdir(parents=True)
    (folder / "checkpoints" / "state.json").write_text('{"last": "step_000009", "best": "step_000005"}')
    words = [str(folder), "--once", "--artifacts", "best", "--name", "token-1 is it"]
    assert track_run.main([*words, *REDACT]) == 0
    assert fake.begun["name"] == "[redacted] is it"
    assert [*fake.logged] == [0, 5, 9] and fake.logged[5]["own"] == 1.0  # the first of two
    best = str(folder / "checkpoints" / "step_000005")
    assert fake.artifacts == [("run-best", best, ["latest", "step_000005"])]
    _, row, *others = fake.logged[5]["val/sample_table"]
    assert row[0] == "task" and row[1].startswith("assistant: one\n\nuser: no\n\nassistant: xx")
    assert row[3] is False and len(row[1]) < 21_000 and "more characters]" in row[1] and len(others) == 2
    fake.starting_step, fake.logged, fake.artifacts = 6, {}, []  # wandb has steps up to 5: it goes on there
    looks, sent = [], []  # while it follows the run, which has a better checkpoint after the second look

    def wait(seconds):
        looks.append(seconds)
        sent.append([*fake.logged])
        fake.logged.clear()
        if len(looks) == 2:
            (folder / "checkpoints" / "state.json").write_text('{"best": "step_000009"}')
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    words.remove("--once")
    assert track_run.main([*words, "--every", "7"]) == 0
    assert looks == [7] * 4 and sent == [[9], [], [], []]
    assert [aliases for _, _, aliases in fake.artifacts] == [["latest", f"step_{step}"] for step in (
        "000005", "000009")]


def lines_of(run):
    """The records of a run with a held-out accuracy."""
    lines = map(json.loads, (run / "train_log.jsonl").read_text().splitlines())
    return [line for line in lines if "val/countdown/pass@1" in line]


@pytest.mark.slow
def test_resumes_are_marked(tmp_path, plot):
    images, path = [], logs(tmp_path, "grpo")[0]
    for out in (tmp_path / "with.svg", tmp_path / "without.svg"):
        plot("--log", path, "--out", out)
        images.append(out.read_text())
        kept = [line for line in path.read_bytes().splitlines() if not line.startswith(b'{"resume"')]
        write_jsonl(path, kept)
    assert ["resumed" in image for image in images] == [True, False]
    assert images[0].count("stroke-dasharray") == images[1].count("stroke-dasharray") + 3  # one in each panel


@pytest.mark.parametrize("algo, keys, panel, kept", [
    ("a2c", ["done_rate", "trunc_rate"], "ends of episodes", 5),
    ("a2c", ["trunc_rate"], "ends of episodes", 6),
    ("a2c", ["dist_p90"], "distance to the goal", 6),
    ("grpo", ["response_length/mean"], "response length", 5),
    ("grpo", ["val/countdown/pass@1", "val/countdown/pass@16", "val/countdown/greedy"], "held out", 5),
])
def test_a_missing_key_is_warned_of(algo, keys, panel, kept, undrawn, tmp_path, plot):
    lines = [{key: value for key, value in line.items() if key not in keys} for line in sample_log(algo)]
    path = write_jsonl(tmp_path / "log.jsonl", lines)
    status, report, warnings = plot("--log", path, "--out", tmp_path / "a.png")
    assert status == 0 and len(report["panels"]) == kept
    assert [entry["panel"] for entry in warnings] == [panel]
    assert ("skipped" in warnings[0]["warning"]) is (panel not in report["panels"])
    assert set(warnings[0]["keys"]) <= {*keys, "val/<source>/pass@1"} and warnings[0]["keys"]


UNUSABLE = ("meta alone", "no x", "no numbers")


def test_what_cannot_be_drawn_says_why(undrawn, tmp_path, plot):
    good, out, number = DATA / "grpo.jsonl", tmp_path / "a.png", {"env_steps": 1, "train/reward": 1.0}
    (tmp_path / "other").write_text("a,b\n1,2\n")
    (tmp_path / "blank").write_text("\n")
    logs = {
        "empty": [], "meta alone": SAMPLE[:1], "no meta": SAMPLE[1:], "not JSON": [b"x", b"{", b"\xff"],
        "no x": [SAMPLE[0], {"train/reward": 1.0}], "no args": [{"meta": {"algo": "grpo"}}, number],
        "no numbers": [SAMPLE[0], {"env_steps": 1, "train/reward": math.inf, "train/entropy": True}],
    }
    broken = [Path(write_jsonl(tmp_path / name, lines)) for name, lines in logs.items()]
    for words, says in (
        *((["--log", path], "no usable record") for path in broken if path.name in UNUSABLE),
        *((["--log", path], "with a meta line first") for path in broken if path.name not in UNUSABLE),
        (["--log", tmp_path / "missing"], "with a meta line first"),
        (["--log", good, DATA / "sft.jsonl"], "different algorithms"),
        (["--log", good, "--out", good / "a.png"], "cannot be written"),
        *((["--from-csv", tmp_path / name], "not a CSV of this tool") for name in ("other", "blank", "none")),
    ):
        words = words if "--out" in words else [*words, "--out", out]
        status, report, errors = plot(*words)
        assert (status, report) == (1, None) and says in errors[-1]["error"], words

    status, report, warnings = plot("--log", good, *broken, "--out", out)
    assert (status, report["runs"]) == (0, [1])
    assert ["no usable record" in entry.get("reason", "") for entry in warnings].count(True) > 1
