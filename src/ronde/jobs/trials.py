"""A trial of a search: a run directory of ``ronde run``, trained by a child process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ronde.jobs.child_process import start_child
from ronde.jobs.space import Values
from ronde.watch import RunDir
from ronde.watch.record import (
    Alert,
    Ended,
    Epoch,
    Evaluated,
    Resumed,
    Started,
    StepRecorded,
    read,
)
from ronde.world import ArgumentError

__all__ = [
    "HOPELESS", "Goal", "TrialProcess", "TrialProgress", "argument_words", "progress_of",
    "trial_name",
]  # fmt: skip

HOPELESS = ("nan", "diverging", "exploding-gradient", "dead-units", "loss-flat")
"""Rules of ``ronde watch`` that end a trial."""


@dataclass(frozen=True)
class Goal:
    """What is best.

    Attributes:
        maximize: whether large is good.
        metric: its name in ``run.evaluate``, or ``loss``.
        evaluation: the name of the evaluation; empty: any.
    """

    maximize: bool
    metric: str
    evaluation: str = ""

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Read ``max:METRIC`` or ``min:METRIC``, with ``@EVALUATION`` where there are several.

        Raises:
            ArgumentError: it is something else.

        Example:
            >>> Goal.parse("min:loss@test")
            Goal(maximize=False, metric='loss', evaluation='test')
        """
        way, _, name = text.partition(":")
        metric, _, evaluation = name.partition("@")
        if way not in ("max", "min") or not metric:
            raise ArgumentError(
                f"--goal {text}: expected max:METRIC or min:METRIC, as max:accuracy."
            )
        return cls(way == "max", metric, evaluation)


@dataclass(frozen=True)
class TrialProgress:
    """How far a trial is.

    Attributes:
        results: at each rung that it has reached; a last None: it failed after it, or a rule ended
            it.
        samples: trained so far, over all epochs.
        epoch_samples: samples of the data; 0 before it has begun.
        rate: samples per second, by number of workers.
        metrics: names that its evaluations have.
        error: why it failed.
        rule: the one that ended it.
        begun: whether there is a run to go on with.
    """

    results: tuple[float | None, ...] = ()
    samples: int = 0
    epoch_samples: int = 0
    rate: tuple[tuple[int, float], ...] = ()
    metrics: frozenset[str] = frozenset()
    error: str = ""
    rule: str = ""
    begun: bool = False


def trial_name(number: int) -> str:
    """The name of its run."""
    return f"t{number:03d}"


def progress_of(
    run: RunDir, goal: Goal, rungs: Sequence[int], hopeless: Collection[str] = ()
) -> TrialProgress:
    """Read a trial's record: nothing is stored twice.

    Args:
        run: its run directory.
        goal: what is best.
        rungs: samples of each rung.
        hopeless: names of rules: an alert of one ends the trial, at whatever moment it was written.
    """
    if not run.record.is_file():
        return TrialProgress()
    samples = workers = epoch_samples = 0
    values: list[tuple[int, int, float]] = []
    trained: dict[int, int] = {}  # samples by step: of later steps, the record has not every one
    metrics: set[str] = set()
    rates: dict[int, float] = {}
    ended: Ended | None = None
    rule = ""
    for event in read(run.record):  # of all starts of the run, in their order
        if isinstance(event, Alert):  # also after the end
            rule = rule or (event.rule if event.rule in hopeless else "")
            continue
        ended = event if isinstance(event, Ended) else None
        if isinstance(event, StepRecorded | Epoch | Resumed | Ended):
            samples = event.samples
            trained[event.step] = max(samples, trained.get(event.step, 0))
        if isinstance(event, Started):
            epoch_samples, workers = event.samples, event.workers
        elif isinstance(event, Epoch) and event.samples_per_second:
            rates[workers] = event.samples_per_second
        elif isinstance(event, Evaluated):
            metrics.update(f"{name}@{event.name}" for name in event.metrics)
            metric = event.metrics.get(goal.metric)
            if metric is not None and goal.evaluation in ("", event.name):
                values.append((event.step, samples, float(metric)))
    results: list[float | None] = []
    for rung in rungs:
        reached = next((v for step, at, v in values if trained.get(step, at) >= rung), None)
        if reached is None:
            if ended is None or ended.status not in ("completed", "failed"):
                break
            if ended.status == "completed" and values:  # the script's training is shorter
                reached = values[-1][2]
        results.append(reached)
        if reached is None:
            break
    if len(results) == len(rungs) and None not in results:
        rule = ""
    elif rule and None not in results:
        results.append(None)
    failed = ended.error or "" if ended is not None and ended.status == "failed" else ""
    begun = any(run.checkpoints.glob("step-*"))
    return TrialProgress(
        tuple(results),
        samples,
        epoch_samples,
        tuple(rates.items()),
        frozenset(metrics),
        failed,
        rule,
        begun,
    )


def argument_words(values: Values, style: str) -> list[str]:
    """Values as arguments of the script: ``--NAME VALUE``, or as ``style`` says, such as
    ``{name}={value}``.
    """
    words: list[str] = []
    for name, value in values.items():
        words += [style.format(name=name, value=value)] if style else [f"--{name}", str(value)]
    return words


class TrialProcess:
    """``ronde run`` of a trial, on devices that no other trial has."""

    def __init__(
        self, runs: Path, name: str, command: Sequence[str], until: str, devices: Sequence[int],
        gpus: bool, resume: bool, hopeless: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._log: IO[bytes] = open(runs / f"{name}.log", "ab")  # noqa: SIM115
        words = [sys.executable, "-m", "ronde", "run", "--quiet", "--runs", str(runs)]
        # --restarts: a killed worker costs the steps since a checkpoint, no new launcher
        words += ["--name", name, "--workers", str(len(devices)), "--restarts", "3"]
        words += ["--until", until] if until else []
        words += ["--stop-on", ",".join(hopeless)] if hopeless else []
        words += ["--resume"] if resume else []
        environment = dict(os.environ)
        if gpus:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = seen.split(",") if seen else [str(i) for i in range(max(devices) + 1)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in devices)
        own: list[int] = []  # trials on the same cores would slow each other's measured rates
        if not gpus and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            own = [cores[i] for i in devices if i < len(cores)]
        self._process = start_child(
            [*words, *command],
            environment,
            at_end=signal.SIGTERM,  # it saves, and leaves
            cores=own,
            stdout=self._log,
            stderr=self._log,
        )

    def ended(self) -> int | None:
        """Its status, or None while it trains."""
        status = self._process.poll()
        if status is not None:
            self._log.close()
        return status

    def leave(self) -> None:
        """Ask it to save and leave."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()
        self._log.close()
