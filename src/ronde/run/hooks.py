"""Where a study watches a run: one module-level observer, which does nothing in ordinary runs.

Studies (``ronde prove``, ``doctor``, ``scale``, ``plan``) run in processes of their own, so their
observers may change what they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ronde.run.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from ronde.loader import TakenOver
    from ronde.parallel import Work
    from ronde.plan import Plan
    from ronde.run.losses import LossCall
    from ronde.run.parts import Parts
    from ronde.world import World

__all__ = ["Observer", "Opening", "observed", "observer", "planner"]


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


class Observer(Callback):
    """What a study sees and changes at ``distribute``. This one does nothing.

    It is the last callback of every run, too: there it sees steps, and changes nothing.

    Attributes:
        changes_training: whether what is trained is the study's, and not worth the checks and the
            reading ahead of a training.
        run_type, loop_type: of a study that leads the script through a loop of its own, in the
            place of :class:`~ronde.run.run.Run` and :class:`~ronde.run.loop.Loop`.
    """

    changes_training = True
    run_type: Any = None
    loop_type: Any = None

    def on_open(self, opening: Opening) -> None:
        """``distribute`` has checked its arguments."""

    def on_plan(self, plan: Plan, work: Work, calls: LossCall, me: World) -> Plan:
        """The plan is complete, nothing is split yet. May return another plan."""
        return plan

    def count_workers(self, workers: int) -> int:
        """The number of workers that ``batch="grow"`` counts."""
        return workers

    def on_ready(self, run: Any, plan: Plan) -> None:
        """``distribute`` is about to return."""

    def on_evaluation_data(self, parts: Parts, taken: TakenOver) -> TakenOver:
        """The script evaluates a data set for the first time."""
        return taken


observer: Observer = Observer()

planner: Callable[[Plan, Work, LossCall, World], tuple[Plan, str]] | None = None
"""Chooses a plan for ``plan="auto"``, and says why. A room above sets it."""


def observed() -> bool:
    """Whether a study has this process train for it."""
    return type(observer) is not Observer and observer.changes_training
