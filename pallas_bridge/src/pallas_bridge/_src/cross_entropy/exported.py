"""Programs of cross-entropy for tools that run no Python: those of the kernels for TPUs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import pallas
from ..exporting import DTYPES, Cell, ConfigError, Program, check_options
from . import tpu_plan
from .api import cross_entropy, cross_entropy_per_token

PLATFORMS = ("tpu",)
OPTIONS = ("reduction", "weights", "ignore_index", "label_smoothing", "z_loss", "softcap")


def settings(config: Mapping[str, Any]) -> None:
    """There are no keys of its own."""


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    reduction, keywords = keywords_of(cell)
    keywords["implementation"] = "pallas"

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        (logits,) = arrays
        return cross_entropy(logits, labels, weights=weights, reduction=reduction, **keywords)

    def per_token(arrays: Sequence[Any], labels: Any) -> Any:
        (logits,) = arrays
        return cross_entropy_per_token(logits, labels, return_lse=True, **keywords)

    logits = jax.ShapeDtypeStruct((cell.tokens, cell.vocab), DTYPES[cell.dtype])
    return of_losses(cell, [logits], reduced, per_token)


def keywords_of(cell: Cell) -> tuple[Any, dict[str, Any]]:
    """Returns the reduction, and options of a loss.

    Raises:
        ConfigError: an option that is not known.
    """
    check_options(cell.options, OPTIONS)
    options = dict(cell.options)
    reduction = options.pop("reduction", "mean")
    options.pop("weights", None)
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"options.reduction is {reduction!r}; it must be none, mean or sum")
    return reduction, {**options, "time_block": cell.time_block, "block_size": cell.block_size}


def of_losses(
    cell: Cell,
    arrays: Sequence[jax.ShapeDtypeStruct],
    reduced: Callable[[Sequence[Any], Any, Any], Any],
    per_token: Callable[[Sequence[Any], Any], Any],
    plan: Any = None,
) -> Program:
    """Returns the program of a loss and its gradients for `arrays`.

    `reduced` is of arrays, labels and weights, which may be None, and `per_token` of arrays and
    labels.
    """
    count = len(arrays)
    labels = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((cell.tokens,), jnp.float32)

    def forward_and_backward(*arguments: Any) -> Any:
        arrays, labels, cotangents = arguments[:count], arguments[count], arguments[count + 1 :]
        outputs, pull = jax.vjp(lambda *x: per_token(x, labels), *arrays)
        return *outputs, *pull(cotangents)

    def value_and_grad(*arguments: Any) -> Any:
        arrays, labels, given = arguments[:count], arguments[count], arguments[count + 1 :]
        loss, gradients = jax.value_and_grad(
            lambda *x: reduced(x, labels, given[0] if given else None), tuple(range(count))
        )(*arrays)
        return loss, *gradients

    if cell.options.get("reduction") == "none":
        arguments = [*arrays, labels, *[numbers] * 3]
        return Program("forward_and_backward", forward_and_backward, arguments, plan)
    more = [numbers] if cell.options.get("weights") == "random" else []
    return Program("value_and_grad", value_and_grad, [*arrays, labels, *more], plan)


def tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile that a cell's kernels take.

    Raises:
        ValueError: one that they do not take.
    """
    target = pallas.ANY if cell.kind is None else pallas.TARGETS[cell.kind]
    dtype = jnp.dtype(DTYPES[cell.dtype])
    wanted: Any = {"time_block": cell.time_block, "block_size": cell.block_size}
    chosen = tpu_plan.plan(
        target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=True
    ) or tpu_plan.plan(target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=False)
    assert chosen is not None
    return {
        "time_block": cell.time_block or chosen.time_block,
        "block_size": cell.block_size or chosen.block_size,
    }


def described(cell: Cell, program: Program) -> dict[str, Any]:
    """There is nothing of its own."""
    return {}
