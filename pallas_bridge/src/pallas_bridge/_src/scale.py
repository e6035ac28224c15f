"""A tensor times factors that are mostly 1."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .custom_call import Call, declared_call
from .operation import Operation


def scale_call(operation: Operation, implementation: str | None) -> Call:
    """Gives x * factors of x [.., N] and factors [..] in f32, in the memory of `x` if it may be.

    `operation` is what asks, and `implementation` what it was asked for.
    The product is taken in f32 and rounded to the dtype of `x`. Where the program holds ones for
    the factors there is no call, and where they turn out to be 1 as it runs, in shared memory,
    nothing is read or written.
    """
    return declared_call(
        operation,
        "xentile_scale",
        {},
        implementation=implementation,
        is_product=True,
        for_tpu=_in_pallas,
    )


def _in_pallas(*_: Any) -> Callable[..., tuple[jax.Array]]:
    """Returns what stands for a kernel on TPUs: XLA does as well."""

    def scaled(x: jax.Array, *factors: jax.Array) -> tuple[jax.Array]:
        # XLA knows that a factor of 1 changes nothing, and mostly sees that it is 1.
        return ((x.astype(jnp.float32) * factors[-1][..., None]).astype(x.dtype),)

    return scaled
