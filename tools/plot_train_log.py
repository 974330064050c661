"""Draw the curves of one or more train_log.jsonl files (docs/train_log.md).

    python tools/plot_train_log.py --log runs/countdown/RUN --out train.png
    python tools/plot_train_log.py --log S1 S2 S3 --x wall_time_s --smoothing 10 --out grpo.png --csv grpo.csv
    python tools/plot_train_log.py --log A1 A2 --log B1 B2 --label "lr 1e-3" "lr 2e-3" --out rates.png
    python tools/plot_train_log.py --log G1 G2 --control S1 S2 --control-label "SFT continued" --out both.png
    python tools/plot_train_log.py --log runs/rows/RUN --key "train/rows/*" critic/score/max --out parts.png
    python tools/plot_train_log.py --from-csv grpo.csv --out grpo.png

A log is the file or its run folder. Several logs are the seeds of one experiment: the line is their mean and
the band reaches from the lowest to the highest, over the x that all of them cover. With several --log each is
a group with a colour of its own. Dotted verticals mark where a run was resumed. A panel without its key is
left out with a JSON warning on standard error; without a usable record the exit status is 1, with a JSON
reason there. --key draws any numbers of the log. --csv writes the numbers of the figure, and --from-csv draws
them again, so that the docs can carry the CSV instead of the runs.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import fnmatch
import json
import math
import re
import statistics
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput
from tools import runs
from tools.command_line import answers_in_json
from tools.compare_runs import differing
from tools.validate_train_log import is_number

# An environment's name is text, whatever dollars it holds.
matplotlib.rcParams["text.parse_math"] = False

MOST_POINTS = 250  # per curve; longer logs are averaged in equal chunks, finer than a panel can show
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito: colour-blind safe
LINES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))  # of curves, where groups have the colours
X_LABELS = {"iteration": "iteration", "env_steps": "", "opt_steps": "optimiser steps",
            "wall_time_s": "wall-clock time [s]"}
ENV_STEPS = {"a2c": "environment steps", "sft": "trained tokens", "ppo": "generated tokens",
             "grpo": "generated tokens"}
CSV_COLUMNS = ("metric", "mean", "low", "high", "n", "group", "algo")  # after the first, named as x is


@dataclass(frozen=True)
class Curve:
    key: str
    label: str = ""
    shade: tuple[str, ...] = ()  # keys of a lower and an upper quantile, shaded around the curve
    required: bool = True  # its absence is worth a warning


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    y: str = ""  # "rate": from 0 to 1; "zero": from 0; else as the data are


REWARD = Panel("reward", "mean per episode", (Curve("train/reward"),))
ENTROPY = Panel("entropy", "nats per token", (Curve("train/entropy"),))
KL = Panel("KL", "nats per token", (
    Curve("train/approx_kl", "old to new policy"), Curve("mismatch/kl", "sampler to trainer", required=False),
    Curve("train/kl_loss", "to the reference", required=False)))
LENGTH = Panel("response length", "tokens", (Curve("response_length/mean"),), "zero")
THROUGHPUT = Panel("rollout throughput", "tokens/s", (Curve("rollout/throughput"),), "zero")
GRPO = (REWARD, ENTROPY, KL, LENGTH, THROUGHPUT)
PANELS = {
    "grpo": GRPO,
    "ppo": (*GRPO, Panel("critic: explained variance", "fraction", (Curve("critic/vf_explained_var"),)),
            Panel("critic: value loss", "mean per token", (Curve("critic/vf_loss"),))),
    "sft": (
        Panel("loss", "nats per token",
              (Curve("train/loss", "training"), Curve("val/loss", "held out", required=False))),
        Panel("learning rate", "", (Curve("train/learning_rate"),), "zero"),
        Panel("throughput", "tokens/s", (Curve("train/throughput"),), "zero"),
    ),
    "a2c": (
        Panel("success rate", "of finished episodes",
              (Curve("success_rate", "training"), Curve("eval/success_rate", "evaluation", required=False),
               Curve("eval/greedy_success_rate", "evaluation, greedy", required=False)), "rate"),
        Panel("return", "mean per episode",
              (Curve("episode_return", "training", required=False),
               Curve("eval/greedy_return", "evaluation, greedy", required=False))),
        Panel("reward", "mean per step", (Curve("reward_mean"),)),
        Panel("ends of episodes", "per step",
              (Curve("done_rate", "terminated"), Curve("trunc_rate", "truncated")), "zero"),
        Panel("distance to the goal", "", (Curve("dist_p50", "median", ("dist_p10", "dist_p90")),), "zero"),
        Panel("entropy", "nats", (Curve("entropy_mean"),), "zero"),
        Panel("value", "mean", (Curve("value_mean"),)),
    ),
}
WANTED = {key for panels in PANELS.values() for panel in panels for curve in panel.curves
          for key in (curve.key, *curve.shade)}
ACCURACY = re.compile(r"val/(?P<source>.+)/(greedy|pass@(?P<n>[1-9][0-9]{0,8}))")


@dataclass
class Run:
    """One log."""

    path: Path
    algo: str
    env: str
    records: list[dict]  # in order; the finite numbers alone, x among them
    resumes: list[float]  # x of each resume
    meta: dict


@dataclass
class Series:
    """One metric over the runs of a group, on a common x. All arrays (points,)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int  # runs


@dataclass
class Group:
    """The runs that share a line."""

    label: str  # "" for a single --log; its label for one of several; the control's label for --control
    algo: str
    env: str = ""
    series: dict[str, Series] = field(default_factory=dict)
    resumes: list[float] = field(default_factory=list)
    metas: list[dict] = field(default_factory=list)  # of the runs; none in a CSV

    @property
    def runs(self) -> int:
        return max(series.n for series in self.series.values())


def warn(what: str, **details) -> None:
    print(json.dumps({"warning": what, **details}), file=sys.stderr)


def read_run(path: Path, x: str) -> Run:
    """The records of a log. Damaged lines are skipped with a warning; BadInput if none is left."""
    damaged = []
    log = runs.read(path, damaged)
    if damaged:
        warn("lines skipped: not JSON objects", log=str(path), lines=len(damaged))
    algo = log.meta.get("algo")
    if not isinstance(algo, str) or algo not in PANELS:
        raise BadInput(f"{path}: no meta line that names an algorithm ({', '.join(sorted(PANELS))})")
    records = []
    for record in log.records:
        if is_number(record.get(x)):
            records.append({key: float(value) for key, value in record.items() if is_number(value)})
    if not records:
        raise BadInput(f"{path}: no usable record (one with a finite {x})")
    marks = []
    for resume in log.resumes:
        at = resume.get(x)
        if x == "wall_time_s":  # which a resume line has not: that of the last record before it
            end = resume.get("iteration")
            before = [record[x] for record in records if is_number(end) and record["iteration"] <= end]
            at = before[-1] if before else None
        if is_number(at):
            marks.append(float(at))
    return Run(path, algo, str(log.meta.get("env") or ""), records, marks, log.meta)


def read_group(paths: list[str], label: str, x: str, smoothing: int, patterns: list[str]) -> Group:
    """The usable logs among `paths`, combined; the others are warned of. Raises BadInput when none is left.

    patterns: of the keys that are wanted; none: those of the panels.
    """
    members, reasons = [], []
    for path in paths:
        try:
            members.append(read_run(Path(path), x))
        except (BadInput, OSError) as error:
            reasons.append(str(error))
    if not members:
        raise BadInput("; ".join(reasons))
    for reason in reasons:
        warn("log left out", reason=reason)
    if len({run.algo for run in members}) > 1:
        found = ", ".join(f"{run.path} is {run.algo}" for run in members)
        raise BadInput(f"logs of different algorithms do not make one curve: {found}")
    warn_of_different(members)
    ends = [run.records[-1][x] for run in members]
    if min(ends) < 0.9 * max(ends):
        warn("runs of different length: the curves stop with the shortest", x=x, ends=ends)
    keys = sorted({key for run in members for record in run.records for key in record})
    wanted = matching(keys, patterns)
    if not patterns:
        wanted = [key for key in keys if key in WANTED or ACCURACY.fullmatch(key)]
    series = {key: combine([points(run, key, x, smoothing) for run in members]) for key in wanted}
    found = {key: value for key, value in series.items() if value is not None}
    if not found:
        raise BadInput(f"{', '.join(map(str, paths))}: no usable record (one with a key of any panel)")
    resumes = sorted({at for run in members for at in run.resumes})
    return Group(label, members[0].algo, members[0].env, found, resumes, [run.meta for run in members])


def differing_flags(metas: list[dict]) -> dict[str, list]:
    """Those that make runs different experiments: the seed does not."""
    return differing(metas, but=runs.OF_THE_FOLDER | {"seed"})


def warn_of_different(members: list[Run]) -> None:
    """Where the runs of a group are not seeds of one experiment."""
    if len({runs.experiment_hash(run.meta) for run in members}) > 1:
        warn("runs of different experiments in one group", logs=[str(run.path) for run in members],
             differ=differing_flags([run.meta for run in members]))


def name_groups(groups: list[Group], paths: list[list[str]]) -> None:
    """Give groups without a label one: the flags in which they differ, or the folder of their first run."""
    differ = differing_flags([group.metas[0] for group in groups])
    for number, group in enumerate(groups):
        words = [f"{name} {values[number]}" for name, values in differ.items() if name.startswith("--")]
        group.label = ", ".join(words)
        if not 0 < len(words) < 3:  # nothing, or too much to read
            first = Path(paths[number][0])
            group.label = first.name if first.is_dir() else first.parent.name
    for number, group in enumerate(groups):
        if group.label in [other.label for other in groups[:number]]:
            group.label += f" ({number + 1})"


def matching(keys: list[str], patterns: list[str]) -> list[str]:
    """The keys that patterns such as train/rows/* name. BadInput for one that names none."""
    found = []
    for pattern in patterns:
        named = [key for key in keys if fnmatch.fnmatchcase(key, pattern)]
        if not named:
            close = difflib.get_close_matches(pattern, keys, n=3, cutoff=0.3)
            raise BadInput(f"--key {pattern}: no record has it; the closest are {', '.join(close)}")
        found += [key for key in named if key not in found]
    return found


def points(run: Run, key: str, x: str, smoothing: int) -> tuple[np.ndarray, np.ndarray]:
    """x and values of one metric of one run, x rising. Validation is sparse and stays as it is."""
    found = {record[x]: record[key] for record in run.records if key in record}  # at one x the last counts
    xs = np.array(sorted(found))
    ys = np.array([found[at] for at in xs])
    if key.startswith(("val/", "eval/")) or not len(xs):
        return xs, ys
    size = math.ceil(len(xs) / MOST_POINTS)
    return chunk_means(xs, size), chunk_means(smooth(ys, smoothing), size)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average over `window` records, over fewer at both ends. (T,) -> (T,)."""
    at = np.arange(len(values))
    start = np.maximum(at - (window - 1) // 2, 0)
    stop = np.minimum(at + window // 2 + 1, len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return (sums[stop] - sums[start]) / (stop - start)


def chunk_means(values: np.ndarray, size: int) -> np.ndarray:
    """Mean of every `size` values in a row; the last chunk may be shorter. (T,) -> (ceil(T / size),)."""
    starts = np.arange(0, len(values), size)
    return np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))


def combine(curves: list[tuple[np.ndarray, np.ndarray]]) -> Series | None:
    """Mean, lowest and highest over the runs that have the metric; None where they have no x in common."""
    curves = [(xs, ys) for xs, ys in curves if len(xs)]
    grid = curves[0][0]
    if any(not np.array_equal(grid, xs) for xs, _ in curves):
        # Seeds differ in tokens and seconds: interpolate on an even grid over what all of them cover.
        start, stop = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
        if start > stop:
            return None
        count = statistics.median_low(len(xs) for xs, _ in curves)
        grid = np.linspace(start, stop, max(count, 2)) if stop > start else np.array([start])
    table = np.stack([np.interp(grid, xs, ys) for xs, ys in curves])  # (runs, points)
    return Series(grid, table.mean(axis=0), table.min(axis=0), table.max(axis=0), len(curves))


def write_csv(path: Path, x: str, groups: list[Group]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((x, *CSV_COLUMNS))
        for group in groups:
            for key, s in group.series.items():
                for row in zip(s.x, s.mean, s.low, s.high, strict=True):
                    numbers = [f"{value:.7g}" for value in row]
                    writer.writerow([numbers[0], key, *numbers[1:], s.n, group.label, group.algo])


def read_csv(path: Path) -> tuple[str, list[Group]]:
    """The name of x and the groups that write_csv wrote, without their resumes."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if header[0] not in X_LABELS or tuple(header[1:]) != CSV_COLUMNS:
            raise ValueError(f"expected the columns {', '.join(CSV_COLUMNS)} after the x")
        columns = {}
        for x, key, mean, low, high, n, label, algo in rows:
            point = tuple(map(float, (x, mean, low, high)))
            columns.setdefault((label, algo), {}).setdefault((key, int(n)), []).append(point)
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV of this tool ({error})") from error
    groups = []
    for (label, algo), series in columns.items():
        groups.append(Group(label, algo))
        for (key, n), found in series.items():
            groups[-1].series[key] = Series(*np.array(found).T, n)
    if not groups or groups[0].algo not in PANELS:
        raise BadInput(f"{path}: no usable row")
    return header[0], groups


def layout(group: Group) -> list[Panel]:
    """The panels of an algorithm, with one more for each source of validation tasks."""
    found = [match for key in group.series if (match := ACCURACY.fullmatch(key))]
    panels = []
    for source in sorted({match["source"] for match in found}):
        most = sorted(int(match["n"]) for match in found if match["source"] == source and match["n"])
        names = ["pass@1", "greedy", *(f"pass@{n}" for n in most if n > 1)]
        curves = [Curve(f"val/{source}/{name}", name, required=name == "pass@1") for name in names]
        panels.append(Panel(f"{source}, held out", "accuracy", tuple(curves), "rate"))
    first, *others = PANELS[group.algo]
    if "dist_p90" in group.series and not group.series["dist_p90"].mean.any():  # there is no goal
        return [panel for panel in others if panel.title != "distance to the goal"]
    if group.algo == "sft":
        return [first, *panels, *others]
    if group.algo != "a2c" and not panels:
        panels = [Panel("held out", "accuracy", (Curve("val/<source>/pass@1"),), "rate")]
    return [*panels, first, *others]


def curves_of(panel: Panel, group: Group) -> list[Curve]:
    """The curves of a panel that the group has; what it lacks is warned of."""
    wanted = [key for curve in panel.curves if curve.required for key in (curve.key, *curve.shade)]
    missing = [key for key in wanted if key not in group.series]
    present = [curve for curve in panel.curves if curve.key in group.series]
    if missing:
        warn("keys missing" if present else "panel skipped: keys missing", panel=panel.title, keys=missing)
    # What a flag switched off is zero throughout (or rounding) and says nothing beside another curve.
    living = [c for c in present if c.required or np.abs(group.series[c.key].mean).max() > 1e-7]
    return living or present


def draw(groups: list[Group], x: str, title: str, note: str, out: Path, only: str = "",
         patterns: list[str] = ()) -> list[str]:
    """Writes the figure; returns the titles of its panels. Raises BadInput when there is nothing to draw."""
    main = groups[0]
    chosen = [Panel(key, "", (Curve(key),)) for key in matching(sorted(main.series), patterns)]
    panels = {panel: curves for panel in chosen or layout(main)
              if only in panel.title and (curves := curves_of(panel, main))}
    if not panels:
        wanted = f"a panel with {only!r} in its title" if only else "any panel"
        raise BadInput(f"no usable record: none has a key of {wanted}")
    columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    width = max(4.0 * columns, 6)  # [inches]
    figure, axes = plt.subplots(rows, columns, figsize=(width, 2.9 * rows + 0.8), squeeze=False,
                                layout="constrained")
    for axis, (panel, curves) in zip(axes.flat, panels.items(), strict=False):
        draw_panel(axis, panel, curves, groups)
        axis.set_xlabel(X_LABELS[x] or ENV_STEPS[main.algo], fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=x != "wall_time_s")
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    if note:
        note = textwrap.fill(note, int(17 * width))  # so many letters of this size to the inch
        figure.supxlabel(note, fontsize=8, color="0.35", x=0.01, ha="left")
    try:
        if not out.suffix:
            raise ValueError("expected a suffix, such as .png")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a suffix that is no picture format
        raise BadInput(f"{out}: cannot be written ({error})") from error
    finally:
        plt.close(figure)
    return [panel.title for panel in panels]


def draw_panel(axis, panel: Panel, curves: list[Curve], groups: list[Group]) -> None:
    several = bool(groups[0].label)
    for number, group in enumerate(groups):
        for place, curve in enumerate(curves):
            if curve.key in group.series and several:
                draw_of_group(axis, curve, group, colors(len(groups))[number], LINES[place % len(LINES)],
                              len(curves) > 1)
            elif curve.key in group.series and place < len(COLORS):
                draw_curve(axis, curve, COLORS[place], group)
    for at in [] if several else groups[0].resumes:
        axis.axvline(at, color="0.45", linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(labelsize=8, length=3, color="0.6")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.grid(axis="y", color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        side.set_major_formatter(FuncFormatter(tick))
    if panel.y == "rate":
        axis.set_ylim(-0.02, 1.02)
    elif panel.y == "zero" and axis.dataLim.y1 > 0:
        axis.set_ylim(0, 1.06 * axis.dataLim.y1)
    if labels := axis.get_legend_handles_labels()[1]:
        # Many curves leave no room inside: their legend stands beside them.
        beside = dict(loc="center left", bbox_to_anchor=(1.0, 0.5)) if len(labels) > 4 else {}
        axis.legend(fontsize=7.5, framealpha=0.4, edgecolor="none", **beside)


def tick(value: float, _position: int) -> str:
    """20k and 1.5M, but 0.05 and 2e-05 as they are."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def colors(number: int) -> list:
    """So many different ones."""
    if number <= len(COLORS):
        return list(COLORS)
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def draw_of_group(axis, curve: Curve, group: Group, color, line, named: bool) -> None:
    """A curve of one of several groups: its colour is the group's, its line the curve's."""
    s = group.series[curve.key]
    label = f"{group.label}, {curve.label}" if named and curve.label else group.label
    axis.plot(s.x, s.mean, color=color, linestyle=line, linewidth=1.4, zorder=3, label=label)
    if s.n > 1:
        axis.fill_between(s.x, s.low, s.high, color=color, alpha=0.15, linewidth=0)


def draw_curve(axis, curve: Curve, color: str, group: Group) -> None:
    """A line, its band over the runs, and the quantiles around it; a control is dashed and lighter."""
    s = group.series[curve.key]
    few = len(s.x) <= 40
    style = {"marker": "o" if few else None, "markersize": 2.5, "linewidth": 1.5, "zorder": 3}
    label = curve.label
    if group.label:
        style |= {"linestyle": (0, (4, 2)), "marker": None, "linewidth": 1.2, "zorder": 2}
        label = f"{label}, {group.label}" if label else group.label
    axis.plot(s.x, s.mean, color=color, label=label or None, **style)
    if s.n > 1:
        axis.fill_between(s.x, s.low, s.high, color=color, alpha=0.12 if group.label else 0.22, linewidth=0)
    if not group.label and curve.shade and all(key in group.series for key in curve.shade):
        low, high = (group.series[key] for key in curve.shade)
        top = np.interp(low.x, high.x, high.mean)
        axis.fill_between(low.x, low.mean, top, color="0.5", alpha=0.2, linewidth=0, label="10 % to 90 %")


def describe(groups: list[Group], smoothing: int) -> tuple[str, str]:
    """The title and the line under the figure: what a line, a band and a dotted vertical are."""
    main = groups[0]
    several = bool(main.label)
    parts = [main.algo, main.env, f"{main.runs} runs" if main.runs > 1 and not several else ""]
    notes = []
    if any(group.runs > 1 for group in groups):
        notes.append("line: mean over the runs, band: lowest to highest")
    if several:
        notes.append("runs: " + ", ".join(f"{group.label} ({group.runs})" for group in groups))
    else:
        notes += [f"dashed: {group.label} ({group.runs} run{'s' * (group.runs > 1)})" for group in groups[1:]]
    if smoothing > 1:
        notes.append(f"moving average over {smoothing} records, validation as it is")
    if main.resumes and not several:
        notes.append("dotted vertical: resumed")
    return " · ".join(filter(None, parts)), " · ".join(notes)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the curves of train_log.jsonl files.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--log", nargs="+", action="append", metavar="LOG",
                        help="logs or run folders: the seeds of one experiment; again for another one")
    source.add_argument("--from-csv", type=Path, metavar="CSV", help="draw what an earlier --csv wrote")
    parser.add_argument("--label", nargs="+", default=[], metavar="NAME",
                        help="a name for each --log (default: the flags in which they differ)")
    parser.add_argument("--control", nargs="+", default=[], metavar="LOG",
                        help="logs of a control, drawn dashed where it has the key")
    parser.add_argument("--control-label", default="control", help="its name in the figure")
    parser.add_argument("--out", type=Path, default=Path("train.png"), help="the figure (.png, .svg, .pdf)")
    parser.add_argument("--csv", type=Path, help="write the numbers behind the figure here")
    parser.add_argument("--x", choices=sorted(X_LABELS), default="env_steps", help="the horizontal axis")
    parser.add_argument("--smoothing", type=int, default=1, metavar="W",
                        help="centred moving average over W records of training [records]")
    parser.add_argument("--panel", default="", metavar="TEXT",
                        help="only the panels that have this in their titles, such as 'held out'")
    parser.add_argument("--key", nargs="+", default=[], metavar="KEY",
                        help="in place of the panels: these numbers, such as 'train/rows/*', one panel each")
    parser.add_argument("--title", default="", help="instead of algorithm, environment and number of runs")
    args = parser.parse_args(argv)
    names = [*args.label, args.control_label] if args.control else args.label
    if args.label and (args.from_csv or len(args.label) != len(args.log) or len({*names}) < len(names)):
        parser.error(f"--label {' '.join(args.label)}: expected a different name for each --log")
    if args.smoothing < 1:
        parser.error(f"--smoothing {args.smoothing}: expected at least 1 record")
    return args


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    if args.from_csv:
        x, groups = read_csv(args.from_csv)
    else:
        x = args.x
        groups = [read_group(paths, "", x, args.smoothing, args.key) for paths in args.log]
        if args.label:
            for group, label in zip(groups, args.label, strict=True):
                group.label = label
        elif len(groups) > 1:
            name_groups(groups, args.log)
        if args.control:
            groups.append(read_group(args.control, args.control_label, args.x, args.smoothing, args.key))
    title, note = describe(groups, args.smoothing)
    panels = draw(groups, x, args.title or title, note, args.out, args.panel, args.key)
    if args.csv:
        write_csv(args.csv, x, groups)
    return {"out": str(args.out), "panels": panels, "runs": [group.runs for group in groups]}


if __name__ == "__main__":
    sys.exit(main())
