"""Runs of the smallest preset, in this process, on eight virtual devices of the CPU."""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Most of the time is XLA's, which compiles programs of a few steps. Before JAX starts.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

jax.config.update("jax_num_cpu_devices", 8)

from train import log, loop  # noqa: E402
from train.config import Options  # noqa: E402

TEXT = (ROOT / "README.md", ROOT / "CHANGELOG.md")
Runner = Callable[..., loop.Outcome]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("XENTILE_SEED", secrets.randbits(32)))
    print(f"seed: set XENTILE_SEED={seed} to repeat")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps compiled programs, as several tests run the same."""
    folder = os.environ.get("XENTILE_TEST_PROGRAMS") or str(tmp_path_factory.mktemp("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture
def train() -> Runner:
    """Trains the smallest preset by the options given, and prints what a terminal would show."""

    def run(**options: Any) -> loop.Outcome:
        say = options.pop("say", print)
        given = {"model_size": "test", "num_train_steps": 6, "text": TEXT, **options}
        return loop.train(Options(**given), say)

    return run


def steps(file: Path) -> list[log.Record]:
    """The records of a log's steps."""
    return [record for record in log.read(file) if record["record"] == "step"]
