#!/usr/bin/env bash
# Programs of pallas_bridge compiled for NVIDIA GPUs where there is none, by XLA's plug-in for CUDA: which calls
# they have, what is moved around these, what they hold, and what devices send each other. None runs. And what
# benches/transformer_bench says of memory that way, beside what a GPU counted.
source scripts/tiers/common.sh
source scripts/jax_environment.sh

[[ $(uname -sm) == "Linux x86_64" ]] || absent "Linux on x86-64, for which GPU machines are"
[[ -n ${XENTILE_NVCC:-} ]] || absent "CUDA's compiler, which XENTILE_NVCC names"
compile_kernels_once
use_jax_environment .venv-jax/gpu-0.12.0 0.12.0 scripts/requirements-{gpu-aot,train,real}.txt
unset XENTILE_XLA_LIBRARY # what is installed is under test
install_pallas_bridge
# Its assembler and its library of functions.
cuda=$(dirname -- "$(dirname -- "$XENTILE_NVCC")")
export PATH=$cuda/bin:$PATH XLA_FLAGS="--xla_gpu_cuda_data_dir=$cuda ${XLA_FLAGS:-}" JAX_PLATFORMS=cpu
status=0
scripts/pytest_in_shares.sh pallas_bridge/tests/gpu_aot || status=1
scripts/pytest_in_shares.sh benches/tests/gpu_aot || status=1
exit "$status"
