"""Rotary position embedding on one device: ours and XLA's program, in copies of its bytes.

    python benches/peers/rope.py --json FILE [--shapes BxSxHxD ...]

A cell is a shape, a layout of pairs and a pass; x is bfloat16, normal. What is timed, and how, is
as turns.py says. A copy reads and writes x once, all that must move but for the tables.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from turns import CALLS, about, rounds_of

from pallas_bridge import rope

SHAPES = ("4x4096x32x128", "2x8192x14x64")


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


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each cell")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| shape | pairs | pass | copy ms | XLA | ours |\n| --- | --- | --- | ---: | ---: | ---: |"
    )
    for shape in options.shapes:
        for interleaved in (False, True):
            for which in ("forward", "backward"):
                pairs = "interleaved" if interleaved else "halves"
                row: dict[str, Any] = {"shape": shape, "pairs": pairs, "pass": which}
                extents = tuple(int(one) for one in shape.split("x"))
                row.update(measured(extents, interleaved, which, options.seconds))
                rows.append(row)
                print(
                    f"| {shape} | {pairs} | {which} | {row['copy']['ms']:.4f} "
                    f"| {row['xla']['copies']:.3f} | {row['ours']['copies']:.3f} |",
                    flush=True,
                )
                if options.json:
                    found = {"about": about(), "results": rows}
                    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
