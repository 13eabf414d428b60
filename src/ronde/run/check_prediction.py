"""After the first steps: was the prediction right? Said in a line, term by term, and kept for the
next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["PredictionCheck", "Forecast"]

_FIRST, _STEPS = 3, 8  # steps that warm up, and those that are measured
# on the CPU, in a sharded plan's first passes its workers compare their ways, which takes some
# hundredths of a step
_FIRST_SHARDED = 16


@dataclass(frozen=True)
class Forecast:
    """What was predicted of a plan.

    Attributes:
        family: of the plan.
        raw_seconds: of one step, as composed.
        step_seconds: the same, corrected by what earlier runs on this cluster showed.
        terms: seconds by kind, uncorrected.
        keep: called with (raw predicted, measured) seconds of a step: keeps the residual, and
            returns the new factor.
        sentence: why this plan.
        gathers_after: whether what is gathered is gathered after the optimizer's step.
    """

    family: str
    raw_seconds: float
    step_seconds: float
    terms: dict[str, float]
    keep: Callable[[float, float], float] | None = None
    sentence: str = ""
    gathers_after: bool = False


@dataclass
class PredictionCheck:
    """Times the first steps of a run.

    Args:
        forecast: what is compared with.
        device: of this worker; an accelerator is waited for while steps are measured.
    """

    forecast: Forecast
    device: torch.device
    whole: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    last: float | None = None
    _began: float = 0.0
    _passed: float = 0.0

    @property
    def _first(self) -> int:
        sharded = "shard" in self.forecast.family and not self.forecast.gathers_after
        return _FIRST_SHARDED if sharded and self.device.type == "cpu" else _FIRST

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """Forward and backward passes begin."""
        self._began = self._now()

    def passed(self) -> None:
        """Passes and exchange are done."""
        self._passed = self._now()

    def stepped(self) -> bool:
        """The optimizer has stepped. Returns whether enough was seen."""
        now = self._now()
        if self.last is not None:
            self.whole.append(now - self.last)
            self.passes.append(self._passed - self._began)
            self.optimizer.append(now - self._passed)
        self.last = now
        return len(self.whole) >= self._first + _STEPS

    def sentence(self) -> tuple[str, float]:
        """The comparison in a line, and the measured seconds of a step."""
        import statistics  # and with it decimal and fractions, for a sentence that few runs print

        f = self.forecast
        whole, passes, optimizer = (
            statistics.median(v[self._first :]) for v in (self.whole, self.passes, self.optimizer)
        )
        # With a sharded optimizer, what it updated is sent around after its step.
        after = {"optimizer", "host"} | ({"gather"} if f.gathers_after else set())
        late = sum(f.terms.get(name, 0.0) for name in after)
        early = sum(f.terms.values()) - late
        inside = ", ".join(
            f"{name} {_ms(seconds)}"
            for name, seconds in f.terms.items()
            if seconds > 0.02 * f.raw_seconds and name != "optimizer"
        )
        corrected = (
            ""
            if f.step_seconds == f.raw_seconds
            else f", {_ms(f.step_seconds)} as corrected by earlier runs"
        )
        text = (
            f"predicted {_ms(f.raw_seconds)} a step{corrected}, measured {_ms(whole)} "
            f"({whole / f.step_seconds - 1:+.0%}): passes and exchange {_ms(early)} → "
            f"{_ms(passes)} ({inside}), optimizer {_ms(late)} → {_ms(optimizer)}, data and the "
            f"rest 0 → {_ms(max(0.0, whole - passes - optimizer))}"
        )
        return text, whole


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
