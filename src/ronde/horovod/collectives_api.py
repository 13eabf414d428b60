"""Horovod's operations on tensors: blocking, asynchronous, in place, grouped, differentiable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ronde.horovod.bridge import Handle
from ronde.horovod.compression import Compression, Compressor
from ronde.horovod.lifecycle import ProcessSet, bridge, global_process_set, team_of
from ronde.horovod.transfers import (
    Reduction,
    allgather_tensors,
    allreduce_tensors,
    alltoall_tensor,
    broadcast_tensors,
    dtype_name,
    reducescatter_tensors,
)

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_broadcast_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
    "wait_for_all",
]

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]

_NO_SUM = (torch.bool,)


def _start(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    facts: dict[str, Any],
    run: Callable[[dict[str, Any]], Any],
) -> Handle:
    """Announce an operation on tensors; ``facts`` are what ranks must agree on besides shapes."""
    here, number = bridge(), process_set.process_set_id
    assert number is not None
    meta = {
        "device": tensors[0].device.type if tensors else "cpu",
        "dtype": [dtype_name(t) for t in tensors],
        "shape": [list(t.shape) for t in tensors],
        **facts,
    }
    return here.submit((number, kind, name or here.name(number, kind)), meta, run, tensors)


def _plain(kind: str, tensors: Tensors) -> list[Tensor]:
    """The tensors without their history."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"hvd.{kind}: expected a tensor, not a {type(tensor).__name__}.")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"hvd.{kind}: a tensor of layout {tensor.layout} cannot be sent. Use "
                "hvd.sparse_allreduce_async, or tensor.to_dense()."
            )
    return [t.detach() for t in tensors]


def _reduction(op: Any, average: Any = None, name: str = "op") -> Reduction:
    if average is not None:
        if op is not None:
            raise ValueError(f"give op or average, not both (op={op!r}, average={average!r}).")
        warnings.warn(
            "average is deprecated: use op=hvd.Average or op=hvd.Sum.", DeprecationWarning, 3
        )
        return Reduction.Average if average else Reduction.Sum
    try:
        return Reduction.Average if op is None else Reduction(op)
    except ValueError:
        raise ValueError(
            f"{name}={op!r}: expected hvd.Average, Sum, Adasum, Min, Max or Product."
        ) from None


def _check_sums(kind: str, tensors: Tensors, op: Reduction, process_set: ProcessSet) -> None:
    for tensor in tensors:
        refused = tensor.dtype in _NO_SUM or (
            tensor.is_complex() and op not in (Reduction.Sum, Reduction.Average)
        )
        if refused:
            raise ValueError(
                f"hvd.{kind}: {op.name} over tensors of type {tensor.dtype} is not defined. "
                "Convert them first."
            )
    if op == Reduction.Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum needs all ranks: a process set cannot use it.")
        count = bridge().size
        if count & (count - 1):
            raise NotImplementedError(f"Adasum needs a power of two of ranks, not {count}.")
        if any(not t.is_floating_point() for t in tensors):
            raise ValueError("Adasum needs floating-point tensors.")


# ---------------------------------------------------------------------- allreduce


def _allreduce(
    tensors: Tensors,
    outputs: Tensors | None,
    single: bool,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    team = team_of(process_set)
    reduction = _reduction(op, average)
    tensors = _plain("allreduce", tensors)
    _check_sums("allreduce", tensors, reduction, process_set)
    targets = [torch.empty_like(t) for t in tensors] if outputs is None else list(outputs)
    written = [t.detach() for t in targets]
    scales = (float(prescale_factor), float(postscale_factor))

    def run(_: dict[str, Any]) -> Any:
        allreduce_tensors(team, tensors, written, reduction, *scales)
        return targets[0] if single else targets

    facts = {"op": reduction.name, "prescale": scales[0], "postscale": scales[1]}
    return _start("allreduce", tensors, name, process_set, facts, run)


def allreduce_async(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Begin :func:`allreduce`; ``synchronize`` returns the result. It takes no ``compression``."""
    return _allreduce([tensor], None, True, *args, **options)


def allreduce_async_(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Begin an :func:`allreduce` in place."""
    return _allreduce([tensor], [tensor], True, *args, **options)


def grouped_allreduce_async(tensors: Tensors, *args: Any, **options: Any) -> Handle:
    """Begin :func:`grouped_allreduce`."""
    return _allreduce(tensors, None, False, *args, **options)


def grouped_allreduce_async_(tensors: Tensors, *args: Any, **options: Any) -> Handle:
    """Begin a :func:`grouped_allreduce` in place."""
    return _allreduce(tensors, tensors, False, *args, **options)


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Like :func:`allreduce`, in place and without a gradient."""
    result: Tensor = synchronize(allreduce_async_(tensor, *args, **options))
    return result


def grouped_allreduce_(tensors: Tensors, *args: Any, **options: Any) -> list[Tensor]:
    """Like :func:`grouped_allreduce`, in place and without a gradient."""
    result: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, *args, **options))
    return result


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks; the gradient is reduced in the same way.

    Args:
        tensor: of the same shape and type on all ranks.
        average: deprecated, see ``op``.
        name: pairs the operation among ranks; numbered if None.
        compression: of what is sent.
        op: ``hvd.Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        Tensor: the reduced tensor, of the same shape and type.

    Raises:
        ValueError: an argument is wrong, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on shape, type or reduction.

    Example:
        >>> loss = hvd.allreduce(loss, name="loss")  # doctest: +SKIP
    """
    given = (average, name, compression, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], *given)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in one operation. Arguments as in :func:`allreduce`."""
    small = [compression.compress(t) for t in tensors]
    reduced: Tensors = _AllReduce.apply(  # type: ignore[no-untyped-call]
        (_reduction(op, average), prescale_factor, postscale_factor, process_set),
        name,
        *(t for t, _ in small),
    )
    return [compression.decompress(r, c) for r, (_, c) in zip(reduced, small, strict=True)]


def _refuse_gradient(op: Reduction) -> None:
    if op not in (Reduction.Sum, Reduction.Average):
        raise NotImplementedError(
            f"the gradient of a reduction with hvd.{op.name} is not defined. Reduce "
            "tensor.detach(), or use Sum or Average."
        )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Any, name: Any, *tensors: Any) -> Any:
        ctx.how = how
        return tuple(synchronize(_allreduce(tensors, None, False, None, name, *how)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _refuse_gradient(ctx.how[0])
        handle = _allreduce(gradients, None, False, None, None, *ctx.how)
        return None, None, *synchronize(handle)


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Begin to reduce a sparse tensor (COO): entries of all ranks are joined, equal indices add up.

    Args:
        tensor: of the same shape and type on all ranks, with any number of entries.
        name: as in :func:`allreduce`.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the ranks that take part.

    Returns:
        Callable: waits and returns the sparse result.
    """
    reduction = _reduction(op)
    team = team_of(process_set)
    if reduction not in (Reduction.Sum, Reduction.Average):
        raise NotImplementedError(
            f"a sparse allreduce has no {reduction.name}: use Sum or Average."
        )
    name = name or bridge().name(process_set.process_set_id or 0, "sparse_allreduce")
    indices = tensor._indices().t().contiguous()
    handles = (
        allgather_async(indices, f"{name}.indices", process_set),
        allgather_async(tensor._values(), f"{name}.values", process_set),
    )

    def finish() -> Tensor:
        places, values = (synchronize(handle) for handle in handles)
        if reduction == Reduction.Average:
            values = values / team.size
        return torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=False)

    return finish


# ---------------------------------------------------------------------- allgather


def _gather(
    tensors: Tensors,
    single: bool,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    team = team_of(process_set)
    tensors = _plain("allgather", tensors)
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("hvd.allgather joins along the first dimension: a scalar has none.")

    def run(order: dict[str, Any]) -> Any:
        results = allgather_tensors(team, tensors, order["each"])
        return results[0] if single else results

    rows = {"each": [len(t) for t in tensors]}
    return _start("allgather", tensors, name, process_set, rows, run)


def allgather_async(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Begin :func:`allgather`."""
    return _gather([tensor], True, *args, **options)


def grouped_allgather_async(tensors: Tensors, *args: Any, **options: Any) -> Handle:
    """Begin :func:`grouped_allgather`."""
    return _gather(tensors, False, *args, **options)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Join the tensors of all ranks along the first dimension, which may differ among ranks.

    Raises:
        ValueError: the tensor is a scalar, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on the other dimensions or the type.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors in one operation, as :func:`allgather` does."""
    return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        gathered = synchronize(_gather(tensors, False, name, process_set))
        ctx.process_set, ctx.rows = process_set, [len(t) for t in tensors]
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of, team = ctx.process_set, team_of(ctx.process_set)
        mine = torch.tensor([ctx.rows])
        rows = synchronize(_gather([mine], True, None, of))
        whole = synchronize(grouped_allreduce_async(gradients, process_set=of))
        begins = rows[: team.place].sum(0).tolist()
        parts = [g[b : b + n] for g, b, n in zip(whole, begins, ctx.rows, strict=True)]
        return None, None, *parts


# ---------------------------------------------------------------------- broadcast


def _spread(
    tensors: Tensors,
    outputs: Tensors | None,
    single: bool,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    names: list[str] | None = None,
) -> Handle:
    team = team_of(process_set)
    if root_rank not in team.ranks:
        raise ValueError(
            f"root_rank={root_rank!r}: expected one of the ranks {list(team.ranks)}. The root is a "
            "global rank, in a process set too."
        )
    tensors = _plain("broadcast", tensors)
    targets = [torch.empty_like(t) for t in tensors] if outputs is None else list(outputs)
    written = [t.detach() for t in targets]

    def run(_: dict[str, Any]) -> Any:
        broadcast_tensors(team, tensors, written, root_rank)
        return targets[0] if single else targets

    facts = {"root": root_rank} if names is None else {"names": names, "root": root_rank}
    return _start("broadcast", tensors, name, process_set, facts, run)


def broadcast_async(tensor: Tensor, root_rank: int, *args: Any, **options: Any) -> Handle:
    """Begin :func:`broadcast`."""
    return _spread([tensor], None, True, root_rank, *args, **options)


def broadcast_async_(tensor: Tensor, root_rank: int, *args: Any, **options: Any) -> Handle:
    """Begin a :func:`broadcast` in place."""
    return _spread([tensor], [tensor], True, root_rank, *args, **options)


def broadcast_(tensor: Tensor, root_rank: int, *args: Any, **options: Any) -> Tensor:
    """Like :func:`broadcast`, in place and without a gradient."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, *args, **options))
    return result


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of one rank on all of them.

    Args:
        tensor: of the same shape and type on all ranks.
        root_rank: whose; a global rank, in a process set too.
        name: as in :func:`allreduce`.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``root_rank`` is not in the process set, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on root, shape or type.
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def grouped_broadcast_(
    tensors: Tensors, root_rank: int, names: list[str], process_set: ProcessSet
) -> None:
    """Broadcast several tensors in place in one operation; ``names`` are for errors."""
    synchronize(_spread(tensors, tensors, False, root_rank, None, process_set, names))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        of = ctx.process_set
        reduced = synchronize(allreduce_async(gradient, op=Reduction.Average, process_set=of))
        if bridge().rank != ctx.root_rank:
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


# ---------------------------------------------------------------------- alltoall


def _cut(tensor: Tensor, splits: Any, size: int) -> list[int]:
    """How many rows go to each rank."""
    _plain("alltoall", [tensor])
    if tensor.dim() == 0:
        raise ValueError("hvd.alltoall cuts along the first dimension: a scalar has none.")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(
                f"hvd.alltoall without splits needs a first dimension that {size} ranks divide, "
                f"not {len(tensor)}. Pass splits."
            )
        return [len(tensor) // size] * size
    cuts = torch.as_tensor(splits)
    if cuts.dtype not in (torch.int32, torch.int64) or cuts.shape != (size,):
        raise ValueError(
            f"splits: expected {size} whole numbers (torch.int32), one a rank; got shape "
            f"{tuple(cuts.shape)} of type {cuts.dtype}."
        )
    counts: list[int] = cuts.tolist()
    if min(counts, default=0) < 0 or sum(counts) != len(tensor):
        raise ValueError(
            f"splits={counts}: expected counts that add up to the first dimension, {len(tensor)}."
        )
    return counts


def _exchange(
    tensor: Tensor, counts: list[int], name: str | None, process_set: ProcessSet, pair: bool
) -> Handle:
    team = team_of(process_set)
    tensor = tensor.detach()

    def run(order: dict[str, Any]) -> Any:
        result = alltoall_tensor(team, tensor, order["each"])
        received = [each[team.place] for each in order["each"]]
        return (result, torch.tensor(received, dtype=torch.int32)) if pair else result

    return _start("alltoall", [tensor], name, process_set, {"each": counts}, run)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`alltoall`."""
    counts = _cut(tensor, splits, team_of(process_set).size)
    return _exchange(tensor, counts, name, process_set, splits is not None)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a slice of the first dimension to each rank, and join the received ones.

    Args:
        tensor: to cut; ranks may differ in the first dimension.
        splits: how many rows each rank gets, in rank order; None for equal parts.
        name: as in :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        Tensor: the received rows; with ``splits`` also how many came from each rank.

    Raises:
        ValueError: ``splits`` does not fit, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on the other dimensions or the type.
    """
    counts = _cut(tensor, splits, team_of(process_set).size)
    result, received = _AllToAll.apply(tensor, counts, name, process_set)  # type: ignore[no-untyped-call]
    return result if splits is None else (result, received)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, counts: Any, name: Any, process_set: Any) -> Any:
        result, received = synchronize(_exchange(tensor, counts, name, process_set, True))
        ctx.process_set, ctx.received = process_set, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        handle = _exchange(gradient, ctx.received, None, ctx.process_set, False)
        return synchronize(handle), None, None, None


# ---------------------------------------------------------------------- reducescatter


def _reducescatter(
    tensors: Tensors,
    single: bool,
    name: str | None = None,
    op: Any = Reduction.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    team = team_of(process_set)
    reduction = _reduction(op)
    tensors = _plain("reducescatter", tensors)
    if reduction not in (Reduction.Sum, Reduction.Average):
        raise NotImplementedError(f"hvd.reducescatter has no {reduction.name}: use Sum or Average.")
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("hvd.reducescatter cuts along the first dimension: a scalar has none.")
    _check_sums("reducescatter", tensors, reduction, process_set)
    scales = (float(prescale_factor), float(postscale_factor))

    def run(_: dict[str, Any]) -> Any:
        results = reducescatter_tensors(team, tensors, reduction, *scales)
        return results[0] if single else results

    facts = {"op": reduction.name, "prescale": scales[0], "postscale": scales[1]}
    return _start("reducescatter", tensors, name, process_set, facts, run)


def reducescatter_async(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Begin :func:`reducescatter`. It takes no ``compression``."""
    return _reducescatter([tensor], True, *args, **options)


def grouped_reducescatter_async(tensors: Tensors, *args: Any, **options: Any) -> Handle:
    """Begin :func:`grouped_reducescatter`."""
    return _reducescatter(tensors, False, *args, **options)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Reduction.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks and keep this rank's rows of the first dimension.

    Rows that do not divide evenly go to the first ranks.

    Args:
        tensor: of the same shape and type on all ranks.
        name: as in :func:`allreduce`.
        compression: of what is sent.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Raises:
        ValueError: the tensor is a scalar, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on shape, type or reduction.
    """
    given = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], *given)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Reduction.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors in one operation, as :func:`reducescatter` does."""
    small = [compression.compress(t) for t in tensors]
    results = _ReduceScatter.apply(  # type: ignore[no-untyped-call]
        name, op, process_set, prescale_factor, postscale_factor, *(t for t, _ in small)
    )
    return [compression.decompress(r, c) for r, (_, c) in zip(results, small, strict=True)]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, of: Any, pre: Any, post: Any, *tensors: Any) -> Any:
        ctx.given = (_reduction(op), of, pre * post)
        return tuple(synchronize(_reducescatter(tensors, False, name, op, of, pre, post)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, of, factor = ctx.given
        if op == Reduction.Sum:
            factor = factor * team_of(of).size
        gathered = synchronize(_gather(gradients, False, None, of))
        return (None,) * 5 + tuple(g if factor == 1.0 else g * factor for g in gathered)


# ---------------------------------------------------------------------- the rest


def poll(handle: Any) -> bool:
    """Whether an operation has completed, so that ``synchronize`` returns at once."""
    return bool(handle.done.is_set())


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result.

    Raises:
        HorovodInternalError: it failed; the text names the operation and the ranks.
    """
    return handle() if callable(handle) else bridge().wait(handle)


def join(device: int = -1) -> int:
    """Say that this rank has no more data: it contributes zeros until all ranks have joined.

    Args:
        device: accepted for Horovod's sake; each rank has one device.

    Returns:
        int: the rank that joined last, the same on all ranks.

    Raises:
        HorovodInternalError: a rank has ended and cannot join.
    """
    return bridge().join()


def wait_for_all(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set call it (``hvd.barrier``)."""
    team_of(process_set)
    synchronize(_start("barrier", [], None, process_set, {}, lambda _: None))
