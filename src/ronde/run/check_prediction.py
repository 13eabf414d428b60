"""Compares the predicted step time with the first measured steps, once, term by term."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ronde.run.callback import Callback, StepView
from ronde.world.units import format_seconds

__all__ = ["Forecast", "PredictionCheck"]

_WARM_UP, _MEASURED = 3, 8  # steps
# On the CPU a sharded plan tries its ways to exchange in the first passes, which costs hundredths
# of a step.
_WARM_UP_SHARDED = 16


@dataclass(frozen=True)
class Forecast:
    """The prediction for a plan.

    Attributes:
        family: of the plan.
        step_seconds: of one step.
        terms: seconds by kind.
        sentence: why this plan.
        gathers_after: whether parameters are gathered after the optimizer's step.
    """

    family: str
    step_seconds: float
    terms: dict[str, float]
    sentence: str = ""
    gathers_after: bool = False


@dataclass(eq=False)
class PredictionCheck(Callback):
    """Times the first steps of a run. It waits for an accelerator at each mark."""

    forecast: Forecast
    device: torch.device
    whole: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    last: float | None = None
    _start: float = 0.0
    _passes_end: float = 0.0

    @property
    def _first(self) -> int:
        sharded = "shard" in self.forecast.family and not self.forecast.gathers_after
        return _WARM_UP_SHARDED if sharded and self.device.type == "cpu" else _WARM_UP

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def before_passes(self, step: StepView) -> None:
        """Forward and backward passes start."""
        self._start = self._now()

    def after_exchange(self, step: StepView) -> None:
        """Passes and exchange are done."""
        self._passes_end = self._now()

    def after_update(self, step: StepView) -> None:
        """Report once enough steps were measured."""
        now = self._now()
        if self.last is not None:
            self.whole.append(now - self.last)
            self.passes.append(self._passes_end - self._start)
            self.optimizer.append(now - self._passes_end)
        self.last = now
        if len(self.whole) >= self._first + _MEASURED:
            step.callbacks.rest(self)
            step.parts.watcher.say(self.sentence())

    def sentence(self) -> str:
        """The comparison in a line."""
        import statistics  # and with it decimal and fractions, which few runs need

        f = self.forecast
        whole, passes, optimizer = (
            statistics.median(v[self._first :]) for v in (self.whole, self.passes, self.optimizer)
        )
        # A sharded optimizer sends its results around after its step.
        after = {"optimizer", "host"} | ({"gather"} if f.gathers_after else set())
        late = sum(f.terms.get(name, 0.0) for name in after)
        early = sum(f.terms.values()) - late
        inside = ", ".join(
            f"{name} {format_seconds(seconds)}"
            for name, seconds in f.terms.items()
            if seconds > 0.02 * f.step_seconds and name != "optimizer"
        )
        return (
            f"predicted {format_seconds(f.step_seconds)} a step, measured "
            f"{format_seconds(whole)} ({whole / f.step_seconds - 1:+.0%}): passes and exchange "
            f"{format_seconds(early)} → {format_seconds(passes)} ({inside}), "
            f"optimizer {format_seconds(late)} → {format_seconds(optimizer)}, data and the "
            f"rest 0 → {format_seconds(max(0.0, whole - passes - optimizer))}"
        )
