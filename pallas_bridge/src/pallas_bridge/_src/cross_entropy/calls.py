"""The library's calls for cross-entropy over logits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..arrays import Result
from ..bound import Bound
from ..custom_call import Call, InParts, Merge, WithoutGradient
from ..pallas import Target
from . import reference
from .declaration import OPERATION
from .options import Options

# Operands and results: logits and their gradient, and a number a token.
LOGITS, TOKENS = "*batch V", "*batch"
GRADIENT, NUMBER = Result(LOGITS, like=0), Result(TOKENS)
ARGMAX = Result(TOKENS, dtype=np.int32)


def attributes(options: Options, every_token: bool | None) -> tuple[tuple[str, Any], ...]:
    """The attributes in the types that handlers take, those that are not given left out."""
    attributes = {
        "ignore_index": np.int64(options.ignore_index),
        "label_smoothing": np.float64(options.label_smoothing),
        "z_loss": np.float64(options.z_loss),
        "softcap": None if options.softcap is None else np.float64(options.softcap),
        "temperature": None if options.temperature == 1 else np.float64(options.temperature),
        "block_size": None if options.block_size is None else np.int64(options.block_size),
        "time_block": None if options.time_block is None else np.int64(options.time_block),
        "every_token": None if every_token is None else np.bool_(every_token),
    }
    return tuple((name, value) for name, value in attributes.items() if value is not None)


def _of_distribution(options: Options, every_token: bool) -> tuple[tuple[str, Any], ...]:
    """The attributes of calls that give entropy and argmax: they say which nobody asks for."""
    asked = {"entropy": options.entropy, "argmax": options.correct}
    unasked = ((name, np.bool_(False)) for name, is_asked in asked.items() if not is_asked)
    return (*attributes(options, every_token), *unasked)


def _in_pallas(target: Target, call: Call) -> Callable[..., Sequence[jax.Array]]:
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    return pallas_tpu.kernel(target, call)


def in_parts_of(name: str, *fixed: Any) -> InParts:
    """Returns what `auto_parts` has of a name, which takes `fixed` first."""
    return Bound(_run_in_parts, name, *fixed)


def _run_in_parts(name: str, *arguments: Any) -> Sequence[jax.Array]:
    from . import auto_parts  # late: it makes calls

    results: Sequence[jax.Array] = getattr(auto_parts, name)(*arguments)
    return results


def forward_call(options: Options, every_token: bool) -> Call:
    """Gives loss, logps, lse and lse_low of logits and labels."""
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_forward",
        operands=(LOGITS, TOKENS),
        results=(NUMBER,) * 4,
        attributes=attributes(options, every_token),
        may_change=not options.dense_on,
        dense=Bound(reference.forward, options) if options.dense_on else None,
        dense_on=options.dense_on,
        implementation=options.implementation,
        for_tpu=_in_pallas,
        in_parts=in_parts_of("forward", options, every_token),
    )


def backward_call(options: Options, merge: Merge | None = None) -> Call:
    """Gives dlogits of logits, labels, lse, lse_low, dloss, dlogps and dlse."""
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_backward",
        operands=(LOGITS, *[TOKENS] * 6),
        results=(GRADIENT,),
        attributes=attributes(options, None),
        reuses=(0, 0) if options.donate_logits else None,
        merge=None if options.dense_on else merge,
        dense=Bound(reference.backward, options) if options.dense_on else None,
        dense_on=options.dense_on,
        implementation=options.implementation,
        for_tpu=_in_pallas,
        in_parts=in_parts_of("backward", options),
    )


def distribution_call(options: Options, every_token: bool) -> Call:
    """Gives what `forward_call` does, and entropy, highest and argmax."""
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_distribution",
        operands=(LOGITS, TOKENS),
        results=(*(NUMBER,) * 6, ARGMAX),
        attributes=_of_distribution(options, every_token),
        may_change=not options.dense_on,
        implementation=options.implementation,
        dense=Bound(reference.distribution_forward, options),
        dense_on=options.dense_on,
        in_parts=in_parts_of("distribution", options, every_token),
    )


def distribution_fused_call(options: Options, every_token: bool) -> Call:
    """Gives what `distribution_call` does but logps, and dlogits, of logits, labels and dloss.

    Tokens without a cotangent have outputs as others do; `every_token` is about those ignored.
    """
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_distribution_fused",
        operands=(LOGITS, TOKENS, TOKENS),
        results=(*(NUMBER,) * 5, ARGMAX, GRADIENT),
        attributes=_of_distribution(options, every_token),
        reuses=(0, 6) if options.donate_logits else None,
        implementation=options.implementation,
        dense=Bound(reference.distribution_fused, options),
        dense_on=options.dense_on,
        in_parts=in_parts_of("distribution_fused", options, every_token),
    )


def distribution_backward_call(options: Options) -> Call:
    """Gives dlogits of what `backward_call` takes, then entropy and dentropy."""
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_distribution_backward",
        operands=(LOGITS, *[TOKENS] * 8),
        results=(GRADIENT,),
        attributes=attributes(options, None),
        reuses=(0, 0) if options.donate_logits else None,
        implementation=options.implementation,
        dense=Bound(reference.distribution_backward, options),
        dense_on=options.dense_on,
        in_parts=in_parts_of("distribution_backward", options),
    )


def fused_call(options: Options, every_token: bool) -> Call:
    """Gives loss, lse, lse_low and dlogits of logits, labels and dloss."""
    return Call(
        operation=OPERATION,
        target="xentile_cross_entropy_fused",
        operands=(LOGITS, TOKENS, TOKENS),
        results=(NUMBER, NUMBER, NUMBER, GRADIENT),
        attributes=attributes(options, every_token),
        reuses=(0, 3) if options.donate_logits else None,
        without_gradient=WithoutGradient(
            first_unused=3,
            call=forward_call(options, every_token),
            operands=(0, 1),
            results=(0, 2, 3),
        ),
        may_change=not options.dense_on,
        dense=Bound(reference.fused, options) if options.dense_on else None,
        dense_on=options.dense_on,
        implementation=options.implementation,
        for_tpu=_in_pallas,
        in_parts=in_parts_of("fused", options, every_token),
    )
