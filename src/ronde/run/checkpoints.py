"""Saves the runs of one loop, and goes back to what was saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from ronde.run.content import CheckpointContent
from ronde.run.group import Member, RunGroup
from ronde.run.parts import Parts
from ronde.world import CheckpointError, RondeError

__all__ = ["leave", "save", "save_if_due", "save_or_warn", "warn_of_late_save"]


class Saved(Member, Protocol):
    """The loop of a run that can be saved."""

    group: RunGroup
    studied: bool


def save(loop: Saved, wait: bool = False) -> Path | None:
    """Write a checkpoint of all runs of the loop. A collective.

    Args:
        wait: whether to return only when it is written.

    Returns:
        Path: the checkpoint on rank 0, if it waited.
    """
    group, own = loop.group, loop.parts
    contents = group.to_save()
    runs = [content.parts for content in contents.values()]
    for content in contents.values():
        content.averages.check("run.save()")
    if _between_passes(runs):
        raise RondeError(
            "run.save() was called between run.backward() and run.update(): the gradients "
            "would be lost. Call it after update()."
        )
    for run in runs:
        run.check_settled("run.save()")
        # A script may have ended on this rank only; and where nothing is written, the run may end
        # here, and with it the store.
        if not group.saving.ends and own.directory is not None:
            run.rendezvous.meet("run.save()")
    for member in group.members:
        for call in member.callbacks.before_save:
            call(member.parts)
    group.due = False
    for content in contents.values():
        content.saved_step, content.saved_at = content.parts.state.step, time.monotonic()
    if own.directory is None:
        return None
    for run in runs:
        run.watcher.rate.pause()
        run.watcher.flush()  # a resume from this checkpoint does not record these steps again
    if group.memory is not None:
        group.memory.finish()
        group.memory.put_off(group.step)
    with own.rendezvous.call("run.save()"):
        path = group.saving.save(contents, own.directory.checkpoints, group.step, wait)
    for run in runs:
        run.watcher.rate.resume()
    for member in group.members:
        for call in member.callbacks.after_save:
            call(member.parts)
    return path


def save_or_warn(loop: Saved, wait: bool = False) -> None:
    """Save without being asked: a full disk must not end the training."""
    try:
        save(loop, wait)
    except CheckpointError as error:
        loop.parts.warn(f"{error}")


def save_if_due(loop: Saved) -> None:
    """Write a due checkpoint or copy, or leave, where the body of the script's loop has ended."""
    group = loop.group
    if not group.saves_now(loop):
        return
    if group.leaves:
        leave(loop)
    elif group.due:
        save(loop)
    else:
        _copy_to_memory(loop)


def warn_of_late_save(content: CheckpointContent) -> None:
    """Warn once of ``run.save()`` after an epoch's last batch, if a resume repeats something."""
    run = content.parts
    late = run.place.in_epochs and run.epoch_is_over and content.registry.items
    if late and not content.warned_of_save:
        content.warned_of_save = True
        run.warn(
            "run.save() was called after an epoch's last batch: a resume enters this epoch "
            "again, so what the script did before in its body, such as a scheduler's step, is "
            "done twice. Leave it out: save_every=… saves before the body ends, and run.epochs "
            "after it"
        )


def _between_passes(runs: list[Parts]) -> bool:
    return any(run.place.share is not None and run.place.backwards for run in runs)


def _copy_to_memory(loop: Saved) -> None:
    """Keep a copy of all runs in this machine's memory, for a launcher that starts it again."""
    group, began = loop.group, time.perf_counter()
    assert group.memory is not None
    runs = group.runs
    drifts = any(run.strategy.drifts for run in runs)
    if loop.studied or _between_passes(runs) or drifts or not group.whole:
        return
    with loop.parts.rendezvous.call("run.save()"):
        for member in group.members:
            for call in member.callbacks.before_copy:
                call(member.parts)
        busy = group.saving.saver.is_writing
        group.memory.take(group.to_save(), group.step, began, busy)


def leave(loop: Saved) -> None:
    """Save, and end this process as one that was asked to, or that pauses.

    Raises:
        SystemExit: always, but for a pause that cannot be saved.
    """
    from ronde.run.leave import end_process  # few runs are asked to

    group, state = loop.group, loop.parts.state
    group.ending.paused = group.pauses
    if group.pauses:
        save(loop, wait=True)
        loop.parts.say(f"paused at {state.samples:,} samples (step {state.step:,})")
    else:
        save_or_warn(loop, wait=True)
        loop.parts.say(f"asked to leave, after step {state.step}")
    for member in group.members:
        member.finish("paused" if group.pauses else "interrupted")
    end_process(paused=group.pauses)
