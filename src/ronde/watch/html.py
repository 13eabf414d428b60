"""HTML report kit: number formats, charts as inline SVG, and the page around them.

A report is one file that fetches nothing. Charts use the page's CSS variables, so they follow the
reader's light or dark setting.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ronde.world import ArgumentError, RondeError
from ronde.world.units import format_rate, format_seconds
from ronde.world.whole_file import write_answer

__all__ = [
    "FAINT",
    "GOOD",
    "INK",
    "LOST",
    "REAL",
    "SYNTHETIC",
    "Section",
    "check_drawing",
    "draw",
    "mark_size",
    "show_number",
    "number_or",
    "percent",
    "plain",
    "points",
    "rate",
    "show_seconds",
    "sizes_axis",
    "soft",
    "write_page",
]

# matplotlib takes colors, not CSS variables: these colors are replaced in the finished SVG.
INK, FAINT, SYNTHETIC, REAL, LOST, GOOD = (
    "#010101",
    "#020202",
    "#030303",
    "#040404",
    "#050505",
    "#060606",
)
_VARIABLES = {
    INK: "ink",
    FAINT: "faint",
    SYNTHETIC: "synthetic",
    REAL: "real",
    LOST: "lost",
    GOOD: "good",
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "hatch.color": FAINT,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


def check_drawing() -> None:
    """Fail before minutes of measuring if charts cannot be drawn.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError(
            "reports need matplotlib, which is not installed: pip install "
            "'.[report]' in a clone of Ronde."
        ) from None


def show_number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def number_or(value: Any, default: float) -> float:
    """A finite number, or the default for anything else."""
    v = show_number(value)
    return default if v is None else v


def rate(value: Any) -> str:
    """Samples per second."""
    v = show_number(value)
    return "–" if v is None else format_rate(v)


def percent(value: Any) -> str:
    """A share in percent."""
    v = show_number(value)
    return "–" if v is None else f"{v:.0%}"


def points(value: Any) -> str:
    """Percentage points."""
    v = show_number(value)
    return "–" if v is None else f"{v:.1f}" if 0 < abs(v) < 9.95 else f"{v:.0f}"


def plain(value: Any) -> str:
    """A number with three digits or more."""
    v = show_number(value)
    return "–" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:,.3g}"


def show_seconds(value: Any) -> str:
    """A duration."""
    v = show_number(value)
    return "–" if v is None else format_seconds(v)


def soft(value: str, remark: str) -> Markup:
    """A value for a cell, with a paler remark in brackets."""
    return Markup('{} <span class="soft">({})</span>').format(value, remark)


def draw(name: str, height: float, title: str, plot: Callable[[Any], str]) -> Markup:
    """Draw a chart as inline SVG in the page's colors.

    Args:
        name: prefix of the SVG's ids, unique on the page.
        height: in inches; the width is that of a phone, and grows with the page.
        title: for screen readers.
        plot: draws into the axes and returns a description for screen readers.
    """
    check_drawing()
    import matplotlib
    from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.add_subplot()
        description = plot(axes)
        figure.patch.set_alpha(0.0)
        axes.patch.set_alpha(0.0)
        figure.savefig(
            out,
            format="svg",
            metadata={"Date": None, "Creator": None, "Type": None, "Format": None},
        )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # HTML understands "xlink:href" without a declaration of its namespace.
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|version|xmlns:xlink|xmlns)="[^"]*"', "", head)
    words = (
        f'<title id="{name}-title">{escape(title)}</title><desc '
        f'id="{name}-desc">{escape(description)}</desc>'
    )
    return Markup(f'{head} role="img" aria-labelledby="{name}-title {name}-desc">{words}{rest}')


def sizes_axis(axes: Any, sizes: Sequence[float], label: str) -> None:
    """Number the horizontal axis by doubling sizes."""
    axes.set_xscale("log", base=2)
    ticks = sorted({int(s) for s in sizes})
    if len(ticks) > 9:
        ticks = [t for t in ticks if t & (t - 1) == 0] or ticks[:: len(ticks) // 8]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def mark_size(
    axes: Any,
    size: float,
    text: str,
    *,
    left: bool,
    y: float = 1.0,
    shift: float = -4,
    va: str = "top",
) -> None:
    """Draw a vertical line at a size, with its name to the left or right of it."""
    axes.axvline(size, color=LOST, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.annotate(
        text,
        (size, y),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, shift),
        textcoords="offset points",
        ha="right" if left else "left",
        va=va,
        color=LOST,
        fontsize=9.5,
    )


@dataclass(frozen=True)
class Section:
    """A heading over a table, a list or a paragraph; nothing is shown if all three are empty.

    Attributes:
        title: the heading.
        heads: of the table's columns.
        rows: of the table: a CSS class and the cells.
        text: numbers of the columns that hold text.
        items: of the list.
        foot: the paragraph, with its tags.
    """

    title: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[str]]] = ()
    text: Sequence[int] = ()
    items: Sequence[str] = ()
    foot: str = ""


def write_page(
    path: str | os.PathLike[str],
    verb: str,
    script: Any,
    headline: str,
    numbers: Sequence[tuple[str, str, str]],
    charts: Sequence[tuple[str, str, str]],
    sections: Sequence[Section],
) -> None:
    """Write a report. All text is escaped except ``Markup``.

    Args:
        path: of the file.
        verb: the command that measured, such as ``ronde doctor``.
        script: of the user.
        headline: the answer in a sentence.
        numbers: name, value and remark of each large figure.
        charts: caption, remark and SVG of each; those without SVG are left out.
        sections: what follows the charts.

    Raises:
        RondeError: the file cannot be written.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    html = pages.get_template("report.html.j2").render(
        verb=verb,
        title=f"{verb} {script}",
        headline=headline,
        numbers=numbers,
        charts=[c for c in charts if c[2]],
        sections=sections,
    )
    try:
        write_answer(Path(path), html)
    except RondeError as error:
        raise RondeError(f"the report {error}") from None
