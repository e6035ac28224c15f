"""Which implementation of an operation is traced, and the GPUs that it may run on."""

import jax

from .checks import check_word
from .operation import Implementation, Operation


def choose(operation: Operation, implementation: Implementation | None) -> Implementation:
    """Returns the implementation to trace; the platform is chosen as the program is compiled.

    Raises:
        ValueError: there is no implementation of that name.
    """
    name = f"{operation}: implementation"
    check_word(name, implementation, operation.implementations, or_none=True)
    return implementation or "custom_call"


def gpus() -> list[jax.Device]:
    """Returns the NVIDIA GPUs of all processes: none where JAX has no backend for them."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []
