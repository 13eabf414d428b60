"""What is done, as data: :class:`Plan`, and the batch contract as arithmetic (:func:`shares`)."""

from ronde.plan.batch import Share, epoch_steps, shares, split
from ronde.plan.plan import Plan

__all__ = ["Plan", "Share", "epoch_steps", "shares", "split"]
