"""A training step of examples/train: our kernels beside plain JAX, by what blocks keep.

    PYTHONPATH=examples python benches/train_step.py [--json FILE] [--models NAME ...]
        [--programs KERNELS/REMAT ...] [--torch PROGRAM ...] [--parts KERNELS/REMAT ...]

KERNELS is "ours" (what `auto` takes), "baseline" (plain JAX with cuDNN's attention), or "ours" with
parts in plain JAX, such as ours-attention. REMAT is a value of `--remat`, "/unrolled" after it one
of `--layer_loop`. All programs of a model step in turns from one state, on random tokens, so that a
change of the machine's speed affects all of them. `--torch` runs the same step by Hugging Face's
model with Liger: liger, liger+compile, each with /none or /full, in a process of its own. `--parts`
profiles programs, without CUDA graphs: the time of each part of a step, forward and backward,
beside the least that its GEMMs and bytes take.
"""

import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
from harness import Row

PROGRAMS = (
    "baseline/none",
    "baseline/full",
    "ours/none",
    "ours/selective",
    "ours/attention",
    "ours/full",
)
FIRST_STEPS, ROUNDS, CALLS = 2, 5, 2
KERNEL_OPTIONS = {
    "loss": "ce_kernel_type",
    "norm": "norm_kernel",
    "mlp": "mlp_kernel",
    "attention": "attention_kernel",
}


def config_of(model: str, program: str, batch: int | None) -> Any:
    """Returns the configuration of examples/train for "KERNELS/REMAT[/unrolled]"."""
    from train.config import Options, resolve
    from train.step import with_kernels

    kernels, *rest = program.split("/")
    remat, loop = [*rest, *("none", "scan")[len(rest) :]]
    base, *plain = kernels.split("-")
    if base not in ("ours", "baseline") or not set(plain) <= KERNEL_OPTIONS.keys():
        parts = ", ".join(f"-{part}" for part in KERNEL_OPTIONS)
        raise SystemExit(
            f"error: program {program} is unknown: begin with ours or baseline, then {parts} for "
            f"parts in plain JAX"
        )
    named: dict[str, Any] = {
        option: "auto" if base == "ours" and part not in plain else "baseline"
        for part, option in KERNEL_OPTIONS.items()
    }
    options = Options(model_size=model, remat=remat, layer_loop=loop, batch_size=batch, **named)
    return with_kernels(resolve(options))


def random_batch(config: Any) -> Any:
    """Returns a batch of random tokens, each its text's next."""
    import jax
    import jax.numpy as jnp

    shape = (config.batch, config.length)
    tokens = jax.random.randint(jax.random.key(1), (shape[0], shape[1] + 1), 0, config.model.vocab)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segments": jnp.zeros(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
    }


def measure(model: str, programs: list[str], batch: int | None) -> Iterator[Row]:
    """Measures programs of a model in turns; yields a row for each."""
    import jax
    from train.step import make_program

    configs = {name: config_of(model, name, batch) for name in programs}
    made = {name: make_program(config) for name, config in configs.items()}
    rows: dict[str, Row] = {name: {"model": model, "program": name} for name in programs}
    compiled: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(one.compile) for name, one in made.items()}
        for name, future in futures.items():
            try:
                compiled[name] = future.result()
            except jax.errors.JaxRuntimeError as error:
                rows[name]["error"] = harness.first_line(error)
    first = next(iter(made.values()))
    state, arrays = first.initial(), random_batch(next(iter(configs.values())))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    tokens = arrays["tokens"].size
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(ROUNDS + 1):
        for name, program in list(compiled.items()):
            try:
                # The first round warms up; a step that finds no memory leaves the state as it was.
                for _ in range(FIRST_STEPS if index == 0 else 1):
                    state, metrics = program(state, arrays)
                loss = float(metrics["loss"])
            except jax.errors.JaxRuntimeError as error:
                rows[name]["error"] = harness.first_line(error)
                del compiled[name]
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                    state = first.initial()
                continue
            rows[name].setdefault("first_loss", loss)
            if index == 0:
                continue
            begun = time.perf_counter()
            for _ in range(CALLS):
                state, metrics = program(state, arrays)
            jax.block_until_ready(state)
            times[name].append((time.perf_counter() - begun) / CALLS)
    for name in programs:
        row = rows[name]
        if name in compiled:
            seconds = statistics.median(times[name])
            memory = compiled[name].memory_analysis()
            row |= {
                "batch": arrays["tokens"].shape[0],
                "length": arrays["tokens"].shape[1],
                "parameters": parameters,
                "ms": 1e3 * seconds,
                "spread": harness.spread(times[name]),
                "tokens_per_second": tokens / seconds,
                "temp_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
            }
            if programs[0] in compiled:
                row["speed"] = harness.median_ratio(times[programs[0]], times[name])
        yield row


def torch_step(model: str, program: str, batch: int) -> Row:
    """Measures Hugging Face's model with Liger in this process."""
    import torch
    import transformers
    from train.config import PRESETS

    kernels, _, remat = program.partition("/")
    of = PRESETS[model].model
    length = PRESETS[model].context_length
    family = "Qwen3" if of.qk_norm else "Qwen2" if of.qkv_bias else "Llama"
    torch.set_float32_matmul_precision("high")
    if kernels.startswith("liger"):
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{family.lower()}")()
    config = getattr(transformers, f"{family}Config")(
        vocab_size=of.vocab,
        hidden_size=of.width,
        intermediate_size=of.ffn,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=of.head_width,
        max_position_embeddings=length,
        rms_norm_eps=of.norm_eps,
        tie_word_embeddings=of.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        network = getattr(transformers, f"{family}ForCausalLM")(config).train()
    if remat == "full":
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(network) if "compile" in kernels else network
    tokens = torch.randint(0, of.vocab, (batch, length), device="cuda")

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    first = step()
    for _ in range(FIRST_STEPS):
        step()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / CALLS)
    seconds = statistics.median(times)
    return {
        "first_loss": first,
        "batch": batch,
        "length": length,
        "ms": 1e3 * seconds,
        "spread": harness.spread(times),
        "tokens_per_second": batch * length / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def alone(model: str, program: str, batch: int | None, seconds: float) -> Row:
    """Runs this script for one program of PyTorch or one profile, and returns its row."""
    command = [sys.executable, __file__, "--models", model, "--alone", program]
    if batch is not None:
        command += ["--batch", str(batch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        lines = done.stderr.strip().splitlines() or ["no output"]
        # PyTorch ends with advice.
        raised = [
            line for line in lines if re.match(r"[\w.]+(Error|Exception|Unsupported)\b", line)
        ]
        return {"error": harness.without_folders((raised or lines)[-1])[:160]}
    return dict(json.loads(lines[-1]))


def parts_of_step(model: str, program: str, batch: int | None) -> Row:
    """Profiles three steps: milliseconds of each part, forward and backward, and the least."""
    import jax
    from train import breakdown
    from train.step import make_program

    config = config_of(model, program, batch)
    one = make_program(config)
    compiled, state, arrays = one.compile(), one.initial(), random_batch(config)

    def scope(name: str) -> str:
        part = breakdown.part_of(name)
        return part and f"{part}, {'backward' if 'transpose(' in name else 'forward'}"

    for _ in range(FIRST_STEPS):
        state, _ = compiled(state, arrays)
    steps = 3
    with tempfile.TemporaryDirectory() as folder:
        profiler = breakdown.Profiler(Path(folder), 0, steps, is_of_kernels=True)
        for index in range(steps):
            profiler.before(index)
            state, metrics = compiled(state, arrays)
        jax.block_until_ready(metrics)
        profiler.after(steps)
        parts, containers = breakdown.parts_of_program(compiled.as_text(), scope)
        traced = breakdown.instructions_of_trace(Path(folder), parts.keys() - containers)
    times: dict[str, float] = defaultdict(float)
    longest: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, (took, _) in traced.instructions.items():
        times[parts[name]] += took / 1e6 / steps
        longest[parts[name]].append((took / 1e6 / steps, name))
    return {
        "parts_ms": dict(sorted(times.items())),
        "idle_ms": (traced.idle or 0.0) / 1e6 / steps,
        "longest": {
            part: [f"{name}: {took:.3f}" for took, name in sorted(of, reverse=True)[:6]]
            for part, of in sorted(longest.items())
        },
        "least_ms": least_of_step(config),
    }


def least_of_step(config: Any) -> dict[str, float]:
    """Returns the least milliseconds of parts: their GEMMs, or the bytes of their passes.

    GEMMs at the rate that the library reaches at 8192 x 8192 x 8192, bytes at that of a copy; both
    are measured here. Attention counts the half that the causal mask leaves, with two GEMMs forward
    and five backward.
    """
    import jax
    import jax.numpy as jnp

    of, tokens = config.model, config.batch * config.length
    size = 8192 if jax.default_backend() == "gpu" else 512
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    gemm = harness.compile_calls(jnp.matmul, [(a + call, a) for call in range(4)])
    gemm_rate = 4 * 2 * size**3 / min(harness.wall_clock(gemm)(4) for _ in range(3))
    moved = size * size * 16
    copy = harness.device_copy(moved)
    byte_rate = harness.CALLS * moved / min(harness.wall_clock(copy)(4) for _ in range(3))
    q, kv = of.heads * of.head_width, of.kv_heads * of.head_width
    weights = of.layers * of.width * (2 * q + 2 * kv + 3 * of.ffn)
    parameters = weights + of.vocab * of.width
    scores = config.batch * config.length**2 / 2 * q * of.layers * 2
    rows = tokens * of.layers * 2  # bytes of a column of all layers

    def by_flops(flops: float) -> float:
        return 1e3 * flops / gemm_rate

    def by_bytes(count: float) -> float:
        return 1e3 * count / byte_rate

    return {
        "GEMM TFLOP/s": gemm_rate / 1e12,
        "copy TB/s": byte_rate / 1e12,
        "projections, forward": by_flops(2 * weights * tokens),
        "projections, backward": by_flops(4 * weights * tokens),
        "attention, forward": by_flops(2 * scores),
        "attention, backward": by_flops(5 * scores),
        "loss, forward": by_flops(6 * of.vocab * of.width * tokens),
        # A norm adds a branch to the residual stream: two rows in, two out.
        "norms, forward": by_bytes(rows * 2 * 4 * of.width),
        "norms, backward": by_bytes(rows * 2 * 4 * of.width),
        "activation, forward": by_bytes(rows * 3 * of.ffn),
        "activation, backward": by_bytes(rows * 5 * of.ffn),
        "position, forward": by_bytes(rows * 2 * (q + kv)),
        "position, backward": by_bytes(rows * 2 * (q + kv)),
        # Gradients once for their norm; then gradients, parameters and moments in, all but
        # gradients out; float32.
        "optimizer, forward": by_bytes(parameters * 4 * 8),
    }


def cells(options: Any) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yields the rows, as `harness.measure_cells` takes them."""
    for model in options.models:
        # Before this process takes the GPU's memory.
        for program in options.torch:
            batch = options.batch or 4
            run = partial(alone, model, program, batch, options.limit)
            yield {"model": model, "program": f"torch {program}"}, run
        for row in measure(model, options.programs, options.batch) if options.programs else ():
            yield row, dict
        for program in options.parts:
            run = partial(alone, model, f"parts:{program}", options.batch, options.limit)
            yield {"model": model, "program": f"parts {program}"}, run


def texts(row: Row) -> list[str]:
    """Returns the cells of a row's line."""
    memory = row.get("temp_bytes", row.get("peak_bytes"))
    return [
        row["model"],
        row["program"],
        f"{row['ms']:.1f}" if "ms" in row else "",
        f"{row['tokens_per_second'] / 1e3:.1f}" if "ms" in row else "",
        f"{row['speed']:.3f}" if "speed" in row else "",
        f"{memory / 2**30:.1f}" if memory else "",
        f"{row.get('first_loss', float('nan')):.4f}",
        json.dumps(row["parts_ms"]) if "parts_ms" in row else "",
    ]


def main() -> int:
    """Measures, prints a table and writes JSON after every row."""
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen2.5-0.5b"])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--torch", nargs="*", default=[], metavar="PROGRAM")
    parser.add_argument("--parts", nargs="*", default=[], metavar="PROGRAM")
    parser.add_argument("--batch", type=int, help="sequences of a step (the preset's)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of each process")
    parser.add_argument("--alone", metavar="PROGRAM", help="print the JSON row of one program")
    options = parser.parse_args()
    # The programs' temporaries and the state of each that a turn replaces share one pool.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    sys.path.append(str(harness.ROOT / "examples"))
    if options.alone:
        (model,) = options.models
        kind, _, program = options.alone.rpartition(":")
        if kind == "parts":
            from train.breakdown import show_kernels

            show_kernels(os.environ)
            row = parts_of_step(model, program, options.batch)
        else:
            row = torch_step(model, program, options.batch or 4)
        print(json.dumps(row))
        return 0
    heads = ["model", "program", "ms", "k tokens/s", "speed", "GiB", "first loss", "parts"]
    return harness.measure_cells(cells(options), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
