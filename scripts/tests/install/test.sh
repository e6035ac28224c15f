#!/usr/bin/env bash
# Installs the library to a new prefix, and builds and runs main.cpp against it by CMake and by pkg-config.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
scripts/install.sh --prefix "$folder/built"
# Files in it name no folder, so that it may lie elsewhere.
mv "$folder/built" "$folder/prefix"
prefix=$folder/prefix
program=scripts/tests/install

cmake -S "$program" -B "$folder/build" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$folder/build"
"$folder/build/against_prefix"
sed 's/xentile_xla 0\.[0-9]* /xentile_xla 99.0 /' "$program/CMakeLists.txt" >"$folder/CMakeLists.txt"
cp "$program/main.cpp" "$folder"
if cmake -S "$folder" -B "$folder/other" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null 2>&1; then
    echo "error: CMake took another version than it was asked for" >&2
    exit 1
fi

if ! command -v pkg-config >/dev/null; then
    echo "left out: pkg-config, which this machine has not"
    exit
fi
flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs xentile_xla)
# shellcheck disable=SC2086 # flags are words
"${CXX:-c++}" "$program/main.cpp" $flags "-Wl,-rpath,$prefix/lib" -o "$folder/by_pkg_config"
"$folder/by_pkg_config"
