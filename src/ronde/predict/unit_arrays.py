"""A model's units as arrays: costs at one micro-batch size, whole, divided or recomputed; and their
sums over the stages of a cut pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ronde.plan.plan import Plan
from ronde.plan.schedules import worker_of
from ronde.predict.costs import Costs, Unit
from ronde.predict.simulate import Timeline
from ronde.world import ArgumentError

Array = npt.NDArray[np.float64]
Recompute = Literal["none", "selective", "full"]

SELECTIVE_SECONDS = 0.15
"""What ``"selective"`` adds to a unit's backward pass, as a share of its forward pass, where it was
not timed.
"""


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


def holders(tie: Tie, bounds: tuple[int, ...], worker: Array) -> tuple[list[int], list[int]]:
    """First and last stage of each worker that shares a tie; the last makes the gradient."""
    stages = sorted({int(np.searchsorted(bounds, u, side="right")) - 1 for u in tie.units})
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for s in stages:
        firsts.setdefault(int(worker[s]), s)
        lasts[int(worker[s])] = s
    return list(firsts.values()), list(lasts.values())


@dataclass(frozen=True, eq=False)
class Chain:
    """Arrays over units: seconds and bytes of one micro-batch on one worker.

    Attributes:
        forward, backward: seconds; tensor-parallel all-reduces and recomputation are in them.
        recompute: the part of ``backward`` that runs a forward pass again.
        reduce: the part of both that all-reduces activations over tensor-parallel workers.
        parameters, trainable, optimizer, buffers: bytes.
        saved: activations kept from forward to backward.
        transient: most needed for a moment beside that in the forward pass.
        transient_backward: in the backward pass, with what recomputation brings back.
        late: gradients that its backward pass leaves behind for parameters of earlier units.
        crossing, crossing_grad: bytes that a cut after the unit sends, and gets back.
        reduce_bytes: all-reduced per micro-batch over tensor-parallel workers, both ways.
        blocks: which block a unit is part of, -1 where it is in none: what is recomputed, and
            gathered, together.
        cuts: units that a stage may begin with, without the first.
        ties: parameters shared by several units.
    """

    forward: Array
    backward: Array
    recompute: Array
    reduce: Array
    parameters: Array
    trainable: Array
    optimizer: Array
    buffers: Array
    saved: Array
    transient: Array
    transient_backward: Array
    late: Array
    crossing: Array
    crossing_grad: Array
    reduce_bytes: Array
    blocks: npt.NDArray[np.intp]
    cuts: tuple[int, ...]
    ties: tuple[Tie, ...]

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> Array:
        """Forward plus backward."""
        return self.forward + self.backward


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

    @classmethod
    def of(cls, costs: Costs) -> Gradients:
        """Build from a model's units."""
        rows = []
        for k in reversed(range(len(costs.units))):
            unit = costs.units[k]
            sizes = unit.tensor_bytes if sum(unit.tensor_bytes) else (unit.trainable_bytes,)
            rows += [
                (k, size / sum(sizes), 1.0 - (i + 1) / len(sizes))
                for i, size in enumerate(reversed(sizes))
                if unit.trainable_bytes
            ]
        table = np.array(rows, dtype=float).reshape(-1, 3)
        return cls(table[:, 0].astype(np.intp), table[:, 1], table[:, 2])


@dataclass(frozen=True, eq=False)
class _Tables:
    """Fixed and per-sample part of every line."""

    lines: dict[str, tuple[Array, Array]]
    flat: dict[str, Array]
    blocks: npt.NDArray[np.intp]
    cuts: tuple[int, ...]
    ties: tuple[Tie, ...]
    recomputed: npt.NDArray[np.bool_]


_LINES = tuple(f.name for f in dataclasses.fields(Unit) if f.type == "LinearCost")
_FLAT = tuple(f.name for f in dataclasses.fields(Unit) if f.type in ("int", "float"))
_made: dict[int, tuple[weakref.ref[Costs], _Tables]] = {}


def chain(
    costs: Costs,
    samples: float,
    *,
    tensor: int = 1,
    recompute: Recompute = "none",
    speed: float = 1.0,
    reduce_seconds: Callable[[float], float] | None = None,
    launch_seconds: float = 0.0,
) -> Chain:
    """The units' costs at ``samples`` at once.

    Args:
        costs: of the model.
        samples: micro-batch.
        tensor: workers that hold each layer together: the share of a unit that can be divided is,
            the rest is not.
        recompute: ``"full"`` keeps a block's input and runs its forward pass again, ``"selective"``
            the cheap part of it. Units that are in no block are not recomputed.
        speed: of the device against the one the costs were measured on.
        reduce_seconds: bytes -> seconds of one all-reduce over the tensor-parallel workers; None
            for nothing.
        launch_seconds: host time per operator: neither tensor parallelism nor a faster device
            makes a pass shorter than that of all its operators.

    Raises:
        ArgumentError: the model has no unit.
    """
    tables = _tables(costs)

    def line(name: str) -> Array:
        fixed, per_sample = tables.lines[name]
        return fixed + per_sample * samples

    share = tables.flat["tensor"]
    rest: Array = 1.0 - share * (1.0 - 1.0 / tensor)
    in_time = 1.0 - tables.flat["tensor_time"] * (1.0 - 1.0 / tensor)
    launch = tables.flat["operations"] * launch_seconds
    forward = np.maximum(line("forward_seconds") * in_time / speed, launch)
    backward = np.maximum(line("backward_seconds") * in_time / speed, 2.0 * launch)
    # Weighed whole and in two parts: what is divided goes with 1 / tensor.
    parts = 2.0 * (1.0 - 1.0 / tensor)

    def divided(whole: str, half: str) -> Array:
        size = line(whole)
        return np.maximum(0.0, size + (line(half) - size) * parts) if parts else size

    saved = divided("saved_bytes", "tensor_saved_bytes")
    transient = divided("forward_transient_bytes", "tensor_forward_bytes")
    transient_backward = divided("backward_transient_bytes", "tensor_backward_bytes")
    reduce_bytes = line("tensor_reduce_bytes") if tensor > 1 else np.zeros(len(forward))
    reduce = np.zeros(len(forward))
    if tensor > 1 and reduce_seconds is not None:
        messages = np.maximum(1.0, tables.flat["tensor_reduces"])
        sizes = zip(reduce_bytes.tolist(), messages.tolist(), strict=True)
        reduce = np.array([n * reduce_seconds(b / n) if b else 0.0 for b, n in sizes])
    again = np.zeros(len(forward))
    # all-reduces of activations: forward, backward, and once more if the forward pass runs again
    ways = 2.0
    inside = tables.recomputed
    if recompute != "none":
        kept = line(f"{recompute}_saved_bytes")
        before = line("saved_bytes") - kept  # what is computed again where nothing is divided
        whole_ends = 2.0 * reduce_bytes  # what a divided block is given and ends with
        kept = kept - np.maximum(0.0, share * kept - whole_ends) * (1.0 - 1.0 / tensor)
        transient = line(f"{recompute}_forward_bytes") * rest
        transient_backward = line(f"{recompute}_backward_bytes")
        for units in _runs(tables.blocks) if tensor > 1 else ():
            transient_backward[units] = np.maximum(
                0.0, transient_backward[units] - float(before[units].sum())
            ) * rest[units] + float((saved - kept)[units].sum())
        saved = kept
        again = np.where(inside, forward, 0.0)
        if recompute == "selective":
            cheap = line("selective_seconds") * rest / speed
            again = np.where(inside & (cheap > 0), cheap, SELECTIVE_SECONDS * again)
        ways = 3.0 if recompute == "full" else 2.0
    if (timed := costs.again_seconds.get(recompute)) is not None and inside.any():
        # Measured of the whole model: shared out as its parts take time.
        seconds = np.where(inside, line("forward_seconds"), 0.0)
        again = (
            seconds
            * (max(0.0, timed.at(samples)) / max(1e-12, float(seconds.sum())))
            * in_time
            / speed
        )
    return Chain(
        forward=forward + reduce,
        backward=backward + again + (ways - 1.0) * reduce,
        recompute=again,
        reduce=ways * reduce,
        parameters=tables.flat["parameter_bytes"] * rest,
        trainable=tables.flat["trainable_bytes"] * rest,
        optimizer=tables.flat["optimizer_bytes"] * rest,
        buffers=tables.flat["buffer_bytes"],
        saved=saved,
        transient=transient,
        transient_backward=transient_backward,
        late=tables.flat["tied_grad_bytes"] * rest,
        crossing=line("crossing_bytes"),
        crossing_grad=line("crossing_grad_bytes"),
        reduce_bytes=ways * reduce_bytes,
        blocks=tables.blocks,
        # A block that is computed again is one piece.
        cuts=tables.cuts
        if recompute == "none"
        else tuple(
            c for c in tables.cuts if tables.blocks[c] != tables.blocks[c - 1] or not inside[c]
        ),
        ties=tuple(_divided(tie, float(rest[tie.units[0]])) for tie in tables.ties),
    )


def _divided(tie: Tie, part: float) -> Tie:
    """What one of the tensor-parallel workers has of shared parameters."""
    sizes = tie.parameter_bytes * part, tie.trainable_bytes * part, tie.optimizer_bytes * part
    return Tie(tie.units, *sizes)


def _tables(costs: Costs) -> _Tables:
    """A model's arrays, built once."""
    kept = _made.get(id(costs))
    if kept is not None and kept[0]() is costs:
        return kept[1]
    if not costs.units:
        raise ArgumentError(
            "plan: the model has no unit whose cost is known; the planner needs one or more."
        )
    lines: dict[str, tuple[Array, Array]] = {}
    for name in _LINES:
        costs_of = [getattr(unit, name) for unit in costs.units]
        lines[name] = (
            np.array([cost.fixed for cost in costs_of], dtype=float),
            np.array([cost.per_sample for cost in costs_of], dtype=float),
        )
    flat = {
        name: np.array([getattr(unit, name) for unit in costs.units], dtype=float) for name in _FLAT
    }
    cuts = tuple(i + 1 for i, unit in enumerate(costs.units[:-1]) if unit.cut_after)
    recomputed = np.array([u.recomputed for u in costs.units])
    tables = _Tables(lines, flat, _blocks(costs.units), cuts, _ties(costs.units), recomputed)
    for key in [k for k, (ref, _) in _made.items() if ref() is None]:
        del _made[key]
    _made[id(costs)] = (weakref.ref(costs), tables)
    return tables


def _blocks(units: tuple[Unit, ...]) -> npt.NDArray[np.intp]:
    """Each unit's block as a number; -1 for those in none."""
    numbers: list[int] = []
    last = -1
    for i, unit in enumerate(units):
        if unit.block and (not i or unit.block != units[i - 1].block):
            last += 1
        numbers.append(last if unit.block else -1)
    return np.array(numbers, dtype=np.intp)


def _runs(blocks: npt.NDArray[np.intp]) -> list[slice]:
    """The consecutive units of each block."""
    edges = [0, *(int(i) for i in np.flatnonzero(np.diff(blocks)) + 1), len(blocks)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if blocks[a] >= 0]


def _ties(units: tuple[Unit, ...]) -> tuple[Tie, ...]:
    where: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        for name in unit.tied:
            where.setdefault(name, []).append(i)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, owners in where.items():
        if len(owners) > 1:
            groups.setdefault(tuple(owners), []).append(name)
    ties = []
    for shared in groups:
        first = units[shared[0]]
        size = float(
            min(
                [units[i].tied_bytes for i in shared if units[i].tied_bytes]
                or [first.parameter_bytes]
            )
        )
        part = size / first.parameter_bytes if first.parameter_bytes else 0.0
        ties.append(Tie(shared, size, first.trainable_bytes * part, first.optimizer_bytes * part))
    return tuple(ties)


@dataclass(frozen=True, eq=False, slots=True)
class Stages:
    """A cut's stages as arrays, one number per stage."""

    bounds: tuple[int, ...]
    worker: Array
    forward: Array
    backward: Array
    recompute: Array
    reduce: Array
    parameters: Array
    trainable: Array
    optimizer: Array
    buffers: Array
    saved: Array
    transient: Array
    send_bytes: Array
    back_bytes: Array
    tied_bytes: Array
    reduce_bytes: Array


def ring(ranks: int) -> float:
    """Bytes a worker sends per byte of a ring all-reduce."""
    return 2.0 * (ranks - 1) / ranks


def within(values: Array, starts: npt.NDArray[np.intp], count: int) -> Array:
    """Sum over a unit and those after it in its run."""
    total = np.cumsum(values[::-1])[::-1]
    ends = np.append(starts[1:], count)
    behind = np.append(total, 0.0)[ends]
    return np.asarray(total - np.repeat(behind, np.diff([*starts, count])), dtype=float)


def edges(blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Units that start a block, or a run outside blocks."""
    return np.concatenate([[0], np.flatnonzero(np.diff(blocks)) + 1]).astype(np.intp)


_SUMMED = (
    "forward",
    "backward",
    "recompute",
    "reduce",
    "buffers",
    "saved",
    "reduce_bytes",
)


def stage_arrays(made: Chain, bounds: tuple[int, ...], plan: Plan) -> Stages:
    """Sums over each stage's units."""
    starts = np.array(bounds[:-1])
    count = len(starts)
    worker = np.array([worker_of(s, plan.pipeline) for s in range(count)])

    def sums(values: Array) -> Array:
        return np.asarray(np.add.reduceat(values, starts), dtype=float)

    parameters, trainable, optimizer = (
        sums(made.parameters),
        sums(made.trainable),
        sums(made.optimizer),
    )
    tied = np.zeros(count)
    for tie in made.ties:
        held, made_at = holders(tie, bounds, worker)
        first = int(np.searchsorted(starts, tie.units[0], side="right")) - 1
        trainable[first] -= tie.trainable_bytes
        for s, last in zip(held, made_at, strict=True):
            trainable[last] += tie.trainable_bytes
            if len(held) > 1:
                tied[s] += tie.trainable_bytes
            if s != first:
                parameters[s] += tie.parameter_bytes
                optimizer[s] += tie.optimizer_bytes
    ends = np.array(bounds[1:]) - 1
    apart = worker[1:] != worker[:-1]
    send = np.zeros(count)
    back = np.zeros(count)
    send[:-1] = made.crossing[ends[:-1]] * apart
    back[1:] = made.crossing_grad[ends[:-1]] * apart
    return Stages(
        bounds=bounds,
        worker=worker,
        parameters=parameters,
        trainable=trainable,
        optimizer=optimizer,
        transient=np.asarray(np.maximum.reduceat(made.transient_backward, starts), dtype=float),
        send_bytes=send,
        back_bytes=back,
        tied_bytes=tied,
        **{name: sums(getattr(made, name)) for name in _SUMMED},
    )


def by_worker(values: Array, stages: Stages, workers: int) -> Array:
    """Per-stage numbers summed by worker."""
    return np.asarray(
        np.bincount(stages.worker.astype(np.intp), weights=values, minlength=workers), dtype=float
    )


def closed_form(
    plan: Plan, stages: Stages, micro_batches: int, overhead_seconds: float, send_seconds: float
) -> Timeline:
    """The textbook's step: the busiest worker, plus the others' time for one micro-batch."""
    workers = plan.pipeline
    each = by_worker(stages.forward + stages.backward + 2 * overhead_seconds, stages, workers)
    busiest = float(each.max())
    wait = (float(each.sum()) - busiest + send_seconds) / plan.virtual
    seconds = micro_batches * busiest + wait
    busy = tuple((micro_batches * each).tolist())
    return Timeline(seconds, busy, (seconds,) * workers, ())
