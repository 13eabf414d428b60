"""Find what tensor parallelism divides in a model, and measure one worker's part.

Time and memory of that part are measured in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ronde.measure.memory_account import account
from ronde.measure.model_units import ModelUnit
from ronde.measure.stand_in import untouched
from ronde.measure.time_units import autocast_of
from ronde.measure.timed_model import TimedModel
from ronde.parallel import Work
from ronde.parallel.tensor_blocks import recognise
from ronde.parallel.tensor_layers import Block, split_dims
from ronde.parallel.tensor_parallel import one_part
from ronde.predict import Costs, LinearCost

__all__ = ["divisible"]

_ROUNDS = 6


def divisible(
    costs: Costs, work: Work, calls: Any = None, precision: Literal["fp32", "bf16", "fp16"] = "fp32"
) -> Costs:
    """The costs with what tensor parallelism could divide of each unit, as far as it is recognised.

    Args:
        calls: the script's forward and loss, a LossCall: with it one worker's part is timed and
            weighed; None goes by parameters.
    """
    try:
        batch = work.sample(2)
        found = recognise(work.model, lambda: work.compute(batch)[0], 2)
    except Exception:
        return costs  # a model that cannot be looked at so is not split so
    if not found.blocks:
        return costs
    sizes = {name: p.numel() for name, p in work.model.named_parameters()}
    whole = [sum(n for name, n in sizes.items() if _in(name, unit.name)) for unit in costs.units]

    def unit_of(name: str) -> int:
        return max(
            (i for i, u in enumerate(costs.units) if _in(name, u.name)),
            key=lambda i: len(costs.units[i].name),
            default=-1,
        )

    divided, reduced = [0] * len(costs.units), [0.0] * len(costs.units)
    between: set[int] = set()
    seen: set[str] = set()
    for b in found.blocks:
        places = []
        for name in split_dims(work.model, b)[0]:
            at = unit_of(name)
            if name not in seen and at >= 0:
                seen.add(name)
                divided[at] += sizes.get(name, 0)
            places.append(at)
        end = unit_of(f"{b.row}.weight")
        reduced[end] += b.reduced_bytes / 2  # what is summed is summed at the block's end
        between.update(range(min(places, default=end) + 1, end))
    units = []
    for i, unit in enumerate(costs.units):
        # A unit between a block's columns and its row that has no parameters works on what is
        # divided.
        share = divided[i] / whole[i] if whole[i] else float(i in between)
        units.append(
            dataclasses.replace(
                unit, tensor=min(1.0, share), tensor_reduce_bytes=LinearCost(0.0, reduced[i])
            )
        )
    heads = [n for b in found.blocks for n in (b.heads, b.kv_heads) if n]
    costs = dataclasses.replace(
        costs,
        units=tuple(units),
        tensor_divides=math.gcd(*heads) if heads else costs.tensor_divides,
    )
    if calls is None or not costs.measured_samples:
        return costs
    try:
        return _tried(costs, work, calls, precision, found.blocks)
    except Exception as error:
        return dataclasses.replace(
            costs,
            notes=(
                *costs.notes,
                "one worker's part under tensor parallelism could not be tried "
                f"({type(error).__name__}: {error})",
            ),
        )


def _in(name: str, unit: str) -> bool:
    return name.startswith(f"{unit}.") if unit else False


def _tried(costs: Costs, work: Work, calls: Any, precision: str, blocks: Sequence[Block]) -> Costs:
    """The costs with the time and the memory of half of what is divided."""
    model = work.model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    autocast = autocast_of(device, precision)
    chain = [ModelUnit(u.name, u.alike) for u in costs.units]
    sizes = sorted({costs.measured_samples[0], costs.measured_samples[-1]})
    part = account(
        model,
        calls,
        work.sample,
        sizes,
        autocast=autocast,
        chain=chain,
        within=lambda m: one_part(m, blocks, 2),
    )
    saved, forward, backward = (
        part.lines(kind) for kind in ("saved", "forward_transient", "backward_transient")
    )
    # Half of what is divided is gone: by how much a pass is shorter says how much of its time is.
    batch = work.sample(sizes[-1])
    halves = []
    with untouched(model), contextlib.ExitStack() as stack:
        model.train()
        subject = TimedModel(stack, model, work.optimizer, calls, chain, device, autocast)
        for _ in range(_ROUNDS + 1):
            whole = sum(subject.whole(batch))
            with one_part(subject.model, blocks, 2):
                halves.append(sum(subject.whole(batch)) / whole)
    divided = 2.0 * (1.0 - min(1.0, statistics.median(halves[1:])))
    seconds = [
        u.forward_seconds.at(sizes[-1]) + u.backward_seconds.at(sizes[-1]) for u in costs.units
    ]
    assumed = sum(u.tensor * s for u, s in zip(costs.units, seconds, strict=True)) / max(
        1e-12, sum(seconds)
    )
    factor = divided / assumed if assumed else 0.0
    units = tuple(
        dataclasses.replace(
            u,
            tensor_time=min(1.0, u.tensor * factor),
            tensor_saved_bytes=saved[i],
            tensor_forward_bytes=forward[i],
            tensor_backward_bytes=backward[i],
        )
        for i, u in enumerate(costs.units)
    )
    return dataclasses.replace(costs, units=units, tensor_measured=True)
