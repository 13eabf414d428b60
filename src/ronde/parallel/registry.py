"""The registry of strategies, one entry per plan family: a new one is a file and a line here."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ronde.parallel.strategy import Single, Strategy, Work
from ronde.plan import Plan
from ronde.world import World

__all__ = ["STRATEGIES", "carry_out"]

# Each plan imports what carries it out when it is asked for: a run on one device needs none of it.


def _replicate(plan: Plan, work: Work, me: World) -> Strategy:
    from ronde.parallel.batchnorm import batchnorms, synchronize_batchnorms
    from ronde.parallel.ddp import Replicate
    from ronde.world.meshes import group_of

    if plan.sync_batchnorm:
        # A group of its own: its exchanges in the backward pass never queue among DDP's.
        synchronize_batchnorms(work.model, group_of("batchnorm"))
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
    if plan.recompute != "none":
        from ronde.parallel import recompute

        recompute.apply(work.model, plan.recompute)
    if plan.offload != "none":
        from ronde.parallel import offload

        offload.apply(plan, work, me)
    if "keras" in sys.modules:
        from ronde.keras import is_keras

        if is_keras(work.model):
            from ronde.keras.keras_refusals import check_keras

            check_keras(work.model, work.optimizer, plan)
    if me.size == 1:
        return Single(work.model)
    from ronde.parallel.optimizer_coupling import check_coupling

    check_coupling(plan, work.optimizer)
    return STRATEGIES[plan.family.split(" ")[0]](plan, work, me)
