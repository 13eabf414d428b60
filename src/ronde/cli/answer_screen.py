"""What the studies print: what they are doing, lines, tables that fit the terminal, and notes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.watch import plain_console

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

StyledText = str | tuple[str, str]
"""Text, or text and its style."""


def answer_line(*parts: StyledText) -> Text:
    """A line of an answer: its parts are text, whatever brackets they hold."""
    from rich.text import Text

    return Text.assemble(*parts)


def note_lines(notes: Sequence[str], verbose: bool) -> list[Text]:
    """The first three notes, or all."""
    shown = notes if verbose else notes[:3]
    lines = [answer_line(("note  ", "dim"), note) for note in shown]
    if len(shown) < len(notes):
        lines.append(answer_line((f"{len(notes)} notes in all: --verbose, or --json", "dim")))
    return lines


def answer_table(*heads: str) -> Table:
    """A table without lines. A head that begins with ``>`` is that of numbers, which go right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head.startswith(">")
        side: Any = "right" if right else "left"
        cut: Any = "ellipsis" if right else "fold"  # a number that is cut shows that it is
        table.add_column(Text(head.lstrip(">")), justify=side, no_wrap=right, overflow=cut)
    return table


def tell(*parts: StyledText, err: bool = False) -> None:
    """Print a sentence, which the terminal wraps; ``err``: to standard error."""
    plain_console(stderr=err).print(answer_line(*parts), soft_wrap=True)


def print_answer(console: Any, parts: Iterable[Any]) -> None:
    """Print lines, which the terminal wraps, and tables, which fit it."""
    from rich.text import Text

    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def report_answer(
    path: Path,
    verb: str,
    script: str,
    headline: str,
    parts: Iterable[Any],
    charts: Sequence[tuple[str, str, str]],
) -> None:
    """Write what :func:`print_answer` prints, and charts, as one HTML page.

    Raises:
        RondeError: the file cannot be written.
    """
    from markupsafe import Markup
    from rich.table import Table

    from ronde.watch import html

    sections = []
    for part in parts:
        if not isinstance(part, Table):
            if headline not in part.plain:
                foot = Markup("<p>{}</p>").format(part.plain.strip())
                sections.append(html.Section(foot=foot))
            continue
        heads = [str(column.header).strip() for column in part.columns]
        cells = zip(*(map(str, column.cells) for column in part.columns), strict=True)
        words = [i for i, column in enumerate(part.columns) if column.justify == "left"]
        sections.append(html.Section(heads=heads, rows=[("", row) for row in cells], text=words))
    html.write_page(path, verb, script, headline, [], charts, sections)


class Doing:
    """A status line on a terminal, which disappears at the end.

    Args:
        console: standard output.
        lines: whether each phase is a line on standard error if there is no terminal.
    """

    def __init__(self, console: Any, lines: bool = False) -> None:
        self._status = console.status("starting") if console.is_terminal else None
        self._lines = lines and self._status is None
        self._start = time.monotonic()
        self._phase = ""

    def __enter__(self) -> Any:
        if self._status is not None:
            self._status.start()
        return self.say

    def say(self, text: str) -> None:
        """Show it. What follows a colon is detail, for a terminal only."""
        if self._status is not None:
            from rich.text import Text

            seconds = time.monotonic() - self._start
            self._status.update(Text.assemble(text, " … ", (f"{seconds:.0f} s", "dim")))
        # One line a phase: details would fill a log.
        elif self._lines and (phase := text.partition(":")[0]) != self._phase:
            self._phase = phase
            typer.echo(f"{time.monotonic() - self._start:5.1f} s  {phase} …", err=True)

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
