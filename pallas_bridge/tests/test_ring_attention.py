"""Attention of sharded sequences against that of whole ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from on_mesh import WAYS, exchanged
from pallas_bridge._src.flash_attention import custom_call
from pallas_bridge._src.flash_attention.options import Options, ranges

from pallas_bridge import flash_attention, ring_attention, zigzag_indices

NEEDS_DEVICES = pytest.mark.devices(2)
# Of the batch, and of the sequence.
MESH = (2, 4) if jax.device_count() >= 8 else (1, 2)
LENGTH = 64
TOKENS = PartitionSpec("data", "sequence")
# Options, and whether tokens are in zigzag order.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "causal": ({"causal": True}, False),
    "zigzag": ({"causal": True}, True),
    "window": ({"causal": True, "window": (21, None)}, False),
    "zigzag window": ({"causal": True, "window": (21, None)}, True),
    "two sides": ({"window": (5, 30)}, False),
    "segments": ({"segment_ids": True}, False),
    "causal segments": ({"causal": True, "segment_ids": True}, True),
    "sinks": ({"causal": True, "sinks": True, "softcap": 3.0}, True),
}
RUNS = [
    *((case, "checked", "float32", None) for case in CASES),
    *((case, "auto", "float32", "reference") for case in CASES),
    *((case, way, "float32", None) for case in ("sinks", "causal segments") for way in WAYS),
    *((case, "explicit", "bfloat16", None) for case in ("zigzag", "window")),
]
CLOSE = {"float32": 2e-5, "bfloat16": 4e-2}


def mesh_of(way: str) -> Mesh:
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    devices = jax.devices()[: MESH[0] * MESH[1]]
    return jax.make_mesh(MESH, ("data", "sequence"), axis_types=(kind,) * 2, devices=devices)


def spec_of(name: str) -> PartitionSpec:
    return PartitionSpec() if name == "sinks" else TOKENS


def over(mesh: Mesh, way: str, function: Callable[..., Any], names: Any) -> Callable[..., Any]:
    """Returns a function of whole arrays by their names, with `shard_map` where a way has it."""

    def call_by_name(arrays: dict[str, jax.Array]) -> Any:
        return function(**arrays)

    if way not in ("checked", "unchecked"):
        return call_by_name
    specs = {name: spec_of(name) for name in names}
    return jax.shard_map(
        call_by_name, mesh=mesh, in_specs=(specs,), out_specs=TOKENS, check_vma=way == "checked"
    )


def arrays_of(rng: np.random.Generator, dtype: str, *, sinks: bool = False) -> dict[str, Any]:
    shapes = {"q": (2, LENGTH, 4, 16), "k": (2, LENGTH, 2, 16), "v": (2, LENGTH, 2, 8)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    return arrays | ({"sinks": jnp.asarray(rng.normal(size=4), "float32")} if sinks else {})


@pytest.mark.few(3)
@NEEDS_DEVICES
@pytest.mark.parametrize(("case", "way", "dtype", "implementation"), dict.fromkeys(RUNS))
def test_results_and_gradients_are_those_of_whole_sequences(
    rng: np.random.Generator, case: str, way: str, dtype: str, implementation: Any
) -> None:
    given, zigzag = CASES[case]
    options = dict(given)
    ids: dict[str, Any] = {}
    if options.pop("segment_ids", False):
        ids["segment_ids"] = jnp.asarray(np.sort(rng.integers(0, 5, (2, LENGTH)), -1))
    arrays = arrays_of(rng, dtype, sinks=options.pop("sinks", False))
    do = jnp.asarray(rng.normal(size=(2, LENGTH, 4, 8)), "float32")
    dlse = jnp.asarray(rng.normal(size=(2, LENGTH, 4)), "float32")
    order = zigzag_indices(LENGTH, MESH[1]) if zigzag else np.arange(LENGTH)

    def total(found: Any, do: Any, dlse: Any) -> Any:
        o, lse = found
        return (o.astype(jnp.float32) * do).sum() + (lse * dlse).sum(), (o, lse)

    def alone(arrays: Any) -> Any:
        wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        found = flash_attention(
            **wide, **ids, **options, return_lse=True, implementation="reference"
        )
        return total(found, do, dlse)

    (_, wanted), wanted_gradients = jax.jit(jax.value_and_grad(alone, has_aux=True))(arrays)

    def ring(**operands: Any) -> Any:
        return ring_attention(
            **operands,
            **options,
            axis_name="sequence",
            zigzag=zigzag,
            return_lse=True,
            implementation=implementation,
        )

    mesh = mesh_of(way)

    def placed(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.device_put(
                x if name == "sinks" else x[:, order], NamedSharding(mesh, spec_of(name))
            )
            for name, x in arrays.items()
        }

    function = over(mesh, way, ring, [*arrays, *ids])
    still, weights = placed(ids), placed({"do": do, "dlse": dlse})
    with jax.set_mesh(mesh):
        loss = jax.jit(
            jax.value_and_grad(lambda x: total(function({**x, **still}), **weights), has_aux=True)
        )
        (_, found), gradients = loss(placed(arrays))
    back = np.argsort(order)
    for one, right in zip(found, wanted, strict=True):
        close(np.asarray(one, np.float32)[:, back], right, dtype)
    for name, right in wanted_gradients.items():
        one = np.asarray(gradients[name], np.float32)
        close(one if name == "sinks" else one[:, back], right, dtype)


def close(found: Any, right: Any, dtype: str) -> None:
    right = np.asarray(right, np.float32)
    largest = np.abs(right).max()
    np.testing.assert_allclose(found, right, atol=CLOSE[dtype] * largest, rtol=CLOSE[dtype])


@pytest.mark.few(0)
@NEEDS_DEVICES
@pytest.mark.slow
def test_without_jit_and_mapped(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32")
    mesh = mesh_of("auto")
    placed = {name: jax.device_put(x, NamedSharding(mesh, TOKENS)) for name, x in arrays.items()}
    wanted = flash_attention(**arrays, causal=True)
    # The arrays tell of the mesh.
    close(ring_attention(**placed, causal=True, axis_name="sequence"), wanted, "float32")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, causal=True, axis_name="sequence")

    with jax.set_mesh(mesh):
        mapped = jax.jit(jax.vmap(attend))(*placed.values())
        close(mapped, wanted, "float32")
        gradient = jax.jit(jax.grad(lambda q, k, v: jax.vmap(attend)(q, k, v).sum(), (0, 1, 2)))
        found = gradient(*placed.values())
    right = jax.grad(lambda q, k, v: flash_attention(q, k, v, causal=True).sum(), (0, 1, 2))(
        *arrays.values()
    )
    for one, other in zip(found, right, strict=True):
        close(np.asarray(one), other, "float32")


@pytest.mark.devices(8)
def test_blocks_are_sent_and_nothing_is_gathered(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32")
    mesh = mesh_of("auto")
    placed = [jax.device_put(x, NamedSharding(mesh, TOKENS)) for x in arrays.values()]

    def compiled(**options: Any) -> str:
        def loss(*arrays: Any) -> Any:
            return ring_attention(*arrays, causal=True, axis_name="sequence", **options).sum()

        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
            text: str = gradient.lower(*placed).compile().as_text()
        return text

    whole, near = compiled(), compiled(window=(LENGTH // 4, None))
    block = arrays["k"].size // 8
    assert exchanged(whole)["collective-permute"] == block
    assert not {*exchanged(whole)} & {"all-gather", "all-to-all"}
    # One block of four is within the window of another's queries.
    sent = [text.count("collective-permute(") for text in (whole, near)]
    assert sent[1] <= sent[0] * 0.6, sent


def test_orders_of_tokens() -> None:
    order = zigzag_indices(24, 3)
    assert order.tolist() == [
        *range(4),
        *range(20, 24),
        *range(4, 8),
        *range(16, 20),
        *range(8, 16),
    ]
    with pytest.raises(
        ValueError, match=r"length is 10 and devices 3; .* multiple of 2 \* devices"
    ):
        zigzag_indices(10, 3)


@pytest.mark.devices(8)
def test_what_is_wrong_is_named(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32")
    mesh = mesh_of("auto")
    with pytest.raises(ValueError, match="axis_name is 'sequence', which is no axis here"):
        ring_attention(**arrays, axis_name="sequence")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"axis_name": "tokens"}, ValueError, "it must be of the mesh's axes"),
        ({"axis_name": None}, ValueError, "it must name the mesh axis that shards tokens"),
        ({"k": arrays["k"][:, :9], "v": arrays["v"][:, :9]}, ValueError, "q has 64 tokens and k 9"),
        (
            {name: x[:, :63] for name, x in arrays.items()},
            ValueError,
            "63 tokens, which the 4 devices of axis_name 'sequence' do not divide",
        ),
        (
            {name: x[:, :60] for name, x in arrays.items()} | {"zigzag": True},
            ValueError,
            "a device has 15 tokens; zigzag needs an even number",
        ),
        ({"zigzag": 2}, TypeError, "zigzag is 2"),
        ({"segment_ids": jnp.zeros((2, 3), int)}, ValueError, r"segment_ids.* \(2, 64\)"),
        ({"sinks": jnp.zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
    ]
    with jax.set_mesh(mesh):
        for wrong, error, message in cases:
            with pytest.raises(error, match=message):
                ring_attention(**{**arrays, "axis_name": "sequence", **wrong})
    with pytest.raises(ValueError, match=r"an axis of jax\.vmap"):
        jax.vmap(lambda q, k, v: ring_attention(q, k, v, axis_name="row"), axis_name="row")(
            *arrays.values()
        )


@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_of_key_blocks_add_up(rng: np.random.Generator, dtype: str) -> None:
    # As on devices of a ring, but on one: backward calls take o and lse of all keys.
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k, v = draw(1, 2, 96, 64), draw(1, 160, 64), draw(1, 160, 64)
    do, dlse = draw(1, 2, 96, 64), jnp.asarray(rng.normal(size=(1, 2, 96)), "float32")
    options = Options(scale=0.125, gives_lse=True, has_lengths=True)
    seen = jnp.asarray(ranges(replace(options, causal=True), 96, 160, None, None))[None]
    o, lse = custom_call.forward(options, q, k, v, seen)
    wanted = custom_call.backward(options, (q, k, v, seen), o, lse, do, dlse)
    options = replace(options, is_key_block=True)
    found = []
    for first, end in ((0, 64), (64, 160)):
        own = (q, k[:, first:end], v[:, first:end], jnp.clip(seen, first, end) - first)
        found.append(custom_call.backward(options, own, o, lse, do, dlse))
    (dq, dk, dv), (more, *of_last) = found
    close(np.asarray(dq + more, np.float32), wanted[0], dtype)
    for one, other, right in zip((dk, dv), of_last, wanted[1:], strict=True):
        close(np.asarray(jnp.concatenate([one, other], 1), np.float32), right, dtype)
