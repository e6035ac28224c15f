"""Causal convolution on one device: kernels, two programs of XLA and a device copy.

    python benches/peers/causal_conv1d.py --json FILE [--shapes BxTxC ...] [--widths W ...]

A cell is a shape, a width, a dtype and a pass, with a bias and SiLU. "convolution"
is `lax.conv_general_dilated` with a group for each channel, "shifted" the sum of shifted arrays of
`implementation="reference"`. The copy moves each array once: x and y, and for both passes x, dy and
dx too.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
from harness import CALLS, Row

from pallas_bridge import causal_conv1d

SHAPES = ("4x8192x2048", "4x8192x5120", "1x32768x4096", "8x2048x3072")
PROGRAMS = ("convolution", "shifted", "ours")


def convolution(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """XLA's convolution."""
    found = jax.lax.conv_general_dilated(
        x,
        weight.T[:, None],
        (1,),
        [(weight.shape[1] - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=weight.shape[0],
    )
    return jax.nn.silu(found + bias)


def measured(
    shape: tuple[int, ...], width: int, dtype: str, which: str, options: argparse.Namespace
) -> Row:
    """Measures a cell."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * CALLS + 2))
    calls = [
        tuple(jax.random.normal(next(keys), shape, dtype) for _ in range(2)) for _ in range(CALLS)
    ]
    weight = jax.random.normal(next(keys), (shape[-1], width), dtype)
    bias = jax.random.normal(next(keys), shape[-1:], dtype)
    ours = partial(causal_conv1d, activation="silu")
    functions: dict[str, Callable[..., Any]] = {
        "convolution": convolution,
        "shifted": partial(ours, implementation="reference"),
        "ours": partial(ours, implementation="custom_call"),
    }

    def start_of(function: Callable[..., Any]) -> harness.Start:
        def run(x: Any, dy: Any) -> Any:
            if which == "forward":
                return function(x, weight, bias)
            y, vjp = jax.vjp(function, x, weight, bias)
            return y, vjp(dy)

        return harness.compile_calls(run, calls)

    moved = calls[0][0].nbytes * (2 if which == "forward" else 5)
    starts = {name: start_of(functions[name]) for name in options.programs}
    return harness.compared({"copy": harness.device_copy(moved), **starts}, options.seconds)


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.3)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--widths", nargs="*", type=int, default=(4, 2))
    parser.add_argument("--dtypes", nargs="*", default=("bfloat16", "float32"))
    parser.add_argument("--programs", nargs="*", default=PROGRAMS)
    options = parser.parse_args()

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape in options.shapes:
            for width in options.widths:
                for dtype in options.dtypes:
                    for which in ("forward", "both"):
                        row = {"shape": shape, "width": width, "dtype": dtype, "pass": which}
                        extents = harness.extents(shape)
                        yield row, partial(measured, extents, width, dtype, which, options)

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, PROGRAMS)
        names = [row["shape"], str(row["width"]), row["dtype"], row["pass"]]
        return [*names, harness.milliseconds_of(row), *ratios]

    heads = ["shape", "width", "dtype", "pass", "copy ms"]
    heads += ["convolution / copy", "shifted / copy", "kernel / copy"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
