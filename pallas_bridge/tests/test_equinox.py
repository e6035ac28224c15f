"""`pallas_bridge.equinox` against the layers of Equinox, with the same parameters."""

import io
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox", reason="needs equinox, which the library does not")

import equinox as eqx
from layers import check, draw

from pallas_bridge import equinox as ours
from pallas_bridge import nn

# The layer of ours, and of Equinox.
NORMS = [(ours.RMSNorm, eqx.nn.RMSNorm), (ours.LayerNorm, eqx.nn.LayerNorm)]
CAUSAL = np.tril(np.ones((6, 6), bool))
KEYS = jax.random.split(jax.random.key(0), 4)


def filled(layer: Any, rng: np.random.Generator) -> Any:
    """The layer with random parameters."""

    def moved(x: Any) -> Any:
        return x + 0.3 * draw(rng, *x.shape).astype(x.dtype) if eqx.is_inexact_array(x) else x

    return jax.tree.map(moved, layer)


def copied(theirs: Any, layer: Any) -> Any:
    """Our layer with the parameters of Equinox's, from a checkpoint."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, layer)


def both(layer: Any, *arrays: Any, **options: Any) -> Any:
    """The results of a batch, and the gradients of parameters and arrays."""

    @eqx.filter_jit
    @partial(eqx.filter_value_and_grad, has_aux=True)
    def run(moving: Any) -> Any:
        layer, arrays = moving
        y = jax.vmap(partial(layer, **options))(*arrays)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    (_, y), gradients = run((layer, arrays))
    return y, gradients


@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        ({}, 16, "float32"),
        ({}, 16, "bfloat16"),
        ({"dtype": jnp.bfloat16, "eps": 0.1}, 16, "bfloat16"),
        ({"use_weight": False, "use_bias": False}, 16, "float32"),
        ({"use_bias": False}, (4, 8), "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("layer", "of_equinox"), NORMS)
def test_norms(
    layer: Any, of_equinox: Any, options: Any, shape: Any, dtype: str, rng: np.random.Generator
) -> None:
    if layer is ours.RMSNorm:
        options = {**options, "use_bias": False}
    theirs = filled(of_equinox(shape, **options), rng)
    one = copied(theirs, layer(shape, **options))
    assert isinstance(one, of_equinox)
    x = draw(rng, 3, *theirs.shape, dtype=dtype)
    assert "xentile_" in str(jax.make_jaxpr(one)(x[0]))
    check(both(one, x), both(theirs, x), 2e-2 if dtype == "bfloat16" else 2e-5)


@pytest.mark.parametrize(("layer", "of_equinox"), NORMS)
def test_norms_in_the_interface_of_equinox(
    layer: Any, of_equinox: Any, rng: np.random.Generator
) -> None:
    theirs = filled(of_equinox(16), rng)
    one, x = copied(theirs, layer(16)), draw(rng, 16)
    found, state = one(x, None, key=KEYS[0])
    assert state is None
    check(found, theirs(x))
    with pytest.raises(ValueError, match="must satisfy the invariant"):
        one(x[:8])
    chain = eqx.nn.Sequential([one, eqx.nn.Lambda(jnp.sin)])
    check(chain(x), jnp.sin(theirs(x)))


@pytest.mark.parametrize(("layer", "of_equinox"), NORMS)
def test_norms_of_many_shapes(layer: Any, of_equinox: Any, rng: np.random.Generator) -> None:
    """The cases of Equinox's own tests, with the parameters that a new layer has."""
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (128, {}, "float32"),
        ((128, 128), {"use_weight": False, "use_bias": False}, "float32"),
        ((3, 1, 5), {"eps": 1e-3}, "float32"),
        (128, {"dtype": jnp.bfloat16}, "bfloat16"),
        (10, {"dtype": jnp.float16}, "float16"),
    ]
    for shape, options, dtype in cases:
        one, theirs = (module(shape, **options) for module in (layer, of_equinox))
        assert jax.tree.map(jnp.shape, jax.tree.leaves(one)) == jax.tree.map(
            jnp.shape, jax.tree.leaves(theirs)
        )
        check(one, theirs)
        x = draw(rng, *theirs.shape, dtype=dtype)
        check(one(x), theirs(x), 2e-5 if dtype == "float32" else 2e-2)
    # Without deviation there is nothing but the bias.
    same = jnp.full(16, 3.0)
    check(layer(16)(same), of_equinox(16)(same))


def test_layer_norm_is_that_of_shifted_arrays() -> None:
    x = jnp.linspace(0.1, 1, 10)
    layer = ours.LayerNorm(10)
    check(layer(x), (x - x.mean()) / jnp.sqrt(x.var() + 1e-5))
    check(layer(x), layer(x - 0.1))
    with pytest.warns(UserWarning, match="elementwise_affine"):
        plain = ours.LayerNorm(10, elementwise_affine=False)
    assert plain.weight is None and plain.bias is None
    check(plain(x), layer(x))


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, None),
        ({}, CAUSAL),
        ({"use_query_bias": True, "use_output_bias": True}, np.stack([CAUSAL] * 4)),
        ({"qk_size": 16, "vo_size": 16, "output_size": 12}, CAUSAL),
        ({"vo_size": 16}, CAUSAL),
        ({"dropout_p": 0.5, "inference": True}, None),
        ({"dtype": jnp.bfloat16}, CAUSAL),
    ],
    ids=["plain", "causal", "heads", "sizes", "values", "dropout", "bfloat16"],
)
def test_attention(options: Any, mask: Any, rng: np.random.Generator) -> None:
    theirs = filled(eqx.nn.MultiheadAttention(4, 32, **options, key=KEYS[0]), rng)
    one = copied(theirs, ours.MultiheadAttention(4, 32, **options, key=KEYS[1]))
    dtype, off = ("bfloat16", 1e-2) if "dtype" in options else ("float32", 5e-5)
    # Larger logits would leave one probability of each row, of which rounding in 16 bits decides.
    arrays = [draw(rng, 2, 6, 32, dtype=dtype) / 4 for _ in range(3)]
    check(both(one, *arrays, mask=mask), both(theirs, *arrays, mask=mask), off)


def test_attention_masks_dropout_and_positions(rng: np.random.Generator) -> None:
    theirs = filled(eqx.nn.MultiheadAttention(4, 32, dropout_p=0.5, key=KEYS[0]), rng)
    one = copied(theirs, ours.MultiheadAttention(4, 32, dropout_p=0.5, key=KEYS[1]))
    x = draw(rng, 6, 32)
    for mask in (CAUSAL, nn.CausalMask()):
        found = one(x, x, x, mask, inference=True)
        check(found, theirs(x, x, x, CAUSAL, inference=True), 5e-5)
        # The same numbers are dropped.
        found = one(x, x, x, mask, key=KEYS[2])
        check(found, theirs(x, x, x, CAUSAL, key=KEYS[2]), 5e-5)
    run = jax.make_jaxpr(lambda x: one(x, x, x, nn.CausalMask(), inference=True))
    assert "xentile_flash_attention" in str(run(x))

    rotate = eqx.nn.RotaryPositionalEmbedding(8)

    def process(q: Any, k: Any, v: Any) -> Any:
        return *(jax.vmap(rotate, in_axes=1, out_axes=1)(one) for one in (q, k)), v

    options: dict[str, Any] = {"process_heads": process, "inference": True}
    check(one(x, x, x, **options), theirs(x, x, x, **options), 5e-5)
    with pytest.raises(ValueError, match="process_heads must not change the shape"):
        one(x, x, x, inference=True, process_heads=lambda q, k, v: (q[:1], k, v))
    with pytest.raises(ValueError, match="mask must have shape"):
        one(x, x, x, CAUSAL[:2], inference=True)


@pytest.mark.parametrize("vo_size", [13, 17])
def test_attention_of_many_sizes(vo_size: int, rng: np.random.Generator) -> None:
    """Queries, keys and values of other features and lengths, and every bias."""
    options = {
        "num_heads": 2,
        "query_size": 3,
        "key_size": 5,
        "value_size": 7,
        "output_size": 11,
        "qk_size": 13,
        "vo_size": vo_size,
        "use_query_bias": True,
        "use_key_bias": True,
        "use_value_bias": True,
        "use_output_bias": True,
    }
    new = [
        module(**options, key=KEYS[0])
        for module in (ours.MultiheadAttention, eqx.nn.MultiheadAttention)
    ]
    check(*(eqx.filter(layer, eqx.is_array) for layer in new))
    theirs = filled(new[1], rng)
    one = copied(theirs, new[0])
    arrays = draw(rng, 2, 19, 3), draw(rng, 2, 23, 5), draw(rng, 2, 23, 7)
    found = both(one, *arrays)
    assert found[0].shape == (2, 19, 11)
    check(found, both(theirs, *arrays), 5e-5)


def test_attention_of_known_values() -> None:
    weights = ("query_proj", "key_proj", "value_proj", "output_proj")
    layer = eqx.tree_at(
        lambda layer: [getattr(layer, name).weight for name in weights],
        ours.MultiheadAttention(num_heads=2, query_size=4, key=KEYS[0]),
        [jnp.arange(16.0).reshape(4, 4)] * 4,
    )
    x = jnp.arange(1.0, 13).reshape(3, 4)
    wanted = x[0] @ layer.value_proj.weight.T @ layer.output_proj.weight.T
    check(layer(x[:1], x[:1], x[:1]), wanted[None])
    # Queries that see the first key alone.
    for shape in ((3, 3), (2, 3, 3)):
        mask = jnp.broadcast_to(jnp.array([True, False, False]), shape)
        check(layer(x, x, x, mask), jnp.stack([wanted] * 3))


def test_attention_drops_in_training_alone(rng: np.random.Generator) -> None:
    options = {"num_heads": 2, "query_size": 10, "dropout_p": 0.5}
    layer, x = ours.MultiheadAttention(**options, key=KEYS[0]), draw(rng, 3, 10)
    wanted = eqx.nn.MultiheadAttention(**options, key=KEYS[0])(x, x, x, inference=True)
    never = ours.MultiheadAttention(**options, inference=True, key=KEYS[0])
    for one, call in (
        (layer, {"inference": True}),
        (layer, {"inference": True, "key": KEYS[1]}),
        (never, {}),
        (never, {"key": KEYS[1]}),
        (eqx.nn.inference_mode(layer), {}),
    ):
        check(one(x, x, x, **call), wanted, 5e-5)
    with pytest.warns(UserWarning, match="deterministic"):
        check(layer(x, x, x, key=KEYS[1], deterministic=True), wanted, 5e-5)
    first, second = (layer(x, x, x, key=key) for key in KEYS[1:3])
    assert not np.allclose(first, second)
    with pytest.raises(RuntimeError, match="requires a key"):
        layer(x, x, x)


def test_attention_of_float16(rng: np.random.Generator) -> None:
    """Of wide logits, within one program."""
    options = {"dtype": jnp.float16, "key": KEYS[0]}
    layers = [
        module(4, 32, **options) for module in (ours.MultiheadAttention, eqx.nn.MultiheadAttention)
    ]
    x = 8 * draw(rng, 6, 32, dtype="float16")
    found, wanted = (eqx.filter_jit(layer)(x, x, x, CAUSAL) for layer in layers)
    check(found, wanted, 3e-2)


@pytest.mark.parametrize("packed", [True, False])
def test_swiglu(packed: bool, rng: np.random.Generator) -> None:
    layer = ours.SwiGLU(16, 24, 8, packed=packed, use_bias=True, key=KEYS[0])
    x = draw(rng, 3, 16)

    def plain(layer: Any, x: jax.Array) -> jax.Array:
        if packed:
            gate, up = jnp.split(layer.gate_up_proj(x), 2)
        else:
            gate, up = layer.gate_proj(x), layer.up_proj(x)
        return layer.down_proj(jax.nn.silu(gate) * up)

    def total(run: Any) -> Any:
        @eqx.filter_jit
        @eqx.filter_value_and_grad
        def loss(layer: Any) -> jax.Array:
            return jnp.sin(jax.vmap(partial(run, layer))(x)).sum()

        return loss(layer)

    check(total(lambda layer, x: layer(x)), total(plain), 1e-4)
    check(layer(x), jax.vmap(layer)(x))


@pytest.mark.parametrize("use_bias", [True, False])
def test_lm_head(use_bias: bool, rng: np.random.Generator) -> None:
    linear = filled(eqx.nn.Linear(16, 41, use_bias=use_bias, key=KEYS[0]), rng)
    head = copied(linear, ours.LMHeadLoss(16, 41, use_bias=use_bias, key=KEYS[1]))
    hidden, labels = draw(rng, 6, 16), jnp.asarray(rng.integers(0, 41, 6))
    check(head.logits(hidden), jax.vmap(linear)(hidden))

    def plain(layer: Any) -> Any:
        z = jax.vmap(layer)(hidden)
        return (jax.nn.logsumexp(z, -1) - z[jnp.arange(6), labels]).mean()

    found, wanted = (
        eqx.filter_jit(eqx.filter_value_and_grad(loss))(layer)
        for loss, layer in ((lambda layer: layer(hidden, labels), head), (plain, linear))
    )
    check(found, wanted)
