"""Checkpoints of Hugging Face, and decoders against those of transformers on the same weights.

What needs torch runs in an environment that scripts/tiers/frameworks.sh makes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.generation import kernel
from pallas_bridge._src.generation.checkpoints import OUTER, WHOLE
from pallas_bridge.generation import (
    decode_step,
    generate,
    init_cache,
    load_hugging_face,
    pack,
    prefill,
)

NEEDS_SAFETENSORS = pytest.mark.needs("safetensors")
LAYERS, LENGTH = 2, 24
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
SHAPES = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.q_proj.bias": (32,),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.k_proj.bias": (16,),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.v_proj.bias": (16,),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
V_BIAS = "model.layers.1.self_attn.v_proj.bias"


def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {name: (61, 32) for name in OUTER.values()} | {OUTER["norm"]: (32,)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in SHAPES.items()}
    return {name: rng.normal(size=shape).astype(jnp.bfloat16) for name, shape in shapes.items()}


def write(folder: Path, files: dict[str, dict[str, Any]], **changes: Any) -> Path:
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name, arrays in files.items():
        save_file(arrays, folder / name)
    return folder


@NEEDS_SAFETENSORS
def test_tensors_are_stacked(rng: np.random.Generator, tmp_path: Path) -> None:
    given = tensors(rng)
    config, params = load_hugging_face(write(tmp_path, {WHOLE: given}))
    assert config.qkv_bias and not config.tied_head
    assert {one.dtype for one in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    for index in range(LAYERS):
        layer = {name: given[f"model.layers.{index}.{name}"] for name in SHAPES}
        for ours, theirs in (
            ("qkv", [f"self_attn.{one}_proj.weight" for one in "qkv"]),
            ("qkv_bias", [f"self_attn.{one}_proj.bias" for one in "qkv"]),
            ("gate_up", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
            ("down", ["mlp.down_proj.weight"]),
        ):
            right = np.concatenate([layer[name] for name in theirs])
            assert (np.asarray(params["layers"][ours][index]) == right).all()
    # The same in two files, in another dtype, and with a tied head.
    names = [name for name in given if name != OUTER["head"]]
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = {file: {name: given[name] for name in part} for file, part in halves.items()}
    write(tmp_path, files, tie_word_embeddings=True)
    config, again = load_hugging_face(tmp_path, dtype=jnp.float32)
    assert config.tied_head and "head" not in again
    assert again["norm"].dtype == jnp.float32
    assert (again["layers"]["qkv"] == params["layers"]["qkv"]).all()


@NEEDS_SAFETENSORS
def test_matrices_are_packed_as_they_are_read(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Llama-3.2-1B with one layer.
    sizes = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048)}
    mlps = {"gate": (8192, 2048), "up": (8192, 2048), "down": (2048, 8192)}
    named = {f"self_attn.{name}_proj": shape for name, shape in sizes.items()}
    named |= {f"mlp.{name}_proj": shape for name, shape in mlps.items()}
    named |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (2048,))
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in named.items()}
    shapes |= {OUTER["embedding"]: (61, 2048), OUTER["head"]: (61, 2048), OUTER["norm"]: (2048,)}
    given = {
        name: rng.integers(0, 2**14, shape, np.uint16).view(jnp.bfloat16)
        for name, shape in shapes.items()
    }
    changes = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 2048}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
    folder = write(tmp_path, {WHOLE: given}, **changes, **heads)
    config, params = load_hugging_face(folder)
    monkeypatch.setattr(kernel, "is_there", lambda *_: True)
    right = pack(params, config, donate=True)
    found = load_hugging_face(folder, packed=True)[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, right))


@NEEDS_SAFETENSORS
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda one: one.pop(V_BIAS), ValueError, f"lacks the tensor {V_BIAS}, which its config"),
        (
            lambda one: one.update({V_BIAS: one[V_BIAS][1:]}),
            ValueError,
            rf"tensor {V_BIAS} has shape \(15,\); by config.json it must be \(16,\)",
        ),
        (
            lambda one: one.update({V_BIAS: one[V_BIAS].astype(np.int8)}),
            TypeError,
            f"tensor {V_BIAS} has dtype int8; it must be bfloat16",
        ),
        (
            lambda one: one.update({"model.layers.0.self_attn.o_proj.bias": one[V_BIAS]}),
            ValueError,
            "has the tensor model.layers.0.self_attn.o_proj.bias, which its config.json is not of",
        ),
    ],
    ids=["missing", "shape", "dtype", "unknown"],
)
def test_wrong_tensors_are_named(
    rng: np.random.Generator,
    tmp_path: Path,
    change: Callable[[Any], Any],
    error: type[Exception],
    message: str,
) -> None:
    given = tensors(rng)
    change(given)
    with pytest.raises(error, match=message):
        load_hugging_face(write(tmp_path, {WHOLE: given}))


@NEEDS_SAFETENSORS
def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_hugging_face(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load_hugging_face(write(tmp_path, {}))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0} | {
    "original_max_position_embeddings": 16
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 16}),
}


def make_model(rng: np.random.Generator, name: str, folder: Path) -> Any:
    """Writes transformers' model of random weights, and returns it."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    given = {key: value for key, value in CONFIG.items() if key != "model_type"} | changes
    config = getattr(transformers, f"{kind}Config")(**given, attn_implementation="eager")
    torch.manual_seed(int(rng.integers(2**31)))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn_like(value)
            value.copy_(
                1 + 0.3 * noise if "norm" in key else noise * max(value.shape[-1], 4) ** -0.5
            )
    model.save_pretrained(folder)
    return model


@NEEDS_SAFETENSORS
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    import torch

    model = make_model(rng, name, tmp_path)
    config, params = load_hugging_face(tmp_path)
    text = rng.integers(0, 61, (2, LENGTH))
    with torch.no_grad():
        right = model(torch.asarray(text)).logits.numpy()
    allowed = 2e-5 * np.abs(right).max()
    cache = init_cache(config, 2, LENGTH, dtype=jnp.float32)
    logits, cache = prefill(params, config, cache, text[:, :8])
    assert np.abs(logits - right[:, 7]).max() <= allowed
    for position in range(8, LENGTH):
        at = np.full(2, position)
        logits, cache = decode_step(params, config, cache, text[:, position], at)
        assert np.abs(logits - right[:, position]).max() <= allowed


@NEEDS_SAFETENSORS
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_greedy_text_is_that_of_transformers(
    rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    import torch

    model = make_model(rng, name, tmp_path)
    config, params = load_hugging_face(tmp_path)
    prompts = [rng.integers(0, 61, length).tolist() for length in (7, 1, 4)]
    found = generate(params, config, prompts, max_new_tokens=12)
    for prompt, tokens in zip(prompts, np.asarray(found.tokens), strict=True):
        with torch.no_grad():
            logits = model(torch.asarray([[*prompt, *tokens]])).logits[0].numpy()
        logits = logits[len(prompt) - 1 : -1]
        # Tokens are equal wherever the two best logits are further apart than rounding.
        assert (logits[np.arange(12), tokens] >= logits.max(-1) - 4e-5 * np.abs(logits).max()).all()


@NEEDS_SAFETENSORS
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers")
def test_bfloat16_is_as_near_as_that_of_transformers(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    import torch

    model = make_model(rng, "qwen3", tmp_path)
    text = rng.integers(0, 61, (2, LENGTH))
    with torch.no_grad():
        right = model(torch.asarray(text)).logits.numpy()[:, -1]
        theirs = model.bfloat16()(torch.asarray(text)).logits.float().numpy()[:, -1]
    config, params = load_hugging_face(tmp_path, dtype=jnp.bfloat16)
    found, _ = prefill(params, config, init_cache(config, 2, LENGTH), text)
    assert np.linalg.norm(found - right) <= 1.5 * np.linalg.norm(theirs - right)
