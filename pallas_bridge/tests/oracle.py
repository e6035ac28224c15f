"""The contract in float64, by numpy, written from the formulas and not from the code.

And the limits within which a result counts as equal to it, which are gradcheck's.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Oracle:
    """What one problem should give; logits are [T, V], everything a token [T]."""

    logits: npt.NDArray[np.generic]
    labels: npt.NDArray[np.integer]
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Computes the forward values."""
        with np.errstate(all="ignore"):
            raw = self.logits.astype(np.float64)
            z = raw if self.softcap is None else self.softcap * np.tanh(raw / self.softcap)
            z = z / self.temperature
            highest = z.max(-1, keepdims=True)
            lse = np.log(np.exp(z - highest).sum(-1)) + highest[:, 0]
            lse[~np.isfinite(lse)] = np.nan
            vocab = z.shape[1]
            labels = self.labels.astype(object)  # no width, so no label wraps
            self_ = self.__dict__
            self_["ignored"] = np.array([label == self.ignore_index for label in labels], bool)
            in_range = np.array([0 <= label < vocab for label in labels], bool)
            self_["bad"] = ~in_range & ~self_["ignored"]
            column = np.where(in_range, labels, 0).astype(np.int64)
            tokens = np.arange(len(labels))
            logps = z[tokens, column] - lse
            e = self.label_smoothing
            loss = (1 - e) * -logps + self.z_loss * lse**2
            if e:
                loss = loss + e * (lse - z.mean(-1))
            for name, values in (("loss", loss), ("logps", logps)):
                values[self_["bad"]] = np.nan
                values[self_["ignored"]] = 0
                self_[name] = values
            self_.update(raw=raw, z=z, lse=lse, column=column, tokens=tokens)
            size = np.maximum(np.abs(lse), np.abs(z[tokens, column]))
            self_["size"] = np.maximum(np.nan_to_num(size, posinf=1.0), 1.0)

    def entropy(self) -> Floats:
        """Of every token's distribution, [T], as -sum p log p; 0 where ignored."""
        v = self.__dict__
        with np.errstate(all="ignore"):
            p = np.exp(v["z"] - v["lse"][:, None])
            terms = np.where(p == 0, 0, p * np.log(np.where(p == 0, 1, p)))
            return np.where(v["ignored"], 0, -terms.sum(-1))

    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether each label is the first column with the largest logit, [T]."""
        v = self.__dict__
        first = np.argmax(np.where(np.isnan(v["raw"]), -np.inf, v["raw"]), -1)
        found = np.array([int(label) for label in self.labels]) == first
        good: npt.NDArray[np.bool_] = found & ~np.isnan(v["lse"]) & ~v["ignored"]
        return good

    def column_logps(self, columns: npt.NDArray[np.integer]) -> Floats:
        """Of given columns [T, K]; 0 where ignored."""
        v = self.__dict__
        picked = np.take_along_axis(v["z"], columns, -1) - v["lse"][:, None]
        return np.where(v["ignored"][:, None], 0, picked)

    def gradient(
        self,
        g: npt.ArrayLike,
        h: npt.ArrayLike = 0.0,
        k: npt.ArrayLike = 0.0,
        q: npt.ArrayLike = 0.0,
    ) -> Floats:
        """The gradient [T, V] for cotangents of loss, logps, lse, entropy: [T] or numbers."""
        v = self.__dict__
        with np.errstate(all="ignore"):
            g, h, k, q = (
                np.broadcast_to(c, len(self.labels)).astype(float)[:, None] for c in (g, h, k, q)
            )
            lse = v["lse"][:, None]
            p = np.exp(v["z"] - lse)
            at_label = np.zeros_like(p)
            at_label[v["tokens"], v["column"]] = 1
            e, w = self.label_smoothing, self.z_loss
            dz = g * ((1 + 2 * w * lse) * p - (1 - e) * at_label - e / p.shape[1])
            dz += h * (at_label - p) + k * p
            # By the chain rule over p, where the contract has lse and the entropy.
            dp = np.where(p == 0, 0, -(np.log(np.where(p == 0, 1, p)) + 1))
            dz += q * p * (dp - (p * dp).sum(-1, keepdims=True))
            if self.softcap is not None:
                dz *= 1 - (v["z"] * self.temperature / self.softcap) ** 2
            dz /= self.temperature
            dz[v["z"] == -np.inf] = 0
            dz[np.isnan(lse[:, 0]) | v["bad"]] = np.nan
            dz[v["ignored"]] = 0
            dz[((g == 0) & (h == 0) & (k == 0) & (q == 0))[:, 0]] = 0
        return dz

    def factors(self, reduction: str, weights: Floats | None = None) -> Floats:
        """The factor of every token's loss in a reduced loss."""
        counted = np.ones(len(self.labels)) if weights is None else weights.astype(np.float64)
        counted = np.where(self.__dict__["ignored"], 0, counted)
        total = counted.sum() if reduction == "mean" else 1.0
        return counted / total if total else np.zeros_like(counted)

    def reduced(self, factors: Floats) -> float:
        """The reduced loss."""
        return float(np.where(factors == 0, 0, factors * self.__dict__["loss"]).sum())


def assert_tokens(name: str, actual: npt.ArrayLike, expected: Floats, size: Floats) -> None:
    """Compares loss, logps or lse: 2e-6 of the larger of lse, the label's logit and 1."""
    actual = np.asarray(actual)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), name
    with np.errstate(all="ignore"):
        error = np.where(actual == expected, 0, np.abs(actual - expected) / size)
    assert not (error > 2e-6).any(), f"{name}: relative error {np.nanmax(error)}"


def ulp(values: Floats, dtype: npt.DTypeLike) -> Floats:
    """The distance between neighbours of `dtype` at `values`."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(np.abs(values))
    least = float(info.smallest_subnormal)
    return np.maximum(np.ldexp(float(info.eps), exponent - 1), least)


def assert_gradient(
    actual: npt.ArrayLike,
    expected: Floats,
    cotangent: npt.ArrayLike,
    softcap: float | None = None,
    size: npt.ArrayLike = 0.0,
) -> None:
    """Compares dlogits [T, V] as gradcheck does.

    A unit in the last place (in f32 16, and one more for each 1024 that a token's `size` [T] has,
    since an exponent of that size is rounded too), or 2^-22 of the token's cotangent [T] or number
    (unlike gradcheck's 2^-23: p - 1 of a label has no more digits than the sum that p comes of, and
    here are thousands of small problems), and in the 16-bit dtypes 99.9 % of entries equal.
    """
    actual = np.asarray(actual)
    dtype = actual.dtype
    assert actual.shape == expected.shape
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), "gradient: NaN in other places"
    with np.errstate(all="ignore"):
        rounded = expected.astype(dtype).astype(np.float64)
        error = np.abs(actual.astype(np.float64) - rounded)
    units: Any = 1
    if dtype == np.float32:
        units = 16 + 4 * (softcap or 0) + np.broadcast_to(size, len(expected))[:, None] / 1024
    floor = 2.0**-22 * np.broadcast_to(np.abs(cotangent), len(expected))[:, None]
    allowed = np.maximum(units * ulp(rounded, dtype), floor)
    worst = np.nanmax(error / allowed) if error.size else 0
    assert not (error > allowed).any(), f"gradient: {worst} times what is allowed"
    # Of many rows: in one, a 16-bit logit that lies by a tie is hundreds of entries.
    if dtype != np.float32 and error.size >= 100_000 and len(expected) >= 16:
        share = np.mean(error[~np.isnan(error)] == 0)
        assert share >= 0.999, f"gradient: only {share} of entries equal"
