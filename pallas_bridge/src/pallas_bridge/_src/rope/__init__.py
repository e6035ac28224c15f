"""Rotary position embedding: a module an implementation, and what they share."""
