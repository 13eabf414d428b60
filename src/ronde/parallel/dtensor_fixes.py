"""Repairs of DTensor, where it silently does something else than a whole tensor.

- ``item()`` of a sum in parts gives a worker its own part (torch 2.13; pytorch #166638), so that a
  norm that a script logs is that of a slice.
- Each worker draws random numbers for its slice alone, so that a layer that a script initializes
  again gets other weights than in one process, on the CPU often the same in every slice (#168058).
- A view along a divided dimension (``weight[0]``) is a copy, and writes into it are lost (#147570),
  as is ``parameter.data = …`` (#157391).
- A new tensor of another shape (``weight.new_zeros(2, 8, 16)``, a hidden state) is divided as well,
  and no model takes it: it becomes a plain one.

The repairs communicate where they exchange values: every worker must do the same, as with any
operation on divided parameters.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
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
_MEET_SECONDS = 300.0  # longer than one worker works alone: it saves, draws, evaluates
_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZER = str(Path(_TORCH, "optim", "optimizer.py"))  # wraps the step of every optimizer
_meetings: dict[str, int] = {}
_DRAWS_INTO = (
    *("normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
)
_DRAWS_LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli")
_WRITES = (
    *("index_add_", "index_copy_", "index_fill_", "index_put_", "_index_put_impl_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_"),
    *("put_", "fill_diagonal_", "renorm_"),
)
"""Write at places that may be on any worker."""
_NEW = (
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.new_empty.default,
)
_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.diagonal.default,
    _aten.view.default,
)
"""Their dimension may be divided."""


def fix_dtensors() -> None:
    """Install all repairs in this process. Doing it again changes nothing."""
    # A torch without this table keeps its own behavior.
    handlers: Any = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    handlers[_aten._local_scalar_dense.default] = _item
    for names, handler in ((_DRAWS_INTO, _draw_into), (_DRAWS_LIKE, _draw_like)):
        for packet in (getattr(_aten, name) for name in names):
            overloads = [o for o in packet.overloads() if not o.endswith("out")]
            handlers.update({getattr(packet, o): handler for o in overloads})
    handlers[_aten.eye.m_out] = handlers[_aten.eye.out] = _eye
    for packet in (getattr(_aten, name) for name in _WRITES):
        handlers.update({getattr(packet, o): _write_whole for o in packet.overloads()})
    handlers[_aten.fill_.Tensor] = _fill
    for op in _NEW:
        handlers[op] = _New(handlers, op)
    for op in _VIEWS:
        handlers[op] = _View(handlers, op)
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment,method-assign]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that every worker has whole, divided as another one."""
    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Whole()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def _keep_part(into: DTensor, whole: torch.Tensor) -> DTensor:
    """Write this worker's part of ``whole`` into ``into``."""
    into._local_tensor.copy_(_part(whole, into)._local_tensor)
    return into


def _empty_whole(like: DTensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)


@torch.no_grad()
def _item(op: Any, args: Any, kwargs: Any) -> Any:
    value = args[0]
    if not all(isinstance(p, Whole) for p in value.placements):
        _meet(value.device_mesh)
    return op(value.full_tensor())


def _line() -> str:
    """The line that reads a number: workers that read different numbers do not meet."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or _TORCH in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _meet(mesh: DeviceMesh) -> None:
    """Wait for all workers of a mesh.

    One that reads a number alone would wait for ever, or take the answer to another question.
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
            f"{len(ranks)} workers, but not all of them read it within {_MEET_SECONDS:g} s. Read "
            "it on every worker, outside of 'if run.is_main', and print it on rank 0."
        ) from error


def _refuse_mix(into: Any, op: Any) -> None:
    if not isinstance(into, DTensor):
        raise RuntimeError(
            f"{op} got a mix of whole and divided tensors. Use full_tensor() of the divided ones."
        )


@torch.no_grad()
def _draw_into(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw the whole on every worker, as one process does, and keep this worker's part."""
    into, *others = args
    _refuse_mix(into, op)
    return _keep_part(into, op(_empty_whole(into), *map(_whole, others), **kwargs))


@torch.no_grad()
def _draw_like(op: Any, args: Any, kwargs: Any) -> Any:
    like, *others = args
    # bernoulli reads its probabilities from the tensor
    base = _whole(like) if op.overloadpacket is _aten.bernoulli else _empty_whole(like)
    return _part(op(base, *others, **kwargs), like)


@torch.no_grad()
def _eye(op: Any, args: Any, kwargs: Any) -> Any:
    into = kwargs["out"]
    return _keep_part(into, op(*args, out=_empty_whole(into)))


def _data(self: DTensor) -> torch.Tensor:
    return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]


@torch.no_grad()
def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """Let ``parameter.data = values`` write into the local part; torch's own is never read."""
    alike = value.shape == self.shape and value.dtype == self.dtype and value.device == self.device
    if not alike or (isinstance(value, DTensor) and value.device_mesh != self.device_mesh):
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        return
    if not isinstance(value, DTensor):
        value = _part(value, self)
    self._local_tensor.copy_(value.redistribute(placements=self.placements)._local_tensor)


@torch.no_grad()
def _write_whole(op: Any, args: Any, kwargs: Any) -> Any:
    """Write into the whole on every worker, as one process does, and keep this worker's part."""
    into, *others = args
    _refuse_mix(into, op)
    _meet(into.device_mesh)
    whole = into.full_tensor()
    op(whole, *tree_map(_whole, others), **tree_map(_whole, kwargs))
    return _keep_part(into, whole)


def _fill(op: Any, args: Any, kwargs: Any) -> Any:
    into, value = args
    into._local_tensor.fill_(_whole(value))
    return into


class _New:
    """A new tensor of the script is plain. That of an optimizer, and one in a parameter's own
    shape, is divided as torch does it.
    """

    def __init__(self, handlers: dict[Any, Any], op: Any) -> None:
        self.handlers, self.op = handlers, op

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        like, size, *others = args
        plain = isinstance(like, torch.nn.Parameter) and tuple(size) != tuple(like.shape)
        if plain and not _in_optimizer():
            return op(like._local_tensor.detach(), size, *others, **kwargs)
        self.handlers.pop(op, None)  # for torch's own way
        try:
            return op(*args, **kwargs)
        finally:
            self.handlers[op] = self


def _in_optimizer() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER:
            return True
        frame = frame.f_back
    return False


class _View:
    """A view as torch computes it. If that is a copy, it becomes a :class:`_ViewCopy`."""

    def __init__(self, handlers: dict[Any, Any], op: Any) -> None:
        self.handlers, self.op = handlers, op

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        base = args[0]
        takes_gradient = torch.is_grad_enabled() and base.requires_grad
        self.handlers.pop(op, None)  # for torch's own way
        try:
            result = op(*args, **kwargs)
        except RuntimeError:  # torch unbinds no divided dimension
            if op is not _aten.unbind.int or takes_gradient:
                raise
            dim = args[1] if len(args) > 1 else 0
            result = [_aten.select.int(base, dim, i) for i in range(base.shape[dim])]
        finally:
            self.handlers[op] = self
        if takes_gradient:
            return result  # autograd lets nobody write into it
        return _map_parts(result, lambda part, i: _remember(base, part, (op, args[1:], kwargs, i)))


def _map_parts(result: Any, wrap: Callable[[DTensor, int | None], DTensor]) -> Any:
    """``wrap(view, None)`` of one view, or ``wrap(view, i)`` of each of several."""
    if isinstance(result, DTensor):
        return wrap(result, None)
    return type(result)(wrap(part, i) for i, part in enumerate(result))


def _remember(base: DTensor, part: DTensor, view: Any) -> DTensor:
    """A view, or what remembers its base if torch has made a copy."""
    local, whole = part._local_tensor.untyped_storage(), base._local_tensor.untyped_storage()
    if local._cdata == whole._cdata or any(p.is_partial() for p in base.placements):
        return part
    return _view_copy(part, base, (view,))


def _view_copy(part: DTensor, base: DTensor, views: tuple[Any, ...]) -> DTensor:
    copy: Any = _ViewCopy(part._local_tensor, part._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    copy.base, copy.views = base, views
    return cast(DTensor, copy)


class _ViewCopy(DTensor):
    """A copy that stands for a view along a divided dimension: writes go to its base, too."""

    base: DTensor
    views: tuple[Any, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        schema = func._schema.arguments
        writes = {s.name for s in schema if s.alias_info is not None and s.alias_info.is_write}
        written = [a for a, s in zip(args, schema, strict=False) if s.name in writes]
        written += [kwargs[name] for name in kwargs if name in writes]
        copies = [a for a in tree_leaves(written) if isinstance(a, _ViewCopy)]
        first = args[0] if args else None
        if not copies:
            result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if not isinstance(first, _ViewCopy) or not func.is_view:
                return result
            base, views = first.base, first.views
            return _map_parts(
                result, lambda p, i: _view_copy(p, base, (*views, (func, args[1:], kwargs, i)))
            )
        (into, *more) = copies
        if more or into is not first or into is not written[0]:
            raise PlanError(
                f"{func} writes into parts of parameters that are divided over workers. Write into "
                "one at a time, or into the whole parameter."
            )
        into._write(func, tree_map(_whole, args[1:]), tree_map(_whole, kwargs))
        return into

    @torch.no_grad()
    def _write(self, func: Any, others: Any, kwargs: Any) -> None:
        _meet(self.base.device_mesh)
        whole = self.base.full_tensor()
        part = whole
        for view, args, named, index in self.views:
            part = view(part, *args, **named)
            part = part if index is None else part[index]
        func(part, *others, **kwargs)
        _keep_part(self.base, whole)
        _keep_part(self, part.contiguous())
