"""Snapshots of objects to compare with later ones, and fake buffers for a followed pass."""

from __future__ import annotations

import random as python_random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's in-place version; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory; 0 if it has no plain storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # sparse, nested, wrapped
        return 0


def stand_in(fake: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor | None:
    """A full-size fake of a tensor that was shrunk to one element; None for other tensors.

    It keeps the original layout, on which some functions depend (``view_as_complex``).
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() < 2:
        return None
    if any(stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        return None
    strides = getattr(tensor, "_ronde_strides", None)
    with fake:
        if strides is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def snapshot(value: Any, depth: int = 3) -> Any:
    """A snapshot to compare with a later one, to detect changes to an object."""
    # Not object_graph.walk: order and nesting must be equal, too.
    if isinstance(value, (torch.Tensor, nn.Module, *IMMUTABLE)) or depth == 0:
        return id(value)
    if isinstance(value, list | tuple | set):
        identity = 0 if isinstance(value, tuple) else id(value)
        return identity, [snapshot(v, depth - 1) for v in value]
    if isinstance(value, dict):
        return (id(value), [(k, snapshot(v, depth - 1)) for k, v in value.items()])
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return id(value)
    return (id(value), [(k, snapshot(v, depth - 1)) for k, v in attributes.items()])


def generator_states() -> Any:
    """The states of Python's and NumPy's generators, on which a path may depend."""
    numpy: Any = sys.modules.get("numpy")  # not imported for it: nobody has drawn from it then
    state = numpy.random.get_state() if numpy is not None else (None, b"")
    return hash(python_random.getstate()), bytes(state[1]), state[2:]


@contextmanager
def fake_buffers(model: nn.Module, fake: FakeTensorMode | None) -> Iterator[None]:
    """Make buffers fake along with activations: changes are seen and discarded."""
    was: list[tuple[Any, str, torch.Tensor]] = []
    twins: dict[int, torch.Tensor] = {}
    for module in model.modules() if fake is not None else ():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta or isinstance(buffer, FakeTensor):
                continue
            if id(buffer) not in twins:
                assert fake is not None
                twin = stand_in(fake, buffer)
                if twin is None:
                    twin = fake.from_tensor(buffer.detach(), static_shapes=True)
                twins[id(buffer)] = twin
            was.append((module._buffers, name, buffer))
    try:
        for buffers, name, buffer in was:
            buffers[name] = twins[id(buffer)]
        yield
    finally:
        for buffers, name, buffer in was:
            buffers[name] = buffer
