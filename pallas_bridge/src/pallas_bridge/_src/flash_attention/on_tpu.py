"""Attention on TPUs: JAX's splash attention, where it has the options.

It has a derivative of o alone, whose forward pass is made again in the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import pallas
from ..bound import Bound
from .options import Options
from .reference import Operands

# Queries and keys that it takes are a multiple of these, and blocks as many of them as divide both.
LANES = 128
MOST_BLOCK = 512

Kernel = Callable[[pallas.Target, Any], Callable[..., Sequence[jax.Array]]]


def has_options(options: Options, q: Any, k: Any) -> bool:
    """Whether splash attention gives what is asked for.

    A query that sees no key gets the mean of values there, so that each must see one for certain.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return False
    after = 0 if options.causal else options.window[1]
    # The first query is the one that may come before all keys.
    sees_one = after is None or keys - queries + after >= 0
    return (
        q.dtype in (jnp.bfloat16, jnp.float32)
        and queries > 0
        and keys > 0
        and queries % LANES == 0
        and keys % LANES == 0
        and sees_one
        and not options.has_lengths
        and (not options.has_segments or (options.is_own_segment and queries == keys))
    )


def forward(options: Options, q: Any, k: Any, v: Any) -> Kernel | None:
    """Returns what makes o and lse of a call's operands; None where splash attention does not."""
    if not has_options(options, q, k):
        return None
    return Bound(_kernel, options, _forward)


def gradients(options: Options, q: Any, k: Any, v: Any) -> Kernel | None:
    """Returns what makes gradients of a call's operands; None where splash attention does not."""
    if not has_options(options, q, k):
        return None
    return Bound(_kernel, options, _gradients)


def _kernel(
    options: Options, function: Callable[..., Any], target: pallas.Target, _: Any
) -> Callable[..., Sequence[jax.Array]]:
    return partial(_mapped, options, target, function)


def _mapped(
    options: Options, target: pallas.Target, function: Callable[..., Any], *operands: jax.Array
) -> Sequence[jax.Array]:
    """Returns function(options, target, *operands) of each head of keys."""
    leading = operands[1].shape[:-2]
    flat = [x.reshape(-1, *x.shape[len(leading) :]) for x in operands]
    found = jax.vmap(partial(function, options, target))(*flat)
    return [x.reshape(*leading, *x.shape[1:]) for x in found]


def _splash(
    options: Options, target: pallas.Target, q: Any, k: Any, *, gives_lse: bool
) -> Callable[..., Any]:
    """Returns the kernel of a head of keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    group, queries, _ = q.shape
    shape = (queries, k.shape[0])
    offset = k.shape[0] - queries
    before, after = options.window
    if options.causal:
        after = 0
    mask: Any = masks.FullMask(shape)
    if (before, after) == (None, 0):
        mask = masks.CausalMask(shape, offset=offset)
    elif (before, after) != (None, None):
        mask = masks.LocalMask(shape, window_size=(before, after), offset=offset)
    block = [next(n for n in range(MOST_BLOCK, 0, -LANES) if extent % n == 0) for extent in shape]
    of_queries, of_keys = block
    sizes = splash.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    made: Callable[..., Any] = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * group),
        block_sizes=sizes,
        save_residuals=gives_lse,
        attn_logits_soft_cap=options.softcap,
        interpret=target.interpret is not False,
    )
    return made


def _arguments(options: Options, arrays: Sequence[jax.Array]) -> tuple[list[Any], dict[str, Any]]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    of = Operands.of(options, arrays)
    more: dict[str, Any] = {}
    if of.segments is not None:
        more["segment_ids"] = splash.SegmentIds(*of.segments)
    if of.sinks is not None:
        more["sinks"] = of.sinks
    return [of.q, of.k, of.v], more


def _scaled(options: Options, q: jax.Array) -> jax.Array:
    # Rounded, where the scale is no power of 2: splash attention has none.
    return (q.astype(jnp.float32) * options.scale).astype(q.dtype)


def _forward(options: Options, target: pallas.Target, *arrays: jax.Array) -> Sequence[jax.Array]:
    (q, k, v), more = _arguments(options, arrays)
    kernel = _splash(options, target, q, k, gives_lse=True)
    o, (lse,) = kernel(_scaled(options, q), k, v, **more)
    return o, lse


def _gradients(
    options: Options, target: pallas.Target, *operands: jax.Array
) -> Sequence[jax.Array]:
    arrays, do = operands[:-4], operands[-2]
    (q, k, v), more = _arguments(options, arrays)
    kernel = _splash(options, target, q, k, gives_lse=False)
    sinks = more.pop("sinks", None)

    def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        of_sinks = {"sinks": sinks[0]} if sinks else {}
        return kernel(_scaled(options, q), k, v, **more, **of_sinks)

    moving = (q, k, v) if sinks is None else (q, k, v, sinks)
    found: Sequence[jax.Array] = jax.vjp(function, *moving)[1](do)
    return found
