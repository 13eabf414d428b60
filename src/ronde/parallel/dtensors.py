"""What torch's DTensors answer differently from whole tensors, without a word, put right: one number, and random ones.

``item()`` of a sum that lies in parts over the workers gave a worker its own part (torch 2.13), so that a norm that a script logs was
that of a slice. Random numbers were drawn by each worker for its slice alone: a layer that a script initialises anew got other weights
than in one process, on the CPU often the same ones in every slice. Both are collective as far as values are exchanged:
every worker has to do them, as with any other operation on parameters that are divided.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as Whole

from ronde.world import PlanError

__all__ = ["mend"]

_aten = torch.ops.aten
_MEET_SECONDS = 300.0  # longer than one worker works alone between two steps: saves, draws, evaluates
_TORCH = str(Path(torch.__file__).parent)
_meetings: dict[str, int] = {}
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
    value = args[0]
    if not all(isinstance(p, Whole) for p in value.placements):
        _meet(value.device_mesh)
    return op(value.full_tensor())


def _line() -> str:
    """Where a number is read: workers that read different ones do not meet."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or _TORCH in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _meet(mesh: DeviceMesh) -> None:
    """Wait until every worker of a mesh is here: one that reads a number alone would wait for ever, or take an answer to something else."""
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
            f"rank {dist.get_rank()} reads a number of parameters that lie in parts on {len(ranks)} workers, and not all of them have come to read "
            f"it in {_MEET_SECONDS:g} s. Read it on every worker, and print it on rank 0: outside of 'if run.is_main'."
        ) from error


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
