"""Attention masks as objects, and which masks the kernels of `flash_attention` can express."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..flash_attention.options import check_window


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """A mask that kernels know; `a & b` is the mask of what both let through.

    Query i sees the keys from i - left to i + right, None for all, as far as they have its segment.
    """

    left: int | None = None
    right: int | None = None
    # (q_segments, kv_segments), each [B, S] or [S], of each segment mask.
    segments: tuple[tuple[Any, Any], ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether both have equal sides, and segments of the same arrays."""
        return isinstance(other, AttentionMask) and self._key() == other._key()

    def __hash__(self) -> int:
        """Has `jax.jit` compile once for equal masks that are static arguments."""
        return hash(self._key())

    def _key(self) -> tuple[int | None, int | None, tuple[int, ...]]:
        # Arrays are not hashable, and both masks keep theirs alive.
        return self.left, self.right, tuple(id(one) for pair in self.segments for one in pair)

    def __and__(self, other: Any) -> "AttentionMask":
        """Returns the mask of what both masks let through."""
        if not isinstance(other, AttentionMask):
            return NotImplemented
        return AttentionMask(
            narrower(self.left, other.left),
            narrower(self.right, other.right),
            (*self.segments, *other.segments),
        )

    def dense(self, queries: int, keys: int) -> jax.Array:
        """Returns the mask as Booleans [B or 1, 1, queries, keys]."""
        low, high = window_ranges(self.left, self.right, queries, keys)
        key = np.arange(keys)
        mask = jnp.asarray((low[:, None] <= key) & (key < high[:, None]))[None, None]
        for q_ids, kv_ids in self.segments:
            of_queries, of_keys = jnp.asarray(q_ids), jnp.asarray(kv_ids)
            same = of_queries[..., :, None] == of_keys[..., None, :]
            mask &= same.reshape(-1, 1, queries, keys)
        return mask


class CausalMask(AttentionMask):
    """Query i sees keys 0 to i."""

    def __init__(self) -> None:
        """Takes no options."""
        super().__init__(right=0)


class WindowMask(AttentionMask):
    """Query i sees keys i - left to i + right; None for all on a side."""

    def __init__(self, left: int | None, right: int | None) -> None:
        """Checks both sides.

        Raises:
            TypeError: a side that is neither an integer nor None.
            ValueError: a negative side.
        """
        super().__init__(*check_window((left, right)))


class SegmentMask(AttentionMask):
    """A query sees the keys of its own segment."""

    def __init__(self, query_ids: Any, kv_ids: Any = None) -> None:
        """Takes integers [B, S] or [S]; `kv_ids` is None if queries and keys have the same ids."""
        super().__init__(segments=((query_ids, query_ids if kv_ids is None else kv_ids),))


def narrower(one: int | None, other: int | None) -> int | None:
    """Returns the smaller of two sides of windows, of which None is the widest."""
    return min((side for side in (one, other) if side is not None), default=None)


def window_ranges(left: int | None, right: int | None, queries: int, keys: int) -> Any:
    """Returns each query's first key and the one behind its last, as numpy arrays [queries]."""
    place = np.arange(queries)
    low = np.zeros(queries, int) if left is None else np.maximum(place - left, 0)
    high = np.full(queries, keys) if right is None else np.minimum(place + right + 1, keys)
    return np.minimum(low, keys), high


def window_of_interval(first: Any, end: Any, queries: int, keys: int) -> Any:
    """Returns the (left, right) that make these keys [B, S] of each query; None if none do."""
    place = np.arange(queries)
    is_cut_left, is_cut_right = first > 0, end < keys
    left = int((place - first)[is_cut_left].max()) if is_cut_left.any() else None
    right = int((end - 1 - place)[is_cut_right].max()) if is_cut_right.any() else None
    if any(side is not None and side < 0 for side in (left, right)):
        return None
    low, high = window_ranges(left, right, queries, keys)
    return (left, right) if (low == first).all() and (high == end).all() else None


def is_concrete(array: Any) -> bool:
    """Whether the values of an array can be read on this host now."""
    if isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def interval_of_rows(mask: Any) -> tuple[Any, Any] | None:
    """Returns the first key [.., S] of each row of a numpy mask, and the one behind its last.

    None unless each row is one interval of keys with at least one key.
    """
    count = mask.sum(-1)
    first = mask.argmax(-1)
    end = mask.shape[-1] - mask[..., ::-1].argmax(-1)
    if not count.all() or (end - first != count).any():
        return None
    return first, end


def segments_of_rows(mask: Any) -> tuple[Any, Any] | None:
    """Returns segments [.., S] of queries and [.., K] of keys that make a numpy mask [.., S, K].

    None if there are none such: two rows see some of the same keys but not all, or a row sees none.
    """
    if not mask.any(-1).all():
        return None
    # A segment's number is its first key, which all of its queries share.
    of_queries = mask.argmax(-1)
    is_seen = mask.any(-2)
    of_keys = np.where(
        is_seen, np.take_along_axis(of_queries, mask.argmax(-2), axis=-1), mask.shape[-1]
    )
    if (mask != (of_queries[..., :, None] == of_keys[..., None, :])).any():
        return None
    return of_queries, of_keys
