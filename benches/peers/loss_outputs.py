"""Cost of a loss's auxiliary outputs on one device: value and gradient of the mean.

    python benches/peers/loss_outputs.py --json FILE [--logits TxV ...] [--linear TxDxV ...]
        [--distribution NAME ...]

A cell is a shape and a distribution, of logits or of hidden states and an output matrix, in
bfloat16. Its programs are the plain loss; the loss with one more output (lse, entropy, correct, the
log-probabilities of K columns of each token); with all of them; with a temperature; and with an
entropy in the differentiated value. Ratios are to the plain loss: 1.02 is 2 % more.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import numpy as np
from distributions import Distribution
from harness import Row
from loss_inputs import DISTRIBUTIONS, logits_of_calls

from pallas_bridge import cross_entropy, linear_cross_entropy

LOGITS = ("2048x151643", "4096x128256", "8192x32000", "65536x2048")
LINEAR = ("8192x2048x128256", "4096x896x151936", "8192x4096x32000")
PROGRAMS = (
    *("plain", "lse", "entropy", "correct", "columns", "all", "temperature"),
    *("entropy's gradient", "plain again"),
)
TEMPERATURE, ENTROPY_FACTOR = 0.7, 0.01
# For each call of a program the loss's arrays, and labels [T].
Inputs = list[tuple[tuple[jax.Array, ...], jax.Array]]


def make_logits(shape: tuple[int, ...], distribution: Distribution) -> Inputs:
    """Logits [T, V] with labels [T]."""
    logits, labels = logits_of_calls(shape, distribution, (jnp.bfloat16,))
    return [((x,), y) for x, y in zip(logits[jnp.bfloat16], labels, strict=True)]


def make_operands(shape: tuple[int, ...], distribution: Distribution) -> Inputs:
    """Hidden states [T, D] and an output matrix [V, D] with labels [T]."""
    rows, width, vocab = shape
    rng = np.random.default_rng(0)
    targets, w = distribution.targets(rng, rows, vocab), distribution.weights(rng, vocab, width)
    h = distribution.hidden(rng, targets, width, lambda columns: w[columns])
    hidden, weight = (jnp.asarray(one).astype(jnp.bfloat16) for one in (h, w))
    return [((hidden, weight), jnp.asarray(targets.labels))]


def measured(
    loss: Callable[..., Any],
    inputs_of: Callable[[tuple[int, ...], Distribution], Inputs],
    shape: str,
    distribution: str,
    count: int,
    seconds: float,
) -> Row:
    """Measures the programs of a cell, with `count` columns of each token."""
    extents = harness.extents(shape)
    rng = np.random.default_rng(1)
    calls = [
        (arrays, y, jnp.asarray(rng.integers(0, extents[-1], (len(y), count), np.int32)))
        for arrays, y in inputs_of(extents, Distribution.parse(distribution))
    ]

    def start_of(of: Callable[..., Any], has_columns: bool = False) -> harness.Start:
        def value(arrays: Any, labels: jax.Array, columns: jax.Array) -> Any:
            found = of(*arrays, labels, **({"columns": columns} if has_columns else {}))
            # Auxiliary outputs are returned, and not differentiated.
            return (found[0], found[1:]) if isinstance(found, tuple) else (found, ())

        return harness.compile_calls(jax.value_and_grad(value, has_aux=True), calls)

    def with_entropy(*operands: jax.Array) -> Any:
        value, entropy = loss(*operands, return_entropy=True)
        return value - ENTROPY_FACTOR * entropy.mean()

    every = partial(loss, return_lse=True, return_entropy=True, return_correct=True)
    starts = {
        "plain": start_of(loss),
        "lse": start_of(partial(loss, return_lse=True)),
        "entropy": start_of(partial(loss, return_entropy=True)),
        "correct": start_of(partial(loss, return_correct=True)),
        "columns": start_of(loss, has_columns=True),
        "all": start_of(every, has_columns=True),
        "temperature": start_of(partial(loss, temperature=TEMPERATURE)),
        "entropy's gradient": start_of(with_entropy),
        # Its ratio says how far the others can be trusted.
        "plain again": start_of(loss),
    }
    return harness.compared(starts, seconds, calls=len(calls), baseline="plain", ratio="of_plain")


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=1.0)
    parser.add_argument("--logits", nargs="*", default=LOGITS, metavar="TxV")
    parser.add_argument("--linear", nargs="*", default=LINEAR, metavar="TxDxV")
    parser.add_argument("--distribution", nargs="+", default=DISTRIBUTIONS)
    parser.add_argument("--columns", type=int, default=64, help="log-probabilities a token")
    options = parser.parse_args()
    losses: list[tuple[Any, Callable[..., Inputs], list[str]]] = [
        (cross_entropy, make_logits, options.logits),
        (linear_cross_entropy, make_operands, options.linear),
    ]

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for loss, inputs, shapes in losses:
            for shape in shapes:
                for of in options.distribution:
                    cell = {"operation": loss.__name__, "shape": shape, "distribution": of}
                    run = partial(measured, loss, inputs, shape, of)
                    yield (
                        {**cell, "columns_of_token": options.columns},
                        partial(run, options.columns, options.seconds),
                    )

    def texts(row: Row) -> list[str]:
        cell = [row[name] for name in ("operation", "shape", "distribution")]
        ratios = harness.ratios_of(row, PROGRAMS[1:], "of_plain")
        return [*cell, harness.milliseconds_of(row, "plain"), *ratios]

    heads = ["operation", "shape", "distribution", "plain ms"]
    heads += [f"{name} / plain" for name in PROGRAMS[1:]]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
