"""Losses and optimizers in the signatures of optax, for programs that call these.

    from pallas_bridge.optax import adamw8bit, softmax_cross_entropy_with_integer_labels

The optimizers need optax, `pip install 'pallas_bridge[optax]'`; the loss does not.
"""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._src import one_program
from ._src.arrays import wide
from ._src.bound import Bound
from ._src.checks import as_array
from ._src.cross_entropy.api import cross_entropy_per_token
from ._src.keywords import hinted
from ._src.operation import Implementation
from ._src.optimizers.api import adam8bit, adamw, adamw8bit, lion8bit
from ._src.optimizers.muon import muon

__all__ = [
    "adam8bit",
    "adamw",
    "adamw8bit",
    "lion8bit",
    "muon",
    "softmax_cross_entropy_with_integer_labels",
]

# What stands for a token that takes no part; no label is it once all count from the start.
IGNORED = -1


@hinted
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Cross-entropy of logits against labels, as the function of this name in optax 0.2.8.

    For logits z and label y it is logsumexp(z) - z_y, taken in float32 and rounded to the dtype of
    the logits, as there; `pallas_bridge.cross_entropy` gives float32 for logits of 16 bits. It is
    differentiable in both modes with respect to `logits`.

    Labels are indices as NumPy's: those in [-V, 0) count from the end. One outside [-V, V) makes
    the loss NaN, and here the gradient too.

    Args:
      logits: [.., V], or of any shape whose `axis` is V, in bfloat16, float16 or float32.
      labels: [..], the shape of `logits` without `axis`, of any integer dtype.
      axis: the axis of V. Of several, V is the product, and a label is an index into a slice that
        is flattened in their order. An axis other than the last is moved there, in memory.
      where: a mask of what takes part, or None for all. With as many axes as `logits` it is
        broadcast against these, and takes entries out of the sum of exponentials only, which costs
        a pass over the logits, and one over the gradient. With fewer axes it is broadcast against
        `labels`: a scalar, such as True, is a mask of all tokens. A token of which nothing takes
        part has loss 0 and gradient 0.
      implementation: as for `pallas_bridge.cross_entropy`.

    Returns:
      The loss of each token, of the shape of `labels`, in the dtype of `logits`.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree, or an axis that `logits` have not.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
    >>> losses = softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 1]))
    >>> print([f"{loss:.4f}" for loss in losses])
    ['0.2761', '2.9518']
    """
    x, y = as_array("logits", logits, "[.., V]"), as_array("labels", labels, "[..]")
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(f"labels have dtype {y.dtype}; it must be an integer dtype")
    axes = _axes(axis, x.ndim)
    batch_axes = tuple(one for one in range(x.ndim) if one not in axes)

    def flat(array: jax.Array) -> jax.Array:
        """Has the axes of the vocabulary last, as one."""
        moved = array.transpose(batch_axes + axes)
        first = len(batch_axes)
        # Not -1, which no size follows from where there are no tokens.
        return moved.reshape(*moved.shape[:first], math.prod(moved.shape[first:]))

    of_vocab = tuple(x.shape[one] for one in axes)
    shape, x = x.shape, flat(x)
    vocab = x.shape[-1]
    pairs = zip(x.shape[:-1], y.shape, strict=False)
    if y.ndim != len(batch_axes) or any(1 not in pair and len({*pair}) > 1 for pair in pairs):
        raise ValueError(
            f"labels have shape {y.shape}; it must be {x.shape[:-1]}, that of logits without axis "
            f"{axis}"
        )
    batch = jnp.broadcast_shapes(x.shape[:-1], y.shape)
    mask = None
    if where is not None:
        mask = _mask(where, shape, batch, axes)
        of_tokens = all(mask.shape[one] == 1 for one in axes)
        if not of_tokens:
            of_mask = dict(zip(axes, of_vocab, strict=True))
            extents = (of_mask.get(one, extent) for one, extent in enumerate(mask.shape))
            mask = jnp.broadcast_to(mask, tuple(extents))
        mask = flat(mask)
        batch = jnp.broadcast_shapes(batch, mask.shape[:-1])
    x, y = jnp.broadcast_to(x, (*batch, vocab)), jnp.broadcast_to(y, batch)
    y = _from_start(y, vocab)
    if mask is None:
        return _loss(x, y, implementation).astype(x.dtype)
    takes_part = jnp.broadcast_to(mask.any(axis=-1), batch)
    if of_tokens:
        return _loss(x, jnp.where(takes_part, y, IGNORED), implementation).astype(x.dtype)
    losses: jax.Array = one_program.run(Bound(_masked, implementation), x, y, mask, takes_part)
    return losses


def _masked(
    implementation: Implementation | None,
    x: jax.Array,
    y: jax.Array,
    mask: jax.Array,
    takes_part: jax.Array,
) -> jax.Array:
    """Returns the losses [..] of logits [.., V] of which a mask takes entries out."""
    # The label's logit counts whether it takes part or not, so that it is not the kernel's.
    label_logits = wide(jnp.take_along_axis(x, y[..., None], axis=-1)[..., 0])
    _, _, lse = cross_entropy_per_token(
        jnp.where(mask, x, -jnp.inf),
        jnp.where(takes_part, 0, IGNORED),
        ignore_index=IGNORED,
        return_lse=True,
        implementation=implementation,
    )
    return jnp.where(takes_part, lse - label_logits, 0).astype(x.dtype)


def _mask(
    where: ArrayLike, logits: tuple[int, ...], batch: tuple[int, ...], axes: tuple[int, ...]
) -> jax.Array:
    """Returns a mask with as many axes as logits have; an extent of 1 is that of any.

    Raises:
        ValueError: a mask of another shape than those that are broadcast.
    """
    mask = as_array("where", where, "of the shape of labels or logits").astype(bool)
    against = logits if mask.ndim == len(logits) else batch
    fits = mask.ndim <= len(against) and all(
        1 in (one, other) or one == other
        for one, other in zip(reversed(mask.shape), reversed(against), strict=False)
    )
    if not fits:
        raise ValueError(
            f"where has shape {mask.shape}; it must broadcast against labels, {batch}, or, with "
            f"{len(logits)} axes, against logits, {logits}"
        )
    if mask.ndim == len(logits):
        return mask
    mask = mask.reshape((1,) * (len(batch) - mask.ndim) + mask.shape)
    return jnp.expand_dims(mask, axes)


def _axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Returns the axes of the vocabulary, none of them negative."""
    if not isinstance(axis, int | tuple):
        raise ValueError(f"axis is {axis!r}; it must be an int or a tuple of ints")
    axes = tuple(map(operator.index, axis if isinstance(axis, tuple) else (axis,)))
    found = tuple(one + ndim if one < 0 else one for one in axes)
    if not found or len(set(found)) < len(found) or not all(0 <= one < ndim for one in found):
        raise ValueError(
            f"axis is {axis}; it must name different axes of logits, which have {ndim}"
        )
    return found


def _from_start(labels: jax.Array, vocab: int) -> jax.Array:
    """Returns labels that count from the start, and `vocab` for those out of range."""
    info = jnp.iinfo(labels.dtype)
    if info.bits < 32:
        labels = labels.astype(jnp.int32)
    elif info.min == 0:
        in_range = labels < np.array(vocab, labels.dtype)
        return jnp.where(in_range, labels, np.array(vocab, labels.dtype)).astype(jnp.int32)
    labels = jnp.where((labels >= -vocab) & (labels < 0), labels + vocab, labels)
    return jnp.where((labels >= 0) & (labels < vocab), labels, vocab)


def _loss(logits: jax.Array, labels: jax.Array, implementation: Implementation | None) -> jax.Array:
    """Returns the loss of every token, 0 where the label is `IGNORED`."""
    loss, _ = cross_entropy_per_token(
        logits, labels, ignore_index=IGNORED, implementation=implementation
    )
    return loss
