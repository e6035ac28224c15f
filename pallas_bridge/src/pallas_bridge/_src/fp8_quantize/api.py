"""FP8 quantisation: what users call."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..activation.api import gated_options, swiglu
from ..activation.options import Options as Activation
from ..activation.options import check_arrays as check_gated
from ..checks import as_array, check_dtype_named, check_flag, check_integer, check_word
from ..implementations import choose
from ..keywords import hinted, hinted_with
from ..norm.api import rms_norm, weight_or_default
from ..norm.options import Options as Norm
from ..norm.options import check_columns, check_like, check_rms_options
from ..operation import Implementation
from ..rms_norm_fp8.declaration import OPERATION as RMS_NORM_FP8
from ..swiglu_fp8.declaration import OPERATION as SWIGLU_FP8
from . import custom_call, fused, reference
from .declaration import OPERATION
from .options import (
    Granularity,
    Options,
    check_array,
    check_format,
    check_number,
    check_options,
)


class Quantized(NamedTuple):
    """An array in FP8: values and float32 scales, by which values are multiplied."""

    values: jax.Array
    scales: jax.Array


# Exported programs give it back.
jax.export.register_namedtuple_serialization(Quantized, serialized_name="pallas_bridge.Quantized")


@hinted
def fp8_quantize(
    x: ArrayLike,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    granularity: Granularity = "tensor",
    block_size: int = 128,
    power_of_two: bool = False,
    transposed: bool = False,
    amax: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    return_amax: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Quantises to FP8 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

    With L the largest finite number of the format, 448 or 57344, each block of x has

        scale = amax / L,  values = x / scale, rounded to nearest even and cut to within L

    where amax is the largest magnitude of the block's finite entries; values * scale is what stands
    for x. What a block is:

    - "tensor": all of x. Scales are a scalar. Current scaling, per tensor.
    - "row": each row: scales [..]. Per token, or per channel.
    - "block_1d": block_size entries of a row: scales [.., ceil(D / block_size)]. Of DeepSeek-V3 the
      tiles of 1 x 128, for activations; of Transformer Engine 1D blocks.
    - "block_2d": block_size rows and columns: scales [.., ceil(M / block_size),
      ceil(D / block_size)]. Of DeepSeek-V3 the blocks of 128 x 128, for weights; of Transformer
      Engine 2D blocks.

    Blocks at the edges are smaller where an axis does not divide. The quotient is x times
    1 / scale, each rounded to f32, which is what XLA makes of such a division; it is exact where
    the scale is a power of two. Bits do not depend on the implementation, on the number of threads,
    or, but for "tensor" and "block_2d", on other rows.

    NaN stays NaN, on GPUs without its sign, and touches no other entry. Infinities become L of
    their sign, and scales know nothing of them. A block of zeros has the scale 1. Entries below
    f32's normal range count as 0, and scales are never below that range.

    It has no derivative: rounding is a step function, and what training puts in its place, the
    cotangent as it is or quantised in turn, is the recipe's to say with `jax.custom_vjp`.

    Args:
      x: [.., M, D] in bfloat16, float16 or float32; of "row" and "block_1d" [.., D], and of
        "tensor" any shape.
      dtype: float8_e4m3fn, or float8_e5m2.
      granularity: which entries have a scale in common, as above.
      block_size: of "block_1d" and "block_2d", at least 1.
      power_of_two: whether scales are the least powers of two of at least amax / L.
      transposed: whether to give the transposed copy [.., D, M] too, in blocks of its own.
      amax: of "tensor", a scalar that the scale is made of, as in delayed scaling. Larger entries
        become L of their sign.
      scale: of "tensor", a scalar that is the scale itself: see `delayed_scale`. One that is not
        within 2^-126 and 2^126 makes all values NaN.
      return_amax: of "tensor", whether to give amax of x too: where a scale or an amax is given,
        from the same read.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA), or
        None for what `pallas_bridge.info()` says: kernels on CPUs and NVIDIA GPUs, elsewhere XLA's
        program.

    Returns:
      `Quantized`: values in the shape of x and their scales in float32. With `transposed`, a pair
      of it and of the transposed copy; with `return_amax`, behind that, amax of x in float32.

    Raises:
      TypeError: a dtype that is not taken, or an option of another type or traced.
      ValueError: an option outside its range, too few axes, or a scale or an amax that goes with
        another granularity.
      NotImplementedError: a derivative.

    >>> values, scales = fp8_quantize(jnp.array([[0.5, -2.0], [0.0, 0.0]]), granularity="row")
    >>> print(values.astype(jnp.float32))
    [[ 112. -448.]
     [   0.    0.]]
    >>> print(scales)
    [0.00446429 1.        ]
    """
    choose(OPERATION, implementation)
    options = check_options(dtype, granularity, block_size, power_of_two, implementation)
    is_transposed = check_flag("transposed", transposed)
    wants_amax = check_flag("return_amax", return_amax)
    x = as_array("x", x, "[.., M, D]")
    check_array(options, x, is_transposed)
    if granularity != "tensor":
        if amax is not None:
            check_number("amax", amax, options)
        if scale is not None:
            check_number("scale", scale, options)
        if wants_amax:
            raise ValueError(
                f"return_amax is set and granularity is {granularity!r}; it must be 'tensor'"
            )
        return _paired(_by_block(options, is_transposed, x), is_transposed)
    if amax is not None and scale is not None:
        raise ValueError("amax and scale are given; at most one of them may be")
    found, most = None, None
    if scale is not None:
        found = check_number("scale", scale, options)
        is_right = (found >= reference.LEAST) & (found <= reference.MOST)
        found = jnp.where(is_right, found, jnp.nan)
    elif amax is not None:
        found = _scale_of(options, check_number("amax", amax, options))
    shape = x.shape
    # Kernels have columns.
    x = x if x.ndim else x[None]
    results = _by_tensor(options, is_transposed, x, *([] if found is None else [found]))
    values, scales, most, *copies = results
    quantized = Quantized(values.reshape(shape) if shape == () else values, scales)
    both: Any = (quantized, Quantized(copies[0], scales)) if is_transposed else quantized
    if not wants_amax:
        return both
    return (*both, most) if is_transposed else (quantized, most)


@hinted
def fp8_dequantize(
    values: ArrayLike,
    scales: ArrayLike,
    dtype: DTypeLike = jnp.float32,
    *,
    block_size: int = 128,
) -> jax.Array:
    """Gives back what FP8 stands for: values * scales, in f32, rounded once to `dtype`.

    It is XLA's own program on every platform.

    Args:
      values: [.., M, D] in float8_e4m3fn or float8_e5m2.
      scales: float32, in one of the shapes that `fp8_quantize` gives for values of that shape.
      dtype: float32, bfloat16 or float16.
      block_size: that of `fp8_quantize`, where scales are by block.

    Returns:
      An array of the shape of values in `dtype`.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: scales of another shape, or a block size below 1.
      NotImplementedError: a derivative.

    >>> x = jnp.array([[0.5, -2.0]])
    >>> print(fp8_dequantize(*fp8_quantize(x)))
    [[ 0.5 -2. ]]
    """
    values = as_array("values", values, "[.., M, D]")
    scales = as_array("scales", scales, "in one of the shapes that fp8_quantize gives")
    check_format("the dtype of values", values.dtype)
    size = check_integer("block_size", block_size, 1)
    if scales.dtype != jnp.float32:
        raise TypeError(f"scales has dtype {scales.dtype}; it must be float32")
    found = check_dtype_named("dtype", dtype)
    *leading, columns = values.shape or (1,)
    across = -(-columns // size)
    shapes: dict[tuple[Any, ...], tuple[int, int | None]] = {}
    if len(leading) > 0:
        shapes[(*leading[:-1], -(-leading[-1] // size), across)] = (size, size)
    if values.ndim:
        shapes[(*leading, across)] = (1, size)
    shapes[(*leading,)] = (1, None)
    if scales.shape != () and scales.shape not in shapes:
        right = ", ".join(map(str, dict.fromkeys([(), *reversed(shapes)])))
        raise ValueError(
            f"scales has shape {scales.shape} and values {values.shape}; scales must have one of "
            f"the shapes {right}, where block_size is {size}"
        )
    extents = None if scales.shape == () else shapes[scales.shape]
    return _dequantize(extents, found, values, scales)


@hinted
def delayed_scale(
    history: ArrayLike,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    margin: int = 0,
    amax_compute: Literal["max", "most_recent"] = "max",
    power_of_two: bool = False,
) -> jax.Array:
    """Returns the scale that delayed scaling takes from amax of steps before (Micikevicius et al.).

        scale = 2^margin * amax / L

    Args:
      history: [.., H], amax of the last H steps, the latest first, in any float dtype. Entries that
        are not finite are left aside; a history of zeros, as training begins with, gives 1.
      dtype: float8_e4m3fn, or float8_e5m2.
      margin: by how many powers of two entries may grow.
      amax_compute: the largest of the history, or its first entry.
      power_of_two: whether the scale is the least power of two of at least that.

    Returns:
      The `scale` of `fp8_quantize`, [..] in float32.

    Raises:
      TypeError: a dtype that is not taken, or an option of another type.
      ValueError: a history of no entries, or a word that there is not.

    >>> history = jnp.zeros(16)
    >>> (_, _), amax = fp8_quantize(
    ...     jnp.array([3.0, -448.0]), scale=delayed_scale(history), return_amax=True
    ... )
    >>> history = jnp.roll(history, 1).at[0].set(amax)
    >>> print(delayed_scale(history))
    1.0
    """
    options = check_options(dtype, "tensor", 1, power_of_two, None)
    if isinstance(margin, bool) or not isinstance(margin, int):
        raise TypeError(f"margin is {margin!r}; it must be a whole number")
    history = as_array("history", history, "[.., H]")
    if not jnp.issubdtype(history.dtype, jnp.floating):
        raise TypeError(f"history has dtype {history.dtype}; it must be float32")
    if history.ndim == 0 or history.shape[-1] == 0:
        raise ValueError(f"history has shape {history.shape}; it must be [.., H] with H at least 1")
    check_word("amax_compute", amax_compute, ("max", "most_recent"))
    most = reference.amax(history[..., :1] if amax_compute == "most_recent" else history, -1)
    grown = most * jnp.float32(2.0**margin)
    # Beyond f32 there is nothing to grow into.
    return reference.scale(options, jnp.minimum(grown, jnp.finfo(jnp.float32).max))


@hinted_with(fp8_quantize)
def rms_norm_fp8(
    x: ArrayLike,
    weight: ArrayLike | None,
    *,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    zero_centred: bool = False,
    **quantization: Any,
) -> Any:
    """RMSNorm, quantised to FP8: `fp8_quantize` of `rms_norm`, and its bits.

    On NVIDIA GPUs one kernel makes values of what it reads, where x is bfloat16, blocks are those
    of "block_1d" of 128 columns, and rows whole ones of 640 to 32768 columns; with the transposed
    copy it is two kernels, the first of which gives statistics, and the sum with a residual.

    Args:
      x: as of `rms_norm`.
      weight: as of `rms_norm`.
      eps: as of `rms_norm`.
      residual: as of `rms_norm`.
      zero_centred: as of `rms_norm`.
      **quantization: the options of `fp8_quantize`; `implementation` is of both.

    Returns:
      What `fp8_quantize` gives of the norm; with a residual, a pair of that and of the sum.

    Raises:
      TypeError: as of the two functions.
      ValueError: as of the two functions.
      NotImplementedError: a derivative.
    """
    implementation = quantization.get("implementation")
    choose(RMS_NORM_FP8, implementation)
    found = fused.options_of(quantization)
    arrays = [as_array("x", x, "[.., D]")]
    if residual is not None:
        arrays.append(as_array("residual", residual, "[.., D]"))
    weight = weight_or_default(arrays[0], weight, zero_centred)
    if found is not None and fused.takes_rows(*found, weight, arrays):
        options, is_transposed = found
        norm = check_rms_options(eps, zero_centred, implementation)
        of_residual = arrays[1] if arrays[1:] else None
        check_columns(arrays[0], "weight", weight)
        check_like("residual", of_residual, "x", arrays[0])
        results = _norm_by_block(options, norm, is_transposed, arrays[0], weight, of_residual)
        quantized = _paired(results[: 4 if is_transposed else 2], is_transposed)
        return quantized if residual is None else (quantized, results[-1])
    normed = rms_norm(
        x,
        weight,
        eps=eps,
        residual=residual,
        zero_centred=zero_centred,
        implementation=implementation,
    )
    if residual is None:
        return fp8_quantize(normed, **quantization)
    y, total = normed
    return fp8_quantize(y, **quantization), total


@hinted_with(fp8_quantize)
def swiglu_fp8(
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    **quantization: Any,
) -> Any:
    """SwiGLU, quantised to FP8: `fp8_quantize` of `swiglu`, and its bits.

    On NVIDIA GPUs one kernel makes values of what it reads, where x is bfloat16, blocks are those
    of "block_1d" of 128 columns, and rows whole ones: y is then that of the library's kernel, which
    is off XLA's by a rounding here and there.

    Args:
      x: as of `swiglu`.
      up: as of `swiglu`.
      interleaved: as of `swiglu`.
      alpha: as of `swiglu`.
      limit: as of `swiglu`.
      up_offset: as of `swiglu`.
      **quantization: the options of `fp8_quantize`; `implementation` is of both, but that gate and
        up in two arrays are XLA's where there is no such kernel.

    Returns:
      What `fp8_quantize` gives of the activation.

    Raises:
      TypeError: as of the two functions.
      ValueError: as of the two functions.
      NotImplementedError: a derivative.
    """
    implementation = quantization.get("implementation")
    gate: dict[str, Any] = {
        "interleaved": interleaved,
        "alpha": alpha,
        "limit": limit,
        "up_offset": up_offset,
        "implementation": None if up is not None else implementation,
    }
    choose(SWIGLU_FP8, implementation)
    found = fused.options_of(quantization)
    arrays = [as_array("x", x, "[.., 2F]" if up is None else "[.., F]")]
    if up is not None:
        arrays.append(as_array("up", up, "[.., F]"))
    if found is not None and fused.takes_gates(*found, arrays):
        options, is_transposed = found
        activation = gated_options("silu", up is not None, **gate)
        check_gated(arrays[0], arrays[1] if arrays[1:] else None, is_packed=up is None)
        results = _swiglu_by_block(options, activation, is_transposed, *arrays)
        return _paired(results, is_transposed)
    return fp8_quantize(swiglu(*arrays, **gate), **quantization)


def _paired(results: Any, is_transposed: bool) -> Any:
    quantized = Quantized(*results[:2])
    return (quantized, Quantized(*results[2:])) if is_transposed else quantized


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} has no derivative, since rounding is a step function: use jax.custom_vjp "
            "around what is computed in FP8, whose backward rule says what cotangents are, or "
            "quantise jax.lax.stop_gradient(x)"
        )

    return refuse


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_block(options: Options, is_transposed: bool, x: jax.Array) -> tuple[jax.Array, ...]:
    if options.implementation == "reference":
        dense = reference.quantize_transposed if is_transposed else reference.quantize
        return dense(options, x)
    run = custom_call.quantize_transposed if is_transposed else custom_call.quantize
    return run(options, x)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _swiglu_by_block(
    options: Options, activation: Activation, is_transposed: bool, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    return fused.swiglu(options, activation, is_transposed, *arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _norm_by_block(
    options: Options,
    norm: Norm,
    is_transposed: bool,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
) -> tuple[jax.Array, ...]:
    return fused.rms_norm(options, norm, is_transposed, x, weight, residual)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_tensor(
    options: Options, is_transposed: bool, x: jax.Array, *given: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns values, the scale, amax, and the transposed copy if there is one."""
    if options.implementation == "reference":
        most = reference.amax(x)
        scale = given[0] if given else reference.scale(options, most)
        values = reference.values(options, x, 1 / scale)
        copies = [jnp.swapaxes(values, -1, -2)] if is_transposed else []
        return values, scale, most, *copies
    scale = given[0] if given else reference.scale(options, custom_call.amax(options, x))
    run = custom_call.scaled_transposed if is_transposed else custom_call.scaled
    values, most, *copies = run(options, x, scale)
    return values, scale, most, *copies


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _dequantize(
    extents: tuple[int, int | None] | None,
    dtype: np.dtype[Any],
    values: jax.Array,
    scales: jax.Array,
) -> jax.Array:
    if extents is not None:
        scales = reference.spread(scales, extents, values.shape)
    return (values.astype(jnp.float32) * scales).astype(dtype)


_by_block.defjvp(_refusal("fp8_quantize"))
_by_tensor.defjvp(_refusal("fp8_quantize"))
_swiglu_by_block.defjvp(_refusal("swiglu_fp8"))
_norm_by_block.defjvp(_refusal("rms_norm_fp8"))
_dequantize.defjvp(_refusal("fp8_dequantize"))


def _scale_of(options: Options, amax: jax.Array) -> jax.Array:
    """Returns the scale for an amax that was given; NaN where that is none."""
    is_right = jnp.isfinite(amax) & (amax >= 0)
    return jnp.where(is_right, reference.scale(options, jnp.abs(amax)), jnp.nan)
