"""Programs of attention for tools that run no Python: o, lse and gradients, of one sequence.

Arguments are q [H, T, D], k and v [J, K, D], sinks [H] if any, those of packed texts if any, and
cotangents do and dlse [H, T]; results o, lse, dq, dk, dv and, with sinks, dsinks. Packed texts with
as many keys as queries have segment ids [T]; others the first key that each query sees, and the one
behind the last, [T] each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..exporting import (
    DTYPES,
    Cell,
    ConfigError,
    Program,
    check_extent,
    check_options,
    no_tile,
    settings_alone,
    tokens_of,
)
from . import custom_call
from .options import check_options as options_of
from .options import ranges

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("causal", "window_before", "window_after", "softcap", "scale")


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    heads: int
    head_dim: int
    kv_heads: int
    keys: int
    sinks: bool
    segments: int | None


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    extents = [config.get(key) for key in ("heads", "head_dim", "kv_heads")]
    for key, extent in zip(("heads", "head_dim", "kv_heads"), extents, strict=True):
        check_extent(key, extent)
    heads, head_dim, kv_heads = (int(extent or 0) for extent in extents)
    if heads % kv_heads:
        raise ConfigError(f"kv_heads is {kv_heads}; it must divide heads, which is {heads}")
    keys, segments = config.get("keys"), config.get("segments")
    keys = tokens_of(config) if keys is None else keys
    check_extent("keys", keys)
    return Settings(heads, head_dim, kv_heads, keys, bool(config.get("sinks")), segments)


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    check_options(cell.options, OPTIONS)
    settings: Settings = cell.settings
    given = cell.options
    causal = given.get("causal")
    options = options_of(
        scale=given.get("scale"),
        softcap=given.get("softcap"),
        causal=True if causal is None else causal,
        window=(given.get("window_before"), given.get("window_after")),
        width=settings.head_dim,
    )
    heads, kv_heads, tokens = settings.heads, settings.kv_heads, cell.tokens
    is_packed, has_as_many = settings.segments is not None, settings.keys == tokens
    options = replace(
        options,
        has_sinks=settings.sinks,
        has_segments=is_packed and has_as_many,
        is_own_segment=is_packed and has_as_many,
        gives_lse=True,
        implementation="reference" if cell.is_dense else None,
    )
    of_heads = (kv_heads, heads // kv_heads)

    def forward_and_backward(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *beside, do, dlse = more
        sinks, of_texts = beside[: int(settings.sinks)], beside[int(settings.sinks) :]
        if is_packed and not has_as_many:
            seen, ids = jnp.stack(of_texts, -1), []
        else:
            seen = ranges(options, tokens, settings.keys, None, None)
            ids = [jnp.broadcast_to(one, (kv_heads, tokens)) for one in of_texts]

        def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
            grouped = q.reshape(*of_heads, tokens, settings.head_dim)
            of_sinks = [one.reshape(of_heads) for one in sinks]
            every = jnp.broadcast_to(seen, (kv_heads, *seen.shape))
            o, lse = custom_call.attention(options, grouped, k, v, every, *ids, *ids, *of_sinks)
            return o.reshape(q.shape), lse.reshape(heads, tokens)

        found, pull = jax.vjp(function, q, k, v, *sinks)
        return *found, *pull((do, dlse))

    shape: Any = jax.ShapeDtypeStruct
    q = shape((heads, tokens, settings.head_dim), DTYPES[cell.dtype])
    k = shape((kv_heads, settings.keys, settings.head_dim), DTYPES[cell.dtype])
    rows = shape((heads, tokens), jnp.float32)
    sinks = [shape((heads,), jnp.float32)] if settings.sinks else []
    of_texts = [shape((tokens,), jnp.int32)] * (is_packed * (1 if has_as_many else 2))
    arguments = [q, k, k, *sinks, *of_texts, q, rows]
    return Program("forward_and_backward", forward_and_backward, arguments)


tile, described = no_tile, settings_alone
