"""Peak memory of the update at a vocabulary of 151,936 as a pass grows, against keeping the logits.

    python benchmarks/update_memory.py
    python benchmarks/update_memory.py --tokens 256 1024 --out benchmarks/results/update_memory.csv

One forward and backward pass of grpo_llm.token_logprobs and a loss, in float32 on the CPU, for a Llama with
2 layers of hidden 64 and Qwen's vocabulary: a model whose logits are all that is large. `logits` is the
plain way: model(ids).logits of the response tokens, log_softmax, gather, entropy. Each size is a process of
its own; the figure is its peak resident memory less what it held before the pass: weights and libraries are
not counted, gradients are (37 MiB, the head's). Responses have 64 tokens; no two are alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from sides import REPOSITORY, append_csv

sys.path.insert(0, str(REPOSITORY))
VOCABULARY, PROMPT, RESPONSE = 151_936, 16, 64


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


def in_a_process(*command):
    """What a measurement printed, or None if it was killed; what it complained of is shown."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--out", default="", help="CSV file to append the rows to")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
    else:
        compare(options.tokens, lambda way, tokens: in_a_process(__file__, "--measure", way, str(tokens)),
                options.out)


if __name__ == "__main__":
    main()
