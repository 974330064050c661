"""Templates, calls and thoughts in the manner of real chat models: what is rendered, learned and handed on.

The templates are small texts with the features of the vendors' own, the tokenizers have a token per byte.
"""

import json
import threading
import types

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import envs
import grpo_llm
import ppo_llm
import sft
from envs import BadInput, Step, chat
from envs.mixture import Mixture
from tests.run_folders import full_forward, train
from tests.test_rollout import AT_1, Speaker, World, byte_tokenizer, over, play

RL = [grpo_llm, pytest.param(ppo_llm, marks=pytest.mark.slow)]  # code that both have to the letter
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}}
CALL = {"name": "weather", "arguments": {"town": "Ulm"}}

# A generation prompt that opens a thought; what an answer has of one is kept after the last user's message.
OPENS = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
    {%- set thought, said = '', m.content -%}
    {%- if m.role == 'assistant' and '</think>' in said -%}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
        {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' + m.role + '\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
        {{- '<think>\n' + thought + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- said -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '\n<tool_call>\n'
            + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
            + '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""  # Qwen 3, thinking
CLOSED = OPENS.replace("assistant\n<think>\n' -}}", "assistant\n' -}}")  # Qwen 3
CHANNELS = (  # gpt-oss: its template refuses a content that holds a channel
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('a channel in the content') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
GEMMA = ("<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
         "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
         "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
PHI = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
       "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}")
MISMATCH = ("{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}[bot] {% endif %}")
MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>",
         "<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<eos>",
         "<tool_call>", "</tool_call>", "<|eot_id|>", "[TOOL_CALLS]", "<|call|>"]


def tokenizer_of(template, eos="<|im_end|>"):
    tokenizer = byte_tokenizer(template, eos)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<think>", "</think>"]})
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text} | more


def encoded(row, tokenizer, ends=("<|im_end|>",), **flags):
    """A row's text and what is learned of it."""
    args = sft.Args(train_files=("x.jsonl",), **flags)
    ids, mask = sft.encode_row(row, tokenizer, args, tokenizer.convert_tokens_to_ids(list(ends)))
    return tokenizer.decode(ids), tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


def test_a_template_that_waits_for_ever_is_refused_and_its_process_ended(monkeypatch):
    monkeypatch.setattr(chat, "TEMPLATE_WAIT", 0.2)
    lock, before = threading.Lock(), {*psutil.Process().children()}
    waits = types.SimpleNamespace(apply_chat_template=lambda *given, **options: lock.acquire())
    with lock, pytest.raises(BadInput, match="--chat-template a: it took more than .* a template that ends"):
        chat.check_template(waits, "a")
    assert {*psutil.Process().children()} <= before


# Rows and demonstrations


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "text"])
def test_the_tools_of_a_row_reach_the_template_in_every_render(tools):
    tokenizer, begin = tokenizer_of(CLOSED), "<|im_start|>system\nTools: " + json.dumps([WEATHER])
    chat_row = {"messages": [user("hi"), said("yo"), said("so")], "tools": tools}
    text, learned = encoded(chat_row, tokenizer, messages_key="messages")
    assert text.startswith(begin) and text.count("Tools") == 1 and "yo" in learned and "so" in learned
    text, learned = encoded({"prompt": "hi", "response": "yo", "tools": tools}, tokenizer)
    assert text.startswith(begin) and learned == "<think>\n\n</think>\n\nyo<|im_end|>"
    text, _ = encoded({"prompt": "hi", "response": "yo", "tools": None}, tokenizer)
    assert "Tools" not in text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("has_tools", [True, False])
def test_a_files_column_of_tools_is_read_where_there_is_one(kind, has_tools, tmp_path):
    import pyarrow.parquet
    row = {"prompt": "hi", "response": "yo", "other": 1} | ({"tools": [WEATHER]} if has_tools else {})
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    ((_, found),) = envs.read_rows(str(path), "rows", columns=["prompt", "response"], optional=["tools"])
    assert found.get("tools") == row.get("tools")


@pytest.mark.parametrize("arguments", [CALL["arguments"], json.dumps(CALL["arguments"])])
def test_arguments_of_calls_are_objects_for_the_template(arguments):
    """As JSON text, OpenAI's form, they would be quoted once more."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [user("hi"), said("", tool_calls=[call])]
    text, learned = encoded({"messages": messages}, tokenizer_of(CLOSED), messages_key="messages")
    assert json.dumps(CALL) in text and learned.endswith(
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>")
    text = grpo_llm.render(messages, tokenizer_of(CLOSED), grpo_llm.Args())
    assert json.dumps(CALL) in text


TAGGED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
UNTAGGED = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [TAGGED, UNTAGGED], ids=["tagged", "untagged"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_a_turn_of_weight_0_is_read_but_not_learned(template, mark):
    tokenizer = tokenizer_of(template)
    messages = [user("a"), said("one", **mark), user("b"), said("two", weight=1)]
    text, learned = encoded({"messages": messages}, tokenizer, messages_key="messages")
    assert "one" in text and learned == "two<|im_end|>"
    with pytest.raises(BadInput, match="weight of a message: expected 0 or 1, got 0.5"):
        encoded({"messages": [user("a"), said("one", weight=0.5)]}, tokenizer, messages_key="messages")


def test_weights_that_the_tags_of_a_template_cannot_keep_are_refused():
    tokenizer = tokenizer_of(TAGGED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", (
        "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}")))
    messages = [user("a"), said("one", weight=0), said("two")]
    with pytest.raises(BadInput, match="it tags 4 turns for 2 assistant messages"):
        encoded({"messages": messages}, tokenizer, messages_key="messages")


TURNS = {  # template, ids that end a reply, what is learned of the response "Four."
    "opens a thought": (OPENS, ["<|im_end|>"], "\n</think>\n\nFour.<|im_end|>"),
    "writes a thought": (CLOSED, ["<|im_end|>"], "<think>\n\n</think>\n\nFour.<|im_end|>"),
    "channels": (CHANNELS, ["<|return|>"], "<|channel|>final<|message|>Four.<|return|>"),
    "another mark": (GEMMA, ["<eos>", "<end_of_turn>"], "Four.<end_of_turn>"),
    "two marks": (PHI, ["<|endoftext|>", "<|end|>"], "Four.<|end|>"),
    "no mark": ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_end|>"], "Four.<|im_end|>"),
    "a mark that ends no reply": (TAGGED, ["<eos>"], "Four.<|im_end|><eos>"),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_response_is_learned_as_the_turn_that_the_template_writes(name):
    template, ends, expected = TURNS[name]
    tokenizer = tokenizer_of(template, ends[0])
    text, learned = encoded({"prompt": "2 + 2?", "response": "Four."}, tokenizer, ends)
    assert learned == expected
    assert text == tokenizer.apply_chat_template([user("2 + 2?")], tokenize=False,
                                                 add_generation_prompt=True) + learned


def test_a_demonstration_with_a_thought_opens_it_once():
    env = envs.make("countdown", style="r1", max_operands=3)
    task = env.task("train", 0)
    tokenizer = tokenizer_of(OPENS)
    ((ids, mask),) = sft.encode_demonstration(
        env.demonstration(task), len(task.messages), tokenizer, sft.Args(), [tokenizer.eos_token_id])
    text = tokenizer.decode(ids).split("<|im_start|>assistant")[1]
    assert text.count("<think>") == text.count("</think>") == 1
    learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert envs.chat.opened_thought(tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m]))
    assert env.start(task, 1).step("<think>\n" + learned.removesuffix("<|im_end|>")).info["correct"] == 1.0


def test_a_reply_that_does_not_begin_with_the_generation_prompt_is_refused():
    with pytest.raises(BadInput, match="generation prompt; .* --messages-key"):
        encoded({"prompt": "a", "response": "b"}, tokenizer_of(MISMATCH, "<eos>"), ["<eos>"])


@pytest.mark.parametrize("row", [{"messages": [user("a"), said("b<|im_end|>c")]},
                                 {"messages": [user("a<|im_end|>"), said("b"), said("c<|im_end|>")]}])
def test_the_text_of_an_eos_in_a_reply_is_refused(row):
    with pytest.raises(BadInput, match=r"a response holds '<\|im_end\|>'"):
        encoded(row, tokenizer_of(CLOSED), messages_key="messages")


def llama2_tokenizer(template):
    """A space is put before every text between special tokens, as sentencepiece does for Llama 2."""
    words = ["\u2581", *"\nabcdefgh:[]/", "\u2581a", "\u2581b", "\u2581c", "\u2581d"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("\u2581", letter) for letter in "abcd"]
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>",
                                   chat_template=template)


LLAMA2 = ("{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}{% else %}"
          "{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}")


def test_the_space_of_llama_2s_tokenizer_is_not_put_between_the_pieces_of_a_conversation():
    tokenizer = llama2_tokenizer(LLAMA2)
    messages = [user("a"), said("b"), user("c"), said("d")]
    ids, mask = sft.encode_row({"messages": messages}, tokenizer, sft.Args(
        train_files=("x",), messages_key="messages"), [tokenizer.eos_token_id])
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>", *"\u2581[a]", "\u2581b", "</s>", *"[c]", "\u2581d", "</s>"]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]

    # In a rollout: the text behind a reply extends the segment by the same tokens.
    def behave(episode, reply):
        return over() if reply.strip() == "d" else Step([user("c")], 0.0, False, False, {})

    replies = [tokenizer.convert_tokens_to_ids([f"\u2581{letter}", "</s>"]) for letter in "bd"]
    world = World(behave)
    world.task = lambda split, index: envs.Task("t0", "world", [user("a")], {})
    r, _ = play(tokenizer, world, replies)
    (segment,) = r.segments
    assert segment.ids == ids


# Replies


REPLIES = {  # what is sampled, what the environment gets
    "channels": (["<|channel|>", "a", "<|end|>", "<|channel|>", "b", "<|im_end|>"],
                 "<|channel|>a<|end|><|channel|>b"),
    "thought": (["<think>", "a", "</think>", "b", "<|im_end|>"], "<think>a</think>b"),
    "call": (["[TOOL_CALLS]", "a", "<|im_end|>"], "[TOOL_CALLS]a"),
}


@pytest.mark.parametrize("name", REPLIES)
def test_special_tokens_of_a_reply_reach_the_environment_and_the_history(name):
    tokens, expected = REPLIES[name]
    tokenizer = tokenizer_of(UNTAGGED)
    seen = []
    world = World(lambda episode, reply: seen.append(reply) or (over() if len(seen) == 2 else Step(
        [user("go on")], 0.0, False, False, {})))
    ids = tokenizer.convert_tokens_to_ids(tokens)
    r, prompts = play(tokenizer, world, [ids, ids])
    assert seen == [expected, expected] and len(r.segments) == 1
    assert f"<|im_start|>assistant\n{expected}<|im_end|>" in tokenizer.decode(prompts[1])


@pytest.mark.parametrize("reply", [
    "<|channel|>analysis<|message|>hm 1 + 2<|end|><|start|>assistant<|channel|>final<|message|>X", "X",
    "<think>a</think>X", "a</think>X", "[THINK]a[/THINK]X", "<|channel>thought\na<channel|>X"])
def test_what_follows_a_thought_is_the_answer(reply):
    assert envs.final_part(reply) == "X"


@pytest.mark.parametrize("reply", [
    "<|channel|>analysis<|message|>X", "<think>X", "[THINK]X", "<|channel>thought\nX", "a</think><think>X"])
def test_an_open_thought_is_no_answer(reply):
    assert envs.final_part(reply) == ""


@pytest.mark.parametrize("script", RL)
def test_a_thought_that_the_prompt_opens_is_a_thought(script):
    """Without </think> there is no answer; and the history is extended by what was sampled."""
    tokenizer, seen = tokenizer_of(OPENS), []

    def behave(episode, reply):
        seen.append(reply)
        again = Step([{"role": "tool", "content": "?"}], 0.0, False, False, {})
        return over(1.0) if envs.final_part(reply) else again

    env, replies = World(behave), iter(["1 + 2", "hm\n</think>\n\n1 + 2"])
    engine = Speaker(tokenizer, lambda text: next(replies))
    args = script.Args(max_response_tokens=40)
    (r,) = script.rollout(engine, tokenizer, env, [env.task("train", 0)], 1, script.Sampling(*AT_1), args,
                          lambda r: r.steps[-1].reward)
    assert seen == ["<think>\n1 + 2", "<think>\nhm\n</think>\n\n1 + 2"] and r.reward == 1.0
    assert [m["content"] for m in r.messages if m["role"] == "assistant"] == seen


def test_sft_scores_replies_as_the_rl_scripts_do(monkeypatch, countdown_tiny):
    """The prompt's open thought comes first, special tokens stay, and what follows the first eos is gone.

    Of the first task the greedy reply alone is right, of the second one of three that are sampled.
    """
    tokenizer, seen = tokenizer_of(OPENS), []

    def behave(episode, reply):
        seen.append(reply)
        right = {"t0": [4], "t1": [2]}[episode.task.id]
        return over(1.0, float(env.attempts.count(episode.task.id) in right))

    env = World(behave)
    eos = tokenizer.eos_token_id
    answer = tokenizer.convert_tokens_to_ids(["h", "</think>", "[TOOL_CALLS]", "X"])
    model = types.SimpleNamespace(device="cpu", modules=list, generation_config=types.SimpleNamespace(
        eos_token_id=None))
    monkeypatch.setattr(sft, "sample_responses", lambda model, tokenizer, texts, args, **sampling: [
        [*answer, eos, tokenizer.pad_token_id]] * len(texts) * sampling.get("num_return_sequences", 1))
    monkeypatch.setattr(sft, "precision", lambda *_: torch.inference_mode())
    metrics = sft.accuracy(model, tokenizer, env, sft.Args(eval_tasks=2, eval_samples=3))
    assert seen == ["<think>\nh</think>[TOOL_CALLS]X"] * 8
    assert metrics == {"val/world/greedy": 1 / 2, "val/world/pass@1": 1 / 6, "val/world/pass@3": 1 / 2}


# Several turns with tools

LLAMA31 = (
    "<bos>{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{% if loop.first and tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}"
    "<|eot_id|>{% endif %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
# As Mistral's: calls and answers in fields, with ids, and no call in a text.
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.tool_call_id }}: {{ m.content }}]"
    "{% elif '[TOOL_CALLS]' in m.content %}{{ raise_exception('a call in the content') }}"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{% endfor %}]<|im_end|>{% else %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}")
TAGS = OPENS.replace("""{{- '\n<tool_call>\n'
            + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
            + '\n</tool_call>' -}}""", """
        {{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
        {%- for key, value in call.function.arguments.items() -%}
            {{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' -}}
        {%- endfor -%}{{- '</function>\n</tool_call>' -}}""")  # Qwen 3.5
HARMONY = (  # gpt-oss: thoughts and calls in fields
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('a channel in the content') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
TEXTS = {"common": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
         "bare": json.dumps({"name": CALL["name"], "parameters": CALL["arguments"]}),
         "list": "[TOOL_CALLS]" + json.dumps([CALL]),
         "harmony": "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
                    + json.dumps(CALL["arguments"]),
         "tags": "<tool_call>\n<function=weather>\n<parameter=town>\nUlm\n</parameter>\n</function>\n"
                 "</tool_call>"}
WITH_TOOLS = {  # template, eos, form of a call, number of segments
    "qwen3": (CLOSED, "<|im_end|>", "common", 1), "qwen3.5": (TAGS, "<|im_end|>", "tags", 1),
    "llama3.1": (LLAMA31, "<|eot_id|>", "bare", 1), "plain": (None, "<|im_end|>", "common", 1),
    "in fields": (STRICT, "<|im_end|>", "list", 3),
    "gpt-oss": (HARMONY, "<|call|>", "harmony", 1)}


THOUGHT = {"qwen3.5": "hm\n</think>\n\n", "gpt-oss": "<|channel|>analysis<|message|>hm<|end|>",
           "qwen3": "<think>\nhm\n</think>\n\n"}  # which its template writes in front of each turn


class Weather(envs.Env):
    """Two calls, then an answer."""

    multi_turn = True

    def __init__(self):
        self.got = []

    def task(self, split, index):
        return envs.Task("t0", "weather", [user("Is it warm in Ulm?")], {}, [WEATHER])

    def num_tasks(self, split):
        return 1

    def start(self, task, seed):
        return WeatherEpisode(self)


class WeatherEpisode(envs.Episode):
    def __init__(self, env):
        self.env = env

    def step(self, reply, calls=None):
        self.env.got.append((reply, calls))
        if not calls:
            return over()
        return Step([{"role": "tool", "name": call["name"], "content": "warm"} for call in calls], 0.0, False,
                    False, {})


class Says(grpo_llm.HfEngine):
    """Given replies, with the log-probabilities that its model has for them."""

    def answer(self, batch):
        for request in batch:
            ids = next(self.replies)
            segment = {"prompt_ids": request.prompt_ids, "response_ids": ids}
            logprobs, _ = full_forward(self.model, types.SimpleNamespace(**segment, ids=[
                *request.prompt_ids, *ids]), 1.0)
            request.future.set_result((ids, logprobs.tolist()))


@pytest.mark.parametrize("script", RL)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_episode_with_tools_is_trained_on_what_was_seen(random_llama, name, script):
    template, eos, form, num_segments = WITH_TOOLS[name]
    tokenizer = tokenizer_of(template, eos)
    model = random_llama(vocab_size=len(tokenizer))
    args = script.Args(max_response_tokens=200, chat_template="model" if template else "plain")
    engine = Says(model, tokenizer, args)
    opening = THOUGHT.get(name, "")
    said_texts = [opening + TEXTS[form], opening + TEXTS[form], opening + "Yes."]
    engine.replies = iter([tokenizer(text + eos, add_special_tokens=False).input_ids for text in said_texts])
    env = Weather()
    with torch.no_grad():
        (r,) = script.rollout(engine, tokenizer, env, [env.task("train", 0)], 1, script.Sampling(*AT_1), args,
                              script.episode_reward)

    assert [calls for _, calls in env.got] == [[CALL], [CALL], []]
    assert (r.termination, r.correct, len(r.segments)) == ("done", 1.0, num_segments)
    if template and name not in ("in fields", "gpt-oss"):
        assert '"weather"' in r.prompt_text  # the tools reach the prompt
    seen = "".join(tokenizer.decode(segment.ids) for segment in r.segments)
    assert seen.count("warm") == (3 if num_segments > 1 else 2) + r.prompt_text.count("warm") * num_segments
    for segment in r.segments:
        with torch.no_grad():
            expected, _ = full_forward(model, segment, 1.0)
        expected *= torch.tensor(segment.response_mask)
        assert segment.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-9)


PARSED = {  # a reply, its calls, its text
    "none": ("It is warm.", [], "It is warm."),
    "one": ("Wait." + TEXTS["common"], [CALL], "Wait."),
    "two": (TEXTS["common"] * 2, [CALL, CALL], ""),
    "bare": (TEXTS["bare"], [CALL], ""),
    "bare with a tag": ("<|python_tag|>" + TEXTS["bare"], [CALL], ""),
    "cut off": ("<tool_call>" + json.dumps(CALL)[:-3], [], "<tool_call>" + json.dumps(CALL)[:-3]),
    "without its end": ("<tool_call>" + json.dumps(CALL), [CALL], ""),
    "in a thought": (f"<think>{TEXTS['common']}</think>no", [], "no"),
    "between two thoughts": (f"<think>a</think>{TEXTS['common']}<think>b</think>no", [], "no"),
    "behind a thought that ends again": (f"a</think>{TEXTS['common']}</think>no", [], "no"),
    "thought first": (f"<think>a</think>{TEXTS['common']}", [CALL], ""),
    "arguments as text": (TEXTS["common"].replace('{"town": "Ulm"}', r'"{\"town\": \"Ulm\"}"'), [CALL], ""),
    "one of two": (TEXTS["common"] + "<tool_call>{</tool_call>", [CALL], "<tool_call>{</tool_call>"),
    "an answer that is JSON": ('{"town": {"name": "Ulm"}}', [], '{"town": {"name": "Ulm"}}'),
    "no object": ("<tool_call>[1]</tool_call>", [], "<tool_call>[1]</tool_call>"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [], '<tool_call>{"arguments": {}}</tool_call>'),
    "arguments of text": ('<tool_call>{"name": "a", "arguments": "b"}</tool_call>', [],
                          '<tool_call>{"name": "a", "arguments": "b"}</tool_call>'),
    "deep": ("<tool_call>" + "[" * 100_000, [], "<tool_call>" + "[" * 100_000),
}


def test_each_answer_has_the_id_of_its_call():
    """In the order of the calls, in every turn; what has an id keeps it. One call of the first turn has no
    answer, and those of the last have theirs in another order.
    """
    tokenizer = tokenizer_of(STRICT)
    messages, expected = [user("hi")], []
    for turn, answered in enumerate(("01", "012", "201")):
        calls = [{"type": "function", "function": {"name": f"f{turn}{k}", "arguments": {}}} for k in range(3)]
        answers = [{"role": "tool", "name": f"f{turn}{k}", "content": f"says {turn}{k}"} for k in answered]
        if turn == 1:
            calls[1]["id"] = answers[1]["tool_call_id"] = "call_abcd"
        if turn == 2:
            for call in calls:
                call["id"] = "of " + call["function"]["name"]
            for answer in answers:
                answer["tool_call_id"] = "of " + answer["name"]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]
        expected += [answer["name"] for answer in answers]
    ready = chat.for_template(messages, tokenizer)
    said = [call for message in ready for call in message.get("tool_calls", [])]
    id_of = {call["function"]["name"]: call["id"] for call in said}
    answers = [message for message in ready if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in answers] == [id_of[name] for name in expected]
    assert len({*id_of.values()}) == 9 and id_of["f11"] == "call_abcd"
    assert not any("id" in call for call in messages[1]["tool_calls"])  # what was given stays


@pytest.mark.parametrize("name", PARSED)
def test_calls_are_found_in_the_common_form(name):
    reply, calls, text = PARSED[name]
    message, found = chat.parse_reply(reply, "", tokenizer_of(CLOSED), [WEATHER])
    assert found == calls and message["content"] == text
    assert [call["function"] for call in message.get("tool_calls", [])] == calls


def test_a_form_that_is_not_known_is_read_by_the_tokenizers_response_template():
    """Transformers' parse_response; the prompt opens the thought."""
    tokenizer = tokenizer_of(OPENS.replace("<tool_call>", "<<").replace("</tool_call>", ">>"))
    parts = dict(weather=Weather(), world=World(over))  # of which one has functions to call
    mixed = [Mixture(names, {}, parts.get) for names in ("weather,world", "world,weather")]
    for env in (parts["weather"], *mixed):
        with pytest.raises(BadInput, match=r"--chat-template mine: .* a form that is not known, '.*<<"):
            chat.check_calls(env, tokenizer, "mine")
    chat.check_calls(parts["world"], tokenizer, "mine")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": {
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {"open_pattern": r"\s*<<", "close": ">>", "repeats": True, "content": "json",
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"}}}
    chat.check_calls(Weather(), tokenizer, "mine")
    prompt = grpo_llm.render([user("hi")], tokenizer, grpo_llm.Args(), [WEATHER])
    call = f"<<{json.dumps(CALL)}>>"
    message, calls = chat.parse_reply("hm\n</think>\n\nOne moment." + call, prompt, tokenizer, [WEATHER])
    assert calls == [CALL] and message["content"].strip() == "One moment." and "hm" in message["thinking"]
    message, calls = chat.parse_reply("hm\n</think>\n\n" + call * 20, prompt, tokenizer, [WEATHER])
    assert calls == [one["function"] for one in message["tool_calls"]] == [CALL] * 16  # no more are read
    for broken in (call[:30], "<<" * 50, "\0", "hm"):
        message, calls = chat.parse_reply(broken, prompt, tokenizer, [WEATHER])
        assert calls == [] and message["content"].endswith(broken)


# Rewards


@pytest.mark.parametrize("script", RL)
@pytest.mark.parametrize(("body", "got"), [
    ("None", "None"), ("'1.0'", "'1.0'"), ("[0.5, 'x']", r"\[0.5, 'x'\]")])
def test_a_reward_that_is_no_number_is_one_line_with_the_task(script, body, got, tmp_path):
    (tmp_path / "reward.py").write_text(f"def score(r):\n    return {body}\n")
    name = f"{tmp_path}/reward.py:score"
    says = rf"--reward-fn {name}: expected a number for task \S+,.* got {got} "
    with pytest.raises(SystemExit, match=says):
        train(script, tmp_path / "run", reward_fn=name)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    def group(*rewards):
        rollouts = []
        for number, reward in enumerate(rewards):
            segment = grpo_llm.Segment([1], [2], [1], [0.0])
            task = envs.Task("t", "s", [], {})
            rollouts.append(grpo_llm.Rollout(task, (0, number), "", [1], segments=[segment], reward=reward,
                                             termination="done"))
        return grpo_llm.trainable_groups(rollouts, grpo_llm.Args(group_size=len(rewards)))

    assert group(0.1 + 0.2, 0.3) == [] and len(group(0.3, 0.3 + 1e-6)) == 1
