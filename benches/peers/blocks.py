"""Operations inside a jitted block of a transformer: ours beside XLA's own program, and which runs.

    python benches/peers/blocks.py --json FILE [--variants NAME ...] [--write]

A block is what stands around the operation in a layer: products before and after it, and the
residual. It is timed forward, and forward and backward with all gradients, in XLA's time of the
same block, taking turns (turns.py); temporaries are XLA's count of bytes. What
`implementation=None` runs on NVIDIA GPUs is in configs/tuned/implementations.cuda.yaml, which
--write makes anew: a kernel where the geometric mean of forward and backward over shapes is below
1. Where it is within NOISE of 1, what the table had stays.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import yaml
from pallas_bridge._src.activation.custom_call import activation
from pallas_bridge._src.activation.declaration import OPERATION as ACTIVATION
from pallas_bridge._src.activation.options import Options
from pallas_bridge._src.rope.declaration import OPERATION as ROPE
from turns import about, rounds_of, save

import pallas_bridge

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "configs/tuned/implementations.cuda.yaml"
# Names of the table's implementations, as `implementation=` has them.
NAMES = {"kernel": "custom_call", "xla": "reference"}
NOISE = 0.01
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
    """Normal numbers in bfloat16; of a matrix [D, ..] such that products keep their deviation."""
    scale = shape[0] ** -0.5 if at else 1.0
    found: jax.Array = jax.random.normal(jax.random.key(at), shape, jnp.bfloat16)
    return found * jnp.bfloat16(scale)


def of_norm(function: Any, shape: Shape, name: str) -> tuple[Block, list[jax.Array]]:
    """A residual, a norm of the sum and a product, which the sum is added to."""

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


def of_activation(options: Options, shape: Shape, name: str) -> tuple[Block, list[jax.Array]]:
    """A gated or plain MLP with its residual."""
    options = replace(options, implementation=name)
    packs = 1 if options.layout == "single" else 2

    def block(x: Any, up: Any, down: Any) -> jax.Array:
        return x + activation(options, (x @ up).astype(x.dtype)) @ down

    arrays = [draw(0, shape.tokens, shape.width), draw(1, shape.width, packs * shape.ffn)]
    return block, [*arrays, draw(2, shape.ffn, shape.width)]


def of_rope(is_interleaved: bool, shape: Shape, name: str) -> tuple[Block, list[jax.Array]]:
    """Projections to queries and keys, their rotation, and a product of each, as attention has."""
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
    """What makes the block of each operation and variant, by both names."""
    found: dict[tuple[str, str], Any] = {
        ("rms_norm", ""): partial(of_norm, pallas_bridge.rms_norm),
        ("layer_norm", ""): partial(of_norm, pallas_bridge.layer_norm),
    }
    for variant in ROPE.variants:
        found[ROPE.name, variant] = partial(of_rope, variant == "interleaved")
    for variant in ACTIVATION.variants:
        options: Any = variant.split()
        found[ACTIVATION.name, variant] = partial(of_activation, Options(*options))
    return found


def compiled(
    make: Callable[[Shape, str], tuple[Block, list[jax.Array]]], shape: Shape, which: str, name: str
) -> tuple[Callable[[], Any], int]:
    """What runs a block by an implementation, and the bytes of its temporaries."""
    block, arrays = make(shape, name)
    dy = draw(0, shape.tokens, shape.width)

    def both(dy: Any, *arrays: Any) -> Any:
        y, pull = jax.vjp(block, *arrays)
        return y, pull(dy)

    function, given = (both, (dy, *arrays)) if which == "both" else (block, (*arrays,))
    program = jax.jit(function).lower(*given).compile()
    return (lambda: program(*given)), program.memory_analysis().temp_size_in_bytes


def measured(
    name: tuple[str, str], make: Any, shape: Shape, seconds: float, pool: Any
) -> dict[str, Any]:
    """A row: ours in XLA's time, forward and both, and ours in XLA's bytes of temporaries."""
    row: dict[str, Any] = {"operation": name[0], "variant": name[1], "shape": [*shape]}
    compiling = {
        which: {one: pool.submit(compiled, make, shape, which, NAMES[one]) for one in NAMES}
        for which in ("forward", "both")
    }
    for which, programs in compiling.items():
        runs = {one: program.result()[0] for one, program in programs.items()}
        found = rounds_of({**runs, "again": runs["xla"]}, seconds, calls=1, against="xla")
        held = {one: program.result()[1] for one, program in programs.items()}
        row[which] = {
            "xla_ms": 1e3 * found["xla"][0],
            "time": found["kernel"][1],
            "again": found["again"][1],
            "temporaries": [held["kernel"], held["xla"]],
        }
    return row


def write(rows: list[dict[str, Any]], device: str) -> None:
    """Makes the table anew of rows, which lines keep that were not measured."""
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


def main() -> None:
    """Measures, prints a line a cell, writes JSON after each, and at last the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variants", nargs="+", help="OPERATION or 'OPERATION VARIANT'; all")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each pass of a cell")
    parser.add_argument("--write", action="store_true", help="makes the table of choices anew")
    parser.add_argument("--rows", type=Path, help="of that JSON, in place of measuring")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    device = ""
    if options.rows:
        kept = json.loads(options.rows.read_text(encoding="utf-8"))
        rows, device = kept["results"], kept["about"]["device"]
    else:
        with ThreadPoolExecutor(4) as pool:
            for name, make in variants().items():
                if options.variants and not {name[0], " ".join(name)} & {*options.variants}:
                    continue
                for shape in SHAPES:
                    row = measured(name, make, shape, options.seconds, pool)
                    rows.append(row)
                    told = " ".join(
                        f"{which} {row[which]['time']:.3f} of {row[which]['xla_ms']:.2f} ms "
                        f"(again {row[which]['again']:.3f})"
                        for which in ("forward", "both")
                    )
                    print(*name, *shape, told, row["both"]["temporaries"], flush=True)
                    save(options.json, rows)
    if options.write:
        write(rows, device or about()["device"])


if __name__ == "__main__":
    main()
