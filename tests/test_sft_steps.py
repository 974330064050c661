"""A step of sft.py, replayed in float64; and what a run that goes on must know of the steps before."""

import json

import peft
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import sft
from envs import BadInput
from tests.run_folders import TINY, killed_after, records, same_end, train

ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"),
        ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"), ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60")]
CASES = {
    "small-passes": dict(microbatch_tokens=20, weight_decay=3.0, beta2=0.7),
    "lora": dict(lora_rank=2, learning_rate=1e-2, gradient_checkpointing=True),
}


def checkpoint(folder, step):
    """-> the model in float64, its trained weights, the state of the optimiser"""
    place = folder / "checkpoints" / f"step_{step:06d}"
    adapted = (place / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(TINY if adapted else place)
    model = peft.PeftModel.from_pretrained(model, place, is_trainable=True) if adapted else model
    model = model.double().eval()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return model, weights, torch.load(place / "trainer_state.pt")["optimizer"]["state"]


def tokens_of(tokenizer):
    """Each row's ids, and how many of them are the prompt's."""
    for prompt, response in ROWS:
        messages = [dict(role="user", content=prompt), dict(role="assistant", content=response)]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        opening = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert whole.startswith(opening) and whole.endswith(tokenizer.eos_token)
        yield tuple(tokenizer(text, add_special_tokens=False).input_ids for text in (whole, opening))


@pytest.fixture
def rows(tmp_path):
    """A file of them."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(dict(prompt=prompt, response=text)) + "\n" for prompt, text in ROWS))
    return str(path)


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_sft_is_the_update_that_is_written(case, rows, tmp_path):
    """Each step learns all rows, and the second one is held against the first one's checkpoint."""
    flags = dict(steps=2, batch_size=len(ROWS), val_ratio=0.0, eval_every=0, checkpoint_every=1, log_every=1,
                 keep_checkpoints=0, warmup_steps=4, model=TINY, train_files=(rows,)) | CASES[case]
    folder = train(sft, tmp_path / "run", **flags)
    args, record = sft.Args(**flags), records(folder)[-1]
    rate = args.learning_rate * 2 / 4
    model, weights, moments = checkpoint(folder, 1)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW([dict(params=[weight], weight_decay=args.weight_decay * (weight.ndim > 1))
                                   for weight in weights.values()], lr=rate, betas=(0.9, args.beta2))
    for name, weight in weights.items():
        optimizer.state[weight] = {key: x.double() if x.ndim else x for key, x in moments[name].items()}
    losses = []
    for ids, prompt in tokens_of(AutoTokenizer.from_pretrained(TINY)):
        logits, targets = model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])
        losses.append(functional.cross_entropy(logits, targets, reduction="none")[len(prompt) - 1:])
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimizer.step()

    def near(found, expected, tolerance):
        one, other = (torch.cat([x[name].detach().double().flatten() for name in weights])
                      for x in (found, expected))
        assert (one - other).norm() < tolerance * other.norm()

    _, after, moments = checkpoint(folder, 2)
    for key in ("exp_avg", "exp_avg_sq"):
        near({name: moments[name][key] for name in weights},
             {name: optimizer.state[weight][key] for name, weight in weights.items()}, 1e-4)
    near(*({name: x[name] - before[name] for name in weights} for x in (after, weights)), 2e-3)
    found = [record[f"train/{name}"] for name in ("loss", "grad_norm", "learning_rate")]
    assert found == pytest.approx([loss.item(), norm.item(), rate], rel=1e-4)


def test_a_run_goes_on_between_two_records(rows, tmp_path):
    """The record after the checkpoint of step 3 speaks of that step, too."""
    flags = dict(model=TINY, train_files=(rows,), steps=4, batch_size=2, eval_every=0, log_every=4,
                 checkpoint_every=1, keep_checkpoints=0, output_dir=str(tmp_path / "model"))
    whole = train(sft, tmp_path / "whole", **flags)
    halves = train(sft, killed_after(whole, tmp_path / "halves", 3), **flags)
    same_end(whole, halves)
    each = records(train(sft, tmp_path / "each", **flags | dict(log_every=1)))[1:]
    mean = sum(record["train/loss"] for record in each) / 4
    assert records(whole)[-1]["train/loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("what", ["template", "rows"])
def test_a_run_does_not_go_on_with_another_template_or_file(what, rows, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(AutoTokenizer.from_pretrained(TINY).chat_template)
    flags = dict(model=TINY, train_files=(rows,), chat_template=str(template), steps=1, eval_every=0)
    folder = train(sft, tmp_path / "run", **flags)
    with open(template if what == "template" else rows, "a") as file:
        file.write("\n")
    with pytest.raises(BadInput, match="the source changed"):
        train(sft, folder, **flags)


def test_accuracy_is_that_of_replies_that_end_and_greedy_ones_are_transformers(tmp_path):
    """A reply of three numbers has 8 tokens and its eos."""
    options, found = ("test_tasks=16", "min_operands=3", "max_operands=3"), {}
    env, expected = envs.make("countdown", **envs.parse_options(options)), []
    model, tokenizer = (kind.from_pretrained(TINY) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for index in range(16):
        task = env.task("test", index)
        prompt = tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(prompt.input_ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[0]
        text = tokenizer.decode(ids[prompt.input_ids.shape[1]:], skip_special_tokens=True)
        expected.append(env.start(task, 1).step(text).info["correct"])
    for limit in (8, 9):
        folder = train(sft, tmp_path / f"{limit}", model=TINY, steps=1, env_kwargs=("skill=mixed", *options),
                       eval_tasks=16, eval_samples=2, eval_every=0, max_response_tokens=limit)
        start = records(folder)[0]
        found[limit] = [start[f"val/countdown/{name}"] for name in ("greedy", "pass@1", "pass@2")]
    assert found[8] == [0, 0, 0]
    assert 0.2 < found[9][0] == sum(expected) / 16 < 1 and 0 < found[9][1] < found[9][2] <= 2 * found[9][1]


def test_a_conversation_is_cut_only_where_it_does_not_fit():
    """Words of one token each: the start has 3, a reply 3 with its eos, what is said to it 3."""
    tokenizer = sft.new_tokenizer(["hi", "a", ":", *"1234"])
    messages = [dict(role="user", content="hi")]
    for number in "1234":
        messages += [dict(role="assistant", content=f"a {number}"), dict(role="user", content=f"hi {number}")]

    def rows(most):
        found = sft.encode_demonstration(messages[:-1], 1, tokenizer, sft.Args(max_length=most))
        return [f"{tokenizer.decode(ids)} {sum(mask)}" for ids, mask in found]

    a, b, c, d = "<bos> hi : a 1 <eos>", " hi 1 : a 2 <eos>", " hi 2 : a 3 <eos>", " hi 3 : a 4 <eos>"
    after_a, after_b = (f"<bos> hi : a {number} <eos>" for number in "23")
    for most in (24, 100):
        assert rows(most) == [f"{a}{b}{c}{d} 12"]
    for most in (18, 23):  # the last reply stands after the two turns before it
        assert rows(most) == [f"{a}{b}{c} 9", f"{after_a}{c}{d} 3"]
    for most in (12, 17):
        assert rows(most) == [f"{a}{b} 6", f"{after_a}{c} 3", f"{after_b}{d} 3"]
