"""What JAX's caches know calls by: calls that differ are others, and equal calls are one.

Results may not depend on what ran before, and no cache holds an array.
"""

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import CASES, Case, Options, one_an_implementation
from pallas_bridge._src.bound import Bound
from pallas_bridge._src.custom_call import Call
from pallas_bridge._src.linear import _Map

# For time: thousands of programs, each compiled for one primitive.
ON_CPU = pytest.mark.only("cpu", "JAX's caches are the same for every platform")
EACH = one_an_implementation(pytest.param(one, id=one.name) for one in CASES)


def variants(case: Case) -> Sequence[Options]:
    return case.variants or ({},)


def results(case: Case, options: Options, arrays: Any) -> list[jax.Array]:
    """Results and gradients."""
    found = case.outputs(*arrays, **options)
    if case.has_gradient:
        found += case.gradients(*arrays, **options)
    return found


def test_no_field_is_left_out_of_a_comparison() -> None:
    for kind in (Call, _Map, Bound):
        assert all(one.compare for one in dataclasses.fields(kind)), kind


@pytest.fixture(autouse=True)
def garbage_is_of_this_test() -> None:
    """Has the garbage collector pass over what JAX and other tests hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def in_both_orders(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Arrays of each case under test, and bits of its variants, run eagerly in either order."""
    tests = (one for one in request.session.items if one.path == request.path)
    given = (one.callspec.params.get("case") for one in tests if hasattr(one, "callspec"))
    cases = [*dict.fromkeys(case for case in given if case is not None)]
    seed = np.random.SeedSequence().entropy
    print(f"seed: {seed}")
    rng = np.random.default_rng(seed)
    arrays = {case.name: case.arrays(rng) for case in cases}
    pairs = [(case, number) for case in cases for number in range(len(variants(case)))]
    found = []
    for order in (pairs, pairs[::-1]):
        jax.clear_caches()
        found.append(
            {
                (case.name, number): [
                    np.asarray(one)
                    for one in results(case, variants(case)[number], arrays[case.name])
                ]
                for case, number in order
            }
        )
    yield arrays, *found


@ON_CPU
@pytest.mark.fixed
@pytest.mark.parametrize("case", EACH)
def test_results_do_not_depend_on_what_ran_before(in_both_orders: Any, case: Case) -> None:
    _, forward, backward = in_both_orders
    for number in range(len(variants(case))):
        for one, other in zip(forward[case.name, number], backward[case.name, number], strict=True):
            assert one.tobytes() == other.tobytes(), variants(case)[number]


@ON_CPU
@pytest.mark.fixed
@pytest.mark.parametrize("case", EACH)
def test_variants_differ_eagerly_and_in_one_program(in_both_orders: Any, case: Case) -> None:
    arrays, forward, _ = in_both_orders
    given = arrays[case.name]
    program = jax.jit(lambda *a: [results(case, one, a) for one in variants(case)])
    for number, found in enumerate(program(*given)):
        expected = forward[case.name, number]
        if number:
            pairs = zip(expected, forward[case.name, 0], strict=True)
            assert any(one.tobytes() != other.tobytes() for one, other in pairs), (
                f"{variants(case)[number]} changes nothing, and tells calls from no other"
            )
        for one, other in zip(found, expected, strict=True):
            scale = max(np.abs(np.asarray(other, np.float64)).max(initial=0), 1)
            np.testing.assert_allclose(
                np.asarray(one, np.float64), np.asarray(other, np.float64), atol=2e-5 * scale
            )


# Programs that XLA has compiled. JAX has no public way to take a listener back.
COMPILED: list[str] = []


def _listen(name: str, _: float, **__: Any) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.mark.fixed
@pytest.mark.parametrize("case", EACH)
def test_the_same_call_is_compiled_once_and_keeps_nothing(
    rng: np.random.Generator, case: Case
) -> None:
    for _ in range(2):
        results(case, {}, case.arrays(rng))
    arrays = case.arrays(rng)
    gc.collect()
    before = len(COMPILED), len(jax.live_arrays())
    for _ in range(3):
        results(case, {}, arrays)
        gc.collect()
    assert (len(COMPILED), len(jax.live_arrays())) == before


@pytest.mark.fixed
@pytest.mark.parametrize("case", EACH)
def test_programs_traced_anew_keep_nothing(rng: np.random.Generator, case: Case) -> None:
    arrays = case.arrays(rng)
    gc.collect()
    before = len(jax.live_arrays())
    # Functions that no cache knows, traced and not compiled.
    jax.make_jaxpr(lambda *a: results(case, {}, a))(*arrays)
    with jax.checking_leaks():
        jax.make_jaxpr(lambda *a: jnp.stack([case.value(*a)]))(*arrays)
    gc.collect()
    assert len(jax.live_arrays()) == before
