"""Commands of several tiers take what the first compiled: cargo's own graphs of units say so.

A package that is built by itself has other features than beside the whole workspace, and it and
all that depends on it is compiled again. Nothing is compiled here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIKE_WORKSPACE = "--package xentile --package xentile-tools --package xentile-xla"


def units(command: str) -> dict[str, str]:
    """What a command compiles: the name of each unit by all that tells it from others."""
    result = subprocess.run(
        ["cargo", *command.split(), "--locked", "--unit-graph", "-Z", "unstable-options"],
        cwd=ROOT,
        env={**os.environ, "RUSTC_BOOTSTRAP": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    graph: list[dict[str, Any]] = json.loads(result.stdout)["units"]
    keys: dict[int, str] = {}

    def key(index: int) -> str:
        if index not in keys:
            unit = graph[index]
            # A profile is what it sets, by whatever name.
            profile = {name: value for name, value in unit["profile"].items() if name != "name"}
            told = [unit[name] for name in ("pkg_id", "target", "mode", "features", "platform")]
            below = sorted(hash(key(one["index"])) for one in unit["dependencies"])
            keys[index] = json.dumps([*told, profile, below], sort_keys=True)
        return keys[index]

    return {key(index): graph[index]["target"]["name"] for index in range(len(graph))}


@pytest.fixture(scope="module")
def tests() -> dict[str, str]:
    """What the tier host compiles."""
    return units("test --workspace")


@pytest.mark.parametrize(
    "command",
    [
        "build --workspace --features xla-ffi/testing",
        "build --workspace --example jax_handlers",
        "build --workspace --example programs",
        f"test {LIKE_WORKSPACE} --test face --test linear --test operations --test xla",
        f"test {LIKE_WORKSPACE} --package xla-ffi --test abi",
        f"test {LIKE_WORKSPACE} --package pjrt-client --test cpu",
    ],
)
def test_commands_of_tiers_compile_nothing_again(tests: dict[str, str], command: str) -> None:
    again = units(command)
    assert again
    assert [name for key, name in again.items() if key not in tests] == []


def test_a_package_by_itself_is_compiled_again(tests: dict[str, str]) -> None:
    """That is what the others are held against."""
    alone = units("build --package xentile-xla")
    assert {"xentile", "xentile_cpu"} <= {n for key, n in alone.items() if key not in tests}
