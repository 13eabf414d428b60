"""Each pipeline worker's list of actions under each schedule.

GPipe and 1F1B are written here (torch's ``Schedule1F1B`` lists the wrong micro-batches on the last
worker, PyTorch 2.13). Looped and interleaved come from torch.distributed.pipelining's own classes,
called on an object that only has the sizes. No process group is needed, and torch is imported only
for those.

Sources: GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019; interleaved, Narayanan et al. 2021;
looped, Lamy-Poirier 2022 ("breadth-first").
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from ronde.plan.plan import Schedule
from ronde.world import ArgumentError

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; backward; send and receive activations (F) and their gradients (B)."""


class Action(NamedTuple):
    """One action of a worker.

    Attributes:
        stage: of which stage of the pipeline. A receive names the stage that receives, a send the
            one that sends.
        kind: what.
        micro: with which micro-batch.
    """

    stage: int
    kind: Kind
    micro: int


def worker_of(stage: int, workers: int) -> int:
    """The pipeline worker of a stage: round-robin.

    Example:
        >>> [worker_of(s, 2) for s in range(4)]
        [0, 1, 0, 1]
    """
    return stage % workers


def allowed(schedule: str, workers: int, virtual: int, micro_batches: int) -> str | None:
    """Why a schedule cannot run, or None.

    Unlike torch's own class, this 1F1B also runs with fewer micro-batches than workers.

    Example:
        >>> allowed("interleaved", 4, 2, 10)
        >>> print(allowed("interleaved", 4, 2, 9))  # doctest: +NORMALIZE_WHITESPACE
        interleaved needs micro-batches that divide into 2 equal rounds for 4 workers, found
        9: take 8 or 10
    """
    if schedule not in get_args(Schedule):
        return f"schedule {schedule!r} is not known: choose one of {', '.join(get_args(Schedule))}"
    for name, value in (
        ("workers", workers),
        ("virtual", virtual),
        ("micro-batches", micro_batches),
    ):
        if value < 1:
            return f"{schedule} needs {name} of 1 or more, found {value}"
    if schedule in ("gpipe", "1f1b") and virtual != 1:
        return (
            f"{schedule} has one stage per worker, found virtual={virtual}: choose interleaved "
            "or looped"
        )
    if schedule == "interleaved" and virtual < 2:
        return "interleaved needs two stages per worker or more, found virtual=1: choose 1f1b"
    if schedule == "interleaved":
        rounds = max(1, micro_batches // workers)
        if micro_batches % rounds:
            near = sorted({micro_batches // rounds * rounds, -(-micro_batches // rounds) * rounds})
            fine = [str(m) for m in near if m % max(1, m // workers) == 0]
            take = f": take {' or '.join(fine)}" if fine else ""
            return (
                f"{schedule} needs micro-batches that divide into {rounds} equal rounds for "
                f"{workers} workers, found {micro_batches}{take}"
            )
    return None


def actions(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int, communications: bool = False
) -> list[list[Action]]:
    """Each pipeline worker's actions, in order.

    Args:
        schedule: which order.
        workers: that the model is cut over.
        virtual: stages per worker.
        micro_batches: of one optimizer step and one replica.
        communications: with sends and receives between workers, placed as torch's runtime places
            them, so that they pair without deadlock; none between two stages of one worker.

    Raises:
        ArgumentError: the schedule does not allow these numbers.

    Example:
        >>> [a.kind + str(a.micro) for a in actions("1f1b", 2, 1, 3)[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    reason = allowed(schedule, workers, virtual, micro_batches)
    if reason:
        raise ArgumentError(f"pipeline: {reason}.")
    lists = (
        _with_sends(schedule, workers, virtual, micro_batches)
        if communications
        else _compute(schedule, workers, virtual, micro_batches)
    )
    return [list(one) for one in lists]


@functools.lru_cache(maxsize=512)
def in_flight(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int
) -> tuple[int, ...]:
    """Largest number of micro-batches whose activations a stage holds: forwards begun minus
    backwards done.

    Example:
        >>> in_flight("1f1b", 4, 1, 8), in_flight("gpipe", 4, 1, 8)
        ((4, 3, 2, 1), (8, 8, 8, 8))
    """
    stages = workers * virtual
    # A formula where there is one: the planner asks for thousands of plans.
    if schedule == "1f1b":
        return tuple(min(micro_batches, workers - s) for s in range(stages))
    if schedule in ("gpipe", "looped"):
        return (micro_batches,) * stages
    most = [0] * stages
    for worker in range(workers):
        for turn, held in enumerate(_most_held(worker, workers, virtual, micro_batches)):
            most[turn * workers + worker] = held
    return tuple(most)


def _most_held(worker: int, workers: int, virtual: int, micro_batches: int) -> list[int]:
    """Largest number of micro-batches each stage holds, in torch's interleaved order."""
    rounds = max(1, micro_batches // workers)
    size = micro_batches // rounds
    total = virtual * micro_batches
    warm = min((virtual - 1) * size + 2 * (workers - 1 - worker), total)
    now, most = [0] * virtual, [0] * virtual
    for op in range(total):
        turn = op // size % virtual
        now[turn] += 1
        most[turn] = max(most[turn], now[turn])
        done = op - warm
        if done >= 0:
            now[virtual - 1 - done // size % virtual] -= 1
        if done > 2 * size * virtual:
            break  # a whole round has come and gone: the next ones are the same
    return most


def bubble(schedule: Schedule, workers: int, virtual: int, micro_batches: int) -> float:
    """The textbook's waiting share for equal stages, free sends and B = 2 F.

    Prunes plans before simulation.

    Example:
        >>> bubble("1f1b", 4, 1, 12)
        0.2
    """
    wait = float(workers - 1)
    work = float(micro_batches * virtual)
    if schedule in ("gpipe", "1f1b"):
        work = float(micro_batches)
    return wait / (work + wait)


@functools.lru_cache(maxsize=16)
def _compute(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Each worker's forwards and backwards."""
    if schedule == "gpipe":
        return tuple(
            tuple(Action(w, "F", m) for m in range(micro_batches))
            + tuple(Action(w, "B", m) for m in range(micro_batches))
            for w in range(workers)
        )
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(w, workers, micro_batches) for w in range(workers))
    return tuple(
        tuple(_own_schedules(a) for a in row if a is not None)
        for row in _torch_order(schedule, workers, virtual, micro_batches)
    )


def _one_forward_one_backward(worker: int, workers: int, micro_batches: int) -> tuple[Action, ...]:
    # Each worker runs ahead by as many micro-batches as there are workers after it, and itself.
    warm = min(micro_batches, workers - worker)
    row = [Action(worker, "F", m) for m in range(warm)]
    for m in range(micro_batches):
        row.append(Action(worker, "B", m))
        if warm + m < micro_batches:
            row.append(Action(worker, "F", warm + m))
    return tuple(row)


def _torch_order(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int
) -> list[list[Any]]:
    """Each worker's list from torch's own class, called on an object that only has the sizes."""
    from torch.distributed.pipelining import schedules as torch_schedules

    classes = {"looped": "ScheduleLoopedBFS", "interleaved": "ScheduleInterleaved1F1B"}
    cls = getattr(torch_schedules, classes[schedule])
    rounds = max(1, micro_batches // workers)
    sizes = SimpleNamespace(
        pp_group_size=workers,
        n_local_stages=virtual,
        num_stages=workers * virtual,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
        _stages=[None] * virtual,
        _num_stages=workers * virtual,
        _n_microbatches=micro_batches,
    )
    return [cls._calculate_single_rank_operations(sizes, worker) for worker in range(workers)]


@functools.lru_cache(maxsize=8)
def _with_sends(
    schedule: Schedule, workers: int, virtual: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    # Where a send must stand so that it meets its receive is torch's knowledge: it runs them.
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    orders: dict[int, list[Any]] = {
        w: [_Action(a.stage, _ComputationType.from_str(a.kind), a.micro) for a in row]
        for w, row in enumerate(_compute(schedule, workers, virtual, micro_batches))
    }
    lowered = _add_send_recv(orders, lambda stage: worker_of(stage, workers), workers * virtual)
    return tuple(tuple(_own_schedules(a) for a in lowered[w]) for w in range(workers))


def _own_schedules(action: Any) -> Action:
    return Action(action.stage_index, action.computation_type._value_, action.microbatch_index)
