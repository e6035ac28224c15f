"""Functions that are values: equal where what they do is equal."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True, init=False)
class Bound:
    """A function with its first arguments, `function(*given, *rest)`.

    Unlike `functools.partial`, two are equal where function and arguments are. JAX's caches compare
    the parameters of primitives: a function that compares by identity misses them at every call,
    and one that is left out of the comparison has one call run another's program. Arguments are
    hashable, and so never arrays, which a cache would keep alive.
    """

    function: Callable[..., Any]
    given: tuple[Any, ...]

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        """Binds the first arguments of a function that is defined in a module, or is a value."""
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "given", given)

    def __repr__(self) -> str:
        """Its names, which are the same in every process."""
        return f"{_name(self.function)}({', '.join(map(_name, self.given))})"

    def __call__(self, *rest: Any, **named: Any) -> Any:
        """Returns function(*given, *rest, **named)."""
        return self.function(*self.given, *rest, **named)


def _name(value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
