"""Cross-entropy of hidden states against an output matrix, without the logits in memory."""
