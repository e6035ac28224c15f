"""Where the tests run, which of them apply there, and fresh random inputs for each.

XENTILE_TEST_PLATFORM is "cpu" (unless set) or "cuda": every array and program of the tests is
placed there. What does not apply on a platform or with so few devices is listed by name at the end
of the run, with the reason. XENTILE_TEST_NUMBERS=0 leaves out what holds the numbers of kernels
and asks nothing of JAX but to call them. XENTILE_TEST_SET=nightly runs tests that are marked
`nightly` too: the rest of products of which a fixed part always runs. XENTILE_TEST_PROGRAMS is a
folder where programs that XLA compiled are kept for other tests, but those of tests on several
devices. Processes that share it need scripts/pytest_programs.py.
"""

import gc
import importlib.util
import os
import secrets
from collections import defaultdict

# A GPU's memory is shared with the programs that tests start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from placement import PLATFORM

# Before any backend starts.
jax.config.update("jax_platforms", "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu")
# For meshes.
jax.config.update("jax_num_cpu_devices", 8)
# Products are compared with products of other shapes.
jax.config.update("jax_default_matmul_precision", "highest")

# What asks for a plug-in of XLA's that is not here: scripts/tiers/gpu-aot.sh names it.
collect_ignore = ["gpu_aot"]
NEWEST = (0, 12)
PROGRAMS = os.environ.get("XENTILE_TEST_PROGRAMS")
NOT_APPLICABLE = pytest.StashKey[dict[str, list[str]]]()
NIGHTLY = pytest.StashKey[int]()
KEEPS_PROGRAMS = pytest.StashKey[bool]()
RUNS_NIGHTLY = os.environ.get("XENTILE_TEST_SET") == "nightly"


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("XENTILE_SEED", secrets.randbits(32)))
    print(f"seed: set XENTILE_SEED={seed} to repeat")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def calls_for_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has programs for GPUs take calls of the library where logits are few too, as tests' are."""
    from pallas_bridge._src.linear_cross_entropy import library_plan

    monkeypatch.setattr(library_plan, "FEW_LOGITS", 0)
    monkeypatch.setattr(library_plan, "FEW_TOKENS", 0)


def keep_programs(folder: str | None) -> None:
    """Has JAX keep programs in a folder, or nowhere."""
    compilation_cache.reset_cache()
    if folder is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_compilation_cache_dir", folder)
        # The first program that is compiled opens the folder.
        jax.jit(lambda: 0)()
        # It stays open, and no test sees that there is one: warnings are not given with a cache.
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True)
def programs_are_kept(request: pytest.FixtureRequest) -> None:
    """Programs are compiled once for all tests, but those on meshes hold what is said then."""
    on_many = request.node.get_closest_marker("devices") is not None
    are_kept = PROGRAMS is not None and not on_many
    # Tests of a file mostly agree: what was kept for the last one stays.
    if are_kept != request.config.stash[KEEPS_PROGRAMS]:
        keep_programs(PROGRAMS if are_kept else None)
        request.config.stash[KEEPS_PROGRAMS] = are_kept


def pytest_collection_finish() -> None:
    # JAX's modules and the tests themselves are no garbage: nobody looks for it there, and seldom
    # elsewhere.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(platform, reason): applies on one platform")
    config.addinivalue_line("markers", "newest: applies with the newest JAX that is supported")
    config.addinivalue_line("markers", "devices(count): needs so many devices")
    config.addinivalue_line("markers", "needs(module): needs a package that the library does not")
    config.addinivalue_line("markers", "fixed: all cases run where others are chosen")
    config.addinivalue_line("markers", "nightly: runs in the nightly set alone")
    config.addinivalue_line("markers", "numbers: holds what kernels compute, whatever JAX it is")
    config.stash[NOT_APPLICABLE] = defaultdict(list)
    config.stash[NIGHTLY] = 0
    config.stash[KEEPS_PROGRAMS] = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        if not RUNS_NIGHTLY and any(item.iter_markers("nightly")):
            left_out.append(item)
            config.stash[NIGHTLY] += 1
            continue
        reason = why_not(item)
        (kept if reason is None else left_out).append(item)
        if reason is not None:
            config.stash[NOT_APPLICABLE][reason].append(item.nodeid)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def why_not(item: pytest.Item) -> str | None:
    """Why a test does not apply here; None where it does."""
    for mark in item.iter_markers("only"):
        platform, reason = mark.args
        if platform != PLATFORM:
            return f"for {platform} only: {reason}"
    if any(item.iter_markers("newest")) and jax.__version_info__ < NEWEST:
        return f"for the newest JAX only, as Pallas' interpreter is slow: {jax.__version__}"
    if os.environ.get("XENTILE_TEST_NUMBERS") == "0" and any(item.iter_markers("numbers")):
        return "holds numbers that no version of JAX changes, and those were left out"
    for mark in item.iter_markers("needs"):
        (module,) = mark.args
        if importlib.util.find_spec(module) is None:
            return f"needs {module}, which is not installed"
    for mark in item.iter_markers("devices"):
        (count,) = mark.args
        if jax.device_count() < count:
            return f"needs {count} devices, and there is {jax.device_count()}"
    return None


def pytest_report_header() -> str:
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return f"platform under test: {PLATFORM}, {jax.device_count()} x {devices}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash[NIGHTLY]:
        terminalreporter.write_line(
            f"left out: {count} cases of the nightly set (XENTILE_TEST_SET=nightly)"
        )
    for reason, tests in config.stash[NOT_APPLICABLE].items():
        terminalreporter.section(f"{len(tests)} tests do not apply on {PLATFORM}: {reason}")
        for test in tests:
            terminalreporter.write_line(test)
