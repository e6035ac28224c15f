"""Blocks sharded over `model`: values, gradients, collectives, and what a device holds."""

import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Runner
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train.config import Config, Hybrid, InputError, Options, resolve
from train.shards import embed_on_mesh
from train.step import Program, make_program, with_kernels

# Columns that are one array where no device has a shard of them.
PACKED = [("q", "k", "v"), ("gate", "up"), ("x", "b", "c"), ("b", "a")]
ONE_A_HEAD = ("log_rate", "dt_bias", "skip")
COLLECTIVE = re.compile(r"= \S+ (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")


def config_of(mesh: str, changes: dict[str, Any], **options: Any) -> Config:
    config = resolve(Options(**{"model_size": "test", "dtype": "float32", "mesh": mesh} | options))
    return with_kernels(
        dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    )


def compiled(program: Program, batch: Any) -> tuple[Any, Any]:
    """The loss with all gradients, compiled, and its arguments."""
    arguments = program.initial()["params"], jax.device_put(batch, program.batch_sharding())
    return jax.jit(jax.value_and_grad(program.loss)).lower(*arguments).compile(), arguments


def packed(tree: Any, name: str = "") -> Any:
    """Gradients with the arrays of one device."""
    if not isinstance(tree, dict):
        return np.asarray(tree)
    names = next((one for one in PACKED if tree.keys() == {*one}), None)
    if names is not None:
        # A convolution has a row a column, behind the axis of layers.
        return np.concatenate([tree[one] for one in names], axis=1 if name == "conv" else -1)
    return {name: packed(one, name) for name, one in tree.items()}


def in_loops(text: str) -> list[Counter[str]]:
    """Collectives of each computation of a program but its entry, where there are any."""
    parts = (part for part in text.split("\n\n") if not part.lstrip().startswith("ENTRY"))
    return [found for part in parts if (found := Counter(COLLECTIVE.findall(part)))]


def compared(rng: np.random.Generator, config: Config, whole: Config) -> tuple[Any, Any, Any]:
    """Compares loss and gradients with one device's; both programs, and arguments of the first."""
    shape = config.batch, config.length
    batch = {
        "tokens": rng.integers(0, 512, shape),
        "labels": rng.integers(0, 512, shape),
        "segments": np.sort(rng.integers(0, 3, shape), -1),
        "positions": np.broadcast_to(np.arange(shape[1]), shape),
    }
    batch["labels"][:, :3] = -100
    batch = {name: array.astype(np.int32) for name, array in batch.items()}
    run, arguments = compiled(make_program(config), batch)
    loss, gradients = run(*arguments)
    alone, given = compiled(make_program(whole), batch)
    right, expected = alone(*given)
    np.testing.assert_allclose(loss, right, rtol=1e-6)

    def check(path: Any, one: Any, other: Any) -> None:
        # What heads have one number of has large terms of both signs.
        of_head = any(getattr(key, "key", "") in ONE_A_HEAD for key in path)
        limit = (3e-5 if of_head else 3e-6) * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, packed(gradients), packed(expected))
    return run, alone, arguments


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("model=4", {"kv_heads": 4, "qkv_bias": True, "tied": False}),
        # Two devices share a head of keys.
        ("data=2,fsdp=2,model=2", {"kv_heads": 1, "qkv_bias": True}),
    ],
)
def test_loss_and_gradients_are_one_devices(
    rng: np.random.Generator, mesh: str, changes: dict[str, Any]
) -> None:
    config = config_of(mesh, changes)
    run, alone, arguments = compared(rng, config, config_of("", changes))
    shards = math.prod(size for axis, size in config.mesh.items() if axis != "data")
    places, _ = run.input_shardings[0]
    for leaf, place in zip(jax.tree.leaves(arguments[0]), jax.tree.leaves(places), strict=True):
        is_matrix = leaf.ndim > 2 or leaf.shape[0] == config.model.vocab
        own = math.prod(place.shard_shape(leaf.shape))
        assert not is_matrix or own * shards == leaf.size, (leaf.shape, place)
    found = in_loops(run.as_text())
    if mesh == "model=4":
        # A block gathers rows twice and scatters sums twice, and so does its backward pass.
        assert found == [Counter({"all-gather": 2, "reduce-scatter": 2})] * 2
    else:
        # Four weights too, again for the backward pass; and the shared head, with its bias.
        assert [one["all-gather"] for one in found] == [2 + 4 + 2, 2 + 4]
    temporary = [one.memory_analysis().temp_size_in_bytes for one in (run, alone)]
    assert temporary[0] < 0.7 * temporary[1]


def test_mixers_are_sharded_by_heads(rng: np.random.Generator) -> None:
    """Groups of Mamba-2 are sharded, and devices share heads of keys of the delta rule."""
    pattern = Hybrid("MD", 4, 16, 8, 4, 4, 2, 8, 8)
    changes = {"hybrid": pattern, "layers": 4}
    sizes: dict[str, Any] = {"batch_size": 2, "context_length": 16}
    config = config_of("model=4", changes, **sizes)
    run, _, arguments = compared(rng, config, config_of("", changes, **sizes))
    # Each block gathers rows and scatters sums, twice with a feed-forward layer.
    assert in_loops(run.as_text()) == [Counter({"all-gather": 3, "reduce-scatter": 3})] * 2
    places, _ = run.input_shardings[0]
    for name, every in (("00M", True), ("01D", False)):
        own = places["blocks"][name]["mixer"]["inner"]
        whole = arguments[0]["blocks"][name]["mixer"]["inner"]
        for part, place in own.items():
            is_cut = every or part == "v"
            found = place.shard_shape(whole[part].shape)[-1]
            assert found * (4 if is_cut else 1) == whole[part].shape[-1], (name, part)


@pytest.mark.parametrize("letters", ["MA", "DA"], ids=["mamba2", "delta"])
@pytest.mark.parametrize("mesh", ["data=2", "data=4", "fsdp=2", "fsdp=4"])
def test_mixers_beside_attention_over_data_and_weights(
    rng: np.random.Generator, mesh: str, letters: str
) -> None:
    """Packed texts begin anywhere in a row, so states are reset on every device."""
    changes = {"hybrid": Hybrid(letters, 4, 16, 8, 4, 4, 2, 8, 8), "layers": 2}
    sizes: dict[str, Any] = {"batch_size": 4, "context_length": 24}
    config = config_of(mesh, changes, **sizes)
    run, *_ = compared(rng, config, config_of("", changes, **sizes))
    summed = Counter(COLLECTIVE.findall(run.as_text()))
    assert summed["all-reduce"] or summed["reduce-scatter"]


def test_devices_may_have_the_whole_residual_stream(rng: np.random.Generator) -> None:
    """Of a sequence that the devices do not divide."""
    sizes: dict[str, Any] = {"batch_size": 2, "context_length": 15}
    config = config_of("model=2", {}, sequence_parallel="off", **sizes)
    run, _, _ = compared(rng, config, config_of("", {}, **sizes))
    assert in_loops(run.as_text()) == [Counter({"all-reduce": 2})] * 2


def test_unpacked_arrays_are_not_resumed_packed(train: Runner, tmp_path: Path) -> None:
    train(num_train_steps=1, mesh="model=2", checkpoint_dir=tmp_path)
    with pytest.raises(InputError, match="has packed False and the run True: resume with the opt"):
        train(num_train_steps=2, resume=tmp_path)


@pytest.mark.parametrize(("length", "collectives"), [(8, {"all-gather"}), (64, {"all-reduce"})])
def test_devices_gather_cotangents_of_an_embedding_where_these_are_less(
    length: int, collectives: set[str]
) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    place = NamedSharding(mesh, P("data"))
    table = jax.device_put(jax.random.normal(jax.random.key(0), (64, 8)), NamedSharding(mesh, P()))
    tokens = jax.device_put(jnp.arange(4 * length).reshape(4, -1) % 50, place)

    def total(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return (embed_on_mesh(place, jnp.float32, table, tokens) ** 3).sum()

    gradient = jax.jit(jax.grad(total)).lower(table, tokens).compile()
    assert {*COLLECTIVE.findall(gradient.as_text() or "")} == collectives
    wanted = jax.grad(lambda table: (table[np.asarray(tokens)] ** 3).sum())(np.asarray(table))
    np.testing.assert_allclose(gradient(table, tokens), wanted, rtol=1e-5)
