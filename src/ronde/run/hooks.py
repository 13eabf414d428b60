"""Where a study watches a run: one module-level observer, which does nothing in ordinary runs.

Studies (``ronde prove``, ``doctor``, ``scale``, ``plan``) run in processes of their own, so their
observers may change what they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from ronde.loader import TakenOver
    from ronde.parallel import Work
    from ronde.plan import Plan, Share
    from ronde.run.check_prediction import Forecast
    from ronde.run.losses import LossCall
    from ronde.run.step_port import RunView
    from ronde.world import World

__all__ = ["Observer", "Opening", "examiner", "observed", "observer", "planner"]


@dataclass
class Opening:
    """The arguments of ``distribute`` before any exchange; an observer may replace them.
    ``script_plan`` is the split of the script's own arguments, which a study may have overridden.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    taken: TakenOver
    calls: LossCall
    precision: Any
    batch: Literal["keep", "grow"]
    clip_norm: float | None
    micro_batch: int | None
    sync_batchnorm: bool
    seed: int
    script_plan: Plan


class Observer:
    """What a study may see and change of a run. This one does nothing."""

    def on_open(self, opening: Opening) -> None:
        """``distribute`` has checked its arguments."""

    def on_plan(self, plan: Plan, work: Work, calls: LossCall, me: World) -> Plan:
        """The plan is complete, nothing is split yet. May return another plan."""
        return plan

    def count_workers(self, workers: int) -> int:
        """The number of workers that ``batch="grow"`` counts."""
        return workers

    def on_ready(self, run: RunView, plan: Plan) -> None:
        """``distribute`` is about to return."""

    def on_epochs(self, run: RunView, n: int) -> int:
        """The script asks for ``n`` epochs; returns how many it gets."""
        return n

    def on_epoch_start(self, run: RunView) -> None:
        """The script starts to read an epoch's batches."""

    def is_over(self) -> bool:
        """Whether the study has seen enough."""
        return False

    def yields_lists(self, lists: bool) -> bool:
        """Whether a batch is handed out as a list of micro-batches."""
        return lists

    def splits_steps(self, run: RunView) -> bool:
        """Whether micro-batches go one by one to a script's own loop, written for one per step."""
        return False

    def on_batch(self, run: RunView, share: Share, micros: list[Any]) -> list[Any]:
        """The micro-batches of a step, before the script sees them."""
        return micros

    def on_gradients(self, run: RunView, loss: torch.Tensor) -> None:
        """Gradients are exchanged and not yet clipped."""

    def before_update(self, run: RunView) -> None:
        """The optimizer is about to step."""

    def after_update(self, run: RunView, share: Share) -> None:
        """Optimizer and scheduler have stepped."""

    def on_evaluation_data(self, run: RunView, taken: TakenOver) -> TakenOver:
        """The script evaluates a data set for the first time."""
        return taken

    def before_evaluation(self, run: RunView) -> None:
        """An evaluation starts."""

    def on_evaluation_batch(self, run: RunView, share: Share, low: int, high: int) -> None:
        """Samples ``low`` to ``high`` of the evaluation are about to be evaluated."""

    def after_evaluation(self, run: RunView, result: dict[str, Any], samples: int) -> None:
        """An evaluation has ended."""

    def on_log(self, run: RunView, values: Mapping[str, Any]) -> None:
        """The script logs values, on any rank."""


observer: Observer = Observer()

planner: Callable[[Plan, Work, LossCall, World], tuple[Plan, Forecast]] | None = None
"""Chooses a plan for ``plan="auto"`` and predicts its step. A room above sets it."""

examiner: Callable[..., dict[str, Any]] | None = None
"""Carries out ``run.doctor()``. A room above sets it."""


def observed() -> bool:
    """Whether a study watches this process."""
    return type(observer) is not Observer
