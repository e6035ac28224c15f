"""Attention with the signature of `jax.nn.dot_product_attention`."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import meshes
from ..checks import (
    DTYPES,
    as_array,
    as_operand,
    check_flag,
    check_float,
    check_word,
    promoted,
)
from ..flash_attention import cudnn
from ..flash_attention.api import attend
from ..flash_attention.declaration import OPERATION
from ..flash_attention.options import (
    COLUMNS_STEP,
    MOST_COLUMNS,
    Window,
    check_options,
    check_window,
)
from ..info import info
from ..keywords import hinted
from .masks import (
    AttentionMask,
    interval_of_rows,
    is_concrete,
    narrower,
    segments_of_rows,
    window_of_interval,
    window_ranges,
)

IMPLEMENTATIONS_OF_JAX = ("xla", "cudnn")
LOGGER = logging.getLogger("pallas_bridge")
# For GPUs XLA makes no GEMM of a product whose summed extent times the others' sum is less
# (xla_gpu_gemm_rewrite_size_threshold).
SMALLEST_GEMM = 100
_logged: set[str] = set()


def log_once(message: str) -> None:
    """Logs a message as a warning, the first time in this process."""
    if message not in _logged:
        _logged.add(message)
        LOGGER.warning(message)


@dataclass(frozen=True)
class Plan:
    """How a call runs."""

    # Why the kernels cannot express the call; None if they run.
    reason: str | None
    left: int | None = None
    right: int | None = None
    # A mask's first key of each query [B or 1, S], and the one behind its last.
    interval: tuple[Any, Any] | None = None
    segments: tuple[Any, Any] | None = None


@hinted
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | AttentionMask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention with the arguments of `jax.nn.dot_product_attention`, by `flash_attention` kernels.

    Queries and keys begin together, as in `jax.nn`: query i has position i among keys. The kernels
    run without `bias`, and with masks whose values are known during tracing and that let each query
    see one interval of keys (causal, window, packed text) or one segment. Other calls run XLA's
    program of `jax.nn`, and a warning of the logger "pallas_bridge" says why, once for each reason.
    `explain_attention` says the same beforehand.

    A query that sees no key because of lengths or of a `SegmentMask` returns 0; XLA's program
    averages all values unless the query is padding.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H]; N is a multiple of K.
      value: of the shape of key. Dtypes that differ are promoted as by `jnp`.
      bias: added to logits, broadcastable to [B, N, T, S].
      mask: Booleans broadcastable to [B, N, T, S], True where a query sees a key; or `CausalMask`,
        `WindowMask`, `SegmentMask`, or several joined by `&`, which suit traced code.
      scale: of logits; None for 1 / sqrt(H).
      is_causal: whether query i sees keys 0 to i alone.
      query_seq_lengths: integers [B]; queries from there on are padding and return 0.
      key_value_seq_lengths: integers [B]; keys from there on are not seen.
      local_window_size: (left, right), or one integer for both; None on a side for all.
      implementation: None; "xla" or "cudnn" for that of `jax.nn`; or "custom_call" or "reference"
        of `flash_attention`, which is an error if the kernels cannot express the call.
      return_residual: whether to return lse [B, T, N] too, in the dtype of key, without derivative.

    Returns:
      An array of the shape of query; with `return_residual` a tuple of it and lse.

    Raises:
      TypeError: arguments of the wrong type.
      ValueError: shapes that disagree, a negative side of a window (`jax.nn` then hides a query's
        own key from it), or an implementation that cannot run the call.
    """
    given = {"query": query, "key": key, "value": value}
    right = "[B, T, N, H] or [T, N, H]"
    arrays = promoted(*(as_array(name, one, right) for name, one in given.items()))
    for name, one in zip(given, arrays, strict=True):
        check_float(name, one)
        if one.dtype != arrays[0].dtype:
            raise TypeError(f"{name} has dtype {one.dtype} and query {arrays[0].dtype}: cast one")
        if one.ndim not in (3, 4) or one.ndim != arrays[0].ndim:
            raise ValueError(f"{name} has shape {one.shape}; it must be {right}, as the others are")
    q, k, v = arrays
    is_causal = check_flag("is_causal", is_causal)
    return_residual = check_flag("return_residual", return_residual)
    words = (*IMPLEMENTATIONS_OF_JAX, *OPERATION.implementations)
    check_word("implementation", implementation, words, or_none=True)
    window = check_window(local_window_size, "local_window_size")
    bias, mask = check_bias(bias, q, k), check_mask(mask, q, k)
    query_seq_lengths = _check_lengths("query_seq_lengths", query_seq_lengths, q)
    key_value_seq_lengths = _check_lengths("key_value_seq_lengths", key_value_seq_lengths, q)
    plan = make_plan(
        q, k, v, bias, mask, is_causal, query_seq_lengths, key_value_seq_lengths, window
    )
    is_jax = implementation in IMPLEMENTATIONS_OF_JAX
    if not is_jax and plan.reason is not None and implementation is not None:
        raise ValueError(
            f"nn.dot_product_attention: implementation is {implementation!r}, and {plan.reason}; "
            "leave implementation at None or pass 'xla'"
        )
    if is_jax or plan.reason is not None:
        if not is_jax:
            log_once(f"nn.dot_product_attention runs XLA's program: {plan.reason}")
        if isinstance(mask, AttentionMask):
            mask = mask.dense(q.shape[-3], k.shape[-3])
        extra = {"return_residual": True} if return_residual else {}
        return _attention_of_jax(
            q,
            k,
            v,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=_window_of_jax(window, q.shape[-3], k.shape[-3]),
            implementation=implementation if is_jax else "xla",
            **extra,
        )
    for name, one in (("query", q), ("key", k), ("value", v)):
        meshes.check_whole("nn.dot_product_attention", name, one, tokens=-3, columns=-1)
    options, seen = _kernel_call(
        plan, q, k, scale, query_seq_lengths, key_value_seq_lengths, return_residual
    )
    options = replace(options, implementation=implementation)
    o, lse = attend(options, q, k, v, seen, plan.segments)
    if not return_residual:
        return o
    return o, jax.lax.stop_gradient(lse.astype(q.dtype))


@hinted
def explain_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
) -> str:
    """Returns who runs `dot_product_attention` of these arguments, forward and backward, and why.

    Arguments are those of `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`, which
    says of a mask that it is traced. The text is for the default platform of this process.
    """
    dtype = jnp.result_type(query, key, value)
    q, k, v = (jax.ShapeDtypeStruct(one.shape, dtype) for one in (query, key, value))
    window = check_window(local_window_size, "local_window_size")
    if not isinstance(bias, jax.ShapeDtypeStruct):
        bias = check_bias(bias, q, k)
    if not isinstance(mask, jax.ShapeDtypeStruct):
        mask = check_mask(mask, q, k)
    lengths = query_seq_lengths, key_value_seq_lengths
    plan = make_plan(q, k, v, bias, mask, is_causal, *lengths, window)
    if plan.reason is not None:
        xla = "XLA's program (jax.nn.dot_product_attention)"
        return f"forward: {xla}\nbackward: {xla}\nnot the kernel: {plan.reason}"
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    rows = {row.platform: row for row in info().operations["flash_attention"]}
    if platform not in rows or rows[platform].implementation is None:
        return f"refused: flash_attention has nothing that runs on {platform} here"
    row, detail = rows[platform], ""
    runners = 2 * [
        {"reference": "XLA's program", "pallas": "JAX's splash attention"}.get(
            str(row.implementation), "flash_attention kernels"
        )
    ]
    if platform == "cuda" and row.implementation == "custom_call":
        options, _ = _kernel_call(plan, q, k, scale, *lengths, False)
        heads_first = [
            jax.ShapeDtypeStruct((*one.shape[:-3], *axes, one.shape[-3], one.shape[-1]), dtype)
            for one, axes in (
                (q, (k.shape[-2], q.shape[-2] // k.shape[-2])),
                (k, (k.shape[-2],)),
                (v, (k.shape[-2],)),
            )
        ]
        plans: list[cudnn.CudnnPlan] = []

        def make_plans(*arrays: jax.Array) -> None:
            for has_gradient in (False, True):
                plans.append(cudnn.make_plan(options, *arrays, has_gradient=has_gradient))

        jax.eval_shape(make_plans, *heads_first)
        alone, both = plans
        is_cudnn = (alone.is_forward, both.is_backward)
        runners = ["cuDNN" if one else other for one, other in zip(is_cudnn, runners, strict=True)]
        if all(is_cudnn):
            detail = "\nnot the kernel: cuDNN has all of the options"
        elif alone.function is not None:
            detail = "\nnot cuDNN in both passes: measurements say which is faster"
        if both.is_forward != alone.is_forward:
            by = "cuDNN" if both.is_forward else "flash_attention kernels"
            detail += f"\nforward with a derivative: {by}"
    forward, backward = runners
    return f"forward: {forward}\nbackward: {backward}\nplatform: {platform}, {row.reason}{detail}"


def make_plan(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    is_causal: bool,
    q_lengths: Any,
    kv_lengths: Any,
    window: Window,
) -> Plan:
    """Returns how a call runs; q, k and v need only a shape and a dtype."""
    reason = _array_reason(q, k, v, bias)
    if reason is not None:
        return Plan(reason)
    queries, keys = q.shape[-3], k.shape[-3]
    left, right = window
    if is_causal:
        right = narrower(right, 0)
    interval = segments = None
    if isinstance(mask, AttentionMask):
        left, right = narrower(left, mask.left), narrower(right, mask.right)
        if len(mask.segments) > 1:
            return Plan("the mask has several segment masks; merge their ids into one")
        if mask.segments:
            segments = _broadcast_segments(mask.segments[0], q, k)
    elif mask is not None:
        if not is_concrete(mask):
            return Plan("the mask is traced; pass CausalMask(), WindowMask or SegmentMask")
        array = np.asarray(mask)
        if array.ndim == 4 and array.shape[0] not in (1, q.shape[0] if q.ndim == 4 else 1):
            return Plan(f"the mask has shape {array.shape}, which does not fit query {q.shape}")
        found = _of_array(array, queries, keys)
        if found is None:
            return Plan("the mask is neither an interval of keys for each query nor segments")
        interval, segments = found
        if interval is not None:
            sides = window_of_interval(interval[0], interval[1], queries, keys)
            if sides is not None:
                left, right = narrower(left, sides[0]), narrower(right, sides[1])
                interval = None
        if segments is not None:
            segments = _broadcast_segments(segments, q, k)
    low, high = window_ranges(left, right, queries, keys)
    if interval is not None:
        low, high = np.maximum(low, interval[0]), np.minimum(high, interval[1])
    if queries and keys and (low >= high).any():
        return Plan("some query sees no key, which jax.nn defines as the mean of all values")
    return Plan(None, left, right, interval, segments)


def _array_reason(q: Any, k: Any, v: Any, bias: Any) -> str | None:
    if bias is not None:
        return "a bias is given"
    if q.dtype not in DTYPES:
        return f"the dtype is {q.dtype}; kernels take bfloat16, float16 and float32"
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        return "arrays have neither three nor four axes each"
    *batch, keys, kv_heads, columns = k.shape
    if [*q.shape[:-3], q.shape[-1]] != [*batch, columns] or q.shape[-2] % max(kv_heads, 1):
        return f"shapes disagree: {q.shape}, {k.shape}"
    if v.shape != k.shape:
        return f"value has shape {v.shape} and key {k.shape}"
    if 0 in (q.shape[-3], keys, kv_heads, columns):
        return "an array is empty"
    if columns % COLUMNS_STEP or columns > MOST_COLUMNS:
        return f"heads have {columns} columns; kernels take multiples of {COLUMNS_STEP} up to 256"
    if not (isinstance(q.shape[-3], int) and isinstance(keys, int)):
        return "lengths are symbols"
    return None


def _of_array(mask: Any, queries: int, keys: int) -> Any:
    """Returns the interval and the segments of a mask, one of them None; None if it is neither."""
    if mask.dtype != bool or not 2 <= mask.ndim <= 4:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if (mask != mask[:, :1]).any():
        return None
    mask = np.broadcast_to(mask[:, 0], (mask.shape[0], queries, keys))
    interval = interval_of_rows(mask)
    if interval is not None:
        return interval, None
    segments = segments_of_rows(mask)
    return None if segments is None else (None, segments)


def _broadcast_segments(segments: tuple[Any, Any], q: Any, k: Any) -> tuple[Any, Any]:
    """Returns segments with the batch of q, the same array twice if they were so."""

    def whole(ids: Any, like: Any) -> Any:
        shape = like.shape[:-2]
        ids = jnp.asarray(ids)
        if ids.ndim > len(shape) and ids.shape[0] == 1:
            ids = ids[0]
        return jnp.broadcast_to(ids, shape)

    of_queries, of_keys = segments
    found = whole(of_queries, q)
    return found, found if of_keys is of_queries and q.shape[-3] == k.shape[-3] else whole(
        of_keys, k
    )


def _kernel_call(
    plan: Plan, q: Any, k: Any, scale: Any, q_lengths: Any, kv_lengths: Any, gives_lse: bool
) -> tuple[Any, Any]:
    """Returns the options of `attend`, and the keys that each query sees, [S, 2] or [B, S, 2]."""
    queries, keys = q.shape[-3], k.shape[-3]
    is_causal = plan.right == 0
    right = None if is_causal else plan.right
    options = check_options(
        scale=scale, softcap=None, causal=is_causal, window=(plan.left, right), width=q.shape[-1]
    )
    low, high = window_ranges(plan.left, plan.right, queries, keys)
    batched: Any = low, high
    if plan.interval is not None:
        first, end = plan.interval
        batched = np.maximum(low, first), np.minimum(high, end)
    if q.ndim == 3 and batched[0].ndim == 2:
        batched = tuple(one[0] for one in batched)
    if q_lengths is not None or kv_lengths is not None:
        low, high = map(jnp.asarray, batched)
        if kv_lengths is not None:
            ends = _per_query(kv_lengths, q)
            low, high = jnp.minimum(low, ends), jnp.minimum(high, ends)
        if q_lengths is not None:
            is_padding = np.arange(queries) >= _per_query(q_lengths, q)
            low, high = (jnp.where(is_padding, 0, one) for one in (low, high))
        batched = low, jnp.maximum(low, high)
    # Otherwise queries and keys that end together also begin together.
    has_ranges = (
        plan.interval is not None
        or q_lengths is not None
        or kv_lengths is not None
        or (queries != keys and (plan.left, plan.right) != (None, None))
    )
    numpy: Any = np if isinstance(batched[0], np.ndarray) else jnp
    seen = numpy.stack(batched, -1).astype(np.int32)
    options = replace(
        options,
        has_lengths=has_ranges,
        has_segments=plan.segments is not None,
        gives_lse=gives_lse,
        tokens_first=True,
    )
    if has_ranges:
        options = replace(options, causal=False, window=(None, None))
    return options, seen


def _per_query(lengths: Any, q: Any) -> jax.Array:
    """Returns lengths [B, 1], or [1] where q has no batch."""
    array = jnp.asarray(lengths)
    return array.reshape(-1, 1) if q.ndim == 4 else array.reshape(1)


def _attention_of_jax(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    """Returns attention of `jax.nn`, in float32 where XLA does not compile its float16.

    Its program asks for products of float16 that add up in float32. For CPUs XLA refuses all of
    them, for GPUs those that are too small to become GEMMs.
    """

    def attention(*arrays: jax.Array) -> Any:
        of_jax: Any = jax.nn.dot_product_attention
        return of_jax(*arrays, **options)

    def widened(*arrays: jax.Array) -> Any:
        found = attention(*(one.astype(jnp.float32) for one in arrays))
        return jax.tree.map(lambda one: one.astype(jnp.float16), found)

    if q.dtype != jnp.float16:
        return attention(q, k, v)
    queries, keys, columns = q.shape[-3], k.shape[-3], q.shape[-1]
    extents = ((columns, queries, keys), (keys, queries, columns), (queries, keys, columns))
    if any(summed * (rows + others) < SMALLEST_GEMM for summed, rows, others in extents):
        return widened(q, k, v)
    return jax.lax.platform_dependent(q, k, v, cpu=widened, default=attention)


def check_bias(bias: Any, q: Any, k: Any) -> Any:
    """Returns a bias as an array, or None.

    Raises:
        TypeError: it is no array of real numbers.
        ValueError: its shape does not broadcast to [B, N, T, S].
    """
    if bias is None:
        return None
    array = _as_logits("bias", bias, "", q, k)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"bias has dtype {array.dtype}; it must be of real numbers")
    return array


def check_mask(mask: Any, q: Any, k: Any) -> Any:
    """Returns a mask as an array or an `AttentionMask`, or None.

    Raises:
        TypeError: it is neither a mask nor an array of Booleans.
        ValueError: its shape does not broadcast to [B, N, T, S].
    """
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    if isinstance(mask, type) and issubclass(mask, AttentionMask):
        raise TypeError(f"mask is the class {mask.__name__}; call it: {mask.__name__}(..)")
    array = _as_logits("mask", mask, "of Booleans, ", q, k)
    if array.dtype != bool:
        raise TypeError(f"mask has dtype {array.dtype}; it must be bool: mask.astype(bool)")
    return array


def _as_logits(name: str, value: Any, of: str, q: Any, k: Any) -> Any:
    """Returns an array that broadcasts to logits; one on the host stays there."""
    right = f"{of}broadcastable to [B, N, T, S]"
    is_extended = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended)
    array: Any = (as_array if is_extended else as_operand)(name, value, right)
    batch = q.shape[0] if q.ndim == 4 else 1
    wanted = (batch, q.shape[-2], q.shape[-3], k.shape[-3])
    given = (1,) * (4 - array.ndim) + array.shape
    known = all(isinstance(one, int) for one in (*wanted, *given))
    if len(given) != 4 or (
        known and any(one not in (1, most) for one, most in zip(given, wanted, strict=True))
    ):
        raise ValueError(
            f"{name} has shape {array.shape}; it must broadcast to [B, N, T, S], which is {wanted}"
        )
    return array


def _check_lengths(name: str, lengths: Any, q: jax.Array) -> jax.Array | None:
    """Returns lengths in int32, or None.

    Raises:
        TypeError: no integers.
        ValueError: another shape than [B], or of a query without a batch [] or [1].
    """
    if lengths is None:
        return None
    array = as_array(name, lengths, "of integers, [B]")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be integers")
    batch = q.shape[0] if q.ndim == 4 else 1
    if array.shape != (batch,) and (q.ndim == 4 or array.ndim):
        raise ValueError(f"{name} has shape {array.shape}; it must be ({batch},)")
    return array.astype(jnp.int32).reshape(batch)


def _window_of_jax(window: Window, queries: int, keys: int) -> tuple[int, int] | None:
    """Returns the window for `jax.nn`, which knows no side that sees all."""
    if window == (None, None):
        return None
    left, right = (max(queries, keys) if side is None else side for side in window)
    return left, right
