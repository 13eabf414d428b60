"""What tests of plans share: how an answer looks."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def shown(what: Any, width: int = 100) -> str:
    """As a terminal of so many columns shows it, without styles."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
