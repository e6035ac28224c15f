#!/usr/bin/env bash
# Packages every crate as it would be uploaded, builds each from its archive, and looks for what an archive
# must have.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Crates find each other in a registry that cargo makes in the target folder. What it unpacks of that it
# keeps by the folder's name, and takes again though archives have changed: hence a new name each time.
folder=$(mktemp -d)
unpacked=${CARGO_HOME:-$HOME/.cargo}/registry/src
# shellcheck disable=SC2329 # the trap calls it
clean() {
    find "$unpacked" -mindepth 1 -maxdepth 1 -name '-*' -newer "$folder/began" -exec rm -rf {} +
    rm -rf "$folder"
}
touch "$folder/began"
trap clean EXIT

# Built quickly, as nothing runs; cargo asks the registry, which may be slow to answer.
CARGO_NET_RETRY=10 CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$folder \
    cargo package --workspace --locked --allow-dirty
failed=0
for crate in "$folder"/package/*.crate; do
    for file in LICENSE README.md Cargo.toml; do
        # Read to its end: tar would fail where nobody reads on.
        tar --list --file "$crate" | grep "^[^/]*/$file$" >/dev/null || {
            printf 'error: %s has no %s\n' "$crate" "$file" >&2
            failed=1
        }
    done
done
exit "$failed"
