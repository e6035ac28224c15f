"""A tensor times factors that are mostly 1."""

import jax

from .arrays import Result
from .custom_call import Call, bind


def scale(
    operation: str, x: jax.Array, factors: jax.Array, implementation: str | None = None
) -> jax.Array:
    """Returns x * factors for x [.., N] and factors [..] in f32, in the memory of `x` if it may be.

    `operation` is the function that asks, for messages, and `implementation` what it was asked for.
    The product is taken in f32 and rounded to the dtype of `x`. Where the program holds ones for
    the factors there is no call, and where they turn out to be 1 as it runs, in shared memory,
    nothing is read or written.
    """
    call = Call(
        operation=operation,
        target="xentile_scale",
        operands=("*batch N", "*batch"),
        results=(Result("*batch N", like=0),),
        reuses=(0, 0),
        implementation=implementation,
        is_product=True,
    )
    (scaled,) = bind(call, x, factors)
    return scaled
