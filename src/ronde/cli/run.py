"""``ronde run``: start a script on N workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ronde.cli.foreign_run import record_end, record_start
from ronde.cli.fork import FromOption, Origin, find_origin
from ronde.cli.hosts import Gathered, HostOptions, OutputOption, Places, gathered
from ronde.cli.leaving import Limit, check_until, requeue
from ronde.cli.live_watch import LiveWatch, StopOnOption, WatchOption, check_watch
from ronde.cli.options import TIME, add_verb, option, parsed
from ronde.cli.prove import proofs_before_run
from ronde.cli.recipe import check_command
from ronde.cli.reducers import ReducerOption, ServersOption, check_reducer, servers_of
from ronde.cli.script import (
    IN_MAP,
    ArgumentsOption,
    FeedOption,
    ModuleOption,
    WorkersOption,
    command_of,
    discard,
    feed_of,
    short,
)
from ronde.cli.summary import print_summary
from ronde.cli.uploads import (
    UploadOption,
    check_upload,
    claim_with_uploads,
    has_whole,
    uploading,
)
from ronde.watch import (
    Alert,
    Bar,
    Ended,
    Record,
    RunDir,
    check_name,
    plain_console,
    script_stem,
    summarise,
)
from ronde.watch.proofs import kept_proofs
from ronde.world import ArgumentError
from ronde.world.units import count_of, parse_duration

if TYPE_CHECKING:
    from ronde.launch import Container, Outcome

__all__ = ["register"]

_EXAMPLES = """
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

_HANG_SECONDS = 600.0, 60.0  # with restarts, which lose little
_LONGER = "if it was only slow: --hang-timeout SECONDS waits longer, 0 for ever"
_MEASURE_SECONDS = 10.0
_STOPPED = 3  # exit status of a run that a rule has ended
_LAST_LINES = 20  # of a failed worker's output, where its log is not kept


@dataclass(frozen=True)
class Options(HostOptions):
    """The options of ``ronde run``, as the user gave them."""

    arguments: ArgumentsOption = None
    workers: WorkersOption = "auto"
    module: ModuleOption = None
    name: Annotated[
        str | None, option("--name", "Name of the run. Default: the script's, numbered.")
    ] = None
    resume: Annotated[
        bool,
        option(
            "--resume",
            "Continue from the newest complete checkpoint of --name, or of this script's last run.",
        ),
    ] = False
    origin: FromOption = None
    plan: Annotated[
        str | None,
        option(
            "--plan",
            "How to split the work: replicate, shard, pipeline=2,shard=optimizer, …, a "
            "plan file, or auto.",
            "PLAN",
        ),
    ] = None
    reducer: ReducerOption = None
    servers: ServersOption = None
    feed: FeedOption = None
    runs: Annotated[
        Path,
        option(
            "--runs", "Folder that holds the runs; none keeps nothing.", "DIR", envvar="RONDE_RUNS"
        ),
    ] = Path("runs")
    baseline: Annotated[
        bool,
        option("--baseline", "Measure one worker afterwards, for some seconds, to compare with."),
    ] = False
    hang_timeout: Annotated[
        float | None,
        option(
            "--hang-timeout",
            "End the run when a worker gives no sign of life for so long; which and where "
            "is said after 10 s. 0 does neither. Default: 600, with --restarts 60.",
            "SECONDS",
            min=0.0,
        ),
    ] = None
    tensorboard: Annotated[bool, option("--tensorboard", "The same as --to tensorboard.")] = False
    to: Annotated[
        list[str] | None,
        option(
            "--to",
            "Send the record to a tracker while the run goes on: tensorboard, wandb, "
            "mlflow:URL, prometheus:PORT. Several times for several.",
            "TRACKER",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        option(
            "--restarts",
            "Start the workers again after a failure, at most K times; each time they go "
            "on from the newest checkpoint.",
            "K",
            min=0,
        ),
    ] = None
    min_workers: Annotated[
        int | None,
        option(
            "--min-workers",
            "With --restarts, on several hosts: go on with M workers or more while hosts "
            "are lost. Default: with any number.",
            "M",
            min=1,
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        option(
            "--time-limit",
            "Save and leave after this time, as 27d, 20h, or 90m, with status 75. Slurm "
            "starts a job again that it may requeue.",
            "TIME",
        ),
    ] = None
    until: Annotated[
        str | None,
        option(
            "--until",
            "Train so many samples, as 50000 or 50k, save, and leave with status 75. With "
            "@evaluate, at the first evaluation from there on. --resume goes on.",
            "SAMPLES[@evaluate]",
        ),
    ] = None
    watch: WatchOption = None
    stop_on: StopOnOption = None
    spares: Annotated[
        bool,
        option(
            "--spares/--no-spares",
            "Fork several workers, and with --restarts each one, of one process that has "
            "imported torch; or start an interpreter for each.",
        ),
    ] = True
    prove: Annotated[
        bool,
        option(
            "--prove",
            "First prove that the script is the same training on several workers as on "
            "one, at the smallest size of the plan; end with the difference if it is not.",
        ),
    ] = False
    upload: UploadOption = None
    horovod: Annotated[
        bool,
        option(
            "--horovod", "The script uses Horovod: let 'import horovod.torch' find Ronde's bridge."
        ),
    ] = False
    tensorflow: Annotated[
        str | None,
        option(
            "--tensorflow",
            "The script uses TensorFlow: give each worker its TF_CONFIG. With ps=N, rank 0 "
            "is the chief and the last N ranks are parameter servers.",
            "[ps=N]",
        ),
    ] = None
    mpi_world: Annotated[
        bool,
        option(
            "--mpi-world",
            "Start each worker as a process of one MPI world, for scripts that use mpi4py.",
        ),
    ] = False
    output: OutputOption = "main"
    quiet: Annotated[
        bool, option("--quiet -q", "No progress and no summary. Warnings are still shown.")
    ] = False


def register(app: typer.Typer) -> None:
    """Add the verb."""
    add_verb(
        app,
        "run",
        Options,
        lambda options: _run(_plan_launch(options)),
        "Start a script on N workers of this machine, watch them, and report the result.\n"
        + _EXAMPLES,
    )


@dataclass(frozen=True)
class _LaunchPlan:
    """The plan of a launch: options that were checked, and what follows from them.

    Attributes:
        options: the options, with what a container adds to them.
        command: the workers' command.
        box: the container that this is; None elsewhere.
        places: other hosts; None: this machine.
        feed: the workers' setting of ``--feed``, and a note about it.
        seconds: the time limit.
        watch: how often health is measured, as ``RONDE_WATCH`` has it; empty: never.
        stop_on: rules that end the run.
        reducer: how gradients are averaged; None: as the script says.
        origin: the checkpoint of another run that this one begins with, if it does.
    """

    options: Options
    command: list[str]
    box: Container | None
    places: Places | None
    feed: str
    feed_note: str
    seconds: float | None
    watch: str
    stop_on: list[str]
    reducer: str | None
    origin: Origin | None

    @property
    def trackers(self) -> list[str]:
        """Where the record is sent."""
        asked = self.options.tensorboard or os.environ.get("RONDE_TENSORBOARD") == "1"
        more = ["tensorboard"] if asked and self.kept else []
        return list(dict.fromkeys([*(self.options.to or ()), *more]))

    @property
    def kept(self) -> bool:
        """Whether the run directory stays."""
        return str(self.options.runs) != "none"

    @property
    def leaves(self) -> bool:
        """Whether workers must know how to save and leave."""
        return self.options.restarts is not None or bool(self.seconds or self.stop_on)

    @property
    def command_again(self) -> list[str]:
        """Words after ``ronde run`` that decide what is trained, up to the script."""
        options = self.options
        given = {
            "--runs": options.runs if options.runs != Path("runs") else None,
            "--plan": options.plan,
            "--reducer": options.reducer,
            "--servers": options.servers,
            "--feed": options.feed,
        }
        words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
        return [*words, *self.command[: 2 if options.module else 1]]

    @property
    def second(self) -> bool:
        """Whether another host of the container keeps the run."""
        return self.box is not None and self.box.rank > 0

    @property
    def framework(self) -> str:
        """What trains, where the options say that Ronde does not; else empty."""
        options = self.options
        asked = {
            "TensorFlow": options.tensorflow is not None,
            "Horovod": options.horovod,
            "MPI": options.mpi_world,
        }
        return next((name for name, given in asked.items() if given), "")

    def parameter_servers(self, workers: int) -> int | None:
        """How many of the workers are TensorFlow's; None: the script is none of TensorFlow's."""
        from ronde.launch import parameter_servers

        asked = self.options.tensorflow
        return None if asked is None else parameter_servers(asked, workers)

    @property
    def least(self) -> int:
        """With how few workers the script can go on."""
        from ronde.launch import parameter_servers

        servers = parameter_servers(self.options.tensorflow or "auto")
        return servers + 2 if servers else 1

    @property
    def stem(self) -> str:
        """The name of the run where none was given, without its number."""
        return script_stem(self.options.module or self.command[0])

    def variables(
        self, screen: _Screen, plan: str | None, proofs: dict[str, str]
    ) -> dict[str, str]:
        """Environment variables that tell the workers what was asked for."""
        options = self.options
        always = {
            "RONDE_PROGRESS": "warnings" if options.quiet else "stream" if screen.bar else "lines",
            "RONDE_RESUME": "1" if options.resume or self.origin else "0",
            "RONDE_FEED": self.feed,
            "RONDE_COMMAND": json.dumps(self.command_again),
        }
        optional = {
            "RONDE_LEAVE": "1" if self.leaves else "",
            "RONDE_WATCH": self.watch,
            "RONDE_UNTIL": options.until or "",
            "RONDE_TENSORBOARD": "0" if "tensorboard" in self.trackers else "",
            "RONDE_HOROVOD": "1" if options.horovod else "",
            "RONDE_PROOFS": json.dumps(proofs) if proofs else "",
            "RONDE_PLAN": plan or "",
            "RONDE_REDUCER": self.reducer or "",
        }
        return always | {name: value for name, value in optional.items() if value}


def _plan_launch(options: Options) -> _LaunchPlan:
    """Check the options before anything starts.

    Raises:
        ArgumentError: which ones contradict each other, or name what is not there.
    """
    from ronde.launch import container, pod

    if options.origin is not None and options.resume:
        raise ArgumentError(
            "--from begins a new run and --resume goes on with an old one: give one of them."
        )
    box = None if options.named or _in_map() else container() or pod()
    command = command_of(options.module, options.arguments or [])
    if box is not None:
        command += box.arguments
        os.environ.update(box.environment)
        options = _in_container(options, box, command)
    check_command(command)
    if options.name is not None:
        check_name(options.name)
    if options.horovod and (options.until or options.origin):
        raise ArgumentError("--until and --from are not for scripts that use Horovod.")
    if options.tensorflow is not None:
        _check_tensorflow(options)
    if options.mpi_world:
        _check_mpi_world(options, box)
    if options.output not in ("main", "all"):
        raise ArgumentError(f"--output {options.output}: expected main or all.")
    places = options.places(options.workers)
    fetched, told_feed = feed_of(options.feed, options.module or command[0])
    restarts, kept = options.restarts, str(options.runs) != "none"
    if box is not None and len(box.hosts) > 1 and (restarts or options.time_limit):
        raise ArgumentError(
            "--restarts and --time-limit are not for containers of several hosts: the service "
            "starts and ends them together. Started again by it, a job resumes by itself."
        )
    if options.min_workers is not None and not (restarts and places):
        raise ArgumentError(
            "--min-workers says how few workers may go on when --restarts loses hosts: give "
            "--restarts, and several hosts."
        )
    if not kept and restarts is not None and not (box is not None and box.rank > 0):
        raise ArgumentError("--restarts goes on from checkpoints, and --runs none keeps none.")
    check_until(options.until, kept, None if box is None else len(box.hosts))
    seconds = None
    if options.time_limit is not None:
        seconds = parsed("--time-limit", options.time_limit, parse_duration, TIME)
    if not kept and (options.resume or options.name):
        raise ArgumentError("--runs none keeps nothing, so there is nothing to name or resume.")
    check_upload(options.upload, kept)
    if (options.to or options.tensorboard) and not kept:
        raise ArgumentError("--to sends the record, and --runs none keeps none.")
    if options.to:
        from ronde.watch.sinks import check_target_name

        for target in options.to:
            check_target_name(target)
    hosts = None if box is None else len(box.hosts)
    watch, stop_on = check_watch(options.watch, options.stop_on, kept, hosts, options.horovod)
    reducer = check_reducer(options.reducer, options.servers, planned_by=options.plan)
    origin = _origin(options)
    checked = (options, command, box, places, fetched, told_feed, seconds, watch, stop_on)
    return _LaunchPlan(*checked, reducer, origin)


def _in_map() -> bool:
    """Whether ``ronde map`` starts its workers so: on this machine alone, in a container too."""
    return IN_MAP in os.environ


def _start_text(options: Options) -> str:
    """Where workers go on from while there is no checkpoint."""
    if options.tensorflow is not None:
        return "the script's own backup"
    return "the chunks that are done" if _in_map() else "the beginning"


def _check_tensorflow(options: Options) -> None:
    """Refuse what Ronde does for its own scripts only.

    Raises:
        ArgumentError: which option.
    """
    from ronde.launch import parameter_servers

    parameter_servers(options.tensorflow or "auto")
    own = (
        "horovod plan prove reducer servers feed until origin watch stop_on baseline time_limit "
        "tensorboard to"
    )
    names = {"origin": "from"}
    if given := [n for n in own.split() if getattr(options, n) not in (None, False)]:
        option = names.get(given[0], given[0]).replace("_", "-")
        raise ArgumentError(
            f"--{option} is not for TensorFlow scripts: Ronde starts, watches, and restarts them, "
            "and TensorFlow trains."
        )


def _check_mpi_world(options: Options, box: Container | None) -> None:
    """Refuse hosts that ``mpirun`` does not reach from here.

    Raises:
        ArgumentError: which.
    """
    for flag, given in (("--ray", options.ray), ("--spark", options.spark)):
        if given:
            raise ArgumentError(
                f"--mpi-world is not for {flag}, whose workers mpirun does not start. Name the "
                "hosts with --hosts, or use --slurm."
            )
    if box is not None and len(box.hosts) > 1 and box.port:
        raise ArgumentError(
            "--mpi-world is not for several pods: mpirun reaches hosts over ssh. Start the script "
            "with an MPIJob of Kubeflow, whose mpirun Ronde understands."
        )
    if options.restarts and options.named:
        raise ArgumentError("--mpi-world with --restarts is for this machine only.")


def _origin(options: Options) -> Origin | None:
    """The checkpoint of another run that this one begins with, if it does."""
    return None if options.origin is None else find_origin(options.origin, options.runs)


def _in_container(options: Options, box: Container, command: list[str]) -> Options:
    """The options on one host of a container. The first one writes, and keeps the run where the
    service does; a second one writes nothing: the service may join the folders of all hosts.
    """
    if box.rank > 0:
        return dataclasses.replace(
            options,
            runs=Path("none"),
            name=None,
            resume=False,
            quiet=True,
            upload=None,
            origin=None,
            tensorboard=False,
            to=None,
        )
    name = options.name or script_stem(options.module or command[0])
    runs = box.checkpoints or options.runs
    begun = (runs / name / "checkpoints").is_dir() or has_whole(options.upload, name)
    origin = None if begun else options.origin
    return dataclasses.replace(
        options, name=name, runs=runs, resume=options.resume or begun, origin=origin
    )


class _Screen:
    """The terminal of a run: a bar, rank 0's output, and lines of the launcher's own."""

    def __init__(self, quiet: bool) -> None:
        self.console = plain_console()
        self._quiet = quiet
        self.bar = Bar(self.console) if self.console.is_terminal and not quiet else None
        self._held = bytearray()

    def begin(self, text: str) -> None:
        """Say in the bar what is done now."""
        if self.bar:
            self.bar.begin(text)

    def tell(self, text: str) -> None:
        """Show a line of the launcher's."""
        if self.bar:
            self.bar.settle()
        typer.echo(f"ronde: {text}", err=True)

    def alert(self, text: str) -> None:
        """Show an alert of a rule, with --quiet too."""
        from rich.text import Text

        if self.bar:
            self.console.print(Text(text), soft_wrap=True)
        else:
            typer.echo(text, err=True)

    def message(self, message: dict[str, Any]) -> None:
        """Take a progress message of rank 0; with --quiet, only warnings are shown."""
        if self.bar:
            self.bar.update(message)
        elif self._quiet and "warning" in message:
            typer.echo(f"warning: {message['warning']}", err=True)

    def show(self, data: bytes) -> None:
        """Show rank 0's output: directly, or in whole lines above the bar."""
        from ronde.launch.console import to_terminal

        if self.bar is None:
            to_terminal(data)
            return
        self.bar.settle()  # the script speaks: it has started
        self._held.extend(data)
        if not self.bar.drawing:
            # unbuffered: it may be a prompt, or the script's own progress bar
            to_terminal(bytes(self._held))
            self._held.clear()
            return
        end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r"))
        if end < 0:
            return
        text = bytes(self._held[:end]).decode(errors="replace")
        del self._held[: end + 1]
        # With the bar up, rich moves it out of the way and puts it back.
        from rich.text import Text

        self.console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            self.bar.close()
            self.show(b"")


def _run(launch: _LaunchPlan) -> None:
    """Launch, and say how it ended.

    Raises:
        typer.Exit: it did not end well.
    """
    options, screen = launch.options, _Screen(launch.options.quiet)
    folder: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(options.runs)
    if not launch.kept:
        folder = tempfile.TemporaryDirectory(prefix="ronde-run-")
    # trackers get what is recorded after the launch, too: a failure
    with folder as runs, contextlib.ExitStack() as ending:
        directory, workers, limit, outcome, live = _launch(launch, screen, Path(runs), ending)
        if outcome.again and live is not None and live.stopped is not None:
            _tell_stopped(live.stopped, directory)
            raise typer.Exit(_STOPPED)
        if outcome.again:
            _tell_left(outcome, directory, limit, launch.kept)
            raise typer.Exit(outcome.status)
        _check(outcome, launch, directory)
        if launch.framework:
            record_end(directory, outcome.seconds)
        if options.quiet:
            return
        one = None
        if options.baseline and workers > 1:
            screen.begin(f"measuring one worker for {_MEASURE_SECONDS:.0f} s, to compare")
            one = _baseline(launch.command, launch.feed)
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
    launch: _LaunchPlan, screen: _Screen, runs: Path, ending: contextlib.ExitStack
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
        plan = None if options.plan is None else _check_plan(options.plan, count)
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

        environment = launch.variables(screen, plan, sentences) | renewed()
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
            _start_text(options),
            own_backup=options.tensorflow is not None,
        )
        names = group.names if options.output == "all" else None
        if launch.trackers:
            from ronde.launch.node import spare
            from ronde.watch.sinks import Sending

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
    options: Options, hosts: Sequence[tuple[str, int]], box: Container | None
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
    launch: _LaunchPlan, screen: _Screen, limit: Limit, directory: RunDir
) -> contextlib.AbstractContextManager[LiveWatch | None]:
    """Judges the run while it trains, if it is watched."""
    if not launch.watch:
        return contextlib.nullcontext()
    return LiveWatch(directory, launch.stop_on, screen.alert, limit.ask)


def _announce(launch: _LaunchPlan, screen: _Screen, group: Gathered, directory: RunDir) -> None:
    """Say what is about to start."""
    workers = count_of(group.workers, "worker")
    if launch.options.quiet:
        for note in group.notes:  # they may be warnings
            typer.echo(f"note: {note}", err=True)
        return
    from rich.text import Text

    # A Text, not markup: arguments may hold brackets.
    told = (
        f" {' '.join(launch.command)}  ·  {workers}{group.where}  ·  "
        f"{short(directory.path) if launch.kept else 'nothing is kept'}"
    )
    screen.console.print(Text.assemble(("ronde", "bold"), told), soft_wrap=True)
    for told in (launch.feed_note, *(f"note: {n}" for n in group.notes)):
        if told:
            screen.console.print(Text(told), soft_wrap=True)
    screen.begin(f"starting {workers}")


def _check(outcome: Outcome, launch: _LaunchPlan, directory: RunDir) -> None:
    """Say it if the workers failed, or left before the training had ended.

    Raises:
        typer.Exit: with the status of the failure.
    """
    box = launch.box
    if outcome.status:
        if box is not None and not outcome.interrupted:
            box.tell(outcome.traceback or outcome.error or "", outcome.rank)
        _note_failure(directory, outcome.error or "", outcome.rank, outcome.seconds)
        why = "the first host keeps the run" if launch.second else "--runs none"
        _tell_failure(outcome, directory, "" if launch.kept else why)
        raise typer.Exit(outcome.status)
    started = summarise(directory)
    trains = started.start is not None and not started.start.framework
    if outcome.left and trains and started.status in ("running", "stopped"):
        error = "the workers left with status 0 before the training had ended (os._exit)"
        if box is not None:
            box.tell(error)
        _note_failure(directory, error, 0, outcome.seconds)
        typer.echo(
            f"{error}. What it trained after its last checkpoint is lost: let the script end "
            "by itself, or call run.save() before.",
            err=True,
        )
        raise typer.Exit(1)


def _check_plan(text: str, workers: int) -> str:
    """Check ``--plan`` before anything starts."""
    from ronde.plan import Plan

    if text == "auto":
        return text
    file = Plan.file_of(text)
    if file is not None:
        if not file.is_file():
            raise ArgumentError(f"--plan {text}: no such file (in {Path.cwd()}).")
        plan = Plan.load(file)
        if plan.workers not in (1, workers):
            raise ArgumentError(
                f"--plan {text}: it is for {plan.workers} workers: start it with ronde "
                f"run --workers {plan.workers}."
            )
        plan.check_workers(workers)
        return str(file.absolute())
    Plan.parse(text).check_workers(workers)
    return text


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


def _tell_left(outcome: Outcome, directory: RunDir, limit: Limit, kept: bool) -> None:
    """Tell that the run was asked to leave, and let a scheduler start it again."""
    why = "the time limit is reached" if limit.reached else outcome.error
    summary = summarise(directory)
    step = summary.step
    again = f". Go on with: ronde run --resume --name {directory.name} …" if kept else ""
    if outcome.paused:
        typer.echo(f"paused at {summary.samples:,} samples (step {step:,}){again}", err=True)
        return
    if limit.reached or "SIGUSR1" in (outcome.error or ""):
        again = requeue() or again
    typer.echo(f"{why}: it has left after step {step}{again}", err=True)


def _tell_stopped(alert: Alert, directory: RunDir) -> None:
    """Tell which rule has ended the run."""
    typer.echo(
        f"ended by a rule: {alert.rule}, saved at step {summarise(directory).step:,}; go on with: "
        f"ronde run --resume --name {directory.name} …",
        err=True,
    )


def _tell_failure(outcome: Outcome, directory: RunDir, lost: str = "") -> None:
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

        meant = None
        with contextlib.suppress(ArgumentError):  # the plan of another version
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

    rates: list[float] = []
    ways: tuple[dict[str, str], ...] = ({"OMP_WAIT_POLICY": "ACTIVE"}, {})
    for waits in ways:
        with tempfile.TemporaryDirectory(prefix="ronde-baseline-") as folder:
            file = Path(folder) / "rate.json"
            environment = {
                "RONDE_STUDY": "baseline",
                "RONDE_STUDY_FILE": str(file),
                "RONDE_STUDY_OPTIONS": json.dumps({"seconds": _MEASURE_SECONDS / 2}),
                "RONDE_RUNS": "none",
                "RONDE_PROGRESS": "quiet",
                "RONDE_RESUME": "0",
                "RONDE_FEED": feed,
                **waits,
            }
            if run_here(Job(command, 1, None, environment), discard, lambda _: None).interrupted:
                return None
            try:
                rates.append(float(json.loads(file.read_text())["samples_per_second"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return max(rates, default=None)
