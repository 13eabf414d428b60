"""Hand a run's record on to trackers: TensorBoard, MLflow, Weights & Biases, Prometheus.

A reader of the record in a process of its own, outside of the training. A file in the run directory
keeps the offset up to which a tracker has it, so a tracker that is away costs nothing and catches
up later; each point is there once. Run as ``python -m ronde.watch.sinks RUN TARGET``, it follows
the run until its standard input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.watch.record import appended
from ronde.watch.run_dir import RunDir
from ronde.watch.trackers import TRACKERS, Tracker
from ronde.world import ArgumentError, RondeError

__all__ = ["Sending", "check_target_name", "send_record"]

_LOOK_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0
_LOCK_SECONDS, _END_SECONDS = 5.0, 15.0
_NOTE_BYTES = 1000


def check_target_name(target: str) -> tuple[str, str]:
    """Read a target, ``KIND`` or ``KIND:PLACE``.

    Example:
        >>> check_target_name("mlflow:http://127.0.0.1:5000")
        ('mlflow', 'http://127.0.0.1:5000')

    Raises:
        ArgumentError: there is no such tracker, or its package is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in TRACKERS or (kind == "prometheus" and not place.isdecimal()):
        raise ArgumentError(
            f"--to {target}: expected tensorboard, tensorboard:DIR, wandb, wandb:PROJECT, mlflow, "
            "mlflow:URL, or prometheus:PORT."
        )
    server = place or os.environ.get("MLFLOW_TRACKING_URI", "")
    if kind == "mlflow" and not server.startswith(("http://", "https://")):
        raise ArgumentError(
            "--to mlflow needs a server: mlflow:http://HOST:PORT, or MLFLOW_TRACKING_URI; got "
            f"{server!r}."
        )
    package = TRACKERS[kind][1]
    if package and importlib.util.find_spec(package) is None:
        extra = "'.[tensorboard]' in a clone of Ronde" if kind == "tensorboard" else package
        raise ArgumentError(f"--to {kind} needs the {package} package: pip install {extra}.")
    return kind, place


class _Place:
    """The offset up to which a target has a record, and notes, in a locked file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        limit = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise RondeError(
                        f"another process sends this run there already (it holds {path})."
                    ) from None
                time.sleep(0.1)
        text = os.pread(self._file.fileno(), _NOTE_BYTES, 0)
        try:
            self.note: dict[str, Any] = dict(json.loads(text or b"{}"))
        except (ValueError, TypeError):
            raise RondeError(
                f"{path} is damaged. Remove it to send the whole record again."
            ) from None
        self.note.setdefault("id", os.urandom(8).hex())
        self.offset = int(self.note.get("offset", 0))
        self._path = path

    def save(self) -> None:
        """Write in one call, always of one length: a kill leaves the old text or the new one."""
        text = json.dumps({**self.note, "offset": self.offset}).ljust(_NOTE_BYTES - 1) + "\n"
        with self._path.open("r+b", buffering=0) as file:
            file.write(text.encode())

    def close(self) -> None:
        self._file.close()


def send_record(
    run: RunDir,
    target: str,
    tell: Callable[[str], None],
    follow: bool = False,
    over: Callable[[], bool] | None = None,
) -> None:
    """Send the part of a record that a target does not have.

    Args:
        target: as `check_target_name` reads it.
        tell: gets what a person should know: a tracker that does not answer.
        follow: go on until the record ends; or, with ``over``, until that says so.

    Raises:
        ArgumentError: the target is wrong.
        RondeError: the tracker refuses, or does not answer at the end.
    """
    kind, where = check_target_name(target)
    mark = f"-{hashlib.sha256(where.encode()).hexdigest()[:8]}" if where else ""
    with contextlib.ExitStack() as open_ones:
        place = _Place(run.path / f".sink-{kind}{mark}")
        open_ones.callback(place.close)
        if kind == "prometheus":
            place.offset = 0  # it keeps nothing
        place.save()
        sink: Tracker | None = None
        failures, next_try = 0, 0.0
        while True:
            # asked first: what was written before it said so is read
            last = over() if over is not None else not follow or bool(place.note.get("ended"))
            lines: list[tuple[int, dict[str, Any] | None]] = []
            if run.record.exists() and time.monotonic() >= next_try:
                if run.record.stat().st_size < place.offset:
                    raise RondeError(
                        f"{run.record} is shorter than what {kind} has of it: it is another one."
                    )
                # In portions, so that a kill repeats little.
                lines = list(itertools.islice(appended(run.record, place.offset), 500))
            if not lines and last and not failures:
                return
            if not lines:
                time.sleep(_LOOK_SECONDS)
                continue
            try:
                if sink is None:
                    sink = TRACKERS[kind][0](run, where, place.note)
                    open_ones.callback(sink.close)
                sink.send([(o, e) for o, e in lines if e is not None and "type" in e])
            except OSError as error:
                failures += 1
                if failures == 1:
                    tell(f"{kind} does not answer ({error}). Trying again; nothing is lost.")
                if last and failures >= 3:
                    raise RondeError(
                        f"{kind} does not answer ({error}). 'ronde watch {run.name} --to {target}' "
                        "sends the rest later."
                    ) from None
                next_try = time.monotonic() + min(_LONGEST_WAIT_SECONDS, 0.25 * 2**failures)
                continue
            if failures:
                tell(f"{kind} answers again")
            failures, place.offset = 0, lines[-1][0]
            for _, event in lines:
                if event is not None and event.get("type") in ("start", "end"):
                    place.note["ended"] = event["type"] == "end"
            # After the tracker has it: lines sent again after a kill are known to it.
            place.save()


class Sending:
    """Processes that follow a run, one for each target, until this one closes them or ends.

    Args:
        tell: gets what they say.
    """

    def __init__(self, run: RunDir, targets: list[str], tell: Callable[[str], None]) -> None:
        self._tell, self._name = tell, run.name
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "ronde.watch.sinks", str(run.path), target],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C ends the training first
            )
            for target in targets
        ]
        for child in self._children:
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [child.pid for child in self._children]

    def _listen(self, child: subprocess.Popen[str]) -> None:
        for line in child.stderr or ():
            self._tell(line.rstrip())

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let them send the rest, for some seconds."""
        for child in self._children:
            with contextlib.suppress(OSError):
                assert child.stdin is not None
                child.stdin.close()
        limit = time.monotonic() + _END_SECONDS
        for child in self._children:
            try:
                child.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                self._tell(
                    f"--to: not all is sent after {_END_SECONDS:.0f} s; 'ronde watch "
                    f"{self._name} --to …' sends the rest"
                )


def _follow_until_input_ends(path: str, target: str) -> int:
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    threading.Thread(target=listen, daemon=True).start()
    try:
        send_record(RunDir(Path(path)), target, tell, over=over.is_set)
    except RondeError as error:
        tell(f"--to {target}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_follow_until_input_ends(*sys.argv[1:]))
