"""Rotary position embedding on one device: kernels, XLA's program and a device copy.

    python benches/peers/rope.py --json FILE [--shapes BxSxHxD ...] [--qk BxSxHxKxD ...]

A cell is a shape, a layout of pairs and a pass, in bfloat16 of normal numbers. The copy reads and
writes x once, which is all that must move but for the tables.

Shapes of `--qk` are those of `qk_norm_rope`, with H heads of q and K of k: there "ours" is one
kernel, and "composed" is `rms_norm` and then `rope`. Its backward pass follows a forward pass,
which saves rstd, and has gradients of the weights: the copy moves five times the bytes of q and k.
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
from harness import CALLS, Row

from pallas_bridge import qk_norm_rope, rms_norm, rope

SHAPES = ("4x4096x32x128", "2x8192x14x64")
QK = ("4x4096x32x8x128", "2x8192x14x2x64")


def draw_calls(*shapes: tuple[int, ...]) -> list[tuple[jax.Array, ...]]:
    """Normal arrays of these shapes for each call."""
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) * CALLS))
    return [
        tuple(jax.random.normal(next(keys), shape, jnp.bfloat16) for shape in shapes)
        for _ in range(CALLS)
    ]


def measured(shape: tuple[int, ...], is_interleaved: bool, which: str, seconds: float) -> Row:
    """Measures `rope` in a cell."""
    calls = draw_calls(shape, shape)

    def start_of(implementation: Any) -> harness.Start:
        rotate = partial(rope, interleaved=is_interleaved, implementation=implementation)

        def run(x: jax.Array, dy: jax.Array) -> Any:
            return rotate(x) if which == "forward" else jax.vjp(rotate, x)[1](dy)[0]

        return harness.compile_calls(run, calls)

    starts = {
        "copy": harness.device_copy(2 * calls[0][0].nbytes),
        "xla": start_of("reference"),
        "ours": start_of("custom_call"),
    }
    return harness.compared(starts, seconds)


def composed(q: Any, k: Any, q_weight: Any, k_weight: Any, *, interleaved: bool) -> Any:
    """Norms and rotation as two functions with their default implementations."""
    return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), interleaved=interleaved)


def measured_heads(shape: tuple[int, ...], is_interleaved: bool, which: str, seconds: float) -> Row:
    """Measures `qk_norm_rope` in a cell."""
    *leading, q_heads, k_heads, columns = shape
    shapes = [(*leading, heads, columns) for heads in (q_heads, k_heads)]
    calls = draw_calls(*shapes, *shapes)
    weights = [jnp.ones(columns)] * 2
    functions: dict[str, Callable[..., Any]] = {
        "xla": partial(qk_norm_rope, implementation="reference"),
        "composed": composed,
        "ours": partial(qk_norm_rope, implementation="custom_call"),
    }

    def start_of(function: Callable[..., Any]) -> harness.Start:
        one = partial(function, interleaved=is_interleaved)

        def run(q: Any, k: Any, dq: Any, dk: Any) -> Any:
            if which == "forward":
                return one(q, k, *weights)
            y, vjp = jax.vjp(one, q, k, *weights)
            return y, vjp((dq, dk))

        return harness.compile_calls(run, calls)

    moved = (calls[0][0].nbytes + calls[0][1].nbytes) * (2 if which == "forward" else 5)
    starts = {name: start_of(function) for name, function in functions.items()}
    return harness.compared({"copy": harness.device_copy(moved), **starts}, seconds)


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.3)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--qk", nargs="*", default=QK)
    options = parser.parse_args()
    functions = [(shape, measured) for shape in options.shapes]
    functions += [(shape, measured_heads) for shape in options.qk]

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape, measure in functions:
            for pairs in ("halves", "interleaved"):
                for which in ("forward", "backward"):
                    extents, is_interleaved = harness.extents(shape), pairs == "interleaved"
                    run = partial(measure, extents, is_interleaved, which, options.seconds)
                    yield {"shape": shape, "pairs": pairs, "pass": which}, run

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, ("xla", "composed", "ours"))
        return [row["shape"], row["pairs"], row["pass"], harness.milliseconds_of(row), *ratios]

    heads = ["shape", "pairs", "pass", "copy ms", "XLA / copy", "composed / copy", "kernel / copy"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
