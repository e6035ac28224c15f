"""Peers in JAX: a worker of cross_entropy.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import difference_clock, first_line, first_run, median_ms
from shared import Problem, serve

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def dense(x: jax.Array, y: jax.Array) -> jax.Array:
    """The losses [T] of logits, as most training code writes them."""
    z = x.astype(jnp.float32)
    at_label = jnp.take_along_axis(z, y[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(z, axis=-1) - at_label


def losses_of(peer: str) -> tuple[Loss, Loss]:
    """The functions of a peer that give the mean and the losses [T]."""
    if peer.startswith("xentile"):
        from pallas_bridge import cross_entropy

        donate = peer == "xentile, logits dead"
        mean = partial(cross_entropy, donate_logits=donate)
        return mean, partial(cross_entropy, donate_logits=donate, reduction="none")
    if peer == "optax":
        from optax.losses import softmax_cross_entropy_with_integer_labels as optax_losses

        def losses(x: jax.Array, y: jax.Array) -> jax.Array:
            found: jax.Array = optax_losses(x.astype(jnp.float32), y)
            return found

        return lambda x, y: losses(x, y).mean(), losses
    return lambda x, y: dense(x, y).mean(), dense


def inputs(problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [T, V], labels [T] and cotangents [T]: the driver's rows, repeated."""
    logits, labels, cotangents = (
        np.load(problem.file(name)) for name in ("logits", "labels", "cotangents")
    )

    @jax.jit
    def repeat(array: jax.Array) -> jax.Array:
        return array[jnp.arange(problem.tokens) % len(array)]

    arrays = logits.view(jnp.dtype(problem.dtype)), labels, cotangents
    x, y, g = (jax.block_until_ready(repeat(jax.device_put(array))) for array in arrays)
    return x, y, g


def programs_of(
    peer: str, factor: float | None = None, is_traced: bool = False
) -> dict[str, tuple[Any, bool]]:
    """The jitted function of each measure, and whether it takes the memory of the logits.

    Args:
        peer: A peer in JAX.
        factor: What the mean is multiplied by; None for no factor.
        is_traced: Whether the factor is the first of the cotangents and not a constant.
    """
    mean, losses = losses_of(peer)

    def pair(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda x: losses(x, y), x)
        return out, vjp(g)[0]

    def value_and_grad(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        if factor is None:
            return jax.value_and_grad(mean)(x, y)
        scale = g[0] if is_traced else factor
        return jax.value_and_grad(lambda x: scale * mean(x, y))(x)

    is_dead = peer == "xentile, logits dead"
    donate: Any = {"donate_argnums": 0} if is_dead else {}
    programs: dict[str, tuple[Any, bool]] = {
        "value_and_grad": (jax.jit(value_and_grad, **donate), is_dead),
        "pair": (jax.jit(pair, **donate), is_dead),
    }
    if not is_dead:
        programs["forward"] = (jax.jit(lambda x, y, _: mean(x, y)), False)
    return programs


def measure(problem: Problem) -> dict[str, Any]:
    """All measures of one peer on one problem."""
    x, y, cotangents = inputs(problem)
    found: dict[str, Any] = {}
    programs = programs_of(problem.peer, problem.factor, problem.is_traced)
    with_factor = None if problem.factor is None else cotangents.at[0].set(problem.factor)
    for name, (program, is_consuming) in programs.items():
        g = with_factor if name == "value_and_grad" and with_factor is not None else cotangents
        try:
            compiled, outputs, row = first_run(program, (x, y, g), is_consuming)
            if is_consuming:
                x = outputs[1]
            del outputs

            def step() -> Any:
                nonlocal x
                outputs = compiled(x, y, g)  # noqa: B023
                if is_consuming:  # noqa: B023
                    x = outputs[1]
                return outputs

            found[name] = row | median_ms(difference_clock(step), problem.seconds)
        except Exception as error:
            found[name] = {"error": first_line(error)}
    return found


def copy(problem: Problem) -> dict[str, Any]:
    """Milliseconds to copy the logits on the device."""
    x, *_ = inputs(problem)
    copied = jax.jit(jnp.copy)
    found = median_ms(difference_clock(lambda: copied(x)), problem.seconds)
    return {"yardstick_ms": found["median_ms"]}


def prepare(mode: str, problem: Problem) -> None:
    """Imports what a mode needs."""
    jax.config.update("jax_platforms", problem.platform)
    if mode == "measure" and problem.peer.startswith("xentile"):
        import pallas_bridge  # noqa: F401


if __name__ == "__main__":
    serve(Problem, {"measure": measure, "yardstick": copy}, prepare)
