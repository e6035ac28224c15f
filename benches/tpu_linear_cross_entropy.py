"""Linear cross-entropy compiled for a TPU v6e without one, with XLA's program and tokamax's.

    cargo build --release -p xentile-tools --example estimate
    python benches/tpu_linear_cross_entropy.py --json FILE

Prints, and with --json appends to FILE, a line for each program and shape: value and gradients of
hidden and weight in bf16, compiled temporaries beyond operands and results, and an estimate of a
step (docs/internals/tpu-cross-entropy.md) in which each kernel takes the longer of its schedule and
its copies. Needs libtpu; tokamax is left out if it is not installed. One shape is from tokamax's
table of measured times.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness

TOPOLOGY, KIND = "v6e:2x2", "TPU v6 lite"
SHAPES = [(8192, 2048, 128256), (8192, 1536, 151936)]
# Of tokamax 0.0.17 on a v6e, by its own table: 6.80 ms forward and 27.3 ms backward.
MEASURED = (4096, 4096, 151936)

# libtpu reads these as it is loaded.
DUMPS = tempfile.TemporaryDirectory()
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMPS.name} --xla_jf_dump_llo_text=true"
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402
from pallas_bridge._src.compat import abstract_tpu  # noqa: E402
from tpu_tokamax import Extents, Tiles, default, mixed, moved, steady, step_of, tuned  # noqa: E402

from pallas_bridge import explain, linear_cross_entropy  # noqa: E402

# Bytes, and steps where the listing does not tell these.
Moved = dict[str, tuple[int, int | None]]


def ours(tokens: int, hidden: int, vocab: int, axis: int) -> tuple[Any, Moved]:
    """The step, and what its kernels move."""
    x = jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((hidden, vocab) if axis else (vocab, hidden), jnp.bfloat16)
    plan = explain(x, w, vocab_axis=axis, platform=KIND)
    moved: Moved = {name: (count, None) for name, count in plan.moved}
    return jax.value_and_grad(linear_cross_entropy, (0, 1)), moved


def dense(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    """XLA's own program."""

    def loss(x: jax.Array, w: jax.Array) -> Any:
        return linear_cross_entropy(x, w, labels, implementation="reference")

    return jax.value_and_grad(loss, (0, 1))(x, w)


def measure(
    name: str,
    shape: tuple[int, int, int],
    axis: int,
    step: Any,
    moved: Moved | None,
) -> dict[str, Any]:
    """Compiles a step and reads its schedule."""
    tokens, hidden, vocab = shape
    device = topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    matrix = (hidden, vocab) if axis else (vocab, hidden)
    arrays = [
        jax.ShapeDtypeStruct(of, dtype, sharding=sharding)
        for of, dtype in (
            ((tokens, hidden), jnp.bfloat16),
            (matrix, jnp.bfloat16),
            ((tokens,), jnp.int32),
        )
    ]
    for path in Path(DUMPS.name).iterdir():
        path.unlink()
    seconds, compiled = harness.timed_call(lambda: jax.jit(step).lower(*arrays).compile())
    memory = compiled.memory_analysis()
    line: dict[str, Any] = {
        "name": name,
        "tokens": tokens,
        "hidden": hidden,
        "vocab": vocab,
        "dtype": "bfloat16",
        "vocab_axis": axis,
        "topology": TOPOLOGY,
        "temp_mib": memory.temp_size_in_bytes / 2**20,
        "output_mib": memory.output_size_in_bytes / 2**20,
        "compile_s": round(seconds, 1),
    }
    if moved is not None:  # of XLA's own copies the listing tells too little
        tool = Path(os.environ.get("CARGO_TARGET_DIR", harness.ROOT / "target"))
        parts = subprocess.run(
            [
                tool / "release/examples/estimate",
                TOPOLOGY,
                DUMPS.name,
                *(
                    f"{part}={count}" + (f",{steps}" if steps else "")
                    for part, (count, steps) in moved.items()
                ),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        line["parts"] = [part for part in json.loads(parts.stdout) if part["ms"] >= 1e-3]
        line["step_ms"] = sum(part["ms"] for part in json.loads(parts.stdout))
    versions = ("jax", "libtpu", "tokamax") if "tokamax" in name else ("jax", "libtpu")
    line["versions"] = {one: harness.installed(one) for one in versions}
    return line | {key: harness.about()[key] for key in ("command", "commit", "unix_time")}


def tokamax(name: str, shape: Extents, choose: Callable[[Extents], Tiles]) -> dict[str, Any]:
    """The step by tokamax's kernels for TPUs, as tpu_tokamax.py says."""
    # What asks for the chip finds none otherwise.
    with jax.sharding.use_abstract_mesh(abstract_tpu(KIND)):
        tiles = choose(shape)
        of = step_of(tiles), moved(shape, tiles)
        with steady(ends_hidden=False):
            others = measure(name, shape, 1, *of)
        with steady(ends_hidden=True):
            line = measure(name, shape, 1, *of)
    parts = mixed(shape, tiles, line["parts"], others["parts"])
    return line | {
        "tiles": asdict(tiles),
        "parts": parts,
        "step_ms": sum(part["ms"] for part in parts),
    }


def main() -> None:
    """Measures every program on every shape."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", type=Path)
    path = arguments.parse_args().json
    has_tokamax = importlib.util.find_spec("tokamax") is not None
    if not has_tokamax:
        print("tokamax is not installed", file=sys.stderr)
    for shape in [*SHAPES, *[MEASURED] * has_tokamax]:
        programs: list[tuple[str, int, Any, Moved | None]] = [
            ("xla dense", 0, dense, None),
            ("pallas_bridge", 0, *ours(*shape, 0)),
            ("pallas_bridge", 1, *ours(*shape, 1)),
        ]
        lines = [measure(name, shape, axis, *of) for name, axis, *of in programs]
        if has_tokamax:
            lines += [tokamax("tokamax", shape, default), tokamax("tokamax, tuned", shape, tuned)]
        for line in lines:
            step = f"{line['step_ms']:7.2f} ms" if "step_ms" in line else " " * 10
            print(
                f"{line['name']:15} axis {line['vocab_axis']} {shape}: {step}, "
                f"{line['temp_mib']:8.1f} MiB, compiled in {line['compile_s']} s",
                flush=True,
            )
            if path:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
