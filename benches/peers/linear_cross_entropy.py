"""Times linear cross-entropy beside that of other projects on one device, in one run.

    python benches/peers/linear_cross_entropy.py --json FILE --plot FILE.svg
    python benches/peers/linear_cross_entropy.py --check --distribution normal --std 1 8 64

Needs pallas_bridge; a peer that is not installed is a row with an error. Every peer on every
problem is a process of its own, and all read the same operands. A measure is of the mean and its
gradients with respect to hidden [N, D] and weight [V, D]. Right before each peer PyTorch's three
GEMMs of that size are timed alone, into preallocated memory: ratios are to their time. Times are
medians on the device's clock without first calls. Memory is the process's peak beyond hidden,
weight and their gradients.

Every --distribution gives logits that are the same for all peers: normal with each --std, peaked (a
--share of tokens has one column, not the label, --height nats above the label), trained.

A shape may end in a budget, as in 8192x2048x128256@2004: the MiB of scratch of `xentile as QuACK`,
which QuACK takes at that shape. `xentile N MiB` is a peer for every N.

With --resume and the same --json a run goes on where an earlier one ended.

With --check nothing is timed: errors of the loss, of the worst token's loss and of both gradients
against f64 are reported. `f64, rounded` has the smallest errors that the dtypes allow.

With torch 2.11, triton 3.6 and jax 0.11.2 installed, peers need these wheels (CPython 3.12, x86-64;
MiB):

- Liger: liger-kernel==0.8.5 (0.9).
- Liger CuTe: that, nvidia-cutlass-dsl==4.8.1 (0.01), nvidia-cutlass-dsl-libs-base==4.8.1 (2.9),
  nvidia-cutlass-dsl-libs-core==4.8.1 (1.6), nvidia-cutlass-dsl-libs-cu13==4.8.1 (87.7, or
  -libs-cu12 (87.4): one of them, by the CUDA of torch) and apache-tvm-ffi==0.1.15.post2 (3.2); and
  cuda-bindings and protobuf, which torch and jax come with.
- QuACK: quack-kernels==0.6.5 (0.7), all of these but Liger, torch-c-dlpack-ext==0.1.5 (0.9) and
  einops==0.8.2 (0.1).
- CCE: cut-cross-entropy==25.1.1 (0.02).

All of these are 98 MiB, 88 of them the compiler of the CuTe DSL. tokamax==0.0.17 (2.7) has many
dependencies of its own, which pip should choose.
"""

import itertools
import re
import sys
import tempfile
import time
from dataclasses import asdict, replace
from typing import Any

import distributions
import driver
import harness
from driver import Result
from linear_reference import GRADIENTS, errors_of, remove_files, rounded, write_operands
from shared import LinearProblem

IN_JAX, IN_TORCH = "linear_in_jax.py", "linear_in_torch.py"
# The workers that time the GEMMs.
YARDSTICK = (IN_TORCH, IN_JAX)
AS_QUACK = "xentile as QuACK"
# The worker of each peer but for `xentile N MiB`.
PEERS = {
    "products, torch": IN_TORCH,
    "products, XLA": IN_JAX,
    "xentile": IN_JAX,
    AS_QUACK: IN_JAX,
    "JAX dense": IN_JAX,
    "JAX dense, f32 product": IN_JAX,
    "JAX scan": IN_JAX,
    "torch.compile": IN_TORCH,
    "Liger": IN_TORCH,
    "Liger, f32 sums": IN_TORCH,
    "Liger CuTe": IN_TORCH,
    "Liger CuTe, per token": IN_TORCH,
    "QuACK": IN_TORCH,
    "CCE": IN_TORCH,
    "CCE, no filter": IN_TORCH,
    "tokamax": IN_JAX,
    "tokamax, chunked": IN_JAX,
}
BUDGETS = (1024, 256, 32)
SHAPES = ",".join(
    (
        "128x4096x128256@2004",
        "512x4096x128256@2004",
        "1024x4096x128256@2004",
        "2048x4096x128256@2004",
        "8192x4096x128256",
        "16384x4096x128256",
        "2048x3584x152064@2080",
        "2048x2048x102400",
        "4096x1024x4096",
        "8192x2048x128256@2004",
        "8192x1536x151936@2078",
        "8192x2304x256000@4250",
        "4096x4096x128256@1002",
        "32768x1024x151936@1549",
    )
)
# A shape small enough for f64, and budgets that select each of this library's schedules there.
CHECK_SHAPE = "2048x512x8192@26"
CHECK_BUDGETS = (8, 2)
# No dtype explains a relative error of the norm this large.
WRONG = 1e-2


def usual_peers(budgets: tuple[int, ...]) -> list[str]:
    """All peers, with this library at these budgets too."""
    ours = [f"xentile {budget} MiB" for budget in budgets]
    at = list(PEERS).index(AS_QUACK) + 1
    return [*list(PEERS)[:at], *ours, *list(PEERS)[at:]]


def budget_of(peer: str) -> int | None:
    """N of `xentile N MiB`."""
    named = re.fullmatch(r"xentile (\d+) MiB", peer)
    return None if named is None else int(named[1])


def script_of(peer: str) -> str | None:
    """The worker of a peer; None where there is no such peer."""
    return PEERS.get(peer) if budget_of(peer) is None else IN_JAX


def problems_of(options: Any, folder: str) -> list[LinearProblem]:
    """Every peer on every shape."""
    problems = []
    cells = itertools.product(options.shapes.split(","), distributions.chosen(options))
    for text, distribution in cells:
        shape, _, as_quack = text.partition("@")
        tokens, hidden, vocab = map(int, shape.split("x"))
        for peer in options.peers.split(";"):
            if peer == AS_QUACK and not as_quack:
                continue
            problems.append(
                LinearProblem(
                    peer=peer,
                    tokens=tokens,
                    hidden=hidden,
                    vocab=vocab,
                    dtype=options.dtype,
                    platform=options.platform,
                    seconds=options.measure_seconds,
                    distribution=distribution,
                    folder=folder,
                    budget_mib=int(as_quack) if peer == AS_QUACK else budget_of(peer),
                )
            )
    return problems


def row_of(problem: LinearProblem, products_ms: float | None, found: Result) -> Result:
    """The row of one peer on one problem."""
    known = {
        name: what for name, what in asdict(problem).items() if name not in ("folder", "seconds")
    }
    beyond = 2 * problem.operand_bytes
    return {**known, "bytes_of_all": beyond, "products_ms": products_ms, "found": found}


def shape_of(row: Result) -> str:
    """The shape and dtype of a row."""
    return f"{row['tokens']} x {row['hidden']} x {row['vocab']} {row['dtype']}"


def names_of(row: Result) -> list[str]:
    """The first cells of a row."""
    return [shape_of(row), row["distribution"], label_of(row)]


def label_of(row: Result) -> str:
    """The peer, with its budget where the name does not tell it."""
    return f"{row['peer']} ({row['budget_mib']} MiB)" if row["peer"] == AS_QUACK else row["peer"]


def cells_of(row: Result) -> list[str]:
    """The cells of what was measured."""
    found, products_ms = row["found"], row["products_ms"]
    if "error" in found:
        return driver.error_cells(found, 6)
    return [
        f"{found['median_ms']:.3f}",
        f"{found['min_ms']:.3f}",
        f"{found['median_ms'] / products_ms:.3f}" if products_ms else "",
        driver.mebibytes(found.get("peak_bytes"), row["bytes_of_all"]),
        driver.mebibytes(found.get("temp_bytes"), 0),
        f"{found['loss']:.5f}" if "loss" in found else "",
    ]


def to_markdown(rows: list[Result]) -> str:
    """The table of times and memory, and the plans of this library."""
    columns = ["N x D x V", "logits", "peer", "ms", "least ms", "time / GEMMs"]
    columns += ["extra MiB", "compiled temp MiB", "loss"]
    lines = [
        harness.table(columns, [[*names_of(row), *cells_of(row)] for row in rows]),
        "",
        "Extra: the process's peak beyond hidden, weight and their gradients, labels included; of",
        "the GEMMs it is the logits and their gradient. A loss that differs from the others is",
        "rounded or wrong.",
        "",
        *plans_of(rows),
    ]
    return "\n".join(lines)


def plans_of(rows: list[Result]) -> list[str]:
    """The plans of this library, a line each."""
    plans = [row for row in rows if "plan" in row["found"]]
    return [f"- {'; '.join(names_of(row))}: {row['found']['plan']}" for row in plans]


def errors_to_markdown(rows: list[Result]) -> str:
    """The table of errors, and the plans of this library."""
    columns = ["N x D x V", "logits", "peer", "loss", "its error", "worst loss (nats)"]
    columns += [f"{name} {what}" for name in GRADIENTS for what in ("dtype", "max", "norm")]
    lines = []
    for row in rows:
        found = row["found"]
        cells = names_of(row)
        if "error" in found:
            lines.append([*cells, *driver.error_cells(found, 9)])
            continue
        cells += [f"{found['loss']:.6f}", f"{found['errors']['loss']:.1e}"]
        worst = found["errors"].get("worst_loss")
        cells.append("" if worst is None else f"{worst:.1e}")
        for name, dtype in zip(GRADIENTS, found["dtypes"], strict=True):
            error = found["errors"][name]
            cells += [dtype, f"{error['max']:.1e}", f"{error['norm']:.1e}"]
        lines.append(cells)
    notes = [
        "Errors are against f64 from the same operands: max relative to the array's largest value,",
        "norm to its norm; the worst loss is that of a token.",
    ]
    return "\n".join([harness.table(columns, lines), "", *notes, "", *plans_of(rows)])


def in_products(rows: list[Result]) -> dict[tuple[str, str], float]:
    """Times by shape with distribution and peer."""
    return {
        (f"{row['tokens']}x{row['hidden']}x{row['vocab']}\n{row['distribution']}", row["peer"]): (
            row["found"]["median_ms"] / row["products_ms"]
        )
        for row in rows
        if row["products_ms"] and "median_ms" in row["found"]
    }


def is_wrong(found: Result) -> bool:
    """Whether a peer of this library failed, or its error is more than rounding explains."""
    errors = found.get("errors", {})
    return "error" in found or any(not errors[n]["norm"] < WRONG for n in GRADIENTS if n in errors)


def parse() -> Any:
    """The options."""
    parser = driver.parser(__doc__ or "", SHAPES, "NxDxV or NxDxV@MiB", usual_peers(BUDGETS))
    parser.add_argument("--check", action="store_true", help="report errors in place of times")
    options = parser.parse_args()
    if options.check:
        if options.shapes == SHAPES:
            options.shapes = CHECK_SHAPE
        if options.peers == parser.get_default("peers"):
            options.peers = ";".join(usual_peers(CHECK_BUDGETS))
        options.peers = ";".join(p for p in options.peers.split(";") if "products" not in p)
    return options


def main() -> int:
    """Measures or checks, prints, writes; the exit code is 1 where ours failed."""
    options = parse()
    deadline = time.monotonic() + options.seconds
    if unknown := [peer for peer in options.peers.split(";") if script_of(peer) is None]:
        known = "; ".join([*PEERS, "xentile N MiB"])
        return driver.refuse(f"no peer {unknown[0]}: choose from {known}")
    results = driver.Results(options)
    text_of = errors_to_markdown if options.check else to_markdown
    with tempfile.TemporaryDirectory() as folder:
        problems = problems_of(options, folder)
        keep_operands = driver.keep_inputs(write_operands, remove_files)

        def before(problem: LinearProblem) -> None:
            if keep_operands(problem):
                right = replace(problem, peer="f64, rounded", budget_mib=None)
                if options.check and results.lacking([right]):
                    add(right, None, rounded(right))

        def report(problem: LinearProblem, products_ms: float | None, found: Result) -> None:
            if options.check and "error" not in found:
                found["errors"] = errors_of(problem, found["loss"])
            add(problem, products_ms, found)

        def add(problem: LinearProblem, products_ms: float | None, found: Result) -> None:
            results.add(row_of(problem, products_ms, found))
            # The row's line of the table, below two lines of head.
            line = text_of(results.rows).splitlines()[1 + len(results.rows)]
            print(line, file=sys.stderr, flush=True)

        driver.measure(
            results.lacking(problems),
            lambda problem: str(script_of(problem.peer)),
            report,
            deadline=deadline,
            yardstick=None if options.check else YARDSTICK,
            mode="check" if options.check else "measure",
            before=before,
        )
    print(text_of(results.rows))
    if options.plot and not options.check:
        # Of a run that went on, all.
        peers = list(dict.fromkeys(row["peer"] for row in results.rows))
        title = f"value_and_grad, {options.dtype}, {harness.about()['device']}"
        driver.draw(
            options.plot, title, "time / three GEMMs of PyTorch", in_products(results.rows), peers
        )
    ours = (row["found"] for row in results.rows if row["peer"].startswith("xentile"))
    return int(any(is_wrong(found) for found in ours))


if __name__ == "__main__":
    sys.exit(main())
