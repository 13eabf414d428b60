"""Time the forward and backward pass of every unit of a model, at its real shapes.

Whole steps of a copy of the script's model run at two or three micro-batch sizes in turn. A clock
is read at each boundary between units, so the parts add up to the step. The fastest round counts:
other programs only make a round longer.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.measure.cost_lines import line
from ronde.measure.memory_account import weigh
from ronde.measure.model_units import ModelUnit
from ronde.measure.stand_in import untouched
from ronde.measure.timed_model import Rounds, TimedModel
from ronde.parallel.batchnorm import normalizes_batch
from ronde.predict import Costs, Unit
from ronde.world import ArgumentError, usable_cores
from ronde.world.tensors import tensors_in

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def device_name(device: torch.device) -> str:
    """A readable name, such as ``"cpu: AMD EPYC 7B13 (2 cores)"``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = os.uname().machine
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (t.partition(":")[2].strip() for t in lines if t.startswith("model name"))
        name = next(models, "") or name
    cores = usable_cores()
    return f"{device.type}: {name} ({cores} core{'s' if cores != 1 else ''})"


def autocast_of(device: torch.device, precision: str) -> Callable[[], Any]:
    """The context of a forward pass at ``precision``, as in ``ronde.distribute``."""
    if precision not in _DTYPES:
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, _DTYPES[precision])


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Callable[[int], Any],
    batch_size: int,
    *,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    seconds: float = 8.0,
    threads: int | None = None,
    clips: bool = False,
    timed: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Costs:
    """Measure the costs of a script's model, unit by unit. The model, its gradients, buffers,
    flags, the optimizer and all random states stay as they are.

    Args:
        compute: forward and loss, a :class:`ronde.run.losses.LossCall`.
        batches: makes a micro-batch of so many samples, on the model's device.
        batch_size: global samples per optimizer step.
        seconds: about how long to measure.
        threads: compute threads that a worker will have; None leaves them alone.
        clips: whether gradients are clipped before the optimizer's step.
        timed: whether it is timed; else its work and memory are counted only.
        tell: shows progress.

    Returns:
        Costs: the units' seconds add up to the whole step; ``noise`` says how far two halves of
            the rounds differ.

    Raises:
        ArgumentError: the model is on the meta device.
    """
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if timed and any(p.is_meta for p in model.parameters()):
        raise ArgumentError(
            "the model's parameters are on the meta device: they have no values, so it cannot be "
            "timed."
        )
    autocast = autocast_of(where, precision)
    tell = tell or (lambda _: None)
    with untouched(model), contextlib.ExitStack() as stack:
        if threads is not None:
            torch.set_num_threads(threads)
        if not model.training:  # train() would also change frozen layers in eval mode
            model.train()
        tell("counting the memory of layers")
        costs = weigh(model, optimizer, compute, batches, batch_size, autocast=autocast)
        least = costs.measured_samples[0]
        sequence = sequence_of(batches(least), least)
        costs = replace(costs, device=device_name(where), sequence=sequence)
        if not timed:
            return costs
        units = [ModelUnit(u.name, u.alike) for u in costs.units]
        copied = TimedModel(stack, model, optimizer, compute, units, where, autocast, clips)
        # Normalization over a batch of one fails.
        norms = any(normalizes_batch(m) for m in model.modules())
        fewest = 2 if norms and batch_size > 1 else 1
        parts = {max(fewest, batch_size // 16), max(fewest, batch_size // 4), batch_size}
        sizes = copied.affordable(sorted(parts), batches, seconds)
        micro = {b: batches(b) for b in sizes}
        tell("timing layers")
        rounds = copied.time_rounds(micro, seconds)
        accumulate_seconds = copied.time_accumulation(micro[sizes[0]])
        again_seconds = {}
        if costs.again and any(u.recomputed for u in costs.units):
            tell("timing recomputation")
            quick = [b for b in sizes[1:] if min(rounds.whole[b]) < seconds / 16]
            ends = {b: micro[b] for b in (sizes[0], *quick[-1:])}
            again_seconds = copied.time_recomputation(costs.again, ends, seconds / 4)
            costs = replace(costs, again=tuple(again_seconds))
        noise = _disturbance(rounds)
        timed_units, fit_error = _fit(costs.units, rounds)
        return replace(
            costs,
            units=timed_units,
            optimizer_seconds=min(rounds.optimizer, default=0.0),
            clip_seconds=min(rounds.clip, default=0.0),
            accumulate_seconds=accumulate_seconds,
            again_seconds=again_seconds,
            threads=torch.get_num_threads(),
            noise=noise,
            measured_samples=tuple(sizes),
            fit_error=fit_error,
            notes=(*costs.notes, *copied.notes),
        )


def _disturbance(rounds: Rounds) -> float:
    """How far two halves of the rounds differ, at the size where they do most."""
    apart = 0.0
    for whole in rounds.whole.values():
        # Every second round, so that a drift is in both halves and other programs are not.
        halves = [min(whole[i::2]) for i in (0, 1)]
        apart = max(apart, max(halves) / min(halves) - 1)
    return apart


def _fit(units: tuple[Unit, ...], rounds: Rounds) -> tuple[tuple[Unit, ...], float]:
    """Fit times over sizes, scaled so that the units add up to the whole step.

    Returns:
        The units with their times, and the mean relative error of whole steps.
    """

    def fastest(kind: str) -> list[list[float]]:
        """Unit -> seconds at each size."""
        return [
            [min(getattr(s[i], kind) for s in steps) for steps in sizes] for i in range(len(units))
        ]

    sizes = list(rounds.units.values())
    own, glue, back = fastest("own"), fastest("glue"), fastest("backward")
    alike: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        alike.setdefault(unit.alike or unit.name, []).append(i)
    for group in alike.values():
        _share(own, group)
        _share(back, group)
    forward = [[o + g for o, g in zip(*pair, strict=True)] for pair in zip(own, glue, strict=True)]
    # Clocks take time of their own: the units are scaled to steps that have none.
    whole = [min(rounds.whole[b]) for b in rounds.units]
    factor = statistics.median(
        seconds / max(1e-12, sum(f[k] + b[k] for f, b in zip(forward, back, strict=True)))
        for k, seconds in enumerate(whole)
    )
    lines = [
        [line(list(zip(rounds.units, seconds, strict=True))).times(factor) for seconds in kind]
        for kind in (forward, back)
    ]
    errors = [
        abs(sum(f.at(b) + g.at(b) for f, g in zip(*lines, strict=True)) / seconds - 1)
        for b, seconds in zip(rounds.units, whole, strict=True)
    ]
    timed = tuple(
        replace(u, forward_seconds=f, backward_seconds=g)
        for u, f, g in zip(units, *lines, strict=True)
    )
    return timed, statistics.mean(errors)


def _share(seconds: list[list[float]], group: list[int]) -> None:
    """Give units of one structure their median time, unless a unit's time differs clearly."""
    for k in range(len(seconds[group[0]])):
        middle = statistics.median(seconds[i][k] for i in group)
        for i in group:
            if abs(seconds[i][k] - middle) <= 0.25 * middle:
                seconds[i][k] = middle


def sequence_of(batch: Any, samples: int) -> int:
    """Length of the sequences in a batch of token numbers; 0 for other data."""
    for t in tensors_in(batch, attributes=True):
        if t.dim() == 2 and len(t) == samples and t.dtype in (torch.int64, torch.int32):
            return int(t.shape[1])
    return 0
