"""Rewrites that join the calls of a loss and of its gradient while JAX lowers them.

A fused call reads logits once and writes dlogits once, for cotangents dloss [..] that it takes. In
a program of reverse mode dloss comes after the loss. So the gradient's call, as it is lowered,
finds the call that gave the loss, moves what makes dloss before that call, and has a fused call
take its place. Where dloss depends on the loss, the two calls stay a forward and a backward pass.

JAX has no supported rule that does the same. `custom_jvp` and `custom_vjp` run the forward pass
before any cotangent is known; `optimize_remat` chooses a forward pass by whether a gradient is
taken, not by cotangents. A rule for dead code sees one equation, and never the equations of its
operands. A pass over jaxprs would see both calls, but JAX has no hook for one.

Contract with JAX, which tests/test_lowered_rewrites.py holds:

1. A lowering rule registered with `cacheable=False` runs once for each equation, in the order of
   the jaxpr. It gets operands as `ir.Value`s of the function that is being lowered, and
   `ir.InsertionPoint.current` is the end of a block of that function.
2. JAX keeps the values that a rule returns and hands them to later rules; a value that was replaced
   would come back. Results that may be replaced are therefore returned through a handle, a
   `stablehlo.convert` to its own type, which JAX does not fold and XLA drops.
3. The order of operations in a block means nothing but that a value is made before it is used.
   `move_before`, `is_before_in_block`, `uses` and `replace_all_uses_with` of `jax.extend.mlir.ir`
   are those of MLIR.
4. `mlir.lower_fun`, and rules of custom calls, emit at the end of the block. JAX 0.9 does so under
   any insertion point; operations that have to lie earlier are therefore moved once emitted.
5. A Python scalar of the program is a `stablehlo.constant` in the same function. Between it and its
   use there are only broadcasts, conversions, reshapes, products, quotients and negations.

Nothing is erased: XLA drops what nothing uses any more. Calls in different blocks (the body of a
loop, a nested function) are not joined.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from . import auto_partitioning
from .custom_call import Call, Lower

# A factor of this size or larger is assumed not to underflow a token's nonzero cotangent to 0.
LEAST_FACTOR = 2.0**-20
FORWARD, FUSED, DISTRIBUTION = (
    f"xentile_cross_entropy_{name}" for name in ("forward", "fused", "distribution")
)
# Indices of the results that a fused call gives too, in its order: loss, lse and lse_low, then
# entropy, highest and argmax.
_SHARED_RESULTS = {FORWARD: (0, 2, 3), FUSED: (0, 1, 2), DISTRIBUTION: (0, 2, 3, 4, 5, 6)}
# Indices of the results that tell which call gave them.
_LOGPS, _LSE, _DLOGITS = 1, 2, 3


def give_handles(lower: Lower, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    """Lowers a call whose results a later rewrite may replace."""
    return [stablehlo.convert(value.type, value) for value in lower(ctx, *operands, **params)]


@dataclass(frozen=True)
class _Rewrite:
    """Lowers a gradient's call together with the call that gave the loss.

    `make_call` returns the call of a name, by `options` and `every_token`: whether loss and lse are
    wanted of ignored tokens too.
    """

    make_call: Callable[..., Call]
    options: Any
    every_token: bool


class FuseScale(_Rewrite):
    """Lowers dlogits * factor [..], of dlogits that a fused call made for cotangents `factors`."""

    def __call__(
        self, lower: Lower, ctx: Any, dlogits: Any, factors: Any, factor: Any, **params: Any
    ) -> Sequence[Any]:
        """Returns dlogits; has the fused call make them for factors * factor where it can."""
        constant = find_constant(factor)
        if constant == 1:
            return [dlogits]
        logits_aval, scalar, _ = ctx.avals_in
        earlier = _find_call(dlogits, {FUSED}, _DLOGITS)
        if earlier is None or _is_used(dlogits):
            # A gradient of 0 stays 0 where the factor is not finite.
            (factor,) = _lower_scalars(ctx, scalar, _keep_zeros, factors, factor)
            call = replace(params["call"], operands=params["call"].operands[:2])
            ctx = ctx.replace(avals_in=[logits_aval, scalar])
            return lower(ctx, dlogits, factor, **{**params, "call": call})
        # Behind logits and labels are the shapes of results, where they are symbolic.
        logits, labels, *_ = earlier.operands
        width = ir.IntegerType(ir.RankedTensorType(labels.type).element_type).width
        labels_aval = scalar.update(dtype=np.dtype(f"int{width}"), weak_type=False)
        calls = _Calls(
            self, lower, ctx, (logits, labels), (logits_aval, labels_aval, scalar), earlier
        )
        (dloss,) = _lower_scalars(ctx, scalar, token_cotangents, factors, factor)
        fused = calls.fuse(dloss, constant)
        if fused is not None:
            return fused
        loss, _, lse, lse_low = calls.emit("forward", self.every_token)
        calls.replace_earlier([loss, lse, lse_low])
        return calls.emit_backward(lse, lse_low, dloss)


class FuseBackward(_Rewrite):
    """Lowers dlogits of logits, labels, lse, lse_low and cotangents, scalars [..] of a token.

    Cotangents are dloss, dlogps and dlse, or `factors` and `factor`, whose product is dloss.
    """

    def __call__(
        self,
        lower: Lower,
        ctx: Any,
        logits: Any,
        labels: Any,
        lse: Any,
        lse_low: Any,
        *cotangents: Any,
        **params: Any,
    ) -> Sequence[Any]:
        """Returns dlogits; the call of the loss makes them if dlogps and dlse are constant zero."""
        earlier = _find_call(lse, {FORWARD, DISTRIBUTION}, _LSE)
        if earlier is not None:
            is_same = [*earlier.operands][:2] == [logits, labels]
            earlier = earlier if is_same and not _is_used(earlier.results[_LOGPS]) else None
        scalar, constant = ctx.avals_in[2], None
        calls = _Calls(self, lower, ctx, (logits, labels), tuple(ctx.avals_in[:3]), earlier)
        is_reduced = len(cotangents) == 2
        if is_reduced:
            constant = find_constant(cotangents[1])
            (dloss,) = _lower_scalars(ctx, scalar, token_cotangents, *cotangents)
        else:
            dloss, *others = cotangents
        if is_reduced or all(find_constant(one) == 0 for one in others):
            fused = calls.fuse(dloss, constant)
            if fused is not None:
                return fused
        if is_reduced:
            return calls.emit_backward(lse, lse_low, dloss)
        return lower(ctx, logits, labels, lse, lse_low, *cotangents, **params)


def token_cotangents(factors: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns cotangents [..] of losses for that of their sum: 0 where a factor is."""
    return jax.lax.select(factors == 0, jnp.zeros_like(factors), factors * factor)


def _keep_zeros(factors: jax.Array, factor: jax.Array) -> jax.Array:
    return jax.lax.select(factors == 0, jnp.ones_like(factor), factor)


@dataclass(frozen=True)
class _Calls:
    """Emits calls for the logits and labels of a loss whose gradient is being lowered."""

    rewrite: _Rewrite
    lower: Lower
    ctx: Any
    # Logits and labels, and their types and that of a scalar a token.
    arrays: tuple[Any, Any]
    avals: tuple[Any, ...]
    # The call that gave the loss, if it can be rewritten.
    earlier: Any

    def fuse(self, dloss: Any, factor: float | None) -> Sequence[Any] | None:
        """Has a fused call take the place of `earlier`; None where dloss depends on its results.

        `factor` is what all cotangents have in common, where the program says it. A cotangent that
        has become 0 by the factor must not take its token out of the loss.
        """
        if self.earlier is None or not hoist(dloss, self.earlier):
            return None
        if _target(self.earlier) == DISTRIBUTION:
            name, every_token = "distribution_fused", self.rewrite.options.every_token
        else:
            is_nonzero = factor is not None and abs(factor) >= LEAST_FACTOR
            name, every_token = "fused", self.rewrite.every_token or not is_nonzero
        *scalars, dlogits = self.emit(name, every_token, dloss)
        self.replace_earlier(scalars)
        return [dlogits]

    def replace_earlier(self, scalars: Sequence[Any]) -> None:
        """Has `scalars`, in the order of a fused call, take the place of results of `earlier`."""
        indices = _SHARED_RESULTS[_target(self.earlier)]
        for index, scalar in zip(indices, scalars, strict=True):
            hoist(scalar, self.earlier)
            ir.Value(self.earlier.results[index]).replace_all_uses_with(scalar)

    def emit_backward(self, lse: Any, lse_low: Any, dloss: Any) -> Sequence[Any]:
        """Returns dlogits of a backward pass."""
        (zeros,) = _lower_scalars(self.ctx, self.avals[2], jnp.zeros_like, dloss)
        return self.emit("backward", None, lse, lse_low, dloss, zeros, zeros)

    def emit(self, name: str, every_token: bool | None, *scalars: Any) -> Sequence[Any]:
        """Returns the results of a call."""
        call = replace(
            self.rewrite.make_call(name, self.rewrite.options, every_token), rewrite=None
        )
        avals = [*self.avals[:2], *[self.avals[2]] * len(scalars)]
        results = call.signature.result_avals(call.results, avals, 0)
        ctx = self.ctx.replace(avals_in=avals, avals_out=results)
        params = {"call": call, "keep": tuple(range(len(results))), "mapped": 0}
        return self.lower(ctx, *self.arrays, *scalars, **params)


def _lower_scalars(
    ctx: Any, scalar: Any, make: Callable[..., jax.Array], *scalars: Any
) -> Sequence[Any]:
    """Returns make(*scalars), of scalars [..] a token of one type."""
    ctx = ctx.replace(avals_in=[scalar] * len(scalars), avals_out=[scalar])
    results: Sequence[Any] = mlir.lower_fun(make, multiple_results=False)(ctx, *scalars)
    return results


def _target(operation: Any) -> str:
    """Returns the target that an operation calls, or stands for; "" for others."""
    if operation.name != "stablehlo.custom_call":
        return ""
    if stands_for := auto_partitioning.named(operation):
        return stands_for.split()[0]
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _find_call(value: Any, targets: Collection[str], index: int) -> Any:
    """Returns the call of one of `targets` whose result `index` a value is a handle of, or None.

    The call lies in the block that is being lowered.
    """
    handle = _owner(value)
    if handle is None or handle.name != "stablehlo.convert":
        return None
    (result,) = handle.operands
    call = _owner(result)
    if call is None or result.type != value.type or _target(call) not in targets:
        return None
    is_here = call.block == ir.InsertionPoint.current.block
    return call if is_here and ir.OpResult(result).result_number == index else None


def _is_used(value: Any) -> bool:
    """Whether the program so far uses a value."""
    return any(True for _ in value.uses)


def hoist(value: Any, before: Any) -> bool:
    """Moves the operations that make a value before an operation of their block.

    Returns whether it could: nothing is moved where the operation's results are part of the value.
    """
    block, moved, seen = before.block, [], set()
    stack = [(value, False)]
    while stack:
        one, has_operands = stack.pop()
        operation = _find_in_block(_owner(one), block)
        # Arguments of this block, and values of outer blocks, are there before all of it.
        if operation is None:
            continue
        if has_operands:
            moved.append(operation)
            continue
        if operation == before:
            return False
        first = operation.results[0]
        if first in seen or operation.is_before_in_block(before):
            continue
        seen.add(first)
        stack.append((first, True))
        stack.extend((operand, False) for operand in _operands(operation))
    for operation in moved:
        operation.move_before(before)
    return True


def find_constant(value: Any, steps: int = 8) -> float | None:
    """Returns the number that a value is everywhere, if the program says it within `steps`."""
    operation = _owner(value)
    if steps == 0 or operation is None:
        return None
    if operation.name == "stablehlo.constant":
        number = operation.attributes["value"]
        if isinstance(number, ir.DenseFPElementsAttr) and number.is_splat:
            return float(ir.FloatAttr(number.get_splat_value()).value)
        return None
    if operation.name not in _FOLDED:
        return None
    operands = [find_constant(operand, steps - 1) for operand in operation.operands]
    if None in operands:
        return None
    return _FOLDED[operation.name](*operands)


# What the operations that are followed make of constants.
_FOLDED: dict[str, Callable[..., float | None]] = {
    "stablehlo.multiply": lambda a, b: a * b,
    "stablehlo.divide": lambda a, b: a / b if b else None,
    "stablehlo.negate": lambda a: -a,
    "stablehlo.broadcast_in_dim": lambda a: a,
    "stablehlo.convert": lambda a: a,
    "stablehlo.reshape": lambda a: a,
}


def _owner(value: Any) -> Any:
    """Returns the operation that a value is a result of; None for an argument of a block."""
    owner = value.owner
    return owner.operation if isinstance(owner, ir.Operation | ir.OpView) else None


def _find_in_block(operation: Any, block: Any) -> Any:
    """Returns the operation of a block that is, or holds, another; None where none does."""
    while operation is not None and operation.block != block:
        parent = operation.parent
        operation = None if parent is None or parent.name == "builtin.module" else parent.operation
    return operation


def _operands(operation: Any) -> Sequence[Any]:
    """Returns the values that an operation and its regions use."""
    inner = [
        value
        for region in operation.regions
        for block in region.blocks
        for one in block.operations
        for value in _operands(one.operation)
    ]
    return [*operation.operands, *inner]
