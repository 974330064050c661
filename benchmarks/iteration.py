"""What the time of an iteration of grpo_llm.py goes into, and what each of its tricks saves.

    python benchmarks/iteration.py                          # parts, operators, FLOPs: an early and a late one
    python benchmarks/iteration.py --tricks                 # the default run without each trick
    python benchmarks/iteration.py --tricks --real MODEL    # sums with a chat model of docs/smollm2.md

CPU seconds of the process, one thread on one core; operators' share alone is of the time by the clock. A
window is some iterations of the default run, without evaluations and checkpoints; with --tricks the late one
begins with the trained model. Operators are counted by torch's profiler, in a run of its own since it slows
things down; FLOPs by torch's counter, which knows those of matrix products and attention. The peak is that of
the fastest of some products of two matrices. A trick is taken out of a copy of the script (TRICKS below has
the lines), copies take turns, and a ratio is the median over the turns. --out FILE keeps what was measured.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import REPOSITORY, Worker, append_csv, check_environment, check_smollm2, in_turn

WINDOWS = {"early": (20, 40), "late": (420, 440)}
QUIET = "--eval-every 0 --eval-tasks 1 --eval-samples 1 --log-episodes 0 --checkpoint-every 1000000".split()
SUMS = ("--env reasoning-gym --prompts-per-iteration 16 --group-size 8 --max-response-tokens 8 "
        "--microbatch-tokens 4096 --no-gradient-checkpointing --learning-rate 4e-6 --dtype float32 "
        "--env-kwargs task=chain_sum min_terms=2 max_terms=2 min_digits=1 max_digits=2 train_tasks=4000 "
        "test_tasks=200").split() + ["system=Answer with the final answer only."]
# Replies of up to 256 tokens, of many lengths: docs/countdown.md's four numbers.
LONG = ("--model models/countdown4 --env-kwargs min_operands=4 max_operands=4 operators=+-*/ max_number=99 "
        "min_target=10 max_target=100 draw=uniform held_out=parts max_intermediate=200 test_tasks=512 "
        "--max-response-tokens 256 --max-context-tokens 288 --temperature 0.3 --minibatches 2 "
        "--aggregation sequence --learning-rate 1e-4 --entropy-coef 0 --prompts-per-iteration 16").split()
# name -> lines of grpo_llm.py and what takes their place
TRICKS = {
    "equal rows share a row in the update": [
        ("rows.setdefault(tokens, []).append(s)", "rows.setdefault(id(s), []).append(s)")],
    "equal beginnings share a row while sampling": [
        ("pairs, row = torch.unique(row * vocabulary + token, return_inverse=True)",
         "pairs, row = row * vocabulary + token, torch.arange(len(row), device=device)")],
    "and equal prompts": [
        ("prompts, row = unique(prompts)", "row = [*range(len(prompts))]")],
    "ended replies leave the batch": [("if num_done > len(done) // 8:", "if False:")],
    "passes sorted by length": [
        ("in sorted(segments, key=lambda s: len(s.ids)):", "in segments:")],
    "no pass for the old log-probabilities on policy": [
        ("if args.epochs * args.minibatches > 1:", "if True:")],
}
WITH = {"and equal prompts": ["equal beginnings share a row while sampling"]}  # what is taken out before


# A side's process


def load(path):
    """A script or a changed copy of it as a module."""
    import importlib.util
    spec = importlib.util.spec_from_file_location("program", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    return module


def work(job):
    """Run to the end of the last window, and tell what was measured in each."""
    import torch
    import tyro
    from torch.utils.flop_counter import FlopCounterMode
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    module, windows = load(job["script"]), job["windows"]
    parts, found, inside = collections.Counter(), {}, []
    state = dict(number=0, began=0.0, clock=0.0, window=None, tool=None)

    def timed(name, function):
        def inner(*given, **named):
            inside.append(name)
            began, flops = time.process_time(), 0
            if job["count"] == "flops" and state["window"] and len(inside) == 1:
                with FlopCounterMode(display=False) as counter:
                    result = function(*given, **named)
                flops = counter.get_total_flops()
            else:
                result = function(*given, **named)
            parts[name] += time.process_time() - began
            parts[f"{name} flops"] += flops
            inside.pop()
            return result
        return inner

    for name in ("generate", "rollout", "update", "check_sampler", "evaluate"):
        setattr(module, name, timed(name, getattr(module, name)))
    module.Run.record = timed("record", module.Run.record)
    record = module.Run.record

    def record_and_look(self, *given):
        result = record(self, *given)
        state["number"] += 1
        window = state["window"]
        if window and state["number"] == windows[window][1]:
            size = windows[window][1] - windows[window][0]
            total = time.process_time() - state["began"]
            wall = time.perf_counter() - state["clock"]
            numbers = {name: value / size for name, value in (parts | dict(total=total, wall=wall)).items()}
            if state["tool"]:
                state["tool"].__exit__(None, None, None)
                seconds = {e.key: e.self_cpu_time_total / 1e6 / size for e in state["tool"].key_averages()}
                numbers["operators"] = sum(seconds.values())
                numbers["products"] = sum(seconds.get(f"aten::{of}", 0.0) for of in ("mm", "addmm", "bmm"))
                numbers["calls"] = sum(e.count for e in state["tool"].key_averages()) / size
                state["tool"] = None
            found[window] = numbers
            state["window"] = None
            if len(found) == len(windows):
                print(json.dumps(found), file=answers, flush=True)
                os._exit(0)
        for name, (start, _) in windows.items():
            if state["number"] == start:
                parts.clear()
                if job["count"] == "operators":
                    state["tool"] = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                    state["tool"].__enter__()
                state.update(window=name, began=time.process_time(), clock=time.perf_counter())
        return result

    module.Run.record = record_and_look
    with tempfile.TemporaryDirectory() as folder:
        module.main(tyro.cli(module.Args, args=[*QUIET, *job["flags"], "--run-dir", f"{folder}/run"]))


def peak():
    """FLOPs per CPU second of the fastest of ten products of two matrices."""
    import torch
    torch.set_num_threads(1)
    a, best = torch.randn(1024, 1024), 0.0
    for _ in range(10):
        began = time.process_time()
        for _ in range(5):
            a @ a
        best = max(best, 5 * 2 * 1024**3 / (time.process_time() - began))
    return best


# The parent


def measure(side, script, flags, windows, count, core):
    job = dict(side=side, script=str(script), flags=flags, windows=windows, count=count)
    worker = Worker(__file__, sys.executable, job, core)
    worker.close()
    return worker.first


def profile(options):
    """The table of parts, of one early and one late iteration."""
    script = REPOSITORY / "grpo_llm.py"
    runs = collections.defaultdict(list)
    for _ in range(options.repeats):
        runs["none"].append(measure("time", script, [], WINDOWS, "none", options.core))
    for count in ("operators", "flops"):
        runs[count].append(measure(count, script, [], WINDOWS, count, options.core))
    most = peak()
    rows = []
    print(f"A product of two 1024 x 1024 matrices: {most / 1e9:.0f} GFLOP/s of CPU time\n")
    print("| an iteration's CPU time | early [ms] | share | late [ms] | share |\n|---|---|---|---|---|")
    columns = {}
    for window in WINDOWS:
        mid = {name: statistics.median(run[window].get(name, 0.0) for run in runs["none"])
               for name in ("total", "generate", "rollout", "update", "check_sampler", "record")}
        columns[window] = {
            "sampling: the model and the draws": mid["generate"],
            "rollout around it: episodes, texts, rewards": mid["rollout"] - mid["generate"],
            "update": mid["update"] - mid["check_sampler"],
            "check of the sampler": mid["check_sampler"],
            "log": mid["record"],
            "the rest": mid["total"] - mid["rollout"] - mid["update"] - mid["record"],
            "all": mid["total"]}
        counted, flops = runs["operators"][0][window], runs["flops"][0][window]
        rows.append(dict(window=window, peak=most, **mid, operators=counted["operators"],
                         calls=counted["calls"], products=counted["products"],
                         profiled=counted["wall"], rollout_flops=flops["rollout flops"],
                         update_flops=flops["update flops"]))
    for name in columns["early"]:
        cells = [f"{columns[window][name] * 1e3:.1f} | {columns[window][name] / columns[window]['all']:.0%}"
                 for window in WINDOWS]
        print(f"| {name} | {' | '.join(cells)} |")
    shares = [
        ("operators' own share, under the profiler", lambda r: f"{r['operators'] / r['profiled']:.0%}"),
        ("calls of operators", lambda r: f"{r['calls']:,.0f}"),
        ("matrix products' share of the operators", lambda r: f"{r['products'] / r['operators']:.0%}"),
        ("GFLOP of the rollout", lambda r: f"{r['rollout_flops'] / 1e9:.2f}"),
        ("GFLOP of the update", lambda r: f"{r['update_flops'] / 1e9:.2f}"),
        ("the rollout's share of the peak", lambda r: f"{r['rollout_flops'] / r['rollout'] / most:.0%}"),
        ("the update's share of the peak", lambda r: f"{r['update_flops'] / r['update'] / most:.0%}")]
    print("\n| | early | late |\n|---|---|---|")
    for name, of in shares:
        print(f"| {name} | {' | '.join(of(row) for row in rows)} |")
    return rows


def without(trick, folder):
    """-> the path of a copy of the script without a trick"""
    text = (REPOSITORY / "grpo_llm.py").read_text()
    for name in [*WITH.get(trick, []), trick] if trick else []:
        for old, new in TRICKS[name]:
            if text.count(old) != 1:
                sys.exit(f"error: grpo_llm.py has {text.count(old)} times, not once: {old}")
            text = text.replace(old, new)
    path = Path(folder, f"grpo_{len(list(Path(folder).iterdir()))}.py")
    path.write_text(text)
    return path


def tricks(options):
    """How much longer an iteration takes without each trick."""
    rows, ratios = [], collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        if options.real:
            windows = {"real": ([*SUMS, "--model", options.real], (1, 1 + options.iterations))}
        else:
            command = [sys.executable, "grpo_llm.py", "--eval-every", "0", "--run-dir", f"{folder}/run"]
            subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
            trained = f"{folder}/run/checkpoints/step_000500"
            windows = {"early": ([], (5, 20)), "late": (["--model", trained], (5, 20)),
                       "long": (LONG, (1, 1 + options.iterations))}
        sides = {trick: without(trick, folder) for trick in ("", *TRICKS)}
        for turn, (window, (flags, span)) in itertools.product(range(options.repeats), windows.items()):
            taken = {trick: measure(trick, sides[trick], flags, {window: span}, "none", options.core)[window]
                     for trick in in_turn([*sides], turn)}
            for trick, numbers in taken.items():
                ratio = numbers["total"] / taken[""]["total"]
                ratios[trick, window].append(ratio)
                rows.append(dict(without=trick or "none", window=window, turn=turn, ratio=ratio,
                                 **{name: numbers[name] for name in ("total", "rollout", "update")}))
                print(f"turn {turn}, without {trick or 'none':50} {window:6} {numbers['total']:.4f} s "
                      f"{ratio:.2f}", file=sys.stderr)
    print(f"| an iteration without | {' | '.join(windows)} |\n|---{'|---' * len(windows)}|")
    for trick in TRICKS:
        cells = [f"{statistics.median(ratios[trick, window]):.2f} ({min(ratios[trick, window]):.2f} to "
                 f"{max(ratios[trick, window]):.2f})" for window in windows]
        print(f"| {trick} | {' | '.join(cells)} |")
    return rows


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("word", nargs="?", choices=("worker",), help=argparse.SUPPRESS)
    parser.add_argument("--tricks", action="store_true", help="without each trick in turn")
    parser.add_argument("--real", default="", help="with --tricks: folder of a chat model")
    parser.add_argument("--iterations", type=int, default=3, help="with windows long and real: of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="the core that all is pinned to")
    parser.add_argument("--out", default="", help="CSV file to append to")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    if options.word:
        work(json.loads(sys.stdin.readline()))
        return
    check_environment("torch", "transformers", "tyro", "pydantic")
    if options.real:
        check_environment("reasoning_gym", made_by="envs")
        check_smollm2()
    rows = (tricks if options.tricks else profile)(options)
    if options.out:
        append_csv(options.out, rows)


if __name__ == "__main__":
    main()
