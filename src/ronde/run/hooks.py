"""Where a study looks on: one module-level observer, None in every ordinary run.

``distribute`` and :class:`~ronde.run.run.Run` call it at a few places, each behind one ``is not
None``. An observer is for studies of a script (``ronde prove``), which run in processes of their
own: it may change what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from ronde.loader import Taken
    from ronde.parallel import Work
    from ronde.plan import Plan, Share
    from ronde.run.check_prediction import Forecast
    from ronde.run.losses import LossCall
    from ronde.run.step_port import RunView
    from ronde.world import World

__all__ = ["Observer", "Opening", "examiner", "observer", "planner"]


@dataclass
class Opening:
    """What ``distribute`` was given, before anything is exchanged; an observer may replace it.

    Attributes:
        precision, batch, clip_norm, micro_batch, sync_batchnorm, seed: the arguments of these
        names.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    taken: Taken
    calls: LossCall
    precision: Any
    batch: Literal["keep", "grow"]
    clip_norm: float | None
    micro_batch: int | None
    sync_batchnorm: bool
    seed: int


class Observer:
    """What a study may see and change of a run. These do nothing."""

    def opening(self, given: Opening) -> None:
        """``distribute`` has checked its arguments."""

    def planned(self, plan: Plan, work: Work, calls: LossCall, me: World) -> Plan:
        """The plan is complete, nothing is split yet. Another may be returned."""
        return plan

    def workers(self, found: int) -> int:
        """As how many workers ``batch="grow"`` counts."""
        return found

    def ready(self, run: RunView, plan: Plan) -> None:
        """``distribute`` is about to return."""

    def epochs(self, run: RunView, n: int) -> int:
        """The script asked for ``n`` epochs."""
        return n

    def starting(self, run: RunView) -> None:
        """The script begins to go through an epoch's batches."""

    def over(self) -> bool:
        """Whether enough was seen."""
        return False

    def several(self, found: bool) -> bool:
        """Whether a batch is handed out as a list of micro-batches."""
        return found

    def apart(self, run: RunView) -> bool:
        """Whether a loop of the script's own, written for one batch a step, is handed a step's
        micro-batches one after the other.
        """
        return False

    def batch(self, run: RunView, share: Share, micros: list[Any]) -> list[Any]:
        """The micro-batches of a step, before the script sees them."""
        return micros

    def gradients(self, run: RunView, loss: torch.Tensor) -> None:
        """The exchange is complete, nothing is clipped."""

    def clipped(self, run: RunView) -> None:
        """The optimizer is about to step."""

    def updated(self, run: RunView, share: Share) -> None:
        """Optimizer and scheduler have stepped."""

    def evaluating(self, run: RunView, taken: Taken) -> Taken:
        """An evaluation of a data set begins that was not seen before."""
        return taken

    def evaluation(self, run: RunView) -> None:
        """The model is about to be evaluated."""

    def evaluated(self, run: RunView, result: dict[str, Any], samples: int) -> None:
        """An evaluation has ended."""

    def logged(self, run: RunView, values: Mapping[str, Any]) -> None:
        """The script records values of its own, on whatever rank."""


observer: Observer | None = None

planner: Callable[[Plan, Work, LossCall, World], tuple[Plan, Forecast]] | None = None
"""Chooses for ``plan="auto"``: a plan, and what is predicted for it. A room above this one puts it
here.
"""

examiner: Callable[..., dict[str, Any]] | None = None
"""Carries ``run.doctor()`` out. A room above this one puts it here."""
