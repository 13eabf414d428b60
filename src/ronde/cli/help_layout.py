"""How ``--help`` is laid out: paragraphs that fill the terminal, an example a line, flags without a
type.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Group", "tidy"]


def _flags_alone(params: list[Any]) -> list[Any]:
    """A flag takes no value, so none is shown for it: typer writes ``<bool>``."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Verb(TyperCommand):
    """A command whose flags show no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, ``--help`` among them."""
        return _flags_alone(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose flags show no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options, ``--help`` among them."""
        return _flags_alone(super().get_params(ctx))


def laid_out(text: str) -> str:
    """Help as it is written in the source, for any width.

    typer keeps single line breaks, which then stand in the middle of lines that it wraps: a
    paragraph becomes one line. What an example does goes below it, indented, instead of beside it,
    where it would be wrapped to the left edge.

    Example:
        >>> print(laid_out("One\\nparagraph.\\n\\n  ronde run x.py     runs it"))
        One paragraph.
        <BLANKLINE>
          ronde run x.py
              runs it
    """
    found = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        example = re.fullmatch(r"(  \S.*?)(?: {2,}(\S.*))?", part)
        if example is None:
            found.append(" ".join(part.split()))
        else:
            found.append(example[1] + (f"\n      {example[2]}" if example[2] else ""))
    return "\n\n".join(found)


def tidy(app: typer.Typer) -> None:
    """Lay out the help of every command that was registered."""
    for command in app.registered_commands:
        command.cls = Verb
        command.help = laid_out(command.help or "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            tidy(group.typer_instance)
