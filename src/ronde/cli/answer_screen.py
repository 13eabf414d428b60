"""What the studies print: lines, tables that fit the terminal, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ronde.watch import plain_console

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["StyledText", "answer_line", "note_lines", "print_answer", "tell"]

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
