"""Sampling and rollouts of grpo_llm.py and ppo_llm.py: tokens, masks and numbers, on very small models."""

import copy
import dataclasses
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

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
def test_a_token_of_probability_zero_is_never_sampled(monkeypatch, uniform):
    no = -math.inf
    rows = torch.tensor([[no, 1.0, no, 0.5, no], [0.0, no, 0.0, no, no], [no, no, no, no, 9.0]])
    monkeypatch.setattr(torch, "rand", lambda *size, **kind: torch.full(size, uniform, **kind))
    tokens, logprobs = grpo_llm.sample(rows, 1.0)
    assert logprobs.isfinite().all()
    assert tokens.tolist() == ([1, 0, 4] if uniform < 0.5 else [3, 2, 4])


def test_the_tail_of_a_large_vocabulary_is_sampled_in_proportion(monkeypatch):
    """Half of the probability lies in 200,000 equal tokens: sums in float32 are off by hundreds of them."""
    logits = torch.full((1, 200_001), 0.0)
    logits[0, 0] = math.log(200_000)
    uniform = torch.tensor([[0.25], [0.499], [0.50001], [0.75], [0.9], [0.99999]])
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, device: uniform.to(dtype))
    tokens, _ = grpo_llm.sample(logits.expand(len(uniform), -1), 1.0)
    expected = [max(0, 1 + int((u - 0.5) * 400_000)) for u in uniform.double().flatten().tolist()]
    assert tokens.tolist() == pytest.approx(expected, abs=2)


# Rollouts with a scripted sampler


@pytest.fixture(params=[grpo_llm, ppo_llm], ids=["grpo", "ppo"])
def trainer(request):
    """The script whose rollout is played. What the two hold in common they hold to the letter."""
    return request.param


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


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

    def __call__(self, model, prompts, max_new_tokens, temperature, tokenizer):
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


class Broken(envs.Episode):
    def step(self, reply):
        raise RuntimeError("out of order")


def test_an_environment_that_raises_ends_its_episode_and_not_the_run(
        monkeypatch, play, countdown_tiny, two_turn, capsys):
    model, tokenizer = countdown_tiny
    steps, started = [], []
    monkeypatch.setattr(two_turn, "start", lambda task, seed: started.append(task) or (
        Broken() if len(started) == 2 else Recording(steps)))
    reply = reply_ids(tokenizer, wrong(two_turn))
    rollouts = play(model, tokenizer, two_turn, Script(*[reply] * 3), 3)
    assert [r.termination for r in rollouts] == ["done", "error", "done"]
    assert [r.reward for r in rollouts] == [1.0, 0.0, 1.0]
    assert "out of order" in capsys.readouterr().err


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
    rollouts = play(model, tokenizer, two_turn, script, 4, max_concurrent=2)
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
    critic = ppo_llm.Critic(copy.deepcopy(policy).get_decoder(), policy.config.hidden_size, shared=False)
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
        ppo_llm.store_logprobs(policy, segments, name, args, tokenizer.pad_token_id)
    for segment in segments:  # so that there is a penalty
        segment.ref_logprobs = [p - 0.1 * m for p, m in zip(segment.ref_logprobs, segment.response_mask,
                                                            strict=True)]
    ppo_llm.store_values(critic, segments, args, tokenizer.pad_token_id)

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
    return Rollout(envs.Task("t", "s", [], {}), 0, None, [], segments, steps, termination, reward)


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


@pytest.mark.parametrize("masked", [False, True])
def test_mask_truncated_leaves_cut_responses_out_of_the_loss_but_in_the_baseline(masked):
    args = Args(group_size=4, mask_truncated=masked)
    rollouts = [scored(1.0, 1.0), scored(0.0, 0.0, "length"), scored(0.0, 0.0, "context"),
                scored(0.0, 0.0, "error")]
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

    def generate(model, prompts, limit, temperature, tokenizer):
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


class Prompter:
    """An engine whose model says what a conversation has its assistant say."""

    continuous = busy = False

    def __init__(self, messages, tokenizer):
        self.eos, self.said = {tokenizer.eos_token_id}, iter(
            [*tokenizer(message["content"]).input_ids, tokenizer.eos_token_id]
            for message in messages if message["role"] == "assistant")

    def submit(self, key, ids, temperature):
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
def test_a_demonstration_is_learned_as_a_rollout_that_says_the_same(game, limit):
    env = envs.make(GAMES[game][0], **GAMES[game][1])
    tokenizer = sft.new_tokenizer(env.vocabulary)
    for index in range(3):
        task = env.task("train", index)
        messages = env.demonstration(task)
        # The rollout leaves room for its longest reply: both cut at the same turns if no reply is shorter.
        longest = max(len(ids) for ids in Prompter(messages, tokenizer).said)
        args = Args(seed=0, max_response_tokens=longest, max_context_tokens=limit)
        with ThreadPoolExecutor(1) as pool:
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
