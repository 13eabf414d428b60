"""The protocol of a reducer, and what runs it as DDP's communication hook."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ronde.plan.reducers import ReducerChoice
from ronde.world import World
from ronde.world.consensus import gather_json
from ronde.world.meshes import group_of

__all__ = [
    "SHARD_BYTES",
    "Bucket",
    "Exchange",
    "Members",
    "Reducer",
    "gather_rows",
    "mean_into",
    "scatter_rows",
]

SHARD_BYTES = 400 << 10
"""Smallest shard: below it, the time of a message outweighs that of its bytes."""

# torch 2.13 has a new name for it; torch 2.11 knows only the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
    category=FutureWarning,
)


@dataclass(frozen=True)
class Members:
    """Who averages gradients, and on which node each rank is.

    Attributes:
        rank, size: this worker's place among them.
        nodes: the number of each rank's node.
        hosts: the name of each rank's host.
        device: where this worker's gradients are.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    device: torch.device

    @classmethod
    def of(cls, me: World) -> Members:
        """All workers of this world. A collective."""
        places = gather_json(me, [me.node, me.host])
        known = list(dict.fromkeys(map(tuple, places)))
        nodes = tuple(known.index(tuple(place)) for place in places)
        return cls(me.rank, me.size, nodes, tuple(str(host) for _, host in places), me.device)

    def on_node(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, its in enumerate(self.nodes) if its == node]


@dataclass(slots=True)
class Bucket:
    """Gradients that are averaged together.

    Attributes:
        flat: all of them, one after another; a reducer writes the mean into it.
        grads: its parts, one a parameter, flat, without the carrier.
        names, shapes: of these parameters.
        step: optimizer steps done before this one.
        number: its place among all exchanges, from 0; the same on all workers.
        where: the lane's groups and buffers.
    """

    flat: torch.Tensor
    grads: list[torch.Tensor]
    names: list[str]
    shapes: list[tuple[int, ...]]
    step: int
    number: int
    where: Lane


class Reducer:
    """How gradients are averaged over all workers: the interface. A new one is a class in this
    room and an entry of :data:`ronde.exchange.KINDS`.

    Attributes:
        lanes: buckets in flight. All workers put bucket ``i`` into lane ``i % lanes``.
        bucket_mib: the size at which a bucket is closed.
        every: optimizer steps from one moment at which all workers have the same weights to the
            next.
        drifts: whether workers have other weights now.
        state: tensors that one step leaves to the next, by name.
    """

    lanes = 1
    bucket_mib = 25.0
    every = 1
    drifts = False

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        self.choice, self.members = choice, members
        self.state: dict[str, torch.Tensor] = {}

    @property
    def exact(self) -> bool:
        """Whether the result is the mean, up to rounding."""
        return self.choice.kind.exact

    def average(self, bucket: Bucket) -> None:
        """Replace ``bucket.flat`` by its mean over all workers. Runs in the lane, without
        gradients; every worker calls it for the same buckets in the same order.
        """
        raise NotImplementedError

    def groups(self, lane: int) -> dict[str, Any]:
        """The process groups of a lane, by name. A collective."""
        return {"all": group_of(f"exchange {lane}")}

    def bind(self, parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
        """Called once the parameters and their optimizer are known."""

    def saved(self) -> dict[str, torch.Tensor]:
        """What must survive a restart, of this worker: name -> tensor."""
        return self.state

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over what :meth:`saved` gave, after weights and optimizer are restored."""
        self.state = {name: t.to(self.members.device) for name, t in saved.items()}

    def stepped(self, step: int, settle: bool) -> None:
        """Called after optimizer step ``step``, counted from 1. ``settle``: all workers must have
        the same weights afterwards.
        """

    def close(self) -> None:
        """Let connections go."""


class Lane:
    """A queue of exchanges that run one after another, in the order in which they were put in.

    On the CPU it is a thread, because gloo's collectives of several steps would otherwise block
    the backward pass, and chained callbacks of gloo run in another order on each rank. On a GPU it
    is a stream.
    """

    def __init__(self, groups: dict[str, Any]) -> None:
        self.groups = groups
        self.error: BaseException | None = None
        self._buffers: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._stream: Any = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Any, torch.Tensor]] | None = None

    def buffer(self, name: str, like: torch.Tensor, dtype: torch.dtype, *shape: int) -> Any:
        """Memory that is kept from step to step; it starts as zeros."""
        key = (name, dtype, shape)
        if key not in self._buffers:
            if len(self._buffers) > 1024:
                self._buffers.clear()  # buckets have changed
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=like.device)
        return self._buffers[key]

    def put(self, job: Callable[[], None], result: torch.Tensor) -> Any:
        """Run a job in the lane; returns a future of ``result``."""
        if result.is_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream(result.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(result.device))
            future: Any = torch.futures.Future(devices=[result.device])
            with torch.cuda.stream(self._stream):
                self._do(job)
                future.set_result(result)
            return future
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=self._run, name="exchange", daemon=True).start()
        future = torch.futures.Future()  # type: ignore[no-untyped-call]
        self._jobs.put((job, future, result))
        return future

    def _do(self, job: Callable[[], None]) -> None:
        if self.error is None:
            try:
                with torch.no_grad():
                    job()
            except BaseException as error:
                # DDP cannot pass on an error of a future: Exchange.check raises it.
                self.error = error

    def _run(self) -> None:
        assert self._jobs is not None
        while True:
            job, future, result = self._jobs.get()
            self._do(job)
            future.set_result(result)
            del job, future, result  # they would keep a model alive until the next bucket


@dataclass(slots=True)
class _Layout:
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    places: list[slice] = field(default_factory=list)
    tail: slice | None = None  # where the carrier is


class Exchange:
    """Runs a reducer as DDP's communication hook.

    Whatever the reducer does to gradients, the carrier of the loss and the counts is reduced
    plainly.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.step = self._count = 0
        self._lanes = [Lane(reducer.groups(i)) for i in range(reducer.lanes)]
        self._names: Mapping[int, str] = {}
        self._carrier: torch.Tensor | None = None
        self._layouts: dict[int, _Layout] = {}
        self._passes = 0

    def attach(
        self, ddp: DistributedDataParallel, names: Mapping[int, str], carrier: torch.Tensor
    ) -> None:
        """Become the communication hook of ``ddp``.

        Args:
            names: id of a parameter -> its name.
            carrier: the parameter whose gradient stays exact.
        """
        self._names, self._carrier = names, carrier
        self._layouts, self._passes = {}, 0

        def hook(_: Any, bucket: Any) -> Any:
            return self._start(bucket)

        hook.__annotations__.clear()  # DDP compares them with its own, and these are texts
        ddp.register_comm_hook(None, hook)  # type: ignore[no-untyped-call]

    def _layout(self, bucket: Any) -> _Layout:
        index = bucket.index()
        layout = self._layouts.get(index)
        # DDP orders its buckets anew after the first pass.
        if layout is not None and self._passes > 2:
            return layout
        layout, at = _Layout(), 0
        for p in bucket.parameters():
            place = slice(at, at + p.numel())
            if p is self._carrier:
                layout.tail = place
            else:
                layout.places.append(place)
                layout.names.append(self._names[id(p)])
                layout.shapes.append(tuple(p.shape))
            at = place.stop
        self._layouts[index] = layout
        return layout

    def _start(self, bucket: Any) -> Any:
        reducer, flat = self.reducer, bucket.buffer()
        lane = self._lanes[bucket.index() % len(self._lanes)]
        layout = self._layout(bucket)
        # not bucket.gradients(), which have the strides of their parameters
        grads = [] if reducer.exact else [flat[place] for place in layout.places]
        work = Bucket(flat, grads, layout.names, layout.shapes, self.step, self._next(), lane)
        tail = None if reducer.exact else layout.tail
        if bucket.is_last():
            self._passes += 1
        return lane.put(lambda: self._average(work, tail), flat)

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _average(self, bucket: Bucket, tail: slice | None) -> None:
        if tail is None:
            self.reducer.average(bucket)
            return
        exact = bucket.flat[tail].clone()
        mean_into(exact, bucket.where.groups["all"], self.reducer.members.size)
        bucket.flat[tail] = 0
        self.reducer.average(bucket)
        bucket.flat[tail] = exact

    def average(self, flat: torch.Tensor, lane: int = 0) -> Any:
        """Average one tensor outside of a training, for measurements; returns a future."""
        where = self._lanes[lane % len(self._lanes)]
        shapes = [tuple(flat.shape)]
        work = Bucket(flat, [flat], ["flat"], shapes, self.step, self._next(), where)
        return where.put(lambda: self.reducer.average(work), flat)

    def check(self) -> None:
        """Raise what an exchange failed with."""
        for lane in self._lanes:
            if lane.error is not None:
                error = lane.error
                error.add_note(f"(while {self.reducer.choice} averaged gradients)")
                raise error

    def stepped(self, settle: bool = False) -> None:
        """Called after each optimizer step, see :meth:`Reducer.stepped`."""
        self.step += not settle
        self.reducer.stepped(self.step, settle)


def mean_into(flat: torch.Tensor, group: Any, size: int) -> None:
    """Average a tensor over a group with the backend's own all-reduce, in place."""
    flat.div_(size)
    dist.all_reduce(flat, group=group)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of a type are added: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def scatter_rows(rows: torch.Tensor, received: torch.Tensor, group: Any) -> torch.Tensor:
    """Send row ``i`` to the group's rank ``i``; returns the rows that came, by rank."""
    # Bytes: gloo knows neither int16 nor, in older versions, bfloat16.
    sent, got = rows.view(torch.uint8), received.view(torch.uint8)
    if dist.get_backend(group) != "gloo" or sent[0].numel() < SHARD_BYTES:
        dist.all_to_all_single(got, sent, group=group)
        return received
    # gloo sends to all at once, and N−1 streams that meet at a host overflow the switch's queue.
    # In N−1 rounds, each host sends to one and receives from one.
    me, size = dist.get_rank(group), dist.get_world_size(group)
    got[me] = sent[me]
    for turn in range(1, size):
        to, source = (me + turn) % size, (me - turn) % size
        sending = dist.isend(sent[to], group=group, group_dst=to)
        receiving = dist.irecv(got[source], group=group, group_src=source)
        for work in (sending, receiving):
            assert work is not None
            work.wait()
    return received


def gather_rows(row: torch.Tensor, rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Collect one row of each rank of a group into ``rows``."""
    _all_gather(rows.view(-1).view(torch.uint8), row.view(-1).view(torch.uint8), group=group)
    return rows
