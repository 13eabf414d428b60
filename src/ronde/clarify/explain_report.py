"""The HTML report of ``ronde clarify explain``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ronde.watch import html

_BARS, _ROWS = 12, 3


def explain_report(
    values: Mapping[str, Any], path: str | os.PathLike[str], model: str, method: str
) -> None:
    """Write a page: what matters over all rows, and the first rows one by one.

    Args:
        values: the JSON of ``ronde clarify explain``.

    Raises:
        ArgumentError: matplotlib is not installed.
        RondeError: the file cannot be written.
    """
    each = np.asarray(values["values"])
    names = list(values["names"])
    mean = np.abs(each).mean(axis=0)
    best = names[int(mean.argmax())]
    image = values["kind"] == "patch"
    over_all = _bars("all", "What matters", mean, names, image)
    charts = [("What matters", f"Mean |value| over {len(each)} rows", over_all)]
    for i in range(min(_ROWS, len(each))):
        output, base = values["output"][i], values["base"][i]
        legend = f"From the base {base:.3g} to the output {output:.3g}"
        charts.append((f"Row {i}", legend, _bars(f"row{i}", f"Row {i}", each[i], names, image)))
    numbers = [
        ("sum check", f"{values['gap']:.1e}", "largest |base + sum - output|"),
        ("rows", str(len(each)), method),
        ("most important", best, f"{mean.max():.3g} in the mean"),
    ]
    rows = [
        ("", (names[i], f"{mean[i]:.4g}", f"{each[:, i].mean():+.4g}")) for i in np.argsort(-mean)
    ]
    sections = [html.Section("All", (values["kind"], "mean |value|", "mean"), rows, text=(0,))]
    headline = f"{best} moves the output most: by {mean.max():.3g} in the mean."
    html.write_page(path, "ronde clarify explain", model, headline, numbers, charts, sections)


def _grid(axes: Any, values: np.ndarray[Any, Any]) -> str:
    side = int(np.sqrt(len(values)))
    most = float(np.abs(values).max(initial=0.0)) or 1.0
    axes.imshow(values.reshape(side, side), cmap="RdBu_r", vmin=-most, vmax=most)
    axes.set_axis_off()
    return f"the largest of {len(values)} patches is {most:.3g}"


def _bars(
    name: str, title: str, values: np.ndarray[Any, Any], names: list[str], image: bool
) -> Any:
    """The largest values as bars, below zero in another color; of an image, all as a grid."""
    order = np.argsort(-np.abs(values), kind="stable")[:_BARS][::-1]

    def plot(axes: Any) -> str:
        if image:
            return _grid(axes, values)
        colors = [html.REAL if values[i] > 0 else html.SYNTHETIC for i in order]
        axes.barh(range(len(order)), values[order], color=colors, height=0.6)
        axes.axvline(0, color=html.FAINT, linewidth=1.0)
        axes.set_yticks(range(len(order)), [names[i] for i in order])
        return "; ".join(f"{names[i]} {values[i]:+.3g}" for i in order[::-1])

    return html.draw(name, 3.2 if image else 1.0 + 0.26 * len(order), title, plot)
