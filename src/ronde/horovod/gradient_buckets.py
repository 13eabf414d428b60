"""``DistributedOptimizer``: gradients are averaged in buckets while the backward pass goes on.

The first step only records in which order gradients arrive. All ranks then take rank 0's order and
fill buckets in it; from the second step on, a bucket is sent as soon as its last gradient is there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ronde.horovod.bridge import Bridge, HorovodInternalError
from ronde.horovod.collectives_api import (
    allreduce_async_,
    grouped_allreduce_async,
    sparse_allreduce_async,
    synchronize,
)
from ronde.horovod.compression import Compression, Compressor
from ronde.horovod.lifecycle import ProcessSet, bridge, global_process_set, size
from ronde.horovod.transfers import Reduction, dtype_name, reduction_of, warn_script

__all__ = ["distributed_optimizer"]

Tensor = torch.Tensor

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(): wrap step in 'with optimizer.skip_synchronize():'."
)


# torch puts this function around step() of every optimizer class that has an instance.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def _is_outermost(optimizer: Any) -> bool:
    """Whether this hook belongs to the script's own call of step(): a class's step() may call its
    parent's, which torch gives hooks too.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps <= 1


@dataclass(eq=False)
class _Bucket:
    """Gradients that travel together, in one flat tensor where they are dense."""

    name: str
    params: list[Tensor]
    sparse: bool = False
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    handle: Any = None
    contexts: list[Any] = field(default_factory=list)


class _Gradients:
    """The exchange of one optimizer's gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        compression: type[Compressor],
        passes: int,
        op: Reduction,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.optimizer, self.names, self.compression = optimizer, names, compression
        self.passes, self.op, self.predivide = passes, op, predivide
        self.groups, self.sparse_as_dense, self.process_set = groups, sparse_as_dense, process_set
        self.synchronized = False
        self.enabled = True
        self.pending = False  # gradients have arrived since the last exchange
        self._left: dict[Tensor, int] = {}
        self._order: list[Tensor] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}
        self._agreed: tuple[Bridge, int] | None = None
        self._home: Bridge | None = None
        self._number = 0  # of this optimizer among those of its rank
        self._watch()

    def _active(self) -> bool:
        return bool(self.process_set.included()) and size() > 1

    def _watch(self) -> list[Tensor]:
        """Hook parameters that need a gradient and have no hook: also those unfrozen later."""
        fresh = []
        for i, group in enumerate(self.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self._left:
                    self.names.setdefault(p, f"added.{i}.{j}")
                    self._left[p] = self.passes
                    p.register_post_accumulate_grad_hook(self._arrived)
                    fresh.append(p)
        return fresh

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes make a step."""
        self.passes = passes
        self.reset()

    def reset(self) -> None:
        """Forget what has arrived."""
        if any(bucket.handle is not None for bucket in self._buckets):
            self._agreed = None  # what is under way goes on in these buckets: fill others
        self._left = dict.fromkeys(self._left, self.passes)
        self._order.clear()
        self.pending = self.synchronized = False
        for bucket in self._buckets:
            bucket.handle, bucket.waiting = None, len(bucket.params)

    def _arrived(self, p: Tensor) -> None:
        if self._agreed is None and not self._active():  # asked for each gradient: cheap first
            return
        left = self._left[p] = self._left[p] - 1
        if left < 0:
            raise AssertionError(
                f"{self.names[p]!r} has had more than backward_passes_per_step={self.passes} "
                "gradients since the last step(). Call step() after as many backward passes, or "
                "raise backward_passes_per_step."
            )
        self.pending = True
        if left > 0:
            return
        self._order.append(p)
        bucket = self._bucket_of.get(p)
        if bucket is not None:
            bucket.waiting -= 1
            if bucket.waiting == 0 and self._is_current():
                self._send(bucket)

    def _is_current(self) -> bool:
        here = bridge()
        return self._agreed == (here, here.joins)

    # ------------------------------------------------------------------ agreeing on buckets

    def _agree(self) -> None:
        """Compare the parameters of all ranks, and fill buckets in rank 0's order."""
        here = bridge()
        if self._home is not here:
            here.optimizers += 1
            self._home, self._number = here, here.optimizers
        params = list(self._left)
        place = {p: i for i, p in enumerate(params)}
        sparse = [i for i, p in enumerate(params) if p.grad is not None and p.grad.is_sparse]
        meta = {
            "device": here.device.type,
            "names": [self.names[p] for p in params],
            "shape": [list(p.shape) for p in params],
            "dtype": [dtype_name(p) for p in params],
            "op": self.op.name,
            "compression": self.compression.__name__,
            "gradient_predivide_factor": self.predivide,
            "each": [[place[p] for p in self._order], sparse],
        }
        number = self.process_set.process_set_id or 0
        key = (number, "layout", f"optimizer {self._number}")
        each = here.wait(here.submit(key, meta, lambda order: order["each"]))
        said = [e for e in each if e is not None]
        order: list[int] = next((e[0] for e in said if e[0]), [])
        arrived = set(order)
        # a backward pass reaches the last layers first
        order += [i for i in reversed(range(len(params))) if i not in arrived]
        apart = set() if self.sparse_as_dense else {i for e in said for i in e[1]}
        self._fill(params, order, apart)
        self._agreed = (here, here.joins)

    def _fill(self, params: list[Tensor], order: list[int], apart: set[int]) -> None:
        dense = [params[i] for i in order if i not in apart]
        chunks: list[list[Tensor]] = []
        if isinstance(self.groups, int) and self.groups > 0:
            count = min(self.groups, max(1, len(dense)))
            ends = [len(dense) * (i + 1) // count for i in range(count)]
            chunks = [dense[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        else:
            for group in self.groups or ():
                wanted = {id(p) for p in group}
                chunks.append([p for p in dense if id(p) in wanted])
            grouped = {id(p) for chunk in chunks for p in chunk}
            chunks += _by_size([p for p in dense if id(p) not in grouped])
        buckets = [_Bucket("", [params[i]], sparse=True) for i in order if i in apart]
        for chunk in chunks:
            kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # of a flat tensor
            for p in chunk:
                kinds.setdefault((p.device, p.dtype), []).append(p)
            buckets += [_Bucket("", each) for each in kinds.values()]
        for i, bucket in enumerate(buckets):
            bucket.name = f"gradients {self._number}.{i}"
            bucket.waiting = len(bucket.params)
            if not bucket.sparse and self.compression in (Compression.none, Compression.fp16):
                self._allocate(bucket)
        self._buckets = buckets
        self._bucket_of = {p: b for b in buckets for p in b.params}

    def _allocate(self, bucket: _Bucket) -> None:
        first = bucket.params[0]
        dtype = self.compression.compress(first.new_empty(0))[0].dtype
        sizes = [p.numel() for p in bucket.params]
        bucket.flat = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        parts = torch.split(bucket.flat, sizes)
        bucket.views = [v.view(p.shape) for v, p in zip(parts, bucket.params, strict=True)]

    # ------------------------------------------------------------------ a step

    def _send(self, bucket: _Bucket) -> None:
        gradients = []
        for p in bucket.params:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)  # another rank may have one
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
        if bucket.sparse:
            gradient = gradients[0]
            if not gradient.is_sparse:
                gradient = gradient.to_sparse()
            bucket.handle = sparse_allreduce_async(gradient, bucket.name, self.op, self.process_set)
            return
        if any(g.is_sparse for g in gradients):
            gradients = [self._dense(p, g) for p, g in zip(bucket.params, gradients, strict=True)]
        scales = (1.0 / self.predivide, self.predivide)
        if bucket.flat is not None:
            torch._foreach_copy_(bucket.views, gradients)
            bucket.handle = allreduce_async_(
                bucket.flat, None, bucket.name, self.op, *scales, self.process_set
            )
        else:
            small = [self.compression.compress(g) for g in gradients]
            bucket.contexts = [context for _, context in small]
            bucket.handle = grouped_allreduce_async(
                [t for t, _ in small], None, bucket.name, self.op, *scales, self.process_set
            )

    def _dense(self, p: Tensor, gradient: Tensor) -> Tensor:
        if gradient.is_sparse and not self.sparse_as_dense:
            raise HorovodInternalError(
                f"{self.names[p]!r} has a sparse gradient, and had a dense one in the first step. "
                "Pass sparse_as_dense=True to hvd.DistributedOptimizer."
            )
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _receive(self, bucket: _Bucket) -> None:
        result = synchronize(bucket.handle)
        bucket.handle, bucket.waiting = None, len(bucket.params)
        if bucket.sparse:
            p = bucket.params[0]
            p.grad = result if p.grad is None or p.grad.is_sparse else result.to_dense()
            return
        if bucket.flat is not None:
            values = bucket.views
        else:
            pairs = zip(result, bucket.contexts, strict=True)
            values = [self.compression.decompress(r, c) for r, c in pairs]
        into, out = [], []
        for p, value in zip(bucket.params, values, strict=True):
            if p.grad is None:
                continue  # frozen: it has sent zeros, and stays as it is
            if p.grad.is_sparse:
                p.grad = value.to(p.grad.dtype).to_sparse()
            else:
                into.append(p.grad)
                out.append(value)
        if into:
            torch._foreach_copy_(into, out)

    def synchronize(self) -> None:
        """Exchange what has not been sent yet, and wait for all of it."""
        if self._active():
            fresh = self._watch()
            if not self._is_current():
                self._agree()
                fresh = []
            for bucket in self._buckets:
                if bucket.handle is None:  # some of it is unused here: other ranks may wait
                    self._send(bucket)
            for bucket in self._buckets:
                self._receive(bucket)
            if fresh:  # for this step by themselves; the next one agrees on buckets anew
                rest = _Bucket(f"gradients {self._number}.added", fresh)
                self._send(rest)
                self._receive(rest)
                self._agreed = None
            self.reset()
        self.synchronized = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Exchange gradients before ``step``, or after the closure that computes them."""
        if not _is_outermost(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not self.enabled:
            self.synchronized = False
            return None
        if closure is not None:

            def exchanged() -> Any:
                loss = closure()
                self.synchronize()
                self.synchronized = False
                return loss

            return (optimizer, exchanged), {}
        if self.synchronized:
            warn_script(_TWICE)
        if not self.synchronized or self.pending:
            self.synchronize()
        self.synchronized = False
        return None

    @contextmanager
    def skip(self) -> Iterator[None]:
        """See ``skip_synchronize``."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


def _by_size(params: Sequence[Tensor]) -> list[list[Tensor]]:
    limit = int(os.environ.get("HOROVOD_FUSION_THRESHOLD", "") or (25 << 20))
    chunks: list[list[Tensor]] = []
    held, room = 0, min(1 << 20, limit)  # the sizes of DDP's buckets
    for p in params:
        if not chunks or held >= room:
            room = limit if chunks else room
            chunks.append([])
            held = 0
        chunks[-1].append(p)
        held += p.numel() * p.element_size()
    return chunks


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer can do beyond its own class."""

    _ronde_exchange: _Gradients

    def synchronize(self) -> None:
        self._ronde_exchange.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        return self._ronde_exchange.skip()

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._ronde_exchange.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._ronde_exchange.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward(), and before "
                "optimizer.step() or optimizer.synchronize(): gradients are being exchanged."
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._ronde_exchange.reset()
        super().load_state_dict(*args, **kwargs)


def distributed_optimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Reduction.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Let an optimizer average gradients over all ranks before each step.

    The optimizer itself is changed and returned: its state, and schedulers made for it before, stay
    valid. It gets ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()``.

    Args:
        optimizer: any optimizer of PyTorch's interface.
        named_parameters: ``model.named_parameters()``, for names in errors.
        compression: of what is sent.
        backward_passes_per_step: backward passes whose gradients are added before an exchange.
        op: ``hvd.Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        gradient_predivide_factor: divides before the sum, and multiplies after it.
        num_groups: deprecated, see ``groups``.
        groups: how many buckets, or lists of parameters that travel together. Default: buckets of
            25 MiB, or of ``HOROVOD_FUSION_THRESHOLD`` bytes.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part.

    Raises:
        ValueError: names are missing or not unique, or an argument is wrong.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(  # doctest: +SKIP
        ...     optimizer, named_parameters=model.named_parameters()
        ... )
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"expected an optimizer, not a {type(optimizer).__name__}.")
    if hasattr(optimizer, "_ronde_exchange"):
        raise ValueError("this optimizer is distributed already: wrap it once.")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more."
        )
    reduction = reduction_of(op)
    if gradient_predivide_factor != 1.0 and reduction != Reduction.Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average.")
    if num_groups:
        warn_script("num_groups is deprecated: use groups.", DeprecationWarning)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    exchange = _Gradients(
        optimizer,
        names,
        compression,
        backward_passes_per_step,
        reduction,
        float(gradient_predivide_factor),
        groups,
        sparse_as_dense,
        process_set,
    )
    # A hook and not a method of a new class: a scheduler may hold the optimizer's own step.
    optimizer.register_step_pre_hook(exchange.before_step)
    base = type(optimizer)
    changed: Any = optimizer
    # The object stays: the script and its schedulers hold it. So does the name that it shows.
    changed.__class__ = type(base.__name__, (_Distributed, base), {})
    changed._ronde_exchange = exchange
    changed._parameter_names = names
    changed.backward_passes_per_step = backward_passes_per_step
    return changed


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list) or not all(
        isinstance(p, Tensor) for group in groups for p in group
    ):
        raise ValueError(f"groups={groups!r}: expected a number of groups, or lists of parameters.")
    counted = Counter(id(p) for group in groups for p in group)
    if any(count > 1 for count in counted.values()):
        raise ValueError("groups: a parameter is in two of them, expected one.")


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Parameter -> name; all of the optimizer's must have one of their own."""
    groups = optimizer.param_groups
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters: expected pairs of name and parameter, as "
            "model.named_parameters() gives them."
        )
    counted = Counter(name for name, _ in pairs)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ValueError(
            f"named_parameters: {', '.join(map(repr, twice))} occurs twice. With several models, "
            "put the model's name before each."
        )
    names = {p: name for name, p in pairs}
    missing = sum(p not in names for group in groups for p in group["params"])
    if missing:
        raise ValueError(
            f"named_parameters: {missing} of the optimizer's parameters have no name. Pass all of "
            "them, or none."
        )
    return names
