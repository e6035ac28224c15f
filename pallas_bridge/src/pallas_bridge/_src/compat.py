"""What JAX spells differently from one supported version to another."""

import contextlib
import dataclasses
import importlib
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes, of `shard_map`, that an array of type `aval` varies over."""
    # From 0.12 on they are part of a larger type.
    axes = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return frozenset(axes)


def without_varying(aval: Any, axes: frozenset[str]) -> Any:
    """Returns the type of an array that no longer varies over manual mesh axes."""
    if hasattr(aval, "manual_axis_type"):
        kept = aval.manual_axis_type.update(varying=varying_axes(aval) - axes)
        return aval.update(manual_axis_type=kept)
    return aval.update(vma=varying_axes(aval) - axes)


def varying_like(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape for what a kernel gives, which varies over the mesh axes that `like` does."""
    aval: Any = jax.typeof(like)
    name = "manual_axis_type" if hasattr(aval, "manual_axis_type") else "vma"
    more: Any = {name: getattr(aval, name)}
    return jax.ShapeDtypeStruct(shape, dtype, **more)


def tell_devices(primitive: Any) -> None:
    """Has the rule that lowers `primitive` get the devices of its program, where there are any.

    Without, it learns their platform and number alone. It is what JAX does for its own, and no
    version has a public name for it: where it is gone, a program is for any TPU.
    """
    with contextlib.suppress(ImportError, AttributeError):
        dispatch: Any = importlib.import_module("jax._src.dispatch")
        dispatch.prim_requires_devices_during_lowering.add(primitive)


def abstract_tpu(kind: str | None) -> AbstractMesh:
    """Returns a mesh of one TPU core, of a `kind` as JAX names it, that need not be there."""
    if kind is None:
        return AbstractMesh((), ())
    fields = {field.name for field in dataclasses.fields(AbstractDevice)}
    # From 0.10 on a device has a platform too.
    more: Any = {"platform": "tpu"} if "platform" in fields else {}
    device = AbstractDevice(device_kind=kind, num_cores=1, **more)
    return AbstractMesh((1,), ("core",), axis_types=(AxisType.Auto,), abstract_device=device)


def callbacks_by_name() -> Any:
    """Returns the table of what XLA calls back as it partitions calls, by bytes that calls hold.

    None where this JAX has no such table; no version has a public name for it.
    """
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("jax._src.custom_partitioning")
        return getattr(module, "_sharding_callbacks", None)
    return None


# XLA's CPU plug-in on PyPI, the oldest that programs are exported for, knows no newer StableHLO.
OLDEST_PLUGIN = "1.13.3"


def for_oldest_plugin(bytecode: bytes) -> bytes:
    """Returns an exported program in the StableHLO that `OLDEST_PLUGIN` names.

    JAX writes what plug-ins of the last few weeks read. A program that needs more than the older
    version has is returned as it is.
    """
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, bytecode)
        try:
            result: bytes = stablehlo.serialize_portable_artifact(module, OLDEST_PLUGIN, True)
        except ValueError:
            return bytecode
        return result


def with_rows_in_order(bytecode: bytes) -> bytes:
    """Returns an exported program whose matrices come and go row by row.

    XLA may choose another layout for what crosses the border of a program, and does on TPUs; then
    it copies all of it to the one that the program works on. Matrices in the middle of a program
    have no such border.
    """
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, bytecode)
        main: Any
        (main,) = (op for op in module.body.operations if str(op.name).strip('"') == "main")
        sides = (
            ("arg_attrs", main.arg_attrs, main.type.inputs),
            ("res_attrs", main.result_attrs, main.type.results),
        )
        for name, all_attributes, types in sides:
            changed = []
            for attributes, type_ in zip(all_attributes, types, strict=True):
                layout = "{1,0}" if len(type_.shape) == 2 else "default"
                named = {item.name: item.attr for item in attributes}
                named["mhlo.layout_mode"] = ir.StringAttr.get(layout)
                changed.append(ir.DictAttr.get(named))
            main.operation.attributes[name] = ir.ArrayAttr.get(changed)
        oldest = stablehlo.StablehloCompatibilityRequirement.WEEK_4
        version = stablehlo.get_version_from_compatibility_requirement(oldest)
        result: bytes = stablehlo.serialize_portable_artifact(module, version, True)
        return result


def shards_by_shardy() -> bool:
    """Whether Shardy shards programs over meshes, and not GSPMD, which JAX is to drop."""
    is_used: bool = jax.config.values["jax_use_shardy_partitioner"]
    return is_used
