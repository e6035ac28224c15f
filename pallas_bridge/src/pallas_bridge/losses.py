"""Preference losses over log-probabilities of tokens: DPO, KTO, ORPO, GRPO and PPO's policy loss.

    from pallas_bridge import linear_cross_entropy_per_token
    from pallas_bridge.losses import dpo_loss

    _, logps = linear_cross_entropy_per_token(hidden, weight, labels)  # [B, T]

They take the log-probabilities of `linear_cross_entropy_per_token`, which has no logits in memory,
or of `cross_entropy_per_token`. A token of the prompt or of padding has the label -100, and so a
log-probability of 0. For samples drawn at a temperature pass `temperature` there, for PPO's entropy
bonus `return_entropy`, and with a sharded vocabulary `axis_name`: the losses see no vocabulary.

`linear_kl_divergence` distils a teacher, from hidden states and heads.

Every loss is a scalar to be minimised, in the dtype of `logps`, in plain JAX. Gradients go through
the policy's log-probabilities alone: those of the reference and of the sampler, and advantages, are
constants. Arrays [B, T] may have more axes in the place of B. Options are Python numbers or traced
scalars, but for `clip`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._src.arrays import wide
from ._src.checks import as_array, check_number, is_traced
from ._src.distillation import linear_kl_divergence
from ._src.keywords import hinted
from ._src.losses.traced import check_scalar

__all__ = [
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "kto_kl",
    "kto_loss",
    "linear_kl_divergence",
    "orpo_loss",
    "ppo_policy_loss",
]

Array = jax.Array

# Beyond it exponentials go on along their tangent: the square of exp(40) is a float32 still, as the
# second moments of an optimizer are.
LARGEST_EXPONENT = 40.0
# log(1 - p) is finite, and p is 1 to float32.
LARGEST_LOG_PROBABILITY = -(2.0**-24)


@hinted
def dpo_loss(
    chosen: ArrayLike,
    rejected: ArrayLike,
    ref_chosen: ArrayLike,
    ref_rejected: ArrayLike,
    *,
    beta: float = 0.1,
) -> Array:
    """Direct preference optimization (Rafailov et al., 2023, equation 7).

    -log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))) of log-probabilities
    summed over tokens, the mean over pairs.

    Args:
      chosen: [B, T], the policy's log-probabilities of the preferred responses; 0 where ignored.
      rejected: [B, T'], of the others, likewise.
      ref_chosen: [B, T], the reference's.
      ref_rejected: [B, T'], likewise.
      beta: The strength of the constraint to the reference.

    Raises:
      TypeError: a dtype that is not taken, or a coefficient that is no number.
      ValueError: shapes that disagree.
    """
    chosen, ref_chosen = _per_token(chosen=chosen, ref_chosen=ref_chosen)
    rejected, ref_rejected = _per_token(rejected=rejected, ref_rejected=ref_rejected)
    _check_responses("rejected", rejected.shape[:-1], chosen)
    margin = _log_ratios(chosen, ref_chosen) - _log_ratios(rejected, ref_rejected)
    return -jax.nn.log_sigmoid(_coefficient("beta", beta) * margin).mean()


@hinted
def kto_loss(
    logps: ArrayLike,
    ref_logps: ArrayLike,
    desirable: ArrayLike,
    kl: ArrayLike,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Array:
    """Kahneman-Tversky optimization (Ethayarajh et al., 2024, section 4.1).

    w - w * sigmoid(s * beta * (r - kl)) with r the log-ratio of a response, s = 1 and
    w = desirable_weight where it is desirable, s = -1 and w = undesirable_weight where it is not;
    the mean over responses.

    Args:
      logps: [B, T], the policy's; 0 where ignored.
      ref_logps: [B, T], the reference's, likewise.
      desirable: [B], of booleans.
      kl: The reference point, a scalar: `kto_kl`.
      beta: The strength of the constraint to the reference.
      desirable_weight: lambda_D.
      undesirable_weight: lambda_U.

    Raises:
      TypeError: a dtype that is not taken, or a coefficient that is no number.
      ValueError: shapes that disagree.
    """
    logps, ref_logps = _per_token(logps=logps, ref_logps=ref_logps)
    kl = _real("kl", kl, "of no axes").astype(logps.dtype)
    desirable = as_array("desirable", desirable, "[B], of booleans").astype(bool)
    _check_responses("desirable", desirable.shape, logps)
    if kl.ndim:
        raise ValueError(f"kl has shape {kl.shape}; it must be a scalar, as of kto_kl")
    gain = _coefficient("beta", beta) * (_log_ratios(logps, ref_logps) - jax.lax.stop_gradient(kl))
    # 1 - sigmoid(x) is sigmoid(-x), without its cancellation.
    desired = _coefficient("desirable_weight", desirable_weight) * jax.nn.sigmoid(-gain)
    factor = _coefficient("undesirable_weight", undesirable_weight)
    return jnp.where(desirable, desired, factor * jax.nn.sigmoid(gain)).mean()


@hinted
def kto_kl(logps: ArrayLike, ref_logps: ArrayLike) -> Array:
    """The reference point of KTO: max(0, mean log-ratio) of mismatched responses.

    Both are [B, T], 0 where ignored, of each prompt with the response to another, as the next of
    the batch (Ethayarajh et al., 2024, section 4.1). The loss takes it for a constant: give it
    `jax.lax.stop_gradient(params)`, and nothing is kept for a backward pass.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree.
    """
    logps, ref_logps = _per_token(logps=logps, ref_logps=ref_logps)
    mean = _log_ratios(logps, ref_logps).mean()
    return jnp.where(mean < 0, 0.0, mean)


@hinted
def orpo_loss(
    chosen: ArrayLike,
    rejected: ArrayLike,
    chosen_mask: ArrayLike,
    rejected_mask: ArrayLike,
    *,
    weight: float = 0.1,
) -> Array:
    """Odds ratio preference optimization, which has no reference (Hong et al., 2024, equation 6).

    -c - weight * log sigmoid(log_odds(c) - log_odds(r)), with c and r the mean log-probabilities
    of a token of the chosen and rejected response; the mean over pairs.

    Args:
      chosen: [B, T], the policy's log-probabilities of the preferred responses.
      rejected: [B, T'], of the others.
      chosen_mask: [B, T], of booleans: the tokens of the responses.
      rejected_mask: [B, T'], likewise.
      weight: lambda, of the odds ratio.

    Raises:
      TypeError: a dtype that is not taken, or a coefficient that is no number.
      ValueError: shapes that disagree.
    """
    chosen, chosen_mask = _per_token(chosen=chosen, chosen_mask=chosen_mask)
    rejected, rejected_mask = _per_token(rejected=rejected, rejected_mask=rejected_mask)
    _check_responses("rejected", rejected.shape[:-1], chosen)
    c, r = _mean_of(chosen, chosen_mask, -1), _mean_of(rejected, rejected_mask, -1)
    ratio = _coefficient("weight", weight) * jax.nn.log_sigmoid(_log_odds(c) - _log_odds(r))
    loss: Array = -(c + ratio).mean()
    return loss


@hinted
def grpo_loss(
    logps: ArrayLike,
    old_logps: ArrayLike,
    ref_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float = 0.2,
    beta: float = 0.04,
) -> Array:
    """Group relative policy optimization (DeepSeekMath: Shao et al., 2024, equations 3 and 4).

    -surrogate + beta * (exp(d) - d - 1) with d = ref_logps - logps, which estimates the KL
    divergence from the reference; the mean over a response's tokens, then over responses.

    Args:
      logps: [B, T], the policy's; B is groups times responses of each.
      old_logps: [B, T], those that the responses were drawn with; in a step of its own samples
          `logps` themselves.
      ref_logps: [B, T], the reference's.
      advantages: [B]: `group_advantages`.
      mask: [B, T], of booleans: the tokens of the responses.
      clip: epsilon, of the ratio, in [0, 1).
      beta: The weight of the divergence.

    Raises:
      TypeError: a dtype that is not taken, or a coefficient that is no number.
      ValueError: shapes that disagree, or a clip outside its range.
    """
    logps, old_logps, ref_logps, mask = _per_token(
        logps=logps, old_logps=old_logps, ref_logps=ref_logps, mask=mask
    )
    advantages = _real("advantages", advantages, "[B]").astype(logps.dtype)
    _check_responses("advantages", advantages.shape, logps)
    surrogate = _clipped_surrogate(logps, old_logps, advantages[..., None], mask, clip)
    d = jnp.where(mask, jax.lax.stop_gradient(ref_logps) - logps, 0.0)
    losses = _coefficient("beta", beta) * (_bounded(jnp.expm1, d) - d) - surrogate
    return _mean_of(losses, mask, -1).mean()


@hinted
def group_advantages(rewards: ArrayLike) -> Array:
    """(r - mean) / std over each group's responses: [groups, responses] to [B], of its shape.

    Shao et al., 2024, section 4.1.2, with the population's standard deviation. Where a group's
    rewards are equal they say nothing, and advantages are 0.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: rewards of another shape.
    """
    rewards = _real("rewards", rewards, "[groups, responses]")
    if rewards.ndim != 2:
        raise ValueError(f"rewards has shape {rewards.shape}; it must be [groups, responses]")
    centred = rewards - rewards.mean(-1, keepdims=True)
    std = jnp.sqrt((centred**2).mean(-1, keepdims=True))
    same = (rewards == rewards[:, :1]).all(-1, keepdims=True)
    return jnp.where(same, 0.0, centred / jnp.where(same, 1.0, std)).reshape(-1)


@hinted
def ppo_policy_loss(
    logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float = 0.2,
    entropies: ArrayLike | None = None,
    entropy_weight: float = 0.01,
) -> Array:
    """The clipped policy loss of PPO, with its entropy bonus (Schulman et al., 2017, eq. 7 and 9).

    -surrogate - entropy_weight * entropy, the mean over all tokens that count; equation 9 without
    the term of the value function, which is another model's.

    Args:
      logps: [B, T], the policy's.
      old_logps: [B, T], those that the responses were drawn with.
      advantages: [B, T], of each token.
      mask: [B, T], of booleans: the tokens of the responses.
      clip: epsilon, of the ratio, in [0, 1).
      entropies: [B, T], of the policy's distributions; None for no bonus. Gradients go through
          them too.
      entropy_weight: c_2, the weight of the bonus.

    Raises:
      TypeError: a dtype that is not taken, or a coefficient that is no number.
      ValueError: shapes that disagree, or a clip outside its range.
    """
    logps, old_logps, advantages, mask = _per_token(
        logps=logps, old_logps=old_logps, advantages=advantages, mask=mask
    )
    gains = _clipped_surrogate(logps, old_logps, advantages, mask, clip)
    if entropies is not None:
        _, entropies = _per_token(logps=logps, entropies=entropies)
        gains = gains + _coefficient("entropy_weight", entropy_weight) * entropies
    return -_mean_of(gains, mask, None)


def _per_token(**arrays: ArrayLike) -> list[Array]:
    """Returns arrays of one shape, [.., T]; masks are booleans, the others of the first's dtype.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes that disagree.
    """
    makes = {name: as_array if "mask" in name else _real for name in arrays}
    found = [makes[name](name, array, "[B, T]") for name, array in arrays.items()]
    (first, *_), shape = arrays, found[0].shape
    for name, array in zip(arrays, found, strict=True):
        if array.ndim == 0 or array.shape != shape:
            right = "[B, T]" if array is found[0] else f"that of {first}, {shape}"
            raise ValueError(f"{name} has shape {array.shape}; it must be {right}")
    return [
        array.astype(bool if "mask" in name else found[0].dtype)
        for name, array in zip(arrays, found, strict=True)
    ]


def _real(name: str, value: ArrayLike, right: str) -> Array:
    """Returns an array in float32 or wider, so that no sum is rounded to 16 bits.

    Raises:
        TypeError: no array, or one of complex numbers or float8.
    """
    array = as_array(name, value, right)
    is_float8 = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1
    if is_float8 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or float32")
    return wide(array)


def _coefficient(name: str, value: Any) -> Any:
    """Returns a number, or a traced scalar of floats.

    Raises:
        TypeError: another value.
    """
    check_scalar(name, value)
    return value if is_traced(value) else check_number(name, value)


def _check_responses(name: str, shape: tuple[int, ...], logps: Array) -> None:
    """Checks that `name` has responses in the shape of those of log-probabilities [.., T].

    Raises:
        ValueError: it has not.
    """
    if shape != logps.shape[:-1]:
        raise ValueError(
            f"{name} has responses of shape {shape}; it must have as many as the others, "
            f"{logps.shape[:-1]}"
        )


def _clipped_surrogate(
    logps: Array, old_logps: Array, advantages: Array, mask: Array, clip: float
) -> Array:
    """Returns min(r * A, clip(r, 1 - clip, 1 + clip) * A) [B, T], with r = exp(logps - old_logps).

    Clipped before the exponential, as a ratio that overflows has a gradient of NaN where it is
    clipped afterwards.
    """
    number = check_number("clip", clip)
    if not 0 <= number < 1:
        raise ValueError(f"clip is {number}; it must be at least 0 and below 1")
    a = jax.lax.stop_gradient(advantages)
    d = jnp.where(mask, logps - jax.lax.stop_gradient(old_logps), 0.0)
    # Not by maxima, which lose NaN in XLA's programs for CPUs.
    most, least = math.log1p(number), math.log1p(-number)
    is_clipped = jnp.where(a >= 0, d > most, d < least)
    d = jnp.where(is_clipped, jnp.where(a >= 0, most, least), d)
    return a * _bounded(jnp.exp, d)


def _log_ratios(logps: Array, ref_logps: Array) -> Array:
    """Sums of the differences over tokens, [B, T] to [B]; the reference is a constant."""
    return (logps - jax.lax.stop_gradient(ref_logps)).sum(-1)


def _log_odds(logp: Array) -> Array:
    """log(p / (1 - p)) of log p, finite where p rounds to 1."""
    logp = jnp.where(logp > LARGEST_LOG_PROBABILITY, LARGEST_LOG_PROBABILITY, logp)
    return logp - jnp.log(-jnp.expm1(logp))


def _bounded(f: Callable[[Array], Array], x: Array) -> Array:
    """Exp or expm1 of x; beyond `LARGEST_EXPONENT` their tangent, which is finite and as steep."""
    is_over = x > LARGEST_EXPONENT
    over = jnp.where(is_over, x - LARGEST_EXPONENT, 0.0)
    return f(jnp.where(is_over, LARGEST_EXPONENT, x)) + math.exp(LARGEST_EXPONENT) * over


def _mean_of(x: Array, mask: Array, axis: int | None) -> Array:
    """The mean over an axis, or all, of what the mask has; 0 where that is nothing."""
    return jnp.where(mask, x, 0.0).sum(axis) / jnp.maximum(mask.sum(axis), 1).astype(x.dtype)
