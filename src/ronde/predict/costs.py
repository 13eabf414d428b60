"""A model's costs as data: a chain of units in execution order, with times and bytes.

Nothing here measures: ``ronde.measure`` fills these in from the script's own model, and the search
reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.plan.plan import Plan

Array = npt.NDArray[np.float64]


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
    forward_transient_bytes: LinearCost = LinearCost()
    backward_transient_bytes: LinearCost = LinearCost()
    tied_grad_bytes: int = 0
    tied_bytes: int = 0
    selective_saved_bytes: LinearCost = LinearCost()
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


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that several units share.

    Attributes:
        units: which, in order; the first one's bytes count them.
        parameter_bytes, trainable_bytes, optimizer_bytes: of what is shared.
    """

    units: tuple[int, ...]
    parameter_bytes: float
    trainable_bytes: float
    optimizer_bytes: float

    def times(self, part: float) -> Tie:
        """The part that one of the tensor-parallel workers has."""
        sizes = self.parameter_bytes, self.trainable_bytes, self.optimizer_bytes
        return Tie(self.units, *(size * part for size in sizes))


@dataclass(frozen=True, eq=False)
class Gradients:
    """All gradients in backward order: last unit first, and its last parameter first.

    Attributes:
        unit: whose it is.
        share: of the bytes of the unit's gradients.
        before: share of the unit's backward pass that is still to come when it is there, as if each
            took as long.
    """

    unit: npt.NDArray[np.intp]
    share: Array
    before: Array


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
        sends_block: whether a send ends before the next pass begins, as in Megatron-LM: nothing
            that was sent or received is held twice. Ronde's own pipelines send beside it.
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

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """Every number of the units, by field: one for each unit, and of a line its fixed and its
        per-sample part in two rows.
        """
        arrays = {}
        for each in dataclasses.fields(Unit):
            values = [getattr(unit, each.name) for unit in self.units]
            if each.type == "LinearCost":
                lines = [(line.fixed, line.per_sample) for line in values]
                arrays[each.name] = np.array(lines, dtype=float).T
            elif each.type in ("int", "float", "bool"):
                arrays[each.name] = np.array(values, dtype=float)
        return arrays

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.intp]:
        """Each unit's block as a number; -1 for those in none."""
        numbers: list[int] = []
        last = -1
        for i, unit in enumerate(self.units):
            if unit.block and (not i or unit.block != self.units[i - 1].block):
                last += 1
            numbers.append(last if unit.block else -1)
        return np.array(numbers, dtype=np.intp)

    @functools.cached_property
    def ties(self) -> tuple[Tie, ...]:
        """What units share, one tie for each set of units."""
        where: dict[str, list[int]] = {}
        for i, unit in enumerate(self.units):
            for name in unit.tied:
                where.setdefault(name, []).append(i)
        ties = []
        for shared in dict.fromkeys(tuple(w) for w in where.values() if len(w) > 1):
            first = self.units[shared[0]]
            known = [self.units[i].tied_bytes for i in shared if self.units[i].tied_bytes]
            size = float(min(known or [first.parameter_bytes]))
            part = size / first.parameter_bytes if first.parameter_bytes else 0.0
            sizes = size, first.trainable_bytes * part, first.optimizer_bytes * part
            ties.append(Tie(shared, *sizes))
        return tuple(ties)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The gradients of all units."""
        rows = []
        for k in reversed(range(len(self.units))):
            unit = self.units[k]
            sizes = unit.tensor_bytes if sum(unit.tensor_bytes) else (unit.trainable_bytes,)
            rows += [
                (k, size / sum(sizes), 1.0 - (i + 1) / len(sizes))
                for i, size in enumerate(reversed(sizes))
                if unit.trainable_bytes
            ]
        table = np.array(rows, dtype=float).reshape(-1, 3)
        return Gradients(table[:, 0].astype(np.intp), table[:, 1], table[:, 2])

    @functools.cached_property
    def trainable_bytes(self) -> float:
        """Of all units' parameters."""
        return float(sum(unit.trainable_bytes for unit in self.units))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Costs:
        """Build from :meth:`to_dict`."""

        def read(value: Any) -> Any:
            if isinstance(value, list):
                return tuple(value)
            return LinearCost(**value) if isinstance(value, dict) else value

        units = tuple(Unit(**{k: read(v) for k, v in unit.items()}) for unit in values["units"])
        rest: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        rest["again_seconds"] = {k: read(v) for k, v in (rest.get("again_seconds") or {}).items()}
        rest["units"] = units
        return cls(**rest)


def not_counted(plan: Plan, costs: Costs) -> str | None:
    """Why the costs do not tell what a plan needs of the model, or None."""
    if plan.recompute != "none" and plan.recompute not in costs.again:
        return f"recompute={plan.recompute} could not be counted on this model"
    if plan.tensor > 1 and not any(u.tensor for u in costs.units):
        return "no attention or MLP block was recognised"
    return None
