"""The runs of one proof: the reference, the plans, and experiments with one thing changed."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any

__all__ = ["Experiment", "Settings"]


class Experiment(StrEnum):
    """One run of the script, and how it differs from the others."""

    # one process, whose global batch is one batch
    ONE = "one"  # the reference; it also asks the loss what kind of function it is
    ROUNDED = "rounded"  # every weight moves by one unit in its last place before each step
    AGAIN = "again"  # the reference once more
    SPLIT = "split"  # micro-batches as large as a worker's share
    # N workers
    PLAN = "plan"  # nothing is changed
    ALONE = "alone"  # the script is told that it is rank 0 of 1, whenever it asks
    ONE_SEED = "one-seed"  # every rank starts with the seed of rank 0

    @property
    def is_one_process(self) -> bool:
        """Whether the run has one process."""
        return self.value in ("one", "rounded", "again", "split")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to record one run. Plain values, except that ``experiment`` travels as its name.

    Attributes:
        folder: of its trace.
        steps: optimizer steps to record.
        workers: the world size to prove; one process counts as this many for ``batch="grow"``.
        training: the call of ``ronde.distribute`` to record, from 0.
        owns_loop: the script was written for one batch a step: ``split`` hands it part by part.
        plan_alone: ``run.plan`` of one process, for ``alone``.
        same_draws: random draws of a step and an evaluation are made the same for any number of
            workers.
    """

    folder: str
    experiment: Experiment
    steps: int
    workers: int
    training: int
    owns_loop: bool = False
    plan_alone: dict[str, Any] | None = None
    same_draws: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "experiment", Experiment(self.experiment))
