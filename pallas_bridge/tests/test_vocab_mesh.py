"""Losses of a vocabulary that is sharded over a mesh, and what devices exchange for them."""

import dataclasses
import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import NAMES, WAYS, by_shardy, exchanged, mesh_of
from oracle import Oracle

from pallas_bridge import cross_entropy, cross_entropy_per_token, linear_cross_entropy

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.only("cpu", "no kernel knows of the mesh"),
]

# XLA finds out by itself, too.
OF_LOGITS = [*WAYS, "found"]
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 20.0}


@dataclasses.dataclass
class Problem:
    """A loss over logits, sharded over a mesh."""

    logits: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    options: dict[str, Any]
    mesh: jax.sharding.Mesh
    way: str
    tokens: Any = "data"
    columns: Any = "vocab"

    def place(self, x: Any, *spec: Any) -> jax.Array:
        """Cuts an array over the mesh."""
        return jax.device_put(x, NamedSharding(self.mesh, P(*spec)))

    def outputs(self, z: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        """Loss, logps and lse of every token, of logits and labels that are placed."""
        f = partial(cross_entropy_per_token, return_lse=True, **self.options)
        if self.way in ("explicit", "found"):
            return f(z, y)
        f = partial(f, axis_name=self.columns)
        if self.way == "auto":
            return f(z, y)
        tokens = P(self.tokens)
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=(P(self.tokens, self.columns), tokens),
            out_specs=(tokens,) * 3,
            check_vma=self.way == "checked",
        )(z, y)

    def pulled(self, cotangents: Any) -> tuple[Any, Any, str]:
        """The outputs, their gradient, and the compiled program of both."""

        def f(z: jax.Array, y: jax.Array, c: Any) -> Any:
            outputs, vjp = jax.vjp(lambda z: self.outputs(z, y), z)
            return outputs, vjp(tuple(c))[0]

        with jax.set_mesh(self.mesh):
            z = self.place(self.logits, self.tokens, self.columns)
            y, *c = (self.place(x, self.tokens) for x in (self.labels, *cotangents))
            compiled = jax.jit(f).lower(z, y, c).compile()
            outputs, gradient = compiled(z, y, c)
            assert gradient.sharding.is_equivalent_to(z.sharding, 2)
            return outputs, gradient, compiled.as_text()


def draw(rng: np.random.Generator, tokens: int, vocab: int, real: int | None = None) -> Any:
    """Logits, of which the last are padding, with labels and cotangents of every kind."""
    logits = 3 * rng.normal(size=(tokens, vocab)).astype(np.float32)
    logits[:, real or vocab :] = -np.inf
    labels = rng.integers(0, real or vocab, tokens).astype(np.int32)
    labels[1] = -100
    cotangents = rng.normal(size=(3, tokens)).astype(np.float32)
    cotangents[:, 2] = 0
    return logits, labels, cotangents


def check(problem: Problem, cotangents: Any, rtol: float = 2e-5, atol: float = 1e-6) -> str:
    """Compares with the contract in float64."""
    expected = Oracle(problem.logits, problem.labels, **problem.options)
    outputs, gradient, program = problem.pulled(cotangents)
    for name, one in zip(("loss", "logps", "lse"), outputs, strict=True):
        of = np.maximum(expected.__dict__["size"], 1)
        np.testing.assert_allclose(
            np.asarray(one, np.float64) / of, expected.__dict__[name] / of, rtol=1e-6, atol=1e-6
        )
    wanted = expected.gradient(*cotangents)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, rtol=rtol, atol=atol)
    return program


@pytest.mark.parametrize("way", OF_LOGITS)
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)], ids=str)
def test_logits_stay_where_they_are(
    rng: np.random.Generator, way: str, shape: tuple[int, int]
) -> None:
    logits, labels, cotangents = draw(rng, 16, 72)
    problem = Problem(logits, labels, EVERYTHING, mesh_of(shape, way), way)
    found = exchanged(check(problem, cotangents))
    # Numbers of a device's tokens, and nothing else.
    assert {*found} <= {"all-reduce"} and max(found.values(), default=0) <= 16 // shape[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["logits", "weight"])
def test_an_axis_of_one_device_changes_nothing(rng: np.random.Generator, way: str, of: str) -> None:
    mesh = mesh_of((8, 1), way)
    logits, labels, _ = draw(rng, 16, 72)
    hidden, weight = rng.normal(size=(16, 24)), rng.normal(size=(72, 24))
    given, specs = [logits], [P("data", "vocab")]
    if of == "weight":
        given, specs = [hidden, weight], [P("data"), P("vocab")]
    given = [jnp.asarray(x, jnp.float32) for x in given]
    loss = cross_entropy if of == "logits" else partial(linear_cross_entropy, vocab_axis=0)

    def run(*arrays: Any, **more: Any) -> Any:
        return loss(*arrays, reduction="sum", return_lse=True, return_correct=True, **more)

    def over_mesh(f: Any, *arrays: Any) -> Any:
        if way == "explicit":
            return f(*arrays)
        f = partial(f, axis_name="vocab")
        if way == "auto":
            return f(*arrays)

        def run_shard(*arrays: Any) -> Any:
            total, *others = f(*arrays)
            return jax.lax.psum(total, "data"), *others

        return jax.shard_map(
            run_shard,
            mesh=mesh,
            in_specs=(*specs, P("data")),
            out_specs=(P(), P("data"), P("data")),
            check_vma=way == "checked",
        )(*arrays)

    def lse_alone(*arrays: Any, **more: Any) -> Any:
        total, lse = loss(*arrays, reduction="sum", return_lse=True, **more)
        return total, lse, lse > 1

    for f in (run, lse_alone):
        moving = tuple(range(len(given)))
        changed = partial(jax.value_and_grad, argnums=moving, has_aux=True)
        expected = changed(lambda *x, f=f: (f(*x)[0], f(*x)[1:]))(*given, labels)
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip((*given, labels), (*specs, P("data")), strict=True)
            ]

            def total(*x: Any, f: Any = f) -> Any:
                first, *others = over_mesh(f, *x)
                return first, tuple(others)

            compiled = jax.jit(changed(total)).lower(*placed).compile()
            found = compiled(*placed)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, found, expected)
        program = compiled.as_text()
        if of == "logits":
            assert exchanged(program) == {"all-reduce": 1}
        else:
            # What tokens share, and nothing of theirs.
            assert exchanged(program) == {"all-reduce": 72 * 24}
            # The transpose of what `shard_map` is given, where it keeps no track.
            assert way == "unchecked" or not re.search(r"f32\[2,24\]\S* all-reduce\(", program)
        # One pass, and not the two of parts.
        assert f is run or "xentile_cross_entropy_fused" in program


@pytest.mark.parametrize("way", OF_LOGITS)
def test_padding_and_what_no_finite_sum_has(rng: np.random.Generator, way: str) -> None:
    # 19 columns over 8 devices, of 3 each: the seventh has one, and the last nothing.
    logits, labels, cotangents = draw(rng, 8, 24, 19)
    logits += 1e3  # where f32 has steps of 6e-5
    labels[3:6] = 24, -7, 2**31 - 1
    logits[6, 4] = np.nan
    logits[7] = -np.inf
    problem = Problem(logits, labels, {}, mesh_of((1, 8), way), way)
    check(problem, cotangents, rtol=3e-6, atol=2e-7)


@pytest.mark.parametrize("way", ["auto", "explicit", "found"])
def test_both_axes_of_a_mesh_shard_the_vocabulary(rng: np.random.Generator, way: str) -> None:
    logits, labels, cotangents = draw(rng, 6, 8 * 4100)
    options = {"label_smoothing": 0.2}
    problem = Problem(logits, labels, options, mesh_of((2, 4), way), way, None, NAMES)
    found = exchanged(check(problem, cotangents))
    assert {*found} == {"all-reduce"} and max(found.values()) <= 6


@pytest.mark.few(2)
@pytest.mark.parametrize("way", OF_LOGITS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reductions_and_weights(rng: np.random.Generator, way: str, dtype: Any) -> None:
    mesh = mesh_of((2, 4), way)
    logits, labels, _ = draw(rng, 16, 40)
    logits, labels = jnp.asarray(logits - logits.min(), dtype), labels.reshape(4, 4)
    logits, weights = logits.reshape(4, 4, 40), rng.random((4, 4)).astype(np.float32)
    weights[2] = 0

    def local(z: Any, y: Any, w: Any, reduction: Any, **more: Any) -> Any:
        loss = cross_entropy(z, y, weights=w, reduction=reduction, **EVERYTHING, **more)
        return loss

    def over_mesh(z: Any, y: Any, w: Any, reduction: Any) -> Any:
        if way in ("explicit", "found"):
            return local(z, y, w, reduction)
        f = partial(local, axis_name="vocab")
        if way == "auto":
            return f(z, y, w, reduction)

        def run_shard(z: Any, y: Any, w: Any) -> Any:
            total = jax.lax.psum(f(z, y, w, "sum"), "data")
            if reduction != "mean":
                return total
            return total / jax.lax.psum(jnp.where(y == -100, 0, w).sum(), "data")

        return jax.shard_map(
            run_shard,
            mesh=mesh,
            in_specs=(P("data", None, "vocab"), P("data"), P("data")),
            out_specs=P(),
            check_vma=way == "checked",
        )(z, y, w)

    for reduction in ("mean", "sum"):
        expected = jax.value_and_grad(local, (0, 2))(logits, labels, weights, reduction)
        with jax.set_mesh(mesh):
            # What has a number a token may lie anywhere.
            placed = (
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in (
                    (logits, P("data", None, "vocab")),
                    (labels, P()),
                    (weights, P("data")),
                )
            )
            f = jax.jit(jax.value_and_grad(partial(over_mesh, reduction=reduction), (0, 2)))
            loss, (dlogits, dweights) = f(*placed)
        np.testing.assert_allclose(loss, expected[0], rtol=2e-6)
        of_logits, of_weights = expected[1]
        np.testing.assert_allclose(dweights, of_weights, rtol=1e-5, atol=1e-6)
        wide = (np.asarray(x, np.float64) for x in (dlogits, of_logits))
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(*wide, rtol=eps, atol=2e-8 if dtype == jnp.bfloat16 else 1e-7)


@pytest.mark.slow
def test_transformations(rng: np.random.Generator) -> None:
    mesh = mesh_of((2, 4), "auto")
    logits, labels, _ = draw(rng, 24, 40)
    z, y = jnp.asarray(logits).reshape(3, 8, 40), jnp.asarray(labels).reshape(3, 8)

    def whole(z: Any, y: Any) -> Any:
        return cross_entropy(z, y, **EVERYTHING)

    def auto(z: Any, y: Any) -> Any:
        return cross_entropy(z, y, axis_name="vocab", **EVERYTHING)

    def run_shard(z: Any, y: Any) -> Any:
        return jax.lax.pmean(auto(z, y), "data")

    y = y.at[y < 0].set(0)  # as many tokens count on each device
    devices = jax.shard_map(
        run_shard, mesh=mesh, in_specs=(P("data", "vocab"), P("data")), out_specs=P()
    )

    def total(f: Any, z: Any, y: Any) -> Any:
        return f(z, y).sum()

    def summed(f: Any) -> Any:
        def total(z: Any, y: Any) -> Any:
            return jax.lax.scan(lambda sum_, zy: (sum_ + f(*zy), None), 0.0, (z, y))[0]

        return total

    tangent = jnp.asarray(rng.normal(size=(8, 40)), jnp.float32)

    def every(f: Any, z: Any, y: Any) -> Any:
        changed = f, jax.checkpoint(f)
        of = [*map(jax.vmap, changed), summed(f)]
        along = jax.jvp(lambda z: f(z, y[0]), (z[0],), (tangent,))
        return [jax.value_and_grad(partial(total, one))(z, y) for one in of], along

    expected = jax.jit(partial(every, whole))(z, y)
    for f in (auto, devices, whole):
        with jax.set_mesh(mesh):
            spec = P(None, "data", None if f is devices else "vocab")
            found = jax.jit(partial(every, f))(jax.device_put(z, NamedSharding(mesh, spec)), y)
            close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
            jax.tree.map(close, found, expected)
            with pytest.raises(NotImplementedError, match="second derivatives"):
                jax.jit(jax.hessian(lambda z, f=f: f(z, y[0])))(z[0])


@pytest.mark.parametrize("partitioner", [True, False], ids=["shardy", "gspmd"])
def test_either_partitioner(rng: np.random.Generator, partitioner: bool) -> None:
    logits, labels, cotangents = draw(rng, 16, 64)
    mesh = mesh_of((2, 4), "auto")
    with by_shardy(partitioner):
        found = exchanged(check(Problem(logits, labels, {}, mesh, "auto"), cotangents))
    assert {*found} == {"all-reduce"} and max(found.values()) <= 8


def test_a_program_over_a_mesh_is_exported(rng: np.random.Generator) -> None:
    logits, labels, _ = draw(rng, 8, 64)
    mesh = mesh_of((2, 4), "auto")
    f = jax.jit(jax.value_and_grad(partial(cross_entropy, axis_name="vocab", z_loss=0.1)))
    targets = ("xentile_cross_entropy_forward", "xentile_cross_entropy_backward")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    with jax.set_mesh(mesh):
        given = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in (
                ((8, 64), jnp.float32, P("data", "vocab")),
                ((8,), jnp.int32, P("data")),
            )
        ]
        program = jax.export.export(f, disabled_checks=checks)(*given).serialize()
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((logits, P("data", "vocab")), (labels, P("data")))
        ]
        call = jax.jit(jax.export.deserialize(program).call)
        loss, gradient = call(*placed)
        assert {*exchanged(call.lower(*placed).compile().as_text())} == {"all-reduce"}
    expected = jax.value_and_grad(partial(cross_entropy, z_loss=0.1))(logits, labels)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-8)


def compiled(f: Any, *given: tuple[Any, P]) -> tuple[Any, dict[str, int], list[str]]:
    """A compiled function of arrays with how each is sharded, its exchanges, and the warnings."""
    mesh = mesh_of((2, 4), "auto")
    # The mesh is not set: types tell it.
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in given]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        program = jax.jit(f).lower(*placed).compile()
    return program(*placed), exchanged(program.as_text()), [str(one.message) for one in warned]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.slow
def test_xla_finds_parts_of_a_product(rng: np.random.Generator, reduction: Any) -> None:
    """Of logits of a weight that is sharded, with everything that is known of tokens."""
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 8, 16), (64, 16)))
    y, columns = (rng.integers(0, 64, (2, 8, *more)).astype(np.int32) for more in ((), (3,)))

    def sum_losses(x: Any, w: Any, y: Any, columns: Any) -> Any:
        more = {"return_lse": True, "return_entropy": True, "return_correct": True}
        loss, *known = cross_entropy(x @ w.T, y, reduction=reduction, columns=columns, **more)
        return loss.sum() + known[1].sum() + known[3].sum(), (loss, known)

    def loss(*given: Any) -> Any:
        totals, aux = jax.vmap(sum_losses, (0, None, 0, 0))(*given)
        return totals.sum(), aux

    f = jax.value_and_grad(loss, (0, 1), has_aux=True)
    tokens = P(None, "data")
    given = ((x, tokens), (w, P("vocab")), (y, tokens), (columns, tokens))
    found, exchanges, warned = compiled(f, *given)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, f(x, w, y, columns))
    # Of a device's tokens dhidden, and what they have of dweight.
    assert warned == [] and {*exchanges} == {"all-reduce"}
    assert max(exchanges.values()) <= max(2 * 4 * 16, 64 // 4 * 16)


def test_columns_that_devices_do_not_divide_are_gathered_and_told_of() -> None:
    def f(z: Any, y: Any) -> Any:
        return cross_entropy(jax.lax.slice_in_dim(z, 0, 62, axis=1), y)

    z = jnp.asarray(np.arange(512).reshape(8, 64) % 7, jnp.float32)
    y = jnp.arange(8, dtype=jnp.int32)
    found, exchanges, (warned, *_) = compiled(f, (z, P("data", "vocab")), (y, P("data")))
    np.testing.assert_allclose(found, f(z, y), rtol=1e-6)
    assert "all-gather" in exchanges
    assert "4 devices, which do not divide its 62 columns" in warned and "to 64 columns" in warned


def test_programs_that_are_kept_on_disk_or_pickled(tmp_path: Any) -> None:
    """Parts are found whether JAX's cache on disk is on or not."""
    z, y = jnp.ones((8, 64)), jnp.zeros(8, jnp.int32)
    given = (z, P("data", "vocab")), (y, P("data"))
    name = "jax_compilation_cache_dir"
    try:
        jax.config.update(name, str(tmp_path))
        _, exchanges, warned = compiled(cross_entropy, *given)
        assert "all-gather" not in exchanges and warned == []
    finally:
        jax.config.update(name, None)
    mesh = mesh_of((2, 4), "auto")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in given]
    program = jax.jit(cross_entropy).lower(*placed).compile()
    again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(program))
    np.testing.assert_array_equal(again(*placed), program(*placed))


@pytest.mark.slow
def test_arrays_that_are_there_tell_themselves(rng: np.random.Generator) -> None:
    """Without `jit`, nothing need be said of an array's vocabulary."""
    logits, labels, _ = draw(rng, 8, 64)
    mesh = mesh_of((2, 4), "auto")
    placed = jax.device_put(logits, NamedSharding(mesh, P("data", "vocab")))
    expected = cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(cross_entropy(placed, labels, reduction="none"), expected, rtol=1e-6)


def test_axes_and_vocabularies_that_do_not_fit_are_refused() -> None:
    z, y = jnp.zeros((8, 30)), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match=r"'model', which is no axis here.*set_mesh"):
        cross_entropy(z, y, axis_name="model")
    with pytest.raises(TypeError, match="axis_name is 3"):
        cross_entropy(z, y, axis_name=3)
    with pytest.raises(ValueError, match="each name once"):
        cross_entropy(z, y, axis_name=("vocab", "vocab"))
    with pytest.raises(ValueError, match=r"'part' an axis of jax.vmap; .* jax.shard_map"):
        jax.vmap(partial(cross_entropy, axis_name="part"), (1, None), axis_name="part")(
            z.reshape(8, 2, 15), y
        )
    with jax.set_mesh(mesh_of((2, 4), "auto")):
        with pytest.raises(ValueError, match=r"'model'.*'data', 'vocab'"):
            cross_entropy(z, y, axis_name="model")
        with pytest.raises(ValueError, match=r"30 columns, which the 4 devices.*pad it to 32"):
            cross_entropy(z, y, axis_name="vocab")
    mesh = mesh_of((2, 4), "explicit")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(z, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"axis_name is 'vocab' and logits.*P.*reshard"):
            jax.jit(partial(cross_entropy, axis_name="vocab"))(sharded, y)
