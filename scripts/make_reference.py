"""Writes the pages of docs/reference that are made from the code: flags, keys of configs, targets.

    python scripts/make_reference.py [--binaries FOLDER] [--out FOLDER]

FOLDER has the built tools (default: target/release). A test compares what this writes with what is
in docs/reference.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "crates" / "xentile-tools" / "src"
MADE = "<!-- Made by scripts/make_reference.py; change the code, and run that. -->\n"

COMMANDS = [
    ("gradcheck", []),
    ("microbench", []),
    ("microbench", ["sweep"]),
    ("microbench", ["suite"]),
    ("xentile", []),
    ("xentile", ["ops"]),
    ("xentile", ["plugins"]),
]
# The struct of each kind of config, with its file.
CONFIGS = [
    ("gradcheck", "gradcheck/config.rs", "Config"),
    ("microbench", "microbench/config.rs", "Config"),
    ("microbench sweep", "sweep/grid.rs", "Config"),
    ("microbench suite", "suite.rs", "Config"),
]
# The columns of each row of a table, by the table's heading or by the operation.
Rows = dict[str, list[list[str]]]
# What stands for these fields, which are keys of their own.
FLATTENED = {"top": "extents and options of the operation (below)"}


def output(command: Sequence[str | Path]) -> str:
    """Returns what a command prints."""
    wide = {"COLUMNS": "100", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    path = str(ROOT / "pallas_bridge" / "src")
    found = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | wide | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return "".join(f"{line.rstrip()}\n" for line in found.stdout.strip().splitlines())


def cli(binaries: Path) -> str:
    """The page of commands and flags."""
    page = f"# Commands\n\n{MADE}\nWhat the commands are for is in [tools](../tools.md).\n"
    for binary, subcommand in COMMANDS:
        name = " ".join([binary, *subcommand])
        text = output([binaries / binary, *subcommand, "--help"])
        page += f"\n## `{name}`\n\n```text\n{text}```\n"
    for module in (["pallas_bridge"], ["pallas_bridge", "explain"], ["pallas_bridge.export"]):
        text = output([sys.executable, "-m", *module, "--help"])
        page += f"\n## `python -m {' '.join(module)}`\n\n```text\n{text}```\n"
    return page


def fields(file: str, struct: str) -> Iterator[tuple[str, str]]:
    """The keys of a struct that serde reads, each with its documentation in one line."""
    text = (SOURCE / file).read_text(encoding="utf-8")
    body = text.split(f"pub struct {struct} {{\n")[1].split("\n}\n")[0]
    words: list[str] = []
    renamed = None
    for line in body.splitlines():
        line = line.strip()
        if line.startswith("///"):
            words.append(line.removeprefix("///").strip())
        elif found := re.search(r'rename = "(\w+)"', line):
            renamed = found[1]
        elif found := re.match(r"pub (\w+): ", line):
            yield renamed or found[1], " ".join(words).rstrip(".")
            words, renamed = [], None


def config(binaries: Path) -> str:
    """The page of keys."""
    page = f"# Keys of configs\n\n{MADE}\n"
    page += "Configs are YAML. `--set KEY=VALUE` overrides a key, with dots between levels, as in\n"
    page += "`--set options.z_loss=1e-4`. An unknown key is refused with the nearest one.\n"
    for title, file, struct in CONFIGS:
        page += f"\n## {title}\n\n| key | meaning |\n| --- | --- |\n"
        for key, words in fields(file, struct):
            words = words.replace("|", "\\|")
            page += f"| {FLATTENED[key]} | |\n" if key in FLATTENED else f"| `{key}` | {words} |\n"
    return page + operations(binaries)


def sections(text: str) -> Rows:
    """The tables that `xentile ops NAME` prints, by their headings, each row in its columns."""
    found: Rows = {}
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            cells = re.split(r" {2,}", line.strip().replace("|", "\\|"))
            rows.append([cell.removeprefix("default ") for cell in cells])
        else:
            found[line.split(",")[0]] = rows = []
    return found


def merged(rows_by_name: Rows, columns: Sequence[str]) -> str:
    """One table of the keys of all operations; each row names the operations that have it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, rows in rows_by_name.items():
        for row in rows:
            names.setdefault(tuple(row), []).append(name)
    page = f"| {' | '.join([*columns, 'operations'])} |\n|{' --- |' * (len(columns) + 1)}\n"
    for (key, *cells), having in names.items():
        key, *note = key.split(" ", 1)
        is_everywhere = len(having) == len(rows_by_name)
        cells += ["all" if is_everywhere else ", ".join(having)]
        page += f"| {' | '.join([' '.join([f'`{key}`', *note]), *cells])} |\n"
    return page


def dim(letter: str, key: str, *default: str) -> list[str]:
    """The row of an extent, whose default is left out where there is none."""
    *given, about = default
    return [key, letter, *(given or [""]), about]


def option(key: str, kind: str, allowed: str, *default: str) -> list[str]:
    """The row of an option, whose kind and allowed values share a cell."""
    return [key, f"{kind}: {allowed}", *default]


def operations(binaries: Path) -> str:
    """The keys of each operation, those in common once."""
    names = [line.split()[0] for line in output([binaries / "xentile", "ops"]).splitlines()]
    texts = {name: output([binaries / "xentile", "ops", name]) for name in names}
    tables = {name: sections(text) for name, text in texts.items()}

    def rows(heading: str, row: Callable[..., list[str]] = lambda *cells: list(cells)) -> Rows:
        return {name: [row(*cells) for cells in of.get(heading, [])] for name, of in tables.items()}

    page = "\n## Keys of each operation\n\n`xentile ops NAME` prints the keys of one operation, "
    page += "with its arrays and\nthe implementations of this machine.\n\n"
    page += "| operation | computes | passes | distributions of inputs |\n|" + " --- |" * 4 + "\n"
    for name, of in tables.items():
        about = texts[name].splitlines()[0].split(": ", 1)[1]
        ((passes,),), ((distributions,),) = of["passes"], of["distributions of inputs"]
        page += f"| `{name}` | {about} | {passes} | {distributions} |\n"
    for title, found, columns in [
        ("Extents", rows("dims", dim), ["key", "dim", "default", "meaning"]),
        ("Tiles, tuned where absent", rows("tile"), ["key", "extent", "meaning"]),
        ("Options", rows("options", option), ["key", "value", "default", "meaning"]),
        ("Tolerances, with defaults for bf16", rows("tolerances"), ["key", "default", "meaning"]),
    ]:
        page += f"\n### {title}\n\n{merged(found, columns)}"
    return page


def targets() -> str:
    """The page of custom-call targets, by the symbols in the header."""
    header = ROOT / "crates" / "xentile-xla" / "include" / "xentile_xla.h"
    symbols = re.findall(
        r"XLA_FFI_Error\* (xentile_\w+?)_(host|cuda_initialize|cuda)\(",
        header.read_text(encoding="utf-8"),
    )
    page = f"# Custom-call targets\n\n{MADE}\n"
    page += "The table of the library, `xentile_targets`, lists a handler a target and platform.\n"
    page += "What each target takes and gives, its attributes and their ranges are in\n"
    page += "[custom calls](../internals/custom-calls.md#the-targets).\n\n"
    page += "| target | CPU (`Host`) | NVIDIA GPU (`CUDA`) |\n| --- | --- | --- |\n"
    stages = {"host": "execute", "cuda": "execute", "cuda_initialize": "initialize"}
    for target in sorted({name for name, _ in symbols}):
        host, cuda = (
            ", ".join(stages[kind] for kind in kinds if (target, kind) in symbols)
            for kinds in (("host",), ("cuda_initialize", "cuda"))
        )
        page += f"| `{target}` | {host} | {cuda} |\n"
    return page


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reference")
    given = parser.parse_args()
    pages = {
        "cli": cli(given.binaries),
        "config": config(given.binaries),
        "targets": targets(),
    }
    for name, page in pages.items():
        (given.out / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
