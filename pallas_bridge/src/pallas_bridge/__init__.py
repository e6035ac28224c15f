"""Large-vocabulary training losses, norms, activations and FP8 quantisation, for JAX.

    from pallas_bridge import cross_entropy
    loss, grads = jax.value_and_grad(lambda x: cross_entropy(x, labels))(logits)

Kernels run as XLA custom calls inside any program, under `jit`, `grad`, `vmap` and a mesh; `info()`
says which runs where. `nn` has the signatures of `jax.nn`, `losses` losses on preferences and
rewards, `checkpoint_policies` what `jax.checkpoint` may keep, and `generation` text generation;
`pallas_bridge.nnx` and `pallas_bridge.equinox`, which are imported by name, have layers.
"""

import sys

from ._src import doctor

# Before anything that needs a JAX of those versions.
try:
    from ._src import versions

    versions.check_all()
except ImportError:
    # The doctor says more than a traceback does.
    if not doctor.is_asked():
        raise
    sys.exit(doctor.main())

from . import checkpoint_policies, generation, losses, nn, optax
from ._src import library
from ._src.activation.api import geglu, gelu, reglu, squared_relu, swiglu
from ._src.activation.mlp import gated_mlp
from ._src.causal_conv1d.api import causal_conv1d
from ._src.cross_entropy.api import cross_entropy, cross_entropy_per_token
from ._src.flash_attention.api import flash_attention
from ._src.flash_attention.paged import paged_attention
from ._src.flash_attention.ring import ring_attention, zigzag_indices
from ._src.fp8_linear import fp8_linear
from ._src.fp8_quantize.api import (
    Quantized,
    delayed_scale,
    fp8_dequantize,
    fp8_quantize,
    rms_norm_fp8,
    swiglu_fp8,
)
from ._src.info import Info, PlatformInfo, info
from ._src.library import LibraryError, get_include, get_library
from ._src.linear_attention.api import gated_delta_rule, linear_attention
from ._src.linear_cross_entropy.api import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
    linear_cross_entropy_value_and_grad,
)
from ._src.linear_cross_entropy.plan import Plan
from ._src.norm.api import layer_norm, rms_norm
from ._src.norm.with_products import rms_norm_linear
from ._src.rope.api import rope
from ._src.rope.qk_norm import qk_norm_rope
from ._src.rope.scaling import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling

__version__ = versions.PACKAGE
__all__ = [
    "Info",
    "LibraryError",
    "LinearScaling",
    "Llama3Scaling",
    "NtkScaling",
    "Plan",
    "PlatformInfo",
    "Quantized",
    "YarnScaling",
    "causal_conv1d",
    "checkpoint_policies",
    "cross_entropy",
    "cross_entropy_per_token",
    "delayed_scale",
    "explain",
    "flash_attention",
    "fp8_dequantize",
    "fp8_linear",
    "fp8_quantize",
    "gated_delta_rule",
    "gated_mlp",
    "geglu",
    "gelu",
    "generation",
    "get_include",
    "get_library",
    "info",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "linear_cross_entropy_per_token",
    "linear_cross_entropy_value_and_grad",
    "losses",
    "nn",
    "optax",
    "paged_attention",
    "qk_norm_rope",
    "reglu",
    "ring_attention",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_linear",
    "rope",
    "squared_relu",
    "swiglu",
    "swiglu_fp8",
    "zigzag_indices",
]

# Programs that were exported elsewhere call the library too. Where that cannot be loaded, the first
# use of a kernel says why.
library.attempt()
