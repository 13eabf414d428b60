"""The loop of one run: epochs, batches, and where the run is in them."""

from __future__ import annotations

import dis
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from ronde.data import stage
from ronde.loader import Feed, first_few, too_many
from ronde.plan import Layout, Share, shares
from ronde.run import checks
from ronde.run.callback import Callbacks
from ronde.run.content import CheckpointContent
from ronde.run.group import RunGroup, leave, save, save_if_due, save_or_warn
from ronde.run.parts import MicroBatches
from ronde.run.step import OptimizerStep
from ronde.world import ArgumentError, FeedError, RondeError, World
from ronde.world.consensus import gather_json
from ronde.world.rendezvous import counted
from ronde.world.tensors import map_leaves

__all__ = ["Loop", "gather_skipped", "on_device", "shows_breaks", "skip_report", "to_device"]

T = TypeVar("T")
Shares = Callable[[], Iterator[Share]]
_SAVE_AT_LEAST_SECONDS = 60.0
_NO_BREAKS = (
    "the loop over run.epochs was left, and this Python does not show whether by break, return, or "
    "an error: a resume trains on. Call run.stop(reason) to end the training"
)


class Loop:
    """Leads a script through its epochs and batches. Nothing holds it but its run and those that
    follow it, so that loading processes end with the run.

    Args:
        source: the loop of the run whose batches this one takes, or None.
        in_lists: whether a batch is always a list of micro-batches.
        leaves_out: whether steps may be left out (``on_nan``).
        studied: whether a study watches this process.

    Attributes:
        is_reading: whether the script is in a loop: loading threads and processes stay meanwhile.
        followers: the loops that take this one's batches.
        feed: reads the batches.
        evaluations: the run's ``Evaluations``, from the first on.
    """

    def __init__(
        self,
        content: CheckpointContent,
        group: RunGroup,
        callbacks: Callbacks,
        step: OptimizerStep,
        source: Loop | None,
        *,
        in_lists: bool,
        leaves_out: bool,
        studied: bool,
    ) -> None:
        parts = content.parts
        self.parts, self.content, self.group, self.callbacks = parts, content, group, callbacks
        self.step, self.studied, self.leaves_out = step, studied, leaves_out
        self.is_reading = False
        self.followers: list[weakref.ref[Loop]] = []
        self._rendezvous = parts.rendezvous
        self.evaluations: Any = None
        self._source = source
        self._lists = parts.plan.accumulation > 1 or in_lists
        self.feed = Feed(
            parts.data.dataset,
            parts.data.order,
            parts.data.settings,
            parts.plan.seed,
            say=parts.report,
            compares=parts.world.size > 1 and parts.data.fingerprint is None and not studied,
        )
        self._loops = 0  # calls of epochs() so far
        self._reading: weakref.ref[Generator[Any, None, None]] | None = None  # the last batches()
        self._left = ""  # where the script left the loop, if in the middle of an epoch
        if source is not None:
            source.followers.append(weakref.ref(self))
            source.step.needs_rows = True
        group.add(self)

    # -- epochs ------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """See :meth:`Run.epochs`."""
        if not checks.is_whole(n) or n < 0:
            raise ArgumentError(f"run.epochs({n!r}): expected a number of epochs, 0 or more.")
        self._refuse_follower(f"run.epochs({n})")
        content, group, place = self.content, self.group, self.parts.place
        state, watcher = self.parts.state, self.parts.watcher
        watcher.epochs, watcher.total_steps = n, n * self.parts.steps_per_epoch
        if state.epoch >= n and state.step:
            self.parts.say(f"nothing left to train: {state.epoch} of {n} epochs are done")
        self._loops += 1
        this_loop, complete = self._loops, False
        if this_loop <= group.ending.loops.get(self.parts.part, 0):
            self.parts.say("nothing left to train: the script left run.epochs before the resume")
            return
        if group.ending.stopped:
            self.parts.say(f"nothing left to train: stopped ({group.ending.stopped})")
        self.is_reading = True
        try:
            while self.goes_on(n):
                epoch = state.epoch
                place.in_epochs, place.readings = True, group.readings
                try:
                    yield epoch
                except GeneratorExit:
                    complete = group.ends_with(place.readings)
                    if not complete and not shows_breaks():
                        self.parts.warn(_NO_BREAKS)
                    elif not complete and is_left_by_script():
                        group.ending.loops[self.parts.part] = this_loop
                        group.due = True
                    raise
                finally:
                    place.in_epochs = False
                    if complete and state.epoch == epoch:
                        self.end_epoch()
                if state.epoch == epoch and (not group.ending.stopped or self.parts.epoch_is_over):
                    self.end_epoch()
                unsaved = time.monotonic() - content.saved_at
                if not group.alone:
                    group.due = group.due or unsaved >= _SAVE_AT_LEAST_SECONDS
                elif group.leaves and self.goes_on(n):
                    leave(self)
                elif group.due:
                    save(self)
                elif content.save_every is None and unsaved >= _SAVE_AT_LEAST_SECONDS:
                    save_or_warn(self)
            group.complete()
            complete = True
        finally:
            # An abandoned loop may be collected later: it must not end another loop's loading.
            if this_loop == self._loops:
                self.end_loading()
            if complete:
                self._complete()

    def goes_on(self, n: int) -> bool:
        """Whether another epoch follows, of ``n`` in all."""
        return self.parts.state.epoch < n and not self.group.ending.stopped

    def end_epoch(self) -> None:
        """The epoch has ended: count it."""
        for call in self.callbacks.epoch_ended:
            call(self.parts)
        self.parts.state.epoch += 1
        self.parts.state.epoch_samples = 0

    def _complete(self) -> None:
        """The loop over epochs has ended: by itself, or because the one beside it in zip() has."""
        group = self.group
        group.saving.settle(group.contents)
        if group.in_epochs():
            group.due = group.due or group.is_unsaved
        elif group.is_unsaved or group.due:
            save_or_warn(self, wait=True)
        self.finish("completed")

    # -- batches -----------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """See :meth:`Run.batches`."""
        self._refuse_follower("run.batches()")
        reading = self._tracked_batches()
        self._reading = weakref.ref(reading)
        return reading

    def _tracked_batches(self) -> Generator[Any, None, None]:
        if self.group.ending.stopped:
            return
        token = self.group.begin_reading(self)
        for follower in self._following():
            follower.parts.strategy.start_epoch()
        try:
            yield from self._read_batches()
        finally:
            state = self.parts.state
            if state.epoch_samples and not self.parts.epoch_is_over:
                self._left = f"in epoch {state.epoch + 1}, after {state.epoch_samples} samples"
            self.group.end_reading(token)

    def _read_batches(self) -> Generator[Any, None, None]:
        run, state, order = self.parts, self.parts.state, self.parts.data.order
        current = self._begin_epoch()
        draws = self.step.draws
        with draws.reading():
            for share, micros in draws.aside(self._timed(self.feed.read(current))):
                if run.place.share is not None:
                    raise RondeError(
                        "run.batches() went on to the next batch before run.step(batch) or "
                        "run.update() was called for the last one: every batch takes one optimizer "
                        "step."
                    )
                if not self.takes_more():
                    return
                if (facts := self.feed.take_facts()) is not None:
                    mixing = checks.check_same_samples(run.world, facts, "run.batches")
                    if mixing:
                        run.warn(mixing, differs=True)
                group = self.group
                if group.due or group.leaves or group.memory is not None:
                    save_if_due(self)
                if group.ending.stopped:
                    return
                for given in self.items(self.hand_out(share, micros)):
                    yield given
                    del given
        save_if_due(self)
        skipped = gather_skipped(self.feed, run.plan.layout, run.world)
        if report := skip_report(skipped, order.epoch_samples, "replaced by others"):
            run.warn(f"epoch {state.epoch + 1}: {report}")
        if run.plan.drop_last and run.place.share is None:
            state.epoch_samples = order.epoch_samples  # the rest of the epoch is dropped

    def _timed(self, batches: Iterator[T]) -> Iterator[T]:
        """Tells the heartbeat how long each batch was waited for."""
        beat = self._rendezvous.heartbeat
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            beat.loaded(time.perf_counter() - begun)
            if batch is None:
                return
            yield batch
            del batch

    def _begin_epoch(self) -> Shares:
        """What the feed reads in this epoch."""
        self.is_reading = True
        run = self.parts
        state, plan, order, watcher = run.state, run.plan, run.data.order, run.watcher
        if run.epoch_is_over and not run.place.in_epochs:
            self.end_epoch()  # the script has its own loop over epochs
        run.place.share = None  # a loop that was left before its last step may have set it
        epoch = state.epoch
        checks.check_length(run.data, epoch)
        if self._left and not self.studied:
            call = f"run.batches() after it had left the loop {self._left}"
            self._left = ""
            run.rendezvous.meet(call)
        with run.rendezvous.call("run.batches()"):
            run.strategy.start_epoch()
        ends = order.ends(epoch)
        if order.draw is not None:
            checks.check_draw(run.world, order, epoch, "run.batches")
        share_args = (
            order.samples_in(epoch),
            plan.batch_size,
            plan.layout.place(run.world.rank).replica,
            plan.replicas,
            plan.micro_batch,
            plan.drop_last,
            plan.accumulation if plan.pipeline > 1 else None,
        )
        current = partial(shares, epoch, state.epoch_samples, *share_args, ends)
        if ends is not None and (epochs := watcher.epochs):
            done = sum(end <= state.epoch_samples for end in ends)
            watcher.total_steps = state.step - done + (epochs - epoch) * len(ends)
        self._rendezvous.heartbeat.ends_at(watcher.total_steps or 0)
        watcher.rate.resume()
        return current

    def takes_more(self) -> bool:
        """Whether the epoch goes on with the batch that was read."""
        return True

    @counted("run.batches()")
    def hand_out(self, share: Share, micros: list[Any]) -> list[Any]:
        """Take a batch for the step, and move it to the device."""
        self.step.take(share)
        ready = on_device(self.feed, share, micros, self.parts.world.device)
        self.step.deliver(ready)
        for follower in self._following() if self.followers else ():
            follower.step.follow(share)
        self.step.announce()
        return ready

    def items(self, micros: list[Any]) -> Iterator[Any]:
        """What the script gets of a batch: the type must not depend on the number of workers."""
        if not self._lists:
            return iter(micros)
        plan = self.parts.plan
        return iter((MicroBatches(micros, plan.spec if plan.pipeline > 1 else ""),))

    def _following(self) -> Iterator[Loop]:
        return filter(None, (ref() for ref in self.followers))

    def _refuse_follower(self, call: str) -> None:
        if self.parts.follows:
            raise RondeError(
                f"{call}: this run shares the batches of another (data=run). Loop over that "
                "run's epochs and batches, and step this one on what they yield."
            )

    # -- the end -----------------------------------------------------------------------

    def end_loading(self) -> None:
        """End loading threads and processes. They start again at the next read."""
        reading = self._reading() if self._reading is not None else None
        if reading is not None:
            if inspect.getgeneratorstate(reading) == inspect.GEN_RUNNING:
                return
            reading.close()
        self.is_reading = False
        self.feed.close()
        if self.evaluations is not None:
            self.evaluations.close()

    def finish(self, status: str) -> None:
        """The run has ended: write and tell it, once."""
        place = self.parts.place
        if place.ended:
            return
        place.ended = True
        self.group.release(self)
        for follower in self._following():
            follower.finish(status)
        for call in self.callbacks.ended:
            call(self.parts, status)

    def at_exit(self) -> None:
        """The process ends: a script without ``run.epochs`` that ends by itself has completed. The
        launcher records one that failed.
        """
        if self.parts.place.ended:
            return
        try:
            self._end_unasked()
        finally:
            # An abandoned loop that is collected later finds no modules left.
            self.end_loading()
            self._loops += 1

    def _end_unasked(self) -> None:
        run, group = self.parts, self.group
        run.watcher.flush()
        if hasattr(sys, "last_value") or not run.state.step:
            group.saving.leave(run)
            run.watcher.close()
            return
        for member in group.members:
            run, place = member.parts, member.parts.place
            beside = place.in_epochs and group.ends_with(place.readings)
            if not place.ended and (beside or run.epoch_is_over):
                member.end_epoch()
        group.saving.end(group.contents)
        if group.is_unsaved or group.due:
            save_or_warn(self, wait=True)
        self.finish("completed")


@stage("copy")
def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in a batch, whatever holds it."""

    def move(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return v.to(device, non_blocking=True)
        return v.to(device) if _moves(v) else v

    return map_leaves(move, value, leaf=_moves)


def _moves(value: Any) -> bool:
    # a packed sequence, transformers' BatchEncoding, or a class of the script with its own ``to``
    return isinstance(value, PackedSequence) or (
        not isinstance(value, list | tuple | dict) and callable(getattr(value, "to", None))
    )


def on_device(feed: Feed, share: Share, micros: list[Any], device: torch.device) -> list[Any]:
    """A share's micro-batches on the device, after the pipeline's transforms there."""
    if device.type != "cpu":
        micros = [to_device(m, device) for m in micros]
    return feed.finish(share, micros)


def gather_skipped(feed: Feed, layout: Layout, me: World) -> list[tuple[int, str]]:
    """Bad samples of all replicas since the feed began to read. A collective if any may be skipped.

    Raises:
        FeedError: there are more than ``max_skipped`` allows.
    """
    settings, of = feed.settings, feed.order.epoch_samples
    if settings.on_error != "skip":
        return []
    place = layout.place(me.rank)
    mine = feed.skipped if (place.pipeline, place.tensor) == (0, 0) else []
    skipped = [(int(i), str(text)) for each in gather_json(me, mine) for i, text in each]
    if len(skipped) > settings.max_skipped * of:
        raise FeedError(too_many(skipped, of, settings.max_skipped))
    return skipped


def skip_report(skipped: list[tuple[int, str]], of: int, fate: str) -> str:
    """How many samples were skipped, and the first few; empty if none."""
    if not skipped:
        return ""
    n = len(skipped)
    count = f"{n} samples of {of} ({n / of:.2%})" if n > 1 else f"1 sample of {of} ({1 / of:.2%})"
    were = "were" if n > 1 else "was"
    return f"{count} could not be used and {were} {fate}: {first_few(skipped)}"


# Where a loop pops its iterator: POP_ITER is Python 3.14's.
_POPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap}


def is_left_by_script() -> bool:
    """Whether a loop is left with ``break`` or ``return``, asked in the generator that it closes.

    An exception on its way, as of ``sys.exit``, closes it as well, and cannot be seen from there.
    But then the loop's frame is at the instruction that raised.
    """
    frame = sys._getframe(2)
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _POPS


def shows_breaks() -> bool:
    """Whether :func:`is_left_by_script` can be believed: other Pythons may compile or end loops in
    another way. Tried on three loops whose end is known.
    """
    answers = []

    def loop() -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            answers.append(is_left_by_script())
            raise

    def leave(how: str) -> None:
        for _ in loop():
            if how == "break":
                break
            if how == "return":
                return
            raise KeyError

    for how in ("break", "return", "raise"):
        with suppress(KeyError):
            leave(how)
    return answers == [True, True, False]
