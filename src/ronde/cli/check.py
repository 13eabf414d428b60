"""``ronde check``: what hosts are and have, and the links between them, before a job."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.answer_screen import answer_table
from ronde.cli.bench import check_file
from ronde.cli.hosts import (
    EnvOption,
    HostfileOption,
    HostOptions,
    HostsOption,
    MpiOption,
    PythonOption,
    RayOption,
    SlurmOption,
    SshConfigOption,
)
from ronde.cli.options import JsonFlag, option
from ronde.watch import plain_console
from ronde.world import ArgumentError, WorldError

__all__ = ["register", "slow_links"]

_EXAMPLES = """
Examples:

```sh
ronde check --hosts gpu1:8,gpu2:8          over ssh
ronde check --hostfile hosts --json        as JSON
ronde check --hosts a:8,b:8 --output c.yaml      and a cluster file for ronde plan
salloc -N 4 ronde check --slurm            all nodes of an allocation
```
"""
_SLOW = 0.5  # of the median


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "check",
        help="Before a job: what hosts have, what differs, and the links between them, in seconds."
        "\n" + _EXAMPLES,
        no_args_is_help=True,
    )
    def check(
        hosts: HostsOption = None,
        hostfile: HostfileOption = None,
        slurm: SlurmOption = False,
        mpi: MpiOption = False,
        ray: RayOption = None,
        ssh_config: SshConfigOption = None,
        env: EnvOption = None,
        python: PythonOption = None,
        output: Annotated[
            Path | None,
            option(
                "--output -o",
                "Also time every collective between all slots, and write a cluster file for "
                "ronde plan --cluster.",
                "FILE",
            ),
        ] = None,
        as_json: JsonFlag = False,
    ) -> None:
        from ronde.launch import Fleet, notes

        if output is not None:
            check_file(output)
        asked = HostOptions(hosts, hostfile, slurm, mpi, ray, None, ssh_config, env, python)
        places = asked.places()
        if places is None:
            raise ArgumentError("name the hosts: --hosts a,b, --hostfile FILE, --slurm, or --ray.")
        names = [h.name for h in places.hosts]
        command = ["-m", "ronde.measure.pair_links"]
        pairs: list[dict[str, Any]] = []
        with Fleet(places.hosts, places.engine, places.python) as fleet:
            facts = fleet.ask(command, places.environment, None)
            said = notes(facts, {h.name: h.slots or f["devices"] for h, f in _each(places, facts)})
            # One process a host: pairs of hosts are timed, not pairs of devices.
            if len(names) > 1:
                _measure(
                    fleet, command, [1] * len(names), lambda m: pairs.extend(m.get("pairs", ()))
                )
        if output is not None:
            _write_cluster(asked.places(), output)
        said += slow_links(names, pairs)
        if as_json:
            links = [{**p, "a": names[p["a"]], "b": names[p["b"]]} for p in pairs]
            print(json.dumps({"hosts": facts, "links": links, "notes": said}, indent=2))
            return
        _show(names, facts, pairs, said)
        if output is not None:
            typer.echo(f"written to {output}   next: ronde plan --cluster {output} SCRIPT")


def _measure(
    fleet: Any, command: list[str], counts: list[int], message: Callable[[dict[str, Any]], None]
) -> None:
    """Run a measurement on hosts.

    Raises:
        WorldError: it failed.
    """
    from ronde.launch import Job, Output

    count = sum(counts)
    output = Output(count, None, lambda _: None, message)
    outcome = fleet.run(Job(command, count, None, {"RONDE_PROGRESS": "quiet"}), counts, output)
    output.close()
    if outcome.interrupted:
        raise typer.Exit(outcome.status)
    if outcome.status:
        raise WorldError(f"the links could not be measured: {outcome.error}")


def _write_cluster(places: Any, output: Path) -> None:
    """Time the collectives between all slots, and write what a plan needs of them."""
    from ronde.launch import Fleet, share
    from ronde.predict import Cluster

    command = ["-m", "ronde.measure.bench_links", "--quick", "--tell"]
    cluster: dict[str, Any] = {}
    with Fleet(places.hosts, places.engine, places.python) as fleet:
        facts = fleet.ask(command, places.environment, None)
        counts = share(places.hosts, facts, "auto")
        _measure(fleet, command, counts, lambda m: cluster.update(m.get("cluster", {})))
    Cluster.from_dict(cluster).save(output)


def _each(places: Any, facts: Any) -> list[tuple[Any, Any]]:
    return [(h, facts[h.name]) for h in places.hosts]


def slow_links(names: list[str], pairs: list[dict[str, Any]]) -> list[str]:
    """Sentences about links of less than half the median bandwidth; a host all of whose links are
    slow is named once.
    """
    backends = sorted({p.get("backend", "") for p in pairs})
    if len(backends) > 1:
        each = [[p for p in pairs if p["backend"] == backend] for backend in backends]
        return [line for several in each for line in slow_links(names, several)]
    if len(pairs) < 3:  # of two hosts, nobody can say which one is slow
        return []
    usual = statistics.median(p["bandwidth"] for p in pairs)
    slow = [p for p in pairs if p["bandwidth"] < _SLOW * usual]
    said = []
    for place, name in enumerate(names):
        own = [p for p in pairs if place in (p["a"], p["b"])]
        if own and all(p in slow for p in own):
            best = max(p["bandwidth"] for p in own)
            said.append(
                f"every link of {name} is slow: at most {best / 1e6:,.0f} MB/s, where "
                f"{usual / 1e6:,.0f} MB/s are usual here"
            )
            slow = [p for p in slow if p not in own]
    for p in slow:
        said.append(
            f"the link between {names[p['a']]} and {names[p['b']]} is slow: "
            f"{p['bandwidth'] / 1e6:,.0f} MB/s, where {usual / 1e6:,.0f} MB/s are usual here"
        )
    return said


def _show(names: list[str], facts: Any, pairs: list[dict[str, Any]], said: list[str]) -> None:
    from rich.text import Text

    console = plain_console()
    table = answer_table(
        *["host", "devices", ">cores", ">memory", ">disk", ">/dev/shm", ">torch", ">Python"]
    )
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"
    for name in names:
        fact = facts[name]
        gib = [f"{fact[k] / 2**30:.1f} GiB" for k in ("memory", "disk", "shared_memory")]
        kind = "GPUs" if fact["kind"] == "cuda" else "CPU"
        devices = f"{fact['devices']} {kind}" if kind == "GPUs" else kind
        versions = (fact["torch"], fact["python"])
        table.add_row(name, devices, str(fact["cores"]), *gib, *versions)
    console.print(table)
    if pairs:
        links = answer_table("between", "and", "over", ">latency", ">bandwidth")
        for p in pairs:
            links.add_row(
                names[p["a"]],
                names[p["b"]],
                p["backend"],
                f"{p['latency'] * 1e6:,.0f} µs",
                f"{p['bandwidth'] / 1e6:,.0f} MB/s",
            )
        console.print()
        console.print(links)
    for line in said:
        console.print(Text(f"note: {line}", style="yellow"), soft_wrap=True)
    if not said:
        console.print("the hosts are alike, and nothing stands in the way")
