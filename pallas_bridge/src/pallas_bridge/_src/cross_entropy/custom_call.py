"""Cross-entropy by the library's kernels, and its gradient.

Where the reduction is inside, the cotangent of every token's loss is known beforehand but for one
scalar factor. `merging` has lowering hand that factor to one pass that reads the logits once and
writes dlogits once, where it doesn't depend on the loss. Otherwise the forward pass keeps lse, and
the backward pass reads the logits again.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..custom_call import bind
from . import known, reference
from .calls import (
    backward_call,
    distribution_backward_call,
    distribution_call,
    distribution_fused_call,
    forward_call,
    fused_call,
)
from .known import Asked, Known
from .merging import Backward, again_call, scaled_call
from .options import Options
from .reduction import countable, token_cotangents, weighted


def forward(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low, each [..] in f32, of logits [.., V] and labels [..]."""
    loss, logps, lse, lse_low = bind(forward_call(options, options.every_token), logits, labels)
    return loss, logps, lse, lse_low


def backward(
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Returns dlogits for saved (lse, lse_low) and cotangents of (loss, logps, lse), each [..]."""
    call = backward_call(options, Backward(options))
    (dlogits,) = bind(call, logits, labels, *saved, *cotangents)
    return dlogits


def fused(
    options: Options, every_token: bool, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, lse, lse_low, each [..] in f32, and dlogits for cotangents of the loss."""
    call = fused_call(options, every_token)
    loss, lse, lse_low, dlogits = bind(call, logits, labels, dloss)
    return loss, lse, lse_low, dlogits


def distribution_fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns loss, lse, lse_low, entropy and correct [..] in f32, and dlogits as `fused` does.

    Tokens without a cotangent have outputs as others do.
    """
    call = distribution_fused_call(options, options.every_token)
    *found, argmax, dlogits = bind(call, logits, labels, dloss, keep=(0, 1, 2, 3, 5, 6))
    return *found, known.is_correct(options, labels, argmax), dlogits


def forward_known(
    options: Options,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns loss, logps, lse, entropy, the columns' logits and correct, of those asked for.

    After them lse_low.
    """
    if distribution:
        call = distribution_call(options, options.every_token)
        # What is not asked for the call need not write.
        keep = 0, 1, 2, 3, *((4,) if options.entropy else ()), *((6,) if options.correct else ())
        loss, logps, lse, lse_low, *more = bind(call, logits, labels, keep=keep)
        argmax = more.pop() if options.correct else jnp.full(lse.shape, -1, jnp.int32)
        entropy = more.pop() if options.entropy else jnp.zeros_like(lse)
        found: tuple[jax.Array, ...] = (loss, logps, lse, entropy)
    else:
        loss, logps, lse, lse_low = forward(options, logits, labels)
        found = (loss, logps, lse)
    if columns is not None:
        found = *found, known.pick(options, logits, columns)
    if distribution:
        found = *found, known.is_correct(options, labels, argmax)
    return found, lse_low


def backward_known(
    options: Options,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
    saved: Any,
    cotangents: Any,
) -> jax.Array:
    """Returns dlogits for lse, lse_low, entropy, the columns' logits, and cotangents.

    Cotangents are those of what `forward_known` gives, but correct. None is one of zeros.
    """
    lse, lse_low, entropy, picked = saved
    g, h, k, *others = cotangents
    g, h, k = (jnp.zeros_like(lse) if one is None else one for one in (g, h, k))
    q = others.pop(0) if distribution else None
    if q is None:
        dlogits = backward(options, logits, labels, (lse, lse_low), (g, h, k))
    else:
        call = distribution_backward_call(options)
        (dlogits,) = bind(call, logits, labels, lse, lse_low, entropy, g, h, k, q)
    if columns is not None and others[0] is not None:
        dlogits = known.add_picked(options, dlogits, columns, picked, others[0])
    return dlogits


def known_of(options: Options, asked: Asked, logits: jax.Array, labels: jax.Array) -> Known:
    """Returns what is asked for of each token; the gradient is recomputed."""
    outputs = _known(options, asked.distribution, logits, labels, asked.columns)
    return known.ordered(options, asked, labels, outputs)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _known(
    options: Options,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    outputs, _ = forward_known(options, distribution, logits, labels, columns)
    return outputs


@partial(_known.defjvp, symbolic_zeros=True)
def _known_jvp(options: Options, distribution: bool, primals: Any, tangents: Any) -> Any:
    logits, labels, columns = primals
    outputs, lse_low = forward_known(options, distribution, logits, labels, columns)
    moving = outputs[:-1] if distribution else outputs
    entropy = outputs[3] if distribution else None
    picked = None if columns is None else moving[-1]
    residuals = logits, labels, columns, (outputs[2], lse_low, entropy, picked)
    apply = Bound(_known_tangents, options, distribution)
    transpose = Bound(_known_pull, options, distribution)
    found = linear.bind(apply, transpose, residuals, [linear.given(tangents[0])], moving)
    return outputs, known.with_correct(distribution, outputs, found)


def _known_tangents(options: Options, distribution: bool, residuals: Any, tangents: Any) -> Any:
    logits, labels, columns, _ = residuals

    def plain(logits: jax.Array) -> Any:
        return reference.known_floats(options, distribution, logits, labels, columns)

    return linear.tangents_of(plain, (logits,), tangents)


def _known_pull(options: Options, distribution: bool, residuals: Any, cotangents: Any) -> Any:
    logits, labels, columns, saved = residuals
    return (backward_known(options, distribution, logits, labels, columns, saved, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def per_token(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse, each [..] in f32; the gradient is recomputed."""
    loss, logps, lse, _ = forward(options, logits, labels)
    return loss, logps, lse


@partial(per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    loss, logps, lse, lse_low = forward(options, *primals)
    residuals = *primals, lse, lse_low
    apply, transpose = Bound(_per_token_tangents, options), Bound(_per_token_pull, options)
    of_logits, _ = map(linear.given, tangents)
    results = loss, logps, lse
    return results, tuple(linear.bind(apply, transpose, residuals, [of_logits], results))


def _per_token_tangents(options: Options, residuals: Any, tangents: Any) -> Any:
    logits, labels, *_ = residuals
    return linear.tangents_of(
        partial(reference.per_token, options), (logits, labels), (*tangents, None)
    )


def _per_token_pull(options: Options, residuals: Any, cotangents: Any) -> tuple[jax.Array]:
    logits, labels, *saved = residuals
    g, h, k = (jnp.zeros_like(saved[0]) if one is None else one for one in cotangents)
    return (backward(options, logits, labels, tuple(saved), (g, h, k)),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss and lse [..], in f32.

    `factors` is [..] in f32, 0 for ignored tokens.
    """
    loss, _, lse, _ = forward(options, logits, labels)
    return weighted(loss, factors).sum(), lse


@partial(reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    logits, labels, factors = primals
    of_logits, _, of_factors = map(linear.given, tangents)
    # The derivative with respect to a factor is the token's loss, of tokens with factor 0 as well.
    wants_losses = of_factors is not None
    every_token = options.every_token or wants_losses
    dlogits = None
    if logits.dtype == jnp.float16:
        # The range of f16 ends at 6e-8, below which the gradient of a mean soon lies, and a loss
        # scale, which is there to lift it, comes with the cotangent: dlogits must wait for that.
        call = forward_call(options, options.every_token)
        loss, lse, lse_low = bind(call, logits, labels, keep=(0, 2, 3))
    else:
        loss, lse, lse_low, dlogits = fused(options, every_token, logits, labels, factors)
    # A cotangent of lse needs the pass over the logits after all; there is none unless lse is given
    # out, and then mostly none too, since lse is mostly looked at only.
    needs_again = dlogits is None or options.every_token
    again = (logits, labels, lse, lse_low) if needs_again else None
    losses = countable(loss, factors) if wants_losses else None
    residuals = dlogits, factors, losses, again
    apply, transpose = Bound(_reduced_tangents, options), Bound(_reduced_pull, options)
    results, moving = (weighted(loss, factors).sum(), lse), (of_logits, of_factors)
    return results, tuple(linear.bind(apply, transpose, residuals, moving, results))


def _reduced_tangents(
    options: Options, residuals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (dlogits, factors, losses, again), (of_logits, of_factors) = residuals, tangents
    if again is None or of_logits is None:
        return linear.along((dlogits, losses), tangents), jnp.zeros_like(factors)
    of_losses, _, of_lse = _per_token_tangents(options, again, [of_logits])
    if dlogits is None:
        of_losses = jnp.where(factors == 0, 0, of_losses)
        gradients, moving = (factors, losses), (of_losses, of_factors)
    else:
        gradients, moving = (dlogits, losses), (of_logits, of_factors)
    return linear.along(gradients, moving), of_lse


def _reduced_pull(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    (dlogits, factors, losses, again), (dloss, dlse) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), factors.dtype)
    dfactors = None if losses is None else dloss * losses
    # A number a token, so that tokens may be cut over a mesh.
    factor = dloss * jnp.ones_like(factors)
    every_token = options.every_token or losses is not None
    if dlse is None and dlogits is not None:
        (dlogits,) = bind(scaled_call(options, every_token), dlogits, factors, factor)
        return dlogits, dfactors
    logits, labels, *saved = again
    if dlse is None:
        call = again_call(options, every_token)
        (dlogits,) = bind(call, logits, labels, *saved, factors, factor)
        return dlogits, dfactors
    given = (token_cotangents(factors, factor), jnp.zeros_like(dlse), dlse)
    return backward(options, logits, labels, tuple(saved), given), dfactors


def check_dtype(logits: jax.Array) -> None:
    """Refuses logits that no kernel reads.

    Raises:
        TypeError: logits that are not bfloat16, float16 or float32.
    """
    if logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(
            f"logits have dtype {logits.dtype}; it must be bfloat16, float16 or float32 "
            '(implementation="reference" takes others)'
        )
