"""``ronde submit``: a job of Slurm or Kubernetes that runs a script on all of its nodes."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ronde.cli.options import option
from ronde.cli.script import ArgumentsOption, ModuleOption, command_of
from ronde.watch import check_name, script_stem
from ronde.world import ArgumentError

__all__ = ["register"]

_EXAMPLES = """
Examples:

```sh
ronde submit --nodes 4 --gpus 4 --time 20:00:00 train.py --lr 0.1     submit, and follow
ronde submit --preset jean-zay-a100 --account abc@a100 --nodes 2 train.py
ronde submit --nodes 1 --gpus 1 --array 0-9 sweep.py     ten runs; SLURM_ARRAY_TASK_ID differs
ronde submit --nodes 4 --gpus 4 --dry-run train.py       print the batch script
ronde submit --kubernetes --image me/train --nodes 4 --gpus 4 --dry-run train.py     a manifest
```
"""


_RESTARTS = 10  # of a job of Kubernetes with --requeue


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "submit",
        help="Submit a script to Slurm, on all nodes of a job, and follow it; or write a manifest "
        "for Kubernetes.\n" + _EXAMPLES,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
        no_args_is_help=True,
    )
    def submit(
        arguments: ArgumentsOption = None,
        module: ModuleOption = None,
        nodes: Annotated[int, option("--nodes -N", "How many nodes.", min=1)] = 1,
        gpus: Annotated[
            int | None, option("--gpus", "GPUs per node, a worker each.", min=1)
        ] = None,
        tasks: Annotated[
            int | None, option("--tasks", "Workers per node. Default: one per GPU.", min=1)
        ] = None,
        cores: Annotated[int | None, option("--cores", "Cores per worker.", min=1)] = None,
        limit: Annotated[
            str | None, option("--time", "Time limit: 20:00:00, 2-12:00:00, or minutes.", "LIMIT")
        ] = None,
        partition: Annotated[str | None, option("--partition -p", "Partition.")] = None,
        account: Annotated[str | None, option("--account -A", "Account that pays.")] = None,
        preset: Annotated[
            str | None,
            option("--preset", "What a known cluster needs; 'list' shows them.", "CLUSTER"),
        ] = None,
        name: Annotated[
            str | None,
            option(
                "--name",
                "Name of the job and its run, with the job's number. Default: the script's.",
            ),
        ] = None,
        plan: Annotated[str | None, option("--plan", "As in ronde run.", "PLAN")] = None,
        array: Annotated[
            str | None,
            option(
                "--array",
                "Many runs, as 0-9; each reads its place in SLURM_ARRAY_TASK_ID.",
                "PLACES",
            ),
        ] = None,
        requeue: Annotated[
            bool, option("--requeue", "Let the job start again; it resumes the run.")
        ] = False,
        sbatch: Annotated[
            list[str] | None,
            option("--sbatch", "A further option of sbatch. Repeat it for more.", "--OPTION=VALUE"),
        ] = None,
        kubernetes: Annotated[
            str | None,
            option(
                "--kubernetes",
                "Write a manifest, with --dry-run: pytorchjob, trainjob, or jobset.",
                "[KIND]",
            ),
        ] = None,
        image: Annotated[
            str | None, option("--image", "Image of the pods, with Ronde and the script.")
        ] = None,
        volume: Annotated[
            list[str] | None,
            option(
                "--volume",
                "A volume of the pods. The first one keeps the runs. Repeat it for more.",
                "CLAIM:/PATH",
            ),
        ] = None,
        dry_run: Annotated[
            bool, option("--dry-run", "Print what would be submitted; submit nothing.")
        ] = False,
        following: Annotated[
            bool, option("--follow/--no-follow", "Show the output until the job ends.")
        ] = True,
    ) -> None:
        from ronde.launch.sbatch import BatchJob, follow_job, presets
        from ronde.launch.sbatch import submit as send

        if kubernetes is not None:
            others = (preset, partition, account, array, sbatch)
            options = ("--preset", "--partition", "--account", "--array", "--sbatch")
            wrong = [o for o, v in zip(options, others, strict=True) if v]
            if wrong:
                raise ArgumentError(f"{wrong[0]} is for Slurm: leave it out with --kubernetes.")
            if not image or not dry_run:
                lacks = "--dry-run" if image else "--image IMAGE, with Ronde and the script in it"
                raise ArgumentError(
                    f"--kubernetes needs {lacks}. It prints a manifest: give that to 'kubectl "
                    "create -f -'."
                )
            from ronde.launch.kubernetes import KINDS, Manifest
            from ronde.launch.sbatch import limit_seconds

            given = arguments or []
            if not module and not given:
                raise ArgumentError("no script given: name one, as it is called in the image.")
            name = name or script_stem(module or given[0])
            check_name(name)
            if requeue and not volume:
                typer.echo(
                    "note: --requeue resumes from checkpoints, and a new pod has none: give a "
                    "--volume that keeps them.",
                    err=True,
                )
            manifest = Manifest(
                KINDS[0] if kubernetes == "auto" else kubernetes,
                ["-m", module, *given] if module else given,
                image,
                name,
                ["--plan", plan] if plan else [],
                nodes,
                gpus,
                tasks,
                cores,
                limit_seconds(limit) if limit else None,
                volume or (),
                _RESTARTS if requeue else 0,
            )
            typer.echo(manifest.text(), nl=False)
            return
        if image or volume:
            raise ArgumentError("--image and --volume are for --kubernetes.")
        known = presets()
        if preset == "list":
            for each, what in known.items():
                typer.echo(f"{each:<16}{what['about']}")
            return
        command = command_of(module, arguments or [])
        if preset is not None and preset not in known:
            raise ArgumentError(f"--preset {preset}: known are {', '.join(known)}.")
        needs = known.get(preset or "", {})
        if "account" in needs.get("needs", ()) and account is None:
            raise ArgumentError(f"--preset {preset} needs --account: the project that pays.")
        name = name or script_stem(module or command[0])
        check_name(name)
        gpus = gpus or (None if tasks else needs.get("gpus"))
        directives = [
            *needs.get("directives", ()),
            *([f"--partition={partition}"] if partition else []),
            *([f"--account={account}"] if account else []),
            *(sbatch or ()),
        ]
        batch = BatchJob(
            command,
            name,
            ["--plan", plan] if plan else [],
            nodes,
            gpus,
            tasks,
            cores or (needs.get("cores_per_gpu") if gpus else None),
            limit,
            directives,
            array,
            requeue,
            needs.get("modules", ()),
        )
        if dry_run:
            typer.echo(batch.text(), nl=False)
            return
        job = send(batch)
        typer.echo(f"submitted job {job}: {shlex.join(command)}", err=True)
        if array is not None or not following:
            where = f"slurm-{job}_*.out" if array is not None else f"slurm-{job}.out"
            typer.echo(f"its output: {where}   end it with: scancel {job}", err=True)
            return
        from ronde.launch.console import to_terminal

        try:
            state = follow_job(job, to_terminal, lambda line: typer.echo(line, err=True))
        except KeyboardInterrupt:
            typer.echo(
                f"\njob {job} goes on; its output: slurm-{job}.out   end it with: scancel {job}",
                err=True,
            )
            raise typer.Exit(130) from None
        if state != "COMPLETED":
            raise typer.Exit(1)
