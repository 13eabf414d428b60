"""Horovod's operations on tensors: blocking, asynchronous, in place, grouped, differentiable.

Each operation is one function that begins it on a list of tensors; its other forms are made of that
one, at the end of this file.
"""

from __future__ import annotations

import inspect
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
    reduction_of,
    warn_script,
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


def _plain(
    kind: str, tensors: Tensors, rows: bool = False, op: Reduction | None = None
) -> list[Tensor]:
    """The tensors without their history; ``rows``: each needs a first dimension; ``op``: each
    needs a type that it is defined for.
    """
    linear = op in (Reduction.Sum, Reduction.Average)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"hvd.{kind}: expected a tensor, not a {type(tensor).__name__}.")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"hvd.{kind}: a tensor of layout {tensor.layout} cannot be sent. Use "
                "hvd.sparse_allreduce_async, or tensor.to_dense()."
            )
        if rows and tensor.dim() == 0:
            raise ValueError(f"hvd.{kind} goes along the first dimension: a scalar has none.")
        is_odd = tensor.dtype == torch.bool or (tensor.is_complex() and not linear)
        if op is not None and is_odd:
            raise ValueError(
                f"hvd.{kind}: {op.name} over tensors of type {tensor.dtype} is not defined. "
                "Convert them first."
            )
    return [t.detach() for t in tensors]


def _reduction(op: Any, average: Any) -> Reduction:
    """What ``op``, or the ``average`` of older scripts, asks for."""
    if average is None:
        return reduction_of(op)
    if op is not None:
        raise ValueError(f"give op or average, not both (op={op!r}, average={average!r}).")
    warn_script("average is deprecated: use op=hvd.Average or op=hvd.Sum.", DeprecationWarning)
    return Reduction.Average if average else Reduction.Sum


def _linear(kind: str, op: Any) -> Reduction:
    """A reduction of an operation that only adds."""
    reduction = reduction_of(op)
    if reduction not in (Reduction.Sum, Reduction.Average):
        raise NotImplementedError(f"hvd.{kind} has no {reduction.name}: use Sum or Average.")
    return reduction


# ---------------------------------------------------------------------- begin an operation


def _allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    outputs: Tensors | None = None,
) -> Handle:
    team = team_of(process_set)
    reduction = _reduction(op, average)
    tensors = _plain("allreduce", tensors, op=reduction)
    targets = [torch.empty_like(t) for t in tensors] if outputs is None else list(outputs)
    written = [t.detach() for t in targets]
    scales = (float(prescale_factor), float(postscale_factor))

    def run(_: dict[str, Any]) -> list[Tensor]:
        allreduce_tensors(team, tensors, written, reduction, *scales)
        return targets

    facts = {"op": reduction.name, "prescale": scales[0], "postscale": scales[1]}
    return _start("allreduce", tensors, name, process_set, facts, run)


def _allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    team = team_of(process_set)
    tensors = _plain("allgather", tensors, rows=True)

    def run(order: dict[str, Any]) -> list[Tensor]:
        return allgather_tensors(team, tensors, order["each"])

    rows = {"each": [len(t) for t in tensors]}
    return _start("allgather", tensors, name, process_set, rows, run)


def _broadcast(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    outputs: Tensors | None = None,
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

    def run(_: dict[str, Any]) -> list[Tensor]:
        broadcast_tensors(team, tensors, written, root_rank)
        return targets

    facts = {"root": root_rank} if names is None else {"names": names, "root": root_rank}
    return _start("broadcast", tensors, name, process_set, facts, run)


def _reducescatter(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Reduction.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    team = team_of(process_set)
    reduction = _linear("reducescatter", op)
    tensors = _plain("reducescatter", tensors, rows=True, op=reduction)
    scales = (float(prescale_factor), float(postscale_factor))

    def run(_: dict[str, Any]) -> list[Tensor]:
        return reducescatter_tensors(team, tensors, reduction, *scales)

    facts = {"op": reduction.name, "prescale": scales[0], "postscale": scales[1]}
    return _start("reducescatter", tensors, name, process_set, facts, run)


def _alltoall(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Handle:
    """Its result is the received rows, and how many came from each rank."""
    team = team_of(process_set)
    counts = _cut(tensor, splits, team.size)
    tensor = tensor.detach()

    def run(order: dict[str, Any]) -> tuple[Tensor, Tensor]:
        received = [each[team.place] for each in order["each"]]
        result = alltoall_tensor(team, tensor, order["each"])
        return result, torch.tensor(received, dtype=torch.int32)

    return _start("alltoall", [tensor], name, process_set, {"each": counts}, run)


def _cut(tensor: Tensor, splits: Any, size: int) -> list[int]:
    """How many rows go to each rank."""
    _plain("alltoall", [tensor], rows=True)
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


# ---------------------------------------------------------------------- with a gradient


class _Differentiable(torch.autograd.Function):
    """An operation on tensors, and the operation on gradients that belongs to it."""

    @staticmethod
    def forward(ctx: Any, begin: Any, back: Any, *tensors: Any) -> Any:
        ctx.back = back
        return tuple(synchronize(begin(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.back(gradients)


def _apply(
    begin: Callable[[Tensors], Handle],
    back: Callable[[Tensors], Tensors],
    tensors: Tensors,
    compression: type[Compressor] = Compression.none,
) -> list[Tensor]:
    small = [compression.compress(t) for t in tensors]
    results = _Differentiable.apply(begin, back, *(t for t, _ in small))  # type: ignore[no-untyped-call]
    return [compression.decompress(r, c) for r, (_, c) in zip(results, small, strict=True)]


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
    """Reduce tensors over all ranks; the gradient is reduced in the same way.

    Args:
        tensors: of the same shape and type on all ranks.
        average: deprecated, see ``op``.
        name: pairs the operation among ranks; numbered if None.
        compression: of what is sent.
        op: ``hvd.Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        list[Tensor]: the reduced tensors, of the same shapes and types.

    Raises:
        ValueError: an argument is wrong, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on shape, type or reduction.

    Example:
        >>> loss = hvd.allreduce(loss, name="loss")  # doctest: +SKIP
    """
    reduction = _reduction(op, average)

    def begin(tensors: Tensors, name: str | None = name) -> Handle:
        how = (reduction, prescale_factor, postscale_factor, process_set)
        return _allreduce(tensors, None, name, *how)

    def back(gradients: Tensors) -> Tensors:
        if reduction not in (Reduction.Sum, Reduction.Average):
            raise NotImplementedError(
                f"the gradient of a reduction with hvd.{reduction.name} is not defined. Reduce "
                "tensor.detach(), or use Sum or Average."
            )
        reduced: Tensors = synchronize(begin(gradients, None))
        return reduced

    return _apply(begin, back, tensors, compression)


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
    reduction, team = _linear("sparse_allreduce", op), team_of(process_set)
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


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Join the tensors of all ranks along the first dimension, which may differ among ranks.

    Raises:
        ValueError: a tensor is a scalar, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on the other dimensions or the type.
    """
    counts = [len(t) for t in _plain("allgather", tensors, rows=True)]

    def back(gradients: Tensors) -> Tensors:
        (rows,) = synchronize(_allgather([torch.tensor([counts])], None, process_set))
        whole = synchronize(grouped_allreduce_async(gradients, process_set=process_set))
        begins = rows[: team_of(process_set).place].sum(0).tolist()
        return [g[b : b + n] for g, b, n in zip(whole, begins, counts, strict=True)]

    return _apply(lambda given: _allgather(given, name, process_set), back, tensors)


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

    def back(gradients: Tensors) -> Tensors:
        reduced: Tensors = synchronize(grouped_allreduce_async(gradients, process_set=process_set))
        return reduced if bridge().rank == root_rank else [torch.zeros_like(g) for g in reduced]

    return _apply(lambda t: _broadcast(t, root_rank, name, process_set), back, [tensor])[0]


def grouped_broadcast_(
    tensors: Tensors, root_rank: int, names: list[str], process_set: ProcessSet
) -> None:
    """Broadcast several tensors in place in one operation; ``names`` are for errors."""
    synchronize(_broadcast(tensors, root_rank, None, process_set, tensors, names))


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`alltoall`."""
    handle = _alltoall(tensor, splits, name, process_set)
    handle.single = splits is None
    return handle


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
    received: list[int] = []

    def begin(tensors: Tensors) -> Handle:
        return _alltoall(tensors[0], splits, name, process_set)

    def back(gradients: Tensors) -> Tensors:
        return [synchronize(_alltoall(gradients[0], received, None, process_set))[0]]

    result, came = _Differentiable.apply(begin, back, tensor)  # type: ignore[no-untyped-call]
    received += came.tolist()
    return result if splits is None else (result, came)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Reduction.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce tensors over all ranks and keep this rank's rows of the first dimension.

    Rows that do not divide evenly go to the first ranks.

    Args:
        tensors: of the same shape and type on all ranks.
        name: as in :func:`allreduce`.
        compression: of what is sent.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Raises:
        ValueError: a tensor is a scalar, or ``name`` is in flight.
        HorovodInternalError: on all ranks, if they disagree on shape, type or reduction.
    """

    def begin(tensors: Tensors) -> Handle:
        scales = (prescale_factor, postscale_factor)
        return _reducescatter(tensors, name, op, process_set, *scales)

    def back(gradients: Tensors) -> Tensors:
        count = team_of(process_set).size if reduction_of(op) == Reduction.Sum else 1
        factor = prescale_factor * postscale_factor * count
        gathered: Tensors = synchronize(_allgather(gradients, None, process_set))
        return gathered if factor == 1.0 else [g * factor for g in gathered]

    return _apply(begin, back, tensors, compression)


# ---------------------------------------------------------------------- the table of forms


_INTERNAL = ("outputs", "names")  # arguments that no form takes from a script


def _form(
    name: str,
    operation: Callable[..., Any],
    single: bool = False,
    in_place: bool = False,
    wait: bool = False,
) -> Callable[..., Any]:
    """A form of an operation on tensors, with the signature that ``help`` shows.

    Args:
        name: of the form.
        operation: begins an operation on several tensors, or returns its results.
        single: the form takes one tensor, and gives one.
        in_place: the results replace the tensors.
        wait: the form returns the results of an operation that was begun.
    """
    # ``*args`` alone would hide the arguments from ``help``, and from the error of a wrong call.
    # Binding takes 6 µs a call (Python 3.11).
    own = inspect.signature(operation)
    _, *others = (p for p in own.parameters.values() if p.name not in _INTERNAL)
    first = inspect.Parameter(
        "tensor" if single else "tensors",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        annotation="Tensor" if single else "Tensors",
    )
    result: Any = own.return_annotation
    if wait or result != "Handle":
        result = "Tensor" if single else "list[Tensor]"
    signature = inspect.Signature([first, *others], return_annotation=result)

    def form(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        tensors = given.pop(first.name)
        if single:
            tensors = [tensors]
        if in_place:
            given["outputs"] = tensors
        result = operation(tensors, **given)
        if not isinstance(result, Handle):
            return result[0] if single else result
        result.single = single
        return synchronize(result) if wait else result

    form.__name__ = form.__qualname__ = name
    form.__doc__ = operation.__doc__ or (
        f"{'Do' if wait else 'Begin'} :func:`{name.replace('_async', '').rstrip('_')}`"
        f"{' in place' if in_place else ''}, without a gradient."
    )
    form.__signature__ = signature  # type: ignore[attr-defined]
    return form


allreduce = _form("allreduce", grouped_allreduce, single=True)
allreduce_ = _form("allreduce_", _allreduce, single=True, in_place=True, wait=True)
allreduce_async = _form("allreduce_async", _allreduce, single=True)
allreduce_async_ = _form("allreduce_async_", _allreduce, single=True, in_place=True)
grouped_allreduce_ = _form("grouped_allreduce_", _allreduce, in_place=True, wait=True)
grouped_allreduce_async = _form("grouped_allreduce_async", _allreduce)
grouped_allreduce_async_ = _form("grouped_allreduce_async_", _allreduce, in_place=True)
allgather = _form("allgather", grouped_allgather, single=True)
allgather_async = _form("allgather_async", _allgather, single=True)
grouped_allgather_async = _form("grouped_allgather_async", _allgather)
broadcast_ = _form("broadcast_", _broadcast, single=True, in_place=True, wait=True)
broadcast_async = _form("broadcast_async", _broadcast, single=True)
broadcast_async_ = _form("broadcast_async_", _broadcast, single=True, in_place=True)
reducescatter = _form("reducescatter", grouped_reducescatter, single=True)
reducescatter_async = _form("reducescatter_async", _reducescatter, single=True)
grouped_reducescatter_async = _form("grouped_reducescatter_async", _reducescatter)


# ---------------------------------------------------------------------- the rest


def poll(handle: Any) -> bool:
    """Whether an operation has completed, so that ``synchronize`` returns at once."""
    return bool(handle.done.is_set())


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result.

    Raises:
        HorovodInternalError: it failed; the text names the operation and the ranks.
    """
    if callable(handle):  # a sparse one
        return handle()
    result = bridge().wait(handle)
    return result[0] if handle.single else result


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
