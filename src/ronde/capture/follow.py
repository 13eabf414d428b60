"""Follow a forward pass from batch to loss as a list of events: where can it be cut, and what would
cross?

Whole-graph capture fails on real scripts. Here the script's own Python runs, and only two things
are observed: module calls, and torch functions called between them (the glue). Each is a
:class:`TraceEvent`. A pipeline stage later runs the same Python and skips the events of other
stages (:mod:`ronde.parallel.stage_run`).

Activations are fake tensors meanwhile: shapes without memory or arithmetic. Values computed only
from the batch and constants (masks, positions) are real, because a forward pass may branch on them,
and every stage computes them again. A forward pass that reads its activations is followed with real
tensors instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ronde.capture.event_recorder import CheckpointFrames, EventRecorder
from ronde.capture.pass_state import SavedState, fake_buffers, stand_in
from ronde.capture.trace import Trace
from ronde.world.tensors import tensors_in

__all__ = ["aside", "follow", "following"]

_under_way: list[None] = []


def following() -> bool:
    """Whether a forward pass is being followed, outside the training."""
    return bool(_under_way)


@contextmanager
def aside() -> Iterator[None]:
    """Mark a forward pass as outside the training."""
    _under_way.append(None)
    try:
        yield
    finally:
        _under_way.pop()


def follow(model: nn.Module, call: Callable[[], Any], *, real: bool = False) -> Trace:
    """Follow ``call()``, a forward pass of ``model`` and its loss. Model, batch and randomness are
    restored.

    Args:
        model: whose modules are recognised.
        call: runs forward and loss on one micro-batch; gradients are enabled or not as it is
            called.
        real: run it for real instead of with fake activations.

    Raises:
        Exception: what the pass itself raises, where it also does so for real.
    """
    ghosts = FakeTensorMode(allow_non_fake_inputs=True)
    # A device's own generator is forked by the caller where there is one; following runs on the
    # host's generator only.
    for fake in (None,) if real else (ghosts, None):
        try:
            return _follow(model, call, fake, ghosts)
        except Exception:
            if fake is None:
                raise
    raise AssertionError("unreachable")


def _follow(
    model: nn.Module, call: Callable[[], Any], fake: FakeTensorMode | None, ghosts: FakeTensorMode
) -> Trace:
    whole: list[Any] = []  # the mode refers to them weakly
    for p in model.parameters() if fake is not None else ():
        assert fake is not None
        if (stands_for := stand_in(fake, p)) is not None:
            whole.append(stands_for)
            fake.fake_tensor_converter.set_tensor_memo(p, whole[-1])
    with fake_buffers(model, fake), _quiet():
        before = SavedState(model)
        recorder: EventRecorder | None = None
        _under_way.append(None)
        try:
            with CheckpointFrames() as frames:
                recorder = EventRecorder(model, fake, ghosts, frames)
                with recorder:
                    result = call()
                recorder.finish(result)
        finally:
            _under_way.pop()
            if recorder is not None:
                recorder.restore()
            kept = before.restore()
    reached, seen = _reached(result, recorder.nodes)
    for index, node in recorder.makers.items():
        recorder.values[index].reached = node in seen
    bare = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), result
    )
    return Trace(
        recorder.events,
        recorder.values,
        recorder.calls,
        fake is not None,
        bare,
        reached,
        tuple(kept),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of what fake tensors cannot do: it is then done for real."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _reached(
    result: Any, nodes: Mapping[Any, tuple[nn.Parameter, ...]]
) -> tuple[set[int], set[Any]]:
    """Identities of the parameters a gradient from ``result`` reaches, and the graph nodes on its
    way.
    """
    found: set[int] = set()
    seen: set[Any] = set()
    stack = [t.grad_fn for t in tensors_in(result) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        found.update(id(p) for p in nodes.get(node, ()) if p.requires_grad)
        stack += [after for after, _ in node.next_functions if after is not None]
    return found, seen
