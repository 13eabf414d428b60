"""The HTML report of ``ronde scale``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ronde.watch import html
from ronde.world import ArgumentError

Values = Mapping[str, Any]


def scale_report(values: Values, path: str | os.PathLike[str]) -> None:
    """Write ``values``, the JSON of ``ronde scale``, as one HTML file.

    Raises:
        ArgumentError: matplotlib is not installed, or the values have no row.
        RondeError: the file cannot be written.
    """
    rows = list(values.get("rows") or ())
    if not rows:
        raise ArgumentError("the values of a scaling report have no 'rows': nothing was measured.")
    first, last = rows[0], rows[-1]
    n = last["workers"]
    speedup, synthetic_speedup = (f"{last[f'speedup_{k}']:.2f}×" for k in ("real", "synthetic"))
    efficiency, synthetic_efficiency = (
        html.percent(last[f"efficiency_{k}"]) for k in ("real", "synthetic")
    )
    first_gap = f"at {first['workers']}: {html.percent(first['gap'])}"
    numbers = [
        (f"speed-up at {n}", speedup, f"synthetic {synthetic_speedup}"),
        (f"efficiency at {n}", efficiency, f"synthetic {synthetic_efficiency}"),
        (f"gap at {n}", html.percent(last["gap"]), first_gap),
        ("stop at", str(values.get("stop_at", "–")), "workers"),
    ]
    # A speed-up is relative to the rate per worker at the smallest size.
    base = {name: first[name] / first["workers"] for name in ("synthetic", "real")}
    further = list(values.get("extrapolated") or ())
    legend = (
        "Relative to the same rate at the smallest size. Solid: measured. Dashed, with a band: "
        "extrapolated, not measured"
    )
    gap_legend = "Hatched: extrapolated, not measured"
    stop = html.show_number(values.get("stop_at"))
    charts = [
        ("Speed-up", legend, _speedup(rows, further, base, stop)),
        ("Gap between synthetic and real", gap_legend, _gaps(rows, further)),
    ]
    priced = html.show_number(values.get("cost_per_device_hour")) is not None
    sections = [
        _sizes(rows, further, base, priced),
        _fits(values),
        html.Section(foot=_wall(values.get("wall"))),
        html.Section("Notes", items=[str(note) for note in values.get("notes") or ()]),
    ]
    script, sentence = values.get("script", ""), str(values.get("sentence") or "")
    html.write_page(path, "ronde scale", script, sentence, numbers, charts, sections)


def _wall(wall: Any) -> str:
    if not isinstance(wall, Mapping):
        return ""
    limit = f" ({wall['limit']})" if wall.get("limit") else ""
    count = f"{wall.get('devices')} worker{'' if wall.get('devices') == 1 else 's'}"
    return Markup("<p><strong>Wall:</strong> {}{} is met at {}.</p>").format(
        str(wall.get("stage")), limit, count
    )


def _speedup(
    rows: Sequence[Values], further: Sequence[Values], base: Mapping[str, float], stop: float | None
) -> Markup:
    sizes = [r["workers"] for r in rows]
    beyond = [f["workers"] for f in further]
    every = [*sizes, *beyond]

    def plot(axes: Any) -> str:
        ends = [every[0], every[-1]]
        axes.plot(ends, ends, color=html.INK, linewidth=1.0, linestyle=(0, (1, 2)), label="ideal")
        for name, color, marker in (("synthetic", html.SYNTHETIC, "s"), ("real", html.REAL, "o")):
            measured = [r[f"speedup_{name}"] for r in rows]
            axes.plot(sizes, measured, "-", color=color, marker=marker, markersize=5, label=name)
            if further:
                guesses = [f[name] / base[name] for f in further]
                xs = [sizes[-1], *beyond]
                ys, dashes = [measured[-1], *guesses], (0, (4, 2))
                axes.plot(xs, ys, linestyle=dashes, color=color, linewidth=1.3)
                axes.plot(beyond, guesses, marker, color=color, markersize=5, fillstyle="none")
                prefix = "" if name == "real" else "synthetic_"
                low, high = (
                    [html.number_or(f.get(prefix + end), f[name]) / base[name] for f in further]
                    for end in ("low", "high")
                )
                bounds = [measured[-1], *low], [measured[-1], *high]
                axes.fill_between(xs, *bounds, color=color, alpha=0.15, linewidth=0)
        html.sizes_axis(axes, every, "workers")
        axes.set_yscale("log", base=2)
        reached = [r[f"speedup_{name}"] for r in rows for name in base]
        top = max(every[-1], *reached)
        ticks = [2**k for k in range(math.ceil(math.log2(max(top, 1))) + 1)]
        axes.set_yticks(ticks, [f"{t}×" for t in ticks])
        axes.minorticks_off()
        axes.set_ylim(max(min(1.0, *reached) * 0.85, 1 / 64), top * 1.12)
        axes.grid(axis="y")
        if stop is not None and stop < every[-1]:
            left, label = stop**2 > every[-1] * every[0], f"stop at {stop:.0f}"
            html.mark_size(axes, stop, label, left=left, y=0.02, shift=2, va="baseline")
        axes.legend(loc="upper left", fontsize=9.5)
        text = "; ".join(
            f"{r['workers']} workers: {r['speedup_real']:.2f} real, "
            f"{r['speedup_synthetic']:.2f} synthetic"
            for r in rows
        )
        more = "; ".join(f"{f['workers']}: {f['real'] / base['real']:.1f}" for f in further)
        return text + (f". Extrapolated, real: {more}" if more else "")

    return html.draw("speedup", 3.9, "Speed-up over the number of workers", plot)


def _gaps(rows: Sequence[Values], further: Sequence[Values]) -> Markup:
    def plot(axes: Any) -> str:
        gaps = [100 * float(r["gap"]) for r in [*rows, *further]]
        places = range(len(gaps))
        split = len(rows)
        axes.bar(places[:split], gaps[:split], color=html.REAL, width=0.62, linewidth=0)
        if further:
            style = {"facecolor": "none", "edgecolor": html.REAL, "hatch": "///"}
            axes.bar(places[split:], gaps[split:], width=0.62, linewidth=1.2, **style)
        above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 9.5}
        for i, value in enumerate(gaps):
            axes.annotate(f"{value:.0f} %", (i, value), **above)
        axes.set_xticks(places, [str(r["workers"]) for r in [*rows, *further]])
        axes.set_xlabel("workers")
        axes.set_ylabel("gap, % of synthetic")
        axes.set_ylim(0, max(10.0, max(gaps) * 1.18))
        axes.tick_params(axis="x", length=0)
        text = "; ".join(f"{r['workers']} workers: {html.percent(r['gap'])}" for r in rows)
        more = "; ".join(f"{f['workers']}: {html.percent(f['gap'])}" for f in further)
        return text + (f". Extrapolated: {more}" if more else "")

    return html.draw("gaps", 3.9, "Gap over the number of workers", plot)


def _sizes(
    rows: Sequence[Values], further: Sequence[Values], base: Mapping[str, float], priced: bool
) -> html.Section:
    heads = ["workers", "synthetic, samples/s", "real, samples/s", "gap", "speed-up"]
    heads += ["efficiency", "epoch", "cost per epoch" if priced else "device-seconds per epoch"]
    body: list[tuple[str, Sequence[str]]] = []
    for r in rows:
        cells = [
            str(r["workers"]),
            html.rate(r["synthetic"]),
            html.rate(r["real"]),
            html.percent(r["gap"]),
            html.soft(f"{r['speedup_real']:.2f}×", f"{r['speedup_synthetic']:.2f}×"),
            html.soft(html.percent(r["efficiency_real"]), html.percent(r["efficiency_synthetic"])),
            html.show_seconds(r["epoch_seconds"]),
            html.plain(r.get("cost_per_epoch" if priced else "cost_per_epoch_device_seconds")),
        ]
        body.append(("", cells))
    for f in further:
        n, up = f["workers"], f["real"] / base["real"]
        synthetic = f["synthetic"] / base["synthetic"]
        rates = (html.rate(f[k]) for k in ("real", "low", "high"))
        cells = [
            f"~{n}",
            html.rate(f["synthetic"]),
            Markup("{}<br>{} to {}").format(*rates),
            html.percent(f["gap"]),
            f"{up:.1f}× ({synthetic:.1f}×)",
            f"{html.percent(up / n)} ({html.percent(synthetic / n)})",
            html.show_seconds(f.get("epoch_seconds")),
            html.plain(f.get("cost_per_epoch"))
            if priced
            else html.plain(html.number_or(f.get("epoch_seconds"), 0.0) * n),
        ]
        body.append(("guess", cells))
    foot = "Speed-up and efficiency: real, and synthetic in brackets."
    if further:
        foot += " Rows with ~ are extrapolated, not measured; the real rate has its 95 % interval."
    paragraph = Markup('<p class="soft">{}</p>').format(foot)
    return html.Section("Measured and extrapolated", heads, body, foot=paragraph)


def _fits(values: Values) -> html.Section:
    names = {"amdahl": "Amdahl's law", "usl": "universal scalability law"}
    rows: list[tuple[str, Sequence[str]]] = []
    for which, laws in (values.get("fits") or {}).items():
        for law, fit in laws.items():
            low, high = fit.get("low") or {}, fit.get("high") or {}
            contention, coherency = (
                html.soft(html.plain(fit.get(k)), f"{html.plain(a)} to {html.plain(b)}")
                for k in ("contention", "coherency")
                for a, b in [(low.get(k), high.get(k))]
            )
            used = " (used)" if (values.get("laws") or {}).get(which) == law else ""
            freedom = "assumed" if fit.get("error_assumed") else fit.get("degrees_of_freedom")
            cells = [
                f"{which}: {names.get(law, law)}{used}",
                contention,
                coherency if law == "usl" else "–",
                html.rate(fit.get("peak")) if fit.get("peak") else "none",
                f"{html.number_or(fit.get('relative_error'), 0.0):.1%}, {freedom}",
            ]
            rows.append(("", cells))
    heads = ["fit", "contention", "coherency", "best with", "error of a point, degrees of freedom"]
    return html.Section("Fits", heads, rows)
