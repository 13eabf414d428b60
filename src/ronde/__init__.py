"""Ronde: one training script, on one device or on many.

    run = ronde.distribute(model, optimizer, train_set, loss=F.cross_entropy, batch_size=256)

All names but :func:`world` and the errors are imported on first use, so ``import ronde`` does not
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The function takes the name of the room it lives in: ronde.world() is who this worker is.
from ronde.world import (
    VERSION,
    ArgumentError,
    CheckpointError,
    FeedError,
    LossError,
    PlanError,
    RondeError,
    SampleError,
    World,
    WorldError,
    world,
)

if TYPE_CHECKING:
    from ronde import algorithms, feed
    from ronde.jobs import Flow, items, weights
    from ronde.launch.call import launch
    from ronde.plan import Plan
    from ronde.run import MicroBatches, Run
    from ronde.run.distribute import distribute

__version__ = VERSION

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "FeedError",
    "Flow",
    "LossError",
    "MicroBatches",
    "Plan",
    "RondeError",
    "Run",
    "PlanError",
    "SampleError",
    "World",
    "WorldError",
    "algorithms",
    "distribute",
    "feed",
    "items",
    "launch",
    "weights",
    "world",
]

_ROOMS = ("algorithms", "feed", "keras", "launch")

_LATER = {
    "distribute": "ronde.run",
    "Run": "ronde.run",
    "MicroBatches": "ronde.run",
    "Plan": "ronde.plan",
    "items": "ronde.jobs",
    "weights": "ronde.jobs",
    "Flow": "ronde.jobs",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import gc
        import importlib

        # A collection meanwhile would go over all that torch makes, which stays: 15 ms each time.
        collects = gc.isenabled()
        gc.disable()
        try:
            value = getattr(importlib.import_module(_LATER[name]), name)
        finally:
            if collects:
                gc.enable()
        globals()[name] = value
        if name == "distribute":
            hooks = importlib.import_module("ronde.run.hooks")
            setattr(hooks, "planner", _choose)  # noqa: B010
        return value
    if name in _ROOMS:
        import importlib

        return importlib.import_module(f"ronde.{name}")
    raise AttributeError(f"module 'ronde' has no attribute {name!r}")


def _choose(*given: Any) -> Any:
    """Handle ``plan="auto"``: ronde.run cannot import ronde.measure, which stands above it."""
    from ronde.measure.planner import choose_plan

    return choose_plan(*given)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER, *_ROOMS])
