"""Losses in the signatures of optax, for programs that call these.

from pallas_bridge.optax import softmax_cross_entropy_with_integer_labels
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._src.cross_entropy.api import cross_entropy_per_token
from ._src.operation import Implementation

__all__ = ["softmax_cross_entropy_with_integer_labels"]

# What stands for a token that takes no part; no label is it once all count from the start.
IGNORED = -1


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
      where: what takes part, of the shape of `labels` or `logits`, or None for all. A token of
        which nothing does has loss 0 and gradient 0. A mask of the shape of `logits` takes others
        out of the sum of exponentials only, and costs a pass over the logits, and one over the
        gradient.
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
    x, y = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(f"labels have dtype {y.dtype}; it must be an integer dtype")
    axes = _axes(axis, x.ndim)
    batch_axes = tuple(one for one in range(x.ndim) if one not in axes)
    mask = None if where is None else jnp.asarray(where).astype(bool)
    if mask is not None and mask.ndim != x.ndim:
        mask = jnp.expand_dims(mask, axes)

    def flat(array: jax.Array) -> jax.Array:
        """Has the axes of the vocabulary last, as one."""
        moved = array.transpose(batch_axes + axes)
        return moved.reshape(*moved.shape[: len(batch_axes)], -1)

    x = flat(x)
    vocab = x.shape[-1]
    if y.ndim != len(batch_axes):
        raise ValueError(
            f"labels have shape {y.shape}; it must be {x.shape[:-1]}, that of logits without axis "
            f"{axis}"
        )
    batch = jnp.broadcast_shapes(x.shape[:-1], y.shape)
    x, y = jnp.broadcast_to(x, (*batch, vocab)), jnp.broadcast_to(y, batch)
    y = _from_start(y, vocab)
    if mask is None:
        return _loss(x, y, implementation).astype(x.dtype)
    of_tokens = all(mask.shape[one] == 1 for one in axes)
    mask = flat(mask)
    takes_part = jnp.broadcast_to(mask.any(axis=-1), batch)
    if of_tokens:
        return _loss(x, jnp.where(takes_part, y, IGNORED), implementation).astype(x.dtype)
    # The label's logit counts whether it takes part or not, so that it is not the kernel's.
    label_logits = jnp.take_along_axis(x, y[..., None], axis=-1)[..., 0].astype(jnp.float32)
    _, _, lse = cross_entropy_per_token(
        jnp.where(mask, x, -jnp.inf),
        jnp.where(takes_part, 0, IGNORED),
        ignore_index=IGNORED,
        return_lse=True,
        implementation=implementation,
    )
    return jnp.where(takes_part, lse - label_logits, 0).astype(x.dtype)


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
