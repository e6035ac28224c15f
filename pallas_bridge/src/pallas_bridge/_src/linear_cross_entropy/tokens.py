"""All columns of a chunk of tokens at a time, through the kernels of cross-entropy.

A chunk's logits are a product, their gradient takes their place, and two more products take it from
there to hidden and weight (the chunks are those of Liger, Hsu et al., 2024). Where the reduction is
inside, that happens in the forward pass: 3 products of that size instead of 4. Logits and their
gradient are f32, the latter rounded once as an operand, and gradients of the weight are summed in
f32.
"""

import dataclasses
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from ..cross_entropy import calls as kernels
from ..losses.options import Options, is_ignored
from .product import Products, blank, each, holds_all, operand_dtype, without_rows

Bias = jax.Array | None
Gradients = tuple[jax.Array, jax.Array, Bias]


def forward(
    options: Options,
    products: Products,
    chunk: int,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low, each [N] in f32."""
    w = weight.astype(operand_dtype(hidden, weight))

    def body(first: Any, count: int, outputs: Any) -> Any:
        x, y = products.barrier(rows(first, count, hidden, labels))
        z = products.logits(x.astype(w.dtype), w, bias)
        return put(outputs, products.barrier(kernels.forward(options, z, y)), first)

    outputs = (blank(labels),) * 4
    loss, logps, lse, lse_low = each(labels.shape[0], chunk, body, outputs)
    return loss, logps, lse, lse_low


def fused(
    options: Options,
    products: Products,
    chunk: int,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Gradients]:
    """Returns loss, lse and lse_low, each [N] in f32, and gradients for cotangents of the loss."""
    w = weight.astype(operand_dtype(hidden, weight))
    idle = idle_tokens(options, labels, factors)

    def body(first: Any, count: int, carry: Any) -> Any:
        outputs, sums = carry
        x, y, g, out = products.barrier(rows(first, count, hidden, labels, factors, idle))
        z = products.logits(x.astype(w.dtype), w, bias)
        *found, dlogits = kernels.fused(in_place(options), options.every_token, z, y, g)
        return put(outputs, products.barrier(found), first), add(sums, dlogits, x, out, first)

    add = partial(add_gradients, products, weight, w, bias)
    outputs = (blank(labels),) * 3
    outputs, sums = each(
        labels.shape[0], chunk, body, (outputs, blank_gradients(hidden, weight, bias, chunk))
    )
    return *outputs, rounded_gradients(sums, hidden, weight, bias)


def backward(
    options: Options,
    products: Products,
    chunk: int,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> Gradients:
    """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse), each [N]."""
    w = weight.astype(operand_dtype(hidden, weight))
    idle = idle_tokens(options, labels, *cotangents)

    def body(first: Any, count: int, sums: Any) -> Any:
        given = rows(first, count, hidden, labels, idle, *saved, *cotangents)
        x, y, out, lse, low, *given = products.barrier(given)
        z = products.logits(x.astype(w.dtype), w, bias)
        g, h, k = given
        dlogits = kernels.backward(in_place(options), z, y, (lse, low), (g, h, k))
        return add(sums, dlogits, x, out, first)

    add = partial(add_gradients, products, weight, w, bias)
    sums = each(labels.shape[0], chunk, body, blank_gradients(hidden, weight, bias, chunk))
    return rounded_gradients(sums, hidden, weight, bias)


def in_whole_chunks(
    name: str,
    run: Callable[..., Any],
    chunk: int,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    *of_tokens: Any,
) -> Any:
    """Returns what `run`, "forward", "fused" or "backward", does with as many tokens every time.

    The last chunk is padded with tokens that have no cotangent. `of_tokens` have a number a token.
    """
    count = hidden.shape[0]
    hidden, *numbers = padded(chunk, hidden, *of_tokens)
    found = run(hidden, weight, bias, *numbers)

    def cut(gradients: Gradients) -> Gradients:
        dhidden, dweight, dbias = gradients
        return dhidden[:count], dweight, dbias

    if name == "backward":
        return cut(found)
    return tuple(cut(one) if isinstance(one, tuple) else one[:count] for one in found)


def padded(chunk: int, *of_tokens: Any) -> list[Any]:
    """Returns arrays [N, ..], and None, with zeros for tokens that fill the last chunk."""

    def fill(x: jax.Array) -> jax.Array:
        count = x.shape[0]
        # As JAX knows a symbolic one for a multiple of the chunk.
        whole = chunk * ((count + chunk - 1) // chunk)
        return jnp.pad(x, [(0, whole - count), *[(0, 0)] * (x.ndim - 1)])

    filled: list[Any] = jax.tree.map(fill, list(of_tokens))
    return filled


def in_place(options: Options) -> Options:
    """Returns options by which dlogits take the place of logits, which nothing else reads."""
    return dataclasses.replace(options, donate_logits=True)


def idle_tokens(options: Options, labels: jax.Array, *cotangents: jax.Array) -> jax.Array:
    """Returns which tokens [N] take no part: ignored ones, and those without a cotangent."""
    nothing = (~one if one.dtype == bool else one == 0 for one in cotangents)
    has_none = reduce(operator.and_, nothing)
    return is_ignored(options, labels) | has_none


def rows(first: Any, count: int, *arrays: jax.Array) -> list[jax.Array]:
    """Returns `count` rows of each array."""
    return [jax.lax.dynamic_slice_in_dim(array, first, count) for array in arrays]


def put(whole: Any, parts: Any, first: Any) -> Any:
    """Returns arrays with parts at their rows from `first` on, in the dtype that they have."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(one, part.astype(one.dtype), first, 0)
        for one, part in zip(whole, parts, strict=True)
    )


def blank_gradients(hidden: jax.Array, weight: jax.Array, bias: Bias, chunk: int) -> Any:
    """Returns where gradients go; None for one chunk.

    Those of hidden are as they will be, and sums in f32 of the others.
    """
    if holds_all(chunk, hidden.shape[0]):
        return None
    sums = [blank(x) for x in (weight, bias) if x is not None]
    return blank(hidden, dtype=hidden.dtype), *sums


def add_gradients(
    products: Products,
    weight: jax.Array,
    w: jax.Array,
    bias: Bias,
    sums: Any,
    dlogits: jax.Array,
    x: jax.Array,
    idle: jax.Array,
    first: Any,
) -> Any:
    """Adds gradients of a chunk with hidden states `x`; `w` is the weight as an operand."""
    of_bias = [] if bias is None else [dlogits.sum(0, dtype=jnp.float32)]
    of_hidden = without_rows(idle, products.of_hidden(dlogits, w, x.dtype))
    x = without_rows(idle, x).astype(w.dtype)
    if sums is None:  # one chunk: nothing to add to, and one rounding
        return of_hidden, products.of_weight(dlogits, x, weight.dtype), *of_bias
    dhidden, dweight, *dbias = sums
    (dhidden,) = put((dhidden,), (of_hidden,), first)
    dweight = products.add_of_weight(dweight, dlogits, x)
    return dhidden, dweight, *(one + other for one, other in zip(dbias, of_bias, strict=True))


def rounded_gradients(sums: Any, hidden: jax.Array, weight: jax.Array, bias: Bias) -> Gradients:
    """Returns gradients of sums, in the dtypes of what they belong to."""
    if sums is None:  # no tokens
        zeros: Gradients = jax.tree.map(jnp.zeros_like, (hidden, weight, bias))
        return zeros
    dhidden, dweight, *dbias = sums
    dbias_or_none = None if bias is None else dbias[0].astype(bias.dtype)
    return dhidden, dweight.astype(weight.dtype), dbias_or_none


def scaled(gradients: Gradients, dloss: jax.Array) -> Gradients:
    """Returns gradients times the cotangent of their loss, a product in f32; XLA leaves 1 out."""
    found: Gradients = jax.tree.map(
        lambda one: (one.astype(jnp.float32) * dloss).astype(one.dtype), gradients
    )
    return found
