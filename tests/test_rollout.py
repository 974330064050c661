"""Sampling and rollouts of the language model scripts: tokens, masks and numbers, on very small models."""

import asyncio
import collections
import copy
import dataclasses
import gc
import itertools
import json
import math
import os
import random
import signal
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import envs
import grpo_llm
import ppo_llm
import sft
from envs import Step
from grpo_llm import Args, Segment
from tests.run_folders import asked_once, full_forward, in_time, records, slow_but, until

OF_PPO_SLOW = [grpo_llm, pytest.param(ppo_llm, marks=pytest.mark.slow)]  # code that both have to the letter
PROBLEMS = ["6 18 14 -> 38 :", "3 -> :", "19 2 2 11 -> 7 :", "1 1 -> 2 :", "20 20 20 20 20 -> 60 :"]


def test_greedy_decoding_equals_that_of_transformers(countdown_tiny, random_llama):
    trained, tokenizer = copy.deepcopy(countdown_tiny[0]).double(), countdown_tiny[1]
    problems = [tokenizer("<bos> " + text).input_ids for text in PROBLEMS]
    problems += [problems[1], problems[0], [tokenizer.bos_token_id]]

    rng = random.Random(1)  # random weights write any token, and their replies end anywhere
    noise = [[rng.randrange(3, 6) for _ in range(rng.randrange(1, 7))] for _ in range(12)]

    torch.manual_seed(3)
    sliding = Qwen2ForCausalLM(Qwen2Config(  # its layers bring a cache of their own each
        vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"],
    )).double().eval()

    for model, prompts, limit in ((trained, problems, 16), (sliding, noise[:4], 24),
                                  (random_llama(vocab_size=6), noise, 30)):
        replies = grpo_llm.generate(model, prompts, limit, 0.0, [2], range(len(prompts)))
        for prompt, (ids, logprobs) in zip(prompts, replies, strict=True):  # transformers takes one at a time
            output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=limit,
                                    pad_token_id=tokenizer.pad_token_id)
            assert ids == output[0, len(prompt):].tolist()
            with torch.no_grad():  # those of its own prompt's full forward
                expected, _ = full_forward(model, Segment(prompt, ids), 1.0)
            assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert len({len(ids) for ids, _ in replies}) > 4


def test_a_reply_does_not_depend_on_what_is_sampled_beside_it(countdown_tiny):
    model, tokenizer = countdown_tiny
    prompts = [tokenizer(f"<bos> {n} 14 8 -> 26 :").input_ids for n in range(1, 13)]
    seeds = [10**9 * n for n in range(12)]
    together = grpo_llm.generate(model, prompts, 16, 1.0, [2], seeds)
    for prompt, seed, (ids, logprobs) in zip(prompts, seeds, together, strict=True):
        ((alone, same),) = grpo_llm.generate(model, [prompt], 16, 1.0, [2], [seed])
        assert alone == ids and same == pytest.approx(logprobs, abs=1e-4)
    others = grpo_llm.generate(model, prompts, 16, 1.0, [2], [seed + 1 for seed in seeds])
    assert [ids for ids, _ in others] != [ids for ids, _ in together]


@pytest.mark.parametrize("script", OF_PPO_SLOW)
def test_replies_that_are_equal_so_far_end_and_part_in_any_order(random_llama, script):
    """With six words replies share rows for long, while others end and leave theirs."""
    model = random_llama(vocab_size=6)
    for number in range(8):
        prompts = [[3, 4]] * 5 + [[4]] * 3
        seeds = [f"{number} {place}" for place in range(8)]
        together = script.generate(model, prompts, 8, 0.7, [2], seeds)
        for prompt, seed, (ids, logprobs) in zip(prompts, seeds, together, strict=True):
            ((alone, same),) = script.generate(model, [prompt], 8, 0.7, [2], [seed])
            assert alone == ids and same == pytest.approx(logprobs, abs=1e-9)


@pytest.mark.parametrize("more", [[2, 5], 5])  # a generation config may name more than the tokenizer
def test_a_reply_ends_with_its_first_eos_or_at_the_limit(random_llama, countdown_tiny, more):
    model, tokenizer = copy.deepcopy(random_llama(vocab_size=8)), countdown_tiny[1]
    model.generation_config.eos_token_id = more
    eos = grpo_llm.Engine(model, tokenizer, None).eos
    replies = [ids for ids, _ in grpo_llm.generate(model, [[3], [4, 6, 7]] * 100, 9, 1.0, eos, range(200))]
    assert {ids[-1] for ids in replies if len(ids) < 9} == {2, 5}
    for ids in replies:
        assert not {2, 5} & set(ids[:-1])
        assert len(ids) == 9 or ids[-1] in (2, 5)
    assert any(len(ids) == 9 and ids[-1] not in (2, 5) for ids in replies)


@pytest.mark.parametrize("script", OF_PPO_SLOW)
def test_replies_that_have_ended_are_counted_once_each_when_they_end(random_llama, script):
    model, told = random_llama(vocab_size=400), []
    prompts = [[5, 6, 7]] * 40 + [[7, 8]] * 40
    replies = script.generate(model, prompts, 60, 3.0, [*range(20)], range(80), told.append)
    ends = collections.Counter(len(ids) for ids, _ in replies if ids[-1] < 20)
    assert len(ends) > 15 and told == [ends[step + 1] for step in range(len(told))]
    assert len(told) == max(len(ids) for ids, _ in replies) > 30


def test_sampling_follows_the_softmax(random_llama):
    """Counts of the first two tokens against the model's own probabilities: chi-square, five deviations."""
    model = random_llama(vocab_size=7, seed=3)
    temperature, draws, prompts = 1.5, 6000, [[3], [5, 4, 6]]
    replies = grpo_llm.generate(model, [p for p in prompts for _ in range(draws)], 2, temperature, [2],
                                range(2 * draws))

    @torch.no_grad()
    def next_token(ids):
        return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()

    for start, prompt in enumerate(prompts):
        expected = {}
        for a, p in enumerate(next_token(prompt)):
            expected |= {(2,): p} if a == 2 else {
                (a, b): p * q for b, q in enumerate(next_token([*prompt, a]))}
        mine = collections.Counter(tuple(ids) for ids, _ in replies[start * draws:(start + 1) * draws])
        assert set(mine) <= set(expected)
        common = {ids: p for ids, p in expected.items() if p * draws >= 5}
        assert len(common) > 10
        chi_square = sum((mine[ids] - p * draws) ** 2 / (p * draws) for ids, p in common.items())
        assert abs(chi_square - len(common)) < 5 * math.sqrt(2 * len(common))


def test_a_token_of_probability_zero_is_never_sampled():
    no = -math.inf
    rows = torch.tensor([[no, 1.0, no, 0.5, no], [0.0, no, 0.0, no, no], [no, no, no, no, 9.0]])
    for uniform, expected in ((0.0, [1, 0, 4]), (0.3, [1, 0, 4]), (1 - 2**-53, [3, 2, 4])):
        numbers = torch.full((3,), uniform, dtype=torch.float64)
        tokens, logprobs = grpo_llm.sample(rows, torch.arange(3), 1.0, numbers)
        assert tokens.tolist() == expected and logprobs.isfinite().all()


def test_the_tail_of_a_large_vocabulary_is_sampled_in_proportion():
    """Half of the probability lies in 200,000 equal tokens: sums in float32 are off by hundreds of them."""
    logits = torch.full((1, 200_001), 0.0)
    logits[0, 0] = math.log(200_000)
    uniform = torch.tensor([0.25, 0.499, 0.50001, 0.75, 0.9, 0.99999], dtype=torch.float64)
    tokens, _ = grpo_llm.sample(logits, torch.zeros_like(uniform).long(), 1.0, uniform)
    expected = [max(0, 1 + int((u - 0.5) * 400_000)) for u in uniform.tolist()]
    assert tokens.tolist() == pytest.approx(expected, abs=2)


CHATML = ("{% for m in messages %}{% if m.role == 'martian' %}{{ raise_exception('no role') }}{% endif %}"
          "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Llama 3: contents are trimmed; its tokenizer's eos is another mark than the one that closes a turn.
LLAMA3 = ("<bos>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
          "{{ m.content | trim }}<|eot_id|>{% endfor %}"
          "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
# Qwen3: thoughts are kept since the last message of a user alone; an empty thought is added to a last reply.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {%- set thought, said = '', m.content -%}
    {%- if m.role == 'assistant' and '</think>' in said -%}
        {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
        {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- set open = m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}
    {{- '<|im_start|>' + m.role + '\n' + ('<think>\n' + thought + '\n</think>\n\n' if open else '') -}}
    {{- said + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
UNTHINKING = QWEN3.replace("assistant\n' -}}", "assistant\n<think>\n\n</think>\n\n' -}}")

AT_1 = grpo_llm.Sampling(1.0, (1, "train"))
GREEDY = grpo_llm.Sampling(0.0, (1, "train"))


def byte_tokenizer(template=None, eos="<|im_end|>", alphabet=""):
    """One token per byte, or per letter of the alphabet, and the marks of chat templates."""
    core = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = core.pre_tokenize_str(alphabet)[0][0] if alphabet else pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(set(letters)))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = core, decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", "<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>",
                                        additional_special_tokens=marks, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template or "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    return tokenizer


def reply_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]


class Speaker(grpo_llm.Engine):
    """Says what `say` replies to the text so far: a text or ids. A token's log-probability names its place.

    at_once: so many it answers at a time; 0: all, once every episode in play waits.
    """

    def __init__(self, tokenizer, say, at_once=0):
        self.tokenizer, self.say, self.at_once = tokenizer, say, at_once
        self.eos, self.asked, self.most = [tokenizer.eos_token_id], [], 0

    async def serve(self):
        while True:
            waiting = await self.next_requests(of_all=not self.at_once)
            self.most = max(self.most, len(waiting))
            answered = waiting[:self.at_once or None]
            self.requests = waiting[len(answered):]
            for request in answered:
                self.answer(request)
            await asyncio.sleep(0)
            if self.requests:
                self.changed.set()

    def answer(self, request):
        self.asked.append(request)
        reply = self.say(self.tokenizer.decode(request.prompt_ids))
        if isinstance(reply, Exception):
            raise reply
        ids = reply_ids(self.tokenizer, reply) if isinstance(reply, str) else reply
        start = len(request.prompt_ids)
        request.future.set_result((list(ids), [-(start + t) / 100 for t in range(len(ids))]))


def check_tokens(rollouts):
    """All that was sampled is where it was sampled, with its log-probability; nothing else is trained on."""
    for r in (member for parent in rollouts for member in parent.family):
        assert len(r.turns) == sum(m.get("role") == "assistant" for m in r.messages[len(r.task.messages):])
        for number, segment in enumerate(r.segments):
            sampled = [t for n, start, end in r.turns if n == number for t in range(start, end)]
            assert [t for t, chosen in enumerate(segment.response_mask) if chosen] == sampled
            assert len(segment.response_ids) == len(segment.response_mask)
            assert segment.rollout_logprobs == [-(len(segment.prompt_ids) + t) / 100 if chosen else 0.0
                                                for t, chosen in enumerate(segment.response_mask)]


def play(tokenizer, env, replies, **flags):
    """Plays a task with given replies, one after another.  -> its Rollout, what the sampler was asked"""
    replies = iter(replies)
    engine = Speaker(tokenizer, lambda text: next(replies))
    args = Args(**dict(max_response_tokens=40) | flags)
    rollouts = grpo_llm.rollout(engine, tokenizer, env, [env.task("train", 0)], 1, AT_1, args,
                                grpo_llm.episode_reward)
    assert next(replies, None) is None
    check_tokens(rollouts)
    return rollouts[0], [request.prompt_ids for request in engine.asked]


class World(envs.Env):
    """Its episodes do what `behave(episode, reply)` says; it knows which of them are open."""

    def __init__(self, behave, on_start=None, blocking=False):
        self.behave, self.on_start, self.blocking = behave, on_start, blocking
        self.judge = lambda episode, reason: None
        self.lock, self.attempts, self.started, self.closed, self.most = threading.Lock(), [], [], [], 0

    def num_tasks(self, split):
        return 1000

    def task(self, split, index):
        return envs.Task(f"t{index}", "world", [{"role": "user", "content": f"<{index}>"}], {})

    def start(self, task, seed=1):
        self.attempts.append(task.id)
        if self.on_start and "/" not in task.id:  # a step that calls sub-agents has them all
            self.on_start(self, task)
        with self.lock:
            self.started.append(task.id)
            self.most = max(self.most, len(self.started) - len(self.closed))
        return Attempt(self, task)

    def ask(self, *names):
        """A step that calls sub-agents."""
        tasks = [envs.Task(name, "world", [{"role": "user", "content": f"<{name}>"}], {}) for name in names]
        never = [{"role": "user", "content": "never read"}]
        return Step(never, 100.0, False, False, {}, tuple((task, self.start(task)) for task in tasks))

    @property
    def all_closed_once(self):
        return len(self.closed) == len(set(self.closed)) == len(self.started)


class Attempt(envs.Episode):
    def __init__(self, world, task):
        self.world, self.task, self.replies, self.ended = world, task, [], threading.Event()
        self.attempt = world.attempts.count(task.id)

    def step(self, reply):
        self.replies.append(reply)
        return self.world.behave(self, reply)

    def resume(self, replies):
        return self.world.behave(self, replies)

    def end(self, reason):
        return self.world.judge(self, reason)

    def close(self):
        with self.world.lock:
            self.world.closed.append(self)
        self.ended.set()
        raise RuntimeError("whatever goes wrong here is of no consequence")


def go_on(reward=0.0):
    return Step([{"role": "user", "content": "!"}], reward, False, False, {"correct": 0.0})


def over(reward=1.0, correct=1.0):
    return Step([], reward, True, False, {"correct": correct})


def three_turns(episode, reply):
    return over() if len(episode.replies) == 1 + int(episode.task.id[1:]) % 3 else go_on(0.25)


@pytest.fixture(params=[(0, False), (2, True)], ids=["together", "continuous-blocking"])
def visit(request):
    """Plays tasks of a world. A reply is r and the number of those before it: r0, r1. -> Rollouts"""
    def visit(world, num_tasks=1, num_samples=1, say=lambda text: f"r{text.count('!')}", **flags):
        args = Args(**dict(chat_template="plain", max_response_tokens=40) | flags)
        tokenizer, tasks = byte_tokenizer(), [world.task("train", n) for n in range(num_tasks)]
        world.blocking = request.param[1] or world.blocking
        visit.engine = Speaker(tokenizer, say, request.param[0])
        rollouts = grpo_llm.rollout(visit.engine, tokenizer, world, tasks, num_samples, GREEDY, args,
                                    grpo_llm.episode_reward)
        check_tokens(rollouts)
        return rollouts
    return visit


blocking_alone = pytest.mark.parametrize("visit", [(2, True)], indirect=True, ids=["blocking"])


def texts(r):
    return [m["content"] for m in r.messages]


def kept(r):
    fields = {field.name: getattr(r, field.name) for field in dataclasses.fields(r)}
    return fields | dict(children=[kept(child) for child in r.children])


@pytest.fixture(autouse=True)
def noise(monkeypatch):
    """Nothing that asyncio or a thread complains of after the fact."""
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setattr(asyncio.log.logger, "handle", said.append)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # a thread of its own
    yield
    gc.collect(1)
    assert not said


@pytest.mark.parametrize("template", [CHATML, None, CHATML.replace("<|im_end|>", "<|eot_id|>")],
                         ids=["chatml", "plain", "other-mark"])
def test_two_turns_become_one_segment_with_exact_ids_masks_and_logprobs(template):
    tokenizer, plain = byte_tokenizer(template), template is None
    replies = [reply_ids(tokenizer, text) for text in ("no", "yes")]
    replies[0].insert(2, tokenizer.convert_tokens_to_ids("<bos>"))  # kept as it was sampled
    world = World(lambda episode, reply: over() if reply == "yes" else go_on(0.25))
    r, prompts = play(tokenizer, world, replies, chat_template="plain" if plain else "model")

    assert (r.termination, r.reward, r.correct, len(r.steps)) == ("done", 1.25, 1.0, 2)
    assert texts(r) == ["<0>", "no<bos>", "!", "yes"]
    (segment,) = r.segments
    assert [segment.response_ids[start:end] for _, start, end in r.turns] == replies
    assert prompts == [segment.prompt_ids, segment.ids[:-len(replies[1])]]

    # What was read and said is the template's rendering of it all, up to the last eos and but for the odd id.
    segment.response_ids.pop(2)
    eos = tokenizer.eos_token
    whole = (f"<0>no{eos}!yes{eos}" if plain
             else tokenizer.apply_chat_template(r.messages, tokenize=False).rstrip().replace("<bos>", ""))
    if "<|eot_id|>" in whole:  # which the reply's own eos does not replace
        whole = whole.replace("no", "no" + eos).replace("yes<|eot_id|>", "yes" + eos)
    assert segment.ids == tokenizer(whole, add_special_tokens=plain).input_ids
    assert tokenizer.decode(segment.ids) == whole


@pytest.mark.parametrize("said, segments", [("", 2), ("no", 1)])
def test_text_that_a_template_writes_before_the_end_of_a_reply_forks(said, segments):
    tokenizer = byte_tokenizer(CHATML.replace("{{ m.content }}", "{{ m.content or '<think></think>' }}"))
    world = World(lambda episode, reply: over() if reply == "yes" else go_on())
    r, _ = play(tokenizer, world, [reply_ids(tokenizer, text) for text in (said, "yes")])
    whole = tokenizer.apply_chat_template(r.messages, tokenize=False).rstrip()
    assert len(r.segments) == segments and tokenizer.decode(r.segments[-1].ids) == whole


LETTERS = "".join(dict.fromkeys("system user assistant tool\n<0123456789>! abc"))
CONVERSATIONS = {"llama3": (LLAMA3, "<bos>"), "plain": (None, "<|im_end|>"), "qwen3": (QWEN3, "<|im_end|>"),
                 "unthinking": (UNTHINKING, "<|im_end|>")}


def conversation(episode, reply):
    """Up to five turns, answered by a user or a tool; the second one calls two sub-agents."""
    turn = len(episode.replies)
    if isinstance(reply, str) and turn == 2 and "/" not in episode.task.id:
        return episode.world.ask(f"{episode.task.id}/0", f"{episode.task.id}/1")
    role = "user" if turn % 2 else "tool"
    return over() if turn == 5 else Step([{"role": role, "content": f" a{turn}\n"}], 0.0, False, False, {})


@pytest.mark.parametrize("name", slow_but(("llama3", "qwen3"), CONVERSATIONS))
def test_every_segment_is_what_the_model_saw_and_templates_that_rewrite_fork(random_llama, name):
    """The sampler is the model itself: each segment's log-probabilities are those of its own full forward."""
    template, eos = CONVERSATIONS[name]
    tokenizer = byte_tokenizer(template, eos, LETTERS)
    *marks, eot = tokenizer.convert_tokens_to_ids(["<think>", "</think>", eos, "<|eot_id|>"])
    model = random_llama(vocab_size=len(tokenizer), seed=2, initializer_range=0.2, dtype=torch.float32)
    model.lm_head = torch.nn.Linear(16, len(tokenizer))
    with torch.no_grad():  # so that it thinks, and ends
        model.lm_head.bias.zero_()[[*marks, eot]] = torch.tensor([1.0, 2.0, 2.5, 1.0])
    model.generation_config.eos_token_id = eot
    args = Args(max_response_tokens=24, chat_template="model" if template else "plain")
    world, asked = World(conversation), {}

    class Recorder(grpo_llm.HfEngine):
        async def sample(self, prompt_ids, sampling):
            asked.setdefault(sampling.seed[2:-2], []).append(prompt_ids)  # an episode's place among all
            return await super().sample(prompt_ids, sampling)

    tasks = [world.task("train", n) for n in range(5)]
    rollouts = grpo_llm.rollout(Recorder(model, tokenizer, args), tokenizer, world, tasks, 2, AT_1, args,
                                grpo_llm.episode_reward)
    forks = thoughts = 0
    for r in (member for parent in rollouts for member in parent.family):
        seen = [r.segments[number].ids[:len(r.segments[number].prompt_ids) + start]
                for number, start, _ in r.turns]
        assert seen == asked[r.order]
        for segment in r.segments:
            assert tokenizer(tokenizer.decode(segment.prompt_ids),
                             add_special_tokens=False).input_ids == segment.prompt_ids
            with torch.no_grad():
                expected, _ = full_forward(model, segment, 1.0)
            expected *= torch.tensor(segment.response_mask)
            assert segment.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        forks += len(r.segments) - 1
        said = [m["content"] for m in r.messages if m["role"] == "assistant"]
        thoughts += sum("</think>" in text for text in said)
        for turn, (text, step) in enumerate(zip(said[:-1], r.steps, strict=False)):
            forked = r.turns[turn + 1][0] > r.turns[turn][0]
            forgets = name == "unthinking" or name == "qwen3" and "</think>" in text
            assert forked or not (forgets and step.messages[0]["role"] == "user")
        assert len(r.segments) == 1 or name == "unthinking" or name == "qwen3" and "</think>" in "".join(said)
    assert thoughts > 10 and (forks > 10) == (name in ("qwen3", "unthinking"))
    assert sum(len(r.turns) > 2 for r in rollouts) > 3 and sum(len(r.family) == 3 for r in rollouts) > 3


def test_no_more_episodes_are_in_play_than_allowed_and_results_are_the_same(visit):
    found = []
    for limit in (0, 1, 3, 99):
        world = World(three_turns)
        rollouts = visit(world, 7, 2, max_concurrent=limit)
        found.append([kept(r) for r in rollouts])
        assert world.all_closed_once and len(world.started) == 14
        assert world.most <= (limit or 14) and visit.engine.most <= (limit or 14)
        assert limit not in (1, 3) or max(world.most, visit.engine.most) == limit
    assert found[1:] == found[:1] * 3
    assert [r.task.id for r in rollouts] == [f"t{n // 2}" for n in range(14)]
    assert texts(rollouts[4]) == ["<2>", "r0", "!", "r1", "!", "r2"] and rollouts[4].reward == 1.5


def test_an_end_or_a_limit_of_the_environments_own_counts_in_the_last_turn_too(visit):
    assert [r.termination for r in visit(World(three_turns), 3, max_turns=2)] == ["done", "done", "turns"]
    (r,) = visit(World(lambda episode, reply: Step([], 0.25, False, True, {"correct": 1.0})), max_turns=1)
    assert (r.termination, r.reward, r.correct) == ("truncated", 0.25, 1.0)
    (r,) = visit(World(lambda episode, reply: Step([], 0.25, True, False, {"error": 1.0})))  # no verdict
    assert (r.termination, r.reward) == ("error", 0.0)


class Together(World):
    """Of each task's episodes some end by themselves, after one turn or two; their group earns more."""

    def score_group(self, task, conversations, steps):
        assert len(conversations) == len(steps) == 2, "one is done and one truncated"
        assert {messages[0]["content"] for messages in conversations} == {task.messages[0]["content"]}
        return [dataclasses.replace(step, reward=step.reward + 100 * int(task.id[1:]) + len(messages))
                for messages, step in zip(conversations, steps, strict=True)]


def test_the_episodes_that_ended_by_themselves_are_scored_with_those_of_their_task(visit):
    def behave(episode, reply):
        ends = {1: "done", 2: "truncated", 3: "turns"}.get(episode.attempt, "error")
        if ends == "error":
            return Step([], 0.5, True, False, {"error": 1.0})
        if ends == "turns" or ends == "done" and len(episode.replies) == 1:
            return go_on(0.25)
        return Step([], 0.5, ends == "done", ends == "truncated", {})

    rollouts = visit(Together(behave), 2, 4, max_turns=2)
    for number in range(2):
        earned = {r.termination: r.reward for r in rollouts[4 * number:4 * number + 4]}
        done = 0.25 + 0.5 + 100 * number + 4  # messages: the task, two replies, what stood between
        assert earned == dict(done=done, truncated=0.5 + 100 * number + 2, turns=0.5, error=0.0)


def test_a_cut_first_reply_is_judged_by_its_environment_and_no_reply_by_nobody(visit):
    world = World(None)
    (cut,) = visit(world, say=lambda text: [65, 66])
    assert (cut.termination, cut.reward, cut.correct, cut.retries) == ("length", 0.0, 0.0, 0)
    assert cut.segments[0].response_mask == [1, 1] and not cut.steps
    world.judge = lambda episode, reason: Step([], -1.0, False, True, {"correct": 0.0})  # a lost game
    (cut,) = visit(world, say=lambda text: [65, 66])
    assert (cut.termination, cut.reward, cut.retries) == ("length", -1.0, 0)

    world.judge = None
    (long,) = visit(world, max_context_tokens=6, max_response_tokens=4)
    assert (long.termination, long.reward, visit.engine.asked) == ("context", 0.0, [])
    assert world.all_closed_once


@pytest.mark.parametrize("reason, flags", [
    ("turns", dict(max_turns=2)),
    ("context", dict(max_context_tokens=7, max_response_tokens=4)),  # the first prompt just fits
    ("context", dict(max_turns=2, max_context_tokens=10, max_response_tokens=4)),
    ("turns", dict(max_turns=2, max_context_tokens=11, max_response_tokens=4)),  # the history just fits
    ("length", dict(say=lambda text: [65, 66] if "!" in text else "r0"))])
def test_an_episode_that_a_limit_ends_is_judged_by_its_environment(visit, reason, flags):
    asked = []

    def judge(episode, reason):
        asked.append((reason, episode.ended.is_set()))
        return Step([{"role": "user", "content": "never read"}], 0.5, False, True, {"correct": 1.0})

    world = World(lambda episode, reply: go_on(0.25))
    world.judge = judge
    for r in visit(world, 2, **flags):
        turns = 1 if reason == "context" else 2
        assert (r.termination, r.correct, len(r.turns), len(r.steps)) == (reason, 1.0, turns, turns)
        earned = 0.5 if reason == "turns" else 0.25  # the reply that was cut never reaches the environment
        assert r.reward == 0.5 + earned and "never read" not in texts(r)
    assert asked == [(reason, False)] * 2 and world.all_closed_once

    answers = [{"role": "user", "content": "\ud800"}, {"no": "role"}]  # refused by tokenizers; by templates
    world.behave = lambda episode, reply: Step([answers[len(episode.replies) - 1]], 0.25, False, False, {})
    (r,) = visit(world)
    assert (r.termination, r.retries, len(r.turns), r.reward) == ("context", 0, 2, 1.0)

    world.judge = lambda episode, reason: 1 / 0
    (r,) = visit(world, **flags)
    assert (r.termination, r.retries, r.correct) == ("error", 2, 0.0) and world.all_closed_once


@blocking_alone
def test_what_starts_as_the_time_is_up_is_closed_all_the_same(visit):
    def say(text):
        time.sleep(0.3)  # t0's reply; as it comes, t1 has been started and its time is up
        return "r"

    world = World(lambda episode, reply: go_on(), lambda world, task: task.id == "t1" and time.sleep(0.1))
    assert [r.termination for r in visit(world, 2, say=say, episode_timeout=0.2)] == ["timeout"] * 2
    until(lambda: len(world.closed) == len(world.started) == 2)
    assert world.all_closed_once

    def check(limit):
        world = World(lambda episode, reply: go_on(1.0) if len(episode.replies) == 1 else 1 / 0,
                      lambda world, task: len(world.attempts) == 2 and time.sleep(2 * limit))
        (r,) = visit(world, episode_timeout=limit)  # of its first attempt, which failed, nothing is left
        assert (r.termination, r.retries, r.reward, r.turns) == ("timeout", 1, 0.0, [])

    in_time(check)


def failing(times):
    """The first attempts at t0 fail as they start, those at t2 in the second turn; then all goes well."""
    def on_start(world, task):
        if task.id == "t0" and world.attempts.count("t0") <= times:
            raise OSError("no room")

    def behave(episode, reply):
        if episode.task.id == "t2" and episode.attempt <= times and len(episode.replies) == 2:
            raise OSError("lost")
        return three_turns(episode, reply)

    return World(behave, on_start)


def test_an_episode_whose_environment_fails_is_played_again_from_its_start_and_twice_at_most(visit, capsys):
    expected, world = visit(World(three_turns), 3), failing(1)
    rollouts = visit(world, 3)
    assert capsys.readouterr().err.count("the environment failed") == 2
    assert [r.retries for r in rollouts] == [1, 0, 1]
    assert [kept(r) | {"retries": 0} for r in rollouts] == [kept(r) for r in expected]
    assert world.attempts.count("t0") == world.started.count("t2") == 2 and world.all_closed_once

    world = failing(99)
    rollouts = visit(world, 3)
    assert capsys.readouterr().err.count("the environment failed") == 6
    assert [(r.termination, r.retries, r.reward) for r in rollouts] == [
        ("error", 2, 0.0), ("done", 0, 1.25), ("error", 2, 0.0)]
    assert world.attempts.count("t0") == world.started.count("t2") == 3 and world.all_closed_once
    assert not rollouts[2].correct


@pytest.mark.parametrize("error", [KeyboardInterrupt, grpo_llm.EngineError, MemoryError])
def test_an_interruption_closes_every_episode(visit, error):
    def behave(episode, reply):
        if error is KeyboardInterrupt and episode.task.id == "a" and len(episode.replies) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        first = episode.task.id == "t1" and isinstance(reply, str) and len(episode.replies) == 1
        return episode.world.ask("a", "b") if first else go_on()

    def say(text):
        lost = error is not KeyboardInterrupt and text.startswith("<a>") and text.count("!") == 1
        return error("gone") if lost else "r"

    world = World(behave)
    with pytest.raises(error):
        visit(world, 5, say=say, max_context_tokens=200)
    assert world.all_closed_once and len(world.started) >= 5


def family(episode, reply):
    """t0 asks three sub-agents: the first asks one of its own, the second never ends, the third fails."""
    world, task = episode.world, episode.task
    if isinstance(reply, list):
        episode.heard = reply
        return over(2.0) if task.id == "a" else go_on(0.5)
    if task.id == "t0":
        return world.ask("a", "b", "c") if len(episode.replies) == 1 else over(1.0)
    if task.id == "a":
        return world.ask("a/a")
    if task.id == "c":
        raise OSError("lost")
    return over(3.0) if task.id == "a/a" else go_on(4.0)


def test_sub_agents_are_played_first_and_their_last_replies_go_to_their_parent(visit):
    world = World(family)
    rollouts = visit(world, 2, say=lambda text: f"{text.split('>')[0]}{text.count('!')}", max_turns=2)
    r, alone = rollouts
    assert world.all_closed_once and world.attempts.count("c") == 1
    assert texts(r) == ["<0>", "<00", "!", "<01"]
    a, b, c = r.children
    (below,) = a.children
    assert (r.termination, r.reward, [s.reward for s in r.steps]) == ("done", 1.5, [0.5, 1.0])
    assert [child.termination for child in (a, below, b, c)] == ["done", "done", "turns", "error"]
    assert c.retries == 0  # its parent hears nothing of it
    heard = {e.task.id: e.heard for e in world.closed if hasattr(e, "heard")}
    assert heard == {"t0": ["<a0", "<b1", ""], "a": ["<a/a0"]}
    assert [m.task.id for m in r.family] == ["t0", "a", "a/a", "b", "c"] and not alone.children
    assert {m.reward for m in r.family} == {r.reward}
    assert not any("never read" in texts(m) for m in r.family)
    for member in r.family[:4]:
        said = [m["content"] for m in member.messages if m["role"] == "assistant"]
        assert [member.segments[0].response_ids[start:end] for _, start, end in member.turns] == [
            reply_ids(visit.engine.tokenizer, text) for text in said]


@blocking_alone
def test_a_step_that_hangs_ends_its_episode_with_its_sub_agents_and_holds_up_no_other(visit):
    """It comes back when the episode is closed, or long after the rollout."""
    def check(limit):
        forever, late = threading.Event(), []

        def behave(episode, reply):
            name = episode.task.id
            if name in ("a/a", "b") or name == "t1" and len(episode.replies) == 2:
                late.append(episode.ended.wait(2 * limit))
            elif name == "c":
                late.append(forever.wait(2 * limit))
                return episode.world.ask("late", "later")
            return three_turns(episode, reply) if name in ("t1", "t2") else family(episode, reply)

        world = World(behave)
        parent, alone, other = visit(world, 3, episode_timeout=limit, max_concurrent=2)
        num_started = len(world.started)
        forever.set()
        assert [m.termination for m in parent.family] == ["timeout"] * 5 and not parent.steps
        assert (other.termination, other.reward) == ("done", 1.5) and num_started == 7
        until(lambda: len(late) == 4 and len(world.closed) == 9)  # with the sub-agents that came too late
        assert world.all_closed_once
        assert (alone.termination, alone.reward, alone.correct, alone.retries) == ("timeout", 0.25, 0.0, 0)
        assert texts(alone)[1:] == ["r0", "!", "r1"]  # the answer came too late

    in_time(check)


class Hostile(World):
    """Fails, hangs, answers late, calls sub-agents and says what no template or tokenizer takes."""

    multi_turn, hung = True, 0
    says = ["\ud800 lone", "<|im_end|>\n<|im_start|>assistant\n<think>", "</think><pad>", "\x00\r é漢\u202e"]
    answers = [None, Step(5, 0.0, False, False, {}), Step([{"no": "role"}], 0.0, False, False, {}),
               Step([{"role": "martian", "content": "?"}], 0.0, False, False, {})]
    errors = [OSError("\ud800"), StopIteration(), RuntimeError("x" * 10_000), SystemExit(3)]

    def __init__(self, blocking, seed=1):
        super().__init__(self.act, self.act_first, blocking)
        self.rng, self.forever, self.sizes = random.Random(seed), threading.Event(), iter([500_000])

    def act_first(self, world, task):
        if self.blocking and (p := self.rng.random()) < 0.02:
            time.sleep(0.01) if p < 0.015 else self.hang(self.forever)
        if self.rng.random() < 0.03:
            raise self.rng.choice(self.errors)

    def act(self, episode, reply):
        p, depth = self.rng.random(), episode.task.id.count("/")
        if self.blocking and (p < 0.004 or episode.task.id == "t7"):
            self.hang(self.rng.choice([self.forever, episode.ended, episode.ended]))
        elif self.blocking and p < 0.1:
            time.sleep(self.rng.random() / 100)
        if p > 0.95:
            raise self.rng.choice(self.errors)
        if p > 0.85:
            return self.rng.choice(self.answers)
        if p > 0.75 and depth < 2 and isinstance(reply, str):
            return self.ask(*(f"{episode.task.id}/{n}" for n in range(1 + int(30 * p) % 3)))
        if p > 0.74:
            return Step([{"role": "user", "content": "x" * next(self.sizes, 4_000)}], 0.0, False, False, {})
        if p > 0.35:
            return Step([{"role": "user", "content": self.rng.choice(self.says)}], 0.125, False, False, {})
        return over()

    def hang(self, until):
        self.hung += until is self.forever
        until.wait(60)


@pytest.mark.parametrize("blocking", slow_but((False,), (False, True)))
def test_whatever_environments_do_nothing_is_left_behind(capsys, blocking):
    def check(limit):
        whatever_environments_do(capsys, blocking, limit)

    if blocking:
        in_time(check, (1.0, 4.0, 16.0))
    else:
        check(0)


def whatever_environments_do(capsys, blocking, limit):
    world, tokenizer, threads = Hostile(blocking), byte_tokenizer(CHATML), threading.active_count()
    args = Args(max_response_tokens=8, max_context_tokens=400, max_concurrent=50, episode_timeout=limit)
    rng = random.Random(1)
    engine = Speaker(tokenizer, lambda text: rng.choice(["r", "<think>a</think>\n\nb", "\n", [65] * 8]))
    tasks = [world.task("train", n) for n in range(25 if blocking else 10)]
    rollouts = grpo_llm.rollout(engine, tokenizer, world, tasks, 4, AT_1, args, grpo_llm.episode_reward)

    check_tokens(rollouts)
    until(lambda: world.all_closed_once and threading.active_count() <= threads + world.hung)
    world.forever.set()
    until(lambda: threading.active_count() <= threads)
    assert world.all_closed_once and "never" not in capsys.readouterr().err

    ends = collections.Counter(r.termination for r in rollouts)
    assert "done" in ends and set(ends) <= {
        "done", "truncated", "length", "context", "turns", "timeout", "error"}
    assert ("timeout" in ends) == blocking and sum(ends.values()) == 4 * len(tasks)
    assert not any(r.reward for r in rollouts if r.termination == "error")


@pytest.mark.slow
def test_half_of_a_surrogate_pair_from_the_code_of_a_reply_reaches_no_tokenizer():
    env = envs.make("repl", scenarios="tiny", prompt="short")
    said = ["print('\\ud800', llm_query('\\ud800'))", "finish()", "finish()"]
    r, _ = play(byte_tokenizer(CHATML), env, said, max_response_tokens=100, max_context_tokens=4000)
    assert [(m.termination, m.retries) for m in r.family] == [("done", 0)] * 2
    for message in r.messages[1:] + r.children[0].messages:
        message["content"].encode()


class Generations(World):
    """Each task calls a sub-agent, which calls one too. In training they tell what is no number in JSON, and
    that some have forged their results; some of the last ones fail, and some of the first in the end.
    """

    def __init__(self, evaluates):
        super().__init__(self.act)
        self.evaluates, self.ended = evaluates, 0

    def num_tasks(self, split):
        return 1000 * (split == "train" or self.evaluates)

    def act(self, episode, reply):
        depth = episode.task.id.count("/")
        if isinstance(reply, str) and depth < 2:
            return self.ask(f"{episode.task.id}/0")
        self.ended += 1
        number = int(episode.task.id.partition("/")[0][1:])
        if depth == 2 and self.ended % 4 == 0:
            return Step([], 0.0, True, False, {"correct": None})  # is refused
        if depth == 0 and number % 3 == 0:
            raise OSError("lost")
        part, right = (math.inf, -math.inf, math.nan)[self.ended % 3], float(self.ended // 3 % 2)
        told = dict(part=part, parts=[part, 1.0], suspicious=1 - right, rest={(1, 2): "", "who": {"me"}})
        told = told if self.split == "train" else dict(part=None, ended=True)
        return Step([], right / 4, True, False, {"correct": right} | told)

    def task(self, split, index):
        self.split = split
        return envs.Task(f"t{index}", "world", [{"role": "user", "content": PROBLEMS[3]}], {})


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
@pytest.mark.parametrize("told", slow_but((True,), (False, True)))
@pytest.mark.filterwarnings("error::RuntimeWarning")  # NumPy's, of infinities of both signs
def test_sub_agents_learn_what_their_parent_earns_if_told_to(script, told, monkeypatch, tmp_path):
    """And what went wrong teaches nothing; what JSON has no number for is null in what is written down."""
    monkeypatch.setattr(envs, "make", lambda name, **options: Generations(evaluates=told))
    own = dict(critic="none", gae_lambda=1.0) if script is ppo_llm else dict(epochs=2)
    with asked_once(script):
        script.main(script.Args(iterations=1, prompts_per_iteration=5, group_size=4, eval_tasks=2,
                                eval_samples=1, log_episodes=1.0, run_dir=str(tmp_path),
                                train_sub_agents=told, **own))
    means = [name for name in records(tmp_path)[-1] if name.startswith("val/")]
    lines = (tmp_path / "episodes/train_step_000001.jsonl").read_text().splitlines()
    *episodes, last = (json.loads(line, parse_constant=pytest.fail) for line in lines)

    assert last == {"summary": {
        "episodes": 20, "logged": len(episodes), "reward_sum": sum(e["reward"] for e in episodes),
        "correct_sum": sum(e["correct"] for e in episodes)}}
    assert 0 < last["summary"]["correct_sum"] < 20 == len(episodes)
    forged = [e["info"].get("suspicious", 0) for e in episodes if e["termination"] != "error"]
    assert records(tmp_path)[-1]["env/suspicious"] == pytest.approx(sum(forged) / len(forged)) and any(forged)
    assert set(means) == {f"val/world/{name}" for name in ("correct", "ended", "greedy", "pass@1") * told}

    seen = collections.Counter()
    for episode in episodes:
        members = [episode]
        for member in members:  # which grows
            members += member["sub_agents"]
            (segment,) = member["segments"]
            assert segment["response_ids"] and member["reward"] == episode["reward"]
            ends = episode["termination"], member["termination"]
            learns = member is episode or told and member["termination"] != "error"
            seen[*ends, member is episode] += 1
            if script is grpo_llm:  # what the group says of their parent
                earned = episode["segments"][0]["advantages"] or [None]  # none: all its group earn the same
                own = segment["advantages"] or [None]
                assert own == (earned[:1] * len(own) if learns else [None])
                assert segment["old_logprobs"] is None or learns and "error" not in ends
            elif learns and "error" not in ends:
                assert segment["returns"] == [episode["reward"]] * len(segment["response_ids"])
            else:
                assert segment["advantages"] is segment["returns"] is segment["old_logprobs"] is None
            if member["termination"] == "done":
                assert (member["info"]["part"], member["info"]["parts"]) == (None, [None, 1.0])
        assert [m["task_id"] for m in members] == [episode["task_id"] + "/0" * n for n in range(len(members))]
        assert len(members) == 3 or members[-1]["termination"] == "length"  # which calls nobody
    assert {("error", "error", True), *itertools.product(
        ("done", "error"), ("done", "error"), (False,))} <= set(seen)


class Duel(World):
    """A game of the policy with itself, two moves each: the other seat is sub-agents. A third are cut off."""

    def __init__(self):
        super().__init__(self.act)

    def task(self, split, index):
        return envs.Task(f"t{index}", "world", [{"role": "user", "content": PROBLEMS[3]}], {})

    def act(self, episode, reply):
        if episode.task.seat:
            return over(0.0)
        if isinstance(reply, str):
            messages = [{"role": "user", "content": PROBLEMS[4]}]
            task = envs.Task(f"{episode.task.id}/1", "world", messages, {}, seat=1)
            return Step([], 0.0, False, False, {}, ((task, self.start(task)),))
        number = int(episode.task.id[1:])
        won = float((number + episode.attempt) % 2)
        if len(episode.replies) == 1:
            return go_on()
        seats = () if number % 3 == 1 else (won, -3 * won)
        return Step([], won, True, False, {"correct": won}, seat_rewards=seats)


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_in_a_game_with_itself_each_seat_learns_what_it_earns(script, monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "make", lambda name, **options: Duel())
    own = dict(critic="none", gae_lambda=1.0) if script is ppo_llm else dict(epochs=2)
    with asked_once(script):
        script.main(script.Args(iterations=1, prompts_per_iteration=6, group_size=4, eval_tasks=1,
                                eval_samples=1, log_episodes=1.0, run_dir=str(tmp_path), **own))
    lines = (tmp_path / "episodes/train_step_000001.jsonl").read_text().splitlines()
    seen = collections.Counter()
    for episode in map(json.loads, lines[:-1]):
        has_ended = episode["termination"] == "done"
        won = episode["reward"]
        for child in episode["sub_agents"]:
            seats_learn = has_ended and int(episode["task_id"][1:]) % 3 != 1
            seen[seats_learn, won] += 1
            assert child["reward"] == (-3 * won if seats_learn else 0.0)
            (segment,) = child["segments"]
            advantages = segment["advantages"] or []
            if not seats_learn:
                assert segment["old_logprobs"] is None
            elif script is grpo_llm and advantages:
                mine = episode["segments"][0]["advantages"]
                assert advantages[0] == pytest.approx(-3 * mine[0]) and len(set(advantages)) == 1
            elif script is ppo_llm:
                assert segment["returns"] == [child["reward"]] * len(segment["response_ids"])
    assert {(True, 0.0), (True, 1.0), (False, 1.0)} <= set(seen)


@pytest.mark.slow
def test_a_blocking_environments_timing_changes_no_bit_of_a_rollout(random_llama):
    """The engine answers all together once every episode waits for it: no batch depends on who was first."""
    tokenizer = byte_tokenizer(None, alphabet=LETTERS)
    model = random_llama(vocab_size=len(tokenizer), seed=3, dtype=torch.float32)
    args = Args(max_response_tokens=12, chat_template="plain", max_concurrent=9)

    def behave(episode, reply):
        time.sleep(random.random() / 200)
        if isinstance(reply, str) and len(episode.replies) == 1 and "/" not in episode.task.id:
            return episode.world.ask(f"{episode.task.id}/0", f"{episode.task.id}/1")
        return over() if len(episode.replies) > 1 + len(reply) % 3 else go_on()

    found = []
    for blocking in (True, True, False):
        world, engine = World(behave, blocking=blocking), grpo_llm.HfEngine(model, tokenizer, args)
        engine.eos = [*range(0, len(tokenizer), 2)]  # whatever ends a reply by the limit, half go on
        rollouts = grpo_llm.rollout(engine, tokenizer, world, [world.task("train", n) for n in range(8)], 2,
                                    AT_1, args, grpo_llm.episode_reward)
        found.append([[member.segments for member in r.family] for r in rollouts])
    assert found[0] == found[1] == found[2] and sum(map(len, found[0])) > 20


@pytest.mark.parametrize("script", [grpo_llm, ppo_llm])
def test_evaluation_counts_correct_replies_by_source(script, countdown_tiny):
    env = envs.make("countdown", difficulty="true", min_operands="2", max_operands="3")
    args = script.Args(eval_tasks=6, eval_samples=4, max_response_tokens=16, eval_temperature=0.5)
    tasks, rng = [env.task("test", i) for i in range(6)], random.Random(1)
    drawn = [[rng.random() < 0.3 for _ in range(4)] for _ in tasks]
    greedy = [rng.random() < 0.5 for _ in tasks]

    right = [[*zip([task] * 4, row, strict=True)] for task, row in zip(tasks, drawn, strict=True)]
    plan = [*sum(right, []), *zip(tasks, greedy, strict=True)]
    replies = iter([env.solution(task) if solved else "1 + 1 = 2" for task, solved in plan])
    engine = Speaker(countdown_tiny[1], lambda text: next(replies))
    metrics, samples = script.evaluate(engine, countdown_tiny[1], env, args, script.episode_reward)
    assert [request.sampling.temperature for request in engine.asked] == [0.5] * 24 + [0.0] * 6
    assert len(samples) == 24

    for source in ("countdown/2", "countdown/3"):
        mine = [i for i, task in enumerate(tasks) if task.source == source]
        found = {name: metrics[f"val/{source}/{name}"] for name in ("pass@1", "correct", "pass@4", "greedy")}
        share = sum(sum(drawn[i]) for i in mine) / (4 * len(mine))
        assert found == pytest.approx({
            "pass@1": share, "correct": share, "pass@4": sum(any(drawn[i]) for i in mine) / len(mine),
            "greedy": sum(greedy[i] for i in mine) / len(mine)})


@pytest.mark.parametrize(("name", "options"), [
    ("arcagi3", dict(game_ids="lights", style="short", downsample=8, first_screen=False)),
    ("openspiel,arcagi3", {
        "openspiel.cases": "hex(board_size=3)", "openspiel.mode": "game", "openspiel.style": "short",
        "arcagi3.game_ids": "maze,collect", "arcagi3.style": "short", "arcagi3.downsample": 8}),
    ("countdown", {})])
def test_a_demonstration_is_learned_as_a_rollout_that_says_the_same(name, options):
    env, ends = envs.make(name, **options), collections.Counter()
    tokenizer = sft.new_tokenizer(env.vocabulary)
    for index, limit in itertools.product(range(3), (90, 180, 400, 4000)):
        task = env.task("train", index)
        messages = env.demonstration(task)
        said = [[*tokenizer(m["content"]).input_ids, tokenizer.eos_token_id] for m in messages
                if m["role"] == "assistant"]
        # The rollout leaves room for its longest reply: both cut at the same turns if none is shorter.
        args = Args(seed=0, max_response_tokens=max(map(len, said)), max_context_tokens=limit)
        replies = iter(said)
        engine = Speaker(tokenizer, lambda text, replies=replies: next(replies))
        r, = grpo_llm.rollout(engine, tokenizer, env, [task], 1, AT_1, args, grpo_llm.episode_reward)
        rows = sft.encode_demonstration(messages, len(task.messages), tokenizer, sft.Args(max_length=limit),
                                        [tokenizer.eos_token_id])
        ends[r.termination, len(r.segments) > 1] += 1
        if r.termination == "context":
            assert max(len(ids) for ids, _ in rows) > limit  # sft.py refuses it
            continue
        assert r.termination == "done" and r.messages == messages
        assert rows == [(s.ids, [0] * len(s.prompt_ids) + s.response_mask) for s in r.segments]
        assert [i for ids, mask in rows for i, m in zip(ids, mask, strict=True) if m] == sum(said, [])
        assert max(len(s.ids) for s in r.segments) <= limit
        for asked, (number, start, _) in zip(engine.asked, r.turns, strict=True):
            assert asked.prompt_ids == r.segments[number].ids[:len(r.segments[number].prompt_ids) + start]
    assert ends["done", False] and (ends["done", True] or not env.multi_turn)
