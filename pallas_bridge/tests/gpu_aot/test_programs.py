"""What XLA makes of our calls on GPUs: what is moved around them, what they hold, what is sent."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import pallas_bridge
from pallas_bridge import generation

MIB = 2**20
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
# An instruction of a shape, or of several.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.+?) ([a-z][\w-]*)\(")
Gpus = Callable[[int], Any]


class Compiled:
    """A function compiled for such arrays."""

    def __init__(self, function: Any, arrays: Any, **options: Any) -> None:
        """Compiles it; options are those of `jax.jit`."""
        traced = jax.jit(function, **options).trace(*arrays)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        self.text = compiled.as_text()
        self.memory = compiled.memory_analysis()
        # As they are run.
        self.calls = re.findall(r'custom_call_target="xentile_(\w+)"', self.text)

    def bytes_of(self, *opcodes: str) -> list[int]:
        """The bytes of results of instructions, within others too; what is sent, once."""
        found = []
        for line in self.text.splitlines():
            if (one := INSTRUCTION.match(line)) and one[2].removesuffix("-start") in opcodes:
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", one[1])
                of_each = [
                    BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
                    for dtype, dims in shapes
                ]
                found.append(max(of_each))
        return found

    def moved(self, least: int) -> list[int]:
        """The bytes of copies and transposes of so many bytes and more."""
        return [size for size in self.bytes_of("copy", "transpose") if size >= least]


def placed(device: Any, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


def total(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).sum()


@pytest.mark.parametrize("is_donated", [False, True])
def test_logits_are_read_where_they_lie(gpus: Gpus, is_donated: bool) -> None:
    (device,) = gpus(1)
    tokens, vocab = 2048, 151936
    arrays = (placed(device, tokens, vocab), placed(device, tokens, dtype=jnp.int32))

    def loss(logits: Any, labels: Any) -> Any:
        return pallas_bridge.cross_entropy(logits, labels, donate_logits=is_donated)

    donated = {"donate_argnums": 0} if is_donated else {}
    step = Compiled(jax.value_and_grad(loss), arrays, **donated)
    assert step.calls == ["cross_entropy_fused"]
    assert step.moved(MIB) == [] and step.memory.temp_size_in_bytes < MIB
    assert step.memory.alias_size_in_bytes == is_donated * 2 * tokens * vocab
    alone = Compiled(loss, arrays)
    assert alone.calls == ["cross_entropy_forward"] and alone.memory.temp_size_in_bytes < MIB


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", [None, 128 * MIB])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(2048, 1024, 151936), (16384, 4096, 32000)])
def test_a_linear_loss_holds_what_its_plan_says(
    gpus: Gpus, tokens: int, width: int, vocab: int, budget: int | None, reduction: Any
) -> None:
    (device,) = gpus(1)
    hidden, weight = placed(device, tokens, width), placed(device, vocab, width)
    options: dict[str, Any] = {"reduction": reduction, "max_scratch_bytes": budget}
    plan = pallas_bridge.explain(hidden, weight, platform="cuda", **options)
    assert plan.schedule == "library"

    def loss(*arrays: Any) -> Any:
        return pallas_bridge.linear_cross_entropy(*arrays, **options).sum()

    labels = placed(device, tokens, dtype=jnp.int32)
    step = Compiled(jax.value_and_grad(loss, (0, 1)), (hidden, weight, labels))
    # Where a budget has logits made again, passes are calls of their own.
    names = ["fused"] if plan.products < 4 else ["forward", "backward"]
    assert step.calls == [f"linear_cross_entropy_{name}" for name in names]
    held = step.memory.temp_size_in_bytes
    assert plan.scratch_bytes / 2 < held <= plan.scratch_bytes + MIB, (held, plan)
    assert step.moved(MIB) == []


@pytest.mark.parametrize("is_packed", [False, True])
def test_heads_are_attended_to_where_products_leave_them(gpus: Gpus, is_packed: bool) -> None:
    (device,) = gpus(1)
    batch, length, width, heads, kv_heads, columns = 4, 1024, 1024, 16, 8, 128
    of_q, of_kv = heads * columns, kv_heads * columns

    def block(x: Any, to_q: Any, to_k: Any, to_v: Any, out: Any, segments: Any) -> Any:
        q, k, v = (
            (x @ weight).reshape(batch, length, -1, columns) for weight in (to_q, to_k, to_v)
        )
        options = {"segment_ids": segments} if is_packed else {}
        o = pallas_bridge.flash_attention(
            q, k, v, causal=True, implementation="custom_call", **options
        )
        return total(o.reshape(batch, length, of_q) @ out)

    weights = [placed(device, width, n) for n in (of_q, of_kv, of_kv)]
    segments = placed(device, batch, length, dtype=jnp.int32)
    arrays = (placed(device, batch, length, width), *weights, placed(device, of_q, width), segments)
    step = Compiled(jax.grad(block, (0, 1, 2, 3, 4)), arrays)
    assert step.calls == ["flash_attention_forward", "flash_attention_backward"]
    # XLA may turn weights for its products, but no array of tokens.
    assert step.moved(2 * batch * length * of_kv) == []
    # Logits alone would be as many.
    assert step.memory.temp_size_in_bytes < 2 * batch * heads * length * length


def test_a_gated_layer_after_a_norm(gpus: Gpus) -> None:
    (device,) = gpus(1)
    tokens, width, ffn = 4096, 1024, 3072

    def layer(x: Any, weight: Any, up: Any, down: Any) -> Any:
        y, stream = pallas_bridge.rms_norm(x, weight, residual=x)
        return total(stream + pallas_bridge.swiglu(y @ up) @ down)

    weight = placed(device, width, dtype=jnp.float32)
    arrays = (
        *(placed(device, tokens, width), weight),
        *(placed(device, width, 2 * ffn), placed(device, ffn, width)),
    )
    step = Compiled(jax.grad(layer, (0, 1, 2, 3)), arrays)
    names = ["rms_norm_add_backward", "rms_norm_add_forward"]
    assert sorted(step.calls) == ["activation_backward", "activation_forward", *names]
    assert step.moved(2 * tokens * width) == []


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (pallas_bridge.swiglu, ["activation_forward"]),
        (pallas_bridge.geglu, ["activation_forward"]),
        (pallas_bridge.gelu, ["activation_forward"]),
        # XLA's program is the faster one in a block: configs/tuned/implementations.cuda.yaml.
        (pallas_bridge.squared_relu, []),
    ],
)
def test_what_runs_by_itself(gpus: Gpus, function: Any, calls: list[str]) -> None:
    (device,) = gpus(1)
    assert Compiled(function, (placed(device, 1024, 4096),)).calls == calls


@pytest.mark.parametrize("sharded", ["tokens", "vocabulary"])
def test_what_devices_send_for_a_loss(gpus: Gpus, sharded: str) -> None:
    mesh = Mesh(np.array(gpus(4)).reshape(2, 2), ("data", "model"))
    tokens, width, vocab = 8192, 1024, 151936
    of_vocab = "model" if sharded == "vocabulary" else None

    def over(*shape: int, axes: tuple[Any, ...], dtype: Any = jnp.bfloat16) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    labels = over(tokens, axes=("data",), dtype=jnp.int32)
    of_logits = Compiled(
        jax.value_and_grad(pallas_bridge.cross_entropy),
        (over(tokens, vocab, axes=("data", of_vocab)), labels),
    )
    linear = Compiled(
        jax.value_and_grad(pallas_bridge.linear_cross_entropy, (0, 1)),
        (
            over(tokens, width, axes=("data", None)),
            over(vocab, width, axes=(of_vocab, None)),
            labels,
        ),
    )
    for step in (of_logits, linear):
        assert step.bytes_of("all-gather", "all-to-all", "collective-permute") == []
    numbers = 4 * tokens // 2
    # Parts of a row send its largest logit, and then the sum and the label's, at once.
    assert max(of_logits.bytes_of("all-reduce")) <= 2 * numbers
    # What a device has of the weight's gradient, in f32 at most.
    gradient = 4 * vocab * width // (2 if of_vocab else 1)
    assert max(linear.bytes_of("all-reduce")) <= gradient
    held = of_logits.memory.temp_size_in_bytes
    assert held < MIB, held


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_of_decoding_copies_neither_weights_nor_cache(gpus: Gpus, batch: int) -> None:
    (device,) = gpus(1)
    config = generation.DecoderConfig(4, 1024, 16, 8, 128, 3072, 151936, qk_norm=True)

    def step(params: Any, cache: Any, tokens: Any, positions: Any) -> Any:
        return generation.decode_step(params, config, cache, tokens, positions)

    trees = (
        jax.eval_shape(lambda: generation.init_params(config)),
        jax.eval_shape(lambda: generation.init_cache(config, batch, 1024)),
        *2 * [jax.ShapeDtypeStruct((batch,), jnp.int32)],
    )
    arrays = jax.tree.map(lambda one: placed(device, *one.shape, dtype=one.dtype), trees)
    compiled = Compiled(step, arrays, donate_argnums=1)
    assert compiled.calls.count("flash_attention_paged") == 1
    assert compiled.moved(MIB) == [] and compiled.bytes_of("dynamic-update-slice", "scatter")
    assert compiled.memory.alias_size_in_bytes == sum(one.size * 2 for one in arrays[1])
    # Less than keys and values of a layer.
    assert compiled.memory.temp_size_in_bytes < compiled.memory.alias_size_in_bytes / config.layers


def test_eight_bit_adamw_steps_in_place(gpus: Gpus) -> None:
    (device,) = gpus(1)
    optimizer: Any = pallas_bridge.optax.adamw8bit(1e-3, implementation="custom_call")
    params = [placed(device, *shape) for shape in [(4096, 1024), (1024, 4096), (1024, 1024)] * 3]
    state = jax.tree.map(
        lambda leaf: placed(device, *leaf.shape, dtype=leaf.dtype),
        jax.eval_shape(optimizer.init, params),
    )

    def step(params: Any, state: Any, grads: Any) -> Any:
        return optimizer.update_and_apply(grads, state, params)

    found = Compiled(step, (params, state, params), donate_argnums=(0, 1))
    assert found.calls == ["adamw_8bit"]
    assert found.moved(0) == [] and found.memory.temp_size_in_bytes < MIB
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    assert found.memory.alias_size_in_bytes >= held - 64
