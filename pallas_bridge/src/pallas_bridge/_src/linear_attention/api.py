"""Linear attention and the gated delta rule: what users call, and the derivative."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import linear
from ..arrays import spec_of
from ..bound import Bound
from ..checks import (
    as_array,
    check_dtype,
    check_flag,
    check_float32,
    check_operand,
    is_traced,
)
from ..custom_call import vary_alike
from ..implementations import choose
from ..keywords import hinted
from ..meshes import names_of_devices
from ..operation import Implementation
from . import OPERATION, over_devices
from .calls import Call, attend, lacks
from .program import LEAST_LOG_DECAY, Options, Program

SHAPES = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, H', V]",
    "g": "[B, T, H']",
    "b": "[B, T, H']",
    "initial_state": "[B, H', K, V]",
    "segment_ids": "[B, T]",
}


@overload
def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = ...,
    *,
    scale: float = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: Literal[False] = ...,
    axis_name: str | Sequence[str] | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = ...,
    *,
    scale: float = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: bool,
    axis_name: str | Sequence[str] | None = ...,
    implementation: Implementation | None = ...,
) -> Any: ...


@hinted
def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    *,
    scale: float = 1.0,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    return_final_state: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Linear attention with a scalar decay: Mamba-2's state space (Dao and Gu, 2024) or RetNet.

        S_t = exp(g_t) S_{t-1} + k_t v_t'          of each head, [K, V]
        o_t = scale S_t' q_t

    For Mamba-2 q is C, k is B, v is dt x, and g is dt A. The sequence runs in chunks of 64 tokens,
    by kernels or in XLA's program (`implementation`). Sums are float32 whatever the dtype, and o is
    rounded once. It is differentiable in both modes with respect to all arrays but `segment_ids`.
    The residuals of the backward pass are the arguments and a state every few chunks.

    For decoding, pass one token or a few with `initial_state` and `return_final_state`.

    Args:
      q: [B, T, H, K] in bfloat16, float16 or float32.
      k: [B, T, H, K] in the dtype of q.
      v: [B, T, H', V] in that dtype, with H' a multiple of H: head h of v has head h // (H' / H) of
        q and k.
      g: [B, T, H'], the logarithm of the decay, at most 0, in any of these dtypes; None for 0.
        Traced values above 0 are not refused: the state then grows, and overflows to inf.
      scale: a factor of o.
      initial_state: the state before the first token, [B, H', K, V] in float32; None for 0.
      segment_ids: [B, T] in int32, or None. The state is 0 where the id changes; `initial_state`
        belongs to the first segment.
      return_final_state: whether to return the state after the last token too.
      axis_name: the mesh axis, or axes, that shard T within `jax.shard_map`, where arrays are a
        device's own tokens; states are then those of the whole sequence, the same on all devices.
        About log2(n) exchanges of a state give each device the state before it; that of its own
        tokens takes one more GEMM.
      implementation: "custom_call" (kernels of the library, for CPUs, and for bfloat16 and K and V
        of 64 or 128 on NVIDIA GPUs of compute capability 9.0 or 10), "reference" (XLA's program,
        which has second derivatives), or None for kernels where there are any. In a program that
        XLA partitions over a mesh that is its own program, which shards batch and heads; within
        `shard_map` kernels run.

    Returns:
      o [B, T, H', V] in the dtype of v; with `return_final_state`, a tuple of o and the state
      [B, H', K, V] in float32.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree, a value of g above 0, or a call of kernels that there are
        not.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 1, 1))
    >>> print(linear_attention(x, x, x, jnp.log(jnp.full((1, 4, 1), 0.5))).ravel())
    [1.    1.5   1.75  1.875]
    """
    given = {"q": q, "k": k, "v": v, "g": g}
    more = {"initial_state": initial_state, "segment_ids": segment_ids}
    return _run(given | more, scale, False, return_final_state, axis_name, implementation)


@overload
def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    b: ArrayLike,
    g: ArrayLike | None = ...,
    *,
    scale: float = ...,
    qk_l2_norm: bool = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: Literal[False] = ...,
    axis_name: str | Sequence[str] | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    b: ArrayLike,
    g: ArrayLike | None = ...,
    *,
    scale: float = ...,
    qk_l2_norm: bool = ...,
    initial_state: ArrayLike | None = ...,
    segment_ids: ArrayLike | None = ...,
    return_final_state: bool,
    axis_name: str | Sequence[str] | None = ...,
    implementation: Implementation | None = ...,
) -> Any: ...


@hinted
def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    b: ArrayLike,
    g: ArrayLike | None = None,
    *,
    scale: float = 1.0,
    qk_l2_norm: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    return_final_state: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """The gated delta rule (Yang, Kautz and Hatamizadeh, 2024); DeltaNet without `g`.

        S_t = exp(g_t) (I - b_t k_t k_t') S_{t-1} + b_t k_t v_t'       of each head, [K, V]
        o_t = scale S_t' q_t

    Where b k_t' k_t is above 2, the state grows. Everything else is as for `linear_attention`.

    Args:
      q: [B, T, H, K] in bfloat16, float16 or float32.
      k: [B, T, H, K] in the dtype of q.
      v: [B, T, H', V] in that dtype, with H' a multiple of H.
      b: [B, T, H'], the strength of a write, in any of these dtypes.
      g: [B, T, H'], the logarithm of the decay, at most 0, in any of these dtypes; None for 0.
      scale: a factor of o.
      qk_l2_norm: whether q and k are divided by their L2 norms, sqrt(sum(x^2) + 1e-6).
      initial_state: [B, H', K, V] in float32; None for 0.
      segment_ids: [B, T] in int32, or None.
      return_final_state: whether to return the state after the last token too.
      axis_name: as for `linear_attention`; with a state, devices exchange a matrix [K, K] a head,
        and compute the recurrence three times: from a state of 0, of I, and of the tokens before.
      implementation: as for `linear_attention`. With `qk_l2_norm` there are no kernels.

    Returns:
      o [B, T, H', V] in the dtype of v; with `return_final_state`, a tuple of o and the state
      [B, H', K, V] in float32.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree, a value of g above 0, or a call of kernels that there are
        not.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 1, 1))
    >>> print(gated_delta_rule(x, x, x, jnp.full((1, 4, 1), 0.5)).ravel())
    [0.5    0.75   0.875  0.9375]
    """
    given = {"q": q, "k": k, "v": v, "g": g, "b": as_array("b", b, SHAPES["b"])}
    more = {"initial_state": initial_state, "segment_ids": segment_ids}
    is_normalised = check_flag("qk_l2_norm", qk_l2_norm)
    return _run(given | more, scale, is_normalised, return_final_state, axis_name, implementation)


def _run(
    given: Mapping[str, Any],
    scale: float,
    l2_norm: bool,
    returns_state: bool,
    axis_name: Any,
    implementation: Implementation | None,
) -> Any:
    """Returns o, and the final state if it is asked for.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes that disagree, a value of g above 0, kernels that there are not, or an
            axis that is no manual one.
    """
    names = names_of_devices(axis_name)
    chosen = choose(OPERATION, implementation)
    returns_state = check_flag("return_final_state", returns_state)
    optional = ("g", "initial_state", "segment_ids")
    arrays = {
        name: as_array(name, one, SHAPES[name])
        for name, one in given.items()
        if one is not None or name not in optional
    }
    _check(arrays)
    q, v, ids, state = arrays["q"], arrays["v"], *map(arrays.get, ("segment_ids", "initial_state"))
    g = arrays.get("g")
    if g is None:
        g = jnp.zeros_like(v[..., 0], dtype=jnp.float32)
    if ids is not None:
        starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))[:, : ids.shape[1]]
        if names and ids.size:
            starts = starts.at[:, :1].set(over_devices.starts_with_segment(names, ids))
        # A decay of 0 starts the state anew.
        g = jnp.where(starts[..., None], LEAST_LOG_DECAY, g.astype(jnp.float32))
    given_state = state
    if state is None:
        state = _zero_state(q, v)
    options = Options(check_float32("scale", scale, is_positive=False), l2_norm)
    b = arrays.get("b")

    def run(v: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = [q, arrays["k"], v, g, *([] if b is None else [b])]
        return _run_whole(options, chosen, implementation, [*tokens, state])

    if names:
        if b is None:
            precision = Program.of(options, [q]).precision
            transition = over_devices.decayed_transition(arrays["k"], v, g, precision)
        else:
            none = jnp.zeros_like(v[..., :1]) * jnp.zeros(q.shape[-1], v.dtype)
            eye = jnp.zeros_like(_zero_state(q, none)) + jnp.eye(q.shape[-1])
            transition = run(none, eye)[1], run(v, _zero_state(q, v))[1]
        state = over_devices.state_before(names, *transition, given_state)
    o, state = run(v, state)
    if names and returns_state:
        state = over_devices.last_state(names, state)
    return (o, state) if returns_state else o


def _zero_state(q: jax.Array, v: jax.Array) -> jax.Array:
    """Returns zeros [B, H', K, V], sharded as v is: sums over no tokens."""
    columns = jnp.zeros(q.shape[-1], jnp.float32)
    return jnp.einsum("bthv,k->bhkv", v[:, :0].astype(jnp.float32), columns)


def _run_whole(
    options: Options, chosen: Any, implementation: Implementation | None, arrays: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns o and the final state of q, k, v, g, b for the delta rule, and a state.

    Raises:
        ValueError: there are no kernels, which `implementation` names.
    """
    # Within `shard_map`, the transpose of this is the sum over devices for shared arrays.
    every = vary_alike(arrays)
    missing = lacks(options, every)
    if missing and implementation == "custom_call":
        raise ValueError(f"{missing} for kernels; implementation=None has XLA's program for others")
    if chosen == "reference" or missing:
        return _attend(options, *every)
    q, k, v, g, *rest = every
    g = jnp.maximum(g.astype(jnp.float32), LEAST_LOG_DECAY)
    every = [q, k, v, g, *(one.astype(jnp.float32) for one in rest)]
    return attend(Call.of(options, every, implementation), *every)


def _check(arrays: Mapping[str, jax.Array]) -> None:
    """Checks shapes, dtypes, and that g is no decay but its logarithm.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes that disagree, or a value of g above 0.
    """
    q, v = arrays["q"], arrays["v"]
    for name, one in (("q", q), ("v", v)):
        check_dtype(name, one)
        if one.ndim != 4:
            raise ValueError(f"{name} has shape {one.shape}; it must be {SHAPES[name]}")
    batch, tokens, heads, width = q.shape
    value_heads, columns = v.shape[2:]
    if v.shape[:2] != (batch, tokens) or heads == 0 or value_heads % heads:
        raise ValueError(
            f"v has shape {v.shape} and q {q.shape}; v must be [{batch}, {tokens}, H', V], with H' "
            f"a multiple of {heads}"
        )
    token_shape = (batch, tokens, value_heads)
    right: dict[str, tuple[tuple[Any, ...], Any]] = {
        "k": (q.shape, q.dtype),
        "v": (v.shape, q.dtype),
        "g": (token_shape, None),
        "b": (token_shape, None),
        "initial_state": ((batch, value_heads, width, columns), jnp.float32),
        "segment_ids": ((batch, tokens), jnp.int32),
    }
    of = f"q of shape {q.shape} and v of shape {v.shape}"
    for name, (shape, dtype) in right.items():
        if name in arrays:
            check_operand(name, arrays[name], shape, dtype, SHAPES[name], of)
    _check_sharding(arrays)
    g = arrays.get("g")
    if g is None or is_traced(g) or not g.is_fully_addressable:
        return
    # Within `jit`, operations on constants are traced too.
    with jax.ensure_compile_time_eval():
        most = float(jnp.where(g > 0, g, 0).max(initial=0))
    if most > 0:
        raise ValueError(
            f"g has {most}, which is above 0; g is the logarithm of the decay: pass jnp.log(a) "
            "of decays a from 0 to 1"
        )


def _check_sharding(arrays: Mapping[str, jax.Array]) -> None:
    """Checks that explicit axes shard batch and heads alone, and all arrays as they shard v.

    Raises:
        ValueError: they do not.
    """
    batch, _, heads, _ = spec_of(jax.typeof(arrays["v"]))
    for name, array in arrays.items():
        axes = SHAPES[name].strip("[]").split(", ")
        right = [{"B": batch, "H": heads, "H'": heads}.get(axis) for axis in axes]
        if spec_of(jax.typeof(array)) != right:
            raise ValueError(
                f"{name} is sharded as {PartitionSpec(*spec_of(jax.typeof(array)))}; it must be "
                f"sharded as {PartitionSpec(*right)}, as v by batch and heads alone: call "
                "jax.sharding.reshard(x, ..) with that first"
            )


# Outside of `jit` too, each is compiled once.
_forward = jax.jit(Program.forward, static_argnums=0)
_backward = jax.jit(Program.backward, static_argnums=0)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    o, state, _ = _forward(Program.of(options, arrays), *arrays)
    return o, state


@partial(_attend.defjvp, symbolic_zeros=True)
def _jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = _forward(Program.of(options, primals), *primals)
    o, state, saved = jax.tree.map(lambda one: checkpoint_name(one, "linear_attention"), found)
    moving = [linear.given(one) for one in tangents]
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    residuals = [*primals, saved]
    return (o, state), tuple(linear.bind(apply, transpose, residuals, moving, [o, state]))


def _apply(options: Options, residuals: Any, tangents: Any) -> Any:
    *arrays, _ = residuals
    return linear.tangents_of(partial(_attend.fun, options), arrays, tangents)


def _transpose(options: Options, residuals: Any, cotangents: Any) -> Any:
    if all(one is None for one in cotangents):
        return [None] * (len(residuals) - 1)
    *arrays, saved = residuals
    v, state = arrays[2], arrays[-1]
    do, dstate = (
        jnp.zeros_like(like) if one is None else one
        for one, like in zip(cotangents, (v, state), strict=True)
    )
    return _backward(Program.of(options, arrays), arrays, saved, do, dstate)
