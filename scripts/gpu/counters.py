"""Reads the GPU's own counters while the kernels over logits run, beside a kernel that copies them.

    ncu --csv --page raw --kernel-name regex:"cross_entropy|negate" --clock-control none \
        --metrics "$(python scripts/gpu/counters.py --metrics)" \
        python scripts/gpu/counters.py | python scripts/gpu/counters.py --table

The first run is what Nsight Compute looks at; the last makes a table of what it printed, of every
kernel the last launch. Logits are normal, in bf16, with a standard deviation of 2.
"""

import argparse
import csv
import os
import sys

# Each column of the table, the metric it is made of, and what that is divided by.
COLUMNS = {
    "us": ("gpu__time_duration.sum", 1e3),
    "MB read": ("dram__bytes_read.sum", 1e6),
    "MB written": ("dram__bytes_write.sum", 1e6),
    "DRAM busy %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "ex2 unit %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "FMA unit %": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "L2 %": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed", 1),
    "warps": ("sm__warps_active.avg.per_cycle_active", 1),
}
# Units that Nsight Compute may choose, as multiples of nanoseconds or bytes.
UNITS = {
    "s": 1e9,
    "ms": 1e6,
    "us": 1e3,
    "ns": 1,
    "Gbyte": 1e9,
    "Mbyte": 1e6,
    "Kbyte": 1e3,
    "byte": 1,
}
SHAPES = ((2048, 151643), (4096, 128256), (8192, 32000), (8192, 50257))


def work() -> None:
    """Copies logits and takes their gradient, with both schedules, some times."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    from pallas_bridge import cross_entropy, cross_entropy_per_token

    def pair(x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        per_token, vjp = jax.vjp(lambda x: cross_entropy_per_token(x, labels)[0], x)
        return per_token, vjp(jnp.linspace(0.5, 1, labels.size))[0]

    mean = jax.jit(jax.value_and_grad(cross_entropy))
    for shape in SHAPES:
        key = jax.random.key(shape[1])
        x = (2 * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)
        labels = jax.random.randint(key, shape[:1], 0, shape[1])
        for program in (jax.jit(lambda x, _: -x), mean, jax.jit(pair)):
            for _ in range(3):
                jax.block_until_ready(program(x, labels))


def table(lines: list[str]) -> list[str]:
    """Makes a Markdown table of what Nsight Compute printed.

    Args:
        lines: its output with --csv --page raw, other lines between.

    Raises:
        ValueError: no kernel is in it.
    """
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError("no kernel was profiled: " + "".join(lines[-5:]))
    rows = list(csv.DictReader(line for line in lines[begin:] if line.startswith('"')))
    units, kernels = rows[0], rows[1:]
    found: dict[tuple[int, str], list[str]] = {}
    shape = -1
    copied = False
    for row in kernels:
        name = row["Kernel Name"].partition("(")[0]
        # A copy begins a shape.
        shape, copied = shape + int("negate" in name and not copied), "negate" in name
        cells = []
        for metric, scale in COLUMNS.values():
            text = row.get(metric, "").replace(",", "")
            number = float(text) * UNITS.get(units[metric], 1) / scale if text else float("nan")
            cells.append(f"{number:.1f}")
        found[shape, name] = cells
    titles = ["T x V", "kernel", *COLUMNS]
    body = [[" x ".join(map(str, SHAPES[at])), name, *cells] for (at, name), cells in found.items()]
    return ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *body)]


def main() -> int:
    """Runs what is measured, or tells of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", action="store_true", help="name what is to be measured")
    parser.add_argument("--table", action="store_true", help="read what was measured from stdin")
    arguments = parser.parse_args()
    if arguments.metrics:
        print(",".join(metric for metric, _ in COLUMNS.values()))
    elif arguments.table:
        try:
            print("\n".join(table(sys.stdin.readlines())))
        except ValueError as error:
            print(f"counters: error: {error}", file=sys.stderr)
            return 1
    else:
        work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
