"""Summarize a run from its record, for ``ronde run``, ``ronde runs`` and ``ronde show``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ronde.watch.health_record import RESOURCES
from ronde.watch.record import (
    BestFound,
    Checkpointed,
    Ended,
    Epoch,
    Evaluated,
    Event,
    HangFound,
    LossChecked,
    Restarted,
    Started,
    StepRecorded,
    Warned,
    read,
)
from ronde.watch.run_dir import RunDir, is_recent


@dataclass(frozen=True)
class Summary:
    """What a record says about a run; None if it says nothing.

    ``loss_kind`` is that of the last :class:`LossChecked`; ``parts`` the other runs that it trains
    in one loop, by name.
    """

    run: str
    path: str
    status: str
    start: Started | None = None
    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_per_second: float | None = None
    seconds: float | None = None
    loss: float | None = None
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last of each name
    best: BestFound | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    checkpoints: int = 0
    warnings: list[str] = field(default_factory=list)
    differs: bool = False  # by a warning, the training is another one than in one process
    loss_kind: str = "unknown"
    error: str | None = None
    reason: str = ""  # why it was stopped
    written: float = 0.0
    parts: dict[str, Summary] = field(default_factory=dict)
    hangs: list[HangFound] = field(default_factory=list)  # slow ranks too
    restarts: int = 0

    @property
    def ending(self) -> str:
        """The status, and why the run was stopped."""
        return f"{self.status} (stopped: {self.reason})" if self.reason else self.status

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        start = self.start
        return {
            "run": self.run,
            "path": self.path,
            "status": self.status,
            "script": start.script if start else None,
            "workers": start.workers if start else None,
            "device": start.device if start else None,
            "framework": start.framework if start else "",
            "plan": start.plan if start else None,
            "proof": start.proof if start else "",
            "epoch": self.epoch,
            "step": self.step,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
            "loss": self.loss,
            "evaluation": next(reversed(self.evaluations.values()), None),
            "evaluations": self.evaluations,
            "best": dataclasses.asdict(self.best) if self.best else None,
            "checkpoints": self.checkpoints,
            "restarts": self.restarts,
            "error": self.error,
            "reason": self.reason,
            "hangs": [
                {k: getattr(h, k) for k in ("sentence", "rank", "step", "place", "waiting", "slow")}
                for h in self.hangs
            ],
            **({"parts": {n: p.to_dict() for n, p in self.parts.items()}} if self.parts else {}),
        }


def _last(events: list[Event], kind: type[Any]) -> Any:
    return next((e for e in reversed(events) if isinstance(e, kind)), None)


def summarise(run: RunDir) -> Summary:
    """Read a run directory's record.

    A run without an end is ``running`` if it was written to lately, else ``stopped``.
    """
    if not run.record.exists():
        return Summary(run.name, str(run.path), "empty")
    try:
        every = read(run.record)
    except OSError as error:
        why = f"{run.record} cannot be read ({error.strerror})"
        written = run.record.stat().st_mtime
        return Summary(run.name, str(run.path), "unreadable", error=why, written=written)
    names = dict.fromkeys(e.part for e in every if e.part is not None)
    parts = {n: _summarise(run, [e for e in every if e.part == n]) for n in names}
    first = _summarise(run, [e for e in every if e.part is None], parts)
    warnings = dict.fromkeys(e.text for e in every if isinstance(e, Warned))
    # A slow rank is a warning; a hang that ended the run is its error.
    warnings |= dict.fromkeys(h.sentence for h in first.hangs if h.slow)
    differs = any(e.differs for e in every if isinstance(e, Warned))
    return dataclasses.replace(first, warnings=list(warnings), differs=differs)


def _seconds(events: list[Event]) -> float | None:
    """How long the run has trained: a resume begins a new part of it."""
    before, begin, seconds = 0.0, 0.0, None
    for event in events:
        if isinstance(event, Started):
            before, begin, seconds = seconds or 0.0, event.time, seconds or 0.0
        if seconds is not None:
            seconds = before + event.time - begin
    return seconds


def _summarise(
    run: RunDir, events: list[Event], parts: dict[str, Summary] | None = None
) -> Summary:
    start, ended = _last(events, Started), _last(events, Ended)
    evaluations: dict[str, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Evaluated):
            evaluations.pop(event.name, None)  # the last one comes last
            evaluations[event.name] = event.metrics
    steps = [e for e in events if isinstance(e, StepRecorded)]
    written = run.record.stat().st_mtime
    if start is not None and start.framework and (used := run.path / RESOURCES).is_file():
        written = max(written, used.stat().st_mtime)  # the launcher writes on while others train
    if ended is not None and start is not None and ended.time < start.time:
        ended = None  # it was resumed after that end
    status = ended.status if ended else "running" if is_recent(written) else "stopped"
    epochs = [e for e in events if isinstance(e, Epoch)]
    return Summary(
        run.name,
        str(run.path),
        status,
        start,
        step=ended.step if ended and ended.step else steps[-1].step if steps else 0,
        epoch=ended.epoch if ended and ended.epoch else epochs[-1].epoch + 1 if epochs else 0,
        samples=ended.samples if ended and ended.samples else steps[-1].samples if steps else 0,
        samples_per_second=ended.samples_per_second
        if ended
        else epochs[-1].samples_per_second
        if epochs
        else None,
        seconds=_seconds(events),
        loss=steps[-1].loss if steps else None,
        evaluations=evaluations,
        best=_last(events, BestFound),
        curve=[(e.step, e.loss) for e in steps],
        # older ones are removed
        checkpoints=len(
            {e.path for e in events if isinstance(e, Checkpointed) and (run.path / e.path).is_dir()}
        ),
        warnings=list(dict.fromkeys(e.text for e in events if isinstance(e, Warned))),
        loss_kind=checked.kind if (checked := _last(events, LossChecked)) else "unknown",
        error=ended.error if ended else None,
        reason=ended.reason if ended else "",
        written=written,
        parts=parts or {},
        hangs=[e for e in events if isinstance(e, HangFound)],
        restarts=sum(isinstance(e, Restarted) for e in events),
    )
