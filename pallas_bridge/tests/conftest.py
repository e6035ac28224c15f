"""Fresh random inputs for every test, with their seed in what a failure prints."""

import os
import secrets

import jax
import numpy as np
import pytest

# Two devices, for meshes. Before any backend starts.
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("XENTILE_SEED", secrets.randbits(32)))
    print(f"seed: set XENTILE_SEED={seed} to repeat")
    return np.random.default_rng(seed)
