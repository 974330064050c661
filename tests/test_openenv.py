"""Games of OpenEnv servers: real ones in processes of their own, and what is no server."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

import envs
import grpo_llm
from envs.adapters.openenv import OpenEnv
from tests import stand_ins
from tests.run_folders import free_port, in_time
from tests.test_ways_in import make_model
from tools.validate_train_log import validate

# Where the package is installed: it cannot be beside vLLM and others.
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)


@contextlib.contextmanager
def running(game, sessions=4):
    """A server. -> its URL, its process"""
    missing = PYTHON == sys.executable and importlib.util.find_spec("openenv") is None
    if missing and os.environ.get("CI") != "true":
        pytest.skip("not installed: openenv")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([PYTHON, "tests/openenv_server.py", game, str(port), str(sessions)])
    try:
        for _ in range(600):
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield url, server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def sums():
    with running("sum") as (url, _):
        yield url


@pytest.fixture(scope="module")
def guesses():
    with running("guess") as (url, _):
        yield envs.make("openenv", url=url, splits="train,validation", observation="text", max_turns="6")


def open_sessions(url):
    """Games that the server has open: the one that answers this is not counted."""
    with urllib.request.urlopen(f"{url}/state", timeout=5) as answer:
        return json.loads(answer.read())["step_count"] - 1


def answer_to(task):
    first, _, second = task.messages[0]["content"].split()[:3]
    return str(int(first) + int(second))


def steps_of(env, task, replies, seed=0):
    episode = env.start(task, seed)
    try:
        return [episode.step(reply) for reply in replies]
    finally:
        episode.close()


@contextlib.contextmanager
def listening(answer=None):
    """A server that answers each connection with some bytes, or never. -> its URL"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            connections = []
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])
                    if answer is not None:
                        connections[-1].recv(2**16)
                        connections[-1].sendall(answer)
                        connections.pop().close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def http(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize("answer, said", [
    (None, "no answer within {} s"), (b"", "Stream closed"), (b"SSH-2.0\r\n\r\n", "Connection closed"),
    (http("no", "404 Not Found"), "/schema: HTTP 404"), (http("<html>"), "Expecting value"),
    (http("[]"), "not those of an OpenEnv"), (http("{}"), "not those of an OpenEnv")], ids=str)
def test_what_is_no_server_is_one_line_in_bounded_time(answer, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)  # the package is the server's alone

    def check(limit):
        began = time.monotonic()
        with listening(answer) as url, pytest.raises(envs.BadInput, match=said.format(limit)) as told:
            envs.make("openenv", url=url, timeout=limit)
        assert time.monotonic() - began < 6 * limit and "\n" not in str(told.value) and url in str(told.value)

    in_time(check)


def test_no_server_at_all_and_bad_options_are_one_line():
    closed = f"http://127.0.0.1:{free_port()}"
    for options, said in (({}, "Connection refused"), ({"url": "127.0.0.1:8000"}, "http://host:port"),
                          ({"timeout": 0}, "expected more than 0"), ({"max_turns": 0}, "max_turns"),
                          ({"seeds": 0}, "seeds"), ({"splits": "train,train"}, "expected two different"),
                          ({"turns": 3}, "unknown option 'turns'.*known: url, action")):
        with pytest.raises(envs.BadInput, match=said) as told:
            envs.make("openenv", **{"url": closed} | options)
        assert "\n" not in str(told.value)


def test_a_reply_is_an_action_or_is_told_why_not_and_a_failing_game_is_no_verdict():
    with stand_ins.serving(listed=False) as url:
        for action, form in (("", "{}"), ("json", 'So: {{"answer": "{}"}}.')):
            env = envs.make("openenv", url=url, observation="text", action=action)
            task = env.task("train", 0)
            assert ("JSON object" in task.messages[0]["content"]) == (action == "json")
            steps = steps_of(env, task, [form.format(text) for text in ("x" * 10, "hint", answer_to(task))])
            assert steps[0].messages[0]["content"] == "This is no action: ['answer']: too long"
            assert [step.reward for step in steps] == [0, 0.3, 0.6]
            assert steps[-1].terminated and steps[-1].info == {"correct": 1, "invalid": 1, "error": 0}
            with pytest.warns(UserWarning, match=f"task {task.id}: RuntimeError: EXECUTION_ERROR: oh"):
                [step] = steps_of(env, task, [form.format("crash")])
            assert step.truncated and step.info == {"correct": 0, "invalid": 0, "error": 1}
        [step] = steps_of(env, task, ["7"])  # no object
        assert step.messages and step.info["invalid"] == 1
        with pytest.warns(UserWarning, match="another first observation than before"):
            [step] = steps_of(env, env.task("test", 200), ["1"])
        assert step.truncated and step.info["error"] == 1
        whole = envs.make("openenv", url=url)
        assert json.loads(whole.task("test", 3).messages[0]["content"]) == {"text": "3 + 21 = ?"}


@pytest.mark.slow
def test_one_reply_to_a_seed_and_the_server_says_what_is_correct(sums):
    env = envs.make("openenv", url=sums, observation="text", seeds=50)
    assert [env.num_tasks(split) for split in env.splits] == [50, 256] and env.blocking and env.multi_turn
    tasks = [env.task(split, k) for split in env.splits for k in range(20)]
    assert len({str(task.messages) for task in tasks}) == len({task.id for task in tasks}) == 40
    assert [env.task(split, k) for split in env.splits for k in range(20)] == tasks  # the same each time
    assert tasks[0].messages == [{"role": "user", "content": "256 + 92 = ?"}]
    assert tasks[0].source == "openenv/Sum" and json.dumps(tasks[0].data)
    for task in tasks[::7]:
        [right], [wrong] = steps_of(env, task, [answer_to(task)]), steps_of(env, task, ["-1"], seed=5)
        assert right.terminated and right.messages == [] and right.reward == 1 and right.info["correct"] == 1
        assert wrong.terminated and wrong.reward == 0.5
        assert wrong.info == {"correct": 0, "invalid": 0, "error": 0}
    for index in (-1, 50):
        with pytest.raises(IndexError):
            env.task("train", index)
    whole = envs.make("openenv", url=sums)
    assert json.loads(whole.task("test", 3).messages[0]["content"]) == {"text": "3 + 21 = ?", "turns": 0}
    assert open_sessions(sums) == 0


@pytest.mark.slow
def test_several_replies_to_listed_tasks(guesses):
    assert [guesses.num_tasks(split) for split in guesses.splits] == [30, 5]
    task = guesses.task("test", 3)
    assert task.messages == [{"role": "user", "content": "A number of validation?"}]
    assert task.data == {"split": "validation", "index": 3}
    steps = steps_of(guesses, task, ["50", "what?", "200", "103"])
    assert [step.reward for step in steps] == pytest.approx([0.1, 0, 0.1, 0.7])
    assert [step.messages and step.messages[0]["content"][:17] for step in steps] == [
        "more", "This is no action", "less", []]
    assert steps[-1].terminated and steps[-1].info == {"correct": 0, "invalid": 1, "error": 0}
    assert steps_of(guesses, task, ["50", "what?", "200", "103"]) == steps
    easy = envs.make("openenv", url=guesses.config.url, splits="train,extra", solved_at=0.8)
    assert steps_of(easy, easy.task("train", 9), ["1", "9"])[-1].info["correct"] == 1
    steps = steps_of(guesses, task, ["1"] * 6)
    assert [step.truncated for step in steps] == [False] * 5 + [True] and not steps[-1].terminated


@pytest.mark.slow
def test_json_actions(guesses):
    env = envs.make("openenv", url=guesses.config.url, splits="train,extra", observation="text",
                    action="json")
    task = env.task("train", 7)
    assert "JSON object" in task.messages[0]["content"] and '"guess"' in task.messages[0]["content"]
    [step] = steps_of(env, task, ['So: {"guess": "7"}.'])
    assert step.terminated and step.reward == 0.9 and step.info["invalid"] == 0
    for reply in ("7", "{}", '{"guess": 7}', '{"guess": "7", "more": 1}', '{"guess": NaN}',
                  '{"guess": 1e999}',
                  '{"guess": "\\ud800"}', "{[" * 9000 + "}", '{"a":' * 3000 + "1" + "}" * 3000):
        [step] = steps_of(env, task, [reply])
        assert (step.info["invalid"], step.info["error"], step.reward) == (1, 0, 0), reply[:30]


@pytest.mark.slow
def test_any_text_is_answered(sums, guesses):
    from test_text_envs import MEGABYTES

    for env in (envs.make("openenv", url=sums, observation="text"), guesses):
        task = env.task("train", 1)
        for text in MEGABYTES:
            [step] = steps_of(env, task, [text])
            assert step.info["error"] == step.info["correct"] == 0, text[:60]


@pytest.mark.slow
def test_sessions_are_apart_and_closed(guesses):
    """Two in turns, twelve in threads on four places, which wait for one another."""
    one, two = guesses.task("train", 3), guesses.task("train", 20)
    first, second = guesses.start(one, 0), guesses.start(two, 0)
    assert [episode.step("10").messages[0]["content"] for episode in (first, second)] == ["less", "more"]
    assert open_sessions(guesses.config.url) == 2
    assert first.step("3").terminated and second.step("20").terminated
    assert open_sessions(guesses.config.url) == 0
    first.close(), second.close()  # as callers do

    ended = []

    def play(k):
        ended.append((k, steps_of(guesses, guesses.task("train", k), ["0", "29", str(k)])[-1]))

    threads = [threading.Thread(target=play, args=(k,)) for k in range(1, 13)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(ended) == 12 and all(step.terminated and step.info["error"] == 0 for _, step in ended)
    assert open_sessions(guesses.config.url) == 0
    begun = guesses.start(one, 0)
    begun.step("1")
    begun.close()
    assert open_sessions(guesses.config.url) == 0  # when close returns, not some time later


@pytest.mark.slow
def test_server_lost_slow_or_failing_is_the_episodes_error():
    with running("sum") as (url, server):
        task = envs.make("openenv", url=url).task("train", 0)

        def check(limit):
            env = envs.make("openenv", url=url, timeout=limit)
            for reply in ("crash", "sleep"):
                began = time.monotonic()
                told = f"task {task.id}: .*(crashed|no answer within {limit} s)"
                with pytest.warns(UserWarning, match=told):
                    [step] = steps_of(env, task, [reply])
                assert time.monotonic() - began < 4 * limit
                assert step.truncated and not step.terminated
                assert step.info == {"correct": 0, "invalid": 0, "error": 1}

        in_time(check, (3, 7))
        patient = envs.make("openenv", url=url, timeout=29)
        waiting = patient.start(task, 0)  # closed from another thread, as where an episode's time is over
        threading.Timer(1.0, waiting.close).start()
        began = time.monotonic()
        with pytest.warns(UserWarning):
            assert waiting.step("sleep").info["error"] == 1
        assert time.monotonic() - began < patient.config.timeout / 2
        stopped = patient.start(task, 0)
        with pytest.warns(UserWarning):
            [died] = steps_of(patient, task, ["die"])
            assert died.info["error"] == 1 and stopped.step("1").info["error"] == 1
        with pytest.raises(envs.BadInput, match="refused"):
            patient.task("train", 1)


@pytest.mark.slow
def test_a_frozen_server_or_one_without_a_place_is_an_error_in_time(recwarn):
    with running("guess", sessions=1) as (url, server):
        env = envs.make("openenv", url=url, splits="train,validation", timeout=30)
        one, two = env.task("train", 3), env.task("train", 4)
        first = env.start(one, 0)
        first.step("1")
        hasty = OpenEnv(env.config)  # what it asks here is answered though the place is taken

        def check(limit):
            began = time.monotonic()
            hasty.config = dataclasses.replace(env.config, timeout=limit)
            [full] = steps_of(hasty, two, ["1"])
            assert full.info["error"] == 1 and time.monotonic() - began < 4 * limit

        in_time(check, (3, 9))
        hasty.config = dataclasses.replace(env.config, timeout=3)
        first.session.timeout = 3
        began = time.monotonic()
        server.send_signal(signal.SIGSTOP)
        for reply in ("1", "9" * 20_000):
            assert hasty.start(two, 0).step(reply).info["error"] == 1
        assert first.step("3").info["error"] == 1
        first.close()
        assert time.monotonic() - began < 17 * hasty.config.timeout
        server.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("game, options, said", [
    ("tools", {}, "MCP tools: not supported"), ("pair", {}, "expected one of first, second, json, got ''"),
    ("pair", {"action": "third"}, "expected one of first, second, json"),
    ("pair", {"action": "first", "observation": "sight"}, "observation: expected one of text, turns"),
    ("guess", {}, "splits: expected two of train, validation, extra, got 'train,test'"),
    ("fickle", {}, "")])
def test_what_cannot_be_played_is_refused_in_a_line(game, options, said):
    with running(game) as (url, _):
        if said:
            with pytest.raises(envs.BadInput, match=said) as told:
                envs.make("openenv", url=url, **options)
            assert "\n" not in str(told.value)
        else:  # the first observation is the prompt: another one would be another task
            env = envs.make("openenv", url=url)
            with pytest.warns(UserWarning, match="another first observation"):
                assert steps_of(env, env.task("train", 0), ["1"])[0].info["error"] == 1


@pytest.mark.slow
def test_the_packages_own_client_sees_the_same(sums):
    """What reset and step answer to it, and to the adapter."""
    code = ("import json, sys; from openenv.core import GenericEnvClient\n"
            "with GenericEnvClient(base_url=sys.argv[1]).sync() as env:\n"
            "    first = env.reset(seed=256).observation['text']; result = env.step({'answer': '348'})\n"
            "    print(json.dumps([first, result.reward, result.done]))")
    said = subprocess.run([PYTHON, "-c", code, sums], check=True, capture_output=True, text=True).stdout
    env = envs.make("openenv", url=sums, observation="text")
    [step] = steps_of(env, env.task("train", 0), ["348"])
    assert json.loads(said) == [env.task("train", 0).messages[0]["content"], step.reward, step.terminated]


@pytest.mark.slow
@pytest.mark.parametrize("game, options", [("sum", "seeds=9"), ("guess", "splits=train,extra max_turns=2")])
def test_a_script_trains_on_it(game, options, tmp_path):
    make_model(tmp_path / "model")
    with running(game, sessions=8) as (url, _):
        grpo_llm.main(grpo_llm.Args(
            model=f"{tmp_path}/model", run_dir=f"{tmp_path}/run", prompts_per_iteration=2, group_size=4,
            eval_tasks=4, eval_samples=2, max_response_tokens=20, iterations=2, env="openenv",
            env_kwargs=(f"url={url}", *options.split())))
    assert validate(tmp_path / "run", strict=True)["ok"]
    log = (tmp_path / "run" / "train_log.jsonl").read_text()
    answered = r'"val/openenv/Sum/invalid": 0' if game == "sum" else r'"rollout/turns": (1\.[1-9]|2)'
    assert re.search(answered, log) and '"rollout/termination/error": 0.0' in log
    assert not re.search(r'"rollout/termination/error": (0\.[1-9]|1)', log)
