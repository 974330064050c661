"""What ppo_llm.py learns from an episode: rewards at turns, masks, failed environments, sub-agents."""

import statistics

import pytest

import envs
import ppo_llm
from envs import Step, Task
from tests.run_folders import episodes, train
from tests.test_rollout import PROBLEMS, World, over

SMALL = dict(iterations=1, prompts_per_iteration=18, minibatches=1, eval_tasks=1, eval_samples=1,
             log_episodes=1.0, critic="none", gae_lambda=1.0)


def chosen(segments, name):
    """The numbers that stand at the policy's tokens."""
    return [x for s in segments for x, m in zip(s[name], s["response_mask"], strict=True) if m]


def check_whitened(learned):
    """The segments' advantages are 0 at the environment's tokens, whitened over all others."""
    for s in learned:
        assert not any(x for name in ("rewards", "returns", "advantages")
                       for x, m in zip(s[name], s["response_mask"], strict=True) if not m)
    advantages, returns = (chosen(learned, name) for name in ("advantages", "returns"))
    mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
    assert advantages == pytest.approx([(x - mean) / deviation for x in returns], abs=1e-6)


def test_a_single_reward_is_that_of_the_last_turn_even_if_it_was_cut(tmp_path):
    """Up to five turns in one or more segments. That of each turn is in test_runs.py."""
    code = tmp_path / "custom.py"
    code.write_text("""
from tests.two_turn import TwoTurn
class Five(TwoTurn):
    replies = 5
def number(r): return 0.5 - len(r.turns)
""")
    folder = train(ppo_llm, tmp_path / "run", **SMALL, env=f"{code}:Five", reward_fn=f"{code}:number",
                   max_context_tokens=64)
    played, summary = episodes(folder, "train_step_000001")
    for episode in played:
        turns, segments = episode["turns"], episode["segments"]
        reward, count = 0.5 - len(turns), sum(turn["end"] - turn["start"] for turn in turns)
        assert chosen(segments, "rewards") == [0.0] * (count - 1) + [reward] and episode["reward"] == reward
        assert chosen(segments, "returns") == [reward] * count
    assert any(len(episode["segments"]) > 1 for episode in played)
    assert {"done", "length"} <= {episode["termination"] for episode in played}
    assert summary["reward_sum"] == pytest.approx(sum(episode["reward"] for episode in played))


PROBLEM = [{"role": "user", "content": PROBLEMS[3]}]


class Parents(World):
    """Each task calls two sub-agents, the second of which fails; so does every third task, after them."""

    def __init__(self):
        super().__init__(self.behave)

    def task(self, split, index):
        return Task(f"t{index}", "world", PROBLEM, {})

    def behave(self, episode, reply):
        name, _, child = episode.task.id.partition("/")
        if isinstance(reply, list):
            return over(int(name[1:]) % 7 / 8) if int(name[1:]) % 3 else 1 / 0
        if child:
            return over(9.0) if child == "0" else 1 / 0
        tasks = [Task(f"{name}/{n}", "world", PROBLEM, {}) for n in range(2)]
        return Step([], 0.0, False, False, {}, tuple((task, self.start(task)) for task in tasks))


@pytest.mark.parametrize("told", [False, True])
def test_failed_environments_teach_nothing_and_sub_agents_what_their_parent_earns_if_told_to(
        monkeypatch, tmp_path, capsys, told):
    monkeypatch.setattr(envs, "make", lambda name, **options: Parents())
    folder = train(ppo_llm, tmp_path / "run", **SMALL, train_sub_agents=told)
    played, _ = episodes(folder, "train_step_000001")
    learned, ends = [], set()
    for episode in played:
        for member in (episode, *episode["sub_agents"]):
            teaches = "error" not in (episode["termination"], member["termination"])
            ends.add((member is episode, episode["termination"], member["termination"]))
            for segment in member["segments"]:
                if teaches and (told or member is episode):
                    learned.append(segment)
                    assert chosen([segment], "returns") == [episode["reward"]] * sum(segment["response_mask"])
                else:
                    assert segment["advantages"] is segment["returns"] is segment["old_logprobs"] is None
    check_whitened(learned)
    assert {(True, "done", "done"), (True, "error", "error"), (False, "done", "done"),
            (False, "done", "error"), (False, "error", "done")} <= ends

