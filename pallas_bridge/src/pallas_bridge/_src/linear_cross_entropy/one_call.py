"""A pass as one call of the library's, for all chunks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from .. import library
from ..cross_entropy.calls import attributes
from ..losses.options import Options
from ..partitioning import is_whole
from . import deferred
from .product import operands as as_operands

# The calls, by the name of the pass that follows.
TARGET = "xentile_linear_cross_entropy"


def has_library(platform: str, name: str = "fused") -> bool:
    """Whether the library is there and has the call `name` for what it calls `platform`."""
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        return False
    targets = outcome[1].targets
    return any((row.target, row.platform) == (f"{TARGET}_{name}", platform) for row in targets)


def make(
    name: str, options: Options, cut: Mapping[str, int], scratch_bytes: int, *operands: Any
) -> Any:
    """Makes the pass `name` of `schedules.Schedule` of hidden, weight, bias, labels and more.

    `cut` has the attributes that say how.
    """
    hidden, weight, bias, labels, *others = operands
    # A bias is the last argument and its gradient the last result, both in f32.
    of_bias = [] if bias is None else [bias.astype(jnp.float32)]
    # Both matrices come in the dtype of products, and each gradient goes in that of its array.
    x, w = as_operands(hidden, weight)
    flat = [x, w, labels, *jax.tree.leaves(others), *of_bias]
    per_token = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
    of_hidden, of_weight = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (hidden, weight))
    results = {
        "forward": [per_token] * 4,
        "keep": [per_token] * 4 + [of_weight],
        "backward": [of_hidden, of_weight],
        "resume": [of_hidden, of_weight],
        "fused": [per_token] * 3 + [of_hidden, of_weight],
        "distribution_fused": [
            *[per_token] * 4,
            jax.ShapeDtypeStruct(labels.shape, jnp.int32),
            of_hidden,
            of_weight,
        ],
        "add": [per_token] * 3 + [of_hidden, jax.ShapeDtypeStruct(weight.shape, jnp.float32)],
    }[name]
    results.append(jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8))
    is_forward, is_backward = name in ("forward", "keep"), name in ("backward", "resume")
    if not is_forward:
        results.extend(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_bias)
    # What `keep` left, the last but a bias, becomes dweight and the scratch.
    left = len(flat) - len(of_bias) - 2
    aliases = {"resume": {left: 1, left + 1: 2}, "add": {4: 4}}.get(name)
    call = jax.ffi.ffi_call(f"{TARGET}_{name}", results, input_output_aliases=aliases)
    every_token = None if is_backward else options.every_token
    numbers = {
        key: np.bool_(value) if isinstance(value, bool) else np.int64(value)
        for key, value in cut.items()
    }
    found = list(call(*flat, **dict(attributes(options, every_token)), **numbers))
    if is_forward:
        return tuple(found[:4]) if name == "forward" else (*found[:4], tuple(found[4:]))
    dbias = None if bias is None else found.pop().astype(bias.dtype)
    *numbers_of_tokens, dhidden, dweight, _ = found
    made = (dhidden, dweight, dbias)
    return made if is_backward else (*numbers_of_tokens, made)


def choose(call: Callable[..., Any], default: Callable[..., Any], *operands: Any) -> Any:
    """Returns call(*operands), or default(*operands) where XLA cuts the program over a mesh."""
    return deferred.bind(_call, default, *operands, call=call)


_call = deferred.primitive("linear_cross_entropy_call")


def _lower(
    ctx: Any, *operands: Any, default: Any, call: Any, tree: Any, keep: tuple[int, ...]
) -> Sequence[Any]:
    function: Any = default
    if is_whole(ctx.module_context):

        def function(*flat: Any) -> Any:
            return jax.tree.leaves(call(*jax.tree.unflatten(tree, flat)))

    results: Sequence[Any] = deferred.lower(ctx, function, keep, *operands)
    return results


mlir.register_lowering(_call, _lower)
