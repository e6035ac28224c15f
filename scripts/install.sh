#!/usr/bin/env bash
# Builds libxentile_xla and installs it for C and C++ programs, with its header, a file for pkg-config and a
# package for CMake:
#
#     scripts/install.sh --prefix DIR [CARGO ARGUMENTS, such as --features cuda]
#
# pkg-config then finds xentile_xla where PKG_CONFIG_PATH has DIR/lib/pkgconfig, and CMake where
# CMAKE_PREFIX_PATH has DIR. DESTDIR is put before DIR, as packagers expect. Linux only.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} != --prefix || ${2:-} != /* ]]; then
    printf 'usage: scripts/install.sh --prefix DIR [CARGO ARGUMENTS]; DIR is an absolute path\n' >&2
    exit 2
fi
prefix=$2
shift 2
root=${DESTDIR:-}$prefix

version=$(sed -n 's/^#define XENTILE_VERSION "\(.*\)"$/\1/p' crates/xentile-xla/include/xentile_xla.h)
# Before 1.0 every minor version may break the interface.
interface=${version%.*}
[[ $version == 0.* ]] || interface=${version%%.*}
XENTILE_SONAME=libxentile_xla.so.$interface \
    cargo rustc --release --locked --package xentile-xla --crate-type cdylib "$@" -- -C strip=symbols

install -d "$root"/{include,lib/pkgconfig,lib/cmake/xentile_xla,share/licenses/xentile_xla}
install -m 755 "${CARGO_TARGET_DIR:-target}/release/libxentile_xla.so" "$root/lib/libxentile_xla.so.$version"
ln -sf "libxentile_xla.so.$version" "$root/lib/libxentile_xla.so.$interface"
ln -sf "libxentile_xla.so.$interface" "$root/lib/libxentile_xla.so"
install -m 644 crates/xentile-xla/include/xentile_xla.h "$root/include"
install -m 644 LICENSE pallas_bridge/THIRD_PARTY_LICENSES.txt "$root/share/licenses/xentile_xla"

# Both are found where they lie, so that a prefix may be moved.
cat >"$root/lib/pkgconfig/xentile_xla.pc" <<PC
prefix=\${pcfiledir}/../..
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: xentile_xla
Description: Kernels for training language models as XLA custom calls
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lxentile_xla
PC
cat >"$root/lib/cmake/xentile_xla/xentile_xla-config.cmake" <<CMAKE
get_filename_component(_xentile_xla_prefix "\${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET xentile::xentile_xla)
  add_library(xentile::xentile_xla SHARED IMPORTED)
  set_target_properties(xentile::xentile_xla PROPERTIES
    IMPORTED_LOCATION "\${_xentile_xla_prefix}/lib/libxentile_xla.so.$version"
    IMPORTED_SONAME "libxentile_xla.so.$interface"
    INTERFACE_INCLUDE_DIRECTORIES "\${_xentile_xla_prefix}/include")
endif()
unset(_xentile_xla_prefix)
CMAKE
cat >"$root/lib/cmake/xentile_xla/xentile_xla-config-version.cmake" <<CMAKE
set(PACKAGE_VERSION "$version")
# That of the interface: major, or 0 and minor.
set(_xentile_xla_asked "\${PACKAGE_FIND_VERSION_MAJOR}")
if(_xentile_xla_asked EQUAL 0)
  set(_xentile_xla_asked "0.\${PACKAGE_FIND_VERSION_MINOR}")
endif()
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION OR NOT _xentile_xla_asked STREQUAL "$interface")
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
CMAKE
printf 'installed xentile_xla %s to %s\n' "$version" "$root"
