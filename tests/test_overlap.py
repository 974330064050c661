"""docs/variants/overlap.diff and overlap_hf.diff: the next rollouts are sampled while the policy is updated.

Servers are played by a stand-in whose replies, and their log-probabilities, are those of the weights that it
has been handed; one test asks a vLLM server. With the second diff the sampler is a process of its own.
"""

import itertools
import re
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo_llm
from tests.run_folders import (
    SMALL,
    TINY,
    command_line,
    episodes,
    load_script,
    process,
    records,
    same_checkpoint,
    slow_but,
    timeless,
    train,
    variants,
)
from tests.test_engines import (  # noqa: F401
    PATIENCE,
    Server,
    asking,
    largest_difference,
    stand_in,
    vllm,
    words_of,
)
from tests.test_updates import (
    Adam,
    base_model,
    checkpoint,
    forward,
    grpo_segments,
    learnable,
    mean_of,
    near,
    of_grpo,
    response_of,
    weight_of,
)
from tools.validate_train_log import validate

TURNS = dict(env="tests/two_turn.py:TwoTurn", env_kwargs=("test_tasks=32",))
KEEP = dict(checkpoint_every=1, keep_checkpoints=0, log_episodes=1.0, learning_rate=5e-4)


def overlap(folder, **flags):
    """A run of the variant in this process.  -> its folder"""
    script = load_script(variants()["grpo_overlap.py"])
    flags = SMALL["grpo_llm"] | dict(env_kwargs=("test_tasks=32",), run_dir=str(folder)) | flags
    script.main(script.Args(**flags))
    return folder


def without_staleness(folder):
    return [{name: x for name, x in record.items() if not name.startswith("rollout/staleness")}
            for record in timeless(folder)]


def staleness(folder):
    """Of each iteration: mean, largest."""
    return [(record["rollout/staleness/mean"], record["rollout/staleness/max"])
            for record in records(folder)[1:]]


def check_versions(folder, temperature=1.0, bound=1e-4):
    """Each token has the log-probability of the weights that its version names, which the log counts."""
    for iteration, (mean, most) in enumerate(staleness(folder), 1):
        segments = [s for episode in episodes(folder, f"train_step_{iteration:06d}")[0]
                    for s in episode["segments"]]
        versions = [*itertools.chain(*(s["versions"] for s in segments))]
        assert len(versions) == sum(sum(s["response_mask"]) for s in segments)
        assert iteration - 1 - min(versions) == most <= iteration - 1
        assert iteration - 1 - sum(versions) / len(versions) == pytest.approx(mean)
        for version in set(versions):
            model = AutoModelForCausalLM.from_pretrained(
                folder / "checkpoints" / f"step_{version:06d}" if version else TINY)
            some = []
            for s in segments:
                own = iter(s["versions"])
                mask = [int(chosen and next(own) == version) for chosen in s["response_mask"]]
                some += [s | dict(response_mask=mask)] * any(mask)
            assert largest_difference(model, [dict(segments=some)], temperature) < bound


# Servers


@pytest.mark.parametrize("case", slow_but(["full"], ["full", "turns"]))
def test_without_staleness_all_is_as_in_grpo_llm(case, stand_in, tmp_path):  # noqa: F811
    flags = asking(stand_in(lora=case == "turns"), iterations=3, eval_every=2, eval_tasks=4)
    flags |= TURNS | dict(lora_rank=2, dynamic_sampling=1) if case == "turns" else dict(minibatches=2)
    one = train(grpo_llm, tmp_path / "one", **flags)
    other = overlap(tmp_path / "other", max_staleness=0, **flags)
    assert without_staleness(one) == without_staleness(other)
    same_checkpoint(one, other, "step_000003")
    assert staleness(other) == 3 * [(0.0, 0.0)]


def test_a_stale_token_counts_by_the_trainers_probability_over_the_samplers_up_to_the_cap(
        stand_in, tmp_path):  # noqa: F811
    """The third iteration, replayed from the checkpoints before and after it; small passes take long."""
    flags = dict(iterations=3, max_staleness=1, tis_cap=1.001, microbatch_tokens=20)
    folder = overlap(tmp_path / "run", **asking(stand_in(), **KEEP) | flags)
    assert staleness(folder) == [(0, 0), (1, 1), (1, 1)] and validate(folder, strict=True)["ok"]
    check_versions(folder)
    tasks = {episode["task_id"] for n in (1, 2, 3) for episode in episodes(folder, f"train_step_{n:06d}")[0]}
    assert len(tasks) == 3 * 4
    played, _ = episodes(folder, "train_step_000003")
    segments = [s for group in grpo_segments(played, flags) for s in group]
    (before, state), (after, end) = (checkpoint(folder, n) for n in (2, 3))
    trained, model, loss, sums = learnable(before), base_model(), 0.0, {}
    adam = Adam(trained, state["optimizer"], records(folder)[3]["train/learning_rate"], 0.95, 1.0)
    for s in segments:
        out = forward(model, trained, s["prompt_ids"] + s["response_ids"])
        _, new, entropy = response_of(s, *out, 1.0)
        sampled = torch.tensor(s["rollout_logprobs"], dtype=torch.float64)
        total, logged = of_grpo(s, new, entropy, flags, dict(old=new.detach(), sampled=sampled))
        loss = loss + total.sum() * weight_of(s, segments, flags)
        for name in ("mismatch/kl", "mismatch/frac_capped"):
            sums[name] = sums.get(name, 0.0) + float(logged[name].sum())
    adam.step(loss)
    adam.check(after, end["optimizer"], 1e-4)
    near({name: after[name] - before[name] for name in trained},
         {name: trained[name].detach() - before[name] for name in trained}, 2e-2)
    expected = mean_of(sums, segments)
    assert expected["mismatch/frac_capped"] > 0.1 and expected["mismatch/kl"] > 1e-6
    for name, value in expected.items():
        assert records(folder)[3][name] == pytest.approx(value, rel=2e-3, abs=1e-9), name


@pytest.mark.slow
def test_weights_wait_for_the_replies_in_flight_and_none_of_these_is_lost(stand_in, tmp_path):  # noqa: F811
    """Second replies come quickly, first ones after all updates of the iteration before."""
    server = stand_in()

    def trouble(path, body):
        if path != "/v1/completions" or body["n"] == 1:
            return ()
        with server.lock:
            server.log.append((path, body))
            answer = server.answer(path, body)
        time.sleep(0.5)
        return answer

    server.trouble = trouble
    folder = overlap(tmp_path / "run", max_staleness=1, iterations=4, eval_temperature=0.5,
                     **asking(server, **TURNS | KEEP))
    check_versions(folder)
    played = [episode for n in range(1, 5) for episode in episodes(folder, f"train_step_{n:06d}")[0]]
    assert {episode["termination"] for episode in played} <= {"done", "length"}
    asked = sum(body["n"] for body in server.asked() if body["temperature"] == 1.0)
    assert asked == sum(len(episode["turns"]) for episode in played)
    assert any(len(set(s["versions"])) > 1 for episode in played for s in episode["segments"])


def test_a_server_lost_while_it_samples_ahead_is_one_line_and_the_same_command_continues(
        stand_in, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(variants()["grpo_overlap.py"].parent)
    server, hits, folder = stand_in(), [], tmp_path / "run"
    server.trouble = lambda path, body: (500, "EngineCore died") if path == "/v1/completions" and (
        hits.append(path) or len(hits) > 2 + 3 * 4) else ()
    words = words_of(grpo_llm, folder, max_staleness=2, **asking(server, iterations=5, learning_rate=5e-4))
    assert command_line("grpo_overlap.py", *words) == 1
    assert re.search(r"^error: EngineError: --vllm-url \S+ /v1/completions answered 500: EngineCore died",
                     capsys.readouterr().err, re.MULTILINE)
    server.trouble = lambda path, body: ()
    assert command_line("grpo_overlap.py", *words) == 0
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, 1), verdict
    assert [record["iteration"] for record in records(folder)] == [*range(6)]
    assert max(most for _, most in staleness(folder)) <= 2
    resumed = next(n for n in range(1, 5) if staleness(folder)[n][1] == 0)  # what it goes on with is fresh
    assert resumed <= 3


def test_a_sampler_far_from_the_policy_ends_the_run(stand_in, tmp_path):  # noqa: F811
    """As one does that keeps the head it began with."""
    server = stand_in()
    server.trouble = lambda path, body: server.handed.clear() or () if path == "/reset_prefix_cache" else ()
    with pytest.raises(SystemExit, match="EngineError: mismatch/kl is .* tolerated are 0.1 in float32"):
        overlap(tmp_path / "run", max_staleness=1, **asking(server, iterations=40, learning_rate=1e-2))


def test_what_cannot_sample_beside_the_update_is_refused():
    script = load_script(variants()["grpo_overlap.py"])
    for flags in (dict(), dict(engine="vllm")):
        with pytest.raises(ValueError, match="--max-staleness 2: expected --vllm-url, and no torchrun"):
            script.Args(max_staleness=2, **flags)


@pytest.mark.slow
def test_a_vllm_server_gets_its_weights_between_replies(vllm, tmp_path):  # noqa: F811
    server = Server(tmp_path / "server.log")
    try:
        server.ready()
        folder = overlap(tmp_path / "run", **asking(server, **TURNS | KEEP), max_staleness=1, iterations=6,
                         max_context_tokens=256, temperature=0.8, prompts_per_iteration=16)
        check_versions(folder, 0.8, 3e-4)  # vLLM rounds otherwise
        assert max(most for _, most in staleness(folder)) == 1 and validate(folder, strict=True)["ok"]
        played = [episode for n in range(1, 7) for episode in episodes(folder, f"train_step_{n:06d}")[0]]
        assert {episode["termination"] for episode in played} <= {"done", "length"}
        assert any(len(set(s["versions"])) > 1 for episode in played for s in episode["segments"])
        assert server.posts("/collective_rpc") == 7
        assert not re.search("Abort|HTTP/1.1\" [45]", server.output.read_text())
    finally:
        server.kill()


# A process of its own


def hf(folder, **flags):
    """A process with the variant of both diffs."""
    return process(variants()["grpo_overlap_hf.py"], *words_of(
        grpo_llm, folder, **SMALL["grpo_llm"] | flags))


def ended(run):
    out, _ = run.communicate(timeout=15 * PATIENCE)
    return run.returncode, out


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(minibatches=2), dict(TURNS, lora_rank=2, dtype="bfloat16")],
                         ids=["full", "turns"])
def test_a_copy_of_the_weights_samples_as_they_do(flags, tmp_path):
    one = train(grpo_llm, tmp_path / "one", **flags)
    code, said = ended(hf(tmp_path / "other", max_staleness=0, **flags))
    assert code == 0, said[-3000:]
    assert without_staleness(one) == without_staleness(tmp_path / "other")
    same_checkpoint(one, tmp_path / "other")


@pytest.mark.slow
def test_a_process_that_samples_ahead(tmp_path):
    """Its trainer killed, it ends too, and the same command continues; killed itself, it ends the run."""
    folder, flags = tmp_path / "run", dict(max_staleness=2, iterations=12, microbatch_tokens=20, **KEEP)
    run = hf(folder, **flags)
    wait_for(lambda: (folder / "checkpoints" / "step_000003").is_dir(), run)
    samplers = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    ended(run)
    assert samplers and not psutil.wait_procs(samplers, timeout=PATIENCE)[1]

    run = hf(folder, **flags)
    wait_for(lambda: (folder / "checkpoints" / "step_000006").is_dir(), run)
    sampler = max(psutil.Process(run.pid).children(), key=lambda child: child.memory_info().rss)
    sampler.kill()
    code, said = ended(run)
    assert code == 1 and "error: EngineError: the process that samples has ended" in said, said[-3000:]
    assert "Traceback" not in said

    code, said = ended(hf(folder, **flags))
    assert code == 0, said[-3000:]
    check_versions(folder)
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (2, 1), verdict
    assert [record["iteration"] for record in records(folder)] == [*range(13)]
    assert staleness(folder)[0] == (0, 0)
    assert 1 <= max(most for _, most in staleness(folder)) <= 2


def wait_for(condition, run):
    deadline = time.monotonic() + 10 * PATIENCE
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
