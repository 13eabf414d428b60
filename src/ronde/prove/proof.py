"""``ronde prove``: is a script on N workers the same training as on one? Equal, or the first thing
that differs, and why.

The script runs as it is, in float64 on the CPU, for some steps: with one process, whose global
batch is one batch; with one process again, every weight moved by one unit in its last place, which
tells rounding from error; and with N workers under each plan. See :mod:`ronde.prove.recorder` for
what is written down, and :mod:`ronde.prove.diagnose` for the diagnosis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ronde.introspect import is_user_file
from ronde.plan import Plan
from ronde.plan.torch_errors import meaning
from ronde.prove.catalogue import Cause, cause
from ronde.prove.compare import Comparison, Difference, RunTrace, compare, lost_from
from ronde.prove.diagnose import GONE, SEEDED, Case, diagnose, disagreement
from ronde.prove.process_pool import CONSEQUENCES, Failure, Launch, Pool
from ronde.world import ArgumentError

__all__ = ["ALL_PLANS", "PlanVerdict", "Verdict", "prove"]

ALL_PLANS = (
    "replicate",
    "shard=optimizer",
    "shard=gradients",
    "shard=parameters",
    "pipeline=2",
    "tensor=2",
)
_HYBRIDS = (
    "pipeline=2,shard=optimizer",
    "pipeline=2,shard=parameters",
    "tensor=2,shard=parameters",
)
_FILES = 5_000  # at most so many are looked at
_AT_FIRST = ("contract", "distribute", "initial weights", "initial buffers", "data")
_COMPUTED = ("outputs", "loss", "gradients", "clipped gradients", "weights", "buffers")
_TRAININGS = 3  # so many of a script's calls of ronde.distribute are compared
# by which the second run's clock is ahead: what is seeded by the time is then another one
_CLOCK_SECONDS = 86_413.37
# times what rounding does: a difference up to that is no error where a training magnifies rounding
_LOST = 1e3
_CHAOS = 1e-6  # two runs with one process that differ by more are not the same computation

Status = Literal["equal", "differs", "refused", "failed", "cannot"]


@dataclass(frozen=True)
class PlanVerdict:
    """What was found of one plan.

    Attributes:
        plan: as :meth:`Plan.parse` reads it.
        status: ``"equal"``, ``"differs"``, ``"refused"`` (the plan cannot carry this model out and
            says so), ``"failed"``, or ``"cannot"`` (rounding alone changes the training as much).
        difference: the first thing that differs.
        cause: why.
        largest, where: largest relative difference that is rounding, and of what.
        aside: parameters whose gradient is zero in exact arithmetic.
        error: why it was refused or failed.
    """

    plan: str
    status: Status
    difference: Difference | None = None
    cause: Cause | None = None
    largest: float = 0.0
    where: str = ""
    aside: tuple[str, ...] = ()
    steps: int = 0
    evaluations: int = 0
    compared: int = 0
    error: str = ""
    seconds: float = 0.0


@dataclass
class Verdict:
    """The answer.

    Attributes:
        status: ``"equal"``, ``"differs"`` or ``"cannot"`` (be proved).
        plans: one verdict for each.
        difference, cause: of the first plan that differs, or of the reference itself.
        steps: steps compared, ``steps_asked`` if the script did not end before.
        error: why it cannot be proved.
        notes: what was changed or left out for the proof.
    """

    command: list[str]
    workers: int
    steps_asked: int
    status: Status = "cannot"
    plans: list[PlanVerdict] = field(default_factory=list)
    difference: Difference | None = None
    cause: Cause | None = None
    steps: int = 0
    error: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_status(self) -> int:
        """0 equal, 1 differs, 2 cannot be proved."""
        return {"equal": 0, "differs": 1}.get(self.status, 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "exit_status": self.exit_status}


def _silent(_: str) -> None:
    return None


def chosen_plans(plans: str | Sequence[str], workers: int) -> list[str]:
    """The plans that were asked for; ``"all"`` are those that ``workers`` can carry out.

    Example:
        >>> chosen_plans("all", 2)[-1]
        'tensor=2'
        >>> chosen_plans(["zero3"], 2)
        ['shard=parameters']
        >>> chosen_plans("replicate,shard=optimizer,shard=parameters,pipeline=2", 2)
        ['replicate', 'shard=optimizer', 'pipeline=2,shard=parameters']
        >>> chosen_plans("replicate,pipeline=2,schedule=zbv,shard=parameters", 2)
        ['replicate', 'pipeline=2,schedule=zbv,shard=parameters']
    """
    if plans == "all":
        return [*ALL_PLANS, *(_HYBRIDS if workers >= 4 else ())]
    texts = [plans] if isinstance(plans, str) else list(plans)
    if not texts:
        raise ArgumentError(
            "no plan was given: --plans all, or plans such as replicate or shard=parameters."
        )
    return list(dict.fromkeys(Plan.parse(one).spec for text in texts for one in _apart(text)))


# They belong to the plan before them, and are no plan of their own.
_SETTINGS = ("schedule", "virtual", "micro_batch", "split_at", "optimize", "shard_within")


def _kind(word: str) -> str:
    key = word.partition("=")[0].strip().replace("-", "_")
    return key if key in _SETTINGS else Plan.parse(word).spec.partition("=")[0]


def _apart(text: str) -> list[str]:
    """Several plans in one text: another begins after ``replicate``, and where a word comes for the
    second time.
    """
    found: list[list[str]] = [[]]
    for raw in text.split(","):
        word = raw.strip()
        kind = _kind(word)
        if found[-1] and (
            kind == "replicate"
            or any(_kind(w) in (kind, "replicate") and kind not in _SETTINGS for w in found[-1])
        ):
            found.append([])
        found[-1].append(word)
    return [",".join(words) for words in found]


def prove(
    command: list[str],
    workers: int = 2,
    plans: str | Sequence[str] = "replicate",
    steps: int = 6,
    *,
    timeout_seconds: float = 600.0,
    progress: Callable[[str], None] = _silent,
) -> Verdict:
    """Compare a script's training on ``workers`` workers with one process.

    Args:
        command: script path and its arguments, or ``-m``, module and arguments.
        workers: how many.
        plans: one plan, several, or ``"all"``.
        steps: optimizer steps to compare.
        timeout_seconds: how long one run of the script may take.
        progress: told what is being done.

    Returns:
        Verdict: equal, the first thing that differs and why, or why it cannot be proved.

    Raises:
        ArgumentError: an argument cannot be used.
    """
    if workers < 2:
        raise ArgumentError(
            f"workers={workers}: to prove something against one process takes at least 2."
        )
    if steps < 1:
        raise ArgumentError(f"steps={steps} must be 1 or more.")
    explicit = plans != "all"
    wanted = chosen_plans(plans, workers)
    with Pool(workers) as pool:
        return Study(pool, command, steps, timeout_seconds, progress).verdict(wanted, explicit)


class Study:
    """One script, asked.

    Args:
        pool: where it runs; several studies may follow each other in one.
    """

    def __init__(
        self,
        pool: Pool,
        command: list[str],
        steps: int,
        timeout_seconds: float,
        progress: Callable[[str], None] = _silent,
    ) -> None:
        self.pool = pool
        self.command = command
        self.steps = steps
        self.timeout = timeout_seconds
        self.say = progress
        self._runs: dict[tuple[str, str], RunTrace | None] = {}
        self._training = 0
        self._one: RunTrace | None = None
        self._alone: dict[str, Any] | None = None
        self._owns_its_loop = False
        self._chaos: Difference | None = None
        self._logged: str | None = None
        self._ended: str | None = None
        self._since = time.time()
        self._dropped: list[str] = []  # where workers called for dropout

    def _start(self, name: str, plan: str, places: list[int], **changed: Any) -> Launch:
        settings = {
            "since": self._since,
            "launched": time.time(),
            "steps": self.steps,
            "workers": self.pool.workers,
            "training": self._training,
            **changed,
        }
        return self.pool.start(
            name, self.command, settings, {"RONDE_PLAN": plan}, places, self.timeout
        )

    def verdict(self, plans: list[str], explicit: bool = True) -> Verdict:
        """Run it and compare."""
        began = time.monotonic()
        files = _files()
        found = Verdict(self.command, self.pool.workers, self.steps)
        try:
            begun = self._answer(found, plans, explicit)
            tick = self._tick(found)
            for self._training in range(1, min(len(begun), _TRAININGS)):
                if tick is not None and tick <= begun[self._training]:
                    break  # what comes after it differs because of it
                self.say(f"training {self._training + 1} of {len(begun)}")
                self._runs.clear()
                other = Verdict(self.command, self.pool.workers, self.steps)
                self._answer(other, plans, explicit)
                later = self._tick(other)
                if later is not None and (tick is None or later < tick):
                    tick = later
                    _replace(found, other, self._training + 1, len(begun))
                elif other.status == "cannot" and found.status == "equal":
                    found.status, found.error = (
                        "cannot",
                        f"training {self._training + 1} of {len(begun)}: {other.error}",
                    )
            if found.difference is not None and found.difference.phase in _AT_FIRST:
                written = [name for name, when in _files().items() if files.get(name) != when]
                if written:
                    found.notes.insert(
                        0,
                        "The script writes "
                        f"{', '.join(written[:3])}{', …' if len(written) > 3 else ''} in "
                        "the current folder: if it also reads "
                        "that (to resume, say), what one run has written is what the next "
                        "one begins with. Prove it where it writes elsewhere.",
                    )
            if len(begun) > 1 and found.difference is None:
                compared = "each" if len(begun) <= _TRAININGS else f"the first {_TRAININGS}"
                found.notes.append(
                    f"The script calls ronde.distribute {len(begun)} times: {compared} was "
                    "compared, one after the other."
                )
        finally:
            self._training = 0
            found.seconds = time.monotonic() - began
        return found

    def _tick(self, found: Verdict) -> int | None:
        """When what differs first happened, counted over all of the script's trainings."""
        d, one = found.difference, self._one
        if d is None or one is None:
            return None
        steps = one.steps()
        if not d.step or not steps:
            return int(one.first("opening").get("tick", 0))
        return int(steps[min(d.step, len(steps)) - 1]["tick"])

    def _answer(self, found: Verdict, plans: list[str], explicit: bool) -> list[int]:
        """Fill a verdict in; gives when each of the script's trainings began."""
        self.say("one process, twice")
        first = self._start("one", "replicate", [0], reference=True, probe=True)
        second = self._start(
            "rounded", "replicate", [1], reference=True, perturb=True, clock=_CLOCK_SECONDS
        )
        self.pool.wait(first, second)
        # both write the script's files, which one process alone would have to itself
        if first.failure or second.failure:
            first = self._start("one", "replicate", [0], reference=True, probe=True)
            self.pool.wait(first)
            second = self._start(
                "rounded", "replicate", [1], reference=True, perturb=True, clock=_CLOCK_SECONDS
            )
            self.pool.wait(second)
        failure = first.failure or second.failure
        one, rounded = RunTrace(first.folder, 1), RunTrace(second.folder, 1)
        self._limit = (
            max(60.0, 20 * max(first.seconds, second.seconds))
            if self.timeout >= 60
            else self.timeout
        )
        self._one = one
        trainings = [1, *(e["tick"] for e in one.events[0] if e["kind"] == "training")]
        if failure:
            found.error = _failed_alone(failure)
            if failure.kind == "SystemExit" and not one.opened:
                found.error = _ended_early(
                    self.command,
                    failure,
                    (first if first.failure else second).folder / "output-0.log",
                )
            if failure.kind == "ArgumentError" and "over other parameters" in failure.text:
                found.cause = cause("stale-optimizer", failure.text)
                found.difference = Difference("optimizer", 0, "the optimizer's parameters")
            return trainings
        if not one.opened:
            found.error = (
                "the script ended without calling ronde.distribute: there is nothing to prove."
            )
            return trainings
        found.steps = len(one.steps())
        if not found.steps:
            found.error = "the script ended without a step: there is nothing to prove."
            return trainings
        found.notes = self._notes(one)
        self._alone = one.first("ready").get("plan")
        self._owns_its_loop = (
            not one.steps()[0]["given"] and one.first("opening").get("micro_batch") is None
        )
        self._chaos, self._logged, self._dropped, self._ended = None, None, [], _ended_with(one)
        self._itself(found, one, rounded)
        if found.status == "differs":
            return trainings
        for plan in plans:
            verdict = self._plan(plan, one, rounded, found.plans)
            found.plans.append(verdict)
            if verdict.status == "differs" and found.difference is None:
                found.difference, found.cause = verdict.difference, verdict.cause
        self._alike(found, one)
        if self._logged and found.difference is None:
            found.notes.append(self._logged)
        found.notes += [] if self._ended is None else [self._ended]
        said = {p.status for p in found.plans}
        if found.difference is not None:
            found.status = "differs"
        elif (
            "failed" in said
            or "cannot" in said
            or said == {"refused"}
            or (explicit and "refused" in said)
        ):
            found.status = "cannot"
            found.error = next(
                f"{p.plan}: {p.error}"
                for p in found.plans
                if p.status in ("failed", "cannot", "refused")
            )
        else:
            found.status = "equal"
        return trainings

    def _itself(self, found: Verdict, one: RunTrace, rounded: RunTrace) -> None:
        """Does one process train the same twice?"""
        apart = compare(one, rounded, tolerance=_CHAOS).difference
        if apart is None:
            return
        id = {
            "contract": "unseeded-script",
            "initial weights": "unseeded-init",
            "initial buffers": "unseeded-init",
        }.get(apart.phase)
        if apart.phase in ("order", "data"):
            id = {"order": "unseeded-sampler", "data": "unseeded-data"}[apart.phase]
        if id is None or (apart.phase == "initial weights" and apart.step):
            self.say("one process once more: two runs of it differ")
            again = self._start("again", "replicate", [0], reference=True)
            self.pool.wait(again)
            same = (
                compare(one, RunTrace(again.folder, 1), tolerance=1e-12).difference
                if not again.failure
                else apart
            )
            if same is None:
                self._chaos = apart
                found.notes.append(
                    "This training magnifies rounding: one unit in the last place of the weights "
                    f"becomes {apart.relative or 0:.1e} in the {apart.phase} of {apart.name!r} in "
                    f"step {apart.step}. Smaller errors than that cannot be seen."
                )
                return
            apart, id = same, "nondeterministic-kernel"
        found.status, found.difference, found.cause = (
            "differs",
            apart,
            self._of_files(rounded) if apart.phase in _AT_FIRST else None,
        )
        found.cause = found.cause or cause(id)

    def _of_files(self, rounded: RunTrace) -> Cause | None:
        """The cause, if the script reads what another run has written: the first two ran at the
        same time, a third one tells.
        """
        again = self._start("again", "replicate", [0], reference=True)
        self.pool.wait(again)
        noted = [
            *rounded.notes().get("reread", []),
            *RunTrace(again.folder, 1).notes().get("reread", []),
        ]
        return (
            cause("reads-another-run", f"it reads {noted[0].split('|', 1)[1].replace('@', ' at ')}")
            if noted
            else None
        )

    def _alike(self, found: Verdict, one: RunTrace) -> None:
        """What is wrong with one process and with N alike."""
        if found.difference is not None:
            return
        stale = next(((s["step"] + 1, s["stale"]) for s in one.steps() if s.get("stale")), None)
        if stale:
            found.difference = Difference(
                "optimizer", stale[0], stale[1][0], others=tuple(stale[1][1:6])
            )
            found.cause = cause(
                "stale-optimizer",
                f"the optimizer does not hold {stale[1][0]!r} as it is used in step {stale[0]}",
            )
            return
        noted = [*one.notes().get("dropout", []), *self._dropped]
        active = [n.split("|", 1)[1] for n in noted if n.startswith("evaluate|")]
        if active:
            where = active[0] or "in the model"
            step = one.evaluations()[0]["step"] if one.evaluations() else 0
            found.difference = Difference("evaluation", step, where)
            found.cause = cause("dropout-in-evaluation", f"at {where}")

    def _plan(
        self, plan: str, one: RunTrace, rounded: RunTrace, before: list[PlanVerdict]
    ) -> PlanVerdict:
        if not one.steps()[0]["given"] and Plan.parse(plan).pipeline > 1:
            return PlanVerdict(
                plan,
                "refused",
                error="the script owns its loop (run.backward), a pipeline needs run.step(batch)",
            )
        self.say(f"{self.pool.workers} workers, {plan}")
        launch = self._start(
            plan.replace("=", "-").replace(",", "_"), plan, list(range(self.pool.workers))
        )
        launch.limit_seconds = self._limit
        self.pool.wait(launch)
        many = RunTrace(launch.folder, self.pool.workers)
        if launch.failure and not _differed_before(one, many, rounded):
            return self._failed(plan, launch.failure, launch.seconds, one, many)
        self._dropped += many.notes().get("dropout", [])
        self._ended = self._ended or _ended_with(many)
        result = compare(one, many, rounded)
        d = result.difference
        lost = lost_from(one, many)
        if lost is not None and (d is None or d.step >= lost):
            verdict = _verdict(plan, "cannot", result, launch.seconds)
            error = (
                f"from step {lost} on the loss or every weight is not finite (nan or "
                f"infinite), with one process and with {self.pool.workers} workers: "
                f"nothing is left to compare.{' What comes before is equal.' if lost > 1 else ''}"
            )
            return dataclasses.replace(verdict, difference=None, error=error)
        if d is None:
            self._logged = self._logged or _logged_otherwise(one, rounded, many)
            return _verdict(plan, "equal", result, launch.seconds)
        if (
            self._chaos is not None
            and d.place >= self._chaos.place
            and (d.relative or 0.0) <= _LOST * (self._chaos.relative or 0.0)
        ):
            verdict = _verdict(plan, "cannot", result, launch.seconds)
            error = (
                f"from step {d.step} on rounding cannot be told from error: one unit in the last "
                f"place of the weights changes the {self._chaos.phase} of {self._chaos.name!r} by "
                f"{self._chaos.relative or 0:.1e}, {self.pool.workers} workers change the "
                f"{d.phase} of {d.name!r} by {d.relative or 0:.1e}. What comes before is equal."
            )
            return dataclasses.replace(verdict, difference=None, error=error)
        earlier = [p for p in before if p.difference is not None and p.cause is not None]
        key = (d.phase, d.step, d.name)
        same = next(
            (
                p.cause
                for p in earlier
                if p.difference
                and (p.difference.phase, p.difference.step, p.difference.name) == key
            ),
            None,
        )
        if same is None:
            self.say(f"{plan}: {d.phase} of step {d.step} differ; looking for the cause")
            split = Plan.parse(plan)
            replicated = split.pipeline == 1 and split.tensor == 1 and split.shard == "none"
            case = Case(
                one,
                many,
                d,
                lambda what: self._again(plan, what),
                replicated,
                replicated or self._replicate_is_equal(one, rounded, before),
            )
            same = diagnose(case)
        return _verdict(plan, "differs", result, launch.seconds, same)

    def _replicate_is_equal(
        self, one: RunTrace, rounded: RunTrace, before: list[PlanVerdict]
    ) -> bool:
        """Whether the script is sound where only the data is split."""
        for verdict in before:
            if verdict.plan == "replicate":
                return verdict.status == "equal"
        trace = self._again("replicate", "replicate")
        return trace is not None and compare(one, trace, rounded).difference is None

    def _failed(
        self, plan: str, failure: Failure, seconds: float, one: RunTrace, many: RunTrace
    ) -> PlanVerdict:
        meant = meaning(failure.text, Plan.parse(plan))
        if meant is not None:
            return PlanVerdict(plan, "refused", error=meant, seconds=seconds)
        begun = any(many.steps(r) for r in range(many.size))
        # in the pass by which such a plan is laid out
        beforehand = Plan.parse(plan).family != "replicate" and failure.kind == "LossError"
        # by an earlier ronde.distribute
        shared = failure.kind == "ArgumentError" and "divided over workers already" in failure.text
        if Plan.parse(plan).family != "replicate" and _in_layout(failure, many):
            told_why = (
                "in the pass by which ronde.distribute lays this plan out, the script "
                f"fails: {failure.kind}: {failure.text}"
            )
            return PlanVerdict(plan, "refused", error=told_why, seconds=seconds)
        if (
            failure.kind in ("PlanError", "Diverged")
            or shared
            or (not begun and (beforehand or failure.kind == "ArgumentError"))
        ):
            return PlanVerdict(plan, "refused", error=failure.text, seconds=seconds)
        told = disagreement(failure.text) if failure.kind == "WorldError" else None
        if told:
            reads = sorted({n for r in range(many.size) for n in _read_early(many, r)})
            alike = self._again(plan, "alike")
            if alike is not None and alike.steps() and compare(one, alike).difference is None:
                return PlanVerdict(
                    plan,
                    "differs",
                    told[0],
                    cause("unseeded-script", SEEDED),
                    error=failure.text,
                    seconds=seconds,
                )
            return PlanVerdict(
                plan,
                "differs",
                told[0],
                cause(told[1], *(f"the script reads {n}" for n in reads[:3])),
                seconds=seconds,
            )
        counts = [
            (
                len(many.steps(r)),
                sum(e["kind"] in ("evaluating", "evaluated") for e in many.events[r]),
            )
            for r in range(many.size)
        ]
        ended = (
            {any(e["kind"] == "end" for e in many.events[r]) for r in range(many.size)}
            if failure.kind != "killed"
            else set()
        )
        gone = failure.kind in ("timeout", "killed") or any(
            word in failure.text for word in CONSEQUENCES
        )
        if gone and (len(set(counts)) > 1 or len(ended) > 1):
            # They wait for each other at different places, or one has ended.
            step = min(c[0] for c in counts) + 1
            d = Difference("steps", step, "what the workers wait for", None, None, failure.text)
            return PlanVerdict(
                plan,
                "differs",
                d,
                cause("rank-dependent-loop", failure.text),
                error=failure.text,
                seconds=seconds,
            )
        exchanges = sorted(
            {n.split("|", 1)[1].replace("@", " at ") for n in many.notes().get("exchange", [])}
        )
        if exchanges and "collective mismatch" in failure.text:
            step = min(c[0] for c in counts) + 1
            d = Difference("steps", step, "what the workers exchange", None, None, failure.text)
            asks = (
                f"the script calls {', '.join(exchanges[:3])}; a worker without samples of a "
                "batch does not call the model in run.step()"
            )
            return PlanVerdict(
                plan,
                "differs",
                d,
                cause("rank-dependent-loop", asks),
                error=failure.text,
                seconds=seconds,
            )
        # who was killed by something else is not the loop's doing
        if _reads_rank(many) and failure.kind != "killed":
            blind = self._again(plan, "blind")
            if blind is not None and blind.steps() and compare(one, blind).difference is None:
                step = min(c[0] for c in counts) + 1
                name, who = (
                    ("what the workers wait for", None) if gone else ("what is done", failure.rank)
                )
                d = Difference("steps", step, name, who, None, failure.text)
                asks = f"the script reads {', '.join(_reads_rank(many)[:3])}"
                return PlanVerdict(
                    plan,
                    "differs",
                    d,
                    cause("rank-dependent-loop", asks, GONE),
                    error=failure.text,
                    seconds=seconds,
                )
        what = (
            failure.text
            if failure.kind in ("killed", "timeout")
            else f"{failure.kind}: {failure.text}"
        )
        where = what if failure.kind == "timeout" else f"rank {failure.rank}: {what}"
        last = f"\n{failure.trace.rstrip()}" if failure.trace else ""
        return PlanVerdict(plan, "failed", error=where + last, seconds=seconds)

    def _again(self, plan: str, what: str) -> RunTrace | None:
        """An experiment: the same with one thing changed; each at most once."""
        key = (plan, what)
        if key not in self._runs:
            self.say(
                {
                    "split": "one process that splits the batch",
                    "twice": "one process that computes every forward pass twice",
                    "parts": "one process that computes parts of batches as well",
                    "blind": "workers that are told that they are alone",
                    "alike": "workers that start with one seed",
                    "whole": "without micro-batches",
                    "replicate": "replicate, to compare with",
                }.get(what, f"with {what}")
            )
            if what in ("split", "twice", "parts"):
                apart = what == "split" and self._owns_its_loop
                launch = self._start(
                    what, "replicate", [0], reference=True, apart=apart, **{what: True}
                )
            else:
                alone: dict[str, Any] = {"blind": True, "alone": self._alone}
                changed = {
                    "replicate": {},
                    "whole": {"whole": True},
                    "blind": alone,
                    "alike": {"alike": True},
                }.get(what, {"sync_batchnorm": True})
                launch = self._start(what, plan, list(range(self.pool.workers)), **changed)
            launch.limit_seconds = self._limit
            self.pool.wait(launch)
            self._runs[key] = (
                None if launch.failure else RunTrace(launch.folder, len(launch.places))
            )
        return self._runs[key]

    def _notes(self, one: RunTrace) -> list[str]:
        noted, opening = one.notes(), one.first("opening")
        found = []
        places = sorted({n.split("|", 1)[1] for n in noted.get("dropout", [])} - {""})
        if "dropout" in noted:
            where = f" ({', '.join(places[:3])})" if places else ""
            found.append(
                f"Dropout was switched off{where}: N workers draw other masks than one, "
                "the same in distribution."
            )
        if "precision" in noted or "autocast" in noted:
            found.append("Autocast was switched off: everything was computed in float64.")
        if "float32" in noted:
            found.append(
                "Something insists on single precision: differences below 1e-3 were taken "
                "for rounding."
            )
        if "evaluates" in noted:
            found.append(
                "The script evaluates the model by itself: that was not compared. "
                "run.evaluate() counts each sample once."
            )
        if len(one.steps()) < self.steps:
            found.append(
                f"The script ended after {len(one.steps())} of {self.steps} steps: those "
                "were compared."
            )
        short, whole = opening.get("short"), opening.get("epoch_samples")
        if short is not None and short < whole:
            last = f"a last batch of {opening['last']} and " if opening.get("last") else ""
            found.append(
                f"Epochs were cut to {short} of {whole} samples, to have {last}ends of "
                "epochs among the steps."
            )
        left = sorted(set(opening.get("names", [])) - set(opening.get("held", [])))
        if left:
            found.append(
                "The optimizer does not hold "
                f"{', '.join(left[:3])}{', …' if len(left) > 3 else ''}: it is not trained."
            )
        return found


def _files() -> dict[str, int]:
    """The files of the current folder and of those in it, and when each was changed."""
    found: dict[str, int] = {}
    here = Path.cwd()
    with contextlib.suppress(OSError):
        for path in itertools.islice(itertools.chain(here.glob("*"), here.glob("*/*")), _FILES):
            if path.is_file() and "__pycache__" not in path.parts:
                found[str(path.relative_to(here))] = path.stat().st_mtime_ns
    return found


def _replace(found: Verdict, other: Verdict, number: int, of: int) -> None:
    """What was found of another training of the same script comes before what was found until
    now.
    """
    found.status, found.difference, found.cause, found.plans = (
        other.status,
        other.difference,
        other.cause,
        other.plans,
    )
    found.steps, found.error = other.steps, other.error
    found.notes.insert(
        0,
        f"The difference is one of training {number} of {of} (the script calls "
        f"ronde.distribute {of} times).",
    )


def _logged_otherwise(one: RunTrace, rounded: RunTrace, many: RunTrace) -> str | None:
    """What rank 0 of several writes with ``run.log`` that one process does not. Times differ from
    one process to itself.
    """

    def logged(trace: RunTrace) -> list[dict[str, Any]]:
        return [e for e in trace.events[0] if e["kind"] == "logged"]

    for a, b, c in zip(logged(one), logged(rounded), logged(many), strict=False):
        for name, value in a["values"].items():
            again, there = b["values"].get(name), c["values"].get(name)
            if (
                again is None
                or there is None
                or a["step"] != c["step"]
                or not all(map(math.isfinite, (value, again, there)))
            ):
                continue
            scale = max(abs(value), abs(there))
            if abs(there - value) > 1e-6 * scale and abs(there - value) > _LOST * abs(
                again - value
            ):
                return (
                    f"The training is the same, what the script logs is not: {name!r} after step "
                    f"{a['step']} is {value:.6g} with one process and {there:.6g} on rank 0 of "
                    f"{many.size}, the only one that writes it. run.evaluate() and the loss that "
                    "run.step() returns are of all workers."
                )
    return None


def _in_layout(failure: Failure, many: RunTrace) -> bool:
    """Whether the script's own code failed while ronde.distribute followed it: what it refers to
    may not be there yet (``run``).
    """
    if any(many.first("ready", r) for r in range(many.size)) or not many.first(
        "opening", failure.rank
    ):
        return False
    files = re.findall(r'File "(.+?)", line', failure.trace)
    ours = str(Path(__file__).resolve().parents[1])
    inside = next(
        (
            i
            for i, file in reversed(list(enumerate(files)))
            if file.startswith(ours) and file.endswith("run/distribute.py")
        ),
        None,
    )
    return inside is not None and any(
        not file.startswith("<") and is_user_file(file) for file in files[inside:]
    )


def _ended_with(run: RunTrace) -> str | None:
    """What a script failed with after the last step that was asked for."""
    for rank, events in enumerate(run.events):
        error = next((e["error"] for e in events if e["kind"] == "ended with"), None)
        if error is not None:
            who = "one process" if run.size == 1 else f"rank {rank} of {run.size}"
            return (
                f"After the last step that was compared the script failed ({who}): "
                f"{error.rstrip(': ')}. prove ends a training early, which a script may "
                "not expect; what comes after it was not compared."
            )
    return None


def _differed_before(one: RunTrace, many: RunTrace, rounded: RunTrace) -> bool:
    """Whether a run that failed had computed something else in a step before, which is then what is
    told.
    """
    d = (
        compare(one, many, rounded).difference
        if all(many.steps(r) for r in range(many.size))
        else None
    )
    return d is not None and d.step > 0 and d.phase in _COMPUTED


def _reads_rank(many: RunTrace) -> list[str]:
    return sorted({n.split("|", 1)[1].replace("@", " at ") for n in many.notes().get("rank", [])})


def _read_early(many: RunTrace, rank: int) -> list[str]:
    return [
        n.split("|", 1)[1].replace("@", " at ")
        for n in many.notes(rank).get("rank", [])
        if n.startswith("setup|")
    ]


def _verdict(
    plan: str, status: Status, result: Comparison, seconds: float, why: Cause | None = None
) -> PlanVerdict:
    return PlanVerdict(
        plan,
        status,
        result.difference,
        why,
        result.largest,
        result.where,
        tuple(result.aside),
        result.steps,
        result.evaluations,
        result.compared,
        seconds=seconds,
    )


def _ended_early(command: list[str], failure: Failure, log: Path) -> str:
    """For a script that called ``sys.exit`` itself, most often since it was given no arguments;
    nobody has seen what it printed.
    """
    script = " ".join(command[:2] if command[0] == "-m" else command[:1])
    printed = log.read_text(errors="replace").splitlines()[-20:] if log.is_file() else []
    told = (
        f"{script} ended by itself before ronde.distribute: {failure.text}. Its own arguments "
        f"go after its name: ronde prove {script} ARGS…"
    )
    return "\n".join([told, *(["What it printed last:"] if printed else []), *printed])


def _failed_alone(failure: Failure) -> str:
    text = (
        f"{failure.kind}: {failure.text}"
        if failure.kind not in ("killed", "timeout", "SystemExit")
        else failure.text
    )
    told = f"the script fails with one process, in float64 on the CPU: {text}"
    if "dtype" in failure.text or "scalar type" in failure.text or "Double" in failure.text:
        told += (
            "\nA type is fixed to single precision somewhere: let it follow the input's or the "
            "weights' (x.dtype)."
        )
    return told + (f"\n{failure.trace.rstrip()}" if failure.trace else "")
