"""Exported programs of cross-entropy, for tools that run no Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import pallas
from ..exporting import DTYPES, Cell, ConfigError, Program, check_options
from ..losses.aux_outputs import MOST_COLUMNS
from . import tpu_plan
from .api import cross_entropy, cross_entropy_per_token

PLATFORMS = ("tpu", "cpu", "cuda")
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


def settings(config: Mapping[str, Any]) -> None:
    """There are no keys of its own."""


def program(cell: Cell) -> Program:
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
    keywords |= tile(cell)

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


def tile(cell: Cell) -> dict[str, int | None]:
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


def described(cell: Cell, program: Program) -> dict[str, Any]:
    """There is nothing of its own."""
    return {}
