"""A pass as one call of the library's, for all chunks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import library
from ..compat import varying_like
from ..cross_entropy.custom_call import attributes
from ..cross_entropy.options import Options

# The calls, by the name of the pass that follows.
TARGET = "xentile_linear_cross_entropy"


def has_library(platform: str) -> bool:
    """Whether the library is there and has the calls for what it calls `platform`."""
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        return False
    targets = outcome[1].targets
    return any((row.target, row.platform) == (f"{TARGET}_fused", platform) for row in targets)


def make(
    name: str, options: Options, cut: Mapping[str, int], scratch_bytes: int, *operands: Any
) -> Any:
    """Makes the pass `name` of `schedules.Schedule` of hidden, weight, no bias, labels and more.

    `cut` has the attributes that say how.
    """
    hidden, weight, _, labels, *others = operands
    flat = [hidden, weight, labels, *jax.tree.leaves(others)]
    per_token = varying_like(hidden, labels.shape, jnp.dtype(jnp.float32))
    gradients = [varying_like(hidden, x.shape, x.dtype) for x in (hidden, weight)]
    results = {
        "forward": [per_token] * 4,
        "backward": gradients,
        "fused": [per_token] * 3 + gradients,
    }[name]
    scratch = varying_like(hidden, (scratch_bytes,), jnp.dtype(jnp.uint8))
    call = jax.ffi.ffi_call(f"{TARGET}_{name}", [*results, scratch], vmap_method="sequential")
    every_token = None if name == "backward" else options.every_token
    numbers = {key: np.int64(value) for key, value in cut.items()}
    *found, _ = call(*flat, **dict(attributes(options, every_token)), **numbers)
    if name == "forward":
        return tuple(found)
    *numbers_of_tokens, of_hidden, of_weight = found
    made = (of_hidden, of_weight, None)
    return made if name == "backward" else (*numbers_of_tokens, made)
