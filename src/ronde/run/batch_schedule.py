"""Grows the global batch in the middle of a run, and the learning rate with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ronde.plan import LR_RULES
from ronde.run import lr_rules
from ronde.run.checks import is_whole
from ronde.world import ArgumentError, CheckpointError, PlanError
from ronde.world.consensus import agree

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = ["BatchSchedule", "schedule_of"]


class BatchSchedule:
    """Which global batch each step has.

    Args:
        at: optimizer steps done -> the size from then on.
        rule: how the learning rate follows, of :data:`~ronde.plan.LR_RULES`.
        base: the size before.
    """

    def __init__(self, at: Mapping[int, int], rule: str, base: int) -> None:
        self._rule = rule
        self.sizes: list[list[int]] = [[0, base], *map(list, sorted(at.items()))]
        self.epoch_step = 0  # optimizer steps done before this epoch

    def size(self, step: int) -> int:
        """Samples of the batch after ``step`` optimizer steps."""
        return next(size for first, size in reversed(self.sizes) if first <= step)

    def ends(self, samples: int) -> list[int]:
        """The position after each batch of this epoch."""
        found, step = [0], self.epoch_step
        while found[-1] < samples:
            found.append(min(samples, found[-1] + self.size(step)))
            step += 1
        return found[1:]

    def after_step(self, run: Parts) -> None:
        """Let the learning rate follow a change that begins with the next batch."""
        for (_, before), (first, size) in itertools.pairwise(self.sizes):
            if first != run.state.step:
                continue
            factor = {"linear": size / before, "sqrt": math.sqrt(size / before), "none": 1.0}
            lr_rules.scale_rates(run.optimizer, run.scheduler, factor[self._rule])
            run.watcher.say(
                f"global batch {before} -> {size} from step {first} on, learning rate × "
                f"{factor[self._rule]:g} ({self._rule})"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"sizes": self.sizes, "epoch_step": self.epoch_step, "rule": self._rule}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue as the checkpoint's run would have.

        Raises:
            CheckpointError: it had another schedule.
        """
        if saved["rule"] != self._rule or saved["sizes"] != self.sizes:
            batches = f"batches {saved['sizes']}, {saved['rule']}"
            if saved.get("by_noise"):  # of an earlier version
                batches += ", by largest=, which is gone: at= goes on with these batches"
            raise CheckpointError(
                "the checkpoint cannot be continued: its run.grow_batch() had other arguments "
                f"({batches}). Give the same."
            )
        self.epoch_step = saved["epoch_step"]


def schedule_of(
    run: Parts, at: Mapping[int, int], lr_rule: str | None, alone: bool, rolls_back: bool
) -> BatchSchedule:
    """Check the arguments of ``run.grow_batch``. A collective."""
    plan, call = run.plan, "run.grow_batch()"
    for step, size in at.items():
        if not is_whole(step) or not is_whole(size) or step < 1 or size < 1:
            raise ArgumentError(
                f"{call}: {step!r}: {size!r} is no step and no batch, both whole numbers above 0."
            )
    if lr_rule not in (None, *LR_RULES):
        raise ArgumentError(f"{call}: lr_rule={lr_rule!r}: expected one of {LR_RULES}.")
    if run.state.step != run.watcher.steps_at_start:
        raise ArgumentError(f"{call} was called after a step: call it before the first.")
    refused = (
        (plan.pipeline > 1, "a pipeline's micro-batches are fixed"),
        (plan.drop_last, "drop_last=True leaves out the end of an epoch"),
        (run.data.order.ends(0) is not None, "a batch_sampler decides on each batch"),
        (not alone, "other runs share its batches"),
        (rolls_back, "on_nan='rollback' would not shrink it again"),
    )
    for applies, why in refused:
        if applies:
            raise PlanError(f"{call} does not go with this run: {why}.")
    rule = lr_rules.choose_rule(run.optimizer, lr_rule)
    agree(run.world, {"steps": sorted(at.items()), "rule": rule}, call)
    return BatchSchedule(at, rule, plan.batch_size)
