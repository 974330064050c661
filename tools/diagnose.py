"""Look in a run's log and episodes for the symptoms of docs/symptoms.md.

    python tools/diagnose.py runs/grpo/RUN
    python tools/diagnose.py runs/grpo/RUN --json
    python tools/diagnose.py runs/grpo/RUN --like runs/grpo/OTHER    # where do the two differ?

A line for each symptom: what was seen, with figures, and where the page speaks of it. The exit status is 0
without a symptom, 1 with some, 2 where there is no log that can be read. It sees what the curves tell; a run
without a symptom may still be wrong.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import runs
from tools.command_line import Parser, ends_in_one_line
from tools.validate_train_log import COUNTERS, PASS_AT, is_number
from tools.view_episodes import DAMAGE
from tools.watch_run import run_processes

PAGE = "docs/symptoms.md"
WINDOW = 10  # records that a mean at the start or the end is of; of a short run a third of them
FEWEST = 6  # records of training from which curves are judged


# What is read


@dataclasses.dataclass
class Run:
    """A run's log: its meta line, records in order, errors and resumes."""

    folder: Path
    meta: dict
    records: list[dict]  # of training
    evaluations: list[dict]  # records with val/ keys
    errors: list[dict]
    resumes: list[dict]

    @property
    def args(self) -> dict:
        return self.meta["args"]

    @property
    def last_iteration(self) -> int:
        return max((int(record["iteration"]) for record in self.records + self.evaluations), default=0)

    @property
    def planned(self) -> int | None:
        """Iterations of the whole run; None where the log does not say."""
        number = self.args.get("steps") or self.args.get("iterations")
        if not is_number(number) or number < self.last_iteration:  # a run may be extended
            return None
        return int(number)

    def values(self, key: str, records: list[dict] | None = None) -> list[float]:
        """A metric's numbers, in order, of the records that have it."""
        found = self.records if records is None else records
        return [float(record[key]) for record in found if is_number(record.get(key))]

    def ends(self, key: str) -> tuple[float, float] | None:
        """Its means over the first and the last records; None where there are too few."""
        values = self.values(key)
        if len(values) < FEWEST:
            return None
        size = min(WINDOW, len(values) // 3)
        return statistics.fmean(values[:size]), statistics.fmean(values[-size:])

    def recent(self, key: str) -> float | None:
        """The mean of its last three values: what an update measures may be there in few records."""
        values = self.values(key)
        return statistics.fmean(values[-3:]) if len(values) >= 3 else None

    def accuracies(self, name: str) -> dict[str, list[float]]:
        """{source: its numbers at all evaluations}; name: pass@1, greedy, or pass@n, the largest n > 1."""
        found = collections.defaultdict(list)
        for record in self.evaluations:
            for key in record:
                pass_at = PASS_AT.fullmatch(key)
                if name == "greedy" and key.startswith("val/") and key.endswith("/greedy"):
                    source = key[4:-7]
                elif name == "pass@1" and pass_at and pass_at[2] == "1":
                    source = pass_at[1]
                elif name == "pass@n" and pass_at and pass_at[2] != "1":
                    source = pass_at[1]
                else:
                    continue
                if is_number(record[key]):
                    found[source].append(float(record[key]))
        return found


def read(folder: Path) -> Run:
    """Raises BadInput, naming the line, for what is no log."""
    log = runs.read(folder)
    records = [line for line in log.records if all(is_number(line.get(name)) for name in COUNTERS)
               and "wall_time_s" in line]
    trained = [r for r in records if "train/reward" in r or "train/loss" in r or "reward_mean" in r]
    evaluations = [r for r in records if any(key.startswith("val/") for key in r)]
    return Run(log.folder, log.meta, trained, evaluations, log.errors, log.resumes)


class Reply(NamedTuple):
    """The end of an episode."""

    task: str
    text: str
    is_right: bool
    reward: float
    termination: str


def replies_of(path: Path) -> list[Reply]:
    """The last replies in a file of episodes; damaged lines are left out."""
    found = []
    with contextlib.suppress(OSError):
        for episode in runs.objects(path, damaged=[]):
            with contextlib.suppress(*DAMAGE):
                said = [m.get("content") for m in episode["messages"] if m.get("role") == "assistant"]
                reward = episode.get("reward")
                found.append(Reply(clean(episode["task_id"]), clean(said[-1] if said else ""),
                                   episode["correct"] == 1, reward if is_number(reward) else 0.0,
                                   clean(episode.get("termination"))))
    return found


def clean(text: str) -> str:
    """One line without what could change a terminal's state: it may be a model's."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))


def show(number: float) -> str:
    return f"{number:.3g}"


def rate(run: Run) -> str:
    return f"--learning-rate {clean(run.args.get('learning_rate'))}"


# The symptoms. Each function takes a Run and returns what it saw, a line, or None. Thresholds stand beside
# the function that reads them, each with the healthy figure that it was set against.

SAME = 1e-9  # rewards that differ by less are equal, as in the scripts
IDLE = 3  # iterations, the first or the last, in which no rewards differ: then the scripts name this program
SHARE_SAME = 0.9  # of the iterations; the default run ends with 5 of 64 groups that differ, so with none idle


def reward_stays(run: Run) -> str | None:
    """All rewards are equal, from the beginning on or by now: no advantage, nothing to learn."""
    needed = ("train/reward", "critic/score/max", "critic/score/min")
    trained = [record for record in run.records if all(is_number(record.get(name)) for name in needed)]
    same = [not differ(record) or record.get("rollout/groups_trainable") == 0 for record in trained]
    if len(same) < IDLE:
        return first_evaluation_is_even(run) if all(same) else None
    stays = all(same[:IDLE]) and sum(same) >= SHARE_SAME * len(same)
    has_come = all(same[-IDLE:]) and not reward_falls(run)
    if not stays and not has_come:
        return None
    last = trained[-1]
    facts = dict(right=last.get("train/pass@1"), cut=last.get("response_length/clip_ratio"),
                 form=form_of(last, "train"), failed=last.get("rollout/termination/error"))
    return (f"rewards do not differ in {sum(same)} of {len(same)} iterations (mean "
            f"{show(last['train/reward'])}): {why_rewards_are_equal(run, facts, differ(last))}")


def differ(record: dict) -> bool:
    return record["critic/score/max"] - record["critic/score/min"] > SAME


def form_of(record: dict, kind: str) -> float | None:
    """Share of the replies in the form that the environment reads, where it tells."""
    names = [name for name in record if name.startswith(f"{kind}/") and name.endswith("/format")]
    values = [record[name] for name in names if is_number(record[name])]
    return statistics.fmean(values) if values else None


def first_evaluation_is_even(run: Run) -> str | None:
    """Before there is training to judge: no task of the first evaluation has right and wrong replies."""
    best = run.accuracies("pass@n")
    once = run.accuracies("pass@1")
    if run.meta.get("algo") not in ("grpo", "ppo") or not best or best.keys() != once.keys():
        return None
    if any(best[source][0] - once[source][0] > SAME for source in best):
        return None
    first = run.evaluations[0]
    episodes = replies_of(run.folder / "episodes" / f"val_step_{int(first['iteration']):06d}.jsonl")
    for is_right in (True, False):
        rewards = [reply.reward for reply in episodes if reply.is_right == is_right]
        if rewards and max(rewards) - min(rewards) > SAME:
            return None  # there is more to earn than to be right
    right = statistics.fmean(values[0] for values in once.values())
    facts = dict(right=right, form=form_of(first, "val"))
    if episodes:
        ends = collections.Counter(reply.termination for reply in episodes)
        facts |= dict(cut=(ends["length"] + ends["context"]) / len(episodes),
                      failed=ends["error"] / len(episodes))
    return ("no task of the first evaluation has replies that are right and others that are not: "
            + why_rewards_are_equal(run, facts, SAME < right < 1 - SAME))


def why_rewards_are_equal(run: Run, facts: dict, tasks_differ: bool) -> str:
    """The likely cause, and the figures that speak for it."""
    numbers = {name: value for name, value in facts.items() if is_number(value)}
    right = numbers.get("right", 0.0)
    if numbers.get("failed", 0.0) > 0.5:
        cause = "the environment fails"
    elif numbers.get("cut", 0.0) > 0.5:
        cause = "replies are cut off before their answer"
    elif tasks_differ:
        cause = "they differ between tasks, but not between the replies to one"
    elif right > 1 - SAME:
        cause = "every reply is right: the tasks are too easy, or the verifier says yes to all"
    elif right > SAME:
        cause = "the reward function does not pay for right replies"
    elif numbers.get("form", 1.0) < 0.5:
        cause = "replies lack the form that the environment reads"
    else:
        cause = "no reply is right: the tasks are too hard, or the verifier does not find the answers"
    limit = clean(run.args.get("max_response_tokens"))
    figures = dict(right="{:.0%} of the replies are right",
                   cut=f"{{:.0%}} are cut off by --max-response-tokens {limit} or --max-context-tokens",
                   form="{:.0%} have the form that the environment reads",
                   failed="the environment failed in {:.0%} of the episodes")
    said = [text.format(numbers[name]) for name, text in figures.items() if name in numbers]
    return f"{cause} ({', '.join(said)})"


STEPS_TO_MOVE = 10  # optimiser steps after which weights have to have moved
STILL = 1e-7  # relative change of the norm of all trained weights: float32's rounding


def stands_still(run: Run) -> str | None:
    """Why the policy is the same as at the start, though there were optimiser steps."""
    records = [r for r in run.records if r.get("train/policy_steps") != 0]  # PPO's critic may learn alone
    if len(records) < FEWEST or not (steps := steps_of(records)) >= STEPS_TO_MOVE:
        return None
    norms, gradients = run.values("train/weight_norm", records), run.values("train/grad_norm", records)
    if gradients and not any(gradients):
        return f"the gradient is 0 in all {len(gradients)} updates"
    if norms and max(norms) - min(norms) <= STILL * max(norms):
        mean = show(statistics.fmean(gradients)) if gradients else "unknown size"
        return (f"{steps} optimiser steps with gradients of {mean} have left the norm of the trained weights "
                f"at {norms[-1]:.7g}")
    return None


def steps_of(records: list[dict]) -> int:
    """Optimiser steps, those of the first record aside."""
    return int(records[-1]["opt_steps"]) - int(records[0]["opt_steps"])


def has_adapter(run: Run) -> bool:
    return bool(run.args.get("lora_rank") or run.args.get("lora_adapter_path"))


def does_not_move(run: Run) -> str | None:
    says = None if has_adapter(run) else stands_still(run)
    return says and f"{says}; {rate(run)}"


HARDLY = 1e-4  # relative change of the norm of an adapter's weights; at a good rate 1e-2
STEPS_OF_ADAPTER = 40  # optimiser steps after which that is judged


def adapter_does_not_learn(run: Run) -> str | None:
    if not has_adapter(run):
        return None
    says, norms = stands_still(run), run.values("train/weight_norm")
    if not says and norms and (steps := steps_of(run.records)) >= STEPS_OF_ADAPTER:
        change = abs(norms[-1] - norms[0]) / (max(norms) or 1.0)
        if change < HARDLY:
            says = f"{steps} optimiser steps have changed the norm of the adapter by {change:.1e} of it"
    return says and f"{says}; {rate(run)}, and an adapter needs some ten times that of full weights"


FALLEN = 0.5  # of the way from the best window to the lowest reward; the default runs end at their best
LEAST_REWARD = 0.05  # that a run has to have reached, or there is nothing to fall from


def reward_falls(run: Run) -> str | None:
    rewards = run.values("train/reward") or run.values("reward_mean")
    if len(rewards) < 2 * FEWEST:
        return None
    size = min(WINDOW, len(rewards) // 3)
    windows = [statistics.fmean(rewards[start:start + size]) for start in range(len(rewards) - size + 1)]
    end = windows[-1]
    best = max(*windows, statistics.fmean(rewards[:2]))  # a run may break before a window is full
    floor = min(run.values("critic/score/min") or rewards)
    if best - floor < LEAST_REWARD or best - end < FALLEN * (best - floor):
        return None
    return (f"the mean reward falls from {show(best)}, its best over {size} iterations, to {show(end)}; "
            f"{rate(run)}")


COLLAPSED = 0.2  # of the entropy at the start; the default run ends at 0.12, with 0.98 of its replies right
SOLVED = 0.75  # share of right replies from which a low entropy is as it should be
RISEN = 1.5  # times the entropy at the start; no good run here rises


def entropy_collapses(run: Run) -> str | None:
    values, end, right = run.values("train/entropy"), run.recent("train/entropy"), share_of_right(run)
    if len(values) < FEWEST or right is None or right > SOLVED:
        return None
    start = statistics.fmean(values[:3])
    if end > COLLAPSED * start:
        return None
    return f"entropy falls from {show(start)} to {show(end)} nats, and {right:.0%} of the replies are right"


def share_of_right(run: Run) -> float | None:
    """Of the last replies, in training or else in the evaluations of all sources."""
    if correct := run.ends("train/pass@1"):
        return correct[1]
    accuracies = [values[-1] for values in run.accuracies("pass@1").values()]
    return statistics.fmean(accuracies) if accuracies else None


def entropy_rises(run: Run) -> str | None:
    end, reward = run.recent("train/entropy"), run.ends("train/reward")
    if end is None or not reward or reward[1] > 1.1 * reward[0]:
        return None
    start = run.values("train/entropy")[0]
    if end < RISEN * start:
        return None
    return (f"entropy rises from {show(start)} to {show(end)} nats, and the reward does not "
            f"({show(reward[0])} to {show(reward[1])}); --entropy-coef {run.args.get('entropy_coef')}, "
            f"{rate(run)}")


STEP_KL = 0.05  # nats per token from the policy before an iteration; PPO's default: under 0.008
CLIPPED = 0.2  # share of the tokens; PPO's default: under 0.013
FAR = 1.0  # nats per token from the starting model, where the share of right replies has not risen


def kl_grows(run: Run) -> str | None:
    step, clipped = run.recent("train/approx_kl"), run.recent("train/clipfrac")
    if step is not None and clipped is not None and (step > STEP_KL or clipped > CLIPPED):
        return (f"an iteration moves the policy by {show(step)} nats per token, and {clipped:.0%} of the "
                "tokens are clipped: lower --learning-rate, fewer --epochs or --minibatches")
    away, correct = run.recent("train/kl_loss"), run.ends("train/pass@1")
    if away is None or away < FAR or not correct or correct[1] > correct[0]:
        return None
    return (f"the policy is {show(away)} nats per token from the starting model, and {correct[1]:.0%} of the "
            f"replies are right (at first {correct[0]:.0%}); --kl-coef {run.args.get('kl_coef')}")


CUT = 0.2  # share of the replies; default runs: under 0.001
LONGER = 2.0  # times the length at the start, while the share of right replies has not risen


def length_explodes(run: Run) -> str | None:
    cut, length = run.ends("response_length/clip_ratio"), run.ends("response_length/mean")
    if cut and cut[1] > CUT:
        return (f"{cut[1]:.0%} of the replies are cut by --max-response-tokens "
                f"{run.args.get('max_response_tokens')} or --max-context-tokens (at first {cut[0]:.0%})")
    correct = run.ends("train/pass@1")
    if length and length[1] > LONGER * length[0] and correct and correct[1] <= correct[0]:
        return (f"replies grow from {show(length[0])} to {show(length[1])} tokens, and no more of them are "
                f"right ({correct[0]:.0%} to {correct[1]:.0%})")
    return None


LOST = 0.05  # of all tasks; GRPO's default dips by 0.03 at iteration 50, PPO's by 0.04 at 20
STANDARD_ERRORS = 2.0  # of a difference of two shares of that many tasks


def is_more_than_chance(change: float, share: float, run: Run) -> bool:
    tasks = run.args.get("eval_tasks")
    tasks = tasks if is_number(tasks) and tasks > 0 else 1
    return abs(change) > max(LOST, STANDARD_ERRORS * math.sqrt(2 * max(share * (1 - share), 1e-4) / tasks))


LASTING = 3  # evaluations, the last ones, in all of which it is so: a dip at the beginning is no symptom


def answers_are_lost(run: Run) -> str | None:
    """pass@n falls, while pass@1 rises."""
    for source, values in run.accuracies("pass@n").items():
        once = run.accuracies("pass@1").get(source, [])
        if len(values) == len(once) > LASTING and min(once[-LASTING:]) > once[0]:
            best = max(values[-LASTING:])
            if best < values[0] and is_more_than_chance(values[0] - best, best, run):
                return (f"pass@{run.args.get('eval_samples')} of {clean(source)} falls from "
                        f"{show(values[0])} to {show(best)} at most in the last {LASTING} evaluations, while "
                        f"pass@1 rises from {show(once[0])} to {show(once[-1])}: answers are lost")
    return None


def greedy_disagrees(run: Run) -> str | None:
    for source, greedy in run.accuracies("greedy").items():
        once = run.accuracies("pass@1").get(source, [])
        if not len(greedy) == len(once) > LASTING:
            continue
        best, least = max(greedy[-LASTING:]), min(once[-LASTING:])
        where = f"greedy decoding of {clean(source)}"
        if best < least and is_more_than_chance(least - best, best, run):
            return (f"{where} is right on {show(best)} at most in the last {LASTING} evaluations, a sample "
                    f"on {show(least)} at least")
        if best < greedy[0] and least > once[0] and is_more_than_chance(greedy[0] - best, best, run):
            return (f"{where} falls from {show(greedy[0])} to {show(best)} at most in the last {LASTING} "
                    f"evaluations, while pass@1 rises from {show(once[0])} to {show(once[-1])}")
    return None


MISMATCH = {"float32": 1e-6, "bfloat16": 0.01}  # nats per token; measured: 1e-11 and 0.007, with vLLM 0.03
OFF = 0.05  # of the mean ratio, which is 1, and of the slope, which is 0; measured: under 0.002 and 1e-6


def sampler_differs(run: Run) -> str | None:
    for error in run.errors:
        if "the sampler is not the policy" in str(error.get("message")):
            return f"the run's own check ended it: {clean(error['message'])[:200]}"
    seen = {}
    for name in ("mismatch/kl", "mismatch/ratio_mean", "mismatch/slope"):
        values = run.values(name)
        seen[name] = statistics.median(values) if values else None
    kl, ratio, slope = seen.values()
    if kl is None:
        return None
    most = MISMATCH.get(run.args.get("dtype"), MISMATCH["bfloat16"])
    if kl > most or (ratio is not None and abs(ratio - 1) > OFF) or (slope is not None and abs(slope) > OFF):
        figures = ", ".join(f"{name} {value:.2g}" for name, value in seen.items() if value is not None)
        return f"the medians are {figures}: tolerated is a kl of {most:g}, a ratio of 1 and a slope of 0"
    return None


def resumed_otherwise(run: Run) -> str | None:
    for resume in run.resumes:
        for name, what in (("git_sha", "commit"), ("script_sha256", "a script of hash")):
            before, after = run.meta.get(name), resume.get(name)
            if before and after and before != after:
                return (f"it was taken up at iteration {clean(resume.get('iteration'))} with other code: "
                        f"{what} {clean(after)[:9]}, before that {clean(before)[:9]}")
    return None


MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory",
          "Cannot allocate memory", "No available memory for the cache blocks", "gpu memory utilization")
# Functions of the traceback, of which the innermost one counts, and which part they fill.
PARTS = (({"generate", "sample", "answer", "reorder_cache", "sync_weights", "wake_up"},
          "the sampler's cache: lower --max-response-tokens or --microbatch-tokens, which bounds its batch, "
          "or gpu_memory_utilization in --vllm-kwargs"),
         ({"step", "_multi_tensor_adamw", "_fused_adamw", "_init_group"},
          "the optimiser's states: --lora-rank, or torchrun on more devices"),
         ({"pass_loss", "token_logprobs", "backward", "hidden_states", "store_logprobs", "selected_logprobs"},
          "the activations of a pass: lower --microbatch-tokens, which changes no gradient, or "
          "--gradient-checkpointing"),
         ({"load_weights", "from_pretrained", "distribute", "save"},
          "the weights: --dtype bfloat16 with --lora-rank, or torchrun on more devices"))


def out_of_memory(run: Run) -> str | None:
    for error in run.errors:
        message = f"{error.get('type')}: {error.get('message')}"
        if any(word.lower() in message.lower() for word in MEMORY):
            return f"{clean(message)[:160]} ({part_of(run, error)})"
    return None


def part_of(run: Run, error: dict) -> str:
    """Which part of the memory was full, by the traceback in the receipt."""
    text = ""
    with contextlib.suppress(*DAMAGE):
        receipt = run.folder / "receipts" / Path(str(error["receipt"])).name
        text = (receipt / "traceback.txt").read_text(errors="replace")
    called = [line.rpartition(" in ")[2].strip() for line in text.splitlines()
              if line.lstrip().startswith('File "')]
    for name in reversed(called):
        for names, says in PARTS:
            if name in names:
                return f"in {name}: {says}"
    return "its receipt, which has the traceback, is not there"


def not_finite(run: Run) -> str | None:
    for error in run.errors:
        if error.get("type") == "FloatingPointError":
            return f"the run ended at {clean(error.get('message'))[:200]}"
    return None


SILENT = 60.0  # seconds without a record
TIMES_LONGER = 10.0  # the longest time between two records of the run


def hangs(run: Run) -> str | None:
    """Only where a process of the run is alive."""
    if run.planned and run.last_iteration >= run.planned:
        return None
    times = run.values("wall_time_s", [*run.records, *run.evaluations])
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(times))]
    limit = max(SILENT, TIMES_LONGER * max(gaps, default=0.0))
    silent = time.time() - (run.folder / "train_log.jsonl").stat().st_mtime
    if silent < limit or not (processes := run_processes(run.folder.resolve())):
        return None
    return (f"no record for {silent:.0f} s after iteration {run.last_iteration}, before that for "
            f"{show(max(gaps, default=0.0))} s at most: py-spy dump --pid {processes[0].pid} tells the call")


FORKS = 0.5  # segments more than one, for each turn after the first


def template_rewrites(run: Run) -> str | None:
    turns, segments = run.ends("rollout/turns"), run.ends("rollout/segments")
    if not turns or not segments or turns[1] < 1.1 or segments[1] - 1 < FORKS * (turns[1] - 1):
        return None
    return (f"{show(segments[1])} segments to {show(turns[1])} turns: the chat template rewrites what was "
            "said (thoughts of earlier turns?), or --max-context-tokens drops old turns")


SAME_REPLY = 0.8  # of all replies, judged right whatever the task; of yes and no it would be half
TASKS = 10  # different ones, from which that is judged
WRONG_WAY = 0.2  # of the range of rewards: how far the mean rises while fewer replies are right


def verifier_is_fooled(run: Run) -> str | None:
    suspicious = run.ends("env/suspicious")
    if suspicious and suspicious[1] > 0:
        return f"{suspicious[1]:.1%} of the episodes have forged results (env/suspicious)"
    reward, correct = run.ends("train/reward"), run.ends("train/pass@1")
    if reward and correct:
        span = max(run.values("critic/score/max")) - min(run.values("critic/score/min"))
        if reward[1] - reward[0] > WRONG_WAY * span > 0 and correct[0] - correct[1] > LOST:
            return (f"the reward rises from {show(reward[0])} to {show(reward[1])}, while the share of right "
                    f"replies falls from {show(correct[0])} to {show(correct[1])}")
    for _, _, path in reversed(runs.episode_files(run.folder)):
        replies = [reply for reply in replies_of(path) if reply.text]
        if len({reply.task for reply in replies}) >= TASKS:  # the newest file with enough of them
            right = collections.Counter(reply.text for reply in replies if reply.is_right)
            reply, count = max(right.items(), key=lambda pair: pair[1], default=("", 0))
            if count < SAME_REPLY * len(replies):
                return None
            return f"one reply is right {count} times of {len(replies)} in {path.name}: {reply[:80]!r}"
    return None


NO_PROGRESS = 0.98  # of the loss at the start; the default run ends at 0.08 of it
PEAK = 1.5  # times the first record's loss; the default run never rises over it


def loss_does_not_fall(run: Run) -> str | None:
    loss, values = run.ends("train/loss"), run.values("train/loss")
    if not loss or stands_still(run) or (loss[1] < NO_PROGRESS * loss[0] and max(values) < PEAK * values[0]):
        return None
    return (f"the loss goes from {show(values[0])} nats per token over {show(max(values))} to "
            f"{show(values[-1])}; {rate(run)}")


# (name, heading in docs/symptoms.md as an anchor, function), in the order in which they are looked for.
SYMPTOMS = (
    ("reward_stays", "the-reward-stays-0", reward_stays),
    ("no_step", "the-loss-is-0", does_not_move),
    ("lora", "lora-does-not-learn", adapter_does_not_learn),
    ("reward_falls", "the-reward-falls", reward_falls),
    ("entropy_collapses", "the-entropy-collapses", entropy_collapses),
    ("entropy_rises", "the-entropy-rises", entropy_rises),
    ("kl", "the-kl-grows", kl_grows),
    ("length", "the-length-explodes-or-hits-the-limit", length_explodes),
    ("pass_at_n", "passn-falls-while-pass1-rises", answers_are_lost),
    ("greedy", "greedy-and-sampled-disagree", greedy_disagrees),
    ("sampler", "trainer-and-sampler-disagree", sampler_differs),
    ("resumed", "a-resumed-run-differs", resumed_otherwise),
    ("memory", "out-of-memory", out_of_memory),
    ("not_finite", "nan-or-infinity", not_finite),
    ("hangs", "it-hangs", hangs),
    ("template", "a-template-eats-thoughts", template_rewrites),
    ("verifier", "the-verifier-is-fooled", verifier_is_fooled),
    ("sft_loss", "the-loss-of-sft-does-not-fall", loss_does_not_fall),
)


def diagnose(run: Run) -> list[dict]:
    """What it sees: {"symptom", "says", "page"} for each."""
    found = []
    for name, anchor, look in SYMPTOMS:
        if says := look(run):
            found.append(dict(symptom=name, says=says, page=f"{PAGE}#{anchor}"))
    return found


# What depends on the clock or names the run.
OWN = ("run_id", "trace_id", "wall_time_s", "sps", "rollout/throughput", "train/throughput")


def first_difference(run: Run, other: Run) -> list[dict]:
    """Where two runs that should be equal part: the first record, and the metrics that differ in it."""
    theirs = {record["iteration"]: record for record in [*other.evaluations, *other.records]}
    for record in sorted([*run.evaluations, *run.records], key=lambda record: record["iteration"]):
        twin = theirs.get(record["iteration"])
        if twin is None:
            continue
        names = [name for name in record if name not in OWN and not name.startswith(("time/", "system/"))
                 and record[name] != twin.get(name)]
        if names:
            figures = ", ".join(f"{clean(name)} {clean(record[name])[:12]} and {clean(twin.get(name))[:12]}"
                                for name in names[:3])
            return [dict(symptom="resumed", page=f"{PAGE}#a-resumed-run-differs", says=(
                f"iteration {record['iteration']} is the first that differs from {clean(other.folder)}, in "
                f"{len(names)} metrics: {figures}"))]
    return []


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Look in a run's log and episodes for known symptoms (docs/symptoms.md).")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its train_log.jsonl")
    parser.add_argument("--like", type=Path, metavar="OTHER", help="a run that should have the same records")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    run = read(args.run)
    found = diagnose(run)
    if args.like:
        found += first_difference(run, read(args.like))
    report = dict(run=str(args.run), algo=run.meta.get("algo"), iteration=run.last_iteration, of=run.planned,
                  records=len(run.records), symptoms=found)
    if args.json:
        print(json.dumps(report))
        return int(bool(found))
    count = "1 symptom" if len(found) == 1 else f"{len(found)} symptoms"
    planned = f" of {run.planned}" if run.planned else ""
    place = f"iteration {run.last_iteration}{planned}"
    print(f"{clean(args.run)}: {clean(run.meta.get('algo'))}, {place}, {count}")
    for each in found:
        print(f"- {each['symptom']}: {each['says']}\n  {each['page']}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
