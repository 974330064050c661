#!/bin/sh
# A virtual environment with TRL for benchmarks/grpo_vs_trl.py: its pins disagree with requirements.txt.
#
#     benchmarks/make_trl_env.sh                   # .venv-trl in the repository
#     benchmarks/make_trl_env.sh DIR [PYTHON]      # elsewhere, or with another Python than python3
#
# On Linux without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares some gigabytes.
set -eu
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$repository/.venv-trl}
"${2:-python3}" -m venv "$folder"
"$folder/bin/pip" install torch==2.13.0 transformers==5.23.0 trl==1.16.0
"$folder/bin/python" -c "from trl import GRPOTrainer; print('TRL is ready:', '$folder')"
