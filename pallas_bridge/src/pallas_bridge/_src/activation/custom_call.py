"""Activations by the library's kernels, and the derivative of every implementation.

That makes anew what it needs, so that the arrays that were given are all that is kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import linear
from ..arrays import Result
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import Call, bind, vary_alike
from . import reference, sharded_halves
from .declaration import OPERATION
from .options import Options

# What a call takes: x, which may pack two arrays, and a gradient.
PACKED = {"single": "*batch F", "halves": "*batch 2.F", "interleaved": "*batch F.2"}
COLUMNS = "*batch F"


def _bind(
    options: Options,
    name: str,
    operands: tuple[str, ...],
    result: str,
    dense: Any,
    in_parts: Any,
    *arrays: Any,
) -> jax.Array:
    more = () if options.limit is None else (("limit", np.float64(options.limit)),)
    is_halves = options.layout == "halves"
    call = Call(
        operation=OPERATION,
        target=f"xentile_activation_{name}",
        operands=operands,
        results=(Result(result, like=0),),
        attributes=(
            ("kind", options.kind),
            ("layout", options.layout),
            ("alpha", np.float64(options.alpha)),
            ("up_offset", np.float64(options.up_offset)),
            *more,
        ),
        # Entries and pairs stand alone, and may be sharded as they are; halves exchange columns.
        cut=() if is_halves else ("F",),
        in_parts=Bound(in_parts, options) if is_halves else None,
        implementation=options.implementation,
        dense=Bound(dense, options),
        variant=f"{options.kind} {options.layout}",
    )
    return bind(call, *arrays)[0]


def _has_kernel(options: Options) -> bool:
    return options.layout != "apart" and options.implementation != "reference"


def forward(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns y of x, or of gate and up."""
    if not _has_kernel(options):
        return reference.forward(options, *arrays)
    operands = (PACKED[options.layout],)
    return _bind(options, "forward", operands, COLUMNS, _dense, sharded_halves.forward, *arrays)


def _dense(options: Options, x: jax.Array) -> tuple[jax.Array]:
    return (reference.forward(options, x),)


def backward(options: Options, arrays: Sequence[jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradient of x, or those of gate and up."""
    if not _has_kernel(options):
        return reference.gradients(options, arrays, dy)
    packed = PACKED[options.layout]
    in_parts = sharded_halves.backward
    dx = _bind(
        options, "backward", (packed, COLUMNS), packed, _dense_backward, in_parts, *arrays, dy
    )
    return (dx,)


def _dense_backward(options: Options, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    return reference.gradients(options, [x], dy)


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
    y = forward(options, *primals)
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
