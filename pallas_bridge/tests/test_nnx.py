"""`pallas_bridge.nnx` against the layers of flax.nnx, with the same parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs flax, which the library does not")

import layers
import optax
from flax import nnx
from layers import draw

from pallas_bridge import linear_cross_entropy, nn
from pallas_bridge import nnx as ours
from pallas_bridge import optax as ours_of_optax

# The layer of ours, and of Flax.
NORMS = [(ours.RMSNorm, nnx.RMSNorm), (ours.LayerNorm, nnx.LayerNorm)]
CAUSAL = np.tril(np.ones((6, 6), bool))


def filled(layer: Any, rng: np.random.Generator) -> Any:
    """The layer with random parameters."""
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda x: x + 0.3 * draw(rng, *x.shape).astype(x.dtype), state))
    return layer


def check(found: Any, wanted: Any, off: float = 2e-5) -> None:
    """Compares two trees of arrays of one structure."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    layers.check(found, wanted, off)


def both(layer: Any, *arrays: Any, **options: Any) -> Any:
    """The result, and the gradients of parameters and arrays, in one program."""

    @nnx.jit
    def run(layer: Any, *arrays: Any) -> Any:
        def total(layer: Any, *arrays: Any) -> Any:
            y = layer(*arrays, **options)
            return jnp.sin(y.astype(jnp.float32)).sum(), y

        places = tuple(range(len(arrays) + 1))
        return nnx.value_and_grad(total, argnums=places, has_aux=True)(layer, *arrays)

    ((_, y), (of_layer, *others)) = run(layer, *arrays)
    return y, nnx.to_pure_dict(of_layer), others


def copied(theirs: Any, layer: Any) -> Any:
    """Our layer with the parameters of Flax's, as a checkpoint has them."""
    nnx.update(layer, nnx.state(theirs, nnx.Param))
    return layer


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        ({"dtype": jnp.bfloat16}, "float32"),
        ({"param_dtype": jnp.bfloat16, "epsilon": 0.1}, "bfloat16"),
        ({"use_scale": False}, "float32"),
        ({"reduction_axes": (-1,), "feature_axes": 2}, "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("layer", "of_flax"), NORMS)
def test_norms(
    layer: Any, of_flax: Any, options: Any, dtype: str, rng: np.random.Generator
) -> None:
    theirs = filled(of_flax(16, rngs=nnx.Rngs(0), **options), rng)
    x = draw(rng, 2, 6, 16, dtype=dtype)
    one = copied(theirs, layer(16, rngs=nnx.Rngs(1), **options))
    assert isinstance(one, of_flax)
    assert "xentile_" in str(jax.make_jaxpr(one)(x))
    rounds = theirs(x).dtype == jnp.bfloat16 or dtype == "bfloat16"
    check(both(one, x), both(theirs, x), 2e-2 if rounds else 2e-5)


@pytest.mark.parametrize(("layer", "of_flax"), NORMS)
def test_norms_that_kernels_do_not_take(layer: Any, of_flax: Any, rng: np.random.Generator) -> None:
    x, mask = draw(rng, 2, 6, 16), jnp.asarray(rng.random((2, 6, 16)) < 0.7)
    for options, more in (
        ({"reduction_axes": (-2, -1)}, {}),
        ({}, {"mask": mask}),
    ):
        theirs = filled(of_flax(16, rngs=nnx.Rngs(0), **options), rng)
        one = copied(theirs, layer(16, rngs=nnx.Rngs(1), **options))
        assert "xentile_" not in str(jax.make_jaxpr(lambda x: one(x, **more))(x))  # noqa: B023
        check(both(one, x, **more), both(theirs, x, **more))


# The cases of Flax's own tests: five features, before a linear layer.
FLOATS = ["float32", "float16"]
FEATURES = np.array([True, False, True, False, True])


@pytest.mark.parametrize("mask", [None, FEATURES], ids=["all", "masked"])
@pytest.mark.parametrize("use_fast_variance", [True, False])
@pytest.mark.parametrize("param_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layer", "of_flax"), NORMS)
def test_norms_in_models(
    layer: Any,
    of_flax: Any,
    dtype: str,
    param_dtype: str,
    use_fast_variance: bool,
    mask: Any,
    rng: np.random.Generator,
) -> None:
    dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}

    class Model(nnx.Module):
        def __init__(self, layer: Any) -> None:
            rngs = nnx.Rngs(42)
            self.norm = layer(5, use_fast_variance=use_fast_variance, rngs=rngs, **dtypes)
            self.linear = nnx.Linear(5, 4, rngs=rngs, **dtypes)

        def __call__(self, x: jax.Array, mask: Any = None) -> Any:
            return self.linear(self.norm(x, mask=mask))

    theirs = filled(Model(of_flax), rng)
    one = copied(theirs, Model(layer))
    x = draw(rng, 10, 5)
    check(both(one, x, mask=mask), both(theirs, x, mask=mask), 2e-5 if dtype == "float32" else 2e-2)


def test_parameters_begin_as_those_of_flax() -> None:
    """With the same random keys: names, shapes, dtypes and values, and what is no parameter."""
    init = nnx.initializers.normal(0.1)
    norm = {"num_features": 5, "param_dtype": jnp.bfloat16, "scale_init": init}
    attention = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "in_features": 3,
        "in_kv_features": 5,
        "qkv_features": 8,
        "out_features": 6,
        "kernel_init": init,
        "bias_init": init,
        "out_kernel_init": nnx.initializers.ones_init(),
        "out_bias_init": nnx.initializers.zeros_init(),
        "normalize_qk": True,
        "dropout_rate": 0.5,
        "decode": False,
    }
    for layer, of_flax, options in (
        (ours.RMSNorm, nnx.RMSNorm, norm),
        (ours.RMSNorm, nnx.RMSNorm, {"num_features": 5, "use_scale": False}),
        (ours.LayerNorm, nnx.LayerNorm, {**norm, "bias_init": init}),
        (ours.LayerNorm, nnx.LayerNorm, {"num_features": 5, "use_bias": False}),
        (ours.MultiHeadAttention, nnx.MultiHeadAttention, attention),
        (ours.MultiHeadAttention, nnx.MultiHeadAttention, {**attention, "keep_rngs": False}),
    ):
        states = [nnx.split(one(rngs=nnx.Rngs(7), **options))[1] for one in (layer, of_flax)]
        found, wanted = (nnx.to_flat_state(state) for state in states)
        assert found.paths == wanted.paths
        assert [type(one) for one in found.leaves] == [type(one) for one in wanted.leaves]
        for one, other in zip(*(jax.tree.leaves(state) for state in states), strict=True):
            if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = map(jax.random.key_data, (one, other))
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


ATTENTION = {"num_heads": 4, "in_features": 16, "qkv_features": 32, "rngs": nnx.Rngs(0)}


@pytest.mark.parametrize("use_fn", [True, False], ids=["attention_fn", "layer"])
@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({}, {"mask": CAUSAL[None, None]}),
        ({}, {"mask": nnx.make_causal_mask(jnp.ones((2, 6)))}),
        (
            {"normalize_qk": True},
            {"mask": nnx.make_attention_mask(jnp.ones((2, 6)), np.eye(6)[:2])},
        ),
        ({"dropout_rate": 0.5, "deterministic": True}, {}),
        ({"dtype": jnp.bfloat16}, {"mask": CAUSAL[None, None]}),
        ({"use_bias": False}, {}),
    ],
    ids=["plain", "array", "causal", "normalised", "dropout", "bfloat16", "no bias"],
)
def test_attention(options: Any, call: Any, use_fn: bool, rng: np.random.Generator) -> None:
    options = {"decode": False, **options}
    theirs = filled(nnx.MultiHeadAttention(**ATTENTION, **options), rng)
    if use_fn:
        one = nnx.MultiHeadAttention(**ATTENTION, **options, attention_fn=nn.flax_attention_fn)
    else:
        one = ours.MultiHeadAttention(**ATTENTION, **options)
    copied(theirs, one)
    # Larger logits would leave one probability of each row, of which rounding in 16 bits decides.
    arrays = [draw(rng, 2, 6, 16) / 4 for _ in range(3)]
    off = 1e-2 if "dtype" in options else 5e-5
    check(both(one, *arrays, **call), both(theirs, *arrays, **call), off)


def test_attention_masks_of_objects_keep_the_kernels(rng: np.random.Generator) -> None:
    theirs = filled(nnx.MultiHeadAttention(**ATTENTION, decode=False), rng)
    one = copied(theirs, ours.MultiHeadAttention(**ATTENTION, decode=False))
    x = draw(rng, 2, 6, 16)
    wanted = both(theirs, x, mask=CAUSAL[None, None])
    check(both(one, x, mask=nn.CausalMask()), wanted, 5e-5)
    run = jax.make_jaxpr(lambda x: one(x, mask=nn.CausalMask()))
    assert "xentile_flash_attention" in str(run(x))


def test_attention_dropout_weights_and_decoding(rng: np.random.Generator) -> None:
    """What has no kernel is as Flax has it: the same numbers are dropped, sown and cached."""
    x = draw(rng, 2, 6, 16)
    dropping = {**ATTENTION, "dropout_rate": 0.5, "deterministic": False, "decode": False}
    theirs = filled(nnx.MultiHeadAttention(**dropping), rng)
    one = copied(theirs, ours.MultiHeadAttention(**dropping))
    check(one(x, rngs=nnx.Rngs(dropout=3)), theirs(x, rngs=nnx.Rngs(dropout=3)), 5e-5)

    theirs = filled(nnx.MultiHeadAttention(**ATTENTION, decode=True), rng)
    one = copied(theirs, ours.MultiHeadAttention(**ATTENTION, decode=True))
    for layer in (one, theirs):
        layer.init_cache((2, 6, 16))
    for place in range(3):
        token = x[:, place : place + 1]
        check(one(token), theirs(token), 5e-5)

    found = [
        layer(x, decode=False, sow_weights=True) is not None
        and nnx.pop(layer, nnx.Intermediate)["attention_weights"]
        for layer in (one, theirs)
    ]
    check(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), 5e-5)


@pytest.mark.parametrize("normalize_qk", [True, False])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST])
@pytest.mark.parametrize("param_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_attention_of_one_text(
    use_bias: bool,
    dtype: str,
    param_dtype: str,
    precision: Any,
    decode: bool,
    normalize_qk: bool,
    rng: np.random.Generator,
) -> None:
    """Arrays without a batch, of few features, as in Flax's tests."""
    options = {
        "num_heads": 2,
        "in_features": 3,
        "qkv_features": 6,
        "out_features": 6,
        "use_bias": use_bias,
        "dtype": jnp.dtype(dtype),
        "param_dtype": jnp.dtype(param_dtype),
        "precision": precision,
        "decode": decode,
        "normalize_qk": normalize_qk,
    }
    theirs = filled(nnx.MultiHeadAttention(rngs=nnx.Rngs(42), **options), rng)
    one = copied(theirs, ours.MultiHeadAttention(rngs=nnx.Rngs(42), **options))
    off = 5e-5 if dtype == "float32" else 3e-2
    if decode:
        for layer in (one, theirs):
            layer.init_cache((4, 3), dtype=jnp.dtype(dtype))
        for _ in range(3):
            token = draw(rng, 1, 3)
            check(one(token), theirs(token), off)
        return
    for x in (draw(rng, 1, 3), draw(rng, 7, 3)):
        # Flax's attention in float16 does not compile for CPUs, but op by op.
        with jax.disable_jit(dtype == "float16"):
            wanted = both(theirs, x)
        check(both(one, x), wanted, off)


@pytest.mark.parametrize("mask", [None, "array", "object"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_attention_of_fewer_key_heads(kv_heads: Any, mask: Any, rng: np.random.Generator) -> None:
    """With keys of other features, of another length, and of fewer heads."""
    options = {**ATTENTION, "num_kv_heads": kv_heads, "in_kv_features": 5, "decode": False}
    theirs = filled(nnx.MultiHeadAttention(**options), rng)
    one = copied(theirs, ours.MultiHeadAttention(**options))
    arrays = draw(rng, 2, 6, 16), draw(rng, 2, 9, 5)
    array = np.tril(np.ones((1, 1, 6, 9), bool))
    our_mask = {None: None, "array": array, "object": nn.CausalMask()}[mask]
    wanted = both(theirs, *arrays, mask=None if mask is None else array)
    check(both(one, *arrays, mask=our_mask), wanted, 5e-5)
    check(one(*arrays, arrays[1], is_causal=True), theirs(*arrays, mask=array), 5e-5)


def test_attention_refuses_what_flax_refuses(rng: np.random.Generator) -> None:
    for layer in (ours.MultiHeadAttention, nnx.MultiHeadAttention):
        with pytest.raises(ValueError, match="divisible"):
            layer(**{**ATTENTION, "num_kv_heads": 3})
        one = layer(**ATTENTION, dropout_rate=0.5, keep_rngs=False)
        with pytest.raises(ValueError, match="decode"):
            one(draw(rng, 2, 6, 16), deterministic=True)
        one.set_attributes(decode=False, deterministic=False)
        with pytest.raises(ValueError, match="rngs"):
            one(draw(rng, 2, 6, 16))
    q, k = draw(rng, 1, 4, 5, 8), draw(rng, 1, 4, 2, 8)
    for function in (nn.flax_attention_fn, nnx.dot_product_attention):
        with pytest.raises((ValueError, AssertionError)):
            function(q, k, k)


@pytest.mark.parametrize("keep_rngs", [True, False])
@pytest.mark.parametrize("broadcast_dropout", [True, False])
def test_attention_drops_what_flax_drops(
    broadcast_dropout: bool, keep_rngs: bool, rng: np.random.Generator
) -> None:
    options = {
        **ATTENTION,
        "rngs": nnx.Rngs(0, dropout=3),
        "decode": False,
        "dropout_rate": 0.5,
        "broadcast_dropout": broadcast_dropout,
        "keep_rngs": keep_rngs,
    }
    theirs = filled(nnx.MultiHeadAttention(**options), rng)
    one = copied(theirs, ours.MultiHeadAttention(**{**options, "rngs": nnx.Rngs(0, dropout=3)}))
    assert (one.rngs is None) == (theirs.rngs is None) == (not keep_rngs)
    x = draw(rng, 2, 6, 16)
    for _ in range(2):  # the second call drops others
        call = {"deterministic": False, "mask": CAUSAL[None, None]}
        found, wanted = (
            layer(x, rngs=None if keep_rngs else nnx.Rngs(dropout=5), **call)
            for layer in (one, theirs)
        )
        check(found, wanted, 5e-5)
    check(one(x, deterministic=True), theirs(x, deterministic=True), 5e-5)


def test_layers_that_sow_beside_those_that_do_not(rng: np.random.Generator) -> None:
    class Model(nnx.Module):
        def __init__(self, layer: Any) -> None:
            options = {"num_heads": 8, "in_features": 8, "rngs": nnx.Rngs(0)}
            self.layers = nnx.List([layer(deterministic=False, **options) for _ in range(3)])

        def __call__(self, x: jax.Array, sow_weights: bool = False) -> Any:
            for index, layer in enumerate(self.layers):
                x = layer(x, sow_weights=sow_weights and index != 1)
            return x

    theirs = filled(Model(nnx.MultiHeadAttention), rng)
    one = copied(theirs, Model(ours.MultiHeadAttention))
    x = draw(rng, 4, 6, 8)
    sown = []
    for model in (one, theirs):
        model.set_attributes(decode=False)
        model(x, True)
        sown.append(nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate)))
    assert sown[0]["layers"].keys() == {0, 2}
    check(sown[0], sown[1], 5e-5)
    check(one(x), theirs(x), 1e-4)
    assert not nnx.pop(one, nnx.Intermediate)


def test_decoding_in_float64(rng: np.random.Generator) -> None:
    """Which is Flax's own, as kernels take no float64."""
    with jax.enable_x64(True):
        options = {"in_features": 4, "num_heads": 2, "qkv_features": 4, "decode": True}
        theirs = filled(nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **options), rng)
        one = copied(theirs, ours.MultiHeadAttention(rngs=nnx.Rngs(0), **options))
        x = draw(rng, 1, 4, 4, dtype="float64")
        for layer in (one, theirs):
            layer.init_cache(x.shape, dtype=x.dtype)
            assert layer.cached_key[...].shape == layer.cached_value[...].shape == (1, 4, 2, 2)
        for place in range(2):
            check(one(x[:, place : place + 1]), theirs(x[:, place : place + 1]))


@pytest.mark.parametrize("packed", [True, False])
def test_swiglu(packed: bool, rng: np.random.Generator) -> None:
    layer = filled(ours.SwiGLU(16, 24, packed=packed, use_bias=True, rngs=nnx.Rngs(0)), rng)
    x = draw(rng, 2, 6, 16)

    def plain(layer: Any, x: jax.Array) -> jax.Array:
        if packed:
            gate, up = jnp.split(layer.gate_up_proj(x), 2, -1)
        else:
            gate, up = layer.gate_proj(x), layer.up_proj(x)
        return layer.down_proj(nnx.silu(gate) * up)

    def total(run: Any) -> Any:
        return nnx.value_and_grad(lambda layer, x: jnp.sin(run(layer, x)).sum(), argnums=(0, 1))

    (of_ours, (g, dx)), (of_plain, (wanted, dwanted)) = (
        total(run)(layer, x) for run in (lambda layer, x: layer(x), plain)
    )
    names = {"gate_up_proj"} if packed else {"gate_proj", "up_proj"}
    assert nnx.to_pure_dict(nnx.state(layer, nnx.Param)).keys() == {*names, "down_proj"}
    check((of_ours, nnx.to_pure_dict(g), dx), (of_plain, nnx.to_pure_dict(wanted), dwanted), 1e-4)


@pytest.mark.parametrize("use_bias", [True, False])
def test_lm_head(use_bias: bool, rng: np.random.Generator) -> None:
    linear = filled(nnx.Linear(16, 41, use_bias=use_bias, rngs=nnx.Rngs(0)), rng)
    options = {"z_loss": 0.1, "label_smoothing": 0.1}
    head = ours.LMHeadLoss(
        16, 41, use_bias=use_bias, loss_options={**options, "z_loss": 9.0}, rngs=nnx.Rngs(1)
    )
    copied(linear, head)
    hidden, labels = draw(rng, 2, 6, 16), jnp.asarray(rng.integers(0, 41, (2, 6)))
    labels = labels.at[0, 0].set(-100)
    check(head.logits(hidden), linear(hidden))

    def loss(layer: Any, hidden: jax.Array) -> Any:
        if isinstance(layer, ours.LMHeadLoss):
            return layer(hidden, labels, z_loss=0.1)
        z = layer(hidden)
        lse = jax.nn.logsumexp(z, -1)
        at_label = jnp.take_along_axis(z, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        losses = 0.9 * (lse - at_label) + 0.1 * (lse - z.mean(-1)) + 0.1 * lse**2
        return jnp.where(labels == -100, 0, losses).sum() / (labels != -100).sum()

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    found, wanted = (run(layer, hidden) for layer in (head, linear))
    for one, other in zip(found[1], wanted[1], strict=True):
        check(jax.tree.leaves(one), jax.tree.leaves(other))
    check(found[0], wanted[0])


def test_lm_head_in_bfloat16(rng: np.random.Generator) -> None:
    head = ours.LMHeadLoss(16, 41, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden, labels = draw(rng, 6, 16), jnp.arange(6)
    kernel = head.kernel[...]
    wanted = linear_cross_entropy(hidden.astype(jnp.bfloat16), kernel, labels)
    gradients = nnx.grad(lambda head: head(hidden, labels))(head)
    np.testing.assert_array_equal(head(hidden, labels), wanted)
    assert gradients["kernel"][...].dtype == jnp.float32


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adam8bit", "lion8bit", "muon"])
def test_optimizers_in_that_of_flax(rng: np.random.Generator, name: str) -> None:
    """From the second step on Flax hands them the nodes of their state as mappings."""
    layer, tx = nnx.Linear(64, 128, rngs=nnx.Rngs(0)), getattr(ours_of_optax, name)(1e-2)
    params = nnx.as_pure(nnx.state(layer, nnx.Param))
    optimizer, state = nnx.Optimizer(layer, tx, wrt=nnx.Param), tx.init(params)

    @nnx.jit
    def step(layer: Any, optimizer: Any, grads: Any) -> None:
        optimizer.update(layer, grads)

    @jax.jit
    def right(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        grads = jax.tree.map(lambda one: draw(rng, *one.shape), nnx.state(layer, nnx.Param))
        params, state = right(nnx.as_pure(grads), state, params)
        step(layer, optimizer, grads)
    found = nnx.as_pure(nnx.state(layer, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, found, params)
    kept = jax.tree.leaves(nnx.as_pure(optimizer.opt_state))
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.leaves(state))
