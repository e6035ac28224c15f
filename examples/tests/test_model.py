"""The model's hidden states and its loss, against the same formulas in float64 and loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train.config import LAYER_LOOPS, PRESETS, REMATS, LayerLoop, Model
from train.losses import loss_of
from train.model import Kernels, Transformer, is_masked, rotate, rotate_and_pack

# Of shapes and dtypes that numpy's types lose.
F64 = Any


def norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: F64, place: int, theta: float) -> F64:
    """A head's columns as complex numbers, rotated."""
    half = len(x) // 2
    turn = np.exp(1j * place * theta ** (-np.arange(half) / half))
    rotated_head = (x[:half] + 1j * x[half:]) * turn
    return np.concatenate([rotated_head.real, rotated_head.imag])


def reference(of: Model, params: Any, batch: dict[str, Any]) -> F64:
    """Hidden states [B, T, D], a token at a time."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = weights["embedding"][batch["tokens"]]
    count, length = batch["tokens"].shape
    q_columns, kv_columns = of.heads * of.head_width, of.kv_heads * of.head_width
    for layer in range(of.layers):
        w = jax.tree.map(lambda leaf, at=layer: leaf[at], weights["blocks"])
        qkv = norm(x, w["norm1"]["weight"], of.norm_eps) @ w["qkv"] + w.get("bias", 0.0)
        mixed = np.zeros((count, length, q_columns))
        for b in range(count):
            keys: dict[tuple[int, int], F64] = {}
            queries: dict[tuple[int, int], F64] = {}
            values: dict[tuple[int, int], F64] = {}
            for t in range(length):
                place = int(batch["positions"][b, t])
                row = qkv[b, t].reshape(-1, of.head_width)
                for h in range(of.heads + of.kv_heads):
                    head = row[h]
                    if of.qk_norm:
                        name = "q_norm" if h < of.heads else "k_norm"
                        head = norm(head, w[name]["weight"], of.norm_eps)
                    rotated_head = rotated(head, place, of.rope_theta)
                    if h < of.heads:
                        queries[t, h] = rotated_head
                    else:
                        keys[t, h - of.heads] = rotated_head
                for h in range(of.kv_heads):
                    values[t, h] = qkv[b, t, q_columns + kv_columns :].reshape(-1, of.head_width)[h]
            for t in range(length):
                before = [
                    s for s in range(t + 1) if batch["segments"][b, s] == batch["segments"][b, t]
                ]
                for h in range(of.heads):
                    group = h // (of.heads // of.kv_heads)
                    scores = np.array([queries[t, h] @ keys[s, group] for s in before])
                    scores = np.exp((scores - scores.max()) / np.sqrt(of.head_width))
                    at = slice(h * of.head_width, (h + 1) * of.head_width)
                    mixed[b, t, at] = sum(
                        score * values[s, group]
                        for score, s in zip(scores / scores.sum(), before, strict=True)
                    )
        x = x + mixed @ w["out"]
        packed = norm(x, w["norm2"]["weight"], of.norm_eps) @ w["up"]
        gate, up = packed[..., : of.ffn], packed[..., of.ffn :]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]
    return norm(x, weights["norm"]["weight"], of.norm_eps)


@pytest.mark.parametrize("kernel", ["baseline", "ours"])
@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": False, "qkv_bias": True, "tied": False, "kv_heads": 1}]
)
def test_hidden_states_and_loss(
    rng: np.random.Generator, kernel: Any, changes: dict[str, Any]
) -> None:
    """Weights are large, so that attention is not even and rounding would show."""
    of = dataclasses.replace(PRESETS["test"].model, vocab=50, **changes)
    model = Transformer(of, Kernels(kernel, kernel, kernel), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), jnp.float32),
        nnx.to_pure_dict(state),
    )
    segments = np.array([[0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 0], [0, 0, 1, 2, 3, 4, 5]], np.int32)
    tokens = rng.integers(0, 50, (2, 7)).astype(np.int32)
    batch = {"tokens": tokens, "segments": segments, "positions": positions}
    model = nnx.merge(graph, params)
    hidden = model({name: jnp.asarray(array) for name, array in batch.items()}, jnp.float32)
    expected = reference(of, params, batch)
    assert np.allclose(hidden, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())

    labels = rng.integers(0, 50, (2, 7)).astype(np.int32)
    labels[0, 3] = labels[1, 0] = -100
    logits = expected @ np.asarray(model.head, np.float64).T
    shifted = logits - logits.max(-1, keepdims=True)
    logps = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    of_tokens = [-logps[at][label] for at, label in np.ndenumerate(labels) if label >= 0]
    for loss in ("baseline", "fused", "fused_linear"):
        found = loss_of(loss, jnp.asarray(expected, jnp.float32), model.head, jnp.asarray(labels))
        assert np.isclose(found, np.mean(of_tokens), rtol=1e-4), loss


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["baseline", "ours"])
def test_remat_and_loop_change_no_gradient(rng: np.random.Generator, kernel: Any) -> None:
    of = dataclasses.replace(PRESETS["test"].model, vocab=50, qk_norm=False)
    tokens = jnp.asarray(rng.integers(0, of.vocab, (2, 8)), jnp.int32)
    zeros = jnp.zeros_like(tokens)
    batch = {"tokens": tokens, "segments": zeros, "positions": zeros + jnp.arange(8)}

    def gradient(remat: str, loop: LayerLoop) -> Any:
        kernels = Kernels(kernel, kernel, kernel)
        model = Transformer(of, kernels, remat=remat, loop=loop, rngs=nnx.Rngs(1))
        graph, state = nnx.split(model)

        def loss(params: Any) -> jax.Array:
            return jnp.sum(nnx.merge(graph, params)(batch, jnp.float32) ** 3)

        return jax.jit(jax.grad(loss))(nnx.to_pure_dict(state))

    programs = [(remat, loop) for loop in LAYER_LOOPS for remat in (*REMATS, "selective:1")]
    plain, *others = (jax.tree.leaves(gradient(*program)) for program in programs)
    for again in others:
        for one, other in zip(plain, again, strict=True):
            assert jnp.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_gradient_that_is_packed_has_the_bits_of_autodiff(rng: np.random.Generator) -> None:
    x, dy = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.bfloat16) for _ in range(2))
    tables = [jnp.asarray(rng.normal(size=(2, 5, 1, 4)), jnp.float32) for _ in range(2)]
    results = []
    for function in (rotate_and_pack, rotate):
        y, vjp = jax.vjp(lambda x, function=function: function(x, *tables), x)
        results.append([y, *vjp(dy)])
    for found, right in zip(*results, strict=True):
        assert jnp.array_equal(found, right)


def test_no_label_that_counts_gives_zero() -> None:
    hidden, head = jnp.ones((1, 3, 8)), jnp.ones((16, 8))
    labels = jnp.full((1, 3), -100)
    for loss in ("baseline", "fused", "fused_linear"):
        assert loss_of(loss, hidden, head, labels) == 0


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen3-0.6b", 596_049_920),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_presets_have_the_published_parameters(preset: str, parameters: int) -> None:
    of = PRESETS[preset].model
    abstract = nnx.eval_shape(lambda: Transformer(of, Kernels(), rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(abstract, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == parameters
    assert not is_masked(PRESETS[preset].context_length)
