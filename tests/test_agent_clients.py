"""--env agent with the clients and libraries that people have: tests/agent_programs.py, in AGENTS_PYTHON."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_llm
import sft
from docs.agent import shop_env
from envs.calls import COMMON
from envs.chat import read_reply
from tests.run_folders import ROOT, episodes, package, timeless, train
from tests.test_agent import TOOLS, make, play, rendered, said, texts_of, user  # noqa: F401
from tests.test_ways_in import make_model
from tools.validate_train_log import validate

PYTHON = os.environ.get("AGENTS_PYTHON", f"{ROOT}/.venv-agents/bin/python")
ROW = dict(question="What do a pear (12) and 7 more make?", item="pear", price=12, answer=19)
ROWS = [ROW | dict(question=f"{ROW['question']} ({n})") for n in range(20)]
CALLS = [f'<tool_call>\n{{"name": "price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'
         for item in ("pear", "plum")]
LOOK, LAST = f"<think>\nHow much? \n</think>\n\nLet me  see.\n{CALLS[0]}\n{CALLS[1]}", "Zusammen:\n\n  € 19 "
# Libraries for which a text is a last reply, whatever follows in the stream.
CALLS_ALONE = ("pydantic_ai_stream",)
ONE_CONVERSATION = ("openai", "openai_async", "openai_stream", "openai_helper", "openai_agents",
                    "openai_agents_stream", "pydantic_ai", "pydantic_ai_stream", "langgraph", "litellm")
PAGE = (ROOT / "docs/agent.md").read_text("utf-8")
pytestmark = pytest.mark.filterwarnings(
    "ignore:environment (agent|rows)", "ignore:--chat-template model")


def command(client):
    if not Path(PYTHON).exists() and "CI" not in os.environ:
        pytest.skip("AGENTS_PYTHON: not installed")
    return f"{PYTHON} {ROOT}/tests/agent_programs.py {client}"


@pytest.mark.slow
@pytest.mark.parametrize("client", ONE_CONVERSATION)
def test_a_conversation_with_a_tool_is_one_segment(make, client):  # noqa: F811
    look = "\n".join(CALLS) if client in CALLS_ALONE else LOOK
    (r,) = play(make(command=command(client), rows=ROWS), [look, LAST], template=TOOLS)
    assert (r.termination, r.retries, r.reward, r.correct) == ("done", 0, 1.0, 1.0)
    assert r.children == [] and r.info["conversations"] == 1 and r.info["requests"] == 2
    (text,) = texts_of(r)
    names = [message["role"] for message in r.messages if message["role"] != "system"]
    assert names == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["content"] for message in r.messages if message["role"] == "tool"] == [
        "12", "there is no plum"]
    assert text == rendered(*r.messages, template=TOOLS, tools=r.task.tools)
    assert f"{look}<|im_end|>" in text and text.endswith(f"{LAST}<|im_end|>")


@pytest.mark.slow
def test_a_library_that_writes_its_calls_anew_has_a_conversation_for_each_step(make):  # noqa: F811
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "19"}}\n</tool_call>'
    env = make(command=command("smolagents"), rows=ROWS)
    (r,) = play(env, [CALLS[0], final, "no more"], template=TOOLS, max_context_tokens=100_000)
    (child,) = r.children
    assert r.reward == child.reward == 1.0 and r.info["conversations"] == 2
    assert "12" in child.task.messages[-1]["content"]


@pytest.mark.slow
def test_what_is_not_served_raises_what_it_does_at_openais(make, capsys):  # noqa: F811
    (r,) = play(make(command=command("errors"), rows=ROWS), ["hello"] * 3)
    assert r.termination == "error"
    complaint = capsys.readouterr().err
    for name, says in (("BadRequestError", "n: 2"), ("BadRequestError", "stop:"),
                       ("BadRequestError", "only text is served"), ("AuthenticationError", "no episode has"),
                       ("NotFoundError", "/v1/resp")):
        assert re.search(rf"{name} [^|]*{re.escape(says)}", complaint), (name, says, complaint)


@pytest.mark.slow
def test_a_reply_without_an_end_is_none(make):  # noqa: F811
    (r,) = play(make(command=command("too_long"), rows=ROWS), [[65] * 200])
    assert (r.termination, r.reward, r.info["requests"]) == ("length", 1.0, 2.0)


@pytest.mark.slow
def test_hundreds_of_coroutines_are_played_at_once(make):  # noqa: F811
    package("openai")

    def say(text):
        return LAST if "there is no plum" in text else LOOK

    env = make(program="tests.agent_programs:many", rows=ROWS)
    rollouts = play(env, say, count=16, samples=16, template=TOOLS)
    assert [r.reward for r in rollouts] == [1.0] * 256
    assert {r.info["conversations"] for r in rollouts} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai", "openai_agents"])
def test_a_run_trains_it(client, tmp_path, make):  # noqa: F811
    make(command="true", rows=ROWS)
    make_model(tmp_path / "tiny")
    folder = train(grpo_llm, tmp_path / "run", model=str(tmp_path / "tiny"), iterations=1, eval_tasks=1,
                   eval_samples=1, prompts_per_iteration=2, group_size=2, log_episodes=1.0, env="agent",
                   env_kwargs=(f"command={command(client)}", f"data={tmp_path}/tasks.jsonl"))
    assert validate(folder, strict=True)["ok"]
    rows, summary = episodes(folder, "train_step_000001")
    assert summary["episodes"] == 4
    assert {row["termination"] for row in rows} <= {"done", "length"}


SHOP_CALL = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'
SHOP = {  # replies of the policy, and what they are worth
    "right": ([SHOP_CALL, "12 + 7 = 19"], 1.0), "guessed": (["5 + 7 = 12"], 0.0),
    "lucky": (["12 + 7 = 19"], 1.0), "no end of calls": ([SHOP_CALL, SHOP_CALL], 0.0),
    "another item": ([SHOP_CALL.replace("pear", "plum"), "none"], 0.0), "nothing": ([""] * 2, 0.0),
    "no such tool": ([SHOP_CALL.replace("price", "cost"), "12 + 7 = 19"], 1.0),
    "no such argument": ([SHOP_CALL.replace("item", "fruit"), "12 + 7 = 18"], 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["shop_openai", "shop_pydantic_ai"])
@pytest.mark.parametrize("case", SHOP)
def test_the_pages_agents_are_worth_what_the_class_says(make, agent, case):  # noqa: F811
    replies, reward = SHOP[case]
    row = dict(ROW, question="pear + 7", addend=7)
    rows = [row, dict(row, question="pear + 8")]  # one of them is held out
    (r,) = play(make(command=command(agent), rows=rows, prompt="question"), replies, template=TOOLS)
    assert (r.termination, r.reward) == ("done", reward)
    # An empty reply is left out of the history by pydantic-ai, which asks once more.
    assert r.info["conversations"] == 1 or (agent, case) == ("shop_pydantic_ai", "nothing")
    visit = shop_env.Visit(row)
    for reply in replies:
        step = visit.step(reply, read_reply(reply, "", COMMON, shop_env.TOOLS)[2])
        if step.terminated:
            break
    assert step.terminated and step.reward == reward


@pytest.mark.slow
def test_the_pages_example_trains(tmp_path):
    """The same numbers as with the class, to the bit."""
    package("openai")
    command = [sys.executable, "-m", "docs.agent.shop_env", f"{tmp_path}/shop.jsonl"]
    subprocess.run(command, cwd=ROOT, check=True)
    data = (f"data={tmp_path}/shop.jsonl", "prompt=question")
    environment = "docs/agent/shop_env.py:Shop"
    model = train(sft, tmp_path / "sft", env=environment, env_kwargs=data, steps=60, max_response_tokens=10,
                  checkpoint_every=60, eval_every=0, batch_size=32) / "checkpoints/step_000060"
    flags = dict(model=str(model), max_response_tokens=10, iterations=2, log_episodes=1.0)
    logs = []
    for name, options in ((environment, data), ("agent", ("program=docs/agent/shop_openai.py:run", *data))):
        folder = train(grpo_llm, tmp_path / name.rpartition(":")[2], env=name, env_kwargs=options, **flags)
        assert validate(folder, strict=True)["ok"]
        logs.append([{re.sub("/(rows|agent)/", "/", key): value for key, value in line.items()
                      if not re.search("conversations|requests", key)} for line in timeless(folder)])
    assert logs[0] == logs[1]
    assert any("<tool_call>" in str(row) for row in episodes(folder, "train_step_000001")[0])


def test_the_pages_examples_are_the_files_and_short():
    for name in ("shop_openai", "shop_pydantic_ai"):
        text = (ROOT / f"docs/agent/{name}.py").read_text("utf-8")
        assert f"```python\n{text}```\n" in PAGE and len(text.splitlines()) <= 40, name


def test_the_page_names_the_versions_that_ci_installs():
    pins = re.findall(r'([\w-]+)(?:\[openai\])?==([\d.]+)',
                      re.search(r'agents/bin/pip" install (.+?)\n    python3', (ROOT / ".ci/run").read_text(),
                                re.DOTALL)[1])
    assert len(pins) == 7
    for name, version in pins:
        assert re.search(rf"{re.escape(name)}.*==\S*{re.escape(version)}", PAGE), name
        assert re.search(rf"^\| .*{name}.* \| .*{re.escape(version)}.* \|", PAGE, re.MULTILINE), name
