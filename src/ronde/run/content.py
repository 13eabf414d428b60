"""What a checkpoint holds of one run, besides its parts, and which evaluation was the best."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ronde.checkpoint import KeepPolicy
from ronde.run.parts import Parts, State
from ronde.run.script_state import Averages, Registry
from ronde.watch import BestFound, less_is_better
from ronde.world import ArgumentError

__all__ = ["BestCheckpoint", "CheckpointContent", "Ending", "KeepBest", "split_metric"]


@dataclass(frozen=True)
class BestCheckpoint:
    """The best evaluation of a run so far.

    Attributes:
        metric: as ``keep_best`` names it.
        value: of the metric.
        step: optimizer steps done then.
        epoch: the epoch then, from 0.
        path: the checkpoint with its weights. It is written when the script takes the next batch or
            ends the epoch. None if the run writes nothing, or could not write it.
    """

    metric: str
    value: float
    step: int
    epoch: int
    path: Path | None


class KeepBest:
    """Compares evaluations by one metric.

    Args:
        text: ``keep_best`` of ``distribute``: ``"accuracy"``, ``"min:val/rank"``, or None.
        checkpoints: the folder of the run's checkpoints.
        patience: evaluations without a better one after which a training is over, or None.

    Attributes:
        best: None before the first evaluation.
    """

    def __init__(
        self, text: str | None, checkpoints: Path | None, patience: int | None = None
    ) -> None:
        self.best: BestCheckpoint | None = None
        self._patience, self._worse = patience, 0  # evaluations since the best
        self.metric, self.mode = split_metric(text) if text is not None else ("", "")
        self._checkpoints = checkpoints
        self._announced = -1
        self._others: set[str] = set()  # metrics of evaluations without this one
        self._warned = False
        self._seen = -1  # the last step at which an evaluation had it

    @property
    def step(self) -> int | None:
        """The step whose checkpoint must stay."""
        return self.best.step if self.best else None

    def compare(self, result: Mapping[str, Any], name: str, state: State) -> tuple[bool, str]:
        """Whether an evaluation is the best so far, and a warning."""
        if not self.metric:
            return False, ""
        named = {**{f"{name}/{metric}": v for metric, v in result.items()}, **result}
        if self.metric not in named:
            self._others.update(result)
            return False, ""
        value = named[self.metric]
        if isinstance(value, np.generic) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentError(
                f"keep_best={self.metric!r}: run.evaluate returned {type(value).__name__} for it, "
                "expected one number. Choose another metric."
            )
        warning = ""
        if state.step == self._seen and not self._warned:
            self._warned = True
            warning = (
                f"keep_best={self.metric!r}: several evaluations after step {state.step} returned "
                f"{self.metric!r}, and the best of them counts. Name the one that should: "
                f"run.evaluate(…, name='val') and keep_best='val/{self.metric}'"
            )
        self._worse += state.step != self._seen
        self._seen = state.step
        sign = -1 if self.mode == "max" else 1
        then = sign * self.best.value if self.best else math.inf
        if not sign * value < then:  # a NaN is never the best
            return False, warning
        path = self._path(state.step)
        self.best = BestCheckpoint(self.metric, float(value), state.step, state.epoch, path)
        self._worse = 0
        return True, warning

    def _path(self, step: int) -> Path | None:
        from ronde.checkpoint.manifest import folder_name  # which few steps need

        return self._checkpoints / folder_name(step) if self._checkpoints is not None else None

    def exhausted(self) -> str:
        """Why the training is over, if it has waited long enough for a better evaluation."""
        if self._patience is None or self._worse < self._patience:
            return ""
        best = self.best
        newest = f"; the best is {best.value:g}, of step {best.step}" if best else ""
        return f"no better {self.metric} in {self._worse} evaluations{newest}"

    def missing(self) -> str:
        """A warning if evaluations lacked the metric so far; empty otherwise."""
        others, self._others = self._others, set()
        if not others or self._seen >= 0 or self.best is not None:
            return ""
        return (
            f"keep_best={self.metric!r}: run.evaluate returned {', '.join(sorted(others))} and no "
            f"{self.metric!r}, so no best checkpoint is kept. Give run.evaluate(…, metrics=…) a "
            "metric of this name"
        )

    def event(self, path: Path) -> list[BestFound]:
        """The event to record when a checkpoint was written, once for each best one."""
        best = self.best
        if best is None or best.path != path or best.step == self._announced:
            return []
        self._announced = best.step
        return [
            BestFound(
                step=best.step,
                epoch=best.epoch,
                metric=best.metric,
                value=best.value,
                path=f"checkpoints/{path.name}",
            )
        ]

    def lost(self, step: int) -> None:
        """The checkpoint of ``step`` could not be written."""
        if self.best is not None and self.best.step == step:
            self.best, self._announced = dataclasses.replace(self.best, path=None), -1

    def to_dict(self) -> dict[str, Any] | None:
        """Its form in a checkpoint."""
        if self.best is None:
            return None
        values = dataclasses.asdict(self.best)
        del values["path"]
        return {**values, "mode": self.mode, "worse": self._worse}

    def restore(self, saved: Mapping[str, Any] | None) -> str:
        """Continue from :meth:`to_dict`. Returns a note if the metric is another one now."""
        if not saved or not self.metric:
            return ""
        if (saved["metric"], saved["mode"]) != (self.metric, self.mode):
            return (
                f"keep_best was '{saved['mode']}:{saved['metric']}' and is "
                f"'{self.mode}:{self.metric}' now: the best checkpoint so far is forgotten"
            )
        step = saved["step"]
        path = self._path(step)
        self.best = BestCheckpoint(self.metric, saved["value"], step, saved["epoch"], path)
        self._announced = self._seen = step
        self._worse = saved.get("worse", 0)
        return ""


def split_metric(text: Any) -> tuple[str, str]:
    """The metric and ``min`` or ``max`` of ``keep_best``.

    Example:
        >>> split_metric("accuracy"), split_metric("val_loss"), split_metric("min:rank")
        (('accuracy', 'max'), ('val_loss', 'min'), ('rank', 'min'))
    """
    first, colon, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    mode, metric = (first, rest) if colon else ("", first)
    if not metric or mode not in ("", "min", "max"):
        raise ArgumentError(
            f"keep_best={text!r}: expected the name of a metric that run.evaluate returns, such as "
            "'accuracy' or 'loss', or with its direction, 'max:accuracy' or 'min:loss'."
        )
    return metric, mode or ("min" if less_is_better(metric) else "max")


@dataclass
class Ending:
    """What a checkpoint says about the end of its training; empty in most.

    Attributes:
        stopped: why the training is over before its last epoch; empty if it is not.
        paused: whether it was written by a pause (``ronde run --until``).
        loops: name of a run -> its loops over ``run.epochs``, from the first, that are over because
            the script left the last of them.
    """

    stopped: str = ""
    paused: bool = False
    loops: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Its form in a checkpoint: without what is empty."""
        return {name: value for name, value in vars(self).items() if value}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`to_dict`; a pause is over."""
        self.stopped = saved.get("stopped", "")
        self.loops = dict(saved.get("loops", {}))


@dataclass(eq=False)
class CheckpointContent:
    """What a checkpoint holds of one run, and when it was last saved.

    Attributes:
        keep: which checkpoints stay.
        async_save: whether checkpoints may be written in the background.
        save_every: optimizer steps between checkpoints, or None.
        ending: of the runs of the loop: how they end before their last epoch.
        settings: of the optimizer's groups, as the script gave them.
        saved_step: the step of the last checkpoint; -1 if there is none.
        saved_at: ``time.monotonic()`` of the last checkpoint, or of the start.
        warned_of_save: whether the script was told that it saves after an epoch's last batch.
    """

    parts: Parts
    best: KeepBest
    keep: KeepPolicy
    async_save: bool
    save_every: int | None
    ending: Ending
    settings: list[dict[str, Any]]
    registry: Registry = field(default_factory=Registry)
    averages: Averages = field(default_factory=Averages)
    saved_step: int = -1
    saved_at: float = field(default_factory=time.monotonic)
    warned_of_save: bool = False

    @cached_property
    def given(self) -> list[dict[str, Any]]:
        """The settings in their form in a checkpoint; after a resume, those of the checkpoint."""
        from ronde.checkpoint import encode  # which no step needs

        return [{k: encode(v) for k, v in group.items()} for group in self.settings]
