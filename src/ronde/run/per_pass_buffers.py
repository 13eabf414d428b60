"""Finds buffers that every forward pass changes (a counter, a codebook, an average), in a training
whose steps have several passes instead of one.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.parallel import spectral_norms
from ronde.plan import Plan
from ronde.world import World
from ronde.world.consensus import gather_json

__all__ = ["Passes"]

_Marks = dict[str, tuple[object, int]]


class Passes:
    """Checks the first three steps, and those whose number is a power of two: a collective there.

    Batch and spectral normalization are left out: the run warns of them before its first step.
    """

    def __init__(self, model: nn.Module, plan: Plan, me: World) -> None:
        self._model, self._plan, self._me = model, plan, me
        self._steps = 0
        self._before: _Marks | None = None
        self._changed: set[str] = set()  # in an earlier checked step
        self._done = plan.accumulation == 1

    def begin(self) -> None:
        """Before the first forward pass of a step; or after it, before the others."""
        if self._done:
            return
        self._steps += 1
        if self._steps <= 3 or self._steps & (self._steps - 1) == 0:
            self._before = self._marks()
            self._done = not self._before

    def end(self) -> str:
        """After the last pass: a warning, once, the same on every worker; empty if none."""
        before, self._before = self._before, None
        if not before:
            return ""
        after = self._marks()
        others = self._plan.accumulation - 1
        changed = {
            n
            for n, (b, version) in after.items()
            if n not in before or before[n][0] is not b or before[n][1] != version
        }
        # A buffer that the first pass fills once, such as a table of positions, does not count.
        often = {
            n
            for n in changed & before.keys()
            if before[n][0] is after[n][0] and after[n][1] - before[n][1] >= max(2, others)
        }
        mine = [n for n in after if n in often or n in changed & self._changed]
        self._changed |= changed
        names = list(dict.fromkeys(n for each in gather_json(self._me, mine) for n in each))
        if not names:
            return ""
        self._done = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        cure = "without micro_batch, or " if self._plan.pipeline == 1 else ""
        return (
            f"the forward pass changes the buffer {names[0]!r}{more}, and a step has "
            f"{self._plan.accumulation} forward passes, one for each micro-batch: it changes as "
            "often. This is not the same training as on one device; it would be "
            f"{cure}where the script changes it once a step"
        )

    def _marks(self) -> _Marks:
        spectral = set(spectral_norms(self._model))
        return {
            name: (b, b._version)
            for path, module in self._model.named_modules()
            if not isinstance(module, _BatchNorm)
            and path not in spectral
            and path.split(".parametrizations.")[0] not in spectral
            for name, b in module.named_buffers(path, recurse=False)
        }
