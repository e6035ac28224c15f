"""Norms on one device: kernels, XLA's program, torch.compile's, Liger's, and a device copy.

    python benches/peers/norms.py --json FILE [--operations NAME ...] [--shapes 8192x4096 ...]

A cell is an operation at a shape. All programs are compiled first. A program runs the operation on
CALLS inputs of its own, one after another, so that caches are cold. The copy is the faster of the
driver's and of a kernel that negates, of as many bytes as the operation must read and write.

A new operation is an entry of `OPERATIONS`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
from harness import Row
from pallas_bridge._src.norm import custom_call, reference
from pallas_bridge._src.norm.options import Options

from pallas_bridge import layer_norm, rms_norm

# Inputs of a program.
CALLS = 8
SHAPES = ("8192x4096", "32768x2048", "8192x8192", "16384x5120", "32768x896")
# Heads: [T, H, D].
HEADS = ("16384x32x128", "16384x14x64")
# Columns of the GEMM after a norm.
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
    """An operation: its program, given an implementation's name, and its arrays."""

    # The least number of passes over an array of x's shape; None if a copy is no yardstick.
    passes: int | None
    # "row" [.., D], "weight" [D], "rstd" [..] in f32, "matrix" [D, WIDTH] or "wide" [.., WIDTH].
    arrays: tuple[str, ...]
    # Takes the implementation, and then the arrays.
    function: Function


OPTIONS = Options("rms", 1e-6)


def _forward(norm: Function, name: str, *arrays: Any) -> Any:
    return norm(*arrays, implementation=name)


def _both(norm: Function, name: str, *arrays: Any) -> Any:
    *arrays_of_norm, dy = arrays
    y, vjp = jax.vjp(partial(norm, implementation=name), *arrays_of_norm)
    return y, *vjp(dy)


def _add(name: str, x: Any, weight: Any, residual: Any) -> Any:
    return rms_norm(x, weight, residual=residual, implementation=name)


def _add_both(name: str, x: Any, residual: Any, weight: Any, dy: Any, dsum: Any) -> Any:
    found, vjp = jax.vjp(partial(_add, name), x, weight, residual)
    dx, dweight, _ = vjp((dy, dsum))
    return *found, dx, dweight


def _backward(name: str, x: Any, weight: Any, rstd: Any, dy: Any, dsum: Any = None) -> Any:
    cotangents = (dy,) if dsum is None else (dy, dsum)
    if name == "reference":
        dx, dweight = reference.gradients(OPTIONS, x, weight, rstd, *cotangents)
    else:
        dx, dweight = custom_call.backward(OPTIONS, x, weight, (rstd,), *cotangents)
    return dx, dweight.astype(weight.dtype)


def _block(name: str, x: Any, residual: Any, weight: Any, matrix: Any) -> Any:
    y, total = rms_norm(x, weight, residual=residual, implementation=name)
    return (y @ matrix).astype(x.dtype), total


def _block_both(name: str, x: Any, residual: Any, weight: Any, matrix: Any, dy: Any) -> Any:
    """A layer's end and the next one's start: residual, norm, GEMM, and all gradients."""
    found, vjp = jax.vjp(partial(_block, name), x, residual, weight, matrix)
    return *found, *vjp((dy, residual))


OPERATIONS: dict[str, Operation] = {
    "rms_norm.forward": Operation(2, ("row", "weight"), partial(_forward, rms_norm)),
    "rms_norm.backward": Operation(3, ("row", "weight", "rstd", "row"), _backward),
    "rms_norm.both": Operation(5, ("row", "weight", "row"), partial(_both, rms_norm)),
    "rms_norm.add_forward": Operation(4, ("row", "weight", "row"), _add),
    "rms_norm.add_backward": Operation(4, ("row", "weight", "rstd", "row", "row"), _backward),
    "rms_norm.add_both": Operation(8, ("row", "row", "weight", "row", "row"), _add_both),
    "layer_norm.forward": Operation(2, ("row", "weight", "weight"), partial(_forward, layer_norm)),
    "layer_norm.both": Operation(5, ("row", "weight", "weight", "row"), partial(_both, layer_norm)),
    "block.forward": Operation(None, ("row", "row", "weight", "matrix"), _block),
    "block.both": Operation(None, ("row", "row", "weight", "matrix", "wide"), _block_both),
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
    """Arrays of each call; weights and matrices are shared."""
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


def program(function: Function, calls: Any) -> Any:
    """Compiles a program that calls a function with each tuple of arrays, never fused."""

    def run(calls: Any) -> Any:
        found: list[Any] = []
        for arrays in calls:
            given = arrays
            if found:
                given, found[-1] = jax.lax.optimization_barrier((arrays, found[-1]))
            found.append(function(*given))
        return found

    return jax.jit(run).lower(calls).compile()


def programs(cell: Cell) -> dict[str, Any]:
    """The compiled programs of a cell by name."""
    operation = OPERATIONS[cell.operation]
    calls = jax.eval_shape(partial(inputs, cell, operation.arrays))
    rows = [(arrays[0],) for arrays in calls]
    for kind in {*operation.arrays}:
        draw(jax.random.key(0), shapes_of(cell)[kind], cell.dtype, kind)  # compiled here, too
    return {
        "ours": program(partial(operation.function, "custom_call"), calls),
        "xla": program(partial(operation.function, "reference"), calls),
        "driver copy": program(jnp.copy, rows),
        "kernel copy": program(jnp.negative, rows),
    }


def measure(cell: Cell, compiled: dict[str, Any], rounds: int, ms: float) -> Row:
    """Measures a cell, whose programs run for so many milliseconds a turn."""
    operation = OPERATIONS[cell.operation]
    calls = inputs(cell, operation.arrays)
    rows = [(arrays[0],) for arrays in calls]
    turns: dict[str, Callable[[], float]] = {}
    for name, one in compiled.items():
        start = partial(one, rows if "copy" in name else calls)
        jax.block_until_ready(start())
        clock = harness.difference_clock(start)
        turns[name] = partial(clock, max(1, int(ms / 1e3 / max(clock(2), 1e-5) / 3)))
    times = harness.in_turns(turns, least=rounds, most=rounds)
    found = {name: [1e6 * one / CALLS for one in of] for name, of in times.items()}
    temporary = {
        name: memory.temp_size_in_bytes // CALLS
        for name in ("ours", "xla")
        if (memory := compiled[name].memory_analysis()) is not None
    }
    row: Row = {
        "us": {name: round(statistics.median(one), 2) for name, one in found.items()},
        "spread": {name: round(harness.spread(one), 3) for name, one in found.items()},
        "temporary_bytes": temporary,
    }
    if operation.passes is not None:
        copies = [found["driver copy"], found["kernel copy"]]
        best = [min(pair) * operation.passes / 2 for pair in zip(*copies, strict=True)]
        row["copies"] = {
            name: round(harness.median_ratio(found[name], best), 3) for name in ("ours", "xla")
        }
    row["speed_up"] = round(harness.median_ratio(found["xla"], found["ours"]), 3)
    return row


HEADS_OF_TABLE = ["operation", "shape", "kernel us", "XLA us", "torch us", "Liger us"]
HEADS_OF_TABLE += ["kernel / copy", "XLA / copy", "XLA / kernel"]


def texts_of(row: Row) -> list[str]:
    """The cells of a row's line."""
    us, copies = row.get("us", {}), row.get("copies", {})
    texts = [row["operation"], row["shape"]]
    texts += [f"{us[name]:.1f}" if name in us else "" for name in ("ours", "xla", *IN_TORCH)]
    texts += [str(copies.get(name, "")) for name in ("ours", "xla")]
    return [*texts, f"{row['speed_up']:.2f}" if us else ""]


def add_torch(rows: list[Row]) -> None:
    """Adds the microseconds of peers in PyTorch, which a process of its own measures."""
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
            is_same = row["operation"] == operation and row["shape"] == "x".join(map(str, shape))
            if is_same and "us" in row:
                row["us"][peer] = round(us, 2)


def main() -> int:
    """Measures all cells; the exit code is 1 if one failed."""
    parser = harness.parser(__doc__)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *HEADS], metavar="TxD")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a program, a round")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after so many")
    parser.add_argument("--torch", action="store_true", help="torch.compile and Liger too")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cells = [
        Cell(operation, harness.extents(shape), options.dtype)
        for shape in options.shapes
        for operation in options.operations
        if not (operation.startswith("block") and shape.count("x") > 1)
    ]
    if options.torch_worker:
        import norms_in_torch

        known = [one for one in cells if not one.operation.startswith("block")]
        norms_in_torch.work([(*vars(one).values(),) for one in known], IN_TORCH, CALLS)
        return 0
    with ThreadPoolExecutor() as pool:
        compiled = {cell: pool.submit(programs, cell) for cell in cells}
        for one in compiled.values():
            one.exception()
    started = time.perf_counter()

    def measure_cell(cell: Cell) -> Row:
        if time.perf_counter() - started > options.seconds:
            raise TimeoutError("not run: no time was left")
        return measure(cell, compiled[cell].result(), options.rounds, options.milliseconds)

    runs = [
        (
            {**vars(cell), "shape": "x".join(map(str, cell.shape))},
            partial(measure_cell, cell),
        )
        for cell in cells
    ]
    results = harness.Results(options.json)
    failed = harness.measure_cells(runs, results, HEADS_OF_TABLE, texts_of)
    if options.torch:
        add_torch(results.rows)
        results.write()
        print(harness.table(HEADS_OF_TABLE, map(texts_of, results.rows)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
