"""Texts of rows and numbers in tables and sentences."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import harness

from .config import GIB, KERNELS

Row = dict[str, Any]
# Rows whose time is more than this multiple of XLA's are named.
BOUND = 1.03


# The text of a column in the line of a row.
Column = Callable[[Row], str]


def listing(rows: Iterable[Row], columns: Sequence[tuple[str, Column]]) -> str:
    """A table with a line for each row."""
    heads = [head for head, _ in columns]
    return harness.table(heads, ([text(row) for _, text in columns] for row in rows))


def make_case_columns(*names: str) -> list[tuple[str, Column]]:
    """Columns of values of a case; `kernels` are those of `kernels`, and `mode` is a pass."""

    def column(name: str) -> Column:
        if name == "kernels":
            return lambda row: kernels(row["case"])
        return lambda row: str(row["case"][name])

    return [({"mode": "pass"}.get(name, name), column(name)) for name in names]


def make_figure_column(name: str, text: Callable[[Any], str]) -> Column:
    """A column of a measurement, which `text` formats; it is given None for a row without it."""
    return lambda row: text(row.get(name))


def seconds(value: float | None) -> str:
    """Seconds, to four digits; "" for None."""
    return "" if value is None else f"{value:.4g}"


def duration(value: float) -> str:
    """Seconds, in s, ms or us, to four digits."""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if value >= one:
            return f"{value / one:.4g} {unit}"
    return f"{value * 1e6:.4g} us"


def rate(value: float | None) -> str:
    """A number a second, to a whole from 100 on; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(count: int | None) -> str:
    """Bytes in KiB, MiB or GiB; "" for None."""
    if count is None:
        return ""
    if count == 0:
        return "0"
    if abs(count) < 2**10:
        return f"{count} B"
    if abs(count) < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.2f} MiB"


def status(row: Row) -> str:
    """How a row ended: `ok`, `OOM` with the requested bytes, or `failed`."""
    if row["status"] == "OOM" and row.get("asked_bytes") is not None:
        limit = row.get("case", {}).get("memory_limit")
        of = "" if limit is None else f" of {size(int(limit * GIB))}"
        return f"OOM, {size(row['asked_bytes'])} asked for{of}"
    return str(row["status"])


def finished(rows: Iterable[Row]) -> list[Row]:
    """The rows with measurements."""
    return [row for row in rows if row["status"] == "ok"]


def ends(rows: Sequence[Row]) -> str:
    """A sentence on the rows without measurements; "" if there are none."""
    sentences = []
    for which, words in (("OOM", "ran out of memory"), ("failed", "failed")):
        count = sum(row["status"] == which for row in rows)
        if count:
            sentences.append(f"{count} of {len(rows)} rows {words}.")
    return " ".join(sentences)


def span(values: Sequence[float]) -> str:
    """The range of values to two decimals; one value if both ends are the same."""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def kernels(case: Row) -> str:
    """The kernels of a case: `xla` or `ours` if all are, or else those that are not XLA's."""
    chosen = {name: case[name] for name in KERNELS}
    if len(set(chosen.values())) == 1:
        return str(case[KERNELS[0]])
    return ", ".join(f"{name} {one}" for name, one in chosen.items() if one != "xla")


def pairs_with_xla(rows: Iterable[Row], *but: str) -> dict[str, list[tuple[Row, Row]]]:
    """By kernels, pairs of finished rows whose cases differ in kernels alone.

    The second of a pair has XLA's in the place of ours. What of a case `but` names may differ, too,
    where there is no row of the same.
    """
    found = finished(rows)
    same = {repr(row["case"]): row for row in found}
    like = {repr({**row["case"], **dict.fromkeys(but)}): row for row in found}
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for row in found:
        case = row["case"]
        without = {name: "xla" for name in KERNELS if case[name] == "ours"}
        if not without:
            continue
        wanted = {**case, **without}
        of_xla = same.get(repr(wanted)) or like.get(repr({**wanted, **dict.fromkeys(but)}))
        if of_xla:
            pairs.setdefault(kernels(case), []).append((row, of_xla))
    return pairs


def by(pairs: Iterable[tuple[Row, Row]], name: str) -> dict[str, list[tuple[Row, Row]]]:
    """Groups pairs by the value of a key of their cases."""
    found: dict[str, list[tuple[Row, Row]]] = {}
    for pair in pairs:
        found.setdefault(str(pair[0]["case"].get(name)), []).append(pair)
    return found


def ratio(pair: tuple[Row, Row], figure: str) -> float:
    """A measurement of ours over XLA's."""
    ours, of_xla = pair
    return float(ours[figure] / of_xla[figure])


def compared(pairs: Sequence[tuple[Row, Row]], figure: str, what: str) -> str:
    """Ours over XLA's in words, `what` naming XLA's: the median, the best and the worst."""
    ordered = sorted(pairs, key=lambda pair: ratio(pair, figure))
    best, worst = (
        f"{ratio(pair, figure):.2f} ({place(pair[0]['case'])})"
        for pair in (ordered[0], ordered[-1])
    )
    if len(pairs) == 1:
        return best.replace(" (", f" of {what} (", 1)
    median = statistics.median(ratio(pair, figure) for pair in pairs)
    return f"{median:.2f} of {what} in the median, {best} at best and {worst} at worst"


def compared_times(pairs: Sequence[tuple[Row, Row]], figure: str) -> str:
    """`compared` of a time, and the rows that take more than `BOUND` of XLA's."""
    over = [
        f"{place(pair[0]['case'])} ({ratio(pair, figure):.3f})"
        for pair in pairs
        if ratio(pair, figure) > BOUND
    ]
    took = compared(pairs, figure, "XLA's time")
    line = f"{took}; {len(over)} of {len(pairs)} rows take more than {BOUND:g} of it"
    return f"{line}: {', '.join(over)}." if over else f"{line}."


def place(case: Row) -> str:
    """A case in words: its size, length, policy and steps of warm-up."""
    after = f" after {case['warmup']}" if "warmup" in case else ""
    return f"{case['size']} at {case['length']} in {case['policy']}{after}"
