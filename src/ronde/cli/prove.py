"""``ronde prove``: is it the same training on N workers as on one?"""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.answer_screen import Doing, StyledText, answer_line, note_lines, print_answer
from ronde.cli.leaving import on_signals
from ronde.cli.options import app, setting, verb
from ronde.cli.script import StudyOptions, check_folders
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError
from ronde.world.units import count_of

if TYPE_CHECKING:
    from ronde.prove.compare import Difference
    from ronde.prove.plan_verdict import PlanVerdict, Verdict
    from ronde.watch.proofs import Proof

STEPS = 6
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of ``ronde prove``, as the user gave them."""

    workers: str = setting(
        "2,3",
        "--workers -n",
        "How many workers to compare with one process: a number, or several.",
        "N",
    )
    plans: list[str] | None = setting(
        None,
        "--plan --plans",
        "Plans to prove: all, or a list such as replicate,shard=parameters; repeat "
        "for each hybrid. Default: the script's own, at its smallest size.",
        "PLAN",
    )
    steps: int = setting(STEPS, "--steps", "Optimizer steps to compare.", "K")
    timeout: float = setting(
        _TIMEOUT_SECONDS, "--timeout", "Time limit for one run of the script.", "SECONDS", min=1
    )
    runs: Path = setting(
        Path("runs"),
        "--runs",
        "Folder of runs, where the proof is kept; none keeps nothing.",
        "DIR",
        envvar="RONDE_RUNS",
    )


@verb(app, "prove")
def _prove(options: Options) -> None:
    """Is it the same training on N workers as on one? Equal, or the first thing that differs,
    and why.

    The script runs unchanged, in float64 on the CPU, for some steps: with one process and with
    N workers. Compared are, in this order: samples, initial weights, outputs, loss, gradients,
    weights, scheduler, buffers, evaluation.

    Examples:

    ```sh
    ronde prove train.py                                   2 and 3 workers, the script's plan
    ronde prove --workers 4 --plans all train.py --lr 0.1  every plan that 4 workers can run
    ronde prove --plans replicate,shard=parameters --steps 20 train.py
    ronde prove --json verdict.json -m my.train            a module; the answer as JSON too
    ```

    Exit status: 0 equal, 1 differs, 2 cannot be proved or an argument cannot be used.
    """
    command, plans = options.command_for("prove"), options.plans
    check_folders(json=options.json_file)
    wanted: str | list[str] | None = "all" if plans and "all" in plans else plans
    counts = _counts(options.workers)
    console = plain_console()
    verdict = _ask(console, command, counts, wanted, options.steps, options.timeout)
    options.give(verdict.to_dict(), console, _screen(verdict))
    _keep(options.runs, command, verdict, script_plan=wanted is None)
    raise typer.Exit(verdict.exit_status)


def proofs_before_run(
    command: list[str], plan: str | None, workers: int, runs: Path
) -> dict[str, Proof]:
    """``ronde run --prove``: prove the script under the smallest plan of the same kind, unless that
    is done.

    Args:
        plan: the plan asked for; None for the script's own.
        workers: of the run.
        runs: the folder where proofs are kept.

    Returns:
        The proofs that hold, by kind of plan.

    Raises:
        typer.Exit: it is not the same training, or cannot be proved.
    """
    from ronde.plan import Plan
    from ronde.watch.proofs import kept_proofs, plan_kind, smallest_like

    if plan == "auto":
        raise ArgumentError(
            "--prove needs to know the plan, and --plan auto chooses it later. Let 'ronde plan "
            "--save plan.yaml' choose, then give --plan plan.yaml."
        )
    # A proof costs a minute, so one that holds for the same files is not made again.
    kept = {} if str(runs) == "none" else kept_proofs(runs, command)
    if plan is None:
        plan = next((p.plan for p in kept.values() if p.script_plan), None)
    elif Plan.file_of(plan):
        plan = Plan.load(plan).spec
    if plan is None:
        verdict = _ask_equal(command, 2, None)
        # The script chooses its plan itself: only a proof can say which.
        kept |= _keep(runs, command, verdict, script_plan=True)
        plan = verdict.plans[0].plan
    asked = dataclasses.replace(Plan.parse(plan), workers=workers)
    if plan_kind(asked) not in kept:
        small = smallest_like(asked)
        kept |= _keep(runs, command, _ask_equal(command, small.workers, [small.spec]))
    return kept


def _ask_equal(command: list[str], workers: int, plans: list[str] | None) -> Verdict:
    """A verdict that is equal; any other one is printed, and ends this process."""
    console = plain_console()
    verdict = _ask(console, command, workers, plans, STEPS, _TIMEOUT_SECONDS)
    print_answer(console, _screen(verdict))
    if verdict.status != "equal":
        print("nothing was trained: --prove asks for a proof first", file=sys.stderr)
        raise typer.Exit(verdict.exit_status)
    return verdict


def _counts(workers: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", workers):
        raise ArgumentError(f"--workers {workers}: a number, or several as in 2,3.")
    return list(map(int, workers.split(",")))


def _ask(
    console: Any,
    command: list[str],
    workers: int | list[int],
    plans: str | list[str] | None,
    steps: int,
    timeout_seconds: float,
) -> Verdict:
    from ronde.prove.proof import prove

    try:
        with Doing(console) as say, on_signals(_stop, (signal.SIGTERM, signal.SIGHUP)):
            return prove(
                command, workers, plans, steps, timeout_seconds=timeout_seconds, progress=say
            )
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print(
            f"stopped by {signal.Signals(number).name}; every process has ended",
            file=sys.stderr,
        )
        raise typer.Exit(128 + number) from None


def _keep(
    runs: Path, command: list[str], verdict: Verdict, script_plan: bool = False
) -> dict[str, Proof]:
    """Keep what was proved beside the runs, and take back what does not hold any more. Returns the
    proofs by kind of plan. ``script_plan``: it is the one that the script asks for.
    """
    from ronde.plan import Plan
    from ronde.watch.proofs import Proof, digests_of, keep_proofs, plan_kind

    proofs: dict[str, Proof | None] = {}
    for plan in verdict.plans:
        kind = plan_kind(dataclasses.replace(Plan.parse(plan.plan), workers=verdict.workers))
        aside = "random numbers" if plan.same_draws else ""
        proof = Proof(plan.workers, verdict.steps, time.time(), aside, plan.plan, script_plan)
        proofs[kind] = proof if plan.status == "equal" and verdict.status == "equal" else None
    if str(runs) != "none" and verdict.files:
        # the script too where it has changed the working directory, and its __file__ is relative
        script = digests_of(command[:1]) if command[0] != "-m" else {}
        try:
            keep_proofs(runs, command, verdict.files | script, proofs)
        except RondeError as error:
            print(f"warning: the proof is not kept: {error}", file=sys.stderr)
    return {kind: proof for kind, proof in proofs.items() if proof is not None}


def _stop(number: int) -> None:
    raise KeyboardInterrupt(number)


def _screen(verdict: Verdict) -> Iterator[Any]:
    """The verdict, plan by plan, the first difference with its cause, and the notes."""
    of = (
        f"{verdict.workers} workers against one process, {count_of(verdict.steps, 'step')}, float64"
    )
    if verdict.status == "equal":
        yield answer_line(("equal", "bold green"), f": {verdict.holds or of}")
    elif verdict.status == "differs":
        yield answer_line(("differs", "bold red"), f": {of}")
    else:
        yield answer_line(("cannot be proved", "bold yellow"), f": {verdict.error}")
    width = max((len(p.plan) for p in verdict.plans), default=0)
    for plan in verdict.plans:
        yield answer_line(f"  {plan.plan:<{width}}  ", *_plan_line(plan))
    if verdict.difference is not None and verdict.cause is not None:
        yield answer_line("")
        for text in describe(verdict.difference):
            yield answer_line(text)
        yield answer_line(("why   ", "bold"), verdict.cause.why, f"  [{verdict.cause.id}]")
        for seen in verdict.cause.evidence:
            yield answer_line("      ", seen)
        yield answer_line(("cure  ", "bold"), verdict.cause.cure)
        shown = verdict.cause
        for plan in verdict.plans:
            if plan.cause is not None and plan.cause.id != shown.id and plan.difference is not None:
                yield answer_line("")
                yield answer_line(f"{plan.plan}: ", *describe(plan.difference)[:1])
                yield answer_line(("why   ", "bold"), plan.cause.why, f"  [{plan.cause.id}]")
                yield answer_line(("cure  ", "bold"), plan.cause.cure)
    aside = sorted({name for plan in verdict.plans for name in plan.aside})
    if aside:
        more = ", …" if len(aside) > 4 else ""
        yield answer_line("")
        yield answer_line(
            f"set aside: {', '.join(aside[:4])}{more} ({len(aside)}): the gradient is zero "
            "in exact arithmetic, so only rounding remains"
        )
    yield from note_lines(verdict.notes, verbose=True)


def _plan_line(plan: PlanVerdict) -> list[StyledText]:
    if plan.status == "equal":
        largest = (
            f"largest relative difference {plan.largest:.1e} ({plan.where})"
            if plan.largest
            else "not a bit apart"
        )
        return [
            ("equal", "green"),
            f"    {largest}; {plan.compared} tensors, {count_of(plan.evaluations, 'evaluation')}",
        ]
    if plan.status == "differs" and plan.difference is not None:
        return [("differs", "red"), f"  {describe(plan.difference)[0]}"]
    word = plan.status if plan.status in ("failed", "lossy") else "cannot"
    return [(word, "yellow"), f"   {plan.error.splitlines()[0] if plan.error else ''}"]


def describe(difference: Difference) -> list[str]:
    """Describe the first difference in a sentence or two."""
    d = difference
    when = f"in step {d.step}" if d.step else "before the first step"
    who = f" of rank {d.rank}" if d.rank is not None else ""
    if d.phase == "optimizer":
        text = f"the optimizer, {when}: {d.name}"
    elif d.phase == "batch" and d.name.startswith("(batch)"):
        text = f"the batch that run.step() gets{who} differs first, {when}: {d.name}"
    elif d.phase.startswith(("initial", "weights", "outputs", "gradients", "clipped", "buffers")):
        text = f"{d.phase} of {d.name!r}{who} differ first, {when}"
    else:
        text = f"first difference {when}, {d.phase}: {d.name}{who}"
    if d.relative is not None and d.relative != float("inf"):
        text += f", by {d.relative:.1e} relative"
    lines = [text]
    if d.one is not None or d.many is not None:
        one, many = (f"{v:.10g}" if isinstance(v, float) else str(v) for v in (d.one, d.many))
        lines.append(
            f"      one process: {one}; workers: {many}"
            if d.one is not None
            else f"      workers: {many}"
        )
    if d.others:
        lines.append(f"      also: {', '.join(d.others)}")
    return lines
