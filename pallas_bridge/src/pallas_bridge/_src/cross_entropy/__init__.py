"""Cross-entropy over logits: a module an implementation, and what they share."""
