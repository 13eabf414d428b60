"""Reports that a browser shows: what the doctor found, and how a training scales. One file each, which asks nothing of the network.

They are drawn from the same values that are written as JSON, so a report can be made again from an old answer. Charts are inline SVG, their
text is text; colours follow the reader's light or dark setting, and nothing is told by colour alone. Drawing needs matplotlib
(``pip install '.[report]'`` in a clone).
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ronde.watch.written import write_whole
from ronde.world import ArgumentError, RondeError

__all__ = ["check_drawing", "doctor_report", "scale_report"]

# What is drawn in these colours gets the reader's: the SVG refers to the page's variables.
_INK, _FAINT, _SYNTHETIC, _REAL, _LOST, _GOOD = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--faint)",
    _SYNTHETIC: "var(--synthetic)",
    _REAL: "var(--real)",
    _LOST: "var(--lost)",
    _GOOD: "var(--good)",
}

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2330; --soft: #5a6375; --faint: #c9cfda; --card: #f4f6f9;
  --synthetic: #2f6fde; --real: #c2410c; --lost: #b42318; --good: #18794e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --ink: #e7eaf0; --soft: #a3acbd; --faint: #475063; --card: #1d222b;
  --synthetic: #7fb0ff; --real: #ff9d5c; --lost: #ff8a80; --good: #6fd3a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.15rem; font-weight: 600; margin: 0; color: var(--soft); overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.headline { font-size: clamp(1.25rem, 3.6vw, 1.75rem); line-height: 1.3; font-weight: 600; margin: .4rem 0 1.2rem; max-width: 46rem;
  overflow-wrap: anywhere; }
.headline.long { font-size: clamp(1.1rem, 2.6vw, 1.3rem); max-width: 60rem; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0; }
.numbers div { background: var(--card); border-radius: .5rem; padding: .55rem .9rem; min-width: 8rem; flex: 1 1 8rem; }
.numbers dt { color: var(--soft); font-size: .82rem; }
.numbers dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.numbers dd small { font-size: .8rem; font-weight: 400; color: var(--soft); }
@media (max-width: 34rem) { .numbers div { flex-basis: 40%; } .numbers dd small { display: block; } }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1.5rem; margin-top: 1.5rem; }
figure { margin: 0; min-width: 0; }
figure svg { width: 100%; height: auto; max-height: 34rem; display: block; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
figcaption { font-weight: 600; margin-bottom: .35rem; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .94rem; }
th, td { padding: .38rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); vertical-align: top; }
th { min-width: 4.5rem; } td { white-space: nowrap; } td.text { white-space: normal; min-width: 11rem; } td:first-child, th:first-child { padding-left: 0; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; }
th:first-child, td:first-child, .text { text-align: left; }
tr.guess td { font-style: italic; color: var(--soft); }
tr.cause td { font-weight: 600; }
ol, ul { padding-left: 1.3rem; } li { margin: .35rem 0; overflow-wrap: anywhere; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--card); padding: .1em .3em; border-radius: .25rem;
  overflow-wrap: anywhere; }
.label { border: 1px solid var(--faint); border-radius: 1rem; padding: .05rem .55rem; font-size: .82rem; color: var(--soft); white-space: nowrap; }
.label.same { color: var(--good); border-color: var(--good); } .label.changes { color: var(--lost); border-color: var(--lost); }
.soft { color: var(--soft); } footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
@media print { :root { --paper: #fff; --ink: #000; --soft: #333; --card: #f2f2f2; } body { max-width: none; padding: 0; }
  figure, tr, li { break-inside: avoid; } .wide { overflow: visible; } }
"""


def check_drawing() -> None:
    """Say now, rather than after minutes of measuring, that charts cannot be drawn.

    Raises:
        ArgumentError: matplotlib is not there.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError(
            "a report is drawn by matplotlib, which is not installed: pip install '.[report]' in a clone of Ronde."
        ) from None


# -- words and numbers ---------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _rate(value: Any) -> str:
    v = _number(value)
    return "–" if v is None else f"{v:,.0f}" if abs(v) >= 100 else f"{v:,.3g}"


def _percent(value: Any) -> str:
    v = _number(value)
    return "–" if v is None else f"{v:.0%}"


def _points(value: Any) -> str:
    v = _number(value)
    return "–" if v is None else f"{v:.1f}" if 0 < abs(v) < 9.95 else f"{v:.0f}"


def _plain(value: Any, digits: int = 3) -> str:
    v = _number(value)
    return "–" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:,.{digits}g}"


def _count(workers: Any) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _seconds(value: Any) -> str:
    v = _number(value)
    if v is None:
        return "–"
    if v < 100:
        return f"{v:.2g} s" if v < 10 else f"{v:.0f} s"
    whole = round(v)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d} h" if hours else f"{rest // 60}:{rest % 60:02d} min"


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], words: Sequence[int] = ()) -> str:
    """A table. ``rows``: a class and its cells, which are HTML already; ``words``: columns of text."""

    def cls(i: int) -> str:
        return ' class="text"' if i in words else ""

    head = "".join(f'<th scope="col"{cls(i)}>{escape(h)}</th>' for i, h in enumerate(heads))
    body = "".join(
        f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>"
        + "".join(f"<td{cls(i)}>{c}</td>" for i, c in enumerate(cells))
        + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _numbers(pairs: Sequence[tuple[str, str, str]]) -> str:
    """Large figures: name, value, what is said beside it."""
    made = (f"<div><dt>{escape(n)}</dt><dd>{escape(v)}{f' <small>{escape(s)}</small>' if s else ''}</dd></div>" for n, v, s in pairs)
    return f'<dl class="numbers">{"".join(made)}</dl>'


def _figure(svg: str, caption: str, more: str = "") -> str:
    return f"<figure><figcaption>{escape(caption)}{f'<small>{escape(more)}</small>' if more else ''}</figcaption>{svg}</figure>"


def _notes(values: Mapping[str, Any]) -> str:
    notes = [str(n) for n in values.get("notes") or ()]
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>" if notes else ""


def _page(title: str, headline: str, parts: Sequence[str], path: str | os.PathLike[str], what: str) -> None:
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f'<p class="headline{" long" if len(headline) > 110 else ""}">{escape(headline)}</p>{"".join(parts)}</main>'
        f"<footer>Written by {escape(what)}. The same values are in its JSON.</footer></body></html>\n"
    )
    try:
        write_whole(Path(path), html)
    except RondeError as error:
        raise RondeError(f"the report {error}") from None


# -- charts --------------------------------------------------------------------------------------------------------


class _Chart:
    """One set of axes, as inline SVG in the page's colours.

    Args:
        name: of its own, for the SVG's ids.
        height: in inches; the width is that of a phone, and grows with the page.
    """

    def __init__(self, name: str, height: float = 3.5) -> None:
        check_drawing()
        import matplotlib
        from matplotlib.figure import Figure

        self._name = name
        self._context: Any = matplotlib.rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "text.parse_math": False,
                "font.size": 10.5,
                "axes.edgecolor": _FAINT,
                "axes.labelcolor": _INK,
                "xtick.color": _INK,
                "ytick.color": _INK,
                "text.color": _INK,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.linewidth": 0.8,
                "grid.color": _FAINT,
                "grid.linewidth": 0.5,
                "hatch.color": _FAINT,
                "lines.linewidth": 1.8,
                "legend.frameon": False,
            }
        )
        self._figure: Any = None
        self._make: Any = lambda: Figure(figsize=(5.2, height), layout="constrained")
        self.axes: Any = None

    def __enter__(self) -> _Chart:
        self._context.__enter__()
        self._figure = self._make()
        self.axes = self._figure.add_subplot()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def svg(self, title: str, description: str) -> str:
        """Drawn, with words for those who do not see it."""
        out = io.StringIO()
        self._figure.patch.set_alpha(0.0)
        self.axes.patch.set_alpha(0.0)
        self._figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
        drawn = out.getvalue()
        drawn = drawn[drawn.index("<svg") :]
        for colour, variable in _VARIABLES.items():
            drawn = drawn.replace(colour, variable)
        name = self._name
        drawn = re.sub(r'\bid="', f'id="{name}-', drawn)
        drawn = drawn.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
        drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S)
        head = re.sub(r'\s(width|height|version|xmlns:xlink|xmlns)="[^"]*"', "", drawn[: drawn.index(">")])
        words = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        # Inside HTML "xlink:href" is understood without its namespace being declared.
        return f'{head} role="img" aria-labelledby="{name}-title {name}-desc">{words}{drawn[drawn.index(">") + 1 :]}'


def _sizes_axis(axes: Any, sizes: Sequence[float], what: str) -> None:
    """Doubling sizes, evenly apart."""
    axes.set_xscale("log", base=2)
    ticks = sorted({int(s) for s in sizes})
    if len(ticks) > 9:
        ticks = [t for t in ticks if t & (t - 1) == 0] or ticks[:: len(ticks) // 8]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel(what)


def _walls_in(axes: Any, walls: Sequence[Mapping[str, Any]], most: float) -> None:
    """Vertical lines, named at the top, one below the other where they are close."""
    shown = [w for w in walls if (n := _number(w.get("devices"))) is not None and n <= most]
    for i, wall in enumerate(shown[:4]):
        axes.axvline(wall["devices"], color=_LOST, linewidth=1.2, linestyle=(0, (2, 2)))
        name = f"{_short(wall.get('stage'))} wall at {wall['devices']}"
        side = "right" if wall["devices"] ** 2 > most else "left"
        axes.annotate(
            name,
            (wall["devices"], 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if side == "right" else 4, -4 - 14 * i),
            textcoords="offset points",
            ha=side,
            va="top",
            color=_LOST,
            fontsize=9.5,
        )


def _short(name: Any, most: int = 24) -> str:
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"


# -- the doctor ----------------------------------------------------------------------------------------------------


def doctor_report(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what ``ronde doctor`` found as one HTML file.

    Args:
        values: as ``ronde doctor`` writes them as JSON.
        path: of the file.

    Raises:
        ArgumentError: matplotlib is not there.
        RondeError: the file cannot be written.

    Example:
        >>> doctor_report(json.loads(Path("doctor.json").read_text()), "report.html")  # doctest: +SKIP
    """
    rates = values.get("samples_per_second") or {}
    stages = sorted(values.get("stages") or (), key=lambda s: -(_number(s.get("lost_points")) or 0.0))
    workers = values.get("workers", 1)
    parts = [
        _numbers(
            [
                ("synthetic ceiling", _rate(rates.get("synthetic")), "samples/s"),
                ("real", _rate(rates.get("real")), "samples/s"),
                ("gap", _percent(values.get("gap")), _interval(values.get("gap_low"), values.get("gap_high"))),
                ("workers", str(workers), str(values.get("device") or "")),
            ]
        )
    ]
    charts = []
    falls = _waterfall(values, stages)
    if falls:
        charts.append(_figure(falls, "Where the speed goes", "From what the devices could do to what they do, % of the synthetic ceiling"))
    curve = _gap_curve(values)
    if curve:
        charts.append(_figure(curve, "With more devices", "Predicted gap; the band is its interval"))
    if charts:
        parts.append(f'<div class="charts">{"".join(charts)}</div>')
    if stages:
        parts.append("<h2>Stages</h2>" + _stage_table(values, stages))
    parts.append(_prescriptions(values))
    parts.append(_notes(values))
    parts.append(_machine(values))
    _page(f"ronde doctor {values.get('script', '')}", _doctor_headline(values, stages), parts, path, "ronde doctor")


def _interval(low: Any, high: Any) -> str:
    a, b = _number(low), _number(high)
    return f"{a:.0%} to {b:.0%}" if a is not None and b is not None else ""


def _doctor_headline(values: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    if values.get("refused"):
        return f"No verdict: {values['refused']}"
    gap = _percent(values.get("gap"))
    if values.get("healthy"):
        return f"Healthy: input costs {gap} of the synthetic rate, and nothing is prescribed."
    found = values.get("cause") or {}
    if not found:
        return f"The devices are idle for {gap} of what they could do."
    name = {
        "exchange": "the exchange of gradients",
        "straggler": f"a straggler, rank {found.get('rank')}",
        "neighbour": "a step that loaders slow down",
        "oversubscription": "too many compute threads in the loaders",
        "unexplained": "something that was not found",
    }.get(str(found.get("stage")), str(found.get("stage")))
    if found.get("stage") in ("exchange", "straggler") and found.get("within") in (None, "step"):
        # Lost between the workers, not to the input.
        return f"{_points(found.get('points'))} points are lost to {name}; the input costs {gap}."
    return f"The devices are idle for {gap} of what they could do, {_points(found.get('points'))} points of it in {name}."


def _waterfall(values: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    """Bars from the ceiling (or the ideal) down to what is real."""
    rates = values.get("samples_per_second") or {}
    synthetic, real, alone = (_number(rates.get(k)) for k in ("synthetic", "real", "alone"))
    if not synthetic or real is None:
        return ""
    steps: list[tuple[str, float, float, str]] = []  # name, from, to, kind
    at = 100.0
    if alone is not None and alone > synthetic * 1.005:
        ideal = at = 100.0 * alone / synthetic
        steps.append(("each alone", 0.0, ideal, "whole"))
        straggler = values.get("straggler") or {}
        for name, points in (("exchange", values.get("exchange_points")), ("straggler", straggler.get("points"))):
            lost = (_number(points) or 0.0) * ideal / 100.0
            if abs(lost) >= 0.05:
                steps.append((name, at, max(at - lost, 0.0), "lost"))
                at = max(at - lost, 0.0)
        if abs(at - 100.0) >= 0.5:
            steps.append(("other", at, 100.0, "lost" if at > 100.0 else "back"))
    at = 100.0
    steps.append(("synthetic", 0.0, at, "whole"))
    neighbour = values.get("neighbour") or {}
    lost_by = [(str(s.get("name")), _number(s.get("lost_points")) or 0.0) for s in stages]
    if not any(name == "neighbour" for name, _ in lost_by):
        lost_by.append(("noisy neighbour", _number(neighbour.get("points")) or 0.0))
    for name, lost in lost_by:
        if abs(lost) >= 0.05:
            steps.append((name, at, at - lost, "lost" if lost > 0 else "back"))
            at -= lost
    end = 100.0 * real / synthetic
    if abs(at - end) >= 0.5:
        steps.append(("not told apart" if at > end else "overlap", at, end, "lost" if at > end else "back"))
    steps.append(("real", 0.0, end, "whole"))
    with _Chart("waterfall", height=1.0 + 0.34 * len(steps)) as chart:
        axes = chart.axes
        most = max(max(a, b) for _, a, b, _ in steps)
        for i, (name, a, b, kind) in enumerate(steps):
            colour = {"whole": _REAL if name == "real" else _SYNTHETIC, "lost": _LOST, "back": _GOOD}[kind]
            axes.barh(i, abs(b - a), left=min(a, b), height=0.62, color=colour, alpha=0.9 if kind == "whole" else 0.75, linewidth=0)
            text = f"{b:.0f} %" if kind == "whole" else f"{b - a:+.1f}".replace("-", "−")
            axes.annotate(text, (max(a, b), i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5)
            if i + 1 < len(steps):
                axes.plot([b, b], [i - 0.31, i + 1.31], color=_FAINT, linewidth=0.8)
        axes.set_yticks(range(len(steps)), [_short(name, 18) for name, *_ in steps])
        axes.invert_yaxis()
        axes.set_xlim(0, most * 1.16)
        axes.set_xlabel("% of the synthetic ceiling")
        axes.tick_params(axis="y", length=0)
        told = "; ".join(f"{name} {b:.0f} %" if kind == "whole" else f"{name} {b - a:+.1f} points" for name, a, b, kind in steps)
        return chart.svg("Where the speed goes", told)


def _gap_curve(values: Mapping[str, Any]) -> str:
    found = [s for s in values.get("scale") or () if _number(s.get("devices")) and _number(s.get("gap")) is not None]
    if not found:
        return ""
    widest: dict[int, Mapping[str, Any]] = {}
    same: dict[int, Mapping[str, Any]] = {}
    for s in found:
        n, nodes = int(s["devices"]), int(s.get("nodes") or 1)
        if n not in widest or nodes > int(widest[n].get("nodes") or 1):
            widest[n] = s
        if nodes == 1:
            same[n] = s
    lines = [("more nodes as they fill", widest, _REAL, "o", "-")]
    if any(s is not widest[n] for n, s in same.items()):
        lines.append(("all on one node", same, _SYNTHETIC, "s", "--"))
    with _Chart("gap", height=3.4) as chart:
        axes = chart.axes
        for name, points, colour, marker, style in lines:
            sizes = sorted(points)
            gaps = [100 * float(points[n]["gap"]) for n in sizes]
            low, high = ([100 * float(_or(points[n].get(k), points[n]["gap"])) for n in sizes] for k in ("low", "high"))
            axes.fill_between(sizes, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(sizes, gaps, style, color=colour, marker=marker, markersize=4.5, label=name)
        here = int(values.get("workers") or 0)
        measured = _number(values.get("gap"))
        if here >= 1 and measured is not None:
            axes.plot([here], [100 * measured], "D", color=_INK, markersize=7, fillstyle="none", label="measured")
        every = sorted({*widest, *same, *([here] if here else [])})
        _sizes_axis(axes, every, "devices")
        axes.set_ylabel("gap, % of synthetic")
        axes.set_ylim(0, max(10.0, min(100.0, max(100 * float(_or(s.get("high"), s["gap"])) for s in found) * 1.2)))
        axes.grid(axis="y")
        _walls_in(axes, values.get("walls") or (), max(every))
        axes.legend(loc="best", fontsize=9.5)
        told = "; ".join(f"{n} devices: {_percent(widest[n]['gap'])}" for n in sorted(widest))
        return chart.svg("Predicted gap over the number of devices", told)


def _or(value: Any, other: Any) -> float:
    v = _number(value)
    return float(other) if v is None else v


def _stage_table(values: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for s in stages:
        low, high = _number(s.get("low")), _number(s.get("high"))
        lost = _points(s.get("lost_points"))
        if low is not None and high is not None:
            lost += f' <span class="soft">({_points(low)} to {_points(high)})</span>'
        cause = s.get("name") == (values.get("cause") or {}).get("stage")
        cells = [
            escape(str(s.get("name"))),
            _rate(s.get("capacity_samples_per_second")),
            _plain(s.get("cpu_ms_per_sample")),
            lost,
            escape(str(s.get("note") or "")),
        ]
        rows.append(("cause" if cause else "", cells))
    return _table(["stage", "capacity, samples/s", "CPU ms per sample", "lost points", ""], rows, words=(4,))


def _prescriptions(values: Mapping[str, Any]) -> str:
    found = values.get("prescriptions") or ()
    if not found:
        return ""
    most = max((int(s["devices"]) for s in values.get("scale") or () if _number(s.get("devices"))), default=None)
    here = f"gap at {values.get('workers', 'this size')}"
    rows = []
    for p in found:
        label = str(p.get("label") or "")
        kind = "same" if label.startswith("same") else "changes" if label.startswith("changes") else ""
        text = escape(str(p.get("text") or p.get("id") or ""))
        settings = p.get("settings")
        if isinstance(settings, Mapping) and settings:
            text += "<br><code>" + escape(", ".join(f"{k}: {v}" for k, v in settings.items())) + "</code>"
        cells = [
            escape(str(p.get("number", ""))),
            text,
            f'<span class="label {kind}">{escape(label)}</span>',
            _points(p.get("gain_here_points")),
            _percent(p.get("gap_here")),
            _percent(p.get("gap_largest")),
        ]
        rows.append(("", cells))
    heads = ["", "what to do", "it is", "points gained", here, f"gap at {most}" if most else "gap at the largest"]
    script = escape(str(values.get("script", "")))
    return (
        "<h2>Prescriptions</h2>"
        + _table(heads, rows, words=(1, 2))
        + f'<p class="soft">Apply and verify: <code>ronde doctor --apply {escape(str(found[0].get("number", 1)))} {script}</code></p>'
    )


def _machine(values: Mapping[str, Any]) -> str:
    told = [("device", values.get("device")), ("workers", values.get("workers"))]
    machine = values.get("machine")
    if isinstance(machine, Mapping):
        told += list(machine.items())
    started = _number(values.get("startup_seconds"))
    if started is not None:
        told.append(("first batch after", _seconds(started)))
    order = values.get("order")
    if isinstance(order, Mapping):
        told.append(("the sampler draws an epoch's order in", f"{_seconds(order['seconds'])}, {100 * order['share']:.0f} % of each epoch"))
    cold = values.get("cold")
    if isinstance(cold, Mapping):
        told += [(f"cold storage, {k.replace('_', ' ')}", _plain(v) if _number(v) is not None else v) for k, v in cold.items()]
    rows = [("", [escape(str(k)), escape(str(v))]) for k, v in told if v not in (None, "")]
    return "<h2>Measured on</h2>" + _table(["", ""], rows, words=(0, 1)) if rows else ""


# -- scaling -------------------------------------------------------------------------------------------------------


def scale_report(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write what ``ronde scale`` found as one HTML file.

    Args:
        values: as ``ronde scale --json`` writes them.
        path: of the file.

    Raises:
        ArgumentError: matplotlib is not there, or the values have no row.
        RondeError: the file cannot be written.

    Example:
        >>> scale_report(json.loads(Path("scale.json").read_text()), "report.html")  # doctest: +SKIP
    """
    rows = list(values.get("rows") or ())
    if not rows:
        raise ArgumentError("the values of a scaling report have no 'rows': nothing was measured.")
    last = rows[-1]
    parts = [
        _numbers(
            [
                (f"speed-up at {last['workers']}", f"{last['speedup_real']:.2f}×", f"synthetic {last['speedup_synthetic']:.2f}×"),
                (
                    f"efficiency at {last['workers']}",
                    _percent(last["efficiency_real"]),
                    f"synthetic {_percent(last['efficiency_synthetic'])}",
                ),
                (f"gap at {last['workers']}", _percent(last["gap"]), f"at {rows[0]['workers']}: {_percent(rows[0]['gap'])}"),
                ("stop at", str(values.get("stop_at", "–")), "workers"),
            ]
        )
    ]
    charts = [
        _figure(
            _speedup(values, rows),
            "Speed-up",
            "Each over its own rate at the smallest size. Solid: measured. Dashed, with a band: extrapolated, not measured",
        ),
        _figure(_gaps(values, rows), "Gap between synthetic and real", "Hatched: extrapolated, not measured"),
    ]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts.append("<h2>Measured and extrapolated</h2>" + _scale_table(values, rows))
    parts.append(_fits_table(values))
    wall = values.get("wall")
    if isinstance(wall, Mapping):
        limit = f" ({escape(str(wall['limit']))})" if wall.get("limit") else ""
        parts.append(
            f"<p><strong>Wall:</strong> {escape(str(wall.get('stage')))}{limit} is met at {escape(_count(wall.get('devices')))}.</p>"
        )
    parts.append(_notes(values))
    _page(f"ronde scale {values.get('script', '')}", str(values.get("sentence") or ""), parts, path, "ronde scale")


def _speedup(values: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    further = list(values.get("extrapolated") or ())
    with _Chart("speedup", height=3.9) as chart:
        axes = chart.axes
        sizes = [r["workers"] for r in rows]
        beyond = [f["workers"] for f in further]
        every = [*sizes, *beyond]
        axes.plot([every[0], every[-1]], [every[0], every[-1]], color=_INK, linewidth=1.0, linestyle=(0, (1, 2)), label="ideal")
        base = {name: rows[0][name] / rows[0]["workers"] for name in ("synthetic", "real")}
        for name, colour, marker in (("synthetic", _SYNTHETIC, "s"), ("real", _REAL, "o")):
            axes.plot(sizes, [r[f"speedup_{name}"] for r in rows], "-", color=colour, marker=marker, markersize=5, label=name)
            if further:
                low, high = ("low", "high") if name == "real" else ("synthetic_low", "synthetic_high")
                xs = [sizes[-1], *beyond]
                start = rows[-1][f"speedup_{name}"]
                axes.plot(xs, [start, *(f[name] / base[name] for f in further)], linestyle=(0, (4, 2)), color=colour, linewidth=1.3)
                axes.plot(beyond, [f[name] / base[name] for f in further], marker, color=colour, markersize=5, fillstyle="none")
                bounds = [[start, *(_or(f.get(k), f[name]) / base[name] for f in further)] for k in (low, high)]
                axes.fill_between(xs, *bounds, color=colour, alpha=0.15, linewidth=0)
        _sizes_axis(axes, every, "workers")
        axes.set_yscale("log", base=2)
        top = max(every[-1], *(max(r["speedup_real"], r["speedup_synthetic"]) for r in rows))
        ticks = [2**k for k in range(math.ceil(math.log2(max(top, 1))) + 1)]
        axes.set_yticks(ticks, [f"{t}×" for t in ticks])
        axes.minorticks_off()
        lowest = min(1.0, *(min(r["speedup_real"], r["speedup_synthetic"]) for r in rows))
        axes.set_ylim(max(lowest * 0.85, 1 / 64), top * 1.12)
        axes.grid(axis="y")
        stop = _number(values.get("stop_at"))
        if stop is not None and stop < every[-1]:
            near_end = stop**2 > every[-1] * every[0]
            axes.axvline(stop, color=_LOST, linewidth=1.2, linestyle=(0, (2, 2)))
            axes.annotate(
                f"stop at {stop:.0f}",
                (stop, 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 2) if near_end else (4, 2),
                ha="right" if near_end else "left",
                textcoords="offset points",
                color=_LOST,
                fontsize=9.5,
            )
        axes.legend(loc="upper left", fontsize=9.5)
        told = "; ".join(f"{r['workers']} workers: {r['speedup_real']:.2f} real, {r['speedup_synthetic']:.2f} synthetic" for r in rows)
        more = "; ".join(f"{f['workers']}: {f['real'] / base['real']:.1f}" for f in further)
        return chart.svg("Speed-up over the number of workers", told + (f". Extrapolated, real: {more}" if more else ""))


def _gaps(values: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    further = list(values.get("extrapolated") or ())
    with _Chart("gaps", height=3.9) as chart:
        axes = chart.axes
        gaps = [100 * float(r["gap"]) for r in rows]
        guesses = [100 * float(f["gap"]) for f in further]
        names = [str(r["workers"]) for r in [*rows, *further]]
        axes.bar(range(len(gaps)), gaps, color=_REAL, width=0.62, linewidth=0)
        if guesses:
            axes.bar(
                range(len(gaps), len(gaps) + len(guesses)),
                guesses,
                facecolor="none",
                edgecolor=_REAL,
                hatch="///",
                width=0.62,
                linewidth=1.2,
            )
        for i, value in enumerate([*gaps, *guesses]):
            axes.annotate(f"{value:.0f} %", (i, value), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9.5)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("workers")
        axes.set_ylabel("gap, % of synthetic")
        axes.set_ylim(0, max(10.0, max([*gaps, *guesses]) * 1.18))
        axes.tick_params(axis="x", length=0)
        told = "; ".join(f"{r['workers']} workers: {_percent(r['gap'])}" for r in rows)
        more = "; ".join(f"{f['workers']}: {_percent(f['gap'])}" for f in further)
        return chart.svg("Gap over the number of workers", told + (f". Extrapolated: {more}" if more else ""))


def _scale_table(values: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    priced = _number(values.get("cost_per_device_hour")) is not None
    heads = ["workers", "synthetic, samples/s", "real, samples/s", "gap", "speed-up", "efficiency", "epoch"]
    heads.append("cost per epoch" if priced else "device-seconds per epoch")
    made: list[tuple[str, Sequence[str]]] = []
    base = {name: rows[0][name] / rows[0]["workers"] for name in ("synthetic", "real")}
    for r in rows:
        cost = _plain(r.get("cost_per_epoch")) if priced else _plain(r.get("cost_per_epoch_device_seconds"))
        cells = [
            str(r["workers"]),
            _rate(r["synthetic"]),
            _rate(r["real"]),
            _percent(r["gap"]),
            f"{r['speedup_real']:.2f}× <span class='soft'>({r['speedup_synthetic']:.2f}×)</span>",
            f"{_percent(r['efficiency_real'])} <span class='soft'>({_percent(r['efficiency_synthetic'])})</span>",
            _seconds(r["epoch_seconds"]),
            cost,
        ]
        made.append(("", cells))
    for f in values.get("extrapolated") or ():
        n = f["workers"]
        cost = _plain(f.get("cost_per_epoch")) if priced else _plain((_number(f.get("epoch_seconds")) or 0.0) * n)
        up, synthetic = f["real"] / base["real"], f["synthetic"] / base["synthetic"]
        cells = [
            f"~{n}",
            _rate(f["synthetic"]),
            f"{_rate(f['real'])}<br>{_rate(f['low'])} to {_rate(f['high'])}",
            _percent(f["gap"]),
            f"{up:.1f}× ({synthetic:.1f}×)",
            f"{_percent(up / n)} ({_percent(synthetic / n)})",
            _seconds(f.get("epoch_seconds")),
            cost,
        ]
        made.append(("guess", cells))
    foot = '<p class="soft">Speed-up and efficiency: real, and synthetic in brackets.'
    foot += (
        " Rows with ~ are extrapolated, not measured; the real rate has its interval of 95 %.</p>" if values.get("extrapolated") else "</p>"
    )
    return _table(heads, made) + foot


def _fits_table(values: Mapping[str, Any]) -> str:
    names = {"amdahl": "Amdahl's law", "usl": "universal scalability law"}
    taken = values.get("laws") or {}
    rows = []
    for which, laws in (values.get("fits") or {}).items():
        for law, fit in laws.items():
            low, high = fit.get("low") or {}, fit.get("high") or {}
            error = f"{_number(fit.get('relative_error')) or 0.0:.1%}"
            cells = [
                escape(f"{which}: {names.get(law, law)}") + (" (used)" if taken.get(which) == law else ""),
                f"{_plain(fit.get('contention'))} <span class='soft'>({_plain(low.get('contention'))} to {_plain(high.get('contention'))})</span>",
                f"{_plain(fit.get('coherency'))} <span class='soft'>({_plain(low.get('coherency'))} to {_plain(high.get('coherency'))})</span>"
                if law == "usl"
                else "–",
                _rate(fit.get("peak")) if fit.get("peak") else "none",
                f"{error}, assumed" if fit.get("error_assumed") else f"{error}, {fit.get('degrees_of_freedom')}",
            ]
            rows.append(("", cells))
    heads = ["fit", "contention", "coherency", "best with", "error of a point, degrees of freedom"]
    return "<h2>Fits</h2>" + _table(heads, rows) if rows else ""
