"""What a run checks, warns of and sets by itself: sampler, adapter, cache, memory, defaults."""

import copy
import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
import typing

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
)

import envs
import grpo_llm
import ppo_llm
import sft
from envs import BadInput
from tests.run_folders import TINY, asked_once, log_lines, records, slow_but, slow_clock, train, write_jsonl
from tests.test_sft import write_model
from tools import diagnose
from tools.validate_train_log import validate

RL = [grpo_llm, ppo_llm]
OF_PPO_SLOW = [grpo_llm, pytest.param(ppo_llm, marks=pytest.mark.slow)]  # code that both have to the letter


# Is the sampler the policy?


@pytest.fixture(autouse=True)
def shipped_once():
    """The shipped model is read once, and copied where it is asked for."""
    with asked_once(grpo_llm):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The shipped model after 20 updates at three times the default rate."""
    folder = tmp_path_factory.mktemp("trained")
    grpo_llm.main(grpo_llm.Args(
        iterations=20, prompts_per_iteration=8, eval_tasks=1, eval_samples=1, eval_every=0,
        checkpoint_every=20, warmup_iterations=0, learning_rate=1.5e-3, run_dir=str(folder),
        env_kwargs=("test_tasks=32",)))
    return grpo_llm.load_weights(str(folder / "checkpoints/step_000020"))


def segments_of(model, sampler, dtype="bfloat16", num_tasks=64):
    """Replies of `sampler`; log-probabilities of `model` and of the sampler.  -> (N,), (N,)"""
    args = grpo_llm.Args(dtype=dtype)
    env, tokenizer = envs.make("countdown", test_tasks=32), grpo_llm.load_tokenizer(args)
    for one in (model, sampler):
        grpo_llm.distribute(one, torch.device("cpu"))
    engine = grpo_llm.HfEngine(sampler, tokenizer, args)
    tasks = [env.training_task(n, 1) for n in range(num_tasks)]
    rollouts = grpo_llm.rollout(engine, tokenizer, env, tasks, 8, grpo_llm.Sampling(1.0, (1, "train")), args,
                                grpo_llm.episode_reward)
    groups = [[*r.segments] for r in rollouts]
    return compared(model, groups, args)


def compared(model, groups, args):
    trainer, sampler = [], []
    with torch.no_grad():
        grpo_llm.store_logprobs(model, groups, "old_logprobs", args)
    for segment in itertools.chain(*groups):
        trainer += itertools.compress(segment.old_logprobs, segment.response_mask)
        sampler += itertools.compress(segment.rollout_logprobs, segment.response_mask)
    for segment in itertools.chain(*groups):
        segment.old_logprobs = None
    return torch.tensor(trainer).double(), torch.tensor(sampler).double()


def nucleus(logits, row, temperature, uniform, sample=grpo_llm.sample):
    """Top-p 0.95, as a naive sampler has it: what it reports is of the fewer words that are left."""
    p, order = torch.softmax(logits.float(), -1).sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p > 0.95, 0.0)
    p = torch.zeros_like(p).scatter(-1, order, p)
    return sample((p / p.sum(-1, keepdim=True)).log(), row, 1.0, uniform)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policys_own_samples_pass_and_the_numbers_are_those_of_the_library(countdown_tiny, dtype):
    model = copy.deepcopy(countdown_tiny[0])
    trainer, sampler = segments_of(model, model, dtype, num_tasks=32)
    found = grpo_llm.check_sampler(trainer, sampler, grpo_llm.LIMITS[dtype])
    ratio = (trainer - sampler).exp()
    pairs = {*zip(map(float, trainer), map(float, sampler), strict=True)}
    slope, _ = statistics.linear_regression([(t + s) / 2 for t, s in pairs], [t - s for t, s in pairs])
    assert found == pytest.approx({
        "mismatch/ratio_max": float(ratio.max()), "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/slope": slope, "mismatch/ess": float(1 / (len(ratio) * ((ratio / ratio.sum())**2).sum()))
    }, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("fault", "says"), [
    ("top-p", "the mean of trainer / sampler is 0.9"), ("temperature", "off in scale: another temperature"),
    ("old weights", "mismatch/kl is"), ("stale prefix", "off in scale: .* older weights"),
    ("another head", "mismatch/kl is")])
def test_a_sampler_that_is_not_the_policy_is_found_out(countdown_tiny, trained, monkeypatch, fault, says):
    """In bfloat16."""
    model = copy.deepcopy(trained)
    sampler = copy.deepcopy(model)
    if fault == "top-p":
        monkeypatch.setattr(grpo_llm, "sample", nucleus)
    if fault == "temperature":
        sample = grpo_llm.sample
        monkeypatch.setattr(grpo_llm, "sample", lambda logits, row, temperature, uniform: sample(
            logits, row, 1.02, uniform))
    if fault == "old weights":
        sampler = copy.deepcopy(countdown_tiny[0])
    if fault == "another head":
        torch.manual_seed(1)
        head = sampler.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * head.weight.std())
    if fault == "stale prefix":
        generate, old = grpo_llm.generate, grpo_llm.distribute(copy.deepcopy(countdown_tiny[0]),
                                                               torch.device("cpu"))

        class Stale(DynamicCache):
            """Keys and values of the prompts are of the old weights."""

            def __init__(self, config):
                super().__init__(config=config)
                self.is_new = True

        decode = sampler.model.forward

        def forward(input_ids, past_key_values, **given):
            if getattr(past_key_values, "is_new", False):
                past_key_values.is_new = False
                return old.model(input_ids=input_ids, past_key_values=past_key_values, **given)
            return decode(input_ids=input_ids, past_key_values=past_key_values, **given)

        def stale(*given):
            with monkeypatch.context() as patch:
                patch.setattr(grpo_llm, "DynamicCache", Stale)
                patch.setattr(sampler.model, "forward", forward)
                return generate(*given)

        monkeypatch.setattr(grpo_llm, "generate", stale)
    trainer, reported = segments_of(model, sampler, num_tasks=8 if "mismatch/kl" in says else 64)
    with pytest.raises(grpo_llm.EngineError, match=f"the sampler is not the policy: .*{says}"):
        grpo_llm.check_sampler(trainer, reported, grpo_llm.LIMITS["bfloat16"])


def drawn(positions, replies, noise, temperature=1.0, words=64, sharpest=6.0):
    """Log-probabilities of words that a sampler draws from logits, both computed with rounding errors of a
    given size; as in a group, several replies have a position in common.  -> trainer, sampler (N,)
    """
    logits = torch.randn(positions, words).double() * torch.empty(positions, 1).uniform_(0.2, sharpest)
    trainer = (logits + noise * torch.randn(positions, words)).log_softmax(-1)
    sampler = ((logits + noise * torch.randn(positions, words)) / temperature).log_softmax(-1)
    words = torch.multinomial(sampler.exp(), replies, replacement=True)
    return [torch.take_along_dim(logprobs, words, 1).flatten() for logprobs in (trainer, sampler)]


# The size of rounding in logits: 0.05 is a mismatch/kl of .0025, as SmolLM2 has in bfloat16; 0.3 is .09.
@pytest.mark.parametrize("noise", [0.001, 0.05, 0.3])
def test_rounding_of_any_size_raises_no_alarm_however_few_or_many_the_tokens(noise):
    torch.manual_seed(0)
    for positions, replies in [(1, 4), (2, 8), (20, 8), (400, 8)]:
        for sharpest in (1.5, 6.0, 12.0):
            for _ in range(20):
                grpo_llm.check_sampler(*drawn(positions, replies, noise, sharpest=sharpest),
                                       grpo_llm.LIMITS["bfloat16"])


@pytest.mark.parametrize("noise", [0.001, 0.05])
@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1, 1.3])
def test_another_temperature_is_found_beside_rounding(noise, temperature):
    torch.manual_seed(0)
    for _ in range(10):
        with pytest.raises(grpo_llm.EngineError, match="is not the policy"):
            grpo_llm.check_sampler(*drawn(100, 8, noise, temperature), grpo_llm.LIMITS["bfloat16"])


def test_few_tokens_are_judged_by_their_size_alone():
    limits = grpo_llm.LIMITS["bfloat16"]
    level = torch.linspace(-3, 0, 99).double()
    grpo_llm.check_sampler(level + math.log(0.97), level, limits)
    more = torch.cat([level, level - 3.01])  # equal ones would count once
    with pytest.raises(grpo_llm.EngineError, match="the mean of trainer / sampler is 0.97"):
        grpo_llm.check_sampler(more + math.log(0.97), more, limits)
    with pytest.raises(grpo_llm.EngineError, match="mismatch/kl is nan"):
        grpo_llm.check_sampler(level * math.nan, level, limits)
    for few in (level[:4], level[:12]):  # another model's
        with pytest.raises(grpo_llm.EngineError, match="mismatch/kl is"):
            grpo_llm.check_sampler(few - 8, few - 2, limits)


@pytest.mark.slow
@pytest.mark.parametrize("script", OF_PPO_SLOW)
def test_a_run_whose_sampler_has_another_temperature_updates_nothing(script, tmp_path, monkeypatch):
    sample = script.sample
    monkeypatch.setattr(script, "sample", lambda logits, row, temperature, uniform: sample(
        logits, row, temperature and 1.1 * temperature, uniform))
    size = dict(prompts_per_iteration=512) if script is ppo_llm else dict(
        prompts_per_iteration=64, group_size=8)  # as by default
    with pytest.raises(SystemExit, match="EngineError: the sampler is not the policy"):
        train(script, tmp_path, **size, dtype="bfloat16")
    assert [record["iteration"] for record in records(tmp_path)] == [0]


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("script", RL)
def test_two_hundred_iterations_in_bfloat16_end_by_themselves(script, tmp_path):
    size = dict(prompts_per_iteration=4, group_size=8, critic_warmup=2) if script is ppo_llm else dict(
        prompts_per_iteration=4, group_size=8)
    train(script, tmp_path, **size, iterations=200, dtype="bfloat16", eval_every=0, checkpoint_every=200)
    assert records(tmp_path)[-1]["iteration"] == 200


# The adapter


def lora(model, **flags):
    return grpo_llm.add_lora(model, grpo_llm.Args(lora_rank=2, **flags))


def test_experts_that_are_parameters_can_be_named():
    from transformers import GptOssConfig, GptOssForCausalLM
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=20, hidden_size=8, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=2))
    named = lora(model, lora_target_modules="q_proj,experts.gate_up_proj,experts.down_proj")
    trained = sum(p.requires_grad for p in named.parameters())
    assert trained == 2 * 3  # A and B of each
    out = named(torch.arange(6)[None]).logits.sum()
    out.backward()
    assert all(p.grad is not None for p in named.parameters() if p.requires_grad)


@pytest.mark.parametrize("targets", ["lm_head", "q_proj,lm_head", "embed_tokens"])
def test_an_adapter_of_a_tied_head_is_refused_before_training(countdown_tiny, targets):
    with pytest.raises(BadInput, match=f"--lora-target-modules {targets}: .*its head is its embedding"):
        lora(copy.deepcopy(countdown_tiny[0]), lora_target_modules=targets)


@pytest.mark.parametrize("targets", [
    "no", "q_proj,v_projj", "q_proj,v_proj.weight", "q_proj,", "Q_proj,v_proj", "all-linear,q_proj",
    "q_proj,experts.gate_up_proj", "q_proj,norm"])
def test_each_name_of_a_target_must_be_in_the_model(countdown_tiny, targets):
    with pytest.raises(BadInput, match=f"--lora-target-modules {targets}: no adapter for"):
        lora(copy.deepcopy(countdown_tiny[0]), lora_target_modules=targets)


def saved_adapter(folder, **options):
    """The base with an adapter of random weights, which is saved into the folder."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(TINY)
    options = dict(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") | options
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    move(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def move(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn_like(parameter)


@torch.no_grad()
def logits_of(model):
    return model(torch.arange(3, 23).view(2, 10)).logits


APPLIED = {
    "layers": dict(layers_to_transform=[1], init_lora_weights="gaussian"),
    "excluded": dict(target_modules="all-linear", exclude_modules=["q_proj"], init_lora_weights="eva"),
    "ranks": dict(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 5}, use_rslora=True,
                  init_lora_weights="orthogonal"),
    "dora": dict(use_dora=True), "bias": dict(bias="all"), "lora_bias": dict(lora_bias=True),
    "saved": dict(modules_to_save=["norm"]),
    "tied": dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tokens": dict(trainable_token_indices=[3, 4]),
    "parameters": dict(target_parameters=["mlp.down_proj.weight"]),
    "pattern": dict(target_modules=r".*\.[01]\..*q_proj", init_lora_weights=False)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", APPLIED)
def test_an_adapter_is_applied_as_it_was_trained_and_so_is_what_is_saved_of_it(
        name, countdown_tiny, tmp_path):
    trained = saved_adapter(tmp_path / "adapter", **APPLIED[name])
    assert (logits_of(trained) - logits_of(countdown_tiny[0])).abs().max() > 0.1
    model = grpo_llm.add_lora(grpo_llm.load_weights(str(TINY)), grpo_llm.Args(
        lora_adapter_path=str(tmp_path / "adapter")))
    torch.testing.assert_close(logits_of(model), logits_of(trained))
    move(model)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(TINY)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "again").eval()
    torch.testing.assert_close(logits_of(again), logits_of(model))
    assert (logits_of(again) - logits_of(trained)).abs().max() > 0.1


REFUSED = {
    "alora_invocation_tokens": [5], "layer_replication": [[0, 2], [1, 3]], "use_qalora": True,
    "kasa_config": {"beta": 1e-4}, "velora_config": {"scale": 1.0}, "monteclora_config": {"num_samples": 2},
    "use_bdlora": {"match_strict": False}, "arrow_config": {"top_k": 3}, "of_a_later_peft": True,
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica", "later"],
    "peft_type": ["LOHA", "IA3", "PROMPT_TUNING"]}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_would_not_be_applied_as_it_was_trained_is_refused_by_name(name, tmp_path):
    saved_adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    args = grpo_llm.Args(lora_adapter_path=str(tmp_path))
    for value in REFUSED[name] if name in ("init_lora_weights", "peft_type") else [REFUSED[name]]:
        path.write_text(json.dumps(config | {name: value}))
        says = f"got {value}" if name == "peft_type" else name
        with pytest.raises(BadInput, match=f"--lora-adapter-path {tmp_path}: no adapter for .*{says}"):
            grpo_llm.add_lora(grpo_llm.load_weights(str(TINY)), args)


def test_every_option_of_peft_is_applied_or_refused_knowingly():
    """A new one of a later PEFT is refused until it is known what it does."""
    of_peft = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    refused = {
        "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
        "monteclora_config", "runtime_config", "use_bdlora", "use_qalora", "velora_config"}
    assert of_peft - refused == grpo_llm.LORA_OPTIONS


# Cache and memory


def test_a_model_whose_cache_is_not_of_keys_and_values_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tokenizer.save_pretrained(tmp_path / "mamba")
    for script in RL:
        with pytest.raises(SystemExit, match="EngineError: .* this model has another"):
            train(script, tmp_path / script.__name__, model=str(tmp_path / "mamba"), iterations=0)


@pytest.mark.parametrize(("kind", "dtype"), [("lfm2", "bfloat16"), ("gpt2", "float32")])
def test_sampling_from_the_cache_of_other_architectures_is_sampling_from_the_policy(kind, dtype, tmp_path):
    """Convolutions beside attention; positions that are learned."""
    (tmp_path / "length.py").write_text("def length(r):\n    return len(r.reply)\n")
    train(grpo_llm, tmp_path / "run", model=write_model(tmp_path / "model", kind), iterations=1, dtype=dtype,
          eval_tasks=1, eval_samples=1, reward_fn=f"{tmp_path}/length.py:length")
    record = records(tmp_path / "run")[-1]
    assert record["opt_steps"] and record["mismatch/kl"] < grpo_llm.LIMITS[dtype][0]


@pytest.mark.parametrize("script", RL)
def test_no_pass_computes_more_tokens_than_it_may(script):
    """Prompts, responses and padding; a row that is longer is a pass of its own."""
    generator = torch.Generator().manual_seed(1)

    def draw(most):
        return int(torch.randint(1, most, (), generator=generator))

    prompts = [[n] * draw(60) for n in range(3)]
    segments = []
    for _ in range(100):
        length = draw(40)
        segments.append(script.Segment(prompts[draw(3)], [draw(9) for _ in range(length)], [1] * length,
                                       [0.0] * length))
    seen = 0
    for part, batch in script.microbatches(segments, script.Args(microbatch_tokens=512), "cpu"):
        rows, prompt = batch["prompts"].shape
        assert rows * (prompt + batch["responses"].shape[1]) <= 512 or rows == 1
        seen += len(part)
    assert seen == 100


# Defaults and warnings


def flags_of(script, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    return script.parse_flags(), capsys.readouterr().out


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A config of 25 million weights; they are not needed."""
    folder = tmp_path_factory.mktemp("larger")
    LlamaConfig(vocab_size=24_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=1,
                num_attention_heads=8).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("script", RL)
def test_the_size_of_the_model_decides_which_defaults_hold(script, larger, monkeypatch, capsys):
    args, said = flags_of(script, monkeypatch, capsys)
    assert args == script.Args() and not said
    args, said = flags_of(script, monkeypatch, capsys, "--model", str(TINY))
    assert args == script.Args(model=str(TINY))

    real = dict(script.REAL_MODEL, model=larger)
    args, said = flags_of(script, monkeypatch, capsys, f"--model={larger}", "--seed", "3")
    assert args == script.Args(**real | dict(seed=3))
    assert said.count("\n") == 1 and "weights; defaults for 20,000,000 or more: --" in said
    assert f"--learning-rate {real['learning_rate']}" in said
    args, _ = flags_of(script, monkeypatch, capsys, "--model", larger, "--lora-rank", "8",
                       "--max-response-tokens", "16")
    assert args == script.Args(**real | script.REAL_LORA | dict(lora_rank=8, max_response_tokens=16))
    args, _ = flags_of(script, monkeypatch, capsys, "--model", larger, "--no-gradient-checkpointing",
                       "--learning-rate", "0.0005")
    assert args == script.Args(**real | dict(gradient_checkpointing=False, learning_rate=5e-4))


def test_real_defaults_are_within_what_is_published():
    for script in RL:
        assert 1e-7 < script.REAL_MODEL["learning_rate"] <= 1e-5 < script.REAL_LORA["learning_rate"] <= 2e-4
        assert script.REAL_MODEL["max_response_tokens"] >= 512 and not script.REAL_MODEL["entropy_coef"]


@pytest.mark.parametrize("script", [*RL, sft])
def test_a_gguf_file_is_refused_with_the_name_of_the_tool(script, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match=r"--model \S+model.gguf: .*tools/get_smollm2.py --gguf"):
        train(script, tmp_path / "run", model=str(tmp_path / "model.gguf"))


WARNINGS = {  # flags, what tools/diagnose.py says
    "cut": (dict(max_response_tokens=3), "100% are cut off by --max-response-tokens 3"),
    "hard": (dict(reward_fn=f"{__file__}:nothing"), "0% of the replies are right, 0% are cut"),
    "form": (dict(reward_fn=f"{__file__}:nothing", env=f"{__file__}:Formless", env_kwargs=("test_tasks=32",)),
             " 0% have the form"),
}


def nothing(r):
    for step in r.steps:
        step.info["correct"] = 0.0
    return 0.0


class Formless(envs.load_object("envs.countdown:Countdown", "--env")):
    def start(self, task, seed):
        episode = super().start(task, seed)
        step = episode.step

        def formless(reply):
            result = step(reply)
            result.info["format"] = 0.0
            return result

        episode.step = formless
        return episode


@pytest.mark.parametrize("name", slow_but(("cut",), WARNINGS))
@pytest.mark.parametrize("script", OF_PPO_SLOW)
def test_what_teaches_nothing_says_so_and_why(script, name, tmp_path, capsys):
    flags, says = WARNINGS[name]
    train(script, tmp_path, iterations=3, eval_every=0, **flags)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "three iterations" in line and f"python tools/diagnose.py {tmp_path} says why" in line
    assert diagnose.main([str(tmp_path)]) == 1
    assert says in capsys.readouterr().out


LEARNS_ONCE = """
def score(r, seen=[]):
    seen += [r] * ("train" in r.task.id)
    return float(len(seen) % 2) if 8 < len(seen) <= 12 else 0.0  # of the four replies of the third iteration
"""


@pytest.mark.parametrize("script", RL)
def test_three_iterations_in_a_row_that_teach_nothing_are_told_once(script, tmp_path, capsys, monkeypatch):
    """Two before one that teaches are no three, and a fourth says no more than the third."""
    slow_clock(monkeypatch)  # so that each iteration has a line
    (tmp_path / "own.py").write_text(LEARNS_ONCE)
    train(script, tmp_path / "run", iterations=7, eval_every=0, eval_tasks=1, eval_samples=1,
          prompts_per_iteration=2, group_size=2, max_response_tokens=3, checkpoint_every=7,
          reward_fn=f"{tmp_path}/own.py:score")
    told = re.findall(r"^(warning: three iterations| +\d(?= +[\d,]+ s ))", capsys.readouterr().out, re.M)
    assert [line.strip() for line in told] == [*"012345", "warning: three iterations", "6", "7"]


@pytest.mark.slow
def test_the_validator_warns_of_ten_iterations_without_an_update(tmp_path):
    train(grpo_llm, tmp_path / "run", iterations=10, max_response_tokens=3, eval_every=0)
    verdict = validate(tmp_path / "run", strict=True)
    (warning,) = verdict["warnings"]
    assert verdict["ok"] and "10 iterations without" in warning
    write_jsonl(tmp_path / "train_log.jsonl", log_lines(tmp_path / "run")[:-1])
    assert not validate(tmp_path)["warnings"]


def test_the_number_of_replies_reaches_the_bar(countdown_tiny, monkeypatch):
    updates = []

    class Bar:
        def __init__(self, *_, **options):
            self.options = options

        def update(self, number):
            updates.append(number)

        def close(self):
            updates.append("closed")

    model = grpo_llm.distribute(copy.deepcopy(countdown_tiny[0]), torch.device("cpu"))
    args, env = grpo_llm.Args(), envs.make("countdown", test_tasks=8)
    engine = grpo_llm.HfEngine(model, countdown_tiny[1], args)
    monkeypatch.setattr(grpo_llm, "tqdm", Bar)
    grpo_llm.rollout(engine, countdown_tiny[1], env, [env.task("test", n) for n in range(8)], 4,
                     grpo_llm.Sampling(1.0, (1, "val")), args, grpo_llm.episode_reward)
    assert updates.pop() == "closed" and sum(updates) == 32 and len(updates) > 8


@pytest.mark.parametrize("loss", typing.get_args(typing.get_type_hints(grpo_llm.Args)["loss"]))
def test_the_correction_that_is_meant_depends_on_the_loss(loss):
    assert grpo_llm.Args(loss=loss).weighting == ("none" if loss == "dppo" else "tis")
    assert grpo_llm.Args(loss=loss, correction="none").weighting == "none"
    for correction in ("tis", "icepop", "mis"):
        if loss == "dppo":
            with pytest.raises(ValueError, match="--loss dppo takes its ratio to the sampler: expected no"):
                grpo_llm.Args(loss=loss, correction=correction)
        else:
            assert grpo_llm.Args(loss=loss, correction=correction).weighting == correction
    bounds = dict(loss=loss, correction_bounds=(0.5, 2.0))
    if loss == "dppo":
        with pytest.raises(ValueError, match="--correction-bounds"):
            grpo_llm.Args(**bounds)
    else:
        assert grpo_llm.Args(**bounds).weighting == "tis"


def test_flags_of_the_defaults_exist():
    for script in (*RL, sft):
        names = {field.name for field in dataclasses.fields(script.Args)}
        assert set(script.REAL_MODEL) | set(getattr(script, "REAL_LORA", ())) <= names
