"""Loss options that are traced scalars; kernels take options as attributes, fixed at compile time.

The loss is affine in label smoothing and z-loss. With A = -logps = lse - z_y and B = lse - mean(z),
the kernels' loss for label smoothing 1 and no z-loss,

    loss = (1 - label_smoothing) * A + label_smoothing * B + z_loss * lse^2

which JAX differentiates; kernels take the cotangents of logps, loss and lse in one pass over the
logits. XLA applies a traced softcap or temperature to the logits (`map_logits`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import wide
from ..checks import as_array, check_dtype, is_traced
from .aux_outputs import TokenOutputs
from .options import Options, check_options, is_ignored
from .reduction import countable


def check_scalar(name: str, value: Any) -> None:
    """Checks an option that may be traced.

    Raises:
        TypeError: a traced array that is no scalar.
    """
    if is_traced(value) and (value.ndim or not jnp.issubdtype(value.dtype, jnp.floating)):
        raise TypeError(
            f"{name} is traced, of shape {value.shape} and dtype {value.dtype}; it must be a "
            "scalar of a float dtype"
        )


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The coefficients of a loss, each a number or a traced scalar."""

    label_smoothing: Any
    z_loss: Any

    def __post_init__(self) -> None:
        """Checks the shapes.

        Raises:
            TypeError: a traced array that is no scalar.
        """
        for name, value in vars(self).items():
            check_scalar(name, value)

    @property
    def any_traced(self) -> bool:
        """Whether the loss is a combination of outputs."""
        return is_traced(self.label_smoothing) or is_traced(self.z_loss)

    @property
    def known(self) -> dict[str, Any]:
        """The coefficients that can be checked now, with 0 for the others."""
        # `dataclasses.asdict` would copy arrays, and a copy within `jit` is traced.
        return {name: 0.0 if is_traced(value) else value for name, value in vars(self).items()}

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the outputs that `loss` reads (`TokenOutputs`)."""
        return (0, 1, 2) if self.any_traced else (0,)

    def for_kernels(self, options: Options) -> Options:
        """Returns the options that kernels take, of options checked with `known`."""
        if not self.any_traced:
            return options
        smoothing = 1.0 if is_traced(self.label_smoothing) else options.label_smoothing
        return dataclasses.replace(options, label_smoothing=smoothing, z_loss=0.0)

    def loss(
        self,
        options: Options,
        labels: jax.Array,
        outputs: TokenOutputs,
        factors: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the loss [..] of tokens, from kernel outputs for the options of `for_kernels`.

        `factors` [..] are what losses are multiplied by. Tokens of factor 0 whose outputs are not
        finite count as 0 (`countable`), so that their gradient is 0.
        """
        if not self.any_traced:
            return outputs.loss
        loss, negative_logps = outputs.loss, -outputs.logps
        if factors is not None:
            loss, negative_logps = (countable(one, factors) for one in (loss, negative_logps))
        if is_traced(self.label_smoothing):
            share = self.label_smoothing.astype(jnp.float32)
            # Where logits are masked by -inf, their mean is -inf, which a share of 0 leaves out.
            smooth = jnp.where(share == 0, 0, loss)
            loss = (1 - share) * negative_logps + share * smooth
        # Within `jax.jit` arrays that are known compare as traced ones.
        if not is_traced(self.z_loss) and float(self.z_loss) == 0:
            return loss
        # A loss that is not finite has the gradient that it has without z-loss.
        counts = jnp.isfinite(outputs.lse) & ~is_ignored(options, labels)
        square = jnp.where(counts, outputs.lse, 0) ** 2
        return loss + jnp.asarray(self.z_loss, jnp.float32) * square


def check_with_mapping(
    softcap: Any, temperature: Any, **others: Any
) -> tuple[Options, tuple[Any, Any] | None]:
    """Returns the checked options, and softcap and temperature where either is traced.

    The options then have neither.

    Raises:
        TypeError: a traced array that is no scalar.
    """
    given = {"softcap": softcap, "temperature": temperature}
    for name, value in given.items():
        check_scalar(name, value)
    plain: Any = {"softcap": None, "temperature": 1.0}
    known: Any = {name: plain[name] if is_traced(value) else value for name, value in given.items()}
    options = check_options(**known, **others)
    if not any(map(is_traced, given.values())):
        return options, None
    # An integer would have a tangent of float0.
    cap, divisor = (one if one is None or is_traced(one) else float(one) for one in given.values())
    return dataclasses.replace(options, **plain), (cap, divisor)


@jax.custom_jvp
def map_logits(logits: jax.Array, softcap: Any, temperature: Any) -> jax.Array:
    """Returns logits [..], in f32 or wider, after softcap, unless it is None, and temperature.

    A cotangent of 0 has gradients of 0, whatever the logit.
    """
    z = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    mapped: jax.Array = z / temperature
    return mapped


@map_logits.defjvp
def _map_logits_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (logits, softcap, temperature), (dlogits, dsoftcap, dtemperature) = primals, tangents
    mapped = map_logits(*primals)
    slope = 1 / temperature
    tangent = jnp.where(jnp.isfinite(mapped), -mapped / temperature, 0) * dtemperature
    if softcap is not None:
        x = logits / softcap
        y = jnp.tanh(x)
        # 0 times a slope that is NaN would be NaN; infinities are at the cap.
        inner = jnp.where(jnp.isnan(x), 0, 1 - y * y)
        outer = jnp.where(jnp.isfinite(x), y - x * inner, jnp.where(jnp.isnan(x), 0, y))
        tangent += outer * slope * dsoftcap
        slope *= inner
    return mapped, tangent + slope * dlogits


def divided(hidden: Any, bias: Any, temperature: jax.Array) -> Any:
    """Returns hidden and bias divided by a traced temperature.

    Raises:
        TypeError: a temperature that is no scalar.
    """
    check_scalar("temperature", temperature)
    hidden = as_array("hidden", hidden, "[.., D]")
    check_dtype("hidden", hidden)
    divisor = temperature.astype(jnp.float32)
    scaled = map_logits(hidden.astype(jnp.float32), None, divisor).astype(hidden.dtype)
    if bias is not None:
        bias = map_logits(wide(as_array("bias", bias, "[V]")), None, divisor)
    return scaled, bias
