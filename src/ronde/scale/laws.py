"""How speed grows with devices: Amdahl's law and the universal scalability law, fitted to a few
measured points.

With N devices that would each do ``rate`` samples a second alone::

    Amdahl (1967):     X(N) = rate · N / (1 + serial · (N - 1))
    USL (Gunther 2007): X(N) = rate · N / (1 + contention · (N - 1) + coherency · N · (N - 1))

Contention is what only one at a time can do (or all wait for); coherency is what each has to settle
with every other, and makes the curve
turn down. Both are linear in what a sample costs: ``N / X = a + b (N - 1) + c N (N - 1)``. So the
fit is a linear least-squares problem with coefficients that are not negative, solved exactly;
relative errors count, a percent at 1 as much as one at 64.

Few points bear few conclusions: the intervals come from refits to the fitted curve with new errors
of the observed size (a parametric bootstrap), widened by Student's t for the degrees of freedom
that there are; where there are none, an error is assumed, and said to be.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ronde.world import ArgumentError

__all__ = ["Band", "LawFit", "fit", "fits", "marginal", "stop_at"]

Law = Literal["amdahl", "usl"]

_ASSUMED = 0.05  # relative error of a point where nothing tells
_LEAST = 0.01  # nothing is measured better than this
_DRAWS = 400
# Student's t, 97.5 %, by degrees of freedom.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_NORMAL = 1.960


def _t(freedom: int) -> float:
    if freedom < 1:
        return _T[0]
    return _T[freedom - 1] if freedom <= len(_T) else _NORMAL + 2.4 / freedom


@dataclass(frozen=True)
class Band:
    """A value and its interval (95 %)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    """One law, fitted.

    Attributes:
        law: ``"amdahl"`` or ``"usl"``.
        rate: samples per second of one device.
        contention: share that does not divide; Amdahl's serial share.
        coherency: cost of agreement between each two; 0 under Amdahl's law.
        points: numbers of devices that were measured.
        freedom: degrees of freedom of the error; 0 where it was assumed.
        error: relative error of a point.
        assumed: whether ``error`` is an assumption: nothing was left to tell it.
        notes: what to know of it.
    """

    law: Law
    rate: float
    contention: float
    coherency: float
    points: tuple[int, ...]
    freedom: int
    error: float
    assumed: bool
    notes: tuple[str, ...] = ()
    draws: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((0, 3)), repr=False, compare=False
    )

    def at(self, devices: float) -> float:
        """Samples per second of so many."""
        return float(_curve(self.rate, self.contention, self.coherency, devices))

    def band(self, devices: float) -> Band:
        """The same with its interval."""
        value = self.at(devices)
        if not len(self.draws):
            return Band(value, value, value)
        low, high = np.percentile(
            _curve(self.draws[:, 0], self.draws[:, 1], self.draws[:, 2], devices), [2.5, 97.5]
        )
        return Band(value, min(value, float(low)), max(value, float(high)))

    def parameter(self, name: Literal["rate", "contention", "coherency"]) -> Band:
        """A parameter with its interval."""
        value = float(getattr(self, name))
        if not len(self.draws):
            return Band(value, value, value)
        low, high = np.percentile(
            self.draws[:, ("rate", "contention", "coherency").index(name)], [2.5, 97.5]
        )
        return Band(value, min(value, float(low)), max(value, float(high)))

    @property
    def peak(self) -> float:
        """Devices beyond which more make it slower; infinite where that never happens."""
        if self.contention > 1.0:
            return 1.0
        return (
            max(1.0, math.sqrt((1.0 - self.contention) / self.coherency))
            if self.coherency > 0
            else math.inf
        )

    @property
    def most(self) -> float:
        """Samples per second that no number of devices exceeds; infinite without contention."""
        if math.isfinite(self.peak):
            return self.at(self.peak)
        return self.rate / self.contention if self.contention > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is infinite is None."""
        contention, coherency, rate = (
            self.parameter(n) for n in ("contention", "coherency", "rate")
        )  # type: ignore[arg-type]
        values: dict[str, Any] = {
            "rate": rate.value,
            "contention": contention.value,
            "coherency": coherency.value,
            "low": {"rate": rate.low, "contention": contention.low, "coherency": coherency.low},
            "high": {"rate": rate.high, "contention": contention.high, "coherency": coherency.high},
            "peak": self.peak if math.isfinite(self.peak) else None,
            "most": self.most if math.isfinite(self.most) else None,
            "points": list(self.points),
            "degrees_of_freedom": self.freedom,
            "relative_error": self.error,
            "error_assumed": self.assumed,
            "notes": list(self.notes),
        }
        return values


def _curve(rate: Any, contention: Any, coherency: Any, n: Any) -> Any:
    return rate * n / (1.0 + contention * (n - 1) + coherency * n * (n - 1))


def _columns(devices: NDArray[np.float64], law: Law) -> NDArray[np.float64]:
    one = np.ones_like(devices)
    found = [one, devices - 1] + ([devices * (devices - 1)] if law == "usl" else [])
    return np.stack(found, axis=1)


def _solve(
    devices: NDArray[np.float64], rates: NDArray[np.float64], law: Law
) -> NDArray[np.float64]:
    """Rate, contention and coherency with the least relative squares, none negative, for each row
    of ``rates``.

    Whichever coefficients of ``N / X`` are 0 at the best: every choice is tried, so that the least
    is the least of all.
    """
    columns = _columns(devices, law)
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = columns[None] / scale * (rates / devices)[:, :, None]
    best, least = np.zeros((len(rates), 3)), np.full(len(rates), math.inf)
    free = range(1, columns.shape[1])
    for kept in itertools.chain.from_iterable(
        itertools.combinations(free, k) for k in range(len(free) + 1)
    ):
        chosen = [0, *kept]
        terms = weighted[:, :, chosen]
        turned = terms.transpose(0, 2, 1)
        try:
            found = np.linalg.solve(turned @ terms, turned.sum(axis=2, keepdims=True))
        except np.linalg.LinAlgError:
            continue  # two of the columns say the same
        left = (terms @ found)[:, :, 0] - 1.0
        lost = (left**2).sum(axis=1)
        better = (found[:, 0, 0] > 0) & (found[:, :, 0] >= 0).all(axis=1) & (lost < least)
        best[better] = 0.0
        best[np.ix_(better, chosen)] = found[better, :, 0] / scale[chosen]
        least[better] = lost[better]
    if law == "amdahl":
        # What does not divide is at most all of it: N / X = a N.
        over = best[:, 1] > best[:, 0]
        all_of_it = rates.sum(axis=1) / (rates**2).sum(axis=1)
        best[over] = np.stack([all_of_it, all_of_it, np.zeros(len(rates))], axis=1)[over]
    return np.stack([1.0 / best[:, 0], best[:, 1] / best[:, 0], best[:, 2] / best[:, 0]], axis=1)


def fit(points: Mapping[int, Sequence[float]] | Mapping[int, float], law: Law) -> LawFit | None:
    """Fit one law.

    Args:
        points: devices -> samples per second, or several such readings. Their median counts; how
            they differ tells the error.
        law: ``"amdahl"`` or ``"usl"``.

    Returns:
        Fit, or None where there are fewer numbers of devices than the law has parameters (2 and 3).

    Raises:
        ArgumentError: a rate or a number of devices that is not above 0.

    Example:
        >>> found = fit({1: 100.0, 2: 181.8, 4: 307.7}, "amdahl")
        >>> round(found.contention, 2), round(found.at(16))
        (0.1, 640)
    """
    if law not in ("amdahl", "usl"):
        raise ArgumentError(f"law={law!r} is not known: choose amdahl or usl.")
    readings = {
        int(n): [float(x) for x in (found if isinstance(found, Sequence) else [found])]
        for n, found in points.items()
    }
    for n, found in readings.items():
        if n < 1 or not found or any(not (math.isfinite(x) and x > 0) for x in found):
            raise ArgumentError(
                f"{n} devices: {found}: expected samples per second above 0, for 1 device or more."
            )
    needed = 2 if law == "amdahl" else 3
    if len(readings) < needed:
        return None
    ordered = sorted(readings)
    devices = np.array(ordered, dtype=float)
    rates = np.array([statistics.median(readings[n]) for n in ordered])
    rate, contention, coherency = (float(v) for v in _solve(devices, rates[None], law)[0])
    parameters = (rate, contention, coherency)
    fitted = _curve(*parameters, devices)
    error, freedom, assumed = _error(readings, ordered, rates / fitted - 1.0, needed)
    notes = []
    if len(ordered) == needed:
        notes.append(
            f"{needed} parameters through {needed} points: the law itself is not tested by them"
        )
    if any(
        x / n > rates[0] / devices[0] * (1 + 2 * min(max(error, _LEAST), _ASSUMED))
        for n, x in zip(ordered, rates, strict=True)
    ):
        notes.append("faster than in proportion: the law has no such curve, and is drawn straight")
    if rates[-1] < rates.max() * (1 - min(max(error, _LEAST), _ASSUMED)):
        notes.append("the last devices made it slower")
    random = np.random.default_rng(0)  # the same points give the same interval
    # A draw of Student's t has the spread of the error where few points tell how large that is.
    scale = error * _t(freedom) / _NORMAL
    drawn = fitted * np.exp(random.normal(0.0, scale, (_DRAWS, len(devices))).clip(-3.0, 3.0))
    draws = _solve(devices, drawn, law)
    return LawFit(law, *parameters, tuple(ordered), freedom, error, assumed, tuple(notes), draws)


def _error(
    readings: dict[int, list[float]],
    ordered: list[int],
    residuals: NDArray[np.float64],
    parameters: int,
) -> tuple[float, int, bool]:
    """Relative error of a point's median, its degrees of freedom, and whether it is assumed."""
    inner = [
        (len(readings[n]) - 1, statistics.stdev([math.log(x) for x in readings[n]]))
        for n in ordered
        if len(readings[n]) > 1
    ]
    repeats = sum(k for k, _ in inner)
    pooled = math.sqrt(sum(k * s * s for k, s in inner) / repeats) if repeats else 0.0
    # The median of k readings errs 1.25 times as much as their mean.
    many = statistics.mean(len(readings[n]) for n in ordered)
    own = (1.25 if many > 2 else 1.0) * pooled / math.sqrt(many)
    spare = len(ordered) - parameters
    misfit = math.sqrt(float(np.sum(residuals**2)) / spare) if spare > 0 else 0.0
    if misfit > own:
        return max(misfit, _LEAST), spare, False
    if repeats:
        return max(own, _LEAST), repeats, False
    if spare > 0:
        return max(misfit, _LEAST), spare, False
    return _ASSUMED, 10**6, True


def fits(points: Mapping[int, Sequence[float]] | Mapping[int, float]) -> dict[str, LawFit]:
    """Both laws, as far as there are points for them."""
    return {law: found for law in ("amdahl", "usl") if (found := fit(points, law)) is not None}  # type: ignore[arg-type]


def marginal(rate: Callable[[float], float], devices: int) -> float:
    """What the last of so many devices adds, as a share of what the first gives.

    Example:
        >>> marginal(lambda n: 100.0 * n, 8)
        1.0
    """
    return (rate(devices) - rate(devices - 1)) / rate(1) if devices > 1 else 1.0


def stop_at(rate: Callable[[float], float], upto: int, threshold: float = 0.5) -> int:
    """The largest number of devices up to which every further one adds at least ``threshold`` of
    what the first gives.

    Args:
        rate: devices -> samples per second.
        upto: where to end looking.
        threshold: share of the first device's rate.

    Returns:
        int: ``upto`` itself where it pays all the way.

    Raises:
        ArgumentError: a threshold outside 0 to 1.

    Example:
        >>> stop_at(lambda n: min(n, 18.6) * 250.0, 64)
        19
    """
    if not 0 < threshold <= 1:
        raise ArgumentError(f"threshold={threshold!r} must be above 0 and at most 1.")
    if upto < 1:
        raise ArgumentError(f"upto={upto!r} must be 1 or more.")
    for n in range(2, upto + 1):
        if marginal(rate, n) < threshold:
            return n - 1
    return upto
