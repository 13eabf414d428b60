"""Show what a study is doing."""

from __future__ import annotations

import time
from typing import Any

import typer


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
