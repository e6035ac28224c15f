"""Exports programs for tools that run no Python: the TPU kernels, and linear cross-entropy.

    python -m pallas_bridge.export --config FILE [--out FOLDER]

FILE is a config of `microbench`, or of its sweep of tiles: YAML (with PyYAML) or JSON, which is
YAML too. For each tile that it names, FOLDER gets a program and its manifest, in the format of
docs/pjrt.md, by the name that `program` has in the config (`tpu_{time_block}_{block_size}.json`
without one, or with the platform that `backend` names in the place of `tpu`). What is there already
and was made by the same code of the same config is left.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jax.sharding import use_abstract_mesh

from pallas_bridge import (
    cross_entropy,
    cross_entropy_per_token,
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)
from pallas_bridge._src import library, pallas
from pallas_bridge._src.compat import abstract_tpu, for_oldest_plugin, with_rows_in_order
from pallas_bridge._src.cross_entropy import tpu_plan
from pallas_bridge._src.linear_cross_entropy.plan import Plan

MANIFEST_VERSION = 1
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32"}
# The platforms of each operation's programs, the default first.
PLATFORMS = {"cross_entropy": ("tpu",), "linear_cross_entropy": ("tpu", "cpu", "cuda")}
# As libtpu names the first part of a topology.
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "softcap")


class ConfigError(ValueError):
    """A config that cannot be exported, and what would do."""


@dataclass(frozen=True)
class Linear:
    """What a config says of hidden states and what they are multiplied with."""

    hidden: int
    bias: bool
    vocab_axis: int
    max_scratch_bytes: int | None


@dataclass(frozen=True)
class Cell:
    """One program: a problem, its platform and its tile."""

    op: str
    platform: str
    # Of `implementation`, where the platform has more than one.
    is_dense: bool
    tokens: int
    vocab: int
    dtype: str
    # None for the kernels' own choice.
    time_block: int | None
    block_size: int | None
    options: Mapping[str, Any]
    # None for an operation over logits.
    linear: Linear | None
    # Of device, or None for a program that fits every TPU.
    kind: str | None
    path: Path


@dataclass(frozen=True)
class Operation:
    """What a program is of: arrays that have a gradient, and functions of these."""

    arrays: Sequence[jax.ShapeDtypeStruct]
    # Of arrays, labels and weights, which may be None.
    reduced: Callable[[Sequence[Any], Any, Any], Any]
    # Of arrays and labels.
    per_token: Callable[[Sequence[Any], Any], Any]
    # How it is cut, if that is planned.
    plan: Plan | None = None


def read(path: Path) -> dict[str, Any]:
    """Returns the config in a file.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        try:
            import yaml  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise ConfigError(
                f"config {path} is no JSON, and YAML needs PyYAML: pip install pyyaml"
            ) from None
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"config {path} is not valid YAML: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"config {path} is no mapping of keys to values")
    return config


def cells(config: Mapping[str, Any], folder: Path) -> Iterator[Cell]:
    """Yields what a config of a measurement or of a sweep has to be exported for.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    cell = config.get("cell", config)
    tile = cell.get("tile") or {}

    def extents(many: str, one: str) -> list[int | None]:
        found = config.get(many) or [tile.get(one)]
        for extent in found:
            if extent is not None:
                _check_extent(one, extent, f", in tile.{one} or, for a sweep, in {many}")
        return list(found)

    op = cell.get("op", "cross_entropy")
    if op not in PLATFORMS:
        raise ConfigError(f"op is {op!r}; it must be one of {', '.join(PLATFORMS)}")
    if cell is not config and "max_scratch_bytes" in config:
        raise ConfigError(
            f"max_scratch_bytes is {config['max_scratch_bytes']!r}, a sweep of budgets, whose "
            "programs microbench sweep exports itself; name a config of microbench of one budget"
        )
    backend = cell.get("backend", f"xla:{PLATFORMS[op][0]}")
    platform = str(backend).removeprefix("xla:")
    if platform not in PLATFORMS[op]:
        choices = ", ".join(f"xla:{platform}" for platform in PLATFORMS[op])
        raise ConfigError(f"backend is {backend!r}; {op} is exported for {choices}")
    dtype = cell.get("dtype", "bf16")
    dtypes = [name for name in DTYPES if platform != "tpu" or name != "f16"]
    if dtype not in dtypes:
        where = "TPU" if platform == "tpu" else backend
        raise ConfigError(f"dtype is {dtype!r}; on {where} it must be one of {', '.join(dtypes)}")
    topology = cell.get("topology")
    generation = None if topology is None else str(topology).partition(":")[0]
    if generation is not None and generation not in KINDS:
        raise ConfigError(f"topology is {topology}; there are kernels for {', '.join(KINDS)}")
    default = f"{platform}_{{time_block}}_{{block_size}}.json"
    pattern = Path(cell.get("program") or default).name
    for time_block in extents("time_blocks", "time_block"):
        for block_size in extents("block_sizes", "block_size"):
            name = pattern.replace("{time_block}", str(time_block or "default"))
            yield Cell(
                op=op,
                platform=platform,
                is_dense=op == "linear_cross_entropy" and cell.get("impl") == "reference",
                tokens=int(cell.get("time", 512)),
                vocab=int(cell.get("vocab", 151_643)),
                dtype=dtype,
                time_block=time_block,
                block_size=block_size,
                options=cell.get("options") or {},
                linear=_linear(cell) if op == "linear_cross_entropy" else None,
                kind=None if generation is None else KINDS[generation],
                path=folder / name.replace("{block_size}", str(block_size or "default")),
            )


def _check_extent(name: str, extent: Any, where: str = "") -> None:
    if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
        raise ConfigError(f"{name} is {extent!r}; it must be an integer of at least 1{where}")


def _linear(cell: Mapping[str, Any]) -> Linear:
    _check_extent("hidden", cell.get("hidden"))
    vocab_axis = cell.get("vocab_axis") or 0
    if vocab_axis not in (0, 1):
        raise ConfigError(
            f"vocab_axis is {vocab_axis!r}; it must be 0 for a weight [V, D] or 1 for [D, V]"
        )
    return Linear(
        hidden=cell["hidden"],
        bias=bool(cell.get("bias")),
        vocab_axis=vocab_axis,
        max_scratch_bytes=cell.get("max_scratch_bytes"),
    )


def function(cell: Cell) -> tuple[str, Any, list[jax.ShapeDtypeStruct], Plan | None]:
    """Returns a cell's program: its name, function, types of arguments, and plan if it has one.

    Raises:
        ConfigError: an option that is not known.
        ValueError: a budget below the least.
    """
    options = dict(cell.options)
    reduction, weights = options.pop("reduction", "mean"), options.pop("weights", "none")
    if unknown := sorted(set(options) - set(OPTIONS)):
        known = ", ".join(("reduction", "weights", *OPTIONS))
        raise ConfigError(f"unknown key options.{unknown[0]}; the options are {known}")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"options.reduction is {reduction!r}; it must be none, mean or sum")
    keywords = {**options, "time_block": cell.time_block, "block_size": cell.block_size}
    if cell.linear is None:
        operation = _cross_entropy(cell, reduction, keywords)
    else:
        operation = _linear_cross_entropy(cell, cell.linear, reduction, keywords)
    count = len(operation.arrays)
    labels = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((cell.tokens,), jnp.float32)
    if reduction == "none":

        def forward_and_backward(*arguments: Any) -> Any:
            arrays, labels, cotangents = arguments[:count], arguments[count], arguments[count + 1 :]
            outputs, pull = jax.vjp(lambda *x: operation.per_token(x, labels), *arrays)
            return *outputs, *pull(cotangents)

        arguments = [*operation.arrays, labels, *[numbers] * 3]
        return "forward_and_backward", forward_and_backward, arguments, operation.plan

    def value_and_grad(*arguments: Any) -> Any:
        arrays, labels, given = arguments[:count], arguments[count], arguments[count + 1 :]
        loss, gradients = jax.value_and_grad(
            lambda *x: operation.reduced(x, labels, given[0] if given else None),
            tuple(range(count)),
        )(*arrays)
        return loss, *gradients

    more = [numbers] if weights == "random" else []
    return "value_and_grad", value_and_grad, [*operation.arrays, labels, *more], operation.plan


def _cross_entropy(cell: Cell, reduction: Any, options: dict[str, Any]) -> Operation:
    options["implementation"] = "pallas"

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        (logits,) = arrays
        return cross_entropy(logits, labels, weights=weights, reduction=reduction, **options)

    def per_token(arrays: Sequence[Any], labels: Any) -> Any:
        (logits,) = arrays
        return cross_entropy_per_token(logits, labels, return_lse=True, **options)

    logits = jax.ShapeDtypeStruct((cell.tokens, cell.vocab), DTYPES[cell.dtype])
    return Operation([logits], reduced, per_token)


def _linear_cross_entropy(
    cell: Cell, linear: Linear, reduction: Any, options: dict[str, Any]
) -> Operation:
    """Arrays are hidden, weight, and bias if any."""
    dtype = DTYPES[cell.dtype]
    weight = [cell.vocab, linear.hidden]
    shapes = [(cell.tokens, linear.hidden), tuple(weight[:: 1 - 2 * linear.vocab_axis])]
    if linear.bias:
        shapes.append((cell.vocab,))
    cut: dict[str, Any] = {
        "vocab_axis": linear.vocab_axis,
        "max_scratch_bytes": linear.max_scratch_bytes,
        "block_size": cell.block_size,
        "time_block": cell.time_block,
    }
    options |= {**cut, "implementation": "reference" if cell.is_dense else None}
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def reduced(arrays: Sequence[Any], labels: Any, weights: Any) -> Any:
        hidden, weight, *bias = arrays
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias[0] if bias else None,
            weights=weights,
            reduction=reduction,
            **options,
        )

    def per_token(arrays: Sequence[Any], labels: Any) -> Any:
        hidden, weight, *bias = arrays
        return linear_cross_entropy_per_token(
            hidden, weight, labels, bias=bias[0] if bias else None, return_lse=True, **options
        )

    plan = None
    if not cell.is_dense:
        bias = arrays[2] if linear.bias else None
        platform = cell.kind or cell.platform
        cut |= {"reduction": reduction, "platform": platform}
        plan = explain(*arrays[:2], bias=bias, **cut)
        _check_tile(cell, plan)
    return Operation(arrays, reduced, per_token, plan)


def _check_tile(cell: Cell, plan: Plan) -> None:
    """Refuses a tile that was made to fit: what is measured is what is named."""
    if cell.platform == "cuda":
        return
    # Tokens of a task on CPUs are not planned.
    unit = 128 if cell.platform == "tpu" else 1
    of_tokens = cell.time_block if cell.platform == "tpu" else None
    for name, extent, whole, taken in (
        ("time_block", of_tokens, cell.tokens, plan.tokens),
        ("block_size", cell.block_size, cell.vocab, plan.columns),
    ):
        if extent is not None and min(extent, -(-whole // unit) * unit) != taken:
            raise ConfigError(
                f"tile.{name} is {extent}, for which there is no room; the plan is {plan}: lower "
                f"tile.{name} or raise max_scratch_bytes"
            )


def tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile that a cell's kernels take; None where they choose for where they run.

    Raises:
        ValueError: one that they do not take.
    """
    if cell.linear is not None:
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


def write(cell: Cell) -> bool:
    """Writes a cell's program and manifest; returns whether they were not there already.

    Raises:
        ConfigError: an option that is not known.
        ValueError: a tile that the kernels do not take.
    """
    stamp = cell.path.with_suffix(".stamp")
    key = _key(cell)
    program = cell.path.with_suffix(".mlirbc")
    if cell.path.exists() and program.exists() and stamp.exists() and stamp.read_text() == key:
        return False
    name, function_, arguments, plan = function(cell)
    is_tpu = cell.platform == "tpu"
    # TPUs have no custom calls, and dense programs none anywhere.
    targets = [] if is_tpu or cell.is_dense else library.require().targets
    checks = [
        jax_export.DisabledSafetyCheck.custom_call(target)
        for target in sorted({row.target for row in targets})
    ]
    with use_abstract_mesh(abstract_tpu(cell.kind)) if is_tpu else nullcontext():
        exported = jax_export.export(
            jax.jit(function_, keep_unused=True),
            platforms=[cell.platform],
            disabled_checks=checks,
        )(*arguments)
    bytecode = exported.mlir_module_serialized
    if is_tpu:
        bytecode = with_rows_in_order(bytecode)
    elif cell.platform == "cpu":
        bytecode = for_oldest_plugin(bytecode)
    types = [
        [{"dtype": NAMES[str(aval.dtype)], "shape": list(aval.shape)} for aval in avals]
        for avals in (exported.in_avals, exported.out_avals)
    ]
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "op": cell.op,
        "program": name,
        "file": program.name,
        "sha256": hashlib.sha256(bytecode).hexdigest(),
        "arguments": types[0],
        "results": types[1],
        "tile": tile(cell),
        "options": dict(cell.options),
        "platforms": list(exported.platforms),
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    if cell.linear is not None:
        manifest["linear"] = asdict(cell.linear)
        manifest["plan"] = None if plan is None else str(plan)
        if plan is not None and plan.moved:
            manifest["moved"] = dict(plan.moved)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(bytecode)
    cell.path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    stamp.write_text(key)
    return True


def _key(cell: Cell) -> str:
    """What a program is made of: the config, JAX and its precision, and this package's code."""
    precision = jax.config.values["jax_default_matmul_precision"]
    digest = hashlib.sha256(repr((cell, jax.__version__, precision)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for input that is no good."""
    parser = argparse.ArgumentParser(prog="python -m pallas_bridge.export", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="of microbench or its sweep")
    parser.add_argument("--out", type=Path, help="folder; that of `program` in the config if not")
    given = parser.parse_args(arguments)
    try:
        config = read(given.config)
        program = (config.get("cell") or config).get("program")
        folder = given.out or (Path(program).parent if program else Path("."))
        for cell in cells(config, folder):
            new = write(cell)
            print(f"{cell.path}: {'written' if new else 'there already'}")
    except (TypeError, ValueError, library.LibraryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
