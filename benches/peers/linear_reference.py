"""Operands of the linear cross-entropy, in files that every peer reads, and what is right for them.

Files hold the bits of hidden and weight as integers, since NumPy knows no bfloat16.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from shared import BYTES, LinearProblem

F64 = npt.NDArray[np.float64]
# The standard deviation of the logits.
SCALE = 2.0
# Rows that are made at once, from a seed of their own, whatever thread makes them.
ROWS = 4096
GRADIENTS = ("dhidden", "dweight")


def dtype_of(problem: LinearProblem) -> np.dtype[Any]:
    """NumPy's dtype of the operands."""
    return np.dtype(getattr(ml_dtypes, problem.dtype, problem.dtype))


def _write_normal(problem: LinearProblem, name: str, rows: int, scale: float, seed: int) -> None:
    bits = np.dtype(f"i{BYTES[problem.dtype]}")
    file = np.lib.format.open_memmap(
        problem.file(name), mode="w+", dtype=bits, shape=(rows, problem.hidden)
    )

    def fill(start: int) -> None:
        rng = np.random.default_rng([seed, start])
        block = file[start : start + ROWS]
        values = rng.standard_normal(block.shape, np.float32) * np.float32(scale)
        block[:] = values.astype(dtype_of(problem)).view(bits)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, rows, ROWS)))


def write_operands(problem: LinearProblem) -> None:
    """Writes hidden, weight and labels of a shape, unless they are there."""
    if problem.file("labels").exists():
        return
    _write_normal(problem, "hidden", problem.tokens, 1, seed=0)
    _write_normal(problem, "weight", problem.vocab, SCALE / problem.hidden**0.5, seed=1)
    rng = np.random.default_rng(2)
    # Last, as it tells that the others are there.
    np.save(problem.file("labels"), rng.integers(0, problem.vocab, problem.tokens, np.int32))


def remove_files(problem: LinearProblem) -> None:
    """Removes all files of a shape."""
    for name in ("labels", "hidden", "weight", *GRADIENTS):
        problem.file(name).unlink(missing_ok=True)


@cache
def _right(problem: LinearProblem) -> tuple[float, dict[str, F64]]:
    """The loss and its gradients in f64."""
    x, w = (
        np.load(problem.file(name)).view(dtype_of(problem)).astype(np.float64)
        for name in ("hidden", "weight")
    )
    labels = np.load(problem.file("labels"))
    at_label = np.arange(problem.tokens), labels
    z = x @ w.T
    z -= z.max(axis=1, keepdims=True)
    lse = np.log(np.exp(z).sum(axis=1, keepdims=True))
    loss = float((lse[:, 0] - z[at_label]).mean())
    g = np.exp(z - lse)
    g[at_label] -= 1
    g /= problem.tokens
    return loss, {"dhidden": g @ w, "dweight": g.T @ x}


def _compare(values: npt.NDArray[Any], right: F64) -> dict[str, float]:
    wrong = values.astype(np.float64) - right
    return {
        "max": float(np.abs(wrong).max() / np.abs(right).max()),
        "norm": float(np.linalg.norm(wrong) / np.linalg.norm(right)),
    }


def errors_of(problem: LinearProblem, loss: float) -> dict[str, Any]:
    """Relative errors of a loss and of the gradients in the files of a problem.

    That of an array is of its largest number and of its norm.
    """
    return _errors(problem, loss, {name: np.load(problem.file(name)) for name in GRADIENTS})


def rounded(problem: LinearProblem) -> dict[str, Any]:
    """What a peer would have found whose only errors are those of its results' dtypes."""
    right, gradients = _right(_for_all(problem))
    loss = float(np.float32(right))
    dtype = dtype_of(problem)
    results = {name: gradients[name].astype(dtype) for name in GRADIENTS}
    dtypes = [dtype.name for _ in GRADIENTS]
    return {"loss": loss, "dtypes": dtypes, "errors": _errors(problem, loss, results)}


def _errors(
    problem: LinearProblem, loss: float, gradients: dict[str, npt.NDArray[Any]]
) -> dict[str, Any]:
    right_loss, right = _right(_for_all(problem))
    compared = {name: _compare(gradients[name], right[name]) for name in GRADIENTS}
    return {"loss": abs(loss - right_loss) / abs(right_loss), **compared}


def _for_all(problem: LinearProblem) -> LinearProblem:
    """The problem without what differs from peer to peer."""
    return replace(problem, peer="", budget_mib=None)
