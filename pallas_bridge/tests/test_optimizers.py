"""The optimizers of pallas_bridge.optax: against optax, and a float64 reference of the code."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_bridge._src.optimizers import call as step_call
from pallas_bridge._src.optimizers import codes, muon, newton_schulz, rounding, trees
from test_strict_modes import MODES
from test_symbolic_shapes import checks

from pallas_bridge import optax as ours

SCHEDULE = optax.linear_schedule(0.0, 1e-2, 4)


def tree(rng: np.random.Generator, dtype: Any = jnp.float32) -> Any:
    def one(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {"a": one(32, 256), "norm": [one(7)], "layers": one(3, 16, 128)}


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda one: one.ndim > 1, params)


def train(optimizer: Any, params: Any, steps: int = 5, *, applies: bool = False) -> Any:
    """Parameters and state after steps with gradients that depend on the step alone."""
    state = optimizer.init(params)

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        if applies:
            return optimizer.update_and_apply(grads, state, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        seeded = np.random.default_rng(number)
        grads = jax.tree.map(lambda one: jnp.asarray(seeded.normal(size=one.shape)), params)  # noqa: B023
        grads = jax.tree.map(lambda grad, one: grad.astype(one.dtype), grads, params)
        params, state = step(grads, state, params)
    return params, state


def difference(x: Any, y: Any) -> float:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return max(float(jnp.max(jnp.abs(jnp.float32(a) - jnp.float32(b)))) for a, b in pairs)


@pytest.mark.parametrize("applies", [False, True])
def test_adamw_is_that_of_optax(rng: np.random.Generator, applies: bool) -> None:
    params = tree(rng)
    options: Any = {"b2": 0.95, "eps_root": 1e-9, "weight_decay": 0.1, "mask": is_matrix}
    options["nesterov"] = applies
    right, _ = train(optax.adamw(SCHEDULE, **options), params)
    got, state = train(ours.adamw(SCHEDULE, **options), params, applies=applies)
    assert difference(right, got) < 1e-6
    assert state.norm is None
    assert int(state.count) == 5


def test_clipping_is_that_of_optax(rng: np.random.Generator) -> None:
    params = tree(rng)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))
    right, _ = train(clipped, params)
    got, state = train(ours.adamw(SCHEDULE, max_norm=1.0), params, applies=True)
    assert difference(right, got) < 1e-6
    entries = sum(one.size for one in jax.tree.leaves(params))
    assert abs(float(state.norm) / entries**0.5 - 1) < 0.1
    # Infinity asks for the norm alone.
    unclipped, _ = train(optax.adamw(SCHEDULE), params)
    got, state = train(ours.adamw(SCHEDULE, max_norm=np.inf), params)
    assert difference(unclipped, got) < 1e-6
    assert float(state.norm) > 1


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adam8bit", "lion8bit", "muon"])
def test_inject_hyperparams_alone(rng: np.random.Generator, name: str) -> None:
    """It traces all options that are numbers, `ns_steps` too."""
    params, make = tree(rng), getattr(ours, name)
    right, _ = train(make(1e-2), params)
    got, _ = train(optax.inject_hyperparams(make)(learning_rate=1e-2), params)
    assert difference(right, got) < 2e-3


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adam8bit", "lion8bit", "muon"])
def test_arrays_of_few_entries(rng: np.random.Generator, name: str) -> None:
    params = {"none": jnp.zeros((0, 3)), "one": jnp.float32(1.5), "row": jnp.ones((1, 1))}
    first, second = (
        train(getattr(ours, name)(1e-2), params, applies=one)[0] for one in (False, True)
    )
    assert difference({**first, "none": 0}, {**second, "none": 0}) < 1e-6
    assert first["none"].shape == second["none"].shape == (0, 3)
    assert first["one"] != 1.5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_inject_hyperparams_and_chain(rng: np.random.Generator, name: str) -> None:
    params = tree(rng)
    right, _ = train(getattr(ours, name)(SCHEDULE, weight_decay=0.1), params)
    make = optax.inject_hyperparams(getattr(ours, name))
    got, state = train(make(learning_rate=SCHEDULE, weight_decay=0.1), params)
    assert difference(right, got) < 1e-6
    assert float(state.hyperparams["learning_rate"]) == float(SCHEDULE(4))
    got, _ = train(optax.chain(optax.identity(), getattr(ours, name)(SCHEDULE)), params)
    again, _ = train(getattr(ours, name)(SCHEDULE), params)
    assert difference(got, again) == 0
    masked = optax.masked(getattr(ours, name)(SCHEDULE), is_matrix)
    got, _ = train(masked, params)
    assert difference(got["a"], again["a"]) == 0


def test_eight_bits_stay_near_float32(rng: np.random.Generator) -> None:
    params = tree(rng)
    right, _ = train(ours.adamw(1e-2, weight_decay=0.1), params)
    got, state = train(ours.adamw8bit(1e-2, weight_decay=0.1), params, applies=True)
    # Steps are of 1e-2, of which the largest error is that of entries whose nu is smallest.
    errors = np.abs(np.asarray(right["a"] - got["a"]))
    assert errors.mean() < 5e-4
    assert difference(right["norm"], got["norm"]) < 1e-6
    for moment in (state.mu, state.nu):
        assert moment["a"].codes.dtype == jnp.uint8
        assert moment["a"].scales.shape == (32, 1)
        assert moment["layers"].block_size == 128
        assert moment["norm"][0].dtype == jnp.float32
    held = sum(one.nbytes for one in jax.tree.leaves((state.mu["a"], state.nu["a"])))
    assert held / params["a"].size <= 2.04
    updated, _ = train(ours.adamw8bit(1e-2, weight_decay=0.1), params)
    # A kernel may take the neighbour of the nearest code, where both are as near.
    assert np.mean(np.abs(np.asarray(updated["a"] - got["a"])) > 1e-6) < 0.01
    assert difference(updated, got) < 1e-4


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("rate", [1e-4, 3e-4])
def test_a_small_weight_decay_is_applied_in_the_mean(
    rng: np.random.Generator, name: str, rate: float
) -> None:
    """Rounding it before it meets the step would lose it, or double it."""
    params = rng.uniform(0.5, 1, (256, 256)).astype(np.float32)
    grads = rng.normal(size=params.shape).astype(np.float32)
    # The large eps has steps differ, so that what rounding adds to them has a mean of 0.
    optimizer = getattr(ours, name)(rate, eps=1.0, weight_decay=1e-4)
    state = optimizer.init({"w": jnp.asarray(params)})
    got, _ = jax.jit(optimizer.update_and_apply)({"w": grads}, state, {"w": params})
    wide = params.astype(np.float64)
    right = wide - rate * (grads / (np.abs(grads.astype(np.float64)) + 1) + 1e-4 * wide)
    # Of a decay of at least 1e-8.
    assert abs(np.mean((np.asarray(got["w"], np.float64) - right) / wide)) < 2e-9


@pytest.mark.parametrize("name", ["adamw", "adam8bit", "muon"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_step_is_the_learning_rate_where_b2_is_near_1(name: str, nesterov: bool) -> None:
    """1 - b2^t of b2 in float32 is off by 1.3 %."""
    b2 = {"adam_b2" if name == "muon" else "b2": 1 - 1e-6}
    optimizer = getattr(ours, name)(0.5, nesterov=nesterov, **b2)
    params, grads = jnp.zeros(3), jnp.array([1.0, -2.0, 1e-3])
    got, _ = optimizer.update_and_apply(grads, optimizer.init(params), params)
    step = 1 + 0.9 * 0.1 / (1 - 0.9**2) if nesterov else 1
    np.testing.assert_allclose(got, -0.5 * step * np.sign(grads), rtol=2e-5)


def test_clipping_keeps_small_gradients_of_16_bits(rng: np.random.Generator) -> None:
    """Gradients of a norm of 5e4, of which float16 would have none after clipping to 1e-3."""
    grads = jnp.asarray(rng.normal(size=(8, 16)) * 4000, jnp.float16)
    params = jnp.zeros((8, 16), jnp.float16)
    got = []
    for max_norm in (None, 1e-3):
        optimizer = ours.muon(0.5, max_norm=max_norm)
        got.append(optimizer.update_and_apply(grads, optimizer.init(params), params)[0])
    np.testing.assert_allclose(got[1], got[0], rtol=2e-2, atol=1e-2)


def test_adam_and_lion_in_eight_bits(rng: np.random.Generator) -> None:
    params = tree(rng)
    right, _ = train(ours.adamw8bit(1e-2, weight_decay=0.0), params)
    got, _ = train(ours.adam8bit(1e-2), params)
    assert difference(right, got) == 0
    right, _ = train(optax.lion(1e-3), params)
    got, state = train(ours.lion8bit(1e-3), params, applies=True)
    assert state.nu is None
    assert difference(right["norm"], got["norm"]) < 1e-6
    # A sign of what is nearly 0 may be another.
    assert np.mean(np.abs(np.asarray(right["a"] - got["a"])) > 1e-5) < 0.1


def reference(x: np.ndarray, block: int, signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distance of each entry to the nearest value of the code, in float64, and the scales."""
    blocks = x.reshape(*x.shape[:-1], -1, block).astype(np.float64)
    scales = np.abs(blocks).max(-1)
    y = (blocks / np.where(scales == 0, 1, scales)[..., None]).reshape(x.shape)
    values = codes.table(signed=signed).astype(np.float64)
    above = np.clip(np.searchsorted(values, y), 1, 255)
    nearest = np.minimum(np.abs(values[above] - y), np.abs(values[above - 1] - y))
    return y, nearest, scales


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block", codes.BLOCKS)
def test_codes_are_the_nearest(rng: np.random.Generator, signed: bool, block: int) -> None:
    x = rng.normal(size=(6, 512)) * 10 ** rng.uniform(-7, 2, (6, 512))
    x = np.where(rng.random((6, 512)) < 0.1, 0, x if signed else np.abs(x)).astype(np.float32)
    x[2] = 0
    y, nearest, scales = reference(x, block, signed)
    got = codes.encode(jnp.asarray(x), block, signed=signed)
    np.testing.assert_array_equal(got.scales, scales.astype(np.float32))
    chosen = codes.table(signed=signed).astype(np.float64)[np.asarray(got.codes)]
    # The nearest, or its neighbour where five roundings to float32 make a tie.
    assert (np.abs(chosen - y) <= nearest + 1e-6 * np.abs(y)).all()
    assert (np.asarray(got.codes)[2] == codes.zero_code(signed=signed)).all()
    decoded = np.asarray(codes.decode(got, signed=signed))
    expected = chosen.reshape(6, -1, block) * scales[..., None]
    np.testing.assert_allclose(decoded, expected.reshape(6, 512), rtol=1e-6)
    again = codes.encode(jnp.asarray(decoded), block, signed=signed)
    if not signed or (chosen.reshape(6, -1, block).max(-1) == 1).all():
        np.testing.assert_array_equal(again.codes, got.codes)


def step_of_float64(
    params: np.ndarray, grads: np.ndarray, mu: np.ndarray, nu: np.ndarray, step: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters and moments after a step of AdamW in float64, and the sizes of what they sum."""
    b1, b2 = 0.9, 0.999
    moments = [(1 - b1) * grads + b1 * mu, (1 - b2) * grads**2 + b2 * nu]
    sizes = [(1 - b1) * np.abs(grads) + b1 * np.abs(mu), moments[1]]
    factor = 1e-2 / (1 - b1**step) / (np.sqrt(moments[1] / (1 - b2**step)) + 1e-8)
    new = params - factor * moments[0] - 1e-2 * 0.1 * params
    return [new, *moments], [np.abs(params) + factor * sizes[0], *sizes]


def wrong_codes(x: np.ndarray, size: np.ndarray, got: codes.Quantized, *, signed: bool) -> int:
    """The codes that are neither nearest to a float64 array nor its neighbour near a midpoint.

    `size` is that of the terms whose sum the array is: float32 is exact to a part of it.
    """
    y, _, scales = reference(x, got.block_size, signed)
    np.testing.assert_allclose(got.scales, scales, rtol=1e-5, atol=0)
    values = codes.table(signed=signed).astype(np.float64)
    midpoints = (values[1:] + values[:-1]) / 2
    right = np.searchsorted(midpoints, y)
    # The midpoint between the nearest code and the one that was chosen.
    chosen = np.asarray(got.codes).astype(int)
    tie = midpoints[np.clip(np.minimum(right, chosen), 0, 254)]
    lost = 2e-7 * size / np.repeat(scales, got.block_size, axis=-1)
    is_tie = (np.abs(chosen - right) == 1) & (np.abs(y - tie) <= 1e-5 * np.abs(tie) + lost)
    return int(np.sum((chosen != right) & ~is_tie))


@pytest.mark.parametrize(
    ("shape", "grad_dtype", "implementation"),
    [
        ((40, 256), jnp.float32, "reference"),
        ((33, 128), jnp.bfloat16, "reference"),
        ((65, 64), jnp.float32, "reference"),
        ((67, 256), jnp.bfloat16, "custom_call"),
        ((133, 128), jnp.float32, "custom_call"),
        ((67, 64), jnp.bfloat16, "custom_call"),
    ],
)
def test_a_step_in_eight_bits_is_that_of_float64(
    rng: np.random.Generator, shape: tuple[int, int], grad_dtype: Any, implementation: Any
) -> None:
    """One step from a random state; codes at ties would make further steps differ by more."""
    params = {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}
    magnitudes = 10 ** rng.uniform(-4, 0, shape)
    grads = {"w": jnp.asarray(rng.normal(size=shape) * magnitudes, grad_dtype)}
    optimizer: Any = ours.adamw8bit(1e-2, weight_decay=0.1, implementation=implementation)
    state = optimizer.init(params)
    block = state.mu["w"].block_size
    mu, nu = (
        codes.Quantized(
            jnp.asarray(rng.integers(256, size=shape), jnp.uint8),
            jnp.asarray(rng.uniform(0.5, 2, (shape[0], shape[1] // block)) * scale, jnp.float32),
        )
        for scale in (0.1, 0.01)
    )
    state = state._replace(count=jnp.int32(20), mu={"w": mu}, nu={"w": nu})
    wide = [
        np.asarray(codes.decode(one, signed=signed), np.float64)
        for one, signed in ((mu, True), (nu, False))
    ]
    inputs = [np.asarray(one["w"].astype(jnp.float32), np.float64) for one in (params, grads)]
    (right, *moments), (size, *sizes) = step_of_float64(*inputs, *wide, step=21)
    new, state = jax.jit(optimizer.update_and_apply)(grads, state, params)
    assert (np.abs(new["w"] - right) <= 1e-5 * size).all()
    for index, got in enumerate((state.mu, state.nu)):
        assert wrong_codes(moments[index], sizes[index], got["w"], signed=index == 0) == 0


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit"])
def test_the_kernel_rounds_as_the_reference(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of more arrays than a call has, of one that does not decay, and one with float32 state."""
    monkeypatch.setattr(step_call, "ARRAYS_OF_CPU_CALL", 2)
    shapes = [(17, 256), (34, 128), (5, 1024), (3, 7)]
    params = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    grads = jax.tree.map(lambda one: one * 0.1, params)
    mask = [True, False, True, True]
    found = {}
    for implementation in ("reference", "custom_call"):
        options: Any = {"rounding_seed": 5, "mask": mask, "implementation": implementation}
        optimizer: Any = getattr(ours, name)(1e-2, weight_decay=0.1, max_norm=1.0, **options)
        lowered = jax.jit(optimizer.update_and_apply).lower(grads, optimizer.init(params), params)
        calls = lowered.as_text().count(f"@xentile_{name.replace('8bit', '')}_8bit(")
        assert implementation == "reference" or jax.default_backend() != "cpu" or calls == 2
        found[implementation] = lowered.compile()(grads, optimizer.init(params), params)
    (right, _), (got, _) = found.values()
    # Apart from a sum beside the number at which random bits decide.
    pairs = zip(jax.tree.leaves(right), jax.tree.leaves(got), strict=True)
    assert max(np.mean(np.asarray(x != y)) for x, y in pairs) < 2e-3
    assert difference(right, got) < 0.02


@pytest.mark.slow
def test_the_kernel_is_mapped_and_differentiated_as_the_reference(rng: np.random.Generator) -> None:
    params = jnp.asarray(rng.normal(size=(2, 16, 256)), jnp.float32)
    results = []
    for implementation in ("reference", "custom_call"):
        optimizer: Any = ours.adamw(1e-2, implementation=implementation)

        def loss(params: jax.Array, optimizer: Any = optimizer) -> jax.Array:
            state = optimizer.init(params)
            return jnp.sum(optimizer.update_and_apply(jnp.sin(params), state, params)[0] ** 2)

        results.append((jax.vmap(loss)(params), jax.grad(loss)(params)))
    assert difference(*results) < 1e-4


def test_table_has_256_values_in_order() -> None:
    for signed in (True, False):
        values = codes.table(signed=signed)
        assert values.size == 256
        assert (np.diff(values) > 0).all()
        assert values[codes.zero_code(signed=signed)] == 0
        assert values[-1] == 1


def test_infinity_and_nan_stay_in_their_blocks(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(32, 256)), jnp.float32)}
    grads = jax.tree.map(jnp.ones_like, params)
    grads["w"] = grads["w"].at[3, 5].set(jnp.inf).at[9, 200].set(jnp.nan)
    optimizer: Any = ours.adamw8bit(1e-2, max_norm=np.inf)
    new, state = jax.jit(optimizer.update_and_apply)(grads, optimizer.init(params), params)
    assert not np.isfinite(state.norm)
    assert [row for row in range(32) if np.isnan(state.nu["w"].scales[row, 0])] == [9]
    step = jax.jit(optimizer.update_and_apply)
    for _ in range(2):
        new, state = step(jax.tree.map(jnp.ones_like, params), state, new)
    finite = np.isfinite(np.asarray(new["w"])).all(axis=1)
    assert finite.tolist() == [row not in (3, 9) for row in range(32)]


def test_philox_has_known_answers() -> None:
    """The vectors of Random123's `kat_vectors` for philox4x32 with 10 rounds."""
    zero, ones = jnp.uint32(0), jnp.uint32(0xFFFFFFFF)
    got = [int(one) for one in rounding.philox((zero,) * 4, (zero,) * 2)]
    assert got == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = [int(one) for one in rounding.philox((ones,) * 4, (ones,) * 2)]
    assert got == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.slow
def test_bits_do_not_depend_on_the_shape() -> None:
    flat, *others = (
        np.asarray(rounding.bits(shape, 3, jnp.uint32(9), jnp.uint32(1))).ravel()
        for shape in ((48,), (3, 16), (16, 3), (2, 3, 8))
    )
    for other in others:
        np.testing.assert_array_equal(flat, other)
    step = np.asarray(rounding.bits((48,), 3, jnp.uint32(10), jnp.uint32(1)))
    assert (flat != step).any()


def test_rounding_keeps_the_mean() -> None:
    x = jnp.full(2**16, 1 + 2**-9, jnp.float32)
    random = rounding.bits(x.shape, 0, jnp.uint32(1), jnp.uint32(2))
    got = np.asarray(rounding.round_stochastically(x, random), np.float64)
    assert set(got) == {1.0, 1 + 2**-7}
    # A quarter of the way up; six standard deviations.
    assert abs(np.mean(got > 1) - 0.25) < 6 * (0.25 * 0.75 / 2**16) ** 0.5
    special = jnp.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -2.0], jnp.float32)
    kept = rounding.round_stochastically(special, jnp.full(6, 0xFFFF, jnp.uint32))
    np.testing.assert_array_equal(np.asarray(kept, np.float32), special)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_bfloat16_follows_float32_with_rounding(rng: np.random.Generator, name: str) -> None:
    """Steps far below half a unit of bfloat16 are lost unless they are rounded stochastically."""
    params = {"w": jnp.full((64, 256), 1.0, jnp.bfloat16)}
    make = getattr(ours, name)
    nearest, _ = train(make(1e-4, b2=0.9, weight_decay=10.0), params, 20, applies=True)
    assert difference(nearest, params) == 0
    options: Any = {"b2": 0.9, "weight_decay": 10.0, "rounding_seed": 1}
    got, state = train(make(1e-4, **options), params, 20, applies=True)
    wide = jax.tree.map(lambda one: one.astype(jnp.float32), params)
    right, _ = train(make(1e-4, b2=0.9, weight_decay=10.0), wide, 20)
    assert abs(float(jnp.mean(jnp.float32(got["w"])) - jnp.mean(right["w"]))) < 5e-4
    assert got["w"].dtype == jnp.bfloat16
    by_updates, _ = train(make(1e-4, **options), params, 20)
    # Programs whose float32 results differ in their last bit round few entries to the other side.
    assert np.mean(np.asarray(got["w"] != by_updates["w"])) < 1e-2
    other, _ = train(make(1e-4, **{**options, "rounding_seed": 2}), params, 20)
    assert difference(got, other) > 0
    assert int(state.count) == 20


@pytest.mark.few(1)
@pytest.mark.devices(4)
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P(None, None)])
@pytest.mark.slow
def test_sharded_state_has_the_parameters_sharding(rng: np.random.Generator, spec: Any) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, spec)
    whole = {"w": jnp.asarray(rng.normal(size=(64, 256)), jnp.bfloat16)}
    params = jax.device_put(whole, sharding)
    optimizer: Any = ours.adamw8bit(1e-2, rounding_seed=5)
    state = optimizer.init(params)
    assert state.mu["w"].block_size == (64 if spec[1] == "x" else 256)
    for leaf in jax.tree.leaves((state.mu, state.nu)):
        assert leaf.sharding.is_equivalent_to(sharding, 2)
    abstract = ours.adamw8bit(1e-2, shardings={"w": sharding}, rounding_seed=5)
    shapes = jax.eval_shape(abstract.init, whole)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)
    right, _ = train(abstract, whole, applies=True)
    got, _ = train(optimizer, params, applies=True)
    # The bits of rounding are those of one device.
    assert difference(right, got) == 0


def test_arrays_without_blocks_stay_float32(rng: np.random.Generator) -> None:
    params = {
        "fits": jnp.zeros((64, 64)),
        "other": jnp.zeros((64, 100)),
        "named": jnp.zeros((64, 64)),
    }
    chosen = ours.adamw8bit(1e-2, float32_mask={"fits": False, "other": False, "named": True})
    with pytest.warns(UserWarning, match=r"the state of \['other'\] stays float32"):
        state: Any = chosen.init(params)
    assert {name: trees.is_quantized(one) for name, one in state.mu.items()} == {
        "fits": True,
        "other": False,
        "named": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.adamw8bit(1e-2, float32_mask=is_matrix).init(params)


def polar(x: np.ndarray) -> np.ndarray:
    """The iteration in float64."""
    x = x / (np.linalg.norm(x) + 1e-8)
    c0, c1, c2 = muon.COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = c0 * x + (c1 * gram + c2 * gram @ gram) @ x
    return x


@pytest.mark.few(2)
# On Hopper those above 256 are by kernels.
@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (264, 392), (392, 264)])
def test_newton_schulz_is_as_exact_as_that_of_optax_in_bfloat16(
    rng: np.random.Generator, shape: tuple[int, int]
) -> None:
    x = rng.normal(size=shape).astype(np.float32)
    right = polar(x)
    got = muon.orthogonalized(jnp.asarray(x), muon.COEFFICIENTS, 5, 1e-8)
    numbers = optax.contrib.MuonDimensionNumbers(0, 1)
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers={"w": numbers}, nesterov=False)
    narrow = {"w": jnp.asarray(x, jnp.bfloat16)}
    peer, _ = theirs.update(narrow, theirs.init(narrow), narrow)
    errors = [
        np.linalg.norm(np.asarray(one, np.float64) - right) / np.linalg.norm(right)
        for one in (got, peer["w"])
    ]
    assert errors[0] <= 1.5 * errors[1]
    values = np.linalg.svd(np.asarray(got, np.float64), compute_uv=False)
    # All but the smallest are brought near 1.
    assert 0.6 < np.median(values) < 1.25
    assert values.max() < 1.3


def test_newton_schulz_has_kernels_for_cuda(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(x: jax.Array) -> jax.Array:
        return newton_schulz.polynomial(x, muon.COEFFICIENTS)

    x = jnp.asarray(rng.normal(size=(2, 16, 24)) / 24, jnp.bfloat16)
    dense = jax.jit(partial(newton_schulz.dense, muon.COEFFICIENTS))
    monkeypatch.setattr(newton_schulz, "has_kernel", lambda _: True)
    for mapped in (step, jax.vmap(step)):
        text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@xentile_newton_schulz(") == 1
        assert "dot_general" not in text
    if jax.default_backend() == "cpu":
        assert difference(jax.jit(step)(x), dense(x)) == 0
        assert difference(jax.jvp(step, (x,), (x,)), jax.jvp(dense, (x,), (x,))) < 0.1


@pytest.mark.parametrize("shape", [(2, 3, 264, 392), (2, 904, 640), (15192, 896)])
def test_newton_schulz_by_kernels_is_by_xla(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    if not newton_schulz.has_kernel(shape):
        pytest.skip("the kernels are for Hopper")
    x = jnp.asarray(rng.normal(size=shape) * 2 / max(shape) ** 0.5, jnp.bfloat16)
    got, right = (
        np.asarray(jax.jit(partial(one, muon.COEFFICIENTS))(x), np.float32)
        for one in (newton_schulz.kernel, newton_schulz.dense)
    )
    # Both round A to bfloat16, of sums in two orders, and its square doubles the difference.
    assert np.abs(got - right).max() < np.abs(right).max() / 32
    np.testing.assert_array_equal(got, np.swapaxes(got, -1, -2))


def test_the_polynomial_of_an_identity_is_rounded_once() -> None:
    got = newton_schulz.dense(muon.COEFFICIENTS, jnp.eye(64, 96, dtype=jnp.bfloat16))
    right = jnp.bfloat16(sum(muon.COEFFICIENTS)) * jnp.eye(64, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("applies", [False, True])
def test_muon_is_that_of_optax(rng: np.random.Generator, applies: bool) -> None:
    params = tree(rng)
    params["same"] = params["a"] * 2
    options: Any = {"weight_decay": 0.1, "adam_weight_decay": 0.1, "consistent_rms": 0.2}
    right, _ = train(optax.contrib.muon(SCHEDULE, **options), params)
    got, state = train(ours.muon(SCHEDULE, **options), params, applies=applies)
    for name in ("norm", "layers"):
        assert difference(right[name], got[name]) < 1e-6
    for name in ("a", "same"):
        moved = np.linalg.norm(right[name] - params[name])
        assert np.linalg.norm(right[name] - got[name]) < 0.03 * moved
    assert state.mu["norm"] == [None]


def test_muon_of_layers_is_that_of_each(rng: np.random.Generator) -> None:
    params = {"layers": jnp.asarray(rng.normal(size=(3, 32, 48)), jnp.float32)}
    stacked, _ = train(ours.muon(1e-2, matrices=True), params, 1)
    right = [np.asarray(one) for one in stacked["layers"]]
    grads = np.random.default_rng(0).normal(size=(3, 32, 48)).astype(np.float32)
    for layer, expected in zip(range(3), right, strict=True):
        optimizer: Any = ours.muon(1e-2)
        one = {"w": params["layers"][layer]}
        grad = {"w": jnp.asarray(grads[layer])}
        got, _ = optimizer.update_and_apply(grad, optimizer.init(one), one)
        np.testing.assert_allclose(got["w"], expected, atol=3e-4)


def test_what_is_refused(rng: np.random.Generator) -> None:
    params = tree(rng)
    optimizer: Any = ours.adamw8bit(1e-2)
    state = optimizer.init(params)
    grads = params

    def refused(error: Any, message: str, state: Any = state, **changed: Any) -> None:
        given = {"grads": grads, "params": params, **changed}
        for call in (optimizer.update, optimizer.update_and_apply):
            with pytest.raises(error, match=message):
                call(given["grads"], state, given["params"])

    with pytest.raises(ValueError, match="adamw8bit: update needs params"):
        optimizer.update(grads, state)
    with pytest.raises(TypeError, match=r"params\['step'\] has dtype int32; it must be float32"):
        optimizer.init({"step": jnp.arange(3)})
    refused(
        ValueError,
        r"grads has another tree than params: it lacks \['layers'\]",
        grads={"a": grads["a"], "norm": grads["norm"]},
    )
    refused(ValueError, r"grads\['a'\] has shape \(32,\)", grads={**grads, "a": jnp.zeros(32)})
    refused(
        TypeError, r"grads\['a'\] has dtype int32", grads={**grads, "a": jnp.zeros((32, 256), int)}
    )
    refused(OverflowError, "state.count is 2147483647", state._replace(count=jnp.int32(2**31 - 1)))
    mu = dict(state.mu)
    refused(
        ValueError,
        r"state.mu has another tree .* it has \['more'\]",
        state._replace(mu={**mu, "more": jnp.zeros(3)}),
    )
    scales = mu["a"]._replace(scales=jnp.zeros((32, 8)))
    refused(
        ValueError,
        r"state.mu\['a'\] has scales \(32, 8\); they must be one of",
        state._replace(mu={**mu, "a": scales}),
    )
    refused(
        ValueError,
        r"state.mu\['a'\] has shape \(16, 256\)",
        state._replace(mu={**mu, "a": codes.zeros((16, 256), 256, signed=True)}),
    )
    refused(
        TypeError,
        r"state.nu\['norm'\]\[0\] has dtype bfloat16",
        state._replace(nu={**state.nu, "norm": [jnp.zeros(7, jnp.bfloat16)]}),
    )
    refused(TypeError, "adamw8bit: state is a tuple", (1, 2))
    wide: Any = ours.adamw(1e-2)
    with pytest.raises(ValueError, match=r"state.mu\['a'\] is in 8 bits; this optimizer keeps"):
        wide.update(grads, state, params)
    with pytest.raises(TypeError, match=r"mask is 1.0 at \['a'\]; it must be True or False"):
        ours.adamw(1e-2, mask=1.0).update(grads, wide.init(params), params)
    with pytest.raises(ValueError, match="implementation is 'pallas'; it must be one of"):
        ours.adamw8bit(1e-2, implementation="pallas")
    with pytest.raises(ValueError, match=r"params\['norm'\]\[0\] has shape \(7,\); an array of"):
        ours.muon(1e-2, matrices=True).init(params)
    with pytest.raises(ValueError, match=r"ns_coeffs is \(1.0, 2.0\)"):
        ours.muon(1e-2, ns_coeffs=(1.0, 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw", {"learning_rate": "a"}, "learning_rate is 'a'; it must be a number"),
        ("lion8bit", {"learning_rate": None}, "learning_rate is None; it must be a number"),
        (
            "adamw",
            {"learning_rate": jnp.ones(2)},
            r"learning_rate has shape \(2,\); it must",
        ),
        ("adam8bit", {"b2": 1.0}, "b2 is 1.0; it must be at least 0 and below 1"),
        ("lion8bit", {"b1": -0.1}, "b1 is -0.1; it must be at least 0 and below 1"),
        ("adamw8bit", {"max_norm": -1}, "max_norm is -1.0; it must be at least 0"),
        ("adamw", {"rounding_seed": 1.5}, "rounding_seed is 1.5; it must be an integer"),
        ("muon", {"adam_b1": 2}, "adam_b1 is 2.0; it must be at least 0 and below 1"),
        ("muon", {"ns_coeffs": 3}, "ns_coeffs is 3; it must be three numbers"),
    ],
)
def test_options_outside_their_range(name: str, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(ours, name)(**{"learning_rate": 0.1, **options})


def test_gradients_of_0_clipped_to_0() -> None:
    optimizer, params = ours.adamw(0.5, max_norm=0, weight_decay=0), jnp.ones(3)
    got, _ = optimizer.update_and_apply(0 * params, optimizer.init(params), params)
    np.testing.assert_array_equal(got, params)


@pytest.mark.few(0)
@pytest.mark.slow
def test_muon_clips_and_rounds(rng: np.random.Generator) -> None:
    params = tree(rng)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), ours.muon(1e-2))
    right, _ = train(clipped, params)
    got, state = train(ours.muon(1e-2, max_norm=1.0), params, applies=True)
    assert difference(right, got) < 1e-4
    assert float(state.norm) > 1
    narrow = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params)
    options: Any = {"rounding_seed": 3}
    rounded, _ = train(ours.muon(1e-3, **options), narrow, applies=True)
    by_updates, _ = train(ours.muon(1e-3, **options), narrow)
    assert difference(rounded, by_updates) == 0
    other, _ = train(ours.muon(1e-3, rounding_seed=4), narrow, applies=True)
    assert difference(rounded["a"], other["a"]) > 0


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adam8bit", "lion8bit", "muon"])
def test_steps_are_exported(rng: np.random.Generator, name: str) -> None:
    """The state is what a stored program takes and gives back."""
    optimizer, params = getattr(ours, name)(1e-2, max_norm=1.0), tree(rng)
    step, state = jax.jit(optimizer.update_and_apply), optimizer.init(params)
    stored = jax.export.export(step, disabled_checks=checks())(params, state, params).serialize()
    found = jax.export.deserialize(stored).call(params, state, params)
    wanted = step(params, state, params)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("mode", ["strict types", "strict types, 64 bits", "leaks"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion8bit", "muon"])
def test_steps_are_lowered_in_strict_modes(rng: np.random.Generator, name: str, mode: str) -> None:
    optimizer, params = getattr(ours, name)(SCHEDULE, max_norm=1.0), tree(rng)
    with MODES[mode]():
        state = optimizer.init(params)
        for step in (optimizer.update, optimizer.update_and_apply):
            jax.jit(step).lower(params, state, params)
