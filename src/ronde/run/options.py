"""The arguments of :func:`ronde.distribute` in groups, and the plan that they make."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ronde.checkpoint import KeepPolicy
from ronde.loader import FeedSettings
from ronde.plan import Plan, split
from ronde.plan.batch import micro_batches_of
from ronde.run.content import split_metric
from ronde.run.hooks import observed
from ronde.world import ArgumentError, World
from ronde.world.consensus import broadcast_json

__all__ = [
    "WATCH_EVERY_STEPS",
    "BatchOptions",
    "RunOptions",
    "SaveOptions",
    "SplitOptions",
    "accumulate",
    "given_settings",
    "asked_plan",
    "grow",
    "micro_batch_sizes",
    "recorded_cut",
    "script_plan",
    "watch_every",
]

WATCH_EVERY_STEPS = 32
"""Steps from one measurement of health to the next, unless the script says otherwise."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def watch_every(asked: bool | int) -> int | None:
    """``watch`` of ``distribute``, or of ``ronde run --watch``, as :attr:`RunOptions.watch`.

    Raises:
        ArgumentError: it is no number of steps.

    Example:
        >>> watch_every(False), watch_every(True), watch_every(16)
        (None, 32, 16)
    """
    every = os.environ.get("RONDE_WATCH") or ("auto" if asked is True else str(asked))
    if every == "False":
        return None
    if every == "auto" or (every.isdecimal() and int(every)):
        return WATCH_EVERY_STEPS if every == "auto" else int(every)
    raise ArgumentError(f"watch={every}: expected True, False, or a number of steps above 0.")


@dataclass(frozen=True)
class BatchOptions:
    """What a global batch is, and how samples come."""

    batch_size: int | None
    batch: Literal["keep", "grow"]
    micro_batch: int | None
    shuffle: bool | None
    drop_last: bool
    seed: int
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None
    lr_rule: Literal["linear", "sqrt", "none"] | None
    warmup_steps: int | None


@dataclass(frozen=True)
class SplitOptions:
    """How the work is split. ``fields`` are those of the plan that were given one by one."""

    plan: str | Plan | os.PathLike[str]
    fields: Mapping[str, Any]
    tensor_plan: Mapping[str, Any] | None
    init: Callable[[Any], None] | str | os.PathLike[str] | None
    randomness: Literal["global", "worker"] | None

    @property
    def auto(self) -> bool:
        """Whether Ronde chooses the plan."""
        return (os.environ.get("RONDE_PLAN") or self.plan) == "auto"


@dataclass(frozen=True)
class SaveOptions:
    """Which checkpoints are written, and where."""

    save_every: int | None
    keep: KeepPolicy
    keep_best: str | None
    patience: int | None
    async_save: bool
    name: str | None
    tensorboard: bool

    @classmethod
    def read(cls, keep: int | str, keep_best: str | None, **others: Any) -> SaveOptions:
        """Check and read ``keep`` and ``keep_best``."""
        policy = KeepPolicy.parse(keep)
        if policy.best is not None and keep_best not in (None, policy.best):
            raise ArgumentError(
                f"keep={keep!r} names another metric than keep_best={keep_best!r}. Give one of "
                "them."
            )
        best = keep_best or policy.best
        if best is not None:
            split_metric(best)
        elif others["patience"] is not None:
            raise ArgumentError(
                f"patience={others['patience']} waits for a better evaluation: name its metric, as "
                "keep_best='accuracy'."
            )
        return cls(keep=policy, keep_best=best, **others)


@dataclass(frozen=True)
class RunOptions:
    """What a run does beside training."""

    check_replicas: int | None
    on_nan: str
    callbacks: Sequence[Any]
    watch: int | None = None
    """Steps between measurements of health; None: no measurements."""

    @property
    def leaves_out(self) -> bool:
        """Whether steps may be left out."""
        return self.on_nan == "skip"


def asked_plan(plan: str | Plan | os.PathLike[str], me: World, fields: Mapping[str, Any]) -> Plan:
    """The split, from ``ronde run --plan``, the argument ``plan``, or single fields."""
    given = os.environ.get("RONDE_PLAN")
    chosen = _read_plan(given, me) if given else script_plan(plan, me, fields)
    if chosen.schedule in ("interleaved", "looped") and chosen.virtual == 1:
        chosen = dataclasses.replace(chosen, virtual=2)
    chosen = dataclasses.replace(chosen, workers=me.size)
    if reducer := os.environ.get("RONDE_REDUCER"):
        chosen = dataclasses.replace(chosen, reducer=reducer)
    chosen.check()
    chosen.check_workers(me.size)
    return chosen


def script_plan(plan: str | Plan | os.PathLike[str], me: World, fields: Mapping[str, Any]) -> Plan:
    """The split of the script's own arguments, whatever ``ronde run --plan`` says."""
    changes: dict[str, Any] = {k: v for k, v in fields.items() if v is not None}
    if "split_at" in changes:
        changes["split_at"] = tuple(changes["split_at"])
    return dataclasses.replace(_read_plan(plan, me), **changes)


def _read_plan(asked: Any, me: World) -> Plan:
    if isinstance(asked, Plan):
        return asked
    if not isinstance(asked, str | os.PathLike):
        kind = type(asked).__name__
        raise ArgumentError(f"plan must be a text, a file, or a ronde.Plan; found {kind}.")
    if asked == "auto":
        return Plan()
    file = Plan.file_of(asked) if isinstance(asked, str) else Path(asked)
    if file is None:
        return Plan.parse(str(asked))
    if not file.is_file():
        raise ArgumentError(f"plan={str(file)!r}: there is no such file (in {Path.cwd()}).")
    plan = Plan.load(file)
    if plan.workers not in (1, me.size) and not observed():
        raise ArgumentError(f"the plan in {file} is for {plan.workers} workers, not {me.size}.")
    return plan


def recorded_cut(plan: Plan, file: Path, me: World) -> tuple[str, ...]:
    """Where the ``plan.yaml`` of a run to resume cuts a pipeline of as many stages; empty if it has
    another number, or is not there. A collective.
    """
    names: list[str] = []
    if me.is_main:
        with suppress(ArgumentError):
            before = Plan.load(file)
            if (before.pipeline, before.virtual) == (plan.pipeline, plan.virtual):
                names = list(before.split_at)
    return tuple(broadcast_json(me, names))


def grow(
    plan: Plan,
    optimizer: Optimizer,
    scheduler: Any,
    rule: str | None,
    warmup: int | None,
    samples: int,
) -> Plan:
    """``batch="grow"``: the batch times the number of workers, and the learning rate to match."""
    from ronde.run import lr_rules  # few runs grow their batch

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
    """The plan with its number of micro-batches."""
    largest = split(0, plan.batch_size, plan.replicas)[0][1]
    count = micro_batches_of(plan, largest)
    micro = -(-largest // count) if plan.pipeline > 1 else plan.micro_batch
    return dataclasses.replace(plan, accumulation=count, micro_batch=micro)


def micro_batch_sizes(plan: Plan, epoch_samples: int) -> tuple[int, ...]:
    """Sizes of all micro-batches of an epoch, on any worker; the stand-in of an empty one has 1."""
    size = plan.batch_size
    totals = {min(size, epoch_samples), epoch_samples % size or size}
    sizes = {
        max(1, b - a)
        for total in totals
        for low, high in split(0, total, plan.replicas)
        for a, b in split(low, high, plan.accumulation)
    }
    return tuple(sorted(sizes))


def given_settings(optimizer: Optimizer, lr_factor: float) -> list[dict[str, Any]]:
    """The settings of each group as the script gave them.

    Args:
        lr_factor: what ``batch="grow"`` has multiplied the rates by.
    """
    settings = []
    for group in optimizer.param_groups:
        own = {k: v for k, v in group.items() if k not in ("params", *_RATES)}
        plain = {k: v for k, v in own.items() if not isinstance(v, torch.Tensor)}
        # a scheduler may have changed the rate already
        rate = float(group.get("initial_lr", group["lr"]))
        settings.append({**plain, "lr": rate / lr_factor})
    return settings
