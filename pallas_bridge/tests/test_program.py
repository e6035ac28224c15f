"""What XLA makes of our calls: no copy of the logits, no gathering, no hidden memory."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placement import PLATFORM

from pallas_bridge import cross_entropy, cross_entropy_per_token

T, V = 48, 1001
LOGITS = jax.ShapeDtypeStruct((T, V), jnp.bfloat16)
LABELS = jax.ShapeDtypeStruct((T,), jnp.int32)
TOKEN_BYTES = T * 4


def mean(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    return cross_entropy(x, y, **options)


def per_token(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    loss, logps = cross_entropy_per_token(x, y, **options)
    return (loss * 2 - logps**2).sum()


def operations_on(program: str, elements: int) -> set[str]:
    """The operations of an optimised program that take or give an array of so many elements."""
    found = set()
    for line in program.splitlines():
        if match := re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([\w-]+)\((.*)", line):
            shapes = re.findall(r"\[([\d,]+)\]", match[1] + match[3].split(", metadata")[0])
            if any(np.prod([int(n) for n in shape.split(",")]) == elements for shape in shapes):
                found.add(match[2])
    return found - {"parameter", "get-tuple-element", "tuple", "call"}


def compiled(f: Callable[..., Any], *arguments: Any, **jit: Any) -> Any:
    return jax.jit(f, **jit).lower(*arguments).compile()


def calls_of(program: Any) -> list[str]:
    """The library's calls in a compiled program, sorted."""
    found = re.findall(r'custom_call_target="xentile_(\w+)"', program.as_text())
    return sorted(name.removeprefix("cross_entropy_") for name in found)


def test_the_reader_of_programs_sees_copies() -> None:
    program = compiled(lambda x: (x.T + 1, jnp.copy(x)), LOGITS).as_text()
    assert operations_on(program, T * V) - {"custom-call"}


@pytest.mark.parametrize("f", [mean, per_token])
@pytest.mark.parametrize("shape", [(T, V), (4, 12, V), (2, 3, 8, V)], ids=str)
def test_nothing_but_custom_calls_touches_the_logits(f: Any, shape: tuple[int, ...]) -> None:
    logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    labels = jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
    for function in (f, jax.value_and_grad(f)):
        program = compiled(function, logits, labels)
        assert operations_on(program.as_text(), T * V) == {"custom-call"}
        assert program.memory_analysis().temp_size_in_bytes <= 16 * TOKEN_BYTES + 4096


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_adds_no_loop_and_no_transpose(axis: int) -> None:
    shape = (4, 12, V)
    logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    labels = jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
    for f in (mean, per_token):
        mapped = jax.vmap(jax.value_and_grad(f), in_axes=axis, out_axes=(0, axis))
        program = compiled(mapped, logits, labels).as_text()
        assert operations_on(program, T * V) == {"custom-call"}
        assert " while(" not in program


def test_logits_of_a_product_stay_where_they_are() -> None:
    def f(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy((h @ w).astype(jnp.float32), y)

    w, h = jax.ShapeDtypeStruct((64, V), jnp.float32), jax.ShapeDtypeStruct((T, 64), jnp.float32)
    program = compiled(jax.grad(f), w, h, LABELS).as_text()
    touching = operations_on(program, T * V)
    assert "custom-call" in touching
    assert not touching & {"copy", "transpose", "all-gather", "gather"}


@pytest.mark.parametrize("f", [mean, per_token])
def test_donated_logits_make_room_for_their_gradient(f: Any) -> None:
    donating = jax.value_and_grad(partial(f, donate_logits=True))
    program = compiled(donating, LOGITS, LABELS, donate_argnums=0)
    assert operations_on(program.as_text(), T * V) == {"custom-call"}
    assert program.memory_analysis().alias_size_in_bytes >= T * V * 2
    assert program.memory_analysis().temp_size_in_bytes <= 16 * TOKEN_BYTES + 4096

    def make_product(donate: bool) -> Any:
        def g(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
            return f(h @ w, y, donate_logits=donate)

        # So few features that the results have no room for logits.
        w, h = jax.ShapeDtypeStruct((4, V), jnp.float32), jax.ShapeDtypeStruct((T, 4), jnp.float32)
        return compiled(jax.grad(g), w, h, LABELS)

    kept, donated = make_product(False), make_product(True)
    assert "copy" not in operations_on(donated.as_text(), T * V)
    saved = kept.memory_analysis().temp_size_in_bytes - donated.memory_analysis().temp_size_in_bytes
    assert saved >= T * V * 4 * 0.9


def test_donated_logits_that_are_read_later_are_copied(rng: np.random.Generator) -> None:
    logits, labels = arrays(rng, T, V)

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = 2 * x
        return cross_entropy(z, labels, donate_logits=True), z

    (_, z), gradient = jax.jit(jax.value_and_grad(f, has_aux=True))(logits)
    np.testing.assert_array_equal(z, 2 * logits)
    expected = jax.grad(lambda x: cross_entropy(2 * x, labels))(logits)
    np.testing.assert_array_equal(gradient, expected)


def test_unused_gradients_and_outputs_cost_nothing() -> None:
    program = compiled(mean, LOGITS, LABELS).as_text()
    assert "cross_entropy_forward" in program and "cross_entropy_fused" not in program


def test_checkpoint_computes_no_gradient_in_its_first_pass() -> None:
    again = jax.checkpoint(mean)
    f = jax.value_and_grad(lambda x, y: jnp.sin(again(x, y)))
    assert calls_of(compiled(f, LOGITS, LABELS)) == ["forward", "fused"]
    # The second pass's own loss makes the factor.
    f = jax.value_and_grad(jax.checkpoint(lambda x, y: jnp.sin(mean(x, y))))
    assert {*calls_of(compiled(f, LOGITS, LABELS))} == {"backward", "forward"}


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    devices = jax.devices()[:2]
    return jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Auto,), devices=devices)


def arrays(rng: np.random.Generator, *shape: int) -> tuple[jax.Array, jax.Array]:
    logits = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    return logits, jnp.asarray(rng.integers(0, shape[-1], shape[:-1]), jnp.int32)


@pytest.mark.devices(2)
@pytest.mark.parametrize("f", [mean, per_token])
@pytest.mark.parametrize("spec", [P("tokens"), P(None, "tokens")], ids=str)
def test_a_mesh_cuts_tokens_and_gathers_no_logits(
    rng: np.random.Generator, mesh: jax.sharding.Mesh, f: Any, spec: P
) -> None:
    logits, labels = arrays(rng, 4, 6, 999)
    expected = jax.value_and_grad(f)(logits, labels)
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (logits, labels)]
    function = jax.jit(jax.value_and_grad(f))
    program = function.lower(*sharded).compile().as_text()
    assert "all-gather" not in program and "all-to-all" not in program
    # The calls work on half of the tokens.
    assert operations_on(program, 4 * 6 * 999 // 2) == {"custom-call"}
    assert not operations_on(program, 4 * 6 * 999)
    value, gradient = function(*sharded)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    assert gradient.sharding.is_equivalent_to(sharded[0].sharding, 3)
    if PLATFORM == "cpu":
        assert np.asarray(gradient).tobytes() == np.asarray(expected[1]).tobytes()
    else:
        # Where a row begins within a line of memory decides which lane adds what; a shard moves it.
        wide = (np.asarray(g, np.float64) for g in (gradient, expected[1]))
        np.testing.assert_allclose(*wide, rtol=2**-7, atol=2**-23)


@pytest.mark.devices(2)
def test_a_mesh_cuts_what_a_product_gives(
    rng: np.random.Generator, mesh: jax.sharding.Mesh
) -> None:
    hidden = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(16, 999)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 999, 8))
    f = jax.jit(jax.grad(lambda w, h, y: cross_entropy(h @ w, y)))
    h, y = (jax.device_put(x, NamedSharding(mesh, P("tokens"))) for x in (hidden, labels))
    w = jax.device_put(weight, NamedSharding(mesh, P()))
    program = f.lower(w, h, y).compile().as_text()
    assert "all-gather" not in program
    np.testing.assert_allclose(f(w, h, y), f(weight, hidden, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.devices(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(rng: np.random.Generator, mesh: jax.sharding.Mesh, check_vma: bool) -> None:
    logits, labels = arrays(rng, 8, 101)

    def local(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.psum(cross_entropy(x, y, reduction="sum"), "tokens")

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("tokens"), P("tokens")),
        out_specs=P(),
        check_vma=check_vma,
    )
    value, gradient = jax.jit(jax.value_and_grad(f))(logits, labels)
    expected = jax.value_and_grad(lambda x: cross_entropy(x, labels, reduction="sum"))(logits)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1])


@pytest.mark.devices(2)
def test_shard_map_with_labels_that_every_device_has(
    rng: np.random.Generator, mesh: jax.sharding.Mesh
) -> None:
    logits, labels = arrays(rng, 8, 101)

    def local(x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(x, y, reduction="none")

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("tokens"), P()), out_specs=P("tokens"))
    losses = jax.jit(f)(logits, labels[:4])
    expected = cross_entropy(logits, jnp.tile(labels[:4], 2), reduction="none")
    # On GPUs a row's order depends on where it begins in a vector, which differs from part to part.
    rtol = 0 if PLATFORM == "cpu" else 1e-6
    np.testing.assert_allclose(losses, expected, rtol=rtol)


@pytest.mark.devices(2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_explicit_axes(rng: np.random.Generator, reduction: Any) -> None:
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Explicit,), devices=devices)
    logits, labels = arrays(rng, 8, 101)

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(x, y, reduction=reduction).sum()

    expected = jax.value_and_grad(f)(logits, labels)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, P("tokens"))) for x in (logits, labels)]
        value, gradient = jax.jit(jax.value_and_grad(f))(*sharded)
        assert jax.typeof(gradient).sharding.spec[0] == "tokens"
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        assert np.asarray(gradient).tobytes() == np.asarray(expected[1]).tobytes()
        # What lies otherwise than its tokens is not moved in silence.
        sharded = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((logits, labels), (P("tokens"), P()), strict=True)
        ]
        with pytest.raises(ValueError, match=r"cross_entropy: operand 0 .*reshard"):
            jax.jit(f)(*sharded)
