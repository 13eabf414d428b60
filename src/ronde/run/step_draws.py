"""How the passes of a run draw random numbers, and what another number of workers draws otherwise.

``randomness="global"``: by the samples' places in the global batch (:mod:`ronde.capture`).
``"worker"``: each worker from torch's generator, seeded by (seed, step, rank).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.random import fork_rng

from ronde.capture import GlobalDraws, replaced
from ronde.data import key_of
from ronde.introspect import Marks
from ronde.parallel import Work
from ronde.plan import Share
from ronde.run.losses import LossCall
from ronde.run.parts import Parts

if TYPE_CHECKING:
    from ronde.capture import Recorded

__all__ = ["StepDraws", "probe_draws"]

_DRAWS = re.compile("rand|drop|bernoulli|multinomial|normal|uniform|expon|gumbel|sample|noise")
_MASK = 2**64 - 1

T = TypeVar("T")


def _seed_step(device: torch.device, key: int) -> None:
    """Seed the CPU's generator and this worker's device."""
    # torch.manual_seed formats a stack trace for devices that are not there: 300 µs a step.
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


@contextmanager
def _reseeding(device: torch.device) -> Iterator[None]:
    """Steps inside are seeded; the script's draws afterwards are the same for any world size."""
    before = torch.default_generator.get_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)


def _may_draw(model: nn.Module, calls: LossCall) -> bool:
    """Whether the code of a model or loss has a name that sounds like drawing."""
    waiting: list[Any] = [calls.loss, calls.forward]
    for module in model.modules():
        kind = type(module)
        if not kind.__module__.startswith("torch.nn."):
            waiting += [*vars(kind).values(), *vars(module).values()]
        elif isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU | nn.MultiheadAttention):
            return True
    seen = set()
    while waiting:
        function = waiting.pop()
        if not inspect.isfunction(function) or function.__module__.startswith("torch."):
            continue
        if function.__code__ not in seen:
            codes = [function.__code__]
            for code in codes:  # and those inside it
                seen.add(code)
                codes += [c for c in code.co_consts if inspect.iscode(c)]
                if any(map(_DRAWS.search, code.co_names)):
                    return True
                known = function.__globals__
                waiting += [known[n] for n in code.co_names if n in known]
    return False


def probe_draws(work: Work, calls: LossCall) -> dict[int, list[Recorded]]:
    """What forward and loss draw for two numbers of samples: it tells where the samples are."""
    if not _may_draw(work.model, calls) or any(p.is_meta for p in work.model.parameters()):
        return {}
    from ronde.capture import compiled, not_training, recorded_draws
    from ronde.introspect import SavedState

    everything = work.model.modules()
    if any(compiled(m) or isinstance(m, torch.jit.ScriptModule) for m in everything):
        return {}
    probes = {}
    state = SavedState(work.model)
    devices = {p.device.index for p in work.model.parameters() if p.is_cuda}
    try:
        for samples in (3, 2):
            batch = work.sample(samples)
            with work.trial(), torch.no_grad(), not_training(), fork_rng(devices):
                with recorded_draws() as made:
                    work.compute(batch)
            probes[samples] = made
    except Exception:
        return {}  # a draw whose samples are not clear is reported when it is made
    finally:
        state.restore()
    return probes


class StepDraws:
    """The draws of one run.

    Args:
        probes: see :func:`probe_draws`.
        alone: whether no other run trains in its loop.
    """

    def __init__(
        self, parts: Parts, probes: dict[int, list[Recorded]], alone: Callable[[], bool]
    ) -> None:
        self._me, self._alone = parts.world, alone
        self._parts = parts
        self._around: Any = None  # the pass of the loop's body
        # What is the same in each step of a key is mixed once.
        seed, part = parts.plan.seed, key_of(0, *parts.part.encode())
        self._seeds, self._keys = key_of(seed, 5), key_of(seed, 6, part)
        self._replica = parts.world.rank // parts.plan.tensor
        self._said: set[str] = set()
        self._steps = 0
        self._watched = False
        self._marks: Marks | None = None
        self._places: dict[int, tuple[int, int]] = {}
        self._key = self._seed = 0
        self._drawn: int | None = None  # in the first micro-batch of a loop of the script's own
        self.draws: GlobalDraws | None = None
        plan = parts.plan
        if plan.randomness == "global":
            place = plan.layout.place(parts.world.rank).tensor
            self.draws = GlobalDraws(plan.spec, plan.tensor, place, self._say, probes)
            if (divided := getattr(parts.strategy, "divided", None)) is not None:
                self.draws.fused = divided.fused_widths(parts.model)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a loop over batches: the script's draws after it do not depend on the workers."""
        with ExitStack() as stack:
            if self.draws is not None or self._me.size > 1:
                stack.enter_context(_reseeding(self._me.device))
            if self.draws is not None:
                stack.enter_context(replaced())
                stack.callback(self.draws.close)
            yield

    def aside(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches that a feed makes. What the data set draws belongs to its samples: a pass of
        another run, or of a loop that was left, may be under way.
        """
        reading = iter(batches)
        while True:
            under_way = GlobalDraws.pause()
            try:
                made = next(reading, None)
            finally:
                GlobalDraws.pause(under_way)
            if made is None:
                return
            yield made

    def hand_out(self, share: Share, step: int) -> None:
        """A batch is about to be handed out."""
        self.follow(step)
        GlobalDraws.close()
        if self.draws is not None:
            self._begin(share, share.micro[0], in_loop=True)
        elif self._me.size > 1:
            _seed_step(self._me.device, self._seed)
        self._marks = Marks() if self._watched else None

    def follow(self, step: int) -> None:
        """A batch is about to be handed out, by this run or by the one that it shares them with."""
        self._steps += 1
        self._watched = self._steps <= 3 or self._steps % 1000 == 0
        # Draws that are not global are a function of (seed, step, rank): a resumed run draws what
        # the first one would have drawn.
        self._seed = key_of(step, self._replica, after=self._seeds)
        self._key = key_of(step, after=self._keys)
        self._drawn = None

    def _begin(self, share: Share, micro: tuple[int, int], in_loop: bool = False) -> None:
        assert self.draws is not None
        self._seed = (self._seed + 1) & _MASK
        low, high = micro
        key = self._key ^ in_loop
        low, high = low - share.start, high - share.start
        self.draws.begin(key, low, high, self._seed, self._watched, in_loop)
        if self._me.device.type == "cuda":
            torch.cuda.manual_seed(self._seed)

    def begin_step(self, share: Share, micros: Sequence[Any]) -> None:
        """``run.step`` begins."""
        if self.draws is not None:
            self._around = self.draws.leave()
            self._places = {id(m): at for m, at in zip(micros, share.micro, strict=True)}
            self._share = share
        self._marks = Marks() if self._watched else None

    def begin_pass(self, micro: Any) -> None:
        """A forward pass of ``run.step`` begins."""
        place = self._places.get(id(micro))
        if place is not None:
            self._begin(self._share, place)

    def end_pass(self) -> None:
        """It has ended; its backward pass follows."""
        if self.draws is not None:
            self.draws.end()

    def end_step(self) -> None:
        """All passes of ``run.step`` are over."""
        if self._marks is not None:
            self._report(self._marks)
        if self.draws is not None:
            self._places.clear()
            self._seed = (self._seed + 1) & _MASK
            self.draws.close(None if self._alone() else self._around, self._seed)
            self._around = None

    def end_own_pass(self, share: Share, following: int) -> None:
        """The script's own forward pass has ended; ``following`` is the next micro-batch."""
        if self.draws is None:
            return
        drawn = self.draws.end()
        if self._drawn not in (None, drawn) and drawn:
            self._say(
                f"a micro-batch draws {drawn} times and the first one drew {self._drawn} times: "
                "draw what belongs to the whole step before run.batches() hands the batch out"
            )
        self._drawn = drawn if self._drawn is None else self._drawn
        if following < len(share.micro):
            if not self._alone():
                self._say(
                    "several runs in a loop of the script's own, with micro-batches: Ronde cannot "
                    "tell when the last of them goes on to the next one. Use run.step(batch)"
                )
            self._begin(share, share.micro[following], in_loop=True)

    def end_own_step(self) -> None:
        """``run.update`` begins."""
        if self._marks is not None:
            self._report(self._marks)
        if self.draws is not None and self._alone():  # else another run's pass follows
            self.draws.close()

    def _report(self, marks: Marks) -> None:
        moved, self._marks = marks.moved(), None
        if self.draws is not None:
            moved = [n for n in moved if n != "torch"] + ["torch"] * self.draws.moved
            for name in moved:
                cure = (
                    "such as the dropout of nn.LSTM, and of compiled or scripted modules: draw "
                    "with torch.nn.functional's dropout or torch.rand"
                    if name == "torch"
                    else "whose samples Ronde does not know: draw with torch.rand"
                )
                self._say(f"{name}'s generator makes random numbers in the forward pass, {cure}")
        elif self._me.size > 1:
            for name in moved:
                self._say(
                    f"{name}'s generator makes random numbers in the forward pass, each worker its "
                    "own: randomness='global' makes torch's the same on any number of workers"
                )

    def _say(self, text: str) -> None:
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said and len(self._said) < 3:
            self._said.add(kind)
            self._parts.warn(f"not the same on another number of workers: {text}", differs=True)
