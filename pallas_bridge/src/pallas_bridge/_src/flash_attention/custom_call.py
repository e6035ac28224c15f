"""Attention by the library's kernels, and the derivative of every implementation.

A call has a head of keys, with the queries that share it, for each of its leading axes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear, one_program
from ..bound import Bound
from ..custom_call import bind, declared_call, vary_alike
from ..targets import declared
from . import cudnn, decoding, on_tpu, reference
from .declaration import OPERATION
from .options import COLUMNS_STEP, Options

FORWARD, BACKWARD = "xentile_flash_attention_forward", "xentile_flash_attention_backward"
Q, K, V, OUT, LSE = declared(FORWARD).dims("q", "k", "v", "o", "lse")
# Arrays of tokens with all of their heads after another, as users have them.
TOKENS_FIRST = ((Q, "S"), (K, "K"), (V, "K"), (OUT, "S"))


def _attributes(options: Options) -> dict[str, Any]:
    return {
        "scale": options.scale,
        "softcap": options.softcap,
        "segments": options.has_segments,
        "sinks": options.has_sinks,
    }


def dims(options: Options) -> tuple[str, ...]:
    """Returns the dims of what both passes take."""
    return declared(FORWARD).operands(_attributes(options))


def _for_cuda(options: Options, q: Any, v: Any) -> tuple[tuple[str, Any], ...]:
    """Returns what the backward pass has on GPUs alone: scratch, where there are kernels for it.

    Those for Hopper add up dq there, in float32, and have five GEMMs rather than seven.
    """
    columns = max(q.shape[-1], v.shape[-1])
    if q.dtype == jnp.float32 or columns > 128:
        return ()
    return ("scratch_columns", 64 if columns <= 64 else 128), (
        "deterministic",
        options.deterministic,
    )


def _dense_on(q: Any, v: Any) -> tuple[str, ...]:
    """Returns where XLA's own program runs, though the library has kernels for other arrays."""
    columns = (q.shape[-1], v.shape[-1])
    return ("cuda",) if any(one % COLUMNS_STEP for one in columns) else ()


def forward(
    options: Options, *arrays: jax.Array, has_gradient: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns o [.., G, S, E] and lse [.., G, S] of what `dims` declares.

    Where options say that nobody sees lse, it is what the gradient needs of the implementation.
    """
    if options.implementation == "reference":
        return reference.forward(options, *arrays)
    call = declared_call(
        OPERATION,
        FORWARD,
        _attributes(options),
        outward=TOKENS_FIRST if options.tokens_first else (),
        implementation=options.implementation,
        dense=Bound(reference.forward, options),
        dense_on=_dense_on(arrays[0], arrays[2]),
        for_tpu=on_tpu.forward(options, *arrays[:3]),
    )
    kernel = partial(bind, call)
    if not has_gradient and decoding.has_kernel(options, *arrays[:3]):
        kernel = partial(decoding.forward, options, kernel)
    if options.implementation is not None:
        o, lse = kernel(*arrays)
    else:
        o, lse = cudnn.forward(options, kernel, *arrays, has_gradient=has_gradient)
    return o, lse


def backward(
    options: Options, arrays: Sequence[jax.Array], o: jax.Array, lse: jax.Array, do: Any, dlse: Any
) -> tuple[jax.Array, ...]:
    """Returns dq, dk, dv and, with sinks, dsinks; `dlse` may be None for zeros."""
    of_lse = dlse is not None
    if options.implementation == "reference":
        return _dense_backward(options, of_lse, *arrays, o, lse, do, dlse)
    call = declared_call(
        OPERATION,
        BACKWARD,
        _attributes(options),
        outward=TOKENS_FIRST if options.tokens_first else (),
        for_cuda=_for_cuda(options, arrays[0], arrays[2]),
        implementation=options.implementation,
        dense=Bound(_dense_backward, options, of_lse),
        dense_on=_dense_on(arrays[0], arrays[2]),
        for_tpu=None if of_lse or options.is_key_block else on_tpu.gradients(options, *arrays[:3]),
    )

    def kernel(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(call, *operands, dlse if of_lse else jnp.zeros_like(lse))

    if options.implementation is not None or of_lse:
        return kernel(*arrays, o, lse, do)
    return cudnn.backward(options, kernel, arrays, o, lse, do)


def _dense_backward(options: Options, of_lse: bool, *operands: Any) -> tuple[jax.Array, ...]:
    *arrays, o, lse, do, given = operands
    dlse = given if of_lse else None
    if options.is_key_block:
        do, dlse = reference.key_block_cotangents(options, arrays, o, lse, do, dlse)
    return reference.gradients(options, arrays, do, dlse)


def attention(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o [.., G, S, E] and lse [.., G, S] of what `dims` declares."""
    results = (0, 1) if options.gives_lse else (0,)
    run = Bound(_attention, options)
    found: tuple[jax.Array, jax.Array] = one_program.run(run, *vary_alike(arrays), results=results)
    return found


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return forward(options, *arrays)


def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    o, lse = map(OPERATION.named, forward(options, *primals, has_gradient=True))
    places = _moving(options, len(primals))
    moving = [linear.given(tangents[place]) for place in places]
    if all(tangent is None for tangent in moving):
        return (o, lse), (jnp.zeros_like(o), jnp.zeros_like(lse))
    names = dims(options)
    declared = ([*names, OUT, LSE], [names[place] for place in places])
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    found = linear.bind(apply, transpose, [*primals, o, lse], moving, [o, lse], declared)
    return (o, lse), tuple(found)


_attention.defjvp(_jvp, symbolic_zeros=True)


def _moving(options: Options, count: int) -> list[int]:
    """Returns which of `count` arrays have a derivative: q, k, v and the sinks."""
    return [0, 1, 2, *([count - 1] if options.has_sinks else [])]


def _apply(options: Options, residuals: Any, tangents: Any) -> Sequence[jax.Array]:
    *arrays, _, _ = residuals
    every: list[Any] = [None] * len(arrays)
    for place, tangent in zip(_moving(options, len(arrays)), tangents, strict=True):
        every[place] = tangent
    found: Sequence[jax.Array] = linear.tangents_of(
        partial(reference.forward, options), arrays, every
    )
    return [*found]


def _transpose(options: Options, residuals: Any, cotangents: Any) -> Sequence[Any]:
    *arrays, o, lse = residuals
    do, dlse = cotangents
    if do is None and dlse is None:
        return [None] * len(_moving(options, len(arrays)))
    do = jnp.zeros_like(o) if do is None else do
    return backward(options, arrays, o, lse, do, dlse)
