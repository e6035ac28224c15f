#!/usr/bin/env bash
# Runs pytest in as many processes as there are cores, up to JOBS (default: 4), as most of a test is the
# work of one thread; what they print comes one after another.
#
#     scripts/pytest_in_shares.sh PYTEST_ARGUMENTS
#
# With THIN=3 a third of each test's cases are run, or so, and with HALF=0 or 1 one half of all tests;
# scripts/pytest_share.py tells which.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

jobs=$(nproc)
((jobs <= ${JOBS:-4})) || jobs=${JOBS:-4}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XENTILE_TEST_THIN=${THIN:-1}
((XENTILE_TEST_THIN == 1)) ||
    echo "left out: $((XENTILE_TEST_THIN - 1)) of $XENTILE_TEST_THIN cases of a test, where it has so many"
if [[ -n ${HALF:-} ]]; then
    export XENTILE_TEST_HALF=$HALF
    echo "left out: half of the tests but those of numbers, which XENTILE_TEST_DRAW chooses"
fi
pids=() status=0
for ((job = 0; job < jobs; job++)); do
    XENTILE_TEST_SHARE=$job/$jobs python -m pytest -p scripts.pytest_share "$@" >"$scratch/$job" 2>&1 &
    pids+=($!)
done
for ((job = 0; job < jobs; job++)); do
    wait "${pids[job]}" || status=$?
    cat "$scratch/$job"
done
exit "$status"
