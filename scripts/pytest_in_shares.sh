#!/usr/bin/env bash
# Runs pytest in as many processes as there are cores, up to JOBS (default: 4), as most of a test is the
# work of one thread. A process takes files or tests that no other has taken. What the processes print
# comes one after another.
#
#     scripts/pytest_in_shares.sh PYTEST_ARGUMENTS
#
# XENTILE_TEST_CASES says which cases of each test run (scripts/pytest_cases.py).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

jobs=$(nproc)
((jobs <= ${JOBS:-4})) || jobs=${JOBS:-4}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case ${XENTILE_TEST_CASES:-all} in
    cover) echo "left out: cases of a test whose parameters all have values that other cases have, or beyond those that its marker few counts" ;;
    fast) echo "left out: tests that are marked slow, and all cases of a test but the first" ;;
esac
export XENTILE_TEST_CLAIMS=$scratch/claims
mkdir "$XENTILE_TEST_CLAIMS"
pids=() status=0
for ((job = 0; job < jobs; job++)); do
    XENTILE_TEST_SHARE=$job/$jobs python -m pytest -p scripts.pytest_cases -p scripts.pytest_programs "$@" \
        >"$scratch/$job" 2>&1 &
    pids+=($!)
done
for ((job = 0; job < jobs; job++)); do
    wait "${pids[job]}" || status=$?
    cat "$scratch/$job"
done
exit "$status"
