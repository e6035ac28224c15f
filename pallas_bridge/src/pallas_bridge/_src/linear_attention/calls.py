"""Calls of the kernels of linear attention and the gated delta rule, and their derivative.

Kernels process tokens in chunks, and chunks in groups, as `program` does, and save the state after
each group for the backward pass. GPU kernels take bfloat16, with 64 or 128 columns of keys and of
values.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..arrays import spec_of
from ..bound import Bound
from ..custom_call import bind, declared_call
from ..operation import Implementation
from . import OPERATION
from .program import CHUNK, DELTA_ARRAYS, Options, Program

FORWARD, BACKWARD = "xentile_linear_attention_forward", "xentile_linear_attention_backward"
WIDTHS = (64, 128)
# Elements of the states of a group's chunks: enough for several CTAs on every multiprocessor.
GROUP = 1 << 24
LEAST_CHUNKS = 4
# Linear attention runs its groups at once, but for heads that share keys. CTAs of 64 columns that
# fill a GPU's multiprocessors twice, and the least and most chunks of a group: dg is from sums over
# it in float32.
MANY_CTAS, CHUNKS_AT_ONCE = 256, (8, 32)
# GPUs whose CTAs have the shared memory that kernels need, by their compute capability.
CAPABILITIES = ("9.0", "10.0", "10.3")


@dataclass(frozen=True)
class Call:
    """The options of a call by kernels."""

    options: Options
    # Chunks of a group, and the number of groups.
    chunks: int
    groups: int
    # Whether GPUs have kernels for its arrays.
    has_gpus: bool = True
    # The implementation that the user named.
    implementation: Implementation | None = None

    @staticmethod
    def of(options: Options, arrays: Any, implementation: Implementation | None) -> "Call":
        """Returns the call for arrays for which `lacks` returns None."""
        q, _, v, *_ = arrays
        every = -(-q.shape[1] // CHUNK)
        # Of one token, XLA's program writes into a donated state; a call's result is copied there.
        if _lacks_on_gpus(arrays) or (q.shape[1] == 1 and implementation is None):
            # As many states as XLA's own program saves.
            chunks = min(-(-Program.of(options, arrays).group // CHUNK), every)
            return Call(options, chunks, -(-every // chunks), False, implementation)
        batch, _, heads, columns = v.shape
        is_delta = len(arrays) == DELTA_ARRAYS
        elements = batch * heads * q.shape[-1] * columns
        most = max(GROUP * (1 if is_delta else 2) // max(elements, 1), LEAST_CHUNKS)
        if not is_delta:
            ctas, (least, last) = batch * heads * columns // 64, CHUNKS_AT_ONCE
            at_once = min(max(every * ctas // MANY_CTAS, least), last)
            most = at_once if heads == q.shape[2] else min(most, at_once)
        groups = -(-every // min(most, every))
        chunks = -(-every // groups)
        return Call(options, chunks, -(-every // chunks), True, implementation)

    def attributes(self, arrays: Any) -> dict[str, Any]:
        """Returns the attributes of both targets."""
        return {
            "delta": len(arrays) == DELTA_ARRAYS,
            "scale": self.options.scale,
            "group_tokens": self.chunks * CHUNK,
            "groups_times_chunk": self.groups * CHUNK,
        }

    def program(self, arrays: Any) -> Program:
        """Returns XLA's program that saves the same states; its own groups take less memory."""
        saved, own = self.chunks * CHUNK, Program.of(self.options, arrays)
        return Program(self.options, own.precision, own.chunk, min(own.group, saved), saved)


def lacks(options: Options, arrays: Any) -> str | None:
    """Returns why no kernels take a call, or None where those for CPUs do."""
    q, _, v, *_ = arrays
    if options.l2_norm:
        return "qk_l2_norm is True; it must be False"
    sizes = (*q.shape, *v.shape)
    if not all(isinstance(size, int) for size in sizes) or not math.prod(sizes):
        return f"q has shape {q.shape} and v {v.shape}; their axes must be numbers, and none 0"
    *tokens, state = arrays
    if any(any(spec_of(jax.typeof(one))[2:]) for one in tokens) or any(
        spec_of(jax.typeof(state))[1:]
    ):
        return "heads or columns are sharded by explicit mesh axes; they must be whole"
    return None


def _lacks_on_gpus(arrays: Any) -> bool:
    """Returns whether kernels for GPUs do not take arrays."""
    q, _, v, *_ = arrays
    return q.dtype != jnp.bfloat16 or any(one.shape[-1] not in WIDTHS for one in (q, v))


def attend(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o and the final state of q, k, v, g, b for the delta rule, and a state.

    g and b are in float32, and g is not below -128.
    """
    o, state = _attend(call, *arrays)
    return o, state


def _without(call: Call) -> tuple[str, ...]:
    """Returns the platforms without a kernel: GPUs too, if a local one lacks shared memory."""
    if not call.has_gpus:
        return ("tpu", "cuda")
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        devices = []
    named = [str(getattr(one, "compute_capability", CAPABILITIES[0])) for one in devices]
    fits = all(one in CAPABILITIES for one in named)
    return ("tpu",) if fits or call.implementation else ("tpu", "cuda")


def _bind(call: Call, target: str, dense: Any, attributes: Any, *arrays: jax.Array) -> Any:
    one = declared_call(
        OPERATION,
        target,
        attributes,
        implementation=call.implementation,
        dense=Bound(dense, call),
        dense_on=_without(call),
        # XLA shards its own program by batch and heads.
        dense_if_sharded=True,
    )
    return bind(one, *arrays)


def _forward(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o and the state after each group, [B, H', groups, K, V]."""
    o, states, *_ = _bind(call, FORWARD, _dense_forward, call.attributes(arrays), *arrays)
    return o, states


def _dense_forward(call: Call, *arrays: jax.Array) -> list[jax.Array]:
    leading, arrays = _with_one_batch(arrays)
    o, state, saved = call.program(arrays).forward(*arrays)
    # A state before a group, of g b h r k v, is that after the group before.
    after = jnp.concatenate([saved[1:], state.reshape(saved.shape[1:])[None]])
    states = jnp.moveaxis(after, 0, 3).reshape(*state.shape[:2], call.groups, *state.shape[2:])
    return _with_axes(leading, [o, states, *_scratch(call, False, arrays)])


def _dense_backward(call: Call, *every: jax.Array) -> list[jax.Array]:
    leading, (*arrays, states, do, dstate) = _with_one_batch(every)
    heads = arrays[0].shape[2]
    batch, all_heads, groups, *rest = states.shape
    after = jnp.moveaxis(states.reshape(batch, heads, all_heads // heads, groups, *rest), 3, 0)
    saved = jnp.concatenate([arrays[-1].reshape(after.shape[1:])[None], after[:-1]])
    found = call.program(arrays).backward(arrays, saved, do, dstate)
    return _with_axes(leading, [*found, *_scratch(call, True, arrays)])


def _with_one_batch(arrays: Any) -> tuple[tuple[int, ...], tuple[jax.Array, ...]]:
    """Returns the axes before tokens, of which `vmap` adds some, and arrays with one for them."""
    leading = arrays[0].shape[:-3]
    if len(leading) == 1:
        return leading, tuple(arrays)
    flat = (one.reshape(-1, *one.shape[len(leading) :]) for one in arrays)
    return leading, tuple(flat)


def _with_axes(leading: tuple[int, ...], arrays: list[jax.Array]) -> list[jax.Array]:
    if len(leading) == 1:
        return arrays
    return [one.reshape(*leading, *one.shape[1:]) for one in arrays]


def _scratch(call: Call, is_backward: bool, arrays: Any) -> list[jax.Array]:
    """Returns zeros for what kernels work in, which XLA drops, as nothing reads them."""
    q, _, v, *_ = arrays
    batch, tokens, _, width = q.shape
    heads, columns = v.shape[2:]
    is_delta, group = len(arrays) == DELTA_ARRAYS, (batch, heads, call.chunks)
    # What the backward pass reads has a high and a low part.
    parts = (*group, 2) if is_backward else group
    found = [jnp.zeros((batch, heads, -(-tokens // CHUNK), 3 * CHUNK), jnp.float32)]
    rows, states = (jnp.zeros((*parts, count, columns), q.dtype) for count in (CHUNK, width))
    if is_delta:
        found += [jnp.zeros((*group, 2 * CHUNK * CHUNK), q.dtype), rows]
        found += [states] * (2 if is_backward else 1)
    if is_backward:
        if is_delta:
            found += [jnp.zeros((*group, CHUNK, columns), jnp.float32), rows]
        else:
            chunks = -(-tokens // CHUNK)
            for count, *rest in ((call.groups, width, columns), (chunks, 4 * CHUNK)):
                found.append(jnp.zeros((batch, heads, count, *rest), jnp.float32))
        if q.shape[2] != heads:
            found += [jnp.zeros((*group, CHUNK, width), jnp.float32)] * 2
    return found


def _both(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns o, the final state and the state after each group."""
    o, states = _forward(call, *arrays)
    return o, states[:, :, -1], states


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    o, state, _ = _both(call, *arrays)
    return o, state


@partial(_attend.defjvp, symbolic_zeros=True)
def _jvp(call: Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
    o, state, states = map(OPERATION.named, _both(call, *primals))
    moving = [linear.given(one) for one in tangents]
    apply, transpose = Bound(_apply, call), Bound(_transpose, call)
    return (o, state), tuple(linear.bind(apply, transpose, [*primals, states], moving, [o, state]))


def _plain(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    o, state, _ = call.program(arrays).forward(*arrays)
    return o, state


def _apply(call: Call, residuals: Any, tangents: Any) -> Any:
    *arrays, _ = residuals
    return linear.tangents_of(partial(_plain, call), arrays, tangents)


def _transpose(call: Call, residuals: Any, cotangents: Any) -> Any:
    *arrays, _ = residuals
    if all(one is None for one in cotangents):
        return [None] * len(arrays)
    do, dstate = (
        jnp.zeros_like(like) if one is None else one
        for one, like in zip(cotangents, (arrays[2], arrays[-1]), strict=True)
    )
    attributes = call.attributes(arrays)
    attributes["shared"] = arrays[0].shape[2] != arrays[2].shape[2]
    found = _bind(call, BACKWARD, _dense_backward, attributes, *residuals, do, dstate)
    return found[: len(arrays)]
