"""Distillation by hidden states: neither model's logits are in memory at once."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import library, linear
from .bound import Bound
from .checks import as_array, check_dtype, check_float32, check_integer, check_word, promoted
from .chunk_loops import empty, for_each_chunk, make_alike, pad_tokens, put_rows, slice_rows, zeros
from .cross_entropy.api import cross_entropy
from .deferred import bind_deferred, choose_if_whole, make_primitive
from .implementations import gpus
from .keywords import hinted
from .logits_gemms import FLOAT32, Gemms, scale_gradients, zero_rows
from .losses.reduction import countable
from .operation import Operation
from .targets import declared


class _Divergence(Operation):
    """The operation, which has no implementation with second derivatives."""

    def refuse_derivative(self) -> NoReturn:
        """Refuses derivatives of the loss that comes with gradients, and of these.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{self}: second derivatives (grad of grad, hessian, jvp of grad) are not there; "
            "jax.nn.log_softmax of both models' logits has them"
        )


OPERATION = _Divergence("linear_kl_divergence", target=None)
TARGET = "xentile_kl_divergence"
# The largest vocabulary for clusters of 8 CTAs, which every GPU with clusters runs; those of 16
# need a Hopper GPU that is not partitioned.
PORTABLE_VOCAB, HOPPER_MULTIPROCESSORS = 163840, 114
# Columns of a vector of the kernel's.
VECTOR = 4
GEMMS = Gemms(vocab_axis=0)
# Tokens of a chunk at most, where their number is a symbol: they are padded to whole chunks.
SYMBOLIC_CHUNK = 1024
# Bytes of a chunk's logits of both models, in float32.
CHUNK_BYTES = 1 << 30
LEAST_TOKENS = 128
# A label of cross-entropy for tokens of which lse alone is wanted.
IGNORED = -100
Reduction = Literal["mean", "sum"]


class Fixed(NamedTuple):
    """What is known when a program is made; dtypes are those of hidden and weight."""

    temperature: float
    chunk: int
    dtypes: tuple[Any, Any]


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

    Tokens run in chunks, of which logits are in memory. The pass that computes the loss computes
    gradients too, where they are wanted: four GEMMs of N x D x V. Logits, distributions and sums
    are f32; the gradient of logits is rounded once to the dtype of `hidden`, to be a GEMM's
    operand; float16 gradients are f32 until the cotangent is applied. The teacher's operands have
    no gradient. On Hopper a kernel makes loss and gradient of
    a chunk's logits in one pass, of a vocabulary that is a multiple of 4; elsewhere, and where XLA
    shards arrays, XLA's program does, with lse by the kernel of `cross_entropy`. Reverse mode only.

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
        1 GiB. The gradient of logits is kept for as many tokens as take so many bytes too, or for
        all where these take no more with sums of dweight in f32, which are then not needed.

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
    check_word("reduction", reduction, get_args(Reduction))
    temperature = check_float32("temperature", temperature, is_positive=True)
    batch = rows.shape[:-1]
    factors = jnp.ones(batch, jnp.float32)
    if weights is not None:
        factors = as_array("weights", weights, "[..], as hidden [.., D]")
        if jnp.issubdtype(factors.dtype, jnp.complexfloating):
            raise TypeError(f"weights has dtype {factors.dtype}; it must be real")
        factors = factors.astype(jnp.float32)
        if factors.shape != batch:
            raise ValueError(f"weights has shape {factors.shape}; it must be {batch}")
    if reduction == "mean":
        total = factors.sum()
        factors = jnp.where(total == 0, 0, factors / jnp.where(total == 0, 1, total))
    count = max(CHUNK_BYTES // (8 * max(head.shape[0], 1)), LEAST_TOKENS)
    if not isinstance(math.prod(batch), int):
        count = min(count, SYMBOLIC_CHUNK)
    count = count if chunk_tokens is None else check_integer("chunk_tokens", chunk_tokens, 1)
    teacher = map(jax.lax.stop_gradient, (_flat(teacher_rows), teacher_head))
    operands = make_alike(_flat(rows), head, factors.reshape(-1), *teacher)
    return _loss(Fixed(temperature, count, (rows.dtype, head.dtype)), *operands)


def _flat(rows: jax.Array) -> jax.Array:
    return rows.reshape(-1, rows.shape[-1])


def _check_shapes(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> None:
    for name, array in (("weight", weight), ("teacher_weight", teacher_weight)):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must be a matrix, [V, D]")
        if not all(isinstance(one, int) for one in array.shape):
            raise ValueError(
                f"{name} has shape {array.shape}; its extents must be numbers: only axes of tokens "
                "may be symbols"
            )
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
def _loss(fixed: Fixed, *operands: jax.Array) -> jax.Array:
    """Returns the loss, without gradients."""
    hidden, _, factors, teacher_hidden, _ = operands
    temperature, tokens = fixed.temperature, hidden.shape[0]
    count = _even(tokens, fixed.chunk)
    arrays = pad_tokens(count, hidden, factors, teacher_hidden)
    heads = _promoted_heads(*operands)

    def body(first: Any, count: int, losses: Any) -> Any:
        x, _, teacher_x = slice_rows(first, count, *arrays)
        logs = (_log_softmax(z, temperature) for z in _logits(heads, x, teacher_x))
        return put_rows((losses,), (_divergences(*logs),), first)[0]

    losses = for_each_chunk(arrays[0].shape[0], count, body, zeros(arrays[1]))[:tokens]
    return _total(losses, factors)


def _forward(fixed: Fixed, *operands: jax.Array) -> Any:
    by_xla = Bound(_value_and_gradients, _run_xla, fixed)
    # Derivatives of gradients that loops over chunks have added up would be wrong.
    by_xla_alone = partial(linear.opaque, OPERATION, by_xla)
    if not _has_kernel(operands[1].shape[0]):
        return by_xla_alone(*operands)
    by_kernel = Bound(_value_and_gradients, _run_kernel, fixed)
    bound = Bound(bind_deferred, _pass, by_xla)
    return jax.lax.platform_dependent(
        *operands, cuda=partial(bound, call=by_kernel), default=by_xla_alone
    )


def _backward(fixed: Fixed, gradients: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    *scaled, dfactors = scale_gradients(gradients, cotangent)
    rounded = (x.astype(dtype) for x, dtype in zip(scaled, fixed.dtypes, strict=True))
    return (*rounded, dfactors, None, None)


_loss.defvjp(_forward, _backward)
_pass = make_primitive(OPERATION, TARGET, choose_if_whole)


def _has_kernel(vocab: int) -> bool:
    """Whether every GPU has the kernel for a vocabulary."""
    devices = gpus()
    if not (devices and library.has("cuda", TARGET)):
        return False
    if vocab % VECTOR or not 0 < vocab <= declared(TARGET).largest("V"):
        return False
    if any(getattr(one, "compute_capability", None) != "9.0" for one in devices):
        return False
    counts = (int(getattr(one, "core_count", HOPPER_MULTIPROCESSORS)) for one in devices)
    return vocab <= PORTABLE_VOCAB or min(counts) >= HOPPER_MULTIPROCESSORS


def _even(tokens: Any, most: int) -> int:
    """Returns a chunk of at most `most` tokens, for chunks as even as they can be."""
    if not isinstance(tokens, int):
        return most
    return max(-(-tokens // max(-(-tokens // most), 1)), 1)


def _promoted_heads(
    hidden: Any, weight: Any, _: Any, teacher_hidden: Any, teacher_weight: Any
) -> tuple[jax.Array, jax.Array]:
    return promoted(hidden, weight)[1], promoted(teacher_hidden, teacher_weight)[1]


def _logits(heads: Any, *rows: jax.Array) -> list[jax.Array]:
    """Returns the logits of both models, [n, V] each."""
    return [
        GEMMS.logits(x.astype(head.dtype), head, None) for x, head in zip(rows, heads, strict=True)
    ]


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
    z = logits / temperature
    # One pass over the logits; of two, the sum of exponentials would wait for the maximum.
    _, lse = cross_entropy(z, jnp.full(z.shape[:1], IGNORED), reduction="none", return_lse=True)
    return z - lse[:, None]


def _divergences(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Returns the divergence of each token, of logarithms of probabilities."""
    p = jnp.exp(teacher)
    # 0 * (-inf - z) = 0: a token that the teacher excludes.
    return jnp.where(p == 0, 0, p * (teacher - student)).sum(-1)


def _total(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return jnp.where(factors == 0, 0, losses * factors).sum()


def _run_xla(
    temperature: float, logits: Any, factors: jax.Array, dlogits: jax.Array, first: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns divergences of tokens, and dlogits with their rows, from `first` on, replaced."""
    student, teacher = (_log_softmax(z, temperature) for z in logits)
    rows = (jnp.exp(student) - jnp.exp(teacher)) * (factors / temperature)[:, None]
    (dlogits,) = put_rows((dlogits,), (zero_rows(factors == 0, rows),), first)
    return _divergences(student, teacher), dlogits


def _run_kernel(
    temperature: float, logits: Any, factors: jax.Array, dlogits: jax.Array, first: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns what `_run_xla` does, by the kernel (`kernels/kl_divergence.cuh`)."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (factors, dlogits)]
    call = jax.ffi.ffi_call(TARGET, shapes, input_output_aliases={4: 1})
    place = jnp.asarray(first, jnp.int32).reshape(1)
    found = call(*logits, factors, place, dlogits, temperature=np.float64(temperature))
    losses, dlogits, _ = make_alike(*found, factors)
    return losses, dlogits


def _value_and_gradients(
    run: Callable[..., Any], fixed: Fixed, *operands: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the loss, and the gradients of hidden [N, D], weight [V, D] and factors [N].

    Those of float16 arrays are f32, so that they do not underflow before the cotangent is applied.
    """
    hidden, weight, factors, teacher_hidden, _ = operands
    temperature, count, dtypes = fixed
    kept = [FLOAT32 if dtype == jnp.float16 else dtype for dtype in dtypes]
    scale, scaled = None, factors
    if hidden.dtype == jnp.float16:
        # So large that dlogits do not underflow either.
        scale = jnp.maximum(jnp.abs(factors).max(initial=0), jnp.finfo(jnp.float32).tiny)
        scaled = factors / scale
    heads, (tokens, width), vocab = _promoted_heads(*operands), hidden.shape, weight.shape[0]
    # A token's dlogits, where a chunk has logits of both models in f32.
    group = count * 8 // hidden.dtype.itemsize
    is_known = isinstance(tokens, int)
    if is_known and (tokens - group) * hidden.dtype.itemsize <= 4 * width:
        group = max(tokens, 1)
    count = _even(tokens, count)
    # Symbols are padded to whole chunks, not to whole groups.
    group = count * -(-_even(tokens, group) // count) if is_known else count
    arrays = pad_tokens(count, hidden, scaled, teacher_hidden)
    rows, all_factors, _ = arrays
    total = rows.shape[0]

    def run_group(first: Any, size: int, carry: Any) -> Any:
        def run_chunk(start: Any, count: int, carry: Any) -> Any:
            losses, dlogits = carry
            x, factor, teacher_x = slice_rows(first + start, count, *arrays)
            found, dlogits = run(temperature, _logits(heads, x, teacher_x), factor, dlogits, start)
            return put_rows((losses,), (found,), first + start)[0], dlogits

        losses, drows, dweight = carry
        dlogits = empty(rows, (size, vocab), hidden.dtype)
        losses, dlogits = for_each_chunk(size, count, run_chunk, (losses, dlogits))
        x, factor = slice_rows(first, size, rows, all_factors)
        found = GEMMS.grad_hidden(dlogits, heads[0], FLOAT32)
        (drows,) = put_rows((drows,), (found,), first)
        x = zero_rows(factor == 0, x)
        if dweight is None:  # one group: nothing to add to, and one rounding
            return losses, drows, GEMMS.grad_weight(dlogits, x, kept[1])
        return losses, drows, GEMMS.add_grad_weight(dweight, dlogits, x)

    carry = zeros(all_factors), zeros(rows, dtype=kept[0])
    sums = None if is_known and 0 < total <= group else zeros(weight)
    losses, drows, dweight = for_each_chunk(total, group, run_group, (*carry, sums))
    losses = losses[:tokens]
    gradients = drows[:tokens], dweight.astype(kept[1])
    if scale is not None:
        gradients = scale_gradients(gradients, scale)
    return _total(losses, factors), (*gradients, countable(losses, factors))
