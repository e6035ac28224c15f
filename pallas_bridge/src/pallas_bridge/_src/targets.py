"""What targets take and give, as the library declares them.

`targets.json` is the text of the library's `xentile_declarations`, carried here because shapes are
needed where there is no library too. crates/xentile-xla/src/declaration.rs documents its keys.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .arrays import Result

# The types of attributes and of arrays by their names there.
TYPES: Mapping[str, Any] = {"bool": np.bool_, "s64": np.int64, "f64": np.float64, "text": str}
DTYPES: Mapping[str, Any] = {"f32": np.float32, "s32": np.int32}


@dataclass(frozen=True)
class Target:
    """A target's declaration: a parsed object of `targets.json`."""

    name: str
    declared: Mapping[str, Any]

    @property
    def sharded(self) -> tuple[str, ...]:
        """Named axes that a mesh may shard as it may axes of tokens."""
        return tuple(self.declared["sharded"])

    @property
    def reuses(self) -> tuple[int, int] | None:
        """The operand whose memory every call gives to a result, and the result, by index."""
        return next(iter(self.aliases(always=True).items()), None)

    def aliases(self, *, always: bool) -> dict[int, int]:
        """Returns the operands whose memory results may take, or `always` do, by indices."""
        operands, results = (
            [one["name"] for one in self.declared[side]] for side in ("operands", "results")
        )
        return {
            operands.index(one["operand"]): results.index(one["result"])
            for one in self.declared["aliases"]
            if one["always"] or not always
        }

    def attributes(self, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Returns attributes in the types that handlers take, without those that are None.

        Raises:
            KeyError: one that is not declared, or without which there is no call.
        """
        declared = {one["name"]: one for one in self.declared["attributes"]}
        if unknown := {name for name, value in values.items() if value is not None} - {*declared}:
            raise KeyError(f"{self.name} has no attribute {min(unknown)}")
        found = []
        for name, one in declared.items():
            value = values.get(name)
            if value is not None:
                found.append((name, TYPES[one["type"]](value)))
            elif one["absent"] is None and not one["cuda_only"]:
                raise KeyError(f"{self.name} needs the attribute {name}")
        return tuple(found)

    def operands(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the dims of a call's operands, for values of its attributes."""
        return tuple(dims_of(one, values) for one in self._given("operands", values))

    def results(self, values: Mapping[str, Any], dtypes: Mapping[str, Any]) -> tuple[Result, ...]:
        """Returns a call's results; `dtypes` are those that its declaration leaves open."""
        operands = [one["name"] for one in self._given("operands", values)]
        found: dict[str, Result] = {}
        for one in self._given("results", values):
            dims, dtype = dims_of(one, values), one["dtype"]
            like = dtype["like"] if isinstance(dtype, dict) else None
            if like in operands:
                found[one["name"]] = Result(dims, like=operands.index(like))
            elif like is not None:
                found[one["name"]] = Result(dims, dtype=found[like].dtype)
            elif one["name"] in dtypes:
                found[one["name"]] = Result(dims, dtype=dtypes[one["name"]])
            else:
                (only,) = dtype
                found[one["name"]] = Result(dims, dtype=DTYPES[only])
        return tuple(found.values())

    def shapes(
        self,
        values: Mapping[str, Any],
        extents: Mapping[str, int],
        like: Mapping[str, Any],
        beside: Mapping[str, Any],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of results by their names, of axes with `extents`.

        `like` are the arrays whose dtype a result may have, and `beside` optional operands, None
        for those that are not there.
        """
        found = {}
        for one in self.declared["results"]:
            given, dtype = one["given"], one["dtype"]
            if given != "always" and beside[given["with"]] is None:
                continue
            if isinstance(dtype, dict):
                (name,) = dtype.values()
                taken = like[name].dtype
            else:
                taken = np.uint8 if dtype == "bytes" else DTYPES[dtype[0]]
            shape = tuple(extents[axis] for axis in dims_of(one, values).split())
            found[one["name"]] = jax.ShapeDtypeStruct(shape, taken)
        return found

    def largest(self, axis: str) -> int:
        """Returns the largest extent of a named axis, where a number bounds it."""
        bounds = self.declared["bounds"]
        (bound,) = (one for one in bounds if one[0] == axis and one[2].isdigit())
        return int(bound[2]) // int(bound[1])

    def dims(self, *names: str, **values: Any) -> tuple[str, ...]:
        """Returns the dims of arrays by their names, for values of attributes that they go by."""
        every = (*self.declared["operands"], *self.declared["results"])
        arrays = {one["name"]: one for one in every}
        return tuple(dims_of(arrays[name], values) for name in names)

    def _given(self, side: str, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Returns the arrays that a call has."""

        def is_given(one: Mapping[str, Any]) -> bool:
            given = one["given"]
            if given == "always":
                return True
            ((how, attribute),) = given.items()
            is_true = bool(values.get(attribute))
            return is_true if how == "where" else not is_true

        return [one for one in self.declared[side] if is_given(one)]


def dims_of(array: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Returns an array's dims, such as "*batch V", for values of attributes."""
    dims = array["dims"]
    if isinstance(dims, dict):
        cases = dims["cases"]
        value = str(values[dims["by"]])
        dims = cases[value] if value in cases else cases["*"]
    axes = [_axis(axis, values) for axis in dims.split()]
    return " ".join(axis for axis in axes if axis is not None)


def _axis(axis: str, values: Mapping[str, Any]) -> str | None:
    """Returns an axis with the extent of its blocks as a number, or None where it has none."""
    of, _, block = axis.partition("/")
    if not block or block.isdigit():
        return axis
    extent = values.get(block)
    return None if extent is None else f"{of}/{extent}"


@cache
def every() -> Mapping[str, Target]:
    """Returns all declarations by name."""
    text = Path(__file__).with_name("targets.json").read_text(encoding="utf-8")
    return {one["name"]: Target(one["name"], one) for one in json.loads(text)["targets"]}


def differing(text: str) -> list[str]:
    """Returns the targets whose declarations in a text of `xentile_declarations` are others."""
    given = {one["name"]: one for one in json.loads(text)["targets"]}
    ours = {name: one.declared for name, one in every().items()}
    summaries = {"summary": None}
    return sorted(
        name
        for name in given | ours
        if {**given.get(name, {}), **summaries} != {**ours.get(name, {}), **summaries}
    )


def declared(name: str) -> Target:
    """Returns the declaration of a target."""
    return every()[name]
