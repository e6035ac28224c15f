"""`precision`: float32, bfloat16 and mixed against a float64 run: times, dtypes, errors."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import harness

from . import tables
from .config import Spec, cell_of
from .tables import Row

Cell = dict[str, Any]
# (dtype of the sum, dtype of the addends).
SUMS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "bfloat16"),
)
ADDEND, COUNT = 0.01, 1000
# A first step (already compiled) that takes more seconds counts as a timed one.
LONG = 1.0
# Intermediate values of a pass, in order.
MIDDLE = ("output of the layers", "output of the norm", "logits")
# Parameters outside the layers.
AROUND = ("embedding", "norm", "head")
# The dtypes of parameters, of GEMMs, and of norms, softmax and the loss.
DTYPES = {
    "float64": ("float64", "float64", "float64"),
    "float32": ("float32", "float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "mixed": ("float32", "bfloat16", "float32"),
}


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size and length, a row for each policy; and one cell for the sums."""
    for size, length in itertools.product(spec.sizes, spec.lengths):
        cell = cell_of(spec, size, length, "float64")
        del cell["policy"]
        # Kernels are XLA's: ours have no float64, and no softmax in 16 bits.
        kernels = {"norm": "xla", "attention": "wide", "mlp": "xla", "loss": "xla"}
        rows = [{"policy": policy, "steps": spec.steps} for policy in spec.policies]
        yield {**cell, **kernels}, [{**row, "what": "pass"} for row in rows]
    yield {}, [{"what": "sum", "sum_in": total, "of": one} for total, one in SUMS]


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Returns a function that measures a policy against a float64 run, or a sum."""
    import jax

    # Before the first array.
    jax.config.update("jax_enable_x64", True)
    if not cell:
        return lambda variant: {
            "sum": add(variant["sum_in"], variant["of"]),
            "right": ADDEND * COUNT,
        }
    exact, batch = make(cell)
    run = passes(cell, "float64")
    right = run(exact, batch)
    return lambda variant: measure_policy(cell, variant, exact, batch, right)


def add(total: str, of: str) -> float:
    """The sum of `COUNT` times `ADDEND`, one after another, each rounded to `of` first."""
    import jax
    import jax.numpy as jnp

    one = jnp.asarray(ADDEND, of)

    @jax.jit
    def loop(one: Any) -> Any:
        def body(_: Any, so_far: Any) -> Any:
            # Keeps XLA from optimizing away the rounding of each step.
            return jax.lax.optimization_barrier(so_far + one.astype(total))

        return jax.lax.fori_loop(0, COUNT, body, jnp.zeros((), total))

    return float(loop(one))


def make(cell: Cell) -> tuple[Any, Any]:
    """Float64 parameters that float32 represents exactly, and a batch [B, T].

    Weights of layers are stacked along a first axis.
    """
    import jax.numpy as jnp
    import numpy as np

    from .parts import weight_shapes

    rng = np.random.default_rng(cell["seed"])

    def normal(shape: tuple[int, ...]) -> Any:
        narrow = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        return jnp.asarray(narrow).astype(jnp.float64)

    def stack(of: tuple[int, ...]) -> Any:
        numbers = normal((cell["layers"], *of))
        return 1 + numbers if len(of) == 1 else numbers

    params = {
        "embedding": normal((cell["vocab"], cell["width"])),
        "layers": {name: stack(of) for name, of in weight_shapes(cell).items()},
        "norm": 1 + normal((cell["width"],)),
        "head": normal((cell["vocab"], cell["width"])),
    }
    shape = (cell["batch"], cell["length"])
    tokens, labels = (rng.integers(0, cell["vocab"], shape) for _ in range(2))
    return params, (jnp.asarray(tokens), jnp.asarray(labels))


def forward(cell: Cell, policy: str, params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The mean loss by a policy, and intermediate values by name."""
    import jax
    import jax.numpy as jnp

    from . import parts

    _, narrow, wide = DTYPES[policy]
    of = parts.functions(cell, wide)
    tokens, labels = batch
    turns = parts.tables_of(
        tokens.shape[0],
        0,
        tokens.shape[1],
        cell["head_width"],
        "float64" if policy == "float64" else "float32",
    )
    x = params["embedding"][tokens].astype(narrow)
    x, _ = jax.lax.scan(
        lambda x, weights: (parts.layer(of, x, weights, turns), None), x, params["layers"]
    )
    y = of["norm 1"](x, params["norm"])
    logits = y @ params["head"].T.astype(narrow)
    chosen = jax.nn.log_softmax(logits.astype(wide), axis=-1)
    loss = -jnp.mean(jnp.take_along_axis(chosen, labels[..., None], axis=-1))
    return loss, dict(zip(MIDDLE, (x, y, logits), strict=True))


def passes(cell: Cell, policy: str) -> Any:
    """Forward and backward by a policy: ((loss, intermediate values), gradients)."""
    import jax

    from .compiled import Compiling, device_limit

    def both(params: Any, batch: Any) -> Any:
        loss = jax.value_and_grad(lambda p: forward(cell, policy, p, batch), has_aux=True)
        return loss(params)

    return Compiling(both, device_limit(cell["memory_limit"]))


def measure_policy(cell: Cell, variant: Cell, exact: Any, batch: Any, reference: Any) -> Row:
    """Measures a policy: time, dtypes, and errors of loss and gradients by layer."""
    import jax

    from .compiled import Compiling

    policy, steps = variant["policy"], variant["steps"]
    (right, _), gradients = reference
    params = jax.tree.map(lambda leaf: leaf.astype(DTYPES[policy][0]), exact)
    run = passes(cell, policy)
    run.compile(params, batch)
    start = partial(run.start, params, batch)
    first, ((loss, middle), found) = harness.timed_call(start)
    took = [first] if first > LONG else []
    took += harness.seconds_of_each(start, steps - len(took))
    of_forward = Compiling(lambda p, b: forward(cell, policy, p, b)[0], run.limit)
    _, *alone = harness.seconds_of_each(partial(of_forward.start, params, batch), 1 + steps)

    def dtypes(tree: Any) -> str:
        return ", ".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(tree)}))

    errors = jax.jit(errors_of)(found, gradients)
    by_layer = {f"layer {i}": float(error) for i, error in enumerate(errors["layers"])}
    of_layers = dict.fromkeys(by_layer, dtypes(found["layers"]))
    return {
        "forward": statistics.median(alone),
        "forward_backward": statistics.median(took),
        "dtypes": {
            "parameters": dtypes(params),
            **{name: dtypes(middle[name]) for name in MIDDLE},
            "loss": dtypes(loss),
            "gradients": dtypes(found),
        },
        "loss": float(loss),
        "loss_error": abs(float(loss) - float(right)),
        "gradient_error": float(errors["all"]),
        "gradient_errors": {**by_layer, **{name: float(errors[name]) for name in AROUND}},
        "gradient_dtypes": {**of_layers, **{name: dtypes(found[name]) for name in AROUND}},
    }


def errors_of(mine: Any, theirs: Any) -> dict[str, Any]:
    """Errors of gradients relative to their norm: [layers], `AROUND`, and of `all`."""
    import jax
    import jax.numpy as jnp

    def squares(numbers: Any, is_stacked: bool) -> Any:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) ** 2, numbers)
        axes = [tuple(range(int(is_stacked), leaf.ndim)) for leaf in jax.tree.leaves(wide)]
        return sum(
            jnp.sum(leaf, axis) for leaf, axis in zip(jax.tree.leaves(wide), axes, strict=True)
        )

    off = jax.tree.map(lambda a, b: a.astype(jnp.float64) - b, mine, theirs)
    found = {}
    total_off: Any = 0.0
    total: Any = 0.0
    for name in ("layers", *AROUND):
        parts = [squares(of[name], name == "layers") for of in (off, theirs)]
        found[name] = jnp.sqrt(parts[0] / parts[1])
        total_off, total = total_off + jnp.sum(parts[0]), total + jnp.sum(parts[1])
    return {**found, "all": jnp.sqrt(total_off / total)}


def name_of(row: Row) -> str:
    """The head of a row's column."""
    case = row["case"]
    return f"{case['size']}, {case['length']}, {case['policy']}"


def table(rows: Sequence[Row]) -> str:
    """Tables of times and errors, of dtypes, of gradients by layer, and of sums."""
    passes = [row for row in rows if row["case"]["what"] == "pass"]
    found, parts = tables.finished(passes), []
    heads = ["size", "length", "policy", "status", "forward (s)", "forward and backward (s)"]
    heads += ["loss", "error of the loss", "error of the gradients"]
    lines = []
    for row in passes:
        line = [str(row["case"][name]) for name in ("size", "length", "policy")]
        line.append(tables.status(row))
        line += [tables.seconds(row.get(name)) for name in ("forward", "forward_backward")]
        line.append("" if "loss" not in row else f"{row['loss']:.6f}")
        errors = [row.get(name) for name in ("loss_error", "gradient_error")]
        lines.append([*line, *("" if one is None else f"{one:.2e}" for one in errors)])
    if passes:
        parts.append(harness.table(heads, lines))
    if found:
        columns = [name_of(row) for row in found]
        kinds = [[key, *(row["dtypes"][key] for row in found)] for key in found[0]["dtypes"]]
        parts.append(harness.table(["dtype of", *columns], kinds))
        places = max((row["gradient_errors"] for row in found), key=len)
        by_layer = []
        for place in places:
            line = [place]
            for row in found:
                is_there = place in row["gradient_errors"]
                error = row["gradient_errors"].get(place, 0.0)
                line.append(f"{error:.2e} ({row['gradient_dtypes'][place]})" if is_there else "")
            by_layer.append(line)
        parts.append(harness.table(["gradients of", *columns], by_layer))
    sums = [row for row in rows if row["case"]["what"] == "sum"]
    if sums:
        lines = [
            [
                row["case"]["sum_in"],
                row["case"]["of"],
                tables.status(row),
                f"{row['sum']:.6f}" if "sum" in row else "",
            ]
            for row in sums
        ]
        heads = ["sum in", f"{COUNT} times {ADDEND} in", "status", f"sum ({ADDEND * COUNT:g})"]
        parts.append(harness.table(heads, lines))
    return "\n\n".join(parts)


def words(rows: Sequence[Row]) -> str:
    """Sentences on errors by policy, and on sums in 16 bits."""
    sentences = [tables.ends(rows)]
    for row in tables.finished(rows):
        if row["case"]["what"] == "pass":
            sentences.append(
                f"{row['case']['policy']} is off by {row['loss_error']:.1e} in the loss of "
                f"{row['case']['size']}, and by {row['gradient_error']:.1e} of their norm in the "
                "gradients."
            )
    sums = {
        (row["case"]["sum_in"], row["case"]["of"]): row["sum"]
        for row in tables.finished(rows)
        if row["case"]["what"] == "sum"
    }
    for narrow in ("float16", "bfloat16"):
        both = sums.get((narrow, narrow)), sums.get(("float32", narrow))
        if both[0] is not None and both[1] is not None:
            sentences.append(
                f"{COUNT} times {ADDEND} in {narrow} add up to {both[0]:.4f} in {narrow} and to "
                f"{both[1]:.4f} in float32, of {ADDEND * COUNT:g}."
            )
    return " ".join(filter(None, sentences))
