#!/usr/bin/env bash
# Runs the tests:
#
#     scripts/test.sh            what twenty minutes hold on two cores: five tiers, a part of most
#     scripts/test.sh --all      all tiers but those that run by name, a part of the longest
#     scripts/test.sh lint host  these tiers, whole
#
# A tier is a script in scripts/tiers/. It ends with 77 where the machine lacks what it needs. One
# that fails does not stop those after it. Each ends up as one line of the summary, and the last line
# holds the totals. Exits 1 when anything failed; what a tier printed is kept in target/test-logs/.
#
# A tier of the default takes a part where XENTILE_TEST_QUICK is 1, and prints `left out: ..` for each
# thing that it leaves out. XENTILE_TEST_DRAW is a number that tells which cases of a test are run there;
# it is printed, and drawn where it is not set. Tiers of --all, where XENTILE_TEST_ALL is 1, that run the
# same test over many cases take a part of these too, and of those that compile the kernels with a compiler's
# settings of its own one has its turn.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Left out unless they are named, for time: the versions of JAX between the oldest and the newest, and the rest
# of what goes over all operations.
by_name=(xla-cpu-{0.10.2,0.11.2} nightly)
# In the order of what fails soonest.
quick=(lint host pjrt-cpu gradcheck xla-cpu-0.12.0)
all=(lint host packaging xla-cpu-{0.9.0,0.12.0} pjrt-cpu tpu-aot gpu-aot gradcheck real-text readme docs train miri asan fuzz neon)
# Of these --all runs one, which XENTILE_TEST_DRAW chooses.
in_turns=(asan fuzz neon)

export XENTILE_TEST_DRAW=${XENTILE_TEST_DRAW:-$RANDOM}
tiers=("$@")
left_out=()
unset XENTILE_TEST_QUICK XENTILE_TEST_ALL
if (($# == 0)); then
    export XENTILE_TEST_QUICK=1
    tiers=("${quick[@]}")
    for tier in "${all[@]}" "${by_name[@]}"; do
        [[ " ${quick[*]} " == *" $tier "* ]] || left_out+=("$tier")
    done
elif [[ $* == --all ]]; then
    export XENTILE_TEST_ALL=1
    tiers=()
    left_out=("${by_name[@]}")
    turn=${in_turns[XENTILE_TEST_DRAW % ${#in_turns[@]}]}
    for tier in "${all[@]}"; do
        if [[ $tier != "$turn" && " ${in_turns[*]} " == *" $tier "* ]]; then
            left_out+=("$tier")
        else
            tiers+=("$tier")
        fi
    done
fi
for tier in "${tiers[@]}"; do
    if [[ ! -f scripts/tiers/$tier.sh ]]; then
        printf 'test: error: no tier %s: choose from %s, or --all alone\n' \
            "$tier" "${all[*]} ${by_name[*]}" >&2
        exit 2
    fi
done

scripts/setup.sh scripts/requirements-real.txt scripts/requirements-test.txt
export PATH=$PWD/.venv/bin:$PATH
# One compiler for all tiers, so that kernels are compiled once. The default compiles none of them.
if [[ -z ${XENTILE_TEST_QUICK:-} && -z ${XENTILE_NVCC:-} && $(uname -s) == Linux ]]; then
    scripts/setup.sh scripts/requirements-cuda.txt
    XENTILE_NVCC=$(compgen -G "$PWD/.venv/lib/python*/site-packages/nvidia/cu13/bin/nvcc")
    export XENTILE_NVCC
fi
# Nobody edits and builds again in CI, which calls --all, nor steps through what was built.
if [[ -n ${CI:-}${XENTILE_TEST_ALL:-} ]]; then
    export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_RELEASE_DEBUG=0
fi
# The closing lines below are read plain.
export NO_COLOR=1 PY_COLORS=0 CARGO_TERM_COLOR=never
echo "draw of cases: set XENTILE_TEST_DRAW=$XENTILE_TEST_DRAW to repeat"

logs=target/test-logs
mkdir -p "$logs"
XENTILE_TEST_WHEELS=$(mktemp -d)
export XENTILE_TEST_WHEELS
# Tests of pallas_bridge keep what XLA compiled here for each other. New each time, so that each run compiles all.
XENTILE_TEST_PROGRAMS=$(mktemp -d)
export XENTILE_TEST_PROGRAMS
trap 'rm -rf "$XENTILE_TEST_WHEELS" "$XENTILE_TEST_PROGRAMS"' EXIT
total_passed=0 total_failed=0 absent=() summary=() failures=""
for tier in "${tiers[@]}"; do
    log=$logs/$tier.log
    printf '\n== %s\n' "$tier"
    started=$SECONDS
    status=0
    # As part of `||` a failing tier does not end this script.
    bash "scripts/tiers/$tier.sh" </dev/null 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
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
    summary+=("$tier: $passed passed, $failed failed$note")
    if ((failed > 0)); then
        # A build that breaks, or a download, has no test to name: then the end of the log.
        reasons=$(awk -f scripts/failures.awk "$log")
        failures+=$(printf '\n-- %s\n%s' "$tier" "${reasons:-$(tail -n 5 "$log")}")
    fi
    printf '%s took %d s\n' "$tier" $((SECONDS - started))
done

[[ -z $failures ]] || printf '\n== failures%s\n' "$failures"
printf '\n== summary\n'
printf '%s\n' "${summary[@]}"
printf 'tiers: %d run, %d absent here%s\n' \
    $((${#tiers[@]} - ${#absent[@]})) ${#absent[@]} "${absent[*]:+ (${absent[*]})}"
((${#left_out[@]} == 0)) || printf 'left out, to be run by name%s: %s\n' \
    "${XENTILE_TEST_QUICK:+ or with --all}" "${left_out[*]}"
parts=$(cd "$logs" && grep -H '^left out: ' "${tiers[@]/%/.log}" 2>/dev/null | sed 's/\.log:left out:/, left out:/' | sort -u || true)
[[ -z $parts ]] || printf '%s\n' "$parts"
printf '%d passed, %d failed\n' "$total_passed" "$total_failed"
((total_failed == 0))
