"""What a run has reached, where its checkpoint lies and how to go on; and its curves as RUN/curve.png.

    python tools/report_run.py runs/grpo/RUN

Each script runs this at its end. The commands hold in the folder where it was called. A run without two
iterations to draw gets no picture, and one that cannot be drawn is one line and exit status 1.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools.command_line import Parser, ends_in_one_line, one_line
from tools.runs import checkpoints, episode_files, is_number, read

ROOT = Path(__file__).resolve().parent.parent
# The figures that tell what was reached; the first group names where they were measured.
REACHED = re.compile(r"(?:val/(.+)/|(val|eval)/)(pass@\d+|greedy|loss|[a-z_]*success_rate|[a-z_]*return)")
MOST_SOURCES = 12  # that are listed
SCRIPTS = {"grpo": "grpo_llm.py", "ppo": "ppo_llm.py", "sft": "sft.py", "a2c": "a2c_vecenv.py"}
# Flags that an evaluation of the checkpoint sets itself, or has no use for.
NOT_OF_EVALUATION = {"model", "run-dir", "experiment", "iterations", "lora-rank", "lora-alpha",
                     "lora-target-modules", "lora-adapter-path", "checkpoint-every", "keep-checkpoints",
                     "log-episodes", "print-samples"}


def shortest(path: Path) -> str:
    """As one writes it in the shell, from the folder where one is."""
    whole = os.path.abspath(path)
    return shlex.quote(min(os.path.relpath(whole), whole, key=len))


def python(program: Path) -> str:
    """The command that runs a program with this Python; torchrun calls it python3."""
    found = Path(shutil.which("python") or "/")
    is_this = found.parent == Path(sys.executable).parent and found.samefile(sys.executable)
    return f"{'python' if is_this else shlex.quote(sys.executable)} {shortest(program)}"


def reached(records: list[dict]) -> list[str]:
    """A line for each source of tasks: its figures in the first evaluation and in the last."""
    sources = {}
    for record in records:
        for key, value in record.items():
            match = REACHED.fullmatch(key)
            if match and is_number(value):
                source = sources.setdefault(match[1] or "held out", {})
                source.setdefault(match[3], []).append(value)
    lines = []
    for source, figures in sources.items():
        texts = []
        for name, values in figures.items():
            way = f"{values[0]:.3f} -> {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
            texts.append(f"{name} {way}")
        lines.append(f"{source}: {', '.join(texts)}")
    if len(lines) > MOST_SOURCES:
        lines[MOST_SOURCES:] = [f"and {len(lines) - MOST_SOURCES} other sources, in the log"]
    return lines


def kept_checkpoints(run: Path) -> tuple[Path | None, Path | None]:
    """-> the newest, and the best, where a run names one"""
    folders = checkpoints(run)
    best = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        best = run / "checkpoints" / json.loads((run / "checkpoints/state.json").read_text())["best"]
    return folders[-1] if folders else None, best if best in folders else None


def evaluation(meta: dict, checkpoint: Path) -> str | None:
    """The command that evaluates a language model's checkpoint as the run did, and shows three replies."""
    args = meta["args"]
    words = []
    script = ROOT / SCRIPTS[meta["algo"]]
    if meta["algo"] == "sft":
        if not meta.get("env"):
            return None
        script = ROOT / SCRIPTS["grpo"]
        words = ["--env", meta["env"], "--max-response-tokens", args["max_response_tokens"]]
        options = [option for option in args["env_kwargs"] if option != "skill=mixed"]  # of demonstrations
        words += ["--env-kwargs", *options] if options else []
    else:
        typed, *rest = meta["argv"]
        if Path(typed).suffix == ".py" and Path(typed).is_file():  # a variant
            script = Path(typed)
        flag = ""
        for word in rest:
            if word.startswith("--"):
                flag = word[2:].partition("=")[0].replace("_", "-")
            if flag not in NOT_OF_EVALUATION:
                words.append(word)
    if args.get("lora_rank") or args.get("lora_adapter_path"):
        words += ["--model", args["model"], "--lora-adapter-path"]
    else:
        words += ["--model"]
    text = shlex.join(map(str, words))
    return f"{python(script)} {text} {shortest(checkpoint)} --iterations 0 --print-samples 3"


def commands(run: Path, meta: dict, has_curves: bool) -> list[str]:
    """How to go on: plot, look at what it does, evaluate."""
    where = shortest(run)
    newest, best = kept_checkpoints(run)
    found = []
    if has_curves:
        plot = python(ROOT / "tools/plot_train_log.py")
        found.append(f"{plot} --log {where} --x wall_time_s --out {shortest(run / 'train.png')}")
    if episode_files(run):
        found.append(f"{python(ROOT / 'tools/view_episodes.py')} {where}")
    else:
        found.append(f"{python(ROOT / 'tools/diagnose.py')} {where}")
    if newest and meta["algo"] == "a2c":
        gif = ROOT / "tools/dump_policy_gif.py"
        found.append(f"{python(gif)} --run {where} --episodes 3 --out {shortest(run / 'look')}")
    elif newest:
        found.append(evaluation(meta, best or newest))
    return [*filter(None, found)]


def draw(run: Path) -> Path:
    """The curves, without the plotter's warnings, such as of a panel that a run has no numbers for."""
    out = run / "curve.png"
    with contextlib.redirect_stderr(io.StringIO()):
        from tools import plot_train_log
        group = plot_train_log.read_group([str(run)], "", "iteration", 1, [])
        title, note = plot_train_log.describe([group], 1)
        plot_train_log.draw([group], "iteration", title, note, out)
    return out


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    run = parser.parse_args(argv).run
    log = read(run, [])
    if log.meta.get("algo") not in SCRIPTS:
        raise BadInput(f"{run}: no meta line that names an algorithm ({', '.join(SCRIPTS)})")
    if not log.records:
        raise BadInput(f"{run}: no record yet")
    last = log.records[-1]
    print(f"Iteration {last['iteration']:,} after {last.get('wall_time_s', 0.0):,.0f} s, in {shortest(run)}")
    for line in reached(log.records):
        print(f"  {line}")
    newest, best = kept_checkpoints(run)
    if newest:
        print(f"  checkpoint: {shortest(newest)}")
    if best and best != newest:
        print(f"  of lowest val/loss: {shortest(best)}")
    failed = ""
    has_curves = len({record["iteration"] for record in log.records if record["iteration"]}) > 1
    if has_curves:
        try:
            print(f"  curves: {shortest(draw(run))}")
        except Exception as error:
            failed = one_line(error)
            print(f"  warning: no curve.png: {failed}")
    print("To go on:")
    for command in commands(run, log.meta, has_curves):
        print(f"  {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
