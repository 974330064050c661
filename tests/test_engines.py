"""Servers of grpo_llm.py and ppo_llm.py, by a stand-in; adapters that a run goes on from; vLLM itself."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import peft
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import FileWriter
from transformers import AutoModelForCausalLM

import envs
import grpo_llm
import ppo_llm
from tests.run_folders import (
    ROOT,
    TINY,
    as_words,
    command_line,
    episodes,
    free_port,
    full_forward,
    killed_after,
    load_script,
    log_lines,
    ranks,
    records,
    same_end,
    torchrun_in_turn,
    train,
    until,
    variants,
)
from tests.test_checks import APPLIED, saved_adapter
from tools.validate_train_log import validate

torch.set_num_threads(1)
PATIENCE = 20.0  # what hangs for so long will not go on [s]
FAST = dict(learning_rate=2e-3, warmup_iterations=0)  # so that a sampler that missed an update would show
TURNS = dict(env="tests/two_turn.py:TwoTurn", env_kwargs=("test_tasks=32",))


class StandInServer(ThreadingHTTPServer):
    request_queue_size = 128  # many may ask at once


class StandIn:
    """Speaks vLLM's protocol, with a model of its own: it replies with true log-probabilities, the same reply
    whenever it is asked the same. What it is handed counts from the next reset of its prefix cache on.

    trouble(path, body) may answer in its place: with a status and a text, or None to hang up.
    """

    def __init__(self, lora=False):
        self.lora, self.log, self.port = lora, [], 0
        self.trouble, self.lock = lambda path, body: (), threading.Lock()
        self.start()

    def start(self):
        """A new process, as it were: with the weights that it was started with and no adapter."""
        self.model, self.adapters, self.handed = AutoModelForCausalLM.from_pretrained(TINY), {}, {}
        self.version = self.next_version = "default"
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.clone())  # not tied
        self.http = StandInServer(("127.0.0.1", self.port), self.handler())
        self.http.daemon_threads = self.up = True
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()

    def close(self):
        if self.up:
            self.up = False
            self.http.shutdown()
            self.http.server_close()

    def handler(self):
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # a connection stays for the next request

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.path = self.path.partition("?")[0]
                answer = standin.trouble(self.path, body)
                if answer is None:
                    self.close_connection = True  # without a word
                    return
                if answer == ():
                    with standin.lock:
                        standin.log.append((self.path, body))
                        answer = standin.answer(self.path, body)
                status, text = answer if isinstance(answer[1], str) else (answer[0], json.dumps(answer[1]))
                with contextlib.suppress(OSError):  # who asked is gone
                    self.send_response(status)
                    self.send_header("content-length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *_):
                pass
        return Handler

    def answer(self, path, body):
        if path == "/v1/load_lora_adapter" and self.lora:
            base = AutoModelForCausalLM.from_pretrained(TINY)
            adapted = peft.PeftModel.from_pretrained(base, body["lora_path"]).eval()
            assert body["lora_name"] not in self.adapters
            self.adapters = {body["lora_name"]: adapted}  # alone, as with --max-loras 1
            return 200, "Success: LoRA adapter added"
        if path == "/collective_rpc" and not self.lora:
            assert body["method"] == "reload_weights"
            self.handed = load_file(Path(body["kwargs"]["weights_path"], "model.safetensors"))
            return 200, dict(results=[None])
        if path in ("/pause", "/resume"):
            if path == "/resume":
                self.model.load_state_dict(self.handed, strict=False)
                self.version = self.next_version
            return 200, dict(status=path)
        if path == "/v1/completions":
            return 200, self.completions(**body)
        if path == "/update_weight_version":
            self.next_version = body["new_version"]
            return 200, dict(success=True, new_version=self.next_version)
        if path == "/inference/v1/generate":
            return 200, self.generate(**body)
        return 404, "not found"

    def completions(self, model, prompt, n, temperature, max_tokens, **_):
        if temperature == 0 and n > 1:
            raise ValueError("vLLM refuses several greedy replies")
        policy = self.adapters[model] if model else self.model
        seeds = [zlib.crc32(f"{prompt} {index}".encode()) for index in range(n)]
        replies = grpo_llm.generate(policy, [prompt] * n, max_tokens, temperature, [2], seeds)
        return dict(choices=[choice(ids, logprobs, index) for index, (ids, logprobs) in enumerate(replies)])

    def generate(self, token_ids, sampling_params):
        """As completions, in the protocol that tells the weights of each token."""
        answer = self.completions(None, token_ids, **sampling_params)
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]["token_logprobs"]
            choice["logprobs"] = dict(content=[dict(logprob=logprob) for logprob in logprobs])
            choice["weight_versions"] = [dict(version=self.version, start=0, end=len(logprobs))]
        return answer

    def asked(self, path="/v1/completions"):
        return [body for asked, body in self.log if asked == path]


def choice(ids, logprobs, index):
    return dict(index=index, token_ids=ids, finish_reason="stop", text="", prompt_token_ids=None,
                logprobs=dict(token_logprobs=logprobs, tokens=[""] * len(ids)))


@pytest.fixture
def stand_in():
    with contextlib.ExitStack() as servers:
        yield lambda **options: servers.enter_context(contextlib.closing(StandIn(**options)))


def asking(*servers, **flags):
    return dict(engine="vllm", vllm_url=tuple(server.url for server in servers), eval_every=0, eval_tasks=1,
                checkpoint_every=9) | FAST | flags


@pytest.mark.parametrize(("script", "lora_rank"), [
    (grpo_llm, 0), *(pytest.param(script, 2, marks=pytest.mark.slow) for script in (grpo_llm, ppo_llm))])
def test_every_server_samples_with_the_policys_weights_in_every_iteration(
        script, lora_rank, stand_in, tmp_path):
    servers = [stand_in(lora=bool(lora_rank)) for _ in range(2)]
    flags = asking(*servers, lora_rank=lora_rank, temperature=0.7, iterations=2, group_size=3,
                   prompts_per_iteration=3, minibatches=1)
    flags |= (TURNS if lora_rank else {}) | (dict(critic_warmup=0) if script is ppo_llm else {})
    folder = train(script, tmp_path / "run", **flags)
    check_run(folder, 2)
    for record in records(folder)[1:]:
        assert abs(record["mismatch/kl"]) < 1e-9 < abs(record["train/grad_norm"])
        assert not lora_rank or record["rollout/turns"] > 1
    asked = [len(server.asked()) for server in servers]
    assert abs(asked[0] - asked[1]) <= 8  # one of each rollout's
    sampled = [body for server in servers for body in server.asked() if body["temperature"] == 0.7]
    assert {body["n"] for body in sampled} >= {3}  # a group's replies are one request
    for body in sampled:
        model, prompt, n = (body.pop(name) for name in ("model", "prompt", "n"))
        assert model.startswith("policy-") if lora_rank else model is None
        # Every one that a server would otherwise take from the model's own generation config.
        assert 1 <= n <= 3 and body == dict(
            temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
            frequency_penalty=0.0, logprobs=0, max_tokens=10, stop_token_ids=[2, 2], return_token_ids=True)
    for server in servers:
        assert len(server.asked("/v1/load_lora_adapter" if lora_rank else "/collective_rpc")) == 3
        assert len(server.asked("/pause")) == len(server.asked("/resume")) == 3
    assert not list(folder.glob("sync*"))  # what was handed over is gone


def test_two_processes_sample_with_the_one_adapter_that_the_first_hands_over(stand_in, tmp_path):
    server = stand_in(lora=True)
    flags = asking(server, lora_rank=2, iterations=0, eval_tasks=2)
    ranks(2, [("grpo_llm.py", *words_of(grpo_llm, tmp_path / "run", **flags))], tmp_path)
    (handed,) = server.asked("/v1/load_lora_adapter")
    asked = {body["model"] for body in server.asked()}
    assert asked == {handed["lora_name"]}, f"{asked} were asked, {handed} is what the server has"
    assert "val/countdown/greedy" in records(tmp_path / "run")[0]


def words_of(script, folder, **flags):
    sizes = dict(iterations=3, prompts_per_iteration=4, group_size=4, eval_samples=2, minibatches=1)
    own = dict(critic_minibatches=2, critic_warmup=0) if script is ppo_llm else {}
    return as_words(sizes | own | dict(env_kwargs=("test_tasks=32",), run_dir=folder) | flags)


def command(script, folder, **flags):
    return command_line(f"{script.__name__}.py", *words_of(script, folder, **flags))


def ends_with_one_line(capsys, expected, script, folder, **flags):
    """Exit code 1 and one line, no traceback."""
    capsys.readouterr()
    assert command(script, folder, **flags) == 1
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.search(expected, line) and "Traceback" not in said, said


@pytest.mark.parametrize(("script", "path", "trouble"), [
    (grpo_llm, "/collective_rpc", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (grpo_llm, "/v1/completions", (500, "EngineCore died")), (ppo_llm, "/collective_rpc", None)))])
def test_a_server_lost_in_mid_run_is_one_line_and_the_same_command_continues(
        script, path, trouble, stand_in, tmp_path, capsys):
    """As it is asked in the second iteration, or is handed what the first one has learned: that is kept, with
    its numbers. Meanwhile it was started anew, with the weights of its disk."""
    server = stand_in()
    flags = asking(server, iterations=2, prompts_per_iteration=2, group_size=4 if script is grpo_llm else 1)
    assert command(script, tmp_path / "whole", **flags) == 0
    folder, hits = tmp_path / "run", []
    count, logged = {"/v1/completions": (2 + 2 + 1, [0, 1]), "/collective_rpc": (2, [0])}[path]
    server.trouble = lambda asked, body: trouble if asked == path and (
        hits.append(asked) or len(hits) >= count) else ()
    ends_with_one_line(capsys, rf"^error: EngineError: --vllm-url {server.url}: {path}: .*receipt: ",
                       script, folder, **flags)
    assert [record["iteration"] for record in records(folder)] == logged
    named = json.loads((folder / "checkpoints" / "state.json").read_text())
    assert named["last"] == "step_000001"
    server.close()
    server.start()
    server.trouble = lambda asked, body: ()
    assert command(script, folder, **flags) == 0
    same_end(tmp_path / "whole", folder, "step_000002")
    check_run(folder, 2, errors=1)


@pytest.mark.parametrize(("script", "befalls"), [
    (grpo_llm, lambda handed: (200, "{}")), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (ppo_llm, lambda handed: (200, "{}")), (grpo_llm, lambda handed: handed.clear() or ()),
        (grpo_llm, lambda handed: handed.pop("lm_head.weight") is None or ())))])
def test_a_sampler_with_other_weights_ends_the_run_before_a_step(script, befalls, stand_in, tmp_path, capsys):
    """The prefix cache is not reset; or nothing of what is handed over arrives, or all but the head."""
    server, folder = stand_in(), tmp_path / "run"
    server.trouble = lambda path, body: befalls(server.handed) if (
        path == "/resume" and server.asked(path)) else ()  # not the first time
    flags, says = asking(server, prompts_per_iteration=3), r".*mismatch/kl is \S+ nats .* expected 1e-06"
    ends_with_one_line(capsys, f"^error: EngineError: {says}", script, folder, **flags)
    log = records(folder)
    assert [record["iteration"] for record in log] == [0, 1] and abs(log[1]["mismatch/kl"]) < 1e-9
    state = torch.load(folder / "checkpoints" / "step_000001" / "trainer_state.pt")
    assert state["opt_steps"] == log[1]["opt_steps"] > 0
    server.trouble = lambda path, body: ()
    assert command(script, folder, **flags) == 0
    check_run(folder, 3, errors=1)


TWO = [choice([5, 2], [-1.0, -1.0], index) for index in (0, 1)]


@pytest.mark.parametrize(("path", "answer", "expected"), [
    ("/v1/completions", (200, '{"choices": ['), "not an answer of vLLM's.*JSONDecodeError"),
    ("/v1/completions", (200, dict(choices=None)), "not an answer of vLLM's"),
    ("/v1/completions", (200, dict(choices=TWO[:1])), "not an answer of vLLM's.*shorter"),
    ("/v1/completions", (200, dict(choices=[one | dict(token_ids=[2]) for one in TWO])), "1 ids, 2 log"),
    ("/v1/completions", (200, dict(choices=[choice([5], [0.0], n) for n in (0, 1)])), "1 logprobs, stop"),
    ("/v1/completions", (400, "maximum context length is 199"), "/v1/completions: 400 .*length is 199"),
    ("/collective_rpc", (404, "no such endpoint"), "/collective_rpc: 404 .*endpoint.*docs/engines.md"),
    ("/pause", (404, "no such endpoint"), "/pause[?]mode=abort: 404 .*endpoint.*docs/engines.md")])
def test_a_wrong_answer_is_one_line_that_names_the_server(path, answer, expected, stand_in, tmp_path, capsys):
    server = stand_in()
    server.trouble = lambda asked, body: answer if asked == path else ()
    ends_with_one_line(capsys, f"--vllm-url {server.url}.*{expected}", grpo_llm, tmp_path / "run",
                       **asking(server, eval_tasks=1))


def test_a_missing_vllm_is_one_line_that_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm.py").write_text("raise ImportError('No module named vllm')")
    monkeypatch.syspath_prepend(tmp_path)
    ends_with_one_line(capsys, r"--engine vllm: .*requirements-vllm\.txt.* \(No module.*vllm", grpo_llm,
                       tmp_path / "run", engine="vllm")
    assert (ROOT / "requirements-vllm.txt").is_file()


def check_run(folder, iterations, errors=0):
    """A valid log without a gap, of a sampler that had the policy's weights in every iteration."""
    verdict = validate(folder, strict=True)
    counts = verdict["resumes"], verdict["errors"]
    assert verdict["ok"] and not verdict["warnings"] and counts == (errors, errors), verdict
    log = records(folder)
    assert [record["iteration"] for record in log] == list(range(iterations + 1))
    updated = [record for record in log[1:] if record.get("rollout/groups_trainable", 1)]
    assert updated and all(abs(record["mismatch/kl"]) < 1e-6 for record in updated)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of an adapter as a run saved it; its config says dropout, as those of others may."""
    folder = train(grpo_llm, tmp_path_factory.mktemp("adapter") / "run", lora_rank=4, iterations=2,
                   eval_every=0, eval_tasks=1, learning_rate=5e-3)
    change(folder / "checkpoints" / "step_000002" / "adapter_config.json", lora_dropout=0.5)
    return folder / "checkpoints" / "step_000002"


def adapted(folder):
    """The base with an adapter, by PEFT alone."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_an_adapter_is_gone_on_from_without_its_dropout(script, adapter, countdown_tiny, tmp_path):
    own = dict(critic_warmup=0, critic_learning_rate=1e-30) if script is ppo_llm else {}
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    flags = dict(lora_adapter_path=str(adapter), eval_every=0, eval_tasks=1, kl_coef=0.1, keep_checkpoints=0,
                 checkpoint_every=1, iterations=2, log_episodes=1.0, **FAST, **own)
    before = Path(TINY, "model.safetensors").read_bytes()
    whole = train(script, tmp_path / "whole", **flags)

    # The first replies are the adapter's, and so is the reference of the penalty.
    played, _ = episodes(whole, "train_step_000001")
    assert largest_difference(adapted(adapter), played, 1.0) < 1e-4
    assert largest_difference(countdown_tiny[0], played, 1.0) > 0.05
    log = records(whole)
    assert abs(log[1]["train/kl_loss"]) < 1e-9 < log[2]["train/kl_loss"]
    # Dropout would make sampler and trainer differ, and old and new log-probabilities.
    assert all(abs(record["mismatch/kl"]) < 1e-9 for record in log[1:])
    first, last = (whole / "checkpoints" / f"step_00000{n}" for n in (1, 2))
    config = json.loads((last / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 32, 0.0)
    assert Path(TINY, "model.safetensors").read_bytes() == before

    if script is ppo_llm:  # the critic starts from the adapter too, as one of its own
        critic = torch.load(first / "trainer_state.pt")["critic"]
        mine = {key.split("layers.")[-1].replace(".default", ""): tensor for key, tensor in critic.items()}
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
            torch.testing.assert_close(mine[name.split("layers.")[-1]], tensor)

    # A continued run takes its checkpoint's adapter, not that of the flag; one that took its name is refused.
    folder = killed_after(whole, tmp_path / "run", 1)
    train(script, folder, **flags)
    same_end(whole, folder, "step_000002")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(envs.BadInput, match=r"model_sha256 \w+ \(it was"):
        train(script, folder, **flags)

    for more in (dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
                 dict(trainable_token_indices=[3, 4])):  # of a vocabulary that embedding and head share
        base, path = AutoModelForCausalLM.from_pretrained(TINY), tmp_path / next(iter(more))
        config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **more)
        peft.get_peft_model(base, config).save_pretrained(path)
        folder = train(script, path / "run", **flags | dict(lora_adapter_path=str(path)))
        tensors = load_file(folder / "checkpoints" / "step_000002" / "adapter_model.safetensors")
        for name, tensor in load_file(path / "adapter_model.safetensors").items():
            assert not torch.equal(tensors[name], tensor)


def change(config, **options):
    config.write_text(json.dumps(json.loads(config.read_text()) | options))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("damage", [
    lambda weights, config: os.truncate(weights, weights.stat().st_size // 2),
    lambda weights, config: weights.unlink(),
    lambda weights, config: change(config, peft_type="NONE"),
    lambda weights, config: change(config, r=8),
    lambda weights, config: change(config, target_modules=["gate_proj", "no_such_proj"]),
    lambda weights, config: save_file(
        {key: tensor for key, tensor in load_file(weights).items() if "layers.2." not in key}, weights)])
def test_a_wrong_adapter_is_one_line_that_names_it(damage, adapter, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage(folder / "adapter_model.safetensors", folder / "adapter_config.json")
    ends_with_one_line(capsys, rf"--lora-adapter-path {folder}: (no adapter for|expected a folder with adap)",
                       grpo_llm, tmp_path / "run", lora_adapter_path=folder, iterations=0, eval_tasks=1)
    assert not list((tmp_path / "run").glob("events*"))


@pytest.fixture(scope="module")
def vllm():
    """The library, as scripts import it. Every engine stays: one that goes takes along what they share."""
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
                       TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
    vllm = pytest.importorskip("vllm")
    kept, create = [], vllm.LLM.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.LLM, "__init__", lambda llm, *rest, **options: kept.append(llm) or create(
            llm, *rest, **options))
        yield vllm


VLLM = dict(engine="vllm", max_context_tokens=320, temperature=0.8, eval_every=0, eval_tasks=4,
            log_episodes=1.0, checkpoint_every=1, keep_checkpoints=0, warmup_iterations=0)
RATES = {0: 2e-3, 8: 1e-2}  # learning rates of full weights and of an adapter


@pytest.mark.slow
@pytest.mark.parametrize("script, lora_rank", [(grpo_llm, 0), (ppo_llm, 8)])
def test_with_vllm_each_sampled_token_has_the_trainers_logprob_and_a_resume_is_exact(
        vllm, script, tmp_path, lora_rank):
    own = dict(critic_warmup=0, prompts_per_iteration=16) if script is ppo_llm else {}
    flags = VLLM | own | dict(TURNS if lora_rank else {}, lora_rank=lora_rank, learning_rate=RATES[lora_rank])
    folder = train(script, tmp_path / "run", **flags)
    check_run(folder, 4)
    assert not lora_rank or all(record["rollout/turns"] > 1 for record in records(folder)[1:])
    assert log_lines(folder)[0]["meta"]["versions"]["vllm"]
    before = None
    for iteration in range(1, 5):
        checkpoint = folder / "checkpoints" / f"step_{iteration - 1:06d}"
        model = adapted(checkpoint) if iteration > 1 and lora_rank else AutoModelForCausalLM.from_pretrained(
            checkpoint if iteration > 1 else TINY)
        played, _ = episodes(folder, f"train_step_{iteration:06d}")
        assert largest_difference(model, played, 0.8) < 1e-4
        assert before is None or largest_difference(before, played, 0.8) > 1e-2  # other weights give others
        before = model
    assert not list(folder.glob("sync/*"))  # nothing is left of hand-overs
    if not lora_rank:
        again = killed_after(folder, tmp_path / "again", 2)
        torch.manual_seed(1234)  # what this process did before must not matter
        train(script, again, **flags)
        same_end(folder, again)


def largest_difference(model, played, temperature):
    """Between what the sampler reported and a forward pass of each whole sequence, in float64."""
    found = []
    for s in (segment for episode in played for segment in episode["segments"]):
        with torch.no_grad():
            own, _ = full_forward(model, grpo_llm.Segment(s["prompt_ids"], s["response_ids"]), temperature)
        mask = torch.tensor(s["response_mask"]) == 1
        found.append((own - torch.tensor(s["rollout_logprobs"]))[mask].abs().max())
    return float(max(found))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["ranks", "excluded", "dora", "bias", "saved", "tokens"])
def test_vllm_applies_an_adapter_as_it_was_trained_or_refuses_it(vllm, name, tmp_path, capsys):
    saved_adapter(tmp_path / "adapter", **APPLIED[name])
    flags = VLLM | dict(lora_adapter_path=str(tmp_path / "adapter"), iterations=2)
    if name not in ("ranks", "excluded"):
        says = "^error: BadInput: --engine vllm: it refuses the adapter"
        ends_with_one_line(capsys, says, grpo_llm, tmp_path / "run", **flags)
        return
    trained = [r for r in records(train(grpo_llm, tmp_path / "run", **flags)) if "mismatch/kl" in r]
    assert trained and all(abs(record["mismatch/kl"]) < 1e-6 for record in trained)


@pytest.mark.slow
@pytest.mark.parametrize("is_reset", [True, False])
def test_what_vllm_keeps_of_a_long_prompt_is_dropped_with_the_weights_that_made_it(
        vllm, tmp_path, monkeypatch, capsys, is_reset):
    """One prompt of more than a block of its cache (128 tokens), again and again."""
    (tmp_path / "long.py").write_text(LONG_PROMPT)
    folder = tmp_path / "run"
    flags = VLLM | dict(env=f"{tmp_path / 'long.py'}:Long", env_kwargs=("test_tasks=32",),
                        reward_fn="tests/test_draws.py:checksum", learning_rate=2e-3, iterations=3)
    if not is_reset:
        monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda llm: True)
        ends_with_one_line(capsys, "^error: EngineError: .*mismatch/kl is ", grpo_llm, folder, **flags)
        return
    train(grpo_llm, folder, **flags)
    assert min(record["prompt_length/min"] for record in records(folder)[1:]) > 200
    assert max(abs(record["mismatch/kl"]) for record in records(folder)[1:]) < 1e-9


LONG_PROMPT = """
import dataclasses
from envs.countdown import Countdown

class Long(Countdown):
    def task(self, split, index):
        task = super().task(split, 0)
        content = " ".join([task.messages[0]["content"]] * 40)
        return dataclasses.replace(task, messages=[dict(role="user", content=content)])
"""


@pytest.mark.slow
def test_many_hand_overs_leave_memory_and_disk_as_they_are(vllm, tmp_path, monkeypatch):
    """And where vLLM fails at last, all is kept."""
    folder, step = tmp_path / "run", "vllm.v1.engine.llm_engine.LLMEngine.step"
    monkeypatch.setattr(FileWriter, "add_summary", lambda writer, summary, at, *more: at == 60 and (
        monkeypatch.setattr(step, None)))
    with pytest.raises(SystemExit, match="error: EngineError: --engine vllm: 'NoneType' object is not"):
        train(grpo_llm, folder, **VLLM | dict(log_episodes=0.0, checkpoint_every=99), lora_rank=8,
              iterations=61, group_size=2, prompts_per_iteration=2)
    assert (folder / "checkpoints" / "step_000060").is_dir()
    memory = [record["system/memory_usage"] for record in records(folder)]
    assert min(memory[50:60]) - min(memory[20:30]) < 0.03 * 30 / 39  # GiB; between collections it grows
    assert not list(folder.glob("sync/*"))


class Server:
    """A vLLM server on a free port of this machine."""

    def __init__(self, output, *flags):
        self.port = free_port()
        self.url, self.output = f"http://127.0.0.1:{self.port}", output
        log = output.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY,
             "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "policy",
             "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
             "--logprobs-mode", "processed_logprobs", "--enable-scale-out", *flags],
            stdout=log, stderr=log, start_new_session=True, env=os.environ | dict(
                VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1", VLLM_LOGGING_LEVEL="INFO",
                VLLM_ALLOW_RUNTIME_LORA_UPDATING="True", VLLM_ENABLE_V1_MULTIPROCESSING="1",
                TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"))

    def ready(self):
        deadline = time.monotonic() + 20 * PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            try:
                if requests.get(self.url + "/health", timeout=PATIENCE).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.5)
        raise AssertionError(self.output.read_text()[-3000:])

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def posts(self, path):
        """How many of these requests it answered."""
        return len(re.findall(rf'"POST {path} HTTP\S+" 200', self.output.read_text()))


@pytest.fixture(scope="module")
def servers(vllm, tmp_path_factory):
    """Two servers, which start together: for full weights, and for adapters."""
    folder = tmp_path_factory.mktemp("servers")
    both = [Server(folder / "full.log"),
            Server(folder / "lora.log", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "1",
                   "--max-cpu-loras", "4")]
    yield both
    for one in both:
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, pytest.param(8, marks=pytest.mark.release)])
def test_two_processes_sample_with_vllm(vllm, servers, tmp_path, lora_rank):
    """Each with an engine of its own; or with one server, which another run has handed adapters before."""
    server, url = servers[1].ready() if lora_rank else None, {}
    if server:
        assert command(ppo_llm, tmp_path / "before", **asking(
            server, max_context_tokens=256, lora_rank=8, learning_rate=RATES[8], iterations=1)) == 0
        check_run(tmp_path / "before", 1)
        # Requests that nobody waits for any more are under way when the next adapter is handed over.
        assert command(grpo_llm, tmp_path / "late", **asking(
            server, max_context_tokens=256, max_response_tokens=200, lora_rank=8, iterations=2, group_size=64,
            prompts_per_iteration=4, temperature=2.0, episode_timeout=0.3)) == 0
        assert records(tmp_path / "late")[-1]["rollout/termination/timeout"] > 0
        url = dict(vllm_url=server.url)
    words = words_of(grpo_llm, tmp_path / "run", **url, engine="vllm", max_context_tokens=256, iterations=2,
                     lora_rank=lora_rank or 0, learning_rate=RATES[lora_rank or 0], warmup_iterations=0,
                     prompts_per_iteration=7, eval_every=0, eval_tasks=3)
    torchrun_in_turn(2, [("grpo_llm.py", *words)], tmp_path)
    check_run(tmp_path / "run", 2)
    if server:
        assert server.posts("/v1/load_lora_adapter") == 2 + 3 + 3  # the starts, and each iteration
        cards = requests.get(server.url + "/v1/models", timeout=PATIENCE).json()["data"]
        assert cards[-1]["root"].startswith(str(tmp_path / "run" / "sync"))
        late = dict(model=cards[-2]["id"], prompt=[1], max_tokens=1)  # of an adapter that the disk has lost
        assert requests.post(server.url + "/v1/completions", json=late, timeout=PATIENCE).ok


@pytest.mark.slow
def test_a_server_gets_its_weights_between_replies_where_the_trainer_does_not_wait(servers, tmp_path):
    """docs/variants/overlap.diff, whose other tests are in test_overlap.py."""
    from tests.test_overlap import KEEP, check_versions, overlap, staleness
    server = servers[0].ready()
    before = server.posts("/collective_rpc")
    flags = asking(server, **TURNS | KEEP | dict(learning_rate=1e-4))  # stale by less than is refused
    folder = overlap(tmp_path / "run", **flags, max_staleness=1, iterations=6, max_context_tokens=256,
                     temperature=0.8, prompts_per_iteration=16)
    check_versions(folder, 0.8, 3e-4)  # vLLM rounds otherwise
    assert max(most for _, most in staleness(folder)) == 1 and validate(folder, strict=True)["ok"]
    played = [episode for n in range(1, 7) for episode in episodes(folder, f"train_step_{n:06d}")[0]]
    assert {episode["termination"] for episode in played} <= {"done", "length"}
    assert any(len(set(s["versions"])) > 1 for episode in played for s in episode["segments"])
    assert server.posts("/collective_rpc") - before == 7
    assert not re.search("Abort|HTTP/1.1\" [45]", server.output.read_text())


@pytest.mark.slow
def test_a_server_takes_weights_between_two_tokens_of_a_reply(servers, tmp_path):
    """docs/variants/inflight.diff: each token has the log-probability of the weights that it names."""
    from tests.test_overlap import KEEP, check_versions, long_replies, overlap, staleness
    script, server = load_script(variants()["grpo_inflight.py"]), servers[0].ready()
    trainable_groups, post, asked, held = script.trainable_groups, script.VllmServers.post, [], []

    def posted(engine, url, path, body):
        if body.get("sampling_params", {}).get("n") == 4:  # not an evaluation's
            asked.append(path)
        return post(engine, url, path, body)

    def before_an_update(*given):  # which begins when replies of the newest rollout have some of their tokens
        until(lambda: len(asked) == 8 * min(len(held) + 3, 8))
        time.sleep(0.1)
        held.append(requests.post(server.url + "/pause?mode=keep", timeout=PATIENCE).status_code)
        return trainable_groups(*given)

    script.trainable_groups, script.VllmServers.post = before_an_update, posted
    flags = asking(server, **KEEP | dict(iterations=8, max_context_tokens=256, max_staleness=2,
                                         temperature=1.5))
    folder = overlap(tmp_path / "run", script, **flags, **long_replies(tmp_path / "long", 200))
    check_versions(folder, 1.5, 3e-4, first=tmp_path / "long")  # vLLM rounds otherwise
    assert max(most for _, most in staleness(folder)) <= 2 and validate(folder, strict=True)["ok"]
    played = [episode for n in range(1, 9) for episode in episodes(folder, f"train_step_{n:06d}")[0]]
    versions = [s["versions"] for episode in played for s in episode["segments"]]
    assert all(numbers == sorted(numbers) for numbers in versions)
    assert sum(len(set(numbers)) > 1 for numbers in versions) > 20, "no weights came during a reply"
    assert held == [200] * 8 and server.posts(r"/pause\?mode=keep") == 9 + len(held)


@pytest.mark.slow
def test_a_real_server_that_is_killed(servers, stand_in, tmp_path, monkeypatch, capsys):
    """Whatever it was handed before, it samples for the run, until it is lost; another takes its place."""
    server, folder = servers[0].ready(), tmp_path / "run"
    monkeypatch.setattr(FileWriter, "add_summary",
                        lambda writer, summary, at, *more: at == 2 and server.kill())
    flags = dict(max_context_tokens=256, iterations=4)
    ends_with_one_line(capsys, rf"EngineError: --vllm-url {server.url}: .*receipt: ",
                       grpo_llm, folder, **asking(server, **flags))
    assert json.loads((folder / "checkpoints" / "state.json").read_text())["last"] == "step_000002"
    assert command(grpo_llm, folder, **asking(stand_in(), **flags)) == 0
    check_run(folder, 4, errors=1)
