"""What the failure of a run means: a refusal, a difference, or a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ronde.plan import Plan
from ronde.plan.torch_errors import meaning
from ronde.prove.causes import ALONE_IS_EQUAL, SEEDED, cause, disagreement
from ronde.prove.compare import Difference, compare
from ronde.prove.experiment import Experiment
from ronde.prove.plan_verdict import PlanVerdict
from ronde.prove.process_pool import CONSEQUENCES, Failure
from ronde.prove.run_trace import RunTrace

__all__ = ["ENDED", "FailedRun", "explain_exit", "explain_failure", "note_late_error"]

ENDED = "what is done"
"""The name of a difference where the script fails on some ranks only."""


@dataclass
class FailedRun:
    """The failed run of a plan, ``many``, beside that of one process; ``run`` runs experiments."""

    plan: str
    failure: Failure
    seconds: float
    one: RunTrace
    many: RunTrace
    run: Callable[[Experiment], RunTrace | None]

    def verdict(self) -> PlanVerdict:
        """The first reading that applies."""
        readings = (self._refusal, self._disagreement, self._desertion, self._exchange, self._rank)
        return next((v for v in (reading() for reading in readings) if v), None) or self._failure()

    def _refused(self, error: str) -> PlanVerdict:
        return PlanVerdict(self.plan, "refused", error=error, seconds=self.seconds)

    def _loop_differs(self, name: str, *evidence: str, rank: int | None = None) -> PlanVerdict:
        """The workers do not take the same steps."""
        text = self.failure.text
        step = min(map(len, self.many.all_steps())) + 1
        d = Difference("steps", step, name, rank, None, text)
        why = cause("rank-dependent-loop", *evidence)
        return PlanVerdict(self.plan, "differs", d, why, error=text, seconds=self.seconds)

    def _is_equal_in(self, experiment: Experiment) -> bool:
        trace = self.run(experiment)
        if trace is None or not trace.steps():
            return False
        return compare(self.one, trace).difference is None

    @property
    def _is_gone(self) -> bool:
        """Whether a worker has gone, and another failed because of it."""
        text = self.failure.text
        return self.failure.kind in ("timeout", "killed") or any(c in text for c in CONSEQUENCES)

    def _refusal(self) -> PlanVerdict | None:
        failure, plan = self.failure, Plan.parse(self.plan)
        known = meaning(failure.text, plan)
        if known is not None:
            return self._refused(known)
        divides = plan.family != "replicate"
        is_argument = failure.kind == "ArgumentError"
        # an earlier ronde.distribute divided the same model
        shared = is_argument and "divided over workers already" in failure.text
        # a plan that divides the model computes a loss while it lays the model out
        in_layout = is_argument or (divides and failure.kind == "LossError")
        if failure.kind in ("PlanError", "Diverged") or shared:
            return self._refused(failure.text)
        if in_layout and not any(self.many.all_steps()):
            return self._refused(failure.text)
        return None

    def _disagreement(self) -> PlanVerdict | None:
        text = self.failure.text
        named = disagreement(text) if self.failure.kind == "WorldError" else None
        if named is None:
            return None
        difference, id = named
        if self._is_equal_in(Experiment.ONE_SEED):
            why, error = cause("unseeded-script", f"{SEEDED}, it is equal"), text
        else:
            ranks = range(self.many.size)
            reads = sorted({p for r in ranks for p in self.many.places("rank", "setup", rank=r)})
            why, error = cause(id, *(f"the script reads {place}" for place in reads[:3])), ""
        return PlanVerdict(self.plan, "differs", difference, why, error=error, seconds=self.seconds)

    def _desertion(self) -> PlanVerdict | None:
        """Workers wait for each other at different places, or one has ended."""
        if not self._is_gone:
            return None
        many, ranks = self.many, range(self.many.size)
        kinds = [[e["kind"] for e in many.events[r]] for r in ranks]
        counts = {(k.count("step"), k.count("evaluating") + k.count("evaluated")) for k in kinds}
        ends = {"end" in k for k in kinds} if self.failure.kind != "killed" else set()
        if len(counts) <= 1 and len(ends) <= 1:
            return None
        return self._loop_differs("what the workers wait for", self.failure.text)

    def _exchange(self) -> PlanVerdict | None:
        exchanges = sorted(self.many.places("exchange"))
        if not exchanges or "collective mismatch" not in self.failure.text:
            return None
        evidence = (
            f"the script calls {', '.join(exchanges[:3])}; a worker without samples of a batch "
            "does not call the model in run.step()"
        )
        return self._loop_differs("what the workers exchange", evidence)

    def _rank(self) -> PlanVerdict | None:
        """The script asks for its rank, and workers that are told to be alone train on."""
        reads = sorted(self.many.places("rank"))
        # a kill from outside is not the loop's doing
        if not reads or self.failure.kind == "killed" or not self._is_equal_in(Experiment.ALONE):
            return None
        evidence = f"the script reads {', '.join(reads[:3])}"
        if self._is_gone:
            return self._loop_differs("what the workers wait for", evidence, ALONE_IS_EQUAL)
        return self._loop_differs(ENDED, evidence, ALONE_IS_EQUAL, rank=self.failure.rank)

    def _failure(self) -> PlanVerdict:
        failure = self.failure
        error = failure.text
        if failure.kind not in ("killed", "timeout"):
            error = f"{failure.kind}: {error}"
        if failure.kind != "timeout":
            error = f"rank {failure.rank}: {error}"
        if failure.trace:
            error += f"\n{failure.trace.rstrip()}"
        return PlanVerdict(self.plan, "failed", error=error, seconds=self.seconds)


def note_late_error(run: RunTrace) -> str | None:
    """A note on a script that failed after the last step to compare."""
    for rank in range(run.size):
        error = run.first("ended with", rank).get("error")
        if error is not None:
            who = "one process" if run.size == 1 else f"rank {rank} of {run.size}"
            return (
                f"After the last step that was compared, the script failed ({who}): "
                f"{error.rstrip(': ')}. prove ends a training early, which a script may not "
                "expect; what comes after it was not compared."
            )
    return None


def explain_exit(command: list[str], failure: Failure, log: Path) -> str:
    """A script that called ``sys.exit`` before ronde.distribute, often for missing arguments."""
    script = " ".join(command[:2] if command[0] == "-m" else command[:1])
    printed = log.read_text(errors="replace").splitlines()[-20:] if log.is_file() else []
    text = (
        f"{script} ended by itself before ronde.distribute: {failure.text}. Its own arguments "
        f"go after its name: ronde prove {script} ARGS…"
    )
    return "\n".join([text, *(["What it printed last:"] if printed else []), *printed])


def explain_failure(failure: Failure) -> str:
    """A script that fails with one process."""
    text = failure.text
    if failure.kind not in ("killed", "timeout", "SystemExit"):
        text = f"{failure.kind}: {text}"
    lines = [f"the script fails with one process, in float64 on the CPU: {text}"]
    if any(word in failure.text for word in ("dtype", "scalar type", "Double")):
        lines.append(
            "A type is fixed to single precision somewhere: let it follow the input's or the "
            "weights' (x.dtype)."
        )
    if failure.trace:
        lines.append(failure.trace.rstrip())
    return "\n".join(lines)
