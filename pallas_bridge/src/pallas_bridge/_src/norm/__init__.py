"""RMSNorm and LayerNorm: one implementation, whose option `kind` says which of the two."""
