"""Attention of a sequence that is sharded over devices, whose keys and values rotate in a ring."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import meshes
from ..arrays import match_rank
from ..bound import Bound
from ..checks import as_array, check_flag, check_integer, promoted
from ..compat import varying_axes
from ..custom_call import vary_alike
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from . import custom_call
from .declaration import OPERATION
from .heads import by_kv_heads, by_tokens, for_kv_heads, lse_by_tokens
from .options import SHAPES, Options, check_arrays, check_options, check_sinks, segments
from .segment_ranges import narrow_ranges

# The axis of tokens in q, k and v, and in what has no columns but heads.
TOKENS = -3


@hinted
def zigzag_indices(length: int, devices: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns [length] token indices in an order that gives each device equal work when causal.

    The sequence is cut into 2 * devices chunks; device d gets chunks d and 2 * devices - 1 - d
    (Zhu et al., "Zigzag ring attention", 2024). `x[:, indices]` puts an array [B, S, ..] into this
    order, and `y[:, numpy.argsort(indices)]` back. The indices are the positions for `rope`.

    Raises:
      TypeError: no integers.
      ValueError: 2 * devices does not divide length, or one is negative.

    >>> zigzag_indices(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    length, devices = check_integer("length", length, 0), check_integer("devices", devices, 1)
    if length % (2 * devices):
        raise ValueError(
            f"length is {length} and devices {devices}; length must be a multiple of 2 * devices"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    pairs = [[device, 2 * devices - 1 - device] for device in range(devices)]
    indices: np.ndarray[Any, np.dtype[np.int32]] = chunks[np.asarray(pairs)].reshape(-1)
    return indices


class _Keywords(TypedDict, total=False):
    """The options besides the one that decides what is returned."""

    axis_name: Required[str | Sequence[str]]
    causal: bool
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    segment_ids: ArrayLike | None
    sinks: ArrayLike | None
    zigzag: bool
    implementation: Implementation | None


@overload
def ring_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> jax.Array: ...


@overload
def ring_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@hinted
def ring_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    axis_name: str | Sequence[str],
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    segment_ids: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    zigzag: bool = False,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`flash_attention` of tokens sharded over a mesh axis (Liu et al., "Ring Attention", 2023).

    Each device holds a block of tokens. Keys and values rotate around the devices of the axis; a
    device attends to each block as it arrives and merges the results by lse, in float32. Kept for
    the backward pass are q, k, v, o and lse, each device its block: gradients of keys and values
    rotate with them, summed in float32. Reverse mode only.

    Call it within `jax.shard_map`, where arrays are a device's blocks, or on whole arrays with a
    mesh that has the axis (`jax.set_mesh`, or arrays placed on one). The mesh's other axes may
    shard the batch, and heads together with heads of keys.

    Args:
      q: [B, S, H, D] or [S, H, D], in bfloat16, float16 or float32, as `flash_attention` has it.
      k: [B, S, Hkv, D] or [S, Hkv, D], of as many tokens as q.
      v: [B, S, Hkv, Dv] or [S, Hkv, Dv].
      axis_name: the mesh axis that shards tokens, or several, the slowest first.
      causal: whether a query sees nothing behind its own position in the whole sequence.
      window: (left, right), in positions of the whole sequence. With `causal` and blocks in order,
        blocks further left than the window are not sent.
      softcap: c > 0 replaces logits t by c * tanh(t / c); None for none.
      scale: of logits; None for 1 / sqrt(D).
      segment_ids: integers [B, S] or [S]: a query sees keys of its own segment alone.
      sinks: [H], a logit for each query head that takes probability and gives no value.
      zigzag: whether tokens are in the order of `zigzag_indices`, which gives devices equal work
        under a causal mask; else in the order of their positions.
      return_lse: whether to return lse too.
      implementation: as `flash_attention` has it. On TPUs the backward pass, and masked blocks, run
        XLA's program, with a block's logits in memory.

    Returns:
      o, [B, S, H, Dv] or [S, H, Dv] in the dtype of q; with `return_lse` the pair of o and lse,
      [B, S, H] or [S, H] in float32. Sharded as q is.

    Raises:
      TypeError: a dtype that is not taken, or an option of the wrong type, or traced.
      ValueError: shapes that disagree, an option outside its range, an axis that is not there, or
        one that does not divide the tokens.
    """
    choose(OPERATION, implementation)
    names = meshes.names_of(axis_name)
    if not names:
        raise ValueError("axis_name is None; it must name the mesh axis that shards tokens")
    given = {"q": q, "k": k, "v": v}
    q, k, v = (as_array(name, one, SHAPES[name]) for name, one in given.items())
    q, k, v = promoted(q, k, v)
    check_arrays(q, k, v)
    if k.shape[TOKENS] != q.shape[TOKENS]:
        raise ValueError(
            f"q has {q.shape[TOKENS]} tokens and k {k.shape[TOKENS]}; a ring needs as many of each"
        )
    options = check_options(
        scale=scale, softcap=softcap, causal=causal, window=window, width=q.shape[-1]
    )
    options = replace(
        options,
        has_segments=segment_ids is not None,
        gives_lse=True,
        tokens_first=True,
        implementation=implementation,
        is_key_block=True,
    )
    gives_lse = check_flag("return_lse", return_lse)
    operands = [q, k, v]
    if segment_ids is not None:
        ids, _, _ = segments(segment_ids, q.shape[:-2], q.shape[:-2])
        operands.append(ids)
    if sinks is not None:
        operands.append(check_sinks(sinks, q.shape[-2]))
    is_zigzag = check_flag("zigzag", zigzag)
    on_device = Bound(_on_device, names, options, is_zigzag)
    if not meshes.are_of_devices(names):
        on_device = _over_mesh(names, on_device, operands, has_sinks=sinks is not None)
    o, lse = on_device(*operands)
    return (o, lse) if gives_lse else o


def _over_mesh(
    names: meshes.Names, on_device: Any, operands: list[jax.Array], *, has_sinks: bool
) -> Any:
    """Returns a function of whole arrays that runs `on_device` on the blocks of each device."""
    q = operands[0]
    mesh = meshes.with_axes(names, *operands)
    devices = math.prod(mesh.shape[name] for name in names)
    tokens = q.shape[TOKENS]
    if tokens % devices:
        raise ValueError(
            f"q has {tokens} tokens, which the {devices} devices of axis_name "
            f"{meshes.shown(names)} do not divide; pad them, and give the padding a segment of its "
            "own"
        )
    batch = [None] * (q.ndim + TOKENS)
    spec = PartitionSpec(*batch, meshes.entry(names))
    specs = [spec] * (len(operands) - has_sinks) + [PartitionSpec()] * has_sinks
    mapped = meshes.on_devices(mesh, frozenset(names), on_device, (*specs,), (spec, spec))

    def over_mesh(*arrays: jax.Array) -> Any:
        return mapped(*map(partial(_place, mesh, names), arrays, specs))

    return jax.jit(over_mesh)


def _place(mesh: Any, names: meshes.Names, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns x with its tokens sharded over explicit axes as `spec` says, other axes as before."""
    cuts = meshes.sharded_over(x)
    entries = [*map(meshes.entry, cuts)]
    for axis, one in enumerate(spec):
        if one is not None:
            entries[axis] = one
    return meshes.place(mesh, PartitionSpec(*entries), x)


@dataclass(frozen=True)
class Ring:
    """The devices along mesh axes, which blocks of tokens they have, and what queries see."""

    names: meshes.Names
    options: Options
    # The tokens of each device, and how they lie in the sequence.
    tokens: int
    is_zigzag: bool

    @property
    def devices(self) -> int:
        """How many devices the ring has."""
        return int(jax.lax.axis_size(self.names))

    @property
    def steps(self) -> int:
        """How many blocks of keys each device needs at most."""
        left, _ = self.options.window
        if self.is_zigzag or not self.options.causal or left is None:
            return self.devices
        return min(self.devices, -(-left // max(self.tokens, 1)) + 1)

    @property
    def is_masked(self) -> bool:
        """Whether queries see some keys and not others, segments aside."""
        return self.options.causal or self.options.window != (None, None)

    def send(self, arrays: Any, steps: int = 1) -> Any:
        """Returns what the device `steps` before this one in the ring has."""
        steps %= self.devices
        if steps == 0:
            return arrays
        pairs = [(device, (device + steps) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.names, pairs), arrays)

    def chunks(self, device: Any) -> list[tuple[Any, int]]:
        """Returns the first position and the length of each run of tokens of a device."""
        if not self.is_zigzag:
            return [(device * self.tokens, self.tokens)]
        half = self.tokens // 2
        return [(device * half, half), ((2 * self.devices - 1 - device) * half, half)]

    def key_ranges(self, step: int) -> Any:
        """Returns the range of keys of the block of a step that each query sees, [S, 2]."""
        if not self.is_masked:
            full = np.zeros((self.tokens, 2), np.int32)
            full[:, 1] = self.tokens
            return full
        device = jax.lax.axis_index(self.names)
        runs = [first + jnp.arange(length) for first, length in self.chunks(device)]
        position = jnp.concatenate(runs).astype(jnp.int32)
        source = (device - step) % self.devices
        left, right = self.options.window
        right = 0 if self.options.causal else right

        def keys_before(limit: Any) -> Any:
            """Returns how many keys of the block have a position below `limit`."""
            runs = self.chunks(source)
            return sum(jnp.clip(limit - first, 0, length) for first, length in runs)

        total = self.devices * self.tokens
        none, every = jnp.zeros_like(position), jnp.full_like(position, self.tokens)
        low = none if left is None else keys_before(position - min(left, total))
        high = every if right is None else keys_before(position + (min(right, total) + 1))
        return jnp.stack([low, jnp.maximum(low, high)], -1).astype(jnp.int32)

    def operands(
        self, step: int, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, key_ids: Any
    ) -> tuple[Options, list[jax.Array]]:
        """Returns the call of a step, of arrays by heads of keys, and what it takes."""
        seen = self.key_ranges(step)
        options = replace(
            self.options, causal=False, window=(None, None), has_lengths=self.is_masked
        )
        if ids is None:
            return options, vary_alike([q, k, v, for_kv_heads(seen, 2, k)])
        zeros = jnp.zeros_like(ids)[..., None]
        seen = match_rank(jnp.asarray(seen), zeros) + zeros
        options = replace(options, is_own_segment=step == 0 and not self.is_masked)
        if options.implementation != "reference":
            seen, ids, key_ids = narrow_ranges(seen, ids, key_ids, is_own=ids is key_ids)
        more = [for_kv_heads(seen, 2, k), for_kv_heads(ids, 1, k), for_kv_heads(key_ids, 1, k)]
        return options, vary_alike([q, k, v, *more])


def _on_device(
    names: meshes.Names, options: Options, is_zigzag: bool, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns o and lse of a device's tokens."""
    q, k, v, *more = operands
    tokens = q.shape[TOKENS]
    if is_zigzag and tokens % 2:
        raise ValueError(f"a device has {tokens} tokens; zigzag needs an even number of them")
    ring = Ring(names, options, tokens, is_zigzag)
    ids = more.pop(0) if options.has_segments else None
    arrays = [*by_kv_heads(q, k, v), *more, *([] if ids is None else [ids])]
    # Devices differ in their blocks, even where arrays are the same on all.
    index = jax.typeof(jax.lax.axis_index(names))
    missing = varying_axes(index) - varying_axes(jax.typeof(q))
    if missing:
        arrays[0] = jax.lax.pcast(arrays[0], tuple(sorted(missing)), to="varying")
    arrays = vary_alike(arrays)
    o, lse = _ring(ring, bool(more), *arrays)
    return by_tokens(o), lse_by_tokens(lse)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(ring: Ring, has_sinks: bool, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(ring, has_sinks, *arrays)


def _forward(ring: Ring, has_sinks: bool, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, v, sinks, ids = _by_name(ring, has_sinks, arrays)
    moving = (k, v, ids)
    found: Any = None
    for step in range(ring.steps):
        k, v, key_ids = moving
        # The next block comes while this one is attended to.
        moving = ring.send(moving) if step + 1 < ring.steps else moving
        options, operands = ring.operands(step, q, k, v, ids, key_ids)
        o, lse = custom_call.forward(options, *operands)
        block = o.astype(jnp.float32), lse
        found = block if found is None else _merged(found, block)
    o, lse = found
    if sinks is not None:
        group = sinks.reshape(*q.shape[-4:-2], 1)
        o, lse = _merged((o, lse), (jnp.zeros_like(o), jnp.broadcast_to(group, lse.shape)))
    return o.astype(q.dtype), lse


def _merged(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """Returns o and lse of the keys of both."""
    (o, lse), (other_o, other_lse) = one, other
    both = jnp.logaddexp(lse, other_lse)
    safe = jnp.where(both == -jnp.inf, 0, both)
    share, rest = jnp.exp(lse - safe), jnp.exp(other_lse - safe)
    return o * share[..., None] + other_o * rest[..., None], both


def _by_name(ring: Ring, has_sinks: bool, arrays: Sequence[jax.Array]) -> list[Any]:
    q, k, v, *more = arrays
    sinks = more.pop(0) if has_sinks else None
    return [q, k, v, sinks, more.pop(0) if ring.options.has_segments else None]


def _with_residuals(ring: Ring, has_sinks: bool, *arrays: jax.Array) -> Any:
    o, lse = map(OPERATION.named, _forward(ring, has_sinks, *arrays))
    return (o, lse), (arrays, o, lse)


def _backward(ring: Ring, has_sinks: bool, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, o, lse = residuals
    do, dlse = cotangents
    q, k, v, sinks, ids = _by_name(ring, has_sinks, arrays)
    dq = jnp.zeros_like(q, jnp.float32)
    moving, sums = (k, v, ids), (jnp.zeros_like(k, jnp.float32), jnp.zeros_like(v, jnp.float32))
    for step in range(ring.steps):
        k, v, key_ids = moving
        moving = ring.send(moving) if step + 1 < ring.steps else moving
        # Sums are sent while the next block's gradients are computed.
        sums = ring.send(sums) if step else sums
        options, operands = ring.operands(step, q, k, v, ids, key_ids)
        own, *of_keys = custom_call.backward(options, operands, o, lse, do, dlse)
        dq += own
        sums = tuple(total + one for total, one in zip(sums, of_keys, strict=True))
    dk, dv = ring.send(sums, -(ring.steps - 1))
    gradients: list[Any] = [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)]
    if sinks is not None:
        # The sink's value is 0: dp = 0 - delta.
        delta = (do.astype(jnp.float32) * o).sum(-1) - dlse
        p = jnp.exp(sinks.reshape(*q.shape[-4:-2], 1) - jnp.where(lse == -jnp.inf, 0, lse))
        axes = (*range(lse.ndim - 3), lse.ndim - 1)
        gradients.append(-(p * delta).sum(axes).reshape(sinks.shape))
    if ids is not None:
        gradients.append(None)  # integers have none
    return tuple(gradients)


_ring.defvjp(_with_residuals, _backward)
