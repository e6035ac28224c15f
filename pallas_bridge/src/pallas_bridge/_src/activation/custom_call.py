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
from . import reference
from .declaration import OPERATION
from .options import Options

# x as a call has it: its axes tell what it packs.
PACKED = {"single": "*batch F", "halves": "*batch P F", "interleaved": "*batch F P"}
COLUMNS = "*batch F"


def unpacked(options: Options, x: jax.Array) -> jax.Array:
    """Returns x with an axis of 2 for what it packs."""
    *leading, width = x.shape
    if options.layout == "halves":
        return x.reshape(*leading, 2, width // 2)
    if options.layout == "interleaved":
        return x.reshape(*leading, width // 2, 2)
    return x


def packed(options: Options, x: jax.Array) -> jax.Array:
    """Returns x with its columns in one axis."""
    if options.layout == "single":
        return x
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _bind(
    options: Options, name: str, operands: tuple[str, ...], result: Result, dense: Any, *arrays: Any
) -> jax.Array:
    more = () if options.limit is None else (("limit", np.float64(options.limit)),)
    call = Call(
        operation=OPERATION,
        target=f"xentile_activation_{name}",
        operands=operands,
        results=(result,),
        attributes=(
            ("kind", options.kind),
            ("layout", options.layout),
            ("alpha", np.float64(options.alpha)),
            ("up_offset", np.float64(options.up_offset)),
            *more,
        ),
        implementation=options.implementation,
        dense=dense,
        variant=f"{options.kind} {options.layout}",
    )
    return bind(call, *arrays)[0]


def _has_kernel(options: Options) -> bool:
    return options.layout != "apart" and options.implementation != "reference"


def forward(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns y of x, or of gate and up."""
    if not _has_kernel(options):
        return reference.forward(options, *arrays)

    operands, result = (PACKED[options.layout],), Result(COLUMNS, like=0)
    dense, x = Bound(_dense, options), unpacked(options, *arrays)
    return _bind(options, "forward", operands, result, dense, x)


def _dense(options: Options, x: jax.Array) -> tuple[jax.Array]:
    return (reference.forward(options, packed(options, x)),)


def backward(options: Options, arrays: Sequence[jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradient of x, or those of gate and up."""
    if not _has_kernel(options):
        return reference.gradients(options, arrays, dy)

    operands = (PACKED[options.layout], COLUMNS)
    result = Result(PACKED[options.layout], like=0)
    dense, x = Bound(_dense_backward, options), unpacked(options, *arrays)
    return (packed(options, _bind(options, "backward", operands, result, dense, x, dy)),)


def _dense_backward(options: Options, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    (dx,) = reference.gradients(options, [packed(options, x)], dy)
    return (unpacked(options, dx),)


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
