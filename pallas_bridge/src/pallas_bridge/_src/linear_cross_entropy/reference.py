"""The dense program: all logits, and the reference of cross-entropy over them."""

import jax

from ..cross_entropy import reference
from ..cross_entropy.options import Options
from .product import Products
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
    logits = products.logits(hidden, weight, bias, hidden.dtype)
    return reference.per_token(options, logits, labels)


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
    logits = products.logits(hidden, weight, bias, hidden.dtype)
    return reference.reduced(options, logits, labels, factors)
