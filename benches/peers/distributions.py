"""Named distributions of logits, and of the hidden states and weights whose product they are.

They are gradcheck's (docs/internals/cross-entropy.md says what they are and where the numbers of
`trained` are from); the seeds are this program's own.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Rng = np.random.Generator

# Columns that stand above the others in a trained row: by how much the first is above each, and
# between what one that may be the label is above the row's mean.
UNRANKED = 4.0, 11.0
BELOW = np.array([0, *(1.5 + 0.87 * octave for octave in range(7))], np.float32)
# The share of tokens whose label is another one with a rank, of those where it isn't the first.
LABEL_BELOW = 0.63
ZIPF_SHIFT = 2.7
# Of trained logits: a row's mean, with its deviation; those of columns' means and of the rest.
ROW_MEAN, ROW_MEANS, COLUMN_MEANS, NOISE = 10.8, 5.8, 1.84, 2.42
# Leading dimensions of trained hidden states: means and deviations. Weights there, and elsewhere.
LEADING = ((36.0, 14.0), (11.0, 13.0), (9.0, 10.0), (7.0, 7.0))
LEADING_WEIGHT, LEADING_WEIGHTS, WEIGHT_NORM, WEIGHT_NORMS = 0.3, 0.05, 2.1, 0.18


def normal(rng: Rng, *shape: int) -> F32:
    """Standard normal numbers."""
    return rng.standard_normal(shape, np.float32)


def by_zipf(rng: Rng, vocab: int, *shape: int) -> I32:
    """Columns by Zipf's law, the frequent ones first."""
    ends = (vocab + ZIPF_SHIFT) / ZIPF_SHIFT
    columns = ZIPF_SHIFT * (ends ** rng.random(shape) - 1)
    return np.minimum(columns.astype(np.int32), vocab - 1)


def leading(width: int) -> list[int]:
    """Where the leading dimensions of so many are."""
    count = min(len(LEADING), width // 4)
    return [index * width // count for index in range(count)]


@dataclass(frozen=True)
class Targets:
    """The labels of rows, and the columns that stand out in them.

    Attributes:
        labels: [rows].
        columns: [rows, candidates], the one to be set last at the end; empty where none stands out.
        heights: [rows, candidates] above the row's mean if trained, above the label if peaked.
    """

    labels: I32
    columns: I32
    heights: F32


@dataclass(frozen=True)
class Distribution:
    """One of them; `str` gives what `parse` reads."""

    name: str
    std: float = 1.0
    share: float = 1.0
    height: float = 38.0

    def __str__(self) -> str:
        """As it is written and shown."""
        name, *others = self.keys().items()
        return ", ".join([str(name[1]), *(f"{key} {value:g}" for key, value in others)])

    def keys(self) -> dict[str, str | float]:
        """What gradcheck and microbench call it in their configs."""
        if self.name == "trained":
            return {"distribution": self.name}
        more = {"share": self.share, "height": self.height} if self.name == "peaked" else {}
        return {"distribution": self.name, "std": self.std, **more}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one."""
        name, *numbers = text.split(", ")
        pairs = (number.split(" ") for number in numbers)
        return cls(name, **{key: float(value) for key, value in pairs})

    def targets(self, rng: Rng, rows: int, vocab: int) -> Targets:
        """Labels of so many rows and what stands out in them."""
        if self.name == "trained":
            sharpness = np.exp(0.7 * normal(rng, rows, 1))
            heights = np.maximum(13 + 3.5 * sharpness - sharpness * BELOW, 8)
            unranked = rng.uniform(*UNRANKED, (rows, 1)).astype(np.float32)
            heights = np.concatenate([heights, unranked], 1)
            columns = by_zipf(rng, vocab, rows, len(BELOW) + 1)
            which = rng.integers(1, len(BELOW), rows)
            which = np.where(rng.random(rows) < LABEL_BELOW, which, len(BELOW))
            # A sharper row is right more often.
            on_top = rng.random(rows) >= np.exp(-0.5 * sharpness[:, 0])
            labels = columns[np.arange(rows), np.where(on_top, 0, which)]
            return Targets(labels, columns[:, ::-1], heights[:, ::-1])
        labels = rng.integers(0, vocab, rows, np.int32)
        count = int(self.name == "peaked")
        columns = (labels[:, None] + rng.integers(1, vocab, (rows, count), np.int32)) % vocab
        # Where there is no peak, the label's own column stands 0 above it.
        has = rng.random((rows, count)) < self.share
        columns = np.where(has, columns, labels[:, None])
        return Targets(labels, columns, np.where(has, np.float32(self.height), np.float32(0)))

    def logits(self, rng: Rng, targets: Targets, vocab: int) -> F32:
        """Logits [rows, vocab]."""
        rows = len(targets.labels)
        places = np.arange(rows)
        if self.name == "masked":
            # One entry in eight, never the label's.
            z = np.float32(self.std) * normal(rng, rows, vocab)
            z[rng.random((rows, vocab), np.float32) < 1 / 8] = -np.inf
            z[places, targets.labels] = self.std
            return z
        if self.name == "uniform":
            # Its standard deviation is its half-width over sqrt(3).
            end = np.float32(self.std * 3**0.5)
            return end * (2 * rng.random((rows, vocab), np.float32) - 1)
        if self.name == "trained":
            means = ROW_MEAN + ROW_MEANS * normal(rng, rows, 1)
            z = NOISE * normal(rng, rows, vocab)
            # The same for every block of rows.
            z += COLUMN_MEANS * normal(np.random.default_rng(3), 1, vocab) + means
            origins = means[:, 0]
        else:
            z = np.float32(self.std) * normal(rng, rows, vocab)
            origins = z[places, targets.labels]
        for column, height in zip(targets.columns.T, targets.heights.T, strict=True):
            z[places, column] = origins + height
        return z

    def weights(self, rng: Rng, rows: int, width: int) -> F32:
        """Rows of the weight [rows, width]."""
        w = normal(rng, rows, width)
        if self.name != "trained":
            return w * np.float32(self.std / width**0.5)
        w *= np.exp(WEIGHT_NORMS * normal(rng, rows, 1)) * np.float32(WEIGHT_NORM / width**0.5)
        for index, at in enumerate(leading(width)):
            mean = LEADING_WEIGHT if index == 0 else 0
            w[:, at] = mean + LEADING_WEIGHTS * normal(rng, rows)
        return w

    def hidden(self, rng: Rng, targets: Targets, width: int, weight: Any) -> F32:
        """Hidden states [rows, width] for a weight whose rows `weight` gives in float32."""
        h = normal(rng, len(targets.labels), width)
        origins: Any = 0.0
        # Dimensions that stay, and so the rows' means.
        fixed: list[int] = []
        if self.name == "trained":
            of_leading = sum((deviation * LEADING_WEIGHTS) ** 2 for _, deviation in LEADING)
            squares = (targets.heights**2).sum(1, keepdims=True)
            rest = NOISE**2 - of_leading - squares / width
            h *= np.sqrt(np.maximum(rest, 0.5)) / WEIGHT_NORM
            fixed = leading(width)
            for place, (mean, deviation) in zip(fixed, LEADING, strict=False):
                h[:, place] = mean + deviation * normal(rng, len(h))
            origins = LEADING_WEIGHT * h[:, fixed[0]] if fixed else 0.0
        of_label = weight(targets.labels) if self.name == "peaked" else np.float32(0)
        for column, height in zip(targets.columns.T, targets.heights.T, strict=True):
            # Along the column's weights, until its logit is what it should be.
            along = weight(column)
            over = along - of_label
            along[:, fixed] = 0
            slope = np.einsum("nd,nd->n", along, over)
            lacking = origins + height - np.einsum("nd,nd->n", h, over)
            by = np.where(slope > 0, lacking / np.where(slope > 0, slope, 1), 0)
            h += by[:, None].astype(np.float32) * along
        return h


# Those that logits have by themselves, and those that a product has.
OF_LOGITS = ("normal", "uniform", "masked", "peaked", "trained")
OF_PRODUCTS = ("normal", "peaked", "trained")


def add_arguments(
    parser: argparse.ArgumentParser,
    stds: tuple[float, ...] = (1.0,),
    names: tuple[str, ...] = OF_PRODUCTS,
) -> None:
    """The options that choose distributions, of those called `names`."""
    parser.add_argument(
        "--distribution",
        nargs="+",
        default=["normal"],
        choices=names,
        help="of the logits; those that have a deviation once for each of --std",
    )
    parser.add_argument("--std", nargs="+", type=float, default=stds, help="of such logits")
    parser.add_argument("--share", type=float, default=1.0, help="of tokens that have a peak")
    parser.add_argument("--height", type=float, default=38.0, help="nats of peaks above labels")


def chosen(options: argparse.Namespace) -> list[str]:
    """The distributions of the command line."""
    found: list[Distribution] = []
    for name in options.distribution:
        if name in ("normal", "uniform", "masked"):
            found += [Distribution(name, std=std) for std in options.std]
        elif name == "peaked":
            found.append(Distribution(name, share=options.share, height=options.height))
        else:
            found.append(Distribution(name))
    return list(dict.fromkeys(map(str, found)))
