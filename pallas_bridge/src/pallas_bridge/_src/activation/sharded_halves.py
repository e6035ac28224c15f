"""Packed halves whose columns are sharded: what devices exchange, and compute of that.

Each of n devices has 2 of the 2 n blocks of columns that gate and up make, one after the other.
Device i needs block i, of the gate, and block n + i, of up: every block moves once, if at all.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from ..bound import Bound
from ..meshes import Names
from . import reference
from .options import Options


def forward(options: Options, axes: Names, x: jax.Array) -> tuple[jax.Array]:
    """Returns y [.., F / n] of a device's own x [.., 2 F / n]; mesh `axes` shard the columns."""
    return (reference.forward(replace(options, layout="apart"), *_to_pairs(axes, x)),)


def backward(options: Options, axes: Names, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    """Returns the gradient of a device's own x."""
    options = replace(options, layout="apart")
    gate, up = reference.gradients(options, _to_pairs(axes, x), dy)
    return (_to_blocks(axes, gate, up),)


def backward_with_y(
    options: Options, axes: Names, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of a device's own x, and y [.., F / n]."""
    options = replace(options, layout="apart")
    y, vjp = jax.vjp(Bound(reference.forward, options), *_to_pairs(axes, x))
    return _to_blocks(axes, *vjp(dy)), y


def rounds(count: int) -> list[int]:
    """Returns in which of two rounds each of 2 * `count` blocks moves.

    In either one every device sends one block and receives one: blocks 2 i and 2 i + 1, of one
    source, are in different rounds, and so are blocks i and i + count, of one destination.
    """
    found = [-1] * (2 * count)
    for start in range(2 * count):
        block = start
        while found[block] < 0:
            other = (block + count) % (2 * count)
            found[block], found[other] = 0, 1
            block = other ^ 1
    return found


def _to_pairs(axes: Names, x: jax.Array) -> list[jax.Array]:
    """Returns gate and up [.., F / n] of the columns that the device is to have."""
    count, index = _devices(axes)
    received = []
    for sends, receives, route in _routes(count):
        sent = jax.lax.select(_at(sends, index), *reversed(jnp.split(x, 2, -1)))
        received.append((_at(receives, index), jax.lax.ppermute(sent, axes, route)))
    (_, first), (second_is_up, second) = received
    return [
        jax.lax.select(second_is_up, first, second),
        jax.lax.select(second_is_up, second, first),
    ]


def _to_blocks(axes: Names, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns blocks [.., 2 F / n] of a device, of gate and up as `_to_pairs` gives them."""
    count, index = _devices(axes)
    received = []
    for sends, receives, route in _routes(count):
        sent = jax.lax.select(_at(receives, index), up, gate)
        back = [(destination, source) for source, destination in route]
        received.append((_at(sends, index), jax.lax.ppermute(sent, axes, back)))
    (_, one), (other_is_right, other) = received
    left = jax.lax.select(other_is_right, one, other)
    right = jax.lax.select(other_is_right, other, one)
    return jnp.concatenate([left, right], -1)


def _devices(axes: Names) -> tuple[int, jax.Array]:
    """Returns how many devices there are along axes, and which this one is."""
    return math.prod(map(jax.lax.axis_size, axes)), jax.lax.axis_index(axes)


def _at(flags: list[bool], index: jax.Array) -> jax.Array:
    found: jax.Array = jax.lax.dynamic_index_in_dim(jnp.array(flags), index, keepdims=False)
    return found


def _routes(count: int) -> list[tuple[list[bool], list[bool], list[tuple[int, int]]]]:
    """Returns for each round, of each device, what it sends and receives, and the route.

    The first two are whether it sends its right block, and whether it receives one of up.
    """
    found = []
    of_blocks = rounds(count)
    for number in (0, 1):
        blocks = [block for block in range(2 * count) if of_blocks[block] == number]
        sends, receives = [False] * count, [False] * count
        for block in blocks:
            sends[block // 2], receives[block % count] = block % 2 == 1, block >= count
        route = [(block // 2, block % count) for block in blocks]
        found.append((sends, receives, route))
    return found
