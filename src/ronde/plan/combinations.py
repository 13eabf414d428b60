"""Combinations of techniques that a plan can name, and that are not carried out yet."""

from __future__ import annotations

from ronde.plan.plan import Plan


def not_carried_out(plan: Plan) -> str | None:
    """Why no strategy carries out a plan's combination, or None. The planner offers only others.

    Example:
        >>> not_carried_out(Plan(tensor=2, shard="optimizer"))
        'tensor goes with shard=gradients or parameters, or with a pipeline'
        >>> not_carried_out(Plan(pipeline=2, tensor=2, shard="optimizer"))
    """
    if plan.tensor > 1 and plan.pipeline == 1 and plan.shard == "optimizer":
        return "tensor goes with shard=gradients or parameters, or with a pipeline"
    return None
