"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalised by Newton and Schulz.

Matrices of one shape are one batch of each GEMM. https://kellerjordan.github.io/posts/muon/
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import check_integer, is_traced
from ..keywords import hinted
from . import api, call, formula, newton_schulz, transformation, trees
from .api import Schedule
from .trees import Mask

if TYPE_CHECKING:
    import optax

COEFFICIENTS = (3.4445, -4.775, 2.0315)


class MuonState(NamedTuple):
    """The state: momentum `mu` of matrices, and the state of AdamW for all other parameters.

    `mu` and `adamw` have the parameters' tree with None for the others; `norm` is as in `State`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    adamw: trees.State
    norm: jax.Array | None


# Exported steps take it and give it back.
jax.export.register_namedtuple_serialization(MuonState, serialized_name="pallas_bridge.MuonState")


def orthogonalized(
    x: jax.Array, coefficients: tuple[float, float, float], steps: ArrayLike, eps: ArrayLike
) -> jax.Array:
    """Returns matrices [.., R, C] with singular values near 1, float32, by GEMMs of bfloat16.

    With X / |X|, and A = X X' of the shorter side: X = (c0 I + c1 A + c2 A A) X, `steps` times.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = (x / (norm + eps)).astype(jnp.bfloat16)

    def step(_: Any, x: jax.Array) -> jax.Array:
        # With c0 on the diagonal the step is one GEMM.
        matrix = newton_schulz.polynomial(x, coefficients)
        factors = (x, matrix) if is_tall else (matrix, x)
        return newton_schulz.product("ik", "kj", "ij", *factors, jnp.bfloat16)

    if is_traced(steps):
        found: jax.Array = jax.lax.fori_loop(0, steps, step, x)
        return found.astype(jnp.float32)
    for index in range(operator.index(steps)):  # type: ignore[arg-type]
        x = step(index, x)
    return x.astype(jnp.float32)


def orthogonalized_by_shape(
    matrices: list[jax.Array],
    coefficients: tuple[float, float, float],
    steps: ArrayLike,
    eps: ArrayLike,
) -> list[jax.Array]:
    """Returns `orthogonalized` of each array, in one batch for each shape of matrices."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, one in enumerate(matrices):
        groups[one.shape[-2:]].append(index)
    found: list[Any] = [None] * len(matrices)
    for shape, indices in groups.items():
        if len(indices) == 1:
            (only,) = indices
            found[only] = orthogonalized(matrices[only], coefficients, steps, eps)
            continue
        members = [matrices[index] for index in indices]
        batch = jnp.concatenate([one.reshape(-1, *shape) for one in members])
        results = orthogonalized(batch, coefficients, steps, eps)
        ends = np.cumsum([one.size // math.prod(shape) for one in members])[:-1]
        parts = jnp.split(results, ends)
        for index, part in zip(indices, parts, strict=True):
            found[index] = part.reshape(matrices[index].shape)
    return found


@dataclass(frozen=True, eq=False)
class _Muon:
    """Muon's functions, by its options."""

    learning_rate: Schedule
    coefficients: tuple[float, float, float]
    steps: ArrayLike
    beta: ArrayLike
    eps: ArrayLike
    weight_decay: Schedule
    weight_decay_mask: Mask | None
    nesterov: bool
    matrices: Mask
    consistent_rms: ArrayLike | None
    max_norm: ArrayLike | None
    rounding_seed: ArrayLike | None
    others: Any

    def _masks(self, params: Any) -> list[bool]:
        masks = trees.broadcast("matrices", self.matrices, params)
        leaves = zip(trees.paths(params), jax.tree.leaves(params), masks, strict=True)
        for path, leaf, is_chosen in leaves:
            if is_chosen and (jnp.ndim(leaf) < 2 or jnp.size(leaf) == 0):
                raise ValueError(
                    f"params{path} has shape {jnp.shape(leaf)}; an array of matrices must have "
                    "two axes at least, and entries"
                )
        return masks

    def init(self, params: Any) -> MuonState:
        """Returns the state before the first step."""
        leaves, masks = trees.check_params(params), self._masks(params)
        structure = jax.tree.structure(params)
        mu = [
            jnp.zeros_like(leaf, jnp.float32) if chosen else None
            for leaf, chosen in zip(leaves, masks, strict=True)
        ]
        return MuonState(
            jnp.zeros((), jnp.int32),
            jax.tree.unflatten(structure, mu),
            self.others.init(_without(params, masks)),
            None if self.max_norm is None else jnp.zeros((), jnp.float32),
        )

    def update(
        self, grads: Any, state: MuonState, params: Any = None, **_: Any
    ) -> tuple[Any, MuonState]:
        """Returns what `optax.apply_updates` adds to the parameters, and the state after it."""
        return self._run(self.others.update, grads, state, params, adds=False)

    def update_and_apply(self, grads: Any, state: MuonState, params: Any) -> tuple[Any, MuonState]:
        """Returns the parameters and the state after a step."""
        return self._run(self.others.update_and_apply, grads, state, params, adds=True)

    def _run(
        self, others: Callable[..., Any], grads: Any, state: MuonState, params: Any, *, adds: bool
    ) -> tuple[Any, MuonState]:
        if params is None:
            raise ValueError("muon: update needs params: update(grads, state, params)")
        leaves = trees.check_params(params)
        gradients = trees.check_grads(grads, params)
        if not isinstance(state, MuonState):
            raise TypeError(f"muon: state is a {type(state).__name__}; init(params) makes it")
        trees.check_count(state.count)
        masks, structure = self._masks(params), jax.tree.structure(params)
        chosen = [index for index, is_chosen in enumerate(masks) if is_chosen]
        old = trees.check_moments("mu", state.mu, _only(params, masks), quantizes=False)
        norm, clip = call.norm_and_clip(gradients, self.max_norm)
        if norm is not None:
            gradients = [one.astype(jnp.float32) * clip for one in gradients]
        others_grads = _without(jax.tree.unflatten(structure, gradients), masks)
        rest, adamw = others(others_grads, state.adamw, _without(params, masks))
        decays = [True] * len(leaves)
        if self.weight_decay_mask is not None:
            decays = trees.broadcast("weight_decay_mask", self.weight_decay_mask, params)

        count = jnp.minimum(state.count, trees.LAST_STEP - 2) + 1
        beta, rest_beta = jnp.float32(self.beta), jnp.asarray(1 - self.beta, jnp.float32)
        correction = partial(formula.bias_correction, rest_beta)
        momenta, directions = [], []
        for index, mu in zip(chosen, old, strict=True):
            g = gradients[index].astype(jnp.float32)
            mu = rest_beta * g + beta * mu
            if self.nesterov:
                ahead = rest_beta * g * correction(count)
                directions.append(beta * mu * correction(count + 1) + ahead)
            else:
                directions.append(mu * correction(count))
            momenta.append(mu)
        orthogonal = orthogonalized_by_shape(directions, self.coefficients, self.steps, self.eps)
        rate, decay = (
            jnp.asarray(one(state.count) if callable(one) else one, jnp.float32)
            for one in (self.learning_rate, self.weight_decay)
        )
        seed = None if self.rounding_seed is None else formula.seed_of(self.rounding_seed)
        steps = {}
        for index, one in zip(chosen, orthogonal, strict=True):
            param = leaves[index]
            step = self._scale(param.shape) * one
            if decays[index]:
                step = step + decay * param.astype(jnp.float32)
            change = -rate * step
            if adds or self.rounding_seed is not None:
                # AdamW's numbers come first.
                number = len(leaves) + index
                new = formula.added(param, change, number, count.astype(jnp.uint32), seed)
                change = new if adds else new.astype(jnp.float32) - param.astype(jnp.float32)
            steps[index] = change
        others_left = iter(jax.tree.leaves(rest))
        results = [
            steps[index] if masks[index] else next(others_left) for index in range(len(leaves))
        ]
        new_mu = iter(momenta)
        mu_tree = jax.tree.unflatten(
            structure, [next(new_mu) if is_chosen else None for is_chosen in masks]
        )
        return jax.tree.unflatten(structure, results), MuonState(count, mu_tree, adamw, norm)

    def _scale(self, shape: tuple[int, ...]) -> ArrayLike:
        rows, columns = shape[-2:]
        if self.consistent_rms is None:
            return math.sqrt(max(1, columns / rows))
        return math.sqrt(max(rows, columns)) * self.consistent_rms


def _without(tree: Any, masks: list[bool]) -> Any:
    """Returns a tree with None for the leaves that a mask has."""
    return _only(tree, [not one for one in masks])


def _only(tree: Any, masks: list[bool]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    kept = [leaf if one else None for leaf, one in zip(leaves, masks, strict=True)]
    return jax.tree.unflatten(structure, kept)


@hinted
def muon(
    learning_rate: Schedule,
    ns_coeffs: tuple[float, float, float] = COEFFICIENTS,
    ns_steps: ArrayLike = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
    *,
    nesterov: bool = True,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: Schedule = 0.0,
    adam_learning_rate: Schedule | None = None,
    matrices: Mask | None = None,
    consistent_rms: ArrayLike | None = None,
    max_norm: ArrayLike | None = None,
    rounding_seed: ArrayLike | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Muon for matrices and AdamW for all other parameters, as `optax.contrib.muon`.

    Momentum is orthogonalised by `ns_steps` Newton-Schulz steps in bfloat16, with matrices of equal
    shapes in one batch; optax computes in the gradients' dtype, an array after another. On one
    Hopper GPU kernels make the symmetric products of matrices of 256 and more. Momentum is float32.

    Args:
      learning_rate: a scalar, or a function of the number of steps before this one.
      ns_coeffs: coefficients of the quintic.
      ns_steps: steps of the iteration.
      beta: decay of the momentum.
      eps: added to the norm that matrices are divided by, and AdamW's.
      weight_decay: of matrices, as for `adamw`.
      weight_decay_mask: of matrices, as for `adamw`.
      nesterov: whether the momentum, and AdamW's moment, are Nesterov's.
      adam_b1: of the other parameters.
      adam_b2: of the other parameters.
      adam_eps_root: of the other parameters.
      adam_weight_decay: of the other parameters.
      adam_learning_rate: of these; None is `learning_rate`.
      matrices: which parameters are matrices, or batches of matrices by their last two axes; of the
        forms of the mask of `adamw`. None: those of two axes.
      consistent_rms: updates are scaled by sqrt(max(R, C)) times this; None scales by
        sqrt(max(1, C / R)).
      max_norm: as for `adamw`.
      rounding_seed: as for `adamw`.

    Returns:
      An `optax.GradientTransformation` with `update_and_apply`, as `adamw`.

    Raises:
      ImportError: as for `adamw`.
      OverflowError: as for `adamw`.
      TypeError: as for `adamw`.
      ValueError: as for `adamw`, or a matrix of fewer than two axes, or none of three coefficients.
    """
    api.check_scalars(
        learning_rate=learning_rate,
        beta=beta,
        eps=eps,
        weight_decay=weight_decay,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        adam_learning_rate=adam_learning_rate,
        consistent_rms=consistent_rms,
        max_norm=max_norm,
        rounding_seed=rounding_seed,
    )
    # `optax.inject_hyperparams` traces it.
    if not is_traced(ns_steps):
        check_integer("ns_steps", ns_steps, 0)
    elif ns_steps.ndim or not jnp.issubdtype(ns_steps.dtype, jnp.integer):
        raise TypeError(
            f"ns_steps is traced, of shape {ns_steps.shape} and dtype {ns_steps.dtype}; it must be "
            "an integer"
        )
    if not hasattr(ns_coeffs, "__len__") or len(ns_coeffs) != 3:
        raise ValueError(f"ns_coeffs is {ns_coeffs}; it must be three numbers")
    others = api.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        eps,
        adam_eps_root,
        adam_weight_decay,
        nesterov=nesterov,
        rounding_seed=rounding_seed,
    )
    one = _Muon(
        learning_rate,
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        weight_decay,
        weight_decay_mask,
        nesterov,
        _has_two_axes if matrices is None else matrices,
        consistent_rms,
        max_norm,
        rounding_seed,
        others,
    )
    return transformation.make(one.init, one.update, one.update_and_apply)


def _has_two_axes(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2 and jnp.size(leaf) > 0, params)
