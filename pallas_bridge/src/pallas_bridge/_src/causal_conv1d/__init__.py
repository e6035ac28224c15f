"""Causal depthwise convolution."""
