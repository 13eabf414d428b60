"""What a study is doing, while it does it."""

from __future__ import annotations

from typing import Any

__all__ = ["Doing", "console"]


def console() -> Any:
    """Standard output, with colour on a terminal only."""
    from rich.console import Console

    return Console()


class Doing:
    """What is being done, on a terminal only: one line that goes away."""

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
