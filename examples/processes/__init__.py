"""A job of several processes, each with its own devices, that ends when one fails and says which.

JAX notices a process that is gone: the others end, and name it. Two faults it leaves to its users.
A process with an error waits for all others as it exits (for `shutdown_timeout_seconds`, 300 by
default), while they wait for it in a collective; and one whose arrays have other shapes than
the others' is not noticed where what is exchanged has none of them, as the gradient of a shared
weight. `python -m processes` has each fault happen.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# Bytes in which a process describes its arrays to others; of a longer text the end alone is sent.
TOLD_BYTES = 4096


@contextmanager
def told_by_rank(heartbeat_timeout_seconds: float = 100) -> Iterator[None]:
    """Has an error within end this process, with exit code 1, after a line that names it.

    It does not wait for others at the exit, nor run what is registered there: they learn of it by
    JAX's heartbeats, or by the collective that they are in. The first process holds the service
    that heartbeats go to, and stays for them, as its error may be of a collective that lost another
    process: then JAX ends it, naming that one. `SystemExit` and Ctrl-C pass.

    Args:
        heartbeat_timeout_seconds: As `jax.distributed.initialize` was given it.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        rank, ranks = jax.process_index(), jax.process_count()
        kind = type(error).__name__
        line = f"rank {rank} of {ranks}, on {socket.gethostname()}: {kind}: {error}"
        print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
        if rank == 0:
            time.sleep(1.5 * heartbeat_timeout_seconds)
        os._exit(1)


def described(tree: Any) -> list[str]:
    """Each array of a tree as `['labels']: int32[4096]`, of whatever devices it is on."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        f"{jax.tree_util.keystr(path)}: {np.dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    ]


def check_alike(tree: Any) -> None:
    """Holds shapes and dtypes of a tree of arrays against those of the other processes.

    Every process calls it at the same place. They exchange 4 KiB each, so a step need not be much
    longer for it.

    Args:
        tree: Arrays, or anything with `shape` and `dtype`.

    Raises:
        ValueError: They are not the same everywhere: in every process, naming those whose arrays
            are not as the first one's, and the first array that differs.
    """
    mine = "\n".join(described(tree)).encode()[-TOLD_BYTES:]
    padded = np.zeros(TOLD_BYTES, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    texts = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, TOLD_BYTES)
    lines = [bytes(one).rstrip(b"\0").decode(errors="replace").split("\n") for one in texts]
    others = [rank for rank, one in enumerate(lines) if one != lines[0]]
    if not others:
        return
    pairs = zip(lines[others[0]], lines[0], strict=False)
    unlike = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if unlike is None:
        counts = len(lines[others[0]]), len(lines[0])
        unlike = f"{counts[0]} arrays", f"{counts[1]} arrays"
    ranks = ", ".join(map(str, others))
    raise ValueError(
        f"rank {ranks} of {len(lines)} has other arrays than rank 0: {unlike[0]}, where rank 0 has "
        f"{unlike[1]}: give every process as much of a batch"
    )
