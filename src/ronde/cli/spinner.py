"""A line that shows what a study is doing."""

from __future__ import annotations

from typing import Any


def console() -> Any:
    """Standard output, with color on a terminal only."""
    from rich.console import Console

    return Console()


class Doing:
    """A status line, on a terminal only, that disappears at the end."""

    def __init__(self, console: Any) -> None:
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> Any:
        if self._status is not None:
            self._status.start()
        return self.say

    def say(self, text: str) -> None:
        """Show it."""
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text) + " …")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
