# Sourced by every tier; scripts/test.sh has put .venv/bin on PATH and stands in the repository root.
# shellcheck shell=bash
set -euo pipefail

# scripts/test.sh says which set of tests this is a part of; a script that is run by itself is whole.
: "${XENTILE_TEST_SET:=nightly}"

# Ends a tier that this machine lacks something for.
absent() {
    printf 'absent: needs %s\n' "$1"
    exit 77
}

checks_passed=0
checks_failed=0

# Runs one command as one check, named by $1, and goes on whatever comes of it.
check() {
    local name=$1
    shift
    printf -- '-- %s\n' "$name"
    if "$@"; then
        checks_passed=$((checks_passed + 1))
    else
        printf 'FAILED (exit code %d): %s\n' "$?" "$name"
        checks_failed=$((checks_failed + 1))
    fi
}

# The closing line, which scripts/test.sh counts.
finish_checks() {
    printf 'check: %d passed, %d failed\n' "$checks_passed" "$checks_failed"
    ((checks_failed == 0))
}

# Sanitizers are unstable flags of a stable compiler: this lets it take them, so that these tiers
# need no nightly. Its sanitizer runtimes come with rustup's toolchains and not with all others.
use_sanitizers() {
    local libraries
    libraries=$(rustc --print target-libdir)
    compgen -G "$libraries/librustc*_rt.asan.a" >/dev/null ||
        absent "a rust toolchain with sanitizer runtimes, as rustup's have"
    export RUSTC_BOOTSTRAP=1
}

# Builds the library and the tools with the profile and the features of the tests of the tier host, which
# compiled all that they need.
#
# README's commands put others where cargo does, beside a later tier: hence copies, and one build a run of
# scripts/test.sh, which is not to take a file from under a command that runs.
build_binaries() {
    (
        exec 9<scripts/tiers/common.sh
        flock 9
        built=${XENTILE_TEST_WHEELS:+$XENTILE_TEST_WHEELS/binaries-are-built}
        if [[ -n $built && -f $built ]]; then exit; fi
        cargo build "${profile[@]}" --workspace --features "xla-ffi/testing${cuda:+,$cuda}"
        mkdir -p "$binaries"
        for name in libxentile_xla.so gradcheck microbench; do
            cp "$target_dir/$profile_folder/$name" "$binaries/$name.new"
            mv "$binaries/$name.new" "$binaries/$name"
        done
        [[ -z $built ]] || touch "$built"
    )
}

# Whether gradcheck can have pallas_bridge export programs and run them on XLA's CPU, which it is then
# set up for; a line says why not. Builds the library of custom calls, as programs have its calls.
use_exported_programs() {
    if [[ $(uname -sm) != "Linux x86_64" ]]; then
        echo "left out: programs from JAX, as xla-cpu-pjrt has wheels for Linux on x86-64 only"
        return 1
    fi
    scripts/setup.sh scripts/requirements-{jax,pjrt}.txt
    build_binaries
    local packages
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    export XENTILE_PJRT_CPU=$packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so
    export XENTILE_XLA_LIBRARY=$library
    export XENTILE_PYTHON=python PYTHONPATH=$PWD/pallas_bridge/src
    export XENTILE_CACHE=$target_dir/programs
}

# Kernels for GPUs are compiled for the one architecture that has all of them, in every tier, so that a tier
# finds what another compiled. No tier runs them: that they compile to PTX without errors is held, so that they
# need no optimisation, and one is assembled.
compile_kernels_once() {
    export XENTILE_CUDA_FAST_COMPILE=1 XENTILE_CUDA_ARCHS=${XENTILE_CUDA_ARCHS:-90a}
    [[ $XENTILE_CUDA_ARCHS != 90a ]] ||
        echo "left out: kernels for GPUs of other architectures than $XENTILE_CUDA_ARCHS, and assembling more than one; the tier packaging compiles all"
}

# All is built once: but for the nightly set in the profile that README's commands ask for, and in CI's with
# the kernels for GPUs.
profile=() profile_folder=debug cuda=""
if [[ $XENTILE_TEST_SET != nightly ]]; then
    profile=(--release) profile_folder=release
    export XENTILE_TEST_PROFILE=release # for examples that tests in Python build
fi
if [[ $XENTILE_TEST_SET == ci && -n ${XENTILE_NVCC:-} ]]; then
    cuda=xentile-xla/cuda
    compile_kernels_once >/dev/null
fi

# In CI's set also README's commands take what the tier host compiled: cargo adds the features of its tests to
# builds of the whole workspace, here and in what tiers run.
if [[ $XENTILE_TEST_SET == ci ]]; then
    export CARGO_FEATURES_OF_TESTS=xla-ffi/testing${cuda:+,$cuda}
    cargo() {
        case "$* " in
            *" -p "* | *" --package "*) command cargo "$@" ;;
            "build --release "* | "run --release "*)
                command cargo "$1" --features "$CARGO_FEATURES_OF_TESTS" "${@:2}"
                ;;
            *) command cargo "$@" ;;
        esac
    }
    export -f cargo
fi

# The features that these have together are those of the whole workspace, which host's tests were built
# with: of a package by itself, what it depends on has fewer, and is compiled again.
# shellcheck disable=SC2034 # the tiers read it
like_workspace=("${profile[@]}" --package xentile --package xentile-tools --package xentile-xla ${cuda:+--features "$cuda"})

# But for the nightly set the tier host runs the tests that need nothing.
# shellcheck disable=SC2034 # the tiers read it
rest=--include-ignored
[[ $XENTILE_TEST_SET == nightly ]] || rest=--ignored

# In CI's set, has what builds the wheel take what tests were built with.
use_cargo_of_tests() {
    [[ $XENTILE_TEST_SET == ci ]] || return 0
    export CARGO=$PWD/scripts/cargo_of_tests.sh
    echo "left out: the profile release with its own settings, by which the tier packaging builds the wheel; here it has those of dev"
}

# For tiers in which programs run slowly.
try_fewer_arguments() {
    export XENTILE_TEST_STRIDE=997
    echo "left out: most arguments of elementary functions: one f32 in $XENTILE_TEST_STRIDE is tried, from a random start; and a part of the distributions of norms and of linear losses"
}

host_triple() {
    rustc -vV | sed -n 's/^host: //p'
}

target_dir=${CARGO_TARGET_DIR:-$PWD/target}
# Where `build_binaries` puts what it makes.
# shellcheck disable=SC2034 # the tiers read it
binaries=$target_dir/tests library=$target_dir/tests/libxentile_xla.so
