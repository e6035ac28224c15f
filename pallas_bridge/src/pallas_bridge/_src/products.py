"""Products with matrices, and their gradients, on meshes of explicit axes too."""

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from .arrays import spec_of


def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns x @ matrix, x [.., D] and matrix [D, N], sharded as rows of x and columns are."""
    spec = [*spec_of(jax.typeof(x))[:-1], spec_of(jax.typeof(matrix))[1]]
    return contract(x, matrix, (x.ndim - 1,), (0,), spec)


def grad_rows(dy: jax.Array, matrix: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the gradient of x of `multiply`, for the cotangent dy of its result."""
    spec = [*spec_of(jax.typeof(dy))[:-1], spec_of(jax.typeof(x))[-1]]
    return contract(dy, matrix, (dy.ndim - 1,), (1,), spec)


def grad_matrix(x: jax.Array, dy: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns the gradient of the matrix of `multiply`, summed over all rows in one product."""
    rows = tuple(range(x.ndim - 1))
    return contract(x, dy, rows, rows, spec_of(jax.typeof(matrix)))


def contract(
    a: jax.Array,
    b: jax.Array,
    of_a: tuple[int, ...],
    of_b: tuple[int, ...],
    spec: list[object],
    dtype: DTypeLike | None = None,
    algorithm: DotAlgorithmPreset | None = None,
) -> jax.Array:
    """Returns the product over axes of a and b.

    Args:
        a: [..].
        b: [..].
        of_a: axes of a that are summed over.
        of_b: the same of b.
        spec: how explicit mesh axes shard the product.
        dtype: of the product, or None for that of a and b.
        algorithm: how hardware multiplies, or None for XLA's choice.
    """
    mesh = jax.typeof(a).sharding.mesh
    is_explicit = AxisType.Explicit in getattr(mesh, "axis_types", ())
    product: jax.Array = jax.lax.dot_general(
        a,
        b,
        ((of_a, of_b), ((), ())),
        precision=algorithm,
        preferred_element_type=jnp.result_type(a, b) if dtype is None else dtype,
        out_sharding=PartitionSpec(*spec) if is_explicit else None,
    )
    return product
