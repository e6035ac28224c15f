"""Tensor and sequence parallelism: the collectives of a block within `jax.shard_map`.

Matrices are sharded over the axis `model` (Megatron-LM; Shoeybi et al., 2019, arXiv:1909.08053):
those into heads and into the feed-forward layer by columns, those out of both by rows. So are the
convolutions, gates and norms of a hybrid's mixers, whose recurrences run by heads. Between them
the residual stream is sharded along the sequence (Korthikanti et al., 2022, arXiv:2205.05198). So a
block gathers rows before each product with columns and scatters sums after each with rows, twice
each. Gradients of these are the opposite collectives. With `--sequence_parallel off` all devices
have the whole stream, and all-reduce the sums.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .config import Config

Array = jax.Array
MODEL = "model"


@dataclass(frozen=True)
class Shards:
    """The axes of a mesh that a device's arrays are shards over; none where all are whole."""

    axes: tuple[str, ...] = ()
    # Devices along `model`.
    count: int = 1
    # Whether the residual stream is sharded along the sequence, or whole on each of these devices.
    by_sequence: bool = True

    @staticmethod
    def of(config: Config) -> "Shards":
        """Returns the axes if the mesh has `model`."""
        if config.is_packed:
            return WHOLE
        by_sequence = config.options.sequence_parallel == "on"
        return Shards(tuple(config.mesh), config.mesh[MODEL], by_sequence)

    @property
    def is_whole(self) -> bool:
        """Whether there are no shards."""
        return not self.axes

    @property
    def axis(self) -> str | None:
        """The axis of the mesh that shards rows between products, if any does."""
        return None if self.is_whole or not self.by_sequence else MODEL

    @property
    def has_own_rows(self) -> bool:
        """Whether no other device normalises a device's rows of the residual stream."""
        return self.is_whole or self.by_sequence

    def gather_rows(self, x: Array) -> Array:
        """Returns all tokens, [n, B, T / n, D], of a device's [B, T / n, D]."""
        if self.is_whole:
            return x
        rows: Array
        if self.by_sequence:
            rows = jax.lax.all_gather(x, MODEL)
        else:
            # Its gradient is summed over devices.
            rows = jax.lax.pcast(x, MODEL, to="varying")
        return rows

    def scatter_sum(self, x: Array) -> Array:
        """Returns a device's tokens, [B, T / n, D], of the sum over devices of [n, B, T / n, D]."""
        if self.is_whole:
            return x
        rows: Array = jax.lax.psum_scatter(x, MODEL) if self.by_sequence else jax.lax.psum(x, MODEL)
        return rows

    def join_rows(self, x: Array) -> Array:
        """Returns [B, T, ..] of what has rows as `gather_rows` gives them, [n, B, T / n, ..]."""
        if self.axis is None:
            return x
        rows = jnp.moveaxis(x, 0, 1)
        return rows.reshape(len(rows), -1, *rows.shape[3:])

    def split_rows(self, x: Array) -> Array:
        """Returns [n, B, T / n, ..], as `scatter_sum` takes rows, of [B, T, ..]."""
        if self.axis is None:
            return x
        return jnp.moveaxis(x.reshape(len(x), self.count, -1, *x.shape[2:]), 1, 0)

    def whole_width(self, weight: Array, axis: int) -> Array:
        """Returns a weight with the whole hidden size, which `fsdp` shards."""
        if "fsdp" not in self.axes:
            return weight
        found: Array = jax.lax.all_gather(weight, "fsdp", axis=axis, tiled=True)
        return found

    def heads(self, columns: Array, count: int) -> Array:
        """Returns the columns of the heads that a device's queries attend to.

        `columns` [.., N / n] are a device's of `count` heads. With more devices than heads, a
        device has part of a head, and gets the whole one.
        """
        if count % self.count == 0:
            return columns
        every = jax.lax.all_gather(columns, MODEL, axis=columns.ndim - 1, tiled=True)
        return self.own_head(every, count)

    def own_head(self, columns: Array, count: int, axis: int = -1) -> Array:
        """Returns the columns of the one of `count` heads that a device has, or shares, of all."""
        width = columns.shape[axis] // count
        head = jax.lax.axis_index(MODEL) * count // self.count
        found: Array = jax.lax.dynamic_slice_in_dim(columns, head * width, width, axis)
        return found

    def join(self, columns: Any, heads: dict[str, int], axis: int = -1) -> Array:
        """Returns a device's part of what `packed` made, of columns of so many heads by name.

        Of heads that the devices do not divide, each device has all columns.
        """
        if self.is_whole:
            array: Array = columns[...]
            return array
        parts = [
            columns[name][...]
            if count % self.count == 0
            else self.own_head(columns[name][...], count, axis)
            for name, count in heads.items()
        ]
        return jnp.concatenate(parts, axis)

    def project(self, x: Array, *matrices: Array) -> list[Array]:
        """Returns the products of rows with a device's columns; shards take one gather and GEMM."""
        if self.is_whole:
            return [x @ matrix.astype(x.dtype) for matrix in matrices]
        matrix = self.whole_width(jnp.concatenate(matrices, -1).astype(x.dtype), 0)
        ends = np.cumsum([one.shape[-1] for one in matrices])[:-1]
        return jnp.split(self.join_rows(self.gather_rows(x) @ matrix), ends, axis=-1)

    def project_back(self, x: Array, matrix: Array) -> Array:
        """Returns a device's rows of the sum of all devices' products with rows of a matrix."""
        rows = self.split_rows(x)
        return self.scatter_sum(rows @ self.whole_width(matrix.astype(x.dtype), 1))

    def sum_of_head(self, x: Array, count: int) -> Array:
        """Returns the sum of x [.., 1] over the devices that share one of `count` heads."""
        head = jax.lax.axis_index(MODEL) * count // self.count
        sums = jax.lax.psum(x * jax.nn.one_hot(head, count, dtype=x.dtype), MODEL)
        return self.own_head(sums, count)

    def embed(self, table: Array, tokens: Array, dtype: Any) -> Array:
        """Returns rows [B, T / n, D] of a table [V, D], whose rows and columns are sharded."""
        if self.is_whole:
            return table[tokens].astype(dtype)
        table = self.whole_width(table, 1)
        row = self.split_rows(tokens) - jax.lax.axis_index(MODEL) * len(table)
        is_here = (row >= 0) & (row < len(table))
        found = jnp.where(is_here[..., None], table[jnp.where(is_here, row, 0)], 0)
        return self.scatter_sum(found.astype(dtype))

    def varying(self, x: Array, *, of_stream: bool = False) -> Array:
        """Returns x with a type that varies over all axes: its gradient is summed once, here.

        What is `of_stream` does not vary over devices that have the whole residual stream.
        """
        is_same = of_stream and not self.by_sequence
        axes = tuple(name for name in self.axes if name != MODEL or not is_same)
        if not axes:
            return x
        # The sum has the type of both terms.
        found: Array = x + jax.lax.pcast(jnp.zeros((), x.dtype), axes, to="varying")
        return found


WHOLE = Shards()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def embed_on_mesh(place: NamedSharding, dtype: Any, table: Array, tokens: Array) -> Array:
    """Returns rows [B, T, D] of a table [V, D], which lie as `place` says.

    Devices gather the cotangents of all rows, where `fsdp` does not shard the table and they are
    fewer bytes: sums [V, D] would be reduced when nothing is left to compute beside.
    """
    rows: Array = jax.lax.with_sharding_constraint(table[tokens].astype(dtype), place)
    return rows


def _embed_forward(place: NamedSharding, dtype: Any, *arrays: Array) -> tuple[Array, Any]:
    return embed_on_mesh(place, dtype, *arrays), arrays


def _embed_backward(place: NamedSharding, _: Any, arrays: Any, rows: Array) -> tuple[Array, None]:
    table, tokens = arrays
    is_less = rows.size * rows.dtype.itemsize < table.size * table.dtype.itemsize
    if is_less and "fsdp" not in place.mesh.axis_names:
        every = NamedSharding(place.mesh, P())
        rows, tokens = jax.lax.with_sharding_constraint((rows, tokens), every)
    return jnp.zeros_like(table).at[tokens].add(rows.astype(table.dtype)), None


embed_on_mesh.defvjp(_embed_forward, _embed_backward)


def packed(array: Array, widths: dict[str, int], shards: Shards, axis: int = -1) -> Any:
    """Returns the parameter of packed columns, or one for each name where devices have shards.

    Even shards of the packed columns would not have some of every name.
    """
    if shards.is_whole:
        return nnx.Param(array)
    ends = np.cumsum([*widths.values()])[:-1]
    parts = zip(widths, jnp.split(array, ends, axis=axis), strict=True)
    return nnx.Dict({name: nnx.Param(part) for name, part in parts})


def save_all_but_weights(_: Any, *__: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` by which the backward pass gathers weights again.

    What devices gather over `fsdp` is weights alone.
    """
    return params.get("axis_name") != ("fsdp",)
