"""What is known of each token's distribution, of logits that a chunk of tokens makes at a time.

A chunk's logits are a product, as `tokens` has them, and the kernels of cross-entropy say of them
what is asked for; the backward pass makes them again. So entropy and given columns cost nothing of
their own here: the columns' logits are taken where all of them are, and their cotangents are added
to a chunk's dlogits, from where the products take them to hidden states and weight in f32 sums.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from .. import linear
from ..bound import Bound
from ..cross_entropy import calls as kernels
from ..cross_entropy import reference as of_logits
from ..cross_entropy.derivative import per_token
from ..losses import aux_outputs
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options, is_ignored
from ..losses.vocab_shards import WHOLE, Loss
from . import reference, tokens
from .declaration import OPERATION
from .parts import alike
from .product import Products, blank, each, operand_dtype
from .tokens import Bias, Gradients, idle_tokens, put, rows


@dataclass(frozen=True)
class Chunks:
    """Everything but the arrays."""

    options: Options
    products: Products
    # Tokens of a chunk.
    count: int
    distribution: bool


def known_of(
    chunks: Chunks,
    asked: Request,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> TokenOutputs:
    """Returns what is asked for of each token [N]; the gradient makes logits again."""
    outputs = _known(chunks, *alike(hidden, weight, bias, labels, asked.columns))
    return aux_outputs.collect(chunks.options, asked, labels, outputs)


def known_of_dense(
    chunks: Chunks,
    asked: Request,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> TokenOutputs:
    """Returns the same by the dense program."""
    idle = is_ignored(chunks.options, labels)
    z = reference.logits(chunks.products, idle, hidden, weight, bias)
    return per_token(chunks.options, WHOLE, asked, z, labels)


def forward(
    chunks: Chunks,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> Any:
    """Returns the outputs of `kernels.forward_tokens`, and lse_low."""
    w = weight.astype(operand_dtype(hidden, weight))
    per_token = (hidden, labels, *([] if columns is None else [columns]))

    def body(first: Any, count: int, outputs: Any) -> Any:
        x, y, *c = chunks.products.barrier(rows(first, count, *per_token))
        z = chunks.products.logits(x.astype(w.dtype), w, bias)
        of_columns = c[0] if c else None
        loss = Loss(chunks.options, distribution=chunks.distribution)
        found, (_, low, *_) = kernels.forward_tokens(loss, z, y, of_columns)
        return put(outputs, chunks.products.barrier((*found, low)), first)

    number = blank(labels)
    outputs = [number] * (4 if chunks.distribution else 3)
    if columns is not None:
        outputs.append(blank(columns))
    if chunks.distribution:
        outputs.append(number)
    *outputs, low = each(labels.shape[0], chunks.count, body, (*outputs, number))
    return tuple(outputs), low


def backward(
    chunks: Chunks,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
    saved: Any,
    cotangents: Any,
) -> Gradients:
    """Returns gradients for what `kernels.backward_tokens` takes, a number a token each."""
    w = weight.astype(operand_dtype(hidden, weight))
    options = tokens.in_place(chunks.options)
    numbers = [one for one in cotangents if one is not None]
    idle = idle_tokens(options, labels, *(one.any(tuple(range(1, one.ndim))) for one in numbers))
    more = labels, columns, saved, cotangents
    flat, tree = jax.tree.flatten(more)

    def body(first: Any, count: int, sums: Any) -> Any:
        x, out, *part = chunks.products.barrier(rows(first, count, hidden, idle, *flat))
        y, c, of_saved, of_cotangents = jax.tree.unflatten(tree, part)
        z = chunks.products.logits(x.astype(w.dtype), w, bias)
        loss = Loss(options, distribution=chunks.distribution)
        dlogits = kernels.backward_tokens(loss, z, y, c, of_saved, of_cotangents)
        return add(sums, dlogits, x, out, first)

    add = partial(tokens.add_gradients, chunks.products, weight, w, bias)
    zeros = tokens.blank_gradients(hidden, weight, bias, chunks.count)
    return tokens.rounded_gradients(
        each(labels.shape[0], chunks.count, body, zeros), hidden, weight, bias
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _known(
    chunks: Chunks,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    outputs: tuple[jax.Array, ...]
    outputs, _ = forward(chunks, hidden, weight, bias, labels, columns)
    return outputs


@partial(_known.defjvp, symbolic_zeros=True)
def _known_jvp(chunks: Chunks, arrays: Any, tangents: Any) -> Any:
    outputs, low = linear.whole(OPERATION, partial(forward, chunks), *arrays)
    entropy = outputs[3] if chunks.distribution else None
    picked = None if arrays[-1] is None else outputs[4 if chunks.distribution else 3]
    saved = outputs[2], low, None, entropy, picked
    rules = Bound(_tangents, chunks), Bound(_pull, chunks)
    return derivative(chunks.distribution, *rules, outputs, saved, arrays, tangents)


def derivative(
    distribution: bool,
    apply: Any,
    transpose: Any,
    outputs: Any,
    saved: Any,
    arrays: Any,
    tangents: Any,
) -> Any:
    """Returns outputs and their tangents, for `linear.bind`'s `apply` and `transpose`.

    Both take the arrays, and what the forward pass `saved`, as residuals.
    """
    moving = outputs[:-1] if distribution else outputs
    of_arrays = [None if one is None else linear.given(one) for one in tangents[:3]]
    found = linear.bind(apply, transpose, (arrays, saved), of_arrays, moving)
    return outputs, aux_outputs.with_correct(distribution, outputs, found)


def _tangents(chunks: Chunks, residuals: Any, tangents: Any) -> Any:
    arrays, _ = residuals
    return tangents_of(chunks, arrays, tangents)


def tangents_of(chunks: Chunks, arrays: Any, tangents: Any) -> Any:
    """Returns the tangents of what `forward` gives but correct, by the dense program."""
    *arrays, labels, columns = arrays
    options = chunks.options

    def plain(hidden: Any, weight: Any, bias: Any) -> Any:
        idle = is_ignored(options, labels)
        z = reference.logits(chunks.products, idle, hidden, weight, bias)
        loss = Loss(options, distribution=chunks.distribution)
        return of_logits.token_outputs(loss, z, labels, columns)

    return linear.tangents_of(plain, arrays, tangents)


def _pull(chunks: Chunks, residuals: Any, cotangents: Any) -> Gradients:
    arrays, saved = residuals
    hidden, weight, bias, labels, columns = arrays
    return backward(chunks, hidden, weight, bias, labels, columns, saved, cotangents)
