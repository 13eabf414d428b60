"""The terminal of a run: a bar, rank 0's output, and lines of the launcher's own."""

from __future__ import annotations

from typing import Any

import typer

from ronde.watch import Bar, plain_console


class RunScreen:
    """The terminal of a run: a bar, rank 0's output, and lines of the launcher's own."""

    def __init__(self, quiet: bool) -> None:
        self.console = plain_console()
        self._quiet = quiet
        self.bar = Bar(self.console) if self.console.is_terminal and not quiet else None
        self._held = bytearray()

    def begin(self, text: str) -> None:
        """Say in the bar what is done now."""
        if self.bar:
            self.bar.begin(text)

    def tell(self, text: str) -> None:
        """Show a line of the launcher's."""
        if self.bar:
            self.bar.settle()
        typer.echo(f"ronde: {text}", err=True)

    def alert(self, text: str) -> None:
        """Show an alert of a rule, with --quiet too."""
        from rich.text import Text

        if self.bar:
            self.console.print(Text(text), soft_wrap=True)
        else:
            typer.echo(text, err=True)

    def message(self, message: dict[str, Any]) -> None:
        """Take a progress message of rank 0; with --quiet, only warnings are shown."""
        if self.bar:
            self.bar.update(message)
        elif self._quiet and "warning" in message:
            typer.echo(f"warning: {message['warning']}", err=True)

    def show(self, data: bytes) -> None:
        """Show rank 0's output: directly, or in whole lines above the bar."""
        from ronde.launch.console import to_terminal

        if self.bar is None:
            to_terminal(data)
            return
        self.bar.settle()  # the script speaks: it has started
        self._held.extend(data)
        if not self.bar.drawing:
            # unbuffered: it may be a prompt, or the script's own progress bar
            to_terminal(bytes(self._held))
            self._held.clear()
            return
        # Whole lines only: the bar stands below what is printed.
        end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r"))
        if end < 0:
            return
        text = bytes(self._held[:end]).decode(errors="replace")
        del self._held[: end + 1]
        # With the bar up, rich moves it out of the way and puts it back.
        from rich.text import Text

        self.console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            self.bar.close()
            self.show(b"")
