"""Carry out a plan: a strategy turns plan and model into forward, backward and exchange.

Offers :func:`carry_out` and the registry :data:`STRATEGIES`, one entry per plan family;
:class:`Single` is one device, :class:`Replicate` data parallelism. A new strategy is one file and
one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from ronde.parallel import offload, optimizer_coupling, recompute
from ronde.parallel.batchnorm import batchnorms, converted, spectral_norms, synchronise
from ronde.parallel.ddp import Replicate
from ronde.parallel.own_calls import own_calls
from ronde.parallel.single import Single
from ronde.parallel.strategy import Compute, Part, Strategy, Work
from ronde.plan import Plan
from ronde.world import World
from ronde.world.meshes import group_of

__all__ = [
    "STRATEGIES",
    "Compute",
    "Part",
    "Replicate",
    "Single",
    "Strategy",
    "Work",
    "batchnorms",
    "carry_out",
    "converted",
    "own_calls",
    "spectral_norms",
]


def _replicate(plan: Plan, work: Work, me: World) -> Strategy:
    if plan.sync_batchnorm:
        # A group of its own: its exchanges in the backward pass never queue among DDP's.
        synchronise(work.model, group_of("batchnorm"))
    run_empty = plan.sync_batchnorm and bool(batchnorms(work.model))
    return Replicate(work.model, me, run_empty, plan.reducer, work.optimizer)


def _shard(plan: Plan, work: Work, me: World) -> Strategy:
    from ronde.parallel.fsdp import shard

    return shard(plan, work, me)


def _pipeline(plan: Plan, work: Work, me: World) -> Strategy:
    from ronde.parallel.pipeline_parallel import PipelineParallel

    return PipelineParallel(plan, work, me)


def _tensor(plan: Plan, work: Work, me: World) -> Strategy:
    from ronde.parallel.tensor_parallel import tensor

    return tensor(plan, work, me)


STRATEGIES: dict[str, Callable[[Plan, Work, World], Strategy]] = {
    "replicate": _replicate,
    "shard": _shard,
    "pipeline": _pipeline,
    "tensor": _tensor,
}
"""A plan's family (the first word of it, for hybrids) -> what carries it out."""


def carry_out(plan: Plan, work: Work, me: World) -> Strategy:
    """Create a plan's strategy on this worker's copy of the model."""
    recompute.apply(work.model, plan.recompute)
    offload.apply(plan, work, me)
    if me.size == 1:
        return Single(work.model)
    optimizer_coupling.check_coupling(plan, work.optimizer, me)
    return STRATEGIES[plan.family.split(" ")[0]](plan, work, me)
