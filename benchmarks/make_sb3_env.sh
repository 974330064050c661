#!/bin/sh
# A virtual environment with stable-baselines3 for benchmarks/a2c_vs_sb3.py, and the packages that
# a2c_vecenv.py imports, in the versions of requirements.txt; for Atari ale-py, and OpenCV, with which
# stable-baselines3 shrinks pictures.
#
#     benchmarks/make_sb3_env.sh                   # .venv-sb3 in the repository
#     benchmarks/make_sb3_env.sh DIR [PYTHON]      # elsewhere, or with another Python than python3
#
# The benchmark measures CPUs: on Linux, torch is the build for them, which spares some gigabytes.
set -eu
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$repository/.venv-sb3}
"${2:-python3}" -m venv "$folder"
if [ "$(uname)" = Linux ]; then
    "$folder/bin/pip" install torch==2.13.0+cpu ||
        "$folder/bin/pip" install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
fi
"$folder/bin/pip" install -c "$repository/requirements.txt" stable-baselines3==2.9.2 torch gymnasium numpy \
    tensorboard tyro pydantic python-dotenv tqdm psutil pillow \
    ale-py==0.12.1 opencv-python-headless
"$folder/bin/python" -c "from stable_baselines3 import A2C; print('stable-baselines3 is ready:', '$folder')"
