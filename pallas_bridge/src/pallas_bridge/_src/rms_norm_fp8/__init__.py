"""RMSNorm in FP8, whose function is beside that of FP8 quantisation: what tools need of it."""
