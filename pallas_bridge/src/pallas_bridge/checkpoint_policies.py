"""Policies for `jax.checkpoint`: what the backward pass keeps, and what it computes again.

    block = jax.checkpoint(block, policy=checkpoint_policies.save_products)

Results of attention, norms, activations, positions and convolutions have the name that their
operation has in `info()`, such as "flash_attention" (`jax.ad_checkpoint.checkpoint_name`), so that
policies of JAX's own find them too (`jax.checkpoint_policies.save_only_these_names`); those of
`linear_attention` and `gated_delta_rule` are named "linear_attention".
"""

from typing import Any

import jax

__all__ = ["save_attention", "save_products"]

_save_named = jax.checkpoint_policies.save_only_these_names("flash_attention", "linear_attention")
_save_products = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _save_named
)


def save_attention(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what attention of any kind returns, with lse or states; all else is computed again.

    That is S x H x E numbers a sequence, and S x H in float32.
    """
    return _save_named(primitive, *avals, **params)


def save_products(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Keeps what attention and products of matrices return; all else is computed again.

    That leaves norms, activations, positions and sums, which cost little time and much memory.
    """
    return _save_products(primitive, *avals, **params)
