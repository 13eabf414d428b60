"""What a run does, as data: :class:`Plan`, the batch contract as arithmetic, and pipeline
schedules.

Imports neither numpy nor torch. Offers :class:`Plan`, :data:`REDUCERS`, :func:`shares` and
:func:`epoch_steps`; the schedules are in :mod:`ronde.plan.schedules`.
"""

from typing import TYPE_CHECKING

from ronde.plan.batch import Share, epoch_steps, shares, split
from ronde.plan.plan import LR_RULES, SPLIT_FIELDS, Layout, Place, Plan
from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.plan.reducers import REDUCERS, parse_reducer

__all__ = [
    "LR_RULES",
    "REDUCERS",
    "SPLIT_FIELDS",
    "Layout",
    "Place",
    "Plan",
    "Share",
    "epoch_steps",
    "parse_reducer",
    "shares",
    "split",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(__name__, {"ronde.plan.reducers": "REDUCERS parse_reducer"})
