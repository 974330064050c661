"""Check a train_log.jsonl against schema version 1 (docs/train_log.md).

    python tools/validate_train_log.py runs/countdown/20261121_041500__grpo__countdown__s1
    python tools/validate_train_log.py train_log.jsonl --strict

LOG is the file, or the run folder that holds it. The verdict is JSON on standard output; the exit status is 0
for a sound log and 1 otherwise. Any file gets a verdict, however broken. Tests of the training scripts call
`validate(path)`; the tables below are the contract that the scripts' METRICS fill.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

SCHEMA_VERSION = 1
ALGOS = ("sft", "ppo", "grpo", "a2c")
MOST_ANOMALIES = 200  # listed; the rest are counted, since a run gone wrong repeats itself on every line
COUNTERS = ("iteration", "env_steps", "opt_steps")

# Kinds of value. text: not empty; number: int or float, never a bool; amount: a number from 0; count: an int
# from 0; rate: a number in [0, 1]; utc: ISO 8601 with its offset; `_or_null`: none, or not known.


def _keys(**names: str) -> dict[str, str]:
    """key -> kind, from kind="key key/{a,b}"."""
    table = {}
    for kind, text in names.items():
        for name in text.split():
            before, _, rest = name.partition("{")
            table |= {before + part: kind for part in rest.rstrip("}").split(",")}
    return table


META = _keys(count="schema_version", text="run_id algo config_hash device", text_or_null="env git_sha",
             flag_or_null="git_dirty", integer="seed", object="args versions", texts="argv", utc="started_at")
VERSIONS = _keys(text="python torch numpy")
META_LLM = _keys(string="model", text="model_sha256")  # model is "" when it starts from random weights
META_A2C = _keys(count="num_envs num_actions", count_or_null="frames_per_step stack_k",
                 text_or_null="action_codec_id goal_dir goal_sha256")
META_ROM = _keys(text="rom_path rom_sha256", text_or_null="state_path state_sha256",
                 count="release_after_frames")
RESUME = _keys(text="run_id trace_id checkpoint", count="iteration env_steps opt_steps",
               text_or_null="git_sha", utc="at")
ERROR = _keys(text="type", string="message", text_or_null="receipt")

COMMON = _keys(text="run_id trace_id", count="iteration env_steps opt_steps", amount="wall_time_s sps")
SFT = _keys(
    number="train/loss train/learning_rate train/epoch",
    count="train/global_step",
    amount="train/throughput train/grad_norm system/memory_usage",
)
_PPO_AND_GRPO = _keys(
    number="""train/policy_loss train/kl_loss train/entropy train/reward train/advantage train/approx_kl
        train/learning_rate critic/score/{mean,max,min} critic/rewards/{mean,max,min}
        critic/advantages/{mean,max,min} critic/returns/{mean,max,min} response_length/{mean,max,min}
        prompt_length/{mean,max,min} mismatch/kl mismatch/ratio_max""",
    count="train/global_step",
    amount="train/grad_norm rollout/throughput rollout/turns time/{rollout,update,sync,eval,checkpoint}",
    rate="train/clipfrac response_length/clip_ratio rollout/finished mismatch/frac_capped",
)
GRPO = _PPO_AND_GRPO | _keys(count="rollout/groups_submitted rollout/groups_trainable")
PPO = _PPO_AND_GRPO | _keys(
    number="""train/value_loss critic/values/{mean,max,min} critic/vf_loss critic/vpred_mean
        critic/vf_explained_var""",
    amount="critic/grad_norm",
    rate="critic/vf_clipfrac",
)
A2C = _keys(
    number="reward_mean dist_p10 dist_p50 dist_p90 entropy_mean value_mean",
    amount="value_std",
    rate="done_rate trunc_rate reset_rate success_rate",
    histogram="action_hist",
)
REQUIRED = {"sft": SFT, "ppo": PPO, "grpo": GRPO, "a2c": A2C}  # of a training record, beside COMMON

# Families of keys of which a training record needs at least one, whatever the name.
_TEXT_FAMILIES = {"rollout/termination/<reason>": "rollout/termination/.+", "system/<name>": "system/.+"}
FAMILIES = {
    "sft": {}, "ppo": _TEXT_FAMILIES, "grpo": _TEXT_FAMILIES,
    "a2c": {"<name>_loss": ".*loss", "grad_norm": ".*grad_norm"},
}
# Keys that need not be there but have a kind when they are.
OPTIONAL = {
    "rate": "rollout/termination/.+|val/.+/(pass@[0-9]+|greedy|correct)|(val|eval)/(.+[/_])?success_rate",
    "number": "(val|eval)/.+|system/gpu_utilization",
}
PASS_AT = re.compile(r"val/(.+)/pass@([1-9][0-9]*)")


def validate(path, strict: bool = False) -> dict:
    """The verdict on one log: ok, records, resumes, errors, first, last, anomalies, warnings.

    path: the file or its run folder. A cut-off last line is a warning, with strict an anomaly. Never raises
    for what a file holds.
    """
    path = Path(path)
    checker = Checker(strict)
    try:
        if path.is_dir():
            path = path / "train_log.jsonl"
        if not path.is_file():  # also keeps away from pipes and devices, which may never end
            checker.wrong(None, "file", "is not a file" if path.exists() else "does not exist")
            return checker.verdict(path)
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                checker.line(number, raw)
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        checker.wrong(None, "file", f"cannot be read ({type(error).__name__})")
        return checker.verdict(path)
    checker.end()
    return checker.verdict(path)


class Checker:
    """Reads the lines of one log in order and keeps what the later ones are held against."""

    def __init__(self, strict: bool):
        self.strict = strict
        self.anomalies, self.warnings, self.left_out = [], [], 0
        self.metas = self.records = self.resumes = self.errors = self.lines = 0
        self.run_id = self.algo = self.num_actions = None
        self.first = self.last = None
        self.floor = {}  # counters of the last record; the next one may not be below
        self.resumed = {}  # counters of a resume line with no record after it yet

    def wrong(self, line, field, what) -> None:
        if len(self.anomalies) < MOST_ANOMALIES:
            self.anomalies.append({"line": line, "field": clip(field), "wrong": what})
        else:
            self.left_out += 1

    def verdict(self, path) -> dict:
        return {
            "ok": not self.anomalies, "log": str(path), "records": self.records, "resumes": self.resumes,
            "errors": self.errors, "first": self.first, "last": self.last, "anomalies": self.anomalies,
            "anomalies_left_out": self.left_out, "warnings": self.warnings,
        }

    def line(self, number: int, raw: bytes) -> None:
        self.lines = number
        repeated = []
        try:
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: unique(pairs, repeated))
        except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or 5,000 digits
            if not raw.endswith(b"\n") and is_open(raw):
                cut = {"line": number, "field": "line", "wrong": "cut off: the process died while writing"}
                (self.anomalies if self.strict else self.warnings).append(cut)
            else:
                self.wrong(number, "line", f"invalid JSON: {clip(reason(error, raw))}")
            return
        for key in repeated:
            self.wrong(number, key, "the key stands twice in one object")
        if not isinstance(value, dict):
            self.wrong(number, "line", f"expected an object, got {show(value)}")
            return
        for field, what in unreadable_numbers(value):
            self.wrong(number, field, what)
        if "meta" in value:
            self.meta(number, value["meta"])
        elif "resume" in value:
            self.resume(number, value["resume"])
        elif "error" in value:
            self.error(number, value)
        else:
            self.record(number, value)

    def end(self) -> None:
        if not self.lines:
            self.wrong(None, "file", "is empty")
        if not self.metas:
            self.wrong(1, "meta", "line 1 must be the meta line; there is none")
        if not self.records:
            self.wrong(self.lines, "record", "there is no record")

    def meta(self, line: int, meta) -> None:
        self.metas += 1
        if self.metas > 1:
            self.wrong(line, "meta", "there is more than one meta line")
            return
        if line > 1:
            self.wrong(line, "meta", "the meta line must be line 1")
        if not self.keys(line, meta, META, "meta"):
            return
        algo = meta.get("algo")
        if isinstance(algo, str) and algo not in ALGOS:
            self.wrong(line, "meta.algo", f"expected one of {', '.join(ALGOS)}, got {show(algo)}")
        elif isinstance(algo, str):
            self.algo = algo
        version = meta.get("schema_version")
        if is_number(version) and version != SCHEMA_VERSION:
            self.wrong(line, "meta.schema_version", f"unknown: {show(version)}, expected {SCHEMA_VERSION}")
        if isinstance(meta.get("versions"), dict):
            self.keys(line, meta["versions"], VERSIONS, "meta.versions")
        if self.algo == "a2c":
            rom = any(key in meta for key in META_ROM) or meta.get("env") == "pyboy"
            self.keys(line, meta, META_A2C | (META_ROM if rom else {}), "meta")
            self.num_actions = meta.get("num_actions")
        elif self.algo:
            self.keys(line, meta, META_LLM, "meta")
        self.same_run(line, "meta.run_id", meta.get("run_id"))

    def record(self, line: int, record: dict) -> None:
        self.records += 1
        needed = dict(COMMON)
        if self.algo and not is_validation_only(record, self.algo):
            needed |= REQUIRED[self.algo]
            for family, pattern in FAMILIES[self.algo].items():
                if not any(re.fullmatch(pattern, key) for key in record):
                    self.wrong(line, family, "missing: at least one such key is required")
        self.keys(line, record, optional_keys(record) | needed, "")
        self.same_run(line, "run_id", record.get("run_id"))
        self.trace(line, "trace_id", record)
        self.forward(line, record)
        if self.algo == "a2c":
            self.pixels(line, record)
        elif self.algo:
            self.fractions(line, record)

    def resume(self, line: int, resume) -> None:
        self.resumes += 1
        if not self.keys(line, resume, RESUME, "resume"):
            return
        self.same_run(line, "resume.run_id", resume.get("run_id"))
        self.trace(line, "resume.trace_id", resume)
        # A resume cuts off the records past its checkpoint and keeps the resume lines. So it stands at or
        # after the last record, while an earlier resume, from a later checkpoint, is no lower bound for it.
        self.resumed = {name: resume[name] for name in COUNTERS if is_count(resume.get(name))}
        for name, value in self.resumed.items():
            if value < self.floor.get(name, 0):
                what = f"goes back from {show(self.floor[name])} to {show(value)}"
                self.wrong(line, f"resume.{name}", what)

    def error(self, line: int, value: dict) -> None:
        self.errors += 1
        self.keys(line, value["error"], ERROR, "error")
        self.keys(line, value, {"trace_id": "text"}, "")
        trace_id = value.get("trace_id")
        if not isinstance(trace_id, str):
            return
        run_id, _, opt_steps = trace_id.rpartition(":")
        if not re.fullmatch("[0-9]+", opt_steps):
            self.wrong(line, "trace_id", f"expected <run_id>:<opt_steps>, got {show(trace_id)}")
        else:
            self.same_run(line, "trace_id", run_id)

    def keys(self, line: int, value, kinds: dict, where: str) -> bool:
        """Every key there and of its kind; False when `value` is no object at all."""
        if not isinstance(value, dict):
            self.wrong(line, where, f"expected an object, got {show(value)}")
            return False
        for key, kind in kinds.items():
            field = f"{where}.{key}" if where else key
            if key not in value:
                self.wrong(line, field, "missing")
            elif (what := misfit(kind, value[key])) is not None:
                self.wrong(line, field, what)
        return True

    def same_run(self, line: int, field: str, run_id) -> None:
        if not isinstance(run_id, str):
            return  # reported as missing or of the wrong type
        if self.run_id is None:
            self.run_id = run_id
        elif run_id != self.run_id:
            self.wrong(line, field, f"the run_id changes from {show(self.run_id)} to {show(run_id)}")

    def trace(self, line: int, field: str, value: dict) -> None:
        run_id, opt_steps, trace_id = value.get("run_id"), value.get("opt_steps"), value.get("trace_id")
        if isinstance(run_id, str) and is_count(opt_steps) and isinstance(trace_id, str):
            if trace_id != f"{run_id}:{opt_steps}":
                expected = clip(f"{run_id}:{opt_steps}")
                self.wrong(line, field, f"expected <run_id>:<opt_steps> = {expected}, got {show(trace_id)}")

    def forward(self, line: int, record: dict) -> None:
        counters = {name: record[name] for name in (*COUNTERS, "wall_time_s") if is_number(record.get(name))}
        for name, value in counters.items():
            before = max(self.floor.get(name, 0), self.resumed.get(name, 0))
            if value < before:
                self.wrong(line, name, f"goes back from {show(before)} to {show(value)}")
        self.floor, self.resumed = self.floor | counters, {}
        self.last = counters
        self.first = self.first or counters

    def pixels(self, line: int, record: dict) -> None:
        for low, high in (("dist_p10", "dist_p50"), ("dist_p50", "dist_p90")):
            if is_number(record.get(low)) and is_number(record.get(high)) and record[low] > record[high]:
                self.wrong(line, low, f"{show(record[low])} is over {high}, {show(record[high])}")
        counts = record.get("action_hist")
        if isinstance(counts, list) and is_count(self.num_actions) and len(counts) != self.num_actions:
            self.wrong(line, "action_hist", f"expected {self.num_actions} counts, got {len(counts)}")

    def fractions(self, line: int, record: dict) -> None:
        reasons = [key for key in record if key.startswith("rollout/termination/")]
        parts = [record[key] for key in reasons if is_number(record[key])]
        if parts and len(parts) == len(reasons) and abs(math.fsum(parts) - 1) > 1e-6:
            what = f"the fractions sum to {math.fsum(parts):.9g}, not 1"
            self.wrong(line, "rollout/termination/<reason>", what)
        for key, value in record.items():
            match = PASS_AT.fullmatch(key)
            once = record.get(f"val/{match[1]}/pass@1") if match else None
            if is_number(once) and is_number(value) and value < once - 1e-9:
                self.wrong(line, key, f"{show(value)} is below pass@1, {show(once)}")


def is_validation_only(record: dict, algo: str) -> bool:
    """A record that only evaluates, as the one before the first update: counters, val/ and data/ keys do."""
    trained = A2C.__contains__ if algo == "a2c" else lambda key: key.startswith("train/")
    return any(key.startswith(("val/", "data/")) for key in record) and not any(map(trained, record))


def optional_keys(record: dict) -> dict[str, str]:
    """The keys of a record that need not be there but have a kind -> that kind."""
    found = {}
    for key in record:
        kind = next((kind for kind, pattern in OPTIONAL.items() if re.fullmatch(pattern, key)), None)
        if kind:
            found[key] = kind
    return found


def is_finite(value) -> bool:
    """Finite, and within 64 bits when an integer: what a reader in another language can hold."""
    return math.isfinite(value) if isinstance(value, float) else -(2**63) <= value < 2**64


def is_number(value) -> bool:
    """An int or a float that can be compared: not a bool, not NaN, not infinite, not over 64 bits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)


def is_count(value) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


def misfit(kind: str, value) -> str | None:
    """What is wrong with `value` as one of the kinds above; None when nothing is."""
    if kind.endswith("_or_null"):
        return None if value is None else misfit(kind.removesuffix("_or_null"), value)
    if kind == "histogram":
        return histogram_misfit(value)
    if kind in ("number", "integer", "amount", "count", "rate"):
        return number_misfit(kind, value)
    expected, fits = {
        "text": ("text", isinstance(value, str) and value != ""),
        "string": ("text", isinstance(value, str)),
        "texts": ("a list of text", isinstance(value, list) and all(isinstance(item, str) for item in value)),
        "object": ("an object", isinstance(value, dict)),
        "flag": ("true or false", isinstance(value, bool)),
        "utc": ("a UTC time in ISO 8601", is_utc(value)),
    }[kind]
    return None if fits else f"expected {expected}, got {show(value)}"


def number_misfit(kind: str, value) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"expected a number, got {show(value)}"
    if not is_finite(value):
        return None  # reported for every field of the line by unreadable_numbers
    if kind in ("count", "integer") and not isinstance(value, int):
        return f"expected an integer, got {show(value)}"
    if kind in ("count", "amount") and value < 0:
        return f"expected at least 0, got {show(value)}"
    if kind == "rate" and not 0 <= value <= 1:
        return f"expected a rate in [0, 1], got {show(value)}"
    return None


def histogram_misfit(value) -> str | None:
    if not isinstance(value, list):
        return f"expected a list of counts, got {show(value)}"
    for index, count in enumerate(value):
        if (what := misfit("count", count)) is not None:
            return f"count {index}: {what}"
    return None


def is_utc(value) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except (TypeError, ValueError, OverflowError):
        return False


def unreadable_numbers(value: dict):
    """Yields (field, what is wrong) for every number of a line that is not finite, at any depth."""
    stack = [("", value)]  # not recursion: the parser reads deeper than a Python function may call itself
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            stack += [(f"{path}.{key}"[-200:] if path else key, part) for key, part in item.items()]
        elif isinstance(item, list):
            stack += [(path, part) for part in item]
        elif isinstance(item, (int, float)) and not is_finite(item):
            yield path, "an integer over 64 bits" if isinstance(item, int) else f"not finite: {item}"


def unique(pairs: list, repeated: list) -> dict:
    """The object of `pairs`. Keys that stand twice go into `repeated`: readers differ on which one counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen = set()
        repeated += sorted({key for key, _ in pairs if key in seen or seen.add(key)})
    return value


def is_open(raw: bytes) -> bool:
    """Whether a line that does not parse is an object whose end is missing: more braces open than close."""
    text = raw.decode("utf-8", errors="replace").lstrip()
    # Possessive (*+): a long line leaves no places to go back to.
    bare = re.sub(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', "", text, flags=re.DOTALL)
    return text.startswith("{") and bare.count("{") > bare.count("}")


def reason(error: Exception, raw: bytes) -> str:
    if not raw.strip():
        return "the line is empty"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error) if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {error}"


def show(value) -> str:
    """A value in a message: short, whatever it holds."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else clip(json.dumps(value))


def clip(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a train_log.jsonl; the verdict is JSON on stdout.")
    parser.add_argument("log", help="train_log.jsonl, or the run folder that holds it")
    parser.add_argument("--strict", action="store_true", help="a cut-off last line fails too")
    args = parser.parse_args()
    verdict = validate(args.log, strict=args.strict)
    print(json.dumps(verdict, indent=2))
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
