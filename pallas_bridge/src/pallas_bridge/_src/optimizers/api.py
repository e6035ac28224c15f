"""AdamW, Adam and Lion as gradient transformations of optax, with state in float32 or 8 bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import check_integer, check_number, check_word
from ..keywords import hinted
from ..operation import Implementation
from . import call, formula, transformation, trees
from .formula import Rule, Scalars
from .trees import Leaf, Mask, State

if TYPE_CHECKING:
    import optax

Schedule = ArrayLike | Callable[[Any], ArrayLike]

# Options that may be functions of the number of steps.
SCHEDULES = ("learning_rate", "weight_decay", "adam_learning_rate", "adam_weight_decay")
# Options that may be None.
OPTIONAL = ("max_norm", "rounding_seed", "adam_learning_rate", "consistent_rms")
DECAYS = ("b1", "b2", "beta", "adam_b1", "adam_b2")
AT_LEAST_0 = ("eps", "eps_root", "adam_eps_root", "max_norm")


def check_scalars(**options: Any) -> None:
    """Checks options of optimizers by their names; of arrays of JAX, maybe traced, the shape.

    Raises:
        TypeError: one is no number.
        ValueError: one is outside its range.
    """
    for name, value in options.items():
        if (value is None and name in OPTIONAL) or (callable(value) and name in SCHEDULES):
            continue
        if isinstance(value, jax.Array):
            if value.ndim:
                raise TypeError(f"{name} has shape {value.shape}; it must be a scalar")
            continue
        if name == "rounding_seed":
            check_integer(name, value)
            continue
        number = check_number(name, value)
        if name in DECAYS and not 0 <= number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 0 and below 1")
        if name in AT_LEAST_0 and not number >= 0:
            raise ValueError(f"{name} is {number}; it must be at least 0")


@dataclass(frozen=True, eq=False)
class Options:
    """The options of an optimizer."""

    name: str
    rule: Rule
    quantizes: bool
    learning_rate: Schedule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike = 0.0
    eps_root: ArrayLike = 0.0
    weight_decay: Schedule = 0.0
    mask: Mask | None = None
    float32_mask: Mask | None = None
    shardings: Any = None
    max_norm: ArrayLike | None = None
    rounding_seed: ArrayLike | None = None
    implementation: Implementation | None = None
    nesterov: bool = False

    def init(self, params: Any) -> State:
        """Returns the state before the first step."""
        leaves = trees.check_params(params)
        keeps = [not self.quantizes] * len(leaves)
        if self.quantizes and self.float32_mask is not None:
            keeps = trees.broadcast("float32_mask", self.float32_mask, params)
        shardings: Sequence[Any] = [trees.sharding_of(leaf) for leaf in leaves]
        if self.shardings is not None:
            shardings = trees.flatten_like("shardings", self.shardings, params)
        moments = trees.zero_moments(params, keeps, shardings, moments=self.moments, name=self.name)
        structure = jax.tree.structure(params)
        mu, nu, *_ = [*(jax.tree.unflatten(structure, one) for one in moments), None]
        norm = None if self.max_norm is None else jnp.zeros((), jnp.float32)
        return State(jnp.zeros((), jnp.int32), mu, nu, norm)

    @property
    def moments(self) -> int:
        """The number of moments."""
        return 2 if self.rule == "adam" else 1

    def update(self, grads: Any, state: State, params: Any = None, **_: Any) -> tuple[Any, State]:
        """Returns what `optax.apply_updates` adds to the parameters, and the state after it."""
        if params is None:
            raise ValueError(f"{self.name}: update needs params: update(grads, state, params)")
        step = self._prepare(grads, state, params)
        updates, moments = [], []
        for grad, param, old, leaf in step.arrays():
            change, new = formula.update(self.rule, step.scalars, grad, param, old, leaf)
            if self.rounds and param.dtype == jnp.bfloat16:
                # The difference from the rounded parameter, so that adding it is exact.
                rounded = formula.apply(step.scalars, param, change, leaf, rounds=True)
                change = rounded.astype(jnp.float32) - param.astype(jnp.float32)
            updates.append(change)
            moments.append(new)
        return jax.tree.unflatten(step.structure, updates), step.state(moments)

    def update_and_apply(self, grads: Any, state: State, params: Any) -> tuple[Any, State]:
        """Returns the parameters and the state after a step.

        Each gradient, parameter and moment is read once, and each result written once, by a kernel
        where there is one (`call`), which takes the memory of donated parameters and state.
        """
        step = self._prepare(grads, state, params)
        found = call.run(
            self.rule, step.scalars, list(step.arrays()), self.rounds, self.implementation
        )
        new_params = [param for param, _ in found]
        moments = [new for _, new in found]
        return jax.tree.unflatten(step.structure, new_params), step.state(moments)

    @property
    def rounds(self) -> bool:
        """Whether bfloat16 parameters are rounded stochastically."""
        return self.rounding_seed is not None

    def _prepare(self, grads: Any, state: State, params: Any) -> "_Step":
        leaves = trees.check_params(params)
        gradients = trees.check_grads(grads, params)
        if not isinstance(state, State):
            raise TypeError(
                f"{self.name}: state is a {type(state).__name__}; init(params) makes it"
            )
        trees.check_count(state.count)
        moments = [trees.check_moments("mu", state.mu, params, quantizes=self.quantizes)]
        if self.moments == 2:
            moments.append(trees.check_moments("nu", state.nu, params, quantizes=self.quantizes))
        paths = trees.paths(params)
        decays = [True] * len(leaves)
        if self.mask is not None:
            decays = trees.broadcast("mask", self.mask, params)
        named = [
            Leaf(path, number, is_decayed)
            for number, (path, is_decayed) in enumerate(zip(paths, decays, strict=True))
        ]
        count = jnp.minimum(state.count, trees.LAST_STEP - 2) + 1
        norm, clip = call.norm_and_clip(gradients, self.max_norm)
        return _Step(
            jax.tree.structure(params),
            self._scalars(state.count, count, clip),
            gradients,
            leaves,
            moments,
            named,
            count,
            norm,
        )

    def _scalars(self, before: jax.Array, count: jax.Array, clip: jax.Array) -> Scalars:
        def at(value: Any) -> jax.Array:
            return jnp.asarray(value(before) if callable(value) else value, jnp.float32)

        def rest(value: Any) -> jax.Array:
            # A Python float is subtracted in float64, as in optax.
            return jnp.asarray(1 - value, jnp.float32)

        def correction(value: Any, steps: jax.Array = count) -> jax.Array:
            return formula.bias_correction(rest(value), steps)

        mu_scale, grad_scale = correction(self.b1), jnp.float32(0)
        if self.nesterov:
            mu_scale = at(self.b1) * correction(self.b1, count + 1)
            grad_scale = rest(self.b1) * correction(self.b1)

        seed = 0 if self.rounding_seed is None else self.rounding_seed
        return Scalars(
            at(self.learning_rate),
            at(self.b1),
            rest(self.b1),
            at(self.b2),
            rest(self.b2),
            at(self.eps),
            at(self.eps_root),
            at(self.weight_decay),
            mu_scale,
            grad_scale,
            correction(self.b2),
            clip,
            count.astype(jnp.uint32),
            formula.seed_of(seed),
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """The arrays of a step, checked."""

    structure: Any
    scalars: Scalars
    grads: list[jax.Array]
    params: list[jax.Array]
    # A list for each moment.
    moments: list[list[Any]]
    leaves: list[Leaf]
    count: jax.Array
    norm: jax.Array | None

    def arrays(self) -> "list[call.Arrays]":
        """Returns the gradient, parameter, moments and `Leaf` of each parameter."""
        rows = zip(*self.moments, strict=True)
        return [
            (grad, param, list(moments), leaf)
            for grad, param, moments, leaf in zip(
                self.grads, self.params, rows, self.leaves, strict=True
            )
        ]

    def state(self, moments: list[list[Any]]) -> State:
        """Returns the state after the step, from the moments of each parameter."""
        columns = [[of[index] for of in moments] for index in range(len(self.moments))]
        mu, nu, *_ = [*(jax.tree.unflatten(self.structure, one) for one in columns), None]
        return State(self.count, mu, nu, self.norm)


def _make(**options: Any) -> "optax.GradientTransformationExtraArgs":
    one = Options(**options)
    words = "custom_call", "reference"
    check_word(f"{one.name}: implementation", one.implementation, words, or_none=True)
    names = "learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "max_norm"
    check_scalars(**{name: getattr(one, name) for name in (*names, "rounding_seed")})
    return transformation.make(one.init, one.update, one.update_and_apply)


@hinted
def adamw(
    learning_rate: Schedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: Schedule = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    max_norm: ArrayLike | None = None,
    rounding_seed: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """AdamW with float32 state, as `optax.adamw`, with clipping and stochastic rounding.

    With t = 1, 2, .. and gradients g: mu = b1 mu + (1 - b1) g; nu = b2 nu + (1 - b2) g^2;
    p = p - learning_rate (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t) + eps_root) + eps)
    + weight_decay p), all in float32 (Loshchilov and Hutter, 2019).

    `update` and `init` are optax's, so that chains, masks, schedules and `inject_hyperparams` work.
    `update_and_apply(grads, state, params)` returns the pair of new parameters and new state, in
    one pass over each array: by XLA's program, or on CPUs by a kernel that takes the memory of
    donated parameters and state.

    Args:
      learning_rate: a scalar, or a function of the number of steps before this one.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.
      weight_decay: as `learning_rate`; it is multiplied by the learning rate.
      mask: which parameters decay: a tree of Booleans, a prefix of one, or a function of params.
      nesterov: whether the step takes the first moment of the next step, as NAdam.
      max_norm: gradients with a larger global norm are scaled to this one, and `state.norm` is
        their norm before. `math.inf` computes the norm alone; None neither.
      rounding_seed: rounds bfloat16 parameters stochastically, by a generator of seed, step, array
        and index; None rounds to nearest.
      implementation: "custom_call", "reference" (XLA's program), or None: the kernel where there is
        one, and one device of the platform.

    Returns:
      An `optax.GradientTransformation` whose state has `count`, `mu`, `nu` and `norm`. Parameters
      and gradients are float32, bfloat16 or float16, moments float32.

    Raises:
      ImportError: optax is not installed.
      OverflowError: a step after the last that int32 counts.
      TypeError: parameters or gradients of other dtypes; the message has the path. An option that
        is no number.
      ValueError: gradients or state of another tree, shape or block size than params; an option
        outside its range.
    """
    return _make(
        name="adamw",
        rule="adam",
        quantizes=False,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        mask=mask,
        nesterov=nesterov,
        max_norm=max_norm,
        rounding_seed=rounding_seed,
        implementation=implementation,
    )


@hinted
def adamw8bit(
    learning_rate: Schedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: Schedule = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    float32_mask: Mask | None = None,
    shardings: Any = None,
    max_norm: ArrayLike | None = None,
    rounding_seed: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """AdamW whose moments have 8 bits an entry, and a float32 scale for each block.

    Moments are stored by the dynamic code of Dettmers et al. (2022), signed and unsigned: 2.03
    bytes for each parameter. Blocks run along the last axis; their extent is the largest of 256,
    128 and 64 that divides each device's share of it, else the state stays float32, with a warning.
    So does the state of arrays below 4096 entries.

    On CPUs and NVIDIA GPUs `update_and_apply` is a kernel, for many arrays at once, in their place.
    For that `jax.jit` must donate parameters and state, and the function take them in the order
    that it returns them in: JAX gives the memory of the first argument of a shape to the first
    result of it.

    Args:
      learning_rate: as for `adamw`.
      b1: as for `adamw`.
      b2: as for `adamw`.
      eps: as for `adamw`.
      eps_root: as for `adamw`.
      weight_decay: as for `adamw`.
      mask: as for `adamw`.
      nesterov: as for `adamw`.
      float32_mask: which parameters keep float32 state; of the forms of `mask`.
      shardings: a tree of the parameters' shardings, for `init` under `jax.jit` on a mesh, where
        parameters do not show them.
      max_norm: as for `adamw`.
      rounding_seed: as for `adamw`.
      implementation: as for `adamw`. "custom_call" needs parameters on one device.

    Returns:
      As for `adamw`; leaves of `mu` and `nu` in 8 bits are pairs of `codes`, uint8 of the
      parameter's shape, and `scales`, float32 [.., D / block].

    Raises:
      ImportError: as for `adamw`.
      OverflowError: as for `adamw`.
      TypeError: as for `adamw`.
      ValueError: as for `adamw`.
    """
    return _make(
        name="adamw8bit",
        rule="adam",
        quantizes=True,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        mask=mask,
        float32_mask=float32_mask,
        shardings=shardings,
        nesterov=nesterov,
        max_norm=max_norm,
        rounding_seed=rounding_seed,
        implementation=implementation,
    )


@hinted
def adam8bit(
    learning_rate: Schedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    nesterov: bool = False,
    float32_mask: Mask | None = None,
    shardings: Any = None,
    max_norm: ArrayLike | None = None,
    rounding_seed: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Adam whose moments have 8 bits an entry: `adamw8bit` without weight decay.

    Args:
      learning_rate: as for `adamw`.
      b1: as for `adamw`.
      b2: as for `adamw`.
      eps: as for `adamw`.
      eps_root: as for `adamw`.
      nesterov: as for `adamw`.
      float32_mask: as for `adamw8bit`.
      shardings: as for `adamw8bit`.
      max_norm: as for `adamw`.
      rounding_seed: as for `adamw`.
      implementation: as for `adamw8bit`.

    Returns:
      As for `adamw8bit`.

    Raises:
      ImportError: as for `adamw`.
      OverflowError: as for `adamw`.
      TypeError: as for `adamw`.
      ValueError: as for `adamw`.
    """
    return _make(
        name="adam8bit",
        rule="adam",
        quantizes=True,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        mask=False,
        float32_mask=float32_mask,
        shardings=shardings,
        nesterov=nesterov,
        max_norm=max_norm,
        rounding_seed=rounding_seed,
        implementation=implementation,
    )


@hinted
def lion8bit(
    learning_rate: Schedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    weight_decay: Schedule = 1e-3,
    mask: Mask | None = None,
    *,
    float32_mask: Mask | None = None,
    shardings: Any = None,
    max_norm: ArrayLike | None = None,
    rounding_seed: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> "optax.GradientTransformationExtraArgs":
    """Lion, as `optax.lion`, whose moment has 8 bits an entry.

    p = p - learning_rate (sign(b1 mu + (1 - b1) g) + weight_decay p); mu = b2 mu + (1 - b2) g
    (Chen et al., 2023). On CPUs `update_and_apply` is a kernel, as for `adamw8bit`.

    Args:
      learning_rate: as for `adamw`.
      weight_decay: as for `adamw`.
      mask: as for `adamw`.
      b1: weight of the moment in the step.
      b2: weight of the moment in the moment after it.
      float32_mask: as for `adamw8bit`.
      shardings: as for `adamw8bit`.
      max_norm: as for `adamw`.
      rounding_seed: as for `adamw`.
      implementation: as for `adamw`.

    Returns:
      As for `adamw8bit`; `nu` is None.

    Raises:
      ImportError: as for `adamw`.
      OverflowError: as for `adamw`.
      TypeError: as for `adamw`.
      ValueError: as for `adamw`.
    """
    return _make(
        name="lion8bit",
        rule="lion",
        quantizes=True,
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        mask=mask,
        float32_mask=float32_mask,
        shardings=shardings,
        max_norm=max_norm,
        rounding_seed=rounding_seed,
        implementation=implementation,
    )
