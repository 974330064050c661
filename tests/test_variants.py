"""Each of docs/variants/*.diff applies to its script, is short, trains and resumes, and is its equation."""

import collections
import math
import re
import shutil
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
from tests import test_updates as updates
from tests.run_folders import (
    ROOT,
    SMALL,
    TINY,
    as_words,
    asked_once,
    episodes,
    is_time,
    killed_after,
    load_script,
    needs_git,
    records,
    same_end,
    slow_but,
    torchrun_in_turn,
    variants,
)
from tests.test_a2c_maths import gae_by_sums
from tools import docs_tables
from tools.validate_train_log import validate

pytestmark = pytest.mark.usefixtures("shipped_once")
PAGE = (ROOT / "docs" / "variants.md").read_text("utf-8")
DIFFS = sorted(path.name for path in (ROOT / "docs" / "variants").glob("*.diff"))
COMMANDS = {diff: (script, name) for script, diff, name in
            re.findall(r"patch (\w+\.py) docs/variants/(\S+\.diff) -o (\w+\.py)", PAGE)}
TO_RENEW = "make it anew: docs/variants.md, 'One that no longer applies'"


@pytest.fixture
def shipped_once():
    """The shipped model is read once, and copied where it is asked for."""
    with asked_once():
        yield


@needs_git
@pytest.mark.parametrize("diff", DIFFS)
def test_a_variant_applies_as_it_stands_and_is_short(diff, tmp_path):
    assert diff in COMMANDS and f"\n## {diff}\n" in PAGE, "docs/variants.md does not say how to make it"
    script, name = COMMANDS[diff]
    path = ROOT / "docs" / "variants" / diff
    base = ROOT / script if (ROOT / script).is_file() else variants()[script]
    patch = subprocess.run(["patch", base, path, "-o", tmp_path / name], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert not patch.returncode and not re.search("offset|fuzz", patch.stdout), patch.stdout + TO_RENEW

    shutil.copy(base, tmp_path)
    subprocess.run(["git", "apply", path], cwd=tmp_path, check=True)
    assert (tmp_path / script).read_text() == (tmp_path / name).read_text()
    assert diff != "overlap_hf.diff" or load_script(variants()[name]).Args().max_staleness

    lines = path.read_text().splitlines()[2:]
    added = [line[1:] for line in lines if line.startswith("+")]
    removed = sum(line.startswith("-") for line in lines)
    most = 101 if diff == "ppo_vecenv.diff" else 59  # the loop's last two stages are indented anew
    assert len(added) < 60 and (len(added) + removed <= most or removed > 4 * len(added))
    assert max(map(len, added)) <= 110


def nudged(name, folder, seed):
    """-> the folder, with the model `name` a random step away"""
    model = AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a model that is not the policy."""
    return nudged(TINY, tmp_path_factory.mktemp("teacher"), 0)


@pytest.fixture
def made(diff, teacher):
    """The path of a variant, and flags -> those that it has, with those that some need or are exact with."""
    script, name = COMMANDS[diff]
    path = variants()[name]
    known = [flag.name for flag in docs_tables.flags(path)]

    def of(**flags):
        one = (str(teacher),) if diff == "teachers.diff" else str(teacher)
        flags = SMALL.get(script.removesuffix(".py"), SMALL["grpo_llm"]) | dict(
            teacher=one, max_staleness=2 * (diff == "stale.diff"), eval_every=0) | flags
        if script == "a2c_vecenv.py":  # 24 transitions: a process has none in some of the minibatches
            flags |= dict(env_kwargs=("max_steps=9",), minibatches=8)
        return {flag: value for flag, value in flags.items() if flag in known}
    return path, of


@pytest.mark.slow
@pytest.mark.parametrize("diff", [diff for diff in DIFFS if not re.search("_hf|inflight", diff)])
def test_a_variant_that_is_killed_goes_on_as_if_nothing_had_happened(made, tmp_path):
    path, of = made
    flags = of(checkpoint_every=1, keep_checkpoints=0, env_kwargs=("test_tasks=32",))
    module, whole = load_script(path), tmp_path / "whole"
    module.main(module.Args(**flags, run_dir=str(whole)))
    folder = killed_after(whole, tmp_path / "killed", 2)
    module.main(module.Args(**flags, run_dir=str(folder)))
    same_end(whole, folder)
    assert [(v["ok"], v["resumes"]) for v in map(validate, (whole, folder), (True, True))] == [(1, 0), (1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("diff", [d for d in DIFFS if not re.search("overlap|inflight", d)])  # no torchrun
def test_a_variant_learns_the_same_in_two_processes(made, tmp_path):
    path, of = made
    flags = of(iterations=3, prompts_per_iteration=13, minibatches=1, critic_minibatches=1,
               learning_rate=1e-4, microbatch_tokens=96)
    module = load_script(path)
    module.main(module.Args(**flags, run_dir=str(tmp_path / "1")))
    torchrun_in_turn(2, [(path, *as_words(flags), "--run-dir", tmp_path / "2")], tmp_path)
    for one, two in zip(records(tmp_path / "1"), records(tmp_path / "2"), strict=True):
        for key, value in one.items():
            if not isinstance(value, str) and not is_time(key):
                assert two[key] == pytest.approx(value, rel=2e-3, abs=1e-5), key


# sampled_distill.diff, distill.diff


DISTILL = {
    "default": {},
    "turns": dict(updates.TURNS, prompts_per_iteration=3, epochs=2, microbatch_tokens=60, temperature=0.7,
                  reward_coef=0.5),
    "lora": dict(lora_rank=2, lora_alpha=8, learning_rate=2e-2, group_size=1),
    "reverse": dict(divergence="reverse"),
    "forward": dict(divergence="forward", lora_rank=2, lora_alpha=8, learning_rate=2e-2, group_size=1),
    "both": dict(updates.TURNS, prompts_per_iteration=3, epochs=2, microbatch_tokens=60, temperature=0.7,
                 reward_coef=0.5, divergence="reverse"),
}


def response_and_words(s, states, logits, temperature, of_response=updates.response_of):
    """As response_of, with the log-probabilities of all words in place of the states."""
    before = slice(len(s["prompt_ids"]) - 1, -1)
    return (logits[before] / temperature).log_softmax(-1), *of_response(s, states, logits, temperature)[1:]


def of_distill(s, response, flags, known):
    words, new, _ = response
    advantages = flags.get("reward_coef", 0.0) * torch.tensor(s["advantages"])
    logged = {"kl/k1": new - known["taught"]}
    if "divergence" not in flags:
        advantages = advantages + known["taught"] - known["old"]
    loss, _ = updates.surrogate("clip", new, known["old"], advantages, None, 0.2, 0.28)
    if "divergence" in flags:
        target, other = words, known["words"]
        if flags["divergence"] == "forward":
            target, other = other, target
        logged["distill/divergence"] = torch.nn.functional.kl_div(other, target, log_target=True,
                                                                  reduction="none").sum(-1)
        loss = loss + logged["distill/divergence"]
    return loss, logged


@pytest.mark.parametrize("case", slow_but(("lora", "forward"), DISTILL))
def test_a_token_counts_by_what_the_teacher_thinks_of_it(case, teacher, tmp_path, monkeypatch):
    flags = DISTILL[case]
    monkeypatch.setattr(updates, "response_of", response_and_words)
    name = "grpo_distill.py" if "divergence" in flags else "grpo_sampled_distill.py"
    script = load_script(variants()[name])
    folder = tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | dict(
        env_kwargs=("test_tasks=32",), teacher=str(teacher), run_dir=str(folder)) | flags))
    check_taught(folder, {"": teacher}, flags)


def check_taught(folder, teachers, flags):
    """The second iteration, replayed: {source: folder} has each token's teacher, "" all other sources'."""
    played, _ = episodes(folder, "train_step_000002")
    segments = [s for episode in played for s in episode["segments"]]
    teacher_of = [teachers.get(e["source"], teachers.get("")) for e in played for _ in e["segments"]]
    assert {*teacher_of} == {*teachers.values()}, "a teacher without a token"
    (before, state), (after, end) = (updates.checkpoint(folder, n) for n in (1, 2))
    model = updates.base_model()
    theirs = {path: AutoModelForCausalLM.from_pretrained(path).double().eval() for path in teachers.values()}
    trained = updates.learnable(before)
    epochs, temperature = flags.get("epochs", 1), flags.get("temperature", 1.0)
    adam = updates.Adam(trained, state["optimizer"], flags.get("learning_rate", 2e-3) * 2 / 4, 0.95, 1.0)
    known = updates.known_before(model, trained, segments, flags)
    for s, own, numbers in zip(segments, teacher_of, known, strict=True):
        out = updates.forward(theirs[own], {}, s["prompt_ids"] + s["response_ids"])
        numbers["words"], numbers["taught"], _ = updates.response_of(s, *out, temperature)
        numbers["words"], numbers["taught"] = numbers["words"].detach(), numbers["taught"].detach()
    expected = updates.replay(adam, model, segments, known, of_distill, flags, epochs)
    updates.check_step(adam, before, after, end["optimizer"], 1e-4 if epochs == 1 else 3e-3)
    record = records(folder)[-1]
    for name in {"kl/k1", "distill/divergence"} & {*expected}:
        assert record[name] == pytest.approx(expected[name], rel=2e-3), name
    assert record["rollout/groups_trainable"] == record["rollout/groups_submitted"]


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("chunk_elements", [1, 3 * 23 + 5, 2**23])
def test_the_divergence_is_that_of_a_float64_softmax_over_all_words(chunk_elements, kind):
    """The teacher has other hidden sizes, and rows after the last word; gradients of the policy's alone."""
    script = load_script(variants()["grpo_distill.py"])
    torch.manual_seed(1)
    inputs, taught, weights = (torch.randn(size, dtype=torch.float64)
                               for size in ((11, 6), (11, 4), (3, 11)))
    head, theirs = (torch.nn.Linear(*size).double() for size in ((6, 23), (4, 29)))
    theirs.requires_grad_(False)
    targets, results = torch.randint(23, (11,)), []
    for of_script in (True, False):
        hidden, head.weight.grad = inputs.clone().requires_grad_(), None
        if of_script:
            found = script.taught_logprobs(hidden, head, targets, 0.6, taught, theirs, kind, chunk_elements)
            logprobs, entropy, of_teacher, divergence = found
        else:
            p, q = torch.softmax(head(hidden) / 0.6, -1), torch.softmax(theirs(taught)[:, :23] / 0.6, -1)
            one, other = (p, q) if kind == "reverse" else (q, p)
            divergence = (one * (one / other).log()).sum(-1)
            entropy = -(p * p.log()).sum(-1)
            logprobs, of_teacher = (x[torch.arange(11), targets].log() for x in (p, q))
        (weights * torch.stack([logprobs, entropy, divergence])).sum().backward()
        results.append((logprobs, entropy, of_teacher, divergence, hidden.grad, head.weight.grad.clone()))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_logits_of_policy_and_teacher_exist_for_one_chunk_at_a_time():
    script, vocab, made, kept = load_script(variants()["grpo_distill.py"]), 5_000, [], []

    class Head(torch.nn.Linear):
        def forward(self, hidden):
            made.append(len(hidden))
            return super().forward(hidden)

    head, theirs = Head(4, vocab, bias=False), Head(4, vocab, bias=False).requires_grad_(False)
    hidden, taught = torch.randn(20, 4, requires_grad=True), torch.randn(20, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        found = script.taught_logprobs(hidden, head, torch.arange(20), 1.0, taught, theirs, "reverse",
                                       5 * vocab)
    sum(found).sum().backward()
    assert made == 16 * [5], "four chunks of two models, there and back"
    assert sum(kept) < vocab, "logits are kept for the backward pass"


def test_a_teacher_of_other_tokens_is_one_line(teacher, tmp_path):
    script = load_script(variants()["grpo_distill.py"])
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(["another"])
    shutil.copytree(teacher, tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    for folder, says in ((tmp_path / "other", "expected the tokenizer of --model"),
                         (tmp_path / "none", "it cannot be loaded")):
        with pytest.raises(script.BadInput, match=f"^--teacher {re.escape(str(folder))}: {says}.*$"):
            script.main(script.Args(teacher=str(folder), run_dir=str(tmp_path / "run"), iterations=0,
                                    eval_tasks=1))


# teachers.diff


@pytest.fixture(scope="module")
def second_teacher(teacher, tmp_path_factory):
    """Another, from the first one by a step in another direction."""
    return nudged(teacher, tmp_path_factory.mktemp("second"), 1)


# Prompts of two sources, countdown/3 and countdown/4, and passes of a few rows.
TWO_SOURCES = SMALL["grpo_llm"] | updates.RUN | dict(
    env_kwargs=("test_tasks=32", "max_operands=4", "difficulty=true"), prompts_per_iteration=6,
    microbatch_tokens=100)
TEACHERS = {
    "reverse": dict(divergence="reverse"),
    "forward": dict(divergence="forward", lora_rank=2, lora_alpha=8, learning_rate=2e-2, epochs=2,
                    aggregation="sequence"),
}


@pytest.mark.parametrize("case", slow_but(("reverse",), TEACHERS))
def test_each_source_is_taught_by_its_own_teacher(case, teacher, second_teacher, tmp_path, monkeypatch):
    """One named teacher, and one for the rest: each token's target is that of its own task's."""
    flags = TEACHERS[case]
    monkeypatch.setattr(updates, "response_of", response_and_words)
    script, folder = load_script(variants()["grpo_teachers.py"]), tmp_path / "run"
    script.main(script.Args(**TWO_SOURCES | flags, run_dir=str(folder),
                            teacher=(str(teacher), f"countdown/4={second_teacher}")))
    check_taught(folder, {"countdown/3": teacher, "countdown/4": second_teacher}, flags)


def test_equal_teachers_are_one(teacher, tmp_path):
    """To rounding, since the passes are others; a source may be named by its beginning."""
    ends = []
    for name, given in (("distill", str(teacher)),
                        ("teachers", (f"countdown={teacher}", f"countdown/4={teacher}"))):
        script = load_script(variants()[f"grpo_{name}.py"])
        script.main(script.Args(**TWO_SOURCES, teacher=given, run_dir=str(tmp_path / name)))
        ends.append(updates.checkpoint(tmp_path / name, 2)[0])
    start = dict(updates.base_model().named_parameters())
    one, two = ({name: end[name] - start["model." + name].detach() for name in end} for end in ends)
    updates.near(two, one, 1e-3)


@pytest.mark.parametrize("given, says", [
    (("countdown/3={}",), "--env countdown has tasks of source countdown/4: expected a --teacher for them"),
    (("{}", "countdown/5={}"), "--teacher .*: expected each to have tasks of its own; the sources of --env "
                               "countdown are countdown/3, countdown/4"),
    (("{}", "countdown/4={}", "countdown/3={}"), "--teacher .*: expected each to have tasks of its own; .*"),
    (("{}", "countdown/4={}", "countdown/4={}"), "--teacher .*: expected each to have tasks of its own; .*"),
    (("countdown={}", "countdown/4=nowhere/none"), "--teacher nowhere/none: it cannot be loaded.*"),
])
def test_a_source_without_a_teacher_and_the_reverse_are_one_line(given, says, teacher, tmp_path):
    script = load_script(variants()["grpo_teachers.py"])
    given = tuple(words.format(teacher) for words in given)
    with pytest.raises(script.BadInput, match=f"^{says}$"):
        script.main(script.Args(**TWO_SOURCES, teacher=given, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


# self_distill.diff


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_the_teacher_sees_the_solution_and_follows_the_policy(rate, tmp_path):
    """The second iteration's divergence: of the policy from what the slow copy says after the solution."""
    script, folder = load_script(variants()["grpo_self_distill.py"]), tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | dict(
        env_kwargs=("test_tasks=32",), teacher=str(TINY), teacher_rate=rate, hint=" | {solution} |",
        run_dir=str(folder))))
    played, _ = episodes(folder, "train_step_000002")
    (before, _), start = updates.checkpoint(folder, 1), updates.base_model()
    policy, trained = updates.base_model(), updates.learnable(before)
    slow = {name: start.get_parameter("model." + name).lerp(new, rate) for name, new in trained.items()}
    env, tokenizer, found, count = envs.make("countdown"), AutoTokenizer.from_pretrained(TINY), 0.0, 0
    tasks = {task.id: task for task in (env.training_task(place, 1) for place in range(100))}
    for episode in played:
        task = tasks[episode["task_id"]]
        text = f"{task.messages[-1]['content']} | {env.solution(task)} |"
        hinted = tokenizer.apply_chat_template([dict(role="user", content=text)], add_generation_prompt=True,
                                               return_dict=False)
        for s in episode["segments"]:
            assert len(hinted) > len(s["prompt_ids"])
            _, words = updates.forward(policy, trained, s["prompt_ids"] + s["response_ids"])
            _, taught = updates.forward(start, slow, hinted + s["response_ids"])
            p, q = (x[-len(s["response_ids"]) - 1:-1].detach().log_softmax(-1) for x in (words, taught))
            found += float((p.exp() * (p - q)).sum())
            count += len(s["response_ids"])
    assert records(folder)[-1]["distill/divergence"] == pytest.approx(found / count, rel=2e-3)


def test_every_second_prompt_of_the_hinted_countdown_has_the_reply():
    plain, hinted = (envs.make(name, skill="mixed") for name in
                     ("countdown", "docs/variants/hinted.py:Hinted"))
    for place in range(4):
        task, other = plain.task("train", place), hinted.task("train", place)
        assert hinted.solution(other) == plain.solution(task)
        hint = f" | {plain.solution(task)} |" if place % 2 else ""
        assert other.messages == [dict(role="user", content=task.messages[0]["content"] + hint)]


# curriculum.diff


@pytest.mark.slow
def test_a_task_is_drawn_by_its_share_of_p_times_1_minus_p():
    script = load_script(variants()["grpo_curriculum.py"])
    solved, played = torch.tensor([0.0, 0.0, 8.0, 4.0, 1.0]), torch.tensor([0.0, 8.0, 8.0, 8.0, 8.0])
    drawn = [script.draw_tasks(solved, played, 1, (1, cursor))[0] for cursor in range(3000)]
    chance = [1 / 2 * 1 / 2, 1 / 10 * 9 / 10, 9 / 10 * 1 / 10, 5 / 10 * 5 / 10, 2 / 10 * 8 / 10]
    for task, share in enumerate(chance):
        share /= sum(chance)
        assert abs(drawn.count(task) - 3000 * share) < 4 * math.sqrt(3000 * share * (1 - share))
    assert all(sorted(script.draw_tasks(solved, played, 5, seed)) == [*range(5)] for seed in range(20))
    assert len(script.draw_tasks(solved, played, 9, 1)) == 9  # more than there are


@pytest.mark.slow
def test_draws_follow_what_the_episodes_have_earned(tmp_path):
    script, folder = load_script(variants()["grpo_curriculum.py"]), tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | dict(
        iterations=3, pool=6, dynamic_sampling=1, env_kwargs=("test_tasks=32",), run_dir=str(folder))))
    env = envs.make("countdown")
    ids = [env.training_task(place, 1).id for place in range(6)]
    solved, played, cursor = collections.Counter(), collections.Counter(), 0
    for iteration in (1, 2, 3):
        found, _ = episodes(folder, f"train_step_{iteration:06d}")
        counts = [torch.tensor([float(count[task]) for task in ids]) for count in (solved, played)]
        rounds = len(found) // 16
        expected = [script.draw_tasks(*counts, 4, (1, cursor + 4 * number)) for number in range(rounds)]
        places = [place for some in expected for place in some]
        assert [episode["task_id"] for episode in found[::4]] == [ids[place] for place in places]
        cursor += 4 * rounds
        for episode in found:
            solved[episode["task_id"]] += episode["correct"]
            played[episode["task_id"]] += 1
        assert records(folder)[iteration]["curriculum/played"] == pytest.approx(len(played) / 6)


# stale.diff


STALE = {
    "none": dict(correction="none", epochs=2),
    "sapo": dict(loss="sapo", correction="none"),
    "tis": dict(correction_bounds=(0.0, 1.01)),
}


def of_stale(s, response, flags, known):
    total, logged = updates.of_grpo(s, response, flags, known)
    if flags.get("correction") == "none":
        return updates.of_grpo(s, response, flags, known | dict(old=known["sampled"]))
    return total, logged


@pytest.mark.parametrize("case", slow_but(("none",), STALE))
def test_a_ratio_is_to_the_policy_that_sampled_or_a_correction_accounts_for_its_age(case, tmp_path):
    """The second of two iterations that the starting model samples for, replayed; the third has its own."""
    script, flags = load_script(variants()["grpo_stale.py"]), dict(max_staleness=1) | STALE[case]
    folder = tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | flags | dict(
        iterations=3, env_kwargs=("test_tasks=32",), reward_fn=updates.CHECKSUM, run_dir=str(folder))))
    assert [record["rollout/staleness"] for record in records(folder)[1:]] == [0, 1, 0]
    played, _ = episodes(folder, "train_step_000002")
    segments = [s for group in updates.grpo_segments(played, flags) for s in group]
    (before, state), (after, end) = (updates.checkpoint(folder, n) for n in (1, 2))
    model, trained = updates.base_model(), updates.learnable(before)
    for s, of_start in zip(segments, updates.known_before(model, {}, segments, flags), strict=True):
        assert s["rollout_logprobs"] == pytest.approx(of_start["old"].tolist(), abs=1e-4)
    adam = updates.Adam(trained, state["optimizer"], 2e-3 * 2 / 4, 0.95, 1.0)
    known = updates.known_before(model, trained, segments, flags)
    expected = updates.replay(adam, model, segments, known, of_stale, flags, flags.get("epochs", 1))
    updates.check_step(adam, before, after, end["optimizer"], 3e-3)
    record = records(folder)[2]
    for name in ("train/policy_loss", "train/clipfrac"):
        assert record[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-6), name
    assert record["mismatch/kl"] > 1e-5 and (record["mismatch/frac_capped"] > 0.05) == (case == "tis")


# shuffled.diff


def test_rewards_are_dealt_out_anew(tmp_path):
    """The update is that of each segment with the reward of another; the log has them as they were earned."""
    script, folder = load_script(variants()["grpo_shuffled.py"]), tmp_path / "run"
    dealt = []
    of_groups = script.trainable_groups
    script.trainable_groups = lambda rollouts, args: dealt.append(rollouts) or of_groups(rollouts, args)
    script.main(script.Args(**SMALL["grpo_llm"] | dict(
        iterations=3, log_episodes=1.0, env_kwargs=("test_tasks=32",), reward_fn=updates.CHECKSUM,
        run_dir=str(folder))))
    moved = 0
    for number, (rollouts, record) in enumerate(zip(dealt, records(folder)[1:], strict=True), 1):
        earned, _ = episodes(folder, f"train_step_{number:06}")
        earned, got = [e["reward"] for e in earned], [r.reward for r in rollouts]
        assert sorted(earned) == pytest.approx(sorted(got)) and len(set(got)) > 1
        assert record["train/reward"] == pytest.approx(sum(earned) / len(earned), rel=1e-4)
        moved += sum(abs(one - other) > 1e-6 for one, other in zip(earned, got, strict=True))
        for rollout in rollouts:
            group = [r.reward for r in rollouts if r.task.id == rollout.task.id]
            for segment in rollout.segments:
                assert segment.advantages is None or segment.advantages == pytest.approx(
                    [rollout.reward - sum(group) / 4] * len(segment.response_ids), abs=1e-6)
    assert moved > 3


# turns.diff


TURNS = {
    "ends": dict(env_kwargs=("test_tasks=32", "problems=3", "ends_at_first_error=true")),
    "forks": dict(max_context_tokens=45, epochs=2, group_size=8, episode_coef=0.5, turn_coef=2.0,
                  turn_discount=0.5, reward_fn=updates.CHECKSUM),
    "scaled": dict(scale_rewards=True, mask_truncated=True, dynamic_sampling=1, turn_discount=1.0),
}


def relative(numbers, scaled):
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers))
    return [(number - mean) / (deviation + 1e-6 if scaled else 1) for number in numbers]


def check_turns(group, flags):
    """GiGPO's eqs. 3 to 8, turn by turn: each is compared with the turns that answered the same message."""
    left_out = ("error", "length", "context") if flags.get("mask_truncated") else ("error",)
    group = [episode for episode in group if episode["termination"] not in left_out]
    if not group:
        return
    seen = []  # (episode, number of the turn, what was said before it, its return)
    for number, episode in enumerate(group):
        said = [m["content"] for m in episode["messages"] if m["role"] == "user"]
        rewards = [turn["reward"] for turn in episode["turns"]]
        rewards[-1] += episode["reward"] - sum(rewards)
        for k, message in enumerate(said[:len(rewards)]):
            discounted = sum(r * flags.get("turn_discount", 0.95) ** n for n, r in enumerate(rewards[k:]))
            seen.append((number, k, message, discounted))
    scaled = flags.get("scale_rewards", False)
    of_episodes = relative([episode["reward"] for episode in group], scaled)
    for number, k, message, discounted in seen:
        same = [other for *_, said, other in seen if said == message]
        own = relative(same, scaled)[same.index(discounted)]
        expected = flags.get("episode_coef", 1) * of_episodes[number] + flags.get("turn_coef", 1) * own
        turn = group[number]["turns"][k]
        segment = group[number]["segments"][turn["segment"]]
        tokens = slice(turn["start"], turn["end"])
        assert all(segment["response_mask"][tokens]) and turn["end"] > turn["start"]
        if segment["advantages"]:  # none where no advantage of the group is other than 0
            assert segment["advantages"][tokens] == pytest.approx(
                [expected] * (turn["end"] - turn["start"]), abs=1e-5), f"turn {k} after {message!r}"
        else:
            assert abs(expected) < 1e-6


@pytest.mark.parametrize("case", slow_but(("forks",), TURNS))
def test_a_turn_is_compared_with_turns_from_the_same_state(case, tmp_path):
    """Of episodes that end early or fail, whose history forks, and with environment text between turns."""
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULTY_EXAM)
    script, folder, flags = load_script(variants()["grpo_turns.py"]), tmp_path / "run", TURNS[case]
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | dict(
        env=f"{faulty}:Faulty", env_kwargs=("test_tasks=32",), prompts_per_iteration=6,
        run_dir=str(folder)) | flags))
    ends, lengths, forked = set(), set(), 0
    played, _ = episodes(folder, "train_step_000002")
    size = flags.get("group_size", 4)
    for start in range(0, len(played), size):
        group = played[start:start + size]
        check_turns(group, flags)
        ends |= {episode["termination"] for episode in group}
        lengths |= {len(episode["turns"]) for episode in group}
        forked += any(len(episode["segments"]) > 1 for episode in group)
    assert "error" in ends and len(lengths) > 1 and (forked > 0) == (case == "forks")
    assert case != "scaled" or "length" in ends


FAULTY_EXAM = f"""
import sys
import zlib

sys.path.insert(0, {str(ROOT / "docs/variants")!r})
import exam


class Faulty(exam.Exam):
    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def fails(reply):
            if "train" in task.id and zlib.crc32(reply.encode()) % 2:
                raise ConnectionError("no answer")
            found = step(reply)
            if found.messages and len(reply) % 2:  # the same state again, as another turn
                found.messages = task.messages
            return found

        episode.step = fails
        return episode
"""


def test_every_problem_of_an_exam_earns_its_share_and_is_in_no_other_exam():
    env = envs.make("docs/variants/exam.py:Exam", problems="3", test_tasks="32")
    assert env.num_tasks("test") == 10 and env.num_tasks("train") == 1_000_000 // 3
    problems = [str(problem) for n in range(10) for problem in env.task("test", n).data["problems"]]
    assert len(set(problems)) == 30
    task = env.task("train", 5)
    replies = [m["content"] for m in env.demonstration(task) if m["role"] == "assistant"]
    for wrong in range(3):
        episode, rewards = env.start(task, 1), []
        for number, reply in enumerate(replies):
            step = episode.step("1 + 1 = 3" if number == wrong else reply)
            rewards.append(step.reward)
            assert step.terminated == (number == 2) == (not step.messages)
            assert step.terminated or step.messages == task.data["prompts"][number + 1]
        assert rewards == [0 if number == wrong else 1 / 3 for number in range(3)]
        assert (step.info["correct"], step.info["solved"]) == (0, 2 / 3)
    strict = envs.make("docs/variants/exam.py:Exam", ends_at_first_error="true").start(task, 1)
    step = strict.step("no")
    assert step.terminated and not step.messages and step.reward == 0
    with pytest.raises(envs.BadInput, match="problems=17: expected 1 to 16"):
        envs.make("docs/variants/exam.py:Exam", problems="17")


# pods.diff


@pytest.mark.parametrize("most", [1, 2])
def test_two_of_each_side_stand_for_all_of_it(most, tmp_path):
    script, folder = load_script(variants()["grpo_pods.py"]), tmp_path / "run"
    script.main(script.Args(**SMALL["grpo_llm"] | updates.RUN | dict(
        env_kwargs=("test_tasks=32",), prompts_per_iteration=8, group_size=8, run_dir=str(folder),
        **dict(most_per_side=most) if most != 2 else {})))
    played, _ = episodes(folder, "train_step_000002")
    sizes = set()
    for start in range(0, len(played), 8):
        group = played[start:start + 8]
        rewards = [episode["reward"] for episode in group]
        for reward in {*rewards}:
            side = [episode["segments"][0] for episode in group if episode["reward"] == reward]
            expected = reward - sum(rewards) / 8
            if not expected:  # a group of equal rewards is left out
                continue
            for segment in side[:most]:
                whole = [expected * max(1, len(side) / most)] * len(segment["response_ids"])
                assert segment["advantages"] == pytest.approx(whole)
            assert not any(segment["advantages"] for segment in side[most:])
            sizes.add(len(side))
    assert min(sizes) < most + 1 < max(sizes)


# reinforce.diff


REINFORCE = {"default": {}, "turns": dict(updates.TURNS, prompts_per_iteration=5, microbatch_tokens=60,
                                          temperature=0.7)}


def of_reinforce(s, response, flags, known):
    _, new, entropy = response
    weight = torch.exp(new.detach() - known["sampled"])
    return -(s["earned"] * weight * new + 0.02 * entropy), {}


@pytest.mark.parametrize("case", slow_but(("default",), REINFORCE))
def test_the_gradient_is_that_of_log_pi_times_what_others_did_not_earn(case, tmp_path, monkeypatch):
    flags = REINFORCE[case]
    script, folder = load_script(variants()["reinforce_llm.py"]), tmp_path / "run"
    monkeypatch.setitem(SMALL, "reinforce_llm", dict(prompts_per_iteration=16, env_kwargs=("test_tasks=32",)))
    updates.noisy_run(script, folder, monkeypatch, **flags)
    played, _ = episodes(folder, "train_step_000002")
    rewards, segments = [episode["reward"] for episode in played], []
    assert len(set(rewards)) > 1
    for number, episode in enumerate(played):
        others = rewards[:number] + rewards[number + 1:]
        earned = rewards[number] - sum(others) / len(others)
        for s in episode["segments"]:
            assert s["advantages"] == pytest.approx([earned] * len(s["response_mask"]))
            segments.append(s | dict(earned=earned))
    (before, state), (after, end) = (updates.checkpoint(folder, n) for n in (1, 2))
    model, trained = updates.base_model(), updates.learnable(before)
    adam = updates.Adam(trained, state["optimizer"], 2e-3 * 2 / 4, 0.95, 1.0)
    known = updates.known_before(model, trained, segments, flags)
    updates.replay(adam, model, segments, known, of_reinforce, flags)
    updates.check_step(adam, before, after, end["optimizer"], 1e-4)
    assert records(folder)[-1]["train/grad_norm"] == pytest.approx(adam.norms[0], rel=2e-3)


# critic_lambda.diff


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_critic_learns_returns_of_a_lambda_of_its_own(lam, tmp_path, monkeypatch):
    script, folder = load_script(variants()["ppo_critic_lambda.py"]), tmp_path / "run"
    monkeypatch.setitem(SMALL, "ppo_critic_lambda", SMALL["ppo_llm"])
    updates.noisy_run(script, folder, monkeypatch, critic_warmup=0, critic_learning_rate=5e-3,
                      **dict(critic_lambda=lam) if lam < 1 else {})
    raw, whitened, seen = [], [], []
    for episode in episodes(folder, "train_step_000002")[0]:
        segment, = episode["segments"]
        values, returns = (torch.tensor(segment[name], dtype=torch.float64) for name in ("values", "returns"))
        after = torch.cat([values[1:], torch.zeros(1)])
        rewards = torch.zeros_like(values)
        rewards[-1] = episode["reward"]
        end = torch.zeros_like(values, dtype=torch.bool)
        end[-1] = True

        def of(lam, *given):
            return gae_by_sums(*(x[:, None] for x in given), 1.0, lam)[:, 0]

        given = rewards, values, after, end, end
        torch.testing.assert_close(returns, values + of(lam, *given), rtol=1e-5, atol=1e-5)
        raw.append(of(0.95, *given))
        whitened += segment["advantages"]
        seen.append(torch.stack([returns, values]))
    raw, (returns, values) = torch.cat(raw), torch.cat(seen, 1)
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(torch.tensor(whitened, dtype=torch.float64), expected, rtol=1e-4, atol=1e-4)
    explained = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    assert records(folder)[-1]["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-4)


# ppo_vecenv.diff


PPO = {
    "default": {},
    "values": dict(clip=0.01, clip_value=0.02, normalize_advantages=False, minibatches=1, entropy_coef=0.3),
    "pixels": dict(env_id="pixel-goal", env_kwargs=("max_steps=9", "stack_k=2"), chunk=5, anneal=False,
                   clip=0.2),
}


@pytest.fixture
def ppo(tmp_path):
    """-> a run of two iterations: script, flags, its second rollout and what ppo_losses were given in it"""
    script = load_script(variants()["ppo_vecenv.py"])

    def run(**flags):
        rollouts, losses = [], []
        rollout, ppo_losses = script.rollout, script.ppo_losses

        def kept_rollout(*given):
            losses.clear()  # those of an earlier rollout
            obs, batch = rollout(*given)
            batch["rewards"] += torch.rand(args.num_steps, args.num_envs)  # no two returns are alike
            rollouts.append(batch)  # main adds the returns
            return obs, batch

        def kept_losses(*given):
            losses.append(given)
            return ppo_losses(*given)

        script.rollout, script.ppo_losses = kept_rollout, kept_losses
        args = script.Args(**SMALL["a2c_vecenv"] | dict(
            env_id="CartPole-v1", iterations=2, num_steps=9, epochs=3, minibatches=4, clip=0.05,
            learning_rate=0.02, checkpoint_every=1, keep_checkpoints=0, run_dir=str(tmp_path)) | flags)
        script.main(args)
        return script, args, rollouts[1], losses
    return run


def rows_of(batch, returns):
    """Where in a rollout the transitions with these returns are, no two of which are alike."""
    places = {value: place for place, value in enumerate(batch["returns"].flatten().tolist())}
    assert len(places) == batch["returns"].numel()
    return [places[value] for value in returns.tolist()]


def test_each_epoch_has_each_transition_once_in_minibatches_of_one_size(ppo):
    _, args, batch, losses = ppo(env_id="pixel-goal", env_kwargs=("max_steps=9",), num_steps=11)
    count = batch["returns"].numel()
    minibatches = [rows_of(batch, returns) for *_, returns, _, _ in losses]
    epochs = [minibatches[start:start + 4] for start in range(0, len(minibatches), 4)]
    assert len(epochs) == 3 and count == 66
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == [*range(count)], "a transition is missing, or there twice"
        assert sorted(map(len, epoch)) == [16, 16, 17, 17]
    assert len({frozenset(epoch[0]) for epoch in epochs}) == 3, "epochs are cut alike"
    assert losses[0][0].abs().max() < 1e-5, "before the first step the policy is not the one that sampled"
    for _, _, _, advantages, *_ in losses:
        assert abs(advantages.mean()) < 1e-5 and abs(advantages.std() - 1) < 1e-4


def clipped(ratio, advantage, clip):
    """Eq. 7 by cases: what is gained by moving the way of the advantage ends at the clip."""
    return advantage * (min(ratio, 1 + clip) if advantage > 0 else max(ratio, 1 - clip))


def expected_update(script, args, batch, losses, state):
    """The second iteration's updates by formulas of their own, from the first's checkpoint.

    -> the weights; means of the last epoch's numbers, and of all gradients' norms
    """
    env = script.make_env(args, args.num_envs, "cpu")
    agent = script.Agent(env, args.network, args.hidden_size)
    agent.load_state_dict(state["agent"])
    adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    adam.load_state_dict(state["optimizer"])
    share = 0.5 if args.anneal else 1.0
    adam.param_groups[0]["lr"] = args.learning_rate * share
    done = batch["terminated"] | batch["truncated"]
    steps = [batch[name] for name in ("rewards", "values", "next_values", "terminated")]
    advantages = gae_by_sums(*steps, done, args.gamma, args.gae_lambda)
    returns, logged = advantages + batch["values"], collections.defaultdict(list)
    flat = {name: tensor.flatten(0, 1) for name, tensor in (batch | dict(raw=advantages, to=returns)).items()}
    for number, (*_, theirs, _, _) in enumerate(losses):
        mb = {name: tensor[rows_of(batch, theirs)] for name, tensor in flat.items()}
        weights = mb["raw"]
        if args.normalize_advantages:
            weights = (weights - weights.mean()) / weights.std()
        logits, values = agent(mb["obs"])
        policy = torch.distributions.Categorical(logits=logits)
        ratios = policy.log_prob(mb["actions"]).exp() / mb["logprobs"].exp()
        gains = torch.stack([clipped(*pair, args.clip) for pair in zip(ratios, weights, strict=True)])
        errors = (values - mb["to"]) ** 2
        if args.clip_value:
            low, high = mb["values"] - args.clip_value, mb["values"] + args.clip_value
            errors = torch.maximum(errors, (torch.minimum(torch.maximum(values, low), high) - mb["to"]) ** 2)
        entropy_coef = args.entropy_coef * share
        loss = -gains.mean() + args.value_coef * errors.mean() - entropy_coef * policy.entropy().mean()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        logged["grad_norm"].append(float(norm))
        adam.step()
        if number >= len(losses) - args.minibatches:
            beyond = (ratios < 1 - args.clip) | (ratios > 1 + args.clip)
            found = dict(policy_loss=-gains, value_loss=errors, clipfrac=beyond.float(),
                         kl=ratios - 1 - ratios.log())
            for name, numbers in found.items():
                logged[name] += numbers.tolist()
    return agent.state_dict(), {name: sum(numbers) / len(numbers) for name, numbers in logged.items()}


@pytest.mark.parametrize("case", slow_but(("default", "values"), PPO))
def test_an_update_is_that_of_the_clipped_surrogate(case, ppo, tmp_path):
    script, args, batch, losses = ppo(**PPO[case])
    before, after = (torch.load(tmp_path / "checkpoints" / f"step_00000{n}" / "trainer_state.pt")
                     for n in (1, 2))
    expected, logged = expected_update(script, args, batch, losses, before)
    moved = torch.cat([(after["agent"][name] - before["agent"][name]).flatten() for name in expected])
    wanted = torch.cat([(expected[name] - before["agent"][name]).flatten() for name in expected])
    assert (moved - wanted).norm() < 1e-3 * wanted.norm(), "other weights than the equation's"
    record = records(tmp_path)[-1]
    for name, value in logged.items():
        assert record[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert 0.1 < record["clipfrac"] < 0.9  # else the clip would not be seen
    steps = args.epochs * args.minibatches
    assert (record["opt_steps"], record["env_steps"]) == (2 * steps, 2 * args.num_envs * args.num_steps)


def test_a_minibatch_of_less_than_two_transitions_is_refused():
    script = load_script(variants()["ppo_vecenv.py"])
    assert script.Args(num_envs=4, num_steps=2, minibatches=4).minibatches == 4
    with pytest.raises(ValueError, match="--minibatches 5: expected at least two steps in each"):
        script.Args(num_envs=4, num_steps=2, minibatches=5)
