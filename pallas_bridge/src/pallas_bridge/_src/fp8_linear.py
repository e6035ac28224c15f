"""Products in FP8 for training: values in FP8 with a scale for each array, forward and backward."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .arrays import spec_of
from .checks import as_array, check_dtype
from .fp8_quantize.api import Quantized, fp8_quantize
from .fp8_quantize.declaration import OPERATION
from .fp8_quantize.options import check_format
from .implementations import choose
from .keywords import hinted
from .operation import Implementation
from .products import contract


@hinted
def fp8_linear(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    grad_dtype: DTypeLike = jnp.float8_e5m2,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The product of rows with a matrix in FP8, and its gradients in FP8.

        y = Q(x) Q(weight),  dx = Q(dy) Q(weight)',  dweight = Q(x)' Q(dy)

    Q is `fp8_quantize` with one scale for the array, made of its own amax (current scaling), and
    rounded up to a power of two; of x and weight in float8_e4m3fn, of dy in `grad_dtype`
    (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). Sums are float32. Each array is
    quantised once, in both layouts that products need; what is kept for the backward pass is x and
    weight in FP8, half the bytes of bfloat16.

    Gradients are those of the product as if Q were the identity. On NVIDIA GPUs of compute
    capability 8.9 and later XLA multiplies in FP8 with cuBLASLt; elsewhere it multiplies the values
    times their scales in the dtype of x, with the same result but for the order of sums.

    It is differentiable in reverse mode only. Meshes may shard rows of x, columns of the matrix,
    and D; the scale is that of the whole array. Under `vmap` each example has scales of its own.

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D, N]; rounded to the dtype of x.
      grad_dtype: float8_e5m2, or float8_e4m3fn.
      implementation: of quantisation, as of `fp8_quantize`.

    Returns:
      [.., N] in the dtype of x.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree.

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
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _linear(_Options(grad_format, implementation), rows, weight.astype(x.dtype))
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
    y = fp8_linear(x, weight).reshape(free)
    return y if preferred_element_type is None else y.astype(preferred_element_type)


@dataclass(frozen=True)
class _Options:
    """The format of dy, and who quantises."""

    grad_format: np.dtype[Any]
    implementation: Implementation | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(options: _Options, x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = fp8_quantize(x, power_of_two=True, implementation=options.implementation)
    _, columns = _in_both_layouts(options, weight)
    return _multiply(rows, columns, x.dtype, _spec(x, 0, weight, 1))


def _forward(
    options: _Options, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[Quantized, Quantized]]:
    """Returns y, and for the backward pass x' and weight in FP8."""
    rows, x_transposed = _in_both_layouts(options, x)
    kept_weight, columns = _in_both_layouts(options, weight)
    y = _multiply(rows, columns, x.dtype, _spec(x, 0, weight, 1))
    return y, (x_transposed, kept_weight)


def _backward(
    options: _Options, residuals: tuple[Quantized, Quantized], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_transposed, weight = residuals
    rows, columns = _in_both_layouts(options, dy, options.grad_format)
    dx = _multiply(rows, weight, dy.dtype, _spec(dy, 0, x_transposed.values, 0))
    dweight = _multiply(x_transposed, columns, dy.dtype, spec_of(jax.typeof(weight.values)))
    return dx, dweight


_linear.defvjp(_forward, _backward)


def _in_both_layouts(
    options: _Options, x: jax.Array, dtype: DTypeLike = jnp.float8_e4m3fn
) -> tuple[Quantized, Quantized]:
    """Returns x and its transpose in FP8, with one scale, a power of two."""
    found: tuple[Quantized, Quantized] = fp8_quantize(
        x,
        dtype=dtype,
        power_of_two=True,
        transposed=True,
        implementation=options.implementation,
    )
    return found


def _multiply(a: Quantized, b: Quantized, dtype: Any, spec: list[Any]) -> jax.Array:
    """Returns a b' in a dtype, for a [M, K] and b [N, K]: the layout that FP8 products need.

    XLA recognises products of converted values times a scale. The dtype in which they are written
    is that of the result, and holds a power of two exactly but for float16, whose exponents end
    too soon.
    """
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    a_wide, b_wide = (one.values.astype(wide) * one.scales.astype(wide) for one in (a, b))
    return contract(a_wide, b_wide, (1,), (1,), spec).astype(dtype)


def _spec(a: jax.Array, of_a: int, b: jax.Array, of_b: int) -> list[Any]:
    """Returns the mesh axes of an axis of a and of one of b."""
    return [spec_of(jax.typeof(a))[of_a], spec_of(jax.typeof(b))[of_b]]
