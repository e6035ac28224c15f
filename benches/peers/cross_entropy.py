"""Times cross-entropy beside that of other projects on one device, in one run.

    python benches/peers/cross_entropy.py --json FILE --plot FILE.svg

Needs pallas_bridge; a peer that is not installed is a row with an error. Every peer on every
problem is a process of its own, and right before each the logits' bytes are copied: ratios are to
the time of that copy. Times are medians on the device's clock without first calls. Every
--distribution gives logits that are the same for all peers: normal, uniform and masked with each
--std, peaked, trained. --shapes also takes names of lists: large, small (vocabulary), few (rows).
Memory is the process's peak beyond the logits.

Measures:

- value_and_grad: the mean, times --factor if given, and its gradient. QuACK's without a factor is
  the gradient of a sum, as it takes two passes over the logits. Lower bound: 1 copy (one read and
  one write).
- pair: per-token losses, then the gradient for given cotangents. Lower bound: 1.5 copies.
- forward: the mean alone. Lower bound: 0.5 copies.
"""

import itertools
import sys
import tempfile
import time

import distributions
import driver
import harness
from driver import Result
from logits_inputs import remove_inputs, write_inputs
from shared import Problem

# The worker of each peer.
PEERS = {
    "xentile": "in_jax.py",
    "xentile, logits dead": "in_jax.py",
    "JAX dense": "in_jax.py",
    "optax": "in_jax.py",
    "torch eager": "in_torch.py",
    "torch.compile": "in_torch.py",
    "Liger": "in_torch.py",
    "QuACK": "in_torch.py",
}
# The workers that copy.
YARDSTICK = ("in_torch.py", "in_jax.py")
SHAPES = {
    "large": "2048x151643,4096x128256,8192x32000,8192x50257,4096x262144,32768x151936",
    "small": "4194304x2,1048576x257,262144x2048,131072x4096",
    "few": "1x151936,8x151936,64x151936",
}
# The measures, with the least number of passes over the logits' bytes of each.
PASSES = {"value_and_grad": 2, "pair": 3, "forward": 1}


def cells_of(result: Result, measured: str) -> list[str]:
    """The cells of one measure of one result."""
    found = result["found"]
    row = found if "error" in found else found.get(measured, {})
    if "error" in row:
        return driver.error_cells(row, 5)
    if not row:
        return ["does not apply", "", "", "", ""]
    size, copied = result["logits_bytes"], result["copy_ms"]
    outputs = 1 if measured == "forward" else 2
    beyond = 1 if result["peer"].endswith("dead") else outputs
    ratio = f"{row['median_ms'] / copied:.3f}" if copied else ""
    floor = f"{row['median_ms'] / copied * 2 / PASSES[measured]:.3f}" if copied else ""
    return [
        f"{row['median_ms']:.4f}",
        ratio,
        floor,
        driver.mebibytes(row.get("peak_bytes"), beyond * size),
        driver.mebibytes(row.get("temp_bytes"), 0),
    ]


def to_markdown(results: list[Result]) -> str:
    """The table of all results, by measure and shape."""
    columns = ["T x V", "logits", "peer", "ms", "time / copy", "time / lower bound"]
    columns += ["extra MiB", "compiled temp MiB"]
    lines: list[str] = []
    for measured in PASSES:
        rows = [
            [
                f"{result['tokens']} x {result['vocab']} {result['dtype']}",
                result["distribution"],
                result["peer"],
                *cells_of(result, measured),
            ]
            for result in results
        ]
        lines += [f"### {measured}", "", harness.table(columns, rows), ""]
    lines += [
        "Extra: the process's peak beyond logits and dlogits (forward, and logits dead: beyond",
        "logits alone), labels and per-token values included; empty where another measure has the",
        "peak. Liger writes dlogits over the logits, so that its extra is below 0.",
    ]
    return "\n".join(lines)


def shapes_of(text: str) -> list[tuple[int, int]]:
    """The shapes of --shapes, with names of lists replaced by their shapes.

    Raises:
        ValueError: A text is neither a shape nor a name.
    """
    found = ",".join(SHAPES.get(one, one) for one in text.split(",")).split(",")
    try:
        return [(int(tokens), int(vocab)) for tokens, vocab in (one.split("x") for one in found)]
    except ValueError:
        raise ValueError(
            f"shapes are {text}; each must be TxV or one of {', '.join(SHAPES)}"
        ) from None


def in_copies(results: list[Result]) -> dict[tuple[str, str], float]:
    """value_and_grad by shape with distribution and peer."""
    return {
        (f"{r['tokens']}x{r['vocab']}\n{r['distribution']}", r["peer"]): (
            r["found"]["value_and_grad"]["median_ms"] / r["copy_ms"]
        )
        for r in results
        if r["copy_ms"] and "median_ms" in r["found"].get("value_and_grad", {})
    }


def row_of(problem: Problem, copied: float | None, found: Result) -> Result:
    """The row of one peer on one problem."""
    names = ("peer", "tokens", "vocab", "dtype", "distribution", "factor", "is_traced")
    known = {name: getattr(problem, name) for name in names}
    return {**known, "logits_bytes": problem.bytes, "copy_ms": copied, "found": found}


def main() -> int:
    """Measures, prints, writes; the exit code is 1 where ours failed."""
    named = distributions.OF_LOGITS
    parser = driver.parser(__doc__ or "", "large", "TxV, or names", list(PEERS), named)
    parser.add_argument("--factor", type=float, help="multiplies the mean")
    parser.add_argument(
        "--traced-factor", action="store_true", help="pass the factor as an argument"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    try:
        shapes = shapes_of(options.shapes)
    except ValueError as error:
        return driver.refuse(str(error))
    if options.traced_factor and options.factor is None:
        return driver.refuse("--traced-factor is set without a factor: give --factor")
    peers = options.peers.split(";")
    if unknown := set(peers) - set(PEERS):
        return driver.refuse(f"no peer {unknown.pop()}: choose from {'; '.join(PEERS)}")
    with tempfile.TemporaryDirectory() as folder:
        problems = [
            Problem(
                peer=peer,
                tokens=tokens,
                vocab=vocab,
                dtype=options.dtype,
                platform=options.platform,
                seconds=options.measure_seconds,
                distribution=distribution,
                folder=folder,
                factor=options.factor,
                is_traced=options.traced_factor,
            )
            for (tokens, vocab), distribution, peer in itertools.product(
                shapes, distributions.chosen(options), peers
            )
        ]
        results = driver.Results(options)

        def report(problem: Problem, copied: float | None, found: Result) -> None:
            row = row_of(problem, copied, found)
            results.add(row)
            cells = {measured: cells_of(row, measured)[:3] for measured in PASSES}
            print(problem.peer, *problem.inputs, cells, file=sys.stderr, flush=True)

        driver.measure(
            results.lacking(problems),
            lambda problem: PEERS[problem.peer],
            report,
            deadline=deadline,
            yardstick=YARDSTICK,
            before=driver.keep_inputs(write_inputs, remove_inputs),
        )
    print(to_markdown(results.rows))
    if options.plot:
        title = f"value_and_grad, {options.dtype}, {harness.about()['device']}"
        bars = in_copies(results.rows)
        driver.draw(options.plot, title, "time / copy of the logits", bars, list(PEERS))
    ours = [row["found"] for row in results.rows if row["peer"].startswith("xentile")]
    wrong = any("error" in found or any("error" in m for m in found.values()) for found in ours)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
