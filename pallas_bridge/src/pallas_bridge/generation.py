"""Text generation with decoders as Qwen 3, Qwen 2.5, Llama 3 and Mistral have them.

    from pallas_bridge import generation
    config, params = generation.load_hugging_face("Qwen3-0.6B")
    found = generation.generate(params, config, [[9707, 11], [3838]], max_new_tokens=64)

`generate` is one program: `prefill` of the prompts, then a loop of `decode_step` and `sample` on
the device. Each is a function of its own too. They compute in the parameters' dtype, by the norms,
RoPE, attention and activation of this package and by XLA's matrix products.
"""

from ._src.generation.cache import Cache, init_cache
from ._src.generation.checkpoints import load_hugging_face
from ._src.generation.config import DecoderConfig
from ._src.generation.generate import Generated, generate
from ._src.generation.kernel import pack
from ._src.generation.model import decode_step, prefill
from ._src.generation.parameters import init_params
from ._src.generation.sampling import sample

__all__ = [
    "Cache",
    "DecoderConfig",
    "Generated",
    "decode_step",
    "generate",
    "init_cache",
    "init_params",
    "load_hugging_face",
    "pack",
    "prefill",
    "sample",
]
