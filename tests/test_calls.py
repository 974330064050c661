"""envs/calls.py: calls of functions in the forms of models, from the template to the environment.

Each template here writes calls as the models named do; vLLM's parser of that form reads them as a reference.
"""

import json
import os
import random
import re
from pathlib import Path

import pytest

import grpo_llm
from envs import BadInput, calls, chat
from tests.run_folders import quick, write_jsonl
from tests.test_chat import CALL, MARKS, Says, Weather
from tests.test_rollout import AT_1, byte_tokenizer

TYPES = {"town": "string", "days": "integer", "warm": "boolean", "wind": "number", "at": "array",
         "how": "object"}
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "of a town", "parameters": {"type": "object", "properties": {
        name: {"type": kind, "description": name} for name, kind in TYPES.items()}}}}
PLAIN = {"town": "Ulm", "days": 3, "wind": 0.5, "at": [1, "two"], "how": {"in": "C"}}
# Texts that a careless reader would cut, cast or unquote.
AWKWARD = {"town": "7", "days": -1, "how": {"a": "}]", "b": [{"c": "é\n\"'"}]}}
LONG = {"town": "def f(x):\n    return {'a': [x, \"b\"]}  # not an end: ) ] }\n"}

JSON = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
ARGUMENTS = "{{ f.arguments | tojson }}"
TAGS = ("<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping or (v is iterable and v is not string) else v | string }}"
        "\n</parameter>\n{% endfor %}</function>")
INVOKE = ("<invoke name=\"{{ f.name }}\">{% for k, v in f.arguments.items() %}<parameter name=\"{{ k }}\">"
          "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke>")
DSML = INVOKE.replace("</", "</｜DSML｜").replace("<in", "<｜DSML｜in").replace("<pa", "<｜DSML｜pa").replace(
    "{{ k }}\"", "{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\"")
PYTHON = ("{{ f.name }}({% for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
          "{{ v | pprint }}{% endfor %})")
GEMMA = (  # keys without quotes, texts between marks
    "{% macro val(v) %}{% if v is string %}{{ Q + v + Q }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ val(x) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for x in v %}{{ ',' if not loop.first }}{{ val(x) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}")
FORMS = {  # before all calls, a call, between two, behind all; vLLM's name of the form
    "tool_call": ("", f"<tool_call>\n{JSON}\n</tool_call>", "\n", "", "hermes"),
    "bare": ("", JSON.replace("arguments'", "parameters'"), "; ", "", "llama3_json"),
    "list": ("[TOOL_CALLS][", JSON, ", ", "]", "mistral"),
    "bar": ("<|tool_call|>[", JSON, ", ", "]", "granite"),
    "bar/functools": ("functools[", JSON, ", ", "]", "phi4_mini_json"),
    "tool_calls": ("<tool_calls>[\n", JSON, ",\n", "\n]</tool_calls>", "jamba"),
    "function_call": ("", f"<function_call> {JSON}", "", "", "granite-20b-fc"),
    "longcat": ("", f"<longcat_tool_call>{JSON}</longcat_tool_call>", "\n", "", "longcat"),
    "plugin": ("", f"<|action_start|><|plugin|>\n{JSON}<|action_end|>", "\n", "", "internlm"),
    "prefix": ("<|tools_prefix|>[", "{{ {f.name: f.arguments} | tojson }}", ", ", "]<|tools_suffix|>",
               "apertus"),
    "action": ("<|START_ACTION|>[", "{{ {'tool_call_id': '0', 'tool_name': f.name, 'parameters': "
               "f.arguments} | tojson }}", ",", "]<|END_ACTION|>", ""),
    "fence": ("```json\n[", JSON, ", ", "]\n```", "xlam"),
    "gigachat": ("", f"function call<|role_sep|>\n{JSON}", "", "", "gigachat3"),
    "function": ("", f"<function={{{{ f.name }}}}>{ARGUMENTS}</function>", "", "", ""),
    "args": ("", f"[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{ARGUMENTS}", "", "", ""),
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}"
                    "\n```json\n" + ARGUMENTS + "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>",
                    "deepseek_v3"),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + ARGUMENTS
                      + "<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>", "deepseek_v31"),
    "kimi-k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
                + ARGUMENTS + "<|tool_call_end|>", "", "<|tool_calls_section_end|>", "kimi_k2"),
    "harmony": ("", "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>" + ARGUMENTS
                + "<|call|>", "<|start|>assistant", "", ""),
    "qwen3-coder": ("", f"<tool_call>\n{TAGS}\n</tool_call>", "\n", "", "qwen3_coder"),
    "qwen3-coder/seed": ("", f"<seed:tool_call>\n{TAGS}\n</seed:tool_call>", "\n", "", "seed_oss"),
    "glm": ("", "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>", "\n",
            "", "glm45"),
    "invoke": ("<minimax:tool_call>\n", INVOKE, "\n", "\n</minimax:tool_call>", "minimax_m2"),
    "invoke/dsml": ("<｜DSML｜function_calls>\n", DSML, "\n", "\n</｜DSML｜function_calls>", "deepseek_v32"),
    "minicpm5": ("", INVOKE.replace("invoke", "function").replace("parameter", "param"), "\n", "",
                 "minicpm5"),
    "tool_call_start": ("<|tool_call_start|>[", PYTHON, ", ", "]<|tool_call_end|>", "lfm2"),
    "function_calls": ("<function_calls>", PYTHON, "\n", "</function_calls>", "olmo3"),
    "pythonic": ("[", PYTHON, ", ", "]", "pythonic"),
    "gemma4": ("", GEMMA.replace("Q", "'<|\"|>'") + "<|tool_call>call:{{ f.name }}{{ val(f.arguments) }}"
               "<tool_call|>", "", "", "gemma4"),
    "functiongemma": ("", GEMMA.replace("Q", "'<escape>'") + "<start_function_call>call:{{ f.name }}"
                      "{{ val(f.arguments) }}<end_function_call>", "", "", "functiongemma"),
}


def template_of(form):
    before, call, between, behind, _ = FORMS[form]
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% if m.tool_calls %}"
        + before + "{% for c in m.tool_calls %}{% set f = c.function %}" + call
        + "{{ " + repr(between) + " if not loop.last }}{% endfor %}" + behind + "{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tokenizer_of(template):
    tokenizer = byte_tokenizer(template, "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<think>", "</think>"]})
    return tokenizer


def written(tokenizer, *arguments):
    """The text of a reply with a call for each of these arguments."""
    said = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": given}} for given in arguments]}
    messages = chat.for_template([{"role": "user", "content": "hi"}, said], tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], tools=[WEATHER], tokenize=False,
                                           add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    return text.removeprefix(prompt).removesuffix("<|im_end|>\n")


def read(text, tokenizer, tools=(WEATHER,)):
    _, found = chat.parse_reply(text, "", tokenizer, [*tools])
    return [(call["name"], call["arguments"]) for call in found]


@pytest.mark.parametrize("form", FORMS)
def test_calls_come_back_from_the_form_that_a_template_writes(form):
    tokenizer = tokenizer_of(template_of(form))
    names = [known.name for known in chat.style_of(tokenizer).forms]
    assert form.split("/")[0] in names
    for arguments in ([PLAIN], [AWKWARD], [PLAIN, AWKWARD], [{}], [LONG]):
        text = written(tokenizer, *arguments)
        assert read(text, tokenizer) == [("weather", given) for given in arguments], text
        assert read("<think>\nhm " + text + "</think>\n\nno", tokenizer) == [] or form == "harmony"
        message, _ = chat.parse_reply("<think>\nhm\n</think>\n\n" + text, "", tokenizer, [WEATHER])
        assert len(message["tool_calls"]) == len(arguments) and message["content"] == "", message
        assert message["reasoning_content"] == "hm" or form == "harmony"


TYPED = [  # a schema, a text, its value
    ("string", "7", "7"), ("integer", "7", 7), ("integer", "seven", "seven"), ("integer", "7.5", "7.5"),
    ("number", "7", 7), ("number", "1e2", 100.0), ("number", "nan", "nan"), ("boolean", "True", True),
    ("boolean", "no", "no"), ("array", "[1]", [1]), ("array", '{"a": 1}', '{"a": 1}'), ("object", "[" * 9999,
     "[" * 9999), (["string", "null"], "None", None), (["integer", "string"], "x", "x"),
    ("null", "null", None)]


@pytest.mark.parametrize(("kind", "text", "value"), TYPED)
def test_the_schema_of_a_function_gives_a_texts_type(kind, text, value):
    for schema in ({"type": kind}, {"anyOf": [{"type": kind}, {}]}):
        assert calls.typed(text, schema) == value and type(calls.typed(text, schema)) is type(value)


@pytest.mark.parametrize("schema", [None, {}, {"enum": ["7"]}, {"type": "mystery"}, {"$ref": "#/x"}])
def test_a_text_without_a_type_stays_a_text(schema):
    assert calls.typed("7", schema) == "7" and calls.typed("7", {"enum": [7, 8]}) == 7
    assert calls.typed("None", {"type": "string", "nullable": True}) is None


ONE = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
ODD = [  # a form, a reply in it, how many calls it holds
    ("tool_call", ONE.replace("}}", "}}}"), 0), ("tool_call", ONE.replace("}}", "}"), 0),
    ("tool_call", ONE.replace("}}", "}} and"), 0), ("tool_call", ONE.replace('"', "'"), 0),
    ("tool_call", ONE.replace("}}", "}}}") + ONE, 1), ("tool_call", f"First {ONE}, then {ONE}.", 2),
    ("tool_call", ONE * 20, 16), ("tool_call", ONE.replace("{}", "[]"), 0),
    ("tool_call", ONE.replace("weather", "<tool_call>"), 1),
    ("tool_call", ONE.replace('"weather"', "null"), 0),
    ("bare", '{"name": "weather", "parameters": {}}', 1),
    ("bare", '{"name": "weather", "parameters": {}} .', 0),
    ("bare", 'Call {"name": "weather", "parameters": {}}', 0), ("bare", '{"name": "Ulm", "at": {}}', 0),
    ("list", "[TOOL_CALLS]" + json.dumps([{"name": "weather", "arguments": {}}] * 20), 16),
    ("list", "[TOOL_CALLS]weather", 0), ("args", '[TOOL_CALLS]weather[ARGS]{"town": "Ulm"', 0),
    ("args", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"town": "Ulm"}', 1),
    ("args", "[TOOL_CALLS]weather{}", 1),
    ("qwen3-coder", "<tool_call><function=weather></function></tool_call>", 1),
    ("qwen3-coder", "<function=weather>\n<parameter=town>\nUlm\n</parameter>\n</function>", 1),
    ("qwen3-coder", "<tool_call><function=weather><parameter=town>Ulm</function></tool_call>", 0),
    ("qwen3-coder", "<tool_call><function=weather><parameter=town>Ulm</parameter>", 0),
    ("glm", "<tool_call>weather</tool_call>", 1), ("glm", "<tool_call>weather: no</tool_call>", 0),
    ("invoke/dsml", '<｜DSML｜invoke name="a"><｜DSML｜parameter name="b" string="false">x'
                    "</｜DSML｜parameter></｜DSML｜invoke>", 0),
    ("pythonic", '[weather("Ulm")]', 0), ("pythonic", "[weather(town=open('x'))]", 0),
    ("pythonic", "[weather(town='Ulm'), 1]", 0), ("pythonic", "[weather(**{'a': 1})]", 0),
    ("pythonic", "[weather(warm=true)]", 1), ("pythonic", "[weather()] it is", 0), ("pythonic", "[1, 2]", 0),
    ("gemma4", "<|tool_call>call:weather{town:Ulm}<tool_call|>", 0),
    ("harmony", "<|channel|>analysis<|message|>to=functions.weather?<|end|>", 0),
    ("deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```", 0)]


@pytest.mark.parametrize(("form", "reply", "number"), ODD)
def test_what_is_nearly_a_call_is_none(form, reply, number):
    tokenizer = tokenizer_of(template_of(form))
    assert len(read(reply, tokenizer)) == number
    message, _ = chat.parse_reply(reply, "", tokenizer, [WEATHER])
    assert number or message["content"] == reply


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_is_no_call_is_read_as_text_and_in_time_that_grows_with_its_length(form):
    tokenizer, rng = tokenizer_of(template_of(form)), random.Random(form)
    text = written(tokenizer, PLAIN, AWKWARD)
    for end in range(0, len(text), 7):  # cut off anywhere
        found = read(text[:end], tokenizer)
        assert found in ([], [("weather", PLAIN)]) or form == "harmony" or end > len(text) - 60, text[:end]
    parts = [*re.findall(r"\W+|\w+", text), "\0", "\ud800", "<think>", "</think>", "{", "[", '"', "-", "\\"]
    for _ in range(100):  # parts in any order
        read("".join(rng.choices(parts, k=rng.randint(1, 40))), tokenizer)
    for size in (1, 2, 5, 12, len(text)):  # a part again and again
        start = rng.randrange(len(text))
        with quick((text[:start], size), most=5):
            read((text[start:start + size] or "<") * (40_000 // size), tokenizer)
            read(text[:start] * (40_000 // (start + 1)), tokenizer)
    for opening in ("[", "{", '{"a":', "weather(a=", "-", "<parameter=a>"):  # deep, and never closed
        with quick(opening, most=10):
            assert read(text[:20] + opening * 30_000, tokenizer) == []


def test_arguments_are_text_for_a_template_that_joins_them_to_text():
    template = template_of("deepseek-v3.1").replace(ARGUMENTS, "{{ '' + f.arguments }}")
    tokenizer = tokenizer_of(template)
    assert chat.style_of(tokenizer).arguments_as_text
    assert read(written(tokenizer, PLAIN), tokenizer) == [("weather", PLAIN)]
    assert read(written(tokenizer, json.dumps(PLAIN)), tokenizer) == [("weather", PLAIN)]


def test_the_id_that_a_model_gives_its_call_is_that_of_the_answer():
    tokenizer = tokenizer_of(template_of("kimi-k2") + "{% for m in messages if m.role == 'tool' %}"
                             "[{{ m.tool_call_id }}]{% endfor %}")
    assert chat.style_of(tokenizer).in_fields  # without its call in a field, an answer has no id
    reply = written(tokenizer, PLAIN).replace("weather:0", "weather:5")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply},
                {"role": "tool", "name": "weather", "content": "warm"}]
    text = chat.rendered(messages, tokenizer, [WEATHER])
    assert reply in text and "[functions.weather:5]" in text
    # An id of OpenAI's kind would take the name's place.
    call = {"id": "call_abc", "type": "function", "function": {"name": "weather", "arguments": PLAIN}}
    messages = [messages[0], {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_abc", "content": "warm"}]
    text = chat.rendered(messages, tokenizer, [WEATHER])
    assert "<|tool_call_begin|>functions.weather:0<" in text and "[functions.weather:0]" in text
    assert "call_abc" not in text and call["id"] == "call_abc"


def test_a_template_that_leaves_calls_out_is_named_where_functions_are_called():
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.warns(UserWarning, match="--chat-template plain: it leaves out calls of functions"):
        chat.check_calls(Weather(), tokenizer, "plain")
    assert read(f"<tool_call>{json.dumps({'name': 'weather', 'arguments': PLAIN})}", tokenizer)


SHOP = '''
class Shop:
    def reset(self, word, **row):
        pass

    def look_up(self, word: str) -> str:
        """Look up a word.

        Args:
            word: the word
        """
        return word

    def get_reward(self):
        return 1.0
'''


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_form_that_is_not_known_is_refused_where_there_are_functions_to_call(has_tools, tmp_path):
    """Before the weights are loaded: there are none in the folder."""
    template = tmp_path / "chat.jinja"
    template.write_text(template_of("tool_call").replace("tool_call>", "do>"))
    flags = dict(model=str(tmp_path), chat_template=str(template))
    if has_tools:
        (tmp_path / "shop.py").write_text(SHOP)
        write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "word": "w"}] * 4)
        flags |= dict(env="trl", env_kwargs=(f"file={tmp_path}/shop.py:Shop", f"data={tmp_path}/rows.jsonl"))
    (tmp_path / "config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path("models/countdown-tiny") / name).read_bytes())
    says = r"form that is not known, .*<do>" if has_tools else "--model .* cannot be loaded"
    with pytest.raises(BadInput, match=says):
        grpo_llm.main(grpo_llm.Args(**flags))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "model"), [
    ("tool_call", "qwen3"), ("qwen3-coder", "qwen3_5"), ("gemma4", "gemma4")])
def test_transformers_own_response_templates_read_the_same(form, model):
    """Those that `transformers serve` takes for tokenizers that have none."""
    utils = pytest.importorskip("transformers.cli.serving.utils")
    (template,) = [one for models, one in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if model in models]
    tokenizer = tokenizer_of(template_of(form))
    for arguments in ([PLAIN], [PLAIN, {"town": "7"}]):
        text = written(tokenizer, *arguments)
        message = tokenizer.parse_response(text, template, prefix="", tools=[WEATHER])
        found = [call["function"] for call in message["tool_calls"]]
        assert read(text, tokenizer) == [(call["name"], call["arguments"]) for call in found]


EOS = ("<|call|>", "<turn|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|im_end|>", "<|user|>")


@pytest.mark.slow
def test_an_episode_goes_on_in_each_template_of_trl_that_has_calls(random_llama):
    """Those of real models: the tokens of a call, its text, the call, the answer in the next prompt."""
    trl = pytest.importorskip("trl.chat_template_utils")
    number = 0
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        eos = next((mark for mark in EOS if mark in path.read_text()), "<|im_end|>")
        tokenizer = byte_tokenizer(path.read_text(), eos)
        style = chat.style_of(tokenizer)
        assert style.forms, path
        if not (style.written and trl.supports_tool_calling(tokenizer)):
            continue
        env, number = Weather(), number + 1
        task = env.task("train", 0)
        prompt = chat.rendered(task.messages, tokenizer, task.tools)
        said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
        text = tokenizer.apply_chat_template(chat.for_template([*task.messages, said], tokenizer),
                                             tools=task.tools, tokenize=False)
        call = text[len(os.path.commonprefix([prompt, text])):].rstrip().removesuffix(eos)
        opening = "hm</think>" if "<think>" in chat.opened_thought(prompt) and "</think>" not in call else ""
        args = grpo_llm.Args(max_response_tokens=400, max_context_tokens=15_000)
        model = random_llama(vocab_size=len(tokenizer), max_position_embeddings=15_000)
        engine = Says(model, tokenizer, args)
        replies = [opening + call + eos] * 2 + [opening + "Yes." + eos]
        engine.replies = iter([tokenizer(reply, add_special_tokens=False).input_ids for reply in replies])
        (r,) = grpo_llm.rollout(engine, tokenizer, env, [task], 1, grpo_llm.Sampling(*AT_1), args,
                                grpo_llm.episode_reward)
        assert [calls for _, calls in env.got] == [[CALL], [CALL], []] and r.termination == "done", path
        assert tokenizer.decode(r.segments[-1].ids).count("warm") > r.prompt_text.count("warm"), path
    assert number > 20


# Forms whose parser in vLLM 0.32 loses lists and objects among the arguments.
VLLM_READS_FLAT = ("bar/functools", "gemma4", "functiongemma")


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][-1]])
def test_vllms_parser_reads_the_same(form):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager
    parser = ToolParserManager.get_tool_parser(FORMS[form][-1])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], model="m", tools=[WEATHER])
    tokenizer = tokenizer_of(template_of(form))
    marks = re.findall(r"<[|｜][^<>]+[|｜]>|</?tool_calls>", "".join(FORMS[form]) + "<|python_tag|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *marks, "<think>", "</think>"]})
    flat = {"town": "Ulm", "days": 3}
    for arguments in (flat,) if form in VLLM_READS_FLAT else (flat, PLAIN, AWKWARD):
        text = written(tokenizer, arguments)
        found = parser(tokenizer, tools=request.tools).extract_tool_calls(text, request).tool_calls
        if form == "functiongemma":  # its numbers stay out
            arguments = {"town": "Ulm"}
        assert read(text, tokenizer)[0][1].items() >= arguments.items()
        assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
            ("weather", arguments)], text
