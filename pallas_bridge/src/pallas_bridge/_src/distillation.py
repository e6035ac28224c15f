"""Distillation by hidden states: neither model's logits are in memory at once."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .checks import as_array, check_dtype, check_float32, promoted
from .chunk_loops import for_each_chunk, pad_tokens, put_rows, slice_rows, zeros
from .cross_entropy.api import cross_entropy
from .keywords import hinted
from .logits_gemms import FLOAT32, Gemms, scale_gradients, zero_rows

OPERATION = "linear_kl_divergence"
# Bytes of a chunk's logits of both models, in float32.
CHUNK_BYTES = 1 << 30
LEAST_TOKENS = 128
# A label of cross-entropy for tokens of which lse alone is wanted.
IGNORED = -100
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
    platform, with lse by the kernel of `cross_entropy`. Reverse mode only.

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
    return (*scale_gradients(gradients, cotangent), None, None)


_loss.defvjp(_forward, _backward)


def _run(
    fixed: tuple[float, int], operands: Any, *, has_gradients: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the loss, and the gradients of hidden [N, D], weight [V, D] and factors [N]."""
    temperature, count = fixed
    hidden, weight, factors, teacher_hidden, teacher_weight = operands
    tokens, gemms = hidden.shape[0], Gemms(vocab_axis=0)
    # Chunks of one size, as even as they can be.
    count = max(-(-tokens // max(-(-tokens // count), 1)), 1)
    rows, row_factors, teacher_rows = pad_tokens(count, hidden, factors, teacher_hidden)
    _, head = promoted(hidden, weight)
    _, teacher_head = promoted(teacher_hidden, teacher_weight)

    def log_softmax(x: jax.Array, head: jax.Array) -> jax.Array:
        logits = gemms.logits(x.astype(head.dtype), head, None) / temperature
        # One pass over the logits; of two, the sum of exponentials would wait for the maximum.
        _, lse = cross_entropy(
            logits, jnp.full(logits.shape[:1], IGNORED), reduction="none", return_lse=True
        )
        return logits - lse[:, None]

    def body(first: Any, count: int, carry: Any) -> Any:
        outputs, dweight = carry
        x, factor, teacher_x = slice_rows(first, count, rows, row_factors, teacher_rows)
        student, teacher = log_softmax(x, head), log_softmax(teacher_x, teacher_head)
        p = jnp.exp(teacher)
        # 0 * (-inf - z) = 0: a token that the teacher excludes.
        found = [jnp.where(p == 0, 0, p * (teacher - student)).sum(-1)]
        if has_gradients:
            masked = factor == 0
            dlogits = (jnp.exp(student) - p) * (factor / temperature)[:, None]
            dlogits = zero_rows(masked, dlogits).astype(hidden.dtype)
            found.append(gemms.grad_hidden(dlogits, head, FLOAT32))
            dweight = gemms.add_grad_weight(dweight, dlogits, zero_rows(masked, x))
        return put_rows(outputs, found, first), dweight

    outputs = (zeros(row_factors), *([zeros(rows, dtype=rows.dtype)] if has_gradients else []))
    sums = zeros(weight) if has_gradients else None
    carry = for_each_chunk(rows.shape[0], count, body, (outputs, sums))
    (losses, *drows), sums = carry
    losses = losses[:tokens]
    loss = jnp.where(factors == 0, 0, losses * factors).sum()
    if sums is None:
        return loss, ()
    return loss, (drows[0][:tokens], sums.astype(weight.dtype), losses)
