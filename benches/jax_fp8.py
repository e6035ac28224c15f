"""FP8 quantisation on one device: our kernels and XLA's program, in copies of their bytes.

    python benches/jax_fp8.py [--json FILE] [--shapes MxD ...] [--cases NAME ...] [--seconds S]

A cell is a case of a shape and a dtype, of numbers that are normal or have heavy tails. Programs of
a cell take turns, each on CALLS inputs one after another, so that what was read before does not
count; what is said is the median over the rounds of a program's time, and of its ratio to the copy.
A copy is a kernel that negates as many bytes as must move: x once, or twice where all of it goes
into scales before the first value, values and scales. `same` says whether both programs have given
the same bits.

"swiglu" is of gate and up side by side, [M, 2 D], and "norm" of rows and a weight: there a program
of XLA's is the whole of both functions, and "composed" what `info()` says of each by itself. Bits
differ where XLA's activation or norm is a rounding off.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from peers.turns import CALLS, rounds_of, save

from pallas_bridge import fp8_quantize, rms_norm, rms_norm_fp8, swiglu, swiglu_fp8

SHAPES = {"cpu": ("2048x4096", "1024x14336"), "gpu": ("8192x4096", "8192x14336")}
CASES: dict[str, dict[str, Any]] = {
    "block_1d": {"granularity": "block_1d"},
    "row": {"granularity": "row"},
    "block_2d": {"granularity": "block_2d"},
    "block_1d, transposed": {"granularity": "block_1d", "transposed": True},
    "block_2d, transposed": {"granularity": "block_2d", "transposed": True},
    "tensor": {},
    "tensor, scale given": {"scale": 0.01, "return_amax": True},
    "tensor, scale given, transposed": {"scale": 0.01, "return_amax": True, "transposed": True},
    "row, transposed": {"granularity": "row", "transposed": True},
    "block_1d, powers of two": {"granularity": "block_1d", "power_of_two": True},
    "block_1d, e5m2": {"granularity": "block_1d", "dtype": jnp.float8_e5m2},
}
# What is quantised is made of x, by one kernel: the function with its own, and by itself.
FUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "swiglu": (swiglu_fp8, swiglu),
    "norm": (
        lambda x, **options: rms_norm_fp8(x, jnp.ones(x.shape[-1]), **options),
        lambda x: rms_norm(x, jnp.ones(x.shape[-1])),
    ),
}
for _name in FUSED:
    CASES[_name] = {"granularity": "block_1d"}
    CASES[f"{_name}, transposed"] = {"granularity": "block_1d", "transposed": True}
# All x is read twice: a scale is made of all of it, or of whole columns, before the first value.
TWICE = ("tensor", "row, transposed")


def inputs(shape: tuple[int, int], dtype: str, tails: str) -> list[jax.Array]:
    """Returns an x for each call."""
    keys = jax.random.split(jax.random.key(0), 2 * CALLS)

    @jax.jit
    def draw(first: jax.Array, second: jax.Array) -> jax.Array:
        x = jax.random.normal(first, shape)
        if tails == "heavy":
            # The magnitudes of a lognormal distribution: few are a hundred times the others.
            x = x * jnp.exp(1.5 * jax.random.normal(second, shape))
        return x.astype(dtype)

    return [draw(keys[2 * i], keys[2 * i + 1]) for i in range(CALLS)]


@jax.jit
def is_same(found: object, right: object) -> jax.Array:
    """Whether all bits are the same; every NaN is."""

    def bits(array: jax.Array) -> jax.Array:
        unsigned = jnp.uint8 if array.dtype.itemsize == 1 else jnp.uint32
        of = jax.lax.bitcast_convert_type(array, unsigned)
        return jnp.where(jnp.isnan(array.astype(jnp.float32)), unsigned(0x7F), of)

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return jnp.array([(bits(a) == bits(b)).all() for a, b in pairs]).all()


class Cell:
    """The programs of a case, compiled, for x of any distribution."""

    def __init__(self, name: str, x: list[jax.Array]) -> None:
        """Compiles them."""
        self.name, self.reads = name, 2 if name in TWICE else 1
        quantize, alone = FUSED.get(name.split(",")[0], (fp8_quantize, None))
        if alone is swiglu:
            x = [jnp.concatenate([one, one[::-1]], -1) for one in x]

        def program(run: Callable[..., Any]) -> Callable[[object], Any]:
            given = x
            compiled = jax.jit(lambda x: [run(one) for one in x]).lower(given).compile()
            return compiled if alone is not swiglu else lambda _: compiled(given)

        def by(implementation: str) -> Callable[[object], Any]:
            return program(partial(quantize, implementation=implementation, **CASES[name]))

        self.programs = {"xla": by("reference"), "ours": by("custom_call")}
        if alone is not None:
            composed = partial(fp8_quantize, **CASES[name])
            self.programs["composed"] = program(lambda one: composed(alone(one)))
        results = jax.eval_shape(partial(quantize, **CASES[name]), x[0])
        self.moved = self.reads * x[0].nbytes
        self.moved += sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(results))
        # Each of its own input, or XLA reads it once for all.
        self.sources = [jnp.full(self.moved // 4, i, jnp.bfloat16) for i in range(CALLS)]
        negate = jax.jit(lambda sources: [-one for one in sources])
        self.negate = negate.lower(self.sources).compile()

    def measure(self, x: list[jax.Array], seconds: float) -> dict[str, Any]:
        """Returns what is measured."""
        first = [self.programs[name](x)[0] for name in ("xla", "ours")]
        same = bool(is_same(*first))
        del first

        def timed(run: Callable[[object], Any], of: object) -> Callable[[], Any]:
            return lambda: run(of)

        runs = {name: timed(program, x) for name, program in self.programs.items()}
        found = rounds_of({"copy": timed(self.negate, self.sources), **runs}, seconds)
        return {
            "moved_mib": self.moved / 2**20,
            "reads": self.reads,
            "same": same,
            **{name: {"ms": 1e3 * t, "copies": ratio} for name, (t, ratio) in found.items()},
        }


def main() -> None:
    """Measures, prints a table and writes JSON after every cell."""
    platform = jax.default_backend()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="+", default=SHAPES.get(platform, SHAPES["cpu"]))
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--tails", nargs="+", default=["normal", "heavy"])
    parser.add_argument("--seconds", type=float, default=0.2, help="of each cell")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print("| case | M x D | dtype | tails | copy ms | XLA | composed | ours | same bits |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for shape in options.shapes:
        rows_of, columns = (int(one) for one in shape.split("x"))
        for dtype in options.dtypes:
            of_tails = {one: inputs((rows_of, columns), dtype, one) for one in options.tails}
            for name in options.cases:
                cell = Cell(name, next(iter(of_tails.values())))
                for tails, x in of_tails.items():
                    row = {"case": name, "shape": shape, "dtype": dtype, "tails": tails}
                    row.update(cell.measure(x, options.seconds))
                    rows.append(row)
                    xla, composed, ours = (
                        f"{row[who]['copies']:.3f}" if who in row else ""
                        for who in ("xla", "composed", "ours")
                    )
                    print(
                        f"| {name} | {shape} | {dtype} | {tails} | {row['copy']['ms']:.4f} "
                        f"| {xla} | {composed} | {ours} | {'yes' if row['same'] else 'NO'} |",
                        flush=True,
                    )
                    save(options.json, rows)


if __name__ == "__main__":
    main()
