#!/usr/bin/env bash
# Runs the tests:
#
#     scripts/test.sh                    the default set: eight minutes on two cores
#     scripts/test.sh --all              what CI runs: half an hour
#     scripts/test.sh --nightly          everything
#     scripts/test.sh [--all] lint host  these tiers alone, with the cases of that set; else every case
#
# A tier is a script in scripts/tiers/. It ends with 77 where the machine lacks what it needs. One
# that fails does not stop those after it. Each ends up as one line of the summary, and the last line
# holds the totals. Exits 1 when anything failed; what a tier printed is kept in target/test-logs/.
#
# A set is fixed: each run of a commit runs the same tests, and only random numbers differ, whose seeds
# are printed. Tiers read XENTILE_TEST_SET (default, ci or nightly), and pytest XENTILE_TEST_CASES
# (scripts/pytest_cases.py): the first case of each test that is not slow, every value of every parameter, or
# all cases. A tier prints `left out: ..` for each thing that it leaves out.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# In the order of what fails soonest.
default=(lint host xla-cpu-0.12.0)
ci=(lint host xla-cpu-0.12.0 pjrt-cpu tpu-aot gpu-aot gradcheck real-text readme docs train)
nightly=("${ci[@]}" packaging frameworks xla-cpu-{0.9.0,0.10.2,0.11.2} miri asan fuzz neon)

export XENTILE_TEST_SET=default
case ${1:-} in
    --all) XENTILE_TEST_SET=ci && shift ;;
    --nightly) XENTILE_TEST_SET=nightly && shift ;;
    *) (($# == 0)) || XENTILE_TEST_SET=nightly ;;
esac
case $XENTILE_TEST_SET in
    default) tiers=("${default[@]}") XENTILE_TEST_CASES=fast ;;
    ci) tiers=("${ci[@]}") XENTILE_TEST_CASES=cover ;;
    nightly) tiers=("${nightly[@]}") XENTILE_TEST_CASES=all ;;
esac
export XENTILE_TEST_CASES
left_out=()
if (($#)); then
    tiers=("$@")
else
    for tier in "${nightly[@]}"; do
        [[ " ${tiers[*]} " == *" $tier "* ]] || left_out+=("$tier")
    done
fi
for tier in "${tiers[@]}"; do
    if [[ ! -f scripts/tiers/$tier.sh ]]; then
        printf 'test: error: no tier %s: choose from %s; or --all or --nightly, first\n' \
            "$tier" "${nightly[*]}" >&2
        exit 2
    fi
done

scripts/setup.sh scripts/requirements-test.txt scripts/requirements-real.txt
export PATH=$PWD/.venv/bin:$PATH
# One compiler for all tiers, so that kernels are compiled once. The default compiles none of them.
if [[ $XENTILE_TEST_SET != default && -z ${XENTILE_NVCC:-} && $(uname -s) == Linux ]]; then
    scripts/setup.sh scripts/requirements-cuda.txt
    XENTILE_NVCC=$(compgen -G "$PWD/.venv/lib/python*/site-packages/nvidia/cu13/bin/nvcc")
    export XENTILE_NVCC
fi
# Nobody steps through what was built in CI.
if [[ -n ${CI:-} || $XENTILE_TEST_SET == ci ]]; then
    export CARGO_PROFILE_DEV_DEBUG=0
fi
# Both sets build one profile, that which README's commands ask for. In CI it has the settings of the profile
# dev, whose checks double the time that kernels for CPUs are compiled in.
if [[ $XENTILE_TEST_SET == ci ]]; then
    export CARGO_PROFILE_RELEASE_OPT_LEVEL=2
    export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
    # Of several units of a crate a fifth of the time goes to optimizing across them (xentile-cpu: 168 to 138 s).
    export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
fi
# Python compiles what is imported, once, where pip would compile all that it installs.
export PIP_COMPILE=0
unset PYTHONDONTWRITEBYTECODE
# The closing lines below are read plain.
export NO_COLOR=1 PY_COLORS=0 CARGO_TERM_COLOR=never
echo "set of tests: $XENTILE_TEST_SET"

logs=target/test-logs
mkdir -p "$logs"
rm -rf "${logs:?}"/*
XENTILE_TEST_WHEELS=$(mktemp -d)
export XENTILE_TEST_WHEELS
# Tests of pallas_bridge keep what XLA compiled here for each other. New each time, so that each run compiles all.
XENTILE_TEST_PROGRAMS=$(mktemp -d)
export XENTILE_TEST_PROGRAMS
second=""
trap '[[ -z $second ]] || kill -- "-$second" || true; rm -rf "$XENTILE_TEST_WHEELS" "$XENTILE_TEST_PROGRAMS"' EXIT
trap 'exit 130' INT TERM

# Two lanes of tiers run beside each other: what mostly waits for cargo's lock or for one thread, and what
# mostly waits for XLA, through environments of its own.
is_of_second_lane() {
    [[ $1 =~ ^(xla-cpu-.*|gpu-aot|train)$ ]]
}
run_tier() {
    local began=$SECONDS status=0
    printf '\n== %s\n' "$1"
    # As part of `||` a failing tier does not end this script.
    bash "scripts/tiers/$1.sh" </dev/null 2>&1 | tee "$logs/$1.log" || status=${PIPESTATUS[0]}
    printf '%d %d\n' "$status" $((SECONDS - began)) >"$logs/$1.ended"
}
# Runs tiers that the other lane has not begun.
run_lane() {
    local tier
    for tier in "$@"; do
        ! mkdir "$logs/$tier.begun" 2>/dev/null || run_tier "$tier"
    done
}
first_lane=() second_lane=() late_of_first=() late_of_second=()
for tier in "${tiers[@]}"; do
    if is_of_second_lane "$tier"; then second_lane+=("$tier"); else first_lane+=("$tier"); fi
    # A lane that is done takes these of the other's, so that both cores are busy to the end. They use copies of
    # what cargo built, and no tier takes what they make.
    case $tier in
        docs) late_of_first+=("$tier") ;;
        gpu-aot | train) late_of_second=("$tier" "${late_of_second[@]}") ;;
    esac
done
# In a process group of its own, which ends with this script.
set -m
run_lane "${second_lane[@]}" "${late_of_first[@]}" >"$logs/second-lane" &
second=$!
set +m
run_lane "${first_lane[@]}" "${late_of_second[@]}"
wait "$second"
second=""
cat "$logs/second-lane"

total_passed=0 total_failed=0 absent=() summary=() failures=""
for tier in "${tiers[@]}"; do
    log=$logs/$tier.log
    read -r status seconds <"$logs/$tier.ended"
    if ((status == 77)); then
        absent+=("$tier")
        summary+=("$tier: absent here ($(sed -n 's/^absent: //p' "$log" | tail -n 1))")
        continue
    fi
    read -r passed failed skipped < <(awk -f scripts/count.awk "$log")
    note=""
    if ((status != 0 && failed == 0)); then
        failed=1 note=", stopped with exit code $status"
    elif ((passed + failed == 0)); then
        failed=1 note=", ran no test"
    fi
    ((skipped == 0)) || note+=", $skipped skipped"
    total_passed=$((total_passed + passed))
    total_failed=$((total_failed + failed))
    summary+=("$tier: $passed passed, $failed failed$note, $seconds s")
    if ((failed > 0)); then
        # A build that breaks, or a download, has no test to name: then the end of the log.
        reasons=$(awk -f scripts/failures.awk "$log")
        failures+=$(printf '\n-- %s\n%s' "$tier" "${reasons:-$(tail -n 5 "$log")}")
    fi
done

# What matters most comes last, where the end of a long log is all that one sees.
printf '\n== left out\n'
((${#left_out[@]} == 0)) || printf 'tiers, to be run by name or with --nightly: %s\n' "${left_out[*]}"
(cd "$logs" && grep -H '^left out: ' "${tiers[@]/%/.log}" 2>/dev/null | sed 's/\.log:left out:/, left out:/' | sort -u) || true
printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
printf 'tiers: %d run, %d absent here%s\n' \
    $((${#tiers[@]} - ${#absent[@]})) ${#absent[@]} "${absent[*]:+ (${absent[*]})}"
[[ -z $failures ]] || printf '\n== failures%s\n' "$failures"
printf '%d passed, %d failed\n' "$total_passed" "$total_failed"
((total_failed == 0))
