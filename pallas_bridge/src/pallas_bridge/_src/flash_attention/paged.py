"""Attention over keys and values in pages of a pool, as serving engines keep them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import linear, one_program
from ..arrays import match_rank
from ..bound import Bound
from ..checks import as_array, check_dtype, check_flag
from ..custom_call import bind, declared_call, vary_alike
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from ..targets import declared
from . import reference
from .declaration import OPERATION
from .decoding import MOST_QUERIES, chunk_keys
from .options import (
    COLUMNS_STEP,
    MOST_COLUMNS,
    Options,
    check_options,
    check_sinks,
    integers,
    ranges,
)

PAGED = "xentile_flash_attention_paged"
NAMES = ("q", "k_pages", "v_pages", "o", "lse")
Q, K_PAGES, V_PAGES, OUT, LSE = declared(PAGED).dims(*NAMES, chunk_pages=1)
# Heads lie behind these axes, as users have them.
TOKENS_FIRST = ((Q, "B S"), (K_PAGES, "P T"), (V_PAGES, "P T"), (OUT, "B S"), (LSE, "B"))


@hinted
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of new tokens over keys and values in pages of a pool; `flash_attention` of these.

    Text b has kv_lengths[b] keys, its S new tokens are the last of them, and key p is
    k_pages[block_tables[b, p // T], p % T]. Entries of `block_tables` behind the last key are not
    read. Kernels for NVIDIA GPUs read the keys that a text has, in chunks that all of the GPU
    shares out, and merge these in a fixed order: what other texts hold changes no bit, but their
    number may, as chunks are longer for more of them. Kernels take bfloat16 and float16, S up to 16
    and a power of two of T. XLA's program, which gathers the pages of every text first, runs for
    the rest and on other platforms. There is no derivative but that of implementation="reference".

    Where a mesh shards heads, all arrays of heads must be sharded alike; shard B by
    `jax.shard_map`. `jax.vmap` joins a mapped axis with B if the pools are not mapped, and else
    runs one call after another.

    Args:
      q: [B, S, H, D], in bfloat16, float16 or float32; D is a multiple of 8 up to 256.
      k_pages: [P, T, Hkv, D] in the dtype of q; H is a multiple of Hkv.
      v_pages: [P, T, Hkv, Dv] in the dtype of q.
      block_tables: integers [B, N], the pages of each text in order.
      kv_lengths: integers [B], up to N * T.
      causal: whether a new token sees none behind itself.
      window: (left, right), as of `flash_attention`.
      softcap: c > 0 replaces a logit t by c * tanh(t / c); None for none.
      scale: of logits; None for 1 / sqrt(D).
      sinks: [H], a logit for each query head that takes probability and gives no value.
      return_lse: whether to return lse too.
      implementation: "custom_call" (kernels of the library), "reference" (XLA's program), or None
        for the best that the platform has.

    Returns:
      o [B, S, H, Dv] in the dtype of q; with `return_lse` the pair of o and lse [B, S, H] in
      float32.

    Raises:
      TypeError: a dtype that is not taken, or an option of the wrong type, or traced.
      ValueError: shapes that disagree, an option outside its range, or arrays for which
        "custom_call" has no kernel.
      NotImplementedError: a derivative, or "custom_call" where there are no such kernels.

    >>> pool = jnp.ones((6, 4, 2, 8))
    >>> tables, lengths = jnp.array([[3, 0], [5, 1]]), jnp.array([7, 2])
    >>> paged_attention(jnp.ones((2, 1, 4, 8)), pool, pool, tables, lengths).shape
    (2, 1, 4, 8)
    """
    choose(OPERATION, implementation)
    if implementation == "pallas":
        raise ValueError(
            "paged_attention: implementation is 'pallas'; it must be 'custom_call', 'reference' or "
            "None"
        )
    q = as_array("q", q, "[B, S, H, D]")
    k_pages = as_array("k_pages", k_pages, "[P, T, Hkv, D]")
    v_pages = as_array("v_pages", v_pages, "[P, T, Hkv, Dv]")
    _check_arrays(q, k_pages, v_pages)
    options = check_options(
        scale=scale, softcap=softcap, causal=causal, window=window, width=q.shape[-1]
    )
    gives_lse = check_flag("return_lse", return_lse)
    batch, queries, heads, _ = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    tables = as_array("block_tables", block_tables, f"of integers, of shape ({batch}, N)")
    tables = integers("block_tables", tables, (batch, *tables.shape[1:][:1]))
    lengths = integers("kv_lengths", kv_lengths, (batch,))
    options = replace(
        options,
        has_lengths=True,
        has_sinks=sinks is not None,
        gives_lse=gives_lse,
        tokens_first=True,
        implementation=implementation,
    )
    reason = _missing(q, v_pages, tables, page_size)
    if reason is not None:
        if implementation == "custom_call":
            raise ValueError(f"paged_attention: no kernel: {reason}; leave implementation at None")
        options = replace(options, implementation="reference")
    seen = ranges(options, queries, tables.shape[1] * page_size, (None, lengths), None)
    arrays = [q, k_pages, v_pages, tables, seen]
    if sinks is not None:
        arrays.append(check_sinks(sinks, heads).reshape(kv_heads, -1))
    run = Bound(_attend, options) if implementation == "reference" else Bound(_underived, options)
    results = (0, 1) if gives_lse else (0,)
    o, lse = one_program.run(run, *vary_alike(arrays), results=results)
    return (o, lse) if gives_lse else o


def _check_arrays(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
    for name, array in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        check_dtype(name, array)
        # Promoting a pool would copy all of it.
        if array.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be that of q, {q.dtype}")
        if array.ndim != 4:
            right = "[B, S, H, D]" if name == "q" else "[P, T, Hkv, D]"
            raise ValueError(f"{name} has shape {array.shape}; it must be {right}")
    if k_pages.shape[-1] != q.shape[-1] or v_pages.shape[:-1] != k_pages.shape[:-1]:
        raise ValueError(
            f"k_pages has shape {k_pages.shape} and v_pages {v_pages.shape}; they must be "
            f"[P, T, Hkv, {q.shape[-1]}] and [P, T, Hkv, Dv], as q has {q.shape}"
        )
    if k_pages.shape[2] == 0 or q.shape[2] % k_pages.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k_pages {k_pages.shape[2]}; those of q must be a "
            "multiple of those of k_pages"
        )
    for name, array in (("q", q), ("v_pages", v_pages)):
        columns = array.shape[-1]
        if columns == 0 or columns % COLUMNS_STEP or columns > MOST_COLUMNS:
            raise ValueError(
                f"{name} has heads of {columns} columns; it must be a multiple of {COLUMNS_STEP} "
                f"up to {MOST_COLUMNS}"
            )


def _missing(q: Any, v_pages: Any, tables: Any, page_size: Any) -> str | None:
    """Returns why kernels do not take arrays, or None if they do."""
    extents = (*q.shape, *v_pages.shape, *tables.shape)
    if not all(isinstance(one, int) for one in extents):
        return "extents are symbols"
    if q.dtype == jnp.float32:
        return "q has dtype float32; kernels take bfloat16 and float16"
    if q.shape[1] > MOST_QUERIES:
        return f"q has {q.shape[1]} tokens; kernels take up to {MOST_QUERIES}"
    if page_size & (page_size - 1):
        return f"pages have {page_size} positions; kernels take powers of two"
    if 0 in extents:
        return "an array is empty"
    return None


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _underived(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _mapped(options)(*arrays)


def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    if any(linear.given(tangent) is not None for tangent in tangents):
        raise NotImplementedError(
            'paged_attention has no derivative; implementation="reference" has one, and '
            "flash_attention of keys that are not in pages"
        )
    o, lse = _mapped(options)(*primals)
    return (o, lse), (jnp.zeros_like(o), jnp.zeros_like(lse))


_underived.defjvp(_jvp, symbolic_zeros=True)


def _mapped(options: Options) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns `_attend` with `vmap` over new tokens, of pools that are not mapped, as one call."""
    function: Any = jax.custom_batching.custom_vmap(Bound(_attend, options))

    def rule(size: int, is_mapped: Any, *arrays: jax.Array) -> Any:
        _, k_mapped, v_mapped, *rest = is_mapped
        if k_mapped or v_mapped or any(rest[2:]):
            given = [one for one, is_one in zip(arrays, is_mapped, strict=True) if is_one]

            def one(mapped: Any) -> Any:
                left = list(mapped)
                return function(
                    *(
                        left.pop(0) if is_one else x
                        for x, is_one in zip(arrays, is_mapped, strict=True)
                    )
                )

            return jax.lax.map(one, given), (True, True)
        of_texts = [True, False, False, True, True, *[False] * len(rest[2:])]
        joined = [
            _join(array, size, is_one) if has_texts else array
            for array, is_one, has_texts in zip(arrays, is_mapped, of_texts, strict=True)
        ]
        found = function(*joined)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in found), (True, True)

    function.def_vmap(rule)
    result: Callable[..., tuple[jax.Array, jax.Array]] = function
    return result


def _join(array: jax.Array, size: int, is_mapped: bool) -> jax.Array:
    """Returns an array [B, ..] or [size, B, ..] as [size * B, ..]."""
    if not is_mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(-1, *array.shape[2:])


def _attend(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o [B, S, H, Dv] and lse [B, S, H] of arrays and options that are checked."""
    q, k_pages, v_pages, tables, *more = arrays
    batch, queries, heads, width = q.shape
    _, page_size, kv_heads, value_width = v_pages.shape
    rows = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
    operands = [
        jnp.transpose(rows, (2, 0, 3, 1, 4)),
        jnp.moveaxis(k_pages, 2, 0),
        jnp.moveaxis(v_pages, 2, 0),
        tables,
        *more,
    ]
    if options.implementation == "reference":
        o, lse = _dense(options, *operands)
    else:
        chunk = chunk_keys(
            batch * kv_heads, heads // kv_heads * queries, tables.shape[1] * page_size
        )
        attributes = {
            "scale": options.scale,
            "softcap": options.softcap,
            "sinks": options.has_sinks,
            "chunk_pages": max(chunk // page_size, 1),
        }
        call = declared_call(
            OPERATION,
            PAGED,
            attributes,
            outward=TOKENS_FIRST,
            implementation=options.implementation,
            dense=Bound(_dense, options),
            dense_on=("cpu",),
        )
        o, lse = bind(call, *operands, keep=(0, 1))
    o = jnp.transpose(o, (1, 3, 0, 2, 4)).reshape(batch, queries, heads, value_width)
    return o, jnp.transpose(lse, (1, 3, 0, 2)).reshape(batch, queries, heads)


def _dense(options: Options, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o [Hkv, B, G, S, Dv] and lse [Hkv, B, G, S], by XLA."""
    q, k_pages, v_pages, tables, seen, *sinks = operands
    keys = tables.shape[1] * k_pages.shape[2]
    # Entries behind the last key may be anything; what they gather is not seen.
    pages = jnp.clip(tables, 0, max(k_pages.shape[1] - 1, 0))

    def gathered(pool: jax.Array) -> jax.Array:
        found = jnp.take(pool, pages, axis=1)
        return found.reshape(*found.shape[:2], keys, pool.shape[-1])

    k, v = gathered(k_pages), gathered(v_pages)
    zeros = jnp.zeros(q.shape[:2], jnp.int32)[..., None, None]
    arrays = [q, k, v, match_rank(seen, zeros) + zeros]
    if sinks:
        arrays.append(sinks[0][:, None] + jnp.zeros((*q.shape[:2], 1), jnp.float32))
    return reference.forward(options, *arrays)
