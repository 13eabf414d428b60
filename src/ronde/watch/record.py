"""The run's record: ``record.jsonl``, one JSON object a line, one of the types below.

Readers skip unknown types and fields, so later versions can add some. A resumed run appends; steps
it trains again replace those recorded before the stop (see :func:`read`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Event:
    """Base of all events. ``time``: seconds since 1970, UTC. ``part``: the name of the run, where
    several share the record; None for the first of them.
    """

    type: ClassVar[str] = "event"
    part: str | None = field(default=None, kw_only=True)
    time: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True)
class Started(Event):
    """Training started. ``plan`` is plan.yaml, ``parameters`` and ``steps_per_epoch`` counts,
    ``host`` that of rank 0; ``hosts`` says how many workers are on each, where there are several.
    ``proof`` is the sentence of ``ronde prove`` about this script under such a plan, or empty.
    ``arguments`` are the script's, ``git`` the ``commit`` of its code and whether it was ``dirty``,
    or empty; ``origin`` is ``RUN@STEP`` if it began with a checkpoint of another run. ``command``
    is what follows ``ronde run`` to start it again, up to the script. ``framework`` is what trains
    where Ronde does not, and the launcher records the run: there are no plan, model, and steps.
    """

    type: ClassVar[str] = "start"
    schema: int
    run: str
    script: str
    workers: int
    device: str
    host: str
    launcher: str
    model: str
    parameters: int
    optimizer: str
    samples: int
    steps_per_epoch: int
    threads: int
    plan: dict[str, Any]
    versions: dict[str, str]
    smallest_batch: int | None = None
    hosts: dict[str, int] = field(default_factory=dict)
    proof: str = ""
    arguments: list[str] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    command: list[str] = field(default_factory=list)
    framework: str = ""


@dataclass(frozen=True)
class Resumed(Event):
    """Training resumed from a checkpoint. Earlier records of steps above ``step`` are void."""

    type: ClassVar[str] = "resume"
    step: int
    epoch: int
    samples: int
    checkpoint: str
    workers: int
    written_by_workers: int


@dataclass(frozen=True)
class StepRecorded(Event):
    """One optimizer step: ``loss`` of the whole global batch, ``lr`` of the first parameter group,
    ``samples`` since the run began.
    """

    type: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float
    lr: float
    samples: int


@dataclass(frozen=True)
class Epoch(Event):
    """An epoch ended. ``samples_per_second`` excludes evaluation and saving."""

    type: ClassVar[str] = "epoch"
    epoch: int
    step: int
    samples: int
    samples_per_second: float | None


@dataclass(frozen=True)
class Evaluated(Event):
    """``evaluate`` returned ``metrics`` over ``samples`` samples, each counted once. ``name`` is
    the script's, "evaluate" if it gave none.
    """

    type: ClassVar[str] = "evaluate"
    step: int
    epoch: int
    samples: int
    metrics: dict[str, Any]
    name: str = "evaluate"


@dataclass(frozen=True)
class Logged(Event):
    """The script called ``run.log(values)``."""

    type: ClassVar[str] = "log"
    step: int
    epoch: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Checkpointed(Event):
    """A complete checkpoint was written, in ``seconds``; the training stood still for
    ``stall_seconds`` of them. ``path`` is relative to the run directory.
    """

    type: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float
    stall_seconds: float = 0.0


@dataclass(frozen=True)
class BestFound(Event):
    """The checkpoint of the best evaluation so far was written (``keep_best``). ``path`` is
    relative to the run directory.
    """

    type: ClassVar[str] = "best"
    step: int
    epoch: int
    metric: str
    value: float
    path: str


@dataclass(frozen=True)
class NonFiniteStep(Event):
    """The loss or a gradient of step ``step`` was NaN or infinite, and ``on_nan`` left the step out
    (``action`` "skip").

    ``ranks`` are those whose own samples or gradients were not finite; empty if that is not known.
    ``samples`` are the indices of the global batch in the data set.
    """

    type: ClassVar[str] = "non_finite"
    step: int
    epoch: int
    what: str
    action: str
    ranks: list[int]
    samples: list[int]


@dataclass(frozen=True)
class Warned(Event):
    """A warning shown to the user. ``differs``: the training is another one for it than in one
    process.
    """

    type: ClassVar[str] = "warning"
    text: str
    differs: bool = False


@dataclass(frozen=True)
class LossChecked(Event):
    """The loss was asked what it is: ``mean``, ``sum``, ``pair`` (sum and weight), ``other``,
    ``gathered`` (over the whole batch), or ``unknown``.
    """

    type: ClassVar[str] = "loss_check"
    step: int
    kind: str


@dataclass(frozen=True)
class Restarted(Event):
    """All workers were ended and started again, because of ``reason``: the failure of ``rank``, if
    it is known. ``generation`` counts from 1 in each launch.
    """

    type: ClassVar[str] = "restart"
    generation: int
    reason: str
    rank: int | None = None


@dataclass(frozen=True)
class HangFound(Event):
    """The launcher found a worker that makes no progress. ``slow``: it was said, and the run went
    on; else it was ended. ``sentence`` says which and where; ``rank`` is None if all wait;
    ``place`` is ``FILE:LINE`` of the script, or empty; ``waiting`` are the ranks that wait for it.
    """

    type: ClassVar[str] = "hang"
    sentence: str
    rank: int | None
    step: int
    place: str
    waiting: list[int]
    slow: bool = False


@dataclass(frozen=True)
class Alert(Event):
    """A rule of ``ronde watch`` fired at ``step``.

    A rule yields it with ``step``, ``text`` (the numbers that decided), and, if it knows them,
    ``rank``, ``tensor`` (or layer), and ``values``. The judge adds ``rule``, ``samples`` (first and
    last of the run's that the step trained on), ``place`` (``file:line`` of the layer), ``remedy``
    (one thing to try), and ``again`` (the command that shows the alert again, or empty).

    Example:
        >>> Alert(412, "loss 8.1, above 5", values={"loss": 8.1}).step
        412
    """

    type: ClassVar[str] = "alert"
    step: int
    text: str
    rule: str = ""
    samples: list[int] | None = None
    rank: int | None = None
    tensor: str | None = None
    place: str = ""
    remedy: str = ""
    again: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str | None, str, str | None]:
        """It fires once per run of the record, rule, and tensor."""
        return self.part, self.rule, self.tensor


@dataclass(frozen=True)
class Ended(Event):
    """The script ended. ``status`` is ``completed``, ``failed`` (with ``error`` and, if known,
    ``rank``), ``interrupted``, or ``paused`` (``--until``). ``reason`` is that of ``run.stop``, by
    which it completed, or empty.
    """

    type: ClassVar[str] = "end"
    status: str
    step: int
    epoch: int
    samples: int
    samples_per_second: float | None
    seconds: float
    error: str | None = None
    rank: int | None = None
    reason: str = ""


EVENTS: dict[str, type[Event]] = {
    cls.type: cls
    for cls in (
        Started,
        Resumed,
        StepRecorded,
        Epoch,
        Evaluated,
        Logged,
        Checkpointed,
        BestFound,
        NonFiniteStep,
        Warned,
        LossChecked,
        Restarted,
        HangFound,
        Alert,
        Ended,
    )
}
"""Name of a type -> its class."""


def less_is_better(metric: str) -> bool:
    """Whether the smaller value of a metric is the better one, by its name."""
    return any(word in metric.lower() for word in ("loss", "error", "perplexity"))


class JsonLines:
    """Appends objects to a file, each as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._unwritten = b""

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines and flush them to the system.

        Raises:
            OSError: the disk is full, say. What it did not take comes first the next time.
        """
        from ronde.world.whole_file import is_fenced

        if is_fenced():
            return  # the run has been restarted without this worker
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Else the first line of this run would be appended to the cut one, and lost with it.
            torn = _ends_torn(self.path)
            self._file = self.path.open("ab", buffering=0)
            if torn and not self._unwritten:
                self._unwritten = b"\n"  # the run before was killed in the middle of a line
        for line in lines:
            self._unwritten += (json.dumps(line, default=str) + "\n").encode()
        while self._unwritten:  # one call, which others that append cannot come between
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_torn(path: Path) -> bool:
    """Whether the last line of a file is cut: what wrote it was killed."""
    try:
        with path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:
        return False  # not there yet, or empty


class Record:
    """Appends events to ``record.jsonl``. Only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)

    def write(self, *events: Event) -> None:
        """Append events and flush them to the system."""
        self._lines.write(map(_values, events))

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        self._lines.close()


def append_events(path: Path, *events: Event) -> None:
    """Append events to a record that its run writes, too: a launcher knows how workers end.

    Raises:
        OSError: the disk is full, say.
    """
    with contextlib.closing(Record(path)) as record:
        record.write(*events)


def _values(event: Event) -> dict[str, Any]:
    values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    if event.part is None:
        del values["part"]
    return {"type": event.type, **values}


def appended(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield each whole line after ``offset``: the offset in bytes after it, and its object.

    A torn last line is left for later. A line that is no JSON object yields None, so that readers
    get past it.

    Example:
        >>> for offset, event in appended(Path("record.jsonl")):  # doctest: +SKIP
        ...     print(offset, event)

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield offset, value if isinstance(value, dict) else None


def _is_void(event: Event, resumed: Resumed) -> bool:
    """Whether a run trains an earlier event again after it has resumed."""
    if isinstance(event, Epoch) and event.epoch >= resumed.epoch:
        return True
    kinds = StepRecorded | Evaluated | Logged | Epoch | BestFound
    return isinstance(event, kinds) and event.step > resumed.step


def event_of(value: dict[str, Any]) -> Event | None:
    """The event of a line's object; None for an unknown type, or a required field that is missing.

    Example:
        >>> event_of({"type": "alert", "step": 3, "text": "", "later": 1}).step
        3
    """
    cls = EVENTS.get(str(value.get("type")))
    if cls is None:
        return None
    # A later version may add fields.
    names = {f.name for f in dataclasses.fields(cls)}
    try:
        return cls(**{k: v for k, v in value.items() if k in names})
    except TypeError:
        return None


def read(path: Path) -> list[Event]:
    """Read a record's events in order, without those that a resume made void.

    Example:
        >>> read(Path("runs/train-1/record.jsonl"))  # doctest: +SKIP
        [Started(...), Step(...), ...]
    """
    events: list[Event] = []
    for _, value in appended(path):
        event = None if value is None else event_of(value)
        if event is None:
            continue
        if isinstance(event, Started) and not event.framework:  # what the launcher knew is void
            events = [e for e in events if not (isinstance(e, Started) and e.framework)]
        if isinstance(event, Resumed):
            events = [e for e in events if e.part != event.part or not _is_void(e, event)]
        events.append(event)
    return events
