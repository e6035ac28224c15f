"""Logits of the calls of a program that is timed on one device, and their labels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from distributions import Distribution

DISTRIBUTIONS = ("normal", "normal, std 45", "trained")
# Random rows, which a program repeats.
DRAWN = 64
# Bytes of all logits of a program, so that none are in the caches when it begins.
OUT_OF_CACHE = 2**28


def logits_of_calls(
    shape: tuple[int, ...], of: Distribution, dtypes: tuple[Any, ...]
) -> tuple[dict[Any, list[jax.Array]], list[jax.Array]]:
    """Returns logits [T, V] of each call by dtype, the same in all, and labels [T] of each call."""
    rows, vocab = shape
    rng = np.random.default_rng(0)
    targets = of.targets(rng, DRAWN, vocab)
    drawn = of.logits(rng, targets, vocab)
    calls = min(16, max(1, OUT_OF_CACHE // (2 * rows * vocab)))

    def logits(dtype: Any) -> list[jax.Array]:
        part = jnp.asarray(drawn).astype(dtype)
        repeat = jax.jit(lambda part, first: part[(jnp.arange(rows) + first) % DRAWN])
        return [repeat(part, call) for call in range(calls)]

    labels = [jnp.asarray(targets.labels)[(np.arange(rows) + i) % DRAWN] for i in range(calls)]
    return {dtype: logits(dtype) for dtype in dtypes}, labels
