"""Exports a small Pallas kernel of cross-entropy with its manifest, for tests to load.

    python export_kernel.py FOLDER tpu|cpu T V TIME_BLOCK... [--per-token | --wrong]

Writes FOLDER/PLATFORM_<TIME_BLOCK>.json and .mlirbc for each time_block: mean loss and dlogits of
f32 logits [T, V], a tile of whole rows at a time, ignored tokens left out. For the CPU it is what
Pallas' interpreter does that is exported. With --per-token it is plain JAX: outputs of each token
and dlogits for cotangents of these. With --wrong one entry of dlogits is off.
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


def wrong(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The program with the gradient of one logit, in row 3 and column 5, a thousandth off."""
    loss, dlogits = value_and_grad(logits.shape[0], True)(logits, labels)
    return loss, dlogits.at[3, 5].mul(1.001)


def per_token(
    logits: jax.Array, labels: jax.Array, *cotangents: jax.Array
) -> tuple[jax.Array, ...]:
    """Loss, logps and lse of each token, and dlogits for cotangents of these."""
    counted = labels != IGNORE_INDEX

    def outputs(z: jax.Array) -> tuple[jax.Array, ...]:
        lse = jax.nn.logsumexp(z, axis=1)
        at_label = jnp.arange(z.shape[1]) == labels[:, None]
        picked = jnp.sum(jnp.where(at_label, z, 0.0), axis=1)
        loss = jnp.where(counted, lse - picked, 0.0)
        return loss, -loss, lse

    results, vjp = jax.vjp(outputs, logits)
    (dlogits,) = vjp(tuple(jnp.where(counted, cotangent, 0.0) for cotangent in cotangents))
    return *results, dlogits


def write(
    folder: Path, platform: str, tokens: int, vocab: int, time_block: int, variant: str | None
) -> None:
    """Writes one program and its manifest."""
    arguments = [
        jax.ShapeDtypeStruct((tokens, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    ]
    name, reduction = "value_and_grad", "mean"
    main = value_and_grad(time_block, platform == "cpu")
    if variant == "--per-token":
        name, reduction, main = "forward_and_backward", "none", per_token
        arguments += [jax.ShapeDtypeStruct((tokens,), jnp.float32)] * 3
    elif variant == "--wrong":
        main = wrong
    exported = export.export(jax.jit(main, keep_unused=True), platforms=[platform])(*arguments)
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
        "program": name,
        "file": stem.with_suffix(".mlirbc").name,
        "sha256": hashlib.sha256(bytecode).hexdigest(),
        "arguments": types[0],
        "results": types[1],
        "tile": {"time_block": time_block, "block_size": vocab},
        "options": {"reduction": reduction, "ignore_index": IGNORE_INDEX},
        "platforms": list(exported.platforms),
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    stem.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    folder, platform, *extents = (part for part in sys.argv[1:] if not part.startswith("--"))
    variant = next((part for part in sys.argv[1:] if part.startswith("--")), None)
    tokens, vocab, *time_blocks = map(int, extents)
    for time_block in time_blocks:
        write(Path(folder), platform, tokens, vocab, time_block, variant)
