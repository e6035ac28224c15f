#!/usr/bin/env bash
# Programs compiled for TPUs where there is none, by libtpu: from pjrt-client, and by microbench, which
# reports the compiler's schedule; programs that JAX exported, among them our Pallas kernels, and these in
# programs around them.
source scripts/tiers/common.sh

[[ $(uname -sm) == "Linux x86_64" ]] || absent "Linux on x86-64, which libtpu has its only wheels for"
scripts/setup.sh scripts/requirements-{tpu,jax,pjrt}.txt
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export XENTILE_PJRT_TPU=$packages/libtpu/libtpu.so
export XENTILE_PJRT_CPU=$packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so

skip=()
if [[ $XENTILE_TEST_SET != nightly ]]; then
    skip=(--skip estimates_beside)
    echo "left out: estimates beside the times of the Pallas guide and of an old kernel, which compile 25 programs"
fi
# With what they print, which is estimates beside what was measured.
cargo test "${like_workspace[@]}" --test xla_tpu -- "$rest" --show-output "${skip[@]}"
# Neither the metadata server nor the devices that the lock is about are there.
TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
    cargo test "${like_workspace[@]}" --package pjrt-client --test tpu_aot -- "$rest"
TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
    cargo test "${like_workspace[@]}" --lib -- --ignored a_matrix_is_put_in_the_order_that_programs_take
TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu PYTHONPATH=pallas_bridge/src \
    scripts/pytest_in_shares.sh -v crates/xentile-tools/tests/tpu
