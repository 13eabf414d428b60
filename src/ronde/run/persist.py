"""Writes a Run as a checkpoint, and reads it back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.run import lr_rules
from ronde.run.content import CheckpointContent
from ronde.run.exchange_state import exchange_pieces, exchange_values, exchange_wants, has_state
from ronde.run.script_state import average_wants
from ronde.tables.recipe import Recipe
from ronde.world import CheckpointError
from ronde.world.consensus import gather_or_raise

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = [
    "Write",
    "export_weights",
    "file_prefix",
    "prepare",
    "restore",
]

Tensors = Mapping[str, torch.Tensor]
Copied = Callable[[Mapping[str, Tensors]], Mapping[str, Tensors]]
Write = Callable[[], Path | None]

_WORDS = {
    "order": "what the order of samples permutes",
    "samples": "samples in the data set",
    "epoch_samples": "samples an epoch",
    "seed": "seed",
    "sampler": "the sampler's class",
    "shuffle": "shuffle",
}


def _recipe(run: Parts) -> Recipe | None:
    """The recipe that prepares the data; it goes where the model goes."""
    source: Any = run.data.dataset
    while not isinstance(recipe := getattr(source, "recipe", None), Recipe):
        if (source := getattr(source, "source", None)) is None:
            return None
    return recipe


def _data(run: Parts) -> dict[str, Any]:
    """The facts that decide which samples come next, besides the place in the epoch."""
    order = run.data.order
    recipe = _recipe(run)
    facts: dict[str, Any] = {} if recipe is None else {"recipe": recipe.to_dict()}
    facts |= {
        "samples": order.n,
        "epoch_samples": order.epoch_samples,
        "seed": run.plan.seed,
        "sampler": order.sampler,
        "shuffle": order.shuffle,
        "order": order.kind,
    }
    if run.data.fingerprint is not None:
        facts["fingerprint"] = run.data.fingerprint
    return facts


def _encoded(owner: Any, what: str) -> Any:
    return None if owner is None else checkpoint.encode(owner.state_dict(), what)


def _values(
    run: Parts,
    same: Mapping[str, str],
    optimizer: Mapping[str, Any],
    randomness: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "epoch": run.state.epoch,
        "step": run.state.step,
        "samples": run.state.samples,
        "epoch_samples": run.state.epoch_samples,
        "workers": run.world.size,
        "data": _data(run),
        "plan": run.plan.to_dict(),
        "same_tensors": dict(same),
        "optimizer": dict(optimizer),
        "scheduler": _encoded(run.scheduler, "scheduler"),
        "scaler": _encoded(run.scaler, "gradient scaler"),
        "randomness": dict(randomness),
    }


def prepare(
    contents: Mapping[str, CheckpointContent],
    folder: Path,
    step: int,
    keep: checkpoint.KeepPolicy | None,
    copied: Copied = dict,
    stop: threading.Event | None = None,
    writes: bool | None = None,
) -> Write:
    """Prepare one checkpoint of all runs of a loop. A collective if a worker holds a part only.

    Args:
        contents: part name -> what a run has; the first one's name is empty.
        step: optimizer steps of all of them.
        copied: file name -> tensors, to copies of them, if the training goes on meanwhile.
        stop: once it is set, rank 0 waits no longer for the others.
        writes: whether this worker writes it, if each holds everything; None: rank 0 does.

    Returns:
        Callable: writes it, in any thread: rank 0 alone if it holds everything, else all workers.
        It returns the checkpoint's path on rank 0.
    """
    everything, first = contents.values(), contents[""]
    stateful = any(has_state(each.parts) for each in everything)
    whole = all(each.parts.holds_all for each in everything)
    if stateful or not whole or any(each.registry.items for each in everything):
        first.parts.rendezvous.meet("run.save()")
    own: dict[str, Tensors] = {}
    more: dict[str, dict[str, Any]] = {}
    averaged: dict[str, dict[str, checkpoint.Piece]] = {}
    for part, content in contents.items():
        run = content.parts
        registered, tensors = content.registry.pack(run)
        if tensors:
            own[f"{file_prefix(part)}registered.safetensors"] = tensors
        averages, averaged[part] = content.averages.pack()
        best = content.best.to_dict()
        more[part] = {"registered": registered, "averages": averages, "best": best}
        more[part]["given"] = content.given
        if not part and (ending := content.ending.to_dict()):
            more[part]["ending"] = ending
        if (values := exchange_values(run)) is not None:
            more[part]["exchange"] = values
    if stateful or not whole:
        return _prepare_together(contents, folder, step, keep, more, own, averaged, copied, stop)
    if not (first.parts.world.is_main if writes is None else writes):
        return lambda: None
    drawn, randomness = checkpoint.random_state()
    files: dict[str, Tensors] = {}
    states = {}
    for part, content in contents.items():
        run, prefix = content.parts, file_prefix(part)
        weights, same = checkpoint.model_state(run.model)
        moments, optimizer = checkpoint.optimizer_state(run.model, run.optimizer)
        files[f"{prefix}model.safetensors"] = weights
        files[f"{prefix}optimizer.safetensors"] = moments
        if pieces := averaged[part]:
            files[f"{prefix}average.safetensors"] = {n: p.tensor for n, p in pieces.items()}
        states[part] = {**_values(run, same, optimizer, randomness), **more[part]}
    files = {**files, "random.safetensors": drawn, **own}
    return partial(
        checkpoint.write, folder, step, copied(files), _join(states), keep, first.best.step
    )


def file_prefix(part: str) -> str:
    """What the names of a run's files begin with; nothing for the first run of a loop."""
    return f"{part}." if part else ""


def _join(states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all runs: those of the first, and the others' under ``parts``."""
    others = {part: values for part, values in states.items() if part}
    return {**states[""], "parts": others} if others else states[""]


def _prepare_together(
    contents: Mapping[str, CheckpointContent],
    folder: Path,
    step: int,
    keep: checkpoint.KeepPolicy | None,
    more: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Tensors],
    averaged: Mapping[str, dict[str, checkpoint.Piece]],
    copied: Copied,
    stop: threading.Event | None,
) -> Write:
    me = contents[""].parts.world
    failed: CheckpointError | None = None
    parts: dict[str, dict[str, checkpoint.Piece]] = {}
    states: dict[str, dict[str, Any]] = {}
    drawn: dict[str, torch.Tensor] = {}
    mine: dict[str, Any] = {}
    try:
        drawn, randomness = checkpoint.random_state()
        for part, content in contents.items():
            run = content.parts
            work, prefix = run.work, file_prefix(part)
            weights = checkpoint.model_pieces(run.model, work.tied, run.strategy.owns)
            moments, mine[part] = checkpoint.optimizer_pieces(
                run.model, run.optimizer, work.groups, work.tied
            )
            parts |= {f"{prefix}model": weights, f"{prefix}optimizer": moments}
            if content.averages.items:
                parts[f"{prefix}average"] = averaged[part]
            if has_state(run):
                parts[f"{prefix}exchange"] = exchange_pieces(run)
            states[part] = {**_values(run, work.tied, {}, randomness), **more[part]}
    except CheckpointError as caught:
        failed = caught
    everyone = gather_or_raise(me, mine, failed)
    for part, content in contents.items():
        optimizers = [each[part] for each in everyone]
        groups = content.parts.work.groups
        states[part]["optimizer"] = checkpoint.join_optimizer(groups, optimizers)
    plain = {"random.safetensors": drawn, **own}
    state, best = _join(states), contents[""].best.step
    return checkpoint.prepare_pieces(
        me, folder, step, parts, plain, state, keep, best, copied, stop
    )


def export_weights(run: Parts, path: Path) -> None:
    """Write the model's weights as plain safetensors, with the recipe; rank 0 writes."""
    recipe = _recipe(run)
    about = {"format": "pt"} | ({"recipe": json.dumps(recipe.to_dict())} if recipe else {})
    if not run.holds_all:
        run.rendezvous.meet("run.export(path)")
        pieces = checkpoint.model_pieces(run.model, run.work.tied, run.strategy.owns)
        checkpoint.export_pieces(run.world, pieces, run.work.tied, path, about)
    elif run.world.is_main:
        weights, same = checkpoint.model_state(run.model)
        tied = {name: weights[origin] for name, origin in same.items()}
        checkpoint.export({**weights, **tied}, path, about)


def _refuse(why: str) -> CheckpointError:
    text = f"the checkpoint cannot be continued: {why}. Restore it, or start a new run."
    return CheckpointError(text)


def _check_recipe(now: Recipe, then: Recipe) -> None:
    if now.digest != then.digest:
        raise CheckpointError(
            f"This checkpoint was trained with recipe {then.digest[:8]}, and the script now gives "
            f"{now.digest[:8]}: {now.difference(then)}. Use the recipe of the checkpoint, or start "
            "a new run."
        )


def _check(run: Parts, saved: Mapping[str, Any]) -> None:
    """Refuse another training. Another plan or number of workers is the same training."""
    for name, value in _data(run).items():
        # a checkpoint of an earlier version may lack the sampler and the fingerprint
        then = saved["data"].get(name, value)
        if name == "recipe" and then != value:
            _check_recipe(Recipe.of(value), Recipe.of(then))
            continue
        if name == "fingerprint" and then != value:
            raise CheckpointError(
                "the checkpoint cannot be continued: the data set is not the one that it was "
                f"written with (its fingerprint was {then} then and is {value} now): samples were "
                "added, removed, renamed, changed, or reordered, so those still to come would not "
                "be the same. Restore the data set, or start a new run; init= the checkpoint's "
                "path keeps its weights."
            )
        if then != value:
            then, value = ("none" if v is None else v for v in (then, value))
            raise _refuse(
                f"{_WORDS[name]} was {then} then and is {value} now, so the samples still to come "
                "would not be the same"
            )
    was = saved["plan"]
    drop_last = was.get("drop_last", run.plan.drop_last)
    if drop_last != run.plan.drop_last and run.data.order.epoch_samples % run.plan.batch_size:
        raise _refuse(
            f"drop_last was {drop_last} then and is {run.plan.drop_last} now, so the epoch would "
            "not have the same samples"
        )
    if run.plan.batch == "keep" and was["batch_size"] != run.plan.batch_size:
        raise _refuse(
            f"batch_size was {was['batch_size']} then and is {run.plan.batch_size} now, which is "
            "another training"
        )
    if "batch_schedule" in saved:
        raise _refuse("its run grew the batch by run.grow_batch(), which this version lacks")
    drew = was.get("randomness", "worker")
    if drew != run.plan.randomness:
        run.warn(
            f"the checkpoint's run had randomness={drew!r}, and this one has "
            f"{run.plan.randomness!r}: what forward and loss draw from here on is not what that "
            "run would have drawn"
        )
    without = saved["scheduler"] is None
    if without != (run.scheduler is None):
        raise _refuse(f"it was written with{'out' if without else ''} a scheduler")


def _settle(
    content: CheckpointContent,
    saved: Mapping[str, Any],
    registered: dict[str, torch.Tensor],
    averages: Mapping[str, torch.Tensor],
) -> None:
    """Restore the values that all workers share, after the tensors."""
    run = content.parts
    if run.scheduler is not None:
        run.scheduler.load_state_dict(checkpoint.decode_exact(saved["scheduler"]))
    if run.scaler is not None and saved["scaler"] is not None:
        run.scaler.load_state_dict(checkpoint.decode_exact(saved["scaler"]))
    factor = saved["plan"]["lr_factor"]
    if factor != run.plan.lr_factor:  # batch="grow", on another number of workers
        lr_rules.scale_rates(run.optimizer, run.scheduler, run.plan.lr_factor / factor)
    run.state.epoch, run.state.step = saved["epoch"], saved["step"]
    run.state.samples, run.state.epoch_samples = saved["samples"], saved["epoch_samples"]
    # a checkpoint of an earlier version has nothing registered
    packed = saved.get("registered", {})
    if note := content.best.restore(saved.get("best")):
        run.warn(note)
    if not run.part:
        content.ending.restore(saved.get("ending", {}))
    content.averages.loaded(saved.get("averages", {}), averages)
    content.registry.loaded(run, packed, registered, run.plan.lr_factor / factor)
    content.saved_step = run.watcher.steps_at_start = run.state.step
    run.strategy.loaded()


def restore(
    content: CheckpointContent,
    saved: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, list[int]]],
    sources: Mapping[str, checkpoint.PieceSource],
    all_see: bool,
    drawn: dict[str, torch.Tensor],
) -> None:
    """Continue from a checkpoint, or refuse it. Each worker reads what it holds.

    Args:
        saved: the plain values of a checkpoint.
        shapes: ``"model"``, ``"optimizer"``, ``"average"``, ``"registered"``, and ``"exchange"`` ->
            name -> shape, on every rank.
        sources: the same parts as files; empty on a worker that does not see them.
        all_see: whether every worker sees them.
        drawn: states of random generators, where one worker goes on from one.
    """
    run = content.parts
    _check(run, saved)
    work, owns = run.work, run.strategy.owns
    known = {part: {n: tuple(s) for n, s in named.items()} for part, named in shapes.items()}
    if run.holds_all:  # elsewhere, the others have what is missing here
        gone = known["model"].keys() - run.model.state_dict().keys()
        if gone:
            raise CheckpointError(
                f"the checkpoint is of another model: it has {min(gone)!r}, which this one has not"
            )
    weights, put_weights = checkpoint.model_wants(
        run.model, known["model"].get, saved["same_tensors"], owns
    )
    # groups that the script has added since are known where all of them are held
    groups = checkpoint.group_names(run.model, run.optimizer) if run.holds_all else work.groups
    moments, put_moments = checkpoint.optimizer_wants(
        run.model, run.optimizer, groups, work.tied, known["optimizer"], saved["optimizer"]
    )
    averaged, averages = average_wants(run, saved.get("averages", {}), known["average"])
    registered: dict[str, torch.Tensor] = {}
    kept = [
        checkpoint.Want(
            "registered", name, checkpoint.Box.whole(shape), partial(registered.__setitem__, name)
        )
        for name, shape in known["registered"].items()
    ]
    reduced, put_reduced = exchange_wants(run, saved, known["exchange"])
    wants = [*weights, *moments, *averaged, *kept, *reduced]
    checkpoint.pull(run.world, sources, wants, all_see)
    put_weights()
    put_moments()
    _settle(content, saved, registered, averages)
    put_reduced()
    if drawn:
        checkpoint.restore_random(drawn, saved["randomness"])
