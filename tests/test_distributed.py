"""Two processes of torchrun and one: the same run, whatever happens to them.

Real processes with gloo. a2c_vecenv.py has tests/test_a2c_distributed.py.
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from run_folders import ROOT, TINY, command_line, episodes, log_lines, records
from safetensors.torch import load_file

from tools.validate_train_log import validate

pytestmark = pytest.mark.slow

# Shares that are uneven: 5 prompts, 13 rows, 7 tasks. Passes of few tokens, so that processes differ in their
# number. Each iteration is one step, since minibatches are cut within a process; and learning is slow: where
# rounding tips a token, which becomes likelier with each, two runs part.
FLAGS = {
    "grpo_llm.py": ("--prompts-per-iteration", 5, "--group-size", 6, "--eval-tasks", 7, "--eval-samples", 1,
                    "--epochs", 2, "--microbatch-tokens", 96, "--learning-rate", 1e-4, "--log-episodes", 1),
    "ppo_llm.py": ("--prompts-per-iteration", 13, "--eval-tasks", 7, "--eval-samples", 1, "--epochs", 2,
                   "--minibatches", 1, "--critic-minibatches", 1, "--critic-epochs", 2, "--critic-warmup", 1,
                   "--microbatch-tokens", 96, "--kl-coef", 0.02, "--learning-rate", 1e-4),
    "sft.py": ("--batch-size", 13, "--eval-tasks", 11, "--eval-samples", 2, "--microbatch-tokens", 128,
               "--log-every", 1, "--model", TINY, "--dtype", "float32", "--learning-rate", 1e-3),
}
LORA = ("--lora-rank", 4, "--learning-rate", 3e-5)
CASES = {
    "grpo": ("grpo_llm.py", ("--kl-coef", 0.05)), "ppo": ("ppo_llm.py", ()), "sft": ("sft.py", ()),
    "grpo-lora": ("grpo_llm.py", (*LORA, "--env", "tests/two_turn.py:TwoTurn", "--max-response-tokens", 24)),
    "ppo-lora": ("ppo_llm.py", LORA), "sft-lora": ("sft.py", LORA),
    # Fewer prompts and tasks than processes: some get none.
    "few": ("grpo_llm.py", ("--prompts-per-iteration", 1, "--eval-tasks", 1, "--dynamic-sampling", 2,
                             "--learning-rate", 3e-5)),
    "ppo-few": ("ppo_llm.py", ("--prompts-per-iteration", 1, "--group-size", 8, "--eval-tasks", 1,
                               "--critic", "shared", "--learning-rate", 3e-5)),
    "sft-few": ("sft.py", ("--batch-size", 1, "--eval-tasks", 1, "--packing")),
}
LONG = 20  # steps
DRIVER = """
import json, os, runpy, sys
for number, (script, words) in enumerate(json.loads(open(sys.argv[1]).read())):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each run has keys of its own in the store
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
"""


def environment():
    return os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                             PYTHONPATH=str(ROOT))


def words_of(name, folder, *more, every=2):
    """The script of a case and its command line."""
    script, flags = CASES[name]
    own = ("--output-dir", f"{folder}-model", "--steps") if script == "sft.py" else ("--iterations",)
    return [script, [str(x) for x in (*FLAGS[script], *flags, "--run-dir", folder, *own, LONG, "--eval-every",
                                      LONG, "--checkpoint-every", every, "--keep-checkpoints", 0, *more)]]


def start(words, count, *torchrun):
    many = (["-m", "torch.distributed.run", *(torchrun or ["--standalone"]), f"--nproc_per_node={count}"]
            if count > 1 or torchrun else [])
    script, flags = words
    return subprocess.Popen([sys.executable, *many, str(ROOT / script), *flags], cwd=ROOT, env=environment(),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(words, count, *torchrun, check=True):
    started = start(words, count, *torchrun)
    said, _ = started.communicate(timeout=300)
    assert not check or started.returncode == 0, said[-5000:]
    return started.returncode, said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """name -> the folder of that run in this one process; each is made once."""
    @functools.cache
    def alone(name):
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp("alone") / "run"
        script, words = words_of(name, folder)
        assert command_line(script, *words) == 0
        return folder
    return alone


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of the same runs in two processes, which torchrun starts once for all of them."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "driver.py").write_text(DRIVER)
    (folder / "plan.json").write_text(json.dumps([words_of(name, folder / name) for name in CASES]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(folder / "driver.py"), str(folder / "plan.json")], capture_output=True, text=True,
        cwd=ROOT, env=environment(), timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def assert_same_run(one, other):
    """Losses and gradients of every step to 1e-5 (relative, where they are over 1), weights to 1e-4."""
    same, compared = ("val/", "train/reward", "critic/", "mismatch/kl", "rollout/"), 0
    for mine, yours in zip(records(one), records(other), strict=True):
        assert list(mine) == list(yours) and mine["iteration"] == yours["iteration"]
        for name in mine:
            # ... ties, which rounding decides; a quotient whose parts may be nearly 0.
            loose = name in ("rollout/throughput", "critic/vf_clipfrac", "critic/vf_explained_var")
            if not loose and ("loss" in name or name.endswith("grad_norm") or name.startswith(same)):
                tolerance = 1e-5 * max(1.0, abs(mine[name]))
                assert mine[name] == pytest.approx(yours[name], abs=tolerance), (name, mine["iteration"])
                compared += 1
    assert compared >= 2 * len(records(one)) > 2 * LONG
    mine, yours = (load_file(next((folder / "checkpoints" / f"step_{LONG:06d}").glob("*model.safetensors")))
                   for folder in (one, other))
    assert set(mine) == set(yours)
    for name in mine:
        assert mine[name].dtype == yours[name].dtype
        torch.testing.assert_close(mine[name], yours[name], rtol=0, atol=1e-4, msg=name)
    verdict = validate(other, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_does(name, alone, together):
    one, two = alone(name), together / name
    assert_same_run(one, two)
    assert {record["system/processes"] for record in records(two)} == {2}
    if "lora" in name:
        assert not list(two.glob("checkpoints/*/model.safetensors"))  # the adapter alone
    if name == "grpo":  # of both processes, in order
        for step in ("train_step_000001", "val_step_000000"):
            (played, summary), (expected, other) = (episodes(folder, step) for folder in (two, one))
            assert [e["messages"] for e in played] == [e["messages"] for e in expected]
            assert summary == other and summary["logged"] == len(played)


def trainers_of(started):
    """The processes that train, by rank."""
    found = [p for p in psutil.Process(started.pid).children() if "RANK" in p.environ()]
    return sorted(found, key=lambda p: int(p.environ()["RANK"])) or [psutil.Process(started.pid)]


def wait_for(condition, started):
    while not condition():
        assert started.poll() is None, started.communicate()[0][-5000:]
        time.sleep(0.005)


def has_record(folder, iteration):
    return (folder / "train_log.jsonl").exists() and any(r["iteration"] >= iteration for r in records(folder))


def two_agents(words):
    """A torchrun as on each of two hosts, with a process each. -> what they said"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [start(words, 1, "--nnodes=2", f"--node_rank={number}", "--master_addr=127.0.0.1",
                     f"--master_port={port}") for number in (0, 1)]
    said = [one.communicate(timeout=300)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], said[0][-5000:]


@pytest.mark.parametrize("name, before, after", [("ppo-lora", 1, 2), ("sft", 2, "two hosts")])
def test_sigterm_saves_and_ends_with_0_and_any_number_goes_on(name, before, after, alone, tmp_path):
    """One of the processes gets it, between two checkpoints; the last iteration is not lost."""
    folder = tmp_path / "run"
    words = words_of(name, folder, every=LONG)
    started = start(words, before)
    wait_for(lambda: has_record(folder, 2), started)
    trainers_of(started)[-1].terminate()
    said, _ = started.communicate(timeout=300)
    assert started.returncode == 0, said[-3000:]
    (line,) = re.findall(r"SIGTERM: .*", said)
    last = int(re.search(r"after (?:iteration|step) (\d+), which is saved", line)[1])
    assert f"--run-dir {folder}" in line and 2 <= last < LONG
    assert json.loads((folder / "checkpoints" / "state.json").read_text())["last"] == f"step_{last:06d}"
    two_agents(words) if after == "two hosts" else run(words, after)
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert mark["iteration"] == last
    assert_same_run(alone(name), folder)
    assert validate(folder)["errors"] == 0


def test_torchrun_starts_again_after_the_kill_of_a_process(alone, tmp_path):
    folder = tmp_path / "run"
    started = start(words_of("grpo-lora", folder), 2, "--standalone", "--max-restarts=2")
    wait_for(lambda: any(folder.glob("checkpoints/step_*")), started)
    trainers_of(started)[1].kill()
    said, _ = started.communicate(timeout=600)
    assert started.returncode == 0, said[-5000:]
    assert [line for line in log_lines(folder) if "resume" in line]
    assert_same_run(alone("grpo-lora"), folder)


FAILING = """
import os
import torch
calls = []
def reward(rollout):
    calls.append(1)
    if "train" in rollout.task.id:
        print("drew", os.environ["RANK"], torch.rand(()).item(), flush=True)
    if os.environ.get("RANK") == "1" and len(calls) > 50:
        raise ValueError("the reward of rank 1 broke")
    return sum(step.reward for step in rollout.steps)
"""


def test_a_failing_process_ends_all_with_its_message_and_receipt(tmp_path):
    path, message = tmp_path / "failing.py", "ValueError: the reward of rank 1 broke"
    path.write_text(FAILING)
    code, said = run(words_of("grpo", tmp_path / "run", "--reward-fn", f"{path}:reward"), 2, check=False)
    assert code != 0 and said.count(message) == 1, said[-5000:]
    (receipt,) = (tmp_path / "run").glob("receipts/*:1/receipt.json")
    receipt = json.loads(receipt.read_text())
    assert receipt["rank"] == 1 and f"{receipt['type']}: {receipt['message']}".startswith(message)
    errors = [row["error"] for row in log_lines(tmp_path / "run") if "error" in row]
    assert receipt["message"] in [error["message"] for error in errors] and validate(tmp_path / "run")["ok"]
    draws = [set(re.findall(rf"^drew {rank} (\S+)$", said, re.M)) for rank in (0, 1)]
    assert all(draws) and not set.intersection(*draws)  # of each rank its own random numbers


def test_bad_input_is_one_line_whatever_the_number_of_processes(tmp_path):
    words = ["grpo_llm.py", ["--run-dir", str(tmp_path / "run"), "--model", "nowhere/at/all"]]
    code, said = run(words, 2, check=False)
    assert code != 0 and "error: --model nowhere/at/all: it cannot be loaded" in said
    assert "grpo_llm.py\", line" not in said  # no traceback of the script
