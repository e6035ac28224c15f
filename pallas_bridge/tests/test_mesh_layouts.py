"""Meshes of two axes: sharded weights, axes in any order, no tokens, and gradients without jit."""

import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from on_mesh import by_shardy
from operations import (
    CASES,
    SHARED,
    Case,
    one_a_further_way,
    one_an_implementation,
    one_an_operation,
)
from test_sharding import GATHERED, SMALL, exchanged, is_in

import pallas_bridge

pytestmark = pytest.mark.devices(4)

EXTENTS = {"B": 4, "S": 24, "V": 64, "D": 32, "F": 64, "2F": 128, "H": 8, "K": 4, "E": 32, "R": 16}
# XLA shards their products as it likes, and gathers tokens where these are as small as here.
PRODUCTS = {"gated_mlp", "gated_mlp after a norm", "rms_norm_linear"}
TOKENS = {"B", "S"}
CELLS = [pytest.param(case, id=case.name) for case in CASES]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def shared(case: Case) -> list[int]:
    """The arguments that all tokens share: weights and biases."""
    return [index for index, one in enumerate(case.arguments) if not TOKENS & {*one.dims}]


def check_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        right = np.asarray(other, np.float64)
        scale = max(np.abs(right).max(initial=0), 1)
        np.testing.assert_allclose(np.asarray(one, np.float64), right, atol=1e-4 * scale)


def is_of_xla(case: Case) -> bool:
    """Whether XLA's own program runs where XLA shards arrays, and places what it gives."""
    return bool(case.gathered)


@cache
def on_one_device(case: Case, seed: int) -> tuple[Any, Any]:
    """Random arrays, and their gradients by one device, or results where there are none."""
    arrays = case.arrays(np.random.default_rng(seed), **EXTENTS)
    return arrays, jax.jit(case.gradients if case.has_gradient else case.outputs)(*arrays)


@pytest.fixture(scope="module")
def seed() -> int:
    """Returns the seed of the arrays, which several tests take."""
    seed = int(os.environ.get("XENTILE_SEED", np.random.SeedSequence().entropy))
    print(f"seed: set XENTILE_SEED={seed} to repeat")
    return seed


def with_sharded_weights(case: Case, arrays: Any, mesh: Any, axes: Any) -> list[jax.Array]:
    """Arrays with tokens over "data", and what tokens share over `axes`, as under FSDP."""
    found = []
    for index, (one, array) in enumerate(zip(case.arguments, arrays, strict=True)):
        spec = PartitionSpec(axes)
        if index not in shared(case):
            dim = "B" if "B" in case.arguments[0].dims else "S"
            spec = PartitionSpec(*("data" if name == dim else None for name in one.dims))
        found.append(jax.device_put(array, NamedSharding(mesh, spec)))
    return found


@pytest.mark.fixed
@pytest.mark.parametrize("axes", ["data", ("data", "model")], ids=str)
@pytest.mark.parametrize(
    "case",
    one_an_operation(
        pytest.param(one, id=one.name) for one in CASES if one.has_gradient and shared(one)
    ),
)
def test_sharded_weights_are_gathered_and_tokens_are_not(seed: int, case: Case, axes: Any) -> None:
    arrays, expected = on_one_device(case, seed)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        placed = with_sharded_weights(case, arrays, mesh, axes)
        program = jax.jit(case.gradients).lower(*placed).compile()
        check_close(program(*placed), expected)
    if case.name in PRODUCTS:
        return
    limit = max(arrays[index].nbytes for index in shared(case))
    gathered = [size for kind, size in exchanged(program.as_text()) if kind == "all-gather"]
    assert gathered or is_of_xla(case)
    assert max(gathered, default=0) <= limit < arrays[0].nbytes, (gathered, limit)


# Mesh axes over which dims are sharded; of heads, those of keys too.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"B": ("data", "model")},
    {"B": "data", "S": "model"},
    {"S": ("data", "model")},
    {"B": "data", "H": "model", "K": "model"},
)


def layouts() -> Iterator[Any]:
    """Every case with the layouts that need no gather, and the partitioner.

    GSPMD is nightly, and lengths over both axes where batches are; and all but the last layout of
    operations that share an implementation.
    """
    for case in CASES:
        dims = {dim for one in case.arguments for dim in one.dims}
        taken = [
            layout
            for layout in LAYOUTS
            if {*layout} <= dims - {*case.whole}
            and not any(is_in(GATHERED, case, dim) for dim in layout)
        ]
        few = [one for one in taken if one != {"S": ("data", "model")} or "B" not in dims]
        few = few[-1:] if case.name.split(" ")[0] in SHARED else few
        for layout in taken:
            marks = () if layout in few else (pytest.mark.nightly,)
            yield pytest.param(case, layout, True, id=f"{case.name}-{layout}-shardy", marks=marks)
            # GSPMD gathers tokens for the products of a linear loss.
            if "linear" not in case.name or "S" not in layout:
                name = f"{case.name}-{layout}-gspmd"
                yield pytest.param(case, layout, False, id=name, marks=pytest.mark.nightly)


@pytest.mark.fixed
@pytest.mark.parametrize(("case", "layout", "is_shardy"), one_a_further_way(layouts()))
def test_tokens_and_heads_over_two_axes(
    seed: int, case: Case, layout: dict[str, Any], is_shardy: bool
) -> None:
    """No device gathers tokens or heads, and the gradient is sharded as its array is."""
    arrays, expected = on_one_device(case, seed)
    function = case.gradients if case.has_gradient else case.outputs
    mesh = mesh_of(AxisType.Auto)
    placed = []
    for one, array in zip(case.arguments, arrays, strict=True):
        spec = PartitionSpec(*(layout.get(dim) for dim in one.dims))
        placed.append(jax.device_put(array, NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh), by_shardy(is_shardy):
        program = jax.jit(function).lower(*placed).compile()
        found = program(*placed)
    check_close(found, expected)
    moved = sum(size for kind, size in exchanged(program.as_text()) if kind != "all-reduce")
    # Positions and tables are small beside what they rotate.
    is_small = any(is_in(SMALL, case, dim) for dim in layout)
    limit = arrays[0].nbytes // 8 if is_small else 0
    if is_of_xla(case) and "S" in layout:
        # Rows at the edges of shards, of x, dy and segments: half of the rows here.
        limit = 2 * arrays[0].nbytes
    assert moved <= limit
    # The gradient of a rotation does not depend on what is rotated.
    if case.has_gradient and not case.name.startswith("rope") and not is_of_xla(case):
        assert found[0].sharding.is_equivalent_to(placed[0].sharding, arrays[0].ndim)


BATCHED = [one for one in CELLS if "B" in one.values[0].arguments[0].dims]
ONE_EACH = one_an_implementation(one for one in BATCHED if one.values[0].has_gradient)


@pytest.mark.parametrize("case", ONE_EACH)
def test_tokens_that_do_not_divide_evenly(rng: np.random.Generator, case: Case) -> None:
    arrays = case.arrays(rng, **{**EXTENTS, "B": 8})
    mesh = mesh_of(AxisType.Auto)

    def compute_gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Gradients of five of eight sequences: the padding of a device is not summed."""
        pairs = zip(case.arguments, arrays, strict=True)
        return case.gradients(*(x[:5] if one.dims[0] == "B" else x for one, x in pairs))

    with jax.set_mesh(mesh):
        placed = with_sharded_weights(case, arrays, mesh, None)
        check_close(jax.jit(compute_gradients)(*placed), jax.jit(compute_gradients)(*arrays))


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}], ids=str)
@pytest.mark.parametrize("case", ONE_EACH)
def test_manual_axes_beside_those_of_xla(
    rng: np.random.Generator, case: Case, manual: set[str]
) -> None:
    arrays = case.arrays(rng, **EXTENTS)
    mesh = mesh_of(AxisType.Auto)
    specs = tuple(
        PartitionSpec("data") if one.dims[0] == "B" else PartitionSpec() for one in case.arguments
    )

    def value(*arrays: jax.Array) -> jax.Array:
        return jax.lax.psum(case.value(*arrays), "data")

    mapped = jax.shard_map(
        value, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), axis_names=manual
    )
    is_batched = [one.dims[0] == "B" for one in case.arguments]
    halves = [
        np.split(np.asarray(x), 2) if is_split else [x, x]
        for is_split, x in zip(is_batched, arrays, strict=True)
    ]
    of_half = jax.jit(jax.grad(case.value, case.differentiable))
    parts = zip(*(of_half(*own) for own in zip(*halves, strict=True)), strict=True)
    expected = [
        np.concatenate(ones) if is_batched[index] else np.sum(ones, 0)
        for index, ones in zip(case.differentiable, parts, strict=True)
    ]
    check_close(jax.jit(jax.grad(mapped, case.differentiable))(*arrays), expected)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_weight_is_refused_and_not_the_tokens(rng: np.random.Generator, name: str) -> None:
    (case,) = (one for one in CASES if one.name == name)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = with_sharded_weights(case, case.arrays(rng, **EXTENTS), mesh, "data")
        with pytest.raises(ValueError, match=r"operand 1 .* it must be sharded as P.*\(None,\)"):
            jax.jit(case.outputs)(*placed)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "rms_norm", "cross_entropy"])
def test_columns_over_two_axes_in_any_order(
    rng: np.random.Generator, name: str, axes: tuple[str, str], kind: AxisType
) -> None:
    (case,) = (one for one in CASES if one.name == name)
    arrays = case.arrays(rng, **EXTENTS)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = []
        for one, array in zip(case.arguments, arrays, strict=True):
            spec = [axes if dim in ("V", "D", "2F") else None for dim in one.dims]
            placed.append(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))))
        for function in (case.outputs, case.gradients):
            check_close(jax.jit(function)(*placed), jax.jit(function)(*arrays))


@pytest.mark.devices(8)
@pytest.mark.filterwarnings("ignore:.*XLA gathers it:UserWarning")
@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Auto,) * 2])
def test_warnings_never_stop_a_program(
    rng: np.random.Generator, kinds: tuple[AxisType, AxisType]
) -> None:
    # XLA shards the activation over both axes, in an order that JAX has no name for.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:8])
    x = jnp.asarray(rng.normal(size=(8, 3, 16)), jnp.float32)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (pallas_bridge.swiglu(x) ** 3).sum())(x)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("model", None, "data")))
        check_close([jax.jit(gradient)(placed)], [jax.jit(gradient)(x)])


@pytest.mark.parametrize("case", one_an_operation(CELLS))
def test_no_tokens_on_a_mesh(rng: np.random.Generator, case: Case) -> None:
    dim = next(name for name in ("B", "S", "M") if name in case.arguments[0].dims)
    arrays = case.arrays(rng, **{**EXTENTS, dim: 0})
    mesh = mesh_of(AxisType.Auto)

    def both(*arrays: jax.Array) -> Any:
        return case.outputs(*arrays), case.gradients(*arrays) if case.has_gradient else ()

    expected = jax.jit(both)(*arrays)
    with jax.set_mesh(mesh):
        everywhere = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
        jax.tree.map(np.testing.assert_array_equal, jax.jit(both)(*everywhere), expected)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize(
    "case", one_an_implementation(one for one in CELLS if one.values[0].has_gradient)
)
def test_gradients_without_jit_under_a_mesh(seed: int, case: Case, is_mapped: bool) -> None:
    arrays, expected = on_one_device(case, seed)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        if is_mapped:
            rows = [np.stack([one] * 2) for one in arrays]
            found = [one[1] for one in jax.vmap(case.gradients)(*rows)]
        else:
            found = case.gradients(*arrays)
        check_close(found, expected)


@pytest.mark.only("cpu", "it reads a CPU's programs")
def test_precision_is_that_where_a_program_was_made(rng: np.random.Generator) -> None:
    mesh = mesh_of(AxisType.Auto)

    def lowered(precision: str) -> Any:
        with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
            hidden = jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, PartitionSpec("data")))
            weight = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, PartitionSpec("model")))
            labels = jnp.zeros(8, int)
            return jax.jit(pallas_bridge.linear_cross_entropy).lower(hidden, weight, labels)

    def names(program: Any) -> list[str]:
        return re.findall(r'"(xentile [0-9a-f]{64})"', program.as_text())

    plain, again, highest = lowered("default"), lowered("default"), lowered("highest")
    assert "operand_precision={highest,highest}" in highest.compile().as_text()
    assert "operand_precision={highest" not in plain.compile().as_text()
    # JAX's cache on disk finds programs by these.
    assert names(plain) == names(again)
    assert not {*names(plain)} & {*names(highest)}
