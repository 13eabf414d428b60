"""Put a search's result into words: what to do, what decided, and when it would flip."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.predict.assumptions import Precision
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs
from ronde.predict.prediction import TERMS, Prediction
from ronde.predict.search import SearchResult, search
from ronde.world import ArgumentError
from ronde.world.units import format_bytes, format_seconds

_DOUBLINGS = 6  # how far each way a flip is looked for: to 64 times, or a 64th
_NO_FASTER_FACTOR = 1.05  # speed-up up to which several devices are not worth it


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
        result: of the search.
        calibration: where the numbers come from.
        workers, batch_size: of the question.
        precision: how sure the predictions are.
    """

    sentence: str
    decided: str
    runner_up: str
    flips: tuple[Flip, ...]
    result: SearchResult
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
            **self.result.to_dict(),
        }


def explain(
    result: SearchResult,
    costs: Costs,
    cluster: Cluster,
    *,
    with_flips: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain a search result.

    Args:
        result: of the search.
        costs, cluster: what it was about.
        with_flips: whether other values are searched, for when the answer would flip.
        tell: shows progress.
    """
    best = result.best
    if best.verdict == "does not fit" and result.optimize == "speed":
        # What comes nearest is not among the fastest.
        nearest = search(costs, cluster, result.workers, optimize="memory", like=result.like)
        result = dataclasses.replace(
            result,
            plans=tuple(sorted(nearest.plans, key=lambda p: p.memory_bytes)),
            families=nearest.families,
        )
        best = result.best
    sure = Precision.of(costs, cluster, best.plan)
    sentence = _sentence(result, sure)
    if result.workers > 1 and best.verdict != "does not fit" and best.speedup <= _NO_FASTER_FACTOR:
        one = search(costs, cluster, 1, optimize=result.optimize, simulate=0, like=result.like)
        sentence = _beside_one(result, sentence, one.best, sure)
    decided, runner_up = _comparison(result, sure)
    return Explanation(
        sentence=sentence,
        decided=decided,
        runner_up=runner_up,
        flips=flips(result, costs, cluster, tell) if with_flips else (),
        result=result,
        calibration=_calibration(best, costs, cluster),
        workers=result.workers,
        batch_size=costs.batch_size,
        precision=sure,
    )


# The answer.


def _sentence(result: SearchResult, sure: Precision) -> str:
    best, plan = result.best, result.best.plan
    if best.verdict == "does not fit":
        return (
            f"Nothing fits {result.workers} workers of {format_bytes(best.capacity_bytes)}: the "
            f"least is {sure.size(best.memory_bytes)}, by {plan.spec}. Use more devices, "
            "devices with more memory, or a smaller model."
        )
    room = f" of {format_bytes(best.capacity_bytes)}" if best.capacity_bytes else ""
    needs = f"{sure.size(best.memory_bytes)}{room}"
    extra = [_WORDS[w] for w in (plan.recompute, f"offload {plan.offload}") if w in _WORDS]
    if best.micro_batches > 1 and plan.pipeline == 1:
        extra.append(f"in {best.micro_batches} micro-batches of {best.micro_samples}")
    how = "".join(f", {each}" for each in extra)
    if result.workers == 1:
        rate = f"{sure.about}{best.samples_per_second:.4g} samples/s"
        step = sure.step(best.step_seconds)
        return f"One device: the model needs {needs}{how} and trains {rate}, {step}."
    reach = f"take {sure.step(best.step_seconds)}, {sure.about}{best.speedup:.1f}× one device"
    why = _too_big(result)
    if plan.pipeline > 1 or plan.tensor > 1:
        what = "model" if plan.pipeline > 1 else "each layer"
        goal = why or f"{'memory' if result.optimize == 'memory' else 'time'} decides"
        text = f"Split {'the ' if plan.pipeline > 1 else ''}{what}: {goal}; {_shape(best)}{how} "
        return f"{text}need {needs} and {reach}; {_tail(best)}."
    if plan.shard != "none":
        over = f"{plan.replicas} workers"
        if plan.shard_within:
            over = f"{plan.shard_within} neighbours each"
        since = f", since {why}" if why else ""
        return (
            f"Split the data, and shard {_SHARDED[plan.shard]} over {over}{since}: that needs "
            f"{needs}{how}; {plan.replicas} workers {reach}; {_tail(best)}."
        )
    return (
        f"Split the data: the model needs {needs}{how}; {plan.replicas} replicas {reach}; "
        f"{_tail(best)}."
    )


def _shape(best: Prediction) -> str:
    """Stages, workers a layer and replicas of a plan that divides the model."""
    plan = best.plan
    parts = [f"{plan.tensor} workers a layer"] if plan.tensor > 1 else []
    if plan.pipeline > 1:
        each = f" of {plan.virtual} parts" if plan.virtual > 1 else ""
        parts.insert(0, f"{plan.pipeline} stages{each}")
    if plan.replicas > 1:
        parts.append(f"{plan.replicas} {'replicas' if plan.shard == 'none' else 'shards'}")
    several = f"{best.micro_batches} micro-batch{'es' if best.micro_batches > 1 else ''}"
    return " × ".join(parts) + (f" ({plan.schedule}, {several})" if plan.pipeline > 1 else "")


def _of_capacity(prediction: Prediction) -> str:
    return f"{format_bytes(prediction.memory_bytes)} of {format_bytes(prediction.capacity_bytes)}"


def _beside_one(result: SearchResult, answer: str, alone: Prediction, sure: Precision) -> str:
    """The answer when the workers are hardly faster than one device, or slower."""
    if alone.verdict in ("risky", "does not fit"):
        return (
            f"{answer} One device alone needs {sure.about}{_of_capacity(alone)} "
            f"({alone.verdict}): {result.workers} are worth it for the memory only."
        )
    times = alone.step_seconds / result.best.step_seconds
    if times > _NO_FASTER_FACTOR:
        return answer  # it fits with recomputation or the like, which takes longer
    room = "" if alone.capacity_bytes else ", if its memory has room for the model"
    return (
        f"Use one device{room}: {result.workers} reach {times:.2g}× of its speed. For "
        f"{result.workers}: {answer[0].lower()}{answer[1:]}"
    )


def _too_big(result: SearchResult) -> str:
    """Why the model is not replicated, if memory decides."""
    whole = [p for p in result.plans if p.plan.family == "replicate" and p.plan.offload == "none"]
    if whole and all(p.verdict == "does not fit" for p in whole):
        return f"a whole replica needs {_of_capacity(min(whole, key=lambda p: p.memory_bytes))}"
    return ""


def _tail(best: Prediction) -> str:
    waits = ("exchange", "gather", "tensor", "interference")
    wire = sum(best.terms.get(k, 0.0) for k in waits) / (best.step_seconds or math.inf)
    if best.plan.pipeline > 1:
        return f"a worker waits {100 * best.bubble:.0f} % of the step"
    if wire < 0.05 and best.hidden_seconds > 0:
        return "the exchange hides behind the backward pass"
    return f"{100 * wire:.0f} % of the step waits for the exchange"


def _comparison(result: SearchResult, sure: Precision) -> tuple[str, str]:
    """The number that decided, and why the runner-up lost."""
    best, second = result.best, result.runner_up
    nothing_fits = best.verdict == "does not fit"
    least = f"memory: {sure.size(best.memory_bytes)} of {format_bytes(best.capacity_bytes)} at best"
    if second is None:
        decided = least if nothing_fits else "the only family of plans there is"
        return decided, "There is no other family of plans for these workers and this batch."
    family, other = best.plan.family, second.plan.family
    name = f"{other} ({second.plan.spec})"
    if nothing_fits or _verdict_decided(best, second):
        needs = f"needs {sure.about}{_of_capacity(second)}"
        decided = least if nothing_fits else f"memory: {other} {needs} ({second.verdict})"
        return decided, f"{name} {needs}: it {_FIT[second.verdict]}."
    by_memory = result.optimize == "memory"
    here, there = (p.memory_bytes if by_memory else p.step_seconds for p in (best, second))
    gap, spread = (
        there / here - 1.0 if here else math.inf,
        sure.memory if by_memory else sure.spread,
    )
    if abs(gap) <= spread:
        what = "memory" if by_memory else "step time"
        return (
            f"nothing: {family} and {other} differ in {what} by {100 * abs(gap):.1f} %, and such "
            f"predictions are off by {100 * spread:.0f} %",
            f"{name} cannot be told apart from it.",
        )
    if by_memory:
        decided = f"memory: {sure.size(here)} against {sure.size(there)} of {other}"
        return decided, f"{name} needs {sure.size(there)}; here {sure.size(here)}."
    more = sorted(((second.terms[k] - best.terms[k], k) for k in TERMS), reverse=True)
    why = ", ".join(f"{_TERM_WORDS[k]} +{format_seconds(d)}" for d, k in more[:2] if d > 0)
    term = more[0][1]
    mine, its = (
        f"{sure.seconds(p.terms[term])} a step" if p.terms[term] else "none" for p in (best, second)
    )
    return (
        f"{_TERM_WORDS[term]}: {its} in {other}, {mine} in {family}",
        f"{name} is {sure.about}{100 * gap:.0f} % slower: {why}.",
    )


def _verdict_decided(best: Prediction, second: Prediction) -> bool:
    order = ("fits", "unknown", "risky", "does not fit")
    return order.index(second.verdict) > max(1, order.index(best.verdict))


def _calibration(best: Prediction, costs: Costs, cluster: Cluster) -> tuple[str, ...]:
    """Where the numbers come from."""
    layers = "layers: estimated"
    if cluster.speed_is_estimate:
        layers = f"layers: their work counted here, times from the data sheet of {cluster.device}"
    elif costs.device:
        samples = ", ".join(map(str, costs.measured_samples))
        layers = f"layers: measured on {costs.device} at {samples} samples, disturbance "
        layers += f"{100 * costs.noise:.0f} %"
    links = (f"links: {cluster.source or cluster.name}",) if cluster.links else ()
    return (layers, *links, *costs.notes, *best.notes)


# When it would flip.


def flips(
    result: SearchResult,
    costs: Costs,
    cluster: Cluster,
    tell: Callable[[str], None] | None = None,
) -> tuple[Flip, ...]:
    """Find when another family would win, varying one quantity at a time in both directions.

    Each value of a fixed grid of up to six doublings each way gets a whole search. Large searches
    try fewer values.

    Args:
        result: the search now.
        costs, cluster: what it was about.
        tell: shows progress.
    """

    ask = functools.partial(search, optimize=result.optimize, prune=True, like=result.like)
    workers = result.workers

    def changed(variable: str, value: float) -> tuple[Costs, Cluster, int]:
        """The question with another value of one variable."""
        if variable == "global batch":
            return dataclasses.replace(costs, batch_size=round(value)), cluster, workers
        if variable == "memory":
            return costs, dataclasses.replace(cluster, memory_bytes=value), workers
        if variable == "link speed":
            links = {
                kind: {s: dataclasses.replace(fit, beta=fit.beta * value) for s, fit in by.items()}
                for kind, by in cluster.links.items()
            }
            return costs, dataclasses.replace(cluster, links=links), workers
        batch = costs.batch_size
        if result.like is not None and result.like.batch == "grow":
            batch = max(1, round(batch * value / workers))
        nodes = max(1, math.ceil(value / max(1, cluster.devices_per_node)))
        grown = dataclasses.replace(costs, batch_size=batch)
        return grown, dataclasses.replace(cluster, nodes=nodes), round(value)

    def winner(variable: str, value: float) -> tuple[str, str]:
        try:
            return _named(ask(*changed(variable, value)).best)
        except ArgumentError:
            return "", ""

    asked: dict[str, float] = {"global batch": costs.batch_size}
    if workers > 1 and cluster.links:
        asked["link speed"] = 1.0
    asked["workers"] = workers
    if cluster.memory_bytes:
        asked["memory"] = cluster.memory_bytes
    now = ask(costs, cluster, workers, simulate=0)
    each = (now.considered - now.left_out.get("slower", 0)) * max(1, len(costs.units))
    # plans times layers of all flips, about 6 s at 30 µs each: large searches double less often
    doublings = max(1, min(_DOUBLINGS, 200_000 // max(1, each * 2 * len(asked))))
    here = _named(result.best)
    every = []
    for (variable, value), direction in itertools.product(asked.items(), ("down", "up")):
        if tell is not None:
            tell(f"looking for when the answer would flip: {variable} {direction}")
        at = functools.partial(winner, variable)
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
        grid = [v for v in grid if v < value or v <= 4096]
    limit, holds = grid[-1] if grid else value, value
    for at in grid:
        family, spec = winner(at)
        if family != here:
            return Flip(variable, direction, value, at, family, spec, limit, holds)
        holds = at
    return Flip(variable, direction, value, None, "", "", limit, holds)


# For the terminal.


def render_answer(explanation: Explanation, *, verbose: bool = False) -> RenderableType:
    """The answer, tables and notes for a rich console of any width.

    Args:
        explanation: what to show.
        verbose: every note, and each plan's memory by kind; otherwise the first three notes.
    """
    result, sure = explanation.result, explanation.precision
    error = f"of the step time not known: {sure.why}"
    if sure.time is not None:
        error = (
            f"predictions like these were off by {100 * sure.time:.0f} % in time and "
            f"{100 * sure.memory:.0f} % in memory, on average over "
            f"{'published' if sure.estimate else 'real'} runs"
        )
    best = result.best
    kinds = ((kind, size) for kind, size in best.memory.items() if size)
    facts = {
        "Decided by": explanation.decided,
        "Runner-up": explanation.runner_up,
        "Error": error,
        "Assumed": "; ".join(a.sentence() for a in sure.assumed),
        "Memory": ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds),
        "Placement": "; ".join(f"{name}: {at}" for name, at in best.placement.items()),
    }
    parts: list[RenderableType] = [Text(explanation.sentence, style="bold"), Text()]
    parts += [Text.assemble((f"{k:<12}", "dim"), v) for k, v in facts.items() if v]
    for row in best.stages:
        seconds = format_seconds(row.forward_seconds + row.backward_seconds)
        parts.append(
            Text.assemble(
                (f"{f'Stage {row.stage}':<12}", "dim"),
                f"{row.first} to {row.last} on worker {row.worker}: {seconds} a micro-batch, "
                f"{format_bytes(row.memory_bytes)} with {row.in_flight} in flight",
            )
        )
    parts += [Text(), _table(result, sure.about)]
    if verbose:
        parts += [Text(), *_details(result)]
    if explanation.flips:
        parts += [Text(), Text("The answer would flip", style="bold")]
        for variable, both in itertools.groupby(explanation.flips, lambda flip: flip.variable):
            ways = [flip.sentence().partition(": ")[2] for flip in both]
            parts.append(Text(f"  {variable}: {'; '.join(ways)}"))
    counts = f"{result.considered:,} plans looked at, {result.simulated} predicted in full"
    if result.left_out.get("memory"):
        counts += f", {result.left_out['memory']:,} too big"
    notes = list(explanation.calibration)
    if not verbose and len(notes) > 3:
        notes = [*notes[:3], f"{len(notes)} notes in all: --verbose, or --json"]
    parts += [Text(), Text("\n".join([*notes, counts]), style="dim")]
    return Group(*parts)


def _table(result: SearchResult, about: str) -> Table:
    """The best plan of each family."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("plan", overflow="fold", max_width=26)  # so that 80 columns are enough
    for head in ("step", "speed-up", "bubble", "memory"):
        # a terminal that is too narrow breaks a number, and leaves out none of its digits
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for p in result.families.values():
        table.add_row(
            p.plan.spec.replace(",", ", "),
            f"{about}{format_seconds(p.step_seconds)}",
            f"{p.speedup:.1f}×",
            f"{100 * p.bubble:.0f} %" if p.plan.pipeline > 1 else "–",
            format_bytes(p.memory_bytes),
            Text(p.verdict, style=_STYLES[p.verdict]),
        )
    return table


def _details(result: SearchResult) -> list[Text]:
    """What a device of each plan trains, sends, and holds: a line each, since a table would need
    more columns than a terminal has.
    """
    lines = []
    for p in result.families.values():
        rate = p.samples_per_second
        facts = [f"{rate:,.4g} samples/s" if rate < 1e4 else f"{rate:,.0f} samples/s"]
        facts += [f"sends {format_bytes(p.exchanged_bytes)} a step"] if p.exchanged_bytes else []
        facts += [f"{kind} {format_bytes(size)}" for kind, size in p.memory.items() if size]
        lines.append(Text.assemble((f"{p.plan.family}  ", "dim"), ", ".join(facts)))
    return lines


_STYLES = {"fits": "green", "unknown": "", "risky": "yellow", "does not fit": "red"}
_WORDS = {
    "full": "with full recomputation",
    "selective": "with selective recomputation",
    "offload optimizer": "with its optimizer's state in the host's memory",
    "offload parameters": "with its parameters and optimizer's state in the host's memory",
}
_SHARDED = {
    "optimizer": "the optimizer's state",
    "gradients": "gradients and optimizer",
    "parameters": "all states",
}
_FIT = {"fits": "fits", "unknown": "may fit", "risky": "is risky", "does not fit": "does not fit"}
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
_WHOLE = ("global batch", "workers")
_SHOW: dict[str, tuple[Callable[[float], str], str]] = {  # and the unit
    "global batch": (lambda v: f"{v:.0f}", " sample"),
    "link speed": (lambda v: f"× {v:.3g}", ""),
    "workers": (lambda v: f"{v:.0f}", " device"),
    "memory": (format_bytes, ""),
}
