"""Peers in JAX, ours among them: a worker of cross_entropy.py."""

import sys
import time

STARTED = time.perf_counter()

from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_worker import dense, first_run, timer  # noqa: E402
from shared import Problem, first_line, median_ms, serve  # noqa: E402

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def losses_of(peer: str) -> tuple[Loss, Loss]:
    """The functions of a peer that give the mean and the losses [T]."""
    if peer.startswith("xentile"):
        from pallas_bridge import cross_entropy

        donate = peer == "xentile, logits dead"
        mean = partial(cross_entropy, donate_logits=donate)
        return mean, partial(cross_entropy, donate_logits=donate, reduction="none")
    if peer == "optax":
        from optax.losses import softmax_cross_entropy_with_integer_labels as optax_losses

        def of_optax(x: jax.Array, y: jax.Array) -> jax.Array:
            losses: jax.Array = optax_losses(x.astype(jnp.float32), y)
            return losses

        return lambda x, y: of_optax(x, y).mean(), of_optax
    return lambda x, y: dense(x, y).mean(), dense


def inputs(problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [T, V], labels [T] and cotangents [T]: the driver's rows, again and again."""
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
    """The compiled function of each measure, and whether it takes the memory of the logits.

    The mean is multiplied by `factor`, if any. With `is_traced` a program does not know it, and
    takes it as the first of the cotangents.
    """
    mean, losses = losses_of(peer)

    def pair(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: losses(x, y), x)
        return out, pull(g)[0]

    def value_and_grad(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        if factor is None:
            return jax.value_and_grad(mean)(x, y)
        times = g[0] if is_traced else factor
        return jax.value_and_grad(lambda x: times * mean(x, y))(x)

    dead = peer == "xentile, logits dead"
    donate: Any = {"donate_argnums": 0} if dead else {}
    programs: dict[str, tuple[Any, bool]] = {
        "value_and_grad": (jax.jit(value_and_grad, **donate), dead),
        "pair": (jax.jit(pair, **donate), dead),
    }
    if not dead:
        programs["forward"] = (jax.jit(lambda x, y, _: mean(x, y)), False)
    return programs


def measure(problem: Problem) -> dict[str, Any]:
    """All measures of one peer on one problem."""
    x, y, cotangents = inputs(problem)
    found: dict[str, Any] = {}
    programs = programs_of(problem.peer, problem.factor, problem.is_traced)
    of_factor = None if problem.factor is None else cotangents.at[0].set(problem.factor)
    for name, (program, consumes) in programs.items():
        g = of_factor if name == "value_and_grad" and of_factor is not None else cotangents
        try:
            compiled, outputs, row = first_run(program, (x, y, g), consumes)
            if consumes:
                x = outputs[1]
            del outputs

            def step() -> Any:
                nonlocal x
                outputs = compiled(x, y, g)  # noqa: B023
                if consumes:  # noqa: B023
                    x = outputs[1]
                return outputs

            row |= median_ms(timer(step), problem.seconds)
            found[name] = row
        except Exception as error:
            found[name] = {"error": first_line(error)}
    return found


def copy(problem: Problem) -> dict[str, Any]:
    """Milliseconds to copy the logits on the device."""
    x, *_ = inputs(problem)
    copied = jax.jit(jnp.copy)
    found = median_ms(timer(lambda: copied(x)), problem.seconds)
    return {"yardstick_ms": found["median_ms"]}


def first_call(problem: Problem) -> dict[str, Any]:
    """Seconds of everything from the package's import to the first result, beyond JAX's start."""
    x, y, g = inputs(problem)
    started = time.perf_counter()
    program, _ = programs_of(problem.peer)["value_and_grad"]
    jax.block_until_ready(program(x, y, g))
    return {"first_call_s": time.perf_counter() - started, "jax_start_s": started - STARTED}


def main() -> None:
    """Serves the driver: one problem, or copies for as long as it asks."""
    mode, text = sys.argv[1:]
    problem = Problem.from_json(text)
    jax.config.update("jax_platforms", problem.platform)

    def prepare() -> None:
        if mode == "measure" and problem.peer.startswith("xentile"):
            import pallas_bridge  # noqa: F401

    modes = {"measure": measure, "yardstick": copy, "first_call": first_call}
    serve(problem, mode, modes, prepare)


if __name__ == "__main__":
    main()
