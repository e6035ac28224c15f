"""Writes the pages of docs/reference that are made from the code: flags, keys of configs, targets.

    python scripts/make_reference.py [--binaries FOLDER] [--out FOLDER]

FOLDER has the built tools (default: target/release). A test compares what this writes with what is
in docs/reference.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "crates" / "xentile-tools" / "src"
MADE = "<!-- Made by scripts/make_reference.py; change the code, and run that. -->\n"

COMMANDS = [
    ("gradcheck", []),
    ("microbench", []),
    ("microbench", ["sweep"]),
    ("microbench", ["suite"]),
    ("microbench", ["decode"]),
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
    page = f"# Commands\n\n{MADE}\nWhat the commands are for is in [tools](../tools.md). "
    page += "Every command has `--help`.\nPresets are the files of `configs/`, by their names.\n"
    for binary, subcommand in COMMANDS:
        name = " ".join([binary, *subcommand])
        text = output([binaries / binary, *subcommand, "--help"])
        if subcommand:
            # What it does is in the list of the program's commands.
            text = text.partition("\n\n")[2]
        page += f"\n## `{name}`\n\n```text\n{without_presets(text)}```\n"
    for module in (["pallas_bridge"], ["pallas_bridge", "explain"], ["pallas_bridge.export"]):
        text = output([sys.executable, "-m", *module, "--help"])
        page += f"\n## `python -m {' '.join(module)}`\n\n```text\n{text}```\n"
    return page


def without_presets(text: str) -> str:
    """Returns a help text without the names of presets, help, --help and --version."""
    text = re.sub(r"(--preset <NAME>[^[]*?)\s+\[possible values: [^]]*\]", r"\1", text)
    text = re.sub(r"^ +help +Print .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ +-[hV], --\w+\s+Print .*\n\n?", "", text, flags=re.MULTILINE)
    # The extents of operations share an entry.
    extent = r"^ +(--[\w-]+) <\w+>\n +[A-Z], .*\n\n"
    flags = ", ".join(re.findall(extent, text, flags=re.MULTILINE))
    text = re.sub(extent, f"      {flags} <N>\n          Extents\n\n", text, count=1, flags=re.M)
    text = re.sub(extent, "", text, flags=re.MULTILINE)
    return f"{text.rstrip().removesuffix('Options:').rstrip()}\n"


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
    seen: dict[tuple[str, str], str] = {}
    for title, file, struct in CONFIGS:
        page += f"\n## {title}\n\n| key | meaning |\n| --- | --- |\n"
        as_before: dict[str, list[str]] = {}
        for key, words in fields(file, struct):
            before = seen.setdefault((key, words), title)
            if before != title and key not in FLATTENED:
                as_before.setdefault(before, []).append(f"`{key}`")
                continue
            words = words.replace("|", "\\|")
            page += f"| {FLATTENED[key]} | |\n" if key in FLATTENED else f"| `{key}` | {words} |\n"
        for before, keys in as_before.items():
            page += f"| {', '.join(keys)} | as in {before} |\n"
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
    """The row of an option, whose kind, but for a bool, and allowed values share a cell."""
    return [key, f"{kind}: {allowed}".replace("bool: true or false", "bool"), *default]


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


DECLARED = ROOT / "pallas_bridge" / "src" / "pallas_bridge" / "_src" / "targets.json"
# The first words of targets, by which this page groups them.
OPERATIONS = (
    *(folder.parent.name for folder in DECLARED.parent.glob("*/__init__.py")),
    "adamw",
    "decode_step",
    "kl_divergence",
    "kv_cache",
    "layer_norm",
    "linear",
    "lion",
    "newton_schulz",
    "qk_norm_rope",
    "rms_norm",
    "sample",
    "scale",
)
# What stands for lists of dtypes.
DTYPES = {
    "float": ["f32", "bf16", "f16"],
    "half": ["bf16", "f16"],
    "f32/bf16": ["f32", "bf16"],
    "fp8": ["f8e4m3fn", "f8e5m2"],
    "integer": ["s32", "s64"],
}
TARGETS = """\
`xentile_targets` lists a handler for each target, platform and stage: on CPUs (`Host`) `execute`,
on NVIDIA GPUs (`CUDA`) also `initialize`, which loads the kernels that `execute` launches, unless
the table says `execute` only. `xentile_declarations` returns this page, and more, as JSON.
[Custom calls](../internals/custom-calls.md) explains the operations.

| notation | meaning |
| --- | --- |
| both | Host and CUDA |
| `*batch` | any number of leading axes: the tokens |
| argument without `*batch` | shared by all tokens; may begin with some of their first axes |
| result without `*batch` | a sum over tokens, given as partial sums `[.., P, D]` |
| `2.F`, `F.2` | the axes `[2, F]`, `[F, 2]` |
| `D/128` | number of blocks of 128 in D |
| no dtype | dtype of the first argument, which is a float |
| float, half | f32, bf16 or f16; bf16 or f16 |
| fp8, integer | f8e4m3fn or f8e5m2; s32 or s64 |
| grad | no dtype on CPUs; on GPUs also f32 |
| bytes | u8 on CPUs; any dtype on GPUs |
| y in x | y may lie in the memory of x |

| target | on | arguments | results |
| --- | --- | --- | --- |
"""
ATTRIBUTES = """
A call must have all attributes of its target and no others; those with an entry in "if absent" may
be left out. Targets are named without `xentile_`.

| attribute | type and range | if absent | of |
| --- | --- | --- | --- |
"""


def dims_in_words(dims: str | Mapping[str, Any]) -> str:
    """Returns the dims of an array, with those of each value of an attribute where they differ."""
    if isinstance(dims, str):
        return f"`[{dims}]`"
    name, cases = dims["by"], dims["cases"]
    # The value itself as a dim, or one less.
    for dim, less in [(name, 0), (f"{name}-1", 1)]:
        of_value = {
            re.sub(rf"\b{int(value) - less}\b", dim, text)
            for value, text in cases.items()
            if value.isdecimal()
        }
        if len(cases) > 1 and len(of_value) == 1 and dim in min(of_value):
            return f"`[{min(of_value)}]`"
    return f"{' or '.join(f'`[{text}]`' for text in cases.values())} by `{name}`"


def array(first: str, own: Collection[str], one: Mapping[str, Any]) -> str:
    """Returns the dims and dtype of an array, and when a call has it.

    `first` is the first argument, and `own` the arrays whose dtype is not that of the first.
    """
    dtype, given = one["dtype"], one["given"]
    words = dims_in_words(one["dims"])
    if isinstance(dtype, list) and (one["name"] != first or len(dtype) < len(DTYPES["float"])):
        words += f" {next((name for name, few in DTYPES.items() if few == dtype), dtype[0])}"
    elif dtype == "bytes":
        words += " bytes"
    elif isinstance(dtype, dict) and "like_or_f32" in dtype:
        words += " grad"
    elif isinstance(dtype, dict) and dtype.get("like") in own:
        words += f" like {dtype['like']}"
    if isinstance(given, dict):
        ((how, name),) = given.items()
        words += f" ({'without' if how == 'unless' else 'with'} {name})"
    return f"{words} (optional)" if given == "optional" else words


def arrays(ones: Sequence[Mapping[str, Any]], words_of: Callable[..., str]) -> list[str]:
    """Returns a line for each array, or for consecutive arrays that have the same words."""
    lines: list[tuple[list[str], str]] = []
    for one in ones:
        words = words_of(one)
        if not lines or lines[-1][1] != words:
            lines.append(([], words))
        lines[-1][0].append(one["name"])
    return [f"{', '.join(names)} {words}" for names, words in lines]


def range_of(attribute: Mapping[str, Any]) -> str:
    """Returns the type and range of an attribute in words."""
    found, kind = attribute["range"], attribute["type"]
    if isinstance(found, list):
        return f"{kind}: {', '.join(map(str, found))}"
    if not found:
        return str(kind)
    if "finite" in found:
        return f"{kind}, finite in f32"
    if "above" in found:
        return f"{kind} > {found['above']}, finite"
    if "at_least" in found:
        return f"{kind} >= {found['at_least']}"
    if found["to"] is None:
        return f"{kind} >= {found['from']:.7g}, finite"
    return f"{kind} in [{found['from']:.7g}, {found['to']:.7g}]"


def targets() -> str:
    """The page of custom-call targets, from what the library declares."""
    declared = json.loads(DECLARED.read_text(encoding="utf-8"))["targets"]
    page = f"# Custom-call targets\n\n{MADE}\n{TARGETS}"
    rows: dict[tuple[str, str, str, bool], list[str]] = {}
    for target in declared:
        on = [name for name, stages in target["handlers"].items() if stages]
        words = "both" if len(on) == 2 else on[0]
        if target["handlers"]["CUDA"] == ["execute"]:
            words += " (`execute` only)"
        first = target["operands"][0]["name"]
        both = [*target["operands"], *target["results"]]
        own = {one["name"] for one in both if isinstance(one["dtype"], list)} - {first}
        as_words = functools.partial(array, first, own)
        sides = ["<br>".join(arrays(target[side], as_words)) for side in ("operands", "results")]
        places: dict[str, list[str]] = {}
        for one in target["aliases"]:
            places.setdefault(one["result"], []).append(one["operand"])
        after = [one for one, of in places.items() if of == [one.removeprefix("new_")]]
        if len(after) > 2:
            sides[1] += "<br>`new_x` in x"
            places = {one: of for one, of in places.items() if one not in after}
        for result, operands in places.items():
            sides[1] += f"<br>{result} in {' or '.join(operands)}"
        page += f"| `{target['name']}` | {words} | {' | '.join(sides)} |\n"
        for one in target["attributes"]:
            key = one["name"], range_of(one), one["absent"] or "", one["cuda_only"]
            rows.setdefault(key, []).append(target["name"].removeprefix("xentile_"))
    page += ATTRIBUTES
    families: dict[str, list[str]] = {}
    for target in declared:
        name = target["name"].removeprefix("xentile_")
        family = next(one for one in sorted(OPERATIONS, key=len)[::-1] if name.startswith(one))
        families.setdefault(family, []).append(name)
    joined: dict[tuple[str, str, str, bool], list[str]] = {}
    for (name, words, absent, is_of_cuda), of in rows.items():
        short = []
        for family, members in families.items():
            mine = [one for one in of if one in members]
            rest = [one for one in members if one not in mine]
            if len(mine) > len(rest) > 0:
                short.append(
                    f"{family} but {', '.join(one.removeprefix(family)[1:] for one in rest)}"
                )
            else:
                short += [family] if mine and not rest else mine
        joined.setdefault((words, absent, "; ".join(short), is_of_cuda), []).append(f"`{name}`")
    for (words, absent, of_targets, is_of_cuda), names in joined.items():
        suffix = " on CUDA" if is_of_cuda else ""
        page += f"| {', '.join(names)}{suffix} | {words} | {absent} | {of_targets} |\n"
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
