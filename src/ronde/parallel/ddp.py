"""Replicate: every worker holds the whole model, and DistributedDataParallel averages gradients.

Three additions to DDP, none of which costs an exchange of its own:

- *The carrier*: one more parameter, whose "gradient" is this worker's part of the loss, of the
  weights and of the unused flags. It rides in DDP's last bucket and comes back summed. So every
  rank has the global loss without a collective, and nothing waits for it unless it is read.
- *Uneven and empty shares*: the loss is scaled by samples / global samples before the backward
  pass, so that DDP's mean is the mean over samples. A worker without samples contributes zeros.
- *Unused parameters*: those that the backward pass did not reach get zeros, so that the exchange
  completes. If no worker reached one, it has no gradient afterwards, as in one process, and the
  optimizer leaves it alone.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ronde.capture import compiled
from ronde.exchange import Exchange, Members, build_reducer, choose_reducer
from ronde.parallel.batchnorm import absent, normalizes_batch, set_present
from ronde.parallel.buckets import broadcast_packed
from ronde.parallel.strategy import (
    Compute,
    Flags,
    Part,
    Scale,
    Strategy,
    backward,
    forget_frozen,
    part_gradients,
    scale_gradients,
    trainable,
)
from ronde.plan import parse_reducer
from ronde.world import PlanError, World
from ronde.world.consensus import broadcast_json

__all__ = ["Replicate"]

_LOSS, _WEIGHT, _UNUSED = range(3)

# Buffers are exchanged by before_batch and sync_buffers, not by DDP. torch 2.13 renamed the option.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
_NO_BUFFERS: dict[str, Any] = {_SYNC: False}

# Of a 1×1 convolution, or a parameter that is no whole tensor: exact, and nobody can change it.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


class _Wrapped(nn.Module):
    """What DDP sees: the carrier comes first, so that it rides in DDP's last bucket."""

    def __init__(self, model: nn.Module, carrier: nn.Parameter) -> None:
        super().__init__()
        self.carrier = carrier
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()

    __call__ = forward  # skips the machinery of hooks, which costs 3 µs


def _nothing() -> None:
    return None


def payload_dtype(parameters: list[nn.Parameter]) -> torch.dtype:
    """The parameters' own precision, and at least float32; that of their bucket, if it has one."""
    double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if double else torch.float32


def _sparse_parameters(model: nn.Module) -> set[torch.Tensor]:
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return {m.weight for m in embeddings if m.sparse}


def _own_values(gradient: torch.Tensor) -> torch.Tensor | None:
    """A copy of a sparse gradient: embeddings whose outputs are added have the same values in
    memory, which DDP would divide once for each of them.
    """
    return gradient.clone() if gradient.is_sparse else None


def _sparse_zeros(p: torch.Tensor) -> torch.Tensor:
    index = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(index, p.new_empty((0, *p.shape[1:])), p.shape)


class Replicate(Strategy):
    """Carries data parallelism out on one model.

    Args:
        model: the script's own module; its parameters are averaged in place.
        me: this worker.
        run_empty: an empty share runs the forward pass too (batch normalization over all workers
            needs it).
        reducer: how gradients are averaged, as in :class:`ronde.Plan`.
        optimizer: the script's own; for reducers that keep its state.
    """

    def __init__(
        self,
        model: nn.Module,
        me: World,
        run_empty: bool = False,
        reducer: str = "ring",
        optimizer: Optimizer | None = None,
    ) -> None:
        self.model = model
        self.me = me
        self.run_empty = run_empty
        self._optimizer = optimizer
        self._choose_reducer(reducer)
        self._changing: list[str] = []  # buffers that a step changes and the next one reads
        self._steps = 0
        self._seen: dict[str, tuple[int, int]] | None = None
        self.local_loss: torch.Tensor | None = None
        self._scaled = False  # whether the step is in half precision
        self._begun = False  # whether a step is under way
        self._factors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._weighted: bool | None = None
        self._reached: set[int] | None = None
        self._hooks: list[Any] = []
        self.parameters = []
        self._build()

    def _choose_reducer(self, text: str) -> None:
        choice = parse_reducer(text)
        self._bucket_mib = 25.0
        if choice.name == "auto":
            members = Members.of(self.me)
            size = sum(p.nbytes for _, p in trainable(self.model))
            name, self.note = choose_reducer(self.me, members, size, build_reducer)
            choice = parse_reducer(name)
        if choice.name == "ring":  # DDP's own path, without a hook
            self._bucket_mib = choice.values[0]
            return
        if sparse := _sparse_parameters(self.model):
            names = [n for n, p in self.model.named_parameters() if p in sparse]
            raise PlanError(
                f"reducer={text!r} averages dense gradients, and {names[0]!r} has sparse ones "
                "(sparse=True of its embedding). Use reducer='ring', or sparse=False."
            )
        reducer = build_reducer(choice, Members.of(self.me))
        self._bucket_mib = reducer.bucket_mib
        self.exchange = Exchange(reducer)

    def _build(self) -> None:
        named = trainable(self.model)
        forget_frozen(self.model, self.parameters)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        size, dtype = _UNUSED + len(named), payload_dtype(self.parameters)
        self._carrier = nn.Parameter(torch.zeros(size, dtype=dtype, device=self.me.device))
        self._payload = torch.zeros_like(self._carrier, requires_grad=False)
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]
        self._flagged = False  # whether the payload holds unused flags
        self._sparse = _sparse_parameters(self.model)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.register_hook(_own_values) for p in self._sparse if p.requires_grad]  # type: ignore[no-untyped-call]
        self._flags = Flags(self.model, replaced=True)
        self._is_compiled = any(map(compiled, self.model.modules()))
        self._ddp: Any = DistributedDataParallel(
            _Wrapped(self.model, self._carrier),
            **_NO_BUFFERS,
            gradient_as_bucket_view=not self._sparse,
            bucket_cap_mb=self._bucket_mib,  # 25 is DDP's default, without its small first bucket
        )
        if self.exchange is not None:
            if self._optimizer is not None:  # again, for what a script has thawed
                self.exchange.reducer.bind(dict(named), self._optimizer)
            self.exchange.attach(self._ddp, {id(p): n for n, p in named}, self._carrier)
        self.sync_buffers()

    @property
    def is_untouched(self) -> bool:
        """Whether no step was taken yet, so that DDP has not ordered its buckets."""
        return self._steps == 0

    def rebuild(self) -> None:
        """Build DDP again, which orders its buckets by the first step. A collective."""
        self._reached = None
        if self.exchange is not None and self.exchange.reducer.drifts:
            self.exchange.stepped(settle=True)  # DDP begins with rank 0's weights
        self._build()

    def run_empty_shares(self) -> None:
        """See :meth:`Strategy.run_empty_shares`."""
        self.run_empty = True

    def no_exchange(self) -> AbstractContextManager[None]:
        """A context in which backward passes do not communicate."""
        paused: AbstractContextManager[None] = self._ddp.no_sync()
        return paused

    def _watch_reached(self) -> None:
        """Note what the last micro-batch reaches: gradients of earlier ones exist already."""
        self._reached = set()
        for i, p in enumerate(self.parameters):

            def reached(_: torch.Tensor, i: int = i) -> None:
                assert self._reached is not None
                self._reached.add(i)

            self._hooks.append(p.register_post_accumulate_grad_hook(reached))  # type: ignore[no-untyped-call]

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        ddp = self._ddp
        if not self._begun:
            self._before_first()
            self._scaled = scale is not None
        if not part.last:
            if self._reached is None:
                self._watch_reached()
            if part.samples or self.run_empty:
                with ddp.no_sync():
                    self._forward_backward(compute, part, scale)
                part_gradients(self.parameters)
            return
        if self._reached is not None:
            self._reached.clear()
        if part.samples or self.run_empty:
            self._forward_backward(compute, part, scale)
        else:
            ddp(_nothing)
        self._complete()

    def _before_first(self) -> None:
        for p in self.parameters:
            p.grad = None
        self._carrier.grad = None
        self._begun = True
        self._loss_slot.zero_()
        if self._weighted is not False:
            self._weight_slot.zero_()

    def _forward_backward(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        assert compute is not None
        if not part.samples:
            with absent():
                value, _ = self._forward(compute)
                self._backward(value, 0.0, scale)
            return
        value, weight = self._forward(compute)
        factor = self._weigh(weight, part, self.me.size)  # DDP divides by the number of workers
        # In half precision finish() multiplies, so that overflow does not depend on their number.
        self._backward(value, factor if scale is None else factor / self.me.size, scale)
        self._loss_slot.add_(value.detach(), alpha=factor)

    def _forward(self, compute: Compute) -> tuple[torch.Tensor, torch.Tensor | None]:
        """DDP's forward pass. Once its buckets are ordered, only what it still does under these
        options: the rest costs 70 µs a step. torch's compiler asks for the DDP whose forward pass
        is under way, to cut graphs at its buckets.
        """
        ddp = self._ddp
        if self._is_compiled or not ddp._has_rebuilt_buckets:
            value: tuple[torch.Tensor, torch.Tensor | None] = ddp(compute)
            return value
        if not ddp.require_backward_grad_sync:
            return compute()
        ddp.reducer.prepare_for_forward()
        value = compute()
        ddp.reducer.prepare_for_backward([])
        return value

    def _weigh(self, weight: torch.Tensor | None, part: Part, workers: int = 1) -> float:
        """The factor of a micro-batch's loss in the global one; notes its weight, if it has one."""
        own = part.weight
        self._weighted = weight is not None or own is not None
        factor = workers / part.global_samples
        if weight is not None:
            self._weight_slot.add_(weight, alpha=factor)
            return factor
        if own is not None:
            self._weight_slot += factor * own
            return factor * own
        return float(workers) if part.summed else factor * part.samples

    def _backward(self, value: torch.Tensor, factor: float, scale: Scale | None) -> None:
        """Backward pass of ``factor * value``: the factor is where the chain rule starts."""
        start = self._factors.get((factor, value.dtype))
        if start is None:
            if len(self._factors) > 64:
                self._factors.clear()
            start = torch.full((), factor, dtype=value.dtype, device=value.device)
            self._factors[factor, value.dtype] = start
        backward((value,), (start if scale is None else scale(start),))

    def _complete(self) -> None:
        """Give DDP what it still waits for: the carrier, and zeros for unreached parameters."""
        if self._reached is None:
            missing = unused = [i for i, p in enumerate(self.parameters) if p.grad is None]
        else:
            missing = [i for i in range(len(self.parameters)) if i not in self._reached]
            unused = [i for i in missing if self.parameters[i].grad is None]
        payload = self._payload
        if self._flagged or unused:
            payload[_UNUSED:] = 0
            payload[_UNUSED:][unused] = 1
            self._flagged = bool(unused)
        roots: list[torch.Tensor] = [self._carrier]
        grads: list[torch.Tensor] = [payload]
        for i in missing:
            p = self.parameters[i]
            roots.append(p)
            if p in self._sparse:
                grads.append(_sparse_zeros(p))
            elif p.grad is not None:  # zeros without memory
                grads.append(p.new_zeros(()).expand_as(p))
            else:
                grads.append(torch.zeros_like(p))
        begun = time.perf_counter()
        backward(tuple(roots), tuple(grads))  # which ends when the exchange has
        self.waited_seconds = time.perf_counter() - begun
        if self.exchange is not None:
            self.exchange.check()
        if unused:
            summed = self._carrier.grad
            assert summed is not None
            # the mean of ones; read at once, as a GPU is waited for each time
            nobody = (summed[_UNUSED:] > 1 - 0.5 / self.me.size).tolist()
            for i in unused:
                if nobody[i]:
                    self.parameters[i].grad = None

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        summed = self._carrier.grad
        assert summed is not None
        if self._seen is not None:
            self._choose_buffers(self._seen)
        if self._scaled:
            size = torch.full((), float(self.me.size), device=self.me.device)
            scale_gradients(self.parameters, size)
        self.local_loss = self._loss_slot
        self._begun = False
        if self._sparse:  # gradients are no views of DDP's buckets
            part_gradients(self.parameters)
        loss = summed[_LOSS]
        # A worker that had no sample yet learns from the others whether the loss has weights.
        if bool(summed[_WEIGHT] != 0) if self._weighted is None else self._weighted:
            scale_gradients(self.parameters, 1.0 / summed[_WEIGHT])
            loss = loss / summed[_WEIGHT]
        return loss.clone()  # the bucket behind it is written again by the next step

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Identity and version of every buffer that training reads.

        Training does not read the running statistics of batch normalization: they are exchanged
        when something does, see :meth:`sync_buffers`.
        """
        norms = [m for m in self.model.modules() if normalizes_batch(m)]
        running = {id(b) for m in norms for b in m.buffers(recurse=False)}
        buffers = self.model.named_buffers()
        return {n: (id(b), b._version) for n, b in buffers if id(b) not in running}

    def before_batch(self, present: bool) -> None:
        """See :meth:`Strategy.before_batch`."""
        if self.run_empty:
            set_present(present)
        self.refresh()
        if self._changing:
            named = dict(self.model.named_buffers())
            broadcast_packed([named[n] for n in self._changing], self.me.device)
        # Constant buffers (masks, positions) need no exchange. Steps 1, 2, 4, 8 … find out which.
        self._seen = self._marks() if self._steps & (self._steps - 1) == 0 else None
        self._steps += 1

    def _choose_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        """Note the buffers that this step changed: rank 0's values are sent before the next."""
        self._seen = None
        if not before:
            return
        changed = [n for n, mark in self._marks().items() if mark != before.get(n)]
        everyone = broadcast_json(self.me, changed)  # rank 0 is never without samples
        self._changing = sorted({*self._changing, *everyone})

    def refresh(self) -> bool:
        """See :meth:`Strategy.refresh`."""
        changed = self._flags.changed()
        if changed:
            self.on_change()
            self.rebuild()
        return changed

    def expect(self, present: bool) -> None:
        """See :meth:`Strategy.expect`."""
        if self.run_empty:
            set_present(present)

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        if self.exchange is not None:
            self.exchange.stepped()

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""
        broadcast_packed(self.model.buffers(), self.me.device)

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        before = zip(self.names, map(id, self.parameters), strict=True)
        if [(n, id(p)) for n, p in trainable(self.model)] != list(before):
            self.on_change()
            self.rebuild()
        elif self._steps:
            self.sync_buffers()
