"""What chat models add to messages: function calls and thoughts, and the tokens of a text within another.

The scripts own prompts and tokens. Here is what is known of other people's formats: what a template wants to
get, and what a reply in its form holds. A template is asked for both, by a call that it writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import re
import signal
import warnings
from multiprocessing.connection import wait

from envs import MAX_REPLY, THOUGHTS, BadInput
from envs.calls import COMMON, FORMS, MAX_CALLS, Form, call_of, read_calls

TEMPLATE_SECONDS = 10.0  # of computing, that a chat template has for two short messages
TEMPLATE_WAIT = 60.0  # of the clock, as it may wait for ever without computing
# How other trainers mark a message, and the value of one that is learned (None: it is not read here).
MARKS = {
    "weight": True,  # OpenAI, Together, Mistral
    "train": True, "training": True, "train_on_turn": True,  # axolotl, as are the next two
    "train_detail": None, "training_detail": None,
    "loss": True, "loss_scale": True,  # ms-swift
    "loss_mask": True, "step_loss_mask": True,  # verl, slime
    "trainable": True,  # tinker-cookbook
    "masked": False, "mask": None}  # torchtune, NeMo
# The call that a template is asked to write.
PROBE = {"type": "function", "function": {
    "name": "look_up", "description": "Look up a word.",
    "parameters": {"type": "object", "required": ["word", "page"], "properties": {
        "word": {"type": "string", "description": "a word"},
        "page": {"type": "integer", "description": "a number"}}}}}
PROBE_CALL = {"name": "look_up", "arguments": {"word": "bread and butter", "page": 3}}
IDS = ("call{number:05d}", "functions.{name}:{number}")  # of calls: nine characters (Mistral), Kimi's
THOUGHT_FIELDS = ("reasoning_content", "thinking")  # where templates look for a thought


# What a template wants


@dataclasses.dataclass(frozen=True)
class Style:
    """How a template wants calls, and in which forms they are read."""

    forms: tuple[Form, ...] = COMMON  # none: the one that it writes is not known
    by_library: bool = False  # read by the tokenizer's response_template, as no form is known
    written: str = ""  # what it writes of a call; empty where it leaves calls out
    arguments_as_text: bool = False  # as JSON text, where others want an object
    ids: str = IDS[0]
    blank: str | None = ""  # content of a message of calls alone
    in_fields: bool = False  # behind a reply that has its calls in the text, it does not write the same


def style_of(tokenizer) -> Style:
    template = getattr(tokenizer, "response_template", None)
    return _style_of(tokenizer, str(tokenizer.chat_template), json.dumps(template))


@functools.lru_cache(32)
def _style_of(tokenizer, *_) -> Style:
    """The first style in which a call that the template writes comes back when it is read."""
    written = ""
    for ids, blank, as_text in itertools.product(IDS, ("", None), (False, True)):
        style = Style(ids=ids, blank=blank, arguments_as_text=as_text)
        try:
            prompt, text = _written(tokenizer, style)
        except Exception:  # it may refuse one style and take another
            continue
        if PROBE_CALL["arguments"]["word"] not in text:
            continue
        written = written or text
        for form in FORMS:
            _, _, calls, end = read_reply(text, prompt, (form,), [PROBE])
            if _bare(calls) == [PROBE_CALL]:
                return dataclasses.replace(style, written=text, forms=COMMON if form in COMMON else (form,),
                                           in_fields=not _takes_text(tokenizer, style, text[:end]))
        if _bare(_by_library(text, prompt, tokenizer, [PROBE])[1]) == [PROBE_CALL]:
            return dataclasses.replace(style, written=text, by_library=True)
    return Style(written=written, forms=() if written else COMMON)


def _written(tokenizer, style: Style) -> tuple[str, str]:
    """-> the prompt and what the template writes behind it of a call, without the end of the turn"""
    said = _probe(tokenizer, style, _calling("A word."), add_generation_prompt=False)
    text = _probe(tokenizer, style, _calling(""), add_generation_prompt=False)
    text = text.removesuffix(said.rpartition("A word.")[2])
    prompt = os.path.commonprefix([_probe(tokenizer, style), text])
    if prompt.rfind("<") > prompt.rfind(">"):  # both go on with a mark, which is another
        prompt = prompt[:prompt.rfind("<")]
    return prompt, text[len(prompt):]


def _calling(content: str) -> dict:
    calls = [] if content else [{"type": "function", "function": PROBE_CALL}]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _probe(tokenizer, style: Style, *messages: dict, add_generation_prompt: bool = True) -> str:
    messages = _prepared([{"role": "user", "content": "Hello."}, *messages], style)
    return tokenizer.apply_chat_template(messages, tools=[PROBE], tokenize=False,
                                         add_generation_prompt=add_generation_prompt)


def _takes_text(tokenizer, style: Style, call: str) -> bool:
    """Whether a reply with a call in its text is followed by the same as one with the call in a field.

    Eos and spaces aside, which a template may write in one case alone.
    """
    answer = {"role": "tool", "name": PROBE_CALL["name"], "content": "Page 3 says so."}
    behind = []
    for content in ("", opened_thought(_probe(tokenizer, style)) + call):
        try:
            text = _probe(tokenizer, style, _calling(content), answer)
        except Exception:
            text = ""
        tail = text.rpartition(PROBE_CALL["arguments"]["word"])[2].replace(tokenizer.eos_token, "")
        behind.append("".join(tail.split()))
    return behind[0] == behind[1]


def check_calls(env, tokenizer, name: str) -> None:
    """Refuse a chat template whose calls cannot be read, where tasks have functions to call.

    name: the flag's value, for the BadInput.
    """
    for part in getattr(env, "envs", {"": env}).values():  # of a mixture, each
        split = "test" if part.num_tasks("test") else "train"
        if not part.task(split, 0).tools:
            continue
        style = style_of(tokenizer)
        if not (style.forms or style.by_library):
            raise BadInput(f"--chat-template {name}: it writes calls of functions in a form that is not known"
                           f", {style.written!r:.200}; expected one that docs/calls.md lists, or a tokenizer "
                           "with a response_template")
        if not style.written:
            warnings.warn(f"--chat-template {name}: it leaves out calls of functions; they are read as JSON "
                          "between <tool_call> and </tool_call>, or alone", stacklevel=2)
        return


def decoded(value):
    """A list or an object, or the one that a JSON text holds. Raises ValueError."""
    return json.loads(value) if isinstance(value, str) else value


def for_template(messages: list[dict], tokenizer) -> list[dict]:
    """Messages as the template wants them.

    Arguments of calls are objects, unless it needs text: OpenAI's wire form has them as JSON text, which most
    templates quote once more, or refuse. Calls and the tools' messages that answer them have ids.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    return _prepared(messages, style_of(tokenizer) if has_calls else Style())


def _prepared(messages: list[dict], style: Style) -> list[dict]:
    result = []
    waiting = []  # ids of calls that no message has answered
    number = 0  # of calls so far
    renamed = {}  # ids: where they hold the name, others would hide it
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [_with_arguments(call, style) for call in decoded(message["tool_calls"])]
            for call in calls:
                name = call.get("function", call).get("name")
                given = call.get("id")
                if given is None or style.ids != IDS[0] and name not in str(given):
                    call["id"] = renamed[given] = style.ids.format(name=name, number=number)
                number += 1
            waiting = [call["id"] for call in calls]
            message["tool_calls"] = calls
            message["content"] = message.get("content") or style.blank
        if message.get("role") == "tool" and waiting:
            given = message.setdefault("tool_call_id", waiting.pop(0))
            message["tool_call_id"] = renamed.get(given, given)
        result.append(message)
    return result


def _with_arguments(call: dict, style: Style) -> dict:
    if not isinstance(call.get("function"), dict):  # some rows have its fields in the call itself
        return call | {"arguments": _as_wanted(call.get("arguments", {}), style)}
    function = dict(call["function"])
    function["arguments"] = _as_wanted(function.get("arguments", {}), style)
    return call | {"function": function}


def _as_wanted(arguments, style: Style):
    arguments = decoded(arguments)
    return json.dumps(arguments, ensure_ascii=False) if style.arguments_as_text else arguments


def rendered(messages: list[dict], tokenizer, tools: list[dict] | None = None) -> str:
    """What the template writes of messages, and the start of a reply.

    Replies are texts, as they were sampled. Where it refuses them so, or would write something else behind
    their calls, calls and thoughts get fields of their own. Raises what the template raises.
    """
    def write(messages):
        return tokenizer.apply_chat_template(for_template(messages, tokenizer), tools=tools, tokenize=False,
                                             add_generation_prompt=True)

    if tools and style_of(tokenizer).in_fields:
        messages = in_parts(messages, tokenizer, tools, of_calls_alone=True)
    try:
        return write(messages)
    except Exception:  # it may want the thoughts apart
        parts = in_parts(messages, tokenizer, tools)
        if parts == messages:
            raise
        return write(parts)


def in_parts(messages: list[dict], tokenizer, tools, of_calls_alone: bool = False) -> list[dict]:
    """Messages in which replies have calls and thoughts in fields; with of_calls_alone, those with calls."""
    result = []
    for message in messages:
        is_text = isinstance(message.get("content"), str)
        if message.get("role") == "assistant" and is_text and not message.get("tool_calls"):
            parts, calls = parse_reply(message["content"], "", tokenizer, tools)
            if calls or not of_calls_alone:
                message = parts
        result.append(message)
    return result


def check_template(tokenizer, name: str) -> None:
    """A chat template is a program: refuse one that does not end, or that leaves out what the user says.

    name: the flag's value, for the BadInput. The template runs in a process, which the system can end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # what is collected here is the trainer's
        texts = []
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
            for content in ("one", "two"):
                texts.append(tokenizer.apply_chat_template([dict(role="user", content=content)],
                                                           tokenize=False, add_generation_prompt=True))
        finally:  # also after an error: it may want other messages, and the script renders its own
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(writing, b"same" if len(texts) == 2 and texts[0] == texts[1] else b"ended")
            os.kill(os.getpid(), signal.SIGKILL)  # without what the script does at its end
    os.close(writing)
    with open(reading, "rb", 0) as pipe:
        says = wait([pipe], TEMPLATE_WAIT) and pipe.read(5)  # nothing, where the timer ended it
    # Where a parent has told the system not to keep children, it may be gone.
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if not says:
            os.kill(child, signal.SIGKILL)  # it may hold a lock of a thread that is not there
        os.waitpid(child, 0)
    if not says:
        raise BadInput(f"--chat-template {name}: it took more than {TEMPLATE_SECONDS:g} s for a message of "
                       "one word; expected a template that ends")
    if says == b"same":
        raise BadInput(f"--chat-template {name}: it writes the same for two different messages; expected "
                       "what the messages say")


# What a row of data says


def texts_in(value, where: str = ""):
    """Yield (place, text) of each text in nested lists and objects, keys too; a place is a.b[0].c."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            place = f"{where}.{key}" if where else str(key)
            yield place, str(key)
            yield from texts_in(item, place)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from texts_in(item, f"{where}[{number}]")


def is_wanted(message: dict) -> bool:
    """Whether it is an assistant's, and not marked as one not to learn.

    BadInput for marks that are not read, disagree, or ask for what is never learned.
    """
    marks = {}
    for name, value in message.items():
        if value is None or name not in MARKS:
            continue
        if MARKS[name] is None or value not in (0, 1):
            expected = "none" if MARKS[name] is None else "0 or 1"
            raise BadInput(f"the {name} of a message: expected {expected}, got {value!r:.80}")
        marks[name] = bool(value) == MARKS[name]
    if len({*marks.values()}) > 1:
        raise BadInput(f"{' and '.join(marks)} of a message: expected that they agree")
    if message["role"] != "assistant":
        for name in marks.keys() - {"weight", "masked"}:  # which say of a message that it is like others
            if marks[name]:
                raise BadInput(f"the {name} of a message of role {message['role']!r:.80}: expected "
                               f"{message[name]!r} of assistants alone, whose messages are learned")
        return False
    return all(marks.values())


def is_learned(message: dict, eos: str) -> bool:
    """Whether it is wanted and says something.

    eos: a pattern of what ends a turn. BadInput for one in any field: it would teach to end in the middle.
    """
    if not is_wanted(message) or not says_something(message):
        return False
    (message,) = _prepared([message], Style())
    for place, text in texts_in(message):
        found = re.search(eos, text)
        if found:
            raise BadInput(f"a response holds {found[0]!r}, which ends a turn, in {place}; expected none, "
                           "since the template writes it")
    return True


def says_something(reply: dict) -> bool:
    """Whether it has a call, or more text than the marks of a thought."""
    if decoded(reply.get("tool_calls")):
        return True
    texts = [reply.get(name) for name in ("content", "reasoning", *THOUGHT_FIELDS)]
    return any(without_marks(text) for text in texts if isinstance(text, str))


# What a reply holds


def opened_thought(prompt: str) -> str:
    """The end of a prompt that leaves a thought open, such as "<think>\n"; empty where none is."""
    for opening in THOUGHTS:
        start = prompt.rfind(opening)
        if start >= 0 and not prompt[start + len(opening):].strip():
            return prompt[start:]
    return ""


def split_thought(reply: str) -> tuple[str, str]:
    """-> its thoughts, with their marks; the answer behind the last, which is empty while one thinks"""
    answer = reply
    for opening, closing in THOUGHTS.items():
        answer = answer.rpartition(closing)[2]
        if opening in answer:
            answer = ""
    return reply.removesuffix(answer), answer


def read_reply(sampled: str, prompt: str, forms, tools) -> tuple[str, str, list[dict], int]:
    """-> thoughts; the answer without calls; calls, of the first form that has some; where they end"""
    reply = opened_thought(prompt) + sampled
    thought, answer = split_thought(reply)  # no call is made in a thought
    for form in forms:
        if form.in_thoughts:
            calls, text, end = read_calls(reply, form, tools)
            if calls:
                return *split_thought(text), calls, end - len(reply) + len(sampled)
        else:
            calls, text, end = read_calls(answer, form, tools)
            if calls:
                return thought, text, calls, end - len(answer) + len(sampled)
    return thought, answer, [], 0


def parse_reply(sampled: str, prompt: str, tokenizer, tools: list[dict] | None) -> tuple[dict, list[dict]]:
    """What was sampled after a prompt with tools -> its message in parts, as a template wants it; its calls.

    Calls are {"name": str, "arguments": dict}. Total: where nothing can be read, the message is the text.
    """
    style = style_of(tokenizer)
    if style.by_library:
        message, calls = _by_library(sampled, prompt, tokenizer, tools)
    else:
        thought, answer, calls, _ = read_reply(sampled, prompt, style.forms, tools)
        message = {"role": "assistant", "content": answer.strip() if calls else answer}
        if thought:
            message |= dict.fromkeys(THOUGHT_FIELDS, without_marks(thought))
    if not calls and not message.get("content"):
        return {"role": "assistant", "content": opened_thought(prompt) + sampled}, []
    if calls:
        message["tool_calls"] = []
        for call in calls[:MAX_CALLS]:
            given = {"id": call["id"]} if "id" in call else {}
            message["tool_calls"].append({"type": "function", "function": _bare([call])[0]} | given)
    return message, _bare(calls[:MAX_CALLS])


def _bare(calls: list[dict]) -> list[dict]:
    return [{"name": call["name"], "arguments": call["arguments"]} for call in calls]


def _by_library(sampled: str, prompt: str, tokenizer, tools) -> tuple[dict, list[dict]]:
    """By the tokenizer's response_template, whose patterns may take time that is quadratic in the length."""
    message = {"role": "assistant", "content": ""}
    if not getattr(tokenizer, "response_template", None) or len(sampled) > MAX_REPLY:
        return message, []
    try:
        message |= tokenizer.parse_response(sampled, prefix=prompt, tools=tools)
        return message, [call_of(call) for call in message.get("tool_calls", ())]
    except Exception:  # what a model writes may fit no form
        return {"role": "assistant", "content": ""}, []


def without_marks(thought: str) -> str:
    for mark in (*THOUGHTS, *THOUGHTS.values(), "<|message|>", "<|end|>", "<|start|>assistant"):
        thought = thought.replace(mark, "")
    return thought.strip()


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
