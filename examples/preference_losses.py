"""The preference losses of `pallas_bridge.losses`, for programs that import them from here."""

from pallas_bridge.losses import (
    dpo_loss,
    group_advantages,
    grpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    ppo_policy_loss,
)

__all__ = [
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "ppo_policy_loss",
]
