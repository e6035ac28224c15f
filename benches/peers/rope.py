"""Rotary position embedding on one device: ours and XLA's program, in copies of its bytes.

    python benches/peers/rope.py --json FILE [--shapes BxSxHxD ...] [--qk BxSxHxKxD ...]

A cell is a shape, a layout of pairs and a pass; x is bfloat16, normal. What is timed, and how, is
as turns.py says. A copy reads and writes x once, all that must move but for the tables.

Shapes of `--qk` are those of `qk_norm_rope`, of H heads of q and K of k: there "ours" is one
kernel, and "composed" `rms_norm` and `rope` one after the other. There a gradient, of the weights
too, comes after its forward pass, which gives the rstd that it needs: five times the bytes of q
and k for both.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from turns import CALLS, rounds_of, save

from pallas_bridge import qk_norm_rope, rms_norm, rope

SHAPES = ("4x4096x32x128", "2x8192x14x64")
QK = ("4x4096x32x8x128", "2x8192x14x2x64")


def measured(shape: tuple[int, ...], interleaved: bool, which: str, seconds: float) -> Any:
    """Returns milliseconds and copies of each program of a cell."""
    keys = jax.random.split(jax.random.key(0), 2 * CALLS)
    x, dy = (
        [jax.random.normal(key, shape, jnp.bfloat16) for key in part]
        for part in (keys[:CALLS], keys[CALLS:])
    )

    def program(implementation: str) -> Callable[[], Any]:
        rotate = partial(rope, interleaved=interleaved, implementation=implementation)

        def run(x: Any, dy: Any) -> Any:
            if which == "forward":
                return [rotate(one) for one in x]
            return [jax.vjp(rotate, *pair[:1])[1](pair[1])[0] for pair in zip(x, dy, strict=True)]

        compiled = jax.jit(run).lower(x, dy).compile()
        return lambda: compiled(x, dy)

    negate = jax.jit(lambda x: [-one for one in x]).lower(x).compile()
    runs = {
        "copy": lambda: negate(x),
        "xla": program("reference"),
        "ours": program("custom_call"),
    }
    found = rounds_of(runs, seconds)
    return {name: {"ms": 1e3 * time, "copies": ratio} for name, (time, ratio) in found.items()}


def composed(q: Any, k: Any, q_weight: Any, k_weight: Any, *, interleaved: bool) -> Any:
    """Returns the two functions one after the other, as `info()` says of each."""
    return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), interleaved=interleaved)


def measured_heads(
    shape: tuple[int, ...], interleaved: bool, which: str, seconds: float
) -> dict[str, Any]:
    """Returns the same of heads that are normalised and rotated."""
    *leading, q_heads, k_heads, columns = shape
    keys = iter(jax.random.split(jax.random.key(0), 4 * CALLS))

    def pairs() -> list[list[jax.Array]]:
        return [
            [
                jax.random.normal(next(keys), (*leading, heads, columns), jnp.bfloat16)
                for heads in (q_heads, k_heads)
            ]
            for _ in range(CALLS)
        ]

    x, dy = pairs(), pairs()
    weights = [jnp.ones(columns)] * 2
    functions: dict[str, Callable[..., Any]] = {
        "xla": partial(qk_norm_rope, implementation="reference"),
        "composed": composed,
        "ours": partial(qk_norm_rope, implementation="custom_call"),
    }

    def program(function: Callable[..., Any]) -> Callable[[], Any]:
        one = partial(function, interleaved=interleaved)

        def run(x: Any, dy: Any) -> Any:
            if which == "forward":
                return [one(*pair, *weights) for pair in x]
            passes = [jax.vjp(one, *pair, *weights) for pair in x]
            return [(y, pull(tuple(of))) for (y, pull), of in zip(passes, dy, strict=True)]

        compiled = jax.jit(run).lower(x, dy).compile()
        return lambda: compiled(x, dy)

    moved = sum(one.nbytes for one in x[0]) * (2 if which == "forward" else 5)
    sources = [jnp.full(moved // 4, i, jnp.bfloat16) for i in range(CALLS)]
    negate = jax.jit(lambda sources: [-one for one in sources]).lower(sources).compile()
    runs = {"copy": lambda: negate(sources)}
    runs |= {name: program(function) for name, function in functions.items()}
    found = rounds_of(runs, seconds)
    return {name: {"ms": 1e3 * time, "copies": ratio} for name, (time, ratio) in found.items()}


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--qk", nargs="*", default=QK)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each cell")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| shape | pairs | pass | copy ms | XLA | composed | ours |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    )
    cells = [(shape, measured) for shape in options.shapes]
    cells += [(shape, measured_heads) for shape in options.qk]
    for shape, measure in cells:
        for interleaved in (False, True):
            for which in ("forward", "backward"):
                pairs = "interleaved" if interleaved else "halves"
                row: dict[str, Any] = {"shape": shape, "pairs": pairs, "pass": which}
                extents = tuple(int(one) for one in shape.split("x"))
                row.update(measure(extents, interleaved, which, options.seconds))
                rows.append(row)
                names = ("xla", "composed", "ours")
                ratios = [f"{row[name]['copies']:.3f}" if name in row else "" for name in names]
                cells_of = [shape, pairs, which, f"{row['copy']['ms']:.4f}", *ratios]
                print(f"| {' | '.join(cells_of)} |", flush=True)
                save(options.json, rows)


if __name__ == "__main__":
    main()
