"""Where a run leaves: its time limit, and how a scheduler starts it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextlib.contextmanager
def on_signals(
    call: Callable[[int], object], numbers: tuple[signal.Signals, ...] = _SIGNALS
) -> Iterator[list[int]]:
    """Call something with each signal that comes; the list has those that came."""
    came: list[int] = []

    def take(number: int, _: object) -> None:
        came.append(number)
        call(number)

    before = {number: signal.signal(number, take) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Limit:
    """Asks this process to leave, as a scheduler does, after some seconds; None: never.

    Args:
        may_ask: whether :meth:`ask` may be called.

    Attributes:
        reached: whether the seconds have passed.
    """

    def __init__(self, seconds: float | None, may_ask: bool = False) -> None:
        self._seconds, self._may_ask = seconds, may_ask
        self._ended = threading.Event()
        self.reached = False

    def ask(self) -> None:
        """Ask it now, for another reason."""
        threading.Thread(target=self._ask, daemon=True).start()

    def _wait(self, seconds: float) -> None:
        if not self._ended.wait(seconds):
            self.reached = True
            self._ask()

    def _ask(self) -> None:
        while not self._ended.is_set():  # again: the run may not have begun to listen
            os.kill(os.getpid(), signal.SIGUSR1)
            self._ended.wait(1.0)

    def __enter__(self) -> Limit:
        asks = self._seconds is not None or self._may_ask
        if asks and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # it would end this process
            signal.signal(signal.SIGUSR1, lambda *_: None)
        if self._seconds is not None:
            threading.Thread(target=self._wait, args=[self._seconds], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()


def requeue() -> str:
    """Let Slurm start this job again, if it is a batch job that may be. What to tell then."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or shutil.which("scontrol") is None:
        return ""
    shown = subprocess.run(
        ["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True, timeout=60
    )
    # An interactive allocation has no script that Slurm could start again.
    if "Requeue=1" not in shown.stdout or "BatchFlag=1" not in shown.stdout:
        return ""
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    if done.returncode:
        return f". Slurm does not start job {job} again: {done.stderr.strip()}"
    return f". Slurm starts job {job} again"
