"""Programs of cross-entropy for tools that run no Python.

Those of the kernels for TPUs, and losses that something multiplies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import pallas
from ..exporting import DTYPES, Cell, ConfigError, Program, check_options
from . import tpu_plan
from .api import cross_entropy, cross_entropy_per_token
from .known import MOST_COLUMNS

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
class AskedOfEach:
    """What a config asks of each token beside loss, logps and lse."""

    distribution: bool
    # Columns a token; None for none.
    columns: int | None

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return self.distribution or self.columns is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """The options of a loss a token for it, but for the columns themselves."""
        distribution = self.distribution
        return {
            "return_lse": True,
            "return_entropy": distribution,
            "return_correct": distribution,
        }


def settings(config: Mapping[str, Any]) -> None:
    """There are no keys of its own."""


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    factor = factor_of(cell)
    cell, asked = asked_of_each(cell)
    own = ("factor", "factor_form")
    others = {key: value for key, value in cell.options.items() if key not in own}
    cell = replace(cell, options=others)
    reduction, keywords = keywords_of(cell)
    ours = "pallas" if cell.platform == "tpu" else None
    keywords["implementation"] = "reference" if cell.is_dense else ours

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        (logits,) = arrays
        return cross_entropy(logits, labels, weights=weights, reduction=reduction, **keywords)

    def per_token(arrays: Sequence[Any], labels: Any, columns: Any) -> Any:
        (logits,) = arrays
        more = asked.keywords | keywords
        return cross_entropy_per_token(logits, labels, columns=columns, **more)

    logits = jax.ShapeDtypeStruct((cell.tokens, cell.vocab), DTYPES[cell.dtype])
    return of_losses(cell, [logits], reduced, per_token, asked, factor=factor)


def asked_of_each(cell: Cell) -> tuple[Cell, AskedOfEach]:
    """Returns the cell without what it asks of each token beside its loss, and that.

    Raises:
        ConfigError: columns that there cannot be, or anything of losses that something reduces.
    """
    options = dict(cell.options)
    distribution = bool(options.pop("distribution", False))
    columns = options.pop("columns", None)
    is_count = isinstance(columns, int) and not isinstance(columns, bool)
    if columns is not None and not (is_count and 1 <= columns <= MOST_COLUMNS):
        raise ConfigError(f"options.columns is {columns!r}; it must be in [1, {MOST_COLUMNS}]")
    named = "distribution is true" if distribution else f"columns is {columns}"
    asked = AskedOfEach(distribution, columns)
    if asked.any and options.get("reduction") != "none":
        raise ConfigError(f"options.{named}; options.reduction must be none then")
    return replace(cell, options=options), asked


def factor_of(cell: Cell) -> float | None:
    """Returns what the reduced loss is multiplied by, None for an argument of the program.

    Raises:
        ConfigError: a form that is not known, or a factor of losses that nothing reduces.
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
    per_token: Callable[[Sequence[Any], Any, Any], Any],
    asked: AskedOfEach,
    plan: Any = None,
    factor: float | None = 1.0,
) -> Program:
    """Returns the program of a loss and its gradients for `arrays`.

    `reduced` is of arrays, labels and weights, which may be None, and `per_token` of arrays, labels
    and columns, which may be None and else follow the labels: it gives what is `asked` of each
    token. The reduced loss is multiplied by `factor`; None makes that the last argument.
    """
    count = len(arrays)
    has_weights = cell.options.get("weights") == "random"
    labels = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((cell.tokens,), jnp.float32)

    def forward_and_backward(*arguments: Any) -> Any:
        arrays, labels, given = arguments[:count], arguments[count], arguments[count + 1 :]
        columns, *cotangents = (None, *given) if asked.columns is None else given

        def of_each(*arrays: Any) -> Any:
            outputs = per_token(arrays, labels, columns)
            # What has a derivative comes first.
            moving = [one for one in outputs if one.dtype != bool]
            return moving, [one.astype(jnp.float32) for one in outputs if one.dtype == bool]

        outputs, pull, others = jax.vjp(of_each, *arrays, has_aux=True)
        return *outputs, *others, *pull(cotangents)

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
        arguments = [*arrays, labels, *[numbers] * (4 if asked.distribution else 3)]
        if asked.columns is not None:
            of_columns = (cell.tokens, asked.columns)
            arguments.insert(count + 1, jax.ShapeDtypeStruct(of_columns, jnp.int32))
            arguments.append(jax.ShapeDtypeStruct(of_columns, jnp.float32))
        return Program("forward_and_backward", forward_and_backward, arguments, plan)
    more = [numbers] if has_weights else []
    if factor is None:
        more.append(jax.ShapeDtypeStruct((), jnp.float32))
    return Program("value_and_grad", value_and_grad, [*arrays, labels, *more], plan)


def tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile that a cell's kernels take: what was named, but on TPUs all of it.

    Raises:
        ValueError: one that they do not take.
    """
    if cell.platform != "tpu":
        return {"time_block": cell.time_block, "block_size": cell.block_size}
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
