"""Attention on one device: kernels of this library, cuDNN's, XLA's program, and PyTorch's.

    python benches/peers/attention.py --json FILE [--cells TEXT] [--passes forward backward both]
        [--torch] [--without xla]

A cell is a shape with its options and a pass, in bfloat16 of normal numbers, causal. `ours` are
this library's kernels, and `default` is what `flash_attention` chooses. A program is one call; rows
have the time, the rate in TFLOP/s of unmasked pairs (two GEMMs forward and five backward), and the
time relative to `ours`. A backward pass is timed alone, from the residuals of its forward pass;
`both` are one program, as in a training step. With `--torch` PyTorch's kernels are timed first, in
a process of their own (attention_in_torch.py), and not in turns with the others.
"""

import json
import os
import subprocess
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
import numpy as np
from harness import Row

from pallas_bridge import flash_attention

# Batch, tokens, heads of queries and of keys, columns, and further options.
CELLS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "4x4096 32/8 128": ((4, 4096, 32, 8, 128), {}),
    "2x8192 32/8 128": ((2, 8192, 32, 8, 128), {}),
    "1x16384 32/8 128": ((1, 16384, 32, 8, 128), {}),
    "4x4096 16/16 64": ((4, 4096, 16, 16, 64), {}),
    "8x2048 14/2 64": ((8, 2048, 14, 2, 64), {}),
    "2x8192 8/4 256": ((2, 8192, 8, 4, 256), {}),
    "2x8192 32/8 128 window": ((2, 8192, 32, 8, 128), {"window": (1024, 0)}),
    "2x4096 24/8 96": ((2, 4096, 24, 8, 96), {}),
    "2x8192 16/2 128": ((2, 8192, 16, 2, 128), {}),
    "8x4096 32/32 64": ((8, 4096, 32, 32, 64), {}),
    "1x65536 8/1 128": ((1, 65536, 8, 1, 128), {}),
    "2x4096 16/16 192/128": ((2, 4096, 16, 16, 192), {"value_columns": 128}),
    "4x4096 32/8 128 softcap": ((4, 4096, 32, 8, 128), {"softcap": 30.0}),
    "4x4096 32/8 128 sinks": ((4, 4096, 32, 8, 128), {"sinks": True}),
    "4x4096 32/8 128 segments": ((4, 4096, 32, 8, 128), {"segments": 8}),
}


def count_pairs(tokens: int, options: dict[str, Any]) -> int:
    """Returns how many unmasked pairs of a query and a key a head has."""
    position = np.arange(tokens)
    first = np.maximum(position - options["window"][0], 0) if "window" in options else 0 * position
    if "segments" in options:
        length = tokens // options["segments"]
        first = np.maximum(first, position // length * length)
    return int((position + 1 - first).sum())


def programs_of(
    shape: tuple[int, int, int, int, int], options: dict[str, Any]
) -> tuple[dict[str, Callable[..., Any]], list[jax.Array], jax.Array]:
    """Returns functions of q, k and v by name, the arrays q, k and v, and a cotangent."""
    batch, tokens, heads, kv_heads, columns = shape
    keys = jax.random.split(jax.random.key(0), 4)
    values = options.get("value_columns", columns)
    shapes = ((heads, columns), (kv_heads, columns), (kv_heads, values), (heads, values))
    *arrays, dout = (
        jax.random.normal(key, (batch, tokens, *of), jnp.bfloat16)
        for key, of in zip(keys, shapes, strict=True)
    )
    given: dict[str, Any] = {
        name: options[name] for name in ("window", "softcap") if name in options
    }
    if "sinks" in options:
        given["sinks"] = jnp.ones(heads)
    if "segments" in options:
        of_tokens = jnp.arange(tokens, dtype=jnp.int32) // (tokens // options["segments"])
        given["segment_ids"] = jnp.broadcast_to(of_tokens, (batch, tokens))
    ours = partial(flash_attention, causal=True, **given)
    found: dict[str, Callable[..., Any]] = {
        "ours": partial(ours, implementation="custom_call"),
        "default": ours,
        "xla": partial(ours, implementation="reference"),
    }
    if not {*options} - {"window", "value_columns"}:
        found["cudnn"] = partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            implementation="cudnn",
            local_window_size=options.get("window"),
        )
    return found, arrays, dout


def compiled(
    function: Callable[..., Any], arrays: list[jax.Array], dout: jax.Array, which: str
) -> Callable[[], Any]:
    """Returns what starts a pass of a function."""
    if which == "forward":
        program = jax.jit(function).lower(*arrays).compile()
        return lambda: program(*arrays)
    if which == "both":

        def step(*arrays: jax.Array) -> Any:
            o, vjp = jax.vjp(function, *arrays[:-1])
            return o, *vjp(arrays[-1])

        both = jax.jit(step).lower(*arrays, dout).compile()
        return lambda: both(*arrays, dout)
    _, vjp = jax.jit(partial(jax.vjp, function))(*arrays)
    backward = jax.jit(lambda vjp, dout: vjp(dout)).lower(vjp, dout).compile()
    return lambda: backward(vjp, dout)


def measured(
    name: str, which: str, seconds: float, without: list[str], torch: dict[str, Any]
) -> Row:
    """Measures a cell without the functions of some names; `torch` has PyTorch's milliseconds."""
    shape, options = CELLS[name]
    functions, arrays, dout = programs_of(shape, options)
    starts: dict[str, harness.Start] = {}
    failed: dict[str, str] = {}
    for of, function in functions.items():
        if of in without:
            continue
        try:
            start = compiled(function, arrays, dout, which)
            jax.block_until_ready(start())
        # It has no such option, or no memory for all logits; the others go on.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[of] = harness.first_line(error)
        else:
            starts[of] = start
    if "ours" not in starts:
        return {"failed": failed}
    found: Row = harness.compared(starts, seconds, calls=1, baseline="ours", ratio="ours")
    for backend, ms in torch.items():
        if isinstance(ms, str):
            failed[f"torch {backend}"] = ms
        else:
            found[f"torch {backend}"] = {"ms": ms, "ours": ms / found["ours"]["ms"]}
    batch, tokens, heads, _, columns = shape
    values = options.get("value_columns", columns)
    multiplied = {"forward": columns + values, "backward": 3 * columns + 2 * values}
    multiplied["both"] = sum(multiplied.values())
    operations = 2 * batch * heads * multiplied[which] * count_pairs(tokens, options)
    for one in found.values():
        one["tflops"] = operations / one["ms"] / 1e9
    return {**found, "failed": failed}


def time_torch(
    names: list[str], passes: list[str], seconds: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns milliseconds of PyTorch's backends, or their errors, by cell and pass."""
    worker = Path(__file__).with_name("attention_in_torch.py")
    path = os.pathsep.join(filter(None, [str(worker.parents[1]), os.environ.get("PYTHONPATH")]))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"cells": [[name, *CELLS[name]] for name in names], "passes": passes}, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, str(worker), file.name, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    rows = map(json.loads, done.stdout.splitlines())
    return {(row["cell"], row["pass"]): row["torch"] for row in rows}


def texts_of(row: Row) -> list[str]:
    """The cells of a row's line."""
    texts = [
        f"{name} {one['ms']:.3f} ms {one['tflops']:.0f} TFLOP/s ({one['ours']:.2f})"
        for name, one in row.items()
        if isinstance(one, dict) and "ms" in one
    ]
    return [row["cell"], row["pass"], ", ".join(texts), str(row.get("failed") or "")]


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.5)
    parser.add_argument("--cells", default="", metavar="TEXT", help="cells whose name has TEXT")
    passes = ["forward", "backward", "both"]
    parser.add_argument("--passes", nargs="+", default=passes[:2], choices=passes)
    parser.add_argument("--without", nargs="+", default=[], choices=["default", "xla", "cudnn"])
    parser.add_argument("--torch", action="store_true", help="PyTorch's kernels too")
    options = parser.parse_args()
    names = [name for name in CELLS if options.cells in name]
    # Before JAX takes most of the memory.
    peers = time_torch(names, options.passes, options.seconds) if options.torch else {}

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for name in names:
            for which in options.passes:
                torch = peers.get((name, which), {})
                run = partial(measured, name, which, options.seconds, options.without, torch)
                yield {"cell": name, "pass": which}, run

    heads = ["cell", "pass", "time, rate (time / ours)", "failed"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts_of)


if __name__ == "__main__":
    sys.exit(main())
