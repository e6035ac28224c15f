"""`linear_attention` and `gated_delta_rule`, forward and with all gradients, beside XLA's program.

    python benches/linear_attention.py [--json FILE] [--shapes BxTxHxKxV ...] [--seconds S]

B sequences of T tokens, H heads with K columns of keys and V of values; H/G of which G have keys of
their own. bfloat16, decays of exp(-softplus(normal - 3)). "XLA" is the chunked program in plain
JAX, `implementation="reference"`. "both" has a forward pass and the gradients of all operands in
one program. Of one token, programs take a state and return the next, ours by the kernel, beside
"copy", which adds 1 to a state.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
from harness import Row

from pallas_bridge import gated_delta_rule, linear_attention

SHAPES = {
    "cpu": ("1x128x2x64x64",),
    "gpu": (
        "4x8192x8x128x128",
        "1x32768x16x128x128",
        "4x8192x32/1x128x64",
        "8x2048x16x128x128",
        "128x1x16x128x128",
    ),
}
PEERS = ("ours", "reference")
FUNCTIONS: dict[str, Any] = {"linear": linear_attention, "delta": gated_delta_rule}


def arrays_of(shape: str, has_beta: bool) -> list[Any]:
    """Returns random q, k, v, b for the delta rule, and g."""
    batch, length, heads, k_size, v_size = shape.split("x")
    value_heads, _, key_heads = heads.partition("/")
    tokens = (int(batch), int(length))
    keys = jax.random.split(jax.random.key(0), 5)
    key_shape = (*tokens, int(key_heads or value_heads), int(k_size))
    value_shape = (*tokens, int(value_heads), int(v_size))

    def unit(key: Any) -> jax.Array:
        x = jax.random.normal(key, key_shape)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    g = -jax.nn.softplus(jax.random.normal(keys[3], value_shape[:3]) - 3)
    arrays = [unit(keys[0]), unit(keys[1]), jax.random.normal(keys[2], value_shape, jnp.bfloat16)]
    b = jax.nn.sigmoid(jax.random.normal(keys[4], value_shape[:3]))
    return [*arrays, b, g] if has_beta else [*arrays, g]


def measure(form: str, shape: str, seconds: float) -> Row:
    """Measures the programs of a form in turns, with the temporary memory of each."""
    function = FUNCTIONS[form]
    arrays = arrays_of(shape, form == "delta")
    if arrays[2].shape[1] == 1:
        return measure_token(function, arrays, seconds)
    cotangent = jax.random.normal(jax.random.key(9), arrays[2].shape, jnp.bfloat16)
    programs: dict[str, Any] = {}
    for name, implementation in (("ours", None), ("reference", "reference")):
        forward = partial(function, implementation=implementation)

        def both(*arrays: Any, forward: Callable[..., Any] = forward) -> Any:
            y, vjp = jax.vjp(forward, *arrays)
            return y, vjp(cotangent)

        programs[f"{name}, forward"], programs[f"{name}, both"] = forward, both
    compiled = {name: jax.jit(one).lower(*arrays).compile() for name, one in programs.items()}
    memory = {name: one.memory_analysis().temp_size_in_bytes for name, one in compiled.items()}
    row: Row = {"temp_bytes": memory}
    for passes in ("forward", "both"):
        starts = {
            name: partial(one, *arrays) for name, one in compiled.items() if name.endswith(passes)
        }
        baseline = f"reference, {passes}"
        row |= harness.compared(starts, seconds, calls=1, baseline=baseline, ratio="relative")
    return row


def measure_token(function: Any, arrays: list[Any], seconds: float) -> Row:
    """Measures programs of one token in turns, and a pass over a state."""
    batch, _, heads, columns = arrays[2].shape
    shape = (batch, heads, arrays[0].shape[-1], columns)
    state = jax.random.normal(jax.random.key(9), shape)
    starts = {"copy": partial(jax.jit(lambda state: state + 1), state)}
    for name, implementation in (("ours", "custom_call"), ("reference", "reference")):
        one = partial(function, return_final_state=True, implementation=implementation)
        step = jax.jit(lambda state, *arrays, one=one: one(*arrays, initial_state=state))
        starts[f"{name}, forward"] = partial(step, state, *arrays)
    return harness.compared(starts, seconds, calls=1)


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""
    parser = harness.parser(__doc__, 0.5, SHAPES)
    parser.add_argument("--forms", nargs="+", default=("linear", "delta"))
    options = parser.parse_args()

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for form in options.forms:
            for shape in options.shapes:
                yield {"form": form, "shape": shape}, partial(measure, form, shape, options.seconds)

    def texts(row: Row) -> list[str]:
        names = [f"{name}, {passes}" for passes in ("forward", "both") for name in PEERS]
        times = [harness.milliseconds_of(row, name) for name in names]
        memory = [
            f"{row['temp_bytes'][f'{name}, both'] / 2**20:.0f}" if "temp_bytes" in row else ""
            for name in PEERS
        ]
        return [row["form"], row["shape"], *times, *memory]

    heads = ["form", "shape", "ours", "XLA", "ours, both", "XLA, both", "ours MiB", "XLA MiB"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
