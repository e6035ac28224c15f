"""How the passes of a loss and of its gradient become one as they are lowered.

The gradient needs a factor that comes after the loss in a program. Mostly it is not made of the
loss: then it is moved before the pass of the loss, which makes the gradient too. Where it is, the
pass of the loss makes no gradient, and another does. Both passes have to lie in one block of the
program: not one in the body of a loop, or in a function, and the other elsewhere.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from .. import auto_partitioning, hoisting
from ..custom_call import Call, Lower
from ..scale import scale_call
from .calls import (
    GRADIENT,
    LOGITS,
    TOKENS,
    backward_call,
    distribution_fused_call,
    forward_call,
    fused_call,
    in_parts_of,
)
from .declaration import OPERATION
from .options import Options
from .reduction import token_cotangents

# A factor that is no smaller leaves no token's cotangent 0 that has a factor.
LEAST_FACTOR = 2.0**-20


@dataclass(frozen=True)
class _Site:
    """Where a gradient is lowered: values and their types, and the earlier pass if there is one."""

    lower: Lower
    ctx: Any
    options: Options
    # Whether outputs are wanted of tokens whose cotangent is 0.
    every_token: bool
    logits: Any
    labels: Any
    of_logits: Any
    of_labels: Any
    # The type of a number a token.
    number: Any
    earlier: Any = None

    def fuse(self, dloss: Any, factor: float | None) -> Sequence[Any] | None:
        """Has the earlier pass make dlogits for cotangents, if these are not made of its results.

        `factor` is what they have in common, if it is known. A cotangent that has become 0 by it
        must not take its token out of the loss.
        """
        if self.earlier is None or not hoisting.hoist(dloss, self.earlier):
            return None
        if _target(self.earlier) == DISTRIBUTION:
            call = distribution_fused_call(self.options, self.options.every_token)
        else:
            is_nonzero = factor is not None and abs(factor) >= LEAST_FACTOR
            call = fused_call(self.options, self.every_token or not is_nonzero)
        *numbers, dlogits = self._emit(call, [dloss], before=True)
        self._redirect(numbers)
        return [dlogits]

    def split(self) -> tuple[Any, Any]:
        """Has the earlier pass make no gradient; returns its lse and lse_low."""
        loss, _, *saved = self._emit(forward_call(self.options, self.every_token), [], before=True)
        self._redirect([loss, *saved])
        return saved[0], saved[1]

    def backward(self, saved: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """Makes dlogits by a pass of its own."""
        return self._emit(backward_call(self.options), [*saved, *cotangents], before=False)

    def _redirect(self, numbers: Sequence[Any]) -> None:
        """Has the earlier pass's loss, lse, lse_low and what else it gives come from elsewhere."""
        for index, number in zip(_NUMBERS[_target(self.earlier)], numbers, strict=True):
            hoisting.redirect(self.earlier, index, number)

    def _emit(self, call: Call, numbers: Sequence[Any], *, before: bool) -> Sequence[Any]:
        avals = [self.of_logits, self.of_labels, *[self.number] * len(numbers)]
        results = call.signature.result_avals(call.results, avals, 0)
        ctx = self.ctx.replace(avals_in=avals, avals_out=results)
        keep = tuple(range(len(results)))
        with ir.InsertionPoint(self.earlier) if before else nullcontext():
            return self.lower(
                ctx, self.logits, self.labels, *numbers, call=call, keep=keep, mapped=0
            )


# Which results are loss, lse and lse_low, and entropy, highest and argmax.
FORWARD, FUSED = "xentile_cross_entropy_forward", "xentile_cross_entropy_fused"
DISTRIBUTION = "xentile_cross_entropy_distribution"
_NUMBERS = {FORWARD: (0, 2, 3), FUSED: (0, 1, 2), DISTRIBUTION: (0, 2, 3, 4, 5, 6)}
_LOGPS, _DLOGITS = 1, 3


def _target(operation: Any) -> str:
    """Returns what an operation calls, or nothing."""
    if operation.name != "stablehlo.custom_call":
        return ""
    if stands_for := auto_partitioning.named(operation):
        return stands_for.split()[0]
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _earlier(value: Any, targets: Collection[str], index: int) -> Any:
    """Returns the call of this block, of such a target, of which a handle has the result `index`.

    None where there is none.
    """
    found = hoisting.source(value)
    if found is None:
        return None
    operation, number = found
    if not hoisting.is_in_this_block(operation) or _target(operation) not in targets:
        return None
    return operation if number == index else None


def _per_token(ctx: Any, number: Any, make: Any, *numbers: Any) -> Sequence[Any]:
    """Makes a number a token of others."""
    ctx = ctx.replace(avals_in=[number] * len(numbers), avals_out=[number])
    results: Sequence[Any] = mlir.lower_fun(make, multiple_results=False)(ctx, *numbers)
    return results


@dataclass(frozen=True)
class Scaled:
    """Of dlogits for a factor of 1, the factors of tokens, and the factor that all have."""

    options: Options
    every_token: bool

    def __call__(
        self, lower: Lower, ctx: Any, dlogits: Any, factors: Any, factor: Any
    ) -> Sequence[Any]:
        """Has the fused pass make dlogits for the factor, or the pass of the loss none."""
        of_logits, number, _ = ctx.avals_in
        earlier = _earlier(dlogits, {FUSED}, _DLOGITS)
        if earlier is None or hoisting.is_used(dlogits):
            call = scale_call(OPERATION, self.options.implementation)
            call = replace(call, in_parts=in_parts_of("scaled", self.options))
            # What is 0 stays 0, also where the factor is not finite.
            (factor,) = _per_token(ctx, number, _where_any, factors, factor)
            ctx = ctx.replace(avals_in=[of_logits, number])
            return lower(ctx, dlogits, factor, call=call, keep=(0,), mapped=0)
        # Behind them are the shapes of results, where they are not known.
        logits, labels, *_ = earlier.operands
        width = ir.IntegerType(ir.RankedTensorType(labels.type).element_type).width
        of_labels = number.update(dtype=np.dtype(f"int{width}"), weak_type=False)
        site = _Site(
            lower,
            ctx,
            self.options,
            self.every_token,
            logits,
            labels,
            of_logits,
            of_labels,
            number,
            earlier,
        )
        (dloss,) = _per_token(ctx, number, token_cotangents, factors, factor)
        made = site.fuse(dloss, hoisting.constant(factor))
        if made is None:
            (zeros,) = _per_token(ctx, number, jnp.zeros_like, factor)
            made = site.backward(site.split(), [dloss, zeros, zeros])
        return made


def _where_any(factors: jax.Array, factor: jax.Array) -> jax.Array:
    return jax.lax.select(factors == 0, jnp.ones_like(factor), factor)


def scaled_call(options: Options, every_token: bool) -> Call:
    """Gives dlogits of what they are for a factor of 1, factors, and the factor that all have."""
    call = scale_call(OPERATION, options.implementation)
    operands = (LOGITS, TOKENS, TOKENS)
    results = (GRADIENT,)
    return replace(call, operands=operands, results=results, merge=Scaled(options, every_token))


@dataclass(frozen=True)
class Again:
    """Of logits, labels, lse, lse_low, factors, and the factor that all tokens have."""

    options: Options
    every_token: bool

    def __call__(
        self, lower: Lower, ctx: Any, logits: Any, labels: Any, lse: Any, lse_low: Any,
        factors: Any, factor: Any,
    ) -> Sequence[Any]:  # fmt: skip
        """Has the pass of the loss make dlogits too, or makes them by one of its own."""
        of_logits, of_labels, number, *_ = ctx.avals_in
        site = _Site(
            lower, ctx, self.options, self.every_token,
            logits, labels, of_logits, of_labels, number, _forward({FORWARD}, logits, labels, lse),
        )  # fmt: skip
        (dloss,) = _per_token(ctx, number, token_cotangents, factors, factor)
        made = site.fuse(dloss, hoisting.constant(factor))
        if made is None:
            (zeros,) = _per_token(ctx, number, jnp.zeros_like, factor)
            made = site.backward([lse, lse_low], [dloss, zeros, zeros])
        return made


def again_call(options: Options, every_token: bool) -> Call:
    """Gives dlogits of logits, labels, lse, lse_low, factors, and the factor that all have."""
    call = backward_call(options, Again(options, every_token))
    return replace(call, operands=(*call.operands[:4], TOKENS, TOKENS))


@dataclass(frozen=True)
class Backward:
    """Of what the backward pass takes."""

    options: Options

    def __call__(
        self, lower: Lower, ctx: Any, logits: Any, labels: Any, lse: Any, lse_low: Any,
        *cotangents: Any,
    ) -> Sequence[Any] | None:  # fmt: skip
        """Has the pass of the loss make dlogits too, where loss is all that is differentiated."""
        dloss, *others = cotangents
        of_logits, of_labels, number, *_ = ctx.avals_in
        earlier = _forward({FORWARD, DISTRIBUTION}, logits, labels, lse)
        if earlier is None or any(hoisting.constant(one) != 0 for one in others):
            return None
        site = _Site(
            lower, ctx, self.options, True,
            logits, labels, of_logits, of_labels, number, earlier,
        )  # fmt: skip
        return site.fuse(dloss, None)


def _forward(targets: Collection[str], logits: Any, labels: Any, lse: Any) -> Any:
    """Returns the forward call of this block, of such a target, that gives no logps, or None."""
    earlier = _earlier(lse, targets, 2)
    if earlier is None or hoisting.is_used(earlier.results[_LOGPS]):
        return None
    return earlier if [*earlier.operands][:2] == [logits, labels] else None
