"""Activations on one device: kernels, XLA's program, torch.compile's and a device copy.

    python benches/peers/activations.py --json FILE [--operations NAME ...] [--shapes TxF ...]

A cell is an operation at a shape [T, F] of y, forward or backward. The copy moves as many bytes as
the operation must read and write; with --torch torch.compile's programs are added to the file.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
from harness import CALLS, PROGRAMS, Row, Start
from pallas_bridge._src.activation.custom_call import backward, forward
from pallas_bridge._src.activation.options import Options

SHAPES = ("8192x11008", "8192x14336", "32768x4864")
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
OPERATIONS = {
    "gelu_tanh": Options("gelu_tanh", "single"),
    "gelu_erf": Options("gelu_erf", "single"),
    "squared_relu": Options("squared_relu", "single"),
    "swiglu of two": Options("silu", "apart"),
    "swiglu halves": Options("silu", "halves"),
    "swiglu gpt_oss": Options("silu", "interleaved", **GPT_OSS),
    "geglu_erf halves": Options("gelu_erf", "halves"),
}
# The same in PyTorch, of the arguments of `forward`.
TORCH = {
    "gelu_tanh": lambda F, x: F.gelu(x, approximate="tanh"),
    "gelu_erf": lambda F, x: F.gelu(x),
    "squared_relu": lambda F, x: F.relu(x).square(),
    "swiglu of two": lambda F, g, u: F.silu(g) * u,
    "swiglu halves": lambda F, x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu_erf halves": lambda F, x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def inputs_of(options: Options, rows: int, columns: int) -> tuple[int, tuple[int, int]]:
    """How many inputs an activation has, and the shape of each."""
    is_packed = options.layout in ("halves", "interleaved")
    return 2 if options.layout == "apart" else 1, (rows, columns * (2 if is_packed else 1))


def moved_bytes(options: Options, rows: int, columns: int, which: str) -> int:
    """The bytes that a pass in bfloat16 must read and write."""
    count, shape = inputs_of(options, rows, columns)
    entries = count * shape[0] * shape[1]
    return 2 * (entries * (2 if which == "backward" else 1) + rows * columns)


def in_jax(name: str, rows: int, columns: int, which: str, seconds: float) -> Row:
    """Measures a cell in JAX."""
    options = OPERATIONS[name]
    count, shape = inputs_of(options, rows, columns)
    keys = iter(jax.random.split(jax.random.key(0), 3 * CALLS))

    def draw(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    calls = [(*(draw(shape) for _ in range(count)), draw((rows, columns))) for _ in range(CALLS)]

    def start_of(implementation: Any) -> Start:
        chosen = replace(options, implementation=implementation)

        def run(*arrays: Any) -> Any:
            *x, dy = arrays
            return forward(chosen, *x) if which == "forward" else backward(chosen, x, dy)

        return harness.compile_calls(run, calls)

    moved = moved_bytes(options, rows, columns, which)
    starts = {"copy": harness.device_copy(moved), "xla": start_of("reference")}
    # There is no kernel of two inputs.
    if options.layout != "apart":
        starts["ours"] = start_of("custom_call")
    return {"moved_mib": moved / 2**20, **harness.compared(starts, seconds)}


def in_torch(name: str, rows: int, columns: int, which: str, seconds: float) -> Row:
    """Measures torch.compile's program of a cell, and a copy by PyTorch."""
    import torch

    options = OPERATIONS[name]
    count, shape = inputs_of(options, rows, columns)
    more = {"device": "cuda", "dtype": torch.bfloat16}
    x = [[torch.randn(shape, **more).requires_grad_() for _ in range(count)] for _ in range(CALLS)]
    dy = torch.randn(rows, columns, **more)
    source = torch.ones(moved_bytes(options, rows, columns, which) // 4, **more)
    target = torch.empty_like(source)
    compiled = torch.compile(partial(TORCH[name], torch.nn.functional), dynamic=False)
    outputs = [compiled(*one) for one in x] if which == "backward" else []

    def run() -> None:
        for y, one in zip(outputs, x, strict=False):
            torch.autograd.grad(y, one, dy, retain_graph=True)
        if not outputs:
            with torch.no_grad():
                for one in x:
                    compiled(*one)

    def copy() -> None:
        for _ in range(CALLS):
            target.copy_(source)

    clocks = {"torch_copy": copy, "torch": run}
    turns = {key: partial(harness.torch_clock(one), PROGRAMS) for key, one in clocks.items()}
    return harness.compared_times(
        harness.in_turns(turns, seconds=seconds), calls=CALLS, baseline="torch_copy"
    )


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.3)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--operations", nargs="+", default=[*OPERATIONS])
    parser.add_argument("--torch", action="store_true", help="add torch.compile's to the file")
    options = parser.parse_args()
    results = harness.Results(options.json, is_resumed=options.torch)
    kept, results.rows = results.rows, []
    measure = in_torch if options.torch else in_jax
    names = [name for name in options.operations if name in TORCH or not options.torch]

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape in options.shapes:
            for name in names:
                for which in ("forward", "backward"):
                    cell = {"operation": name, "shape": shape, "pass": which}
                    same = [row for row in kept if row.items() >= cell.items()]
                    run = partial(measure, name, *harness.extents(shape), which, options.seconds)
                    yield {**cell, **(same[0] if same else {})}, run

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, ("xla", "ours", "torch"))
        of_cell = [row[name] for name in ("operation", "shape", "pass")]
        return [*of_cell, harness.milliseconds_of(row), *ratios]

    heads = ["operation", "shape", "pass", "copy ms", "XLA / copy", "kernel / copy"]
    return harness.measure_cells(cells(), results, [*heads, "torch.compile / copy"], texts)


if __name__ == "__main__":
    sys.exit(main())
