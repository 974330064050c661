"""docs/reading: the short programs are as plain as they promise, and do what the full scripts do."""

import ast
import csv

import pytest
from transformers import AutoModelForCausalLM

import grpo_llm
import ppo_llm
from tests.density import MOST, density
from tests.run_folders import ROOT, finish, load_script, process, records
from tools import docs_tables, plot_train_log
from tools.validate_train_log import name_of

FULL = {"grpo": grpo_llm, "ppo": ppo_llm}
PATHS = {name: ROOT / "docs" / "reading" / f"{name}.py" for name in FULL}
LINES = {"grpo": 350, "ppo": 400}
DENSITY = MOST | {"longest": 110, "width": 58, "function": 39}
# What the algorithms differ in; all else that both hold under one name is the same to the letter.
DIFFER = {"Args", "SHOWN", "policy_loss", "token_logprobs", "learning_rate", "update", "main"}
cuts = pytest.mark.parametrize("name", FULL)


@cuts
def test_a_cut_is_short_and_plain(name):
    measured = density(PATHS[name])
    bounds = DENSITY | {"lines": LINES[name]}
    assert {figure: measured[figure] for figure in bounds if measured[figure] > bounds[figure]} == {}


def test_density_counts_what_it_says(tmp_path):
    file = tmp_path / "dense.py"
    file.write_text("# a comment\n\na, b = 1, 2\nc, d = (x for x in 'ab')\ne = 1 if a else 2 if b else 3\n"
                    "f = ['', 1] * e + [0] * 3\ng = [[y for y in x] for x in f]\n"
                    "def h():\n    return 'h' * 2\ni, j = (1, 2) if a else (3, 4)\n")
    measured = density(file)
    counts = {name: number * 8 / 1000 for name, number in measured.items() if name not in
              ("lines", "longest", "width", "function")}
    assert counts == dict(pairs=1, unpacked=2, comprehensions=3, conditionals=3, products=2,
                          **{"nested comprehensions": 1, "nested conditionals": 1})
    assert (measured["lines"], measured["function"], measured["longest"]) == (10, 2, 31)


def test_what_both_cuts_hold_is_the_same_to_the_letter():
    texts = {}
    for name, path in PATHS.items():
        source = path.read_text()
        for node in ast.parse(source).body:
            what = getattr(node, "name", None) or isinstance(node, ast.Assign) and node.targets[0].id
            if what:
                texts.setdefault(what, {})[name] = ast.get_source_segment(source, node)
    both = {what: set(found.values()) for what, found in texts.items() if len(found) == 2}
    assert {what for what, found in both.items() if len(found) == 2} == DIFFER
    assert {"generate", "sample", "uniform", "rollout", "evaluate"} <= set(both)


@cuts
def test_flags_are_those_of_the_full_script(name):
    full = {flag.name: flag for flag in docs_tables.flags(ROOT / f"{name}_llm.py")}
    for flag in docs_tables.flags(PATHS[name]):
        assert flag.default == full[flag.name].default, flag
        assert full[flag.name].type.startswith(flag.type), flag


FEWER = {"grpo": dict(iterations=2, prompts_per_iteration=16),
         "ppo": dict(iterations=2, prompts_per_iteration=64, critic_warmup=1)}
DEFAULT = {"grpo": dict(iterations=6), "ppo": dict(iterations=6, critic_warmup=2)}
OTHER = {  # every flag that is not the default, in little
    "grpo": dict(iterations=3, seed=2, prompts_per_iteration=8, group_size=4, microbatch_tokens=100, epochs=3,
                 scale_rewards=True, clip_low=0.05, clip_high=0.1, kl_coef=0.1, temperature=2.0, beta2=0.9,
                 max_grad_norm=0.1, warmup_iterations=1, final_learning_rate=0.5, learning_rate=1e-3,
                 entropy_coef=0.1, max_response_tokens=12, eval_every=2),
    "ppo": dict(iterations=3, seed=2, prompts_per_iteration=24, epochs=2, minibatches=3, critic_epochs=2,
                critic_minibatches=5, critic_warmup=1, critic_learning_rate=2e-3, critic_beta2=0.9, beta2=0.9,
                gae_lambda=0.8, clip=0.05, kl_coef=0.1, temperature=2.0, warmup_iterations=1,
                final_learning_rate=0.5, learning_rate=1e-3, entropy_coef=0.1, max_response_tokens=12,
                eval_every=2),
}
EXACT = ("iteration", "env_steps", "opt_steps", "train/reward", "rollout/", "response_length/", "val/")


@pytest.mark.parametrize("name, flags", [
    ("grpo", OTHER["grpo"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ppo", OTHER["ppo"]), *FEWER.items(), *DEFAULT.items()))])
def test_first_iterations_log_what_the_full_script_logs(name, flags, tmp_path):
    few = dict(eval_every=0, eval_tasks=8, eval_samples=2, env_kwargs=("test_tasks=32",))
    cut = load_script(PATHS[name])
    for script, folder in ((FULL[name], "full"), (cut, "cut")):
        script.main(script.Args(**few | flags, run_dir=str(tmp_path / folder)))
    full, short = records(tmp_path / "full"), records(tmp_path / "cut")
    assert len(short) == len(full) == flags["iterations"] + 1
    learned = {"train/policy_loss", "train/entropy", "train/grad_norm", "train/approx_kl", "train/reward"}
    assert learned <= set(short[-1])
    for theirs, ours in zip(full, short, strict=True):
        for key in ours.keys() - {"wall_time_s"}:
            assert name_of(name, key), f"{key} is not in METRICS"
            tolerance = 1e-7 if key.startswith(EXACT) else 1e-3  # a mean is rounded to float32 here
            assert ours[key] == pytest.approx(theirs[key], tolerance, 1e-3 * tolerance), key
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model")
    start = AutoModelForCausalLM.from_pretrained(cut.Args.model)
    assert not model.get_input_embeddings().weight.equal(start.get_input_embeddings().weight)


@cuts
def test_what_a_cut_cannot_do_is_said_at_once(name, tmp_path):
    cut = load_script(PATHS[name])
    with pytest.raises(SystemExit, match="several turns"):
        cut.main(cut.Args(env="tests/two_turn.py:TwoTurn"))
    (tmp_path / "train_log.jsonl").write_text("a run's\n")
    with pytest.raises(FileExistsError):
        cut.main(cut.Args(run_dir=str(tmp_path)))
    assert (tmp_path / "train_log.jsonl").read_text() == "a run's\n"


@pytest.mark.slow
@cuts
def test_the_default_run_ends_where_those_of_the_full_script_do(name, tmp_path):
    finish(process(f"docs/reading/{name}.py", "--run-dir", tmp_path))
    last = records(tmp_path)[-1]
    with (ROOT / "docs" / "results" / f"{name}_llm.csv").open() as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}  # the last of each metric
    for metric in ("val/countdown/greedy", "val/countdown/pass@1", "val/countdown/pass@16"):
        assert last[metric] > float(rows[metric]["low"]) - 0.03, metric
    assert last["env_steps"] == pytest.approx(float(rows["val/countdown/greedy"]["env_steps"]), rel=0.02)
    figure = tmp_path / "train.png"
    assert plot_train_log.main(["--log", str(tmp_path), "--out", str(figure)]) == 0
    assert figure.stat().st_size > 10_000
