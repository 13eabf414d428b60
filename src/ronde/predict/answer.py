"""Put a search's result into words: what to do, what decided, and when it would flip."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ronde.predict import answer_tables
from ronde.predict.assumptions import Precision, error_range
from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs
from ronde.predict.prediction import TERMS, Prediction
from ronde.predict.search import SearchResult, search
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import format_bytes, format_seconds

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
    """

    variable: str
    direction: str
    now: float
    at: float | None
    to: str
    spec: str
    limit: float
    holds: float

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
        precision: how sure the predictions are.
    """

    sentence: str
    decided: str
    runner_up: str
    flips: tuple[Flip, ...]
    found: SearchResult
    calibration: tuple[str, ...]
    workers: int
    batch_size: int
    precision: Precision

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
            **self.precision.to_dict(),
            **self.found.to_dict(),
        }


def explain(
    found: SearchResult,
    costs: Costs,
    cluster: Cluster,
    *,
    with_flips: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain a search result.

    Args:
        found: the search.
        costs, cluster: what it was about.
        with_flips: whether other values are searched, for when the answer would flip.
        tell: shows progress.
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
    sure = Precision.of(costs, cluster, best.plan)
    slow = found.workers > 1 and best.verdict != "does not fit" and best.speedup <= _NO_FASTER
    sentence = _sentence(found, cluster, sure)
    if slow:
        one = search(costs, cluster, 1, optimize=found.optimize, simulate=0, like=found.like)
        sentence = _beside_one(found, sentence, one.best, sure)
    return Explanation(
        sentence=sentence,
        decided=_decided(found, sure),
        runner_up=_lost(found, sure),
        flips=flips(found, costs, cluster, tell) if with_flips else (),
        found=found,
        calibration=_calibration(best, costs, cluster),
        workers=found.workers,
        batch_size=costs.batch_size,
        precision=sure,
    )


# The answer.


def _sentence(found: SearchResult, cluster: Cluster, sure: Precision) -> str:
    best, plan = found.best, found.best.plan
    room = f" of {format_bytes(cluster.memory_bytes)}" if cluster.memory_bytes else ""
    needs = f"{sure.size(best.memory_bytes)}{room}"
    if best.verdict == "does not fit":
        least = _least(found)
        return (
            f"Nothing fits {found.workers} workers of {format_bytes(cluster.memory_bytes)}: the "
            f"least is {sure.size(least.memory_bytes)}, by {least.plan.spec}. Use more devices, "
            "devices with more memory, or a smaller model."
        )
    if found.workers == 1:
        extra = [_WORDS[w] for w in (plan.recompute, f"offload {plan.offload}") if w in _WORDS]
        if best.micro_batches > 1:
            extra.append(f"in {best.micro_batches} micro-batches")
        how = f", {', '.join(extra)}," if extra else ""
        rate = f"{sure.about}{_rate(best)}, {sure.step(best.step_seconds)}"
        return f"One device: the model{how} needs {needs} and trains {rate}."
    reach = f"take {sure.step(best.step_seconds)}, {sure.about}{best.speedup:.1f}× one device"
    tail = _tail(best)
    with_recompute = f", with {_WORDS[plan.recompute]}" if plan.recompute != "none" else ""
    if best.micro_batches > 1 and plan.pipeline == 1:
        with_recompute += f", in {best.micro_batches} micro-batches of {best.micro_samples}"
    goal = "memory" if found.optimize == "memory" else "time"
    why = _too_big(found, "one copy") or f"{goal} decides"
    if plan.pipeline > 1:
        shape = f"{plan.pipeline} stages"
        if plan.virtual > 1:
            shape = f"{plan.pipeline} workers with {plan.virtual} stages each"
        if plan.replicas > 1:
            shape += f" × {plan.replicas} replicas"
            shape += ", which share out their states," if plan.shard != "none" else ""
        if plan.tensor > 1:
            shape += f" × {plan.tensor} workers a layer"
        several = "es" if best.micro_batches > 1 else ""
        return (
            f"Split the model: {why}; {shape} ({plan.schedule}, {best.micro_batches} "
            f"micro-batch{several}{with_recompute}) need {needs} and {reach}; {tail}."
        )
    if plan.tensor > 1:
        parts = "shards" if plan.shard != "none" else "replicas"
        shape = f"{plan.tensor} workers a layer × {plan.replicas} {parts}"
        return f"Split each layer: {why}; {shape}{with_recompute} need {needs} and {reach}; {tail}."
    if plan.shard != "none":
        what = {
            "optimizer": "the optimizer's state",
            "gradients": "gradients and optimizer",
            "parameters": "all states",
        }[plan.shard]
        within = plan.shard_within
        over = f"{within} neighbours each" if within else f"{plan.replicas} workers"
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


def _of_capacity(prediction: Prediction) -> str:
    return f"{format_bytes(prediction.memory_bytes)} of {format_bytes(prediction.capacity_bytes)}"


def _beside_one(found: SearchResult, answer: str, alone: Prediction, sure: Precision) -> str:
    """The answer when the workers are hardly faster than one device, or slower."""
    best, one = found.best, alone.plan
    # The speed-up of the table, but where one device needs another way to fit.
    plain = one.recompute == "none" and one.offload == "none" and alone.micro_batches == 1
    times = best.speedup if plain else alone.step_seconds / best.step_seconds
    if alone.verdict in ("risky", "does not fit"):
        speed = "" if best.speedup > 1 / _NO_FASTER else f"{1 / best.speedup:.1f}× "
        return (
            f"{answer} One device alone would be {speed}as fast, but needs "
            f"{sure.about}{_of_capacity(alone)} "
            f"({alone.verdict}): {found.workers} are worth it for the memory only."
        )
    if times > _NO_FASTER:
        return answer  # it fits with recomputation or the like, which takes longer
    reach = f"are no faster ({times:.2f}×)"
    if times < 1 / _NO_FASTER:
        reach = f"reach only {times:.2g}× of it"
    memory = f", if its memory has room for {sure.size(alone.memory_bytes)}"
    memory = "" if alone.capacity_bytes else memory
    return (
        f"Use one device{memory}: {found.workers} {reach}, since {_why_slow(best, alone)}. For "
        f"{found.workers}: {answer[0].lower()}{answer[1:]}"
    )


def _why_slow(best: Prediction, alone: Prediction) -> str:
    """The largest cost of several workers that one device does not have."""
    surplus = {k: best.terms[k] - alone.terms[k] / best.plan.workers for k in TERMS}
    most = sorted(((v / best.step_seconds, k) for k, v in surplus.items()), reverse=True)[:2]
    whole = ("compute", "recompute", "optimizer")
    said = [
        f"{100 * share:.0f} % is {_TERM_WORDS[k]}{' that does not divide' if k in whole else ''}"
        for share, k in most
        if share >= 0.1
    ]
    if not said:
        return "nothing of the step becomes much shorter"
    return f"of their step {' and '.join(said)}"


def _not_whole(found: SearchResult) -> str:
    """Why states are sharded instead of replicated."""
    too_big = _too_big(found, "a whole replica")
    if too_big:
        return f", since {too_big}"
    whole = next((p for p in found.plans if p.plan.family == "replicate"), None)
    if whole is None:
        return ""
    if found.optimize == "memory":
        size = format_bytes(whole.memory_bytes)
        return f", which takes less memory than whole replicas ({size})"
    if whole.step_seconds > found.best.step_seconds:
        again = whole.plan.recompute
        how = f" with {_WORDS[again]}, as they would fit" if again != "none" else ""
        return f", which is faster than whole replicas{how}"
    return f", since a whole replica needs {_of_capacity(whole)} ({whole.verdict})"


def _too_big(found: SearchResult, what: str) -> str:
    whole = [p for p in found.plans if p.plan.family == "replicate" and p.plan.offload == "none"]
    if whole and all(p.verdict == "does not fit" for p in whole):
        least = min(whole, key=lambda p: p.memory_bytes)
        how = f" even with {_WORDS[least.plan.recompute]}" if least.plan.recompute in _WORDS else ""
        return f"{what} needs {_of_capacity(least)}{how}"
    if not whole and found.workers > found.best.plan.batch_size:
        return f"{found.workers} replicas would share a batch of {found.best.plan.batch_size}"
    return ""


def _tail(best: Prediction) -> str:
    waits = ("exchange", "gather", "tensor", "interference")
    wire = sum(best.terms.get(k, 0.0) for k in waits) / (best.step_seconds or math.inf)
    if best.plan.pipeline > 1:
        text = f"a worker waits {100 * best.bubble:.0f} % of the step"
        return text + (f", exchange takes {100 * wire:.0f} %" if wire >= _HIDES else "")
    if wire < _HIDES and best.hidden_seconds > 0:
        return "the exchange hides behind the backward pass"
    if wire < _HIDES:
        return f"exchange takes {100 * wire:.0f} % of the step"
    return f"{100 * wire:.0f} % of the step is exchange that does not hide"


def _decided(found: SearchResult, sure: Precision) -> str:
    """The number that decided."""
    best, second = found.best, found.runner_up
    if best.verdict == "does not fit":
        least = sure.size(_least(found).memory_bytes)
        return f"memory: {least} of {format_bytes(best.capacity_bytes)} at best"
    if second is None:
        memory = f"memory: {sure.about}{_of_capacity(best)}, " if best.capacity_bytes else ""
        return f"{memory}the only family of plans there is"
    other = second.plan.family
    if _verdict_decided(best, second):
        # As the sentence has it: the one of its family that needs least.
        of_family = (p for p in found.plans if p.plan.family == other)
        smallest = min(of_family, key=lambda p: p.memory_bytes)
        needs = f"{sure.about}{_of_capacity(smallest)}"
        return f"memory: {other} needs {needs} at least ({smallest.verdict})"
    if (gap := _within(found, second, sure)) is not None:
        what = "memory" if found.optimize == "memory" else "step time"
        return f"nothing: {best.plan.family} and {other} differ in {what} by {gap}"
    if found.optimize == "memory":
        here, there = sure.size(best.memory_bytes), sure.size(second.memory_bytes)
        return f"memory: {here} against {there} of {other}"
    name = max(TERMS, key=lambda k: second.terms[k] - best.terms[k])
    here, there = (
        f"{sure.seconds(p.terms[name])} a step" if p.terms[name] else "none" for p in (best, second)
    )
    return f"{_TERM_WORDS[name]}: {there} in {other}, {here} in {best.plan.family}"


def _within(found: SearchResult, second: Prediction, sure: Precision) -> str | None:
    """How far two plans are apart, if that is too little to tell them apart; else None."""
    best = found.best
    here, there, spread = best.step_seconds, second.step_seconds, sure.spread
    if found.optimize == "memory":
        here, there, spread = best.memory_bytes, second.memory_bytes, sure.memory
    gap = abs(there / here - 1.0) if here else math.inf
    if gap > spread:
        return None
    usual = error_range("sheet time" if sure.estimate else "measured time")
    disturbed = found.optimize == "speed" and spread > usual
    what = "the measurements vary" if disturbed else "such predictions are off"
    return f"{100 * gap:.1f} %, and {what} by {100 * spread:.0f} %"


def _lost(found: SearchResult, sure: Precision) -> str:
    best, second = found.best, found.runner_up
    if second is None:
        return "There is no other family of plans for these workers and this batch."
    name = f"{second.plan.family} ({second.plan.spec})"
    if _verdict_decided(best, second):
        return f"{name} {_VERDICT_WORDS[second.verdict]}: {sure.about}{_memory_words(second)}."
    if best.verdict == "does not fit":
        return f"{name} needs {sure.about}{_memory_words(second)}: it does not fit either."
    slower = second.step_seconds / best.step_seconds - 1.0 if best.step_seconds else 0.0
    if found.optimize == "memory" and second.memory_bytes > best.memory_bytes:
        faster = "faster, but" if slower < 0 else "slower, and"
        needs = f"{sure.about}{_memory_words(second)}; here {sure.size(best.memory_bytes)}"
        return f"{name} is {sure.about}{100 * abs(slower):.0f} % {faster} needs {needs}."
    if found.optimize == "speed" and _within(found, second, sure) is not None:
        simpler = " It is less simple." if slower <= 0 else ""
        return f"{name} cannot be told apart from it.{simpler}"
    if slower <= 0:
        return f"{name} is as fast within {-100 * slower:.1f} %, and less simple."
    differences = sorted(((second.terms[k] - best.terms[k], k) for k in TERMS), reverse=True)
    much = 0.1 * (second.step_seconds - best.step_seconds)
    up = [(d, k) for d, k in differences if d > much][:3]
    down = [(d, k) for d, k in reversed(differences) if -d > much][:2]
    rest = sum(d for d, _ in differences) - sum(d for d, _ in (*up, *down))
    more = [f"{_TERM_WORDS[k]} +{format_seconds(d)}" for d, k in up]
    less = [f"{_TERM_WORDS[k]} −{format_seconds(-d)}" for d, k in down]
    if up and rest > much:
        more.append(f"the rest +{format_seconds(rest)}")
    if -rest > much:
        less.append(f"the rest −{format_seconds(-rest)}")
    gains = f"; it gains {', '.join(less)}" if less else ""
    costs = ", ".join(more) or "a little of everything"
    return f"{name} is {sure.about}{100 * slower:.0f} % slower: {costs}{gains}."


def _verdict_decided(best: Prediction, second: Prediction) -> bool:
    order = ("fits", "unknown", "risky", "does not fit")
    return order.index(second.verdict) > max(1, order.index(best.verdict))


def _memory_words(prediction: Prediction) -> str:
    kinds = sorted(((v, k) for k, v in prediction.memory.items() if v > 0), reverse=True)[:3]
    return ", ".join([_of_capacity(prediction), *(f"{k} {format_bytes(v)}" for v, k in kinds)])


def _calibration(best: Prediction, costs: Costs, cluster: Cluster) -> tuple[str, ...]:
    rows = ["layers: estimated"]
    if cluster.speed_is_estimate:
        rows = [f"layers: their work counted here, times from the data sheet of {cluster.device}"]
    elif costs.device:
        samples = ", ".join(map(str, costs.measured_samples))
        sizes = f" at {samples} samples" if samples else ""
        noise = f"disturbance {100 * costs.noise:.0f} %"
        rows = [f"layers: measured on {costs.device}{sizes}, {noise}"]
    if cluster.links:
        worst = max((f.residual for by in cluster.links.values() for f in by.values()), default=0.0)
        assumed = all(f.assumed for by in cluster.links.values() for f in by.values())
        how = "assumed" if assumed else f"measured, fits within {100 * worst:.0f} %"
        if not assumed and not worst and not cluster.source:
            how = "as the cluster file says"
        rows.append(f"links: {how} ({cluster.source or cluster.name})")
    rows += [*costs.notes, *best.notes]
    return tuple(rows)


# When it would flip.


def flips(
    found: SearchResult,
    costs: Costs,
    cluster: Cluster,
    tell: Callable[[str], None] | None = None,
) -> tuple[Flip, ...]:
    """Find when another family would win, varying one quantity at a time in both directions.

    Each value of a fixed grid of up to six doublings each way gets a whole search. Large searches
    try fewer values.

    Args:
        found: the search now.
        costs, cluster: what it was about.
        tell: shows progress.
    """

    ask = functools.partial(search, optimize=found.optimize, prune=True, like=found.like)

    def winner(costs: Costs, cluster: Cluster, workers: int) -> tuple[str, str]:
        try:
            return _named(ask(costs, cluster, workers).best)
        except ArgumentError:
            return "", ""

    workers = found.workers
    node = max(1, cluster.devices_per_node)

    def at_batch(value: float) -> tuple[str, str]:
        return winner(dataclasses.replace(costs, batch_size=round(value)), cluster, workers)

    def at_link(value: float) -> tuple[str, str]:
        def faster(by: Mapping[Any, LinkFit]) -> dict[Any, LinkFit]:
            return {s: dataclasses.replace(fit, beta=fit.beta * value) for s, fit in by.items()}

        links = {kind: faster(by) for kind, by in cluster.links.items()}
        return winner(costs, dataclasses.replace(cluster, links=links), workers)

    def at_workers(value: float) -> tuple[str, str]:
        count = round(value)
        grown = costs
        if found.like is not None and found.like.batch == "grow":
            batch = max(1, round(costs.batch_size * count / workers))
            grown = dataclasses.replace(costs, batch_size=batch)
        nodes = max(1, math.ceil(count / node))
        return winner(grown, dataclasses.replace(cluster, nodes=nodes), count)

    def at_memory(value: float) -> tuple[str, str]:
        return winner(costs, dataclasses.replace(cluster, memory_bytes=value), workers)

    asked: list[tuple[str, float, Callable[[float], tuple[str, str]]]] = [
        ("global batch", costs.batch_size, at_batch)
    ]
    if workers > 1 and cluster.links:
        asked.append(("link speed", 1.0, at_link))
    asked.append(("workers", workers, at_workers))
    if cluster.memory_bytes:
        asked.append(("memory", cluster.memory_bytes, at_memory))
    now = ask(costs, cluster, workers, simulate=0)
    each = (now.considered - now.left_out.get("slower", 0)) * max(1, len(costs.units))
    doublings = max(1, min(_DOUBLINGS, _LOOKED_AT // max(1, each * 2 * len(asked))))
    here = _named(found.best)
    every = []
    for variable, value, at in asked:
        for direction in ("down", "up"):
            if tell is not None:
                tell(f"looking for when the answer would flip: {variable} {direction}")
            every.append(find_flip(variable, value, at, direction, now=here, doublings=doublings))
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
) -> Flip:
    """Double or halve ``value`` until another family wins.

    Args:
        variable: its name.
        value: now.
        winner: value -> (family, spec).
        direction: ``"up"`` or ``"down"``.
        now: the winner at ``value``; None to ask.
        doublings: how many at most.

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
            return Flip(variable, direction, value, at, family, spec, limit, holds)
        holds = at
    return Flip(variable, direction, value, None, "", "", limit, holds)


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
    parts: list[RenderableType] = [
        Text(explanation.sentence, style="bold"),
        Text(),
        Text.assemble(("Decided by  ", "dim"), explanation.decided),
        Text.assemble(("Runner-up   ", "dim"), explanation.runner_up),
    ]
    sure = explanation.precision
    kind = "published" if sure.estimate else "real"
    error = (
        f"predictions like these were off by {100 * (sure.time or 0.0):.0f} % in time and "
        f"{100 * sure.memory:.0f} % in memory, on average over {kind} runs"
    )
    if sure.time is None:
        error = f"of the step time not known: {sure.why}"
    parts.append(Text.assemble(("Error       ", "dim"), error))
    if sure.assumed:
        assumed = "; ".join(a.sentence() for a in sure.assumed)
        parts.append(Text.assemble(("Assumed     ", "dim"), assumed))
    parts += [
        Text(),
        answer_tables.times(found, sure.about),
        Text(),
        answer_tables.memory(found),
    ]
    if found.best.placement:
        where = "; ".join(f"{name}: {place}" for name, place in found.best.placement.items())
        parts.append(Text.assemble(("Placement   ", "dim"), where))
    if found.best.stages:
        parts.extend([Text(), answer_tables.stages(found.best, stages)])
    if explanation.flips:
        parts.extend([Text(), Text("The answer would flip", style="bold")])
        if explanation.decided.startswith("nothing"):
            told = "  (the two best cannot be told apart: a flip between them means little)"
            parts.append(Text(told, style="dim"))
        for variable, both in groupby(explanation.flips, lambda flip: flip.variable):
            directions = list(both)
            found_one = any(flip.at is not None for flip in directions)
            said = [flip.sentence().partition(": ")[2] for flip in directions]
            line = f"  {variable}: {'; '.join(said)}"
            parts.append(Text(line, style="" if found_one else "dim"))
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
    console = plain_console(width=width, color_system=None, force_terminal=False, record=False)
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


_WHOLE = ("global batch", "workers")
_MOST_WORKERS = 4096
_SHOW: dict[str, tuple[Callable[[float], str], str]] = {  # and the unit
    "global batch": (lambda v: f"{v:.0f}", " sample"),
    "link speed": (lambda v: f"× {v:.3g}", ""),
    "workers": (lambda v: f"{v:.0f}", " device"),
    "memory": (format_bytes, ""),
}
