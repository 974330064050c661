"""Peak memory of the update at a vocabulary of 151,936 as a pass grows, against keeping the logits; or what
autograd keeps of each token of a pass, for any model.

    python benchmarks/update_memory.py
    python benchmarks/update_memory.py --tokens 256 1024 --out benchmarks/results/update_memory.csv
    python benchmarks/update_memory.py --model Qwen2.5-0.5B Qwen2.5-1.5B Qwen2.5-7B --time
    python benchmarks/update_memory.py --model models/smollm2-135m

One forward and backward pass of grpo_llm.token_logprobs and a loss, in float32 on the CPU, for a Llama with
2 layers of hidden 64 and Qwen's vocabulary: a model whose logits are all that is large. `logits` is the
plain way: model(ids).logits of the response tokens, log_softmax, gather, entropy. Each size is a process of
its own; the figure is its peak resident memory less what it held before the pass: weights and libraries are
not counted, gradients are (37 MiB, the head's). Responses have 64 tokens; no two are alike.

With --model (a folder, a hub id, or a name of SHAPES) no weights are read and nothing is computed: a forward
pass on shapes alone tells which tensors the backward pass will need, in bytes per token of a pass, with and
without --gradient-checkpointing. With it a layer keeps its input, and one layer at a time all that it needs.
Two layers less one, and a long row less a short one, so that weights and their casts do not count. The head
is not in it: its logits exist for one chunk at a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from sides import REPOSITORY, append_csv

sys.path.insert(0, str(REPOSITORY))
VOCABULARY, PROMPT, RESPONSE = 151_936, 16, 64


SHAPES = {  # hidden, intermediate, heads, key and value heads, layers, vocabulary, tied head
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 24, 151_936, True),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 28, 151_936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 28, 152_064, False)}
LENGTHS = 4096, 8192, 16384, 28000  # of a pass, in the table [tokens]


def peak_mib():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def plain_logprobs(model, batch):
    """What a first version would write: all logits at once.  -> two (B, T)."""
    import torch
    prompts = batch["prompts"][batch["prompt_of_row"]]
    ids = torch.cat([prompts, batch["responses"]], 1)
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
    args = grpo_llm.Args(microbatch_tokens=num_tokens)
    ((_, batch),) = grpo_llm.passes(segments, args, "cpu")

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


def config_of(name):
    """The config of a model by its name in SHAPES, its folder or its hub id."""
    import transformers
    if name not in SHAPES:
        return transformers.AutoConfig.from_pretrained(name).get_text_config()
    hidden, intermediate, heads, kv_heads, layers, vocabulary, is_tied = SHAPES[name]
    return transformers.Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary,
        tie_word_embeddings=is_tied)


def kept_bytes(config, num_layers, num_tokens, lora_rank, checkpointing):
    """What the backward pass of a row needs beside the weights, in bfloat16 autocast [bytes]."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.modeling_layers import GradientCheckpointingLayer

    import grpo_llm
    shape = dict(num_hidden_layers=num_layers, layer_types=None, vocab_size=64)
    small = type(config)(**config.to_dict() | shape)
    dtype = torch.bfloat16 if lora_rank else torch.float32
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(small, dtype=dtype).eval()
    model = model.to_empty(device="cpu")
    if lora_rank:
        model = grpo_llm.add_lora(model, grpo_llm.Args(lora_rank=lora_rank, dtype="bfloat16"))
    kept = {}  # storage -> its size, and a tensor that keeps it alive

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    def keep_input(layer, given):
        keep(given[0])

    if checkpointing:
        grpo_llm.checkpoint_layers(model)
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.register_forward_pre_hook(keep_input)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16), hooks:
        model.get_decoder()(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    return sum(size for size, _ in kept.values())


def kept_per_token(config, lora_rank):
    """Of a token in a pass, in one layer without and with checkpointing, then in all layers so [bytes]."""
    def of_layer(checkpointing):
        def second_layer(num_tokens):
            two, one = (kept_bytes(config, n, num_tokens, lora_rank, checkpointing) for n in (2, 1))
            return two - one

        return (second_layer(384) - second_layer(128)) / 256

    plain, checkpointed, layers = of_layer(False), of_layer(True), config.num_hidden_layers
    return plain, checkpointed, plain * layers, checkpointed * layers + plain


def states_gib(config, lora_rank):
    """Weights, gradients and AdamW's moments [GiB]; of an adapter they are small."""
    import torch
    import transformers
    with torch.device("meta"):
        number = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    return number * (2 if lora_rank else 16) / 2**30


def table_of_models(names):
    lengths = " | ".join(f"{length:,}" for length in LENGTHS)
    print("| model | trained | weights and states, GiB | checkpointing | KiB per token and layer | MiB per "
          f"token | {lengths} tokens, GiB |")
    print("|" + "---|" * (6 + len(LENGTHS)))
    for name in names:
        config = config_of(name)
        for lora_rank in (16, 0):
            *of_layer, plain, checkpointed = kept_per_token(config, lora_rank)
            states = states_gib(config, lora_rank)
            for says, layer, of_all in ("no", of_layer[0], plain), ("yes", of_layer[1], checkpointed):
                gib = " | ".join(f"{of_all * length / 2**30:.1f}" for length in LENGTHS)
                print(f"| {name} | {'LoRA 16' if lora_rank else 'all'} | {states:.1f} | {says} | "
                      f"{layer / 2**10:.1f} | {of_all / 2**20:.2f} | {gib} |", flush=True)


def time_of_checkpointing(repeats=7):
    """A forward and backward pass of a Llama with 4 layers, with checkpointing and without, by turns."""
    import torch
    import transformers

    import grpo_llm
    torch.set_num_threads(1)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
            num_attention_heads=8)).eval())
    grpo_llm.checkpoint_layers(models[1])
    seconds = [], []
    ids = torch.randint(0, 1024, (4, 256))
    for _ in range(repeats):
        for model, taken in zip(models, seconds, strict=True):
            began = time.process_time()
            model.get_decoder()(ids, use_cache=False).last_hidden_state.sum().backward()
            taken.append(time.process_time() - began)
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
    print(f"a forward and backward pass takes {ratio:.2f} times as long with checkpointing (medians of "
          f"{repeats}, by turns)")


def in_a_process(*command):
    """What a measurement printed, or None if it was killed; what it complained of is shown."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--out", default="", help="CSV file to append the rows to")
    parser.add_argument("--model", nargs="+", help="what is kept of a token, for these models")
    parser.add_argument("--time", action="store_true", help="with --model: the time that checkpointing takes")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        table_of_models(options.model)
        if options.time:
            time_of_checkpointing()
    elif options.measure:
        measure(options.measure[0], int(options.measure[1]))
    else:
        compare(options.tokens, lambda way, tokens: in_a_process(__file__, "--measure", way, str(tokens)),
                options.out)


if __name__ == "__main__":
    main()
