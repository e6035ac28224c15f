"""Activations: what users call."""

from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from ..checks import as_array, check_flag, check_float32, promoted
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from . import custom_call
from .declaration import OPERATION
from .options import Kind, Layout, Options, check_arrays, gelu_kind


@hinted
def gelu(
    x: ArrayLike,
    *,
    approximate: bool | Literal["quick"] = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gaussian error linear unit (Hendrycks and Gimpel, 2016), entry by entry.

        True:    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
        False:   x / 2 * erfc(-x / sqrt(2))
        "quick": x * sigmoid(1.702 * x)

    The first two are those of `jax.nn.gelu`. Computed in f32 and rounded once, also far
    out where the result is tiny. It is differentiable in both modes; for the backward pass x alone
    is kept.

    Args:
      x: any shape, in bfloat16, float16 or float32.
      approximate: the form, as above.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA, which
        takes wider dtypes too), or None for the faster of them, as `pallas_bridge.info()` says.

    Returns:
      An array of the shape and dtype of x.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: a form or an implementation that there is not.
    """
    kind, alpha = gelu_kind(approximate)
    return _activation(kind, x, alpha=alpha, implementation=implementation)


@hinted
def squared_relu(x: ArrayLike, *, implementation: Implementation | None = None) -> jax.Array:
    """The square of the positive part, max(x, 0)^2 (So et al., "Primer", 2021), entry by entry.

    Arguments, dtypes, what is kept for the backward pass, result and errors are those of `gelu`.
    """
    return _activation("squared_relu", x, implementation=implementation)


@hinted
def swiglu(
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gated linear unit with a sigmoid-weighted gate (Shazeer, 2020), of one packed array or two.

        gate * sigmoid(alpha * gate) * (up + up_offset)

    With `limit`, gate is first clamped to at most that, and up to within it on both sides; the
    gradient of what was clamped is 0. With interleaved=True, alpha=1.702, limit=7 and up_offset=1
    it is the activation of gpt-oss. Computed in f32 and rounded once. It is differentiable in both
    modes; for the backward pass x and up alone are kept.

    Args:
      x: [.., 2F], gate and up packed, in bfloat16, float16 or float32; or the gate [.., F], where
        `up` is given.
      up: of the shape of x, or None; dtypes that differ are promoted as by `jnp`. Of two arrays
        XLA's own program is the implementation, which moves no more bytes than it must.
      interleaved: whether gate and up are the even and the odd columns of x; otherwise they are its
        halves, the gate first.
      alpha: finite and above 0.
      limit: finite and above 0, or None.
      up_offset: finite.
      implementation: as of `gelu`; "custom_call" is of one packed array.

    Returns:
      [.., F] in the (promoted) dtype of x.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is
        traced.
      ValueError: shapes that disagree, an odd number of packed columns, or an option outside its
        range.
    """
    alpha = check_float32("alpha", alpha, is_positive=True)
    gate: dict[str, Any] = {"interleaved": interleaved, "limit": limit, "up_offset": up_offset}
    return _gated("silu", x, up, alpha=alpha, implementation=implementation, **gate)


@hinted
def geglu(
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    approximate: bool | Literal["quick"] = True,
    interleaved: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gated linear unit with GELU as the gate (Shazeer, 2020), of one packed array or two.

        gelu(gate) * (up + up_offset)

    `approximate` is the form of `gelu`, and all else is as of `swiglu`.
    """
    kind, alpha = gelu_kind(approximate)
    gate: dict[str, Any] = {"interleaved": interleaved, "limit": limit, "up_offset": up_offset}
    return _gated(kind, x, up, alpha=alpha, implementation=implementation, **gate)


@hinted
def reglu(
    x: ArrayLike,
    up: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gated linear unit with the positive part as the gate (Shazeer, 2020), packed or not.

        max(gate, 0) * (up + up_offset)

    All else is as of `swiglu`.
    """
    gate: dict[str, Any] = {"interleaved": interleaved, "limit": limit, "up_offset": up_offset}
    return _gated("relu", x, up, implementation=implementation, **gate)


def _gated(kind: Kind, x: ArrayLike, up: ArrayLike | None, **gate: Any) -> jax.Array:
    return _of(gated_options(kind, up is not None, **gate), x, up)


def gated_options(
    kind: Kind,
    is_apart: bool,
    *,
    interleaved: bool,
    limit: float | None,
    up_offset: float,
    alpha: float = 1.0,
    implementation: Implementation | None,
) -> Options:
    """Returns the options of gate and up, `is_apart` in two arrays.

    Raises:
        TypeError: an option that is no number, no bool or traced.
        ValueError: an option outside its range, or that excludes another.
    """
    choose(OPERATION, implementation)
    is_interleaved = check_flag("interleaved", interleaved)
    if is_apart and is_interleaved:
        raise ValueError("interleaved is True and up is given; of two arrays nothing is packed")
    if is_apart and implementation == "custom_call":
        raise ValueError(
            f"{OPERATION}: implementation is 'custom_call'; of gate and up in two arrays it must "
            "be 'reference' or None, which is XLA's program"
        )
    layout: Layout = "interleaved" if is_interleaved else "halves"
    return Options(
        kind,
        "apart" if is_apart else layout,
        alpha=alpha,
        limit=None if limit is None else check_float32("limit", limit, is_positive=True),
        up_offset=check_float32("up_offset", up_offset, is_positive=False),
        implementation=implementation,
    )


def _activation(
    kind: Kind, x: ArrayLike, *, implementation: Implementation | None, **more: Any
) -> jax.Array:
    choose(OPERATION, implementation)
    return _of(Options(kind, "single", implementation=implementation, **more), x, None)


def _of(options: Options, x: ArrayLike, up: ArrayLike | None) -> jax.Array:
    right = {"single": "of any shape", "apart": "[.., F]"}.get(options.layout, "[.., 2F]")
    x = as_array("x", x, right)
    if up is not None:
        x, up = promoted(x, as_array("up", up, "[.., F]"))
    check_arrays(x, up, is_packed=options.layout in ("halves", "interleaved"))
    if options.layout == "single" and x.ndim == 0:
        # Kernels have columns.
        return custom_call.activation(options, x[None])[0]
    return custom_call.activation(options, x, *([] if up is None else [up]))
