"""Products of hidden states, logits and the output matrix, whichever way that lies in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import of_rank
from ..compat import varying_axes

# Columns of the vocabulary in a part of a product.
BLOCK = 1024
FLOAT32 = np.dtype(np.float32)

T = TypeVar("T")


def operand_dtype(hidden: Any, weight: Any) -> Any:
    """Returns the dtype that products take: the narrower one of both arrays."""
    return min(hidden.dtype, weight.dtype, key=lambda dtype: int(dtype.itemsize))


def operands(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns hidden and weight as products take them: the wider one is rounded."""
    dtype = operand_dtype(hidden, weight)
    return hidden.astype(dtype), weight.astype(dtype)


def without_rows(idle: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` [N, ..] with zeros for tokens that are idle [N].

    Their gradient is 0, which times a NaN would be NaN.
    """
    return jnp.where(idle[:, None], jnp.zeros((), rows.dtype), rows)


def blank(
    like: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns zeros of `shape`, or of the shape of `like`, for a loop to fill.

    Within `shard_map` they vary over the axes that `like` varies over, as what fills them does.
    """
    zeros = jnp.zeros(like.shape if shape is None else shape, dtype)
    axes = tuple(sorted(varying_axes(jax.typeof(like))))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def holds_all(chunk: int, total: Any) -> bool:
    """Whether a chunk holds all of `total`, which may be symbolic: then nobody knows."""
    return isinstance(total, int) and chunk >= total


def each(total: Any, chunk: int, body: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """Applies body(first, count, carry) to every chunk, the last of which may be shorter.

    A symbolic total is a multiple of the chunk.
    """
    whole, rest = divmod(total, chunk)
    if whole == 1:
        carry = body(0, chunk, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda n, one: body(n * chunk, chunk, one), carry)
    return body(whole * chunk, rest, carry) if rest else carry


@dataclass(frozen=True)
class Products:
    """The three products, for hidden [N, D] and a weight whose axis `vocab_axis` is V.

    Both are of one dtype, that of `operands`. Sums are f32, rounded once to the dtype that is asked
    for.
    """

    vocab_axis: int
    # Whether XLA compiles each product, and what else makes a token's numbers, as if nothing stood
    # around it, so that a chunk gives the same bits beside others, in a loop, and alone. Not so the
    # sums of the weight's gradient, which products may add to where they lie.
    alone: bool = False

    def barrier(self, arrays: T) -> T:
        """Returns arrays, where `alone` such that what makes them and what takes them don't fuse.

        XLA takes barriers away after fusion, and after it has chosen how products are made.
        """
        fenced: T = jax.lax.optimization_barrier(arrays) if self.alone else arrays
        return fenced

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Returns hidden x weight + bias [N, V] in f32."""
        z = self.barrier(self._dot(hidden, weight, 1, 1 - self.vocab_axis, FLOAT32))
        return z if bias is None else z + of_rank(bias.astype(FLOAT32), z)

    def of_hidden(self, dlogits: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
        """Returns the gradient of hidden [N, D]; dlogits are rounded to the dtype of `weight`."""
        dlogits = dlogits.astype(weight.dtype)
        return self.barrier(self._dot(dlogits, weight, 1, self.vocab_axis, dtype))

    def of_weight(self, dlogits: jax.Array, hidden: jax.Array, dtype: Any) -> jax.Array:
        """Returns the gradient of the weight, lying as the weight does; dlogits are rounded too."""
        dlogits = dlogits.astype(hidden.dtype)
        if self.vocab_axis == 0:
            return self._dot(dlogits, hidden, 0, 0, dtype)
        return self._dot(hidden, dlogits, 0, 0, dtype)

    def add_of_weight(self, total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns `total` [V, D] or [D, V] in f32 with a gradient of the weight added to it."""

        def at_once(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            return total + self.of_weight(dlogits, hidden, total.dtype)

        def by_columns(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            def add(first: Any, count: int, total: jax.Array) -> jax.Array:
                dz = jax.lax.dynamic_slice_in_dim(dlogits, first, count, 1)
                part = self.columns(total, first, count)
                return self.put(total, part + self.of_weight(dz, hidden, total.dtype), first)

            summed: jax.Array = each(dlogits.shape[1], BLOCK, add, total)
            return summed

        # XLA on a CPU has no product that adds: it would take memory for another whole weight.
        summed: jax.Array = jax.lax.platform_dependent(
            total, dlogits, hidden, cpu=by_columns, default=at_once
        )
        return summed

    def columns(self, weight: jax.Array, first: jax.Array | int, count: int) -> jax.Array:
        """Returns the part of the weight for `count` columns of the vocabulary."""
        return jax.lax.dynamic_slice_in_dim(weight, first, count, self.vocab_axis)

    def put(self, whole: jax.Array, part: jax.Array, first: jax.Array | int) -> jax.Array:
        """Returns `whole` with `part` at the columns of the vocabulary from `first` on."""
        part = part.astype(whole.dtype)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, first, self.vocab_axis)

    def _dot(self, a: jax.Array, b: jax.Array, of_a: int, of_b: int, dtype: Any) -> jax.Array:
        # Sums are f32 on every backend, whatever the dtype that they are rounded to.
        axes = (((of_a,), (of_b,)), ((), ()))
        a, b = self.barrier((a, b))
        return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)
