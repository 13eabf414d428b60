"""What a run does, as data: :class:`Plan`, the batch contract as arithmetic, and pipeline
schedules.

Imports neither numpy nor torch. Offers :class:`Plan`, :func:`shares` and :func:`epoch_steps`; the
schedules are in :mod:`ronde.plan.schedules`.
"""

from ronde.plan.batch import Share, epoch_steps, shares, split
from ronde.plan.plan import SPLIT_FIELDS, Layout, Place, Plan

__all__ = ["SPLIT_FIELDS", "Layout", "Place", "Plan", "Share", "epoch_steps", "shares", "split"]
