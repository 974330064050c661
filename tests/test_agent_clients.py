"""--env agent with the clients and libraries that people have: tests/agent_programs.py, in AGENTS_PYTHON."""

import os
import re
from pathlib import Path

import pytest

import grpo_llm
from tests.run_folders import ROOT, episodes, package, train
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
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:environment agent")]


def command(client):
    if not Path(PYTHON).exists() and "CI" not in os.environ:
        pytest.skip("AGENTS_PYTHON: not installed")
    return f"{PYTHON} {ROOT}/tests/agent_programs.py {client}"


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


def test_a_library_that_writes_its_calls_anew_has_a_conversation_for_each_step(make):  # noqa: F811
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "19"}}\n</tool_call>'
    env = make(command=command("smolagents"), rows=ROWS)
    (r,) = play(env, [CALLS[0], final, "no more"], template=TOOLS, max_context_tokens=100_000)
    (child,) = r.children
    assert r.reward == child.reward == 1.0 and r.info["conversations"] == 2
    assert "12" in child.task.messages[-1]["content"]


def test_what_is_not_served_raises_what_it_does_at_openais(make, capsys):  # noqa: F811
    (r,) = play(make(command=command("errors"), rows=ROWS), ["hello"] * 3)
    assert r.termination == "error"
    complaint = capsys.readouterr().err
    for name, says in (("BadRequestError", "n: 2"), ("BadRequestError", "stop:"),
                       ("BadRequestError", "only text is served"), ("AuthenticationError", "no episode has"),
                       ("NotFoundError", "/v1/resp")):
        assert re.search(rf"{name} [^|]*{re.escape(says)}", complaint), (name, says, complaint)


def test_a_reply_without_an_end_is_none(make):  # noqa: F811
    (r,) = play(make(command=command("too_long"), rows=ROWS), [[65] * 200])
    assert (r.termination, r.reward, r.info["requests"]) == ("length", 1.0, 2.0)


def test_hundreds_of_coroutines_are_played_at_once(make):  # noqa: F811
    package("openai")

    def say(text):
        return LAST if "there is no plum" in text else LOOK

    env = make(program="tests.agent_programs:many", rows=ROWS)
    rollouts = play(env, say, count=16, samples=16, template=TOOLS)
    assert [r.reward for r in rollouts] == [1.0] * 256
    assert {r.info["conversations"] for r in rollouts} == {1.0}


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
