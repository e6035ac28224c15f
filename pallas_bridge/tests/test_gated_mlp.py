"""`gated_mlp` and `rms_norm_linear`: values, what their derivatives keep, and what they refuse."""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import exchanged

import pallas_bridge as pb
from pallas_bridge import checkpoint_policies


def _mlp(x: Any, w_gate: Any, w_up: Any, w_down: Any, **options: Any) -> Any:
    return pb.gated_mlp(x, w_gate, w_up, w_down, **options)


def _after_norm(x: Any, residual: Any, weight: Any, matrix: Any, down: Any, **options: Any) -> Any:
    return pb.gated_mlp(
        x,
        matrix,
        None,
        down,
        interleaved=True,
        norm_weight=weight,
        residual=residual,
        **options,
    )


def _norm(x: Any, residual: Any, weight: Any, a: Any, b: Any, **options: Any) -> Any:
    return pb.rms_norm_linear(x, weight, a, b, residual=residual, **options)


ROWS = ("x: B S D", "residual: B S D, optional")
CASES = (
    case(
        "gated_mlp",
        _mlp,
        "x: B S D",
        "w_gate: D F",
        "w_up: D F, optional",
        "w_down: F D",
        variants=({}, {"activation": "gelu_tanh"}, {"limit": 0.5}, {"up_offset": 1.0}),
    ),
    case(
        "gated_mlp after a norm",
        _after_norm,
        *ROWS,
        "norm_weight: D, optional",
        "w_gate: D 2F",
        "w_down: F D",
        variants=({}, {"eps": 0.1}, {"alpha": 1.5}),
        whole="2F",
    ),
    case(
        "rms_norm_linear",
        _norm,
        *ROWS,
        "weight: D, optional",
        "matrices[0]: D F",
        "matrices[1]: D F",
        variants=({}, {"eps": 0.1}, {"zero_centred": True}),
    ),
)

T, D, F = 24, 16, 40
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, jax.Array]:
    shapes = {"x": (2, T, D), "residual": (2, T, D), "norm": (D,)}
    shapes |= {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return {
        name: jnp.asarray(rng.normal(size=shape) / shape[-2:][0] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def plain(kind: str, of: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    total = of["x"] + of["residual"]
    rows = total * jax.lax.rsqrt((total**2).mean(-1, keepdims=True) + 1e-6) * of["norm"]
    inner = FUNCTIONS[kind](rows @ of["gate"]) * (rows @ of["up"])
    return inner @ of["down"], total


def mlp(of: dict[str, jax.Array], packing: str = "two", **options: Any) -> Any:
    gate, up = of["gate"], of["up"]
    matrices: tuple[Any, ...] = (gate, up)
    if packing == "halves":
        matrices = (jnp.concatenate([gate, up], 1), None)
    if packing == "interleaved":
        matrices = (jnp.stack([gate, up], -1).reshape(D, 2 * F), None)
        options["interleaved"] = True
    return pb.gated_mlp(
        of["x"], *matrices, of["down"], norm_weight=of["norm"], residual=of["residual"], **options
    )


def scalar(function: Any) -> Any:
    return lambda *given: sum(jnp.sin(one).sum() for one in jax.tree.leaves(function(*given)))


def check_alike(found: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("keep", ["inner", "packed", "input"])
@pytest.mark.parametrize("packing", ["two", "halves"])
def test_values_and_gradients(arrays: Any, keep: str, packing: str) -> None:
    run = scalar(lambda of: mlp(of, packing, keep=keep))
    right = jax.jit(jax.value_and_grad(scalar(lambda of: plain("silu", of))))(arrays)
    check_alike(jax.jit(jax.value_and_grad(run))(arrays), right)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions(arrays: Any, kind: str) -> None:
    right = jax.jit(jax.value_and_grad(scalar(lambda of: plain(kind, of))))(arrays)
    for implementation in (None, "reference"):
        options = {"activation": kind, "implementation": implementation}
        run = scalar(lambda of, options=options: mlp(of, "interleaved", **options))
        check_alike(jax.jit(jax.value_and_grad(run))(arrays), right)


def test_forward_mode(arrays: Any, rng: np.random.Generator) -> None:
    tangents = jax.tree.map(lambda one: jnp.asarray(rng.normal(size=one.shape), one.dtype), arrays)
    right = jax.jvp(lambda of: plain("silu", of), (arrays,), (tangents,))
    for keep in ("inner", "packed", "input"):
        check_alike(
            jax.jvp(lambda of, keep=keep: mlp(of, keep=keep), (arrays,), (tangents,)), right
        )


def kept(function: Any, of: Any) -> int:
    """Bytes that the backward pass is given, without those of arguments."""
    pointers = {one.unsafe_buffer_pointer() for one in jax.tree.leaves(of)}
    residuals = jax.tree.leaves(jax.vjp(function, of)[1])
    found = {one.unsafe_buffer_pointer(): one.nbytes for one in residuals}
    return sum(size for pointer, size in found.items() if pointer not in pointers)


def test_what_is_kept(arrays: Any) -> None:
    rows, packed = 4 * 2 * T, 2 * F
    sums = rows * (D + 1)
    for keep, columns in (("inner", packed + F), ("packed", packed), ("input", 0)):
        found = kept(lambda of, keep=keep: mlp(of, "halves", keep=keep), arrays)
        # Halves are packed once more, for the matrices of the test.
        assert found - 8 * D * F <= sums + rows * columns, keep
        assert found >= rows * columns

    def norm(of: Any) -> Any:
        return pb.rms_norm_linear(of["x"], of["norm"], of["gate"], of["up"])

    # rstd alone.
    assert kept(norm, arrays) == rows
    separate = kept(lambda of: pb.rms_norm(of["x"], of["norm"]) @ of["gate"], arrays)
    assert separate >= rows * D


def counted(function: Any, of: Any) -> Counter[str]:
    text = jax.jit(jax.grad(scalar(function))).lower(of).as_text()
    return Counter(re.findall(r"(?<=@)xentile_\w+|stablehlo\.dot_general", text))


def test_what_runs(arrays: Any) -> None:
    """Products, and one pass for gradients of gate and up and the inner array."""
    dot, with_y = "stablehlo.dot_general", "xentile_activation_backward_with_y"
    for keep, products, passes in (("inner", 6, 0), ("packed", 6, 1), ("input", 7, 1)):
        found = counted(lambda of, keep=keep: mlp(of, "halves", keep=keep), arrays)
        assert found[dot] == products and found[with_y] == passes, (keep, found)
        assert found["xentile_activation_forward"] == 1


@pytest.mark.parametrize(
    ("policy", "products", "activation", "norm"),
    [
        # Forward 3 products, one of them with a constant, and 2 gradients of each other.
        ("save_products_and_sums", 8, 1, 2),
        ("save_sums", 10, 1, 4),
        ("save_products", 8, 1, 4),
    ],
)
def test_policies(arrays: Any, policy: str, products: int, activation: int, norm: int) -> None:
    """A block of both functions: a norm runs again only where the product after it does.

    Without its sums all norms do.
    """

    def block(of: Any) -> Any:
        y, total = pb.rms_norm_linear(
            of["x"], of["norm"], jnp.ones((D, D)), residual=of["residual"]
        )
        return mlp({**of, "x": jnp.tanh(y), "residual": total}, "halves")

    run = jax.checkpoint(block, policy=getattr(checkpoint_policies, policy))
    found = counted(run, arrays)
    assert found["stablehlo.dot_general"] == products, found
    assert found["xentile_rms_norm_forward"] == norm, found
    assert found["xentile_activation_forward"] == activation, found
    check_alike(jax.grad(scalar(run))(arrays), jax.grad(scalar(block))(arrays))


def test_bfloat16_is_as_near_as_the_separate_functions(rng: np.random.Generator) -> None:
    shapes = {"x": (256, 64), "gate": (64, 2 * 96), "down": (96, 64), "norm": (64,)}
    exact = {name: rng.normal(size=shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    given = {name: jnp.asarray(one, jnp.bfloat16) for name, one in exact.items()}
    cotangent = jnp.asarray(rng.normal(size=(256, 64)), jnp.bfloat16)

    def together(of: Any) -> Any:
        return pb.gated_mlp(of["x"], of["gate"], None, of["down"], norm_weight=of["norm"])

    def separate(of: Any) -> Any:
        return pb.swiglu(pb.rms_norm(of["x"], of["norm"]) @ of["gate"]) @ of["down"]

    def pulled(function: Any) -> Any:
        y, vjp = jax.vjp(function, given)
        return y, vjp(cotangent)

    for one, other in zip(
        jax.tree.leaves(pulled(together)), jax.tree.leaves(pulled(separate)), strict=True
    ):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.02 * scale
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'; it must be one of 'silu', 'gelu_tanh'"),
        ({"keep": "all"}, "keep is 'all'; it must be one of 'inner', 'packed', 'input'"),
        ({"interleaved": True}, "interleaved is True and w_up is given; of two matrices nothing"),
        ({"activation": "relu", "alpha": 2.0}, "alpha is 2.0; it must be 1 where activation is"),
        ({"residual": jnp.ones((3, 4))}, "residual is given and norm_weight is None"),
        ({"w_gate": jnp.ones((5, 6))}, r"w_gate has shape \(5, 6\) and x \(3, 4\); w_gate must"),
        ({"w_up": jnp.ones((4, 5))}, r"w_up has shape \(4, 5\); it must be that of w_gate, \(4, 6"),
        ({"w_up": None}, r"w_down has shape \(6, 4\); it must have a row for each of the 3"),
        ({"w_up": None, "w_gate": jnp.ones((4, 7))}, "its columns must be even and are 7"),
        ({"w_down": jnp.ones(6)}, r"w_down has shape \(6,\); it must have two axes"),
    ],
)
def test_wrong_arguments_of_an_mlp(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": jnp.ones((3, 4)), "w_gate": jnp.ones((4, 6))}
    given |= {"w_up": jnp.ones((4, 6)), "w_down": jnp.ones((6, 4)), **change}
    with pytest.raises(ValueError, match=message):
        pb.gated_mlp(**given)


def test_wrong_arguments_of_products() -> None:
    x, weight = jnp.ones((3, 4)), jnp.ones(4)
    with pytest.raises(ValueError, match="no matrix is given; rms_norm_linear takes at least one"):
        pb.rms_norm_linear(x, weight)
    with pytest.raises(ValueError, match=r"matrices\[1\] has shape \(3, 4\); it must be \[4, N\]"):
        pb.rms_norm_linear(x, weight, jnp.ones((4, 2)), jnp.ones((3, 4)))
    with pytest.raises(TypeError, match=r"matrices\[0\] has dtype int32; it must be bfloat16"):
        pb.rms_norm_linear(x, weight, jnp.ones((4, 2), jnp.int32))


@pytest.mark.devices(2)
@pytest.mark.parametrize("is_checked", [True, False])
def test_one_axis_shards_rows_and_columns(arrays: dict[str, jax.Array], is_checked: bool) -> None:
    """A block on several devices: rows alone are gathered, and no weight is."""
    count = 4 if len(jax.devices()) >= 4 else 2
    names = sorted(arrays)

    def block(axis: str | None, *given: jax.Array) -> Any:
        of = dict(zip(names, given, strict=True))
        product, total = pb.rms_norm_linear(
            of["x"], of["norm"], of["gate"], residual=of["residual"], axis_name=axis
        )
        branch = product @ of["down"]
        if axis is not None:
            branch = jax.lax.psum_scatter(branch, axis, scatter_dimension=1, tiled=True)
        weights = of["gate"], of["up"], of["down"]
        more: Any = {"norm_weight": of["norm"], "residual": total, "axis_name": axis}
        y, total = pb.gated_mlp(branch, *weights, **more)
        return y, total, pb.gated_mlp(total, *weights, axis_name=axis)

    mesh = jax.make_mesh((count,), ("model",), devices=jax.devices()[:count])
    rows, columns = P(None, "model"), P(None, "model")
    specs = {"x": rows, "residual": rows, "norm": P(), "gate": columns, "up": columns}
    specs["down"] = P("model")
    sharded = jax.shard_map(
        partial(block, "model"),
        mesh=mesh,
        in_specs=tuple(specs[name] for name in names),
        out_specs=rows,
        check_vma=is_checked,
    )

    def gradients(function: Any, *given: jax.Array) -> Any:
        def loss(*given: jax.Array) -> Any:
            results = function(*given)
            return sum(jnp.sin(one + index).sum() for index, one in enumerate(results)), results

        return jax.grad(loss, range(len(given)), has_aux=True)(*given)

    given = [arrays[name] for name in names]
    expected = jax.jit(partial(gradients, partial(block, None)))(*given)
    placed = [jax.device_put(arrays[name], NamedSharding(mesh, specs[name])) for name in names]
    with jax.set_mesh(mesh):
        program = jax.jit(partial(gradients, sharded)).lower(*placed).compile()
    for one, other in zip(*map(jax.tree.leaves, (program(*placed), expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * jnp.abs(other).max())
    text = program.as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    # Of three functions: rows, again for two norms' backward passes, and cotangents of y.
    gathered = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert gathered == [2 * T * D] * (3 + 2 + 3)
    assert text.count(" reduce-scatter(") == 6
    # Of the norm's weight.
    assert exchanged(text)["all-reduce"] <= D


def test_axis_name_is_of_devices(arrays: dict[str, jax.Array]) -> None:
    with pytest.raises(ValueError, match="axis_name is 'model'; it must be of a mesh: call within"):
        pb.rms_norm_linear(arrays["x"], arrays["norm"], arrays["gate"], axis_name="model")
