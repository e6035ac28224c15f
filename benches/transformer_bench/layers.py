"""`layers`: milliseconds of each part of a layer and the model, each a program of its own."""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

from . import tables
from .config import Spec, models, parameter_bytes
from .tables import Row

Cell = dict[str, Any]
WHOLE = "layer"
MODEL = "model"
# Primes, so that no two rows of a matrix are equal, and no two arrays start alike.
POOL, START = 1_000_003, 7919


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length, policy and phase; a row for each part, the layer, the model."""
    from .parts import OUTSIDE, names_of

    for cell in phases(spec):
        found = (*names_of(cell), WHOLE, *OUTSIDE, MODEL)
        yield cell, [{"part": part} for part in found]


def phases(spec: Spec) -> Iterator[Cell]:
    """A cell for each size, length, policy and phase."""
    for cell, phase in itertools.product(models(spec), spec.phases):
        yield {**cell, "phase": phase, "steps": spec.steps}


@functools.cache
def pool(seed: int) -> Any:
    """Normal numbers, `POOL` float32."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(POOL, np.float32)


class Inputs:
    """Random weights and inputs of a cell's phase, in the dtypes of its policy."""

    def __init__(self, cell: Cell) -> None:
        """Takes the cell; methods make the arrays."""
        self.cell = cell
        self.is_decoding = cell["phase"] == "decode"
        self.is_training = cell["phase"] == "training"
        self.length = 1 if self.is_decoding else cell["length"]
        self.starts = itertools.count(0, START)

    def random(self, shape: tuple[int, ...], of: Any = None, scale: float = 1.0) -> Any:
        """Normal numbers in a dtype, by default the policy's compute dtype.

        They are the same `POOL`, over and over from another place on, so that no program is
        compiled for them and large sizes have theirs soon.
        """
        import jax.numpy as jnp
        import numpy as np

        from .parts import dtype_of

        numbers = np.roll(pool(self.cell["seed"]), next(self.starts)) * np.float32(scale)
        numbers = numbers.astype(jnp.dtype(dtype_of(self.cell) if of is None else of))
        # A copy, so that JAX owns the memory and can donate it.
        return jnp.array(np.resize(numbers, shape))

    def weight(self, shape: tuple[int, ...]) -> Any:
        """A weight in the parameters' dtype."""
        is_narrow = self.cell["policy"] == "bfloat16"
        return self.random(shape, "bfloat16" if is_narrow else "float32", 0.02)

    def layer(self, leading: tuple[int, ...] = ()) -> dict[str, Any]:
        """A layer's weights, or a stack with these leading dimensions."""
        from .parts import weight_shapes

        shapes = weight_shapes(self.cell).items()
        return {name: self.weight((*leading, *shape)) for name, shape in shapes}

    def hidden(self) -> Any:
        """Hidden states [B, T, D]."""
        return self.random((self.cell["batch"], self.length, self.cell["width"]))

    def caches(self) -> tuple[Any, ...]:
        """A layer's keys and values [B, S, K, H] in decoding; else none."""
        if not self.is_decoding:
            return ()
        cell = self.cell
        shape = (cell["batch"], cell["length"], cell["kv_heads"], cell["head_width"])
        return self.random(shape), self.random(shape)

    def turns(self) -> tuple[Any, Any]:
        """RoPE's tables; in decoding those of the last position."""
        from .parts import tables_of

        cell = self.cell
        first = cell["length"] - self.length
        return tables_of(cell["batch"], first, self.length, cell["head_width"])

    def tokens(self) -> tuple[Any, Any]:
        """Tokens [B, T], and labels in training."""
        from .model import random_batch

        batch = random_batch({**self.cell, "length": self.length})
        return batch["tokens"], batch["labels"] if self.is_training else None

    def decoder(self) -> tuple[Any, ...]:
        """The arguments of `parts.decoder`, the caches last."""
        cell = self.cell
        table = (cell["vocab"], cell["width"])
        count = cell["layers"]
        of_layers: Any = (
            [self.layer() for _ in range(count)] if self.is_decoding else self.layer((count,))
        )
        params = {"embedding": self.weight(table), "layers": of_layers}
        params["norm"] = self.weight((cell["width"],))
        if not cell["tied"]:
            params["head"] = self.weight(table)
        caches = tuple(self.caches() for _ in range(count)) if self.is_decoding else ()
        return params, *self.tokens(), self.turns(), caches

    def make_arguments(self, part: str) -> tuple[tuple[Any, ...], int]:
        """A part's arguments, and how many of them, from the first on, have a gradient."""
        cell, batch, length = self.cell, self.cell["batch"], self.length
        q_shape = (batch, length, cell["heads"], cell["head_width"])
        k_shape = (batch, length, cell["kv_heads"], cell["head_width"])
        table = (cell["vocab"], cell["width"])
        if part == MODEL:
            return self.decoder(), 1
        if part == WHOLE:
            return (self.hidden(), self.layer(), self.turns(), self.caches()), 2
        weights = self.layer() if part not in ("embedding", "head") else {}
        if part.startswith("norm ") or part == "final norm":
            return (self.hidden(), weights["norm1"]), 2
        if part.startswith("residual "):
            return (self.hidden(), self.hidden()), 2
        if part.endswith("rope"):
            of_heads = [weights[name] for name in ("q_norm", "k_norm") if name in weights]
            found = (self.random(q_shape), self.random(k_shape), *of_heads)
            return (*found, *self.turns()), len(found)
        if part == "attention":
            found = (self.random(q_shape), self.random(k_shape), self.random(k_shape))
            return (*found, *self.caches()), 3
        if part == "embedding":
            return (self.weight(table), self.tokens()[0]), 1
        if part == "head":
            return (self.hidden(), self.weight(table), self.tokens()[1]), 2
        if part == "activation":
            return (self.random((batch, length, 2 * cell["ffn"])),), 1
        mixed = (batch, length, cell["heads"] * cell["head_width"])
        return {
            "QKV": lambda: (self.hidden(), weights["qkv"]),
            "output": lambda: (self.random(mixed), weights["out"]),
            "gate and up": lambda: (self.hidden(), weights["up"]),
            "down": lambda: (self.random((batch, length, cell["ffn"])), weights["down"]),
        }[part](), 2


def call_of(cell: Cell, part: str, limit: int | None) -> tuple[Callable[[], Any], Any]:
    """Returns what starts a part on random inputs, and the `Compiling` of its program.

    In training it runs forward and backward, with a random gradient of its results. Caches are
    given up to the program that writes to them, and the next call takes those that it returned.

    Raises:
        OutOfMemory: The part is the model, and its parameters do not fit.
    """
    import jax
    import jax.numpy as jnp

    from . import parts
    from .compiled import Compiling, OutOfMemory

    needed = parameter_bytes(cell, cell["policy"]) if part == MODEL else 0
    if limit is not None and needed > limit:
        raise OutOfMemory(needed)
    of = parts.functions(cell, jnp.float32)
    inputs = Inputs(cell)
    arguments, count = inputs.make_arguments(part)

    def forward(*arguments: Any) -> Any:
        if part == MODEL:
            return parts.decoder(of, *arguments)
        return parts.layer(of, *arguments) if part == WHOLE else of[part](*arguments)

    if inputs.is_training:
        shapes = jax.eval_shape(forward, *arguments)
        gradient = jax.tree.map(lambda leaf: inputs.random(leaf.shape, leaf.dtype), shapes)

        def both(gradient: Any, *arguments: Any) -> Any:
            fixed = arguments[count:]
            y, back = jax.vjp(lambda *of: forward(*of, *fixed), *arguments[:count])
            return y, back(gradient)

        run = Compiling(both, limit)
        return lambda: run.start(gradient, *arguments), run
    if not inputs.is_decoding or part not in ("attention", WHOLE, MODEL):
        run = Compiling(forward, limit)
        return lambda: run.start(*arguments), run
    # Attention takes its caches as two arguments, the others as one.
    first = 3 if part == "attention" else len(arguments) - 1
    run = Compiling(forward, limit, donate_argnums=tuple(range(first, len(arguments))))
    fixed, caches = arguments[:first], arguments[first:]

    def decode() -> Any:
        nonlocal caches
        first, *new = run.start(*fixed, *caches)
        caches = (tuple(new),) if part == WHOLE else tuple(new)
        return first, caches

    return decode, run


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Returns a function that measures a part."""
    from .compiled import device_limit

    limit = device_limit(cell["memory_limit"])

    def measure(variant: Cell) -> Row:
        call, _ = call_of(cell, variant["part"], limit)
        return {"median": statistics.median(harness.steady_seconds(call, cell["steps"]))}

    return measure


def groups(rows: Sequence[Row]) -> list[tuple[Cell, list[Row]]]:
    """Groups rows by layer: their common keys, and a row for each part."""
    found: dict[str, tuple[Cell, list[Row]]] = {}
    for row in rows:
        shared = {name: value for name, value in row["case"].items() if name != "part"}
        found.setdefault(repr(shared), (shared, []))[1].append(row)
    return list(found.values())


def around(name: str) -> bool:
    """Whether a part belongs to the model outside its layers."""
    from .parts import OUTSIDE

    return name in (*OUTSIDE, MODEL)


def total(of: Sequence[Row]) -> float | None:
    """The total seconds of rows; None if there are none, or one has no measurement."""
    found = [row.get("median") for row in of]
    known = [one for one in found if one is not None]
    return sum(known) if known and len(known) == len(found) else None


class Totals:
    """Sums over a layer and its model in seconds; None if a part has no measurement.

    `parts` are those of a layer together, `whole` is it as one program, `layers` all layers by
    that, `parts_of_model` those with what is around them, and `model` is it as one program.
    """

    def __init__(self, cell: Cell, of: Sequence[Row]) -> None:
        """Takes the rows of a layer."""
        by = {row["case"]["part"]: row for row in of}
        self.parts = total([row for name, row in by.items() if name != WHOLE and not around(name)])
        self.whole = by.get(WHOLE, {}).get("median")
        self.layers = None if self.whole is None else cell["layers"] * self.whole
        outside = total([row for name, row in by.items() if around(name) and name != MODEL])
        self.parts_of_model: float | None = None
        if self.layers is not None and outside is not None:
            self.parts_of_model = self.layers + outside
        self.model = by.get(MODEL, {}).get("median")


def tokens_a_second(cell: Cell, took: float) -> float:
    """Tokens a second, from the seconds of a batch."""
    tokens = cell["batch"] * (1 if cell["phase"] == "decode" else cell["length"])
    return float(tokens / took)


def title(cell: Cell) -> str:
    """The title of a layer's table."""
    loss = f", loss {cell['loss']}" if cell["phase"] == "training" else ""
    return (
        f"{cell['size']}, {cell['phase']}, batch {cell['batch']}, length {cell['length']}, "
        f"{cell['policy']}; norm {cell['norm']}, attention {cell['attention']}, mlp "
        f"{cell['mlp']}{loss}"
    )


def table(rows: Sequence[Row]) -> str:
    """Two tables for each layer: its parts, and the model with tokens a second."""
    found = []
    for cell, of in groups(rows):
        sums = Totals(cell, of)
        by = {row["case"]["part"]: row for row in of}

        def line(name: str, ended: str, took: float | None, total: float | None) -> list[str]:
            share = f"{took / total:.1%}" if took is not None and total else ""
            return [name, ended, "" if took is None else f"{1e3 * took:.4g}", share]

        def measured(part: str, name: str, total: float | None) -> list[str]:
            return line(name, tables.status(by[part]), by[part].get("median"), total)  # noqa: B023

        def summed(name: str, took: float | None, total: float | None) -> list[str]:
            return line(name, "" if took is None else "sum", took, total)

        own = [part for part in by if part != WHOLE and not around(part)]
        lines = [measured(part, part, sums.parts) for part in own]
        lines.append(summed("sum of the parts", sums.parts, sums.parts))
        if WHOLE in by:
            lines.append(measured(WHOLE, "the layer as one program", sums.parts))
        text = harness.table(["part of the layer", "status", "time (ms)", "of the sum"], lines)
        found.append(f"{title(cell)}:\n\n{text}")
        total = sums.parts_of_model
        count = f"all {cell['layers']} layers, by one as one program"
        rows_of_model = [(summed(count, sums.layers, total), sums.layers)]
        for part in by:
            if around(part) and part != MODEL:
                rows_of_model.append((measured(part, part, total), by[part].get("median")))
        if len(rows_of_model) > 1:
            rows_of_model.append(
                (summed("sum of layers, embedding, norm and head", total, total), total)
            )
        if MODEL in by:
            rows_of_model.append((measured(MODEL, "the model as one program", total), sums.model))
        lines = [
            [*one, tables.rate(None if took is None else tokens_a_second(cell, took))]
            for one, took in rows_of_model
        ]
        heads = ["part of the model", "status", "time (ms)", "of the sum", "tokens a second"]
        found.append(harness.table(heads, lines))
    return "\n\n".join(found)


def words(rows: Sequence[Row]) -> str:
    """Sentences on the largest parts, and on the gain of one program over its parts."""
    sentences = [tables.ends(rows)]
    for cell, of in groups(rows):
        sums = Totals(cell, of)
        if sums.parts is None:
            continue
        parts = [row for row in of if row["case"]["part"] != WHOLE]
        parts = [row for row in parts if not around(row["case"]["part"])]
        parts.sort(key=lambda row: row["median"], reverse=True)
        largest = ", ".join(
            f"{row['case']['part']} {row['median'] / sums.parts:.0%}" for row in parts[:3]
        )
        as_one = (
            ""
            if sums.whole is None
            else f"; as one program it takes {sums.whole / sums.parts:.2f} of that"
        )
        sentences.append(
            f"In {cell['phase']} of {cell['size']} at length {cell['length']} most of the parts' "
            f"sum is {largest}{as_one}."
        )
        if sums.model and sums.layers and sums.parts_of_model:
            outside = 1 - sums.layers / sums.parts_of_model
            sentences.append(
                f"The model as one program takes {sums.model / sums.parts_of_model:.2f} of its "
                f"layers, embedding, norm and head, of which those outside of layers are "
                f"{outside:.0%}: {tables.rate(tokens_a_second(cell, sums.model))} tokens a second."
            )
    return " ".join(filter(None, sentences))
