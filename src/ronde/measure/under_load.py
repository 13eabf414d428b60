"""Time layers and the optimizer while all workers compute."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ronde.measure.cost_lines import line, scale_cost
from ronde.measure.model_units import ModelUnit
from ronde.measure.stand_in import untouched
from ronde.measure.time_units import autocast_of
from ronde.measure.timed_model import Rounds, TimedModel
from ronde.parallel import Work
from ronde.plan import Plan
from ronde.predict import Costs, LinearCost

_ROUNDS, _SECONDS = 7, 8.0  # cloud hosts have fast and slow seconds: measure through several
_LEAST_FACTOR = 0.5  # below it, the times of one worker alone were disturbed


class _Round(NamedTuple):
    """Seconds of one worker: a whole pass of each size; a pass of the smallest that adds to
    existing gradients; a pass of the largest while the others wait (rank 0); each unit's forward
    and backward.
    """

    passes: list[float]
    accumulating: float
    alone: float
    units: list[float]


class _Workers:
    """Reductions of times over all workers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _reduce(self, values: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return [float(v) for v in tensor]

    def least(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MIN)

    def slowest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def usual(self, rounds: list[float]) -> float:
        """Median over rounds of the slowest worker's time."""
        return statistics.median(self.slowest(rounds))

    def mean(self, rounds: list[float]) -> float:
        """Median over rounds of the mean time."""
        sums = self._reduce(rounds, dist.ReduceOp.SUM)
        return statistics.median(sums) / dist.get_world_size()


def under_load(costs: Costs, work: Work, plan: Plan, calls: Any) -> Costs:
    """The costs while all workers compute, each round as long as its slowest worker.

    The least of many rounds comes from a moment when other workers rest. Cores that share memory
    bandwidth, or are hyperthreads of one core, are slower when all are busy.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not costs.measured_samples:
        return costs
    model = work.model
    device = next(p.device for p in model.parameters())
    workers = _Workers(device)
    own = sorted(costs.measured_samples)
    # A slower worker may have had time for smaller sizes only.
    sizes = sorted({int(n) for n in workers.least([own[0], own[len(own) // 2], own[-1]])})
    chain = [ModelUnit(u.name, u.alike) for u in costs.units]
    batches = [work.sample(n) for n in sizes]
    autocast, clips = autocast_of(device, plan.precision), plan.clip_norm is not None
    start = time.perf_counter()

    def finished(rounds: int) -> bool:
        spent = workers.slowest([time.perf_counter() - start])[0]  # all stop in the same round
        return rounds >= _ROUNDS and (device.type != "cpu" or spent >= _SECONDS)

    with untouched(model), contextlib.ExitStack() as stack:
        model.train()
        timed = TimedModel(
            stack, model, work.optimizer, calls, chain, device, autocast, clips=clips
        )
        rounds, updates = _measure_rounds(timed, batches, finished)
    return _loaded_costs(costs, workers, sizes, rounds, updates)


def _measure_rounds(
    timed: TimedModel, batches: list[Any], finished: Callable[[int], bool]
) -> tuple[list[_Round], Rounds]:
    """Passes and optimizer steps in turn, with a barrier before each; without the first round."""

    def seconds(batch: Any, accumulate: bool = False) -> float:
        dist.barrier()
        return sum(timed.whole(batch, accumulate))

    updates = Rounds({}, {})
    rounds: list[_Round] = []
    for done in itertools.count():
        passes = [seconds(batch) for batch in batches]
        seconds(batches[0])
        accumulating = seconds(batches[0], True)
        dist.barrier()
        if timed.optimizer is not None:
            timed.update(updates)
        dist.barrier()
        alone = sum(timed.whole(batches[-1])) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        units = [
            seconds_
            for t in timed.by_unit(batches[-1])
            for seconds_ in (sum(t.own) + sum(t.glue), sum(t.backward))
        ]
        rounds.append(_Round(passes, accumulating, alone, units))
        if done and finished(done):
            return rounds[1:], updates
    raise AssertionError


def _loaded_costs(
    costs: Costs, workers: _Workers, sizes: list[int], rounds: list[_Round], updates: Rounds
) -> Costs:
    passes = [workers.usual([r.passes[k] for r in rounds]) for k in range(len(sizes))]
    stepped = workers.least([len(updates.optimizer)])[0] == len(rounds)
    # Workers do not wait for each other in the optimizer's step.
    update, clip = (
        workers.mean([sum(reading) for reading in readings]) if stepped and readings else 0.0
        for readings in (updates.optimizer, updates.clip)
    )
    # If workers wait for each other at every layer, each layer takes as long as its slowest worker.
    together = workers.usual([sum(r.units) for r in rounds])
    slowest = workers.slowest([seconds for r in rounds for seconds in r.units])
    units = len(rounds[0].units)
    layers = [sum(slowest[i * units : (i + 1) * units]) for i in range(len(rounds))]
    alone = [
        sum(u.forward_seconds.at(n) + u.backward_seconds.at(n) for u in costs.units) for n in sizes
    ]
    factors = [max(_LEAST_FACTOR, p / a) for p, a in zip(passes, alone, strict=True)]
    factor = max(1.0, statistics.median(factors))
    accumulate = workers.usual([r.accumulating for r in rounds]) - passes[0]
    # Rank 0 compares rounds of its own, because the earlier times are the least of many.
    own_alone = statistics.median(r.alone for r in rounds)
    contention = torch.tensor(
        statistics.median(r.passes[-1] for r in rounds) / own_alone if own_alone else 1.0,
        dtype=torch.float64,
        device=workers.device,
    )
    dist.broadcast(contention, 0)
    note = f"layers take × {factor:.2f} while all workers compute"
    optimizer_seconds = max(costs.optimizer_seconds, update)
    clip_seconds = max(costs.clip_seconds, clip)
    return replace(
        costs,
        units=tuple(
            replace(
                u,
                forward_seconds=_refit(u.forward_seconds, sizes, factors),
                backward_seconds=_refit(u.backward_seconds, sizes, factors),
            )
            for u in costs.units
        ),
        optimizer_seconds=optimizer_seconds,
        optimizer_fixed_seconds=min(optimizer_seconds, costs.optimizer_fixed_seconds * factor),
        clip_seconds=clip_seconds,
        clip_fixed_seconds=min(clip_seconds, costs.clip_fixed_seconds * factor),
        lockstep=max(1.0, statistics.median(layers) / together),
        contention=max(1.0, float(contention)),
        accumulate_seconds=max(0.0, accumulate),
        again_seconds={
            level: _refit(cost, sizes, factors) for level, cost in costs.again_seconds.items()
        },
        action_seconds=costs.action_seconds * factor,
        split_seconds=scale_cost(costs.split_seconds, factor),
        notes=(*costs.notes, note) if factor > 1.0 else costs.notes,
    )


def _refit(cost: LinearCost, sizes: list[int], factors: list[float]) -> LinearCost:
    """A cost that grows by a factor at each size."""
    if len(sizes) == 1:
        return scale_cost(cost, factors[0])
    return line([(n, cost.at(n) * factor) for n, factor in zip(sizes, factors, strict=True)])
