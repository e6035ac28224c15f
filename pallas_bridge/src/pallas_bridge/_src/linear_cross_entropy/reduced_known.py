"""What is known of each token beside a mean or a sum, from the pass that makes loss and gradients.

Where nothing else is differentiated, which is known once a program's dead code is gone, that pass
says it of logits that it has anyway: on GPUs in one call of the library's, elsewhere a chunk of
tokens at a time. Else there are the two passes of `known`, which this one's gradients are for
nothing beside. No call of the library's has logits of given columns: there they are sums of their
own, of K rows of the weight a token.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from .. import linear
from ..bound import Bound
from ..cross_entropy import calls as kernels
from ..losses import aux_outputs
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options
from ..losses.reduction import countable, weighted
from . import deferred, known, on_cuda, one_call, tokens
from .known import Chunks
from .parts import alike
from .plan import Plan
from .product import FLOAT32, blank, each, operand_dtype, operands
from .tokens import Bias, put, rows

# What is held at a time of rows of the weight that are gathered, in bytes, where XLA holds any.
GATHERED = 1 << 28


@dataclass(frozen=True)
class Work:
    """Everything but the arrays."""

    chunks: Chunks
    # What takes the place of chunks on NVIDIA's GPUs, where something does.
    cuda: Plan | None
    # Whether of a distribution more than the entropy is asked for.
    correct: bool


def reduced(
    work: Work,
    asked: Request,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> TokenOutputs:
    """Returns the scalar sum of factor * loss, and what is asked for of each token [N].

    `factors` is [N] in f32, 0 for ignored tokens. It gives no logps.
    """
    arrays = alike(hidden, weight, bias, labels, asked.columns)
    loss, *more = _reduced(work, *arrays, *alike(factors))
    return aux_outputs.collect(work.chunks.options, asked, labels, (loss, loss, *more))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(
    work: Work,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
    factors: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the loss, and of what `known.forward` gives all from lse on."""
    loss, lse, _, *more = _forward(work, hidden, weight, bias, labels, columns)
    return weighted(loss, factors).sum(), lse, *more


@partial(_reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(work: Work, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *arrays, factors = primals
    *moving, _, _, of_factors = map(linear.given, tangents)
    made = deferred.bind(_pass, Bound(_default, work), *primals, work=work)
    loss, lse, lse_low, *more, gradients = made
    outputs = weighted(loss, factors).sum(), lse, *more
    results = outputs[:-1] if work.chunks.distribution else outputs
    entropy = more[0] if work.chunks.distribution else None
    picked = None if arrays[-1] is None else results[-1]
    losses = None if of_factors is None else countable(loss, factors)
    residuals = arrays, factors, gradients, losses, (lse, lse_low, None, entropy, picked)
    rules = Bound(_tangents, work), Bound(_pull, work)
    found = linear.bind(*rules, residuals, (*moving, of_factors), results)
    return outputs, aux_outputs.with_correct(work.chunks.distribution, outputs, found)


def _tangents(work: Work, residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
    arrays, _, gradients, losses, (lse, _, *more) = residuals
    of_loss = linear.along((*gradients, losses), tangents)
    *moving, _ = tangents
    if all(one is None for one in moving):
        numbers = lse, *(one for one in more if one is not None)
        return of_loss, *map(jnp.zeros_like, numbers)
    found = known.tangents_of(work.chunks, arrays, moving)
    return of_loss, *found[2:]


def _pull(work: Work, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (arrays, factors, gradients, losses, saved), (dloss, *others) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), factors.dtype)
    dfactors = None if losses is None else dloss * losses
    if all(one is None for one in others):
        return *tokens.scaled(gradients, dloss), dfactors
    given = (dloss * factors, None, *others)
    hidden, weight, bias, labels, columns = arrays
    found = known.backward(work.chunks, hidden, weight, bias, labels, columns, saved, given)
    return *found, dfactors


def _forward(work: Work, *arrays: Any) -> tuple[jax.Array, ...]:
    """Returns what `known.forward` does, in the order of the pass: lse_low for logps."""
    found, lse_low = known.forward(work.chunks, *arrays)
    loss, _, lse, *more = found
    return loss, lse, lse_low, *more


def _default(work: Work, *arrays: Any) -> Any:
    """Returns what `_forward` does, and gradients for cotangents of the loss, the last operand."""
    by_chunks = Bound(_by_chunks, work.chunks)
    if work.cuda is None or not on_cuda.has_library(_call(work)):
        return by_chunks(*arrays)
    call = Bound(one_call.choose, Bound(_on_cuda, work, work.cuda), by_chunks)
    return jax.lax.platform_dependent(*arrays, cuda=call, default=by_chunks)


def _call(work: Work) -> str:
    return "distribution_fused" if work.chunks.distribution else "fused"


def _on_cuda(
    work: Work,
    plan: Plan,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
    factors: jax.Array,
) -> Any:
    # Tokens without a factor have log-probabilities too.
    options = dataclasses.replace(work.chunks.options, every_token=True)
    given = hidden, weight, bias, labels, factors
    axis = work.chunks.products.vocab_axis
    more = {"correct": work.correct} if work.chunks.distribution else {}
    *found, gradients = on_cuda.run(_call(work), options, axis, plan, *given, **more)
    correct = []
    if work.chunks.distribution:
        correct = [aux_outputs.is_correct(options, labels, found.pop())]
    if columns is not None:
        found.append(logits_of_columns(options, hidden, weight, bias, columns))
    return *found, *correct, gradients


def logits_of_columns(
    options: Options, hidden: jax.Array, weight: jax.Array, bias: Bias, columns: jax.Array
) -> jax.Array:
    """Returns columns' logits [N, K] of a weight [V, D], as `aux_outputs.pick` has them."""
    x, w = operands(hidden, weight)
    here, at = aux_outputs.find_columns(columns, 0, len(w))

    def body(first: Any, count: int, z: jax.Array) -> jax.Array:
        x_here, at_here = rows(first, count, x, at)
        found = (x_here[:, None].astype(FLOAT32) * w[at_here].astype(FLOAT32)).sum(-1)
        (z,) = put((z,), (found,), first)
        return z

    chunk = GATHERED // (columns.shape[-1] * w.shape[1] * w.dtype.itemsize)
    z = each(len(x), min(max(chunk, 1), max(len(x), 1)), body, blank(columns))
    z = options.mapped(z if bias is None else z + bias.astype(FLOAT32)[at])
    return jnp.where(here, z, jnp.nan)


def _by_chunks(
    chunks: Chunks,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    columns: jax.Array | None,
    factors: jax.Array,
) -> Any:
    w = weight.astype(operand_dtype(hidden, weight))
    options, products = tokens.in_place(chunks.options), chunks.products
    idle = tokens.idle_tokens(options, labels, factors)
    per_token = (hidden, labels, factors, idle, *([] if columns is None else [columns]))

    def body(first: Any, count: int, carry: Any) -> Any:
        outputs, sums = carry
        x, y, g, out, *c = products.barrier(rows(first, count, *per_token))
        z = products.logits(x.astype(w.dtype), w, bias)
        picked = [aux_outputs.pick(options, z, one) for one in c]
        # Before their gradient is in the place of logits.
        z, picked = jax.lax.optimization_barrier((z, picked))
        if chunks.distribution:
            *found, correct, dlogits = kernels.distribution_fused(options, z, y, g)
            found = [*found, *picked, correct]
        else:
            *found, dlogits = kernels.fused(options, True, z, y, g)
            found = [*found, *picked]
        return put(outputs, products.barrier(found), first), add(sums, dlogits, x, out, first)

    add = partial(tokens.add_gradients, products, weight, w, bias)
    zeros = tokens.blank_gradients(hidden, weight, bias, chunks.count)
    number = blank(labels)
    outputs = [number] * (4 if chunks.distribution else 3)
    outputs += [] if columns is None else [blank(columns)]
    outputs += [number] if chunks.distribution else []
    found, sums = each(len(labels), chunks.count, body, (tuple(outputs), zeros))
    return *found, tokens.rounded_gradients(sums, hidden, weight, bias)


_pass = deferred.primitive("xentile_linear_cross_entropy_known")


def _lower(
    ctx: Any, *operands: Any, default: Any, work: Work, tree: Any, keep: tuple[int, ...]
) -> Sequence[Any]:
    function: Callable[..., Any] = default
    *arrays, _ = jax.tree.unflatten(tree, ctx.avals_in)
    # Gradients come last: of hidden, weight and bias.
    count = len(default.traced.out_avals) - sum(one is not None for one in arrays[:3])
    if max(keep) < count:

        def function(*flat: Any) -> Any:
            *arrays, _ = jax.tree.unflatten(tree, flat)
            return _forward(work, *arrays)

    results: Sequence[Any] = deferred.lower(ctx, function, keep, *operands)
    return results


mlir.register_lowering(_pass, _lower)
