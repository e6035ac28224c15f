"""Activations on one device: ours, XLA's program and torch.compile's, in copies of their bytes.

    python benches/peers/activations.py --json FILE [--operations NAME ...] [--shapes TxF ...]

A cell is an operation at a shape of y, forward or backward, timed as turns.py says. A copy is a
kernel that negates as many bytes as the operation must read and write.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pallas_bridge._src.activation.custom_call import backward, forward
from pallas_bridge._src.activation.options import Options
from turns import CALLS, rounds_of, save

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
# The same in PyTorch, of what `forward` takes.
TORCH = {
    "gelu_tanh": lambda F, x: F.gelu(x, approximate="tanh"),
    "gelu_erf": lambda F, x: F.gelu(x),
    "squared_relu": lambda F, x: F.relu(x).square(),
    "swiglu of two": lambda F, g, u: F.silu(g) * u,
    "swiglu halves": lambda F, x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu_erf halves": lambda F, x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def arrays_of(options: Options, rows: int, columns: int) -> tuple[list[list[Any]], list[Any]]:
    """Returns x of each call, and dy."""
    packs = 2 if options.layout in ("halves", "interleaved") else 1
    shape = (rows, columns * packs)
    keys = iter(jax.random.split(jax.random.key(0), 3 * CALLS))
    count = 2 if options.layout == "apart" else 1

    def draw(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    return [[draw(shape) for _ in range(count)] for _ in range(CALLS)], [
        draw((rows, columns)) for _ in range(CALLS)
    ]


def in_jax(name: str, rows: int, columns: int, which: str, seconds: float) -> dict[str, Any]:
    """Returns what is measured of a cell."""
    options = OPERATIONS[name]
    x, dy = arrays_of(options, rows, columns)
    entries = sum(one.size for one in x[0])
    moved = 2 * (2 * entries + dy[0].size if which == "backward" else entries + dy[0].size)
    # Each of its own input, or XLA reads it once for all.
    sources = [jnp.full(moved // 4, i, jnp.bfloat16) for i in range(CALLS)]

    def program(options: Options) -> Callable[[], Any]:
        def run(x: Any, dy: Any) -> Any:
            if which == "forward":
                return [forward(options, *one) for one in x]
            return [backward(options, one, of_y) for one, of_y in zip(x, dy, strict=True)]

        compiled = jax.jit(run).lower(x, dy).compile()
        return lambda: compiled(x, dy)

    negate = jax.jit(lambda sources: [-one for one in sources]).lower(sources).compile()
    if options.layout == "apart":
        kernel = None  # there is none
    else:
        kernel = program(Options(**{**vars(options), "implementation": "custom_call"}))
    dense = program(Options(**{**vars(options), "implementation": "reference"}))
    runs = {"copy": lambda: negate(sources), "xla": dense}
    found = rounds_of({**runs, **({"ours": kernel} if kernel else {})}, seconds)
    return {
        "moved_mib": moved / 2**20,
        **{k: {"ms": 1e3 * t, "copies": r} for k, (t, r) in found.items()},
    }


def in_torch(name: str, rows: int, columns: int, which: str, seconds: float) -> dict[str, Any]:
    """Returns the same of torch.compile's program, in copies of its own."""
    import torch

    options, F = OPERATIONS[name], torch.nn.functional
    packs = 2 if options.layout in ("halves", "interleaved") else 1
    count = 2 if options.layout == "apart" else 1
    more = {"device": "cuda", "dtype": torch.bfloat16}
    x = [
        [torch.randn(rows, columns * packs, **more).requires_grad_() for _ in range(count)]
        for _ in range(CALLS)
    ]
    dy = torch.randn(rows, columns, **more)
    entries = sum(one.numel() for one in x[0])
    moved = 2 * (2 * entries + dy.numel() if which == "backward" else entries + dy.numel())
    source = torch.ones(moved // 4, **more)
    to = torch.empty_like(source)
    compiled = torch.compile(partial(TORCH[name], F), dynamic=False)
    graphs = [compiled(*one) for one in x] if which == "backward" else None

    def run() -> None:
        if graphs is None:
            with torch.no_grad():
                for one in x:
                    compiled(*one)
        else:
            for graph, one in zip(graphs, x, strict=True):
                torch.autograd.grad(graph, one, dy, retain_graph=True)
        torch.cuda.synchronize()

    def copy() -> None:
        for _ in range(CALLS):
            to.copy_(source)
        torch.cuda.synchronize()

    found = rounds_of({"copy": copy, "torch": run}, seconds)
    return {
        "torch": {"ms": 1e3 * found["torch"][0], "copies": found["torch"][1]},
        "torch_copy": {"ms": 1e3 * found["copy"][0], "copies": 1.0},
    }


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--operations", nargs="+", default=[*OPERATIONS])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each cell")
    parser.add_argument(
        "--torch", action="store_true", help="torch.compile's instead, into the same file"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.torch and options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["results"]
    print("| operation | shape | pass | copy ms | XLA | ours | torch.compile |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for shape in options.shapes:
        extents = [int(one) for one in shape.split("x")]
        for name in options.operations:
            for which in ("forward", "backward"):
                if options.torch and name not in TORCH:
                    continue
                cell = {"operation": name, "shape": shape, "pass": which}
                same = [row for row in rows if {k: row[k] for k in cell} == cell]
                row = same[0] if same else cell
                rows.extend([] if same else [row])
                measure = in_torch if options.torch else in_jax
                try:
                    row.update(measure(name, *extents, which, options.seconds))
                except Exception as error:  # the others go on
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                texts = [
                    f"{row[k]['copies']:.3f}" if k in row else "" for k in ("xla", "ours", "torch")
                ]
                copy = row.get("copy", {}).get("ms", float("nan"))
                print(
                    f"| {name} | {shape} | {which} | {copy:.4f} | {' | '.join(texts)} |", flush=True
                )
                save(options.json, rows)


if __name__ == "__main__":
    main()
