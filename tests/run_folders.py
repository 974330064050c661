"""What the tests of training runs share: start a script, kill it, read and compare its run folder."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def command_line(script, *flags):
    """What a person sees. -> exit code; an exception that is no exit is an error of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
                return 1
            return end.code or 0
    return 0


def process(script, *flags, **options):
    environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") | options.pop("env", {})
    return subprocess.Popen([sys.executable, str(ROOT / script), *map(str, flags)], cwd=ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def kill_at(moment, run, folder, rng, pause=0.0):
    """SIGKILL, the process being where `moment` says. -> whether it came to that before the process ended.

    pause: a checkpoint's writing is interrupted up to so long after it began [s]. "log" leaves a complete
    checkpoint, however slow the machine is, so that after it a run always has something to continue.
    """
    def wait_for(condition):
        while not condition() and run.poll() is None:
            time.sleep(0.0005)

    def writing():
        return any((folder / "checkpoints").glob(".step_*.writing"))

    log = folder / "train_log.jsonl"
    size = log.stat().st_size if log.exists() else 0
    if moment != "start":
        wait_for(lambda: log.exists() and log.stat().st_size != size)
    if moment == "log":
        wait_for(lambda: any((folder / "checkpoints").glob("step_*")))
    deadline = time.monotonic() + rng.uniform(*(1, 6) if moment == "start" else (0, 1))
    wait_for(lambda: time.monotonic() > deadline)
    while moment == "writing" and run.poll() is None:
        wait_for(writing)
        time.sleep(rng.uniform(0, pause))
        run.send_signal(signal.SIGSTOP)
        if writing():
            break
        run.send_signal(signal.SIGCONT)
    run.kill()
    run.communicate()
    return run.returncode == -9


def log_lines(folder):
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def records(folder):
    return [line for line in log_lines(folder) if "iteration" in line]


def is_time(name):
    return name.startswith(("time/", "system/")) or name in (
        "wall_time_s", "sps", "rollout/throughput", "train/throughput")


def timeless(folder):
    """The records without what depends on the clock and on the run's name."""
    return [{name: value for name, value in record.items() if not is_time(name) and name != "run_id"}
            | {"trace_id": record["trace_id"].split(":")[1]} for record in records(folder)]


def same_tree(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same_tree(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            same_tree(a, b)
    else:
        assert one == other


def copy_run(source, target):
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return target


def full_forward(model, segment, temperature):
    """Log-probabilities and entropies of a segment's response, alone and without a cache, in float64."""
    logits = model(torch.tensor([segment.ids]), use_cache=False).logits[0].double() / temperature
    p = torch.softmax(logits[len(segment.prompt_ids) - 1:-1], -1)
    targets = torch.tensor(segment.response_ids)
    return p[torch.arange(len(targets)), targets].log(), -(p * p.log()).sum(-1)


def gradients(model):
    """All gradients in one vector; they are reset."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return flat
