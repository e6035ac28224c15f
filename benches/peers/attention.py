"""Attention on one device: kernels of this library, cuDNN's, XLA's program, and PyTorch's.

    python benches/peers/attention.py --json FILE [--cells TEXT ..] [--passes forward backward both]
        [--programs NAME ..] [--resume] [--compile] [--torch]

A cell is a shape with its options and a pass, in bfloat16 of normal numbers, causal unless it is
`full`, or one query and its `keys`. Programs of a cell take turns:

- `ours`: kernels of the library; `default`: what `flash_attention` chooses
- `mixed`: cuDNN's forward and the library's backward pass
- `any order`, `default any order`: `ours` and `default` with `deterministic=False`
- `plain`: `ours` without the cell's softcap, sinks or one text
- `cudnn`: by `jax.nn.dot_product_attention`; packed texts of one length are its batch
- `cudnn in order`: the same where XLA asks for a fixed order of sums
- `xla`: XLA's program; `read`: XLA's sum of as many bytes as keys and values have, for one query

A program is one call. A turn starts programs in a row for some 20 ms and waits once, and each round
begins with another program. Rows have the median and the least time, the rate in TFLOP/s of
unmasked pairs (two GEMMs forward and five backward), and medians of the ratios to `ours` and to
`cudnn` within rounds. A backward pass is timed alone, from the residuals of its forward pass;
`both` are one program, as in a training step. With `--compile` programs are compiled and not run,
into JAX's persistent cache if it is set. With `--torch` PyTorch's kernels are timed first, in a
process of their own (attention_in_torch.py), and not in turns with the others.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import decoding
import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Row
from pallas_bridge._src.flash_attention import cudnn

from pallas_bridge import flash_attention

Shape = tuple[int, int, int, int, int]
# Batch, tokens, heads of queries and of keys, columns, and further options: `texts` is the length
# of packed texts, or the least and the most; `xla` asks for XLA's program, too.
CELLS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "4x4096 32/8 128": ((4, 4096, 32, 8, 128), {}),
    "1x16384 32/8 128": ((1, 16384, 32, 8, 128), {}),
    "4x4096 16/16 64": ((4, 4096, 16, 16, 64), {}),
    "8x2048 14/2 64": ((8, 2048, 14, 2, 64), {}),
    "2x8192 8/4 256": ((2, 8192, 8, 4, 256), {}),
    "2x8192 32/8 128 window": ((2, 8192, 32, 8, 128), {"window": (1024, 0)}),
    "2x4096 24/8 96": ((2, 4096, 24, 8, 96), {}),
    "2x8192 16/2 128": ((2, 8192, 16, 2, 128), {}),
    "8x4096 32/32 64": ((8, 4096, 32, 32, 64), {}),
    "1x65536 8/1 128": ((1, 65536, 8, 1, 128), {}),
    "4x4096 32/8 128 texts of 512": ((4, 4096, 32, 8, 128), {"texts": 512}),
    "4x4096 16/16 64 texts of 512": ((4, 4096, 16, 16, 64), {"texts": 512}),
    "4x4096 32/8 128 one text": ((4, 4096, 32, 8, 128), {"texts": 4096}),
    "4x4096 16/16 64 one text": ((4, 4096, 16, 16, 64), {"texts": 4096}),
    "4x4096 32/8 128 texts of 64 to 2048": ((4, 4096, 32, 8, 128), {"texts": (64, 2048)}),
    "4x4096 16/16 64 texts of 64 to 2048": ((4, 4096, 16, 16, 64), {"texts": (64, 2048)}),
    "4x4096 16/16 64 softcap": ((4, 4096, 16, 16, 64), {"softcap": 30.0}),
    "4x4096 32/8 128 softcap": ((4, 4096, 32, 8, 128), {"softcap": 30.0}),
    "2x8192 8/4 256 softcap": ((2, 8192, 8, 4, 256), {"softcap": 30.0}),
    "4x4096 32/8 128 sinks": ((4, 4096, 32, 8, 128), {"sinks": True}),
    "2x4096 16/16 192/128": ((2, 4096, 16, 16, 192), {"value_columns": 128}),
    "2x8192 16/16 64 window": ((2, 8192, 16, 16, 64), {"window": (1024, 0)}),
    "2x8192 8/4 256 window": ((2, 8192, 8, 4, 256), {"window": (1024, 0)}),
    "16x1024 16/8 128": ((16, 1024, 16, 8, 128), {}),
    "32x512 32/8 128": ((32, 512, 32, 8, 128), {}),
    "32x512 16/16 64": ((32, 512, 16, 16, 64), {}),
    "1x16384 16/16 64": ((1, 16384, 16, 16, 64), {}),
    "2x8192 32/8 128": ((2, 8192, 32, 8, 128), {}),
    "4x4096 16/16 64 full": ((4, 4096, 16, 16, 64), {"full": True}),
    "4x4096 32/8 128 full": ((4, 4096, 32, 8, 128), {"full": True}),
    **{
        f"{batch}x{keys} keys 32/8 128": ((batch, 1, 32, 8, 128), {"keys": keys, "xla": True})
        for batch, keys in ((1, 1024), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 32768))
    },
}
PROGRAMS = (
    "ours",
    "default",
    "cudnn",
    "mixed",
    "any order",
    "default any order",
    "cudnn in order",
    "plain",
    "xla",
)
# A turn starts programs in a row for about so long; the wait takes 0.3 ms.
TURN_SECONDS = 0.02
MOST_CALLS = 400


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
    if "full" in options:
        return batch * tokens**2
    position = np.arange(tokens)
    first = np.zeros((batch, tokens), np.int64)
    if "window" in options:
        first += np.maximum(position - options["window"][0], 0)
    if "texts" in options:
        ids = segment_ids(batch, tokens, options["texts"])
        first = np.stack([np.searchsorted(of, of) for of in ids])
    return int((position + 1 - first).sum())


def arrays_of(shape: Shape, options: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns q, k, v, a cotangent of o, and `sinks` and `segment_ids` if there are any."""
    batch, tokens, heads, kv_heads, columns = shape
    values, keys = options.get("value_columns", columns), options.get("keys", tokens)
    rows = {
        "q": (tokens, heads, columns),
        "k": (keys, kv_heads, columns),
        "v": (keys, kv_heads, values),
        "dout": (tokens, heads, values),
    }
    random = jax.random.split(jax.random.key(0), 4)
    found = {
        name: jax.random.normal(key, (batch, *of), jnp.bfloat16)
        for key, (name, of) in zip(random, rows.items(), strict=True)
    }
    if "sinks" in options:
        found["sinks"] = jnp.ones(heads)
    if "texts" in options:
        found["segment_ids"] = jnp.asarray(segment_ids(batch, tokens, options["texts"]))
    return found


def functions_of(
    shape: Shape, options: dict[str, Any], which: str, wanted: list[str] | None
) -> dict[str, Callable[..., jax.Array]]:
    """Returns functions of the arrays of `arrays_of` by name: `ours`, and those that are wanted."""
    batch, tokens, heads, _, columns = shape
    values, texts = options.get("value_columns", columns), options.get("texts")
    mask = {"causal": "full" not in options, "window": options.get("window")}
    plain = partial(flash_attention, **mask, implementation="custom_call")
    ours = partial(plain, softcap=options.get("softcap"))
    default = partial(ours, implementation=None)
    found: dict[str, Callable[..., jax.Array]] = {"ours": ours, "default": default}

    def without_options(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return plain(q, k, v)

    def by_cudnn(q: Any, k: Any, v: Any, **_: Any) -> jax.Array:
        arrays = [q, k, v]
        if texts is not None:
            arrays = [x.reshape(-1, texts, *x.shape[2:]) for x in arrays]
        o: jax.Array = jax.nn.dot_product_attention(
            *arrays,
            is_causal=mask["causal"] and "keys" not in options,
            implementation="cudnn",
            local_window_size=mask["window"],
        )
        return o.reshape(batch, tokens, heads, values)

    has_cudnn = not {*options} & {"softcap", "sinks", "value_columns"}
    if has_cudnn and not isinstance(texts, tuple):
        found["cudnn"] = by_cudnn
    has_five_gemms = max(columns, values) <= 128
    if which != "forward":
        if "cudnn" in found:
            found["cudnn in order"] = by_cudnn
        if "cudnn" in found and texts is None:
            found["mixed"] = default
        if has_five_gemms:
            found["any order"] = partial(ours, deterministic=False)
            found["default any order"] = partial(default, deterministic=False)
    if {*options} & {"softcap", "sinks"} or texts == tokens:
        found["plain"] = without_options
    found["xla"] = partial(ours, implementation="reference")
    if wanted is None:
        wanted = [name for name in PROGRAMS if name != "xla" or "xla" in options]
    return {name: found[name] for name in PROGRAMS if name in found and name in ("ours", *wanted)}


def program_of(
    function: Callable[..., jax.Array], arrays: dict[str, jax.Array], which: str
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted pass of a function, and what it takes."""
    moving = [name for name in arrays if name in ("q", "k", "v", "sinks")]
    fixed = {name: one for name, one in arrays.items() if name not in (*moving, "dout")}
    given, dout = [arrays[name] for name in moving], arrays["dout"]

    def attend(given: Any, fixed: Any) -> jax.Array:
        q, k, v, *sinks = given
        return function(q, k, v, **fixed, **({"sinks": sinks[0]} if sinks else {}))

    def pulled(given: Any, fixed: Any) -> Any:
        return jax.vjp(partial(attend, fixed=fixed), given)

    def both(given: Any, fixed: Any, dout: Any) -> Any:
        o, vjp = pulled(given, fixed)
        return o, vjp(dout)

    if which == "forward":
        return jax.jit(attend), (given, fixed)
    if which == "both":
        return jax.jit(both), (given, fixed, dout)
    _, vjp = jax.jit(pulled)(given, fixed)
    return jax.jit(lambda vjp, dout: vjp(dout)), (vjp, dout)


def lowered(
    name: str, function: Callable[..., jax.Array], arrays: dict[str, jax.Array], which: str
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a pass of the program of a name, traced and lowered, and what it takes."""
    if name != "mixed":
        program, given = program_of(function, arrays, which)
        return program.lower(*given), given
    passes = cudnn.Passes(backward=False)
    # Jaxprs are kept by options, and not by who runs them.
    jax.clear_caches()
    with mock.patch.object(cudnn, "passes_by_cudnn", lambda *_: passes):
        program, given = program_of(function, arrays, which)
        found = program.lower(*given)
    jax.clear_caches()
    return found, given


def compiled(
    shape: Shape, options: dict[str, Any], which: str, wanted: list[str] | None
) -> tuple[dict[str, harness.Start], dict[str, str]]:
    """Returns what starts each program of a cell, and the errors of those that do not compile."""
    arrays = arrays_of(shape, options)
    starts: dict[str, harness.Start] = {}
    failed: dict[str, str] = {}
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, function in functions_of(shape, options, which, wanted).items():
        try:
            programs[name] = lowered(name, function, arrays, which)
        # It has no such option; the others go on.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failed[name] = harness.first_line(error)
    in_order = {"xla_gpu_exclude_nondeterministic_ops": True}
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(one.compile, in_order if name == "cudnn in order" else None)
            for name, (one, _) in programs.items()
        }
    for name, future in futures.items():
        try:
            starts[name] = partial(future.result(), *programs[name][1])
        # There is no memory for all logits.
        except RuntimeError as error:
            failed[name] = harness.first_line(error)
    return starts, failed


def turn(start: harness.Start) -> Callable[[], float]:
    """Returns what times so many programs in a row that a wait is little beside them."""
    harness.seconds_of_each(start, 1)
    seconds = harness.wall_clock(start)(harness.PROGRAMS)
    count = round(max(1, min(TURN_SECONDS / seconds, MOST_CALLS)))
    return partial(harness.wall_clock(start), count)


def measure_rounds(
    turns: dict[str, Callable[[], float]], seconds: float, least: int = 7
) -> dict[str, list[float]]:
    """Returns seconds of a call by name and round; each round starts with another program."""
    names = [*turns]
    times: dict[str, list[float]] = {name: [] for name in names}
    for of in turns.values():
        of()
    begun = time.perf_counter()
    while len(times[names[0]]) < least or time.perf_counter() - begun < seconds:
        for name in names:
            times[name].append(turns[name]())
        names = [*names[1:], names[0]]
    return times


def measured(name: str, which: str, seconds: float, wanted: list[str] | None, torch: Any) -> Row:
    """Measures a cell; `torch` has PyTorch's milliseconds."""
    shape, options = CELLS[name]
    batch, tokens, heads, kv_heads, columns = shape
    starts, failed = compiled(shape, options, which, wanted)
    if "ours" not in starts:
        return {"failed": failed}
    values, moved = options.get("value_columns", columns), 0
    if "keys" in options:
        moved = 2 * batch * options["keys"] * kv_heads * (columns + values)
        starts["read"] = decoding.reader(moved)
    turns: dict[str, Callable[[], float]] = {}
    for of, start in starts.items():
        try:
            turns[of] = turn(start)
        except RuntimeError as error:
            failed[of] = harness.first_line(error)
    times = measure_rounds(turns, seconds)
    found: Row = {
        of: {
            "ms": 1e3 * statistics.median(of_turns),
            "min_ms": 1e3 * min(of_turns),
            "spread": harness.spread(of_turns),
            **{
                peer: harness.median_ratio(of_turns, times[peer])
                for peer in ("ours", "cudnn")
                if peer in times
            },
        }
        for of, of_turns in times.items()
    }
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
    return {**found, "rounds": len(times["ours"]), **({"failed": failed} if failed else {})}


def compile_alone(name: str, which: str, wanted: list[str] | None) -> Row:
    """Compiles a cell's programs."""
    begun = time.perf_counter()
    _, failed = compiled(*CELLS[name], which, wanted)
    return {"compiled_s": time.perf_counter() - begun, "failed": failed}


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
        f"{name} {one['ms']:.4f} {one.get('min_ms', one['ms']):.4f}"
        f" {one.get('tflops') or one['gbps']:.0f} ({one['ours']:.3f}"
        + (f", {one['cudnn']:.3f})" if "cudnn" in one else ")")
        for name, one in row.items()
        if isinstance(one, dict) and "ms" in one
    ]
    if "compiled_s" in row:
        texts.append(f"compiled in {row['compiled_s']:.1f} s")
    return [row["cell"], row["pass"], ", ".join(texts), str(row.get("failed") or "")]


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, seconds=0.3)
    parser.add_argument("--cells", nargs="+", default=[""], help="names, or texts that names have")
    passes = ["forward", "backward", "both"]
    parser.add_argument("--passes", nargs="+", default=passes[::2], choices=passes)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--resume", action="store_true", help="keep the file's rows, and skip them")
    parser.add_argument("--compile", action="store_true", help="compile programs, run none")
    parser.add_argument("--torch", action="store_true", help="PyTorch's kernels too")
    options = parser.parse_args()
    parts = {*options.cells} - {*CELLS}
    names = [one for one in CELLS if one in options.cells or any(part in one for part in parts)]
    results = harness.Results(options.json, is_resumed=options.resume)
    done = {(row["cell"], row["pass"]) for row in results.rows}
    # Before JAX takes most of the memory.
    peers = time_torch(names, options.passes, options.seconds) if options.torch else {}

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for name in names:
            for which in options.passes if "keys" not in CELLS[name][1] else ["forward"]:
                if (name, which) in done:
                    continue
                torch = peers.get((name, which), {})
                run = partial(measured, name, which, options.seconds, options.programs, torch)
                if options.compile:
                    run = partial(compile_alone, name, which, options.programs)
                yield {"cell": name, "pass": which}, run

    heads = ["cell", "pass", "ms, least, TFLOP/s or GB/s (time / ours, / cuDNN)", "failed"]
    return harness.measure_cells(cells(), results, heads, texts_of)


if __name__ == "__main__":
    sys.exit(main())
