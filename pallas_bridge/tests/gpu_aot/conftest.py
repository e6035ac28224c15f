"""GPUs that are not there, for which XLA compiles.

XLA's plug-in for CUDA asks neither for a driver nor for a device to compile for one that is
described. Without one it measures no products, so that it may choose other kernels for these than
it would there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies


@pytest.fixture(scope="session")
def gpus() -> Callable[[int], Any]:
    """What gives so many of them, of one machine."""
    # JAX looks for plug-ins.
    jax.devices("cpu")
    file = Path(__file__).resolve().parents[3] / "configs/gpus/h200.txtpb"
    described = file.read_text(encoding="utf-8")

    def of(count: int) -> Any:
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=described
        )
        assert len(topology.devices) == count
        return topology.devices

    return of
