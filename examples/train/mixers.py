"""Mamba-2 and gated DeltaNet, the mixers of a hybrid's blocks that have no attention.

Both are a causal convolution, a recurrence over tokens (`pallas_bridge.linear_attention` and
`pallas_bridge.gated_delta_rule`) and a gated norm between projections. With the weights of
`Mamba2Mixer` and `Qwen3NextGatedDeltaNet` of Hugging Face transformers they return the same. Gates
are elementwise and plain JAX, which XLA fuses; the backward pass computes them again.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_bridge

from .config import Hybrid, LayerKernel, Model
from .shards import Shards, packed

Array = jax.Array
# Bounds of the steps dt, log-uniform at first, and of the decays' rates A; from the authors' code
# of Mamba-2 (Dao and Gu, 2024) and gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024).
STEPS = (1e-3, 1e-1)
MAMBA_RATES = (1.0, 16.0)
# From 0 in the authors' code; from 0.01 in Qwen3-Next, as log 0 would never change.
DELTA_RATES = (1e-2, 16.0)
# As Qwen3-Next and flash-linear-attention have it.
L2_EPSILON = 1e-6
# The backward pass recomputes gates from their arguments.
recomputed = jax.checkpoint


@dataclass(frozen=True)
class MixerParts:
    """Dimensions, initializers and kernels that a mixer takes from its model."""

    of: Model
    # Makes an RMSNorm of so many columns.
    norm: Callable[[int], Callable[[Array], Array]]
    # Makes one of each of so many groups of columns.
    group_norm: Callable[[int, int], Callable[[Array], Array]]
    # Initializers of matrices, and of those that add to the residual stream.
    normal: Any
    deep: Any
    linear_attention: LayerKernel
    conv: LayerKernel
    # How matrices are sharded: by heads.
    shards: Shards

    @property
    def hybrid(self) -> Hybrid:
        """The dimensions.

        Raises:
            ValueError: The model has none.
        """
        if self.of.hybrid is None:
            raise ValueError("model has hybrid None; it must have the dimensions of a Hybrid")
        return self.of.hybrid


class Mamba2(nnx.Module):
    """Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060).

        x, B, C  = silu(conv(u W_inner)),  z = u W_gate,  dt = softplus(u W_steps + dt_bias)
        S_t      = exp(-A dt_t) S_{t-1} + B_t (dt_t x_t)',  y_t = S_t' C_t + skip x_t
        result   = norm(y silu(z)) W_out                         where the norm is of each group

    of u [B, T, D], with a state [N, P] and rates A, steps dt and skips of each head.
    """

    def __init__(self, parts: MixerParts, rngs: nnx.Rngs) -> None:
        """Begins with steps in `STEPS` and rates in `MAMBA_RATES`."""
        of, width = parts.hybrid, parts.of.width
        self.of, self.kernel, self.conv_kernel = of, parts.linear_attention, parts.conv
        self.shards = shards = parts.shards
        inner, heads = of.ssm_heads * of.ssm_head_width, of.ssm_heads
        states = of.ssm_groups * of.ssm_state
        # x, B and C, packed.
        widths, mixed = {"x": inner, "b": states, "c": states}, inner + 2 * states
        self.heads = {"x": heads, "b": of.ssm_groups, "c": of.ssm_groups}
        self.gate = nnx.Param(parts.normal(rngs(), (width, inner)))
        self.inner = packed(parts.normal(rngs(), (width, mixed)), widths, shards)
        self.steps = nnx.Param(parts.normal(rngs(), (width, heads)))
        self.conv = packed(conv_weight(rngs(), (mixed, of.conv_width)), widths, shards, 0)
        bias = conv_weight(rngs(), (mixed, of.conv_width))[:, 0]
        self.conv_bias = packed(bias, widths, shards)
        self.dt_bias = nnx.Param(step_bias(rngs(), heads))
        self.log_rate = nnx.Param(log_rates(rngs(), heads, MAMBA_RATES))
        self.skip = nnx.Param(jnp.ones(heads))
        # Of each group its own, as the authors have it.
        self.group_norm = parts.group_norm(inner, of.ssm_groups)
        self.out = nnx.Param(parts.deep(rngs(), (inner, width)))

    def __call__(self, u: Array, segments: Array | None = None) -> Array:
        """Mixes u [B, T, D]; states start anew where segments [B, T] change."""
        of, join = self.of, self.shards.join
        with jax.named_scope("projections"):
            matrices = self.gate[...], join(self.inner, self.heads), self.steps[...]
            z, mixed, raw = self.shards.project(u, *matrices)
        weight, bias = join(self.conv, self.heads, 0), join(self.conv_bias, self.heads)
        mixed = convolve(self.conv_kernel, mixed, weight, bias, segments)
        columns = z.shape[-1]
        x, b, c = jnp.split(mixed, (columns, (columns + mixed.shape[-1]) // 2), axis=-1)
        x = x.reshape(*x.shape[:2], -1, of.ssm_head_width)
        b, c = (one.reshape(*one.shape[:2], -1, of.ssm_state) for one in (b, c))
        with jax.named_scope("gates"):
            added, g = written(x, raw, self.dt_bias[...], self.log_rate[...])
        with jax.named_scope("linear_attention"):
            y = pallas_bridge.linear_attention(
                c,
                b,
                added,
                g,
                segment_ids=segments,
                **choice(pallas_bridge.linear_attention, self.kernel),
            )
        with jax.named_scope("gates"):
            y = skipped_and_gated(y, x, self.skip[...], z)
        y = self.group_norm(y)
        with jax.named_scope("projections"):
            return self.shards.project_back(y, self.out[...])


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464), as Qwen3-Next has it.

        q, k, v  = silu(conv(u W_inner)),  z = u W_gate,  (b, a) = u W_rates
        o        = gated delta rule of q / |q|, k / |k|, v, sigmoid(b), -A softplus(a + dt_bias)
        result   = (norm(o) silu(z)) W_out                      where the norm is of each head

    of u [B, T, D], with a state [K, V] and a rate A of each head.
    """

    def __init__(self, parts: MixerParts, rngs: nnx.Rngs) -> None:
        """Begins with steps in `STEPS` and rates in `DELTA_RATES`."""
        of, width = parts.hybrid, parts.of.width
        self.of, self.kernel, self.conv_kernel = of, parts.linear_attention, parts.conv
        self.shards = shards = parts.shards
        heads, key_heads = of.delta_heads, of.delta_key_heads
        keys, values = key_heads * of.delta_key_width, heads * of.delta_value_width
        # q, k and v, packed; and b and a of each head.
        widths, mixed = {"q": keys, "k": keys, "v": values}, 2 * keys + values
        self.heads = {"q": key_heads, "k": key_heads, "v": heads}
        self.of_rates = {"b": heads, "a": heads}
        self.gate = nnx.Param(parts.normal(rngs(), (width, values)))
        self.inner = packed(parts.normal(rngs(), (width, mixed)), widths, shards)
        self.rates = packed(parts.normal(rngs(), (width, 2 * heads)), self.of_rates, shards)
        self.conv = packed(conv_weight(rngs(), (mixed, of.conv_width)), widths, shards, 0)
        self.dt_bias = nnx.Param(step_bias(rngs(), of.delta_heads))
        self.log_rate = nnx.Param(log_rates(rngs(), of.delta_heads, DELTA_RATES))
        self.norm = parts.norm(of.delta_value_width)
        self.out = nnx.Param(parts.deep(rngs(), (values, width)))

    def __call__(self, u: Array, segments: Array | None = None) -> Array:
        """Mixes u [B, T, D]; states start anew where segments [B, T] change."""
        of, join = self.of, self.shards.join
        with jax.named_scope("projections"):
            matrices = self.gate[...], join(self.inner, self.heads), join(self.rates, self.of_rates)
            z, mixed, raw = self.shards.project(u, *matrices)
        weight = join(self.conv, self.heads, 0)
        mixed = convolve(self.conv_kernel, mixed, weight, None, segments)
        keys = (mixed.shape[-1] - z.shape[-1]) // 2
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        q, k = (one.reshape(*one.shape[:2], -1, of.delta_key_width) for one in (q, k))
        v = v.reshape(*v.shape[:2], -1, of.delta_value_width)
        with jax.named_scope("gates"):
            q, k = l2_normalised(q), l2_normalised(k)
            strength, g = delta_gates(raw, self.dt_bias[...], self.log_rate[...])
        with jax.named_scope("delta_rule"):
            y = pallas_bridge.gated_delta_rule(
                q,
                k,
                v,
                strength,
                g,
                scale=of.delta_key_width**-0.5,
                segment_ids=segments,
                **choice(pallas_bridge.gated_delta_rule, self.kernel),
            )
        y = self.norm(y)
        with jax.named_scope("gates"):
            y = gated(y.reshape(z.shape), z)
        with jax.named_scope("projections"):
            return self.shards.project_back(y, self.out[...])


def choice(function: Callable[..., Any], kernel: LayerKernel) -> dict[str, Any]:
    """The keyword by which a function runs XLA's program; none where it runs no other."""
    if "implementation" not in inspect.signature(function).parameters:
        return {}
    return {"implementation": "reference" if kernel == "baseline" else None}


def convolve(
    kernel: LayerKernel, x: Array, weight: Array, bias: Array | None, segments: Array | None
) -> Array:
    """The causal convolution of x [B, T, C] within segments, and silu."""
    with jax.named_scope("convolution"):
        y: Array = pallas_bridge.causal_conv1d(
            x,
            weight,
            None if bias is None else bias.astype(weight.dtype),
            activation="silu",
            segment_ids=segments,
            **choice(pallas_bridge.causal_conv1d, kernel),
        )
        return y


def conv_weight(key: Array, shape: tuple[int, int]) -> Array:
    """Uniform numbers to 1 / sqrt(W) for a convolution [C, W], PyTorch's default."""
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def step_bias(key: Array, heads: int) -> Array:
    """Biases [H] whose softplus is log-uniform in `STEPS`."""
    low, high = jnp.log(jnp.array(STEPS))
    steps = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, low, high))
    return steps + jnp.log(-jnp.expm1(-steps))


def log_rates(key: Array, heads: int, bounds: tuple[float, float]) -> Array:
    """Logarithms [H] of rates that are uniform within bounds."""
    return jnp.log(jax.random.uniform(key, (heads,), jnp.float32, *bounds))


@recomputed
def written(x: Array, raw: Array, bias: Array, log_rate: Array) -> tuple[Array, Array]:
    """The value that a token adds to a state, dt x, in x's dtype, and its log decay in float32.

    x is [B, T, H, P], `raw` [B, T, H] before softplus, `bias` and `log_rate` [H].
    """
    dt = jax.nn.softplus(raw.astype(jnp.float32) + bias)
    return (dt[..., None] * x.astype(jnp.float32)).astype(x.dtype), -jnp.exp(log_rate) * dt


@recomputed
def l2_normalised(x: Array) -> Array:
    """Divides by the L2 norm of the last axis, as kernels of the delta rule need q and k."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + L2_EPSILON)
    return (wide * norm).astype(x.dtype)


@recomputed
def delta_gates(raw: Array, bias: Array, log_rate: Array) -> tuple[Array, Array]:
    """The strengths of writes and the log decays, [B, T, H] in float32, of `raw` [B, T, 2 H]."""
    b, a = jnp.split(raw.astype(jnp.float32), 2, axis=-1)
    return jax.nn.sigmoid(b), -jnp.exp(log_rate) * jax.nn.softplus(a + bias)


@recomputed
def skipped_and_gated(y: Array, x: Array, skip: Array, z: Array) -> Array:
    """(y + skip x) silu(z) as [B, T, H P] in the dtype of z, of y and x [B, T, H, P]."""
    y = y.astype(jnp.float32) + skip[:, None] * x.astype(jnp.float32)
    return (y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


@recomputed
def gated(y: Array, z: Array) -> Array:
    """Multiplies y by silu(z), in float32, rounded once."""
    return (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)
