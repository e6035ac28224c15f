"""Programs of linear cross-entropy for tools that run no Python."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from ..cross_entropy.exported import make_keywords, make_program, take_requested
from ..exporting import DTYPES, Cell, ConfigError, Program, check_extent
from .api import explain, linear_cross_entropy, linear_cross_entropy_per_token
from .plan import Plan

PLATFORMS = ("tpu", "cpu", "cuda")


def settings(config: Mapping[str, Any]) -> SimpleNamespace:
    """Returns what a config says of hidden states and what they are multiplied with.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("hidden", config.get("hidden"))
    vocab_axis = config.get("vocab_axis") or 0
    if vocab_axis not in (0, 1):
        raise ConfigError(
            f"vocab_axis is {vocab_axis!r}; it must be 0 for a weight [V, D] or 1 for [D, V]"
        )
    return SimpleNamespace(
        hidden=config["hidden"],
        bias=bool(config.get("bias")),
        vocab_axis=vocab_axis,
        max_scratch_bytes=config.get("max_scratch_bytes"),
    )


def program(cell: Cell) -> Program:
    """Returns a cell's program, of hidden, weight, and bias if any.

    Raises:
        ConfigError: an option that is not known, or a tile for which there is no room.
        ValueError: a budget below the least.
    """
    cell, requested = take_requested(cell)
    reduction, options = make_keywords(cell)
    settings = cell.settings
    dtype = DTYPES[cell.dtype]
    weight = [cell.vocab, settings.hidden]
    shapes = [(cell.tokens, settings.hidden), tuple(weight[:: 1 - 2 * settings.vocab_axis])]
    if settings.bias:
        shapes.append((cell.vocab,))
    keywords: dict[str, Any] = {
        "vocab_axis": settings.vocab_axis,
        "max_scratch_bytes": settings.max_scratch_bytes,
        "block_size": cell.block_size,
        "time_block": cell.time_block,
    }
    options |= {**keywords, "implementation": "reference" if cell.is_dense else None}
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def run(function: Any, arrays: Sequence[Any], labels: Any, **more: Any) -> Any:
        hidden, weight, *bias = arrays
        more |= options
        return function(hidden, weight, labels, bias=bias[0] if bias else None, **more)

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        return run(linear_cross_entropy, arrays, labels, weights=weights, reduction=reduction)

    def per_token(arrays: Sequence[Any], labels: Any, columns: Any) -> Any:
        more = {"columns": columns, **requested.keywords}
        return run(linear_cross_entropy_per_token, arrays, labels, **more)

    plan = None
    # `explain` plans no chunks of auxiliary outputs.
    if not cell.is_dense and not requested.any:
        bias = arrays[2] if settings.bias else None
        platform = cell.kind or cell.platform
        keywords |= {"reduction": reduction, "platform": platform}
        plan = explain(*arrays[:2], bias=bias, **keywords)
        _check_tile(cell, plan)
    return make_program(cell, arrays, reduced, per_token, requested, plan)


def _check_tile(cell: Cell, plan: Plan) -> None:
    """Refuses a tile that was made to fit: what is measured is what is named."""
    if cell.platform == "cuda":
        return
    # Tokens of a task on CPUs are not planned.
    unit = 128 if cell.platform == "tpu" else 1
    token_block = cell.time_block if cell.platform == "tpu" else None
    for name, extent, whole, taken in (
        ("time_block", token_block, cell.tokens, plan.tokens),
        ("block_size", cell.block_size, cell.vocab, plan.columns),
    ):
        if extent is not None and min(extent, -(-whole // unit) * unit) != taken:
            raise ConfigError(
                f"tile.{name} is {extent}, for which there is no room; the plan is {plan}: lower "
                f"tile.{name} or raise max_scratch_bytes"
            )


def tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile that was named: the plan says the rest."""
    return {"time_block": cell.time_block, "block_size": cell.block_size}


def described(cell: Cell, program: Program) -> dict[str, Any]:
    """Returns the settings, the plan, and the bytes that kernels move."""
    plan = program.plan
    found = {"linear": vars(cell.settings), "plan": None if plan is None else str(plan)}
    return found | ({"moved": dict(plan.moved)} if plan is not None and plan.moved else {})
