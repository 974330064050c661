"""What a person sees of a run: at a terminal a bar and a table, elsewhere the table alone; its last lines."""

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tyro

import a2c_vecenv as a2c
import grpo_llm
import ppo_llm
import sft
from tests.run_folders import (
    ROOT,
    SMALL,
    TINY,
    as_words,
    command_line,
    records,
    slow_but,
    slow_clock,
    train,
    write_jsonl,
)
from tools import report_run, view_episodes

ALL = [grpo_llm, ppo_llm, sft, a2c]
# The columns of the table and the metrics that they show.
COLUMNS = {
    grpo_llm: {"reward": "train/reward", "groups": "rollout/groups_trainable", "tok/s": "rollout/throughput",
               "pass@1": "val/countdown/pass@1", "pass@n": "val/countdown/pass@2",
               "greedy": "val/countdown/greedy"},
    ppo_llm: {"reward": "train/reward", "critic": "critic/vf_explained_var", "tok/s": "rollout/throughput",
              "pass@1": "val/countdown/pass@1", "pass@n": "val/countdown/pass@2",
              "greedy": "val/countdown/greedy"},
    sft: {"loss": "train/loss", "val": "val/loss", "tok/s": "train/throughput",
          "pass@1": "val/countdown/pass@1", "pass@n": "val/countdown/pass@2",
          "greedy": "val/countdown/greedy"},
    a2c: {"return": "episode_return", "success": "success_rate", "steps/s": "sps", "score": "eval/return",
          "solved": "eval/success_rate", "greedy": "eval/greedy_success_rate"},
}


def table(said):
    """-> the head's names, and of each line below a {name: text}, by where it stands"""
    lines = said.splitlines()
    (head,) = (line for line in lines if line.startswith("iteration"))
    spans = {match[0]: match.span() for match in re.finditer(r"\S+", head)}
    starts = [0, *(end for _, end in spans.values())]
    rows = []
    for line in lines[lines.index(head) + 1:]:
        if re.match(r" *\d+ +[\d,]+ s", line):
            cells = [line[start:end].strip() for start, (_, end) in zip(starts, spans.values(), strict=False)]
            rows.append(dict(zip(spans, cells, strict=True)))
    return [*spans], rows


def number(text):
    return float(text.replace(",", "").removesuffix(" s"))


@pytest.mark.parametrize("script", slow_but([grpo_llm, sft, a2c], ALL))
def test_the_table_has_the_numbers_of_the_log_at_each_evaluation(script, tmp_path, capsys):
    """In columns that fit 80; where a short run ends elsewhere than at a terminal, nothing more is said."""
    folder = train(script, tmp_path / "run")
    said, log = capsys.readouterr().out, [r for r in records(folder) if r["time/eval"]]
    names, rows = table(said)
    assert names == ["iteration", "time", *COLUMNS[script], "eval"]
    rows = rows[script is a2c:]  # its first record, which is none of an evaluation
    assert [int(row["iteration"]) for row in rows] == [2, 4] if script is a2c else [0, 2, 4]
    for row, record in zip(rows, log, strict=True):
        shown = dict(iteration="iteration", time="wall_time_s", eval="time/eval") | COLUMNS[script]
        assert {name for name in shown if row[name]} == {name for name in shown if shown[name] in record}
        for name, key in shown.items():
            if key in record:
                digits = len(row[name].removesuffix(" s").partition(".")[2])
                assert number(row[name]) == pytest.approx(record[key], abs=0.501 / 10**digits), (name, row)
    lines = said.splitlines()
    assert str(folder) in lines and lines[-1].split()[0] == "4" and not (folder / "curve.png").exists()
    assert all(len(line) <= 80 for line in lines[-len(rows) - 1:])


def test_of_several_sources_the_table_has_the_mean(tmp_path, capsys):
    folder = train(grpo_llm, tmp_path / "run", iterations=0, env="countdown,tests/two_turn.py:TwoTurn",
                   env_kwargs=("countdown.difficulty=true",))
    (row,), (record,) = table(capsys.readouterr().out)[1], records(folder)
    found = [value for key, value in record.items() if re.fullmatch("val/.+/pass@1", key)]
    assert len(found) > 1 and number(row["pass@1"]) == pytest.approx(np.mean(found), abs=5e-4)


def test_without_a_terminal_ten_seconds_pass_between_lines(tmp_path, capsys, monkeypatch):
    slow_clock(monkeypatch, 0.7)
    folder = train(a2c, tmp_path / "run", iterations=40, eval_every=0)
    rows = table(capsys.readouterr().out)[1]
    expected, last = [], -np.inf
    for record in records(folder):
        if record["time/eval"] or record["wall_time_s"] > last + 10:
            expected.append(record["iteration"])
            last = record["wall_time_s"]
    assert [int(row["iteration"]) for row in rows] == expected
    assert 3 < len(expected) < 20 and rows[1]["return"] and not rows[1]["score"]


# At a terminal


@contextlib.contextmanager
def terminal(width=100):
    """This process writes to a pseudo terminal, as do those that it starts.  -> pieces of what it wrote"""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, width, 0, 0))
    wrote, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")

    def read():
        with contextlib.suppress(OSError):  # the other side is closed
            while piece := os.read(master, 1 << 16):
                wrote.append(decoder.decode(piece))  # a read may cut a character in two

    reader = threading.Thread(target=read)
    reader.start()
    kept = {handle: os.dup(handle) for handle in (1, 2)}
    try:
        with open(slave, "w", 1) as file:
            for handle in kept:
                os.dup2(slave, handle)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield wrote
    finally:
        for handle, copy in kept.items():
            os.dup2(copy, handle)
            os.close(copy)
        reader.join(10)
        os.close(master)


def screen(raw):
    """The lines that stand there in the end."""
    lines, row, column = [[]], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|.|\n", raw):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [[]] * (row == len(lines))
        else:
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = part
            column += 1
    return "\n".join("".join(line).rstrip() for line in lines).rstrip().split("\n")


def commands(lines):
    return [line.strip() for line in lines[lines.index("To go on:") + 1:]]


def test_at_a_terminal_a_bar_comes_and_goes_and_a_table_and_what_comes_next_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = as_words(SMALL["grpo_llm"] | dict(run_dir="my run", iterations=3, print_samples=1))
    with terminal() as wrote:
        assert command_line("grpo_llm.py", *words) == 0
    raw = "".join(wrote)
    bar = r"\r *33%\|.*?\| 1/3 \[\d\d:\d\d<\d\d:\d\d, .*?, reward=0\.\d{3}, groups=\d+, tok/s=\d"
    assert re.search(bar, raw)
    lines = screen(raw)
    assert not [line for line in lines if "/3 [" in line or "replies/s" in line]
    assert lines[0] == "my run" and lines[1].startswith("From iteration 1 on 4 prompts x 4 replies")
    assert [row["iteration"] for row in table("\n".join(lines))[1]] == ["0", "2", "3"]
    assert sum(line.startswith("train ") for line in lines) == 3
    end = lines.index("To go on:")
    assert re.fullmatch(r"Iteration 3 after \d+ s, in 'my run'", lines[end - 4])
    assert lines[end - 3].startswith("  countdown: pass@1 0.") and ", greedy 0." in lines[end - 3]
    assert lines[end - 2:end] == [
        "  checkpoint: 'my run/checkpoints/step_000003'", "  curves: 'my run/curve.png'"]
    assert Path("my run/curve.png").read_bytes().startswith(b"\x89PNG")
    plot, view, evaluation = map(shlex.split, commands(lines))
    assert view_episodes.main(view[2:]) == 0
    assert all(Path(words[1]).samefile(ROOT / name) for words, name in (
        (plot, "tools/plot_train_log.py"), (view, "tools/view_episodes.py"), (evaluation, "grpo_llm.py")))
    args = tyro.cli(grpo_llm.Args, args=evaluation[2:])
    assert (args.model, args.iterations, args.run_dir) == ("my run/checkpoints/step_000003", 0, "")
    assert (args.eval_tasks, args.eval_samples, args.max_response_tokens) == (6, 2, 10)


INTERRUPTED = """
import os, signal, time
from envs.countdown import Countdown

PRESSED = []


class Interrupted(Countdown):
    def start(self, task, seed):
        episode = super().start(task, seed)
        if "train" in task.id:
            time.sleep(0.3)  # the bar of replies comes after a second
            step = episode.step

            def interrupted(reply, pressed=PRESSED):
                if not pressed:
                    pressed.append("Ctrl-C")
                    os.kill(os.getpid(), signal.SIGINT)
                return step(reply)

            episode.step = interrupted
        return episode
"""


def test_ctrl_c_leaves_no_bar_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(INTERRUPTED)
    words = as_words(SMALL["grpo_llm"] | dict(
        run_dir="run", env="own.py:Interrupted", prompts_per_iteration=1))
    with terminal() as wrote:
        assert command_line("grpo_llm.py", *words) == 1
    raw = "".join(wrote)
    lines = screen(raw)
    assert " replies/s]" in raw  # the bar below the other
    assert not [line for line in lines if "/4 [" in line], lines
    assert re.fullmatch(r"error: KeyboardInterrupt: .* receipt: run/receipts/\S+", lines[-1])
    assert [row["iteration"] for row in table("\n".join(lines))[1]] == ["0"]


# The last lines, by the tool


def test_a_tool_that_fails_or_is_not_there_changes_nothing(tmp_path, monkeypatch, capfd):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho no such tool >&2\nexit 3\n')
    program.chmod(0o755)
    clock = 1000.0

    def tick():
        nonlocal clock
        clock += 1
        return clock

    monkeypatch.setattr(time, "perf_counter", tick)
    monkeypatch.setattr(sys, "executable", str(program))
    folder = train(grpo_llm, tmp_path / "run", iterations=1)
    assert (tmp_path / "called").read_text() == f"{ROOT}/tools/report_run.py {folder}\n"
    assert capfd.readouterr().err.splitlines() == ["no such tool"]


def run_of(folder, algo, records, checkpoints=("step_000004",), argv=("grpo_llm.py",), **meta):
    """A run folder with this log."""
    args = dict(model="base", env_kwargs=["skill=mixed"], max_response_tokens=16) | meta.pop("args", {})
    meta = dict(algo=algo, env="countdown", args=args, argv=[*argv]) | meta
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir(parents=True)
    write_jsonl(folder / "train_log.jsonl", [dict(meta=meta), *records])
    return folder


def said_of(folder, capsys, code=0):
    assert report_run.main([str(folder)]) == code
    return capsys.readouterr().out.splitlines()


def test_each_source_has_a_line_with_its_first_and_last_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = [{"iteration": 0, "wall_time_s": 1.0, "val/a/b/pass@1": 0.25, "val/c/greedy": 0.5},
           {"iteration": 1, "wall_time_s": 3661.4, "val/a/b/pass@1": 0.125, "val/c/correct": 0.0}]
    lines = said_of(run_of(tmp_path / "run", "grpo", log), capsys)
    assert lines[:4] == [
        "Iteration 1 after 3,661 s, in run", "  a/b: pass@1 0.250 -> 0.125", "  c: greedy 0.500",
        "  checkpoint: run/checkpoints/step_000004"]
    assert not (tmp_path / "run/curve.png").exists() and "plot" not in lines[5]  # of one iteration
    many = [{"iteration": 0, **{f"val/{n}/greedy": 0.5 for n in range(30)}}]
    lines = said_of(run_of(tmp_path / "many", "grpo", many), capsys)
    assert lines[13] == "  and 18 other sources, in the log"


@pytest.mark.parametrize(("algo", "given", "expected"), [
    ("grpo", dict(argv=["grpo_llm.py", "--run_dir=x", "--env-kwargs", "a=1", "b=it's", "--iterations", "9",
                        "--scale-rewards"]),
     "{python} {root}/grpo_llm.py --env-kwargs a=1 'b=it'\"'\"'s' --scale-rewards --model {checkpoint} "),
    ("ppo", dict(argv=["ppo_llm.py", "--model", "base", "--lora-rank", "8", "--seed", "2"],
                 args=dict(lora_rank=8)),
     "{python} {root}/ppo_llm.py --seed 2 --model base --lora-adapter-path {checkpoint} "),
    ("sft", {}, "{python} {root}/grpo_llm.py --env countdown --max-response-tokens 16 --model {checkpoint} "),
    ("sft", dict(env=None), None),
    ("a2c", {}, "{python} {root}/tools/dump_policy_gif.py --run run --episodes 3 --out run/look"),
])
def test_the_last_command_evaluates_or_shows_the_checkpoint(
        algo, given, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/bin")
    there = (Path(sys.executable).parent / "python").exists()
    python = "python" if there else sys.executable
    run_of(tmp_path / "run", algo, [dict(iteration=4)], **given)
    lines = commands(said_of("run", capsys))
    if expected is None:
        assert len(lines) == 1
        return
    root = os.path.relpath(ROOT) if len(os.path.relpath(ROOT)) < len(str(ROOT)) else ROOT
    whole = expected.format(python=python, root=root, checkpoint="run/checkpoints/step_000004")
    assert lines[-1] == whole + ("--iterations 0 --print-samples 3" if whole.endswith(" ") else "")


def test_where_python_is_another_one_the_commands_name_this_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = commands(said_of(run_of(tmp_path / "run", "grpo", [dict(iteration=4)]), capsys))
    assert all(line.startswith(f"{shlex.quote(sys.executable)} ") for line in lines)


def test_of_sft_the_best_checkpoint_is_named_and_evaluated(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run_of(tmp_path / "run", "sft", [dict(iteration=4)], ("step_000002", "step_000004"))
    (folder / "checkpoints/state.json").write_text(json.dumps(dict(last="step_000004", best="step_000002")))
    lines = said_of("run", capsys)
    assert "  of lowest val/loss: run/checkpoints/step_000002" in lines
    assert "--model run/checkpoints/step_000002 " in lines[-1]


def test_curves_that_cannot_be_drawn_and_folders_that_are_none_are_one_line(tmp_path, capsys):
    log = [{"iteration": n, "env_steps": n, "train/reward": 0.5} for n in range(3)]
    folder = run_of(tmp_path / "run", "grpo", log)
    (folder / "curve.png").mkdir()
    lines = said_of(folder, capsys, code=1)
    assert sum(line.startswith("  warning: no curve.png: ") for line in lines) == 1
    assert "To go on:" in lines
    assert report_run.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: expected a run folder")


@pytest.mark.slow
@pytest.mark.parametrize("script", ALL)
def test_the_commands_run_as_they_are_printed(script, tmp_path, monkeypatch):
    """Those that start with `python` where that is the one which ran, as it is here."""
    flags = SMALL[script.__name__] | dict(run_dir="Zoë's run")
    if script is sft:
        flags |= dict(model=TINY)
    monkeypatch.chdir(tmp_path)
    with terminal() as wrote:
        assert command_line(f"{script.__name__}.py", *as_words(flags)) == 0
    lines = screen("".join(wrote))
    assert len(commands(lines)) == 3, lines
    environment = os.environ | dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in commands(lines):
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, text=True,
                              capture_output=True)
        assert done.returncode == 0, (command, done.stderr)
