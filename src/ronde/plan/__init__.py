"""What is done, as data: :class:`Plan`; what a model costs and what a cluster gives; the batch contract as arithmetic; and, from
these, what each plan would take: the cut into stages, the schedules, prediction, search and explanation.

The arithmetic of prediction is imported when first used: ``import ronde.plan`` imports neither numpy, rich nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.plan.batch import Share, epoch_steps, shares, split
from ronde.plan.cluster import Added, Cluster, Fit
from ronde.plan.cost import Costs, Line, Unit
from ronde.plan.plan import SPLIT_FIELDS, Layout, Place, Plan

if TYPE_CHECKING:
    from ronde.plan.explain import Explanation, Flip
    from ronde.plan.partition import Cut, StageCost, cut, cut_at, cut_equal
    from ronde.plan.predict import Prediction, Predictor
    from ronde.plan.search import Found, unsupported
    from ronde.plan.simulate import Timeline, Times, run_step

__all__ = [
    "Added",
    "SPLIT_FIELDS",
    "Cluster",
    "Costs",
    "Cut",
    "Explanation",
    "Fit",
    "Flip",
    "Found",
    "Layout",
    "Line",
    "Place",
    "Plan",
    "Prediction",
    "Predictor",
    "Share",
    "StageCost",
    "Timeline",
    "Times",
    "Unit",
    "cut",
    "cut_at",
    "cut_equal",
    "epoch_steps",
    "run_step",
    "shares",
    "split",
    "unsupported",
]

# ronde.plan.predict, .search and .explain are modules: their functions of the same name are imported from there.
_LATER = {
    "Cut": "partition",
    "StageCost": "partition",
    "cut": "partition",
    "cut_at": "partition",
    "cut_equal": "partition",
    "Prediction": "predict",
    "Predictor": "predict",
    "Found": "search",
    "unsupported": "search",
    "Explanation": "explain",
    "Flip": "explain",
    "Timeline": "simulate",
    "Times": "simulate",
    "run_step": "simulate",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        value = getattr(importlib.import_module(f"ronde.plan.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ronde.plan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
