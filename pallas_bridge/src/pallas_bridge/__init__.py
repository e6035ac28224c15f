"""Large-vocabulary training losses, and norms, for JAX.

    from pallas_bridge import cross_entropy
    loss, grads = jax.value_and_grad(lambda x: cross_entropy(x, labels))(logits)

Kernels run as XLA custom calls inside any program, under `jit`, `grad`, `vmap` and a mesh; `info()`
says which runs where.
"""

from ._src import versions

# Before anything that needs a JAX of those versions.
versions.check_all()

from ._src import library  # noqa: E402
from ._src.cross_entropy.api import cross_entropy, cross_entropy_per_token  # noqa: E402
from ._src.implementations import Info, PlatformInfo, info  # noqa: E402
from ._src.library import LibraryError  # noqa: E402
from ._src.linear_cross_entropy.api import (  # noqa: E402
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
    linear_cross_entropy_value_and_grad,
)
from ._src.rms_norm.api import rms_norm  # noqa: E402

__version__ = versions.PACKAGE
__all__ = [
    "Info",
    "LibraryError",
    "PlatformInfo",
    "cross_entropy",
    "cross_entropy_per_token",
    "explain",
    "info",
    "linear_cross_entropy",
    "linear_cross_entropy_per_token",
    "linear_cross_entropy_value_and_grad",
    "rms_norm",
]

# Programs that were exported elsewhere call the library too. Where that cannot be loaded, the first
# use of a kernel says why.
library.attempt()
