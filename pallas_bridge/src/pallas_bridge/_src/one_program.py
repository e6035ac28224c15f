"""Operations whose parts `jax.debug_infs` and `jax.debug_nans` must not look at.

Outside of `jax.jit`, JAX then looks at the results of every primitive. Masked logits of -inf and
the lse of a query that sees no key are no errors, so that an operation with these runs as one
program, of which JAX looks at the results alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax


def run(function: Callable[..., Any], *arrays: Any, results: Sequence[int] | None = None) -> Any:
    """Returns function(*arrays), made by one program where JAX looks for NaN or infinities.

    `function` is a hashable value that holds no array (`Bound`, or a function of a module). In that
    program its results other than `results`, which nobody reads, are None.
    """
    if not (jax.config.values["jax_debug_infs"] or jax.config.values["jax_debug_nans"]):
        return function(*arrays)
    try:
        return _program(function, None if results is None else tuple(results), *arrays)
    except Exception as error:
        # What JAX raises where it runs a program with `jax.checkpoint` again, to say which
        # operation made the number. It has no public name.
        if type(error).__name__ != "InternalFloatingPointError":
            raise
        name, number = error.args
        raise FloatingPointError(f"invalid value ({number}) encountered in {name}") from None


@partial(jax.jit, static_argnums=(0, 1))
def _program(function: Callable[..., Any], results: tuple[int, ...] | None, *arrays: Any) -> Any:
    if any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(arrays)):
        # JAX looks at residuals of a program too. With `jax.checkpoint` these are its arguments.
        found = jax.checkpoint(lambda *arrays: function(*arrays))(*arrays)
    else:
        # JAX has found one in the results, and runs all of it again to say which operation made it.
        found = function(*arrays)
    if results is None:
        return found
    return tuple(one if index in results else None for index, one in enumerate(found))
