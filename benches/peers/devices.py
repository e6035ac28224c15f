"""Cross-entropy, over logits and linear, on several devices and on one, and its collectives.

    python benches/peers/devices.py --devices 2 --json FILE [--seconds S]

A cell is a loss, value and gradient of the mean in bfloat16 of normal inputs, with tokens or the
vocabulary sharded over the devices. Its programs are of one device and of all. The time in
collectives is that of NCCL's kernels in a profile, on the device with the most. A bandwidth is of
one all-reduce: bytes of the array over time.
"""

import glob
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
from harness import PROGRAMS, Clock, Row
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_bridge import cross_entropy, linear_cross_entropy

LOGITS = (8192, 151936)
LINEAR = (8192, 4096, 151936)
SIZES_MIB = (1, 16, 64, 256, 1187)


def mesh_of(axis: str, count: int) -> jax.sharding.Mesh:
    """A mesh with one explicit axis over the first devices."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), (axis,), axis_types=(AxisType.Explicit,), devices=devices)


def placed(mesh: jax.sharding.Mesh, dtype: Any, spec: P, *shape: int, scale: float = 1) -> Any:
    """Normal numbers, or labels below `scale`, made on the mesh."""
    sharding = NamedSharding(mesh, spec)

    def draw() -> jax.Array:
        key = jax.random.key(0)
        if dtype == jnp.int32:
            return jax.random.randint(key, shape, 0, int(scale))
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    return jax.device_put(jax.jit(draw)(), sharding)


def over_logits(mesh: jax.sharding.Mesh, cut: str) -> Any:
    """The program of a loss over logits, and its arrays."""
    tokens, vocab = LOGITS
    of_z, of_y = (P("x"), P("x")) if cut == "tokens" else (P(None, "x"), P())
    z = placed(mesh, jnp.bfloat16, of_z, tokens, vocab)
    y = placed(mesh, jnp.int32, of_y, tokens, scale=vocab)
    return jax.value_and_grad(cross_entropy), (z, y)


def linear(mesh: jax.sharding.Mesh, cut: str) -> Any:
    """The program of a linear loss, and its arrays."""
    tokens, width, vocab = LINEAR
    of_h, of_w = (P("x"), P()) if cut == "tokens" else (P(), P("x"))
    h = placed(mesh, jnp.bfloat16, of_h, tokens, width)
    w = placed(mesh, jnp.bfloat16, of_w, vocab, width, scale=width**-0.5)
    y = placed(mesh, jnp.int32, of_h, tokens, scale=vocab)
    return jax.value_and_grad(linear_cross_entropy, (0, 1)), (h, w, y)


def compiled(make: Any, cut: str, count: int) -> tuple[Clock, int]:
    """The clock of a program, and the bytes of its temporaries on a device."""
    mesh = mesh_of("x", count)
    with jax.set_mesh(mesh):
        function, arrays = make(mesh, cut)
        program = jax.jit(function).lower(*arrays).compile()
    memory = program.memory_analysis()
    return harness.wall_clock(lambda: program(*arrays)), memory.temp_size_in_bytes


def in_collectives(clock: Clock, calls: int = 3) -> dict[str, float]:
    """Milliseconds of a call in each of NCCL's kernels, on the device with the most."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            clock(calls)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    most: dict[str, float] = {}
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        found: dict[str, float] = {}
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith("ncclDevKernel"):
                    name = event.name.split("(")[0]
                    found[name] = found.get(name, 0) + event.duration_ns / 1e6 / calls
        most = max(most, found, key=lambda one: sum(one.values()))
    return most


def all_reduce(mib: int, count: int) -> Clock:
    """The clock of one all-reduce of so many MiB of bfloat16."""
    mesh = mesh_of("x", count)
    x = placed(mesh, jnp.bfloat16, P("x"), count, mib * 2**19)

    def sum_over_devices(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x")

    with jax.set_mesh(mesh):
        function = jax.shard_map(sum_over_devices, mesh=mesh, in_specs=P("x"), out_specs=P())
        program = jax.jit(function).lower(x).compile()
    return harness.wall_clock(lambda: program(x))


def measured(make: Any, cut: str, count: int, seconds: float) -> Row:
    """Measures a cell."""
    # On one device a sharded vocabulary would add a second pass.
    one, temporary = compiled(make, "tokens", 1)
    every, of_each = compiled(make, cut, count)
    turns = {"one": partial(one, PROGRAMS), "all": partial(every, PROGRAMS)}
    times = harness.in_turns(turns, seconds=seconds)
    return {
        "ms": {key: 1e3 * statistics.median(of) for key, of in times.items()},
        "speed_up": harness.median_ratio(times["one"], times["all"]),
        "rounds": len(times["one"]),
        "temporary_bytes": {"one": temporary, "each": of_each},
        "collectives_ms": in_collectives(every),
    }


def texts_of(row: Row) -> list[str]:
    """The cells of a row's line."""
    if "ms" not in row:
        return [row["loss"], row["cut"], "", "", "", ""]
    collectives = ", ".join(f"{name} {ms:.3f}" for name, ms in row["collectives_ms"].items())
    times = [f"{row['ms'][key]:.3f}" for key in ("one", "all")]
    return [row["loss"], row["cut"], *times, f"{row['speed_up']:.3f}", collectives or "none"]


def main() -> int:
    """Measures, prints tables and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=3)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    count = options.devices
    if jax.device_count() < count:
        parser.error(f"--devices is {count}, and there are {jax.device_count()} devices")
    bandwidths: list[Row] = []
    results = harness.Results(options.json, all_reduce=bandwidths)

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for name, make, shape in (("logits", over_logits, LOGITS), ("linear", linear, LINEAR)):
            for cut in ("tokens", "vocabulary"):
                cell = {"loss": name, "cut": cut, "shape": shape, "devices": count}
                yield cell, partial(measured, make, cut, count, options.seconds)

    heads = ["loss", "sharded", "one device (ms)", "all (ms)", "one / all", "collectives (ms)"]
    failed = harness.measure_cells(cells(), results, heads, texts_of)
    for mib in SIZES_MIB:
        turns = {"all": partial(all_reduce(mib, count), PROGRAMS)}
        times = harness.in_turns(turns, seconds=options.seconds / 10)
        seconds = statistics.median(times["all"])
        row = {"mib": mib, "ms": 1e3 * seconds, "gb_per_s": mib * 2**20 / seconds / 1e9}
        bandwidths.append(row)
        results.write()
        print(
            f"all-reduce of {mib} MiB: {row['ms']:.3f} ms, {row['gb_per_s']:.0f} GB/s", flush=True
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
