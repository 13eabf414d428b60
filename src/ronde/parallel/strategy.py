"""The strategy interface: how a plan carries out forward, backward and exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward  # type: ignore[attr-defined]
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ronde.exchange import Exchange
    from ronde.introspect import SavedState
    from ronde.parallel.own_calls import OwnCalls

__all__ = [
    "Compute",
    "Flags",
    "GradientHooks",
    "NOTHING",
    "Part",
    "Single",
    "Scale",
    "Strategy",
    "Work",
    "backward",
    "forget_frozen",
    "part_gradients",
    "scale_gradients",
    "scale_tensors",
    "trainable",
]

Compute = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Runs forward and loss on one micro-batch: ``(mean, None)`` or ``(sum, weight)``."""

Scale = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch's place in its global batch.

    Attributes:
        samples: its size; 0 if the worker only takes part in the exchange.
        global_samples: the size of the global batch, over all workers.
        last: whether it is this worker's last micro-batch of the step.
        summed: the loss is a sum over samples, and so is the global one.
        rows: the weight of its mean, if that is not the number of samples on each worker: a collate
            function may have left some out.
    """

    samples: int
    global_samples: int
    last: bool
    summed: bool = False
    rows: float | None = None

    @property
    def weight(self) -> float | None:
        """The weight of its mean where that is :attr:`rows`, else None."""
        return None if self.summed else self.rows


_MOST_BYTES = 2**26  # of a tensor that a loss keeps: larger ones are data


@dataclass
class Work:
    """The script's objects that a plan is applied to.

    Attributes:
        model: the script's own module.
        optimizer: the script's own optimizer. A strategy may change its parameters, but keeps the
            object.
        compute: forward and loss of one micro-batch: ``(mean, None)`` or ``(sum, weight)``.
        sample: ``sample(n)`` returns a micro-batch of ``n`` samples on this worker's device. It
            consumes no randomness.
        sizes: the micro-batch sizes of an epoch, in samples.
        tensor_plan: module name -> parallel style, if the script chooses how torch's
            ``parallelize_module`` splits it.
        groups: parameter names of each optimizer group, before anything is split.
        tied: state name of a shared tensor -> its first name, before anything is split.
        fill: initializes a model built on meta (:mod:`ronde.parallel.meta_init`); None if the model
            has values.
        undivided: the model's parameters as the script made them; a plan may replace them.
        functions: the script's loss and forward, which may keep state of their own.
    """

    model: nn.Module
    optimizer: Optimizer
    compute: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
    sample: Callable[[int], Any]
    tensor_plan: Mapping[str, Any] | None = None
    sizes: tuple[int, ...] = ()
    groups: list[list[str]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    fill: Callable[[Callable[[str], bool]], None] | None = None
    undivided: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    functions: tuple[Any, ...] = ()

    def trial(self) -> SavedState:
        """Around a pass that is no training's: what ``functions`` keep is put back."""
        from ronde.introspect import SavedState  # one process makes no such pass

        return SavedState(*self.functions, largest=_MOST_BYTES)


class Strategy:
    """A plan applied to a model: the interface and the common behavior.

    Attributes:
        model: the script's own module.
        local_loss: this worker's part of the last step's loss, None if it had no samples.
        parameters: the trainable parameters this worker updates.
        holds_result: whether this worker has the outputs and loss of a forward pass (in a pipeline,
            only the last stage's worker does).
        counts: whether this worker reports its replica's result of an evaluation.
        run_empty_inference: whether a worker without samples in an evaluation batch must run a
            stand-in, because its layers gather everyone's parameters.
        whole_step: whether a step is one call for all micro-batches (a pipeline), so that the
            script cannot write its own loop.
        exchange: what averages gradients in another way than the backend's all-reduce; else None.
        note: a sentence about how it was chosen, or empty.
        split_at: names of the modules that begin a pipeline's later stages.
        on_change: called before it follows parameters that were frozen, thawed or replaced: lets
            all ranks agree on them.
        waited_seconds: how long this worker waited for the exchange of the last step, if known.
    """

    model: nn.Module
    local_loss: torch.Tensor | None = None
    parameters: list[nn.Parameter]
    holds_result: bool = True
    counts: bool = True
    run_empty_inference: bool = False
    whole_step: bool = False
    exchange: Exchange | None = None
    note: str = ""
    split_at: tuple[str, ...] = ()
    on_change: Callable[[], None] = staticmethod(lambda: None)
    waited_seconds: float | None = None

    @property
    def drifts(self) -> bool:
        """Whether workers that hold the same part have other weights now."""
        return self.exchange is not None and self.exchange.reducer.drifts

    @property
    def every(self) -> int:
        """Optimizer steps after which those workers have the same again."""
        return 1 if self.exchange is None else self.exchange.reducer.every

    @property
    def is_untouched(self) -> bool:
        """Whether what it learns in its first step is to be learned anew: see :meth:`rebuild`."""
        return False

    def rebuild(self) -> None:
        """Forget what the steps so far have taught it."""

    def step(
        self,
        micros: Sequence[Any],
        parts: Sequence[Part],
        compute: Callable[[Any], Any],
        scale: Scale | None,
    ) -> None:
        """Forward and backward of all micro-batches of a step; :meth:`finish` follows."""
        for micro, part in zip(micros, parts, strict=True):
            self.micro(partial(compute, micro), part, scale)

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """Forward and backward of one micro-batch; ``scale`` is the half-precision loss scale."""
        raise NotImplementedError

    def finish(self) -> torch.Tensor:
        """Complete the exchange: gradients of the global mean. Returns the global loss, 0-d."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> None:
        """Scale all workers' gradients so that their joint norm is at most ``max_norm``."""
        part_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """Skip the update on all workers if one has non-finite half-precision gradients.

        Called only if workers hold different parameters.
        """
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        default = self.parameters[0].device if self.parameters else torch.device("cpu")
        device = next(iter(flags), default)
        # one worker alone would skip: its part would be a step behind the others'
        flag = torch.zeros(1, device=device)
        for value in flags.values():
            flag += value.to(device).reshape(1)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        flags.update({d: flag.to(d).clamp(max=1.0) for d in (flags or [device])})

    def updated(self) -> None:
        """Called after the optimizer's step."""

    def infer(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """Run ``call(batch)``, a forward without gradients. None on a worker without the result."""
        return call(batch)

    def start_epoch(self) -> None:
        """Synchronize buffers that drifted apart."""

    def before_batch(self, present: bool) -> None:
        """Called before the script sees a batch. ``present``: its first micro-batch has samples."""
        self.refresh()

    def refresh(self) -> bool:
        """Notice parameters that were frozen, thawed or replaced. Returns whether any were."""
        return False

    def run_empty_shares(self) -> None:
        """From now on, run forward and backward of a stand-in if this worker has no samples: the
        script's loss exchanges something among all workers.
        """

    def expect(self, present: bool) -> None:
        """Announce whether the script's next own forward pass has samples or is a stand-in."""

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (in a pipeline: of the rank that holds them)."""

    def owns(self, name: str) -> bool:
        """Whether this worker holds a parameter or buffer (or shard), by ``state_dict()`` name."""
        return True

    def watch(self, calls: OwnCalls) -> None:
        """Let passes that the script makes by itself meet first."""
        calls.surround(self.model)

    def loaded(self) -> None:
        """Called after a checkpoint's weights, buffers and optimizer state were restored."""


class Flags:
    """Which parameters exist and require gradients, to detect changes cheaply.

    Args:
        replaced: also notice layers and parameters that were replaced.
    """

    def __init__(self, model: torch.nn.Module, replaced: bool = False) -> None:
        self._parameters = list(model.parameters())
        self._flags = [p.requires_grad for p in self._parameters]
        # the dictionaries themselves: reading them costs less than a walk over the modules
        modules = list(model.modules()) if replaced else []
        self._members: list[dict[str, Any]] = [
            d for m in modules for d in (m._modules, m._parameters) if d
        ]
        self._ids = self._members_now()

    def _members_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._members))))

    def changed(self) -> bool:
        """Whether a parameter was frozen or thawed, or replaced."""
        flags = [p.requires_grad for p in self._parameters]
        return flags != self._flags or self._members_now() != self._ids


def forget_frozen(model: nn.Module, before: Iterable[nn.Parameter] = ()) -> None:
    """Drop old gradients that the optimizer would keep using: of parameters that are frozen, or of
    those ``before`` that the model has no longer.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for p in (*model.parameters(), *before):
        if id(p) not in trained:
            p.grad = None


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Trainable parameters, each once, by first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def backward(roots: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    """``torch.autograd.backward`` without its shape checks, which cost 20 µs a call."""
    _engine_run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def part_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Separate gradients that share memory.

    Backward passes of views are views: after ``(a.reshape(6) + b.reshape(6)).sum().backward()``,
    ``a.grad`` and ``b.grad`` are the same memory (torch 2.13), and an in-place addition to one
    changes both. The same holds for the values of sparse gradients.
    """
    seen: set[int] = set()
    for t in tensors:
        grad = t.grad
        if grad is None or type(grad) is not torch.Tensor:
            continue
        if grad.layout not in (torch.strided, torch.sparse_coo):
            continue
        values = grad._values() if grad.is_sparse else grad
        memory = values.untyped_storage().data_ptr()
        if memory in seen:
            t.grad = grad.clone()
        elif memory:
            seen.add(memory)


def scale_tensors(dense: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a 0-d tensor, in place, each in its own type, and where it is."""
    for device in {g.device for g in dense}:  # offload: some wait in the host's memory
        here = [g for g in dense if g.device == device]
        one_type = all(g.dtype == here[0].dtype for g in here)
        torch._foreach_mul_(here, factor.to(device, here[0].dtype if one_type else None))


def scale_gradients(parameters: list[torch.nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply all gradients by a 0-d tensor, in place."""
    dense = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    scale_tensors(dense, factor)
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad.mul_(factor)


# hooks of these are part of the exchange, or listen to it
_OWN = ("ronde.parallel.", "ronde.prove.")
NOTHING: AbstractContextManager[None] = nullcontext()


def _of_script(hooks: dict[Any, Any] | None) -> dict[Any, Any]:
    items = hooks.items() if hooks else ()
    return {k: h for k, h in items if not str(getattr(h, "__module__", "")).startswith(_OWN)}


class GradientHooks:
    """Holds the script's hooks back in backward passes, and calls them after the exchange."""

    def __init__(self) -> None:
        self._hooked: dict[nn.Parameter, None] = {}

    def held(self, parameters: Sequence[Any]) -> AbstractContextManager[None]:
        """A context in which backward passes do not call them."""
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        return self._held(hooked) if hooked else NOTHING

    @contextmanager
    def _held(self, hooked: list[Any]) -> Iterator[None]:
        self._hooked.update(dict.fromkeys(hooked))
        live = [h for p in hooked for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
        held = [(hooks, _of_script(hooks)) for hooks in live]
        try:
            for hooks, theirs in held:
                for key in theirs:
                    del hooks[key]
            yield
        except BaseException:
            self._hooked.clear()
            raise
        finally:
            for hooks, theirs in held:
                hooks.update(theirs)

    def run(self) -> None:
        """Call those that were held, on the averaged gradients."""
        if self._hooked:
            self._run()

    @torch.no_grad()
    def _run(self) -> None:
        for p in self._hooked:
            for hook in _of_script(p._backward_hooks).values():
                if p.grad is not None and (changed := hook(p.grad)) is not None:
                    p.grad = changed
            for hook in _of_script(p._post_accumulate_grad_hooks).values():  # type: ignore[attr-defined]
                if p.grad is not None:
                    hook(p)
        self._hooked.clear()


class Single(Strategy):
    """Runs a one-worker plan: the arithmetic of a plain loop, without exchange."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for _, p in trainable(model)]
        self._flags = Flags(model, replaced=True)
        self._loss: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._samples = 1
        self.local_loss: torch.Tensor | None = None

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        assert compute is not None
        if self._loss is None:
            for p in self.parameters:
                p.grad = None
        value, weight = compute()
        self._samples = part.global_samples
        if weight is None and part.weight is not None:
            value, weight = value * part.weight, value.new_tensor(part.weight)
        if weight is not None:
            # keeps its size near one until the true weight is known
            loss = value / part.global_samples
            self._weight = weight if self._weight is None else self._weight + weight
        elif part.summed or part.samples == part.global_samples:
            loss = value  # the whole batch at once: exactly the plain loop, bit for bit
        else:
            loss = value * (part.samples / part.global_samples)
        (loss if scale is None else scale(loss)).backward()  # type: ignore[no-untyped-call]
        if self._loss is None and not part.last:
            part_gradients(self.parameters)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        loss, weight = self._loss, self._weight
        self._loss = self._weight = None
        assert loss is not None
        self.local_loss = loss
        if weight is not None:
            factor = self._samples / weight
            part_gradients(self.parameters)
            scale_gradients(self.parameters, factor)
            loss = loss * factor
        return loss

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        forget_frozen(self.model, self.parameters)
        self.parameters = [p for _, p in trainable(self.model)]
        self._flags = Flags(self.model, replaced=True)

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        changed = self._flags.changed()
        if changed:
            self.start_epoch()
        return changed
