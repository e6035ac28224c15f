"""The GEMMs of logits hidden x weight, and of their gradients."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import match_rank
from .chunk_loops import for_each_chunk

# Columns of the vocabulary that a CPU adds to sums of dweight at a time.
BLOCK = 1024
FLOAT32 = np.dtype(np.float32)

Bias = jax.Array | None
T = TypeVar("T")


def operand_dtype(hidden: Any, weight: Any) -> Any:
    """Returns the dtype that GEMMs take: the narrower one of both arrays."""
    return min(hidden.dtype, weight.dtype, key=lambda dtype: int(dtype.itemsize))


def as_gemm_operands(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns hidden and weight as GEMMs take them: the wider one is rounded."""
    dtype = operand_dtype(hidden, weight)
    return hidden.astype(dtype), weight.astype(dtype)


def zero_rows(masked: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` [N, ..] with zeros for tokens that are `masked` [N].

    Their gradient is 0, which times a NaN would be NaN.
    """
    return jnp.where(masked[:, None], jnp.zeros((), rows.dtype), rows)


@dataclass(frozen=True)
class Gemms:
    """The three GEMMs, for hidden [N, D] and a weight whose axis `vocab_axis` is V.

    Operands are of one dtype, that of `as_gemm_operands`. Sums are f32, rounded once to the dtype
    of the result.
    """

    vocab_axis: int
    # Whether XLA compiles each GEMM, and what else a token's results come from, as if nothing stood
    # around it, so that a chunk gives the same bits beside others, in a loop, and alone. Not so the
    # sums of the weight's gradient, which GEMMs may add to where they lie.
    isolated: bool = False

    def fence(self, arrays: T) -> T:
        """Returns arrays; where `isolated`, their producers and consumers are not fused.

        XLA takes barriers away after fusion, and after it has chosen how GEMMs are made.
        """
        if not (self.isolated and jax.tree.leaves(arrays)):
            return arrays
        fenced: T = jax.lax.optimization_barrier(arrays)
        return fenced

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: Bias) -> jax.Array:
        """Returns hidden x weight + bias [N, V] in f32."""
        z = self.fence(self._dot(hidden, weight, 1, 1 - self.vocab_axis, FLOAT32))
        return z if bias is None else z + match_rank(bias.astype(FLOAT32), z)

    def grad_hidden(self, dlogits: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
        """Returns dhidden [N, D]; dlogits are rounded to the dtype of `weight`."""
        dlogits = dlogits.astype(weight.dtype)
        return self.fence(self._dot(dlogits, weight, 1, self.vocab_axis, dtype))

    def grad_weight(self, dlogits: jax.Array, hidden: jax.Array, dtype: Any) -> jax.Array:
        """Returns dweight, of the weight's layout; dlogits are rounded likewise."""
        dlogits = dlogits.astype(hidden.dtype)
        if self.vocab_axis == 0:
            return self._dot(dlogits, hidden, 0, 0, dtype)
        return self._dot(hidden, dlogits, 0, 0, dtype)

    def add_grad_weight(self, total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns `total` + dweight, in f32."""

        def at_once(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            return total + self.grad_weight(dlogits, hidden, total.dtype)

        def by_columns(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            def add(first: Any, count: int, total: jax.Array) -> jax.Array:
                dz = jax.lax.dynamic_slice_in_dim(dlogits, first, count, 1)
                some = self.slice_columns(total, first, count)
                return self.put_columns(
                    total, some + self.grad_weight(dz, hidden, total.dtype), first
                )

            summed: jax.Array = for_each_chunk(dlogits.shape[1], BLOCK, add, total)
            return summed

        # XLA on a CPU has no GEMM that adds: it would allocate another whole weight.
        summed: jax.Array = jax.lax.platform_dependent(
            total, dlogits, hidden, cpu=by_columns, default=at_once
        )
        return summed

    def slice_columns(self, weight: jax.Array, first: Any, count: int) -> jax.Array:
        """Returns `count` columns of the vocabulary of the weight."""
        return jax.lax.dynamic_slice_in_dim(weight, first, count, self.vocab_axis)

    def put_columns(self, weight: jax.Array, columns: jax.Array, first: Any) -> jax.Array:
        """Returns `weight` with columns of the vocabulary from `first` on replaced."""
        columns = columns.astype(weight.dtype)
        return jax.lax.dynamic_update_slice_in_dim(weight, columns, first, self.vocab_axis)

    def _dot(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any) -> jax.Array:
        # Sums are f32 on every backend, whatever the dtype that they are rounded to.
        axes = (((a_axis,), (b_axis,)), ((), ()))
        a, b = self.fence((a, b))
        return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def scale_gradients(gradients: Any, dloss: jax.Array) -> Any:
    """Returns gradients times the cotangent of their loss, a product in f32; XLA leaves 1 out."""
    return jax.tree.map(lambda x: (x.astype(jnp.float32) * dloss).astype(x.dtype), gradients)
