"""Exported programs of losses of logits and of linear losses, for tools that run no Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .. import pallas
from ..cross_entropy import tpu_plan
from ..cross_entropy.api import cross_entropy, cross_entropy_per_token
from ..exporting import DTYPES, Cell, ConfigError, Program, check_extent, check_options
from ..linear_cross_entropy.api import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)
from ..linear_cross_entropy.plan import Plan
from .aux_outputs import MOST_COLUMNS

OPTIONS = (
    "reduction",
    "weights",
    "ignore_index",
    "label_smoothing",
    "z_loss",
    "softcap",
    "temperature",
)
FORMS = ("constant", "argument")


@dataclass(frozen=True)
class LossExports:
    """What export asks of a loss (`exporting`)."""

    settings: Callable[[Mapping[str, Any]], Any]
    program: Callable[[Cell], Program]
    tile: Callable[[Cell], dict[str, int | None]]
    described: Callable[[Cell, Program], dict[str, Any]]

    PLATFORMS = ("tpu", "cpu", "cuda")


@dataclass(frozen=True)
class Requested:
    """The outputs a token that a config requests beside loss, logps and lse."""

    distribution: bool
    # Columns a token; None for none.
    columns: int | None

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return self.distribution or self.columns is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """The options that request them, but for the columns themselves."""
        is_on = self.distribution
        return {"return_lse": True, "return_entropy": is_on, "return_correct": is_on}


def _logits_program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    factor = find_factor(cell)
    cell, requested = take_requested(cell)
    own = ("factor", "factor_form")
    others = {key: value for key, value in cell.options.items() if key not in own}
    cell = replace(cell, options=others)
    reduction, keywords = make_keywords(cell)
    ours = "pallas" if cell.platform == "tpu" else None
    keywords["implementation"] = "reference" if cell.is_dense else ours
    # Operands of exported programs have their rows in order, as kernels have whose tile is named.
    keywords |= _logits_tile(cell)

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        (logits,) = arrays
        return cross_entropy(logits, labels, weights=weights, reduction=reduction, **keywords)

    def per_token(arrays: Sequence[Any], labels: Any, columns: Any) -> Any:
        (logits,) = arrays
        more = requested.keywords | keywords
        return cross_entropy_per_token(logits, labels, columns=columns, **more)

    logits = jax.ShapeDtypeStruct((cell.tokens, cell.vocab), DTYPES[cell.dtype])
    return make_program(cell, [logits], reduced, per_token, requested, factor=factor)


def take_requested(cell: Cell) -> tuple[Cell, Requested]:
    """Returns the cell without the requests of outputs a token, and these.

    Raises:
        ConfigError: a number of columns out of range, or a request beside a reduced loss.
    """
    options = dict(cell.options)
    distribution = bool(options.pop("distribution", False))
    columns = options.pop("columns", None)
    is_count = isinstance(columns, int) and not isinstance(columns, bool)
    if columns is not None and not (is_count and 1 <= columns <= MOST_COLUMNS):
        raise ConfigError(f"options.columns is {columns!r}; it must be in [1, {MOST_COLUMNS}]")
    named = "distribution is true" if distribution else f"columns is {columns}"
    requested = Requested(distribution, columns)
    if requested.any and options.get("reduction") != "none":
        raise ConfigError(f"options.{named}; options.reduction must be none then")
    return replace(cell, options=options), requested


def find_factor(cell: Cell) -> float | None:
    """Returns the factor of the reduced loss, None for an argument of the program.

    Raises:
        ConfigError: a form that is not known, or a factor of losses that are not reduced.
    """
    # JSON has words for what is not finite, which float reads.
    factor = float(cell.options.get("factor", 1.0))
    form = cell.options.get("factor_form", "constant")
    if form not in FORMS:
        raise ConfigError(f"options.factor_form is {form!r}; it must be constant or argument")
    is_plain = factor == 1.0 and form == "constant"
    if cell.options.get("reduction") == "none" and not is_plain:
        raise ConfigError(
            f"options.factor is {factor}, {form}; reduction none has no part for it: set "
            "options.reduction to mean or sum"
        )
    return factor if form == "constant" else None


def make_keywords(cell: Cell) -> tuple[Any, dict[str, Any]]:
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


def make_program(
    cell: Cell,
    arrays: Sequence[jax.ShapeDtypeStruct],
    reduced: Callable[[Sequence[Any], Any, Any], Any],
    per_token: Callable[[Sequence[Any], Any, Any], Any],
    requested: Requested,
    plan: Any = None,
    factor: float | None = 1.0,
) -> Program:
    """Returns the program of a loss and its gradients for `arrays`.

    `reduced` takes arrays, labels and weights, `per_token` arrays, labels and columns, which follow
    the labels; weights and columns may be None. `per_token` returns what is `requested`. `factor`
    multiplies the reduced loss; None makes it the last argument.
    """
    count = len(arrays)
    has_weights = cell.options.get("weights") == "random"
    labels = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    scalars = jax.ShapeDtypeStruct((cell.tokens,), jnp.float32)

    def forward_and_backward(*arguments: Any) -> Any:
        arrays, labels, given = arguments[:count], arguments[count], arguments[count + 1 :]
        columns, *cotangents = (None, *given) if requested.columns is None else given

        def run(*arrays: Any) -> Any:
            outputs = per_token(arrays, labels, columns)
            # What has a derivative comes first.
            moving = [one for one in outputs if one.dtype != bool]
            return moving, [one.astype(jnp.float32) for one in outputs if one.dtype == bool]

        outputs, vjp, others = jax.vjp(run, *arrays, has_aux=True)
        return *outputs, *others, *vjp(cotangents)

    def value_and_grad(*arguments: Any) -> Any:
        arrays, labels, given = arguments[:count], arguments[count], arguments[count + 1 :]
        weights = given[0] if has_weights else None
        times = given[-1] if factor is None else factor

        def f(*x: Any) -> Any:
            loss = reduced(x, labels, weights)
            return loss if factor == 1.0 else times * loss

        loss, gradients = jax.value_and_grad(f, tuple(range(count)))(*arrays)
        return loss, *gradients

    if cell.options.get("reduction") == "none":
        arguments = [*arrays, labels, *[scalars] * (4 if requested.distribution else 3)]
        if requested.columns is not None:
            shape = (cell.tokens, requested.columns)
            arguments.insert(count + 1, jax.ShapeDtypeStruct(shape, jnp.int32))
            arguments.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return Program("forward_and_backward", forward_and_backward, arguments, plan)
    more = [scalars] if has_weights else []
    if factor is None:
        more.append(jax.ShapeDtypeStruct((), jnp.float32))
    return Program("value_and_grad", value_and_grad, [*arrays, labels, *more], plan)


def _logits_tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile of a cell's kernels: the extents that were named, and on TPUs all.

    Raises:
        ValueError: a tile that kernels do not take.
    """
    if cell.platform != "tpu":
        return {"time_block": cell.time_block, "block_size": cell.block_size}
    target = pallas.ANY if cell.kind is None else pallas.TARGETS[cell.kind]
    dtype = jnp.dtype(DTYPES[cell.dtype])
    wanted: Any = {"time_block": cell.time_block, "block_size": cell.block_size}
    chosen = tpu_plan.plan_tiles(
        target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=True
    ) or tpu_plan.plan_tiles(
        target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=False
    )
    assert chosen is not None
    return {
        "time_block": cell.time_block or chosen.time_block,
        "block_size": cell.block_size or chosen.block_size,
    }


def _linear_settings(config: Mapping[str, Any]) -> SimpleNamespace:
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


def _linear_program(cell: Cell) -> Program:
    """Returns a cell's program, of hidden, weight, and bias if any.

    Raises:
        ConfigError: an option that is not known, or a tile for which there is no room.
        ValueError: a budget below the least.
    """
    cell, requested = take_requested(cell)
    reduction, options = make_keywords(cell)
    settings, dtype = cell.settings, DTYPES[cell.dtype]
    weight = [cell.vocab, settings.hidden]
    shapes = [(cell.tokens, settings.hidden), tuple(weight[:: 1 - 2 * settings.vocab_axis])]
    if settings.bias:
        shapes.append((cell.vocab,))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    keywords: dict[str, Any] = {
        "vocab_axis": settings.vocab_axis,
        "max_scratch_bytes": settings.max_scratch_bytes,
        **_linear_tile(cell),
    }
    options |= {**keywords, "implementation": cell.implementation}

    def run(function: Any, arrays: Sequence[Any], labels: Any, **more: Any) -> Any:
        hidden, weight, bias = (*arrays, None)[:3]
        return function(hidden, weight, labels, bias=bias, **more, **options)

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        return run(linear_cross_entropy, arrays, labels, weights=weights, reduction=reduction)

    def per_token(arrays: Sequence[Any], labels: Any, columns: Any) -> Any:
        more = {"columns": columns, **requested.keywords}
        return run(linear_cross_entropy_per_token, arrays, labels, **more)

    plan = None
    # `explain` plans no chunks of auxiliary outputs.
    if not cell.is_dense and not requested.any:
        keywords |= {"reduction": reduction, "platform": cell.kind or cell.platform}
        plan = explain(*arrays[:2], bias=arrays[2] if settings.bias else None, **keywords)
        _check_linear_tile(cell, plan)
    return make_program(cell, arrays, reduced, per_token, requested, plan)


def _check_linear_tile(cell: Cell, plan: Plan) -> None:
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


def _linear_tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile that was named: the plan says the rest."""
    return {"time_block": cell.time_block, "block_size": cell.block_size}


def _linear_described(cell: Cell, program: Program) -> dict[str, Any]:
    """Returns the settings, the plan, and the bytes that kernels move."""
    plan = program.plan
    found = {"linear": vars(cell.settings), "plan": None if plan is None else str(plan)}
    return found | ({"moved": dict(plan.moved)} if plan is not None and plan.moved else {})


EXPORTS = {
    "cross_entropy": LossExports(
        settings=lambda config: None,
        program=_logits_program,
        tile=_logits_tile,
        described=lambda cell, program: {},
    ),
    "linear_cross_entropy": LossExports(
        settings=_linear_settings,
        program=_linear_program,
        tile=_linear_tile,
        described=_linear_described,
    ),
}
