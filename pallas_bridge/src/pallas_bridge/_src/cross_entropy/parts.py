"""Cross-entropy over logits of a vocabulary in parts, by the kernels for whole ones."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import linear, meshes, vocab_parts
from ..arrays import of_rank, wide
from ..bound import Bound
from ..custom_call import bind
from ..meshes import Names
from ..vocab_parts import (
    Exchange,
    Labels,
    OverAxis,
    OverDevices,
    labels_of_part,
    options_of_part,
)
from . import known
from .calls import (
    backward_call,
    distribution_backward_call,
    distribution_call,
    forward_call,
)
from .known import Asked, Known
from .options import Options
from .reduction import weighted

Outputs = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Parts:
    """The functions of an implementation, for logits whose vocabulary is cut over devices."""

    run: Callable[[Options, jax.Array, jax.Array], Outputs]
    # The same of what is known of tokens.
    run_known: Callable[[Options, Asked, jax.Array, jax.Array], Known]
    # Has an array of a number a token lie as the tokens do.
    place: Callable[[jax.Array], jax.Array] = lambda x: x

    def per_token(self, options: Options, logits: jax.Array, labels: jax.Array) -> Outputs:
        """Returns loss, logps and lse, each [..] in f32."""
        return self.run(options, logits, labels)

    def reduced(
        self, options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the scalar sum of factor * loss, and lse [..]."""
        loss, _, lse = self.run(options, logits, labels)
        return weighted(loss, factors).sum(), lse

    def known_of(
        self, options: Options, asked: Asked, logits: jax.Array, labels: jax.Array
    ) -> Known:
        """Returns what is asked for of each token."""
        return self.run_known(options, asked, logits, labels)


@dataclass(frozen=True)
class Alone:
    """The same where one device has the whole vocabulary: what an implementation does anyway."""

    module: Any
    # Has logits lie as those of a vocabulary that nothing cuts.
    whole: Callable[[jax.Array], jax.Array]
    place: Callable[[jax.Array], jax.Array]

    def per_token(self, options: Options, logits: jax.Array, labels: jax.Array) -> Outputs:
        """Returns loss, logps and lse, each [..] in f32."""
        outputs: Outputs = self.module.per_token(options, self.whole(logits), labels)
        return outputs

    def reduced(
        self, options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the scalar sum of factor * loss, and lse [..]."""
        loss, lse = self.module.reduced(options, self.whole(logits), labels, factors)
        return loss, lse

    def known_of(
        self, options: Options, asked: Asked, logits: jax.Array, labels: jax.Array
    ) -> Known:
        """Returns what is asked for of each token."""
        columns = None if asked.columns is None else self.place(asked.columns)
        asked = dataclasses.replace(asked, columns=columns)
        known: Known = self.module.known_of(options, asked, self.whole(logits), labels)
        return known


def find(module: Any, logits: jax.Array, axis_name: Any) -> Parts | Alone | None:
    """Returns what runs over the mesh axes that cut the vocabulary; None where none is known to.

    `module` is what runs over a vocabulary that is whole.

    Raises:
        TypeError: `axis_name` is no name.
        ValueError: a name of nothing, or parts of more than one size.
    """
    names = meshes.names_of(axis_name)
    if meshes.are_of_devices(names):
        exchange = OverDevices.of(names)
        if exchange.count == 1:
            same = partial(meshes.of_the_only, names)
            return Alone(module, same, same)
        return Parts(
            lambda options, *arrays: per_token(options, exchange, *arrays),
            lambda options, asked, *arrays: known_of(options, exchange, asked, *arrays),
        )
    *leading, last = meshes.cuts(logits)
    if not names and not last:
        return None
    names = names or last
    mesh = meshes.with_axes(names, logits)
    if {*names} & meshes.explicit_axes(mesh):
        if names != last:
            raise ValueError(
                f"axis_name is {axis_name!r} and logits are sharded as "
                f"{PartitionSpec(*map(meshes.entry, [*leading, last]))}; "
                "their last axis must be sharded over it, and over nothing else: reshard it first"
            )
        tokens = PartitionSpec(*map(meshes.entry, leading))
        place = partial(meshes.place, mesh, tokens)
        if math.prod(mesh.shape[name] for name in names) == 1:
            return Alone(module, partial(meshes.place, mesh, PartitionSpec(*tokens, None)), place)
        run = partial(_over_explicit, mesh, tokens, last)
        run_known = partial(_known_over_explicit, mesh, tokens, last)
        return Parts(run, run_known, place)
    count = meshes.check_divides(mesh, names, "logits", logits.shape[-1])
    if count == 1:
        return None
    cut = partial(_cut, mesh, names, count)
    return Parts(
        lambda options, logits, labels: per_token(options, OverAxis(count), cut(logits), labels),
        lambda options, asked, logits, labels: known_of(
            options, OverAxis(count), asked, cut(logits), labels
        ),
    )


def _cut(mesh: Any, names: Names, count: int, logits: jax.Array) -> jax.Array:
    """Has XLA cut logits over a mesh, after the axis of the vocabulary has become two."""
    *tokens, vocab = logits.shape
    parts = logits.reshape(*tokens, count, vocab // count)
    leading = [PartitionSpec.UNCONSTRAINED] * (logits.ndim - 1)
    spec = PartitionSpec(*leading, meshes.entry(names), None)
    cut: jax.Array = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))
    return cut


def _over_explicit(
    mesh: Any,
    tokens: PartitionSpec,
    names: Names,
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
) -> Outputs:
    """Has every device run the kernels on its own columns and tokens."""

    def of_device(logits: jax.Array, labels: jax.Array) -> Outputs:
        return per_token(options, OverDevices.of(names), logits, labels)

    specs = PartitionSpec(*tokens, meshes.entry(names)), tokens
    axes = meshes.explicit_axes(mesh)
    mapped = meshes.on_devices(mesh, axes, of_device, specs, (tokens,) * 3)
    outputs: Outputs = mapped(logits, labels)
    return outputs


def _known_over_explicit(
    mesh: Any,
    tokens: PartitionSpec,
    names: Names,
    options: Options,
    asked: Asked,
    logits: jax.Array,
    labels: jax.Array,
) -> Known:
    """As `_over_explicit`, what is asked for of each token."""
    fields = [
        ("loss", tokens),
        ("logps", tokens),
        ("lse", tokens),
        *([("entropy", tokens), ("correct", tokens)] if asked.distribution else []),
    ]
    columns = [] if asked.columns is None else [asked.columns]
    of_columns = PartitionSpec(*tokens, *[None] * (logits.ndim - len(tokens)))
    if columns:
        fields.append(("column_logps", of_columns))
        columns = [meshes.place(mesh, of_columns, columns[0])]

    def of_device(logits: jax.Array, labels: jax.Array, *columns: jax.Array) -> Any:
        one = dataclasses.replace(asked, columns=columns[0] if columns else None)
        found = known_of(options, OverDevices.of(names), one, logits, labels)
        return tuple(getattr(found, name) for name, _ in fields)

    specs = PartitionSpec(*tokens, meshes.entry(names)), tokens, *[of_columns] * len(columns)
    axes = meshes.explicit_axes(mesh)
    results = tuple(spec for _, spec in fields)
    mapped = meshes.on_devices(mesh, axes, of_device, specs, results)
    found = mapped(logits, labels, *columns)
    return Known(**{name: one for (name, _), one in zip(fields, found, strict=True)})


def per_token(
    options: Options, exchange: Exchange, logits: jax.Array, labels: jax.Array
) -> Outputs:
    """Returns loss, logps and lse, each [..] in f32, of a part's logits and labels [..].

    Logits are [.., V / parts], and [.., parts, V / parts] along an axis.
    """
    if options.implementation == "reference":
        return vocab_parts.dense(options, exchange, logits, labels)
    outputs: Outputs = _per_token(options, exchange, logits, labels)
    return outputs


def forward(options: Options, exchange: Exchange, logits: jax.Array, labels: jax.Array) -> Any:
    """Returns loss, logps, lse, lse_low, each [..], and in which parts a token has no logits."""
    of = labels_of_part(options, exchange, labels, logits.shape[-1])
    call = forward_call(options_of_part(options), options.every_token)
    loss, logps, lse, lse_low = bind(call, logits, of.given)
    if options.softcap is None:

        def highest() -> jax.Array:
            return logits.max(-1).astype(lse.dtype)

        lse = vocab_parts.without_logits(lse, highest)
    merged = vocab_parts.merge(options, exchange, of, (loss, logps, lse, lse_low))
    return *merged, lse == -jnp.inf


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _per_token(
    options: Options, exchange: Exchange, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, logps, lse, *_ = forward(options, exchange, logits, labels)
    return loss, logps, lse


@partial(_per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(
    options: Options, exchange: Exchange, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    loss, logps, lse, lse_low, is_empty = forward(options, exchange, *primals)
    residuals = *primals, lse, lse_low, is_empty
    apply, transpose = (Bound(f, options, exchange) for f in (_tangents, pull))
    of_logits, _ = map(linear.given, tangents)
    results = loss, logps, lse
    return results, tuple(linear.bind(apply, transpose, residuals, [of_logits], results))


def _tangents(options: Options, exchange: Exchange, residuals: Any, tangents: Any) -> Any:
    logits, labels, *_ = residuals
    dense = partial(vocab_parts.dense, options, exchange)
    return linear.tangents_of(dense, (logits, labels), (*tangents, None))


def pull(options: Options, exchange: Exchange, residuals: Any, cotangents: Any) -> tuple[jax.Array]:
    """Returns dlogits for cotangents of the outputs, of what `forward` takes and then gives of lse.

    A cotangent that is None is one of zeros.
    """
    logits, labels, lse, lse_low, is_empty = residuals
    of = labels_of_part(options, exchange, labels, logits.shape[-1])
    given = [jnp.zeros_like(lse) if one is None else one for one in cotangents]
    of_part = vocab_parts.cotangents(options, exchange, of, lse, is_empty, given)
    saved = (jnp.broadcast_to(exchange.spread(x), of.given.shape) for x in (lse, lse_low))
    call = backward_call(options_of_part(options))
    (dlogits,) = bind(call, logits, of.given, *saved, *of_part)
    return (dlogits,)


def known_of(
    options: Options, exchange: Exchange, asked: Asked, logits: jax.Array, labels: jax.Array
) -> Known:
    """Returns what is asked for of each token of a part's logits, as `per_token` has them."""
    given = options, exchange, asked.distribution, logits, labels, asked.columns
    if options.implementation == "reference":
        outputs = known_dense(*given)
        if asked.distribution:
            still = jax.lax.stop_gradient(logits)
            highest, argmax = still.max(-1), jnp.argmax(still, -1).astype(jnp.int32)
            argmax = vocab_parts.argmax(exchange, logits.shape[-1], highest, argmax)
            argmax = jnp.where(jnp.isnan(outputs[2]), -1, argmax)
            outputs = *outputs, known.is_correct(options, labels, argmax)
    else:
        outputs = _known(*given)
    return known.ordered(options, asked, labels, outputs)


def _columns_of_part(
    exchange: Exchange, width: int, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns columns [.., K] as a part takes them, and the part's first."""
    first = exchange.index() * width
    if isinstance(exchange, OverDevices):
        return columns, first
    first = first[:, None]
    columns = jnp.broadcast_to(
        columns[..., None, :], (*columns.shape[:-1], exchange.count, columns.shape[-1])
    )
    return columns, of_rank(first, columns)


def _whole_picked(
    exchange: Exchange, width: int, columns: jax.Array, picked: jax.Array
) -> jax.Array:
    """Returns the columns' logits [.., K] of the whole, of those that each part picked."""
    of_part, first = _columns_of_part(exchange, width, columns)
    local = of_part - first.astype(of_part.dtype)
    here = jnp.where((local >= 0) & (local < width), picked, 0)
    if isinstance(exchange, OverAxis):
        here = here.swapaxes(-1, -2)
    (total,) = exchange.sum(here)
    is_column = (columns >= 0) & (columns < exchange.count * width)
    return jnp.where(is_column, total, jnp.nan)


def known_dense(
    options: Options,
    exchange: Exchange,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse, entropy and the columns' logits, in plain JAX."""
    # Once for all, so that what flows back is added up before it is rounded.
    logits = wide(logits)
    outputs: tuple[jax.Array, ...] = vocab_parts.dense(options, exchange, logits, labels)
    ignored = labels_of_part(options, exchange, labels, logits.shape[-1]).ignored
    frozen = exchange.spread(ignored)[..., None]
    logits = jnp.where(frozen, jax.lax.stop_gradient(logits), logits)
    if distribution:
        z = options.mapped(logits)
        lse = exchange.spread(outputs[2])[..., None]
        masked = (z == -jnp.inf) & ~jnp.isnan(lse)
        log_p = jnp.where(masked, 0, z - lse)
        terms = jnp.where(masked, 0, jnp.exp(log_p) * log_p).sum(-1)
        (total,) = exchange.sum(terms)
        outputs = *outputs, jnp.where(ignored, 0, -total)
    if columns is not None:
        width = logits.shape[-1]
        picked = known.pick(options, logits, *_columns_of_part(exchange, width, columns))
        outputs = *outputs, _whole_picked(exchange, width, columns, picked)
    return outputs


class Found(NamedTuple):
    """What a part's logits say of each token."""

    # Loss, logps, lse and lse_low, as `vocab_parts.merge` takes them.
    numbers: tuple[jax.Array, ...]
    # Entropy, the largest logit and its first column; nothing where nobody asks.
    distribution: tuple[jax.Array, ...]
    # The columns' logits, NaN for those of other parts.
    picked: jax.Array | None


def found_of_part(
    options: Options,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
    first: Any = 0,
) -> Found:
    """Returns what a part's logits, the columns from `first` on, say of each token.

    `labels` are those given to the part.
    """
    call = distribution_call if distribution else forward_call
    one = call(options_of_part(options), options.every_token)
    loss, logps, lse, lse_low, *more = bind(one, logits, labels)
    if options.softcap is None:
        lse = vocab_parts.without_logits(lse, lambda: logits.max(-1).astype(lse.dtype))
    picked = None if columns is None else known.pick(options, logits, columns, first)
    return Found((loss, logps, lse, lse_low), tuple(more), picked)


def merge_known(
    options: Options,
    exchange: Exchange,
    width: int,
    labels: jax.Array,
    columns: jax.Array | None,
    found: Found,
) -> Any:
    """Returns the outputs of `known_dense`, and correct of a distribution, of parts' `width`.

    After them what the backward pass takes besides the arrays.
    """
    of = labels_of_part(options, exchange, labels, width)
    loss, logps, lse, lse_low = vocab_parts.merge(options, exchange, of, found.numbers)
    lse_of_part = found.numbers[2]
    is_empty = lse_of_part == -jnp.inf
    outputs: tuple[jax.Array, ...] = (loss, logps, lse)
    correct: tuple[jax.Array, ...] = ()
    entropy = None
    if found.distribution:
        entropy, _, argmax = merge_distribution(exchange, width, of, lse, found)
        outputs, correct = (*outputs, entropy), (known.is_correct(options, labels, argmax),)
    if columns is not None:
        assert found.picked is not None
        outputs = *outputs, _whole_picked(exchange, width, columns, found.picked)
    return (*outputs, *correct), (lse, lse_low, entropy, is_empty, found.picked)


def merge_distribution(
    exchange: Exchange, width: int, labels: Labels, lse: jax.Array, found: Found
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns entropy, highest and argmax of the whole, whose `lse` it is, of parts' `width`."""
    entropy, highest, argmax = found.distribution
    lse_of_part = found.numbers[2]
    entropy = vocab_parts.merge_entropy(exchange, lse_of_part, entropy)
    entropy = jnp.where(labels.ignored, 0, entropy)
    highest = jnp.where(lse_of_part == -jnp.inf, -jnp.inf, highest)
    argmax = vocab_parts.argmax(exchange, width, highest, argmax)
    argmax = jnp.where(jnp.isnan(lse), -1, argmax)
    highest = exchange.max(highest)
    return entropy, jnp.where(jnp.isnan(lse), jnp.nan, highest), argmax


def _forward_known(
    options: Options,
    exchange: Exchange,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> Any:
    """Returns what `merge_known` does."""
    width = logits.shape[-1]
    given = labels_of_part(options, exchange, labels, width).given
    of_columns: Any = (None,)
    if columns is not None:
        of_columns = _columns_of_part(exchange, width, columns)
    found = found_of_part(options, distribution, logits, given, *of_columns)
    return merge_known(options, exchange, width, labels, columns, found)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _known(
    options: Options,
    exchange: Exchange,
    distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    outputs: tuple[jax.Array, ...]
    outputs, _ = _forward_known(options, exchange, distribution, logits, labels, columns)
    return outputs


@partial(_known.defjvp, symbolic_zeros=True)
def _known_jvp(
    options: Options, exchange: Exchange, distribution: bool, primals: Any, tangents: Any
) -> Any:
    outputs, saved = _forward_known(options, exchange, distribution, *primals)
    moving = outputs[:-1] if distribution else outputs
    apply, transpose = (
        Bound(f, options, exchange, distribution) for f in (_known_tangents, _known_pull)
    )
    of_logits = [linear.given(tangents[0])]
    found = linear.bind(apply, transpose, (*primals, saved), of_logits, moving)
    return outputs, known.with_correct(distribution, outputs, found)


def _known_tangents(
    options: Options, exchange: Exchange, distribution: bool, residuals: Any, tangents: Any
) -> Any:
    logits, labels, columns, _ = residuals

    def plain(logits: jax.Array) -> Any:
        return known_dense(options, exchange, distribution, logits, labels, columns)

    return linear.tangents_of(plain, (logits,), tangents)


def _known_pull(
    options: Options, exchange: Exchange, distribution: bool, residuals: Any, cotangents: Any
) -> tuple[jax.Array]:
    logits, labels, columns, (lse, lse_low, entropy, is_empty, picked) = residuals
    g, h, k, *others = cotangents
    of = labels_of_part(options, exchange, labels, logits.shape[-1])
    given = [jnp.zeros_like(lse) if one is None else one for one in (g, h, k)]
    of_part = vocab_parts.cotangents(options, exchange, of, lse, is_empty, given)

    def everywhere(*numbers: jax.Array) -> Any:
        return (jnp.broadcast_to(exchange.spread(x), of.given.shape) for x in numbers)

    q = others.pop(0) if distribution else None
    if q is None:
        call = backward_call(options_of_part(options))
        (dlogits,) = bind(call, logits, of.given, *everywhere(lse, lse_low), *of_part)
    else:
        saved = everywhere(lse, lse_low, entropy)
        (q,) = everywhere(exchange.cotangent(q))
        q = jnp.where(is_empty, 0, q)
        call = distribution_backward_call(options_of_part(options))
        (dlogits,) = bind(call, logits, of.given, *saved, *of_part, q)
    if columns is not None and others[0] is not None:
        of_columns, first = _columns_of_part(exchange, logits.shape[-1], columns)
        d = exchange.cotangent(others[0])
        if isinstance(exchange, OverAxis):
            d = jnp.broadcast_to(d[..., None, :], of_columns.shape)
        dlogits = known.add_picked(options, dlogits, of_columns, picked, d, first)
    return (dlogits,)
