"""A model's costs as data: a chain of units in execution order, with times and bytes.

Nothing here measures: ``ronde.measure`` fills these in from the script's own model, and the search
reads them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ronde.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A cost linear in the samples at once: ``fixed + per_sample * samples`` (seconds or bytes)."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """The cost of so many samples at once."""
        return self.fixed + self.per_sample * samples

    def times(self, factor: float) -> LinearCost:
        """All of it times ``factor``."""
        return LinearCost(self.fixed * factor, self.per_sample * factor)

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(self.fixed + other.fixed, self.per_sample + other.per_sample)


@dataclass(frozen=True)
class Unit:
    """A link of the chain: a module (or the code between two) that a pipeline never cuts.

    Attributes:
        name: the module's path in the tree, as ``named_modules`` gives it; glue between modules is
            the path of the module that owns it, with ``"(glue)"``.
        forward_seconds, backward_seconds: of one micro-batch, on the device the costs were measured
            on.
        parameter_bytes: of all its parameters; those that earlier units own too (tied weights)
            count in the first only.
        trainable_bytes: of those that take gradients.
        optimizer_bytes: the optimizer's state for them.
        buffer_bytes: of its buffers.
        saved_bytes: activations it keeps from its forward pass for its backward pass.
        crossing_bytes: of all tensors alive after it that later units read: what a cut here sends,
            forwards; as much comes back.
        crossing_grad_bytes: the part of ``crossing_bytes`` that takes gradients: what comes back.
        cut_after: whether a stage may end here.
        why_not: why it may not, where it may not.
        alike: equal for units of the same structure and shapes, which were measured once.
        flops: forward floating-point operations, of one sample.
        tied: names of parameters it shares with units elsewhere in the chain.
        tensor: share (0 to 1) of its parameters, work and activations that tensor parallelism can
            divide; 0 where it has no recognised attention or MLP block.
        tensor_reduce_bytes: bytes all-reduced per forward pass of one micro-batch if it is tensor
            parallel; as much backward. tensor_reduces: in how many messages.
        batchnorm: whether it normalises over the batch.
        forward_transient_bytes, backward_transient_bytes: most that each pass needs for a moment
            beside that; the gradients that the backward pass leaves behind are not in it.
        tied_grad_bytes: gradients it leaves behind for parameters that an earlier unit owns.
        tied_bytes: bytes of the parameters in ``tied``, 0 where not known (then the first owner's
            parameters are taken).
        selective_saved_bytes, selective_forward_bytes, selective_backward_bytes: ``saved_bytes``,
            ``forward_transient_bytes`` and ``backward_transient_bytes`` under
            ``recompute="selective"``, where ``Costs.again`` names it.
        full_saved_bytes, full_forward_bytes, full_backward_bytes: the same under
            ``recompute="full"``.
        selective_seconds: what that adds to its backward pass, for costs that were not measured as
            a whole (``Costs.again_seconds``).
        tensor_bytes: of each of them, in the order of the tree; empty where not known.
        tensor_time: share of its time that tensor parallelism divides.
        tensor_saved_bytes, tensor_forward_bytes, tensor_backward_bytes: ``saved_bytes`` and the
            transients of each pass, divided by two.
        block: the module that is gathered, or computed again, as a whole and that this is in;
            ``""`` where it is in none.
        recomputed: whether recomputation runs it again.
        operations: operators that a forward pass of one micro-batch dispatches; 0 where not known.
        attention_flops: the part of ``flops`` in fused attention; where it is causal, the half that
            its kernels compute.
        vector_flops: the part of ``flops`` in products that tensor cores cannot run: in fp32, or in
            16 bits with a size that is no multiple of 8.
        moved_bytes: read and written by all other operators in a forward pass.
        tensor_moved_bytes: ``moved_bytes`` with the unit's blocks divided by two.
    """

    name: str
    forward_seconds: LinearCost = LinearCost()
    backward_seconds: LinearCost = LinearCost()
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: LinearCost = LinearCost()
    crossing_bytes: LinearCost = LinearCost()
    crossing_grad_bytes: LinearCost = LinearCost()
    cut_after: bool = True
    why_not: str = ""
    alike: str = ""
    flops: float = 0.0
    tied: tuple[str, ...] = ()
    tensor: float = 0.0
    tensor_reduce_bytes: LinearCost = LinearCost()
    batchnorm: bool = False
    forward_transient_bytes: LinearCost = LinearCost()
    backward_transient_bytes: LinearCost = LinearCost()
    tied_grad_bytes: int = 0
    tied_bytes: int = 0
    selective_saved_bytes: LinearCost = LinearCost()
    selective_seconds: LinearCost = LinearCost()
    tensor_bytes: tuple[int, ...] = ()
    selective_forward_bytes: LinearCost = LinearCost()
    selective_backward_bytes: LinearCost = LinearCost()
    full_saved_bytes: LinearCost = LinearCost()
    full_forward_bytes: LinearCost = LinearCost()
    full_backward_bytes: LinearCost = LinearCost()
    tensor_time: float = 0.0
    tensor_saved_bytes: LinearCost = LinearCost()
    tensor_forward_bytes: LinearCost = LinearCost()
    tensor_backward_bytes: LinearCost = LinearCost()
    block: str = ""
    recomputed: bool = False
    operations: int = 0
    attention_flops: float = 0.0
    vector_flops: float = 0.0
    moved_bytes: LinearCost = LinearCost()
    tensor_moved_bytes: LinearCost = LinearCost()
    tensor_reduces: int = 1


@dataclass(frozen=True)
class Costs:
    """A model, its optimizer and its batch, as the planner sees them.

    Attributes:
        units: in the order in which the forward pass runs them, the loss last.
        batch_size: global samples per optimizer step.
        input_bytes: of one sample with its target.
        optimizer_seconds: one optimizer step over all parameters, on the measured device.
        optimizer: its class's name.
        parameters: how many parameters the model has.
        device: what was measured on, for example ``"cpu: AMD EPYC (2 cores)"``.
        threads: threads a worker had.
        noise: relative disturbance seen while measuring, 0 to 1.
        script_bytes: of the host's memory, what the script holds beside the model: its libraries,
            its data. Counts where the device is a CPU.
        sequence: length of the sequence that a sample has, 0 where there is none.
        measured_samples: micro-batch sizes at which the units were measured.
        optimizer_transient_bytes: most that an optimizer step needs for a moment.
        fit_error: mean relative distance of the measured step times from the sum of the units'
            lines.
        notes: what to know about how this was measured, a sentence each.
        tensor_divides: what the number of tensor-parallel workers must divide (attention heads), 0
            where not known.
        clip_seconds: clipping the gradients of all parameters once, where the script has
            ``clip_norm``.
        accumulate_seconds: what adding the gradients of a further micro-batch to those that are
            there takes, of the whole model.
        again: levels of ``recompute`` whose bytes were counted; plans with others are not looked
            at.
        again_seconds: level of ``recompute`` -> what it adds to a pass of the whole model, as
            measured.
        refused: what cannot carry this model or its optimizer out (``"pipeline"``, ``"tensor"``,
            ``"looped"``, ``"shard=optimizer"``, …) -> why: plans with it are not looked at.
    """

    units: tuple[Unit, ...]
    batch_size: int
    input_bytes: float = 0.0
    optimizer_seconds: float = 0.0
    optimizer: str = ""
    parameters: int = 0
    device: str = ""
    threads: int = 1
    noise: float = 0.0
    sequence: int = 0
    measured_samples: tuple[int, ...] = field(default=())
    optimizer_transient_bytes: float = 0.0
    fit_error: float = 0.0
    notes: tuple[str, ...] = ()
    tensor_divides: int = 0
    accumulate_seconds: float = 0.0
    again: tuple[str, ...] = ()
    again_seconds: dict[str, LinearCost] = field(default_factory=dict)
    script_bytes: float = 0.0
    clip_seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    sends_block: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Costs:
        """Build from :meth:`to_dict`."""
        units = []
        for unit in values["units"]:
            made: dict[str, Any] = {
                k: LinearCost(**v)
                if isinstance(v, dict)
                else tuple(v)
                if isinstance(v, list)
                else v
                for k, v in unit.items()
            }
            units.append(Unit(**made))
        rest: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "units"
        }
        rest["again_seconds"] = {
            level: LinearCost(**line) for level, line in (values.get("again_seconds") or {}).items()
        }
        return cls(units=tuple(units), **rest)


def not_counted(plan: Plan, costs: Costs) -> str | None:
    """Why the costs do not tell what a plan needs of the model, or None."""
    if plan.recompute != "none" and plan.recompute not in costs.again:
        return f"recompute={plan.recompute} could not be counted on this model"
    if plan.tensor > 1 and not any(u.tensor for u in costs.units):
        return "no attention or MLP block was recognised"
    return None
