"""Optimizers' steps over a model's parameters, beside optax's and a copy of the bytes to be moved.

    python benches/optimizers.py [--json FILE] [--model NAME] [--seconds S]

Parameters and gradients are those of a preset of examples/train, layer by layer, in float32, or in
bfloat16 rounded stochastically. Each program takes its state's memory for the state after it, and
on GPUs makes some steps: to start one with all arrays of a model takes the host 2 ms, as long as a
step. A copy is of the bytes that an update must read and write: 28 a float32 parameter for AdamW,
16 with 8-bit state, 10 for bfloat16 parameters and gradients with it. On CPUs AdamW's kernels are
beside XLA's program, `implementation="reference"`. Programs of PyTorch and torchao run where they
are named.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax
from harness import Row

from pallas_bridge import optax as ours

PROGRAMS = ("adamw", "optax.adamw", "adamw8bit", "adamw8bit, bfloat16", "muon", "optax.muon")
TORCH = ("torch.optim.AdamW", "torchao.AdamW8bit", "torchao.AdamW8bit, bfloat16")
BYTES = {
    "adamw": 28,
    "optax.adamw": 28,
    "adamw8bit": 16,
    "adamw8bit, bfloat16": 10,
    **dict(zip(TORCH, (28, 16, 10), strict=True)),
}
# Steps of a program on GPUs, but for Muon's, which take longer than to start them.
STEPS = 4


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Returns the shapes of a preset's parameters, those of each layer by themselves."""
    sys.path.append(str(harness.ROOT / "examples"))
    from train.config import PRESETS

    of = PRESETS[model].model
    q, kv = of.heads * of.head_width, of.kv_heads * of.head_width
    layer = [(of.width, q + 2 * kv), (q, of.width), (of.width, 2 * of.ffn), (of.ffn, of.width)]
    return [(of.vocab, of.width), *(layer * of.layers)]


def step_of(name: str, **options: Any) -> tuple[Any, Any]:
    """Returns a program's `init`, and its step of gradients, parameters and state."""
    make: dict[str, Callable[[], Any]] = {
        "adamw": lambda: ours.adamw(1e-3, **options),
        "optax.adamw": lambda: optax.adamw(1e-3),
        "adamw8bit": lambda: ours.adamw8bit(1e-3, **options),
        "adamw8bit, bfloat16": lambda: ours.adamw8bit(1e-3, rounding_seed=0, **options),
        "muon": lambda: ours.muon(1e-3),
        "optax.muon": lambda: optax.contrib.muon(1e-3),
    }
    optimizer = make[name]()

    def step(params: Any, state: Any, grads: Any) -> Any:
        if hasattr(optimizer, "update_and_apply"):
            return optimizer.update_and_apply(grads, state, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer.init, step


def measure(name: str, shapes: list[tuple[int, ...]], seconds: float) -> Row:
    """Measures a program, a copy of its bytes and, on CPUs, XLA's program in turns."""
    dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
    keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
    draw = jax.jit(partial(jax.random.normal, dtype=dtype), static_argnums=1)
    params = [draw(key, shape) for key, shape in zip(keys[::2], shapes, strict=True)]
    grads = [draw(key, shape) for key, shape in zip(keys[1::2], shapes, strict=True)]
    held: dict[str, list[Any]] = {}
    count = STEPS if name in BYTES and jax.default_backend() != "cpu" else 1

    def start_of(part: str, **options: Any) -> tuple[Any, Callable[[], Any]]:
        init, step = step_of(name, **options)
        held[part] = [jax.tree.map(jnp.copy, params), jax.jit(init)(params)]

        def steps(params: Any, state: Any, grads: Any) -> Any:
            for _ in range(count):
                # XLA would fuse the steps that it runs itself.
                params, state = jax.lax.optimization_barrier(step(params, state, grads))
            return params, state

        compiled = jax.jit(steps, donate_argnums=(0, 1)).lower(*held[part], grads).compile()

        def start() -> Any:
            held[part] = [*compiled(*held[part], grads)]
            return held[part]

        return compiled, start

    compiled, start = start_of("step")
    starts = {"step": start}
    if jax.default_backend() == "cpu" and name.startswith("adamw"):
        _, starts["reference"] = start_of("reference", implementation="reference")
    params.clear()
    parameters = sum(leaf.size for leaf in grads)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(held["step"][1]))
    if name in BYTES:
        copy = harness.device_copy(BYTES[name] * parameters // 2 * 2, 1)
        starts["copy"] = lambda: [copy() for _ in range(count)]
    baseline = "copy" if name in BYTES else "step"
    row: Row = harness.compared(starts, seconds, calls=count, baseline=baseline)
    memory = compiled.memory_analysis().temp_size_in_bytes
    return row | {
        "parameters": parameters,
        "state_bytes_a_parameter": state_bytes / parameters,
        "temp_bytes": memory,
    }


def measure_torch(name: str, shapes: list[tuple[int, ...]], seconds: float) -> Row:
    """Measures a program of PyTorch in turns with a copy of its bytes."""
    import torch

    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    params = [torch.nn.Parameter(torch.randn(of, dtype=dtype, device="cuda")) for of in shapes]
    for param in params:
        param.grad = torch.randn_like(param, requires_grad=False)
    optimizer: Any
    if name.startswith("torchao"):
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(params, lr=1e-3, bf16_stochastic_round=dtype is torch.bfloat16)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    parameters = sum(param.numel() for param in params)
    source = torch.randn(BYTES[name] * parameters // 4, dtype=torch.bfloat16, device="cuda")
    result = torch.empty_like(source)
    starts = {"step": optimizer.step, "copy": lambda: torch.neg(source, out=result)}
    turns = {
        part: partial(harness.torch_clock(start), harness.PROGRAMS)
        for part, start in starts.items()
    }
    times = harness.in_turns(turns, seconds=seconds)
    return {**harness.compared_times(times, 1, "copy"), "parameters": parameters}


def main() -> int:
    """Measures, prints a table and writes JSON after every program."""
    parser = harness.parser(__doc__, seconds=0.5)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument(
        "--programs", nargs="+", choices=(*PROGRAMS, *TORCH), default=PROGRAMS, metavar="PROGRAM"
    )
    options = parser.parse_args()
    shapes = shapes_of(options.model)

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for name in options.programs:
            one = measure_torch if name in TORCH else measure
            yield {"program": name}, partial(one, name, shapes, options.seconds)

    def texts(row: Row) -> list[str]:
        state = row.get("state_bytes_a_parameter")
        return [
            row["program"],
            harness.milliseconds_of(row, "step"),
            harness.milliseconds_of(row),
            *harness.ratios_of(row, ("step",) if "copy" in row else ()),
            harness.milliseconds_of(row, "reference"),
            f"{state:.3f}" if state is not None else "",
        ]

    heads = ["program", "ms", "copy ms", "time / copy", "XLA ms", "state bytes a parameter"]
    return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
