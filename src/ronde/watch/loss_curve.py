"""A loss curve in the terminal, drawn by plotille in braille dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

_LETTERS, _PLACES = 4, (1, 2, 4)  # on a curve, in quarters of it


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
    """Draw points as lines of text, see :func:`curves`."""
    return curves({"": points}, width, height, label, axis)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    width: int = 64,
    height: int = 10,
    label: str = "loss",
    axis: str = "step",
) -> str:
    """Draw several losses over the same steps. The letter that names each stands on it in places.

    Args:
        series: letter -> points ``(x, y)`` with rising x; what is not finite is left out.
        width, height: size of the drawing in characters.

    Returns:
        str: ``height`` lines and two for the axis, and one above for a long label; empty if there
            are fewer than two points.
    """
    import plotille

    good = {name: [p for p in points if math.isfinite(p[1])] for name, points in series.items()}
    good = {name: points for name, points in good.items() if len(points) > 1}
    if not good:
        return ""
    left = min(points[0][0] for points in good.values())
    right = max(points[-1][0] for points in good.values())
    if left == right:
        return ""
    most = width * 2 if len(series) == 1 else width // 2  # several that jitter hide each other
    good = {name: thin(points, most) for name, points in good.items()}
    every = [y for points in good.values() for _, y in points]
    low, high = min(every), max(every)
    # Drawn between 0 and 1, so that no value is too large or too close to another for the canvas.
    # Halves do not overflow.
    span = high / 2 - low / 2
    # ymax is slightly above 1, so that the largest value is inside.
    canvas = plotille.Canvas(width=width, height=height, xmin=0.0, ymin=0.0, xmax=1.0, ymax=1.001)
    letters: list[tuple[str, float, float]] = []
    for name, points in good.items():
        drawn = [
            ((x - left) / (right - left), (y / 2 - low / 2) / span if span else 0.5)
            for x, y in points
        ]
        for (x0, y0), (x1, y1) in itertools.pairwise(drawn):
            canvas.line(x0, y0, x1, y1)
        if name:
            letters += [(name, *drawn[(len(drawn) - 1) * k // _LETTERS]) for k in _PLACES]
    rows = canvas.plot().splitlines()
    for name, x, y in letters:
        row, column = height - 1 - int(y * height / 1.001), min(int(x * width), width - 1)
        rows[row] = f"{rows[row][:column]}{name}{rows[row][column + 1 :]}"
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
