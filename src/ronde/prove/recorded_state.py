"""Records weights, gradients, optimizer state, and what the script changes of them itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ronde.prove.experiment import Experiment
from ronde.prove.trace_writer import TraceWriter
from ronde.prove.values import Array, to_array
from ronde.run.parts import Parts

__all__ = ["StateRecorder"]


class StateRecorder:
    """Model and optimizer of one run, at the moments of a step."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._names: list[str] = []
        self._optimized: set[str] = set()
        self._last_weights: dict[str, Array] = {}
        self._versions: dict[str, int] = {}
        self._generator = np.random.Generator(np.random.PCG64(1))

    def begin(self, names: list[str], optimized: set[str]) -> None:
        """The names of the parameters at ``distribute``, and of those in the optimizer."""
        self._names, self._optimized = names, optimized

    def begin_step(self, run: Parts) -> None:
        """Record weights that the script changed since the last update; in step 1, all."""
        last = self._last_weights
        for name, p in self._trace.owned(run):
            value = to_array(p)
            same = name in last and np.array_equal(last[name], value, equal_nan=True)
            if not last or (name in last and not same):
                self._trace.tensors[f"start|{name}"] = value
        if self._trace.experiment is Experiment.ROUNDED:
            self._perturb(run.model)
        self._versions = {n: p._version for n, p in run.model.named_parameters()}

    def _perturb(self, model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                steps = self._generator.integers(-1, 2, p.numel()).astype(np.float64)
                p.mul_(1.0 + torch.from_numpy(steps).view(p.shape) * 2.0**-52)

    # -- gradients ---------------------------------------------------------------------

    def record_exchanged(self, run: Parts) -> None:
        """Record the exchanged gradients, and parameters that the script has replaced."""
        step, named = self._trace.step, dict(run.model.named_parameters())
        step["lr"] = _learning_rates(run)
        step["rewritten"] = [
            n for n, p in named.items() if p._version != self._versions.get(n, p._version)
        ]
        self._record_gradients(run, "gradient")
        if run.world.size == 1 and (stale := self._stale(run, named)):
            step["stale"] = stale

    def _stale(self, run: Parts, named: dict[str, nn.Parameter]) -> list[str]:
        """Parameters that the optimizer misses because the script replaced them."""
        optimized = {id(p) for g in run.optimizer.param_groups for p in g["params"]}
        # Parameters outside the model are no fault alone: a replaced head may stay.
        has_others = not optimized <= {id(p) for p in named.values()}
        return [
            n
            for n, p in named.items()
            if (p.grad is not None or (has_others and p.requires_grad))
            and id(p) not in optimized
            and (n in self._optimized or n not in self._names)
        ]

    def _record_gradients(self, run: Parts, kind: str) -> None:
        for name, p in self._trace.owned(run):
            if p.grad is not None:
                self._trace.tensors[f"{kind}|{name}"] = to_array(p.grad)

    # -- the update --------------------------------------------------------------------

    def before_update(self, run: Parts) -> None:
        """Record clipped gradients, and the optimizer's settings."""
        if run.plan.clip_norm is not None:
            self._record_gradients(run, "clipped")
        self._trace.step["groups"] = self._groups(run)

    def _groups(self, run: Parts) -> list[dict[str, Any]]:
        """The optimizer's settings, and the parameters of this worker's that it trains."""
        names = {id(p): name for name, p in self._trace.owned(run) if p.requires_grad}
        return [
            {key: value for key, value in group.items() if _is_setting(value) and key != "lr"}
            | {"params": sorted(names[id(p)] for p in group["params"] if id(p) in names)}
            for group in run.optimizer.param_groups
        ]

    def after_update(self, run: Parts) -> None:
        """Record weights, buffers, and the optimizer's state."""
        trace = self._trace
        trace.step["lr_after"] = _learning_rates(run)
        owned, tensors = trace.owned(run), trace.tensors
        self._last_weights = {name: to_array(p) for name, p in owned}
        tensors |= {f"weight|{n}": value for n, value in self._last_weights.items()}
        for name, b in run.model.named_buffers():
            if b.device.type != "meta" and run.strategy.owns(name):
                tensors[f"buffer|{name}"] = to_array(b)
        for name, p in owned:
            for key, value in run.optimizer.state.get(p, {}).items():
                # a piece of a sharded tensor shows in the weights of the next step
                if isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor"):
                    tensors[f"state|{name}|{key}"] = to_array(value)


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(v, int | float) for v in value)
    return isinstance(value, bool | int | float | str)


def _learning_rates(run: Parts) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups if "lr" in group]
