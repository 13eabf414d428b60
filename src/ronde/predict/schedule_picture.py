"""Draw a pipeline's schedule: in the terminal, readable without color, and as SVG."""

from __future__ import annotations

import math
from html import escape

from rich.text import Text

from ronde.predict.simulate import Timeline
from ronde.world import ArgumentError

_STYLES = {
    "F": "black on bright_blue",
    "B": "black on bright_green",
    "I": "black on bright_green",
    "W": "black on yellow",
}
_FILLS = {"F": "#8ab4f8", "B": "#81c995", "I": "#81c995", "W": "#fdd663"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def terminal(timeline: Timeline, width: int = 100) -> Text:
    """One row per worker, time to the right. Forwards show their micro-batch's last digit,
    backwards a small letter (a for micro-batch 0), weight gradients a capital, waiting a dot.

    Raises:
        ArgumentError: the timeline has no events.

    Example:
        >>> from ronde.predict.simulate import Times, run_step
        >>> times = Times((1.0, 1.0), (2.0, 2.0), (0.0, 0.0), (0.0, 0.0))
        >>> print(terminal(run_step("1f1b", 2, 1, 2, times, keep_events=True), width=30).plain)
        worker 0  0011·····aaaa···bbbb
        worker 1  ··00aaaaa11bbbbb····
                  0 s              9 s
        0–9 forward, a–z backward, · waits. Each worker waits 33 % of the step on average.
    """
    _check(timeline)
    workers = len(timeline.busy)
    margin = len(f"worker {workers - 1}  ")
    cells = max(10, width - margin)
    each = timeline.seconds / cells
    rows = [[("·", "")] * cells for _ in range(workers)]
    for event in timeline.events:
        low = math.floor(event.start / each + 0.5)
        high = math.floor(event.end / each + 0.5)
        for c in range(low, min(high, cells)):
            rows[event.worker][c] = (
                _sign(event.action.kind, event.action.micro),
                _STYLES[event.action.kind],
            )
    text = Text(no_wrap=True)
    for w, row in enumerate(rows):
        text.append(f"worker {w}".ljust(margin), style="bold")
        for sign, style in row:
            text.append(sign, style=style or "dim")
        text.append("\n")
    end = _seconds(timeline.seconds)
    text.append(" " * margin + "0 s" + end.rjust(cells - 3) + "\n", style="dim")
    kinds = {e.action.kind for e in timeline.events}
    legend = "0–9 forward, a–z backward" + (
        " (input), A–Z backward (weights)" if "W" in kinds else ""
    )
    text.append(
        f"{legend}, · waits. Each worker waits {100 * timeline.mean_bubble:.0f} % of the "
        "step on average."
    )
    return text


def svg(timeline: Timeline, title: str = "") -> str:
    """The same as a standalone SVG with an axis in seconds and a legend.

    Raises:
        ArgumentError: the timeline has no events.
    """
    _check(timeline)
    workers = len(timeline.busy)
    left, top, row, gap, wide = 84.0, 44.0, 26.0, 6.0, 1000.0
    bottom = top + workers * (row + gap)
    height = bottom + 70
    scale = wide / timeline.seconds
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 24:.0f} '
        f'{height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title or 'schedule of a pipeline')}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left}" y="24" font-size="14" font-weight="600" '
        f'fill="#202124">{escape(title)}</text>',
    ]
    for w in range(workers):
        y = top + w * (row + gap)
        out.append(
            f'<text x="{left - 10}" y="{y + row / 2 + 4:.1f}" text-anchor="end" '
            f'fill="#202124">worker {w}</text>'
        )
        out.append(f'<rect x="{left}" y="{y:.1f}" width="{wide}" height="{row}" fill="#f1f3f4"/>')
    stages = max(e.action.stage for e in timeline.events) + 1
    for event in timeline.events:
        x, y = left + event.start * scale, top + event.worker * (row + gap)
        long = (event.end - event.start) * scale
        kind, micro, stage = event.action.kind, event.action.micro, event.action.stage
        turn = stage // workers
        fade = (
            1.0 - 0.45 * turn / max(1, math.ceil(stages / workers) - 1) if stages > workers else 1.0
        )
        tip = (
            f"{_NAMES[kind]}, micro-batch {micro}, stage {stage}: {_seconds(event.start)} to "
            f"{_seconds(event.end)}"
        )
        out.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(long, 0.5):.2f}" height="{row}" '
            f'fill="{_FILLS[kind]}" fill-opacity="{fade:.2f}" '
            f'stroke="#ffffff" stroke-width="0.6"><title>{escape(tip)}</title></rect>'
        )
        if long > 7.0 * len(str(micro)) + 2:
            out.append(
                f'<text x="{x + long / 2:.2f}" y="{y + row / 2 + 4:.1f}" '
                'text-anchor="middle" fill="#202124" '
                f'pointer-events="none">{micro}</text>'
            )
    out.append(
        f'<line x1="{left}" y1="{bottom}" x2="{left + wide}" y2="{bottom}" stroke="#5f6368"/>'
    )
    for tick in _ticks(timeline.seconds):
        x = left + tick * scale
        out.append(
            f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="#5f6368"/>'
        )
        out.append(
            f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle" '
            f'fill="#5f6368">{_seconds(tick)}</text>'
        )
    x = left
    for kind in ("F", "B", "I", "W"):
        if any(e.action.kind == kind for e in timeline.events):
            out.append(
                f'<rect x="{x:.0f}" y="{bottom + 38}" width="14" height="14" '
                f'fill="{_FILLS[kind]}"/>'
            )
            out.append(
                f'<text x="{x + 20:.0f}" y="{bottom + 50}" fill="#202124">{_NAMES[kind]}</text>'
            )
            x += 44 + 7.0 * len(_NAMES[kind])
    note = "numbers are micro-batches" + (
        ", paler: later stages of the same worker" if stages > workers else ""
    )
    out.append(
        f'<text x="{left + wide}" y="{bottom + 50}" text-anchor="end" '
        f'fill="#5f6368">{note}; each worker waits '
        f"{100 * timeline.mean_bubble:.0f} % on average</text>"
    )
    out.append("</svg>")
    return "\n".join(out)


def _check(timeline: Timeline) -> None:
    if not timeline.events or timeline.seconds <= 0:
        raise ArgumentError(
            "picture: the timeline has no events; simulate it with keep_events=True."
        )


def _sign(kind: str, micro: int) -> str:
    if kind == "F":
        return str(micro % 10)
    return chr(ord("A" if kind == "W" else "a") + micro % 26)


def _ticks(seconds: float) -> list[float]:
    rough = seconds / 8
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * f for f in (1, 2, 5, 10) if unit * f >= rough)
    return [step * k for k in range(math.floor(seconds / step + 1e-9) + 1)]


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
