"""`kernels`: the model as one program, by its kernels from a JAX profile.

What is profiled is what `layers` times as the model; the parts are the same, known by their scopes.
"""

import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import layers, tables
from .config import Spec
from .tables import Row

Cell = dict[str, Any]
PRODUCT, FUSED, REST = "matrix product", "fused kernel", "other"
# Of libraries that XLA calls for products: cuBLAS, Triton's fusions of them, oneDNN, YNNPACK.
LIBRARY = re.compile(r'(?i)gemm|matmul|cublas|"__[^"]*dot')
# Kernels of this project, and cuDNN's attention.
OWN = re.compile(r'^"xentile_|fmha')
TOP = 10


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell and a row for each size, length, policy and phase."""
    for cell in layers.phases(spec):
        yield cell, [{}]


def scope_of(names: Sequence[str]) -> Callable[[str], str]:
    """What finds the innermost of these parts in a scope's name; "" where there is none."""
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<=[/(])({either})(?=[/)])")

    def find(scope: str) -> str:
        found = pattern.findall(scope)
        return str(found[-1]) if found else ""

    return find


def kinds_of_program(text: str) -> dict[str, str]:
    """The kind of each instruction of a compiled program's text, by its name.

    A fusion is a matrix product where a computation that it calls has one.
    """
    from train.breakdown import COMPUTATION, INSTRUCTION

    kinds: dict[str, str] = {}
    called: dict[str, str] = {}
    with_product: set[str] = set()
    computation = ""
    for line in text.splitlines():
        if opened := COMPUTATION.match(line):
            computation = opened[1]
        if not (found := INSTRUCTION.match(line)):
            continue
        name, opcode = found.groups()
        target = re.search(r'custom_call_target=("[^"]*")', line)
        kinds[name] = REST
        if target and OWN.search(target[1]):
            kinds[name] = FUSED
        elif opcode in ("dot", "convolution") or (target and LIBRARY.search(target[1])):
            kinds[name] = PRODUCT
            with_product.add(computation)
        if calls := re.search(r"calls=%?([\w.\-]+)", line):
            called[name] = calls[1]
    for name, of in called.items():
        if of in with_product:
            kinds[name] = PRODUCT
    return kinds


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Returns what times the model, and then profiles it."""
    import jax
    from train.breakdown import Profiler

    from . import model
    from .runner import device_limit

    def measure(variant: Cell) -> Row:
        call, run = layers.call_of(cell, layers.MODEL, device_limit(cell["memory_limit"]))
        found = model.timed_in_turn(call, cell["steps"])
        steps: int = cell["steps"]
        with tempfile.TemporaryDirectory() as folder:
            profiler = Profiler(Path(folder), 0, steps - 1)
            for step in range(steps):
                profiler.before(step)
                jax.block_until_ready(call())
                profiler.after(step)
            figures = of_profile(Path(folder), run.compiled.as_text(), cell, steps)
        return {"median": statistics.median(found), **figures}

    return measure


def of_profile(folder: Path, text: str, cell: Cell, steps: int) -> Row:
    """The figures of a profile of the program `text`, a step each.

    Raises:
        ValueError: The profile has no kernel of the program.
    """
    from train.breakdown import OTHER, instructions_of_trace, parts_of_program

    from .parts import OUTSIDE, names_of

    names = (*names_of(cell), *OUTSIDE)
    parts, containers = parts_of_program(text, scope_of(names))
    kinds = kinds_of_program(text)
    found = instructions_of_trace(folder, parts.keys() - containers)
    took = {name: ns * 1e-9 / steps for name, (ns, _) in found.items()}
    by_part: dict[str, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    attention: dict[str, float] = defaultdict(float)
    for name, seconds in took.items():
        by_part[parts[name]] += seconds
        by_kind[kinds[name]] += seconds
        if parts[name] == "attention":
            attention[kinds[name]] += seconds
    largest = sorted(took, key=lambda name: took[name], reverse=True)[:TOP]
    return {
        "kernels": sum(took.values()),
        "launches": sum(count for _, count in found.values()) / steps,
        "distinct": len(found),
        "by_kind": by_kind,
        "by_part": {part: by_part.get(part, 0.0) for part in (*names, OTHER)},
        "attention": attention,
        "top": [
            {
                "name": name,
                "kind": kinds[name],
                "part": parts[name],
                "count": found[name][1] / steps,
                "seconds": took[name],
            }
            for name in largest
        ],
    }


def title(row: Row) -> str:
    """What a row's tables are of."""
    return layers.title(row["case"])


def table(rows: Sequence[Row]) -> str:
    """A line a profile; then for each a table of its parts, and one of its dominant kernels."""
    heads = ["size", "length", "policy", "kernels", "phase", "status", "a step (ms)"]
    heads += ["in kernels (ms)"]
    heads += ["launches a step", "matrix products", "attention's products", "its softmax and rest"]
    heads += ["its fused kernel"]
    lines = []
    for row in rows:
        line = [str(row["case"][name]) for name in ("size", "length", "policy")]
        line += [tables.kernels(row["case"]), row["case"]["phase"], tables.status(row)]
        if "kernels" in row:
            total = row["kernels"]
            line += [f"{1e3 * row['median']:.4g}", f"{1e3 * total:.4g}"]
            line += [f"{row['launches']:,.0f}", f"{row['by_kind'].get(PRODUCT, 0) / total:.1%}"]
            line += [
                f"{row['attention'].get(kind, 0) / total:.1%}" for kind in (PRODUCT, REST, FUSED)
            ]
        lines.append(line + [""] * (len(heads) - len(line)))
    parts = [tables.table(heads, lines)]
    for row in tables.finished(rows):
        total, count = row["kernels"], row["case"]["layers"]
        by_part = []
        for name, took in row["by_part"].items():
            # Of an instruction that serves several parts, or none, no layer has its share.
            of_layer = "" if layers.around(name) or name == "other" else f"{1e3 * took / count:.4g}"
            by_part.append([name, f"{1e3 * took:.4g}", of_layer, f"{took / total:.1%}"])
        by_part.append(["all kernels", f"{1e3 * total:.4g}", "", "100.0%"])
        heads = ["part", f"all {count} layers (ms)", "a layer (ms)", "of all kernels"]
        parts.append(f"{title(row)}:\n\n{tables.table(heads, by_part)}")
        top = [
            [
                *(one["name"], one["kind"], one["part"], f"{one['count']:,.0f}"),
                *(f"{1e3 * one['seconds']:.4g}", f"{one['seconds'] / total:.1%}"),
            ]
            for one in row["top"]
        ]
        heads = ["dominant kernel", "kind", "part", "times a step", "time (ms)", "of all kernels"]
        parts.append(tables.table(heads, top))
    return "\n\n".join(parts)


def words(rows: Sequence[Row]) -> str:
    """What the numbers show: products, the dominant kernel, attention, launches."""
    told = [tables.ends(rows)]
    for row in tables.finished(rows):
        case, total, top = row["case"], row["kernels"], row["top"][0]
        products = row["by_kind"].get(PRODUCT, 0) / total
        told.append(
            f"{case['phase'].capitalize()} of {case['size']} at length {case['length']} in "
            f"{case['policy']} launches {row['launches']:,.0f} kernels a step, of "
            f"{row['distinct']:,} different ones; matrix products are "
            f"{products:.0%} of their time. The largest is {top['name']} "
            f"({top['part']}) with {top['seconds'] / total:.0%}."
        )
        products = row["attention"].get(PRODUCT, 0)
        rest = row["attention"].get(REST, 0)
        if products and rest:
            told.append(
                f"In attention softmax, masks and copies take {rest / products:.2f} times as long "
                "as its products."
            )
    for name, ratios in tables.beside_xla(rows, "median").items():
        told.append(f"With kernels {name} a step takes {tables.span(ratios)} of XLA's time.")
    return " ".join(filter(None, told))
