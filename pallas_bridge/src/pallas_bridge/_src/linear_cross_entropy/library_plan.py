"""Asks the library for the plans of its calls, which make a pass of all chunks.

crates/xentile-cpu/src/linear_cross_entropy/plan.rs plans calls on CPUs, and
crates/xentile/src/linear_cross_entropy/plan/cuda.rs calls on NVIDIA GPUs. A library answers for
both, whatever it has handlers for; where it cannot be used there are no plans.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import library
from ..losses.options import Tile
from .plan import Plan, Problem, token_chunk_scratch

# So few logits are left to XLA's programs for GPUs, where they fit: they are launched as one, and
# their GEMMs split long sums of few tiles. 1024 x 1024 x 4096 takes 0.082 ms there and 0.096 in the
# library, 2048 x 1024 x 8192 0.248 and 0.203 (NVIDIA H200, 2026-11-24).
FEW_LOGITS = 1 << 22
# So are logits of so few tokens, with a reduction: 128 x 4096 x 128256 takes 1.35 of its three
# GEMMs in the library and 1.06 by XLA, 512 x 2048 x 32000 1.31 and 1.19 (NVIDIA H200, 2026-11-29).
FEW_TOKENS = 512
# What of a plan the library answers, and reads in a request for a call.
ANSWERED = {
    *("tokens", "columns", "products", "scratch_bytes", "dweight_chunk"),
    *("saved_columns", "single_pass", "f32_logits", "saves_logits"),
}
# The library's integers have 64 bits.
MOST_BYTES = 1 << 62


def plan_cpu(
    problem: Problem, usual: Plan, tile: Tile, dtype: Any, *, may_save_logits: bool
) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where XLA runs `usual`.

    A `tile` that the user names is the most columns of a block. `may_save_logits` is
    whether a forward pass may save logits for the backward pass.
    """
    limit = usual.max_scratch_bytes
    more = {"tile": tile, "xla_products": usual.products, "may_save_logits": may_save_logits}
    return _plan("cpu", problem, limit, more, dtype=library.DTYPES[str(dtype)])


def plan_cuda(problem: Problem, limit: int, tiling: Mapping[str, Any] | None = None) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where the library has none.

    `tiling` is one to take instead, with the keys of `Tiling` in plan/cuda.rs.
    """
    is_few = problem.tokens * problem.vocab <= FEW_LOGITS
    is_few |= problem.reduced and problem.tokens <= FEW_TOKENS
    if is_few and not problem.running and token_chunk_scratch(problem, problem.tokens) <= limit:
        return None
    return _plan("cuda", problem, limit, {"tiling": tiling})


def _plan(
    platform: str, problem: Problem, limit: int, more: Mapping[str, Any], **dtype: str
) -> Plan | None:
    limits = {"scratch_bytes": min(limit, MOST_BYTES), **more}
    found = _ask(platform, problem, limits=limits, **dtype)
    if found is None:
        return None
    pairs = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
    return Plan("library", **{**found, **pairs}, max_scratch_bytes=limit)


def plan_call(
    platform: str, name: str, vocab_axis: int, plan: Plan, operands: Any
) -> tuple[dict[str, int], int]:
    """Returns the attributes and the bytes of scratch of the library's call `name`."""
    problem = Problem.of(operands, vocab_axis, reduced=False, running=name == "add")
    fields = {key: value for key, value in vars(plan).items() if key in ANSWERED}
    dtype = {"dtype": library.DTYPES[str(operands[0].dtype)]} if platform == "cpu" else {}
    found = _ask(platform, problem, call={"pass": name, "plan": fields}, **dtype)
    return dict(found["attributes"]), found["scratch_bytes"]


def _ask(platform: str, problem: Problem, **more: Any) -> Any:
    return library.plan({"platform": platform, "problem": dataclasses.asdict(problem), **more})
