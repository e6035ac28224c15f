"""Layers for flax.nnx, over the kernels of this package.

    from pallas_bridge import nnx as pb
    norm = pb.RMSNorm(num_features=2048, rngs=rngs)

`RMSNorm`, `LayerNorm` and `MultiHeadAttention` are the layers of these names in `flax.nnx`, with
their arguments and parameters, so that checkpoints load; only the computation differs. What the
kernels do not take (other axes, masked statistics, wider dtypes, sown weights) is Flax's. Not
imported by `pallas_bridge`: it needs Flax, `pip install 'pallas_bridge[nnx]'`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "pallas_bridge.nnx needs flax: run pip install 'pallas_bridge[nnx]', or pip install flax"
    ) from error

from ._src.activation.api import swiglu
from ._src.checks import DTYPES
from ._src.linear_cross_entropy.api import linear_cross_entropy
from ._src.nn.flax import flax_attention_fn
from ._src.norm.api import layer_norm, rms_norm

__all__ = ["LMHeadLoss", "LayerNorm", "MultiHeadAttention", "RMSNorm", "SwiGLU"]


class RMSNorm(nnx.RMSNorm):  # type: ignore[misc]
    """`flax.nnx.RMSNorm` by `pallas_bridge.rms_norm`, with the parameter `scale`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns the norm of rows [.., D], of their shape, in the dtype that Flax gives."""
        scale = None if self.scale is None else self.scale[...]
        rows, weight = self.promote_dtype((x, scale), dtype=self.dtype)
        if not _is_of_rows(self, rows, mask):
            theirs: jax.Array = super().__call__(x, mask=mask)
            return theirs
        y: jax.Array = rms_norm(rows, weight, eps=self.epsilon)
        return y


class LayerNorm(nnx.LayerNorm):  # type: ignore[misc]
    """`flax.nnx.LayerNorm` by `pallas_bridge.layer_norm`, with the parameters `scale` and `bias`.

    The variance is the mean of squared deviations, whatever `use_fast_variance` says.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns the norm of rows [.., D], of their shape, in the dtype that Flax gives."""
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        rows, weight, offset = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        if not _is_of_rows(self, rows, mask):
            theirs: jax.Array = super().__call__(x, mask=mask)
            return theirs
        return layer_norm(rows, weight, offset, eps=self.epsilon)


def _is_of_rows(norm: Any, x: jax.Array, mask: Any) -> bool:
    """Whether a norm of Flax is one of the last axis, as kernels take it."""
    last = (-1, x.ndim - 1, (-1,), (x.ndim - 1,), [-1], [x.ndim - 1])
    return (
        mask is None
        and norm.axis_name is None
        and norm.reduction_axes in last
        and norm.feature_axes in last
        and x.dtype in DTYPES
        and x.shape[-1] == norm.num_features > 0
    )


def _attention(*arrays: Any, module: Any = None, **options: Any) -> jax.Array:
    """Returns `flax_attention_fn`; attention weights that are sown are those of Flax."""
    if module is not None:
        theirs: jax.Array = nnx.dot_product_attention(*arrays, module=module, **options)
        return theirs
    return flax_attention_fn(*arrays, **options)


class MultiHeadAttention(nnx.MultiHeadAttention):  # type: ignore[misc]
    """`flax.nnx.MultiHeadAttention` by `pallas_bridge.nn.flax_attention_fn`.

    Parameters are those of Flax: `query`, `key`, `value` and `out`, each with `kernel` and `bias`.
    Masks may also be `nn.CausalMask` and the like; without dropout and within `jax.jit` these and
    `is_causal=True` keep the kernels, and a mask array there runs XLA's program.
    """

    def __init__(self, *arguments: Any, attention_fn: Any = _attention, **options: Any) -> None:
        """Takes the arguments of Flax."""
        super().__init__(*arguments, attention_fn=attention_fn, **options)


class SwiGLU(nnx.Module):  # type: ignore[misc]
    """The gated MLP of Llama (Shazeer, 2020): down(silu(gate(x)) * up(x)).

    Parameters are `gate_proj`, `up_proj` and `down_proj`, each an `nnx.Linear`; packed,
    `gate_up_proj` [D, 2F] has the gate's columns first, and one kernel reads both.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        packed: bool = False,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the layers; `options` are those of `nnx.Linear`, such as dtype.

        Args:
          in_features: D.
          hidden_features: F.
          out_features: of the result; None for D.
          packed: whether gate and up are one layer.
          use_bias: whether layers have a bias.
          rngs: as of `nnx.Linear`.
          **options: as of `nnx.Linear`.
        """
        options = {"use_bias": use_bias, "rngs": rngs, **options}
        self.packed = packed
        if packed:
            self.gate_up_proj = nnx.Linear(in_features, 2 * hidden_features, **options)
        else:
            self.gate_proj = nnx.Linear(in_features, hidden_features, **options)
            self.up_proj = nnx.Linear(in_features, hidden_features, **options)
        out_features = in_features if out_features is None else out_features
        self.down_proj = nnx.Linear(hidden_features, out_features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the MLP [.., out_features] of x [.., D]."""
        hidden = (
            swiglu(self.gate_up_proj(x))
            if self.packed
            else swiglu(self.gate_proj(x), self.up_proj(x))
        )
        y: jax.Array = self.down_proj(hidden)
        return y


class LMHeadLoss(nnx.Linear):  # type: ignore[misc]
    """The last layer of a language model with its loss: no logits are in memory.

    It is an `nnx.Linear` of D to V features, with `kernel` [D, V] and `bias` [V] if there is one,
    and its checkpoints load. `loss_options` are keywords of `pallas_bridge.linear_cross_entropy`
    for every call. For tied embeddings call that function with `embed.embedding[...]`.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        *,
        use_bias: bool = False,
        loss_options: dict[str, Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the layer; `options` are those of `nnx.Linear`."""
        super().__init__(in_features, vocab_size, use_bias=use_bias, rngs=rngs, **options)
        self.loss_options = nnx.static(dict(loss_options or {}))

    def __call__(self, hidden: jax.Array, labels: ArrayLike, **options: Any) -> Any:
        """Returns `linear_cross_entropy` of hidden [.., D] and labels [..].

        `options` are its keywords, and take precedence over `loss_options`. `dtype` of the layer is
        that of the GEMMs: hidden is cast to it, and a float32 kernel keeps a float32 gradient.
        """
        return linear_cross_entropy(
            _cast(hidden, self.dtype),
            self.kernel[...],
            labels,
            bias=None if self.bias is None else self.bias[...],
            vocab_axis=1,
            **{**self.loss_options, **options},
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits [.., V] of hidden [.., D], as `nnx.Linear` does."""
        found: jax.Array = super().__call__(hidden)
        return found


def _cast(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return x if dtype is None else jnp.asarray(x).astype(dtype)
