"""What is done, as data: :class:`Plan`; what a model costs and what a cluster gives; the batch contract as arithmetic."""

from ronde.plan.batch import Share, epoch_steps, shares, split
from ronde.plan.cluster import Cluster, Fit
from ronde.plan.cost import Costs, Line, Unit
from ronde.plan.plan import SPLIT_FIELDS, Layout, Place, Plan

__all__ = ["SPLIT_FIELDS", "Cluster", "Costs", "Fit", "Layout", "Line", "Place", "Plan", "Share", "Unit", "epoch_steps", "shares", "split"]
