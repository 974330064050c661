"""The forms in which chat models write calls of functions, and how they are read.

A form says what opens a call, how its body is read, and what closes it. There are five kinds of bodies: JSON
that holds the name; JSON of the arguments alone, behind the name; tags, a pair for each argument; Python; and
Gemma's shorthand. FORMS has those of the models that vLLM's tool parsers and TRL's response templates know.
Readers are linear in the length of a text, and of a reply MAX_CALLS openings are looked at.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from collections.abc import Callable

MAX_CALLS = 16  # that are read of a reply: bounds the time of a step
NAME = r"(?P<name>[\w.-]{1,128})"  # of a function
KEY = r"(?P<key>[^<>\"\n]{1,128})"  # of an argument
SPACE = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Form:
    """opening: its group `name`, where it has one, is the function's, and `id` is the call's."""

    name: str
    opening: str
    read: Callable  # (form, text, match of the opening, tools) -> (calls, where they end); ValueError: none
    closing: str = ""
    whole: bool = False  # nothing but calls stands in an answer that has some
    in_thoughts: bool = False  # what looks like a call is one, even before the thought ends
    parameter: str = ""  # of tags: what opens an argument, with its `key`
    parameter_end: str = ""
    quote: str = ""  # of Gemma's shorthand: stands before and behind a text


def read_calls(answer: str, form: Form, tools: list[dict] | None) -> tuple[list[dict], str, int]:
    """-> the calls, as {"name", "arguments"} and perhaps "id"; the text around them; where the last one ends

    What opens like a call and is none stays text.
    """
    opening, closing = re.compile(form.opening), re.compile(r"\s*" + form.closing)
    calls, text, start, end = [], "", 0, 0  # start: of the text that is not looked at yet
    for _ in range(MAX_CALLS):
        match = opening.search(answer, start)
        if not match:
            break
        text += answer[start:match.start()]
        try:
            found, stop = form.read(form, answer, match, tools)
            closed = closing.match(answer, stop)
            stop = closed.end() if closed else SPACE.match(answer, stop).end()
            if not closed and stop < len(answer):
                raise ValueError("more than a call")
            calls += found
            start = end = stop
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            text += match[0] or answer[match.end():match.end() + 1]
            start = max(match.end(), match.start() + 1)
    text += answer[start:]
    if form.whole and text.strip():
        return [], answer, 0
    return calls[:MAX_CALLS], text, end


# Readers


def read_json(form, text, match, tools):
    """An object that names function and arguments, or a list of them."""
    value, end = json.JSONDecoder().raw_decode(text, SPACE.match(text, match.end()).end())
    return [call_of(item) for item in (value if isinstance(value, list) else [value])], end


def call_of(value) -> dict:
    """From the names that the fields have in one form or another. Raises ValueError."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("no object")
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no name, or no arguments")
    return {"name": name, "arguments": arguments}


def read_keyed(form, text, match, tools):
    """A list of objects {NAME: ARGUMENTS}."""
    value, end = json.JSONDecoder().raw_decode(text, SPACE.match(text, match.end()).end())
    calls = []
    for item in value if isinstance(value, list) else [value]:
        ((name, arguments),) = item.items() if isinstance(item, dict) else ()
        calls.append(call_of({"name": name, "arguments": arguments}))
    return calls, end


def read_arguments(form, text, match, tools):
    """The arguments, as a JSON object."""
    value, end = json.JSONDecoder().raw_decode(text, SPACE.match(text, match.end()).end())
    return [_named(match, value)], end


def read_tags(form, text, match, tools):
    """A pair of tags for each argument; texts get the types that the function's schema has."""
    opening, closing = re.compile(r"\s*" + form.parameter), re.compile(form.parameter_end)
    schema = parameters_of(match["name"], tools)
    arguments, position = {}, match.end()
    while begun := opening.match(text, position):
        ended = closing.search(text, begun.end())
        if not ended:
            raise ValueError("an argument without an end")
        value = text[begun.end():ended.start()]
        is_text = begun.groupdict().get("string")  # DeepSeek says it
        if is_text is None:
            value = typed(value, schema.get(begun["key"]))
        elif is_text == "false":
            value = json.loads(value)
        arguments[begun["key"]] = value
        position = ended.end()
    if not re.compile(r"\s*" + form.closing).match(text, position):
        raise ValueError("a call without an end")
    return [_named(match, arguments)], position


def read_python(form, text, match, tools):
    """Calls with literals for keywords: in a list, or one a line."""
    ended = re.compile(form.closing).search(text, match.end()) if form.closing else None
    end = ended.start() if ended else len(text)
    calls = []
    for statement in ast.parse(text[match.end():end].strip()).body:
        value = getattr(statement, "value", None)
        for node in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(node, ast.Call) or node.args or None in [pair.arg for pair in node.keywords]:
                raise ValueError("no call with keywords")
            arguments = {pair.arg: _literal(pair.value) for pair in node.keywords}
            calls.append({"name": ast.unparse(node.func), "arguments": arguments})
    if not calls:
        raise ValueError("no call")
    return calls, end


def _literal(node):
    """Of Python; true, false and null are JSON's."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    return ast.literal_eval(node)


def read_gemma(form, text, match, tools):
    """{key:VALUE}: JSON, but that keys have no quotes and texts have marks of their own."""
    ended = re.compile(form.closing).search(text, match.end())
    end = ended.start() if ended else len(text)
    quote = re.escape(form.quote)
    as_json = re.sub(rf"{quote}(?P<text>.*?){quote}|(?<![\w.-])(?P<key>[\w.-]++)(?=\s*+:)",
                     lambda found: json.dumps(found["key"] or found["text"]), text[match.end():end],
                     flags=re.DOTALL)
    return [_named(match, json.loads(as_json))], end


def _named(match, arguments) -> dict:
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    call = {"name": match["name"].removeprefix("functions."), "arguments": arguments}
    given = match.groupdict().get("id")
    return call | ({"id": given} if given else {})


# Types of arguments that are written as texts


def parameters_of(name: str, tools: list[dict] | None) -> dict:
    """The schemas of a function's arguments; none where it is not known."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def types_of(schema) -> list:
    """The names of the JSON types that a schema allows."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else [*declared]
    for value in schema.get("enum", []):
        types.append(JSON_TYPES.get(type(value)))
    for choice in (*schema.get("anyOf", []), *schema.get("oneOf", [])):
        types += types_of(choice)
    return [*types, "null"] if schema.get("nullable") else types


JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
CASTS = {  # in this order, as in vLLM: a text is what nothing else fits
    "null": {"null": None, "none": None}, "integer": int, "number": float,
    "boolean": {"true": True, "false": False, "1": True, "0": False}, "object": dict, "array": list}


def typed(text: str, schema):
    """An argument's text as a value of the type that its schema wants, or as it stands where it fits none."""
    types = types_of(schema)
    for name, cast in CASTS.items():
        if name not in types:
            continue
        word = text.strip()
        if isinstance(cast, dict):
            if word.lower() in cast:
                return cast[word.lower()]
            continue
        try:
            value = json.loads(word) if cast in (dict, list) else cast(word)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, cast) and (cast is not float or math.isfinite(value)):
            return int(value) if cast is float and re.fullmatch(r"-?\d+", word) else value
    return text


# Forms. A tag around several calls belongs to the first's opening and the last's closing.

FORMS = (
    # JSON with the name
    Form("tool_call", r"<tool_call>", read_json, "</tool_call>"),  # Hermes, Qwen 2.5 and 3, Granite 4, Ernie
    Form("bare", r"(?:\A\s*(?:<\|python_tag\|>)?|;\s*)(?=[\[{])", read_json, whole=True),  # Llama 3, xLAM
    Form("list", r"\[TOOL_CALLS\](?=\s*[\[{])", read_json),  # Mistral, to 2024
    Form("bar", r"<\|tool_call\|>|functools(?=\[)", read_json, r"(?:<\|/tool_call\|>)?"),  # Granite 3, Phi 4
    Form("tool_calls", r"<tool_calls>", read_json, "</tool_calls>"),  # Jamba, Hunyuan
    Form("function_call", r"<function_call>", read_json, "(?:</function_call>)?"),  # Granite 20B
    Form("longcat", r"<longcat_tool_call>", read_json, "</longcat_tool_call>"),
    Form("plugin", r"<\|action_start\|>\s*<\|plugin\|>", read_json, r"<\|action_end\|>"),  # InternLM 2
    Form("prefix", r"<\|tools_prefix\|>", read_keyed, r"<\|tools_suffix\|>"),  # Apertus
    Form("action", r"<\|START_ACTION\|>", read_json, r"<\|END_ACTION\|>"),  # Command A
    Form("fence", r"(?:Action:\s{0,3})?```(?:json)?", read_json, "```"),  # Command R
    Form("gigachat", r"(?:function call<\|role_sep\|>|<\|function_call\|>)", read_json),
    # JSON behind the name
    Form("function", rf"<function={NAME}>(?=\s*\{{)", read_arguments, "</function>"),  # Llama 3.1
    Form("args", rf"\[TOOL_CALLS\]{NAME}(?:\[CALL_ID\](?:(?P<id>[A-Za-z0-9]{{9}})|\w{{1,64}}))?(?:\[ARGS\])?"
         r"(?=\s*\{)", read_arguments),  # Mistral, from 2025
    Form("deepseek-v3",
         rf"(?:<｜tool▁calls▁begin｜>)?\s?<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\s*```json",
         read_arguments, "```\\s*<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?"),
    Form("deepseek-v3.1", rf"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
         read_arguments, "<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?"),
    Form("kimi-k2", r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>\s?"
         rf"(?P<id>{NAME}:\d{{1,9}})\s?<\|tool_call_argument_begin\|>",
         read_arguments, r"<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?"),
    Form("harmony", r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?\s?to=functions\."
         rf"{NAME}(?:<\|channel\|>commentary)?\s?(?:<\|constrain\|>)?(?:json)?<\|message\|>",
         read_arguments, r"(?:<\|call\|>)?", in_thoughts=True),  # gpt-oss
    # Tags
    Form("qwen3-coder", rf"(?:<(?:seed:)?tool_call>\s*)?<function={NAME}>", read_tags,
         "</function>(?:\\s*</(?:seed:)?tool_call>)?",  # Qwen 3.5 too, Nemotron 3, Step 3.5, Seed-OSS
         parameter=rf"<parameter={KEY}>\n?", parameter_end="\n?</parameter>"),
    Form("glm", rf"<tool_call>\s*{NAME}(?=\s*(?:<arg_key>|</tool_call>))", read_tags, "</tool_call>",
         parameter=rf"<arg_key>{KEY}</arg_key>\s*<arg_value>", parameter_end="</arg_value>"),
    Form("invoke", rf"(?:<[\w:｜]{{1,40}}>\s{{0,3}})?<[\w:｜]{{0,20}}invoke name=\"{NAME}\">", read_tags,
         r"</[\w:｜]{0,20}invoke>(?:\s*</[\w:｜]{1,40}>)?",  # MiniMax M2, DeepSeek V3.2, Step 3
         parameter=rf"<[\w:｜]{{0,20}}parameter name=\"{KEY}\"(?: string=\"(?P<string>true|false)\")?>",
         parameter_end=r"</[\w:｜]{0,20}parameter>"),
    Form("minicpm5", rf"<function name=\"{NAME}\">", read_tags, "</function>",
         parameter=rf"<param name=\"{KEY}\">", parameter_end="</param>"),
    # Python
    Form("tool_call_start", r"<\|tool_call_start\|>", read_python, r"<\|tool_call_end\|>"),  # LFM 2
    Form("function_calls", r"<function_calls>", read_python, "</function_calls>"),  # OLMo 3
    Form("pythonic", r"\A\s*(?:<\|python_start\|>)?(?=\[\s*[A-Za-z_])", read_python,
         r"(?:<\|python_end\|>)?\Z", whole=True),  # Llama 3.2 and 4
    # Gemma's shorthand
    Form("gemma4", rf"<\|tool_call>call:{NAME}(?=\{{)", read_gemma, r"<tool_call\|>", quote='<|"|>'),
    Form("functiongemma", rf"<start_function_call>call:{NAME}(?=\{{)", read_gemma, "<end_function_call>",
         quote="<escape>"),
)
COMMON = FORMS[:2]  # what a model without a form of its own is read by
