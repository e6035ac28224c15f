"""Cross-entropy of a vocabulary in parts, a part a device: what parts exchange, for any operation.

A part is so many columns of every token's logits. The kernels take it for a vocabulary of its own
and give its lse; parts exchange a few numbers a token, of which the whole vocabulary's are made,
and the backward kernels take the whole's lse and cotangents that stand for a part
(crates/xentile/src/cross_entropy.rs, "A vocabulary in parts", has the formulas). Nothing of a
kernel is made for this, so that parts work wherever kernels do.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .arrays import of_rank, wide
from .compat import varying_axes
from .cross_entropy.options import Options, is_ignored

# What labels of a part say: a column of it, or one of these.
IGNORED, OUT_OF_RANGE = -1, -2


@dataclass(frozen=True)
class OverDevices:
    """Parts on devices, or on whatever `axes` name: arrays are those of one part."""

    axes: tuple[str, ...]
    # Whether JAX keeps track of what varies from device to device. Where it does not, it takes the
    # cotangent of a sum over devices for a device's share, and so does a rule of ours.
    is_checked: bool

    @staticmethod
    def of(axes: tuple[str, ...]) -> "OverDevices":
        """Returns the exchange over axes, which are bound where this is called."""
        index = jax.typeof(jax.lax.axis_index(axes))
        return OverDevices(axes, {*axes} <= varying_axes(index))

    @property
    def count(self) -> int:
        """How many parts there are."""
        return int(jax.lax.axis_size(self.axes))

    def index(self) -> jax.Array:
        """Returns the number of the part."""
        index: jax.Array = jax.lax.axis_index(self.axes)
        return index

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns a number a token as every part has it."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the largest of all parts', by which results are shifted: it has no derivative."""
        largest: jax.Array = jax.lax.pmax(jax.lax.stop_gradient(x), self.axes)
        return largest

    def sum(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums of all parts'."""
        sums: Sequence[jax.Array] = jax.lax.psum(arrays, self.axes)
        return sums

    def cotangent(self, x: jax.Array) -> jax.Array:
        """Returns the cotangent of a number that all parts have, of what each is given."""
        if self.is_checked:
            return x
        total: jax.Array = jax.lax.psum(x, self.axes)
        return total


@dataclass(frozen=True)
class OverAxis:
    """Parts along an axis of arrays, the last of tokens' axes, which XLA may cut over a mesh."""

    count: int

    def index(self) -> jax.Array:
        """Returns the numbers of the parts."""
        return jnp.arange(self.count, dtype=jnp.int32)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns a number a token as every part has it."""
        return x[..., None]

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the largest of all parts', likewise."""
        return jax.lax.stop_gradient(x).max(-1)

    def sum(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns the sums of all parts'."""
        return [x.sum(-1) for x in arrays]

    def cotangent(self, x: jax.Array) -> jax.Array:
        """Returns what it is given."""
        return x


Exchange = OverDevices | OverAxis


class Labels(NamedTuple):
    """What labels say to a part."""

    # A number a token and part: the column to predict, of this part; the first where another part
    # has it; or `IGNORED`, or `OUT_OF_RANGE` of the whole vocabulary.
    given: jax.Array
    # Whether this part has the column, likewise.
    here: jax.Array
    # A number a token: whether it is ignored, and whether its label is out of range.
    ignored: jax.Array
    wrong: jax.Array


def labels_of_part(options: Options, exchange: Exchange, labels: jax.Array, vocab: int) -> Labels:
    """Returns what labels [..] of the whole vocabulary say to a part of `vocab` columns."""
    ignored = is_ignored(options, labels)
    in_range = (labels >= 0) & ~ignored
    # Every label lies below an end that their type does not hold.
    if exchange.count * vocab <= jnp.iinfo(labels.dtype).max:
        in_range &= labels < exchange.count * vocab
    column = exchange.spread(jnp.where(in_range, labels, -1))
    first = of_rank(exchange.index().astype(labels.dtype) * vocab, column)
    column = jnp.where(column < 0, column, column - first)
    here = exchange.spread(in_range) & (column >= 0) & (column < vocab)
    given = jnp.where(here, column, jnp.where(exchange.spread(in_range), 0, OUT_OF_RANGE))
    given = jnp.where(exchange.spread(ignored), IGNORED, given)
    return Labels(given, here, ignored, ~in_range & ~ignored)


def options_of_part(options: Options) -> Options:
    """Returns the options of a part's kernels, with nothing that is the whole vocabulary's.

    With a smoothing of 1, loss is lse - mean(z), and a token's cotangent how much of 1/V it gets.
    """
    smoothing = 1.0 if options.label_smoothing else 0.0
    return dataclasses.replace(options, ignore_index=IGNORED, label_smoothing=smoothing, z_loss=0.0)


def without_logits(lse: jax.Array, highest: Callable[[], jax.Array]) -> jax.Array:
    """Returns lse with -inf for the NaN of a part whose logits are all masked.

    Kernels tell such a row from one that has a NaN no more than a whole vocabulary need. `highest`
    makes the largest logit of each row, which is looked at only where some lse is NaN.
    """
    nan = jnp.isnan(lse)
    found: jax.Array = jax.lax.cond(
        nan.any(), lambda: jnp.where(nan & (highest() == -jnp.inf), -jnp.inf, lse), lambda: lse
    )
    return found


def merge(
    options: Options, exchange: Exchange, labels: Labels, part: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low [..] of the whole vocabulary.

    `part` is loss, logps, lse and lse_low of a part, by `options_of_part` and `without_logits`.
    """
    loss, logps, lse, lse_low = part
    highest = exchange.max(lse)
    # What rounding lost of an lse that is not finite is nothing, or NaN.
    lse_low = jnp.where(jnp.isfinite(lse), lse_low, 0)
    less = (lse - exchange.spread(highest)) + lse_low
    # logps is NaN in a part without logits, where z_y = -inf.
    at_label = jnp.where(lse == -jnp.inf, -jnp.inf, logps + less)
    sums = [jnp.exp(less), jnp.where(labels.here, at_label, 0)]
    if options.label_smoothing:
        # The mean is -inf where a logit is, and loss NaN where it is the label's or there is none.
        is_infinite = jnp.isnan(loss) & ~jnp.isnan(lse)
        sums.append(jnp.where(is_infinite, jnp.inf, loss - less))
    total, at_label, *of_mean = exchange.sum(*sums)
    more = jnp.log(total)
    lse, lse_low = _two_sum(highest, more)
    logps = at_label - more
    loss = (1 - options.label_smoothing) * -logps
    if options.z_loss:
        loss += options.z_loss * lse**2
    for one in of_mean:
        loss += options.label_smoothing * (one / exchange.count + more)
    if not options.every_token:
        # Nothing was read of them.
        lse, lse_low = (jnp.where(labels.ignored, 0, x) for x in (lse, lse_low))
    loss, logps = (_special(labels, x) for x in (loss, logps))
    return loss, logps, lse, lse_low


def merge_entropy(exchange: Exchange, lse: jax.Array, entropy: jax.Array) -> jax.Array:
    """Returns the entropy [..] of the whole vocabulary, of each part's lse and entropy.

    lse is that of `without_logits`.
    """
    less = lse - exchange.spread(exchange.max(lse))
    is_empty = lse == -jnp.inf
    share = jnp.exp(less)
    total, weighted = exchange.sum(share, jnp.where(is_empty, 0, share * (less - entropy)))
    merged: jax.Array = jnp.log(total) - weighted / total
    return merged


def argmax(exchange: Exchange, width: int, highest: jax.Array, argmax: jax.Array) -> jax.Array:
    """Returns the first column [..] with the whole's largest logit, of parts of `width` columns.

    `highest` is a part's largest, and `argmax` its first column in the part.
    """
    index = of_rank(exchange.index().astype(jnp.int32), argmax)
    has_largest = highest == exchange.spread(exchange.max(highest))
    first = -exchange.max(jnp.where(has_largest, -index, -exchange.count))
    found: jax.Array
    (found,) = exchange.sum(jnp.where(index == exchange.spread(first), argmax + index * width, 0))
    return found


def cotangents(
    options: Options,
    exchange: Exchange,
    labels: Labels,
    lse: jax.Array,
    is_empty: jax.Array,
    given: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a part's cotangents for those of loss, logps and lse [..] of the whole vocabulary.

    With `options_of_part` and the whole's `lse`, the backward kernel then gives the part's columns
    of the whole's dlogits. No term that is small beside others is their difference. `is_empty` says
    in which parts a token has no logits but -inf, whose gradient is 0.
    """
    g, h, k = map(exchange.cotangent, given)
    smoothing, share = options.label_smoothing, options.label_smoothing / exchange.count
    slope = 2 * options.z_loss * lse if options.z_loss else 0.0
    # Of the whole's dz_v = a p_v + b [v = y] - g e / V, a part has a and, with the label, b.
    at_label = h - (1 - smoothing) * g
    with_label = g * (slope + (smoothing - share)) + k if options.z_loss or smoothing else k
    without = g * (1 + slope - share) - h + k
    # What makes a whole row NaN does so where this part's cotangents come to 0, too.
    idle = (g == 0) & (h == 0) & (k == 0)
    is_nan = ~idle & (labels.wrong | ~jnp.isfinite(lse))
    here, idle = labels.here, exchange.spread(idle) | is_empty
    spread = map(exchange.spread, (g * share, at_label, with_label, without, is_nan))
    g, at_label, with_label, without, is_nan = spread
    found = g, jnp.where(here, at_label, 0), jnp.where(here, with_label, without)
    g, h, k = (jnp.where(is_nan, jnp.nan, jnp.where(idle, 0, x)) for x in found)
    return g, h, k


def dense(
    options: Options, exchange: Exchange, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse [..] of a part's logits [.., V / parts], in plain JAX.

    It is what forward mode of kernels' results is made of, all but special tokens.
    """
    vocab = logits.shape[-1]
    of = labels_of_part(options, exchange, labels, vocab)
    frozen = exchange.spread(of.ignored)[..., None]
    logits = jnp.where(frozen, jax.lax.stop_gradient(logits), logits)
    z = options.mapped(wide(logits))
    highest = exchange.max(jax.lax.stop_gradient(z).max(-1))
    # A masked entry has no gradient, not even as the label.
    z = jnp.where((z == -jnp.inf) & exchange.spread(highest > -jnp.inf)[..., None], -jnp.inf, z)
    column = jnp.where(of.here, of.given, 0)[..., None].astype(jnp.int32)
    at_label = jnp.take_along_axis(z, column, axis=-1)[..., 0]
    total = jnp.exp(z - exchange.spread(highest)[..., None]).sum(-1)
    sums = [total, jnp.where(of.here, at_label, 0)]
    if options.label_smoothing:
        sums.append(z.mean(-1))
    total, at_label, *of_mean = exchange.sum(*sums)
    lse = jnp.log(total) + highest
    logps = at_label - lse
    loss = (1 - options.label_smoothing) * -logps + options.z_loss * lse**2
    for one in of_mean:
        loss += options.label_smoothing * (lse - one / exchange.count)
    return _special(of, loss), _special(of, logps), lse


def _special(labels: Labels, x: jax.Array) -> jax.Array:
    """Returns a number a token, with 0 for those ignored and NaN for labels out of range."""
    # As a factor, so that the derivative is NaN as well.
    valid = jnp.where(labels.wrong, jnp.nan, 1).astype(x.dtype)
    return jnp.where(labels.ignored, 0, x * valid)


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a + b and what rounding it lost (Knuth, 1969); 0 for what is not finite."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    return total, jnp.where(jnp.isfinite(total), lost, 0)
