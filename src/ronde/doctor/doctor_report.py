"""The HTML report of ``ronde doctor``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ronde.watch import html

Values = Mapping[str, Any]
Row = tuple[str, Sequence[str]]


def doctor_report(values: Values, path: str | os.PathLike[str]) -> None:
    """Write the answer of ``ronde doctor`` as one HTML file.

    Args:
        values: as ``ronde doctor`` writes them as JSON.
        path: of the file.

    Raises:
        ArgumentError: matplotlib is not installed.
        RondeError: the file cannot be written.

    Example:
        >>> doctor_report(json.loads(Path("doctor.json").read_text()),  # doctest: +SKIP
        ...     "report.html")
    """
    rates = values["samples_per_second"]
    stages = sorted(values["stages"], key=lambda s: -s["lost_points"])
    interval = f"{html.percent(values['gap_low'])} to {html.percent(values['gap_high'])}"
    numbers = [
        ("synthetic ceiling", html.rate(rates["synthetic"]), "samples/s"),
        ("real", html.rate(rates["real"]), "samples/s"),
        ("gap", html.percent(values["gap"]), interval),
        ("workers", str(values["workers"]), str(values["device"])),
    ]
    charts = [
        ("Where the speed goes", "Points of the synthetic ceiling", _losses(values, stages)),
        ("With more devices", "Predicted gap; the band is its interval", _gap_curve(values)),
    ]
    sections = [
        _stages(values, stages),
        _prescriptions(values),
        html.Section("Notes", items=[str(note) for note in values["notes"]]),
    ]
    html.write_page(
        path, "ronde doctor", values["script"], _headline(values), numbers, charts, sections
    )


def _headline(values: Values) -> str:
    if values["refused"]:
        return f"No verdict: {values['refused']}"
    gap, cause = html.percent(values["gap"]), values["cause"]
    if values["healthy"] or not cause:
        return f"Healthy: input costs {gap} of the synthetic rate, and nothing is prescribed."
    lost = html.points(cause["points"])
    name = f"{cause['stage']}, rank {cause['rank']}" if "rank" in cause else str(cause["stage"])
    if cause.get("of", "gap") != "gap":  # lost between workers, or in the script's own code
        return f"{lost} points are lost to {name}; the input costs {gap}."
    return f"The devices are idle for {gap} of what they could do, {lost} points of it in {name}."


def _losses(values: Values, stages: Sequence[Values]) -> str:
    """What each stage, and what is between the workers, takes from the rate."""
    found = [(str(s["name"]), float(s["lost_points"])) for s in stages]
    others = {"noisy neighbour": values["neighbour"], "straggler": values["straggler"]}
    found += [(name, float(each["points"])) for name, each in others.items() if each]
    found.append(("exchange", float(values["exchange_points"] or 0.0)))
    bars = [(name, lost) for name, lost in found if lost >= 0.05]
    if not bars:
        return ""

    def plot(axes: Any) -> str:
        names, lost = zip(*bars, strict=True)
        axes.barh(range(len(bars)), lost, color=html.LOST, height=0.62, linewidth=0)
        beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9.5}
        for i, points in enumerate(lost):
            axes.annotate(html.points(points), (points, i), **beside)
        axes.set_yticks(range(len(bars)), [_short(name, 18) for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, max(lost) * 1.16)
        axes.set_xlabel("lost points")
        axes.tick_params(axis="y", length=0)
        return "; ".join(f"{name} {html.points(points)} points" for name, points in bars)

    return html.draw("losses", 1.0 + 0.34 * len(bars), "Where the speed goes", plot)


def _gap_curve(values: Values) -> str:
    rows = values["scale"]
    if not rows:
        return ""

    def plot(axes: Any) -> str:
        sizes = [row["devices"] for row in rows]
        low, gaps, high = ([100 * row[key] for row in rows] for key in ("low", "gap", "high"))
        axes.fill_between(sizes, low, high, color=html.REAL, alpha=0.18, linewidth=0)
        axes.plot(sizes, gaps, color=html.REAL, marker="o", markersize=4.5)
        html.sizes_axis(axes, sizes, "devices")
        axes.set_ylabel("gap, % of synthetic")
        axes.set_ylim(0, max(10.0, min(100.0, max(high) * 1.2)))
        axes.grid(axis="y")
        walls = [wall for wall in values["walls"] if wall["devices"] <= sizes[-1]]
        # each name below the one before: walls may be close to each other
        for i, wall in enumerate(walls[:4]):
            n, text = wall["devices"], f"{_short(wall['stage'])} wall at {wall['devices']}"
            html.mark_size(axes, n, text, left=n**2 > sizes[-1], shift=-4 - 14 * i)
        return "; ".join(f"{row['devices']} devices: {html.percent(row['gap'])}" for row in rows)

    return html.draw("gap", 3.4, "Predicted gap over the number of devices", plot)


def _short(name: Any, most: int = 24) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"


def _stages(values: Values, stages: Sequence[Values]) -> html.Section:
    rows: list[Row] = []
    for s in stages:
        interval = f"{html.points(s['low'])} to {html.points(s['high'])}"
        cells = [
            str(s["name"]),
            html.rate(s["capacity_samples_per_second"]),
            html.plain(s["cpu_ms_per_sample"]),
            html.soft(html.points(s["lost_points"]), interval),
            str(s["note"] or ""),
        ]
        is_cause = s["name"] == (values["cause"] or {}).get("stage")
        rows.append(("cause" if is_cause else "", cells))
    heads = ["stage", "capacity, samples/s", "CPU ms per sample", "lost points", ""]
    return html.Section("Stages", heads, rows, text=(4,))


def _prescriptions(values: Values) -> html.Section:
    found = values["prescriptions"]
    if not found:
        return html.Section()
    rows: list[Row] = []
    for p in found:
        text = str(p["text"])
        if p["settings"]:
            options = ", ".join(f"{k}: {v}" for k, v in p["settings"].items())
            text = Markup("{}<br><code>{}</code>").format(text, options)
        cells = [
            str(p["number"]),
            text,
            str(p["label"]),
            html.points(p["gain_here_points"]),
            html.percent(p["gap_here"]),
            html.percent(p["gap_largest"]),
        ]
        rows.append(("", cells))
    largest = values["scale"][-1]["devices"] if values["scale"] else "the largest"
    heads = ["", "what to do", "it is", "points gained"]
    heads += [f"gap at {n}" for n in (values["workers"], largest)]
    foot = Markup("")
    for p in [p for p in found if p["settings"]][:1]:
        command = f"ronde doctor --apply {p['number']} {values['script']}"
        foot = Markup('<p class="soft">Apply and verify: <code>{}</code></p>').format(command)
    return html.Section("Prescriptions", heads, rows, text=(1, 2), foot=foot)
