"""Policies for `jax.checkpoint`: what the backward pass keeps, and what it computes again.

    block = jax.checkpoint(block, policy=checkpoint_policies.save_products)

Results of attention, norms, activations, positions and convolutions have the name that their
operation has in `info()`, such as "flash_attention" (`jax.ad_checkpoint.checkpoint_name`), so that
policies of JAX's own find them too (`jax.checkpoint_policies.save_only_these_names`); those of
`linear_attention` and `gated_delta_rule` are named "linear_attention", gate and up of `gated_mlp`
"gated_mlp", and sums of `rms_norm` and `rms_norm_linear` with a residual, and rstd,
"rms_norm_sum".
"""

from typing import Any

import jax

__all__ = [
    "save_attention",
    "save_products",
    "save_products_and_sums",
    "save_sums",
]

_ATTENTION = ("flash_attention", "linear_attention")
_SUMS = (*_ATTENTION, "rms_norm_sum")
_policies = jax.checkpoint_policies
_save_attention = _policies.save_only_these_names(*_ATTENTION)
_save_sums = _policies.save_only_these_names(*_SUMS)
_save_products = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _save_attention
)
_save_products_and_sums = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable, _save_sums
)


def save_attention(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what attention of any kind returns, with lse or states; all else is computed again.

    That is S x H x E numbers a sequence, and S x H in float32.
    """
    return _save_attention(primitive, *avals, **params)


def save_sums(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what `save_attention` does, and the residual stream after each sum within a norm.

    It is for blocks of `rms_norm_linear` with a residual: their arguments, two arrays [.., D], then
    need not be kept, and what was added to the stream is not computed again.
    """
    return _save_sums(primitive, *avals, **params)


def save_products(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what attention and products of matrices return; all else is computed again.

    That leaves norms, activations, positions and sums, which cost little time and much memory.
    """
    return _save_products(primitive, *avals, **params)


def save_products_and_sums(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what `save_products` and `save_sums` do.

    In blocks of `rms_norm_linear` and `gated_mlp` that takes less memory than `save_products`, and
    the backward pass computes only positions, normalised rows and the inner array again.
    """
    return _save_products_and_sums(primitive, *avals, **params)
