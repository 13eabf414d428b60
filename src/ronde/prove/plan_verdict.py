"""The answer of ``ronde prove``: a verdict for each plan, and one for the script."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from ronde.prove.causes import Cause
from ronde.prove.compare import Comparison, Difference

__all__ = ["Holds", "PlanVerdict", "Status", "Verdict", "verdict_of"]

Status = Literal["equal", "differs", "refused", "failed", "cannot", "lossy"]


@dataclass(frozen=True)
class PlanVerdict:
    """The verdict for one plan.

    Attributes:
        plan: as :meth:`Plan.parse` reads it.
        status: ``"equal"``, ``"differs"``, ``"refused"`` (the plan says that it cannot run this
            model), ``"failed"``, ``"cannot"`` (rounding alone changes the training as much), or
            ``"lossy"`` (its reducer does not average all gradients exactly, and is not run).
        difference: the first.
        cause: why.
        largest, where: largest relative difference that is rounding, and its name.
        aside: parameters whose gradient is zero in exact arithmetic.
        error: why it was refused or failed, or what its reducer does.
        same_draws: it is equal where all workers draw the same random numbers as one process,
            which they do not in a training.
        workers: the numbers of workers that it holds for, the one that differs last.
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
    same_draws: bool = False
    workers: tuple[int, ...] = ()

    def joined(self, other: PlanVerdict) -> PlanVerdict:
        """This one, equal, and ``other``, of another number of workers."""
        if other.status != "equal":
            if other.cause is None:
                return other
            equal = f"on {' and '.join(map(str, self.workers))} workers it is equal"
            cause = dataclasses.replace(other.cause, evidence=(*other.cause.evidence, equal))
            return dataclasses.replace(other, cause=cause)
        largest = max(self, other, key=lambda verdict: verdict.largest)
        return dataclasses.replace(
            largest,
            aside=tuple(dict.fromkeys(self.aside + other.aside)),
            compared=self.compared + other.compared,
            seconds=self.seconds + other.seconds,
            workers=self.workers + other.workers,
        )


def verdict_of(
    plan: str, status: Status, result: Comparison, seconds: float, why: Cause | None = None
) -> PlanVerdict:
    """The verdict for a plan whose run was compared."""
    fields = {**vars(result), "aside": tuple(result.aside)}
    if status == "cannot":
        fields["difference"] = None
    return PlanVerdict(plan, status, cause=why, seconds=seconds, **fields)


@dataclass(frozen=True)
class Holds:
    """What a proof covers: a claim beyond it has not been proved.

    Attributes:
        steps: optimizer steps compared.
        workers: each number of workers compared with one process.
        plan: the plans that are equal, separated by ``"; "``.
        dtype: of the computation.
        epoch_end: whether an epoch ended among the steps, and another one began.
        short_batch: whether global batches of several sizes were among them.
        evaluation: whether an evaluation was compared.
        resume: whether the training was saved and resumed in between.
    """

    steps: int
    workers: tuple[int, ...]
    plan: str
    dtype: str = "float64"
    epoch_end: bool = False
    short_batch: bool = False
    evaluation: bool = False
    resume: bool = False

    def __str__(self) -> str:
        """The sentence behind "equal"."""
        workers = " and ".join(map(str, self.workers))
        parts = {
            "the end of an epoch": self.epoch_end,
            "a shorter batch": self.short_batch,
            "evaluation": self.evaluation,
            "a resume": self.resume,
        }
        inside, outside = ([p for p, has in parts.items() if has is want] for want in (True, False))
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        return (
            f"{workers} workers against one process, {steps}, {self.dtype}"
            + (f"; with {', '.join(inside)}" if inside else "")
            + f"; without {', '.join(outside)}" * bool(outside)
        )


@dataclass
class Verdict:
    """The answer.

    Attributes:
        status: ``"equal"``, ``"differs"``, or ``"cannot"`` (be proved).
        workers: the first number of workers, or the one that differs.
        plans: one verdict for each.
        difference, cause: of the first plan that differs, or of the reference itself.
        steps: steps compared; ``steps_asked`` unless the script ended earlier.
        error: why it cannot be proved.
        notes: changes and omissions for the proof.
        holds: what an equal verdict covers, see :class:`Holds`; None unless it is equal.
        files: the script's files and their SHA-256.
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
    holds: Holds | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        """0 equal, 1 differs, 2 cannot be proved."""
        return {"equal": 0, "differs": 1}.get(self.status, 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        status = {"equal": self.status == "equal", "exit_status": self.exit_status}
        return {**dataclasses.asdict(self), **status}
