"""Snapshot a model's state before a followed pass, make its buffers fake, and restore it."""

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
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else (None, b"")
    return hash(python_random.getstate()), bytes(state[1]), state[2:]


class SavedState:
    """A model's state and the host's generators before a pass, to restore afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.random = torch.get_rng_state(), python_random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self.numpy = None if numpy is None else (numpy.random, numpy.random.get_state())
        self.modules = [(m, dict(m.__dict__)) for m in model.modules()]
        self.inside = {
            id(h): (h, h.copy())
            for _, own in self.modules
            for h in own.values()
            if isinstance(h, list | dict | set)
        }
        known = {id(b): b for b in model.buffers()}
        for _, own in self.modules:
            known |= {id(t): t for t in own.values() if isinstance(t, torch.Tensor)}
        self.tensors = [
            (t, t.detach().clone())
            for t in known.values()
            if t.device.type != "meta" and not isinstance(t, FakeTensor)
        ]

    def restore(self) -> list[tuple[nn.Module, str]]:
        """Restore everything. Returns ``(module, attribute)`` of what modules kept."""
        torch.set_rng_state(self.random[0])
        python_random.setstate(self.random[1])
        if self.numpy is not None:
            self.numpy[0].set_state(self.numpy[1])
        kept = []
        for module, own in self.modules:
            now = module.__dict__
            buffers: Any = own.get("_buffers")
            if id(buffers) in self.inside:
                was: Any = self.inside[id(buffers)][1]
                kept += [(module, name) for name, b in buffers.items() if was.get(name) is not b]
            changed = [name for name in now if name not in own or now[name] is not own[name]]
            kept += [(module, name) for name in changed]
            if changed or len(now) != len(own):
                now.clear()
                now.update(own)
        container: Any
        copy: Any
        for container, copy in self.inside.values():
            if _is_same(container, copy):
                continue
            container.clear()
            if isinstance(container, list):
                container += copy
            else:
                container.update(copy)
        with torch.no_grad():
            for tensor, value in self.tensors:
                if not torch.equal(tensor, value):  # an equal one keeps its version
                    tensor.copy_(value)
        return kept


def _is_same(container: Any, copy: Any) -> bool:
    """Whether a list, dictionary, or set still has the same items."""
    if len(container) != len(copy):
        return False
    if isinstance(container, list):
        return all(a is b for a, b in zip(container, copy, strict=True))
    if isinstance(container, dict):
        return all(container.get(k, container) is v for k, v in copy.items())
    return bool(container == copy)


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
