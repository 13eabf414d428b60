"""Lock-free shared-memory counters of per-stage cost: a file for each reading thread.

Only its thread writes a file; readers sum all. Counts only grow, so the difference of two reads is
what happened between them.
"""

from __future__ import annotations

import mmap
import operator
import os
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

_SLOT_BYTES = 8192  # the number of names, then the counters; names from _NAME_AT on
STAGES = 40
FIELDS = 5
CALLS, SAMPLES, CPU, WALL, BYTES = range(FIELDS)
_NAME_AT = 2048
_NAME_BYTES = 64


@dataclass(frozen=True)
class StageTimes:
    """One stage's cost over all reading threads and processes.

    Attributes:
        calls: times that it was done.
        samples: samples that it was done for.
        cpu_seconds: CPU time of the reading process, with the threads that a library starts in it;
            with loading threads, of the reading threads alone.
        wall_seconds: time on the clock, summed over the threads; waiting for storage or for
            Python's lock is in it.
        bytes: that were read, where that is known.
    """

    calls: int = 0
    samples: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, before: StageTimes) -> StageTimes:
        """What was added since ``before``."""
        return StageTimes(*map(operator.sub, astuple(self), astuple(before)))


class Slot:
    """The calling thread's counters.

    Args:
        folder: the board, made where there is none.
    """

    def __init__(self, folder: Path) -> None:
        whole = memoryview(_mapped(folder))
        self._head = whole[:8].cast("q")
        self.values = whole[8 : 8 + STAGES * FIELDS * 8].cast("q")
        self._whole = whole
        self.index = {_name(whole, i): i for i in range(self._head[0])}

    def stage(self, name: str) -> int:
        """A stage's number. Beyond forty names, all share the last one."""
        known = self.index.get(name)
        if known is not None:
            return known
        number = self._head[0]
        if number >= STAGES - 1:
            name, number = "others", STAGES - 1
        if name not in self.index:
            text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
            self._whole[_NAME_AT + number * _NAME_BYTES : _NAME_AT + (number + 1) * _NAME_BYTES] = (
                text
            )
            self._head[0] = number + 1  # last: whoever looks meanwhile sees no nameless number
            self.index[name] = number
        return number


def _mapped(folder: Path) -> mmap.mmap:
    folder.mkdir(exist_ok=True)
    # a later thread with the numbers of one that has ended counts on
    path = folder / f"{os.getpid()}-{threading.get_native_id()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, _SLOT_BYTES)
        return mmap.mmap(file, _SLOT_BYTES)
    finally:
        os.close(file)


def _name(whole: memoryview, number: int) -> str:
    at = _NAME_AT + number * _NAME_BYTES
    return bytes(whole[at : at + _NAME_BYTES]).rstrip(b"\0").decode(errors="replace")


def _times(whole: memoryview) -> dict[str, StageTimes]:
    head, values = whole[:8].cast("q"), whole[8 : 8 + STAGES * FIELDS * 8].cast("q")
    times = {}
    for i in range(head[0]):
        calls, samples, cpu, wall, read = values[i * FIELDS : (i + 1) * FIELDS]
        times[_name(whole, i)] = StageTimes(calls, samples, cpu / 1e9, wall / 1e9, read)
    return times


def read_board(folder: Path) -> dict[str, StageTimes]:
    """Each stage's cost so far, over all threads and processes of a board.

    Args:
        folder: the board; one that nobody has written to yet gives an empty result.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_board(Path(folder) / "board")
        {}
    """
    total: dict[str, StageTimes] = {}
    for data in (file.read_bytes() for file in folder.glob("*")):
        for name, times in _times(memoryview(data)).items() if data else ():
            total[name] = total.get(name, StageTimes()) + times
    return total
