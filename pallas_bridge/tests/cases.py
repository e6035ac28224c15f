"""Cases: ways to call functions of the package, for tests that go over all of them.

A case says how a function is called, by dims that tests give extents to and shard, and which
options change its results and not their shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Options = Mapping[str, Any]

# Extents of dims unless a test has its own.
EXTENTS = {"B": 2, "S": 6, "V": 37, "D": 16, "F": 16, "2F": 32, "H": 4, "K": 2, "E": 16, "R": 8}
EXTENTS |= {"M": 6, "C": 3}


@dataclass(frozen=True)
class Argument:
    """An array that a function takes."""

    name: str
    # Names of its axes, such as "B S V".
    dims: tuple[str, ...]
    # Integers are below the extent of a dim, or None for floats.
    below: str | None = None
    is_differentiable: bool = True
    # Whether it may be None.
    is_optional: bool = False


def argument(text: str) -> Argument:
    """Returns an argument of a text: "logits: B S V", "labels: B S < V", "cos: S R, fixed".

    What may be None ends in ", optional".
    """
    name, _, rest = text.partition(": ")
    rest, _, word = rest.partition(", ")
    dims, _, below = rest.partition(" < ")
    has_gradient = word != "fixed" and not below
    return Argument(name, tuple(dims.split()), below or None, has_gradient, word == "optional")


@dataclass(frozen=True, eq=False)
class Case:
    """A way to call a function."""

    name: str
    # Of arrays and options.
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    # Each changes results, of arrays of the same shapes.
    variants: tuple[Options, ...] = ()
    # Whether results are derivable with respect to the arguments that are floats.
    has_gradient: bool = True
    extents: Mapping[str, int] = field(default_factory=dict)
    # Axes that no kernel computes with a shard of: XLA gathers them or runs its own program, and
    # explicit axes refuse them.
    gathered: str = ""
    # Axes that no mesh shards.
    whole: str = ""

    def arrays(
        self, rng: np.random.Generator, dtype: str = "float32", **extents: int
    ) -> tuple[jax.Array, ...]:
        """Returns random arrays."""
        sizes = {**EXTENTS, **self.extents, **extents}

        def make(one: Argument) -> jax.Array:
            shape = tuple(sizes[name] for name in one.dims)
            if one.below is not None:
                drawn = rng.integers(0, sizes[one.below], shape)
                # One that options may name.
                drawn.flat[:1] = min(3, sizes[one.below] - 1)
                return jnp.asarray(drawn, jnp.int32)
            return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

        return tuple(map(make, self.arguments))

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which arguments have gradients."""
        if not self.has_gradient:
            return ()
        return tuple(index for index, one in enumerate(self.arguments) if one.is_differentiable)

    def outputs(self, *arrays: jax.Array, **options: Any) -> list[jax.Array]:
        """Returns the results, flat."""
        return jax.tree.leaves(self.function(*arrays, **options))

    def value(self, *arrays: jax.Array, **options: Any) -> jax.Array:
        """Returns a scalar of all floats of the results, each entry by its own weight."""
        total = jnp.float32(0)
        for number, one in enumerate(self.outputs(*arrays, **options)):
            if jnp.issubdtype(one.dtype, jnp.floating) and one.dtype.itemsize > 1:
                index = jax.lax.iota(jnp.float32, max(one.size, 1))[: one.size]
                weights = jnp.cos(index + 0.7 * number).reshape(one.shape)
                total = total + (one.astype(jnp.float32) * weights).sum()
        return total

    def gradients(self, *arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        """Returns the gradients of `value`."""
        found: tuple[jax.Array, ...] = jax.grad(
            partial(self.value, **options), self.differentiable
        )(*arrays)
        return found


def case(name: str, function: Callable[..., Any], *arguments: str, **more: Any) -> Case:
    """Returns a case of arguments as texts."""
    return Case(name, function, tuple(map(argument, arguments)), **more)
