"""FP8 quantisation: a module an implementation, and what they share."""
