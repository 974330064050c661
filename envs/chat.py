"""What chat models add to messages: function calls and thoughts, and the tokens of a text within another.

The scripts own prompts and tokens. Here is what is known of other people's formats: what a template wants to
get, and what a reply in its form holds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal

from envs import THOUGHTS, BadInput, final_part

MAX_CALLS = 16  # that are read of a reply: bounds the time of a step
TEMPLATE_SECONDS = 10.0  # of computing, that a chat template has for two short messages


def decoded(value):
    """A list or an object, or the one that a JSON text holds. Raises ValueError."""
    return json.loads(value) if isinstance(value, str) else value


def for_template(messages: list[dict]) -> list[dict]:
    """Messages as templates want them.

    Arguments of calls are objects: OpenAI's wire form has them as JSON text, which templates quote once more,
    or refuse. Calls and the tools' messages that answer them have ids of nine characters, as Mistral's want.
    """
    result = []
    waiting = []  # ids of calls that no message has answered
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [_with_object(call) for call in decoded(message["tool_calls"])]
            waiting = [call.setdefault("id", f"call{n:05d}") for n, call in enumerate(calls, len(result))]
            message["tool_calls"] = calls
        if message.get("role") == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
        result.append(message)
    return result


def _with_object(call: dict) -> dict:
    if not isinstance(call.get("function"), dict):  # some rows have its fields in the call itself
        return call | {"arguments": decoded(call.get("arguments", {}))}
    function = dict(call["function"])
    function["arguments"] = decoded(function.get("arguments", {}))
    return call | {"function": function}


def check_template(tokenizer, name: str) -> None:
    """A chat template is a program: refuse one that does not end, or that leaves out what the user says.

    name: the flag's value, for the BadInput. The template runs in a process, which the system can end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
            for content in ("one", "two"):
                texts.append(tokenizer.apply_chat_template([dict(role="user", content=content)],
                                                           tokenize=False, add_generation_prompt=True))
        finally:  # also after an error: it may want other messages, and the script renders its own
            os.write(writing, b"same" if len(texts) == 2 and texts[0] == texts[1] else b"ended")
            os.kill(os.getpid(), signal.SIGKILL)  # without what the script does at its end
    os.close(writing)
    with open(reading, "rb") as pipe:
        says = pipe.read()  # nothing, where the timer ended it
    with contextlib.suppress(ChildProcessError):  # where a parent has told the system not to keep children
        os.waitpid(child, 0)
    if not says:
        raise BadInput(f"--chat-template {name}: it took more than {TEMPLATE_SECONDS:g} s for a message of "
                       "one word; expected a template that ends")
    if says == b"same":
        raise BadInput(f"--chat-template {name}: it writes the same for two different messages; expected "
                       "what the messages say")


def opened_thought(prompt: str) -> str:
    """The end of a prompt that leaves a thought open, such as "<think>\\n"; empty where none is."""
    for opening in THOUGHTS:
        start = prompt.rfind(opening)
        if start >= 0 and not prompt[start + len(opening):].strip():
            return prompt[start:]
    return ""


def parse_reply(sampled: str, prompt: str, tokenizer, tools: list[dict]) -> tuple[dict, list[dict]]:
    """What was sampled after a prompt with tools -> its message in parts, as a template wants it; its calls.

    By the tokenizer's `response_template` where it has one; else calls in the common form, JSON within
    <tool_call> </tool_call>, or an answer that is nothing but the JSON of one (Llama 3). Calls are
    {"name": str, "arguments": dict}. Total: where nothing can be read, the message is the text.
    """
    reply = opened_thought(prompt) + sampled
    message = {"role": "assistant", "content": ""}
    functions = []
    if getattr(tokenizer, "response_template", None):
        try:
            message |= tokenizer.parse_response(sampled, prefix=prompt, tools=tools)
            functions = [call["function"] for call in message.get("tool_calls", ())]
        except Exception:  # what a model writes may fit no form
            functions = []
    else:
        answer = final_part(reply)  # no call is made in a thought
        text, *pieces = answer.split("<tool_call>")
        for piece in pieces:
            call, _, after = piece.partition("</tool_call>")
            functions.append(_json(call))
            text += after
        bare = answer.strip().removeprefix("<|python_tag|>")
        if bare.startswith("{"):
            functions = [_json(bare)]
            text = ""
        message["content"] = reply.removesuffix(answer) + text.strip()
    calls = []
    for function in functions[:MAX_CALLS]:
        if isinstance(function, dict):
            arguments = function.get("arguments", function.get("parameters"))
            if isinstance(function.get("name"), str) and isinstance(arguments, dict):
                calls.append({"name": function["name"], "arguments": arguments})
    if not calls:
        return {"role": "assistant", "content": reply}, []
    message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message, calls


def in_parts(messages: list[dict], tokenizer, tools: list[dict] | None) -> list[dict]:
    """Messages in which a reply has its calls in a field, and its thoughts in another or no more."""
    result = []
    for message in messages:
        if message.get("role") == "assistant":
            message, _ = parse_reply(message["content"], "", tokenizer, tools)
        result.append(message)
    return result


def _json(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def encode_within(text: str, tokenizer) -> list[int]:
    """The ids of a text that follows another.

    Encoded by itself, it would get a space in front from some tokenizers. So it is encoded behind a piece
    of text that is cut off again.
    """
    before, length = _piece_before(tokenizer)
    return tokenizer(before + text, add_special_tokens=False).input_ids[length:]


@functools.lru_cache(8)
def _piece_before(tokenizer) -> tuple[str, int]:
    """-> a piece of text behind which a tokenizer adds no space, and the number of its tokens"""
    def ids_of(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    # Llama 2's kind puts a space behind a special token too, but none behind a line break.
    for piece in (tokenizer.eos_token, "\n"):
        before, both = ids_of(piece), ids_of(piece + "a")
        if both[:len(before)] == before and tokenizer.decode(both) == tokenizer.decode(before) + "a":
            return piece, len(before)
    return tokenizer.eos_token, 1  # of words alone: their spaces are not tokens
