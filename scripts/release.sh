#!/usr/bin/env bash
# Builds and checks everything that a release uploads, and uploads nothing:
#
#     scripts/release.sh --dry-run [--out DIR]
#
# DIR (dist/ by default) then has the sdist and wheels of both machines. docs/developing/releasing.md says
# what comes before and after.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

[[ ${1:-} == --dry-run && (-z ${2:-} || (${2:-} == --out && -n ${3:-})) ]] || {
    printf 'usage: scripts/release.sh --dry-run [--out DIR]; it never uploads\n' >&2
    exit 2
}
out=${3:-dist}
failed=0
fail() {
    printf 'release: error: %s\n' "$1" >&2
    failed=1
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml)
printf 'release %s\n' "$version"
[[ -z $(git status --porcelain) ]] || fail "the checkout has changes that are not committed"
grep --quiet "^PACKAGE = \"$version\"$" pallas_bridge/src/pallas_bridge/_src/versions.py ||
    fail "pallas_bridge has another version than Cargo.toml, $version"
grep --quiet "^#define XENTILE_VERSION \"$version\"$" crates/xentile-xla/include/xentile_xla.h ||
    fail "xentile_xla.h has another version than Cargo.toml, $version"
grep --quiet "^version: $version$" CITATION.cff || fail "CITATION.cff has another version than Cargo.toml, $version"
grep --quiet "^## $version" CHANGELOG.md || fail "CHANGELOG.md has no section \"## $version\""
cmp --quiet LICENSE pallas_bridge/LICENSE || fail "pallas_bridge/LICENSE is not LICENSE"

scripts/setup.sh scripts/requirements-packaging.txt
export PATH=$PWD/.venv/bin:$PATH
python scripts/third_party_licenses.py --check || fail "licences of linked crates are stale"
scripts/check_crates.sh || fail "a crate cannot be packaged"
scripts/tests/install/checkout.sh || fail "pallas_bridge cannot be installed from a checkout"
scripts/tests/install/test.sh || fail "the installed prefix cannot be used"
scripts/wheels.sh --out "$out" || fail "a wheel cannot be built or used"
((failed == 0)) || exit 1
printf 'release %s: all is well; to upload:\n' "$version"
find "$out" -name "pallas_bridge-$version*" | sort
printf 'and the crates, by cargo publish --workspace --locked\n'
