"""Linear attention and the gated delta rule in chunks of tokens, as XLA's program.

For a chunk with the state S [K, V] before it, and G the cumulative sum of g within it:

    D_ij = exp(G_i - G_j) where i >= j, else 0
    A_ij = b_i (k_i . k_j) D_ij where i > j, else 0
    N    = (I + A)^-1 b (v - exp(G) k S)           the values that enter the state; v without b
    o    = exp(G) q S + (q k' * D) N
    S'   = exp(G_C) S + sum_j exp(G_C - G_j) k_j N_j'

(Dao and Gu, 2024, section 6; Yang, Kautz and Hatamizadeh, 2024, section 3.3.) A sequence runs in
groups of chunks. The backward pass has the arguments and the state before each group, or before
every few, and recomputes the rest a group at a time. Arrays of a group have these axes: n, chunks;
b, batch; h, heads of keys; r, heads of values that share a head of keys; i and j, tokens of a
chunk; k and v, columns.

NaN and inf reach no token that the recurrence keeps them from. GEMMs with a triangle, where 0 times
NaN is NaN, have 0 for what is not finite, and results are NaN where an entry that is not masked
meets such a number.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..chunk_loops import for_each_chunk
from ..compat import varying_axes
from .triangular import invert_unit_lower

CHUNK = 64
# Chunks of a group where the length is symbolic.
SYMBOLIC_GROUP = 4
# exp of it is 0 in float32.
LEAST_LOG_DECAY = -128.0
# Arrays of the delta rule, one more than those of linear attention.
DELTA_ARRAYS = 6
# Multiples of 1 / 1024 down to -128 have exact sums over a chunk.
STEPS = 1024.0
# As Qwen3-Next and flash-linear-attention have it.
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Options:
    """The options of a call. Its arrays are q, k, v, g, b for the delta rule, and a state."""

    scale: float
    l2_norm: bool


class Chunks(NamedTuple):
    """The arguments of a group of chunks, in float32."""

    q: jax.Array  # n b h i k, normalised and scaled
    k: jax.Array  # n b h i k, normalised
    v: jax.Array  # n b h r i v
    g: jax.Array  # n b h r i
    b: jax.Array | None  # n b h r i


class Terms(NamedTuple):
    """What a group needs before its states are known."""

    decay: jax.Array  # D, n b h r i j
    from_start: jax.Array  # exp(G), n b h r i 1
    to_end: jax.Array  # exp(G_C - G), n b h r i 1
    kk: jax.Array | None  # k k' D where i > j, n b h r i j; None without b
    inverse: jax.Array | None  # (I + A)^-1, n b h r i j; None without b


class Solved(NamedTuple):
    """The states of a group, and the values that enter them."""

    states: jax.Array  # before each chunk, n b h r k v
    new: jax.Array  # N, n b h r i v
    unseen: jax.Array | None  # v - exp(G) k S, n b h r i v; None without b


@dataclass(frozen=True)
class Program:
    """The program for arrays of a shape."""

    options: Options
    precision: jax.lax.Precision | None
    # Tokens of a chunk and of a group.
    chunk: int
    group: int
    # Tokens from one saved state to the next, if more than a group: the backward pass then
    # recomputes the states between.
    saved: int | None = None

    @staticmethod
    def of(options: Options, arrays: Any) -> "Program":
        """Returns the program for the arrays of a call."""
        q, *_ = arrays
        tokens: Any = q.shape[1]
        # GEMMs of float32 are not rounded to TF32 or bfloat16. Other dtypes have been rounded more.
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        if not isinstance(tokens, int):
            return Program(options, precision, CHUNK, SYMBOLIC_GROUP * CHUNK)
        chunk = min(CHUNK, 1 << max(tokens - 1, 0).bit_length())
        # Larger groups are faster, and fewer states are saved, one a group. The backward pass has
        # some twenty arrays of a group: about as much memory as all states.
        count = max(math.isqrt(tokens // (2 * chunk)), 1)
        if len(arrays) < DELTA_ARRAYS:
            # Half as many arrays. On GPUs the time is that of starting each group's kernels.
            count *= 2
        return Program(options, precision, chunk, chunk * count)

    def forward(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns o [B, T, H', V], the final state, and the saved states, g b h r k v."""
        *tokens, state = arrays
        length = tokens[0].shape[1]
        tokens = self._padded(tokens)
        size = tokens[0].shape[1]
        state = self._by_heads(state, tokens[0])
        every = self.saved or self.group

        def body(first: Any, count: int, carry: Any) -> Any:
            o, saved, state = carry
            saved = jax.lax.dynamic_update_index_in_dim(saved, state, first // every, 0)

            def of_group(offset: Any, count: int, carry: Any) -> Any:
                o, state = carry
                chunks = self._load(*_rows(tokens, first + offset, count))
                terms = self._terms(chunks)
                state, solved = self._solve(state, chunks, terms)
                found = self._outputs(chunks, terms, solved)
                return _put(o, _as_rows(found, count), first + offset), state

            o, state = for_each_chunk(count, self.group, of_group, (o, state))
            return o, saved, state

        saved = jnp.broadcast_to(_zeros(state), (-(-size // every), *state.shape))
        carry = (_zeros(tokens[2]), saved, state)
        o, saved, state = for_each_chunk(size, every, body, carry)
        return o[:, :length], state.reshape(arrays[-1].shape), saved

    def backward(
        self, arrays: Any, saved: jax.Array, do: jax.Array, dstate: jax.Array
    ) -> list[jax.Array]:
        """Returns the gradients of arrays, from those of o and of the final state."""
        *tokens, _ = arrays
        length = do.shape[1]
        *tokens, do = self._padded([*tokens, do])
        size = do.shape[1]
        every = self.saved or self.group

        def body(first: Any, count: int, carry: Any) -> Any:
            state = jax.lax.dynamic_index_in_dim(saved, first // every, 0, keepdims=False)
            states = self._states(tokens, state, first, count)

            def of_group(offset: Any, count: int, carry: Any) -> Any:
                gradients, dstate = carry
                at = first + offset
                chunks, vjp = jax.vjp(self._load, *_rows(tokens, at, count))
                (rows,) = _rows([do], at, count)
                heads = chunks.k.shape[2]
                number = offset // self.group
                state = jax.lax.dynamic_index_in_dim(states, number, 0, keepdims=False)
                found, dstate = self._gradients(chunks, state, self._split(rows, heads), dstate)
                pairs = zip(gradients, vjp(found), strict=True)
                return [_put(one, part, at) for one, part in pairs], dstate

            return for_each_chunk(count, self.group, of_group, carry, is_reversed=True)

        carry = ([*map(_zeros, tokens)], self._by_heads(dstate, tokens[0]))
        gradients, dstate = for_each_chunk(size, every, body, carry, is_reversed=True)
        return [*(one[:, :length] for one in gradients), dstate.reshape(arrays[-1].shape)]

    def _states(self, tokens: Any, state: jax.Array, first: Any, count: int) -> jax.Array:
        """Returns the states before groups of `count` tokens, g b h r k v, from the first one."""
        last = -(-count // self.group) - 1
        if last <= 0:
            return state[None]

        def body(offset: Any, count: int, carry: Any) -> Any:
            states, state = carry
            states = jax.lax.dynamic_update_index_in_dim(states, state, offset // self.group, 0)
            chunks = self._load(*_rows(tokens, first + offset, count))
            state, _ = self._solve(state, chunks, self._terms(chunks))
            return states, state

        states = jnp.broadcast_to(_zeros(state), (last + 1, *state.shape))
        states, state = for_each_chunk(last * self.group, self.group, body, (states, state))
        before: jax.Array = jax.lax.dynamic_update_index_in_dim(states, state, last, 0)
        return before

    def _padded(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Returns arrays with whole groups of tokens, if their number is symbolic."""
        tokens: Any = arrays[0].shape[1]
        if isinstance(tokens, int):
            return arrays
        whole = self.group * ((tokens + self.group - 1) // self.group)
        return [jnp.pad(x, [(0, 0), (0, whole - tokens), *[(0, 0)] * (x.ndim - 2)]) for x in arrays]

    def _by_heads(self, state: jax.Array, q: jax.Array) -> jax.Array:
        """Returns a state [B, H', K, V] as b h r k v."""
        batch, heads, *rest = state.shape
        return state.reshape(batch, q.shape[2], heads // q.shape[2], *rest)

    def _split(self, x: jax.Array, heads: int | None = None) -> jax.Array:
        """Returns x [B, t, H, ..] as n b h i .., or n b h r i .. if H is more than `heads`."""
        batch, tokens, every, *rest = x.shape
        chunks = -(-tokens // self.chunk)
        x = jnp.pad(x, [(0, 0), (0, chunks * self.chunk - tokens), *[(0, 0)] * (x.ndim - 2)])
        by = (every,) if heads is None else (heads, every // heads)
        # Of explicitly sharded arrays, older versions of JAX split and merge one axis at a time.
        x = x.reshape(batch, chunks * self.chunk, *by, *rest)
        x = x.reshape(batch, chunks, self.chunk, *by, *rest).astype(jnp.float32)
        return jnp.moveaxis(jnp.moveaxis(x, 2, 2 + len(by)), 1, 0)

    def _load(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, b: jax.Array | None = None
    ) -> Chunks:
        """Returns chunks of rows; tokens after the last change no state."""
        heads = k.shape[2]
        q, k = self._split(q), self._split(k)
        if self.options.l2_norm:
            q, k = _l2_normalised(q), _l2_normalised(k)
        v, g = self._split(v, heads), self._split(g, heads)
        g = jnp.maximum(g, LEAST_LOG_DECAY)
        return Chunks(q * self.options.scale, k, v, g, None if b is None else self._split(b, heads))

    def _dot(self, axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(axes, x, y, precision=self.precision)

    def _terms(self, chunks: Chunks) -> Terms:
        # Sums of multiples of 1 / 1024 are exact, so that small differences of large ones are too.
        g = _finite(chunks.g)
        steps = jnp.round(g * STEPS) / STEPS
        lower = _lower(self.chunk)
        high, low = (_sums("nbhrj,ij->nbhri", x, lower) for x in (steps, g - steps))
        # The last g up to a token that is not finite: decays over it are NaN.
        last = _maxima_before(_place_of_bad(chunks.g, -1))
        differences = (high[..., None] - high[..., None, :]) + (low[..., None] - low[..., None, :])
        differences = jnp.where(last[..., None] > _places(differences, -1), jnp.nan, differences)
        decay = jnp.exp(jnp.where(lower > 0, differences, LEAST_LOG_DECAY))
        from_start = jnp.exp(jnp.where(last < 0, high + low, jnp.nan))[..., None]
        to_end = decay[..., -1, :, None]
        if chunks.b is None:
            return Terms(decay, from_start, to_end, None, None)
        kk = self._dot("nbhik,nbhjk->nbhij", chunks.k, chunks.k)[:, :, :, None]
        kk = _strictly_lower(kk * decay)
        return Terms(decay, from_start, to_end, kk, _invert(chunks.b[..., None] * kk))

    def _solve(self, state: jax.Array, chunks: Chunks, terms: Terms) -> tuple[jax.Array, Solved]:
        """Returns the state after a group, and what its chunks have."""
        if chunks.b is None:
            added = self._dot("nbhjk,nbhrjv->nbhrkv", chunks.k, terms.to_end * chunks.v)
            after, states = _decayed_sums(state, added, terms.from_start[..., -1, 0])
            return after, Solved(states, chunks.v, None)

        def step(state: jax.Array, xs: Any) -> Any:
            (_, k, v, _, b), terms = xs
            unseen = v - terms.from_start * self._dot("bhik,bhrkv->bhriv", k, state)
            new = self._lower_dot("bhrij,bhrjv->bhriv", terms.inverse, b[..., None] * unseen)
            added = self._dot("bhjk,bhrjv->bhrkv", k, terms.to_end * new)
            after = terms.from_start[..., -1:, :] * state + added
            return after, Solved(state, new, unseen)

        found: tuple[jax.Array, Solved] = jax.lax.scan(step, state, (chunks, terms))
        return found

    def _outputs(self, chunks: Chunks, terms: Terms, solved: Solved) -> jax.Array:
        """Returns o, n b h r i v."""
        qk = self._dot("nbhik,nbhjk->nbhij", chunks.q, chunks.k)[:, :, :, None]
        scores = _masked(qk * terms.decay)
        seen = self._dot("nbhik,nbhrkv->nbhriv", chunks.q, solved.states)
        return terms.from_start * seen + self._lower_dot(
            "nbhrij,nbhrjv->nbhriv", scores, solved.new
        )

    def _gradients(
        self, chunks: Chunks, state: jax.Array, do: jax.Array, dstate: jax.Array
    ) -> tuple[Chunks, jax.Array]:
        """Returns the gradients of a group's chunks and of the state before it."""
        dot, (q, k, _, _, b) = self._dot, chunks
        terms = self._terms(chunks)
        decay, from_start, to_end, kk, _ = terms
        _, (states, new, unseen) = self._solve(state, chunks, terms)
        qk = dot("nbhik,nbhjk->nbhij", q, k)[:, :, :, None]
        scores = _masked(qk * decay)
        before, dstates, dnew = self._solve_transposed(chunks, terms, scores, do, dstate)
        dscores = _masked(dot("nbhriv,nbhrjv->nbhrij", do, new) * decay)
        dqk = dscores.sum(3)
        dq_seen = from_start * dot("nbhriv,nbhrkv->nbhrik", do, states)
        dk_added = to_end * dot("nbhrjv,nbhrkv->nbhrjk", new, dstates)
        dq = dq_seen.sum(3) + self._lower_dot("nbhij,nbhjk->nbhik", dqk, k)
        dk = dk_added.sum(3) + self._upper_dot("nbhij,nbhik->nbhjk", dqk, q)
        # Gradients of the exponents G_i - G_j, G_i and G_C - G_j. The first and the last are 0
        # where i = j and j = C: these gradients are left out, as they cancel but for rounding.
        dexponent = _strictly_lower(dscores * qk)
        dexponent_start = (dq_seen * q[:, :, :, None]).sum(-1)
        dexponent_end = (dk_added * k[:, :, :, None]).sum(-1)
        dv, db = dnew, None
        if b is not None and kk is not None and unseen is not None:
            dlower = -_strictly_lower(dot("nbhriv,nbhrjv->nbhrij", dnew, new))
            db = (dlower * kk).sum(-1) + (dnew * unseen).sum(-1)
            dexponent = dexponent + b[..., None] * dlower * kk
            dkk = _strictly_lower(b[..., None] * dlower * decay).sum(3)
            dk = dk + dot("nbhij,nbhjk->nbhik", dkk + dkk.swapaxes(-1, -2), k)
            dv = b[..., None] * dnew
            dk_seen = -from_start * dot("nbhriv,nbhrkv->nbhrik", dv, states)
            dk = dk + dk_seen.sum(3)
            dexponent_start = dexponent_start + (dk_seen * k[:, :, :, None]).sum(-1)
        dg = self._sum_exponents(dexponent_start, dexponent_end, dexponent)
        dg = dg + from_start[..., -1, :] * (dstates * states).sum((-2, -1))[..., None]
        return Chunks(dq, dk, dv, dg, db), before

    def _sum_exponents(self, start: jax.Array, end: jax.Array, pairs: jax.Array) -> jax.Array:
        """Returns dg from gradients of exponents: of G_i, of G_C - G_j, and of G_i - G_j for i > j.

        g_t is a term of G_i for t <= i, of G_C - G_j for t > j, and of G_i - G_j for i >= t > j.
        """
        finite = _finite(pairs)
        dsum = _finite(start) + finite.sum(-1) - finite.sum(-2)
        dg = _sums("nbhri,ij->nbhrj", dsum, _lower(self.chunk))
        dg = dg + _sums("nbhrj,ij->nbhri", _finite(end), _lower(self.chunk, -1))
        # The last i of what is not finite, in pairs with j < t too, and the first j.
        last = _maxima_before(_place_of_bad(pairs, -2).max(-2), -1)
        last = jnp.maximum(last, _place_of_bad(start, -1).max(-1, keepdims=True))
        first = _first_of_bad(end, -1)
        t = _places(dg, -1)
        return jnp.where((last >= t) | (first < t), jnp.nan, dg)

    def _lower_dot(self, axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns x y of x [.., i, j], which is 0 where i < j, and rows y [.., j, columns]."""
        product = self._dot(axes, x, _finite(y))
        return jnp.where(_first_of_bad(y, -2) <= _places(product, -2), jnp.nan, product)

    def _upper_dot(self, axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns x' y of x [.., i, j], which is 0 where i < j, and rows y [.., i, columns]."""
        last = _place_of_bad(y, -2).max(-2, keepdims=True)
        product = self._dot(axes, x, _finite(y))
        return jnp.where(last >= _places(product, -2), jnp.nan, product)

    def _solve_transposed(
        self, chunks: Chunks, terms: Terms, scores: jax.Array, do: jax.Array, dstate: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of the state before a group, of those after chunks, and of N.

        With b, the last is the gradient of b (v - exp(G) k S), from which N is solved.
        """
        dot = self._dot

        def step(dstate: jax.Array, xs: Any) -> Any:
            (_, k, _, _, b), (_, from_start, to_end, _, inverse), dnew, dseen = xs
            dnew = dnew + to_end * dot("bhjk,bhrkv->bhrjv", k, dstate)
            dnew = self._upper_dot("bhrij,bhriv->bhrjv", inverse, dnew)
            dunseen = b[..., None] * from_start * dnew
            before = from_start[..., -1:, :] * dstate + dseen
            return before - dot("bhik,bhriv->bhrkv", k, dunseen), (dnew, dstate)

        dnew = self._upper_dot("nbhrij,nbhriv->nbhrjv", scores, do)
        dseen = dot("nbhik,nbhriv->nbhrkv", chunks.q, terms.from_start * do)
        if chunks.b is None:
            whole = terms.from_start[..., -1, 0]
            before, dstates = _decayed_sums(dstate, dseen, whole, is_reversed=True)
            added = dot("nbhjk,nbhrkv->nbhrjv", chunks.k, dstates)
            return before, dstates, dnew + terms.to_end * added
        xs = (chunks, terms, dnew, dseen)
        before, (dnew, dstates) = jax.lax.scan(step, dstate, xs, reverse=True)
        return before, dstates, dnew


def _decayed_sums(
    first: jax.Array, added: jax.Array, decay: jax.Array, *, is_reversed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the last of x_{n+1} = decay_n x_n + added_n, and every x_n, from x_0 = `first` on.

    Of n b h r k v; decay is n b h r. With `is_reversed` n runs backwards.
    """

    def step(x: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        added, decay = xs
        return decay[..., None, None] * x + added, x

    # Unrolled, XLA makes few kernels of all steps.
    found: tuple[jax.Array, jax.Array] = jax.lax.scan(
        step, first, (added, decay), reverse=is_reversed, unroll=True
    )
    return found


def _lower(size: int, diagonal: int = 0) -> jax.Array:
    """Returns ones on and below a diagonal, [size, size], and zeros above."""
    return jnp.tri(size, k=diagonal, dtype=jnp.float32)


def _strictly_lower(x: jax.Array) -> jax.Array:
    """Returns x [.., size, size] with zeros on and above the diagonal."""
    return jnp.where(_lower(x.shape[-1], -1) > 0, x, 0.0)


def _masked(x: jax.Array) -> jax.Array:
    """Returns x [.., size, size] with zeros above the diagonal."""
    return jnp.where(_lower(x.shape[-1]) > 0, x, 0.0)


def _finite(x: jax.Array) -> jax.Array:
    """Returns x with zeros for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _places(x: jax.Array, axis: int) -> jax.Array:
    """Returns the indices along an axis of x, in the shape of x."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)


def _place_of_bad(x: jax.Array, axis: int) -> jax.Array:
    """Returns the index along an axis of what is not finite, else -1, in the shape of x."""
    return jnp.where(jnp.isfinite(x), -1, _places(x, axis))


def _first_of_bad(x: jax.Array, axis: int) -> jax.Array:
    """Returns the least index along an axis of what is not finite, else the size of the axis."""
    size = x.shape[axis]
    return jnp.where(jnp.isfinite(x), size, _places(x, axis)).min(axis, keepdims=True)


def _maxima_before(places: jax.Array, diagonal: int = 0) -> jax.Array:
    """Returns maxima of indices [.., i], each of those up to a diagonal of [i, i]; -1 of none."""
    lower = _lower(places.shape[-1], diagonal) > 0
    return jnp.where(lower, places[..., None, :], -1).max(-1)


def _invert(a: jax.Array) -> jax.Array:
    """Returns (I + A)^-1 [.., i, j] of A [.., i, j], which is masked here where i <= j.

    An entry depends on those of A alone whose indices are from j to i.
    """
    a = _strictly_lower(a)
    last = _maxima_before(_place_of_bad(a, -1).max(-1))
    return jnp.where(last[..., None] >= _places(a, -1), jnp.nan, invert_unit_lower(_finite(a)))


def _sums(axes: str, x: jax.Array, ones: jax.Array) -> jax.Array:
    """Returns cumulative sums as a GEMM, which XLA computes once and not in every consumer."""
    return jnp.einsum(axes, x, ones, precision=jax.lax.Precision.HIGHEST)


def _l2_normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPSILON)


def _zeros(like: jax.Array) -> jax.Array:
    """Returns zeros that are sharded as `like` is, by explicit axes and within `shard_map`."""
    made = jnp.zeros_like(like)
    missing = varying_axes(jax.typeof(like)) - varying_axes(jax.typeof(made))
    return jax.lax.pcast(made, tuple(sorted(missing)), to="varying") if missing else made


def _rows(arrays: list[jax.Array], first: Any, count: int) -> list[jax.Array]:
    """Returns `count` tokens of arrays [B, T, ..]."""
    return [jax.lax.dynamic_slice_in_dim(x, first, count, 1) for x in arrays]


def _put(array: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    found: jax.Array = jax.lax.dynamic_update_slice_in_dim(
        array, rows.astype(array.dtype), first, 1
    )
    return found


def _as_rows(x: jax.Array, count: int) -> jax.Array:
    """Returns n b h r i v as [B, t, H', V], of the first `count` tokens."""
    chunks, batch, heads, shared, tokens, columns = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * tokens, heads, shared, columns)
    return x.reshape(batch, chunks * tokens, heads * shared, columns)[:, :count]
