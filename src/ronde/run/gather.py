"""``run.gather``: the samples of all workers, for a loss over the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ronde.plan import Plan
from ronde.world import ArgumentError, RondeError, World

__all__ = ["gather_batch"]

_MOST_DIMS = 8  # of a row: their sizes travel in a tensor of fixed length
_TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def gather_batch(
    tensor: torch.Tensor, samples: int, micro_batches: int, plan: Plan, me: World
) -> torch.Tensor:
    """See :meth:`ronde.Run.gather`. A collective.

    Args:
        samples: of this worker's share; 0 if the tensor is that of a stand-in.
        micro_batches: of the step.
    """
    if plan.pipeline > 1 or plan.tensor > 1:
        raise RondeError(
            f"run.gather() does not work under the plan {plan.spec!r}, which runs the loss before "
            "there is a run. Use plan='replicate' or 'shard'."
        )
    if micro_batches > 1:
        raise RondeError(
            f"run.gather() needs a worker's whole share at once, and this step has {micro_batches} "
            "micro-batches. Leave out micro_batch; recompute='full' saves memory without it."
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ArgumentError(f"run.gather() got {type(tensor).__name__}, expected a dense tensor.")
    rows = tensor.size(0) if tensor.dim() else -1
    if plan.replicas == 1:
        _check_rows(rows, samples, tensor, me.rank)
        return tensor
    from ronde.world.meshes import group_of

    group = group_of("gather")
    sizes = _agree(tensor, rows, samples, group, me)
    gathered: torch.Tensor = _Gather.apply(tensor if samples else tensor[:0], sizes, group)  # type: ignore[no-untyped-call]
    return gathered


def _check_rows(rows: int, samples: int, tensor: torch.Tensor, rank: int) -> None:
    if rows != max(samples, 1):
        raise ArgumentError(
            f"run.gather() on rank {rank} got a tensor of shape {tuple(tensor.shape)}, and this "
            f"worker's share has {max(samples, 1)} samples: expected one row for each, in their "
            "order. Gather several views of a sample one by one."
        )


def _agree(tensor: torch.Tensor, rows: int, samples: int, group: Any, me: World) -> tuple[int, ...]:
    """How many rows each worker gives. Raises on every rank if their tensors do not fit."""
    shape = list(tensor.shape[1:])
    kind = _TYPES.index(tensor.dtype) if tensor.dtype in _TYPES else -1
    padded = (shape + [0] * _MOST_DIMS)[:_MOST_DIMS]
    facts = [samples, rows, kind, int(tensor.requires_grad), len(shape), *padded]
    mine = torch.tensor(facts, device=me.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    table = [each.tolist() for each in everyone]
    if kind < 0 or len(shape) > _MOST_DIMS:
        raise ArgumentError(
            f"run.gather() got a tensor of {tensor.dtype} with {tensor.dim()} dimensions, "
            f"expected one of torch's number types and at most {_MOST_DIMS + 1} dimensions."
        )
    for rank, (n, given, *_) in enumerate(table):
        if given != max(n, 1):
            _check_rows(rows, samples, tensor, me.rank)
            raise ArgumentError(
                f"run.gather(): worker {rank} of {len(table)} gave {given} rows for its {n} "
                "samples, expected one row for each sample."
            )
    for rank, (_, _, *other) in enumerate(table):
        if other != facts[2:]:
            raise ArgumentError(
                f"run.gather(): the workers' tensors differ. Worker {rank} of {len(table)} has "
                f"{_describe(other)}, rank {me.rank} {_describe(facts[2:])} for a sample: expected "
                "the same shape, type, and need of a gradient on all."
            )
    return tuple(n for n, *_ in table)


def _describe(facts: list[int]) -> str:
    kind, grad, dims, *shape = facts
    name = str(_TYPES[kind]) if kind >= 0 else "an unknown type"
    return f"{shape[:dims]} of {name}{' with' if grad else ' without'} a gradient"


class _Gather(torch.autograd.Function):
    """All workers' rows. The gradient is the sum over workers of theirs, this worker's rows of it:
    each worker's loss counts by its share of the samples, and together they are the whole.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: tuple[int, ...], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        ctx.start = sum(sizes[: dist.get_rank(group)])
        longest = max(sizes)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        # as bytes: exact, and for any type
        mine = padded.reshape(-1).view(torch.uint8)
        everyone = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(everyone, mine, group=group)
        whole = [
            each.view(rows.dtype).view(padded.shape)[:n]
            for each, n in zip(everyone, sizes, strict=True)
        ]
        return torch.cat(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide).contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        mine = total[ctx.start : ctx.start + ctx.sizes[dist.get_rank(ctx.group)]]
        return mine.to(gradient.dtype), None, None
