"""Cross-entropy by the Pallas kernel for TPUs (docs/internals/tpu-cross-entropy.md).

`tpu_plan.py` has the tiling, `tpu_kernel.py` the kernel.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..custom_call import Call
from ..losses import formulas
from ..losses.options import Options
from ..pallas import Target
from . import tpu_kernel
from .declaration import OPERATION
from .tpu_kernel import Formula
from .tpu_plan import NUMBERS, lies_across, plan_tiles, sublanes


def kernel(options: Options, target: Target, call: Call) -> Callable[..., Sequence[jax.Array]]:
    """Returns the function that computes the results of `call`, of arrays of any leading axes."""
    name = call.target.removeprefix("xentile_cross_entropy_")
    functions: Any = {"forward": _forward, "backward": _backward, "fused": _fused}
    function = functions[name]

    def flat(logits: jax.Array, *tokens: jax.Array) -> Sequence[jax.Array]:
        leading = logits.shape[:-1]
        if logits.dtype not in (jnp.bfloat16, jnp.float32):
            raise TypeError(
                f"{OPERATION}: logits have dtype {logits.dtype}; on TPU it must be bfloat16 or "
                "float32"
            )
        run: Any = _nothing if 0 in leading else partial(_sweep, target, options, (1, *leading)[-1])
        rows = logits.reshape(math.prod(leading), logits.shape[-1])
        given = [rows, *(x.reshape(-1) for x in tokens)]
        # HBM pads arrays of fewer rows than a register has to 1, 2 or 4 of them, which copies of
        # whole registers would leave.
        count, missing = len(rows), max(sublanes(logits.dtype) - len(rows), 0)
        if missing and 0 not in leading:
            given = [jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in given]
        results = function(run, options, *given)
        return [x[:count].reshape(*leading, *x.shape[1:]) for x in results]

    return flat


def _nothing(logits: jax.Array, labels: jax.Array, *_: Any, **__: bool) -> Any:
    return logits, jnp.zeros((NUMBERS, *labels.shape), jnp.float32)


def _sweep(
    target: Target,
    options: Options,
    length: int,
    logits: jax.Array,
    labels: jax.Array,
    *scalars: jax.Array,
    reduces: bool,
    writes: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Runs the kernel on logits [T, V], or twice where rows are too long to stay in VMEM.

    `length` is that of the sequences that T was reshaped from. Returns dlogits [T, V] where it
    writes, and what it reduces, [NUMBERS, T], where it does.
    """
    tokens, vocab = logits.shape
    make_plan = partial(
        plan_tiles,
        target,
        tokens,
        vocab,
        logits.dtype,
        time_block=options.time_block,
        block_size=options.block_size,
        reduces=reduces,
        writes=writes,
    )
    plan = None
    if options.tile == (None, None) and lies_across(length, vocab):
        plan = make_plan(sequences=tokens // length)
    plan = plan or make_plan()
    if plan is None:
        run = partial(_sweep, target, options, length)
        _, found = run(logits, labels, reduces=True, writes=False)
        assert found is not None
        (dloss,) = scalars
        zeros = jnp.zeros_like(dloss)
        saved = found[0], found[1]
        dlogits, _ = run(logits, labels, dloss, zeros, zeros, *saved, reduces=False, writes=True)
        return dlogits, found
    rows, blocks = plan.time_block, plan.blocks
    missing = blocks * rows - plan.tokens

    def by_block(values: jax.Array, fill: Any) -> jax.Array:
        """[.., T] to [blocks, .., time_block]."""
        padded = jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
        return padded.reshape(-1, blocks, rows).swapaxes(0, 1)

    in_range = (labels >= 0) & (labels < plan.vocab)
    column = jnp.where(in_range, labels, 0).astype(jnp.int32)
    tile = jnp.where(in_range, column // plan.block_size, -1)
    places = by_block(jnp.stack([tile, column % plan.block_size]), -1)
    zero = jnp.zeros(plan.tokens, jnp.float32)
    given = by_block(jnp.stack([*scalars, *[zero] * (NUMBERS - len(scalars))]), 0)

    def block_of(extent: int, **space: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, extent, rows), lambda block: (block, 0, 0), **space)

    lying = logits
    if plan.is_across:
        lying = logits.reshape(plan.sequences, length, vocab).swapaxes(1, 2)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_shape: list[Any] = []
    out_specs = []
    if writes:
        out_shape.append(jax.ShapeDtypeStruct(lying.shape, lying.dtype))
        out_specs.append(anywhere)
    if reduces:
        out_shape.append(jax.ShapeDtypeStruct((blocks, NUMBERS, rows), jnp.float32))
        out_specs.append(block_of(NUMBERS))
    formula = Formula(options, target.compares_bf16)
    name = {(True, True): "fused", (True, False): "forward", (False, True): "backward"}
    elements = plan.tokens * plan.vocab
    results = pl.pallas_call(
        partial(tpu_kernel.run, plan=plan, formula=formula, reduces=reduces, writes=writes),
        grid=(blocks,),
        in_specs=[block_of(2, memory_space=pltpu.SMEM), block_of(NUMBERS), anywhere],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((plan.slots, *plan.order(rows, plan.block_size)), logits.dtype),
            pltpu.SemaphoreType.DMA((plan.slots,)),
            pltpu.SemaphoreType.DMA((plan.slots,)),
            pltpu.SMEM((plan.tiles,), jnp.int32),
            pltpu.SMEM((rows,), jnp.int32),
            pltpu.VMEM((9, *plan.state_shape), jnp.float32),
        ],
        # The row of one block leaves while that of the next comes in: in order, and on one core.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=target.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * elements,
            transcendentals=elements * (reduces + writes),
            bytes_accessed=elements * logits.dtype.itemsize * (1 + writes),
        ),
        input_output_aliases={2: 0} if writes and options.donate_logits else {},
        interpret=target.interpret,
        name=f"xentile_cross_entropy_{name[reduces, writes]}",
    )(places, given, lying)
    results = list(results)
    dlogits = results.pop(0) if writes else None
    if dlogits is not None and plan.is_across:
        dlogits = dlogits.swapaxes(1, 2).reshape(logits.shape)
    if not reduces:
        return dlogits, None
    return dlogits, results[0].swapaxes(0, 1).reshape(NUMBERS, -1)[:, : plan.tokens]


def _forward(run: Any, options: Options, logits: jax.Array, labels: jax.Array) -> Any:
    _, found = run(logits, labels, reduces=True, writes=False)
    return formulas.outputs_of_sums(options, logits.shape[-1], labels, found[:4])


def _backward(
    run: Any,
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    low: jax.Array,
    *cotangents: jax.Array,
) -> Any:
    given = formulas.mask_cotangents(options, logits.shape[-1], labels, *cotangents)
    dlogits, _ = run(logits, labels, *given, lse, low, reduces=False, writes=True)
    return (dlogits,)


def _fused(
    run: Any, options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> Any:
    vocab = logits.shape[-1]
    (given,) = formulas.mask_cotangents(options, vocab, labels, dloss)
    dlogits, found = run(logits, labels, given, reduces=True, writes=True)
    loss, _, lse, low = formulas.outputs_of_sums(options, vocab, labels, found[:4], given == 0)
    return loss, lse, low, dlogits
