"""Buffers that every forward pass changes (a counter, a codebook, an average), where a step has
several passes instead of one.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.parallel import spectral_norms
from ronde.plan import Plan
from ronde.world import World
from ronde.world.consensus import gather_json

__all__ = ["Passes"]


class Passes:
    """Looks at some steps: the first three, and those whose number is a power of two. A collective
    in these.

    Batch and spectral normalisation are told of by themselves, before the first step.
    """

    def __init__(self, model: nn.Module, plan: Plan, me: World) -> None:
        self._model, self._plan, self._me = model, plan, me
        self._steps = 0
        self._before: dict[str, tuple[object, int]] | None = None
        self._changed: set[str] = set()  # in a step that was looked at, otherwise than pass by pass
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
        """After the last one: what the user should know, once, the same on every worker."""
        before, self._before = self._before, None
        if not before:
            return ""
        after = self._marks()
        others = self._plan.accumulation - 1
        changed = {
            n
            for n, (b, v) in after.items()
            if n not in before or before[n][0] is not b or before[n][1] != v
        }
        # What the first pass fills once, a table of positions say, is not what every pass changes.
        often = {
            n
            for n in changed & before.keys()
            if before[n][0] is after[n][0] and after[n][1] - before[n][1] >= max(2, others)
        }
        mine = [n for n in after if n in often or n in changed & self._changed]
        self._changed |= changed
        found = list(dict.fromkeys(n for each in gather_json(self._me, mine) for n in each))
        if not found:
            return ""
        self._done = True
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        cure = "without micro_batch, or " if self._plan.pipeline == 1 else ""
        return (
            f"the forward pass changes the buffer {found[0]!r}{more}, and a step has "
            f"{self._plan.accumulation} forward passes, one for each "
            "micro-batch: it changes as often. This is not the same training as on one "
            f"device; it would be {cure}where the script changes it once a step"
        )

    def _marks(self) -> dict[str, tuple[object, int]]:
        told = set(spectral_norms(self._model))
        marks: dict[str, tuple[object, int]] = {}
        for path, module in self._model.named_modules():
            if (
                isinstance(module, _BatchNorm)
                or path in told
                or path.split(".parametrizations.")[0] in told
            ):
                continue
            for name, b in module.named_buffers(path, recurse=False):
                marks[name] = (b, b._version)
        return marks
