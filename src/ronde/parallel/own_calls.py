"""The script's own calls of a model whose layers communicate: all ranks must make them together.

Passes of ``run.step``, ``run.evaluate`` and the like are Ronde's, and cost a flag here. Before any
other pass the ranks meet over the store: a rank that called the model alone gets an error that
says so, where its first exchange would wait for ever, or pair with another one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ronde.parallel.batchnorm import normalizes_batch
from ronde.plan import Plan
from ronde.world.rendezvous import Rendezvous

__all__ = ["OwnCalls", "own_calls", "wrap_forward"]


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(forward, *args, **kwargs)`` run in place of a module's forward pass.

    Not a hook: a pipeline follows modules that have hooks in another way.
    """
    own = module.__dict__.get("forward")  # set on the module itself, not on its class

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(own or partial(type(self).forward, self), *args, **kwargs)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


class OwnCalls:
    """Where the ranks that hold a model together meet before a forward pass of the script's own.

    Args:
        ranks: who must call the model together.

    Attributes:
        due: the next pass with gradients is the training pass of a script that owns its loop. It
            does not meet, because :meth:`Run.backward` follows on every rank.
        inside: a pass of the script's own is under way, and has met.
        exchanges: whether a pass would communicate now; None for always.
    """

    exchanges: Callable[[], bool] | None = None

    def __init__(self, rendezvous: Rendezvous, plan: Plan, ranks: Sequence[int]) -> None:
        self._rendezvous = rendezvous
        self._ranks = list(ranks)
        whole = len(ranks) == rendezvous.me.size
        must = "all ranks" if whole else f"ranks {', '.join(map(str, ranks))}"
        self._advice = (
            f"Under plan={plan.spec!r}, no rank can call the model alone: its layers communicate, "
            f"so {must} must call it. For a pass on one rank, let all ranks enter 'with "
            "run.whole_model() as model:' and call that model, which communicates nothing."
        )
        self.due = False
        self.inside = False

    def enter(self, name: str = "") -> None:
        """A pass begins: meet, unless Ronde makes it."""
        if self._rendezvous.doing or self.inside:
            return
        if self.exchanges is not None and not self.exchanges():
            return
        if self.due and torch.is_grad_enabled():
            self.due = False
            return
        what = f"the model's {name!r}" if name else "the model"
        self._rendezvous.meet(what, ranks=self._ranks, advice=self._advice)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of the whole model that may be the script's own: met once, not layer by layer."""
        if self.inside or self._rendezvous.doing:
            yield
            return
        self.enter()
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def surround(self, model: nn.Module) -> None:
        """Let ``model(…)`` meet before it runs."""

        def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if self.inside or self._rendezvous.doing:  # a flag, where a context costs more
                return forward(*args, **kwargs)
            with self.passing():
                return forward(*args, **kwargs)

        wrap_forward(model, around)


def own_calls(model: nn.Module, plan: Plan, rendezvous: Rendezvous) -> OwnCalls | None:
    """How the ranks meet before passes of this model. None where a rank can call it alone, or is
    refused at once (a pipeline).
    """
    me = rendezvous.me
    if me.size == 1 or plan.pipeline > 1:
        return None
    if plan.shard in ("gradients", "parameters") and plan.replicas > 1:
        return OwnCalls(rendezvous, plan, range(me.size))
    if plan.tensor > 1 and not plan.sync_batchnorm:
        first = me.rank - me.rank % plan.tensor  # neighbors share layers
        return OwnCalls(rendezvous, plan, range(first, first + plan.tensor))
    norms = [m for m in model.modules() if normalizes_batch(m)]
    if plan.tensor > 1 or (plan.sync_batchnorm and norms):
        together = OwnCalls(rendezvous, plan, range(me.size))
        if plan.tensor == 1:  # statistics are exchanged in training mode only
            together.exchanges = lambda: any(norm.training for norm in norms)
        return together
    return None
