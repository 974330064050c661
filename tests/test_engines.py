"""The samplers of grpo_llm.py and ppo_llm.py: replies one after another, over HTTP against a stand-in, and
vLLM itself.

The slow tests need vLLM: pip install -r requirements-vllm.txt && pytest -n 0 -m slow tests/test_engines.py
"""

import contextlib
import copy
import dataclasses
import gc
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import peft
import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

import envs
import grpo_llm
import ppo_llm
from envs import BadInput
from grpo_llm import Args, EngineError, Segment
from tests.run_folders import command_line, log_lines, process, records, same_tree, timeless
from tools.validate_train_log import validate

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "countdown-tiny"
SMALL = dict(iterations=2, prompts_per_iteration=4, group_size=4, eval_tasks=6, eval_samples=2, eval_every=0,
             checkpoint_every=1, warmup_iterations=2)
SMALL_PPO = SMALL | dict(prompts_per_iteration=8, group_size=1, epochs=1, minibatches=2, critic_epochs=2,
                         critic_minibatches=2, critic_warmup=1, eval_tasks=4)
RL = pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
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

    def submit(self, key, prompt, temperature, seed):
        self.history.append(("submit", key, tuple(prompt)))
        self.waiting.append(key)

    def collect(self):
        time.sleep(0.001)
        self.rng.shuffle(self.waiting)
        count = self.rng.randrange(1 + min(self.at_once, len(self.waiting)))
        keys, self.waiting = self.waiting[:count], self.waiting[count:]
        self.history += [("reply", key) for key in keys]
        return [(key, *self.replies[key].pop(0)) for key in keys]


def scripted_hf_engine(script, replies, tokenizer, model, args, monkeypatch):
    """The script's HfEngine, for which `generate` takes each key's replies in turn."""
    replies, asked = copy.deepcopy(replies), []
    engine = script.HfEngine(model, tokenizer, args)
    submit = engine.submit
    engine.submit = lambda key, *rest: (asked.append(key), submit(key, *rest))
    monkeypatch.setattr(script, "generate", lambda model, prompts, *rest: [
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
    """Another episode, with pauses; and some replies make it fail."""

    def __init__(self, episode, rng):
        self.episode, self.pauses = episode, [rng.random() / 200 for _ in range(99)]

    def step(self, reply):
        time.sleep(self.pauses.pop())
        if zlib.crc32(reply.encode()) % 16 == 0:
            raise RuntimeError("this environment fails")
        return self.episode.step(reply)


@pytest.fixture
def long_game():
    env = envs.make("tests/two_turn.py:TwoTurn")
    env.replies = 5
    return env


@pytest.mark.slow
@RL
@pytest.mark.parametrize(("budget", "limit"), [(4096, 0), (60, 0), (60, 5)])
def test_the_order_of_replies_changes_nothing_that_a_rollout_keeps(
        script, budget, limit, countdown_tiny, long_game, monkeypatch):
    model, tokenizer = countdown_tiny
    args = script.Args(max_context_tokens=budget, max_concurrent=limit, episode_retries=0,
                       microbatch_tokens=100)
    tasks = [long_game.task("train", index) for index in range(4)]
    replies = random_replies(tokenizer, tasks, 6, long_game.replies, long_game, random.Random(1))
    start, results, engines = long_game.start, [], []
    for seed in range(4):
        rng = random.Random(seed)
        monkeypatch.setattr(long_game, "start", lambda task, seed, rng=rng: Slow(start(task, seed), rng))
        if seed:
            engines.append(Continuous(replies, [tokenizer.eos_token_id], rng))
        else:
            engines.append(scripted_hf_engine(script, replies, tokenizer, model, args, monkeypatch))
        pool = script.EnvThreads(3)
        results.append(script.rollout(engines[-1], tokenizer, long_game, tasks, 6, 1.0, args, pool,
                                      script.episode_reward))
        pool.close()
    kept = [[vars(r) for r in rollouts] for rollouts in results]
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
    tokenizer, args = countdown_tiny[1], Args()
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
        if sum(map(bool, engine.replies)) == 1:
            last_of_others.set()
        return replies

    engine.collect = collect
    pool = grpo_llm.EnvThreads(4)
    rollouts = grpo_llm.rollout(engine, tokenizer, long_game, tasks, 4, 1.0, args, pool,
                                grpo_llm.episode_reward)
    pool.close()
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


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
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


def test_a_server_that_does_not_know_the_adapter_any_more_is_given_it_again(stand_in, connect):
    """It was started anew while nobody asked it: nothing failed, but the adapter's name is unknown."""
    server = stand_in(lora=True)
    engine = connect(server)
    engine.sync_weights(policy(8, lora=True))
    server.stop()
    server.start()
    server.log.clear()
    prompts = [[5, i] for i in range(3)]
    check_replies(ask(engine, prompts), prompts, 8)
    assert len(server.asked("/v1/load_lora_adapter")) == 1 and len(server.asked()) >= 4


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
    engine, threads = connect(server, vllm_retries=2), []

    def hold_all_but_one(number):
        threads.append(threading.get_ident())
        while threading.get_ident() != threads[0] and not engine.stop.is_set():
            time.sleep(0.001)

    server.trouble, pauses.hook = lambda *asked: first(*asked) or (503, "busy"), hold_all_but_one
    for key in range(5):
        engine.submit(key, [key], 1.0)
    futures, submit = [], engine.threads.submit
    engine.threads.submit = lambda *work: futures.append(submit(*work)) or futures[-1]
    with pytest.raises(EngineError, match="no answer after 3 tries") as raised:
        finish(engine)
    assert {str(future.exception(PATIENCE)) for future in futures} == {str(raised.value)}
    assert len(futures) == 5 and len(server.asked()) == 5 + 2


@pytest.mark.parametrize(("path", "text", "what"), [
    ("/v1/completions", "<html>", "choices"),
    ("/v1/completions", "{\"choices\": [", ""),
    ("/v1/completions", {}, "choices"),
    ("/v1/completions", dict(choices=None), ""),
    ("/v1/completions", dict(choices=[]), "0 replies of 2"),
    ("/v1/completions", dict(choices=[StandIn.choice([1], 1, 0)]), "1 replies of 2"),
    ("/v1/completions", dict(choices=[StandIn.choice([1], 1, n) | dict(logprobs=None) for n in (0, 1)]), ""),
    ("/v1/completions", dict(choices=[dict(index=n, text="3", logprobs={}) for n in (0, 1)]), "token_ids"),
    ("/v1/completions", dict(choices=[StandIn.choice([1], 1, n) | dict(token_ids=[]) for n in (0, 1)]), ""),
    ("/v1/completions", dict(choices=[StandIn.choice([1], 1, n) | dict(token_ids=[5]) for n in (0, 1)]), ""),
    ("/v1/completions", dict(choices=[StandIn.choice([1], 1, n) | dict(token_ids=None) for n in (0, 1)]), ""),
    ("/v1/models", "<html>", ""),
    ("/v1/models", {}, "data"),
    ("/v1/models", dict(data=[]), ""),
    ("/v1/models", dict(data=[dict(id="policy")]), "max_model_len"),
    ("/v1/models", dict(data=[dict(id="policy", max_model_len=None)]), ""),
])
def test_an_answer_of_another_form_is_an_engine_error(stand_in, connect, path, text, what):
    server = stand_in()
    engine = connect(server, vllm_retries=1) if path == "/v1/completions" else None
    server.trouble = lambda asked, body: (200, text) if asked == path else ()
    with pytest.raises(EngineError, match=f"--vllm-url {server.url}.*{what}"):
        ask(engine or connect(server, vllm_retries=1), [[5, 6], [5, 6]])


def test_servers_with_too_short_a_context_and_unknown_ones_are_refused(stand_in, connect):
    server, short = stand_in(max_model_len=200), stand_in(max_model_len=199)
    connect(server, max_context_tokens=200)
    with pytest.raises(BadInput, match=f"--max-context-tokens 200: {short.url} .*--max-model-len 199"):
        connect(server, short, max_context_tokens=200)
    short.stop()
    with pytest.raises(EngineError, match=f"--vllm-url {short.url}: no answer after 1 tries.*refused"):
        connect(short, vllm_retries=0)


def test_closing_does_not_wait_for_what_is_still_asked(stand_in, connect):
    server, closed, in_time = stand_in(), threading.Event(), []
    engine = connect(server, vllm_max_seqs=2)
    server.trouble = lambda path, body: in_time.append(closed.wait(PATIENCE)) or ()
    for key in range(4):
        engine.submit(key, [key], 1.0)
    while len(server.asked()) < 2:
        engine.collect()
    engine.close()
    closed.set()
    engine.threads.shutdown(wait=True)
    assert in_time == [True] * 2  # and the other two were never asked


# A stale sampler: the weights that correct for it, and what the log says of it


class Recorder:
    """In the optimiser's place: keeps the gradient and leaves the weights."""

    def __init__(self, model):
        self.model, self.param_groups = model, [dict(params=list(model.parameters()))]

    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def zero_grad(self, set_to_none):
        self.model.zero_grad(set_to_none=set_to_none)


def sample_segments(engine, prompts, temperature, rng):
    """Two replies each with a few tokens of an environment between, and random advantages."""
    segments = [Segment(prompt, advantage=rng.uniform(-1, 1)) for prompt in prompts]
    for turn in range(2):
        for key, segment in enumerate(segments):
            if turn:
                answer = [rng.randrange(3, 37) for _ in range(rng.randrange(1, 4))]
                segment.append(answer, 0, [0.0] * len(answer))
            engine.submit(key, segment.ids, temperature)
        for key, ids, logprobs in engine.collect():
            segments[key].append(ids, 1, logprobs)
    return [segments[i:i + 4] for i in range(0, len(segments), 4)]


def reported(segment):
    """The sampler's log-probabilities of the tokens that the policy chose."""
    return [p for p, m in zip(segment.rollout_logprobs, segment.response_mask, strict=True) if m]


def reply_logprobs(model, segment, temperature):
    """Of the tokens that the policy chose, from a forward pass of the whole, in float64."""
    logits = model(torch.tensor([segment.ids]), use_cache=False).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(segment.prompt_ids) - 1:-1]
    chosen = torch.tensor(segment.response_mask).nonzero().flatten()
    return logprobs[chosen, torch.tensor(segment.response_ids)[chosen]]


@pytest.fixture(scope="module")
def stale(random_llama, countdown_tiny):
    """(trained model, the sampler's older copy, groups of segments that the copy sampled)"""
    model, tokenizer, rng = random_llama(), countdown_tiny[1], random.Random(1)
    sampler = copy.deepcopy(model)
    args = Args(temperature=0.7, max_response_tokens=12, max_context_tokens=99, learning_rate=3e-3)
    engine = grpo_llm.HfEngine(sampler, tokenizer, args)
    prompts = [[rng.randrange(3, 37) for _ in range(rng.randrange(2, 9))] for _ in range(6)]
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for _ in range(3):
        groups = sample_segments(engine, [p for p in prompts for _ in range(4)], args.temperature, rng)
        grpo_llm.update(model, None, optimizer, groups, args, 0)
    return model, sampler, sample_segments(engine, [p for p in prompts for _ in range(4)], 0.7, rng)


@pytest.mark.parametrize("cap", [2.0, 1.2, 0.0])
def test_replies_of_a_stale_sampler_are_weighted_by_the_capped_ratio(stale, cap):
    model, sampler, groups = stale
    args = Args(temperature=0.7, tis_cap=cap, max_grad_norm=1e9, entropy_coef=0.0, microbatch_tokens=150)
    recorder = Recorder(model)
    metrics, steps = grpo_llm.update(model, None, recorder, groups, args, 0)
    segments = [segment for group in groups for segment in group]
    num_tokens = sum(sum(segment.response_mask) for segment in segments)
    loss, kls, ratios = 0.0, [], []
    for segment in segments:
        with torch.no_grad():
            before = reply_logprobs(sampler, segment, 0.7)
        assert reported(segment) == pytest.approx(before.tolist(), abs=1e-5)
        now = reply_logprobs(model, segment, 0.7)
        ratio = (now.detach() - before).exp()
        ratios += ratio.tolist()
        kls += (ratio - 1 - ratio.log()).tolist()
        trust = ratio.clamp(max=cap) if cap else torch.ones_like(ratio)
        loss = loss - (trust * segment.advantage * now).sum() / num_tokens
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    assert steps == 1 and len(ratios) == num_tokens
    assert (recorder.gradient - expected).norm() < 1e-5 * expected.norm()
    assert metrics["mismatch/kl"] == pytest.approx(sum(kls) / num_tokens, rel=1e-4)
    assert metrics["mismatch/ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    over = sum(ratio > cap for ratio in ratios) if cap else 0
    assert metrics["mismatch/frac_capped"] == pytest.approx(over / num_tokens)
    # The sampler is so old that the cap matters, and old enough that leaving it out would show.
    assert max(ratios) > 2.5 and min(ratios) < 0.5 and metrics["mismatch/kl"] > 0.01
    assert not cap or 0.002 < over / num_tokens < 0.7


# Flags


@pytest.mark.parametrize(("flags", "message"), [
    (dict(vllm_url=("http://127.0.0.1:8000",)), r"--vllm-url http://127.0.0.1:8000: needs --engine vllm"),
    (dict(engine="vllm", vllm_url=("127.0.0.1:8000",)), r"--vllm-url 127.0.0.1:8000: .*http://host:port"),
    (dict(engine="vllm", vllm_url=("http://a:1", "http://b:1/v1")), r"--vllm-url http://b:1/v1: expected"),
    (dict(engine="vllm", vllm_url=("ftp://a:1",)), r"--vllm-url ftp://a:1: expected"),
    (dict(lora_rank=2, lora_adapter_path="a"), r"--lora-rank 2: .*--lora-adapter-path"),
    (dict(vllm_gpu_memory=1.5), r"--vllm-gpu-memory 1.5: expected at most 1"),
    (dict(vllm_timeout=0.0), r"--vllm-timeout 0.0: expected more than 0"),
])
def test_flags_that_do_not_go_together_are_refused(flags, message):
    with pytest.raises(BadInput, match=message):
        Args(**flags)


def one_error(capsys, *flags):
    """The one line that a person reads when a run cannot begin."""
    capsys.readouterr()
    assert command_line("grpo_llm.py", *flags) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def test_a_missing_vllm_is_one_line_that_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = one_error(capsys, "--engine", "vllm", "--run-dir", tmp_path)
    assert re.search(r"--engine vllm: .*vllm.*requirements-vllm\.txt", line)
    assert (ROOT / "requirements-vllm.txt").is_file()


def test_a_server_that_is_not_there_is_one_line(tmp_path, capsys, stand_in):
    server = stand_in()
    server.stop()
    line = one_error(capsys, "--engine", "vllm", "--vllm-url", server.url, "--vllm-retries", 0,
                     "--run-dir", tmp_path)
    assert f"--vllm-url {server.url}: no answer" in line


# LoRA: an adapter to go on from


def train(folder, script=grpo_llm, **flags):
    """A run in this process, to its end. -> its folder"""
    small = SMALL_PPO if script is ppo_llm else SMALL
    script.main(script.Args(**small | dict(run_dir=str(folder)) | flags))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of an adapter as a run saved it; its config says dropout, as those of others may."""
    folder = train(tmp_path_factory.mktemp("adapter") / "run", lora_rank=4, learning_rate=5e-3)
    checkpoint = folder / "checkpoints" / "step_000002"
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 32
    (checkpoint / "adapter_config.json").write_text(json.dumps(config | dict(lora_dropout=0.5)))
    return checkpoint


IDS = torch.tensor([[1, 10, 22, 18, 108, 42, 109]])


def adapted(folder):
    """Logits of the base with an adapter, by PEFT alone."""
    model = peft.PeftModel.from_pretrained(grpo_llm.load_weights(str(TINY)), folder).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("script", [grpo_llm, pytest.param(ppo_llm, marks=pytest.mark.slow)])
def test_an_adapter_is_gone_on_from_without_its_dropout(
        script, adapter, countdown_tiny, tmp_path, monkeypatch):
    first, models, make_engine = [], [], script.make_engine

    def spy(model, *rest):
        models.append(model.train())  # so that dropout, were there any, would show
        with torch.no_grad():
            first.append((model(IDS).logits, model(IDS).logits))
        return make_engine(model.eval(), *rest)

    monkeypatch.setattr(script, "make_engine", spy)
    before = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    alone = dict(critic_warmup=0) if script is ppo_llm else {}
    flags = dict(lora_adapter_path=str(adapter), learning_rate=5e-3, **alone)
    whole = train(tmp_path / "whole", script, **flags)
    base_logits = countdown_tiny[0](IDS).logits
    torch.testing.assert_close(first[0][0], adapted(adapter))
    assert torch.equal(*first[0]) and (first[0][0] - base_logits).abs().max() > 0.05
    # What is trained goes on from there, and only the adapter is trained.
    last = whole / "checkpoints" / "step_000002"
    with torch.no_grad():
        torch.testing.assert_close(models[0](IDS).logits, adapted(last))
        with models[0].disable_adapter():
            assert torch.equal(models[0](IDS).logits, base_logits)
    assert (adapted(last) - adapted(adapter)).abs().max() > 0.05
    inside = {name.replace("base_layer.", ""): tensor
              for name, tensor in models[0].get_base_model().state_dict().items() if "lora_" not in name}
    start = load_file(TINY / "model.safetensors")
    assert start and all(torch.equal(inside[name], tensor) for name, tensor in start.items())
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == before
    config = json.loads((last / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 32, 0.0)
    # A continued run takes its checkpoint's adapter, not that of the flag.
    halves = tmp_path / "halves"
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints" / "step_000002")
    train(halves, script, **flags)
    torch.testing.assert_close(first[-1][0], adapted(halves / "checkpoints" / "step_000001"))
    assert timeless(halves) == timeless(whole)
    name = "checkpoints/step_000002/adapter_model.safetensors"
    assert (halves / name).read_bytes() == (whole / name).read_bytes()


@RL
def test_the_reference_of_the_kl_penalty_is_the_model_without_any_adapter(script, adapter, tmp_path):
    """... and so the penalty is not zero when training goes on from an adapter."""
    folder = train(tmp_path / "run", script, lora_adapter_path=str(adapter), kl_coef=0.1, iterations=1)
    assert records(folder)[1]["train/kl_loss"] > 1e-4


def test_a_critic_of_its_own_starts_from_the_adapter_too(adapter, tmp_path, monkeypatch):
    """As an adapter of its own, over the same frozen weights."""
    states, make_critic = [], ppo_llm.make_critic

    def spy(policy, backbone, args):
        critic = make_critic(policy, backbone, args)
        mine = ppo_llm.decoder_and_head(policy)[0]
        with torch.no_grad():
            states.append([decoder(IDS).last_hidden_state for decoder in (mine, critic.decoder)])
        for (name, one), (_, other) in zip(mine.named_parameters(), critic.decoder.named_parameters(),
                                           strict=True):
            assert (one is other) is ("lora_" not in name), name
        return critic

    monkeypatch.setattr(ppo_llm, "make_critic", spy)
    train(tmp_path / "run", ppo_llm, lora_adapter_path=str(adapter), iterations=0, eval_tasks=1)
    ((of_policy, of_critic),) = states
    base = grpo_llm.load_weights(str(TINY)).get_decoder()(IDS).last_hidden_state
    assert torch.equal(of_policy, of_critic) and (of_critic - base).abs().max() > 0.05


def spoil(kind, adapter, folder):
    """A copy of the adapter with something wrong."""
    shutil.copytree(adapter, folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(weights)
    name = sorted(tensors)[-1]
    if kind == "torn":
        os.truncate(weights, weights.stat().st_size // 2)
    elif kind == "noise":
        weights.write_bytes(b"x" * 999)
    elif kind.startswith("no-"):
        (folder / kind.removeprefix("no-")).unlink()
    elif kind == "config":
        config.write_text("{")
    elif kind == "method":
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(peft_type="NONE")))
    elif kind == "shape":
        save_file(tensors | {name: tensors[name].repeat(2, 2)}, weights)
    elif kind == "rank":
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(r=8)))
    elif kind == "layers":
        save_file({key: tensor for key, tensor in tensors.items() if "layers.2." not in key}, weights)
    elif kind == "more":
        save_file(tensors | {name.replace("layers.2.", "layers.3."): tensors[name].clone()}, weights)
    elif kind == "modules":
        more = dict(target_modules=["gate_proj", "no_such_proj"])
        config.write_text(json.dumps(json.loads(config.read_text()) | more))
    else:
        assert kind == "empty"
        save_file({}, weights)
    return folder


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("kind", ["torn", "noise", "no-adapter_model.safetensors", "no-adapter_config.json",
                                  "config", "method", "shape", "rank", "layers", "more", "modules", "empty"])
def test_a_wrong_adapter_is_one_line_that_names_it(kind, adapter, tmp_path, capsys):
    folder = spoil(kind, adapter, tmp_path / "adapter")
    line = one_error(capsys, "--lora-adapter-path", folder, "--run-dir", tmp_path / "run", "--iterations", 0,
                     "--eval-tasks", 1, "--eval-samples", 1)
    assert re.search(rf"--lora-adapter-path {re.escape(str(folder))}: expected .*"
                     + (kind.removeprefix("no-") if kind.startswith("no-") else "adapter_model"), line)
    assert not list((tmp_path / "run").glob("events*"))


def test_an_adapter_of_another_model_or_nowhere_is_refused(adapter, tmp_path, capsys):
    flags = ["--lora-adapter-path", tmp_path / "nowhere", "--run-dir", tmp_path / "run"]
    assert "--lora-adapter-path" in one_error(capsys, *flags)
    run = train(tmp_path / "run", lora_adapter_path=str(adapter), iterations=1)
    # Another adapter of the same form: the run in the folder was not started with it.
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, other / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "old", ignore_errors=True)
    for folder, words in ((other, "--lora-adapter-path"), (adapter, "the model changed")):
        if folder == adapter:
            (adapter / "adapter_model.safetensors").replace(tmp_path / "kept")
            shutil.copy(other / "adapter_model.safetensors", adapter)
        try:
            with pytest.raises(BadInput, match=words):
                train(run, lora_adapter_path=str(folder), iterations=1)
        finally:
            if folder == adapter:
                (tmp_path / "kept").replace(adapter / "adapter_model.safetensors")


def watch_checks(script, monkeypatch):
    """-> a list that grows: of each check of a hand-over, the records that the log held by then."""
    checked, check_sync = [], script.check_sync

    def watched(engine, model, tokenizer, args):
        checked.append(len(records(Path(args.run_dir))))
        difference = check_sync(engine, model, tokenizer, args)
        assert difference < 1e-5
        return difference

    monkeypatch.setattr(script, "check_sync", watched)
    return checked


@RL
def test_the_first_hand_overs_are_checked_and_all_of_them_on_request(script, tmp_path, monkeypatch):
    """Of the starting weights and of the first ones that training has changed; both times in full."""
    checked = watch_checks(script, monkeypatch)
    monkeypatch.setattr(script, "import_vllm", lambda device: None)
    monkeypatch.setattr(script, "make_engine", lambda model, tokenizer, args, folder: script.HfEngine(
        model, tokenizer, args))
    flags = dict(engine="vllm", iterations=4, max_context_tokens=300, eval_tasks=2)
    alone = dict(critic_warmup=2) if script is ppo_llm else {}  # iterations that leave the policy as it is
    train(tmp_path / "run", script, **flags, **alone)
    assert checked == ([0, 3] if alone else [0, 1])
    checked.clear()
    train(tmp_path / "all", script, **flags | alone | dict(iterations=2, check_sync=True))
    assert checked == [0, 1, 2]


# vLLM itself. Every engine of this process stays: one that goes takes along what they share.


@pytest.fixture(scope="module")
def vllm():
    """The library."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("needs vLLM: requirements-vllm.txt")
    torch.set_num_threads(1)
    library, kept = grpo_llm.import_vllm(torch.device("cpu")), []
    create = library.LLM.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.LLM, "__init__",
                      lambda llm, *rest, **options: kept.append(llm) or create(llm, *rest, **options))
        yield library


VLLM = dict(engine="vllm", vllm_cpu_cache=0.1, max_context_tokens=320)
RATES = {0: 1e-3, 8: 5e-3}  # learning rates of full weights and of an adapter


def make_sampler(folder, lora_rank, **flags):
    """A policy, an engine and what they need, in one namespace."""
    args = Args(**VLLM | dict(lora_rank=lora_rank, temperature=0.7, entropy_coef=0.0) | flags)
    tokenizer, model = grpo_llm.load_tokenizer(args.model), grpo_llm.load_weights(args.model)
    torch.manual_seed(1)
    model = grpo_llm.add_lora(model, args) if lora_rank else model
    engine = grpo_llm.make_engine(model, tokenizer, args, folder)
    return SimpleNamespace(args=args, tokenizer=tokenizer, model=model, engine=engine, folder=folder,
                           check=lambda: grpo_llm.check_sync(engine, model, tokenizer, args))


@pytest.fixture(scope="module", params=[0, 8], ids=["full", "lora"])
def sampler(request, vllm, tmp_path_factory):
    return make_sampler(tmp_path_factory.mktemp("sampler") / "sync", request.param)


def step_away(model, seed, size=0.02):
    """Noise on the trained weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))


def sampled_segments(sampler, prompts, rng):
    """A reply to each prompt, with a random advantage; those to one prompt are a group."""
    segments = [Segment(prompt, advantage=rng.uniform(-1, 1)) for prompt in prompts]
    for key, prompt in enumerate(prompts):
        sampler.engine.submit(key, prompt, sampler.args.temperature)
    while sampler.engine.busy:
        for key, ids, logprobs in sampler.engine.collect():
            segments[key].append(ids, 1, logprobs)
    return [[segment for segment in segments if segment.prompt_ids == prompt]
            for prompt in {tuple(prompt): prompt for prompt in prompts}.values()]


def largest_difference(model, groups, temperature):
    """Between what the sampler reported and a forward pass of each whole sequence."""
    with torch.no_grad():
        return max(float((reply_logprobs(model, s, temperature) - torch.tensor(reported(s))).abs().max())
                   for group in groups for s in group)


def conversation(env, first, length, tokenizer, args):
    """Ids of a prompt of `length` tokens or a few more: problems and solutions, and a last problem."""
    messages, ids = [], []
    while len(ids) < length:
        task = env.task("train", first)
        messages += [*task.messages, {"role": "assistant", "content": env.solution(task)}]
        ids, first = grpo_llm.encode_prompt(messages[:-1], tokenizer, args), first + 1
    return ids


@pytest.mark.slow
def test_sampler_and_trainer_agree_after_each_of_twenty_updates(sampler):
    rng, env = random.Random(1), envs.make("countdown")
    model, args, tokenizer = sampler.model, sampler.args, sampler.tokenizer
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                  lr=RATES[args.lora_rank])
    long = [conversation(env, 1000 + length, length, tokenizer, args) for length in (200, 220, 256)]
    sampler.engine.sync_weights(model)
    for iteration in range(20):
        tasks = [env.task("train", 4 * iteration + i) for i in range(4)]
        prompts = [grpo_llm.encode_prompt(task.messages, tokenizer, args) for task in tasks] + long
        groups = sampled_segments(sampler, [prompt for prompt in prompts for _ in range(4)], rng)
        assert largest_difference(model, groups, args.temperature) < 1e-4
        metrics, steps = grpo_llm.update(model, None, optimizer, groups, args, tokenizer.pad_token_id)
        assert steps == 1 and abs(metrics["mismatch/kl"]) < 1e-6
        # The update moved what the sampler must follow.
        assert largest_difference(model, groups[-3:], args.temperature) > 1e-2
        sampler.engine.sync_weights(model)
    assert sampler.check() < 1e-5


@pytest.mark.slow
def test_two_hundred_hand_overs_leave_memory_and_disk_as_they_are(sampler):
    process, resident, files = psutil.Process(), [], []
    for number in range(200):
        step_away(sampler.model, number, 1e-4)
        sampler.engine.sync_weights(sampler.model)
        if number % 10 == 9:
            sampled_segments(sampler, [[1, 5, 6]], random.Random(1))
        if number in (99, 199):
            gc.collect()
            resident.append(process.memory_info().rss / 2**20)
            files.append(len(list(sampler.folder.rglob("*"))))
    assert sampler.check() < 1e-5
    assert resident[1] - resident[0] < 20  # MiB
    assert files[1] == files[0] < 9


@pytest.mark.slow
def test_weights_that_are_not_handed_over_are_noticed(sampler):
    sampler.engine.sync_weights(sampler.model)
    assert sampler.check() < 1e-5
    step_away(sampler.model, 1)
    with pytest.raises(EngineError, match="sampler and trainer differ by"):
        sampler.check()
    sampler.engine.sync_weights(sampler.model)
    assert sampler.check() < 1e-5


@pytest.fixture(scope="module")
def full_sampler(vllm, tmp_path_factory):
    return make_sampler(tmp_path_factory.mktemp("full") / "sync", 0)


def check_notices_until_mended(s, monkeypatch):
    with pytest.raises(EngineError, match="sampler and trainer differ by"):
        s.check()
    monkeypatch.undo()
    s.engine.sync_weights(s.model)
    assert s.check() < 1e-5


@pytest.mark.slow
def test_a_hand_over_without_the_tied_head_is_noticed(full_sampler, monkeypatch):
    s = full_sampler
    s.engine.sync_weights(s.model)
    assert s.model.config.tie_word_embeddings and s.check() < 1e-5
    rpc = s.engine.llm.collective_rpc
    monkeypatch.setattr(s.engine.llm, "collective_rpc", lambda method, kwargs: rpc(method, kwargs=dict(
        weights_iterator=[(n, w) for n, w in kwargs["weights_iterator"] if n != "lm_head.weight"])))
    step_away(s.model, 2)
    s.engine.sync_weights(s.model)
    check_notices_until_mended(s, monkeypatch)


@pytest.mark.slow
def test_a_prefix_cache_that_is_not_reset_is_noticed(full_sampler, monkeypatch):
    s = full_sampler
    s.engine.sync_weights(s.model)
    assert s.check() < 1e-5  # its prompt of 256 tokens is in the cache now
    monkeypatch.setattr(s.engine.llm, "reset_prefix_cache", lambda: True)
    step_away(s.model, 3)
    s.engine.sync_weights(s.model)
    short = sampled_segments(s, [[1, 5, 6]] * 4, random.Random(1))
    assert largest_difference(s.model, short, s.args.temperature) < 1e-4  # short prompts do not show it
    check_notices_until_mended(s, monkeypatch)


@pytest.mark.slow
def test_logprobs_without_the_temperature_are_noticed(vllm, tmp_path, monkeypatch):
    create = vllm.LLM.__init__
    monkeypatch.setattr(vllm.LLM, "__init__", lambda *rest, logprobs_mode, **options: create(
        *rest, logprobs_mode="raw_logprobs", **options))
    s = make_sampler(tmp_path / "sync", 0)
    s.engine.sync_weights(s.model)
    with pytest.raises(EngineError, match="sampler and trainer differ by"):
        s.check()
    s.args = dataclasses.replace(s.args, temperature=1.0)
    assert grpo_llm.check_sync(s.engine, s.model, s.tokenizer, s.args) < 1e-5


# Runs with vLLM in this process


@pytest.mark.slow
def test_a_run_of_several_turns_is_on_policy_in_every_stored_segment(vllm, tmp_path):
    """`python grpo_llm.py`, a process of its own, and each sampled token against the weights of its time."""
    folder = tmp_path / "run"
    flags = dict(engine="vllm", env="tests/two_turn.py:TwoTurn", iterations=4, prompts_per_iteration=8,
                 group_size=4, eval_every=0, eval_tasks=8, eval_samples=2, checkpoint_every=1, log_episodes=1,
                 keep_checkpoints=0, temperature=0.8, learning_rate=2e-3, warmup_iterations=0)
    run = process("grpo_llm.py", "--run-dir", folder, "--check-sync", *(
        part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), value)))
    output, _ = run.communicate(timeout=30 * PATIENCE)
    assert run.returncode == 0, output
    verdict = validate(folder)
    assert verdict["ok"] and not verdict["warnings"], verdict
    log = records(folder)
    assert [record["iteration"] for record in log] == [0, 1, 2, 3, 4]
    assert all(abs(record["mismatch/kl"]) < 1e-6 for record in log[1:])
    assert all(1 < record["rollout/turns"] <= 2 for record in log[1:])
    assert json.loads((folder / "train_log.jsonl").read_text().splitlines()[0])["meta"]["versions"]["vllm"]
    assert not list((folder / "sync").glob("*"))
    before = None
    for iteration in range(1, 5):
        model = grpo_llm.load_weights(str(folder / "checkpoints" / f"step_{iteration - 1:06d}")
                                      if iteration > 1 else str(TINY))
        paths = list((folder / "episodes" / f"train_step_{iteration:06d}").glob("countdown*.json"))
        assert len(paths) == 32
        episodes = [json.loads(path.read_text()) for path in paths]
        groups = [[Segment(**segment) for segment in episode["segments"]] for episode in episodes]
        assert any(0 in group[0].response_mask for group in groups)
        assert largest_difference(model, groups, 0.8) < 1e-4
        assert before is None or largest_difference(before, groups, 0.8) > 1e-2  # other weights give others
        before = model


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 8], ids=["full", "lora"])
def test_training_with_vllm_climbs_as_with_the_default_engine(vllm, tmp_path, lora_rank):
    """Reward over the last ten of sixty iterations: the same within 0.15, and 0.15 above the first ten."""
    means = {}
    for engine in ("hf", "vllm"):
        folder = train(tmp_path / engine, **VLLM | dict(
            engine=engine, lora_rank=lora_rank, learning_rate=RATES[lora_rank], iterations=60,
            prompts_per_iteration=32, group_size=8, warmup_iterations=5, checkpoint_every=60))
        assert validate(folder)["ok"]
        rewards = [record["train/reward"] for record in records(folder)[1:]]
        assert len(rewards) == 60
        means[engine] = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
        assert max(abs(record["mismatch/kl"]) for record in records(folder)[1:]) < 1e-6
    for first, last in means.values():
        assert last > first + 0.15, means
    assert means["vllm"][1] == pytest.approx(means["hf"][1], abs=0.15), means


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 8], ids=["full", "lora"])
def test_ppo_with_vllm_starts_as_with_the_default_engine_and_stays_on_policy(
        vllm, tmp_path, monkeypatch, lora_rank):
    """In two iterations of the critic alone, and after each update of the policy."""
    checked = watch_checks(ppo_llm, monkeypatch)
    flags = dict(lora_rank=lora_rank, learning_rate=RATES[lora_rank], warmup_iterations=0, eval_tasks=32)
    default = train(tmp_path / "hf", ppo_llm, **flags, iterations=0)
    folder = train(tmp_path / "vllm", ppo_llm, **flags, **VLLM, iterations=5, critic_warmup=2)
    assert checked == [0, 3]
    verdict = validate(folder, strict=True)
    assert verdict["ok"] and not verdict["warnings"], verdict
    log = records(folder)
    assert 0 < log[0]["val/countdown/greedy"] == records(default)[0]["val/countdown/greedy"] < 1
    assert all(abs(record["mismatch/kl"]) < 1e-6 for record in log[1:])
    assert [record["train/policy_steps"] for record in log[1:]] == [0, 0, 2, 2, 2]
    norms = [record["train/weight_norm"] for record in log[1:]]
    assert norms[0] == norms[1] != norms[2]
    # A sampler that had missed an update would be further away than that.
    assert all(record["train/approx_kl"] > 1e-5 for record in log[3:])


@pytest.mark.slow
@RL
@pytest.mark.parametrize("lora_rank", [0, 8], ids=["full", "lora"])
def test_with_vllm_two_iterations_and_two_more_equal_four_bit_for_bit(vllm, script, tmp_path, lora_rank):
    flags = VLLM | dict(iterations=4, lora_rank=lora_rank, learning_rate=RATES[lora_rank], eval_every=2,
                        keep_checkpoints=0)
    whole = train(tmp_path / "whole", script, **flags)
    halves = tmp_path / "halves"
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints" / "step_000004")
    shutil.rmtree(halves / "checkpoints" / "step_000003")
    torch.manual_seed(1234)  # what this process did before must not matter
    train(halves, script, **flags)
    (mark,) = (line["resume"] for line in log_lines(halves) if "resume" in line)
    assert mark["iteration"] == 2 and len(records(halves)) == 5
    assert timeless(halves) == timeless(whole)
    (weights,) = (path.relative_to(whole) for path in whole.glob("checkpoints/*4/*model.safetensors"))
    assert (halves / weights).read_bytes() == (whole / weights).read_bytes()
    assert (halves / weights).read_bytes() != (whole / str(weights).replace("4", "3")).read_bytes()
    ends = [torch.load(folder / "checkpoints" / "step_000004" / "trainer_state.pt")
            for folder in (whole, halves)]
    for name in ("optimizer", *(("critic", "critic_optimizer") if script is ppo_llm else ())):
        same_tree(*(end[name] for end in ends))


# Real servers


class Server:
    """A vLLM server on a free port of this machine; `start` again after `kill` takes the same port."""

    def __init__(self, folder, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.flags, self.output, self.process = f"http://127.0.0.1:{self.port}", flags, folder, None
        self.start()

    def start(self):
        log = self.output.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TINY,
             "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "policy",
             "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
             "--logprobs-mode", "processed_logprobs", *self.flags],
            stdout=log, stderr=log, start_new_session=True, env=os.environ | dict(
                VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1",
                VLLM_ALLOW_RUNTIME_LORA_UPDATING="True", VLLM_LOGGING_LEVEL="INFO",
                TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"))
        return self

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
        """All its processes, at once."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def posts(self):
        """Paths of the requests that it answered, in order."""
        return re.findall(r'"POST (\S+) HTTP\S+" 200', self.output.read_text())


@pytest.fixture
def server(vllm, tmp_path):
    """Builder of servers that are gone when the test ends."""
    servers = []

    def build(*flags):
        servers.append(Server(tmp_path / f"server_{len(servers)}.log", *flags))
        return servers[-1]
    yield build
    for one in servers:
        one.kill()


def at_iteration(folder, iteration, action):
    """Do it, in a thread, as soon as the log has that iteration. -> the thread"""
    def watch():
        log, deadline = folder / "train_log.jsonl", time.monotonic() + 30 * PATIENCE
        while time.monotonic() < deadline and not (
                log.exists() and f'"iteration": {iteration},' in log.read_text()):
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def server_run(folder, server, script=grpo_llm, **flags):
    """The command line of a short run that samples with this server. -> exit code"""
    small = SMALL_PPO if script is ppo_llm else SMALL
    flags = small | dict(engine="vllm", vllm_url=server.url, max_context_tokens=256, run_dir=folder,
                         prompts_per_iteration=8) | flags
    return command_line(f"{script.__name__}.py", "--check-sync", *(
        part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), value)))


def check_run(folder, iterations, errors=0):
    """A valid log without a gap, of a sampler that had the policy's weights in every iteration."""
    verdict = validate(folder)
    assert verdict["ok"] and (verdict["resumes"], verdict["errors"]) == (errors, errors), verdict
    log = records(folder)
    assert [record["iteration"] for record in log] == list(range(iterations + 1))
    assert all(abs(record["mismatch/kl"]) < 1e-6 for record in log[1:])
    assert log[-1]["opt_steps"] > iterations / 2  # the others had no group with a signal


@pytest.mark.slow
def test_a_server_that_is_killed_ends_the_run_with_one_line_and_the_same_command_continues(
        server, tmp_path, capsys):
    full, folder, iterations = server().ready(), tmp_path / "run", 14
    flags = dict(iterations=iterations, learning_rate=2e-3, warmup_iterations=0)
    killer = at_iteration(folder, 3, full.kill)
    assert server_run(folder, full, vllm_retries=1, **flags) == 1
    killer.join()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert re.match(rf"error: EngineError: --vllm-url {full.url}: no answer after 2 tries .*receipt: ", line)
    finished = records(folder)[-1]["iteration"]
    assert 3 <= finished < iterations - 3
    assert json.loads((folder / "checkpoints" / "state.json").read_text())["last"] == f"step_{finished:06d}"
    (receipt,) = folder.glob("receipts/*/receipt.json")
    assert json.loads(receipt.read_text())["type"] == "EngineError"
    assert validate(folder)["ok"]

    # A new process with the weights of the disk; it is killed once more, and comes back in time.
    full.start().ready()
    asked = len(full.posts())
    killer = at_iteration(folder, finished + 3, lambda: (full.kill(), full.start()))
    assert server_run(folder, full, vllm_retries=12, **flags) == 0
    killer.join()
    assert full.posts()[asked:][:3] == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"]
    check_run(folder, iterations, errors=1)
    # After its return it got the weights first, too.
    again = full.output.read_text().rpartition("Started server process")[2]
    assert re.findall(r'"POST (\S+) HTTP', again)[:2] == ["/collective_rpc", "/reset_prefix_cache"]

    # Another run, of the other script, gets its own.
    assert server_run(tmp_path / "ppo", full, ppo_llm, **flags | dict(iterations=4)) == 0
    check_run(tmp_path / "ppo", 4)


@pytest.mark.slow
def test_a_server_samples_with_the_adapter_of_each_run_in_turn(server, tmp_path):
    lora = server("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1").ready()
    for name, script in (("one", grpo_llm), ("two", ppo_llm)):
        assert server_run(tmp_path / name, lora, script, lora_rank=8, learning_rate=1e-2, iterations=4,
                          warmup_iterations=0) == 0
        check_run(tmp_path / name, 4)
        cards = requests.get(lora.url + "/v1/models", timeout=PATIENCE).json()["data"]
        assert [re.sub("-.*", "", card["id"]) for card in cards] == ["policy", "policy"]
        assert cards[1]["root"].startswith(str(tmp_path / name / "sync"))
    # The adapter had something to say: the base alone gives other probabilities.
    weights = load_file(Path(cards[1]["root"], "adapter_model.safetensors"))
    assert max(float(w.abs().max()) for name, w in weights.items() if "lora_B" in name) > 1e-3


# Two processes of torchrun


def two_processes(folder, script=grpo_llm, **flags):
    """A short run of two processes. -> how often the weights were handed over"""
    small = SMALL_PPO if script is ppo_llm else SMALL
    flags = small | dict(engine="vllm", max_context_tokens=256, run_dir=folder, prompts_per_iteration=7,
                         learning_rate=5e-4, warmup_iterations=0, iterations=4) | flags
    words = ["--check-sync", *(str(part) for name, value in flags.items()
                               for part in ("--" + name.replace("_", "-"), value))]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(ROOT / f"{script.__name__}.py"), *words], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"), timeout=100 * PATIENCE)
    assert done.returncode == 0, done.stderr[-5000:]
    check_run(folder, 4)
    hand_overs = done.stdout.count("sampler and trainer differ by")  # the larger difference, said once
    assert hand_overs >= 3  # at the start, and after each iteration that had something to learn
    return hand_overs


@pytest.mark.slow
@pytest.mark.parametrize("script, lora_rank", [(grpo_llm, 0), (grpo_llm, 8), (ppo_llm, 0)])
def test_each_process_has_an_engine_of_its_own_with_the_policys_weights(script, lora_rank, vllm, tmp_path):
    two_processes(tmp_path / "run", script, lora_rank=lora_rank, vllm_cpu_cache=0.1)


@pytest.mark.slow
def test_two_processes_ask_the_same_servers_to_which_one_hands_the_weights(server, tmp_path):
    lora = server("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1")
    full = server().ready()
    hand_overs, posts = two_processes(tmp_path / "full", vllm_url=full.url), full.posts()
    assert posts.count("/collective_rpc") == posts.count("/reset_prefix_cache") == hand_overs
    # Two processes, seven prompts of an iteration, and the check of each hand-over.
    assert posts.count("/v1/completions") >= 4 * 7 + 2 * hand_overs
    full.kill()
    hand_overs = two_processes(tmp_path / "lora", vllm_url=lora.ready().url, lora_rank=8, learning_rate=3e-3)
    assert lora.posts().count("/v1/load_lora_adapter") == hand_overs
