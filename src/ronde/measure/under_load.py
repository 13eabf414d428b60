"""Time steps while all workers compute: cores that share caches and memory are slower then."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ronde.measure.cost_lines import scale_cost
from ronde.measure.model_units import ModelUnit
from ronde.measure.stand_in import untouched
from ronde.measure.time_units import autocast_of
from ronde.measure.timed_model import TimedModel
from ronde.parallel import Work
from ronde.plan import Plan
from ronde.predict import Costs

_ROUNDS = 7


def under_load(costs: Costs, work: Work, plan: Plan, calls: Any) -> Costs:
    """The costs while all workers compute, each step as long as its slowest worker. A collective.

    Units are timed by the least of many rounds, which comes from a moment when others rest.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not costs.measured_samples:
        return costs
    model = work.model
    device = next(p.device for p in model.parameters())
    sizes = sorted(costs.measured_samples)
    middle = torch.tensor(sizes[len(sizes) // 2], device=device)
    dist.broadcast(middle, 0)
    samples = int(middle)
    batch = work.sample(samples)
    chain = [ModelUnit(u.name, u.alike) for u in costs.units]
    autocast = autocast_of(device, plan.precision)
    steps = []
    with untouched(model), contextlib.ExitStack() as stack:
        model.train()
        timed = TimedModel(stack, model, work.optimizer, calls, chain, device, autocast)
        for _ in range(_ROUNDS + 1):
            dist.barrier()
            steps.append(sum(timed.whole(batch)))
    slowest = torch.tensor(steps[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    alone = sum(u.forward_seconds.at(samples) + u.backward_seconds.at(samples) for u in costs.units)
    factor = max(1.0, statistics.median(slowest.tolist()) / alone)
    if factor == 1.0:
        return costs
    return replace(
        costs,
        units=tuple(
            replace(
                u,
                forward_seconds=scale_cost(u.forward_seconds, factor),
                backward_seconds=scale_cost(u.backward_seconds, factor),
            )
            for u in costs.units
        ),
        accumulate_seconds=costs.accumulate_seconds * factor,
        again_seconds={level: scale_cost(c, factor) for level, c in costs.again_seconds.items()},
        contention=factor,
        notes=(*costs.notes, f"layers take × {factor:.2f} while all workers compute"),
    )
