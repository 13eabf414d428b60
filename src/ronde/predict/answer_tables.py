"""An answer's tables: narrow terminals drop columns, but never cut a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ronde.predict.prediction import Prediction
from ronde.predict.search import SearchResult
from ronde.world.units import bytes_unit, format_bytes, format_seconds

_STYLES = {"fits": "green", "unknown": "", "risky": "yellow", "does not fit": "red"}
_WIDTHS = (38, 28, 20, 0)  # of a text column: it is made narrower before a column is left out


@dataclass(frozen=True)
class Fitted:
    """A table that fits its console.

    Attributes:
        columns: heads, the row's own name first.
        rows: a cell for each.
        words: columns of text, which may have several lines; they break between parts of a name
            alone.
        dropped: columns that a narrow terminal goes without, in this order.
        styles: of each row; none where there are none.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    dropped: tuple[str, ...]
    styles: tuple[str, ...] = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Render as many columns as there is room for."""
        free = options.update(max_width=10_000)
        left_out: list[str] = []
        for name in ("", *self.dropped):
            if name:
                left_out.append(name)
            for width in _WIDTHS:
                table = self._table(left_out, width)
                if Measurement.get(console, free, table).maximum <= options.max_width:
                    yield table
                    if left_out:
                        hint = f"omitted, too wide: {', '.join(left_out)}; see --json"
                        yield Text(hint, style="dim")
                    return
        for row in self.rows:  # lines, which wrap between words
            cells = [f"{head} {cell}" for head, cell in zip(self.columns, row, strict=True) if cell]
            yield Text(", ".join(cells))

    def whole(self) -> Table:
        """The table with all its columns, as wide as it is."""
        return self._table((), 1_000)

    def _table(self, left_out: Sequence[str], width: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        shown = [k for k, head in enumerate(self.columns) if head not in left_out]
        for k in shown:
            head = self.columns[k]
            table.add_column(head, justify="left" if head in self.words else "right", no_wrap=True)
        for n, row in enumerate(self.rows):
            cells: list[Text] = []
            for k in shown:
                cell = _wrapped(row[k], width) if self.columns[k] in self.words else row[k]
                cells.append(Text(cell, style=_STYLES.get(cell, "")))
            table.add_row(*cells, style=self.styles[n] if self.styles else None)
        return table


def _wrapped(name: str, width: int) -> str:
    """Wrap a plan's words or a module's name at part boundaries.

    Example:
        >>> _wrapped("pipeline=2, schedule=interleaved", 24).splitlines()
        ['pipeline=2,', 'schedule=interleaved']
        >>> _wrapped("does not fit", 0)
        'does not fit'
    """
    if name in _STYLES:
        return name
    lines = [""]
    for part in re.findall(r".+?(?:, |× |[.+]|$)", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def times(result: SearchResult, about: str = "") -> Fitted:
    """The best plan of each family: its time, and whether it fits.

    Args:
        about: what stands before a predicted time.
    """
    rows = []
    for p in result.families.values():
        rate, sent = p.samples_per_second, p.exchanged_bytes
        cells = {
            "plan": p.plan.spec.replace(",", ", "),
            "step": f"{about}{format_seconds(p.step_seconds)}",
            "samples/s": f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}",
            "speed-up": f"{p.speedup:.1f}×",
            "eff.": f"{100 * p.efficiency:.0f} %",
            "bubble": f"{100 * p.bubble:.0f} %" if p.plan.pipeline > 1 else "–",
            "sent": format_bytes(sent) if sent else "–",
            "verdict": p.verdict,
        }
        rows.append(tuple(cells.values()))
    dropped = ("eff.", "bubble", "sent", "samples/s", "speed-up")
    return Fitted(tuple(cells), tuple(rows), ("plan", "verdict"), dropped)


def memory(result: SearchResult) -> Fitted:
    """Memory of each family by kind, in one unit; the device's memory has its own."""
    families = list(result.families.values())
    most = max((p.memory_bytes for p in families), default=0.0)
    unit, scale = bytes_unit(most)
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    rows = []
    for p in families:
        other = p.memory["transient"] + p.memory["communication"] + p.memory["base"]
        sizes = (*(p.memory[kind] for kind in kinds), other, p.memory_bytes)
        capacity = ("?", "?")
        if p.capacity_bytes:
            share = f"{100 * p.memory_bytes / p.capacity_bytes:.0f} %"
            capacity = (format_bytes(p.capacity_bytes), share)
        rows.append((p.plan.family, *(_number(v / scale) for v in sizes), *capacity))
    heads = ("param.", "grad.", "optim.", "activ.", "buffers", "other", "sum", "of", "used")
    first = f"{unit} per device"
    dropped = ("buffers", "other", "activ.", "grad.", "param.", "optim.", "of")
    return Fitted((first, *heads), tuple(rows), (first,), dropped)


def _number(value: float) -> str:
    if value < 0.005:
        return "<0.01" if value else "–"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def stages(best: Prediction) -> Fitted:
    """A pipeline's stages, the slowest in bold."""
    slowest = max((r.forward_seconds + r.backward_seconds for r in best.stages), default=0.0)
    rows, styles = [], []
    for row in best.stages:
        cells = {
            "stage": str(row.stage),
            "worker": str(row.worker),
            "from": row.first,
            "to": row.last,
            "units": str(row.units),
            "forward": format_seconds(row.forward_seconds),
            "backward": format_seconds(row.backward_seconds),
            "memory": format_bytes(row.memory_bytes),
            "in flight": str(row.in_flight),
            "sends": format_bytes(row.send_bytes) if row.send_bytes else "–",
        }
        rows.append(tuple(cells.values()))
        styles.append("bold" if row.forward_seconds + row.backward_seconds == slowest else "")
    dropped = ("units", "sends", "in flight", "to", "worker", "from")
    return Fitted(tuple(cells), tuple(rows), ("from", "to"), dropped, tuple(styles))
