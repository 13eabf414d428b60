"""The options of ``ronde run``, checked before anything starts, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ronde.cli.fork import FromOption, Origin, find_origin
from ronde.cli.hosts import HostOptions, OutputOption, Places
from ronde.cli.leaving import check_until
from ronde.cli.live_watch import StopOnOption, WatchOption, check_watch
from ronde.cli.options import TIME, parsed, setting
from ronde.cli.recipe import check_command
from ronde.cli.reducers import ReducerOption, ServersOption, check_reducer
from ronde.cli.script import (
    IN_MAP,
    ArgumentsOption,
    FeedOption,
    ModuleOption,
    WorkersOption,
    command_of,
    feed_of,
)
from ronde.cli.uploads import UploadOption, check_upload, has_whole
from ronde.watch import check_name, script_stem
from ronde.world import ArgumentError
from ronde.world.units import parse_duration

if TYPE_CHECKING:
    from ronde.launch import Container

__all__ = ["LaunchPlan", "RunOptions", "check_plan", "plan_launch"]


@dataclass(frozen=True)
class RunOptions(HostOptions):
    """The options of ``ronde run``, as the user gave them."""

    arguments: ArgumentsOption = None
    workers: WorkersOption = "auto"
    module: ModuleOption = None
    name: str | None = setting(None, "--name", "Name of the run. Default: the script's, numbered.")
    resume: bool = setting(
        False,
        "--resume",
        "Continue from the newest complete checkpoint of --name, or of this script's last run.",
    )
    origin: FromOption = None
    plan: str | None = setting(
        None,
        "--plan",
        "How to split the work: replicate, shard, pipeline=2,shard=optimizer, …, a "
        "plan file, or auto.",
        "PLAN",
    )
    reducer: ReducerOption = None
    servers: ServersOption = None
    feed: FeedOption = None
    runs: Path = setting(
        Path("runs"),
        "--runs",
        "Folder that holds the runs; none keeps nothing.",
        "DIR",
        envvar="RONDE_RUNS",
    )
    baseline: bool = setting(
        False, "--baseline", "Measure one worker afterwards, for some seconds, to compare with."
    )
    hang_timeout: float | None = setting(
        None,
        "--hang-timeout",
        "End the run when a worker gives no sign of life for so long; which and where "
        "is said after 10 s. 0 does neither. Default: 600, with --restarts 60.",
        "SECONDS",
        min=0.0,
    )
    tensorboard: bool = setting(False, "--tensorboard", "The same as --to tensorboard.")
    to: list[str] | None = setting(
        None,
        "--to",
        "Send the record to a tracker while the run goes on: tensorboard, wandb, "
        "mlflow:URL, prometheus:PORT. Several times for several.",
        "TRACKER",
    )
    restarts: int | None = setting(
        None,
        "--restarts",
        "Start the workers again after a failure, at most K times; each time they go "
        "on from the newest checkpoint.",
        "K",
        min=0,
    )
    min_workers: int | None = setting(
        None,
        "--min-workers",
        "With --restarts, on several hosts: go on with M workers or more while hosts "
        "are lost. Default: with any number.",
        "M",
        min=1,
    )
    time_limit: str | None = setting(
        None,
        "--time-limit",
        "Save and leave after this time, as 27d, 20h, or 90m, with status 75. Slurm "
        "starts a job again that it may requeue.",
        "TIME",
    )
    until: str | None = setting(
        None,
        "--until",
        "Train so many samples, as 50000 or 50k, save, and leave with status 75. With "
        "@evaluate, at the first evaluation from there on. --resume goes on.",
        "SAMPLES[@evaluate]",
    )
    watch: WatchOption = None
    stop_on: StopOnOption = None
    spares: bool = setting(
        True,
        "--spares/--no-spares",
        "Fork several workers, and with --restarts each one, of one process that has "
        "imported torch; or start an interpreter for each.",
    )
    prove: bool = setting(
        False,
        "--prove",
        "First prove that the script is the same training on several workers as on "
        "one, at the smallest size of the plan; end with the difference if it is not.",
    )
    upload: UploadOption = None
    horovod: bool = setting(
        False,
        "--horovod",
        "The script uses Horovod: let 'import horovod.torch' find Ronde's bridge.",
    )
    tensorflow: str | None = setting(
        None,
        "--tensorflow",
        "The script uses TensorFlow: give each worker its TF_CONFIG. With ps=N, rank 0 "
        "is the chief and the last N ranks are parameter servers.",
        "[ps=N]",
    )
    mpi_world: bool = setting(
        False,
        "--mpi-world",
        "Start each worker as a process of one MPI world, for scripts that use mpi4py.",
    )
    output: OutputOption = "main"
    quiet: bool = setting(
        False, "--quiet -q", "No progress and no summary. Warnings are still shown."
    )


@dataclass(frozen=True)
class LaunchPlan:
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

    options: RunOptions
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
    def start_text(self) -> str:
        """Where workers go on from while there is no checkpoint."""
        if self.options.tensorflow is not None:
            return "the script's own backup"
        return "the chunks that are done" if _in_map() else "the beginning"

    @property
    def stem(self) -> str:
        """The name of the run where none was given, without its number."""
        return script_stem(self.options.module or self.command[0])

    def variables(self, bar: bool, plan: str | None, proofs: dict[str, str]) -> dict[str, str]:
        """Environment variables that tell the workers what was asked for. ``bar``: the launcher
        draws their progress.
        """
        options = self.options
        # Always set: a variable of the shell that started ronde must not reach the workers.
        always = {
            "RONDE_PROGRESS": "warnings" if options.quiet else "stream" if bar else "lines",
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


def plan_launch(options: RunOptions) -> LaunchPlan:
    """Check the options before anything starts.

    Raises:
        ArgumentError: which ones contradict each other, or name what is not there.
    """
    from ronde.launch import container, pod

    if options.origin is not None and options.resume:
        raise ArgumentError(
            "--from begins a new run and --resume goes on with an old one: give one of them."
        )
    # In a map, each host of a container works for itself.
    box = None if options.named or _in_map() else container() or pod()
    command = command_of(options.module, options.arguments or [])
    if box is not None:
        command += box.arguments
        # Scripts read folders and channels from these, as SM_MODEL_DIR.
        os.environ.update(box.environment)
        options = _in_container(options, box, command)
    check_command(command)
    if options.name is not None:
        check_name(options.name)
    if options.tensorflow is not None:
        _check_tensorflow(options)
    if options.mpi_world:
        _check_mpi_world(options, box)
    _check_together(options, box)
    places = options.places(options.workers)
    feed, feed_note = feed_of(options.feed, options.module or command[0])
    kept, hosts = str(options.runs) != "none", None if box is None else len(box.hosts)
    check_until(options.until, kept, hosts)
    seconds = None
    if options.time_limit is not None:
        seconds = parsed("--time-limit", options.time_limit, parse_duration, TIME)
    check_upload(options.upload, kept)
    if options.to:
        from ronde.watch.sinks import check_target_name

        for target in options.to:
            check_target_name(target)
    watch, stop_on = check_watch(options.watch, options.stop_on, kept, hosts, options.horovod)
    reducer = check_reducer(options.reducer, options.servers, planned_by=options.plan)
    origin = None if options.origin is None else find_origin(options.origin, options.runs)
    checked = (options, command, box, places, feed, feed_note, seconds, watch, stop_on)
    return LaunchPlan(*checked, reducer, origin)


def _check_together(options: RunOptions, box: Container | None) -> None:
    """Refuse options that contradict each other.

    Raises:
        ArgumentError: the first of them, and why.
    """
    restarts, drops = options.restarts, str(options.runs) == "none"
    second, several = box is not None and box.rank > 0, box is not None and len(box.hosts) > 1
    refusals = (
        (
            options.horovod and (options.until or options.origin),
            "--until and --from are not for scripts that use Horovod.",
        ),
        (
            options.output not in ("main", "all"),
            f"--output {options.output}: expected main or all.",
        ),
        (
            several and (restarts or options.time_limit),
            "--restarts and --time-limit are not for containers of several hosts: the service "
            "starts and ends them together. Started again by it, a job resumes by itself.",
        ),
        (
            options.min_workers is not None and not (restarts and options.named),
            "--min-workers says how few workers may go on when --restarts loses hosts: give "
            "--restarts, and several hosts.",
        ),
        (
            drops and restarts is not None and not second,
            "--restarts goes on from checkpoints, and --runs none keeps none.",
        ),
        (
            drops and (options.resume or options.name),
            "--runs none keeps nothing, so there is nothing to name or resume.",
        ),
        (
            drops and (options.to or options.tensorboard),
            "--to sends the record, and --runs none keeps none.",
        ),
    )
    for is_wrong, sentence in refusals:
        if is_wrong:
            raise ArgumentError(sentence)


def check_plan(text: str, workers: int) -> str:
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


def _in_map() -> bool:
    """Whether ``ronde map`` starts its workers so: on this machine alone, in a container too."""
    return IN_MAP in os.environ


def _check_tensorflow(options: RunOptions) -> None:
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


def _check_mpi_world(options: RunOptions, box: Container | None) -> None:
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


def _in_container(options: RunOptions, box: Container, command: list[str]) -> RunOptions:
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
    # The service starts a job again with the same command line: what has begun resumes.
    begun = (runs / name / "checkpoints").is_dir() or has_whole(options.upload, name)
    origin = None if begun else options.origin
    return dataclasses.replace(
        options, name=name, runs=runs, resume=options.resume or begun, origin=origin
    )
