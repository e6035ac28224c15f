"""The GEMMs of logits hidden x weight, and of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import linear
from .arrays import match_rank
from .bound import Bound
from .checks import check_dtype, check_integer, promoted
from .chunk_loops import for_each_chunk, make_alike

# Columns of the vocabulary that a CPU adds to sums of dweight at a time.
BLOCK = 1024
FLOAT32 = np.dtype(np.float32)

Bias = jax.Array | None
# Of hidden, weight and bias.
Gradients = tuple[jax.Array, jax.Array, Bias]
T = TypeVar("T")


class Operands(NamedTuple):
    """What a loss is computed from."""

    # [N, D], and where XLA may shard any axis of tokens, [.., D].
    hidden: jax.Array
    # [V, D] or [D, V].
    weight: jax.Array
    # [V]
    bias: Bias
    # [N], or [..].
    labels: jax.Array


def operand_dtype(hidden: Any, weight: Any) -> Any:
    """Returns the dtype that GEMMs take: the narrower one of both arrays."""
    return min(hidden.dtype, weight.dtype, key=lambda dtype: int(dtype.itemsize))


def as_gemm_operands(
    hidden: jax.Array, weight: jax.Array, dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns hidden and weight as GEMMs take them: in `dtype`, or the wider one is rounded."""
    dtype = dtype or operand_dtype(hidden, weight)
    return hidden.astype(dtype), weight.astype(dtype)


def zero_rows(masked: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` [N, ..] with zeros for tokens that are `masked` [N].

    Their gradient is 0, which times a NaN would be NaN.
    """
    return jnp.where(masked[:, None], jnp.zeros((), rows.dtype), rows)


def promote_operands(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Returns both in f32 where one is bfloat16 and one float16, which GEMMs do not take."""
    is_f32_in = jnp.float32 in (hidden.dtype, weight.dtype)
    return (hidden, weight) if is_f32_in else promoted(hidden, weight)


def find_vocab_axis(hidden: Any, weight: Any, bias: Any, vocab_axis: int | None) -> int:
    """Returns which axis of the weight is the vocabulary's, having checked shapes and dtypes."""
    check_dtype("hidden", hidden)
    check_dtype("weight", weight)
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [.., D] with D at least 1")
    width = hidden.shape[-1]
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"weight has shape {weight.shape}; it must be [V, {width}] or [{width}, V]"
        )
    if vocab_axis is None:
        if weight.shape == (width, width):
            raise ValueError(
                f"weight has shape {weight.shape}, of which either axis may be the vocabulary's; "
                "set vocab_axis to 0 for [V, D] or to 1 for [D, V]"
            )
        vocab_axis = 0 if weight.shape[1] == width else 1
    vocab_axis = check_integer("vocab_axis", vocab_axis)
    if vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis is {vocab_axis!r}; it must be 0, 1 or None")
    if weight.shape[1 - vocab_axis] != width:
        raise ValueError(
            f"weight has shape {weight.shape} and hidden {hidden.shape}; axis {1 - vocab_axis} of "
            f"weight must have the {width} columns of hidden"
        )
    vocab = weight.shape[vocab_axis]
    if bias is not None:
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias has dtype {bias.dtype}; it must be a float")
        if bias.shape != (vocab,):
            raise ValueError(
                f"bias has shape {bias.shape}; it must be ({vocab},), a number a column of the "
                "vocabulary"
            )
    return vocab_axis


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
    # The dtype of operands of `dense_logits`; None for the narrower one of both arrays.
    dtype: Any = None

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


def dense_logits(
    gemms: Gemms, hidden: jax.Array, weight: jax.Array, bias: Bias
) -> tuple[jax.Array, jax.Array]:
    """Returns all logits [N, V] in f32, and a probe [N].

    The probe's cotangent is 0 for tokens without a gradient, as `cross_entropy.reference` has it.

    JAX alone would multiply dlogits in f32 with operands of 16 bits: here they are rounded once to
    the operands' dtype, as kernels round them.
    """
    z, probe = _dense_logits(gemms, *make_alike(hidden, weight, bias))
    return z, probe


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dense_logits(
    gemms: Gemms, hidden: jax.Array, weight: jax.Array, bias: Bias
) -> tuple[jax.Array, jax.Array]:
    z = gemms.logits(*as_gemm_operands(hidden, weight, gemms.dtype), bias)
    return z, z.max(-1)


@partial(_dense_logits.defjvp, symbolic_zeros=True)
def _dense_logits_jvp(gemms: Gemms, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    moving = [*map(linear.given, tangents)]
    apply, transpose = Bound(_dense_logits_tangent, gemms), Bound(_dense_logits_vjp, gemms)
    results = _dense_logits(gemms, *arrays)
    return results, tuple(linear.bind(apply, transpose, arrays, moving, results))


def _dense_logits_tangent(
    gemms: Gemms, arrays: Any, tangents: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    def logits(hidden: jax.Array, weight: jax.Array, bias: Bias) -> jax.Array:
        return gemms.logits(*as_gemm_operands(hidden, weight, gemms.dtype), bias)

    total = linear.tangents_of(logits, arrays, tangents)
    # The probe's own is not read.
    return total, total.sum(-1)


def _dense_logits_vjp(gemms: Gemms, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    (hidden, weight, bias), (dlogits, counts) = arrays, cotangents
    if dlogits is None:
        return None, None, None
    x, w = as_gemm_operands(hidden, weight, gemms.dtype)
    masked = counts == 0
    dlogits = zero_rows(masked, dlogits)
    dz = dlogits.astype(x.dtype)
    dhidden = zero_rows(masked, gemms.grad_hidden(dz, w, hidden.dtype))
    dweight = gemms.grad_weight(dz, zero_rows(masked, x), weight.dtype)
    dbias = None if bias is None else dlogits.sum(0, dtype=jnp.float32).astype(bias.dtype)
    return dhidden, dweight, dbias
