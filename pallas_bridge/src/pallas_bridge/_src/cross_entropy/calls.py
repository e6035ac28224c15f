"""The library's calls for cross-entropy over logits, of a whole vocabulary or of its shards.

`make_call` declares the calls. `forward_tokens` and `backward_tokens` bind those that `exchange`
and the requested outputs need: of a shard, a call reads the device's own columns, and shards
exchange scalars (`vocab_shards`). `run_shard` is what a call becomes where XLA finds, as it
compiles, that its logits are sharded.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Result
from ..bound import Bound
from ..custom_call import Call, WithoutGradient, bind
from ..losses import aux_outputs, vocab_shards
from ..losses.options import Options
from ..losses.vocab_shards import (
    Loss,
    OverAxis,
    OverDevices,
    ShardOutputs,
    shard_columns,
    shard_labels,
    shard_options,
)
from ..lowered_rewrites import FuseBackward, FuseScale, give_handles
from ..meshes import Names
from ..pallas import Target
from . import reference
from .declaration import OPERATION

# Operands and results: logits and their gradient, and a scalar a token.
LOGITS, TOKENS = "*batch V", "*batch"
GRADIENT, SCALAR, ARGMAX = Result(LOGITS, like=0), Result(TOKENS), Result(TOKENS, dtype=np.int32)

# Of each call: how many scalars a token it takes behind logits and labels, and its results.
_ARRAYS = {
    # To loss, logps, lse, lse_low.
    "forward": (0, (SCALAR,) * 4),
    # Of dloss, to loss, lse, lse_low, dlogits.
    "fused": (1, (*(SCALAR,) * 3, GRADIENT)),
    # Of lse, lse_low, dloss, dlogps, dlse.
    "backward": (5, (GRADIENT,)),
    # To what `forward` gives, entropy, highest logit, argmax.
    "distribution": (0, (*(SCALAR,) * 6, ARGMAX)),
    # Of dloss, to loss, lse, lse_low, entropy, highest logit, argmax, dlogits.
    "distribution_fused": (1, (*(SCALAR,) * 5, ARGMAX, GRADIENT)),
    # Of lse, lse_low, entropy, dloss, dlogps, dlse, dentropy.
    "distribution_backward": (7, (GRADIENT,)),
}


def make_call(name: str, options: Options, every_token: bool | None = None) -> Call:
    """Returns a call of `_ARRAYS`; a backward call has no `every_token`."""
    scalars, results = _ARRAYS[name]
    is_distribution = name.startswith("distribution")
    has_gradient = GRADIENT in results
    given = attributes(options, every_token)
    if is_distribution and every_token is not None:
        requested = {"entropy": options.entropy, "argmax": options.correct}
        given = (*given, *((key, np.bool_(False)) for key, is_on in requested.items() if not is_on))
    rewrite: Any = None
    if name == "backward":
        rewrite = FuseBackward(make_call, options, True)
    elif name in ("forward", "fused", "distribution"):
        rewrite = give_handles
    without_gradient = None
    if name == "fused":
        forward = make_call("forward", options, every_token)
        without_gradient = WithoutGradient(3, forward, operands=(0, 1), results=(0, 2, 3))
    has_reference = is_distribution or options.dense_on
    return Call(
        operation=OPERATION,
        target=f"xentile_cross_entropy_{name}",
        operands=(LOGITS, *[TOKENS] * (1 + scalars)),
        results=results,
        attributes=given,
        reuses=(0, results.index(GRADIENT)) if has_gradient and options.donate_logits else None,
        without_gradient=without_gradient,
        rewrite=None if options.dense_on else rewrite,
        dense=Bound(getattr(reference, name), options) if has_reference else None,
        dense_on=options.dense_on,
        implementation=options.implementation,
        for_tpu=None if is_distribution else Bound(_run_pallas, options, every_token),
        on_shards=Bound(run_shard, name, options, every_token),
    )


def attributes(options: Options, every_token: bool | None) -> tuple[tuple[str, Any], ...]:
    """Returns the attributes in the dtypes that handlers take, but those that are not given."""
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


def _run_pallas(
    options: Options, every_token: bool | None, target: Target, call: Call
) -> Callable[..., Sequence[jax.Array]]:
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    return pallas_tpu.kernel(
        dataclasses.replace(options, every_token=bool(every_token)), target, call
    )


def scale_call(options: Options) -> Call:
    """Gives dlogits * factor [..], in the memory of dlogits; nothing is read where factors are 1.

    The product is taken in f32 and rounded to the dtype of dlogits.
    """
    return Call(
        operation=OPERATION,
        target="xentile_scale",
        operands=(LOGITS, TOKENS),
        results=(GRADIENT,),
        reuses=(0, 0),
        implementation=options.implementation,
        for_tpu=_scale_in_xla,
        on_shards=Bound(run_shard, "scale", options, None),
    )


def _scale_in_xla(*_: Any) -> Callable[..., tuple[jax.Array]]:
    """Returns what stands for a kernel on TPUs: XLA does as well."""

    def scaled(x: jax.Array, *factors: jax.Array) -> tuple[jax.Array]:
        # XLA knows that a factor of 1 changes nothing, and mostly sees that it is 1.
        return ((x.astype(jnp.float32) * factors[-1][..., None]).astype(x.dtype),)

    return scaled


def scale_gradient(
    options: Options, every_token: bool, dlogits: jax.Array, factors: jax.Array, factor: jax.Array
) -> jax.Array:
    """Returns dlogits * factor [..] of dlogits that `fused` made for cotangents `factors`."""
    rewrite = FuseScale(make_call, options, every_token)
    call = dataclasses.replace(
        scale_call(options), operands=(LOGITS, TOKENS, TOKENS), rewrite=rewrite
    )
    (scaled,) = bind(call, dlogits, factors, factor)
    return scaled


def recompute_gradient(
    options: Options, every_token: bool, factors: jax.Array, factor: jax.Array, *saved: jax.Array
) -> jax.Array:
    """Returns dlogits for cotangents factors * factor, of `saved` logits, labels, lse, lse_low."""
    rewrite = FuseBackward(make_call, options, every_token)
    operands = (LOGITS, *[TOKENS] * 5)
    call = dataclasses.replace(make_call("backward", options), operands=operands, rewrite=rewrite)
    (dlogits,) = bind(call, *saved, factors, factor)
    return dlogits


def forward(options: Options, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse and lse_low, each [..] in f32, of logits [.., V] and labels [..]."""
    return bind(make_call("forward", options, options.every_token), logits, labels)


def backward(
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Returns dlogits for saved (lse, lse_low) and cotangents of (loss, logps, lse), each [..]."""
    (dlogits,) = bind(make_call("backward", options), logits, labels, *saved, *cotangents)
    return dlogits


def fused(
    options: Options, every_token: bool, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns loss, lse, lse_low, each [..] in f32, and dlogits for cotangents of the loss."""
    return bind(make_call("fused", options, every_token), logits, labels, dloss)


def distribution_fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns loss, lse, lse_low, entropy and correct [..] in f32, and dlogits as `fused` does.

    Tokens without a cotangent have outputs as others do.
    """
    call = make_call("distribution_fused", options, options.every_token)
    *found, argmax, dlogits = bind(call, logits, labels, dloss, keep=(0, 1, 2, 3, 5, 6))
    return *found, aux_outputs.is_correct(options, labels, argmax), dlogits


def read_shard(
    loss: Loss, logits: jax.Array, labels: jax.Array, columns: jax.Array | None = None
) -> ShardOutputs:
    """Returns the outputs of a shard's logits, for labels and columns of the whole vocabulary."""
    options, exchange, width = loss.options, loss.exchange, logits.shape[-1]
    is_whole = exchange.is_whole
    if not is_whole:
        labels = shard_labels(options, exchange, labels, width).given
    columns, first = shard_columns(exchange, width, columns)
    name = "distribution" if loss.distribution else "forward"
    call = make_call(name, shard_options(options, exchange), options.every_token)
    keep = [0, 1, 2, 3]
    if loss.distribution:
        # What is not requested the call need not write. Only shards compare highest logits.
        is_wanted = options.entropy, options.correct and not is_whole, options.correct
        keep += [index for index, is_kept in enumerate(is_wanted, 4) if is_kept]
    results = dict(zip(keep, bind(call, logits, labels, keep=tuple(keep)), strict=True))
    losses, logps, lse, lse_low = (results[index] for index in range(4))
    if not is_whole and options.softcap is None:
        lse = vocab_shards.mark_empty(lse, lambda: logits.max(-1).astype(lse.dtype))
    found = ShardOutputs(losses, logps, lse, lse_low)
    if loss.distribution:
        entropy = results[4] if options.entropy else jnp.zeros_like(lse)
        argmax = results[6] if options.correct else jnp.full(lse.shape, -1, jnp.int32)
        highest = None if is_whole else results.get(5, lse)
        found = found._replace(entropy=entropy, highest=highest, argmax=argmax)
    if columns is not None:
        found = found._replace(picked=aux_outputs.pick(options, logits, columns, first))
    return found


def merge_shards(
    loss: Loss,
    width: int,
    labels: jax.Array,
    columns: jax.Array | None,
    shard: ShardOutputs,
) -> Any:
    """Returns loss, logps, lse, entropy, the columns' logits and correct, of those requested.

    `shard` is what `read_shard` returned for logits of `width` columns. After the outputs what the
    backward pass takes: lse, lse_low, in which shards a token has no logits (None of a whole
    vocabulary), entropy, and the columns' logits in the shard.
    """
    options, exchange = loss.options, loss.exchange
    whole = vocab_shards.merge(options, exchange, width, labels, columns, shard)
    outputs = [*whole[:3], whole.entropy, whole.picked]
    if whole.argmax is not None:
        outputs.append(aux_outputs.is_correct(options, labels, whole.argmax))
    is_empty = None if exchange.is_whole else shard.lse == -jnp.inf
    saved = whole.lse, whole.lse_low, is_empty, whole.entropy, shard.picked
    return tuple(one for one in outputs if one is not None), saved


def forward_tokens(
    loss: Loss, logits: jax.Array, labels: jax.Array, columns: jax.Array | None
) -> Any:
    """Returns what `merge_shards` does, of a shard's logits and of all labels and columns.

    Logits are [.., V], or [.., shards, V / shards] along an axis.
    """
    shard = read_shard(loss, logits, labels, columns)
    return merge_shards(loss, logits.shape[-1], labels, columns, shard)


def backward_tokens(
    loss: Loss,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
    saved: Any,
    cotangents: Sequence[Any],
) -> jax.Array:
    """Returns dlogits for what `forward_tokens` saved, and cotangents of its outputs but correct.

    A cotangent that is None is one of zeros.
    """
    options, exchange, width = loss.options, loss.exchange, logits.shape[-1]
    lse, lse_low, is_empty, entropy, picked = saved
    g, h, k, *others = cotangents
    q = others.pop(0) if loss.distribution else None
    d = others[0] if columns is not None else None
    losses: Sequence[jax.Array]
    losses = [jnp.zeros_like(lse) if one is None else one for one in (g, h, k)]
    if not exchange.is_whole:
        own = shard_labels(options, exchange, labels, width)
        losses = vocab_shards.shard_cotangents(options, exchange, own, lse, is_empty, losses)
        labels = own.given

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(exchange.spread(x), labels.shape)

    name, scalars = "backward", [spread(lse), spread(lse_low), *losses]
    if q is not None:
        q = spread(exchange.cotangent(q))
        q = q if is_empty is None else jnp.where(is_empty, 0, q)
        name, scalars = "distribution_backward", [*scalars[:2], spread(entropy), *losses, q]
    call = make_call(name, shard_options(options, exchange))
    (dlogits,) = bind(call, logits, labels, *scalars)
    if d is not None:
        columns, first = shard_columns(exchange, width, columns)
        assert columns is not None
        d = exchange.cotangent(d)
        if isinstance(exchange, OverAxis):
            d = jnp.broadcast_to(d[..., None, :], columns.shape)
        dlogits = aux_outputs.add_picked(options, dlogits, columns, picked, d, first)
    return dlogits


def run_shard(
    name: str, options: Options, every_token: bool | None, axes: Names, *operands: jax.Array
) -> Sequence[jax.Array]:
    """Returns a device's results of a call, where mesh `axes` shard the vocabulary.

    Each device has its own columns of its own tokens, and scalars of tokens are the same along
    `axes`. A fused call becomes two passes, as the gradient takes what shards exchange.
    """
    if name == "scale":
        return bind(scale_call(options), *operands)
    logits, labels, *scalars = operands
    exchange, width = OverDevices(axes, is_checked=True), logits.shape[-1]
    loss = Loss(options, exchange, name.startswith("distribution"))
    if name.endswith("backward"):
        lse, lse_low, *cotangents = scalars
        entropy = cotangents.pop(0) if loss.distribution else None
        saved: Any = lse, lse_low, _find_empty(options, logits), entropy, None
        return (backward_tokens(loss, logits, labels, None, saved, cotangents),)
    options = dataclasses.replace(options, every_token=bool(every_token))
    loss = dataclasses.replace(loss, options=options)
    shard = read_shard(loss, logits, labels)
    whole = vocab_shards.merge(options, exchange, width, labels, None, shard)
    results = [one for one in whole if one is not None]
    if not scalars:
        return results
    saved = whole.lse, whole.lse_low, shard.lse == -jnp.inf, None, None
    losses = Loss(options, exchange)
    dlogits = backward_tokens(losses, logits, labels, None, saved, (*scalars, None, None))
    return results[0], *results[2:], dlogits


def _find_empty(options: Options, logits: jax.Array) -> jax.Array:
    """Returns whether a token has no logits here but -inf, which are read where one begins so."""
    if options.softcap is not None:
        return jnp.zeros(logits.shape[:-1], bool)
    first = logits[..., 0] == -jnp.inf
    found: jax.Array = jax.lax.cond(first.any(), lambda: logits.max(-1) == -jnp.inf, lambda: first)
    return found
