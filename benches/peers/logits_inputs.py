"""Logits, labels and cotangents in files that every peer of cross_entropy.py reads.

A file has at most ROWS rows, which peers repeat until they have all tokens: gigabytes of random
numbers take long to make, and no kernel knows one row by another.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from distributions import Distribution
from linear_reference import dtype_of
from shared import BYTES, Problem

ROWS = 512
# Rows of one block, which have a seed of their own.
BLOCK = 32
NAMES = ("logits", "cotangents", "labels")


def write_inputs(problem: Problem) -> None:
    """Writes those of a shape and distribution, unless they are there."""
    if problem.file("labels").exists():
        return
    distribution = Distribution.parse(problem.distribution)
    rows = min(problem.tokens, ROWS)
    bits = np.dtype(f"i{BYTES[problem.dtype]}")
    logits = np.empty((rows, problem.vocab), bits)
    labels = np.empty(rows, np.int32)

    def fill(start: int) -> None:
        here = slice(start, min(start + BLOCK, rows))
        rng = np.random.default_rng([0, start])
        targets = distribution.targets(rng, here.stop - start, problem.vocab)
        labels[here] = targets.labels
        z = distribution.logits(rng, targets, problem.vocab)
        logits[here] = z.astype(dtype_of(problem)).view(bits)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, rows, BLOCK)))
    np.save(problem.file("logits"), logits)
    rng = np.random.default_rng(1)
    np.save(problem.file("cotangents"), rng.standard_normal(rows, np.float32))
    # Written last: that it exists says that the others do.
    np.save(problem.file("labels"), labels)


def remove_inputs(problem: Problem) -> None:
    """Removes them."""
    for name in NAMES:
        problem.file(name).unlink(missing_ok=True)
