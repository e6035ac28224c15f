"""Distillation by hidden states: neither model's logits are in memory at once."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .checks import as_array, check_dtype, check_float32
from .keywords import hinted

OPERATION = "linear_kl_divergence"
# Bytes of a chunk's logits of both models, in float32.
CHUNK_BYTES = 1 << 30
LEAST_TOKENS = 128
Reduction = Literal["mean", "sum"]


@hinted
def linear_kl_divergence(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    *,
    temperature: float = 1.0,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Forward KL divergence from a teacher's to a student's distribution (Hinton et al., 2015).

        z = hidden . weight / temperature, and so the teacher's
        loss = sum(softmax(teacher_z) * (log_softmax(teacher_z) - log_softmax(z)))     of a token

    Tokens run in chunks, of which logits and their gradient are in memory. The pass that computes
    the loss computes gradients too, where they are wanted: four GEMMs of N x D x V. Logits,
    distributions and sums are f32; the gradient of logits is rounded once to the dtype of `hidden`,
    to be a GEMM's operand. The teacher's operands have no gradient. XLA's program on every
    platform. Reverse mode only.

    Args:
      hidden: [.., D], the student's, in bfloat16, float16 or float32.
      weight: [V, D], the student's output head.
      teacher_hidden: [.., E], of as many tokens.
      teacher_weight: [V, E], the teacher's output head.
      temperature: t > 0 divides the logits of both. Gradients of logits shrink by 1 / t^2; multiply
        the loss by t^2 to keep their size.
      weights: [..], a factor of each token, or a mask; ones where None. A token of weight 0 changes
        neither loss nor gradients, whatever it holds.
      reduction: "mean" (over the sum of weights; 0 where this is 0) or "sum".
      chunk_tokens: tokens of a chunk; None for as many as keep the logits of both models below
        1 GiB.

    Returns:
      The loss, a scalar in float32.

    Raises:
      TypeError: a dtype that is not taken.
      ValueError: shapes that disagree, or an option outside its range.

    >>> student, teacher = jnp.ones((4, 8)), jnp.ones((4, 16))
    >>> print(linear_kl_divergence(student, jnp.ones((32, 8)), teacher, jnp.ones((32, 16))))
    0.0
    """
    given = {
        "hidden": (hidden, "[.., D]"),
        "weight": (weight, "[V, D]"),
        "teacher_hidden": (teacher_hidden, "[.., E]"),
        "teacher_weight": (teacher_weight, "[V, E]"),
    }
    arrays = [as_array(name, one, right) for name, (one, right) in given.items()]
    for name, array in zip(given, arrays, strict=True):
        check_dtype(name, array)
    rows, head, teacher_rows, teacher_head = arrays
    _check_shapes(*arrays)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    temperature = check_float32("temperature", temperature, is_positive=True)
    batch = rows.shape[:-1]
    factors = jnp.ones(batch, jnp.float32)
    if weights is not None:
        factors = as_array("weights", weights, "[..], as hidden [.., D]").astype(jnp.float32)
        if factors.shape != batch:
            raise ValueError(f"weights has shape {factors.shape}; it must be {batch}")
    if reduction == "mean":
        total = factors.sum()
        factors = jnp.where(total == 0, 0, factors / jnp.where(total == 0, 1, total))
    count = chunk_tokens or max(CHUNK_BYTES // (8 * max(head.shape[0], 1)), LEAST_TOKENS)
    if count < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    return _loss(
        (temperature, count),
        rows.reshape(-1, rows.shape[-1]),
        head,
        factors.reshape(-1),
        *map(
            jax.lax.stop_gradient,
            (teacher_rows.reshape(-1, teacher_rows.shape[-1]), teacher_head),
        ),
    )


def _check_shapes(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> None:
    for name, array in (("weight", weight), ("teacher_weight", teacher_weight)):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must be a matrix, [V, D]")
    pairs = (
        ("weight", weight, "hidden", hidden),
        ("teacher_weight", teacher_weight, "teacher_hidden", teacher_hidden),
    )
    for name, head, of, rows in pairs:
        if rows.ndim < 1 or rows.shape[-1] != head.shape[1]:
            raise ValueError(
                f"{name} has shape {head.shape}; it must be [V, D] with the D of {of}, which has "
                f"shape {rows.shape}"
            )
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden has shape {teacher_hidden.shape}; it must have the tokens of hidden, "
            f"which has shape {hidden.shape}"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight has {teacher_weight.shape[0]} rows; it must have those of the "
            f"vocabulary of weight, {weight.shape[0]}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(fixed: tuple[float, int], *operands: jax.Array) -> jax.Array:
    loss, _ = _run(fixed, operands, has_gradients=False)
    return loss


def _forward(fixed: tuple[float, int], *operands: jax.Array) -> Any:
    return _run(fixed, operands, has_gradients=True)


def _backward(_: tuple[float, int], gradients: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    scaled = [(one.astype(jnp.float32) * cotangent).astype(one.dtype) for one in gradients]
    return (*scaled, None, None)


_loss.defvjp(_forward, _backward)


def _run(
    fixed: tuple[float, int], operands: Any, *, has_gradients: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the loss, and the gradients of hidden [N, D], weight [V, D] and factors [N]."""
    temperature, count = fixed
    hidden, weight, factors, teacher_hidden, teacher_weight = operands
    tokens = hidden.shape[0]
    chunks = max(-(-tokens // count), 1)
    count = -(-tokens // chunks)

    def in_chunks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, chunks * count - tokens)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(chunks, count, *x.shape[1:])

    def log_softmax(rows: jax.Array, head: jax.Array) -> jax.Array:
        logits = jnp.matmul(rows, head.T, preferred_element_type=jnp.float32) / temperature
        return jax.nn.log_softmax(logits, axis=-1)

    def step(dweight: Any, chunk: Any) -> Any:
        rows, factor, teacher_rows = chunk
        student = log_softmax(rows, weight)
        teacher = log_softmax(teacher_rows, teacher_weight)
        p = jnp.exp(teacher)
        # 0 * (-inf - z) = 0: a token that the teacher excludes.
        losses = jnp.where(p == 0, 0, p * (teacher - student)).sum(-1)
        if not has_gradients:
            return dweight, (losses, (losses,))
        is_counted = (factor != 0)[:, None]
        dlogits = (jnp.exp(student) - p) * (factor / temperature)[:, None]
        dlogits = jnp.where(is_counted, dlogits, 0).astype(hidden.dtype)
        drows = jnp.matmul(dlogits, weight, preferred_element_type=jnp.float32)
        dweight += jnp.matmul(
            dlogits.T, jnp.where(is_counted, rows, 0), preferred_element_type=jnp.float32
        )
        return dweight, (losses, (drows.astype(hidden.dtype),))

    sums = jnp.zeros(weight.shape if has_gradients else (), jnp.float32)
    sums, (losses, more) = jax.lax.scan(
        step, sums, (in_chunks(hidden), in_chunks(factors), in_chunks(teacher_hidden))
    )
    losses = losses.reshape(-1)[:tokens]
    loss = jnp.where(factors == 0, 0, losses * factors).sum()
    if not has_gradients:
        return loss, ()
    drows = more[0].reshape(-1, hidden.shape[-1])[:tokens]
    return loss, (drows, sums.astype(weight.dtype), losses)
