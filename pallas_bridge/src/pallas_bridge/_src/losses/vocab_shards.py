"""Cross-entropy over vocabulary shards: the collectives, and how results of shards combine.

A shard is a block of columns of every token's logits. Kernels treat a shard as a whole vocabulary.
The results of the whole vocabulary are made from a few scalars a token of each shard. The backward
kernels take the global lse and cotangents of the shard (the formulas are in
crates/xentile/src/cross_entropy.rs, "A vocabulary in parts"). So shards need no kernels of their
own. A whole vocabulary is one shard over no axes (`WHOLE`), whose collectives trace to nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays import match_rank
from ..compat import varying_axes
from .options import Options, is_ignored

# Labels of a shard are columns of the shard, or one of these.
IGNORED, OUT_OF_RANGE = -1, -2


@dataclass(frozen=True)
class OverDevices:
    """Shards on devices along `axes`: arrays are those of one shard."""

    axes: tuple[str, ...]
    # Whether JAX tracks which arrays vary over devices (`check_vma`). Otherwise the cotangent of a
    # sum over devices is a device's share, in JAX's rules and in ours.
    is_checked: bool

    @staticmethod
    def of(axes: tuple[str, ...]) -> "OverDevices":
        """Returns the exchange over axes, which are bound where this is called."""
        index = jax.typeof(jax.lax.axis_index(axes))
        return OverDevices(axes, {*axes} <= varying_axes(index))

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole vocabulary."""
        return not self.axes

    @property
    def count(self) -> int:
        """How many shards there are."""
        return int(jax.lax.axis_size(self.axes))

    def index(self) -> jax.Array:
        """Returns the number of the shard."""
        index: jax.Array = jax.lax.axis_index(self.axes)
        return index

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns a scalar a token as every shard has it."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over shards, by which results are shifted: it has no derivative."""
        x = jax.lax.stop_gradient(x)
        largest: jax.Array = jax.lax.pmax(x, self.axes) if self.axes else x
        return largest

    def sum(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums over shards."""
        sums: Sequence[jax.Array] = jax.lax.psum(arrays, self.axes) if self.axes else arrays
        return sums

    def cotangent(self, x: jax.Array) -> jax.Array:
        """Returns the cotangent of a scalar that all shards share, from each shard's cotangent."""
        if self.is_checked:
            return x
        total: jax.Array = jax.lax.psum(x, self.axes)
        return total


@dataclass(frozen=True)
class OverAxis:
    """Shards along an axis of arrays, the last of tokens' axes, which XLA may shard over a mesh."""

    count: int
    is_whole = False

    def index(self) -> jax.Array:
        """Returns the numbers of the shards."""
        return jnp.arange(self.count, dtype=jnp.int32)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns a scalar a token as every shard has it."""
        return x[..., None]

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over shards, which has no derivative."""
        return jax.lax.stop_gradient(x).max(-1)

    def sum(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums over shards."""
        return [x.sum(-1) for x in arrays]

    def cotangent(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x


Exchange = OverDevices | OverAxis
WHOLE = OverDevices((), is_checked=True)


@dataclass(frozen=True)
class Loss:
    """Everything of losses a token but their arrays."""

    options: Options
    exchange: Exchange = WHOLE
    # Whether entropy or argmax are requested.
    distribution: bool = False


class ShardOutputs(NamedTuple):
    """What logits of a shard give of each token, or of the whole vocabulary; None if not wanted."""

    loss: jax.Array
    logps: jax.Array
    lse: jax.Array
    lse_low: jax.Array
    entropy: jax.Array | None = None
    # The largest logit, and its first column.
    highest: jax.Array | None = None
    argmax: jax.Array | None = None
    # The logits [.., K] of columns, NaN for those of other shards.
    picked: jax.Array | None = None


class Labels(NamedTuple):
    """Labels as a shard takes them."""

    # An integer a token and shard: the column to predict, of this shard; the first where another
    # shard has it; or `IGNORED`, or `OUT_OF_RANGE` of the whole vocabulary. Of a whole vocabulary
    # the labels as they are.
    given: jax.Array
    # Whether this shard has the column, likewise.
    here: jax.Array
    # A flag a token: whether it is ignored, and whether it is or its label is in range.
    ignored: jax.Array
    valid: jax.Array


def shard_labels(options: Options, exchange: Exchange, labels: jax.Array, width: int) -> Labels:
    """Returns labels [..] of the whole vocabulary for a shard of `width` columns."""
    ignored = is_ignored(options, labels)
    if exchange.is_whole:
        here = (labels >= 0) & (labels < width)
        return Labels(labels, here, ignored, here | ignored)
    in_range = (labels >= 0) & ~ignored
    # Every label lies below an end that their type does not hold.
    if exchange.count * width <= jnp.iinfo(labels.dtype).max:
        in_range &= labels < exchange.count * width
    column = exchange.spread(jnp.where(in_range, labels, -1))
    first = match_rank(exchange.index().astype(labels.dtype) * width, column)
    column = jnp.where(column < 0, column, column - first)
    here = exchange.spread(in_range) & (column >= 0) & (column < width)
    given = jnp.where(here, column, jnp.where(exchange.spread(in_range), 0, OUT_OF_RANGE))
    given = jnp.where(exchange.spread(ignored), IGNORED, given)
    return Labels(given, here, ignored, in_range | ignored)


def shard_options(options: Options, exchange: Exchange) -> Options:
    """Returns the options of a shard's kernels, with nothing that is the whole vocabulary's.

    With a smoothing of 1, loss is lse - mean(z), and a token's cotangent how much of 1/V it gets.
    """
    if exchange.is_whole:
        return options
    smoothing = 1.0 if options.label_smoothing else 0.0
    return dataclasses.replace(options, ignore_index=IGNORED, label_smoothing=smoothing, z_loss=0.0)


def shard_columns(
    exchange: Exchange, width: int, columns: jax.Array | None
) -> tuple[jax.Array | None, Any]:
    """Returns columns [.., K] as a shard of `width` takes them, and the shard's first column."""
    if columns is None or exchange.is_whole:
        return columns, 0
    first = exchange.index() * width
    if isinstance(exchange, OverDevices):
        return columns, first
    first = first[:, None]
    columns = jnp.broadcast_to(
        columns[..., None, :], (*columns.shape[:-1], exchange.count, columns.shape[-1])
    )
    return columns, match_rank(first, columns)


def merge_picked(
    exchange: Exchange, width: int, columns: jax.Array, picked: jax.Array
) -> jax.Array:
    """Returns the logits [.., K] of `columns`, from the logits that each shard picked."""
    if exchange.is_whole:
        return picked
    own, first = shard_columns(exchange, width, columns)
    assert own is not None
    local = own - first.astype(own.dtype)
    here = jnp.where((local >= 0) & (local < width), picked, 0)
    if isinstance(exchange, OverAxis):
        here = here.swapaxes(-1, -2)
    (total,) = exchange.sum(here)
    is_column = (columns >= 0) & (columns < exchange.count * width)
    return jnp.where(is_column, total, jnp.nan)


def mark_empty(lse: jax.Array, make_highest: Callable[[], jax.Array]) -> jax.Array:
    """Returns lse, with -inf where a shard's logits are all -inf.

    Kernels give NaN there, as for a row with a NaN. `make_highest` returns the largest logit of
    each row, and runs only if some lse is NaN.
    """
    nan = jnp.isnan(lse)
    found: jax.Array = jax.lax.cond(
        nan.any(),
        lambda: jnp.where(nan & (make_highest() == -jnp.inf), -jnp.inf, lse),
        lambda: lse,
    )
    return found


def merge(
    options: Options,
    exchange: Exchange,
    width: int,
    labels: jax.Array,
    columns: jax.Array | None,
    shard: ShardOutputs,
) -> ShardOutputs:
    """Returns the outputs of the whole vocabulary, from a shard of `width` columns.

    `shard` has the outputs with `shard_options` and `mark_empty`; labels and columns are indices
    into the whole vocabulary.
    """
    if exchange.is_whole:
        return shard
    own = shard_labels(options, exchange, labels, width)
    whole = ShardOutputs(*merge_losses(options, exchange, own, shard[:4]))
    if shard.entropy is not None:
        distribution = _merge_distribution(exchange, width, own, whole.lse, shard)
        whole = ShardOutputs(*whole[:4], *distribution)
    if columns is not None and shard.picked is not None:
        whole = whole._replace(picked=merge_picked(exchange, width, columns, shard.picked))
    return whole


def merge_losses(
    options: Options, exchange: Exchange, labels: Labels, shard: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low [..] of the whole vocabulary.

    `shard` is loss, logps, lse and lse_low of a shard, with `shard_options` and `mark_empty`.
    """
    loss, logps, lse, lse_low = shard
    if exchange.is_whole:
        return loss, logps, lse, lse_low
    highest = exchange.max(lse)
    # lse_low of an lse that is not finite may be NaN.
    lse_low = jnp.where(jnp.isfinite(lse), lse_low, 0)
    less = (lse - exchange.spread(highest)) + lse_low
    # logps is NaN in a shard without logits, where z_y = -inf.
    at_label = jnp.where(lse == -jnp.inf, -jnp.inf, logps + less)
    sums = [jnp.exp(less), jnp.where(labels.here, at_label, 0)]
    if options.label_smoothing:
        # A logit of -inf makes the mean -inf, and the loss NaN if it is the label's logit.
        is_infinite = jnp.isnan(loss) & ~jnp.isnan(lse)
        sums.append(jnp.where(is_infinite, jnp.inf, loss - less))
    total, at_label, *mean = exchange.sum(*sums)
    more = jnp.log(total)
    lse, lse_low = two_sum(highest, more)
    logps = at_label - more
    loss = (1 - options.label_smoothing) * -logps
    if options.z_loss:
        loss += options.z_loss * lse**2
    for one in mean:
        loss += options.label_smoothing * (one / exchange.count + more)
    if not options.every_token:
        # Kernels do not read ignored tokens.
        lse, lse_low = (jnp.where(labels.ignored, 0, x) for x in (lse, lse_low))
    loss, logps = set_special(labels, loss, logps)
    return loss, logps, lse, lse_low


def _merge_distribution(
    exchange: Exchange, width: int, labels: Labels, lse: jax.Array, shard: ShardOutputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns entropy, highest and argmax [..] of the whole vocabulary with the given `lse`."""
    shard_lse, entropy, highest, argmax = shard.lse, shard.entropy, shard.highest, shard.argmax
    assert entropy is not None and highest is not None and argmax is not None
    less = shard_lse - exchange.spread(exchange.max(shard_lse))
    is_empty = shard_lse == -jnp.inf
    share = jnp.exp(less)
    total, weighted = exchange.sum(share, jnp.where(is_empty, 0, share * (less - entropy)))
    entropy = jnp.where(labels.ignored, 0, jnp.log(total) - weighted / total)
    highest = jnp.where(is_empty, -jnp.inf, highest)
    argmax = jnp.where(jnp.isnan(lse), -1, merge_argmax(exchange, width, highest, argmax))
    return entropy, jnp.where(jnp.isnan(lse), jnp.nan, exchange.max(highest)), argmax


def merge_argmax(
    exchange: Exchange, width: int, highest: jax.Array, argmax: jax.Array
) -> jax.Array:
    """Returns the first column [..] with the largest logit of all shards of `width` columns.

    `highest` is a shard's largest, and `argmax` its first column in the shard.
    """
    if exchange.is_whole:
        return argmax
    index = match_rank(exchange.index().astype(jnp.int32), argmax)
    has_largest = highest == exchange.spread(exchange.max(highest))
    first = -exchange.max(jnp.where(has_largest, -index, -exchange.count))
    found: jax.Array
    (found,) = exchange.sum(jnp.where(index == exchange.spread(first), argmax + index * width, 0))
    return found


def shard_cotangents(
    options: Options,
    exchange: Exchange,
    labels: Labels,
    lse: jax.Array,
    is_empty: Any,
    given: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a shard's cotangents of loss, logps and lse, from those of the whole vocabulary.

    With `shard_options` and the global `lse`, the backward kernel turns them into the shard's
    columns of dlogits. No small term is a difference of large ones. `is_empty` marks tokens whose
    logits in the shard are all -inf; their gradient there is 0.
    """
    if exchange.is_whole:
        g, h, k = given
        return g, h, k
    g, h, k = map(exchange.cotangent, given)
    smoothing, share = options.label_smoothing, options.label_smoothing / exchange.count
    slope = 2 * options.z_loss * lse if options.z_loss else 0.0
    # dz_v = a p_v + b [v = y] - g e / V: every shard needs a, and the label's shard b.
    at_label = h - (1 - smoothing) * g
    with_label = g * (slope + (smoothing - share)) + k if options.z_loss or smoothing else k
    without = g * (1 + slope - share) - h + k
    # A row that is NaN in the whole is NaN here, even if this shard's cotangents are 0.
    is_zero = (g == 0) & (h == 0) & (k == 0)
    is_nan = ~(is_zero | (labels.valid & jnp.isfinite(lse)))
    here, is_zero = labels.here, exchange.spread(is_zero) | is_empty
    spread = map(exchange.spread, (g * share, at_label, with_label, without, is_nan))
    g, at_label, with_label, without, is_nan = spread
    found = g, jnp.where(here, at_label, 0), jnp.where(here, with_label, without)
    g, h, k = (jnp.where(is_nan, jnp.nan, jnp.where(is_zero, 0, x)) for x in found)
    return g, h, k


def set_special(labels: Labels, *scalars: jax.Array) -> list[jax.Array]:
    """Returns scalars of tokens, with 0 for ignored tokens and NaN for labels out of range."""
    # A factor of NaN makes the derivative NaN as well.
    valid = jnp.where(labels.valid, 1, jnp.nan).astype(scalars[0].dtype)
    return [jnp.where(labels.ignored, 0, x * valid) for x in scalars]


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a + b and its rounding error (Knuth, 1969), 0 where the sum is not finite."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    return total, jnp.where(jnp.isfinite(total), lost, 0)
