"""Linear attention and the gated delta rule against their recurrences in NumPy, in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_bridge._src.linear_attention import calls
from pallas_bridge._src.linear_attention.program import Options

from pallas_bridge import gated_delta_rule, linear_attention


def _linear(q: Any, k: Any, v: Any, g: Any, **options: Any) -> Any:
    return linear_attention(q, k, v, _apply(_log_decay, g), return_final_state=True, **options)


def _delta(q: Any, k: Any, v: Any, b: Any, g: Any, ids: Any, **options: Any) -> Any:
    # Of what is normalised there is one implementation.
    options.pop("implementation", None)
    b, g = _apply(jax.nn.sigmoid, b), _apply(_log_decay, g)
    more = {"qk_l2_norm": True, "segment_ids": ids, "return_final_state": True}
    return gated_delta_rule(q, k, v, b, g, **more, **options)


def _log_decay(g: jax.Array) -> jax.Array:
    return -jax.nn.softplus(g)


def _apply(function: Any, value: Any) -> Any:
    """Returns function(value), or a value that is no array, for the error that names it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        return value
    return function(array) if jnp.issubdtype(array.dtype, jnp.floating) else array


HEADS = ("q: B S K D", "k: B S K D", "v: B S H E")
CASES = (
    case(
        "linear_attention",
        _linear,
        *HEADS,
        "g: B S H, optional",
        variants=({}, {"scale": 0.5}),
        whole="SDE",
    ),
    case(
        "gated_delta_rule of segments",
        _delta,
        *HEADS,
        "b: B S H",
        "g: B S H, optional",
        "segment_ids: B S < C, optional",
        variants=({}, {"scale": 0.5}),
        whole="SDE",
    ),
)

# By norm, relative.
OFF = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 5e-4}
DECAYS = {
    "none": lambda rng, shape: np.zeros(shape),
    "slow": lambda rng, shape: -0.1 * rng.random(shape),
    "fast": lambda rng, shape: -20 + rng.random(shape),
    "mixed": lambda rng, shape: -np.where(rng.random(shape) < 0.3, 20, 0.1) * rng.random(shape),
}
RULES = ("linear", "delta", "normalised")
ORDER = ("q", "k", "v", "g", "b", "state")
Arrays = dict[str, Any]


def draw(
    rng: np.random.Generator,
    rule: str,
    tokens: int,
    *,
    decay: str = "mixed",
    dtype: str = "float32",
    width: int = 16,
    columns: int = 24,
    heads: int = 2,
    shared: int = 2,
) -> Arrays:
    """Arguments, with `shared` heads of values for each head of keys, and cotangents."""
    batch = 2
    value_shape = (batch, tokens, heads * shared)
    k = rng.normal(size=(batch, tokens, heads, width))
    if rule == "delta":
        # b |k|^2 is at most 2.
        k *= np.sqrt(2) / np.linalg.norm(k, axis=-1, keepdims=True)
    found = {
        "q": jnp.asarray(rng.normal(size=k.shape), dtype),
        "k": jnp.asarray(k, dtype),
        "v": jnp.asarray(rng.normal(size=(*value_shape, columns)), dtype),
        "g": jnp.asarray(DECAYS[decay](rng, value_shape), jnp.float32),
    }
    if rule != "linear":
        found["b"] = jnp.asarray(rng.random(value_shape), dtype)
    shape = (batch, heads * shared, width, columns)
    found["state"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    found["do"] = jnp.asarray(rng.normal(size=(*value_shape, columns)), dtype)
    found["dstate"] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return found


def call(rule: str, ids: Any, q: Any, k: Any, v: Any, g: Any, *rest: Any, **options: Any) -> Any:
    """Returns o and the final state of arguments in that order."""
    *b, state = rest
    more = {"initial_state": state, "segment_ids": ids, "return_final_state": True, **options}
    if rule == "linear":
        return linear_attention(q, k, v, g, **more)
    return gated_delta_rule(q, k, v, *b, g, qk_l2_norm=rule == "normalised", **more)


@partial(jax.jit, static_argnums=0, static_argnames="implementation")
def found_by(rule: str, arrays: Arrays, ids: Any = None, implementation: Any = None) -> Arrays:
    """Outputs and gradients of the package."""
    names = [name for name in ORDER if name in arrays]
    given = [arrays[name] for name in names]
    one = partial(call, rule, ids, implementation=implementation)
    (o, state), vjp = jax.vjp(one, *given)
    gradients = vjp((arrays["do"], arrays["dstate"]))
    named = {f"d{name}": one for name, one in zip(names, gradients, strict=True)}
    return {"o": o, "final state": state} | named


def expected(rule: str, arrays: Arrays, ids: Any = None) -> Arrays:
    """Outputs and gradients of the recurrence, token by token."""
    wide = {name: np.asarray(one).astype(np.float64) for name, one in arrays.items()}
    v, g, b, do = (wide.get(name) for name in ("v", "g", "b", "do"))
    assert v is not None and g is not None and do is not None
    shared = v.shape[2] // wide["q"].shape[2]
    q, k = (np.repeat(wide[name], shared, 2) for name in "qk")
    norms = [np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k)]
    if rule == "normalised":
        q, k = q / norms[0], k / norms[1]
    decays = np.exp(g)
    if ids is not None:
        decays[:, 1:] *= (ids[:, 1:] == ids[:, :-1])[..., None]
    state, before, new, missing = wide["state"], [], [], []
    o = np.zeros_like(v)
    for t in range(v.shape[1]):
        state = decays[:, t, :, None, None] * state
        missing.append(v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state))
        new.append(v[:, t] if b is None else b[:, t, :, None] * missing[-1])
        before.append(state)
        state = state + k[:, t, :, :, None] * new[-1][:, :, None]
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
    found = {
        "o": o,
        "final state": state,
        **{f"d{name}": np.zeros_like(wide[name]) for name in "vg"},
    }
    dq, dk, dstate = np.zeros_like(q), np.zeros_like(k), wide["dstate"]
    if b is not None:
        found["db"] = np.zeros_like(b)
    for t in reversed(range(v.shape[1])):
        after = before[t] + k[:, t, :, :, None] * new[t][:, :, None]
        dq[:, t] = np.einsum("bhkv,bhv->bhk", after, do[:, t])
        dstate = dstate + q[:, t, :, :, None] * do[:, t, :, None]
        dk[:, t] = np.einsum("bhkv,bhv->bhk", dstate, new[t])
        dnew = np.einsum("bhk,bhkv->bhv", k[:, t], dstate)
        if b is not None:
            found["db"][:, t] = (dnew * missing[t]).sum(-1)
            dnew = b[:, t, :, None] * dnew
            dk[:, t] -= np.einsum("bhkv,bhv->bhk", before[t], dnew)
            dstate = dstate - k[:, t, :, :, None] * dnew[:, :, None]
        found["dv"][:, t] = dnew
        found["dg"][:, t] = (dstate * before[t]).sum((-2, -1))
        dstate = decays[:, t, :, None, None] * dstate
    if rule == "normalised":
        dq = (dq - q * (q * dq).sum(-1, keepdims=True)) / norms[0]
        dk = (dk - k * (k * dk).sum(-1, keepdims=True)) / norms[1]
    for name, one in (("dq", dq), ("dk", dk)):
        found[name] = one.reshape(*wide[name[1]].shape[:3], shared, one.shape[-1]).sum(3)
    return found | {"dstate": dstate}


def assert_close(found: Arrays, right: Arrays, off: float) -> None:
    assert found.keys() == right.keys()
    for name, one in found.items():
        error = np.linalg.norm(np.asarray(one).astype(np.float64) - right[name])
        assert error <= off * np.linalg.norm(right[name]), (name, error)


# Of five groups of two chunks, the last shorter and no multiple of a chunk.
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients(
    rng: np.random.Generator, rule: str, decay: str, has_segments: bool
) -> None:
    arrays = draw(rng, rule, 600, decay=decay)
    # An id that comes again is a segment of its own.
    lengths = [1, 62, 1, 64, 100, 372]
    ids = np.int32([np.repeat([5, 2, 5, 3, 1, 2], part) for part in (lengths, lengths[::-1])])
    given = ids if has_segments else None
    assert_close(found_by(rule, arrays, given), expected(rule, arrays, given), OFF["float32"])


# Elsewhere it runs where there are no kernels, as for what is normalised.
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_xlas_program(rng: np.random.Generator, rule: str) -> None:
    arrays = draw(rng, rule, 600)
    found = found_by(rule, arrays, implementation="reference")
    assert_close(found, expected(rule, arrays), OFF["float32"])


@pytest.mark.parametrize("tokens", [1, 65, 5])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_lengths(rng: np.random.Generator, rule: str, tokens: int) -> None:
    arrays = draw(rng, rule, tokens)
    assert_close(found_by(rule, arrays), expected(rule, arrays), OFF["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_16_bits(rng: np.random.Generator, rule: str, dtype: str) -> None:
    arrays = draw(rng, rule, 64, decay="slow", dtype=dtype)
    found = found_by(rule, arrays)
    assert {name: one.dtype.name for name, one in found.items() if one.dtype != dtype} == {
        name: "float32" for name in ("final state", "dg", "dstate")
    }
    assert_close(found, expected(rule, arrays), OFF[dtype])


# What kernels for GPUs take, in several groups of chunks.
@pytest.mark.parametrize(("tokens", "decay"), [(300, "slow"), (5, "fast"), (1, "slow")])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_what_kernels_take(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    tokens: int,
    decay: str,
) -> None:
    monkeypatch.setattr(calls, "GROUP", 1)
    monkeypatch.setattr(calls, "LEAST_CHUNKS", 2)
    sizes = {"width": 64, "columns": 128}
    arrays = draw(rng, rule, tokens, decay=decay, dtype="bfloat16", **sizes)
    if rule == "linear":
        arrays["k"] = arrays["k"] / 8
    else:
        arrays["b"] = arrays["b"].astype(jnp.float32)
    # Of one token, kernels run where they are named.
    named = "custom_call" if tokens == 1 else None
    call = calls.Call.of(Options(1.0, l2_norm=False), [arrays[name] for name in "qkv"], named)
    assert (call.chunks, call.groups) == ((2, 3) if tokens == 300 else (1, 1))
    found = found_by(rule, arrays, implementation=named)
    right = expected(rule, arrays)
    # On GPUs operands of these sums of float32 have the 16 bits of two in bfloat16.
    sums = {name: (found.pop(name), right.pop(name)) for name in ("dg", "db") if name in found}
    assert_close(found, right, OFF["bfloat16"])
    for name, (one, other) in sums.items():
        assert_close({name: one}, {name: other}, 2e-5)


# On GPUs clusters of CTAs add up dq and dk of four heads: of all that share keys, or parts, of four
# groups and of one.
@pytest.mark.parametrize("shared", [8, 4])
def test_many_heads_that_share_keys(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    monkeypatch.setattr(calls, "GROUP", 1)
    monkeypatch.setattr(calls, "LEAST_CHUNKS", 1)
    sizes = {"width": 128, "columns": 64, "heads": 8 // shared, "shared": shared}
    arrays = draw(rng, "linear", 300, decay="slow", dtype="bfloat16", **sizes)
    arrays["k"] = arrays["k"] / 8
    found, right = found_by("linear", arrays), expected("linear", arrays)
    assert_close({"dg": found.pop("dg")}, {"dg": right.pop("dg")}, 2e-5)
    assert_close(found, right, OFF["bfloat16"])


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_vmap_of_what_kernels_take(rng: np.random.Generator, rule: str) -> None:
    arrays = draw(rng, rule, 5, dtype="bfloat16", width=64, columns=64)
    several = {**arrays, "q": jnp.stack([arrays["q"], -arrays["q"]])}
    axes = {name: 0 if name == "q" else None for name in arrays}
    found = jax.jit(jax.vmap(partial(found_by, rule), in_axes=(axes,)))(several)
    for index in range(2):
        right = expected(rule, {**arrays, "q": several["q"][index]})
        assert_close({name: one[index] for name, one in found.items()}, right, 1e-2)


def test_kernels_that_there_are_not(rng: np.random.Generator) -> None:
    def kernels(arrays: Arrays, **options: Any) -> Any:
        given = [arrays[name] for name in "qkvbg"]
        return gated_delta_rule(*given, implementation="custom_call", **options)

    wide = {"width": 64, "columns": 64}
    right = draw(rng, "delta", 5, dtype="bfloat16", **wide)
    for arrays, options, message in (
        (right, {"qk_l2_norm": True}, "qk_l2_norm is True; it must be False"),
        ({name: one[:0] for name, one in right.items()}, {}, "q has shape .* none 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels(arrays, **options)
    with pytest.raises(ValueError, match="implementation is 'fast'"):
        linear_attention(*[right[name] for name in "qkv"], implementation="fast")


def test_groups_of_few_heads_run_at_once() -> None:
    rows = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    small, state = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8192, 8), (1, 8, 128, 128))
    )
    options = Options(1.0, False)
    assert calls.Call.of(options, [rows] * 3 + [small, state], None).groups == 16
    # The delta rule has a chain of groups.
    assert calls.Call.of(options, [rows] * 3 + [small] * 2 + [state], None).groups == 1


def test_arguments_that_may_be_left_out(rng: np.random.Generator) -> None:
    arrays = draw(rng, "delta", 5, decay="none")
    q, k, v, g, b = (arrays[name] for name in "qkvgb")
    state = jnp.zeros_like(arrays["state"])
    for function, every in ((linear_attention, (q, k, v)), (gated_delta_rule, (q, k, v, b))):
        right = function(*every, g, initial_state=state)
        np.testing.assert_array_equal(function(*every), right)
        np.testing.assert_allclose(function(*every, scale=0.5), 0.5 * right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_state_continues_a_sequence(rng: np.random.Generator, rule: str) -> None:
    names = [*draw(rng, rule, 1)][:-3]
    arrays = draw(rng, rule, 65)
    whole, last = call(rule, None, *(arrays[name] for name in names), arrays["state"])
    state, parts = arrays["state"], []
    for first, after in ((0, 62), (62, 63), (63, 64), (64, 65), (65, 65)):
        part, state = call(rule, None, *(arrays[name][:, first:after] for name in names), state)
        parts.append(part)
    right = {"o": np.float64(whole), "state": np.float64(last)}
    assert_close({"o": jnp.concatenate(parts, 1), "state": state}, right, OFF["float32"])


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_no_batch(rng: np.random.Generator, rule: str) -> None:
    arrays = {name: one[:0] for name, one in draw(rng, rule, 65).items()}
    assert_close(found_by(rule, arrays), expected(rule, arrays), 0)


def test_what_is_not_finite_stays_in_its_row(rng: np.random.Generator) -> None:
    arrays = draw(rng, "delta", 65)
    right = found_by("delta", arrays)
    lost = {
        **arrays,
        "k": arrays["k"].at[0, 3].set(jnp.nan),
        "v": arrays["v"].at[0, 9].set(jnp.inf),
    }
    for name, one in found_by("delta", lost).items():
        np.testing.assert_array_equal(one[1], right[name][1])
    # A decay of 0, whose logarithm is -inf, is one as any other.
    decays = {**arrays, "g": jnp.where(jnp.arange(65)[:, None] % 3 == 0, -jnp.inf, arrays["g"])}
    assert all(np.isfinite(one).all() for one in found_by("delta", decays).values())


# Of a token within a chunk of every platform; each sequence has one number in one of its operands.
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_what_is_not_finite_reaches_what_the_recurrence_has_it_reach(
    rng: np.random.Generator, rule: str, implementation: Any
) -> None:
    one = draw(rng, rule, 70, decay="slow", dtype="bfloat16", width=64, columns=64)
    cases = [(name, value) for name in one for value in (np.nan, np.inf)]
    # One head of keys.
    heads = {"q": 1, "k": 1, "v": 2, "g": 2, "b": 2, "do": 2}
    arrays = {}
    for name, array in one.items():
        own = array[:1, :, : heads[name]] if name in heads else array[:1, :2]
        arrays[name] = np.repeat(np.asarray(own), len(cases), 0)
    for row, (name, value) in enumerate(cases):
        place = (row, 40, 0) if name in heads else (row, 1, 5)
        arrays[name][place if name in "gb" else (*place, 3)] = value
    with np.errstate(all="ignore"):
        right = expected(rule, arrays)
    for name, array in found_by(rule, arrays, implementation=implementation).items():
        found = np.asarray(array).astype(np.float64)
        is_finite = np.isfinite(right[name])
        for given, same in zip(cases, np.isfinite(found) == is_finite, strict=True):
            assert same.all(), (*given, name)
        found, own_right = found[is_finite], right[name][is_finite]
        error = np.linalg.norm(found - own_right)
        assert error <= 2e-2 * np.linalg.norm(own_right), (name, error)


# `CASES` are mapped over every subset of their arrays, which have no state.
@pytest.mark.parametrize("mapped", ["state", "q v g", "do", "q k v g b state do dstate"])
def test_vmap_with_states(rng: np.random.Generator, mapped: str) -> None:
    each = [draw(rng, "delta", 5) for _ in range(3)]
    axes = {name: 0 if name in mapped.split() else None for name in each[0]}
    given = {
        name: one if axes[name] is None else jnp.stack([other[name] for other in each])
        for name, one in each[0].items()
    }
    found = jax.jit(jax.vmap(partial(found_by, "delta"), in_axes=(axes,)))(given)
    for index, own in enumerate(each):
        alone = {name: each[0][name] if axes[name] is None else own[name] for name in own}
        right = found_by("delta", alone)
        right = {name: np.float64(one) for name, one in right.items()}
        assert_close({name: one[index] for name, one in found.items()}, right, OFF["float32"])


@pytest.mark.devices(2)
def test_heads_over_devices_that_share_keys(rng: np.random.Generator) -> None:
    arrays = draw(rng, "delta", 5)
    given = [arrays[name][:, :, :1] if name in "qk" else arrays[name] for name in "qkvbg"]
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = (P(), P(), *[P(None, None, "heads")] * 3)

    def loss(*given: jax.Array) -> jax.Array:
        mapped = jax.shard_map(
            gated_delta_rule, mesh=mesh, in_specs=specs, out_specs=P(None, None, "heads")
        )
        return jnp.sin(mapped(*given)).sum()

    found = jax.jit(jax.grad(loss, range(5)))(*given)
    whole = jax.grad(lambda *given: jnp.sin(gated_delta_rule(*given)).sum(), range(5))
    alone = jax.jit(whole)(*given)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.devices(4)
@pytest.mark.parametrize(("rule", "is_checked"), [("linear", False), ("delta", True)])
def test_a_sequence_over_devices(rng: np.random.Generator, rule: str, is_checked: bool) -> None:
    """Outputs and gradients are the recurrence's, and devices exchange states alone."""
    arrays = draw(rng, rule, 4 * 20, decay="slow")
    ids = np.zeros((2, 80), np.int32)
    # One text begins with a device's tokens, and one does not.
    ids[0, 20:], ids[0, 47:] = 1, 2
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    names = [name for name in ORDER if name in arrays]
    tokens = P(None, "time")
    specs = [P() if name == "state" else tokens for name in names]
    mapped = jax.shard_map(
        lambda ids, *given: call(rule, ids, *given, axis_name="time"),
        mesh=mesh,
        in_specs=(tokens, *specs),
        out_specs=(tokens, P()),
        check_vma=is_checked,
    )

    def run(do: jax.Array, dstate: jax.Array, *given: jax.Array) -> Any:
        found, vjp = jax.vjp(partial(mapped, ids), *given)
        return found, vjp((do, dstate))

    places = [NamedSharding(mesh, spec) for spec in (tokens, P(), *specs)]
    given = jax.device_put([arrays[name] for name in ("do", "dstate", *names)], places)
    program = jax.jit(run).lower(*given).compile()
    (o, state), gradients = program(*given)
    found = {f"d{name}": one for name, one in zip(names, gradients, strict=True)}
    assert_close({"o": o, "final state": state} | found, expected(rule, arrays, ids), 1e-5)
    # Of q's, k's or v's tokens none are moved.
    assert "all-gather" not in program.as_text()
    assert "all-to-all" not in program.as_text()


@pytest.mark.devices(2)
def test_explicit_axes_shard_batch_and_heads(rng: np.random.Generator) -> None:
    arrays = draw(rng, "linear", 64)
    mesh = jax.make_mesh((2,), ("one",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    for name, spec in (("q", P("one")), ("v", P(None, "one")), ("state", P(None, None, "one"))):
        placed = jax.device_put(arrays[name], NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=r"is sharded as .*reshard"):
            call(
                "linear",
                None,
                *({**arrays, name: placed}[one] for one in ("q", "k", "v", "g", "state")),
            )


@pytest.mark.parametrize(("rule", "most"), [("linear", 320), ("delta", 300)])
def test_memory_of_the_backward_pass(rule: str, most: int) -> None:
    # XLA of older versions has arrays of a loop in float32 on CPUs, beside those in bfloat16.
    dtype = jnp.bfloat16 if jax.__version_info__ >= (0, 11) else jnp.float32
    shape = jax.ShapeDtypeStruct((4, 8192, 8, 128), dtype)
    small = jax.ShapeDtypeStruct((4, 8192, 8), jnp.float32)
    function: Any = linear_attention if rule == "linear" else gated_delta_rule
    arrays = [shape] * 3 + [small] * (1 if rule == "linear" else 2)

    def gradients(*given: Any) -> Any:
        return jax.vjp(function, *given[:-1])[1](given[-1])

    program = jax.jit(gradients).lower(*arrays, shape).compile()
    assert program.memory_analysis().temp_size_in_bytes < most << 20


def test_what_is_wrong_is_named(rng: np.random.Generator) -> None:
    arrays = draw(rng, "delta", 5)
    right = {name: arrays[name] for name in "qkvbg"} | {"initial_state": arrays["state"]}
    cases: list[tuple[Arrays, type[Exception], str]] = [
        ({"q": right["q"][0]}, ValueError, r"q has shape .* must be \[B, T, H, K\]"),
        ({"k": right["k"][:, :3]}, ValueError, r"k has shape .* which is \(2, 5, 2, 16\)"),
        ({"v": right["v"][:, :, :3]}, ValueError, "H' a multiple of 2"),
        ({"v": right["v"].astype(jnp.bfloat16)}, TypeError, "v has dtype bfloat16; .* float32"),
        ({"b": right["b"][..., :2]}, ValueError, r"b has shape .* which is \(2, 5, 4\)"),
        ({"g": -right["g"]}, ValueError, "g is the logarithm of the decay: pass jnp.log"),
        ({"g": jnp.ones((2, 5, 4), int)}, TypeError, "g has dtype int32"),
        (
            {"initial_state": right["initial_state"].astype(jnp.bfloat16)},
            TypeError,
            "initial_state has dtype bfloat16; it must be float32",
        ),
        ({"initial_state": right["initial_state"][:1]}, ValueError, "initial_state has shape"),
        ({"segment_ids": jnp.ones((2, 5))}, TypeError, "segment_ids has dtype float32; .* int32"),
        ({"scale": jnp.inf}, ValueError, "scale is inf"),
        ({"qk_l2_norm": "yes"}, TypeError, "qk_l2_norm is 'yes'"),
        ({"beta": right["b"]}, TypeError, "did you mean b"),
        ({"axis_name": "time"}, ValueError, "axis_name is 'time'; .* within jax.shard_map"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            gated_delta_rule(**{**right, **wrong})
    # A constant of a program is looked at as it is traced.
    rest = {name: one for name, one in right.items() if name != "q"}
    assert jax.eval_shape(partial(gated_delta_rule, **rest), right["q"]).shape == right["v"].shape
    with pytest.raises(ValueError, match=r"g has 0\.\d+, which is above 0"):
        jax.eval_shape(
            partial(gated_delta_rule, **{**rest, "g": jnp.abs(right["g"]) / 100}), right["q"]
        )
    # What is traced cannot be looked at.
    assert jax.jit(gated_delta_rule)(**{**right, "g": -right["g"]}).shape == right["v"].shape
