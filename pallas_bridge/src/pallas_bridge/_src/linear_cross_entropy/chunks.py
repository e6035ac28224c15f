"""Logits a chunk at a time, as programs of XLA's: the GEMMs, and passes over chunks.

`TokenChunks` takes all columns of a chunk of tokens through the kernels of cross-entropy: the
gradient of a chunk's logits takes their place, and two more GEMMs take it from there to hidden and
weight (the chunks are those of Liger, Hsu et al., 2024). `ColumnChunks` takes chunks of the
vocabulary, for budgets below what sums of dweight take: the forward pass keeps lse alone (Dao et
al., 2022, for the running maximum), and the backward pass recomputes each chunk's logits and is
done with its part of dweight (the order is that of Wijmans et al., 2024).

Logits and their gradient are f32, the latter rounded once to be an operand, and gradients of the
weight are summed in f32.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import linear
from ..arrays import of_rank
from ..bound import Bound
from ..compat import varying_axes
from ..cross_entropy import calls as kernels
from ..custom_call import vary_alike
from ..losses import aux_outputs
from ..losses.options import Options, is_ignored
from ..losses.vocab_shards import Loss, ShardOutputs

# Columns of the vocabulary that a CPU adds to sums of dweight at a time.
BLOCK = 1024
FLOAT32 = np.dtype(np.float32)

Bias = jax.Array | None
Gradients = tuple[jax.Array, jax.Array, Bias]
T = TypeVar("T")


class Operands(NamedTuple):
    """What a loss is computed from."""

    # [N, D], and where XLA may shard any axis of tokens, [.., D].
    hidden: jax.Array
    # [V, D] or [D, V].
    weight: jax.Array
    # [V]
    bias: Bias
    # [N], or [..].
    labels: jax.Array

    def varying_alike(self) -> "Operands":
        """Returns the operands varying alike within `shard_map`."""
        return Operands(*make_alike(*self))


def make_alike(*arrays: Any) -> list[Any]:
    """Returns arrays that vary over the same axes within `shard_map`; None stays None.

    The weight that every device has then varies too, and so does its gradient. The transpose is a
    sum over devices.
    """
    varying = iter(vary_alike([x for x in arrays if x is not None]))
    return [None if x is None else next(varying) for x in arrays]


def operand_dtype(hidden: Any, weight: Any) -> Any:
    """Returns the dtype that GEMMs take: the narrower one of both arrays."""
    return min(hidden.dtype, weight.dtype, key=lambda dtype: int(dtype.itemsize))


def as_gemm_operands(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns hidden and weight as GEMMs take them: the wider one is rounded."""
    dtype = operand_dtype(hidden, weight)
    return hidden.astype(dtype), weight.astype(dtype)


def masked_tokens(options: Options, labels: jax.Array, *cotangents: jax.Array) -> jax.Array:
    """Returns which tokens [N] take no part: ignored ones, and those without a cotangent."""
    are_zero = (~one if one.dtype == bool else one == 0 for one in cotangents)
    return is_ignored(options, labels) | reduce(operator.and_, are_zero)


def zero_rows(masked: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `rows` [N, ..] with zeros for tokens that are `masked` [N].

    Their gradient is 0, which times a NaN would be NaN.
    """
    return jnp.where(masked[:, None], jnp.zeros((), rows.dtype), rows)


def zeros(
    like: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns zeros of `shape`, or of the shape of `like`, for a loop to fill.

    Within `shard_map` they vary over the axes that `like` varies over, as what fills them does.
    """
    made = jnp.zeros(like.shape if shape is None else shape, dtype)
    axes = tuple(sorted(varying_axes(jax.typeof(like) if isinstance(like, jax.Array) else like)))
    return jax.lax.pcast(made, axes, to="varying") if axes else made


def is_one_chunk(chunk: int, total: Any) -> bool:
    """Whether one chunk has all of `total`; False for a symbolic total."""
    return isinstance(total, int) and chunk >= total


def for_each_chunk(total: Any, chunk: int, body: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """Applies body(first, count, carry) to every chunk, the last of which may be shorter.

    A symbolic total is a multiple of the chunk.
    """
    whole, rest = divmod(total, chunk)
    if whole == 1:
        carry = body(0, chunk, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda n, one: body(n * chunk, chunk, one), carry)
    return body(whole * chunk, rest, carry) if rest else carry


def slice_rows(first: Any, count: int, *arrays: jax.Array) -> list[jax.Array]:
    """Returns `count` rows of each array."""
    return [jax.lax.dynamic_slice_in_dim(array, first, count) for array in arrays]


def put_rows(arrays: Any, rows: Any, first: Any) -> Any:
    """Returns arrays with rows from `first` on replaced, in the arrays' dtypes."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(array, some.astype(array.dtype), first, 0)
        for array, some in zip(arrays, rows, strict=True)
    )


@dataclass(frozen=True)
class Gemms:
    """The three GEMMs, for hidden [N, D] and a weight whose axis `vocab_axis` is V.

    Operands are of one dtype, that of `as_gemm_operands`. Sums are f32, rounded once to the dtype
    of the result.
    """

    vocab_axis: int
    # Whether XLA compiles each GEMM, and what else a token's results come from, as if nothing stood
    # around it, so that a chunk gives the same bits beside others, in a loop, and alone. Not so the
    # sums of the weight's gradient, which GEMMs may add to where they lie.
    isolated: bool = False

    def fence(self, arrays: T) -> T:
        """Returns arrays; where `isolated`, their producers and consumers are not fused.

        XLA takes barriers away after fusion, and after it has chosen how GEMMs are made.
        """
        if not (self.isolated and jax.tree.leaves(arrays)):
            return arrays
        fenced: T = jax.lax.optimization_barrier(arrays)
        return fenced

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: Bias) -> jax.Array:
        """Returns hidden x weight + bias [N, V] in f32."""
        z = self.fence(self._dot(hidden, weight, 1, 1 - self.vocab_axis, FLOAT32))
        return z if bias is None else z + of_rank(bias.astype(FLOAT32), z)

    def grad_hidden(self, dlogits: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
        """Returns dhidden [N, D]; dlogits are rounded to the dtype of `weight`."""
        dlogits = dlogits.astype(weight.dtype)
        return self.fence(self._dot(dlogits, weight, 1, self.vocab_axis, dtype))

    def grad_weight(self, dlogits: jax.Array, hidden: jax.Array, dtype: Any) -> jax.Array:
        """Returns dweight, of the weight's layout; dlogits are rounded likewise."""
        dlogits = dlogits.astype(hidden.dtype)
        if self.vocab_axis == 0:
            return self._dot(dlogits, hidden, 0, 0, dtype)
        return self._dot(hidden, dlogits, 0, 0, dtype)

    def add_grad_weight(self, total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns `total` + dweight, in f32."""

        def at_once(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            return total + self.grad_weight(dlogits, hidden, total.dtype)

        def by_columns(total: jax.Array, dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
            def add(first: Any, count: int, total: jax.Array) -> jax.Array:
                dz = jax.lax.dynamic_slice_in_dim(dlogits, first, count, 1)
                some = self.slice_columns(total, first, count)
                return self.put_columns(
                    total, some + self.grad_weight(dz, hidden, total.dtype), first
                )

            summed: jax.Array = for_each_chunk(dlogits.shape[1], BLOCK, add, total)
            return summed

        # XLA on a CPU has no GEMM that adds: it would allocate another whole weight.
        summed: jax.Array = jax.lax.platform_dependent(
            total, dlogits, hidden, cpu=by_columns, default=at_once
        )
        return summed

    def slice_columns(self, weight: jax.Array, first: Any, count: int) -> jax.Array:
        """Returns `count` columns of the vocabulary of the weight."""
        return jax.lax.dynamic_slice_in_dim(weight, first, count, self.vocab_axis)

    def put_columns(self, weight: jax.Array, columns: jax.Array, first: Any) -> jax.Array:
        """Returns `weight` with columns of the vocabulary from `first` on replaced."""
        columns = columns.astype(weight.dtype)
        return jax.lax.dynamic_update_slice_in_dim(weight, columns, first, self.vocab_axis)

    def _dot(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype: Any) -> jax.Array:
        # Sums are f32 on every backend, whatever the dtype that they are rounded to.
        axes = (((a_axis,), (b_axis,)), ((), ()))
        a, b = self.fence((a, b))
        return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


@dataclass(frozen=True)
class TokenChunks:
    """Passes over all columns of a chunk of `tokens` at a time, of a whole vocabulary or a shard.

    Hidden states and weight are a device's; labels and columns are those of the whole vocabulary,
    and so is all that is saved for a backward pass or given to it.
    """

    loss: Loss
    gemms: Gemms
    tokens: int

    def map_logits(
        self,
        function: Callable[..., Any],
        operands: Operands,
        *per_token: jax.Array,
        masked: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        """Returns function(logits, *rows of `per_token`) of all chunks, arrays [N, ..], and ().

        With `masked` [N], `function` returns dlogits after these, and gradients take the place of
        (). Tokens that are masked have gradients of 0.
        """
        hidden, weight, bias, labels = operands
        w = weight.astype(operand_dtype(hidden, weight))
        total = labels.shape[0]
        is_one = is_one_chunk(self.tokens, total)

        def run_chunk(first: Any, count: int) -> Any:
            x, *rows = self.gemms.fence(slice_rows(first, count, hidden, *per_token))
            found = function(self.gemms.logits(x.astype(w.dtype), w, bias), *rows)
            found, dlogits = (found, None) if masked is None else found
            return self.gemms.fence(found), dlogits, x

        def body(first: Any, count: int, carry: Any) -> Any:
            results, sums = carry
            found, dlogits, x = run_chunk(first, count)
            if masked is not None:
                (is_masked,) = slice_rows(first, count, masked)
                sums = self._add(operands, w, sums, dlogits, x, is_masked, first)
            return put_rows(results, jax.tree.leaves(found), first), sums

        # Arrays for what a chunk gives, which vary over devices as that does.
        traced, shapes = jax.make_jaxpr(
            lambda: run_chunk(0, total if is_one else self.tokens)[0], return_shape=True
        )()
        results = [zeros(one, (total, *one.shape[1:]), one.dtype) for one in traced.out_avals]
        sums = None
        if masked is not None and not is_one:
            # dhidden, and sums in f32 of dweight and dbias.
            sums = zeros(hidden, dtype=hidden.dtype), *map(zeros, _without_none(weight, bias))
        carry = for_each_chunk(total, self.tokens, body, (tuple(results), sums))
        found = jax.tree.unflatten(jax.tree.structure(shapes), carry[0])
        return found, () if masked is None else _round_gradients(carry[1], operands)

    def _add(
        self,
        operands: Operands,
        w: jax.Array,
        sums: Any,
        dlogits: jax.Array,
        x: jax.Array,
        masked: jax.Array,
        first: Any,
    ) -> Any:
        """Returns sums with a chunk's gradients; `w` is the weight as a GEMM takes it."""
        bias_sums = [] if operands.bias is None else [dlogits.sum(0, dtype=jnp.float32)]
        chunk = zero_rows(masked, self.gemms.grad_hidden(dlogits, w, x.dtype))
        x = zero_rows(masked, x).astype(w.dtype)
        if sums is None:  # one chunk: nothing to add to, and one rounding
            dweight = self.gemms.grad_weight(dlogits, x, operands.weight.dtype)
            return chunk, dweight, *bias_sums
        dhidden, dweight, *dbias = sums
        (dhidden,) = put_rows((dhidden,), (chunk,), first)
        dweight = self.gemms.add_grad_weight(dweight, dlogits, x)
        return dhidden, dweight, *(a + b for a, b in zip(dbias, bias_sums, strict=True))

    def forward(self, operands: Operands) -> tuple[jax.Array, ...]:
        """Returns loss, logps, lse and lse_low, each [N] in f32, of a whole vocabulary."""
        run_chunk = partial(kernels.forward, self.loss.options)
        outputs: tuple[jax.Array, ...]
        outputs, _ = self.map_logits(run_chunk, operands, operands.labels)
        return outputs

    def read_shard(self, operands: Operands, columns: jax.Array | None) -> ShardOutputs:
        """Returns `kernels.read_shard` of all tokens."""
        run_chunk = partial(kernels.read_shard, self.loss)
        per_token = _without_none(operands.labels, columns)
        shard: ShardOutputs
        shard, _ = self.map_logits(run_chunk, operands, *per_token)
        return shard

    def fused(
        self, operands: Operands, factors: jax.Array, columns: jax.Array | None = None
    ) -> Any:
        """Returns loss, lse, lse_low, more, and gradients for cotangents of the loss.

        `more` has the auxiliary outputs of `kernels.forward_tokens`, from entropy on. For a shard,
        which has no auxiliary outputs, it is in which shards a token has no logits.
        """
        loss = write_in_place(self.loss)
        options = loss.options
        every_token = options.every_token or columns is not None

        def run_chunk(z: jax.Array, y: jax.Array, g: jax.Array, *c: jax.Array) -> Any:
            if not loss.exchange.is_whole:
                # Cotangents of a shard's outputs take what devices exchange.
                (losses, *_), saved = kernels.forward_tokens(loss, z, y, None)
                dlogits = kernels.backward_tokens(loss, z, y, None, saved, (g, None, None))
                return (losses, *saved[:3]), dlogits
            picked = [aux_outputs.pick(options, z, one) for one in c]
            if picked:
                # Read before dlogits take the place of logits.
                z, picked = jax.lax.optimization_barrier((z, picked))
            if not loss.distribution:
                *found, dlogits = kernels.fused(options, every_token, z, y, g)
                return (*found, *picked), dlogits
            *found, correct, dlogits = kernels.distribution_fused(options, z, y, g)
            return (*found, *picked, correct), dlogits

        labels = operands.labels
        masked = masked_tokens(options, labels, factors)
        per_token = _without_none(labels, factors, columns)
        found, gradients = self.map_logits(run_chunk, operands, *per_token, masked=masked)
        return *found, gradients

    def backward(
        self, operands: Operands, saved: Any, cotangents: Any, columns: jax.Array | None = None
    ) -> Gradients:
        """Returns gradients for cotangents of the outputs of `kernels.forward_tokens`, but correct.

        `saved` is what that returns for it, or lse and lse_low of a loss without auxiliary outputs.
        A cotangent of None is one of zeros.
        """
        loss = write_in_place(self.loss)
        lse, lse_low, *others = saved
        saved = lse, lse_low, *(others or (None, None, None))
        given = [
            one if one.ndim == 1 else one.any(tuple(range(1, one.ndim)))
            for one in cotangents
            if one is not None
        ]
        flat, tree = jax.tree.flatten((operands.labels, columns, saved, cotangents))

        def run_chunk(z: jax.Array, *rows: jax.Array) -> Any:
            return (), kernels.backward_tokens(loss, z, *jax.tree.unflatten(tree, rows))

        masked = masked_tokens(loss.options, operands.labels, *given)
        gradients: Gradients
        _, gradients = self.map_logits(run_chunk, operands, *flat, masked=masked)
        return gradients


def write_in_place(loss: Loss) -> Loss:
    """Returns a loss by which dlogits take the place of logits, which nothing else reads."""
    options = dataclasses.replace(loss.options, donate_logits=True)
    return dataclasses.replace(loss, options=options)


def _without_none(*arrays: Any) -> list[Any]:
    return [x for x in arrays if x is not None]


def _round_gradients(sums: Any, operands: Operands) -> Gradients:
    """Returns gradients of sums, in the dtypes of their operands."""
    hidden, weight, bias, _ = operands
    if sums is None:  # no tokens
        nothing: Gradients = jax.tree.map(jnp.zeros_like, (hidden, weight, bias))
        return nothing
    dhidden, dweight, *dbias = sums
    dbias_or_none = None if bias is None else dbias[0].astype(bias.dtype)
    return dhidden, dweight.astype(weight.dtype), dbias_or_none


@dataclass(frozen=True)
class ColumnChunks:
    """Passes over `tokens` x `columns` at a time, by XLA alone.

    Where sums of dhidden do not fit beside dweight's, chunks have fewer than all tokens, and
    dhidden and dweight have a sweep each.
    """

    options: Options
    gemms: Gemms
    tokens: int
    columns: int

    def forward(self, operands: Operands) -> tuple[jax.Array, ...]:
        """Returns loss, logps, lse and lse_low, each [N] in f32."""
        hidden, weight, _, labels = operands
        vocab = weight.shape[self.gemms.vocab_axis]
        dtype = operand_dtype(hidden, weight)

        def run_tokens(first: Any, count: int, outputs: Any) -> Any:
            x, y = slice_rows(first, count, hidden, labels)
            x = x.astype(dtype)

            def add_columns(start: Any, width: int, state: Any) -> Any:
                row_max, total, at_label, plain = state
                z = self._logits(x, operands, start, width)
                new_max = jnp.maximum(row_max, z.max(-1))
                # A row of -inf so far has no exponent to shift by.
                shift = jnp.where(new_max == -jnp.inf, 0, new_max)
                total = total * jnp.exp(row_max - shift) + jnp.exp(z - shift[:, None]).sum(-1)
                at_label += jnp.where(_is_label(y, start, width), z, 0).sum(-1)
                return new_max, total, at_label, plain + z.sum(-1)

            zero = zeros(x, (count,))
            state = (zero - jnp.inf, zero, zero, zero)
            row_max, total, at_label, plain = for_each_chunk(
                vocab, self.columns, add_columns, state
            )
            log = jnp.log(total)
            lse = row_max + log
            # A row of -inf alone is no row, and neither is one with +inf.
            lse = jnp.where(jnp.isfinite(lse), lse, jnp.nan)
            # The error of a sum, whichever term is larger.
            is_larger = jnp.abs(row_max) >= jnp.abs(log)
            low = jnp.where(is_larger, (row_max - lse) + log, (log - lse) + row_max)
            return put_rows(outputs, self._outputs(vocab, y, lse, low, at_label, plain), first)

        outputs = (zeros(labels),) * 4
        found: tuple[jax.Array, ...]
        found = for_each_chunk(labels.shape[0], self.tokens, run_tokens, outputs)
        return found

    def fused(self, operands: Operands, factors: jax.Array) -> Any:
        """Returns loss, lse and lse_low, each [N] in f32, and gradients for `factors`."""
        return run_two_passes(self.forward, self.backward, operands, factors)

    def backward(self, operands: Operands, saved: Any, cotangents: Any) -> Gradients:
        """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse)."""
        hidden, weight, bias, labels = operands
        vocab = weight.shape[self.gemms.vocab_axis]
        per_token = (labels, *saved, *cotangents)
        dweight = zeros(weight, dtype=weight.dtype)
        dbias = None if bias is None else zeros(bias, dtype=bias.dtype)
        dtype = operand_dtype(hidden, weight)
        masked = masked_tokens(self.options, labels, *cotangents)

        def add_grad_hidden(total: Any, dz: Any, start: Any, width: int) -> jax.Array:
            columns = self.gemms.slice_columns(weight, start, width).astype(dtype)
            summed: jax.Array = total + self.gemms.grad_hidden(dz, columns, FLOAT32)
            return summed

        def dlogits(x: Any, rows: Any, start: Any, width: int) -> jax.Array:
            y, lse, low, *given = rows
            z = self._logits(x, operands, start, width)
            return self._dlogits(vocab, z, y, (lse, low), given, start)

        def put_columns(gradients: Any, dweight: Any, dbias: Any, start: Any) -> Any:
            whole, bias_or_none = gradients
            if bias_or_none is not None:
                (bias_or_none,) = put_rows((bias_or_none,), (dbias,), start)
            return self.gemms.put_columns(whole, dweight, start), bias_or_none

        if is_one_chunk(self.tokens, labels.shape[0]):
            # Logits of masked tokens matter no more.
            x = zero_rows(masked, hidden).astype(dtype)

            def at_once(start: Any, width: int, sums: Any) -> Any:
                total, gradients = sums
                dz = dlogits(x, per_token, start, width)
                total = add_grad_hidden(total, dz, start, width)
                made = self.gemms.grad_weight(dz, x, FLOAT32)
                return total, put_columns(gradients, made, dz.sum(0, dtype=jnp.float32), start)

            sums = (zeros(hidden), (dweight, dbias))
            total, (dweight, dbias) = for_each_chunk(vocab, self.columns, at_once, sums)
            return zero_rows(masked, total).astype(hidden.dtype), dweight, dbias

        def for_hidden(first: Any, count: int, outputs: Any) -> Any:
            x, is_masked, *rows = slice_rows(first, count, hidden, masked, *per_token)
            x = x.astype(dtype)

            def add(start: Any, width: int, total: Any) -> Any:
                return add_grad_hidden(total, dlogits(x, rows, start, width), start, width)

            total = for_each_chunk(vocab, self.columns, add, zeros(x))
            return put_rows(outputs, (zero_rows(is_masked, total),), first)

        def for_weight(start: Any, width: int, gradients: Any) -> Any:
            def add(first: Any, count: int, totals: Any) -> Any:
                x, is_masked, *rows = slice_rows(first, count, hidden, masked, *per_token)
                x = zero_rows(is_masked, x).astype(dtype)
                dz = dlogits(x, rows, start, width)
                dweight, dbias = totals
                dweight += self.gemms.grad_weight(dz, x, FLOAT32)
                return dweight, dbias + dz.sum(0, dtype=jnp.float32)

            columns = self.gemms.slice_columns(weight, start, width)
            totals = (zeros(columns), zeros(columns, (width,)))
            made, bias_sums = for_each_chunk(labels.shape[0], self.tokens, add, totals)
            return put_columns(gradients, made, bias_sums, start)

        outputs = (zeros(hidden, dtype=hidden.dtype),)
        (dhidden,) = for_each_chunk(labels.shape[0], self.tokens, for_hidden, outputs)
        dweight, dbias = for_each_chunk(vocab, self.columns, for_weight, (dweight, dbias))
        return dhidden, dweight, dbias

    def _logits(self, x: jax.Array, operands: Operands, start: Any, width: int) -> jax.Array:
        """Returns logits of columns from `start` on, in f32, after softcap and temperature."""
        _, weight, bias, _ = operands
        columns = self.gemms.slice_columns(weight, start, width).astype(x.dtype)
        some = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, width)
        return self.options.mapped(self.gemms.logits(x, columns, some))

    def _outputs(
        self, vocab: int, labels: Any, lse: Any, low: Any, at_label: Any, plain: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Loss, logps, lse and lse_low of whole rows, as the contract has them."""
        ignored, valid = self._special(vocab, labels)
        smoothing = self.options.label_smoothing
        logps = (at_label - lse) - low
        loss = (1 - smoothing) * -logps + self.options.z_loss * lse**2
        if smoothing:
            loss += smoothing * ((lse - plain / vocab) + low)
        return jnp.where(ignored, 0, loss * valid), jnp.where(ignored, 0, logps * valid), lse, low

    def _dlogits(
        self, vocab: int, z: jax.Array, labels: Any, saved: Any, cotangents: Any, start: Any
    ) -> jax.Array:
        """The gradient of a chunk of logits, in f32."""
        (lse, low), (g, h, k) = saved, cotangents
        ignored, valid = self._special(vocab, labels)
        masked = ignored | ((g == 0) & (h == 0) & (k == 0))
        smoothing = self.options.label_smoothing
        p_factor = (g * (1 + 2 * self.options.z_loss * lse) - h + k) * valid * jnp.exp(-low)
        at_label = (h - g * (1 - smoothing)) * valid
        dz = p_factor[:, None] * jnp.exp(z - lse[:, None])
        dz += jnp.where(_is_label(labels, start, z.shape[1]), at_label[:, None], 0)
        dz -= (g * smoothing / vocab)[:, None]
        if self.options.softcap is not None or self.options.temperature != 1:
            dz *= self.options.slope(z)
        # A masked entry has none, and a row that is no row has NaN everywhere.
        dz = jnp.where((z == -jnp.inf) & jnp.isfinite(lse)[:, None], 0, dz)
        return jnp.where(masked[:, None], 0, dz)

    def _special(self, vocab: int, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which tokens are ignored, and 1, or NaN for labels that are out of range."""
        ignored = is_ignored(self.options, labels)
        return ignored, jnp.where((labels >= 0) & (labels < vocab) | ignored, 1, jnp.nan)


def _is_label(labels: jax.Array, start: Any, width: int) -> jax.Array:
    column = jax.lax.broadcasted_iota(labels.dtype, (len(labels), width), 1)
    return column + jnp.asarray(start, labels.dtype) == labels[:, None]


def run_two_passes(
    forward: Callable[..., Any], backward: Callable[..., Any], operands: Any, factors: jax.Array
) -> tuple[Any, Any, Any, Any]:
    """Returns what a fused pass does, with logits that are computed twice."""
    loss, _, lse, low = forward(operands)
    zero = jnp.zeros_like(lse)
    return loss, lse, low, backward(operands, (lse, low), (factors, zero, zero))


def run_padded(
    name: str, run: Callable[..., Any], chunk: int, operands: Operands, *per_token: Any
) -> Any:
    """Returns what `run`, a "forward", "fused" or "backward" pass, does with whole chunks.

    The last chunk is padded with tokens that have no cotangent; `per_token` are [N] each.
    """
    count = operands.hidden.shape[0]
    hidden, labels, *padded = pad_tokens(chunk, operands.hidden, operands.labels, *per_token)
    found = run(operands._replace(hidden=hidden, labels=labels), *padded)

    def crop(gradients: Gradients) -> Gradients:
        dhidden, dweight, dbias = gradients
        return dhidden[:count], dweight, dbias

    if name == "backward":
        return crop(found)
    return tuple(crop(one) if isinstance(one, tuple) else one[:count] for one in found)


def pad_tokens(chunk: int, *arrays: Any) -> list[Any]:
    """Returns arrays [N, ..], and None, with zeros for tokens that fill the last chunk."""

    def fill(x: jax.Array) -> jax.Array:
        count = x.shape[0]
        # As JAX knows a symbolic one for a multiple of the chunk.
        whole = chunk * ((count + chunk - 1) // chunk)
        return jnp.pad(x, [(0, whole - count), *[(0, 0)] * (x.ndim - 1)])

    filled: list[Any] = jax.tree.map(fill, list(arrays))
    return filled


def scale_gradients(gradients: Gradients, dloss: jax.Array) -> Gradients:
    """Returns gradients times the cotangent of their loss, a product in f32; XLA leaves 1 out."""
    found: Gradients = jax.tree.map(
        lambda one: (one.astype(jnp.float32) * dloss).astype(one.dtype), gradients
    )
    return found


def dense_logits(gemms: Gemms, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns all logits [N, V] in f32, and their probe [N], as `reference.with_probe` does.

    JAX alone would multiply dlogits in f32 with operands of 16 bits: here they are rounded once to
    the operands' dtype, as kernels round them.
    """
    z, probe = _dense_logits(gemms, *make_alike(*operands[:3]))
    return z, probe


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dense_logits(
    gemms: Gemms, hidden: jax.Array, weight: jax.Array, bias: Bias
) -> tuple[jax.Array, jax.Array]:
    z = gemms.logits(*as_gemm_operands(hidden, weight), bias)
    return z, z.max(-1)


@partial(_dense_logits.defjvp, symbolic_zeros=True)
def _dense_logits_jvp(gemms: Gemms, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    moving = [*map(linear.given, tangents)]
    apply, transpose = Bound(_dense_logits_tangent, gemms), Bound(_dense_logits_vjp, gemms)
    results = _dense_logits(gemms, *arrays)
    return results, tuple(linear.bind(apply, transpose, arrays, moving, results))


def _dense_logits_tangent(
    gemms: Gemms, arrays: Any, tangents: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    hidden, weight, _ = arrays
    hidden_tangent, weight_tangent, bias_tangent = tangents
    terms = []
    if hidden_tangent is not None:
        terms.append(gemms.logits(*as_gemm_operands(hidden_tangent, weight), None))
    if weight_tangent is not None:
        terms.append(gemms.logits(*as_gemm_operands(hidden, weight_tangent), None))
    if bias_tangent is not None:
        terms.append(bias_tangent.astype(jnp.float32)[None])
    shape = len(hidden), weight.shape[gemms.vocab_axis]
    total = jnp.broadcast_to(sum(terms[1:], terms[0]), shape)
    return total, total.sum(-1)


def _dense_logits_vjp(gemms: Gemms, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    (hidden, weight, bias), (dlogits, counts) = arrays, cotangents
    if dlogits is None:
        return None, None, None
    x, w = as_gemm_operands(hidden, weight)
    masked = counts == 0
    dlogits = zero_rows(masked, dlogits)
    dz = dlogits.astype(x.dtype)
    dhidden = zero_rows(masked, gemms.grad_hidden(dz, w, hidden.dtype))
    dweight = gemms.grad_weight(dz, zero_rows(masked, x), weight.dtype)
    dbias = None if bias is None else dlogits.sum(0, dtype=jnp.float32).astype(bias.dtype)
    return dhidden, dweight, dbias
