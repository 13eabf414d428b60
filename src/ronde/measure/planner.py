"""Measure a script's model inside the script, then predict and rank every plan.

``ronde plan`` starts the script under a :class:`Gauge`. At ``distribute``, the gauge measures the
model's memory and time, writes the costs for the command to read, and ends the process.
``plan="auto"`` does the same in the workers themselves, then continues with the best plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ronde.capture import watching
from ronde.capture.follow import follow
from ronde.measure.bench_links import calibrate, resident
from ronde.measure.light_weights import NoInitialValues
from ronde.measure.script_loop import own_loop
from ronde.measure.stand_in import untouched
from ronde.measure.storage_ledger import storages
from ronde.measure.study import (
    load_study,
    refuse_batches,
    report_progress,
    study_target,
    write_study,
)
from ronde.measure.tensor_units import divisible
from ronde.measure.time_units import measure
from ronde.parallel import Work, batchnorms
from ronde.parallel.choose_cut import usable
from ronde.plan import SPLIT_FIELDS, Plan
from ronde.predict import Cluster, Costs, Explanation, Prediction, explain
from ronde.predict.search import search
from ronde.run import hooks
from ronde.world import ArgumentError, World, threads_per_worker
from ronde.world.consensus import broadcast_json
from ronde.world.tensors import tensors_in

_before: int | None = None  # bytes of this process when its script started


def install_gauge() -> None:
    """Observe this process, because of ``RONDE_STUDY=plan``."""
    global _before
    _before = resident()
    hooks.observer = Gauge(*study_target())


class Gauge(hooks.Observer):
    """Measures at ``distribute``, writes the costs and the batch contract, and ends the process.

    Args:
        options: ``threads``, ``devices`` to plan for, and ``counted`` if only the model's work is
            counted, because the devices are not these.
        file: for the result, as JSON.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file
        self._light = contextlib.ExitStack()
        if options.get("counted"):
            self._light.enter_context(NoInitialValues())

    def count_workers(self, workers: int) -> int:
        """See :class:`Observer`: devices to plan for, not workers that measure."""
        return int(self.options.get("devices") or workers)

    def on_open(self, opening: hooks.Opening) -> None:
        """See :class:`Observer`."""
        refuse_batches(opening.taken.order)

    def on_plan(self, plan: Plan, work: Work, calls: Any, me: World) -> Plan:
        """See :class:`Observer`."""
        self._light.close()
        threads, counted = self.options.get("threads"), bool(self.options.get("counted"))
        costs = gauge(work, plan, calls, threads, report_progress, counted=counted)
        if me.is_main:
            write_study(self.file, {"costs": costs.to_dict(), "plan": plan.to_dict()})
        raise SystemExit(0)


def gauge(
    work: Work,
    plan: Plan,
    calls: Any,
    threads: int | None,
    tell: Callable[[str], None],
    *,
    counted: bool = False,
) -> Costs:
    """Measure the costs of a script's model on this process's device.

    Args:
        counted: only count its work, for devices that are not here: their times follow from it, so
            a busy machine disturbs nothing.
    """
    script_bytes = 0.0
    if _before is not None:
        script_bytes = max(0.0, float(resident() - _before) - _host_bytes(work))
    costs = measure(
        work.model,
        work.optimizer,
        calls,
        work.sample,
        plan.batch_size,
        precision=plan.precision,
        threads=None if counted else threads,
        clips=plan.clip_norm is not None,
        timed=not counted,
        tell=tell,
    )
    tell("looking for places to cut and to divide the model")
    costs = _with_real_cuts(replace(costs, script_bytes=script_bytes), work, plan)
    return divisible(costs, work, calls, plan.precision, timed=not counted)


def _host_bytes(work: Work) -> float:
    """Host memory of the model and its optimizer."""
    gradients = [p.grad for p in work.model.parameters() if p.grad is not None]
    tensors = [*work.model.parameters(), *work.model.buffers(), *gradients]
    tensors += tensors_in(list(work.optimizer.state.values()), attributes=True)
    on_host = storages([t for t in tensors if t.device.type == "cpu"])
    return float(sum({s._cdata: s.nbytes() for s, _ in on_host}.values()))


def _with_real_cuts(costs: Costs, work: Work, plan: Plan) -> Costs:
    """The costs without cuts if the script's loop or the model rules out a pipeline."""
    if not any(unit.cut_after for unit in costs.units[:-1]):
        return costs
    why = _why_uncut(work, plan)
    if why is None:
        return costs
    units = tuple(replace(unit, cut_after=False) for unit in costs.units)
    return replace(costs, units=units, notes=(*costs.notes, f"no pipeline: {why}"))


def _why_uncut(work: Work, plan: Plan) -> str | None:
    if plan.sync_batchnorm and batchnorms(work.model):
        return (
            "sync_batchnorm=True normalizes over the global batch, but a pipeline runs one "
            "micro-batch at a time"
        )
    if (line := own_loop()) is not None:
        return f"the script owns its loop (run.backward, {line}), a pipeline needs run.step(batch)"
    try:
        batch = work.sample(1)
        with untouched(work.model), watching(), torch.enable_grad():
            trace = follow(work.model, lambda: work.compute(batch))
            if usable(trace):
                return None
            why = next((f": {point.name}: {point.why_not}" for point in trace.points()), "")
    except ArgumentError as error:
        why = f": {error}"
    except Exception:
        return None  # requesting a pipeline reports it
    return f"there is no place to cut the model{why}"


def load_costs(file: Path) -> tuple[Costs, Plan]:
    """Read the result of a :class:`Gauge`.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    values = load_study(file, "plan")
    return Costs.from_dict(values["costs"]), Plan.from_dict(values["plan"])


def answer(
    costs: Costs,
    cluster: Cluster,
    workers: int,
    like: Plan,
    optimize: Any = "speed",
    with_flips: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Explanation:
    """Search for the best plan and explain it; ``tell`` shows progress."""
    result = search(costs, cluster, workers, optimize=optimize, like=like, tell=tell)
    return explain(result, costs, cluster, with_flips=with_flips, tell=tell)


def choose_plan(plan: Plan, work: Work, calls: Any, me: World) -> tuple[Plan, str]:
    """Carry out ``plan="auto"``: all workers measure at once, as they will train; rank 0 decides.

    Returns:
        The plan, and why it.
    """
    report_progress("measuring, to choose a plan")
    # A plan that is chosen must not change what the script draws afterwards.
    random = torch.get_rng_state()
    try:
        costs = gauge(work, plan, calls, None, report_progress)
        cluster = Cluster(devices_per_node=1)
        if me.size > 1:
            cluster = calibrate(me, quick=True)
        if me.device.type == "cpu":  # measured in processes that hold the model already
            base_bytes = max(0.0, cluster.base_bytes - _host_bytes(work))
            cluster = replace(cluster, base_bytes=base_bytes)
    finally:
        torch.set_rng_state(random)
    choice: dict[str, Any] = {}
    if me.is_main:
        try:
            explanation = answer(costs, cluster, me.size, plan, with_flips=False)
            best = explanation.result.best
            choice = {
                "plan": with_predicted_cut(best).to_dict(),
                "sentence": explanation.sentence,
            }
            if best.verdict == "does not fit":
                choice = {"error": explanation.sentence}
        except ArgumentError as error:
            choice = {"error": f"plan='auto': {error}"}
    choice = broadcast_json(me, choice)
    if "error" in choice:
        raise ArgumentError(choice["error"])
    winner = Plan.from_dict(choice["plan"])
    fields: dict[str, Any] = {
        name: getattr(winner, name) for name in (*SPLIT_FIELDS, "micro_batch", "accumulation")
    }
    return replace(plan, **fields), choice["sentence"]


def with_predicted_cut(best: Prediction) -> Plan:
    """The plan, with its pipeline cut where the prediction cuts it."""
    return replace(best.plan, split_at=best.split_at) if best.plan.pipeline > 1 else best.plan


def threads_on(cluster: Cluster) -> int | None:
    """Compute threads of a worker on this machine, as ``ronde run`` gives it."""
    return threads_per_worker(cluster.devices_per_node) if cluster.device == "cpu" else None
