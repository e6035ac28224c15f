"""The type of the optimizers: an `optax.GradientTransformation` with `update_and_apply`."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optax


def import_optax() -> Any:
    """Returns optax.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "the optimizers of pallas_bridge.optax need optax: run "
            "pip install 'pallas_bridge[optax]', or pip install optax"
        ) from error
    return optax


@cache
def _class() -> Any:
    base: Any = import_optax().GradientTransformationExtraArgs

    class Optimizer(base):  # type: ignore[misc]
        """A gradient transformation of optax that also applies its updates."""

        update_and_apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    return Optimizer


def make(
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    update_and_apply: Callable[[Any, Any, Any], tuple[Any, Any]],
) -> "optax.GradientTransformationExtraArgs":
    """Returns the optimizer of three functions."""
    optimizer: Any = _class()(init, update)
    optimizer.update_and_apply = update_and_apply
    return optimizer
