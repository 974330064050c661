"""docs/variants/overlap*.diff and inflight*.diff: what samples while the policy is updated."""

import itertools
import re
import time

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo_llm
from tests import test_updates as updates
from tests.run_folders import (
    SMALL,
    TINY,
    command_line,
    episodes,
    fork,
    load_script,
    log_lines,
    records,
    same_checkpoint,
    timeless,
    train,
    until,
    variants,
)
from tests.test_engines import PATIENCE, TURNS, asking, largest_difference, stand_in, words_of  # noqa: F401
from tools.validate_train_log import validate

KEEP = dict(checkpoint_every=1, keep_checkpoints=0, log_episodes=1.0, learning_rate=5e-4)


def overlap(folder, script="grpo_overlap.py", **flags):
    """A run of a variant in this process.  -> its folder"""
    script = load_script(variants()[script]) if isinstance(script, str) else script
    flags = SMALL["grpo_llm"] | dict(env_kwargs=("test_tasks=32",), run_dir=str(folder)) | flags
    script.main(script.Args(**flags))
    return folder


def long_replies(folder, length=100):
    """By random weights of the shipped model's shape, which end none, and a reward for any.  -> flags"""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with torch.no_grad():  # states have the sign of what was read, and so has the head, which is tied
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_input_embeddings().weight[tokenizer.eos_token_id, 0] = -1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return dict(model=str(folder), reward_fn=updates.CHECKSUM, max_response_tokens=length,
                prompts_per_iteration=8)


def once_asked(script, server, path):
    """An update begins only when the server has the four requests of the next rollout of three."""
    trainable_groups, updates_begun = script.trainable_groups, []

    def before_an_update(*given):
        updates_begun.append(given)
        until(lambda: sum(where == path and 4 in (body.get("n"), body.get("sampling_params", {}).get("n"))
                          for where, body in server.log) >= 4 * min(len(updates_begun) + 1, 3))
        return trainable_groups(*given)

    script.trainable_groups = before_an_update
    return script


def without_staleness(folder):
    return [{name: x for name, x in record.items() if not name.startswith("rollout/staleness")}
            for record in timeless(folder)]


def staleness(folder):
    """Of each iteration: mean, largest."""
    return [(record["rollout/staleness/mean"], record["rollout/staleness/max"])
            for record in records(folder)[1:]]


def check_versions(folder, temperature=1.0, bound=1e-4, first=TINY):
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
                folder / "checkpoints" / f"step_{version:06d}" if version else first)
            some = []
            for s in segments:
                own = iter(s["versions"])
                mask = [int(chosen and next(own) == version) for chosen in s["response_mask"]]
                some += [s | dict(response_mask=mask)] * any(mask)
            assert largest_difference(model, [dict(segments=some)], temperature) < bound


# Servers


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", "turns"])
def test_without_staleness_all_is_as_in_grpo_llm(case, stand_in, tmp_path):  # noqa: F811
    flags = asking(stand_in(lora=case == "turns"), iterations=2, eval_every=1, eval_tasks=1)
    flags |= TURNS | dict(lora_rank=2, dynamic_sampling=1) if case == "turns" else dict(minibatches=2)
    one = train(grpo_llm, tmp_path / "one", **flags)
    other = overlap(tmp_path / "other", max_staleness=0, **flags)
    assert without_staleness(one) == without_staleness(other)
    same_checkpoint(one, other, "step_000002")
    assert staleness(other) == 2 * [(0.0, 0.0)]


@pytest.mark.slow
def test_a_stale_token_counts_by_the_trainers_probability_over_the_samplers_up_to_the_cap(
        stand_in, tmp_path):  # noqa: F811
    """The third iteration, replayed from the checkpoints before and after it; small passes take long."""
    flags = dict(iterations=3, max_staleness=1, correction_bounds=(0.0, 1.001), microbatch_tokens=20)
    server = stand_in()
    script = once_asked(load_script(variants()["grpo_overlap.py"]), server, "/v1/completions")
    folder = overlap(tmp_path / "run", script, **asking(server, **KEEP) | flags)
    assert staleness(folder) == [(0, 0), (1, 1), (1, 1)] and validate(folder, strict=True)["ok"]
    check_versions(folder)
    tasks = {episode["task_id"] for n in (1, 2, 3) for episode in episodes(folder, f"train_step_{n:06d}")[0]}
    assert len(tasks) == 3 * 4
    played, _ = episodes(folder, "train_step_000003")
    segments = [s for group in updates.grpo_segments(played, flags) for s in group]
    (before, state), (after, end) = (updates.checkpoint(folder, n) for n in (2, 3))
    trained, model, record = updates.learnable(before), updates.base_model(), records(folder)[3]
    adam = updates.Adam(trained, state["optimizer"], record["train/learning_rate"], 0.95, 1.0)
    known = updates.known_before(model, trained, segments, flags)
    expected = updates.replay(adam, model, segments, known, updates.of_grpo, flags)
    updates.check_step(adam, before, after, end["optimizer"], 1e-4)
    assert expected["mismatch/frac_capped"] > 0.1 and expected["mismatch/kl"] > 1e-6
    for name in ("mismatch/kl", "mismatch/frac_capped"):
        assert record[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-9), name


@pytest.mark.slow
def test_a_server_lost_while_it_samples_ahead_is_one_line_and_the_same_command_continues(
        stand_in, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(variants()["grpo_overlap.py"].parent)
    server, hits, folder = stand_in(), [], tmp_path / "run"
    server.trouble = lambda path, body: (500, "EngineCore died") if path == "/v1/completions" and (
        hits.append(path) or len(hits) > 2 + 3 * 4) else ()
    words = words_of(grpo_llm, folder, max_staleness=2, **asking(server, iterations=5, learning_rate=5e-4))
    assert command_line("grpo_overlap.py", *words) == 1
    assert re.search(r"^error: EngineError: --vllm-url \S+: /v1/completions: 500 .*EngineCore died",
                     capsys.readouterr().err, re.MULTILINE)
    server.trouble = lambda path, body: ()
    assert command_line("grpo_overlap.py", *words) == 0
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, 1), verdict
    assert [record["iteration"] for record in records(folder)] == [*range(6)]
    assert max(most for _, most in staleness(folder)) <= 2
    assert (0, 0) in staleness(folder)[1:4]  # what it goes on with is fresh


@pytest.mark.slow
def test_a_request_names_the_adapter_that_is_there_when_it_is_sent(stand_in, tmp_path):  # noqa: F811
    flags = asking(stand_in(lora=True), **TURNS | dict(lora_rank=2, iterations=12, learning_rate=1e-4))
    assert max(most for _, most in staleness(overlap(tmp_path / "run", max_staleness=1, **flags))) == 1


@pytest.mark.slow
def test_a_sampler_far_from_the_policy_ends_the_run(stand_in, tmp_path):  # noqa: F811
    """As one does that keeps the head it began with."""
    server = stand_in()
    server.trouble = lambda path, body: server.handed.clear() or () if path == "/resume" else ()
    with pytest.raises(SystemExit, match="mismatch/kl is .* expected 0.1 at most"):
        overlap(tmp_path / "run", max_staleness=1, **asking(server, iterations=40, learning_rate=1e-2))


def test_what_cannot_sample_beside_the_update_is_refused():
    script = load_script(variants()["grpo_overlap.py"])
    for flags in (dict(), dict(engine="vllm")):
        with pytest.raises(ValueError, match="--max-staleness 2: expected --vllm-url, and no torchrun"):
            script.Args(max_staleness=2, **flags)


@pytest.mark.slow
def test_a_rollout_begins_before_the_last_replies_of_the_one_before_it(stand_in, tmp_path):  # noqa: F811
    """docs/variants/inflight.diff: or a server would have less and less to do until they come."""
    server, asked, late = stand_in(), [], []

    def wait(path, body):
        if path != "/inference/v1/generate" or body["sampling_params"]["n"] != 4:  # an evaluation's
            return ()
        asked.append(body)
        deadline = time.monotonic() + PATIENCE
        while len(asked) == 4 and not late:  # the first rollout's last reply, until the second one has asked
            if time.monotonic() > deadline:
                late.append(body)
            time.sleep(0.01)
        return ()

    server.trouble = wait
    flags = asking(server, max_staleness=1, iterations=3, **KEEP)
    script = once_asked(load_script(variants()["grpo_inflight.py"]), server, "/inference/v1/generate")
    folder = overlap(tmp_path / "run", script, **flags)
    assert not late, "the second rollout waited for the end of the first"
    assert [most for _, most in staleness(folder)] == [0, 1, 1]
    check_versions(folder)


@pytest.mark.slow
def test_a_server_that_started_anew_does_not_know_its_weights_and_ends_the_run(stand_in, tmp_path):  # noqa: F811
    """docs/variants/inflight.diff"""
    server = stand_in()
    server.trouble = lambda path, body: () if path != "/resume" else setattr(
        server, "next_version", "default") or ()
    with pytest.raises(SystemExit, match="not an answer of vLLM's .*'default'"):
        overlap(tmp_path / "run", "grpo_inflight.py", **asking(server))


# A process of its own


def hf(folder, name="grpo_overlap_hf.py", **flags):
    """A process with the variant of both diffs, or of all three.  -> it, the file of what it says"""
    path, said = variants()[name], folder.with_name("said")
    load_script(path)  # which tells processes where to find it
    words = words_of(grpo_llm, folder, **SMALL["grpo_llm"] | flags)
    return fork(said, path.name, *words, daemon=False), said  # daemons may have no children


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_overlap_hf.py", "grpo_inflight_hf.py"])
def test_a_copy_of_the_weights_samples_as_they_do(name, tmp_path):
    flags = dict(TURNS, lora_rank=2, dtype="bfloat16")
    one = train(grpo_llm, tmp_path / "one", **flags)
    run, said = hf(tmp_path / "other", name, max_staleness=0, **flags)
    run.join(300)
    assert run.exitcode == 0, said.read_text()[-3000:]
    assert without_staleness(one) == without_staleness(tmp_path / "other")
    same_checkpoint(one, tmp_path / "other")


@pytest.mark.slow
def test_a_process_that_samples_ahead(tmp_path):
    """Killed, it ends the run, and the same command continues; its trainer killed, it ends, too."""
    folder, flags = tmp_path / "run", dict(max_staleness=2, iterations=99, microbatch_tokens=20, **KEEP)

    def reaches(step):
        run, said = hf(folder, **flags)
        while not (folder / "checkpoints" / f"step_{step:06d}").is_dir():
            assert run.is_alive(), said.read_text()[-3000:]
            time.sleep(0.01)
        return run, said, psutil.Process(run.pid).children(recursive=True)

    run, said, samplers = reaches(4)
    max(samplers, key=lambda child: child.memory_info().rss).kill()
    run.join(300)
    assert run.exitcode == 1 and "Traceback" not in said.read_text()
    assert "error: EngineError: the process that samples has ended" in said.read_text()

    began = len(records(folder))
    run, _, samplers = reaches(began + 4)
    run.kill()
    run.join()
    assert samplers and not psutil.wait_procs(samplers, timeout=PATIENCE)[1]
    check_versions(folder)
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (1, 1), verdict
    (mark,) = (line["resume"] for line in log_lines(folder) if "resume" in line)
    assert staleness(folder)[0] == staleness(folder)[mark["iteration"]] == (0, 0)
    assert 1 <= max(most for _, most in staleness(folder)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", "lora"])
def test_a_reply_goes_on_with_new_weights_between_two_tokens(case, tmp_path):
    """Each token has the log-probability of the weights that it names, given all tokens before it."""
    flags = dict(KEEP, lora_rank=0, max_staleness=2, iterations=8, eval_every=0, temperature=1.5,
                 **long_replies(tmp_path / "long"))
    if case == "lora":
        flags |= dict(lora_rank=2, checkpoint_every=8)
    run, said = hf(tmp_path / "run", "grpo_inflight_hf.py", **flags)
    run.join(300)
    assert run.exitcode == 0, said.read_text()[-3000:]
    mixed, folder = 0, tmp_path / "run"
    for iteration in range(1, 9):
        for episode in episodes(folder, f"train_step_{iteration:06d}")[0]:
            (segment,) = episode["segments"]
            assert segment["versions"] == sorted(segment["versions"])
            mixed += len(set(segment["versions"])) > 1
    assert mixed > 20, "no weights came while a reply was being sampled"
    if case == "full":
        check_versions(folder, temperature=1.5, first=tmp_path / "long")
    assert 1 <= max(most for _, most in staleness(folder)) <= 2
    assert validate(folder, strict=True)["ok"]


def test_what_cannot_take_weights_in_flight_is_refused():
    script, url = load_script(variants()["grpo_inflight_hf.py"]), dict(engine="vllm", vllm_url=("http://a:1",))
    with pytest.raises(ValueError, match="in flight to --engine hf alone"):
        script.Args(**url)
    assert script.Args().max_staleness == 1
    script = load_script(variants()["grpo_inflight.py"])
    assert script.Args(**url).max_staleness == 1
    for flags in (dict(), url | dict(lora_rank=2)):
        with pytest.raises(ValueError, match="in flight to --vllm-url, without LoRA"):
            script.Args(**flags)
