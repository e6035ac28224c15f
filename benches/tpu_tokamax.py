"""tokamax's kernels for TPUs, as what benches/tpu_linear_cross_entropy.py compiles beside ours.

Their pipelines have code for first steps beside that for the others, chosen by numbers that a
compiler's listing does not tell, so that an estimate would take both to run in every step. What is
compiled is what most steps run, the others' code left out, which favours tokamax: twice, with what
the last block of hidden columns does and without, since one step in so many does that.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Those of the steps that most are not like.
FIRST = ("init_xw", "init_w_grad", "init_x_grad", "init_lse", "perform_loss_reduction")
LAST_OF_HIDDEN = "accumulate_loss"

Extents = tuple[int, int, int]


@dataclass(frozen=True)
class Tiles:
    """Blocks of tokens, hidden columns and the vocabulary, forward and backward."""

    forward: Extents
    backward: Extents
    # Of sums, in and out.
    buffers: tuple[int, int]


def its_kernel() -> Any:
    """The module of the kernels."""
    return importlib.import_module(
        "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
    )


def tuned(shape: Extents) -> Tiles:
    """What its table of measured times (data/autotuning/tpu_v6_lite, 0.0.17) has most often."""
    return Tiles((2048, shape[1], 1024), (2048, 512, 2048), (3, 2))


def default(shape: Extents) -> Tiles:
    """Its tiles where nothing was tuned."""
    kernel = its_kernel()
    found = [
        choose(*shape, dtype=jnp.bfloat16)
        for choose in (kernel.get_heuristic_fwd_config, kernel.get_heuristic_bwd_config)
    ]
    extents = ((one.b_block_size, one.h_block_size, one.v_block_size) for one in found)
    return Tiles(*extents, found[1].buffer_count)


def blocks(shape: Extents, tile: Extents) -> Extents:
    """How many blocks each extent has."""
    tokens, hidden, vocab = (-(-whole // part) for whole, part in zip(shape, tile, strict=True))
    return tokens, hidden, vocab


def moved(shape: Extents, tiles: Tiles) -> dict[str, tuple[int, int]]:
    """Bytes and steps of its kernels: a block comes when it is another than the step before's."""
    rows, width, columns = tiles.forward
    of_tokens, of_hidden, of_vocab = blocks(shape, tiles.forward)
    steps = of_tokens * of_hidden * of_vocab
    x = (steps if of_hidden > 1 else of_tokens) * rows * width
    forward = 2 * (x + steps * width * columns)
    rows, width, columns = tiles.backward
    of_tokens, of_hidden, of_vocab = blocks(shape, tiles.backward)
    # The products of a block of columns follow its logits by a step.
    all_steps = of_tokens * of_hidden * (of_vocab + 1)
    x = (all_steps if of_hidden > 1 else of_tokens) * rows * width
    w = (all_steps if of_hidden > 1 else of_tokens * of_vocab) * width * columns
    # The weight twice; sums in f32 come and go.
    backward = (2 + 8) * x + (4 + 8) * w
    return {"lce_fwd": (forward, steps), "lce_bwd": (backward, all_steps)}


def step_of(tiles: Tiles) -> Callable[..., Any]:
    """Value and gradients of the mean for hidden and weight [D, V]."""
    kernel = its_kernel()

    def how(tile: Extents) -> dict[str, Any]:
        return dict(zip(("b_block_size", "h_block_size", "v_block_size"), tile, strict=True))

    name = "linear_softmax_cross_entropy_loss_{}_pallas_mosaic_tpu".format

    def step(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        of_mean: dict[str, Any] = {"reduction": "mean"}
        loss, lse = getattr(kernel, name("fwd"))(x, labels, w, **of_mean, **how(tiles.forward))
        of_sums = {"buffer_count": tiles.buffers}
        gradients = getattr(kernel, name("bwd"))(
            jnp.float32(1), lse, x, labels, w, **of_mean, **of_sums, **how(tiles.backward)
        )
        return loss, gradients

    return step


@contextlib.contextmanager
def steady(*, ends_hidden: bool) -> Iterator[None]:
    """Has kernels traced with what most steps run, or, where hidden columns end, with that too."""
    kernel = its_kernel()
    when, cond = kernel.pl.when, jax.lax.cond

    def run(_: Any) -> Callable[[Callable[[], None]], None]:
        def decorate(body: Callable[[], None]) -> None:
            name = body.__name__
            if name not in FIRST and (ends_hidden or name != LAST_OF_HIDDEN):
                body()

        return decorate

    def choose(_: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        return (yes if ends_hidden else no)()

    kernel.pl.when, jax.lax.cond = run, choose
    jax.clear_caches()
    try:
        yield
    finally:
        kernel.pl.when, jax.lax.cond = when, cond
        jax.clear_caches()


def mixed(shape: Extents, tiles: Tiles, ends: list[Any], others: list[Any]) -> list[Any]:
    """Parts of a step, of which one in as many as hidden columns have blocks ends these."""
    found = []
    of_name = {part["name"]: part for part in others}
    for part in ends:
        count = 1
        for name, tile in (("lce_fwd", tiles.forward), ("lce_bwd", tiles.backward)):
            if name in part["name"]:
                count = blocks(shape, tile)[1]
        less = of_name.get(part["name"], part)["schedule_ms"]
        schedule = less + (part["schedule_ms"] - less) / count
        ms = max(schedule, part["dma_ms"]) + part["steps_ms"]
        found.append(part | {"schedule_ms": schedule, "ms": ms})
    return found
