"""FP8 quantisation on one device: kernels, XLA's program and a device copy.

    python benches/jax_fp8.py [--json FILE] [--shapes MxD ...] [--cases NAME ...] [--seconds S]

A cell is a case of a shape and a dtype, of numbers that are normal or have heavy tails. The copy is
a kernel that negates as many bytes as must move: x once, or twice if a scale depends on all of x,
values and scales. `same` says whether the kernel and XLA's program have given the same bits.

"swiglu" is of gate and up side by side, [M, 2 D], and "norm" of rows and a weight: there XLA's
program computes both functions, and "composed" has the default implementation of each. Bits differ
where XLA's activation or norm is a rounding off.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
from harness import CALLS, Row

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
# Functions of x that one kernel computes and quantises: fused, and alone.
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
# x is read twice: a scale depends on all of x, or on whole columns, before the first value.
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
        self.reads = 2 if name in TWICE else 1
        quantize, alone = FUSED.get(name.split(",")[0], (fp8_quantize, None))
        self.is_packed = alone is swiglu
        x = self.inputs(x)

        def program(function: Callable[..., Any]) -> Callable[[list[jax.Array]], Any]:
            return jax.jit(lambda x: [function(one) for one in x]).lower(x).compile()

        functions = {
            "xla": partial(quantize, implementation="reference", **CASES[name]),
            "ours": partial(quantize, implementation="custom_call", **CASES[name]),
        }
        if alone is not None:
            functions["composed"] = lambda one: fp8_quantize(alone(one), **CASES[name])
        self.programs = {key: program(function) for key, function in functions.items()}
        results = jax.eval_shape(partial(quantize, **CASES[name]), x[0])
        self.moved = self.reads * x[0].nbytes
        self.moved += sum(one.size * one.dtype.itemsize for one in jax.tree.leaves(results))
        self.copy = harness.device_copy(self.moved)

    def inputs(self, x: list[jax.Array]) -> list[jax.Array]:
        """The arrays of a program: x, or gate and up side by side."""
        return [jnp.concatenate([one, one[::-1]], -1) for one in x] if self.is_packed else x

    def measure(self, x: list[jax.Array], seconds: float) -> Row:
        """Measures the programs on x."""
        x = self.inputs(x)
        same = bool(is_same(*(self.programs[name](x)[0] for name in ("xla", "ours"))))
        starts = {name: partial(program, x) for name, program in self.programs.items()}
        return {
            "moved_mib": self.moved / 2**20,
            "reads": self.reads,
            "same": same,
            **harness.compared({"copy": self.copy, **starts}, seconds),
        }


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, 0.2, SHAPES)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--tails", nargs="+", default=["normal", "heavy"])
    options = parser.parse_args()

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for shape in options.shapes:
            rows, columns = harness.extents(shape)
            for dtype in options.dtypes:
                of_tails = {one: inputs((rows, columns), dtype, one) for one in options.tails}
                for name in options.cases:
                    cell = Cell(name, next(iter(of_tails.values())))
                    for tails, x in of_tails.items():
                        row = {"case": name, "shape": shape, "dtype": dtype, "tails": tails}
                        yield row, partial(cell.measure, x, options.seconds)

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, ("xla", "composed", "ours"))
        case = [row[name] for name in ("case", "shape", "dtype", "tails")]
        return [*case, harness.milliseconds_of(row), *ratios, "yes" if row.get("same") else "NO"]

    heads = ["case", "M x D", "dtype", "tails", "copy ms", "XLA / copy", "composed / copy"]
    heads += ["kernel / copy", "same bits"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
