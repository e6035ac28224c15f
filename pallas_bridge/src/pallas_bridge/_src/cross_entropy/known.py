"""What a loss knows of a token beside its loss, for logits and for hidden states alike.

Entropy and the likeliest column need the whole row, so that the kernels which read it find them
(`distribution_call`). All else is made here of what kernels give, by programs of XLA's that cost
next to nothing beside the pass over the logits:

- whether the label is the likeliest column is a comparison of a number a token;
- log-probabilities of K given columns are K logits of each token, less lse: a gather of K of V
  numbers. Their gradient is that of -lse, which is a cotangent that kernels take, and K numbers
  that are added where the columns are to the gradient which a kernel has just written, in its
  place. JAX's own transpose of the gather would make a gradient of zeros to add to, and read and
  write the whole of it once more.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import meshes
from ..arrays import of_rank, wide
from ..checks import as_array
from .options import Options, is_ignored

# Columns a token that are taken at most.
MOST_COLUMNS = 128


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns"],
    meta_fields=["lse", "entropy", "correct"],
)
@dataclass(frozen=True)
class Asked:
    """Which of them a caller asks for."""

    lse: bool = False
    entropy: bool = False
    correct: bool = False
    columns: jax.Array | None = None

    @property
    def distribution(self) -> bool:
        """Whether a kernel has to find something more."""
        return self.entropy or self.correct

    @property
    def any(self) -> bool:
        """Whether anything but lse is asked for."""
        return self.distribution or self.columns is not None

    def of(self, known: "Known") -> tuple[jax.Array, ...]:
        """Returns what is asked for, in order."""
        found = (
            (self.lse, known.lse),
            (self.entropy, known.entropy),
            (self.correct, known.correct),
            (self.columns is not None, known.column_logps),
        )
        return tuple(one for is_asked, one in found if is_asked and one is not None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Known:
    """What is known of each token, [..] each; None for what nobody asked for."""

    loss: jax.Array
    logps: jax.Array
    lse: jax.Array
    entropy: jax.Array | None = None
    correct: jax.Array | None = None
    # [.., K]
    column_logps: jax.Array | None = None


def check_columns(columns: ArrayLike | None, tokens: tuple[int, ...]) -> jax.Array | None:
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
    meshes.check_whole("cross_entropy", "columns", columns, columns=-1)
    # A part's first column is one of theirs, whatever they hold themselves.
    narrow = jnp.iinfo(columns.dtype).max < jnp.iinfo(jnp.int32).max
    return columns.astype(jnp.int32) if narrow else columns


def make(
    options: Options,
    asked: Asked,
    labels: jax.Array,
    outputs: tuple[jax.Array, ...],
    picked: jax.Array | None,
) -> Known:
    """Returns what is known, of loss, logps, lse, and entropy and correct if those are asked for.

    `picked` has the columns' logits as they go into the softmax, NaN for columns there are not.
    """
    loss, logps, lse, *more = outputs
    entropy, correct, column_logps = None, None, None
    if asked.distribution:
        entropy, correct = more
        correct = correct > 0
    if picked is not None:
        ignored = is_ignored(options, labels)[..., None]
        column_logps = jnp.where(ignored, 0, picked - lse[..., None])
    return Known(loss, logps, lse, entropy, correct, column_logps)


def ordered(
    options: Options, asked: Asked, labels: jax.Array, outputs: tuple[jax.Array, ...]
) -> Known:
    """Returns what is known, of loss, logps, lse, entropy, columns' logits and correct.

    Of these as many as are asked for.
    """
    *floats, last = outputs
    if not asked.distribution:
        floats = [*floats, last]
    picked = None if asked.columns is None else floats.pop()
    more = [last] if asked.distribution else []
    return make(options, asked, labels, (*floats, *more), picked)


def is_correct(options: Options, labels: jax.Array, argmax: jax.Array) -> jax.Array:
    """Returns 1 for tokens whose label is the likeliest column, else 0, in f32.

    Numbers, since a rule of JAX's for derivatives has to give booleans a tangent of its own kind.
    """
    correct = (argmax == labels.astype(jnp.int32)) & ~is_ignored(options, labels)
    # A label that int32 does not hold is no column.
    correct &= (labels >= 0) & (labels <= jnp.iinfo(jnp.int32).max)
    return correct.astype(jnp.float32)


def with_correct(distribution: bool, outputs: Any, tangents: Any) -> tuple[Any, ...]:
    """Returns the tangents of outputs: correct, the last of a distribution's, has one of zeros."""
    return (*tangents, 0 * outputs[-1]) if distribution else tuple(tangents)


def pick(options: Options, logits: jax.Array, columns: jax.Array, first: Any = 0) -> jax.Array:
    """Returns the logits [.., K] of columns as they go into the softmax, in f32.

    Logits are the columns of the vocabulary from `first` on. It is NaN for those that are not here.
    """
    here, at = places(columns, first, logits.shape[-1])
    z = jnp.take_along_axis(logits, at, axis=-1)
    z = options.mapped(wide(z))
    # A masked entry has no gradient.
    z = jnp.where(z == -jnp.inf, -jnp.inf, z)
    return jnp.where(here, z, jnp.nan)


def add_picked(
    options: Options,
    dlogits: jax.Array,
    columns: jax.Array,
    picked: jax.Array,
    cotangents: jax.Array,
    first: Any = 0,
) -> jax.Array:
    """Returns dlogits with the gradient for cotangents of `picked` [.., K] added in their place."""
    here, at = places(columns, first, dlogits.shape[-1])
    # A masked entry has no gradient, and a token that takes no part no cotangent.
    slope = jnp.where(picked == -jnp.inf, 0, options.slope(picked))
    d = jnp.where(cotangents == 0, 0, cotangents * slope)
    d = jnp.where(here, d, 0)
    # There the additions to one place have no order.
    d = jax.lax.platform_dependent(at, d, cuda=once, default=lambda at, d: d)
    d = d.astype(dlogits.dtype)

    def of_row(row: jax.Array, at: jax.Array, d: jax.Array) -> jax.Array:
        return row.at[at].add(d)

    add: Any = of_row
    for _ in range(dlogits.ndim - 1):
        add = jax.vmap(add)
    added: jax.Array = add(dlogits, at, d)
    return added


def once(at: jax.Array, d: jax.Array) -> jax.Array:
    """Returns numbers [.., K] of which each place gets one, that of its first, and else zeros."""
    same, order = at[..., :, None] == at[..., None, :], jnp.arange(at.shape[-1])
    earlier = order[None, :] < order[:, None]
    came_before = (same & of_rank(earlier, same)).any(-1)
    summed = jnp.where(same, d[..., None, :], 0).sum(-1)
    return jnp.where(came_before, 0, summed)


def places(columns: jax.Array, first: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns which columns are among `count` from `first` on, and where, 0 for others."""
    at = columns - jnp.asarray(first, columns.dtype)
    here = (at >= 0) & (at < count)
    return here, jnp.where(here, at, 0).astype(jnp.int32)
