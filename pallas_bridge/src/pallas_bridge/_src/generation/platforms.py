"""How a step of a decoder runs on each platform, in words."""

from .. import library
from ..implementations import gpus
from . import cpu_kernels, kernel


def describe() -> tuple[str, ...]:
    """Returns a line for CPUs and for NVIDIA GPUs."""
    return f"cpu: {_on_cpu()}", f"cuda: {_on_cuda()}"


def _on_cpu() -> str:
    if not cpu_kernels.are_there():
        return "XLA's products; the library has no kernels of a decoder"
    return (
        "kernels that read the cache once, and weights of up to "
        f"{cpu_kernels.MOST_TOKENS} sequences, on one device"
    )


def _on_cuda() -> str:
    by_layers = "XLA's products and kernels of layers"
    if not library.has("cuda", kernel.TARGET):
        return f"{by_layers}; the library has no kernel of a step"
    takes = (
        f"one kernel a step in bfloat16, for up to {kernel.LARGEST_BATCH} sequences on one GPU and "
        f"the dimensions of {', '.join(kernel.DIMENSIONS)}; else {by_layers}"
    )
    small = [one for one in gpus() if not kernel.is_large_hopper(one)]
    if small:
        return (
            f"{by_layers}: {small[0].device_kind} is not of compute capability 9.0 with "
            f"{kernel.CTAS} multiprocessors, as the kernel of a step needs"
        )
    return takes
