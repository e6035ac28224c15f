"""Operations inside a jitted block of a transformer: kernels and XLA's program, and the default.

    python benches/peers/blocks.py --json FILE [--variants NAME ...] [--write]

A block is an operation with its surroundings in a layer: GEMMs before and after it, and the
residual. It is timed forward, and forward and backward with all gradients, relative to XLA's time
of the same block; temporaries are XLA's count of bytes. configs/tuned/implementations.cuda.yaml
says what `implementation=None` runs on NVIDIA GPUs. --write rewrites it: a kernel if the geometric
mean over shapes of the time of forward and backward is below 1. Within NOISE of 1 the table's
choice stays.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import yaml
from pallas_bridge._src.activation.custom_call import activation
from pallas_bridge._src.activation.declaration import OPERATION as ACTIVATION
from pallas_bridge._src.activation.options import Options
from pallas_bridge._src.rope.declaration import OPERATION as ROPE

import pallas_bridge

TABLE = harness.ROOT / "configs/tuned/implementations.cuda.yaml"
# Names of the table's implementations, as `implementation=` has them.
NAMES = {"kernel": "custom_call", "xla": "reference"}
NOISE = 0.01
HEADS = ["operation", "variant", "tokens x D x F", "XLA forward ms", "kernel / XLA", "XLA again"]
HEADS += ["XLA both ms", "kernel / XLA", "XLA again", "bytes of temporaries, kernel and XLA"]
HEAD = 128


class Shape(NamedTuple):
    """Tokens, hidden size, and columns of the activation."""

    tokens: int
    width: int
    ffn: int


SHAPES = (Shape(8192, 4096, 11008), Shape(32768, 896, 4864), Shape(16384, 2048, 6144))
# A block of arrays x [T, D], and matrices; returns an array [T, D].
Block = Callable[..., jax.Array]


def draw(at: int, *shape: int) -> jax.Array:
    """Normal bfloat16 numbers; a matrix [D, ..] is scaled so that GEMMs keep the deviation."""
    scale = shape[0] ** -0.5 if at else 1.0
    found: jax.Array = jax.random.normal(jax.random.key(at), shape, jnp.bfloat16)
    return found * jnp.bfloat16(scale)


def make_norm_block(function: Any, shape: Shape, name: str) -> tuple[Block, list[jax.Array]]:
    """A residual, a norm of the sum and a GEMM, to which the sum is added."""

    def block(x: Any, branch: Any, weight: Any, into: Any) -> jax.Array:
        y, total = function(x, weight, residual=branch, implementation=name)
        return (y @ into).astype(x.dtype) + total

    def block_without(x: Any, branch: Any, weight: Any, into: Any) -> jax.Array:
        total = x + branch
        y = function(total, weight, jnp.zeros_like(weight), implementation=name)
        return (y @ into).astype(x.dtype) + total

    is_rms = function is pallas_bridge.rms_norm
    given = [draw(0, shape.tokens, shape.width), draw(0, shape.tokens, shape.width)]
    weights = [jnp.ones(shape.width, jnp.float32), draw(1, shape.width, shape.width)]
    return (block if is_rms else block_without), given + weights


def make_activation_block(
    options: Options, shape: Shape, name: str
) -> tuple[Block, list[jax.Array]]:
    """A gated or plain MLP with its residual."""
    options = replace(options, implementation=name)
    packs = 1 if options.layout == "single" else 2

    def block(x: Any, up: Any, down: Any) -> jax.Array:
        return x + activation(options, (x @ up).astype(x.dtype)) @ down

    arrays = [draw(0, shape.tokens, shape.width), draw(1, shape.width, packs * shape.ffn)]
    return block, [*arrays, draw(2, shape.ffn, shape.width)]


def make_rope_block(is_interleaved: bool, shape: Shape, name: str) -> tuple[Block, list[jax.Array]]:
    """Projections to queries and keys, their rotation, and a GEMM of each, as in attention."""
    heads = max(shape.width // HEAD, 1)

    def block(x: Any, of_q: Any, of_k: Any, *out: Any) -> jax.Array:
        q, k = ((x @ one).reshape(4, -1, heads, HEAD) for one in (of_q, of_k))
        q, k = pallas_bridge.rope(q, k, interleaved=is_interleaved, implementation=name)
        return x + sum(
            one.reshape(x.shape[0], -1) @ of for one, of in zip((q, k), out, strict=True)
        )

    projections = [draw(at, shape.width, heads * HEAD) for at in (1, 2)]
    out = [draw(at, heads * HEAD, shape.width) for at in (3, 4)]
    return block, [draw(0, shape.tokens, shape.width), *projections, *out]


def variants() -> dict[tuple[str, str], Callable[[Shape, str], tuple[Block, list[jax.Array]]]]:
    """Makers of the block of each operation and variant, by both names."""
    found: dict[tuple[str, str], Any] = {
        ("rms_norm", ""): partial(make_norm_block, pallas_bridge.rms_norm),
        ("layer_norm", ""): partial(make_norm_block, pallas_bridge.layer_norm),
    }
    for variant in ROPE.variants:
        found[ROPE.name, variant] = partial(make_rope_block, variant == "interleaved")
    for variant in ACTIVATION.variants:
        options: Any = variant.split()
        found[ACTIVATION.name, variant] = partial(make_activation_block, Options(*options))
    return found


def compiled(
    make: Callable[[Shape, str], tuple[Block, list[jax.Array]]], shape: Shape, which: str, name: str
) -> tuple[Callable[[], Any], int]:
    """The start of a block by an implementation, and the bytes of its temporaries."""
    block, arrays = make(shape, name)
    dy = draw(0, shape.tokens, shape.width)

    def both(dy: Any, *arrays: Any) -> Any:
        y, vjp = jax.vjp(block, *arrays)
        return y, vjp(dy)

    function, given = (both, (dy, *arrays)) if which == "both" else (block, (*arrays,))
    program = jax.jit(function).lower(*given).compile()
    return (lambda: program(*given)), program.memory_analysis().temp_size_in_bytes


def measured(make: Any, shape: Shape, seconds: float, pool: Any) -> harness.Row:
    """Measures times relative to XLA's, forward and both, and bytes of temporaries."""
    row: harness.Row = {}
    compiling = {
        which: {one: pool.submit(compiled, make, shape, which, NAMES[one]) for one in NAMES}
        for which in ("forward", "both")
    }
    for which, programs in compiling.items():
        starts = {one: program.result()[0] for one, program in programs.items()}
        starts["again"] = starts["xla"]
        found = harness.compared(starts, seconds, calls=1, baseline="xla", ratio="time")
        held = {one: program.result()[1] for one, program in programs.items()}
        row[which] = {
            "xla_ms": found["xla"]["ms"],
            "time": found["kernel"]["time"],
            "again": found["again"]["time"],
            "temporaries": [held["kernel"], held["xla"]],
        }
    return row


def write(rows: list[dict[str, Any]], device: str) -> None:
    """Rewrites the table from rows; lines of operations that were not measured stay."""
    text = TABLE.read_text(encoding="utf-8")
    table = {(line["operation"], line["variant"]): line for line in yaml.safe_load(text) or []}
    for name in dict.fromkeys((row["operation"], row["variant"]) for row in rows):
        of = [row for row in rows if (row["operation"], row["variant"]) == name]
        time = geometric_mean([row["both"]["time"] for row in of])
        chosen = "kernel" if time < 1 else "xla"
        if abs(time - 1) <= NOISE and name in table:
            chosen = table[name]["implementation"]
        held = [row["both"]["temporaries"] for row in of]
        table[name] = {
            "operation": name[0],
            "variant": name[1],
            "implementation": chosen,
            "forward": round(geometric_mean([row["forward"]["time"] for row in of]), 3),
            "both": round(time, 3),
            "temporaries": round(geometric_mean([(a + 1) / (b + 1) for a, b in held]), 3),
            "device": device.split(",")[0],
        }
    lines = [f"- {json.dumps(line)}" for _, line in sorted(table.items())]
    head = text.split("\n- ")[0].rstrip()
    TABLE.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")


def main() -> int:
    """Measures, prints a line and writes JSON after every cell, and last the table of choices."""
    parser = harness.parser(__doc__, seconds=0.3)
    parser.add_argument("--variants", nargs="+", help="OPERATION or 'OPERATION VARIANT'; all")
    parser.add_argument("--write", action="store_true", help="rewrite the table of choices")
    parser.add_argument("--rows", type=Path, help="take the rows of that JSON; measure nothing")
    options = parser.parse_args()
    results, device = harness.Results(options.json), harness.about()["device"]
    failed = 0
    if options.rows:
        kept = json.loads(options.rows.read_text(encoding="utf-8"))
        results.rows, device = kept["results"], kept["about"]["device"]
    else:
        with ThreadPoolExecutor(4) as pool:
            cells = [
                (
                    {"operation": name[0], "variant": name[1], "shape": [*shape]},
                    partial(measured, make, shape, options.seconds, pool),
                )
                for name, make in variants().items()
                for shape in SHAPES
                if not options.variants or {name[0], " ".join(name)} & {*options.variants}
            ]
            failed = harness.measure_cells(cells, results, HEADS, texts_of)
    if options.write:
        write([row for row in results.rows if "error" not in row], device)
    return failed


def texts_of(row: harness.Row) -> list[str]:
    """The cells of a row's line."""
    line = [row["operation"], row["variant"], " x ".join(map(str, row["shape"]))]
    for which in ("forward", "both"):
        found = row.get(which)
        line.append(f"{found['xla_ms']:.2f}" if found else "")
        line += [f"{found[key]:.3f}" if found else "" for key in ("time", "again")]
    return [*line, str(row["both"]["temporaries"]) if "both" in row else ""]


if __name__ == "__main__":
    sys.exit(main())
