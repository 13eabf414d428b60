"""``ronde submit``: a job of Slurm or Kubernetes that runs a script on all of its nodes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.options import app, setting, verb
from ronde.cli.script import ArgumentsOption, ModuleOption, command_of
from ronde.watch import check_name, script_stem
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.launch.sbatch import BatchJob


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde submit``, as the user gave them."""

    arguments: ArgumentsOption = None
    module: ModuleOption = None
    nodes: int = setting(1, "--nodes -N", "How many nodes.", min=1)
    gpus: int | None = setting(None, "--gpus", "GPUs per node, a worker each.", min=1)
    tasks: int | None = setting(None, "--tasks", "Workers per node. Default: one per GPU.", min=1)
    cores: int | None = setting(None, "--cores", "Cores per worker.", min=1)
    limit: str | None = setting(
        None, "--time", "Time limit: 20:00:00, 2-12:00:00, or minutes.", "LIMIT"
    )
    partition: str | None = setting(None, "--partition -p", "Partition.")
    account: str | None = setting(None, "--account -A", "Account that pays.")
    name: str | None = setting(
        None, "--name", "Name of the job and its run, with the job's number. Default: the script's."
    )
    plan: str | None = setting(None, "--plan", "As in ronde run.", "PLAN")
    array: str | None = setting(
        None, "--array", "Many runs, as 0-9; each reads its place in SLURM_ARRAY_TASK_ID.", "PLACES"
    )
    requeue: bool = setting(False, "--requeue", "Let the job start again; it resumes the run.")
    sbatch: list[str] | None = setting(
        None, "--sbatch", "A further option of sbatch. Repeat it for more.", "--OPTION=VALUE"
    )
    kubernetes: str | None = setting(
        None, "--kubernetes", "Write a manifest, with --dry-run: pytorchjob or jobset.", "[KIND]"
    )
    image: str | None = setting(None, "--image", "Image of the pods, with Ronde and the script.")
    volume: list[str] | None = setting(
        None,
        "--volume",
        "A volume of the pods. The first one keeps the runs. Repeat it for more.",
        "CLAIM:/PATH",
    )
    dry_run: bool = setting(False, "--dry-run", "Print what would be submitted; submit nothing.")
    following: bool = setting(True, "--follow/--no-follow", "Show the output until the job ends.")

    @property
    def shared(self) -> dict[str, Any]:
        """What every scheduler is told alike."""
        names = ("nodes", "gpus", "tasks", "cores")
        plan = ["--plan", self.plan] if self.plan else []
        return {"options": plan, **{name: getattr(self, name) for name in names}}


@verb(app, "submit")
def _submit(options: Options) -> None:
    """Submit a script to Slurm, on all nodes of a job, and follow it; or write a manifest for
    Kubernetes.

    Examples:

    ```sh
    ronde submit --nodes 4 --gpus 4 --time 20:00:00 train.py --lr 0.1     submit, and follow
    ronde submit --nodes 1 --gpus 1 --array 0-9 sweep.py     ten runs; SLURM_ARRAY_TASK_ID differs
    ronde submit --nodes 4 --gpus 4 --dry-run train.py       print the batch script
    ronde submit --kubernetes --image me/train --nodes 4 --gpus 4 --dry-run train.py     a manifest
    ```
    """
    from ronde.launch.sbatch import submit

    if options.kubernetes is not None:
        typer.echo(_manifest(options, options.kubernetes), nl=False)
        return
    if options.image or options.volume:
        raise ArgumentError("--image and --volume are for --kubernetes.")
    batch = _batch_job(options)
    if options.dry_run:
        typer.echo(batch.text(), nl=False)
        return
    job, is_array = submit(batch), options.array is not None
    typer.echo(f"submitted job {job}: {shlex.join(batch.command)}", err=True)
    where = f"slurm-{job}_*.out" if is_array else f"slurm-{job}.out"
    if is_array or not options.following:
        typer.echo(f"its output: {where}   end it with: scancel {job}", err=True)
        return
    _follow(job, where)


def _manifest(options: Options, kind: str) -> str:
    """A manifest for Kubernetes.

    Raises:
        ArgumentError: options contradict each other, or one is missing.
    """
    from ronde.launch.kubernetes import KINDS, Manifest
    from ronde.launch.sbatch import limit_seconds

    for name in ("partition", "account", "array", "sbatch"):
        if getattr(options, name):
            raise ArgumentError(f"--{name} is for Slurm: leave it out with --kubernetes.")
    if not options.image or not options.dry_run:
        lacks = "--dry-run" if options.image else "--image IMAGE, with Ronde and the script in it"
        raise ArgumentError(
            f"--kubernetes needs {lacks}. It prints a manifest: give that to 'kubectl create -f -'."
        )
    given, module = options.arguments or [], options.module
    if not module and not given:
        raise ArgumentError("no script given: name one, as it is called in the image.")
    name = options.name or script_stem(module or given[0])
    check_name(name)
    if options.requeue and not options.volume:
        typer.echo(
            "note: --requeue resumes from checkpoints, and a new pod has none: give a "
            "--volume that keeps them.",
            err=True,
        )
    return Manifest(
        ["-m", module, *given] if module else given,
        name,
        **options.shared,
        kind=KINDS[0] if kind == "auto" else kind,
        image=options.image,
        limit=limit_seconds(options.limit) if options.limit else None,
        volumes=options.volume or (),
        restarts=10 if options.requeue else 0,
    ).text()


def _batch_job(options: Options) -> BatchJob:
    """A batch script of Slurm.

    Raises:
        ArgumentError: there is no such script.
    """
    from ronde.launch.sbatch import BatchJob

    command = command_of(options.module, options.arguments or [])
    name = options.name or script_stem(options.module or command[0])
    check_name(name)
    directives = [
        *([f"--partition={options.partition}"] if options.partition else []),
        *([f"--account={options.account}"] if options.account else []),
        *(options.sbatch or ()),
    ]
    return BatchJob(
        command,
        name,
        **options.shared,
        limit=options.limit,
        directives=directives,
        array=options.array,
        requeue=options.requeue,
    )


def _follow(job: str, where: str) -> None:
    """Show a job's output until it ends.

    Raises:
        typer.Exit: it failed, or Ctrl-C leaves it to itself.
    """
    from ronde.launch.console import to_terminal
    from ronde.launch.sbatch import follow_job

    try:
        state = follow_job(job, to_terminal, lambda line: typer.echo(line, err=True))
    except KeyboardInterrupt:
        text = f"\njob {job} goes on; its output: {where}   end it with: scancel {job}"
        typer.echo(text, err=True)
        raise typer.Exit(130) from None
    if state != "COMPLETED":
        raise typer.Exit(1)
