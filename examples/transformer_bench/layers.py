"""`layers`: milliseconds of each part of a layer, each as a program of its own."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import tables
from .config import Spec, cell_of
from .tables import Row

Cell = dict[str, Any]
# In the order of a layer. In a decoder's attention is the write to its cache, too.
PARTS = (
    "norm 1",
    "QKV",
    "rope",
    "attention",
    "output",
    "residual 1",
    "norm 2",
    "gate and up",
    "activation",
    "down",
    "residual 2",
)
WHOLE = "layer"


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length, policy and phase; a row for each part and the whole layer."""
    for size, length, policy, phase in itertools.product(
        spec.sizes, spec.lengths, spec.policies, spec.phases
    ):
        cell = {**cell_of(spec, size, length, policy), "phase": phase, "steps": spec.steps}
        yield cell, [{"part": part} for part in (*PARTS, WHOLE)]


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Makes weights and inputs, and returns what measures a part.

    In training a part runs forward and backward, with a random gradient of its results.
    """
    import jax
    import jax.numpy as jnp

    from . import model, parts
    from .runner import Compiling, device_limit

    limit = device_limit(cell["memory_limit"])
    phase, batch = cell["phase"], cell["batch"]
    length = 1 if phase == "decode" else cell["length"]
    dtype = jnp.float32 if cell["policy"] == "float32" else jnp.bfloat16
    kept = jnp.bfloat16 if cell["policy"] == "bfloat16" else jnp.float32
    keys = itertools.count(cell["seed"] * 1000)

    def random(shape: tuple[int, ...], of: Any = dtype) -> Any:
        return jax.random.normal(jax.random.key(next(keys)), shape, jnp.float32).astype(of)

    weights = {name: 0.02 * random(one, kept) for name, one in parts.weight_shapes(cell).items()}
    of_head = cell["head_width"]
    q = random((batch, length, cell["heads"], of_head))
    k, v = (random((batch, length, cell["kv_heads"], of_head)) for _ in range(2))
    caches: tuple[Any, ...] = ()
    if phase == "decode":
        shape = (batch, cell["length"], cell["kv_heads"], of_head)
        caches = tuple(random(shape) for _ in range(2))
    turns = parts.tables_of(batch, cell["length"] - length, length, of_head)
    x, other = (random((batch, length, cell["width"])) for _ in range(2))
    inner = random((batch, length, cell["ffn"]))
    packed = random((batch, length, 2 * cell["ffn"]))
    of = parts.functions(cell, jnp.float32)
    inputs: dict[str, tuple[Any, ...]] = {
        "norm 1": (x, weights["norm1"]),
        "QKV": (x, weights["qkv"]),
        "rope": (q, k, *turns),
        "attention": (q, k, v, *caches),
        "output": (q.reshape(batch, length, -1), weights["out"]),
        "residual 1": (x, other),
        "norm 2": (x, weights["norm2"]),
        "gate and up": (x, weights["up"]),
        "activation": (packed,),
        "down": (inner, weights["down"]),
        "residual 2": (x, other),
        WHOLE: (x, weights, turns, caches),
    }

    def measure(variant: Cell) -> Row:
        part = variant["part"]

        def forward(*arguments: Any) -> Any:
            if part == WHOLE:
                return parts.layer(of, *arguments)
            return of[part](*arguments)

        arguments = inputs[part]
        if phase == "training":
            shapes = jax.eval_shape(forward, *arguments)
            gradient = jax.tree.map(lambda leaf: random(leaf.shape, leaf.dtype), shapes)

            # RoPE's tables have no gradient in a model, nor has an absent cache.
            count = {"rope": 2, WHOLE: 2}.get(part, len(arguments))

            def both(gradient: Any, *arguments: Any) -> Any:
                fixed = arguments[count:]
                y, back = jax.vjp(lambda *of: forward(*of, *fixed), *arguments[:count])
                return y, back(gradient)

            run, arguments = Compiling(both, limit), (gradient, *arguments)
        else:
            run = Compiling(forward, limit)
        _, found = model.timed(lambda: run(*arguments), 2, cell["steps"])
        return {"median": statistics.median(found)}

    return measure


def groups(rows: Sequence[Row]) -> list[tuple[Cell, list[Row]]]:
    """Rows by layer: what they share, and a row for each part."""
    found: dict[str, tuple[Cell, list[Row]]] = {}
    for row in rows:
        shared = {name: value for name, value in row["case"].items() if name != "part"}
        found.setdefault(repr(shared), (shared, []))[1].append(row)
    return list(found.values())


def totals(of: Sequence[Row]) -> tuple[float | None, float | None]:
    """Seconds of all parts of a layer together, and of it as one program; None if not all."""
    parts = [row.get("median") for row in of if row["case"]["part"] != WHOLE]
    whole = [row.get("median") for row in of if row["case"]["part"] == WHOLE]
    known = [one for one in parts if one is not None]
    return (
        sum(known) if known and len(known) == len(parts) else None,
        whole[0] if whole else None,
    )


def tokens_a_second(cell: Cell, whole: float) -> float:
    """Of all layers, without embedding and head."""
    tokens = cell["batch"] * (1 if cell["phase"] == "decode" else cell["length"])
    return float(tokens / (cell["layers"] * whole))


def title(cell: Cell) -> str:
    """What a layer's table is of."""
    return (
        f"{cell['size']}, {cell['phase']}, batch {cell['batch']}, length {cell['length']}, "
        f"{cell['policy']}; norm {cell['norm']}, attention {cell['attention']}, mlp {cell['mlp']}"
    )


def table(rows: Sequence[Row]) -> str:
    """A table for each layer: parts, their sum, the layer as one program, all layers."""
    found = []
    for cell, of in groups(rows):
        total, whole = totals(of)
        lines = []

        def line(name: str, ended: str, took: float | None, total: float | None = total) -> None:
            share = f"{took / total:.1%}" if took is not None and total else ""
            lines.append([name, ended, "" if took is None else f"{1e3 * took:.4g}", share])  # noqa: B023

        for row in of:
            if row["case"]["part"] != WHOLE:
                line(row["case"]["part"], tables.status(row), row.get("median"))
        ended = "" if total is None else "ok"
        line("sum of the parts", ended, total)
        for row in of:
            if row["case"]["part"] == WHOLE:
                line("the layer as one program", tables.status(row), whole)
        if whole is not None:
            line(f"all {cell['layers']} layers", "ok", cell["layers"] * whole, None)
        text = tables.table(["part", "status", "time (ms)", "of the sum"], lines)
        speed = "" if whole is None else f"\n\n{tokens_a_second(cell, whole):.4g} tokens a second."
        found.append(f"{title(cell)}:\n\n{text}{speed}")
    return "\n\n".join(found)


def words(rows: Sequence[Row]) -> str:
    """What the numbers show: the largest parts, and what one program saves beside its parts."""
    told = [tables.ends(rows)]
    for cell, of in groups(rows):
        total, whole = totals(of)
        if total is None:
            continue
        parts = [row for row in of if row["case"]["part"] != WHOLE]
        parts.sort(key=lambda row: row["median"], reverse=True)
        largest = ", ".join(
            f"{row['case']['part']} {row['median'] / total:.0%}" for row in parts[:3]
        )
        beside = "" if whole is None else f"; as one program it takes {whole / total:.2f} of that"
        told.append(
            f"In {cell['phase']} of {cell['size']} at length {cell['length']} most of the parts' "
            f"sum is {largest}{beside}."
        )
    return " ".join(filter(None, told))
