"""Every operation under JAX's strict modes, and of arrays of every kind.

Where a mode forbids what JAX does as it traces, programs are traced and lowered, and not compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from operations import CASES, SHARED, Case, one_an_operation

import pallas_bridge as pb

IMPLEMENTATIONS = ("custom_call", "reference")
NAMED = [pytest.param(case, id=case.name) for case in CASES]


@contextmanager
def strict_types() -> Iterator[None]:
    """Has JAX broadcast to no rank and convert to no dtype that a program does not name."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@contextmanager
def wide_types() -> Iterator[None]:
    """The same where numbers of 64 bits are what Python's become."""
    enable: Any = getattr(jax, "enable_x64", None)
    if not callable(enable):
        from jax.experimental import enable_x64 as enable
    with strict_types(), enable(True):
        yield


@contextmanager
def no_special_numbers() -> Iterator[None]:
    """Has JAX raise where NaN or an infinity is a result."""
    with jax.debug_infs(True), jax.debug_nans(True):
        yield


@contextmanager
def no_jit() -> Iterator[None]:
    """Runs every primitive by itself, with strict types, which hold there too."""
    with strict_types(), jax.disable_jit():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "strict types": strict_types,
    "strict types, 64 bits": wide_types,
    "leaks": jax.checking_leaks,
    "special numbers": no_special_numbers,
    "no jit": no_jit,
}


def named(implementation: str) -> dict[str, Any]:
    """Returns the option that names the reference; kernels are what runs without."""
    return {"implementation": implementation} if implementation == "reference" else {}


def gradient(case: Case, options: Any, *arrays: Any) -> Any:
    """Returns the value and gradients, or results of what has no gradient."""
    if not case.has_gradient:
        return case.outputs(*arrays, **options)
    value = partial(case.value, **options)
    return jax.value_and_grad(value, case.differentiable)(*arrays)


def forward_mode(case: Case, options: Any, *arrays: Any) -> Any:
    """Returns results and their tangents."""

    def moving(*given: Any) -> Any:
        every = [*arrays]
        for index, array in zip(case.differentiable, given, strict=True):
            every[index] = array
        return case.outputs(*every, **options)

    given = tuple(arrays[index] for index in case.differentiable)
    return jax.jvp(moving, given, given)


def derivatives(case: Case, options: Any, *arrays: Any) -> Any:
    """Returns what both modes give."""
    found = gradient(case, options, *arrays)
    return (found, forward_mode(case, options, *arrays)) if case.has_gradient else found


def lower(case: Case, options: Any, *arrays: Any) -> None:
    """Traces and lowers a program of all."""
    jax.jit(partial(derivatives, case, options)).lower(*arrays)


def traced_product() -> Iterator[Any]:
    """Modes of tracing, cases, implementations, dtypes and options; most of these, nightly."""
    for mode in ("strict types", "strict types, 64 bits", "leaks"):
        for case in CASES:
            for implementation in IMPLEMENTATIONS:
                for dtype in ("bfloat16", "float16", "float32"):
                    is_usual = dtype == ("bfloat16" if mode == "strict types" else "float32")
                    for number, options in enumerate(case.variants or ({},)):
                        # What is made of each option is made in the reference too.
                        if implementation == "reference" and mode != "strict types, 64 bits":
                            is_few = mode == "strict types"
                        else:
                            is_few = number == 0
                        yield pytest.param(
                            mode,
                            case,
                            {**options, **named(implementation)},
                            dtype,
                            id=f"{mode}-{case.name}-{options}-{implementation}-{dtype}",
                            marks=() if is_usual and is_few else (pytest.mark.nightly,),
                        )


@pytest.mark.parametrize(("mode", "case", "options", "dtype"), [*traced_product()])
def test_programs_are_lowered_in_strict_modes(
    mode: str, case: Case, options: Any, dtype: str, rng: np.random.Generator
) -> None:
    arrays = case.arrays(rng, dtype)
    with MODES[mode]():
        lower(case, options, *arrays)


def run_product() -> Iterator[Any]:
    """Modes of running outside of `jit`, and cases; of the reference and options, nightly.

    So are further ways to call an operation, and all but one operation of an implementation.
    """
    for mode in ("special numbers", "no jit"):
        seen = {*SHARED}
        for case in CASES:
            operation = case.name.split(" ")[0]
            is_first = operation not in seen
            seen.add(operation)
            for implementation in IMPLEMENTATIONS:
                for number, options in enumerate(case.variants or ({},)):
                    # Forward mode of kernels is that of the reference, mostly.
                    is_few = is_first and number == 0 and implementation == "custom_call"
                    yield pytest.param(
                        mode,
                        case,
                        {**options, **named(implementation)},
                        id=f"{mode}-{case.name}-{options}-{implementation}",
                        marks=() if is_few else (pytest.mark.nightly,),
                    )


@pytest.mark.parametrize(("mode", "case", "options"), [*run_product()])
def test_operations_run_in_strict_modes(
    mode: str, case: Case, options: Any, rng: np.random.Generator
) -> None:
    arrays = case.arrays(rng)
    # Without `jit` forward mode is what it is outside of it.
    run = gradient if mode == "no jit" else derivatives
    with MODES[mode]():
        found = run(case, options, *arrays)
    numbers = [one for one in jax.tree.leaves(found) if one.dtype != jax.dtypes.float0]
    for one in numbers:
        assert np.isfinite(np.asarray(one, np.float32)).all()


@pytest.mark.parametrize("case", one_an_operation(NAMED))
def test_checkify_wraps_operations(case: Case, rng: np.random.Generator) -> None:
    arrays = case.arrays(rng)
    every = checkify.float_checks | checkify.index_checks
    jax.make_jaxpr(checkify.checkify(case.outputs, errors=every))(*arrays)
    # JAX's check of indices fails itself of the gradient of `jnp.take_along_axis`.
    checked = checkify.checkify(partial(derivatives, case, {}), errors=checkify.float_checks)
    jax.make_jaxpr(checked)(*arrays)


LABELS = np.array([[0, 3, 5], [1, -100, 4]], np.int32)
COLUMNS = np.zeros((2, 3, 2), np.int32)
MASK = np.arange(8) < np.array([[[3], [5], [8]], [[8], [0], [2]]])
SEGMENTS = (
    np.array([[0, 0, 0, 1, 1, 1]] * 2, np.int32),
    np.array([[2, 0, 0, 1, 1, 1]] * 2, np.int32),
)
IS_MASKED = np.arange(8) >= 6


def masked_logits(logits: Any, **options: Any) -> Any:
    return pb.cross_entropy(logits, LABELS, **options)


def masked_logits_with_outputs(logits: Any, **options: Any) -> Any:
    more = {"return_entropy": True, "return_correct": True, "return_lse": True}
    return pb.cross_entropy(logits, LABELS, columns=COLUMNS, **more, **options)


def masked_entries(logits: Any, **options: Any) -> Any:
    labels = np.zeros((2, 3), np.int32)
    optax = pb.optax.softmax_cross_entropy_with_integer_labels
    return optax(logits, labels, where=MASK, **options)


def masked_columns(hidden: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return pb.linear_cross_entropy(hidden, weight, LABELS, bias=bias, **options)


def masked_columns_with_outputs(hidden: Any, weight: Any, bias: Any, **options: Any) -> Any:
    more = {"return_entropy": True, "columns": COLUMNS, "reduction": "none"}
    return pb.linear_cross_entropy(hidden, weight, LABELS, bias=bias, **more, **options)


def early_queries(q: Any, k: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, k, causal=True, softcap=2.0, **options)


def other_segments(q: Any, k: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, k, segment_ids=SEGMENTS[::-1], **options)


def padding_queries(q: Any, k: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, k, q_lengths=np.array([3, 6], np.int32), **options)


def padding_of_packed(q: Any, k: Any, **options: Any) -> Any:
    ends = np.array([0, 2, 2, 5], np.int32)
    return pb.flash_attention(q[0], k[0], k[0], q_cumulative=ends, **options)


# Functions in which there are infinities, or NaN of tokens that take no part, and none in results.
SPECIAL: dict[str, tuple[Callable[..., Any], Any, tuple[tuple[int, ...], ...]]] = {
    "masked logits": (masked_logits, {}, ((2, 3, 8),)),
    "masked logits, by token": (masked_logits, {"reduction": "none"}, ((2, 3, 8),)),
    "masked logits with outputs": (masked_logits_with_outputs, {}, ((2, 3, 8),)),
    "masked entries": (masked_entries, {}, ((2, 3, 8),)),
    "masked columns": (masked_columns, {}, ((2, 3, 16), (8, 16), (8,))),
    "masked columns, few bytes": (
        masked_columns,
        {"max_scratch_bytes": 1600},
        ((2, 3, 16), (8, 16), (8,)),
    ),
    "masked columns with outputs": (
        masked_columns_with_outputs,
        {},
        ((2, 3, 16), (8, 16), (8,)),
    ),
    "early queries": (early_queries, {}, ((2, 8, 2, 8), (2, 6, 1, 8))),
    "other segments": (other_segments, {}, ((2, 6, 2, 8), (2, 6, 1, 8))),
    "padding": (padding_queries, {}, ((2, 6, 2, 8), (2, 6, 1, 8))),
    "padding of packed texts": (padding_of_packed, {}, ((1, 6, 2, 8), (1, 6, 1, 8))),
}
WITH_INFINITIES = ("masked logits", "masked columns")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SPECIAL)
def test_infinities_within_an_operation_are_no_errors(
    name: str, implementation: str, rng: np.random.Generator
) -> None:
    function, options, shapes = SPECIAL[name]
    options = {**options, **named(implementation)}
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    tangents = [jnp.ones_like(one) for one in arrays]
    if name.startswith(WITH_INFINITIES):
        arrays[-1] = jnp.where(IS_MASKED, -jnp.inf, arrays[-1])

    def value(*arrays: Any) -> jax.Array:
        found = jax.tree.leaves(function(*arrays, **options))
        return sum((one.astype(jnp.float32).sum() for one in found), jnp.float32(0))

    every = tuple(range(len(arrays)))
    right = jax.jit(jax.value_and_grad(value, every))(*arrays)
    with no_special_numbers():
        found = jax.value_and_grad(value, every)(*arrays)
        if implementation == "custom_call":
            jax.jvp(value, arrays, tangents)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_special_numbers_in_results_are_errors(
    implementation: str, rng: np.random.Generator
) -> None:
    q, k = (jnp.asarray(rng.normal(size=(2, 6, 2, 8)), jnp.float32) for _ in range(2))
    logits = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32)
    outside = np.full((2, 3), 9, np.int32)
    with no_special_numbers():
        with pytest.raises(FloatingPointError, match="inf"):
            padding_queries(q, k, return_lse=True, implementation=implementation)
        with pytest.raises(FloatingPointError, match="nan"):
            pb.cross_entropy(logits, outside, implementation=implementation)


def kinds(array: jax.Array) -> Iterator[tuple[str, Any]]:
    """Yields what may stand for an array."""
    given = np.asarray(array)
    yield "numpy", given
    fixed = given.copy()
    fixed.flags.writeable = False
    yield "read-only", fixed
    yield "columns first", np.asfortranarray(given)
    yield "strided", np.repeat(given, 2, axis=-1)[..., ::2]
    yield "backwards", np.flip(given, -1).copy()[..., ::-1]
    yield "list", given.tolist()


@pytest.mark.parametrize("case", one_an_operation(NAMED))
def test_arrays_are_of_every_kind(case: Case, rng: np.random.Generator) -> None:
    # Of a list, JAX makes float32.
    arrays = case.arrays(rng)
    if case.name == "flash_attention of packed texts":
        # The case looks at the shape of q.
        every: Any = [[*kinds(one)][:-1] for one in arrays]
    else:
        every = [[*kinds(one)] for one in arrays]
    right = case.outputs(*arrays)
    for alternative in zip(*every, strict=True):
        found = case.outputs(*(one for _, one in alternative))
        for one, other in zip(found, right, strict=True):
            assert one.dtype == other.dtype, alternative[0][0]
            np.testing.assert_array_equal(one, other, err_msg=alternative[0][0])


def test_weak_types_are_those_of_arrays() -> None:
    # A Python number times an array of ones is one of these.
    weak = jnp.full((2, 8), 0.5)
    assert jax.typeof(weak).weak_type
    found = jax.jit(jax.grad(lambda x: pb.rms_norm(x, x[0]).sum()))(weak)
    assert found.dtype == jnp.float32
    loss = pb.cross_entropy(weak, jnp.zeros(2, int))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(8), rtol=1e-6)
    assert pb.gelu(0.0).shape == ()
    assert pb.gelu(np.float32(1)) == pb.gelu(jnp.float32(1)) == pb.gelu(1.0)
    np.testing.assert_array_equal(
        pb.rope(weak[:, None], offset=np.int64(3)), pb.rope(weak[:, None], offset=3)
    )


# What takes no float64 at all.
NEVER_WIDE = ("linear_", "gated_delta", "flash_", "paged_", "fp8_", "rms_norm_fp8", "swiglu_fp8")


@pytest.mark.parametrize("case", one_an_operation(NAMED))
def test_float64_is_refused_by_kernels(case: Case, rng: np.random.Generator) -> None:
    with wide_types():
        arrays = [
            jnp.asarray(one, jnp.float64) if jnp.issubdtype(one.dtype, jnp.floating) else one
            for one in case.arrays(rng)
        ]
        if "two arrays" not in case.name:
            with pytest.raises(
                TypeError, match=r"float64; it must be bfloat16, float16 or float32"
            ):
                case.outputs(*arrays)
        options = {"implementation": "reference"}
        if case.name.startswith(NEVER_WIDE):
            with pytest.raises(TypeError, match="float64"):
                case.outputs(*arrays, **options)
        else:
            lower(case, options, *arrays)
