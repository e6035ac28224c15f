"""Norms on one device: ours, XLA's program, torch.compile's, Liger's, and a copy of their bytes.

    python benches/peers/norms.py --json FILE [--operations NAME ...] [--shapes 8192x4096 ...]

A cell is an operation at a shape. All programs are compiled first. Those of a cell take turns, so
that a ratio is of times that lie beside each other; what is said is the median over the rounds of a
program's time, and of its ratio to the copy. A program runs the operation on CALLS inputs of their
own, one after another, so that neither Python nor what was read before counts. A copy is the faster
of the driver's and of a kernel that negates, of as many bytes as the operation must read and write.

The table is of `OPERATIONS`: a new operation is an entry more.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pallas_bridge._src.norm import custom_call, reference
from pallas_bridge._src.norm.options import Options

import pallas_bridge
from pallas_bridge import layer_norm, rms_norm

# Inputs of a program.
CALLS = 8
SHAPES = ("8192x4096", "32768x2048", "8192x8192", "16384x5120", "32768x896")
# Heads: [T, H, D].
HEADS = ("16384x32x128", "16384x14x64")
# Columns of the product after a norm.
WIDTH = 4096
# Peers of norms_in_torch.py.
IN_TORCH = ("torch", "liger")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Cell:
    """An operation at a shape."""

    operation: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def columns(self) -> int:
        """D."""
        return self.shape[-1]


@dataclass(frozen=True)
class Operation:
    """What is measured of an operation: programs by who makes them, of arrays that it names."""

    # Passes over an array of x's shape that it cannot do without; None where a copy says nothing.
    passes: int | None
    # "row" [.., D], "weight" [D], "rstd" [..] in f32, or "matrix" [D, WIDTH].
    arrays: tuple[str, ...]
    ours: Function
    xla: Function


OPTIONS = Options("rms", 1e-6)


def _apart(norm: Function, name: str) -> Function:
    return partial(norm, implementation=name)


def _both(name: str | None, x: Any, weight: Any, dy: Any) -> Any:
    y, pull = jax.vjp(lambda x, w: rms_norm(x, w, implementation=name), x, weight)
    return y, *pull(dy)


def _add_both(name: str | None, x: Any, residual: Any, weight: Any, dy: Any, dsum: Any) -> Any:
    def f(x: Any, residual: Any, weight: Any) -> Any:
        return rms_norm(x, weight, residual=residual, implementation=name)

    found, pull = jax.vjp(f, x, residual, weight)
    dx, _, dweight = pull((dy, dsum))
    return *found, dx, dweight


def _gradients(module: Any, x: Any, weight: Any, rstd: Any, dy: Any, dsum: Any = None) -> Any:
    cotangents = (dy,) if dsum is None else (dy, dsum)
    if module is reference:
        dx, dweight = reference.gradients(OPTIONS, x, weight, rstd, *cotangents)
    else:
        dx, dweight = custom_call.backward(OPTIONS, x, weight, (rstd,), *cotangents)
    return dx, dweight.astype(weight.dtype)


def _layer_both(name: str | None, x: Any, weight: Any, bias: Any, dy: Any) -> Any:
    y, pull = jax.vjp(partial(layer_norm, implementation=name), x, weight, bias)
    return y, *pull(dy)


def _block(name: str | None, x: Any, residual: Any, weight: Any, matrix: Any, dy: Any) -> Any:
    """A layer's end and the next one's beginning: residual, norm, product, and all gradients."""

    def f(x: Any, residual: Any, weight: Any, matrix: Any) -> Any:
        y, total = rms_norm(x, weight, residual=residual, implementation=name)
        return (y @ matrix).astype(x.dtype), total

    found, pull = jax.vjp(f, x, residual, weight, matrix)
    return *found, *pull((dy, residual))


def _ahead(name: str | None, x: Any, residual: Any, weight: Any, matrix: Any) -> Any:
    y, total = rms_norm(x, weight, residual=residual, implementation=name)
    return (y @ matrix).astype(x.dtype), total


OPERATIONS: dict[str, Operation] = {
    "rms_norm.forward": Operation(
        2,
        ("row", "weight"),
        _apart(rms_norm, "custom_call"),
        _apart(rms_norm, "reference"),
    ),
    "rms_norm.backward": Operation(
        3,
        ("row", "weight", "rstd", "row"),
        partial(_gradients, custom_call),
        partial(_gradients, reference),
    ),
    "rms_norm.both": Operation(
        5,
        ("row", "weight", "row"),
        partial(_both, "custom_call"),
        partial(_both, "reference"),
    ),
    "rms_norm.add_forward": Operation(
        4,
        ("row", "weight", "row"),
        lambda x, w, r: rms_norm(x, w, residual=r, implementation="custom_call"),
        lambda x, w, r: rms_norm(x, w, residual=r, implementation="reference"),
    ),
    "rms_norm.add_backward": Operation(
        4,
        ("row", "weight", "rstd", "row", "row"),
        partial(_gradients, custom_call),
        partial(_gradients, reference),
    ),
    "rms_norm.add_both": Operation(
        8,
        ("row", "row", "weight", "row", "row"),
        partial(_add_both, "custom_call"),
        partial(_add_both, "reference"),
    ),
    "layer_norm.forward": Operation(
        2,
        ("row", "weight", "weight"),
        _apart(layer_norm, "custom_call"),
        _apart(layer_norm, "reference"),
    ),
    "layer_norm.both": Operation(
        5,
        ("row", "weight", "weight", "row"),
        partial(_layer_both, "custom_call"),
        partial(_layer_both, "reference"),
    ),
    "block.forward": Operation(
        None,
        ("row", "row", "weight", "matrix"),
        partial(_ahead, "custom_call"),
        partial(_ahead, "reference"),
    ),
    "block.both": Operation(
        None,
        ("row", "row", "weight", "matrix", "wide"),
        partial(_block, "custom_call"),
        partial(_block, "reference"),
    ),
}


@partial(jax.jit, static_argnums=(1, 2, 3))
def draw(key: Any, shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    """An array of a kind."""
    if kind == "rstd":
        return jax.random.uniform(key, shape, minval=0.9, maxval=1.1)
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def shapes_of(cell: Cell) -> dict[str, tuple[int, ...]]:
    """The shape of an array of each kind."""
    rows, columns = cell.shape[:-1], cell.columns
    matrices = {"matrix": (columns, WIDTH), "wide": (*rows, WIDTH)}
    return {"row": cell.shape, "weight": (columns,), "rstd": rows, **matrices}


def inputs(cell: Cell, kinds: Sequence[str]) -> list[tuple[jax.Array, ...]]:
    """Arrays for each of the calls; weights and matrices are shared."""
    shapes, key = shapes_of(cell), jax.random.key(cell.columns)
    one_for_all = {*kinds} & {"weight", "matrix"}
    shared = {kind: draw(key, shapes[kind], cell.dtype, kind) for kind in one_for_all}
    calls = []
    for call in range(CALLS):
        keys = jax.random.split(jax.random.fold_in(key, call), len(kinds))
        calls.append(
            tuple(
                shared[kind] if kind in shared else draw(one, shapes[kind], cell.dtype, kind)
                for one, kind in zip(keys, kinds, strict=True)
            )
        )
    return calls


def types(cell: Cell, kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    """The types of what `inputs` gives."""
    shapes = shapes_of(cell)
    dtypes = {kind: "float32" if kind == "rstd" else cell.dtype for kind in kinds}
    return [tuple(jax.ShapeDtypeStruct(shapes[kind], dtypes[kind]) for kind in kinds)] * CALLS


def program(function: Function, calls: Any) -> Any:
    """A function on every call's arrays, one after another, compiled."""

    def run(calls: Any) -> Any:
        found: list[Any] = []
        for arrays in calls:
            # Nothing of one call may be fused with another.
            given = arrays
            if found:
                given, found[-1] = jax.lax.optimization_barrier((arrays, found[-1]))
            found.append(function(*given))
        return found

    return jax.jit(run).lower(calls).compile()


def seconds_of(compiled: Any, calls: Any, times: int) -> float:
    """Seconds of a call, of so many runs of twice as many, so that the wait is not counted."""

    def run(times: int) -> float:
        started = time.perf_counter()
        outputs = None
        for _ in range(times):
            outputs = compiled(calls)
        jax.block_until_ready(outputs)
        return time.perf_counter() - started

    while True:
        # Where the machine was busy the fewer runs may have taken longer.
        if (found := run(2 * times) - run(times)) > 0:
            return found / times / CALLS


def programs(cell: Cell) -> dict[str, Any]:
    """The programs of a cell by their names, each compiled."""
    operation = OPERATIONS[cell.operation]
    calls = types(cell, operation.arrays)
    rows = [(arrays[0],) for arrays in calls]
    for kind in {*operation.arrays}:
        draw(jax.random.key(0), shapes_of(cell)[kind], cell.dtype, kind)  # compiled here, too
    return {
        "ours": program(operation.ours, calls),
        "xla": program(operation.xla, calls),
        "driver copy": program(jnp.copy, rows),
        "kernel copy": program(jnp.negative, rows),
    }


def measure(cell: Cell, compiled: dict[str, Any], rounds: int, ms: float) -> dict[str, Any]:
    """All measures of a cell, whose programs run for so many milliseconds a round."""
    operation = OPERATIONS[cell.operation]
    calls = inputs(cell, operation.arrays)
    rows = [(arrays[0],) for arrays in calls]
    given = {name: rows if "copy" in name else calls for name in compiled}
    times: dict[str, int] = {}
    for name, one in compiled.items():
        jax.block_until_ready(one(given[name]))
        alone = seconds_of(one, given[name], 2) * CALLS
        times[name] = max(1, int(ms / 1e3 / max(alone, 1e-5) / 3))
    found: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, one in compiled.items():
            found[name].append(seconds_of(one, given[name], times[name]) * 1e6)
    us = {name: statistics.median(one) for name, one in found.items()}
    temporary = {
        name: memory.temp_size_in_bytes // CALLS
        for name in ("ours", "xla")
        if (memory := compiled[name].memory_analysis()) is not None
    }
    row: dict[str, Any] = {"us": {name: round(one, 2) for name, one in us.items()}}
    row["temporary_bytes"] = temporary
    if operation.passes is not None:
        best = [min(pair) for pair in zip(found["driver copy"], found["kernel copy"], strict=True)]
        best = [one * operation.passes / 2 for one in best]
        row["copies"] = {
            name: round(statistics.median(map(float.__truediv__, found[name], best)), 3)
            for name in ("ours", "xla")
        }
    ratios = map(float.__truediv__, found["xla"], found["ours"])
    row["speed_up"] = round(statistics.median(ratios), 3)
    return row


def about() -> dict[str, Any]:
    """Hardware, versions, date and command."""
    versions = {}
    for name in ("jax", "jaxlib", "torch", "triton", "liger-kernel"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benches/peers/norms.py", *sys.argv[1:]]),
        "calls": CALLS,
        "info": [str(row) for row in pallas_bridge.info().operations["rms_norm"]],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [
        "| operation | shape | ours, us | XLA, us | torch, us | Liger, us | ours, copies "
        "| XLA, copies | XLA / ours |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['operation']} | {row['shape']} | {row['error']} |")
            continue
        copies = row.get("copies", {})
        numbers = [
            f"{row['us']['ours']:.1f}",
            f"{row['us']['xla']:.1f}",
            *(f"{row['us'][peer]:.1f}" if peer in row["us"] else "" for peer in IN_TORCH),
            str(copies.get("ours", "")),
            str(copies.get("xla", "")),
            f"{row['speed_up']:.2f}",
        ]
        lines.append(f"| {row['operation']} | {row['shape']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures all cells; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *HEADS], metavar="TxD")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a program, a round")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell begins after so many")
    parser.add_argument("--after", type=Path, help="compile, and wait for this file")
    parser.add_argument("--torch", action="store_true", help="torch.compile and Liger too")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cells = [
        Cell(operation, tuple(map(int, shape.split("x"))), arguments.dtype)
        for shape in arguments.shapes
        for operation in arguments.operations
        if not (operation.startswith("block") and shape.count("x") > 1)
    ]
    if arguments.torch_worker:
        import norms_in_torch

        known = [one for one in cells if not one.operation.startswith("block")]
        asked = [(one.operation, one.shape, one.dtype) for one in known]
        norms_in_torch.work(asked, IN_TORCH, CALLS)
        return 0
    rows = []
    with ThreadPoolExecutor() as pool:
        compiled = {cell: pool.submit(programs, cell) for cell in cells}
        for one in compiled.values():
            one.exception()
    while arguments.after is not None and not arguments.after.exists():
        time.sleep(0.1)
    started = time.perf_counter()
    for cell in cells:
        if time.perf_counter() - started > arguments.seconds:
            print(f"norms: no time for {cell.operation} and what follows", file=sys.stderr)
            break
        row: dict[str, Any] = {
            "operation": cell.operation,
            "shape": "x".join(map(str, cell.shape)),
            "dtype": cell.dtype,
        }
        try:
            found = compiled[cell].result()
            row |= measure(cell, found, arguments.rounds, arguments.milliseconds)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        print(table([row]).splitlines()[-1], flush=True)
        rows.append(row)
    if arguments.torch:
        command = [sys.executable, __file__, *sys.argv[1:], "--torch-worker"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        for line in done.stdout.splitlines():
            if not line.startswith("["):
                continue
            peer, operation, shape, us = json.loads(line)
            if not isinstance(us, float):
                print(f"norms: {peer}, {operation} {shape}: {us}", file=sys.stderr)
                continue
            for row in rows:
                same = row["operation"] == operation and "us" in row
                if same and row["shape"] == "x".join(map(str, shape)):
                    row["us"][peer] = round(us, 2)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**about(), "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
