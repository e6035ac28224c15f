"""Parameters of a decoder: a dict of arrays, in which those of all layers are stacked.

Matrices are [outputs, inputs], as in Hugging Face's checkpoints.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..checks import DTYPES, check_dtype_named, is_traced
from ..keywords import hinted
from .config import DecoderConfig, check_config

Array = jax.Array
Shapes = dict[str, tuple[int, ...]]
Params = dict[str, Any]
# Those of a layer, by their names; the kernel for Hopper streams copies of them.
MATRICES = ("qkv", "out", "gate_up", "down")


def layer_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of one layer's arrays, by name.

    `qkv` has the rows of queries, then keys, then values; `gate_up` those of gate, then up.
    """
    d, f, head = config.hidden_size, config.mlp_size, config.head_dim
    q, qkv = config.heads * head, (config.heads + 2 * config.kv_heads) * head
    shapes: Shapes = {
        "attention_norm": (d,),
        "qkv": (qkv, d),
        "out": (d, q),
        "mlp_norm": (d,),
        "gate_up": (2 * f, d),
        "down": (d, f),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (qkv,)
    if config.qk_norm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    return shapes


def outer_shapes(config: DecoderConfig) -> Shapes:
    """Returns the shapes of the arrays outside of layers, by name."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embedding": table, "norm": table[1:]}
    return shapes if config.tied_head else {**shapes, "head": table}


def are_packed_alone(params: Params) -> bool:
    """Returns whether parameters have their matrices as `kernel.pack` makes them and no others."""
    return "packed" in params and not params["layers"].keys() & set(MATRICES)


def output_matrix(params: Params, config: DecoderConfig) -> jax.Array:
    """Returns the matrix [V, D] of logits: the embedding where the head is tied to it."""
    matrix: jax.Array = params["embedding" if config.tied_head else "head"]
    return matrix


def are_on_one_device(arrays: Iterable[Array], devices: int) -> bool:
    """Returns whether no array is sharded, as far as is known, in a program for so many devices.

    A kernel of a step is for one device: XLA would gather sharded arrays for it.
    """
    return devices == 1 or not any(
        is_traced(one) or len(one.sharding.device_set) > 1 for one in arrays
    )


def check_params(params: Params, config: DecoderConfig) -> None:
    """Checks the names, shapes and dtypes of parameters but for those of packed weights.

    Raises:
        TypeError: no dict, another config, or an array of another dtype than float32, bfloat16 or
            float16.
        ValueError: an array is missing, is not of this config, or has another shape.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params is of type {type(params).__name__}; it must be a dict")
    check_config(config)
    stacked = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
    outer = outer_shapes(config)
    if "layers" in params and are_packed_alone(params):
        stacked = {name: shape for name, shape in stacked.items() if name not in MATRICES}
        outer.pop("head", None)
    given = {**params, "layers": None}
    given.pop("packed", None)
    _check_arrays("params", given, {**outer, "layers": ()})
    _check_arrays('params["layers"]', params.get("layers", {}), stacked)


def _check_arrays(where: str, arrays: Params, shapes: Shapes) -> None:
    if arrays.keys() != shapes.keys():
        raise ValueError(
            f"{where} has {', '.join(sorted(arrays))}; of this config it must have "
            f"{', '.join(sorted(shapes))}"
        )
    for name, array in arrays.items():
        if array is None:
            continue
        if jnp.shape(array) != shapes[name]:
            raise ValueError(
                f'{where}["{name}"] has shape {jnp.shape(array)}; it must be {shapes[name]}'
            )
        if array.dtype not in DTYPES:
            raise TypeError(
                f'{where}["{name}"] has dtype {array.dtype}; it must be bfloat16, float16 or '
                "float32"
            )


@hinted
def init_params(config: DecoderConfig, seed: int = 0, *, dtype: DTypeLike = jnp.bfloat16) -> Params:
    """Returns random parameters: matrices normal with deviation 0.02, norms 1, biases normal too.

    Args:
      config: the decoder's.
      seed: an integer.
      dtype: bfloat16, float16 or float32, of all arrays; decoding computes in it.

    Returns:
      A dict with `embedding` [V, D], `norm` [D], `head` [V, D] unless it is tied, and `layers`:
      `attention_norm` [L, D], `qkv` [L, (H + 2 K) * head_dim, D], `out` [L, D, H * head_dim],
      `mlp_norm` [L, D], `gate_up` [L, 2 F, D], `down` [L, D, F], and where the config says so
      `qkv_bias`, `q_norm` and `k_norm` [L, ..].

    Raises:
      TypeError: another dtype.
    """
    named = check_dtype_named("dtype", dtype)
    found: Params = _init(jax.random.key(seed), config, named)
    return found


@partial(jax.jit, static_argnums=(1, 2))
def _init(key: jax.Array, config: DecoderConfig, dtype: Any) -> Params:
    stacked = {name: (config.layers, *shape) for name, shape in layer_shapes(config).items()}
    keys = iter(jax.random.split(key, len(stacked) + len(outer_shapes(config))))

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if "norm" in name:
            return jnp.ones(shape, dtype)
        return (0.02 * jax.random.normal(next(keys), shape, dtype)).astype(dtype)

    outer = {name: draw(name, shape) for name, shape in outer_shapes(config).items()}
    return {**outer, "layers": {name: draw(name, shape) for name, shape in stacked.items()}}
