"""Peak memory of the update at a vocabulary of 151,936 as a pass grows, against keeping the logits; or, with
--model, what a token of a pass takes in a model of any size.

    python benchmarks/update_memory.py
    python benchmarks/update_memory.py --tokens 256 1024 --out benchmarks/results/update_memory.csv
    python benchmarks/update_memory.py --model Qwen2.5-0.5B Qwen2.5-1.5B Qwen2.5-7B

Without --model: one forward and backward pass of grpo_llm.token_logprobs and a loss, in float32 on the CPU,
for a Llama with 2 layers of hidden 64 and Qwen's vocabulary: a model whose logits are all that is large.
`logits` is the plain way: model(ids).logits of the response tokens, log_softmax, gather, entropy. Each size
is a process of its own; the figure is its peak resident memory less what it held before the pass: weights and
libraries are not counted, gradients are (37 MiB, the head's). Responses have 64 tokens; no two are alike.

With --model: the bytes that autograd keeps from the forward pass to the backward pass, in the decoder, with
--dtype bfloat16, for --lora-rank 16 and for all weights, with and without --gradient-checkpointing. Only the
model's config is read. Its tensors have shapes and no values: 7B takes seconds, no memory and no GPU. What a
token takes is the difference of three rows and two, so that what does not grow with the tokens cancels; a
layer, that of all layers and one. With checkpointing, a token of the model includes two layers in full: the
one that the backward pass computes again, and the gradients within it. Where rows are of different lengths
(`padded rows`, here of 1,024 tokens), attention takes a mask and copies keys and values to all heads. The
time is that of real passes in float32 on the CPU, of two layers of the model's shape, by turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import subprocess
import sys
import time
from unittest import mock

from sides import REPOSITORY, append_csv, check_environment

sys.path.insert(0, str(REPOSITORY))
VOCABULARY, PROMPT, RESPONSE = 151_936, 16, 64

# Known by name, so that they need no network: the sizes in their config.json on the hub.
QWEN = dict(vocab_size=VOCABULARY, max_position_embeddings=32768, num_key_value_heads=2,
            tie_word_embeddings=True)
MODELS = {
    "Qwen2.5-0.5B": QWEN | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                num_attention_heads=14),
    "Qwen2.5-1.5B": QWEN | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                                num_attention_heads=12),
    "Qwen2.5-7B": QWEN | dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                              num_attention_heads=28, num_key_value_heads=4, vocab_size=152_064,
                              tie_word_embeddings=False)}
SIZES = (4096, 8192, 16384, 28000)  # of passes, in the table [tokens]
LORA_RANK = 16
ROW = 1024  # tokens of a row whose memory is counted
TIMED_ROW, TIMED_LAYERS = 128, 2  # of a pass whose time is taken


def peak_mib():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def plain_logprobs(model, batch):
    """What a first version would write: all logits at once.  -> two (B, T)."""
    import torch
    ids = torch.cat([batch["prompts"], batch["responses"]], 1)
    logits = model(ids, logits_to_keep=RESPONSE + 1).logits[:, :-1].float()              # (B, T, V)
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, batch["responses"][..., None]).squeeze(-1), entropy


def small_model():
    """A Llama whose logits are all that is large."""
    import torch
    import transformers
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True)).eval()


def one_pass(loss_of):
    """In a process of its own: forward and backward.  Prints its memory, its time and the loss as JSON."""
    before, began = peak_mib(), time.process_time()
    loss = loss_of()
    loss.backward()
    print(json.dumps(dict(mib=round(peak_mib() - before), cpu_s=round(time.process_time() - began, 2),
                          loss=round(loss.item(), 5))))


def measure(way, num_tokens):
    """The pass of one row of the table."""
    import torch

    import grpo_llm
    model, rows = grpo_llm.distribute(small_model(), torch.device("cpu")), num_tokens // RESPONSE
    ids = torch.randint(0, VOCABULARY, (rows, PROMPT + RESPONSE)).tolist()
    segments = [grpo_llm.Segment(row[:PROMPT], row[PROMPT:], [1] * RESPONSE, [0.0] * RESPONSE) for row in ids]
    args = grpo_llm.Args(microbatch_tokens=rows * (PROMPT + RESPONSE))
    ((_, batch),) = grpo_llm.microbatches(segments, args, "cpu")

    def loss():
        logprobs, entropy = (grpo_llm.token_logprobs(model, batch, 1.0) if way == "ours" else
                             plain_logprobs(model, batch))
        return -(logprobs + 0.02 * entropy).mean()

    one_pass(loss)


def compare(sizes, run, out):
    """The table of both ways at each size, in tokens; run: way, tokens -> what one_pass printed, or None."""
    rows = []
    print("| tokens in the pass | ours, MiB | all logits, MiB | ratio | CPU s, ours / all logits |")
    print("|---|---|---|---|---|")
    for tokens in sizes:
        result = {way: run(way, tokens) for way in ("ours", "logits")}
        if not result["ours"]:
            sys.exit("error: the pass of ours did not end")
        ours, plain = result["ours"], result["logits"] or dict(mib="out of memory", cpu_s="", loss=None)
        ratio = f"{plain['mib'] / ours['mib']:.1f}" if result["logits"] else ""
        if result["logits"] and abs(ours["loss"] - plain["loss"]) > 1e-3:
            sys.exit(f"error: the losses differ: {ours['loss']}, {plain['loss']}")
        print(f"| {tokens} | {ours['mib']} | {plain['mib']} | {ratio} | {ours['cpu_s']} / {plain['cpu_s']} |",
              flush=True)
        rows += [dict(tokens=tokens, way=way) | (values or dict(mib="", cpu_s="", loss=""))
                 for way, values in result.items()]
    if out:
        append_csv(out, rows)


# With --model: what a token takes


def read_config(name):
    """A name in MODELS, a folder with config.json, that file or a hub id -> the language model's config."""
    import transformers
    if name in MODELS:
        return transformers.Qwen2Config(**MODELS[name])
    return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()


def with_layers(config, layers):
    """The config of a model that has only so many layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def new_model(config, args, dtype):
    """Of random weights; with --lora-rank frozen ones and an adapter."""
    import transformers

    import grpo_llm
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return grpo_llm.add_lora(model, args) if args.lora else model


def model_of_shapes(config, args, fake):
    """The same as grpo_llm.main makes it, of tensors that have a shape, a type and a device but no values."""
    import torch

    import grpo_llm
    with torch.device("meta"):
        model = new_model(config, args, torch.bfloat16 if args.lora else torch.float32)
    known = {}  # by the meta tensor's id: a tied head is its embedding
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) not in known:
                with fake:  # meta tensors themselves would do, if autocast knew their device
                    known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    known[id(tensor)] = torch.nn.Parameter(known[id(tensor)], tensor.requires_grad)
            setattr(module, name, known[id(tensor)])
    if args.gradient_checkpointing:
        grpo_llm.checkpoint_layers(model)
    return model


def one_batch(rows, length, args):
    """The tensors of a pass of different rows of equal length, a prompt of one token included."""
    import grpo_llm
    num_response = length - 1
    segments = [grpo_llm.Segment([0], [row] * num_response, [1] * num_response, [0.0] * num_response)
                for row in range(rows)]
    ((_, batch),) = grpo_llm.microbatches(segments, args, "cpu")
    return batch


def kept_bytes(model, args, fake, rows, padded):
    """What autograd keeps of a forward pass of the decoder for the backward pass, weights aside."""
    import torch

    import grpo_llm
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}  # tensor by storage; holding it, so that no address is used twice

    def keep(tensor):
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    # transformers makes a mask of the attention only where a token is padding, for which it looks at values.
    mask = mock.patch("transformers.masking_utils._ignore_causal_mask_sdpa", lambda *_, **__: not padded)
    with mask, fake, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = one_batch(rows, ROW + 1, args)  # the last token predicts nothing
        with grpo_llm.precision(args, model.device):
            grpo_llm.hidden_states(model.get_decoder(), batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def reckon(config, lora_rank, padded=False):
    """What a token of a pass takes, and what else is on the card.  -> {name: bytes}

    layer, layer_checkpointed: kept per token and layer; token, token_checkpointed: per token, of all layers;
    frozen, trained: weights; casts: what does not grow with the tokens, bfloat16 copies of trained weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    import grpo_llm
    fake = FakeTensorMode()
    layers = config.num_hidden_layers
    figures = {}
    for suffix, checkpointing in (("", False), ("_checkpointed", True)):
        args = grpo_llm.Args(lora_rank=lora_rank, dtype="bfloat16", gradient_checkpointing=checkpointing,
                             microbatch_tokens=4 * ROW)
        per_token = {}  # by the number of layers
        for number in (1, layers):
            model = model_of_shapes(with_layers(config, number), args, fake)
            two = kept_bytes(model, args, fake, 2, padded)
            three = kept_bytes(model, args, fake, 3, padded)
            per_token[number] = (three - two) / ROW
        figures["layer" + suffix] = (per_token[layers] - per_token[1]) / max(layers - 1, 1)
        figures["token" + suffix] = per_token[layers]
        if not checkpointing:
            figures["casts"] = two - 2 * ROW * per_token[layers]
    # The layer that is computed again, and the gradients within it, which are fewer: at most 0.63 of it where
    # every tensor of a backward pass was counted, in the three models above.
    figures["token_checkpointed"] += 2 * figures["layer"]
    figures["frozen"] = figures["trained"] = 0
    for parameter in model.parameters():
        name = "trained" if parameter.requires_grad else "frozen"
        figures[name] += parameter.numel() * parameter.element_size()
    return figures


def time_ratio(config, lora_rank, repeats):
    """CPU time of a forward and backward pass with checkpointing over that without; they take turns."""
    import torch

    import grpo_llm
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = with_layers(config, min(config.num_hidden_layers, TIMED_LAYERS))
    config.vocab_size = 1024  # the head is the same in both
    config.pad_token_id = None  # it may be outside of these
    args = grpo_llm.Args(lora_rank=lora_rank)
    model = grpo_llm.distribute(new_model(config, args, torch.float32), torch.device("cpu"))
    batch = one_batch(1, min(TIMED_ROW, config.max_position_embeddings), args)

    def seconds():
        began = time.process_time()
        logprobs, _ = grpo_llm.token_logprobs(model, batch, 1.0)
        logprobs.mean().backward()
        model.zero_grad(set_to_none=True)
        return time.process_time() - began

    seconds()  # the first one is slower
    ratios = []
    for _ in range(repeats):
        without = seconds()
        grpo_llm.checkpoint_layers(model)
        ratios.append(seconds() / without)
        for module in model.modules():
            module.__dict__.pop("forward", None)  # what checkpoint_layers has set
    return statistics.median(ratios)


def reckon_model(name, repeats):
    """Rows of the CSV: an adapter or all weights trained, without checkpointing and with it."""
    config = read_config(name)
    rows = []
    for trained, rank in ((f"LoRA {LORA_RANK}", LORA_RANK), ("all", 0)):
        figures = reckon(config, rank)
        padded = reckon(config, rank, padded=True)
        ratio = time_ratio(config, rank, repeats) if repeats else ""
        rest = {f"{part}_gib": figures[part] / 2**30 for part in ("frozen", "trained", "casts")}
        for suffix, checkpointing, relative_time in (("", "no", 1.0), ("_checkpointed", "yes", ratio)):
            rows.append(dict(model=name, trained=trained, checkpointing=checkpointing,
                             layer_kib=figures["layer" + suffix] / 2**10,
                             token_mib=figures["token" + suffix] / 2**20,
                             padded_mib=padded["token" + suffix] / 2**20, time=relative_time) | rest)
    return rows


def print_tables(rows):
    print("| model | trained | checkpointing | KiB a token and layer | MiB a token | padded rows | "
          + " | ".join(f"{size:,} tokens, GiB" for size in SIZES) + " | time |")
    print("|---|---|---|---|---|---|" + "---|" * len(SIZES) + "---|")
    for row in rows:
        passes = " | ".join(f"{row['token_mib'] * size / 2**10:.1f}" for size in SIZES)
        relative_time = f"{row['time']:.2f}" if row["time"] else ""
        print(f"| {row['model']} | {row['trained']} | {row['checkpointing']} | {row['layer_kib']:.1f} | "
              f"{row['token_mib']:.2f} | {row['padded_mib']:.2f} | {passes} | {relative_time} |")
    print("\nAnd whatever the pass, in GiB:\n")
    print("| model | trained | frozen weights, bfloat16 | trained weights, float32 | their gradients | "
          "AdamW's moments | their bfloat16 copies | sum |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows[::2]:
        trained = row["trained_gib"]
        parts = [row["frozen_gib"], trained, trained, 2 * trained, row["casts_gib"]]
        cells = " | ".join(f"{part:.2f}" for part in [*parts, sum(parts)])
        print(f"| {row['model']} | {row['trained']} | {cells} |")


def in_a_process(*command):
    """What a measurement printed, or None if it was killed; what it complained of is shown."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--model", nargs="+", default=[], metavar="MODEL",
                        help=f"{', '.join(MODELS)}, a folder with config.json, that file, or a hub id")
    parser.add_argument("--repeats", type=int, default=5, help="of the time, with --model; 0: no time")
    parser.add_argument("--out", default="", help="CSV file to append the rows to")
    parser.add_argument("--measure", nargs=2, help="a single pass, as the table starts it: way and tokens")
    options = parser.parse_args()
    check_environment("torch", "transformers", "tyro", "pydantic", "peft")
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
    elif options.model:
        rows = [row for name in options.model for row in reckon_model(name, options.repeats)]
        print_tables(rows)
        if options.out:
            append_csv(options.out, rows)
    else:
        compare(options.tokens, lambda way, tokens: in_a_process(__file__, "--measure", way, str(tokens)),
                options.out)


if __name__ == "__main__":
    main()
