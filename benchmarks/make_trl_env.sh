#!/bin/sh
# A virtual environment with TRL for benchmarks/grpo_vs_trl.py and sft_vs_trl.py: its transformers is not that of
# requirements.txt. TRL's side trains an adapter with PEFT, which TRL does not bring along.
#
#     benchmarks/make_trl_env.sh                   # .venv-trl in the repository
#     benchmarks/make_trl_env.sh DIR [PYTHON]      # elsewhere, or with another Python than python3
#
# Both benchmarks measure CPUs: on Linux, torch is the build for them, which spares some gigabytes.
set -eu
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$repository/.venv-trl}
"${2:-python3}" -m venv "$folder"
if [ "$(uname)" = Linux ]; then
    "$folder/bin/pip" install torch==2.13.0+cpu ||
        "$folder/bin/pip" install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
fi
"$folder/bin/pip" install transformers==5.23.0 trl==1.16.0 \
    $(grep -E '^(torch|datasets|peft)==' "$repository/requirements.txt")
"$folder/bin/python" -c "import peft; from trl import GRPOTrainer, SFTTrainer; print('TRL is ready:', '$folder')"
