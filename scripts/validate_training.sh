#!/usr/bin/env bash
# Trains the example in examples/train with every kernel from one seed, and compares losses, speed and
# memory; on an NVIDIA GPU also within a memory budget:
#
#     scripts/validate_training.sh                     50 steps of the default model, on this machine
#     scripts/validate_training.sh --num_train_steps 12 -- --model_size test --text README.md
#     scripts/validate_training.sh --out DIR -- --model_size qwen2.5-0.5b --remat
#
# Options before -- are those of `python -m train.validate --help`; options after -- go to each run. On first use
# the script makes a virtual environment (about 900 MB), .venv-train or the folder in XENTILE_VENV, and with a
# GPU installs JAX's plug-in for it there. The kernels come from XENTILE_XLA_LIBRARY, or from pallas_bridge if it
# is installed in that environment, or else are built here.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

export XENTILE_VENV=${XENTILE_VENV:-.venv-train}
scripts/setup.sh scripts/requirements-{jax,real,train}.txt
python=$XENTILE_VENV/bin/python
# Not of the folder of that name here.
is_installed() { "$python" -P -c 'import pallas_bridge' 2>/dev/null; }
if command -v nvidia-smi >/dev/null; then
    jax=$("$python" -c 'import jax; print(jax.__version__)')
    "$python" -c 'import jax_cuda13_plugin' 2>/dev/null ||
        "$python" -m pip install --quiet --disable-pip-version-check "jax[cuda13]==$jax"
    # Its build has the kernels for GPUs, with a compiler of its own.
    [[ -n ${XENTILE_XLA_LIBRARY:-} ]] || is_installed ||
        "$python" -m pip install --quiet --disable-pip-version-check ./pallas_bridge
elif [[ -z ${XENTILE_XLA_LIBRARY:-} ]] && ! is_installed; then
    # All that there is, as the first command of README.md: a part has other features, and is compiled again.
    cargo build --release
    export XENTILE_XLA_LIBRARY=${CARGO_TARGET_DIR:-$PWD/target}/release/libxentile_xla.so
fi
[[ -z ${XENTILE_XLA_LIBRARY:-} ]] || export PYTHONPATH=$PWD/pallas_bridge/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$PWD/examples${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m train.validate "$@"
