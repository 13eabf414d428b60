"""Repairs of DTensor, where it silently does something else than a whole tensor.

- ``item()`` of a sum in parts gives a worker its own part (torch 2.13; pytorch #166638), so that a
  norm that a script logs is that of a slice.
- Each worker draws random numbers for its slice alone, so that a layer that a script initializes
  again gets other weights than in one process, on the CPU often the same in every slice (#168058).
- A view along a divided dimension (``weight[0]``) is a copy, and writes into it are lost (#147570):
  they are refused. ``parameter.data = …`` is lost as well (#157391).
- A new tensor of another shape (``weight.new_zeros(2, 8, 16)``, a hidden state) is divided as well,
  and no model takes it: it becomes a plain one (not reported).

The repairs communicate where they exchange values: every worker must do the same, as with any
operation on divided parameters. They are for torch up to 2.13: each goes with the first torch in
which its issue is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ronde.world import PlanError, World
from ronde.world.rendezvous import Rendezvous, rendezvous
from ronde.world.tensors import local_part

__all__ = ["extend_scaler", "fix_dtensors"]

_aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZER = str(Path(_TORCH, "optim", "optimizer.py"))  # wraps the step of every optimizer
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
"""Write at places that may be on any worker: refused."""
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


def fix_dtensors(me: World) -> None:
    """Install all repairs in this process. Doing it again changes nothing."""
    # A torch without this table keeps its own behavior.
    handlers: Any = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    handlers[_aten._local_scalar_dense.default] = partial(_item, rendezvous(me))
    for names, handler in ((_DRAWS_INTO, _draw_into), (_DRAWS_LIKE, _draw_like)):
        for packet in (getattr(_aten, name) for name in names):
            overloads = [o for o in packet.overloads() if not o.endswith("out")]
            handlers.update({getattr(packet, o): handler for o in overloads})
    handlers[_aten.eye.m_out] = handlers[_aten.eye.out] = _eye
    for packet in (getattr(_aten, name) for name in _WRITES):
        handlers.update({getattr(packet, o): _refuse_write for o in packet.overloads()})
    handlers[_aten.fill_.Tensor] = _fill
    handlers.update(dict.fromkeys(_NEW, partial(_new, handlers)))
    handlers.update(dict.fromkeys(_VIEWS, partial(_view, handlers)))
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
def _item(meetings: Rendezvous, op: Any, args: Any, kwargs: Any) -> Any:
    value = args[0]
    if not all(isinstance(p, Whole) for p in value.placements):
        # One that reads a number alone would wait for ever, or take the answer to another question.
        meetings.meet(
            f"for a number of divided parameters ({_line()})",
            ranks=value.device_mesh.mesh.flatten().tolist(),
            advice="Read it on every worker, outside of 'if run.is_main', and print it on rank 0.",
        )
    return op(value.full_tensor())


def _line() -> str:
    """The line that reads a number: workers that read different numbers do not meet."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or _TORCH in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


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
def _refuse_write(op: Any, args: Any, kwargs: Any) -> Any:
    into, *others = args
    _refuse_mix(into, op)
    if not all(isinstance(p, Whole) for p in into.placements):
        raise _lost(op)
    op(into._local_tensor, *tree_map(_whole, others), **tree_map(_whole, kwargs))
    return into


def _lost(op: Any) -> PlanError:
    return PlanError(
        f"{op} writes into a part of a tensor that is divided over workers, and torch would lose "
        "that. Write into a whole copy on every worker: whole = weight.full_tensor(); "
        "whole[0] = 0; weight.data = whole."
    )


def _fill(op: Any, args: Any, kwargs: Any) -> Any:
    into, value = args
    into._local_tensor.fill_(_whole(value))
    return into


def _torchs_own(handlers: dict[Any, Any], op: Any, args: Any, kwargs: Any) -> Any:
    """What torch does where no handler takes the operation."""
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:  # else another thread has it
            handlers[op] = handler


def _new(handlers: dict[Any, Any], op: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor of the script is plain. That of an optimizer, and one in a parameter's own
    shape, is divided as torch does it.
    """
    like, size, *others = args
    plain = isinstance(like, torch.nn.Parameter) and tuple(size) != tuple(like.shape)
    if plain and not _in_optimizer():
        return op(like._local_tensor.detach(), size, *others, **kwargs)
    return _torchs_own(handlers, op, args, kwargs)


def _in_optimizer() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER:
            return True
        frame = frame.f_back
    return False


def _view(handlers: dict[Any, Any], op: Any, args: Any, kwargs: Any) -> Any:
    """A view as torch computes it. If that is a copy, it becomes a :class:`_ViewCopy`."""
    base = args[0]
    takes_gradient = torch.is_grad_enabled() and base.requires_grad
    result = _torchs_own(handlers, op, args, kwargs)
    if takes_gradient or any(p.is_partial() for p in base.placements):
        return result  # autograd lets nobody write into it
    memory = base._local_tensor.untyped_storage()._cdata

    def marked(part: DTensor) -> DTensor:
        own = part._local_tensor.untyped_storage()._cdata == memory
        return part if own else _view_copy(part)

    return tree_map_only(DTensor, marked, result)


def _view_copy(part: DTensor) -> DTensor:
    return cast(DTensor, _ViewCopy(part._local_tensor, part._spec, requires_grad=False))  # type: ignore[no-untyped-call]


class _ViewCopy(DTensor):
    """A copy that torch makes for a view along a divided dimension: it refuses to be written."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        schema = func._schema.arguments
        writes = {s.name for s in schema if s.alias_info is not None and s.alias_info.is_write}
        written = [a for a, s in zip(args, schema, strict=False) if s.name in writes]
        written += [kwargs[name] for name in kwargs if name in writes]
        if any(isinstance(a, _ViewCopy) for a in tree_leaves(written)):
            raise _lost(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        is_view = func.is_view and isinstance(args[0], _ViewCopy)
        return tree_map_only(DTensor, _view_copy, result) if is_view else result


def extend_scaler(scale: Callable[[torch.Tensor], torch.Tensor] | None, me: World) -> None:
    """Let the gradient scaler take divided and whole gradients.

    Its kernel takes one or the other, and asks the first which (torch 2.13, not reported); FSDP2
    leaves a parameter without dimensions whole. :meth:`Strategy.agree_on_overflow` follows.
    """
    scaler = getattr(scale, "__self__", None)
    if scaler is None or "_unscale_grads_" in vars(scaler):
        return

    def unscale(
        optimizer: Optimizer, inverse: torch.Tensor, overflow: torch.Tensor, allow_fp16: bool
    ) -> dict[Any, torch.Tensor]:
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.dtype is torch.float16 and not allow_fp16:  # as torch's own says
                    raise ValueError("Attempting to unscale FP16 gradients.")
                part = local_part(p.grad)
                part = part._values() if part.is_sparse else part
                # offloaded ones lie in the host's memory
                alike.setdefault((part.device, part.dtype), []).append(part)
        flags = {device: overflow.to(device, copy=True) for device, _ in alike}
        for (device, _), gradients in alike.items():
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, flags[device], inverse.to(device)
            )
        return flags or {me.device: overflow.to(me.device)}

    scaler._unscale_grads_ = unscale
