"""What the launcher and its agents say to each other: a frozen dataclass for each kind.

On their way, over a pipe, they are lines of JSON; an agent in the launcher's process gets them as
they are.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ronde.launch.job import Job, Nodes, Outcome
from ronde.watch.hang_judge import HangVerdict, RankView

__all__ = ["MARKER", "Message", "Pipe", "Sender", "Silence", "from_line", "to_line"]

MARKER = b"\x1eronde agent\n"
"""What an agent writes first: whatever a login shell prints before it is no message."""


@dataclass(frozen=True)
class Message:
    """Base of all kinds. ``data`` is bytes, where a kind has some."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls

    def values(self) -> dict[str, Any]:
        """The kind and all values; but for ``data``, JSON holds them."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


def to_line(message: Message) -> bytes:
    """A message as a line."""
    values = message.values()
    if "data" in values:  # as Base64: Open MPI 5 takes bytes on the way for text, and drops NUL
        values["data"] = base64.b64encode(values["data"]).decode()
    return json.dumps(values, default=str).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """The message that :func:`to_line` wrote.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    values = json.loads(line)
    kind = Message.kinds[values["kind"]]
    return kind(**{name: _read(name, value) for name, value in values.items() if name != "kind"})


def _read(name: str, value: Any) -> Any:
    return _TYPES[name](value) if name in _TYPES else value


_TYPES: dict[str, Callable[[Any], Any]] = {
    "data": base64.b64decode,
    "files": lambda files: {name: tuple(file) for name, file in files.items()},
    "job": lambda v: Job(**{**v, "directory": v["directory"] and Path(v["directory"])}),
    "nodes": lambda v: Nodes(**v),
    "outcome": lambda v: Outcome(**{**v, "hang": v["hang"] and HangVerdict.from_dict(v["hang"])}),
    "verdict": HangVerdict.from_dict,
    "views": lambda views: [RankView.from_dict(v) for v in views],
}


# Orders of the launcher


@dataclass(frozen=True)
class Hello(Message):
    """The first order: where the agent is to be, and what it is asked.

    Attributes:
        command: what workers will run.
        token: a file that the launcher made in the run directory; None: there is none.
        silence: after how many seconds without a sign of the launcher the agent ends.
        warm: so many workers are to be forked: torch is imported before the answer.
    """

    folder: str
    command: list[str]
    environment: dict[str, str]
    token: str | None
    silence: float
    warm: int = 0


@dataclass(frozen=True)
class Listen(Message):
    """Listen on every address."""


@dataclass(frozen=True)
class Reach(Message):
    """Try these addresses and ports of the first host."""

    candidates: list[tuple[str, int]]


@dataclass(frozen=True)
class Known(Message):
    """The files that the launcher's run directory has; each follows as a :class:`File`."""

    directory: str
    names: list[str]


@dataclass(frozen=True)
class StartWorkers(Message):
    """Run one generation of workers.

    Attributes:
        id: of the generation.
        job: what to run; its ``workers`` is the number on this host.
        nodes: this host among the hosts.
        own: this host's own address that leads to the first one; empty where ``nodes`` says all.
        mirror: whether to send what appears in the run directory.
        sees: whether this host shares the launcher's run directory.
        files: variable -> name and text of the file of the launcher's machine that it means.
        host: what the launcher calls this host; empty: its own.
    """

    id: str
    job: Job
    nodes: Nodes
    own: str = ""
    mirror: bool = False
    sees: bool = True
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    host: str = ""


@dataclass(frozen=True)
class Leave(Message):
    """Ask the workers to save and leave.

    Attributes:
        number: the signal for whose sake; 0 without one.
        id: of the generation, which may not have begun; empty: whichever runs.
    """

    number: int = 0
    id: str = ""


@dataclass(frozen=True)
class Warn(Message):
    """Pass a scheduler's warning on to the workers that handle it."""


@dataclass(frozen=True)
class Stop(Message):
    """End the workers of a generation, by force after some seconds; a second time at once.

    Attributes:
        id: of the generation; empty: whichever runs.
        number: the signal that workers get.
    """

    number: int
    seconds: float
    id: str = ""


@dataclass(frozen=True)
class EndHang(Message):
    """The run hangs: write down where, and end the workers."""

    verdict: HangVerdict


@dataclass(frozen=True)
class IsHeard(Message):
    """Ask when something last came from an address."""

    address: str


@dataclass(frozen=True)
class Ping(Message):
    """The launcher is there."""


@dataclass(frozen=True)
class End(Message):
    """The last order."""


# Answers of an agent


@dataclass(frozen=True)
class Told(Message):
    """What the host is and has."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Listening(Message):
    """The addresses and ports that the first host listens on."""

    ports: list[tuple[str, int]]


@dataclass(frozen=True)
class Reached(Message):
    """Address of the first host -> by which own one this host reached it."""

    by: dict[str, str]


@dataclass(frozen=True)
class Refused(Message):
    """The host cannot take part."""

    why: str


@dataclass(frozen=True)
class Out(Message):
    """What a worker printed."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Log(Message):
    """What goes into a worker's log only."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Progress(Message):
    """A worker's progress message."""

    rank: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Views(Message):
    """What is known of the ranks of this host, where hangs are watched."""

    views: list[RankView]

    def values(self) -> dict[str, Any]:
        """See :meth:`Message.values`."""
        return {"kind": "Views", "views": [view.to_dict() for view in self.views]}


@dataclass(frozen=True)
class Resources(Message):
    """What the workers of this host have used: numbers of a line of ``resources.jsonl``."""

    used: dict[str, Any]


@dataclass(frozen=True)
class File(Message):
    """A part of a file of the run directory; the first one replaces what was there."""

    name: str
    first: bool
    data: bytes


@dataclass(frozen=True)
class Gone(Message):
    """A file of the run directory is not there any more."""

    name: str


@dataclass(frozen=True)
class Settled(Message):
    """Every file that was there has been sent."""


@dataclass(frozen=True)
class WorkersEnded(Message):
    """How a generation of workers ended on this host."""

    outcome: Outcome


@dataclass(frozen=True)
class Heard(Message):
    """So many seconds ago, something came from an address."""

    address: str
    seconds: float


@dataclass(frozen=True)
class Alive(Message):
    """The agent is there."""


# What a link says of its agent


@dataclass(frozen=True)
class Closed(Message):
    """The agent's process has ended."""

    status: int


@dataclass(frozen=True)
class Failed(Message):
    """An agent in this process has raised an error."""

    error: BaseException


__all__ += list(Message.kinds)


# The pipe


class Pipe(io.FileIO):
    """The reading end of a pipe; counts what comes, parts of lines too."""

    reads = 0

    def readinto(self, buffer: Any) -> int | None:
        """Read as ``FileIO`` does."""
        count = super().readinto(buffer)
        self.reads += 1
        return count


class Silence:
    """How long nothing has come through a pipe, in seconds for which this process was awake.

    A process that gets no CPU wakes late, and finds unread what came meanwhile: it must not take
    its own sleep for the other side's silence.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._reads, self._seconds = pipe, pipe.reads, 0.0
        self.longest = 0.0
        """The longest silence that ended."""
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._looked = time.monotonic()

    def seconds(self) -> float:
        """Look at the pipe once; to be called every second, or more often."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if self._poll.poll(0) or self._pipe.reads != self._reads:
            self.longest = max(self.longest, self._seconds)
            self._reads, self._seconds = self._pipe.reads, 0.0
        else:
            self._seconds += min(passed, 1.0)
        return self._seconds


class Sender:
    """Writes messages to a file descriptor, from any thread.

    Attributes:
        sent: when the last one was written, of ``time.monotonic()``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.sent = 0.0

    def send(self, message: Message) -> bool:
        """Write one; False if nobody reads any more."""
        return self.write(to_line(message))

    def write(self, line: bytes) -> bool:
        """Write a line, which may be no message: who reads keeps it as the agent's words."""
        rest = memoryview(line)
        with self._lock:
            try:
                # a full pipe takes a part
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                return False
            self.sent = time.monotonic()
        return True
