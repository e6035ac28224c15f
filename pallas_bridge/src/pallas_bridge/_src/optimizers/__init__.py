"""Optimizers: AdamW, Adam and Lion with 8-bit state, stochastic rounding, Muon."""
