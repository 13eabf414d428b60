"""The options of ``ronde run``, checked before anything starts, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ronde.cli.fork import Origin, find_origin
from ronde.cli.hosts import HostOptions, Places, ServersOption
from ronde.cli.live_watch import parse_watch
from ronde.cli.options import TIME, parsed, setting
from ronde.cli.recipe import check_command
from ronde.cli.script import (
    IN_MAP,
    ArgumentsOption,
    FeedOption,
    ModuleOption,
    WorkersOption,
    command_of,
    feed_of,
)
from ronde.cli.uploads import has_whole
from ronde.watch import check_name, script_stem
from ronde.world import ArgumentError
from ronde.world.units import parse_duration

if TYPE_CHECKING:
    from ronde.launch import Container


@dataclass(frozen=True, kw_only=True)
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
    origin: str | None = setting(
        None,
        "--from",
        "Begin a new run with a checkpoint of another one: its newest whole one, or that of STEP.",
        "RUN[@STEP]",
    )
    plan: str | None = setting(
        None,
        "--plan",
        "How to split the work: replicate, shard, pipeline=2,shard=optimizer, …, a "
        "plan file, or auto.",
        "PLAN",
    )
    reducer: str | None = setting(
        None,
        "--reducer",
        "How to average gradients: ring, hierarchical, servers, auto, bf16, topk:0.01, … "
        "Overrides the plan's.",
        "NAME",
    )
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
    watch: str | None = setting(
        None,
        "--watch",
        "Measure gradients, updates, and activations every P steps, and judge the run by "
        "rules while it trains. Without P, every 32 steps.",
        "[P]",
    )
    stop_on: str | None = setting(
        None,
        "--stop-on",
        "With --watch, which this implies: save and end with status 3 when one of these "
        "rules fires: nan,diverging, or all.",
        "RULES",
    )
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
    upload: str | None = setting(
        None,
        "--upload",
        "Also keep the checkpoints below this URL of fsspec (s3://…, file://…). --resume "
        "takes the newest from there if this machine has an older one or none.",
        "URL",
    )
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
    output: Literal["main", "all"] = setting(
        "main",
        "--output",
        "Whose output to show: rank 0's, or all ranks', each line with its rank.",
        "main|all",
    )
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
    from ronde.checkpoint import RemoteCheckpoints
    from ronde.launch import container, pod
    from ronde.plan.until import Until

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
    _check_together(options, box)
    places = options.places(options.workers)
    feed, feed_note = feed_of(options.feed, options.module or command[0])
    if options.until is not None:
        Until.parse(options.until)
    if options.upload is not None:
        RemoteCheckpoints(options.upload, "run")
    if options.to:
        from ronde.watch.sinks import check_target_name  # imports ssl, which takes 10 ms

        for target in options.to:
            check_target_name(target)
    seconds = None
    if options.time_limit is not None:
        seconds = parsed("--time-limit", options.time_limit, parse_duration, TIME)
    watch, stop_on = parse_watch(options.watch, options.stop_on)
    reducer = _reducer(options)
    origin = None if options.origin is None else find_origin(options.origin, options.runs)
    checked = (options, command, box, places, feed, feed_note, seconds, watch, stop_on)
    return LaunchPlan(*checked, reducer, origin)


def _check_together(options: RunOptions, box: Container | None) -> None:
    """Refuse options that contradict each other.

    Raises:
        ArgumentError: the first of them, and why.
    """
    from ronde.launch import parameter_servers

    if options.tensorflow is not None:
        parameter_servers(options.tensorflow)
    several, second = box is not None and len(box.hosts) > 1, box is not None and box.rank > 0
    # What holds, the options that cannot be given then, and why; {} is the option.
    refusals = (
        (
            str(options.runs) == "none" and not second,  # of a second host, the first keeps the run
            "name resume restarts until stop_on upload to tensorboard",
            "{} needs what a run keeps, and --runs none keeps nothing.",
        ),
        (
            options.resume,
            "origin",
            "{} begins a new run and --resume goes on with an old one: give one of them.",
        ),
        (options.horovod, "until origin stop_on", "{} is not for scripts that use Horovod."),
        (
            options.tensorflow is not None,
            "horovod plan prove reducer servers feed until origin watch stop_on baseline "
            "time_limit tensorboard to",
            "{} is not for TensorFlow scripts: Ronde starts, watches, and restarts them, and "
            "TensorFlow trains.",
        ),
        (
            several,
            "restarts time_limit until stop_on",
            "{} is not for containers of several hosts: the service starts and ends them together. "
            "Started again by it, a job resumes by itself.",
        ),
        (
            not (options.restarts and options.named),
            "min_workers",
            "{} says how few workers may go on when --restarts loses hosts: give --restarts, and "
            "several hosts.",
        ),
        (
            options.mpi_world,
            "ray spark",
            "--mpi-world is not for {}, whose workers mpirun does not start. Name the hosts with "
            "--hosts, or use --slurm.",
        ),
        (
            options.mpi_world and bool(options.named),
            "restarts",
            "--mpi-world with {} is for this machine only.",
        ),
    )
    for holds, names, sentence in refusals:
        for name in names.split() if holds else ():
            if getattr(options, name):
                flag = "--from" if name == "origin" else f"--{name.replace('_', '-')}"
                raise ArgumentError(sentence.format(flag))
    if options.mpi_world and box is not None and several and box.port:
        raise ArgumentError(
            "--mpi-world is not for several pods: mpirun reaches hosts over ssh. Start the script "
            "with an MPIJob of Kubeflow, whose mpirun Ronde understands."
        )


def _reducer(options: RunOptions) -> str | None:
    """``--reducer``, or what ``--servers`` implies."""
    from ronde.plan import parse_reducer

    reducer = None if options.reducer is None else str(parse_reducer(options.reducer))
    if options.servers is None:
        return reducer
    if reducer is None:
        return None if "reducer=" in (options.plan or "") else "servers"
    if reducer.split(":")[0] not in ("servers", "auto"):
        raise ArgumentError(
            f"--servers starts servers that --reducer {reducer} does not use: give --reducer "
            "servers or auto."
        )
    return reducer


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
    if box.checkpoints is None and str(options.runs) == "none":  # nothing to name or to resume
        return options
    name = options.name or script_stem(options.module or command[0])
    runs = box.checkpoints or options.runs
    # The service starts a job again with the same command line: what has begun resumes.
    begun = (runs / name / "checkpoints").is_dir() or has_whole(options.upload, name)
    origin = None if begun else options.origin
    return dataclasses.replace(
        options, name=name, runs=runs, resume=options.resume or begun, origin=origin
    )
