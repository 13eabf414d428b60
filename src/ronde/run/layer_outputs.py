"""Measures the outputs of layers in one step, by hooks that are there in that step only."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from ronde.plan import Plan
from ronde.watch.health_record import IDLE_ROWS
from ronde.world import World
from ronde.world.consensus import gather_json
from ronde.world.tensors import local_part

__all__ = ["LayerOutputs"]

_KINDS = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}
_SATURATED_DISTANCE = 1e-4  # from the end of its range, at which an output is saturated
_COMPILED = "under torch.compile"
_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


class _Layer:
    """What one step's passes of a layer have given on this worker."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.sums: torch.Tensor | None = None  # of squares, elements, saturated ones
        self.positive: torch.Tensor | None = None  # by unit


class LayerOutputs:
    """Hooks on the layers that hold no others.

    Outputs of functions (``F.relu``) are not seen. Where a layer follows a convolution or a
    normalization of channels, its units are channels; else the last dimension.

    Attributes:
        left_out: why layers are not measured, or empty.
        names, kinds: of the layers in forward order, the same on all ranks, once agreed on.
    """

    def __init__(self, model: nn.Module, plan: Plan, me: World) -> None:
        self._me, self._model = me, model
        self._counts_units = plan.tensor == 1  # else ranks hold other units
        self._handles: list[RemovableHandle] = []
        self._layers: dict[str, _Layer] = {}
        self._channels = False
        self._units: list[int] = []
        # measurements since each unit's last positive output
        self._idle: torch.Tensor | None = None
        self.names: list[str] = []
        self.kinds: list[str] = []
        compiled = any(m._compiled_call_impl is not None for m in model.modules())
        self.left_out = _COMPILED if compiled else ""
        if plan.virtual > 1:  # ranks do not tell which layer comes first
            self.left_out = "where a worker holds several stages of a pipeline"

    def open(self) -> None:
        """Measure from now on."""
        self.close()
        self._layers, self._channels = {}, False
        if self.left_out or _compiles():  # a hook would compile again
            return
        for name, module in self._model.named_modules():
            if not any(True for _ in module.children()):
                hook = self._hook(name, module)
                self._handles.append(module.register_forward_hook(hook))

    def close(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str, module: nn.Module) -> Any:
        kind = _KINDS.get(type(module), "other")
        first = isinstance(module, _CHANNELS_FIRST)
        holds = first or any(True for _ in module.parameters())

        @torch.no_grad()
        def measure(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if holds:
                self._channels = first
            if isinstance(output, tuple) and output:  # a recurrent layer's: outputs, last state
                output = output[0]
            elsewhere = isinstance(output, FakeTensor) or hasattr(output, "_ronde_received")
            if not module.training or not isinstance(output, torch.Tensor) or elsewhere:
                return  # a pipeline's other stage measures it
            if output.numel():
                with torch._C.DisableTorchFunction():  # a pipeline follows what the model calls
                    self._measure(name, kind, local_part(output))

        return measure

    def _measure(self, name: str, kind: str, output: torch.Tensor) -> None:
        if not output.is_floating_point():
            return
        unit = 1 if self._channels and output.ndim > 2 else output.ndim - 1
        layer = self._layers.setdefault(name, _Layer(output.shape[unit] if output.ndim else 1))
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(output, dtype=wide).double().square()
        saturated = torch.zeros((), dtype=torch.float64, device=output.device)
        if kind == "tanh":
            saturated += (output.abs() > 1 - _SATURATED_DISTANCE).sum()
        elif kind == "sigmoid":
            saturated += ((output < _SATURATED_DISTANCE) | (output > 1 - _SATURATED_DISTANCE)).sum()
        sums = torch.stack([square, torch.full_like(square, output.numel()), saturated])
        layer.sums = sums if layer.sums is None else layer.sums + sums
        if kind == "relu" and output.ndim and output.shape[unit] == layer.units:
            others = [d for d in range(output.ndim) if d != unit]
            positive = (output.amax(others) if others else output) > 0
            before = layer.positive
            layer.positive = positive if before is None else before | positive

    def agree(self) -> None:
        """Learn the layers of all ranks. A collective, after the first measured passes."""
        mine = [(name, layer.units) for name, layer in self._layers.items()]
        known: dict[str, int] = {}
        for each, compiles in gather_json(self._me, [mine, _compiles()]):
            self.left_out = self.left_out or (_COMPILED if compiles else "")
            for name, units in each:
                known.setdefault(name, units)
        if self.left_out:
            return
        modules = dict(self._model.named_modules())
        self.names, self._units = list(known), list(known.values())
        self.kinds = [_KINDS.get(type(modules[n]), "other") for n in known]

    def sums(self) -> torch.Tensor:
        """Squares, elements, and saturated ones of each layer: float64 of shape (layers, 3)."""
        nothing = torch.zeros(3, dtype=torch.float64, device=self._me.device)
        each = [self._layers[n].sums if n in self._layers else None for n in self.names]
        return torch.stack([nothing if s is None else s for s in each]) if each else nothing[:0]

    def dead(self, exchange: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The fraction of units of each "relu" layer that had no positive output in this
        measurement and the seven before: float64.

        Args:
            exchange: takes the largest values over all ranks, in place.
        """
        sizes = [u for u, k in zip(self._units, self.kinds, strict=True) if k == "relu"]
        names = [n for n, k in zip(self.names, self.kinds, strict=True) if k == "relu"]
        if not names or not self._counts_units:
            return torch.zeros(0, dtype=torch.float64, device=self._me.device)
        flat = torch.zeros(sum(sizes), device=self._me.device)
        for part, name, size in zip(torch.split(flat, sizes), names, sizes, strict=True):
            layer = self._layers.get(name)
            if layer is not None and layer.positive is not None and layer.units == size:
                part.copy_(layer.positive)
        exchange(flat)
        if self._idle is None or len(self._idle) != len(flat):
            self._idle = torch.zeros_like(flat)
        self._idle = torch.where(flat > 0, 0.0, self._idle + 1)
        dead = (self._idle >= IDLE_ROWS).double()
        return torch.stack([part.mean() for part in torch.split(dead, sizes)])

    def first_bad(self) -> str | None:
        """The first layer whose outputs here were not finite."""
        measured = self._layers.items()
        return next(
            (n for n, x in measured if x.sums is not None and not x.sums.isfinite().all()), None
        )

    def describe(
        self, sums: Sequence[float], dead: Sequence[float]
    ) -> tuple[dict[str, list[float | None]], str | None]:
        """The columns of a line, and the first layer whose outputs were not finite.

        Args:
            sums: of all ranks together, flat.
            dead: as :meth:`dead` gave it.
        """
        fractions = iter(dead)
        columns: dict[str, list[float | None]] = {"rms": [], "dead": [], "saturated": []}
        first = None
        for i, (name, kind) in enumerate(zip(self.names, self.kinds, strict=True)):
            square, count, saturated = sums[3 * i : 3 * i + 3]
            if first is None and not math.isfinite(square):
                first = name
            bounded = kind in ("tanh", "sigmoid") and count
            columns["rms"].append(math.sqrt(square / count) if count else None)
            columns["dead"].append(next(fractions, None) if kind == "relu" else None)
            columns["saturated"].append(saturated / count if bounded else None)
        return columns, first


def _compiles() -> bool:
    """Whether anything was compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"].get("unique_graphs"))
