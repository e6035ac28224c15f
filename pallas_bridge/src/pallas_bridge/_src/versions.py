"""The versions of this package and of the JAX that it works with."""

import re

import jax
import jaxlib.version

PACKAGE = "0.1.0"

# Every version inside was not tried; those of the test matrix (scripts/tiers/xla-cpu.sh) were.
OLDEST = (0, 9, 0)
BEFORE = (0, 13)


def check(name: str, version: str) -> None:
    """Refuses a version of jax or jaxlib that this package was not made for.

    Raises:
        ImportError: `version` is outside the supported range.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < BEFORE:
        oldest, before = (".".join(map(str, bound)) for bound in (OLDEST, BEFORE))
        raise ImportError(
            f"pallas_bridge {PACKAGE} works with {name} >= {oldest}, < {before}, and this is "
            f"{name} {version}: install a version of that range"
        )


def check_all() -> None:
    """Refuses a JAX that this package was not made for.

    Raises:
        ImportError: the version of jax or jaxlib is outside the supported range.
    """
    check("jax", jax.__version__)
    check("jaxlib", jaxlib.version.__version__)
