"""Notices, in a few of the first steps, what makes a training another one on several workers or in
micro-batches. Later steps are not looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.run.callback import Callback, StepView
from ronde.run.parts import Gathering, Parts
from ronde.watch import LossChecked
from ronde.world import LossError
from ronde.world.consensus import gather_json
from ronde.world.tensors import map_leaves, tensors_in

__all__ = ["MIXES", "FirstStepsCheck", "kind_of_loss", "undisturbed"]

_STEPS = (1, 2, 4, 8, 16)  # losses may be equal at first, and mixing may be left to chance
_MOST_NUMBERS = 2**22  # of a batch that is copied
_ORDER = ("sum", "other", "unknown", "mean", "pair", "gathered", "flat")  # any rank's first counts

_OTHER = (
    "the loss is no mean over samples: on several workers, or with micro-batches, this is not the "
    "same training as on one device. If samples weigh differently in it (padding, class weights), "
    "return (sum, weight): docs/batch-contract.md#weighted-losses. If it relates samples to each "
    "other (contrastive), gather them with run.gather(tensor): docs/whole-batch-losses.md"
)
MIXES = (
    "{}: mixup, CutMix, or statistics of the batch then mix only this worker's share, which is not "
    "the same training as on one device. Mix in the data set, or mix gathered rows: "
    "docs/whole-batch-losses.md#mixing-samples. Changes of each sample by itself are fine"
)
_CHANGES = "the script changes a batch, and not by a formula that is the same on all workers"
_OF_LOSS = " of the loss"
_BUFFER = (
    "the forward pass changes the buffer {}{}. This is not the same training as on one device. "
    "Change it in the script, once a step, and by what all workers' samples give"
)

_Line = list[float]  # factors and offsets of a linear change
_Change = tuple[int, _Line | None]  # a field of a batch, and how it was changed


class FirstStepsCheck(Callback):
    """The check of one run. All ranks call it alike."""

    def __init__(self, parts: Parts, gathering: Gathering) -> None:
        self._gathering, self._kind = gathering, "flat"
        self._plan, self._me, self._model = parts.plan, parts.world, parts.model
        self._loss, self._strategy, self._autocast = parts.loss, parts.strategy, parts.autocast
        self._steps, self._open = 0, False
        self._said: set[str] = set()
        self._asked: tuple[Any, int] | None = None  # a micro-batch, and its samples
        self._batch = _Batch(1, [])
        self._buffers: _Buffers = {}
        self._changed: set[str] = set()  # buffers, in earlier checked steps
        self._hook: Any = None  # sees what the model is given

    def batch_taken(self, step: StepView) -> None:
        """Note what the script gets."""
        self._forget()
        micros = () if step.parts.follows else step.micros
        self._steps, self._gathering.in_pass = self._steps + 1, False
        self._open, plan, model = self._steps in _STEPS, self._plan, self._model
        if not self._open or plan.workers == plan.accumulation == 1:
            return
        self._buffers = _buffers(model, self._loss.loss)
        if plan.replicas > 1 or plan.accumulation > 1:
            self._batch = _Batch(len(micros), tensors_in(list(micros)))
        compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None)
        if not compiled and plan.pipeline == plan.tensor == 1:
            see = lambda _, *given: self._batch.see(given, False)  # noqa: E731
            self._hook = model.register_forward_pre_hook(see, with_kwargs=True)

    def before_passes(self, step: StepView) -> None:
        """Note what the script gives to ``run.step``."""
        if self._open:
            micros = step.micros
            self._batch.see(list(micros), True)
            samples, i = max((int(p.rows or p.samples), -i) for i, p in enumerate(step.split))
            self._asked = micros[-i], samples
            self._loss.keep(micros[-i])

    def after_passes(self, step: StepView) -> None:
        """Warn, before anything is updated. A collective in some steps.

        Raises:
            LossError: the loss is a sum, or is not the sum that it was said to be.
        """
        if self._steps >= _STEPS[-1]:
            step.callbacks.rest(self)
        if not self._open:
            return
        before, number = self._kind, step.number + 1
        for text, differs in self._look(number):
            step.parts.warn(text, differs)
        if self._kind != before:
            step.parts.watcher.event(LossChecked(step=number, kind=self._kind))

    def _look(self, step: int) -> list[tuple[str, bool]]:
        """Warnings, and whether the training is surely another one than in one process."""
        arguments, kind = self._loss.kept(), "flat"
        if self._asked and (self._gathering.in_pass or (self._strategy.holds_result and arguments)):
            kind = self._kind_of(*self._asked, arguments or ())
        mine = [kind, self._batch.changes(), self._buffer_changes()]
        self._forget()
        kinds, batches, buffers = zip(*gather_json(self._me, mine), strict=True)
        kind = min(kinds, key=_ORDER.index)
        # A kind that was clear once stays; one that could not be told stays unclear.
        self._kind = kind if kind != "flat" and self._kind != "unknown" else self._kind
        # who gathers knows of all rows
        mixes = MIXES.format(_CHANGES) if _differ(batches) and not self._gathering.used else ""
        texts = [
            (text, True) for text in (self._judge_loss(kind, step), *self._judge_buffers(buffers))
        ]
        said = [*texts, (mixes, False)]
        new = [(text, differs) for text, differs in said if text and text not in self._said]
        self._said.update(text for text, _ in new)
        return new

    def _forget(self) -> None:
        self._open, self._asked, self._batch, self._buffers = False, None, _Batch(1, []), {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # -- the loss ----------------------------------------------------------------------

    def _kind_of(self, batch: Any, samples: int, arguments: tuple[Any, ...]) -> str:
        calls, model, device = self._loss, self._model, self._me.device
        if self._gathering.in_pass:
            return "gathered"
        with torch.autocast(device.type, enabled=False), undisturbed(calls.loss):
            ask = lambda values: calls.check(calls.loss(*values))  # noqa: E731
            kind = kind_of_loss(ask, arguments, samples)
        inside = any(tensor.dim() == 0 for tensor in tensors_in(arguments))
        plan = self._plan  # whose forward passes exchange nothing
        local = plan.pipeline == plan.tensor == 1 and plan.shard in ("none", "optimizer")
        if kind not in ("flat", "unknown") or not inside or not local or plan.offload != "none":
            return kind
        exact = device.type == "cpu" and isinstance(self._autocast(), nullcontext)
        with self._autocast(), undisturbed(calls.loss, calls.forward, model):
            ask = lambda part: calls.check(calls.loss(*calls.arguments(model, part)))  # noqa: E731
            # kernels differ by the size of a batch
            return kind_of_loss(ask, batch, samples, FLOAT32_ERROR if exact else HALF_ERROR)

    def _judge_loss(self, kind: str, step: int) -> str:
        is_sum = self._loss.reduction == "sum"
        if kind == "sum" and not is_sum:
            raise LossError(
                f"the loss is a sum over the samples it is given, not their mean (step {step}: the "
                "losses of parts of a batch add up to that of all). N workers would train on "
                "another loss than one. Use reduction='mean', divide by the number of samples, or "
                "give ronde.distribute(…, loss_reduction='sum')."
            )
        if kind == "mean" and is_sum:
            raise LossError(
                f"loss_reduction='sum', but the loss is a mean over the samples it is given (step "
                f"{step}). Use reduction='sum' in the loss, or leave loss_reduction out."
            )
        return _OTHER if kind == "other" else ""

    # -- buffers and hooks -------------------------------------------------------------

    def _buffer_changes(self) -> dict[str, Any]:
        """The buffers that the passes changed: whether each pass did, and the content."""
        changes, passes = {}, self._plan.accumulation
        now = _buffers(self._model, self._loss.loss) if self._buffers else {}
        for name, (buffer, version) in now.items():
            before, at = self._buffers.get(name, (None, 0))
            if before is not buffer or at != version:
                # One that a pass fills once, such as a table of positions, does not count.
                often = name in self._changed or (before is buffer and version - at >= passes)
                flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                flat = flat.detach().double()
                content = [*buffer.shape, float(flat.sum()), float(flat.square().sum())]
                changes[name] = [often and passes > 1, content]
        self._changed |= changes.keys()
        return changes

    def _judge_buffers(self, ranks: Sequence[dict[str, Any]]) -> list[str]:
        every, own, first = [], [], dict[str, Any]()
        several = self._plan.replicas > 1 or self._plan.tensor > 1
        for name, (each_pass, content) in (item for rank in ranks for item in rank.items()):
            one = first.setdefault(name, content)
            # processors of two kinds add in other orders
            alike = len(one) == len(content) and all(map(_is_close, one, content))
            every += [name] if each_pass else []
            own += [name] if several and not alike else []
        passes = (
            f", and a step has {self._plan.accumulation} forward passes, one for each micro-batch"
        )
        whose = "their own" if own and own[0].endswith(_OF_LOSS) else "rank 0's"
        seen = " by the samples or features that it sees: workers came to other values, and go on "
        seen += f"with {whose}"
        return [_BUFFER.format(repr(n[0]), how) for n, how in ((every, passes), (own, seen)) if n]


class _Batch:
    """A batch that was handed out, and what the step and the model were given."""

    def __init__(self, micros: int, tensors: Sequence[torch.Tensor]) -> None:
        few = sum(t.numel() for t in tensors) <= _MOST_NUMBERS
        plain = [t for t in tensors if few and type(t) is torch.Tensor]
        self._handed = [(t, t._version, t.clone()) for t in plain]
        self._fields = max(len(plain) // max(micros, 1), 1)
        # of the step, and of the model: what is as it was handed out, and other tensors
        self._seen: dict[bool, tuple[set[int], list[torch.Tensor]]] = {}

    def see(self, value: Any, step: bool) -> None:
        """Note what is given to the step, or to the model."""
        same, others = self._seen.setdefault(step, (set(), []))
        with torch.no_grad(), suppress(Exception):  # watching must not break a training
            for t in tensors_in(value) if self._handed else ():
                places = {i for i, handed in enumerate(self._handed) if _is_kept(t, *handed)}
                same |= places
                others += [] if places else [t.detach().clone()]  # the model may write to it

    def changes(self) -> list[_Change]:
        """The fields that were changed: by which lines, or None for other ways."""
        changes: list[_Change] = []
        with torch.no_grad(), suppress(Exception):
            for step, (same, others) in self._seen.items():
                for i, (_, _, copy) in enumerate(self._handed):
                    if i not in same and copy.numel() > 1:
                        changes += [(i % self._fields, c) for c in _changes(copy, others, step)]
        return changes


def _is_kept(t: torch.Tensor, handed: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Whether a tensor holds what was handed out, in any type, shape, and place."""
    flat = copy.reshape(-1).to(t.device, t.dtype)
    same = t.untyped_storage().data_ptr() == handed.untyped_storage().data_ptr()
    equal = t.numel() == len(flat) and torch.equal(t.reshape(-1), flat)
    return equal or (same and handed._version == version)


def _changes(lost: torch.Tensor, others: Sequence[torch.Tensor], step: bool) -> list[_Line | None]:
    """How a tensor became one of its shape; in what the step was given, one with as many rows."""
    alike = [t for t in others if t.shape == lost.shape]
    for t in alike:
        source = lost.to(t.device)
        masked = t[source.to(t.dtype) != t]
        if bool((masked == masked[:1]).all()):
            return []
        if (line := _line(source, t)) is not None:
            return [line]
    rows = step and any(t.dim() and lost.dim() and len(t) == len(lost) for t in others)
    return [None] if alike or rows else []


def _line(source: torch.Tensor, t: torch.Tensor) -> _Line | None:
    """Factor and offset of each channel, if lines lead from ``source`` to ``t``."""
    channels = t.size(1) if t.dim() > 2 and t.size(1) <= 16 else 1
    both = [
        v.double().reshape(len(v), channels, -1).transpose(0, 1).flatten(1) for v in (source, t)
    ]
    ends = [f(both[0], 1).indices[:, None] for f in (torch.min, torch.max)]
    (x0, x1), (y0, y1) = ([v.gather(1, end) for end in ends] for v in both)
    factor = (y1 - y0) / (x1 - x0)
    offset = y0 - factor * x0
    apart = (factor * both[0] + offset - both[1]).nan_to_num(0.0)  # one number tells nothing
    eps = torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
    if float(apart.abs().max()) > max(1e-5, 4 * eps) * float(both[1].abs().max()):
        return None
    return [*factor.flatten().tolist(), *offset.flatten().tolist()]


def _differ(ranks: Sequence[list[_Change]]) -> bool:
    """Whether a field was changed otherwise than by one line on all ranks."""
    first: dict[int, _Line] = {}
    for field, line in (change for rank in ranks for change in rank):
        other = first.setdefault(field, line) if line is not None else []
        largest = max((abs(a) for a in (*(line or ()), *other) if math.isfinite(a)), default=0.0)
        # of batch statistics, each worker has its own
        if line is None or any(
            abs(a - b) > 2e-3 * largest for a, b in zip(line, other, strict=False)
        ):
            return True
    return False


_Buffers = dict[str, tuple[torch.Tensor, int]]  # and their versions


def _buffers(model: nn.Module, loss: Any) -> _Buffers:
    """All but those of batch and spectral normalization, of which the run warns at the start."""
    from ronde.parallel.batchnorm import normalizes_batch, spectral_norms

    spectral = set(spectral_norms(model))
    inside = {id(b) for b in model.buffers()}
    of_loss = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return {name + _OF_LOSS: (b, b._version) for name, b in of_loss if id(b) not in inside} | {
        name: (b, b._version)
        for path, module in model.named_modules()
        if not normalizes_batch(module)
        if path.split(".parametrizations.")[0] not in spectral
        for name, b in module.named_buffers(path, recurse=False)
    }


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) or str(a) == str(b)


# -- the kind of a loss, asked by calls that leave no trace ----------------------------

FLOAT32_ERROR, HALF_ERROR = 1e-5, 1e-2
"""Relative errors that are rounding in these types."""

Value = tuple[torch.Tensor, torch.Tensor | None]
"""A loss and its weight, None for a plain loss."""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, before they happen, writes to tensors from outside, draws from the script's own
    generators, and what other workers would have to take part in.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments, kwargs = func._schema.arguments, kwargs or {}
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        shared = "c10d" in func.namespace or any(t.__name__ == "DTensor" for t in types)
        if shared or given.get("generator") is not None or not _memory(written) <= self._own:
            raise RuntimeError(f"{func} in a trial call")
        result = func(*args, **kwargs)
        self._own |= _memory(result) - _memory(given)
        return result


def _memory(value: Any) -> set[int]:
    return {int(t.untyped_storage()._cdata) for t in tensors_in(value)}


@contextmanager
def undisturbed(*owners: Any) -> Iterator[None]:
    """Inside, calls compute no gradients and leave no trace: generators, and the attributes and
    modes of ``owners``, are put back. Modules evaluate.

    Raises:
        RuntimeError: a call would write to the script's tensors, or needs other workers.
    """
    from ronde.introspect import NO_TENSORS, SavedState  # in few steps

    before = SavedState(*owners, largest=NO_TENSORS)
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    # set_stance imports torch's compiler, which takes seconds
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with before, torch.no_grad(), eager, _Guard():
        for module in modules:
            module.training = False
        yield


def kind_of_loss(
    call: Callable[[Any], Value], value: Any, samples: int, rounding: float = FLOAT32_ERROR
) -> str:
    """What a loss is by its values for parts of a batch: ``mean``, ``sum``, ``pair`` for a ``(sum,
    weight)`` that adds up, ``other``, ``flat`` if the values say nothing yet, or ``unknown``.

    Args:
        call: the loss of what a micro-batch has, or of a part of it.
        value: that of the micro-batch.
        samples: how many samples the micro-batch has.
        rounding: the largest relative error of equal numbers.
    """
    free = [t for t in tensors_in(value) if t.dim() and not isinstance(t, nn.Parameter)]
    if samples < 2 or not free:
        return "flat" if free else "unknown"
    few = _MOST_NUMBERS * samples // max(sum(t.numel() for t in free), 1)
    asked = min(samples, 24, max(few, 3))
    rows, rest = divmod(len(free[0]), samples)
    direct = any(samples in t.shape[:2] for t in free)
    if not direct and (rest or not rows):
        return "unknown"
    kinds = []
    for n in (0,) if direct else (rows, -rows):  # those of a sample may stand in blocks
        try:
            part = lambda *of, n=n: call(_part(value, samples, n, rounding < HALF_ERROR, *of))  # noqa: E731
            kinds.append(_kind_of_parts(part, asked, rounding))
        except Exception:  # it takes no part of a batch, or must not be asked
            return "unknown"
    return "unknown" if kinds[0] == "other" and kinds[-1] in ("mean", "pair") else kinds[0]


def _kind_of_parts(call: Callable[[int, int], Value], samples: int, rounding: float) -> str:
    first = max(samples // 3, 1)  # unequal parts: a mean of means is no mean
    values = [call(*part) for part in ((0, first), (first, samples), (0, samples), (0, samples))]
    one, two, whole, again = (float(loss) for loss, _ in values)
    largest = max(map(abs, (one, two, whole)))

    def near(a: float, b: float, times: float = 1.0) -> bool:
        return abs(a - b) <= times * rounding * largest

    if not math.isfinite(whole) or largest == 0:
        return "flat"
    if not math.isfinite(one + two):
        return "other"  # a part without a loss, such as one of padding only
    if not near(whole, again):
        return "unknown"  # it keeps state, or draws
    if len(weights := [float(weight) for _, weight in values if weight is not None]) == 4:
        adds_up = near(whole, one + two) and math.isclose(
            weights[2], weights[0] + weights[1], rel_tol=1e-5
        )
        return "pair" if adds_up else "other"
    mean = (one * first + two * (samples - first)) / samples
    if near(whole, mean):
        return "flat" if near(one, two, 100) else "mean"
    if near(whole, one + two):
        return "sum"
    return "flat" if near(whole, mean, 10) else "other"


def _part(value: Any, samples: int, rows: int, wide: bool, low: int, high: int) -> Any:
    """What belongs to some samples: ``rows`` of tensors that have several for each; ``wide``: in
    float32 at least.
    """

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        n, leaf = abs(rows), leaf.detach()
        if leaf.dim() and len(leaf) == n * samples and rows < 0:
            leaf = leaf.unflatten(0, (n, -1)).narrow(1, low, high - low).flatten(0, 1)
        elif leaf.dim() and len(leaf) == n * samples:
            leaf = leaf.narrow(0, low * n, (high - low) * n)
        elif samples in leaf.shape[:2] and not isinstance(leaf, nn.Parameter):
            leaf = leaf.narrow(leaf.shape.index(samples), low, high - low)
        if wide and leaf.is_floating_point() and leaf.itemsize < 4:
            return leaf.float()
        return leaf.clone()

    def refuse(held: Any) -> bool:
        if held is not value and isinstance(held, list | tuple) and len(held) == samples:
            raise TypeError  # an item for each sample
        return False

    return map_leaves(take, value, refuse)
