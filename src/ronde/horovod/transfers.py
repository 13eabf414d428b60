"""The exchanges themselves, on ``torch.distributed``: what a rank does once an order has come.

gloo has no 16-bit integers and no bfloat16 sums, and rejects uneven sizes. Data that only moves
travels as bytes; sums of those types travel in the next wider one.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Reduction",
    "Team",
    "allgather_tensors",
    "allreduce_tensors",
    "alltoall_tensor",
    "broadcast_tensors",
    "contribute_zeros",
    "dtype_name",
    "reducescatter_tensors",
    "reduction_of",
    "rows_of",
    "warn_script",
]


class Reduction(IntEnum):
    """How tensors of several ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def reduction_of(op: Any) -> Reduction:
    """Read an ``op`` of a script's; None is ``hvd.Average``.

    Raises:
        ValueError: it is none of Horovod's.
        NotImplementedError: it is ``hvd.Adasum``.
    """
    try:
        reduction = Reduction.Average if op is None else Reduction(op)
    except ValueError:
        raise ValueError(f"op={op!r}: expected hvd.Average, Sum, Min, Max or Product.") from None
    if reduction == Reduction.Adasum:
        raise NotImplementedError("op=hvd.Adasum is not here: use hvd.Average.")
    return reduction


def warn_script(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the script that called, behind the frames of Ronde and torch."""
    level, frame = 1, sys._getframe()
    while (back := frame.f_back) is not None and _is_inside(frame):
        level, frame = level + 1, back
    warnings.warn(text, category, level)


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("ronde", "torch")


_OPS = {
    Reduction.Average: dist.ReduceOp.SUM,
    Reduction.Sum: dist.ReduceOp.SUM,
    Reduction.Min: dist.ReduceOp.MIN,
    Reduction.Max: dist.ReduceOp.MAX,
    Reduction.Product: dist.ReduceOp.PRODUCT,
}
_WIRE = {torch.bfloat16: torch.float32, torch.int16: torch.int32}  # gloo adds neither
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Team:
    """The ranks of a process set, and the process group that they exchange over."""

    ranks: tuple[int, ...]
    place: int
    group: Any

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def rows_of(rows: int, size: int) -> list[int]:
    """How many rows each rank gets of a scattered tensor: the first ranks one more.

    Example:
        >>> rows_of(5, 3)
        [2, 2, 1]
    """
    return [rows // size + (place < rows % size) for place in range(size)]


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale integers in float64 and truncate; 16-bit numbers in float32."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in _HALF:
        return (tensor.float() * factor).to(tensor.dtype)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return (tensor.double() * factor).to(tensor.dtype)
    return tensor * factor


def _averaged(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        if tensor.dtype in _HALF:
            return (tensor.float() / size).to(tensor.dtype)
        return tensor / size
    return torch.div(tensor, size, rounding_mode="trunc")  # as C++ divides, and so Horovod


def allreduce_tensors(
    team: Team,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    op: Reduction,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Reduce tensors over a team into ``outputs``, which may be the tensors themselves."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        kinds[tensor.dtype, tensor.device].append(i)
    for (dtype, device), places in kinds.items():
        # NCCL adds bfloat16, and has no int16 either.
        wire = _WIRE.get(dtype, dtype) if device.type == "cpu" or dtype == torch.int16 else dtype
        plain = prescale == postscale == 1.0 and wire == dtype
        if plain and len(places) == 1:  # a bucket of the optimizer: no copy
            source, out = tensors[places[0]], outputs[places[0]]
            if out.is_contiguous():
                if out is not source:
                    out.copy_(source)
                _reduce(team, out, op)
                if op == Reduction.Average and out.is_floating_point() and dtype not in _HALF:
                    out.div_(team.size)
                elif op == Reduction.Average:
                    out.copy_(_averaged(out, team.size))
                continue
        pieces = [_scaled(tensors[i], prescale).reshape(-1) for i in places]
        flat = torch.cat(pieces).to(wire)
        sizes = [len(piece) for piece in pieces]
        _reduce(team, flat, op)
        if op == Reduction.Average:
            flat = _averaged(flat, team.size)
        for i, piece in zip(places, torch.split(flat, sizes), strict=True):
            # In the tensor's own type first: that is where a scaled value is rounded.
            outputs[i].copy_(_scaled(piece.to(dtype), postscale).view(outputs[i].shape))


def _reduce(team: Team, flat: torch.Tensor, op: Reduction) -> None:
    if team.size > 1 and flat.numel():
        dist.all_reduce(flat, _OPS[op], group=team.group)


def contribute_zeros(team: Team, meta: dict[str, Any], device: torch.device) -> None:
    """Take part in a reduction of the others after ``join``, with zeros."""
    where = device if meta["device"] != "cpu" else torch.device("cpu")
    zeros = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=where)
        for shape, dtype in zip(meta["shape"], meta["dtype"], strict=True)
    ]
    allreduce_tensors(
        team, zeros, zeros, Reduction[meta["op"]], meta["prescale"], meta["postscale"]
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    # one element may have a stride of 0, as the gradient of a sum: a view of bytes refuses it
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def allgather_tensors(
    team: Team, tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Join the tensors of all ranks along the first dimension, which may differ.

    Args:
        rows: first dimension of each tensor, by rank of the team.
    """
    results = []
    for i, tensor in enumerate(tensors):
        counts = [each[i] for each in rows]
        result = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        if team.size == 1:
            result.copy_(tensor)
        elif result.numel():
            width = _row_bytes(tensor)
            mine, out = _bytes(tensor.contiguous()), _bytes(result)
            longest = max(counts) * width  # gloo gathers equal sizes only
            if len(mine) < longest:
                mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])
            even = len(set(counts)) == 1
            parts = (
                list(torch.split(out, longest))
                if even
                else [mine.new_empty(longest) for _ in range(team.size)]
            )
            dist.all_gather(parts, mine, group=team.group)
            if not even:
                torch.cat([p[: n * width] for p, n in zip(parts, counts, strict=True)], out=out)
        results.append(result)
    return results


def broadcast_tensors(
    team: Team, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root: int
) -> None:
    """Copy the tensors of the global rank ``root`` into every rank's ``outputs``."""
    if team.ranks[team.place] == root:
        for tensor, out in zip(tensors, outputs, strict=True):
            if out is not tensor:
                out.copy_(tensor)
    if team.size == 1:
        return
    moved = [out.detach().contiguous() for out in outputs]
    # All at once: hundreds of small parameters would wait for the root one after the other.
    works = [
        dist.broadcast(_bytes(each), root, group=team.group, async_op=True)
        for each in moved
        if each.numel()
    ]
    for work in works:
        work.wait()
    for each, out in zip(moved, outputs, strict=True):
        if each.data_ptr() != out.data_ptr():  # it was not contiguous
            out.copy_(each)


def alltoall_tensor(
    team: Team, tensor: torch.Tensor, splits: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Send rows to each rank and join the received ones. ``splits[i][j]`` rows go from i to j."""
    received = [each[team.place] for each in splits]
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    if team.size == 1:
        return result.copy_(tensor)
    width = _row_bytes(tensor)
    dist.all_to_all_single(
        _bytes(result),
        _bytes(tensor.contiguous()),
        [n * width for n in received],
        [n * width for n in splits[team.place]],
        group=team.group,
    )
    return result


def reducescatter_tensors(
    team: Team,
    tensors: Sequence[torch.Tensor],
    op: Reduction,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce tensors over a team and keep this rank's rows of each.

    Every rank sends each row once, as a ring would; the sum is the receiver's, in float32 for
    16-bit numbers.
    """
    results = []
    for tensor in tensors:
        rows = rows_of(len(tensor), team.size)
        scaled = _scaled(tensor, prescale)
        parts = alltoall_tensor(team, scaled, [rows] * team.size)
        parts = parts.view(team.size, rows[team.place], *tensor.shape[1:])
        wide = parts.float() if tensor.dtype in _HALF else parts
        total = wide.sum(0, dtype=wide.dtype)
        if op == Reduction.Average:
            total = _averaged(total, team.size)
        results.append(_scaled(total.to(tensor.dtype), postscale).contiguous())
    return results
