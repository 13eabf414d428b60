"""Time the script's own code in its loop over batches, after the examination."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ronde.doctor.script_time import ScriptTime, timing_event
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.run.callback import StepView
    from ronde.run.step_port import RunView

_POINTS = 5.0  # less is not worth a word
_LIMIT_SECONDS = 30  # for the script to reach its loop and to take some steps
_FIRST, _USUAL, _MOST = 12, 24, 60  # steps
_SECONDS = 3.0
_LONGER = 12.0  # seconds, to see a rare cost again, or the usual number of steps
_MISSING = "the script's own loop was not timed: it needs 12 steps in its first epoch, within 30 s."


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
        run: RunView,
        clock: ScriptTime,
        values: dict[str, Any],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.values = values
        self.write = write
        self.steps = 0
        self.most = _MOST
        self.start = 0.0
        self.is_longer = False
        self.clock = clock
        clock.event, clock.measurable = timing_event(run.device)
        write({**values, "notes": [*values["notes"], _MISSING]})
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(_LIMIT_SECONDS)

    def step_ended(self, step: StepView) -> None:
        """A step of the script has ended on every rank."""
        run = step.parts
        self.steps += 1
        if self.steps == 1:
            self.start = time.monotonic()
        elif self.steps == _FIRST:
            each = max((time.monotonic() - self.start) / (_FIRST - 1), 1e-4)
            wanted = max(_FIRST + int(_SECONDS / each), min(_USUAL, int(_LONGER / each)))
            self.most = min(_MOST, int(broadcast_json(run.world, wanted)))
        elif self.steps == self.most and not self.is_longer:
            self.is_longer, each = True, (time.monotonic() - self.start) / (self.steps - 1)
            wanted = min(self.clock.wanted_steps(), self.steps + int(_LONGER / each))
            self.most = max(self.most, int(broadcast_json(run.world, wanted)))
        last = step.share.stop + run.plan.batch_size > run.data.order.epoch_samples
        if self.steps < self.most and not last:
            return  # what follows the epoch's last step may save or evaluate
        signal.alarm(0)
        values = judge_script_loop(self.values, gather_json(run.world, self.clock.cost()))
        if values["script_loop"] is None:
            values["notes"] = [*values["notes"], _MISSING]
        self.write(values)
        raise SystemExit(0)


def _give_up(*_: Any) -> None:
    raise SystemExit(0)


def judge_script_loop(
    values: Mapping[str, Any], costs: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Add ``script_loop`` to the doctor's answer; above 5 points it is unhealthy and prescribed.

    Args:
        values: the doctor's answer.
        costs: of each rank: seconds of a step; None where they are not known.

    Example:
        >>> values = {"samples_per_second": {"synthetic": 1000.0, "real": 1000.0}, "batch": 10,
        ...     "executor": "threads", "refused": None, "healthy": True, "cause": None,
        ...     "prescriptions": []}
        >>> cost = {"before_seconds": 0.0, "after_seconds": 0.01, "period_seconds": 0.02}
        >>> answer = judge_script_loop(values, [cost])
        >>> answer["healthy"], answer["cause"]
        (False, {'stage': 'script', 'points': 50.0, 'of': 'loop'})
    """
    found = [c for c in costs if c is not None]
    rates = values["samples_per_second"]
    if not found or not rates["real"]:
        return {**values, "script_loop": None}
    worst = max(found, key=lambda c: float(c["before_seconds"] + c["after_seconds"]))
    before, after = worst["before_seconds"], worst["after_seconds"]
    step, real = values["batch"] / rates["synthetic"], values["batch"] / rates["real"]
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
    if points <= _POINTS or values["refused"]:
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
