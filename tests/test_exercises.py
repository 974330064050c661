"""docs/reading: each exercise's change applies as it stands, is what the page shows, and has its effect."""

import re
import shlex
import subprocess

import pytest
import torch

from tests.run_folders import ROOT, load_script, records

FOLDER = ROOT / "docs" / "reading" / "exercises"
PAGE = (ROOT / "docs" / "reading" / "README.md").read_text("utf-8")
DIFFS = sorted(path.stem for path in FOLDER.glob("*.diff"))
SHORT = dict(eval_every=0, eval_tasks=64, eval_samples=1)


def section(name):
    """The page's exercise of this name."""
    (found,) = re.findall(rf'^<a id="{name}"></a>\n.*?(?=^<a id=|\Z)', PAGE, re.MULTILINE | re.DOTALL)
    return found


def patched(name, folder):
    """The program that a diff makes of the script that it names.  -> its path, what patch said"""
    diff = FOLDER / f"{name}.diff"
    script = re.search(r"^\+\+\+ b/(\S+)", diff.read_text(), re.MULTILINE)[1]
    made = folder / f"{name}.py"
    done = subprocess.run(["patch", script, diff, "-o", made], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert not done.returncode, done.stdout
    return made, done.stdout


def changed_lines(name):
    lines = (FOLDER / f"{name}.diff").read_text().splitlines()
    return [line for line in lines if re.match(r"[-+](?![-+]{2} )", line)]


@pytest.mark.parametrize("name", DIFFS)
def test_an_exercise_applies_as_it_stands_and_is_what_the_page_shows(name, tmp_path):
    _, said = patched(name, tmp_path)
    assert not re.search("offset|fuzz", said), f"{said}make docs/reading/exercises/{name}.diff anew"
    lines = changed_lines(name)
    assert 1 <= sum(line.startswith("+") for line in lines) <= 5
    shown = re.findall(r"```diff\n(.*?)```", section(name), re.DOTALL)
    assert shown == ["".join(f"{line}\n" for line in lines)], f"{name}: the page shows other lines"
    assert f"git apply docs/reading/exercises/{name}.diff" in section(name)


def test_there_are_eight_exercises_and_at_least_two_are_of_ppo():
    names = re.findall(r'<a id="(\w+)"></a>', PAGE)
    assert len(names) == 8 == len(set(names)) and set(DIFFS) < set(names)
    programs = [re.findall(r"^    python docs/reading/(\w+)\.py", section(name), re.MULTILINE)
                for name in names]
    assert all(programs) and programs.count(["ppo"]) >= 2
    assert all(section(name).count("<details>") == 1 for name in names)


def flags_of(name):
    """The flags of the page's command, but for the folder of the run."""
    (words,) = re.findall(r"^    python docs/reading/\w+\.py(.*)$", section(name), re.MULTILINE)
    return shlex.split(re.sub(r"--(run-dir|iterations|seed) \S+", "", words))


def test_length_normalise_counts_each_response_as_one(tmp_path):
    """On random numbers: a response of 9 tokens pulls as hard as one of 2; unchanged, 4.5 times as hard."""
    for changed, ratio in ((False, 4.5), (True, 1.0)):
        made = patched("length_normalise", tmp_path)[0] if changed else ROOT / "docs/reading/grpo.py"
        script = load_script(made)
        logprobs = torch.zeros(2, 9, requires_grad=True)
        script.token_logprobs = lambda *given, found=logprobs: (found, torch.zeros_like(found))
        mask = (torch.arange(9) < torch.tensor([[9], [2]])).float()
        batch = dict(response_mask=mask, old_logprobs=torch.zeros(2, 9), advantages=torch.ones(2, 1))
        loss, _ = script.batch_loss(None, None, batch, script.Args())
        pull = torch.autograd.grad(loss, logprobs)[0].sum(1)
        assert float(pull[0] / pull[1]) == pytest.approx(ratio, rel=1e-5)


# Slow: the logged number that the page says shows it

# name -> the script, flags without the change, more than the short ones for both
RUNS = {
    "no_baseline": ("grpo", ["--env", "docs/reading/exercises/rewards.py:Shifted"], dict(iterations=2)),
    "scale": ("grpo", [], dict(iterations=2)),
    "length_normalise": ("grpo", [], dict(iterations=3)),
    "no_clip": ("ppo", ["--epochs", "4"], dict(iterations=6, critic_warmup=1, warmup_iterations=1,
                                               prompts_per_iteration=256)),
    "temperature": ("grpo", [], dict(iterations=2)),
    "kl": ("grpo", ["--kl-coef", "1e-6"], dict(iterations=20)),
    "wrong_mask": ("ppo", ["--env-kwargs", "min_operands=2", "max_operands=4"],
                   dict(iterations=3, critic_warmup=1, prompts_per_iteration=128)),
    "hackable": ("grpo", [], dict(iterations=25)),
}


def logged(script, flags, more, folder):
    args = script.tyro.cli(script.Args, args=[*flags, "--run-dir", str(folder)])
    for name, value in (SHORT | more).items():
        setattr(args, name, value)
    script.main(args)
    return records(folder)


@pytest.fixture
def both(request, tmp_path):
    """The logs of an exercise without its change and with it, of one seed."""
    name = request.param
    kind, without, more = RUNS[name]
    path = ROOT / f"docs/reading/{kind}.py"
    before = logged(load_script(path), without, more, tmp_path / "default")
    if name in DIFFS:
        path, _ = patched(name, tmp_path)
        text = path.read_text()
        path.write_text(text.replace("str(Path(__file__).resolve().parents[2])", repr(str(ROOT))))
    after = logged(load_script(path), flags_of(name), more, tmp_path / "changed")
    return before, after


def of(name):
    return pytest.mark.parametrize("both", [name], indirect=True)


@pytest.mark.slow
@of("no_baseline")
def test_without_a_baseline_a_constant_doubles_the_gradient(both):
    before, after = both
    assert after[1]["train/reward"] == before[1]["train/reward"] > 1
    assert after[1]["train/grad_norm"] > 1.5 * before[1]["train/grad_norm"]


@pytest.mark.slow
@of("scale")
def test_dividing_by_the_deviation_doubles_the_gradient(both):
    before, after = both
    assert after[1]["train/reward"] == before[1]["train/reward"]
    assert after[1]["train/grad_norm"] > 1.6 * before[1]["train/grad_norm"]


@pytest.mark.slow
@of("length_normalise")
def test_length_normalise_changes_nothing_where_lengths_are_equal(both):
    before, after = both
    for one, other in zip(before[1:], after[1:], strict=True):
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=0.1)
        assert 8.5 < other["response_length/mean"] < 9.5 > one["response_length/mean"] > 8.5


@pytest.mark.slow
@of("no_clip")
def test_without_a_clip_the_policy_moves_further(both):
    before, after = both
    moved = [sum(record["train/approx_kl"] for record in log[2:]) for log in both]
    assert moved[1] > 1.5 * moved[0]


@pytest.mark.slow
@of("temperature")
def test_a_low_temperature_lowers_the_entropy_at_once(both):
    before, after = both
    assert after[1]["train/entropy"] < 0.9 * before[1]["train/entropy"]
    assert after[1]["train/reward"] > before[1]["train/reward"] + 0.03


@pytest.mark.slow
@of("kl")
def test_the_penalty_keeps_the_policy_near_its_start(both):
    before, after = both
    assert after[-1]["train/kl_loss"] < 0.7 * before[-1]["train/kl_loss"]


@pytest.mark.slow
@of("wrong_mask")
def test_a_mask_that_counts_padding_shows_before_the_policy_has_moved(both):
    before, after = both
    assert after[2]["train/approx_kl"] > 0.5 > 0.05 > before[2]["train/approx_kl"]
    assert after[1]["response_length/mean"] > before[1]["response_length/mean"] + 1


@pytest.mark.slow
@of("hackable")
def test_the_reward_rises_and_accuracy_does_not(both):
    before, after = both
    assert after[-1]["train/reward"] > before[-1]["train/reward"] + 0.2
    assert after[-1]["val/countdown/pass@1"] < before[-1]["val/countdown/pass@1"] - 0.1
