"""Parameters from checkpoints of Hugging Face, in safetensors."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..checks import DTYPES, check_dtype_named
from ..keywords import hinted
from . import kernel
from .config import DecoderConfig
from .parameters import MATRICES, Params, layer_shapes, outer_shapes, output_matrix

CONFIG = "config.json"
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
# Tensors of a layer, by our names: those of ours that are packed have several, stacked by rows.
LAYER = {
    "attention_norm": ["input_layernorm.weight"],
    "qkv": [f"self_attn.{one}_proj.weight" for one in "qkv"],
    "qkv_bias": [f"self_attn.{one}_proj.bias" for one in "qkv"],
    "q_norm": ["self_attn.q_norm.weight"],
    "k_norm": ["self_attn.k_norm.weight"],
    "out": ["self_attn.o_proj.weight"],
    "mlp_norm": ["post_attention_layernorm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}
OUTER = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


@hinted
def load_hugging_face(
    folder: str | Path, *, dtype: DTypeLike | None = None, packed: bool = False
) -> tuple[DecoderConfig, Params]:
    """Reads a checkpoint of Hugging Face, by `pip install 'pallas_bridge[generation]'`.

    Args:
      folder: with config.json and model.safetensors, or model.safetensors.index.json and the files
        that it names.
      dtype: bfloat16, float16 or float32; None for the embedding's.
      packed: whether matrices are packed as they are read, where there is a kernel that streams
        them: at the peak the memory is that of `pack` with `donate`, and of a layer more.

    Returns:
      The config, and parameters as `init_params` makes them or, packed, `pack` with `donate`, on
      the default device.

    Raises:
      FileNotFoundError: a file that is missing.
      ImportError: safetensors is not installed.
      TypeError: a tensor of another dtype, as of a quantised model.
      ValueError: a config that is not covered; a tensor that is missing, that the config has no
        place for, or of another shape than the config says.
    """
    folder = Path(folder)
    config = DecoderConfig.from_hugging_face(json.loads(_found(folder, CONFIG).read_text()))
    with ExitStack() as files:
        tensors = _open(folder, files)
        wanted = _names(config)
        for name in wanted - tensors.keys():
            raise ValueError(f"{folder} lacks the tensor {name}, which its config.json asks for")
        # Frequencies of RoPE follow from the config, and a tied head is the embedding.
        ignored = {OUTER["head"]} if config.tied_head else set()
        for name in tensors.keys() - wanted - ignored:
            if not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(f"{folder} has the tensor {name}, which its config.json is not of")
        return config, _read(config, tensors, dtype, packed)


def _found(folder: Path, name: str) -> Path:
    """Returns a file's path.

    Raises:
        FileNotFoundError: there is none.
    """
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {name}")
    return path


def _open(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Returns open files by the names of their tensors."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "load_hugging_face needs safetensors: run pip install 'pallas_bridge[generation]', or "
            "pip install safetensors"
        ) from error
    index = folder / INDEX
    paths = {WHOLE}
    if index.is_file():
        paths = set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, Any] = {}
    for path in sorted(paths):
        file = files.enter_context(safe_open(_found(folder, path), framework="numpy"))
        tensors |= dict.fromkeys(file.keys(), file)
    return tensors


def _names(config: DecoderConfig) -> set[str]:
    found = {OUTER[name] for name in outer_shapes(config)}
    return found | {
        name
        for index in range(config.layers)
        for one in layer_shapes(config)
        for name in _layer_names(index, one)
    }


def _layer_names(index: int, name: str) -> Iterator[str]:
    return (f"model.layers.{index}.{one}" for one in LAYER[name])


def _read(config: DecoderConfig, tensors: dict[str, Any], dtype: Any, is_packed: bool) -> Params:
    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        given = tuple(tensors[name].get_slice(name).get_shape())
        if given != shape:
            raise ValueError(f"tensor {name} has shape {given}; by config.json it must be {shape}")
        array: np.ndarray = tensors[name].get_tensor(name)
        if array.dtype not in DTYPES:
            raise TypeError(
                f"tensor {name} has dtype {array.dtype}; it must be bfloat16, float16 or float32"
            )
        return array

    outer = {name: read(OUTER[name], shape) for name, shape in outer_shapes(config).items()}
    dtype = check_dtype_named("dtype", outer["embedding"].dtype if dtype is None else dtype)
    head, gate = config.head_dim, config.mlp_size
    rows = {
        "qkv": [config.heads * head, config.kv_heads * head, config.kv_heads * head],
        "gate_up": [gate, gate],
    }
    rows["qkv_bias"] = rows["qkv"]
    shapes = layer_shapes(config)

    def fill(found: np.ndarray, index: int, name: str) -> None:
        start, (first, *rest) = 0, shapes[name]
        for tensor, size in zip(_layer_names(index, name), rows.get(name, [first]), strict=True):
            found[start : start + size] = read(tensor, (size, *rest))
            start += size

    def stack(name: str) -> Any:
        found = np.empty((config.layers, *shapes[name]), dtype)
        for index, layer in enumerate(found):
            fill(layer, index, name)
        return jnp.asarray(found)

    if not (
        is_packed and dtype == jnp.bfloat16 and kernel.covers(config) and kernel.is_there_for(())
    ):
        layers = {name: stack(name) for name in shapes}
        return {**{name: jnp.asarray(one, dtype) for name, one in outer.items()}, "layers": layers}
    packed = jnp.zeros(kernel.packed_shape(config), dtype)
    for index in range(config.layers):
        layer = {name: np.empty(shapes[name], dtype) for name in MATRICES}
        for name, matrix in layer.items():
            fill(matrix, index, name)
        # One layer after another, so that not all of them wait on the device.
        packed = jax.block_until_ready(kernel.put_layer(packed, config, layer, index))
    found: Params = {name: jnp.asarray(one, dtype) for name, one in outer.items()}
    packed = kernel.put_head(packed, config, output_matrix(found, config))
    found.pop("head", None)
    layers = {name: stack(name) for name in shapes if name not in MATRICES}
    return {**found, "layers": layers, "packed": packed}
