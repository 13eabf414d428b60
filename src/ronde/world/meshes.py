"""Process groups and meshes over subsets of workers, each created once.

Every gloo group keeps a thread that wakes a hundred times a second until the process ends. A few
dozen groups slow steps by several percent, so groups are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["forget", "group_of", "mesh_of"]

_made: tuple[Any, dict[Any, Any]] = (None, {})  # of the process group that there is now


def _once(key: Any, make: Callable[[], Any]) -> Any:
    global _made
    if _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    kept = _made[1]
    if key not in kept:
        kept[key] = make()
    return kept[key]


def forget() -> None:
    """Drop all groups, so that gloo's threads end with their process group."""
    global _made
    _made = (None, {})


def group_of(purpose: str, ranks: Sequence[int] | None = None) -> Any:
    """Return the process group of some workers for one purpose. A collective over all workers.

    Args:
        purpose: groups of other purposes are others, so that their exchanges never queue among each
            other.
        ranks: who is in it; None for all.
    """
    return _once(
        (purpose, None if ranks is None else tuple(ranks)),
        lambda: dist.new_group(None if ranks is None else list(ranks)),
    )


def mesh_of(device_type: str, shape: dict[str, int]) -> DeviceMesh:
    """Return the mesh of all workers with these dimensions (name -> size). A collective over all
    workers.

    Neighbors along the last dimension have consecutive ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    made: DeviceMesh = _once(
        (device_type, tuple(shape.items())),
        lambda: init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape)),
    )
    return made
