"""``ronde prove``: is a script on N workers the same training as on one?

The script runs unchanged, in float64 on the CPU, for some steps: with one process, whose global
batch is one batch; once more, with every weight moved by one unit in its last place, which tells
rounding from error; and with N workers under each plan. :mod:`ronde.prove.recorder` records the
runs, :mod:`ronde.prove.compare` compares them, and :mod:`ronde.prove.causes` names causes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from ronde.plan import Plan, parse_reducer
from ronde.prove.causes import cause, diagnose
from ronde.prove.compare import Difference, compare, lost_from
from ronde.prove.evidence import Case, clock_of
from ronde.prove.experiment import Experiment
from ronde.prove.failures import ENDED, FailedRun, explain_exit, explain_failure, note_late_error
from ronde.prove.plan_list import chosen_plans
from ronde.prove.plan_verdict import Holds, PlanVerdict, Verdict, verdict_of
from ronde.prove.process_pool import Launch, Pool
from ronde.prove.run_trace import RunTrace
from ronde.world import ArgumentError

__all__ = ["Study", "prove"]

_COMPUTED = (
    "data",
    "loop",
    "batch",
    "outputs",
    "loss",
    "gradients",
    "clipped gradients",
    "weights",
    "buffers",
)
_TRAININGS = 3  # calls of ronde.distribute that are compared, at most: each runs the script anew
_CHAOS_ERROR = 1e-6  # two runs of one process that differ by more are not the same computation
_NOT_BEHIND = ("randomness", "unknown")  # causes that say no more than that numbers differ
_UNSEEDED = {
    "contract": "unseeded-script",
    "initial weights": "unseeded-init",
    "initial buffers": "unseeded-init",
    "order": "unseeded-sampler",
    "data": "unseeded-data",
    "batch": "unseeded-script",
}
_RATES = ("learning rate", "optimizer settings", "scheduler")
_BETWEEN = ("loop", "weights between steps", "steps")
_TITLES = {
    Experiment.AGAIN: "one process once more: two runs of it differ",
    Experiment.SPLIT: "one process that splits the batch",
    Experiment.ALONE: "workers that are told that they are alone",
    Experiment.ONE_SEED: "workers that start with one seed",
    Experiment.PLAN: "replicate, to compare with",
}


def _silent(_: str) -> None:
    return None


def prove(
    command: list[str],
    workers: int | Sequence[int] = (2, 3),
    plans: str | Sequence[str] | None = None,
    steps: int = 6,
    *,
    timeout_seconds: float = 600.0,
    progress: Callable[[str], None] = _silent,
) -> Verdict:
    """Compare a script's training on ``workers`` workers with one process.

    Args:
        command: script path and its arguments, or ``-m``, module, and arguments.
        workers: the number of workers, or several numbers. A plan that does not fit one after the
            first is not compared there.
        plans: one plan, several, or ``"all"``; None is the one that the script
            asks for, at its smallest size.
        steps: optimizer steps to compare.
        timeout_seconds: limit of one run of the script.
        progress: called with a line on each run.

    Returns:
        Verdict: equal; the first difference and its cause; or why it cannot be proved.

    Raises:
        ArgumentError: an argument cannot be used.
    """
    counts = [workers] if isinstance(workers, int) else list(dict.fromkeys(workers))
    if not counts or min(counts) < 2:
        few = min(counts, default=0)
        raise ArgumentError(f"workers={few}: a proof against one process takes at least 2.")
    if steps < 1:
        raise ArgumentError(f"steps={steps} must be 1 or more.")
    explicit = plans != "all"
    chosen = None if plans is None else chosen_plans(plans, counts[0])
    with Pool(max(counts)) as pool:
        study = Study(pool, command, steps, timeout_seconds, progress, counts)
        return study.verdict(chosen, explicit)


class Study:
    """The proof of one script. Several studies may use one pool, one after the other."""

    def __init__(
        self,
        pool: Pool,
        command: list[str],
        steps: int,
        timeout_seconds: float,
        progress: Callable[[str], None] = _silent,
        workers: Sequence[int] = (),
    ) -> None:
        self.pool = pool
        self.counts = list(workers) or [pool.workers]
        self._workers = self.counts[0]  # of the runs now
        self.command = command
        self.steps = steps
        self.timeout = timeout_seconds
        self.say = progress
        self._training = 0
        self._runs: dict[tuple[str, Experiment, bool, int], RunTrace | None] = {}
        self._one: RunTrace | None = None
        self._first_steps: list[dict[str, Any]] = []  # of the first training
        self._limit = timeout_seconds  # of runs after the first two
        self._plan_alone: dict[str, Any] | None = None
        self._owns_its_loop = False
        self._chaos: Difference | None = None  # between two runs of one process
        self._remarks: dict[str, str | None] = {}  # on noise, counts, and late errors
        self._dropouts: list[str] = []  # places where workers call dropout
        # random draws are made the same for any number of workers: now; the two runs of one
        # process with them, and the plans so far
        self._same_draws = False
        self._behind: tuple[RunTrace, RunTrace] | None = None
        self._behind_before: list[PlanVerdict] = []

    def verdict(self, plans: list[str] | None, explicit: bool = True) -> Verdict:
        """Run the script and compare. ``plans`` is None for the script's own; ``explicit``: a
        refused plan is no proof.
        """
        start = time.monotonic()
        verdict = Verdict(self.command, self.counts[0], self.steps)
        try:
            begins = self._prove_training(verdict, plans, explicit)
            self._prove_later(verdict, begins, plans, explicit)
            if len(begins) > 1 and verdict.difference is None:
                compared = "each" if len(begins) <= _TRAININGS else f"the first {_TRAININGS}"
                verdict.notes.append(
                    f"The script calls ronde.distribute {len(begins)} times: {compared} was "
                    "compared, one after the other."
                )
            if verdict.status == "equal":
                verdict.holds = self._holds(verdict)
        finally:
            self._training = 0
            verdict.seconds = time.monotonic() - start
        return verdict

    def _holds(self, verdict: Verdict) -> Holds:
        """What was inside the first training, which every plan was compared with."""
        first = self._first_steps
        plans = [p for p in verdict.plans if p.status == "equal"]
        return Holds(
            steps=verdict.steps,
            # every plan was compared on these
            workers=tuple(n for n in self.counts if all(n in p.workers for p in plans)),
            plan="; ".join(p.plan for p in plans),
            epoch_end=len({s["epoch"] for s in first}) > 1,
            short_batch=len({len(s["ids"]) for s in first}) > 1,
            evaluation=all(p.evaluations for p in plans),
        )

    def _prove_later(
        self, verdict: Verdict, begins: list[int], plans: list[str] | None, explicit: bool
    ) -> None:
        """Compare later trainings of the same script; the earliest difference is the answer."""
        tick, of = self._tick(verdict), len(begins)
        for self._training in range(1, min(of, _TRAININGS)):
            number = self._training + 1
            if tick is not None and tick <= begins[self._training]:
                break  # a later training differs because of it
            self.say(f"training {number} of {of}")
            self._runs.clear()
            later = Verdict(self.command, self.counts[0], self.steps)
            self._prove_training(later, plans, explicit)
            later_tick = self._tick(later)
            if later_tick is not None and (tick is None or later_tick < tick):
                tick = later_tick
                for name in ("status", "workers", "difference", "cause", "plans", "steps", "error"):
                    setattr(verdict, name, getattr(later, name))
                verdict.notes.insert(
                    0,
                    f"The difference is one of training {number} of {of} (the script calls "
                    f"ronde.distribute {of} times).",
                )
            elif later.status == "cannot" and verdict.status == "equal":
                verdict.status, verdict.error = (
                    "cannot",
                    f"training {number} of {of}: {later.error}",
                )

    def _tick(self, verdict: Verdict) -> int | None:
        """The moment of a difference, counted over all trainings of the script."""
        d, one = verdict.difference, self._one
        if d is None or one is None:
            return None
        steps = one.steps()
        if not d.step or not steps:
            return int(one.first("opening").get("tick", 0))
        return int(steps[min(d.step, len(steps)) - 1]["tick"])

    # -- runs --------------------------------------------------------------------------

    def _start(self, experiment: Experiment, plan: str = "replicate", name: str = "") -> Launch:
        settings = {
            "experiment": experiment,
            "steps": self.steps,
            "workers": self._workers,
            "training": self._training,
            "owns_loop": self._owns_its_loop,
            "plan_alone": self._plan_alone,
            "same_draws": self._same_draws,
        }
        places = list(range(self._workers))
        if experiment.is_one_process:
            places = [1] if experiment is Experiment.ROUNDED else [0]
        environment = {"RONDE_PLAN": plan}
        name = name or experiment.value
        return self.pool.start(name, self.command, settings, environment, places, self._limit)

    def _run(self, plan: str, experiment: Experiment) -> RunTrace | None:
        """The run of an experiment, started at most once; None if it failed."""
        key = (plan, experiment, self._same_draws, self._workers)
        if key not in self._runs:
            self.say(_TITLES[experiment])
            launch = self._start(experiment, "replicate" if experiment.is_one_process else plan)
            self.pool.wait(launch)
            trace = RunTrace(launch.folder, len(launch.places))
            self._runs[key] = None if launch.failure else trace
        return self._runs[key]

    def _run_twice(self) -> tuple[Launch, Launch]:
        self.say("one process, twice")
        self._limit, self._owns_its_loop, self._plan_alone = self.timeout, False, None
        first, second = self._start(Experiment.ONE), self._start(Experiment.ROUNDED)
        self.pool.wait(first, second)
        if first.failure or second.failure:
            # Both write the script's files. One process would have them to itself.
            first = self._start(Experiment.ONE)
            self.pool.wait(first)
            second = self._start(Experiment.ROUNDED)
            self.pool.wait(second)
        if self.timeout >= 60:
            self._limit = max(60.0, 20 * max(first.seconds, second.seconds))
        return first, second

    # -- one training ------------------------------------------------------------------

    def _prove_training(
        self, verdict: Verdict, plans: list[str] | None, explicit: bool
    ) -> list[int]:
        """Fill the verdict in; returns when each of the script's trainings began."""
        self._workers = self.counts[0]
        first, second = self._run_twice()
        one, rounded = RunTrace(first.folder, 1), RunTrace(second.folder, 1)
        self._one = one
        begins = [1, *(e["tick"] for e in one.events_of("training"))]
        verdict.error = self._refusal(verdict, one, first, second)
        if verdict.error:
            return begins
        steps = one.steps()
        verdict.steps = len(steps)
        self._first_steps = self._first_steps or steps
        verdict.notes = self._notes(one)
        verdict.files = one.first("files").get("files", {})
        self._plan_alone = one.first("ready").get("plan")
        has_micro = one.first("opening").get("micro_batch") is not None
        self._owns_its_loop = not steps[0]["calls_loss"] and not has_micro
        self._chaos, self._remarks = None, {"late": note_late_error(one)}
        self._behind, self._behind_before, self._dropouts = None, [], []
        self._compare_alone(verdict, one, rounded)
        if verdict.status == "differs":
            return begins
        before: list[PlanVerdict] = []
        for plan in plans or [one.first("opening")["script_plan"]]:
            answer = self._prove_counts(plan, one, rounded, before)
            verdict.plans.append(answer)
            if answer.status == "differs" and verdict.difference is None:
                verdict.difference, verdict.cause = answer.difference, answer.cause
                verdict.workers = answer.workers[-1]
        self._find_common_fault(verdict, one)
        if verdict.difference is None:
            notes = [self._remarks.get(kind) for kind in ("noise", "counts")]
            verdict.notes += filter(None, notes)
        if (late := self._remarks["late"]) is not None:
            verdict.notes.append(late)
        _conclude(verdict, explicit)
        return begins

    def _refusal(self, verdict: Verdict, one: RunTrace, first: Launch, second: Launch) -> str:
        """Why the script cannot be proved, by its runs with one process; empty if it can."""
        failure = first.failure or second.failure
        if failure is None:
            if not one.opened:
                what = "calling ronde.distribute"
            elif not one.steps():
                what = "a step"
            else:
                return ""
            return f"the script ended without {what}: there is nothing to prove."
        if failure.kind == "ArgumentError" and "over other parameters" in failure.text:
            verdict.cause = cause("stale-optimizer", failure.text)
            verdict.difference = Difference("optimizer", 0, "the optimizer's parameters")
        if failure.kind == "SystemExit" and not one.opened:
            launch = first if first.failure else second
            return explain_exit(self.command, failure, launch.folder / "output-0.log")
        return explain_failure(failure)

    def _compare_alone(self, verdict: Verdict, one: RunTrace, rounded: RunTrace) -> None:
        """Does one process train the same twice?"""
        d = compare(one, rounded, tolerance=_CHAOS_ERROR).difference
        if d is None:
            return
        clock = clock_of(one)
        id = "not-repeatable" if clock and _is_rate(d) else _UNSEEDED.get(d.phase)
        if id is None or (d.phase == "initial weights" and d.step):
            self.say(_TITLES[Experiment.AGAIN])
            again = self._start(Experiment.AGAIN)
            self.pool.wait(again)
            same: Difference | None = d
            if not again.failure:
                same = compare(one, RunTrace(again.folder, 1), tolerance=1e-12).difference
            if same is None:
                self._chaos = d
                verdict.notes.append(
                    "This training magnifies rounding: one unit in the last place of the weights "
                    f"becomes {d.relative or 0:.1e} in the {d.phase} of {d.name!r} in "
                    f"step {d.step}. Smaller errors than that cannot be seen."
                )
                return
            by_script = _is_rate(same) or same.phase in _BETWEEN or clock_of(one, "step")
            d, id = same, "not-repeatable" if by_script else "nondeterministic-kernel"
        evidence = clock if id == "not-repeatable" else None
        verdict.status, verdict.difference, verdict.cause = "differs", d, cause(id, evidence)

    def _find_common_fault(self, verdict: Verdict, one: RunTrace) -> None:
        """Find faults that one process and N share."""
        if verdict.difference is not None:
            return
        for step in one.steps():
            if stale := step.get("stale"):
                k, others = step["step"] + 1, tuple(stale[1:6])
                verdict.difference = Difference("optimizer", k, stale[0], others=others)
                evidence = f"the optimizer does not hold {stale[0]!r} as it is used in step {k}"
                verdict.cause = cause("stale-optimizer", evidence)
                return
        notes = [*one.notes().get("dropout", []), *self._dropouts]
        active = [n.split("|", 1)[1] for n in notes if n.startswith("evaluate|")]
        if active:
            where = active[0] or "in the model"
            evaluations = one.evaluations()
            when = evaluations[0]["step"] if evaluations else 0
            verdict.difference = Difference("evaluation", when, where)
            verdict.cause = cause("dropout-in-evaluation", f"at {where}")

    # -- one plan ----------------------------------------------------------------------

    def _prove_counts(
        self, plan: str, one: RunTrace, rounded: RunTrace, before: list[PlanVerdict]
    ) -> PlanVerdict:
        """The verdict for a plan on each number of workers; the first that is not equal is it."""
        answer: PlanVerdict | None = None
        # the one process has the batch of the first number then
        grows = one.first("opening").get("contract", {}).get("batch") == "grow"
        for workers in self.counts[:1] if grows else self.counts:
            if answer is not None and not _fits(plan, workers):
                continue
            self._workers = workers
            behind = self._prove_behind(plan) if answer is not None and self._behind else None
            now = behind or self._prove_plan(plan, one, rounded, before)
            if answer is None:
                before.append(now)
            if now.cause is not None and now.cause.id == "randomness":
                now = self._look_behind(plan, now, one)
            self._same_draws = False
            if answer is not None and _has_ended(now):
                error = now.error.splitlines()[0]
                self._remarks["counts"] = f"On {workers} workers it was not compared: {error}"
                continue
            now = dataclasses.replace(now, workers=(workers,))
            answer = now if answer is None else answer.joined(now)
            if answer.status != "equal":
                break
        self._workers = self.counts[0]
        assert answer is not None
        return answer

    def _prove_plan(
        self, plan: str, one: RunTrace, rounded: RunTrace, before: list[PlanVerdict]
    ) -> PlanVerdict:
        kind = parse_reducer(Plan.parse(plan).reducer).kind
        if not kind.exact:
            error = (
                f"not the same training by design: {kind.effect}. Compare its loss curve instead"
            )
            return PlanVerdict(plan, "lossy", error=error)
        if not one.steps()[0]["calls_loss"] and Plan.parse(plan).pipeline > 1:
            error = "the script owns its loop (run.backward), a pipeline needs run.step(batch)"
            return PlanVerdict(plan, "refused", error=error)
        self.say(f"{self._workers} workers, {plan}")
        name = plan.replace("=", "-").replace(",", "_")
        launch = self._start(Experiment.PLAN, plan, name)
        self.pool.wait(launch)
        many, seconds = RunTrace(launch.folder, self._workers), launch.seconds

        def run(experiment: Experiment) -> RunTrace | None:
            return self._run(plan, experiment)

        # A run that failed after a difference is judged by the difference.
        if launch.failure and not _differs_in_step(one, many, rounded):
            return FailedRun(plan, launch.failure, seconds, one, many, run).verdict()
        self._dropouts += many.notes().get("dropout", [])
        self._remarks["late"] = self._remarks["late"] or note_late_error(many)
        result = compare(one, many, rounded)
        d = result.difference
        error = self._too_uncertain(d, one, many)
        if error:
            return dataclasses.replace(verdict_of(plan, "cannot", result, seconds), error=error)
        if d is None:
            return verdict_of(plan, "equal", result, seconds)
        why = _known_cause(d, before)
        if why is None:
            self.say(f"{plan}: {d.phase} of step {d.step} differ; looking for the cause")
            split = Plan.parse(plan)
            replicated = split.pipeline == 1 and split.tensor == 1 and split.shard == "none"
            equal = replicated or self._replicate_is_equal(one, rounded, before)
            why = diagnose(Case(one, many, d, run, replicated, equal))
        return verdict_of(plan, "differs", result, seconds, why)

    def _look_behind(self, plan: str, answer: PlanVerdict, one: RunTrace) -> PlanVerdict:
        """A plan that differs by random draws, with draws that are the same for any number of
        workers: is it equal then, or is there a cause behind them?
        """
        draws = answer.cause.evidence[:1] if answer.cause is not None else ()
        if answer.difference is None or answer.difference.phase == "data":
            return answer
        self.say(f"{plan}: with random numbers that do not depend on the number of workers")
        try:
            behind = self._prove_behind(plan)
        finally:
            self._same_draws = False
        if behind is None:
            return answer
        split = Plan.parse(plan)
        places = split.pipeline > 1 or split.tensor > 1  # not every draw is the same there
        if behind.status == "differs" and behind.cause is not None:
            if behind.cause.id in _NOT_BEHIND or (places and behind.cause.id == "plan"):
                return answer
            evidence = (*behind.cause.evidence, "seen with random numbers made the same everywhere")
            return dataclasses.replace(
                behind, cause=dataclasses.replace(behind.cause, evidence=evidence)
            )
        if behind.status != "equal":
            return answer
        if one.places("own generator", "step"):
            # the same on all workers: samples of two workers would get the same numbers
            same = "with random numbers made the same everywhere, it is equal"
            return dataclasses.replace(answer, cause=cause("randomness", *draws, same))
        self._remarks["noise"] = (
            f"Only random numbers differ ({'; '.join(draws)}): N workers draw other ones than one "
            "process, the same in distribution. Here all drew the same, and the training is equal."
        )
        return dataclasses.replace(behind, same_draws=True)

    def _prove_behind(self, plan: str) -> PlanVerdict | None:
        """The verdict where random draws do not depend on the number of workers; None if one
        process cannot tell.
        """
        self._same_draws = True
        if self._behind is None:
            first, second = self._start(Experiment.ONE), self._start(Experiment.ROUNDED)
            self.pool.wait(first, second)
            if first.failure or second.failure:
                return None
            one, rounded = RunTrace(first.folder, 1), RunTrace(second.folder, 1)
            self._behind = one, rounded
        one, rounded = self._behind
        if (
            self._chaos is None
            and compare(one, rounded, tolerance=_CHAOS_ERROR).difference is not None
        ):
            return None
        verdict = self._prove_plan(plan, one, rounded, self._behind_before)
        self._behind_before.append(verdict)
        return verdict

    def _too_uncertain(self, d: Difference | None, one: RunTrace, many: RunTrace) -> str:
        """Why the runs cannot be told d: values are not finite, or rounding is magnified."""
        lost, chaos, workers = lost_from(one, many), self._chaos, self._workers
        if lost is not None and (d is None or d.step >= lost):
            return (
                f"from step {lost} on the loss or every weight is not finite (nan or infinite), "
                f"with one process and with {workers} workers: nothing is left to compare."
                f"{' What comes before is equal.' if lost > 1 else ''}"
            )
        if d is None or chaos is None or d.place < chaos.place:
            return ""
        # up to so many times the effect of rounding, a chaotic training has no error
        if (d.relative or 0.0) > 1e3 * (chaos.relative or 0.0):
            return ""
        return (
            f"from step {d.step} on rounding cannot be told from error: one unit in the last place "
            f"of the weights changes the {chaos.phase} of {chaos.name!r} by "
            f"{chaos.relative or 0:.1e}, {workers} workers change the {d.phase} of {d.name!r} by "
            f"{d.relative or 0:.1e}. What comes before is equal."
        )

    def _replicate_is_equal(
        self, one: RunTrace, rounded: RunTrace, before: list[PlanVerdict]
    ) -> bool:
        """Whether the script is sound where only the data is split."""
        for verdict in before:
            if verdict.plan == "replicate":
                return verdict.status == "equal"
        trace = self._run("replicate", Experiment.PLAN)
        return trace is not None and compare(one, trace, rounded).difference is None

    def _notes(self, one: RunTrace) -> list[str]:
        """Changes and omissions for the proof."""
        noted, opening = one.notes(), one.first("opening")
        dropouts = sorted({n.split("|", 1)[1] for n in noted.get("dropout", [])} - {""})
        where = f" ({', '.join(dropouts[:3])})" if dropouts else ""
        autocast = "Autocast was switched off: everything was computed in float64."
        texts = {
            "dropout": f"Dropout was switched off{where}: N workers draw other masks than one, the "
            "same in distribution.",
            "precision": autocast,
            "autocast": autocast,
            "float32": "Something insists on single precision: differences below 1e-3 were taken "
            "for rounding.",
            "evaluates": "The script evaluates the model by itself: that was not compared. "
            "run.evaluate() counts each sample once.",
        }
        notes = list(dict.fromkeys(text for what, text in texts.items() if what in noted))
        if len(one.steps()) < self.steps:
            notes.append(
                f"The script ended after {len(one.steps())} of {self.steps} steps: those were "
                "compared."
            )
        short, whole = opening.get("short"), opening.get("epoch_samples")
        if short is not None and short < whole:
            last = f"a last batch of {opening['last']} and " if opening.get("last") else ""
            notes.append(
                f"Epochs were cut to {short} of {whole} samples, to have {last}ends of epochs "
                "among the steps."
            )
        left = sorted(set(opening.get("names", [])) - set(opening.get("optimized", [])))
        if left:
            few = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
            notes.append(f"The optimizer does not hold {few}: it is not trained.")
        return notes


def _conclude(verdict: Verdict, explicit: bool) -> None:
    """The script's status from its plans."""
    unproved = [p for p in verdict.plans if p.status in ("failed", "cannot", "refused", "lossy")]
    refused = {p.status for p in verdict.plans} == {"refused"} or explicit
    if verdict.difference is not None:
        verdict.status = "differs"
    elif any(p.status != "refused" or refused for p in unproved):
        verdict.status = "cannot"
        verdict.error = f"{unproved[0].plan}: {unproved[0].error}"
    else:
        verdict.status = "equal"


def _has_ended(verdict: PlanVerdict) -> bool:
    """Whether a script or a plan says itself that it does not run on so many workers."""
    d = verdict.difference
    return verdict.status in ("refused", "failed") or (d is not None and d.name == ENDED)


def _fits(plan: str, workers: int) -> bool:
    try:
        Plan.parse(plan).check_workers(workers)
    except ArgumentError:
        return False
    return True


def _is_rate(d: Difference) -> bool:
    return d.phase in _RATES or (d.phase == "contract" and "'s lr " in d.name)


def _known_cause(d: Difference, before: list[PlanVerdict]) -> Any:
    """The cause of the same difference under an earlier plan."""
    key = (d.phase, d.step, d.name)
    for verdict in before:
        other = verdict.difference
        if other and verdict.cause and (other.phase, other.step, other.name) == key:
            return verdict.cause
    return None


def _differs_in_step(one: RunTrace, many: RunTrace, rounded: RunTrace) -> bool:
    if not all(many.all_steps()):
        return False
    d = compare(one, many, rounded).difference
    return d is not None and d.step > 0 and d.phase in _COMPUTED
