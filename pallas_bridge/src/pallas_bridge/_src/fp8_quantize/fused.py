"""SwiGLU and RMSNorm in FP8 as one call, which have kernels on NVIDIA GPUs.

Elsewhere, and where it may not be, what the function and `fp8_quantize` run takes its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..activation import custom_call as activation_call
from ..activation.options import Options as Activation
from ..arrays import spec_of
from ..bound import Bound
from ..checks import DTYPES, check_flag
from ..custom_call import bind, declared_call
from ..norm import custom_call as norm_call
from ..norm.options import Options as Norm
from . import custom_call
from .declaration import OPERATION
from .options import Options, check_options

# Columns of a block, the only ones that kernels make.
BLOCK = 128
# Columns of rows that are normalised, at least and at most.
NORMED = (640, 32768)
# What `fp8_quantize` may be asked for.
KEYWORDS = {"dtype", "granularity", "block_size", "power_of_two", "transposed", "implementation"}


def options_of(keywords: Mapping[str, Any]) -> tuple[Options, bool] | None:
    """Returns options, and whether there is a transposed copy; None for what is composed.

    Raises:
        TypeError: what `fp8_quantize` raises of keywords.
        ValueError: the same.
    """
    is_known = {*keywords} <= KEYWORDS and keywords.get("granularity") == "block_1d"
    if not is_known or keywords.get("implementation") == "reference":
        return None
    options = check_options(
        keywords.get("dtype", jnp.float8_e4m3fn),
        "block_1d",
        keywords.get("block_size", BLOCK),
        keywords.get("power_of_two", False),
        keywords.get("implementation"),
    )
    return options, check_flag("transposed", keywords.get("transposed", False))


def _fits(options: Options, is_transposed: bool, columns: Any, arrays: Sequence[jax.Array]) -> bool:
    """Whether kernels take rows of so many columns, of the first of some arrays."""
    return (
        options.block_size == BLOCK
        and isinstance(columns, int)
        and columns % BLOCK == 0
        and columns > 0
        and arrays[0].ndim > is_transposed
        and all(axis is None for one in arrays for axis in spec_of(jax.typeof(one)))
    )


def takes_gates(options: Options, is_transposed: bool, arrays: Sequence[jax.Array]) -> bool:
    """Whether kernels take gate and up, or what packs both."""
    x = arrays[0]
    width = x.shape[-1] if x.ndim else None
    columns = width if len(arrays) > 1 or not isinstance(width, int) or width % 2 else width // 2
    is_right = all(one.dtype == jnp.bfloat16 for one in arrays)
    return is_right and _fits(options, is_transposed, columns, arrays)


def takes_rows(
    options: Options, is_transposed: bool, weight: jax.Array, arrays: Sequence[jax.Array]
) -> bool:
    """Whether kernels take rows that are normalised, x and perhaps a residual."""
    x = arrays[0]
    columns = x.shape[-1] if x.ndim else None
    if not isinstance(columns, int) or not NORMED[0] <= columns <= NORMED[1]:
        return False
    is_right = all(one.dtype == jnp.bfloat16 for one in arrays) and weight.dtype in DTYPES
    return is_right and _fits(options, is_transposed, columns, [*arrays, weight])


def rms_norm(
    options: Options,
    norm: Norm,
    is_transposed: bool,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns values and scales of the norm, which fits, those of the transposed copy, the sum."""
    ending = f"{'' if residual is None else '_add'}{'_transposed' if is_transposed else ''}"
    call = declared_call(
        OPERATION,
        f"xentile_fp8_quantize_rms_norm{ending}",
        {
            "eps": norm.eps,
            "zero_centred": norm.zero_centred,
            "power_of_two": options.power_of_two,
        },
        dtypes={"values": options.dtype},
        implementation=options.implementation,
        dense=Bound(_composed_norm, options, norm, is_transposed),
        is_composed=True,
    )
    return bind(call, x, *([] if residual is None else [residual]), weight)[:-1]


def _composed_norm(
    options: Options, norm: Norm, is_transposed: bool, x: jax.Array, *more: jax.Array
) -> tuple[jax.Array, ...]:
    *residual, weight = more
    y, total, rstd = norm_call.norm(norm, x, weight, residual[0] if residual else None)
    run = custom_call.quantize_transposed if is_transposed else custom_call.quantize
    return *run(options, y), *([total] if residual else []), rstd


def swiglu(
    options: Options, activation: Activation, is_transposed: bool, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns values and scales of the activation, which fits, and of the transposed copy."""
    call = declared_call(
        OPERATION,
        f"xentile_fp8_quantize_swiglu{'_transposed' if is_transposed else ''}",
        {
            "packing": activation.layout,
            "alpha": activation.alpha,
            "up_offset": activation.up_offset,
            "limit": activation.limit,
            "power_of_two": options.power_of_two,
        },
        dtypes={"values": options.dtype},
        implementation=options.implementation,
        dense=Bound(_composed, options, activation, is_transposed),
        is_composed=True,
    )
    if activation.layout == "apart":
        return bind(call, *arrays)
    # Once for each: calls have as many operands, whatever is packed.
    return bind(call, *arrays, *arrays)


def _composed(
    options: Options, activation: Activation, is_transposed: bool, x: jax.Array, up: jax.Array
) -> tuple[jax.Array, ...]:
    is_apart = activation.layout == "apart"
    arrays = (x, up) if is_apart else (x,)
    y = activation_call.activation(activation, *arrays)
    run = custom_call.quantize_transposed if is_transposed else custom_call.quantize
    return run(options, y)
