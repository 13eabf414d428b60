"""``ronde plan``: split the data or the model?"""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ronde.cli.answer_screen import Doing, tell
from ronde.cli.bench import measure_links
from ronde.cli.options import app, parsed, setting, verb
from ronde.cli.script import StudyOptions, VerboseOption, check_folders, examine
from ronde.watch import plain_console
from ronde.world import ArgumentError, usable_cores
from ronde.world.units import parse_bytes, parse_rate


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of ``ronde plan``, as the user gave them."""

    verbose: VerboseOption = False
    devices: int | None = setting(
        None, "--devices -n", "Plan for N devices. Default: this machine's.", "N", min=1
    )
    cluster: Path | None = setting(
        None, "--cluster", "Plan for the cluster that 'ronde bench cluster' measured.", "FILE"
    )
    device: str | None = setting(
        None,
        "--device",
        "Plan for devices that are not here, such as H100: an estimate from data sheets.",
        "KIND",
    )
    network: str | None = setting(
        None,
        "--network",
        "With --device: speed of a node's link to the others, such as 100Gbit or 25GB/s. "
        "Default: as in the maker's reference system.",
        "SPEED",
    )
    per_node: int | None = setting(
        None,
        "--per-node",
        "With --device: devices of a node. Default: 8, 72 for GB200.",
        "N",
        min=1,
    )
    memory: str | None = setting(None, "--memory", "Memory of one device, such as 32GiB.", "SIZE")
    optimize: Literal["speed", "memory"] = setting(
        "speed", "--optimize", "The fastest step, or the least memory.", "speed|memory"
    )
    save: Path | None = setting(
        None, "--save", "Write the winner, for ronde run --plan FILE.", "FILE"
    )


@verb(app, "plan")
def _plan(options: Options) -> None:
    """Split the data or the model? Every plan predicted, ranked and explained.

    The script runs up to ronde.distribute on this machine. Its model is measured there, layer
    by layer, at its real shapes; for devices that are not here, its work is counted. Every way
    to split it over the devices is then predicted, and the best are shown, with what decided
    and when the answer would flip.

    Examples:

    ```sh
    ronde plan train.py                              as many devices as this machine has
    ronde plan --devices 8 --memory 32GiB train.py --lr 0.1
    ronde plan --device H100 --devices 64 train.py   devices that are not here: an estimate
    ronde plan --device H100 --devices 64 --network 100Gbit train.py
    ronde plan --cluster cluster.yaml train.py       a file from 'ronde bench cluster'
    ronde plan --optimize memory --save plan.yaml train.py; ronde run --plan plan.yaml train.py
    ronde plan --json plan.json -m my.train
    ```
    """
    command, device = options.command_for("plan"), options.device
    check_folders(json=options.json_file, save=options.save)
    size = None
    if options.memory is not None:
        size = parsed("--memory", options.memory, parse_bytes, "a size such as 32GiB or 512MiB")
    if device is not None and options.cluster is not None:
        raise ArgumentError(
            "--device and --cluster both name the devices to plan for: give one of them."
        )
    if device is None and (options.network is not None or options.per_node is not None):
        asked = "--network" if options.network is not None else "--per-node"
        raise ArgumentError(
            f"{asked} describes devices that are not here: add --device KIND. A cluster file "
            "has links and nodes of its own."
        )
    console = plain_console()
    # Measuring takes up to minutes: without a terminal, each phase is a line.
    with Doing(console, lines=True) as say:
        say(f"starting {command[0] if command[0] != '-m' else command[1]}")
        if device is not None:
            target, costs, like = _estimate(command, device, options, say)
        else:
            target = _target(options.cluster, options.devices)
            costs, like = _measure(command, target, target.devices, say)
            if options.cluster is None:  # last, so that a script that fails does so at once
                from ronde.measure import default_cluster

                def measured_here(count: int) -> Any:
                    return measure_links(count, ["--quick"])

                target = default_cluster(target.devices, measured_here, say)
        if size is not None:
            target = dataclasses.replace(target, memory_bytes=size)
        say("searching plans")
        from ronde.measure import answer

        explanation = answer(costs, target, target.devices, like, options.optimize, tell=say)
    from ronde.predict import render_answer

    best = explanation.result.best
    fits = best.verdict != "does not fit"

    def save() -> None:
        if options.save is not None and fits:
            from ronde.measure import with_predicted_cut

            with_predicted_cut(best).save(options.save)

    values = {**explanation.to_dict(), "costs": costs.to_dict(), "cluster": target.to_dict()}
    options.give(values, console, [render_answer(explanation, verbose=options.verbose)], save)
    if options.save is None:
        return
    if not fits:
        raise ArgumentError(f"--save {options.save}: nothing fits, so there is no plan to write.")
    tell(f"written: {options.save}; ronde run --workers {target.devices} --plan {options.save} …")


def _estimate(command: list[str], device: str, options: Options, say: Any) -> tuple[Any, Any, Any]:
    """Count the model's work here, and put it on devices known from their data sheet."""
    from ronde.predict import Cluster, cluster_of, device_named

    network = 0.0
    if options.network is not None:
        speed = "the speed of a node's link to the others, such as 100Gbit or 25GB/s"
        network = parsed("--network", options.network, parse_rate, speed)
    kind, per_node = device_named(device), options.per_node
    count = options.devices or per_node or kind.per_node
    each = min(count, per_node or kind.per_node)
    if count % each:
        raise ArgumentError(f"--devices {count} does not divide into nodes of {each} {kind.name}.")
    costs, like = _measure(command, Cluster(), count, say, counted=True)
    cluster = cluster_of(device, count // each, each, costs, network / each)
    return cluster, costs, like


def _target(file: Path | None, devices: int | None) -> Any:
    """The cluster to plan for: the file's, or this machine with unknown links."""
    from ronde.predict import Cluster

    if file is None:
        from ronde.launch import resolve_workers
        from ronde.measure import has_cuda

        return Cluster(
            name=socket.gethostname(),
            devices_per_node=devices or max(2, resolve_workers("auto")),
            device="cuda" if has_cuda() else "cpu",
        )
    cluster = Cluster.load(file)
    if devices is None or devices == cluster.devices:
        return cluster
    per_node = min(devices, cluster.devices_per_node)
    if devices % per_node:
        raise ArgumentError(
            f"--devices {devices} does not divide into the nodes of {cluster.devices_per_node} in "
            f"{file}."
        )
    return dataclasses.replace(cluster, nodes=devices // per_node, devices_per_node=per_node)


def _measure(
    command: list[str],
    target: Any,
    devices: int,
    say: Any,
    counted: bool = False,
) -> Any:
    """Measure the script's costs in other processes, for the batch that ``devices`` train; or only
    count its work.
    """
    from ronde.measure import load_costs, threads_on

    threads = threads_on(target)
    # A model is measured whole; its divisions are predicted.
    environment = {"RONDE_PLAN": "replicate"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    options = {"threads": threads, "devices": devices, "counted": counted}
    # CPUs of this machine measure together, as they will train.
    here = target.device == "cpu" and target.name == socket.gethostname() and target.nodes == 1
    here = here and not counted
    workers = max(1, min(target.devices_per_node, usable_cores())) if here else 1
    failed = "the script failed before its model was measured"
    return examine("plan", command, workers, options, say, failed, load_costs, environment)
