"""Two processes of torchrun and one: the same run, whatever happens to them."""

import dataclasses
import functools
import json
import re
import signal
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.countdown import Countdown
from tests.run_folders import (
    TINY,
    command_line,
    episodes,
    finish,
    free_port,
    killed_after,
    log_lines,
    process,
    ranks,
    records,
    same_numbers,
    sends_itself,
    state_of,
    timeless,
    torchrun_in_turn,
    weights_of,
)
from tools.validate_train_log import validate


class Telling(Countdown):
    """Each reply has a score of its own, so that what is logged of it tells which one was given. The first
    task fails: one of three processes has nothing to learn from then.
    """

    def start(self, task, seed):
        if task.id == self.training_task(0, 1).id:
            raise ConnectionError("no answer")
        episode = super().start(task, seed)
        step = episode.step

        def told(reply):
            score = zlib.crc32(f"{task.id} {reply}".encode()) / 2**32
            return dataclasses.replace(step(reply), reward=np.float32(score), info=dict(correct=score))

        episode.step = told
        return episode


def beside_others(rollouts):
    """A reward that each episode of a task changes."""
    best = max(r.correct for r in rollouts)
    return [0.5 * r.correct + 0.5 * best * number for number, r in enumerate(rollouts)]


# One to three processes. Shares are uneven: of 4 or 5 prompts, rows and environments, and of 7 tasks, which
# are of several sources.
QUICK = {
    "grpo_llm": ("--prompts-per-iteration", 4, "--group-size", 3, "--kl-coef", 0.05,
                 "--aggregation", "sequence", "--reward-fn", f"{__file__}:beside_others"),
    "ppo_llm": ("--prompts-per-iteration", 5, "--minibatches", 1, "--epochs", 3, "--critic-minibatches", 1,
                "--critic-epochs", 1, "--critic-warmup", 0, "--kl-coef", 0.02, "--kl-target", 0.01,
                "--target-kl", 2.1e-4),  # less than the last pass has, more than a process's part of it
    "sft": ("--batch-size", 5, "--microbatch-tokens", 40, "--eval-samples", 8, "--log-every", 1),
    "a2c_vecenv": ("--num-envs", 5, "--num-steps", 6, "--hidden-size", 16, "--update-every", 2, "--chunk", 2,
                   "--eval-episodes", 7, "--eval-envs", 4, "--env-kwargs", "difficulty=3", "max_steps=9",
                   "--learning-rate", 3e-3, "--log-every", 1, "--eval-every", 2),
}
SHARED_OUT = [*((2, script) for script in QUICK), (3, "grpo_llm"), (3, "ppo_llm")]
TASKS = ("--env", f"{__file__}:Telling", "--env-kwargs", "test_tasks=32", "difficulty=true", "--eval-tasks",
         7, "--learning-rate", 1e-4, "--max-response-tokens", 10, "--eval-every", 2)
RL = ("--microbatch-tokens", 300, "--temperature", 2.0, "--eval-temperature", 2.0, "--eval-samples", 2,
      "--log-episodes", 1)


def quick(script, folder):
    """A command line of two iterations."""
    shared = ()
    if script != "a2c_vecenv":
        shared = (*TASKS, "--model", folder.parent / "model", *([] if script == "sft" else RL))
    length = "--steps" if script == "sft" else "--iterations"
    return (f"{script}.py", *QUICK[script], *shared, length, 2, "--run-dir", folder / script,
            "--checkpoint-every", 1, "--keep-checkpoints", 0)


def few(folder):
    """One iteration that may make three steps, of episodes for two: the first of two processes has none."""
    return (*quick("ppo_llm", folder), "--prompts-per-iteration", 3, "--minibatches", 3, "--iterations", 1,
            "--eval-tasks", 1, "--eval-samples", 1, "--target-kl", 0, "--epochs", 1,
            "--run-dir", folder / "few")


def failing(folder):
    """A first evaluation in which each process meets a reward that fails."""
    (folder / "reward.py").write_text("def broken(r):\n    raise FloatingPointError('no reward')\n")
    return (*quick("grpo_llm", folder), "--reward-fn", f"{folder}/reward.py:broken", "--eval-samples", 1,
            "--eval-tasks", 2, "--run-dir", folder / "failing")


@pytest.fixture(scope="module")
def shared_out(request, tmp_path_factory):
    """Number of processes -> a folder with a run of each script that a test names; two go on from what three
    began, or one.
    """
    made, parent = {}, tmp_path_factory.mktemp("shared_out")
    scripts = [script for script in QUICK if any(script in item.name for item in request.session.items)]
    model = AutoModelForCausalLM.from_pretrained(TINY, num_hidden_layers=2)  # whose replies end, or are cut
    model.save_pretrained(parent / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(parent / "model")
    for count in (1, 3, 2):
        made[count] = folder = parent / f"of {count}"
        folder.mkdir()
        of_count = [script for script in scripts if (count, script) in SHARED_OUT or count == 1]
        if count == 2:
            for script in of_count:
                begun_by = 3 if (3, script) in SHARED_OUT else 1
                killed_after(made[begun_by] / script, folder / script, 1)
        lines = [quick(script, folder) for script in of_count]
        if count == 1:
            assert [command_line(*line) for line in lines] == [0] * len(lines)
        else:
            if count == 2 and "ppo_llm" in scripts:
                lines.append(few(folder))
            fails = count == 2 and "grpo_llm" in scripts
            if fails:
                lines.append(failing(folder))
            one, *others = ranks(count, lines, folder, code=int(fails))
            assert len(re.findall(r"^ +2 +\d+ s ", one, re.M)) == len(of_count)
            if fails:  # with one line of each
                assert "(rank 0; receipt: " in one and re.fullmatch(
                    "error: FloatingPointError: no reward \\(rank 1; receipt: .*\n", "".join(others))
            else:
                assert not "".join(others)  # one process speaks
    return made


def same_run(one, other):
    """All numbers but times, and all that checkpoints hold: the order of sums may differ, no more."""
    for mine, yours in zip(timeless(one), timeless(other), strict=True):
        assert list(mine) == list(yours)
        for name in mine.keys() - {"trace_id", "run_id"}:
            if name == "train/padding":  # processes cut their rows into passes of their own
                continue
            if name in ("iteration", "env_steps", "opt_steps", "action_hist") or name.startswith("rollout/"):
                assert mine[name] == yours[name], name
            else:
                assert mine[name] == pytest.approx(yours[name], rel=1e-5, abs=1e-5), (name, mine["iteration"])
    names = sorted(path.name for path in one.glob("checkpoints/step_*"))
    assert names == sorted(path.name for path in other.glob("checkpoints/step_*")) and len(names) == 2
    for name in names:
        (mine, yours) = (folder / "checkpoints" / name for folder in (one, other))
        assert sorted(p.name for p in mine.iterdir()) == sorted(p.name for p in yours.iterdir())
        for left, right in ((weights_of(mine), weights_of(yours)), (state_of(mine), state_of(yours))):
            same_numbers(left, right, name)


@pytest.mark.parametrize(("count", "script"), SHARED_OUT)
def test_one_process_two_and_three_give_the_same_numbers_and_go_on_from_each_other(count, script, shared_out):
    one, other = (shared_out[number] / script for number in (1, count))
    same_run(one, other)
    assert {record["system/processes"] for record in records(other)[-1:]} == {count}
    verdict = validate(other, strict=True)
    assert verdict["ok"] and verdict["resumes"] == (count == 2), verdict
    assert len(list(other.glob("events*"))) == (2 if count == 2 else 1) and not (other / "receipts").exists()


def test_the_kl_that_ends_an_update_of_ppo_llm_is_that_of_all_processes(shared_out):
    """... or they would part where one ends: each of its parts is less than --target-kl."""
    for count, runs in shared_out.items():
        steps = [record["train/policy_steps"] for record in records(runs / "ppo_llm")[1:]]
        assert steps == [3, 2], f"of {count}"


def test_all_processes_of_ppo_llm_make_as_many_steps_as_the_one_with_most_episodes_can(shared_out):
    record = records(shared_out[2] / "few")[-1]
    assert record["rollout/termination/error"] == pytest.approx(1 / 3)
    assert record["train/policy_steps"] == 2


@pytest.mark.parametrize("script", ["grpo_llm", "ppo_llm"])
def test_every_episode_of_all_processes_is_written_once_with_draws_of_its_own(script, shared_out):
    written = [{path.name: episodes(run / script, path.stem) for path in run.glob(f"{script}/episodes/*")}
               for run in shared_out.values()]
    assert written[0].keys() == written[1].keys() == written[2].keys() and len(written[0]) == 4
    for name, (found, summary) in written[0].items():
        for others, other_summary in (written[1][name], written[2][name]):
            assert [e["messages"] for e in others] == [e["messages"] for e in found], name
            assert other_summary["episodes"] == summary["episodes"] == len(found)
            assert other_summary == pytest.approx(summary)


def test_each_process_of_grpo_llm_that_fails_leaves_a_receipt_of_its_own(shared_out):
    folder = shared_out[2] / "failing"
    errors = [line["error"] for line in log_lines(folder) if "error" in line]
    receipts = {error["rank"]: error["receipt"] for error in errors}
    assert receipts.keys() == {0, 1} and len(errors) == 2
    for rank, receipt in receipts.items():
        assert receipt.endswith(f":{rank}")
        assert "FloatingPointError: no reward" in (folder / receipt / "traceback.txt").read_text()


# Slow: torchrun itself, adapters, fewer prompts than processes; kills.

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
LENGTH = dict.fromkeys(CASES, 6)  # steps
OTHERS = [name for name in CASES if "-" in name or name == "few"]  # what no fast test above runs
TWO = ("--standalone", "--nproc_per_node=2")


def words_of(name, folder, *more):
    """A case's command line."""
    script, flags = CASES[name]
    length = "--steps" if script == "sft.py" else "--iterations"
    return (script, *FLAGS[script], *flags, "--run-dir", folder, length, LENGTH[name], "--eval-every", 20,
            "--checkpoint-every", 20, "--keep-checkpoints", 0, *more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """name -> the folder of that run in this one process; each is made once."""
    @functools.cache
    def alone(name):
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp("alone") / "run"
        script, *flags = words_of(name, folder, "--checkpoint-every", 2)
        # As a path, so that what is hashed of the reward has the name that it has under torchrun.
        assert command_line(f"./{script}", *flags) == 0
        return folder
    return alone


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of the same runs in two processes, which torchrun starts once for all of them."""
    folder = tmp_path_factory.mktemp("together")
    torchrun_in_turn(2, [words_of(name, folder / name) for name in OTHERS], folder)
    return folder


def assert_same_run(case, one, other):
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
    assert compared >= 2 * len(records(one)) > 2 * LENGTH[case]
    last = f"checkpoints/step_{LENGTH[case]:06d}/*model.safetensors"
    mine, yours = (load_file(next(folder.glob(last))) for folder in (one, other))
    assert set(mine) == set(yours)
    for name in mine:
        assert mine[name].dtype == yours[name].dtype
        torch.testing.assert_close(mine[name], yours[name], rtol=0, atol=1e-4, msg=name)
    verdict = validate(other, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_two_processes_train_as_one_does(name, alone, together):
    one, two = alone(name), together / name
    assert_same_run(name, one, two)
    assert {record["system/processes"] for record in records(two)} == {2}
    if "lora" in name:
        assert not list(two.glob("checkpoints/*/model.safetensors"))  # the adapter alone


ENDS_BADLY = """
import os, sys
from envs.countdown import Countdown
end = os.abort if "RANK" in os.environ else int  # as a thread of gloo might, when Python takes it apart
sys.last = type("Last", (), {"__del__": lambda self, end=end: end()})()
"""


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_ends_with_0_and_two_hosts_go_on(alone, tmp_path):
    """Between two checkpoints; the last iteration is not lost."""
    folder, env = tmp_path / "run", tmp_path / "env.py"
    env.write_text(ENDS_BADLY)
    words = words_of("sft-lora", folder, "--env", f"{env}:Countdown")
    condition = f"""'"iteration": 2,' in Path({str(folder / "train_log.jsonl")!r}).read_text()"""
    run = process(*words, torchrun=TWO, env=sends_itself(signal.SIGTERM, tmp_path, condition))
    (line,) = re.findall(r"SIGTERM: .*", finish(run))
    last = int(re.search(r"stopped after step (\d+)", line)[1])
    assert f"--run-dir {folder}" in line and 2 <= last < LENGTH["sft-lora"]
    assert json.loads((folder / "checkpoints" / "state.json").read_text())["last"] == f"step_{last:06d}"

    options = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    for run in [process(*words, torchrun=[*options, f"--node_rank={number}"]) for number in (0, 1)]:
        finish(run)
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [last]
    assert_same_run("sft-lora", alone("sft-lora"), folder)
    assert validate(folder)["errors"] == 0


@pytest.mark.slow
def test_two_processes_go_on_where_one_was_killed_and_torchrun_starts_them_again(alone, tmp_path):
    whole = alone("ppo-lora")
    folder = killed_after(whole, tmp_path / "run", 2)
    condition = f"Path({str(folder / 'checkpoints' / 'step_000003')!r}).is_dir()"
    words, options = words_of("ppo-lora", folder, "--checkpoint-every", 1), [*TWO, "--max-restarts=2"]
    finish(process(*words, torchrun=options, env=sends_itself(signal.SIGKILL, tmp_path, condition)))
    first, *others = (line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line)
    assert first == 2 and others and min(others) >= 3
    assert_same_run("ppo-lora", whole, folder)


FAILING = """
import os
import numpy
import torch
calls = []
def reward(rollout):
    calls.append(1)
    if "train" in rollout.task.id:
        print("drew", os.environ["RANK"], torch.rand(()).item(), numpy.random.rand(), flush=True)
    if os.environ.get("RANK") == "1" and len(calls) > 50:
        raise ValueError("the reward of rank 1 broke")
    return sum(step.reward for step in rollout.steps)
"""


@pytest.mark.slow
def test_a_failing_process_ends_all_with_its_message_and_receipt(tmp_path):
    path, message = tmp_path / "failing.py", "ValueError: the reward of rank 1 broke"
    path.write_text(FAILING)
    words = words_of("grpo", tmp_path / "run", "--reward-fn", f"{path}:reward")
    said = finish(process(*words, torchrun=TWO), fails=True)
    assert said.count(message) == 1, said[-5000:]
    (receipt,) = (tmp_path / "run").glob("receipts/*:1/traceback.txt")  # of rank 1
    assert f"\n{message}" in receipt.read_text()
    errors = [row["error"] for row in log_lines(tmp_path / "run") if "error" in row]
    assert message in [f"{error['type']}: {error['message']}" for error in errors if error["rank"] == 1]
    assert validate(tmp_path / "run")["ok"]
    draws = [set(" ".join(re.findall(rf"^drew {rank} (\S+ \S+)$", said, re.M)).split()) for rank in (0, 1)]
    assert all(draws) and not set.intersection(*draws)  # of each rank its own random numbers


@pytest.mark.slow
@pytest.mark.parametrize("script, flag, value, says", [
    ("grpo_llm.py", "--model", "nowhere/at/all", "error: --model nowhere/at/all: it cannot be loaded"),
    ("sft.py", "--train-files", "tests/data/a2c.jsonl", "error: --train-files tests/data/a2c.jsonl, row 1"),
    ("a2c_vecenv.py", "--num-envs", 1, "--num-envs 1, ")])
def test_bad_input_is_one_line_whatever_the_number_of_processes(
        script, flag, value, says, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # none fails before it has met the other
    said = torchrun_in_turn(2, [(script, "--run-dir", tmp_path / "run", flag, value)], tmp_path, code=1)
    assert says in said and f'{script}", line' not in said, said  # no traceback of the script
