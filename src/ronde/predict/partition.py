"""Cut a chain of units into pipeline stages: exact dynamic programming over allowed cut positions.

``best[s][j] = min over i of max(best[s-1][i], cost of stage s with units i to j)``: the slowest
stage sets a pipeline's speed (PipeDream, Narayanan et al. 2019). A stage's cost weighs time against
memory, each as a share of its total, as in SageMaker's model-parallel library: memory weighs 0.2
for ``"speed"`` and 0.8 for ``"memory"``. Ties go to the cut with the most even stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ronde.plan.plan import Schedule
from ronde.plan.schedules import in_flight, worker_of
from ronde.predict.costs import Array, Costs
from ronde.predict.unit_arrays import Chain, chain
from ronde.world import ArgumentError

ALPHA = {"speed": 0.2, "memory": 0.8}
"""Weight of memory against time in a stage's cost."""

Seconds = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class HeldShare:
    """Fraction of its stage's states that a worker holds; 1 without sharding."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into stages.

    Attributes:
        bounds: first unit of each stage, and the number of units at the end.
        cost: of the worst stage, as the programme weighs it (shares of time and of memory).
        seconds: of one micro-batch on the slowest worker, without sends.
    """

    bounds: tuple[int, ...]
    cost: float
    seconds: float

    def names(self, costs: Costs) -> list[str]:
        """First units of all stages but the first: the values of ``split_at``."""
        return [costs.units[b].name for b in self.bounds[1:-1]]


def cut(
    costs: Costs,
    workers: int,
    *,
    virtual: int = 1,
    schedule: Schedule = "1f1b",
    optimize: Literal["speed", "memory"] = "speed",
    micro_samples: float = 1.0,
    micro_batches: int | None = None,
    held: HeldShare = HeldShare(),
    send_seconds: Seconds | None = None,
) -> Cut:
    """Cut a model into ``workers * virtual`` stages.

    Args:
        costs: of its units, measured or estimated.
        workers: of the pipeline.
        virtual: stages per worker.
        schedule: decides which worker holds which stage, and how many micro-batches each holds at
            once.
        optimize: whether time or memory is evened out.
        micro_samples: samples of one micro-batch.
        micro_batches: per step; None for many.
        held: part of its states that a worker holds.
        send_seconds: bytes -> seconds from one stage to the next; None for nothing.

    Raises:
        ArgumentError: there are fewer places to cut than stages.
    """
    made = chain(costs, micro_samples)
    best = cut_chain(
        made,
        workers,
        virtual=virtual,
        schedule=schedule,
        optimize=optimize,
        micro_batches=micro_batches,
        held=held,
        send_seconds=send_seconds,
    )
    if best is not None:
        return best
    reasons = [u for u in costs.units[:-1] if not u.cut_after and u.why_not]
    why = f" ({reasons[0].name}: {reasons[0].why_not})" if reasons else ""
    raise ArgumentError(
        f"pipeline: {workers * virtual} stages were asked for, and the model can be cut into "
        f"{len(made.cuts) + 1} at most{why}. "
        "Ask for fewer stages, or name the places with split_at."
    )


def cut_chain(
    made: Chain,
    workers: int,
    *,
    virtual: int = 1,
    schedule: Schedule = "1f1b",
    optimize: Literal["speed", "memory"] = "speed",
    micro_batches: int | None = None,
    held: HeldShare = HeldShare(),
    send_seconds: Seconds | None = None,
) -> Cut | None:
    """Like :func:`cut`, for an existing chain; None if there is no cut."""
    many = micro_batches if micro_batches is not None else 4 * workers
    flights = in_flight(schedule, workers, virtual, many)
    if len(made.cuts) + 1 < len(flights):
        return None
    # Matrices over the allowed places alone: their square, not the units', is what takes time.
    places = np.array([0, *made.cuts, len(made)])
    tables = _Sums(made, places, held, send_seconds, micro_batches or workers)
    chosen, cost = _solve(tables, flights, ALPHA[optimize])
    bounds = tuple(int(places[i]) for i in chosen)
    each = np.add.reduceat(made.seconds, bounds[:-1])
    on = [worker_of(s, workers) for s in range(len(flights))]
    return Cut(bounds, cost, float(np.bincount(on, weights=each).max()))


def cut_at(
    costs: Costs,
    names: Sequence[str],
    count: int,
) -> tuple[int, ...]:
    """The bounds of ``count`` stages that a user names; each name is a module that starts one.

    Raises:
        ArgumentError: a name is not in the model or cannot begin a stage, or there is not one fewer
            than stages.
    """
    made = chain(costs, 1.0)
    if len(names) != count - 1:
        raise ArgumentError(
            f"split_at names {len(names)} modules ({', '.join(names)}); {count} stages "
            f"need {count - 1}, each the first of its stage."
        )
    bounds = [0]
    for name in names:
        units = [u.name for u in costs.units]
        inside = [i for i, u in enumerate(units) if u == name or u.startswith(f"{name}.")]
        if not inside:
            raise ArgumentError(
                f"split_at: the model's chain has no {name!r}. It has {_few(units)}."
            )
        at = inside[0]
        if at not in made.cuts:
            before = costs.units[at - 1] if at else None
            reason = f": {before.why_not}" if before is not None and before.why_not else ""
            raise ArgumentError(f"split_at: no stage can begin with {name!r}{reason}.")
        if at <= bounds[-1]:
            raise ArgumentError(
                f"split_at: {name!r} does not come after the module named before it, in "
                "the order in which they run."
            )
        bounds.append(at)
    return (*bounds, len(made))


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else ", ".join([*names[:6], "…", *names[-5:]])


class _Sums:
    """Prefix sums over allowed cut positions, and a stage's cost matrix from them."""

    def __init__(
        self,
        made: Chain,
        places: Array,
        held: HeldShare,
        send_seconds: Seconds | None,
        micro_batches: int,
    ) -> None:
        def sums(values: Array) -> Array:
            running: Array = np.concatenate([[0.0], np.cumsum(values)])
            return np.asarray(running[places], dtype=float)

        self.places = places
        self.time = sums(made.seconds)
        self.states = sums(
            made.parameters * held.parameters
            + made.trainable * held.gradients
            + made.optimizer * held.optimizer
            + made.buffers
        )
        self.saved = sums(made.saved)
        forth, back = np.zeros(len(places)), np.zeros(len(places))
        if send_seconds is not None:
            for k, place in enumerate(places[1:-1], 1):
                forth[k] = send_seconds(float(made.crossing[place - 1]))
                back[k] = send_seconds(float(made.crossing_grad[place - 1]))

        def between(values: Array) -> Array:
            return np.asarray(values[None, :] - values[:, None], dtype=float)

        # from a place (row) to another (column)
        self.seconds = between(self.time) + forth[None, :] + back[:, None]
        self.held_states, self.kept = between(self.states), between(self.saved)
        for tie in made.ties:
            owners = np.zeros(len(made))
            owners[list(tie.units)] = 1.0
            seconds = 0.0
            if send_seconds is not None:
                seconds = 2.0 * send_seconds(tie.trainable_bytes) / micro_batches
            copy = (
                tie.parameter_bytes * held.parameters
                + tie.trainable_bytes * held.gradients
                + tie.optimizer_bytes * held.optimizer
            )
            inside, first = between(sums(owners)), tie.units[0]
            shared = (inside > 0) & (inside < len(tie.units))
            lacks = (places[:, None] > first) | (places[None, :] <= first)
            self.seconds += seconds * shared
            self.held_states += copy * (shared & lacks)
        self.seconds[np.tri(len(places), dtype=bool)] = np.inf  # where no stage may be

    def costs(self, alpha: float, flight: int) -> Array:
        """Cost of a stage from ``i`` (row) to ``j`` (column); infinite if not allowed."""
        total = float(self.states[-1] + flight * self.saved[-1]) or 1.0
        share: Array = (alpha * flight / total) * self.kept
        share += (alpha / total) * self.held_states
        # never 0: where no stage may be it is infinite
        share += max(1.0 - alpha, 1e-12) / (float(self.time[-1]) or 1.0) * self.seconds
        return share


def _solve(tables: _Sums, flights: tuple[int, ...], alpha: float) -> tuple[list[int], float]:
    """The best cut and its worst stage's cost."""
    start = np.full(len(tables.places), np.inf)
    start[0] = 0.0
    worst = total = start
    for flight in flights:
        worst = np.maximum(worst[:, None], tables.costs(alpha, flight)).min(axis=0)
    bound = float(worst[-1])
    # Again, among the cuts that are as good: the least sum of squares, so that the other stages are
    # even too.
    origins = []
    for flight in flights:
        share = tables.costs(alpha, flight)
        share[share > bound * (1.0 + 1e-9) + 1e-300] = np.inf
        sums = total[:, None] + share * share
        origins.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    chosen = [len(start) - 1]
    for origin in reversed(origins):
        chosen.append(int(origin[chosen[-1]]))
    return chosen[::-1], bound
