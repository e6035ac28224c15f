"""Causal convolution in plain JAX, the XLA reference.

Kernels are compared with it, and it runs on platforms without kernels. The formulas are those of
crates/xentile/src/causal_conv1d.rs, computed in float32, or in the dtype of x or weight if that is
wider.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import added, multiplied, wide

# Tokens of a partial sum of kernels.
BLOCK = 128


@dataclass(frozen=True)
class Options:
    """The options of a call, and which of its arrays are there."""

    # W.
    width: int
    silu: bool
    has_bias: bool
    has_state: bool
    has_segments: bool
    # What the user asked for by name.
    implementation: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a call's arrays, in order."""
        flags = {"bias": self.has_bias, "state": self.has_state, "segments": self.has_segments}
        return ("x", "weight", *(name for name, is_there in flags.items() if is_there))

    @property
    def moving(self) -> tuple[int, ...]:
        """Which arrays of a call have a gradient: all but segment ids."""
        return tuple(index for index, name in enumerate(self.names) if name != "segments")


def forward(options: Options, *arrays: jax.Array) -> tuple[jax.Array]:
    """Returns y [.., T, C] in the dtype of x.

    The arrays are x [.., T, C], weight [C, W] and, as options say, bias [C], initial state
    [.., W - 1, C] and segment ids [.., T].
    """
    named = dict(zip(options.names, arrays, strict=True))
    z = _sum(named, _terms(options, named))
    return ((jax.nn.silu(z) if options.silu else z).astype(named["x"].dtype),)


def gradients(options: Options, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns dx, dweight [.., B, C, W], and dbias [.., B, C] and dstate if there are these.

    The cotangent of y follows the arrays of `forward`. dweight and dbias are sums in float32 for
    each of B blocks of 128 tokens, as a kernel has them; here the first block has all of it.
    """
    named, dy = dict(zip(options.names, arrays[:-1], strict=True)), arrays[-1]
    x, weight, last = named["x"], wide(named["weight"]), options.width - 1
    terms = _terms(options, named)
    g = wide(dy)
    if options.silu:
        z = _sum(named, terms)
        sigmoid = jax.nn.sigmoid(z)
        g = g * sigmoid * (1 + z * (1 - sigmoid))
    rows = None
    for k, (_, is_seen) in enumerate(terms):
        part = multiplied(g, weight[:, last - k])
        if is_seen is not None:
            part = jnp.where(is_seen, part, jnp.zeros_like(part))
        part = jnp.pad(part, [*[(0, 0)] * (x.ndim - 2), (last - k, k), (0, 0)])
        rows = part if rows is None else rows + part
    assert rows is not None
    dweight = jnp.stack([(g * term).sum(-2) for term, _ in reversed(terms)], -1)
    found = [rows[..., last:, :].astype(x.dtype), _in_blocks(x, dweight, 2)]
    if options.has_bias:
        found.append(_in_blocks(x, g.sum(-2), 1))
    if options.has_state:
        found.append(rows[..., :last, :].astype(x.dtype))
    return tuple(found)


def _terms(
    options: Options, named: dict[str, jax.Array]
) -> Sequence[tuple[jax.Array, jax.Array | None]]:
    """Returns x moved by 0 to W - 1 tokens, in float32, and where it is seen; elsewhere it is 0."""
    x, ids, last = named["x"], named.get("segments"), options.width - 1
    rows = with_state(last, x, named.get("state"))
    if x.shape[-2] == 0:
        ids = None
    if ids is not None:
        # Rows of the state have the id of the first token.
        ids = jnp.concatenate([*[ids[..., :1]] * last, ids], -1)
    found: list[tuple[jax.Array, jax.Array | None]] = []
    is_seen = None
    for k in range(options.width):
        term = wide(_moved(rows, last - k, x.shape[-2], rows.ndim - 2))
        if ids is not None and k > 0:
            axis = ids.ndim - 1
            near, far = (_moved(ids, last - n, x.shape[-2], axis) for n in (k - 1, k))
            same = (near == far)[..., None]
            is_seen = same if is_seen is None else is_seen & same
            term = jnp.where(is_seen, term, jnp.zeros_like(term))
        found.append((term, is_seen))
    return found


def _moved(array: jax.Array, first: int, count: Any, axis: int) -> jax.Array:
    """Returns `count` entries along an axis."""
    found: jax.Array = jax.lax.slice_in_dim(array, first, first + count, axis=axis)
    return found


def _sum(
    named: dict[str, jax.Array], terms: Sequence[tuple[jax.Array, jax.Array | None]]
) -> jax.Array:
    """Returns the sums before the activation."""
    weight = wide(named["weight"])
    last = weight.shape[-1] - 1
    parts = [multiplied(term, weight[:, last - k]) for k, (term, _) in enumerate(terms)]
    total = sum(parts[1:], parts[0])
    return added(total, wide(named["bias"])) if "bias" in named else total


def _in_blocks(x: jax.Array, sums: jax.Array, own: int) -> jax.Array:
    """Returns sums over all tokens as those of the first of the blocks, before `own` axes."""
    blocks = -(-x.shape[-2] // BLOCK)
    index = jax.lax.broadcasted_iota(np.int32, (blocks, *[1] * own), 0)
    sums = jnp.expand_dims(sums, sums.ndim - own)
    index = jax.lax.expand_dims(index, range(sums.ndim - index.ndim))
    return jnp.where(index == 0, sums, jnp.zeros_like(sums))


def with_state(count: int, x: jax.Array, state: jax.Array | None) -> jax.Array:
    """Returns the rows of a state, or `count` of zeros, and those of x behind them."""
    if state is None:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (count, 0), (0, 0)])
    return jnp.concatenate([state, x], -2)
