"""The versions of this package and of the JAX that it works with."""

import re
import warnings

import jax
import jaxlib.version

PACKAGE = "0.1.0"

# Every version inside was not tried; those of the test matrix (scripts/tiers/xla-cpu-*.sh) were.
OLDEST = (0, 9, 0)
# The first version that was not there to be tried.
UNTRIED = (0, 13)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, at most three."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def complaint(name: str, version: str) -> str | None:
    """Returns what is wrong with a version of jax or jaxlib and what to do, or None."""
    oldest, untried = (".".join(map(str, bound)) for bound in (OLDEST, UNTRIED))
    if numbers(version) < OLDEST:
        return (
            f"pallas_bridge {PACKAGE} works with {name} >= {oldest}, and this is {name} {version}: "
            f"pip install --upgrade {name}"
        )
    if numbers(version) >= UNTRIED:
        return (
            f"pallas_bridge {PACKAGE} was tried with {name} >= {oldest}, < {untried}, and this is "
            f"{name} {version}: if something fails, look for a newer pallas_bridge or install a "
            f"{name} of that range"
        )
    return None


def check(name: str, version: str) -> None:
    """Refuses a version of jax or jaxlib that is too old, and warns of one that was not tried.

    Raises:
        ImportError: `version` is older than the oldest that is supported.
    """
    message = complaint(name, version)
    if message is not None and numbers(version) < OLDEST:
        raise ImportError(message)
    if message is not None:
        warnings.warn(message, stacklevel=2)


def check_all() -> None:
    """Checks the JAX that is there, as `check` does.

    Raises:
        ImportError: jax or jaxlib is older than the oldest that is supported.
    """
    check("jax", jax.__version__)
    # jax asks for the jaxlib that fits it.
    if numbers(jax.__version__) < UNTRIED:
        check("jaxlib", jaxlib.version.__version__)
