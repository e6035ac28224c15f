"""What outputs beside a loss cost on one device: value and gradient of the mean.

    python benches/peers/loss_outputs.py --json FILE [--logits TxV ...] [--linear TxDxV ...]
        [--distribution NAME ...]

A cell is a shape and a distribution, of logits or of hidden states and an output matrix, in
bfloat16. Its programs are the plain loss, that with one output more (lse, entropy, correct, the
log-probabilities of K columns of each token), with all of them, with a temperature, and with an
entropy that is part of what is differentiated. They are timed as turns.py says, and the plain loss
is what all are held against: a ratio of 1.02 is 2 %.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distributions import Distribution
from loss_inputs import logits_of_calls
from turns import rounds_of, save

from pallas_bridge import cross_entropy, linear_cross_entropy

LOGITS = ("2048x151643", "4096x128256", "8192x32000", "65536x2048")
LINEAR = ("8192x2048x128256", "4096x896x151936", "8192x4096x32000")
DISTRIBUTIONS = ("normal", "normal, std 45", "trained")
TEMPERATURE, ENTROPY_FACTOR = 0.7, 0.01

Inputs = tuple[jax.Array, ...]


def of_logits(shape: tuple[int, int], of: Distribution) -> list[tuple[Inputs, jax.Array]]:
    """Logits [T, V] with labels [T], for the calls of a program."""
    given, labels = logits_of_calls(shape, of, (jnp.bfloat16,))
    return [((one,), of_call) for one, of_call in zip(given[jnp.bfloat16], labels, strict=True)]


def of_operands(shape: tuple[int, int, int], of: Distribution) -> list[tuple[Inputs, jax.Array]]:
    """Hidden states [T, D] and an output matrix [V, D] with labels [T]."""
    rows, width, vocab = shape
    rng = np.random.default_rng(0)
    targets, weight = of.targets(rng, rows, vocab), of.weights(rng, vocab, width)
    drawn = of.hidden(rng, targets, width, lambda columns: weight[columns]), weight
    hidden, weight = (jnp.asarray(one).astype(jnp.bfloat16) for one in drawn)
    return [((hidden, weight), jnp.asarray(targets.labels))]


def measured(
    loss: Callable[..., Any],
    given: list[tuple[Inputs, jax.Array]],
    vocab: int,
    count: int,
    seconds: float,
) -> dict[str, Any]:
    """Returns milliseconds of a cell's programs, and their ratio to those of the plain loss."""
    rng = np.random.default_rng(1)
    columns = [
        jnp.asarray(rng.integers(0, vocab, (len(labels), count), np.int32)) for _, labels in given
    ]

    def program(of: Callable[..., Any], has_columns: bool = False) -> Callable[[], Any]:
        def valued(inputs: Inputs, labels: jax.Array, columns: jax.Array) -> Any:
            found = of(*inputs, labels, **({"columns": columns} if has_columns else {}))
            # What is not the loss is given, and not differentiated.
            return (found[0], found[1:]) if isinstance(found, tuple) else (found, ())

        def run(given: Any, columns: Any) -> Any:
            step = jax.value_and_grad(valued, has_aux=True)
            return [step(*one, of) for one, of in zip(given, columns, strict=True)]

        compiled = jax.jit(run).lower(given, columns).compile()
        return lambda: compiled(given, columns)

    def with_entropy(*operands: jax.Array) -> jax.Array:
        value, entropy = loss(*operands, return_entropy=True)
        regularised: jax.Array = value - ENTROPY_FACTOR * entropy.mean()
        return regularised

    every = partial(loss, return_lse=True, return_entropy=True, return_correct=True)
    runs = {
        "plain": program(loss),
        "lse": program(partial(loss, return_lse=True)),
        "entropy": program(partial(loss, return_entropy=True)),
        "correct": program(partial(loss, return_correct=True)),
        "columns": program(loss, has_columns=True),
        "all": program(every, has_columns=True),
        "temperature": program(partial(loss, temperature=TEMPERATURE)),
        "entropy's gradient": program(with_entropy),
        # How far a ratio may be trusted.
        "plain again": program(loss),
    }
    found = rounds_of(runs, seconds, len(given), against="plain")
    return {name: {"ms": 1e3 * time, "of_plain": ratio} for name, (time, ratio) in found.items()}


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logits", nargs="*", default=LOGITS, metavar="TxV")
    parser.add_argument("--linear", nargs="*", default=LINEAR, metavar="TxDxV")
    parser.add_argument("--distribution", nargs="+", default=DISTRIBUTIONS)
    parser.add_argument("--columns", type=int, default=64, help="log-probabilities a token")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each cell")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    losses: list[tuple[Any, Any, list[str]]] = [
        (cross_entropy, of_logits, options.logits),
        (linear_cross_entropy, of_operands, options.linear),
    ]
    for loss, inputs, shapes in losses:
        for shape in shapes:
            extents = tuple(int(one) for one in shape.split("x"))
            for of in options.distribution:
                row: dict[str, Any] = {
                    "operation": loss.__name__,
                    "shape": shape,
                    "distribution": of,
                    "columns_of_token": options.columns,
                }
                try:
                    given = inputs(extents, Distribution.parse(of))
                    row |= measured(loss, given, extents[-1], options.columns, options.seconds)
                except Exception as error:  # the others go on
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                rows.append(row)
                told = [
                    f"{name} {one['of_plain']:.3f}"
                    for name, one in row.items()
                    if isinstance(one, dict)
                ]
                ms = row.get("plain", {}).get("ms", float("nan"))
                print(
                    f"{loss.__name__} {shape} {of}: {ms:.4f} ms;",
                    *told,
                    row.get("error", ""),
                    flush=True,
                )
                save(options.json, rows)


if __name__ == "__main__":
    main()
