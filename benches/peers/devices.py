"""Cross-entropy, over logits and linear, on several devices beside one, and what is exchanged.

    python benches/peers/devices.py --devices 2 --json FILE [--seconds S]

Each cell is a loss, mean of value_and_grad in bfloat16 on normal inputs, with its tokens or its
vocabulary cut over the devices. Both programs of a cell, of one device and of all, take turns in a
round, so that a ratio is of times that lie beside each other; medians of rounds are told. Time in
collectives is that of NCCL's kernels in a profile of its own, on the device that has most of it.
Bandwidths are of one all-reduce, by bytes of the array over time.
"""

import argparse
import glob
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from turns import about

from pallas_bridge import cross_entropy, linear_cross_entropy

LOGITS = (8192, 151936)
LINEAR = (8192, 4096, 151936)
# So many follow one another, so that starting a program does not count.
CALLS = 8
SIZES_MIB = (1, 16, 64, 256, 1187)
# What runs a program so many times, and waits for the last.
Run = Callable[[int], Any]


def mesh_of(axis: str, count: int) -> jax.sharding.Mesh:
    """A mesh of explicit axes of the first devices."""
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), (axis,), axis_types=(AxisType.Explicit,), devices=devices)


def placed(mesh: jax.sharding.Mesh, dtype: Any, spec: P, *shape: int, scale: float = 1) -> Any:
    """Normal numbers, or labels below `scale`, made where they lie."""
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


def compiled(make: Any, cut: str, count: int) -> tuple[Run, int]:
    """What runs a program, and the bytes of its temporaries on a device."""
    mesh = mesh_of("x", count)
    with jax.set_mesh(mesh):
        function, arrays = make(mesh, cut)
        program = jax.jit(function).lower(*arrays).compile()
    memory = program.memory_analysis()
    return repeated(program, arrays), memory.temp_size_in_bytes


def repeated(program: Any, arrays: Any) -> Run:
    """What runs a compiled program one time after another."""

    def run(calls: int) -> None:
        found = None
        for _ in range(calls):
            found = program(*arrays)
        jax.block_until_ready(found)

    return run


def rounds(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Seconds of a call of each program in every round."""
    for run in runs.values():
        run(3)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(runs))]) < 7:
        for name, run in runs.items():
            start = time.perf_counter()
            run(CALLS)
            times[name].append((time.perf_counter() - start) / CALLS)
    return times


def in_collectives(run: Run, calls: int = 3) -> dict[str, float]:
    """Milliseconds of a call in each of NCCL's kernels, on the device that has most of them."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(calls)
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


def all_reduce(mib: int, count: int) -> Run:
    """One all-reduce of so many MiB of bfloat16."""
    mesh = mesh_of("x", count)
    x = placed(mesh, jnp.bfloat16, P("x"), count, mib * 2**19)

    def of_a_device(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x")

    with jax.set_mesh(mesh):
        function = jax.shard_map(of_a_device, mesh=mesh, in_specs=P("x"), out_specs=P())
        program = jax.jit(function).lower(x).compile()
    return repeated(program, (x,))


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="of each cell")
    options = parser.parse_args()
    count = options.devices
    if jax.device_count() < count:
        parser.error(f"--devices is {count}, and there is {jax.device_count()} here")
    found: dict[str, Any] = {"about": about(), "results": [], "all_reduce": []}

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")

    print("| loss | cut | one device (ms) | all (ms) | one / all | collectives (ms) |")
    print("| --- | --- | ---: | ---: | ---: | --- |", flush=True)
    for name, make in (("logits", over_logits), ("linear", linear)):
        for cut in ("tokens", "vocabulary"):
            # An axis of one device that cut the vocabulary would have a second pass.
            one, temporary = compiled(make, "tokens", 1)
            every, of_each = compiled(make, cut, count)
            times = rounds({"one": one, "all": every}, options.seconds)
            ratios = [a / b for a, b in zip(times["one"], times["all"], strict=True)]
            row = {
                "loss": name,
                "cut": cut,
                "shape": LOGITS if name == "logits" else LINEAR,
                "devices": count,
                "ms": {key: 1e3 * statistics.median(of) for key, of in times.items()},
                "speed_up": statistics.median(ratios),
                "rounds": len(ratios),
                "temporary_bytes": {"one": temporary, "each": of_each},
                "collectives_ms": in_collectives(every),
            }
            found["results"].append(row)
            told = ", ".join(f"{k} {v:.3f}" for k, v in row["collectives_ms"].items()) or "none"
            print(
                f"| {name} | {cut} | {row['ms']['one']:.3f} | {row['ms']['all']:.3f} "
                f"| {row['speed_up']:.3f} | {told} |",
                flush=True,
            )
            keep()
            del one, every
    for mib in SIZES_MIB:
        times = rounds({"all": all_reduce(mib, count)}, options.seconds / 10)
        seconds = statistics.median(times["all"])
        row = {"mib": mib, "ms": 1e3 * seconds, "gb_per_s": mib * 2**20 / seconds / 1e9}
        found["all_reduce"].append(row)
        print(
            f"all-reduce of {mib} MiB: {row['ms']:.3f} ms, {row['gb_per_s']:.0f} GB/s", flush=True
        )
        keep()


if __name__ == "__main__":
    main()
