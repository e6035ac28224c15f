"""Writes the licences of the crates that are linked into libxentile_xla, which wheels carry.

    python scripts/third_party_licenses.py [--check]

With --check nothing is written, and the exit code is 1 where the file is not what would be.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "pallas_bridge" / "THIRD_PARTY_LICENSES.txt"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
# The names that crates give to the files of their licences.
PATTERNS = ("LICENSE*", "LICENCE*", "COPYING*", "UNLICENSE*", "NOTICE*")
RULE = "=" * 80

HEAD = """\
libxentile_xla contains code of the projects below, each under its own licence, and of Rust's
standard library (https://github.com/rust-lang/rust, MIT OR Apache-2.0, copyright the Rust Project
contributors), whose texts stand below too. A text that several crates have stands once.

scripts/third_party_licenses.py writes this file.
"""


def cargo(*arguments: str) -> str:
    """Returns what a command of cargo's prints."""
    command = ["cargo", *arguments, "--locked"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked() -> set[tuple[str, str]]:
    """Returns the name and version of every crate that is linked, ours left out."""
    found = set()
    for target in TARGETS:
        tree = (
            "--edges",
            "normal,no-proc-macro",
            "--prefix",
            "none",
            "--format",
            "{p}",
            "--target",
            target,
        )
        for line in cargo(
            "tree", "--package", "xentile-xla", "--features", "cuda", *tree
        ).splitlines():
            name, version, *more = line.split()
            if not any(part.startswith("(/") for part in more):
                found.add((name, version.removeprefix("v")))
    return found


def text() -> str:
    """Returns what the file should hold.

    Raises:
        SystemExit: a crate has no file with its licence.
    """
    platforms = [part for target in TARGETS for part in ("--filter-platform", target)]
    packages = json.loads(cargo("metadata", "--format-version", "1", *platforms))["packages"]
    wanted = linked()
    crates: list[str] = []
    texts: dict[str, tuple[Path, list[str]]] = {}
    for package in sorted(packages, key=lambda package: (package["name"], package["version"])):
        name = f"{package['name']} {package['version']}"
        if (package["name"], package["version"]) not in wanted:
            continue
        folder = Path(package["manifest_path"]).parent
        found = sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})
        if not found:
            sys.exit(f"error: {name} has no file with its licence")
        crates.append(f"{name}: {package['license']}, {package['repository']}")
        for file in found:
            lines = file.read_text(encoding="utf-8").split()
            # The same words are the same text, however they are cut into lines.
            texts.setdefault(" ".join(lines), (file, []))[1].append(f"{name}, {file.name}")
    parts = [HEAD, *crates, ""]
    for file, of in texts.values():
        parts += [RULE, *of, RULE, "", file.read_text(encoding="utf-8").strip(), ""]
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args()
    made = text()
    if not given.check:
        FILE.write_text(made, encoding="utf-8")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != made:
        print(f"error: {FILE.relative_to(ROOT)} is stale: run scripts/third_party_licenses.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
