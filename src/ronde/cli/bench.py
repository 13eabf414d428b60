"""``ronde bench``: measure the links between workers for plans, and the reducers."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.bench_exchange import register_exchange
from ronde.cli.options import Group, option
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError

_EXAMPLES = """
Examples:

```sh
ronde bench cluster                         one worker per GPU, or per core
ronde bench cluster --workers 2 --quick     seconds instead of a minute
ronde plan --cluster cluster.yaml train.py  use the file
srun -N 4 python -m ronde.measure.bench_links --output cluster.yaml  several nodes
```
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    bench = typer.Typer(
        cls=Group, help="Measure this machine.", no_args_is_help=True, rich_markup_mode="markdown"
    )
    app.add_typer(bench, name="bench")

    @bench.callback()
    def _root() -> None:
        pass

    register_exchange(bench)

    @bench.command(
        "cluster",
        help="Time every collective between all workers at once, and write a cluster file for "
        "ronde plan.\n" + _EXAMPLES,
    )
    def cluster(
        workers: Annotated[
            str,
            option(
                "--workers -n",
                "Number of workers. auto: one per GPU, or per usable core (at most 8).",
                "N|auto",
            ),
        ] = "auto",
        output: Annotated[Path, option("--output -o", "The file to write.", "FILE")] = Path(
            "cluster.yaml"
        ),
        quick: Annotated[
            bool, option("--quick", "Use fewer sizes and rounds: takes seconds.")
        ] = False,
        accept_noise: Annotated[
            bool,
            option(
                "--accept-noise", "Write the file even if other programs disturbed the measurement."
            ),
        ] = False,
        as_json: Annotated[bool, option("--json", "Print only JSON.")] = False,
    ) -> None:
        from ronde.launch import Job, check_workers, resolve_workers, run_here
        from ronde.predict import Cluster

        count = resolve_workers(workers)
        check_workers(count)
        check_file(output)
        console = plain_console()
        with tempfile.TemporaryDirectory(prefix="ronde-bench-") as folder:
            file = Path(folder) / "cluster.yaml"
            command = ["-m", "ronde.measure.bench_links", "--output", str(file)]
            command += ["--quick"] * quick + ["--accept-noise"] * accept_noise
            output_parts: list[bytes] = []
            plural = f"{count} worker{'s' if count > 1 else ''}"
            job = Job(command, count, None, {"RONDE_PROGRESS": "quiet", "RONDE_RESUME": "0"})
            if console.is_terminal and not as_json:
                from rich.text import Text

                with console.status(f"starting {plural}") as status:

                    def show(message: dict[str, Any]) -> None:
                        status.update(Text(str(message.get("bench", ""))))

                    outcome = run_here(job, output_parts.append, show)
            else:
                outcome = run_here(job, output_parts.append, lambda _: None)
            if outcome.interrupted:
                plain_console(stderr=True).print(
                    f"{outcome.error}; every worker has ended, nothing was written", soft_wrap=True
                )
                raise typer.Exit(outcome.status)
            if outcome.status:
                lines = b"".join(output_parts).decode(errors="replace").strip().splitlines()
                text = outcome.error or (lines[-1] if lines else "a worker failed")
                if "too busy" in text:
                    text += " Or write the file anyway: --accept-noise."
                raise RondeError(text)
            measured = Cluster.load(file)
            measured.save(output)
        if as_json:
            print(json.dumps(measured.to_dict()))
        else:
            _show(measured, output, console)


def check_file(output: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    folder = output.absolute().parent
    if not folder.is_dir():
        raise ArgumentError(f"--output {output}: the folder {folder} does not exist.")
    if output.is_dir():
        raise ArgumentError(
            f"--output {output} is a folder, expected a file: did you mean "
            f"{output / 'cluster.yaml'}?"
        )
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"--output {output}: the folder {folder} is not writable.")


def _show(cluster: Any, output: Path, console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{cluster.devices} × {cluster.device} on {cluster.name}", title_justify="left"
    )
    for name in ("collective", "scope"):
        table.add_column(name)
    for name in ("workers", "alpha", "beta", "25 MiB take", "fit's error"):
        table.add_column(name, justify="right")
    for kind, by in cluster.links.items():
        for scope, fit in by.items():
            bucket = fit.alpha + (25 << 20) / fit.beta
            table.add_row(
                kind,
                scope,
                str(fit.ranks),
                f"{fit.alpha * 1e6:,.0f} µs",
                f"{fit.beta / 1e6:,.0f} MB/s",
                f"{bucket * 1e3:.1f} ms",
                f"{fit.residual:.0%}",
            )
    console.print(table)
    console.print(
        Text(
            f"{cluster.memory_bytes / 2**30:.1f} GiB per device, "
            f"{cluster.base_bytes / 2**20:.0f} MiB of it used before any model; computation hides "
            f"{cluster.bucket_overlap:.0%} of an exchange and takes {cluster.interference:.2f}× as "
            "long meanwhile"
        ),
        soft_wrap=True,
    )
    if cluster.noise > 0.1:
        console.print(
            Text(
                f"warning: other programs disturbed the measurement ({cluster.noise:.0%}), so "
                "plans from this file are uncertain",
                style="yellow",
            )
        )
    console.print(
        Text(f"written to {output}   next: ronde plan --cluster {output} SCRIPT", style="cyan"),
        soft_wrap=True,
    )
