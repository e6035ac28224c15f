"""LayerNorm: what users call."""

from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from ..checks import as_array
from ..implementations import choose
from ..operation import Implementation
from . import custom_call, reference
from .declaration import OPERATION
from .options import check_arrays, check_options

IMPLEMENTATIONS = {"custom_call": custom_call, "reference": reference}


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = ...,
    *,
    eps: float = ...,
    return_statistics: bool = ...,
    implementation: Implementation | None = ...,
) -> Any: ...


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    return_statistics: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Layer normalisation of rows, scaled and moved by column (Ba, Kiros and Hinton, 2016).

    For a row x of D numbers, in f32 whatever the dtype:

        y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)

    y is rounded once. The variance is that of what is left once the mean is taken off, so that rows
    whose mean is many times their deviation keep the digits that they have. It is differentiable in
    both modes with respect to `x`, `weight` and `bias`; gradients are sums in f32, rounded once to
    the dtypes of what they belong to. For them x is kept, and mean and rstd.

    NaN and infinity in a row make that row of y and of its gradient NaN, and the gradient of the
    weight; where eps is 0, so does a row of one number.

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D] in any of these dtypes.
      bias: [D] in the dtype of weight, or None.
      eps: finite and at least 0.
      return_statistics: whether to return mean and rstd too.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA, which
        takes wider dtypes too), or None for what `pallas_bridge.info()` says of the platform: the
        kernels on CPUs and NVIDIA GPUs, and elsewhere XLA's program.

    Returns:
      y [.., D] in the dtype of x; with `return_statistics`, a tuple of y, and mean and rstd [..] in
      float32.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, or an option outside its range.

    >>> import jax.numpy as jnp
    >>> print(layer_norm(jnp.array([[7.0, 1.0]]), jnp.ones(2)).round(4))
    [[ 1. -1.]]
    """
    module = IMPLEMENTATIONS[choose(OPERATION, implementation)]
    options = check_options(eps, implementation)
    x, weight = as_array("x", x, "[.., D]"), as_array("weight", weight, "[D]")
    bias = None if bias is None else as_array("bias", bias, "[D]")
    check_arrays(x, weight, bias)
    y, mean, rstd = module.norm(options, x, weight, bias)
    return (y, mean, rstd) if return_statistics else y
