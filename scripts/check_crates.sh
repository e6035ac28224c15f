#!/usr/bin/env bash
# Packages every crate as it would be uploaded, has cargo say that the index would take it, compiles each from
# its archive, and looks for what an archive must have:
#
#     scripts/check_crates.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
workspace=$folder/workspace
mkdir "$workspace"

# Cargo would build each archive by itself, and the kernels for processors four times over. In one
# workspace they share what they depend on, each with its own features; and nothing runs that is made.
export CARGO_NET_RETRY=10
CARGO_TARGET_DIR=$folder cargo package --workspace --locked --allow-dirty --no-verify
CARGO_TARGET_DIR=$folder cargo publish --workspace --dry-run --locked --allow-dirty --no-verify
printf '[workspace]\nresolver = "3"\nmembers = ["*"]\n[patch.crates-io]\n' >"$workspace/Cargo.toml"
# With the versions that were tested; what only tests need is not in archives, and falls out of it.
cp Cargo.lock "$workspace"
crates=() failed=0
for archive in "$folder"/package/*.crate; do
    tar -xf "$archive" --directory "$workspace"
    unpacked=$(basename "$archive" .crate)
    crates+=("${unpacked%-*}")
    printf '%s = { path = "%s" }\n' "${crates[-1]}" "$unpacked" >>"$workspace/Cargo.toml"
    for file in LICENSE README.md Cargo.toml; do
        [[ -f $workspace/$unpacked/$file ]] || {
            printf 'error: %s has no %s\n' "$archive" "$file" >&2
            failed=1
        }
    done
done
for crate in "${crates[@]}"; do
    printf -- '-- %s\n' "$crate"
    CARGO_TARGET_DIR=$folder/target CARGO_PROFILE_DEV_DEBUG=0 \
        cargo check --manifest-path "$workspace/Cargo.toml" --package "$crate"
done
exit "$failed"
