"""What the studies print: what they are doing, lines, tables that fit the terminal, and notes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from ronde.watch import plain_console

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Doing", "StyledText", "answer_line", "note_lines", "print_answer", "tell"]

StyledText = str | tuple[str, str]
"""Text, or text and its style."""

_NOTES = 3  # on a screen; the rest with --verbose, and always in the JSON


def answer_line(*parts: StyledText) -> Text:
    """A line of an answer: its parts are text, whatever brackets they hold."""
    from rich.text import Text

    return Text.assemble(*parts)


def note_lines(notes: Sequence[str], verbose: bool) -> list[Text]:
    """The first three notes, or all."""
    shown = notes if verbose else notes[:_NOTES]
    lines = [answer_line(("note  ", "dim"), note) for note in shown]
    if len(shown) < len(notes):
        lines.append(answer_line((f"{len(notes)} notes in all: --verbose, or --json", "dim")))
    return lines


def tell(text: str) -> None:
    """Print a sentence, which the terminal wraps."""
    plain_console().print(text, soft_wrap=True, highlight=False)


def print_answer(console: Any, parts: Iterable[Any]) -> None:
    """Print lines, which the terminal wraps, and tables, which fit it."""
    from rich.text import Text

    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


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
        elif self._lines and (phase := text.partition(":")[0]) != self._phase:
            self._phase = phase
            typer.echo(f"{time.monotonic() - self._start:5.1f} s  {phase} …", err=True)

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
