"""A loss curve in the terminal, drawn by plotille in braille dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most ``most`` points, each the mean of its neighbours."""
    if len(points) <= most:
        return list(points)
    size = len(points) / most
    groups = [
        points[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)] for i in range(most)
    ]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def curve(
    points: Sequence[tuple[float, float]],
    width: int = 64,
    height: int = 10,
    label: str = "loss",
    axis: str = "step",
) -> str:
    """Draw points as lines of text.

    Args:
        points: ``(x, y)`` with rising x; what is not finite is left out.
        width, height: size of the drawing in characters.

    Returns:
        str: ``height`` lines and two for the axis, and one above for a long label; empty if there
            are fewer than two points.
    """
    import plotille

    good = [(x, y) for x, y in points if math.isfinite(y)]
    if len(good) < 2:
        return ""
    left, right = good[0][0], good[-1][0]
    good = thin(good, width * 2)
    low, high = min(y for _, y in good), max(y for _, y in good)
    if left == right:
        return ""
    # Drawn between 0 and 1, so that no value is too large or too close to another for the canvas.
    # Halves do not overflow.
    span = high / 2 - low / 2
    drawn = [
        ((x - left) / (right - left), (y / 2 - low / 2) / span if span else 0.5) for x, y in good
    ]
    canvas = plotille.Canvas(width=width, height=height, xmin=0.0, ymin=0.0, xmax=1.0, ymax=1.001)
    for (x0, y0), (x1, y1) in itertools.pairwise(drawn):
        canvas.line(x0, y0, x1, y1)
    rows = canvas.plot().splitlines()
    marks = (
        {0: high, height // 2: high / 2 + low / 2, height - 1: low} if span else {height // 2: low}
    )
    lines = [
        f"{marks[i]:>9.4g} │{row}" if i in marks else f"{'':>9} │{row}"
        for i, row in enumerate(rows)
    ]
    start, end = f"{left:g}", f"{right:g} {axis}"
    if len(label) > 9:  # it does not fit beside the axis: a line of its own, whole
        lines.insert(0, label)
        label = ""
    lines.append(f"{label:>9} └{'─' * width}")
    lines.append(f"{'':>11}{start}{end:>{max(1, width - len(start))}}")
    return "\n".join(lines)
