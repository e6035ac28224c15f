"""Exports a small Pallas kernel of cross-entropy with its manifest, for tests to load.

    python export_kernel.py FOLDER tpu|cpu T V TIME_BLOCK...

Writes FOLDER/PLATFORM_<TIME_BLOCK>.json and .mlirbc for each time_block: mean loss and dlogits of
f32 logits [T, V], a tile of whole rows at a time, ignored tokens left out. For the CPU it is what
Pallas' interpreter does that is exported.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental import pallas as pl

IGNORE_INDEX = -100


def kernel(logits, labels, factors, losses, dlogits):  # noqa: ANN001, ANN201 (references)
    """Losses and gradient of the rows of a tile, for the factors of their losses."""
    z = logits[...]
    at_label = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) == labels[...]
    highest = jnp.max(z, axis=1, keepdims=True)
    exponentials = jnp.exp(z - highest)
    total = jnp.sum(exponentials, axis=1, keepdims=True)
    picked = jnp.sum(jnp.where(at_label, z, 0.0), axis=1, keepdims=True)
    losses[...] = (highest + jnp.log(total) - picked) * factors[...]
    dlogits[...] = (exponentials / total - at_label.astype(jnp.float32)) * factors[...]


def value_and_grad(time_block: int, interpret: bool):  # noqa: ANN201 (a function of arrays)
    """The program: logits [T, V] and labels [T] to the mean loss and its gradient."""

    def main(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, vocab = logits.shape
        counted = (labels != IGNORE_INDEX).astype(jnp.float32)
        factors = counted / jnp.maximum(jnp.sum(counted), 1.0)
        column = pl.BlockSpec((time_block, 1), lambda tile: (tile, 0))
        rows = pl.BlockSpec((time_block, vocab), lambda tile: (tile, 0))
        losses, dlogits = pl.pallas_call(
            kernel,
            grid=(tokens // time_block,),
            in_specs=[rows, column, column],
            out_specs=[column, rows],
            out_shape=[
                jax.ShapeDtypeStruct((tokens, 1), jnp.float32),
                jax.ShapeDtypeStruct((tokens, vocab), jnp.float32),
            ],
            name="cross_entropy_rows",
            interpret=interpret,
        )(logits, labels[:, None], factors[:, None])
        return jnp.sum(losses), dlogits

    return main


def write(folder: Path, platform: str, tokens: int, vocab: int, time_block: int) -> None:
    """Writes one program and its manifest."""
    arguments = [
        jax.ShapeDtypeStruct((tokens, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    ]
    function = jax.jit(value_and_grad(time_block, platform == "cpu"), keep_unused=True)
    exported = export.export(function, platforms=[platform])(*arguments)
    stem = folder / f"{platform}_{time_block}"
    bytecode = exported.mlir_module_serialized
    stem.with_suffix(".mlirbc").write_bytes(bytecode)
    names = {"float32": "f32", "int32": "i32"}
    types = [
        [{"dtype": names[str(aval.dtype)], "shape": list(aval.shape)} for aval in avals]
        for avals in (exported.in_avals, exported.out_avals)
    ]
    manifest = {
        "manifest_version": 1,
        "op": "cross_entropy",
        "program": "value_and_grad",
        "file": stem.with_suffix(".mlirbc").name,
        "sha256": hashlib.sha256(bytecode).hexdigest(),
        "arguments": types[0],
        "results": types[1],
        "tile": {"time_block": time_block, "block_size": vocab},
        "options": {"reduction": "mean", "ignore_index": IGNORE_INDEX},
        "platforms": list(exported.platforms),
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    stem.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    folder, platform, *extents = sys.argv[1:]
    tokens, vocab, *time_blocks = map(int, extents)
    for time_block in time_blocks:
        write(Path(folder), platform, tokens, vocab, time_block)
