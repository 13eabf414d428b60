"""Put a search's result into words: what to do, what decided, and when it would flip."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ronde.predict import answer_tables
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.prediction import TERMS, Prediction
from ronde.predict.search import SearchResult, search
from ronde.world import ArgumentError

_DOUBLINGS = 6  # how far each way a flip is looked for: to 64 times, or a 64th
# plans times layers, for all flips: about 6 s at 30 µs each; fewer doublings for large searches
_LOOKED_AT = 200_000
_NO_FASTER = 1.05  # speed-up up to which several devices are not worth it
_HIDES = 0.05  # share of the step below which an exchange counts as hidden


@dataclass(frozen=True, slots=True)
class Flip:
    """When another family of plans would win.

    Attributes:
        variable: what changes, everything else as it is.
        direction: ``"up"`` or ``"down"``.
        now: its value; 1 for the links, which are changed by a factor.
        at: the first value of the grid where another family wins; None if none does.
        to: family that wins there; empty where no plan is possible any more.
        spec: the plan.
        limit: the last value of the grid.
        holds: the last value before ``at`` where the same family wins.
        note: how the change was modelled.
    """

    variable: str
    direction: str
    now: float
    at: float | None
    to: str
    spec: str
    limit: float
    holds: float
    note: str = ""

    def sentence(self) -> str:
        """The flip as a sentence."""
        show, unit = _SHOW[self.variable]
        if self.at is None:
            plural = "s" if unit and self.limit > 1 else ""
            return (
                f"{self.variable}: the same answer {self.direction} to "
                f"{show(self.limit)}{unit}{plural}"
            )
        low, high = sorted((self.holds, self.at))
        between = f"between {show(low)} and {show(high)}{unit and unit + 's'}"
        return (
            f"{self.variable}: flips to {self.to or 'no plan at all'} {between} (now "
            f"{show(self.now)})"
        )


@dataclass(frozen=True)
class Explanation:
    """The printed answer, as data.

    Attributes:
        sentence: the answer.
        decided: the number that decided.
        runner_up: who came second, and why it lost.
        flips: when another family would win.
        found: the search.
        calibration: where the numbers come from.
        workers, batch_size: of the question.
    """

    sentence: str
    decided: str
    runner_up: str
    flips: tuple[Flip, ...]
    found: SearchResult
    calibration: tuple[str, ...]
    workers: int
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sentence": self.sentence,
            "decided": self.decided,
            "runner_up": self.runner_up,
            "flips": [{**dataclasses.asdict(f), "sentence": f.sentence()} for f in self.flips],
            "calibration": list(self.calibration),
            "workers": self.workers,
            "batch_size": self.batch_size,
            **self.found.to_dict(),
        }


def explain(
    found: SearchResult, costs: Costs, cluster: Cluster, *, with_flips: bool = True
) -> Explanation:
    """Explain a search result.

    Args:
        found: the search.
        costs, cluster: what it was about.
        with_flips: whether other values are searched, for when the answer would flip.
    """
    best = found.best
    if best.verdict == "does not fit" and found.optimize == "speed":
        # What comes nearest is not among the fastest.
        nearest = search(costs, cluster, found.workers, optimize="memory", like=found.like)
        found = dataclasses.replace(
            found,
            plans=tuple(sorted(nearest.plans, key=lambda p: p.memory_bytes)),
            families=nearest.families,
        )
        best = found.best
    noise = max(costs.noise, cluster.noise)
    slow = found.workers > 1 and best.verdict != "does not fit" and best.speedup <= _NO_FASTER
    alone = (
        search(costs, cluster, 1, optimize=found.optimize, simulate=0, like=found.like).best
        if slow
        else None
    )
    return Explanation(
        sentence=_sentence(found, cluster) if alone is None else _beside_one(found, cluster, alone),
        decided=_decided(found, noise),
        runner_up=_lost(found, noise),
        flips=flips(found, costs, cluster) if with_flips else (),
        found=found,
        calibration=_calibration(best, costs, cluster),
        workers=found.workers,
        batch_size=costs.batch_size,
    )


# The answer.


def _sentence(found: SearchResult, cluster: Cluster) -> str:
    best, plan = found.best, found.best.plan
    room = f" of {answer_tables.format_bytes(cluster.memory_bytes)}" if cluster.memory_bytes else ""
    needs = f"{answer_tables.format_bytes(best.memory_bytes)}{room}"
    if best.verdict == "does not fit":
        least = _least(found)
        return (
            f"Nothing fits {found.workers} workers of "
            f"{answer_tables.format_bytes(cluster.memory_bytes)}: the least is "
            f"{answer_tables.format_bytes(least.memory_bytes)}, "
            f"by {least.plan.spec}. Use more devices, devices with more memory, or a smaller model."
        )
    if found.workers == 1:
        extra = [_WORDS[w] for w in (plan.recompute, f"offload {plan.offload}") if w in _WORDS]
        if best.micro_batches > 1:
            extra.append(f"in {best.micro_batches} micro-batches")
        how = f", {', '.join(extra)}," if extra else ""
        return f"One device: the model{how} needs {needs} and trains {_rate(best)}."
    reach = f"reach {best.speedup:.1f}×"
    tail = _tail(best)
    with_recompute = f", with {_WORDS[plan.recompute]}" if plan.recompute != "none" else ""
    if best.micro_batches > 1 and plan.pipeline == 1:
        with_recompute += f", in {best.micro_batches} micro-batches of {best.micro_samples}"
    if plan.pipeline > 1:
        shape = (
            f"{plan.pipeline} stages"
            if plan.virtual == 1
            else f"{plan.pipeline} workers with {plan.virtual} stages each"
        )
        if plan.replicas > 1:
            shape += f" × {plan.replicas} replicas"
            shape += ", which share out their states," if plan.shard != "none" else ""
        why = (
            _too_big(found, "one copy")
            or f"{'memory' if found.optimize == 'memory' else 'time'} decides"
        )
        return (
            f"Split the model: {why}; {shape} ({plan.schedule}, {best.micro_batches} "
            f"micro-batches{with_recompute}) need {needs} and "
            f"{reach}; {tail}."
        )
    if plan.tensor > 1:
        why = (
            _too_big(found, "one copy")
            or f"{'memory' if found.optimize == 'memory' else 'time'} decides"
        )
        shape = (
            f"{plan.tensor} workers a layer × {plan.replicas} "
            f"{'shards' if plan.shard != 'none' else 'replicas'}"
        )
        return f"Split each layer: {why}; {shape}{with_recompute} need {needs} and {reach}; {tail}."
    if plan.shard != "none":
        what = {
            "optimizer": "the optimizer's state",
            "gradients": "gradients and optimizer",
            "parameters": "all states",
        }[plan.shard]
        over = (
            f"{plan.shard_within} neighbours each"
            if plan.shard_within
            else f"{plan.replicas} workers"
        )
        return (
            f"Split the data, and shard {what} over {over}{_not_whole(found)}: that needs "
            f"{needs}{with_recompute}; {plan.replicas} workers {reach}; {tail}."
        )
    return (
        f"Split the data: the model needs {needs}{with_recompute}; {plan.replicas} replicas "
        f"{reach}; {tail}."
    )


def _least(found: SearchResult) -> Prediction:
    return min(found.plans, key=lambda p: p.memory_bytes)


def _beside_one(found: SearchResult, cluster: Cluster, alone: Prediction) -> str:
    """The answer when the workers are hardly faster than one device, or slower."""
    best, answer = found.best, _sentence(found, cluster)
    # The speed-up of the table, but where one device needs another way to fit. What it is corrected
    # by is known from runs of several workers alone: not by anything.
    plain = (
        alone.plan.recompute == "none" and alone.plan.offload == "none" and alone.micro_batches == 1
    )
    times = best.speedup if plain else alone.raw_step_seconds / best.step_seconds
    if alone.verdict in ("risky", "does not fit"):
        speed = (
            "be as fast" if best.speedup > 1 / _NO_FASTER else f"be {1 / best.speedup:.1f}× as fast"
        )
        return (
            f"{answer} One device alone would {speed}, but needs "
            f"{answer_tables.format_bytes(alone.memory_bytes)} of "
            f"{answer_tables.format_bytes(alone.capacity_bytes)} "
            f"({alone.verdict}): {found.workers} are worth it for the memory only."
        )
    if times > _NO_FASTER:
        return answer  # it fits with recomputation or the like, which takes longer
    reach = (
        f"reach only {times:.2g}× of it"
        if times < 1 / _NO_FASTER
        else f"are no faster ({times:.2f}×)"
    )
    memory = (
        ""
        if alone.capacity_bytes
        else f", if its memory has room for {answer_tables.format_bytes(alone.memory_bytes)}"
    )
    return (
        f"Use one device{memory}: {found.workers} {reach}, since {_why_slow(best, alone)}. For "
        f"{found.workers}: {answer[0].lower()}{answer[1:]}"
    )


def _why_slow(best: Prediction, alone: Prediction) -> str:
    """The largest cost of several workers that one device does not have."""
    surplus = {k: best.terms[k] - alone.terms[k] / best.plan.workers for k in TERMS}
    most = sorted(((v / best.raw_step_seconds, k) for k, v in surplus.items()), reverse=True)[:2]
    whole = ("compute", "recompute", "optimizer")
    said = [
        f"{100 * share:.0f} % is {_TERM_WORDS[k]}{' that does not divide' if k in whole else ''}"
        for share, k in most
        if share >= 0.1
    ]
    return (
        f"of their step {' and '.join(said)}"
        if said
        else "nothing of the step becomes much shorter"
    )


def _not_whole(found: SearchResult) -> str:
    """Why states are sharded instead of replicated."""
    too_big = _too_big(found, "a whole replica")
    if too_big:
        return f", since {too_big}"
    whole = next((p for p in found.plans if p.plan.family == "replicate"), None)
    if whole is None:
        return ""
    if found.optimize == "memory":
        return (
            ", which takes less memory than whole replicas "
            f"({answer_tables.format_bytes(whole.memory_bytes)})"
        )
    if whole.step_seconds > found.best.step_seconds:
        how = (
            f" with {_WORDS[whole.plan.recompute]}, as they would fit"
            if whole.plan.recompute != "none"
            else ""
        )
        return f", which is faster than whole replicas{how}"
    return (
        f", since a whole replica needs {answer_tables.format_bytes(whole.memory_bytes)} of "
        f"{answer_tables.format_bytes(whole.capacity_bytes)} ({whole.verdict})"
    )


def _too_big(found: SearchResult, what: str) -> str:
    whole = [p for p in found.plans if p.plan.family == "replicate" and p.plan.offload == "none"]
    if whole and all(p.verdict == "does not fit" for p in whole):
        least = min(whole, key=lambda p: p.memory_bytes)
        how = f" even with {_WORDS[least.plan.recompute]}" if least.plan.recompute in _WORDS else ""
        return (
            f"{what} needs {answer_tables.format_bytes(least.memory_bytes)} of "
            f"{answer_tables.format_bytes(least.capacity_bytes)}{how}"
        )
    if not whole and found.workers > found.best.plan.batch_size:
        return f"{found.workers} replicas would share {found.best.plan.batch_size} samples"
    return ""


def _tail(best: Prediction) -> str:
    parts = (
        {k: v / best.raw_step_seconds for k, v in best.terms.items()}
        if best.raw_step_seconds
        else {}
    )
    wire = sum(parts.get(k, 0.0) for k in ("exchange", "gather", "tensor", "interference"))
    if best.plan.pipeline > 1:
        text = f"a worker waits {100 * best.bubble:.0f} % of the step"
        return text + (f", exchange takes {100 * wire:.0f} %" if wire >= _HIDES else "")
    if wire < _HIDES:
        return (
            "the exchange hides behind the backward pass"
            if best.hidden_seconds > 0
            else f"exchange takes {100 * wire:.0f} % of the step"
        )
    return f"{100 * wire:.0f} % of the step is exchange that does not hide"


def _decided(found: SearchResult, noise: float) -> str:
    """The number that decided."""
    best, second = found.best, found.runner_up
    if best.verdict == "does not fit":
        return (
            f"memory: {answer_tables.format_bytes(_least(found).memory_bytes)} of "
            f"{answer_tables.format_bytes(best.capacity_bytes)} at best"
        )
    if second is None:
        if best.capacity_bytes:
            return (
                f"memory: {answer_tables.format_bytes(best.memory_bytes)} of "
                f"{answer_tables.format_bytes(best.capacity_bytes)}, the only family of plans "
                "there is"
            )
        return "the only family of plans there is"
    if _verdict_decided(best, second):
        # As the sentence has it: the one of its family that needs least.
        least = min(
            (p for p in found.plans if p.plan.family == second.plan.family),
            key=lambda p: p.memory_bytes,
        )
        return (
            f"memory: {least.plan.family} needs "
            f"{answer_tables.format_bytes(least.memory_bytes)} of "
            f"{answer_tables.format_bytes(least.capacity_bytes)} at least ({least.verdict})"
        )
    if found.optimize == "memory":
        return (
            f"memory: {answer_tables.format_bytes(best.memory_bytes)} against "
            f"{answer_tables.format_bytes(second.memory_bytes)} of {second.plan.family}"
        )
    name = _largest_difference(best, second)
    if second.step_seconds <= best.step_seconds:
        return (
            "step time is equal within "
            f"{100 * (1 - second.step_seconds / best.step_seconds):.1f} %: the simpler plan"
        )
    if _indistinguishable(best, second, noise):
        slower = second.step_seconds / best.step_seconds - 1.0
        return (
            f"nothing measurable: step times differ by {100 * slower:.1f} %, and the measurements "
            f"vary by {100 * noise:.0f} %"
        )
    return (
        f"{_TERM_WORDS[name]}: {answer_tables.format_seconds(second.terms[name])} a step in "
        f"{second.plan.family}, {answer_tables.format_seconds(best.terms[name])} in "
        f"{best.plan.family}"
    )


def _lost(found: SearchResult, noise: float) -> str:
    best, second = found.best, found.runner_up
    if second is None:
        return "There is no other family of plans for these workers and this batch."
    if _verdict_decided(best, second):
        return (
            f"{second.plan.family} ({second.plan.spec}) {_VERDICT_WORDS[second.verdict]}: "
            f"{_memory_words(second)}."
        )
    if best.verdict == "does not fit":
        return (
            f"{second.plan.family} ({second.plan.spec}) needs {_memory_words(second)}: it does "
            "not fit either."
        )
    slower = second.step_seconds / best.step_seconds - 1.0 if best.step_seconds else 0.0
    if found.optimize == "memory" and second.memory_bytes > best.memory_bytes:
        faster = (
            f"is {-100 * slower:.0f} % faster, but"
            if slower < 0
            else f"is {100 * slower:.0f} % slower, and"
        )
        return (
            f"{second.plan.family} ({second.plan.spec}) {faster} needs "
            f"{_memory_words(second)}; here {answer_tables.format_bytes(best.memory_bytes)}."
        )
    if slower <= 0:
        return (
            f"{second.plan.family} ({second.plan.spec}) is as fast within {-100 * slower:.1f} "
            "%, and less simple."
        )
    if found.optimize == "speed" and _indistinguishable(best, second, noise):
        return (
            f"{second.plan.family} ({second.plan.spec}) cannot be told apart from it: "
            f"{100 * slower:.1f} % slower, less than the measurements vary ({100 * noise:.0f} %)."
        )
    differences = sorted(((second.terms[k] - best.terms[k], k) for k in TERMS), reverse=True)
    much = 0.1 * (second.step_seconds - best.step_seconds)
    up, down = (
        [(d, k) for d, k in differences if d > much][:3],
        [(d, k) for d, k in reversed(differences) if -d > much][:2],
    )
    rest = sum(d for d, _ in differences) - sum(d for d, _ in (*up, *down))
    more = [f"{_TERM_WORDS[k]} +{answer_tables.format_seconds(d)}" for d, k in up] + (
        [f"the rest +{answer_tables.format_seconds(rest)}"] if up and rest > much else []
    )
    less = [f"{_TERM_WORDS[k]} −{answer_tables.format_seconds(-d)}" for d, k in down] + (
        [f"the rest −{answer_tables.format_seconds(-rest)}"] if -rest > much else []
    )
    gains = f"; it gains {', '.join(less)}" if less else ""
    return (
        f"{second.plan.family} ({second.plan.spec}) is {100 * slower:.0f} % slower: "
        f"{', '.join(more) or 'a little of everything'}{gains}."
    )


def _verdict_decided(best: Prediction, second: Prediction) -> bool:
    order = ("fits", "unknown", "risky", "does not fit")
    return order.index(second.verdict) > max(1, order.index(best.verdict))


def _indistinguishable(best: Prediction, second: Prediction, noise: float) -> bool:
    # a difference below the measurements' own spread decides nothing
    return best.step_seconds < second.step_seconds < best.step_seconds * (1.0 + noise)


def _largest_difference(best: Prediction, second: Prediction) -> str:
    return max(TERMS, key=lambda k: second.terms[k] - best.terms[k])


def _memory_words(prediction: Prediction) -> str:
    kinds = sorted(((v, k) for k, v in prediction.memory.items() if v > 0), reverse=True)[:3]
    return (
        f"{answer_tables.format_bytes(prediction.memory_bytes)} of "
        f"{answer_tables.format_bytes(prediction.capacity_bytes)}, "
        + ", ".join(f"{k} {answer_tables.format_bytes(v)}" for v, k in kinds)
    )


def _calibration(best: Prediction, costs: Costs, cluster: Cluster) -> tuple[str, ...]:
    rows = []
    where = costs.device or "unknown device"
    sizes = (
        f" at {', '.join(map(str, costs.measured_samples))} samples"
        if costs.measured_samples
        else ""
    )
    rows.append(
        f"layers: measured on {where}{sizes}, disturbance {100 * costs.noise:.0f} %"
        if costs.device
        else "layers: estimated"
    )
    if cluster.links:
        worst = max((f.residual for by in cluster.links.values() for f in by.values()), default=0.0)
        assumed = all(f.assumed for by in cluster.links.values() for f in by.values())
        source = cluster.source or cluster.name
        given = not assumed and not worst and not cluster.source
        how = (
            "data sheet"
            if assumed
            else "as the cluster file says"
            if given
            else f"measured, fits within {100 * worst:.0f} %"
        )
        rows.append(f"links: {how} ({source})")
    rows.extend(costs.notes)
    rows.extend(best.notes)
    if best.correction != 1.0:
        rows.append(
            f"step time is corrected by {best.correction:.3g} from earlier runs here: "
            f"{answer_tables.format_seconds(best.raw_step_seconds)} → "
            f"{answer_tables.format_seconds(best.step_seconds)}"
        )
    return tuple(rows)


# When it would flip.


def flips(found: SearchResult, costs: Costs, cluster: Cluster) -> tuple[Flip, ...]:
    """Find when another family would win, varying one quantity at a time in both directions.

    Each value of a fixed grid of up to six doublings each way gets a whole search. Large searches
    try fewer values.

    Args:
        found: the search now.
        costs, cluster: what it was about.
    """

    def winner(costs: Costs, cluster: Cluster, workers: int) -> tuple[str, str]:
        try:
            return _named(
                search(
                    costs, cluster, workers, optimize=found.optimize, prune=True, like=found.like
                ).best
            )
        except ArgumentError:
            return "", ""

    workers = found.workers
    node = max(1, cluster.devices_per_node)

    def at_batch(value: float) -> tuple[str, str]:
        return winner(dataclasses.replace(costs, batch_size=round(value)), cluster, workers)

    def at_link(value: float) -> tuple[str, str]:
        links = {
            kind: {
                scope: dataclasses.replace(fit, beta=fit.beta * value) for scope, fit in by.items()
            }
            for kind, by in cluster.links.items()
        }
        return winner(costs, dataclasses.replace(cluster, links=links), workers)

    def at_workers(value: float) -> tuple[str, str]:
        count = round(value)
        grown = costs
        if found.like is not None and found.like.batch == "grow":
            grown = dataclasses.replace(
                costs, batch_size=max(1, round(costs.batch_size * count / workers))
            )
        return winner(
            grown, dataclasses.replace(cluster, nodes=max(1, math.ceil(count / node))), count
        )

    def at_memory(value: float) -> tuple[str, str]:
        return winner(costs, dataclasses.replace(cluster, memory_bytes=value), workers)

    def at_sequence(value: float) -> tuple[str, str]:
        return winner(stretched(costs, value / costs.sequence), cluster, workers)

    asked: list[tuple[str, float, Callable[[float], tuple[str, str]], str]] = [
        ("global batch", costs.batch_size, at_batch, "")
    ]
    if workers > 1 and cluster.links:
        asked.append(
            ("link speed", 1.0, at_link, "every link's bandwidth times this, same latency")
        )
    asked.append(
        ("workers", workers, at_workers, "doubled and halved; nodes of as many devices as now")
    )
    if cluster.memory_bytes:
        asked.append(("memory", cluster.memory_bytes, at_memory, ""))
    if costs.sequence:
        asked.append(
            (
                "sequence length",
                costs.sequence,
                at_sequence,
                "activations, messages and times scale with it",
            )
        )
    now = search(
        costs, cluster, workers, optimize=found.optimize, simulate=0, prune=True, like=found.like
    )
    each = (now.considered - now.left_out.get("slower", 0)) * max(1, len(costs.units))
    doublings = max(1, min(_DOUBLINGS, _LOOKED_AT // max(1, each * 2 * len(asked))))
    here = _named(found.best)
    every = [
        find_flip(variable, value, at, direction, now=here, doublings=doublings, note=note)
        for variable, value, at, note in asked
        for direction in ("down", "up")
    ]
    return tuple(flip for flip in every if flip.limit != flip.now)


def _named(best: Prediction) -> tuple[str, str]:
    """Family and plan; empty if nothing fits."""
    return ("", "") if best.verdict == "does not fit" else (best.plan.family, best.plan.spec)


def find_flip(
    variable: str,
    value: float,
    winner: Callable[[float], tuple[str, str]],
    direction: str,
    *,
    now: tuple[str, str] | None = None,
    doublings: int = _DOUBLINGS,
    note: str = "",
) -> Flip:
    """Double or halve ``value`` until another family wins.

    Args:
        variable: its name.
        value: now.
        winner: value -> (family, spec).
        direction: ``"up"`` or ``"down"``.
        now: the winner at ``value``; None to ask.
        doublings: how many at most.
        note: how the change is modelled.

    Example:
        >>> find_flip("memory", 8.0, lambda v: ("replicate", "") if v >= 3.0 else ("shard", ""),
        ...     "down").at
        2.0
    """
    here = (now or winner(value))[0]
    grid = [value * 2.0 ** (n if direction == "up" else -n) for n in range(1, doublings + 1)]
    if variable in _WHOLE:
        grid = [v for v in dict.fromkeys(max(1.0, float(round(v))) for v in grid) if v != value]
    if variable == "workers":
        grid = [v for v in grid if v < value or v <= _MOST_WORKERS]
    limit, holds = grid[-1] if grid else value, value
    for at in grid:
        family, spec = winner(at)
        if family != here:
            return Flip(variable, direction, value, at, family, spec, limit, holds, note)
        holds = at
    return Flip(variable, direction, value, None, "", "", limit, holds, note)


def stretched(costs: Costs, factor: float) -> Costs:
    """The model with sequences ``factor`` times as long: activations, messages and sample times
    scale linearly.

    Full attention grows faster, so this is a lower bound for long sequences.
    """

    def unit(one: Unit) -> Unit:
        names = [
            f.name for f in dataclasses.fields(Unit) if isinstance(getattr(one, f.name), LinearCost)
        ]
        changed: dict[str, Any] = {name: getattr(one, name).stretched(factor) for name in names}
        return dataclasses.replace(one, flops=one.flops * factor, **changed)

    return dataclasses.replace(
        costs,
        units=tuple(unit(u) for u in costs.units),
        input_bytes=costs.input_bytes * factor,
        sequence=max(1, round(costs.sequence * factor)),
    )


# For the terminal.

_NOTES = 3  # shown without --verbose


def render_answer(
    explanation: Explanation, *, stages: int = 16, verbose: bool = False
) -> RenderableType:
    """The answer, tables and notes for a rich console of any width.

    Args:
        explanation: what to show.
        stages: most stages of a pipeline to list.
        verbose: every note; otherwise the first three.
    """
    found = explanation.found
    parts: list[RenderableType] = [Text(explanation.sentence, style="bold"), Text()]
    parts.append(Text.assemble(("Decided by  ", "dim"), explanation.decided))
    parts.append(Text.assemble(("Runner-up   ", "dim"), explanation.runner_up))
    parts.append(Text())
    parts.append(answer_tables.times(found))
    parts.append(Text())
    parts.append(answer_tables.memory(found))
    if found.best.placement:
        where = "; ".join(f"{name}: {place}" for name, place in found.best.placement.items())
        parts.append(Text.assemble(("Placement   ", "dim"), where))
    if found.best.stages:
        parts.extend([Text(), answer_tables.stages(found.best, stages)])
    if explanation.flips:
        parts.extend([Text(), Text("The answer would flip", style="bold")])
        for variable, both in groupby(explanation.flips, lambda flip: flip.variable):
            directions = list(both)
            found_one = any(flip.at is not None for flip in directions)
            said = [flip.sentence().partition(": ")[2] for flip in directions]
            line = f"  {variable}: {'; '.join(said)}"
            parts.append(Text(line, style="" if found_one else "dim"))
        if any(f.variable == "sequence length" for f in explanation.flips):
            parts.append(
                Text(
                    "  (sequence length: activations, messages and times scale with it)",
                    style="dim",
                )
            )
        if any(f.variable == "workers" and f.direction == "up" for f in explanation.flips):
            parts.append(Text("  (workers: on more nodes of as many devices as now)", style="dim"))
    parts.append(Text())
    counts = f"{found.considered:,} plans looked at, {found.simulated} predicted in full"
    if found.left_out.get("memory"):
        counts += f", {found.left_out['memory']:,} too big"
    notes = list(explanation.calibration)
    if not verbose and len(notes) > _NOTES:
        notes = [*notes[:_NOTES], f"{len(notes)} notes in all: --verbose, or --json"]
    parts.append(Text("\n".join([*notes, counts]), style="dim"))
    return Group(*parts)


def answer_text(explanation: Explanation, width: int = 100) -> str:
    """:func:`render_answer` as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False, record=False)
    with console.capture() as capture:
        console.print(render_answer(explanation))
    return capture.get()


_WORDS = {
    "full": "full recomputation",
    "selective": "selective recomputation",
    "offload optimizer": "its optimizer's state in the host's memory",
    "offload parameters": "its parameters and optimizer's state in the host's memory",
}
_VERDICT_WORDS = {
    "fits": "fits",
    "unknown": "is of unknown size",
    "risky": "is risky",
    "does not fit": "does not fit",
}
_TERM_WORDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "all-reduced activations",
    "gather": "gathered parameters",
    "exchange": "exchanged gradients",
    "interference": "exchange that slows computation",
    "bubble": "waiting in the pipeline",
    "p2p": "sends between stages",
    "overhead": "the pipeline's runtime",
    "optimizer": "the optimizer",
    "host": "copies to the host",
}


def _rate(best: Prediction) -> str:
    return f"{best.samples_per_second:.4g} samples/s"


_WHOLE = ("global batch", "workers", "sequence length")
_MOST_WORKERS = 4096
_SHOW: dict[str, tuple[Callable[[float], str], str]] = {  # and the unit
    "global batch": (lambda v: f"{v:.0f}", " sample"),
    "link speed": (lambda v: f"× {v:.3g}", ""),
    "workers": (lambda v: f"{v:.0f}", " device"),
    "memory": (answer_tables.format_bytes, ""),
    "sequence length": (lambda v: f"{v:.0f}", ""),
}
