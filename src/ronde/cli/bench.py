"""``ronde bench``: time the links between workers for plans, and every reducer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.answer_screen import Doing, answer_table, tell
from ronde.cli.hosts import (
    Gathered,
    ServersOption,
    SshHostOptions,
    answers_of,
    gathered,
    servers_of,
)
from ronde.cli.options import Group, JsonFlag, app, setting, verb
from ronde.cli.script import WorkersOption, check_folders
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import format_bytes

if TYPE_CHECKING:
    from ronde.predict import Cluster

bench = typer.Typer(
    cls=Group, help="Measure this machine.", no_args_is_help=True, rich_markup_mode="markdown"
)
app.add_typer(bench, name="bench")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options of ``ronde bench cluster``, as the user gave them."""

    workers: WorkersOption = "auto"
    output: Path = setting(Path("cluster.yaml"), "--output -o", "The file to write.", "FILE")
    quick: bool = setting(False, "--quick", "Use fewer sizes and rounds: takes seconds.")
    as_json: JsonFlag = False


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(SshHostOptions):
    """The options of ``ronde bench exchange``, as the user gave them."""

    workers: WorkersOption = "auto"
    sizes: str = setting(
        "4KiB-256MiB", "--sizes", "Sizes of a bucket, or a range in steps of four.", "SIZES"
    )
    reducers: str = setting("", "--reducers", "Reducers to time, joined by commas.", "NAMES")
    servers: ServersOption = None
    cluster: Path | None = setting(
        None, "--cluster", "Put the reducers' times into this cluster file, for ronde plan.", "FILE"
    )
    as_json: JsonFlag = False


@verb(bench, "cluster")
def _cluster(options: ClusterOptions) -> None:
    """Time every collective between all workers at once, and write a cluster file for ronde plan.

    Examples:

    ```sh
    ronde bench cluster                         one worker per GPU, or per core
    ronde bench cluster --workers 2 --quick     seconds instead of a minute
    ronde plan --cluster cluster.yaml train.py  use the file
    srun -N 4 python -m ronde.measure.bench_links --output cluster.yaml  several nodes
    ```
    """
    from ronde.launch import check_workers, resolve_workers

    count = resolve_workers(options.workers)
    check_workers(count)
    check_folders(output=options.output)
    console = plain_console()
    with Doing(console) if not options.as_json else contextlib.nullcontext(lambda _: None) as say:
        measured = measure_links(count, ["--quick"] * options.quick, say)
    measured.save(options.output)
    if options.as_json:
        print(json.dumps(measured.to_dict()))
    else:
        _show(measured, options.output, console)


def measure_links(
    count: int, options: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> Cluster:
    """Measure the links between workers of this machine.

    Args:
        count: how many workers.
        options: of the benchmark, such as ``--quick``.
        say: gets a line about each measurement.

    Raises:
        RondeError: a worker has failed.
        typer.Exit: a signal stopped it.
    """
    from ronde.launch import run_here
    from ronde.predict import Cluster

    command = ["-m", "ronde.measure.bench_links", "--tell", *options]
    here = Gathered(count, "", [], [], run_here)
    return Cluster.from_dict(answers_of(here, command, "cluster", say)[-1])


def _show(cluster: Any, output: Path, console: Any) -> None:
    table = answer_table(
        "collective", "scope", *[">workers", ">alpha", ">beta", ">25 MiB take", ">fit's error"]
    )
    for kind, by in cluster.links.items():
        for scope, fit in by.items():
            # DDP's default bucket has 25 MiB.
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
    console.print(f"{cluster.devices} × {cluster.device} on {cluster.name}")
    console.print(table)
    tell(
        f"{cluster.memory_bytes / 2**30:.1f} GiB per device, "
        f"{cluster.base_bytes / 2**20:.0f} MiB of it used before any model; assumed: "
        f"computation hides {cluster.bucket_overlap:.0%} of an exchange and takes "
        f"{cluster.interference:.2f}× as long meanwhile"
    )
    if cluster.noise > 0.1:
        text = (
            f"warning: other programs disturbed the measurement ({cluster.noise:.0%}), so plans "
            "from this file are uncertain"
        )
        tell((text, "yellow"))
    tell((f"written to {output}   next: ronde plan --cluster {output} SCRIPT", "cyan"))


@verb(bench, "exchange")
def _exchange(options: ExchangeOptions) -> None:
    """Time every reducer between all workers: latency and bus bandwidth over sizes.

    Examples:

    ```sh
    ronde bench exchange --workers 4                        all reducers, 4 KiB to 256 MiB
    ronde bench exchange --sizes 1MiB,16MiB --json > bus.json
    ronde bench exchange --hosts a:1,b:1 --servers c,d      between hosts, with servers
    ```
    """
    from ronde.measure.bench_exchange import default_reducers, parse_sizes
    from ronde.plan import parse_reducer
    from ronde.predict import Cluster

    cluster = options.cluster
    if cluster is not None and not cluster.is_file():
        raise ArgumentError(f"--cluster {cluster}: there is no such file.")
    if cluster is not None and not Cluster.load(cluster).links:
        raise ArgumentError(
            f"--cluster {cluster} has no links: write it with 'ronde bench cluster'."
        )
    parse_sizes(options.sizes)
    names = options.reducers.split(",") if options.reducers else default_reducers()
    for name in names:
        choice = parse_reducer(name)
        if choice.kind.local or choice.name == "auto":
            raise ArgumentError(f"--reducers {name}: it has no exchange of its own to time.")
    command = ["-m", "ronde.measure.bench_exchange"]
    command += ["--sizes", options.sizes, "--reducers", ",".join(names)]
    places = options.places()
    with (
        servers_of(options.servers, places) as started,
        gathered(places, None, command, options.workers, None, lambda _: None) as group,
    ):
        answer = answers_of(group, command, "exchange", variables=started.variables())[-1]
    if cluster is not None:
        _into_cluster(cluster, answer)
    if options.as_json:
        print(json.dumps(answer))
    else:
        _show_exchange(answer)


def _into_cluster(file: Path, answer: dict[str, Any]) -> None:
    from ronde.plan import parse_reducer
    from ronde.predict import Cluster, LinkFit

    fit = answer["fits"].get("ring")
    if fit is None:
        raise ArgumentError("--cluster needs the ring at two sizes or more.")
    known = Cluster.load(file)
    scope = "cluster" if len(answer["hosts"]) > 1 else "node"
    link = LinkFit(**fit, ranks=answer["workers"])
    links = {**known.links, "all_reduce": {**known.links.get("all_reduce", {}), scope: link}}
    reducers = {
        str(parse_reducer(name)): LinkFit(**fit, ranks=answer["workers"])
        for name, fit in answer["fits"].items()
        if name != "ring"
    }
    dataclasses.replace(known, links=links, reducers={**known.reducers, **reducers}).save(file)


def _by_size(answer: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    for row in answer["rows"]:
        rows.setdefault(row["bytes"], {})[row["reducer"]] = row
    return rows


def _show_exchange(answer: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    by_size = _by_size(answer)
    names = list(dict.fromkeys(row["reducer"] for row in answer["rows"]))
    where = ", ".join(answer["hosts"])
    table = Table(
        title=f"{answer['workers']} workers on {where}: milliseconds (bus MB/s)",
        title_justify="left",
        box=SIMPLE_HEAD,  # nine sizes fit into 80 columns
        padding=0,
    )
    table.add_column("reducer", no_wrap=True)
    for size in by_size:
        table.add_column(format_bytes(size), justify="right")
    fastest = {size: min(r["seconds"] for r in rows.values()) for size, rows in by_size.items()}
    for name in names:
        cells = []
        for size, rows in by_size.items():
            row = rows[name]
            ms, bus = row["seconds"] * 1e3, row["bus_bytes_per_second"] / 1e6
            text = f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"
            text += f" ({bus:,.0f})"
            cells.append(Text(text, style="bold" if row["seconds"] == fastest[size] else ""))
        table.add_row(name, *cells)
    console = plain_console()
    console.print(table)
    for name, why in answer["skipped"].items():
        tell((f"note: {name} was left out: {why}", "yellow"))
    lossy = [name for name in names if not _exact(name)]
    if lossy:
        note = f"not exact: {', '.join(lossy)}; their bus bandwidth is that of the whole gradient"
        tell(note)


def _exact(name: str) -> bool:
    from ronde.plan import parse_reducer

    return parse_reducer(name).kind.exact
