"""Which implementation of an operation is traced, and the GPUs that it may run on."""

import jax

from .operation import Implementation, Operation


def choose(operation: Operation, implementation: Implementation | None) -> Implementation:
    """Returns the implementation to trace; the platform is chosen as the program is compiled.

    Raises:
        ValueError: there is no implementation of that name.
    """
    if implementation is None:
        return "custom_call"
    if implementation not in operation.implementations:
        names = ", ".join(map(repr, operation.implementations))
        raise ValueError(
            f"{operation}: implementation is {implementation!r}; it must be one of {names}, or None"
        )
    return implementation


def gpus() -> list[jax.Device]:
    """Returns the NVIDIA GPUs of all processes: none where JAX has no backend for them."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []
