"""Dimensions of published models, for runs without a checkpoint."""

from pallas_bridge.generation import DecoderConfig

from pallas_bridge import Llama3Scaling

PRESETS = {
    "test": DecoderConfig(2, 64, 4, 2, 16, 96, 512, qk_norm=True, tied_head=True),
    "qwen2.5-0.5b": DecoderConfig(
        24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True, tied_head=True, rope_base=1e6
    ),
    "qwen3-0.6b": DecoderConfig(
        28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True, tied_head=True, rope_base=1e6
    ),
    "qwen3-1.7b": DecoderConfig(
        28, 2048, 16, 8, 128, 6144, 151936, qk_norm=True, tied_head=True, rope_base=1e6
    ),
    "llama-3.2-1b": DecoderConfig(
        16,
        2048,
        32,
        8,
        64,
        8192,
        128256,
        tied_head=True,
        rope_base=5e5,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        eps=1e-5,
    ),
    "llama-3.1-8b": DecoderConfig(
        32,
        4096,
        32,
        8,
        128,
        14336,
        128256,
        rope_base=5e5,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
        eps=1e-5,
    ),
}
