"""Simulate a pipeline step event by event: each worker runs its list and waits for its inputs.

A forward waits for the previous stage, a backward for the next, plus the send time between
different workers. Sends overlap with computation, one at a time per directed link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ronde.plan.plan import Schedule
from ronde.plan.schedules import actions


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one micro-batch on each stage.

    Attributes:
        forward, backward: passes.
        send: from the stage to the next.
        send_back: from the stage to the one before.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: tuple[float, ...]
    send_back: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: until the last worker is done.
        busy: seconds that each worker computes.
        done: when each worker is done.
        in_flight: most micro-batches whose activations each stage held at once.
    """

    seconds: float
    busy: tuple[float, ...]
    done: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the step each worker waits."""
        return tuple(1.0 - b / self.seconds if self.seconds else 0.0 for b in self.busy)

    @property
    def mean_bubble(self) -> float:
        """Mean over workers."""
        return sum(self.bubble) / len(self.bubble)


def run_step(
    schedule: Schedule,
    workers: int,
    virtual: int,
    micro_batches: int,
    times: Times,
    *,
    overhead_seconds: float = 0.0,
) -> Timeline:
    """Simulate one step of a schedule.

    Args:
        schedule, workers, virtual, micro_batches: as :func:`ronde.plan.schedules.actions` has them.
        times: of each stage.
        overhead_seconds: what the runtime adds to each action.

    Raises:
        ArgumentError: the schedule does not allow these numbers.
    """
    work = actions(schedule, workers, virtual, micro_batches)
    stages = len(times.forward)
    cost = {"F": times.forward, "B": times.backward}
    owner = [0] * stages
    for worker, row in enumerate(work):
        for stage, _, _ in row:
            owner[stage] = worker
    # (stage, forward?, micro-batch) -> when its input is there
    ready: dict[tuple[int, bool, int], float] = {}
    link: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(work)
    busy = [0.0] * len(work)
    at = [0] * len(work)
    held = [0] * stages
    most = [0] * stages
    waiting: dict[tuple[int, bool, int], int] = {}
    awake = deque(range(len(work)))
    last = stages - 1
    while awake:
        worker = awake.popleft()
        row = work[worker]
        now = clock[worker]
        k = at[worker]
        while k < len(row):
            stage, kind, micro = row[k]
            start = now
            if kind == "F":
                if stage:
                    key = (stage, True, micro)
                    there = ready.get(key)
                    if there is None:
                        waiting[key] = worker
                        break
                    start = max(now, there)
                held[stage] += 1
                if held[stage] > most[stage]:
                    most[stage] = held[stage]
            elif stage != last:
                key = (stage, False, micro)
                there = ready.get(key)
                if there is None:
                    waiting[key] = worker
                    break
                start = max(now, there)
            if kind == "B":
                held[stage] -= 1
            seconds = cost[kind][stage] + overhead_seconds
            now = start + seconds
            busy[worker] += now - start
            k += 1
            forward = kind == "F"
            to = stage + 1 if forward else stage - 1
            if not 0 <= to <= last:
                continue
            there = now
            if owner[to] != worker:
                seconds = times.send[stage] if forward else times.send_back[stage]
                if seconds:
                    wire = (worker, owner[to])
                    there = link[wire] = max(now, link.get(wire, 0.0)) + seconds
            key = (to, forward, micro)
            ready[key] = there
            if key in waiting:
                awake.append(waiting.pop(key))
        clock[worker] = now
        at[worker] = k
    assert at == [len(row) for row in work], "a schedule's lists wait for each other"
    return Timeline(max(clock), tuple(busy), tuple(clock), tuple(most))
