"""The gated MLP, whose derivative saves fewer residuals than those of its parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import linear
from ..arrays import spec_of
from ..bound import Bound
from ..checks import (
    REFERENCE_TAKES_OTHERS,
    as_array,
    check_dtype,
    check_flag,
    check_float,
    check_float32,
    check_word,
    promoted,
)
from ..custom_call import vary_alike
from ..keywords import hinted
from ..meshes import Names, names_of_devices
from ..norm.custom_call import SUM_NAME
from ..norm.options import Options as NormOptions
from ..norm.options import check_columns, check_like, check_rms_options
from ..norm.with_products import check_rows, gather_rows, norm_and_multiply, scatter_rows
from ..operation import Implementation
from ..products import grad_matrix, grad_rows, multiply
from . import custom_call, reference
from .api import gated_options
from .options import QUICK, Kind, Options

Function = Literal["silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu"]
Keep = Literal["inner", "packed", "input"]
# The name of gate and up of `gated_mlp` for policies of `jax.checkpoint`.
NAME = "gated_mlp"


@dataclass(frozen=True)
class Mlp:
    """The activation, what is saved for the backward pass, and the norm before, if any."""

    activation: Options
    keep: Keep
    norm: NormOptions | None
    # The mesh axes that shard rows of x and F.
    over: Names


@hinted
def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike | None,
    w_down: ArrayLike,
    *,
    activation: Function = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    norm_weight: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    keep: Keep = "packed",
    axis_name: str | Sequence[str] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """The gated MLP of a transformer (Shazeer, 2020), with two products forward and four backward.

        y = (f(x @ w_gate) * (x @ w_up + up_offset)) @ w_down

    With `norm_weight`, `rms_norm_linear` of x takes the place of the products with x.

    Gate and up are the columns of one product, and so are their gradients: dx and the gradient of
    their matrix are one product each. The backward pass recomputes the inner array [.., F], which
    the gradient of `w_down` needs, in the same pass over memory as the gradients of gate and up. It
    is differentiable in both modes with respect to all arrays.

    `keep` is what the backward pass finds in memory besides x (or its sum with the residual) and
    matrices:

        "packed":  gate and up [.., 2F]
        "inner":   these and the inner array [.., F]; nothing of the MLP is computed again
        "input":   nothing; the product for gate and up is computed again

    Under `jax.checkpoint` a policy decides: gate and up have the name "gated_mlp".

    Meshes may shard rows of x, F, and, as XLA does, D. With F sharded, two matrices, or packed
    `interleaved` columns, stay where they are; packed halves exchange columns. Within
    `jax.shard_map` one axis may shard both rows and F (`axis_name`).

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      w_gate: [D, F]; or [D, 2F], where `w_up` is None, which packs both.
      w_up: [D, F], or None. Two matrices are first packed in one, column by column in turn.
      w_down: [F, D], or [F, N]. Dtypes that differ are promoted as by `jnp`.
      activation: f, of `alpha` as in `swiglu`; "gelu_quick" is x * sigmoid(1.702 * x).
      interleaved: whether gate and up are even and odd columns of a packed `w_gate`; otherwise they
        are its halves, the gate first.
      alpha: finite and above 0; 1 unless the activation is "silu".
      limit: bound that gate and up are clamped to as in `swiglu`, or None.
      up_offset: finite.
      norm_weight: [D], of RMSNorm before the products, or None for no norm.
      residual: of the shape of x, or None; x + residual is then normalised, and returned too.
      eps: finite and at least 0, of the norm.
      zero_centred: whether the norm scales rows by 1 + norm_weight.
      keep: as above.
      axis_name: the mesh axis, or axes, that shard the second last axis of x and residual, and F,
        within `jax.shard_map`. Rows are gathered before the products, as by `rms_norm_linear`, and
        y is reduce-scattered.
      implementation: of activation and norm, as of `gelu`.

    Returns:
      y [.., D] (or [.., N]) in the (promoted) dtype of x; with a residual, a tuple of y and the sum
      [.., D].

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, or an option outside its range or unknown.

    >>> import jax.numpy as jnp
    >>> print(gated_mlp(jnp.ones((1, 2)), jnp.eye(2), 2 * jnp.eye(2), jnp.eye(2)).round(4))
    [[1.4621 1.4621]]
    """
    check_word("activation", activation, get_args(Function))
    check_word("keep", keep, get_args(Keep))
    names = names_of_devices(axis_name)
    alpha = check_float32("alpha", alpha, is_positive=True)
    if activation != "silu" and alpha != 1.0:
        raise ValueError(f"alpha is {alpha}; it must be 1 where activation is {activation!r}")
    kind: Kind = "silu" if activation == "gelu_quick" else activation
    interleaved = check_flag("interleaved", interleaved)
    if w_up is not None and interleaved:
        raise ValueError("interleaved is True and w_up is given; of two matrices nothing is packed")
    options = gated_options(
        kind,
        False,
        interleaved=interleaved or w_up is not None,
        limit=limit,
        up_offset=up_offset,
        alpha=QUICK if activation == "gelu_quick" else alpha,
        implementation=implementation,
    )
    arrays = {
        "x": as_array("x", x, "[.., D]"),
        "w_gate": as_array("w_gate", w_gate, "[D, F], or [D, 2F] where w_up is None"),
        "w_down": as_array("w_down", w_down, "[F, D]"),
    }
    if w_up is not None:
        arrays["w_up"] = as_array("w_up", w_up, "[D, F]")
    if residual is not None:
        if norm_weight is None:
            raise ValueError("residual is given and norm_weight is None; give norm_weight too")
        arrays["residual"] = as_array("residual", residual, "[.., D]")
    arrays = dict(zip(arrays, promoted(*arrays.values()), strict=True))
    _check(arrays)
    check_rows(names, arrays["x"])
    if implementation != "reference":
        check_dtype("x", arrays["x"], REFERENCE_TAKES_OTHERS)
    matrix = arrays["w_gate"]
    if w_up is not None:
        matrix = _in_turn(matrix, arrays["w_up"])
    operands = [arrays["x"], matrix, arrays["w_down"]]
    norm = None
    if norm_weight is not None:
        norm = check_rms_options(eps, zero_centred, implementation)
        operands.append(as_array("norm_weight", norm_weight, "[D]"))
        check_columns(arrays["x"], "norm_weight", operands[-1])
        if implementation != "reference":
            check_dtype("norm_weight", operands[-1], REFERENCE_TAKES_OTHERS)
    if "residual" in arrays:
        operands.append(arrays["residual"])
    run: Callable[..., Any] = partial(_mlp, Mlp(options, keep, norm, names))
    if keep == "input":
        # Gate and up are recomputed, behind a barrier, so that XLA does not keep them instead.
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(SUM_NAME))
    return run(*vary_alike(operands))


def _check(arrays: dict[str, jax.Array]) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
        TypeError: a dtype that is no float.
        ValueError: shapes that disagree.
    """
    for name, array in arrays.items():
        check_float(name, array)
        if name not in ("x", "residual") and array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must have two axes")
        if array.dtype != arrays["x"].dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype} and x {arrays['x'].dtype}; JAX promotes them to "
                "none: cast one of them"
            )
    x, gate, down = arrays["x"], arrays["w_gate"], arrays["w_down"]
    check_like("residual", arrays.get("residual"), "x", x)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must be [.., D]")
    if gate.shape[0] != x.shape[-1]:
        raise ValueError(
            f"w_gate has shape {gate.shape} and x {x.shape}; w_gate must have {x.shape[-1]} rows"
        )
    up, packs = arrays.get("w_up"), 1
    if up is None:
        packs = 2
        if isinstance(gate.shape[1], int) and gate.shape[1] % 2:
            raise ValueError(
                f"w_gate has shape {gate.shape}; without w_up it packs gate and up, so that its "
                f"columns must be even and are {gate.shape[1]}"
            )
    elif up.shape != gate.shape:
        raise ValueError(f"w_up has shape {up.shape}; it must be that of w_gate, {gate.shape}")
    if down.shape[0] != gate.shape[1] // packs:
        raise ValueError(
            f"w_down has shape {down.shape}; it must have a row for each of the "
            f"{gate.shape[1] // packs} columns of the gate"
        )


def _in_turn(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns [D, 2F] of two matrices [D, F], column by column in turn, sharded as they are."""
    pairs = jnp.stack([gate, up], axis=-1)
    spec = spec_of(jax.typeof(gate))
    # None where no explicit axis of a mesh shards the matrix.
    placed: Any = PartitionSpec(*spec) if any(spec) else None
    return jnp.reshape(pairs, (gate.shape[0], 2 * gate.shape[1]), out_sharding=placed)


def _mlp(mlp: Mlp, *arrays: jax.Array) -> Any:
    """Returns y, and the sum if there is one, of x, the matrices, norm's weight and a residual."""
    x, matrix, down, *norm_arrays = arrays
    if mlp.norm is None:
        packed = multiply(gather_rows(mlp.over, x), matrix)
        return scatter_rows(mlp.over, _activated(mlp, packed, down))
    weight, *residual = norm_arrays
    terms = (x, *residual)
    packed, *total = norm_and_multiply(mlp.norm, bool(residual), mlp.over, weight, *terms, matrix)
    y = scatter_rows(mlp.over, _activated(mlp, packed, down))
    return (y, *total) if total else y


def _inner(mlp: Mlp, packed: jax.Array) -> jax.Array:
    with jax.named_scope("activation"):
        return custom_call.forward(mlp.activation, packed)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _activated(mlp: Mlp, packed: jax.Array, down: jax.Array) -> jax.Array:
    """Returns the inner array of gate and up, multiplied with `down`."""
    return multiply(_inner(mlp, packed), down)


@partial(_activated.defjvp, symbolic_zeros=True)
def _jvp(mlp: Mlp, primals: Any, tangents: Any) -> tuple[Any, Any]:
    packed, down = primals
    packed = checkpoint_name(packed, NAME)
    inner = _inner(mlp, packed)
    y = multiply(inner, down)
    moving = [linear.given(tangent) for tangent in tangents]
    if all(tangent is None for tangent in moving):
        return y, jnp.zeros_like(y)
    kept = (packed, down, inner) if mlp.keep == "inner" else (packed, down)
    apply, transpose = Bound(_apply, mlp), Bound(_transpose, mlp)
    return y, linear.bind(apply, transpose, kept, moving, [y])[0]


def _apply(mlp: Mlp, residuals: Any, tangents: Any) -> Sequence[jax.Array]:
    def dense(packed: jax.Array, down: jax.Array) -> jax.Array:
        return multiply(reference.forward(mlp.activation, packed), down)

    return [linear.tangents_of(dense, residuals[:2], tangents)]


def _transpose(mlp: Mlp, residuals: Any, cotangents: Any) -> Sequence[jax.Array]:
    (packed, down, *inner), (dy,) = residuals, cotangents
    dinner = grad_rows(dy, down, packed)
    with jax.named_scope("activation"):
        if inner:
            (dpacked,) = custom_call.backward(mlp.activation, [packed], dinner)
        else:
            dpacked, *inner = custom_call.backward_with_y(mlp.activation, packed, dinner)
    return dpacked, grad_matrix(inner[0], dy, down)
