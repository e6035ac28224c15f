#!/usr/bin/env bash
# Installs pallas_bridge from the checkout as on a machine without a GPU: the build says that it is for CPUs
# only, and takes no more processor time than two cores have in three minutes.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.."

limit_s=360
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset XENTILE_NVCC XENTILE_CUDA XENTILE_XLA_LIBRARY PYTHONPATH
if [[ -e /dev/nvidiactl || -e /proc/driver/nvidia/version ]]; then
    echo "left out: that the build looks for a GPU, as this machine has one"
    export XENTILE_CUDA=0
fi
export CARGO_TARGET_DIR=$folder/target
python3 -m venv "$folder/venv"
# JAX first, as its download is not what is timed.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "jax>=0.9.0"

TIMEFORMAT='%0U %0S %0R'
{ time "$folder/venv/bin/pip" install --verbose --disable-pip-version-check ./pallas_bridge &>"$folder/log"; } \
    2>"$folder/time" || {
    tail -n 30 "$folder/log"
    exit 1
}
read -r user_s system_s wall_s <"$folder/time"
printf 'built in %d s, %d s of processor time\n' "$wall_s" $((user_s + system_s))
((user_s + system_s <= limit_s)) || {
    printf 'error: the build took %d s of processor time; it must take at most %d\n' $((user_s + system_s)) "$limit_s" >&2
    exit 1
}
grep 'pallas_bridge is built for CPUs only: ' "$folder/log"
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -c '
import pallas_bridge

assert list(pallas_bridge.info().library.platforms) == ["cpu"], pallas_bridge.info().library
'
