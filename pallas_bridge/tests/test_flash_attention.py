"""Attention against its formulas in float64, under everything that JAX does to functions."""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads
from oracle import Floats
from pallas_bridge._src import library, pallas
from pallas_bridge._src.exported import EXPORTS
from pallas_bridge._src.flash_attention import cudnn, on_tpu, reference, segment_ranges
from pallas_bridge._src.flash_attention.options import Options, ranges
from placement import PLATFORM

import pallas_bridge
from pallas_bridge import export, flash_attention

DTYPES = ("float32", "bfloat16", "float16")
TARGETS = [f"xentile_flash_attention_{name}" for name in ("forward", "backward")]
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
# What an entry may be off by, relative to the sum of sizes of what it is made of.
OFF = {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}
# Half the spacing of f16's subnormal numbers, which probabilities and results are rounded to.
SUBNORMAL = 2.0**-25


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def exact(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def wanted(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    dlse: Any,
    seen: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> dict[str, tuple[Floats, Floats]]:
    """Returns what o, lse and gradients should be, with sizes; `seen` is [B, S, Skv]."""
    least = SUBNORMAL / OFF["float16"] if q.dtype == jnp.float16 else 0
    q, k, v, do, dlse = map(exact, (q, k, v, do, dlse))
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    scale = 1 / np.sqrt(width) if scale is None else scale
    wide_k, wide_v = (np.repeat(x, group, 2) for x in (k, v))
    t = np.einsum("bshd,bkhd->bhsk", q, wide_k) * scale
    slope = np.ones_like(t)
    if softcap is not None:
        slope = 1 - np.tanh(t / softcap) ** 2
        t = softcap * np.tanh(t / softcap)
    t = np.where(seen[:, None], t, -np.inf)
    sink = np.full((heads,), -np.inf) if sinks is None else exact(sinks)
    sink = np.broadcast_to(sink[None, :, None], (batch, heads, queries))
    largest = np.maximum(t.max(-1, initial=-np.inf), sink)
    largest = np.where(largest == -np.inf, 0, largest)
    total = np.exp(t - largest[..., None]).sum(-1) + np.exp(sink - largest)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, -np.inf, largest + np.log(total))
    p = np.where(seen[:, None], np.exp(t - np.where(total == 0, 0, lse)[..., None]), 0)
    o = np.einsum("bhsk,bkhe->bshe", p, wide_v)
    dp = np.einsum("bshe,bkhe->bhsk", do, wide_v)
    delta = np.einsum("bshe,bshe->bhs", do, o) - np.moveaxis(dlse, 1, 2)
    size = np.einsum("bshe,bshe->bhs", abs(do), abs(o)) + abs(np.moveaxis(dlse, 1, 2))
    ds = p * slope * (dp - delta[..., None])
    rounded = np.where(seen[:, None], p + least, 0)
    of_ds = rounded * slope * (np.einsum("bshe,bkhe->bhsk", abs(do), abs(wide_v)) + size[..., None])

    def grouped(x: Floats) -> Floats:
        return x.reshape(batch, keys, kv_heads, group, x.shape[-1]).sum(3)

    of_sink = np.where(total == 0, 0, np.exp(sink - np.where(total == 0, 0, lse)))
    found = {
        "o": (o, np.einsum("bhsk,bkhe->bshe", rounded, abs(wide_v))),
        "lse": (np.moveaxis(lse, 1, 2), 1 + abs(np.moveaxis(lse, 1, 2))),
        "dq": (
            scale * np.einsum("bhsk,bkhd->bshd", ds, wide_k),
            abs(scale) * np.einsum("bhsk,bkhd->bshd", of_ds, abs(wide_k)),
        ),
        "dk": (
            grouped(scale * np.einsum("bhsk,bshd->bkhd", ds, q)),
            grouped(abs(scale) * np.einsum("bhsk,bshd->bkhd", of_ds, abs(q))),
        ),
        "dv": (
            grouped(np.einsum("bhsk,bshe->bkhe", p, do)),
            grouped(np.einsum("bhsk,bshe->bkhe", rounded, abs(do))),
        ),
    }
    if sinks is not None:
        found["dsinks"] = (
            -(of_sink * delta).sum((0, 2)),
            (of_sink * size).sum((0, 2)),
        )
    return found


def close(found: dict[str, Any], right: dict[str, tuple[Floats, Floats]], dtype: str) -> None:
    assert found.keys() == right.keys()
    for name, (value, size) in right.items():
        array = found[name]
        assert array.shape == value.shape, f"{name}: {array.shape}"
        off = OFF["float32" if name == "lse" else dtype]
        with np.errstate(invalid="ignore"):
            error = np.where(exact(array) == value, 0, abs(exact(array) - value))
            ratio = error / (off * size + (SUBNORMAL if dtype == "float16" else 1e-30))
        assert not np.isnan(error).any(), f"{name}: NaN"
        worst = ratio.max(initial=0)
        assert worst <= 1, f"{name}: {worst} times what is allowed"


def run(q: Any, k: Any, v: Any, do: Any, dlse: Any, **options: Any) -> dict[str, Any]:
    """Returns o, lse and gradients."""
    sinks = options.pop("sinks", None)

    def function(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return flash_attention(q, k, v, sinks=sinks, return_lse=True, **options)

    @jax.jit
    def both(q: Any, k: Any, v: Any, sinks: Any, do: Any, dlse: Any) -> Any:
        given, vjp = jax.vjp(function, q, k, v, sinks)
        return given, vjp((do, dlse))

    (o, lse), (dq, dk, dv, dsinks) = both(q, k, v, sinks, do, dlse)
    assert o.dtype == dq.dtype == dk.dtype == dv.dtype == q.dtype and lse.dtype == jnp.float32
    found = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return found if sinks is None else {**found, "dsinks": dsinks}


def arrays(
    rng: np.random.Generator,
    dtype: str,
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    widths: tuple[int, int],
) -> tuple[jax.Array, ...]:
    """Returns q, k, v and cotangents."""
    (q_heads, kv_heads), (queries, keys), (width, value_width) = heads, lengths, widths
    return (
        draw(rng, dtype, batch, queries, q_heads, width),
        draw(rng, dtype, batch, keys, kv_heads, width),
        draw(rng, dtype, batch, keys, kv_heads, value_width),
        draw(rng, dtype, batch, queries, q_heads, value_width),
        draw(rng, "float32", batch, queries, q_heads),
    )


def seen_by(
    queries: int, keys: int, causal: bool = False, window: Any = None, batch: int = 1
) -> Any:
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)
    before, after = window or (None, None)
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= key <= place
    if before is not None:
        seen &= key >= place - before
    if after is not None:
        seen &= key <= place + after
    return np.broadcast_to(seen, (batch, queries, keys))


IN_16_BITS = pytest.mark.only("cuda", "a CPU has one kernel for every dtype")
BY_XLA = pytest.mark.only("cpu", "XLA's own program in 16 bits is held on CPUs")


def each(dtypes: Sequence[str]) -> Any:
    """Parametrizes a test by implementations and dtypes."""
    return pytest.mark.parametrize(
        ("implementation", "dtype"),
        [
            *[("custom_call", dtype) for dtype in dtypes],
            *[
                pytest.param("reference", dtype, marks=() if dtype == "float32" else BY_XLA)
                for dtype in dtypes
            ],
        ],
    )


# GPUs have kernels of 16 bits and of 32.
EITHER_KERNEL = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("custom_call", "float32"),
        pytest.param("custom_call", "bfloat16", marks=IN_16_BITS),
        ("reference", "float32"),
    ],
)


SHAPES: list[Any] = [
    # batch, heads, lengths, widths, causal, window
    (2, (4, 2), (37, 37), (16, 16), True, None),
    (1, (3, 1), (5, 130), (24, 8), True, (60, 3)),
    (1, (2, 2), (70, 33), (8, 40), True, None),
    (2, (1, 1), (1, 1), (8, 8), False, None),
    (1, (2, 1), (230, 250), (64, 32), False, (None, 9)),
    (1, (4, 2), (150, 201), (128, 128), True, None),
    (1, (2, 1), (140, 140), (256, 136), True, (70, None)),
    (1, (2, 1), (200, 260), (192, 128), True, None),
    (1, (1, 1), (0, 5), (8, 8), False, None),
    (1, (1, 1), (5, 0), (8, 8), True, None),
    (0, (2, 1), (3, 4), (8, 8), False, None),
]


@each(DTYPES)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_values_and_gradients(
    rng: np.random.Generator, case: Any, dtype: str, implementation: Any
) -> None:
    batch, heads, lengths, widths, causal, window = case
    given = arrays(rng, dtype, batch, heads, lengths, widths)
    seen = seen_by(*lengths, causal, window, batch)
    found = run(*given, causal=causal, window=window, implementation=implementation)
    close(found, wanted(*given, seen), dtype)


@each(["float32", "bfloat16"])
def test_scale_softcap_and_sinks(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    given = arrays(rng, dtype, 2, (4, 2), (50, 60), (16, 24))
    seen = seen_by(50, 60, causal=True, batch=2)
    sinks = jnp.asarray(rng.normal(size=4) * 2, dtype)
    for of, more in (
        (None, {"scale": -0.7}),
        (None, {"softcap": 1.5}),
        (sinks, {"scale": -0.7}),
        (sinks, {"scale": 0.4, "softcap": 3.0}),
    ):
        found = run(*given, causal=True, sinks=of, implementation=implementation, **more)
        right = wanted(*given, seen, sinks=of, **more)
        if of is not None:
            assert found["dsinks"].dtype == dtype
        close(found, right, dtype)


@EITHER_KERNEL
def test_segments_and_lengths(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    given = arrays(rng, dtype, 3, (2, 1), (90, 90), (8, 8))
    text = np.sort(rng.integers(0, 4, (3, 90)), -1)
    strewn = rng.integers(0, 3, (3, 90))
    for of_queries, of_keys in ((text, text), (text, strewn)):
        same = of_queries[:, :, None] == of_keys[:, None]
        segment_ids: Any = of_queries if of_queries is of_keys else (of_queries, of_keys)
        found = run(*given, causal=True, segment_ids=segment_ids, implementation=implementation)
        close(found, wanted(*given, seen_by(90, 90, True, batch=3) & same), dtype)
    q_lengths, kv_lengths = np.array([90, 17, 0]), np.array([33, 90, 5])
    for of_queries, of_keys in ((q_lengths, kv_lengths), (None, kv_lengths), (q_lengths, None)):
        seen = np.zeros((3, 90, 90), bool)
        for entry in range(3):
            queries = 90 if of_queries is None else of_queries[entry]
            keys = 90 if of_keys is None else of_keys[entry]
            seen[entry, :queries, :keys] = seen_by(queries, keys, True, (40, None))[0]
        options: Any = {"q_lengths": of_queries, "kv_lengths": of_keys, "window": (40, None)}
        found = run(*given, causal=True, implementation=implementation, **options)
        close(found, wanted(*given, seen), dtype)


def texts(*lengths: int) -> Any:
    """Returns the ids of texts of such lengths, one behind another, from 0 on."""
    return np.repeat(np.arange(len(lengths)), lengths)


# Ids of queries and of keys, [B, S] and [B, Skv], and whether ranges say all of each entry.
SEGMENTS: dict[str, tuple[Any, Any, list[bool]]] = {
    "sorted": (ids := np.stack([texts(1, 130, 64, 105), texts(60, 240, 0, 0)]), ids, [True, True]),
    "one": (ids := np.stack([texts(300), texts(300) + 7]), ids, [True, True]),
    "padded": (ids := np.stack([(texts(90, 128, 82) + 1) % 3] * 2), ids, [True, True]),
    "negative": (ids := np.stack([-texts(70, 230), texts(150, 150) + 2**31 - 2]), ids, [True] * 2),
    "returning": (ids := np.stack([texts(70, 130, 100) % 2, texts(300)]), ids, [False, True]),
    "strewn": (ids := np.random.default_rng(3).integers(0, 3, (2, 300)), ids, [False, False]),
    "colliding": (ids := np.stack([texts(140, 160) * 512, texts(9, 291)]), ids, [False, True]),
    "of other keys": (
        np.stack([texts(70, 130, 100), texts(10, 290)]),
        np.stack([texts(100, 31), texts(65, 60, 6) * 512]),
        [True, False],
    ),
    "without keys": (np.stack([texts(300), 3 - texts(300)]), np.full((2, 131), 1), [True, True]),
}


@pytest.mark.few(3)
@EITHER_KERNEL
@pytest.mark.parametrize("case", SEGMENTS)
def test_segments_longer_than_tiles(
    rng: np.random.Generator, case: str, dtype: str, implementation: Any
) -> None:
    of_queries, of_keys, _ = SEGMENTS[case]
    lengths = of_queries.shape[1], of_keys.shape[1]
    given = arrays(rng, dtype, 2, (4, 2), lengths, (24, 16))
    alike = of_queries[:, :, None] == of_keys[:, None]
    segment_ids: Any = of_queries if of_queries is of_keys else (of_queries, of_keys)
    sinks = draw(rng, "float32", 4)
    for options, more in (
        ({"causal": True}, {}),
        ({"window": (90, 20)}, {"softcap": 2.0, "sinks": sinks}),
    ):
        seen = seen_by(*lengths, **options, batch=2) & alike
        found = run(
            *given, segment_ids=segment_ids, implementation=implementation, **options, **more
        )
        close(found, wanted(*given, seen, **more), dtype)


@pytest.mark.few(1)
@EITHER_KERNEL
@pytest.mark.parametrize("widths", [(192, 128), (136, 64), (256, 136)], ids=str)
def test_segments_of_wide_heads(
    rng: np.random.Generator, widths: tuple[int, int], dtype: str, implementation: Any
) -> None:
    of_queries, of_keys, _ = SEGMENTS["of other keys"]
    given = arrays(rng, dtype, 2, (2, 1), (of_queries.shape[1], of_keys.shape[1]), widths)
    seen = seen_by(of_queries.shape[1], of_keys.shape[1], True, batch=2)
    seen = seen & (of_queries[:, :, None] == of_keys[:, None])
    sinks = draw(rng, "float32", 2)
    for more in ({}, {"softcap": 2.0, "sinks": sinks}):
        found = run(
            *given,
            causal=True,
            segment_ids=(of_queries, of_keys),
            implementation=implementation,
            **more,
        )
        close(found, wanted(*given, seen, **more), dtype)


@pytest.mark.parametrize("case", SEGMENTS)
def test_ranges_of_segments(case: str) -> None:
    of_queries, of_keys, says_all = SEGMENTS[case]
    queries, keys = of_queries.shape[1], of_keys.shape[1]
    whole = np.broadcast_to(np.array([0, keys], np.int32), (2, queries, 2))
    given = [np.asarray(one, np.int32) for one in (whole, of_queries, of_keys)]
    narrow = partial(segment_ranges.on_cuda, of_queries is of_keys)
    found = [np.asarray(one) for one in jax.jit(narrow)(*given)]

    def seen(ranges: Any, of_queries: Any, of_keys: Any) -> Any:
        key = np.arange(keys)
        within = (ranges[..., :1] <= key) & (key < ranges[..., 1:])
        return within & (of_queries[..., None] == of_keys[:, None])

    np.testing.assert_array_equal(seen(*found), seen(*given))
    for entry, is_all in enumerate(says_all):
        assert is_all == all((one[entry] == 0).all() for one in found[1:])


@EITHER_KERNEL
def test_packed_text(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    given = arrays(rng, dtype, 1, (2, 1), (50, 70), (8, 8))
    q_ends, kv_ends = np.array([0, 7, 7, 30, 45]), np.array([0, 12, 20, 40, 64])
    seen = np.zeros((1, 50, 70), bool)
    for (a, b), (c, d) in zip(pairwise(q_ends), pairwise(kv_ends), strict=True):
        seen[0, a:b, c:d] = seen_by(b - a, d - c, True)[0]
    flat = [x[0] for x in given]
    found = run(
        *flat,
        causal=True,
        q_cumulative=q_ends,
        kv_cumulative=kv_ends,
        implementation=implementation,
    )
    close({name: x[None] for name, x in found.items()}, wanted(*given, seen), dtype)
    # What nobody has in its range may be anything.
    q, k, v, do, dlse = flat
    bad = (q.at[45:].set(jnp.nan), k.at[64:].set(jnp.nan), v.at[64:].set(jnp.inf), do, dlse)
    again = run(
        *bad,
        causal=True,
        q_cumulative=q_ends,
        kv_cumulative=kv_ends,
        implementation=implementation,
    )
    for name, array in found.items():
        np.testing.assert_array_equal(array, again[name], name)


@EITHER_KERNEL
def test_softcap_beside_keys_that_are_nan(
    rng: np.random.Generator, dtype: str, implementation: Any
) -> None:
    q, k, v, do, dlse = given = arrays(rng, dtype, 1, (2, 1), (40, 50), (16, 16))
    seen = np.broadcast_to(np.arange(50) < 33, (1, 40, 50))
    # Products of seen keys are beyond where short polynomials are tanh.
    more = {"scale": 1.0, "softcap": 2.0}
    bad = (q, k.at[:, 33:].set(jnp.nan), v.at[:, 33:].set(jnp.nan), do, dlse)
    found = run(*bad, kv_lengths=np.array([33]), implementation=implementation, **more)
    close(found, wanted(*given, seen, **more), dtype)


def same(found: Any, right: Any) -> None:
    """Holds results of other programs: to the same bits where kernels of the library make them."""
    rounding = 0 if PLATFORM == "cpu" else 1e-5
    np.testing.assert_allclose(found, right, rtol=rounding, atol=rounding)


def test_o_alone_and_without_a_batch(rng: np.random.Generator) -> None:
    q, k, v, do, dlse = arrays(rng, "float32", 1, (4, 2), (20, 30), (16, 8))
    o, lse = flash_attention(q, k, v, return_lse=True)
    same(flash_attention(q, k, v), o)
    one, of_one = flash_attention(q[0], k[0], v[0], return_lse=True)
    same(one, o[0])
    same(of_one, lse[0])
    gradients = jax.grad(lambda *x: (flash_attention(*x) * do).sum(), (0, 1, 2))(q, k, v)
    right = wanted(q, k, v, do, jnp.zeros_like(dlse), seen_by(20, 30))
    close(
        dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        {name: right[name] for name in ("dq", "dk", "dv")},
        "float32",
    )


def test_both_modes_of_differentiation(rng: np.random.Generator) -> None:
    q, k, v, _, _ = arrays(rng, "float32", 1, (2, 1), (6, 7), (8, 8))
    sinks = draw(rng, "float32", 2)

    def function(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)

    for made in (jax.jit(function), jax.jit(jax.checkpoint(function))):
        check_grads(made, (q, k, v, sinks), 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    reference = partial(flash_attention, implementation="reference", softcap=2.0)
    check_grads(jax.jit(reference), (q, k, v), 2, modes=["rev"], rtol=5e-2, atol=5e-2, eps=1e-2)


@pytest.mark.only("cpu", "what a program without kernels keeps is XLA's to say")
def test_second_derivatives_are_refused() -> None:
    q = jnp.ones((2, 1, 8))
    with pytest.raises(NotImplementedError, match=r"flash_attention: second derivatives"):
        jax.hessian(lambda x: flash_attention(x, x, x).sum())(q)


@pytest.mark.only("cpu", "what is kept is that of kernels")
def test_no_array_has_the_size_of_all_logits(rng: np.random.Generator) -> None:
    q, k, v, *_ = arrays(rng, "bfloat16", 1, (2, 1), (1024, 1024), (8, 8))
    step = jax.jit(jax.grad(lambda *x: flash_attention(*x, causal=True).sum(), (0, 1, 2)))
    memory = step.lower(q, k, v).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1024 * 1024


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap(rng: np.random.Generator, axis: int) -> None:
    given = [jnp.stack([draw(rng, "float32", 6, 2, 8) for _ in range(3)], axis) for _ in range(3)]
    sinks = draw(rng, "float32", 2)

    def value(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        o, lse = flash_attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
        return jnp.sin(o).sum() + jnp.sin(lse).sum()

    gradient = jax.value_and_grad(value, (0, 1, 2, 3))
    for mapped in ((axis, axis, axis, None), (axis, None, axis, None)):
        pairs = list(zip(given, mapped[:3], strict=True))
        arrays = [x if at is not None else jnp.take(x, 0, axis) for x, at in pairs]
        found = jax.jit(jax.vmap(gradient, in_axes=mapped))(*arrays, sinks)
        for index in range(3):
            one = [jnp.take(x, index if at is not None else 0, axis) for x, at in pairs]
            right = gradient(*one, sinks)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
                np.testing.assert_allclose(a[index], b, rtol=1e-5, atol=1e-5)


@pytest.mark.devices(2)
@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
def test_batch_and_heads_cut_over_a_mesh(rng: np.random.Generator, spec: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    q, k, v, do, _ = arrays(rng, "float32", 2, (4, 2), (20, 20), (8, 8))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, causal=True), q, k, v)
        return o, *vjp(do)

    right = jax.jit(step)(q, k, v, do)
    placed = [jax.device_put(x, sharding) for x in (q, k, v, do)]
    compiled = jax.jit(step).lower(*placed).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" not in text and "all-to-all" not in text
    for found, one in zip(compiled(*placed), right, strict=True):
        assert found.sharding.is_equivalent_to(sharding, 4)
        same(found, one)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec(*spec), out_specs=PartitionSpec(*spec)
    )
    for found, one in zip(jax.jit(mapped)(*placed), right, strict=True):
        same(found, one)


@pytest.mark.devices(2)
def test_a_mesh_of_explicit_axes(rng: np.random.Generator) -> None:
    q, k, v, *_ = arrays(rng, "float32", 2, (4, 2), (20, 20), (8, 8))
    sinks = draw(rng, "float32", 4)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def step(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        function = partial(flash_attention, causal=True)
        return jax.grad(lambda *x: function(*x[:3], sinks=x[3]).sum(), (0, 1, 2, 3))(q, k, v, sinks)

    right = step(q, k, v, sinks)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        found = jax.jit(step)(*(jax.device_put(x, sharding) for x in (q, k, v)), sinks)
        assert found[0].sharding.is_equivalent_to(sharding, 4)
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.only("cpu", "an export of a kernel")
def test_export(rng: np.random.Generator) -> None:
    q, k, v, *_ = arrays(rng, "bfloat16", 2, (2, 1), (20, 20), (8, 8))
    function = jax.jit(partial(flash_attention, causal=True))
    made = jax.export.export(function, disabled_checks=CHECKS)(q, k, v)
    again = jax.export.deserialize(made.serialize())
    np.testing.assert_array_equal(again.call(q, k, v), function(q, k, v))
    batch, length = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    any_batch = jax.export.export(function, disabled_checks=CHECKS)(*shapes)
    np.testing.assert_array_equal(any_batch.call(q, k, v), function(q, k, v))


@pytest.mark.only("cpu", "programs for platforms that are not there")
def test_a_program_for_every_platform(rng: np.random.Generator) -> None:
    q, k, v, *_ = arrays(rng, "bfloat16", 1, (2, 1), (128, 128), (64, 64))
    function = jax.jit(partial(flash_attention, causal=True))
    for platforms in (["cpu", "cuda"], ["cpu", "cuda", "tpu"], ["cpu", "tpu"]):
        made = jax.export.export(function, platforms=platforms, disabled_checks=CHECKS)(q, k, v)
        text = made.mlir_module()
        assert TARGETS[0] in text and ("tpu_custom_call" in text) == ("tpu" in platforms)
        np.testing.assert_array_equal(made.call(q, k, v), function(q, k, v))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_programs_for_tools(tmp_path: Path, platform: str) -> None:
    config: dict[str, Any] = {
        "op": "flash_attention",
        "backend": f"xla:{platform}",
        "dtype": "bf16",
    }
    config |= {"time": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "sinks": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "options": {"window_before": 7}}))
    assert export.main(["--config", str(path), "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / f"{platform}_default_default.json").read_text())
    q, k = ({"dtype": "bf16", "shape": [heads, 128, 64]} for heads in (4, 2))
    sinks, rows = ({"dtype": "f32", "shape": shape} for shape in ([4], [4, 128]))
    assert manifest["arguments"] == [q, k, k, sinks, q, rows]
    assert manifest["results"] == [q, rows, q, k, k, sinks]
    for change, message in (
        ({"kv_heads": 3}, "kv_heads is 3; it must divide heads, which is 4"),
        ({"head_dim": None}, "head_dim is None; it must be an integer of at least 1"),
        ({"options": {"bias": 1}}, "unknown key options.bias"),
        ({"keys": 0}, "keys is 0; it must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            for cell in export.cells({**config, **change}, tmp_path):
                EXPORTS["flash_attention"].program(cell)


@pytest.mark.parametrize("lengths", [(30, None), (7, 30), (30, 11)])
def test_the_program_for_tools_computes_attention(
    rng: np.random.Generator, lengths: tuple[int, int | None]
) -> None:
    queries, keys = lengths[0], lengths[1] or lengths[0]
    q, k, v, do, dlse = arrays(rng, "float32", 1, (4, 2), (queries, keys), (16, 16))
    sinks = draw(rng, "float32", 4)
    config = {"op": "flash_attention", "dtype": "f32", "time": queries, "keys": lengths[1]}
    config |= {"heads": 4, "kv_heads": 2, "head_dim": 16, "sinks": True}
    config |= {"options": {"window_before": 9, "softcap": 5.0}}
    (cell,) = export.cells(config, Path())
    given = (jnp.moveaxis(x[0], 1, 0) for x in (q, k, v))
    of_rows = (jnp.moveaxis(x[0], 1, 0) for x in (do, dlse))
    o, lse, *gradients, dsinks = (
        EXPORTS["flash_attention"].program(cell).function(*given, sinks, *of_rows)
    )
    names = ("o", "lse", "dq", "dk", "dv")
    found = dict(zip(names, (o, lse, *gradients), strict=True))
    found = {name: jnp.moveaxis(x, 0, 1)[None] for name, x in found.items()}
    seen = seen_by(queries, keys, True, (9, None))
    right = wanted(q, k, v, do, dlse, seen, softcap=5.0, sinks=sinks)
    close({**found, "dsinks": dsinks}, right, "float32")


def test_the_program_for_tools_of_packed_texts(rng: np.random.Generator) -> None:
    """Texts of 4, 0 and 9 queries that see keys of 7, 3 and 9."""
    q, k, v, do, dlse = arrays(rng, "float32", 1, (4, 2), (13, 19), (16, 16))
    seen = np.zeros((13, 19), bool)
    for (queries, first), (keys, start) in (((4, 0), (7, 0)), ((9, 4), (9, 10))):
        seen[first : first + queries, start : start + keys] = seen_by(queries, keys, causal=True)[0]
    ends = seen.argmax(1), 19 - seen[:, ::-1].argmax(1)
    config = {"op": "flash_attention", "dtype": "f32", "time": 13, "keys": 19, "segments": 3}
    config |= {"heads": 4, "kv_heads": 2, "head_dim": 16}
    (cell,) = export.cells(config, Path())
    program = EXPORTS["flash_attention"].program(cell)
    assert [of.shape for of in program.arguments[3:5]] == [(13,), (13,)]
    given = (jnp.moveaxis(x[0], 1, 0) for x in (q, k, v))
    of_rows = (jnp.moveaxis(x[0], 1, 0) for x in (do, dlse))
    of_texts = (jnp.asarray(end, jnp.int32) for end in ends)
    results = program.function(*given, *of_texts, *of_rows)
    names = ("o", "lse", "dq", "dk", "dv")
    found = {name: jnp.moveaxis(x, 0, 1)[None] for name, x in zip(names, results, strict=True)}
    close(found, wanted(q, k, v, do, dlse, seen[None]), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_the_batch(rng: np.random.Generator, dtype: str) -> None:
    given = arrays(rng, dtype, 3, (4, 2), (130, 260), (16, 16))
    found = run(*given, causal=True, implementation="custom_call")
    alone = run(*(x[1:2] for x in given), causal=True, implementation="custom_call")
    for name, array in found.items():
        np.testing.assert_array_equal(array[1:2], alone[name], name)


@pytest.mark.only("cuda", "sums that several blocks of a GPU make")
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("masks", [{"causal": True}, {}, {"causal": True, "window": (300, 0)}])
def test_bits_do_not_depend_on_the_run(rng: np.random.Generator, columns: int, masks: Any) -> None:
    given = arrays(rng, "bfloat16", 3, (8, 2), (1100, 1100), (columns, columns))
    gradients = jax.jit(partial(run, implementation="custom_call", **masks))
    right = gradients(*given)
    differs = jax.jit(lambda a, b: sum((a[name] != b[name]).sum() for name in right))
    count = sum(differs(gradients(*given), right) for _ in range(1000))
    assert count == 0
    # Nor on other entries of the batch, or other heads.
    alone = gradients(*(x[1:2] for x in given))
    for name, array in right.items():
        np.testing.assert_array_equal(array[1:2], alone[name], name)
    q, k, v, do, dlse = given
    halves = gradients(q[:, :, 4:], k[:, :, 1:], v[:, :, 1:], do[:, :, 4:], dlse[:, :, 4:])
    for name, array in right.items():
        heads = array.shape[2]
        np.testing.assert_array_equal(array[:, :, heads // 2 :], halves[name], name)


@EITHER_KERNEL
def test_sums_in_any_order(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    given = arrays(rng, dtype, 2, (4, 2), (300, 300), (64, 64))
    options = {"causal": True, "deterministic": False, "implementation": implementation}
    close(run(*given, **options), wanted(*given, seen_by(300, 300, True, batch=2)), dtype)


def test_what_is_wrong_is_named() -> None:
    q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))

    def refused(kind: Any, match: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            flash_attention(*(arrays or (q, k, k)), **options)

    refused(NotImplementedError, r"bias is given; jax.nn.dot_product_attention adds", bias=q)
    refused(NotImplementedError, r"dropout_rate is 0.1; it must be 0", dropout_rate=0.1)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide = jnp.ones((5, 4, 8), jnp.float64)
        refused(TypeError, r"q has dtype float64; it must be bfloat16", wide, wide, wide)
    refused(TypeError, r"k has dtype int32; it must be bfloat16", q, k.astype("int32"), k)
    refused(ValueError, r"q has shape \(5, 8\); it must be \[B, S, H, D\]", q[0, :, 0], k, k)
    refused(ValueError, r"k has shape .* must be \[2, Skv, Hkv, 8\]", q, k[..., :4], k)
    refused(ValueError, r"v has shape .* must be \[2, 7, 2, Dv\]", q, k, k[:, :6])
    three = jnp.ones((2, 7, 3, 8))
    refused(ValueError, r"q has 4 heads and k 3; ", q, three, three)
    narrow = (q[..., :4], k[..., :4], k)
    refused(ValueError, r"q has heads of 4 columns; it must be a multiple of 8", *narrow)
    refused(ValueError, r"softcap is 0", softcap=0)
    refused(ValueError, r"scale is inf", scale=float("inf"))
    refused(TypeError, r"causal is 'yes'; it must be True or False", causal="yes")
    refused(TypeError, r"window is 3.5; it must be \(left, right\)", window=3.5)
    refused(TypeError, r"window is True; it must be \(left, right\)", window=True)
    refused(TypeError, r"window is \(1, 2, 3\); it must be \(left, right\)", window=(1, 2, 3))
    refused(ValueError, r"window is -1; each side must be at least 0, or None", window=-1)
    refused(ValueError, r"window is \(-1, None\); each side", window=(-1, None))
    refused(ValueError, r"segment_ids is one array, and q has", segment_ids=jnp.ones((2, 5), int))
    refused(TypeError, r"segment_ids\[0\] has dtype float32", segment_ids=(q[..., 0, 0], k))
    refused(ValueError, r"q_lengths has shape \(3,\); it must be \(2,\)", q_lengths=jnp.arange(3))
    refused(ValueError, r"packed text is \[S, H, D\]", q_cumulative=jnp.arange(3))
    refused(ValueError, r"kv_cumulative is given and q_cum", kv_cumulative=jnp.arange(3))
    refused(ValueError, r"sinks has shape \(2,\); it must be \(4,\)", sinks=jnp.ones(2))
    refused(ValueError, r"implementation is 'cudnn'; it must be one of", implementation="cudnn")
    refused(
        ValueError,
        r"q_cumulative and lengths are given",
        q[0],
        k[0],
        k[0],
        q_cumulative=jnp.arange(2),
        kv_lengths=jnp.int32(3),
    )


def lowered(function: Any, platform: str, *arrays: Any) -> str:
    text: str = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    return text


@pytest.mark.only("cpu", "programs for platforms that are not there")
def test_what_runs_on_other_platforms(rng: np.random.Generator) -> None:
    q, k, v, do, _ = arrays(rng, "bfloat16", 1, (2, 1), (256, 256), (128, 128))

    def step(q: Any, k: Any, v: Any, **options: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, **options), q, k, v)
        return o, *vjp(do.astype(o.dtype))

    assert all(target in lowered(step, "cpu", q, k, v) for target in TARGETS)
    # Where there is no cuDNN, kernels of the library; without them, XLA's program.
    loaded = pallas_bridge.info().library
    assert loaded is not None
    has_kernels = any(target.platform == "CUDA" for target in loaded.targets)
    for dtype in ("bfloat16", "float32"):
        text = lowered(step, "cuda", *(x.astype(dtype) for x in (q, k, v)))
        assert ["xentile" in text, "dot_general" in text] == [has_kernels, not has_kernels]
        assert all(target in text for target in TARGETS) == has_kernels
    text = lowered(partial(step, causal=True), "tpu", q, k, v)
    assert text.count("tpu_custom_call") >= 3
    # Of what splash attention lacks, XLA's program.
    for options in ({"q_lengths": jnp.array([3])}, {"window": (1, 1), "segment_ids": None}):
        text = lowered(partial(step, **options), "tpu", q, k, v)
        assert ("tpu_custom_call" in text) == ("window" in options)
    text = lowered(flash_attention, "tpu", q[:, :100], k, v)
    assert "tpu_custom_call" not in text
    info = pallas_bridge.info().details()
    kind = "custom_call: kernels of the library; " if has_kernels else "reference: "
    assert f"flash_attention on cuda: {kind}cuDNN's, by jax.nn.dot_product_attention" in info
    assert "flash_attention on tpu: pallas: kernels in Pallas; JAX's splash attention" in info


@pytest.mark.only("cuda", "a CPU has no cuDNN")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (100, 0)}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn_is_taken(rng: np.random.Generator, dtype: str, options: Any) -> None:
    q, k, v, do, _ = arrays(rng, dtype, 2, (4, 2), (384, 384), (64, 64))

    @jax.jit
    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, **options), q, k, v)
        return o, *vjp(do)

    assert "__cudnn$fmha" in step.lower(q, k, v, do).as_text()
    zeros = jnp.zeros(q.shape[:3], jnp.float32)
    right = wanted(q, k, v, do, zeros, seen_by(384, 384, batch=2, **options))
    del right["lse"]
    close(dict(zip(right, step(q, k, v, do), strict=True)), right, dtype)


@pytest.mark.only("cuda", "a CPU has no cuDNN")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("columns", [64, 96, 128, 256])
def test_passes_run_where_they_are_faster(
    rng: np.random.Generator, dtype: str, columns: int
) -> None:
    if any(device.compute_capability != "9.0" for device in jax.devices()):
        pytest.skip("cuDNN has both passes on other GPUs")
    q, k, v, do, _ = arrays(rng, dtype, 1, (4, 2), (1024, 1024), (columns, columns))

    @jax.jit
    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, causal=True), q, k, v)
        return o, *vjp(do)

    text = step.lower(q, k, v, do).compile().as_text()
    forward, backward = {64: (False, True), 256: (False, False)}.get(columns, (True, True))
    assert (TARGETS[0] in text, TARGETS[1] in text) == (forward, backward)
    assert ("__cudnn$fmhaSoftmax" in text) == (not forward)
    assert ("__cudnn$fmhaSoftmaxBackward" in text) == (not backward)
    zeros = jnp.zeros(q.shape[:3], jnp.float32)
    right = wanted(q, k, v, do, zeros, seen_by(1024, 1024, True))
    del right["lse"]
    close(dict(zip(right, step(q, k, v, do), strict=True)), right, dtype)


@pytest.mark.only("cuda", "programs for CPUs have no other")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_are_taken_where_cudnn_lacks_options(rng: np.random.Generator, dtype: str) -> None:
    q, k, v, do, _ = arrays(rng, dtype, 2, (4, 2), (384, 384), (64, 64))
    segment_ids = np.sort(rng.integers(0, 4, (2, 384)), -1)

    def step(q: Any, k: Any, v: Any, do: Any, **options: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, causal=True, **options), q, k, v)
        return o, *vjp(do)

    zeros, seen = jnp.zeros(q.shape[:3], jnp.float32), seen_by(384, 384, True, batch=2)
    same_segment = segment_ids[:, :, None] == segment_ids[:, None]
    more: dict[str, Any]
    for more, mask in (
        *([({}, seen)] if dtype == "float32" else []),
        ({"softcap": 20.0}, seen),
        ({"sinks": jnp.ones(4)}, seen),
        ({"segment_ids": segment_ids}, seen & same_segment),
        ({"kv_lengths": np.array([384, 384])}, seen),
    ):
        compiled = jax.jit(partial(step, **more)).lower(q, k, v, do).compile()
        assert all(target in compiled.as_text() for target in TARGETS), more
        # No logits in memory.
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 384 * 384 * 4
        options = {name: more[name] for name in ("softcap", "sinks") if name in more}
        right = wanted(q, k, v, do, zeros, mask, **options)
        right = {name: right[name] for name in ("o", "dq", "dk", "dv")}
        close(dict(zip(right, compiled(q, k, v, do), strict=True)), right, dtype)


def gradients(q: Any, k: Any, v: Any, do: Any, **options: Any) -> Any:
    """Returns o, dq, dk and dv of the library's kernels."""
    function = partial(flash_attention, implementation="custom_call", **options)
    o, vjp = jax.vjp(function, q, k, v)
    return o, *vjp(do)


@pytest.mark.only("cuda", "CTAs that compute several blocks")
@pytest.mark.parametrize("columns", [64, 128])
def test_blocks_of_a_walk_have_the_bits_of_blocks_alone(
    rng: np.random.Generator, columns: int
) -> None:
    """A CTA computes all blocks of a head if there are many heads, and one of a single entry."""
    q, k, v, *_ = arrays(rng, "bfloat16", 16, (8, 4), (1000, 1000), (columns, columns))
    texts, others = np.sort(rng.integers(0, 6, (16, 1000)), -1), rng.integers(0, 3, (16, 1000))
    run = jax.jit(
        partial(flash_attention, causal=True, return_lse=True, implementation="custom_call"),
        static_argnames="softcap",
    )
    for softcap, segment_ids in ((None, None), (20.0, texts), (None, texts), (60.0, others)):
        o, lse = run(q, k, v, softcap=softcap, segment_ids=segment_ids)
        for entry in (slice(0, 1), slice(15, 16)):
            ids = None if segment_ids is None else segment_ids[entry]
            alone = run(q[entry], k[entry], v[entry], softcap=softcap, segment_ids=ids)
            np.testing.assert_array_equal(np.float32(o[entry]), np.float32(alone[0]))
            np.testing.assert_array_equal(lse[entry], alone[1])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("softcap", [30.0, 55.0])
def test_logits_at_the_cap(rng: np.random.Generator, softcap: float, sign: int) -> None:
    """Exponentials of the largest and of the smallest logits that there are."""
    q, k, v, *_ = arrays(rng, "bfloat16", 1, (4, 2), (150, 150), (64, 64))
    q, k = sign * 200 * jnp.abs(q), jnp.abs(k)
    run = partial(flash_attention, scale=1.0, causal=True, implementation="custom_call")
    o, lse = run(q, k, v, softcap=softcap, return_lse=True)
    means = np.cumsum(np.float64(v), 1) / np.arange(1, 151)[:, None, None]
    np.testing.assert_allclose(np.float64(o), np.repeat(means, 2, 2), atol=0.02)
    wanted_lse = sign * softcap + np.log(np.arange(1, 151))[:, None] + np.zeros(4)
    np.testing.assert_allclose(lse[0], wanted_lse, atol=1e-4)


@pytest.mark.only("cpu", "programs for platforms that are not there")
def test_layouts_that_programs_for_gpus_ask_for(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays as users have them; where CPUs run it too, as axes stand."""
    loaded = library.require()
    rows = [replace(row, platform="CUDA") for row in loaded.targets if row.platform == "Host"]
    both = replace(loaded, targets=[*loaded.targets, *rows])
    handle = library.attempt()[0]  # type: ignore[index]
    monkeypatch.setattr(library, "attempt", lambda: (handle, both))
    q, k, v, do, _ = arrays(rng, "bfloat16", 2, (4, 2), (16, 24), (8, 16))

    def layouts(function: Any, platforms: Any, *arrays: Any) -> list[str]:
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=platforms).as_text()
        calls = [line for line in text.splitlines() if "custom_call @xentile_flash" in line]
        asks = [("tokens_first = true" in line) for line in calls]
        assert asks == [platforms == ("cuda",)] * 2
        found = [re.findall(r"dense<\[([\d, ]*)\]> : tensor<\dxindex>", line) for line in calls]
        found = [[one.replace(" ", "") for one in side] for side in found]
        q, k, v, ranges, o, lse = found[0]
        # GPUs alone have scratch.
        axes = ranges.count(",") + 2
        scratch = [",".join(map(str, reversed(range(axes))))] if platforms == ("cuda",) else []
        assert found[1] == [q, k, v, ranges, o, lse, o, lse, q, k, v, *scratch]
        return found[0]

    # Innermost first: q, k, v, ranges; o, lse.
    queries, keys, others = "4,2,1,3,0", "3,1,2,0", "3,2,1,0"
    asked = layouts(gradients, ("cuda",), q, k, v, do)
    assert asked == [queries, keys, keys, others, queries, others]
    for platforms in (("cpu",), ("cpu", "cuda")):
        assert {*layouts(gradients, platforms, q, k, v, do)} == {"4,3,2,1,0", "3,2,1,0"}
    mapped = [x[None] for x in (q, k, v, do)]
    q, k, v, do = (x[0] for x in (q, k, v, do))
    asked = layouts(gradients, ("cuda",), q, k, v, do)
    assert asked == ["3,1,0,2", "2,0,1", "2,0,1", "2,1,0", "3,1,0,2", "2,1,0"]
    q, k, v, do = mapped
    asked = layouts(jax.vmap(gradients), ("cuda",), q, k, v, do)
    assert asked[:3] == ["5,3,2,4,1,0", "4,2,3,1,0", "4,2,3,1,0"]


@pytest.mark.only("cuda", "layouts of programs for GPUs")
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
def test_nothing_is_moved_around_the_forward_pass(rng: np.random.Generator, lead: Any) -> None:
    shapes = [(256, 4, 64), (256, 2, 64), (256, 2, 128)]
    given = [draw(rng, "bfloat16", *lead, *shape) for shape in shapes]
    forward = partial(flash_attention, implementation="custom_call", causal=True, softcap=20.0)
    function = jax.vmap(forward) if len(lead) == 2 else forward
    compiled = jax.jit(function).lower(*given).compile()
    text = compiled.as_text()
    moved = r"= bf16\[[^ ]* (transpose|copy|copy-start|fusion)\("
    assert TARGETS[0] in text
    assert not [line for line in text.splitlines() if re.search(moved, line)]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in given)
    zeros = [jnp.zeros(shape, jnp.float32) for shape in ((*q.shape[:3], 128), q.shape[:3])]
    seen = seen_by(256, 256, True, batch=len(q))
    right = wanted(q, k, v, *zeros, seen, softcap=20.0)
    found = {"o": compiled(*given).reshape(zeros[0].shape)}
    close(found, {"o": right["o"]}, "bfloat16")


@pytest.mark.only("cuda", "layouts of programs for GPUs")
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
def test_nothing_is_moved_around_the_backward_pass(rng: np.random.Generator, lead: Any) -> None:
    shapes = [(190, 4, 64), (256, 2, 64), (256, 2, 128), (190, 4, 128)]
    given = [draw(rng, "bfloat16", *lead, *shape) for shape in shapes]
    forward = partial(flash_attention, implementation="custom_call", causal=True, softcap=20.0)
    forward = jax.vmap(forward) if len(lead) == 2 else forward

    def gradients(q: Any, k: Any, v: Any, do: Any) -> Any:
        return jax.vjp(forward, q, k, v)[1](do)

    compiled = jax.jit(gradients).lower(*given).compile()
    text = compiled.as_text()
    moved = r"= bf16\[[^ ]* (transpose|copy|copy-start|fusion)\("
    assert all(target in text for target in TARGETS)
    assert not [line for line in text.splitlines() if re.search(moved, line)]
    q, k, v, do = (x.reshape(-1, *x.shape[-3:]) for x in given)
    dlse = jnp.zeros(q.shape[:3], jnp.float32)
    right = wanted(q, k, v, do, dlse, seen_by(190, 256, True, batch=len(q)), softcap=20.0)
    found = {
        name: one.reshape(like.shape)
        for name, one, like in zip(("dq", "dk", "dv"), compiled(*given), (q, k, v), strict=True)
    }
    close(found, {name: right[name] for name in found}, "bfloat16")


@pytest.mark.only("cpu", "a rule that needs no GPU")
def test_passes_by_cudnn() -> None:
    def passes(tokens: int, columns: int, keys: int | None = None, **options: Any) -> Any:
        q = jax.ShapeDtypeStruct((1, 2, 4, tokens, columns), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, 2, keys or tokens, columns), jnp.bfloat16)
        found = cudnn.passes_by_cudnn(Options(0.5, **options), q, k, k)
        return found.alone, found.forward, found.backward

    every, none = (True, True, True), (False, False, False)
    assert passes(4096, 64, causal=True) == (True, True, False)
    assert passes(4096, 96, causal=True) == passes(8192, 128, causal=True) == none
    assert passes(4096, 128, window=(1024, 0)) == none
    assert passes(65536, 128, causal=True) == passes(512, 128, causal=True) == every
    assert passes(4096, 256, causal=True) == passes(4096, 128) == every
    # A window of nearly all keys is as causal, and kernels of 64 columns were not measured.
    assert passes(4096, 128, causal=True, window=(3000, 0)) == every
    assert passes(4096, 64, causal=True, window=(512, 0)) == every


@pytest.mark.only("cpu", "a stand-in for cuDNN")
@pytest.mark.slow
def test_what_cudnn_is_asked_for(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is taken by XLA's program of the same function, with the same arguments."""
    real: Any = jax.nn.dot_product_attention

    def stand_in(*arrays: Any, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        found: jax.Array = real(*arrays, implementation="xla", **options)
        return found

    q, k, v, *_ = arrays(rng, "bfloat16", 3, (4, 2), (30, 30), (8, 8))
    rows = jnp.moveaxis(q.reshape(3, 30, 2, 2, 8), 1, 3)
    given = (rows, jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2))
    # This process has no cuDNN, which JAX says as it is asked for it.
    assert cudnn.attention_of(Options(0.5), *given) is None
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    for options in (
        Options(0.5),
        Options(0.3, causal=True),
        Options(0.3, causal=True, window=(4, 9)),
        Options(0.3, window=(4, 0)),
        Options(0.3, window=(None, 0)),
    ):
        made = cudnn.attention_of(options, *given)
        assert made is not None, options
        seen = jnp.broadcast_to(ranges(options, 30, 30, None, None), (3, 2, 30, 2))
        right, _ = reference.forward(options, *given, seen)
        np.testing.assert_allclose(exact(made(*given)), exact(right), rtol=0.05, atol=0.02)
    for options in (
        Options(0.5, softcap=3.0),
        Options(0.5, has_sinks=True),
        Options(0.5, has_segments=True),
        Options(0.5, has_lengths=True),
        Options(0.5, gives_lse=True),
        Options(0.5, window=(None, 3)),
        Options(0.5, window=(3, None)),
    ):
        assert cudnn.attention_of(options, *given) is None, options
    few = (given[0][..., 1:, :], *given[1:])
    assert cudnn.attention_of(Options(0.5, causal=True), *few) is None
    assert cudnn.attention_of(Options(0.5), *few) is not None

    @jax.custom_vjp
    def without_odd_gradients(q: Any, k: Any, v: Any) -> Any:
        return real(q, k, v, implementation="xla")

    def refuse_odd(*saved: Any) -> Any:
        if saved[0].shape[1] % 2:
            raise NotImplementedError("Unsupported sequence length")
        return without_odd_gradients(*saved), saved

    without_odd_gradients.defvjp(refuse_odd, lambda saved, _: saved)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **_: without_odd_gradients(*x))
    assert cudnn.attention_of(Options(0.5), *few) is not None
    assert cudnn.attention_of(Options(0.5), *few, has_gradient=True) is None
    assert cudnn.attention_of(Options(0.5), *given, has_gradient=True) is not None

    def step(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(flash_attention, q, k, v)[1](q)

    assert "xentile" in lowered(step, "cuda", q[:, 1:], k, v)
    wide = [x.astype("float32") for x in given]
    assert cudnn.attention_of(Options(0.5), *wide) is None


@pytest.mark.only("cpu", "a stand-in for cuDNN")
def test_cudnn_takes_in_its_backward_pass_what_its_forward_pass_saved(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in's derivative takes what JAX's does: q, k, v, o and statistics of the softmax."""

    def both(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(one, q.shape[2] // one.shape[2], 2) for one in (k, v))
        logits = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(logits, -1)
        o = jnp.einsum("bhst,bthd->bshd", jnp.exp(logits - lse[..., None]), v)
        # Says in a program that this was made.
        return o.astype(q.dtype), jnp.cos(lse)

    @jax.custom_vjp
    def stand_in(q: Any, k: Any, v: Any) -> Any:
        return both(q, k, v)[0]

    def forward(q: Any, k: Any, v: Any) -> Any:
        o, statistics = both(q, k, v)
        return o, (q, k, v, jnp.zeros(0, q.dtype), statistics, o)

    def backward(saved: Any, do: Any) -> Any:
        q, k, v, _, statistics, o = saved
        scaled = do * statistics.swapaxes(1, 2)[..., None].astype(do.dtype)
        return scaled + o, k + scaled[:, :, :2], v + q[:, :, :2]

    stand_in.defvjp(forward, backward)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **_: stand_in(*x))
    q, k, v, do, _ = arrays(rng, "bfloat16", 3, (4, 2), (30, 30), (8, 8))

    def heads_first(x: Any, count: int) -> Any:
        return jnp.moveaxis(x.reshape(3, 30, 2, count, 8), 1, 3)

    given = heads_first(q, 2), heads_first(k, 1)[:, :, 0], heads_first(v, 1)[:, :, 0]
    made = cudnn.attention_of(Options(1.0), *given)
    saving = None if made is None else made.saving(*given)
    assert saving is not None
    o, statistics = saving.forward(*given)
    found = o, *saving.backward(*given, o, statistics, heads_first(do, 2))
    right, vjp = jax.vjp(stand_in, q, k, v)
    for one, other in zip(found, (right, *vjp(do)), strict=True):
        back = jnp.moveaxis(one.reshape(3, -1, 30, 8), 1, 2)
        np.testing.assert_array_equal(exact(back), exact(other))

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(flash_attention, q, k, v)
        return o, *vjp(do)

    assert lowered(step, "cuda", q, k, v, do).count("stablehlo.cosine") == 1


@pytest.mark.only("cpu", "a stand-in for cuDNN")
@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_programs_that_call_cudnn(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """JAX partitions cuDNN's attention by rules that want a program's devices."""
    attend: Any = jax.nn.dot_product_attention
    partitioned = custom_partitioning(lambda q, k, v: attend(q, k, v, is_causal=True))
    rule = "b s h d, b t k d, b t k d -> b s h d"
    partitioned.def_partition(sharding_rule=rule, partition=lambda *_: None)
    counted = []

    @jax.custom_vjp
    def stand_in(q: Any, k: Any, v: Any) -> Any:
        counted.append("forward")
        return partitioned(q, k, v)

    def backward(_: Any, do: Any) -> Any:
        counted.append("backward")
        return do, do[:, :, :2], do[:, :, :2]

    stand_in.defvjp(lambda *x: (stand_in(*x), None), backward)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **_: stand_in(*x))
    q, k, v, do, _ = arrays(rng, "bfloat16", 2, (4, 2), (32, 32), (8, 8))

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, vjp = jax.vjp(partial(flash_attention, causal=True), q, k, v)
        return o, *vjp(do)

    given = [q, k, v, do]
    with contextlib.ExitStack() as stack:
        if kind is not None:
            mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
            stack.enter_context(jax.set_mesh(mesh))
            given = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in given]
        text = lowered(step, "cuda", *given)
    assert {*counted} == {"forward", "backward"}
    assert "xentile" not in text and (kind is None or "CustomSPMDPartitioning" in text)


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.only("cpu", "Pallas' interpreter")
@pytest.mark.parametrize("case", ["causal", "window", "segments", "sinks"])
@pytest.mark.slow
def test_splash_attention(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    from jax.experimental.pallas import tpu as pltpu

    monkeypatch.setattr(pallas, "interpret_params", pltpu.InterpretParams())
    monkeypatch.setattr(on_tpu, "MOST_BLOCK", 128)
    q, k, v, do, dlse = arrays(rng, "float32", 1, (2, 1), (256, 256), (64, 64))
    options: dict[str, Any] = {"causal": True}
    seen, sinks = seen_by(256, 256, True), None
    if case == "window":
        options = {"window": (30, 20), "softcap": 3.0}
        seen = seen_by(256, 256, window=(30, 20))
    elif case == "segments":
        text = np.sort(rng.integers(0, 4, (1, 256)), -1)
        options["segment_ids"] = text
        seen = seen & (text[:, :, None] == text[:, None])
    elif case == "sinks":
        sinks = draw(rng, "float32", 2)

    def function(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return flash_attention(q, k, v, sinks=sinks, implementation="pallas", **options)

    o, vjp = jax.vjp(function, q, k, v, sinks)
    dq, dk, dv, dsinks = vjp(do)
    found = {"o": o, "dq": dq, "dk": dk, "dv": dv}
    if sinks is not None:
        found["dsinks"] = dsinks
    more = {"softcap": options["softcap"]} if "softcap" in options else {}
    right = wanted(q, k, v, do, jnp.zeros_like(dlse), seen, sinks=sinks, **more)
    del right["lse"]
    close(found, right, "float32")
    assert PLATFORM == "cpu"
