"""``ronde check``: what hosts are and have, and the links between them, before a job."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ronde.cli.answer_screen import answer_table, tell
from ronde.cli.hosts import Gathered, HostOptions, answers_of, gathered, on_fleet
from ronde.cli.options import JsonFlag, app, setting, verb
from ronde.cli.script import check_folders
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError, WorldError

_SLOW_SHARE = 0.5  # of the median


@dataclass(frozen=True, kw_only=True)
class Options(HostOptions):
    """The options of ``ronde check``, as the user gave them."""

    output: Path | None = setting(
        None,
        "--output -o",
        "Also time every collective between all slots, and write a cluster file for "
        "ronde plan --cluster.",
        "FILE",
    )
    as_json: JsonFlag = False
    spark: str | None = None


@verb(app, "check")
def _check(options: Options) -> None:
    """Before a job: what hosts have, what differs, and the links between them, in seconds.

    Examples:

    ```sh
    ronde check --hosts gpu1:8,gpu2:8          over ssh
    ronde check --hostfile hosts --json        as JSON
    ronde check --hosts a:8,b:8 --output c.yaml      and a cluster file for ronde plan
    salloc -N 4 ronde check --slurm            all nodes of an allocation
    ```
    """
    from ronde.launch import Fleet, notes

    output = options.output
    check_folders(output=output)
    places = options.places()
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
            launch = on_fleet(fleet, [1] * len(names))
            pairs = _measured(Gathered(len(names), "", [], [], launch), command, "pairs")
    if output is not None:
        _write_cluster(options, output)
    said += slow_links(names, pairs)
    if options.as_json:
        links = [{**p, "a": names[p["a"]], "b": names[p["b"]]} for p in pairs]
        print(json.dumps({"hosts": facts, "links": links, "notes": said}, indent=2))
        return
    _show(names, facts, pairs, said)
    if output is not None:
        typer.echo(f"written to {output}   next: ronde plan --cluster {output} SCRIPT")


def _write_cluster(options: Options, output: Path) -> None:
    """Time the collectives between all slots, and write what a plan needs of them."""
    from ronde.predict import Cluster

    command = ["-m", "ronde.measure.bench_links", "--quick", "--tell"]
    with gathered(options.places(), None, command, "auto", None, lambda _: None) as group:
        Cluster.from_dict(_measured(group, command, "cluster")).save(output)


def _measured(group: Gathered, command: list[str], key: str) -> Any:
    """The answer of a measurement on workers; raises :class:`WorldError`."""
    try:
        return answers_of(group, command, key)[-1]
    except RondeError as error:
        raise WorldError(f"the links could not be measured: {error}") from None


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
    slow = [p for p in pairs if p["bandwidth"] < _SLOW_SHARE * usual]
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
        tell((f"note: {line}", "yellow"))
    if not said:
        console.print("the hosts are alike, and nothing stands in the way")
