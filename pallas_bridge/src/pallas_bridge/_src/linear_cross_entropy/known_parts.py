"""What is known of each token, of hidden states against the part of an output matrix a device has.

A chunk of tokens makes the part's logits at a time, as `known` has it, and the kernels say of these
what they say of a part of logits. What parts exchange is that of `vocab_shards`, for all
tokens at once; the backward pass makes logits again, for cotangents that stand for the part.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..cross_entropy import calls as kernels
from ..cross_entropy import reference as of_logits
from ..cross_entropy.derivative import per_token
from ..losses import aux_outputs, vocab_shards
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import is_ignored
from ..losses.vocab_shards import (
    Labels,
    Loss,
    OverDevices,
    ShardOutputs,
    shard_labels,
    shard_options,
)
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

    @property
    def loss(self) -> Loss:
        """What logits of a device are a shard of."""
        return Loss(self.whole.options, self.exchange, self.whole.distribution)

    def width(self, weight: jax.Array) -> int:
        """Returns the columns of the part."""
        return weight.shape[self.whole.products.vocab_axis]

    def labels(self, weight: jax.Array, labels: jax.Array) -> Labels:
        """Returns what labels say to the part."""
        return shard_labels(self.whole.options, self.exchange, labels, self.width(weight))

    def columns(self, weight: jax.Array, columns: jax.Array | None) -> jax.Array | None:
        """Returns columns as the part counts them, those of others outside."""
        if columns is None:
            return None
        first = self.exchange.index() * self.width(weight)
        return columns - first.astype(columns.dtype)


def known_of(
    work: Parts,
    asked: Request,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> TokenOutputs:
    """Returns what is asked for of each token [N]; the gradient makes logits again.

    `weight` and `bias` are a device's, labels and columns those of the whole.
    """
    of = work.labels(weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    outputs = _known(work, hidden, weight, bias, labels, asked.columns)
    return aux_outputs.collect(work.whole.options, asked, labels, outputs)


def known_of_dense(
    work: Parts,
    asked: Request,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> TokenOutputs:
    """Returns the same by the dense program."""
    of = work.labels(weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    z = reference.logits(work.whole.products, of.ignored, hidden, weight, bias)
    return per_token(work.whole.options, work.exchange, asked, z, labels)


def _of_part(
    work: Parts,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> ShardOutputs:
    """Returns what the part says of each token; labels and columns are the part's."""
    w = weight.astype(operand_dtype(hidden, weight))
    per_token = [hidden, labels, *([] if columns is None else [columns])]

    def body(first: Any, count: int, found: Any) -> Any:
        x, y, *c = work.whole.products.barrier(rows(first, count, *per_token))
        z = work.whole.products.logits(x.astype(w.dtype), w, bias)
        of_columns = c[0] if c else None
        one = kernels.read_shard(work.loss, z, y, of_columns)
        return put(found, work.whole.products.barrier(jax.tree.leaves(one)), first)

    number = blank(labels)
    like = ShardOutputs(*(number,) * 4)
    if work.whole.distribution:
        argmax = blank(labels, dtype=jnp.int32)
        like = like._replace(entropy=number, highest=number, argmax=argmax)
    if columns is not None:
        like = like._replace(picked=blank(columns))
    flat, tree = jax.tree.flatten(like)
    found: ShardOutputs = jax.tree.unflatten(
        tree, each(len(labels), work.whole.count, body, tuple(flat))
    )
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
    own = work.labels(weight, labels)
    arrays = alike(hidden, weight, bias, own.given, work.columns(weight, columns))
    found = linear.whole(OPERATION, partial(_of_part, work), *arrays)
    width = work.width(weight)
    return kernels.merge_shards(work.loss, width, labels, own, columns, found)


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
        return of_logits.token_outputs(work.loss, z, labels, columns)

    return linear.tangents_of(plain, arrays, tangents)


def _pull(work: Parts, residuals: Any, cotangents: Any) -> Gradients:
    (hidden, weight, bias, labels, columns), (lse, lse_low, is_empty, entropy, picked) = residuals
    exchange, (g, h, k, *others) = work.exchange, cotangents
    of = work.labels(weight, labels)
    given = [jnp.zeros_like(lse) if one is None else one for one in (g, h, k)]
    of_part = vocab_shards.shard_cotangents(work.whole.options, exchange, of, lse, is_empty, given)
    more = [None if one is None else exchange.cotangent(one) for one in others]
    if work.whole.distribution and more[0] is not None:
        more[0] = jnp.where(is_empty, 0, more[0])
    # Loops want what they carry to vary as what they make does.
    flat, tree = jax.tree.flatten(
        (
            (hidden, weight, bias, of.given, work.columns(weight, columns)),
            (lse, lse_low, None, entropy, picked),
            (*of_part, *more),
        )
    )
    of_device = dataclasses.replace(work.whole, options=shard_options(work.whole.options, exchange))
    own: Any = jax.tree.unflatten(tree, alike(*flat))
    return backward(of_device, *own[0], *own[1:])
