"""Replicate: every worker holds the whole model, gradients are averaged by torch's
DistributedDataParallel.

Three things are added to DDP, and cost no exchange of their own:

- *The carrier*: one more parameter, whose "gradient" is this worker's part of the loss, of the
  weights and of what was not used. It rides in DDP's last bucket and comes back summed: the global
  loss is on every rank without a collective, and is never waited for unless it is read.
- *Uneven and empty shares*: the loss is scaled by samples / global samples before the backward
  pass, so DDP's mean is the mean over samples. A worker without samples gives zeros.
- *Unused parameters*: what the backward pass did not reach is given zeros so that the exchange
  completes. What no worker reached has no gradient afterwards, as with one process, and the
  optimizer leaves it alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ronde.parallel.batchnorm import absent, set_present
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
from ronde.world import World, WorldError
from ronde.world.consensus import broadcast_json, gather_json

__all__ = ["Replicate"]

_LOSS, _WEIGHT, _UNUSED = 0, 1, 2

# Which buffers are exchanged, and when, is decided here (see sync_buffers). torch 2.13 gave the
# option a new name.
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


class _Wrapped(nn.Module):
    """What DDP sees: the carrier first, so that it is the last in DDP's first bucket order too."""

    def __init__(self, model: nn.Module, carrier: nn.Parameter) -> None:
        super().__init__()
        self.carrier = carrier
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()

    __call__ = forward  # it has no hooks: the way through them costs 3 µs


def _nothing() -> None:
    return None


def _carrier_dtype(parameters: list[nn.Parameter]) -> torch.dtype:
    """The parameters' own type, so that the carrier shares their bucket; never less than
    float32.
    """
    dtypes = {p.dtype for p in parameters}
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def _is_sparse(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in model.modules())


def _sparse_zeros(p: torch.Tensor) -> torch.Tensor:
    index = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(index, p.new_empty((0, *p.shape[1:])), p.shape)


class Replicate(Strategy):
    """Carries data parallelism out on one model.

    Args:
        model: the script's own module; its parameters are averaged in place.
        me: this worker.
        run_empty: an empty share runs the forward pass all the same (batch normalisation over all
            workers needs it).
        bucket_megabytes: size of DDP's buckets.
    """

    def __init__(
        self, model: nn.Module, me: World, run_empty: bool = False, bucket_megabytes: float = 25.0
    ) -> None:
        self.model = model
        self.me = me
        self.run_empty = run_empty
        self._bucket_megabytes = bucket_megabytes
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
        self._build()

    def _build(self) -> None:
        named = trainable(self.model)
        forget_frozen(self.model)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._carrier = nn.Parameter(
            torch.zeros(
                _UNUSED + len(named), dtype=_carrier_dtype(self.parameters), device=self.me.device
            )
        )
        self._payload = torch.zeros_like(self._carrier, requires_grad=False)
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]
        self._flagged = False
        self._sparse = _is_sparse(self.model)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._flags = Flags(self.model)
        self._ddp = DistributedDataParallel(
            _Wrapped(self.model, self._carrier),
            **_NO_BUFFERS,
            gradient_as_bucket_view=not self._sparse,
            bucket_cap_mb=self._bucket_megabytes,
        )
        self.sync_buffers()
        self._check_equal()

    @property
    def is_untouched(self) -> bool:
        """Whether no step has been taken: DDP has not ordered its buckets yet."""
        return self._steps == 0

    def rebuild(self) -> None:
        """Make DDP anew, as before the first step. A collective."""
        self._reached = None
        self._build()

    def no_exchange(self) -> AbstractContextManager[None]:
        """Within, backward passes stay on this worker."""
        return self._ddp.no_sync()

    def _check_equal(self) -> None:
        """Every rank now has rank 0's weights and buffers: compare their bits, summed, tensor by
        tensor.
        """
        sums: dict[str, int] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            data = tensor.detach()
            bits = (
                data.view(torch.uint8)
                if data.dim() and data.is_contiguous()
                else data.contiguous().reshape(-1).view(torch.uint8)
            )
            sums[name] = int(bits.reshape(-1).sum(dtype=torch.int64))
        for rank, theirs in enumerate(gather_json(self.me, sums)):
            for name, value in theirs.items():
                if value != sums.get(name):
                    raise WorldError(
                        f"After rank 0's weights were sent to all, {name!r} of rank {rank} "
                        "still differs from that of rank "
                        f"{self.me.rank}. Is it a view into another tensor, or changed by a hook?"
                    )

    def _watch_reached(self) -> None:
        """With several micro-batches a gradient exists from the earlier ones: note what the last
        one reaches.
        """
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
        self._exchange()

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
                value, _ = self._ddp(compute)
                self._backward(value, 0.0, scale)
            return
        value, weight = self._ddp(compute)
        self._weighted = weight is not None
        # DDP divides by the number of workers: multiply by it
        factor = self.me.size / part.global_samples
        if weight is not None:
            self._weight_slot.add_(weight, alpha=factor)
        else:
            factor *= part.samples
        # In half precision afterwards, so that what overflows does not depend on the number of
        # workers.
        self._backward(value, factor if scale is None else factor / self.me.size, scale)
        self._loss_slot.add_(value.detach(), alpha=factor)

    def _backward(self, value: torch.Tensor, factor: float, scale: Scale | None) -> None:
        """Backward pass of ``factor * value``, without the multiplication: the factor is where the
        chain rule starts.
        """
        start = self._factors.get((factor, value.dtype))
        if start is None:
            if len(self._factors) > 64:
                self._factors.clear()
            start = self._factors[factor, value.dtype] = torch.tensor(
                factor, dtype=value.dtype, device=value.device
            )
        backward((value,), (start if scale is None else scale(start),))

    def _exchange(self) -> None:
        """Give DDP the rest of what it waits for: the carrier, and zeros for what was not
        reached.
        """
        if self._reached is None:
            missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
            unused = missing
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
            grads.append(_sparse_zeros(p) if self._is_sparse_one(p) else torch.zeros_like(p))
        backward(tuple(roots), tuple(grads))
        if unused:
            summed = self._carrier.grad
            assert summed is not None
            # the mean of ones: no worker reached it
            nobody = summed[_UNUSED:] > 1 - 0.5 / self.me.size
            for i in unused:
                if nobody[i]:
                    self.parameters[i].grad = None

    def _is_sparse_one(self, p: nn.Parameter) -> bool:
        return self._sparse and any(
            getattr(m, "weight", None) is p and getattr(m, "sparse", False)
            for m in self.model.modules()
        )

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        summed = self._carrier.grad
        assert summed is not None
        if self._seen is not None:
            self._choose_buffers(self._seen)
        if self._scaled:
            scale_gradients(
                self.parameters, torch.tensor(float(self.me.size), device=self.me.device)
            )
        self.local_loss = self._loss_slot
        self._begun = False
        loss = summed[_LOSS]
        # A worker that had no sample yet learns from the others whether the loss has weights.
        if self._weighted if self._weighted is not None else bool(summed[_WEIGHT] != 0):
            scale_gradients(self.parameters, 1.0 / summed[_WEIGHT])
            return loss / summed[_WEIGHT]
        return loss.clone()  # the bucket behind it is written again by the next step

    def _marks(self) -> dict[str, tuple[int, int]]:
        """Every buffer that matters while training, as it is now: which tensor, and how often it
        was changed in place.

        The running statistics of batch normalisation are not read while training: they are
        exchanged when something reads them, see :meth:`sync_buffers`.
        """
        running = {
            id(b)
            for m in self.model.modules()
            if isinstance(m, _BatchNorm)
            for b in m.buffers(recurse=False)
        }
        return {
            n: (id(b), b._version) for n, b in self.model.named_buffers() if id(b) not in running
        }

    def before_batch(self, present: bool) -> None:
        """See :meth:`Strategy.before_batch`."""
        set_present(present or not self.run_empty)
        self.refresh()
        if self._changing:
            named = dict(self.model.named_buffers())
            self._broadcast([named[n] for n in self._changing])
        # Constant buffers (masks, positions) need no exchange: which are, is looked at in step 1,
        # 2, 4, 8 …
        self._seen = self._marks() if self._steps & (self._steps - 1) == 0 else None
        self._steps += 1

    def _choose_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        """Which buffers did this step change, for the next one to read?"""
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
            self.rebuild()
        return changed

    def expect(self, present: bool) -> None:
        """See :meth:`Strategy.expect`."""
        set_present(present or not self.run_empty)

    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for b in buffers:
            by_type.setdefault(b.dtype, []).append(b)
        with torch.no_grad():
            for same in by_type.values():
                flat = torch.cat([b.reshape(-1) for b in same]).to(self.me.device)
                bits = flat.view(torch.uint8)
                dist.broadcast(bits, 0)
                for b, part in zip(same, torch.split(flat, [b.numel() for b in same]), strict=True):
                    b.copy_(part.view_as(b))

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0."""
        buffers = [b for b in self.model.buffers() if b.numel()]
        if buffers:
            self._broadcast(buffers)

    def start_epoch(self) -> None:
        """See :meth:`Strategy.start_epoch`."""
        if [(n, id(p)) for n, p in trainable(self.model)] != list(
            zip(self.names, map(id, self.parameters), strict=True)
        ):
            self.rebuild()
        elif self._steps:
            self.sync_buffers()
