"""`pallas_bridge.nn` against the functions of `jax.nn` and the formulas of Flax."""

import importlib
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.nn import attention

import pallas_bridge
from pallas_bridge import nn

Arrays = tuple[jax.Array, jax.Array, jax.Array]
CAUSAL = np.tril(np.ones((12, 12), bool))
PACKED = np.repeat(np.arange(3), [5, 3, 4])
MIXED = np.arange(12) % 3
BATCHED = np.stack([PACKED, MIXED])
SAME = MIXED[:, None] == MIXED
# Options; whether the kernel runs.
CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "scale": ({"scale": 0.5}, True),
    "causal": ({"is_causal": True}, True),
    "window": ({"local_window_size": (2, 1)}, True),
    "window of an integer": ({"local_window_size": 3}, True),
    "causal window": ({"local_window_size": (3, 5), "is_causal": True}, True),
    "key lengths": ({"key_value_seq_lengths": np.array([5, 12], np.int32)}, True),
    "query lengths": ({"query_seq_lengths": np.array([5, 12], np.int32)}, True),
    "causal lengths": (
        {"key_value_seq_lengths": np.array([5, 12], np.int32), "is_causal": True},
        True,
    ),
    "causal mask": ({"mask": CAUSAL}, True),
    "mask of jax": ({"mask": jnp.asarray(CAUSAL)[None, None]}, True),
    "packed mask": ({"mask": (PACKED[:, None] == PACKED)[None, None]}, True),
    "segments mask": ({"mask": SAME[None, None]}, True),
    "masks of batch": ({"mask": (BATCHED[:, :, None] == BATCHED[:, None])[:, None]}, True),
    "mask and causal": ({"mask": SAME[None, None], "is_causal": True}, True),
    "any mask": ({"mask": (SAME | (np.arange(12) == 4))[None, None]}, False),
    "empty rows": ({"mask": np.tril(np.ones((12, 12), bool), -1)}, False),
    "bias": ({"bias": np.linspace(-1, 1, 144, dtype="f").reshape(1, 1, 12, 12)}, False),
}


def draw(
    rng: np.random.Generator, dtype: Any = "float32", queries: int = 12, keys: int = 12
) -> Any:
    shapes = ((2, queries, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def check(found: Any, wanted: Any, dtype: Any = "float32") -> None:
    off = 2e-5 if dtype == "float32" else 3e-2
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=off, rtol=off
        )


def who(arrays: Any, **options: Any) -> bool:
    """Whether the kernel runs."""
    return not nn.explain_attention(*arrays, **options).startswith("forward: XLA's program")


def both(function: Any, arrays: Any) -> Any:
    """The result, and the gradients of a loss of it."""
    grads = jax.grad(lambda *x: jnp.sin(function(*x).astype(jnp.float32)).sum(), (0, 1, 2))
    return function(*arrays), grads(*arrays)


def check_both(arrays: Any, **options: Any) -> None:
    """Holds `both` of attention against that of `jax.nn`, a program each."""
    ours, theirs = (
        jax.jit(partial(both, partial(module.dot_product_attention, **options)))(arrays)
        for module in (nn, jax.nn)
    )
    check(ours, theirs)


@pytest.mark.parametrize("name", CALLS)
def test_attention_is_that_of_jax(name: str, rng: np.random.Generator) -> None:
    options, is_kernel = CALLS[name]
    arrays = draw(rng)
    assert who(arrays, **options) == is_kernel
    check_both(arrays, **options)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kinds",
    [
        ("bias",),
        ("causal",),
        ("padding",),
        ("custom",),
        ("causal", "padding"),
        ("custom", "padding"),
        ("bias", "causal"),
        ("causal", "window"),
        ("causal", "custom"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["", "vmap"])
def test_mask_table_of_jax(
    kinds: tuple[str, ...], kv_heads: int, is_mapped: bool, rng: np.random.Generator
) -> None:
    """The combinations of JAX's own tests, at their sizes: vjp in bfloat16, and vmap of it.

    Masks and lengths are operands of vjp, as there, and so traced; the gradient of the bias too.
    """
    extent, heads, columns = 128, 4, 32
    dims = ((2, extent, n, columns) for n in (heads, kv_heads, kv_heads, heads))
    *arrays, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in dims)
    bias = mask = lengths = None
    if "bias" in kinds:
        bias = jnp.asarray(rng.normal(size=(1, heads, extent, extent)), jnp.bfloat16)
    if "custom" in kinds:
        mask = jnp.tril(jnp.ones((1, 1, extent, extent), bool))
    if "padding" in kinds:
        queries, keys = [extent // 2, extent // 4], [extent // 4, extent // 2]
        lengths = jnp.array(queries, jnp.int32), jnp.array(keys, jnp.int32)

    def run(attention: Any) -> Any:
        def call(q: Any, k: Any, v: Any, bias: Any, mask: Any, lengths: Any) -> Any:
            query_lengths, key_lengths = lengths or (None, None)
            return attention(
                q, k, v, bias, mask,
                is_causal="causal" in kinds,
                query_seq_lengths=query_lengths,
                key_value_seq_lengths=key_lengths,
                local_window_size=(3, 2) if "window" in kinds else None,
            )  # fmt: skip

        operands, cotangents = (*arrays, bias, mask, lengths), cotangent
        if is_mapped:
            axes = (0, 0, 0, None, None, None)
            call = jax.vmap(call, axes)
            operands = tuple(
                jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), one) if axis == 0 else one
                for one, axis in zip(operands, axes, strict=True)
            )
            cotangents = jnp.stack([cotangent, -cotangent])

        @jax.jit
        def differentiate(operands: Any, cotangents: Any) -> Any:
            o, vjp = jax.vjp(call, *operands)
            return o, [one for one in vjp(cotangents)[:4] if one is not None]

        return differentiate(operands, cotangents)

    theirs = partial(jax.nn.dot_product_attention, implementation="xla")
    check(run(nn.dot_product_attention), run(theirs), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_of_16_bits(dtype: str, rng: np.random.Generator) -> None:
    arrays = draw(rng, dtype)
    ours = partial(nn.dot_product_attention, is_causal=True)
    check(ours(*arrays), jax.nn.dot_product_attention(*arrays, is_causal=True), dtype)


@pytest.mark.few(0)
@pytest.mark.slow
def test_xla_program_of_float16(rng: np.random.Generator) -> None:
    """Which that of `jax.nn` does not compile under `jit` on CPUs."""
    arrays = draw(rng, "float16")
    bias = jnp.asarray(rng.normal(size=(1, 1, 12, 12)), "float16")
    wide, wide_bias = [one.astype("float32") for one in arrays], bias.astype("float32")
    wanted = both(partial(jax.nn.dot_product_attention, bias=wide_bias), wide)
    found = jax.jit(lambda *arrays: both(partial(nn.dot_product_attention, bias=bias), arrays))
    check(found(*arrays), jax.tree.map(lambda one: one.astype("float16"), wanted), "float16")
    o, lse = jax.jit(partial(nn.dot_product_attention, bias=bias, return_residual=True))(*arrays)
    assert o.dtype == lse.dtype == jnp.float16


@pytest.mark.parametrize("extents", [(7, 12), (12, 7)])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"local_window_size": (6, 1)}])
def test_queries_and_keys_begin_together(
    extents: tuple[int, int], options: Any, rng: np.random.Generator
) -> None:
    arrays = draw(rng, "float32", *extents)
    assert who(arrays, **options)
    check_both(arrays, **options)


def test_masks_of_objects(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    place = np.arange(12)
    near = (place[:, None] - place <= 6) & (place - place[:, None] <= 1)
    for mask, wanted in (
        (nn.CausalMask(), CAUSAL),
        (nn.WindowMask(6, 1), near),
        (nn.SegmentMask(MIXED), SAME),
        (nn.SegmentMask(MIXED) & nn.CausalMask() & nn.WindowMask(6, 1), SAME & CAUSAL & near),
    ):
        np.testing.assert_array_equal(mask.dense(12, 12)[0, 0], wanted)
        assert who(arrays, mask=mask)
        run = jax.jit(partial(nn.dot_product_attention, mask=mask))
        check(run(*arrays), jax.nn.dot_product_attention(*arrays, mask=wanted[None, None]))


def test_masks_are_static_arguments() -> None:
    """Of equal masks a program is compiled once."""

    @partial(jax.jit, static_argnames="mask")
    def run(x: jax.Array, mask: Any) -> Any:
        return nn.dot_product_attention(x, x, x, mask=mask)

    x = jnp.ones((4, 1, 8))
    for mask in (nn.CausalMask(), nn.CausalMask(), nn.WindowMask(1, 0), nn.WindowMask(1, 0)):
        run(x, mask)
    assert run._cache_size() == 2
    ids = np.zeros(4, np.int32)
    masks = [nn.CausalMask(), nn.WindowMask(1, 0), nn.SegmentMask(ids), nn.SegmentMask(ids.copy())]
    assert len({*masks, nn.CausalMask() & nn.WindowMask(None, 0), nn.SegmentMask(ids)}) == 4
    assert nn.CausalMask() != "causal"


@pytest.mark.slow
def test_maps_traced_masks_and_residuals(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = draw(rng)
    for one in (jax.vmap, jax.jit):
        ours, theirs = (
            one(partial(module.dot_product_attention, is_causal=True)) for module in (nn, jax.nn)
        )
        check(ours(*arrays), theirs(*arrays))
    attention._logged.clear()
    for _ in range(2):
        found = jax.jit(lambda *x: nn.dot_product_attention(*x[:3], mask=x[3]))(*arrays, CAUSAL)
    check(found, jax.nn.dot_product_attention(*arrays, mask=CAUSAL))
    assert sum("the mask is traced" in one.message for one in caplog.records) == 1
    o, lse = nn.dot_product_attention(*arrays, return_residual=True)
    assert o.shape == arrays[0].shape and lse.shape == o.shape[:-1]
    with pytest.raises(ValueError, match="a bias is given"):
        bias = jnp.zeros((1, 1, 12, 12))
        nn.dot_product_attention(*arrays, bias, implementation="custom_call")


def test_dtypes_are_promoted(rng: np.random.Generator) -> None:
    q, k, v = draw(rng)
    found = nn.dot_product_attention(q.astype(jnp.bfloat16), k, v)
    check(found, jax.nn.dot_product_attention(q.astype(jnp.bfloat16).astype(jnp.float32), k, v))


def test_sides_of_windows(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    for window, same in (((None, 0), (12, 0)), (np.int64(2), (2, 2))):
        found = nn.dot_product_attention(*arrays, local_window_size=window)
        check(found, jax.nn.dot_product_attention(*arrays, local_window_size=same))
    bias = jnp.zeros((1, 1, 12, 12))
    found = nn.dot_product_attention(*arrays, bias, local_window_size=(None, 0))
    check(found, jax.nn.dot_product_attention(*arrays, is_causal=True))
    for negative in (-1, (-1, 0), (3, -2)):
        message = r"local_window_size is .*; each side must be at least 0, or None"
        with pytest.raises(ValueError, match=message):
            nn.dot_product_attention(*arrays, local_window_size=negative)
        with pytest.raises(ValueError, match=message):
            nn.explain_attention(*arrays, local_window_size=negative)


NO_ARRAYS: Any = ["causal", object(), {1}, [[1], [1, 2]], len, np.array(["a"]), jax.random.key(0)]


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("function", [nn.dot_product_attention, nn.explain_attention])
def test_what_is_no_bias_or_mask_is_refused_by_name(
    rng: np.random.Generator, name: str, function: Any
) -> None:
    arrays = draw(rng)
    for value in NO_ARRAYS:
        with pytest.raises(TypeError, match=rf"^{name} .*broadcastable to \[B, N, T, S\]"):
            function(*arrays, **{name: value})
    wrong = {"bias": (nn.CausalMask(), np.ones((12, 12), complex)), "mask": (nn.CausalMask, 1.5)}
    for value in (*wrong[name], *([np.ones((12, 12), "i")] if name == "mask" else [])):
        with pytest.raises(TypeError, match=f"^{name} (is|has dtype) .*(call it|must be)"):
            function(*arrays, **{name: value})
    for shape in ((2, 12, 5), (3, 1, 12, 12), (1, 2, 12, 12), (1, 1, 1, 12, 12), (13,)):
        message = rf"^{name} has shape {re.escape(str(shape))}; .* \(2, 4, 12, 12\)"
        with pytest.raises(ValueError, match=message):
            function(*arrays, **{name: np.ones(shape, bool)})


def test_biases_and_masks_of_every_kind_broadcast(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    mask: Any
    for mask in (CAUSAL.tolist(), CAUSAL[:1] | True, np.arange(12) < 7, True):
        found = nn.dot_product_attention(*arrays, mask=mask)
        check(found, jax.nn.dot_product_attention(*arrays, mask=jnp.asarray(mask)))
    for bias in (0.5, [1.0] * 12, np.arange(12), jnp.ones((2, 4, 1, 1)), np.ones((12, 1))):
        found = nn.dot_product_attention(*arrays, bias=bias)
        check(found, jax.nn.dot_product_attention(*arrays, bias=jnp.asarray(bias)))
    struct = jax.ShapeDtypeStruct((12, 12), jnp.bool)
    assert "the mask is traced" in nn.explain_attention(*arrays, mask=struct)
    with pytest.raises(TypeError, match="mask is of type ShapeDtypeStruct"):
        nn.dot_product_attention(*arrays, mask=struct)


@pytest.mark.only("cuda", "a CPU has no cuDNN")
def test_explains_passes_by_cudnn() -> None:
    if any(device.compute_capability != "9.0" for device in jax.devices()):
        pytest.skip("cuDNN has both passes on other GPUs")

    def runners(columns: int) -> list[str]:
        q = jax.ShapeDtypeStruct((1, 2048, 8, columns), jnp.bfloat16)
        return nn.explain_attention(q, q, q, is_causal=True).splitlines()[:2]

    kernels = "flash_attention kernels"
    assert runners(64) == ["forward: cuDNN", f"backward: {kernels}"]
    assert runners(128) == [f"forward: {kernels}", f"backward: {kernels}"]
    assert runners(256) == ["forward: cuDNN", "backward: cuDNN"]


def test_flax(rng: np.random.Generator) -> None:
    arrays = draw(rng)
    run = partial(nn.flax_attention_fn, *arrays)
    wanted = jax.nn.dot_product_attention(*arrays, mask=CAUSAL)
    more: dict[str, Any] = {"dropout_rng": jax.random.key(0), "precision": None, "module": None}
    for mask in (nn.CausalMask(), CAUSAL[None, None], CAUSAL[None, None].astype("f")):
        check(run(mask=mask, deterministic=True, dropout_rate=0.5, **more), wanted)
    nested = [one[None] for one in arrays]
    check(nn.flax_attention_fn(*nested, is_causal=True, **more), wanted[None])
    check(nn.flax_attention_fn(*(one[0] for one in arrays), is_causal=True), wanted[0])
    # Without values that are dropped the sums are those of the kernel.
    check(run(mask=nn.CausalMask(), dropout_rate=1e-9, **more), wanted)
    dropped = run(mask=nn.CausalMask(), dropout_rate=0.5, **more)
    assert dropped.shape == wanted.shape and not np.allclose(dropped, wanted)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        run(module=object())
    with pytest.raises(ValueError, match="dropout_rng is None"):
        run(dropout_rate=0.5)


def test_norms_and_activations(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(3, 16)), jnp.float32)
    check(nn.gelu(x), jax.nn.gelu(x))
    check(nn.gelu(x, False), jax.nn.gelu(x, False))
    check(nn.silu(x), jax.nn.silu(x))
    check(nn.swiglu(x), jax.nn.silu(x[:, :8]) * x[:, 8:])
    check(nn.rms_norm(x, epsilon=0.1), x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 0.1))
    check(nn.layer_norm(x), jax.nn.standardize(x, epsilon=1e-6))


def test_norms_without_weight(rng: np.random.Generator) -> None:
    x, ones = jnp.asarray(rng.normal(size=(3, 16)), jnp.bfloat16), jnp.ones(16, jnp.bfloat16)
    check(pallas_bridge.rms_norm(x, None), pallas_bridge.rms_norm(x, ones))
    check(pallas_bridge.rms_norm(x, None, zero_centred=True), pallas_bridge.rms_norm(x, ones))
    check(pallas_bridge.layer_norm(x, None), pallas_bridge.layer_norm(x, ones))
    for granularity in ("row", "block_1d"):
        found, wanted = (
            pallas_bridge.rms_norm_fp8(x, weight, granularity=granularity)
            for weight in (None, ones)
        )
        check(found, wanted)


@pytest.mark.parametrize(("module", "package"), [("nnx", "flax"), ("equinox", "equinox")])
def test_layers_name_the_package_that_they_need(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where it is not installed.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"pallas_bridge.{module}", raising=False)
    message = f"pallas_bridge.{module} needs {package}: run pip install 'pallas_bridge[{module}]'"
    with pytest.raises(ImportError, match=re.escape(message)):
        importlib.import_module(f"pallas_bridge.{module}")
