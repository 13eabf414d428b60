"""Count the floating-point operations of a model's units.

Torch's counter does not know recurrent layers; they are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ronde.measure.model_units import ModelUnit
from ronde.world.tensors import tensors_in


def _rnn_flops(module: nn.RNNBase, output: Any) -> float:
    """2 per multiplication, gates times (input + hidden)."""
    rows = tensors_in(output)[0].numel() / (module.hidden_size * (2 if module.bidirectional else 1))
    weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return 2.0 * rows * weights


class _NoModules:
    """Stands in for torch's ModuleTracker."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Flops:
    """Floating-point operations of each unit's forward pass."""

    def __init__(self, model: nn.Module, chain: Sequence[ModelUnit]) -> None:
        self.counts = [0.0] * len(chain)
        self._unit, self._before, self._extra = 0, 0.0, 0.0
        self._counter = FlopCounterMode(display=False)
        # torch's tracker hooks gradients, which fails in models that differentiate themselves.
        self._counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._start: dict[nn.Module, float] = {}
        self._handles = []
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                self._handles.append(module.register_forward_pre_hook(self._begin))
                self._handles.append(module.register_forward_hook(self._end))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._start[module] = self._counter.get_total_flops()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        if self._counter.get_total_flops() == self._start.get(module):
            self._extra += _rnn_flops(module, output)

    def enter(self, unit: int) -> None:
        """``unit`` starts."""
        now = self._counter.get_total_flops() + self._extra
        self.counts[self._unit] += now - self._before
        self._unit, self._before = unit, now

    def __enter__(self) -> Flops:
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
