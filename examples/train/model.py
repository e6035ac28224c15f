"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Parameters are float32; what is computed is in the dtype that the model is called with. Scopes
(`jax.named_scope`) name the parts of a step for breakdown.py.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

import pallas_bridge
from pallas_bridge import checkpoint_policies

from .config import Hybrid, LayerKernel, LayerLoop, Matmul, Model
from .mixers import GatedDeltaNet, Mamba2, MixerParts
from .shards import WHOLE, Shards, embed_on_mesh, packed, save_all_but_weights

Array = jax.Array
# Longer sequences get no mask: it would hold T^2 flags a sequence, and GPUs' attention none at all.
LONGEST_MASK = 2048
# What blocks keep for the backward pass, by `--remat`; "full" keeps their arguments alone.
POLICIES: dict[str, Any] = {
    "selective": checkpoint_policies.save_products_and_sums,
    "attention": checkpoint_policies.save_sums,
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
    rotated = (low * cosines - high * sines, high * cosines + low * sines)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


@jax.custom_vjp
def rotate_and_pack(x: Array, cosines: Array, sines: Array) -> Array:
    """Returns what `rotate` does; of its gradient no half is an array of its own.

    So XLA rotates it in the pass that packs those of queries, keys and values.
    """
    return rotate(x, cosines, sines)


def _rotate_back(tables: tuple[Array, Array], dx: Array) -> tuple[Array, None, None]:
    cosines, sines = tables
    halves = dx.reshape(*dx.shape[:-1], 2, -1).astype(jnp.float32)
    signed = jnp.stack([sines, -sines], axis=-2)
    rotated = halves * cosines[..., None, :] + jnp.flip(halves, axis=-2) * signed
    return rotated.astype(dx.dtype).reshape(dx.shape), None, None


rotate_and_pack.defvjp(lambda x, *tables: (rotate(x, *tables), tables), _rotate_back)


@jax.custom_vjp
def held(x: Array) -> Array:
    """Returns x, whose gradient XLA writes to memory once, where several instructions read it."""
    return x


held.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.optimization_barrier(dx),))


def attend(kernel: LayerKernel, q: Array, k: Array, v: Array, within: Array | None) -> Array:
    """Causal attention of q [B, T, N, H] to k and v [B, T, K, H].

    `within` is what `reach_of` returns, or None for all tokens before.
    """
    if kernel == "ours":
        # XLA sums gradients of the embedding in any order, too.
        return pallas_bridge.flash_attention(
            q, k, v, causal=True, segment_ids=within, deterministic=False
        )
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
    linear_attention: LayerKernel = "baseline"
    conv: LayerKernel = "baseline"
    # Whether sums of the residual stream are saved, from which `rms_norm_linear` and `gated_mlp`
    # compute normalised rows again.
    keeps_sums: bool = False
    # Whether the backward pass has what multiplies the second matrix of an MLP in memory.
    keeps_inner: bool = False
    # How rows and matrices of attention and feed-forward layers are multiplied.
    matmul: Matmul = "default"
    # How a block's matrices are sharded.
    shards: Shards = WHOLE

    @property
    def multiply(self) -> Callable[[Array, Array], Array]:
        """What multiplies rows [.., D] with a matrix [D, N]."""
        return pallas_bridge.fp8_linear if self.matmul == "fp8" else jnp.matmul


def normalise(kernel: LayerKernel, x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of x [.., D], in its dtype."""
    if kernel == "ours":
        return pallas_bridge.rms_norm(x, weight, eps=eps)
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y: Array = (wide * scale * weight).astype(x.dtype)
    return y


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich, 2019), of the last axis."""

    def __init__(
        self, width: int, eps: float, kernel: LayerKernel, *, keeps_sums: bool = False
    ) -> None:
        """Begins with a weight of ones, [width] float32; `keeps_sums` is that of `Kernels`."""
        self.weight = nnx.Param(jnp.ones(width))
        self.eps, self.kernel, self.keeps_sums = eps, kernel, keeps_sums

    def __call__(self, x: Array) -> Array:
        """Normalises x [.., D]; in its dtype."""
        with jax.named_scope("norms"):
            return normalise(self.kernel, x, self.weight[...], self.eps)

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

    def after_into(
        self, branch: Array, stream: Array, matrices: Sequence[Array], kernels: Kernels
    ) -> list[Array]:
        """Multiplies what `after` normalises with matrices; returns products, then the sum."""
        shards = kernels.shards
        if self.kernel == "ours" and self.keeps_sums and shards.has_own_rows:
            with jax.named_scope("projections"):
                return [
                    *pallas_bridge.rms_norm_linear(
                        branch,
                        self.weight[...],
                        *matrices,
                        eps=self.eps,
                        residual=stream,
                        axis_name=shards.axis,
                    )
                ]
        x, stream = self.after(branch, stream)
        with jax.named_scope("projections"):
            x = shards.gather_rows(x)
            products = (kernels.multiply(x, one.astype(x.dtype)) for one in matrices)
            return [*map(shards.join_rows, products), stream]


class GroupNorm(nnx.Module):
    """RMSNorm of each group of columns, the groups sharded over devices, or shared by some."""

    def __init__(
        self, width: int, groups: int, eps: float, kernel: LayerKernel, shards: Shards
    ) -> None:
        """Begins with a weight of ones, [width] float32."""
        self.weight = nnx.Param(jnp.ones(width))
        self.groups, self.eps, self.kernel, self.shards = groups, eps, kernel, shards

    def __call__(self, x: Array) -> Array:
        """Normalises a device's columns of x [.., D]; in its dtype."""
        shards, weight = self.shards, self.weight[...]
        if self.groups % shards.count == 0:
            count = self.groups // shards.count
            parts = zip(jnp.split(x, count, -1), jnp.split(weight, count), strict=True)
            with jax.named_scope("norms"):
                return jnp.concatenate(
                    [normalise(self.kernel, *one, self.eps) for one in parts], -1
                )
        with jax.named_scope("norms"):
            wide = x.astype(jnp.float32)
            square = shards.sum_of_head((wide * wide).sum(-1, keepdims=True), self.groups)
            columns = x.shape[-1] * shards.count // self.groups
            scale = jax.lax.rsqrt(square / columns + self.eps)
            y: Array = (wide * scale * weight).astype(x.dtype)
            return y


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, each after a norm."""

    def __init__(self, of: Model, kernels: Kernels, rngs: nnx.Rngs) -> None:
        """Begins with random numbers, smaller where they add to the residual stream."""
        normal, deep = initializers(of)
        self.of, self.kernels, norm = of, kernels, kernels.norm
        self.norm1 = Norm(of.width, of.norm_eps, norm, keeps_sums=kernels.keeps_sums)
        self.norm2 = Norm(of.width, of.norm_eps, norm)
        self.make_mixer(rngs)
        widths, up = {"gate": of.ffn, "up": of.ffn}, normal(rngs(), (of.width, 2 * of.ffn))
        self.up = packed(up, widths, kernels.shards)
        self.down = nnx.Param(deep(rngs(), (of.ffn, of.width)))

    def make_mixer(self, rngs: nnx.Rngs) -> None:
        """Makes the layer that mixes tokens: attention."""
        of, norm = self.of, self.kernels.norm
        normal, deep = initializers(of)
        q, kv = of.heads * of.head_width, of.kv_heads * of.head_width
        widths, pack = {"q": q, "k": kv, "v": kv}, self.kernels.shards
        self.qkv = packed(normal(rngs(), (of.width, q + 2 * kv)), widths, pack)
        self.bias = packed(jnp.zeros(q + 2 * kv), widths, pack) if of.qkv_bias else None
        self.q_norm = Norm(of.head_width, of.norm_eps, norm) if of.qk_norm else None
        self.k_norm = Norm(of.head_width, of.norm_eps, norm) if of.qk_norm else None
        self.out = nnx.Param(deep(rngs(), (q, of.width)))

    def __call__(
        self,
        branch: Array,
        stream: Array,
        tables: tuple[Array, Array],
        within: Array | None,
        segments: Array | None = None,
    ) -> tuple[Array, Array]:
        """Takes and returns what is still to be added to the residual stream, and the stream."""
        shards = self.kernels.shards
        matrix = shards.whole_width(self.gathered_heads(self.qkv), 0)
        matrices = self.by_kind(matrix) if self.has_own_arrays else [matrix]
        *qkv, stream = self.norm1.after_into(branch, stream, matrices, self.kernels)
        return self.feed_forward(self.attention(qkv, tables, within), stream)

    def gathered_heads(self, columns: Any) -> Array:
        """Returns queries', keys' and values' columns of a device's heads, packed."""
        shards = self.kernels.shards
        if shards.is_whole:
            array: Array = columns[...]
            return array
        keys_and_values = jnp.stack([columns[name][...] for name in ("k", "v")])
        return jnp.concatenate(
            [columns["q"][...], *shards.heads(keys_and_values, self.of.kv_heads)], -1
        )

    @property
    def has_own_arrays(self) -> bool:
        """Whether queries, keys and values are products of their own.

        `qk_norm_rope` takes these without a copy; into XLA's code slices are fused.
        """
        is_one_call = self.q_norm is not None and self.q_norm.kernel == "ours"
        # In FP8 rows are quantised for each product; and parts of a matrix that `fsdp` shards would
        # be saved, where the matrix is gathered again.
        is_default = self.kernels.matmul == "default"
        return is_one_call and is_default and "fsdp" not in self.kernels.shards.axes

    def by_kind(self, columns: Array) -> list[Array]:
        """Splits a device's columns of heads: queries', keys', values'."""
        q = self.of.heads // self.kernels.shards.count * self.of.head_width
        return jnp.split(columns, (q, (q + columns.shape[-1]) // 2), axis=-1)

    def attention(
        self, qkv: Sequence[Array], tables: tuple[Array, Array], within: Array | None
    ) -> Array:
        """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245).

        `qkv` are queries, keys and values of all heads, [B, T, N] each or as one array, still
        without bias.
        """
        shards = self.kernels.shards
        with jax.named_scope("projections"):
            if self.bias is not None:
                bias = self.gathered_heads(self.bias)
                biases = self.by_kind(bias) if self.has_own_arrays else [bias]
                qkv = [x + one.astype(x.dtype) for x, one in zip(qkv, biases, strict=True)]
            if self.kernels.attention == "ours" and not self.has_own_arrays:
                qkv = [*map(held, qkv)]
            qkv = qkv if self.has_own_arrays else self.by_kind(*qkv)
            q, k, v = (x.reshape(*x.shape[:2], -1, self.of.head_width) for x in qkv)
        q, k = self.rotated(q, k, tables)
        with jax.named_scope("attention"):
            mixed = attend(self.kernels.attention, q, k, v, within)
        with jax.named_scope("projections"):
            out = shards.whole_width(self.out[...].astype(mixed.dtype), 1)
            mixed = mixed.reshape(*mixed.shape[:2], -1)
            return shards.scatter_sum(self.kernels.multiply(shards.split_rows(mixed), out))

    def rotated(self, q: Array, k: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
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
        turn: Callable[..., Array] = rotate_and_pack if self.kernels.attention == "ours" else rotate
        with jax.named_scope("position"):
            return turn(q, *tables), turn(k, *tables)

    def feed_forward(self, branch: Array, stream: Array) -> tuple[Array, Array]:
        """SwiGLU (Shazeer, 2020, arXiv:2002.05202) of the normalised sum [B, T, D]; and the sum."""
        norm, is_ours, shards = self.norm2, self.kernels.mlp == "ours", self.kernels.shards
        up, down = self.matrices(branch.dtype)
        keeps_sums = self.kernels.keeps_sums and shards.has_own_rows
        if is_ours and norm.kernel == "ours" and keeps_sums:
            with jax.named_scope("projections"):
                both: tuple[Array, Array] = pallas_bridge.gated_mlp(
                    branch,
                    up,
                    None,
                    down,
                    norm_weight=norm.weight[...],
                    residual=stream,
                    eps=norm.eps,
                    axis_name=shards.axis,
                )
                return both
        x, stream = norm.after(branch, stream)
        if is_ours and self.kernels.matmul == "default":
            with jax.named_scope("projections"):
                keep: Literal["inner", "packed"] = "inner" if self.kernels.keeps_inner else "packed"
                y = pallas_bridge.gated_mlp(shards.gather_rows(x), up, None, down, keep=keep)
                return shards.scatter_sum(y), stream
        with jax.named_scope("projections"):
            packed = self.kernels.multiply(shards.gather_rows(x), up)
        with jax.named_scope("activation"):
            if is_ours:
                inner = pallas_bridge.swiglu(packed)
            else:
                gate, up = jnp.split(packed, 2, axis=-1)
                inner = jax.nn.silu(gate) * up
        with jax.named_scope("projections"):
            return shards.scatter_sum(self.kernels.multiply(inner, down)), stream

    def matrices(self, dtype: Any) -> tuple[Array, Array]:
        """Returns a device's gate and up, packed, and its down, in a dtype."""
        shards, up = self.kernels.shards, self.up
        both = up[...] if shards.is_whole else jnp.concatenate([up["gate"][...], up["up"][...]], -1)
        down = self.down[...].astype(dtype)
        return shards.whole_width(both.astype(dtype), 0), shards.whole_width(down, 1)


class DeltaBlock(Block):
    """Gated DeltaNet and a gated feed-forward layer, each after a norm."""

    def make_mixer(self, rngs: nnx.Rngs) -> None:
        """Makes the layer that mixes tokens: gated DeltaNet."""
        self.mixer = GatedDeltaNet(mixer_parts(self.of, self.kernels), rngs)

    def __call__(
        self,
        branch: Array,
        stream: Array,
        tables: tuple[Array, Array],
        within: Array | None,
        segments: Array | None = None,
    ) -> tuple[Array, Array]:
        """As `Block`; states start anew with each segment."""
        x, stream = self.norm1.after(branch, stream)
        return self.feed_forward(self.mixer(x, segments), stream)


class MambaBlock(nnx.Module):
    """Mamba-2 after a norm."""

    def __init__(self, of: Model, kernels: Kernels, rngs: nnx.Rngs) -> None:
        """Begins as the mixer does, with a norm of ones."""
        self.norm1 = Norm(of.width, of.norm_eps, kernels.norm)
        self.mixer = Mamba2(mixer_parts(of, kernels), rngs)

    def __call__(
        self,
        branch: Array,
        stream: Array,
        tables: tuple[Array, Array],
        within: Array | None,
        segments: Array | None = None,
    ) -> tuple[Array, Array]:
        """As `Block`; states start anew with each segment."""
        x, stream = self.norm1.after(branch, stream)
        return self.mixer(x, segments), stream


BLOCK_TYPES: dict[str, type[Block] | type[MambaBlock]] = {
    "M": MambaBlock,
    "D": DeltaBlock,
    "A": Block,
}


class Transformer(nnx.Module):
    """The decoder up to its hidden states; losses.py multiplies these with the head.

    The blocks' parameters are stacked along a first axis. `over_layers` goes over them by
    `jax.lax.scan`, so that XLA compiles one block whatever their number. Of a hybrid, `blocks` has
    those of each letter of the pattern, and a step of the scan goes over the pattern once.
    """

    def __init__(
        self,
        of: Model,
        kernels: Kernels,
        *,
        remat: str = "none",
        loop: LayerLoop = "scan",
        rngs: nnx.Rngs,
    ) -> None:
        """Begins with random numbers; `remat` is what the backward pass computes again."""
        is_kept = remat not in ("none", "full") and kernels.matmul == "default"
        kernels = dataclasses.replace(kernels, keeps_sums=is_kept, keeps_inner=remat == "none")
        self.of, self.kernels, self.remat, self.loop = of, kernels, remat, loop
        self.embedding = nnx.Param(initializer()(rngs(), (of.vocab, of.width)))
        # As many times as the pattern is repeated.
        times = of.layers if of.hybrid is None else of.layers // len(of.hybrid.pattern)

        def stacked(block: Any) -> Any:
            return nnx.split_rngs(splits=times)(nnx.vmap(partial(block, of, kernels)))(rngs)

        self.blocks = (
            stacked(Block)
            if of.hybrid is None
            else nnx.Dict({name: stacked(BLOCK_TYPES[name[-1]]) for name in block_names(of.hybrid)})
        )
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
            [B, T, D] in `dtype`; with shards a device's [B, T / n, D], where all arrays are a
            device's own.
        """
        shards = self.kernels.shards
        segments, positions = batch["segments"], batch["positions"]
        within = None
        if is_masked(segments.shape[1]):
            within = reach_of(self.kernels.attention, segments)
        else:
            positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
        with jax.named_scope("embedding"):
            table, ids = self.embedding[...], batch["tokens"]
            if tokens is None:
                x = shards.embed(table, ids, dtype)
            else:
                x = embed_on_mesh(tokens, dtype, table, ids)
        with jax.named_scope("position"):
            tables = rope_tables(positions, self.of.head_width, self.of.rope_theta)
        graph, parameters = nnx.split(self.blocks)
        # Matrices are rounded once a step, and not wherever a block is computed.

        def prepare(path: Any, w: Array) -> Array:
            of_stream = any(getattr(key, "key", None) in ("norm1", "norm2") for key in path)
            if w.ndim > 2:
                w = w.astype(dtype)
                w = held(w) if self.kernels.norm == "ours" else w
            return shards.varying(w, of_stream=of_stream)

        parameters = jax.tree_util.tree_map_with_path(prepare, parameters)
        hybrid = self.of.hybrid

        def call(block: Any, carry: tuple[Array, Array], layer: Any) -> tuple[Array, Array]:
            found: tuple[Array, Array] = nnx.merge(block, layer)(*carry, tables, within, segments)
            return found

        def checkpointed(remat: str, run: Any) -> Any:
            if remat == "none" and "fsdp" not in shards.axes:
                return run
            return jax.checkpoint(run, policy=POLICIES.get(remat, save_all_but_weights))

        def over_pattern(remats: list[str]) -> Any:
            """A step over a block, or over the blocks of a pattern, with what each keeps."""

            def step(carry: tuple[Array, Array], layer: Any) -> tuple[Array, Array]:
                if hybrid is None:
                    run = checkpointed(remats[0], partial(call, graph))
                    found: tuple[Array, Array] = run(carry, layer)
                    return found
                blocks = nnx.merge(graph, layer)
                for name, remat in zip(block_names(hybrid), remats, strict=True):
                    block, state = nnx.split(blocks[name])
                    carry = checkpointed(remat, partial(call, block))(carry, state)
                return carry

            return step

        over = over_unrolled_layers if self.loop == "unrolled" else over_layers
        carry = (x, shards.varying(jnp.zeros_like(x), of_stream=True))
        leaves, structure = jax.tree.flatten(parameters)
        length = 1 if hybrid is None else len(hybrid.pattern)
        parts, ends = remats_of_blocks(self.remat, len(leaves[0]), length)
        stacks = zip(*(jnp.split(leaf, ends) for leaf in leaves), strict=True)
        for remats, stack in zip(parts, stacks, strict=True):
            carry = over(over_pattern(remats), carry, jax.tree.unflatten(structure, stack))
        y, _ = self.norm.after(*carry)
        return y


def remats_of_blocks(remat: str, repeats: int, length: int) -> tuple[list[list[str]], list[int]]:
    """Returns what the blocks of a pattern of `length` keep, and up to which repeat.

    Each list is of consecutive repeats; the last one's end is left out.
    """
    kind, _, last = remat.partition(":")
    kept = min(int(last or repeats * length), repeats * length)
    whole, some = divmod(kept, length)
    parts, ends, end = [], [], 0
    for count, own in ((repeats - -(-kept // length), 0), (some > 0, some), (whole, length)):
        if count:
            end += count
            parts.append(["attention"] * (length - own) + [kind] * own)
            ends.append(end)
    return parts, ends[:-1]


def block_names(of: Hybrid) -> list[str]:
    """Names of a pattern's blocks, such as `00M` of its first."""
    return [f"{index:02}{letter}" for index, letter in enumerate(of.pattern)]


def mixer_parts(of: Model, kernels: Kernels) -> MixerParts:
    """Returns the `MixerParts` of a model."""
    normal, deep = initializers(of)
    make_norm = partial(Norm, eps=of.norm_eps, kernel=kernels.norm)
    group_norm = partial(GroupNorm, eps=of.norm_eps, kernel=kernels.norm, shards=kernels.shards)
    chosen = kernels.linear_attention, kernels.conv, kernels.shards
    return MixerParts(of, make_norm, group_norm, normal, deep, *chosen)


def initializers(of: Model) -> tuple[Any, Any]:
    """Initializers of matrices, and of those that add to the residual stream: smaller values."""
    return initializer(), initializer(1 / math.sqrt(2 * of.layers))


def initializer(scale: float = 1.0) -> Any:
    """Normal numbers of standard deviation 0.02 x scale, in float32."""
    return jax.nn.initializers.normal(0.02 * scale, jnp.float32)
