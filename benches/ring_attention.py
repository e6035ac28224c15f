"""Causal attention of one long sequence: on one device, and in a ring over all.

    python benches/ring_attention.py [--json FILE] [--shapes SxHxHkvxD ...] [--seconds S]

A cell is a length and a pass, "forward" or "both" (forward and backward in one program), in
bfloat16 of normal inputs. Columns are efficiencies: the time of one device over that of all times
their number, 1 where work is spread evenly and sending is hidden. `ordered` has tokens in the order
of their positions, `zigzag` in that of `zigzag_indices`; `gathered` is `flash_attention` of sharded
tokens, which XLA gathers.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
from harness import Row
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_bridge import flash_attention, ring_attention

SHAPES = {"cpu": ("1024x4x2x64",), "gpu": ("32768x32x8x128", "131072x32x8x128")}
AXIS = "sequence"
# In a row before one wait.
CALLS = 2


def attention(name: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns o by the program of that name."""
    if name in ("ordered", "zigzag"):
        return ring_attention(q, k, v, axis_name=AXIS, causal=True, zigzag=name == "zigzag")
    return flash_attention(q, k, v, causal=True, implementation="custom_call")


def compiled(name: str, part: str, shape: tuple[int, ...]) -> harness.Start:
    """Returns what starts a program on its arrays."""
    devices = jax.devices()[: 1 if name == "one" else None]
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    sharding = NamedSharding(mesh, P(None, AXIS))
    length, heads, kv_heads, width = shape

    @partial(jax.jit, out_shardings=sharding)
    def draw() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        counts = (heads, kv_heads, kv_heads, heads)
        return [
            jax.random.normal(key, (1, length, count, width), jnp.bfloat16)
            for key, count in zip(keys, counts, strict=True)
        ]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, vjp = jax.vjp(partial(attention, name), q, k, v)
        return o, vjp(do)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> Any:
        return attention(name, q, k, v)

    arrays = draw()
    with jax.set_mesh(mesh):
        program = jax.jit(both if part == "both" else forward).lower(*arrays).compile()
    return partial(program, *arrays)


def measure(part: str, shape: tuple[int, ...], names: list[str], seconds: float) -> Row:
    """Measures the programs in turns."""
    starts = {name: compiled(name, part, shape) for name in names}
    turns = {name: partial(harness.wall_clock(start), CALLS) for name, start in starts.items()}
    times = harness.in_turns(turns, least=3, seconds=seconds)
    devices = jax.device_count()
    row: Row = dict(harness.compared_times(times, 1, "one", "relative"))
    return row | {
        "devices": devices,
        "efficiency": {n: row["one"]["ms"] / (row[n]["ms"] * devices) for n in names[1:]},
    }


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, 0.5, SHAPES)
    parser.add_argument("--programs", nargs="+", default=["ordered", "zigzag", "gathered"])
    options = parser.parse_args()

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape in options.shapes:
            for part in ("forward", "both"):
                names = ["one", *options.programs]
                yield (
                    {"shape": shape, "pass": part},
                    partial(measure, part, harness.extents(shape), names, options.seconds),
                )

    def texts(row: Row) -> list[str]:
        found = [row["shape"], row["pass"], harness.milliseconds_of(row, "one")]
        return found + [f"{one:.3f}" for one in row.get("efficiency", {}).values()]

    heads = ["S x H x Hkv x D", "pass", "one device ms", *options.programs]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
