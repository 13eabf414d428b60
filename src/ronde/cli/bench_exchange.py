"""``ronde bench exchange``: latency and bus bandwidth of every reducer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.hosts import HostOptions, HostsOption, SshConfigOption, gathered
from ronde.cli.options import option
from ronde.cli.reducers import ServersOption, servers_of
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError
from ronde.world.units import format_bytes

__all__ = ["register_exchange"]

_EXAMPLES = """
Examples:

```sh
ronde bench exchange --workers 4                        all reducers, 4 KiB to 256 MiB
ronde bench exchange --sizes 1MiB,16MiB --html page.html
ronde bench exchange --hosts a:1,b:1 --servers c,d      between hosts, with servers
```
"""


def register_exchange(bench: typer.Typer) -> None:
    """Add the verb to ``ronde bench``."""

    @bench.command(
        "exchange",
        help="Time every reducer between all workers: latency and bus bandwidth over sizes.\n"
        + _EXAMPLES,
    )
    def exchange(
        workers: Annotated[
            str,
            option(
                "--workers -n",
                "Number of workers. auto: one per GPU, or per usable core (at most 8).",
                "N|auto",
            ),
        ] = "auto",
        sizes: Annotated[
            str, option("--sizes", "Sizes of a bucket, or a range in steps of four.", "SIZES")
        ] = "4KiB-256MiB",
        reducers: Annotated[
            str, option("--reducers", "Reducers to time, joined by commas.", "NAMES")
        ] = "",
        hosts: HostsOption = None,
        ssh_config: SshConfigOption = None,
        servers: ServersOption = None,
        cluster: Annotated[
            Path | None,
            option(
                "--cluster",
                "Put the reducers' times into this cluster file, for ronde plan.",
                "FILE",
            ),
        ] = None,
        page: Annotated[
            Path | None, option("--html", "Draw the bandwidths into this file.", "FILE")
        ] = None,
        as_json: Annotated[bool, option("--json", "Print only JSON.")] = False,
    ) -> None:
        from ronde.launch import Job
        from ronde.measure.bench_exchange import default_reducers, parse_sizes
        from ronde.plan import parse_reducer
        from ronde.watch.html import check_drawing

        if page is not None:
            check_drawing()
        if cluster is not None and not cluster.is_file():
            raise ArgumentError(f"--cluster {cluster}: there is no such file.")
        parse_sizes(sizes)
        names = reducers.split(",") if reducers else default_reducers()
        for name in names:
            choice = parse_reducer(name)
            if choice.kind.local or choice.name == "auto":
                raise ArgumentError(f"--reducers {name}: it has no exchange of its own to time.")
        command = ["-m", "ronde.measure.bench_exchange"]
        command += ["--sizes", sizes, "--reducers", ",".join(names)]
        places = HostOptions(hosts, ssh_config=ssh_config).places()
        answers: list[dict[str, Any]] = []
        said: list[bytes] = []

        def message(values: dict[str, Any]) -> None:
            if "exchange" in values:
                answers.append(values["exchange"])

        with (
            servers_of(servers, places) as started,
            gathered(places, None, command, workers, None, lambda _: None) as group,
        ):
            environment = {"RONDE_PROGRESS": "quiet", "RONDE_RESUME": "0"}
            environment |= started.variables()
            job = Job(command, group.workers, None, environment)
            outcome = group.launch(job, said.append, message)
        if outcome.interrupted:
            raise typer.Exit(outcome.status)
        if outcome.status or not answers:
            last = b"".join(said).decode(errors="replace").strip().splitlines()
            raise RondeError(outcome.error or (last[-1] if last else "nothing was measured"))
        answer = answers[-1]
        if cluster is not None:
            _into_cluster(cluster, answer)
        if page is not None:
            _draw(page, answer)
        if as_json:
            print(json.dumps(answer))
        else:
            _show(answer)


def _into_cluster(file: Path, answer: dict[str, Any]) -> None:
    from dataclasses import replace

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
    replace(known, links=links, reducers={**known.reducers, **reducers}).save(file)


def _by_size(answer: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in answer["rows"]:
        found.setdefault(row["bytes"], {})[row["reducer"]] = row
    return found


def _show(answer: dict[str, Any]) -> None:
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
        console.print(Text(f"note: {name} was left out: {why}", style="yellow"), soft_wrap=True)
    lossy = [name for name in names if not _exact(name)]
    if lossy:
        told = f"not exact: {', '.join(lossy)}; their bus bandwidth is that of the whole gradient"
        console.print(Text(told), soft_wrap=True)


def _exact(name: str) -> bool:
    from ronde.plan import parse_reducer

    return parse_reducer(name).kind.exact


def _draw(page: Path, answer: dict[str, Any]) -> None:
    from ronde.watch import html

    names = list(dict.fromkeys(row["reducer"] for row in answer["rows"]))
    by_size = _by_size(answer)

    def plot(axes: Any) -> str:
        colors = (html.REAL, html.SYNTHETIC, html.GOOD, html.LOST, html.INK)
        styles = ("-", (0, (4, 2)), (0, (1, 1)))
        for i, name in enumerate(names):
            values = [rows[name]["bus_bytes_per_second"] / 1e6 for rows in by_size.values()]
            style = styles[i // len(colors) % len(styles)]
            axes.plot(list(by_size), values, color=colors[i % len(colors)], linestyle=style)
            axes.annotate(name, (list(by_size)[-1], values[-1]), fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes of a bucket")
        axes.set_ylabel("bus bandwidth, MB/s")
        return f"bus bandwidth of {', '.join(names)} over the size of a bucket"

    body = [
        (
            "",
            [format_bytes(size), *(f"{rows[n]['seconds'] * 1e3:.3g}" for n in names)],
        )
        for size, rows in by_size.items()
    ]
    best = max(answer["rows"], key=lambda row: row["bus_bytes_per_second"])
    html.write_page(
        page,
        "ronde bench exchange",
        ", ".join(answer["hosts"]),
        f"{best['reducer']} reaches {best['bus_bytes_per_second'] / 1e6:,.0f} MB/s at "
        f"{format_bytes(best['bytes'])} between {answer['workers']} workers",
        [],
        [("Bus bandwidth", "", html.draw("bus", 3.9, "Bus bandwidth over bucket size", plot))],
        [html.Section("Milliseconds", ["bucket", *names], body)],
    )
