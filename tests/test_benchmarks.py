"""What a benchmark lacks. A token in update_memory.py. Runs of losses.py and smollm2.py. refresh.py."""

import csv
import functools
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from transformers import LlamaConfig

from benchmarks import losses, refresh, sides, smollm2
from tests.run_folders import ROOT, load_script, needs_git, records, variants

ARGUMENTS = {"a2c_vs_sb3": "scale", "agent": "", "exercises": "--table", "gpu": "all --out OUT",
             "grpo_vs_trl": "step", "iteration": "", "logic": "--out OUT", "losses": "--list",
             "openspiel": "", "overlap": "", "pixel_goal": "speed", "ppo_vs_a2c": "--list", "rewards": "",
             "rollout": "", "sampler": "updates", "scaling": "", "sft_vs_trl": "speed",
             "smollm2": "--jobs 1", "time_to": "", "update_memory": ""}
HIDDEN, INNER, HEADS, WORDS, LAYERS = 256, 704, 4, 1000, 2


def test_every_benchmark_says_in_one_line_what_its_environment_lacks(tmp_path):
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"refresh", "sides"}
    assert programs == set(ARGUMENTS)
    for name, words in ARGUMENTS.items():
        path = ROOT / f"benchmarks/{name}.py"
        command = [sys.executable, "-S", path, *words.split()]  # -S: without the packages that are installed
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and not done.stdout, name
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {sys.executable} has no "), line
        assert line.endswith("; run: pip install -r requirements.txt"), line


def test_the_time_to_a_goal_is_that_of_the_blocks_up_to_the_third_evaluation_in_a_row(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import time_to

    def rows(*greedy, sampled=0.95):
        return [dict(iteration=10 * k, seconds=2.0, greedy=value, sampled=sampled)
                for k, value in enumerate(greedy)]

    reached = rows(0.5, 0.97, 0.93, 0.94, 0.95, 0.96, 1.0)
    assert time_to.time_to(reached) == 10.0  # the start is no block; 0.94, 0.95 and 0.96 are the first
    assert time_to.time_to(rows(0.96, 0.96, 0.96)) == 4.0
    assert time_to.time_to(reached[:5]) == time_to.time_to(rows(1, 1, 1, sampled=0.89)) == math.inf


def test_each_trick_of_the_script_can_be_taken_out(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import iteration
    whole = (ROOT / "grpo_llm.py").read_text()
    for trick in iteration.TRICKS:
        text = iteration.without(trick, tmp_path).read_text()
        compile(text, trick, "exec")
        assert text.count("\n") == whole.count("\n") and text != whole


def test_the_other_sides_environment_is_looked_at_before_anything_starts(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    sides.check_environment("json", "csv", python=str(bare), made_by="trl")
    gone = tmp_path / "gone"
    for python, says in ((bare, f"{bare} has no torch, trl"), (gone, f"there is no {gone}")):
        with pytest.raises(SystemExit) as ended:
            sides.check_environment("torch", "json", "trl", python=str(python), made_by="trl")
        assert ended.value.code == f"error: {says}; run: sh benchmarks/make_trl_env.sh"


@pytest.fixture
def reckon(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import update_memory
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, vocab_size=WORDS, tie_word_embeddings=True)
    return functools.partial(update_memory.reckon, config)


def test_a_token_takes_what_a_count_by_hand_says_and_a_quarter_at_most_with_checkpointing(reckon):
    # Twice a norm: what comes in and what it is normalised to, in float32, and the latter in bfloat16.
    norms = 2 * (4 + 4 + 2) * HIDDEN
    attention = (3 + 1) * 2 * HIDDEN + 4 * HEADS  # queries, keys, values, output; a float32 sum of each head
    inner = 4 * 2 * INNER  # the gate, its activation, what it multiplies, the product
    figures = reckon(0)
    assert figures["layer"] > 4 * figures["layer_checkpointed"]
    assert figures["layer"] == pytest.approx(norms + attention + inner, rel=0.25)
    assert figures["layer_checkpointed"] == pytest.approx(4 * HIDDEN, rel=0.05)  # what comes in, in float32
    # Beside the layers: what the last norm takes.
    assert figures["token"] == pytest.approx(LAYERS * figures["layer"] + norms / 2, rel=0.05)
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert figures["trained"] == 4 * (matrices + (WORDS + 2 * LAYERS + 1) * HIDDEN)
    assert figures["frozen"] == 0
    assert figures["casts"] == pytest.approx(2 * matrices, rel=0.05)


@pytest.mark.slow  # two seconds, and it holds little that the first does not
def test_with_an_adapter_the_weights_are_frozen_and_checkpointing_keeps_a_quarter_at_most(reckon):
    figures = reckon(16)
    assert figures["layer"] > 4 * figures["layer_checkpointed"] > 0
    # Beside what is kept: a layer that is computed again, and its gradients.
    assert 2 * figures["layer"] < figures["token_checkpointed"] < 2.2 * figures["layer"]
    matrices = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert figures["frozen"] == 2 * (matrices + (WORDS + 2 * LAYERS + 1) * HIDDEN)
    assert figures["trained"] == 4 * LAYERS * 16 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))


def test_a_rate_is_the_one_of_the_largest_mean_area_once_all_its_seeds_have_ended():
    method = ("countdown", "pg", "tis", "mean")
    areas = {0.5: (0.7, 0.9), 1.0: (0.9, 0.6), 2.0: (0.1, 0.95)}
    rows = [dict(stage="rates", problem="countdown", loss="pg", correction="tis", baseline="mean",
                 factor=str(factor), area=str(area)) for factor, both in areas.items() for area in both]
    assert losses.chosen_factor(method, rows) == 0.5
    assert math.isnan(losses.chosen_factor(method, rows[1:]))
    assert math.isnan(losses.chosen_factor(("countdown", "pg", "mis", "mean"), rows))


def test_the_table_in_docs_has_each_run_of_the_plan_once():
    rows = losses.read_csv(ROOT / "docs/results/losses.csv")
    for stage in ("rates", "grid", "knobs"):
        jobs = losses.jobs_of(stage, rows, [*losses.PROBLEMS])
        of_stage = [row for row in rows if row["stage"] == stage]
        made = [losses.Job(*(row[name] for name in losses.Job._fields)).name for row in of_stage]
        assert sorted(job.name for job in jobs) == sorted(made), stage


def test_an_interval_is_students_t():
    mean, half = losses.interval([0.1, 0.2, 0.4])
    assert (mean, half) == pytest.approx((0.7 / 3, 4.303 * statistics.stdev([0.1, 0.2, 0.4]) / 3**0.5))
    assert math.isnan(losses.interval([0.5])[1])


def test_a_method_is_compared_by_seed(capsys):
    areas = {("clip", "none"): (0.5, 0.7, 0.6), ("gspo", "none"): (0.8, 0.6, 0.7),
             ("pg", "tis"): (0.1, 0.2, 0.3)}
    rows = [dict(stage="grid", problem="countdown", loss=loss, correction=correction, baseline="mean",
                 staleness="4", factor="1.0", seed=str(seed), knob="", collapsed="0", greedy="0.5",
                 temperature_1="0.5", pass_16="0.5", area=str(area), entropy="0.5")
            for (loss, correction), of_method in areas.items() for seed, area in enumerate(of_method)]
    rows.reverse()
    half = 4.303 * statistics.stdev([0.3, -0.1, 0.1]) / 3**0.5
    assert losses.paired(rows[3:6], rows[6:], "area") == pytest.approx((0.1, half))
    assert losses.paired(rows[3:4], rows[6:], "area")[0] == pytest.approx(0.1)
    assert math.isnan(losses.paired(rows[3:6], [], "area")[0])
    losses.print_tables(rows)
    lines = {line.split(" | ")[1]: line for line in capsys.readouterr().out.splitlines() if " | " in line}
    assert lines["gspo, none, mean"].endswith(f"| +0.100 ± {half:.3f} |")
    assert lines["clip, none, mean"].endswith("|  |") and "-0.400 ±" in lines["pg, tis, mean"]
    assert losses.reference_of("grid", "clip, tis, loo", 4) == "pg, tis, mean"
    assert losses.reference_of("grid", "clip, tis, loo", 0) == "clip, tis, mean"


@pytest.mark.slow
@pytest.mark.release
def test_runs_of_losses_go_on_after_a_kill_and_end_once(tmp_path):
    table, runs = tmp_path / "losses.csv", tmp_path / "runs"
    command = [sys.executable, ROOT / "benchmarks/losses.py", "--stage", "rates", "--problems", "countdown",
               "--smoke", "--first", "2", "--csv", table, "--runs", runs]
    first = losses.jobs_of("rates", [], ["countdown"])[0]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        while not [*runs.glob(f"{first.name}/checkpoints/step_000002")]:
            assert process.poll() is None
            time.sleep(0.05)
        losses.os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(command, cwd=ROOT, check=True)
    log = (runs / first.name / "train_log.jsonl").read_text()
    assert log.count('{"resume"') == 1
    rows = [*csv.DictReader(table.open())]
    assert [(row["loss"], row["staleness"], row["seed"]) for row in rows] == [
        ("clip", "4", "11"), ("clip", "4", "12")]
    last = records(runs / first.name)[-1]
    assert float(rows[0]["greedy"]) == pytest.approx(last["val/countdown/greedy"], abs=1e-4)
    assert {record.get("rollout/staleness") for record in records(runs / first.name)[1:]} == {0, 1, 2, 3, 4}
    subprocess.run(command, cwd=ROOT, check=True)  # the next two
    assert len([*csv.DictReader(table.open())]) == 4
    assert (runs / first.name / "train_log.jsonl").read_text() == log
    subprocess.run([sys.executable, ROOT / "benchmarks/losses.py", "--table", "--csv", table], check=True)


def test_runs_of_a_real_model_are_commands_of_their_scripts(tmp_path):
    """Each starts from one that was planned before it, and its script takes its flags."""
    known = {smollm2.MODEL}
    for run in smollm2.planned():
        assert run.needs <= known and run.name not in known
        assert run.name != "rejection_1" or run.needs == {"form_1", "sampled_1"}
        known.add(run.name)
        words = frozenset(str(flag) for flag in run.flags if str(flag).startswith("--"))
        if run.script and (run.script, words) not in known:  # one of each kind: parsing takes a while
            known.add((run.script, words))
            script = load_script(variants().get(run.script, ROOT / run.script))
            (tmp_path / run.start / "checkpoints" / "step_9").mkdir(parents=True, exist_ok=True)
            if run.start.startswith("lora"):
                (tmp_path / run.start.replace("lora", "form") / "checkpoints" / "step_9").mkdir(
                    parents=True, exist_ok=True)
            line = smollm2.command_of(run, tmp_path)[2:]
            assert tyro.cli(script.Args, args=line).run_dir == str(tmp_path / run.name)
    assert set(smollm2.COMPARED) <= known


def test_the_table_of_a_real_model_has_each_evaluation_and_the_time_without_them(tmp_path, capsys):
    folder = tmp_path / "grpo_2"
    folder.mkdir()
    lines = []
    for iteration in (0, 1, 2, 2):  # one twice, as by a run that went on
        record = dict(iteration=iteration, env_steps=100 * iteration) | {
            "time/rollout": 40.0, "time/update": 20.0, "time/eval": 99.0, "system/memory_usage": 3.0}
        if iteration != 1:
            names = ("greedy", "pass@1", "pass@16")
            record |= {f"val/reasoning-gym/chain_sum/{name}": 0.25 for name in names}
        lines.append(json.dumps(record))
    (folder / "train_log.jsonl").write_text("\n".join(lines))
    rows = smollm2.curves(tmp_path)
    assert [(row["iteration"], row["minutes"], row["greedy"]) for row in rows] == [(0, 1, 0.25), (2, 3, 0.25)]
    smollm2.print_table(rows, tmp_path)
    assert "| grpo_2 | 2 | 3.0 | 200 | 0.250 | 0.250 | 0.250 |  | 3.0 |" in capsys.readouterr().out


def test_the_table_of_ppo_has_the_first_record_that_reaches_the_target(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ppo_vs_a2c
    curves = {("ppo_vecenv", 1): (10, 500, 9), ("ppo_vecenv", 2): (10, 20, 30),
              ("a2c_vecenv", 1): (10, 20, 500)}
    rows = [dict(problem="CartPole-v1", script=script, seed=str(seed), env_steps=str(1000 * number),
                 cpu_s=str(2.0 * number), value=str(value))
            for (script, seed), values in curves.items() for number, value in enumerate(values, 1)]
    ppo_vs_a2c.print_table(rows)
    a2c, ppo = [line.split(" | ")[2:] for line in capsys.readouterr().out.splitlines()[2:]]
    assert a2c == ["a2c_vecenv.py", "3,000", "6.0", "500", "500 |"]
    assert ppo == ["ppo_vecenv.py", "2,000; never", "4.0; never", "500", "9, 30 |"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One with two figures, of what one script writes, and a folder that its first run leaves."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / ".gitignore").write_text("/runs/\n/said\n/*.csv\n/stop\n")
    (tmp_path / "README.md").write_text("![It](dear.csv)\n")
    train = "mkdir -p runs/refresh/a && echo trained >> runs/refresh/a/log && : --run-dir runs/refresh/a"
    made = "mkdir -p runs/refresh && echo import a > runs/refresh/made.py && python runs/refresh/made.py"
    stops = "test ! -e stop && cp runs/refresh/a/log"
    monkeypatch.setattr(refresh, "ROOT", tmp_path)
    monkeypatch.setattr(refresh, "FIGURES", (
        refresh.Figure("dear", ("dear.csv",), ("a.py",), "cost", 2, (train, f"{stops} dear.csv")),
        refresh.Figure("cheap", ("cheap.csv",), ("a.py",), "cost", 1, ("echo cheap >> said", made)),
        refresh.Figure("foreign", ("foreign.csv",), ("a.py",), "cost", 0, ("false",), "no_such_package")))
    commit(tmp_path, "x = 1\n", first=True)
    return tmp_path


def commit(repository, source, first=False):
    (repository / "a.py").write_text(source)
    command = "git add . && git -c user.name=a -c user.email=a@b commit -qm a && git rev-parse --short HEAD"
    done = subprocess.run(f"{'git init -q && ' * first}{command}", shell=True, cwd=repository, check=True,
                          capture_output=True, text=True)
    return done.stdout.strip()


def make_figures(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["refresh.py", *words])
    with pytest.raises(SystemExit) as ended:
        refresh.main()
    assert ended.value.code == int((refresh.ROOT / "stop").exists())
    return {name: entry["commit"] for name, entry in refresh.read_commits(refresh.ROOT).items()}


@needs_git
def test_figures_are_made_once_and_go_on_where_they_stopped(repository, monkeypatch, capsys):
    head = commit(repository, "x = 1  # the first\n")
    (repository / "stop").touch()
    assert make_figures(monkeypatch) == dict(cheap=head)
    said = capsys.readouterr().out
    assert "foreign: left out, no_such_package is not here" in said
    assert "dear: exit status 1 of test ! -e stop" in said
    (repository / "stop").unlink()
    assert make_figures(monkeypatch) == dict(cheap=head, dear=head)
    assert (repository / "dear.csv").read_text() == "trained\n"
    make_figures(monkeypatch)
    assert (repository / "said").read_text() == "cheap\n"


@needs_git
def test_a_run_of_code_that_computes_otherwise_begins_anew(repository, monkeypatch, capsys):
    make_figures(monkeypatch)
    (repository / "a.py").write_text("x = 2\n")
    make_figures(monkeypatch, "--readme")
    assert "dear: left out, a.py is not committed" in capsys.readouterr().out
    head = commit(repository, "x = 2\n")
    old = make_figures(monkeypatch, "--budget", "1.5", "--only", "dear")["dear"]
    assert old != head and "dear: left out, --budget has less than 2 minutes left" in capsys.readouterr().out
    assert make_figures(monkeypatch, "--only", "dear") == dict(dear=head, cheap=old)
    assert (repository / "dear.csv").read_text() == "trained\n"
    monkeypatch.setattr(sys, "argv", ["refresh.py", "--list"])
    refresh.main()
    dear, cheap = (line.split()[2:5] for line in capsys.readouterr().out.splitlines()[-1:-3:-1])
    assert dear == [head, "current,", "in"] and cheap[:2] == [old, "stale:"]
