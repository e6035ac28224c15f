"""Linear losses whose weight is sharded over a mesh, and what devices exchange for them."""

import dataclasses
import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import WAYS, by_shardy, exchanged, mesh_of
from oracle import Oracle

from pallas_bridge import linear_cross_entropy, linear_cross_entropy_per_token

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.only("cpu", "no kernel knows of the mesh"),
]

# XLA finds out by itself, too.
OF_WEIGHT = [*WAYS, "found"]
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 20.0}


def names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@dataclasses.dataclass
class Problem:
    """A loss of hidden states [N, D] and a weight [V, D] over a mesh."""

    hidden: Any
    weight: Any
    bias: Any
    labels: Any
    mesh: jax.sharding.Mesh
    way: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # What shards tokens, the vocabulary, and D of hidden and of the weight.
    tokens: Any = "data"
    columns: Any = "vocab"
    of_hidden: Any = None
    of_weight: Any = None
    vocab_axis: int = 0
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def specs(self) -> tuple[P, P, P, P]:
        """How hidden, weight, bias and labels lie."""
        weight = (self.columns, self.of_weight)
        weight = weight if self.vocab_axis == 0 else weight[::-1]
        tokens = P(self.tokens)
        return P(self.tokens, self.of_hidden), P(*weight), P(self.columns), tokens

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """As they are given."""
        weight = self.weight if self.vocab_axis == 0 else self.weight.T
        return self.hidden, weight, self.bias, self.labels

    def over_mesh(self, f: Any) -> Any:
        """A function of arrays and whatever tokens have, that gives what tokens have."""
        if self.way in ("explicit", "found"):
            return f
        f = partial(f, axis_name=names(self.columns))
        if self.way == "auto":
            return f
        tokens = P(self.tokens)

        def mapped(*arrays: Any) -> Any:
            return jax.shard_map(
                f,
                mesh=self.mesh,
                in_specs=(*self.specs, *[tokens] * (len(arrays) - 4)),
                out_specs=(tokens,) * 3,
                check_vma=self.way == "checked",
            )(*arrays)

        return mapped

    def per_token(self, h: Any, w: Any, b: Any, y: Any, **more: Any) -> Any:
        """Loss, logps and lse."""
        return linear_cross_entropy_per_token(
            h,
            w,
            y,
            bias=b,
            return_lse=True,
            vocab_axis=self.vocab_axis,
            **self.options,
            **self.more,
            **more,
        )

    def check(self, cotangents: Any, rtol: float = 1e-4, atol: float = 1e-5) -> str:
        """Compares with float64, and returns the compiled program."""

        def f(h: Any, w: Any, b: Any, y: Any, c: Any) -> Any:
            of = self.over_mesh(self.per_token)
            outputs, vjp = jax.vjp(lambda h, w, b: of(h, w, b, y), h, w, b)
            return outputs, vjp(tuple(c))

        with jax.set_mesh(self.mesh):
            placed = [
                jax.device_put(x, NamedSharding(self.mesh, spec))
                for x, spec in zip(self.arrays, self.specs, strict=True)
            ]
            tokens = NamedSharding(self.mesh, P(self.tokens))
            c = [jax.device_put(x, tokens) for x in cotangents]
            compiled = jax.jit(f).lower(*placed, c).compile()
            outputs, gradients = compiled(*placed, c)
        h, w, b = (np.asarray(x, np.float64) for x in (self.hidden, self.weight, self.bias))
        with np.errstate(invalid="ignore"):
            expected = Oracle(h @ w.T + b, self.labels, **self.options)
            dz = expected.gradient(*cotangents)
        masked = (np.asarray(cotangents) == 0).all(0) | (self.labels == -100)
        h = np.where(masked[:, None], 0, h)
        wanted = [dz @ w, dz.T @ h, dz.sum(0)]
        wanted[1] = wanted[1] if self.vocab_axis == 0 else wanted[1].T
        for name, one in zip(("loss", "logps", "lse"), outputs, strict=True):
            np.testing.assert_allclose(
                np.asarray(one, np.float64), expected.__dict__[name], rtol=rtol, atol=atol
            )
        for one, of in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one, np.float64), of, rtol=rtol, atol=atol)
        if self.way != "auto" or self.of_weight is None:
            # XLA may leave a gradient whole, of what it was left to shard.
            for one, given in zip(gradients[1:], placed[1:3], strict=True):
                assert one.sharding.is_equivalent_to(given.sharding, given.ndim)
        return compiled.as_text()


def draw(
    rng: np.random.Generator, tokens: int, vocab: int, width: int, real: int | None = None
) -> tuple[Any, ...]:
    """Hidden, weight, a bias that is -inf for padding, labels and cotangents of every kind."""
    hidden = rng.normal(size=(tokens, width)).astype(np.float32)
    weight = rng.normal(size=(vocab, width)).astype(np.float32) / np.sqrt(width)
    bias = rng.normal(size=vocab).astype(np.float32)
    bias[real or vocab :] = -np.inf
    labels = rng.integers(0, real or vocab, tokens).astype(np.int32)
    labels[1] = -100
    cotangents = rng.normal(size=(3, tokens)).astype(np.float32)
    cotangents[:, 2] = 0
    return hidden, weight, bias, labels, cotangents


@pytest.mark.parametrize("way", OF_WEIGHT)
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)], ids=str)
def test_the_weight_stays_where_it_is(
    rng: np.random.Generator, way: str, shape: tuple[int, int]
) -> None:
    *arrays, cotangents = draw(rng, 16, 72, 5)
    problem = Problem(*arrays, mesh_of(shape, way), way, EVERYTHING)
    found = exchanged(problem.check(cotangents))
    # dhidden where columns are sharded, and dweight where tokens are.
    of_hidden = 16 // shape[0] * 5
    of_weight = 72 // shape[1] * 5 if shape[0] > 1 else 0
    assert {*found} <= {"all-reduce"} and found["all-reduce"] <= max(of_hidden, of_weight)


@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_a_weight_sharded_over_its_width_is_gathered_once(
    rng: np.random.Generator, way: str
) -> None:
    *arrays, cotangents = draw(rng, 16, 64, 24)
    # Over devices with other tokens, alone and beside the vocabulary.
    for columns in (None, "vocab"):
        problem = Problem(*arrays, mesh_of((2, 4), way), way, {}, columns=columns, of_weight="data")
        program = problem.check(cotangents)
        found = exchanged(program)
        part = 64 * 24 // (4 if columns else 1)
        assert found["all-gather"] == part and program.count(" all-gather(") == 1
        assert found["all-reduce"] <= max(part, 8 * 24)
        assert found.get("reduce-scatter", part) <= part
        assert {*found} <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("way", ["explicit", "found"])
def test_a_vocabulary_sharded_over_devices_with_other_tokens_is_gathered(
    rng: np.random.Generator, way: str
) -> None:
    *arrays, cotangents = draw(rng, 16, 64, 24)
    mesh = mesh_of((2, 4), way)
    program = Problem(*arrays, mesh, way, EVERYTHING, columns="data").check(cotangents)
    # The weight, and beside it the bias.
    assert exchanged(program)["all-gather"] == 64 * 24 and program.count(" all-gather(") == 2
    # XLA for CPUs leaves a sum of which a part is taken as it is.
    assert way == "found" or exchanged(program)["reduce-scatter"] == 32 * 24


@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_hidden_states_sharded_over_their_width(rng: np.random.Generator, way: str) -> None:
    *arrays, cotangents = draw(rng, 16, 64, 24)
    mesh = mesh_of((2, 4), way)
    problem = Problem(*arrays, mesh, way, {}, columns=None, of_hidden="vocab", of_weight="vocab")
    if way == "explicit":
        with pytest.raises(ValueError, match=r"axis 1 of hidden.*reshard\(hidden, jax.P\("):
            problem.check(cotangents)
        return
    found = exchanged(problem.check(cotangents))
    assert {*found} <= {"all-gather", "all-reduce"}
    assert found["all-gather"] <= 64 * 24 and found["all-reduce"] <= 64 * 24


@pytest.mark.few(2)
@pytest.mark.parametrize("way", OF_WEIGHT)
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_padding_and_what_no_finite_sum_has(
    rng: np.random.Generator, way: str, vocab_axis: int
) -> None:
    # 19 columns over 8 devices, of 3 each: the seventh has one, and the last nothing.
    hidden, weight, bias, labels, cotangents = draw(rng, 8, 24, 7, 19)
    labels[3:6] = 24, -7, 2**31 - 1
    # What is NaN in a token is in the gradient of every column that counts.
    cotangents[:, 3:6] = 0
    arrays = hidden, weight, bias, labels, mesh_of((1, 8), way), way
    problem = Problem(*arrays, vocab_axis=vocab_axis)
    problem.check(cotangents)
    with jax.set_mesh(problem.mesh):
        placed = [
            jax.device_put(x, NamedSharding(problem.mesh, spec))
            for x, spec in zip(problem.arrays, problem.specs, strict=True)
        ]
        hidden[6] = np.nan
        placed[0] = jax.device_put(hidden, placed[0].sharding)
        loss, logps, lse = jax.jit(problem.over_mesh(problem.per_token))(*placed)
    wrong = np.isin(np.arange(8), [3, 4, 5, 6])
    assert (np.isnan(loss) == wrong).all() and (np.isnan(logps) == wrong).all()
    assert (np.isnan(lse) == (np.arange(8) == 6)).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("way", OF_WEIGHT)
def test_chunks_of_a_budget(rng: np.random.Generator, way: str) -> None:
    *arrays, cotangents = draw(rng, 96, 8 * 600, 16)
    mesh = mesh_of((2, 4), way)
    options = {"label_smoothing": 0.2}
    # Logits of a few tokens and columns at a time.
    more = {"max_scratch_bytes": 1 << 17}
    if way == "auto":
        # XLA, which shards the tokens, would move them from chunk to chunk.
        more = {}
    elif way == "found":
        # As little as does for all tokens and columns, which nobody has.
        more = {"max_scratch_bytes": 5 << 15}
    program = Problem(*arrays, mesh, way, options, more=more).check(cotangents, 1e-3, 1e-4)
    if way == "found":
        # dhidden of a device's tokens, and dweight of its columns.
        assert exchanged(program) == {"all-reduce": max(48 * 16, 8 * 600 // 4 * 16)}
        assert "xentile_linear_cross_entropy" in program


@pytest.mark.few(2)
@pytest.mark.parametrize("way", OF_WEIGHT)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_reductions_and_weights(rng: np.random.Generator, way: str, dtype: Any) -> None:
    mesh = mesh_of((2, 4), way)
    *arrays, _ = draw(rng, 16, 40, 24)
    hidden, weight = (jnp.asarray(x, dtype) for x in arrays[:2])
    hidden, labels = hidden.reshape(4, 4, 24), arrays[3].reshape(4, 4)
    weights = rng.random((4, 4)).astype(np.float32)
    weights[2] = 0

    def local(h: Any, w: Any, y: Any, c: Any, reduction: Any, **more: Any) -> Any:
        return linear_cross_entropy(h, w, y, weights=c, reduction=reduction, **EVERYTHING, **more)

    def over_mesh(h: Any, w: Any, y: Any, c: Any, reduction: Any) -> Any:
        if way in ("explicit", "found"):
            return local(h, w, y, c, reduction)
        f = partial(local, axis_name="vocab")
        if way == "auto":
            return f(h, w, y, c, reduction)

        def run_shard(h: Any, w: Any, y: Any, c: Any) -> Any:
            total = jax.lax.psum(f(h, w, y, c, "sum"), "data")
            if reduction != "mean":
                return total
            return total / jax.lax.psum(jnp.where(y == -100, 0, c).sum(), "data")

        return jax.shard_map(
            run_shard,
            mesh=mesh,
            in_specs=(P("data"), P("vocab"), P("data"), P("data")),
            out_specs=P(),
            check_vma=way == "checked",
        )(h, w, y, c)

    for reduction in ("mean", "sum"):
        given = hidden, weight, labels, weights
        value, gradients = jax.value_and_grad(local, (0, 1, 3))(*given, reduction)
        with jax.set_mesh(mesh):
            # What has a number a token may lie anywhere.
            specs = P("data"), P("vocab"), P(), P("data")
            placed = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(given, specs, strict=True)
            ]
            f = jax.jit(jax.value_and_grad(partial(over_mesh, reduction=reduction), (0, 1, 3)))
            loss, found = f(*placed)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        for one, of in zip(found, gradients, strict=True):
            wide = [np.asarray(x, np.float64) for x in (one, of)]
            # The derivative of a weight is a loss less the mean of others.
            size = np.abs(wide[1]).max() if of.dtype == dtype else 4
            # Four parts of dhidden are rounded before they are summed.
            eps = float(jnp.finfo(of.dtype if of.dtype == dtype else jnp.float32).eps)
            np.testing.assert_allclose(*wide, rtol=8 * eps, atol=4 * eps * size)


@pytest.mark.few(1)
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.slow
def test_a_named_axis_beside_others_takes_three_products(
    rng: np.random.Generator, in_chunks: bool
) -> None:
    mesh = mesh_of((2, 4), "auto")
    h, w, b, y, (c, of_lse, _) = draw(rng, 640, 320, 16, 301)
    budget = 400_000 if in_chunks else None

    def loss(h: Any, w: Any, b: Any, c: Any, **more: Any) -> Any:
        given = {"bias": b, "weights": c, "reduction": "sum", "return_lse": True, "z_loss": 1e-2}
        return linear_cross_entropy(h, w, y, **given, **more)

    def reduced(*arrays: Any, **more: Any) -> Any:
        return loss(*arrays, **more)[0]

    def with_lse(*arrays: Any, **more: Any) -> Any:
        value, lse = loss(*arrays, **more)
        return value + (lse * of_lse).sum()

    arrays = h, w, b, c
    specs = P("data"), P("vocab"), P("vocab"), P("data")
    for f in (reduced, with_lse):
        named = partial(f, axis_name="vocab", max_scratch_bytes=budget)
        dense = partial(f, implementation="reference")
        value, gradients = jax.value_and_grad(dense, (0, 1, 2, 3))(*map(jnp.asarray, arrays))
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            program = jax.jit(jax.value_and_grad(named, (0, 1, 2, 3))).lower(*placed).compile()
            loss_of, found = program(*placed)
        text = program.as_text()
        # For a cotangent of lse the backward pass makes them again, which XLA finds out.
        assert (" while(" in text) if in_chunks else text.count(" dot(") == 3
        assert exchanged(text).get("all-gather", 0) <= 640 * 16
        # Terms of both signs cancel: the sum is as exact as its terms.
        terms = np.log(301) * (np.abs(c) + np.abs(of_lse)).sum()
        np.testing.assert_allclose(loss_of, value, rtol=0, atol=1e-6 * terms)
        for one, of in zip(found, gradients, strict=True):
            np.testing.assert_allclose(one, of, rtol=1e-4, atol=1e-5 * float(jnp.abs(of).max()))


@pytest.mark.slow
def test_transformations(rng: np.random.Generator) -> None:
    mesh = mesh_of((2, 4), "auto")
    *arrays, _ = draw(rng, 24, 40, 12)
    h, w, b = (jnp.asarray(x) for x in arrays[:3])
    h, y = h.reshape(3, 8, 12), jnp.asarray(arrays[3]).reshape(3, 8)
    y = y.at[y < 0].set(0)  # as many tokens count on each device

    def whole(w: Any, h: Any, y: Any, **more: Any) -> Any:
        return linear_cross_entropy(h, w, y, bias=b[: len(w)], **EVERYTHING, **more)

    def run_shard(w: Any, b: Any, h: Any, y: Any) -> Any:
        loss = linear_cross_entropy(h, w, y, bias=b, axis_name="vocab", **EVERYTHING)
        return jax.lax.pmean(loss, "data")

    specs = P("vocab"), P("vocab"), P("data"), P("data")
    devices = jax.shard_map(run_shard, mesh=mesh, in_specs=specs, out_specs=P())

    def over_devices(w: Any, h: Any, y: Any) -> Any:
        return devices(w, b, h, y)

    def each(f: Any, w: Any) -> Any:
        return jax.vmap(lambda h, y: f(w, h, y))(h, y).sum()

    def scanned(f: Any, w: Any) -> Any:
        again = jax.checkpoint(f)
        return jax.lax.scan(lambda sum_, hy: (sum_ + again(w, *hy), None), 0.0, (h, y))[0]

    tangent = jnp.asarray(rng.normal(size=w.shape), jnp.float32)

    def along(f: Any, w: Any) -> Any:
        return jax.jvp(lambda w: f(w, h[0], y[0]), (w,), (tangent,))

    changes = [jax.value_and_grad(partial(change, whole)) for change in (each, scanned)]
    expected = jax.jit(lambda w: [*(change(w) for change in changes), along(whole, w)])(w)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, NamedSharding(mesh, P("vocab")))
        for f in (partial(whole, axis_name="vocab"), over_devices, whole):
            of = [jax.value_and_grad(partial(change, f)) for change in (each, scanned)]
            found = jax.jit(lambda w, of=of, f=f: [*(one(w) for one in of), along(f, w)])(sharded)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab", [70, 72])
@pytest.mark.slow
def test_parts_that_do_not_fit(rng: np.random.Generator, vocab: int) -> None:
    """Of tokens that devices do not divide, and columns that they may, of each of two problems."""
    h, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 16, 12), (72, 12)))
    y = rng.integers(0, vocab, (2, 16)).astype(np.int32)

    def loss(h: Any, w: Any, y: Any) -> Any:
        w = w[:vocab] * 2

        def sum_losses(h: Any, y: Any) -> Any:
            # With NaN for what fills up arrays, if anything took it.
            h, y = jnp.log(h[:13] + 100) * h[:13], y[:13]
            loss, *more = linear_cross_entropy(h, w, y, return_lse=True)
            known = linear_cross_entropy(h, w, y, reduction="none", return_entropy=True)
            return loss + sum(one.sum() for one in (*more, *known))

        return jax.vmap(sum_losses)(h, y).sum()

    f = jax.jit(jax.value_and_grad(loss, (0, 1)))
    mesh = mesh_of((2, 4), "auto")
    specs = P(None, "data"), P("vocab"), P(None, "data")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((h, w, y), specs, strict=True)
    ]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = f(*placed)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, f(h, w, y))
    texts = {str(one.message) for one in warned}
    assert (vocab == 70) == any("do not divide its 70 columns" in text for text in texts)


@pytest.mark.few(1)
@pytest.mark.parametrize("partitioner", [True, False], ids=["shardy", "gspmd"])
@pytest.mark.slow
def test_a_gather_that_a_name_would_spare_is_told_of(partitioner: bool) -> None:
    h, w, y = jnp.ones((2, 8, 16)), jnp.ones((64, 16)), jnp.zeros((2, 8), jnp.int32)
    mesh = mesh_of((2, 4), "auto")

    def compiled(columns: Any, axis_name: Any = None) -> tuple[bool, list[str]]:
        def sum_losses(h: Any, w: Any) -> Any:
            loss = partial(linear_cross_entropy, axis_name=axis_name)
            return jax.vmap(lambda h, y: loss(h, w, y))(h, y).sum()

        placed = [
            jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in ((h, P(None, "data")), (w, P(columns)))
        ]
        with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            lowered = jax.jit(jax.grad(sum_losses)).lower(*placed)
            # Every compilation tells, and Python shows a text once.
            program = lowered.compile().as_text()
            jax.export.export(
                jax.jit(sum_losses),
                disabled_checks=[
                    jax.export.DisabledSafetyCheck.custom_call(name)
                    for name in ("xentile_cross_entropy_forward", "xentile_cross_entropy_fused")
                ],
            )(*placed)
        assert "nspectSharding" not in program
        return "all-gather(" in program, [str(one.message) for one in warned]

    with by_shardy(partitioner):
        assert compiled(None) == (False, [])
        assert compiled("vocab", "vocab") == (False, [])
        is_gathered, warned = compiled("vocab")
    if partitioner:
        assert not is_gathered and warned == []
    else:
        (text,) = warned
        assert is_gathered and "is sharded over 4 devices" in text
        assert "with axis_name='vocab'" in text


def test_axes_and_vocabularies_that_do_not_fit_are_refused() -> None:
    h, w, y = jnp.zeros((8, 4)), jnp.zeros((30, 4)), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match=r"'model', which is no axis here.*set_mesh"):
        linear_cross_entropy(h, w, y, axis_name="model")
    refused = pytest.raises(ValueError, match=r"weight has a vocabulary of 30 .*pad it to 32")
    with jax.set_mesh(mesh_of((2, 4), "auto")), refused:
        linear_cross_entropy(h, w, y, axis_name="vocab")
    mesh = mesh_of((2, 4), "explicit")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(jnp.zeros((32, 4)), NamedSharding(mesh, P("vocab")))
        with pytest.raises(ValueError, match=r"axis_name is 'data' and weight.*P.*reshard"):
            jax.jit(partial(linear_cross_entropy, axis_name="data"))(h, sharded, y)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["checked", "found"])
@pytest.mark.slow
def test_a_mean_on_gpus_computes_logits_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of chunks of tokens, whose dlogits are saved for one GEMM of each gradient."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    count, width, vocab = 1024, 1024, 48
    hidden = jnp.asarray(rng.normal(size=(count, width)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(vocab, width)) / 16, jnp.bfloat16)
    labels = rng.integers(0, vocab, count).astype(np.int32)
    labels[::7] = -100
    mesh, specs = mesh_of((2, 4), way), (P(), P("vocab"), P())
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "max_scratch_bytes": 1900000}

    def loss(h: Any, w: Any, y: Any, **more: Any) -> Any:
        return linear_cross_entropy(h, w, y, **options, **more)

    function: Any = loss
    if way == "checked":
        of_shard = partial(loss, axis_name="vocab")
        function = jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in zip((hidden, weight, labels), specs, strict=True)
        ]
        step = jax.jit(jax.value_and_grad(function, (0, 1)))
        compiled = step.lower(*arrays).compile()
        value, gradients = compiled(*arrays)
    wide = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    right, expected = jax.value_and_grad(loss, (0, 1))(*wide, jnp.asarray(labels))
    np.testing.assert_allclose(value, right, rtol=1e-3)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other, rtol=0, atol=1e-2 * np.abs(other).max()
        )
    chunks = [int(one) for one in re.findall(r"= f32\[(\d+),12\]\S* dot\(", compiled.as_text())]
    assert chunks and 2 * max(chunks) <= count
    assert len(chunks) <= 2
