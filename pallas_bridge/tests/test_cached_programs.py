"""Another process finds programs over a mesh in JAX's cache on disk, as partitioning made them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from pallas_bridge._src import compat, doctor

# Gradients of cases, each with the axis that a mesh of four devices shards.
CUT = {
    "cross_entropy with auxiliary outputs": "V",
    "linear_cross_entropy": "V",
    "swiglu": "2F",
    "rms_norm": "D",
}
PROCESS = """
import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

folder, tests, sharded = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, tests)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from operations import CASES
from on_mesh import exchanged

jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
extents = {"V": 64, "D": 32, "2F": 128, "B": 4, "S": 8}
found = {}
for case in CASES:
    if case.name not in sharded:
        continue
    arrays = case.arrays(np.random.default_rng(0), **extents)
    specs = [
        PartitionSpec(*("model" if name == sharded[case.name] else None for name in one.dims))
        for one in case.arguments
    ]
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]
    lowered = jax.jit(case.gradients).lower(*placed)
    events.clear()
    compiled = lowered.compile()
    is_found = "/jax/compilation_cache/cache_hits" in events
    found[case.name] = [is_found, exchanged(compiled.as_text())]
print(json.dumps(found))
"""


@pytest.mark.fixed
@pytest.mark.only("cpu", "it makes four devices of the CPU")
@pytest.mark.slow
def test_another_process_finds_the_same_programs(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROCESS, str(tmp_path), tests, json.dumps(CUT)]
    environment = {**os.environ, "XLA_FLAGS": ""}
    cold, warm = (
        json.loads(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout.splitlines()[-1]
        )
        for _ in range(2)
    )
    assert {*cold} == {*CUT}
    for name, (is_found, exchanges) in warm.items():
        assert is_found and not cold[name][0], name
        assert exchanges == cold[name][1] and "all-gather" not in exchanges, name


def test_the_doctor_tells_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*doctor._cache()] == []
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        (found,) = doctor._cache()
        assert found.state == "ok" and str(tmp_path) in found.what
        monkeypatch.setattr(compat, "callbacks_by_name", lambda: None)
        (found,) = doctor._cache()
        assert found.state == "warning" and "no other process finds" in found.what
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
