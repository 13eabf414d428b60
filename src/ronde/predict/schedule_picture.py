"""Draw a pipeline's schedule in the terminal, readable without color."""

from __future__ import annotations

import math

from rich.text import Text

from ronde.predict.simulate import Timeline
from ronde.world import ArgumentError

_STYLES = {
    "F": "black on bright_blue",
    "B": "black on bright_green",
    "I": "black on bright_green",
    "W": "black on yellow",
}


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
    if not timeline.events or timeline.seconds <= 0:
        raise ArgumentError(
            "picture: the timeline has no events; simulate it with keep_events=True."
        )
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


def _sign(kind: str, micro: int) -> str:
    if kind == "F":
        return str(micro % 10)
    return chr(ord("A" if kind == "W" else "a") + micro % 26)


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
