"""A prediction: step-time terms, memory by kind, and their names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from ronde.plan.plan import Plan

__all__ = ["FITS_SHARE", "KINDS", "RISKY_SHARE", "TERMS", "Prediction", "StageRow", "Verdict"]

Verdict = Literal["fits", "risky", "does not fit", "unknown"]
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "transient",
    "communication",
    "base",
)
"""What memory is held for, in this order everywhere."""
TERMS = (
    "compute",
    "recompute",
    "tensor",
    "gather",
    "exchange",
    "interference",
    "bubble",
    "p2p",
    "overhead",
    "optimizer",
    "host",
)
"""What step time is spent on, in this order everywhere."""
FITS_SHARE, RISKY_SHARE = 0.80, 0.95
"""Shares of a device's memory up to which a plan *fits* and is *risky*."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """A pipeline stage in a prediction.

    Attributes:
        stage, worker: which, and who holds it.
        first, last: names of its first and last unit.
        units: how many.
        forward_seconds, backward_seconds: of one micro-batch.
        parameter_bytes: before sharding.
        memory_bytes: its states as its worker holds them, and its activations.
        in_flight: micro-batches whose activations it holds at once.
        send_bytes: of one micro-batch, to the next stage.
    """

    stage: int
    worker: int
    first: str
    last: str
    units: int
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    memory_bytes: float
    in_flight: int
    send_bytes: float


@dataclass(frozen=True)
class Prediction:
    """What a plan would take.

    Attributes:
        plan: with its micro-batch and accumulation.
        step_seconds: of one optimizer step.
        terms: seconds of the worker that is done last, by kind (``TERMS``); they sum to
            ``step_seconds``.
        one_device_seconds: the same global batch on one device of this kind, were its memory
            enough.
        memory: bytes of the worker that needs most, by kind (``KINDS``), at its fullest moment.
        capacity_bytes: of one device; 0 where not known.
        verdict: whether it fits.
        exchanged_bytes: sent by one worker in one step, the one that sends most.
        bubble: share of the step in which a worker of the pipeline waits, on average; 0 without a
            pipeline.
        micro_batches: per step and worker.
        micro_samples: samples of the largest one.
        placement: which group stands where.
        stages: of a pipeline, in order.
        split_at: names of the units that begin its stages, as the plan would carry it out.
        hidden_seconds: exchange that runs beside the backward pass.
        notes: what in it is an estimate or an assumption.
    """

    plan: Plan
    step_seconds: float
    terms: dict[str, float]
    one_device_seconds: float
    memory: dict[str, float]
    capacity_bytes: float
    verdict: Verdict
    exchanged_bytes: float
    bubble: float
    micro_batches: int
    micro_samples: int
    placement: dict[str, str] = field(default_factory=dict)
    stages: tuple[StageRow, ...] = ()
    split_at: tuple[str, ...] = ()
    hidden_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Over all workers."""
        return self.plan.batch_size / self.step_seconds if self.step_seconds else 0.0

    @property
    def speedup(self) -> float:
        """Relative to one device."""
        return self.one_device_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Speed-up per worker."""
        return self.speedup / self.plan.workers

    @property
    def memory_bytes(self) -> float:
        """Of the worker with the highest peak."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, including derived ones."""
        values = dataclasses.asdict(self)
        values["plan"] = self.plan.to_dict()
        for name in ("samples_per_second", "speedup", "efficiency", "memory_bytes"):
            values[name] = getattr(self, name)
        values["spec"], values["family"] = self.plan.spec, self.plan.family
        return values
