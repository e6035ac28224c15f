"""Trees of parameters, gradients and state: masks, shardings, and checks that name a leaf."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from .codes import BLOCKS, Quantized, zeros

# Dtypes of parameters and gradients.
DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
# Arrays with fewer entries keep float32 state.
LEAST_ENTRIES = 4096
LAST_STEP = np.iinfo(np.int32).max


class State(NamedTuple):
    """The state of an optimizer; moments are trees like the parameters.

    A leaf of a moment is a float32 array, or a `Quantized`. `nu` is None where there is one moment,
    and `norm`, the global norm of the last gradients before clipping, where `max_norm` is None.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any
    norm: jax.Array | None


# Exported steps take it and give it back.
jax.export.register_namedtuple_serialization(State, serialized_name="pallas_bridge.OptimizerState")


@dataclass(frozen=True)
class Leaf:
    """A parameter: its path, its number in the tree, and whether it decays."""

    path: str
    number: int
    decays: bool


def is_quantized(leaf: Any) -> bool:
    """Whether a node of a state is an array in 8 bits."""
    return isinstance(leaf, Quantized)


def paths(tree: Any) -> list[str]:
    """Returns the path of each leaf, such as "['layers'][0]"."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)[0]
    return [jax.tree_util.keystr(path) or "the array" for path, _ in found]


def flatten_like(name: str, tree: Any, params: Any) -> list[Any]:
    """Returns the leaves of a tree that has the structure of the parameters.

    Raises:
        ValueError: another structure; the message has the first path that is in one of both.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized)
    if structure == jax.tree.structure(params):
        return leaves
    here, right = paths(tree), paths(params)
    missing = [path for path in right if path not in set(here)]
    other = [path for path in here if path not in set(right)]
    if missing:
        reason = f"it lacks {missing[0]}"
    elif other:
        reason = f"it has {other[0]}, which params lack"
    else:
        reason = "its containers are of other types"
    raise ValueError(f"{name} has another tree than params: {reason}")


def broadcast(name: str, mask: Any, params: Any) -> list[bool]:
    """Returns a Boolean for each parameter, of a mask that is a tree, a prefix, or makes one.

    Raises:
        TypeError: a leaf of the mask is no Boolean.
        ValueError: a mask of another tree.
    """
    if callable(mask):
        mask = mask(params)
    try:
        full = jax.tree.map(lambda one, below: jax.tree.map(lambda _: one, below), mask, params)
    except ValueError as error:
        raise ValueError(f"{name} is no prefix of the tree of params: {error}") from error
    leaves = jax.tree.leaves(full)
    for path, leaf in zip(paths(params), leaves, strict=True):
        if not isinstance(leaf, bool | np.bool_):
            raise TypeError(f"{name} is {leaf!r} at {path}; it must be True or False")
    return [bool(leaf) for leaf in leaves]


def check_params(params: Any) -> list[Any]:
    """Returns the parameters of a tree.

    Raises:
        TypeError: one of a dtype that is not taken.
    """
    leaves = jax.tree.leaves(params)
    for path, leaf in zip(paths(params), leaves, strict=True):
        if jnp.result_type(leaf) not in DTYPES:
            raise TypeError(
                f"params{path} has dtype {jnp.result_type(leaf)}; it must be float32, bfloat16 or "
                "float16"
            )
    return [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in leaves]


def check_grads(grads: Any, params: Any) -> list[jax.Array]:
    """Returns the gradients of a tree.

    Raises:
        TypeError: one of a dtype that is not taken.
        ValueError: another tree than the parameters', or another shape.
    """
    leaves = flatten_like("grads", grads, params)
    for path, leaf, param in zip(paths(params), leaves, jax.tree.leaves(params), strict=True):
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"grads{path} has shape {jnp.shape(leaf)}; it must be {jnp.shape(param)}, that of "
                "the parameter"
            )
        if jnp.result_type(leaf) not in DTYPES:
            raise TypeError(
                f"grads{path} has dtype {jnp.result_type(leaf)}; it must be float32, bfloat16 or "
                "float16"
            )
    return [jnp.asarray(leaf) for leaf in leaves]


def check_moments(name: str, moments: Any, params: Any, *, quantizes: bool) -> list[Any]:
    """Returns a moment's arrays.

    Raises:
        TypeError: an array of another dtype.
        ValueError: another tree, shape or block size than this optimizer keeps.
    """
    leaves = flatten_like(f"state.{name}", _paired(moments), params)
    for path, leaf, param in zip(paths(params), leaves, jax.tree.leaves(params), strict=True):
        named, shape = f"state.{name}{path}", jnp.shape(param)
        values = leaf.codes if is_quantized(leaf) else leaf
        if jnp.shape(values) != shape:
            raise ValueError(
                f"{named} has shape {jnp.shape(values)}; it must be {shape}, that of the parameter"
            )
        right = np.dtype(np.uint8 if is_quantized(leaf) else np.float32)
        if values.dtype != right:
            raise TypeError(f"{named} has dtype {values.dtype}; it must be {right}")
        if not is_quantized(leaf):
            continue
        if not quantizes:
            raise ValueError(f"{named} is in 8 bits; this optimizer keeps float32 state")
        blocks = [(*shape[:-1], shape[-1] // size) for size in BLOCKS if shape[-1] % size == 0]
        if leaf.scales.shape not in blocks:
            raise ValueError(
                f"{named} has scales {leaf.scales.shape}; they must be one of {blocks}, a scale "
                f"for each block of one of {BLOCKS}"
            )
    return leaves


def _paired(moments: Any) -> Any:
    """Returns a moment in which mappings of codes and scales are `Quantized`.

    `flax.nnx.Optimizer` keeps the nodes of a state that an update returned as mappings.
    """

    def restored(node: Any) -> Any:
        return Quantized(node["codes"], node["scales"]) if _is_pair(node) else node

    return jax.tree.map(restored, moments, is_leaf=lambda one: is_quantized(one) or _is_pair(one))


def _is_pair(node: Any) -> bool:
    """Whether a node has what a `Quantized` has, and is no dict of parameters of these names."""
    if not isinstance(node, Mapping) or {*node} != {*Quantized._fields}:
        return False
    return bool(getattr(node["codes"], "dtype", None) == np.uint8)


def check_count(count: Any) -> None:
    """Checks that the count is below int32's largest; a traced count stops there instead.

    Raises:
        OverflowError: the count is the largest of int32.
    """
    if not isinstance(count, jax.core.Tracer) and int(count) >= LAST_STEP:
        raise OverflowError(f"state.count is {int(count)}, the last step of int32: start from 0")


def _share(shape: tuple[int, ...], sharding: Any) -> int:
    """Returns the extent of the last axis on each device."""
    spec = getattr(sharding, "spec", None)
    if spec is None or len(spec) < len(shape) or spec[-1] is None:
        return shape[-1]
    names = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    count = math.prod(sharding.mesh.shape[name] for name in names if isinstance(name, str))
    # 1 fits no block: the axis is not sharded evenly.
    return shape[-1] // count if shape[-1] % count == 0 else 1


def sharding_of(array: Any) -> Any:
    """Returns the sharding of an array, or of a traced one as far as its type has it."""
    if isinstance(array, jax.core.Tracer):
        return getattr(jax.typeof(array), "sharding", None)
    return getattr(array, "sharding", None)


def block_size(shape: tuple[int, ...], sharding: Any) -> int | None:
    """Returns the extent of an array's blocks, or None where its state stays float32."""
    if math.prod(shape) < LEAST_ENTRIES:
        return None
    share = _share(shape, sharding)
    return next((size for size in BLOCKS if share % size == 0), None)


def zero_moments(
    params: Any, keeps: Sequence[bool], shardings: Sequence[Any], *, moments: int, name: str
) -> list[list[Any]]:
    """Returns zeros for each moment of each parameter, sharded as the parameter is.

    `keeps` says whose state stays float32.
    """
    found: list[list[Any]] = [[] for _ in range(moments)]
    unfit = []
    leaves = zip(paths(params), jax.tree.leaves(params), keeps, shardings, strict=True)
    for path, param, keep, sharding in leaves:
        shape = jnp.shape(param)
        block = None if keep else block_size(shape, sharding)
        if block is None and not keep and math.prod(shape) >= LEAST_ENTRIES:
            unfit.append(path)
        for moment, signed in zip(found, (True, False), strict=False):
            zero: Any
            if block is None:
                zero = jnp.zeros_like(param, jnp.float32)
            else:
                zero = zeros(shape, block, signed=signed)
            moment.append(_placed(zero, param, sharding))
    if unfit:
        warnings.warn(
            f"{name}: the state of {', '.join(unfit)} stays float32: none of {BLOCKS} divides the "
            "last axis of a device's share",
            stacklevel=4,
        )
    return found


def _placed(zero: Any, param: Any, sharding: Any) -> Any:
    """Returns state with the sharding of a parameter that is not traced."""
    if isinstance(param, jax.core.Tracer) or not isinstance(param, jax.Array):
        return zero
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return zero
    return jax.tree.map(lambda one: jax.device_put(one, sharding), zero)


Mask = Any | Callable[[Any], Any]
