"""`memory`: a program's memory by category, from XLA's buffer assignment.

Nothing runs, but where the device counts its memory: there a step says what its peak was. So
several cells can be compiled at once, and step one after another; and with `gpu` for a GPU that is
not there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

from . import tables
from .config import GIB, Spec, models
from .tables import Row

Cell = dict[str, Any]
# In the order of the table; `temporaries` are XLA's, in which `of_logits` lie.
CATEGORIES = ("parameters", "optimizer", "batch", "gradients", "results", "temporaries")

# A device's count of the peak within this share of XLA's is near it.
NEAR = 0.03
HELD: list[Any] = []


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length and policy; a row for each mode."""
    more = {} if spec.gpu is None else {"gpu": spec.gpu}
    rows = [{"mode": mode} for mode in spec.modes]
    return (({**cell, **more}, rows) for cell in models(spec))


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Returns a function that compiles a mode's program and counts its bytes."""
    import jax
    from train.step import program_bytes

    from . import buffers, described, model
    from .compiled import OutOfMemory

    program = model.program_of(cell)
    state, batch = program.abstract(), program.abstract_batch()
    params = state["params"]
    gpu: str | None = cell.get("gpu")

    def compiled_pass(mode: str) -> Any:
        is_step = mode == "step"
        function = program.step if is_step else model.pass_of(program, mode)
        if gpu is not None:
            arrays = (state if is_step else params, batch)
            donated = {"donate_argnums": 0} if is_step else {}
            return described.lowered(gpu, function, *arrays, **donated).compile()
        return program.compile() if is_step else jax.jit(function).lower(params, batch).compile()

    def measure(variant: Cell) -> Row:
        mode = variant["mode"]
        with model.attention_by(cell["attention"]):
            compiled = compiled_pass(mode)
            stream = stream_bytes(program, cell) if mode != "forward" else {}
        of_xla = compiled.memory_analysis()
        peak = program_bytes(compiled)
        limit = None if cell["memory_limit"] is None else cell["memory_limit"] * GIB
        if limit is None and gpu is not None:
            limit = described.limit(gpu)
        if limit is not None and peak > limit:
            raise OutOfMemory(peak)
        results = of_xla.output_size_in_bytes - of_xla.alias_size_in_bytes
        gradients = model.tree_bytes(params) if mode == "forward_backward" else 0
        held = {
            "parameters": model.tree_bytes(params),
            "optimizer": model.tree_bytes(state["optimizer"]) if mode == "step" else 0,
            "gradients": gradients,
            "results": results - gradients,
            "temporaries": of_xla.temp_size_in_bytes,
        }
        held["batch"] = of_xla.argument_size_in_bytes - held["parameters"] - held["optimizer"]
        logits = cell["batch"] * cell["length"] * cell["vocab"]
        return {
            **{f"{name}_bytes": held[name] for name in CATEGORIES},
            "peak_bytes": peak,
            **({} if gpu else measured_peak(cell, program, mode, compiled)),
            # By arithmetic: XLA's loss takes them in float32; ours holds none.
            "of_logits_bytes": logits * 4 if cell["loss"] == "xla" else 0,
            "of_gradients_bytes": model.tree_bytes(params) if mode == "step" else 0,
            **stream,
            **buffers.describe_program(compiled),
        }

    return measure


def measured_peak(cell: Cell, program: Any, mode: str, compiled: Any) -> Row:
    """The peak in bytes of one run of a compiled program, if its device counts memory.

    Bytes in use besides its arguments are reported separately. The device counts the peak of the
    whole process: nothing is known if it does not rise.
    """
    import jax

    from . import model

    if not harness.device_bytes():
        return {}
    first = program._initial if mode == "step" else lambda: model.parameters(program)
    make = jax.jit(first).lower().compile()
    wait_for_device()
    arguments = jax.block_until_ready((make(), model.random_batch(cell)))
    in_use = harness.device_bytes("bytes_in_use") or 0
    besides = in_use - compiled.memory_analysis().argument_size_in_bytes
    before = harness.device_bytes() or 0
    jax.block_until_ready(compiled(*arguments))
    after = harness.device_bytes() or 0
    if after <= before:
        return {}
    return {"measured_bytes": after - besides, "besides_bytes": besides}


def wait_for_device() -> None:
    """Waits until no other cell holds the device's memory, and holds it until this process ends.

    XLA's allocator keeps what it took till then. The lock is of this file, which all of them have.
    """
    import fcntl

    if not HELD:
        HELD.append(open(__file__, encoding="utf-8"))  # noqa: SIM115
        fcntl.flock(HELD[0], fcntl.LOCK_EX)


def stream_bytes(program: Any, cell: Cell) -> Row:
    """Bytes of the residuals of the forward pass, and of the residual stream among them.

    JAX says the shapes of what it keeps. The stream by arithmetic is layers x B x T x D numbers,
    twice, as a block begins with the stream and a branch that is still to be added to it; it is
    looked for in a program that keeps nothing else of a block (`remat`).
    """
    import jax

    from . import model

    def kept(of: Any) -> list[Any]:
        def residuals(params: Any, batch: Any) -> Any:
            return jax.vjp(lambda params: of.loss(params, batch), params)[1]

        shapes = jax.eval_shape(residuals, of.abstract()["params"], of.abstract_batch())
        found: list[Any] = jax.tree.leaves(shapes)
        return found

    bare = model.program_of({**cell, "remat": True})
    shape = tuple(cell[name] for name in ("layers", "batch", "length", "width"))
    each = 4 if cell["policy"] == "float32" else 2
    streams = [leaf for leaf in kept(bare) if leaf.shape == shape]
    tokens = cell["batch"] * cell["length"]
    # Activations grow with the batch; weights in the pass's dtype are saved, too, and do not.
    larger = kept(model.program_of({**cell, "batch": 2 * cell["batch"]}))
    pairs = zip(kept(program), larger, strict=True)
    activations = [leaf for leaf, other in pairs if leaf.shape != other.shape]
    return {
        "kept_bytes": model.tree_bytes(activations),
        "stream_bytes": model.tree_bytes(streams),
        "stream_expected_bytes": 2 * cell["layers"] * tokens * cell["width"] * each,
    }


def title(row: Row) -> str:
    """A program in words."""
    case = row["case"]
    place = f" on {case['gpu']}" if "gpu" in case else ""
    return f"{case['mode']} of {case['size']} at length {case['length']} in {case['policy']}{place}"


def largest(row: Row) -> str:
    """A table of a program's largest buffers."""
    lines = [
        [tables.size(of["bytes"]), of["what"], of["scope"] or of["name"], of["line"]]
        for of in row["buffers"]
    ]
    text = harness.table(["size", "kind", "made by, or name", "line of the model"], lines)
    return f"Largest buffers, {title(row)}, kernels {tables.kernels(row['case'])}:\n\n{text}"


def table(rows: Sequence[Row]) -> str:
    """A line for each program with sizes by category, and tables of their largest buffers."""
    columns = tables.make_case_columns("size", "batch", "length", "policy")
    if any("gpu" in row["case"] for row in rows):
        columns.append(("device", lambda row: row["case"].get("gpu", "this one")))
    columns += [
        *tables.make_case_columns("kernels"),
        ("program", lambda row: row["case"]["mode"]),
        ("status", tables.status),
    ]
    sizes = {name: f"{name}_bytes" for name in (*CATEGORIES, "peak", "measured")}
    sizes |= {"logits (arithmetic)": "of_logits_bytes", "kept for backward": "kept_bytes"}
    sizes["residual stream"] = "stream_bytes"
    columns += [
        (head, tables.make_figure_column(name, tables.size)) for head, name in sizes.items()
    ]
    parts = [largest(row) for row in tables.finished(rows) if row.get("buffers")]
    return "\n\n".join([tables.listing(rows, columns), *parts])


def words(rows: Sequence[Row]) -> str:
    """Sentences on the peak, and on whether the residual stream has its expected size."""
    sentences = [tables.ends(rows)]
    found = tables.finished(rows)
    if found:
        top = max(found, key=lambda row: row["peak_bytes"])
        category = max(CATEGORIES, key=lambda name: top[f"{name}_bytes"])
        share = top[f"{category}_bytes"] / top["peak_bytes"]
        sentences.append(
            f"The largest program is {title(top)} with {tables.size(top['peak_bytes'])}, "
            f"{share:.0%} of it {category}."
        )
        temporaries = [of for of in top.get("buffers", ()) if of["what"] == "temporary"]
        if temporaries:
            first = temporaries[0]
            sentences.append(
                f"Its largest temporary has {tables.size(first['bytes'])}, made by "
                f"{first['scope'] or first['name']} ({first['line'] or 'no line of the model'})."
            )
    counted = [row for row in found if "measured_bytes" in row]
    if counted:
        ratios = [row["measured_bytes"] / row["peak_bytes"] for row in counted]
        near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
        sentences.append(
            f"The peak that the device counts is {tables.span(ratios)} of XLA's by category, and "
            f"within {NEAR:.0%} of it in {near} of {len(ratios)} programs."
        )
    streams = [row for row in found if "stream_bytes" in row]
    wrong = [row for row in streams if row["stream_bytes"] != row["stream_expected_bytes"]]
    if streams and not wrong:
        shares = [row["stream_bytes"] / row["kept_bytes"] for row in streams]
        sentences.append(
            "The residual stream at each block's start (the stream, and a branch still to be "
            "added) has the size that arithmetic says, 2 x layers x batch x length x width, in all "
            f"of them: {tables.span(shares)} of what the backward pass keeps without recomputing."
        )
    for row in wrong:
        sentences.append(
            f"The residual stream of {row['case']['size']} at length {row['case']['length']} has "
            f"{row['stream_bytes']} bytes, and by arithmetic {row['stream_expected_bytes']}."
        )
    for name, pairs in tables.pairs_with_xla(rows).items():
        for mode, of_mode in tables.by(pairs, "mode").items():
            held = tables.compared(of_mode, "peak_bytes", "XLA's")
            sentences.append(f"With kernels {name} the peak of {mode} is {held}.")
    return " ".join(filter(None, sentences))
