"""A layer in parts that run alone, in any dtype, and the model of such layers.

It is the mathematics of train.model.Block, with one matrix of queries, keys and values and one of
gate and up. `wide` is what norms, rotations, softmax and the loss compute in: float32 in that
model. Each piece has its name as a scope (`jax.named_scope`), by which kernels.py knows it again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from train.losses import loss_of

import pallas_bridge

from .model import attend

Array = jax.Array
Cell = dict[str, Any]
Weights = dict[str, Array]
EPS = 1e-6
LOSSES: dict[str, Any] = {"xla": "baseline", "ours": "fused_linear"}
# Parts before and after the one that `turn_of` names.
BEFORE = ("norm 1", "QKV")
AFTER = (
    "attention",
    "output",
    "residual 1",
    "norm 2",
    "gate and up",
    "activation",
    "down",
    "residual 2",
)
# Parts of the model around its layers.
OUTSIDE = ("embedding", "final norm", "head")


def turn_of(cell: Cell) -> str:
    """The name of the part that rotates queries and keys, with norms of heads or not."""
    return "head norms, rope" if cell.get("qk_norm") else "rope"


def names_of(cell: Cell) -> tuple[str, ...]:
    """A layer's parts, in its order."""
    return (*BEFORE, turn_of(cell), *AFTER)


def dtype_of(cell: Cell) -> Any:
    """The compute dtype of a cell."""
    return jnp.float32 if cell["policy"] == "float32" else jnp.bfloat16


def rms_norm(x: Array, weight: Array, wide: Any) -> Array:
    """RMSNorm of x [.., D], computed in `wide`, in the dtype of x."""
    y = x.astype(wide)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
    return (y * weight.astype(wide)).astype(x.dtype)


def rotate(x: Array, cosines: Array, sines: Array, wide: Any) -> Array:
    """RoPE of x [B, T, N, H] by tables [B, T, 1, H / 2], computed in `wide`."""
    low, high = jnp.split(x.astype(wide), 2, axis=-1)
    c, s = cosines.astype(wide), sines.astype(wide)
    rotated = jnp.concatenate((low * c - high * s, high * c + low * s), axis=-1)
    return rotated.astype(x.dtype)


def softmax_attention(q: Array, k: Array, v: Array, wide: Any) -> Array:
    """Causal attention of q [B, T, N, H] to k and v [B, T, N, H], its softmax in `wide`."""
    length, width = q.shape[1], q.shape[3]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) / width**0.5
    is_seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, preferred_element_type=wide).astype(q.dtype)


def tables_of(
    batch: int, first: int, length: int, width: int, dtype: Any = jnp.float32
) -> tuple[Array, Array]:
    """RoPE's tables [B, T, 1, H / 2] of `length` positions from `first` on, as of train.model."""
    rates = 10000.0 ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    angles = (first + jnp.arange(length, dtype=dtype))[:, None, None] * rates
    angles = jnp.broadcast_to(angles, (batch, *angles.shape))
    return jnp.cos(angles), jnp.sin(angles)


def weight_shapes(cell: Cell) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights."""
    width, ffn, of_head = cell["width"], cell["ffn"], cell["head_width"]
    q, kv = cell["heads"] * of_head, cell["kv_heads"] * of_head
    of_heads = {"q_norm": (of_head,), "k_norm": (of_head,)} if cell["qk_norm"] else {}
    return {
        "norm1": (width,),
        "qkv": (width, q + 2 * kv),
        **of_heads,
        "out": (q, width),
        "norm2": (width,),
        "up": (width, 2 * ffn),
        "down": (ffn, width),
    }


def functions(cell: Cell, wide: Any) -> dict[str, Callable[..., Any]]:
    """A layer's parts and the model's others by name, by the cell's kernels.

    The head takes hidden states [B, T, D], its matrix [V, D] and labels [B, T], and gives the loss;
    without labels the logits [B, V] of the last token. Attention takes q, k, v, and in a decoder
    then the caches of keys and values [B, S, K, H], whose last place it fills; it returns
    [B, T, N x H].
    """
    heads, kv_heads, of_head = cell["heads"], cell["kv_heads"], cell["head_width"]

    def norm(x: Array, weight: Array) -> Array:
        if cell["norm"] == "ours":
            return pallas_bridge.rms_norm(x, weight, eps=EPS)
        return rms_norm(x, weight, wide)

    def project(x: Array, weight: Array) -> Array:
        return x @ weight.astype(x.dtype)

    def qkv(x: Array, weight: Array) -> tuple[Array, Array, Array]:
        packed = project(x, weight).reshape(*x.shape[:2], -1, of_head)
        q, k, v = jnp.split(packed, (heads, heads + kv_heads), axis=2)
        return q, k, v

    def rope(q: Array, k: Array, *others: Array) -> tuple[Array, Array]:
        *weights, cosines, sines = others
        if weights and cell["norm"] == "ours":
            tables = cosines[:, :, 0], sines[:, :, 0]
            return pallas_bridge.qk_norm_rope(q, k, *weights, eps=EPS, tables=tables)
        if weights:
            q, k = (norm(x, weight) for x, weight in zip((q, k), weights, strict=True))
        return rotate(q, cosines, sines, wide), rotate(k, cosines, sines, wide)

    def attention(q: Array, k: Array, v: Array, *caches: Array) -> Any:
        if not caches:
            mixed = (
                softmax_attention(q, k, v, wide)
                if cell["attention"] == "wide"
                else attend(cell["attention"], q, k, v)
            )
            return mixed.reshape(*q.shape[:2], -1)
        place = (0, caches[0].shape[1] - 1, 0, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(cache, new, place)
            for cache, new in zip(caches, (k, v), strict=True)
        )
        # The last query sees all keys.
        mixed = jax.nn.dot_product_attention(q, keys, values)
        return mixed.reshape(*q.shape[:2], -1), keys, values

    def activation(packed: Array) -> Array:
        if cell["mlp"] == "ours":
            return pallas_bridge.swiglu(packed)
        gate, up = jnp.split(packed, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def residual(stream: Array, branch: Array) -> Array:
        return stream + branch

    def embedding(table: Array, tokens: Array) -> Array:
        return table[tokens].astype(dtype_of(cell))

    def head(y: Array, table: Array, labels: Array | None = None) -> Array:
        if labels is None:
            return y[:, -1] @ table.astype(y.dtype).T
        return loss_of(LOSSES[cell["loss"]], y, table, labels)

    found: dict[str, Callable[..., Any]] = {
        "norm 1": norm,
        "QKV": qkv,
        turn_of(cell): rope,
        "attention": attention,
        "output": project,
        "residual 1": residual,
        "norm 2": norm,
        "gate and up": project,
        "activation": activation,
        "down": project,
        "residual 2": residual,
        "embedding": embedding,
        "final norm": norm,
        "head": head,
    }
    return {name: jax.named_scope(name)(function) for name, function in found.items()}


def layer(
    of: dict[str, Callable[..., Any]],
    x: Array,
    weights: Weights,
    tables: tuple[Array, Array],
    caches: tuple[Array, ...] = (),
) -> Any:
    """A whole layer over x [B, T, D]; with caches it also returns their new values."""
    q, k, v = of["QKV"](of["norm 1"](x, weights["norm1"]), weights["qkv"])
    turn = next(name for name in of if name.endswith("rope"))
    of_heads = [weights[name] for name in ("q_norm", "k_norm") if name in weights]
    q, k = of[turn](q, k, *of_heads, *tables)
    mixed = of["attention"](q, k, v, *caches)
    new: tuple[Array, ...] = ()
    if caches:
        mixed, *new_caches = mixed
        new = tuple(new_caches)
    x = of["residual 1"](x, of["output"](mixed, weights["out"]))
    packed = of["gate and up"](of["norm 2"](x, weights["norm2"]), weights["up"])
    x = of["residual 2"](x, of["down"](of["activation"](packed), weights["down"]))
    return (x, *new) if caches else x


def decoder(
    of: dict[str, Callable[..., Any]],
    params: dict[str, Any],
    tokens: Array,
    labels: Array | None,
    tables: tuple[Array, Array],
    caches: tuple[tuple[Array, ...], ...] = (),
) -> Any:
    """The model over tokens [B, T]: its loss, or the logits [B, V] of the last token.

    Weights of layers are stacked along a first axis, and `jax.lax.scan` goes over them. With
    caches, two a layer, they are a list, and the layers one after another, so that no weight is
    copied out of a stack and XLA can write to the caches where they lie; these are returned too.
    """
    x = of["embedding"](params["embedding"], tokens)
    new = []
    if caches:
        for weights, cache in zip(params["layers"], caches, strict=True):
            x, *written = layer(of, x, weights, tables, cache)
            new.append(tuple(written))
    else:
        x, _ = jax.lax.scan(
            lambda x, weights: (layer(of, x, weights, tables), None), x, params["layers"]
        )
    table = params["head"] if "head" in params else params["embedding"]
    y = of["head"](of["final norm"](x, params["norm"]), table, labels)
    return (y, tuple(new)) if caches else y
