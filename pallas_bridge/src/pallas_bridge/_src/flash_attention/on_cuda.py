"""cuDNN's attention, which runs on NVIDIA GPUs where it has all of the options."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import spec_of
from ..custom_call import vary_alike
from .options import Options

Kernel = Callable[..., tuple[jax.Array, ...]]


def forward(options: Options, others: Kernel, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns o and lse, by `others` where it is not cuDNN's.

    What cuDNN is made of is partitioned by rules of JAX that must see a program's devices, so that
    the choice is part of the traced program.
    """
    function = cudnn(options, *arrays[:3])
    if function is None:
        return others(*arrays)

    def of_cudnn(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = function(*arrays[:3])
        # The caller does not see lse, and the backward pass is cuDNN's too, with its own.
        lse, *_ = vary_alike([jnp.zeros_like(arrays[0][..., 0], jnp.float32), o])
        return o, lse

    found: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cuda=of_cudnn, default=others
    )
    return found


def backward(
    options: Options, others: Kernel, arrays: Sequence[jax.Array], o: Any, lse: Any, do: Any
) -> tuple[jax.Array, ...]:
    """Returns dq, dk and dv, by `others` where they are not cuDNN's."""
    function = cudnn(options, *arrays[:3])
    if function is None:
        return others(*arrays, o, lse, do)

    def of_cudnn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Its forward pass is made again, unless XLA finds that it is the one there was.
        found: tuple[jax.Array, ...] = jax.vjp(function, *arrays[:3])[1](arrays[-1])
        return found

    found: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, o, lse, do, cuda=of_cudnn, default=others
    )
    return found


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

    spec = spec_of(jax.typeof(q))
    if any(one is not None for one in spec):
        # It knows of no explicit axes; what cuts o is what cuts q.
        of_o = jax.sharding.PartitionSpec(*spec)
        function = jax.sharding.auto_axes(function, out_sharding=of_o)
    try:
        jax.eval_shape(function, q, k, v)
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return function
