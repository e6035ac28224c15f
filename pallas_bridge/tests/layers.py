"""What the tests of layers for flax.nnx and for Equinox share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def draw(rng: np.random.Generator, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def check(found: Any, wanted: Any, off: float = 2e-5) -> None:
    """Compares the arrays of two trees: their shapes, dtypes and values, to `off`."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        if off < 1e-2:
            # Entries are sums of terms as large as the largest entry; errors beyond 5 grow with it.
            size = max(np.abs(other).max(initial=0) / 5, 1)
            np.testing.assert_allclose(one, other, atol=off * size, rtol=off)
        else:  # of 16 bits: roundings of entries differ, and add up in sums
            assert np.linalg.norm(one - other) <= off * (np.linalg.norm(other) + one.size**0.5)
