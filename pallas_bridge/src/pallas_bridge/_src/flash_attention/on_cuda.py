"""Attention where the library has no kernel: cuDNN's on NVIDIA GPUs, else XLA's own program."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import reference
from .options import Options


def forward(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o and lse."""
    plain = partial(reference.forward, options)
    function = cudnn(options, *arrays[:3])
    if function is None:
        return plain(*arrays)

    def of_cudnn(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Nothing uses lse, and XLA drops it.
        return function(*arrays[:3]), plain(*arrays)[1]

    found: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
        *arrays, cuda=of_cudnn, default=plain
    )
    return found


def gradients(
    options: Options, arrays: Sequence[jax.Array], do: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns dq, dk, dv and, with sinks, dsinks."""

    def plain(do: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return reference.gradients(options, arrays, do, dlse)

    function = None if dlse is not None else cudnn(options, *arrays[:3])
    if function is None:
        return plain(do, *arrays)

    def of_cudnn(do: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Its forward pass is made again, unless XLA finds that it is the one there was.
        found: tuple[jax.Array, ...] = jax.vjp(function, *arrays[:3])[1](do)
        return found

    made: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        do, *arrays, cuda=of_cudnn, default=plain
    )
    return made


def cudnn(options: Options, q: Any, k: Any, v: Any) -> Callable[..., jax.Array] | None:
    """Returns cuDNN's attention of q, k and v of such types; None where it has not all options.

    JAX says so too, as where this process has no cuDNN. lse is not its: JAX rounds what it gives.
    """
    has_more = options.has_lengths or options.has_segments or options.has_sinks or options.gives_lse
    queries, keys = q.shape[-2], k.shape[-2]
    if has_more or options.softcap is not None or q.dtype == jnp.float32 or 0 in (queries, keys):
        return None
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return None
    before, after = options.window
    is_causal = options.causal or after == 0
    if (before, after) != (None, None) and not is_causal:
        return None
    if is_causal and queries != keys:
        return None
    more: dict[str, Any] = {}
    if before is not None:
        more["local_window_size"] = (before, 0)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        *batch, heads, group, queries, width = q.shape
        # [B, S, H, D], as it came.
        wide = jnp.moveaxis(q.reshape(-1, heads * group, queries, width), 1, 2)
        of_keys = (jnp.moveaxis(x.reshape(-1, heads, *x.shape[-2:]), 1, 2) for x in (k, v))
        o = jax.nn.dot_product_attention(
            wide,
            *of_keys,
            scale=options.scale,
            is_causal=is_causal,
            implementation="cudnn",
            **more,
        )
        return jnp.moveaxis(o, 1, 2).reshape(*batch, heads, group, queries, v.shape[-1])

    try:
        jax.eval_shape(function, q, k, v)
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return function
