"""Fit costs that grow with the number of samples."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.predict import LinearCost

Points = Sequence[tuple[float, float]]


def line(points: Points) -> LinearCost:
    """The line through (samples, cost) with the least squared relative error, nowhere negative."""
    points = [(float(x), float(y)) for x, y in points]
    if not points:
        return LinearCost()
    if len({x for x, _ in points}) == 1:
        x, y = points[0][0], sum(y for _, y in points) / len(points)
        return LinearCost(0.0, y / x)
    weighted = [(1.0 / max(y * y, 1e-30), x, y) for x, y in points]
    total = sum(w for w, _, _ in weighted)
    mean_x = sum(w * x for w, x, _ in weighted) / total
    mean_y = sum(w * y for w, _, y in weighted) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x, _ in weighted)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in weighted) / spread
    free = LinearCost(mean_y - slope * mean_x, slope)
    if free.fixed >= 0 and free.per_sample >= 0:
        return free
    through = sum(w * x * y for w, x, y in weighted) / sum(w * x * x for w, x, _ in weighted)

    def error(fit: LinearCost) -> float:
        return sum(((fit.at(x) - y) / max(abs(y), 1e-30)) ** 2 for x, y in points)

    return min(LinearCost(max(0.0, mean_y), 0.0), LinearCost(0.0, max(0.0, through)), key=error)


def most(points: Points) -> LinearCost:
    """The line from the first to the last of (samples, peak bytes), nowhere negative.

    With few samples the peak comes when gradients are there, with many when activations are: it is
    the largest of several lines, and so nowhere above its chord.
    """
    (x0, y0), *_, (x1, y1) = [min(points), max(points)]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    if slope <= 0 < x1 - x0:
        return LinearCost(float(y0), 0.0)
    fixed = y0 - slope * x0
    if x0 == x1 or fixed < 0:
        return LinearCost(0.0, max(y0 / x0, y1 / x1))
    return LinearCost(float(fixed), float(slope))
