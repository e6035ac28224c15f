"""LayerNorm: a module an implementation, and what they share."""
