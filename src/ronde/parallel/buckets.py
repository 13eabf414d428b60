"""Exchange many tensors at once, packed into buckets of one type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ronde.world.tensors import local_part

__all__ = ["broadcast_packed", "buckets", "exchange_packed"]

_BUCKET_BYTES = 25 << 20  # as DDP's


def buckets(
    tensors: Sequence[torch.Tensor], limit_bytes: int = _BUCKET_BYTES
) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type, of at most ``limit_bytes`` or a single tensor; no empty ones.

    Example:
        >>> [len(b) for b in buckets([torch.zeros(2), torch.zeros(2), torch.zeros(2),
        ...     torch.zeros(1).double()], 16)]
        [2, 1, 1]
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        if t.numel():
            by_type.setdefault(t.dtype, []).append(t)
    for same in by_type.values():
        run: list[torch.Tensor] = []
        size = 0
        for t in same:
            if run and size + t.nbytes > limit_bytes:
                yield run
                run, size = [], 0
            run.append(t)
            size += t.nbytes
        yield run


@torch.no_grad()
def exchange_packed(
    tensors: Sequence[torch.Tensor],
    collective: Callable[[torch.Tensor], Any],
    device: torch.device | None = None,
    write: bool = True,
) -> None:
    """Run an in-place collective over tensors, bucket by bucket, on ``device`` or where they are.

    ``write``: copy the results back; False where this worker's own values are sent.
    """
    for run in buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in run]).to(device)
        collective(flat)
        if write:
            for t, part in zip(run, torch.split(flat, [t.numel() for t in run]), strict=True):
                t.copy_(part.view_as(t))
                del part  # it would keep the bucket alive while the next one is packed
        del flat


def broadcast_packed(
    tensors: Iterable[torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give every worker of a group (None: all) the values of its first one; meta tensors stay."""

    def send(flat: torch.Tensor) -> None:
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)

    exchange_packed([local_part(t) for t in tensors if not t.is_meta], send, device)
