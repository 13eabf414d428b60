"""ZeRO-1: every worker holds the whole model, and optimizer state for its part of the parameters.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
Gradients are averaged as in :class:`Replicate`. Each worker updates its part and sends it to all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ronde.parallel.batchnorm import batchnorms
from ronde.parallel.buckets import exchange_packed
from ronde.parallel.ddp import Replicate
from ronde.parallel.strategy import Work
from ronde.plan import Plan
from ronde.world import World
from ronde.world.tensors import local_part

__all__ = ["OptimizerParts", "Zero1"]


class OptimizerParts:
    """Divides an optimizer's parameters over the workers of a group, by bytes, the largest first.

    The optimizer's groups name all parameters, and this worker's only during a step. So gradient
    scalers, schedulers and scripts see the optimizer that was built, and a parameter that is added
    later gets a worker too. ``group``: the workers that hold the same parameters; None for all.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        self.optimizer = optimizer
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._owner: dict[torch.Tensor, int] = {}
        self._bytes = [0] * self.size
        self._all: list[list[torch.Tensor]] = []
        self._steps = 0  # under way: a class's step() may call its parent's, which has hooks too
        self.let_go()
        first = optimizer.register_step_pre_hook(self._narrow)
        # around a step over local parts (fsdp_repairs.step_locally), not inside of it
        hooks: Any = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        hooks.move_to_end(first.id, last=False)
        optimizer.register_step_post_hook(self._widen)

    def _assign(self) -> None:
        """Give every new parameter a worker, the same on all."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        new = [p for p in parameters if p not in self._owner]
        for p in sorted(new, key=lambda p: -p.nbytes):  # stable: equal sizes keep their order
            owner = self._bytes.index(min(self._bytes))
            self._bytes[owner] += p.nbytes
            self._owner[p] = owner

    def is_mine(self, parameter: torch.Tensor) -> bool:
        """Whether this worker updates it, and holds its state."""
        return self._owner.get(parameter, self.rank) == self.rank

    def let_go(self) -> None:
        """Free the state of parameters that others update."""
        self._assign()
        for p in list(self.optimizer.state):
            if not self.is_mine(p):
                del self.optimizer.state[p]

    def _narrow(self, *_: Any) -> None:
        self._steps += 1
        if self._steps > 1:
            return
        self._assign()
        groups = self.optimizer.param_groups
        self._all = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if self.is_mine(p)]

    def _widen(self, *_: Any) -> None:
        self._steps -= 1
        if self._steps:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._all, strict=True):
            group["params"] = parameters

    @torch.no_grad()
    def exchange(self) -> None:
        """Send updated parameters to all; those without a gradient were not updated."""
        for owner in range(self.size):

            def send(flat: torch.Tensor, owner: int = owner) -> None:
                dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=owner)

            changed = [
                local_part(p) for p, o in self._owner.items() if o == owner and p.grad is not None
            ]
            exchange_packed(changed, send, write=owner != self.rank)


class Zero1(Replicate):
    """Carries ``shard="optimizer"`` out over the workers of ``group``; None for all."""

    def __init__(
        self, plan: Plan, work: Work, me: World, group: dist.ProcessGroup | None = None
    ) -> None:
        self.parts = OptimizerParts(work.optimizer, group)
        run_empty = plan.sync_batchnorm and bool(batchnorms(work.model))
        super().__init__(work.model, me, run_empty, plan.reducer)

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        self.parts.exchange()
        super().updated()

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        self.parts.let_go()
