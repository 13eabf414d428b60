"""One worker of a map, as ``python -m ronde.jobs.map_worker OUT/.map``: it takes chunks from the
ledger, has the script do them in a process of its own, and commits what that wrote.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from ronde.jobs.child_process import end_child, has_ended, how_ended, start_child
from ronde.jobs.handed import PIPES
from ronde.jobs.ledger import JobLedger, Lease, LeaseLost
from ronde.jobs.map_plan import MODEL, bounds, halves, is_too_long, load_map
from ronde.world.heartbeat import heartbeat
from ronde.world.launchers import without_launcher

__all__ = ["STOPPED"]

STOPPED = "stopped"
"""File in the ledger's folder that ends a map; says why."""

_BEAT_SECONDS = 1.0  # several in a ledger's patience


class _Failed(Exception):
    """A chunk could not be done; says why."""


class _NeverBegan(_Failed):
    """The script ended before its first item."""


class _Child:
    """A process of the user's. Its errors are kept until it ends."""

    def __init__(self, command: list[str], environment: dict[str, str], **other: Any) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = start_child(command, environment, stderr=self._errors, **other)

    def end(self) -> str:
        """Kill it and all that it started. Returns how it ended, and its last words."""
        status = self.process.poll()
        end_child(self.process)
        self._errors.seek(0)
        said = self._errors.read()
        self._errors.close()
        sys.stderr.buffer.write(said)
        sys.stderr.flush()
        how = "" if status is None else how_ended(status)
        return f"{how}\n{said.decode(errors='replace')[-4000:]}".strip()


class _Worker:
    def __init__(self, root: Path) -> None:
        self.plan, self.items = load_map(root)
        self.ledger = JobLedger(root)
        self._child: _Child | None = None
        self._orders = self._answers = -1
        self._environment = _environment()
        # every claim compares all chunks that wait
        self._size = functools.cache(lambda key: self.items.bytes_of(*bounds(key)))
        self._progress = 0.0
        self.leaves = False  # after its chunk

    def run(self) -> None:
        """Take chunks until none is left."""
        beat = heartbeat(int(os.environ.get("RANK", 0)))
        try:
            while not (self.ledger.root / STOPPED).exists():
                if self.leaves:
                    _leave_for_others()
                beat.tick()
                if lease := self.ledger.claim(self._size):
                    self._do(lease)
                elif self.ledger.left:
                    time.sleep(0.2)
                else:
                    self._end_well()
                    return
        finally:
            self._close()

    def _end_well(self) -> None:
        """Let the script do what comes after its loop."""
        if self._child is not None and self._orders >= 0:
            os.close(self._orders)
            self._orders = -1
            while not has_ended(self._child.process, _BEAT_SECONDS):
                heartbeat(int(os.environ.get("RANK", 0))).tick()

    def _do(self, lease: Lease) -> None:
        began = time.monotonic()
        try:
            if self.ledger.is_doomed(lease):
                raise _Failed(f"its worker was lost {lease.lost} times")
            # a chunk that failed is halved for that, once it has failed again
            if not lease.failed and is_too_long(self.ledger, self.items, lease.key):
                self.ledger.divide(lease, halves(lease.key))
                return
            outputs = self._each(lease) if self.plan.each else self._script(lease)
        except LeaseLost:
            self._close()
        except _Failed as failure:
            self._close()
            with contextlib.suppress(LeaseLost):  # then its folder is gone: that is no failure
                self.ledger.beat(lease)
                self._failed(lease, failure)
        except BaseException:  # asked to leave
            self._close()
            self.ledger.give_back(lease)
            raise
        else:
            self.ledger.commit(
                lease,
                {
                    "outputs": outputs,
                    "seconds": round(time.monotonic() - began, 6),
                    "host": socket.gethostname(),
                    "rank": int(os.environ.get("RANK", 0)),
                },
            )

    def _failed(self, lease: Lease, why: _Failed) -> None:
        low, high = bounds(lease.key)
        # A mistake in the script itself: halving would set all items aside, one by one.
        if isinstance(why, _NeverBegan) and lease.failed and not self.ledger.has_output:
            last = str(why).strip().splitlines()[-1]
            self._stop(f"the script ends before its first item: {last}")
            self.ledger.give_back(lease)
            return
        if high - low > 1:
            if lease.failed or self.ledger.is_doomed(lease):
                self.ledger.divide(lease, halves(lease.key))
            else:
                self.ledger.fail(lease)
        elif lease.failed < self.plan.retries and not self.ledger.is_doomed(lease):
            self.ledger.fail(lease)
        else:
            self.ledger.set_aside(lease, f"{why}\n(on {socket.gethostname()})")
            self._stop_if_too_many()

    def _stop_if_too_many(self) -> None:
        most = self.plan.tolerate
        if most is None:
            return
        bad = sum("error" in info for _, info in self.ledger.committed())
        if bad > most:
            self._stop(f"more items failed ({bad}) than --tolerate allows ({most})")

    def _stop(self, why: str) -> None:
        (self.ledger.root / STOPPED).write_text(why)

    def _watch(
        self, lease: Lease, is_done: Callable[[float], bool], limit: float | None = None
    ) -> None:
        """Give signs of life until ``is_done(seconds to wait)``.

        Raises:
            _Failed: an item takes longer than its limit.
            LeaseLost: another worker has the chunk.
        """
        beat = heartbeat(int(os.environ.get("RANK", 0)))
        self._progress = began = time.monotonic()
        while not is_done(_BEAT_SECONDS):
            if time.monotonic() - began >= _BEAT_SECONDS:
                began = time.monotonic()
                beat.tick()
                self.ledger.beat(lease)
            if limit is not None and time.monotonic() - self._progress > limit:
                raise _Failed(f"an item took longer than {limit:g} s (--limit)")

    def _script(self, lease: Lease) -> list[str]:
        """Have the script do a chunk. Returns the names of its outputs."""
        is_new = self._child is None
        child = self._child or self._start()
        low, high = bounds(lease.key)
        order = {"first": low, "last": high, "folder": str(lease.folder)}
        answer = b""

        def answered(seconds: float) -> bool:
            nonlocal answer
            # asked first: what it wrote before is read. Its own children may hold the pipe open
            ended = child.process.poll() is not None
            if select.select([self._answers], [], [], seconds)[0]:
                data = os.read(self._answers, 65536)
                self._progress = time.monotonic()
                answer = (answer + data).lstrip(b"\n")  # an empty line is a sign of progress
                return not data or answer.endswith(b"\n")
            return ended

        if is_new:
            self._watch(lease, answered)  # it has come to its items
        began = bool(answer) or not is_new
        if began:
            answer = b""
            with contextlib.suppress(BrokenPipeError):
                os.write(self._orders, (json.dumps(order) + "\n").encode())
            self._watch(lease, answered, self.plan.limit)
        if not answer:
            has_ended(child.process, _BEAT_SECONDS)
            self._child = None
            said = child.end()
            if child.process.returncode == 0:
                said += "\nthe script ended before its items: it must loop over ronde.items(…)"
            raise (_Failed if began else _NeverBegan)(said)
        outputs: list[str] = json.loads(answer)["outputs"]
        return outputs

    def _start(self) -> _Child:
        self._close()
        taken, self._orders = os.pipe()
        self._answers, written = os.pipe()
        pipes = json.dumps([str(self.ledger.root), taken, written])
        command = [sys.executable, *self.plan.command]
        self._child = _Child(command, self._environment | {PIPES: pipes}, pass_fds=(taken, written))
        os.close(taken)
        os.close(written)
        return self._child

    def _each(self, lease: Lease) -> list[str]:
        """Start the command once an item. Returns the names of outputs."""
        name = "output.txt"
        with open(lease.folder / name, "wb") as out:
            model = self.ledger.root / MODEL
            given = {"{model}": str(model)} if model.exists() else {}
            for _, record in self.items.read(*bounds(lease.key)):
                values = {"{}": str(record), "{out}": str(lease.folder), **given}
                words = [_filled(word, values) for word in self.plan.command]
                self._child = _Child(words, self._environment, stdout=out)
                process = self._child.process
                self._watch(lease, functools.partial(has_ended, process), self.plan.limit)
                child, self._child = self._child, None
                said = child.end()
                if process.returncode:
                    raise _Failed(f"{shlex.join(words)}: {said}")
        return [name]

    def _close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._answers = -1


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _environment() -> dict[str, str]:
    """The environment of a process that is alone: it shares nothing with the other workers."""
    kept = without_launcher(os.environ)
    visible = kept.get("CUDA_VISIBLE_DEVICES")
    place = int(os.environ.get("LOCAL_RANK", 0))
    if visible or Path("/dev/nvidia0").exists():
        # one GPU each: a script that knows of no other worker takes the first that it sees
        devices = visible.split(",") if visible else [str(place)]
        kept["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    return kept


def _leave_for_others() -> NoReturn:
    """Leave, and tell the launcher that this is no failure."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).with_suffix(".again").touch()
    sys.exit(75)


def _leave(*_: object) -> None:
    sys.exit(75)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    try:
        worker = _Worker(Path(sys.argv[1]))
        # A host is there again, and workers start on all hosts.
        signal.signal(signal.SIGUSR1, lambda *_: setattr(worker, "leaves", True))
        worker.run()
    except KeyboardInterrupt:
        sys.exit(130)
