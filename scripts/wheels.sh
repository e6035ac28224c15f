#!/usr/bin/env bash
# Builds the sdist of pallas_bridge, and from it wheels that any Linux with glibc 2.28 or later takes, and
# checks each:
#
#     scripts/wheels.sh [--out DIR] [x86_64] [aarch64]
#
# Both machines and the folder dist/ without arguments. What a wheel's library needs is held against its
# name by auditwheel; that for this machine is installed and called in a clean environment of each
# Python from 3.11 to 3.13 that is found, and one for aarch64 is called under emulation on x86-64.
# zig links against the older glibc. XENTILE_CUDA=0 leaves out kernels for NVIDIA GPUs. A wheel must be
# smaller than 25 MiB.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

glibc=2.28
out=dist
machines=()
while (($#)); do
    case $1 in
        --out) out=${2:?"--out needs a folder"} && shift ;;
        x86_64 | aarch64) machines+=("$1") ;;
        *)
            printf 'wheels: error: %s is no machine: x86_64 or aarch64, or --out DIR\n' "$1" >&2
            exit 2
            ;;
    esac
    shift
done
((${#machines[@]})) || machines=(x86_64 aarch64)

scripts/setup.sh scripts/requirements-packaging.txt
export PATH=$PWD/.venv/bin:$PATH
CARGO_ZIGBUILD_ZIG_PATH=$(python -c 'import ziglang; print(ziglang.__path__[0])')/zig
export CARGO_ZIGBUILD_ZIG_PATH
mkdir -p "$out"
out=$(realpath "$out")
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} XENTILE_CUDA=${XENTILE_CUDA:-1}

# Always in the same folder, for cargo to find what it compiled before.
source_folder=$CARGO_TARGET_DIR/sdist
rm -rf "$source_folder"
mkdir -p "$source_folder"
(cd pallas_bridge && python -m hatchling build --target sdist --directory "$source_folder")
tar -xf "$source_folder"/pallas_bridge-*.tar.gz --strip-components 1 --directory "$source_folder"
mv "$source_folder"/pallas_bridge-*.tar.gz "$out"

for machine in "${machines[@]}"; do
    (
        if [[ $machine != $(uname -m) ]]; then
            # shellcheck source=scripts/aarch64.sh
            source scripts/aarch64.sh
            use_aarch64
        fi
        XENTILE_WHEEL_TARGET=$machine-unknown-linux-gnu.$glibc \
            python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$out" "$source_folder"
    )
    # The newest, should there be several versions.
    wheel=$(find "$out" -name "pallas_bridge-*-manylinux_${glibc/./_}_$machine.whl" -printf '%T@ %p\n' |
        sort -n | tail -n 1 | cut -d' ' -f2-)
    shown=$(auditwheel show "$wheel")
    printf '%s\n' "$shown"
    [[ ${shown//[[:space:]]/ } =~ platform\ tag:\ +\"manylinux_2_([0-9]|1[0-9]|2[0-8])_$machine\" ]] || {
        printf 'wheels: error: %s needs a newer glibc than %s\n' "$wheel" "$glibc" >&2
        exit 1
    }
    size=$(stat --format %s "$wheel")
    printf '%s: %d KiB\n' "${wheel##*/}" $((size / 1024))
    ((size < 25 << 20)) || {
        printf 'wheels: error: %s has %d bytes; it must have fewer than 25 MiB\n' "$wheel" "$size" >&2
        exit 1
    }
    if [[ $machine == $(uname -m) ]]; then
        scripts/test_wheel.sh "$wheel"
    else
        unpacked=$(mktemp -d)
        python -m zipfile --extract "$wheel" "$unpacked"
        XENTILE_XLA_LIBRARY=$unpacked/pallas_bridge/_src/libxentile_xla.so scripts/test_neon.sh
        rm -r "$unpacked"
    fi
    printf '%s\n' "$wheel"
done
