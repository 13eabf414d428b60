"""The run and the loop of a recorded training: shorter epochs, and as many steps as asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ronde.plan import Share
from ronde.prove.recorder import Recorder
from ronde.run.loop import Loop
from ronde.run.run import Run

__all__ = ["RecordedLoop", "RecordedRun"]


class RecordedLoop(Loop):
    """Ends after the recorded steps."""

    def __init__(self, recorder: Recorder, *given: Any, in_lists: bool, **named: Any) -> None:
        self._recorder = recorder
        # As the script's own micro_batch asks for, even if the study removed it.
        super().__init__(*given, in_lists=in_lists or recorder.asked_micro, **named)

    def epochs(self, n: int) -> Iterator[int]:
        """See :class:`Loop`."""
        return super().epochs(self._recorder.cut_epochs(self.parts, n))

    def goes_on(self, n: int) -> bool:
        """See :class:`Loop`."""
        return super().goes_on(n) and not self._recorder.is_over()

    def batches(self) -> Iterator[Any]:
        """See :class:`Loop`."""
        self._recorder.end_idle_loop()
        return super().batches()

    def takes_more(self) -> bool:
        """See :class:`Loop`."""
        return not self._recorder.is_over()

    def hand_out(self, share: Share, micros: list[Any]) -> list[Any]:
        """See :class:`Loop`."""
        ready = super().hand_out(share, micros)
        for follower in self._following():
            self._recorder.begin_step(follower.parts, share, ready)
        return self._recorder.begin_step(self.parts, share, ready)

    def items(self, micros: list[Any]) -> Iterator[Any]:
        """See :class:`Loop`. Micro-batches go one by one to a loop written for one per step."""
        return iter(micros) if self._recorder.splits_steps(self.parts) else super().items(micros)


class RecordedRun(Run):
    """Tells the recorder what the script calls."""

    def __init__(self, recorder: Recorder, *given: Any, **named: Any) -> None:
        self._recorder = recorder
        super().__init__(*given, **named)

    def step(self, batch: Any) -> torch.Tensor:
        """See :class:`Run`."""
        self._recorder.record_given(self.port.parts, batch)
        with self._recorder.around_step(self.port.parts):
            return super().step(batch)

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """See :class:`Run`."""
        with self._recorder.around_backward(self.port.parts):
            super().backward(loss)

    def update(self) -> torch.Tensor:
        """See :class:`Run`. The next batch belongs to the same step, if steps are split."""
        place = self.port.parts.place
        parts = len(place.share.micro) if place.share is not None else 0
        if self._recorder.splits_steps(self.port.parts) and 0 < place.backwards < parts:
            return torch.zeros(())
        return super().update()
