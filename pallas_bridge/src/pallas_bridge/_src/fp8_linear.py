"""Products in FP8 for training: values in FP8 with a scale for each array, forward and backward."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset
from jax.typing import ArrayLike, DTypeLike

from .arrays import spec_of
from .checks import as_array, check_dtype, check_dtype_named
from .fp8_quantize.api import Quantized, delayed_scale, fp8_quantize
from .fp8_quantize.declaration import OPERATION
from .fp8_quantize.options import check_format
from .implementations import choose, gpus
from .keywords import hinted
from .operation import Implementation
from .products import contract

# Least compute capability of GPUs that multiply in FP8, and the least extents of the products: XLA
# refuses this algorithm for vectors, and small products gain nothing.
FP8_CAPABILITY, LEAST_EXTENT = 8.9, 128
# Hopper's fast accumulation, in fewer bits than float32: a gradient of 32768 terms is off by 0.0586
# of its norm, one of 8192 by 0.0579, nearly all of it for the values' own rounding. XLA gives
# products with this algorithm to cuBLASLt at once; others it tries by Triton first, for long.
FAST = DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


@hinted
def fp8_linear(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    grad_dtype: DTypeLike = jnp.float8_e5m2,
    history: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The product of rows with a matrix in FP8, and its gradients in FP8.

        y = Q(x) Q(weight),  dx = Q(dy) Q(weight)',  dweight = Q(x)' Q(dy)

    Q is `fp8_quantize` with one scale for the array, rounded up to a power of two; of x and weight
    in float8_e4m3fn, of dy in `grad_dtype` (Micikevicius et al., "FP8 Formats for Deep Learning",
    2022). Sums are float32, on Hopper by its fast accumulation. Each array is quantised
    once, in both layouts that products need; what is kept for the backward pass is x and weight in
    FP8, half the bytes of bfloat16.

    The scale is that of the array's own amax (current scaling) or, with a `history`,
    `delayed_scale` of the amax of earlier steps, which saves a read of each array. The cotangent of
    the history is then the history for the next step, with the amax of this step's x, weight and dy
    in front: replace the history by it. Each call takes a history of its own, as JAX adds up
    cotangents of several uses.

    Gradients are those of the product as if Q were the identity. On NVIDIA GPUs of compute
    capability 8.9 and later XLA multiplies in FP8 with cuBLASLt, from 128 rows and columns on; else
    it multiplies the same values in the dtype of x.

    It is differentiable in reverse mode only. Meshes may shard rows of x, columns of the matrix,
    and D; the scale is that of the whole array. Under `vmap` each example has scales of its own.

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D, N]; rounded to the dtype of x.
      grad_dtype: float8_e5m2, or float8_e4m3fn.
      history: [3, H] in float32, the amax of x, weight and dy in the last H steps, the latest
        first; zeros, as training begins with, give the scale 1. None for current scaling.
      implementation: of quantisation, as of `fp8_quantize`.

    Returns:
      [.., N] in the dtype of x.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree.
      NotImplementedError: `vmap` of x or weight, but not of the history.

    >>> x = jnp.array([[1.0, 0.3]])
    >>> print(fp8_linear(x, jnp.eye(2)))
    [[1.     0.3125]]
    """
    choose(OPERATION, implementation)
    grad_format = check_format("grad_dtype", grad_dtype)
    x = as_array("x", x, "[.., D]")
    weight = as_array("weight", weight, "[D, N]")
    check_dtype("x", x)
    check_dtype("weight", weight)
    if x.ndim == 0 or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        columns = x.shape[-1] if x.ndim else "D"
        raise ValueError(
            f"x has shape {x.shape} and weight {weight.shape}; they must be [.., {columns}] and "
            f"[{columns}, N]"
        )
    if history is not None:
        history = as_array("history", history, "[3, H]")
        if history.ndim != 2 or history.shape[0] != 3 or history.shape[1] == 0:
            raise ValueError(
                f"history has shape {history.shape}; it must be [3, H] with H at least 1"
            )
        if history.dtype != jnp.float32:
            raise TypeError(f"history has dtype {history.dtype}; it must be float32")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _linear(_Options(grad_format, implementation), rows, weight.astype(x.dtype), history)
    return y.reshape(*x.shape[:-1], weight.shape[1])


@hinted
def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general` by `fp8_linear`, as `dot_general=` of Flax's linear layers.

    lhs takes the part of x and rhs that of the weight. There may be several contracted axes and no
    batch axes. `precision` changes nothing, as sums are float32 and values FP8.

    Args:
      lhs: [..] in bfloat16, float16 or float32.
      rhs: [..].
      dimension_numbers: ((axes of lhs, axes of rhs), ((), ())).
      precision: not used.
      preferred_element_type: dtype of the result, or None for that of lhs.
      out_sharding: None: the result is sharded as its operands are.

    Returns:
      The free axes of lhs, then those of rhs.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree.
      NotImplementedError: batch axes, or an `out_sharding`.
    """
    (of_lhs, of_rhs), batch = dimension_numbers
    if tuple(map(tuple, batch)) != ((), ()):
        raise NotImplementedError(
            f"dimension_numbers has batch axes {batch}; nn.fp8_dot_general takes none: use jax.vmap"
        )
    if out_sharding is not None:
        raise NotImplementedError("out_sharding is given; nn.fp8_dot_general takes None")
    lhs, rhs = as_array("lhs", lhs, "[..]"), as_array("rhs", rhs, "[..]")
    check_dtype("lhs", lhs)
    check_dtype("rhs", rhs)
    dtype: Any = lhs.dtype
    if preferred_element_type is not None:
        dtype = check_dtype_named("preferred_element_type", preferred_element_type)
    summed = [lhs.shape[axis] for axis in of_lhs]
    if summed != [rhs.shape[axis] for axis in of_rhs]:
        raise ValueError(
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}; axes {tuple(of_lhs)} of lhs must have "
            f"the sizes of axes {tuple(of_rhs)} of rhs"
        )
    count, terms = len(summed), math.prod(summed)
    x = jnp.moveaxis(lhs, of_lhs, range(-count, 0))
    weight = jnp.moveaxis(rhs, of_rhs, range(count))
    free = (*x.shape[: x.ndim - count], *weight.shape[count:])
    columns = math.prod(weight.shape[count:])
    x, weight = x.reshape(*x.shape[: x.ndim - count], terms), weight.reshape(terms, columns)
    return fp8_linear(x, weight).reshape(free).astype(dtype)


@dataclass(frozen=True)
class _Options:
    """The format of dy, and who quantises."""

    grad_format: np.dtype[Any]
    implementation: Implementation | None


# x' and weight in FP8, the amax of both, and the history.
_Residuals = tuple[Quantized, Quantized, tuple[jax.Array, jax.Array], jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    options: _Options, x: jax.Array, weight: jax.Array, history: jax.Array | None
) -> jax.Array:
    (rows,), _ = _quantize(options, x, history, 0)
    (_, columns), _ = _quantize(options, weight, history, 1, transposed=True)
    return _multiply(rows, columns, x.dtype, _spec(x, 0, weight, 1))


def _forward(
    options: _Options, x: jax.Array, weight: jax.Array, history: jax.Array | None
) -> tuple[jax.Array, _Residuals]:
    if history is not None:
        history = _mapped_alike(history, x, weight)
    (rows, x_transposed), amax_x = _quantize(options, x, history, 0, transposed=True)
    (kept_weight, columns), amax_weight = _quantize(options, weight, history, 1, transposed=True)
    y = _multiply(rows, columns, x.dtype, _spec(x, 0, weight, 1))
    return y, (x_transposed, kept_weight, (amax_x, amax_weight), history)


def _backward(
    options: _Options, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x_transposed, weight, amax, history = residuals
    (rows, columns), amax_dy = _quantize(options, dy, history, 2, transposed=True)
    dx = _multiply(rows, weight, dy.dtype, _spec(dy, 0, x_transposed.values, 0))
    dweight = _multiply(x_transposed, columns, dy.dtype, spec_of(jax.typeof(weight.values)))
    if history is not None:
        latest = jnp.stack([*amax, amax_dy])[:, None]
        history = jnp.concatenate([latest, history[:, :-1]], 1)
    return dx, dweight, history


_linear.defvjp(_forward, _backward)


@jax.custom_batching.custom_vmap
def _mapped_alike(history: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the history, which must be mapped where x or weight are: JAX would add up amax."""
    return history


@_mapped_alike.def_vmap
def _check_mapped(_: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    if not is_mapped[0]:
        raise NotImplementedError(
            "fp8_linear: vmap maps x or weight and not history; map a history for each example, "
            "as the cotangents of one would be added up"
        )
    return arrays[0], True


def _quantize(
    options: _Options, x: jax.Array, history: jax.Array | None, index: int, transposed: bool = False
) -> tuple[list[Quantized], jax.Array]:
    """Returns x in FP8, with `transposed` x' behind it, and amax of x.

    Args:
        options: who quantises, and the format of dy.
        x: [M, N].
        history: as of `fp8_linear`.
        index: of the history's row: 2 is that of dy.
        transposed: whether to return x' too.
    """
    dtype = options.grad_format if index == 2 else jnp.float8_e4m3fn
    scale = None
    if history is not None:
        scale = delayed_scale(history[index], dtype=dtype, power_of_two=True)
    *quantised, amax = fp8_quantize(
        x,
        dtype=dtype,
        power_of_two=True,
        transposed=transposed,
        scale=scale,
        return_amax=True,
        implementation=options.implementation,
    )
    return quantised, amax


def _multiply(a: Quantized, b: Quantized, dtype: Any, spec: list[Any]) -> jax.Array:
    """Returns a b' in a dtype, for a [M, K] and b [N, K]: the layout that FP8 products need.

    XLA multiplies in FP8 as the algorithm says so, and the scale becomes that of cuBLASLt's
    product. The dtype of what is scaled holds a power of two exactly, so it is not float16, whose
    exponents end too soon.
    """
    wide = jnp.float32 if dtype == jnp.float16 else dtype

    def in_fp8(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        return contract(a, b, (1,), (1,), spec, wide, FAST) * scale.astype(wide)

    def converted(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        return contract(a.astype(wide), b.astype(wide), (1,), (1,), spec) * scale.astype(wide)

    operands = (a.values, b.values, a.scales * b.scales)
    extents = (*a.values.shape, *b.values.shape)
    # Symbolic extents of exported programs are taken for large ones.
    is_small = any(isinstance(one, int) and one < LEAST_EXTENT for one in extents)
    branches = {"cuda": in_fp8} if not is_small and _gpus_multiply() else {}
    y: jax.Array = jax.lax.platform_dependent(*operands, **branches, default=converted)
    return y.astype(dtype)


def _gpus_multiply() -> bool:
    """Returns whether the machine's NVIDIA GPUs, if there are any, multiply in FP8."""
    return all(float(getattr(gpu, "compute_capability", 9.0)) >= FP8_CAPABILITY for gpu in gpus())


def _spec(a: jax.Array, of_a: int, b: jax.Array, of_b: int) -> list[Any]:
    """Returns the mesh axes of an axis of a and of one of b."""
    return [spec_of(jax.typeof(a))[of_a], spec_of(jax.typeof(b))[of_b]]
