"""A step of sft.py, replayed in float64: what the equations make of the rows is in its checkpoint and record."""

import json

import peft
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from tests.run_folders import TINY, records, train

ROWS = [("6 18 14 -> 38", "18 + 14 = 32; 32 + 6 = 38"), ("1 1 -> 2", "1 + 1 = 2"), ("9 4 -> 5", "9 - 4 = 5"),
        ("3 7 18 -> 28", "18 + 7 = 25; 25 + 3 = 28"), ("20 20 20 -> 60", "20 + 20 = 40; 40 + 20 = 60")]
CASES = {
    "default": {},
    "small-passes": dict(microbatch_tokens=20, weight_decay=3.0, beta2=0.7),
    "packed": dict(packing=True, microbatch_tokens=60, schedule="constant"),
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


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_sft_is_the_update_that_is_written(case, tmp_path):
    """Each step learns all rows, and the second one is held against the first one's checkpoint."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(dict(prompt=prompt, response=text)) + "\n" for prompt, text in ROWS))
    flags = dict(steps=2, batch_size=len(ROWS), val_ratio=0.0, eval_every=0, checkpoint_every=1, log_every=1,
                 keep_checkpoints=0, warmup_steps=4, model=TINY, train_files=(str(path),)) | CASES[case]
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
