#!/usr/bin/env bash
# docs/how-to/frameworks.md in MaxText, Levanter, EasyDeL and Tunix, each in an environment with the JAX that it
# takes, and text generation and layers of hybrids beside those of Transformers. What they depend on in turn is
# hundreds of packages: those of one day, which uv picks.
source scripts/tiers/common.sh
source scripts/jax_environment.sh

python=$(find_python 0.11.2) || {
    printf '%s\n' "$python"
    exit 77
}
build_binaries
export XENTILE_XLA_LIBRARY=$library
export PYTHONPATH=$PWD/pallas_bridge/src:$PWD JAX_PLATFORMS=cpu

status=0
# run "TESTS .." ENVIRONMENT PACKAGE..
run() {
    local name tests=() environment=$PWD/.venv-frameworks/$2
    for name in $1; do tests+=("pallas_bridge/tests/test_$name.py"); done
    printf -- '-- %s\n' "$2"
    shift 2
    uv venv --quiet --clear --python "$python" "$environment"
    VIRTUAL_ENV=$environment uv pip install --quiet --exclude-newer 2026-11-28 pytest==9.2.0 "$@"
    "$environment/bin/python" -m pytest --durations=5 "${tests[@]}" || status=1
}

run frameworks maxtext 'maxtext[tpu]==0.2.5' jax==0.11.2
run frameworks levanter --prerelease allow marin-levanter==0.2.227.dev40316220070 google-tunix==0.1.7 jax==0.11.2
# It imports PIL, which it does not say.
run frameworks easydel easydel==0.3.0 pillow==13.0.0 jax==0.9.2
run "generation_checkpoints hybrid_layers" transformers transformers==5.24.0 torch==2.15.0 safetensors==0.8.0 \
    jax==0.12.0 flax==0.12.12
exit "$status"
