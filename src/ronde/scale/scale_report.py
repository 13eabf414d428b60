"""The chart of ``ronde scale --report``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ronde.watch import html

__all__ = ["speedup_chart"]


def speedup_chart(values: Mapping[str, Any]) -> str:
    """Speed-up over the number of workers, measured (solid) and extrapolated (dashed, with its
    interval), as an SVG.

    Args:
        values: the JSON of ``ronde scale``.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    rows, further = values["rows"], values["extrapolated"]
    # A speed-up is relative to the rate per worker at the smallest size.
    base = {name: rows[0][name] / rows[0]["workers"] for name in ("synthetic", "real")}
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
        axes.legend(loc="upper left", fontsize=9.5)
        text = "; ".join(
            f"{r['workers']} workers: {r['speedup_real']:.2f} real, "
            f"{r['speedup_synthetic']:.2f} synthetic"
            for r in rows
        )
        more = "; ".join(f"{f['workers']}: {f['real'] / base['real']:.1f}" for f in further)
        return text + (f". Extrapolated, real: {more}" if more else "")

    return html.draw("speedup", 3.9, "Speed-up over the number of workers", plot)
