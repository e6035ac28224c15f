"""The platform is chosen as a program is compiled, and one program may hold several."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import CASES, Case
from pallas_bridge._src import library

import pallas_bridge
from pallas_bridge import cross_entropy, cross_entropy_per_token

LOGITS = jax.ShapeDtypeStruct((6, 50), jnp.bfloat16)
LABELS = jax.ShapeDtypeStruct((6,), jnp.int32)
TARGETS = [
    f"xentile_{name}"
    for name in ("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_fused", "scale")
]
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


def make_library(*platforms: str) -> tuple[Any, library.Library]:
    """The library, if it had kernels for these platforms, by the names of XLA's registries."""
    loaded = library.require()
    handle = library.attempt()[0]  # type: ignore[index]
    host = [row for row in loaded.targets if row.platform == "Host"]
    rows = [dataclasses.replace(row, platform=platform) for row in host for platform in platforms]
    return handle, dataclasses.replace(loaded, targets=rows)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the package take its library for one with kernels for CUDA."""
    outcome = make_library("Host", "CUDA")
    monkeypatch.setattr(library, "attempt", lambda: outcome)
    yield
    jax.clear_caches()


@pytest.fixture
def host_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the package take its library for one that was built without CUDA."""
    outcome = make_library("Host")
    monkeypatch.setattr(library, "attempt", lambda: outcome)
    yield
    jax.clear_caches()


def lowered(f: Any, *platforms: str, arguments: Any = (LOGITS, LABELS), **jit: Any) -> str:
    """The program that JAX hands to XLA for those platforms."""
    return jax.jit(f, **jit).trace(*arguments).lower(lowering_platforms=platforms).as_text()


def calls(program: str) -> list[str]:
    """The lines of a program that call the library."""
    return [line.strip() for line in program.splitlines() if "custom_call @xentile" in line]


def targets(program: str) -> list[str]:
    return re.findall(r"custom_call @(xentile_\w+)", program)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cuda_programs_call_what_cpu_programs_call(both: None, reduction: Any, dtype: str) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"softcap": 30.0, "label_smoothing": 0.1, "block_size": 37}
        return 2 * cross_entropy(x, y, reduction=reduction, **options).sum()

    arguments = (LOGITS.update(dtype=jnp.dtype(dtype)), LABELS)
    for function in (f, jax.value_and_grad(f)):
        on_cpu = lowered(function, "cpu", arguments=arguments)
        on_cuda = lowered(function, "cuda", arguments=arguments)
        assert calls(on_cuda) and calls(on_cuda) == calls(on_cpu)
        for line in calls(on_cuda):
            assert "num_batch_dims = " in line
            if "xentile_scale" not in line:
                attributes = ("softcap = 3", "label_smoothing = 1", "block_size = 37 : i64")
                assert all(attribute in line for attribute in attributes), line


def test_cuda_programs_say_what_may_be_sharded_and_what_shares_memory(both: None) -> None:
    f = jax.value_and_grad(lambda x, y: 2 * cross_entropy(x, y, donate_logits=True))
    fused, scale = calls(lowered(f, "cuda", donate_argnums=0))
    for line in (fused, scale):
        assert "#sdy.op_sharding_rule<([i, j], [i]" in line and "need_replication={j}" in line
        assert "output_operand_alias" in line and "operand_index = 0" in line
    assert "output_tuple_indices = [3]" in fused
    (fused,) = calls(lowered(jax.value_and_grad(cross_entropy), "cuda"))
    assert "operand_index" not in fused


def test_a_program_for_two_platforms_holds_each_call_once(both: None) -> None:
    for f, expected in (
        (cross_entropy, ["xentile_cross_entropy_forward"]),
        # A cotangent that the program says is 1 needs no scaling.
        (jax.grad(cross_entropy), ["xentile_cross_entropy_fused"]),
        # Another makes the gradient in the place of the one for 1, which XLA then drops.
        (jax.grad(lambda x, y: 2 * cross_entropy(x, y)), ["xentile_cross_entropy_fused"] * 2),
    ):
        assert targets(lowered(f, "cpu", "cuda")) == expected


# Of losses, the reference runs there by name alone. What is normalised has no kernels anywhere.
OTHERS = ("optax", "gated_delta_rule of segments")
FALL_BACK = [one for one in CASES if "cross_entropy" not in one.name and one.name not in OTHERS]


@pytest.mark.parametrize("case", [pytest.param(one, id=one.name) for one in FALL_BACK])
def test_a_platform_without_kernels_has_the_reference(case: Case) -> None:
    arrays = case.arrays(np.random.default_rng(0))
    function = case.gradients if case.has_gradient else case.outputs

    def lowered(**options: Any) -> str:
        traced = jax.jit(partial(function, **options)).trace(*arrays)
        text: str = traced.lower(lowering_platforms=("rocm",)).as_text()
        return text

    assert not targets(lowered())
    # Gate and up in two arrays are XLA's own program everywhere.
    refusals = r"no kernel for platform|two arr|no kernel: q has dtype float32"
    with pytest.raises((NotImplementedError, ValueError), match=refusals):
        lowered(implementation="custom_call")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "rope"])
def test_info_says_what_runs(name: str) -> None:
    target = name if name == "rope" else f"{name}_forward"
    kernels = library.require().platforms_of(f"xentile_{target}")
    assert "cpu" in kernels
    for row in pallas_bridge.info().operations[name]:
        chosen = "custom_call" if row.platform in kernels else "reference"
        assert row.implementation == chosen, row


def test_an_exported_program_for_two_platforms_runs(rng: np.random.Generator, both: None) -> None:
    logits = jnp.asarray(rng.normal(size=(6, 50)), jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, 50, 6), jnp.int32)
    f = jax.jit(jax.value_and_grad(lambda x, y: cross_entropy(x, y, z_loss=1e-4)))
    exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=CHECKS)(
        logits, labels
    )
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == ("cpu", "cuda")
    for actual, expected in zip(
        jax.jit(restored.call)(logits, labels), f(logits, labels), strict=True
    ):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_a_branch_for_each_platform(rng: np.random.Generator, both: None) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        dense = partial(cross_entropy, implementation="reference")
        return jax.lax.platform_dependent(
            x, y, cpu=cross_entropy, cuda=cross_entropy, default=dense
        )

    def only_cuda(x: jax.Array, y: jax.Array) -> jax.Array:
        dense = partial(cross_entropy, implementation="reference")
        return jax.lax.platform_dependent(x, y, cuda=cross_entropy, default=dense)

    for platforms in (("cpu",), ("cuda",), ("cpu", "cuda"), ("tpu",)):
        expected = platforms != ("tpu",)
        assert bool(targets(lowered(jax.value_and_grad(f), *platforms))) == expected
    assert targets(lowered(jax.value_and_grad(f), "cpu", "cuda", "tpu"))
    assert not targets(lowered(only_cuda, "tpu")) and targets(lowered(only_cuda, "cuda"))
    logits = jnp.asarray(rng.normal(size=(6, 50)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 50, 6), jnp.int32)
    for function in (f, only_cuda):
        np.testing.assert_allclose(
            jax.jit(function)(logits, labels), cross_entropy(logits, labels), rtol=1e-6
        )


def test_per_token_and_vmap_for_cuda(both: None) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, logps = cross_entropy_per_token(x, y)
        return (loss - logps**2).sum()

    batch = (LOGITS.update(shape=(3, 6, 50)), LABELS.update(shape=(3, 6)))
    program = lowered(jax.vmap(jax.grad(f)), "cuda", arguments=batch)
    expected = ["xentile_cross_entropy_forward", "xentile_cross_entropy_backward"]
    assert targets(program) == expected
    assert "stablehlo.while" not in program and "([i, j, k], [i, j]" in program


@pytest.mark.devices(2)
def test_a_mesh_lowers_for_cuda(both: None) -> None:
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P("t"))
    arguments = (LOGITS.update(sharding=sharding), LABELS.update(sharding=sharding))
    program = lowered(jax.grad(cross_entropy), "cuda", arguments=arguments)
    assert "#sdy.op_sharding_rule" in program


def test_built_without_cuda_says_how_to_build_with_it(host_only: None) -> None:
    for f in (cross_entropy, jax.grad(lambda x, y: cross_entropy_per_token(x, y)[0].sum())):
        for platforms in (("cuda",), ("cuda", "tpu")):
            message = (
                r"cross_entropy: no kernel for platform cuda.*: .* built without \(it has kernels "
                r"for cpu\): run `XENTILE_CUDA=1 pip install .*reference"
            )
            with pytest.raises(pallas_bridge.LibraryError, match=message):
                lowered(f, *platforms)
    lowered(partial(cross_entropy, implementation="reference"), "cuda")
    # What is exported here may run elsewhere.
    lowered(cross_entropy, "cpu", "cuda")
    info = pallas_bridge.info()
    assert "cuda: None: the library was built without: run `XENTILE_CUDA=1" in info.details()
    assert "cuda: the library was built without: run `XENTILE_CUDA=1" in str(info)


def test_other_platforms_are_refused_by_name(both: None) -> None:
    message = r"no kernel for platform rocm \(there are kernels for cpu, cuda\)"
    for platforms in (("rocm",), ("rocm", "tpu")):
        with pytest.raises(NotImplementedError, match=message):
            lowered(cross_entropy, *platforms)
    info = pallas_bridge.info().details()
    assert "cuda: custom_call: kernels of the library" in info and "tpu: pallas: kernels" in info


@pytest.mark.only("cpu", "a stand-in for the library, with no kernels in it for GPUs")
def test_rows_for_cuda_are_registered_without_a_gpu(tmp_path: Path) -> None:
    """A library whose table has rows for CUDA, of two stages, beside those of the real one."""
    loaded = library.require()
    source = tmp_path / "both.c"
    source.write_text(
        textwrap.dedent("""
            #include <dlfcn.h>
            #include <stddef.h>
            #include <stdint.h>
            #include <string.h>
            typedef struct {
              size_t size; const char *target, *platform; uint32_t stage; const char *symbol;
              void *handler;
            } Row;
            static Row rows[256];
            static void *real(const char *name) { return dlsym(dlopen(REAL, RTLD_NOW), name); }
            const char *xentile_version(void) {
              return ((const char *(*)(void))real("xentile_version"))();
            }
            const char *xentile_cpu_isa(void) {
              return ((const char *(*)(void))real("xentile_cpu_isa"))();
            }
            uint32_t xentile_table_version(void) {
              return ((uint32_t (*)(void))real("xentile_table_version"))();
            }
            void xentile_ffi_version(int32_t *a, int32_t *b) {
              ((void (*)(int32_t *, int32_t *))real("xentile_ffi_version"))(a, b);
            }
            int32_t xentile_prefers_xla(const char *a, const char *b, const char *c) {
              return ((int32_t (*)(const char *, const char *, const char *))real(
                  "xentile_prefers_xla"))(a, b, c);
            }
            const char *xentile_declarations(void) {
              return ((const char *(*)(void))real("xentile_declarations"))();
            }
            size_t xentile_plan(const char *a, char *b, size_t c) {
              return ((size_t (*)(const char *, char *, size_t))real("xentile_plan"))(a, b, c);
            }
            const Row *xentile_targets(size_t *count) {
              size_t given, n = 0;
              const Row *from = ((const Row *(*)(size_t *))real("xentile_targets"))(&given);
              for (size_t i = 0; i < given; ++i) {
                if (strcmp(from[i].platform, "Host") != 0) continue;
                rows[n++] = from[i];
                for (uint32_t stage = 2; stage < 4; ++stage) {
                  rows[n] = from[i];
                  rows[n].platform = "CUDA";
                  rows[n++].stage = stage;
                }
              }
              *count = n;
              return rows;
            }
        """)
    )
    # Under a name that does not pass for a second library of calls.
    real = shutil.copy(loaded.path, tmp_path / "kernels.so")
    define = f'-DREAL="{real}"'
    path = tmp_path / "both.so"
    subprocess.run(["cc", "-shared", "-fPIC", define, "-o", path, source, "-ldl"], check=True)
    code = """
        import json, jax, jax.numpy as jnp, pallas_bridge as pb
        x, y = jnp.ones((2, 3)), jnp.zeros(2, int)
        text = jax.jit(pb.cross_entropy).trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
        rows = [(row.platform, row.stage) for row in pb.info().library.targets]
        print(json.dumps([float(pb.cross_entropy(x, y)), text, rows]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, library.VARIABLE: str(path), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loss, program, rows = json.loads(done.stdout)
    assert abs(loss - np.log(3)) < 1e-6 and targets(program) == [TARGETS[0]]
    count = sum(platform == "Host" for platform, _ in rows)
    assert count >= len(TARGETS)
    assert sorted(map(tuple, rows)) == sorted(
        [("Host", "execute"), ("CUDA", "initialize"), ("CUDA", "execute")] * count
    )


def test_importing_starts_no_backend(tmp_path: Path) -> None:
    code = "import pallas_bridge, jax; from jax._src import xla_bridge as b; print(b._backends)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "{}"), done.stderr
