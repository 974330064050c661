"""tools/watch_run.py, on real processes with real children and real folders."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import pytest

from tools import watch_run

CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[{}:]])"
UP = ("import subprocess, sys, time; [" + CHILD.format(9) + " for _ in range({children})]; {more}"
      "print('up', flush=True); time.sleep(600)")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder; the folder of temporary files is tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train_log.jsonl").write_text(json.dumps(dict(meta={})) + "\n")
    return tmp_path / "run"


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
    start("--run-dir", "run", folder=tmp_path)
    start(run, more="log = open(sys.argv[1] + '/train_log.jsonl', 'ab'); ", children=1)
    assert counts(capsys, run) == (3, 3, 0)
    stop(first)
    assert counts(capsys, run) == (2, 1, 0)
    start("--run-dir", run, more=CHILD.format(1) + "; ", children=1)  # a launcher: its worker is no child
    assert counts(capsys, run) == (4, 2, 0)


def test_the_space_of_work_folders_is_measured_and_that_of_others_is_not(run, capsys, tmp_path):
    for name in ("envs-one/deep", "envs-two", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(os.urandom(16 * 2**20))
    (tmp_path / "envs-one" / "link").symlink_to(tmp_path / "other")
    assert watch_run.work_folders()[0] == pytest.approx(32 / 1024, rel=0.02)
    assert "work folders 0.03 GiB" in watch(capsys, run)[1]
    code, line, _ = watch(capsys, run, "--max-space", 1e-3)
    assert code == 1 and "over the limit of 0.001" in line


def test_a_folder_left_behind_is_stale_unless_a_process_is_in_it(run, start, capsys, tmp_path):
    for name, age in (("left", 3700), ("used", 3700), ("new", 30)):
        (tmp_path / f"envs-{name}" / "work").mkdir(parents=True)
        os.utime(tmp_path / f"envs-{name}", (time.time() - age,) * 2)
    process = start(folder=tmp_path / "envs-used" / "work")
    assert counts(capsys, run) == (0, 0, 1)
    assert f"stale 1 ({tmp_path}/envs-left among them)" in watch(capsys, run)[1]
    stop(process)
    assert counts(capsys, run) == (0, 0, 2)


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


def test_bad_input_is_one_line(run, tmp_path, capsys):
    for words, says in (([tmp_path / "none"], "none: expected a run folder, which holds train_log.jsonl"),
                        ([tmp_path], "expected a run"), ([], "RUN"), ([run, "--every", "x"], "--every"),
                        ([run, "--max-processes", 0], "--max-processes")):
        code, out, told = watch(capsys, *words)
        assert (code, out, told.count("\n")) == (2, "", 1) and says in told
