"""RMSNorm of every head, and its rotation: what queries and keys of many models go through."""

import jax
from jax.typing import ArrayLike

from ..checks import as_array
from ..implementations import choose
from ..keywords import hinted
from ..norm.api import IMPLEMENTATIONS
from ..norm.options import check_columns, check_rms_options
from ..operation import Implementation
from . import custom_call
from .api import BASE, prepared
from .declaration import OPERATION
from .qk_norm_call import Both, fits
from .qk_norm_call import qk_norm_rope as in_one_call
from .scaling import Scaling


@hinted
def qk_norm_rope(
    q: ArrayLike,
    k: ArrayLike,
    q_weight: ArrayLike,
    k_weight: ArrayLike,
    *,
    eps: float = 1e-6,
    zero_centred: bool = False,
    positions: ArrayLike | None = None,
    offset: ArrayLike = 0,
    base: float = BASE,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    tables: tuple[ArrayLike, ArrayLike] | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of each head of queries and keys, followed by rotary position embedding.

        rope(rms_norm(q, q_weight), rms_norm(k, k_weight))

    as Qwen 3 and Gemma 3 have it: what is normalised is rounded to the dtype of q and k before it
    is rotated. On NVIDIA GPUs one kernel does both for q and k, in a read and a write, where heads
    are of whole vectors of 16 bytes, of 512 bytes or less of interleaved pairs and up to 1024 of
    halves; elsewhere it is the two, one after the other. It is differentiable in both modes with
    respect to q, k and both weights; q, k and a number a head are kept for that.

    Args:
      q: [B, S, H, D] or [S, H, D], as `rope` takes it.
      k: the same but for the number of heads.
      q_weight: [D], in bfloat16, float16 or float32.
      k_weight: [D], the same.
      eps: as of `rms_norm`.
      zero_centred: as of `rms_norm`, for both weights.
      positions: this and what follows as of `rope`.
      offset: see there.
      base: see there.
      rotary_dim: see there.
      interleaved: see there.
      scaling: see there.
      tables: see there.
      implementation: as of both.

    Returns:
      What q and k become, of their shapes and dtypes.

    Raises:
      TypeError: what `rms_norm` or `rope` raises.
      ValueError: the same.
    """
    choose(OPERATION, implementation)
    q, k = as_array("q", q, "[.., S, H, D]"), as_array("k", k, "[.., S, H, D]")
    q_weight = as_array("q_weight", q_weight, "[D]")
    k_weight = as_array("k_weight", k_weight, "[D]")
    options, cos, sin = prepared(
        q,
        k,
        positions=positions,
        offset=offset,
        base=base,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=scaling,
        tables=tables,
        implementation=implementation,
    )
    norm = check_rms_options(eps, zero_centred, implementation)
    check_columns(q, "q_weight", q_weight, x_name="q")
    check_columns(k, "k_weight", k_weight, x_name="k")
    is_one = implementation != "reference" and fits(
        options, q, k, (q_weight, k_weight), 2 * cos.shape[-1]
    )
    if is_one:
        return in_one_call(Both(norm, options), q, k, q_weight, k_weight, cos, sin)
    module = IMPLEMENTATIONS[choose(OPERATION, implementation)]
    q, k = (
        custom_call.rope(options, module.norm(norm, x, weight)[0], cos, sin)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k
