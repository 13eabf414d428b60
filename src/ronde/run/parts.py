"""What one run is made of, and where it stands, for the files that carry it out."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.loader import TakenOver
from ronde.parallel import Strategy, Work
from ronde.plan import Plan, Share, epoch_steps
from ronde.run.losses import LossCall
from ronde.watch import RunDir, Warned, Watcher
from ronde.world import PlanError, World
from ronde.world.rendezvous import Rendezvous

__all__ = ["DTYPES", "Gathering", "MicroBatches", "Parts", "Position", "State"]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class State:
    """How far a run has come.

    Attributes:
        epoch: the epoch being trained, from 0.
        step: optimizer steps done.
        samples: samples trained on, over all workers, repeats in later epochs included.
        epoch_samples: samples of this epoch done: where in its order the next batch starts.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    epoch_samples: int = 0


_UNPACKING = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}


class MicroBatches(list[Any]):
    """What ``run.batches()`` yields where a step has several micro-batches: a list of them.

    ``run.step`` takes it whole; a script that owns its loop goes through it and calls
    ``run.backward`` for each.

    Raises:
        PlanError: the script takes it for one batch and unpacks it (``inputs, target = batch``),
            or, under a pipeline, indexes it.
    """

    def __init__(self, micros: Iterable[Any] = (), pipeline: str = "") -> None:
        super().__init__(micros)
        self._pipeline = pipeline  # the plan's words, if it is a pipeline that yields this

    def __iter__(self) -> Iterator[Any]:
        # Two micro-batches would pass for inputs and target.
        frame = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _UNPACKING:
            self._refuse("unpacks")
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if self._pipeline or isinstance(key, str):
            self._refuse("indexes")
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._advice()} It has no attribute {name!r}.")

    def _refuse(self, how: str) -> NoReturn:
        raise PlanError(f"the script {how} a batch. {self._advice()}")

    def _advice(self) -> str:
        count = f"{len(self)} micro-batches" if len(self) > 1 else "1 micro-batch"
        if self.__dict__.get("_pipeline"):
            return (
                f"Under plan={self._pipeline!r} a step has {count}, which a pipeline interleaves: "
                "pass the batch whole to run.step(batch), or use another plan."
            )
        return (
            f"This step has {count}: pass the batch whole to run.step(batch), or call "
            "run.backward(loss) for each micro-batch of it (for micro in batch: …)."
        )


@dataclass(eq=False)
class Position:
    """Where a run is in its loop.

    Attributes:
        share: of the batch that was handed out and not yet stepped on.
        backwards: backward passes of that batch so far.
        in_epochs: whether the script is in the body of its loop over ``run.epochs``.
        readings: loops over batches of all runs that had begun when this epoch began.
        ended: whether the run has ended.
    """

    share: Share | None = None
    backwards: int = 0
    in_epochs: bool = False
    readings: int = 0
    ended: bool = False


@dataclass
class Gathering:
    """How a script uses ``run.gather``.

    Attributes:
        used: whether it does; None until its first step has ended.
        in_pass: whether the pass under way has, so that its loss may relate samples.
        stepping: whether ``run.step`` is under way, which decides who runs the loss.
        evaluated: samples and micro-batches of an evaluation's batch; None outside of one.
    """

    used: bool | None = None
    in_pass: bool = False
    stepping: bool = False
    evaluated: tuple[int, int] | None = None


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

    def check_settled(self, call: str) -> None:
        """Refuse what reads weights while each worker has its own, under a reducer of local steps.

        Raises:
            PlanError: they have.
        """
        strategy = self.strategy
        if strategy.drifts and strategy.exchange is not None:
            raise PlanError(
                f"{call} at step {self.state.step}: under plan={self.plan.spec!r}, workers have "
                "the same weights at steps divisible by "
                f"{strategy.exchange.reducer.every} and at the end of an epoch only. Call it then."
            )

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
