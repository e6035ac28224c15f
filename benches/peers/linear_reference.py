"""Operands of the linear cross-entropy, in files that every peer reads, and their f64 results.

Files hold the bits of hidden and weight as integers, since NumPy knows no bfloat16.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from distributions import Distribution
from shared import BYTES, LinearProblem, Problem

F64 = npt.NDArray[np.float64]
# Rows of one block, which have a seed of their own, whatever thread makes them.
ROWS = 4096
GRADIENTS = ("dhidden", "dweight")


def dtype_of(problem: Problem) -> np.dtype[Any]:
    """NumPy's dtype of the operands."""
    return np.dtype(getattr(ml_dtypes, problem.dtype, problem.dtype))


def floats(problem: LinearProblem, bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The values whose bits a file holds, in float32."""
    return bits.view(dtype_of(problem)).astype(np.float32)


def _write(
    problem: LinearProblem, name: str, rows: int, block: Callable[[int, int], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Writes an array by blocks of rows, each from where it starts and how many it has."""
    bits = np.dtype(f"i{BYTES[problem.dtype]}")
    file = np.lib.format.open_memmap(
        problem.file(name), mode="w+", dtype=bits, shape=(rows, problem.hidden)
    )

    def fill(start: int) -> None:
        count = min(ROWS, rows - start)
        file[start : start + count] = block(start, count).astype(dtype_of(problem)).view(bits)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, rows, ROWS)))
    return file


def write_operands(problem: LinearProblem) -> None:
    """Writes hidden, weight and labels of a shape and distribution, unless they are there."""
    if problem.file("labels").exists():
        return
    distribution = Distribution.parse(problem.distribution)
    width = problem.hidden

    def weights(start: int, count: int) -> npt.NDArray[Any]:
        return distribution.weights(np.random.default_rng([1, start]), count, width)

    weight = _write(problem, "weight", problem.vocab, weights)
    labels = np.empty(problem.tokens, np.int32)

    def hidden(start: int, count: int) -> npt.NDArray[Any]:
        rng = np.random.default_rng([2, start])
        targets = distribution.targets(rng, count, problem.vocab)
        labels[start : start + count] = targets.labels
        rows = lambda columns: floats(problem, weight[columns])  # noqa: E731
        return distribution.hidden(np.random.default_rng([0, start]), targets, width, rows)

    _write(problem, "hidden", problem.tokens, hidden)
    # Written last: that it exists says that the others do.
    np.save(problem.file("labels"), labels)


def remove_files(problem: LinearProblem) -> None:
    """Removes all files of a shape and distribution."""
    for name in ("labels", "hidden", "weight", "losses", *GRADIENTS):
        problem.file(name).unlink(missing_ok=True)


@cache
def _right(problem: LinearProblem) -> tuple[F64, dict[str, F64]]:
    """The losses [N] and the gradients of their mean in f64."""
    x, w = (
        np.load(problem.file(name)).view(dtype_of(problem)).astype(np.float64)
        for name in ("hidden", "weight")
    )
    labels = np.load(problem.file("labels"))
    at_label = np.arange(problem.tokens), labels
    z = x @ w.T
    z -= z.max(axis=1, keepdims=True)
    lse = np.log(np.exp(z).sum(axis=1, keepdims=True))
    losses: F64 = lse[:, 0] - z[at_label]
    g = np.exp(z - lse)
    g[at_label] -= 1
    g /= problem.tokens
    return losses, {"dhidden": g @ w, "dweight": g.T @ x}


def _worst_loss(problem: LinearProblem) -> dict[str, float]:
    """The largest error in nats of the losses [N] in a problem's file, if there is one."""
    file = problem.file("losses")
    if not file.exists():
        return {}
    right, _ = _right(_for_all(problem))
    losses = np.load(file).astype(np.float64)
    # The next peer may write none.
    file.unlink()
    return {"worst_loss": float(np.abs(losses - right).max())}


def _compare(values: npt.NDArray[Any], right: F64) -> dict[str, float]:
    wrong = values.astype(np.float64) - right
    return {
        "max": float(np.abs(wrong).max() / np.abs(right).max()),
        "norm": float(np.linalg.norm(wrong) / np.linalg.norm(right)),
    }


def errors_of(problem: LinearProblem, loss: float) -> dict[str, Any]:
    """Relative errors of a loss and of the gradients in the files of a problem.

    The error of an array is relative to its largest value (`max`) and to its norm (`norm`);
    `worst_loss` is absolute, of the losses of tokens where the peer has written these.
    """
    gradients = {name: np.load(problem.file(name)) for name in GRADIENTS}
    return {**_errors(problem, loss, gradients), **_worst_loss(problem)}


def rounded(problem: LinearProblem) -> dict[str, Any]:
    """The results of a peer that only rounds its results to their dtypes."""
    losses, gradients = _right(_for_all(problem))
    loss = float(np.float32(losses.mean()))
    dtype = dtype_of(problem)
    results = {name: gradients[name].astype(dtype) for name in GRADIENTS}
    dtypes = [dtype.name for _ in GRADIENTS]
    return {"loss": loss, "dtypes": dtypes, "errors": _errors(problem, loss, results)}


def _errors(
    problem: LinearProblem, loss: float, gradients: dict[str, npt.NDArray[Any]]
) -> dict[str, Any]:
    losses, right = _right(_for_all(problem))
    right_loss = float(losses.mean())
    compared = {name: _compare(gradients[name], right[name]) for name in GRADIENTS}
    return {"loss": abs(loss - right_loss) / abs(right_loss), **compared}


def _for_all(problem: LinearProblem) -> LinearProblem:
    """The problem without what differs between peers."""
    return replace(problem, peer="", budget_mib=None)
