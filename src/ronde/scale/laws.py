"""Fit Amdahl's law and the universal scalability law (USL) to a few measured rates.

With N devices of ``rate`` samples per second each::

    Amdahl (1967):     X(N) = rate · N / (1 + serial · (N - 1))
    USL (Gunther 2007): X(N) = rate · N / (1 + contention · (N - 1) + coherency · N · (N - 1))

Contention is the serial share; coherency is the cost per pair of devices, which makes the curve
turn down. The cost per sample is linear in both: ``N / X = a + b (N - 1) + c N (N - 1)``. So the
fit is a linear least-squares problem with non-negative coefficients, solved exactly. Errors are
relative: one percent at 1 counts as much as at 64.

Intervals come from refits to the fitted curve with new errors of the observed size (a parametric
bootstrap), widened by Student's t for few degrees of freedom. With none, an error is assumed, and
the fit says so. Beyond the largest size, see :class:`Extrapolation`: no law needs to hold there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ronde.predict.intervals import NORMAL_95, Band, student_t95
from ronde.world import ArgumentError

# Log error of an extrapolation for each doubling: at least, and where no size could be held out.
# Calibrated on curves of six shapes (laws, logarithms, powers, rings, caps): 9 of 10 are inside.
_PER_DOUBLING, _UNTESTED = 0.15, 0.2
Law = Literal["amdahl", "usl", "pairs"]
Parameter = Literal["rate", "contention", "coherency"]
_PARAMETERS: tuple[Parameter, ...] = ("rate", "contention", "coherency")

_ASSUMED_ERROR = 0.05  # relative error of a point, if nothing shows it
_LEAST_ERROR = 0.01  # no measurement is better than this


@dataclass(frozen=True)
class LawFit:
    """One law, fitted.

    Attributes:
        law: ``"amdahl"`` or ``"usl"``.
        rate: samples per second of one device.
        contention: the serial share.
        coherency: cost per pair of devices; 0 under Amdahl's law.
        points: numbers of devices that were measured.
        freedom: degrees of freedom of the error; large if it was assumed.
        error: relative error of a point.
        assumed: whether ``error`` is an assumption.
        misfit: largest relative distance of a point from the curve.
        notes: limits of the fit.
    """

    law: Law
    rate: float
    contention: float
    coherency: float
    points: tuple[int, ...]
    freedom: int
    error: float
    assumed: bool
    misfit: float = 0.0
    notes: tuple[str, ...] = ()
    draws: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((0, 3)), repr=False, compare=False
    )

    def at(self, devices: float) -> float:
        """Samples per second at a number of devices."""
        return float(_curve(self.rate, self.contention, self.coherency, devices))

    def band(self, devices: float) -> Band:
        """The same with its interval."""
        rate, contention, coherency = self.draws.T
        return self._band(self.at(devices), _curve(rate, contention, coherency, devices))

    def parameter(self, name: Parameter) -> Band:
        """A parameter with its interval."""
        return self._band(getattr(self, name), self.draws[:, _PARAMETERS.index(name)])

    def _band(self, value: float, draws: NDArray[np.float64]) -> Band:
        if not len(draws):
            return Band(value, value, value)
        low, high = np.percentile(draws, [2.5, 97.5])
        return Band(value, min(value, float(low)), max(value, float(high)))

    @property
    def peak(self) -> float:
        """Devices beyond which more are slower; infinite if there is no such number."""
        if self.contention > 1.0:
            return 1.0
        if self.coherency <= 0:
            return math.inf
        return max(1.0, math.sqrt((1.0 - self.contention) / self.coherency))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None for infinite ones."""
        bands = {name: self.parameter(name) for name in _PARAMETERS}
        return {
            **{name: band.value for name, band in bands.items()},
            "low": {name: band.low for name, band in bands.items()},
            "high": {name: band.high for name, band in bands.items()},
            "peak": self.peak if math.isfinite(self.peak) else None,
            "points": list(self.points),
            "degrees_of_freedom": self.freedom,
            "relative_error": self.error,
            "error_assumed": self.assumed,
            "notes": list(self.notes),
        }


def _curve(rate: Any, contention: Any, coherency: Any, n: Any) -> Any:
    return rate * n / (1.0 + contention * (n - 1) + coherency * n * (n - 1))


def _columns(devices: NDArray[np.float64], law: Law) -> NDArray[np.float64]:
    pairs = devices * (devices - 1)
    serial = devices - 1 if law != "pairs" else np.zeros_like(devices)
    return np.stack([np.ones_like(devices), serial, pairs][: 2 if law == "amdahl" else 3], axis=1)


def _solve(
    devices: NDArray[np.float64], rates: NDArray[np.float64], law: Law
) -> NDArray[np.float64]:
    """Rate, contention and coherency with the least relative squares, none negative, for each row
    of ``rates``. Tries every choice of coefficients that are zero.
    """
    columns = _columns(devices, law)
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = columns[None] / scale * (rates / devices)[:, :, None]
    best, least = np.zeros((len(rates), 3)), np.full(len(rates), math.inf)
    choices = {
        "amdahl": [[0], [0, 1]],
        "usl": [[0], [0, 1], [0, 2], [0, 1, 2]],
        "pairs": [[0], [0, 2]],
    }[law]
    for chosen in choices:
        terms = weighted[:, :, chosen]
        transposed = terms.transpose(0, 2, 1)
        try:
            fits = np.linalg.solve(transposed @ terms, transposed.sum(axis=2, keepdims=True))
        except np.linalg.LinAlgError:
            continue  # two of the columns are equal
        errors = (((terms @ fits)[:, :, 0] - 1.0) ** 2).sum(axis=1)
        better = (fits[:, 0, 0] > 0) & (fits[:, :, 0] >= 0).all(axis=1) & (errors < least)
        best[better] = 0.0
        best[np.ix_(better, chosen)] = fits[better, :, 0] / scale[chosen]
        least[better] = errors[better]
    if law == "amdahl":
        # The serial share is at most 1: N / X = a N.
        over = best[:, 1] > best[:, 0]
        serial = rates.sum(axis=1) / (rates**2).sum(axis=1)
        best[over] = np.stack([serial, serial, np.zeros(len(rates))], axis=1)[over]
    return np.stack([1.0 / best[:, 0], best[:, 1] / best[:, 0], best[:, 2] / best[:, 0]], axis=1)


def fit_law(points: Mapping[int, Sequence[float]] | Mapping[int, float], law: Law) -> LawFit | None:
    """Fit one law.

    Args:
        points: devices -> samples per second, or several such readings. Their median counts; their
            spread shows the error.
        law: ``"amdahl"`` or ``"usl"``; ``"pairs"`` is the latter without contention.

    Returns:
        Fit, or None with fewer numbers of devices than the law has parameters (2, 3, and 2).

    Raises:
        ArgumentError: a rate or a number of devices is not above 0.

    Example:
        >>> law = fit_law({1: 100.0, 2: 181.8, 4: 307.7}, "amdahl")
        >>> round(law.contention, 2), round(law.at(16))
        (0.1, 640)
    """
    if law not in ("amdahl", "usl", "pairs"):
        raise ArgumentError(f"law={law!r} is unknown: choose amdahl or usl.")
    readings = {
        int(n): [float(x) for x in (rates if isinstance(rates, Sequence) else [rates])]
        for n, rates in points.items()
    }
    for n, each in readings.items():
        if n < 1 or not each or any(not (math.isfinite(x) and x > 0) for x in each):
            raise ArgumentError(
                f"{n} devices: {each}: expected samples per second above 0, for 1 device or more."
            )
    needed = 3 if law == "usl" else 2
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
        notes.append(f"{needed} parameters through {needed} points: the law itself is not tested")
    noise = min(max(error, _LEAST_ERROR), _ASSUMED_ERROR)
    if (rates / devices > rates[0] / devices[0] * (1 + 2 * noise)).any():
        notes.append(
            "faster than in proportion, which no law describes: the fit is a straight line"
        )
    if rates[-1] < rates.max() * (1 - noise):
        notes.append("the last devices made it slower")
    random = np.random.default_rng(0)  # the same points give the same interval
    scale = error * student_t95(freedom) / NORMAL_95
    drawn = fitted * np.exp(random.normal(0.0, scale, (400, len(devices))).clip(-3.0, 3.0))
    draws = _solve(devices, drawn, law)
    misfit = float(np.abs(rates / fitted - 1.0).max())
    return LawFit(
        law,
        *parameters,
        tuple(ordered),
        freedom,
        error,
        assumed,
        misfit,
        tuple(notes),
        draws,
    )


def _error(
    readings: dict[int, list[float]],
    ordered: list[int],
    residuals: NDArray[np.float64],
    parameters: int,
) -> tuple[float, int, bool]:
    """Relative error of a point's median, its degrees of freedom, and whether it is assumed."""
    logs = [[math.log(x) for x in readings[n]] for n in ordered if len(readings[n]) > 1]
    repeats = sum(len(each) - 1 for each in logs)
    squares = sum((len(each) - 1) * statistics.stdev(each) ** 2 for each in logs)
    pooled = math.sqrt(squares / repeats) if repeats else 0.0
    # The error of a median is 1.25 times that of the mean.
    many = statistics.mean(len(readings[n]) for n in ordered)
    own = (1.25 if many > 2 else 1.0) * pooled / math.sqrt(many)
    spare = len(ordered) - parameters
    misfit = math.sqrt(float(np.sum(residuals**2)) / spare) if spare > 0 else 0.0
    if misfit > own:
        return max(misfit, _LEAST_ERROR), spare, False
    if repeats:
        return max(own, _LEAST_ERROR), repeats, False
    if spare > 0:
        return max(misfit, _LEAST_ERROR), spare, False
    return _ASSUMED_ERROR, 10**6, True


def fits(points: Mapping[int, Sequence[float]] | Mapping[int, float]) -> dict[str, LawFit]:
    """Both laws, as far as the number of points allows."""
    laws: tuple[Law, ...] = ("amdahl", "usl")
    return {law: each for law in laws if (each := fit_law(points, law)) is not None}


class Extrapolation:
    """Rates at any size with intervals that count what no law knows.

    Beyond the largest size, the interval is that of every law that the points allow, also of one
    whose whole loss is between pairs of devices. For each doubling it widens by the error with
    which the sizes below the largest predict the largest.

    Args:
        points: as in :func:`fit_law`.
        law: the law that is used.
    """

    def __init__(self, points: Mapping[int, Sequence[float]], law: LawFit) -> None:
        self.law, self.largest = law, law.points[-1]
        every = [*fits(points).values(), *filter(None, [fit_law(points, "pairs")])]
        least = max(_ASSUMED_ERROR, 2.0 * min(each.misfit for each in every))
        self.rivals = [each for each in every if each.misfit <= least]
        self.is_tested, self.per_doubling = False, _UNTESTED
        below = {n: rates for n, rates in points.items() if n != self.largest}
        held = [each.at(self.largest) for each in fits(below).values()]
        if held:
            self.is_tested = True
            truth = statistics.median(points[self.largest])
            off = max(abs(math.log(value / truth)) for value in held)
            doublings = math.log2(self.largest / max(below))
            self.per_doubling = max(_PER_DOUBLING, 1.5 * off / doublings)

    def band(self, devices: float) -> Band:
        """Samples per second with their interval."""
        band = self.law.band(devices)
        if devices <= self.largest:
            return band
        rates = [rival.at(devices) for rival in self.rivals]
        doublings = math.log2(devices / self.largest)
        factor = math.exp(self.per_doubling * doublings * (doublings + 1) / 2)
        straight = self.law.at(self.largest) * devices / self.largest  # hardly ever more than that
        high = max(band.high, max(rates) * factor) if self.is_tested else math.inf
        high = min(high, straight * (1 + _PER_DOUBLING))
        low = min(rates) / factor
        return Band(band.value, min(band.low, low), max(band.value, high))


def marginal(rate: Callable[[float], float], devices: int) -> float:
    """The gain from the last of so many devices, relative to the first device's rate.

    Example:
        >>> marginal(lambda n: 100.0 * n, 8)
        1.0
    """
    return (rate(devices) - rate(devices - 1)) / rate(1) if devices > 1 else 1.0


def stop_at(rate: Callable[[float], float], upto: int, threshold: float = 0.5) -> int:
    """The largest number of devices, at most ``upto``, where each further one adds at least
    ``threshold`` of what the first gives.

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
