"""Attention of few queries over many keys, contiguous and in pages."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.flash_attention.decoding import DECODE, chunk_keys
from pallas_bridge._src.flash_attention.paged import PAGED

from pallas_bridge import flash_attention, paged_attention

ON_CUDA = pytest.mark.only("cuda", "kernels for GPUs")


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def expected(
    q: Any, k: Any, v: Any, lengths: Any, causal: bool = True, window: Any = None, **more: Any
) -> tuple[Any, Any]:
    """Returns o and lse in float64, of the first `lengths` keys of each text."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _, queries, heads, width = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    place = np.arange(queries) + np.asarray(lengths)[:, None] - queries
    seen = np.arange(keys) < np.asarray(lengths)[:, None, None]
    if causal:
        seen = seen & (np.arange(keys) <= place[..., None])
    if window is not None:
        seen = seen & (np.arange(keys) >= place[..., None] - window[0])
    t = np.einsum("bshd,bkhd->bhsk", q, k) * more.get("scale", width**-0.5)
    if (cap := more.get("softcap")) is not None:
        t = cap * np.tanh(t / cap)
    t = np.where(seen[:, None], t, -np.inf)
    sinks = np.asarray(more.get("sinks", np.full(heads, -np.inf)), np.float64)
    most = np.maximum(t.max(-1), sinks[:, None])
    most = np.where(np.isneginf(most), 0, most)
    total = np.exp(t - most[..., None]).sum(-1) + np.exp(sinks[:, None] - most)
    with np.errstate(divide="ignore"):
        lse = most + np.log(total)
    p = np.exp(t - np.where(np.isneginf(lse), 0, lse)[..., None])
    return np.einsum("bhsk,bkhe->bshe", p, v), np.moveaxis(lse, 1, 2)


def check(found: Any, right: Any, dtype: str) -> None:
    o, lse = (np.asarray(x, np.float64) for x in found)
    error = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}[dtype]
    assert np.linalg.norm(o - right[0]) <= error * max(np.linalg.norm(right[0]), 1e-30)
    np.testing.assert_allclose(lse, right[1], atol=1e-4, rtol=1e-5)


def paged(rng: np.random.Generator, x: jax.Array, page_size: int, lengths: Any) -> Any:
    """Returns a function to pools of pages in another order, and their block tables."""
    batch, keys = x.shape[:2]
    pages = -(-keys // page_size)
    tables = rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages)

    def pool(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, pages * page_size - keys), (0, 0), (0, 0)])
        rows = padded.reshape(batch * pages, page_size, *x.shape[2:])
        # Pages that no text has, NaN for all that anyone may see of them.
        empty = jnp.full((batch * pages + 2, *rows.shape[1:]), jnp.nan, x.dtype)
        return empty.at[tables.reshape(-1)].set(rows)

    used = np.arange(pages) * page_size < np.asarray(lengths)[:, None]
    return pool, jnp.asarray(np.where(used, tables, -77), jnp.int32)


CASES: list[Any] = [
    # tokens, heads, keys, widths, options
    (1, (8, 2), 700, (128, 128), {}),
    (1, (4, 4), 129, (64, 64), {"sinks": True}),
    (4, (8, 2), 700, (128, 64), {"window": (150, 0)}),
    (5, (2, 1), 300, (72, 8), {"softcap": 1.5, "sinks": True}),
    (16, (8, 1), 333, (64, 64), {"scale": -0.1}),
    (3, (6, 2), 520, (256, 256), {"causal": False}),
    (16, (8, 2), 200, (192, 128), {"sinks": True}),
    (2, (2, 1), 40, (96, 96), {}),
]


def problem(rng: np.random.Generator, case: Any, dtype: str) -> Any:
    """Returns q, k, v, lengths and options of five texts, of which one has no key."""
    tokens, (heads, kv_heads), keys, (width, value_width), options = case
    q = draw(rng, dtype, 5, tokens, heads, width)
    k = draw(rng, dtype, 5, keys, kv_heads, width)
    v = draw(rng, dtype, 5, keys, kv_heads, value_width)
    lengths = np.array([keys, 0, keys // 2 + 1, min(tokens, keys), keys - 1], np.int32)
    if options.get("sinks"):
        options = {**options, "sinks": jnp.asarray(rng.normal(size=heads), jnp.float32)}
    return q, k, v, lengths, {"causal": True, **options}


EACH = [
    pytest.param(None, "bfloat16", id="bfloat16"),
    pytest.param(None, "float16", id="float16"),
    pytest.param(None, "float32", id="float32"),
    pytest.param("reference", "bfloat16", id="reference"),
]


@pytest.mark.parametrize(("implementation", "dtype"), EACH)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(rng: np.random.Generator, case: Any, dtype: str, implementation: Any) -> None:
    q, k, v, lengths, options = problem(rng, case, dtype)
    right = expected(q, k, v, lengths, **options)
    run = partial(flash_attention, return_lse=True, implementation=implementation, **options)
    found = jax.jit(lambda q, k, v, n: run(q, k, v, kv_lengths=n))(q, k, v, lengths)
    check(found, right, dtype)


@pytest.mark.parametrize(("implementation", "dtype"), EACH)
@pytest.mark.parametrize("page_size", [1, 16, 5, 128])
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_pages(
    rng: np.random.Generator, case: Any, page_size: int, dtype: str, implementation: Any
) -> None:
    q, k, v, lengths, options = problem(rng, case, dtype)
    pool, tables = paged(rng, k, page_size, lengths)
    right = expected(q, k, v, lengths, **options)
    run = partial(paged_attention, return_lse=True, implementation=implementation, **options)
    check(jax.jit(run)(q, pool(k), pool(v), tables, lengths), right, dtype)


def test_what_lies_behind_lengths_is_not_read(rng: np.random.Generator) -> None:
    q, k, v, lengths, options = problem(rng, CASES[0], "bfloat16")
    behind = (np.arange(k.shape[1]) >= lengths[:, None])[..., None, None]
    k_nan, v_nan = (jnp.where(behind, jnp.nan, x).astype(x.dtype) for x in (k, v))
    found = flash_attention(q, k_nan, v_nan, kv_lengths=lengths, return_lse=True, **options)
    check(found, expected(q, k, v, lengths, **options), "bfloat16")


@pytest.mark.parametrize("is_paged", [False, True])
def test_bits_do_not_depend_on_other_texts(rng: np.random.Generator, is_paged: bool) -> None:
    q, k, v, lengths, options = problem(rng, CASES[0], "bfloat16")
    others = np.array([1, 700, 700, 300, 699])

    def run(lengths: Any) -> Any:
        if not is_paged:
            return flash_attention(q, k, v, kv_lengths=lengths, **options)
        pool, tables = paged(np.random.default_rng(3), k, 16, np.full(5, 700))
        return paged_attention(q, pool(k), pool(v), tables, lengths, **options)

    first = np.asarray(run(lengths)).view(np.uint16)
    second = np.asarray(run(np.where(np.arange(5) == 4, lengths, others))).view(np.uint16)
    assert (first[4] == second[4]).all()
    assert (np.asarray(run(lengths)).view(np.uint16) == first).all()


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.slow
def test_vmap(rng: np.random.Generator, axis: int) -> None:
    q, k, v, lengths, _ = problem(rng, CASES[2], "bfloat16")
    many = jnp.stack([q, -q, 2 * q], axis)
    all_lengths = np.stack([lengths, lengths[::-1], lengths // 2 + 5])
    contiguous = jax.vmap(
        lambda q, n: flash_attention(q, k, v, causal=True, kv_lengths=n), (axis, 0)
    )(many, all_lengths)
    pool, tables = paged(rng, k, 16, np.full(5, k.shape[1]))
    pools = pool(k), pool(v)
    in_pages = jax.vmap(lambda q, n: paged_attention(q, *pools, tables, n), (axis, 0))
    both = jax.vmap(lambda q, n, k: paged_attention(q, k, pools[1], tables, n), (axis, 0, 0))
    pools_of_k = jnp.stack([pools[0]] * 3)
    for index, one in enumerate((q, -q, 2 * q)):
        right, _ = expected(one, k, v, all_lengths[index])
        for found in (
            contiguous,
            in_pages(many, all_lengths),
            both(many, all_lengths, pools_of_k),
        ):
            error = np.linalg.norm(np.asarray(found[index], np.float64) - right)
            assert error <= 1.5e-2 * np.linalg.norm(right)


@pytest.mark.devices(2)
def test_heads_over_a_mesh(rng: np.random.Generator) -> None:
    q, k, v, lengths, _ = problem(rng, CASES[0], "bfloat16")
    pool, tables = paged(rng, k, 16, lengths)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.NamedSharding(mesh, jax.P(None, None, "x"))
    right, _ = expected(q, k, v, lengths)
    given = [jax.device_put(x, heads) for x in (q, k, v, pool(k), pool(v))]
    for function, arrays, more in (
        (lambda q, k, v, n: flash_attention(q, k, v, causal=True, kv_lengths=n), given[:3], ()),
        (paged_attention, [given[0], *given[3:]], (tables,)),
    ):
        compiled = jax.jit(function, out_shardings=heads).lower(*arrays, *more, lengths).compile()
        assert not re.search(r"all-(gather|to-all|reduce)", compiled.as_text())
        found = np.asarray(compiled(*arrays, *more, lengths), np.float64)
        assert np.linalg.norm(found - right) <= 1.5e-2 * np.linalg.norm(right)


def test_derivatives(rng: np.random.Generator) -> None:
    q, k, v, lengths, _ = problem(rng, CASES[0], "bfloat16")

    def contiguous(q: Any, implementation: Any) -> Any:
        o = flash_attention(q, k, v, causal=True, kv_lengths=lengths, implementation=implementation)
        return jnp.square(o.astype(jnp.float32)).sum()

    found, right = (
        jax.jit(jax.grad(partial(contiguous, implementation=one)))(q) for one in (None, "reference")
    )
    error = np.linalg.norm(np.asarray(found - right, np.float64))
    assert error <= 3e-2 * np.linalg.norm(np.asarray(right, np.float64))
    pool, tables = paged(rng, k, 16, lengths)

    def in_pages(q: Any, implementation: Any = None) -> Any:
        run = partial(paged_attention, implementation=implementation)
        return run(q, pool(k), pool(v), tables, lengths).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(partial(in_pages, implementation="reference")))
    assert gradient(q).shape == q.shape
    with pytest.raises(NotImplementedError, match="paged_attention has no derivative"):
        jax.grad(in_pages)(q)


@ON_CUDA
def test_kernels_are_taken_and_nothing_is_moved(rng: np.random.Generator) -> None:
    q, k, v, lengths, _ = problem(rng, CASES[0], "bfloat16")
    pool, tables = paged(rng, k, 16, lengths)

    def contiguous(q: Any, k: Any, v: Any, n: Any) -> Any:
        return flash_attention(q, k, v, causal=True, kv_lengths=n)

    for function, arrays, target in (
        (contiguous, (q, k, v, lengths), DECODE),
        (paged_attention, (q, pool(k), pool(v), tables, lengths), PAGED),
    ):
        text = jax.jit(function).lower(*arrays).compile().as_text()
        assert target in text
        moved = r"= bf16\[[^ ]* (transpose|copy|copy-start|fusion)\("
        assert not [line for line in text.splitlines() if re.search(moved, line)], text
    # Training keeps the other kernels.
    trained = jax.jit(jax.grad(lambda q: contiguous(q, k, v, lengths).astype(jnp.float32).sum()))
    assert DECODE not in trained.lower(q).compile().as_text()


def test_chunks_are_enough_for_a_gpu() -> None:
    assert [chunk_keys(8, 4, keys) for keys in (100, 1024, 4096, 32768)] == [64, 64, 128, 1024]
    assert [chunk_keys(512, 4, keys) for keys in (1024, 32768)] == [2048, 4096]
    assert chunk_keys(0, 4, 1000) == chunk_keys(1, 64, 1000) == 64
    assert chunk_keys(8, 65, 32768) == 2048


def test_what_is_wrong_is_named(rng: np.random.Generator) -> None:
    q, pool = jnp.ones((2, 1, 4, 8), jnp.bfloat16), jnp.ones((6, 4, 2, 8), jnp.bfloat16)
    tables, lengths = jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    right = {"q": q, "k_pages": pool, "v_pages": pool, "block_tables": tables}
    for change, error, message in (
        ({"q": q[0]}, ValueError, r"q has shape \(1, 4, 8\); it must be \[B, S, H, D\]"),
        ({"k_pages": pool[..., :0]}, ValueError, r"they must be \[P, T, Hkv, 8\]"),
        ({"v_pages": pool[:, :2]}, ValueError, "they must be"),
        ({"q": q[:, :, :3]}, ValueError, "q has 3 heads and k_pages 2"),
        ({"q": q.astype(jnp.float16)}, TypeError, "it must be that of q, float16"),
        ({"block_tables": tables[0]}, ValueError, r"block_tables has shape \(3,\)"),
        ({"block_tables": tables * 1.5}, TypeError, "it must be of integers"),
        ({"kv_lengths": lengths[:1]}, ValueError, r"kv_lengths has shape \(1,\)"),
        ({"implementation": "pallas"}, ValueError, "implementation is 'pallas'"),
        ({"sinks": jnp.ones(3)}, ValueError, r"sinks has shape \(3,\)"),
    ):
        with pytest.raises(error, match=message):
            paged_attention(**{**right, "kv_lengths": lengths, **change})
    pages_of_3 = {"k_pages": pool[:, :3], "v_pages": pool[:, :3], "implementation": "custom_call"}
    with pytest.raises(ValueError, match="pages have 3 positions; kernels take powers of two"):
        paged_attention(**{**right, "kv_lengths": lengths, **pages_of_3})
