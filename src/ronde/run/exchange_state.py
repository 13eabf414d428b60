"""The state of a reducer in checkpoints, and refusals where weights differ between workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.plan import REDUCERS, parse_reducer
from ronde.world import ArgumentError, CheckpointError, PlanError

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = [
    "check_can_average",
    "check_save_every",
    "exchange_pieces",
    "exchange_values",
    "exchange_wants",
    "has_state",
]


def check_save_every(run: Parts, save_every: int | None) -> None:
    """Refuse checkpoints between two averages of the weights."""
    exchange = run.strategy.exchange
    if save_every and exchange is not None and save_every % exchange.reducer.every:
        raise ArgumentError(
            f"save_every={save_every}: under plan={run.plan.spec!r}, workers have the same weights "
            f"every {exchange.reducer.every} steps. Give a multiple of it."
        )


def check_can_average(run: Parts) -> None:
    """Refuse an average of weights that differ between workers."""
    if parse_reducer(run.plan.reducer).kind.local and run.world.size > 1:
        raise PlanError(
            f"run.average() does not go with plan={run.plan.spec!r}, under which each worker has "
            "its own weights between two exchanges. Use another reducer."
        )


def has_state(run: Parts) -> bool:
    """Whether the run's reducer has something that a checkpoint must hold. The same on all
    ranks.
    """
    exchange = run.strategy.exchange
    return exchange is not None and bool(exchange.reducer.saved())


def exchange_pieces(run: Parts) -> dict[str, checkpoint.Piece]:
    """This worker's own state of the reducer, as ``name@rank``."""
    exchange = run.strategy.exchange
    saved = {} if exchange is None else exchange.reducer.saved()
    return {f"{name}@{run.world.rank}": checkpoint.piece_of(t, name) for name, t in saved.items()}


def exchange_values(run: Parts) -> dict[str, Any] | None:
    """The plain values that go with :func:`exchange_pieces`; None if there are none."""
    exchange = run.strategy.exchange
    if exchange is None or not has_state(run):
        return None
    return {"reducer": str(exchange.reducer.choice), "names": sorted(exchange.reducer.saved())}


def exchange_wants(
    run: Parts, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[checkpoint.Want], Callable[[], None]]:
    """What this worker needs of a checkpoint's reducer, and what to call once it is there.

    On another number of workers, each gets the mean of all: their sum, divided by their number,
    which is what enters the next step, stays the same.

    Raises:
        CheckpointError: the checkpoint's reducer is another one.
    """
    exchange, me, unsent = run.strategy.exchange, run.world, saved.get("exchange")
    loaded: dict[str, torch.Tensor] = {}

    def put() -> None:
        if exchange is not None:
            exchange.step = run.state.step
            if unsent is not None:
                exchange.reducer.load(loaded)

    if unsent is None:
        return [], put
    if exchange is None or str(exchange.reducer.choice) != unsent["reducer"]:
        now = run.plan.reducer if me.size > 1 else "one worker, which has none"
        again = f"Go on with --reducer {unsent['reducer']} on two workers or more, or start"
        if unsent["reducer"].partition(":")[0] not in REDUCERS:
            again = "This version has no such reducer: start"
        raise CheckpointError(
            f"the checkpoint cannot be continued: it holds what reducer {unsent['reducer']!r} has "
            f"not sent yet, and now it is {now!r}, so that would be lost. {again} a new run with "
            "init= the checkpoint's path."
        )
    ranks = [me.rank] if saved["workers"] == me.size else list(range(saved["workers"]))

    def give(name: str, tensor: torch.Tensor) -> None:
        share = tensor if len(ranks) == 1 else tensor / len(ranks)
        loaded[name] = loaded[name] + share if name in loaded else share.clone()

    wants = []
    for name, rank in itertools.product(unsent["names"], ranks):
        if f"{name}@{rank}" not in shapes:
            raise CheckpointError(f"the checkpoint has no {name!r} of rank {rank}")
        box = checkpoint.Box.whole(shapes[f"{name}@{rank}"])
        wants.append(checkpoint.Want("exchange", f"{name}@{rank}", box, partial(give, name)))
    return wants, put
