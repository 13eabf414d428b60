"""``init`` and ``shutdown``, who this rank is, process sets, and what was built."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ronde.exchange import Members
from ronde.horovod.bridge import Bridge, HorovodInternalError
from ronde.horovod.chrome_trace import ChromeTrace
from ronde.horovod.coordinator import Coordinator
from ronde.horovod.transfers import Team
from ronde.world import World, identify, world
from ronde.world.connect import connect
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.network import own_address

__all__ = [
    "ProcessSet",
    "add_process_set",
    "bridge",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "team_of",
]


@dataclass(frozen=True)
class _Here:
    """What ``init`` found."""

    bridge: Bridge
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_here: _Here | None = None


def bridge() -> Bridge:
    """Return this rank's end of the bridge.

    Raises:
        ValueError: ``init`` was not called.
    """
    return _initialized().bridge


def _initialized() -> _Here:
    if _here is None:
        raise ValueError("Horovod has not been initialized: call hvd.init() first.")
    return _here


# ---------------------------------------------------------------------- process sets


class ProcessSet:
    """Ranks that run operations among themselves.

    Args:
        ranks: the global ranks in it.

    Raises:
        ValueError: something other than ranks was given.

    Example:
        >>> even = hvd.add_process_set([0, 2])  # doctest: +SKIP
        >>> hvd.allreduce(x, process_set=even)  # doctest: +SKIP
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        try:
            self.ranks = sorted(ranks)
        except TypeError:
            self.ranks = None
        if self.ranks is None or any(type(r) is not int for r in self.ranks):
            raise ValueError(
                f"ProcessSet({ranks!r}): expected a list of ranks. Communicators of mpi4py cannot "
                "be used: there is no MPI here."
            )

    def size(self) -> int | None:
        """How many ranks it has; None before it is added."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it; None before it is added, or outside of it."""
        if self.process_set_id is None or self.ranks is None or rank() not in self.ranks:
            return None
        return self.ranks.index(rank())

    def included(self) -> bool | None:
        """Whether this process is in it."""
        return None if self.ranks is None else rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def team_of(process_set: ProcessSet) -> Team:
    """Return the ranks of a process set, and its process group.

    Raises:
        ValueError: it was not added, or this rank is not in it.
    """
    here = bridge()
    if process_set.process_set_id not in here.teams:
        raise ValueError(f"{process_set} is not known here: call hvd.add_process_set first.")
    team = here.teams[process_set.process_set_id]
    if here.rank not in team.ranks:
        raise ValueError(
            f"rank {here.rank} is not in {process_set}: call the operation on its ranks only."
        )
    return team


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. A collective over all ranks.

    Raises:
        ValueError: its ranks exist in another set, or are not ranks of this world.
        HorovodInternalError: ranks add different sets.
    """
    here = bridge()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = tuple(made.ranks or ())
    if any(not 0 <= r < here.size for r in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"{made}: expected different ranks from 0 to {here.size - 1}.")
    if any(ranks == team.ranks for team in here.teams.values()):
        raise ValueError(f"{made}: a process set with these ranks exists already.")

    def run(order: dict[str, Any]) -> int:
        number = int(order["id"])
        group = here.group(ranks) if len(ranks) > 1 else None
        place = ranks.index(here.rank) if here.rank in ranks else -1
        here.teams[number] = Team(ranks, place, group)
        return number

    name = here.name(0, "add")
    made.process_set_id = here.wait(here.submit((0, "add", name), {"ranks": list(ranks)}, run))
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. A collective over all ranks.

    Returns:
        bool: False if it is the global one, or was never added.
    """
    here = bridge()
    number = process_set.process_set_id
    if not number or number not in here.teams:
        return False
    process_set.process_set_id = None
    name = here.name(0, "remove")
    here.wait(here.submit((0, "remove", name), {"id": number}, lambda _: None))
    del here.teams[number]
    return True


# ---------------------------------------------------------------------- init and shutdown


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Connect the ranks that the launcher started. A second call does nothing.

    Args:
        comm: None, or the list of all ranks. A part of them, or a communicator of mpi4py, is
            refused.
        process_sets: a list of :class:`ProcessSet` to add, or ``"dynamic"``.

    Raises:
        ValueError: ``comm`` names a part of the ranks.
        WorldError: the ranks cannot meet.
    """
    global _here
    if _here is not None:
        return
    me = world()
    if comm is not None and comm != 0 and list(comm) not in ([], list(range(me.size))):
        raise ValueError(
            f"hvd.init(comm={comm!r}): only all {me.size} ranks can be initialized. Start as many "
            "as take part, and use process sets for parts of them."
        )
    me = connect()
    members = Members.of(me)
    generation = 1 + max(gather_json(me, Bridge.poisoned))
    trace = ChromeTrace()
    path = os.environ.get("HOROVOD_TIMELINE", "")
    # DYNAMIC: start_timeline begins it. Else before any rank can announce something.
    if me.is_main and path not in ("", "DYNAMIC"):
        trace.start(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))
    connection = _connect(me, members, trace)
    here = Bridge(me.rank, me.size, me.device, connection, trace, generation)
    _here = _placed(here, members)
    global_process_set.ranks = list(range(me.size))
    for each in process_sets if isinstance(process_sets, list | tuple) else ():
        add_process_set(each)


def _placed(here: Bridge, members: Members) -> _Here:
    """Ranks within nodes, and nodes."""
    node = members.nodes[here.rank]
    local = members.on_node(node).index(here.rank)
    sizes = Counter(members.nodes)
    nodes = [n for n, size in sizes.items() if size > local]
    return _Here(
        here,
        local,
        sizes[node],
        nodes.index(node),
        len(nodes),
        len(set(sizes.values())) == 1,
    )


def _connect(me: World, members: Members, trace: ChromeTrace) -> socket.socket | None:
    """Start the coordinator on rank 0, and connect to it."""
    if me.size == 1:
        return None
    meeting: Any = None
    if me.is_main:
        one_machine = len(set(members.nodes)) == 1
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        toward = identify(os.environ).address or socket.gethostname()
        # not seen from outside where nobody has to come from there
        address = "127.0.0.1" if one_machine else own_address(toward, name)
        token = secrets.token_hex(16)
        coordinator = Coordinator(me.size, token, address, *_stall_limits(), trace)
        coordinator.start()
        meeting = [address, coordinator.port, token]
    address, port, token = broadcast_json(me, meeting)
    try:
        connection = socket.create_connection((address, port), timeout=60.0)
    except OSError as error:
        raise HorovodInternalError(
            f"rank {me.rank} cannot reach rank 0 at {address}, port {port}: {error}. Choose the "
            "network with GLOO_SOCKET_IFNAME, and allow connections among the hosts."
        ) from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # no waiting for more
    connection.sendall(json.dumps({"rank": me.rank, "token": token}).encode() + b"\n")
    return connection


def _stall_limits() -> tuple[float, float]:
    def seconds(name: str, default: float) -> float:
        text = os.environ.get(name, "")
        try:
            return float(text) if text else default
        except ValueError:
            raise ValueError(f"{name}={text!r} is not a number of seconds.") from None

    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0.0, 0.0
    return (
        seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 600.0),
    )


def shutdown() -> None:
    """Leave the other ranks. Operations that still need this rank fail on the others."""
    global _here
    if _here is not None:
        here, _here = _here, None
        here.bridge.close()
        here.bridge.trace.stop()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not."""
    return _here is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write rank 0's timeline, for ``chrome://tracing`` or Perfetto.

    Args:
        file_path: a file, replaced if it exists.
        mark_cycles: also mark each moment at which operations are taken up.
    """
    if rank() == 0:
        bridge().trace.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline's file."""
    bridge().trace.stop()


# ---------------------------------------------------------------------- who and what


def rank() -> int:
    """This rank, 0 to ``size() - 1``."""
    return bridge().rank


def size() -> int:
    """How many ranks there are."""
    return bridge().size


def local_rank() -> int:
    """This rank's place on its machine."""
    return _initialized().local_rank


def local_size() -> int:
    """How many ranks are on this machine."""
    return _initialized().local_size


def cross_rank() -> int:
    """This machine's place among the machines that have a rank of this local rank."""
    return _initialized().cross_rank


def cross_size() -> int:
    """How many machines have a rank of this local rank."""
    return _initialized().cross_size


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks."""
    return _initialized().homogeneous


def gloo_built() -> bool:
    """Whether this PyTorch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether gloo is in use, which it is wherever it was built."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as one number (21805 for 2.18.5), 0 without NCCL or a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version[0] * 10000 + version[1] * 100 + version[2]


def cuda_built() -> bool:
    """Whether this PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this PyTorch was built for ROCm."""
    return torch.version.hip is not None


def _absent() -> bool:
    """False: the bridge has no MPI, oneCCL or DDL."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _absent
