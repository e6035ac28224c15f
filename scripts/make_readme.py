"""Writes the two tables of README.md that are made from the tree: platforms, and results.

    python scripts/make_readme.py [--check]

Each table stands between a line `<!-- NAME -->` and a line `<!-- end -->`. Platforms come of
`pallas_bridge.info()` for a library with every declared target, results of benches/results. With
`--check` nothing is written, and the exit code is 1 where README.md has other tables.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benches" / "results" / "nvidia-h200"
MIB = 2**20
GIB = 2**30

# What a cell of `info()`'s table means in README.
CELLS = {"kernel": "kernel", "XLA": "XLA's program", "-": "none"}
HEADINGS = {"cpu": "CPU", "cuda": "NVIDIA GPU", "tpu": "TPU"}


def size(count: float) -> str:
    """Returns a number of bytes in MiB, or from 1 GiB on in GiB."""
    return f"{count / MIB:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def platforms() -> str:
    """Returns what runs on each platform, for a library built for CPUs and NVIDIA GPUs."""
    sys.path.insert(0, str(ROOT / "pallas_bridge" / "src"))
    from pallas_bridge._src import library
    from pallas_bridge._src.generation import cpu_kernels, kernel
    from pallas_bridge._src.info import SHORT, operations_by_platform

    text = (ROOT / "pallas_bridge/src/pallas_bridge/_src/targets.json").read_text(encoding="utf-8")
    handlers = [
        library.Target(target["name"], platform, stage, "", 0)
        for target in json.loads(text)["targets"]
        for platform, stages in target["handlers"].items()
        for stage in stages
    ]
    complete = library.Library(Path(), "", (0, 1), "", handlers)
    cells = {
        name: tuple(CELLS[SHORT[found.implementation]] for found in row)
        for name, row in operations_by_platform(complete).items()
    }
    decoding = {"cpu": cpu_kernels.ATTENTION, "cuda": kernel.TARGET}
    cells["generation"] = tuple(
        CELLS["kernel" if platform in complete.platforms_of(decoding.get(platform, "")) else "XLA"]
        for platform in HEADINGS
    )
    rows = [
        [", ".join(f"`{name}`" for name in cells if cells[name] == row), *row]
        for row in dict.fromkeys(cells.values())
    ]
    return table(["operations", *HEADINGS.values()], rows)


def load(name: str) -> dict[str, Any]:
    """Returns a parsed file of results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


# Models of the benchmark of training steps, as README names them.
MODELS = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
}


def training() -> list[list[str]]:
    """Returns a row for each model's training step: the fastest of ours beside plain JAX's."""
    steps: dict[str, list[Mapping[str, Any]]] = {}
    for row in load("train-step.json")["results"]:
        if "tokens_per_second" in row:
            steps.setdefault(row["model"], []).append(row)
    rows = []
    for model, name in MODELS.items():
        if model not in steps:
            continue
        plain, ours = (
            max(
                (row for row in steps[model] if row["program"].startswith(kernels)),
                key=lambda row: float(row["tokens_per_second"]),
            )
            for kernels in ("baseline/", "ours/")
        )
        speed = ours["tokens_per_second"] / plain["tokens_per_second"]
        memory = [size(row["temp_bytes"]) for row in (plain, ours)]
        what = f"training step, {name}, {ours['batch']} x {ours['length']} tokens"
        text = f"{speed:.2f}x tokens a second; {memory[1]} beyond the state, not {memory[0]}"
        rows.append([what, text])
    return rows


def linear_losses() -> list[list[str]]:
    """Returns a row for each number of tokens of the linear loss."""
    found = load("linear-trained.json")["results"]
    times: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in found:
        times.setdefault(row["tokens"], {})[row["peer"]] = row
    rows = []
    for tokens, peers in sorted(times.items()):
        ours, plain = peers["xentile"], peers["JAX dense"]
        shape = f"{tokens} x {ours['hidden']} x {ours['vocab']}"
        ratio = plain["found"]["median_ms"] / ours["found"]["median_ms"]
        memory = [size(one["found"]["temp_bytes"]) for one in (plain, ours)]
        what = f"`linear_cross_entropy`, {shape}, logits of a trained model"
        rows.append([what, f"{ratio:.2f}x as fast; {memory[1]}, not {memory[0]}"])
    return rows


# Of each row of attention: file, cell, its texts, the other program, what to say of it, digits.
ATTENTION = (
    ("attention-packed.json", "4x4096 32/8 128 segments", ", packed texts", "xla", "", 1),
    ("attention-cudnn.json", "4x4096 32/8 128", "", "cudnn", "beside cuDNN: ", 2),
)


def attention() -> list[list[str]]:
    """Returns a row of attention over packed texts, and one beside cuDNN."""
    rows = []
    for name, cell, texts, peer, beside, digits in ATTENTION:
        shape, heads, width = cell.split()[:3]
        speeds = [
            f"{row[peer]['ms'] / row['ours']['ms']:.{digits}f}x {row['pass']}"
            for row in load(name)["results"]
            if row["cell"] == cell
        ]
        tokens = f"{shape.replace('x', ' x ')} tokens"
        what = f"`flash_attention`, {tokens}, {heads} heads of {width}{texts}"
        rows.append([what, beside + ", ".join(speeds).replace(" both", " with backward")])
    return rows


def results() -> str:
    """Returns results that users care for, as ratios to plain JAX on one GPU."""
    rows = [*training(), *linear_losses(), *attention()]
    return table(["bfloat16, loss and gradients", "beside plain JAX"], rows)


TABLES: Mapping[str, Callable[[], str]] = {"platforms": platforms, "results": results}


def with_tables(text: str) -> str:
    """Returns README's text with its tables made anew.

    Raises:
        ValueError: a table's place is not marked in the text.
    """
    for name, make in TABLES.items():
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"README.md has no lines <!-- {name} --> and <!-- end -->: add them")
        made = f"\n{make()}\n".replace("\\", r"\\")
        text = place.sub(made, text, count=1)
    return text


def main() -> int:
    """Writes the tables, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if they differ")
    options = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    after = with_tables(before)
    if options.check:
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
