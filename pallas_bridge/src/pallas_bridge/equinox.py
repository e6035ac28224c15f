"""Layers for Equinox, over the kernels of this package.

    from pallas_bridge import equinox as pb
    norm = pb.RMSNorm(2048)
    y = jax.vmap(norm)(x)

`RMSNorm`, `LayerNorm` and `MultiheadAttention` are the layers of these names in `equinox.nn`, with
their arguments and parameters, so that checkpoints load; only the computation differs. What the
kernels do not take is Equinox's. Not imported by `pallas_bridge`: it needs Equinox,
`pip install 'pallas_bridge[equinox]'`.
"""

import warnings
from typing import Any

import jax
from jax.typing import ArrayLike

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(
        "pallas_bridge.equinox needs equinox: run pip install 'pallas_bridge[equinox]', or "
        "pip install equinox"
    ) from error

from ._src.activation.api import swiglu
from ._src.checks import DTYPES
from ._src.linear_cross_entropy.api import linear_cross_entropy
from ._src.nn.attention import dot_product_attention
from ._src.nn.masks import AttentionMask
from ._src.norm.api import layer_norm, rms_norm

__all__ = ["LMHeadLoss", "LayerNorm", "MultiheadAttention", "RMSNorm", "SwiGLU"]

# What stands for a state that is not given; None is one.
_NO_STATE = object()


class RMSNorm(eqx.nn.RMSNorm):  # type: ignore[misc]
    """`equinox.nn.RMSNorm` by `pallas_bridge.rms_norm`, with the parameter `weight`.

    With `use_bias` it is Equinox's.
    """

    def __call__(self, x: jax.Array, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Returns the norm of one array, in its dtype; with a state the pair of both."""
        if self.use_bias or not _is_right(self, x):
            return super().__call__(x, *_given(state), key=key)
        weight = None if self.weight is None else self.weight.reshape(-1)
        y = rms_norm(x.reshape(-1), weight, eps=self.eps).reshape(x.shape)
        return y if state is _NO_STATE else (y, state)


class LayerNorm(eqx.nn.LayerNorm):  # type: ignore[misc]
    """`equinox.nn.LayerNorm` by `pallas_bridge.layer_norm`, with parameters `weight` and `bias`."""

    def __call__(self, x: jax.Array, state: Any = _NO_STATE, *, key: Any = None) -> Any:
        """Returns the norm of one array, in its dtype; with a state the pair of both."""
        if not _is_right(self, x):
            return super().__call__(x, *_given(state), key=key)
        weight, bias = (
            None if one is None else one.reshape(-1) for one in (self.weight, self.bias)
        )
        y = layer_norm(x.reshape(-1), weight, bias, eps=self.eps).reshape(x.shape)
        return y if state is _NO_STATE else (y, state)


def _is_right(norm: Any, x: jax.Array) -> bool:
    """Whether kernels take the array of a norm; Equinox says what is wrong with others."""
    return x.shape == norm.shape and x.size > 0 and x.dtype in DTYPES


def _given(state: Any) -> tuple[Any, ...]:
    return () if state is _NO_STATE else (state,)


class MultiheadAttention(eqx.nn.MultiheadAttention):  # type: ignore[misc]
    """`equinox.nn.MultiheadAttention` by `pallas_bridge.nn.dot_product_attention`.

    Parameters are those of Equinox: `query_proj`, `key_proj`, `value_proj` and `output_proj`. Masks
    may also be `nn.CausalMask` and the like, which keep the kernels within `jax.jit`, where an
    array runs XLA's program. Active dropout, and values of another size than keys, are Equinox's.
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: Any = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Any = None,
    ) -> jax.Array:
        """Returns attention [S, output_size] of one sequence; batches by `jax.vmap`.

        Args:
          query: [S, query_size].
          key_: [Skv, key_size].
          value: [Skv, value_size].
          mask: Booleans [S, Skv] or [H, S, Skv], True where a query sees a key; or a mask object.
          key: of dropout.
          inference: whether nothing is dropped.
          deterministic: the same, deprecated by Equinox.
          process_heads: changes heads before attention, such as rotary positions.
        """
        if deterministic is not None:
            message = "MultiheadAttention()(deterministic=..) is deprecated; pass inference"
            warnings.warn(message, stacklevel=2)
            inference = deterministic
        queries, keys = query.shape[0], key_.shape[0]
        is_dropped = self.dropout.p != 0 and not (
            self.dropout.inference if inference is None else inference
        )
        is_known = mask is None or isinstance(mask, AttentionMask)
        shapes = (queries, keys), (self.num_heads, queries, keys)
        fits = is_known or mask.shape in shapes
        if is_dropped or not fits or self.qk_size != self.vo_size or keys != value.shape[0]:
            if isinstance(mask, AttentionMask):
                mask = mask.dense(queries, keys)[0, 0]
            theirs: jax.Array = super().__call__(
                query,
                key_,
                value,
                mask,
                key=key,
                inference=inference,
                process_heads=process_heads,
            )
            return theirs
        heads = [
            _apply(layer, x).reshape(x.shape[0], self.num_heads, -1)
            for layer, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        ]
        if process_heads is not None:
            before = [one.shape for one in heads]
            heads = [*process_heads(*heads)]
            if [one.shape for one in heads] != before:
                raise ValueError("process_heads must not change the shape of the heads.")
        q, k, v = heads
        o = dot_product_attention(q, k, v, mask=mask)
        return _apply(self.output_proj, o.reshape(queries, -1))


class SwiGLU(eqx.Module):  # type: ignore[misc]
    """The gated MLP of Llama (Shazeer, 2020): down(silu(gate(x)) * up(x)).

    Parameters are `gate_proj`, `up_proj` and `down_proj`, each an `equinox.nn.Linear`; packed,
    `gate_up_proj` [2F, D] has the gate's rows first, and one kernel reads both.
    """

    gate_proj: Any
    up_proj: Any
    gate_up_proj: Any
    down_proj: Any

    def __init__(
        self,
        in_size: int,
        hidden_size: int,
        out_size: int | None = None,
        *,
        packed: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        key: Any,
    ) -> None:
        """Makes the layers.

        Args:
          in_size: D.
          hidden_size: F.
          out_size: of the result; None for D.
          packed: whether gate and up are one layer.
          use_bias: whether layers have a bias.
          dtype: of parameters, as of `equinox.nn.Linear`.
          key: of random parameters.
        """
        keys = jax.random.split(key, 3)
        options = {"use_bias": use_bias, "dtype": dtype}
        self.gate_proj = self.up_proj = self.gate_up_proj = None
        if packed:
            self.gate_up_proj = eqx.nn.Linear(in_size, 2 * hidden_size, key=keys[0], **options)
        else:
            self.gate_proj = eqx.nn.Linear(in_size, hidden_size, key=keys[0], **options)
            self.up_proj = eqx.nn.Linear(in_size, hidden_size, key=keys[1], **options)
        out_size = in_size if out_size is None else out_size
        self.down_proj = eqx.nn.Linear(hidden_size, out_size, key=keys[2], **options)

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """Returns the MLP [.., out_size] of x [.., D]; `key` is for `equinox.nn.Sequential`."""
        if self.gate_up_proj is not None:
            hidden = swiglu(_apply(self.gate_up_proj, x))
        else:
            hidden = swiglu(_apply(self.gate_proj, x), _apply(self.up_proj, x))
        return _apply(self.down_proj, hidden)


class LMHeadLoss(eqx.nn.Linear):  # type: ignore[misc]
    """The last layer of a language model with its loss: no logits are in memory.

    It is an `equinox.nn.Linear` of D to V features, with `weight` [V, D] and `bias` [V] if there is
    one, and its checkpoints load. For tied embeddings call `pallas_bridge.linear_cross_entropy`
    with the embedding's weight.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        key: Any,
    ) -> None:
        """Makes the layer, as `equinox.nn.Linear`."""
        super().__init__(in_features, vocab_size, use_bias=use_bias, dtype=dtype, key=key)

    def __call__(self, hidden: jax.Array, labels: ArrayLike, **options: Any) -> Any:
        """Returns `linear_cross_entropy` of hidden [.., D] and labels [..], with its keywords."""
        return linear_cross_entropy(
            hidden, self.weight, labels, bias=self.bias, vocab_axis=0, **options
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits [.., V] of hidden [.., D]."""
        return _apply(self, hidden)


def _apply(layer: Any, x: jax.Array) -> jax.Array:
    """Returns an `equinox.nn.Linear` of x [.., D]."""
    y = x @ layer.weight.T
    found: jax.Array = y if layer.bias is None else y + layer.bias
    return found
