"""Attention on one device: the library's kernels, cuDNN's and XLA's program.

    python benches/peers/attention.py --json FILE [--cells TEXT] [--passes forward backward]

A cell is a shape with its options, forward or backward, in bfloat16 of normal numbers, causal.
Programs of a cell take turns, each PROGRAMS times without a wait, so that starting one does not
count; what is said is the median over the rounds, the rate in TFLOP/s of what is seen (two products
forward and five backward), and the time of the others in units of ours. A backward pass is timed
alone, from what its forward pass left.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_bridge import flash_attention

PROGRAMS = 6
LEAST_ROUNDS = 5
# Batch, tokens, heads of queries and of keys, columns, and options beside `causal`.
CELLS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "4x4096 32/8 128": ((4, 4096, 32, 8, 128), {}),
    "2x8192 32/8 128": ((2, 8192, 32, 8, 128), {}),
    "4x4096 16/16 64": ((4, 4096, 16, 16, 64), {}),
    "8x2048 14/2 64": ((8, 2048, 14, 2, 64), {}),
    "2x8192 8/4 256": ((2, 8192, 8, 4, 256), {}),
    "2x8192 32/8 128 window": ((2, 8192, 32, 8, 128), {"window": (1024, 0)}),
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
    _, pull = jax.jit(partial(jax.vjp, function))(*arrays)
    backward = jax.jit(lambda pull, dout: pull(dout)).lower(pull, dout).compile()
    return lambda: backward(pull, dout)


def rounds_of(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Returns the median time of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < LEAST_ROUNDS:
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(PROGRAMS):
                found = run()
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / PROGRAMS)
    return {name: statistics.median(of) for name, of in times.items()}


def cell_of(name: str, which: str, seconds: float) -> dict[str, Any]:
    """Returns what is measured of a cell."""
    shape, options = CELLS[name]
    functions, arrays, dout = programs_of(shape, options)
    runs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for of, function in functions.items():
        try:
            run = compiled(function, arrays, dout, which)
            jax.block_until_ready(run())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[of] = str(error).splitlines()[0][:200]
        else:
            runs[of] = run
    if "ours" not in runs:
        return {"failed": failed}
    times = rounds_of(runs, seconds)
    batch, tokens, heads, _, columns = shape
    operations = 4 * batch * heads * columns * seen_of(tokens, options)
    operations *= 1 if which == "forward" else 2.5
    measured = {
        of: {"ms": 1e3 * t, "tflops": operations / t / 1e12, "ours": t / times["ours"]}
        for of, t in times.items()
    }
    return {**measured, "failed": failed}


def main() -> int:
    """Measures cells, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write, one JSON object")
    parser.add_argument("--cells", default="", metavar="TEXT", help="those whose name has this")
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of a cell, at the least")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }
    for name in [name for name in CELLS if arguments.cells in name]:
        for which in arguments.passes:
            found = cell_of(name, which, arguments.seconds)
            report[f"{name} {which}"] = found
            line = ", ".join(
                f"{of} {one['ms']:.3f} ms {one['tflops']:.0f} TFLOP/s ({one['ours']:.2f})"
                for of, one in found.items()
                if of != "failed"
            )
            print(f"{name} {which}: {line} {found['failed'] or ''}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
