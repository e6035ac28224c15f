"""Attention on one device: kernels of this library, cuDNN's, XLA's program, and PyTorch's.

    python benches/peers/attention.py --json FILE [--cells TEXT ..] [--passes forward backward both]
        [--xla] [--torch]

A cell is a shape with its options and a pass, in bfloat16 of normal numbers, causal, or a query and
its `keys`. `ours` are this library's kernels, `default` is what `flash_attention` chooses, and
`plain` is `ours` without the cell's softcap, sinks or one text. cuDNN takes packed texts of one
length as a batch. Backward, `any order` is `ours` with `deterministic=False`, and `cudnn in order`
cuDNN where XLA asks for fixed orders. A program is one call; rows have the time, the rate in
TFLOP/s of unmasked pairs (two GEMMs forward and five backward), and the time relative to `ours`;
for one query, `read` is XLA's sum of as many bytes as keys and values have. A backward pass is
timed alone, from the residuals of its forward pass; `both` are one program, as in a training step.
With `--torch` PyTorch's kernels are timed first, in a process of their own (attention_in_torch.py),
and not in turns with the others.
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

import decoding
import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Row

from pallas_bridge import flash_attention

# Batch, tokens, heads of queries and of keys, columns, and further options: `texts` is the length
# of packed texts, or the least and the most; `xla` asks for XLA's program, too.
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
    "4x4096 32/8 128 texts of 512": ((4, 4096, 32, 8, 128), {"texts": 512, "xla": True}),
    "4x4096 16/16 64 texts of 512": ((4, 4096, 16, 16, 64), {"texts": 512}),
    "4x4096 32/8 128 one text": ((4, 4096, 32, 8, 128), {"texts": 4096}),
    "4x4096 16/16 64 one text": ((4, 4096, 16, 16, 64), {"texts": 4096}),
    "4x4096 32/8 128 texts of 64 to 2048": ((4, 4096, 32, 8, 128), {"texts": (64, 2048)}),
    "4x4096 16/16 64 texts of 64 to 2048": ((4, 4096, 16, 16, 64), {"texts": (64, 2048)}),
    "4x4096 16/16 64 softcap": ((4, 4096, 16, 16, 64), {"softcap": 30.0}),
    "4x4096 32/8 128 softcap": ((4, 4096, 32, 8, 128), {"softcap": 30.0}),
    "2x8192 8/4 256 softcap": ((2, 8192, 8, 4, 256), {"softcap": 30.0}),
    "4x4096 32/8 128 sinks": ((4, 4096, 32, 8, 128), {"sinks": True}),
    **{
        f"{batch}x{keys} keys 32/8 128": ((batch, 1, 32, 8, 128), {"keys": keys, "xla": True})
        for batch, keys in ((1, 1024), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 32768))
    },
}
# A turn starts programs in a row for about so long.
TURN_SECONDS = 0.01


def segment_ids(batch: int, tokens: int, texts: Any) -> np.ndarray:
    """Returns ids [B, S] of packed texts of one length, or of random ones between two."""
    least, most = texts if isinstance(texts, tuple) else (texts, texts)
    random = np.random.default_rng(0)
    lengths = random.integers(least, most + 1, (batch, -(-tokens // least)))
    ends = lengths.cumsum(-1)[:, None]
    return (ends <= np.arange(tokens)[:, None]).sum(-1, dtype=np.int32)


def count_pairs(batch: int, tokens: int, options: dict[str, Any]) -> int:
    """Returns how many unmasked pairs of a query and a key there are for each head."""
    if "keys" in options:
        return batch * options["keys"]
    position = np.arange(tokens)
    first = np.zeros((batch, tokens), np.int64)
    if "window" in options:
        first += np.maximum(position - options["window"][0], 0)
    if "texts" in options:
        ids = segment_ids(batch, tokens, options["texts"])
        first = np.stack([np.searchsorted(of, of) for of in ids])
    return int((position + 1 - first).sum())


def programs_of(
    shape: tuple[int, int, int, int, int], options: dict[str, Any], which: str
) -> tuple[dict[str, Callable[..., Any]], list[jax.Array], jax.Array]:
    """Returns functions of q, k and v by name, the arrays q, k and v, and a cotangent."""
    batch, tokens, heads, kv_heads, columns = shape
    random = jax.random.split(jax.random.key(0), 4)
    values, keys = options.get("value_columns", columns), options.get("keys", tokens)
    rows = (
        (tokens, heads, columns),
        (keys, kv_heads, columns),
        (keys, kv_heads, values),
        (tokens, heads, values),
    )
    *arrays, dout = (
        jax.random.normal(key, (batch, *of), jnp.bfloat16)
        for key, of in zip(random, rows, strict=True)
    )
    mask = {name: options[name] for name in ("window",) if name in options}
    plain = partial(flash_attention, causal=True, implementation="custom_call", **mask)
    given = {name: options[name] for name in ("softcap",) if name in options}
    if "sinks" in options:
        given["sinks"] = jnp.ones(heads)
    texts = options.get("texts")
    if texts is not None:
        given["segment_ids"] = jnp.asarray(segment_ids(batch, tokens, texts))
    ours = partial(plain, **given)
    found = {"ours": ours, "default": partial(ours, implementation=None)}
    if given and texts in (None, tokens):
        found["plain"] = plain
    if "xla" in options:
        found["xla"] = partial(ours, implementation="reference")
    if which != "forward" and max(columns, values) <= 128:
        found["any order"] = partial(ours, deterministic=False)

    def cudnn(*arrays: jax.Array) -> jax.Array:
        if texts is not None:
            arrays = tuple(x.reshape(-1, texts, *x.shape[2:]) for x in arrays)
        o: jax.Array = jax.nn.dot_product_attention(
            *arrays,
            is_causal="keys" not in options,
            implementation="cudnn",
            local_window_size=options.get("window"),
        )
        return o.reshape(batch, tokens, heads, values)

    if not {*options} - {"window", "texts", "keys", "xla"} and not isinstance(texts, tuple):
        found["cudnn"] = cudnn
        if which != "forward":
            found["cudnn in order"] = cudnn
    return found, arrays, dout


def compiled(
    function: Callable[..., Any], arrays: list[jax.Array], dout: jax.Array, which: str, more: Any
) -> Callable[[], Any]:
    """Returns what starts a pass of a function, compiled with more options of XLA."""
    if which == "forward":
        program = jax.jit(function).lower(*arrays).compile()
        return lambda: program(*arrays)
    if which == "both":

        def step(*arrays: jax.Array) -> Any:
            o, vjp = jax.vjp(function, *arrays[:-1])
            return o, *vjp(arrays[-1])

        both = jax.jit(step).lower(*arrays, dout).compile(more)
        return lambda: both(*arrays, dout)
    _, vjp = jax.jit(partial(jax.vjp, function))(*arrays)
    backward = jax.jit(lambda vjp, dout: vjp(dout)).lower(vjp, dout).compile(more)
    return lambda: backward(vjp, dout)


def turn(start: harness.Start) -> Callable[[], float]:
    """Returns what times so many programs in a row that a wait is little beside them."""
    seconds = harness.seconds_of_each(start, 2)[1]
    count = round(max(2, min(TURN_SECONDS / seconds, 8 * harness.PROGRAMS)))
    return partial(harness.wall_clock(start), count)


def measured(name: str, which: str, seconds: float, has_xla: bool, torch: Any) -> Row:
    """Measures a cell; `torch` has PyTorch's milliseconds."""
    shape, options = CELLS[name]
    if has_xla:
        options = {**options, "xla": True}
    batch, tokens, heads, kv_heads, columns = shape
    functions, arrays, dout = programs_of(shape, options, which)
    starts: dict[str, harness.Start] = {}
    failed: dict[str, str] = {}
    for of, function in functions.items():
        more = {"xla_gpu_exclude_nondeterministic_ops": True} if of == "cudnn in order" else None
        try:
            start = compiled(function, arrays, dout, which, more)
            jax.block_until_ready(start())
        # It has no such option, or no memory for all logits; the others go on.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[of] = harness.first_line(error)
        else:
            starts[of] = start
    if "ours" not in starts:
        return {"failed": failed}
    values, moved = options.get("value_columns", columns), 0
    if "keys" in options:
        moved = 2 * batch * options["keys"] * kv_heads * (columns + values)
        starts["read"] = decoding.reader(moved)
    turns = {of: turn(start) for of, start in starts.items()}
    times = harness.in_turns(turns, seconds=seconds)
    found: Row = {**harness.compared_times(times, 1, "ours", "ours")}
    for backend, ms in torch.items():
        if isinstance(ms, str):
            failed[f"torch {backend}"] = ms
        else:
            found[f"torch {backend}"] = {"ms": ms, "ours": ms / found["ours"]["ms"]}
    multiplied = {"forward": columns + values, "backward": 3 * columns + 2 * values}
    multiplied["both"] = sum(multiplied.values())
    operations = 2 * heads * multiplied[which] * count_pairs(batch, tokens, options)
    for one in found.values():
        if moved:
            one["gbps"] = moved / one["ms"] / 1e6
        else:
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
        f"{name} {one['ms']:.3f} ms {one.get('tflops') or one['gbps']:.0f} ({one['ours']:.3f})"
        for name, one in row.items()
        if isinstance(one, dict) and "ms" in one
    ]
    return [row["cell"], row["pass"], ", ".join(texts), str(row.get("failed") or "")]


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.2)
    parser.add_argument("--cells", nargs="+", default=[""], help="names, or texts that names have")
    passes = ["forward", "backward", "both"]
    parser.add_argument("--passes", nargs="+", default=passes[::2], choices=passes)
    parser.add_argument("--xla", action="store_true", help="XLA's program of all cells")
    parser.add_argument("--torch", action="store_true", help="PyTorch's kernels too")
    options = parser.parse_args()
    parts = {*options.cells} - {*CELLS}
    names = [one for one in CELLS if one in options.cells or any(part in one for part in parts)]
    # Before JAX takes most of the memory.
    peers = time_torch(names, options.passes, options.seconds) if options.torch else {}

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for name in names:
            for which in options.passes if "keys" not in CELLS[name][1] else ["forward"]:
                torch = peers.get((name, which), {})
                run = partial(measured, name, which, options.seconds, options.xla, torch)
                yield {"cell": name, "pass": which}, run

    heads = ["cell", "pass", "time, TFLOP/s or GB/s (time / ours)", "failed"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts_of)


if __name__ == "__main__":
    sys.exit(main())
