"""Follow a forward pass from batch to loss and keep it as a list of events.

Whole-graph capture fails on real scripts. Here the script's own Python runs, and only module calls
and the torch functions between them are recorded, each as a :class:`TraceEvent`. A pipeline stage
later runs the same Python and skips other stages' events (:mod:`ronde.parallel.stage_run`).

Activations are fake tensors: shapes without memory or arithmetic. Values that depend only on the
batch and constants (masks, positions) are real, because a pass may branch on them. A pass that
reads its activations is followed with real tensors instead.
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

from ronde.capture.event_recorder import EventRecorder, checkpoint_frames
from ronde.capture.global_draws import counted_draws
from ronde.capture.pass_state import fake_buffers, stand_in
from ronde.capture.trace import Trace
from ronde.introspect import SavedState
from ronde.world.tensors import tensors_in

_under_way: list[None] = []


def following() -> bool:
    """Whether a forward pass is being followed, which is not part of the training."""
    return bool(_under_way)


@contextmanager
def not_training() -> Iterator[None]:
    """Mark a forward pass as not part of the training."""
    _under_way.append(None)
    try:
        yield
    finally:
        _under_way.pop()


def follow(model: nn.Module, call: Callable[[], Any], *, real: bool = False) -> Trace:
    """Follow ``call()``: forward and loss of ``model`` on one micro-batch, then restore all state.

    Tries fake activations first, unless ``real``. Raises what the pass itself raises for real.
    """
    placeholders = FakeTensorMode(allow_non_fake_inputs=True)
    # The caller forks a device's own generator; following uses the host's only.
    for fake in (None,) if real else (placeholders, None):
        try:
            return _follow(model, call, fake, placeholders)
        except Exception:
            if fake is None:
                raise
    raise AssertionError("unreachable")


def _follow(
    model: nn.Module,
    call: Callable[[], Any],
    fake: FakeTensorMode | None,
    placeholders: FakeTensorMode,
) -> Trace:
    whole: list[Any] = []  # the mode refers to them weakly
    for p in model.parameters() if fake is not None else ():
        assert fake is not None
        if (stands_for := stand_in(fake, p)) is not None:
            whole.append(stands_for)
            fake.fake_tensor_converter.set_tensor_memo(p, whole[-1])
    with fake_buffers(model, fake), _quiet():
        before = SavedState(model)
        with checkpoint_frames() as frames, counted_draws(), not_training():
            recorder = EventRecorder(model, fake, placeholders, frames)
            try:
                with recorder:
                    result = call()
                recorder.finish(result)
            finally:
                recorder.restore()
                kept = before.kept()
                before.restore()
    reached, doubtful, seen = _reached(result, recorder.nodes)
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
        doubtful,
        tuple(kept),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about operations without fake tensors: the pass then runs for real."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _reached(
    result: Any, nodes: Mapping[Any, tuple[nn.Parameter, ...]]
) -> tuple[set[int], set[int], set[Any]]:
    """Identities of the parameters that a gradient of ``result`` reaches, those of them that it may
    not reach, and its graph nodes.
    """
    parameters: set[int] = set()
    inside: set[int] = set()  # of operations with a backward pass of their own
    seen: set[Any] = set()
    stack = [t.grad_fn for t in tensors_in(result) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            parameters.add(id(node.variable))
        inside.update(id(p) for p in nodes.get(node, ()) if p.requires_grad)
        stack += [after for after, _ in node.next_functions if after is not None]
    return parameters | inside, inside - parameters, seen
