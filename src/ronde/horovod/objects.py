"""Python objects, parameters and optimizer states of one rank on all of them, without pickle.

Objects travel as JSON and safetensors. What these do not hold is refused, unless
``HOROVOD_PICKLE_OBJECTS=1`` allows pickle: then any rank can run code on any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ronde.checkpoint.exact_values import decode_exact, encode_exact
from ronde.horovod.collectives_api import (
    allgather,
    broadcast_,
    grouped_broadcast_,
)
from ronde.horovod.lifecycle import ProcessSet, bridge, global_process_set, team_of
from ronde.world import ArgumentError, CheckpointError

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "pack_object",
    "unpack_object",
]

_PLAIN, _SET, _PICKLED, _ERROR = b"J", b"S", b"P", b"E"
_ALLOW = "HOROVOD_PICKLE_OBJECTS"


def _allowed() -> bool:
    return os.environ.get(_ALLOW, "0") not in ("", "0")


def pack_object(value: Any) -> torch.Tensor:
    """An object as bytes. One that cannot be packed becomes an error that all ranks raise."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        items = list(value) if type(value) is set else value
        text = json.dumps(encode_exact(items, "object", tensors)).encode()
        # a copy: safetensors refuses tensors that share memory
        blob = save_tensors({k: t.cpu().contiguous().clone() for k, t in tensors.items()})
        data = (_SET if type(value) is set else _PLAIN) + len(text).to_bytes(8, "big") + text + blob
    except CheckpointError as error:
        data = _pickled(value) if _allowed() else _ERROR + _refusal(error).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _refusal(error: CheckpointError) -> str:
    said = str(error).replace("which a checkpoint cannot hold", "which cannot be sent")
    return (
        f"rank {bridge().rank}: {said} Send these, or set {_ALLOW}=1 on all ranks if you trust "
        "everyone on the network."
    )


def _pickled(value: Any) -> bytes:
    try:  # it takes functions and classes of the script itself too
        import cloudpickle as pickler
    except ImportError:
        import pickle as pickler
    return _PICKLED + bytes(pickler.dumps(value))


def unpack_object(data: torch.Tensor, device: torch.device | str = "cpu") -> Any:
    """The object of :func:`pack_object`.

    Raises:
        ArgumentError: the sender could not pack it, or pickled it and this rank forbids that.
    """
    raw = data.cpu().numpy().tobytes()
    kind, body = raw[:1], raw[1:]
    if kind == _ERROR:
        raise ArgumentError(body.decode())
    if kind == _PICKLED:
        if not _allowed():
            raise ArgumentError(
                f"another rank sent a pickled object: set {_ALLOW}=1 on all or none."
            )
        import pickle

        return pickle.loads(body)  # noqa: S301 (the user allowed it)
    end = 8 + int.from_bytes(body[:8], "big")
    value = decode_exact(json.loads(body[8:end]), load_tensors(body[end:]), device)
    return set(value) if kind == _SET else value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of one rank on all of them.

    Args:
        obj: numbers, strings, None, lists, tuples, sets, dictionaries, tensors, NumPy arrays.
            Ignored on other ranks than the root.
        root_rank: whose.
        name: pairs the operation among ranks.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: on all ranks, if the object holds something else.

    Example:
        >>> epoch = hvd.broadcast_object(epoch, root_rank=0)  # doctest: +SKIP
    """
    here = bridge()
    name = name or here.name(process_set.process_set_id or 0, "broadcast_object")
    is_root = here.rank == root_rank
    data = pack_object(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    if is_root and data[:1].numpy().tobytes() != _ERROR:
        return obj  # itself, as Horovod does
    return unpack_object(data, here.device)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Raises:
        ArgumentError: on all ranks, if an object cannot be sent, see :func:`broadcast_object`.
    """
    here = bridge()
    data = pack_object(obj)
    name = name or here.name(process_set.process_set_id or 0, "allgather_object")
    lengths = allgather(torch.tensor([len(data)]), f"{name}.length", process_set).tolist()
    parts = torch.split(allgather(data, f"{name}.data", process_set), lengths)
    return [unpack_object(part, here.device) for part in parts]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy parameters of one rank to all others, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: whose.
        process_set: the ranks that take part.

    Raises:
        ValueError: something in it is no tensor.
        HorovodInternalError: on all ranks, if their parameters differ in name, shape or type.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    else:
        named = [p if isinstance(p, tuple) else (f"parameter {i}", p) for i, p in enumerate(params)]
    named = [(name, value) for name, value in named if value is not None]
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name!r} is a {type(value).__name__}, not a tensor. Use "
                "hvd.broadcast_object for it."
            )
    # an operation takes tensors of one device
    for device in sorted({str(v.device) for _, v in named}):
        chosen = [(n, v) for n, v in named if str(v.device) == device]
        names, tensors = [n for n, _ in chosen], [v for _, v in chosen]
        grouped_broadcast_(tensors, root_rank, names, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the state and options of one rank's optimizer to all others.

    Gradients that do not exist yet become zeros, as in Horovod; nothing is stepped.

    Args:
        optimizer: with the same parameters on all ranks.
        root_rank: whose.
        model: accepted for Horovod's sake.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: on all ranks, if the optimizers have different parameters.
        ArgumentError: on all ranks, if an option cannot be sent, see :func:`broadcast_object`.
    """
    here, team = bridge(), team_of(process_set)
    shapes = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    number = process_set.process_set_id or 0
    key = (number, "optimizer_state", here.name(number, "optimizer_state"))
    groups = [f"parameter group {i}" for i in range(len(shapes))]
    meta = {"groups": len(groups), "names": groups, "shape": shapes, "root": root_rank}
    here.wait(here.submit(key, meta, lambda _: None))
    state = optimizer.state_dict()
    if not state["state"]:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
    received = broadcast_object(state, root_rank, process_set=process_set)
    if team.ranks[team.place] != root_rank:
        optimizer.load_state_dict(received)
