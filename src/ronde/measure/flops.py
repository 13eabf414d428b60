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

__all__ = ["Flops"]


def _rnn_flops(module: nn.Module, output: Any) -> float:
    """Count a recurrent layer: 2 per multiplication, gates times (input + hidden)."""
    assert isinstance(module, nn.RNNBase)
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
        self.counted = [0.0] * len(chain)
        self._unit, self._before, self._extra = 0, 0.0, 0.0
        self._counter = FlopCounterMode(display=False)
        # Its tracker of modules hangs hooks on gradients, which some models cannot have (one that
        # differentiates by itself); all is counted as one.
        self._counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._handles = [
            m.register_forward_hook(self._recurrent)
            for m in model.modules()
            if isinstance(m, nn.RNNBase)
        ]
        self._start: dict[nn.Module, float] = {}
        self._handles += [
            m.register_forward_pre_hook(
                lambda m, _: self._start.__setitem__(m, self._counter.get_total_flops())
            )
            for m in model.modules()
            if isinstance(m, nn.RNNBase)
        ]

    def _recurrent(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._counter.get_total_flops() == self._start.get(module):
            self._extra += _rnn_flops(module, output)

    def enter(self, unit: int) -> None:
        """``unit`` begins."""
        now = self._counter.get_total_flops() + self._extra
        self.counted[self._unit] += now - self._before
        self._unit, self._before = unit, now

    def __enter__(self) -> Flops:
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
