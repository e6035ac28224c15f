"""Hybrids: hidden states against recurrences in float64, initial values, and whole runs."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Runner
from flax import nnx
from train import breakdown, log, loop, mixers
from train.config import PRESETS, REMATS, Hybrid, InputError, Model, Options, Remat, resolve
from train.model import Kernels, Transformer, block_names
from train.step import make_model, with_kernels

# Of shapes and dtypes that numpy's types lose.
F64 = Any
STEPS = 4
# Of losses near 6.2 in float32.
SPREAD = 2e-4
TEST = PRESETS["hybrid-test"].model
BASELINE: dict[str, Any] = {
    f"{part}_kernel": "baseline"
    for part in ("norm", "mlp", "attention", "linear_attention", "conv")
} | {"ce_kernel_type": "baseline"}


def with_pattern(of: Model, pattern: str, layers: int, **changes: int) -> Model:
    assert of.hybrid is not None
    hybrid = dataclasses.replace(of.hybrid, pattern=pattern, **changes)
    return dataclasses.replace(of, layers=layers, vocab=50, hybrid=hybrid)


def norm(x: F64, weight: F64) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + TEST.norm_eps) * weight


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def softplus(x: F64) -> F64:
    return np.log1p(np.exp(x))


def convolved(x: F64, weight: F64, bias: F64, segments: Any) -> F64:
    """Of x [T, C], a token at a time."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(weight.shape[1]):
            if t >= back and len(set(segments[t - back : t + 1])) == 1:
                y[t] += weight[:, -1 - back] * x[t - back]
    return silu(y + bias)


def mamba2(of: Hybrid, w: Any, u: F64, segments: Any) -> F64:
    """Of u [T, D], a token at a time."""
    inner, states = of.ssm_heads * of.ssm_head_width, of.ssm_groups * of.ssm_state
    packed = convolved(u @ w["inner"], w["conv"], w["conv_bias"], segments)
    dt = softplus(u @ w["steps"] + w["dt_bias"])
    rows = []
    state = np.zeros((of.ssm_heads, of.ssm_state, of.ssm_head_width))
    for t in range(len(u)):
        if t and segments[t] != segments[t - 1]:
            state[:] = 0
        x = packed[t, :inner].reshape(of.ssm_heads, -1)
        b, c = packed[t, inner:].reshape(2, of.ssm_groups, -1)
        row = np.zeros_like(x)
        for h in range(of.ssm_heads):
            group = h // (of.ssm_heads // of.ssm_groups)
            decay = np.exp(-np.exp(w["log_rate"][h]) * dt[t, h])
            state[h] = decay * state[h] + np.outer(b[group], dt[t, h] * x[h])
            row[h] = c[group] @ state[h] + w["skip"][h] * x[h]
        rows.append(row.reshape(-1))
    assert packed.shape[1] == inner + 2 * states
    gated = (np.stack(rows) * silu(u @ w["gate"])).reshape(len(u), of.ssm_groups, -1)
    weight = w["group_norm"]["weight"].reshape(of.ssm_groups, -1)
    return norm(gated, weight).reshape(len(u), -1) @ w["out"]


def gated_delta_net(of: Hybrid, w: Any, u: F64, segments: Any) -> F64:
    """Of u [T, D], a token at a time."""
    keys, width = of.delta_key_heads * of.delta_key_width, of.delta_key_width
    packed = convolved(u @ w["inner"], w["conv"], 0.0, segments)
    b, a = np.split(u @ w["rates"], 2, axis=-1)
    strength, step = 1 / (1 + np.exp(-b)), softplus(a + w["dt_bias"])
    rows = []
    state = np.zeros((of.delta_heads, width, of.delta_value_width))
    for t in range(len(u)):
        if t and segments[t] != segments[t - 1]:
            state[:] = 0
        q, k = packed[t, : 2 * keys].reshape(2, of.delta_key_heads, width)
        q, k = (one / np.sqrt((one * one).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
        v = packed[t, 2 * keys :].reshape(of.delta_heads, -1)
        row = np.zeros_like(v)
        for h in range(of.delta_heads):
            group = h // (of.delta_heads // of.delta_key_heads)
            state[h] *= np.exp(-np.exp(w["log_rate"][h]) * step[t, h])
            missing = v[h] - k[group] @ state[h]
            state[h] += strength[t, h] * np.outer(k[group], missing)
            row[h] = q[group] @ state[h] / np.sqrt(width)
        rows.append(norm(row, w["norm"]["weight"]).reshape(-1))
    return (np.stack(rows) * silu(u @ w["gate"])) @ w["out"]


def reference(of: Model, params: Any, batch: dict[str, Any]) -> F64:
    """Hidden states [B, T, D] of a hybrid without attention."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    hybrid = of.hybrid
    assert hybrid is not None
    x = weights["embedding"][batch["tokens"]]
    for layer in range(of.layers):
        time, place = divmod(layer, len(hybrid.pattern))
        name = block_names(hybrid)[place]
        w = jax.tree.map(lambda leaf, at=time: leaf[at], weights["blocks"][name])
        mix = mamba2 if name.endswith("M") else gated_delta_net
        y = norm(x, w["norm1"]["weight"])
        pairs = zip(y, batch["segments"], strict=True)
        x = x + np.stack([mix(hybrid, w["mixer"], *pair) for pair in pairs])
        if name.endswith("D"):
            gate, up = np.split(norm(x, w["norm2"]["weight"]) @ w["up"], 2, axis=-1)
            x = x + (silu(gate) * up) @ w["down"]
    return norm(x, weights["norm"]["weight"])


def batch_of(rng: np.random.Generator, length: int = 9) -> dict[str, Any]:
    tokens = rng.integers(0, 50, (2, length)).astype(np.int32)
    segments = np.cumsum(rng.random((2, length)) < 0.3, axis=1).astype(np.int32)
    positions = np.zeros((2, length), np.int32) + np.arange(length, dtype=np.int32)
    return {"tokens": tokens, "segments": segments, "positions": positions}


def drawn(rng: np.random.Generator, of: Model, kernel: Any, **options: Any) -> tuple[Any, Any]:
    """A model's graph, and weights that are large, so that gates and decays differ."""
    kernels = Kernels(*[kernel] * 5)
    abstract = nnx.eval_shape(lambda: Transformer(of, kernels, rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(abstract)
    return graph, jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.4, leaf.shape), jnp.float32),
        nnx.to_pure_dict(state),
    )


@pytest.mark.parametrize("kernel", ["baseline", "ours"])
@pytest.mark.parametrize("changes", [{}, {"ssm_groups": 2, "delta_key_heads": 2}])
def test_hidden_states(rng: np.random.Generator, kernel: Any, changes: dict[str, int]) -> None:
    """Texts are packed."""
    of = with_pattern(TEST, "MD", 4, **changes)
    graph, params = drawn(rng, of, kernel)
    batch = batch_of(rng)
    model = nnx.merge(graph, params)
    hidden = model({name: jnp.asarray(array) for name, array in batch.items()}, jnp.float32)
    expected = reference(of, params, batch)
    assert np.allclose(hidden, expected, rtol=1e-3, atol=2e-4 * np.abs(expected).max())


def test_blocks_of_attention_are_the_transformer(rng: np.random.Generator) -> None:
    of = with_pattern(TEST, "A", 2)
    graph, state = nnx.split(Transformer(of, Kernels(), rngs=nnx.Rngs(0)))
    plain = dataclasses.replace(of, hybrid=None)
    other, _ = nnx.split(Transformer(plain, Kernels(), rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    batch = {name: jnp.asarray(array) for name, array in batch_of(rng).items()}
    found = nnx.merge(graph, params)(batch, jnp.float32)
    params = {**params, "blocks": params["blocks"]["00A"]}
    assert jnp.array_equal(found, nnx.merge(other, params)(batch, jnp.float32))


@pytest.mark.few(0)
@pytest.mark.parametrize("kernel", ["baseline", "ours"])
def test_remat_changes_no_gradient(rng: np.random.Generator, kernel: Any) -> None:
    of = with_pattern(TEST, "MDA", 3)
    batch = {name: jnp.asarray(array) for name, array in batch_of(rng).items()}
    _, params = drawn(rng, of, kernel)

    def gradient(remat: Remat) -> Any:
        graph, _ = drawn(rng, of, kernel, remat=remat)

        def loss(params: Any) -> jax.Array:
            return jnp.sum(nnx.merge(graph, params)(batch, jnp.float32) ** 3)

        return jax.jit(jax.grad(loss))(params)

    plain, *others = (jax.tree.leaves(gradient(remat)) for remat in REMATS)
    assert all(jnp.abs(one).max() > 0 for one in plain)
    for again in others:
        for one, other in zip(plain, again, strict=True):
            assert jnp.allclose(one, other, rtol=1e-3, atol=1e-4 * jnp.abs(one).max())


def test_selective_counts_blocks(rng: np.random.Generator) -> None:
    graph, params = drawn(rng, with_pattern(TEST, "MD", 6), "baseline", remat="selective:3")
    batch = {name: jnp.asarray(array) for name, array in batch_of(rng).items()}
    steps = jax.make_jaxpr(lambda params: nnx.merge(graph, params)(batch, jnp.float32))(params)
    text = steps.pretty_print(use_color=False)
    # The scan of a repeat each: none of its blocks, the last one, both.
    kept = ["sums", "sums", "sums", "products_and_sums", *["products_and_sums"] * 2]
    assert re.findall(r"policy=<function save_(\w+) ", text) == kept


def test_begins_as_the_authors_do() -> None:
    """Steps log-uniform, rates uniform, both within their bounds; no two blocks alike."""
    of = with_pattern(TEST, "MD", 4, ssm_heads=512, delta_heads=512)
    blocks = nnx.to_pure_dict(nnx.state(Transformer(of, Kernels(), rngs=nnx.Rngs(3))))["blocks"]
    for name, bounds in (("00M", mixers.MAMBA_RATES), ("01D", mixers.DELTA_RATES)):
        mixer = blocks[name]["mixer"]
        # Uniform in a variable: its quartiles are those of its bounds.
        for found, (low, high) in (
            (np.log(softplus(np.asarray(mixer["dt_bias"], np.float64))), np.log(mixers.STEPS)),
            (np.exp(mixer["log_rate"]), bounds),
        ):
            shares = (found - low) / (high - low)
            assert (shares > -1e-5).all() and (shares < 1 + 1e-5).all()
            assert np.allclose(np.quantile(shares, (0.25, 0.5, 0.75)), (0.25, 0.5, 0.75), atol=0.08)
        bound = np.abs(mixer["conv"]).max()
        assert 0.45 < bound <= 0.5
    assert (blocks["00M"]["mixer"]["skip"] == 1).all()
    gates = [blocks[name]["mixer"]["gate"][at] for name in blocks for at in range(2)]
    spreads = [float(np.std(gate)) for gate in gates]
    assert np.allclose(spreads, 0.02, rtol=0.05) and len(set(spreads)) == len(gates)


def test_the_preset_has_309_million_parameters() -> None:
    config = resolve(Options("hybrid-0.5b"))
    abstract = nnx.eval_shape(lambda: make_model(with_kernels(config)))
    leaves = jax.tree.leaves(nnx.state(abstract, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == 309_186_880
    of = config.model
    assert of.hybrid is not None and of.hybrid.pattern * 4 == "MDMA" * 4 and of.layers == 16


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    """The baseline's curve on one device, in float32."""
    text = (Path(__file__).resolve().parents[2] / "README.md",)
    given = {"num_train_steps": STEPS, "text": text, "dtype": "float32", **BASELINE}
    return list(loop.train(Options("hybrid-test", **given)).losses.values())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "data=2,fsdp=2,model=2"},
        {"remat": "selective", "layer_loop": "unrolled"},
        {**BASELINE, "linear_attention_kernel": "ours", "conv_kernel": "ours"},
    ],
    ids=["mesh", "all", "mixers"],
)
def test_kernels_and_meshes_train_the_same(
    train: Runner, one_device: list[float], options: dict[str, Any]
) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md",)
    given = {"model_size": "hybrid-test", "num_train_steps": STEPS, "dtype": "float32"}
    losses = train(**given, text=text, **options).losses
    assert np.abs(np.array(list(losses.values())) - one_device).max() < SPREAD


def test_a_run_from_its_checkpoint(train: Runner, tmp_path: Path) -> None:
    """It goes on bit for bit, in a log that names kernels and blocks; and no other pattern does."""
    of: dict[str, Any] = {"model_size": "hybrid-test", "block_pattern": "MD", "remat": "attention"}
    lines: list[str] = []
    whole = train(num_train_steps=STEPS, say=lines.append, **of).losses
    prefix = "blocks MD, linear attention "
    assert any(prefix in line and ", convolution " in line for line in lines)
    first = train(num_train_steps=2, checkpoint_dir=tmp_path / "made", **of).losses
    given = {"resume": tmp_path / "made", "log": tmp_path / "run.jsonl"}
    second = train(num_train_steps=STEPS, **given, **of).losses
    assert {**first, **second} == whole
    begun = log.read(tmp_path / "run.jsonl")[0]["config"]
    assert begun["model"]["hybrid"]["pattern"] == begun["block_pattern"] == "MD"
    assert begun["linear_attention_kernel"] in ("baseline", "ours")
    with pytest.raises(InputError, match=r"has hybrid \{'pattern': 'MD'.* and the run \{.*'DM'"):
        train(num_train_steps=STEPS, resume=tmp_path / "made", **{**of, "block_pattern": "DM"})


@pytest.mark.few(0)
def test_profile_has_the_parts_of_a_hybrid(train: Runner, tmp_path: Path) -> None:
    lines: list[str] = []
    given = {"profile": tmp_path / "p", "log": tmp_path / "run.jsonl", "say": lines.append}
    train(model_size="hybrid-test", **given)
    (record,) = (one for one in log.read(tmp_path / "run.jsonl") if one["record"] == "breakdown")
    assert set(record["share"]) == {*breakdown.PARTS, breakdown.OTHER}
    for part in ("attention", "linear_attention", "delta_rule", "convolution", "gates"):
        assert record["share"][part] > 0, part
