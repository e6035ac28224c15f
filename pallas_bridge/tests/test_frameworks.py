"""The lines of docs/how-to/frameworks.md in each framework: loss and gradients are its own.

Each framework has an environment of its own, which scripts/tiers/frameworks.sh makes.
"""

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.pages import DOCS, blocks

VOCABULARY = 96
TEXTS, TOKENS = 8, 16
# Of targets' names, and of what becomes one on a mesh.
NORM, ATTENTION = "xentile_rms_norm", "xentile_flash_attention"
LOSS = r"xentile_\w*cross_entropy|\blinear_cross_entropy"


def run_lines(package: str, **names: Any) -> None:
    """Runs the page's lines for a framework, which replace its functions in this process."""
    (block,) = [
        block for block in blocks(DOCS / "how-to" / "frameworks.md") if package in block.reasons
    ]
    exec(compile(block.text, block.name, "exec"), names)


def draw_tokens(rng: np.random.Generator, length: int = TOKENS) -> jax.Array:
    return jnp.asarray(rng.integers(0, VOCABULARY, (TEXTS, length)))


def move(rng: np.random.Generator) -> Callable[[Any], Any]:
    """Returns a function that perturbs a parameter: some start at 0 or at 1."""

    def moved(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)

    return moved


def check(found: Any, wanted: Any) -> None:
    """Compares loss and gradients; each gradient differs by less than 1e-5 of its largest entry."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        most = float(jnp.abs(other).max())
        assert most > 0
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * most)


def find_kernels(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """Returns which kernels a function calls."""
    jaxpr = str(jax.make_jaxpr(function)(*arguments))
    return {name for name in (NORM, ATTENTION, LOSS) if re.search(name, jaxpr)}


def evaluate(loss: Callable[[Any], tuple[Any, Any]], model: Any) -> tuple[Any, set[str]]:
    """Returns the outputs and gradients of a loss of a flax.nnx model, and the kernels called.

    `loss` returns the loss and another output.
    """
    from flax import nnx

    graph, state = nnx.split(model)
    names = find_kernels(lambda state: loss(nnx.merge(graph, state)), state)
    outputs, gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)
    return (outputs, nnx.to_pure_dict(gradients)), names


@pytest.mark.needs("maxtext")
def test_maxtext(rng: np.random.Generator, tmp_path: Path) -> None:
    """On a mesh, with texts packed in rows, padding, and a z-loss."""
    import maxtext
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.models.models import Transformer
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    tokens = draw_tokens(rng, TOKENS + 1)
    texts = jnp.asarray([[1] * 6 + [2] * 8 + [0] * 2] * TEXTS)
    data = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_segmentation": texts,
        "targets_segmentation": texts,
        "inputs_position": jnp.tile(jnp.arange(TOKENS), (TEXTS, 1)),
    }
    moved = None

    def run(**options: Any) -> tuple[Any, set[str]]:
        nonlocal moved
        config = pyconfig.initialize(
            ["", str(base)],
            run_name="test",
            base_output_directory=str(tmp_path),
            enable_checkpointing=False,
            skip_jax_distributed_system=True,
            decoder_block="llama2",
            base_emb_dim=32,
            base_mlp_dim=64,
            base_num_decoder_layers=2,
            base_num_query_heads=4,
            base_num_kv_heads=2,
            head_dim=8,
            vocab_size=VOCABULARY,
            max_target_length=TOKENS,
            per_device_batch_size=TEXTS / jax.device_count(),
            dtype="float32",
            matmul_precision="highest",
            enable_dropout=False,
            z_loss_multiplier=1e-2,
            **options,
        )
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        with jax.set_mesh(mesh):
            model = Transformer(config, mesh, None, rngs=nnx.Rngs(0))
            if moved is None:
                moved = jax.tree.map(move(rng), nnx.state(model, nnx.Param))
            nnx.update(model, moved)

            def loss(model: Any) -> Any:
                found, outputs = train.loss_fn(model, config, dict(data), None, None)
                return found, outputs["z_loss"]

            return evaluate(loss, model)

    wanted, names = run(attention="dot_product")
    assert not names
    run_lines("maxtext")
    found, names = run(attention="cudnn_flash_jax", num_vocab_tiling=2)
    assert names == {NORM, ATTENTION, LOSS}
    check(found, wanted)


@pytest.mark.needs("levanter")
def test_levanter(rng: np.random.Generator) -> None:
    """With texts packed in rows, masked tokens, and a weight of lse^2."""
    import equinox as eqx
    import haliax as hax
    from levanter.layers.attention import AttentionMask
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample

    def build(backend: str) -> Any:
        config = LlamaConfig(
            max_seq_len=TOKENS,
            hidden_dim=32,
            intermediate_dim=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            attn_backend=backend,
            gradient_checkpointing=False,
        )
        return config.model_type.init(hax.Axis("vocab", VOCABULARY), config, key=jax.random.key(0))

    theirs = build("vanilla")
    axes = hax.Axis("batch", TEXTS), theirs.Pos
    texts = hax.named(jnp.asarray([[0] * 6 + [1] * 10, [0] * 9 + [1] * 7] * (TEXTS // 2)), axes)
    example = LmExample(
        tokens=hax.named(draw_tokens(rng), axes),
        loss_weight=hax.named(jnp.asarray(rng.integers(0, 2, (TEXTS, TOKENS)), "f"), axes),
        attn_mask=AttentionMask.causal().with_segment_ids(texts),
    )

    def loss(model: Any) -> Any:
        return model.compute_next_token_loss(example, logsumexp_weight=1e-2).scalar()

    parameters, theirs = eqx.partition(theirs, eqx.is_inexact_array)
    parameters = jax.tree.map(move(rng), parameters)
    _, ours = eqx.partition(build("nvte"), eqx.is_inexact_array)

    def run(static: Any) -> tuple[Any, set[str]]:
        def compute(parameters: Any) -> Any:
            return loss(eqx.combine(parameters, static))

        names = find_kernels(compute, parameters)
        found, gradients = jax.jit(jax.value_and_grad(compute))(parameters)
        return (found, jax.tree.leaves(gradients)), names

    wanted, names = run(theirs)
    assert not names
    run_lines("levanter")
    # Parameters carry the structure of the model, with the backend.
    parameters = jax.tree.unflatten(
        jax.tree.structure(eqx.filter(build("nvte"), eqx.is_inexact_array)),
        jax.tree.leaves(parameters),
    )
    found, names = run(ours)
    assert names == {NORM, ATTENTION, LOSS}
    check(found, wanted)


@pytest.mark.needs("easydel")
def test_easydel(rng: np.random.Generator) -> None:
    """On a mesh, with padding, and a z-loss."""
    # Some of its models need torch; none but this one is imported.
    modules = types.ModuleType("easydel.modules")
    spec = importlib.util.find_spec("easydel")
    assert spec is not None and spec.origin is not None
    modules.__path__ = [str(Path(spec.origin).parent / "modules")]
    sys.modules["easydel.modules"] = modules

    from easydel.infra.loss_utils import LossConfig
    from easydel.modules.llama import LlamaConfig, LlamaForCausalLM
    from flax import nnx

    tokens = draw_tokens(rng)
    is_token = jnp.ones((TEXTS, TOKENS), bool).at[0, 11:].set(False)
    moved = None

    def run(mechanism: str) -> tuple[Any, set[str]]:
        nonlocal moved
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            attn_mechanism=mechanism,
            attn_dtype=jnp.float32,
        )
        model = LlamaForCausalLM(
            config=config,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            rngs=nnx.Rngs(0),
        )
        if moved is None:
            moved = jax.tree.map(move(rng), nnx.state(model, nnx.Param))
        nnx.update(model, moved)

        def loss(model: Any) -> Any:
            options = {"attention_mask": is_token, "loss_config": LossConfig(z_loss=1e-2)}
            _, metrics = model.compute_loss(input_ids=tokens, **options)
            return metrics.loss, metrics.weight_sum.astype("float32")

        with model.mesh:
            return evaluate(loss, model)

    wanted, names = run("vanilla")
    assert not names
    run_lines("easydel")
    found, names = run("xentile")
    assert names == {NORM, ATTENTION, LOSS}
    check(found, wanted)


@pytest.mark.needs("tunix")
def test_tunix(rng: np.random.Generator) -> None:
    """With prompts that take no part in the loss."""
    import optax
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        norm_eps=1e-5,
        rope_theta=10_000,
        weight_tying=False,
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(move(rng), nnx.state(model, nnx.Param)))
    options = peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.1), options)
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    inputs = {
        "input_tokens": draw_tokens(rng),
        "input_mask": jnp.ones((TEXTS, TOKENS), bool).at[0, :5].set(False),
        "positions": jnp.tile(jnp.arange(TOKENS), (TEXTS, 1)),
        "attention_mask": jnp.tile(causal, (TEXTS, 1, 1)),
    }

    def run() -> tuple[Any, set[str]]:
        loss = trainer.loss_fn
        return evaluate(lambda model: (loss(model, **inputs), None), model)

    wanted, names = run()
    assert not names
    run_lines("tunix", trainer=trainer)
    found, names = run()
    assert names == {NORM, LOSS}
    check(found, wanted)
