"""RMSNorm and the GEMMs of its rows, whose derivative saves no normalised rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import linear
from ..arrays import multiplied, wide
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, as_array, check_dtype, check_float, promoted
from ..custom_call import vary_alike
from ..implementations import choose
from ..keywords import hinted
from ..meshes import Names, names_of_devices
from ..operation import Implementation
from ..products import grad_matrix, grad_rows, multiply
from . import custom_call, reference
from .api import weight_or_default
from .custom_call import named_sum
from .declaration import RMS_NORM
from .options import Options, check_columns, check_like, check_rms_options


@hinted
def rms_norm_linear(
    x: ArrayLike,
    weight: ArrayLike | None,
    *matrices: ArrayLike,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    zero_centred: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """RMSNorm of rows, and the products of the normalised rows with matrices.

        y_i = rms_norm(x, weight) @ matrices[i]

    The residuals of the backward pass are x, or its sum with `residual`, and rstd. The normalised
    rows, which the gradients of matrices need, are computed again from these: once for all
    matrices. It is differentiable in both modes with respect to all arrays.

    Under `jax.checkpoint` the sum and rstd have the name "rms_norm_sum", which
    `checkpoint_policies.save_sums` keeps: neither the norm nor what was added then runs again.

    Meshes may shard rows of x, columns of matrices, and, as XLA does, D. Within `jax.shard_map` one
    axis may shard both rows and columns (`axis_name`).

    Args:
      x: [.., D] in bfloat16, float16 or float32.
      weight: [D], or None, as of `rms_norm`.
      matrices: at least one, each [D, N]; rounded to the dtype of x.
      eps: finite and at least 0.
      residual: of the shape of x, or None; x + residual is then normalised, and returned last.
      zero_centred: whether rows are scaled by 1 + weight.
      axis_name: the mesh axis, or axes, that shard the second last axis of x and residual, and
        columns of matrices, within `jax.shard_map`. Products have all rows of the axis: normalised
        rows are gathered, again for the backward pass, and their gradient is reduce-scattered.
      implementation: of the norm, as of `rms_norm`.

    Returns:
      A product [.., N] in the dtype of x for each matrix, and with a residual the sum [.., D]; a
      tuple where there is more than one array.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: no matrix, shapes that disagree, or an option outside its range.

    >>> import jax.numpy as jnp
    >>> print(rms_norm_linear(jnp.array([[3.0, -3.0]]), jnp.ones(2), 2 * jnp.eye(2)).round(4))
    [[ 2. -2.]]
    """
    names = names_of_devices(axis_name)
    choose(RMS_NORM, implementation)
    options = check_rms_options(eps, zero_centred, implementation)
    x = as_array("x", x, "[.., D]")
    weight = weight_or_default(x, weight, options.zero_centred)
    if residual is not None:
        x, residual = promoted(x, as_array("residual", residual, "[.., D]"))
    check_columns(x, "weight", weight)
    check_like("residual", residual, "x", x)
    check_rows(names, x)
    if not matrices:
        raise ValueError("no matrix is given; rms_norm_linear takes at least one, [D, N]")
    found = [
        as_array(f"matrices[{index}]", matrix, "[D, N]") for index, matrix in enumerate(matrices)
    ]
    for index, matrix in enumerate(found):
        name = f"matrices[{index}]"
        check_float(name, matrix)
        if matrix.ndim != 2 or matrix.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {matrix.shape}; it must be [{x.shape[-1]}, N], as x has shape "
                f"{x.shape}"
            )
    if implementation != "reference":
        for name, array in (("x", x), ("weight", weight)):
            check_dtype(name, array, REFERENCE_TAKES_OTHERS)
    has_sum = residual is not None
    terms = [x, residual] if residual is not None else [x]
    arrays = [weight, *terms]
    arrays += [one if one.dtype == x.dtype else one.astype(x.dtype) for one in found]
    results = norm_and_multiply(options, has_sum, names, *vary_alike(arrays))
    results = *(join_rows(names, y) for y in results[: len(found)]), *results[len(found) :]
    return results if len(results) > 1 else results[0]


def check_rows(names: Names, x: jax.Array) -> None:
    """Checks that x has an axis of rows if mesh axes shard it.

    Raises:
        ValueError: it has none.
    """
    if names and x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; with axis_name it must be [.., T, D]")


def gather_rows(names: Names, x: jax.Array) -> jax.Array:
    """Returns x [n, .., T / n, D] of n devices along mesh axes, of a device's [.., T / n, D].

    NCCL writes these device by device; in the order of T XLA would transpose what is sent.
    """
    if not names:
        return x
    rows: jax.Array = jax.lax.all_gather(x, names)
    return rows


def scatter_rows(names: Names, x: jax.Array) -> jax.Array:
    """Returns a device's rows [.., T / n, D] of the sum of x [n, .., T / n, D] over devices."""
    if not names:
        return x
    rows: jax.Array = jax.lax.psum_scatter(x, names)
    return rows


def join_rows(names: Names, x: jax.Array) -> jax.Array:
    """Returns x [.., T, D] in the order of T, of what `gather_rows` gives."""
    if not names:
        return x
    rows = jnp.moveaxis(x, 0, -3)
    return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])


def _forward(
    options: Options, has_sum: bool, over: Names, *arrays: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the products, what is normalised, and rstd."""
    weight, x, *others = arrays
    residual = others.pop(0) if has_sum else None
    with jax.named_scope("norms"):
        if options.implementation == "reference":
            y, total, rstd = reference.norm(options, x, weight, residual)
        else:
            y, total, rstd = custom_call.forward(options, x, weight, residual, None)
    y = gather_rows(over, y)
    return [multiply(y, matrix) for matrix in others], total, rstd


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def norm_and_multiply(
    options: Options, has_sum: bool, over: Names, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the products, then the sum; arrays are weight, x, a residual if any, matrices.

    Mesh axes `over` shard rows, the second last axis of x; products have rows as `gather_rows` has.
    """
    products, total, _ = _forward(options, has_sum, over, *arrays)
    return (*products, total) if has_sum else tuple(products)


@partial(norm_and_multiply.defjvp, symbolic_zeros=True)
def _jvp(
    options: Options, has_sum: bool, over: Names, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    weight, x, *others = primals
    matrices = others[1:] if has_sum else others
    # The sum apart from the norm, so that what a policy keeps of it is enough for the norm again.
    if has_sum:
        x = named_sum(reference.rounded(wide(x) + wide(others[0]), x.dtype).astype(x.dtype))
    products, total, rstd = _forward(options, False, over, weight, x, *matrices)
    rstd = named_sum(rstd)
    results = (*products, total) if has_sum else tuple(products)
    dweight, *rest = map(linear.given, tangents)
    count = 2 if has_sum else 1
    terms = [term for term in rest[:count] if term is not None]
    moving = (sum(terms[1:], terms[0]) if terms else None, dweight, *rest[count:])
    if all(tangent is None for tangent in moving):
        return results, tuple(map(jnp.zeros_like, results))
    apply, transpose = (Bound(rule, options, has_sum, over) for rule in (_apply, _transpose))
    residuals = (total, weight, rstd, *matrices)
    return results, tuple(linear.bind(apply, transpose, residuals, moving, results))


def _normalised(
    options: Options, total: jax.Array, weight: jax.Array, rstd: jax.Array
) -> jax.Array:
    rows = multiplied(wide(total) * rstd[..., None], reference.scale(options, weight))
    return rows.astype(total.dtype)


def _apply(
    options: Options, has_sum: bool, over: Names, residuals: Any, tangents: Any
) -> Sequence[jax.Array]:
    (total, weight, rstd, *matrices), (dtotal, dweight, *dmatrices) = residuals, tangents
    dy = None
    if dtotal is not None or dweight is not None:
        dy, _ = reference.tangents(options, total, weight, (rstd,), dtotal, dweight)
        dy = gather_rows(over, dy)
    y = gather_rows(over, _normalised(options, total, weight, rstd))
    found = []
    for matrix, dmatrix in zip(matrices, dmatrices, strict=True):
        parts = [] if dy is None else [multiply(dy, matrix)]
        parts += [] if dmatrix is None else [multiply(y, dmatrix)]
        found.append(sum(parts[1:], parts[0]) if parts else multiply(jnp.zeros_like(y), matrix))
    if has_sum:
        found.append(jnp.zeros_like(total) if dtotal is None else dtotal)
    return found


def _transpose(
    options: Options, has_sum: bool, over: Names, residuals: Any, cotangents: Any
) -> Sequence[Any]:
    total, weight, rstd, *matrices = residuals
    dsum = cotangents[-1] if has_sum else None
    pairs = [*zip(matrices, cotangents, strict=False)]
    parts = [grad_rows(dy, matrix, total) for matrix, dy in pairs if dy is not None]
    if not parts:
        return [dsum, None, *(None for _ in matrices)]
    dy = scatter_rows(over, sum(parts[1:], parts[0]))
    # Otherwise XLA would merge the normalised rows with those of the forward pass, and keep them.
    again, of_rows, _ = jax.lax.optimization_barrier((total, rstd, dy))
    with jax.named_scope("norms"):
        y = _normalised(options, again, weight, of_rows)
        arrays = (total, weight, (rstd,), dy, dsum)
        if options.implementation == "reference":
            extra = () if dsum is None else (dsum,)
            dtotal, dweight = reference.gradients(options, total, weight, rstd, dy, *extra)
        else:
            dtotal, dweight = custom_call.backward(options, *arrays)
    y = gather_rows(over, y)
    grad_matrices = [None if dy is None else grad_matrix(y, dy, matrix) for matrix, dy in pairs]
    return [dtotal, dweight, *grad_matrices]
