"""Preference losses over log-probabilities of tokens: DPO, KTO, ORPO, GRPO and PPO's policy loss.

They take what `pallas_bridge.cross_entropy_per_token` gives of logits, or of hidden states and the
output matrix, without logits in memory:

    _, logps = pallas_bridge.linear_cross_entropy_per_token(hidden, weight, labels)  # [B, T]

where a token of the prompt or of padding has the label -100, and so a log-probability of 0. For
samples that were drawn at a temperature say `temperature` there, for PPO's entropy bonus
`return_entropy`, and with a vocabulary that is sharded over devices `axis_name`: nothing here sees
the vocabulary.

Every loss is a scalar to be minimised, in the dtype of `logps`. Gradients go through `logps`, the
policy's, alone: those of the reference, those that samples were drawn with, and advantages are
constants.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

# Beyond it exponentials go on along their tangent: the square of exp(40) is a float32 still, as the
# second moments of an optimizer are.
LARGEST_EXPONENT = 40.0
# log(1 - p) is finite, and p is 1 to float32.
LARGEST_LOG_PROBABILITY = -(2.0**-24)


def dpo_loss(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, *, beta: float = 0.1
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
    """
    margin = log_ratios(chosen, ref_chosen) - log_ratios(rejected, ref_rejected)
    return -jax.nn.log_sigmoid(beta * margin).mean()


def kto_loss(
    logps: Array,
    ref_logps: Array,
    desirable: Array,
    kl: Array,
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
    """
    gain = beta * (log_ratios(logps, ref_logps) - jax.lax.stop_gradient(kl))
    # 1 - sigmoid(x) is sigmoid(-x), without its cancellation.
    desired = desirable_weight * jax.nn.sigmoid(-gain)
    return jnp.where(desirable, desired, undesirable_weight * jax.nn.sigmoid(gain)).mean()


def kto_kl(logps: Array, ref_logps: Array) -> Array:
    """The reference point of KTO: max(0, mean log-ratio) of mismatched responses.

    Both are [B, T], 0 where ignored, of each prompt with the response to another, as the next of
    the batch (Ethayarajh et al., 2024, section 4.1). The loss takes it for a constant: give it
    `jax.lax.stop_gradient(params)`, and nothing is kept for a backward pass.
    """
    return jnp.maximum(log_ratios(logps, ref_logps).mean(), 0.0)


def orpo_loss(
    chosen: Array,
    rejected: Array,
    chosen_mask: Array,
    rejected_mask: Array,
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
    """
    c, r = mean_of(chosen, chosen_mask, -1), mean_of(rejected, rejected_mask, -1)
    return -(c + weight * jax.nn.log_sigmoid(log_odds(c) - log_odds(r))).mean()


def grpo_loss(
    logps: Array,
    old_logps: Array,
    ref_logps: Array,
    advantages: Array,
    mask: Array,
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
        clip: epsilon, of the ratio.
        beta: The weight of the divergence.
    """
    surrogate = clipped_surrogate(logps, old_logps, advantages[:, None], mask, clip)
    d = jnp.where(mask, jax.lax.stop_gradient(ref_logps) - logps, 0.0)
    losses = beta * (bounded(jnp.expm1, d) - d) - surrogate
    return mean_of(losses, mask, -1).mean()


def group_advantages(rewards: Array) -> Array:
    """(r - mean) / std over each group's responses: [groups, responses] to [B], of its shape.

    Shao et al., 2024, section 4.1.2, with the population's standard deviation. Where a group's
    rewards are equal they say nothing, and advantages are 0.
    """
    centred = rewards - rewards.mean(-1, keepdims=True)
    std = jnp.sqrt((centred**2).mean(-1, keepdims=True))
    same = (rewards == rewards[:, :1]).all(-1, keepdims=True)
    return jnp.where(same, 0.0, centred / jnp.where(same, 1.0, std)).reshape(-1)


def ppo_policy_loss(
    logps: Array,
    old_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    clip: float = 0.2,
    entropies: Array | None = None,
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
        clip: epsilon, of the ratio.
        entropies: [B, T], of the policy's distributions; None for no bonus. Gradients go through
            them too.
        entropy_weight: c_2, the weight of the bonus.
    """
    gains = clipped_surrogate(logps, old_logps, advantages, mask, clip)
    if entropies is not None:
        gains = gains + entropy_weight * entropies
    return -mean_of(gains, mask, None)


def clipped_surrogate(
    logps: Array, old_logps: Array, advantages: Array, mask: Array, clip: float
) -> Array:
    """min(r * A, clip(r, 1 - clip, 1 + clip) * A) of tokens, r = exp(logps - old_logps): [B, T].

    Clipped before the exponential, as a ratio that overflows has a gradient of NaN where it is
    clipped afterwards.
    """
    a = jax.lax.stop_gradient(advantages)
    d = jnp.where(mask, logps - jax.lax.stop_gradient(old_logps), 0.0)
    d = jnp.where(a >= 0, jnp.minimum(d, math.log1p(clip)), jnp.maximum(d, math.log1p(-clip)))
    return a * bounded(jnp.exp, d)


def log_ratios(logps: Array, ref_logps: Array) -> Array:
    """Sums of the differences over tokens, [B, T] to [B]; the reference is a constant."""
    return (logps - jax.lax.stop_gradient(ref_logps)).sum(-1)


def log_odds(logp: Array) -> Array:
    """log(p / (1 - p)) of log p, finite where p rounds to 1."""
    logp = jnp.minimum(logp, LARGEST_LOG_PROBABILITY)
    return logp - jnp.log(-jnp.expm1(logp))


def bounded(f: Callable[[Array], Array], x: Array) -> Array:
    """Exp or expm1 of x; beyond `LARGEST_EXPONENT` their tangent, which is finite and as steep."""
    over = jnp.maximum(x - LARGEST_EXPONENT, 0.0)
    return f(jnp.minimum(x, LARGEST_EXPONENT)) + math.exp(LARGEST_EXPONENT) * over


def mean_of(x: Array, mask: Array, axis: int | None) -> Array:
    """The mean over an axis, or all, of what the mask has; 0 where that is nothing."""
    return jnp.where(mask, x, 0.0).sum(axis) / jnp.maximum(mask.sum(axis), 1)
