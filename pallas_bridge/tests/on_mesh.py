"""Meshes of eight devices, and what compiled programs exchange over them."""

import contextlib
import re
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType

# How an operation gets to know of a mesh: axes left to XLA, axes that types tell of, and within
# `shard_map`, with JAX keeping track of what varies or not.
WAYS = ["auto", "explicit", "checked", "unchecked"]
NAMES = ("data", "vocab")


def mesh_of(shape: tuple[int, int], way: str) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh(shape, NAMES, axis_types=(kind,) * 2, devices=jax.devices()[:8])


@contextlib.contextmanager
def by_shardy(is_used: bool) -> Iterator[None]:
    """Has programs be partitioned by Shardy, or by GSPMD."""
    before = jax.config.values["jax_use_shardy_partitioner"]
    jax.config.update("jax_use_shardy_partitioner", is_used)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def exchanged(program: str) -> dict[str, int]:
    """The collectives of a compiled program, with the elements of the largest array of each."""
    found: dict[str, int] = {}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for types, kind in re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", program):
        for shape in re.findall(r"\[([\d,]*)\]", types):
            size = int(np.prod([int(n) for n in shape.split(",") if n]))
            found[kind] = max(found.get(kind, 0), size)
    return found
