#!/usr/bin/env bash
# Installs a wheel of pallas_bridge, and the JAX that pip takes with it, in a clean environment of each
# Python from 3.11 to 3.13 that is found, and calls it there:
#
#     scripts/test_wheel.sh WHEEL [3.11 ..]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"

wheel=${1:?usage: scripts/test_wheel.sh WHEEL [VERSION ..]}
shift
versions=("$@")
((${#versions[@]})) || versions=(3.11 3.12 3.13)
unset XENTILE_XLA_LIBRARY PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# An interpreter of a version: on PATH, or pyenv's.
find_python() {
    local candidate
    for candidate in "python$1" python3 "$(pyenv root 2>/dev/null)"/versions/"$1".*/bin/python; do
        # pyenv's shims are on PATH for versions that are not chosen, and fail.
        if [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

passed=0 failed=0
for version in "${versions[@]}"; do
    found=$(find_python "$version")
    if [[ -z $found ]]; then
        echo "left out: the wheel in Python $version, which this machine has not"
        continue
    fi
    python=$folder/$version/bin/python
    "$found" -m venv "$folder/$version"
    if "$python" -m pip install --quiet --disable-pip-version-check "$wheel" &&
        (cd "$folder" && JAX_PLATFORMS=cpu "$python" - <<'PROGRAM'); then
import sys

import jax
import jax.numpy as jnp

import pallas_bridge

logits = jax.random.normal(jax.random.key(0), (2, 8, 50257), jnp.bfloat16)
labels = jnp.zeros((2, 8), jnp.int32)
run = lambda how: jax.value_and_grad(
    lambda x: pallas_bridge.cross_entropy(x, labels, implementation=how)
)(logits)
loss, gradient = jax.jit(lambda: run("custom_call"))()
right, right_gradient = jax.jit(lambda: run("reference"))()
assert abs(loss - right) < 1e-4, (loss, right)
assert jnp.allclose(gradient, right_gradient, rtol=1e-2, atol=1e-6)
print(f"python {sys.version.split()[0]}, jax {jax.__version__}: loss {loss:.4f}")
PROGRAM
        passed=$((passed + 1))
    else
        echo "FAILED: the wheel in Python $version"
        failed=$((failed + 1))
    fi
    rm -r "${folder:?}/$version"
done
printf 'check: %d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
