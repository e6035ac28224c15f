"""Rotary position embedding by the library's kernel, and the derivative of every implementation.

The map is linear in x, so that its derivative is itself, and reverse mode its transpose: the same
kernel with the sign of sines changed. Tables are all that is kept, and derivatives of any order
run by kernels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from .. import linear
from ..arrays import spec_of
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import bind, declared_call, vary_alike
from ..targets import declared
from . import reference
from .declaration import OPERATION
from .options import Options

# Tokens of a sequence and heads may be sharded, so that each head of a token has its own index into
# the tables, which all have whole.
TARGET = "xentile_rope"
ROWS, INDICES, TABLE = declared(TARGET).dims("x", "indices", "cos")


def forward(
    options: Options, x: jax.Array, indices: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    """Returns rotated x."""
    if options.implementation == "reference":
        return reference.rotate(options, x, cos, sin)
    call = declared_call(
        OPERATION,
        TARGET,
        {"interleaved": options.interleaved, "inverse": options.inverse},
        implementation=options.implementation,
        dense=Bound(_dense, options),
        variant="interleaved" if options.interleaved else "halves",
    )
    return bind(call, x, indices, cos, sin)[0]


def _dense(
    options: Options, x: jax.Array, _: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array]:
    return (reference.rotate(options, x, cos, sin),)


def rope(options: Options, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns rotated x [.., S, H, D] by tables [S, R / 2], or [.., S, R / 2] with all of x's axes.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    if options.implementation != "reference":
        check_dtype("x", x, REFERENCE_TAKES_OTHERS)
    indices = jax.lax.broadcasted_iota(np.int32, x.shape[:-1], x.ndim - 3)
    indices, cos, sin = (laid_out(one, x) for one in (indices, cos, sin))
    x, *tables = vary_alike([x, indices, cos, sin])
    return OPERATION.named(_rotate(options, tables, x))


def _rotate(options: Options, tables: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    # Linear in x: its derivative is itself, and its transpose a rotation too.
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    (y,) = linear.bind(apply, transpose, [*tables], [x], [x], ((INDICES, TABLE, TABLE), (ROWS,)))
    return y


def _apply(options: Options, tables: Any, given: Sequence[jax.Array]) -> Sequence[jax.Array]:
    return [forward(options, *given, *tables)]


def _transpose(options: Options, tables: Any, cotangents: Any) -> Sequence[Any]:
    back = replace(options, inverse=not options.inverse)
    return [one if one is None else _rotate(back, tables, one) for one in cotangents]


def laid_out(array: jax.Array, x: jax.Array) -> jax.Array:
    """Returns indices or a table, sharded as x is over a mesh of explicit axes."""
    spec = spec_of(jax.typeof(x))
    if all(one is None for one in spec):
        return array
    is_table = array.ndim != x.ndim - 1 or array.shape != x.shape[:-1]
    count = array.ndim - 2 if is_table else array.ndim
    right = [*spec[:count], *[None] * (array.ndim - count)]
    found: jax.Array = jax.sharding.reshard(array, jax.sharding.PartitionSpec(*right))
    return found
