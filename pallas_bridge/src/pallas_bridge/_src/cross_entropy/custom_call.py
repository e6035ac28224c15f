"""Cross-entropy by the library's kernels, with both schedules of its gradient.

- Fused: where the reduction is inside, the cotangent of every token's loss is known beforehand but
  for one scalar factor, so the forward pass writes dlogits too and the backward pass applies the
  factor. The logits are read once and dlogits are written once.
- Recompute: for cotangents that only the backward pass knows. The forward pass keeps lse, and the
  backward pass reads the logits again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import linear
from ..arrays import Result
from ..custom_call import Call, Lighter, bind
from ..pallas import Target
from ..scale import scale
from . import reference
from .declaration import OPERATION
from .options import Options
from .reduction import countable, weighted

# Operands and results: logits and their gradient, and a number a token.
LOGITS, TOKENS = "*batch V", "*batch"
GRADIENT, NUMBER = Result(LOGITS, like=0), Result(TOKENS)


def attributes(options: Options, every_token: bool | None) -> tuple[tuple[str, Any], ...]:
    """The attributes in the types that handlers take, those that are not given left out."""
    attributes = {
        "ignore_index": np.int64(options.ignore_index),
        "label_smoothing": np.float64(options.label_smoothing),
        "z_loss": np.float64(options.z_loss),
        "softcap": None if options.softcap is None else np.float64(options.softcap),
        "block_size": None if options.block_size is None else np.int64(options.block_size),
        "time_block": None if options.time_block is None else np.int64(options.time_block),
        "every_token": None if every_token is None else np.bool_(every_token),
    }
    return tuple((name, value) for name, value in attributes.items() if value is not None)


def _in_pallas(target: Target, call: Call) -> Callable[..., Sequence[jax.Array]]:
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    return pallas_tpu.kernel(target, call)


def _forward_call(options: Options, every_token: bool) -> Call:
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_forward",
        operands=(LOGITS, TOKENS),
        results=(NUMBER,) * 4,
        attributes=attributes(options, every_token),
        implementation=options.implementation,
        for_tpu=_in_pallas,
    )


def forward(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low, each [..] in f32, of logits [.., V] and labels [..]."""
    loss, logps, lse, lse_low = bind(_forward_call(options, options.every_token), logits, labels)
    return loss, logps, lse, lse_low


def backward(
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Returns dlogits for saved (lse, lse_low) and cotangents of (loss, logps, lse), each [..]."""
    call = Call(
        operation=OPERATION,
        target="xentile_cross_entropy_backward",
        operands=(LOGITS, *[TOKENS] * 6),
        results=(GRADIENT,),
        attributes=attributes(options, None),
        reuses=(0, 0) if options.donate_logits else None,
        implementation=options.implementation,
        for_tpu=_in_pallas,
    )
    (dlogits,) = bind(call, logits, labels, *saved, *cotangents)
    return dlogits


def fused(
    options: Options, every_token: bool, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, lse, lse_low, each [..] in f32, and dlogits for cotangents of the loss."""
    call = Call(
        operation=OPERATION,
        target="xentile_cross_entropy_fused",
        operands=(LOGITS, TOKENS, TOKENS),
        results=(NUMBER, NUMBER, NUMBER, GRADIENT),
        attributes=attributes(options, every_token),
        reuses=(0, 3) if options.donate_logits else None,
        lighter=Lighter(
            first_unused=3,
            call=_forward_call(options, every_token),
            operands=(0, 1),
            results=(0, 2, 3),
        ),
        implementation=options.implementation,
        for_tpu=_in_pallas,
    )
    loss, lse, lse_low, dlogits = bind(call, logits, labels, dloss)
    return loss, lse, lse_low, dlogits


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
    apply, transpose = partial(_per_token_tangents, options), partial(_per_token_pull, options)
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


def reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss and lse [..], in f32, by the schedule that suits.

    `factors` is [..] in f32, 0 for ignored tokens.
    """
    if logits.dtype == jnp.float16:
        # The range of f16 ends at 6e-8, below which the gradient of a mean soon lies, and a loss
        # scale, which is there to lift it, comes with the cotangent: dlogits must wait for that.
        loss, _, lse = per_token(options, logits, labels)
        return weighted(loss, factors).sum(), lse
    return _fused(options, logits, labels, factors)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    loss, _, lse, _ = forward(options, logits, labels)
    return weighted(loss, factors).sum(), lse


@partial(_fused.defjvp, symbolic_zeros=True)
def _fused_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    logits, labels, factors = primals
    of_logits, _, of_factors = map(linear.given, tangents)
    # The derivative with respect to a factor is the token's loss, of tokens with factor 0 as well.
    wants_losses = of_factors is not None
    every_token = options.every_token or wants_losses
    loss, lse, lse_low, dlogits = fused(options, every_token, logits, labels, factors)
    # A cotangent of lse needs the pass over the logits after all; there is none unless lse is given
    # out, and then mostly none too, since lse is mostly looked at only.
    again = (logits, labels, factors, lse, lse_low) if options.every_token else None
    losses = countable(loss, factors) if wants_losses else None
    residuals = dlogits, jnp.ones_like(loss), losses, again
    apply, transpose = partial(_fused_tangents, options), partial(_fused_pull, options)
    results, moving = (weighted(loss, factors).sum(), lse), (of_logits, of_factors)
    return results, tuple(linear.bind(apply, transpose, residuals, moving, results))


def _fused_tangents(options: Options, residuals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (dlogits, ones, losses, again), (of_logits, of_factors) = residuals, tangents
    of_loss = linear.along((dlogits, losses), (of_logits, of_factors))
    if again is None or of_logits is None:
        return of_loss, jnp.zeros_like(ones)
    *_, of_lse = _per_token_tangents(options, again, [of_logits])
    return of_loss, of_lse


def _fused_pull(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    (dlogits, ones, losses, again), (dloss, dlse) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), ones.dtype)
    dfactors = None if losses is None else dloss * losses
    if dlse is None:
        # A factor a token, so that tokens may be cut over a mesh.
        return scale(OPERATION, dlogits, dloss * ones, options.implementation), dfactors
    logits, labels, factors, *saved = again
    given = (dloss * factors, jnp.zeros_like(dlse), dlse)
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
