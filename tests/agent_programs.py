"""Agents of libraries: each lets the model look a price up by a tool, and its last reply is judged.

    python tests/agent_programs.py openai < task.json    # with OPENAI_BASE_URL and OPENAI_API_KEY

A task is {"question", "item", "price", "answer"}. tests/test_agent_clients.py plays them.
"""

import asyncio
import contextlib
import json
import os
import runpy
import sys
from pathlib import Path

TOOL = {"type": "function", "function": {
    "name": "price", "description": "What an item costs.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}
SYSTEM = "Look the price up."


def price(task, item):
    return str(task["price"]) if item == task["item"] else f"there is no {item}"


def answers_of(task, said):
    """The tool's answers to the calls of a message, as the API takes them."""
    return [{"role": "tool", "tool_call_id": call.id,
             "content": price(task, json.loads(call.function.arguments)["item"])} for call in said.tool_calls]


def openai(task):
    from openai import OpenAI

    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        assert reply.usage.total_tokens and client.models.list().data[0].id == "policy"
        messages.append(said)
        if not said.tool_calls:
            return said.content
        messages += answers_of(task, said)


def openai_async(task):
    from openai import AsyncOpenAI

    async def run():
        messages = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
                    {"role": "user", "content": [{"type": "text", "text": task["question"]}]}]
        async with AsyncOpenAI() as client:
            while True:
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL], temperature=0.2, max_tokens=1000)
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return said.content
                messages += answers_of(task, said)

    return asyncio.run(run())


def openai_stream(task):
    """Pieces put together by hand, as programs do that show them while they come."""
    from openai import OpenAI

    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    while True:
        content, calls = "", {}
        chunks = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], stream=True,
                                                stream_options={"include_usage": True})
        for chunk in chunks:
            if not chunk.choices:
                assert chunk.usage.total_tokens
                continue
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for piece in delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": "", "type": "function",
                                                      "function": {"name": "", "arguments": ""}})
                call["id"] += piece.id or ""
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
        if not calls:
            return content
        messages.append({"role": "assistant", "content": content or None, "tool_calls": [*calls.values()]})
        for call in calls.values():
            messages.append({"role": "tool", "tool_call_id": call["id"],
                             "content": price(task, json.loads(call["function"]["arguments"])["item"])})


def openai_helper(task):
    """The client's own helper for streams."""
    from openai import OpenAI

    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
            for _ in stream:
                pass
            said = stream.get_final_completion().choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        messages += answers_of(task, said)


def openai_agents(task, stream=False):
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)

    @function_tool(name_override="price")
    def look_up(item: str) -> str:
        """What an item costs."""
        return price(task, item)

    agent = Agent("shop", instructions=SYSTEM, tools=[look_up], model="policy")
    if not stream:
        return Runner.run_sync(agent, task["question"]).final_output

    async def run():
        result = Runner.run_streamed(agent, task["question"])
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def openai_agents_stream(task):
    return openai_agents(task, stream=True)


def pydantic_ai(task, stream=False):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("policy"), instructions=SYSTEM)

    @agent.tool_plain(name="price")
    def look_up(item: str) -> str:
        """What an item costs."""
        return price(task, item)

    if not stream:
        return agent.run_sync(task["question"]).output

    async def run():
        async with agent.run_stream(task["question"]) as result:
            return await result.get_output()

    return asyncio.run(run())


def pydantic_ai_stream(task):
    return pydantic_ai(task, stream=True)


def langgraph(task):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool("price")
    def look_up(item: str) -> str:
        """What an item costs."""
        return price(task, item)

    agent = create_react_agent(ChatOpenAI(model="policy"), [look_up], prompt=SYSTEM)
    return agent.invoke({"messages": [("user", task["question"])]})["messages"][-1].content


def litellm(task):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is asked of GitHub
    from litellm import completion

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    while True:
        reply = completion("openai/policy", messages, tools=[TOOL], api_base=os.environ["OPENAI_BASE_URL"])
        said = reply.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        messages += answers_of(task, said)


def smolagents(task):
    from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

    class Price(Tool):
        name, description, output_type = "price", "What an item costs.", "string"
        inputs = {"item": {"type": "string", "description": "the item"}}

        def forward(self, item: str) -> str:
            return price(task, item)

    # With another name it would send `stop`, which is not served.
    model = OpenAIServerModel("gpt-5", api_base=os.environ["OPENAI_BASE_URL"],
                              api_key=os.environ["OPENAI_API_KEY"])
    return str(ToolCallingAgent([Price()], model, max_steps=4).run(task["question"]))


async def many(task, base_url, api_key):
    """For --env agent's program: hundreds of these are played at once."""
    from openai import AsyncOpenAI

    messages = [{"role": "user", "content": task["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            said = reply.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                return float(said.content.split()[-1:] == [str(task["answer"])])
            messages += answers_of(task, said)


def errors(task):
    """What is not served raises what it raises at OpenAI's."""
    import openai as library

    client = library.OpenAI(max_retries=0)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    hello = [{"role": "user", "content": "hello"}]

    def ask(client, **change):
        return client.chat.completions.create(model="policy", **{"messages": hello} | change)

    found = []
    for asked, change in ((client, {"n": 2}), (client, {"stop": ["\n"]}),
                          (client, {"messages": [{"role": "user", "content": [picture]}]}),
                          (library.OpenAI(api_key="sk-1", max_retries=0), {})):
        try:
            ask(asked, **change)
        except library.APIStatusError as error:
            found.append(f"{type(error).__name__} {error.body['message']}")
    try:
        client.responses.create(model="policy", input="hello")
    except library.NotFoundError as error:
        found.append(f"{type(error).__name__} {error.body['message']}")
    ask(client)
    raise SystemExit(" | ".join(found))  # so that it is told


def too_long(task):
    """After a reply that had no end nothing is answered."""
    import openai as library

    client = library.OpenAI(max_retries=0)
    hello = [{"role": "user", "content": "hello"}]
    choice = client.chat.completions.create(model="policy", messages=hello).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    try:
        client.chat.completions.create(model="policy", messages=hello)
    except library.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return str(task["answer"])


def example(name):
    """An agent of docs/agent."""
    def run(task):
        path = Path(__file__).parent.parent / "docs/agent" / f"{name}.py"
        played = runpy.run_path(str(path))["run"](
            task, base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
        return asyncio.run(played) if asyncio.iscoroutine(played) else played

    return run


CLIENTS = {function.__name__: function for function in (
    openai, openai_async, openai_stream, openai_helper, openai_agents, openai_agents_stream, pydantic_ai,
    pydantic_ai_stream, langgraph, litellm, smolagents, errors, too_long)}
CLIENTS |= {name: example(name) for name in ("shop_openai", "shop_pydantic_ai")}

if __name__ == "__main__":
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print what they like
        last = CLIENTS[sys.argv[1]](given)
    if not isinstance(last, float):
        last = float((last or "").split()[-1:] == [str(given["answer"])])
    print(last)
