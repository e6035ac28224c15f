"""Exports programs of measured rows in docs/internals/tpu-cross-entropy.md, tiled as they were.

    python old_kernel.py FOLDER T V BLOCK_SIZE TIME_BLOCK...

Writes FOLDER/old_<TIME_BLOCK>.json and .mlirbc; a TIME_BLOCK of 1 is the dense program, and 0 the
present kernel, whose logits enter the program as the old one's did. The old one is a grid of tiles
[TIME_BLOCK, BLOCK_SIZE], first an online softmax over each block of rows, then, over the same
tiles again, the gradient. It is what the estimates of xentile-tools are held against, and nothing
that anybody should use.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import use_abstract_mesh
from pallas_bridge._src.compat import abstract_tpu
from pallas_bridge._src.cross_entropy.tpu_plan import ACROSS_TILE

from pallas_bridge import cross_entropy


def valid(vocab: int, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The columns of this tile, and which of them there are."""
    columns = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) + pl.program_id(1) * z.shape[1]
    return columns, columns < vocab


def forward(vocab: int, logits, labels, loss, lse, highest, total, picked) -> None:  # noqa: ANN001 (references)
    """Keeps a maximum, a sum and the label's logit of each row over the tiles of its block."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _() -> None:
        highest[...] = jnp.full_like(highest, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        picked[...] = jnp.zeros_like(picked)

    z = logits[...].astype(jnp.float32)
    columns, inside = valid(vocab, z)
    z = jnp.where(inside, z, -jnp.inf)
    peak = jnp.maximum(highest[...], jnp.max(z, axis=1, keepdims=True))
    total[...] = total[...] * jnp.exp(highest[...] - peak) + jnp.sum(
        jnp.exp(z - peak), axis=1, keepdims=True
    )
    highest[...] = peak
    picked[...] += jnp.sum(jnp.where(columns == labels[...], z, 0.0), axis=1, keepdims=True)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _() -> None:
        lse[...] = highest[...] + jnp.log(total[...])
        loss[...] = lse[...] - picked[...]


def backward(vocab: int, logits, labels, lse, factors, dlogits) -> None:  # noqa: ANN001 (references)
    """Gradient of a tile."""
    z = logits[...].astype(jnp.float32)
    columns, _ = valid(vocab, z)
    p = jnp.exp(z - lse[...])
    one = (columns == labels[...]).astype(jnp.float32)
    dlogits[...] = ((p - one) * factors[...]).astype(dlogits.dtype)


def main(time_block: int, block_size: int, logits: jax.Array, labels: jax.Array):  # noqa: ANN201 (arrays)
    """The mean loss and its gradient, ignored tokens left out."""
    tokens, vocab = logits.shape
    grid = (tokens // time_block, pl.cdiv(vocab, block_size))
    tiles = pl.BlockSpec((time_block, block_size), lambda row, column: (row, column))
    column = pl.BlockSpec((time_block, 1), lambda row, column: (row, 0))
    number = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    loss, lse = pl.pallas_call(
        partial(forward, vocab),
        grid=grid,
        in_specs=[tiles, column],
        out_specs=[column, column],
        out_shape=[number, number],
        scratch_shapes=[pltpu.VMEM((time_block, 1), jnp.float32)] * 3,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=100 << 20),
        name="xentile_cross_entropy_forward",
    )(logits, labels[:, None])
    counted = (labels != -100).astype(jnp.float32)[:, None]
    factors = counted / jnp.maximum(jnp.sum(counted), 1.0)
    dlogits = pl.pallas_call(
        partial(backward, vocab),
        grid=grid,
        in_specs=[tiles, column, column, column],
        out_specs=tiles,
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=100 << 20),
        name="xentile_cross_entropy_backward",
    )(logits, labels[:, None], lse, factors)
    return jnp.sum(loss * factors), dlogits


def dense(logits: jax.Array, labels: jax.Array):  # noqa: ANN201 (arrays)
    """The same as usual JAX code has it."""

    def loss(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits.astype(jnp.float32))
        counted = labels != -100
        picked = jnp.take_along_axis(logps, jnp.where(counted, labels, 0)[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(counted, picked, 0.0)) / jnp.maximum(jnp.sum(counted), 1)

    return jax.value_and_grad(loss)(logits)


def present(logits: jax.Array, labels: jax.Array):  # noqa: ANN201 (arrays)
    """The same by the present kernel."""
    return jax.value_and_grad(partial(cross_entropy, implementation="pallas"))(logits, labels)


def write(folder: Path, tokens: int, vocab: int, block_size: int, time_block: int) -> None:
    """Writes one program and its manifest."""
    arguments = [
        jax.ShapeDtypeStruct((tokens, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    ]
    functions = {0: present, 1: dense}
    function = jax.jit(functions.get(time_block, partial(main, time_block, block_size)))
    with use_abstract_mesh(abstract_tpu("TPU v6 lite")):
        exported = export.export(function, platforms=["tpu"])(*arguments)
    tile = (time_block, block_size) if time_block else ACROSS_TILE
    stem = folder / f"old_{time_block}"
    bytecode = exported.mlir_module_serialized
    stem.with_suffix(".mlirbc").write_bytes(bytecode)
    labels = {"dtype": "i32", "shape": [tokens]}
    matrix = {"dtype": "bf16", "shape": [tokens, vocab]}
    manifest = {
        "manifest_version": 1,
        "op": "cross_entropy",
        "program": "value_and_grad",
        "file": stem.with_suffix(".mlirbc").name,
        "sha256": hashlib.sha256(bytecode).hexdigest(),
        "arguments": [matrix, labels],
        "results": [{"dtype": "f32", "shape": []}, matrix],
        "tile": dict(zip(("time_block", "block_size"), tile, strict=True)),
        "options": {"reduction": "mean", "ignore_index": -100},
        "platforms": ["tpu"],
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    stem.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    folder, *extents = sys.argv[1:]
    tokens, vocab, block_size, *time_blocks = map(int, extents)
    for time_block in time_blocks:
        write(Path(folder), tokens, vocab, block_size, time_block)
