"""Peers in JAX: a worker of linear_cross_entropy.py."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import calls_for, difference_clock, first_run, median_ms, wall_clock
from in_jax import dense
from shared import LinearProblem, serve

PRODUCTS = "products, XLA"
WIDE = "JAX dense, f32 product"
MIB = 2**20
# Tokens of a chunk of the scan.
CHUNK = 1024

# The loss of hidden, weight and labels.
Loss = Callable[[jax.Array, jax.Array, jax.Array], Any]


def scanned(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """The mean in chunks of tokens whose logits the backward pass recomputes."""
    chunk = math.gcd(x.shape[0], CHUNK)

    @jax.checkpoint
    def add(total: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden, labels = piece
        return total + dense(hidden @ w.T, labels).sum(), None

    pieces = x.reshape(-1, chunk, x.shape[1]), y.reshape(-1, chunk)
    return jax.lax.scan(add, jnp.zeros(()), pieces)[0] / x.shape[0]


def wide_losses(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """The losses [N] of logits that keep the GEMM's float32."""
    z = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)[:, 0]


def options_of(problem: LinearProblem) -> dict[str, Any]:
    """Options of this library's loss."""
    budget = None if problem.budget_mib is None else problem.budget_mib * MIB
    return {"vocab_axis": 0, "max_scratch_bytes": budget}


def loss_of(problem: LinearProblem) -> Loss:
    """The mean of a peer."""
    if problem.peer.startswith("xentile"):
        from pallas_bridge import linear_cross_entropy

        options = options_of(problem)
        return lambda x, w, y: linear_cross_entropy(x, w, y, **options)
    if problem.peer.startswith("tokamax"):
        from tokamax import linear_softmax_cross_entropy_loss

        way: Any = "chunked_xla" if problem.peer == "tokamax, chunked" else None
        return lambda x, w, y: linear_softmax_cross_entropy_loss(
            x, y, w, reduction="mean", implementation=way
        )
    if problem.peer == "JAX scan":
        return scanned
    losses = losses_of(problem)
    return lambda x, w, y: losses(x, w, y).mean()


def losses_of(problem: LinearProblem) -> Loss:
    """The losses [N] of this library or of a dense program in JAX."""
    if problem.peer.startswith("xentile"):
        from pallas_bridge import linear_cross_entropy_per_token

        options = options_of(problem)
        return lambda x, w, y: linear_cross_entropy_per_token(x, w, y, **options)[0]
    return wide_losses if problem.peer == WIDE else lambda x, w, y: dense(x @ w.T, y)


def is_transposed(problem: LinearProblem) -> bool:
    """Whether the peer takes a weight [hidden, vocab]."""
    return problem.peer.startswith("tokamax")


def operands(problem: LinearProblem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden, weight and labels, as the driver wrote them."""

    def read(name: str) -> jax.Array:
        # `jnp.asarray` copies on the device, which fragments its memory.
        return jax.device_put(np.load(problem.file(name)).view(jnp.dtype(problem.dtype)))

    w = read("weight")
    w = jax.block_until_ready(w.T) if is_transposed(problem) else w
    return read("hidden"), w, jax.device_put(np.load(problem.file("labels")))


def program_of(problem: LinearProblem) -> tuple[Any, tuple[jax.Array, ...]]:
    """The jitted loss with gradients of hidden and weight, and its arguments."""
    return jax.jit(jax.value_and_grad(loss_of(problem), argnums=(0, 1))), operands(problem)


def products(problem: LinearProblem) -> tuple[Any, tuple[jax.Array, ...]]:
    """The three GEMMs that every peer needs, jitted, and their arguments."""
    n, d, v = problem.tokens, problem.hidden, problem.vocab

    @jax.jit
    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = ((n, d), (v, d), (n, v))
        normal = (jax.random.normal(key, of) for key, of in zip(keys, shapes, strict=True))
        return [array.astype(problem.dtype) for array in normal]

    return jax.jit(lambda x, w, g: (x @ w.T, g @ w, g.T @ x)), tuple(make())


def plan_of(problem: LinearProblem) -> dict[str, str]:
    """The plan of this library."""
    if not problem.peer.startswith("xentile"):
        return {}
    from pallas_bridge import explain

    hidden, weight = (
        jax.ShapeDtypeStruct((rows, problem.hidden), jnp.dtype(problem.dtype))
        for rows in (problem.tokens, problem.vocab)
    )
    return {"plan": str(explain(hidden, weight, **options_of(problem)))}


def time_of(step: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """The median of a step that has run."""
    # A turn of the clock that leaves out the wait makes three times as many calls.
    calls = calls_for(wall_clock(step), seconds / 3)
    return median_ms(difference_clock(step), seconds, calls, least=3)


def measure(problem: LinearProblem) -> dict[str, Any]:
    """Time, memory and loss of one peer on one problem."""
    bare = problem.peer == PRODUCTS
    program, arrays = (products if bare else program_of)(problem)
    compiled, outputs, row = first_run(program, arrays)
    found = row if bare else {**row, "loss": float(outputs[0]), **plan_of(problem)}
    del outputs
    return found | time_of(lambda: compiled(*arrays), problem.seconds)


def check(problem: LinearProblem) -> dict[str, Any]:
    """The loss; gradients, and losses if the peer has them, go to files for the driver."""
    program, arrays = program_of(problem)
    value, (dx, dw) = program(*arrays)
    np.save(problem.file("dhidden"), np.asarray(dx, np.float32))
    np.save(problem.file("dweight"), np.asarray(dw.T if is_transposed(problem) else dw, np.float32))
    if problem.peer.startswith("xentile") or "dense" in problem.peer:
        losses = jax.jit(losses_of(problem))(*arrays)
        np.save(problem.file("losses"), np.asarray(losses, np.float32))
    dtypes = [str(gradient.dtype) for gradient in (dx, dw)]
    return {"loss": float(value), "dtypes": dtypes, **plan_of(problem)}


def yardstick(problem: LinearProblem) -> dict[str, Any]:
    """Milliseconds of the GEMMs."""
    program, arrays = products(problem)
    jax.block_until_ready(program(*arrays))
    found = time_of(lambda: program(*arrays), problem.seconds)
    return {"yardstick_ms": found["median_ms"]}


def prepare(_: str, problem: LinearProblem) -> None:
    """Imports what a mode needs."""
    jax.config.update("jax_platforms", problem.platform)
    loss_of(problem)


if __name__ == "__main__":
    modes = {"measure": measure, "check": check, "yardstick": yardstick}
    serve(LinearProblem, modes, prepare)
