"""HTML report kit: charts as inline SVG, and the page around them.

A report is one file that fetches nothing. Charts use the page's CSS variables, so they follow the
reader's light or dark setting.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ronde.world import ArgumentError, RondeError
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
    "sizes_axis",
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
    # Several charts share a page, and ids must differ.
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
