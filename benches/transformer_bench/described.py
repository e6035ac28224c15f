"""Compilation for NVIDIA GPUs that are not present, from descriptions of them.

Its plug-in for CUDA, which `pip install "jax[cuda13]"` brings, asks for no driver then. Without a
device it measures no products, and may choose others for them than it would there.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

from train.config import InputError

FOLDER = Path(__file__).resolve().parents[2] / "configs/gpus"
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def names() -> list[str]:
    """The names of GPUs with a description."""
    return sorted(file.stem for file in FOLDER.glob("*.txtpb"))


def check(name: str) -> None:
    """Checks that programs can be compiled for a GPU.

    Raises:
        InputError: XLA's plug-in for CUDA is not installed.
    """
    if not any(is_there(plugin) for plugin in PLUGINS):
        raise InputError(f'gpu {name} needs XLA\'s plug-in for CUDA: pip install "jax[cuda13]"')


def is_there(module: str) -> bool:
    """Whether a module and its package are installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def description(name: str) -> str:
    """The description of a GPU: a stream_executor.GpuTargetConfigProto, as text."""
    return (FOLDER / f"{name}.txtpb").read_text(encoding="utf-8")


def limit(name: str) -> int:
    """The bytes of its memory that JAX's allocator takes by default."""
    found = re.search(r"device_memory_size: (\d+)", description(name))
    assert found is not None
    return int(found[1]) * 3 // 4


def device(name: str) -> Any:
    """A GPU, for shardings of compiled programs.

    Without a driver `JAX_PLATFORMS=cpu` has to be set, as the plug-in looks for a driver otherwise.
    """
    import jax
    from jax.experimental import topologies

    # JAX looks for plug-ins.
    jax.devices("cpu")
    (found,) = topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x1", target_config=description(name)
    ).devices
    return found


def lowered(name: str, function: Any, *arrays: Any, **options: Any) -> Any:
    """A function lowered for a GPU; `arrays` are trees of shapes, options those of `jax.jit`."""
    import jax

    place = jax.sharding.SingleDeviceSharding(device(name))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arrays
    )
    return jax.jit(function, **options).trace(*placed).lower(lowering_platforms=("cuda",))
