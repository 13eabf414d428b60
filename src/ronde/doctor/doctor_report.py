"""The HTML report of ``ronde doctor``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ronde.watch import html

Values = Mapping[str, Any]


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
    rates = values.get("samples_per_second") or {}
    rows = values.get("stages") or ()
    stages = sorted(rows, key=lambda s: -html.number_or(s.get("lost_points"), 0.0))
    low, high = html.show_number(values.get("gap_low")), html.show_number(values.get("gap_high"))
    interval = f"{low:.0%} to {high:.0%}" if low is not None and high is not None else ""
    numbers = [
        ("synthetic ceiling", html.rate(rates.get("synthetic")), "samples/s"),
        ("real", html.rate(rates.get("real")), "samples/s"),
        ("gap", html.percent(values.get("gap")), interval),
        ("workers", str(values.get("workers", 1)), str(values.get("device") or "")),
    ]
    ceiling = "From what the devices could do to what they do, % of the synthetic ceiling"
    charts = [
        ("Where the speed goes", ceiling, _waterfall(values, stages)),
        ("With more devices", "Predicted gap; the band is its interval", _gap_curve(values)),
    ]
    sections = [
        _stages(values, stages),
        _prescriptions(values),
        html.Section("Notes", items=[str(note) for note in values.get("notes") or ()]),
        _machine(values),
    ]
    html.write_page(
        path, "ronde doctor", values.get("script", ""), _headline(values), numbers, charts, sections
    )


def _headline(values: Values) -> str:
    if values.get("refused"):
        return f"No verdict: {values['refused']}"
    gap = html.percent(values.get("gap"))
    if values.get("healthy"):
        return f"Healthy: input costs {gap} of the synthetic rate, and nothing is prescribed."
    cause = values.get("cause") or {}
    if not cause:
        return f"The devices are idle for {gap} of what they could do."
    stage, lost = str(cause.get("stage")), html.points(cause.get("points"))
    name = {
        "subprocess": "child processes",
        "exchange": "the exchange of gradients",
        "straggler": f"a straggler, rank {cause.get('rank')}",
        "neighbour": "a step that loaders slow down",
        "oversubscription": "too many compute threads in the loaders",
        "unexplained": "something that was not found",
    }.get(stage, stage)
    if stage == "script":
        return f"{lost} points are lost to the script's own loop; the input costs {gap}."
    if stage == "sampler":
        return f"{lost} % of each epoch pass while the sampler draws; the input costs {gap}."
    if stage in ("exchange", "straggler") and cause.get("within") in (None, "step"):
        # Lost between the workers, not to the input.
        return f"{lost} points are lost to {name}; the input costs {gap}."
    return f"The devices are idle for {gap} of what they could do, {lost} points of it in {name}."


def _falls(values: Values, stages: Sequence[Values]) -> list[tuple[str, float, float, str]]:
    """Waterfall bars from the ideal, or the ceiling, to the real rate: name, start, end, kind."""
    rates = values.get("samples_per_second") or {}
    synthetic, real, alone = (
        html.show_number(rates.get(k)) for k in ("synthetic", "real", "alone")
    )
    if not synthetic or real is None:
        return []
    bars: list[tuple[str, float, float, str]] = []
    if alone is not None and alone > synthetic * 1.005:
        ideal = at = 100.0 * alone / synthetic
        bars.append(("each alone", 0.0, ideal, "whole"))
        straggler = values.get("straggler") or {}
        for name, share in (
            ("exchange", values.get("exchange_points")),
            ("straggler", straggler.get("points")),
        ):
            lost = html.number_or(share, 0.0) * ideal / 100.0
            if abs(lost) >= 0.05:
                bars.append((name, at, max(at - lost, 0.0), "lost"))
                at = max(at - lost, 0.0)
        if abs(at - 100.0) >= 0.5:
            bars.append(("other", at, 100.0, "lost" if at > 100.0 else "back"))
    at = 100.0
    bars.append(("synthetic", 0.0, at, "whole"))
    losses = [(str(s.get("name")), s.get("lost_points")) for s in stages]
    if not any(name == "neighbour" for name, _ in losses):
        losses.append(("noisy neighbour", (values.get("neighbour") or {}).get("points")))
    for name, share in losses:
        lost = html.number_or(share, 0.0)
        if abs(lost) >= 0.05:
            bars.append((name, at, at - lost, "lost" if lost > 0 else "back"))
            at -= lost
    end = 100.0 * real / synthetic
    if abs(at - end) >= 0.5:
        bars.append(
            ("not told apart", at, end, "lost") if at > end else ("overlap", at, end, "back")
        )
    return [*bars, ("real", 0.0, end, "whole")]


def _waterfall(values: Values, stages: Sequence[Values]) -> str:
    bars = _falls(values, stages)
    if not bars:
        return ""

    def plot(axes: Any) -> str:
        flat = {"height": 0.62, "linewidth": 0}
        beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9.5}
        for i, (name, a, b, kind) in enumerate(bars):
            whole = html.REAL if name == "real" else html.SYNTHETIC
            color = {"whole": whole, "lost": html.LOST, "back": html.GOOD}[kind]
            alpha = 0.9 if kind == "whole" else 0.75
            axes.barh(i, abs(b - a), left=min(a, b), color=color, alpha=alpha, **flat)
            text = f"{b:.0f} %" if kind == "whole" else f"{b - a:+.1f}".replace("-", "−")
            axes.annotate(text, (max(a, b), i), **beside)
            if i + 1 < len(bars):
                axes.plot([b, b], [i - 0.31, i + 1.31], color=html.FAINT, linewidth=0.8)
        axes.set_yticks(range(len(bars)), [_short(name, 18) for name, *_ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, max(max(a, b) for _, a, b, _ in bars) * 1.16)
        axes.set_xlabel("% of the synthetic ceiling")
        axes.tick_params(axis="y", length=0)
        return "; ".join(
            f"{name} {b:.0f} %" if kind == "whole" else f"{name} {b - a:+.1f} points"
            for name, a, b, kind in bars
        )

    return html.draw("waterfall", 1.0 + 0.34 * len(bars), "Where the speed goes", plot)


def _gap_curve(values: Values) -> str:
    found = [s for s in values.get("scale") or () if html.show_number(s.get("devices"))]
    found = [s for s in found if html.show_number(s.get("gap")) is not None]
    if not found:
        return ""
    widest: dict[int, Values] = {}
    same: dict[int, Values] = {}
    for s in found:
        n, nodes = int(s["devices"]), int(s.get("nodes") or 1)
        if n not in widest or nodes > int(widest[n].get("nodes") or 1):
            widest[n] = s
        if nodes == 1:
            same[n] = s
    lines = [("more nodes as they fill", widest, html.REAL, "o", "-")]
    if any(s is not widest[n] for n, s in same.items()):
        lines.append(("all on one node", same, html.SYNTHETIC, "s", "--"))
    here, measured = int(values.get("workers") or 0), html.show_number(values.get("gap"))

    def plot(axes: Any) -> str:
        for name, at, color, marker, style in lines:
            sizes = sorted(at)
            low, gaps, high = (
                [100 * html.number_or(at[n].get(k), at[n]["gap"]) for n in sizes]
                for k in ("low", "gap", "high")
            )
            axes.fill_between(sizes, low, high, color=color, alpha=0.18, linewidth=0)
            axes.plot(sizes, gaps, style, color=color, marker=marker, markersize=4.5, label=name)
        if here >= 1 and measured is not None:
            time_stages = {
                "color": html.INK,
                "markersize": 7,
                "fillstyle": "none",
                "label": "measured",
            }
            axes.plot([here], [100 * measured], "D", **time_stages)
        every = sorted({*widest, *same, *([here] if here else [])})
        html.sizes_axis(axes, every, "devices")
        axes.set_ylabel("gap, % of synthetic")
        most = max(100 * html.number_or(s.get("high"), s["gap"]) for s in found)
        axes.set_ylim(0, max(10.0, min(100.0, most * 1.2)))
        axes.grid(axis="y")
        rows, endless = values.get("walls") or (), float("inf")
        walls = [w for w in rows if html.number_or(w.get("devices"), endless) <= every[-1]]
        # each name below the one before: walls may be close to each other
        for i, wall in enumerate(walls[:4]):
            n = wall["devices"]
            text = f"{_short(wall.get('stage'))} wall at {n}"
            html.mark_size(axes, n, text, left=n**2 > every[-1], shift=-4 - 14 * i)
        axes.legend(loc="best", fontsize=9.5)
        return "; ".join(f"{n} devices: {html.percent(widest[n]['gap'])}" for n in sorted(widest))

    return html.draw("gap", 3.4, "Predicted gap over the number of devices", plot)


def _short(name: Any, most: int = 24) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"


def _stages(values: Values, stages: Sequence[Values]) -> html.Section:
    rows: list[tuple[str, Sequence[str]]] = []
    for s in stages:
        low, high = html.show_number(s.get("low")), html.show_number(s.get("high"))
        lost: str = html.points(s.get("lost_points"))
        if low is not None and high is not None:
            lost = html.soft(lost, f"{html.points(low)} to {html.points(high)}")
        cells = [
            str(s.get("name")),
            html.rate(s.get("capacity_samples_per_second")),
            html.plain(s.get("cpu_ms_per_sample")),
            lost,
            str(s.get("note") or ""),
        ]
        is_cause = s.get("name") == (values.get("cause") or {}).get("stage")
        rows.append(("cause" if is_cause else "", cells))
    heads = ["stage", "capacity, samples/s", "CPU ms per sample", "lost points", ""]
    return html.Section("Stages", heads, rows, text=(4,))


def _prescriptions(values: Values) -> html.Section:
    found = values.get("prescriptions") or ()
    if not found:
        return html.Section()
    scale = values.get("scale") or ()
    sizes = [int(s["devices"]) for s in scale if html.show_number(s.get("devices"))]
    rows: list[tuple[str, Sequence[str]]] = []
    for p in found:
        label, text = str(p.get("label") or ""), str(p.get("text") or p.get("id") or "")
        settings = p.get("settings")
        kind = next((k for k in ("same", "changes") if label.startswith(k)), "")
        if isinstance(settings, Mapping) and settings:
            options = ", ".join(f"{k}: {v}" for k, v in settings.items())
            text = Markup("{}<br><code>{}</code>").format(text, options)
        cells = [
            str(p.get("number", "")),
            text,
            Markup('<span class="label {}">{}</span>').format(kind, label),
            html.points(p.get("gain_here_points")),
            html.percent(p.get("gap_here")),
            html.percent(p.get("gap_largest")),
        ]
        rows.append(("", cells))
    gaps = (values.get("workers", "this size"), max(sizes, default="the largest"))
    heads = ["", "what to do", "it is", "points gained", *(f"gap at {n}" for n in gaps)]
    foot = Markup("")
    for p in [p for p in found if p.get("settings")][:1]:
        command = f"ronde doctor --apply {p.get('number', 1)} {values.get('script', '')}"
        foot = Markup('<p class="soft">Apply and verify: <code>{}</code></p>').format(command)
    return html.Section("Prescriptions", heads, rows, text=(1, 2), foot=foot)


def _machine(values: Values) -> html.Section:
    facts = [
        ("device", values.get("device")),
        ("workers", values.get("workers")),
        *(values.get("machine") or {}).items(),
    ]
    if html.show_number(values.get("startup_seconds")) is not None:
        facts.append(("first batch after", html.show_seconds(values["startup_seconds"])))
    if order := values.get("order"):
        share = f"{html.show_seconds(order['seconds'])}, {100 * order['share']:.0f} % of each epoch"
        facts.append(("the sampler draws an epoch's order in", share))
    if loop := values.get("script_loop"):
        seconds = html.show_seconds(loop["before_seconds"] + loop["after_seconds"])
        facts.append(
            ("the script's own loop", f"{seconds} a step, {html.points(loop['points'])} points")
        )
    for name, value in (values.get("cold") or {}).items():
        text = value if html.show_number(value) is None else html.plain(value)
        facts.append((f"cold storage, {name.replace('_', ' ')}", text))
    rows = [("", [str(k), str(v)]) for k, v in facts if v not in (None, "")]
    return html.Section("Measured on", ["", ""], rows, text=(0, 1))
