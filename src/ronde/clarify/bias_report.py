"""The HTML report of ``ronde clarify``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ronde.clarify.counts import BiasTable, FacetValue, GroupVersusRest
from ronde.clarify.metrics import METRICS, Measure
from ronde.watch import html

_DRAWN = ("DPL", "DPPL", "RD", "SD", "DAR", "DRR", "AD")  # differences, with intervals


def bias_report(
    counts: BiasTable,
    comparisons: Sequence[GroupVersusRest],
    path: str | os.PathLike[str],
    table: str,
    attention: Sequence[str],
) -> None:
    """Write a page: shares of each group, differences with intervals, all metrics.

    Raises:
        ArgumentError: matplotlib is not installed.
        RondeError: the file cannot be written.
    """
    numbers = []
    for c in comparisons[:4]:
        m = c.measures.get("DI") or c.measures["DPL"]
        numbers.append((f"{m.name}, {c.name}", _value(m), METRICS[m.name][1].partition(":")[0]))
    charts = []
    for i, facet in enumerate(counts.facets):
        shares = _shares(f"shares{i}", facet, counts.groups(facet), counts.predicted)
        legend = "Lines are 95 % intervals. Above: labels; below: predictions"
        charts.append((f"Positive by {facet}", legend, shares))
    for i, c in enumerate(comparisons):
        title = f"{c.name} against the rest"
        drawn = _intervals(
            f"metrics{i}", title, {n: m for n, m in c.measures.items() if n in _DRAWN}
        )
        legend = (
            "0 is equal treatment; lines are 95 % intervals. To the right, the group fares worse"
        )
        charts.append((title, legend, drawn))
        if c.conditional and counts.predicted:
            title = f"{c.name}, by group"
            within = {group: measures["DPPL"] for group, measures in c.conditional.items()}
            inside = _intervals(f"groups{i}", title, within)
            charts.append((title, "DPPL within each group", inside))
    headline = (
        attention[0]
        if attention
        else (
            f"No group of {', '.join(counts.facets)} is selected less than four fifths as often as "
            "the rest."
            if counts.predicted
            else f"Labels by {', '.join(counts.facets)}."
        )
    )
    sections = [html.Section("Attention", items=attention), *(_metrics(c) for c in comparisons)]
    html.write_page(path, "ronde clarify", table, headline, numbers, charts, sections)


def _value(m: Measure) -> str:
    return "–" if m.value is None else f"{m.value:.2f}"


def _shares(name: str, facet: str, groups: Sequence[FacetValue], predicted: bool) -> Any:
    def plot(axes: Any) -> str:
        for i, g in enumerate(groups):
            for share, shift, color in (
                (g.label, 0.15 if predicted else 0.0, html.SYNTHETIC),
                (g.selected, -0.15, html.REAL),
            ):
                if share:
                    middle, low, high = (100 * v for v in share)
                    axes.plot([low, high], [i + shift] * 2, color=color, linewidth=1.6)
                    axes.plot([middle], [i + shift], "o", color=color, markersize=6)
        axes.set_yticks(range(len(groups)), [f"{g.value}\n{g.rows:,} rows" for g in groups])
        axes.set_ylim(-0.6, len(groups) - 0.4)
        axes.set_xlim(0, None)
        axes.set_xlabel("positive, %")
        axes.grid(axis="x")
        return "; ".join(f"{g.value}: {g.label[0]:.1%} of labels" for g in groups)

    return html.draw(name, 1.2 + 0.55 * len(groups), f"Positive by {facet}", plot)


def _intervals(name: str, title: str, measures: Mapping[str, Measure]) -> Any:
    """A line with its interval for each measure that has a value."""
    drawn = [(label, m) for label, m in measures.items() if m.value is not None]

    def plot(axes: Any) -> str:
        for i, (_, m) in enumerate(reversed(drawn)):
            axes.plot([m.low, m.high], [i, i], color=html.REAL, linewidth=1.6)
            axes.plot([m.value], [i], "o", color=html.REAL, markersize=6)
        axes.axvline(0, color=html.FAINT, linewidth=1.0)
        axes.set_yticks(range(len(drawn)), [label for label, _ in reversed(drawn)])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.grid(axis="x")
        return "; ".join(f"{label} {m}" for label, m in drawn)

    return html.draw(name, 1.0 + 0.32 * len(drawn), title, plot)


def _metrics(comparison: GroupVersusRest) -> html.Section:
    rows = [
        ("", (m.name, m.shown, _interval(m), m.why or METRICS[m.name][1]))
        for m in comparison.measures.values()
    ]
    heads = ("metric", "value", "95 % interval", "")
    return html.Section(f"{comparison.name} against the rest", heads, rows, text=(0, 3))


def _interval(m: Measure) -> str:
    return "" if m.low is None or m.high is None else f"{m.low:.3f} to {m.high:.3f}"
