"""Passes over chunks of logits, as programs of XLA.

`TokenChunks` takes all columns of a chunk of tokens through the kernels of cross-entropy. dlogits
overwrite the logits, and two GEMMs make dhidden and dweight of them (the chunks are those of Liger,
Hsu et al., 2024). `ColumnChunks` takes chunks of the vocabulary, for budgets below the bytes of
dweight's sums: the forward pass saves lse (online softmax, as of Dao et al., 2022), and the
backward pass recomputes the logits of each chunk and finishes its columns of dweight (the order of
Wijmans et al., 2024).

Logits and dlogits are f32. dlogits are rounded once, to be an operand of a GEMM, and gradients of
the weight are summed in f32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..chunk_loops import (
    empty,
    for_each_chunk,
    is_one_chunk,
    pad_tokens,
    put_rows,
    slice_rows,
    zeros,
)
from ..cross_entropy import calls as kernels
from ..logits_gemms import FLOAT32, Bias, Gemms, Gradients, Operands, operand_dtype, zero_rows
from ..losses import aux_outputs, formulas
from ..losses.options import Options
from ..losses.vocab_shards import Loss, shard_cotangents, shard_labels, shard_options, two_sum


def keeps_dlogits(operands: Sequence[Any]) -> bool:
    """Whether dlogits of all tokens take no more memory than sums of dweight in f32."""
    hidden, weight, bias, *_ = operands
    row_bytes = operand_dtype(hidden, weight).itemsize
    return bias is None and hidden.size * row_bytes <= 4 * hidden.shape[-1] ** 2


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
        *per_token: Any,
        masked: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        """Returns the outputs of all chunks, a tree of arrays [N, ..], and gradients or None.

        function(logits, *rows of `per_token`, which are such trees) returns a chunk's outputs; with
        `masked` [N] a pair of outputs and dlogits, of which gradients are made, 0 for masked
        tokens.
        """
        hidden, weight, bias, labels = operands
        w = weight.astype(operand_dtype(hidden, weight))
        total = labels.shape[0]

        def run_chunk(first: Any, count: int) -> Any:
            x, *rows = self.gemms.fence(slice_rows(first, count, hidden, *per_token))
            found = function(self.gemms.logits(x.astype(w.dtype), w, bias), *rows)
            found, dlogits = (found, None) if masked is None else found
            return self.gemms.fence(found), dlogits, x

        def add(first: Any, count: int, sums: Any) -> Any:
            """Returns a chunk's outputs, and sums with its gradients."""
            found, dlogits, x = run_chunk(first, count)
            if masked is None:
                return found, sums
            (is_masked,) = slice_rows(first, count, masked)
            dbias = None if bias is None else dlogits.sum(0, dtype=jnp.float32)
            rows = zero_rows(is_masked, self.gemms.grad_hidden(dlogits, w, x.dtype))
            x = zero_rows(is_masked, x).astype(w.dtype)
            if sums is None:  # one chunk: nothing to add to, and one rounding
                return found, (rows, self.gemms.grad_weight(dlogits, x, weight.dtype), dbias)
            dhidden, dweight, bias_sums = sums
            (dhidden,) = put_rows((dhidden,), (rows,), first)
            dweight = self.gemms.add_grad_weight(dweight, dlogits, x)
            return found, (dhidden, dweight, None if dbias is None else bias_sums + dbias)

        def body(first: Any, count: int, carry: Any) -> Any:
            results, sums = carry
            found, sums = add(first, count, sums)
            return put_rows(results, jax.tree.leaves(found), first), sums

        sums: Any = None
        if is_one_chunk(self.tokens, total) and total > 0:
            results, sums = add(0, total, None)
        else:
            # Arrays for what chunks give, which vary over devices as that does.
            traced, shapes = jax.make_jaxpr(
                lambda: run_chunk(0, 0 if total == 0 else self.tokens)[0], return_shape=True
            )()
            flat = tuple(empty(one, (total, *one.shape[1:]), one.dtype) for one in traced.out_avals)
            if masked is not None:
                # dhidden, and sums in f32 of dweight and dbias.
                dhidden = empty(hidden, hidden.shape, hidden.dtype)
                sums = dhidden, *jax.tree.map(zeros, (weight, bias))
            flat, sums = for_each_chunk(total, self.tokens, body, (flat, sums))
            results = jax.tree.unflatten(jax.tree.structure(shapes), flat)
        if sums is not None:
            sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, operands[:3])
        return results, sums

    def forward(self, operands: Operands) -> Any:
        """Returns loss, logps, lse and lse_low, each [N] in f32, of a whole vocabulary."""
        run_chunk = partial(kernels.forward, self.loss.options)
        return self.map_logits(run_chunk, operands, operands.labels)[0]

    def read_shard(self, operands: Operands, columns: jax.Array | None) -> Any:
        """Returns `kernels.read_shard` of all tokens."""
        run_chunk = partial(kernels.read_shard, self.loss)
        return self.map_logits(run_chunk, operands, operands.labels, columns)[0]

    def fused(
        self, operands: Operands, factors: jax.Array, columns: jax.Array | None = None
    ) -> Any:
        """Returns loss, lse, lse_low, more, and gradients for cotangents of the loss.

        `more` has the auxiliary outputs of `kernels.forward_tokens`, from entropy on. For a shard,
        which has no auxiliary outputs, it says whether all logits of a token in the shard are -inf.
        """
        loss, options = self.loss, self.loss.options
        if not loss.exchange.is_whole and keeps_dlogits(operands):
            return self._fused_keeping_dlogits(operands, factors)
        every_token = options.every_token or columns is not None

        def run_chunk(z: jax.Array, y: jax.Array, g: jax.Array, c: jax.Array | None) -> Any:
            if not loss.exchange.is_whole:
                return self._run_shard(z, y, g)
            picked = []
            if c is not None:
                # Read before dlogits take the place of logits.
                z, *picked = jax.lax.optimization_barrier((z, aux_outputs.pick(options, z, c)))
            if not loss.distribution:
                *found, dlogits = kernels.fused(options, every_token, z, y, g)
                return (*found, *picked), dlogits
            *found, correct, dlogits = kernels.distribution_fused(options, z, y, g)
            return (*found, *picked, correct), dlogits

        masked = formulas.masked_tokens(options, operands.labels, factors)
        per_token = operands.labels, factors, columns
        found, gradients = self.map_logits(run_chunk, operands, *per_token, masked=masked)
        return *found, gradients

    def _run_shard(self, z: jax.Array, y: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        """Returns what `fused` does of a chunk's tokens in a shard, and dlogits.

        XLA rounds dlogits, as an operand, in the pass that makes them of logits.
        """
        options, exchange, vocab = self.loss.options, self.loss.exchange, z.shape[-1]
        (losses, *_), saved = kernels.forward_tokens(self.loss, z, y, None)
        lse, lse_low, is_empty, *_ = saved
        own, none = shard_labels(options, exchange, y, vocab), jnp.zeros_like(g)
        given = shard_cotangents(options, exchange, own, lse, is_empty, (g, none, none))
        own_options = shard_options(options, exchange)
        scalars = formulas.gradient_scalars(own_options, vocab, own.given, (lse, lse_low), given)
        dlogits = formulas.make_dlogits(
            own_options, own_options.mapped(z), own.given, 0, lse, *scalars
        )
        return (losses, lse, lse_low, is_empty), dlogits

    def _fused_keeping_dlogits(self, operands: Operands, factors: jax.Array) -> Any:
        """Returns what `fused` does of a shard, by one GEMM for each gradient."""
        hidden, weight, _, labels = operands
        w = weight.astype(operand_dtype(hidden, weight))

        def run_chunk(z: jax.Array, y: jax.Array, g: jax.Array) -> Any:
            outputs, dlogits = self._run_shard(z, y, g)
            return *outputs, dlogits.astype(w.dtype)

        (*found, dlogits), _ = self.map_logits(run_chunk, operands, labels, factors)
        masked = formulas.masked_tokens(self.loss.options, labels, factors)
        dhidden = zero_rows(masked, self.gemms.grad_hidden(dlogits, w, hidden.dtype))
        # Devices begin to sum dhidden before the other GEMM takes all multiprocessors.
        x, dhidden = jax.lax.optimization_barrier((hidden, dhidden))
        x = zero_rows(masked, x).astype(w.dtype)
        return *found, (dhidden, self.gemms.grad_weight(dlogits, x, weight.dtype), None)

    def backward(
        self, operands: Operands, saved: Any, cotangents: Any, columns: jax.Array | None = None
    ) -> Any:
        """Returns gradients for cotangents of the outputs of `kernels.forward_tokens`, but correct.

        `saved` is what that returns for it, or lse and lse_low of a loss without auxiliary outputs.
        A cotangent of None is one of zeros.
        """
        saved = *saved, *[None] * (5 - len(saved))
        given = [one if one.ndim == 1 else one.any(-1) for one in cotangents if one is not None]

        def run_chunk(*rows: Any) -> Any:
            return (), kernels.backward_tokens(self.loss, *rows)

        per_token = operands.labels, columns, saved, cotangents
        masked = formulas.masked_tokens(self.loss.options, operands.labels, *given)
        return self.map_logits(run_chunk, operands, *per_token, masked=masked)[1]


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

    def forward(self, operands: Operands) -> Any:
        """Returns loss, logps, lse and lse_low, each [N] in f32."""
        hidden, weight, bias, labels = operands
        vocab = weight.shape[self.gemms.vocab_axis]
        dtype = operand_dtype(hidden, weight)

        def run_tokens(first: Any, count: int, outputs: Any) -> Any:
            x, y = slice_rows(first, count, hidden, labels)
            x = x.astype(dtype)

            def add(start: Any, width: int, state: Any) -> Any:
                row_max, total, at_label, plain = state
                columns = self.gemms.slice_columns(weight, start, width).astype(dtype)
                z = self._logits(x, columns, bias, start)
                new_max = jnp.maximum(row_max, z.max(-1))
                # A row of -inf so far has no exponent to shift by.
                shift = jnp.where(new_max == -jnp.inf, 0, new_max)
                total = total * jnp.exp(row_max - shift) + jnp.exp(z - shift[:, None]).sum(-1)
                at_label += jnp.where(formulas.find_labels(y, start, width), z, 0).sum(-1)
                return new_max, total, at_label, plain + z.sum(-1)

            zero = zeros(x, (count,))
            state = (zero - jnp.inf, zero, zero, zero)
            row_max, total, at_label, plain = for_each_chunk(vocab, self.columns, add, state)
            lse, low = two_sum(row_max, jnp.log(total))
            # Logits that are all -inf, or one of them +inf, have no softmax.
            lse = jnp.where(jnp.isfinite(lse), lse, jnp.nan)
            sums = lse, low, at_label, plain
            return put_rows(outputs, formulas.outputs_of_sums(self.options, vocab, y, sums), first)

        return for_each_chunk(labels.shape[0], self.tokens, run_tokens, (zeros(labels),) * 4)

    def fused(self, operands: Operands, factors: jax.Array) -> Any:
        """Returns loss, lse and lse_low, each [N] in f32, and gradients for `factors`."""
        return run_two_passes(self.forward, self.backward, operands, factors)

    def backward(self, operands: Operands, saved: Any, cotangents: Any) -> Gradients:
        """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse)."""
        hidden, weight, bias, labels = operands
        vocab = weight.shape[self.gemms.vocab_axis]
        dtype = operand_dtype(hidden, weight)
        scalars = formulas.gradient_scalars(self.options, vocab, labels, saved, cotangents)
        per_token = labels, saved[0], *scalars
        # Whether sums of dhidden fit: each chunk's logits are there for all gradients then.
        is_one = is_one_chunk(self.tokens, labels.shape[0])

        def make_tile(first: Any, count: int, start: Any, width: int) -> Any:
            """Returns dlogits of a tile, its hidden states, and the columns of the weight."""
            x, *rows = slice_rows(first, count, hidden, *per_token)
            x = zero_rows(~rows[-1], x).astype(dtype)
            columns = self.gemms.slice_columns(weight, start, width).astype(dtype)
            z, (y, *scalars) = self._logits(x, columns, bias, start), rows
            return formulas.make_dlogits(self.options, z, y, start, *scalars), x, columns

        def for_weight(start: Any, width: int, carry: Any) -> Any:
            """Writes dweight and dbias of some columns, and with one chunk adds to dhidden."""

            def add(first: Any, count: int, carry: Any) -> Any:
                dhidden, dweight, dbias = carry
                dz, x, columns = make_tile(first, count, start, width)
                if is_one:
                    dhidden += self.gemms.grad_hidden(dz, columns, FLOAT32)
                dweight += self.gemms.grad_weight(dz, x, FLOAT32)
                return dhidden, dweight, dbias + dz.sum(0, dtype=jnp.float32)

            dhidden, dweight, dbias = carry
            columns = self.gemms.slice_columns(weight, start, width)
            sums = dhidden, zeros(columns), zeros(columns, (width,))
            dhidden, some, bias_sums = for_each_chunk(labels.shape[0], self.tokens, add, sums)
            if dbias is not None:
                (dbias,) = put_rows((dbias,), (bias_sums,), start)
            return dhidden, self.gemms.put_columns(dweight, some, start), dbias

        def for_hidden(first: Any, count: int, outputs: Any) -> Any:
            def add(start: Any, width: int, total: jax.Array) -> jax.Array:
                dz, _, columns = make_tile(first, count, start, width)
                return total + self.gemms.grad_hidden(dz, columns, FLOAT32)

            total = zeros(hidden, (count, hidden.shape[1]))
            return put_rows(outputs, (for_each_chunk(vocab, self.columns, add, total),), first)

        dhidden = zeros(hidden, dtype=FLOAT32 if is_one else hidden.dtype)
        if not is_one:
            (dhidden,) = for_each_chunk(labels.shape[0], self.tokens, for_hidden, (dhidden,))
        dbias = None if bias is None else zeros(bias, dtype=bias.dtype)
        carry = dhidden, zeros(weight, dtype=weight.dtype), dbias
        dhidden, dweight, dbias = for_each_chunk(vocab, self.columns, for_weight, carry)
        return zero_rows(~scalars[-1], dhidden).astype(hidden.dtype), dweight, dbias

    def _logits(self, x: jax.Array, columns: jax.Array, bias: Bias, start: Any) -> jax.Array:
        """Returns logits of columns from `start` on, in f32, after softcap and temperature."""
        width = columns.shape[self.gemms.vocab_axis]
        some = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, width)
        return self.options.mapped(self.gemms.logits(x, columns, some))


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
