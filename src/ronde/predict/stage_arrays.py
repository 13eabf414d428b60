"""A cut pipeline's stages as arrays, and sums over blocks of units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ronde.plan.plan import Plan
from ronde.plan.schedules import worker_of
from ronde.predict.simulate import Timeline
from ronde.predict.unit_arrays import Array, Chain, holders


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
        forward=sums(made.forward),
        backward=sums(made.backward),
        recompute=sums(made.recompute),
        reduce=sums(made.reduce),
        parameters=parameters,
        trainable=trainable,
        optimizer=optimizer,
        buffers=sums(made.buffers),
        saved=sums(made.saved),
        transient=np.asarray(np.maximum.reduceat(made.transient_backward, starts), dtype=float),
        send_bytes=send,
        back_bytes=back,
        tied_bytes=tied,
        reduce_bytes=sums(made.reduce_bytes),
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
