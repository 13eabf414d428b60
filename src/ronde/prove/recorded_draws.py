"""Records random draws, and makes them the same for any number of workers if asked to."""

from __future__ import annotations

from typing import Any

from torch import nn

from ronde.capture import following
from ronde.introspect import restore_states
from ronde.introspect import states as random_states
from ronde.plan import Share
from ronde.prove.keyed_draws import KeyedDraws
from ronde.prove.trace_writer import Phase, TraceWriter
from ronde.prove.values import draws_since, generators
from ronde.run.parts import Parts

__all__ = ["DrawRecorder"]


class DrawRecorder:
    """The draws of one run.

    Attributes:
        keyed: draws that are the same for any number of workers; None if they stay as they are.
    """

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self.keyed: KeyedDraws | None = None
        self._inside: list[int] = []  # identities of the modules that run now
        self._handed: list[Any] = []  # the micro-batches of the step
        self._passes = 0  # forward passes of the step that run.step has started
        self._range = ("", 0, 0, 0)  # of the pass under way, see KeyedDraws.begin
        self._random_before = random_states()  # before the step or evaluation
        self._others: set[str] = set()  # generators drawn from in its passes so far
        self._in_pass = False  # whose draws are seen by the generators' states
        self._marks = generators()

    # -- where a pass begins -----------------------------------------------------------

    def begin_step(self, micros: list[Any]) -> None:
        """The micro-batches of a step are handed out."""
        self._handed, self._passes = micros, 0
        self.mark()
        self.use_samples_of(0)

    def use_samples_of(self, i: int) -> None:
        """What is drawn from now on is for micro-batch ``i``."""
        step = self._trace.step
        if i < len(self._trace.sizes):
            low, high = (at - step["start"] for at in step["micro"][i])
            self._range = (f"step {step['step']}", low, high, len(step["ids"]))
            self.draw_again()

    def start_pass(self, batch: Any) -> None:
        """The forward pass of a micro-batch starts."""
        if self._trace.phase == Phase.STEP and self.keyed is not None and not following():
            # a pipeline's stages take micro-batches in an order of their own
            same = (i for i, micro in enumerate(self._handed) if micro is batch)
            self.use_samples_of(next(same, self._passes))
            self._passes += 1
        elif self._trace.phase == Phase.EVALUATE:
            self.draw_again()

    def start_evaluation(self, run: Parts, share: Share, low: int, high: int) -> None:
        """The samples of what is evaluated next."""
        key = f"evaluation {run.state.step} {share.start}"
        self._range = (key, low - share.start, high - share.start, share.global_samples)
        self.draw_again()

    def draw_again(self) -> None:
        """The pass under way starts once more."""
        if self.keyed is not None and not following():
            self._others.update(draws_since(self._marks))
            self._inside.clear()  # a pipeline's stage leaves a pass halfway
            self.keyed.begin(*self._range)
            self._marks = generators()

    def leave(self) -> None:
        """The script's own draws between steps go on where they were."""
        if self.keyed is not None:
            self.keyed.end()
            restore_states(self._random_before)

    # -- modules -----------------------------------------------------------------------

    def module_now(self) -> str:
        """The innermost module of the model that runs now."""
        modules = self._trace.modules
        return next((modules[i] for i in reversed(self._inside) if i in modules), "")

    def enter_module(self, module: nn.Module) -> None:
        """A module's forward pass starts."""
        self._inside.append(id(module))

    def leave_module(self, module: nn.Module) -> None:
        """A module's forward pass has ended."""
        if id(module) in self._inside:
            del self._inside[self._inside.index(id(module)) :]

    # -- what was drawn from -----------------------------------------------------------

    def mark(self) -> None:
        """A step or an evaluation starts."""
        self._random_before, self._others, self._in_pass = random_states(), set(), True
        self._marks = generators()

    def mark_update(self) -> None:
        """The optimizer is about to step."""
        self._marks = generators()

    def since_mark(self) -> list[str]:
        """Generators drawn from since the last mark."""
        return draws_since(self._marks)

    def drawn(self) -> list[str]:
        """Generators drawn from since :meth:`mark`, except where draws are the same anyway."""
        if self.keyed is None and self._seeds_passes():
            # a script's own loop may draw after the last pass
            if not self._trace.step["calls_loss"]:
                self.count()
            return sorted(self._others)
        if self.keyed is None:
            return draws_since(self._marks)
        return sorted({*self._others, *draws_since(self._marks)} - {"torch"})

    def _seeds_passes(self) -> bool:
        """Whether the run seeds each pass, which moves a generator that nobody draws from."""
        run = self._trace.run
        in_step = self._trace.phase == Phase.STEP
        return in_step and run is not None and run.plan.randomness == "global"

    def mark_pass(self) -> None:
        """The run has seeded a pass."""
        self._in_pass = True
        if self.keyed is None and self._seeds_passes():
            self._marks = generators()

    def count(self) -> None:
        """Count what was drawn since the run has seeded."""
        self._in_pass = False
        if self.keyed is None and self._seeds_passes():
            self._others.update(draws_since(self._marks))

    def skip(self) -> None:
        """Another run of the loop has stepped: what moved the generators until now is its own."""
        if self.keyed is None:
            self._marks = generators()

    def note(self) -> None:
        """The script draws from torch's generator: in a hook on gradients, say."""
        if self._trace.phase == Phase.STEP and not self._in_pass:
            self._others.add("torch")
