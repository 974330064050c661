"""tools/watch_run.py, on real processes with real children and real folders."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import pytest

from tools import watch_run

CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[{}:]])"
UP = ("import subprocess, sys, time; [" + CHILD.format(9) + " for _ in range({children})]; {more}"
      "print('up', flush=True); time.sleep(600)")


@pytest.fixture
def run(tmp_path):
    """A run folder."""
    (tmp_path / "lr=1e-3").mkdir()
    (tmp_path / "lr=1e-3" / "train_log.jsonl").write_text(json.dumps(dict(meta={})) + "\n")
    return tmp_path / "lr=1e-3"


@pytest.fixture
def start():
    """(*words, children, more code, folder) -> a process that has started others. Each is ended."""
    with contextlib.ExitStack() as started:
        def process(*words, children=0, more="", folder=None):
            code = UP.format(children=children, more=more)
            found = subprocess.Popen([sys.executable, "-c", code, *map(str, words)], cwd=folder,
                                     stdout=subprocess.PIPE, start_new_session=True)
            started.callback(stop, found)
            found.stdout.readline()
            while not all(child.cmdline() for child in watch_run.psutil.Process(found.pid).children()):
                time.sleep(0.01)  # Popen returns before the kernel has set the words of what it started
            return found
        yield process


def stop(process):
    if process.returncode is None:
        os.killpg(process.pid, 9)
        process.communicate()


def watch(capsys, *words):
    """-> exit code, standard output, standard error"""
    capsys.readouterr()
    code = watch_run.main([*map(str, words), "--once"])
    return code, *capsys.readouterr()


def counts(capsys, run):
    """Processes, child processes, folders left behind."""
    code, line, _ = watch(capsys, run)
    assert code == 0 and line.count("\n") == 1 and "WARNING" not in line
    names = ("processes", "child processes", "stale")
    return tuple(int(re.search(rf" {name} (\d+)", line)[1]) for name in names)


def test_a_run_is_known_by_its_flag_or_by_its_log(run, start, capsys, tmp_path):
    start("--run-dir", tmp_path / "other", children=3)
    start(run, more="log = open(sys.argv[1] + '/train_log.jsonl'); ")  # a reader, as tail -f is
    assert counts(capsys, run) == (0, 0, 0)
    first = start("--seed", 1, f"--run_dir={run}/", children=2)
    start("--run-dir", run.name, folder=tmp_path)
    start(run, more="log = open(sys.argv[1] + '/train_log.jsonl', 'ab'); ", children=1)
    assert counts(capsys, run) == (3, 3, 0)
    stop(first)
    assert counts(capsys, run) == (2, 1, 0)
    start("--run-dir", run, more=CHILD.format(1) + "; ", children=1)  # a launcher: its worker is no child
    assert counts(capsys, run) == (4, 2, 0)


def test_memory_is_that_of_the_processes_each_counted_once(run, start, capsys):
    """Two that hold 0.1 GiB and three children, of which each holds a little."""
    for _ in range(2):
        found = start("--run-dir", run, children=1, more="held = b'x' * (2**30 // 10); ")
    start("--run-dir", run, children=1)
    _, line, _ = watch(capsys, run)
    held = watch_run.psutil.Process(found.pid).memory_info().rss / 2**30
    own, of_children = map(float, re.findall(r"processes \d+ \(([\d.]+) GiB\)", line))
    assert held > 0.1 and own == pytest.approx(2 * held, abs=0.03) and 0 < of_children < 0.1


def test_what_a_killed_run_leaves_is_measured_and_stale_after_an_hour(run, start, capsys):
    for name, age in (("checkpoints/.step_10.writing", 3700), ("sync/4", 30), ("checkpoints/step_5", 3700)):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_bytes(os.urandom(16 * 2**20))
        os.utime(run / name, (time.time() - age,) * 2)
    code, line, _ = watch(capsys, run, "--max-space", 1e-3)
    assert code == 1 and "temporary 0.03 GiB | stale 1 (" in line and ".step_10.writing among them)" in line
    assert re.search(r"WARNING: temporary 0\.03\d*, over the limit of 0.001", line)
    assert counts(capsys, run) == (0, 0, 1)
    start("--run-dir", run)
    assert counts(capsys, run) == (1, 0, 0)


def test_near_a_limit_it_warns_and_over_it_fails(run, start, capsys):
    start("--run-dir", run, children=3)
    os.utime(run / "train_log.jsonl", (time.time() - 90,) * 2)
    for limit, expected, says in ((4, 0, ""), (3, 0, "WARNING: child processes 3, near the limit of 3"),
                                  (2, 1, "WARNING: child processes 3, over the limit of 2")):
        code, line, _ = watch(capsys, run, "--max-processes", limit)
        assert code == expected and says in line and ("WARNING" in line) is bool(says)
        assert re.search("last log line 9[0-9] s ago", line)


def test_it_goes_on_until_it_is_interrupted(run, start):
    tool = subprocess.Popen([sys.executable, watch_run.__file__, run, "--every", "0.1"], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [tool.stdout.readline()]
    start("--run-dir", run)
    while " processes 1 " not in lines[-1]:
        lines.append(tool.stdout.readline())
        assert lines[-1]
    tool.send_signal(2)
    assert tool.communicate(timeout=60)[1] == "" and tool.returncode == 0 and " processes 0 " in lines[0]


def test_it_waits_as_long_as_it_is_told_between_lines(run, monkeypatch, capsys):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch_run.time, "sleep", sleep)
    assert watch_run.main([str(run), "--every", "7"]) == 0 and waits == [7.0] * 3
    assert capsys.readouterr().out.count("\n") == 3


def test_bad_input_is_one_line(run, tmp_path, capsys):
    for words, says in (([tmp_path / "none"], "none: expected a run folder, which holds train_log.jsonl"),
                        ([tmp_path], "expected a run"), ([], "RUN"), ([run, "--every", "x"], "--every"),
                        ([run, "--max-processes", 0], "--max-processes")):
        code, out, told = watch(capsys, *words)
        assert (code, out, told.count("\n")) == (2, "", 1) and says in told
