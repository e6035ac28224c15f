"""Auxiliary outputs of a loss, a token each, for logits and for hidden states alike.

Entropy and argmax need the whole row, so that the kernels which read it return them (the call
`distribution`). The rest is made here of the kernels' results, at next to no cost beside the pass
over the logits:

- whether the label is the argmax compares two integers a token;
- log-probabilities of K given columns gather K of V logits, less lse. Their gradient is that of
  -lse, a cotangent that kernels take, and K numbers that are added to the gradient that a kernel
  has written, in place. JAX's own transpose of the gather would add to a gradient of zeros, and
  read and write the whole of it once more.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import meshes
from ..arrays import match_rank, wide
from ..checks import as_array, check_flag
from ..logits_gemms import FLOAT32, Bias, as_gemm_operands
from .options import Options, is_ignored

# The most columns a token.
MOST_COLUMNS = 128
# What rows of the weight that are gathered take at a time, in bytes, where XLA holds any.
GATHERED_BYTES = 1 << 28


class TokenOutputs(NamedTuple):
    """Outputs of each token, [..] each; None for what is not requested."""

    loss: jax.Array
    logps: jax.Array
    lse: jax.Array
    entropy: jax.Array | None = None
    correct: jax.Array | None = None
    # [.., K]
    column_logps: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns"],
    meta_fields=["lse", "entropy", "correct"],
)
@dataclass(frozen=True)
class Request:
    """The auxiliary outputs that a caller requests."""

    lse: bool = False
    entropy: bool = False
    correct: bool = False
    columns: jax.Array | None = None

    @classmethod
    def checked(cls, lse: Any, entropy: Any, correct: Any) -> "Request":
        """Returns the request of what a user passes, without columns.

        Raises:
            TypeError: one is no bool, or traced.
        """
        return cls(
            check_flag("return_lse", lse),
            check_flag("return_entropy", entropy),
            check_flag("return_correct", correct),
        )

    @property
    def distribution(self) -> bool:
        """Whether a kernel has to find something more."""
        return self.entropy or self.correct

    @property
    def any(self) -> bool:
        """Whether anything but lse is requested."""
        return self.distribution or self.columns is not None

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of requested outputs in `TokenOutputs`."""
        requested = self.lse, self.entropy, self.correct, self.columns is not None
        return tuple(index for index, is_requested in enumerate(requested, 2) if is_requested)

    @property
    def fields(self) -> list[str]:
        """The names in `TokenOutputs` of what is computed."""
        fields = ["loss", "logps", "lse", *(["entropy", "correct"] if self.distribution else [])]
        return fields if self.columns is None else [*fields, "column_logps"]

    def select(self, outputs: TokenOutputs) -> tuple[jax.Array, ...]:
        """Returns the requested outputs, in order."""
        return tuple(one for index in self.indices if (one := outputs[index]) is not None)


def check_columns(
    operation: object, columns: ArrayLike | None, tokens: tuple[int, ...]
) -> jax.Array | None:
    """Returns columns [.., K] of tokens [..], or None.

    Raises:
        TypeError: columns that are no integers.
        ValueError: columns of another shape, or too many.
    """
    if columns is None:
        return None
    columns = as_array("columns", columns, f"{(*tokens, 'K')}, K columns a token")
    if not jnp.issubdtype(columns.dtype, jnp.integer):
        raise TypeError(f"columns have dtype {columns.dtype}; it must be an integer")
    if columns.shape[:-1] != tokens or columns.ndim != len(tokens) + 1:
        raise ValueError(
            f"columns have shape {columns.shape}; it must be {(*tokens, 'K')}, K columns a token"
        )
    if not 1 <= columns.shape[-1] <= MOST_COLUMNS:
        raise ValueError(
            f"columns have shape {columns.shape}; their last axis must be in [1, {MOST_COLUMNS}]"
        )
    meshes.check_whole(operation, "columns", columns, columns=-1)
    # The dtype has to hold the first column of a vocabulary shard.
    is_narrow = jnp.iinfo(columns.dtype).max < jnp.iinfo(jnp.int32).max
    return columns.astype(jnp.int32) if is_narrow else columns


def collect(
    options: Options, request: Request, labels: jax.Array, outputs: tuple[jax.Array, ...]
) -> TokenOutputs:
    """Returns the outputs of tokens, by loss, logps, lse, entropy, columns' logits and correct.

    Of the latter three those that are requested, both entropy and correct if either is.
    """
    loss, logps, lse, *more = outputs
    entropy, correct, column_logps = None, None, None
    if request.distribution:
        entropy, correct = more.pop(0), more.pop() > 0
    if request.columns is not None:
        ignored = is_ignored(options, labels)[..., None]
        column_logps = jnp.where(ignored, 0, more[0] - lse[..., None])
    return TokenOutputs(loss, logps, lse, entropy, correct, column_logps)


def is_correct(options: Options, labels: jax.Array, argmax: jax.Array) -> jax.Array:
    """Returns 1 for tokens whose label is the argmax, else 0, in f32.

    Floats, since a derivative rule of JAX has to give booleans a tangent of another dtype.
    """
    correct = (argmax == labels.astype(jnp.int32)) & ~is_ignored(options, labels)
    # A label that int32 does not hold is no column.
    correct &= (labels >= 0) & (labels <= jnp.iinfo(jnp.int32).max)
    return correct.astype(jnp.float32)


def with_correct(distribution: bool, outputs: Any, tangents: Any) -> tuple[Any, ...]:
    """Returns the tangents of outputs: correct, the last of a distribution's, has one of zeros."""
    return (*tangents, 0 * outputs[-1]) if distribution else tuple(tangents)


def pick(options: Options, logits: jax.Array, columns: jax.Array, first: Any = 0) -> jax.Array:
    """Returns the logits [.., K] of columns as the softmax takes them, in f32.

    Logits are the columns of the vocabulary from `first` on; NaN for columns elsewhere.
    """
    here, index = find_columns(columns, first, logits.shape[-1])
    z = options.mapped(wide(jnp.take_along_axis(logits, index, axis=-1)))
    # A masked entry has no gradient.
    z = jnp.where(z == -jnp.inf, -jnp.inf, z)
    return jnp.where(here, z, jnp.nan)


def gather_column_logits(
    options: Options, hidden: jax.Array, weight: jax.Array, bias: Bias, columns: jax.Array
) -> jax.Array:
    """Returns columns' logits [N, K] of a weight [V, D], as `pick` gives them."""
    x, w = as_gemm_operands(hidden, weight)
    here, at = find_columns(columns, 0, len(w))

    def one_token(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_row, at_row = row
        z: jax.Array = (x_row[None].astype(FLOAT32) * w[at_row].astype(FLOAT32)).sum(-1)
        return z

    chunk = GATHERED_BYTES // (columns.shape[-1] * w.shape[1] * w.dtype.itemsize)
    z = jax.lax.map(one_token, (x, at), batch_size=max(min(chunk, len(x)), 1))
    z = options.mapped(z if bias is None else z + bias.astype(FLOAT32)[at])
    return jnp.where(here, z, jnp.nan)


def add_picked(
    options: Options,
    dlogits: jax.Array,
    columns: jax.Array,
    picked: jax.Array,
    cotangents: jax.Array,
    first: Any = 0,
) -> jax.Array:
    """Returns dlogits with the gradient for cotangents of `picked` [.., K] added in place."""
    here, index = find_columns(columns, first, dlogits.shape[-1])
    # A masked entry has no gradient, and a masked token no cotangent.
    slope = jnp.where(picked == -jnp.inf, 0, options.slope(picked))
    d = jnp.where(cotangents == 0, 0, cotangents * slope)
    d = jnp.where(here, d, 0)
    # On GPUs the additions to one element have no order.
    d = jax.lax.platform_dependent(index, d, cuda=sum_duplicates, default=lambda index, d: d)

    def add_row(row: jax.Array, index: jax.Array, d: jax.Array) -> jax.Array:
        return row.at[index].add(d)

    add: Any = add_row
    for _ in range(dlogits.ndim - 1):
        add = jax.vmap(add)
    added: jax.Array = add(dlogits, index, d.astype(dlogits.dtype))
    return added


def sum_duplicates(index: jax.Array, d: jax.Array) -> jax.Array:
    """Returns numbers [.., K]: the sum over equal indices where the first of them is, else 0."""
    same, order = index[..., :, None] == index[..., None, :], jnp.arange(index.shape[-1])
    earlier = order[None, :] < order[:, None]
    has_earlier = (same & match_rank(earlier, same)).any(-1)
    summed = jnp.where(same, d[..., None, :], 0).sum(-1)
    return jnp.where(has_earlier, 0, summed)


def find_columns(columns: jax.Array, first: Any, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns which columns are among `width` from `first` on, and their indices, else 0."""
    index = columns - jnp.asarray(first, columns.dtype)
    here = (index >= 0) & (index < width)
    return here, jnp.where(here, index, 0).astype(jnp.int32)
