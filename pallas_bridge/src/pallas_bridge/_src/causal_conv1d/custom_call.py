"""Causal convolution by the library's kernels, and the derivative of every implementation."""

from functools import partial
from typing import Any

import jax

from .. import linear
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import bind, declared_call, vary_alike
from ..targets import declared
from . import reference
from .declaration import OPERATION
from .reference import Options

FORWARD, BACKWARD = "xentile_causal_conv1d_forward", "xentile_causal_conv1d_backward"


def _attributes(options: Options) -> dict[str, Any]:
    return {
        "width": options.width,
        "silu": options.silu,
        "bias": options.has_bias,
        "initial_state": options.has_state,
        "segments": options.has_segments,
    }


def _bind(options: Options, target: str, dense: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    call = declared_call(
        OPERATION,
        target,
        _attributes(options),
        implementation=options.implementation,
        dense=Bound(dense, options),
        # XLA shards its own program by batch, tokens and channels.
        dense_if_cut=True,
    )
    return bind(call, *arrays)


def convolve(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns what `reference.forward` does, by a call of a kernel.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    for index in options.moving:
        check_dtype(options.names[index], arrays[index], REFERENCE_TAKES_OTHERS)
    # Within `shard_map`, the transpose of this is the sum over devices for shared arrays.
    y: jax.Array = _convolve(options, *vary_alike(arrays))
    return y


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolve(options: Options, *arrays: jax.Array) -> jax.Array:
    return _bind(options, FORWARD, reference.forward, *arrays)[0]


@partial(_convolve.defjvp, symbolic_zeros=True)
def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    y = _convolve(options, *primals)
    moving = [linear.given(tangents[index]) for index in options.moving]
    names = declared(FORWARD).operands(_attributes(options))
    dims = (names, [names[index] for index in options.moving])
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    (dy,) = linear.bind(apply, transpose, [*primals], moving, [y], dims)
    return y, dy


def _apply(options: Options, arrays: Any, tangents: Any) -> Any:
    every: list[Any] = [None] * len(arrays)
    for index, tangent in zip(options.moving, tangents, strict=True):
        every[index] = tangent
    return linear.tangents_of(partial(reference.forward, options), arrays, every)


def _transpose(options: Options, arrays: Any, cotangents: Any) -> Any:
    (dy,) = cotangents
    if dy is None:
        return [None] * len(options.moving)
    dx, dweight, *others = _bind(options, BACKWARD, reference.gradients, *arrays, dy)
    found = [dx, dweight.sum(range(dweight.ndim - 2))]
    if options.has_bias:
        dbias, *others = others
        found.append(dbias.sum(range(dbias.ndim - 1)))
    return [*found, *others]
