"""Attention on one device: the library's kernels, cuDNN's and XLA's program, and PyTorch's.

    python benches/peers/attention.py --json FILE [--cells TEXT] [--passes forward backward both]
        [--torch] [--without xla]

A cell is a shape with its options and a pass, in bfloat16 of normal numbers, causal. `ours` are the
library's kernels, and `default` is what `flash_attention` takes unless told. Programs are timed as
turns.py says, a call each; beside the time stand the rate in TFLOP/s of what is seen (two GEMMs
forward and five backward), and the time relative to `ours`. A backward pass is timed alone, from
what its forward pass saved; `both` are one program, as in a training step. With `--torch` PyTorch's
kernels are timed first, in a process of their own (attention_in_torch.py), and not in turns with
the others.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from turns import rounds_of, save

from pallas_bridge import flash_attention

# Batch, tokens, heads of queries and of keys, columns, and options beside `causal`.
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
    "4x4096 32/8 128 softcap": ((4, 4096, 32, 8, 128), {"softcap": 30.0}),
    "4x4096 32/8 128 sinks": ((4, 4096, 32, 8, 128), {"sinks": True}),
    "4x4096 32/8 128 segments": ((4, 4096, 32, 8, 128), {"segments": 8}),
}


def seen_of(tokens: int, options: dict[str, Any]) -> int:
    """Returns how many pairs of a query and a key a head has."""
    place = np.arange(tokens)
    first = np.maximum(place - options["window"][0], 0) if "window" in options else 0 * place
    if "segments" in options:
        length = tokens // options["segments"]
        first = np.maximum(first, place // length * length)
    return int((place + 1 - first).sum())


def programs_of(
    shape: tuple[int, int, int, int, int], options: dict[str, Any]
) -> tuple[dict[str, Callable[..., Any]], list[jax.Array], jax.Array]:
    """Returns functions of q, k and v by name, these, and a cotangent."""
    batch, tokens, heads, kv_heads, columns = shape
    keys = jax.random.split(jax.random.key(0), 4)
    of_heads = (heads, kv_heads, kv_heads, heads)
    *arrays, dout = (
        jax.random.normal(key, (batch, tokens, count, columns), jnp.bfloat16)
        for key, count in zip(keys, of_heads, strict=True)
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
    if not {*options} - {"window"}:
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
    """Returns a pass of a function, with all that it takes."""
    if which == "forward":
        program = jax.jit(function).lower(*arrays).compile()
        return lambda: program(*arrays)
    if which == "both":

        def step(*arrays: jax.Array) -> Any:
            o, pull = jax.vjp(function, *arrays[:-1])
            return o, *pull(arrays[-1])

        both = jax.jit(step).lower(*arrays, dout).compile()
        return lambda: both(*arrays, dout)
    _, pull = jax.jit(partial(jax.vjp, function))(*arrays)
    backward = jax.jit(lambda pull, dout: pull(dout)).lower(pull, dout).compile()
    return lambda: backward(pull, dout)


def cell_of(name: str, which: str, seconds: float, without: list[str]) -> dict[str, Any]:
    """Returns what is measured of a cell, `without` functions of these names."""
    shape, options = CELLS[name]
    functions, arrays, dout = programs_of(shape, options)
    functions = {of: one for of, one in functions.items() if of not in without}
    runs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for of, function in functions.items():
        try:
            run = compiled(function, arrays, dout, which)
            jax.block_until_ready(run())
        # What has no such option, or no memory for all logits, is told of; the others go on.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[of] = str(error).splitlines()[0][:200]
        else:
            runs[of] = run
    if "ours" not in runs:
        return {"failed": failed}
    times = rounds_of(runs, seconds, calls=1, against="ours")
    batch, tokens, heads, _, columns = shape
    operations = 4 * batch * heads * columns * seen_of(tokens, options)
    operations *= {"forward": 1, "backward": 2.5, "both": 3.5}[which]
    measured = {
        of: {"ms": 1e3 * t, "tflops": operations / t / 1e12, "ours": ratio}
        for of, (t, ratio) in times.items()
    }
    return {**measured, "failed": failed}


def of_torch(
    names: list[str], passes: list[str], seconds: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns milliseconds of PyTorch's backends, or what failed, by cell and pass."""
    worker = Path(__file__).with_name("attention_in_torch.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"cells": [[name, *CELLS[name]] for name in names], "passes": passes}, file)
        file.flush()
        command = [sys.executable, str(worker), file.name, str(seconds)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = map(json.loads, lines.splitlines())
    return {(row["cell"], row["pass"]): row["torch"] for row in rows}


def main() -> int:
    """Measures cells, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write, one JSON object")
    parser.add_argument("--cells", default="", metavar="TEXT", help="those whose name has this")
    parser.add_argument(
        "--passes",
        nargs="+",
        default=["forward", "backward"],
        choices=["forward", "backward", "both"],
    )
    parser.add_argument("--without", nargs="+", default=[], choices=["default", "xla", "cudnn"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of a cell, at the least")
    parser.add_argument("--torch", action="store_true", help="PyTorch's kernels too")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    names = [name for name in CELLS if arguments.cells in name]
    # Before JAX takes most of the memory.
    peers = of_torch(names, arguments.passes, arguments.seconds) if arguments.torch else {}
    for name in names:
        for which in arguments.passes:
            found = cell_of(name, which, arguments.seconds, arguments.without)
            for of, ms in peers.get((name, which), {}).items():
                if isinstance(ms, str) or "ours" not in found:
                    found["failed"][f"torch {of}"] = ms
                    continue
                ours = found["ours"]
                rate = ours["tflops"] * ours["ms"] / ms
                found[f"torch {of}"] = {"ms": ms, "tflops": rate, "ours": ms / ours["ms"]}
            rows.append({"cell": name, "pass": which, **found})
            save(arguments.json, rows)
            line = ", ".join(
                f"{of} {one['ms']:.3f} ms {one['tflops']:.0f} TFLOP/s ({one['ours']:.2f})"
                for of, one in found.items()
                if of != "failed"
            )
            print(f"{name} {which}: {line} {found['failed'] or ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
