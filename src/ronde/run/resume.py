"""Resumes from the newest whole checkpoint of a run directory, on any number of workers; or begins
a new run with a checkpoint of another one (``ronde run --from``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ronde import checkpoint
from ronde.checkpoint.manifest import step_of
from ronde.run.group import Choice, RunGroup
from ronde.run.persist import file_prefix, restore
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
    if not origin or int(origin.rpartition("@")[2]) != step_of(answer["path"]):
        if changes:
            content.parts.say(
                f"the script changes {changes}: a resume keeps what the checkpoint has, and a new "
                "run that begins with it (--from) what the script says"
            )
        content.given = state.get("given", content.given)
        return state, ""
    state = forked(state, content.given)
    differences = f"; as the script says now: {changes}" if changes else ""
    at = f"epoch {state['epoch'] + 1}, sample {state['epoch_samples']}"
    return state, f"the checkpoint {origin}, {at}{differences}"


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
            for part in ("model", "optimizer", "average", "registered", "exchange"):
                sources[part] = stack.enter_context(seen.source(f"{prefix}{part}"))
        shapes = {
            part: {name: list(e.shape) for name, e in source.entries.items()}
            for part, source in sources.items()
        }
        all_see = all(gather_json(me, seen is not None))
        shapes = shapes if all_see else broadcast_json(me, shapes)
        alone = run.holds_all and me.size == state["workers"] == 1
        drawn = newest.whole("random") if newest and alone else {}
        restore(content, state, shapes, sources, all_see, drawn)


# -- the form of plain values ----------------------------------------------------------
# What is wrong deeper inside ends in the error of whoever loads it, see _refusing.

_COUNTS = {"epoch": 0, "step": 0, "samples": 0, "epoch_samples": 0, "workers": 1}
_MAPPINGS = ("data", "plan", "same_tensors", "optimizer", "randomness")
_VALUES = {
    "data": ("samples", "epoch_samples", "seed", "shuffle"),
    "plan": ("batch_size", "lr_factor"),
    "optimizer": ("kind", "groups", "values"),
    "randomness": ("numpy", "python"),
}


def _complaints(run: Parts, saved: Mapping[str, Any]) -> Iterator[str]:
    for name, least in _COUNTS.items():
        count = saved.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            yield f"{name} is {count!r:.60}, expected a whole number, {least} or more"
    for name in _MAPPINGS:
        if not isinstance(saved.get(name), dict):
            yield f"{name} is {saved.get(name)!r:.60}, expected a mapping"
    for owner, names in _VALUES.items():
        for name in names:
            if name not in saved[owner]:
                yield f"{owner} has no {name}"
    for name in ("scheduler", "scaler"):
        if name not in saved:
            yield f"{name} is missing"
    order = run.data.order
    if order.ends(0) is None and saved["epoch_samples"] > order.epoch_samples:
        yield f"epoch_samples is {saved['epoch_samples']}, an epoch has {order.epoch_samples}"


def check_saved(run: Parts, newest: checkpoint.Checkpoint) -> None:
    """Check that a checkpoint has the parts, and its plain values the form, that this run writes.

    Raises:
        CheckpointError: names the first value that is wrong.
    """
    parts = {*newest.tensors, *(file.removesuffix(".safetensors") for file in newest.files)}
    for part in ("model", "optimizer", "random"):
        if part not in parts:
            raise CheckpointError(f"its manifest lists no file of the part {part!r}")
    check_values(run, newest.state)


def check_values(run: Parts, saved: Mapping[str, Any]) -> None:
    """Check that plain values have the form that this run writes.

    Raises:
        CheckpointError: names the first value that is wrong.
    """
    wrong = next(_complaints(run, saved), None)
    if wrong is not None:
        raise CheckpointError(wrong)


# -- a fork ----------------------------------------------------------------------------


def _changes(
    saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """For each group in a checkpoint: what its script gave, and what this one gives otherwise."""
    changes = []
    for then, now in zip(saved.get("given", ()), given, strict=False):
        changes.append((then, {k: v for k, v in now.items() if k in then and v != then[k]}))
    return changes


def changed_settings(saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that this script gives otherwise than that of the checkpoint, as phrases."""
    return [
        f"{name} {_shown(then[name])} → {_shown(value)}"
        + (f" (group {i})" if len(given) > 1 else "")
        for i, (then, changed) in enumerate(_changes(saved, given))
        for name, value in changed.items()
    ]


def forked(saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint's plain values for a new run.

    A setting of the optimizer that the script gives otherwise than the script of the checkpoint
    did is the new script's. A learning rate multiplies the whole schedule.

    Args:
        given: the script's :func:`~ronde.run.options.given_settings`.

    Raises:
        CheckpointError: the groups' learning rates change by several factors.
    """
    state = {**saved, "best": None, "ending": {}}
    ratios: list[float] = []
    groups = [*saved["optimizer"]["groups"]]
    for i, (then, changed) in enumerate(_changes(saved, given)):
        rate = changed.pop("lr", then["lr"])
        if then["lr"]:
            ratios.append(rate / then["lr"])
        elif rate:
            raise CheckpointError(
                f"the learning rate of the optimizer's group {i} was 0 then and is {rate:g} now, "
                "and a fork multiplies the schedule. Leave it at 0."
            )
        groups[i] = {**groups[i], "settings": {**groups[i]["settings"], **changed}}
    if ratios:
        if not all(math.isclose(ratio, ratios[0], rel_tol=1e-9) for ratio in ratios):
            factors = ", ".join(f"× {ratio:g}" for ratio in ratios)
            raise CheckpointError(
                "the learning rates of the optimizer's groups change by several factors "
                f"({factors}), and a fork multiplies the whole schedule. Change all of them by one "
                "factor."
            )
        # as a batch that grows scales the rates, with all copies that schedulers have of them
        plan = saved["plan"]
        state["plan"] = {**plan, "lr_factor": plan["lr_factor"] / ratios[0]}
    state["optimizer"] = {**saved["optimizer"], "groups": groups}
    return state


def _shown(value: Any) -> str:
    value = checkpoint.decode_exact(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
