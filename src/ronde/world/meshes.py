"""Process groups and meshes of some of the workers, each made once.

Every group has a thread of its own with gloo, which wakes up a hundred times a second for as long
as the process lives, also when what it was made for is gone. With some dozens of them, steps take
several hundredths longer.
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
    """Hold none of them any longer, so that gloo's threads end with their process group."""
    global _made
    _made = (None, {})


def group_of(purpose: str, ranks: Sequence[int] | None = None) -> Any:
    """The process group of some workers for one purpose. A collective over all workers, also those
    that are not in it.

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
    """The mesh of all workers with these dimensions: name -> size, the last one's neighbours side
    by side. A collective over all workers.
    """
    from torch.distributed.device_mesh import init_device_mesh

    made: DeviceMesh = _once(
        (device_type, tuple(shape.items())),
        lambda: init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape)),
    )
    return made
