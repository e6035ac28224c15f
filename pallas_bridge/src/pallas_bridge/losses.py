"""Losses."""

from ._src.distillation import linear_kl_divergence

__all__ = ["linear_kl_divergence"]
