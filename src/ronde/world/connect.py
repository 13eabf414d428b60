"""Join the workers in one process group, over the address that the launcher named."""

from __future__ import annotations

import atexit
import datetime
import errno
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ronde.world.cores import schedule_as_batch, threads_per_worker
from ronde.world.errors import WorldError
from ronde.world.identity import World, _identity, world
from ronde.world.launchers import Identity

__all__ = ["connect"]


def _local_store(size: int) -> Store:
    """A store in a file, for ranks of one machine whose MPI launcher names no address.

    All ranks of a machine share a parent (mpirun or its proxy); its pid and start time name the
    file.
    """
    import psutil

    parent = psutil.Process(os.getppid())
    folder = Path(tempfile.gettempdir()) / f"ronde-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise WorldError(f"{folder} belongs to another user: remove it, or set TMPDIR.")
    return FileStore(str(folder / f"{parent.pid}-{parent.create_time():.2f}"), size)


def _together(identity: Identity) -> bool | None:
    """Whether all ranks are on this machine; None where the launcher does not say."""
    if identity.local_size is not None:
        return identity.local_size == identity.size
    # Kubeflow tells rank 0 that the meeting point is localhost, whatever pods there are.
    return False if os.environ.get("KUBERNETES_SERVICE_HOST") else None


def _store(me: World, timeout: datetime.timedelta) -> Store:
    identity = _identity()
    if identity.address is None or identity.port is None:
        if identity.launcher == "mpirun" and identity.local_size == identity.size:
            return _local_store(identity.size)
        raise WorldError(
            f"{identity.launcher} started {identity.size} workers but names no meeting point: "
            "pass MASTER_ADDR (a host that every "
            "worker reaches, where rank 0 runs) and MASTER_PORT (a free port there), with "
            "Open MPI as "
            "'-x MASTER_ADDR=… -x MASTER_PORT=…'."
        )
    from ronde.world.network import listen_on, meeting_address

    # Workers of an agent are clients of the agent's store; elsewhere rank 0 serves it.
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves, address, listening = me.rank == 0 and not theirs, identity.address, None
    if not theirs:
        interface = identity.interface or os.environ.get("GLOO_SOCKET_IFNAME")
        address = meeting_address(address, _together(identity), serves, interface)
    if serves:
        try:  # torch's own listens on every address
            listening = listen_on(address, identity.port).detach()
        except OSError as error:
            # torch shares what this process serves already, and refuses a port that is taken.
            if error.errno != errno.EADDRINUSE:
                raise WorldError(
                    f"Rank 0 cannot open the meeting point {address}:{identity.port}: "
                    f"{error.strerror}. Choose another MASTER_PORT, the same for every worker."
                ) from error
    try:
        store = TCPStore(
            address,
            identity.port,
            identity.size,
            serves,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise WorldError(
                f"Port {identity.port} on {identity.address} is taken by another program, so "
                "rank 0 cannot open the meeting point. "
                "Choose a free one: MASTER_PORT=<port>, the same for every worker (ronde "
                "run chooses one by itself)."
            ) from error
        raise WorldError(
            f"Rank {me.rank} cannot reach the meeting point {identity.address}:{identity.port} "
            f"of rank 0: {text.splitlines()[0]}. "
            "Is rank 0 running there, and is MASTER_ADDR a name that this host resolves?"
        ) from error
    # Restarted workers must not read addresses that dead workers left in the agent's store.
    generation = os.environ.get(
        "RONDE_GENERATION", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    return PrefixStore(f"ronde/{generation}", store)


def connect(timeout_seconds: float = 1800.0) -> World:
    """Create the default process group if there are several workers and none exists yet.

    Args:
        timeout_seconds: how long a collective may wait for the slowest rank before it fails.

    Returns:
        World: this process's place.

    Raises:
        WorldError: the meeting point is taken or cannot be reached.
    """
    me = world()
    if me.device.type == "cuda":
        torch.cuda.set_device(me.device)
    if me.size == 1:
        return me
    if "OMP_NUM_THREADS" not in os.environ:
        # srun and mpirun set nothing: every worker would use every core.
        torch.set_num_threads(threads_per_worker(me.local_size))
    if me.device.type == "cpu":
        schedule_as_batch()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (me.rank, me.size):
            raise WorldError(
                f"The process group that this script made says rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, "
                f"{me.launcher} says rank {me.rank} of {me.size}. Leave init_process_group "
                "to ronde, or make them agree."
            )
        return me
    interface = _identity().interface
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    elif (_together(_identity()) or _identity().address in ("127.0.0.1", "localhost")) and any(
        name == "lo" for _, name in socket.if_nameindex()
    ):
        # Otherwise gloo binds the address of the host name, which may be unreachable and is not
        # loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if me.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_store(me, timeout),
        rank=me.rank,
        world_size=me.size,
        timeout=timeout,
        device_id=me.device if me.device.type == "cuda" else None,
    )
    atexit.register(_leave)
    return me


def _leave() -> None:
    """Destroy the group before the interpreter ends, because gloo's threads must not outlive it.

    Skipped after a failure, when it could wait for ranks that are gone.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        from ronde.world.meshes import forget

        forget()
        dist.destroy_process_group()
        # A gloo thread that still releases the last exchange needs the interpreter; without it the
        # process aborts (torch 2.13). Workers of ronde run end in ronde.launch.worker instead.
        time.sleep(0.05)
