"""Attention: what users call."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import meshes
from ..arrays import match_rank
from ..checks import as_array, check_flag, promoted
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from . import custom_call
from .declaration import OPERATION
from .heads import by_kv_heads, by_tokens, for_kv_heads, lse_by_tokens, sinks_by_kv_heads
from .options import (
    ELSEWHERE,
    SHAPES,
    Options,
    check_arrays,
    check_options,
    check_sinks,
    integers,
    ranges,
    segments,
)
from .segment_ranges import narrow_ranges

Segments = ArrayLike | tuple[ArrayLike, ArrayLike]


class _Keywords(TypedDict, total=False):
    """The options besides the one that decides what is returned."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    segment_ids: Segments | None
    q_lengths: ArrayLike | None
    kv_lengths: ArrayLike | None
    q_cumulative: ArrayLike | None
    kv_cumulative: ArrayLike | None
    sinks: ArrayLike | None
    bias: None
    dropout_rate: float
    deterministic: bool
    implementation: Implementation | None


@overload
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> jax.Array: ...


@overload
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@hinted
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    segment_ids: Segments | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_cumulative: ArrayLike | None = None,
    kv_cumulative: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    bias: None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention whose logits are never all in memory (Dao et al., "FlashAttention", 2022).

        t = scale * (q . k), or softcap * tanh(scale * (q . k) / softcap)
        lse = log(sum(exp(t)))        over the keys that a query sees, and exp(sink) of its head
        o = sum(exp(t - lse) * v)

    Logits, softmax and sums are f32; where q has 16 bits, probabilities may be rounded to its dtype
    before they are multiplied with v. It is differentiable in both modes with respect to q, k, v
    and `sinks`; forward mode is that of XLA's program, with all logits in memory. Kept for the
    backward pass are q, k, v, o and lse. In 16 bits, with heads of up to 128 columns, kernels for
    GPUs take temporary memory there of q's size in float32, heads padded to 64 or 128 columns.

    Queries and keys end together: query i of S has the place i + Skv - S among keys, so that with
    `causal` the last query sees all keys (as in FlashAttention from 2.1 on;
    `jax.nn.dot_product_attention` begins them together). A query that sees no key has an o of 0, an
    lse of -inf (its sink, where it has one), and gradients of 0. What such queries hold, and keys
    and values that no query has in its range, may be anything, NaN too. A NaN elsewhere stays in
    its batch entry and its heads that share keys. There it stays in its segment, where there are
    segments, but for GPUs and TPUs, whose kernels may take it from a key that a query does not see
    to that query; XLA's program ("reference") never does.

    Unless `deterministic` is False, sums have a fixed order: no number of threads, batch entries or
    heads changes a bit. On GPUs the number of batch entries and heads may change last bits of the
    forward pass of 16 queries or fewer, whose keys are split into chunks by it.

    Args:
      q: [B, S, H, D] or [S, H, D], in bfloat16, float16 or float32; D is a multiple of 8 up to 256.
        Dtypes of q, k and v that differ are promoted as by `jnp`.
      k: [B, Skv, Hkv, D] or [Skv, Hkv, D]; H is a multiple of Hkv, and query heads h * H / Hkv and
        following share head h of keys.
      v: [B, Skv, Hkv, Dv] or [Skv, Hkv, Dv]; Dv is as D, and may differ from it.
      causal: whether a query sees nothing behind its own place.
      window: (left, right): the most keys that a query sees before its place and behind; None on a
        side for all. It is FlashAttention's `window_size`, whose -1 is None here. An integer is of
        both sides, as in `jax.nn.dot_product_attention`; Hugging Face's `sliding_window` counts the
        query's own key too, and is (sliding_window - 1, 0).
      softcap: c > 0 replaces t by c * tanh(t / c); None for none.
      scale: of logits; None for 1 / sqrt(D).
      segment_ids: integers [B, S] (or [S]), where queries and keys are of the same tokens, or
        (q_segments, kv_segments), [B, S] and [B, Skv]: a query sees keys of its own segment alone.
      q_lengths: integers [B] (or []): queries from there on are padding, which sees nothing. Where
        these lengths say, queries and keys end together.
      kv_lengths: integers [B] (or []): keys from there on are not there.
      q_cumulative: integers [N + 1] for packed text, of q in [S, H, D]: sequence n has the queries
        from q_cumulative[n] to q_cumulative[n + 1]; those behind the last are padding.
      kv_cumulative: the same of its keys; None where it is `q_cumulative`.
      sinks: [H], a logit for each query head that takes probability and gives no value; any float.
      bias: refused: `jax.nn.dot_product_attention` adds one to logits.
      dropout_rate: refused unless 0: Flax's `flax.nnx.dot_product_attention` has it.
      return_lse: whether to return lse too.
      deterministic: whether kernels of the library give gradients of the same bits in every run. If
        not, those for Hopper add up dq in any order, a few percent faster.
      implementation: "custom_call" (kernels of the library), "pallas" (JAX's splash attention, for
        TPUs), "reference" (the program of XLA, with all logits), or None for the best that the
        platform has, as `pallas_bridge.info()` says.

    Returns:
      o, [B, S, H, Dv] or [S, H, Dv] in the (promoted) dtype of q; with `return_lse` the pair of o
      and lse, [B, S, H] or [S, H] in float32. It merges parts of keys:
      o = sum(o_n * exp(lse_n - lse)).

    Raises:
      TypeError: a dtype that is not taken, or an option of the wrong type, or traced.
      ValueError: shapes that disagree, an option outside its range, or options that exclude each
        other.
      NotImplementedError: a bias or dropout.

    >>> q, k, v = jnp.ones((3, 5, 2, 8)), jnp.ones((3, 7, 1, 8)), jnp.ones((3, 7, 1, 16))
    >>> flash_attention(q, k, v, causal=True).shape
    (3, 5, 2, 16)
    """
    if bias is not None:
        raise NotImplementedError(f"{OPERATION}: bias is given; {ELSEWHERE} adds one to logits")
    if not isinstance(dropout_rate, int | float) or dropout_rate != 0:
        raise NotImplementedError(
            f"{OPERATION}: dropout_rate is {dropout_rate!r}; it must be 0 "
            "(flax.nnx.dot_product_attention drops probabilities)"
        )
    choose(OPERATION, implementation)
    q, k, v = (as_array(name, one, SHAPES[name]) for name, one in (("q", q), ("k", k), ("v", v)))
    q, k, v = promoted(q, k, v)
    check_arrays(q, k, v)
    for name, one in (("q", q), ("k", k), ("v", v)):
        meshes.check_whole(OPERATION, name, one, tokens=-3, columns=-1)
    options = check_options(
        scale=scale, softcap=softcap, causal=causal, window=window, width=q.shape[-1]
    )
    gives_lse = check_flag("return_lse", return_lse)
    *batch, queries, _, _ = q.shape
    keys = k.shape[-3]
    lengths = _lengths(batch, q_lengths, kv_lengths)
    cumulative = _cumulative(batch, q_cumulative, kv_cumulative)
    if lengths is not None and cumulative is not None:
        raise ValueError("q_cumulative and lengths are given; each says where sequences end")
    options = replace(
        options,
        has_lengths=lengths is not None or cumulative is not None,
        has_segments=segment_ids is not None,
        has_sinks=sinks is not None,
        gives_lse=gives_lse,
        tokens_first=True,
        deterministic=check_flag("deterministic", deterministic),
        implementation=implementation,
    )
    seen = ranges(options, queries, keys, lengths, cumulative)
    o, lse = attend(options, q, k, v, seen, segment_ids, sinks)
    return (o, lse) if gives_lse else o


def attend(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Any,
    segment_ids: Segments | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns o [.., S, H, Dv] and lse [.., S, H] of arrays and options that are checked.

    lse is for use with `options.gives_lse` alone: cuDNN computes none.

    `seen` is [S, 2] or [B, S, 2]: the first key that a query sees, and the one behind its last.
    Unless `options.has_lengths`, it is what `ranges` makes of `causal` and `window`.
    """
    *batch, queries, _, _ = q.shape
    keys = k.shape[-3]
    arrays = by_kv_heads(q, k, v)
    expand = partial(for_kv_heads, k=arrays[1])
    if segment_ids is None:
        arrays.append(expand(seen, 2))
    else:
        of_queries, of_keys, is_own = segments(segment_ids, (*batch, queries), (*batch, keys))
        options = replace(options, is_own_segment=is_own)
        if options.implementation != "reference":
            zeros = jnp.zeros_like(of_queries)[..., None]
            seen = match_rank(jnp.asarray(seen), zeros) + zeros
            found = narrow_ranges(seen, of_queries, of_keys, is_own=is_own)
            seen, of_queries, of_keys = found
        arrays += [expand(seen, 2), expand(of_queries, 1), expand(of_keys, 1)]
    if sinks is not None:
        arrays.append(sinks_by_kv_heads(check_sinks(sinks, q.shape[-2]), arrays[1]))
    o, lse = custom_call.attention(options, *arrays)
    return by_tokens(o), lse_by_tokens(lse) if options.gives_lse else lse


def _lengths(batch: list[int], q_lengths: Any, kv_lengths: Any) -> Any:
    if q_lengths is None and kv_lengths is None:
        return None
    return tuple(
        None if value is None else integers(name, value, tuple(batch))
        for name, value in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths))
    )


def _cumulative(batch: list[int], of_queries: Any, of_keys: Any) -> Any:
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None:
        raise ValueError("kv_cumulative is given and q_cumulative is not; it must be, too")
    if batch:
        raise ValueError("q_cumulative is given and q is [B, S, H, D]; packed text is [S, H, D]")
    shape = jnp.shape(of_queries)
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"q_cumulative has shape {shape}; it must be [N + 1], of N sequences")
    found = integers("q_cumulative", of_queries, shape)
    return found, found if of_keys is None else integers("kv_cumulative", of_keys, shape)
