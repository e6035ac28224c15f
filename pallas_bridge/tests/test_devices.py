"""Every operation over two devices, held against one: values, gradients, and what is exchanged."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import exchanged

from pallas_bridge import (
    cross_entropy,
    flash_attention,
    gelu,
    linear_cross_entropy,
    rms_norm,
    rope,
    swiglu,
)

pytestmark = pytest.mark.devices(2)

WAYS = ["auto", "explicit", "mapped"]
TOKENS, WIDTH, VOCAB = 48, 64, 1024
# What 16 bits round, and sums in another order, in shares of the largest entry.
CLOSE = {"float32": 2e-5, "bfloat16": 2e-2}


def mesh_of(axis: str, way: str) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh((2,), (axis,), axis_types=(kind,), devices=jax.devices()[:2])


def held(
    mesh: jax.sharding.Mesh,
    function: Callable[..., Any],
    alone: Callable[..., Any],
    arrays: Any,
    specs: Any,
    dtype: str,
) -> dict[str, int]:
    """Compares results of placed arrays with those of one device; returns what is exchanged."""
    right = jax.jit(alone)(*arrays)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        compiled = jax.jit(function).lower(*placed).compile()
        found = compiled(*placed)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    for index, (one, other) in enumerate(pairs):
        assert one.shape == other.shape and one.dtype == other.dtype
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        error = np.abs(one - other).max() / np.abs(other).max()
        assert error <= CLOSE[dtype], f"result {index} is {error} of its largest entry off"
    return exchanged(compiled.as_text())


def over(mesh: jax.sharding.Mesh, loss: Any, specs: Any, way: str, **options: Any) -> Any:
    """A loss of the whole mesh, summed over tokens; the axis "model" shards the vocabulary."""
    loss = partial(loss, reduction="sum", **options)
    if way in ("explicit", "found"):
        return loss
    shards_tokens = mesh.axis_names == ("data",)
    loss = loss if shards_tokens else partial(loss, axis_name="model")
    if way == "auto":
        return loss

    def run_shard(*arrays: Any) -> Any:
        return jax.lax.psum(loss(*arrays), "data") if shards_tokens else loss(*arrays)

    return jax.shard_map(run_shard, mesh=mesh, in_specs=specs, out_specs=P())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# XLA finds a vocabulary that nothing tells of.
@pytest.mark.parametrize(
    ("way", "axis"), [*itertools.product(WAYS, ["data", "model"]), ("found", "model")]
)
def test_cross_entropy(rng: np.random.Generator, way: str, axis: str, dtype: str) -> None:
    mesh = mesh_of(axis, way)
    logits = jnp.asarray(3 * rng.normal(size=(TOKENS, VOCAB)), dtype)
    labels = jnp.asarray(rng.integers(-1, VOCAB, TOKENS), jnp.int32)
    specs = (P("data"), P("data")) if axis == "data" else (P(None, "model"), P())
    options = {"ignore_index": -1, "z_loss": 1e-3, "label_smoothing": 0.1}
    f = over(mesh, cross_entropy, specs, way, **options)
    alone = partial(cross_entropy, reduction="sum", **options)
    gradient = [jax.value_and_grad(one) for one in (f, alone)]
    found = held(mesh, *gradient, (logits, labels), specs, dtype)
    # Three numbers of a token at most, which XLA may put into one exchange.
    assert {*found} <= {"all-reduce"} and max(found.values()) <= 3 * TOKENS


SHARDED = {
    # Of hidden states and labels, and of the weight.
    "tokens": ("data", P("data"), P()),
    "vocabulary": ("model", P(), P("model")),
    "fsdp": ("data", P("data"), P(None, "data")),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("way", "sharded"), [*itertools.product(WAYS, SHARDED), ("found", "vocabulary")]
)
def test_linear_cross_entropy(rng: np.random.Generator, way: str, sharded: str, dtype: str) -> None:
    axis, tokens, of_weight = SHARDED[sharded]
    mesh = mesh_of(axis, way)
    hidden = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    weight = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)) / 4, dtype)
    labels = jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32)
    # A weight that is sharded over D is gathered before `shard_map` takes it.
    taken = (tokens, P() if sharded == "fsdp" else of_weight, tokens)
    f = over(mesh, linear_cross_entropy, taken, way)
    alone = partial(linear_cross_entropy, reduction="sum")
    gradient = [jax.value_and_grad(one, (0, 1)) for one in (f, alone)]
    specs = tokens, of_weight, tokens
    found = held(mesh, *gradient, (hidden, weight, labels), specs, dtype)
    if sharded == "vocabulary":
        assert {*found} == {"all-reduce"} and max(found.values()) <= TOKENS * WIDTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_norms_positions_and_activations(rng: np.random.Generator, way: str, dtype: str) -> None:
    mesh = mesh_of("data", way)
    x, dy = (jnp.asarray(rng.normal(size=(4, TOKENS, 4, WIDTH)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.normal(size=WIDTH), dtype)

    def step(x: Any, dy: Any, weight: Any) -> Any:
        def block(x: Any, weight: Any) -> Any:
            normed = rope(rms_norm(x, weight), interleaved=True)
            return gelu(normed, approximate=False) + jnp.concatenate([swiglu(normed)] * 2, -1)

        y, vjp = jax.vjp(block, x, weight)
        return y, vjp(dy)

    found = held(mesh, step, step, (x, dy, weight), (P("data"), P("data"), P()), dtype)
    assert {*found} == {"all-reduce"} and max(found.values()) <= WIDTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [("data",), (None, None, "data")], ids=["batch", "heads"])
@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_attention(rng: np.random.Generator, way: str, spec: Any, dtype: str) -> None:
    mesh = mesh_of("data", way)
    q, do = (jnp.asarray(rng.normal(size=(2, 256, 4, 64)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, 256, 2, 64)), dtype) for _ in range(2))

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, causal=True), q, k, v)
        return o, vjp(do)

    assert not held(mesh, step, step, (q, k, v, do), [P(*spec)] * 4, dtype)
