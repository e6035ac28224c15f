"""The next-token loss of hidden states and the head, by each kernel that a run may choose."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_bridge import cross_entropy, linear_cross_entropy

from .config import LossKernel

Array = jax.Array
# The label of a token that takes no part.
IGNORED = -100


def loss_of(
    kernel: LossKernel,
    hidden: Array,
    head: Array,
    labels: Array,
    mesh: Mesh | None = None,
    *,
    sequence_axis: str | None = None,
) -> Array:
    """Mean cross-entropy over the tokens that count.

    Args:
        kernel: "baseline", optax over logits; "fused", `pallas_bridge.cross_entropy` over the same
            logits; "fused_linear", `pallas_bridge.linear_cross_entropy`, which holds no logits.
        hidden: [B, T, D], in the dtype that the products take.
        head: [V, D] in float32, rounded to the dtype of `hidden`.
        labels: [B, T] int32; -100 marks a token that takes no part.
        mesh: The devices that the batch is split over, or None.
        sequence_axis: The axis of the mesh that shards T of `hidden`, or None.

    Returns:
        A scalar in float32.
    """
    with jax.named_scope("loss"):
        # By each kernel, so that all round alike; and a head of f32 beside hidden states of 16
        # bits has no kernel on CPUs.
        head = head.astype(hidden.dtype)
        if kernel == "fused_linear":
            return over_mesh(linear_cross_entropy, mesh, sequence_axis, hidden, head, labels)
        if kernel == "fused":
            return over_mesh(logits_loss, mesh, sequence_axis, hidden, head, labels)
        logits = hidden @ head.T
        counts = labels != IGNORED
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), jnp.where(counts, labels, 0)
        )
        return jnp.where(counts, losses, 0.0).sum() / jnp.maximum(counts.sum(), 1)


def logits_loss(hidden: Array, head: Array, labels: Array, **options: Any) -> Array:
    """`pallas_bridge.cross_entropy` of the logits, which its gradient takes the memory of."""
    loss: Array = cross_entropy(hidden @ head.T, labels, donate_logits=True, **options)
    return loss


def over_mesh(
    loss: Callable[..., Array],
    mesh: Mesh | None,
    sequence_axis: str | None,
    hidden: Array,
    head: Array,
    labels: Array,
) -> Array:
    """A loss of hidden states and the head; on a mesh by each device of its part.

    Tokens stay on the devices that have them, but for those along `sequence_axis`, and so does the
    vocabulary where the axis `model` shards it; a head that `fsdp` shards by its hidden axis is
    gathered.
    """
    if mesh is None:
        return loss(hidden, head, labels)
    over = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))
    model = "model" if "model" in mesh.axis_names else None
    loss = partial(loss, reduction="sum", **({} if model is None else {"axis_name": model}))

    def mean_over_devices(hidden: Array, head: Array, labels: Array) -> Array:
        if sequence_axis is not None:
            # As NCCL writes them: device by device.
            hidden = jax.lax.all_gather(hidden, sequence_axis)
            labels = jnp.moveaxis(labels.reshape(len(labels), len(hidden), -1), 1, 0)
        total, count = loss(hidden, head, labels), jnp.sum(labels != IGNORED)
        if over:
            total, count = jax.lax.psum(total, over), jax.lax.psum(count, over)
        return total / jnp.maximum(count, 1)

    tokens = P(over or None)
    sharded = jax.shard_map(
        mean_over_devices,
        mesh=mesh,
        in_specs=(P(over or None, sequence_axis), P(model), tokens),
        out_specs=P(),
    )
    result: Array = sharded(hidden, head, labels)
    return result
