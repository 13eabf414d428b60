"""Watches one run from inside: keeps losses as unread tensors, and reads, records and shows them in
batches.

A failure in here never breaks the training: it is counted and reported once.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ronde.watch.progress import Silent
from ronde.watch.record import Event, Record, Resumed, Started, StepRecorded

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


def recorded(step: int) -> bool:
    """Whether the record has a step's loss: the first thousand, one in ten, one in a hundred."""
    return step <= 1_000 or (step <= 10_000 and step % 10 == 0) or step % 100 == 0


def _guarded(method: F) -> F:
    """A method whose failures do not reach the training."""

    @functools.wraps(method)
    def call(self: Watcher, *args: Any, **kwargs: Any) -> Any:
        return self._try(functools.partial(method, self, *args, **kwargs))

    return call  # type: ignore[return-value]


class Rate:
    """Training throughput in samples per second, without evaluation, saving and the first steps."""

    def __init__(self, skip_steps: int = 3) -> None:
        self._skip = skip_steps
        self._mark: float | None = None
        self.seconds = 0.0
        self.samples = 0
        self.epoch_seconds = 0.0
        self.epoch_samples = 0

    def pause(self) -> None:
        """Stop the clock: what follows is not training."""
        self._mark = None

    def step(self, samples: int, now: float) -> None:
        """Count a step of ``samples`` that ended at ``now``."""
        if self._mark is not None:
            if self._skip > 0:
                self._skip -= 1
            else:
                self.seconds += now - self._mark
                self.samples += samples
                self.epoch_seconds += now - self._mark
                self.epoch_samples += samples
        self._mark = now

    def resume(self) -> None:
        """Restart the clock."""
        self._mark = time.perf_counter()

    @property
    def samples_per_second(self) -> float | None:
        """Throughput over all training of this process."""
        return self.samples / self.seconds if self.seconds else None

    def end_epoch(self) -> float | None:
        """Throughput of the epoch that ends; resets the epoch's counts."""
        rate = self.epoch_samples / self.epoch_seconds if self.epoch_seconds else None
        self.epoch_seconds, self.epoch_samples = 0.0, 0
        return rate


class Watcher:
    """Records and shows one run; on ranks other than 0 it only counts.

    Args:
        record: where events go, None for nowhere.
        display: what a person sees.
        active: whether this is rank 0.
        part: the name of the run, where several share record and display.
        first: the watcher of the first of them, which shows all of them.
    """

    def __init__(
        self,
        record: Record | None,
        display: Silent,
        active: bool,
        part: str | None = None,
        first: Watcher | None = None,
    ) -> None:
        self.record = record
        self.part = part
        self.closed = False
        self._first = first
        self._others: list[Watcher] = []
        self._last: tuple[int, torch.Tensor] | None = None
        if first is not None:
            first._others.append(self)
        self.active = active
        self.display = display
        self.rate = Rate()
        self.failures = 0
        self.began = 0.0
        """When the training started, resumed, or went back, as the record has it."""
        self.before_flush: Callable[[], None] | None = None
        """Writes what belongs before the losses that are written next."""
        self.epochs: int | None = None
        self.total_steps: int | None = None
        self.steps_at_start = 0
        self._held: list[tuple[int, int, torch.Tensor, float, int, float]] = []
        self._shown = time.perf_counter()
        self._flushed = time.perf_counter()

    def _try(self, call: Callable[[], Any]) -> Any:
        """Catch, count, and report once what fails while watching."""
        try:
            return call()
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                print(
                    f"ronde: recording or showing this run failed ({type(error).__name__}: "
                    f"{error}); training continues",
                    file=sys.stderr,
                )
            return None

    def step(
        self, step: int, epoch: int, loss: torch.Tensor, lr: float, samples: int, batch: int
    ) -> None:
        """Note a step. The loss is a 0-d tensor, not read here."""
        now = time.perf_counter()
        self.rate.step(batch, now)
        if not self.active:
            return
        if self.record is not None and recorded(step):
            self._held.append((step, epoch, loss, lr, samples, time.time()))
        self._last = (step, loss)
        if now - self._shown >= self.display.interval_seconds:
            self._show(step, epoch, loss, now)
        if now - self._flushed >= 1.0 or len(self._held) >= 256:
            self.flush()

    @_guarded
    def _show(self, step: int, epoch: int, loss: torch.Tensor, now: float) -> None:
        self._shown = now
        if self._first is not None and not self._first.closed:
            return
        rate = self.rate
        left = None
        if self.total_steps and rate.seconds and step > self.steps_at_start:
            done = step - self.steps_at_start
            # The rate leaves out the first three steps, too.
            left = (self.total_steps - step) * (rate.seconds / max(1, done - 3))
        self.display.update(
            {
                "epoch": epoch,
                "epochs": self.epochs,
                "step": step,
                "steps": self.total_steps,
                "loss": float(loss),
                "samples_per_second": rate.samples_per_second,
                "seconds_left": left,
                "others": [
                    [other.part, other._last[0], float(other._last[1])]
                    for other in self._others
                    if other._last is not None
                ],
            }
        )

    def flush(self) -> None:
        """Read all pending losses at once and write them to the record."""
        if self.before_flush is not None:
            self._try(self.before_flush)
        self._flush()

    @_guarded
    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        held, self._held = self._held, []
        if held and self.record is not None:
            import torch

            # One read of the device for all of them.
            losses = torch.stack([h[2].double() for h in held]).tolist()
            self.record.write(
                *(
                    StepRecorded(
                        step=step,
                        epoch=epoch,
                        loss=value,
                        lr=lr,
                        samples=samples,
                        time=when,
                        part=self.part,
                    )
                    for (step, epoch, _, lr, samples, when), value in zip(held, losses, strict=True)
                )
            )

    @_guarded
    def event(self, *events: Event) -> None:
        """Write events, after the steps before them."""
        if self.record is not None:
            self.flush()
            for event in events:
                if isinstance(event, Started | Resumed):
                    self.began = event.time
            self.record.write(*(dataclasses.replace(e, part=self.part) for e in events))

    @_guarded
    def say(self, text: str) -> None:
        """Show the user a message, once, on rank 0."""
        if self.active:
            self.display.say(text)

    @_guarded
    def warn(self, text: str) -> None:
        """Show the user a warning, once, on rank 0."""
        if self.active:
            self.display.warn(text)

    def close(self) -> None:
        """Write pending losses and take the display down."""
        self.flush()
        self.closed = True
        if self._first is None or self._first.closed:
            self._try(self.display.close)
        if self.record is not None:
            self._try(self.record.close)
