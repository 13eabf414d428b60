"""Options that name hosts, and the launch on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ronde.cli.options import host_setting, option
from ronde.world import ArgumentError, RondeError

if TYPE_CHECKING:
    from ronde.launch import ReductionServers


ServersOption = Annotated[
    str | None,
    option(
        "--servers",
        "Start servers that sum gradients: N on this machine, or one on each of these hosts. "
        "Implies --reducer servers.",
        "N|a,b",
    ),
]


@dataclass(frozen=True)
class Places:
    """Hosts to run on, and what starts an agent there."""

    hosts: Sequence[Any]
    engine: Any
    python: str | None
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options that name hosts, as the user gave them. A verb that reaches fewer engines gives
    the others' fields a plain default.
    """

    hosts: str | None = host_setting(
        None,
        "--hosts",
        "Run on these hosts over ssh, with so many workers each; without a number, one per "
        "device. The first one holds rank 0.",
        "a:8,b:8",
    )
    hostfile: Path | None = host_setting(
        None, "--hostfile", "The same from a file with a line 'host slots=8' for each.", "FILE"
    )
    slurm: bool = host_setting(
        False, "--slurm", "Inside sbatch or salloc: on all nodes of the allocation, over srun."
    )
    mpi: bool = host_setting(
        False, "--mpi", "Reach --hosts through the mpirun at hand, not over ssh."
    )
    ray: str | None = host_setting(
        None,
        "--ray",
        "On a Ray cluster: HOST:PORT, ray://HOST:PORT, local for one of its own. Without a "
        "value: the cluster that this machine is in, or one of its own.",
        "[ADDRESS]",
    )
    spark: str | None = host_setting(
        None,
        "--spark",
        "On a Spark cluster, in barrier mode: spark://HOST:7077, yarn, … Without a value: "
        "Spark's own configuration, or this machine.",
        "[MASTER]",
    )
    ssh_config: Path | None = host_setting(
        None, "--ssh-config", "A configuration of ssh in place of yours.", "FILE"
    )
    env: list[str] | None = host_setting(
        None,
        "--env",
        "Pass this environment variable to the other hosts too. Repeat it for more.",
        "NAME",
    )
    python: str | None = host_setting(
        None, "--python", "Python on the hosts. Default: the path of this one.", "PATH"
    )

    @property
    def named(self) -> list[str]:
        """The options given that say which hosts."""
        values = {"--hosts": self.hosts, "--hostfile": self.hostfile, "--slurm": self.slurm}
        values |= {"--ray": self.ray, "--spark": self.spark}
        return [option for option, value in values.items() if value]

    def words(self) -> list[str]:
        """The same options for another ``ronde run``."""
        valued = {"--hosts": self.hosts, "--hostfile": self.hostfile, "--python": self.python}
        valued |= {"--ray": self.ray, "--spark": self.spark, "--ssh-config": self.ssh_config}
        given = [w for option, value in valued.items() if value for w in (option, str(value))]
        given += [word for variable in self.env or () for word in ("--env", variable)]
        return given + ["--slurm"] * self.slurm + ["--mpi"] * self.mpi

    def places(self, workers: str = "auto") -> Places | None:
        """Check the options; None if they name no host.

        Args:
            workers: ``auto`` or how many, for engines that are asked for places.

        Raises:
            ArgumentError: they contradict each other, or name what is not there.
        """
        from ronde.launch import (
            Mpi,
            Ray,
            Slurm,
            Spark,
            Ssh,
            allocation,
            environment_for,
            parse_hostfile,
            parse_hosts,
            resolve_workers,
        )

        given = self.named
        if len(given) > 1:
            raise ArgumentError(f"{' and '.join(given)} all say which hosts: give one of them.")
        over_ssh = bool(self.hosts or self.hostfile)
        if self.mpi and not over_ssh:
            raise ArgumentError("--mpi says how to reach hosts: name them with --hosts.")
        others = (
            ("--ssh-config", self.ssh_config and not over_ssh),
            ("--env", self.env and not given),
            ("--python", self.python and not given),
        )
        for flag, wrong in others:
            if wrong:
                raise ArgumentError(f"{flag} is for other hosts: name them with --hosts.")
        if not given:
            return None
        passed = environment_for(self.env or [])
        count = None if workers == "auto" else resolve_workers(workers)
        if self.ray:
            ray = Ray(self.ray, count, self.python)
            return Places(ray.hosts, ray, self.python, passed)
        if self.spark:
            spark = Spark(self.spark, count, self.python)
            return Places(spark.hosts, spark, self.python, passed)
        if self.slurm:
            return Places(allocation(), Slurm(), self.python, passed)
        hosts = parse_hosts(self.hosts) if self.hosts else parse_hostfile(self.hostfile or Path())
        engine = Mpi(self.ssh_config) if self.mpi else Ssh(self.ssh_config)
        return Places(hosts, engine, self.python, passed)


@dataclass(frozen=True, kw_only=True)
class SshHostOptions(HostOptions):
    """Those of hosts that are reached over ssh."""

    slurm: bool = False
    mpi: bool = False
    ray: str | None = None
    spark: str | None = None
    env: list[str] | None = None


@dataclass(frozen=True)
class Gathered:
    """What will run the workers: this machine, or agents that have answered.

    Attributes:
        workers: how many, on all hosts.
        where: a phrase for the first line of output: `` on a and b``; empty on this machine.
        names: a prefix for each rank's lines.
        notes: what may hurt.
        hosts: name and number of workers of each; an empty name is this machine.
    """

    workers: int
    where: str
    names: list[str]
    notes: list[str]
    launch: Callable[..., Any]
    hosts: Sequence[tuple[str, int]] = ()


def on_fleet(fleet: Any, counts: Sequence[int], least: int = 1) -> Callable[..., Any]:
    """What launches a job on hosts, with so many workers on each."""
    from ronde.launch import Output

    def launch(job: Any, show: Any, message: Any, names: Any = None, restarts: Any = None) -> Any:
        logs = job.directory and job.directory / "logs"
        output = Output(job.workers, logs, show, message, names)
        try:
            return fleet.run(job, counts, output, restarts, least)
        finally:
            output.close()

    return launch


def answers_of(
    group: Gathered,
    command: list[str],
    key: str,
    say: Callable[[str], None] = lambda _: None,
    variables: dict[str, str] | None = None,
) -> list[Any]:
    """Run a measurement on workers, and return what it answers. Nothing is kept.

    Args:
        key: of the messages that are answers.
        say: gets a line about each part of the measurement.
        variables: more of the workers' environment.

    Raises:
        RondeError: a worker failed, or nothing was answered.
        typer.Exit: a signal stopped it.
    """
    from ronde.launch import Job

    answers: list[Any] = []
    printed: list[bytes] = []

    def message(values: dict[str, Any]) -> None:
        if key in values:
            answers.append(values[key])
        elif "bench" in values:
            say(str(values["bench"]))

    environment = {"RONDE_PROGRESS": "quiet", "RONDE_RESUME": "0", **(variables or {})}
    job = Job(command, group.workers, None, environment)
    outcome = group.launch(job, printed.append, message)
    if outcome.interrupted:
        typer.echo(f"{outcome.error}; every worker has ended, nothing was written", err=True)
        raise typer.Exit(outcome.status)
    if outcome.status or not answers:
        lines = b"".join(printed).decode(errors="replace").strip().splitlines()
        raise RondeError(outcome.error or (lines[-1] if lines else "nothing was measured"))
    return answers


@contextlib.contextmanager
def gathered(
    places: Places | None,
    box: Any,
    command: list[str],
    workers: str,
    runs: Path | None,
    say: Callable[[str], None],
    least: int = 1,
) -> Iterator[Gathered]:
    """Check what is there, on this machine or on hosts, before anything starts.

    Args:
        box: the SageMaker container that this is; None elsewhere.
        workers: ``auto`` or how many.
        runs: the folder of runs; None where nothing is kept.
        say: called with a line about each phase.
        least: with how few workers a run on several hosts goes on after a failure.
    """
    from ronde.launch import Fleet, check_workers, notes, resolve_workers, run_here, share

    if places is None:
        count = resolve_workers(workers)
        check_workers(count)
        if box is not None and len(box.hosts) > 1:
            nodes, all_of = box.nodes(), count * len(box.hosts)

            def in_container(
                job: Any, show: Any, message: Any, names: Any = None, restarts: Any = None
            ) -> Any:
                here = dataclasses.replace(job, workers=count)
                here.environment["RONDE_RUN_DIR_SHARED"] = "0"
                return run_here(here, show, message, names, nodes)

            names = [f"[{box.hosts[r // count]} {r}] " for r in range(all_of)]
            pairs = [(host, count) for host in box.hosts]
            yield Gathered(all_of, f" on {len(box.hosts)} hosts", names, [], in_container, pairs)
            return
        names = [f"[{r}] " for r in range(count)]
        yield Gathered(count, "", names, [], run_here, [("", count)])
        return
    wanted = None if workers == "auto" else resolve_workers(workers)
    # Hosts look there for what this one writes, so it has to be there.
    made = runs is not None and not runs.exists()
    if runs is not None:
        runs.mkdir(parents=True, exist_ok=True)
    try:
        with Fleet(places.hosts, places.engine, places.python, say) as fleet:
            facts = fleet.ask(command, places.environment, runs)
            counts = share(places.hosts, facts, wanted)
            used = [h.name for h, n in zip(places.hosts, counts, strict=True) if n]
            counts = counts[: len(used)]
            said = notes(facts, dict(zip(used, counts, strict=True)))
            if len(used) < len(places.hosts):
                spare = ", ".join(h.name for h in places.hosts[len(used) :])
                said.append(f"{', '.join(used)} has slots enough: {spare} is not used")
                fleet.keep(len(used))

            launch = on_fleet(fleet, counts, least)
            hosts = [host for host, n in zip(used, counts, strict=True) for _ in range(n)]
            names = [f"[{host} {rank}] " for rank, host in enumerate(hosts)]
            where = " on " + ", ".join(f"{h}:{n}" for h, n in zip(used, counts, strict=True))
            pairs = list(zip(used, counts, strict=True))
            yield Gathered(sum(counts), where, names, said, launch, pairs)
    finally:
        if made and runs is not None:
            with contextlib.suppress(OSError):
                runs.rmdir()  # nothing came of it


def servers_of(servers: str | None, places: Any) -> ReductionServers:
    """The servers that ``--servers`` asks for, which end with the block."""
    from ronde.launch import ReductionServers

    away = places is not None
    return ReductionServers(
        servers, places.engine if away else None, places.python if away else None, away
    )
