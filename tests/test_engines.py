"""The samplers of grpo_llm.py: one after another in a rollout, over HTTP against a stand-in, and vLLM itself.

The slow tests need vLLM: pip install -r requirements-vllm.txt && pytest -n 0 -m slow tests/test_engines.py
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import envs
import grpo_llm
from envs import BadInput
from grpo_llm import Args, EngineError, Segment
from tests.run_folders import command_line, records, timeless

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "countdown-tiny"
SMALL = dict(iterations=2, prompts_per_iteration=4, group_size=4, eval_tasks=6, eval_samples=2, eval_every=0,
             checkpoint_every=1, warmup_iterations=2)
PATIENCE = 20.0  # what hangs for so long will not go on [s]


# Rollouts: replies that come one after another


class Continuous(grpo_llm.Engine):
    """Scripted replies, a few at a time and in random order, as an engine gives them that never waits.

    replies: of each key, those of its turns in order.
    """

    continuous = True

    def __init__(self, replies, eos, rng, at_once=3):
        self.replies, self.eos, self.rng, self.at_once = copy.deepcopy(replies), eos, rng, at_once
        self.waiting, self.history = [], []

    @property
    def busy(self):
        return bool(self.waiting)

    def submit(self, key, prompt, temperature):
        self.history.append(("submit", key, tuple(prompt)))
        self.waiting.append(key)

    def collect(self):
        time.sleep(0.001)
        self.rng.shuffle(self.waiting)
        count = self.rng.randrange(1 + min(self.at_once, len(self.waiting)))
        keys, self.waiting = self.waiting[:count], self.waiting[count:]
        self.history += [("reply", key) for key in keys]
        return [(key, *self.replies[key].pop(0)) for key in keys]


def scripted_hf_engine(replies, tokenizer, model, args, monkeypatch):
    """grpo_llm.HfEngine, for which `generate` takes each key's replies in turn."""
    replies, asked = copy.deepcopy(replies), []
    engine = grpo_llm.HfEngine(model, tokenizer, args)
    submit = engine.submit
    engine.submit = lambda key, *rest: (asked.append(key), submit(key, *rest))
    monkeypatch.setattr(grpo_llm, "generate", lambda model, prompts, *rest: [
        replies[asked.pop(0)].pop(0) for _ in prompts])
    return engine


def random_replies(tokenizer, tasks, num_samples, turns, env, rng):
    """Of each episode's key the replies of its turns: wrong, right or cut, with log-probabilities."""
    replies = []
    for task in tasks:
        for _ in range(num_samples):
            replies.append([])
            for turn in range(turns):
                numbers = [rng.randrange(1, 21) for _ in range(4)]
                text = rng.choice(["{} + {} = {}", "{} + {} = {} ; {} + 1 = 2"]).format(*numbers)
                kind = rng.choice(["wrong"] * 6 + ["right", "cut"])
                ids = tokenizer(env.solution(task) if kind == "right" else text).input_ids
                ids += [] if kind == "cut" else [tokenizer.eos_token_id]
                logprobs = [-len(replies) - turn / 10 - t / 1000 for t in range(len(ids))]
                replies[-1].append((ids, logprobs))
    return replies


class Slow(envs.Episode):
    """Another episode, with pauses; and one of its turns may fail."""

    def __init__(self, episode, rng, fails_at):
        self.episode, self.pauses, self.left = episode, [rng.random() / 200 for _ in range(99)], fails_at

    def step(self, reply):
        time.sleep(self.pauses.pop())
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("this environment fails")
        return self.episode.step(reply)


@pytest.fixture
def long_game():
    env = envs.make("tests/two_turn.py:TwoTurn")
    env.replies = 5
    return env


@pytest.mark.parametrize("budget", [4096, 60])
def test_the_order_of_replies_changes_nothing_that_a_rollout_keeps(
        budget, countdown_tiny, long_game, monkeypatch):
    model, tokenizer = countdown_tiny
    args = Args(max_context_tokens=budget, max_concurrent=3, microbatch_tokens=100)
    tasks = [long_game.task("train", index) for index in range(4)]
    replies = random_replies(tokenizer, tasks, 6, long_game.replies, long_game, random.Random(1))
    start, results, engines = long_game.start, [], []
    fails = {5: 2, 11: 1}  # an episode's number: the turn that fails
    for seed in range(4):
        rng, started = random.Random(seed), []
        monkeypatch.setattr(long_game, "start", lambda task, seed, rng=rng, started=started: (
            started.append(0), Slow(start(task, seed), rng, fails.get(len(started), 99)))[1])
        if seed:
            engines.append(Continuous(replies, [tokenizer.eos_token_id], rng))
        else:
            engines.append(scripted_hf_engine(replies, tokenizer, model, args, monkeypatch))
        with ThreadPoolExecutor(3) as pool:
            results.append(grpo_llm.rollout(engines[-1], tokenizer, long_game, tasks, 6, 1.0, args, pool,
                                            grpo_llm.episode_reward))
    kept = [[dict(vars(r), episode=None) for r in rollouts] for rollouts in results]
    assert kept[1:] == kept[:1] * 3
    assert {r.termination for r in results[0]} >= {"done", "length", "error"}
    assert sum(r.reward for r in results[0]) and len({len(r.steps) for r in results[0]}) > 3
    assert (max(len(r.segments) for r in results[0]) > 1) == (budget == 60)
    # The script was not played in step: some replied for the second time before others did for the first.
    for engine in engines[1:]:
        keys = [key for kind, key, *_ in engine.history if kind == "reply"]
        second = next(n for n, key in enumerate(keys) if key in keys[:n])
        assert set(keys[:second]) < set(keys)


class Blocked(envs.Episode):
    """Its first step returns when it is told to."""

    def __init__(self, episode, event, log):
        self.episode, self.event, self.log = episode, event, log

    def step(self, reply):
        self.log.append(self.event.wait(PATIENCE))
        self.step = self.episode.step
        return self.episode.step(reply)


def test_a_slow_environment_does_not_hold_up_the_other_episodes(countdown_tiny, long_game, monkeypatch):
    """One step returns when all replies of the other episodes are there, or too late."""
    tokenizer, args = countdown_tiny[1], Args(max_concurrent=4)
    tasks = [long_game.task("train", 0)]
    ids = tokenizer("1 + 1 = 2").input_ids + [tokenizer.eos_token_id]
    wrong = (ids, [-1.0] * len(ids))
    engine = Continuous([[wrong] * 5 for _ in range(4)], [ids[-1]], random.Random(1), at_once=1)
    last_of_others, waited, started, start = threading.Event(), [], [], long_game.start
    monkeypatch.setattr(long_game, "start", lambda task, seed: (
        started.append(0), Blocked(start(task, seed), last_of_others, waited)
        if len(started) == 1 else start(task, seed))[1])

    def collect(original=engine.collect):
        replies = original()
        if not any(engine.replies[1:]):
            last_of_others.set()
        return replies

    engine.collect = collect
    with ThreadPoolExecutor(4) as pool:
        rollouts = grpo_llm.rollout(engine, tokenizer, long_game, tasks, 4, 1.0, args, pool,
                                    grpo_llm.episode_reward)
    assert waited == [True]
    assert [len(r.steps) for r in rollouts] == [5] * 4


# Servers: a stand-in that speaks vLLM's protocol


class StandIn:
    """What VllmServers asks of a server. A reply is computed from the prompt and names the weights in use.

    trouble(path, body) may answer in its place: with a status and a text, or None to hang up.
    """

    def __init__(self, lora=False, max_model_len=4096):
        self.lora, self.max_model_len, self.log, self.port = lora, max_model_len, [], 0
        self.trouble, self.lock = lambda path, body: (), threading.Lock()
        self.start()

    def start(self):
        """A new process, as it were: with the weights that it was started with and no adapter."""
        self.weights, self.adapters = None, {}
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), self.handler())
        self.http.daemon_threads = self.up = True
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()

    def stop(self):
        if self.up:
            self.up = False
            self.http.shutdown()
            self.http.server_close()

    def handler(self):
        standin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def answer(self, body):
                with standin.lock:
                    standin.log.append((self.path, body))
                answer = standin.trouble(self.path, body)
                if answer is None:
                    return  # without a word
                if answer == ():
                    answer = standin.answer(self.path, body)
                status, text = answer if isinstance(answer[1], str) else (answer[0], json.dumps(answer[1]))
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass
        return Handler

    def answer(self, path, body):
        if path == "/v1/models":
            cards = [dict(id="policy", max_model_len=self.max_model_len)]
            return 200, dict(data=cards + [dict(id=name, max_model_len=None) for name in self.adapters])
        if path == "/v1/load_lora_adapter" and self.lora:
            (weights,) = {float(tensor.flatten()[0]) for name, tensor in load_file(
                Path(body["lora_path"], "adapter_model.safetensors")).items() if "lora_B" in name}
            assert body["lora_name"] not in self.adapters
            self.adapters[body["lora_name"]] = weights
            return 200, "Success: LoRA adapter added"
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success: LoRA adapter removed"
        if path == "/collective_rpc" and not self.lora:
            assert body["method"] == "reload_weights"
            tensors = load_file(Path(body["kwargs"]["weights_path"], "model.safetensors"))
            self.weights = float(tensors["weight"].flatten()[0])
            return 200, dict(results=[None])
        if path == "/reset_prefix_cache":
            return 200, dict(success=True)
        if path == "/v1/completions":
            weights = {"policy": self.weights} | self.adapters
            if body["model"] not in weights:
                return 404, dict(error=dict(message=f"The model {body['model']} does not exist."))
            return 200, dict(choices=[self.choice(body["prompt"], weights[body["model"]], index)
                                      for index in range(body["n"])])
        return 404, "not found"

    @staticmethod
    def choice(prompt, weights, index):
        """A reply of tokens that tell where it comes from, and log-probabilities that belong to them."""
        ids = [sum(prompt), index, -1 if weights is None else int(weights)]
        return dict(index=index, token_ids=ids, finish_reason="stop", text="", prompt_token_ids=None,
                    logprobs=dict(token_logprobs=[-i / 8 for i in ids], tokens=[""] * len(ids)))

    def asked(self, path="/v1/completions"):
        return [body for asked, body in self.log if asked == path]


@pytest.fixture
def stand_in():
    """Builder of stand-ins."""
    servers = []

    def build(**options):
        servers.append(StandIn(**options))
        return servers[-1]
    yield build
    for server in servers:
        server.stop()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses before tries, which take no time here. pauses.hook is called in each."""
    class Event(threading.Event):
        def wait(self, timeout=None):
            taken.lengths.append(timeout)
            taken.hook(len(taken.lengths))
            return super().wait(0.001)

    taken = SimpleNamespace(lengths=[], hook=lambda number: None)
    monkeypatch.setattr(grpo_llm, "threading", SimpleNamespace(Event=Event, Lock=threading.Lock))
    return taken


@pytest.fixture
def connect(tmp_path, pauses):
    """Builder of grpo_llm.VllmServers."""
    engines = []

    def build(*servers, **flags):
        urls = tuple(getattr(server, "url", server) for server in servers)
        lora = any(getattr(server, "lora", False) for server in servers)
        args = Args(**dict(engine="vllm", vllm_url=urls, vllm_retries=4, vllm_timeout=PATIENCE) | flags)
        engines.append(grpo_llm.VllmServers(args, [2, 7], lora, tmp_path / "sync"))
        return engines[-1]
    yield build
    for engine in engines:
        engine.close()


def policy(weights, lora=False):
    """A model, or an adapter, of which the stand-in reads one number."""
    model = torch.nn.Linear(1, 1)
    if lora:
        config = peft.LoraConfig(r=1, target_modules=["0"])
        model = peft.get_peft_model(torch.nn.Sequential(model), config)
    for name, tensor in model.named_parameters():
        if not lora or "lora_B" in name:
            tensor.data.fill_(weights)
    return model


def finish(engine, replies=None):
    """Collect until all is answered. -> {key: (ids, logprobs)}"""
    replies, deadline = {} if replies is None else replies, time.monotonic() + PATIENCE
    while engine.busy and time.monotonic() < deadline:
        for key, *reply in engine.collect():
            assert key not in replies
            replies[key] = tuple(reply)
    assert not engine.busy
    return replies


def ask(engine, prompts, temperature=1.0):
    for key, prompt in enumerate(prompts):
        engine.submit(key, prompt, temperature)
    return finish(engine)


def check_replies(replies, prompts, weights):
    """Each key has a reply to its own prompt, by these weights; equal prompts have different ones."""
    assert sorted(replies) == list(range(len(prompts)))
    for key, (ids, logprobs) in replies.items():
        assert (ids[0], ids[2]) == (sum(prompts[key]), weights)
        assert logprobs == [-i / 8 for i in ids]
    different = {(tuple(prompt), replies[key][0][1]) for key, prompt in enumerate(prompts)}
    assert len(different) == len(prompts)


@pytest.mark.parametrize("lora", [False, True])
def test_requests_are_spread_over_the_servers_and_say_how_to_sample(stand_in, connect, lora):
    servers = [stand_in(lora=lora), stand_in(lora=lora)]
    engine = connect(*servers, temperature=0.7, max_response_tokens=9)
    engine.sync_weights(policy(3.0, lora))
    prompts = [[5, 6 + i % 10, 7] for i in range(40)] + [[5, 99]]
    random.Random(1).shuffle(prompts)
    check_replies(ask(engine, prompts, 0.7), prompts, 3)
    bodies = [server.asked() for server in servers]
    assert [len(b) for b in bodies] in ([5, 6], [6, 5])
    counts = {tuple(body["prompt"]): body["n"] for body in sum(bodies, [])}
    assert counts == {tuple(prompt): prompts.count(prompt) for prompt in prompts}
    for body in sum(bodies, []):
        model, prompt, n = (body.pop(name) for name in ("model", "prompt", "n"))
        assert model.startswith("policy-") if lora else model == "policy"
        # Every one that a server would otherwise take from the model's own generation config.
        assert body == dict(
            temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
            frequency_penalty=0.0, logprobs=0, max_tokens=9, stop_token_ids=[2, 7], return_token_ids=True)


def test_greedy_requests_are_never_grouped(stand_in, connect):
    """Of n greedy replies vLLM refuses all but one; and the next greedy ones are not those of sampling."""
    server = stand_in()
    engine = connect(server)
    prompts = [[3, 4]] * 5 + [[4, 5]]
    replies = ask(engine, prompts, 0.0)
    assert sorted(replies) == list(range(6))
    assert [ids[0] for _, (ids, _) in sorted(replies.items())] == [7] * 5 + [9]
    bodies = server.asked()
    assert [(body["n"], body["temperature"]) for body in bodies] == [(1, 0.0)] * 6
    for key, temperature in enumerate((1.0, 0.0, 1.0, 0.5)):
        engine.submit(key, [3, 4], temperature)
    finish(engine)
    assert sorted((body["n"], body["temperature"]) for body in server.asked()[6:]) == [
        (1, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("lora", [False, True])
def test_every_server_gets_each_hand_over_and_forgets_what_it_cached(stand_in, connect, tmp_path, lora):
    servers = [stand_in(lora=lora), stand_in(lora=lora)]
    engine = connect(*servers)
    for weights in (1, 2, 3):
        engine.sync_weights(policy(weights, lora))
        for server in servers:
            paths = [path for path, _ in server.log]
            assert paths[::-1].index("/reset_prefix_cache") < paths[::-1].index(
                "/v1/load_lora_adapter" if lora else "/collective_rpc")
            assert list(server.adapters.values()) == ([float(weights)] if lora else [])
            server.log.clear()
        check_replies(ask(engine, [[5, i] for i in range(6)]), [[5, i] for i in range(6)], weights)
        # What was handed over before is gone, the newest stays for a server that comes back.
        (folder,) = (tmp_path / "sync").iterdir()
        assert list(folder.glob("*.safetensors"))


def together(number, answer):
    """Trouble: the next `number` requests for replies wait for each other, then all get this answer."""
    barrier, met = threading.Barrier(number), []

    def trouble(path, body):
        if path != "/v1/completions" or len(met) >= number:
            return ()
        met.append(path)
        barrier.wait(PATIENCE)
        return answer
    return trouble


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("answer", [(500, "EngineCore died"), None, (200, "{\"choices\": [")],
                         ids=["500", "dropped", "torn"])
def test_of_requests_that_fail_together_one_hands_the_weights_over_again(stand_in, connect, lora, answer):
    server = stand_in(lora=lora)
    engine = connect(server)
    engine.sync_weights(policy(4, lora))
    prompts = [[5, i] for i in range(8)]
    for _ in range(2):
        server.log.clear()
        server.trouble = together(8, answer)
        check_replies(ask(engine, prompts), prompts, 4)
        paths = [path for path, _ in server.log]
        assert paths[:8] == ["/v1/completions"] * 8
        assert len(server.asked()) == 16
        again = paths[8:paths.index("/reset_prefix_cache") + 1]  # before any of them is asked again
        assert again == ["/v1/models" if lora else "/collective_rpc", "/reset_prefix_cache"]
        assert paths.count("/reset_prefix_cache") == 1


@pytest.mark.parametrize("lora", [False, True])
def test_a_server_that_was_away_has_the_weights_before_it_is_asked(stand_in, connect, pauses, lora):
    server, other = stand_in(lora=lora), stand_in(lora=lora)
    engine = connect(server, other, vllm_retries=9)
    engine.sync_weights(policy(5, lora))
    engine.sync_weights(policy(6, lora))
    prompts = [[5, i] for i in range(8)]
    failed = together(4, None)
    gone = threading.Lock()

    def trouble(path, body):
        answer = failed(path, body)
        if answer is None and gone.acquire(blocking=False):
            server.trouble = lambda path, body: ()
            server.stop()
        return answer

    def come_back(number):
        with come_back.lock:
            if number == 12 and not server.up:
                server.start()

    come_back.lock, server.trouble, pauses.hook = threading.Lock(), trouble, come_back
    check_replies(ask(engine, prompts), prompts, 6)
    assert server.up and max(pauses.lengths) > 1
    assert other.asked("/reset_prefix_cache") == [{"reset": True}] * 2


def test_a_request_that_comes_first_after_an_outage_gets_the_trained_weights_too(stand_in, connect, pauses):
    """One request fails and pauses; the server comes back; a new request reaches it before the paused one."""
    server = stand_in()
    engine = connect(server)
    engine.sync_weights(policy(7))
    asked_again, replies = threading.Event(), {}

    def outage(number):
        server.stop()
        server.start()
        engine.back = True
        assert asked_again.wait(PATIENCE)

    engine.back, pauses.hook, server.trouble = False, outage, together(1, None)
    engine.submit(0, [5, 6], 1.0)
    while not engine.back:
        engine.collect()
    engine.submit(1, [5, 7], 1.0)
    while 1 not in replies:
        replies |= {key: reply for key, *reply in engine.collect()}
    asked_again.set()
    check_replies(finish(engine, replies), [[5, 6], [5, 7]], 7)


def test_a_server_that_is_not_up_yet_is_waited_for(stand_in, connect, pauses):
    server = stand_in()
    server.stop()
    pauses.hook = lambda number: number == 3 and server.start()
    assert connect(server).names == {server.url: "policy"}
    assert pauses.lengths == [1, 2, 4]


def test_a_bad_request_is_an_error_at_once_with_the_servers_words(stand_in, connect, pauses):
    server = stand_in()
    engine = connect(server)
    server.trouble = lambda path, body: (400, json.dumps({"error": {"message": "n must be smaller"}}))
    with pytest.raises(EngineError, match="completions answered 400.*n must be smaller"):
        ask(engine, [[5, 6]])
    assert (len(server.asked()), pauses.lengths) == (1, [])


@pytest.mark.parametrize("lora", [False, True])
def test_a_server_without_the_administration_endpoints_is_an_error_that_names_them(stand_in, connect, lora):
    server = stand_in(lora=lora)
    engine = connect(server)
    server.lora = not lora  # so that it knows the other ones only
    with pytest.raises(EngineError, match=("/v1/load_lora_adapter" if lora else "/collective_rpc")
                       + " answered 404.*docs/engines.md"):
        engine.sync_weights(policy(1, lora))


def test_after_the_last_try_there_is_one_error_and_nobody_asks_again(stand_in, connect, pauses):
    server = stand_in()
    engine = connect(server, vllm_retries=7)
    server.trouble = lambda path, body: (503, "busy")
    engine.submit(0, [5, 6], 1.0)
    with pytest.raises(EngineError, match=rf"--vllm-url {server.url}: no answer after 8 tries.*503"):
        finish(engine)
    assert pauses.lengths == [1, 2, 4, 8, 16, 30, 30]
    assert len(server.asked()) == 8
    # Of several, the first to give up ends the others, which wait for their second try.
    server.log.clear()
    server.trouble, pauses.hook, first = lambda *_: (), lambda number: None, together(5, (503, "busy"))
    engine, held, threads = connect(server, vllm_retries=2), threading.Event(), []

    def hold_all_but_one(number):
        threads.append(threading.get_ident())
        if threads[-1] != threads[0]:
            held.wait(PATIENCE)

    server.trouble, pauses.hook = lambda *asked: first(*asked) or (503, "busy"), hold_all_but_one
    for key in range(5):
        engine.submit(key, [key], 1.0)
    with pytest.raises(EngineError, match="no answer after 3 tries"):
        finish(engine)
    held.set()
    engine.threads.shutdown(wait=True)
    assert len(server.asked()) == 5 + 2
