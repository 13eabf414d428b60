"""The callbacks of a run, in their order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ronde.run import hooks
from ronde.run.callback import Callback, Callbacks
from ronde.run.callbacks.non_finite import NonFiniteGuard, NonFiniteLoss
from ronde.run.callbacks.upkeep import (
    AveragesWeights,
    BestIsSaved,
    Heartbeats,
    Recording,
    SavesEvery,
)
from ronde.run.content import CheckpointContent
from ronde.run.first_steps_check import FirstStepsCheck
from ronde.run.gather import Gathering
from ronde.run.group import RunGroup
from ronde.run.options import RunOptions
from ronde.run.parts import Parts

__all__ = ["callbacks_of"]


def callbacks_of(
    content: CheckpointContent,
    group: RunGroup,
    options: RunOptions,
    gathering: Gathering,
    recording: Recording,
) -> Callbacks:
    """All callbacks of a run. For each event, they are called in this order."""
    run, studied = content.parts, hooks.observed()
    found: list[Any] = [
        # A launcher waits for the beat: it comes before whatever may wait.
        Heartbeats(),
        # A wrong loss or batch is refused before anything is updated by it.
        *([FirstStepsCheck(run, gathering)] if not studied else []),
        # Before a loss that is not finite ends the run; before the record has the step.
        *_health(run, options),
        # After the checks, which say why a loss is not finite; before anything uses it.
        *([NonFiniteLoss()] if options.on_nan == "error" else []),
        *([NonFiniteGuard()] if options.on_nan == "skip" else []),
        # Weights are compared as the optimizer has left them.
        *(_replicas(run, group, options) if run.world.size > 1 and not studied else ()),
        recording,
        # What the checkpoint needs of an evaluation is recorded before it is due.
        BestIsSaved(content, group),
        SavesEvery(content.save_every, group),
        *_leaves_when_asked(run, group),
        *(_stops_when_asked(run, group) if run.world.size > 1 and not studied else ()),
        *(_pauses(run, group) if not studied else ()),
        # The weights after the step are final.
        AveragesWeights(content),
        # The script's own see a finished step, and a study sees what they did.
        *options.callbacks,
        hooks.observer,
    ]
    return Callbacks(found)


# Imported where they are used: few runs need them.


def _replicas(run: Parts, group: RunGroup, options: RunOptions) -> Iterator[Callback]:
    from ronde.run.callbacks.rank_facts import Replicas

    yield Replicas(run, options.check_replicas, group)


def _stops_when_asked(run: Parts, group: RunGroup) -> Iterator[Callback]:
    if not run.part:
        from ronde.run.callbacks.upkeep import StopsWhenAsked

        yield StopsWhenAsked(run.world, group)


def _health(run: Parts, options: RunOptions) -> Iterator[Callback]:
    if options.watch is not None and run.directory and not run.part and not hooks.observed():
        from ronde.run.callbacks.health import Health

        yield Health(run, options.watch, options.on_nan == "error")


def _pauses(run: Parts, group: RunGroup) -> Iterator[Callback]:
    if (until := os.environ.get("RONDE_UNTIL")) and not run.part:
        from ronde.run.callbacks.pauses_at import PausesAt

        yield PausesAt(until, group)


def _leaves_when_asked(run: Parts, group: RunGroup) -> Iterator[Callback]:
    if os.environ.get("RONDE_LEAVE") == "1" and not run.part:
        from ronde.run.callbacks.upkeep import LeavesWhenAsked

        yield LeavesWhenAsked(run.world, group)
