"""What torch's DTensors do differently from whole tensors, without a word, put right: one number,
random ones, and writing into a part.

``item()`` of a sum that lies in parts over the workers gave a worker its own part (torch 2.13), so
that a norm that a script logs was that of a slice. Random numbers were drawn by each worker for its
slice alone: a layer that a script initialises anew got other weights than in one process, on the
CPU often the same ones in every slice. A view along a divided dimension (``weight[0]``) is a copy,
and what is written into it was lost, as was ``parameter.data = …``. All are collective as far as
values are exchanged: every worker has to do them, as with any other operation on parameters that
are divided.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole
from torch.utils._pytree import tree_leaves, tree_map

from ronde.world import PlanError

__all__ = ["fix_dtensors"]

_aten = torch.ops.aten
_MEET_SECONDS = (
    300.0  # longer than one worker works alone between two steps: saves, draws, evaluates
)
_TORCH = str(Path(torch.__file__).parent)
_meetings: dict[str, int] = {}
_INTO = (
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "cauchy_",
    "log_normal_",
    "geometric_",
    "bernoulli_",
)
# Views whose dimension may be divided, and what is written at places that may lie on any worker.
_VIEWS = (
    "select.int",
    "slice.Tensor",
    "split.Tensor",
    "split_with_sizes.default",
    "unbind.int",
    "diagonal.default",
    "view.default",
)
_AT = (
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "_index_put_impl_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
    "masked_scatter_",
    "put_",
    "fill_diagonal_",
    "renorm_",
)
_LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli")


def fix_dtensors() -> None:
    """From now on, for this process. Doing it again changes nothing."""
    # of another torch: then as torch has it
    handlers: Any = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    handlers[_aten._local_scalar_dense.default] = _item
    for names, handler in ((_INTO, _drawn_into), (_LIKE, _drawn_like)):
        for name in names:
            packet = getattr(_aten, name)
            handlers.update(
                {getattr(packet, o): handler for o in packet.overloads() if not o.endswith("out")}
            )
    handlers[_aten.eye.m_out] = handlers[_aten.eye.out] = _eye
    for name in _AT:
        packet = getattr(_aten, name)
        handlers.update({getattr(packet, o): _written_at for o in packet.overloads()})
    handlers[_aten.fill_.Tensor] = _filled
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(_aten, packet), overload)
        handlers[op] = _Viewed(handlers, op)
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment,method-assign]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that every worker has, divided as another is."""
    mesh = like.device_mesh
    made = DTensor.from_local(whole, mesh, [Whole()] * mesh.ndim, run_check=False)
    return made.redistribute(placements=like.placements)


def _room(like: DTensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)


@torch.no_grad()
def _item(op: Any, args: Any, kwargs: Any) -> Any:
    value = args[0]
    if not all(isinstance(p, Whole) for p in value.placements):
        _meet(value.device_mesh)
    return op(value.full_tensor())


def _line() -> str:
    """Where a number is read: workers that read different ones do not meet."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or _TORCH in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _meet(mesh: DeviceMesh) -> None:
    """Wait until every worker of a mesh is here: one that reads a number alone would wait for ever,
    or take an answer to something else.
    """
    ranks = mesh.mesh.flatten().tolist()
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"ronde/numbers/{','.join(map(str, ranks))}/{_line()}"
    count = _meetings[key] = _meetings.get(key, 0) + 1
    if store.add(f"{key}/{count}", 1) == len(ranks):
        store.delete_key(f"{key}/{count - 1}/all")
        store.delete_key(f"{key}/{count}")
        store.set(f"{key}/{count}/all", "")
        return
    try:
        store.wait([f"{key}/{count}/all"], datetime.timedelta(seconds=_MEET_SECONDS))
    except dist.DistStoreError as error:
        raise PlanError(
            f"rank {dist.get_rank()} reads a number of parameters that lie in parts on "
            f"{len(ranks)} workers, and not all of them have come to read "
            f"it in {_MEET_SECONDS:g} s. Read it on every worker, and print it on rank 0: "
            "outside of 'if run.is_main'."
        ) from error


@torch.no_grad()
def _drawn_into(op: Any, args: Any, kwargs: Any) -> Any:
    """Every worker draws the whole, as one process does, and keeps its part."""
    into, *others = args
    if not isinstance(into, DTensor):
        raise RuntimeError(
            f"{op} got a mix of whole and divided tensors: use full_tensor() of what it draws by."
        )
    drawn = op(_room(into), *map(_whole, others), **kwargs)
    into._local_tensor.copy_(_part(drawn, into)._local_tensor)
    return into


@torch.no_grad()
def _drawn_like(op: Any, args: Any, kwargs: Any) -> Any:
    like, *others = args
    # that one reads probabilities
    given = _whole(like) if op.overloadpacket is _aten.bernoulli else _room(like)
    return _part(op(given, *others, **kwargs), like)


@torch.no_grad()
def _eye(op: Any, args: Any, kwargs: Any) -> Any:
    into = kwargs["out"]
    into._local_tensor.copy_(_part(op(*args, out=_room(into)), into)._local_tensor)
    return into


def _data(self: DTensor) -> torch.Tensor:
    return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]


@torch.no_grad()
def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """``parameter.data = values`` puts them where the parameter's part lies: torch's own puts them
    beside it, where nothing reads them.
    """
    mine = self._local_tensor
    alike = value.shape == self.shape and value.dtype == self.dtype and value.device == self.device
    if not alike or (isinstance(value, DTensor) and value.device_mesh != self.device_mesh):
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        return
    part = (
        value.redistribute(placements=self.placements)
        if isinstance(value, DTensor)
        else _part(value, self)
    )
    mine.copy_(part._local_tensor)


@torch.no_grad()
def _written_at(op: Any, args: Any, kwargs: Any) -> Any:
    """Every worker writes into the whole, as one process does, and keeps its part."""
    into, *others = args
    if not isinstance(into, DTensor):
        raise RuntimeError(
            f"{op} got a mix of whole and divided tensors: use full_tensor() of what is written."
        )
    _meet(into.device_mesh)
    whole = into.full_tensor()
    op(whole, *tree_map(_whole, others), **tree_map(_whole, kwargs))
    into._local_tensor.copy_(_part(whole, into)._local_tensor)
    return into


def _filled(op: Any, args: Any, kwargs: Any) -> Any:
    into, value = args
    into._local_tensor.fill_(_whole(value))
    return into


class _Viewed:
    """A view, as torch makes it; where that is a copy, it remembers of what."""

    def __init__(self, handlers: dict[Any, Any], op: Any) -> None:
        self.handlers, self.op = handlers, op

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        self.handlers.pop(op, None)  # as torch does it
        of = args[0]
        try:
            found = op(*args, **kwargs)
        except RuntimeError:
            if op is not _aten.unbind.int or (torch.is_grad_enabled() and of.requires_grad):
                raise
            found = [
                _aten.select.int(of, *(args[1:] or (0,)), i)
                for i in range(of.shape[args[1] if len(args) > 1 else 0])
            ]
        finally:
            self.handlers[op] = self
        if torch.is_grad_enabled() and of.requires_grad:
            return found  # nothing may be written into it
        if isinstance(found, DTensor):
            return _copy_of(of, found, ((op, args[1:], kwargs, None),))
        return type(found)(
            _copy_of(of, one, ((op, args[1:], kwargs, i),)) for i, one in enumerate(found)
        )


def _copy_of(of: DTensor, found: DTensor, views: tuple[Any, ...]) -> DTensor:
    same = found._local_tensor.untyped_storage()._cdata == of._local_tensor.untyped_storage()._cdata
    if same or any(p.is_partial() for p in of.placements):
        return found
    made: Any = _Copy(found._local_tensor, found._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made.of, made.views = of, views
    return cast(DTensor, made)


class _Copy(DTensor):
    """What a view along a divided dimension gave; what is written into it goes where it came
    from.
    """

    of: DTensor
    views: tuple[Any, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        written = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info is not None and s.alias_info.is_write
        ]
        written += [
            kwargs[s.name]
            for s in func._schema.arguments
            if s.name in kwargs and s.alias_info is not None and s.alias_info.is_write
        ]
        copies = [a for a in tree_leaves(written) if isinstance(a, _Copy)]
        if not copies:
            found = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            viewed = args[0] if args and isinstance(args[0], _Copy) and func.is_view else None
            if viewed is None:
                return found
            if isinstance(found, DTensor):
                return viewed._again(found, (func, args[1:], kwargs, None))
            return type(found)(
                viewed._again(one, (func, args[1:], kwargs, i)) for i, one in enumerate(found)
            )
        (into,) = (
            copies
            if len(copies) == 1 and written[0] is copies[0] and args and args[0] is copies[0]
            else (None,)
        )
        if into is None:
            raise PlanError(
                f"{func} writes into parts of parameters that are divided over workers: "
                "write into one at a time, or into the whole parameter."
            )
        into._write(func, tree_map(_whole, args[1:]), tree_map(_whole, kwargs))
        return into

    def _again(self, found: DTensor, view: Any) -> DTensor:
        made: Any = _Copy(found._local_tensor, found._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        made.of, made.views = self.of, (*self.views, view)
        return cast(DTensor, made)

    @torch.no_grad()
    def _write(self, func: Any, others: Any, kwargs: Any) -> None:
        _meet(self.of.device_mesh)
        whole = self.of.full_tensor()
        part = whole
        for view, more, named, index in self.views:
            part = view(part, *more, **named)
            part = part if index is None else part[index]
        func(part, *others, **kwargs)
        self.of._local_tensor.copy_(_part(whole, self.of)._local_tensor)
        self._local_tensor.copy_(_part(part.contiguous(), self)._local_tensor)
