"""The transformer of examples/train by size, policy and kernels; random data."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train.model
from train.config import Config, Model, Options
from train.step import Program, make_program

import pallas_bridge

Array = jax.Array
Cell = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Narrow(Program):
    """A program whose parameters, gradients and optimizer state are bfloat16."""

    def _initial(self) -> Any:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), super()._initial()["params"])
        return {"params": params, "optimizer": self.optimizer.init(params)}


def program_of(cell: Cell) -> Program:
    """The training program of a cell."""
    model = Model(
        vocab=cell["vocab"],
        width=cell["width"],
        layers=cell["layers"],
        heads=cell["heads"],
        kv_heads=cell["kv_heads"],
        head_width=cell["head_width"],
        ffn=cell["ffn"],
        tied=bool(cell["tied"]),
        qk_norm=bool(cell["qk_norm"]),
    )
    layer = {"xla": "baseline", "ours": "ours"}
    options = Options(
        norm_kernel=layer[cell["norm"]],
        mlp_kernel=layer[cell["mlp"]],
        ce_kernel_type={"xla": "baseline", "ours": "fused_linear"}[cell["loss"]],
        dtype="float32" if cell["policy"] == "float32" else "bfloat16",
        attention_kernel="baseline",
        remat="full" if cell["remat"] else "none",
        seed=cell["seed"],
    )
    program = make_program(Config(model, cell["batch"], cell["length"], {}, options))
    if cell["policy"] == "bfloat16":
        return Narrow(program.config, program.graph, program.optimizer, program.mesh)
    return program


def parameters(program: Program) -> Any:
    """A program's parameters before the first step; for `jax.jit`."""
    return program._initial()["params"]


def pass_of(program: Program, mode: str) -> Callable[[Any, Any], Any]:
    """The function of parameters and a batch: `forward`, or `forward_backward`."""
    return program.loss if mode == "forward" else jax.value_and_grad(program.loss)


def attend(kernel: str, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [B, T, N, H] to k and v [B, T, K, H] by a kernel, without a mask."""
    if kernel == "ours":
        return pallas_bridge.flash_attention(q, k, v, causal=True)
    implementation: Any = kernel
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


@contextmanager
def attention_by(kernel: str) -> Iterator[None]:
    """Replaces the attention of examples/train by a kernel while programs are traced.

    Sequences are one document each, so that its mask has nothing to hide and is left out.
    """
    with in_place_of("attend", lambda _, q, k, v, within: attend(kernel, q, k, v)):
        yield


def op_by_op(program: Program, params: Any, mode: str) -> Callable[[Any], Any]:
    """A function of a batch that runs a pass op by op, with arrays of its own for each layer.

    Of a stack the backward pass would add up as many gradients of its whole size as it has layers.
    """
    rest = {name: of for name, of in params.items() if name != "blocks"}
    layers = [
        jax.tree.map(lambda leaf: leaf[i], params["blocks"])  # noqa: B023
        for i in range(program.config.model.layers)
    ]

    def loss(rest: Any, layers: Any, batch: Any) -> Any:
        def in_turn(steps: Any, carry: Any, _: Any) -> Any:
            for index, layer in enumerate(layers):
                carry = steps[index % len(steps)](carry, layer)
            return carry

        with in_place_of("over_layers", in_turn):
            return program.loss({**rest, "blocks": params["blocks"]}, batch)

    run = loss if mode == "forward" else jax.value_and_grad(loss, argnums=(0, 1))

    def call(batch: Any) -> Any:
        with jax.disable_jit():
            return run(rest, layers, batch)

    return call


@contextmanager
def in_place_of(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of examples/train's model while programs are traced."""
    before = getattr(train.model, name)
    setattr(train.model, name, function)
    try:
        yield
    finally:
        setattr(train.model, name, before)


def random_batch(cell: Cell) -> dict[str, Array]:
    """Random tokens and labels, one document in each sequence."""
    rng = np.random.default_rng(cell["seed"])
    shape = (cell["batch"], cell["length"])
    tokens, labels = (rng.integers(0, cell["vocab"], shape, dtype=np.int32) for _ in range(2))
    positions = np.broadcast_to(np.arange(cell["length"], dtype=np.int32), shape)
    batch = {"tokens": tokens, "labels": labels, "positions": positions}
    placed: dict[str, Array] = jax.device_put({**batch, "segments": np.ones(shape, np.int32)})
    return placed


def tree_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
