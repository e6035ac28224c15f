"""The dense program: all logits, and the reference of cross-entropy over them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..cross_entropy import reference
from ..custom_call import vary_alike
from ..losses.options import Options, is_ignored
from ..losses.reduction import weighted
from .product import Products, operands, without_rows
from .tokens import Bias


def per_token(
    options: Options,
    products: Products,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse, each [N] in f32."""
    z = logits(products, is_ignored(options, labels), hidden, weight, bias)
    return reference.per_token(options, z, labels)


def reduced(
    options: Options,
    products: Products,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss, and lse [N]."""
    # Tokens with a factor of 0 have no part in the sum, but their lse may have a gradient.
    *_, lse = per_token(options, products, hidden, weight, bias, labels)
    idle = is_ignored(options, labels) | (factors == 0)
    loss, *_ = reference.per_token(options, logits(products, idle, hidden, weight, bias), labels)
    return weighted(loss, factors).sum(), lse


def logits(
    products: Products, idle: jax.Array, hidden: jax.Array, weight: jax.Array, bias: Bias
) -> jax.Array:
    """Returns logits [N, V] in f32, whose gradient is taken to be 0 for tokens that are idle [N].

    JAX alone would multiply dlogits in f32 with operands of 16 bits: here they are rounded once to
    the operands' dtype, as kernels round them.
    """
    arrays = [idle, hidden, weight, *([] if bias is None else [bias])]
    idle, hidden, weight, *of_bias = vary_alike(arrays)
    z: jax.Array = _product(products, idle, hidden, weight, of_bias[0] if of_bias else None)
    return z


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(
    products: Products, idle: jax.Array, hidden: jax.Array, weight: jax.Array, bias: Bias
) -> jax.Array:
    return products.logits(*operands(hidden, weight), bias)


@partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(products: Products, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    _, *moving = map(linear.given, tangents)
    apply, transpose = Bound(_tangents, products), Bound(_pull, products)
    logits = _product(products, *arrays)
    (found,) = linear.bind(apply, transpose, arrays, moving, [logits])
    return logits, found


def _tangents(products: Products, arrays: Any, tangents: Any) -> tuple[jax.Array]:
    idle, hidden, weight, _ = arrays
    of_hidden, of_weight, of_bias = tangents
    parts = []
    if of_hidden is not None:
        parts.append(products.logits(*operands(of_hidden, weight), None))
    if of_weight is not None:
        parts.append(products.logits(*operands(hidden, of_weight), None))
    if of_bias is not None:
        parts.append(of_bias.astype(jnp.float32)[None])
    shape = len(hidden), weight.shape[products.vocab_axis]
    total = jnp.broadcast_to(sum(parts[1:], parts[0]), shape)
    return (without_rows(idle, total),)


def _pull(products: Products, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    (idle, hidden, weight, bias), (dlogits,) = arrays, cotangents
    x, w = operands(hidden, weight)
    dlogits = without_rows(idle, dlogits)
    dz = dlogits.astype(x.dtype)
    dhidden = without_rows(idle, products.of_hidden(dz, w, hidden.dtype))
    dweight = products.of_weight(dz, without_rows(idle, x), weight.dtype)
    dbias = None if bias is None else dlogits.sum(0, dtype=jnp.float32).astype(bias.dtype)
    return dhidden, dweight, dbias
