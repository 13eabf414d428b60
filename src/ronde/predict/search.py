"""Search all plans the runtime supports: prune by memory and closed form, simulate the best, rank.

The global batch is fixed; micro-batches follow from it. A plan whose replicas would get less than
one sample is skipped.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ronde.plan.plan import Plan, Schedule, ShardLevel
from ronde.plan.schedules import allowed, micro_batches_of
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs
from ronde.predict.predict import Predictor
from ronde.predict.prediction import Prediction
from ronde.world import ArgumentError

_VERDICTS = {"fits": 0, "unknown": 0, "risky": 1, "does not fit": 2}
_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("zero-bubble", 1),
    ("looped", 2),
    ("zbv", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zero-bubble", 2),
    ("looped", 4),
)
_TENSOR = (2, 4, 8, 16)
_SHARDED: list[ShardLevel] = ["optimizer", "gradients", "parameters"]
# of step time, for each mechanism more: between two plans as fast, the simpler one
_SIMPLER = 0.005
# of step time at most, for what is not simple: as much as the measurements were disturbed
_DOUBT = 0.05
# how far a pipeline's closed form may be from its simulation: no more is ruled out by it
_INEXACT = 1.3


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plans: predicted in full, best first.
        families: the best of each family, best first; a family of which nothing fits is there with
            what comes nearest.
        considered: how many plans were looked at.
        simulated: how many were predicted in full.
        left_out: why the others were not, with how many.
        workers: of every plan.
        optimize: what best means.
        like: the plan whose other settings all have.
    """

    plans: tuple[Prediction, ...]
    families: dict[str, Prediction]
    considered: int
    simulated: int
    left_out: dict[str, int] = field(default_factory=dict)
    workers: int = 1
    optimize: Literal["speed", "memory"] = "speed"
    like: Plan | None = None

    @property
    def best(self) -> Prediction:
        """The winner. It may not fit: its verdict says so."""
        return self.plans[0]

    @property
    def runner_up(self) -> Prediction | None:
        """The best plan of another family, if there is one."""
        return next(
            (p for p in self.families.values() if p.plan.family != self.best.plan.family), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workers": self.workers,
            "optimize": self.optimize,
            "considered": self.considered,
            "simulated": self.simulated,
            "left_out": self.left_out,
            "families": {name: p.to_dict() for name, p in self.families.items()},
            "plans": [p.to_dict() for p in self.plans],
        }


def search(
    costs: Costs,
    cluster: Cluster,
    workers: int,
    *,
    optimize: Literal["speed", "memory"] = "speed",
    simulate: int = 50,
    prune: bool = False,
    like: Plan | None = None,
) -> SearchResult:
    """Find the best plans for ``workers`` workers.

    Args:
        costs: of the model; their ``batch_size`` is the global batch.
        cluster: what it would run on.
        workers: how many.
        optimize: the fastest step, or the least memory.
        simulate: how many plans are predicted in full at most, about; 0 for none, and an answer by
            closed form.
        prune: leave out what cannot be the fastest, by its computation alone: the same winner
            sooner, but families may be missing.
        like: a plan whose other settings (seed, precision, clipping …) all plans take.

    Raises:
        ArgumentError: ``workers`` is below 1, or every plan would leave a worker without a sample.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ArgumentError(f"workers={workers!r} must be a whole number, 1 or more.")
    predictor = Predictor(costs, cluster)
    base = dataclasses.replace(
        like or Plan(), workers=workers, batch_size=costs.batch_size, optimize=optimize
    )
    kept: dict[tuple[str, str], list[tuple[tuple[float, ...], int, Prediction]]] = {}
    left_out: dict[str, int] = {}
    considered = 0
    drawer_size = max(1, simulate)
    noise = max(costs.noise, cluster.noise)
    fastest = math.inf

    def look(plan: Plan) -> Prediction | None:
        nonlocal considered, fastest
        considered += 1
        if prune and optimize == "speed" and predictor.floor_seconds(plan) >= fastest:
            left_out["slower"] = left_out.get("slower", 0) + 1
            return None
        try:
            quick = predictor(plan, quick=True)
        except ArgumentError:
            left_out["cannot be cut so"] = left_out.get("cannot be cut so", 0) + 1
            return None
        if quick.verdict == "does not fit":
            left_out["memory"] = left_out.get("memory", 0) + 1
        elif quick.verdict != "risky":
            # This one's handicap, for what is not simple about it, counts; that of what it rules
            # out does not, so that nothing is missed.
            surely = rank_key(quick, optimize, noise)[1] * (_INEXACT if plan.pipeline > 1 else 1.0)
            fastest = min(fastest, surely)
        drawer = kept.setdefault(
            (plan.family, quick.plan.schedule if plan.pipeline > 1 else plan.shard), []
        )
        entry = (tuple(-k for k in rank_key(quick, optimize, noise)), -considered, quick)
        if len(drawer) < drawer_size:
            heapq.heappush(drawer, entry)
        else:
            heapq.heappushpop(drawer, entry)
        return quick

    for ladder in candidates(base, costs, cluster):
        _climb(ladder, look, optimize)
    if not kept:
        raise ArgumentError(
            f"plan: no plan gives each of {workers} workers a sample of a global batch of "
            f"{costs.batch_size}: "
            "use fewer workers or a larger batch."
        )
    full: list[Prediction] = []
    shortest = math.inf
    chosen = _choose(kept, simulate)
    if prune:
        # the likely winner first: it rules out the most
        chosen.sort(key=lambda p: rank_key(p, optimize, noise))
    for quick in chosen:
        least = (
            max(
                predictor.floor_seconds(quick.plan),
                quick.step_seconds / (_INEXACT if quick.plan.pipeline > 1 else 1.0),
            )
            if prune
            else 0.0
        )
        if prune and optimize == "speed" and least >= shortest:
            left_out["slower"] = left_out.get("slower", 0) + 1
            continue
        made = _in_full(predictor, quick.plan, optimize) if simulate else quick
        if made is not None:
            full.append(made)
            if _VERDICTS[made.verdict] == 0:
                shortest = min(shortest, rank_key(made, optimize, noise)[1])
    full.sort(key=lambda p: rank_key(p, optimize, noise))
    families: dict[str, Prediction] = {}
    for k, made in enumerate(full):
        if made.plan.family not in families:
            families[made.plan.family] = full[k] = (
                predictor(made.plan) if simulate and made.plan.pipeline > 1 else made
            )
    return SearchResult(
        tuple(full),
        families,
        considered,
        len(full) if simulate else 0,
        left_out,
        workers,
        optimize,
        like,
    )


def rank_key(
    prediction: Prediction, optimize: Literal["speed", "memory"] = "speed", noise: float = 0.0
) -> tuple[float, ...]:
    """Sort key: fit first, then step time (or memory) plus half a percent per mechanism.

    ``noise`` is the measurements' uncertainty: a more complex plan must beat it, up to 5 %.
    """
    plan = prediction.plan
    mechanisms = (
        (plan.shard != "none")
        + 2 * (plan.pipeline > 1)
        + 2 * (plan.tensor > 1)
        + (plan.recompute != "none")
        + 2 * (plan.offload != "none")
        + (plan.virtual > 1)
        + (plan.shard_within is not None)
    )
    value = prediction.step_seconds if optimize == "speed" else prediction.memory_bytes
    other = prediction.memory_bytes if optimize == "speed" else prediction.step_seconds
    doubt = min(noise, _DOUBT) if mechanisms and optimize == "speed" else 0.0
    return (
        float(_VERDICTS[prediction.verdict]),
        value * (1.0 + _SIMPLER * mechanisms + doubt),
        other,
    )


def unsupported(plan: Plan, costs: Costs, cluster: Cluster) -> str | None:
    """Why the runtime cannot carry out a plan, or None."""
    share = plan.batch_size / plan.replicas
    if plan.workers != plan.pipeline * plan.tensor * plan.replicas:
        return (
            f"{plan.workers} workers do not divide into pipeline={plan.pipeline} × "
            f"tensor={plan.tensor}"
        )
    if share < 1:
        return (
            f"{plan.replicas} replicas of a global batch of {plan.batch_size} get less than "
            "one sample each"
        )
    if plan.pipeline > 1 and plan.tensor > 1:
        return "pipeline and tensor do not combine"
    if plan.shard != "none" and plan.replicas < 2:
        return "shard needs two replicas or more"
    for way, why in costs.refused.items():
        if way in (f"shard={plan.shard}", *_ways(plan)):
            return why
    if plan.shard_within is not None and (
        plan.shard not in ("gradients", "parameters") or plan.pipeline > 1 or plan.tensor > 1
    ):
        return "shard_within goes with shard=gradients or parameters alone"
    if plan.shard_within and plan.replicas % plan.shard_within:
        return f"shard_within={plan.shard_within} does not divide {plan.replicas} replicas"
    if plan.tensor > 1 and plan.shard == "optimizer":
        return "tensor goes with shard=gradients or parameters"
    if plan.tensor > 1 and not any(u.tensor for u in costs.units):
        return "no attention or MLP block was recognised"
    if plan.tensor > 1 and costs.tensor_divides and costs.tensor_divides % plan.tensor:
        return f"tensor={plan.tensor} does not divide {costs.tensor_divides} attention heads"
    if plan.offload != "none" and (cluster.device == "cpu" or plan.pipeline > 1 or plan.tensor > 1):
        return "offload needs a device with memory of its own, and no pipeline or tensor"
    if (
        plan.pipeline > 1
        and plan.shard in ("gradients", "parameters")
        and plan.schedule in ("zero-bubble", "zbv")
    ):
        return (
            f"{plan.schedule} delays part of the backward pass until sharded parameters have been "
            "freed"
        )
    if plan.pipeline > 1 and plan.recompute != "none" and plan.schedule in ("zero-bubble", "zbv"):
        return (
            f"{plan.schedule} delays part of the backward pass, and recomputed activations stay "
            "until then: nothing is gained"
        )
    if plan.pipeline > 1:
        places = sum(u.cut_after for u in costs.units[:-1]) + 1
        if plan.pipeline * plan.virtual > places:
            return (
                f"{plan.pipeline * plan.virtual} stages were asked for, and the model can be "
                f"cut into {places} at most"
            )
        return allowed(plan.schedule, plan.pipeline, plan.virtual, plan.accumulation)
    if plan.virtual > 1:
        return "virtual needs a pipeline"
    return None


def _ways(plan: Plan) -> Iterator[str]:
    if plan.tensor > 1:
        yield "tensor"
    if plan.pipeline > 1:
        yield "pipeline"
        yield "zero-bubble" if plan.schedule == "zbv" else plan.schedule


def candidates(base: Plan, costs: Costs, cluster: Cluster) -> Iterator[list[Plan]]:
    """All plans for ``base.workers`` workers, in ladders of falling micro-batch size."""
    workers, batch = base.workers, base.batch_size
    recomputes: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    node = cluster.devices_per_node
    for tensor in (1, *_TENSOR):
        replicas = workers // tensor
        if workers % tensor or tensor > max(1, node) or replicas > batch:
            continue
        levels: list[ShardLevel] = ["none"]
        if replicas > 1:
            levels += ["gradients", "parameters"] if tensor > 1 else _SHARDED
        for shard in levels:
            withins: list[int | None] = [None]
            whole = shard in ("gradients", "parameters")
            if tensor == 1 and whole and 1 < node < replicas and replicas % node == 0:
                withins.append(node)
            for within in withins:
                offloads: list[Literal["none", "optimizer", "parameters"]] = ["none"]
                if cluster.device != "cpu" and tensor == 1 and within is None:
                    offloads.append("optimizer")
                    if shard != "none" or replicas == 1:
                        offloads.append("parameters")
                for recompute, offload in itertools.product(recomputes, offloads):
                    if offload != "none" and recompute == "selective":
                        continue
                    one = dataclasses.replace(
                        base,
                        tensor=tensor,
                        shard=shard,
                        shard_within=within,
                        recompute=recompute,
                        offload=offload,
                        pipeline=1,
                    )
                    if unsupported(one, costs, cluster) is None:
                        yield _accumulated(one)
    places = sum(u.cut_after for u in costs.units[:-1]) + 1
    for pipeline in range(2, min(workers, places) + 1):
        replicas = workers // pipeline
        if workers % pipeline or replicas > batch:
            continue
        share = math.ceil(batch / replicas)
        levels = ["none"] if replicas == 1 else ["none", "optimizer", "parameters"]
        for schedule, virtual in _SCHEDULES:
            if pipeline * virtual > places:
                continue
            counts = _counts(schedule, pipeline, virtual, share)
            for recompute, shard, micro in itertools.product(recomputes, levels, counts):
                one = dataclasses.replace(
                    base,
                    pipeline=pipeline,
                    virtual=virtual,
                    schedule=schedule,
                    shard=shard,
                    recompute=recompute,
                    micro_batch=micro,
                    tensor=1,
                    shard_within=None,
                    offload="none",
                )
                one = dataclasses.replace(one, accumulation=micro_batches_of(one, share))
                if unsupported(one, costs, cluster) is None:
                    yield [one]


def _accumulated(plan: Plan) -> list[Plan]:
    share = math.ceil(plan.batch_size / plan.replicas)
    ladder = []
    micro = share
    while True:
        count = math.ceil(share / micro)
        ladder.append(
            dataclasses.replace(plan, micro_batch=micro if count > 1 else None, accumulation=count)
        )
        if micro == 1:
            return ladder
        micro = math.ceil(micro / 2)


def _climb(
    ladder: list[Plan],
    look: Callable[[Plan], Prediction | None],
    optimize: Literal["speed", "memory"],
) -> None:
    """Descend a ladder to the first micro-batch that fits; smaller ones only take longer."""

    def fits(plan: Plan) -> bool:
        quick = look(plan)
        # What was left out as too slow counts as fitting: all that is smaller is slower still, so
        # only larger ones are worth a look.
        return quick is None or quick.verdict in ("fits", "unknown")

    if (fits(ladder[0]) and optimize == "speed") or len(ladder) == 1 or not fits(ladder[-1]):
        return
    if optimize == "memory":
        return
    low, high = 0, len(ladder) - 1  # does not fit, fits
    while high - low > 1:
        middle = (low + high) // 2
        if fits(ladder[middle]):
            high = middle
        else:
            low = middle


def _counts(schedule: Schedule, pipeline: int, virtual: int, share: int) -> list[int]:
    """Micro-batch sizes worth trying: one micro-batch a pipeline worker, two, …, one sample."""
    wanted = [pipeline * f for f in (1, 2, 4, 8, 16)]
    fine: dict[int, int] = {}  # of those that come to as many, the size that they have then
    for asked in {max(1, math.ceil(share / n)) for n in wanted} | {1}:
        plan = Plan(
            pipeline, pipeline=pipeline, virtual=virtual, schedule=schedule, micro_batch=asked
        )
        count = micro_batches_of(plan, share)
        if allowed(schedule, pipeline, virtual, count) is None:
            fine[count] = math.ceil(share / count)
    return sorted(fine.values(), reverse=True)


def _choose(
    kept: dict[tuple[str, str], list[tuple[tuple[float, ...], int, Prediction]]], simulate: int
) -> list[Prediction]:
    """The best of all and of every family: the closed form alone must exclude none."""
    drawers = [sorted(drawer, key=lambda e: e[:2], reverse=True) for drawer in kept.values()]
    chosen: dict[int, Prediction] = {}
    for drawer in drawers:
        for entry in drawer[: 2 if simulate >= 20 else 1]:
            chosen[entry[1]] = entry[2]
    for entry in sorted(
        (e for drawer in drawers for e in drawer), key=lambda e: e[:2], reverse=True
    ):
        if len(chosen) >= simulate:
            break
        chosen[entry[1]] = entry[2]
    return list(chosen.values())


def _in_full(
    predictor: Predictor, plan: Plan, optimize: Literal["speed", "memory"]
) -> Prediction | None:
    try:
        made = predictor(plan, split_waits=False)
    except ArgumentError:
        return None
    if plan.pipeline > 1 and (optimize == "memory" or made.verdict in ("risky", "does not fit")):
        # A cut weighs time and memory against each other: either may need less memory where it is
        # fullest.
        other: Literal["speed", "memory"] = "memory" if optimize == "speed" else "speed"
        cut_else = predictor(dataclasses.replace(plan, optimize=other), split_waits=False)
        if rank_key(cut_else, optimize) < rank_key(made, optimize):
            return cut_else
    return made
