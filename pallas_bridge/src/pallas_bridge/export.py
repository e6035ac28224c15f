"""Exports programs of operations for tools that run no Python.

    python -m pallas_bridge.export --config FILE [--out FOLDER]

FILE is a config of `microbench` or of its sweep, in YAML (with PyYAML) or JSON. For each of its
tiles FOLDER gets a program and its manifest (docs/internals/pjrt.md), named by `program` of the
config, by default `tpu_{time_block}_{block_size}.json`, with the platform of `backend` for `tpu`.
Programs that the same code made from the same config are kept.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export
from jax.sharding import use_abstract_mesh

from pallas_bridge._src import library
from pallas_bridge._src.compat import abstract_tpu, for_oldest_plugin, with_rows_in_order
from pallas_bridge._src.exporting import DTYPES, Cell, ConfigError, check_extent, tokens_of
from pallas_bridge._src.generation.exported import EXPORTS as DECODE
from pallas_bridge._src.operations import OPERATIONS
from pallas_bridge._src.targets import every

MANIFEST_VERSION = 1
NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "i32",
    "uint8": "ui8",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
}
# As libtpu names the first part of a topology.
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


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


def _exports() -> dict[str, Any]:
    """Returns what gives the exports of each operation, and of decoding."""
    return {one.name: one.exports for one in OPERATIONS} | {"decode": lambda: DECODE}


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
                check_extent(one, extent, f", in tile.{one} or, for a sweep, in {many}")
        return list(found)

    op = cell.get("op", "cross_entropy")
    exports = _exports()
    if op not in exports:
        raise ConfigError(f"op is {op!r}; it must be one of {', '.join(exports)}")
    of_op = exports[op]()
    if cell is not config and "max_scratch_bytes" in config:
        raise ConfigError(
            f"max_scratch_bytes is {config['max_scratch_bytes']!r}, a sweep of budgets, whose "
            "programs microbench sweep exports itself; name a config of microbench of one budget"
        )
    backend = cell.get("backend", f"xla:{of_op.PLATFORMS[0]}")
    platform = str(backend).removeprefix("xla:")
    if platform not in of_op.PLATFORMS:
        choices = ", ".join(f"xla:{platform}" for platform in of_op.PLATFORMS)
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
                is_dense=cell.get("impl") == "reference",
                tokens=tokens_of(cell),
                vocab=int(cell.get("vocab", 151_643)),
                dtype=dtype,
                time_block=time_block,
                block_size=block_size,
                options=cell.get("options") or {},
                settings=of_op.settings(cell),
                kind=None if generation is None else KINDS[generation],
                path=folder / name.replace("{block_size}", str(block_size or "default")),
            )


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
    of_op = _exports()[cell.op]()
    made = of_op.program(cell)
    is_tpu = cell.platform == "tpu"
    # TPUs have no custom calls, and dense programs none anywhere.
    # Of GPUs too, whose kernels a library for CPUs lacks.
    targets = [] if is_tpu or cell.is_dense else sorted(every())
    checks = [jax_export.DisabledSafetyCheck.custom_call(target) for target in targets]
    with use_abstract_mesh(abstract_tpu(cell.kind)) if is_tpu else nullcontext():
        exported = jax_export.export(
            jax.jit(made.function, keep_unused=True),
            platforms=[cell.platform],
            disabled_checks=checks,
        )(*made.arguments)
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
        "program": made.name,
        "file": program.name,
        "sha256": hashlib.sha256(bytecode).hexdigest(),
        "arguments": types[0],
        "results": types[1],
        "tile": of_op.tile(cell),
        "options": dict(cell.options),
        "platforms": list(exported.platforms),
        "jax_version": jax.__version__,
        "calling_convention_version": exported.calling_convention_version,
    }
    manifest |= of_op.described(cell, made)
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
