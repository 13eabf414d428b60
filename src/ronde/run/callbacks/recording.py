"""Writes and shows what happens: steps, epochs, evaluations, the script's own values, the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ronde.run.callback import Callback, EvaluationResult, StepView
from ronde.run.content import Ending
from ronde.run.gather import Gathering
from ronde.run.parts import Parts
from ronde.watch import Ended, Epoch, Evaluated, Logged, NoiseMeasured, figure

__all__ = ["Recording"]


class Recording(Callback):
    """Hands events to the watcher.

    Args:
        ending: how the runs of the loop end before their last epoch.
        sent: called when the record is whole.
    """

    def __init__(self, gathering: Gathering, ending: Ending, sent: Callable[[], None]) -> None:
        self._gathering, self._ending, self._sent = gathering, ending, sent
        self._started = time.monotonic()

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        state, batch = step.parts.state, step.share.global_samples
        rate = step.learning_rate
        step.parts.watcher.step(state.step, state.epoch, step.loss, rate, state.samples, batch)

    def epoch_ended(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        state, watcher = parts.state, parts.watcher
        watcher.event(
            Epoch(
                epoch=state.epoch,
                step=state.step,
                samples=state.samples,
                samples_per_second=watcher.rate.end_epoch(),
            )
        )
        self._record_noise(parts)

    def evaluated(self, parts: Parts, outcome: EvaluationResult) -> None:
        """See :class:`Callback`."""
        state, name, result = parts.state, outcome.name, dict(outcome.result)
        parts.watcher.event(
            Evaluated(
                step=state.step,
                epoch=state.epoch,
                samples=outcome.samples,
                metrics=result,
                name=name,
            )
        )
        numbers = {k: figure(v) if isinstance(v, float) else v for k, v in result.items()}
        for metric, value in result.items():
            if isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
                numbers[metric] = f"of {', '.join(map(str, value))}"  # a table: in the record
        shown = "  ".join(f"{metric} {number}" for metric, number in numbers.items())
        parts.say(f"epoch {state.epoch + 1}  step {state.step}  {name}  {shown}")

    def log(self, parts: Parts, values: Mapping[str, Any]) -> None:
        """Record the script's own values, on rank 0."""
        if not parts.world.is_main:
            return
        plain = {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in values.items()}
        state = parts.state
        parts.watcher.event(Logged(step=state.step, epoch=state.epoch, values=plain))

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`."""
        state, watcher = parts.state, parts.watcher
        self._record_noise(parts)
        watcher.event(
            Ended(
                status=status,
                step=state.step,
                epoch=state.epoch,
                samples=state.samples,
                samples_per_second=watcher.rate.samples_per_second,
                seconds=time.monotonic() - self._started,
                reason=self._ending.stopped if status == "completed" else "",
            )
        )
        watcher.close()
        self._sent()
        folder, main = parts.directory, parts.world.is_main and not parts.part
        if folder is not None and main and not os.environ.get("RONDE_PROGRESS"):
            watcher.display.say(
                f"run directory {folder.path}; 'ronde show {folder.name}' draws its curve"
            )

    def _record_noise(self, parts: Parts) -> None:
        noise = parts.strategy.noise
        if noise is None or not noise.value or self._gathering.used or not parts.world.is_main:
            return
        square, trace = noise.read() or (1.0, 0.0)
        low, high = noise.interval() or (None, None)
        parts.watcher.event(
            NoiseMeasured(
                step=parts.state.step,
                noise_scale=trace / square,
                gradient_square=square,
                measurements=noise.count,
                low=low,
                high=high,
            )
        )
