"""What devices compute in the place of the library's calls, where XLA finds logits to be cut.

`axes` of a mesh cut the vocabulary, and are bound: each device has its own columns of its own
tokens, and what is a number a token is the same along `axes`. A call for loss and gradient at once
becomes two passes, as the gradient takes what parts exchange.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from .. import vocab_parts
from ..custom_call import bind
from ..meshes import Names
from ..scale import scale_call
from ..vocab_parts import OverDevices, labels_of_part, options_of_part
from . import parts
from .calls import distribution_backward_call
from .declaration import OPERATION
from .options import Options

Numbers = Sequence[jax.Array]


def _exchange(axes: Names) -> OverDevices:
    # A cotangent is the whole's on every device.
    return OverDevices(axes, is_checked=True)


def forward(
    options: Options, every_token: bool, axes: Names, logits: jax.Array, labels: jax.Array
) -> Numbers:
    """Returns what `forward_call` gives."""
    options = replace(options, every_token=every_token)
    loss, logps, lse, lse_low, _ = parts.forward(options, _exchange(axes), logits, labels)
    return loss, logps, lse, lse_low


def backward(
    options: Options, axes: Names, logits: jax.Array, labels: jax.Array, *numbers: jax.Array
) -> Numbers:
    """Returns what `backward_call` gives."""
    lse, lse_low, *cotangents = numbers
    saved = lse, lse_low, _is_empty(options, logits)
    return parts.pull(options, _exchange(axes), (logits, labels, *saved), cotangents)


def fused(
    options: Options,
    every_token: bool,
    axes: Names,
    logits: jax.Array,
    labels: jax.Array,
    dloss: jax.Array,
) -> Numbers:
    """Returns what `fused_call` gives."""
    exchange, of_all = _exchange(axes), replace(options, every_token=every_token)
    loss, _, *saved = parts.forward(of_all, exchange, logits, labels)
    lse, lse_low, _ = saved
    residuals = logits, labels, *saved
    return loss, lse, lse_low, *parts.pull(options, exchange, residuals, (dloss, None, None))


def distribution(
    options: Options, every_token: bool, axes: Names, logits: jax.Array, labels: jax.Array
) -> Numbers:
    """Returns what `distribution_call` gives."""
    options, exchange = replace(options, every_token=every_token), _exchange(axes)
    width = logits.shape[-1]
    of = labels_of_part(options, exchange, labels, width)
    found = parts.found_of_part(options, True, logits, of.given, None)
    loss, logps, lse, lse_low = vocab_parts.merge(options, exchange, of, found.numbers)
    entropy, highest, argmax = parts.merge_distribution(exchange, width, of, lse, found)
    return loss, logps, lse, lse_low, entropy, highest, argmax


def distribution_fused(
    options: Options,
    every_token: bool,
    axes: Names,
    logits: jax.Array,
    labels: jax.Array,
    dloss: jax.Array,
) -> Numbers:
    """Returns what `distribution_fused_call` gives."""
    loss, _, *numbers = distribution(options, every_token, axes, logits, labels)
    residuals = logits, labels, *numbers[:2], _is_empty(options, logits)
    dlogits = parts.pull(options, _exchange(axes), residuals, (dloss, None, None))
    return loss, *numbers, *dlogits


def distribution_backward(
    options: Options, axes: Names, logits: jax.Array, labels: jax.Array, *numbers: jax.Array
) -> Numbers:
    """Returns what `distribution_backward_call` gives."""
    lse, lse_low, entropy, *cotangents, q = numbers
    exchange, is_empty = _exchange(axes), _is_empty(options, logits)
    of = labels_of_part(options, exchange, labels, logits.shape[-1])
    of_part = vocab_parts.cotangents(options, exchange, of, lse, is_empty, cotangents)
    call = distribution_backward_call(options_of_part(options))
    q = jnp.where(is_empty, 0, q)
    return bind(call, logits, of.given, lse, lse_low, entropy, *of_part, q)


def scaled(options: Options, _: Names, dlogits: jax.Array, factors: jax.Array) -> Numbers:
    """Returns dlogits times factors, of which devices exchange nothing."""
    return bind(scale_call(OPERATION, options.implementation), dlogits, factors)


def _is_empty(options: Options, logits: jax.Array) -> jax.Array:
    """Returns whether a token has no logits here but -inf, which are read where one begins so."""
    if options.softcap is not None:
        return jnp.zeros(logits.shape[:-1], bool)
    first = logits[..., 0] == -jnp.inf
    found: jax.Array = jax.lax.cond(first.any(), lambda: logits.max(-1) == -jnp.inf, lambda: first)
    return found
