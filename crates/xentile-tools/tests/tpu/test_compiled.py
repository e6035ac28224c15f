"""`pallas_bridge` in programs compiled for TPUs by libtpu, with none at hand.

TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m pytest crates/xentile-tools/tests/tpu
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_bridge import (
    cross_entropy,
    cross_entropy_per_token,
    flash_attention,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
MIB = 1 << 20


def compiled(topology: str, function: Any, *arguments: tuple[tuple[int, ...], Any]) -> Any:  # noqa: ANN401 (no public type)
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*of, sharding=sharding) for of in arguments]
    return jax.jit(function).lower(*shapes).compile()


def made_by(text: str, *shapes: str) -> set[str]:
    """What makes bf16 arrays of the shapes; within a fusion nothing is written."""
    entry = text[text.index("\nENTRY ") :]
    return {
        made for shape in shapes for made in re.findall(rf"= bf16\[{shape}\]\S* ([\w-]+)\(", entry)
    }


# A vocabulary of whole registers has its rows in order, another one has its tokens as lanes.
@pytest.mark.few(2)
@pytest.mark.parametrize("vocab", [128256, 151643])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_logits_of_a_product_are_neither_copied_nor_transposed(topology: str, vocab: int) -> None:
    tokens, hidden = 2048, 128

    def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(x @ w, labels)

    program = compiled(
        topology,
        jax.value_and_grad(loss, argnums=(0, 1)),
        ((tokens, hidden), jnp.bfloat16),
        ((hidden, vocab), jnp.bfloat16),
        ((tokens,), jnp.int32),
    )
    text = program.as_text()
    assert "xentile_cross_entropy_fused" in text
    made = made_by(text, f"{tokens},{vocab}", f"1,{vocab},{tokens}")
    assert made and not {"copy", "copy-start", "transpose"} & made, made
    # Logits and their gradient, as HBM pads them, and no more than scratch.
    if vocab % 128 == 0:
        logits = re.findall(rf"bf16\[{tokens},{vocab}\]\{{([\d,]+)[:}}]", text)
        assert logits and set(logits) == {"1,0"}
    padded = -(-vocab // 16) * 16
    beyond = program.memory_analysis().temp_size_in_bytes - 2 * tokens * padded * 2
    print(f"{topology}: {beyond / MIB:.2f} MiB beyond logits and gradient")
    assert beyond <= MIB


@pytest.mark.few(2)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_logits_that_enter_a_program_are_not_copied(topology: str) -> None:
    gradient = jax.value_and_grad(lambda x, labels: cross_entropy(x, labels))
    arrays = ((2048, 151643), jnp.bfloat16), ((2048,), jnp.int32)
    program = compiled(topology, gradient, *arrays)
    made = made_by(program.as_text(), "2048,151643", "1,151643,2048")
    assert made and not {"copy", "copy-start", "transpose"} & made, made
    assert program.memory_analysis().temp_size_in_bytes <= MIB


@pytest.mark.few(2)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_logits_of_sequences_with_a_bias_are_not_copied(topology: str) -> None:
    batch, length, hidden, vocab = 4, 512, 256, 51643

    def loss(x: jax.Array, w: jax.Array, bias: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(x @ w + bias, labels)

    program = compiled(
        topology,
        jax.value_and_grad(loss, argnums=(0, 1, 2)),
        ((batch, length, hidden), jnp.bfloat16),
        ((hidden, vocab), jnp.bfloat16),
        ((vocab,), jnp.bfloat16),
        ((batch, length), jnp.int32),
    )
    shapes = f"{batch},{length},{vocab}", f"{batch},{vocab},{length}"
    made = made_by(program.as_text(), *shapes)
    assert made and not {"copy", "copy-start", "transpose"} & made, made


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_kernel_and_option_compiles(topology: str, dtype: Any) -> None:  # noqa: ANN401 (a dtype)
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}

    def everything(x: jax.Array, labels: jax.Array) -> Any:  # noqa: ANN401 (a tree of arrays)
        def per_token(x: jax.Array) -> jax.Array:
            loss, logps = cross_entropy_per_token(x, labels, **options)
            return jnp.sum(loss * logps)

        fused = jax.value_and_grad(lambda x: cross_entropy(x, labels, **options))
        return fused(x), jax.grad(per_token)(x)

    text = compiled(topology, everything, ((37, 1031), dtype), ((37,), jnp.int32)).as_text()
    for kernel in ("fused", "forward", "backward"):
        assert f"xentile_cross_entropy_{kernel}" in text


@pytest.mark.parametrize("shape", [(1, 131), (5, 1), (3, 2, 257)], ids=str)
def test_shapes_smaller_than_a_register_compile(shape: tuple[int, ...]) -> None:
    gradient = jax.grad(lambda x, labels: cross_entropy(x, labels))
    for dtype in (jnp.bfloat16, jnp.float32):
        text = compiled("v6e:2x2", gradient, (shape, dtype), (shape[:-1], jnp.int32)).as_text()
        assert "xentile_cross_entropy_fused" in text


# Each compiles for half a minute.
@pytest.mark.few(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"), [(8192, 2048, 128256), (8192, 1536, 151936)], ids=str
)
def test_logits_of_the_linear_form_are_in_vmem_alone(
    reduction: Any,  # noqa: ANN401 (a literal)
    tokens: int,
    hidden: int,
    vocab: int,
) -> None:
    def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(linear_cross_entropy(x, w, labels, reduction=reduction))

    program = compiled(
        "v6e:2x2",
        jax.value_and_grad(loss, argnums=(0, 1)),
        ((tokens, hidden), jnp.bfloat16),
        ((vocab, hidden), jnp.bfloat16),
        ((tokens,), jnp.int32),
    )
    text = program.as_text()
    assert "xentile_linear_cross_entropy_backward" in text
    # One kernel makes both gradients.
    assert not re.findall("xentile_linear_cross_entropy_backward_(?:hidden|weight)", text)
    memory = program.memory_analysis()
    print(f"{tokens} x {hidden} x {vocab}: {memory.temp_size_in_bytes / MIB:.2f} MiB")
    assert memory.temp_size_in_bytes <= 16 * MIB
    assert memory.output_size_in_bytes <= (tokens + vocab) * hidden * 2 + MIB


def test_sums_of_dhidden_beyond_vmem_are_in_hbm_once() -> None:
    tokens, hidden, vocab = 40000, 1000, 2560

    def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:  # noqa: ANN401 (an array)
        return linear_cross_entropy(x, w, labels, max_scratch_bytes=256 * MIB)

    program = compiled(
        "v6e:2x2",
        jax.value_and_grad(loss, argnums=(0, 1)),
        ((tokens, hidden), jnp.bfloat16),
        ((vocab, hidden), jnp.bfloat16),
        ((tokens,), jnp.int32),
    )
    text = program.as_text()
    assert not re.findall("xentile_linear_cross_entropy_backward_(?:hidden|weight)", text)
    # Operands of that width may come in another layout, of which XLA makes a copy.
    copies = 3 * (tokens + vocab) * 1024 * 2
    sums = 4 * 1024 * 40 * 1024
    assert sums <= program.memory_analysis().temp_size_in_bytes <= sums + copies + 16 * MIB


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_option_of_the_linear_form_compiles(topology: str, dtype: Any, axis: int) -> None:  # noqa: ANN401 (a dtype)
    tokens, hidden, vocab = 300, 200, 1031
    options: Any = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "vocab_axis": axis}

    def everything(x: jax.Array, w: jax.Array, bias: jax.Array, labels: jax.Array) -> Any:  # noqa: ANN401 (a tree of arrays)
        def per_token(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
            loss, logps = linear_cross_entropy_per_token(x, w, labels, bias=bias, **options)
            return jnp.sum(loss * logps)

        def plain(x: jax.Array) -> jax.Array:
            return linear_cross_entropy(x, w, labels, vocab_axis=axis)

        return jax.grad(per_token, (0, 1, 2))(x, w, bias), jax.value_and_grad(plain)(x)

    text = compiled(
        topology,
        everything,
        ((tokens, hidden), dtype),
        ((hidden, vocab) if axis else (vocab, hidden), dtype),
        ((vocab,), jnp.float32),
        ((tokens,), jnp.int32),
    ).as_text()
    for kernel in ("forward", "backward", "backward_hidden"):
        assert f"xentile_linear_cross_entropy_{kernel}" in text


@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_operands_of_the_linear_form_smaller_than_a_register_compile(
    dtype: Any,  # noqa: ANN401 (a dtype)
    shape: tuple[int, int, int],
) -> None:
    tokens, hidden, vocab = shape
    gradient = jax.grad(lambda *of: linear_cross_entropy(*of, vocab_axis=0), (0, 1))
    arrays = (((tokens, hidden), dtype), ((vocab, hidden), dtype), ((tokens,), jnp.int32))
    text = compiled("v6e:2x2", gradient, *arrays).as_text()
    assert "xentile_linear_cross_entropy_backward" in text


def test_the_linear_form_on_a_mesh_compiles() -> None:
    devices = topologies.get_topology_desc("v6e:2x2", platform="tpu").devices
    mesh = jax.make_mesh(
        (4,), ("tokens",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )
    cut, whole = jax.P("tokens"), jax.P()

    def array(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 (no public type)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    arrays = (
        array((1024, 256), jnp.bfloat16, cut),
        array((5120, 256), jnp.bfloat16, whole),
        array((1024,), jnp.int32, cut),
    )

    def total(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, w, labels, reduction="sum")

    def run_shard(*of: jax.Array) -> jax.Array:
        return jax.lax.psum(total(*of), "tokens")

    mapped = jax.shard_map(run_shard, mesh=mesh, in_specs=(cut, whole, cut), out_specs=whole)
    for function, has_kernels in ((mapped, True), (total, False)):
        program = jax.jit(jax.value_and_grad(function, (0, 1))).lower(*arrays).compile()
        # XLA cannot cut a kernel: where it cuts tokens itself, there are chunks of the vocabulary.
        assert ("xentile_linear_cross_entropy_backward" in program.as_text()) == has_kernels


@pytest.mark.few(2)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_compiles_to_splash_attention(topology: str, head_dim: int) -> None:
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:  # noqa: ANN401 (a tree of arrays)
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return flash_attention(q, k, v, causal=True, softcap=50.0).astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    of_queries = ((1, 1024, 4, head_dim), jnp.bfloat16)
    of_keys = ((1, 1024, 2, head_dim), jnp.bfloat16)
    program = compiled(topology, step, of_queries, of_keys, of_keys)
    assert "splash" in program.as_text()
    # No logits [4, 1024, 1024] in f32.
    assert program.memory_analysis().temp_size_in_bytes < 4 * 1024 * 1024 * 4
