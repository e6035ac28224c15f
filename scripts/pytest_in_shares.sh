#!/usr/bin/env bash
# Runs pytest in as many processes as there are cores, up to JOBS (default: 4), as most of a test is the
# work of one thread; what they print comes one after another.
#
#     scripts/pytest_in_shares.sh PYTEST_ARGUMENTS
#
# With THIN=3 a third of each test's cases are run, or so; scripts/pytest_share.py tells which. With ONE_IN=2 half of
# those that are left, which XENTILE_TEST_DRAW chooses.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

jobs=$(nproc)
((jobs <= ${JOBS:-4})) || jobs=${JOBS:-4}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XENTILE_TEST_THIN=${THIN:-1}
((XENTILE_TEST_THIN == 1)) ||
    echo "left out: $((XENTILE_TEST_THIN - 1)) of $XENTILE_TEST_THIN cases of a test, where it has so many"
one_in=${ONE_IN:-1}
((one_in == 1)) || echo "left out: of the tests that are left all but one in $one_in, which XENTILE_TEST_DRAW chooses"
pids=() status=0
for ((job = 0; job < jobs; job++)); do
    XENTILE_TEST_SHARE=$((job * one_in + ${XENTILE_TEST_DRAW:-0} % one_in))/$((jobs * one_in)) \
        python -m pytest -p scripts.pytest_share "$@" >"$scratch/$job" 2>&1 &
    pids+=($!)
done
for ((job = 0; job < jobs; job++)); do
    wait "${pids[job]}" || status=$?
    cat "$scratch/$job"
done
exit "$status"
