"""What one run is made of, for the files that carry it out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.loader import TakenOver
from ronde.parallel import Strategy, Work
from ronde.plan import Plan, Share, epoch_steps
from ronde.run.losses import LossCall
from ronde.run.run_state import State
from ronde.watch import RunDir, Warned, Watcher
from ronde.world import World
from ronde.world.rendezvous import Rendezvous

__all__ = ["Parts", "Position"]


@dataclass(eq=False)
class Position:
    """Where a run is in its loop.

    Attributes:
        share: of the batch that was handed out and not yet stepped on.
        backwards: backward passes of that batch so far.
        in_epochs: whether the script is in the body of its loop over ``run.epochs``.
        readings: loops over batches of all runs that had begun when this epoch began.
        goes_back: whether the run goes back to the last checkpoint at the next batch.
        ended: whether the run has ended.
    """

    share: Share | None = None
    backwards: int = 0
    in_epochs: bool = False
    readings: int = 0
    goes_back: bool = False
    ended: bool = False


@dataclass(eq=False)
class Parts:
    """What one run is made of. It holds neither the loop nor the callbacks, so no reference cycle
    keeps loading processes or a model alive.

    Attributes:
        directory: where the run writes; None for nowhere.
        part: the run's name among those of one loop; empty for the first.
        follows: whether it takes the batches of another run.
        autocast: a context for forward and loss.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    plan: Plan
    data: TakenOver
    loss: LossCall
    work: Work
    strategy: Strategy
    world: World
    rendezvous: Rendezvous
    watcher: Watcher
    directory: RunDir | None
    part: str
    follows: bool
    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler | None
    state: State = field(default_factory=State)
    place: Position = field(default_factory=Position)

    @property
    def holds_all(self) -> bool:
        """Whether every worker holds the whole model and its optimizer's state."""
        plan = self.plan
        divided = plan.shard != "none" or plan.pipeline > 1 or plan.tensor > 1
        return self.world.size == 1 or not divided

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; in the current one, if a ``batch_sampler`` decides."""
        order = self.data.order
        if (ends := order.ends(self.state.epoch)) is not None:
            return len(ends)
        return epoch_steps(order.epoch_samples, self.plan.batch_size, self.plan.drop_last)

    @property
    def epoch_is_over(self) -> bool:
        """Whether all batches of the epoch were trained on."""
        state, plan = self.state, self.plan
        if self.follows or not state.epoch_samples:
            return False
        left = self.data.order.samples_in(state.epoch) - state.epoch_samples
        return left <= 0 or (plan.drop_last and left < plan.batch_size)

    def warn(self, text: str, differs: bool = False) -> None:
        """Warn; ``differs``: the training is not the same as in one process for it."""
        self.watcher.event(Warned(text=text, differs=differs))
        self.watcher.warn(text)

    def say(self, text: str) -> None:
        """Tell rank 0's user."""
        self.watcher.say(f"{self.part}: {text}" if self.part else text)

    def report(self, text: str, warning: bool) -> None:
        """A note of the loading engine, or a warning."""
        self.warn(text) if warning else self.watcher.say(text)
