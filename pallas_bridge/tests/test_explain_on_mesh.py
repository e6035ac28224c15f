"""What `explain` says of one device of a mesh, beside programs that users write."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import mesh_of

from pallas_bridge import explain, linear_cross_entropy

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.only("cpu", "programs are compiled for CPUs"),
]

TOKENS, WIDTH, VOCAB = 256, 64, 2048
BOTH = ("data", "vocab")
# What shards hidden states and the weight [V, D], and a device's tokens and columns: none;
# tokens; the vocabulary; both; and as in FSDP, where each device takes the whole weight.
LAYOUTS: dict[str, Any] = {
    "whole": (P(), P(), 1, 1),
    "tokens": (P("data"), P(), 2, 1),
    "vocabulary": (P(), P("vocab"), 1, 4),
    "both": (P("data"), P("vocab"), 2, 4),
    "fsdp": (P(BOTH), P(BOTH), 8, 1),
    "fsdp by width": (P("data"), P(None, "data"), 2, 1),
}
Shape = jax.ShapeDtypeStruct


def placed(mesh: Any, dtype: Any, hidden: P, weight: P) -> tuple[Any, Any, Any, Any]:
    """Hidden states, weight, a bias and labels, as shapes on a mesh."""
    tokens = tuple(hidden)[:1]
    columns = () if "data" in str(weight) else tuple(weight)[:1]
    shapes = (
        ((TOKENS, WIDTH), dtype, hidden),
        ((VOCAB, WIDTH), dtype, weight),
        ((VOCAB,), "float32", P(*columns)),
        ((TOKENS,), "int32", P(*tokens)),
    )
    h, w, b, y = (Shape(*of, sharding=NamedSharding(mesh, spec)) for *of, spec in shapes)
    return h, w, b, y


def measured(memory: Any) -> tuple[int, int, int]:
    """Bytes of arguments, results and temporaries of a device."""
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return arguments, results, memory.temp_size_in_bytes


@pytest.mark.parametrize("way", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {}), ("float32", {"max_scratch_bytes": 3 << 20, "z_loss": 1e-4})],
    ids=["bfloat16", "float32"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_holds_what_explain_says(
    layout: str, dtype: str, options: dict[str, Any], way: str
) -> None:
    mesh = mesh_of((2, 4), way)
    *specs, token_shards, vocab_shards = LAYOUTS[layout]
    hidden, weight, bias, labels = placed(mesh, dtype, *specs)
    given = [hidden, weight, labels, *([bias] if dtype == "float32" else [])]
    of = tuple(index for index in range(len(given)) if index != 2)

    def loss(h: Any, w: Any, y: Any, b: Any = None) -> Any:
        return linear_cross_entropy(h, w, y, bias=b, **options)

    step = jax.jit(
        jax.value_and_grad(loss, of),
        in_shardings=tuple(one.sharding for one in given),
        out_shardings=(NamedSharding(mesh, P()), tuple(given[index].sharding for index in of)),
    )
    with jax.set_mesh(mesh):
        compiled = step.lower(*given).compile()
    plan = explain(hidden, weight, bias=bias if dtype == "float32" else None, **options)
    assert plan.memory is not None
    assert tuple(plan.memory) == measured(compiled.memory_analysis())
    assert "MiB on each device" in str(plan)
    # The plan is that of a device's shapes, and bytes of arguments are those of its arrays.
    assert plan.tokens <= TOKENS // token_shards and plan.columns <= VOCAB // vocab_shards
    arguments = sum(
        one.dtype.itemsize * int(jnp.prod(jnp.array(one.sharding.shard_shape(one.shape))))
        for one in given
    )
    assert plan.memory.arguments == arguments
    if vocab_shards == 1 and (layout, way) != ("whole", "explicit"):
        own = Shape((TOKENS // token_shards, WIDTH), dtype), Shape((VOCAB, WIDTH), dtype)
        own_bias = Shape((VOCAB,), "float32") if dtype == "float32" else None
        alone = explain(*own, bias=own_bias, platform="cpu", **options)
        assert alone.memory is None
        assert dataclasses.replace(plan, memory=None) == alone
    # The loop, or the call, that the plan names is that of the program.
    is_called = "xentile_linear_cross_entropy_" in str(compiled.as_text())
    assert is_called == (plan.schedule == "library")


def test_losses_of_tokens_have_cotangents() -> None:
    mesh = mesh_of((2, 4), "auto")
    hidden, weight, _, labels = placed(mesh, "bfloat16", P("data"), P("vocab"))
    cotangents = Shape((TOKENS,), "float32", sharding=labels.sharding)

    def step(h: Any, w: Any, y: Any, c: Any) -> Any:
        loss = partial(linear_cross_entropy, labels=y, reduction="none")
        losses, vjp = jax.vjp(loss, h, w)
        return losses, vjp(c)

    shardings = None, (hidden.sharding, weight.sharding)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=shardings).lower(hidden, weight, labels, cotangents)
    plan = explain(hidden, weight, reduction="none")
    assert plan.memory is not None
    assert tuple(plan.memory) == measured(lowered.compile().memory_analysis())


def test_a_named_axis_and_shard_map() -> None:
    mesh = mesh_of((1, 8), "auto")
    hidden, weight, _, labels = placed(mesh, "float32", P(), P("vocab"))
    seen: list[Any] = []

    def own_loss(h: Any, w: Any, y: Any) -> Any:
        seen.append(explain(h, w, axis_name="vocab", platform="cpu"))
        return linear_cross_entropy(h, w, y, axis_name="vocab")

    mapped = jax.shard_map(own_loss, mesh=mesh, in_specs=(P(), P("vocab"), P()), out_specs=P())
    step = jax.jit(
        jax.value_and_grad(mapped, (0, 1)),
        out_shardings=(None, (hidden.sharding, weight.sharding)),
    )
    compiled = step.lower(hidden, weight, labels).compile()
    plan = explain(hidden, weight)
    assert plan.memory is not None
    # Another program, whose scalars XLA may hold elsewhere.
    for said, held in zip(plan.memory, measured(compiled.memory_analysis()), strict=True):
        assert abs(said - held) <= 1024
    # Within `shard_map` it is the same plan, of arrays that no program is compiled for.
    assert dataclasses.replace(plan, memory=None) == seen[0]
    assert plan.columns <= VOCAB // 8 and plan.products > 3


@pytest.mark.fixed
@pytest.mark.parametrize(
    ("budget", "reduction", "passes"),
    [(1 << 20, "mean", {"fused"}), (1 << 18, "none", {"forward", "backward"})],
)
def test_whole_arrays_decide_how_many_passes_devices_run(
    budget: int, reduction: Any, passes: set[str]
) -> None:
    """One where their plan has one, else two, which are those of a loss of each token."""
    mesh = mesh_of((8, 1), "auto")
    hidden, weight, _, labels = placed(mesh, "bfloat16", P("data"), P())
    own = Shape((TOKENS // 8, WIDTH), "bfloat16"), Shape((VOCAB, WIDTH), "bfloat16")
    options: dict[str, Any] = {"max_scratch_bytes": budget}
    whole = explain(Shape((TOKENS, WIDTH), "bfloat16"), own[1], platform="cpu", **options)
    assert (whole.products >= 4) == (reduction == "none")
    found = dataclasses.replace(explain(hidden, weight, **options), memory=None)
    by_reduction = {
        name: explain(*own, reduction=name, platform="cpu", **options) for name in ("mean", "none")
    }
    assert by_reduction["mean"] != by_reduction["none"]
    assert found == by_reduction[reduction]
    step = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, **options), (0, 1)))
    with jax.set_mesh(mesh):
        text = step.lower(hidden, weight, labels).compile().as_text()
    assert {*re.findall(r"xentile_linear_cross_entropy_(\w+)", text)} == passes


def test_arrays_have_the_plan_of_their_devices() -> None:
    mesh = mesh_of((2, 4), "auto")
    shapes = placed(mesh, "float32", P("data"), P())[:2]
    arrays = [jax.device_put(jnp.ones(one.shape, one.dtype), one.sharding) for one in shapes]
    assert explain(*arrays) == explain(*shapes)


def test_meshes_that_do_not_fit_are_refused() -> None:
    mesh = mesh_of((2, 4), "auto")
    hidden, weight, bias, _ = placed(mesh, "float32", P("data"), P("vocab"))
    with pytest.raises(ValueError, match=r"platform is 'cuda'.* mesh of 'cpu' devices"):
        explain(hidden, weight, platform="cuda")
    unplaced = Shape(weight.shape, weight.dtype)
    with pytest.raises(ValueError, match=r"weight has the sharding None, and hidden.*jax\.P\(\)"):
        explain(hidden, unplaced)
    with pytest.raises(ValueError, match=r"bias has the sharding None"):
        explain(hidden, weight, bias=Shape(bias.shape, bias.dtype))
    other = mesh_of((4, 2), "auto")
    elsewhere = Shape(weight.shape, weight.dtype, sharding=NamedSharding(other, P()))
    with pytest.raises(ValueError, match=r"weight has the sharding .*'data': 4.* one mesh"):
        explain(hidden, elsewhere)
    abstract = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    nowhere = Shape(hidden.shape, hidden.dtype, sharding=NamedSharding(abstract, P("data")))
    with pytest.raises(ValueError, match=r"hidden is placed on AbstractMesh.* no devices"):
        explain(nowhere, weight)
    for name, shapes in {
        "hidden": (Shape((255, WIDTH), "float32", sharding=hidden.sharding), weight),
        "weight": (hidden, Shape((2047, WIDTH), "float32", sharding=weight.sharding)),
    }.items():
        text = rf"{name} has shape .* axis 0 is sharded over .* devices must divide it: pad it to"
        with pytest.raises(ValueError, match=text):
            explain(*shapes)
    with pytest.raises(ValueError, match="implementation is 'reference'"):
        explain(hidden, weight, implementation="reference")
