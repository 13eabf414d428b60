"""``ronde run``: start a script on N workers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.hosts import (
    EnvOption,
    HostfileOption,
    HostsOption,
    MpiOption,
    OutputOption,
    PythonOption,
    RayOption,
    SlurmOption,
    SparkOption,
    SshConfigOption,
    chosen,
    gathered,
)
from ronde.cli.leaving import Limit, parse_duration, requeue
from ronde.cli.prove import proofs_before_run
from ronde.cli.reducers import ReducerOption, ServersOption, check_reducer, servers_of
from ronde.cli.script import (
    ArgumentsOption,
    FeedOption,
    ModuleOption,
    WorkersOption,
    command_of,
    discard,
    feed_of,
    hint_after_exit,
    short,
)
from ronde.cli.uploads import (
    UploadOption,
    check_upload,
    claim_with_uploads,
    has_whole,
    uploading,
)
from ronde.watch import (
    Bar,
    Ended,
    Record,
    RunDir,
    check_name,
    clock,
    curve,
    plain_console,
    script_stem,
    summarise,
)
from ronde.watch.proofs import kept_proofs
from ronde.world import ArgumentError

__all__ = ["register"]

_EXAMPLES = """
Examples:

  ronde run train.py                            one worker per GPU, or per core

  ronde run --workers 2 train.py --lr 0.1       options after the script are its own

  ronde run --workers 4 --name big -m my.train  a module, under a name

  ronde run --resume --name big -m my.train     resume, on any number of workers

  ronde run --prove --workers 8 train.py        first prove that it is the same training

  ronde run --feed none train.py                ignore train.feed.yaml

  ronde run --hosts gpu1:8,gpu2:8 train.py      on two machines, over ssh

  ronde run --ray --workers 8 train.py          on a Ray cluster

  ronde run --reducer hierarchical train.py     average gradients inside nodes first

  ronde run --upload s3://bucket/runs train.py  keep the checkpoints there, too
"""

_HANG_SECONDS = 600.0, 60.0  # with restarts, which lose little
_LONGER = "if it was only slow: --hang-timeout SECONDS waits longer, 0 for ever"
_MEASURE_SECONDS = 10.0
_LAST_LINES = 20  # of a failed worker's output, where its log is not kept


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "run",
        help="Start a script on N workers of this machine, watch them, and report the result.\n"
        + _EXAMPLES,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
        no_args_is_help=True,
    )
    def run(
        arguments: ArgumentsOption = None,
        workers: WorkersOption = "auto",
        module: ModuleOption = None,
        name: Annotated[
            str | None,
            typer.Option(
                "--name",
                help="Name of the run. Default: the script's, numbered.",
                show_default=False,
            ),
        ] = None,
        resume: Annotated[
            bool,
            typer.Option(
                "--resume",
                help="Continue from the newest complete checkpoint of --name, or of this script's "
                "last run.",
            ),
        ] = False,
        plan: Annotated[
            str | None,
            typer.Option(
                "--plan",
                metavar="PLAN",
                help="How to split the work: replicate, shard, pipeline=2,shard=optimizer, …, a "
                "plan file, or auto.",
                show_default=False,
            ),
        ] = None,
        reducer: ReducerOption = None,
        servers: ServersOption = None,
        feed: FeedOption = None,
        runs: Annotated[
            Path,
            typer.Option(
                "--runs",
                metavar="DIR",
                help="Folder that holds the runs; none keeps nothing.",
                envvar="RONDE_RUNS",
            ),
        ] = Path("runs"),
        baseline: Annotated[
            bool,
            typer.Option(
                "--baseline",
                help="Measure one worker afterwards, for some seconds, to compare with.",
            ),
        ] = False,
        hang_timeout: Annotated[
            float | None,
            typer.Option(
                "--hang-timeout",
                metavar="SECONDS",
                min=0.0,
                help="End the run when a worker gives no sign of life for so long; which and where "
                "is said after 10 s. 0 does neither. Default: 600, with --restarts 60.",
                show_default=False,
            ),
        ] = None,
        tensorboard: Annotated[
            bool, typer.Option("--tensorboard", help="Also write logged values for TensorBoard.")
        ] = False,
        restarts: Annotated[
            int | None,
            typer.Option(
                "--restarts",
                metavar="K",
                min=0,
                help="Start the workers again after a failure, at most K times; each time they go "
                "on from the newest checkpoint.",
                show_default=False,
            ),
        ] = None,
        min_workers: Annotated[
            int | None,
            typer.Option(
                "--min-workers",
                metavar="M",
                min=1,
                help="With --restarts, on several hosts: go on with M workers or more while hosts "
                "are lost. Default: with any number.",
                show_default=False,
            ),
        ] = None,
        time_limit: Annotated[
            str | None,
            typer.Option(
                "--time-limit",
                metavar="TIME",
                help="Save and leave after this time, as 27d, 20h, or 90m, with status 75. Slurm "
                "starts a job again that it may requeue.",
                show_default=False,
            ),
        ] = None,
        spares: Annotated[
            bool,
            typer.Option(
                "--spares/--no-spares",
                help="Fork several workers, and with --restarts each one, of one process that has "
                "imported torch; or start an interpreter for each.",
            ),
        ] = True,
        prove: Annotated[
            bool,
            typer.Option(
                "--prove",
                help="First prove that the script is the same training on several workers as on "
                "one, at the smallest size of the plan; end with the difference if it is not.",
            ),
        ] = False,
        upload: UploadOption = None,
        horovod: Annotated[
            bool,
            typer.Option(
                "--horovod",
                help="The script uses Horovod: let 'import horovod.torch' find Ronde's bridge.",
            ),
        ] = False,
        output: OutputOption = "main",
        quiet: Annotated[
            bool,
            typer.Option(
                "--quiet", "-q", help="No progress and no summary. Warnings are still shown."
            ),
        ] = False,
        hosts: HostsOption = None,
        hostfile: HostfileOption = None,
        slurm: SlurmOption = False,
        mpi: MpiOption = False,
        ray: RayOption = None,
        spark: SparkOption = None,
        ssh_config: SshConfigOption = None,
        env: EnvOption = None,
        python: PythonOption = None,
    ) -> None:
        from ronde.launch import Job, Restarts, container, pod

        box = None if hosts or hostfile or slurm or ray or spark else container() or pod()
        second = box is not None and box.rank > 0
        command = command_of(module, arguments or [])
        if box is not None:
            command += box.arguments
            os.environ.update(box.environment)
            name = name or script_stem(module or command[0])
            runs = box.checkpoints or runs
            resume = resume or (runs / name / "checkpoints").is_dir() or has_whole(upload, name)
            if second:  # rank 0 writes; the service may join the folders of all hosts
                runs, name, resume, quiet = Path("none"), None, False, True
                upload = None
        if name is not None:
            check_name(name)
        if output not in ("main", "all"):
            raise ArgumentError(f"--output {output}: expected main or all.")
        places = chosen(
            hosts, hostfile, slurm, mpi, ssh_config, env or [], python, ray, spark, workers
        )
        fetched, told_feed = feed_of(feed, module or command[0])
        temporary = (
            tempfile.TemporaryDirectory(prefix="ronde-run-") if str(runs) == "none" else None
        )
        if box is not None and len(box.hosts) > 1 and (restarts or time_limit):
            raise ArgumentError(
                "--restarts and --time-limit are not for containers of several hosts: the service "
                "starts and ends them together. Started again by it, a job resumes by itself."
            )
        if min_workers is not None and not (restarts and places):
            raise ArgumentError(
                "--min-workers says how few workers may go on when --restarts loses hosts: give "
                "--restarts, and several hosts."
            )
        if temporary and restarts is not None and not second:
            raise ArgumentError("--restarts goes on from checkpoints, and --runs none keeps none.")
        seconds = None if time_limit is None else parse_duration(time_limit)
        if temporary and (resume or name):
            raise ArgumentError("--runs none keeps nothing, so there is nothing to name or resume.")
        check_upload(upload, kept=temporary is None)
        console = plain_console()
        terminal = console.is_terminal and not quiet
        bar = Bar(console) if terminal else None
        kept = None if temporary else runs
        reducer = check_reducer(reducer, servers, planned_by=plan)
        with (
            servers_of(servers, places) as reduction_servers,
            gathered(
                places,
                box,
                command,
                workers,
                kept,
                bar.begin if bar else _ignore,
                min_workers or 1,
            ) as group,
        ):
            count = group.workers
            planned = None if plan is None else _plan(plan, count)
            proofs = (
                proofs_before_run(command, planned, count, runs)
                if prove
                else {}
                if temporary
                else kept_proofs(runs, command)
            )

            def told_restart(text: str) -> None:
                if bar:
                    bar.settle()
                typer.echo(f"ronde: {text}", err=True)

            directory, store = claim_with_uploads(
                upload,
                Path(temporary.name) if temporary else runs,
                name,
                script_stem(module or command[0]),
                resume,
                told_restart,
            )
            show = _shower(bar, console)
            environment = {
                "RONDE_PROGRESS": "warnings" if quiet else "stream" if terminal else "lines",
                "RONDE_RESUME": "1" if resume else "0",
                "RONDE_FEED": fetched,
            }
            if restarts is not None or seconds is not None:
                environment["RONDE_LEAVE"] = "1"
            if tensorboard:
                environment["RONDE_TENSORBOARD"] = "1"
            if horovod:
                environment["RONDE_HOROVOD"] = "1"
            if proofs:
                sentences = {kind: proof.sentence(kind) for kind, proof in proofs.items()}
                environment["RONDE_PROOFS"] = json.dumps(sentences)
            if planned is not None:
                environment["RONDE_PLAN"] = planned
            if reducer is not None:
                environment["RONDE_REDUCER"] = reducer
            environment |= reduction_servers.variables()
            if not quiet:
                shown = " ".join(command)
                from rich.text import Text

                # A Text, not markup: arguments may hold brackets.
                told = (
                    f" {shown}  ·  {count} worker{'s' if count > 1 else ''}{group.where}  ·  "
                    f"{'nothing is kept' if temporary else short(directory.path)}"
                )
                console.print(Text.assemble(("ronde", "bold"), told), soft_wrap=True)
                for told in (told_feed, *(f"note: {n}" for n in group.notes)):
                    if told:
                        console.print(Text(told), soft_wrap=True)
            else:
                for note in group.notes:  # they may be warnings
                    typer.echo(f"note: {note}", err=True)
            if bar:
                bar.begin(f"starting {count} worker{'s' if count > 1 else ''}")

            again = Restarts(
                restarts or 0, directory.path, told_restart, reduction_servers.variables
            )
            with Limit(seconds) as limit, uploading(store, directory, told_restart):
                outcome = group.launch(
                    Job(
                        command,
                        count,
                        directory.path,
                        environment,
                        bool(restarts),
                        (_HANG_SECONDS[bool(restarts)] if hang_timeout is None else hang_timeout)
                        or None,
                        spares,
                    ),
                    show,
                    bar.update if bar else _show_warning if quiet else _ignore,
                    group.names if output == "all" else None,
                    restarts=again,
                )
            if bar:
                bar.close()
                show(b"")
        if outcome.again:
            _tell_left(outcome, directory, limit, kept=temporary is None)
            raise typer.Exit(outcome.status)
        if outcome.status:
            if box is not None and not outcome.interrupted:
                box.tell(outcome.traceback or outcome.error or "", outcome.rank)
            _note_failure(directory, outcome.error or "", outcome.rank, outcome.seconds)
            why = "the first host keeps the run" if second else "--runs none"
            _tell_failure(outcome, directory, why if temporary else "")
            if outcome.exited and (hint := hint_after_exit(command)):
                typer.echo(f"note: {hint}", err=True)
            raise typer.Exit(outcome.status)
        if outcome.left and summarise(directory).status in ("running", "stopped"):
            error = f"{outcome.left} left with status 0 before the training had ended (os._exit)"
            if box is not None:
                box.tell(error)
            _note_failure(directory, error, 0, outcome.seconds)
            typer.echo(
                f"{error}. What it trained after its last checkpoint is lost: let the script end "
                "by itself, or call run.save() before.",
                err=True,
            )
            raise typer.Exit(1)
        if not quiet:
            one = None
            if baseline and count > 1:
                if bar:
                    bar.begin(f"measuring one worker for {_MEASURE_SECONDS:.0f} s, to compare")
                one = _baseline(command, fetched)
                if bar:
                    bar.close()
            print_summary(
                directory, console, outcome.seconds, one, count, temporary is None, horovod
            )


def _plan(text: str, workers: int) -> str:
    """Check ``--plan`` before anything starts."""
    from ronde.plan import Plan

    if text == "auto":
        return text
    file = Plan.file_of(text)
    if file is not None:
        if not file.is_file():
            raise ArgumentError(f"--plan {text}: no such file (in {Path.cwd()}).")
        found = Plan.load(file)
        if found.workers not in (1, workers):
            raise ArgumentError(
                f"--plan {text}: it is for {found.workers} workers: start it with ronde "
                f"run --workers {found.workers}."
            )
        found.check_workers(workers)
        return str(file.absolute())
    Plan.parse(text).check_workers(workers)
    return text


def _ignore(_: Any) -> None:
    return None


def _show_warning(message: dict[str, Any]) -> None:
    """With --quiet: rank 0's warnings, apart from what the script prints."""
    if "warning" in message:
        typer.echo(f"warning: {message['warning']}", err=True)


def _shower(bar: Bar | None, console: Any) -> Any:
    """Choose how to show rank 0's output: directly, or in whole lines above the bar."""
    from ronde.launch.console import to_terminal

    if bar is None:
        return to_terminal
    held = bytearray()

    def show(data: bytes) -> None:
        bar.settle()  # the script speaks: it has started
        held.extend(data)
        if not bar.drawing:
            # unbuffered: it may be a prompt, or the script's own progress bar
            to_terminal(bytes(held))
            held.clear()
            return
        end = max(held.rfind(b"\n"), held.rfind(b"\r"))
        if end < 0:
            return
        text = bytes(held[:end]).decode(errors="replace")
        del held[: end + 1]
        # With the bar up, rich moves it out of the way and puts it back.
        from rich.text import Text

        console.print(Text.from_ansi(text), soft_wrap=True)

    return show


def _note_failure(directory: RunDir, error: str, rank: int | None, seconds: float) -> None:
    summary = summarise(directory)
    if summary.start is None:
        return
    record = Record(directory.record)
    status = "interrupted" if rank is None else "failed"
    record.write(
        Ended(
            status=status,
            step=summary.step,
            epoch=summary.epoch,
            samples=summary.samples,
            samples_per_second=None,
            seconds=seconds,
            error=error[:2000],
            rank=rank,
        )
    )
    record.close()


def _tell_left(outcome: Any, directory: RunDir, limit: Limit, kept: bool) -> None:
    """Tell that the run was asked to leave, and let a scheduler start it again."""
    why = "the time limit is reached" if limit.reached else outcome.error
    step = summarise(directory).step
    again = f". Go on with: ronde run --resume --name {directory.name} …" if kept else ""
    if limit.reached or "SIGUSR1" in outcome.error:
        again = requeue() or again
    typer.echo(f"{why}: it has left after step {step}{again}", err=True)


def _tell_failure(outcome: Any, directory: RunDir, lost: str = "") -> None:
    """Say what failed, and what to do. ``lost`` says why the run directory goes now, if it does."""
    from rich.text import Text

    console = plain_console(stderr=True)
    names = [p.name[5:] for p in directory.checkpoints.glob("step-*")] if not lost else []
    saved = max((int(n) for n in names if n.isdecimal()), default=None)
    again = f"ronde run --resume --name {directory.name} …" if saved is not None else ""
    if outcome.interrupted:
        trained, told = summarise(directory).step, ""
        if saved is not None:
            told = f", after step {trained:,}. Saved: step {saved:,}. Go on with: {again}"
        elif trained:
            told = f", after step {trained:,}. Nothing is saved" + (
                ": no checkpoint was due. See save_every of ronde.distribute" if not lost else ""
            )
        console.print(f"{outcome.error}; every worker has ended{told}", soft_wrap=True)
        return
    if outcome.rank is None:
        console.print(Text(outcome.error or "", style="bold red"), soft_wrap=True)
        if outcome.hang:
            console.print(_LONGER, highlight=False, soft_wrap=True)
        again = again and f"   go on with: {again}"
        console.print(
            f"its output: {short(directory.logs)}{again}", highlight=False, soft_wrap=True
        )
        return
    if outcome.hang:
        console.print(Text(outcome.error or "", style="bold red"), soft_wrap=True)
        console.print(_LONGER, highlight=False, soft_wrap=True)
    elif outcome.traceback:
        told = (
            f"{outcome.before}; rank {outcome.rank} failed then:"
            if outcome.before
            else f"rank {outcome.rank} failed first:"
        )
        console.print(Text(told, style="bold red"), soft_wrap=True)
        print(outcome.traceback.rstrip(), file=sys.stderr, flush=True)
    else:
        console.print(
            Text(f"rank {outcome.rank} failed first: {outcome.error}", style="bold red"),
            soft_wrap=True,
        )
    if directory.plan.is_file():
        from ronde.plan import Plan
        from ronde.plan.torch_errors import meaning

        meant = meaning(outcome.error or "", Plan.load(directory.plan))
        if meant is not None and meant not in (outcome.traceback or ""):  # as a note
            console.print(Text(f"that is: {meant}"), soft_wrap=True)
    log = directory.logs / f"rank-{outcome.rank}.log"
    if lost:
        last = (
            []
            if outcome.traceback or not log.is_file()
            else log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        )
        print(*last, sep="\n", end="\n" if last else "", file=sys.stderr, flush=True)
        console.print(f"the rest of its output was not kept: {lost}", soft_wrap=True)
        return
    console.print(
        f"its output: {short(log)}" + (f"   go on with: {again}" if again else ""),
        highlight=False,
        soft_wrap=True,
    )


def _baseline(command: list[str], feed: str) -> float | None:
    """Measure one worker with all cores on the same script, in samples per second.

    Measured twice, with threads that spin while they wait and with ``ronde run``'s setting. Which
    is faster depends on the machine's load; the comparison uses the better one.
    """
    from ronde.launch import Job, run_here

    found: list[float] = []
    ways: tuple[dict[str, str], ...] = ({"OMP_WAIT_POLICY": "ACTIVE"}, {})
    for waits in ways:
        with tempfile.TemporaryDirectory(prefix="ronde-baseline-") as folder:
            file = Path(folder) / "rate.json"
            environment = {
                "RONDE_MEASURE": str(_MEASURE_SECONDS / 2),
                "RONDE_MEASURE_FILE": str(file),
                "RONDE_PROGRESS": "quiet",
                "RONDE_RESUME": "0",
                "RONDE_FEED": feed,
                **waits,
            }
            if run_here(Job(command, 1, None, environment), discard, _ignore).interrupted:
                return None
            try:
                found.append(float(json.loads(file.read_text())["samples_per_second"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return max(found, default=None)


def _numbers(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()
    )


def print_summary(
    directory: RunDir,
    console: Any,
    seconds: float,
    one: float | None = None,
    workers: int = 1,
    kept: bool = True,
    horovod: bool = False,
) -> None:
    """Print what ran where, the batch contract, the curve, the speed, and what to do next.
    ``kept`` is False if the run directory goes now; scripts of Horovod do not call ``distribute``.
    """
    from rich.box import ROUNDED
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from ronde.plan import Plan

    summary = summarise(directory)
    start = summary.start
    if start is None:
        console.print(
            f"the script ended after {clock(seconds)}"
            + ("" if horovod else " without calling ronde.distribute")
            + (f"; its output is in {short(directory.logs)}" if kept else ""),
            highlight=False,
            soft_wrap=True,
        )
        return
    plan = Plan.from_dict(start.plan)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    hosts = ", ".join(f"{host}:{n}" for host, n in start.hosts.items()) or start.host
    where = (
        f"{start.workers} worker{'s' if start.workers > 1 else ''} on {hosts} "
        f"({start.device}), {start.threads} thread{'s' if start.threads > 1 else ''} each"
    )

    def row(name: str, value: str, style: str = "") -> None:
        table.add_row(name, Text(value, style=style))  # a Text, not markup: names may hold brackets

    row(
        "ran",
        f"{short(Path(start.script))}: {start.model}, {start.parameters:,} parameters, "
        f"{start.optimizer}",
    )
    row("where", where)
    if plan.family != "replicate":
        row("plan", plan.spec)
    row("batch", plan.sentence(summary.differs, start.proof, start.smallest_batch))
    row(
        "trained",
        f"{summary.step:,} steps, {summary.samples:,} samples, {summary.epoch} "
        f"epoch{'s' if summary.epoch != 1 else ''} in {clock(summary.seconds or seconds)}",
    )
    if summary.samples_per_second:
        speed = f"{summary.samples_per_second:,.0f} samples/s"
        row("speed", speed)
        if one:
            ratio = summary.samples_per_second / one
            row(
                "one worker",
                f"{one:,.0f} samples/s with all cores, measured afterwards: {workers} "
                f"workers are {ratio:.2f}× as fast",
            )
    if sentence := summary.script_sentence():
        row("own loop", sentence, "yellow")
    if sentence := summary.noise_sentence():
        row("noise", sentence)
    if summary.loss is not None:
        first = summary.curve[0][1]
        row("loss", f"{first:.4f} → {summary.loss:.4f}")
    for kind, values in summary.evaluations.items():
        row("evaluation" if kind == "evaluate" else kind, _numbers(values))
    for name, other in summary.parts.items():
        if other.start is not None:
            loss = f", loss {other.curve[0][1]:.4f} → {other.loss:.4f}" if other.curve else ""
            row(
                name,
                f"{other.start.model}, {other.start.parameters:,} parameters, "
                f"{other.start.optimizer}: {other.step:,} steps{loss}",
            )
            for kind, values in other.evaluations.items():
                row("", f"{'evaluation' if kind == 'evaluate' else kind} {_numbers(values)}")
    if best := summary.best:
        row("best", f"{best.metric} {best.value:.4f} at step {best.step:,}, in {best.path}")
    if kept:
        row(
            "kept in",
            f"{short(directory.path)}  (record.jsonl, logs/, {summary.checkpoints} "
            f"checkpoint{'s' if summary.checkpoints != 1 else ''})",
        )
        folder = short(directory.path.parent)
        runs_option = "" if folder == "runs" else f" --runs {folder}"
        row("next", f"ronde show {directory.name}{runs_option}", "cyan")
    else:
        row("kept in", "nowhere: --runs none")
    width = max(20, min(console.width - 20, 72))
    drawn = curve([(float(x), y) for x, y in summary.curve], width=width, height=8)
    if not console.encoding.startswith("utf"):
        drawn = ""  # it is drawn with Braille patterns
    parts: list[Any] = [table]
    if drawn:
        parts += [Text(""), Text(drawn)]
    if summary.warnings:
        parts += [Text(""), *(Text(f"warning: {w}", style="yellow") for w in summary.warnings)]
    title = Text(
        f"{directory.name}: {summary.status}"
    )  # a Text: names may hold brackets and colons
    console.print(Panel(Group(*parts), title=title, box=ROUNDED, expand=False))
