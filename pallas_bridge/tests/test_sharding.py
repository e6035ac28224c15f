"""What devices exchange where a mesh shards an axis: all operations and axes, both passes.

It is read from the compiled program. Results are those of one device. The table in
docs/reference/sharding.md is made of what is found here (XENTILE_UPDATE_DOCS=1 writes it).
"""

import contextlib
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from on_mesh import by_shardy
from operations import CASES, Case, one_a_further_way, one_an_operation
from pallas_bridge._src import gathering
from placement import PLATFORM

pytestmark = pytest.mark.devices(2)

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "sharding.md"
COUNT = 4 if PLATFORM == "cpu" else min(4, jax.device_count())
EXTENTS = {"B": 4, "S": 12, "V": 64, "D": 32, "F": 64, "2F": 128, "H": 8, "K": 4, "E": 32}
EXTENTS |= {"R": 16, "M": 8, "C": 4}
SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "f8e4m3fn": 1, "u8": 1}
KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"

# What XLA's partitioner must gather, since no kernel computes with a part: axes by their operation.
GATHERED = {
    "linear_cross_entropy with": "DS",
    "linear_cross_entropy": "D",
    "rope": "DR",
    "qk_norm_rope": "D",
    "flash_attention": "SDE",
}
# What has no kernel for a part, and XLA's own program where XLA chooses.
REFUSED = {
    "fp8_quantize by blocks": "MD",
    "cross_entropy with": "C",
    "linear_cross_entropy with": "C",
}
# What it gathers that is small beside the operands: positions, and tables that a user gave.
SMALL = {"rope": "S", "qk_norm_rope": "S"}
WAYS = ["auto", "explicit"]
UPDATES = os.environ.get("XENTILE_UPDATE_DOCS") == "1"
# Of which programs for GPUs hold the same, by other collectives in part.
IS_DOCUMENTED = PLATFORM == "cpu" and not UPDATES


def dims_of(case: Case) -> list[str]:
    """The names of a case's axes that a mesh may shard; heads of keys with those of queries."""
    names = dict.fromkeys(name for one in case.arguments for name in one.dims)
    return [name for name in names if name not in case.whole and (name != "K" or "H" not in names)]


def is_in(table: dict[str, str], case: Case, dim: str) -> bool:
    return any(case.name.startswith(name) and dim in axes for name, axes in table.items())


def placed(case: Case, dim: str, mesh: Any, arrays: Any) -> list[jax.Array]:
    """Arrays of which every axis of a name is sharded, once an array."""
    names = {dim, "K"} if dim == "H" else {dim}
    found = []
    for one, array in zip(case.arguments, arrays, strict=True):
        index = next((index for index, name in enumerate(one.dims) if name in names), None)
        spec = ["model" if number == index else None for number in range(array.ndim)]
        found.append(jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))))
    return found


def exchanged(program: str) -> list[tuple[str, int]]:
    """The collectives of a compiled program, with the bytes of what each gives a device."""
    found = []
    for types, kind in re.findall(rf"= (.+?) ({KINDS})(?:-start)?\(", program):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", types)
        size = sum(
            SIZES[name] * int(np.prod([*map(int, filter(None, of.split(",")))]))
            for name, of in shapes
        )
        found.append((kind, size))
    return found


def described(case: Case, dim: str, found: list[tuple[str, int]]) -> str:
    """What is exchanged, in the units of the table."""
    tokens = EXTENTS["S"] * (EXTENTS["B"] if "packed" not in case.name else 1)
    heads = tokens * (EXTENTS["H"] + EXTENTS["K"])
    texts = {}
    for kind, size in found:
        if kind == "all-reduce" and size % (4 * tokens) == 0 and dim not in ("B", "S", "M"):
            text = f"{size // (4 * tokens)}T"
        elif kind == "all-reduce" and "norm_rope" in case.name and size % (4 * heads) == 0:
            text = f"{size // (4 * heads)}H"
        elif kind == "all-reduce":
            text = "scalar" if size <= 8 else "token sum"
        elif kind == "all-gather" and is_in(SMALL, case, dim):
            text = "tables gathered"
        elif kind == "all-gather":
            text = "gathered"
        else:
            text = kind
        texts[text] = None
    return "; ".join(texts) or "nothing"


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collects warnings, those that were given before among them."""
    gathering._told.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(one.message) for one in found if "gathers" in str(one.message)]


@cache
def on_one_device(case: Case, entropy: int) -> Any:
    """Random arrays, and results and gradients by one device."""
    arrays = case.arrays(np.random.default_rng(entropy), **EXTENTS)
    outputs = jax.jit(case.outputs)(*arrays)
    return arrays, outputs, jax.jit(case.gradients)(*arrays) if case.has_gradient else ()


@pytest.fixture(scope="module")
def entropy() -> int:
    seed = int(os.environ.get("XENTILE_SEED", np.random.SeedSequence().entropy))
    print(f"seed: {seed}")
    return seed


def run(case: Case, dim: str, way: str, entropy: int) -> tuple[list[str], list[str]]:
    """Compiles and runs; returns what is exchanged forward and backward, and the warnings."""
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((COUNT,), ("model",), axis_types=(kind,), devices=jax.devices()[:COUNT])
    arrays, *expected = on_one_device(case, entropy)
    texts = []
    with jax.set_mesh(mesh), recorded_warnings() as warned:
        sharded = placed(case, dim, mesh, arrays)
        for function, right in zip((case.outputs, case.gradients), expected, strict=True):
            if function == case.gradients and not case.has_gradient:
                continue
            program = jax.jit(function).lower(*sharded).compile()
            found = exchanged(program.as_text())
            texts.append(described(case, dim, found))
            limit = sum(one.nbytes for one in arrays)
            if not (dim in case.gathered or is_in(GATHERED, case, dim)):
                gathered = sum(size for name, size in found if name == "all-gather")
                assert gathered <= (limit // 8 if is_in(SMALL, case, dim) else 0), (found, limit)
                moved = sum(size for name, size in found if name != "all-reduce")
                assert moved <= limit, (found, limit)
            for one, other in zip(program(*sharded), right, strict=True):
                scale = max(np.abs(np.asarray(other, np.float64)).max(initial=0), 1)
                np.testing.assert_allclose(
                    np.asarray(one, np.float64), np.asarray(other, np.float64), atol=1e-4 * scale
                )
    return texts, warned


def cells() -> list[Any]:
    return [
        pytest.param(case, dim, id=f"{case.name}-{dim}")
        for case in CASES
        # A mesh may cut its heads alone, as test_decoding.py does.
        if case.name != "paged_attention"
        for dim in dims_of(case)
    ]


def is_gathered(case: Case, dim: str, way: str) -> bool:
    """Whether XLA must gather the axis: explicit axes refuse it, but tell how tokens lie."""
    if way == "explicit" and "linear" in case.name and dim == "S":
        return False
    return dim in case.gathered or is_in(GATHERED, case, dim)


def is_refused(case: Case, dim: str, way: str) -> bool:
    return way == "explicit" and (is_gathered(case, dim, way) or is_in(REFUSED, case, dim))


# Of documented cells, the texts of each way, forward and backward.
FOUND: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)


def ways_and_cells() -> Iterator[Any]:
    """Every cell by two kinds of axes.

    Of further ways to call an operation, all but one with automatic axes are nightly, and of
    explicit axes that are taken all but an operation's first.
    """
    auto = [pytest.param("auto", *one.values, id=f"auto-{one.id}") for one in cells()]
    yield from auto if UPDATES else one_a_further_way(auto)
    first = {case.name.split(" ")[0]: case.name for case in reversed(CASES)}
    for one in cells():
        case, dim = one.values
        taken = [name for name in dims_of(case) if not is_refused(case, name, "explicit")]
        is_few = first[case.name.split(" ")[0]] == case.name and dim not in taken[1:]
        marks = () if UPDATES or is_few else (pytest.mark.nightly,)
        yield pytest.param("explicit", *one.values, id=f"explicit-{one.id}", marks=marks)


@pytest.mark.fixed
@pytest.mark.parametrize(("way", "case", "dim"), [*ways_and_cells()])
def test_what_devices_exchange(entropy: int, way: str, case: Case, dim: str) -> None:
    if is_refused(case, dim, way):
        with pytest.raises(ValueError, match="reshard"):
            run(case, dim, way, entropy)
        texts = ["refused"]
    else:
        texts, warned = run(case, dim, way, entropy)
        is_told = way == "auto" and any("gathered" in one for one in texts)
        if is_told and is_gathered(case, dim, way):
            assert any("XLA gathers it on each" in one and " bytes" in one for one in warned)
        elif not is_in(SMALL, case, dim) and not is_gathered(case, dim, way):
            assert warned == []
    # One text where both passes exchange the same.
    found = FOUND[case.name, dim][way] = " / ".join(dict.fromkeys(texts))
    if IS_DOCUMENTED:
        assert documented()[case.name, dim, way] == found, "XENTILE_UPDATE_DOCS=1 writes the table"


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["cached", "gspmd"])
@pytest.mark.parametrize(("case", "dim"), cells())
def test_what_devices_exchange_otherwise(
    entropy: int, case: Case, dim: str, way: str, tmp_path: Path
) -> None:
    """With JAX's cache on disk the same; by GSPMD results are the same, and tokens stay."""
    if way == "gspmd":
        if dim in ("B", "H") and "linear" not in case.name:
            with by_shardy(False):
                run(case, dim, "auto", entropy)
        return
    name = "jax_compilation_cache_dir"
    try:
        jax.config.update(name, str(tmp_path))
        texts, _ = run(case, dim, "auto", entropy)
    finally:
        jax.config.update(name, None)
    # Other programs have them in another order.
    right = documented()[case.name, dim, "auto"].split(" / ")
    right *= len(texts) // len(right)
    assert [{*one.split("; ")} for one in texts] == [{*one.split("; ")} for one in right]


# A packed text, and a tensor with one scale, are no problems of their own in parts.
ALONE = [
    pytest.param(case, id=case.name)
    for case in CASES
    if "packed" not in case.name and not case.name.startswith("fp8_quantize")
]


@pytest.mark.fixed
@pytest.mark.parametrize("case", one_an_operation(ALONE))
def test_devices_of_shard_map_exchange_nothing(entropy: int, case: Case) -> None:
    """Each has a part of the batch, and what all share."""
    arrays, *_ = on_one_device(case, entropy)
    mesh = jax.make_mesh((COUNT,), ("model",), axis_types=(AxisType.Auto,))
    has_batch = [one.dims[0] == "B" for one in case.arguments]
    specs = tuple(PartitionSpec("model") if one else PartitionSpec() for one in has_batch)

    def run_shard(*own: jax.Array) -> list[jax.Array]:
        return [jnp.atleast_1d(one) for one in case.outputs(*own)]

    mapped = jax.shard_map(run_shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("model"))
    program = jax.jit(mapped).lower(*arrays).compile()
    assert exchanged(program.as_text()) == []
    expected = []
    for number in range(COUNT):
        pairs = zip(arrays, has_batch, strict=True)
        own = [one[number : number + 1] if is_sharded else one for one, is_sharded in pairs]
        expected.append(jax.jit(run_shard)(*own))
    for number, one in enumerate(program(*arrays)):
        right = np.concatenate([np.asarray(found[number]) for found in expected])
        np.testing.assert_allclose(np.asarray(one), right, atol=1e-4 * max(np.abs(right).max(), 1))


@pytest.mark.fixed
@pytest.mark.newest
@pytest.mark.parametrize(
    "case", one_an_operation(pytest.param(case, id=case.name) for case in CASES)
)
def test_programs_for_meshes_that_have_no_devices(rng: np.random.Generator, case: Case) -> None:
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    dim = "S" if "packed" in case.name else "B"
    arrays = [
        jax.ShapeDtypeStruct(
            one.shape,
            one.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(*("data" if name == dim else None for name in of.dims))
            ),
        )
        for one, of in zip(case.arrays(rng, **EXTENTS), case.arguments, strict=True)
    ]
    function = case.gradients if case.has_gradient else case.outputs
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cpu",)).as_text()
    assert "CustomSPMDPartitioning" not in text and "InspectSharding" not in text


@cache
def documented() -> dict[tuple[str, str, str], str]:
    """What the table in the docs says of each case, axis and way."""
    found = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `"):
            names, dims, *texts = [one.strip() for one in line.strip("|").split("|")]
            for name, dim in product(names.split(", "), dims.split(", ")):
                for way, text in zip(WAYS, texts, strict=True):
                    found[name.strip("`"), dim, way] = texts[0] if text == "same" else text
    return found


def rows() -> list[str]:
    """Returns the table's rows; axes with the same texts share a row, as do such functions."""
    names = defaultdict(list)
    for case in CASES:
        by_texts = defaultdict(list)
        for dim in dims_of(case):
            auto, explicit = (FOUND[case.name, dim][way] for way in WAYS)
            by_texts[auto, "same" if explicit == auto else explicit].append(dim)
        cells = [f"{', '.join(dims)} | {' | '.join(texts)}" for texts, dims in by_texts.items()]
        names[tuple(cells)].append(f"`{case.name}`")
    return [f"| {', '.join(of)} | {cell} |" for cells, of in names.items() for cell in cells]


@pytest.fixture(scope="module", autouse=True)
def write_table() -> Iterator[None]:
    """Writes the table where that is asked for, once all cells have run."""
    yield
    if UPDATES:
        lines = DOCS.read_text().splitlines()
        first = next(index for index, line in enumerate(lines) if line.startswith("| function")) + 2
        after = next(
            (i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines)
        )
        DOCS.write_text("\n".join([*lines[:first], *rows(), *lines[after:]]) + "\n")
