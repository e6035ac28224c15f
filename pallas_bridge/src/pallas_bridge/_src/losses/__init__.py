"""What losses of tokens share, of logits and of hidden states."""
