"""Exports the TPU kernels for tools that run no Python.

    python -m pallas_bridge.export --config FILE [--out FOLDER]

FILE is a config of `microbench`, or of its sweep: YAML (with PyYAML) or JSON, which is YAML too.
For each tile that it names, FOLDER gets a program and its manifest, in the format of docs/pjrt.md,
by the name that `program` has in the config (`tpu_{time_block}_{block_size}.json` without one).
What is there already and was made by the same code of the same config is left.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jax.sharding import use_abstract_mesh

from pallas_bridge import cross_entropy, cross_entropy_per_token
from pallas_bridge._src import pallas
from pallas_bridge._src.compat import abstract_tpu, with_rows_in_order
from pallas_bridge._src.cross_entropy import pallas_tpu

MANIFEST_VERSION = 1
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
NAMES = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}
# As libtpu names the first part of a topology.
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "softcap")


class ConfigError(ValueError):
    """A config that cannot be exported, and what would do."""


@dataclass(frozen=True)
class Cell:
    """One program: a problem and its tile."""

    tokens: int
    vocab: int
    dtype: str
    # None for the kernels' own choice.
    time_block: int | None
    block_size: int | None
    options: Mapping[str, Any]
    # Of device, or None for a program that fits every TPU.
    kind: str | None
    path: Path


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
            if extent is None:
                continue
            if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
                raise ConfigError(
                    f"{one} is {extent!r}; it must be an integer of at least 1, in tile.{one} or, "
                    f"for a sweep, in {many}"
                )
        return list(found)

    if (op := cell.get("op", "cross_entropy")) != "cross_entropy":
        raise ConfigError(f"op is {op!r}; it must be 'cross_entropy'")
    dtype = cell.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; on TPU it must be one of {', '.join(DTYPES)}")
    topology = cell.get("topology")
    generation = None if topology is None else str(topology).partition(":")[0]
    if generation is not None and generation not in KINDS:
        raise ConfigError(f"topology is {topology}; there are kernels for {', '.join(KINDS)}")
    pattern = Path(cell.get("program") or "tpu_{time_block}_{block_size}.json").name
    for time_block in extents("time_blocks", "time_block"):
        for block_size in extents("block_sizes", "block_size"):
            name = pattern.replace("{time_block}", str(time_block or "default"))
            yield Cell(
                tokens=int(cell.get("time", 512)),
                vocab=int(cell.get("vocab", 151_643)),
                dtype=dtype,
                time_block=time_block,
                block_size=block_size,
                options=cell.get("options") or {},
                kind=None if generation is None else KINDS[generation],
                path=folder / name.replace("{block_size}", str(block_size or "default")),
            )


def function(cell: Cell) -> tuple[str, Any, list[jax.ShapeDtypeStruct]]:
    """Returns the name of a cell's program, its function, and the types of its arguments.

    Raises:
        ConfigError: an option that is not known.
    """
    options = dict(cell.options)
    reduction, weights = options.pop("reduction", "mean"), options.pop("weights", "none")
    if unknown := sorted(set(options) - set(OPTIONS)):
        known = ", ".join(("reduction", "weights", *OPTIONS))
        raise ConfigError(f"unknown key options.{unknown[0]}; the options are {known}")
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"options.reduction is {reduction!r}; it must be none, mean or sum")
    keywords: dict[str, Any] = {
        **options,
        "time_block": cell.time_block,
        "block_size": cell.block_size,
        "implementation": "pallas",
    }
    logits = jax.ShapeDtypeStruct((cell.tokens, cell.vocab), DTYPES[cell.dtype])
    labels = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((cell.tokens,), jnp.float32)
    if reduction == "none":

        def forward_and_backward(logits: Any, labels: Any, *cotangents: Any) -> Any:
            outputs, pull = jax.vjp(
                lambda x: cross_entropy_per_token(x, labels, return_lse=True, **keywords), logits
            )
            return *outputs, *pull(cotangents)

        return "forward_and_backward", forward_and_backward, [logits, labels, *[numbers] * 3]

    def value_and_grad(logits: Any, labels: Any, *weights: Any) -> Any:
        given = weights[0] if weights else None
        return jax.value_and_grad(
            lambda x: cross_entropy(x, labels, weights=given, reduction=reduction, **keywords)
        )(logits)

    more = [numbers] if weights == "random" else []
    return "value_and_grad", value_and_grad, [logits, labels, *more]


def tile(cell: Cell) -> dict[str, int]:
    """Returns the tile that a cell's kernels take.

    Raises:
        ValueError: one that they do not take.
    """
    target = pallas.ANY if cell.kind is None else pallas.TARGETS[cell.kind]
    dtype = jnp.dtype(DTYPES[cell.dtype])
    wanted: Any = {"time_block": cell.time_block, "block_size": cell.block_size}
    chosen = pallas_tpu.plan(
        target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=True
    ) or pallas_tpu.plan(
        target, cell.tokens, cell.vocab, dtype, **wanted, reduces=True, writes=False
    )
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
    name, function_, arguments = function(cell)
    with use_abstract_mesh(abstract_tpu(cell.kind)):
        exported = jax_export.export(jax.jit(function_, keep_unused=True), platforms=["tpu"])(
            *arguments
        )
    bytecode = with_rows_in_order(exported.mlir_module_serialized)
    types = [
        [{"dtype": NAMES[str(aval.dtype)], "shape": list(aval.shape)} for aval in avals]
        for avals in (exported.in_avals, exported.out_avals)
    ]
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "op": "cross_entropy",
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
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(bytecode)
    cell.path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    stamp.write_text(key)
    return True


def _key(cell: Cell) -> str:
    """What a program is made of: the config, JAX, and the code of this package."""
    digest = hashlib.sha256(repr((cell, jax.__version__)).encode())
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
    except (TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
