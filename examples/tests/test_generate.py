"""The command line of examples/generate: a checkpoint, random weights and bad input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from generate.__main__ import main
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "."]
RANDOM = ["--random", "test", "--prompt_tokens", "3"]
SPEED = r"\d+ tokens, [\d.]+ tokens/s, first token after \d+ ms, compiled in .* GiB"


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A checkpoint of a vocabulary of a few words."""
    d, f = 16, 24
    config = {
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(WORDS),
        "tie_word_embeddings": True,
        "eos_token_id": len(WORDS) - 1,
    }
    shapes = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d // 2, d),
        "self_attn.v_proj": (d // 2, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    named = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (len(WORDS), d), "model.norm.weight": (d,)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in named.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(8), strict=True)), "."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_checkpoint_continues_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(model), "--max_new_tokens", "6", "--temperature", "2"]
    assert main([*options, "--prompt", "the cat sat"]) == 0
    printed, reported = capsys.readouterr()
    assert set(printed.split()) <= {*WORDS} and 1 <= len(printed.split()) <= 6
    assert re.search(r" tokens, .* tokens/s, first token after \d+ ms", reported)
    # The first of two texts is what it is alone, as its seed is.
    assert main([*options, "--prompt", "the cat sat", "a mat"]) == 0
    both = capsys.readouterr().out.strip().split("\n\n")
    assert both[0] == printed.strip() and len(both) == 2


def test_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--random", "test", "--max_new_tokens", "5", "--top_p", "0.9", "--temperature", "1"]
    assert main([*options, "--prompt_tokens", "40"]) == 0
    printed, reported = capsys.readouterr()
    assert len([int(token) for token in printed.split()]) == 5
    assert re.search(SPEED, reported)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "gpt-5", "--prompt_tokens", "3"], "no preset gpt-5: choose from test, qwen"),
        (["--random", "test", "--prompt_tokens", "0"], "--prompt_tokens is 0; it must be at least"),
        (["--random", "test", "--prompt", "a"], "--random has no tokenizer: give --prompt_tokens"),
        (["--model", "nowhere", "--prompt", "a"], "nowhere has no tokenizer.json"),
        ([*RANDOM, "--top_k", "0", "--temperature", "1"], "top_k is 0; it must be a"),
        ([*RANDOM, "--top_p", "0.9"], "--top_p needs a temperature; add one"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert f"generate: error: {message}" in capsys.readouterr().err


def test_a_model_that_is_not_covered(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text('{"model_type": "mamba2"}')
    assert main(["--model", str(model), "--prompt", "a"]) == 2
    assert "model_type is 'mamba2'; it must be one of" in capsys.readouterr().err
