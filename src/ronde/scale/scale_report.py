"""The HTML report of ``ronde scale``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ronde.watch import html
from ronde.world.units import count_of

Values = Mapping[str, Any]
Row = tuple[str, Sequence[str]]


def scale_report(values: Values, path: str | os.PathLike[str]) -> None:
    """Write ``values``, the JSON of ``ronde scale``, as one HTML file.

    Raises:
        ArgumentError: matplotlib is not installed.
        RondeError: the file cannot be written.
    """
    rows, further = values["rows"], values["extrapolated"]
    last = rows[-1]
    numbers = [
        (
            f"{what} at {last['workers']}",
            show(last[f"{kind}_real"]),
            f"synthetic {show(last[f'{kind}_synthetic'])}",
        )
        for what, kind, show in (
            ("speed-up", "speedup", _times),
            ("efficiency", "efficiency", html.percent),
        )
    ]
    numbers += [
        (f"gap at {last['workers']}", html.percent(last["gap"]), ""),
        ("stop at", str(values["stop_at"]), "workers"),
    ]
    # A speed-up is relative to the rate per worker at the smallest size.
    base = {name: rows[0][name] / rows[0]["workers"] for name in ("synthetic", "real")}
    legend = (
        "Relative to the same rate at the smallest size. Solid: measured. Dashed, with a band: "
        "extrapolated, not measured"
    )
    sections = [
        _sizes(rows, further, base, values.get("cost_per_device_hour") is not None),
        _fits(values),
        html.Section(foot=_wall(values["wall"])),
        html.Section("Notes", items=[str(note) for note in values["notes"]]),
    ]
    charts = [("Speed-up", legend, _speedup(rows, further, base, values["stop_at"]))]
    html.write_page(
        path, "ronde scale", values["script"], values["sentence"], numbers, charts, sections
    )


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _wall(wall: Values | None) -> str:
    if wall is None:
        return ""
    return Markup("<p><strong>Wall:</strong> {} ({}) is met at {}.</p>").format(
        wall["stage"], wall["limit"], count_of(wall["devices"], "worker")
    )


def _speedup(
    rows: Sequence[Values], further: Sequence[Values], base: Mapping[str, float], stop: int
) -> Markup:
    sizes, beyond = [r["workers"] for r in rows], [f["workers"] for f in further]
    every = [*sizes, *beyond]

    def plot(axes: Any) -> str:
        ends = [every[0], every[-1]]
        axes.plot(ends, ends, color=html.INK, linewidth=1.0, linestyle=(0, (1, 2)), label="ideal")
        for name, color, marker in (("synthetic", html.SYNTHETIC, "s"), ("real", html.REAL, "o")):
            measured = [r[f"speedup_{name}"] for r in rows]
            axes.plot(sizes, measured, color=color, marker=marker, markersize=5, label=name)
            xs, last = [sizes[-1], *beyond], measured[-1]
            keys = (name, *(("low", "high") if name == "real" else (f"{name}_low", f"{name}_high")))
            guesses, low, high = ([last, *(f[k] / base[name] for f in further)] for k in keys)
            axes.plot(xs, guesses, linestyle=(0, (4, 2)), color=color, linewidth=1.3)
            axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
        html.sizes_axis(axes, every, "workers")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.grid(axis="y")
        if stop < every[-1]:
            left = stop**2 > every[-1] * every[0]
            html.mark_size(axes, stop, f"stop at {stop}", left=left, y=0.02, shift=2, va="baseline")
        axes.legend(loc="upper left", fontsize=9.5)
        text = "; ".join(
            f"{r['workers']} workers: {r['speedup_real']:.2f} real, "
            f"{r['speedup_synthetic']:.2f} synthetic"
            for r in rows
        )
        more = "; ".join(f"{f['workers']}: {f['real'] / base['real']:.1f}" for f in further)
        return text + (f". Extrapolated, real: {more}" if more else "")

    return html.draw("speedup", 3.9, "Speed-up over the number of workers", plot)


def _sizes(
    rows: Sequence[Values], further: Sequence[Values], base: Mapping[str, float], priced: bool
) -> html.Section:
    heads = ["workers", "synthetic, samples/s", "real, samples/s", "gap", "speed-up"]
    heads += ["efficiency", "epoch", "cost per epoch" if priced else "device-seconds per epoch"]
    body: list[Row] = []
    for r in (*rows, *further):
        n, guess = r["workers"], "low" in r
        ups = [r[name] / base[name] for name in ("real", "synthetic")]
        real = html.rate(r["real"])
        if guess:
            real = html.soft(real, f"{html.rate(r['low'])} to {html.rate(r['high'])}")
        cells = [
            f"~{n}" if guess else str(n),
            html.rate(r["synthetic"]),
            real,
            html.percent(r["gap"]),
            html.soft(*map(_times, ups)),
            html.soft(*(html.percent(up / n) for up in ups)),
            html.show_seconds(r["epoch_seconds"]),
            html.plain(r["cost_per_epoch"] if priced else r["epoch_seconds"] * n),
        ]
        body.append(("guess" if guess else "", cells))
    foot = Markup(
        '<p class="soft">Speed-up and efficiency: real, and synthetic in brackets. Rows with ~ are '
        "extrapolated, not measured; the real rate has its 95 % interval.</p>"
    )
    return html.Section("Measured and extrapolated", heads, body, foot=foot)


def _fits(values: Values) -> html.Section:
    names = {"amdahl": "Amdahl's law", "usl": "universal scalability law"}
    rows: list[Row] = []
    for which, laws in values["fits"].items():
        for law, fit in laws.items():
            parts = [
                html.soft(html.plain(fit[k]), f"{html.plain(low)} to {html.plain(high)}")
                for k in ("contention", "coherency")
                for low, high in [(fit["low"][k], fit["high"][k])]
            ]
            used = " (used)" if values["laws"].get(which) == law else ""
            freedom = "assumed" if fit["error_assumed"] else fit["degrees_of_freedom"]
            peak = html.rate(fit["peak"]) if fit["peak"] else "none"
            error = f"{fit['relative_error']:.1%}, {freedom}"
            rows.append(("", [f"{which}: {names.get(law, law)}{used}", *parts, peak, error]))
    heads = ["fit", "contention", "coherency", "best with", "error of a point, degrees of freedom"]
    return html.Section("Fits", heads, rows)
