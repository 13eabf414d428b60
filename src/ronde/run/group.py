"""Runs that train in one loop: one run directory, one checkpoint for all, one after the other's
gradients kept apart.

A run that ``distribute`` makes before the first step of the one before it joins its group. A run
that is made later is a training of its own, in a directory of its own.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ronde.loader import Feed
from ronde.run.callback import Callbacks
from ronde.run.content import CheckpointContent, Ending
from ronde.run.parts import Parts
from ronde.run.saving import Saving
from ronde.watch import RunDir, check_name
from ronde.world import ArgumentError, CheckpointError, RondeError, World
from ronde.world.consensus import ask_main

if TYPE_CHECKING:
    from ronde import checkpoint
    from ronde.run.memory_copies import MemoryCopies

__all__ = [
    "Choice",
    "RunGroup",
    "current",
    "end_process",
    "leave",
    "open_run_dir",
    "save",
    "save_if_due",
    "save_or_warn",
    "warn_of_late_save",
]

_groups = 0  # that this process has made
_latest: weakref.ref[RunGroup] | None = None


class Choice:
    """The checkpoint that a group resumes from, chosen once.

    Attributes:
        newest: on rank 0, the checkpoint; None if there is none.
        answer: the same facts on every rank: path, folder, digest and state.
    """

    def __init__(self, newest: checkpoint.Checkpoint | None, answer: Mapping[str, Any]) -> None:
        self.newest = newest
        self.answer = answer

    @property
    def parts(self) -> list[str]:
        """Names of the runs in it after the first."""
        return list(self.answer["state"].get("parts", {})) if self.answer["path"] else []


class Member(Protocol):
    """The loop of one run, as the group of its runs sees it."""

    parts: Parts
    content: CheckpointContent
    callbacks: Callbacks
    feed: Feed
    leaves_out: bool  # steps, which the other runs would have seen

    def end_epoch(self) -> None:
        """Count the epoch."""

    def finish(self, status: str) -> None:
        """The run has ended."""

    def at_exit(self) -> None:
        """The process ends."""


class RunGroup:
    """The runs of one loop.

    Args:
        directory: where all of them write; None for nowhere.
        resumes: whether they resume from it.

    Attributes:
        choice: the checkpoint to resume from, once it is chosen.
        due: whether a checkpoint is written as soon as the loop's body has ended.
        leaves: whether the process ends then, because it was asked to.
        pauses: whether that is a pause at a number of samples.
        ending: how the runs end before their last epoch.
        alone: whether it has one run.
        saving: writes the checkpoints.
        memory: keeps copies in memory; None where nothing would go on from them.
    """

    def __init__(self, directory: RunDir | None, resumes: bool) -> None:
        global _groups, _latest
        _groups += 1
        _latest = weakref.ref(self)
        self.number = _groups
        self.directory = directory
        self.resumes = resumes
        self.choice: Choice | None = None
        self.due = self.leaves = self.pauses = False
        self.ending = Ending()
        self.alone = True
        self.saving = Saving()
        self.memory: MemoryCopies | None = None
        # A run holds its group, and a cycle would keep loading processes: see Run.port. A group of
        # several holds them until all have ended, because each checkpoint has all of them.
        self._members: dict[str, weakref.ref[Member]] = {}
        self._held: list[Member] = []
        # The outermost open reading.
        self._leading: tuple[weakref.ref[Member], object] | None = None
        self.readings = 0
        self._completed_at = -1  # readings begun when a loop over epochs ended
        self._checked = False

    # -- members -----------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """The runs' loops, in the order of their ``distribute``."""
        return [member for ref in self._members.values() if (member := ref()) is not None]

    @property
    def runs(self) -> list[Parts]:
        """The runs, in this order."""
        return [member.parts for member in self.members]

    @property
    def contents(self) -> list[CheckpointContent]:
        """What checkpoints hold of them."""
        return [member.content for member in self.members]

    @property
    def whole(self) -> bool:
        """Whether all of its runs are there."""
        return len(self.runs) == len(self._members)

    @property
    def first(self) -> Parts | None:
        """The run that owns the directory."""
        return self.runs[0] if self._members else None

    def name_part(self, name: str | None, keeps_best: bool, leaves_out: bool) -> str:
        """The name of the next run in checkpoints and in the record; empty for the first.

        Args:
            keeps_best, leaves_out: whether it was given ``keep_best`` or ``on_nan="skip"``, which
                no run of several in a loop can have.
        """
        if not self._members:
            return ""
        part = name or str(len(self._members) + 1)
        check_name(part)
        if keeps_best or any(content.best.metric for content in self.contents):
            raise ArgumentError(
                f"keep_best cannot be used by runs that train in one loop, as {part!r} does with "
                "another: a checkpoint has all of them, and the best of one is not the best of "
                "another. Leave it out, and call run.save() or run.export() after the evaluation "
                "that was the best."
            )
        if leaves_out or any(member.leaves_out for member in self.members):
            raise ArgumentError(
                f"on_nan='skip' cannot be used by runs that train in one loop, as {part!r} does "
                "with another: what one leaves out, the others have seen. Use on_nan='error'."
            )
        if part in self._members:
            raise ArgumentError(f"name={part!r}: another run of this loop has this name already.")
        return part

    def takes(self, name: str | None) -> bool:
        """Whether a new run joins: no run has trained yet, or the checkpoint has its part."""
        runs = self.runs
        if len(runs) < len(self._members) or not runs or any(r.place.ended for r in runs):
            return False
        if self.choice is not None and self.choice.answer["path"]:
            return (name or str(len(runs) + 1)) in self.choice.parts
        return not any(run.state.step for run in runs)

    def add(self, member: Member) -> None:
        """Take in a run."""
        self._members[member.parts.part] = weakref.ref(member)
        if len(self._members) > 1:
            self.alone, self._held = False, self.members
        atexit.register(member.at_exit)

    def to_save(self) -> dict[str, CheckpointContent]:
        """Part name -> what a run has, for a checkpoint of all."""
        members = self.members
        if len(members) < len(self._members):
            raise RondeError(
                "run.save(): another run of this loop is gone, and a checkpoint has all of them. "
                "Keep its variable until the last save."
            )
        return {member.parts.part: member.content for member in members}

    def release(self, member: Member) -> None:
        """Let go of a run that has ended; of those that hold each other, after the last."""
        atexit.unregister(member.at_exit)  # it would hold the model and the data
        if all(run.place.ended for run in self.runs):
            self._held = []
            self.saving.free()

    # -- gradients ---------------------------------------------------------------------

    @contextmanager
    def gradients_of(self, run: Parts) -> Iterator[None]:
        """Within it, a backward pass leaves gradients in the parameters of ``run`` only.

        A generator's loss flows through the discriminator. Plain loops zero what that leaves there.
        Here it would differ between workers: nothing exchanges it.
        """
        own = {id(p) for p in run.strategy.parameters}
        others = [p for r in self.runs if r is not run for p in r.strategy.parameters]
        kept = [(p, p.grad) for p in others if id(p) not in own]
        for p, _ in kept:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad

    def announce(self) -> None:
        """Tell synchronized batch normalization whether the next forward pass has samples here."""
        runs = [r for r in self.runs if getattr(r.strategy, "run_empty", False)]
        shares = [r.place.share for r in self.runs]
        present = {share.samples > 0 for share in shares if share is not None}
        if len(present) > 1 and any(r.plan.sync_batchnorm for r in runs):
            raise RondeError(
                "sync_batchnorm=True: this worker has samples of one run's batch and none of "
                "another's, so the statistics would count the wrong ones. Give the runs the same "
                "batch sizes, or let one share the other's batches: ronde.distribute(…, data=run)."
            )
        for run in runs:
            run.strategy.expect(False not in present)

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Within it, trial passes of a new run may call the other runs' models: a generator's
        loss calls the discriminator, whose batch normalization counts.
        """
        kept = [(b, b.clone()) for run in self.runs for b in run.model.buffers()]
        yield
        for buffer, value in kept:
            buffer.data.copy_(value)

    # -- the loop ----------------------------------------------------------------------

    def begin_reading(self, member: Member) -> object:
        """A loop over ``run.batches()`` begins; returns a token for :meth:`end_reading`."""
        self.readings += 1
        self._check_parts()
        token = object()
        if self._leading is None or self._leading[0]() in (member, None):
            self._leading = (weakref.ref(member), token)
        return token

    def end_reading(self, token: object) -> None:
        """The loop has ended, or was left."""
        if self._leading is not None and self._leading[1] is token:
            self._leading = None

    def _check_parts(self) -> None:
        """Refuse a checkpoint with runs that the script has not made."""
        if self._checked:
            return
        self._checked = True
        missing = [p for p in self.choice.parts if p not in self._members] if self.choice else []
        if missing:
            raise CheckpointError(
                f"the checkpoint cannot be continued: it holds {len(missing)} more run"
                f"{'s' if len(missing) > 1 else ''} of this loop ({', '.join(map(repr, missing))}) "
                "than ronde.distribute has made. Make all of them before the first step, under "
                "their names then and in their order, or start a new run."
            )

    def complete(self) -> None:
        """A loop over epochs has ended by itself."""
        self._completed_at = self.readings

    def ends_with(self, readings: int) -> bool:
        """Whether a loop that is closed now, and began its epoch at ``readings``, ends because the
        one beside it in ``zip`` has.
        """
        return self._completed_at == self.readings > readings

    # -- checkpoints -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps of all runs: the number of a checkpoint."""
        return sum(run.state.step for run in self.runs)

    @property
    def is_unsaved(self) -> bool:
        """Whether a run has trained since the last checkpoint."""
        return any(each.parts.state.step != each.saved_step for each in self.contents)

    def saves_now(self, member: Member) -> bool:
        """Whether a checkpoint, or a copy in memory, is due where the body of the loop has ended:
        its outermost reading takes the next batch, or has no further one.
        """
        waits = self.due or self.leaves
        if not waits and (self.memory is None or not self.memory.is_due(self.step)):
            return False
        leads = self._leading is not None and self._leading[0]() is member
        between = any(run.place.backwards and run.place.share for run in self.runs)
        return self.alone or (leads and not between)

    def stop(self, reason: str) -> None:
        """The training is over where the body of the loop ends. The same on all ranks."""
        self.ending.stopped, self.due = reason, True

    def in_epochs(self) -> bool:
        """Whether a run is inside its loop over epochs."""
        return any(run.place.in_epochs for run in self.runs)


# -- saving ----------------------------------------------------------------------------


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


def end_process(paused: bool) -> NoReturn:
    """End this process, with the status that means *again*.

    Args:
        paused: whether that was planned: a launcher with restarts does not go on by itself.

    Raises:
        SystemExit: always.
    """
    from ronde.world.whole_file import AGAIN

    if errors := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(errors).with_suffix(".again").write_text("paused" if paused else "")
    raise SystemExit(AGAIN)


# -- of a process ----------------------------------------------------------------------


def current() -> RunGroup | None:
    """The group of the last ``distribute``."""
    return _latest() if _latest is not None else None


def open_run_dir(me: World, name: str | None, alone: bool = False) -> tuple[RunDir | None, bool]:
    """This run's directory, chosen by rank 0 or the launcher, and whether it is resumed. A
    collective.

    Args:
        alone: whether the run is in no :class:`RunGroup`, and counts by itself.
    """
    global _groups
    from ronde.watch import claim_run_dir, lock_run, script_stem  # of a new training, on rank 0

    def choose() -> dict[str, Any]:
        base, of_launcher = os.environ.get("RONDE_RUNS", "runs"), os.environ.get("RONDE_RUN_DIR")
        resume = os.environ.get("RONDE_RESUME") == "1"
        if base == "none" and not of_launcher:
            return {"path": None, "resume": False}
        if not of_launcher:
            run = claim_run_dir(Path(base), name, script_stem(), resume)
            lock_run(run)
            return {"path": str(run.path.absolute()), "resume": resume}
        # The launcher made it. Later runs of the same script get directories beside it.
        number = _groups + 1
        path = Path(of_launcher if number == 1 else f"{of_launcher}.{number}")
        if number > 1 and RunDir(path).logs.exists():  # which launchers make
            raise CheckpointError(
                f"{path} belongs to another run, and training {number} of {of_launcher} would "
                "write there. Choose another --name."
            )
        path.mkdir(exist_ok=True)
        if number > 1:  # the launcher holds the first
            lock_run(RunDir(path))
        return {"path": str(path), "resume": resume}

    answer = ask_main(me, choose)
    _groups += alone
    return (RunDir(Path(answer["path"])) if answer["path"] else None), answer["resume"]
