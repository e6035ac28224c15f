"""Attention by tiles: a module an implementation, and what they share."""
