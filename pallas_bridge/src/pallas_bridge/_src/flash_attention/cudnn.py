"""cuDNN's attention, which runs on NVIDIA GPUs where it has all of the options."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import spec_of
from ..bound import Bound
from ..custom_call import vary_alike
from ..implementations import gpus
from .options import Options

Kernel = Callable[..., tuple[jax.Array, ...]]


def forward(
    options: Options, others: Kernel, *arrays: jax.Array, has_gradient: bool = False
) -> tuple[jax.Array, ...]:
    """Returns o and lse, by `others` where it is not cuDNN's.

    What cuDNN is made of is partitioned by rules of JAX that must see a program's devices, so that
    the choice is part of the traced program. The caller does not see lse: where the call
    `has_gradient`, its place is taken by what cuDNN's backward pass takes of the forward pass.
    """
    plan = make_plan(options, *arrays[:3], has_gradient=has_gradient)
    function, saving = plan.function, plan.saving
    if function is None or not plan.is_forward:
        return others(*arrays)

    def run_forward(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        if saving is not None:
            return saving.forward(*arrays[:3])
        o = function(*arrays[:3])
        lse, *_ = vary_alike([jnp.zeros_like(arrays[0][..., 0], jnp.float32), o])
        return o, lse

    found: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cuda=run_forward, default=others
    )
    return found


def backward(
    options: Options, others: Kernel, arrays: Sequence[jax.Array], o: Any, lse: Any, do: Any
) -> tuple[jax.Array, ...]:
    """Returns dq, dk and dv, by `others` where they are not cuDNN's."""
    plan = make_plan(options, *arrays[:3], has_gradient=True)
    function, saving = plan.function, plan.saving
    if function is None or not plan.is_backward:
        return others(*arrays, o, lse, do)

    def run_backward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, *_, o, lse, do = arrays
        if saving is not None:
            return saving.backward(q, k, v, o, lse, do)
        # The forward pass is made again.
        found: tuple[jax.Array, ...] = jax.vjp(function, q, k, v)[1](do)
        return found

    found: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, o, lse, do, cuda=run_backward, default=others
    )
    return found


@dataclass(frozen=True)
class CudnnPlan:
    """Which passes of a call cuDNN runs."""

    # cuDNN's attention, and both passes by what the first one saves; None where there is none.
    function: "Cudnn | None" = None
    saving: "Saving | None" = None
    is_forward: bool = False
    is_backward: bool = False


def make_plan(options: Options, q: Any, k: Any, v: Any, *, has_gradient: bool) -> CudnnPlan:
    """Returns which passes cuDNN runs of q, k and v of such types.

    The library's backward pass takes lse, which its own forward pass gives, and cuDNN's where its
    statistics are lse. cuDNN's backward pass follows cuDNN's forward pass alone.
    """
    function = attention_of(options, q, k, v, has_gradient=has_gradient)
    if function is None:
        return CudnnPlan()
    passes = passes_by_cudnn(options, q, k, v) if _has_hopper_alone() else Passes()
    if not has_gradient:
        return CudnnPlan(function, None, passes.alone)
    saving = function.saving(q, k, v)
    saves_lse = saving is not None and STATISTICS in saving.sources
    is_backward = passes.backward or (passes.forward and not saves_lse)
    return CudnnPlan(function, saving, passes.forward, is_backward)


@dataclass(frozen=True)
class Passes:
    """Which passes are faster by cuDNN: forward alone, and forward and backward of one program."""

    alone: bool = True
    forward: bool = True
    backward: bool = True


def passes_by_cudnn(options: Options, q: Any, k: Any, v: Any) -> Passes:
    """Returns which passes cuDNN runs on Hopper.

    As `benches/peers/attention.py` measured on an H200 (docs/internals/flash-attention.md).
    """
    tokens, columns = q.shape[-2], q.shape[-1]
    before, after = options.window
    is_causal = options.causal or after == 0
    if not is_causal or tokens != k.shape[-2] or columns != v.shape[-1] or tokens < LEAST_TOKENS:
        return Passes()
    if before is not None:
        is_narrow = before <= tokens // 4
        return NONE if is_narrow and columns in LONGEST_BY_LIBRARY else Passes()
    if columns == 64:
        return Passes(backward=False)
    return NONE if tokens <= LONGEST_BY_LIBRARY.get(columns, 0) else Passes()


# The shortest sequences that the choice was measured at.
LEAST_TOKENS = 1024
# Up to so many tokens the library's kernels are faster in both passes, by columns.
LONGEST_BY_LIBRARY = {96: 4096, 128: 16384}
NONE = Passes(alone=False, forward=False, backward=False)


def _has_hopper_alone() -> bool:
    devices = gpus()
    hopper = [getattr(one, "compute_capability", None) == "9.0" for one in devices]
    return bool(devices) and all(hopper)


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's attention of q [.., H, G, S, D], k [.., H, K, D] and v [.., H, K, E]."""

    # Of arrays [B, S, heads, columns], as users have them.
    attend: Callable[..., jax.Array]
    # How explicit axes of a mesh cut q; what cuts q is what cuts o.
    spec: tuple[Any, ...]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Returns o."""

        def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            o = self.attend(_by_tokens(q, 2), _by_tokens(k, 1), _by_tokens(v, 1))
            return _by_heads(o, q)

        if self.has_explicit_axes:
            # It knows of none.
            of_o = jax.sharding.PartitionSpec(*self.spec)
            function = jax.sharding.auto_axes(function, out_sharding=of_o)
        return function(q, k, v)

    @property
    def has_explicit_axes(self) -> bool:
        """Whether explicit axes of a mesh cut q."""
        return any(one is not None for one in self.spec)

    def saving(self, q: jax.Array, k: jax.Array, v: jax.Array) -> "Saving | None":
        """Returns both passes by what the first one saves; None where that is not known.

        JAX's own backward pass of this function takes q, k, v, o, and statistics of the softmax.
        """
        if self.has_explicit_axes:
            return None
        trees = []

        def both(*arrays: jax.Array) -> list[jax.Array]:
            o, vjp = jax.vjp(self.attend, *arrays)
            leaves, tree = jax.tree.flatten(vjp)
            trees.append(tree)
            return [o, *leaves]

        closed = jax.make_jaxpr(both)(_by_tokens(q, 2), _by_tokens(k, 1), _by_tokens(v, 1))
        o, *saved = closed.jaxpr.outvars
        known = [*closed.jaxpr.invars, o]
        avals = tuple(closed.out_avals[1:])
        sources: list[int] = []
        for var, aval in zip(saved, avals, strict=True):
            found = [number for number, one in enumerate(known) if one is var]
            is_statistics = aval.dtype == jnp.float32 and aval.size == math.prod(q.shape[:-1])
            if found:
                sources += found
            elif aval.size == 0:
                sources.append(NOTHING)
            elif is_statistics and STATISTICS not in sources:
                sources.append(STATISTICS)
            else:
                return None
        return Saving(self.attend, trees[0], tuple(sources), avals)


# Where an array that a backward pass takes comes from, beside q, k, v and o, by their numbers.
STATISTICS, NOTHING = 4, 5


@dataclass(frozen=True)
class Saving:
    """Both passes of cuDNN's attention, of which the second takes what the first has saved."""

    attend: Callable[..., jax.Array]
    # JAX's pullback, and of its arrays the sources and types.
    tree: Any
    sources: tuple[int, ...]
    avals: tuple[Any, ...]

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns o, and statistics [.., H, G, S] in float32, zeros where none are saved."""
        arrays = _by_tokens(q, 2), _by_tokens(k, 1), _by_tokens(v, 1)
        o, vjp = jax.vjp(self.attend, *arrays)
        if STATISTICS in self.sources:
            statistics = jax.tree.leaves(vjp)[self.sources.index(STATISTICS)]
        else:
            statistics, *_ = vary_alike([jnp.zeros(q.shape[:-1], jnp.float32), o])
        return _by_heads(o, q), statistics.reshape(q.shape[:-1])

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        o: jax.Array,
        statistics: jax.Array,
        do: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Returns dq, dk and dv."""
        known = _by_tokens(q, 2), _by_tokens(k, 1), _by_tokens(v, 1), _by_tokens(o, 2), statistics
        leaves = [
            jnp.zeros(aval.shape, aval.dtype)
            if source == NOTHING
            else known[source].reshape(aval.shape)
            for source, aval in zip(self.sources, self.avals, strict=True)
        ]
        found = jax.tree.unflatten(self.tree, leaves)(_by_tokens(do, 2))
        return tuple(_by_heads(one, x) for one, x in zip(found, (q, k, v), strict=True))


def _by_tokens(x: jax.Array, heads: int) -> jax.Array:
    """Returns x [.., heads, S, D] as [B, S, H, D]; the axes of heads are so many."""
    *leading, rows, columns = x.shape
    count = math.prod(leading[len(leading) - heads :])
    return jnp.moveaxis(x.reshape(-1, count, rows, columns), 1, 2)


def _by_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x [B, S, H, E] with the axes of `like` [.., S, D]."""
    return jnp.moveaxis(x, 1, 2).reshape(*like.shape[:-1], x.shape[-1])


def attention_of(
    options: Options, q: Any, k: Any, v: Any, *, has_gradient: bool = False
) -> Cudnn | None:
    """Returns cuDNN's attention of q, k and v of such types; None where it has not all options.

    JAX says so too, as where this process has no cuDNN, or of odd lengths where the call
    `has_gradient`. lse is not its: JAX rounds what it gives.
    """
    has_more = options.has_lengths or options.has_segments or options.has_sinks or options.gives_lse
    queries, keys = q.shape[-2], k.shape[-2]
    if has_more or options.softcap is not None or q.dtype == jnp.float32 or 0 in (queries, keys):
        return None
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return None
    before, after = options.window
    is_causal = options.causal or after == 0
    if (before, after) != (None, None) and not is_causal:
        return None
    if is_causal and queries != keys:
        return None
    more: dict[str, Any] = {}
    if before is not None:
        more["local_window_size"] = (before, 0)

    more["is_causal"] = is_causal
    attend = Bound(_attend, options.scale, tuple(more.items()))
    function = Cudnn(attend, tuple(spec_of(jax.typeof(q))))
    probe = (lambda *arrays: jax.vjp(function, *arrays)[0]) if has_gradient else function
    try:
        jax.eval_shape(probe, q, k, v)
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return function


def _attend(
    scale: float, more: tuple[tuple[str, Any], ...], q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    o: jax.Array = jax.nn.dot_product_attention(
        q, k, v, scale=scale, implementation="cudnn", **dict(more)
    )
    return o
