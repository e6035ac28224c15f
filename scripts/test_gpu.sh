#!/usr/bin/env bash
# Tests and measures what was built, on a machine with an NVIDIA GPU and JAX for CUDA; needs no Rust:
#
#     scripts/test_gpu.sh --artifacts DIR [--log FILE] [--out DIR] [--devices N] [SECTION...]
#
# DIR holds what was built with CUDA: a wheel of pallas_bridge or libxentile_xla.so, gradcheck and
# microbench. Where XENTILE_XLA_LIBRARY names a library, that one is taken. Sections, all unless some
# are named:
#
#     jax           the tests of pallas_bridge, or of the files in JAX_TESTS, by JOBS processes (8), each
#                   of which sees one GPU of those that there are, or that CUDA_VISIBLE_DEVICES names;
#                   the cases that XENTILE_TEST_CASES says (scripts/pytest_cases.py), all unless it is set
#     sanitizer     compute-sanitizer's four tools over every kernel on small shapes
#     counters      the kernels over logits and a copy, by Nsight Compute's counters
#     gradcheck     every config that needs no file, through Rust and PJRT, by JOBS processes (8)
#     microbench    kernel and dense program at 2048 x 151643
#     sweep         time_block x block_size of configs/sweep/cross_entropy_cuda.yaml
#     peers         other cross-entropies over logits beside ours; PEERS_ARGUMENTS are passed on
#     linear-peers  the same for linear cross-entropy; LINEAR_PEERS_ARGUMENTS are passed on
#
# With --devices N, of 2 and more, the sections are these, over N GPUs of one machine:
#
#     meshes        the tests of pallas_bridge that need several devices, by JOBS processes (8)
#     scaling       losses and training steps on N GPUs beside one, and the time in collectives
#     faults        jobs of two processes, of which one fails: they end within a minute and name it
#
# Sections run one after another. A section ends after SECTION_SECONDS (240). The log names no folder of the machine; what sections
# write besides it goes to --out. XENTILE_COMMIT tells the commit, where there is no git. The summary
# comes last. Exits 1 when anything failed, 2 on bad arguments.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/tiers/common.sh

devices=1
all=(jax sanitizer counters gradcheck microbench sweep peers linear-peers)
artifacts="" log=/dev/null out="" sections=()
refuse() {
    printf 'test_gpu: error: %s\n' "$1" >&2
    exit 2
}
while (($#)); do
    case $1 in
        --artifacts | --log | --out | --devices)
            (($# > 1)) || refuse "$1 needs a value"
            case $1 in
                --artifacts) artifacts=$2 ;;
                --log) log=$2 ;;
                --out) out=$2 ;;
                --devices) devices=$2 ;;
            esac
            shift 2
            ;;
        *)
            sections+=("$1")
            shift
            ;;
    esac
done
[[ $devices =~ ^[1-9][0-9]*$ ]] || refuse "--devices is $devices: give a whole number"
if ((devices > 1)); then
    all=(meshes scaling faults)
    found=$(nvidia-smi --list-gpus | wc -l)
    ((found >= devices)) || refuse "--devices is $devices, and this machine has $found GPUs"
fi
((${#sections[@]})) || sections=("${all[@]}")
for section in "${sections[@]}"; do
    [[ " ${all[*]} " == *" $section "* ]] ||
        refuse "no section $section with --devices $devices: choose from ${all[*]}"
done
[[ -d $artifacts ]] || refuse "--artifacts must name the folder of what was built"
artifacts=$(realpath "$artifacts")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${out:-$scratch/out}
mkdir -p "$out" "$(dirname -- "$log")"
out=$(realpath "$out")
python=$(command -v "${PYTHON:-python3}")
limit=${SECTION_SECONDS:-240}
export NO_COLOR=1 PY_COLORS=0 XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2} PYTHONDONTWRITEBYTECODE=1

# The package: from a wheel, else from the checkout with the library beside it.
wheel=$(compgen -G "$artifacts/pallas_bridge-*.whl" | head -n 1 || true)
if [[ -z ${XENTILE_XLA_LIBRARY:-} && -n $wheel ]]; then
    "$python" -m zipfile -e "$wheel" "$scratch/site"
    export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
else
    export XENTILE_XLA_LIBRARY=${XENTILE_XLA_LIBRARY:-$artifacts/libxentile_xla.so}
    [[ -f $XENTILE_XLA_LIBRARY ]] || refuse "no pallas_bridge-*.whl or libxentile_xla.so in --artifacts"
    export PYTHONPATH=$PWD/pallas_bridge/src${PYTHONPATH:+:$PYTHONPATH}
fi

# The plug-in of the installed JAX, for the binaries.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
plugin=$(compgen -G "$packages/jax_plugins/xla_cuda1?/xla_cuda_plugin.so" | head -n 1 || true)
export XENTILE_PJRT_CUDA=${XENTILE_PJRT_CUDA:-$plugin}

# Takes the folders of this machine out of what is logged.
scrub() {
    sed -u -e "s#$scratch#TMP#g" -e "s#$out#OUT#g" -e "s#$artifacts#ARTIFACTS#g" -e "s#$PWD/##g" \
        -e "s#$PWD#.#g" -e "s#$packages#PACKAGES#g" -e "s#$HOME/#~/#g" \
        -e "s#${python%/bin/*}/#PYTHON/#g" -e 's#/tmp/[A-Za-z0-9._-]*#TMP#g'
}

about() {
    printf 'date    %s\n' "$(date -u +%Y-%m-%dT%H:%MZ)"
    printf 'commit  %s\n' "${XENTILE_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}"
    printf 'cases   %s\n' "${XENTILE_TEST_CASES:-all}"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader |
        sed 's/^/gpu     /' || printf 'gpu     nvidia-smi did not run\n'
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "ml_dtypes", "torch",
         "triton", "optax", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl",
         "cut-cross-entropy", "tokamax", "pytest")
print(f"python  {platform.python_version()}")
for name in names:
    try:
        print(f"        {name} {version(name)}")
    except PackageNotFoundError:
        print(f"        {name}: none")
import pallas_bridge
print(pallas_bridge.info())
PYTHON
}

section_jax() {
    local known gpus=() files=()
    read -ra files <<<"${JAX_TESTS:-pallas_bridge/tests}"
    known=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
    IFS=, read -ra gpus <<<"$known"
    in_processes "${files[@]}"
}

# Each process sees all GPUs.
section_meshes() {
    local gpus=("${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}")
    in_processes pallas_bridge/tests -m devices
}

# Runs pytest by JOBS processes, which see what the array `gpus` says in turns.
in_processes() {
    local jobs=${JOBS:-8} job code status=0 pids=()
    for ((job = 0; job < jobs; job++)); do
        CUDA_VISIBLE_DEVICES=${gpus[job % ${#gpus[@]}]} XENTILE_TEST_PLATFORM=cuda \
            XENTILE_TEST_SHARE=$job/$jobs timeout -k 5 "$limit" "$python" -m pytest \
            "$@" -p scripts.pytest_cases -p scripts.pytest_at_once \
            -p no:cacheprovider --tb=short --durations=3 >"$scratch/tests.$job" 2>&1 &
        pids+=($!)
    done
    for ((job = 0; job < jobs; job++)); do
        code=0
        wait "${pids[job]}" || code=$?
        ((code <= status)) || status=$code
        printf -- '-- process %d of %d: exit code %d\n' $((job + 1)) "$jobs" "$code"
        cat "$scratch/tests.$job"
        # One that was killed has no closing line.
        ((code < 124)) || printf 'check: 0 passed, 1 failed\n'
    done
    return "$status"
}

section_scaling() {
    check scaling timeout -k 5 "$limit" "$python" benches/peers/devices.py --devices "$devices" \
        --json "$out/devices.json"
    finish_checks
}

section_faults() {
    PYTHONPATH=$PWD/examples:$PYTHONPATH check faults timeout -k 5 "$limit" "$python" -m processes \
        --json "$out/faults.json"
    finish_checks
}

section_sanitizer() {
    local sanitizer name options arguments pids=() names=() kernels=()
    local -a of_tool of_script
    sanitizer=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/compute-sanitizer \
        command -v compute-sanitizer) || {
        printf 'compute-sanitizer not found: put it on PATH, or set CUDA_HOME\n'
        return 1
    }
    "$sanitizer" --version | tail -n 1
    # Names of kernels have that of their file, but for two whose file's name XLA's kernels may have.
    for name in bias_sums round_ $(basename -s .cu crates/xentile-cuda/kernels/*.cu); do
        [[ $name != bias && $name != round ]] || continue
        kernels+=(--kernel-name "kns=$name")
    done
    # - memcheck: room between allocations, so that a stray read does not land in a neighbour.
    # - racecheck: cuBLASLt's products fail under it, looked at or not. It is the slowest, and so in parts.
    # - initcheck: it would not know what those, which are not looked at, have written, nor what bulk
    #   copies have.
    # - synccheck: more barriers than a launch of many small CTAs has, since past what it tracks the
    #   tool fails itself; fewer beside products, which leave it no memory for as many, nor for many
    #   tiles.
    # - the two of synccheck run when the others have ended: what they track takes most of a GPU's memory.
    while IFS='|' read -r name options arguments; do
        if [[ -z $name ]]; then
            wait "${pids[@]}" || true
            continue
        fi
        read -ra of_tool <<<"$options"
        read -ra of_script <<<"$arguments"
        {
            local started=$SECONDS code=0
            XLA_PYTHON_CLIENT_ALLOCATOR=platform TF_CPP_MIN_LOG_LEVEL=3 \
                XLA_FLAGS="--xla_gpu_enable_command_buffer= ${XLA_FLAGS:-}" \
                timeout -k 5 "$limit" "$sanitizer" "${of_tool[@]}" --target-processes all \
                "${kernels[@]}" --report-api-errors no --print-limit 20 --error-exitcode 9 \
                "$python" scripts/gpu/sanitize.py "${of_script[@]}" >"$scratch/$name" 2>&1 || code=$?
            printf 'took %d s\n' $((SECONDS - started)) >>"$scratch/$name"
            printf '%d' "$code" >"$scratch/$name.code"
        } &
        pids+=($!)
        names+=("$name")
    done <<'END'
memcheck|--tool memcheck --padding 64|
racecheck|--tool racecheck|--no-products --only cross_entropy
racecheck-norm|--tool racecheck|--only norm
racecheck-fp8|--tool racecheck|--only fp8
racecheck-rope|--tool racecheck|--only rope
racecheck-scale|--tool racecheck|--only scale
racecheck-attention|--tool racecheck|--only flash_attention
initcheck|--tool initcheck|--no-products --no-bulk-stores

synccheck|--tool synccheck --num-cuda-barriers 65536|--no-products
synccheck-products|--tool synccheck --num-cuda-barriers 16384|--only 300x200
END
    wait "${pids[@]}" || true
    # shellcheck disable=SC2329 # check calls it
    ended() { return "$(<"$scratch/$1.code")"; }
    for name in "${names[@]}"; do
        # The exit code of the tool, and no error in its own summary.
        check "$name" ended "$name"
        tail -n 60 "$scratch/$name"
        check "$name says so" grep -qE 'SUMMARY: 0 (errors|hazards)' "$scratch/$name"
    done
    finish_checks
}

section_counters() {
    local profiler script=scripts/gpu/counters.py
    profiler=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v ncu) || {
        printf 'ncu not found: put Nsight Compute on PATH, or set CUDA_HOME\n'
        return 1
    }
    "$profiler" --version | tail -n 1
    # Clocks as they are where the kernels are timed. In command buffers the profiler breaks down.
    check "profile" env XLA_FLAGS="--xla_gpu_enable_command_buffer= ${XLA_FLAGS:-}" timeout -k 5 "$limit" "$profiler" --csv --page raw --clock-control none \
        --target-processes all --kernel-name regex:'cross_entropy|negate' \
        --metrics "$("$python" "$script" --metrics)" --log-file "$scratch/counters.csv" \
        "$python" "$script" >"$scratch/counters" 2>&1
    tail -n 20 "$scratch/counters"
    # shellcheck disable=SC2329 # check calls it
    tell() { "$python" "$script" --table <"$scratch/counters.csv" | tee "$out/counters.md"; }
    check "table" tell
    finish_checks
}

section_gradcheck() {
    local deadline=$((SECONDS + limit)) tool=$artifacts/gradcheck known gpus=() lane status=0 pids=()
    local configs=() config dtype lanes=${JOBS:-8}
    known=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
    IFS=, read -ra gpus <<<"$known"
    for config in configs/gradcheck/*.yaml; do
        # Those read files that a model makes.
        [[ $config == *real_text* ]] || configs+=("$config")
    done
    # shellcheck disable=SC2329 # check calls it
    judge() {
        local left=$((deadline - SECONDS))
        ((left > 0)) || return 124
        # What JAX makes of products in f32 is held too, and by default they are not.
        JAX_DEFAULT_MATMUL_PRECISION=highest XENTILE_PYTHON=$python \
            timeout -k 5 "$left" "$tool" "$@" --set backend=xla:cuda
    }
    # Most of the time is JAX's, which exports programs, and the reference's, on the host.
    for ((lane = 0; lane < lanes; lane++)); do
        {
            export CUDA_VISIBLE_DEVICES=${gpus[lane % ${#gpus[@]}]}
            local index
            for ((index = lane; index < ${#configs[@]}; index += lanes)); do
                config=${configs[index]}
                check "$config" judge --config "$config"
            done
            if ((lane == 0)); then
                for dtype in f32 f16; do
                    check "qwen_151643, $dtype, none" judge --config configs/gradcheck/qwen_151643.yaml \
                        --set dtype=$dtype --set shape.seq_len=256 --set options.reduction=none
                done
            fi
            finish_checks
        } >"$scratch/gradcheck.$lane" 2>&1 &
        pids+=($!)
    done
    for ((lane = 0; lane < lanes; lane++)); do
        wait "${pids[lane]}" || status=1
        cat "$scratch/gradcheck.$lane"
    done
    return "$status"
}

section_microbench() {
    local impl reduction tool=$artifacts/microbench
    for reduction in mean none; do
        for impl in kernel reference; do
            check "$impl, $reduction" timeout -k 5 "$((limit / 4))" "$tool" --backend xla:cuda \
                --impl "$impl" --time 2048 --vocab 151643 --dtype bf16 --reduction "$reduction" \
                --iters 300 --warmup 100 --json "$out/microbench.jsonl"
        done
    done
    finish_checks
}

section_sweep() {
    check sweep timeout -k 5 "$limit" "$artifacts/microbench" sweep \
        --config configs/sweep/cross_entropy_cuda.yaml --set out="$out/sweep"
    finish_checks
}

# The section's name is that of the files it writes.
compare() {
    local section=$1 script=$2 arguments=()
    read -ra arguments <<<"$3"
    check "$section" timeout -k 5 "$((limit + 30))" "$python" "benches/peers/$script.py" \
        --json "$out/$section.json" --plot "$out/$section.svg" --seconds "$limit" "${arguments[@]}"
    finish_checks
}

section_peers() {
    compare peers cross_entropy "${PEERS_ARGUMENTS:-}"
}

section_linear-peers() {
    compare linear-peers linear_cross_entropy "${LINEAR_PEERS_ARGUMENTS:-}"
}

run() {
    local total_passed=0 total_failed=0 summary=() section status started passed failed skipped note
    about
    for section in "${sections[@]}"; do
        printf '\n== %s\n' "$section"
        started=$SECONDS status=0
        # As part of `||` a failing section does not end this script.
        "section_$section" > >(tee "$scratch/$section.log") 2>&1 || status=$?
        sleep 0.2 # for tee
        read -r passed failed skipped < <(awk -f scripts/count.awk "$scratch/$section.log")
        note=""
        if ((status != 0 && failed == 0)); then
            failed=1 note=", stopped with exit code $status"
        elif ((passed + failed == 0)); then
            failed=1 note=", ran nothing"
        fi
        ((skipped == 0)) || note+=", $skipped skipped"
        left_out=$(awk '/tests do not apply on/ {for (i = 1; i < NF; i++) if ($(i + 1) == "tests") n += $i}
            END {print n + 0}' "$scratch/$section.log")
        ((left_out == 0)) || note+=", $left_out do not apply (named above)"
        total_passed=$((total_passed + passed))
        total_failed=$((total_failed + failed))
        summary+=("$(printf '| %-12s | %6d | %6d | %5d s |%s' \
            "$section" "$passed" "$failed" $((SECONDS - started)) "${note:+ ${note#, }}")")
        checks_passed=0 checks_failed=0
    done
    printf '\n== summary\n| section      | passed | failed | time    |\n| ---          | ---    | ---    | ---     |\n'
    printf '%s\n' "${summary[@]}"
    printf '%d passed, %d failed\n' "$total_passed" "$total_failed"
    ((total_failed == 0))
}

run 2>&1 | scrub | tee "$log"
