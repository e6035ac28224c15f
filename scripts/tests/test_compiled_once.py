"""Commands of several tiers take what the first compiled: cargo's own graphs of units say so.

A package that is built by itself has other features than beside the whole workspace, and it and
all that depends on it is compiled again. Nothing is compiled here.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIKE_WORKSPACE = "--package xentile --package xentile-tools --package xentile-xla"

# What scripts/test.sh sets of profiles in CI.
SETTINGS = dict(
    re.findall(
        r"\b(CARGO_(?:INCREMENTAL|PROFILE_\w+))=(\w+)", (ROOT / "scripts" / "test.sh").read_text()
    )
)


def unit_graph(command: str, tests_set: str = "default") -> list[dict[str, Any]]:
    """What a command compiles in a set, as cargo lists it."""
    settings = SETTINGS if tests_set == "ci" else {}
    result = subprocess.run(
        ["cargo", *command.split(), "--locked", "--unit-graph", "-Z", "unstable-options"],
        cwd=ROOT,
        env={**os.environ, **settings, "RUSTC_BOOTSTRAP": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    graph: list[dict[str, Any]] = json.loads(result.stdout)["units"]
    return graph


def units(command: str, tests_set: str = "default") -> dict[str, str]:
    """What a command compiles in a set: the name of each unit by all that tells it from others."""
    graph = unit_graph(command, tests_set)
    keys: dict[int, str] = {}

    def key(index: int) -> str:
        if index not in keys:
            unit = graph[index]
            # A profile is what it sets, by whatever name.
            profile = {name: value for name, value in unit["profile"].items() if name != "name"}
            fields = [unit[name] for name in ("pkg_id", "target", "mode", "features", "platform")]
            below = sorted(hash(key(one["index"])) for one in unit["dependencies"])
            keys[index] = json.dumps([*fields, profile, below], sort_keys=True)
        return keys[index]

    return {key(index): graph[index]["target"]["name"] for index in range(len(graph))}


# What a set of tests gives cargo beside a command (scripts/tiers/common.sh).
SETS = {"default": "--release", "ci": "--release --features xentile-xla/cuda"}


@pytest.fixture(scope="module")
def tests() -> dict[str, dict[str, str]]:
    """What the tier host compiles in each set."""
    return {name: units(f"test --workspace {flags}", name) for name, flags in SETS.items()}


def profiles(command: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """What each unit of a command has of its profile in CI that changes what code does."""
    names = "opt_level", "debug_assertions", "overflow_checks", "panic", "lto"
    return {
        (unit["pkg_id"], unit["target"]["name"], unit["mode"]): {
            name: unit["profile"][name] for name in names
        }
        for unit in unit_graph(command, "ci")
    }


def test_the_profile_release_has_the_settings_of_dev_in_ci() -> None:
    """But for kernels for CPUs and the reference, which have no checks."""
    assert len(SETTINGS) > 4
    release, dev = profiles("test --workspace --release"), profiles("test --workspace")
    assert release.keys() == dev.keys()
    differ = [unit for unit in release if release[unit] != dev[unit]]
    packages = "/xentile#", "/xentile-cpu#"
    assert differ == [unit for unit in release if any(name in unit[0] for name in packages)] != []
    for unit in differ:
        without = {"debug_assertions": False, "overflow_checks": False}
        assert release[unit] == {**dev[unit], **without}, unit


@pytest.mark.parametrize("tests_set", SETS)
@pytest.mark.parametrize(
    "command",
    [
        "build --workspace --features xla-ffi/testing",
        f"test {LIKE_WORKSPACE} --test face --test linear --test operations --test xla",
        f"test {LIKE_WORKSPACE} --package xla-ffi --test abi",
        f"test {LIKE_WORKSPACE} --package pjrt-client --test cpu",
        "build --workspace --example jax_handlers --example programs",
        "test --package xentile --package xentile-tools --package xentile-cpu --test norm",
    ],
)
def test_commands_of_tiers_compile_nothing_again(
    tests: dict[str, dict[str, str]], tests_set: str, command: str
) -> None:
    again = units(f"{command} {SETS[tests_set]}", tests_set)
    assert again
    assert [name for key, name in again.items() if key not in tests[tests_set]] == []


def test_a_wheel_in_ci_compiles_nothing_again(tests: dict[str, dict[str, str]]) -> None:
    """scripts/cargo_of_tests.sh builds its library."""
    command = f"build {LIKE_WORKSPACE} --package xla-ffi --lib --features xla-ffi/testing"
    again = units(f"{command} {SETS['ci']}", "ci")
    assert "xentile_xla" in again.values()
    assert [name for key, name in again.items() if key not in tests["ci"]] == []


def test_commands_of_readme_compile_little_again(tests: dict[str, dict[str, str]]) -> None:
    """What has no frames for tests, and what is built on it."""
    again = units("build --release")
    little = {name for key, name in again.items() if key not in tests["default"]}
    tools = {"xentile_tools", "gradcheck", "microbench", "xentile"}
    assert little == {"xla_ffi", "xentile_xla", *tools}


@pytest.mark.parametrize("command", ["build --release", "run --release --bin gradcheck"])
def test_commands_of_readme_compile_nothing_again_in_ci(
    tests: dict[str, dict[str, str]], command: str
) -> None:
    """scripts/tiers/common.sh has a function in cargo's place, which adds features."""
    program = f"source scripts/tiers/common.sh; command() {{ echo $*; }}; cargo {command}"
    environment = {**os.environ, "XENTILE_TEST_SET": "ci", "XENTILE_NVCC": "nvcc"}
    shown = subprocess.run(
        ["bash", "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # cargo lists no units of `run`.
    again = units(re.sub("^cargo (build|run)", "build", shown.stdout), "ci")
    assert "xentile_xla" in again.values()
    assert [name for key, name in again.items() if key not in tests["ci"]] == []


def test_a_package_by_itself_is_compiled_again(tests: dict[str, dict[str, str]]) -> None:
    """That is what the others are held against."""
    alone = units("build --release --package xentile-xla")
    again = {name for key, name in alone.items() if key not in tests["default"]}
    assert {"xentile", "xentile_cpu"} <= again
