"""What options of a loss over logits cost on one device: value and gradient of the mean.

    python benches/peers/loss_options.py --json FILE [--shapes TxV ...] [--distribution NAME ...]

A cell is a shape and a distribution of logits. Its programs are the plain loss in bfloat16; a
constant and a traced factor times it; softcap; the loss of the same logits in float16; and, where
it fits, XLA's program. They are timed as turns.py says. A copy negates the logits, which is one
reading and one writing, as much as the loss must move.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from distributions import Distribution
from loss_inputs import logits_of_calls
from turns import rounds_of, save

from pallas_bridge import cross_entropy

SHAPES = (
    *("2048x151643", "4096x128256", "8192x32000", "8192x50257", "4096x262144", "32768x151936"),
    *("65536x2048", "131072x257", "1x151936", "8x151936", "64x151936"),
)
DISTRIBUTIONS = ("normal", "normal, std 45", "trained")
SOFTCAP, FACTOR = 30.0, 0.5
# The most bytes of logits that XLA's program, which holds them in float32 a few times, is run for.
DENSE = 2**31

Loss = Callable[..., jax.Array]


def xla(x: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean by a plain program."""
    return cross_entropy(x, labels, implementation="reference")


def measured(shape: tuple[int, int], of: str, seconds: float) -> dict[str, Any]:
    """Returns milliseconds and copies of each program of a cell."""
    rows, vocab = shape
    dtypes = (jnp.bfloat16, jnp.float16)
    given, labels = logits_of_calls(shape, Distribution.parse(of), dtypes)
    calls = len(labels)

    def program(loss: Loss, dtype: Any = jnp.bfloat16, *more: jax.Array) -> Callable[[], Any]:
        def run(x: Any, *more: jax.Array) -> Any:
            step = jax.value_and_grad(loss)
            return [step(one, of, *more) for one, of in zip(x, labels, strict=True)]

        compiled = jax.jit(run).lower(given[dtype], *more).compile()
        return lambda: compiled(given[dtype], *more)

    source = given[jnp.bfloat16]
    negate = jax.jit(lambda x: [-one for one in x]).lower(source).compile()
    runs = {
        "copy": lambda: negate(source),
        "plain": program(cross_entropy),
        "factor": program(lambda x, y: FACTOR * cross_entropy(x, y)),
        "traced": program(
            lambda x, y, f: f * cross_entropy(x, y), jnp.bfloat16, jnp.float32(FACTOR)
        ),
        "softcap": program(lambda x, y: cross_entropy(x, y, softcap=SOFTCAP)),
        "f16": program(cross_entropy, jnp.float16),
    }
    if 2 * rows * vocab * calls <= DENSE:
        runs["xla"] = program(xla)
    found = rounds_of(runs, seconds, calls)
    return {name: {"ms": 1e3 * time, "copies": ratio} for name, (time, ratio) in found.items()}


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--distribution", nargs="+", default=DISTRIBUTIONS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each cell")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    names = ("plain", "factor", "traced", "softcap", "f16", "xla")
    print(f"| shape | logits | copy ms | {' | '.join(names)} |")
    print(f"| --- | --- |{' ---: |' * (1 + len(names))}")
    for shape in options.shapes:
        rows_and_columns = tuple(int(one) for one in shape.split("x"))
        for of in options.distribution:
            row: dict[str, Any] = {"shape": shape, "logits": of}
            try:
                row.update(measured(rows_and_columns, of, options.seconds))  # type: ignore[arg-type]
            except Exception as error:  # the others go on
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            rows.append(row)
            texts = [f"{row[name]['copies']:.3f}" if name in row else "" for name in names]
            copy = row.get("copy", {}).get("ms", float("nan"))
            print(
                f"| {shape} | {of} | {copy:.4f} | {' | '.join(texts)} |{row.get('error', '')}",
                flush=True,
            )
            save(options.json, rows)


if __name__ == "__main__":
    main()
