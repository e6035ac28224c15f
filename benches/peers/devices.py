"""Cross-entropy and training steps on several devices and on one, and their collectives.

    python benches/peers/devices.py --devices 2 --json FILE [--seconds S]
        [--parts losses training all-reduce] [--model NAME] [--meshes AXIS ...]

A cell of a loss is its value and the gradient of the mean in bfloat16 of normal inputs, with tokens
or the vocabulary sharded over the devices. A cell of training is a step of examples/train over a
mesh of one axis, with `SEQUENCES` a device or in all, beside a step of one device with as many. The
programs of a cell run in turns; its speedup is that of tokens a second. `losses` are those of the
first steps of `SEQUENCES` sequences in all, on one device also in reverse order. The time in
collectives is that of NCCL's kernels in a profile, on the device with the most. A bandwidth is of
one all-reduce: bytes of the array over time.
"""

import concurrent.futures
import glob
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import harness
import jax
import jax.numpy as jnp
import train_step
from harness import PROGRAMS, Clock, Row
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_bridge import cross_entropy, linear_cross_entropy

LOGITS = (8192, 151936)
MORE_LOGITS = (65536, 151936)
LINEAR = (8192, 4096, 151936)
# Sequences of a training step on one device, steps that a profile is of, and those with losses.
SEQUENCES, STEPS, FIRST_STEPS = 4, 3, 4
PARTS = ("losses", "training", "all-reduce")
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


def over_logits(shape: tuple[int, int], mesh: jax.sharding.Mesh, cut: str) -> Any:
    """The program of a loss over logits, and its arrays."""
    tokens, vocab = shape
    of_z, of_y = (P("x"), P("x")) if cut == "tokens" else (P(None, "x"), P())
    z = placed(mesh, jnp.bfloat16, of_z, tokens, vocab)
    y = placed(mesh, jnp.int32, of_y, tokens, scale=vocab)
    return jax.value_and_grad(cross_entropy), (z, y)


def linear(shape: tuple[int, int, int], mesh: jax.sharding.Mesh, cut: str) -> Any:
    """The program of a linear loss, and its arrays."""
    tokens, width, vocab = shape
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


def in_collectives(clock: Clock, calls: int = STEPS) -> dict[str, float]:
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


class Training:
    """Steps of examples/train over meshes of one axis, and on one device."""

    def __init__(self, model: str, axes: list[str], count: int) -> None:
        """Compiles all programs at once; a program is named by its axis and sequences a step."""
        from train.config import Options, resolve
        from train.step import make_program, with_kernels

        def made(mesh: str, batch: int) -> tuple[Any, Any, Any, Any]:
            options = Options(model_size=model, mesh=mesh, batch_size=batch)
            program = make_program(with_kernels(resolve(options)))
            initial = program.compile_initial() if batch == SEQUENCES else None
            return program, program.compile(), initial, train_step.random_batch(program.config)

        wanted = {("", SEQUENCES): ""}
        for axis in axes:
            wanted |= {(axis, batch): f"{axis}={count}" for batch in (count * SEQUENCES, SEQUENCES)}
        with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
            self.futures = {key: pool.submit(made, mesh, key[1]) for key, mesh in wanted.items()}
            concurrent.futures.wait(self.futures.values())
        self.states: dict[str, Any] = {}
        self.losses: dict[str, list[float]] = {}

    def begin(self, axis: str, order: int = 1) -> None:
        """Has a mesh's state be the initial one, and takes the first steps from there."""
        program, compiled, initial, arrays = self.futures[axis, SEQUENCES].result()
        ordered = jax.tree.map(lambda one: one[::order], arrays)
        arrays = jax.device_put(ordered, program.batch_sharding())
        self.states.pop(axis, None)
        state, losses = initial(), []
        for _ in range(FIRST_STEPS):
            state, metrics = compiled(state, arrays)
            losses.append(float(metrics["loss"]))
        self.states[axis] = state
        self.losses[axis if order == 1 else "reversed"] = losses

    def clock(self, axis: str, batch: int) -> tuple[Clock, Any]:
        """The clock of a program's steps, and the program."""
        program, compiled, _, arrays = self.futures[axis, batch].result()
        arrays = jax.device_put(arrays, program.batch_sharding())
        if axis not in self.states:
            # One for all programs of a mesh.
            self.states = {name: of for name, of in self.states.items() if not name}
            for order in (1,) if axis else (-1, 1):
                self.begin(axis, order)

        def seconds(calls: int) -> float:
            begun = time.perf_counter()
            for _ in range(calls):
                self.states[axis], metrics = compiled(self.states[axis], arrays)
            jax.block_until_ready((self.states[axis], metrics))
            return (time.perf_counter() - begun) / calls

        return seconds, compiled

    def measured(self, axis: str, batch: int, seconds: float) -> Row:
        """Measures a cell."""
        (one, _), (every, compiled) = self.clock("", SEQUENCES), self.clock(axis, batch)
        turns = {"one": partial(one, STEPS), "all": partial(every, STEPS)}
        times = harness.in_turns(turns, least=3, seconds=seconds)
        ratio = harness.median_ratio(times["one"], times["all"])
        named = {"one": "", "reversed": "reversed", "all": axis}
        return {
            "ms": {key: 1e3 * statistics.median(of) for key, of in times.items()},
            "speed_up": ratio * batch / SEQUENCES,
            "rounds": len(times["one"]),
            "temporary_bytes": {"each": compiled.memory_analysis().temp_size_in_bytes},
            "losses": {key: self.losses[of] for key, of in named.items()},
            "collectives_ms": in_collectives(every),
        }


def texts_of(row: Row) -> list[str]:
    """The cells of a row's line."""
    shape = "x".join(map(str, row["shape"]))
    if "ms" not in row:
        return [row["loss"], shape, row["cut"], "", "", "", ""]
    collectives = ", ".join(f"{name} {ms:.3f}" for name, ms in row["collectives_ms"].items())
    times = [f"{row['ms'][key]:.3f}" for key in ("one", "all")]
    return [row["loss"], shape, row["cut"], *times, f"{row['speed_up']:.3f}", collectives or "none"]


def main() -> int:
    """Measures, prints tables and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="preset of examples/train")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is timed")
    meshes = ("data", "fsdp", "model")
    parser.add_argument("--meshes", nargs="*", default=meshes, help="of training, an axis each")
    options = parser.parse_args()
    count = options.devices
    if jax.device_count() < count:
        parser.error(f"--devices is {count}, and there are {jax.device_count()} devices")
    bandwidths: list[Row] = []
    results = harness.Results(options.json, all_reduce=bandwidths)

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        losses = (
            ("linear", linear, LINEAR, "vocabulary"),
            ("linear", linear, LINEAR, "tokens"),
            ("logits", over_logits, LOGITS, "vocabulary"),
            ("logits", over_logits, LOGITS, "tokens"),
            ("logits", over_logits, MORE_LOGITS, "tokens"),
        )
        for name, make, shape, cut in losses if "losses" in options.parts else ():
            cell = {"loss": name, "cut": cut, "shape": shape, "devices": count}
            yield cell, partial(measured, partial(make, shape), cut, count, options.seconds)
        if "training" not in options.parts:
            return
        training = Training(options.model, options.meshes, count)
        for axis in options.meshes:
            for batch in (count * SEQUENCES, SEQUENCES):
                cell = {"loss": options.model, "cut": axis, "shape": [batch], "devices": count}
                yield cell, partial(training.measured, axis, batch, options.seconds)

    heads = [
        "program",
        "shape",
        "sharded",
        "one device (ms)",
        "all (ms)",
        "one / all",
        "collectives (ms)",
    ]
    failed = harness.measure_cells(cells(), results, heads, texts_of)
    for mib in SIZES_MIB if "all-reduce" in options.parts else ():
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
