"""`attention`: attention alone, by implementation, head size and length."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
from train.config import InputError

from . import tables
from .config import Spec, check_cudnn
from .tables import Row

Cell = dict[str, Any]


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each implementation, head size and policy; rows by length and pass."""
    if "mixed" in spec.policies:
        raise InputError("policies has mixed, and attention has no parameters: give bfloat16")
    if "cudnn" in spec.implementations:
        check_cudnn(spec.policies)
    rows = [
        {"length": length, "mode": mode}
        for length, mode in itertools.product(spec.lengths, ("forward", "backward"))
    ]
    for policy, how, head_size in itertools.product(
        spec.policies, spec.implementations, spec.head_sizes
    ):
        cell = {
            "implementation": how,
            "head_size": head_size,
            "batch": spec.batch,
            "heads": spec.heads,
            "policy": policy,
            "warmups": max(spec.warmups),
            "steps": spec.steps,
            "seed": spec.seed,
            "memory_limit": spec.memory_limit,
        }
        yield cell, rows


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Returns a function that measures causal attention of random q, k and v.

    The backward pass is timed alone, from the residuals of its forward pass.
    """
    import jax

    from . import model
    from .compiled import Compiling, device_limit

    how = cell["implementation"]
    limit = device_limit(cell["memory_limit"])
    keys = jax.random.split(jax.random.key(cell["seed"]), 4)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return model.attend(how, q, k, v)

    def measure(variant: Cell) -> Row:
        shape = (cell["batch"], variant["length"], cell["heads"], cell["head_size"])
        q, k, v, gradient = (jax.random.normal(key, shape, cell["policy"]) for key in keys)
        if variant["mode"] == "forward":
            run = Compiling(attend, limit)
            arguments: tuple[Any, ...] = (q, k, v)
            kept = {}
        else:
            keep = Compiling(lambda q, k, v: jax.vjp(attend, q, k, v)[1], limit)
            back = keep(q, k, v)
            run = Compiling(lambda back, gradient: back(gradient), limit)
            arguments = (back, gradient)
            kept = {"kept_bytes": model.tree_bytes(back)}
        found = harness.steady_seconds(
            lambda: run.start(*arguments), cell["steps"], cell["warmups"]
        )
        held = run.compiled.memory_analysis().temp_size_in_bytes
        return {"median": statistics.median(found), "temporary_bytes": held, **kept}

    return measure


def table(rows: Sequence[Row]) -> str:
    """A line for each cell: milliseconds and memory of both passes."""
    heads = ["implementation", "dtype", "head size", "length", "forward", "forward (ms)"]
    heads += ["temporaries", "backward", "backward (ms)", "temporaries", "kept for backward"]
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(repr({**row["case"], "mode": None}), []).append(row)
    lines = []
    for of in by.values():
        case = of[0]["case"]
        line = [case["implementation"], case["policy"], str(case["head_size"]), str(case["length"])]
        passes = {row["case"]["mode"]: row for row in of}
        for mode in ("forward", "backward"):
            row = passes.get(mode, {"status": ""})
            took = row.get("median")
            line += [tables.status(row), "" if took is None else f"{1e3 * took:.4g}"]
            line.append(tables.size(row.get("temporary_bytes")))
        lines.append([*line, tables.size(passes.get("backward", {}).get("kept_bytes"))])
    return harness.table(heads, lines)


def words(rows: Sequence[Row]) -> str:
    """Sentences on ours over the others, and on memory at the greatest length."""
    sentences = [tables.ends(rows)]
    by: dict[str, dict[str, Row]] = {}
    for row in tables.finished(rows):
        shared = repr({**row["case"], "implementation": None})
        by.setdefault(shared, {})[row["case"]["implementation"]] = row
    for other in ("xla", "cudnn"):
        for mode in ("forward", "backward"):
            both = [
                (of["ours"], of[other])
                for of in by.values()
                if {"ours", other} <= of.keys() and of["ours"]["case"]["mode"] == mode
            ]
            if both:
                ratios = [mine["median"] / theirs["median"] for mine, theirs in both]
                sentences.append(
                    f"{mode.capitalize()}, ours takes {tables.span(ratios)} of {other}'s time."
                )
                mine, theirs = max(both, key=lambda pair: pair[0]["case"]["length"])
                sizes = [tables.size(one["temporary_bytes"]) for one in (mine, theirs)]
                sentences.append(
                    f"At length {mine['case']['length']} it holds {sizes[0]} of temporaries, "
                    f"{other} {sizes[1]}."
                )
    return " ".join(filter(None, sentences))
