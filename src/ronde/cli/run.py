"""``ronde run``: start a script on N workers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.foreign_run import record_end, record_start
from ronde.cli.hosts import Gathered, gathered, servers_of
from ronde.cli.launch_plan import LaunchPlan, RunOptions, check_plan, plan_launch
from ronde.cli.leaving import Limit
from ronde.cli.live_watch import LiveWatch
from ronde.cli.options import app, verb
from ronde.cli.prove import proofs_before_run
from ronde.cli.run_ending import (
    MEASURE_SECONDS,
    check_outcome,
    one_worker,
    tell_left,
    tell_stopped,
)
from ronde.cli.run_screen import RunScreen
from ronde.cli.script import short
from ronde.cli.summary import print_summary
from ronde.cli.uploads import claim_with_uploads, uploading
from ronde.watch import RunDir
from ronde.watch.proofs import kept_proofs
from ronde.world.units import count_of

if TYPE_CHECKING:
    from ronde.launch import Container, Outcome

_HANG_SECONDS = 600.0, 60.0  # with restarts, which lose little


@verb(app, "run")
def _run(options: RunOptions) -> None:
    """Start a script on N workers of this machine, watch them, and report the result.

    Examples:

    ```sh
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
    ```
    """
    _carry_out(plan_launch(options))


def _carry_out(launch: LaunchPlan) -> None:
    """Launch, and say how it ended.

    Raises:
        typer.Exit: it did not end well.
    """
    options, screen = launch.options, RunScreen(launch.options.quiet)
    folder: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(options.runs)
    if not launch.kept:
        folder = tempfile.TemporaryDirectory(prefix="ronde-run-")
    # trackers get what is recorded after the launch, too: a failure
    with folder as runs, contextlib.ExitStack() as ending:
        directory, workers, limit, outcome, live = _launch(launch, screen, Path(runs), ending)
        if outcome.again and live is not None and live.stopped is not None:
            tell_stopped(live.stopped, directory)
            raise typer.Exit(3)  # a status of its own: a rule has ended the run
        if outcome.again:
            tell_left(outcome, directory, limit, launch.kept)
            raise typer.Exit(outcome.status)
        check_outcome(outcome, launch, directory)
        if launch.framework:
            record_end(directory, outcome.seconds)
        if options.quiet:
            return
        one = None
        if options.baseline and workers > 1:
            screen.begin(f"measuring one worker for {MEASURE_SECONDS:.0f} s, to compare")
            one = one_worker(launch.command, launch.feed)
            screen.close()
        print_summary(
            directory,
            screen.console,
            outcome.seconds,
            one,
            workers,
            launch.kept,
        )


def _launch(
    launch: LaunchPlan, screen: RunScreen, runs: Path, ending: contextlib.ExitStack
) -> tuple[RunDir, int, Limit, Outcome, LiveWatch | None]:
    """Gather hosts, claim the run directory, and run the workers until all have ended. Returns the
    directory, the number of workers, the time limit, how they ended, and what judged them.
    ``ending`` ends what stays until the record is whole.
    """
    from ronde.launch import Job, Restarts

    options, kept = launch.options, launch.kept
    with (
        servers_of(options.servers, launch.places) as reduction_servers,
        gathered(
            launch.places,
            launch.box,
            launch.command,
            options.workers,
            options.runs if kept else None,
            screen.begin,
            max(options.min_workers or 1, launch.least),
        ) as group,
        _mpi_world(options, group.hosts, launch.box) as renewed_world,
    ):
        count = group.workers
        servers = launch.parameter_servers(count)
        plan = None if options.plan is None else check_plan(options.plan, count)
        if options.prove:
            proofs = proofs_before_run(launch.command, plan, count, options.runs)
        else:
            proofs = kept_proofs(options.runs, launch.command) if kept else {}
        directory, store = claim_with_uploads(
            options.upload, runs, options.name, launch.stem, options.resume, screen.tell
        )
        if launch.origin is not None:
            launch.origin.copy_to(directory)
        sentences = {kind: proof.sentence(kind) for kind, proof in proofs.items()}

        def renewed() -> dict[str, str]:
            return reduction_servers.variables() | renewed_world()

        environment = launch.variables(screen.bar is not None, plan, sentences) | renewed()
        if launch.framework and not launch.second:
            hosts = list(group.hosts) or [("", count)]
            record_start(directory, launch.framework, launch.command, hosts)
        _announce(launch, screen, group, directory)
        hang = options.hang_timeout
        soon = bool(options.restarts) and options.tensorflow is None  # whose steps are not known
        job = Job(
            launch.command,
            count,
            directory.path,
            environment,
            bool(options.restarts),
            (_HANG_SECONDS[soon] if hang is None else hang) or None,
            options.spares and options.tensorflow is None,  # they have imported torch
            servers,
        )
        again = Restarts(
            options.restarts or 0,
            directory.path,
            screen.tell,
            renewed,
            launch.start_text,
            own_backup=options.tensorflow is not None,
        )
        names = group.names if options.output == "all" else None
        if launch.trackers:
            from ronde.launch.node import spare
            from ronde.watch.sinks import Sending

            # They outlive the workers: what ends orphans after the run must leave them alone.
            spare(*ending.enter_context(Sending(directory, launch.trackers, screen.tell)).pids)
        with (
            Limit(launch.seconds, bool(launch.stop_on)) as limit,
            uploading(store, directory, screen.tell),
            _live(launch, screen, limit, directory) as live,
        ):
            outcome = group.launch(job, screen.show, screen.message, names, restarts=again)
        screen.close()
    if live is not None:
        ending.callback(live.close)
    return directory, count, limit, outcome, live


@contextlib.contextmanager
def _mpi_world(
    options: RunOptions, hosts: Sequence[tuple[str, int]], box: Container | None
) -> Iterator[Callable[[], dict[str, str]]]:
    """What starts the processes of an MPI world, and gives the variables by which they are found;
    nothing without ``--mpi-world``.
    """
    if not options.mpi_world:
        yield dict
        return
    from ronde.launch.mpi_world import MpiWorld, shared_name

    name = None if box is None or len(box.hosts) == 1 else shared_name(box.hosts)
    if name is not None and box is not None and box.rank > 0:  # the first host starts them all
        yield lambda: {MpiWorld.variable: name}
        return
    with MpiWorld(hosts, options.python, options.ssh_config, name) as world:
        yield world.variables


def _live(
    launch: LaunchPlan, screen: RunScreen, limit: Limit, directory: RunDir
) -> contextlib.AbstractContextManager[LiveWatch | None]:
    """Judges the run while it trains, if it is watched."""
    if not launch.watch:
        return contextlib.nullcontext()
    return LiveWatch(directory, launch.stop_on, screen.alert, limit.ask)


def _announce(launch: LaunchPlan, screen: RunScreen, group: Gathered, directory: RunDir) -> None:
    """Say what is about to start."""
    workers = count_of(group.workers, "worker")
    if launch.options.quiet:
        for note in group.notes:  # they may be warnings
            typer.echo(f"note: {note}", err=True)
        return
    from rich.text import Text

    # A Text, not markup: arguments may hold brackets.
    headline = (
        f" {' '.join(launch.command)}  ·  {workers}{group.where}  ·  "
        f"{short(directory.path) if launch.kept else 'nothing is kept'}"
    )
    screen.console.print(Text.assemble(("ronde", "bold"), headline), soft_wrap=True)
    for note in (launch.feed_note, *(f"note: {n}" for n in group.notes)):
        if note:
            screen.console.print(Text(note), soft_wrap=True)
    screen.begin(f"starting {workers}")
