"""Records random draws, and makes them the same for any number of workers if asked to."""

from __future__ import annotations

import hashlib
import itertools
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ronde.capture import GlobalDraws, following, replaced
from ronde.introspect import Marks, restore_states
from ronde.introspect import states as random_states
from ronde.plan import Share
from ronde.prove.trace_writer import Phase, TraceWriter, place_of
from ronde.run.parts import Parts

if TYPE_CHECKING:
    from ronde.capture import Recorded

__all__ = ["DrawRecorder", "generator_digest"]


class DrawRecorder:
    """The draws of one run.

    Attributes:
        probes: what forward and loss draw for two numbers of samples, see
            :func:`~ronde.run.step_draws.probe_draws`; of a run whose draws are made the same.
    """

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self.probes: dict[int, list[Recorded]] = {}
        self._stack = ExitStack()
        self._same: GlobalDraws | None = None  # None: draws stay as they are
        # torch's seeds of passes; smaller ones are the script's
        self._seeds = itertools.count(1 << 40)
        self._handed: list[Any] = []  # the micro-batches of the step
        self._passes = 0  # forward passes of the step that run.step has started
        self._is_under_way = False  # a pass whose draws are made the same
        # of the pass under way: key, its samples' places, whether the script's loop draws
        self._range = ("", 0, 0, False)
        self._random_before = random_states()  # before the step or evaluation
        self._others: set[str] = set()  # generators drawn from in its passes so far
        self._in_pass = False  # whose draws are seen by the generators' states
        self._marks = Marks()

    def make_same(self, run: Parts) -> None:
        """From now on, draws are the same for any number of workers."""
        place = run.plan.layout.place(run.world.rank).tensor
        spec, tensor = run.plan.spec, run.plan.tensor
        self._same = GlobalDraws(spec, tensor, place, self._note_other, self.probes)
        # prove's own drops nothing: a mask depends on the length to which a share is padded
        attention = F.scaled_dot_product_attention
        self._stack.enter_context(replaced())  # to the end of the process
        F.scaled_dot_product_attention = attention

    def _note_other(self, _: str = "") -> None:
        """A draw may be another one on another number of workers."""
        self._others.add("torch")
        self._trace.note("unfixed", place_of())

    # -- where a pass begins -----------------------------------------------------------

    def begin_step(self, micros: list[Any]) -> None:
        """The micro-batches of a step are handed out."""
        self._handed, self._passes = micros, 0
        self.mark()
        self.use_samples_of(0, in_loop=True)

    def use_samples_of(self, i: int, in_loop: bool = False) -> None:
        """What is drawn from now on is for micro-batch ``i``; ``in_loop``: by the script's loop, of
        which the probes know nothing.
        """
        step = self._trace.step
        if i < len(self._trace.sizes):
            low, high = (at - step["start"] for at in step["micro"][i])
            self.use(f"step {step['step']}", low, high, in_loop)

    def start_pass(self, batch: Any) -> None:
        """The forward pass of a micro-batch starts."""
        if self._trace.phase == Phase.STEP and self._same is not None and not following():
            # a pipeline's stages take micro-batches in an order of their own
            same = (i for i, micro in enumerate(self._handed) if micro is batch)
            self.use_samples_of(next(same, self._passes))
            self._passes += 1
        elif self._trace.phase == Phase.EVALUATE:
            self.draw_again()

    def start_evaluation(self, run: Parts, share: Share, low: int, high: int) -> None:
        """The samples of what is evaluated next."""
        key = f"evaluation {run.state.step} {share.start}"
        self.use(key, low - share.start, high - share.start)

    def use(self, key: str, low: int, high: int, in_loop: bool = False) -> None:
        """What is drawn from now on is for samples ``low`` to ``high`` of a batch."""
        self._range = (key, low, high, in_loop)
        self.draw_again()

    def draw_again(self) -> None:
        """The pass under way starts once more."""
        if self._same is None or following():
            return
        self._others.update(self._unplaced())
        self._end_pass()
        key, low, high, in_loop = self._range
        seed, self._is_under_way = next(self._seeds), low < high
        if low < high:
            number = _number(key) ^ in_loop
            self._same.begin(number, low, high, seed, watched=True, in_loop=in_loop)
        else:  # nobody asks for what is drawn
            torch.default_generator.manual_seed(seed)
        random.seed(_number(key))
        np.random.seed(_number(key) % 2**32)
        self._marks = Marks()

    def _end_pass(self) -> None:
        """The pass under way draws no more; a backward pass may compute a part of it again."""
        assert self._same is not None
        self._same.end()
        # another run of the loop may have closed it, and its draws were torch's own
        is_closed = self._same.pause() is None and self._is_under_way
        if self._same.moved or is_closed:  # or by functions that are not replaced
            self._note_other()
        self._same.moved = self._is_under_way = False

    def _end_passes(self) -> None:
        if self._same is not None:
            self._end_pass()
            self._same.close()

    def leave(self) -> None:
        """The script's own draws between steps go on where they were."""
        self._end_passes()
        if self._same is not None:
            restore_states(self._random_before)

    # -- what was drawn from -----------------------------------------------------------

    def mark(self) -> None:
        """A step or an evaluation starts."""
        self._random_before, self._others, self._in_pass = random_states(), set(), True
        self._marks = Marks()

    def mark_update(self) -> None:
        """The optimizer is about to step."""
        self._end_passes()
        self._marks = Marks()

    def since_mark(self) -> list[str]:
        """Generators drawn from since the last mark."""
        return self._marks.moved()

    def drawn(self) -> list[str]:
        """Generators drawn from since :meth:`mark`, except where draws are the same anyway."""
        if self._same is None and self._seeds_passes():
            # a script's own loop may draw after the last pass
            if not self._trace.step["calls_loss"]:
                self.count()
            return sorted(self._others)
        if self._same is None:
            return self._marks.moved()
        self._same.end()
        if self._same.moved:  # the last pass has drawn by functions that are not replaced
            self._note_other()
        return sorted({*self._others, *self._unplaced()})

    def _unplaced(self) -> list[str]:
        """Generators drawn from since the last mark, except torch's, whose draws go by place."""
        return [name for name in self._marks.moved() if name != "torch"]

    def _seeds_passes(self) -> bool:
        """Whether the run seeds each pass, which moves a generator that nobody draws from."""
        run = self._trace.run
        in_step = self._trace.phase == Phase.STEP
        return in_step and run is not None and run.plan.randomness == "global"

    def mark_pass(self) -> None:
        """The run has seeded a pass."""
        self._in_pass = True
        if self._same is None and self._seeds_passes():
            self._marks = Marks()

    def count(self) -> None:
        """Count what was drawn since the run has seeded."""
        self._in_pass = False
        if self._same is not None and not following():
            self._same.end()  # recomputation in the backward pass moves torch's generator
        if self._same is None and self._seeds_passes():
            self._others.update(self._marks.moved())

    def skip(self) -> None:
        """Another run of the loop has stepped: what moved the generators until now is its own."""
        if self._same is None:
            self._marks = Marks()

    def note(self) -> None:
        """The script draws from torch's generator: in a hook on gradients, say."""
        if self._trace.phase == Phase.STEP and not self._in_pass:
            self._others.add("torch")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def generator_digest() -> str:
    """The states of Python's and numpy's generators, in a few letters."""
    text = repr((random.getstate(), np.random.get_state(legacy=False)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
