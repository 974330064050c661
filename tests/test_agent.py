"""--env agent: an agent asks a chat endpoint, the policy answers, each token is kept as it was sampled."""

import asyncio
import concurrent.futures
import http.client
import json
import re
import shlex
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import psutil
import pytest
import torch

import envs
import grpo_llm
import ppo_llm
from envs.adapters import agent as agent_module
from envs.adapters import endpoint as endpoint_module
from tests.agent_client import Client, ServerError, post
from tests.run_folders import (
    ROOT,
    children_named,
    full_forward,
    slow_but,
    timeless,
    train,
    until,
    write_jsonl,
)
from tests.test_rollout import AT_1, CHATML, QWEN3, Speaker, byte_tokenizer, check_tokens

# With functions, as Qwen's templates write them.
TOOLS = ("{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}" + CHATML).replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}")
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
HELLO = {"role": "user", "content": "hello"}
ASK = f"client([{HELLO}])"


def user(text):
    return dict(role="user", content=text)


@pytest.fixture
def make(tmp_path):
    """-> an environment whose agent is a function agent(client, task), or run(task, base_url, api_key)"""
    def make(agent=None, run=None, rows=None, **options):
        write_jsonl(tmp_path / "tasks.jsonl", rows or [dict(question=f"q{n}", answer=n) for n in range(20)])
        if "command" not in options:
            options.setdefault("program", "tests.agent_client:run")
        env = envs.make("agent", data=str(tmp_path / "tasks.jsonl"), **options)
        if agent:
            env.program = lambda task, base_url, api_key: agent(Client(base_url, api_key), task)
        elif run:
            env.program = run
        return env
    return make


def play(env, say, count=1, samples=1, script=grpo_llm, template=CHATML, **flags):
    """-> the Rollouts of the first tasks. say: a function of the text so far, or replies one after another"""
    if not callable(say):
        replies = iter(say)
        say = lambda text: next(replies)  # noqa: E731
    tokenizer = byte_tokenizer(template)
    args = script.Args(**dict(max_response_tokens=200) | flags)
    rollouts = script.rollout(Speaker(tokenizer, say), tokenizer, env,
                              [env.task("train", n) for n in range(count)], samples, AT_1, args,
                              script.episode_reward)
    check_tokens(rollouts)
    return rollouts


def texts_of(r, tokenizer=None):
    """What the model saw and said, by segment, as text."""
    tokenizer = tokenizer or byte_tokenizer(CHATML)
    return [tokenizer.decode(segment.ids) for segment in r.segments]


def rendered(*messages, template=CHATML, tools=None):
    """What a template writes of a conversation of which the last reply is the end."""
    text = byte_tokenizer(template).apply_chat_template(messages, tools=tools, tokenize=False)
    return text.removesuffix("\n")


def said(text):
    return dict(role="assistant", content=text)


# ---- One conversation


def test_a_reply_is_the_policys_and_the_reward_is_what_the_agent_returns(make):
    def agent(client, task):
        assert task.keys() == {"question", "answer"}
        reply = client([dict(role="developer", content="Be brief."), user(task["question"])])
        return dict(reward=len(reply["content"]) / 10, correct=reply["content"] == "abc", length=3)

    first, second = play(make(agent), ["abc", "abcd"], count=2)
    assert texts_of(first) == [rendered(dict(role="system", content="Be brief."),
                                        user(first.task.data["question"].split('"')[3]), said("abc"))]
    assert (first.reward, first.correct, first.termination) == (0.3, 1.0, "done")
    assert (second.reward, second.correct) == (0.4, 0.0)
    assert first.info == dict(correct=1.0, length=3.0, requests=1.0, conversations=1.0)


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_a_run_is_that_of_the_same_task_as_rows_to_the_bit(script, tmp_path):
    rows = [dict(prompt=f"2 {n} 7", answer=str(n)) for n in range(1, 40)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    options = (f"data={tmp_path}/rows.jsonl", "check=contains", "prompt=prompt")
    same = dict(iterations=3, eval_every=3)
    rows = train(script, tmp_path / "rows", env="rows", env_kwargs=options, **same)
    agents = train(script, tmp_path / "agent", env="agent", **same,
                   env_kwargs=(*options, "program=tests.agent_client:run"))
    logs = []
    for folder in (rows, agents):
        lines = [line for line in timeless(folder) if "train/reward" in line]
        logs.append([{re.sub("/(rows|agent)/", "/", name): value for name, value in line.items()
                      if not re.search("conversations|requests", name)} for line in lines])
    assert len(logs[0]) == 3 and logs[0] == logs[1]


ECHOES = {
    "as it came": lambda m: m,
    "without what is empty": lambda m: {k: v for k, v in m.items() if v},
    "in parts": lambda m: m | dict(content=[dict(type="text", text=m["content"] or "")]),
    "in a part of output": lambda m: m | dict(content=[dict(type="output_text", text=m["content"] or "",
                                                            annotations=[])]),
    "other spaces": lambda m: m | dict(content=f"\n {m['content'] or ''}  \n"),
    "null for nothing": lambda m: m | dict(content=m["content"] or None, audio=None, function_call=None),
    "without thoughts": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
    "with other fields": lambda m: m | dict(annotations=[], name="me", id="msg_1", refusal=None),
    "arguments anew": lambda m: m | dict(tool_calls=[
        c | dict(function=dict(name=c["function"]["name"], arguments=json.dumps(
            json.loads(c["function"]["arguments"]), indent=2, sort_keys=True)))
        for c in m.get("tool_calls", [])]),
    "an object of arguments": lambda m: m | dict(tool_calls=[
        c | dict(function=c["function"] | dict(arguments=json.loads(c["function"]["arguments"])))
        for c in m.get("tool_calls", [])]),
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


@pytest.mark.parametrize("echo", ECHOES)
def test_what_a_client_makes_of_a_reply_is_the_same_turn(make, echo):
    replies = [f"<think>\nhm\n</think>\n\nLet me see. {CALL}", "It  is\n3.", "Good bye."]

    def agent(client, task):
        messages = [HELLO]
        for _ in range(3):
            message = client(messages, tools=[ADD])
            messages.append(ECHOES[echo](message))
            for call in message.get("tool_calls", []):
                assert client.finish_reason == "tool_calls" and call["function"]["name"] == "add"
                numbers = json.loads(call["function"]["arguments"])
                answer = str(sum(numbers.values()))
                messages.append(dict(role="tool", tool_call_id=call["id"], content=answer))
            if not message.get("tool_calls"):
                messages.append(user("And?"))
        return len(messages)

    (r,) = play(make(agent), replies, template=TOOLS)
    assert texts_of(r) == [rendered(HELLO, said(replies[0]), dict(role="tool", name="add", content="3"),
                                    said(replies[1]), user("And?"), said(replies[2]), template=TOOLS,
                                    tools=[ADD])]
    assert r.children == [] and r.reward == 7 and r.info["conversations"] == 1


def test_a_reply_comes_with_thoughts_and_calls_in_fields_of_their_own(make):
    got = []

    def agent(client, task):
        got.append(client([HELLO], tools=[ADD]))
        got.append(client([HELLO]))
        return 0

    play(make(agent), [f"<think>why</think>Well.{CALL}{CALL}", f"<think>why</think>{CALL}"], template=TOOLS)
    calls = got[0].pop("tool_calls")
    assert got[0] == dict(role="assistant", content="Well.", refusal=None, reasoning_content="why")
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [dict(a=1, b=2)] * 2
    assert len({call["id"] for call in calls}) == 2 and {call["type"] for call in calls} == {"function"}
    assert got[1] == dict(role="assistant", content=CALL, refusal=None, reasoning_content="why")


def test_answers_of_tools_are_read_in_the_order_of_their_calls(make):
    def agent(client, task):
        message = client([HELLO], tools=[ADD])
        first, second = [call["id"] for call in message["tool_calls"]]
        answers = [dict(role="tool", tool_call_id=second, content="two"),
                   dict(role="tool", tool_call_id=first, content="one")]
        client([HELLO, message, *answers], tools=[ADD])
        client([HELLO, message, *answers[::-1], said("so"), user("?")], tools=[ADD])
        return 0

    (r,) = play(make(agent), [CALL * 2, "so", "on"], template=TOOLS)
    contents = [m["content"] for m in r.messages]
    assert contents == ["hello", CALL * 2, "one", "two", "so", "?", "on"] and not r.children


# ---- Several conversations


def test_a_history_that_was_rewritten_is_a_conversation_of_its_own(make):
    def agent(client, task):
        first = client([HELLO])
        client([HELLO, said("something else"), user("more")])
        client([HELLO, first, user("back")])
        return 1

    (r,) = play(make(agent), ["a", "b", "c"])
    assert texts_of(r) == [rendered(HELLO, said("a"), user("back"), said("c"))]
    (child,) = r.children
    assert texts_of(child) == [rendered(HELLO, said("something else"), user("more"), said("b"))]
    assert r.info["conversations"] == 2 and child.reward == r.reward == 1 and child.termination == "done"


def test_other_tools_and_the_same_question_again_are_no_continuation(make):
    def agent(client, task):
        messages = [HELLO, client([HELLO]), user("more")]
        client(messages, tools=[ADD])
        client([HELLO])
        client(messages)
        return 1

    (r,) = play(make(agent), "abcd", template=TOOLS)
    first, more = [HELLO, said("a")], user("more")
    assert texts_of(r) == [rendered(*first, more, said("d"), template=TOOLS)]
    assert [texts_of(child) for child in r.children] == [
        [rendered(*first, more, said("b"), template=TOOLS, tools=[ADD])],
        [rendered(HELLO, said("c"), template=TOOLS)]]


def in_parts(text):
    """A reply that tells what was asked."""
    asked = re.findall(r"user\n(.*?)<\|im_end\|>", text)
    return f"re {' '.join(asked)}"


def test_questions_that_come_together_are_played_together_and_each_may_go_on(make, monkeypatch):
    monkeypatch.setattr(agent_module, "QUIET", 1.0)  # however slow a machine is
    monkeypatch.setattr(agent_module, "LATE", 60)

    def agent(client, task):
        plan = client([user("plan")])
        asked = [[user(f"part {n}")] for n in range(4)]
        for _ in range(2):
            replies = client.together(*asked)
            asked = [[*messages, reply, user("more")] for messages, reply in zip(asked, replies, strict=True)]
        return float(client([user("plan"), plan, user("end")])["content"] == "re plan end")

    (r,) = play(make(agent), in_parts)
    assert texts_of(r) == [rendered(user("plan"), said("re plan"), user("end"), said("re plan end"))]
    assert sorted(texts_of(child)[0] for child in r.children) == [
        rendered(user(f"part {n}"), said(f"re part {n}"), user("more"), said(f"re part {n} more"))
        for n in range(4)]
    assert r.reward == 1 and {child.termination for child in r.children} == {"done"}


def test_a_conversation_that_others_cannot_wait_for_goes_on_as_another(make):
    """All that are in play are answered together: none may wait for an agent that waits for another."""
    def agent(client, task):
        client([user("plan")])
        first, second = [user("a")], [user("b")]
        one, two = client.together(first, second)
        client([*second, two, user("more")])
        reply = client([*first, one, user("more")])
        return float(reply["content"] == "re a more")

    (r,) = play(make(agent), in_parts)
    assert r.reward == 1 and r.info["requests"] == 5
    replies = [m["content"] for child in r.children for m in child.messages[len(child.task.messages):]
               if m["role"] == "assistant"]
    assert sorted(replies) == ["re a", "re a more", "re b", "re b more"]


def test_conversations_in_turns_are_all_kept_each_token_once(make):
    def agent(client, task):
        histories = {"a": [user("a")], "b": [user("b")]}
        for _ in range(3):
            for name, history in histories.items():
                history += [client(history), user(f"more {name}")]
        return 1

    (r,) = play(make(agent), ["a1", "b1", "a2", "b2", "a3", "b3"])
    assert texts_of(r) == [rendered(user("a"), said("a1"), user("more a"), said("a2"), user("more a"),
                                    said("a3"))]
    history = [user("b")]
    for child, reply in zip(r.children, ["b1", "b2", "b3"], strict=True):
        assert texts_of(child) == [rendered(*history, said(reply))]
        assert sum(child.segments[0].response_mask) == len(reply) + 1
        history += [said(reply), user("more b")]


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
@pytest.mark.parametrize(("which", "trained"), [("all", 2), ("first", 1)])
def test_which_conversations_learn(make, script, which, trained):
    def agent(client, task):
        client([HELLO])
        client([user("other")])
        return len(client.server[1]) and task["reward"]

    env = make(agent, rows=[dict(reward=r) for r in (0.5, 0.25)], train=which)
    env.tasks["train"] = sorted(env.tasks["train"], key=lambda task: task.data["row"]["reward"])
    rollouts = play(env, lambda text: "x", samples=2, script=script)
    rollouts[1].reward = 1.0
    args = script.Args(group_size=2) if script is grpo_llm else script.Args()
    if script is grpo_llm:
        ((segments),) = script.trainable_groups(rollouts, args)
        assert len(segments) == 2 * trained
    assert [len([r] if not r.seat_rewards else r.family) for r in rollouts] == [trained, trained]


@pytest.mark.parametrize("template", slow_but((QWEN3,), (CHATML, QWEN3)))
def test_every_segment_is_what_the_model_saw(make, random_llama, template):
    """The sampler is the model itself: each segment's log-probabilities are those of its own full forward."""
    tokenizer = byte_tokenizer(template, alphabet="abcdefghijklmnopqrstuvwxyz\n")
    marks = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    model = random_llama(vocab_size=len(tokenizer), seed=2, initializer_range=0.2, dtype=torch.float32)
    model.lm_head = torch.nn.Linear(16, len(tokenizer))
    with torch.no_grad():  # so that it thinks, and ends
        model.lm_head.bias.zero_()[marks] = torch.tensor([1.0, 2.0, 2.5])
    model.generation_config.eos_token_id = marks[-1]

    def agent(client, task):
        messages = [user("go")]
        for text in ("on", "more", "end"):
            messages += [client(messages), user(text)]
            client([user("aside"), user(text)])
            client.together([user("a")], [user("b")])
        client([messages[0], *messages[3:]])  # a history that was cut
        return 1

    args = grpo_llm.Args(max_response_tokens=24)
    env = make(agent)
    rollouts = grpo_llm.rollout(grpo_llm.HfEngine(model, tokenizer, args), tokenizer, env,
                                [env.task("train", n) for n in range(4)], 2, AT_1, args,
                                grpo_llm.episode_reward)
    forks = 0
    for member in (member for r in rollouts for member in r.family):
        for segment in member.segments:
            with torch.no_grad():
                expected, _ = full_forward(model, segment, 1.0)
            expected *= torch.tensor(segment.response_mask)
            assert segment.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(member.turns) == sum(m["role"] == "assistant"
                                        for m in member.messages[len(member.task.messages):])
        forks += len(member.segments) - 1
    done = [r for r in rollouts if r.termination == "done"]  # else a reply was cut
    assert done and all(len(r.turns) == 3 and r.info["conversations"] == 11 for r in done)
    assert (forks > 2) == (template == QWEN3)


# ---- Who may ask what


def asked(make, body, path="/chat/completions"):
    """What the endpoint says to a request in an episode.  -> status, body"""
    answers = []

    def run(task, base_url, api_key):
        post(base_url, api_key, dict(messages=[HELLO]))
        answers.append(post(base_url, api_key, body, path))
        return 1

    (r,) = play(make(run=run), lambda text: "hi")
    assert r.reward == 1
    return answers[0][0], json.loads(answers[0][1])


@pytest.mark.parametrize(("change", "names"), [
    (dict(n=2), "n: 2"), (dict(stop=["x"]), "stop"), (dict(logprobs=True), "logprobs"),
    (dict(functions=[{}]), "functions"), (dict(audio={}), "audio"), (dict(messages=[]), "messages"),
    (dict(messages="hi"), "messages"), (dict(messages=["hi"]), "role"),
    (dict(messages=[dict(role="martian", content="")]), "martian"),
    (dict(messages=[dict(role="user", content=[dict(type="image_url", image_url={})])]), "image_url"),
    (dict(messages=[dict(role="user", content=7)]), "content"),
    (dict(messages=[HELLO, said("I")]), "assistant"),
    (dict(tools=[dict(type="web_search")]), "tools"), (dict(tools="add"), "tools"),
    (dict(messages=[said(None) | dict(tool_calls=[dict(function=dict(name="f", arguments="{"))]), HELLO]),
     "arguments"),
    (dict(messages=[said(None) | dict(tool_calls=7), HELLO]), "tool_calls"),
])
def test_what_is_not_served_is_refused_with_its_name(make, change, names):
    status, answer = asked(make, dict(messages=[HELLO]) | change)
    assert status == 400 and names in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", ["{", "[1]", "[" * 10_000, b"\xff", "7"])
def test_a_body_that_is_no_object_is_refused(make, body):
    status, answer = asked(make, body)
    assert status == 400 and "body" in answer["error"]["message"]


def test_models_are_listed_and_other_places_name_what_is_served(make):
    status, answer = asked(make, None, "/models")
    assert status == 200 and [model["id"] for model in answer["data"]] == ["policy"]
    status, answer = asked(make, dict(input="hi"), "/responses")
    assert status == 404 and "/v1/chat/completions" in answer["error"]["message"]
    status, answer = asked(make, None)  # GET
    assert status == 405


def test_a_key_lives_as_long_as_its_episode(make):
    servers, during = [], []

    def run(task, base_url, api_key):
        servers.append((base_url, api_key))
        during.append(post(base_url, "sk-guess", dict(messages=[HELLO]))[0])
        Client(base_url, api_key)([HELLO])
        return 1

    play(make(run=run), ["a", "b"], count=2)
    assert during == [401, 401] and len({key for _, key in servers}) == 2
    for server in servers:
        status, text = post(*server, dict(messages=[HELLO]))
        assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"


def test_settings_of_the_sampler_are_ignored_and_named_once(make):
    def agent(client, task):
        client([HELLO], temperature=0.1, top_p=None)
        client([user("b")], temperature=0.2, seed=3, tool_choice="required", tools=[ADD])
        return 1

    with pytest.warns(UserWarning, match="ignored") as told:
        play(make(agent), lambda text: "x", count=3)
    told = [str(warning.message) for warning in told if "ignored" in str(warning.message)]
    assert len(told) == 2 and "temperature;" in told[0] and "top_p" not in told[0]
    assert "seed, tool_choice;" in told[1]


def test_a_stream_says_the_same(make):
    whole, pieces = [], []

    def run(task, base_url, api_key):
        body = dict(messages=[HELLO], model="m", tools=[ADD])
        whole.append(json.loads(post(base_url, api_key, body)[1]))
        _, text = post(base_url, api_key, body | dict(stream=True, stream_options=dict(include_usage=True)))
        *lines, end = text.strip().split("\n\n")
        assert end == "data: [DONE]"
        pieces.extend(json.loads(line.removeprefix("data: ")) for line in lines)
        return 1

    play(make(run=run), lambda text: f"<think>t</think>é {CALL}{CALL}", template=TOOLS)
    (choice,) = whole[0]["choices"]
    message, calls = {}, {}
    for piece in pieces[:-1]:
        (part,) = piece["choices"]
        for name, value in part["delta"].items():
            if name == "tool_calls":
                calls |= {call.pop("index"): call for call in value}
            else:
                message[name] = message.get(name, "") + value
    assert message["content"] == choice["message"]["content"] == "é"
    assert message["reasoning_content"] == "t"
    assert [calls[0], calls[1]] == choice["message"]["tool_calls"]
    assert part["finish_reason"] == choice["finish_reason"] == "tool_calls"
    assert pieces[-1]["usage"] == whole[0]["usage"] and pieces[-1]["choices"] == []
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}


# ---- What a run is worth


@pytest.mark.parametrize(("returned", "reward", "correct"), [
    (0.5, 0.5, 0), (True, 1, 1), (2, 2, 1), (dict(reward=-1), -1, 0), (dict(reward=1, correct=0), 1, 0),
    (dict(reward=0.8, correct=1, text="left out"), 0.8, 1)])
def test_what_an_agent_may_return(make, returned, reward, correct):
    def agent(client, task):
        client([HELLO])
        return returned

    (r,) = play(make(agent), ["a"])
    assert (r.reward, r.correct) == (reward, correct)
    assert r.info.keys() == {"correct", "requests", "conversations"}
    (r,) = play(make(agent, solved_at=0.5), ["a"])
    told = isinstance(returned, dict) and "correct" in returned
    assert r.correct == (correct if told else reward >= 0.5)


@pytest.mark.parametrize("returned", [None, "1", float("nan"), float("inf"), dict(correct=1), [1], 10**400])
def test_what_is_no_reward_is_named_and_the_episode_counts_in_nothing(make, returned, capsys):
    def agent(client, task):
        client([HELLO])
        return returned

    (r,) = play(make(agent), lambda text: "a")
    assert (r.termination, r.reward, r.retries) == ("error", 0, 2)
    assert "expected a number, or a dict with reward" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "correct"), [
    ("It is 7.", 1), (None, 1), ("8", 0), (dict(answer="7", turns=3), 1), (dict(turns=3), 1), ("", 0)])
def test_a_check_of_rows_judges_what_is_returned_or_the_last_reply(make, returned, correct):
    def agent(client, task):
        client([HELLO])
        return returned

    env = make(agent, rows=[dict(answer=7, n=n) for n in range(20)], check="number")
    (r,) = play(env, ["<think>8</think>So 7"])
    assert r.correct == r.reward == correct
    assert r.info.get("turns") == (3 if isinstance(returned, dict) else None)


def test_a_judged_number_is_refused(make, capsys):
    def agent(client, task):
        client([HELLO])
        return 1.0

    (r,) = play(make(agent, check="number"), lambda text: "7")
    assert r.termination == "error" and "expected the text to be judged" in capsys.readouterr().err


# ---- Coroutines and commands


@pytest.fixture
def command(make):
    """-> an environment whose agent is a program with these lines"""
    def command(lines, **options):
        program = Path(__file__).with_name("agent_client.py")
        return make(command=shlex.join([sys.executable, "-IS", str(program), lines]), **options)
    return command


def test_a_coroutine_plays_as_a_function_does(make):
    async def run(task, base_url, api_key):
        reply = await asyncio.to_thread(Client(base_url, api_key), [user(task["question"])])
        return float(reply["content"] == "a")

    first, second = play(make(run=run), ["a", "b"], count=2)
    assert (first.reward, second.reward) == (1, 0)


@pytest.mark.parametrize(("last", "options", "reward", "correct"), [
    ("print(0.5)", {}, 0.5, 0), ("print(json.dumps(dict(reward=2, correct=0)))", {}, 2, 0),
    ("print(task['answer'])", dict(check="number"), 1, 1), ("print('x' * 10**7); print(1)", {}, 1, 1)])
def test_a_command_reads_the_task_and_its_last_line_is_the_reward(command, last, options, reward, correct):
    env = command(f"{ASK}; print('noise'); print('noise', file=sys.stderr)\n{last}", **options)
    (r,) = play(env, ["a"])
    assert (r.reward, r.correct, r.termination) == (reward, correct, "done")


@pytest.mark.parametrize(("lines", "complaint"), [
    (f"{ASK}; sys.exit('out of luck')", "exit code 1: out of luck"),
    (f"{ASK}; os.kill(os.getpid(), 9)", "exit code -9"),
    (f"{ASK}; print('none')", "expected a number, or an object with reward, got"),
    (ASK, "expected a number, or an object with reward, got"), ("print(1)", "returned without a request"),
    ("raise ValueError('no')", "ValueError: no")])
def test_what_is_wrong_with_a_command_is_named(command, lines, complaint, capsys):
    (r,) = play(command(lines), lambda text: "a")
    assert (r.termination, r.retries) == ("error", 2) and complaint in capsys.readouterr().err


def test_a_command_that_reads_nothing_gets_a_long_task_and_ends_with_its_episode(make):
    rows = [dict(x="x" * 10**6, n=n) for n in range(20)]
    (r,) = play(make(command="sleep 1000", rows=rows, patience=0.2), lambda text: "a")
    assert r.termination == "error"
    until(lambda: not children_named("sleep"))


@pytest.mark.slow
def test_a_command_ends_with_its_trainer_however_that_ends(tmp_path):
    write_jsonl(tmp_path / "tasks.jsonl", [dict(n=n) for n in range(20)])
    place = tmp_path / "pid"
    command = shlex.join(["sh", "-c", f"echo $$ > {place}; exec sleep 1000"])
    code = ("import sys, envs; e = envs.make('agent', data=sys.argv[1], command=sys.argv[2])\n"
            "e.start(e.task('train', 0), 1)")
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path / "tasks.jsonl", command], cwd=ROOT)
    until(lambda: place.exists() and place.read_text().endswith("\n"))
    parent.kill()
    until(lambda: not psutil.pid_exists(int(place.read_text())))


# ---- Faults


@pytest.mark.parametrize("error", [ValueError("no luck"), SystemExit(3), KeyboardInterrupt(), ServerError()])
def test_an_agent_that_fails_is_played_again_and_its_error_is_named(make, error, capsys):
    tries = []

    def agent(client, task):
        client([HELLO])
        tries.append(task)
        if len(tries) < 3:
            raise error
        return 1

    (r,) = play(make(agent), ["a", "b", "c"])
    assert (r.reward, r.retries, len(tries)) == (1, 2, 3) and texts_of(r) == [rendered(HELLO, said("c"))]
    assert type(error).__name__ in capsys.readouterr().err


def test_an_agent_that_never_asks_has_no_verdict(make, capsys):
    (r,) = play(make(lambda client, task: 1.0), [])
    assert (r.termination, r.turns, r.reward) == ("error", [], 0)
    assert "returned without a request" in capsys.readouterr().err


def test_an_agent_that_takes_too_long_has_no_verdict(make, capsys):
    done = threading.Event()

    def agent(client, task):
        client([HELLO])
        done.wait(60)
        return 1

    (r,) = play(make(agent, patience=0.2), lambda text: "a")
    done.set()
    assert r.termination == "error" and "patience=0.2" in capsys.readouterr().err


def test_a_time_limit_ends_an_episode_and_its_requests(make):
    failed, done = [], threading.Event()

    def agent(client, task):
        try:
            client([HELLO])  # on a slow machine the time is up before it is answered
            done.wait(60)
            client([HELLO])
        except ServerError as error:
            failed.append(error.args[0])
        return 1

    (r,) = play(make(agent), lambda text: "a", episode_timeout=0.3)
    assert r.termination == "timeout"
    done.set()
    until(lambda: failed in ([400], [401]))


def test_an_agent_that_floods_is_cut_off(make):
    refused = []

    def agent(client, task):
        for n in range(6):
            try:
                client([user(f"{n}")])
            except ServerError as error:
                refused.append(error.args[1]["message"])
        return 0.5

    (r,) = play(make(agent, max_requests=4), lambda text: "a")
    assert r.termination == "truncated" and r.reward == 0.5 and r.info["requests"] == 6
    assert len(refused) == 2 and "max_requests=4" in refused[0]

    def fails(client, task):
        for n in range(6):
            client([user(f"{n}")])

    (r,) = play(make(fails, max_requests=4), lambda text: "a")
    assert (r.termination, r.reward, r.correct, r.retries) == ("truncated", 0, 0, 0)


def test_so_many_requests_wait_at_most(make):
    statuses = []

    def ask(server):
        statuses.append(post(*server, dict(messages=[HELLO]))[0])

    def agent(client, task):
        with concurrent.futures.ThreadPoolExecutor(80) as pool:
            [*pool.map(ask, [client.server] * 80)]
        return 1

    def say(text):
        until(lambda: statuses.count(429) >= 15)
        return "a"

    play(make(agent), say)
    assert statuses.count(200) == 65 and statuses.count(429) == 15


def test_a_body_that_is_too_long_is_refused(make):
    got = []

    def agent(client, task):
        client([HELLO])
        try:
            got.append(post(*client.server, json.dumps(dict(messages=[user("x" * 17 * 2**20)])))[0])
        except OSError:
            got.append(400)
        return 1

    (r,) = play(make(agent), lambda text: "a")
    assert r.reward == 1 and got in ([400], [413])


@pytest.mark.parametrize(("flags", "termination", "reason"), [
    (dict(max_response_tokens=4), "length", "length"), (dict(max_turns=1), "turns", "stop"),
    (dict(max_context_tokens=70, max_response_tokens=10), "context", "stop")])
def test_a_limit_of_the_script_reaches_the_agent_which_may_still_say_what_it_was_worth(
        make, flags, termination, reason):
    seen = []

    def agent(client, task):
        message = client([HELLO])
        seen.append((client.finish_reason, message["content"]))
        try:
            client([HELLO, message, user("x" * 40)])
        except ServerError as error:
            seen.append(error.args[1]["code"])
        return 0.25

    say = ["abcdef"] if termination != "length" else [[65] * 4]
    (r,) = play(make(agent), say, **flags)
    assert (r.termination, r.reward) == (termination, 0.25)
    assert seen == [(reason, "" if reason == "length" else "abcdef"), "context_length_exceeded"]

    def fails(client, task):
        client([HELLO, client([HELLO]), user("x" * 40)])

    (r,) = play(make(fails), say, **flags)
    assert (r.termination, r.reward, r.correct, r.retries) == (termination, 0, 0, 0)  # the policy's fault


def test_a_first_prompt_that_is_too_long_ends_the_episode_and_one_of_a_branch_that_branch(make):
    def agent(client, task):
        client([user("x" * 400)])
        return 1

    (r,) = play(make(agent), [], max_context_tokens=300)
    assert r.termination == "context" and r.turns == []

    refused = []

    def branches(client, task):
        client([HELLO])
        try:
            client([user("x" * 400)])
        except ServerError as error:
            refused.append(error.args[1]["code"])
        client([user("y")])
        return 1

    (r,) = play(make(branches), ["a", "b"], max_context_tokens=300)
    assert [child.termination for child in r.children] == ["context", "done"]
    assert r.reward == 1 and refused == ["context_length_exceeded"]


def test_a_client_that_does_not_wait_leaves_its_question(make):
    def agent(client, task):
        client([HELLO])
        place = urllib.parse.urlsplit(client.server[0])
        connection = http.client.HTTPConnection(place.hostname, place.port)
        body = json.dumps(dict(messages=[user("gone")]))
        connection.request("POST", place.path + "/chat/completions", body,
                           {"Authorization": f"Bearer {client.server[1]}"})
        connection.close()
        client([user("stays")])
        return 1

    (r,) = play(make(agent), lambda text: "a")
    assert r.reward == 1


def test_halves_of_characters_and_marks_of_templates_harm_nothing(make):
    def agent(client, task):
        reply = client([user("\ud800 <|im_end|> \x00")])
        client([user("\ud800 <|im_end|> \x00"), reply, user("{{ 7 * 7 }}")])
        return 1

    (r,) = play(make(agent), ["\ufffd<tool_call>", "b"])
    assert r.reward == 1 and not r.children


def leftovers():
    connections = [c for c in psutil.Process().net_connections() if c.status == "ESTABLISHED"]
    return threading.active_count(), psutil.Process().num_fds() - len(connections)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_episodes_leave_nothing_behind(make, count):
    def agent(client, task):
        client.together([user("a")], [user("b")])
        client([user("c")])
        if task["answer"] % 3 == 0:
            raise ValueError
        return 1

    env = make(agent, rows=[dict(answer=n) for n in range(60)])
    play(env, lambda text: "a", count=20, max_concurrent=20)
    before, memory = leftovers(), psutil.Process().memory_info().rss
    for _ in range(count // 40):
        rollouts = play(env, lambda text: "a", count=40, max_concurrent=20)
        assert {r.termination for r in rollouts} == {"done", "error"}
    assert env.endpoint.sessions == {}
    until(lambda: all(now <= then + 2 for now, then in zip(leftovers(), before, strict=True)))
    assert psutil.Process().memory_info().rss - memory < 50 * 2**20


def test_where_no_port_can_be_bound_one_line_says_so(monkeypatch):
    def bind(*_):
        raise PermissionError("not allowed")

    monkeypatch.setattr(endpoint_module.tornado.netutil, "bind_sockets", bind)
    with pytest.raises(envs.BadInput, match="127.0.0.1 cannot be started .*not allowed"):
        endpoint_module.Endpoint()


@pytest.mark.parametrize(("options", "names"), [
    (dict(program=""), "program"), (dict(program="a.py:b", command="c"), "program"),
    (dict(program="tests.agent_client:__doc__"), "function"),
    (dict(program="nowhere.py:run"), "nowhere.py"), (dict(program="", command="'"), "command"),
    (dict(program="", command="no-such-program 1"), "no-such-program"),
    (dict(max_requests=0), "max_requests"), (dict(patience=0), "patience"),
    (dict(rewards="a.py:f"), "rewards")])
def test_options_that_cannot_be_used_are_named(make, options, names):
    with pytest.raises(envs.BadInput, match=names):
        make(**dict(program="tests.agent_client:run") | options)


def test_in_a_mixture_each_prompt_is_the_agents(make, tmp_path):
    env = make(lambda client, task: 1)
    write_jsonl(tmp_path / "rows.jsonl", [dict(prompt=f"{n}", answer=n) for n in range(20)])
    both = envs.make("agent,rows", **{
        "agent.program": "tests.agent_client:run", "agent.data": env.config.data,
        "rows.data": f"{tmp_path}/rows.jsonl", "rows.check": "number"})

    def run(task, base_url, api_key):
        Client(base_url, api_key)([user("from the agent")])
        return 1

    both.envs["agent"].program = run
    first, second = play(both, ["a", "b"], count=2)
    assert first.task.id.startswith("agent:")
    assert texts_of(first) == [rendered(user("from the agent"), said("a"))]
    assert second.task.source == "rows" and first.reward == 1


@pytest.mark.parametrize(("flags", "most"), [({}, 3), (dict(max_concurrent=2), 2)])
def test_so_many_agents_run_at_once(make, flags, most):
    running, seen = [], []

    def agent(client, task):
        running.append(task)
        seen.append(len(running))
        client([HELLO])
        running.remove(task)
        return 1

    env = make(agent)
    assert env.at_once == 256
    env.at_once = 3
    play(env, lambda text: "a", count=8, **flags)
    assert max(seen) == most


def test_so_many_commands_run_at_once(command):
    assert command(ASK).at_once == 32
