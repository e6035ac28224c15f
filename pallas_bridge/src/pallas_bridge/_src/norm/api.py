"""RMSNorm and LayerNorm: what users call."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import as_array, check_flag, promoted
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from . import custom_call, reference
from .declaration import LAYER_NORM, RMS_NORM
from .options import check_columns, check_layer_options, check_like, check_rms_options

IMPLEMENTATIONS = {"custom_call": custom_call, "reference": reference}


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    *,
    eps: float = ...,
    residual: None = ...,
    zero_centred: bool = ...,
    return_rstd: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    *,
    eps: float = ...,
    residual: ArrayLike | None = ...,
    zero_centred: bool = ...,
    return_rstd: bool = ...,
    implementation: Implementation | None = ...,
) -> Any: ...


@hinted
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    *,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    zero_centred: bool = False,
    return_rstd: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Root-mean-square normalisation of rows, scaled by column (Zhang and Sennrich, 2019).

    For a row x of D numbers, in f32 whatever the dtype:

        y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps)

    with 1 + weight in the place of weight where `zero_centred` is set. y is rounded once. With a
    residual, x + residual is rounded to the dtype of x, normalised in the place of x, and returned
    too. It is differentiable in both modes with respect to `x`, `weight` and `residual`; gradients
    are summed in f32 and rounded once to the dtypes of their arrays. The residuals of the backward
    pass are x, or the sum, and rstd.

    NaN and infinity in a row make that row of y and of its gradient NaN, and the gradient of the
    weight; where eps is 0, so does a row of zeros.

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D] in any of these dtypes; None for no scale.
      eps: finite and at least 0.
      residual: of the shape of x, or None. Dtypes of both that differ are promoted as by `jnp`.
      zero_centred: whether rows are scaled by 1 + weight, as in Gemma.
      return_rstd: whether to return rstd too.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA, which
        takes wider dtypes too), or None for what `pallas_bridge.info()` says of the platform: the
        kernels on CPUs and NVIDIA GPUs, and elsewhere XLA's program.

    Returns:
      y [.., D] in the (promoted) dtype of x; with a residual, the sum [.., D] in that dtype after
      it; with `return_rstd`, rstd [..] in float32 after these. A tuple where there is more than y.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, or an option outside its range.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([[3.0, -3.0]]), jnp.ones(2)).round(4))
    [[ 1. -1.]]
    """
    module = IMPLEMENTATIONS[choose(RMS_NORM, implementation)]
    options = check_rms_options(eps, zero_centred, implementation)
    gives_rstd = check_flag("return_rstd", return_rstd)
    x = as_array("x", x, "[.., D]")
    weight = weight_or_default(x, weight, zero_centred)
    if residual is not None:
        x, residual = promoted(x, as_array("residual", residual, "[.., D]"))
    check_columns(x, "weight", weight)
    check_like("residual", residual, "x", x)
    y, total, rstd = module.norm(options, x, weight, residual=residual)
    results = (y, *([] if residual is None else [total]), *([rstd] if gives_rstd else []))
    return y if len(results) == 1 else results


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None = ...,
    *,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None = ...,
    *,
    eps: float = ...,
    return_statistics: bool = ...,
    implementation: Implementation | None = ...,
) -> Any: ...


@hinted
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    return_statistics: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Layer normalisation of rows, scaled and moved by column (Ba, Kiros and Hinton, 2016).

    For a row x of D numbers, in f32 whatever the dtype:

        y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)

    y is rounded once. The variance is the mean of (x - mean)^2, never a difference of two means, so
    that rows whose mean is many times their deviation keep their digits. It is differentiable in
    both modes with respect to `x`, `weight` and `bias`; gradients are summed in f32 and rounded
    once to the dtypes of their arrays. The residuals of the backward pass are x, mean and rstd.

    NaN and infinity in a row make that row of y and of its gradient NaN, and the gradient of the
    weight; where eps is 0, so does a row of one number.

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D] in any of these dtypes; None for no scale.
      bias: [D] in any of these dtypes, or None.
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
    module = IMPLEMENTATIONS[choose(LAYER_NORM, implementation)]
    options = check_layer_options(eps, implementation)
    gives_statistics = check_flag("return_statistics", return_statistics)
    x = as_array("x", x, "[.., D]")
    weight = weight_or_default(x, weight, False)
    if bias is not None:
        weight, bias = promoted(weight, as_array("bias", bias, "[D]"))
    check_columns(x, "weight", weight)
    check_like("bias", bias, "weight", weight)
    y, mean, rstd = module.norm(options, x, weight, bias=bias)
    return (y, mean, rstd) if gives_statistics else y


def weight_or_default(x: jax.Array, weight: ArrayLike | None, is_zero_centred: bool) -> jax.Array:
    """Returns the weight [D]; for None, the one that scales nothing."""
    if weight is not None:
        return as_array("weight", weight, "[D]")
    return jnp.full(x.shape[-1:], 0 if is_zero_centred else 1, x.dtype)
