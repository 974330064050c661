"""Sampling and rollouts of grpo_llm.py and ppo_llm.py: tokens, masks and numbers, on very small models."""

import copy
import dataclasses
import json
import math
import random
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import envs
import grpo_llm
import ppo_llm
import sft
from envs import BadInput, Step
from grpo_llm import Args, Rollout, Segment

PROBLEMS = ["6 18 14 -> 38 :", "3 -> :", "19 2 2 11 -> 7 :", "1 1 -> 2 :", "20 20 20 20 20 -> 60 :"]
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# As Qwen3's does: the thoughts of earlier turns are left out.
FORGETFUL = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' and not loop.last %}"
                                              "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
                                              "{% else %}{{ m.content }}{% endif %}")


# Sampling


def problem_prompts(tokenizer, texts=PROBLEMS):
    return [tokenizer("<bos> " + text).input_ids for text in texts]


def check_logprobs(model, prompts, replies, temperature):
    """Each reply's log-probabilities are those of its own prompt's full forward."""
    with torch.no_grad():
        for prompt, (ids, logprobs) in zip(prompts, replies, strict=True):
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0].double()
            expected = (logits / temperature).log_softmax(-1)[len(prompt) - 1:-1]
            expected = expected[torch.arange(len(ids)), ids].tolist()
            assert logprobs == pytest.approx(expected, abs=1e-5)


def one_by_one(model, tokenizer, prompt, limit):
    """Greedy decoding by transformers itself, one prompt at a time."""
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=limit,
                            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                            pad_token_id=tokenizer.pad_token_id)
    return output[0, len(prompt):].tolist()


def test_greedy_decoding_equals_that_of_transformers(countdown_tiny, random_llama):
    model, tokenizer = copy.deepcopy(countdown_tiny[0]).double(), countdown_tiny[1]
    prompts = problem_prompts(tokenizer)
    prompts += [prompts[1], prompts[0], [tokenizer.bos_token_id]]
    replies = grpo_llm.generate(model, prompts, 16, 0.0, tokenizer)
    assert [ids for ids, _ in replies] == [one_by_one(model, tokenizer, p, 16) for p in prompts]
    check_logprobs(model, prompts, replies, 1.0)
    # Random weights write any token, and their replies end anywhere.
    model = random_llama(vocab_size=6)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 6) for _ in range(rng.randrange(1, 7))] for _ in range(40)]
    replies = grpo_llm.generate(model, prompts, 30, 0.0, tokenizer)
    assert [ids for ids, _ in replies] == [one_by_one(model, tokenizer, p, 30) for p in prompts]
    assert len({len(ids) for ids, _ in replies}) > 4
    check_logprobs(model, prompts, replies, 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_replies_that_part_or_end_do_not_mix_up_the_others(random_llama, countdown_tiny, temperature):
    """Replies part and end one after another, so rows move many times; none may read another's cache."""
    model, tokenizer = random_llama(vocab_size=12), countdown_tiny[1]
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 12) for _ in range(rng.randrange(1, 9))] for _ in range(20)] * 3
    prompts += [prompts[0]] * 40
    torch.manual_seed(1)
    replies = grpo_llm.generate(model, prompts, 60, temperature, tokenizer)
    lengths = [len(ids) for ids, _ in replies]
    assert len(set(lengths)) > 15 and max(lengths) > 40
    check_logprobs(model, prompts, replies, temperature)


def test_a_reply_ends_with_its_first_eos_or_at_the_limit(random_llama, countdown_tiny):
    model, tokenizer = copy.deepcopy(random_llama(vocab_size=8)), countdown_tiny[1]
    model.generation_config.eos_token_id = [2, 5]  # a generation config may name more than the tokenizer
    torch.manual_seed(1)
    replies = [ids for ids, _ in grpo_llm.generate(model, [[3], [4, 6, 7]] * 100, 9, 1.0, tokenizer)]
    assert {ids[-1] for ids in replies if len(ids) < 9} == {2, 5}
    for ids in replies:
        assert not {2, 5} & set(ids[:-1])
        assert len(ids) == 9 or ids[-1] in (2, 5)
    assert any(len(ids) == 9 and ids[-1] not in (2, 5) for ids in replies)


def test_sampling_follows_the_softmax(random_llama, countdown_tiny):
    """Counts of the first two tokens against the model's own probabilities: chi-square, five deviations."""
    model, tokenizer = random_llama(vocab_size=7, seed=3), countdown_tiny[1]
    temperature, draws, prompts = 1.5, 6000, [[3], [5, 4, 6]]
    torch.manual_seed(1)
    replies = grpo_llm.generate(model, [p for p in prompts for _ in range(draws)], 2, temperature, tokenizer)
    for start, prompt in enumerate(prompts):
        mine = [tuple(ids) for ids, _ in replies[start * draws:(start + 1) * draws]]
        expected = {}
        with torch.no_grad():
            def next_token(ids):
                return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()

            for a, p in enumerate(next_token(prompt)):
                if a == 2:
                    expected[a,] = p
                else:
                    expected |= {(a, b): p * q for b, q in enumerate(next_token([*prompt, a]))}
        assert set(mine) <= set(expected)
        assert sum(expected.values()) == pytest.approx(1.0)
        common = {ids: p for ids, p in expected.items() if p * draws >= 5}
        assert len(common) > 10
        chi_square = sum((mine.count(ids) - p * draws) ** 2 / (p * draws) for ids, p in common.items())
        assert abs(chi_square - len(common)) < 5 * math.sqrt(2 * len(common))


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform):
    no = -math.inf
    rows = torch.tensor([[no, 1.0, no, 0.5, no], [0.0, no, 0.0, no, no], [no, no, no, no, 9.0]])
    tokens, logprobs = grpo_llm.sample(rows, 1.0, torch.full((3,), uniform, dtype=torch.float64))
    assert logprobs.isfinite().all()
    assert tokens.tolist() == ([1, 0, 4] if uniform < 0.5 else [3, 2, 4])


def test_the_tail_of_a_large_vocabulary_is_sampled_in_proportion():
    """Half of the probability lies in 200,000 equal tokens: sums in float32 are off by hundreds of them."""
    logits = torch.full((1, 200_001), 0.0)
    logits[0, 0] = math.log(200_000)
    uniform = torch.tensor([0.25, 0.499, 0.50001, 0.75, 0.9, 0.99999], dtype=torch.float64)
    tokens, _ = grpo_llm.sample(logits.expand(len(uniform), -1), 1.0, uniform)
    expected = [max(0, 1 + int((u - 0.5) * 400_000)) for u in uniform.tolist()]
    assert tokens.tolist() == pytest.approx(expected, abs=2)


# Rollouts with a scripted sampler


@pytest.fixture(params=[grpo_llm, ppo_llm], ids=["grpo", "ppo"])
def trainer(request):
    """The script whose rollout is played. What the two hold in common they hold to the letter."""
    return request.param


@pytest.fixture(scope="module")
def pool():
    threads = grpo_llm.EnvThreads(4)
    yield threads
    threads.close()


@pytest.fixture
def two_turn():
    return envs.make("tests/two_turn.py:TwoTurn")


def byte_tokenizer(template):
    """One token per byte and ChatML's marks, <|im_end|> as eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<end>"], clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


class Script:
    """In the place of a script's generate: given replies, in order; and what it was asked to continue."""

    def __init__(self, *replies):
        self.replies, self.prompts = list(replies), []

    def __call__(self, model, prompts, max_new_tokens, temperature, tokenizer, seeds):
        self.prompts += [list(prompt) for prompt in prompts]
        replies = [list(self.replies.pop(0)) for _ in prompts]
        assert all(len(ids) <= max_new_tokens for ids in replies)
        # The n-th reply's tokens have the log-probabilities -n.01, -n.02, ...
        done = len(self.prompts) - len(prompts)
        return [(ids, [-(done + n + 1) - (t + 1) / 100 for t in range(len(ids))])
                for n, ids in enumerate(replies)]

    @staticmethod
    def logprobs(reply, length):
        return [-reply - (t + 1) / 100 for t in range(length)]


@pytest.fixture
def play(trainer, monkeypatch, pool):
    """Plays a task with scripted replies. -> Rollouts"""
    def play(model, tokenizer, env, script, num_samples=1, score=None, **flags):
        monkeypatch.setattr(trainer, "generate", script)
        args = trainer.Args(**dict(max_response_tokens=40) | flags)
        engine = trainer.HfEngine(model, tokenizer, args)
        return trainer.rollout(engine, tokenizer, env, [env.task("train", 0)], num_samples, 1.0, args, pool,
                               score or trainer.episode_reward)
    return play


def reply_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]


def wrong(env, index=0):
    """A well-formed wrong reply."""
    a, b, *_ = env.task("train", index).data["nums"]
    return f"{a} + {b} = {a + b}"


def test_two_turn_answers_a_wrong_reply_with_the_problem(two_turn):
    task = two_turn.task("train", 0)
    episode = two_turn.start(task, 1)
    first = episode.step("no")
    assert (first.messages, first.reward, first.terminated) == (task.messages, 0.0, False)
    second = episode.step(two_turn.solution(task))
    assert (second.messages, second.reward, second.terminated) == ([], 1.0, True)
    assert two_turn.start(task, 1).step(two_turn.solution(task)).terminated
    failed = two_turn.start(task, 1)
    failed.step("no")
    assert failed.step("no").terminated


@pytest.mark.parametrize("words", [True, False], ids=["word-level", "chatml"])
def test_two_turns_become_one_segment_with_exact_ids_masks_and_logprobs(
        play, countdown_tiny, two_turn, words):
    model = countdown_tiny[0]
    tokenizer = countdown_tiny[1] if words else byte_tokenizer(CHATML)
    task = two_turn.task("train", 0)
    texts = [wrong(two_turn), two_turn.solution(task)]
    sampled = [reply_ids(tokenizer, text) for text in texts]
    script = Script(*sampled)
    (r,) = play(model, tokenizer, two_turn, script)
    assert (r.termination, r.reward, r.correct, len(r.steps)) == ("done", 1.0, 1.0, 2)
    assert [(m["role"], m["content"]) for m in r.messages] == [
        ("user", task.messages[0]["content"]), ("assistant", texts[0]),
        ("user", task.messages[0]["content"]), ("assistant", texts[1])]
    (segment,) = r.segments
    prompt = tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
    assert segment.prompt_ids == tokenizer(prompt).input_ids
    answer = len(segment.response_ids) - len(sampled[0]) - len(sampled[1])
    assert segment.response_mask == [1] * len(sampled[0]) + [0] * answer + [1] * len(sampled[1])
    assert segment.rollout_logprobs == (Script.logprobs(1, len(sampled[0])) + [0.0] * answer
                                        + Script.logprobs(2, len(sampled[1])))
    # What was read and said is the template's rendering of the whole conversation, up to the last eos.
    whole = tokenizer.apply_chat_template(r.messages, tokenize=False).rstrip()
    assert segment.ids == tokenizer(whole).input_ids
    if not words:
        assert tokenizer.decode(segment.ids) == whole
    # The second reply was sampled after exactly these tokens.
    assert script.prompts == [segment.prompt_ids, segment.ids[:-len(sampled[1])]]


def test_replies_are_kept_as_the_ids_that_were_sampled(play, countdown_tiny, two_turn):
    """A reply with a special token inside: its text gives other ids, and those must not come back."""
    model, tokenizer = countdown_tiny
    odd = reply_ids(tokenizer, wrong(two_turn))
    odd.insert(2, tokenizer.bos_token_id)
    right = reply_ids(tokenizer, two_turn.solution(two_turn.task("train", 0)))
    script = Script(odd, right)
    (r,) = play(model, tokenizer, two_turn, script)
    assert r.messages[1]["content"] == wrong(two_turn)
    assert reply_ids(tokenizer, r.messages[1]["content"]) != odd
    (segment,) = r.segments
    assert segment.response_ids[:len(odd)] == odd
    assert script.prompts[1][:len(segment.prompt_ids) + len(odd)] == segment.prompt_ids + odd


def test_a_turn_closed_by_a_mark_that_is_not_the_tokenizers_eos_is_not_closed_twice(
        play, countdown_tiny, two_turn):
    """Gemma and Phi: the generation config names the closing mark as an eos, the tokenizer another one."""
    model, tokenizer = copy.deepcopy(countdown_tiny[0]), byte_tokenizer(CHATML.replace("<|im_end|>", "<end>"))
    end = tokenizer.convert_tokens_to_ids("<end>")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    texts = [wrong(two_turn), two_turn.solution(two_turn.task("train", 0))]
    sampled = [reply_ids(tokenizer, text)[:-1] + [end] for text in texts]
    (r,) = play(model, tokenizer, two_turn, Script(*sampled))
    assert r.correct
    whole = tokenizer.apply_chat_template(r.messages, tokenize=False).rstrip()
    assert tokenizer.decode(r.segments[0].ids) == whole


def test_a_default_system_prompt_does_not_get_into_the_answers(play, countdown_tiny, two_turn):
    """Templates with a system prompt of their own, whatever words are in it."""
    system = "<|im_start|>system\nAnswer the question. Keep each reply short.<|im_end|>\n"
    tokenizer = byte_tokenizer(system + CHATML)
    texts = [wrong(two_turn), two_turn.solution(two_turn.task("train", 0))]
    script = Script(*(reply_ids(tokenizer, text) for text in texts))
    (r,) = play(countdown_tiny[0], tokenizer, two_turn, script)
    whole = tokenizer.apply_chat_template(r.messages, tokenize=False).rstrip()
    assert tokenizer.decode(r.segments[0].ids) == whole


def test_the_plain_template_is_the_bare_text(play, countdown_tiny, two_turn):
    tokenizer = byte_tokenizer(None)
    task = two_turn.task("train", 0)
    texts = [wrong(two_turn), two_turn.solution(task)]
    script = Script(*(reply_ids(tokenizer, text) for text in texts))
    (r,) = play(countdown_tiny[0], tokenizer, two_turn, script, chat_template="plain")
    problem, eos = task.messages[0]["content"], tokenizer.eos_token
    assert tokenizer.decode(r.segments[0].ids) == f"{problem}{texts[0]}{eos}{problem}{texts[1]}{eos}"


def test_a_reply_cut_at_the_limit_never_reaches_the_environment(monkeypatch, play, countdown_tiny, two_turn):
    model, tokenizer = countdown_tiny
    solution = reply_ids(tokenizer, two_turn.solution(two_turn.task("train", 0)))
    steps = []
    monkeypatch.setattr(two_turn, "start", lambda task, seed: Recording(steps))
    script = Script(solution[:-1], solution)
    cut, ended = play(model, tokenizer, two_turn, script, 2,
                      max_response_tokens=len(solution))
    assert (cut.termination, cut.reward, cut.correct, cut.steps) == ("length", 0.0, 0.0, [])
    assert cut.segments[0].response_mask == [1] * (len(solution) - 1)
    assert (ended.termination, ended.reward) == ("done", 1.0)
    assert steps == [ended.messages[-1]["content"]]


class Recording(envs.Episode):
    """Writes down every reply, and counts it as right."""

    def __init__(self, steps):
        self.steps = steps

    def step(self, reply):
        self.steps.append(reply)
        return Step([], 1.0, True, False, {"correct": 1.0})


def test_the_environments_own_limit_ends_as_truncated(monkeypatch, play, countdown_tiny, two_turn):
    class Late(envs.Episode):
        def step(self, reply):
            return Step([], 0.25, False, True, {"correct": 1.0})

    model, tokenizer = countdown_tiny
    monkeypatch.setattr(two_turn, "start", lambda task, seed: Late())
    (r,) = play(model, tokenizer, two_turn, Script(reply_ids(tokenizer, wrong(two_turn))))
    assert (r.termination, r.reward, r.correct) == ("truncated", 0.25, 1.0)


def test_episodes_of_a_group_keep_their_own_tokens_as_others_end(play, countdown_tiny, two_turn):
    model, tokenizer = countdown_tiny
    right = reply_ids(tokenizer, two_turn.solution(two_turn.task("train", 0)))
    bad = reply_ids(tokenizer, wrong(two_turn))
    worse = bad[:1] + [bad[0]] + bad[2:]
    script = Script(right, bad, worse, right[:2], bad, right)
    rollouts = play(model, tokenizer, two_turn, script, 4)
    assert [r.termination for r in rollouts] == ["done", "done", "done", "length"]
    assert [r.correct for r in rollouts] == [1.0, 0.0, 1.0, 0.0]
    def sampled(r):
        return [i for i, m in zip(r.segments[0].response_ids, r.segments[0].response_mask, strict=True) if m]

    assert [sampled(r) for r in rollouts] == [right, bad + bad, worse + right, right[:2]]
    assert script.prompts[4][len(rollouts[1].segments[0].prompt_ids):][:len(bad)] == bad
    assert script.prompts[5][len(rollouts[2].segments[0].prompt_ids):][:len(worse)] == worse


# The context budget


def long_game(two_turn, replies):
    two_turn.replies = replies
    return two_turn


def expected_segments(tokenizer, env, texts, budget, limit):
    """Prompt ids and response ids of each segment, by brute force over what may be kept of the history."""
    task = env.task("train", 0)

    def prompt_of(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text).input_ids

    history, segments = [], [(prompt_of(task.messages), [])]
    for n, text in enumerate(texts):
        segments[-1][1].extend(reply_ids(tokenizer, text))
        history.append({"role": "assistant", "content": text})
        if n + 1 == len(texts):
            return segments
        history += task.messages  # the environment's answer: the problem once more
        answer = prompt_of(task.messages)[1:]  # as the first turn, without <bos>
        if sum(map(len, segments[-1])) + len(answer) + limit <= budget:
            segments[-1][1].extend(answer)
            continue
        for start in range(2, len(history), 2):  # whole turns go, the oldest first
            prompt = prompt_of(task.messages + history[start:])
            if len(prompt) + limit <= budget:
                segments.append((prompt, []))
                break
        else:
            return segments
    return segments


@pytest.mark.parametrize("budget", [45, 52, 60, 75])
def test_a_history_over_the_budget_starts_a_segment_that_keeps_the_task(
        play, countdown_tiny, two_turn, budget):
    model, tokenizer = countdown_tiny
    env, limit = long_game(two_turn, 8), 16
    task = env.task("train", 0)
    texts = [wrong(env)] * 3 + [wrong(env) + "; 1 + 1 = 2"] * 4 + [env.solution(task)]
    script = Script(*(reply_ids(tokenizer, text) for text in texts))
    (r,) = play(model, tokenizer, env, script, max_context_tokens=budget,
                max_response_tokens=limit)
    assert (r.termination, r.correct) == ("done", 1.0)
    found = [(s.prompt_ids, s.response_ids) for s in r.segments]
    assert found == expected_segments(tokenizer, env, texts, budget, limit)
    assert len(found) > 1
    for segment in r.segments:
        assert len(segment.ids) <= budget
        assert segment.prompt_ids[:len(r.segments[0].prompt_ids) - 1] == r.segments[0].prompt_ids[:-1]
        assert len(segment.response_ids) == len(segment.response_mask) == len(segment.rollout_logprobs)
        assert segment.response_mask[0] == 1
    # Every sampled token is in exactly one segment, where it was sampled, with its own log-probability.
    sampled = [(i, p) for s in r.segments
               for i, m, p in zip(s.response_ids, s.response_mask, s.rollout_logprobs, strict=True) if m]
    replies = [reply_ids(tokenizer, text) for text in texts]
    assert sampled == [(i, p) for n, ids in enumerate(replies)
                       for i, p in zip(ids, Script.logprobs(n + 1, len(ids)), strict=True)]


def test_an_episode_that_cannot_fit_ends_with_context(play, countdown_tiny, two_turn):
    model, tokenizer = countdown_tiny
    bad = reply_ids(tokenizer, wrong(two_turn))
    prompt = len(tokenizer.apply_chat_template(two_turn.task("train", 0).messages, add_generation_prompt=True)
                 ["input_ids"])
    # The prompt and one reply fit, the second turn does not, and there is no older turn to leave out.
    flags = dict(max_context_tokens=prompt + 16, max_response_tokens=16)
    (r,) = play(model, tokenizer, two_turn, Script(bad), **flags)
    assert (r.termination, r.correct, len(r.segments), len(r.steps)) == ("context", 0.0, 1, 1)
    assert r.segments[0].response_ids == bad
    # The prompt alone does not fit: nothing is sampled.
    flags["max_context_tokens"] -= 1
    script = Script()
    (r,) = play(model, tokenizer, two_turn, script, **flags)
    assert (r.termination, r.reward, r.segments[0].response_ids, script.prompts) == ("context", 0.0, [], [])


# Many episodes: how many at once, how they end, and what of them fails


class World(envs.Env):
    """Its episodes do what `behave(episode, reply)` says; it knows which of them are open."""

    multi_turn = True

    def __init__(self, behave, on_start=None):
        self.behave, self.on_start, self.lock = behave, on_start, threading.Lock()
        self.judge = lambda episode, reason: None
        self.attempts, self.started, self.open, self.most, self.closed = [], [], 0, 0, []

    def task(self, split, index):
        return envs.Task(f"t{index}", "world", [{"role": "user", "content": f"<{index}>"}], {})

    def start(self, task, seed):
        self.attempts.append(task.id)
        if self.on_start:
            self.on_start(self, task)
        with self.lock:
            self.started.append(task.id)
            self.open += 1
            self.most = max(self.most, self.open)
        return Attempt(self, task)


class Attempt(envs.Episode):
    def __init__(self, world, task):
        self.world, self.task, self.replies, self.ended = world, task, [], threading.Event()

    def step(self, reply):
        self.replies.append(reply)
        return self.world.behave(self, reply)

    def resume(self, replies):
        return self.world.behave(self, replies)

    def end(self, reason):
        return self.world.judge(self, reason)

    def close(self):
        with self.world.lock:
            self.world.open -= 1
            self.world.closed.append(self)
        self.ended.set()
        raise RuntimeError("whatever goes wrong here is of no consequence")


class Speaker(grpo_llm.Engine):
    """Replies that the prompt's text decides, a few at a time or all together."""

    def __init__(self, tokenizer, say, continuous):
        self.tokenizer, self.say, self.continuous = tokenizer, say, continuous
        self.eos, self.waiting, self.most = [tokenizer.eos_token_id], [], 0

    @property
    def busy(self):
        return bool(self.waiting)

    def submit(self, key, prompt, temperature, seed):
        self.waiting.append((key, prompt))
        self.most = max(self.most, len(self.waiting))

    def collect(self):
        count = min(2, len(self.waiting)) if self.continuous else len(self.waiting)
        ended, self.waiting = self.waiting[:count], self.waiting[count:]
        said = [self.say(self.tokenizer.decode(ids)) for _, ids in ended]
        replies = [reply_ids(self.tokenizer, text)[:-1 if text == "cut" else None] for text in said]
        return [(key, ids, [-1 - n / 100 for n in range(len(ids))])
                for (key, _), ids in zip(ended, replies, strict=True)]


def go_on(reward=0.0):
    return Step([{"role": "user", "content": "!"}], reward, False, False, {"correct": 0.0})


def over(reward=1.0):
    return Step([], reward, True, False, {"correct": 1.0})


@pytest.fixture(params=[False, True], ids=["together", "continuous"])
def visit(request, trainer, pool):
    """Plays tasks of a world. A reply is r and the number of those before it: r0, r1. -> Rollouts"""
    def visit(world, num_tasks=1, num_samples=1, say=lambda text: f"r{text.count('!')}", pool=pool, **flags):
        args = trainer.Args(**dict(chat_template="plain", max_response_tokens=40) | flags)
        tokenizer, tasks = byte_tokenizer(None), [world.task("train", n) for n in range(num_tasks)]
        visit.engine = Speaker(tokenizer, say, request.param)
        return trainer.rollout(visit.engine, tokenizer, world, tasks, num_samples, 0.0, args, pool,
                               trainer.episode_reward)
    return visit


def texts(r):
    return [m["content"] for m in r.messages]


def three_turns(episode, reply):
    return over() if len(episode.replies) == 1 + int(episode.task.id[1:]) % 3 else go_on(0.25)


def all_closed_once(world):
    return len(world.closed) == len(set(world.closed)) == len(world.started) and not world.open


def kept(r):
    """What a rollout leaves behind."""
    return {name: value for name, value in vars(r).items() if name not in ("children", "parent")} | {
        "children": [kept(child) for child in r.children]}


@pytest.mark.parametrize("threads", [1, 4])
def test_no_more_episodes_are_in_play_than_allowed_and_results_are_the_same(visit, trainer, threads):
    found, pool = [], trainer.EnvThreads(threads)
    for limit in (0, 1, 3, 99):
        world = World(three_turns)
        rollouts = visit(world, 7, 2, pool=pool, max_concurrent=limit)
        found.append([kept(r) for r in rollouts])
        assert all_closed_once(world) and len(world.started) == 14
        assert world.most <= (limit or 14) and visit.engine.most <= (limit or 14)
        assert limit not in (1, 3) or max(world.most, visit.engine.most) == limit
    pool.close()
    assert found[1:] == found[:1] * 3
    assert [r.task.id for r in rollouts] == [f"t{n // 2}" for n in range(14)]
    assert texts(rollouts[4]) == ["<2>", "r0", "!", "r1", "!", "r2"] and rollouts[4].reward == 1.5


def test_an_episode_ends_after_max_turns_with_what_it_has_earned(visit):
    world = World(lambda episode, reply: go_on(0.25))
    (r,) = visit(world, max_turns=3)
    assert (r.termination, r.reward, r.correct, len(r.turns)) == ("turns", 0.75, 0.0, 3)
    assert texts(r)[-2:] == ["r2", "!"] and all_closed_once(world)
    world = World(three_turns)  # an end of the environment's own in the last turn counts
    assert [r.termination for r in visit(world, 3, max_turns=2)] == ["done", "done", "turns"]


def test_an_episode_that_ends_for_want_of_room_is_closed(visit):
    world = World(lambda episode, reply: go_on())
    (r,) = visit(world, max_context_tokens=9, max_response_tokens=4)
    assert (r.termination, len(r.turns)) == ("context", 1) and all_closed_once(world) and world.started
    assert visit(world, max_context_tokens=5, max_response_tokens=4)[0].termination == "context"
    assert len(world.started) == 1  # what has no room for a first reply is not even started


@pytest.mark.parametrize("reason, flags", [
    ("turns", dict(max_turns=2)), ("context", dict(max_context_tokens=9, max_response_tokens=4)),
    ("length", dict(say=lambda text: "cut" if "!" in text else "r0"))])
def test_an_episode_that_a_limit_ends_is_judged_by_its_environment(visit, trainer, reason, flags):
    asked = []

    def judge(episode, reason):
        asked.append((reason, episode.ended.is_set()))
        return Step([{"role": "user", "content": "never read"}], 0.5, False, True, {"correct": 1.0})

    world = World(lambda episode, reply: go_on(0.25))
    world.judge = judge
    for r in visit(world, 2, **flags):
        turns = 1 if reason == "context" else 2
        assert (r.termination, r.correct, len(r.turns), len(r.steps)) == (reason, 1.0, turns, turns)
        earned = 0.5 if reason == "turns" else 0.25  # the reply that was cut has earned nothing itself
        assert sum(step.reward for step in r.steps) == 0.5 + earned
        assert "never read" not in "".join(texts(r))
    assert asked == [(reason, False)] * 2 and all_closed_once(world)
    failing = World(lambda episode, reply: go_on(0.25))
    failing.judge = lambda episode, reason: 1 / 0
    (r,) = visit(failing, episode_retries=1, **flags)
    assert (r.termination, r.retries, r.correct) == ("error", 1, 0.0) and all_closed_once(failing)


# Time


grpo_alone = pytest.mark.parametrize("trainer", [grpo_llm], indirect=True, ids=["grpo"])


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@grpo_alone
@pytest.mark.parametrize("interrupted", [True, False], ids=["by-close", "never"])
def test_a_step_that_hangs_ends_its_episode_and_its_thread_is_replaced(visit, trainer, interrupted):
    """It may come back when the episode is closed, or never as far as we know."""
    forever, late = threading.Event(), []

    def behave(episode, reply):
        if episode.task.id == "t1" and len(episode.replies) == 2:
            late.append((episode.ended if interrupted else forever).wait(60))
            return over(5.0)
        return three_turns(episode, reply)

    world, pool = World(behave), trainer.EnvThreads(1)
    rollouts = visit(world, 3, pool=pool, episode_timeout=0.8, max_concurrent=1)
    assert [r.termination for r in rollouts] == ["done", "timeout", "done"]
    assert all_closed_once(world)
    forever.set()
    until(lambda: late)
    time.sleep(0.05)
    r = rollouts[1]  # the answer came too late
    assert (r.reward, r.correct, len(r.steps), texts(r)) == (0.25, 0.0, 1, ["<1>", "r0", "!", "r1"])
    assert late == [True]
    pool.close()


@grpo_alone
def test_a_step_that_takes_long_does_not_hold_up_the_others_where_the_clock_runs(visit, trainer):
    others = threading.Event()

    def behave(episode, reply):
        if episode.task.id == "t1" and len(episode.replies) == 2:
            assert others.wait(30)
        elif episode.task.id == "t2" and len(episode.replies) == 3:
            others.set()
        return three_turns(episode, reply)

    rollouts = visit(World(behave), 3, episode_timeout=60.0)
    assert [r.termination for r in rollouts] == ["done"] * 3 and not rollouts[1].retries


@pytest.mark.slow
@grpo_alone
def test_time_outs_are_not_waited_for_where_the_start_or_the_engine_is_slow(visit, trainer):
    forever, pool = threading.Event(), trainer.EnvThreads(1)
    world = World(three_turns, lambda world, task: task.id == "t0" and forever.wait(60))
    slow, quick = visit(world, 2, pool=pool, episode_timeout=0.8, max_concurrent=1)
    assert (slow.termination, quick.termination) == ("timeout", "done")
    assert world.started == ["t1"] and all_closed_once(world)
    forever.set()
    until(lambda: len(world.closed) == 2)  # what has come too late is closed all the same
    assert all_closed_once(world)
    pool.close()

    def say(text):
        time.sleep(0.1)
        return "r"

    world = World(lambda episode, reply: go_on())
    (r,) = visit(world, say=say, episode_timeout=0.3)
    assert r.termination == "timeout" and all_closed_once(world)


# Environments that fail


def failing(times):
    """The first attempts at t0 fail as they start, those at t2 in the second turn; then all goes well."""
    def on_start(world, task):
        if task.id == "t0" and world.attempts.count("t0") <= times:
            raise OSError("no room")

    def behave(episode, reply):
        early = episode.world.attempts.count("t2") <= times
        if early and episode.task.id == "t2" and len(episode.replies) == 2:
            raise OSError("lost")
        return three_turns(episode, reply)

    return World(behave, on_start)


def test_an_episode_whose_environment_fails_is_played_again_from_its_start(visit, capsys):
    world, expected = failing(1), visit(World(three_turns), 3)
    rollouts = visit(world, 3)
    assert capsys.readouterr().err.count("the environment failed") == 2
    assert [r.retries for r in rollouts] == [1, 0, 1]
    assert [kept(r) | {"retries": 0} for r in rollouts] == [kept(r) for r in expected]
    assert world.attempts.count("t0") == world.started.count("t2") == 2 and all_closed_once(world)


@pytest.mark.parametrize("retries", [0, 2])
def test_after_the_last_retry_an_episode_ends_as_an_error(visit, trainer, retries, capsys):
    world = failing(99)
    rollouts = visit(world, 3, episode_retries=retries)
    assert [r.termination for r in rollouts] == ["error", "done", "error"]
    assert [r.retries for r in rollouts] == [retries, 0, retries]
    assert [r.reward for r in rollouts] == [0.0, 1.25, 0.0] and not rollouts[2].correct
    assert world.attempts.count("t0") == world.started.count("t2") == retries + 1
    assert capsys.readouterr().err.count("the environment failed") == 2 * (retries + 1)
    assert all_closed_once(world)
    metrics = trainer.rollout_metrics(rollouts, 1.0)
    assert metrics["train/reward"] == 1.25 and metrics["train/pass@1"] == 1.0
    assert metrics["rollout/termination/error"] == pytest.approx(2 / 3)
    assert metrics["rollout/retries"] == 2 * retries and metrics["rollout/turns"] == 2
    nothing = trainer.rollout_metrics([rollouts[0]], 1.0)
    assert all(math.isfinite(value) for value in nothing.values()) and nothing["train/reward"] == 0


def test_what_is_no_step_is_a_failure_of_the_environment(visit):
    world = World(lambda episode, reply: None)
    (r,) = visit(world, episode_retries=1)
    assert (r.termination, r.retries) == ("error", 1) and all_closed_once(world)


@pytest.mark.parametrize("where", ["engine", "environment"])
def test_an_interruption_closes_every_episode(visit, where):
    def behave(episode, reply):
        if where == "environment" and episode.task.id == "t3":
            raise KeyboardInterrupt
        return go_on()

    def say(text):
        if where == "engine" and text.startswith("<3>") and "!" in text:
            raise KeyboardInterrupt
        return "r"

    world = World(behave)
    with pytest.raises(KeyboardInterrupt):
        visit(world, 5, say=say)
    assert all_closed_once(world) and world.started


# Sub-agents


def family(episode, reply):
    """t0 asks two sub-agents, the first of which asks one of its own and the second never ends."""
    world, task = episode.world, episode.task

    def ask(*names):
        pairs = []
        for name in names:
            child = envs.Task(name, "world", [{"role": "user", "content": f"<{name}>"}], {})
            pairs.append((child, world.start(child, 1)))
        return Step([{"role": "user", "content": "never read"}], 100.0, False, False, {}, tuple(pairs))

    if isinstance(reply, list):
        episode.heard = reply
        return over(2.0) if task.id == "a" else go_on(0.5)
    if task.id == "t0":
        return ask("a", "b", "c") if len(episode.replies) == 1 else over(1.0)
    if task.id == "a":
        return ask("a/a")
    if task.id == "c":
        raise OSError("lost")
    return over(3.0) if task.id == "a/a" else go_on(4.0)


def test_sub_agents_are_played_first_and_their_last_replies_go_to_their_parent(visit, capsys):
    world = World(family)
    r, alone = visit(world, 2, say=lambda text: f"{text.split('>')[0]}{text.count('!')}", max_turns=2)
    assert all_closed_once(world) and [e.task.id for e in world.closed].count("c") == 1
    assert texts(r) == ["<0>", "<00", "!", "<01"]
    a, b, c = r.children
    (below,) = a.children
    assert (r.termination, r.reward, [s.reward for s in r.steps]) == ("done", 1.5, [0.5, 1.0])
    assert [child.termination for child in (a, below, b, c)] == ["done", "done", "turns", "error"]
    assert c.retries == 0  # its parent hears nothing of it
    heard = {e.task.id: e.heard for e in world.closed if hasattr(e, "heard")}
    assert heard == {"t0": ["<a0", "<b1", ""], "a": ["<a/a0"]}
    assert [m.task.id for m in r.family] == ["t0", "a", "a/a", "b", "c"] and not alone.children
    for member in r.family[1:4]:
        assert member.reward == r.reward and "never read" not in str(member.messages)
        (segment,) = member.segments
        said = [m["content"] for m in member.messages if m["role"] == "assistant"]
        assert [segment.response_ids[start:end] for _, start, end in member.turns] == [
            reply_ids(byte_tokenizer(None), text) for text in said]
        for _, start, end in member.turns:
            assert segment.response_mask[start:end] == [1] * (end - start)
            assert segment.rollout_logprobs[start:end] == [-1 - n / 100 for n in range(end - start)]


def test_sub_agents_learn_only_when_told_to(visit, trainer, capsys):
    rollouts = visit(World(family), 2, say=lambda text: "r", max_turns=2)
    r, alone = rollouts
    members = [r, *r.family[1:4]]
    tokens = sum(sum(s.response_mask) for m in [*r.family, alone] for s in m.segments)
    assert trainer.num_generated(rollouts) == tokens
    assert trainer.rollout_metrics(rollouts, 1.0)["rollout/sub_agents"] == 2
    for train in (False, True):
        args = trainer.Args(group_size=2, train_sub_agents=train)
        expected = [s for m in (members if train else [r]) for s in m.segments]
        if trainer is grpo_llm:
            (group,) = trainer.trainable_groups(rollouts, args)
            assert group == expected + alone.segments
            assert {s.advantage for s in expected} == {(r.reward - alone.reward) / 2}
        else:
            episodes = trainer.trainable_episodes(rollouts, args)
            assert episodes == [[s] for s in expected + alone.segments]
            for m in members[1:]:  # what the parent has earned, at the last token
                rewards = m.segments[0].rewards
                assert rewards[m.turns[-1][2] - 1] == r.reward and sum(map(bool, rewards)) == 1


@pytest.mark.slow
@grpo_alone
def test_a_retry_throws_sub_agents_away_and_a_time_out_ends_them(visit, trainer):
    def behave(episode, reply):
        if isinstance(reply, list) and episode.world.started.count("t0") == 1:
            raise OSError("lost")
        if isinstance(reply, list):
            return over(1.0)
        return family(episode, reply) if episode.task.id == "t0" else over(1.0)

    world = World(behave)
    (r,) = visit(world)
    assert (r.termination, r.retries, len(r.children), len(r.turns)) == ("done", 1, 3, 1)
    assert all_closed_once(world) and len(world.started) == 8
    forever = threading.Event()

    def hang(episode, reply):
        if episode.task.id == "b":
            episode.ended.wait(60)
            return family(episode, ["too late"])
        if episode.task.id == "c":
            forever.wait(60)
            return Attempt(episode.world, envs.Task("t0", "world", [], {})).step("r")  # with sub-agents
        return family(episode, reply)

    world = World(hang)
    (r,) = visit(world, episode_timeout=0.8)
    assert [m.termination for m in r.family] == ["timeout", "done", "done", "timeout", "timeout"]
    assert not r.steps and all_closed_once(world) and len(world.started) == 5
    forever.set()
    until(lambda: len(world.closed) == 8)
    assert all_closed_once(world)


# What is written of an episode


def test_the_tokens_of_a_turn_are_its_text(trainer, countdown_tiny):
    tokenizer = byte_tokenizer(None)
    for text in ("plain", "é and 漢字 \U0001f600!", "", "two\nlines  "):
        ids = reply_ids(tokenizer, text)
        tokens = trainer.token_texts(ids, tokenizer)
        assert len(tokens) == len(ids) and "".join(tokens) == text
    cut = tokenizer("ab漢", add_special_tokens=False).input_ids[:-1]
    assert "".join(trainer.token_texts(cut, tokenizer)) == tokenizer.decode(cut)
    tokenizer = countdown_tiny[1]
    ids = reply_ids(tokenizer, "18 + 14 = 32; 32 + 6 = 38")
    assert "".join(trainer.token_texts(ids, tokenizer)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_episode_is_written_with_its_turns_and_its_sub_agents(visit, trainer, capsys):
    r, _ = visit(World(family), 2, say=lambda text: "reply é", max_turns=2)
    r.segments[0].rollout_logprobs[0] = -math.inf
    written = json.loads(json.dumps(trainer.finite(trainer.describe_episode(r, byte_tokenizer(None))),
                                    allow_nan=False))
    assert [turn["reward"] for turn in written["turns"]] == [0.5, 1.0]
    assert written["turns"][0]["logprobs"][:2] == [None, -1.01]
    assert written["termination"] == "done" and len(written["segments"]) == 1

    def check(episode, r):
        said = [m["content"] for m in r.messages if m["role"] == "assistant"]
        assert ["".join(turn["tokens"]) for turn in episode["turns"]] == said
        assert all(len(turn["tokens"]) == len(turn["logprobs"]) for turn in episode["turns"])
        assert episode["task_id"] == r.task.id and set(episode) == set(written)
        for below, child in zip(episode["sub_agents"], r.children, strict=True):
            check(below, child)

    check(written, r)


# PPO: what is earned where, and who learns from it


ppo_alone = pytest.mark.parametrize("trainer", [ppo_llm], indirect=True, ids=["ppo"])


@ppo_alone
@pytest.mark.parametrize("budget", [4096, 52], ids=["one", "several"])
@pytest.mark.parametrize("given", ["list", "short", "number"])
def test_the_reward_of_a_turn_is_at_its_last_token(play, countdown_tiny, two_turn, given, budget):
    """In one segment, and where the history was cut into several."""
    model, tokenizer = countdown_tiny
    texts = [wrong(two_turn)] * 7 + [two_turn.solution(two_turn.task("train", 0))]
    rewards = [0.5, -0.25, 0.0, 1.0, 0.75, -1.0, 0.125, 2.0]
    given, expected = {"list": (rewards, rewards), "short": (rewards[:3], rewards[:3] + [0.0] * 5),
                       "number": (0.7, [0.0] * 7 + [0.7])}[given]
    script = Script(*(reply_ids(tokenizer, text) for text in texts))
    (r,) = play(model, tokenizer, long_game(two_turn, 8), script, score=lambda r: given,
                max_context_tokens=budget, max_response_tokens=16)
    assert (len(r.segments) > 1) == (budget == 52)
    tokens = [(token == tokenizer.eos_token_id and mask == 1, reward) for s in r.segments
              for token, mask, reward in zip(s.response_ids, s.response_mask, s.rewards, strict=True)]
    assert [reward for last, reward in tokens if last] == expected
    assert not any(reward for last, reward in tokens if not last)
    assert r.reward == pytest.approx(sum(expected))


@ppo_alone
def test_a_reply_that_was_cut_earns_nothing_and_the_turns_before_it_keep_their_rewards(
        play, countdown_tiny, two_turn):
    model, tokenizer = countdown_tiny
    first, cut = reply_ids(tokenizer, wrong(two_turn)), reply_ids(tokenizer, wrong(two_turn))[:3]
    (r,) = play(model, tokenizer, two_turn, Script(first, cut), score=lambda r: [0.5 for _ in r.steps])
    assert (r.termination, r.reward, len(r.steps)) == ("length", 0.5, 1)
    rewards = r.segments[0].rewards
    assert rewards[len(first) - 1] == 0.5 and sum(map(bool, rewards)) == 1


@ppo_alone
def test_more_rewards_than_turns_are_refused(play, countdown_tiny, two_turn):
    model, tokenizer = countdown_tiny
    right = reply_ids(tokenizer, two_turn.solution(two_turn.task("train", 0)))
    with pytest.raises(BadInput, match="gave 2 rewards for 1 turns"):
        play(model, tokenizer, two_turn, Script(right), score=lambda r: (1.0, 1.0))


class Keep:
    """In an optimiser's place: keeps the gradient and leaves the weights."""

    def __init__(self, model):
        self.param_groups = [dict(params=list(model.parameters()))]

    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])

    def zero_grad(self, set_to_none):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


@ppo_alone
def test_nothing_is_learned_from_what_the_environment_wrote(play, countdown_tiny, two_turn):
    """Its tokens have advantages and returns of 0, and no number that stands at them matters."""
    policy, tokenizer = copy.deepcopy(countdown_tiny[0]), countdown_tiny[1]
    critic = ppo_llm.Critic(copy.deepcopy(policy).get_decoder(), policy.config.hidden_size)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    env, args = long_game(two_turn, 8), ppo_llm.Args(kl_coef=0.1, max_grad_norm=1e9)
    texts = [wrong(env)] * 7 + [env.solution(env.task("train", 0))]
    script = Script(*(reply_ids(tokenizer, text) for text in texts for _ in range(2)))
    rollouts = play(policy, tokenizer, env, script, 2, lambda r: [0.1 * n for n in range(len(r.steps))],
                    max_context_tokens=60, max_response_tokens=16)
    episodes = [r.segments for r in rollouts]
    segments = [segment for episode in episodes for segment in episode]
    assert len(segments) > 2
    for name in ("old_logprobs", "ref_logprobs"):
        ppo_llm.store_logprobs(policy, [segments], name, args, tokenizer.pad_token_id)
    for segment in segments:  # so that there is a penalty
        segment.ref_logprobs = [p - 0.1 * m for p, m in zip(segment.ref_logprobs, segment.response_mask,
                                                            strict=True)]
    ppo_llm.store_values(critic, [segments], args, tokenizer.pad_token_id)

    def learned():
        """All that an iteration logs, learns and learns from."""
        metrics = ppo_llm.estimate_advantages(episodes, 0.1, args)
        targets = [[getattr(segment, name) for segment in segments] for name in ("advantages", "returns")]
        spoil("advantages", "returns")
        gradients = []
        for model, terms in ((policy, ppo_llm.policy_terms), (critic, ppo_llm.value_terms)):
            optimizer = Keep(model)
            torch.manual_seed(1)
            metrics |= ppo_llm.update(model, optimizer, terms, episodes, 1, 1, args,
                                      tokenizer.pad_token_id)[0]
            gradients.append(optimizer.gradient)
        return metrics, targets, gradients

    def spoil(*names):
        for segment in segments:
            for name in names:
                setattr(segment, name, [x if m else noise.uniform(-5, 5) for x, m in zip(
                    getattr(segment, name), segment.response_mask, strict=True)])

    noise = random.Random(1)
    before = learned()
    for advantages, returns, segment in zip(*before[1], segments, strict=True):
        assert all(not a and not g for a, g, m in zip(advantages, returns, segment.response_mask, strict=True)
                   if not m)
        assert all(a and g for a, g, m in zip(advantages, returns, segment.response_mask, strict=True) if m)
    spoil("old_logprobs", "ref_logprobs", "rollout_logprobs", "values")
    after = learned()
    assert before[:2] == after[:2]
    for one, other in zip(before[2], after[2], strict=True):
        assert torch.equal(one, other) and one.norm() > 1e-3


# Chat templates


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_turns():
    for template, refused in ((CHATML, False), (FORGETFUL, True)):
        tokenizer = byte_tokenizer(template)
        grpo_llm.check_template(tokenizer, Args(model="m"), multi_turn=False)
        if refused:
            with pytest.raises(BadInput, match="rewrites earlier turns"):
                grpo_llm.check_template(tokenizer, Args(model="m"), multi_turn=True)
        else:
            grpo_llm.check_template(tokenizer, Args(model="m"), multi_turn=True)
        grpo_llm.check_template(tokenizer, Args(chat_template="plain"), multi_turn=True)


def test_a_tokenizer_without_a_template_is_refused_by_name():
    with pytest.raises(BadInput, match="--model m.*chat template.*plain"):
        grpo_llm.check_template(byte_tokenizer(None), Args(model="m"), multi_turn=False)
    grpo_llm.check_template(byte_tokenizer(None), Args(chat_template="plain"), multi_turn=False)


def test_the_shipped_model_plays_several_turns(countdown_tiny):
    grpo_llm.check_template(countdown_tiny[1], Args(), multi_turn=True)


# Groups


def scored(reward, correct, termination="done", lengths=(2,)):
    """A finished rollout; one segment per length."""
    segments = [Segment([3], [4] * n, [1] * n, [0.0] * n) for n in lengths]
    steps = [Step([], reward, True, False, {"correct": correct})]
    return Rollout(envs.Task("t", "s", [], {}), 0, [], segments, steps, termination, reward)


def test_groups_whose_rewards_and_correctness_are_equal_are_left_out():
    args = Args(group_size=2)
    rollouts = [scored(0.1, 0.0), scored(0.1, 0.0),  # all equal: gone
                scored(1.0, 1.0), scored(0.0, 0.0),
                scored(0.5, 1.0), scored(0.5, 0.0),  # equal rewards, different correctness: stays, at zero
                scored(0.2, 0.0), scored(0.1, 0.0)]
    groups = grpo_llm.trainable_groups(rollouts, args)
    assert [[s.advantage for s in group] for group in groups] == [
        [0.5, -0.5], [0.0, 0.0], pytest.approx([0.05, -0.05])]
    assert groups[0] == [rollouts[2].segments[0], rollouts[3].segments[0]]


def test_every_segment_of_an_episode_has_its_advantage_and_empty_ones_go():
    args = Args(group_size=2)
    rollouts = [scored(1.0, 1.0, lengths=(2, 3)), scored(0.0, 0.0, "context", lengths=(0,))]
    (group,) = grpo_llm.trainable_groups(rollouts, args)
    assert [(len(s.response_ids), s.advantage) for s in group] == [(2, 0.5), (3, 0.5)]


def test_a_group_that_lost_a_member_is_the_others(capsys):
    args = Args(group_size=4, baseline="loo", scale_rewards=True)
    failed = scored(9.0, 1.0, "error")
    (group,) = grpo_llm.trainable_groups([scored(1.0, 1.0), failed, scored(0.0, 0.0), scored(0.5, 0.0)], args)
    alone = Args(group_size=3, baseline="loo", scale_rewards=True)
    (expected,) = grpo_llm.trainable_groups([scored(1.0, 1.0), scored(0.0, 0.0), scored(0.5, 0.0)], alone)
    assert [s.advantage for s in group] == pytest.approx([s.advantage for s in expected])
    assert failed.segments[0] not in group or failed.segments[0].advantage == 0
    # Two that differ are enough; one, none, or two that are equal teach nothing.
    for others in (1, 2, 3, 4):
        members = [scored(float(n), 0.0) for n in range(4 - others)] + [failed] * others
        assert len(grpo_llm.trainable_groups(members, Args(group_size=4))) == (others <= 2)
    assert not grpo_llm.trainable_groups([scored(0.5, 0.0), failed, scored(0.5, 0.0), failed], args)


def test_an_episode_whose_environment_failed_is_nothing_to_ppo():
    def episode(reward, termination="done"):
        segments = [ppo_llm.Segment([3], [4, 5], [1, 1], [0.0, 0.0], [0.0, reward])]
        return ppo_llm.Rollout(envs.Task("t", "s", [], {}), 0, [], segments, [], termination, reward)

    played = [episode(0.25), episode(1.0, "timeout"), episode(0.0, "length")]
    with_failed = [played[0], episode(50.0, "error"), *played[1:], episode(-9.0, "error")]
    expected = ppo_llm.trainable_episodes(played, ppo_llm.Args())
    assert len(expected) == 3 and ppo_llm.trainable_episodes(with_failed, ppo_llm.Args()) == expected
    assert ppo_llm.trainable_episodes(with_failed[-1:], ppo_llm.Args()) == []


@pytest.mark.parametrize("masked", [False, True])
def test_mask_truncated_leaves_cut_responses_out_of_the_loss_but_in_the_baseline(masked):
    args = Args(group_size=4, mask_truncated=masked)
    rollouts = [scored(1.0, 1.0), scored(0.0, 0.0, "length"), scored(0.0, 0.0, "context"),
                scored(0.0, 0.0, "turns")]
    (group,) = grpo_llm.trainable_groups(rollouts, args)
    assert [s.advantage for s in group] == ([0.75, -0.25] if masked else [0.75, -0.25, -0.25, -0.25])
    only_cut = [scored(0.0, 0.0, "length"), scored(0.5, 0.0, "context")] * 2
    (group,) = grpo_llm.trainable_groups(only_cut, args)
    assert len(group) == (0 if masked else 4)


def test_advantages_of_groups_use_the_flags():
    rollouts = [scored(1.0, 1.0), scored(0.0, 0.0), scored(0.0, 0.0)]
    args = Args(group_size=3, baseline="loo", scale_rewards=True, advantage_balance=0.5)
    (group,) = grpo_llm.trainable_groups(rollouts, args)
    deviation = math.sqrt(2) / 3 + 1e-6
    assert [s.advantage for s in group] == pytest.approx(
        [1 / deviation, -0.25 / deviation, -0.25 / deviation], rel=1e-5)


def test_tasks_come_in_a_new_order_in_each_epoch():
    first, second = ([grpo_llm.task_index(i + 10 * e, 1, 10) for i in range(10)] for e in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [grpo_llm.task_index(i, 2, 10) for i in range(10)] != first


def test_evaluation_counts_correct_replies_by_source(trainer, monkeypatch, pool, countdown_tiny):
    """Two sources, four samples per task: means over tasks and samples, any-of-four, greedy."""
    model, tokenizer = countdown_tiny
    env = envs.make("countdown", difficulty="true", min_operands="2", max_operands="3")
    args = trainer.Args(eval_tasks=6, eval_samples=4, max_response_tokens=16)
    tasks = [env.task("test", i) for i in range(6)]
    rng = random.Random(1)
    plan = {0.0: [[rng.random() < 0.5] for _ in tasks],  # which replies are right, by temperature
            1.0: [[rng.random() < 0.3 for _ in range(4)] for _ in tasks]}

    def generate(model, prompts, limit, temperature, tokenizer, seeds):
        right = [flag for flags in plan[temperature] for flag in flags]
        repeated = [task for task in tasks for _ in range(len(prompts) // len(tasks))]
        texts = [env.solution(task) if flag else "1 + 1 = 2"
                 for task, flag in zip(repeated, right, strict=True)]
        return [(ids := reply_ids(tokenizer, text), [0.0] * len(ids)) for text in texts]

    monkeypatch.setattr(trainer, "generate", generate)
    engine = trainer.HfEngine(model, tokenizer, args)
    metrics, samples = trainer.evaluate(engine, tokenizer, env, args, pool, trainer.episode_reward)
    assert len(samples) == 24
    sources = {task.source for task in tasks}
    assert sources == {"countdown/2", "countdown/3"}
    for source in sources:
        mine = [i for i, task in enumerate(tasks) if task.source == source]
        drawn = [plan[1.0][i] for i in mine]
        assert metrics[f"val/{source}/pass@1"] == pytest.approx(sum(map(sum, drawn)) / (4 * len(mine)))
        assert metrics[f"val/{source}/pass@4"] == pytest.approx(sum(map(any, drawn)) / len(mine))
        greedy = sum(plan[0.0][i][0] for i in mine) / len(mine)
        assert metrics[f"val/{source}/greedy"] == pytest.approx(greedy)
        assert metrics[f"val/{source}/correct"] == metrics[f"val/{source}/pass@1"]


def test_segments_survive_json(trainer):
    """Episodes are written as JSON."""
    segment = trainer.Segment([1, 2], [3], [1], [-0.5])
    assert trainer.Segment(**json.loads(json.dumps(dataclasses.asdict(segment)))) == segment


# Demonstrations: what sft.py learns is what a rollout will read and write


class Prompter(grpo_llm.Engine):
    """An engine whose model says what a conversation has its assistant say."""

    continuous = busy = False

    def __init__(self, messages, tokenizer):
        self.eos, self.said = {tokenizer.eos_token_id}, iter(
            [*tokenizer(message["content"]).input_ids, tokenizer.eos_token_id]
            for message in messages if message["role"] == "assistant")

    def submit(self, key, ids, temperature, seed):
        self.busy, self.key = True, key

    def collect(self):
        self.busy, ids = False, next(self.said)
        return [(self.key, ids, [0.0] * len(ids))]


GAMES = {
    "collect": ("arcagi3", dict(offline=True, game_ids="collect", style="short", downsample=8)),
    "unseen": ("arcagi3", dict(offline=True, game_ids="lights", style="short", downsample=8,
                               first_screen=False)),
    "hex": ("openspiel", dict(cases="hex(board_size=4)", mode="game", style="words", playouts=1)),
    "mixture": ("openspiel,arcagi3", {
        "openspiel.cases": "hex(board_size=3)", "openspiel.mode": "game", "openspiel.style": "short",
        "arcagi3.offline": True, "arcagi3.game_ids": "maze", "arcagi3.style": "short",
        "arcagi3.downsample": 8}),
    "countdown": ("countdown", {}),
}


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("limit", [90, 130, 180, 400, 4000])
def test_a_demonstration_is_learned_as_a_rollout_that_says_the_same(game, limit, pool):
    env = envs.make(GAMES[game][0], **GAMES[game][1])
    tokenizer = sft.new_tokenizer(env.vocabulary)
    for index in range(3):
        task = env.task("train", index)
        messages = env.demonstration(task)
        # The rollout leaves room for its longest reply: both cut at the same turns if no reply is shorter.
        longest = max(len(ids) for ids in Prompter(messages, tokenizer).said)
        args = Args(seed=0, max_response_tokens=longest, max_context_tokens=limit)
        r, = grpo_llm.rollout(Prompter(messages, tokenizer), tokenizer, env, [task], 1, 1.0, args, pool,
                              grpo_llm.episode_reward)
        rows = sft.encode_demonstration(messages, len(task.messages), tokenizer, sft.Args(max_length=limit))
        if r.termination == "context":
            assert max(len(ids) for ids, _ in rows) > limit  # sft.py refuses it
            continue
        assert r.termination == "done" and r.messages == messages
        assert rows == [(s.ids, [0] * len(s.prompt_ids) + s.response_mask) for s in r.segments]
        learned = [i for ids, mask in rows for i, m in zip(ids, mask, strict=True) if m]
        assert learned == [i for ids in Prompter(messages, tokenizer).said for i in ids]
