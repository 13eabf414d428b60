"""Reducers for slow links: workers train alone for some steps, then average their weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from ronde.exchange.reducer import Bucket, Members, Reducer, mean_into
from ronde.plan.reducers import ReducerChoice
from ronde.world.meshes import group_of

__all__ = ["DiLoCo", "LocalSteps"]

_OPTIMIZER = "optimizer/"


class LocalSteps(Reducer):
    """``local`` and ``post-local``: the mean of the weights every few steps (Stich 2019; Lin et al.
    2020). Each worker keeps its own optimizer state.

    PyTorch's averagers do the same, but give each parameter a new storage, which shared and frozen
    memory does not survive.
    """

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        super().__init__(choice, members)
        self.every = int(choice.values[0])
        self.first = int(choice.values[1]) if choice.name == "post-local" else 0
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._optimizer: Optimizer | None = None

    def bind(self, parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
        """See :meth:`Reducer.bind`."""
        self._parameters, self._optimizer = parameters, optimizer

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`. A worker trains on its own gradient."""
        if bucket.step < self.first:
            mean_into(bucket.flat, bucket.where.groups["all"], self.members.size)

    def stepped(self, step: int, settle: bool) -> None:
        """See :meth:`Reducer.stepped`."""
        self.drifts = self.drifts or step > self.first
        if self.drifts and (settle or step % self.every == 0):
            self._meet()
            self.drifts = False

    # One exchange for each type: a parameter at a time would pay the latency of the slow link.
    @torch.no_grad()
    def _meet(self) -> None:
        by_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, p in self._parameters.items():
            by_type.setdefault(p.dtype, []).append((name, p))
        for named in by_type.values():
            flat = torch.cat([p.reshape(-1) for _, p in named])
            mean_into(flat, group_of("exchange 0"), self.members.size)
            parts = torch.split(flat, [p.numel() for _, p in named])
            for (name, p), mean in zip(named, parts, strict=True):
                self._agree(name, p, mean.view(p.shape))

    def _agree(self, name: str, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        parameter.copy_(mean)

    def saved(self) -> dict[str, torch.Tensor]:
        """See :meth:`Reducer.saved`."""
        saved, states = dict(self.state), self._optimizer.state if self._optimizer else {}
        for name, p in self._parameters.items():
            for field, value in states.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    saved[f"{_OPTIMIZER}{name}/{field}"] = value
        return saved

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`Reducer.load`."""
        super().load({n: t for n, t in saved.items() if not n.startswith(_OPTIMIZER)})
        assert self._optimizer is not None
        for name, value in saved.items():
            owner, _, field = name.removeprefix(_OPTIMIZER).rpartition("/")
            if name.startswith(_OPTIMIZER) and owner in self._parameters:
                self._optimizer.state[self._parameters[owner]][field].copy_(value)


class DiLoCo(LocalSteps):
    """The mean of how far workers went is the gradient of an outer optimizer, SGD with Nesterov
    momentum (Douillard et al. 2023).
    """

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        for name in bucket.names:  # the weights that this worker sets out from
            if f"{name}/start" not in self.state and name in self._parameters:
                self.state[f"{name}/start"] = self._parameters[name].detach().clone()

    def _agree(self, name: str, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        _, rate, beta = self.choice.values
        start = self.state[f"{name}/start"]
        gradient = start - mean
        momentum = self.state.setdefault(f"{name}/momentum", torch.zeros_like(start))
        momentum.mul_(beta).add_(gradient)
        # Nesterov's step, as torch's SGD takes it
        start.sub_(gradient.add_(momentum, alpha=beta), alpha=rate)
        parameter.copy_(start)
