"""Tasks of a TensorFlow cluster: ``TF_CONFIG`` for each worker, with ports that all nodes know."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from ronde.launch.job import Job, Nodes
from ronde.world import ArgumentError, WorldError, threads_per_worker
from ronde.world.network import own_address

__all__ = ["TensorFlowCluster", "parameter_servers", "roles"]

_ENDED = "ronde/tensorflow/ended"  # a key of the store


def parameter_servers(asked: str, total: int | None = None) -> int:
    """How many parameter servers ``--tensorflow`` asks for: ``auto`` none, ``ps=2`` two.

    Args:
        total: workers in all, which the chief and the parameter servers are among.

    Raises:
        ArgumentError: it cannot be read, or leaves nobody to train.

    Example:
        >>> parameter_servers("ps=2", 4)
        2
    """
    key, _, number = asked.partition("=")
    if asked == "auto":
        return 0
    if key != "ps" or not number.isdecimal() or int(number) < 1:
        raise ArgumentError(f"--tensorflow {asked}: expected nothing, or ps=N above 0.")
    servers = int(number)
    if total is not None and total < servers + 2:
        raise ArgumentError(
            f"--tensorflow ps={servers} needs --workers {servers + 2} or more: a chief, {servers} "
            f"parameter server{'s' if servers > 1 else ''}, and what trains. There are {total}."
        )
    return servers


def roles(total: int, servers: int) -> list[tuple[str, int]]:
    """Type and index of each rank's task. With parameter servers, rank 0 is the chief, which leads
    the training, and the last ranks are the servers.

    Example:
        >>> roles(4, 1)
        [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
    """
    if not servers:
        return [("worker", rank) for rank in range(total)]
    trains = [("worker", index) for index in range(total - servers - 1)]
    return [("chief", 0), *trains, *(("ps", index) for index in range(servers))]


class TensorFlowCluster:
    """This node's part of a cluster, for one generation of workers.

    A port is held by a socket that does not listen until the generation ends: TensorFlow shares it
    (``TF_GRPC_REUSE_PORT``), other programs cannot take it.

    Args:
        job: what runs; ``tensorflow`` is the number of parameter servers.
        nodes: this node among all.
        store: where all nodes meet.
        check: raises what ends the wait for the other nodes.

    Raises:
        WorldError: another node has not come.
    """

    def __init__(self, job: Job, nodes: Nodes, store: Any, check: Callable[[], None]) -> None:
        self._first, self._store, self._asked = nodes.first_of(job), store, 0.0
        self._roles = roles(nodes.total_of(job), job.tensorflow or 0)
        self._own = self._roles[self._first :][: job.workers]
        address = nodes.address if nodes.rank == 0 else own_address(nodes.address)
        self._held = [_hold(address) for _ in self._own]
        places = [f"{address}:{s.getsockname()[1]}" for s in self._held]
        self._places = self._agree(nodes, places, check)
        self.ended = False
        """Whether the chief has ended well: the others, which serve it, end with it."""

    def _agree(self, nodes: Nodes, places: list[str], check: Callable[[], None]) -> list[str]:
        """The places of all tasks, in the order of the ranks."""
        self._store.set(f"ronde/tensorflow/{nodes.rank}", json.dumps(places))
        keys = [f"ronde/tensorflow/{rank}" for rank in range(nodes.count)]
        limit = time.monotonic() + nodes.patience
        while not self._store.check(keys):
            check()
            if time.monotonic() > limit:
                raise WorldError(f"not every host has come within {nodes.patience:.0f} s")
            time.sleep(0.05)
        return [place for key in keys for place in json.loads(self._store.get(key))]

    def environments(self, workers: int, gpus: int) -> list[dict[str, str]]:
        """Variables of this node's tasks.

        Args:
            workers: tasks of this node.
            gpus: of this node; they are divided among those that train.
        """
        cluster: dict[str, list[str]] = {}
        for (kind, _), place in zip(self._roles, self._places, strict=True):
            cluster.setdefault(kind, []).append(place)
        common = {
            "TF_GRPC_REUSE_PORT": "1",
            "TF_NUM_INTRAOP_THREADS": str(threads_per_worker(workers)),
        }
        if importlib.util.find_spec("tf_keras"):  # Keras 3 does not train on several processes
            common["TF_USE_LEGACY_KERAS"] = "1"
        common = {name: value for name, value in common.items() if not os.environ.get(name)}
        divided = iter(_divided(gpus, sum(kind == "worker" for kind, _ in self._own)))
        environments = []
        for kind, index in self._own:
            task = {"cluster": cluster, "task": {"type": kind, "index": index}}
            own = {**common, "TF_CONFIG": json.dumps(task)}
            if os.environ.get("RONDE_DEVICE") == "cpu" or (gpus and kind != "worker"):
                own["CUDA_VISIBLE_DEVICES"] = "-1"
            elif gpus:
                own["CUDA_VISIBLE_DEVICES"] = next(divided)
            environments.append(own)
        return environments

    def is_over(self, ranks: dict[int, int | None]) -> bool:
        """Whether the chief of parameter servers has ended well, here or on another node.

        Args:
            ranks: exit status of each rank of this node; None while it runs.
        """
        if self._roles[0][0] != "chief" or self.ended:
            return self.ended
        if 0 in ranks:
            self.ended = ranks[0] == 0
            if self.ended:
                self._store.set(_ENDED, "")
        # asked now and then: every look of every node would be a call to node 0
        elif time.monotonic() > self._asked + 0.5:
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # node 0 is lost: its launcher says so
                self.ended = bool(self._store.check([_ENDED]))
        return self.ended

    def close(self) -> None:
        """Give the ports back."""
        for held in self._held:
            held.close()


def _hold(address: str) -> socket.socket:
    """A free port, which TensorFlow may share."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held


def _divided(gpus: int, workers: int) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each worker; several share one where they are more."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(gpu) for gpu in range(gpus)]
    count, shares = len(names), []
    for k in range(workers):
        first = k * count // workers
        shares.append(",".join(names[first : max(first + 1, (k + 1) * count // workers)]))
    return shares
