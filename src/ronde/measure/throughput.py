"""Arms: the same training measured with one thing taken away, inside the script's own processes.

An *arm* says what is left out: the whole input pipeline (*synthetic*: real batches recycled on the
device), the exchange of gradients as well (*alone*), one stage of the pipeline, or nothing
(*real*). Arms are measured in turns (A B A B …), each in windows of many steps, so that what drifts
meets all of them alike. A window of a real arm has loaders of its own, which start with empty
queues, and is measured once they have come to rest. All ranks take part; how many steps a window
has is agreed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch.utils.data import IterableDataset

from ronde.adapt import apply_settings
from ronde.data import Order
from ronde.data import named_stages as stages
from ronde.introspect import reopened
from ronde.loader import Executor, Feed, FeedSettings, LoaderSettings
from ronde.loader.thread_workers import _openmp_runtimes
from ronde.plan import Share, shares
from ronde.profile import StageTimes, read_board, read_notes
from ronde.run.evaluation import on_device, to_device
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.tensors import tensors_in

if TYPE_CHECKING:
    from ronde.run.step_port import RunView

__all__ = ["Arm", "ArmResult", "Bench", "Timed", "measure"]

_RECYCLED = 8  # batches, at least
_FEWEST_RECYCLED = 3
_SMALL_BYTES = 64 << 20  # twice as many of batches that take less than this together
_FEWEST_STEPS = 4
_WARM_SHARE = 1.0  # of a window: how long its queues may take to come to rest
_LEARN_SHARE = (
    5.0  # of a window: how long loaders may take to make the samples that they then replay
)
_LEARNT = 17  # samples that a loader makes before it replays them, see ronde.profile.replay
_LEARNT_BATCHES = 5
_ATTEMPTS = 3
# how long a batch may take: so long, and so many times the first
_PATIENCE_SECONDS, _PATIENCE = (
    15.0,
    20.0,
)


@dataclass(frozen=True)
class Arm:
    """What is measured.

    Args:
        kind: ``synthetic``; ``alone`` (synthetic without exchange, each rank by itself); ``real``;
            ``beside`` (synthetic while the loaders run, their batches thrown away); ``loading``
            (the loaders without any training); ``host`` (recycled, but copied to the device each
            time).
        remove: stages of the input pipeline to take out, by replaying what they gave before.
        samples: replay whole samples through the real loaders: what is left is the way between
            processes.
        threads: compute threads inside loading processes; None leaves them alone.
        settings: read as this settings file would have it.
        timed: add up what each stage takes; it costs some microseconds a call.
    """

    kind: str = "real"
    remove: frozenset[str] = frozenset()
    samples: bool = False
    threads: int | None = None
    settings: FeedSettings | None = None
    timed: bool = False

    @property
    def loads(self) -> bool:
        """Whether loaders run in it."""
        return self.kind in ("real", "beside", "loading")


@dataclass(frozen=True)
class Timed:
    """What a stage took for one sample.

    Attributes:
        cpu_seconds, wall_seconds: of the threads that did it.
        bytes: read.
        removable: whether it can be taken out.
        contains: stages that were done inside it.
    """

    cpu_seconds: float
    wall_seconds: float
    bytes: float = 0.0
    removable: bool = True
    contains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArmResult:
    """One window of one arm.

    Attributes:
        samples_per_second: of all ranks together.
        step_seconds: of one step without the wait for its batch, mean over the window, the slowest
            rank's.
        wait_seconds: waiting for a batch, mean per step, of each rank.
        usual_wait_seconds: the same of the rank that waits longest, median over groups of as many
            steps as there are loaders: what disturbs the machine now and then is not in it.
        per_rank: samples per second of each rank, by its own clock.
        steps: how many were measured.
        seconds: how long they took.
        first_batch_seconds: from the loaders' start to the first batch, the slowest rank's; 0 where
            no loaders run.
        stages: for each rank: stage -> what it took in the rank's loaders; empty where it was not
            timed.
        in_step: stage -> what it took within the step, on the slowest rank.
        cpu_seconds: of one sample, in the training processes.
        other_threads: share of the loading processes' CPU time that was spent outside their main
            threads.
        queued: seconds that the threads which read were ready and had no core, for each second that
            they had one.
        drift: the rate of the window's second half over that of its first half.
        notes: what the readers could not do.
    """

    samples_per_second: float
    step_seconds: float
    wait_seconds: tuple[float, ...]
    usual_wait_seconds: float
    per_rank: tuple[float, ...]
    steps: int
    seconds: float
    first_batch_seconds: float = 0.0
    stages: tuple[Mapping[str, Timed], ...] = ()
    in_step: Mapping[str, Timed] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    other_threads: float = 0.0
    queued: float = 0.0
    drift: float = 1.0
    notes: tuple[str, ...] = ()


def _bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def _let_go_of_threads() -> None:
    """End the threads of OpenMP that wait for this thread's next computation; they start again when
    it comes.

    A child of fork inherits the belief that they are there, not the threads: it waits for ever in
    the first computation for which a data set asks for several. Training forks its loaders once or
    once an epoch, an examination all the time.
    """
    for path in _openmp_runtimes():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard, OpenMP 5.0


class _InStep:
    """Stages that the training process does within a step: a copy to the device, say, that a
    script's ``forward`` calls by name.

    They belong to the input, so the ceiling is measured without them: what each gave for a recycled
    batch is given again. Everything that is not called within a step goes to whoever listened
    before.
    """

    def __init__(self) -> None:
        self.before: stages.Listener | None = None
        self.inside = False
        self.remove: frozenset[str] | None = frozenset()  # None: all
        self.key = 0
        self.functions: set[str] = set()
        self.blocks: set[str] = set()
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.given = 0
        self._calls: dict[str, int] = {}
        self._kept: dict[tuple[int, str, int], Any] = {}
        self._stack: list[list[Any]] = []
        self._owner = (os.getpid(), threading.get_ident())

    def _is_mine(self) -> bool:
        return self.inside and self._owner == (os.getpid(), threading.get_ident())

    @contextlib.contextmanager
    def step(self, key: int, remove: frozenset[str] | None) -> Iterator[None]:
        """One step, on a batch of this key; ``remove``: stages to take out, None for all."""
        self.key, self.remove, self.inside = key, remove, True
        self._calls.clear()
        try:
            yield
        finally:
            self.inside = False
            self._stack.clear()

    def clear(self) -> None:
        """Forget times, keep results."""
        self.wall.clear()
        self.cpu.clear()

    def call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`ronde.data.named_stages.Listener`."""
        if not self._is_mine():
            if self.before is not None and self._owner[0] == os.getpid():
                return self.before.call(name, function, args, kwargs)
            return function(*args, **kwargs)
        self.functions.add(name)
        turn = self._calls[name] = self._calls.get(name, 0) + 1
        place = (self.key, name, turn)
        if (self.remove is None or name in self.remove) and place in self._kept:
            self.given += 1
            return self._kept[place]
        self.enter(name, False)
        try:
            value = function(*args, **kwargs)
        finally:
            self.leave(name)
        # What takes part in a graph belongs to that step alone.
        if place not in self._kept and not any(t.requires_grad for t in tensors_in(value)):
            self._kept[place] = value
        return value

    def enter(self, name: str, block: bool = True) -> None:
        """See :class:`ronde.data.named_stages.Listener`."""
        if not self._is_mine():
            if self.before is not None and self._owner[0] == os.getpid():
                self.before.enter(name)
            return
        if block:
            self.blocks.add(name)
        self._stack.append([name, time.perf_counter(), time.thread_time(), 0.0, 0.0])

    def leave(self, name: str) -> None:
        """See :class:`ronde.data.named_stages.Listener`."""
        if not self._is_mine():
            if self.before is not None and self._owner[0] == os.getpid():
                self.before.leave(name)
            return
        if not self._stack:
            return
        kept, wall, cpu, inner_wall, inner_cpu = self._stack.pop()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.wall[kept] = self.wall.get(kept, 0.0) + wall - inner_wall
        self.cpu[kept] = self.cpu.get(kept, 0.0) + cpu - inner_cpu
        if self._stack:
            self._stack[-1][3] += wall
            self._stack[-1][4] += cpu


class _Threads:
    """What the loading processes' threads do, or this process's where there are none."""

    def __init__(self) -> None:
        self._start = self._look()

    def _look(self) -> tuple[float, float, float, float]:
        main = others = ran = queued = 0.0
        loaders = psutil.Process().children(recursive=True)
        for process in loaders:
            with contextlib.suppress(psutil.Error):
                for thread in process.threads():
                    spent = thread.user_time + thread.system_time
                    if thread.id == process.pid:
                        main += spent
                    else:
                        others += spent
        threads = [Path(f"/proc/{p.pid}/task/{p.pid}") for p in loaders] or list(
            Path("/proc/self/task").glob("*")
        )
        for thread_ in threads:
            # it has ended, or this kernel does not tell
            with contextlib.suppress(OSError, ValueError):
                on_core, in_queue, _ = (thread_ / "schedstat").read_text().split()
                ran, queued = ran + int(on_core) * 1e-9, queued + int(in_queue) * 1e-9
        return main, others, ran, queued

    def share(self) -> tuple[float, float]:
        """Of the CPU time since, what was spent outside the loaders' main threads; and the time
        that the reading threads were ready and had no core, for each second that they had one."""
        main, others, ran, queued = (
            now - then for now, then in zip(self._look(), self._start, strict=True)
        )
        return others / (main + others) if main + others > 0.05 else 0.0, max(
            0.0, queued
        ) / ran if ran > 0.05 else 0.0


class Bench:
    """Where windows are measured. Everything that training changes is put back at the end of the
    block.

    Args:
        run: what ``distribute`` gave, between two steps. Every rank makes one, and calls it alike.

    Attributes:
        files: that samples were read from in the last timed window of this rank.
        patience: seconds that reading the recycled batches may take.
        draw_seconds: that the script's own sampler takes for an epoch; None where it has none.

    Example:
        >>> with Bench(run) as bench:  # doctest: +SKIP
        ...     ceiling = bench.window(Arm("synthetic"), seconds=2.0)
    """

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.port = run.port
        self.batch_samples = min(run.plan.batch_size, run.port.data.order.epoch_samples)
        self.in_step = _InStep()
        self.patience = 10.0
        self.draw_seconds: float | None = None
        self.files: list[str] = []
        self._held: list[tuple[Share, list[Any]]] = []
        self._host: list[list[Any]] = []
        self._estimates: dict[Arm, float] = {}
        self._warmed = False
        self._slowest_first = 0.0
        self._executor: Executor | None = None
        self._windows = 0
        self._orders: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        self._folder = Path()

    def __enter__(self) -> Bench:
        # Under a command within its own folder, which it removes even where this process is killed.
        answer = os.environ.get("RONDE_STUDY_FILE")
        place = Path(answer).parent if answer and Path(answer).parent.is_dir() else None
        self._folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ronde-arms-", dir=place))
        )
        self._stack.enter_context(self.port.as_found())
        self._stack.enter_context(self.port.unwatched())
        self._stack.callback(stages.listen, stages.listen(self.in_step))
        self.port.prepare()
        return self

    def __exit__(self, *error: Any) -> None:
        self._held, self._host = [], []
        self._stack.__exit__(*error)

    # -- batches -----------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be read one after the other, by one loader."""
        return isinstance(self.port.data.dataset, IterableDataset)

    @property
    def held(self) -> list[list[Any]]:
        """The recycled batches, as micro-batches on the device."""
        if not self._held:
            self._recycle()
        return [micros for _, micros in self._held]

    @property
    def loaders(self) -> int:
        """Loaders of each worker, 0 where it reads by itself."""
        return 0 if self.executor == "none" else self._loaders(self.port.data.settings)

    @property
    def executor(self) -> Executor:
        """``none``, ``threads`` or ``processes``; what ``auto`` has chosen."""
        if self._executor is None:
            self._recycle()
        assert self._executor is not None
        return self._executor

    def _loaders(self, settings: LoaderSettings) -> int:
        return min(1, settings.num_workers) if self.is_stream else settings.num_workers

    def shares(self) -> Iterator[Share]:
        """This rank's shares, from where the training stands, epoch after epoch without end; whole
        global batches only.
        """
        offset = self.run.state.epoch_samples
        for epoch in itertools.count(self.run.state.epoch):
            yield from self._epoch(epoch, offset)
            offset = 0

    def _epoch(self, epoch: int, offset: int = 0) -> Iterator[Share]:
        run, plan = self.run, self.run.plan
        replica = plan.layout.place(run.rank).replica
        parts = plan.accumulation if plan.pipeline > 1 else None
        samples = run.port.data.order.epoch_samples
        return shares(
            epoch,
            offset,
            samples,
            self.batch_samples,
            replica,
            plan.replicas,
            plan.micro_batch,
            True,
            parts,
        )

    def _read(self, feed: Feed) -> Iterator[tuple[Share, list[Any]]]:
        if not self.is_stream:
            yield from feed.read(self.shares)
            return
        for epoch in itertools.count(self.run.state.epoch):  # a stream is begun again
            yield from feed.read(partial(self._epoch, epoch))

    @contextlib.contextmanager
    def feed(self, arm: Arm) -> Iterator[tuple[Feed, Path | None]]:
        """A feed as the script's, with what the arm changes, and the board on which its readers
        write.
        """
        taken = self.port.data
        if arm.settings is not None:
            taken = apply_settings(taken, arm.settings)
        settings = taken.settings
        if (
            settings.chosen == "auto"
            and self._executor is not None
            and (arm.settings is None or arm.settings.executor is None)
        ):
            settings = dataclasses.replace(settings, executor=self._executor)  # chosen once
        with contextlib.ExitStack() as stack:
            # What a window's readers open (a connection that only its thread may use) is not there
            # for the next window's.
            stack.enter_context(reopened(taken.dataset))
            board: Path | None = None
            remove = (arm.remove - self.in_step.functions) | ({"sample"} if arm.samples else set())
            if remove or arm.timed or arm.threads is not None:
                from ronde.profile import Probe

                self._windows += 1
                board = self._folder / f"board-{self._windows}"
                probe = Probe(board, remove, arm.threads)
                stack.callback(probe.uninstall)
                settings = dataclasses.replace(settings, probe=probe)
            if self._slowest_first and "timeout" not in settings.options and not self.is_stream:
                options = {
                    **settings.options,
                    "timeout": _PATIENCE_SECONDS + _PATIENCE * self._slowest_first,
                }
                settings = dataclasses.replace(settings, options=options)
            # They end with the window: nobody need look whether they may stay.
            settings = dataclasses.replace(
                settings, options={"persistent_workers": False, **settings.options}
            )
            _let_go_of_threads()
            feed = Feed(
                taken.dataset,
                self._drawn_once(taken.order),
                settings,
                self.run.plan.seed,
                on_cpu=self.run.device.type == "cpu",
            )
            stack.callback(feed.close)
            yield feed, board

    def _drawn_once(self, order: Order) -> Order:
        """The same, but two epochs of a sampler's are drawn once and serve every window: drawing is
        part of starting an epoch.
        """
        draw = order.draw
        if draw is None:
            return order
        first = self.run.state.epoch

        def kept(epoch: int) -> Any:
            turn = (epoch - first) % 2
            if turn not in self._orders:
                self._draw(draw, first + turn)
            return self._orders[turn]

        return dataclasses.replace(order, draw=kept)

    def _draw(self, draw: Callable[[int], Any], epoch: int) -> None:
        start = time.perf_counter()
        self._orders[epoch - self.run.state.epoch] = np.asarray(list(draw(epoch)), dtype=np.int64)
        self.draw_seconds = min(self.draw_seconds or float("inf"), time.perf_counter() - start)

    def _recycle(self) -> None:
        """Hold some real batches on the device: eight, twice as many of small ones, fewer where
        each takes seconds to be read.
        """
        size = 0
        order = self.port.data.order
        if order.draw is not None:
            for k in (0, 1):  # before the first window: windows reach into the next epoch
                self._draw(order.draw, self.run.state.epoch + k)
        start = time.perf_counter()
        with self.feed(Arm("real")) as (feed, _), contextlib.closing(self._read(feed)) as reader:  # type: ignore[type-var]
            for share, micros in reader:
                self._slowest_first = self._slowest_first or time.perf_counter() - start
                self._executor = feed.executor
                self._held.append((share, on_device(feed, share, micros, self.run.device)))
                size += _bytes_of(micros)
                if self.run.device.type != "cpu":
                    self._host.append(micros)
                n, spent = len(self._held), time.perf_counter() - start
                quick = 2 * size < _SMALL_BYTES and spent < 0.5
                enough = n >= (2 * _RECYCLED if quick else _RECYCLED) or (
                    n >= _FEWEST_RECYCLED and spent > self.patience
                )
                if broadcast_json(self.port.world, enough):  # as many on every rank
                    break

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """A probe that reads in this process listens to what is called by name; within, what is
        called in a step is heard first.
        """
        if stages.listener is not self.in_step:
            self.in_step.before = stages.listen(self.in_step)
        try:
            yield
        finally:
            self.in_step.before = None

    # -- steps -------------------------------------------------------------------------

    @property
    def can_be_alone(self) -> bool:
        """Whether a rank can take a step by itself; see :attr:`StepPort.can_step_alone`."""
        return self.port.can_step_alone

    def _synchronise(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _barrier(self) -> None:
        self._synchronise()
        gather_json(self.port.world, 0)

    # -- windows -----------------------------------------------------------------------

    def window(self, arm: Arm, seconds: float) -> ArmResult:
        """Measure an arm once, for about so many seconds after its warm-up. A collective."""
        if not self._held:
            self._recycle()
        return self._loaded(arm, seconds) if arm.loads else self._recycled(arm, seconds)

    def _agreed_steps(self, seconds: float, estimate: float, multiple: int = 1) -> int:
        """How many steps fill a window on the slowest rank."""
        slowest = max(gather_json(self.port.world, estimate))
        fewest = _FEWEST_STEPS if slowest < seconds else 2
        steps = max(fewest, round(seconds / max(float(slowest), 1e-6)))
        return -(-steps // multiple) * multiple

    def _recycled(self, arm: Arm, seconds: float) -> ArmResult:
        turn = itertools.cycle(range(len(self._held)))
        port = self.port
        train = port.step_alone if arm.kind == "alone" else port.step

        def one() -> None:
            k = next(turn)
            share, micros = self._held[k]
            with self.in_step.step(k, None):
                train(
                    share,
                    [to_device(m, self.run.device) for m in self._host[k]]
                    if arm.kind == "host" and self._host
                    else micros,
                )

        for _ in range(2):
            one()
        if not self._warmed:
            # The first steps of all: buckets are made, and stages within the step keep what they
            # give.
            for _ in range(max(2, len(self._held)) if self.in_step.functions else 2):
                one()
            self._warmed = True
        estimate = self._estimates.get(arm)
        if estimate is None:
            self._synchronise()
            start = time.perf_counter()
            for _ in range(3):
                one()
            self._synchronise()
            estimate = (time.perf_counter() - start) / 3
        steps = self._agreed_steps(seconds, estimate)
        self._barrier()
        self.in_step.clear()
        cpu = time.process_time()
        ends = [time.perf_counter()]
        for _ in range(steps):
            one()
            ends.append(time.perf_counter())
        self._synchronise()
        ends[-1] = time.perf_counter()
        return self._result(arm, ends, [0.0] * steps, time.process_time() - cpu)

    def _loaded(self, arm: Arm, seconds: float) -> ArmResult:
        depth, multiple = self._depth(arm)
        kept = len(self._held)
        turn = itertools.cycle(range(kept))
        with contextlib.ExitStack() as stack:
            feed, board, reader, share, first = self._begin(arm, stack)
            stack.enter_context(self._listening())
            drain = stack.enter_context(_Drain(reader)) if arm.kind == "beside" else None
            waits: list[float] = []
            removed = None if arm.kind == "beside" else arm.remove

            def one() -> None:
                k = next(turn)
                before = time.perf_counter()
                if drain is not None:
                    drain.allow()
                    share, micros = self._held[k]
                else:
                    share, micros = next(reader)
                waits.append(time.perf_counter() - before)
                if arm.kind != "loading":
                    with self.in_step.step(k, removed):
                        self.port.step(
                            share,
                            on_device(feed, share, micros, self.run.device)
                            if arm.kind == "real"
                            else micros,
                        )

            done, start = 0, time.perf_counter()
            micro_batches = len(share.micro)
            rest = -(-3 * depth // micro_batches)
            learn = 0
            if arm.samples or arm.remove:
                # Every loader makes some samples as ever before it replays them.
                per_batch = max(1, max(high - low for low, high in share.micro))
                batches = _LEARNT_BATCHES if "collate" in arm.remove else 0
                learn = -(
                    -(depth + multiple * max(-(-_LEARNT // per_batch), batches)) // micro_batches
                )
            while True:  # the queues come to rest; as many steps on every rank
                one()
                done += 1
                spent = time.perf_counter() - start
                settled = done >= min(_FEWEST_STEPS, 2 * multiple) or spent > 2 * seconds
                if done % multiple == 0 and (
                    settled
                    if self.run.world_size == 1
                    else broadcast_json(self.port.world, settled)
                ):
                    learnt = done >= learn or spent > _LEARN_SHARE * seconds
                    enough = learnt and (done >= rest + learn or spent > _WARM_SHARE * seconds)
                    if broadcast_json(self.port.world, enough):
                        break
            recent = self._estimates.get(arm, (time.perf_counter() - start) / done)
            steps = self._agreed_steps(seconds, recent, multiple)
            self._barrier()
            waits.clear()
            self.in_step.clear()
            threads = _Threads() if arm.timed else None
            board_before = read_board(board) if board is not None else {}
            cpu = time.process_time()
            ends = [time.perf_counter()]
            for _ in range(steps):
                one()
                ends.append(time.perf_counter())
            self._synchronise()
            ends[-1] = time.perf_counter()
            cpu = time.process_time() - cpu
            timed = _timed(board_before, read_board(board)) if board is not None else {}
            notes = read_notes(board) if board is not None else []
            if board is not None and arm.timed:
                from ronde.profile import read_files

                self.files = [file.path for file in read_files(board)]
            shares = threads.share() if threads is not None else (0.0, 0.0)
        return self._result(arm, ends, waits, cpu, first, timed, shares, notes)

    def _begin(
        self, arm: Arm, stack: contextlib.ExitStack
    ) -> tuple[Feed, Path | None, Iterator[Any], Share, float]:
        """A feed that has given its first batch, which is left out: it and all its loaders end with
        the stack.

        A process that is forked while another of its threads makes itself known to Python may hang
        at once (Python 3.11). Training forks once or once an epoch; an examination so often that it
        is seen. It is noticed, and done again.
        """
        for attempt in itertools.count(1):
            with contextlib.ExitStack() as mine:
                feed, board = mine.enter_context(self.feed(arm))
                reader = self._read(feed)
                mine.callback(reader.close)  # type: ignore[attr-defined]
                started = time.perf_counter()
                try:
                    share, _ = next(reader)
                except RuntimeError as error:
                    if "timed out" not in str(error) or attempt == _ATTEMPTS:
                        raise
                    continue
                first = time.perf_counter() - started
                self._slowest_first = max(self._slowest_first, first)
                stack.push(mine.pop_all())
                return feed, board, reader, share, first
        raise AssertionError

    def refuses(self, settings: FeedSettings) -> str | None:
        """Why the data set cannot be read so, on this rank: what reading two batches raises. A
        connection that only its own thread may use, say. None where it can, or where it is read in
        the same way already."""
        executor = settings.executor
        if (executor is None or executor == self.executor) and (
            settings.workers is None or self.loaders
        ):
            return None
        try:
            with (
                self.feed(Arm("real", settings=settings)) as (feed, _),
                contextlib.closing(self._read(feed)) as reader,  # type: ignore[type-var]
            ):
                for _ in range(2):
                    next(reader)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :200
            ]
        return None

    def _depth(self, arm: Arm) -> tuple[int, int]:
        """Batches that the loaders may be ahead, and how many load at once."""
        settings = self.port.data.settings
        if arm.settings is not None:
            settings = apply_settings(self.port.data, arm.settings).settings
        workers = (
            0
            if settings.chosen == "none" or (settings.chosen == "auto" and self.executor == "none")
            else self._loaders(settings)
        )
        ahead = settings.prefetch or int(settings.options.get("prefetch_factor") or 2)
        return (workers * ahead, workers) if workers else (1, 1)

    def _result(
        self,
        arm: Arm,
        ends: Sequence[float],
        waits: Sequence[float],
        cpu: float,
        first: float = 0.0,
        timed: Mapping[str, Timed] | None = None,
        shares: tuple[float, float] = (0.0, 0.0),
        notes: Sequence[str] = (),
    ) -> ArmResult:
        run = self.run
        steps = len(waits)
        seconds = ends[-1] - ends[0]
        together = self._depth(arm)[1] if arm.loads else 1
        groups = [
            sum(waits[i : i + together]) / together
            for i in range(0, steps - together + 1, together)
        ]
        half = steps // 2
        in_step = {
            name: [self.in_step.cpu[name] / steps, wall / steps, name in self.in_step.blocks]
            for name, wall in self.in_step.wall.items()
        }
        mine = {
            "seconds": seconds,
            "wait": sum(waits) / steps,
            "usual": statistics.median(groups) if groups else sum(waits) / steps,
            "first": first,
            "cpu": cpu,
            "samples": self._held[0][0].samples,
            "drift": ((ends[half] - ends[0]) / half) / ((ends[-1] - ends[half]) / (steps - half))
            if half
            else 1.0,
            "stages": {name: dataclasses.astuple(t) for name, t in (timed or {}).items()},
            "in_step": in_step,
            "others": shares[0],
            "queued": shares[1],
            "notes": list(notes),
        }
        everyone = gather_json(run.port.world, mine)
        longest = max(e["seconds"] for e in everyone)
        self._estimates[arm] = longest / steps
        slowest_step: dict[str, Timed] = {}
        for each in everyone:
            for name, (cpu, wall, block) in each["in_step"].items():
                if name not in slowest_step or wall > slowest_step[name].wall_seconds:
                    slowest_step[name] = Timed(cpu, wall, removable=not block)
        by_rank = tuple(
            {n: Timed(c, w, b, r, tuple(inside)) for n, (c, w, b, r, inside) in e["stages"].items()}
            for e in everyone
        )
        return ArmResult(
            samples_per_second=self.batch_samples * steps / longest,
            step_seconds=max(e["seconds"] / steps - e["wait"] for e in everyone),
            wait_seconds=tuple(e["wait"] for e in everyone),
            usual_wait_seconds=max(e["usual"] for e in everyone),
            per_rank=_per_rank(
                [e["samples"] for e in everyone],
                [e["seconds"] for e in everyone],
                steps,
                self.batch_samples,
            ),
            steps=steps,
            seconds=longest,
            first_batch_seconds=max(e["first"] for e in everyone),
            stages=by_rank if any(by_rank) else (),
            in_step=slowest_step,
            cpu_seconds=sum(e["cpu"] for e in everyone) / (self.batch_samples * steps),
            other_threads=max(e["others"] for e in everyone),
            queued=statistics.fmean(e["queued"] for e in everyone),
            drift=everyone[0]["drift"],
            notes=tuple(dict.fromkeys(n for e in everyone for n in e["notes"])),
        )


def _per_rank(
    samples: Sequence[int], seconds: Sequence[float], steps: int, batch: int
) -> tuple[float, ...]:
    """Samples per second of each rank, where shares of a batch differ by one: as if they were
    alike, or by what each had, whichever makes ranks more alike. A step whose time does not depend
    on its samples does not make the rank with fewer of them a slow one.

    Example:
        >>> _per_rank([3, 3, 2], [1.0, 1.0, 1.0], 3, 8)
        (8.0, 8.0, 8.0)
        >>> _per_rank([3, 3, 2], [3.0, 3.0, 2.0], 3, 8)
        (3.0, 3.0, 3.0)
    """
    alike = tuple(batch / len(samples) * steps / s for s in seconds)
    own = tuple(n * steps / s for n, s in zip(samples, seconds, strict=True))
    return alike if min(own) <= 0 or max(alike) / min(alike) <= max(own) / min(own) else own


def _timed(before: Mapping[str, StageTimes], after: Mapping[str, StageTimes]) -> dict[str, Timed]:
    """What each stage took for one sample between two looks at a board."""
    since = {name: times - before.get(name, StageTimes()) for name, times in after.items()}
    samples = since["python"].samples if "python" in since else 0
    if samples <= 0:
        return {}
    return {
        name: Timed(
            t.cpu_seconds / samples,
            t.wall_seconds / samples,
            t.bytes / samples,
            t.removable,
            tuple(sorted(t.contains)),
        )
        for name, t in since.items()
        if t.calls
    }


class _Drain:
    """Takes batches from a reader in a thread, at most as many as were allowed, and throws them
    away.
    """

    def __init__(self, reader: Iterator[Any]) -> None:
        self._reader = reader
        self._allowed = threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._error: BaseException | None = None

    def _go(self) -> None:
        while True:
            self._allowed.acquire()
            if self._stop:
                return
            try:
                next(self._reader)
            except BaseException as error:
                self._error = error
                return

    def allow(self) -> None:
        """One more. What the reader raised is raised here."""
        if self._error is not None:
            raise self._error
        self._allowed.release()

    def __enter__(self) -> _Drain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._allowed.release()
        self._thread.join()


def measure(
    run: RunView, arms: Mapping[str, Arm], rounds: int = 3, seconds: float = 1.5
) -> dict[str, list[ArmResult]]:
    """Measure arms in turns. All ranks call it; the run is afterwards as it was.

    Args:
        run: what ``distribute`` gave, between two steps.
        arms: by name.
        rounds: how often each is measured; every other round goes through them backwards.
        seconds: of one window.

    Returns:
        Name -> one result per round, the same on every rank.

    Example:
        >>> found = measure(run, {"synthetic": Arm("synthetic"),  # doctest: +SKIP
        ...     "real": Arm("real")})
        >>> found["real"][0].samples_per_second  # doctest: +SKIP
        1520.4
    """
    found: dict[str, list[ArmResult]] = {name: [] for name in arms}
    with Bench(run) as bench:
        for i in range(rounds):
            for name in list(arms) if i % 2 == 0 else reversed(list(arms)):
                found[name].append(bench.window(arms[name], seconds))
    return found
