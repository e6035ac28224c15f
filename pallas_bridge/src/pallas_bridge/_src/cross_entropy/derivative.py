"""The two derivative rules of cross-entropy: per token, and reduced.

Per token, the forward pass saves lse, and the backward pass reads the logits again. Reduced, every
token's cotangent is known beforehand but for a factor that all tokens have. So the forward pass
writes dlogits for a factor of 1, and the backward pass scales them; `lowered_rewrites` has one
fused call write them for the factor, where that does not depend on the loss. Forward mode is that
of the reference.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..custom_call import bind
from ..losses import aux_outputs
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options
from ..losses.reduction import countable, weighted
from ..losses.vocab_shards import Exchange, Loss
from ..lowered_rewrites import token_cotangents
from . import calls, reference


def per_token(
    options: Options, exchange: Exchange, request: Request, logits: jax.Array, labels: jax.Array
) -> TokenOutputs:
    """Returns loss, logps, lse and what is requested of each token.

    Logits are [.., V / shards], or [.., shards, V / shards] along an axis.
    """
    loss = Loss(options, exchange, request.distribution)
    if options.implementation == "reference":
        return reference.requested_outputs(loss, request, logits, labels)
    outputs = _token_outputs(loss, logits, labels, request.columns)
    return aux_outputs.collect(options, request, labels, outputs)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _token_outputs(
    loss: Loss, logits: jax.Array, labels: jax.Array, columns: jax.Array | None
) -> tuple[jax.Array, ...]:
    outputs: tuple[jax.Array, ...]
    outputs, _ = calls.forward_tokens(loss, logits, labels, columns)
    return outputs


@partial(_token_outputs.defjvp, symbolic_zeros=True)
def _token_outputs_jvp(loss: Loss, primals: Any, tangents: Any) -> Any:
    outputs, saved = calls.forward_tokens(loss, *primals)
    differentiable = outputs[:-1] if loss.distribution else outputs
    rules = Bound(_token_tangents, loss), Bound(_token_cotangents, loss)
    moving = [linear.given(tangents[0])]
    found = linear.bind(*rules, (*primals, saved), moving, differentiable)
    return outputs, aux_outputs.with_correct(loss.distribution, outputs, found)


def _token_tangents(loss: Loss, residuals: Any, tangents: Any) -> Any:
    logits, labels, columns, _ = residuals
    plain = partial(reference.token_outputs, loss)
    return linear.tangents_of(plain, (logits, labels, columns), (*tangents, None, None))


def _token_cotangents(loss: Loss, residuals: Any, cotangents: Any) -> tuple[jax.Array]:
    logits, labels, columns, saved = residuals
    return (calls.backward_tokens(loss, logits, labels, columns, saved, cotangents),)


def reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss and lse [..], in f32, of a whole vocabulary.

    `factors` is [..] in f32, 0 for ignored tokens.
    """
    is_reference = options.implementation == "reference"
    run: Any = reference.reduced if is_reference else _reduced
    loss, lse = run(options, logits, labels, factors)
    return loss, lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    loss, _, lse, _ = calls.forward(options, logits, labels)
    return weighted(loss, factors).sum(), lse


@partial(_reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    logits, labels, factors = primals
    moving_logits, _, moving_factors = map(linear.given, tangents)
    # The derivative with respect to a factor is the token's loss, of tokens with factor 0 as well.
    needs_losses = moving_factors is not None
    dlogits = None
    if logits.dtype == jnp.float16:
        # f16 underflows below 6e-8, where gradients of a mean lie. The loss scale that prevents it
        # comes with the cotangent, so dlogits are computed in the backward pass.
        call = calls.make_call("forward", options, options.every_token)
        loss, lse, lse_low = bind(call, logits, labels, keep=(0, 2, 3))
    else:
        every_token = options.every_token or needs_losses
        loss, lse, lse_low, dlogits = calls.fused(options, every_token, logits, labels, factors)
    # A cotangent of lse takes the pass over the logits after all. There is none unless lse is
    # returned, and then mostly none either, since lse is mostly only looked at.
    recomputes = dlogits is None or options.every_token
    saved = (logits, labels, lse, lse_low) if recomputes else None
    losses = countable(loss, factors) if needs_losses else None
    rules = Bound(_reduced_tangents, options), Bound(_reduced_cotangents, options)
    outputs, moving = (weighted(loss, factors).sum(), lse), (moving_logits, moving_factors)
    return outputs, tuple(linear.bind(*rules, (dlogits, factors, losses, saved), moving, outputs))


def _reduced_tangents(
    options: Options, residuals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (dlogits, factors, losses, saved), (moving_logits, moving_factors) = residuals, tangents
    if saved is None or moving_logits is None:
        return linear.along((dlogits, losses), tangents), jnp.zeros_like(factors)
    residuals = *saved[:2], None, None
    dloss, _, dlse = _token_tangents(Loss(options), residuals, [moving_logits])
    if dlogits is not None:
        return linear.along((dlogits, losses), tangents), dlse
    dloss = jnp.where(factors == 0, 0, dloss)
    return linear.along((factors, losses), (dloss, moving_factors)), dlse


def _reduced_cotangents(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    (dlogits, factors, losses, saved), (dloss, dlse) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), factors.dtype)
    dfactors = None if losses is None else dloss * losses
    # A scalar a token, so that tokens may be sharded over a mesh.
    factor = dloss * jnp.ones_like(factors)
    every_token = options.every_token or losses is not None
    if dlse is not None:
        logits, labels, *scalars = saved
        given = token_cotangents(factors, factor), jnp.zeros_like(dlse), dlse
        return calls.backward(options, logits, labels, tuple(scalars), given), dfactors
    if dlogits is None:
        return calls.recompute_gradient(options, every_token, factors, factor, *saved), dfactors
    return calls.scale_gradient(options, every_token, dlogits, factors, factor), dfactors
