"""A model's units as arrays: costs at one micro-batch size, whole, divided or recomputed; and their
sums over the stages of a cut pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ronde.plan.plan import Plan
from ronde.plan.schedules import worker_of
from ronde.predict.costs import Array, Costs, Tie
from ronde.world import ArgumentError

Recompute = Literal["none", "selective", "full"]

_SELECTIVE_SHARE = 0.15
"""What ``"selective"`` adds to a unit's backward pass, as a share of its forward pass, where it was
not timed.
"""


@dataclass(frozen=True, eq=False)
class Links:
    """Arrays over the links of a chain, units or stages: seconds and bytes of one micro-batch on
    one worker.

    Attributes:
        forward, backward: seconds; tensor-parallel all-reduces and recomputation are in them.
        recompute: the part of ``backward`` that runs a forward pass again.
        reduce: the part of both that all-reduces activations over tensor-parallel workers.
        parameters, trainable, optimizer, buffers: bytes.
        saved: activations kept from forward to backward.
        transient_backward: most needed for a moment beside that in the backward pass, with what
            recomputation brings back.
        reduce_bytes: all-reduced per micro-batch over tensor-parallel workers, both ways.
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
    transient_backward: Array
    reduce_bytes: Array

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> Array:
        """Forward plus backward."""
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class Chain(Links):
    """The units.

    Attributes:
        transient: as ``transient_backward``, in the forward pass.
        late: gradients that its backward pass leaves behind for parameters of earlier units.
        crossing, crossing_grad: bytes that a cut after the unit sends, and gets back.
        blocks: which block a unit is part of, -1 where it is in none: what is recomputed, and
            gathered, together.
        cuts: units that a stage may begin with, without the first.
        ties: parameters shared by several units.
    """

    transient: Array
    late: Array
    crossing: Array
    crossing_grad: Array
    blocks: npt.NDArray[np.intp]
    cuts: tuple[int, ...]
    ties: tuple[Tie, ...]


@dataclass(frozen=True, eq=False)
class Stages(Links):
    """The stages of a cut.

    Attributes:
        bounds: first unit of each stage, and the number of units at the end.
        worker: that holds it.
        send_bytes, back_bytes: to the next stage, and to the one before, on other workers.
        tied_bytes: gradients of parameters that stages of several workers share.
    """

    bounds: tuple[int, ...]
    worker: Array
    send_bytes: Array
    back_bytes: Array
    tied_bytes: Array

    def by_worker(self, values: Array) -> Array:
        """Per-stage numbers summed by worker."""
        return np.bincount(self.worker.astype(np.intp), weights=values).astype(float)


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
    if not costs.units:
        raise ArgumentError(
            "plan: the model has no unit whose cost is known; the planner needs one or more."
        )
    arrays = costs.arrays

    def line(name: str) -> Array:
        fixed, per_sample = arrays[name]
        return np.asarray(fixed + per_sample * samples, dtype=float)

    share = arrays["tensor"]
    rest: Array = 1.0 - share * (1.0 - 1.0 / tensor)
    in_time = 1.0 - arrays["tensor_time"] * (1.0 - 1.0 / tensor)
    # The host launches every operator, however small its part: a backward pass has about two for
    # each one of the forward pass.
    launch = arrays["operations"] * launch_seconds
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
        messages = np.maximum(1.0, arrays["tensor_reduces"])
        sizes = zip(reduce_bytes.tolist(), messages.tolist(), strict=True)
        reduce = np.array([n * reduce_seconds(b / n) if b else 0.0 for b, n in sizes])
    again = np.zeros(len(forward))
    # all-reduces of activations: forward, backward, and once more if the forward pass runs again
    ways = 2.0
    inside = arrays["recomputed"] > 0
    if recompute != "none":
        kept = line(f"{recompute}_saved_bytes")
        before = line("saved_bytes") - kept  # what is computed again where nothing is divided
        whole_ends = 2.0 * reduce_bytes  # what a divided block is given and ends with
        kept = kept - np.maximum(0.0, share * kept - whole_ends) * (1.0 - 1.0 / tensor)
        transient = line(f"{recompute}_forward_bytes") * rest
        transient_backward = line(f"{recompute}_backward_bytes")
        for units in _runs(costs.blocks) if tensor > 1 else ():
            transient_backward[units] = np.maximum(
                0.0, transient_backward[units] - float(before[units].sum())
            ) * rest[units] + float((saved - kept)[units].sum())
        saved = kept
        again = np.where(inside, forward, 0.0)
        if recompute == "selective":
            again = _SELECTIVE_SHARE * again
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
    cuts = np.flatnonzero(arrays["cut_after"][:-1]) + 1
    if recompute != "none":  # a block that is computed again is one piece
        cuts = cuts[(costs.blocks[cuts] != costs.blocks[cuts - 1]) | ~inside[cuts]]
    return Chain(
        forward=forward + reduce,
        backward=backward + again + (ways - 1.0) * reduce,
        recompute=again,
        reduce=ways * reduce,
        parameters=arrays["parameter_bytes"] * rest,
        trainable=arrays["trainable_bytes"] * rest,
        optimizer=arrays["optimizer_bytes"] * rest,
        buffers=arrays["buffer_bytes"],
        saved=saved,
        transient=transient,
        transient_backward=transient_backward,
        late=arrays["tied_grad_bytes"] * rest,
        crossing=line("crossing_bytes"),
        crossing_grad=line("crossing_grad_bytes"),
        reduce_bytes=ways * reduce_bytes,
        blocks=costs.blocks,
        cuts=tuple(cuts.tolist()),
        ties=tuple(tie.times(float(rest[tie.units[0]])) for tie in costs.ties),
    )


def _runs(blocks: npt.NDArray[np.intp]) -> list[slice]:
    """The consecutive units of each block."""
    ends = [*edges(blocks).tolist(), len(blocks)]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if blocks[a] >= 0]


def holders(tie: Tie, bounds: tuple[int, ...], worker: Array) -> tuple[list[int], list[int]]:
    """First and last stage of each worker that shares a tie; the last makes the gradient."""
    stages = sorted({int(np.searchsorted(bounds, u, side="right")) - 1 for u in tie.units})
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for s in stages:
        firsts.setdefault(int(worker[s]), s)
        lasts[int(worker[s])] = s
    return list(firsts.values()), list(lasts.values())


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


def stage_arrays(made: Chain, bounds: tuple[int, ...], plan: Plan) -> Stages:
    """Sums over each stage's units."""
    starts = np.array(bounds[:-1])
    count = len(starts)
    worker = np.array([worker_of(s, plan.pipeline) for s in range(count)])

    def sums(values: Array) -> Array:
        return np.asarray(np.add.reduceat(values, starts), dtype=float)

    summed = {each.name: sums(getattr(made, each.name)) for each in dataclasses.fields(Links)}
    summed["transient_backward"] = np.maximum.reduceat(made.transient_backward, starts)
    parameters, trainable = summed["parameters"], summed["trainable"]
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
                summed["optimizer"][s] += tie.optimizer_bytes
    ends = np.array(bounds[1:]) - 1
    # Two stages of one worker hand over a tensor: nothing is sent.
    apart = worker[1:] != worker[:-1]
    send = np.zeros(count)
    back = np.zeros(count)
    send[:-1] = made.crossing[ends[:-1]] * apart
    back[1:] = made.crossing_grad[ends[:-1]] * apart
    return Stages(
        **summed, bounds=bounds, worker=worker, send_bytes=send, back_bytes=back, tied_bytes=tied
    )
