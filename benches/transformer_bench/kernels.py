"""`kernels`: a layer and the model, each as one program, by its kernels from a JAX profile.

What is profiled is what `layers` times as these; the parts are the same, known by their scopes.
"""

import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness

from . import layers, tables
from .config import Spec
from .tables import Row

Cell = dict[str, Any]
PRODUCT, FUSED, REST = "matrix product", "fused kernel", "other"
# Library calls for GEMMs: cuBLAS, Triton's GEMM fusions, oneDNN, YNNPACK.
LIBRARY = re.compile(r'(?i)gemm|matmul|cublas|"__[^"]*dot')
# Kernels of this project, and cuDNN's attention.
OWN = re.compile(r'^"xentile_|fmha')
TOP = 10
# Keys of a case that only say how often it was measured.
REPEATS = ("steps",)
# The most models of a phase that have sentences of their own.
FEW = 4


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length, policy and phase; a row for a layer, and for the model."""
    for cell in layers.phases(spec):
        yield cell, [{"part": layers.WHOLE}, {"part": layers.MODEL}]


def scope_of(names: Sequence[str]) -> Callable[[str], str]:
    """Returns what finds the innermost of these parts in a scope's name; "" for none."""
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
    """Returns a function that times a program, and then profiles it."""
    import jax
    from train.breakdown import Profiler

    from .compiled import device_limit

    def measure(variant: Cell) -> Row:
        call, run = layers.call_of(cell, variant["part"], device_limit(cell["memory_limit"]))
        found = harness.steady_seconds(call, cell["steps"])
        steps: int = cell["steps"]
        with tempfile.TemporaryDirectory() as folder:
            profiler = Profiler(Path(folder), 0, steps - 1, is_of_kernels=True)
            for step in range(steps):
                profiler.before(step)
                result = call()
                # As in timing: on a GPU steps follow one another without a wait.
                if step == steps - 1 or jax.default_backend() != "gpu":
                    jax.block_until_ready(result)
                profiler.after(step)
            figures = measure_profile(
                Path(folder), run.compiled.as_text(), {**cell, **variant}, steps
            )
        return {"median": statistics.median(found), **figures}

    return measure


def measure_profile(folder: Path, text: str, cell: Cell, steps: int) -> Row:
    """Measurements per step from a profile of the program `text`.

    Raises:
        ValueError: The profile has no kernel of the program.
    """
    from train.breakdown import OTHER, instructions_of_trace, parts_of_program

    from .parts import OUTSIDE, names_of

    names = names_of(cell) if cell["part"] == layers.WHOLE else (*names_of(cell), *OUTSIDE)
    parts, containers = parts_of_program(text, scope_of(names))
    kinds = kinds_of_program(text)
    traced = instructions_of_trace(folder, parts.keys() - containers)
    found = traced.instructions
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
        "idle": None if traced.idle is None else traced.idle * 1e-9 / steps,
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


def of(row: Row) -> str:
    """The program of a row, a layer or the model; old rows are of the model."""
    return str(row["case"].get("part", layers.MODEL))


def title(row: Row) -> str:
    """The title of a row's tables."""
    return f"{of(row).capitalize()} of {layers.title(row['case'])}"


def table(rows: Sequence[Row]) -> str:
    """A line for each profile, ours over XLA's, and tables of parts and dominant kernels."""
    heads = ["size", "length", "policy", "kernels", "phase", "program", "status", "a step (ms)"]
    heads += ["in kernels (ms)", "tokens a second"]
    heads += ["launches a step", "matrix products", "attention's products", "its softmax and rest"]
    heads += ["its fused kernel", "largest kernel", "largest that is no product"]
    lines = []
    for row in rows:
        case = row["case"]
        line = [str(case[name]) for name in ("size", "length", "policy")]
        line += [tables.kernels(case), case["phase"], of(row), tables.status(row)]
        if "kernels" in row:
            total, is_model = row["kernels"], of(row) == layers.MODEL
            speed = layers.tokens_a_second(case, row["median"]) if is_model else None
            line += [f"{1e3 * row['median']:.4g}", f"{1e3 * total:.4g}", tables.rate(speed)]
            line += [f"{row['launches']:,.0f}", f"{share_of_products(row):.1%}"]
            line += [
                f"{row['attention'].get(kind, 0) / total:.1%}" for kind in (PRODUCT, REST, FUSED)
            ]
            line += largest(row)
        lines.append(line + [""] * (len(heads) - len(line)))
    found = [harness.table(heads, lines), *pairs_with_xla(rows)]
    for row in longest(tables.finished(rows)):
        found += [f"{title(row)}:\n\n{by_part(row)}", dominant(row)]
    return "\n\n".join(found)


def pairs_with_xla(rows: Sequence[Row]) -> list[str]:
    """A table for each choice of kernels with ours, a line for each pair of profiles."""
    heads = ["size", "length", "policy", "phase", "program", "XLA's step (ms)", "ours (ms)"]
    heads += ["ours of XLA's", "XLA's kernels (ms)", "ours (ms)", "XLA's launches", "ours"]
    heads += ["XLA's matrix products", "ours"]
    found = []
    for name, pairs in tables.pairs_with_xla(rows, *REPEATS).items():
        lines = []
        for pair in pairs:
            ours, of_xla = pair
            case = ours["case"]
            line = [str(case[key]) for key in ("size", "length", "policy", "phase")]
            line += [of(ours), *(f"{1e3 * one['median']:.4g}" for one in (of_xla, ours))]
            line.append(f"{tables.ratio(pair, 'median'):.2f}")
            line += [f"{1e3 * one['kernels']:.4g}" for one in (of_xla, ours)]
            line += [f"{one['launches']:,.0f}" for one in (of_xla, ours)]
            line += [f"{share_of_products(one):.1%}" for one in (of_xla, ours)]
            lines.append(line)
        found.append(f"Kernels {name} beside XLA's:\n\n{harness.table(heads, lines)}")
    return found


def longest(rows: Sequence[Row]) -> list[Row]:
    """The longest of rows that differ only in length; these have tables of their own."""
    found: dict[str, Row] = {}
    for row in rows:
        name = repr({**row["case"], "length": None})
        if name not in found or found[name]["case"]["length"] < row["case"]["length"]:
            found[name] = row
    return list(found.values())


def largest(row: Row) -> list[str]:
    """The dominant kernel by part and share, and the dominant one that is no GEMM."""
    return [
        f"{one['part']} {one['seconds'] / row['kernels']:.0%}" if one else ""
        for one in (row["top"][0], largest_other(row))
    ]


def largest_other(row: Row) -> Row | None:
    """The dominant kernel that is no GEMM; None if the row has GEMMs alone."""
    return next((one for one in row["top"] if one["kind"] != PRODUCT), None)


def share_of_products(row: Row) -> float:
    """The share of GEMMs in the time of all kernels."""
    return float(row["by_kind"].get(PRODUCT, 0) / row["kernels"])


def by_part(row: Row) -> str:
    """A table of a profile's parts, their sum, and the time without a profile."""
    total, count = row["kernels"], row["case"]["layers"]
    is_layer = of(row) == layers.WHOLE
    lines = []
    for name, took in row["by_part"].items():
        line = [name, f"{1e3 * took:.4g}", f"{took / total:.1%}"]
        if not is_layer:
            # Instructions outside of layers have no share in a layer.
            is_whole = layers.around(name) or name == "other"
            line.append("" if is_whole else f"{1e3 * took / count:.4g}")
        lines.append(line)
    sums = [("all kernels", total)]
    if row.get("idle") is not None:
        idle = between_kernels(row)
        sums += [("no kernel runs", idle), ("both", total + idle)]
    for name, took in (*sums, ("measured without a profile", row["median"])):
        lines.append(
            [name, f"{1e3 * took:.4g}", f"{took / total:.1%}", *([] if is_layer else [""])]
        )
    heads = ["part", "time (ms)", "of all kernels", *([] if is_layer else ["a layer (ms)"])]
    return harness.table(heads, lines)


def dominant(row: Row) -> str:
    """A table of a profile's dominant kernels."""
    total = row["kernels"]
    lines = [
        [
            *(one["name"], one["kind"], one["part"], f"{one['count']:,.0f}"),
            *(f"{1e3 * one['seconds']:.4g}", f"{one['seconds'] / total:.1%}"),
        ]
        for one in row["top"]
    ]
    heads = ["dominant kernel", "kind", "part", "times a step", "time (ms)", "of all kernels"]
    return harness.table(heads, lines)


def words(rows: Sequence[Row]) -> str:
    """Sentences on GEMMs, dominant kernels, attention, launches and sums of layers."""
    sentences = [tables.ends(rows)]
    found = tables.finished(rows)
    phases = dict.fromkeys(row["case"]["phase"] for row in found)
    for phase in phases:
        models = [row for row in found if of(row) == layers.MODEL and row["case"]["phase"] == phase]
        if len(models) > FEW:
            sentences.append(describe_models(models))
        else:
            sentences += [line for row in models for line in describe_model(row)]
    for phase in phases:
        of_layers = [
            row for row in found if of(row) == layers.WHOLE and row["case"]["phase"] == phase
        ]
        if of_layers:
            sentences.append(describe_sums(of_layers))
    for name, pairs in tables.pairs_with_xla(rows, *REPEATS).items():
        for phase, of_phase in tables.by(pairs, "phase").items():
            for program in (layers.WHOLE, layers.MODEL):
                chosen = [pair for pair in of_phase if of(pair[0]) == program]
                if chosen:
                    took = tables.compared(chosen, "median", "XLA's time")
                    alone, launches = (
                        tables.span([tables.ratio(pair, figure) for pair in chosen])
                        for figure in ("kernels", "launches")
                    )
                    sentences.append(
                        f"In {phase} with kernels {name} the {program} takes {took}; its kernels "
                        f"alone take {alone} of the time of XLA's, and are {launches} of their "
                        "number."
                    )
    return " ".join(filter(None, sentences))


def between_kernels(row: Row) -> float:
    """Seconds of a step in which no kernel ran, by the profile; 0 if it does not say.

    A profile makes them longer, where starting kernels takes longer than they run: they count for
    no more than what kernels lack of the time that was measured without one.
    """
    return float(min(row.get("idle") or 0.0, max(row["median"] - row["kernels"], 0.0)))


def describe_sums(rows: Sequence[Row]) -> str:
    """A sentence on the sum of a layer's kernels and its time without a profile."""
    alone = tables.span([row["kernels"] / row["median"] for row in rows])
    sentence = (
        f"In {rows[0]['case']['phase']} the kernels of a layer add up to {alone} of what it takes"
    )
    if any(row.get("idle") for row in rows):
        ratios = [(row["kernels"] + between_kernels(row)) / row["median"] for row in rows]
        sentence += f", and to {tables.span(ratios)} with the time between them"
    return f"{sentence}."


def describe_models(rows: Sequence[Row]) -> str:
    """A sentence on the profiles of many models of a phase: GEMMs, launches, large kernels."""
    rows = sorted(rows, key=share_of_products)
    ends = [
        f"{share_of_products(row):.0%} ({row['case']['size']} at length {row['case']['length']})"
        for row in (rows[0], rows[-1])
    ]
    launches = [row["launches"] for row in rows]
    parts = Counter(other["part"] for other in map(largest_other, rows) if other)
    sentence = (
        f"In {rows[0]['case']['phase']} matrix products take {ends[0]} to {ends[1]} of the "
        f"kernels' time in {len(rows)} models, which launch {min(launches):,.0f} to "
        f"{max(launches):,.0f} kernels a step"
    )
    for part, count in parts.most_common(1):
        sentence += f"; the largest kernel that is no product is of {part} in {count}"
    return f"{sentence}."


def describe_model(row: Row) -> list[str]:
    """Sentences on a model's profile: launches, GEMMs, dominant kernels, and attention."""
    case, total, top = row["case"], row["kernels"], row["top"]
    sentences = [
        f"{case['phase'].capitalize()} of {case['size']} at length {case['length']} in "
        f"{case['policy']} launches {row['launches']:,.0f} kernels a step, of "
        f"{row['distinct']:,} different ones; matrix products are "
        f"{share_of_products(row):.0%} of their time. The largest is "
        f"{top[0]['name']} ({top[0]['part']}) with {top[0]['seconds'] / total:.0%}"
    ]
    other = largest_other(row)
    if other and other is not top[0]:
        sentences[0] += (
            f", the largest that is no product {other['name']} ({other['part']}) with "
            f"{other['seconds'] / total:.0%}"
        )
    sentences[0] += "."
    products, rest = (row["attention"].get(kind, 0) for kind in (PRODUCT, REST))
    if products and rest:
        sentences.append(
            f"In attention softmax, masks and copies take {rest / products:.2f} times as long "
            "as its products."
        )
    return sentences
