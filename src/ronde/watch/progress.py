"""Progress display: a bar on a terminal, plain lines elsewhere, nothing when quiet.

Under ``ronde run`` the launcher owns the terminal. Rank 0 sends it messages inside its output, one
line each that starts with the record separator (RFC 7464), and the launcher draws. A script started
on its own draws itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

MARK = "\x1e"
"""First character of a message line from rank 0 to the launcher."""


def figure(value: float) -> str:
    """A loss or a metric as people read it.

    Example:
        >>> figure(0.25), figure(1.5e64)
        ('0.2500', '1.500e+64')
    """
    return f"{value:.4f}" if abs(value) < 1e6 or value != value else f"{value:.3e}"


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print a line; characters that the terminal lacks become ``?``, and a full disk is nothing
    that may end a training.
    """
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        print(text.encode(encoding, "replace").decode(encoding), file=file, flush=True)


def send_message(message: dict[str, Any]) -> None:
    """Send the launcher a message, inside this process's own output."""
    # What the script printed before comes before.
    sys.stdout.flush()
    # one write: it is not torn by other output
    os.write(1, (MARK + json.dumps(message) + "\n").encode())


def plain_console(**options: Any) -> Console:
    """A console of rich that shows text as it is: names, hosts, and a script's words may hold
    ``[bold]`` or ``r1:x:``. What is to have a style is a ``Text``.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


class Silent:
    """Shows nothing. Displays that show something are subclasses."""

    interval_seconds = float("inf")

    def update(self, state: dict[str, Any]) -> None:
        """Show a new state. It has epoch, epochs, step, steps, loss, samples_per_second and
        seconds_left; each may be None.
        """

    def say(self, text: str) -> None:
        """Show a line of text."""

    def warn(self, text: str) -> None:
        """Show a warning."""

    def close(self) -> None:
        """Take the display down."""


class Quiet(Silent):
    """Shows warnings only, on standard error: standard output is the script's own. A launcher that
    merges both is sent a message.
    """

    def __init__(self, launched: bool) -> None:
        self._launched = launched

    def warn(self, text: str) -> None:
        """Print it, or send it."""
        if self._launched:
            send_message({"warning": text})
        else:
            print_line(f"warning: {text}", sys.stderr)


def _describe(state: dict[str, Any]) -> str:
    parts = []
    epochs = f"/{state['epochs']}" if state.get("epochs") else ""
    parts.append(f"epoch {state['epoch'] + 1}{epochs}")
    steps = f"/{state['steps']}" if state.get("steps") else ""
    parts.append(f"step {state['step']}{steps}")
    if state.get("loss") is not None:
        parts.append(f"loss {figure(state['loss'])}")
    if state.get("samples_per_second"):
        parts.append(f"{state['samples_per_second']:,.0f} samples/s")
    if state.get("seconds_left") is not None:
        from ronde.world.units import clock

        parts.append(f"{clock(state['seconds_left'])} left")
    for part, step, loss in state.get("others", ()):
        parts.append(f"{part}: step {step}  loss {figure(loss)}")
    return "  ".join(parts)


class Lines(Silent):
    """Plain lines, one every few seconds, for files, pipes and batch systems."""

    def __init__(self, interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds

    def update(self, state: dict[str, Any]) -> None:
        """Print one line."""
        print_line(_describe(state))

    def say(self, text: str) -> None:
        """Print it."""
        print_line(text)

    def warn(self, text: str) -> None:
        """Print it."""
        self.say(f"warning: {text}")


class Stream(Lines):
    """Messages to the launcher, inside this process's own output; it shows and logs what is said,
    too.
    """

    def __init__(self) -> None:
        super().__init__(0.2)

    def update(self, state: dict[str, Any]) -> None:
        """Send the state."""
        send_message(state)

    def close(self) -> None:
        """Ask the launcher to take the bar down."""
        send_message({"close": True})


class Bar(Lines):
    """A rich progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(0.2)
        self.console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._beginning = False

    def _start(self) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rest]}", markup=False),
        )
        progress = Progress(
            *columns, console=self.console, transient=True, expand=True, refresh_per_second=8
        )
        progress.start()
        self._task = progress.add_task("", rest="", total=None)
        self._progress = progress
        return progress

    @property
    def drawing(self) -> bool:
        """Whether the bar is up."""
        return self._progress is not None

    def settle(self) -> None:
        """Take down what :meth:`begin` shows."""
        if self._beginning:
            self.close()

    def begin(self, text: str) -> None:
        """Show text before the first step."""
        progress = self._progress or self._start()
        assert self._task is not None
        progress.update(self._task, description=text, rest="", total=None)
        self._beginning = True

    def update(self, state: dict[str, Any]) -> None:
        """Move the bar."""
        if state.get("close"):
            self.close()
            return
        self.settle()
        progress = self._progress or self._start()
        assert self._task is not None
        left, _, rest = _describe(state).partition("  loss")
        progress.update(
            self._task,
            description=left,
            completed=state["step"],
            total=state.get("steps") or None,
            rest=f"loss{rest}" if rest else "",
        )

    def say(self, text: str) -> None:
        """Print above the bar."""
        self.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        """Take the bar down."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._beginning = False


def choose_display(is_main: bool) -> Silent:
    """Choose this process's display; only rank 0 shows anything."""
    mode = os.environ.get("RONDE_PROGRESS", "")
    if not is_main:
        return Silent()
    if mode in ("quiet", "warnings"):
        return Quiet(launched=mode == "warnings")
    if mode == "stream":
        return Stream()
    if mode == "" and sys.stdout.isatty():
        return Bar(plain_console())
    return Lines()
