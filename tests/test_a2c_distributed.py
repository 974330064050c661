"""a2c_vecenv.py under torchrun: 1, 2 and 3 processes give the same run, and continue each other's."""

import re

import make_rom
import pytest
import torch

import a2c_vecenv as a2c
from envs.pixels import RecordEpisodeStatistics, join_states, make_vec
from envs.pixels.game_boy import Config, goal_meta, record_frames
from envs.pixels.goals import save_goal
from tests.run_folders import (
    command_line,
    finish,
    killed_after,
    log_lines,
    process,
    ranks_of,
    records,
    same_tree,
    slow_but,
    state_of,
    timeless,
    torchrun_in_turn,
    wait_for,
    weights_of,
)
from tools.validate_train_log import validate

torch.set_num_threads(1)

# Environments: a row does the same whichever process holds it


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """Options of a Game Boy of our own, whose goal is two steps to the right."""
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.gb").write_bytes(make_rom.rom())
    config = Config(rom=str(folder / "game.gb"), tau=0.001, k_consecutive=2)
    save_goal(folder / "goal", record_frames(config, ["RIGHT", "RIGHT", "NOOP"]), **goal_meta(config))
    return dict(rom=config.rom, tau=0.001, k_consecutive=2, goal_dir=str(folder / "goal"), workers=1)


KINDS = {
    "pixel-goal": ("pixel-goal", dict(max_steps=9, stack_k=2, num_goals=2, goal_in_obs=True), 40),
    "CartPole": ("CartPole-v1", {}, 100),
    "Acrobot": ("Acrobot-v1", dict(max_episode_steps=17), 80),
    "pyboy": ("pyboy", dict(max_steps=7), 28),  # saved while all emulators have yet to be set back
}


@pytest.mark.parametrize("kind", slow_but(("pixel-goal", "CartPole"), KINDS))
def test_rows_of_a_split_are_those_of_the_whole(kind, request):
    """From the seeds, and from a state that another split has saved."""
    env_id, options, steps = KINDS[kind]
    if kind == "pyboy":
        options = options | request.getfixturevalue("game")
    actions = torch.randint(0, 840, (steps, 7), generator=torch.Generator().manual_seed(5))

    def play(sizes, state=None, first=0, last=steps):
        """The steps first to last, in environments of so many rows. -> what came out, the state at the end"""
        ends = [sum(sizes[:part + 1]) for part in range(len(sizes))]
        parts = [(range(end - size, end), RecordEpisodeStatistics(make_vec(env_id, size, **options),
                                                                  others=(end - size, 7 - end)))
                 for size, end in zip(sizes, ends, strict=True)]
        seen = [[(env.reset(11) if state is None else env.load_state_dict(state)).clone()
                 for _, env in parts]]
        for step in range(first, last):
            results = [env.step(actions[step, rows.start:rows.stop] % env.num_actions) for rows, env in parts]
            for values in zip(*(result[:4] for result in results), strict=True):
                seen.append([value.clone() for value in values])
            infos = [result[4] for result in results]
            for name in ("reset_mask", "final_obs", "dist", "episode_return", "episode_length"):
                seen.append([info[name].clone() for info in infos])
        states = [env.state_dict() for _, env in parts]
        for _, env in parts:
            env.close()
        return [torch.cat(values) for values in seen], join_states(states)

    whole, end = play([7])
    resets = sum(int(mask.sum()) for mask in whole[5::9])
    assert resets >= 20  # the test has seen what it is about
    rounding = 1e-5 if kind == "CartPole" else 0.0  # it computes several rows in one instruction
    begun, middle = play([2, 2, 3], last=steps // 2)
    rest, end_of_rest = play([1, 6], middle, first=steps // 2)
    same_tree(whole, begun + rest[1:], rounding)
    if kind != "Acrobot":  # whose spaces have generators that nothing seeds and nothing draws from
        same_tree(end, end_of_rest, rounding)


@pytest.mark.parametrize("kind", slow_but(("pixel-goal", "CartPole"), list(KINDS)[:3]))
def test_no_two_rows_have_the_same_episodes_nor_have_neighbouring_seeds_or_evaluations(kind):
    """What 8 rows see in several episodes: of three seeds, in training, begun anew later, in evaluation."""
    env_id, options, _ = KINDS[kind]
    env = RecordEpisodeStatistics(make_vec(env_id, 8, **options))
    begun = [(seed, *more) for seed in (1, 2, 3) for more in ((), ("train", 1), ("train", 2**32), ("eval",))]
    seen = []
    for seed in begun:
        frames = [env.reset(*seed).clone()]
        frames += [env.step(torch.full((8,), step % env.num_actions))[0].clone() for step in range(40)]
        seen += [row.numpy().tobytes() for row in torch.stack(frames, 1)]
    assert len({*seen}) == len(seen) == 8 * len(begun)


def test_a_row_draws_the_same_action_whoever_holds_it():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))

    def drawn(first, last):
        torch.manual_seed(3)
        return [a2c.choose_actions(logits[first:last], others=(first, 7 - last)) for _ in range(50)]

    everyone = torch.stack(drawn(0, 7))
    parts = [torch.stack(drawn(*part)) for part in ((0, 2), (2, 3), (3, 7))]
    assert torch.equal(torch.cat(parts, 1), everyone)
    torch.manual_seed(3)
    assert torch.equal(a2c.choose_actions(logits), everyone[0])


# Whole runs

TWO = ("--standalone", "--nproc_per_node=2")
FLAGS = ["--iterations", 20, "--num-envs", 7, "--num-steps", 8, "--hidden-size", 32, "--log-every", 2,
         "--eval-every", 10, "--eval-episodes", 11, "--eval-envs", 5, "--checkpoint-every", 2,
         "--keep-checkpoints", 0]
CASES = {
    "pixel-goal": ["--env-kwargs", "difficulty=3", "max_steps=20"],
    "CartPole": ["--env-id", "CartPole-v1", "--num-steps", 16, "--learning-rate", 0.003],
}


def words(case, folder, *more):
    return "a2c_vecenv.py", *FLAGS, *CASES[case], "--run-dir", folder, *more


NO_THREADS = """
import contextlib, pathlib, runpy
from run_folders import until
runpy.run_path("a2c_vecenv.py", run_name="__main__")
def names():
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield task.read_text()
until(lambda: not any("gloo" in name for name in names()))  # one that was joined is seen a moment longer
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs: of one process; of several; and those that other numbers of them continued."""
    folder = tmp_path_factory.mktemp("runs")
    assert command_line(*words("CartPole", folder / "CartPole")) == 0
    (folder / "end.py").write_text(NO_THREADS)  # that let go of a tensor while Python ends, and abort it
    said = torchrun_in_turn(2, [
        words("CartPole", folder / "CartPole of 2"),
        (folder / "end.py", *words("CartPole", "", "--experiment", folder / "mine")[1:])], folder)
    lines = re.findall(r"^ +20 +\d+ s ", said, re.M)
    assert said.count("environments x") == len(lines) == 2  # one process speaks

    for before, after in (("CartPole", "CartPole by 3"), ("CartPole of 2", "CartPole by 1")):
        killed_after(folder / before, folder / after, 10)
    said = torchrun_in_turn(3, [words("CartPole", folder / "CartPole by 3")], folder)
    assert said.count("From iteration 11 on") == 1
    assert command_line(*words("CartPole", folder / "CartPole by 1")) == 0
    return folder


def same_run(one, other):
    """Up to the order of sums: gradients and metrics within 1e-5, weights within 1e-4."""
    for left, right in zip(timeless(one), timeless(other), strict=True):
        for name in ("trace_id", "iteration", "env_steps", "opt_steps", "action_hist"):
            assert left.pop(name) == right.pop(name), name
        assert left == pytest.approx(right, rel=1e-5, abs=1e-5), left
    steps = sorted(path.name for path in (one / "checkpoints").glob("step_*"))
    assert steps == sorted(path.name for path in (other / "checkpoints").glob("step_*")) and len(steps) == 10
    for step in steps:
        left, right = (state_of(folder / "checkpoints" / step) for folder in (one, other))
        for name in ("iteration", "env_steps", "opt_steps"):
            assert left[name] == right[name]
        same_tree(left["agent"], right["agent"], 1e-4)
        moments = [[weight["exp_avg"] for weight in end["optimizer"]["state"].values()]
                   for end in (left, right)]
        same_tree(*moments, 1e-5)  # of the clipped gradients
        same_tree(left["env"], right["env"], 1e-5)


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(runs):
    """A longer run than those of test_distributed.py, of vectors."""
    alone, together = runs / "CartPole", runs / "CartPole of 2"
    same_run(alone, together)
    last = records(alone)[-1]
    assert last["opt_steps"] == 20
    assert any(record["reset_rate"] > 0 for record in records(alone)) and "eval/return" in last
    verdict = validate(together, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    assert len(list(together.glob("events*"))) == 1 and not (together / "receipts").exists()
    (named,) = (runs / "mine").iterdir()  # the processes agree on the name
    assert {record["run_id"] for record in records(named)} == {named.name}
    with pytest.raises(AssertionError):  # there was something to learn alike
        same_tree(*(weights_of(alone / "checkpoints" / f"step_0000{n}") for n in ("02", "20")), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [("CartPole of 2", "CartPole by 1"), ("CartPole", "CartPole by 3")])
def test_another_number_of_processes_continues_the_run(before, after, runs):
    """Killed after the checkpoint of iteration 10, with records past it in the log."""
    whole, folder = runs / before, runs / after
    same_run(whole, folder)
    assert [line["resume"]["iteration"] for line in log_lines(folder) if "resume" in line] == [10]
    assert validate(folder, strict=True)["ok"]
    assert timeless(folder)[:5] == timeless(whole)[:5]  # what was there stays, to the bit


@pytest.mark.slow
def test_sigterm_to_one_process_saves_at_the_next_record(tmp_path):
    folder = tmp_path / "run"
    endless = "--iterations", 9999, "--checkpoint-every", 9999
    run = process(*words("pixel-goal", folder, *endless), torchrun=TWO)
    log = folder / "train_log.jsonl"
    wait_for(lambda: log.exists() and '"iteration": ' in log.read_text(), run)
    ranks_of(run)[1].terminate()
    assert finish(run).count("SIGTERM: stopped after iteration") == 1
    (path,) = (folder / "checkpoints").glob("step_*")
    assert 2 <= int(path.name[5:]) < 9999
