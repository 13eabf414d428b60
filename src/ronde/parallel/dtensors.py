"""What torch's DTensors answer differently from whole tensors, without a word, put right: one number, and random ones.

``item()`` of a sum that lies in parts over the workers gave a worker its own part (torch 2.13), so that a norm that a script logs was
that of a slice. Random numbers were drawn by each worker for its slice alone: a layer that a script initialises anew got other weights
than in one process, on the CPU often the same ones in every slice. Both are collective as far as values are exchanged:
every worker has to do them, as with any other operation on parameters that are divided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole

__all__ = ["mend"]

_aten = torch.ops.aten
_INTO = ("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_")
_LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli")


def mend() -> None:
    """From now on, for this process. Doing it again changes nothing."""
    handlers: Any = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})  # of another torch: then as torch has it
    handlers[_aten._local_scalar_dense.default] = _item
    for names, handler in ((_INTO, _drawn_into), (_LIKE, _drawn_like)):
        for name in names:
            packet = getattr(_aten, name)
            handlers.update({getattr(packet, o): handler for o in packet.overloads() if not o.endswith("out")})
    handlers[_aten.eye.m_out] = handlers[_aten.eye.out] = _eye


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
    return op(args[0].full_tensor())


@torch.no_grad()
def _drawn_into(op: Any, args: Any, kwargs: Any) -> Any:
    """Every worker draws the whole, as one process does, and keeps its part."""
    into, *others = args
    if not isinstance(into, DTensor):
        raise RuntimeError(f"{op} got a mix of whole and divided tensors: use full_tensor() of what it draws by.")
    drawn = op(_room(into), *map(_whole, others), **kwargs)
    into._local_tensor.copy_(_part(drawn, into)._local_tensor)
    return into


@torch.no_grad()
def _drawn_like(op: Any, args: Any, kwargs: Any) -> Any:
    like, *others = args
    given = _whole(like) if op.overloadpacket is _aten.bernoulli else _room(like)  # that one reads probabilities
    return _part(op(given, *others, **kwargs), like)


@torch.no_grad()
def _eye(op: Any, args: Any, kwargs: Any) -> Any:
    into = kwargs["out"]
    into._local_tensor.copy_(_part(op(*args, out=_room(into)), into)._local_tensor)
    return into
