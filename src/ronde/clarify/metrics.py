"""Bias metrics of one group against the rest, from a table of integers.

The 21 metrics are those of SageMaker Clarify, with its names and signs: *d* is the group in
question, *a* everyone else, and a positive difference means that *d* fares worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["METRICS", "Measure", "flip_test", "measure_all", "newcombe", "wilson"]

_Z = 1.959963984540054  # two-sided 95 %

METRICS: dict[str, tuple[str, str]] = {
    "CI": ("before", "class imbalance"),
    "DPL": ("before", "difference in positive labels"),
    "KL": ("before", "Kullback-Leibler divergence of labels"),
    "JS": ("before", "Jensen-Shannon divergence of labels"),
    "LP": ("before", "L2 distance of labels"),
    "TVD": ("before", "total variation distance of labels"),
    "KS": ("before", "largest difference in a label's share"),
    "CDDL": ("before", "demographic disparity of labels, by group"),
    "DPPL": ("after", "difference in positive predictions"),
    "DI": ("after", "disparate impact: ratio of these"),
    "DCA": ("after", "difference in conditional acceptance"),
    "DCR": ("after", "difference in conditional rejection"),
    "SD": ("after", "specificity difference"),
    "RD": ("after", "recall difference"),
    "DAR": ("after", "difference in acceptance rates: precision"),
    "DRR": ("after", "difference in rejection rates"),
    "AD": ("after", "accuracy difference"),
    "TE": ("after", "treatment equality: FN per FP"),
    "CDDPL": ("after", "demographic disparity of predictions, by group"),
    "FT": ("after", "flip test: treated as nearest neighbors?"),
    "GE": ("after", "generalized entropy of errors, all rows"),
}


@dataclass(frozen=True)
class Measure:
    """One metric of one comparison.

    Attributes:
        name: as in :data:`METRICS`.
        value: or None where the counts do not define it.
        low: of the 95 % interval, or None.
        high: of the 95 % interval, or None.
        why: there is no value.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""

    @property
    def shown(self) -> str:
        """The value, or a dash."""
        if self.value is None:
            return "–"
        sign = "" if self.name in ("DI", "KL", "JS", "LP", "TVD", "KS", "GE") else "+"
        return f"{self.value:{sign}z.3f}"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return self.shown
        return f"{self.shown} [{self.low:z.3f}, {self.high:z.3f}]"


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion (Wilson 1927).

    Example:
        >>> [round(v, 4) for v in wilson(81, 263)]
        [0.2553, 0.3662]
    """
    p, z2 = hits / of, _Z * _Z
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == of else middle + half)


def newcombe(hits_1: int, of_1: int, hits_2: int, of_2: int) -> tuple[float, float]:
    """The 95 % interval of a difference of two proportions (Newcombe 1998, method 10).

    Example:
        >>> [round(v, 4) for v in newcombe(56, 70, 48, 80)]
        [0.0524, 0.3339]
    """
    p, q = hits_1 / of_1, hits_2 / of_2
    (l1, u1), (l2, u2) = wilson(hits_1, of_1), wilson(hits_2, of_2)
    return p - q - math.hypot(p - l1, u2 - q), p - q + math.hypot(u1 - p, q - l2)


def _ratio_interval(hits_1: int, of_1: int, hits_2: int, of_2: int) -> tuple[float, float | None]:
    """Of a ratio of two proportions, from Wilson's intervals of both (Donner and Zou 2012)."""
    p, q = hits_1 / of_1, hits_2 / of_2
    (l1, u1), (l2, u2) = wilson(hits_1, of_1), wilson(hits_2, of_2)
    low = p * q - math.sqrt(max(0.0, (p * q) ** 2 - l1 * u2 * (2 * p - l1) * (2 * q - u2)))
    high = p * q + math.sqrt(max(0.0, (p * q) ** 2 - u1 * l2 * (2 * p - u1) * (2 * q - l2)))
    above, below = u2 * (2 * q - u2), l2 * (2 * q - l2)
    return (low / above if above > 0 else 0.0), (high / below if below > 0 else None)


@dataclass(frozen=True)
class _Side:
    """Counts of one side, binary: label and prediction are positive or not."""

    name: str
    tp: int
    fn: int
    fp: int
    tn: int

    def part(self, which: str) -> tuple[int, int, str]:
        """A proportion: its hits, of how many, and the name of these."""
        tp, fn, fp, tn = self.tp, self.fn, self.fp, self.tn
        return {
            "labels": (tp + fn, tp + fn + fp + tn, "row"),
            "selected": (tp + fp, tp + fn + fp + tn, "row"),
            "recall": (tp, tp + fn, "positive label"),
            "specificity": (tn, tn + fp, "negative label"),
            "precision": (tp, tp + fp, "positive prediction"),
            "rejection": (tn, tn + fn, "negative prediction"),
            "accuracy": (tp + tn, tp + fn + fp + tn, "row"),
        }[which]

    def quotient(self, above: int, below: int, of: str) -> tuple[float | None, str]:
        """A quotient of counts, and why there is none."""
        return (above / below, "") if below else (None, f"no {of} in {self.name}")


def _difference(name: str, which: str, one: _Side, other: _Side) -> Measure:
    """A proportion of one side minus that of the other."""
    (h1, n1, of), (h2, n2, _) = one.part(which), other.part(which)
    for side, n in ((one, n1), (other, n2)):
        if not n:
            return Measure(name, None, why=f"no {of} in {side.name}")
    return Measure(name, h1 / n1 - h2 / n2, *newcombe(h1, n1, h2, n2))


def _difference_of(
    name: str, one: tuple[float | None, str], other: tuple[float | None, str]
) -> Measure:
    (x, why), (y, why_too) = one, other
    if x is None or y is None:
        return Measure(name, None, why=why or why_too)
    return Measure(name, x - y)


def _impact(d: _Side, a: _Side) -> Measure:
    (h1, n1, of), (h2, n2, _) = d.part("selected"), a.part("selected")
    for side, n in ((d, n1), (a, n2)):
        if not n:
            return Measure("DI", None, why=f"no {of} in {side.name}")
    if not h2:
        return Measure("DI", None, why=f"no positive prediction in {a.name}")
    return Measure("DI", (h1 / n1) / (h2 / n2), *_ratio_interval(h1, n1, h2, n2))


def _distances(labels: np.ndarray[Any, Any], names: Sequence[str]) -> list[Measure]:
    """KL, JS, LP, TVD and KS of the label's distributions.

    Args:
        labels: counts, ``[2 sides (a, d), labels]``.
    """
    pa, pd = (row / row.sum() for row in labels)
    gap = np.abs(pa - pd)
    middle = (pa + pd) / 2

    def kl(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
        some = p > 0
        return float(np.sum(p[some] * np.log(p[some] / q[some])))

    alone = [str(n) for n, p, q in zip(names, pa, pd, strict=True) if p > 0 and q == 0]
    divergence = (
        Measure("KL", None, why=f"infinite: label {alone[0]} occurs on one side only")
        if alone
        else Measure("KL", kl(pa, pd))
    )
    return [
        divergence,
        Measure("JS", 0.5 * (kl(pa, middle) + kl(pd, middle))),
        Measure("LP", float(np.sqrt(np.sum(gap * gap)))),
        Measure("TVD", float(0.5 * np.sum(gap))),
        Measure("KS", float(np.max(gap))),
    ]


def _disparity(name: str, hits: np.ndarray[Any, Any], grouped: bool) -> Measure:
    """Conditional demographic disparity: of each group, the share of *d* among the rejected minus
    that among the accepted, weighted by the groups' sizes. A share of nobody is 0, as in Clarify.

    Args:
        hits: counts, ``[2 sides (a, d), groups, 2 (rejected, accepted)]``.
    """
    if not grouped:
        return Measure(name, None, why="needs a group column")
    total = hits.sum(axis=0)
    for outcome, text in enumerate(("negative", "positive")):
        if not total[:, outcome].sum():
            return Measure(name, None, why=f"no {text} outcome at all")
    share = np.divide(hits[1], total, out=np.zeros(total.shape), where=total > 0)
    sizes = total.sum(axis=1)
    return Measure(name, float(np.sum(sizes * (share[:, 0] - share[:, 1])) / sizes.sum()))


def _entropy(counts: np.ndarray[Any, Any]) -> Measure:
    """Generalized entropy, alpha 2, of the benefits ``prediction - label + 1`` (Speicher 2018)."""
    (tn, fp), (fn, tp) = (counts[..., i, :].sum(axis=tuple(range(counts.ndim - 2))) for i in (0, 1))
    n, mean = int(tn + fp + fn + tp), int(tn + tp + 2 * fp)
    if not mean:
        return Measure("GE", None, why="every row is a false negative")
    return Measure("GE", (int(tn + tp + 4 * fp) * n / mean**2 - 1) / 2)


def measure_all(
    table: np.ndarray[Any, Any],
    positive: Sequence[bool],
    labels: Sequence[str],
    names: tuple[str, str],
    *,
    grouped: bool,
    predicted: bool,
    flip: Measure | None = None,
) -> list[Measure]:
    """All metrics of one comparison, in the order of :data:`METRICS`.

    Args:
        table: counts, ``[2 sides (a, d), groups, labels, 2 predictions (negative, positive)]``.
        positive: which labels are positive.
        labels: their names.
        names: of the sides, ``(a, d)``.
        grouped: whether the groups are a column of the user's.
        predicted: whether there are predictions; else only the metrics before training.
        flip: the result of :func:`flip_test`.
    """
    sizes = [int(side.sum()) for side in table]
    for size, name in zip(sizes, names, strict=True):
        if not size:
            kinds = ("before", "after") if predicted else ("before",)
            return [
                Measure(m, None, why=f"no row in {name}") for m in METRICS if METRICS[m][0] in kinds
            ]
    yes = np.asarray(positive, dtype=bool)
    # [side, group, label positive?, predicted positive?]
    binary = np.stack([table[:, :, ~yes].sum(axis=2), table[:, :, yes].sum(axis=2)], axis=2)
    a, d = (
        _Side(name, *(int(side[:, i, j].sum()) for i, j in ((1, 1), (1, 0), (0, 1), (0, 0))))
        for name, side in zip(names, binary, strict=True)
    )
    # CI is 1 - 2 p of the share p of d: its interval is that of p
    low, high = wilson(sizes[1], sum(sizes))
    imbalance = Measure("CI", (sizes[0] - sizes[1]) / sum(sizes), 1 - 2 * high, 1 - 2 * low)
    result = [imbalance, _difference("DPL", "labels", a, d)]
    result += _distances(table.sum(axis=(1, 3)), labels)
    result.append(_disparity("CDDL", binary.sum(axis=3), grouped))
    if not predicted:
        return result

    def acceptance(side: _Side) -> tuple[float | None, str]:
        return side.quotient(side.tp + side.fn, side.tp + side.fp, "positive prediction")

    def rejection(side: _Side) -> tuple[float | None, str]:
        return side.quotient(side.tn + side.fp, side.tn + side.fn, "negative prediction")

    def treatment(side: _Side) -> tuple[float | None, str]:
        return side.quotient(side.fn, side.fp, "false positive")

    result += [
        _difference("DPPL", "selected", a, d),
        _impact(d, a),
        _difference_of("DCA", acceptance(a), acceptance(d)),
        _difference_of("DCR", rejection(d), rejection(a)),
        _difference("SD", "specificity", d, a),
        _difference("RD", "recall", a, d),
        _difference("DAR", "precision", a, d),
        _difference("DRR", "rejection", d, a),
        _difference("AD", "accuracy", a, d),
        _difference_of("TE", treatment(d), treatment(a)),
        _disparity("CDDPL", binary.sum(axis=2), grouped),
        flip or Measure("FT", None, why="needs columns of features"),
        _entropy(binary),
    ]
    return result


def flip_test(
    features: np.ndarray[Any, Any], of_d: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any]
) -> Measure:
    """Would members of *d* have been treated as their nearest neighbors in *a* were? ``(F+ - F-) /
    n_d``, where F+ counts those rejected whose neighbors were accepted, and F- the reverse. Of
    five neighbors (one, if *a* has fewer than ten rows) the majority counts.

    Args:
        features: numbers, ``[rows, columns]``; distances are Euclidean, so scale them before.
        of_d: whether a row belongs to *d*.
        predicted: whether a row's prediction is positive.
    """
    of_d, predicted = np.asarray(of_d, dtype=bool), np.asarray(predicted, dtype=bool)
    others, mine = (np.asarray(features[m], dtype=np.float64) for m in (~of_d, of_d))
    if not len(others) or not len(mine):
        return Measure("FT", None, why="no row on one side")
    k = 5 if len(others) > 9 else 1  # an odd number of votes, far fewer than voters
    accepted, norms = predicted[~of_d], np.sum(others * others, axis=1)
    flips = 0
    size = max(1, 4_000_000 // len(others))  # 32 MB of distances at a time
    for at in range(0, len(mine), size):
        distances = norms - 2 * (mine[at : at + size] @ others.T)
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :k]
        would = accepted[nearest].sum(axis=1) * 2 > k
        flips += int(np.sum(would.astype(int) - predicted[of_d][at : at + size].astype(int)))
    return Measure("FT", flips / len(mine))
