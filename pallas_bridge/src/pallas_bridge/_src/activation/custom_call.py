"""Activations by the library's kernels, and the derivative of every implementation.

That makes anew what it needs, so that the arrays that were given are all that is kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import bind, declared_call, vary_alike
from ..targets import declared
from . import reference, sharded_halves
from .declaration import OPERATION
from .options import Options

FORWARD, BACKWARD = "xentile_activation_forward", "xentile_activation_backward"
BACKWARD_WITH_Y = "xentile_activation_backward_with_y"
(COLUMNS,) = declared(FORWARD).dims("y")


def _bind(
    options: Options, target: str, dense: Any, on_shards: Any, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    is_halves = options.layout == "halves"
    call = declared_call(
        OPERATION,
        target,
        {
            "kind": options.kind,
            "layout": options.layout,
            "alpha": options.alpha,
            "up_offset": options.up_offset,
            "limit": options.limit,
        },
        # Entries and pairs stand alone, and may be sharded as they are; halves exchange columns.
        sharded=() if is_halves else ("F",),
        on_shards=Bound(on_shards, options) if is_halves else None,
        implementation=options.implementation,
        dense=Bound(dense, options),
        variant=f"{options.kind} {options.layout}",
    )
    return bind(call, *arrays)


def _has_kernel(options: Options) -> bool:
    return options.layout != "apart" and options.implementation != "reference"


def forward(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns y of x, or of gate and up."""
    if not _has_kernel(options):
        return reference.forward(options, *arrays)
    return _bind(options, FORWARD, _dense, sharded_halves.forward, *arrays)[0]


def _dense(options: Options, x: jax.Array) -> tuple[jax.Array]:
    return (reference.forward(options, x),)


def backward(options: Options, arrays: Sequence[jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradient of x, or those of gate and up."""
    if not _has_kernel(options):
        return reference.gradients(options, arrays, dy)
    return _bind(options, BACKWARD, _dense_backward, sharded_halves.backward, *arrays, dy)


def _dense_backward(options: Options, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    return reference.gradients(options, [x], dy)


def backward_with_y(options: Options, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of packed x, and y as `forward` does, in one pass over memory."""
    if not _has_kernel(options):
        return _dense_with_y(options, x, dy)
    dx, y = _bind(options, BACKWARD_WITH_Y, _dense_with_y, sharded_halves.backward_with_y, x, dy)
    return dx, y


def _dense_with_y(options: Options, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Otherwise XLA would merge y with that of the forward pass, and keep it until here.
    x, dy = jax.lax.optimization_barrier((x, dy))
    y, vjp = jax.vjp(Bound(reference.forward, options), x)
    return *vjp(dy), y


def activation(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns y of x, or of gate and up.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    if _has_kernel(options):
        check_dtype("x", arrays[0], REFERENCE_TAKES_OTHERS)
    y: jax.Array = _activation(options, *vary_alike(arrays))
    return y


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _activation(options: Options, *arrays: jax.Array) -> jax.Array:
    return forward(options, *arrays)


def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    y = OPERATION.named(forward(options, *primals))
    moving = [linear.given(tangent) for tangent in tangents]
    if all(tangent is None for tangent in moving):
        return y, jnp.zeros_like(y)
    dims = [COLUMNS] * len(primals)
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    found = linear.bind(apply, transpose, [*primals], moving, [y], (dims, dims))
    return y, found[0]


def _apply(options: Options, arrays: Any, tangents: Any) -> Sequence[jax.Array]:
    return [linear.tangents_of(partial(reference.forward, options), arrays, tangents)]


def _transpose(options: Options, arrays: Any, cotangents: Any) -> Sequence[jax.Array]:
    return backward(options, arrays, cotangents[0])


_activation.defjvp(_jvp, symbolic_zeros=True)
