"""Search all plans the runtime supports: prune by memory and closed form, simulate the best, rank.

The global batch is fixed; micro-batches follow from it. A plan whose replicas would get less than
one sample is skipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ronde.plan.plan import Plan
from ronde.predict.candidates import candidates
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs
from ronde.predict.predict import Predictor
from ronde.predict.prediction import RISKY_SHARE, Prediction
from ronde.world import ArgumentError

_VERDICTS = {"fits": 0, "unknown": 0, "risky": 1, "does not fit": 2}
_INEXACT_FACTOR = 1.3  # how far a pipeline's closed form may be from its simulation


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
    tell: Callable[[str], None] | None = None,
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
        tell: shows progress.

    Raises:
        ArgumentError: ``workers`` is below 1, or every plan would leave a worker without a sample.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ArgumentError(f"workers={workers!r} must be a whole number, 1 or more.")
    predictor = Predictor(costs, cluster)
    base = dataclasses.replace(
        like or Plan(), workers=workers, batch_size=costs.batch_size, optimize=optimize
    )
    noise = max(costs.noise, cluster.noise)
    looked = _Looked(predictor, optimize, noise, prune)
    pipelines: list[Plan] = []
    for ladder in candidates(base, costs, cluster):
        if ladder[0].pipeline > 1:
            pipelines += ladder
        else:
            looked.climb(ladder)
    if tell is not None:
        tell(f"searching plans: {looked.considered + len(pipelines):,}")
    looked.at_pipelines(pipelines)
    kept, left_out, considered = looked.kept, looked.left_out, looked.considered
    if not kept:
        raise ArgumentError(
            f"plan: no plan gives each of {workers} workers a sample of a global batch of "
            f"{costs.batch_size}: "
            "use fewer workers or a larger batch."
        )
    full: list[Prediction] = []
    shortest: dict[str, float] = {}
    # the likely winner first: it rules out the most
    chosen = _choose(kept.values(), simulate, lambda p: rank_key(p, optimize, noise))
    for number, quick in enumerate(chosen):
        group = "" if prune else quick.plan.family
        least = predictor.floor_seconds(quick.plan)
        least = max(
            least, quick.step_seconds / (_INEXACT_FACTOR if quick.plan.pipeline > 1 else 1.0)
        )
        lost = (prune or quick.plan.pipeline > 1) and optimize == "speed"
        if simulate and lost and least >= shortest.get(group, math.inf):
            left_out["slower"] = left_out.get("slower", 0) + 1
            continue
        if tell is not None:
            tell(f"simulating the best: {number + 1} of {len(chosen)}, {quick.plan.spec}")
        made = _in_full(predictor, quick.plan, optimize) if simulate else quick
        if made is not None:
            full.append(made)
            if _VERDICTS[made.verdict] == 0:
                key = rank_key(made, optimize, noise)[1]
                shortest[group] = min(shortest.get(group, math.inf), key)
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
        + (plan.reducer != "ring")
    )
    value = prediction.step_seconds if optimize == "speed" else prediction.memory_bytes
    other = prediction.memory_bytes if optimize == "speed" else prediction.step_seconds
    # Plain replication wins what lies within the noise: it is the easiest to run.
    doubt = min(noise, 0.05) if mechanisms and optimize == "speed" else 0.0
    return (
        float(_VERDICTS[prediction.verdict]),
        value * (1.0 + 0.005 * mechanisms + doubt),
        other,
    )


class _Looked:
    """Plans predicted by closed form, by family and schedule."""

    def __init__(
        self,
        predictor: Predictor,
        optimize: Literal["speed", "memory"],
        noise: float,
        prune: bool,
    ) -> None:
        self.predictor, self.optimize, self.noise, self.prune = predictor, optimize, noise, prune
        self.kept: dict[tuple[str, str], list[Prediction]] = {}
        self.left_out: dict[str, int] = {}
        self.considered = 0
        self._best: dict[str, float] = {}  # by family, or of all if it prunes: the best for sure
        self._enough: set[Plan] = set()  # fit without recomputation

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def _limit(self, plan: Plan) -> float:
        return self._best.get("" if self.prune else plan.family, math.inf)

    def at(self, plan: Plan) -> Prediction | None:
        """The prediction by closed form; None if it was left out."""
        self.considered += 1
        fast = self.prune and self.optimize == "speed"
        if fast and self.predictor.floor_seconds(plan) >= self._limit(plan):
            self._leave_out("slower")
            return None
        return self._quick(plan)

    def _quick(self, plan: Plan) -> Prediction | None:
        try:
            quick = self.predictor(plan, quick=True)
        except ArgumentError:
            self._leave_out("cannot be cut so")
            return None
        key = rank_key(quick, self.optimize, self.noise)
        if quick.verdict == "does not fit":
            self._leave_out("memory")
        elif quick.verdict != "risky":
            # This one's handicap, for what is not simple about it, counts; that of what it rules
            # out does not, so that nothing is missed.
            surely = key[1]
            if plan.pipeline > 1:
                surely *= _INEXACT_FACTOR
            group = "" if self.prune else plan.family
            self._best[group] = min(self._best.get(group, math.inf), surely)
        how = quick.plan.schedule if plan.pipeline > 1 else plan.shard
        self.kept.setdefault((plan.family, how), []).append(quick)
        return quick

    def climb(self, ladder: list[Plan]) -> None:
        """Look at a ladder of falling micro-batch size, down to the first that fits: smaller ones
        only take longer.
        """
        plain = dataclasses.replace(ladder[0], recompute="none", offload="none")
        if self.optimize == "speed" and plain != ladder[0] and plain in self._enough:
            self.considered += len(ladder)
            self._leave_out("slower")
        elif self._fits(ladder[0]):
            self._enough.add(ladder[0])
            if self.optimize == "memory" and len(ladder) > 1:
                self._fits(ladder[-1])
        # Where the smallest does not fit, none between does: the ladder is not climbed.
        elif len(ladder) > 1 and self._fits(ladder[-1]) and self.optimize == "speed":
            next(filter(self._fits, ladder[1:-1]), None)

    def _fits(self, plan: Plan) -> bool:
        quick = self.at(plan)
        # What was left out as too slow counts as fitting: all that is smaller is slower still.
        return quick is None or quick.verdict in ("fits", "unknown")

    def at_pipelines(self, plans: list[Plan]) -> None:
        """Look at pipelines, those with the lowest bound first. For most of them the bound alone
        says that they lose to one of their family, or do not fit.
        """
        predictor, speed = self.predictor, self.optimize == "speed"
        room = RISKY_SHARE * predictor.cluster.memory_bytes or math.inf
        too_big: dict[str, list[tuple[float, int, Plan]]] = {}
        bounded = []
        for plan in plans:
            least_bytes = predictor.floor_bytes(plan)
            bounded.append(
                (predictor.floor_seconds(plan) if speed else least_bytes, least_bytes, plan)
            )
        for least, least_bytes, plan in sorted(bounded, key=lambda b: b[0]):
            self.considered += 1
            plain = dataclasses.replace(plan, recompute="none")
            if least >= self._limit(plan) or (speed and plain in self._enough):
                self._leave_out("slower")
            elif least_bytes > room:
                self._leave_out("memory")
                too_big.setdefault(plan.family, []).append((least_bytes, self.considered, plan))
            else:
                quick = self._quick(plan)
                if quick is not None and quick.verdict in ("fits", "unknown"):
                    self._enough.add(plan)
        # A family of which nothing fits is there with what comes nearest.
        families = {family for family, _ in self.kept}
        for family in too_big.keys() - families if not (self.prune and self._best) else ():
            self.left_out["memory"] -= 1  # it is counted again
            next(filter(None, (self._quick(plan) for *_, plan in sorted(too_big[family]))), None)


def _choose(
    kept: Iterable[list[Prediction]], simulate: int, rank: Callable[[Prediction], Any]
) -> list[Prediction]:
    """The best of all and of every family: the closed form alone must exclude none."""
    # The closed form may swap neighbors: two of each family and schedule are simulated.
    first = 2 if simulate >= 20 else 1
    drawers = [sorted(drawer, key=rank) for drawer in kept]
    chosen = [each for drawer in drawers for each in drawer[:first]]
    rest = sorted((each for drawer in drawers for each in drawer[first:]), key=rank)
    return sorted([*chosen, *rest[: max(0, simulate - len(chosen))]], key=rank)


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
