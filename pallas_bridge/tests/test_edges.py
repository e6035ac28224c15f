"""Edges of every operation: no tokens, masks of any rank, what is no array, what is not finite."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from operations import CASES, EXTENTS, Case, one_an_operation
from placement import PLATFORM

import pallas_bridge as pb

BY_NAME = {case.name: case for case in CASES}
NAMES = tuple(BY_NAME)
# Arguments that may be None.
OPTIONAL = {"up", "residual", "bias", "columns", "positions", "ids", "sinks"}
OPTIONAL_KEYS = {"rope", "rope by positions", "rope by positions of a batch"}
# What a message calls an argument that has another name here.
CALLED = {"ids": "segment_ids"}


def empty_extents(case: Case) -> list[dict[str, int]]:
    """Returns extents with an axis of tokens of 0, one such axis at a time."""
    dims = case.arguments[0].dims
    return [{name: 0} for name in ("B", "S", "M") if name in dims]


def check_empty(case: Case, arrays: Any, outputs: Any, gradients: Any) -> None:
    # eval_shape never runs what divides by an extent.
    expected = jax.eval_shape(case.outputs, *arrays)
    assert [(one.shape, one.dtype) for one in outputs] == [
        (one.shape, one.dtype) for one in expected
    ]
    if case.has_gradient:
        # A mean of no losses is 0.
        assert all(one == 0 for one in outputs if one.shape == ())
    for index, gradient in zip(case.differentiable, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (arrays[index].shape, arrays[index].dtype)
        np.testing.assert_array_equal(np.asarray(gradient, np.float32), 0)


@pytest.mark.parametrize("name", one_an_operation(NAMES))
def test_no_tokens(rng: np.random.Generator, name: str) -> None:
    case = BY_NAME[name]

    def both(*arrays: Any) -> Any:
        return case.outputs(*arrays), case.gradients(*arrays) if case.differentiable else ()

    for extents in empty_extents(case):
        arrays = case.arrays(rng, **extents)
        check_empty(case, arrays, *jax.jit(both)(*arrays))
        # Programs for platforms that are not here are made, too.
        if PLATFORM == "cpu":
            traced = jax.jit(both).trace(*arrays)
            traced.lower(lowering_platforms=("cpu", "cuda", "tpu"))
            traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("name", one_an_operation(NAMES))
def test_no_tokens_in_16_bits_and_with_options(rng: np.random.Generator, name: str) -> None:
    case = BY_NAME[name]
    extents = empty_extents(case)[0]
    arrays = case.arrays(rng, "bfloat16", **extents)
    # Gate and up in two arrays are always XLA's.
    plain = {} if name == "swiglu of two arrays" else {"implementation": "reference"}
    for options in (*case.variants[1:], plain):

        def both(*arrays: Any, options: Any = options) -> Any:
            gradients = case.gradients(*arrays, **options) if case.differentiable else ()
            return case.outputs(*arrays, **options), gradients

        if options is plain:
            check_empty(case, arrays, *jax.jit(both)(*arrays))
        else:
            jax.eval_shape(both, *arrays)


# Shapes of logits, the axis, and of masks.
MASKS: list[tuple[tuple[int, ...], Any, tuple[int, ...]]] = [
    ((5,), -1, ()),
    ((5,), -1, (5,)),
    ((3, 5), -1, (3,)),
    ((3, 5), -1, (1,)),
    ((3, 5), -1, (1, 5)),
    ((3, 5), -1, (3, 1)),
    ((5, 3), 0, ()),
    ((5, 3), 0, (3,)),
    ((5, 2, 3), 0, ()),
    ((5, 2, 3), 0, (3,)),
    ((5, 2, 3), 0, (1,)),
    ((5, 2, 3), 0, (2, 3)),
    ((2, 5, 3), 1, (1, 1, 1)),
    ((2, 5, 3), 1, (2, 5, 3)),
    ((2, 3, 4, 5), (2, 3), (2, 3)),
    ((2, 3, 4, 5), (2, 3), (1, 1, 1, 1)),
    ((2, 3, 4, 5), (-1, 0), (2, 3, 4, 5)),
]


def optax_problem(
    rng: np.random.Generator, shape: tuple[int, ...], axis: Any
) -> tuple[jax.Array, jax.Array]:
    axes = {one % len(shape) for one in (axis if isinstance(axis, tuple) else (axis,))}
    batch = [extent for index, extent in enumerate(shape) if index not in axes]
    vocab = math.prod(shape[one] for one in axes)
    logits = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return logits, jnp.asarray(rng.integers(0, vocab, batch), jnp.int32)


@pytest.mark.few(6)
@pytest.mark.parametrize(("shape", "axis", "of_mask"), MASKS, ids=str)
def test_masks_that_optax_takes(
    rng: np.random.Generator, shape: Any, axis: Any, of_mask: Any
) -> None:
    logits, labels = optax_problem(rng, shape, axis)
    mask = jnp.asarray(rng.random(of_mask) < 0.6)
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis, mask)
    ours = pb.optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis, mask)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", [True, False, np.True_, jnp.array(True), (True, False, True)])
@pytest.mark.parametrize("axis", [-1, 1])
def test_masks_of_fewer_axes(rng: np.random.Generator, where: Any, axis: int) -> None:
    """They are broadcast against labels, as those that optax takes."""
    logits, labels = optax_problem(rng, (2, 3, 3), axis)
    mask = jnp.broadcast_to(jnp.asarray(where), labels.shape)
    loss = pb.optax.softmax_cross_entropy_with_integer_labels
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis, mask)
    np.testing.assert_allclose(loss(logits, labels, axis, where), theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        jax.grad(lambda x: loss(x, labels, axis, where).sum())(logits),
        jax.grad(lambda x: loss(x, labels, axis, mask).sum())(logits),
    )


def test_a_mask_of_more_tokens_than_logits(rng: np.random.Generator) -> None:
    logits, labels = optax_problem(rng, (1, 3, 7), -1)
    mask = jnp.asarray(rng.random((2, 3)) < 0.6)
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, labels, -1, mask)
    ours = pb.optax.softmax_cross_entropy_with_integer_labels(logits, labels, -1, mask)
    assert ours.shape == theirs.shape == (2, 3)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of_mask", [(4,), (2,), (1, 2, 3, 5), (2, 3, 4), (3, 2)], ids=str)
def test_masks_that_do_not_fit(of_mask: tuple[int, ...]) -> None:
    logits, labels = jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), int)
    with pytest.raises(ValueError) as caught:
        pb.optax.softmax_cross_entropy_with_integer_labels(
            logits, labels, where=jnp.ones(of_mask, bool)
        )
    assert str(caught.value) == (
        f"where has shape {of_mask}; it must broadcast against labels, (2, 3), or, with 3 axes, "
        "against logits, (2, 3, 5)"
    )


def test_yarn_without_rounding(rng: np.random.Generator) -> None:
    """gpt-oss: the ends of the ramp are fractions of a pair."""
    base, rotary, factor, original = 150000.0, 64, 32.0, 4096
    place = [
        rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (32.0, 1.0)
    ]
    assert all(one != round(one) for one in place)
    plain = base ** -(np.arange(0, rotary, 2) / rotary)
    positions = rng.integers(0, 4 * original, 5)
    found = {}
    for truncate in (True, False):
        low, high = (math.floor(place[0]), math.ceil(place[1])) if truncate else place
        ramp = np.clip((np.arange(rotary // 2) - low) / (high - low), 0, 1)
        angles = positions[:, None] * (plain / factor * ramp + plain * (1 - ramp))
        scaling = pb.YarnScaling(factor, original, truncate=truncate)
        rotated = pb.rope(
            jnp.ones((5, 1, rotary)), positions=jnp.asarray(positions), base=base, scaling=scaling
        )
        found[truncate] = np.asarray(rotated)[:, 0, : rotary // 2]
        right = (np.cos(angles) - np.sin(angles)) * (0.1 * math.log(factor) + 1)
        np.testing.assert_allclose(found[truncate], right, atol=1e-4)
    assert np.abs(found[True] - found[False]).max() > 1e-2
    assert pb.YarnScaling(2.0, 64) == pb.YarnScaling(2.0, 64, truncate=True)
    with pytest.raises(TypeError, match="YarnScaling: truncate is 2; it must be True or False"):
        pb.YarnScaling(2.0, 64, truncate=2)  # type: ignore[arg-type]


def message_of(function: Callable[..., Any], arrays: Any, errors: Any) -> str:
    with pytest.raises(errors) as caught:
        jax.eval_shape(lambda: function(*arrays))
    return str(caught.value)


WEIGHT_IS_OPTIONAL = ("rms_norm", "rms_norm with a residual", "layer_norm", "rms_norm_fp8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_array(rng: np.random.Generator, name: str) -> None:
    case = BY_NAME[name]
    arrays = case.arrays(rng)
    for index, argument in enumerate(case.arguments):
        is_optional = argument.is_optional or argument.name in OPTIONAL
        is_optional |= argument.name == "k" and name in OPTIONAL_KEYS
        called = CALLED.get(argument.name, argument.name)
        for value in (None, "text", [None, 1.0]):
            if value is None and is_optional:
                continue
            if value is None and called == "weight" and name in WEIGHT_IS_OPTIONAL:
                continue
            if name == "flash_attention of packed texts" and index == 0:
                # The case makes other arguments of its shape.
                continue
            given = [*arrays]
            given[index] = value  # type: ignore[call-overload]
            message = message_of(case.function, given, TypeError)
            kind = "None" if value is None else f"of type {type(value).__name__}, "
            assert message.startswith(f"{called} is {kind}"), message
            assert "it must be an array " in message


@pytest.mark.parametrize("name", NAMES)
def test_ranks(rng: np.random.Generator, name: str) -> None:
    """An array of another rank is taken where that has a meaning, or a message names its shape."""
    case = BY_NAME[name]
    arrays = case.arrays(rng)
    names = [CALLED.get(one.name, one.name) for one in case.arguments]
    for index in range(len(arrays)):
        if name == "flash_attention of packed texts" and index == 0:
            continue
        for other in (arrays[index].ravel()[0], arrays[index][0], arrays[index][None]):
            given = [*arrays]
            given[index] = other
            try:
                jax.eval_shape(lambda given=given: case.function(*given))
            except ValueError as error:
                message = str(error)
                # Where two shapes disagree, either may be called wrong.
                assert any(one in message for one in names), message
                assert "must" in message or "they may differ in heads" in message, message
                # Of tables without what is of pairs.
                shapes = [shape for one in given for shape in (one.shape, one.shape[:-1])]
                has_shape = any(str(shape) in message for shape in shapes)
                assert has_shape or "axis is -1; it must name different axes" in message, message


def test_the_rest_of_what_is_no_array() -> None:
    q = jnp.ones((2, 6, 4, 16))
    labels = jnp.zeros((2, 6), int)
    for call, message in (
        (lambda: pb.rms_norm(None, q), "x is None; it must be an array [.., D]"),
        (lambda: pb.rope(q, offset=None), "offset is None; it must be an array of no axes"),
        (lambda: pb.rope(q, tables=(q, None)), "sin is None; it must be an array [.., S, R / 2]"),
        (lambda: pb.rope(q, tables=q), "tables is of type ArrayImpl; it must be a pair"),
        (lambda: pb.gelu(2**40), "x has an integer that int32 does not hold; it must be an array"),
        (
            lambda: pb.gelu(jax.random.key(0)),
            "x has dtype key<fry>; it must be an array of",
        ),
        (lambda: pb.nn.silu(labels), "x has dtype int32; it must be bfloat16, float16 or float32"),
        (lambda: pb.explain("h", q), "hidden is of type str, of which JAX makes no array"),
        (
            lambda: pb.gated_mlp(q, jnp.ones((16, 4), "float8_e5m2"), None, jnp.ones((2, 16))),
            "w_gate has dtype float8_e5m2 and x float32; JAX promotes them to none: cast one",
        ),
        (lambda: pb.nn.dot_product_attention(q, None, q), "key is None; it must be an array"),
        (
            lambda: pb.nn.dot_product_attention(q, q, q, query_seq_lengths=jnp.ones(2)),
            "query_seq_lengths has dtype float32; it must be integers",
        ),
        (lambda: pb.zigzag_indices("8", 2), "length is '8'; it must be an integer"),
        (lambda: pb.fp8_dequantize(None, q), "values is None; it must be an array"),
        (lambda: pb.fp8_dequantize(q, None), "scales is None; it must be an array"),
        (lambda: pb.delayed_scale(None), "history is None; it must be an array [.., H]"),
        (
            lambda: pb.linear_cross_entropy_value_and_grad(
                q[:, :, 0], jnp.ones((5, 16)), labels, dweight_sums=None
            ),
            "dweight_sums is None; it must be an array of the shape of weight",
        ),
        (
            lambda: pb.flash_attention(q, q, q, segment_ids=(labels, None)),
            "segment_ids[1] is None; it must be an array of integers, of shape (2, 6)",
        ),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(message), caught.value


def test_flags_that_are_none() -> None:
    q, x, labels = jnp.ones((2, 6, 4, 16)), jnp.ones((3, 8)), jnp.zeros(3, int)
    weight = jnp.ones((5, 8))
    calls: dict[str, Callable[..., Any]] = {
        "return_lse": lambda one: pb.cross_entropy(x, labels, return_lse=one),
        "donate_logits": lambda one: pb.cross_entropy(x, labels, donate_logits=one),
        "return_correct": lambda one: pb.linear_cross_entropy(
            x, weight, labels, return_correct=one
        ),
        "batch_invariant": lambda one: pb.linear_cross_entropy(
            x, weight, labels, batch_invariant=one
        ),
        "return_rstd": lambda one: pb.rms_norm(x, None, return_rstd=one),
        "return_statistics": lambda one: pb.layer_norm(x, None, return_statistics=one),
        "interleaved": lambda one: pb.gated_mlp(
            x, jnp.ones((8, 4)), None, jnp.ones((2, 8)), interleaved=one
        ),
        "is_causal": lambda one: pb.nn.dot_product_attention(q, q, q, is_causal=one),
    }
    known = jnp.array(True)
    for name, call in calls.items():
        for value in ("no", np.zeros(2), None):
            with pytest.raises(TypeError) as caught:
                call(value)
            assert str(caught.value) == f"{name} is {value!r}; it must be True or False"
        with pytest.raises(TypeError, match=f"{name} is traced; it must be known when"):
            jax.eval_shape(call, True)
        # Arrays that are known within `jax.jit` are as good as numbers.
        jax.eval_shape(lambda call=call: call(known))  # type: ignore[misc]


def test_integers_that_int32_does_not_hold() -> None:
    """They are refused by one exception, of lists and of NumPy's arrays, which JAX would cut."""
    logits, hidden, weight = jnp.ones((2, 5)), jnp.ones((2, 8)), jnp.ones((5, 8))
    q = jnp.ones((2, 6, 4, 16))
    large = 2**32 + 1
    calls: dict[str, Callable[..., Any]] = {
        "labels": lambda one: pb.cross_entropy(logits, one),
        "columns": lambda one: pb.linear_cross_entropy(hidden, weight, [0, 1], columns=one),
        "seeds": lambda one: pb.generation.sample(logits, one),
        "steps": lambda one: pb.generation.sample(logits, [0, 1], one),
        "positions": lambda one: pb.rope(q, positions=one),
        "segment_ids": lambda one: pb.flash_attention(q, q, q, segment_ids=one),
        "x": pb.gelu,
    }
    for name, call in calls.items():
        for value in ([1, large], np.array([1, -large]), np.array([1, large], np.uint64)):
            message = message_of(call, [value], TypeError)
            right = f"{name} has an integer that u?int32 does not hold; it must be an array "
            assert re.match(right, message), message
    assert pb.cross_entropy(logits, np.array([1, 4], np.int64)).shape == ()


WORDS_OF_CALLS: dict[str, Callable[..., Any]] = {
    "reduction": lambda one: pb.cross_entropy(jnp.ones((3, 5)), [0, 1, 2], reduction=one),
    "reduction of linear_cross_entropy": lambda one: pb.linear_cross_entropy(
        jnp.ones((3, 8)), jnp.ones((5, 8)), [0, 1, 2], reduction=one
    ),
    "reduction of value_and_grad": lambda one: pb.linear_cross_entropy_value_and_grad(
        jnp.ones((3, 8)),
        jnp.ones((5, 8)),
        [0, 1, 2],
        dweight_sums=jnp.ones((5, 8)),
        reduction=one,
    ),
    "reduction of linear_kl_divergence": lambda one: pb.losses.linear_kl_divergence(
        *[jnp.ones((3, 8)), jnp.ones((5, 8))] * 2, reduction=one
    ),
    "reduction of explain": lambda one: pb.explain(
        jnp.ones((3, 8)), jnp.ones((5, 8)), reduction=one
    ),
    "platform": lambda one: pb.explain(jnp.ones((3, 8)), jnp.ones((5, 8)), platform=one),
    "granularity": lambda one: pb.fp8_quantize(jnp.ones((3, 8)), granularity=one),
    "amax_compute": lambda one: pb.delayed_scale(jnp.ones(3), amax_compute=one),
    "activation": lambda one: pb.gated_mlp(
        jnp.ones((3, 8)), jnp.ones((8, 4)), None, jnp.ones((2, 8)), activation=one
    ),
    "keep": lambda one: pb.gated_mlp(
        jnp.ones((3, 8)), jnp.ones((8, 4)), None, jnp.ones((2, 8)), keep=one
    ),
    "approximate": lambda one: pb.gelu(jnp.ones((3, 8)), approximate=one),
    "implementation of jax.nn": lambda one: pb.nn.dot_product_attention(
        *[jnp.ones((2, 6, 4, 16))] * 3, implementation=one
    ),
    "implementation of gated_delta_rule": lambda one: pb.gated_delta_rule(
        *[jnp.ones((2, 6, 4, 16))] * 3, *[jnp.zeros((2, 6, 4))] * 2, implementation=one
    ),
    "adamw: implementation": lambda one: pb.optax.adamw(1e-3, implementation=one),
}


# A case that leaves the option out.
WITHOUT_WORDS = {"gated_delta_rule of segments"}


@pytest.mark.parametrize("name", [*WORDS_OF_CALLS, *sorted({*NAMES} - WITHOUT_WORDS)])
def test_words_that_are_arrays(rng: np.random.Generator, name: str) -> None:
    """An option that is a word answers an array with the words that there are."""
    call, option = WORDS_OF_CALLS.get(name), name.partition(" of ")[0]
    if call is None:
        case, option = BY_NAME[name], "implementation"
        arrays = case.arrays(rng)

        def call(one: Any) -> Any:
            return case.function(*arrays, implementation=one)

    for value in (jnp.array(1), jnp.ones(3), np.ones((2, 2)), np.array(["mean", "none"]), [0], 0):
        message = message_of(call, [value], ValueError)
        assert f"{option} is {value!r}; it must be " in message, message


def test_heads_before_tokens() -> None:
    """Of [B, H, S, D] the head counts disagree, and the message says what to swap."""
    q, k = jnp.ones((2, 8, 1, 16)), jnp.ones((2, 4, 10, 16))
    with pytest.raises(ValueError) as caught:
        pb.flash_attention(q, k, k)
    assert str(caught.value) == (
        "q has 1 heads and k 10; those of q must be a multiple of those of k. q, k and v are "
        "[B, S, H, D] here, of shapes (2, 8, 1, 16) and (2, 4, 10, 16): if they are [B, H, S, D], "
        "of 8 and 4 heads, swap these axes first (jnp.swapaxes(x, -3, -2))"
    )
    with pytest.raises(ValueError, match=r"\[S, H, D\] here"):
        pb.flash_attention(q[0], k[0], k[0])
    # Nothing is said of what no transposition mends.
    with pytest.raises(ValueError, match=r"must be a multiple of those of k$"):
        pb.flash_attention(jnp.ones((2, 7, 3, 16)), k, k)


def test_offset_beside_positions() -> None:
    q = jnp.ones((2, 6, 4, 16))
    message = "positions and offset are both given; it must be one of them: positions, a number a"
    for offset in (3, jnp.array(3)):
        with pytest.raises(ValueError, match=message):
            pb.rope(q, positions=jnp.arange(6), offset=offset)


# Kernels for GPUs keep it within heads that share keys.
@pytest.mark.parametrize("implementation", ["reference", *["custom_call"] * (PLATFORM == "cpu")])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_what_is_not_finite_stays_in_its_segment(
    rng: np.random.Generator, options: Any, implementation: Any
) -> None:
    sizes = {**EXTENTS, "S": 12}
    shape = (sizes["B"], sizes["S"])
    segments = jnp.asarray(np.broadcast_to(np.arange(12) // 4, shape), jnp.int32)
    clean = [
        jnp.asarray(rng.normal(size=(*shape, heads, 16)), jnp.float32) for heads in (4, 2, 2, 4)
    ]
    dlse = jnp.asarray(rng.normal(size=(*shape, 4)), jnp.float32)

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return pb.flash_attention(
                q,
                k,
                v,
                segment_ids=segments,
                return_lse=True,
                implementation=implementation,
                **options,
            )

        outputs, vjp = jax.vjp(attend, q, k, v)
        return *outputs, *vjp((do, dlse))

    run = jax.jit(both)
    expected = [np.asarray(one) for one in run(*clean)]
    others = np.r_[0:4, 8:12]
    for index, value in ((0, np.nan), (1, np.nan), (1, np.inf), (2, np.nan), (2, -np.inf)):
        given = [*clean]
        at = (slice(None), int(rng.integers(4, 8)), slice(None), int(rng.integers(16)))
        given[index] = given[index].at[at].set(value)
        found = [np.asarray(one) for one in run(*given)]
        for got, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got[:, others], right[:, others])
        # It is not hidden from those that see it: the last query sees all keys of its segment.
        o, _, dq, dk, dv = found
        where = at[1] if index == 0 else 7
        assert not np.isfinite(dq[:, where]).all(-1).any(), (index, value)
        if implementation != "reference":
            # Of kernels a sum is what arithmetic makes of it.
            continue
        assert np.isnan(dq[:, where]).all(), (index, value)
        # A logit of -inf is of a key that is not seen.
        assert np.isnan(o[:, where]).all() or (index, value) == (1, np.inf), (index, value)
        assert all(np.isnan(one[:, 4]).all() for one in (dk, dv)), (index, value)
