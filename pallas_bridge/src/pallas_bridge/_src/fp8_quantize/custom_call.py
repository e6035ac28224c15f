"""FP8 quantisation by the library's kernels.

Where an axis is a whole number of blocks it is seen as two, so that blocks are among the tokens and
a mesh may shard between them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import spec_of
from ..bound import Bound
from ..custom_call import bind, declared_call, dense_over
from . import reference
from .declaration import OPERATION
from .options import Options

# Columns that have an amax of their own where a whole array has one scale.
PART = 128


def _bind(
    options: Options,
    name: str,
    *arrays: jax.Array,
    block: tuple[int, int | None] | None = None,
    dense: Any,
    is_whole: bool = False,
) -> tuple[jax.Array, ...]:
    rows, columns = block or (1, None)
    blocks = {
        "block_rows": rows,
        "block_columns": columns,
        "power_of_two": options.power_of_two,
    }
    # Rows without blocks of columns, whose columns devices may share.
    may_share_columns = not is_whole and rows == 1 and columns is None
    call = declared_call(
        OPERATION,
        f"xentile_fp8_quantize{name}",
        {} if block is None else blocks,
        dtypes={"values": options.dtype},
        implementation=options.implementation,
        dense=dense,
        dense_if_sharded=is_whole,
        on_shards=Bound(dense_over, dense) if may_share_columns else None,
    )
    return bind(call, *arrays)


def quantize(options: Options, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values and scales by row or by block."""
    rows, columns = reference.blocks(options)
    if columns is not None and rows == 1 and _is_whole_blocks(x.shape[-1], columns):
        # Each block a row.
        parts = split(x, x.ndim - 1, columns, options.granularity)
        by_row = Options(
            options.dtype, "row", columns, options.power_of_two, options.implementation
        )
        values, scales = quantize(by_row, parts)
        return joined(values, x), scales
    dense = Bound(reference.quantize, options)
    if rows == 1 or not _is_whole_blocks(x.shape[-2], rows):
        values, scales = _bind(options, "", x, block=(rows, columns), dense=dense)
        return values, scales
    # Each row of blocks a matrix.
    bands = split(x, x.ndim - 2, rows, options.granularity)
    values, scales = _bind(options, "", bands, block=(rows, columns), dense=dense)
    return joined(values, x), scales.squeeze(-2)


def quantize_transposed(options: Options, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values and scales of x and of the transposed copy."""
    dense, block = Bound(reference.quantize_transposed, options), reference.blocks(options)
    return _bind(options, "_transposed", x, block=block, dense=dense, is_whole=True)


def amax(options: Options, x: jax.Array) -> jax.Array:
    """Returns amax of x."""
    dense = Bound(reference.amax_of_rows, options)
    (found,) = _bind(options, "_amax", _parts(x), dense=dense)
    return jnp.max(found, initial=0)


def scaled(options: Options, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values by a given scale, and amax of x."""
    dense = Bound(reference.scaled, options)
    values, most = _bind(options, "_scaled", _parts(x), scale, dense=dense)
    return joined(values, x), jnp.max(most, initial=0)


def scaled_transposed(options: Options, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values by a given scale, amax of x, and the transposed copy."""
    if any(spec_of(jax.typeof(x))):
        values, most = scaled(options, x, scale)
        return values, most, jnp.swapaxes(values, -1, -2)
    dense = Bound(reference.scaled_transposed, options)
    values, most, transposed = _bind(
        options, "_scaled_transposed", x, scale, dense=dense, is_whole=True
    )
    return values, jnp.max(most, initial=0), transposed


def _parts(x: jax.Array) -> jax.Array:
    """Returns x with its rows split into parts, if that leaves none over."""
    if not _is_whole_blocks(x.shape[-1], PART):
        return x
    return split(x, x.ndim - 1, PART, "tensor")


def _is_whole_blocks(extent: Any, block: int) -> bool:
    return isinstance(extent, int) and extent > 0 and extent % block == 0


def split(x: jax.Array, axis: int, block: int, granularity: str) -> jax.Array:
    """Returns x with an axis as two: of blocks, which may be sharded over a mesh, and within them.

    Raises:
        ValueError: a mesh of explicit axes shards within a block.
    """
    count = x.shape[axis] // block
    shape = (*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    sharding = getattr(jax.typeof(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return x.reshape(shape)
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    names = spec[axis] or ()
    names = names if isinstance(names, tuple) else (names,)
    parts = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
    if count % parts:
        raise ValueError(
            f"{OPERATION}: axis {axis} of x {x.shape} is split into {parts} parts, which are no "
            f"whole blocks of {block} (granularity is {granularity!r}): reshard it first"
        )
    out = PartitionSpec(*spec[: axis + 1], None, *spec[axis + 1 :])
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=out))


def joined(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns values in the shape of x, sharded as that is."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if values.shape == x.shape:
        return values
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return values.reshape(x.shape)
    return jax.lax.reshape(values, x.shape, out_sharding=sharding)
