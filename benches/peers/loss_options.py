"""Cost of a loss's options over logits on one device: value and gradient of the mean.

    python benches/peers/loss_options.py --json FILE [--shapes TxV ...] [--distribution NAME ...]

A cell is a shape and a distribution of logits. Its programs are the plain loss in bfloat16; a
constant and a traced factor times it; softcap; the loss of the same logits in float16; and, if it
fits, XLA's program. The copy reads and writes the logits once, the least that the loss must move.
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
from distributions import Distribution
from harness import Row
from loss_inputs import DISTRIBUTIONS, logits_of_calls

from pallas_bridge import cross_entropy

SHAPES = (
    *("2048x151643", "4096x128256", "8192x32000", "8192x50257", "4096x262144", "32768x151936"),
    *("65536x2048", "131072x257", "1x151936", "8x151936", "64x151936"),
)
PROGRAMS = ("plain", "factor", "traced", "softcap", "f16", "xla")
SOFTCAP, FACTOR = 30.0, 0.5
# The most bytes of logits for XLA's program, which holds them in float32 several times.
MOST_OF_XLA = 2**31


def measured(shape: str, distribution: str, seconds: float) -> Row:
    """Measures the programs of a cell."""
    rows, vocab = harness.extents(shape)
    dtypes = (jnp.bfloat16, jnp.float16)
    logits, labels = logits_of_calls((rows, vocab), Distribution.parse(distribution), dtypes)
    calls = len(labels)

    def start_of(loss: Callable[..., jax.Array], dtype: Any = jnp.bfloat16, *more: Any) -> Any:
        given = [(x, y, *more) for x, y in zip(logits[dtype], labels, strict=True)]
        return harness.compile_calls(jax.value_and_grad(loss), given)

    starts = {
        "copy": harness.device_copy(4 * rows * vocab, calls),
        "plain": start_of(cross_entropy),
        "factor": start_of(lambda x, y: FACTOR * cross_entropy(x, y)),
        "traced": start_of(
            lambda x, y, f: f * cross_entropy(x, y), jnp.bfloat16, jnp.float32(FACTOR)
        ),
        "softcap": start_of(partial(cross_entropy, softcap=SOFTCAP)),
        "f16": start_of(cross_entropy, jnp.float16),
    }
    if 2 * rows * vocab * calls <= MOST_OF_XLA:
        starts["xla"] = start_of(partial(cross_entropy, implementation="reference"))
    return harness.compared(starts, seconds, calls=calls)


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=1.0)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--distribution", nargs="+", default=DISTRIBUTIONS)
    options = parser.parse_args()

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape in options.shapes:
            for of in options.distribution:
                run = partial(measured, shape, of, options.seconds)
                yield {"shape": shape, "logits": of}, run

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, PROGRAMS)
        return [row["shape"], row["logits"], harness.milliseconds_of(row), *ratios]

    heads = ["shape", "logits", "copy ms", *(f"{name} / copy" for name in PROGRAMS)]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
