"""Records what a step computes, as one number per sample: batches, modules, the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ronde.prove.experiment import Experiment
from ronde.prove.recorded_draws import DrawRecorder
from ronde.prove.trace_writer import Phase, TraceWriter
from ronde.prove.values import cast, count_rows, per_sample, probe
from ronde.run.losses import LossCall
from ronde.world.tensors import map_tensors, named_tensors

__all__ = ["RecordedLoss", "ValueRecorder"]

_MOST_RATES = 64  # of one place: a scheduled rate is another one in each step


class ValueRecorder:
    """Values of the current step that have an axis of samples, and the loss.

    Attributes:
        trace, draws: of the same recorder.
        micro: the micro-batch whose forward pass runs.
    """

    def __init__(self, trace: TraceWriter, draws: DrawRecorder) -> None:
        self.trace, self.draws = trace, draws
        self.micro = 0
        self._calls: dict[tuple[int, str], int] = {}
        self._probe: tuple[Callable[..., Any], tuple[Any, ...], int, int] | None = None

    def begin_step(self) -> None:
        """A step starts."""
        self.micro = 0
        self._calls.clear()

    def record_batch(self, kind: str, parts: list[Any]) -> None:
        """Record a batch's values, and how many rows it has."""
        step, sizes = self.trace.step, self.trace.sizes
        step.setdefault("rows", {})[kind] = [
            count_rows(part, size) if size else 0 for part, size in zip(parts, sizes, strict=True)
        ]
        for i, part in enumerate(parts):
            self._record(kind, "(batch)", part, i)

    def record_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the inputs and outputs of a module of the model."""
        trace = self.trace
        name, run = trace.modules.get(id(module)), trace.run
        if run is None or name is None:
            return
        if trace.phase == Phase.BETWEEN and not name and not module.training:
            trace.note("evaluates", None)
        if not trace.is_forward() or run.strategy.whole_step or run.plan.tensor != 1:
            return
        self.record_output(name or "(model)", output, inputs)

    def record_output(self, name: str, output: Any, inputs: Any = None) -> None:
        """Record what a module or the script's forward function returned."""
        i = self.micro
        call = self._calls[i, name] = self._calls.get((i, name), 0) + 1
        # further calls of a module in one pass say nothing new
        if call > 4:
            return
        suffix = f" (call {call})" if call > 1 else ""
        if inputs is not None:
            self._record("in", name, inputs, i, suffix)
        self._record("out", name, output, i, suffix)

    def _record(self, kind: str, name: str, value: Any, i: int, suffix: str = "") -> None:
        """Record one number per sample of micro-batch ``i``, of every tensor with a batch axis."""
        sizes = self.trace.sizes
        if i >= len(sizes) or not sizes[i]:
            return
        samples = sizes[i]
        for path, tensor in named_tensors(value):
            if not tensor.dim() or tensor.shape[0] != samples or not tensor.numel():
                continue
            if hasattr(tensor, "full_tensor") or tensor.is_sparse:
                continue
            key = f"{kind}|{name}{path}{suffix}"
            shapes, shape = self.trace.step["shapes"], list(tensor.shape[1:])
            if shapes.setdefault(key, shape) != shape:
                shapes[key] = "differ"
            self.trace.tensors[f"{key}|{i}"] = per_sample(tensor, samples)

    def record_dropout(self, rate: float, where: str | None, drops: bool = False) -> None:
        """Record a call of dropout and its rate; ``drops``: it is not switched off."""
        if rate and not drops:
            self.trace.note("dropout", where)
        if self.trace.phase == Phase.STEP:
            rates = self.trace.step["dropout"].setdefault(where or "", [])
            if rate not in rates and len(rates) < _MOST_RATES:
                rates.append(rate)

    # -- the loss ----------------------------------------------------------------------

    def record_arguments(self, values: tuple[Any, ...]) -> None:
        """Record the loss's arguments."""
        trace = self.trace
        run, sizes, micro = trace.run, trace.sizes, self.micro
        if not trace.is_forward() or (run is not None and not run.strategy.holds_result):
            return
        trace.step["calls_loss"] = True
        for i, value in enumerate(values):
            self.record_output(f"(argument {i + 1} of the loss)", value)
        wants_probe = trace.experiment is Experiment.ONE and self._probe is None
        if wants_probe and run is not None and micro < len(sizes):
            detached = map_tensors(lambda t: t.detach().clone(), values)
            self._probe = (run.loss.loss, detached, sizes[micro], trace.step["step"])

    def record_local(self, value: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Record the loss of one micro-batch of this worker."""
        trace, micro = self.trace, self.micro
        holds = trace.run is None or trace.run.strategy.holds_result
        if not trace.is_forward() or micro >= len(trace.sizes) or not holds:
            return
        weight_value = None if weight is None else float(weight)
        local = [float(value.detach()), weight_value, trace.sizes[micro]]
        trace.step["local"].append(local)
        if value.dtype != torch.float64:
            trace.note("float32", str(value.dtype))
        self.micro += 1

    def ask_loss(self) -> None:
        """Ask the loss what kind of function it is, after the training."""
        if self._probe is None:
            return
        loss, values, samples, step = self._probe

        def draw(low: int, high: int) -> None:
            self.draws.use(f"step {step}", low, high)

        with self.trace.hidden():
            self.trace.event("probe", loss=probe(loss, values, samples, draw))


class RecordedLoss(LossCall):
    """The script's forward and loss, with inputs cast and values recorded."""

    def __init__(self, inner: LossCall, recorder: ValueRecorder) -> None:
        super().__init__(inner.loss, inner.forward, inner.reduction)
        self._recorder = recorder

    def arguments(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """See :meth:`LossCall.arguments`."""
        recorder, given = self._recorder, batch
        # A plan may follow the forward pass, and must not see this.
        with torch._C.DisableTorchFunction():
            batch = cast(batch)
        recorder.draws.start_pass(given)
        recorder.draws.mark_pass()
        values = super().arguments(model, batch)
        with torch._C.DisableTorchFunction():
            recorder.record_arguments(values)
        return values

    def check(self, value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`LossCall.check`."""
        checked = super().check(value)
        self._recorder.draws.count()
        with torch._C.DisableTorchFunction():
            self._recorder.record_local(*checked)
        return checked
