"""Settings of JAX and paths for the tests of the benchmarks, which run on the CPU."""

import os
import secrets
import sys
from pathlib import Path

# Most of the time is compilation of programs that run a few steps. Set before JAX starts.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

# Needs XLA's plug-in for CUDA: scripts/tiers/gpu-aot.sh names this folder.
collect_ignore = ["gpu_aot"]
ROOT = Path(__file__).resolve().parents[2]
# The transformer benchmark imports the model of examples/train.
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "examples")]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("XENTILE_SEED", secrets.randbits(32)))
    print(f"seed: set XENTILE_SEED={seed} to repeat")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches compiled programs, as several tests run the same ones."""
    folder = os.environ.get("XENTILE_TEST_PROGRAMS") or str(tmp_path_factory.mktemp("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
