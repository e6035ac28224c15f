"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Parameters are float32; what is computed is in the dtype that the model is called with. Scopes
(`jax.named_scope`) name the parts of a step for breakdown.py.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

import pallas_bridge
from pallas_bridge import checkpoint_policies

from .config import LayerKernel, LayerLoop, Model, Remat

Array = jax.Array
# Longer sequences get no mask: it would hold T^2 flags a sequence, and GPUs' attention none at all.
LONGEST_MASK = 2048
# What blocks keep for the backward pass, by `--remat`; "full" keeps their arguments alone.
POLICIES: dict[Remat, Any] = {
    "selective": checkpoint_policies.save_products,
    "attention": checkpoint_policies.save_attention,
    "full": None,
}


def is_masked(length: int) -> bool:
    """Whether sequences of so many tokens attend within segments alone."""
    return length <= LONGEST_MASK


def rope_tables(positions: Array, width: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines of RoPE (Su et al., 2021, arXiv:2104.09864).

    Args:
        positions: [B, T], of any integer dtype.
        width: Columns of a head, even.
        theta: The base of the wave lengths.

    Returns:
        Two arrays [B, T, 1, width / 2] in float32.
    """
    rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[:, :, None, None].astype(jnp.float32) * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cosines: Array, sines: Array) -> Array:
    """Turns column i of x [B, T, N, H] with column i + H / 2, in float32, rounded once."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (low * cosines - high * sines, high * cosines + low * sines)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(kernel: LayerKernel, q: Array, k: Array, v: Array, within: Array | None) -> Array:
    """Causal attention of q [B, T, N, H] to k and v [B, T, K, H].

    `within` is what `reach_of` returns, or None for all tokens before.
    """
    if kernel == "ours":
        return pallas_bridge.flash_attention(q, k, v, causal=True, segment_ids=within)
    is_flash = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and within is None
    return jax.nn.dot_product_attention(
        q, k, v, mask=within, is_causal=True, implementation="cudnn" if is_flash else None
    )


def reach_of(kernel: LayerKernel, segments: Array) -> Array:
    """Segments [B, T] as the kernel of attention takes them: plain JAX takes a mask."""
    return segments if kernel == "ours" else (segments[:, :, None] == segments[:, None, :])[:, None]


def over_layers(step: Any, carry: Any, layers: Any) -> Any:
    """What is carried through all layers, whose parameters are stacked along a first axis."""
    return jax.lax.scan(lambda carry, layer: (step(carry, layer), None), carry, layers)[0]


def over_unrolled_layers(step: Any, carry: Any, layers: Any) -> Any:
    """What `over_layers` returns, of a program that has each layer by itself.

    A scan's program is one block, which compiles sooner. But what its layers keep for the backward
    pass goes into stacks, which XLA fills with zeros first.
    """
    stacks, structure = jax.tree.flatten(layers)
    for layer in zip(*(jnp.unstack(stack) for stack in stacks), strict=True):
        carry = step(carry, jax.tree.unflatten(structure, layer))
    return carry


@dataclass(frozen=True)
class Kernels:
    """What computes the parts of a block."""

    norm: LayerKernel = "baseline"
    mlp: LayerKernel = "baseline"
    attention: LayerKernel = "baseline"


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich, 2019), of the last axis."""

    def __init__(self, width: int, eps: float, kernel: LayerKernel) -> None:
        """Begins with a weight of ones, [width] float32."""
        self.weight = nnx.Param(jnp.ones(width))
        self.eps, self.kernel = eps, kernel

    def __call__(self, x: Array) -> Array:
        """Normalises x [.., D]; in its dtype."""
        with jax.named_scope("norms"):
            if self.kernel == "ours":
                return pallas_bridge.rms_norm(x, self.weight[...], eps=self.eps)
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
            y: Array = (wide * scale * self.weight[...]).astype(x.dtype)
            return y

    def after(self, branch: Array, stream: Array) -> tuple[Array, Array]:
        """Adds a branch to the residual stream, and normalises the sum; returns both."""
        with jax.named_scope("norms"):
            if self.kernel == "ours":
                both: tuple[Array, Array] = pallas_bridge.rms_norm(
                    branch, self.weight[...], eps=self.eps, residual=stream
                )
                return both
            total = branch + stream
        return self(total), total


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, each after a norm."""

    def __init__(self, of: Model, kernels: Kernels, rngs: nnx.Rngs) -> None:
        """Begins with random numbers, smaller where they add to the residual stream."""
        normal, deep = initializer(), initializer(1 / math.sqrt(2 * of.layers))
        q, kv = of.heads * of.head_width, of.kv_heads * of.head_width
        self.of, self.kernels, norm = of, kernels, kernels.norm
        self.norm1 = Norm(of.width, of.norm_eps, norm)
        self.norm2 = Norm(of.width, of.norm_eps, norm)
        self.qkv = nnx.Param(normal(rngs(), (of.width, q + 2 * kv)))
        self.bias = nnx.Param(jnp.zeros(q + 2 * kv)) if of.qkv_bias else None
        self.q_norm = Norm(of.head_width, of.norm_eps, norm) if of.qk_norm else None
        self.k_norm = Norm(of.head_width, of.norm_eps, norm) if of.qk_norm else None
        self.out = nnx.Param(deep(rngs(), (q, of.width)))
        # Gate and up, packed.
        self.up = nnx.Param(normal(rngs(), (of.width, 2 * of.ffn)))
        self.down = nnx.Param(deep(rngs(), (of.ffn, of.width)))

    def __call__(
        self, branch: Array, stream: Array, tables: tuple[Array, Array], within: Array | None
    ) -> tuple[Array, Array]:
        """Takes and returns what is still to be added to the residual stream, and the stream."""
        x, stream = self.norm1.after(branch, stream)
        x, stream = self.norm2.after(self.attention(x, tables, within), stream)
        return self.feed_forward(x), stream

    def attention(self, x: Array, tables: tuple[Array, Array], within: Array | None) -> Array:
        """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) over x [B, T, D]."""
        of = self.of
        with jax.named_scope("projections"):
            qkv = x @ self.qkv[...].astype(x.dtype)
            if self.bias is not None:
                qkv = qkv + self.bias[...].astype(x.dtype)
            heads = qkv.reshape(*x.shape[:2], -1, of.head_width)
            q, k, v = jnp.split(heads, (of.heads, of.heads + of.kv_heads), axis=2)
        q, k = self.turned(q, k, tables)
        with jax.named_scope("attention"):
            mixed = attend(self.kernels.attention, q, k, v, within)
        with jax.named_scope("projections"):
            y: Array = mixed.reshape(*x.shape[:2], -1) @ self.out[...].astype(x.dtype)
            return y

    def turned(self, q: Array, k: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
        """Queries and keys, normalised by head where the model does that, and rotated."""
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.kernel == "ours":
                with jax.named_scope("norms"):
                    return pallas_bridge.qk_norm_rope(
                        q,
                        k,
                        self.q_norm.weight[...],
                        self.k_norm.weight[...],
                        eps=self.of.norm_eps,
                        tables=(tables[0][:, :, 0], tables[1][:, :, 0]),
                    )
            q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("position"):
            return rotate(q, *tables), rotate(k, *tables)

    def feed_forward(self, x: Array) -> Array:
        """SwiGLU (Shazeer, 2020, arXiv:2002.05202) over x [B, T, D]."""
        with jax.named_scope("projections"):
            packed = x @ self.up[...].astype(x.dtype)
        with jax.named_scope("activation"):
            if self.kernels.mlp == "ours":
                inner = pallas_bridge.swiglu(packed)
            else:
                gate, up = jnp.split(packed, 2, axis=-1)
                inner = jax.nn.silu(gate) * up
        with jax.named_scope("projections"):
            y: Array = inner @ self.down[...].astype(x.dtype)
            return y


class Transformer(nnx.Module):
    """The decoder up to its hidden states; losses.py multiplies these with the head.

    The blocks' parameters are stacked along a first axis. `over_layers` goes over them by
    `jax.lax.scan`, so that XLA compiles one block whatever their number.
    """

    def __init__(
        self,
        of: Model,
        kernels: Kernels,
        *,
        remat: Remat = "none",
        loop: LayerLoop = "scan",
        rngs: nnx.Rngs,
    ) -> None:
        """Begins with random numbers; `remat` is what the backward pass computes again."""
        self.of, self.kernels, self.remat, self.loop = of, kernels, remat, loop
        self.embedding = nnx.Param(initializer()(rngs(), (of.vocab, of.width)))
        make = nnx.split_rngs(splits=of.layers)(nnx.vmap(partial(Block, of, kernels)))
        self.blocks = make(rngs)
        self.norm = Norm(of.width, of.norm_eps, kernels.norm)
        head = None if of.tied else nnx.Param(initializer()(rngs(), (of.vocab, of.width)))
        self.untied = head

    @property
    def head(self) -> Array:
        """The output matrix [V, D], in float32."""
        head: Array = (self.embedding if self.untied is None else self.untied)[...]
        return head

    def __call__(
        self, batch: dict[str, Array], dtype: Any, tokens: NamedSharding | None = None
    ) -> Array:
        """Hidden states of tokens.

        Args:
            batch: `tokens`, `positions` and `segments`, [B, T] int32 each. Up to `LONGEST_MASK`
                tokens attend within their segment; in longer sequences to all before them.
            dtype: What is computed in.
            tokens: How activations lie on a mesh, by their first axis; None for one device.

        Returns:
            [B, T, D] in `dtype`.
        """
        segments, positions = batch["segments"], batch["positions"]
        within = None
        if is_masked(segments.shape[1]):
            within = reach_of(self.kernels.attention, segments)
        else:
            positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
        with jax.named_scope("embedding"):
            x = self.embedding[...][batch["tokens"]].astype(dtype)
            if tokens is not None:
                x = jax.lax.with_sharding_constraint(x, tokens)
        with jax.named_scope("position"):
            tables = rope_tables(positions, self.of.head_width, self.of.rope_theta)
        block, parameters = nnx.split(self.blocks)
        # Matrices are rounded once a step, and not wherever a block is computed.
        parameters = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 2 else w, parameters)

        def step(carry: tuple[Array, Array], layer: Any) -> tuple[Array, Array]:
            found: tuple[Array, Array] = nnx.merge(block, layer)(*carry, tables, within)
            return found

        if self.remat != "none":
            step = jax.checkpoint(step, policy=POLICIES[self.remat])
        over = over_layers if self.loop == "scan" else over_unrolled_layers
        branch, stream = over(step, (x, jnp.zeros_like(x)), parameters)
        y, _ = self.norm.after(branch, stream)
        return y


def initializer(scale: float = 1.0) -> Any:
    """Normal numbers of standard deviation 0.02 x scale, in float32."""
    return jax.nn.initializers.normal(0.02 * scale, jnp.float32)
