"""ZeRO-1: every worker holds the whole model, and the optimizer's state of its own part of the
parameters only.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
Gradients are averaged as in :class:`Replicate`; each worker updates its part, and sends the new
values to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ronde.parallel.batchnorm import batchnorms
from ronde.parallel.ddp import Replicate
from ronde.parallel.strategy import Work
from ronde.plan import Plan
from ronde.world import World

__all__ = ["OptimizerParts", "Zero1", "buckets"]

_BUCKET_BYTES = 25 << 20


def buckets(
    tensors: Sequence[torch.Tensor], limit_bytes: int = _BUCKET_BYTES
) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type, of at most ``limit_bytes`` together or a single tensor; nothing
    empty.

    Example:
        >>> [len(b) for b in buckets([torch.zeros(2), torch.zeros(2), torch.zeros(2),
        ...     torch.zeros(1).double()], 16)]
        [2, 1, 1]
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        if t.numel():
            by_type.setdefault(t.dtype, []).append(t)
    for same in by_type.values():
        run: list[torch.Tensor] = []
        size = 0
        for t in same:
            if run and size + t.nbytes > limit_bytes:
                yield run
                run, size = [], 0
            run.append(t)
            size += t.nbytes
        yield run


class OptimizerParts:
    """Divides an optimizer's parameters over the workers of a group, by bytes, the largest first.

    The optimizer's groups name all parameters at all times, and only during its step those that
    this worker updates: gradient scalers, schedulers and scripts see the optimizer that was built,
    and a parameter that is added later gets a worker too.

    Args:
        optimizer: the script's own; steps of it are narrowed from here on, and the state it has for
            parameters of others is let go.
        group: workers that hold the same parameters; None for all.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        self.optimizer = optimizer
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._owner: dict[torch.Tensor, int] = {}
        self._bytes = [0] * self.size
        self._all: list[list[torch.Tensor]] = []
        self.let_go()
        optimizer.register_step_pre_hook(self._narrow)
        optimizer.register_step_post_hook(self._widen)

    def _assign(self) -> None:
        """Give every parameter that has none a worker; the same ones on every worker."""
        new = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p not in self._owner
        ]
        for p in sorted(new, key=lambda p: -p.nbytes):  # stable: those of one size in their order
            owner = self._bytes.index(min(self._bytes))
            self._bytes[owner] += p.nbytes
            self._owner[p] = owner

    def is_mine(self, parameter: torch.Tensor) -> bool:
        """Whether this worker updates it, and holds its state."""
        return self._owner.get(parameter, self.rank) == self.rank

    def let_go(self) -> None:
        """Drop the state of parameters that others update."""
        self._assign()
        for p in list(self.optimizer.state):
            if not self.is_mine(p):
                del self.optimizer.state[p]

    def _narrow(self, *_: Any) -> None:
        self._assign()
        groups = self.optimizer.param_groups
        self._all = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if self.is_mine(p)]

    def _widen(self, *_: Any) -> None:
        for group, parameters in zip(self.optimizer.param_groups, self._all, strict=True):
            group["params"] = parameters

    @torch.no_grad()
    def exchange(self) -> None:
        """Every worker sends the parameters that it updated to the others. What has no gradient was
        not updated.
        """
        for owner in range(self.size):
            changed = [p for p, o in self._owner.items() if o == owner and p.grad is not None]
            for run in buckets(changed):
                flat = torch.cat([p.reshape(-1) for p in run])
                dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=owner)
                if owner != self.rank:
                    for p, part in zip(
                        run, torch.split(flat, [p.numel() for p in run]), strict=True
                    ):
                        p.copy_(part.view_as(p))
                        del part
                del flat  # before the next one is made


class Zero1(Replicate):
    """Carries ``shard="optimizer"`` out.

    Args:
        group: the workers that divide the optimizer's state among them; None for all.
    """

    def __init__(
        self, plan: Plan, work: Work, me: World, group: dist.ProcessGroup | None = None
    ) -> None:
        self.parts = OptimizerParts(work.optimizer, group)
        super().__init__(
            work.model, me, run_empty=plan.sync_batchnorm and bool(batchnorms(work.model))
        )

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        before = self.parameters
        changed = super().refresh()
        for p in before if changed else ():
            p.grad = None  # of what was frozen: it would be trained on
        return changed

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        self.parts.exchange()

    def loaded(self) -> None:
        """See :meth:`Strategy.loaded`."""
        self.parts.let_go()
