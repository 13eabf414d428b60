"""Carry a plan out: a strategy turns a plan and a model into forward, backward and exchange.

Offers :func:`carry_out` and the registry :data:`STRATEGIES`; :class:`Single` is one device, :class:`Replicate` data
parallelism. Adding a strategy is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from ronde.parallel.base import Compute, Part, Strategy
from ronde.parallel.batchnorm import batchnorms, synchronise
from ronde.parallel.replicate import Replicate
from ronde.parallel.single import Single
from ronde.world import World

__all__ = ["STRATEGIES", "Compute", "Part", "Replicate", "Single", "Strategy", "batchnorms", "carry_out"]


def _data(model: nn.Module, me: World, sync_batchnorm: bool) -> Strategy:
    if me.size == 1:
        return Single(model)
    if sync_batchnorm:
        # A group of its own: its exchanges in the backward pass never queue among DDP's.
        synchronise(model, dist.new_group())
    return Replicate(model, me, run_empty=sync_batchnorm and bool(batchnorms(model)))


STRATEGIES: dict[str, Callable[[nn.Module, World, bool], Strategy]] = {"data": _data}
"""Name of a plan's strategy -> what carries it out."""


def carry_out(strategy: str, model: nn.Module, me: World, sync_batchnorm: bool = False) -> Strategy:
    """The strategy named in a plan, on this worker's copy of the model."""
    return STRATEGIES[strategy](model, me, sync_batchnorm)
