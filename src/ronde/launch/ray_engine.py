"""Nodes of a Ray cluster: a placement group, and one task a node that runs Ronde's agent."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ronde.launch import tunnel
from ronde.launch.driver import Driven, serve
from ronde.world import WorldError, usable_cores

__all__ = ["Ray"]

_PER_NODE = 8  # workers without GPUs, where nobody says how many


class Ray(Driven):
    """Starts agents as tasks of a Ray cluster, in one placement group.

    Args:
        address: ``host:port`` of the head, ``ray://host:port``, ``local`` for a cluster of its own,
            or ``auto``: ``RAY_ADDRESS``, the cluster that this machine is in, or one of its own.
        workers: how many; None: one per GPU of the cluster, or per CPU (at most 8 a node).
        python: the interpreter on the nodes; None: the one that runs Ray there.
    """

    def __init__(self, address: str, workers: int | None, python: str | None = None) -> None:
        request = {"address": address, "workers": workers}
        super().__init__("Ray", __name__, "ray", "ray", request, python)


def _answers(address: str) -> None:
    """Refuse an address on which nothing listens: Ray itself tries for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except (OSError, ValueError) as error:
        raise WorldError(
            f"nothing answers at {address} ({getattr(error, 'strerror', None) or error}). Is the "
            "head running (ray start --head), and is this its address (ray status)?"
        ) from None


def _too_few(workers: int, kind: str, had: int, nodes: int) -> WorldError:
    return WorldError(
        f"{workers} workers need {workers} {kind}s; the cluster has {had} on {nodes} "
        f"node{'s' if nodes != 1 else ''}. Use --workers {had}, or add nodes (ray start "
        "--address=HEAD:6379)."
    )


class _Nodes:
    """The cluster, as the driver process sees it."""

    seconds = 60.0

    def __init__(self, request: dict[str, Any]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray, self._group, self._tasks = ray, None, []  # type: ignore[var-annotated]
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        address = request["address"]
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or "auto"
        self._cluster = address
        if address not in ("auto", "local"):
            _answers(address)
        try:
            if address != "local":
                ray.init(address=address, **quiet)
        except ConnectionError as error:
            if address != "auto":
                raise WorldError(
                    f"{str(error).splitlines()[0]} Is this machine a node of the cluster at "
                    f"{address}? If not, connect through ray://HOST:10001."
                ) from None
        except RuntimeError as error:  # another version of Ray or Python, say
            raise WorldError(str(error).strip()) from None
        if not ray.is_initialized():
            self._cluster = "local"
            most = _PER_NODE * usable_cores()
            if (request["workers"] or 0) > most:
                raise _too_few(request["workers"], "CPU", most, 1)
            cpus = max(usable_cores(), request["workers"] or 0)
            early = {"prestart_worker_first_driver": False}  # an agent needs one
            ray.init("local", num_cpus=cpus, include_dashboard=False, _system_config=early, **quiet)
        self.address = _own_address(address) if "://" in address else ray.util.get_node_ip_address()
        self._place(request["workers"])

    def _place(self, workers: int | None) -> None:
        """Reserve one bundle a node.

        Ray chooses the nodes: a group of one bundle a worker says which. It is replaced by one of
        one bundle a node, so that a node's agent has all of its GPUs.
        """
        nodes = {n["NodeID"]: n for n in self._ray.nodes() if n["Alive"]}
        total = self._ray.cluster_resources()
        on_cpu = os.environ.get("RONDE_DEVICE") == "cpu" or not total.get("GPU")
        kind = "CPU" if on_cpu else "GPU"
        had = {i: int(n["Resources"].get(kind, 0)) for i, n in nodes.items()}
        most = _PER_NODE if on_cpu else sum(had.values())
        workers = workers or sum(min(n, most) for n in had.values())
        if workers > sum(had.values()) or not workers:
            raise _too_few(workers, kind, sum(had.values()), len(nodes))
        one = {"CPU": 1.0} if on_cpu else {"CPU": 1.0, "GPU": 1.0}
        group = self._reserve([one] * workers, kind)
        placed = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        self._ray.util.remove_placement_group(group)
        counts = Counter(placed[i] for i in sorted(placed, key=int))
        self._counts = list(counts.values())
        chosen = [nodes[i] for i in counts]
        names = [n["NodeManagerHostname"] for n in chosen]
        addresses = [n["NodeManagerAddress"] for n in chosen]
        if len(set(addresses)) < len(addresses):
            raise WorldError(
                f"two nodes of Ray are on one machine ({Counter(addresses).most_common(1)[0][0]}). "
                "Ronde starts one agent a machine: start Ray once there, with all its CPUs."
            )
        self._names = names if len(set(names)) == len(names) else addresses
        self._bundles = [
            {k: v * count for k, v in one.items()} | {f"node:{address}": 0.001}
            for count, address in zip(self._counts, addresses, strict=True)
        ]
        self._group = self._reserve(self._bundles, kind)

    def _reserve(self, bundles: Sequence[dict[str, float]], kind: str) -> Any:
        group = self._ray.util.placement_group(list(bundles), strategy="PACK")
        # Ray itself waits for ever for what others hold
        if not group.wait(10.0):
            self._ray.util.remove_placement_group(group)
            free = int(self._ray.available_resources().get(kind, 0))
            wanted = int(sum(b[kind] for b in bundles))
            raise WorldError(
                f"{wanted} {kind}s were asked, and {free} are free: other jobs of the cluster hold "
                f"the rest. Wait for them, or use --workers {max(1, free)}."
            )
        return group

    def start(self, port: int, token: str) -> int:
        """One task a node, with all that its bundle holds."""
        from ray import cloudpickle
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cloudpickle.register_pickle_by_value(tunnel)  # nodes may have another Ronde, or none
        for place, bundle in enumerate(self._bundles):
            task = self._ray.remote(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, place),
            )(tunnel.run_agent)
            self._tasks.append(task.remote(self.address, port, token, {"place": place}))
        return len(self._tasks)

    def hosts(self, hellos: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
        """A host for each place."""
        return [(n, c, i) for i, (n, c) in enumerate(zip(self._names, self._counts, strict=True))]

    def environment(self, place: int) -> dict[str, str]:
        """Ray has set all that there is to say."""
        return {}

    def lost(self, place: int) -> str:
        """What Ray says about a task that has ended."""
        done, _ = self._ray.wait([self._tasks[place]], timeout=0)
        if not done:
            return ""
        try:
            status = self._ray.get(done[0])
        except Exception as error:  # the task's own, or Ray's: its node is lost, say
            cause = getattr(error, "cause", None) or error
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            return f"Ray ended it: {type(cause).__name__}: {lines[0] if lines else ''}"
        return f"its agent ended with status {status}" if status > 127 else ""  # or it says why

    def close(self) -> None:
        """Let the tasks end, then give the group back."""
        with contextlib.suppress(Exception):
            self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=3.0)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def _own_address(address: str) -> str:
    """The address of this machine that leads to another one."""
    host, _, port = address.partition("://")[2].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def main() -> None:
    """Run the driver process."""
    serve(_Nodes)
