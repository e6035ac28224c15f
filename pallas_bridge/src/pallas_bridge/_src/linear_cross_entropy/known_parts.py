"""What is known of each token, of hidden states against the part of an output matrix a device has.

A chunk of tokens makes the part's logits at a time, as `known` has it, and the kernels say of these
what they say of a part of logits. What parts exchange is that of `cross_entropy.parts`, for all
tokens at once; the backward pass makes logits again, for cotangents that stand for the part.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear, vocab_parts
from ..bound import Bound
from ..cross_entropy import known
from ..cross_entropy import parts as of_logits
from ..cross_entropy.known import Asked, Known
from ..cross_entropy.options import is_ignored
from ..cross_entropy.parts import Found
from ..vocab_parts import Labels, OverDevices, labels_of_part, options_of_part
from . import reference
from .declaration import OPERATION
from .known import Chunks, backward, derivative
from .parts import alike
from .product import blank, each, operand_dtype
from .tokens import Bias, Gradients, put, rows


@dataclass(frozen=True)
class Parts:
    """Everything but the arrays."""

    # With the options of the whole vocabulary.
    whole: Chunks
    exchange: OverDevices

    def width(self, weight: jax.Array) -> int:
        """Returns the columns of the part."""
        return weight.shape[self.whole.products.vocab_axis]

    def labels(self, weight: jax.Array, labels: jax.Array) -> Labels:
        """Returns what labels say to the part."""
        return labels_of_part(self.whole.options, self.exchange, labels, self.width(weight))

    def columns(self, weight: jax.Array, columns: jax.Array | None) -> jax.Array | None:
        """Returns columns as the part counts them, those of others outside."""
        if columns is None:
            return None
        first = self.exchange.index() * self.width(weight)
        return columns - first.astype(columns.dtype)


def known_of(
    work: Parts,
    asked: Asked,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> Known:
    """Returns what is asked for of each token [N]; the gradient makes logits again.

    `weight` and `bias` are a device's, labels and columns those of the whole.
    """
    of = work.labels(weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    outputs = _known(work, hidden, weight, bias, labels, asked.columns)
    return known.ordered(work.whole.options, asked, labels, outputs)


def known_of_dense(
    work: Parts,
    asked: Asked,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> Known:
    """Returns the same by the dense program."""
    of = work.labels(weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    z = reference.logits(work.whole.products, of.ignored, hidden, weight, bias)
    return of_logits.known_of(work.whole.options, work.exchange, asked, z, labels)


def _of_part(
    work: Parts,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> Found:
    """Returns what the part says of each token; labels and columns are the part's."""
    w = weight.astype(operand_dtype(hidden, weight))
    per_token = [hidden, labels, *([] if columns is None else [columns])]

    def body(first: Any, count: int, found: Any) -> Any:
        x, y, *c = work.whole.products.barrier(rows(first, count, *per_token))
        z = work.whole.products.logits(x.astype(w.dtype), w, bias)
        of_columns = c[0] if c else None
        one = of_logits.found_of_part(work.whole.options, work.whole.distribution, z, y, of_columns)
        return put(found, work.whole.products.barrier(jax.tree.leaves(one)), first)

    number = blank(labels)
    like = Found(
        (number,) * 4,
        (number, number, blank(labels, dtype=jnp.int32)) if work.whole.distribution else (),
        None if columns is None else blank(columns),
    )
    flat, tree = jax.tree.flatten(like)
    found: Found = jax.tree.unflatten(tree, each(len(labels), work.whole.count, body, tuple(flat)))
    return found


def _forward(
    work: Parts,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> Any:
    """Returns the outputs, and what the backward pass takes besides the arrays."""
    given = work.labels(weight, labels).given
    arrays = alike(hidden, weight, bias, given, work.columns(weight, columns))
    found = linear.whole(OPERATION, partial(_of_part, work), *arrays)
    width = work.width(weight)
    return of_logits.merge_known(work.whole.options, work.exchange, width, labels, columns, found)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _known(
    work: Parts,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    outputs: tuple[jax.Array, ...]
    outputs, _ = _forward(work, hidden, weight, bias, labels, columns)
    return outputs


@partial(_known.defjvp, symbolic_zeros=True)
def _known_jvp(work: Parts, arrays: Any, tangents: Any) -> Any:
    outputs, saved = _forward(work, *arrays)
    rules = Bound(_tangents, work), Bound(_pull, work)
    return derivative(work.whole.distribution, *rules, outputs, saved, arrays, tangents)


def _tangents(work: Parts, residuals: Any, tangents: Any) -> Any:
    (*arrays, labels, columns), _ = residuals

    def plain(hidden: Any, weight: Any, bias: Any) -> Any:
        idle = is_ignored(work.whole.options, labels)
        z = reference.logits(work.whole.products, idle, hidden, weight, bias)
        return of_logits.known_dense(
            work.whole.options, work.exchange, work.whole.distribution, z, labels, columns
        )

    return linear.tangents_of(plain, arrays, tangents)


def _pull(work: Parts, residuals: Any, cotangents: Any) -> Gradients:
    (hidden, weight, bias, labels, columns), (lse, lse_low, entropy, is_empty, picked) = residuals
    exchange, (g, h, k, *others) = work.exchange, cotangents
    of = work.labels(weight, labels)
    given = [jnp.zeros_like(lse) if one is None else one for one in (g, h, k)]
    of_part = vocab_parts.cotangents(work.whole.options, exchange, of, lse, is_empty, given)
    more = [None if one is None else exchange.cotangent(one) for one in others]
    if work.whole.distribution and more[0] is not None:
        more[0] = jnp.where(is_empty, 0, more[0])
    # Loops want what they carry to vary as what they make does.
    flat, tree = jax.tree.flatten(
        (
            (hidden, weight, bias, of.given, work.columns(weight, columns)),
            (lse, lse_low, entropy, picked),
            (*of_part, *more),
        )
    )
    of_device = dataclasses.replace(work.whole, options=options_of_part(work.whole.options))
    own: Any = jax.tree.unflatten(tree, alike(*flat))
    return backward(of_device, *own[0], *own[1:])
