"""This process's place among the workers, and the device it trains on."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ronde.world.errors import WorldError
from ronde.world.launchers import Identity, _optional, identify

if TYPE_CHECKING:
    import torch

__all__ = ["World", "ranks_text", "world"]


@dataclass(frozen=True)
class World:
    """This process's place among the workers.

    Attributes:
        rank: place among all workers, 0 … size − 1.
        size: how many workers there are (the *world size*).
        local_rank: place among the workers of this node.
        local_size: workers on this node, as far as the launcher tells.
        node: place of this node among the nodes.
        device: what this worker trains on, ``cpu`` or ``cuda:K``.
        launcher: who started it: ``python``, ``torchrun``, ``srun``, ``mpirun``, ``sagemaker``,
            ``kubernetes``, ``environment`` (variables set by hand) or ``process group`` (made by
            the script itself).
        host: name of this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    device: torch.device
    launcher: str
    host: str

    @property
    def is_main(self) -> bool:
        """True on rank 0 only."""
        return self.rank == 0


def ranks_text(ranks: list[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def _device(identity: Identity) -> torch.device:
    import torch

    if os.environ.get("RONDE_DEVICE") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    local = identity.local_rank
    if local is None:
        if count > 1 and identity.size > 1:
            raise WorldError(
                f"{identity.launcher} does not say this worker's local rank and {count} "
                "devices are visible: set LOCAL_RANK, "
                "or let each worker see one device (CUDA_VISIBLE_DEVICES)."
            )
        local = 0
    if local >= count:
        if count == 1:
            local = 0  # the launcher shows each worker its own single device
        else:
            raise WorldError(
                f"More workers than devices: local rank {local} has no device of its own, "
                f"{count} visible. "
                f"Start at most {count} workers on this node, or set RONDE_DEVICE=cpu."
            )
    return torch.device("cuda", local)


def _identity() -> Identity:
    """Read the environment; without launcher variables, the process group the script made."""
    identity = identify(os.environ)
    distributed = sys.modules.get("torch.distributed")
    if (
        identity.launcher == "python"
        and distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        rank, size = distributed.get_rank(), distributed.get_world_size()
        return Identity("process group", rank, size, _optional(os.environ, "LOCAL_RANK"))
    return identity


def world() -> World:
    """Return this process's place, as its launcher set it; connects nothing.

    Raises:
        WorldError: the variables of the launcher are partial or contradict each other.

    Example:
        >>> import ronde
        >>> me = ronde.world()
        >>> if me.is_main:
        ...     print(f"{me.size} worker(s), this one on {me.device}")
        1 worker(s), this one on cpu
    """
    identity = _identity()
    return World(
        identity.rank,
        identity.size,
        identity.local_rank or 0,
        identity.local_size or 1,
        identity.node,
        _device(identity),
        identity.launcher,
        socket.gethostname(),
    )
