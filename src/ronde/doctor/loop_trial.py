"""Time the script's own code in its loop over batches, after the examination."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ronde.run.loop import Loop
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.run import Run
    from ronde.run.callback import StepView

_SKIPPED_STEPS, _FIRST_STEPS, _MOST_STEPS = 3, 12, 60
_MISSING = (
    "the script's own loop was not timed: it needs run.step(batch), and 12 steps in its first "
    "epoch within 30 s."
)


class ScriptTime:
    """The time that a script takes between Ronde's calls in its loop over batches.

    Example:
        >>> clock = ScriptTime()
        >>> for _ in range(10):
        ...     clock.handed()  # run.batches() gives a batch
        ...     clock.enter()  # run.step() begins
        ...     clock.leave()  # and ends
        ...     clock.enter()  # the next batch is asked for
        >>> sorted(clock.cost())
        ['after_seconds', 'before_seconds', 'period_seconds']
    """

    def __init__(self) -> None:
        self.owns_passes = False  # what is a pass of the script's own, and what is not?
        self._handed = 0
        self._seconds = [0.0, 0.0, 0.0]  # before the steps, after them, and evaluating
        self._whole = [0.0, 0.0, 0.0]  # the same up to the last batch
        self._start = self._end = 0.0
        self._since: float | None = None  # since when the script runs
        self._stepped = 0  # 1 after the step: an index

    def handed(self) -> None:
        """A batch is given to the script."""
        self._handed += 1
        self._end = self._since = perf_counter()
        self._stepped = 0
        if self._handed == _SKIPPED_STEPS + 1:
            self._start, self._seconds = self._end, [0.0, 0.0, 0.0]
        self._whole = list(self._seconds)

    def enter(self) -> None:
        """A call of Ronde begins."""
        if self._since is not None:
            self._seconds[self._stepped] += perf_counter() - self._since
            self._since = None

    def leave(self) -> None:
        """The step ends, and the script goes on."""
        self._stepped, self._since = 1, perf_counter()

    def pause(self) -> tuple[float, bool]:
        """Ronde evaluates inside of the loop; give the result to :meth:`resume`."""
        running = self._since is not None
        self.enter()
        return perf_counter(), running

    def resume(self, paused: tuple[float, bool]) -> None:
        """The script goes on, if it ran."""
        now = perf_counter()
        self._seconds[2] += now - paused[0]
        if paused[1]:
            self._since = now

    def cost(self) -> dict[str, float] | None:
        """Mean seconds of a step: ``before_seconds`` from a batch to its step, ``after_seconds``
        from there to the next batch, of ``period_seconds`` in all. None if it cannot be told.
        """
        steps = self._handed - _SKIPPED_STEPS - 1  # whole periods
        if steps < 1 or self.owns_passes:
            return None
        before, after, evaluating = (seconds / steps for seconds in self._whole)
        period = (self._end - self._start) / steps - evaluating
        return {"before_seconds": before, "after_seconds": after, "period_seconds": period}


class TimedLoop(Loop):
    """The script's loop under its clock."""

    def __init__(self, clock: ScriptTime, *given: Any, **named: Any) -> None:
        self._clock = clock
        super().__init__(*given, **named)

    def items(self, micros: list[Any]) -> Iterator[Any]:
        """See :class:`Loop`."""
        for given in super().items(micros):
            self._clock.handed()
            yield given
            self._clock.enter()


class LoopTrial:
    """Lets the script take some steps of its own, then hands on the answer and ends the process.

    Args:
        clock: of the script's own code.
        values: the doctor's answer so far.
        write: takes the answer, on rank 0. It is written at once, in case the script never comes to
            its loop, and again with what the loop costs.
    """

    def __init__(
        self,
        run: Run,
        clock: ScriptTime,
        values: dict[str, Any],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.values, self.write, self.clock = values, write, clock
        self.steps, self.most = 0, _MOST_STEPS
        self.start = 0.0
        write({**values, "notes": [*values["notes"], _MISSING]})
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(30)  # seconds for the script to come to its loop and take some steps

    def step_ended(self, step: StepView) -> None:
        """A step of the script has ended on every rank."""
        run = step.parts
        self.steps += 1
        on_gpu = run.world.device.type == "cuda"
        if self.steps == _SKIPPED_STEPS and on_gpu:  # so that the periods hold their steps
            torch.cuda.synchronize(run.world.device)
        if self.steps == 1:
            self.start = perf_counter()
        elif self.steps == _FIRST_STEPS:
            each = max((perf_counter() - self.start) / (_FIRST_STEPS - 1), 1e-4)
            wanted = min(_MOST_STEPS, _FIRST_STEPS + int(3.0 / each))
            self.most = int(broadcast_json(run.world, wanted))
        last = step.share.stop + run.plan.batch_size > run.data.order.epoch_samples
        if self.steps < self.most and not last:
            return  # what follows the epoch's last step may save or evaluate
        signal.alarm(0)
        values = judge_script_loop(self.values, gather_json(run.world, self.clock.cost()), on_gpu)
        if values["script_loop"] is None:
            values["notes"] = [*values["notes"], _MISSING]
        self.write(values)
        raise SystemExit(0)


def _give_up(*_: Any) -> None:
    raise SystemExit(0)


def judge_script_loop(
    values: Mapping[str, Any], costs: Sequence[Mapping[str, Any] | None], on_gpu: bool = False
) -> dict[str, Any]:
    """Add ``script_loop`` to the doctor's answer; above 5 points it is unhealthy and prescribed.

    Args:
        values: the doctor's answer.
        costs: of each rank: seconds of a step; None where they are not known.
        on_gpu: the device works on while the script runs: only what makes steps longer counts.

    Example:
        >>> values = {"samples_per_second": {"synthetic": 1000.0, "real": 1000.0}, "batch": 10,
        ...     "executor": "threads", "refused": None, "healthy": True, "cause": None,
        ...     "prescriptions": []}
        >>> cost = {"before_seconds": 0.0, "after_seconds": 0.01, "period_seconds": 0.02}
        >>> answer = judge_script_loop(values, [cost])
        >>> answer["healthy"], answer["cause"]
        (False, {'stage': 'script', 'points': 50.0, 'of': 'loop'})
    """
    known = [c for c in costs if c is not None]
    rates = values["samples_per_second"]
    if not known or not rates["real"]:
        return {**values, "script_loop": None}
    worst = max(known, key=lambda c: float(c["before_seconds"] + c["after_seconds"]))
    before, after = worst["before_seconds"], worst["after_seconds"]
    step, real = values["batch"] / rates["synthetic"], values["batch"] / rates["real"]
    if on_gpu and before + after > 0:
        longer = max(0.0, worst["period_seconds"] - (1 + values["noise"]) * real)
        share = min(1.0, longer / (before + after))
        before, after = share * before, share * after
    # Loaders work on while the script does. Without them, all times add up.
    whole = before + after + (real if values["executor"] == "none" else step)
    points = 100 * step * (1 / real - 1 / max(real, whole))
    loop = {
        "before_seconds": before,
        "after_seconds": after,
        "step_seconds": worst["period_seconds"],
        "points": points,
    }
    answer = {**values, "script_loop": loop}
    # less is not worth a word
    if points <= 5.0 or values["refused"]:
        return answer
    cause = values["cause"]
    if cause is None or cause["points"] < points:
        answer["cause"] = {"stage": "script", "points": points, "of": "loop"}
    answer["healthy"] = False
    row = {
        "id": "script-loop",
        "text": f"shorten the loop around the step ({1e3 * before:.1f} ms before it, "
        f"{1e3 * after:.1f} ms after it): read values and log every 50 steps, write files in a "
        "thread",
        "settings": None,
        "label": "same bits",
        "gap_here": None,
        "gap_largest": None,
        "gain_here_points": points,
        "tried": False,
    }
    first = answer["cause"]["stage"] == "script"
    rows = [row, *values["prescriptions"]] if first else [*values["prescriptions"], row]
    answer["prescriptions"] = [{**r, "number": i} for i, r in enumerate(rows, 1)]
    return answer
