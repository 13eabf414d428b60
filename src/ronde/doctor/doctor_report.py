"""The chart of ``ronde doctor --report``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ronde.watch import html

__all__ = ["losses_chart"]


def losses_chart(values: Mapping[str, Any]) -> str:
    """What each stage, and what is between the workers, takes from the rate: an SVG, or "".

    Args:
        values: the JSON of ``ronde doctor``.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    losses = [(str(s["name"]), float(s["lost_points"])) for s in values["stages"]]
    losses.sort(key=lambda loss: -loss[1])
    others = {"noisy neighbour": values["neighbour"], "straggler": values["straggler"]}
    losses += [(name, float(each["points"])) for name, each in others.items() if each]
    losses.append(("exchange", float(values["exchange_points"] or 0.0)))
    bars = [(name, points) for name, points in losses if points >= 0.05]
    if not bars:
        return ""

    def plot(axes: Any) -> str:
        names, points = zip(*bars, strict=True)
        shown = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
        drawn = axes.barh(shown, points, color=html.LOST, height=0.62, linewidth=0)
        axes.bar_label(drawn, fmt="%.1f", padding=4, fontsize=9.5)
        axes.invert_yaxis()
        axes.set_xlim(0, max(points) * 1.16)
        axes.set_xlabel("lost points")
        axes.tick_params(axis="y", length=0)
        return "; ".join(f"{name} {lost:.1f} points" for name, lost in bars)

    return html.draw("losses", 1.0 + 0.34 * len(bars), "Where the speed goes", plot)
