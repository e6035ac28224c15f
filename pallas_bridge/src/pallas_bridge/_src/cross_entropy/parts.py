"""Cross-entropy over logits of a vocabulary in parts, by the kernels for whole ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import linear, meshes, vocab_parts
from ..custom_call import bind
from ..meshes import Names
from ..vocab_parts import Exchange, OverAxis, OverDevices, labels_of_part, options_of_part
from .calls import backward_call, forward_call
from .options import Options
from .reduction import weighted

Outputs = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Parts:
    """The functions of an implementation, for logits whose vocabulary is cut over devices."""

    run: Callable[[Options, jax.Array, jax.Array], Outputs]
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


def find(logits: jax.Array, axis_name: Any) -> Parts | None:
    """Returns what runs over the mesh axes that cut the vocabulary; None where none is known to.

    Raises:
        TypeError: `axis_name` is no name.
        ValueError: a name of nothing, or parts of more than one size.
    """
    names = meshes.names_of(axis_name)
    if meshes.are_of_devices(names):
        return Parts(lambda *given: per_token(given[0], OverDevices.of(names), *given[1:]))
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
        run = partial(_over_explicit, mesh, tokens, last)
        return Parts(run, partial(meshes.place, mesh, tokens))
    count = meshes.check_divides(mesh, names, "logits", logits.shape[-1])
    return Parts(partial(_over_axis, mesh, names, count))


def _over_axis(
    mesh: Any, names: Names, count: int, options: Options, logits: jax.Array, labels: jax.Array
) -> Outputs:
    """Has XLA cut logits over a mesh, after the axis of the vocabulary has become two."""
    *tokens, vocab = logits.shape
    parts = logits.reshape(*tokens, count, vocab // count)
    leading = [PartitionSpec.UNCONSTRAINED] * (logits.ndim - 1)
    spec = PartitionSpec(*leading, meshes.entry(names), None)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))
    return per_token(options, OverAxis(count), parts, labels)


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


def _forward(options: Options, exchange: Exchange, logits: jax.Array, labels: jax.Array) -> Any:
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
    loss, logps, lse, *_ = _forward(options, exchange, logits, labels)
    return loss, logps, lse


@partial(_per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(
    options: Options, exchange: Exchange, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    loss, logps, lse, lse_low, is_empty = _forward(options, exchange, *primals)
    residuals = *primals, lse, lse_low, is_empty
    apply, transpose = (partial(f, options, exchange) for f in (_tangents, _pull))
    of_logits, _ = map(linear.given, tangents)
    results = loss, logps, lse
    return results, tuple(linear.bind(apply, transpose, residuals, [of_logits], results))


def _tangents(options: Options, exchange: Exchange, residuals: Any, tangents: Any) -> Any:
    logits, labels, *_ = residuals
    dense = partial(vocab_parts.dense, options, exchange)
    return linear.tangents_of(dense, (logits, labels), (*tangents, None))


def _pull(
    options: Options, exchange: Exchange, residuals: Any, cotangents: Any
) -> tuple[jax.Array]:
    logits, labels, lse, lse_low, is_empty = residuals
    of = labels_of_part(options, exchange, labels, logits.shape[-1])
    given = [jnp.zeros_like(lse) if one is None else one for one in cotangents]
    of_part = vocab_parts.cotangents(options, exchange, of, lse, is_empty, given)
    saved = (jnp.broadcast_to(exchange.spread(x), of.given.shape) for x in (lse, lse_low))
    call = backward_call(options_of_part(options))
    (dlogits,) = bind(call, logits, of.given, *saved, *of_part)
    return (dlogits,)
