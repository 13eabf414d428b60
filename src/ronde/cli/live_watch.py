"""``ronde run --watch`` and ``--stop-on``: judge a run while it trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ronde.watch import Alert, RunDir, append_events, read
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.watch.judge import Judge

_LOOK_SECONDS = 2.0


def parse_watch(watch: str | None, stop_on: str | None) -> tuple[str, list[str]]:
    """``--watch`` and ``--stop-on``: ``auto``, steps between two measurements, or empty; and the
    rules that end the run.

    Raises:
        ArgumentError: they cannot be used.

    Example:
        >>> parse_watch("16", None)
        ('16', [])
    """
    if watch not in (None, "auto") and not (str(watch).isdecimal() and int(str(watch))):
        raise ArgumentError(f"--watch={watch}: expected a number of steps above 0.")
    if stop_on is None:
        return watch or "", []
    from ronde.watch.rules import RULES

    rules = list(RULES) if stop_on == "all" else [name for name in stop_on.split(",") if name]
    unknown = [name for name in rules if name not in RULES]
    if unknown or not rules:
        raise ArgumentError(
            f"--stop-on {stop_on}: no rule {', '.join(unknown) or 'is named'}. There are: all, "
            f"{', '.join(RULES)}."
        )
    return watch or "auto", rules


class LiveWatch:
    """Judges a run every two seconds in a thread of the launcher. What fails here is told once.

    Args:
        directory: of the run.
        stop_on: names of rules that end it.
        say: shows a text.
        end: asks the workers to save and leave.

    Attributes:
        stopped: the alert that ended the run; None if none did.

    Example::

        with LiveWatch(directory, ["nan"], print, limit.ask) as live:
            ...
        print(live.stopped)
    """

    def __init__(
        self,
        directory: RunDir,
        stop_on: Collection[str],
        say: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:
        self._directory, self._stop_on = directory, stop_on
        self._say, self._end = say, end
        self._unwritten: list[Alert] = []
        self._known: set[tuple[Any, ...]] = set()  # each fires once per rule and tensor
        self._judge: Judge | None = None
        self._fails = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-rules", daemon=True)
        self.stopped: Alert | None = None

    def __enter__(self) -> LiveWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        """Judge the end, too: the record has it now."""
        self._stop_on = ()
        self._look()
        self._write()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        if self._fails or not self._directory.record.is_file():
            return
        try:
            if self._judge is None:
                from ronde.watch.judge import Judge

                self._judge = Judge(self._directory)
                self._read_known()
            # Only this thread writes alerts, in whole lines: rank 0 appends to the same file.
            for alert in self._judge.look():
                self._take(alert)
            self._write()
        except Exception as error:  # watching never breaks the training
            self._fails = True
            self._say(f"rules are not judged any more ({type(error).__name__}: {error})")

    def _read_known(self) -> None:
        """Alerts of the run before a resume were told then."""
        for event in read(self._directory.record):
            if isinstance(event, Alert):
                self._known.add(event.key)

    def _take(self, alert: Alert) -> None:
        if alert.key in self._known:
            return
        from ronde.cli.watch import alert_text

        self._say(alert_text(alert))
        self._unwritten.append(alert)
        if self.stopped is None and alert.rule in self._stop_on:
            self.stopped = alert
            self._end()

    def _write(self) -> None:
        """Append alerts to the record."""
        if not self._unwritten:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the run
            append_events(self._directory.record, *self._unwritten)
            self._unwritten.clear()
