"""The state of a reducer in checkpoints, and refusals where weights differ between workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.plan import REDUCERS, parse_reducer
from ronde.world import ArgumentError, CheckpointError, PlanError, World
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = [
    "check_can_average",
    "check_save_every",
    "exchange_pieces",
    "exchange_values",
    "has_state",
    "restore_exchange",
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


def restore_exchange(
    run: Parts,
    me: World,
    newest: checkpoint.Checkpoint | None,
    answer: Mapping[str, Any],
    state: Mapping[str, Any],
    prefix: str,
) -> None:
    """Continue with a reducer's state. A collective.

    On another number of workers, each gets the mean of all: their sum, divided by their number,
    which is what enters the next step, stays the same.

    Raises:
        CheckpointError: the checkpoint's reducer is another one.
    """
    exchange = run.strategy.exchange
    if exchange is not None:
        exchange.step = run.state.step
    saved = state.get("exchange")
    if saved is None:
        return
    if exchange is None or str(exchange.reducer.choice) != saved["reducer"]:
        now = run.plan.reducer if me.size > 1 else "one worker, which has none"
        again = f"Go on with --reducer {saved['reducer']} on two workers or more, or start"
        if saved["reducer"].partition(":")[0] not in REDUCERS:
            again = "This version has no such reducer: start"
        raise CheckpointError(
            f"the checkpoint cannot be continued: it holds what reducer {saved['reducer']!r} has "
            f"not sent yet, and now it is {now!r}, so that would be lost. {again} a new run with "
            "init= the checkpoint's path."
        )
    ranks = [me.rank] if state["workers"] == me.size else list(range(state["workers"]))
    loaded: dict[str, torch.Tensor] = {}

    def give(name: str, tensor: torch.Tensor) -> None:
        share = tensor if len(ranks) == 1 else tensor / len(ranks)
        loaded[name] = loaded[name] + share if name in loaded else share.clone()

    if newest is None:
        newest = checkpoint.trust(Path(answer["folder"]) / answer["path"], answer["digest"])
    with contextlib.ExitStack() as stack:
        sources = {}
        if newest is not None:
            sources["exchange"] = stack.enter_context(newest.source(f"{prefix}exchange"))
        all_see = all(gather_json(me, newest is not None))
        entries = sources["exchange"].entries if sources else {}
        shapes = {name: list(entry.shape) for name, entry in entries.items()}
        shapes = shapes if all_see else broadcast_json(me, shapes)
        wants = []
        for name in saved["names"]:
            for rank in ranks:
                if f"{name}@{rank}" not in shapes:
                    raise CheckpointError(f"the checkpoint has no {name!r} of rank {rank}")
                box = checkpoint.Box.whole(shapes[f"{name}@{rank}"])
                wants.append(
                    checkpoint.Want("exchange", f"{name}@{rank}", box, partial(give, name))
                )
        checkpoint.pull(me, sources, wants, all_see)
    exchange.reducer.load(loaded)
