"""What workers in JAX have in common."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def dense(x: jax.Array, y: jax.Array) -> jax.Array:
    """The losses [T] of logits, as most training code writes them."""
    z = x.astype(jnp.float32)
    at_label = jnp.take_along_axis(z, y[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(z, axis=-1) - at_label


def peak_bytes() -> int | None:
    """The most device memory this process has held; None where the backend does not tell."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


def first_run(
    program: Any, arrays: tuple[jax.Array, ...], consumes: bool = False
) -> tuple[Any, Any, dict[str, Any]]:
    """A jitted function compiled, its outputs, and what memory it took.

    `consumes` says that it takes the memory of an argument.
    """
    compiled = program.lower(*arrays).compile()
    memory = compiled.memory_analysis()
    before = peak_bytes()
    outputs = jax.block_until_ready(compiled(*arrays))
    after = peak_bytes()
    row = {"temp_bytes": memory.temp_size_in_bytes if memory else None}
    # The peak is of the process's life: it tells of this program where it has risen.
    if before is not None and after is not None and (after > before or consumes):
        row["peak_bytes"] = after
    return compiled, outputs, row


def timer(step: Callable[[], Any]) -> Callable[[int], float]:
    """Milliseconds a call, of calls enqueued together.

    JAX has no events to read the device's clock with. Of twice as many calls the time of as many is
    taken away, and with it what the wait takes: 0.3 to 0.7 ms here, however much it waits for.
    """

    def seconds(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            outputs = step()
        jax.block_until_ready(outputs)
        return time.perf_counter() - started

    return lambda calls: (seconds(2 * calls) - seconds(calls)) * 1e3 / calls
