"""Merge a LoRA adapter into its base: a plain model folder for transformers, vLLM or the next training.

    python tools/merge_adapter.py --adapter runs/grpo/RUN/checkpoints/step_000500 --output-dir merged
    python tools/merge_adapter.py --adapter DIR --base-model Qwen/Qwen2.5-1.5B-Instruct --output-dir merged

W + scale B A is computed in float32 on the CPU and stored as the base's files are, or in --dtype. The folder
gets the base's config.json to the letter, as many parameters as the base (tied embeddings stay tied), its
generation config, and a tokenizer with its chat template: the adapter's, where one lies beside it, else the
base's. Logits of random tokens are compared twice: those of the merged model with base + adapter, and those
of the folder, read again, with what was to be written.

Prints a line of JSON. adapter_effect is how far the adapter moves a logit at most; largest_difference how far
one of the merged model is from base + adapter in float32; rounding how far storing it in fewer bits moves
one: weigh that against the effect. What cannot be merged is one line of JSON on standard error and exit
status 1, and there is no folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import huggingface_hub
import peft
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, first_line
from envs.files import flush_to_disk
from tools.command_line import answers_in_json

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
             "*.tiktoken", "chat_template*", "additional_chat_templates")


def read_json(path: Path, where: str) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{where}: its {path.name} cannot be read ({first_line(error)})") from error


def read_adapter(folder: Path) -> peft.LoraConfig:
    """The config of a LoRA adapter whose files are whole.  BadInput for anything else"""
    where = f"--adapter {folder}"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():  # PEFT would ask the hub for it
            raise BadInput(f"{where}: there is no {name} in it; expected the folder of a PEFT adapter")
    values = read_json(folder / "adapter_config.json", where)
    if values.get("peft_type") != "LORA":
        raise BadInput(f"{where}: expected a LoRA adapter, got peft_type {values.get('peft_type')}")
    # PEFT drops keys that it does not know: what a later release switches on would silently be off.
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    if unknown := [name for name, value in values.items() if value and name not in known]:
        raise BadInput(f"{where}: its adapter_config.json sets {some(unknown)}, which is unknown to PEFT "
                       + peft.__version__)
    try:
        name = "adapter_model.safetensors"
        broken = [key for key, tensor in load_file(folder / name).items() if not tensor.isfinite().all()]
        name = "adapter_config.json"
        config = peft.LoraConfig.from_pretrained(folder)
    except Exception as error:  # safetensors, torch and PEFT each have exceptions of their own
        raise BadInput(f"{where}: its {name} cannot be read ({first_line(error)})") from error
    if broken:
        raise BadInput(f"{where}: NaN or infinity in {some(broken)}")
    return config


def find_base(name: str, config: peft.LoraConfig, adapter: Path) -> tuple[Path, str]:
    """The base's folder, fetched if it is a hub id, and what messages call it."""
    where, revision = f"--base-model {name}", None
    if not name:
        name, revision = config.base_model_name_or_path, config.revision
        where = f"base model {name}, named by --adapter {adapter}"
    if not name:
        raise BadInput(f"--adapter {adapter}: its adapter_config.json names no base; give --base-model")
    folder = next((path for path in (Path(name), ROOT / name) if (path / "config.json").is_file()), None)
    if not folder and (Path(name).exists() or name.count("/") != 1 or name.startswith("models/")):
        raise BadInput(f"{where}: expected a folder with config.json and weights, or a hub id")
    try:
        folder = folder or Path(huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=["*.json", "model*.safetensors", *TOKENIZER]))
    except Exception as error:  # offline, no such repository, a full disk
        raise BadInput(f"{where}: no such folder, nor can it be fetched ({first_line(error)})") from error
    if (folder / "adapter_config.json").exists():  # from_pretrained would add that adapter, unasked
        raise BadInput(f"{where}: it holds an adapter itself")
    if "quantization_config" in read_json(folder / "config.json", where):
        raise BadInput(f"{where}: it is quantized; give the model that it was made from as --base-model")
    return folder, where


def load_base(folder: Path, where: str):
    """-> a causal language model in float32, and the types that its tensors are stored in, {name: dtype}"""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True)
        types = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                types |= {name: DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()}
    except Exception as error:  # every kind of broken folder has an exception of its own
        raise BadInput(f"{where}: it cannot be loaded ({first_line(error)})") from error
    # transformers puts random numbers where the files lack a tensor, and drops one that it has no place for.
    for keys, what in (("missing_keys", "the files lack"), ("unexpected_keys", "the model has no place for")):
        if info[keys]:
            raise BadInput(f"{where}: {what} {some(info[keys])}")
    return model.eval(), types


def attach(base, config: peft.LoraConfig, adapter: Path, where: str) -> peft.PeftModel:
    """base + adapter.  BadInput, naming both, if one does not fit the other"""
    config.inference_mode = True
    try:
        model = peft.PeftModel(base, config)
        found = model.load_adapter(adapter, "default", torch_device="cpu")
        wrong = [f"{what} {some(keys)}" for what, keys in (
            ("the adapter lacks", found.missing_keys), ("the base has no place for", found.unexpected_keys))
            if keys]
    except KeyError as error:  # a module that is saved as a whole
        wrong = [f"the adapter lacks {some(error.args)}"]
    except Exception as error:  # PEFT raises many kinds
        size = re.search(r"size mismatch for (\S+): .*?Size\((.*?)\).*?Size\((.*?)\)", str(error))
        wrong = [f"{some([size[1]])} is {size[2]} in the adapter, and would have to be {size[3]}" if size
                 else first_line(error)]
    if wrong:
        raise BadInput(f"--adapter {adapter} does not fit {where} ({type(base).__name__}): "
                       + "; ".join(wrong))
    return model.eval()


def merge(base, config: peft.LoraConfig, adapter: Path, where: str):
    """-> the merged model in float32, tokens, its logits on them, what to report"""
    def ends():
        return base.get_input_embeddings(), base.get_output_embeddings()

    count, old_ends, tied = base.num_parameters(), ends(), getattr(base.config, "tie_word_embeddings", False)
    modules = {name: module for name, module in base.named_modules() if module._parameters}
    tokens = torch.randint(len(old_ends[0].weight), (2, 16), generator=torch.Generator().manual_seed(1))
    plain = logits(base, tokens)
    model = attach(base, config, adapter, where)
    adapted, inside, tied = logits(model, tokens), dict(base.named_modules()), tied and ends() != old_ends
    try:
        model = model.merge_and_unload()
        merged = logits(model, tokens)
    except Exception as error:
        raise BadInput(f"--adapter {adapter} cannot be merged into {where}: {first_line(error)}") from error
    effect, difference, scale = largest(adapted - plain), largest(merged - adapted), largest(adapted)
    wrong = []
    if model.num_parameters() != count:
        wrong.append(f"it would have {model.num_parameters():,} parameters, and the base has {count:,}")
    # "not": NaN is refused too. The second bound is for weak adapters, whose absence the first would not see.
    elif not difference <= min(1e-4 * scale, 1e-5 * scale + effect / 100):
        wrong.append(f"its logits would be up to {difference:.2g} from those of base + adapter")
    if wrong and tied:  # PEFT parts the two, or adds to the one tensor that they are once for each
        wrong.append("the base ties its embedding to its head, and the adapter changes them")
    if wrong:
        raise BadInput(f"--adapter {adapter} cannot be merged into {where}: {'; '.join(wrong)}")
    return model, tokens, merged, {
        "parameters": count, "modules": sum(inside.get(name) is not old for name, old in modules.items()),
        "adapter_effect": effect, "largest_difference": difference}


def write(model, types: dict, tokens, merged, base: Path, args: argparse.Namespace) -> dict:
    """args.output_dir, complete and read again, or not at all.  -> what to report"""
    common = max(DTYPES.values(), key=list(types.values()).count)
    chosen = None if args.dtype == "base" else getattr(torch, args.dtype)
    # Parameter by parameter: model.to() would also round what no file holds, such as rotary frequencies.
    for name, tensor in model.named_parameters():
        tensor.data = tensor.data.to(chosen or types.get(name) or common)
    out = args.output_dir.resolve()
    temporary = out.with_name(f".{out.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = save(temporary, model, base, args)
        rounded = logits(model.float(), tokens)
        model.to("meta")  # room for the same model again
        again = largest(logits(load_base(temporary, "the merged model")[0], tokens) - rounded)
        if not again <= 1e-5 * largest(rounded):
            raise BadInput(f"--output-dir {out}: read again, its logits are off by {again:.2g}")
        for path in (*temporary.rglob("*"), temporary):
            flush_to_disk(path)
        temporary.rename(out)
        flush_to_disk(out.parent)
    except BadInput:
        raise
    except Exception as error:  # a full disk: each library has an exception of its own for it
        raise BadInput(f"--output-dir {out}: cannot be written ({first_line(error)})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"dtype": str(chosen or common).removeprefix("torch."), "rounding": largest(rounded - merged),
            "tokenizer": tokenizer}


def save(folder: Path, model, base: Path, args: argparse.Namespace) -> str:
    """All files of the merged model.  -> whose tokenizer it got"""
    model.generation_config = GenerationConfig()  # the base's may be one that transformers refuses to write
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = (base / "config.json").read_bytes()
    config = json.loads(text)
    changed = {key: args.dtype for key in ("dtype", "torch_dtype") if key in config and args.dtype != "base"}
    new = config | changed
    (folder / "config.json").write_bytes(text if new == config else json.dumps(new, indent=2).encode())
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors lets only the owner read
    holders = [(name, path) for name, path in (("adapter", args.adapter), ("base", base))
               if (path / "tokenizer_config.json").is_file() or (path / "tokenizer.json").is_file()]
    found = [path for _, holder in holders[:1] for pattern in TOKENIZER for path in holder.glob(pattern)]
    # The adapter's own, if it has one, replaces the base's.
    found += filter(Path.is_file, (path / "generation_config.json" for path in (base, args.adapter)))
    for path in found:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    return holders[0][0] if holders else "none"


@torch.no_grad()
def logits(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits                               # (2, 16, V)


def largest(difference) -> float:
    return float(difference.abs().max())


def some(names) -> str:
    names = sorted(name.removeprefix("base_model.model.").replace(".default", "") for name in names)
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def run(args: argparse.Namespace) -> dict:
    if args.output_dir.exists() and (not args.output_dir.is_dir() or any(args.output_dir.iterdir())):
        raise BadInput(f"--output-dir {args.output_dir}: expected a new folder or an empty one")
    config = read_adapter(args.adapter)
    folder, where = find_base(args.base_model, config, args.adapter)
    base, types = load_base(folder, where)
    model, tokens, merged, report = merge(base, config, args.adapter, where)
    return {"out": str(args.output_dir)} | report | write(model, types, tokens, merged, folder, args)


@answers_in_json
def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description="Merge a LoRA adapter into its base model.")
    parser.add_argument("--adapter", type=Path, required=True, metavar="DIR",
                        help="folder of the adapter, such as a checkpoint of a run with --lora-rank")
    parser.add_argument("--base-model", default="", metavar="NAME_OR_DIR",
                        help="folder or hub id of the base (default: the one that the adapter names)")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR",
                        help="the merged model: a new folder, or an empty one")
    parser.add_argument("--dtype", choices=["base", "float32", "bfloat16"], default="base",
                        help="type to store weights in; base: as its files do. The sum is taken in float32, "
                             "and rounding it to bfloat16 changes logits, by what is printed as rounding")
    args = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT warns of is refused: keys that differ, ties that part
        return run(args)


if __name__ == "__main__":
    sys.exit(main())
