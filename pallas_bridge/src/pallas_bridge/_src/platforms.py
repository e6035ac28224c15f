"""What runs on which operating system and processor.

The build hook loads this file by its path, before the package and JAX are there: it imports nothing
of either.
"""

import platform
import sys
import sysconfig

# Where the library is built and tested.
TESTED = "Linux with glibc on x86-64 and aarch64"
MACHINES = frozenset({"x86_64", "AMD64", "aarch64", "arm64"})


def is_musl() -> bool:
    """Whether this Python is linked against musl, as on Alpine Linux."""
    return "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE"))


def obstacle() -> str | None:
    """Returns why the library does not run here, and what does; None where it may run."""
    if sys.platform == "win32":
        return (
            f"the kernels of pallas_bridge run on {TESTED}, not on Windows: install it in WSL 2, "
            "where those for CPUs and NVIDIA GPUs run"
        )
    if sys.platform == "linux" and is_musl():
        return (
            f"the kernels of pallas_bridge run on {TESTED}, and this Python is linked against "
            "musl, for which there is no jaxlib either: take an image with glibc, such as Debian's"
        )
    return None


def caution() -> str | None:
    """Returns what is untested here, or None on a platform that is tested."""
    machine = platform.machine()
    if sys.platform == "darwin":
        return (
            f"pallas_bridge is tested on {TESTED}: on macOS its kernels for CPUs are built and "
            'untested, and there are none for GPUs; implementation="reference" runs in any case'
        )
    if sys.platform != "linux" or machine not in MACHINES:
        return (
            f"pallas_bridge is tested on {TESTED}: on {sys.platform} {machine} portable kernels "
            'for CPUs are built and untested; implementation="reference" runs in any case'
        )
    return None
