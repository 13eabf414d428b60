"""Calls of a script's loss or model that leave no trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.introspect import Marks
from ronde.run.snapshot import kept_attributes
from ronde.world.tensors import tensors_in

__all__ = ["undisturbed"]


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, before they happen, writes to tensors from outside, draws from the script's own
    generators, and what other workers would have to take part in.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments, kwargs = func._schema.arguments, kwargs or {}
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        shared = "c10d" in func.namespace or any(t.__name__ == "DTensor" for t in types)
        if shared or given.get("generator") is not None or not _memory(written) <= self._own:
            raise RuntimeError(f"{func} in a trial call")
        result = func(*args, **kwargs)
        self._own |= _memory(result) - _memory(given)
        return result


def _memory(value: Any) -> set[int]:
    return {int(t.untyped_storage()._cdata) for t in tensors_in(value)}


@contextmanager
def undisturbed(device: torch.device, *owners: Any) -> Iterator[None]:
    """Inside, calls compute no gradients and leave no trace: generators, and the attributes and
    modes of ``owners``, are put back. Modules evaluate.

    Raises:
        RuntimeError: a call would write to the script's tensors, or needs other workers.
    """
    generators, kept = Marks(), [each for owner in owners for each in kept_attributes(owner)]
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    training = [m for m in modules if m.training]
    # set_stance imports torch's compiler, which takes seconds
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    try:
        for module in training:
            module.training = False
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), eager, _Guard():
            yield
    finally:
        generators.put_back()
        for each in kept:
            each.put_back()
        for module in training:
            module.training = True
