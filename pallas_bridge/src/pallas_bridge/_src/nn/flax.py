"""Attention with the arguments that Flax passes to `attention_fn`."""

from typing import Any

import jax
import jax.numpy as jnp

from ..keywords import hinted
from .attention import dot_product_attention, log_once
from .masks import AttentionMask


@hinted
def flax_attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> jax.Array:
    """Attention for `attention_fn` of Flax's multi-head attention, by `dot_product_attention`.

    Arguments are those of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`:
    query [.., S, H, D], key and value [.., Skv, H, D], bias and mask broadcastable to
    [.., H, S, Skv]. `mask` may be a `CausalMask` and the like. Active dropout runs plain JAX with
    the semantics of Flax, and a warning of the logger "pallas_bridge" says so once. The softmax is
    always float32, so `force_fp32_for_softmax` changes nothing, and nor does `precision` for the
    kernels, whose sums are float32.

    Returns:
      [.., S, H, D] in `dtype`, or in the promoted dtype of the arrays.

    Raises:
      ValueError: active dropout without `dropout_rng`.
      NotImplementedError: `module` (sow_weights=True) or another einsum, which need the weights.
    """
    if module is not None or (qk_attn_weights_einsum, attn_weights_value_einsum) != (None, None):
        raise NotImplementedError(
            "nn.flax_attention_fn: module (sow_weights=True) or an einsum is given, and no kernel "
            "returns attention weights; use Flax's own dot_product_attention"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    q, k, v = (jnp.asarray(one).astype(dtype) for one in (query, key, value))
    if not deterministic and dropout_rate > 0:
        if dropout_rng is None:
            raise ValueError("dropout_rng is None; active dropout needs a key")
        log_once("nn.flax_attention_fn runs plain JAX: dropout is active")
        return _with_dropout(
            q, k, v, bias, mask, is_causal, dropout_rng, dropout_rate, broadcast_dropout, precision
        )
    batch = q.shape[:-3]

    def flat(x: jax.Array, axes: int) -> jax.Array:
        return x.reshape(-1, *x.shape[x.ndim - axes :])

    if len(batch) != 1:
        q, k, v = (flat(one, 3) for one in (q, k, v))
        bias, mask = (
            one
            if one is None or isinstance(one, AttentionMask) or jnp.ndim(one) < 4
            else flat(jnp.broadcast_to(one, (*batch, *one.shape[-3:])), 3)
            for one in (bias, mask)
        )
    if mask is not None and not isinstance(mask, AttentionMask) and mask.dtype != bool:
        mask = mask.astype(bool)  # Flax makes masks of floats
    o = dot_product_attention(q, k, v, bias, mask, is_causal=is_causal)
    found: jax.Array = o.reshape(*batch, *o.shape[1:])
    return found


def _with_dropout(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: Any,
    mask: Any,
    is_causal: bool,
    rng: jax.Array,
    rate: float,
    is_broadcast: bool,
    precision: Any,
) -> jax.Array:
    """Returns attention whose weights are dropped as Flax drops them."""
    queries, keys = q.shape[-3], k.shape[-3]
    group = q.shape[-2] // k.shape[-2]
    k, v = (jnp.repeat(one, group, axis=-2) for one in (k, v))
    logits = jnp.einsum(
        "...qhd,...khd->...hqk", q, k, precision=precision, preferred_element_type=jnp.float32
    ) * (q.shape[-1] ** -0.5)
    if bias is not None:
        logits = logits + bias
    masks = [mask.dense(queries, keys) if isinstance(mask, AttentionMask) else mask]
    masks += [jnp.tril(jnp.ones((queries, keys), bool))] if is_causal else []
    for one in masks:
        if one is not None:
            logits = jnp.where(one, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits).astype(q.dtype)
    keep = 1.0 - rate
    shape = weights.shape
    if is_broadcast:
        shape = (1,) * (len(shape) - 2) + shape[-2:]
    kept = jax.random.bernoulli(rng, keep, shape)
    weights = weights * (kept.astype(q.dtype) / jnp.asarray(keep, q.dtype))
    return jnp.einsum("...hqk,...khd->...qhd", weights, v, precision=precision)
