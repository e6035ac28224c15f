"""Linear attention and the gated delta rule against their recurrences in NumPy, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case

from pallas_bridge import gated_delta_rule, linear_attention


def _linear(q: Any, k: Any, v: Any, g: Any, **options: Any) -> Any:
    # There is one implementation.
    options.pop("implementation", None)
    return linear_attention(q, k, v, _of(_log_decay, g), return_final_state=True, **options)


def _delta(q: Any, k: Any, v: Any, b: Any, g: Any, ids: Any, **options: Any) -> Any:
    options.pop("implementation", None)
    b, g = _of(jax.nn.sigmoid, b), _of(_log_decay, g)
    more = {"qk_l2_norm": True, "segment_ids": ids, "return_final_state": True}
    return gated_delta_rule(q, k, v, b, g, **more, **options)


def _log_decay(g: jax.Array) -> jax.Array:
    return -jax.nn.softplus(g)


def _of(function: Any, value: Any) -> Any:
    """A function of what is an array; what is none stays, for the error that names it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        return value
    return function(array) if jnp.issubdtype(array.dtype, jnp.floating) else array


HEADS = ("q: B S K D", "k: B S K D", "v: B S H E")
CASES = (
    case(
        "linear_attention",
        _linear,
        *HEADS,
        "g: B S H, optional",
        variants=({}, {"scale": 0.5}),
        whole="SDE",
    ),
    case(
        "gated_delta_rule of segments",
        _delta,
        *HEADS,
        "b: B S H",
        "g: B S H, optional",
        "segment_ids: B S < C, optional",
        variants=({}, {"scale": 0.5}),
        whole="SDE",
    ),
)
