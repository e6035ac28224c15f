#!/usr/bin/env bash
# Makes every table of benches/transformer_bench for the size small at length 128, and a page of them, on a CPU:
#
#     XENTILE_XLA_LIBRARY=.. scripts/transformer_small.sh FOLDER [--resume]
#
# Runs the `python` on PATH, which needs the packages of scripts/requirements-train.txt. Rows and the page go to
# FOLDER. With --resume rows that FOLDER has are kept.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if (($# < 1 || $# > 2)) || [[ ${2:---resume} != --resume ]]; then
    printf 'transformer_small: error: it was given "%s"; it takes FOLDER, and then --resume or nothing\n' "$*" >&2
    exit 2
fi
folder=$1
shift
mkdir -p "$folder"
export PYTHONPATH=$PWD/benches:$PWD/examples:$PWD/pallas_bridge/src JAX_PLATFORMS=cpu
# Running takes as long here as compiling: LLVM optimises a little, where tests have it do nothing.
export XLA_FLAGS="--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false ${XLA_FLAGS:-}"
(($#)) || rm -f "$folder"/small-*.jsonl

# The commands of a lane, one after another; their rows go to a file of its own.
run_lane() {
    local lane=$1 status=0 command settings started
    shift
    for command; do
        settings=()
        [[ $command != jit ]] || settings=(--set 'modes=[forward_backward]')
        [[ $command != compare ]] || settings=(--norm auto --attention auto --mlp auto --loss auto --set modes=forward)
        [[ $command != precision ]] || settings=(--set 'policies=[float32,bfloat16,mixed]')
        started=$SECONDS
        python -m transformer_bench "$command" --config benches/transformer_bench/configs/small-ci.yaml \
            "${settings[@]}" --json "$folder/small-$lane.jsonl" --resume || status=1
        printf '%s took %d s\n' "$command" $((SECONDS - started))
    done
    return "$status"
}

# Two at once: each compiles most of its time, which takes one core.
status=0
run_lane a precision layers memory compare &
other=$!
run_lane b jit time kernels attention || status=1
wait "$other" || status=1
python -m transformer_bench report "$folder"/small-{a,b}.jsonl --out "$folder/small.md" --html "$folder/small.html"
exit "$status"
