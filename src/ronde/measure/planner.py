"""Measure a script's model inside the script, then predict and rank every plan.

``ronde plan`` starts the script under a :class:`Gauge`. At ``distribute``, the gauge measures the
model's memory and time, writes the costs for the command to read, and ends the process.
``plan="auto"`` does the same in the workers themselves, then continues with the best plan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ronde.capture import watching
from ronde.capture.follow import follow
from ronde.measure.bench_links import calibrate, resident
from ronde.measure.cost_lines import line
from ronde.measure.model_units import ModelUnit
from ronde.measure.pipeline_overhead import (
    action_seconds,
    clip_fixed_seconds,
    optimizer_fixed_seconds,
    split_seconds,
)
from ronde.measure.script_loop import own_loop
from ronde.measure.stand_in import untouched
from ronde.measure.tensor_units import divisible
from ronde.measure.time_units import loaded, measure
from ronde.parallel import Work, batchnorms
from ronde.parallel.choose_cut import usable
from ronde.plan import SPLIT_FIELDS, Plan
from ronde.predict import (
    Cluster,
    Costs,
    Explanation,
    LinearCost,
    Prediction,
    corrected,
    explain,
    record,
)
from ronde.predict.search import search
from ronde.run import hooks
from ronde.run.check_prediction import Forecast
from ronde.watch import MARK
from ronde.world import ArgumentError, RondeError, World, threads_per_worker
from ronde.world.consensus import broadcast_json
from ronde.world.tensors import tensors_in

__all__ = [
    "Gauge",
    "answer",
    "carried_out",
    "choose_plan",
    "install_gauge",
    "load_costs",
    "threads_on",
]


_before: int | None = None  # bytes of this process when its script began

# hosts have fast and slow seconds: what is usual shows after some
_LOADED_ROUNDS, _LOADED_SECONDS = (7, 8.0)
_LEAST_FACTOR = 0.5  # what was timed alone was disturbed then


def install_gauge() -> None:
    """Look on in this process, where ``RONDE_STUDY=plan`` asks for it."""
    global _before
    _before = resident()
    hooks.observer = Gauge(
        json.loads(os.environ.get("RONDE_STUDY_OPTIONS", "{}")),
        Path(os.environ["RONDE_STUDY_FILE"]),
    )


def _tell(text: str) -> None:
    if os.environ.get("RONDE_LAUNCHER_PID"):
        os.write(1, (MARK + json.dumps({"study": text}) + "\n").encode())


class Gauge(hooks.Observer):
    """Measures at ``distribute``, writes what it found, and ends the process.

    Args:
        options: ``threads``, ``accept_noise``, ``devices`` that are planned for.
        file: where the costs and the batch contract are written, as JSON.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file

    def count_workers(self, workers: int) -> int:
        """See :class:`Observer`: those that are planned for, not those that measure."""
        return int(self.options.get("devices") or workers)

    def on_plan(self, plan: Plan, work: Work, calls: Any, me: World) -> Plan:
        """See :class:`Observer`."""
        costs = gauge(
            work,
            plan,
            calls,
            self.options.get("threads"),
            bool(self.options.get("accept_noise")),
            _tell,
        )
        if not me.is_main:
            raise SystemExit(0)
        temporary = self.file.with_suffix(".writing")
        temporary.write_text(json.dumps({"costs": costs.to_dict(), "plan": plan.to_dict()}))
        temporary.rename(self.file)
        raise SystemExit(0)


def gauge(
    work: Work,
    plan: Plan,
    calls: Any,
    threads: int | None,
    accept_noise: bool,
    tell: Callable[[str], None],
) -> Costs:
    """The costs of a script's model on the device at hand."""
    beside = max(0.0, float(resident() - _before) - _held(work)) if _before is not None else 0.0
    costs = measure(
        work.model,
        work.optimizer,
        calls,
        work.sample,
        plan.batch_size,
        device=next((p.device for p in work.model.parameters()), torch.device("cpu")),
        precision=plan.precision,
        threads=threads,
        clips=plan.clip_norm is not None,
        on_noise="note" if accept_noise else "error",
        tell=tell,
    )
    costs = dataclasses.replace(costs, script_bytes=beside)
    counted = _cut_as_followed(_counted(costs, work, plan), work, plan)
    return divisible(_under_load(counted, work, plan, calls), work, calls, plan.precision)


def _held(work: Work) -> float:
    """Bytes of the host's memory that the model and its optimizer take."""
    tensors = [
        *work.model.parameters(),
        *work.model.buffers(),
        *(p.grad for p in work.model.parameters() if p.grad is not None),
    ]
    tensors += tensors_in(list(work.optimizer.state.values()), attributes=True)
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage()
        for t in tensors
        if t.device.type == "cpu" and t.layout is torch.strided
    }
    return float(sum(s.nbytes() for s in storages.values()))


def _cut_as_followed(costs: Costs, work: Work, plan: Plan) -> Costs:
    """The costs without places to cut where no pipeline can be carried out: the script's loop or
    the model does not let it.
    """
    if not any(unit.cut_after for unit in costs.units[:-1]):
        return costs
    if plan.sync_batchnorm and batchnorms(work.model):
        return _uncut(
            costs,
            "sync_batchnorm=True normalises over the global batch, a pipeline's "
            "micro-batches come one by one",
        )
    if (line := own_loop()) is not None:
        return _uncut(
            costs,
            f"the script owns its loop (run.backward, {line}), a pipeline needs run.step(batch)",
        )
    try:
        batch = work.sample(1)
        with untouched(work.model), watching(), torch.enable_grad():
            trace = follow(work.model, lambda: work.compute(batch))
            if usable(trace):
                return costs
            why = next((f": {point.name}: {point.why_not}" for point in trace.points()), "")
    except ArgumentError as error:
        why = f": {error}"
    except Exception:
        return costs  # it is told where a pipeline is asked for
    return _uncut(costs, f"there is no place to cut the model{why}")


def _uncut(costs: Costs, why: str) -> Costs:
    units = tuple(dataclasses.replace(unit, cut_after=False) for unit in costs.units)
    return dataclasses.replace(costs, units=units, notes=(*costs.notes, f"no pipeline: {why}"))


def _counted(costs: Costs, work: Work, plan: Plan) -> Costs:
    """Which parameters each unit trains, and what of an optimizer's step and of a pipeline's does
    not come from their size.
    """
    holders = {unit.name: i for i, unit in enumerate(costs.units)}
    sizes: list[list[int]] = [[] for _ in costs.units]
    for name, p in work.model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in holders:
            path = path.rpartition(".")[0]
        if p.requires_grad:
            sizes[holders.get(path, 0)].append(p.numel() * p.element_size())
    units = tuple(
        dataclasses.replace(u, tensors=len(each), tensor_bytes=tuple(each))
        for u, each in zip(costs.units, sizes, strict=True)
    )
    fixed = min(optimizer_fixed_seconds(work.model, work.optimizer), costs.optimizer_seconds)
    clip_fixed = clip_fixed_seconds(work.model) if plan.clip_norm is not None else 0.0
    return dataclasses.replace(
        costs,
        units=units,
        optimizer_fixed_seconds=fixed,
        clip_fixed_seconds=min(clip_fixed, costs.clip_seconds),
        action_seconds=action_seconds(work),
        split_seconds=split_seconds(work, costs.batch_size),
    )


def _under_load(costs: Costs, work: Work, plan: Plan, calls: Any) -> Costs:
    """Where several workers measure: their layers' and their optimizer's times while all of them
    work, each round as long as its slowest.

    The least of many rounds is that of a moment when the others rest, and cores that share a
    memory, or are halves of one, are slower when all are at work.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not costs.measured_samples:
        return costs
    device = next(p.device for p in work.model.parameters())
    own = sorted(costs.measured_samples)
    agreed = torch.tensor([own[0], own[len(own) // 2], own[-1]], device=device)
    # a slower worker may have had time for smaller ones only
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    sizes = sorted({int(n) for n in agreed})
    chain = [ModelUnit(u.name, u.alike) for u in costs.units]
    batches = [work.sample(n) for n in sizes]
    began = time.perf_counter()
    rounds = 0

    def enough() -> bool:
        nonlocal rounds
        rounds += 1
        spent = torch.tensor(time.perf_counter() - began, device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # all stop in the same round
        return rounds >= _LOADED_ROUNDS and (
            device.type != "cpu" or float(spent) >= _LOADED_SECONDS
        )

    found = loaded(
        work.model,
        work.optimizer,
        calls,
        batches,
        precision=plan.precision,
        enough=enough,
        wait=dist.barrier,
        chain=chain,
        clips=plan.clip_norm is not None,
        first=dist.get_rank() == 0,
    )

    def over_workers(values: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, how)
        return [float(v) for v in tensor]

    def usual(values: list[float]) -> float:
        """The middle of what the slowest worker took."""
        return statistics.median(over_workers(values, dist.ReduceOp.MAX))

    passes = [usual([taken[k] for taken in found.passes]) for k in range(len(sizes))]
    tried = torch.tensor(len(found.updates), device=device)
    dist.all_reduce(tried, dist.ReduceOp.MIN)
    # After a pass in which they waited for each other, they do not wait for this.

    def usually(values: list[float]) -> float:
        """The middle of what a worker took."""
        return (
            statistics.median(over_workers(values, dist.ReduceOp.SUM)) / dist.get_world_size()
            if values and int(tried) == rounds
            else 0.0
        )

    update, clip = usually(found.updates), usually(found.clips)
    # Where workers wait for each other at every layer, each layer takes as long as the slowest
    # worker takes for it.
    together = usual([sum(each) for each in found.units])
    each_slowest = over_workers(
        [seconds for row in found.units for seconds in row], dist.ReduceOp.MAX
    )
    apart = len(found.units[0])
    lockstep = (
        statistics.median(sum(each_slowest[i * apart : (i + 1) * apart]) for i in range(rounds))
        / together
    )
    alone = [
        sum(u.forward_seconds.at(n) + u.backward_seconds.at(n) for u in costs.units) for n in sizes
    ]
    factors = [
        max(_LEAST_FACTOR, taken / least) for taken, least in zip(passes, alone, strict=True)
    ]
    units = tuple(
        dataclasses.replace(
            u,
            forward_seconds=_through(u.forward_seconds, sizes, factors),
            backward_seconds=_through(u.backward_seconds, sizes, factors),
        )
        for u in costs.units
    )
    factor = max(1.0, statistics.median(factors))
    # What one takes while the others wait, on the same worker and in the same rounds: what was
    # timed alone before is the least of many.
    shared = (
        [statistics.median(taken[-1] for taken in found.passes) / statistics.median(found.alone)]
        if found.alone
        else [1.0]
    )
    told = torch.tensor(shared, dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    note = f"layers take × {factor:.2f} while all workers compute"
    return dataclasses.replace(
        costs,
        units=units,
        optimizer_seconds=max(costs.optimizer_seconds, update),
        lockstep=max(1.0, lockstep),
        contention=max(1.0, float(told)),
        accumulate_seconds=max(0.0, usual(found.further) - passes[0]),
        again_seconds={
            level: _through(taken, sizes, factors) for level, taken in costs.again_seconds.items()
        },
        optimizer_fixed_seconds=min(
            max(costs.optimizer_seconds, update), costs.optimizer_fixed_seconds * factor
        ),
        clip_seconds=max(costs.clip_seconds, clip),
        clip_fixed_seconds=min(max(costs.clip_seconds, clip), costs.clip_fixed_seconds * factor),
        action_seconds=costs.action_seconds * factor,
        split_seconds=LinearCost(
            costs.split_seconds.fixed * factor, costs.split_seconds.per_sample * factor
        ),
        notes=(*costs.notes, note) if factor > 1.0 else costs.notes,
    )


def _through(one: LinearCost, sizes: list[int], factors: list[float]) -> LinearCost:
    """The line of a unit that takes so many times longer at each of some sizes."""
    if len(sizes) == 1:
        return LinearCost(one.fixed * factors[0], one.per_sample * factors[0])
    return line([(n, one.at(n) * factor) for n, factor in zip(sizes, factors, strict=True)])


def load_costs(file: Path) -> tuple[Costs, Plan]:
    """What a :class:`Gauge` wrote.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    try:
        found = json.loads(file.read_text())
    except OSError:
        raise RondeError(
            "the script ended without calling ronde.distribute: there is nothing to plan."
        ) from None
    return Costs.from_dict(found["costs"]), Plan.from_dict(found["plan"])


def answer(
    costs: Costs,
    cluster: Cluster,
    workers: int,
    like: Plan,
    optimize: Any = "speed",
    with_flips: bool = True,
) -> Explanation:
    """Search, and say why."""
    cluster = corrected(cluster)
    found = search(costs, cluster, workers, optimize=optimize, like=like)
    return explain(found, costs, cluster, with_flips=with_flips)


def choose_plan(plan: Plan, work: Work, calls: Any, me: World) -> tuple[Plan, Forecast]:
    """``plan="auto"``: all workers measure at once, as they will train; rank 0 decides.

    Returns:
        The plan, and what is predicted for it.
    """
    _tell("measuring, to choose a plan")
    random = torch.get_rng_state()
    try:
        costs = gauge(work, plan, calls, None, True, _tell)
        cluster = (
            calibrate(me, quick=True, accept_noise=True)
            if me.size > 1
            else Cluster(devices_per_node=1)
        )
        # measured with the script's libraries and data there, and its model
        if me.device.type == "cpu":
            cluster = dataclasses.replace(
                cluster, base_bytes=max(0.0, cluster.base_bytes - _held(work))
            )
    finally:
        torch.set_rng_state(random)
    told: dict[str, Any] = {}
    if me.is_main:
        try:
            explanation = answer(costs, cluster, me.size, plan, with_flips=False)
            best = explanation.found.best
            told = {
                "plan": carried_out(best).to_dict(),
                "raw": best.raw_step_seconds,
                "seconds": best.step_seconds,
                "terms": best.terms,
                "sentence": explanation.sentence,
            }
            if best.verdict == "does not fit":
                told = {"error": explanation.sentence}
        except ArgumentError as error:
            told = {"error": f"plan='auto': {error}"}
    told = broadcast_json(me, told)
    if "error" in told:
        raise ArgumentError(told["error"])
    winner = Plan.from_dict(told["plan"])
    fields: dict[str, Any] = {
        name: getattr(winner, name) for name in (*SPLIT_FIELDS, "micro_batch", "accumulation")
    }
    chosen = dataclasses.replace(plan, **fields)
    keep = partial(record, cluster.name, winner.family) if me.is_main else None
    return chosen, Forecast(
        winner.family,
        told["raw"],
        told["seconds"],
        told["terms"],
        keep,
        told["sentence"],
        winner.shard == "optimizer",
    )


def carried_out(best: Prediction) -> Plan:
    """The plan with the cut that was predicted."""
    return (
        dataclasses.replace(best.plan, split_at=best.split_at)
        if best.plan.pipeline > 1
        else best.plan
    )


def threads_on(cluster: Cluster) -> int | None:
    """Compute threads of a worker on this machine, as ``ronde run`` gives it."""
    return threads_per_worker(cluster.devices_per_node) if cluster.device == "cpu" else None
