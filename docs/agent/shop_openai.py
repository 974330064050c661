"""An agent for the openai client: the model may look a price up, and says what it makes with a number."""

import json

from openai import DefaultHttpxClient, OpenAI

TOOLS = [{"type": "function", "function": {
    "name": "price", "description": "What an item costs.", "parameters": {
        "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]
HTTP = DefaultHttpxClient()  # for all episodes: to make one reads certificates, which takes 20 ms


def run(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    messages = [{"role": "user", "content": task["question"]}]  # such as "pear + 7"
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        said = reply.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            known = json.loads(call.function.arguments) == {"item": task["item"]}
            answer = str(task["price"]) if known else "none"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        if not said.tool_calls:
            break
    return float((said.content or "").endswith(f"= {task['answer']}"))
