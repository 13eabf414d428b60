"""Resumes from the newest whole checkpoint of a run directory, on any number of workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.run.exchange_state import restore_exchange
from ronde.run.fork import changed_settings, forked
from ronde.run.group import Choice, RunGroup
from ronde.run.persist import file_prefix, restore
from ronde.run.saved_state import check_saved, check_values
from ronde.watch import Resumed, RunDir
from ronde.world import CheckpointError, RondeError, World
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.run.content import CheckpointContent
    from ronde.run.parts import Parts

__all__ = ["resume"]


def _choose(run: Parts, me: World, directory: RunDir) -> Choice:
    """Find the newest whole checkpoint, verified by rank 0, for all runs of a loop."""
    answer: dict[str, Any] = {}
    newest = None
    if me.is_main:
        newest, refused = checkpoint.find_valid(directory.checkpoints, partial(check_saved, run))
        answer = {"refused": refused, "path": None}
        if newest:
            answer |= {
                "path": newest.path.name,
                "folder": str(newest.path.parent.absolute()),
                "state": newest.state,
                "digest": newest.digest,
                "origin": directory.origin,
            }
    answer = broadcast_json(me, answer)
    for text in answer["refused"]:
        run.warn(text)
    if answer["path"] is None and answer["refused"]:
        raise CheckpointError(
            f"nothing to resume in {directory.checkpoints}: no checkpoint there is whole. "
            f"{answer['refused'][0]}"
        )
    return Choice(newest, answer)


def resume(content: CheckpointContent, group: RunGroup, directory: RunDir) -> str:
    """Continue from the newest whole checkpoint. Returns a note."""
    run = content.parts
    me, part = run.world, run.part
    if group.choice is None:
        group.choice = _choose(run, me, directory)
    newest, answer = group.choice.newest, group.choice.answer
    named = f"{directory.name} ({part})" if part else directory.name
    if answer["path"] is None:
        # what the record says of steps before is void
        run.watcher.event(
            Resumed(
                step=0, epoch=0, samples=0, checkpoint="", workers=me.size, written_by_workers=0
            )
        )
        return f"{named} has no checkpoint yet: it starts from the beginning"
    state = answer["state"]["parts"][part] if part else answer["state"]
    with _refusing(answer["path"]):
        if part:
            check_values(run, state)  # as the first run's was, when the checkpoint was chosen
        state, began = _begun(content, answer, state)
        _restore(content, newest, answer, state, file_prefix(part))
    _record(run, me, state, answer)
    if began:
        return f"{named} begins with {began}"
    others = f" (written by {state['workers']} workers)" if state["workers"] != me.size else ""
    return (
        f"resumed {named} at step {state['step']}, epoch {state['epoch'] + 1}, sample "
        f"{state['epoch_samples']}{others}"
    )


def _begun(
    content: CheckpointContent, answer: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    """What counts of a checkpoint's plain values, and a note if it is another run's."""
    origin, changes = answer["origin"], ", ".join(changed_settings(state, content.given))
    if not origin or int(origin.rpartition("@")[2]) != int(answer["path"].removeprefix("step-")):
        if changes:
            content.parts.say(
                f"the script changes {changes}: a resume keeps what the checkpoint has, and a new "
                "run that begins with it (--from) what the script says"
            )
        content.given = state.get("given", content.given)
        return state, ""
    state = forked(state, content.given)
    told = f"; as the script says now: {changes}" if changes else ""
    at = f"epoch {state['epoch'] + 1}, sample {state['epoch_samples']}"
    return state, f"the checkpoint {origin}, {at}{told}"


def _record(run: Parts, me: World, state: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    run.watcher.event(
        Resumed(
            step=state["step"],
            epoch=state["epoch"],
            samples=state["samples"],
            checkpoint=f"checkpoints/{answer['path']}",
            workers=me.size,
            written_by_workers=state["workers"],
        )
    )


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn an error of a library that cannot understand a state into one that says whose it is."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, RondeError):
            raise
        raise CheckpointError(
            f"{name} cannot be loaded ({type(error).__name__}: {error}). Remove it: the run then "
            "continues from the one before."
        ) from error


def _restore(
    content: CheckpointContent,
    newest: checkpoint.Checkpoint | None,
    answer: Mapping[str, Any],
    state: Mapping[str, Any],
    prefix: str,
) -> None:
    """Each worker that sees the verified checkpoint reads its own part of it."""
    run, me = content.parts, content.parts.world
    seen = newest or checkpoint.trust(Path(answer["folder"]) / answer["path"], answer["digest"])
    with contextlib.ExitStack() as stack:
        sources = {}
        if seen:
            for part in ("model", "optimizer", "average"):
                sources[part] = stack.enter_context(seen.source(f"{prefix}{part}"))
        shapes = {
            part: {name: list(e.shape) for name, e in source.entries.items()}
            for part, source in sources.items()
        }
        all_see = all(gather_json(me, seen is not None))
        shapes = shapes if all_see else broadcast_json(me, shapes)
        own = f"{prefix}registered"
        registered = _send_tensors(me, newest.whole(own) if newest else {})
        alone = run.holds_all and me.size == state["workers"] == 1
        drawn = newest.whole("random") if newest and alone else {}
        restore(content, state, shapes, sources, all_see, registered, drawn)
    restore_exchange(run, me, newest, answer, state, prefix)


def _send_tensors(me: World, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rank 0's tensors on every rank, on the CPU."""
    if me.size == 1:
        return tensors
    layout = {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
    return {
        name: checkpoint.from_main(me, tensors.get(name), getattr(torch, dtype), shape)
        for name, (shape, dtype) in broadcast_json(me, layout).items()
    }
