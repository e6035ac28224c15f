"""Preference losses and their gradients, against the papers' formulas in float64 and loops."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_strict_modes import MODES, wide_types

from pallas_bridge import cross_entropy_per_token, linear_cross_entropy_per_token, losses

F64 = Any
IGNORED = -100
WIDTH, VOCAB = 6, 24


@dataclasses.dataclass
class Problem:
    """A loss of one batch of responses or two, with all that it takes beside the policy."""

    # [B, T] of each batch; those of the prompt and of padding are ignored.
    labels: list[F64]
    # What has no gradient.
    constants: dict[str, Any]
    # Of the policy's log-probabilities [B, T] of each batch, and the constants.
    ours: Callable[[Any, Any], jax.Array]
    # Of those of the tokens that count, batch by batch and response by response.
    paper: Callable[[list[list[F64]]], float]

    @property
    def masks(self) -> list[F64]:
        """The tokens of the responses, of each batch."""
        return [of != IGNORED for of in self.labels]

    def reference(self, logps: Any) -> float:
        """The paper's loss, of log-probabilities [B, T] in float64."""
        return self.paper([responses(x, of) for x, of in zip(logps, self.labels, strict=True)])


def f32(*numbers: Any) -> Any:
    """An array in float32, of which types say nothing."""
    return np.array(numbers, np.float32)


def responses(x: F64, labels: F64) -> list[F64]:
    """The numbers of the tokens that count, of each response."""
    return [row[of != IGNORED].astype(np.float64) for row, of in zip(x, labels, strict=True)]


def draw_labels(rng: np.random.Generator, length: int) -> F64:
    """Four responses [4, length]: of all tokens, of one, and of some after a prompt."""
    labels = rng.integers(0, VOCAB, (4, length)).astype(np.int32)
    labels[1, 1:] = IGNORED
    labels[2, :2], labels[3, :1], labels[3, -1:] = IGNORED, IGNORED, IGNORED
    return labels


def log_sigmoid(x: float) -> float:
    return -float(np.logaddexp(0.0, -x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def draw(rng: np.random.Generator, name: str) -> Problem:
    """A problem of a loss; constants hold garbage where a loss has masks and they are ignored."""
    labels = [draw_labels(rng, 7)]
    if name in ("dpo", "orpo"):
        labels.append(draw_labels(rng, 5))

    def near(of: F64, ignored: float) -> F64:
        """Log-probabilities near those of a policy that is not trained."""
        x = rng.normal(-math.log(VOCAB), 0.3, of.shape)
        return np.where(of == IGNORED, ignored, x).astype(np.float32)

    return DRAW[name](rng, labels, near)


def draw_dpo(rng: np.random.Generator, labels: list[F64], near: Any) -> Problem:
    reference = [near(of, 0.0) for of in labels]

    def ours(logps: Any, constants: Any) -> jax.Array:
        (w, lost), (ref_w, ref_lost) = logps, constants["reference"]
        return losses.dpo_loss(w, lost, ref_w, ref_lost, beta=0.7)

    def paper(logps: list[list[F64]]) -> float:
        total = 0.0
        of = [responses(x, y) for x, y in zip(reference, labels, strict=True)]
        for w, lost, ref_w, ref_lost in zip(*logps, *of, strict=True):
            ratio, other = w.sum() - ref_w.sum(), lost.sum() - ref_lost.sum()
            total -= log_sigmoid(0.7 * ratio - 0.7 * other)
        return total / 4

    return Problem(labels, {"reference": reference}, ours, paper)


def draw_kto(rng: np.random.Generator, labels: list[F64], near: Any) -> Problem:
    reference, other, ref_other = (near(labels[0], 0.0) for _ in range(3))
    # A divergence that is estimated as above 0.
    other = (other + 0.3 * (other != 0)).astype(np.float32)
    constants = {"reference": reference, "other": other, "ref_other": ref_other}
    desirable: Any = np.array([True, False, False, True])

    def ours(logps: Any, constants: Any) -> jax.Array:
        kl = losses.kto_kl(constants["other"], constants["ref_other"])
        of = partial(losses.kto_loss, beta=0.7, desirable_weight=1.5, undesirable_weight=0.8)
        return of(logps[0], constants["reference"], desirable, kl)

    def paper(logps: list[list[F64]]) -> float:
        kl = np.mean([a.sum() - b.sum() for a, b in zip(other, ref_other, strict=True)])
        total, kl = 0.0, max(0.0, kl)
        of = responses(reference, labels[0])
        for x, ref, good in zip(*logps, of, desirable, strict=True):
            r = x.sum() - ref.sum()
            value = 1.5 * sigmoid(0.7 * (r - kl)) if good else 0.8 * sigmoid(0.7 * (kl - r))
            total += (1.5 if good else 0.8) - value
        return total / 4

    return Problem(labels, constants, ours, paper)


def draw_orpo(rng: np.random.Generator, labels: list[F64], near: Any) -> Problem:
    masks = [of != IGNORED for of in labels]

    def ours(logps: Any, constants: Any) -> jax.Array:
        return losses.orpo_loss(*logps, *masks, weight=0.7)

    def log_odds(p: float) -> float:
        return math.log(p / (1 - p))

    def paper(logps: list[list[F64]]) -> float:
        total = 0.0
        for w, lost in zip(*logps, strict=True):
            p, q = math.exp(w.mean()), math.exp(lost.mean())
            total -= math.log(p) + 0.7 * log_sigmoid(log_odds(p) - log_odds(q))
        return total / 4

    return Problem(labels, {}, ours, paper)


def draw_grpo(rng: np.random.Generator, labels: list[F64], near: Any) -> Problem:
    old, reference = near(labels[0], np.nan), near(labels[0], np.inf)
    # Apart, as float32 tells little of the deviation of rewards that are nearly alike.
    rewards = (rng.random((2, 2)) + np.array([0, 2])).astype(np.float32)
    constants = {"old": old, "reference": reference, "rewards": rewards}

    def ours(logps: Any, constants: Any) -> jax.Array:
        advantages = losses.group_advantages(constants["rewards"])
        of = (*logps, constants["old"], constants["reference"], advantages, labels[0] != IGNORED)
        return losses.grpo_loss(*of, clip=0.15, beta=0.6)

    def paper(logps: list[list[F64]]) -> float:
        objective, r = 0.0, rewards.astype(np.float64)
        for i in range(4):
            group = r[i // 2]
            a = (group[i % 2] - group.mean()) / group.std()
            of = (logps[0], responses(old, labels[0]), responses(reference, labels[0]))
            terms = []
            for x, x_old, x_ref in zip(*(y[i] for y in of), strict=True):
                ratio, other = math.exp(x - x_old), math.exp(x_ref - x)
                clipped = min(max(ratio, 1 - 0.15), 1 + 0.15)
                kl = other - math.log(other) - 1
                terms.append(min(ratio * a, clipped * a) - 0.6 * kl)
            objective += sum(terms) / len(terms)
        return -objective / 4

    return Problem(labels, constants, ours, paper)


def draw_ppo(rng: np.random.Generator, labels: list[F64], near: Any) -> Problem:
    mask = labels[0] != IGNORED
    advantages = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
    old = near(labels[0], -np.inf)

    def ours(logps: Any, constants: Any) -> jax.Array:
        return losses.ppo_policy_loss(logps[0], constants["old"], constants["advantages"], mask)

    def paper(logps: list[list[F64]]) -> float:
        terms = []
        of = (logps[0], responses(old, labels[0]), responses(advantages, labels[0]))
        for x, x_old, a in zip(*map(np.concatenate, of), strict=True):
            ratio = math.exp(x - x_old)
            terms.append(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
        return -float(np.mean(terms))

    return Problem(labels, {"old": old, "advantages": advantages}, ours, paper)


DRAW = {
    "dpo": draw_dpo,
    "kto": draw_kto,
    "orpo": draw_orpo,
    "grpo": draw_grpo,
    "ppo": draw_ppo,
}


def slopes(f: Callable[[list[F64]], float], arrays: list[F64]) -> list[F64]:
    """The gradient by central differences in float64.

    The step is small because the losses with clipping have kinks: a difference across a kink is no
    derivative.
    """
    arrays, h = [x.astype(np.float64) for x in arrays], 1e-7
    found = [np.zeros_like(x) for x in arrays]
    for x, slope in zip(arrays, found, strict=True):
        for at in np.ndindex(x.shape):
            kept = x[at]
            x[at] = kept + h
            above = f(arrays)
            x[at] = kept - h
            slope[at] = (above - f(arrays)) / (2 * h)
            x[at] = kept
    return found


def check(found: Any, f: Callable[[list[F64]], float], arrays: list[F64]) -> None:
    """Compares a value and its gradient with a formula in float64."""
    value, gradient = found
    wanted = f([x.astype(np.float64) for x in arrays])
    np.testing.assert_allclose(float(value), wanted, rtol=1e-5, atol=1e-6)
    for one, of in zip(gradient, slopes(f, arrays), strict=True):
        np.testing.assert_allclose(np.asarray(one), of, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", DRAW)
def test_of_log_probabilities(rng: np.random.Generator, name: str) -> None:
    """Also that nothing but the policy has a gradient, and what is ignored has none."""
    problem = draw(rng, name)
    logps = [
        np.where(mask, rng.normal(-math.log(VOCAB), 0.3, mask.shape), 0).astype(np.float32)
        for mask in problem.masks
    ]
    f = jax.jit(jax.value_and_grad(problem.ours, (0, 1)))
    value, (gradient, of_constants) = f(logps, problem.constants)
    assert value.dtype == jnp.float32 and value.shape == ()
    for one, mask in zip(gradient, problem.masks, strict=True):
        assert np.asarray(one)[mask].any()
    if name in ("dpo", "kto"):  # which have no mask: what is ignored is 0, and constant
        gradient = [one * mask for one, mask in zip(gradient, problem.masks, strict=True)]
    check((value, gradient), problem.reference, logps)
    for leaf in jax.tree.leaves(of_constants):
        assert not np.asarray(leaf).any()


@pytest.mark.parametrize("mode", ["strict types", "strict types, 64 bits", "leaks"])
@pytest.mark.parametrize("name", DRAW)
def test_programs_are_lowered_in_strict_modes(
    rng: np.random.Generator, name: str, mode: str
) -> None:
    problem = draw(rng, name)
    logps = [np.zeros(mask.shape, np.float32) for mask in problem.masks]
    with MODES[mode]():
        jax.jit(jax.value_and_grad(problem.ours)).lower(logps, problem.constants)


def test_losses_are_of_the_dtype_of_logps() -> None:
    """Where Python's numbers and those of NumPy are float64, too."""
    x, mask = np.full((2, 3), -1.0, np.float32), np.ones((2, 3), bool)
    wide = x.astype(np.float64)
    with wide_types():
        for loss in (
            losses.dpo_loss(x, x, wide, wide),
            losses.kto_loss(x, wide, [True, False], 0.1),
            losses.kto_kl(x, wide),
            losses.orpo_loss(x, x, mask, mask),
            losses.grpo_loss(x, wide, wide, [1.0, -1.0], mask),
            losses.ppo_policy_loss(x, wide, wide, mask, entropies=wide),
        ):
            assert loss.dtype == jnp.float32
        assert losses.grpo_loss(wide, x, x, [1.0, -1.0], mask).dtype == jnp.float64


def draw_model(rng: np.random.Generator, problem: Problem) -> list[F64]:
    """Hidden states [B, T, D] of each batch, and the matrix [V, D]."""
    shapes = [(*of.shape, WIDTH) for of in problem.labels]
    hidden = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weight = rng.normal(0, 0.3 / math.sqrt(WIDTH), (VOCAB, WIDTH)).astype(np.float32)
    return [*hidden, weight]


def dense(problem: Problem, arrays: list[F64]) -> float:
    """The paper's loss of hidden states and a matrix, with all logits in float64."""
    *hidden, weight = arrays
    logps = []
    for x, labels in zip(hidden, problem.labels, strict=True):
        z = x @ weight.T
        of = np.where(labels == IGNORED, 0, labels)[..., None]
        picked = np.take_along_axis(z, of, -1)[..., 0]
        logps.append(picked - np.log(np.exp(z).sum(-1)))
    return problem.reference(logps)


def call_on_hidden(x: Any, weight: Any, labels: Any, **more: Any) -> Any:
    return linear_cross_entropy_per_token(x, weight, labels, vocab_axis=0, **more)[1]


def call_on_logits(x: Any, weight: Any, labels: Any, **more: Any) -> Any:
    z = jnp.einsum("btd,vd->btv", x, weight)
    return cross_entropy_per_token(z, labels, **more)[1]


@pytest.mark.parametrize("per_token", [call_on_hidden, call_on_logits])
@pytest.mark.parametrize("name", DRAW)
def test_through_the_vocabulary(rng: np.random.Generator, name: str, per_token: Any) -> None:
    problem = draw(rng, name)

    def loss(arrays: Any) -> jax.Array:
        *hidden, weight = arrays
        pairs = zip(hidden, problem.labels, strict=True)
        return problem.ours([per_token(x, weight, y) for x, y in pairs], problem.constants)

    arrays = draw_model(rng, problem)
    check(jax.jit(jax.value_and_grad(loss))(arrays), partial(dense, problem), arrays)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize("of", ["hidden", "logits"])
def test_at_a_temperature_with_an_entropy_bonus(
    rng: np.random.Generator, name: str, of: str
) -> None:
    problem = draw(rng, name)
    (labels,), temperature = problem.labels, 0.6
    mask, weight_of_bonus = labels != IGNORED, 0.3

    def loss(arrays: Any) -> jax.Array:
        x, weight = arrays
        asked: dict[str, Any] = {"temperature": temperature, "return_entropy": True}
        if of == "hidden":
            found = linear_cross_entropy_per_token(x, weight, labels, vocab_axis=0, **asked)
        else:
            found = cross_entropy_per_token(jnp.einsum("btd,vd->btv", x, weight), labels, **asked)
        _, logps, entropies = found
        if name == "grpo":  # whose paper has none
            return problem.ours([logps], problem.constants)
        c = problem.constants
        return losses.ppo_policy_loss(
            logps, c["old"], c["advantages"], mask,
            entropies=entropies, entropy_weight=weight_of_bonus,
        )  # fmt: skip

    def paper(arrays: list[F64]) -> float:
        x, weight = arrays
        value = dense(problem, [x / temperature, weight])
        if name == "ppo":
            z = x @ weight.T / temperature
            p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
            value -= weight_of_bonus * float((-(p * np.log(p)).sum(-1))[mask].mean())
        return value

    arrays = draw_model(rng, problem)
    check(jax.jit(jax.value_and_grad(loss))(arrays), paper, arrays)


@pytest.mark.few(1)
@pytest.mark.devices(8)
@pytest.mark.parametrize("way", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize(("name", "per_token"), [("dpo", call_on_hidden), ("grpo", call_on_logits)])
def test_with_a_sharded_vocabulary(
    rng: np.random.Generator, name: str, per_token: Any, way: str
) -> None:
    """Responses over two devices, and the vocabulary over four."""
    problem = draw(rng, name)
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(kind,) * 2)
    tokens, columns = P("data"), P("vocab")

    def logps(x: Any, weight: Any, labels: Any) -> Any:
        if way == "explicit":
            return per_token(x, weight, labels)
        f = partial(per_token, axis_name="vocab")
        if way == "auto":
            return f(x, weight, labels)
        return jax.shard_map(f, mesh=mesh, in_specs=(tokens, columns, tokens), out_specs=tokens)(
            x, weight, labels
        )

    def loss(arrays: Any, labels: Any, constants: Any) -> jax.Array:
        *hidden, weight = arrays
        pairs = zip(hidden, labels, strict=True)
        return problem.ours([logps(x, weight, y) for x, y in pairs], constants)

    arrays = draw_model(rng, problem)
    with jax.set_mesh(mesh):
        place = [NamedSharding(mesh, P("data"))] * (len(arrays) - 1)
        given = jax.device_put(arrays, [*place, NamedSharding(mesh, P("vocab"))])
        labels = jax.device_put(problem.labels, place)
        step = jax.jit(jax.value_and_grad(loss)).lower(given, labels, problem.constants).compile()
        found = step(given, labels, problem.constants)
    check(found, partial(dense, problem), arrays)
    assert "all-gather" not in (step.as_text() or "all-gather")


def test_no_logits_in_memory() -> None:
    """A step of DPO over hidden states holds a quarter of a batch's logits at most.

    Over logits it holds those of both batches.
    """
    # More than what GEMMs on GPUs hold beside them, 4 MiB.
    x, weight = jnp.zeros((2, 1024, 16)), jnp.zeros((8192, 16))
    labels, reference = jnp.zeros((2, 1024), jnp.int32), jnp.zeros((2, 1024))
    logits = 2 * 1024 * 8192 * 4

    def held(per_token: Any) -> Any:
        def loss(x: Any, weight: Any) -> jax.Array:
            chosen, rejected = (per_token(part, weight, labels) for part in (x, -x))
            return losses.dpo_loss(chosen, rejected, reference, reference)

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight).compile()
        memory: Any = compiled.memory_analysis()
        print(memory.temp_size_in_bytes / logits)
        return memory.temp_size_in_bytes

    assert held(partial(call_on_hidden, max_scratch_bytes=2**20)) < logits // 4
    assert held(call_on_logits) >= 2 * logits


EXTREME = f32(-3e4, -200, -41, -30, 0, 30, 39, 41, 200, 3e4)


@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("good", [True, False])
def test_extreme_log_ratios_of_responses(name: str, good: bool) -> None:
    """Right where exp of the log-ratio is neither a float32 nor a float64."""
    zero, desirable = f32([0]), jnp.array([good])

    def loss(x: jax.Array) -> jax.Array:
        logps = x.reshape(1, 1)
        if name == "kto":
            return losses.kto_loss(logps, zero, desirable, jnp.float32(0.5), beta=1)
        chosen, rejected = (logps, zero) if good else (zero, logps)
        return losses.dpo_loss(chosen, rejected, zero, zero, beta=1)

    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(loss)))(EXTREME)
    x = EXTREME.astype(np.float64) * (1 if good else -1)
    if name == "dpo":
        wanted, slope = np.logaddexp(0, -x), -np.exp(-np.logaddexp(0, x))
    else:
        x -= 0.5 if good else -0.5
        wanted = np.exp(-np.logaddexp(0, x))
        slope = -wanted * np.exp(-np.logaddexp(0, -x))
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-37)
    # That of KTO has a factor that rounds to 1.
    atol = 1e-7 if name == "kto" else 1e-37
    np.testing.assert_allclose(gradient, slope if good else -slope, rtol=1e-5, atol=atol)


def tangent(x: F64) -> tuple[F64, F64]:
    """Exp, beyond 40 its tangent, and the slope."""
    low = np.exp(np.minimum(x, 40.0))
    return low * (1 + np.maximum(x - 40, 0)), low


@pytest.mark.parametrize("a", [1.5, -1.5])
def test_extreme_ratios_of_tokens(a: float) -> None:
    """A ratio that is clipped has a gradient of 0 and not of NaN; others are finite."""
    zero = f32([0])

    def loss(x: jax.Array) -> jax.Array:
        return losses.ppo_policy_loss(x.reshape(1, 1), zero, a + zero, zero == 0)

    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(loss)))(EXTREME)
    ratio, slope = tangent(EXTREME.astype(np.float64))
    clipped = ratio > 1.2 if a > 0 else ratio < 0.8
    bound = 1.2 if a > 0 else 0.8
    np.testing.assert_allclose(value, -a * np.where(clipped, bound, ratio), rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(gradient, -a * np.where(clipped, 0, slope), rtol=1e-5, atol=1e-37)


def test_extreme_divergences_of_tokens() -> None:
    """Of the reference's ratio: exp(d) - d - 1, also where it is small beside 1."""
    zero = f32([0])
    x = np.concatenate([EXTREME, f32(1e-3, -1e-2)])

    def loss(x: jax.Array) -> jax.Array:
        return losses.grpo_loss(x.reshape(1, 1), zero, zero, zero[0], zero == 0, beta=0.5)

    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(loss)))(x)
    d = -x.astype(np.float64)
    of, slope = tangent(d)
    np.testing.assert_allclose(value, 0.5 * (of - d - 1), rtol=1e-3)
    np.testing.assert_allclose(gradient, 0.5 * (1 - slope), rtol=1e-3)


def test_extreme_odds() -> None:
    """Log-probabilities next to 0 and far from it; where p rounds to 1 the odds are 2^24."""
    x = f32(-1e4, -90, -20, -0.7, -1e-3, -1e-7, 0)
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(losses._log_odds)))(x)
    bounded = np.minimum(x.astype(np.float64), -(2.0**-24))
    np.testing.assert_allclose(value, bounded - np.log(-np.expm1(bounded)), rtol=1e-5)
    np.testing.assert_allclose(slope[:-1], -1 / np.expm1(bounded[:-1]), rtol=1e-5)
    assert slope[-1] == 0
    some, ends = f32([-0.7], [-0.7], [-0.7]), f32([-1e4], [-1e-9], [0])
    step = jax.jit(jax.value_and_grad(losses.orpo_loss, (0, 1)))
    for pair in ((ends, some), (some, ends)):
        of = step(*pair, some < 0, some < 0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of))


def test_responses_without_tokens() -> None:
    """They add 0, and no NaN."""
    x, ones, mask = f32([-1, -1, -1], [-1, -1, -1]), f32(1, 1), f32([1, 1, 0], [0, 0, 0]) == 1
    value, gradient = jax.jit(jax.value_and_grad(losses.grpo_loss))(x, x, x, ones, mask)
    np.testing.assert_allclose(value, -0.5)
    np.testing.assert_allclose(gradient, f32([-0.25, -0.25, 0], [0, 0, 0]))
    value, gradient = jax.jit(jax.value_and_grad(losses.ppo_policy_loss))(x, x, x, mask & False)
    assert value == 0 and not gradient.any()


def test_reference_point_is_not_negative() -> None:
    x = f32([0, 0, 0], [0, 0, 0])
    assert losses.kto_kl(x - 1, x) == 0
    assert losses.kto_kl(x + 1, x) == 3


def test_advantages_of_groups(rng: np.random.Generator) -> None:
    """Those of equal rewards are 0, whatever their mean rounds to."""
    rewards = f32(*rng.normal(size=(3, 7)))
    rewards[1] = 0.1
    found = np.asarray(losses.group_advantages(rewards)).reshape(3, 7)
    assert not found[1].any()
    of = rewards[[0, 2]].astype(np.float64)
    wanted = (of - of.mean(1, keepdims=True)) / of.std(1, keepdims=True)
    np.testing.assert_allclose(found[[0, 2]], wanted, rtol=1e-4, atol=1e-5)


def test_sums_of_16_bits(rng: np.random.Generator) -> None:
    """Of bfloat16 a sum of responses has 8 bits, and of float16 a square of 300 is infinite."""
    chosen, rejected, *refs = jnp.asarray(-rng.random((4, 3, 500)) * 4, jnp.bfloat16)
    wide = [one.astype(jnp.float32) for one in (chosen, rejected, *refs)]
    np.testing.assert_array_equal(losses.dpo_loss(chosen, rejected, *refs), losses.dpo_loss(*wide))
    rewards = jnp.array([[300.0, 900.0, 600.0]], jnp.float16)
    np.testing.assert_allclose(losses.group_advantages(rewards), [-(1.5**0.5), 1.5**0.5, 0])


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_of_one_token_is_that_of_the_loss(rng: np.random.Generator, sign: int) -> None:
    """Of arrays that are long enough for XLA's vector instructions, whose maxima lose NaN."""
    logps, old = jnp.asarray(-rng.random((2, 16, 1000)), jnp.float32)
    mask, a = logps < 0, jnp.full(logps.shape, sign, jnp.float32)
    calls: list[Any] = [
        lambda x: losses.ppo_policy_loss(x, old, a, mask),
        lambda x: losses.grpo_loss(x, old, old, a[:, 0], mask),
        lambda x: losses.orpo_loss(x, old, mask, mask),
        lambda x: losses.kto_kl(sign * x, old),
    ]
    found = jax.jit(lambda x: [call(x) for call in calls])(logps.at[3, 500].set(jnp.nan))
    assert np.isnan(found).all(), found


def test_dtypes_and_coefficients_that_are_refused() -> None:
    x = jnp.ones((2, 3))
    for call, message in (
        (lambda: losses.dpo_loss(x.astype(complex), x, x, x), "chosen has dtype complex64; it"),
        (lambda: losses.kto_kl(x.astype("float8_e5m2"), x), "logps has dtype float8_e5m2; it must"),
        (lambda: losses.dpo_loss(x, x, x, x, beta="a"), "beta is 'a'; it must be a number"),
        (lambda: losses.orpo_loss(x, x, x, x, weight=[1]), r"weight is \[1\]; it must be a number"),
        (
            lambda: jax.vmap(lambda b: losses.grpo_loss(x, x, x, x[0, :2], x, beta=b))(x),
            r"beta is traced, of shape \(3,\) and dtype float32; it must be a scalar",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_shapes_that_do_not_fit() -> None:
    """Such as would broadcast, too."""
    x, y, mask = jnp.zeros((4, 7)), jnp.zeros((3, 5)), jnp.ones((4, 7), bool)
    with pytest.raises(
        ValueError, match=r"ref_chosen has shape \(4, 1\); it must be that of chosen"
    ):
        losses.dpo_loss(x, x, x[:, :1], x)
    with pytest.raises(ValueError, match=r"rejected has responses of shape \(3,\)"):
        losses.dpo_loss(x, y, x, y)
    with pytest.raises(ValueError, match=r"desirable has responses of shape \(4, 1\)"):
        losses.kto_loss(x, x, mask[:, :1], 0.0)
    with pytest.raises(ValueError, match=r"kl has shape \(4,\); it must be a scalar"):
        losses.kto_loss(x, x, mask[:, 0], x[:, 0])
    with pytest.raises(ValueError, match=r"chosen_mask has shape \(4,\)"):
        losses.orpo_loss(x, x, mask[:, 0], mask)
    with pytest.raises(ValueError, match=r"advantages has responses of shape \(4, 7\)"):
        losses.grpo_loss(x, x, x, x, mask)
    with pytest.raises(ValueError, match=r"advantages has shape \(4,\); it must be that of logps"):
        losses.ppo_policy_loss(x, x, x[:, 0], mask)
    with pytest.raises(ValueError, match=r"rewards has shape \(7,\); it must be \[groups, resp"):
        losses.group_advantages(x[0])
    with pytest.raises(ValueError, match=r"clip is 1.5; it must be at least 0 and below 1"):
        losses.ppo_policy_loss(x, x, x, mask, clip=1.5)
    with pytest.raises(TypeError, match="logps is None; it must be an array"):
        losses.kto_kl(None, x)  # type: ignore[arg-type]


def test_any_axes_of_responses(rng: np.random.Generator) -> None:
    """The mean over groups and responses is that over all of them."""
    logps, old = f32(*rng.normal(-3, 0.1, (2, 8, 7)))
    advantages, mask = f32(*rng.normal(size=8)), rng.random((8, 7)) < 0.8
    wanted = losses.grpo_loss(logps, old, old, advantages, mask)
    shaped = [one.reshape(2, 4, 7) for one in (logps, old, old)]
    found = losses.grpo_loss(*shaped, advantages.reshape(2, 4), mask.reshape(2, 4, 7))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
