"""From the arguments of ``distribute`` to a Plan: the split, a growing batch, accumulation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ronde.plan import Plan, split
from ronde.plan.schedules import micro_batches_of
from ronde.run import lr_rules
from ronde.world import ArgumentError, World

__all__ = ["accumulate", "asked_plan", "grow", "micro_batch_sizes"]


def asked_plan(plan: str | Plan | os.PathLike[str], me: World, given: Mapping[str, Any]) -> Plan:
    """How the work is split, from ``ronde run --plan``, the argument, and the arguments that name
    one field each.
    """
    asked = os.environ.get("RONDE_PLAN") or plan
    if asked == "auto":
        asked = Plan()
    file = (
        Path(asked)
        if isinstance(asked, os.PathLike)
        else Plan.file_of(asked)
        if isinstance(asked, str)
        else None
    )
    if file is not None:
        if not file.is_file():
            raise ArgumentError(f"plan={str(file)!r}: there is no such file (in {Path.cwd()}).")
        asked = Plan.load(file)
        if asked.workers not in (1, me.size):
            raise ArgumentError(
                f"the plan in {file} is for {asked.workers} workers, here are {me.size}."
            )
    elif not isinstance(asked, Plan):
        if not isinstance(asked, str):
            raise ArgumentError(
                f"plan must be a text, a file or a ronde.Plan; found {type(asked).__name__}."
            )
        asked = Plan.parse(asked)
    fields: dict[str, Any] = {
        k: tuple(v) if k == "split_at" else v for k, v in given.items() if v is not None
    }
    if fields and not os.environ.get("RONDE_PLAN"):
        asked = dataclasses.replace(asked, **fields)
    if asked.schedule in ("interleaved", "looped", "zbv") and asked.virtual == 1:
        asked = dataclasses.replace(asked, virtual=2)
    asked = dataclasses.replace(asked, workers=me.size)
    asked.check()
    asked.check_workers(me.size)
    return asked


def grow(
    plan: Plan,
    optimizer: Optimizer,
    scheduler: Any,
    rule: str | None,
    warmup: int | None,
    samples: int,
) -> Plan:
    """``batch="grow"``: the global batch times the workers, and the learning rate after it."""
    chosen = lr_rules.choose_rule(optimizer, rule)
    factor = lr_rules.lr_factor(chosen, plan.workers)
    size = plan.batch_size * plan.workers
    steps = (5 * -(-samples // size)) if warmup is None else warmup
    lr_rules.scale_rates(optimizer, scheduler, factor)
    values = {
        **plan.to_dict(),
        "batch_size": size,
        "lr_rule": chosen,
        "lr_factor": factor,
        "warmup_steps": steps if factor > 1 else 0,
    }
    return Plan.from_dict(values)


def accumulate(plan: Plan) -> Plan:
    """With the number of micro-batches that a step has."""
    largest = split(0, plan.batch_size, plan.replicas)[0][1]
    count = micro_batches_of(plan, largest)
    return dataclasses.replace(
        plan,
        accumulation=count,
        micro_batch=-(-largest // count) if plan.pipeline > 1 else plan.micro_batch,
    )


def micro_batch_sizes(plan: Plan, epoch_samples: int) -> tuple[int, ...]:
    """Samples of the micro-batches that occur in an epoch, on any worker; the stand-in of an empty
    one has one.
    """
    found = set()
    for total in {
        min(plan.batch_size, epoch_samples),
        epoch_samples % plan.batch_size or plan.batch_size,
    }:
        for low, high in split(0, total, plan.replicas):
            found |= {max(1, b - a) for a, b in split(low, high, plan.accumulation)}
    return tuple(sorted(found))
