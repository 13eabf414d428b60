"""Compares what ranks never exchange, in the first steps and every few after them: the place in the
data, the optimizer's settings, which parameters train. What differs has a name.

A check is one exchange of two numbers, under way while the optimizer steps. The facts themselves
are exchanged only if the ranks' digests of them differ.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ronde.parallel.replica_check import CHECKED_STEPS, ReplicaCheck, check_step
from ronde.run.callback import NAN_EVERY_STEPS, Callback, StepView
from ronde.run.checks import setting
from ronde.run.group import RunGroup
from ronde.run.parts import Parts
from ronde.world import PlanError, World
from ronde.world.consensus import agree, gather_json
from ronde.world.identity import ranks_text
from ronde.world.rendezvous import Rendezvous

__all__ = ["FactCheck", "Replicas", "TrainedNames"]

# In the first steps a script's mistakes show. An exchange of two numbers costs 0.5 ms on the CPU,
# a third of a small model's step.
_EVERY_STEPS, _FIRST_STEPS, _LATER_EVERY_STEPS = 8, 64, 32
_SHOWN_NAMES = 5  # in an error
_REPLACED, _TYPES = "the modules that are new", "the parameters' new types"


class TrainedNames:
    """Lets all ranks agree that they froze, thawed, or replaced the same parameters."""

    def __init__(self, model: nn.Module, rendezvous: Rendezvous) -> None:
        self._model, self._rendezvous = model, rendezvous
        self._trains = self._now()

    def _now(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self._model.named_parameters()}

    def agree(self) -> None:
        """Some have changed on this rank. A meeting."""
        before, self._trains = self._trains, self._now()
        changed = [n for n, flag in self._trains.items() if before.get(n) != flag]
        what = (
            f"after requires_grad_(…) of {changed[0]!r}" if changed else "after replacing a layer"
        )
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        inside = bool(self._rendezvous.doing)
        self._rendezvous.meet(f"run.step(batch) {what}{more}", within=inside)


class FactCheck:
    """The facts of one run, as they were when the model was laid out and as they are now.

    Args:
        me: this worker.

    Attributes:
        changed: parameter -> how often something besides the optimizer has changed it in place
            since the replicas were last compared.
        agreed: the last step at which all ranks had the same facts.
    """

    def __init__(self, run: Parts, me: World) -> None:
        self._me = me
        self.changed: dict[str, int] = {}
        self.agreed = 0
        self._count = 0
        self._due = False
        self._sent: tuple[Any, torch.Tensor] | None = None
        plan = run.plan
        kind = plan.shard if plan.family == "shard" else plan.family
        self._divides = kind not in ("replicate", "optimizer")
        self._watches = plan.pipeline == 1
        # Workers that have state of all parameters have counted the same steps.
        rows = [p.shape[0] if p.dim() else 0 for p in run.model.parameters()]
        all_have_rows = all(-(-n // me.size) * (me.size - 1) < n for n in rows)
        sharded = kind in ("gradients", "parameters") and all_have_rows
        self._counts = (kind == "replicate" or sharded) and run.strategy.exchange is None
        self._groups = [list(map(id, group["params"])) for group in run.optimizer.param_groups]
        self._look_at(run.model)

    def _look_at(self, model: nn.Module) -> None:
        self._named = dict(model.named_parameters())
        self._watched = list(self._named.values()) if self._watches else []
        self._versions: list[int] | None = None
        self._modules = list(model.named_modules())
        self._children = self._children_now()
        self._types = {name: p.dtype for name, p in self._named.items()}

    def _children_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(m._modules.values() for _, m in self._modules)))

    # -- in each step ------------------------------------------------------------------

    def begin(self, run: Parts) -> None:
        """Called before the optimizer steps. A collective in the steps that are checked."""
        if self._versions is not None:
            now = [p._version for p in self._watched]
            if now != self._versions:
                for name, before, after in zip(self._named, self._versions, now, strict=True):
                    if before != after:
                        self.changed[name] = self.changed.get(name, 0) + 1
        self._count = count = self._count + 1
        # To read a number, a GPU is waited for.
        every = _EVERY_STEPS if count <= _FIRST_STEPS else _LATER_EVERY_STEPS
        if self._me.device.type != "cpu":
            every = NAN_EVERY_STEPS
        self._due |= count % every == 0 or (count < every and not count & (count - 1))
        if not self._due or run.strategy.drifts:
            return
        self._due = False
        self._facts = self._now(run)
        digest = zlib.crc32(json.dumps([self._facts, self.changed]).encode())
        both = torch.tensor([digest, -digest], device=self._me.device)
        self._sent = dist.all_reduce(both, dist.ReduceOp.MAX, async_op=True), both

    def end(self, run: Parts) -> str:
        """Called after the optimizer has stepped. Returns what has changed weights in place on some
        ranks only, as a phrase: if anything, the replicas must be compared.

        Raises:
            WorldError: on every rank, with the first fact that differs.
        """
        self._versions = [p._version for p in self._watched] if self._watched else None
        if self._sent is None:
            return ""
        (work, both), self._sent = self._sent, None
        work.wait()
        highest, lowest = both.tolist()
        why = ""
        if highest != -lowest:
            self._agree(run)
            why = self._who_changed()
        self.agreed = run.state.step + 1
        if self._divides and self._facts[_REPLACED]:
            raise PlanError(
                f"plan={run.plan.spec!r}: {self._facts[_REPLACED][0]!r} was replaced after "
                "ronde.distribute had divided the model over the workers: nothing exchanges the "
                "gradients of what stands there now. Build the model before ronde.distribute."
            )
        if types := self._facts[_TYPES]:
            name, now = next(iter(types.items()))
            raise PlanError(
                f"parameter {name!r} was {self._types[name]} when ronde.distribute laid out how "
                f"gradients are exchanged, and is {now} now. Convert the model before "
                "ronde.distribute, or give precision='bf16'."
            )
        return why

    def _agree(self, run: Parts) -> None:
        since = f", after they agreed at step {self.agreed}" if self.agreed else ""
        agree(self._me, self._facts, f"step {run.state.step + 1}{since}")

    def explain(self, run: Parts) -> str:
        """Why replicas are not equal, as far as that is known; empty if not. A collective.

        Raises:
            WorldError: on every rank, if the facts differ.
        """
        self._facts = self._now(run)
        self._agree(run)
        return self._who_changed()

    def _who_changed(self) -> str:
        """A parameter that was changed in place on some ranks only, as a phrase; empty if none was.
        A collective.
        """
        everyone = gather_json(self._me, self.changed)
        for name in dict.fromkeys(name for each in everyone for name in each):
            counts = [each.get(name, 0) for each in everyone]
            if len(set(counts)) > 1:
                who = ranks_text([rank for rank, n in enumerate(counts) if n == max(counts)])
                return (
                    f"something besides the optimizer has changed {name!r} in place on {who}, and "
                    "not on the others: let all ranks do it, or none"
                )
        return ""

    # -- the facts ---------------------------------------------------------------------

    def _now(self, run: Parts) -> dict[str, Any]:
        """Name -> value: short where nothing has changed since the model was laid out."""
        model, state = run.model, run.state
        replaced: list[str] = []
        if self._children_now() != self._children:
            known = {id(m) for _, m in self._modules}
            replaced = [name for name, m in model.named_modules() if id(m) not in known]
            if not self._divides:
                self._look_at(model)
        facts: dict[str, Any] = {
            "the step": state.step + 1,
            "the epoch": state.epoch + 1,
            "the samples of the epoch so far": state.epoch_samples,
            _REPLACED: replaced[:_SHOWN_NAMES],
            "the frozen parameters": [n for n, p in self._named.items() if not p.requires_grad],
            "the modules in evaluation mode": [n for n, m in self._modules if not m.training],
            _TYPES: self._changed_types(),
        }
        groups = run.optimizer.param_groups
        facts["the number of the optimizer's groups"] = len(groups)
        for i, group in enumerate(groups):
            for key, value in group.items():
                if key != "params":
                    facts[f"the optimizer's {key} (group {i})"] = setting(value)
            before = self._groups[i] if i < len(self._groups) else []
            if (ids := list(map(id, group["params"]))) != before:
                names = {id(p): name for name, p in model.named_parameters()}
                facts[f"the parameters of the optimizer's group {i}"] = [
                    names.get(each, "a parameter of no module") for each in ids
                ]
        if run.scheduler is not None:
            facts["the scheduler's last_epoch"] = getattr(run.scheduler, "last_epoch", None)
        if self._counts:
            states = run.optimizer.state.values()
            counts = [s["step"] for s in states if isinstance(s, Mapping) and "step" in s]
            on_cpu = [float(c) for c in counts if not getattr(c, "is_cuda", False)]
            if on_cpu:
                facts["the steps that the optimizer has counted"] = [min(on_cpu), max(on_cpu)]
        return facts

    def _changed_types(self) -> dict[str, str]:
        changed = {n: str(p.dtype) for n, p in self._named.items() if p.dtype != self._types[n]}
        return dict(list(changed.items())[:_SHOWN_NAMES])


class Replicas(Callback):
    """Checks each of the first steps, then compares as often as was asked.

    Args:
        every: optimizer steps from one comparison to the next; None for none.
    """

    def __init__(self, parts: Parts, every: int | None, group: RunGroup) -> None:
        self._group = group
        self._unchecked_steps = CHECKED_STEPS
        self._check = ReplicaCheck(every or 1)
        self._check.possible = every is not None
        self._facts = FactCheck(parts, parts.world)

    def before_update(self, step: StepView) -> None:
        """See :class:`Callback`."""
        self._facts.begin(step.parts)

    def after_update(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run = step.parts
        number = run.state.step + 1
        why = self._facts.end(run)
        if self._unchecked_steps and not run.strategy.drifts:
            self._unchecked_steps -= 1
            same = check_step(run.strategy, run.work.tied, run.plan, run.world)
            self._check.possible &= same
        else:
            self._compare(run, number, must=bool(why))
        if why and run.plan.shard != "none":  # parts that are held once, or sent to all again
            run.warn(f"step {number}: {why}", differs=True)
        if why:
            self._facts.changed.clear()

    def before_save(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        if not self._group.saving.ends:  # a script may have ended on this rank only
            self._compare(parts, parts.state.step, must=True)

    def before_copy(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        self._compare(parts, parts.state.step, must=True)

    def _compare(self, run: Parts, step: int, must: bool) -> None:
        if not must and step < self._check.due:
            return
        if not run.strategy.drifts and self._check.begin(step, must):
            explain = partial(self._facts.explain, run)
            self._check.check(run.strategy, run.work.tied, run.world, step, explain)
            self._facts.changed.clear()
