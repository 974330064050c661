"""The health monitor of grpo_llm.py and ppo_llm.py: real child processes and real folders."""

import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

import grpo_llm
import ppo_llm
from tests.run_folders import log_lines, records, train
from tools.validate_train_log import validate

GIB = 2**30


class Log:
    """In a Run's place."""

    trace_id = "run:7"

    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


@pytest.fixture(params=[grpo_llm, ppo_llm], ids=["grpo", "ppo"])
def monitor(request, tmp_path, monkeypatch):
    """every -> a monitor that sees tmp_path as the folder of temporary files. Each is ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []

    def make(every=1000.0):
        made.append(request.param.HealthMonitor(Log(), every))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not one.is_alive()


def sleeper(*, children=0, folder=None):
    """A process that has started others."""
    code = ("import subprocess, sys, time; [subprocess.Popen([sys.executable, '-c', 'import time; "
            f"time.sleep(600)']) for _ in range({children})]; print('up', flush=True); time.sleep(600)")
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=folder,
                           start_new_session=True)
    run.stdout.readline()
    return run


def stop(run):
    os.killpg(run.pid, 9)
    run.communicate()


def age(folder, seconds):
    os.utime(folder, (time.time() - seconds,) * 2)


def test_children_and_their_children_are_counted(monitor):
    before = monitor().latest["system/child_processes"]
    run = sleeper(children=2)
    try:
        assert monitor().latest["system/child_processes"] == before + 3
    finally:
        stop(run)
    assert monitor().latest["system/child_processes"] == before


def test_the_space_of_our_folders_is_measured_and_that_of_others_is_not(monitor, tmp_path):
    assert monitor().latest["system/temporary_space"] == 0
    for name in ("envs-one/deep", "envs-two", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(os.urandom(2**20))
    (tmp_path / "envs-one" / "link").symlink_to(tmp_path / "other")
    assert monitor().latest["system/temporary_space"] == pytest.approx(2 * 2**20 / GIB, rel=0.02)


def test_a_folder_left_behind_is_stale_unless_a_process_is_in_it(monitor, tmp_path, capsys):
    folders = [tmp_path / f"envs-{name}" for name in ("left", "used", "new")]
    for folder in folders:
        (folder / "work").mkdir(parents=True)
        age(folder, 30 if folder.name == "envs-new" else 3700)
    run = sleeper(folder=folders[1] / "work")
    try:
        one = monitor()
        assert one.latest["system/stale_folders"] == 1
        said = capsys.readouterr().err
        assert said.count("health:") == 1 and "envs-left" in said
        one.look()
        assert not capsys.readouterr().err  # told once
    finally:
        stop(run)
    assert monitor().latest["system/stale_folders"] == 2


def test_near_a_limit_it_warns_and_over_it_an_error_is_logged_once(monitor, monkeypatch, capsys):
    one = monitor()
    counts = iter([200, 210, 257, 300, 100, 250])
    monkeypatch.setattr(one, "measure", lambda: {"system/child_processes": next(counts),
                                                 "system/temporary_space": 40.5, "system/stale_folders": 0})
    told = []
    for _ in range(6):
        one.look()
        told.append([line for line in capsys.readouterr().err.splitlines() if "health:" in line])
    assert [len(lines) for lines in told] == [1, 1, 1, 0, 0, 1]
    assert "temporary_space is 40.5, near the limit of 50" in told[0][0]
    assert "near" in told[1][0] and "over" in told[2][0] and "near" in told[5][0]
    (line,) = one.log.lines
    assert line["trace_id"] == "run:7" and line["error"]["type"] == "HealthError"
    assert "child_processes is 257" in line["error"]["message"] and line["error"]["receipt"] is None


def test_it_looks_again_and_again_and_survives_what_goes_wrong(monitor, monkeypatch, capsys):
    one, looks, failed = monitor(0.01), [], threading.Event()

    def measure():
        looks.append(0)
        if len(looks) == 3:
            failed.set()
            raise OSError("no more files")
        return {"system/child_processes": len(looks), "system/temporary_space": 0, "system/stale_folders": 0}

    monkeypatch.setattr(one, "measure", measure)
    deadline = time.monotonic() + 20
    while len(looks) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert failed.is_set() and one.latest["system/child_processes"] > 3
    assert "no more files" in capsys.readouterr().err


def test_it_can_be_turned_off(monitor):
    one = monitor(0)
    assert not one.is_alive() and one.latest == {}


@pytest.mark.parametrize("script", [pytest.param(grpo_llm, marks=pytest.mark.slow), ppo_llm])
def test_a_run_logs_its_health_and_goes_on_over_a_limit(script, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(script.HealthMonitor.LIMITS, "system/child_processes", 0)
    run = sleeper()
    try:
        folder = train(script, tmp_path / "run", health_every=0.05, iterations=2, eval_every=0, eval_tasks=2)
    finally:
        stop(run)
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and (verdict["records"], verdict["errors"]) == (3, 1), verdict
    (error,) = [line["error"] for line in log_lines(folder) if "error" in line]
    assert error["type"] == "HealthError"
    for record in records(folder):
        assert record["system/child_processes"] >= 1 and record["system/stale_folders"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "health"]
