"""Causal convolution: what users call, calls of its kernels, and its derivative."""

from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import linear
from ..bound import Bound
from ..checks import (
    REFERENCE_TAKES_OTHERS,
    as_array,
    check_dtype,
    check_flag,
    check_float,
    check_operand,
    check_word,
)
from ..custom_call import bind, declared_call, vary_alike
from ..exporting import DTYPES, Cell, Exports, Program, checked, flag, weight_dtype_of
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from ..targets import declared
from . import OPERATION, reference
from .reference import Options

WIDTHS = (2, 3, 4)
FORWARD, BACKWARD = "xentile_causal_conv1d_forward", "xentile_causal_conv1d_backward"


@overload
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    activation: Literal["silu"] | None = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    activation: Literal["silu"] | None = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: bool,
    implementation: Implementation | None = ...,
) -> Any: ...


@hinted
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    return_final_state: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Causal depthwise convolution along tokens, the short one of Mamba (Gu and Dao, 2023).

        z[t, c] = sum_j weight[c, j] * x[t - W + 1 + j, c] + bias[c]

    and y = z, or z * sigmoid(z) for "silu". Sums are in f32 whatever the dtype, and y is rounded
    once. It is differentiable in both modes with respect to `x`, `weight`, `bias` and
    `initial_state`; gradients are summed in f32 and rounded once to the dtypes of their arrays. The
    arguments are the residuals of the backward pass.

    With `segment_ids`, texts are packed: the convolution starts anew where the id changes.

    Args:
      x: [.., T, C] in bfloat16, float16 or float32.
      weight: [C, W] in any of these dtypes, with W from 2 to 4.
      bias: [C] in the dtype of weight, or None.
      activation: "silu" or None.
      initial_state: the tokens before the first, [.., W - 1, C] in the dtype of x, which belong to
        the first segment; None for zeros.
      segment_ids: [.., T] in int32, or None.
      return_final_state: whether to return the last W - 1 inputs too, from which the next call
        continues; those of another segment than the last token are 0.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA, which
        takes wider dtypes too), or None for what `pallas_bridge.info()` says of the platform. In a
        program that XLA partitions over a mesh that is its own program, which shards batch,
        channels and tokens; within `shard_map` kernels run.

    Returns:
      y [.., T, C] in the dtype of x; with `return_final_state`, a tuple of y and the state
      [.., W - 1, C] in that dtype.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree, or an option that there is not.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0], [2.0], [3.0]])
    >>> print(causal_conv1d(x, jnp.array([[10.0, 1.0]])).ravel())
    [ 1. 12. 23.]
    """
    chosen = choose(OPERATION, implementation)
    check_word("activation", activation, ("silu",), or_none=True)
    asks_state = check_flag("return_final_state", return_final_state)
    arrays = {"x": as_array("x", x, "[.., T, C]"), "weight": as_array("weight", weight, "[C, W]")}
    optional = {"bias": bias, "state": initial_state, "segments": segment_ids}
    for name, array in optional.items():
        if array is not None:
            arrays[name] = as_array(NAMES[name], array, SHAPES[name])
    _check(arrays)
    options = Options(
        width=arrays["weight"].shape[-1],
        silu=activation == "silu",
        has_bias="bias" in arrays,
        has_state="state" in arrays,
        has_segments="segments" in arrays,
        implementation=implementation,
    )
    if chosen == "reference":
        (y,) = reference.forward(options, *arrays.values())
    else:
        y = _by_kernels(options, *arrays.values())
    return (y, _final_state(options, arrays)) if asks_state else y


NAMES = {"bias": "bias", "state": "initial_state", "segments": "segment_ids"}
SHAPES = {"bias": "[C]", "state": "[.., W - 1, C]", "segments": "[.., T]"}


def _check(arrays: dict[str, jax.Array]) -> None:
    """Checks shapes and dtypes.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes that disagree.
    """
    x, weight = arrays["x"], arrays["weight"]
    check_float("x", x)
    check_float("weight", weight)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be [.., T, C]")
    *leading, tokens, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] not in WIDTHS:
        raise ValueError(
            f"weight has shape {weight.shape} and x {x.shape}; weight must be [{channels}, W], a "
            "row a channel, with W from 2 to 4"
        )
    right: dict[str, tuple[tuple[Any, ...], Any]] = {
        "bias": ((channels,), weight.dtype),
        "state": ((*leading, weight.shape[1] - 1, channels), x.dtype),
        "segments": ((*leading, tokens), jnp.int32),
    }
    of = f"x of shape {x.shape} and weight of shape {weight.shape}"
    for name, (shape, dtype) in right.items():
        if name in arrays:
            check_operand(NAMES[name], arrays[name], shape, dtype, SHAPES[name], of)


def _final_state(options: Options, arrays: dict[str, jax.Array]) -> jax.Array:
    """Returns the last W - 1 rows, those of another segment than the last as 0."""
    x, count, ids = arrays["x"], options.width - 1, arrays.get("segments")
    rows = reference.with_state(count, x, arrays.get("state"))
    state = jax.lax.slice_in_dim(rows, x.shape[-2], x.shape[-2] + count, axis=x.ndim - 2)
    if ids is None or x.shape[-2] == 0:
        return state
    ids = jnp.concatenate([*[ids[..., :1]] * count, ids], -1)
    ids = jax.lax.slice_in_dim(ids, x.shape[-2], x.shape[-2] + count, axis=ids.ndim - 1)
    is_same = ids == ids[..., -1:]
    # A segment that ended before the last tokens began may have had the same id.
    is_same = jnp.flip(jnp.cumprod(jnp.flip(is_same, -1).astype(jnp.int32), -1), -1) > 0
    return jnp.where(is_same[..., None], state, jnp.zeros_like(state))


def _attributes(options: Options) -> dict[str, Any]:
    return {
        "width": options.width,
        "silu": options.silu,
        "bias": options.has_bias,
        "initial_state": options.has_state,
        "segments": options.has_segments,
    }


def _bind(options: Options, target: str, dense: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    call = declared_call(
        OPERATION,
        target,
        _attributes(options),
        implementation=options.implementation,
        dense=Bound(dense, options),
        # XLA shards its own program by batch, tokens and channels.
        dense_if_sharded=True,
    )
    return bind(call, *arrays)


def _by_kernels(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns what `reference.forward` does, by a call of a kernel.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    for index in options.moving:
        check_dtype(options.names[index], arrays[index], REFERENCE_TAKES_OTHERS)
    # Within `shard_map`, the transpose of this is the sum over devices for shared arrays.
    y: jax.Array = _convolve(options, *vary_alike(arrays))
    return y


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolve(options: Options, *arrays: jax.Array) -> jax.Array:
    return _bind(options, FORWARD, reference.forward, *arrays)[0]


@partial(_convolve.defjvp, symbolic_zeros=True)
def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    y = OPERATION.named(_convolve(options, *primals))
    moving = [linear.given(tangents[index]) for index in options.moving]
    names = declared(FORWARD).operands(_attributes(options))
    dims = (names, [names[index] for index in options.moving])
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    (dy,) = linear.bind(apply, transpose, [*primals], moving, [y], dims)
    return y, dy


def _apply(options: Options, arrays: Any, tangents: Any) -> Any:
    every: list[Any] = [None] * len(arrays)
    for index, tangent in zip(options.moving, tangents, strict=True):
        every[index] = tangent
    return linear.tangents_of(partial(reference.forward, options), arrays, every)


def _transpose(options: Options, arrays: Any, cotangents: Any) -> Any:
    (dy,) = cotangents
    if dy is None:
        return [None] * len(options.moving)
    dx, dweight, *others = _bind(options, BACKWARD, reference.gradients, *arrays, dy)
    found = [dx, dweight.sum(range(dweight.ndim - 2))]
    if options.has_bias:
        dbias, *others = others
        found.append(dbias.sum(range(dbias.ndim - 1)))
    return [*found, *others]


def _program(cell: Cell, given: dict[str, Any]) -> Program:
    """Returns y [T, C], dx, dweight [C, W], and dbias [C] if there is one, of a cell's sequence."""
    settings = cell.settings
    activation: Any = "silu" if given.get("silu", True) else None

    def forward_and_backward(*arrays: Any) -> Any:
        def convolved(*arrays: Any) -> Any:
            return causal_conv1d(*arrays, activation=activation, implementation=cell.implementation)

        y, vjp = jax.vjp(convolved, *arrays[:-1])
        return y, *vjp(arrays[-1])

    rows = jax.ShapeDtypeStruct((cell.tokens, settings.channels), DTYPES[cell.dtype])
    shapes = [(settings.channels, given.get("width", 4)), *[(settings.channels,)] * settings.bias]
    columns = [jax.ShapeDtypeStruct(shape, DTYPES[settings.weight_dtype]) for shape in shapes]
    return checked(Program("forward_and_backward", forward_and_backward, [rows, *columns, rows]))


EXPORTS = Exports(
    _program,
    ("silu", "width"),
    ("channels",),
    {"bias": flag("bias"), "weight_dtype": weight_dtype_of},
)
"""The program for tools: x [T, C], weight [C, W], bias [C] if any, dy; gives y and gradients."""
